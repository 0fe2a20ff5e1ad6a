"""What each rank of one run does of its own, on traces that are built by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from opdrift.diagnose.across_ranks import diagnose_world
from opdrift.findings import findings
from opdrift.render.card import headline
from opdrift.testing import Builder, collective
from opdrift.tracefile.reader import Trace
from opdrift.world.work import notes_of_work


def vector(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(64).astype(np.float32)


def world(*ranks: Callable[[Builder], object]) -> list[Trace]:
    builders = [Builder(rank=rank, world_size=len(ranks)) for rank in range(len(ranks))]
    for build, body in zip(builders, ranks, strict=True):
        body(build)
    return [build.build() for build in builders]


def trained(*modes: bool, data: int = 0, reduced: bool = True) -> Callable[[Builder], None]:
    """A rank that calls a module in these modes, and reduces the gradient of its parameter."""

    def body(build: Builder) -> None:
        w = build.leaf("fc.weight", content=vector(99))
        for step, mode in enumerate(modes):
            x = build.leaf("x", kind="input", content=vector(100 * data + step))
            with build.scope("drop", training=mode):
                grad = build.op("mm", x, w)
            if reduced:
                ranks = range(build.build().header.world_size or 1)
                # a sum with a factor is not judged
                grad = collective(build, "all_reduce", grad, result=vector(7 + step), ranks=ranks, reduction="another")  # fmt: skip
        build.name(grad, "fc.weight", kind="gradient", when="exit")

    return body


def test_a_module_that_trains_on_one_rank_only_is_found():
    """Each rank's trace by itself is right."""
    traces = world(trained(False, False), trained(True, True, data=1), trained(False, False, data=2))  # fmt: skip

    (found,) = findings(traces)

    assert (found.kind, found.name, found.rank) == ("replica", "drop", 1)
    assert (found.cause.slug, found.cause.confidence) == ("train-mode", "likely")
    assert found.cause.summary == (
        "drop was in training mode on rank 1, and in evaluation mode on ranks 0 and 2"
    )
    assert headline(diagnose_world(traces)) == (
        "diverged: at op 1 of 4: the ranks do different things in drop (rank 1 against 0, 2)"
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (trained(True, False), trained(True, True, data=1)),  # evaluates now and then
        (trained(True, reduced=False), trained(False, reduced=False, data=1)),  # two programs
        (trained(True, True), trained(True, True, data=1)),
    ],
)
def test_ranks_that_may_have_modes_of_their_own_are_not_told(
    one: Callable[[Builder], None], other: Callable[[Builder], None]
):
    assert findings(world(one, other)) == ()


def test_ranks_that_had_the_same_data_are_named_in_a_note():
    """It is no error for certain: a program may want that."""
    traces = world(trained(True, True), trained(True, True))

    (said,) = notes_of_work(traces)

    assert said.startswith("ranks 0 and 1 gave the same to all 2 reductions between them")
    assert said in diagnose_world(traces).notes
    assert findings(traces) == ()


@pytest.mark.parametrize(
    ("second", "notes"), [(vector(5), 1), (np.zeros(64, np.float32), 0), (vector(8), 0)]
)
def test_ranks_of_which_one_gave_something_else_even_once_had_data_of_their_own(
    second: np.ndarray, notes: int
):
    """Also nothing but zeros, where the other gave numbers: one that had no work left."""

    def rank(content: np.ndarray) -> Callable[[Builder], None]:
        def body(build: Builder) -> None:
            trained(True)(build)
            x = build.leaf("x", kind="input", content=content)
            collective(build, "all_reduce", x, result=vector(6), reduction="another")

        return body

    assert len(notes_of_work(world(rank(vector(5)), rank(second)))) == notes
    assert len(notes_of_work(world(rank(second), rank(vector(5))))) == notes


def test_ranks_with_data_of_their_own_or_with_constants_get_no_note():
    """What is one number throughout is equal by itself."""

    def constant(build: Builder) -> None:
        x = build.leaf("x", kind="input", content=np.ones(64, np.float32))
        collective(build, "all_reduce", x, result=np.full(64, 2, np.float32), reduction="SUM")

    assert notes_of_work(world(trained(True), trained(True, data=1))) == []
    assert notes_of_work(world(constant, constant)) == []
    assert notes_of_work(world(trained(True))) == []
