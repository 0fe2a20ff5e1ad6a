"""What comparing costs grows with the length of the traces, not with its square: counted in calls, which are always the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from opdrift.align import align
from opdrift.align.sequence import match
from opdrift.case import build_case
from opdrift.contents import Contents
from opdrift.diagnose import diff
from opdrift.flow import Behind, ancestry
from opdrift.testing import Builder, trace
from opdrift.tracefile.reader import Trace


def calls_of(run: Callable[[], Any]) -> int:
    """How many functions a run calls, those of the interpreter included."""
    count = 0

    def called(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def growth_of(run: Callable[[int], Callable[[], Any]], size: int) -> float:
    """Calls for twice the size in parts of those for the size; 2 is linear, 4 quadratic."""
    run(size)()  # what is imported and kept is no part of either
    small, large = calls_of(run(size)), calls_of(run(2 * size))
    return large / small


# ---- many origins --------------------------------------------------------------------------------------


def layers(number: int, *, weights: str | None = None) -> Trace:
    """So many layers, each with a weight and a result of its own."""
    build = Builder()
    x = build.leaf("x", kind="input")
    for i in range(number):
        with build.scope(f"layers.{i}"):
            w = build.leaf(f"layers.{i}.weight", shape=(8, 8), content=weights and f"{weights} {i}")
            x = build.op("relu", build.op("mm", x, build.op("t", w)))
        build.output(x, f"output.{i}")
    return build.build()


def test_what_all_origins_have_in_common_is_found_once():
    """Every weight is an origin, and every result and every op differs: no origin looks at all of them again."""

    def run(number: int) -> Callable[[], Any]:
        left, right = layers(number), layers(number, weights="other")
        return lambda: diff(left, right)

    assert len(run(12)().origins[0].cause.evidence) > 0
    assert growth_of(run, 24) < 2.5


# ---- pairing ------------------------------------------------------------------------------------------


def test_what_lies_between_two_differences_is_paired_at_once():
    """Anchors that follow each other are one stretch, not one window each."""
    left = np.arange(3000, dtype=np.uint64)
    right = left.copy()
    right[[0, 700, 2000, 2999]] += np.uint64(10_000)

    found = match(left, right, anchored=True)

    assert sum(map(len, found.left)) == 2996
    assert calls_of(lambda: match(left, right, anchored=True)) < 2000


def test_a_call_of_which_nothing_is_left_to_pair_is_done():
    """One op more in a call: the first step pairs the others, and those that follow are left out."""
    left = Contents(trace("m{ relu sin cos tanh exp mul abs neg }"))
    right = Contents(trace("m{ relu* sin log cos tanh exp mul abs neg }"))
    pairing = align(left, right)  # what is kept of the contents is found

    assert np.flatnonzero(pairing.left_of < 0).tolist() == [2]
    assert calls_of(lambda: align(left, right)) < 2.3 * calls_of(lambda: align(left, left))


# ---- long stretches of one run -------------------------------------------------------------------------


def chain(number: int, name: str) -> Trace:
    """A long chain of ops that another run has under other names, and as many readers along it that both have."""
    build = Builder()
    x = build.op("relu", build.leaf("x", kind="input"))
    for i in range(number):
        with build.scope(name):
            x = build.op(f"{name}{i}", x)
        build.output(build.op("mul", x, build.leaf(f"factor.{i}")), f"output.{i}")
    return build.build()


def test_a_stretch_that_one_run_has_is_walked_once():
    """Values along a chain of ops without counterparts are made of the same stretch; no walk goes over it again."""

    def run(number: int) -> Callable[[], Any]:
        case = build_case(chain(number, "sin"), chain(number, "cos"), [])
        slots = range(len(case.compared.inputs.pair))
        assert max(len(case.compared.behind(slot)) for slot in slots) == 1

        def again() -> None:
            fresh = build_case(case.left.trace, case.right.trace, []).compared
            for slot in slots:
                fresh.behind(slot)

        return again

    assert growth_of(run, 60) < 2.5


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_walks_that_share_their_ends_find_what_single_walks_find(data: st.DataObject):
    """For every value of a random program, whichever ops have a counterpart and whichever value comes first."""
    build = Builder()
    values = [build.leaf("x", kind="input"), build.leaf("w")]
    for _ in range(data.draw(st.integers(1, 25))):
        name = data.draw(st.sampled_from(["add", "mul", "t", "add_"]))
        taken = [values[data.draw(st.integers(0, len(values) - 1))] for _ in name[:2]]
        values.append(build.op(name, *taken[: 1 if name == "t" else 2]))
    case = build_case(one := build.build(), one, [])
    contents, paired = case.left.contents, case.pairing.right_of.copy()
    for op in range(len(paired)):
        if data.draw(st.booleans()):
            paired[op] = -1
    behind = Behind(contents, paired)

    for value in data.draw(st.permutations(range(len(contents.maker)))):
        boundary = ancestry(contents, value, paired).boundary
        makers = {int(contents.maker[v]) for v in boundary} - {-1}
        assert behind.ops(value) == {op for op in makers if paired[op] >= 0}
