"""The list of all ops of both runs as columns: what the page's script unpacks into typed arrays.

Texts are interned once for both runs, so that equal numbers are equal texts; numbers of ops and values become
differences to their neighbours, which compress to next to nothing. A million ops come to a few megabytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from opdrift.leaves import BEFORE
from opdrift.records import Argument, Diagnosis, Pick, Sides
from opdrift.render.html.markup import shown
from opdrift.render.html.picked import lines, together, what
from opdrift.render.rows import MARKS, MEANINGS, Rows
from opdrift.render.trace_json import flag_words
from opdrift.render.trace_text import argument_text, holds_tensor
from opdrift.render.words import name
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace

Column = npt.NDArray[Any]

#: Ops whose difference is measured, 0.2 ms each: of more, an even choice and those around what counts.
_MEASURED: Final = 4_000
#: Rows on each side of what counts that are measured all the same.
_AROUND: Final = 40


@dataclass(frozen=True, slots=True)
class OpList:
    """The ops of two runs, ready to be written into a page.

    Attributes:
        facts: What the script needs besides the columns, as JSON.
        columns: Name -> numbers: `left`, `right`, `lone`, `mark` and `size` a row, `left.*` and `right.*` an op.
        differing: How many ops of both runs differ.
        measured: Of how many of them the size was looked for.
        plotted: Of how many a plot can show it: finite, and above zero.
    """

    facts: Mapping[str, Any]
    columns: Mapping[str, Column]
    differing: int
    measured: int
    plotted: int


class _Strings:
    """Texts by number, each once; those of names are cut and escaped as everywhere."""

    def __init__(self, folder: str) -> None:
        self.texts: list[str] = [""]
        self._numbers = {"": 0}
        self._folder = folder

    def number(self, text: str) -> int:
        """Which text it is."""
        text = shown(text, self._folder)
        found = self._numbers.get(text)
        if found is None:
            found = self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return found

    def numbers(self, texts: Iterable[str]) -> list[int]:
        """The same of many."""
        return [self.number(text) for text in texts]


def marked_rows(rows: Rows, diagnosis: Diagnosis) -> list[int]:
    """The rows of origins and amplifiers, the first divergence first."""
    seqs = [
        *(one.seq for one in (diagnosis.first, diagnosis.first_bitwise) if one is not None),
        *(origin.seq for origin in diagnosis.origins),
        *(amplifier.seq for amplifier in diagnosis.amplifiers),
    ]
    found = dict.fromkeys(map(rows.at, seqs))
    return [row for row in found if row is not None]


def op_list(
    rows: Rows, diagnosis: Diagnosis, picks: Sides[Mapping[int, Pick]], *, folder: str = ""
) -> OpList:
    """All rows, with what each op was, where, on what, and how far the runs are apart there.

    Args:
        rows: Both runs in one order.
        diagnosis: What was found, for the rows that are marked.
        picks: Op index -> which implementation it ran, of each run.
        folder: As in `markup.written`.
    """
    strings = _Strings(folder)
    sizes, measured, differing = _sizes(rows, diagnosis)
    columns: dict[str, Column] = {
        "left": _steps(rows.left),
        "right": _steps(rows.right),
        "lone": (1 * (rows.right < 0) + 2 * (rows.left < 0)).astype(np.uint8),
        "mark": rows.codes.astype(np.uint8),
        "size": sizes,
    }
    facts: dict[str, Any] = {}
    sides = zip(("left", "right"), rows.traces, (picks.left, picks.right), strict=True)
    for word, trace, picked in sides:
        facts[word], found = _side(trace, strings, picked)
        columns |= {f"{word}.{key}": column for key, column in found.items()}
    return OpList(
        facts={
            "rows": len(rows),
            "marks": [[mark, MEANINGS[mark]] for mark in MARKS],
            "focus": rows.focus,
            "lines": _lines(rows, diagnosis),
            "amplifiers": _amplifiers(rows, diagnosis),
            "together": [[each.left, each.right] for each in together(rows, picks)],
            **facts,
            "strings": strings.texts,
        },
        columns=columns,
        differing=differing,
        measured=measured,
        plotted=int(np.count_nonzero(np.isfinite(sizes) & (sizes > 0) & (rows.left >= 0))),
    )


def _steps(ops: Ints) -> Column:
    """Each row's op as the step from that of the row before; a row without one steps by 0."""
    at = np.maximum.accumulate(np.where(ops >= 0, np.arange(len(ops)), 0))
    return np.diff(ops[at], prepend=0).astype(np.int32)


def _sizes(rows: Rows, diagnosis: Diagnosis) -> tuple[npt.NDArray[np.float64], int, int]:
    """Relative difference of each row, NaN where it is not known; how many were looked at, and how many differ."""
    sizes = np.full(len(rows), np.nan)
    differs = (rows.codes == MARKS.index("x")) | (rows.codes == MARKS.index("~"))
    candidates = np.flatnonzero(differs)
    chosen = candidates
    if len(candidates) > _MEASURED:
        wanted = np.zeros(len(rows), np.bool_)
        wanted[candidates[:: -(-len(candidates) // _MEASURED)]] = True
        for row in marked_rows(rows, diagnosis)[: _MEASURED // _AROUND]:
            wanted[max(0, row - _AROUND) : row + _AROUND + 1] = True
        chosen = np.flatnonzero(wanted & differs)
    for row in chosen.tolist():
        found = rows.size(row)
        if found is not None:
            sizes[row] = found
    for (
        origin
    ) in diagnosis.origins:  # known of more than the list can measure: of regions, of views
        at, known = rows.at(origin.seq), origin.relative_difference
        if at is not None and known and origin.kind in ("op", "structure") and np.isnan(sizes[at]):
            sizes[at] = known
    return sizes, len(chosen), len(candidates)


def _lines(rows: Rows, diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """What the plot marks by a line: the first bitwise and the first material divergence."""
    bitwise, material = diagnosis.first_bitwise, diagnosis.first
    first = None if bitwise is None else rows.at(bitwise.seq)
    beyond = rows.at(material.seq) if material is not None and material.material else None
    if first is not None and first == beyond:
        return [{"row": first, "says": "first divergence", "material": True}]
    found = ((first, "first bitwise", False), (beyond, "first beyond rounding", True))
    return [
        {"row": row, "says": words, "material": material}
        for row, words, material in found
        if row is not None
    ]


def _amplifiers(rows: Rows, diagnosis: Diagnosis) -> list[dict[str, Any]]:
    found = []
    for each in diagnosis.amplifiers:
        row = rows.at(each.seq)
        if row is not None and np.isfinite(each.output_difference):
            found.append({"row": row, "size": each.output_difference})
    return found


def _side(
    trace: Trace, strings: _Strings, picked: Mapping[int, Pick]
) -> tuple[dict[str, Any], dict[str, Column]]:
    """One run's ops: texts by number, and one number an op.

    `inputs` says how many values each op read, `from` lists where each came from.
    """
    ops, number = trace.ops, strings.number
    signatures, signature = _distinct(ops.signature)
    paths, path = _distinct(trace.call_columns.path[ops.call])
    sources, source = _distinct(ops.source)
    states, state = _distinct((ops.flags << 1) | ops.phase)
    layouts, output = _distinct(_outputs(trace))
    texts, pick = _picks(trace, picked)
    lengths, made = _inputs(trace, strings)
    known = [trace.signature(s) for s in signatures]
    facts = {
        "ops": len(ops),
        "names": [number(name(s.op.name)) for s in known],
        "arguments": [number(_arguments(s.arguments)) for s in known],
        "paths": [number(name(trace.call_name(p)[0])) for p in paths],
        "sources": [number(str(trace.source(s) or "")) for s in sources],
        "states": [number(", ".join(["backward" if s & 1 else "forward", *flag_words(s >> 1)])) for s in states],
        "outputs": [number(str(trace.meta_of(m)) if m else "") for m in layouts],
        "kernels": [number(kernel) for kernel, _ in texts],
        "picks": [strings.numbers(said) for _, said in texts],
    }  # fmt: skip
    columns = {
        "seq": np.diff(ops.seq, prepend=0).astype(np.int32),
        "signature": signature,
        "path": path,
        "call": _small(trace.call_columns.number[ops.call]),
        "source": source,
        "state": state,
        "output": output,
        "pick": pick,
        "inputs": _small(lengths),
        "from": made,
    }
    return facts, columns


def _distinct(numbers: Ints) -> tuple[list[int], Column]:
    """The numbers that occur, and for each place which of them."""
    found, places = np.unique(numbers, return_inverse=True)
    return found.tolist(), _small(places)


def _picks(
    trace: Trace, picked: Mapping[int, Pick]
) -> tuple[list[tuple[str, tuple[str, ...]]], Column]:
    """What tells each pick from others and what is said of it, nothing first; and which one each op has."""
    texts: dict[tuple[str, tuple[str, ...]], int] = {("", ()): 0}
    column = np.zeros(len(trace.ops), np.int64)
    for index, chosen in picked.items():
        op = trace.op_info(int(trace.ops.signature[index])).name
        said = (" ".join(what(chosen)), tuple(lines(chosen, op)))
        column[index] = texts.setdefault(said, len(texts))
    return list(texts), _small(column)


def _outputs(trace: Trace) -> Ints:
    """The layout of each op's first output, 0 where it has none."""
    outputs = trace.ops.outputs
    first = np.zeros(len(trace.ops), np.int64)
    some = np.flatnonzero(np.diff(outputs.offsets))
    first[some] = outputs.values[outputs.offsets[some]]
    return np.where(first > 0, trace.values.meta[first], 0)


def _inputs(trace: Trace, strings: _Strings) -> tuple[Ints, Column]:
    """How many inputs each op has; and each as the step back to the op that made it, or minus a leaf's text.

    0 stands for what is neither: a value without a name that no op made.
    """
    inputs = trace.ops.inputs
    maker = trace.producer[inputs.values]
    back = inputs.rows() - maker
    leaves = np.zeros(len(trace.values.storage), np.int64)
    for leaf in trace.leaves:
        if leaf.name and (leaf.when in BEFORE or leaf.when == "changed"):
            leaves[leaf.value] = leaves[leaf.value] or strings.number(name(leaf.name))
    found = np.where((maker >= 0) & (back > 0), back, -leaves[inputs.values])
    return np.diff(inputs.offsets), found.astype(np.int32)


def _arguments(arguments: Sequence[tuple[str, Argument]]) -> str:
    """What is no tensor, as `opdrift show` writes it."""
    return ", ".join(
        f"{name(key)}={argument_text(value)}" for key, value in arguments if not holds_tensor(value)
    )


def _small(numbers: Ints) -> Column:
    """The same in as few bytes as hold the largest."""
    largest = int(numbers.max(initial=0))
    width = np.uint8 if largest < 1 << 8 else np.uint16 if largest < 1 << 16 else np.uint32
    return numbers.astype(width)
