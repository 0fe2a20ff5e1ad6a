"""What one run alone shows to be wrong, and what it does not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from opdrift.findings import findings
from opdrift.records import PENDING, READ_IN_FLIGHT
from opdrift.testing import Builder, trace
from opdrift.tracefile.reader import Trace


def places(*traces):
    return [(f.kind, f.cause.slug, f.name, f.op, f.module, f.seq) for f in findings(traces)]


def array(*numbers):
    return np.array(numbers, np.float32)


# ---- nothing -------------------------------------------------------------------------------------------


def test_a_healthy_run_has_no_findings():
    """Ops, scopes, in-place writes and views are no findings."""
    assert places(trace("fc{ t addmm } relu add_ mm* native_layer_norm")) == []


def test_an_empty_run_has_no_findings():
    """A trace without ops is read without trouble."""
    assert places(Builder().build()) == []


# ---- hidden writes -------------------------------------------------------------------------------------


def slot(*, content):
    """A buffer is used, its memory changes without an op, and it is used again."""
    build = Builder()
    x, slot = build.leaf("x", kind="input"), build.leaf("slot", kind="buffer", content="old")
    with build.scope("layers.0"):
        x = build.op("mm", x, slot)
    slot = build.hidden_write(slot, "slot", content=content)
    with build.scope("layers.1"):
        x = build.op("mm", x, slot)
    build.output(x)
    return build.build()


def test_content_that_changed_with_no_op_is_a_hidden_write():
    """It is named by the leaf and placed at the op that read the new content."""
    assert places(slot(content="new")) == [
        ("hidden-write", "race", "slot", "aten.mm.default", "layers.1", 2)
    ]


def test_memory_that_moved_with_its_content_is_no_finding():
    """An address that changed makes the recorder look again; equal content is no write."""
    build = Builder()
    old = build.leaf("slot", kind="buffer")
    slot = build.hidden_write(old, "slot", content=build.content(old))
    build.op("mm", build.leaf("x", kind="input"), slot)
    assert places(build.build()) == []


def test_a_change_of_unknown_content_is_no_finding():
    """Where the earlier content was never read, nobody can say that it changed."""
    build = Builder()
    x = build.leaf("x", kind="input")
    build.name(build.again(x), "x", kind="buffer", when="changed")
    build.op("relu", x)
    assert places(build.build()) == []


def test_one_storage_under_three_names_is_one_finding():
    """All names are said; the first one names the finding."""
    build = Builder()
    old = build.leaf("layers.0.slot", kind="buffer", content="old")
    new = build.hidden_write(old, "layers.0.slot", content="new")
    build.name(new, "layers.1.slot", kind="buffer", when="changed")
    build.op("mm", build.leaf("x", kind="input"), new)
    (found,) = findings([build.build()])
    assert found.name == "layers.0.slot"
    assert "layers.0.slot, layers.1.slot" in found.cause.summary


# ---- uninitialised memory ------------------------------------------------------------------------------


def test_the_first_reader_of_unwritten_memory_is_a_finding():
    """One `empty` is one finding, told by its first reader and its maker."""
    build = Builder()
    x, table = (
        build.leaf("x", kind="input"),
        build.op("empty", shape=(4, 8), source=("model.py", 7, "build")),
    )
    with build.scope("pos"):
        x = build.op("add.Tensor", x, table, read_uninitialised=True)
        build.op("add.Tensor", x, table, read_uninitialised=True)

    (found,) = findings([build.build()])

    assert (found.kind, found.cause.slug, found.op, found.module, found.seq) == (
        "uninitialised", "uninitialised", "aten.add.Tensor", "pos", 2,
    )  # fmt: skip
    assert "model.py:7 in build" in found.cause.evidence[0]


# ---- NaN and infinity ----------------------------------------------------------------------------------


def test_the_op_that_makes_the_first_nan_is_a_finding():
    """Ops that pass NaN on are not."""
    build = Builder()
    x = build.leaf("x", kind="input", content=array(1, -1))
    with build.scope("norm"):
        x = build.op("sqrt", x, content=array(1, math.nan))
    x = build.op("relu", x, content=array(1, math.nan))
    build.op("mul.Tensor", x, x, content=array(math.nan, math.nan))
    assert places(build.build()) == [("nan", "nan", None, "aten.sqrt.default", "norm", 1)]


def test_nan_is_followed_through_views():
    """A view has no fingerprint; what it views tells that the NaN is old."""
    build = Builder()
    x = build.op(
        "div.Tensor", build.leaf("x", kind="input", content=array(0, 1)), content=array(math.nan, 1)
    )
    x = build.op("view", build.op("view", x, shape=(1, 2)), shape=(2,))
    build.op("relu", x, content=array(math.nan, 1))
    assert [place[3] for place in places(build.build())] == ["aten.div.Tensor"]


def test_a_view_makes_no_nan():
    """Memory that others fill, such as a bucket, is first looked at where a part of it is taken."""
    build = Builder()
    bucket = build.leaf("", kind="constant", content=array(0, 0))
    part = build.op("slice.Tensor", bucket, shape=(2,), content=array(math.nan, 0))
    build._values[part - 1].printed = True  # the recorder looked at the part
    build.op("relu", part, content=array(math.nan, 0))
    assert places(build.build()) == []


def test_nan_that_a_trial_run_left_in_statistics_is_told_with_it():
    """Memory that nothing wrote may hold NaN; neither the buffer nor the op that reads it is told once more."""
    build = Builder()
    x, mean = build.leaf("x", kind="input"), build.leaf("norm.mean", kind="buffer")
    x = build.op("relu", x)
    mean = build.hidden_write(mean, "norm.mean", content=array(math.nan, math.nan))
    build.mark("trial", buffers=["norm.mean"], unwritten=True, stage=1, unit="")
    build.output(build.op("add.Tensor", x, mean, content=array(math.nan, math.nan)))

    assert places(build.build()) == [("trial", "uninitialised", "norm.mean", None, "", 1)]


def test_a_parameter_with_nan_is_named_itself():
    """The op that first reads it is not blamed."""
    build = Builder()
    w = build.leaf("head.weight", content=array(1, math.nan))
    build.op(
        "mul.Tensor",
        build.leaf("x", kind="input", content=array(1, 1)),
        w,
        content=array(1, math.nan),
    )
    assert places(build.build()) == [("nan", "nan", "head.weight", None, "head", None)]


def test_a_parameter_that_an_op_filled_with_nan_does_not_hide_where_it_began():
    """An optimizer writes the NaN of a gradient into the weight: the gradient's op is the finding, once."""
    build = Builder()
    w = build.leaf("embed.weight", content=array(1, 1))
    with build.scope("embed"):
        x = build.op("div.Tensor", w, content=array(1, math.nan), phase="backward")
    written = build.op("add_.Tensor", w, x, content=array(2, math.nan))
    build.name(written, "embed.weight", when="exit")

    (finding,) = findings([build.build()])

    assert (finding.name, finding.op, finding.seq) == (None, "aten.div.Tensor", 1)
    assert finding.cause.summary.endswith("aten.div.Tensor in embed in the backward pass")


def test_overflow_is_found_before_the_nan_that_it_becomes():
    """An infinity and the NaN made of it are two steps of one story, both told."""
    build = Builder()
    x = build.op(
        "pow.Tensor_Scalar",
        build.leaf("x", kind="input", content=array(300, 1)),
        content=array(math.inf, 1),
    )
    build.op("sub.Tensor", x, x, content=array(math.nan, 0))
    assert [(place[3], place[5]) for place in places(build.build())] == [
        ("aten.pow.Tensor_Scalar", 1),
        ("aten.sub.Tensor", 2),
    ]


@pytest.mark.parametrize("settings", [{"value": -math.inf}, {"value": [1.0, -math.inf]}])
def test_an_infinity_that_the_program_asked_for_is_no_finding(settings):
    """Causal masks are filled with -inf on purpose, and what reads them inherits it."""
    build = Builder()
    mask = build.op("masked_fill.Scalar", build.leaf("x", kind="input", content=array(1, 1)), settings=settings,
                    content=array(1, -math.inf))  # fmt: skip
    build.op("add.Tensor", mask, mask, content=array(2, -math.inf))
    assert places(build.build()) == []


def test_a_row_that_is_masked_everywhere_makes_a_nan():
    """The softmax had an infinite input, yet its NaN is new."""
    build = Builder()
    scores = build.op("masked_fill.Scalar", build.leaf("x", kind="input", content=array(1, 1)),
                      settings={"value": -math.inf}, content=array(-math.inf, -math.inf))  # fmt: skip
    build.op("_softmax", scores, content=array(math.nan, math.nan))
    assert [place[3] for place in places(build.build())] == ["aten._softmax.default"]


# ---- steps and order -----------------------------------------------------------------------------------


def test_findings_say_their_step_and_come_in_order():
    """Steps are counted from the program's own marks, by their number where they have one."""
    build = Builder()
    x = build.leaf("x", kind="input", content=array(1, 1))
    build.mark("step")
    x = build.op("relu", x, content=array(1, 1))
    build.mark("step", step=7)
    x = build.op("log", x, content=array(-math.inf, 1))
    build.mark("step")
    build.op("sub.Tensor", x, x, content=array(math.nan, 0))
    assert [(f.seq, f.step) for f in findings([build.build()])] == [(2, 7), (3, 2)]


def test_what_has_no_content_is_not_what_it_was_made_from():
    """A parameter on "meta" made from memory that held NaN holds nothing."""
    build = Builder()
    source = build.leaf("", kind="constant", content=array(1, math.nan))
    made = build.op("empty_like", source)
    build.name(made, "weight")
    build.output(build.op("relu", build.leaf("x", kind="input")))

    assert places(build.build()) == []


# ---- results that are still under way ------------------------------------------------------------------


def reads_early(*, done):
    """An op reads what an asynchronous collective writes, before or after it is done."""
    build = Builder()
    x = build.leaf("x", kind="input")
    x = build.op("c10d.allreduce_.default", x, flags=PENDING, source=("train.py", 3, "step"))
    for _ in range(2):
        with build.scope("fc"):
            build.op("mul", x, flags=0 if done else READ_IN_FLIGHT)
    return build.build()


def test_the_first_reader_of_what_is_still_being_filled_is_a_race():
    (found,) = findings([reads_early(done=False)])

    assert (found.kind, found.cause.slug, found.op, found.module, found.seq) == (
        "race",
        "race",
        "aten.mul.default",
        "fc",
        2,
    )
    assert "c10d.allreduce_.default (op 1 at train.py:3 in step)" in found.cause.evidence[0]


def test_results_that_one_line_issues_and_one_line_reads_too_early_are_one_finding():
    """A loop over parameters does it for each of them, and in every step; another line is another finding."""
    build = Builder()
    for line in (3, 3, 3, 9):
        grad = build.leaf(f"grad {line}", kind="input")
        got = build.op("c10d.allreduce_.default", grad, flags=PENDING, source=("train.py", line, "reduce"))  # fmt: skip
        build.op("mul", got, flags=READ_IN_FLIGHT, source=("train.py", 20, "step"))

    found = findings([build.build()])

    assert [(each.slug, each.evidence[2:]) for each in (f.cause for f in found)] == [
        ("race", ("so were 2 more results that the same line issued, the last one that of op 5, by op 6",)),
        ("race", ()),
    ]  # fmt: skip


def test_a_reader_of_a_result_that_is_there_is_no_race():
    assert places(reads_early(done=True)) == []


def test_what_all_ranks_show_alike_is_told_once_with_the_ranks():
    """A model that reads unwritten memory does so on every rank."""

    def rank(number: int, *, shape: tuple[int, ...] = (4, 4)) -> Trace:
        build = Builder(rank=number, world_size=3)
        build.op("relu", build.op("empty.memory_format", shape=shape), read_uninitialised=True)
        return build.build()

    found = findings([rank(0), rank(1), rank(2)])

    assert [(f.kind, f.rank, f.cause.evidence[-1]) for f in found] == [
        ("uninitialised", 0, "the same on ranks 1 and 2")
    ]
