"""Put the ops of two runs in one order, and say of each whether it agrees: what the op views show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from opdrift.align import Maps, Pairing, align
from opdrift.compare import difference
from opdrift.contents import Contents
from opdrift.pairs import UNKNOWN, Compared
from opdrift.records import Diagnosis, Sides
from opdrift.samples import SampleContents
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace

Mark = Literal["=", "x", "~", "-", "+", "?"]

#: What each mark means, for the line below a view.
MEANINGS: Final[dict[Mark, str]] = {
    "=": "equal",
    "x": "a difference begins here",
    "~": "inherited",
    "-": "left only",
    "+": "right only",
    "?": "not known",
}
TONES: Final[dict[Mark, str]] = {
    "=": "plain",
    "x": "bad",
    "~": "strong",
    "-": "bad",
    "+": "good",
    "?": "quiet",
}
MARKS: Final[tuple[Mark, ...]] = ("=", "x", "~", "-", "+", "?")
_EQUAL, _BEGINS, _INHERITED, _LEFT, _RIGHT, _UNKNOWN = range(6)


@dataclass(frozen=True, slots=True)
class Row:
    """An op of either run, or of both."""

    left: int | None
    right: int | None
    mark: Mark


class Rows:
    """All ops of both runs, in the left run's order; what only the right run has stands before what follows it.

    Attributes:
        left: Per row the left op's index, -1 if it has none.
        right: Per row the right op's index, -1 if it has none.
        codes: Per row its mark, as a place in `MARKS`.
        focus: The row of the first divergence; None where it is in no op.
        leaf: Where the first divergence is a parameter or an input: its name, and `focus` the first op that reads it.
        compared: What is equal in the pairs, and what differs.
    """

    def __init__(self, compared: Compared, diagnosis: Diagnosis) -> None:
        self.compared = compared
        self.traces = (compared.left.trace, compared.right.trace)
        self._contents = (compared.left, compared.right)
        self.left, self.right = _merged(compared.pairing)
        self.codes = _codes(compared, self.left, self.right)
        for origin in diagnosis.origins:
            row = self.at(origin.seq)
            if row is not None:
                self.codes[row] = _BEGINS
        shown = diagnosis.first or diagnosis.first_bitwise
        self.focus = None if shown is None else self.at(shown.seq)
        self.leaf = None if shown is None or shown.kind != "leaf" else shown.name

    def __len__(self) -> int:
        return len(self.left)

    def __getitem__(self, row: int) -> Row:
        left, right = int(self.left[row]), int(self.right[row])
        return Row(
            None if left < 0 else left, None if right < 0 else right, MARKS[int(self.codes[row])]
        )

    def marks(self) -> list[Mark]:
        """The mark of every row."""
        return [MARKS[code] for code in self.codes.tolist()]

    def size(self, row: int) -> float | None:
        """How far apart a row's first output is that differs and can be told; None where none can."""
        left, right = int(self.left[row]), int(self.right[row])
        if left < 0 or right < 0:
            return None
        outputs = (
            t.ops.outputs[i].tolist() for t, i in zip(self.traces, (left, right), strict=True)
        )
        for a, b in zip(*outputs, strict=False):
            one, other = self._contents[0].fingerprint(a), self._contents[1].fingerprint(b)
            relative = None if one is None or other is None else difference(one, other).relative
            if relative:
                return relative
        return None

    def at(self, seqs: Sides[int | None]) -> int | None:
        """The row of an op, by its number in the run that has it; None where no op has it."""
        for seq, trace, column in zip(
            (seqs.left, seqs.right), self.traces, (self.left, self.right), strict=True
        ):
            index = None if seq is None else trace.index_of(seq)
            if index is not None:
                return int(np.flatnonzero(column == index)[0])
        return None


def rows_of(
    left: Trace,
    right: Trace,
    diagnosis: Diagnosis,
    *,
    samples: tuple[int, int] | None = None,
    maps: Maps = (),
) -> Rows:
    """Align two traces as the diagnosis did, and mark every op; with `samples`, by one sample of each batch."""
    contents: tuple[Contents, Contents] = (
        (Contents(left), Contents(right))
        if samples is None
        else (SampleContents(left, samples[0]), SampleContents(right, samples[1]))
    )
    return Rows(Compared(*contents, align(*contents, maps=maps)), diagnosis)


def _merged(pairing: Pairing) -> tuple[Ints, Ints]:
    lone = np.flatnonzero(pairing.left_of < 0)
    order = np.argsort(pairing.right, kind="stable")
    following = np.searchsorted(pairing.right[order], lone)
    ends = np.append(pairing.left[order], len(pairing.right_of))
    keys = np.concatenate(
        [np.arange(len(pairing.right_of), dtype=np.float64), ends[following] - 0.5]
    )
    left = np.concatenate(
        [np.arange(len(pairing.right_of), dtype=np.int64), np.full(len(lone), -1, np.int64)]
    )
    right = np.concatenate([pairing.right_of, lone])
    placed = np.argsort(keys, kind="stable")
    return left[placed], right[placed]


def _codes(compared: Compared, left: Ints, right: Ints) -> npt.NDArray[np.int8]:
    codes = np.full(len(left), _EQUAL, np.int8)
    codes[right < 0] = _LEFT
    codes[left < 0] = _RIGHT
    both = np.flatnonzero((left >= 0) & (right >= 0))
    pairs = compared.row_of_left[left[both]]
    blank = np.zeros(len(compared.pairing.left), np.bool_)
    blank[compared.outputs.pair[compared.outputs.status == UNKNOWN]] = True
    codes[both[blank[pairs]]] = _UNKNOWN
    codes[both[compared.tainted[pairs]]] = _INHERITED
    return codes
