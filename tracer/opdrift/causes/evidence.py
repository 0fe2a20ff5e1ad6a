"""What a cause may look at, and the words in which it speaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from opdrift.case import Case, Side
from opdrift.compare import is_cast
from opdrift.origins.kinds import computes
from opdrift.origins.leaves import leaf_pairs
from opdrift.origins.model import Origin
from opdrift.origins.search import random_draws
from opdrift.pairs import EQUAL
from opdrift.records import (
    COMPILED,
    ArgumentDifference,
    Call,
    Cause,
    Confidence,
    EnvironmentDifference,
    Leaf,
    Mark,
    Op,
    Sides,
)
from opdrift.sizes import Size
from opdrift.tokens import base
from opdrift.wording import counted as counted
from opdrift.wording import some as some

SIDES = ("left", "right")

T = TypeVar("T")


class Shared:
    """Facts about the whole comparison, found once."""

    def __init__(self, case: Case, environment: Sequence[EnvironmentDifference]) -> None:
        self.case = case
        self.environment = tuple(environment)
        self._once: dict[Callable[[Case], Any], Any] = {}

    def once(self, find: Callable[[Case], T]) -> T:
        """What a function or a class says of both traces; asked once."""
        if find not in self._once:
            self._once[find] = find(self.case)
        found: T = self._once[find]
        return found

    @cached_property
    def draws(self) -> Sides[list[int]]:
        """Ops of each side that draw random numbers."""
        return random_draws(self.case)

    @cached_property
    def trains(self) -> Sides[bool]:
        """Whether each run has a backward pass."""
        a, b = self.case.left.trace.ops.phase, self.case.right.trace.ops.phase
        return Sides(bool((a == 1).any()), bool((b == 1).any()))

    @cached_property
    def compiled(self) -> Sides[bool]:
        """Whether each run has ops that compiled code called, or compiled something."""
        return Sides(_is_compiled(self.case.left), _is_compiled(self.case.right))

    @cached_property
    def model_leaves(self) -> tuple[int, int, list[str]]:
        """How many parameters and buffers both runs have, how many differ, and the names of those that are equal.

        What is another one in another type is neither.
        """
        pairs = {
            pair.leaf.left.name: pair.leaf
            for pair in reversed(list(leaf_pairs(self.case)))
            if pair.leaf.left.kind in ("parameter", "buffer")
        }
        if not pairs:
            return 0, 0, []
        left = np.array([pair.left.value for pair in pairs.values()])
        right = np.array([pair.right.value for pair in pairs.values()])
        status = self.case.compared.status(left, right)
        equal = [n for n, found in zip(pairs, status.tolist(), strict=True) if found == EQUAL]
        cast = sum(self.are_casts(pairs[name]) for name in pairs.keys() - set(equal))
        return (
            len(pairs),
            len(pairs) - len(equal) - cast,
            [n for n in reversed(pairs) if n in set(equal)],
        )

    def are_casts(self, pair: Sides[Leaf] | Sides[Leaf | None]) -> bool:
        """Whether a tensor is the other one in another type."""
        if pair.left is None or pair.right is None:
            return False
        a = self.case.left.fingerprint(pair.left.value)
        b = self.case.right.fingerprint(pair.right.value)
        if a is None or b is None or (a.code, a.fp8) == (b.code, b.fp8):
            return False
        return is_cast(a, b) is True or is_cast(b, a) is True


def _is_compiled(side: Side) -> bool:
    flagged = bool((side.trace.ops.flags & COMPILED).any())
    return flagged or any(mark.kind == "compile" for mark in side.trace.marks)


@dataclass(frozen=True, slots=True)
class Evidence:
    """One origin with its size and what is shared."""

    origin: Origin
    size: Size
    shared: Shared

    @property
    def case(self) -> Case:
        """Both traces."""
        return self.shared.case

    @property
    def sides(self) -> tuple[tuple[str, Side, int | None], ...]:
        """("left" or "right", the side, its op), for both."""
        op = self.origin.op
        return (("left", self.case.left, op.left), ("right", self.case.right, op.right))

    @property
    def any_op(self) -> tuple[str, Side, int] | None:
        """The op that stands for the origin, on its side."""
        shown = self.origin.shown
        if shown is None:
            return None
        name, side, _ = self.sides[shown[0]]
        return name, side, shown[1]

    @property
    def lacks_result(self) -> bool:
        """Whether the origin is a result that only one of the runs has."""
        values = self.origin.values
        return self.origin.row < 0 and (values.left is None) != (values.right is None)

    @property
    def is_region(self) -> bool:
        """Whether the op of the origin is a call of a compiled region."""
        return any(op in side.regions.at for _, side, op in self.sides if op is not None)

    def op(self) -> Op | None:
        """That op, expanded."""
        found = self.any_op
        return None if found is None else found[1].op(found[2])

    def consumer(self) -> Sides[int | None]:
        """The ops of the pair at which the origin was seen."""
        row = self.origin.row
        if row < 0:
            return Sides(None, None)
        return Sides(int(self.case.pairing.left[row]), int(self.case.pairing.right[row]))

    def ops_of(self, number: int) -> list[int]:
        """Ops that only one side has here, or its op of the origin."""
        region = (self.origin.region.left, self.origin.region.right)[number]
        own = (self.origin.op.left, self.origin.op.right)[number]
        return list(region) or ([own] if own is not None else [])

    def calls(self) -> Sides[Call | None]:
        """The module calls in which the origin, or what reads it, ran."""
        reader = self.consumer()
        left = self.origin.op.left if self.origin.op.left is not None else reader.left
        right = self.origin.op.right if self.origin.op.right is not None else reader.right
        return Sides(
            None if left is None else self.case.left.call(left),
            None if right is None else self.case.right.call(right),
        )

    def dtypes(self) -> Sides[str | None]:
        """Types of the values that differ."""
        values = self.origin.values
        return Sides(
            None if values.left is None else self.case.left.trace.meta(values.left).dtype,
            None if values.right is None else self.case.right.trace.meta(values.right).dtype,
        )

    def marks(self, accept: Callable[[Mark], bool]) -> Iterable[tuple[str, Mark]]:
        """("left" or "right", mark) of the marks that are accepted."""
        for name, side, _ in self.sides:
            for mark in side.trace.marks:
                if accept(mark):
                    yield name, mark


# ---- words -------------------------------------------------------------------------------------------


def cause(
    slug: str, confidence: Confidence, summary: str, evidence: Iterable[str], remedy: str
) -> Cause:
    """A cause; empty and repeated evidence is dropped, and what is true of both runs is said once."""
    told = dict.fromkeys(each for each in evidence if each)
    return Cause(slug, confidence, summary, _once(list(told)), remedy)


def _once(evidence: list[str]) -> tuple[str, ...]:
    left, right = ("left: ", "right: ")
    both = {e.removeprefix(left) for e in evidence if e.startswith(left)}
    both &= {e.removeprefix(right) for e in evidence if e.startswith(right)}
    found = []
    for each in evidence:
        if each.startswith(right) and each.removeprefix(right) in both:
            continue
        fact = each.removeprefix(left)
        found.append(f"both: {fact}" if each.startswith(left) and fact in both else each)
    return tuple(found)


def setting(s: ArgumentDifference) -> str:
    """An argument that differs, in words: `eps: 1e-05 against 1e-06`."""
    return f"{s.name}: {s.left if s.left is not None else 'absent'} against {s.right if s.right is not None else 'absent'}"


def scope(path: str) -> str:
    """A module path in words."""
    return f"module {path}" if path.isdecimal() else path or "the root module"


def tally(items: Iterable[Any]) -> list[tuple[str, int]]:
    """Items with how often each occurs, most frequent first."""
    counts: dict[str, int] = {}
    for item in items:
        counts[str(item)] = counts.get(str(item), 0) + 1
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))


def main_ops(side: Side, ops: Sequence[int]) -> list[int]:
    """The ops of a stretch that are worth a word: those that compute, if any do."""
    return [op for op in ops if computes(side, op)] or list(ops)


def op_names(side: Side, ops: Sequence[int], *, computing: bool = True) -> str:
    """What a stretch of ops does, in words: `bmm, _softmax, bmm`."""
    chosen = main_ops(side, ops) if computing else list(ops)
    short = ["compiled code" if op in side.regions.at else base(side.name(op)) for op in chosen]
    return some(short, 8)
