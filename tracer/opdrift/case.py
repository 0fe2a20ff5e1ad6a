"""Everything about two traces that the search for origins and the causes share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from opdrift.align import Maps, Pairing, align
from opdrift.bounds import OpViews
from opdrift.contents import Contents
from opdrift.fetched import Fetched, fetched
from opdrift.gradients import Gradients
from opdrift.leaves import LeafTable
from opdrift.pairs import Compared
from opdrift.picks import AttentionRegion, Picks, Settings
from opdrift.provenance import Lineage
from opdrift.records import ArgumentDifference, Call, Op, Pick, Sides
from opdrift.regions import Regions
from opdrift.replacements import Replacement, replacements
from opdrift.samples import OneSample, SampleContents, SampleViews
from opdrift.settings import argument_differences, describe
from opdrift.starts import Starts
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.fingerprints import Fingerprint
from opdrift.tracefile.reader import Trace


class Side:
    """One trace with what is derived from it."""

    def __init__(self, contents: Contents, home: Ints) -> None:
        self.contents = contents
        self.trace: Trace = contents.trace
        self.home = home
        self.leaves = LeafTable(contents)
        self._ops: dict[int, Op] = {}

    def op(self, index: int) -> Op:
        """The op at an index, expanded."""
        found = self._ops.get(index)
        if found is None:
            found = self._ops[index] = self.trace.op(index)
        return found

    def name(self, index: int) -> str:
        """Name of the op at an index."""
        return self.trace.op_info(int(self.trace.ops.signature[index])).name

    def call(self, index: int) -> Call:
        """The module call an op belongs to; that of its forward op for a backward op."""
        return self.trace.calls[int(self.home[index])]

    def module(self, index: int) -> str:
        """The path of that call."""
        return self.call(index).path

    def seq(self, index: int) -> int:
        """Number of the op in the run."""
        return int(self.trace.ops.seq[index])

    def place(self, index: int) -> str:
        """An op in words: `op 12 (aten.mm.default) in fc at net.py:7 in forward`."""
        op = self.op(index)
        module = self.module(index)
        where = f" in {module}" if module else ""
        line = f" at {op.source}" if op.source else ""
        return f"op {op.seq} ({op.name}){where}{line}"

    def fingerprint(self, value: int) -> Fingerprint | None:
        """Of a value, or of one in the same state with the same content in the same order."""
        return self.contents.fingerprint(value)

    def nearest_fingerprint(self, value: int) -> Fingerprint | None:
        """Of a value, or of the largest one in the same state."""
        return self.contents.nearest_fingerprint(value)

    def nonfinite(self, value: int) -> int:
        """How many NaN and infinite elements a value holds, as far as that is known."""
        found = self.nearest_fingerprint(value)
        return 0 if found is None else found.nonfinite

    @cached_property
    def views(self) -> OpViews:
        """What the rounding bounds need of each op."""
        return SampleViews(self.one) if self.one is not None else OpViews(self.trace)

    @property
    def one(self) -> OneSample | None:
        """The sample that is looked at; None for the whole batch."""
        return self.contents.one if isinstance(self.contents, SampleContents) else None

    @cached_property
    def gradients(self) -> Gradients:
        """Which parameters its values update."""
        return Gradients(self.contents)

    @cached_property
    def lineage(self) -> Lineage:
        """Where contents came from."""
        return Lineage(self.trace)

    @cached_property
    def starts(self) -> Starts:
        """What the run starts from."""
        return Starts(self.contents, self.leaves, self.lineage)

    @cached_property
    def fetched(self) -> dict[str, Fetched]:
        """By name what a library brought in."""
        return fetched(self.trace)

    @cached_property
    def replaced(self) -> dict[int, Replacement]:
        """State -> the parameter that it came in the place of, with no op."""
        found = replacements(self.trace).values()
        states = self.contents.states.of
        return {int(states[r.after.value]): r for each in found for r in each}

    @cached_property
    def settings(self) -> Settings:
        """The flags in force at its ops."""
        return Settings(self.trace)

    @property
    def regions(self) -> Regions:
        """What of it ran compiled."""
        return self.contents.regions

    @cached_property
    def picks(self) -> Picks:
        """Which kernels its ops ran."""
        return Picks(self.trace)

    @property
    def attention(self) -> list[AttentionRegion]:
        """Attention calls that ran as several ops."""
        return self.picks.regions

    def pick(self, index: int | None) -> Pick | None:
        """Which kernel an op ran."""
        return None if index is None else self.picks.of(index)


@dataclass(frozen=True, slots=True)
class Case:
    """Two traces, paired."""

    left: Side
    right: Side
    pairing: Pairing
    compared: Compared

    @property
    def by_sample(self) -> bool:
        """Whether one sample of each batch is compared, not all of it."""
        return self.left.one is not None

    def sides(self) -> Sides[Side]:
        """Both sides."""
        return Sides(self.left, self.right)

    def settings(self, left: int, right: int) -> tuple[ArgumentDifference, ...]:
        """Arguments that differ between two ops, tensors given on one side only included."""
        a, b = self.left.op(left).signature, self.right.op(right).signature
        given = argument_differences(
            {**a.op.defaults, **dict(a.arguments)}, {**b.op.defaults, **dict(b.arguments)}
        )
        return (*self._asked_otherwise(left, right), *given)

    def _asked_otherwise(self, left: int, right: int) -> tuple[ArgumentDifference, ...]:
        """What two collectives were asked for otherwise, though no argument of the op can be read for it."""
        row = int(self.compared.row_of_left[left])
        names = self.compared.asked_otherwise.get(row, ())
        if not names or int(self.pairing.right_of[left]) != right:
            return ()
        one, other = (
            asked[side.seq(op)]
            for asked, side, op in zip(
                self.compared.asked, (self.left, self.right), (left, right), strict=True
            )
        )
        return tuple(ArgumentDifference(n, describe(one[n]), describe(other[n])) for n in names)


def build_case(
    left: Trace, right: Trace, maps: Maps, *, samples: tuple[int, int] | None = None
) -> Case:
    """Align two traces and compare their pairs; with `samples`, as seen by one sample of each batch.

    Raises:
        IncomparableTracesError: A trace has no record of the sample.
    """
    if samples is not None:
        a: Contents = SampleContents(left, samples[0])
        b: Contents = SampleContents(right, samples[1])
    else:
        a = Contents(left)
        b = a if right is left else Contents(right)
    pairing = align(a, b, maps=maps)
    return Case(
        Side(a, pairing.home[0]), Side(b, pairing.home[1]), pairing, Compared(a, b, pairing)
    )
