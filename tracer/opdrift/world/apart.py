"""Where two ranks' contents came apart: back from what differs to what made it of the same, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from opdrift.asked import asked_of
from opdrift.causes.optimizers import numbers_in_words
from opdrift.contents import Contents
from opdrift.origins.updates import step_in
from opdrift.provenance import Lineage
from opdrift.provenance.ops import DRAWS, operator
from opdrift.provenance.words import made_words
from opdrift.records import Op
from opdrift.replacements import replaced_words
from opdrift.settings import argument_differences
from opdrift.wording import some
from opdrift.world.collectives import World
from opdrift.world.replicas import Replicas

#: So many ops are followed back.
_BACK: Final = 32


@dataclass(frozen=True, slots=True)
class Apart:
    """How two contents came apart.

    Attributes:
        told: In words.
        replaced: The ranks that put another tensor in the place of the parameter.
        path: The values that differ on the first of the ranks, back to where that begins.
        ops: What made these; None where no recorded op did.
        called: What that op was given otherwise beside tensors, in words; empty where it is the same.
    """

    told: tuple[str, ...]
    replaced: tuple[int, ...] = ()
    path: tuple[int, ...] = ()
    ops: tuple[Op | None, ...] = ()
    called: str = ""


def came_apart(
    world: World, replicas: Replicas, ranks: Sequence[int], values: Sequence[int], what: str
) -> Apart:
    """Back from two contents that differ to the ops that read the same and made something else.

    Args:
        world: All ranks.
        replicas: What they hold in common.
        ranks: Two of them.
        values: A value of each.
        what: What these are, in words.
    """
    traces = [world.traces[rank] for rank in ranks]
    contents = [replicas.contents(rank) for rank in ranks]
    path: list[int] = []
    for _ in range(_BACK):
        path.append(values[0])
        replaced = _replaced(world, replicas, dict(zip(ranks, values, strict=True)))
        if (
            len(replaced.told) == 1
        ):  # where all replaced it, what they replaced it by came apart before
            return replaced
        makers = [int(c.maker[v]) for c, v in zip(contents, values, strict=True)]
        ops = [t.op(m) if m >= 0 else None for t, m in zip(traces, makers, strict=True)]
        one, other = ops
        if one is None or other is None or one.name != other.name:
            told = (
                f"on rank {r}, {what} {last_written(op)}" for r, op in zip(ranks, ops, strict=True)
            )
            return Apart(tuple(told), (), tuple(path), (one, other))
        further = next(
            (
                (a, b)
                for a, b in zip(one.inputs, other.inputs, strict=False)
                if a and b and _differ(contents, a, b)
            ),
            None,
        )
        if further is None:
            called = _called_otherwise(world, {ranks[0]: one, ranks[1]: other})
            did = called or (
                "drew other numbers on each"
                if operator(one.name) in DRAWS
                else "made other contents of what is equal as far as it is known; a write that no op made may lie before it"
            )
            said = f"{one.name} (op {one.seq} on rank {ranks[0]}, op {other.seq} on rank {ranks[1]}){at(one)} {did}"
            named = f"{one.name} {called}" if called else ""
            return Apart((said,), (), tuple(path), (one, other), named)
        values = list(further)
        what = f"what {one.name} (op {one.seq} on rank {ranks[0]}, {other.seq} on rank {ranks[1]}) read"
    return Apart(())


def _replaced(world: World, replicas: Replicas, values: Mapping[int, int]) -> Apart:
    """How another tensor came in the place of a parameter, on each of these ranks that holds it."""
    told: dict[int, str] = {}
    for rank, value in values.items():
        found = replicas.replacement(rank, value)
        if found is not None:
            made = made_words(Lineage(world.traces[rank]).of(value))
            told[rank] = (
                f"on rank {rank}, {'; '.join(replaced_words(world.traces[rank], found, made))}"
            )
    return Apart(tuple(told.values()), tuple(told))


def last_written(op: Op | None) -> str:
    """By what a content was written, in words."""
    if op is None:
        return "has a content that no recorded op wrote"
    numbers = numbers_in_words(step_in(op.signature))
    return f"was last written by {op.name}{numbers} (op {op.seq}){at(op)}"


def _called_otherwise(world: World, ops: Mapping[int, Op]) -> str:
    """What two ranks gave to one op beside tensors, in words; empty where it is the same."""
    (one, left), (other, right) = (
        (rank, {**dict(op.signature.arguments), **asked_of(world.traces[rank]).get(op.seq, {})})
        for rank, op in ops.items()
    )
    said = [
        f"{d.name}: {d.left} on rank {one} and {d.right} on rank {other}"
        for d in argument_differences(left, right)
    ]
    return f"was called with other arguments: {some(said, 3)}" if said else ""


def _differ(contents: Sequence[Contents], one: int, other: int) -> bool:
    from_left, from_right = (
        c.nearest_fingerprint(v) for c, v in zip(contents, (one, other), strict=True)
    )
    return from_left is not None and from_right is not None and from_left.key != from_right.key


def at(op: Op) -> str:
    """The line of an op, in words, where it is known."""
    return f" at {op.source}" if op.source is not None else ""
