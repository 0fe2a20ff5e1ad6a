"""Which ops work on this rank's parts of parameters, and how runs that are sharded otherwise are paired."""

from __future__ import annotations

import numpy as np

from opdrift.align import align
from opdrift.contents import Contents
from opdrift.diagnose.answer import diagnose
from opdrift.shards import ops_on_parts
from opdrift.testing import Builder, collective
from opdrift.tracefile.reader import Trace

SHAPE = (8,)


def trained(*, sharded: bool) -> Trace:
    """A gradient updates a parameter of eight elements; sharded, this rank's part of one of sixteen, which is gathered."""
    build = Builder(rank=0) if sharded else Builder()
    x = build.leaf("x", kind="input", shape=SHAPE)
    with build.scope("a"):
        y = build.op("mul", x, build.leaf("a.weight", shape=SHAPE))
    gradient = build.op("neg", y)
    if sharded:
        build.mark(
            "gather", library="torch_fsdp", unit="b", buffer="b", layout="each", ranks=[0, 1], rank=0,
            parameters=[["b.weight", 0, [16]]],
        )  # fmt: skip
        part = build.leaf("b.weight", kind="shard", when="gather", shape=SHAPE)
        written = build.op("add_", part, gradient)
        both = np.concatenate([build.content(written)] * 2)
        build.op("tanh", collective(build, "all_gather", written, result=both))
    else:
        build.op("add_", build.leaf("a.bias", shape=SHAPE), gradient)
    build.output(y)
    return build.build()


def test_parts_are_followed_from_a_shard_to_its_gather():
    trace = trained(sharded=True)

    on_parts = [trace.op(int(op)).name for op in np.flatnonzero(ops_on_parts(trace))]

    assert on_parts == ["aten.add_.default", "c10d._allgather_base_.default"]


def test_an_update_of_a_part_is_not_paired_with_that_of_another_parameter_of_its_shape():
    left, right = trained(sharded=False), trained(sharded=True)

    pairing = align(Contents(left), Contents(right))

    assert [left.op(int(op)).name for op in pairing.left] == [
        "aten.mul.default",
        "aten.neg.default",
    ]
    assert diagnose(left, right).verdict == "identical"


def test_runs_that_are_sharded_alike_are_paired_throughout():
    pairing = align(Contents(trained(sharded=True)), Contents(trained(sharded=True)))

    assert len(pairing.left) == len(trained(sharded=True).ops)
