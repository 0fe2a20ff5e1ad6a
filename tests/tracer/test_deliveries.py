"""Scratch memory of the communication library: its content is the collective's, not a leaf of the run."""

from __future__ import annotations

import numpy as np

from opdrift.contents import Contents
from opdrift.diagnose.answer import diagnose
from opdrift.diagnose.by_rank import of_ranks
from opdrift.records import Diagnosis
from opdrift.testing import Builder, collective
from opdrift.tracefile.reader import Trace

HALF = 8


def scattered(fault: int | None = None, *, foreign: float = 0.0) -> dict[int, Trace]:
    """Two ranks multiply, a reduce_scatter adds up, and each copies its part out of gloo's buffer, as `Work.wait` does.

    Args:
        fault: The rank whose product is another one.
        foreign: What the program adds to the result outside of the run, and copies over it.
    """
    builders = [Builder(rank=rank, world_size=2) for rank in range(2)]
    products = [
        build.op(
            "mul",
            build.leaf("x", kind="input", shape=(2 * HALF,)),
            build.leaf("a.weight", shape=(2 * HALF,), content=f"a {rank}"),
            change="*" if rank == fault else "",
        )
        for rank, build in enumerate(builders)
    ]
    total = np.float32(sum(b.content(p) for b, p in zip(builders, products, strict=True)))
    for rank, (build, product) in enumerate(zip(builders, products, strict=True)):
        part = total[rank * HALF : (rank + 1) * HALF]
        made = collective(build, "reduce_scatter", product, result=part, reduction="SUM")
        whole = total + np.float32(foreign)
        scratch = build.leaf("", kind="constant", when="use", shape=(2 * HALF,), content=whole)
        view = build.op("slice", scratch, shape=(HALF,), offset=rank * HALF)
        build.output(build.op("neg", build.op("copy_", made, view)))
    return {rank: build.build(f"run.trace/rank-{rank:05d}") for rank, build in enumerate(builders)}


def compared(left: dict[int, Trace], right: dict[int, Trace]) -> Diagnosis:
    def compare(rank: int) -> Diagnosis:
        return diagnose(left[rank], right[rank])

    return of_ranks({r: compare(r) for r in left}, {}, left, right, compare=compare)


def test_a_rank_receives_through_a_reduce_scatter_what_went_wrong_on_another():
    """The buffer that gloo reduces into is no input of the run: the rank whose product differs is named."""
    found = compared(scattered(), scattered(fault=1))

    first = {r: (one.first.op, one.first.cause.slug) for r, one in found.ranks.items() if one.first}
    assert first[0] == ("c10d._reduce_scatter_base_.default", "other-rank")
    assert first[1][0] == "aten.mul.default"
    assert found.notes[-1] == (
        "rank 1 originates the difference; rank 0 receives it through reduce_scatter 1 of group 0"
    )


def test_the_same_runs_are_identical():
    assert compared(scattered(), scattered()).verdict == "identical"


def test_such_memory_was_filled_by_its_collective():
    contents = Contents(scattered()[0])
    (op,), (states,) = contents.states.delivered.keys(), contents.states.delivered.values()

    assert contents.trace.op(op).name == "c10d._reduce_scatter_base_.default"
    assert [int(contents.states.writer[state]) for state in states] == [op]


def test_a_tensor_that_the_program_copies_over_a_result_stays_its_own():
    """It changes the result: that is no delivery, and where it differs between runs it is named as what it is."""
    left, right = scattered(foreign=1.0), scattered(foreign=2.0)

    assert Contents(right[0]).states.delivered == {}
    first = compared(left, right).ranks[0].first
    assert first is not None
    assert first.kind == "leaf"
