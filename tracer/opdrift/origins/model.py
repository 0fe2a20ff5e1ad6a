"""What is known of one independent difference between two runs, before its size and cause."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from opdrift.records import ArgumentDifference, DivergenceKind, Leaf, Sides

#: How an origin shows.
#: "leaf": a leaf differs. "op": equal inputs, other outputs. "factory": a constant made by the program differs.
#: "hidden-write": a leaf's content changed without an op. "written": an op wrote into a tensor that the
#: other run left alone. "placed": the same op wrote the same content, but elsewhere in a larger tensor. "other-source": the runs read different tensors that both have. "region": one run
#: has ops between that the other has not. "gathered": the same of a parameter that is gathered from shards. "settings": inputs differ already, and so do the arguments.
#: "nonfinite": NaN or infinite values appear although none came in. "amplified": the output differs by
#: more than the inputs explain. "padding": of one sample a view takes what is valid in one run, and padding in the
#: other. "cancelled": the inputs differ by more than rounding, and what comes of them does not. "compiled": what a
#: compiled region returns differs by more than rounding and its inputs explain. "replaced": one run put another tensor in the place of a
#: parameter, with no op.
Story = Literal[
    "leaf",
    "op",
    "factory",
    "hidden-write",
    "written",
    "placed",
    "other-source",
    "region",
    "gathered",
    "settings",
    "nonfinite",
    "amplified",
    "padding",
    "cancelled",
    "compiled",
    "replaced",
]

NO_LEAF: Final[Sides[Leaf | None]] = Sides(None, None)
NO_OPS: Final[Sides[tuple[int, ...]]] = Sides((), ())


@dataclass(frozen=True, slots=True)
class Origin:
    """One independent difference.

    Attributes:
        kind: As in the diagnosis.
        story: How it shows.
        op: Index of the op that stands for it, per side.
        row: Row of the pair at which it was seen; -1 for a result that no pair reads.
        values: Values that differ, per side.
        slot: Position of the differing value: among the outputs for an "op", else among the inputs.
        leaf: Its row in the table of leaves, per side.
        members: Further leaves that differ in the same way.
        settings: Arguments that differ.
        region: Ops that only one side has between here and what is common, per side.
        boundary: The values that those ops start from, per side.
        on_right: The right op is the one to show: it did what the left one did not.
        inputs_match: Whether all inputs are known equal; None where not all are known.
        order: Where it stands in the left run.
        alike: Ops at which the same setting shows again, as `op 12`.
        also: The origins there, for which this one stands as well.
    """

    kind: DivergenceKind
    story: Story
    op: Sides[int | None]
    row: int
    values: Sides[int | None]
    slot: int | None
    order: float
    leaf: Sides[Leaf | None] = NO_LEAF
    members: tuple[Sides[Leaf | None], ...] = ()
    settings: tuple[ArgumentDifference, ...] = ()
    region: Sides[tuple[int, ...]] = NO_OPS
    boundary: Sides[tuple[int, ...]] = NO_OPS
    inputs_match: bool | None = None
    on_right: bool = False
    alike: tuple[str, ...] = ()
    also: tuple[Origin, ...] = ()

    def grouped(self, members: tuple[Sides[Leaf | None], ...]) -> Origin:
        """The same origin, standing for more leaves."""
        return replace(self, members=members)

    @property
    def shown(self) -> tuple[int, int] | None:
        """(0 for left or 1 for right, op) of the op that stands for it."""
        sides = [(0, self.op.left), (1, self.op.right)]
        if self.on_right:
            sides.reverse()
        return next(((number, op) for number, op in sides if op is not None), None)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the leaf and its members: the left one, else the right one."""
        pairs = [self.leaf, *self.members]
        found = [(p.left or p.right) for p in pairs]
        return tuple(dict.fromkeys(leaf.name for leaf in found if leaf is not None and leaf.name))
