"""What several ranks should hold alike, on traces that are built by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from worlds import said, trained, vector, world

from opdrift.findings import findings
from opdrift.testing import Builder, collective


def test_replicas_that_are_trained_alike_are_no_finding():
    """Inputs, activations and gradients before the reduction differ by right."""
    assert [k for k, _, _ in said(world(trained(), trained())) if k == "replica"] == []


def test_a_parameter_that_differs_from_the_start_is_found_by_its_reduced_gradient():
    traces = world(trained(), trained(weight="other"))

    found = [f for f in findings(traces) if f.kind == "replica"]

    assert [(f.name, f.cause.slug, f.cause.confidence) for f in found] == [
        ("fc.weight", "replica", "certain")
    ]
    assert "between ranks 0 and 1, when the run began" in found[0].cause.summary


def test_a_gradient_that_one_rank_changes_after_the_reduction_is_named():
    found = [
        f for f in findings(world(trained(), trained(poke="_foreach_mul_"))) if f.kind == "replica"
    ]

    assert ["after its write 1" in f.cause.summary for f in found] == [True]
    assert any(
        "last written by aten._foreach_mul_.default" in line for line in found[0].cause.evidence
    )


@pytest.mark.parametrize("poked", [0, 1])
def test_a_rank_s_hidden_write_is_told_as_that_and_not_as_ranks_that_differ(poked):
    """The trace of that rank shows it, with the step."""

    def body(build: Builder) -> None:
        weight = build.leaf("big.weight", content=vector("big", 4096))
        scale = build.leaf("fc.scale", kind="buffer", content=vector("scale"))
        build.output(build.op("mul", scale, weight), "early")
        build.mark("step", step=7)
        build.output(build.op("neg", weight), "between")
        if build.build().header.rank == poked:
            scale = build.hidden_write(scale, "fc.scale", content=vector("other"))
        build.output(build.op("mul", scale, weight))

    (found,) = findings(world(body, body))

    assert (found.kind, found.name, found.rank, found.step) == (
        "hidden-write",
        "fc.scale",
        poked,
        7,
    )


@pytest.mark.parametrize("written", [(), (1,), (0, 1)], ids=["by none", "by rank 1", "by both"])
def test_a_buffer_that_a_library_cast_is_followed_in_what_it_put_in_its_place(written):
    """Mixed precision of FSDP1 and fairscale: the module has another tensor from then on."""

    def body(build: Builder) -> None:
        rank = build.build().header.rank or 0
        build.leaf("big.weight", content=vector("big", 4096))
        scale = build.leaf("fc.scale", kind="buffer", content=vector("scale"))
        cast = build.op("_to_copy", scale, dtype="float16", content=vector("scale"))
        build.name(cast, "fc.scale", kind="buffer", when="gather")
        build.mark("buffer-cast", library="fairscale", name="fc.scale")
        with build.scope("fc"):
            build.output(build.op("relu", cast), "early")
        build.mark("step", step=3)
        if rank in written:
            cast = build.op("mul_", cast, content=vector(f"scaled on {rank}"))
            build.name(cast, "fc.scale", kind="buffer", when="exit")
        with build.scope("fc"):
            build.output(build.op("relu", cast))

    found = findings(world(body, body))

    places = [(each.kind, each.name, each.rank, each.op, each.step) for each in found]
    # what all ranks write may differ by right
    assert places == [("replica", "fc.scale", 1, "aten.mul_.default", 3)] * (written == (1,))


def test_parameters_without_a_reduction_may_differ():
    """Tensor parallelism splits weights of one shape over the ranks; nothing says that these are replicas."""
    traces = world(trained(reduced=False), trained(reduced=False, weight="other"))

    assert said(traces) == []


def test_a_norm_that_is_reduced_for_clipping_makes_no_replica():
    """The reduced number is smaller than the gradient that it is multiplied into."""

    def body(build: Builder) -> None:
        rank = build.build().header.rank or 0
        w = build.leaf("fc.weight", content=vector(f"w {rank}"))
        grad = build.op("mm", build.leaf("x", kind="input", content=vector(f"x {rank}")), w)
        norm = build.op("sum", grad, shape=(1,), content=np.float32([rank + 1.0]))
        norm = collective(build, "all_reduce", norm, result=np.float32([3.0]), reduction="SUM")
        # as clip_grad_norm_ does; the reduced norm is followed through it
        grad = build.op("_foreach_mul_", grad, norm)
        build.name(build.op("add_", w, grad), "fc.weight", when="exit")
        build.name(grad, "fc.weight", kind="gradient", when="exit")

    assert said(world(body, body)) == []


def test_sharded_parameters_are_no_replicas():
    def body(build: Builder) -> None:
        build.mark("model", sharded=["fc.weight"])
        trained(weight=f"rank {build.build().header.rank}")(build)

    assert [k for k, _, _ in said(world(body, body)) if k == "replica"] == []


def test_one_parameter_among_equal_ones_is_likely_a_replica():
    """Inference: no gradient tells, but all else is equal on all ranks."""

    def body(build: Builder) -> None:
        rank = build.build().header.rank or 0
        build.leaf("big.weight", content=vector("big", 4096))
        build.leaf("small.weight", content=vector(f"small {rank}", 64))

    (found,) = findings(world(body, body))

    assert (found.name, found.cause.confidence) == ("small.weight", "likely")


def drawn(*does: str, only: int | None = None) -> Callable[[Builder], None]:
    """A rank that draws a buffer of its own, and then loads or reads it; rank `only` alone loads it."""

    def body(build: Builder) -> None:
        rank = build.build().header.rank or 0
        build.leaf("big.weight", content=vector("big", 4096))
        pos = build.leaf("pos", kind="buffer", content=vector(f"draw {rank}"))
        for what in does:
            if what == "reads":
                with build.scope("net"):
                    build.op("exp", pos)
            elif only in (None, rank):
                pos = build.op("copy_", pos, content=vector("checkpoint"))

    return body


@pytest.mark.parametrize("does", [("loads", "reads"), ("loads",)])
def test_what_a_load_overwrites_before_a_module_reads_it_does_not_count(does: Sequence[str]):
    """Each rank seeds differently, builds its model, and loads the same checkpoint."""
    assert said(world(drawn(*does), drawn(*does))) == []


@pytest.mark.parametrize(
    ("does", "only", "when"),
    [
        ((), None, "when the run began"),
        (("reads",), None, "when the run began"),
        (("reads", "loads"), None, "when the run began"),
        (("loads",), 0, "when the run began"),
        (("loads", "reads"), 0, "when a module first read it"),
    ],
)
def test_a_buffer_that_differs_when_it_is_first_read_is_found(
    does: Sequence[str], only: int | None, when: str
):
    (found,) = findings(world(drawn(*does, only=only), drawn(*does, only=only)))

    assert (found.name, found.cause.slug, found.cause.confidence) == ("pos", "replica", "likely")
    assert found.cause.summary == f"pos differs between ranks 0 and 1, {when}"
    assert found.cause.try_.startswith("Seed or load all ranks alike")


def written_by(*ranks: int, after_a_call: bool = False) -> Callable[[Builder], None]:
    """A rank of a model whose buffer all load; then only some ranks write into it, each something else."""

    def body(build: Builder) -> None:
        rank = build.build().header.rank or 0
        build.leaf("big.weight", content=vector("big", 4096))
        pos = build.leaf("pos", kind="buffer", content=vector("made"))
        pos = build.op("copy_", pos, content=vector("checkpoint"))
        if after_a_call:
            with build.scope("net"):
                build.op("exp", pos)
        if rank in ranks:
            pos = build.op("add_", pos, content=vector(f"added {rank}"))
        with build.scope("net"):
            build.op("exp", pos)

    return body


@pytest.mark.parametrize("after_a_call", [False, True])
@pytest.mark.parametrize("ranks", [(0,), (1,)])
def test_a_buffer_that_only_some_ranks_write_is_found_with_its_op(
    ranks: tuple[int, ...], after_a_call: bool
):
    body = written_by(*ranks, after_a_call=after_a_call)

    (found,) = findings(world(body, body))

    assert (found.name, found.cause.slug, found.cause.confidence) == ("pos", "replica", "likely")
    assert f"twice on rank {ranks[0]}" in " ".join(found.cause.evidence)
    assert "a buffer alike" in found.cause.try_


@pytest.mark.parametrize("ranks", [(), (0, 1)])
def test_a_buffer_that_all_ranks_write_once_it_was_read_may_differ(ranks: tuple[int, ...]):
    """Statistics of each rank's own samples do."""
    body = written_by(*ranks, after_a_call=True)

    assert said(world(body, body)) == []


def test_a_buffer_that_ranks_write_otherwise_before_it_is_read_is_found():
    """They start from other contents, however many writes those took."""
    body = written_by(0, 1)

    (found,) = findings(world(body, body))

    assert found.cause.summary == "pos differs between ranks 0 and 1, when a module first read it"


def running_statistics(own: bool) -> Callable[[Builder], None]:
    """A rank whose model is built in the recording, and whose module writes a buffer where it first reads it.

    `own`: rank 1 wrote into it before, what the others did not.
    """

    def body(build: Builder) -> None:
        rank = build.build().header.rank or 0
        build.leaf("big.weight", content=vector("big", 4096))
        mean = build.op("zeros", content=vector("zero"))
        if own and rank:
            mean = build.op("add_", mean, content=vector("another"))
        build.name(mean, "norm.mean", kind="buffer")
        with build.scope("norm"):
            build.op("lerp_", mean, content=vector(f"samples of {rank}, {own}"))

    return body


def test_a_buffer_of_a_model_built_in_the_recording_is_compared_as_modules_first_read_it():
    """All ranks wrote zeros into it once: what counts is what they had when training began."""
    body = running_statistics(own=True)

    (found,) = findings(world(body, body))

    assert found.cause.summary == (
        "norm.mean differs between ranks 0 and 1, when a module first read it"
    )
    assert said(world(running_statistics(own=False), running_statistics(own=False))) == []


def test_what_is_broadcast_over_does_not_count():
    """Each rank draws its own weights, and takes rank 0's before anything is computed."""

    def body(build: Builder) -> None:
        rank = build.build().header.rank or 0
        w = build.leaf("fc.weight", content=vector(f"draw {rank}"))
        w = collective(build, "broadcast", w, result=vector("draw 0"), root=0)
        x = build.leaf("x", kind="input", content=vector(f"x {rank}"))
        grad = collective(build, "all_reduce", build.op("mm", x, w), result=vector("sum"))
        build.name(build.op("_foreach_add_", w, grad), "fc.weight", when="exit")

    assert [k for k, _, _ in said(world(body, body)) if k == "replica"] == []


def stepping(
    *, steps: int, stops_before_update: bool = False, skips: int | None = None, marked: bool = False
):
    """A rank that trains for some steps, and does not come to the update of its last one, or leaves one out."""

    def body(build: Builder) -> None:
        rank = build.build().header.rank or 0
        w = build.leaf("fc.weight", content=vector("w"))
        for step in range(steps):
            if marked:
                build.mark("step", step=step)
            x = build.leaf("x", kind="input", content=vector(f"x {rank} {step}"))
            grad = collective(
                build, "all_reduce", build.op("mm", x, w), result=vector(f"sum {step}")
            )
            if step != skips and not (stops_before_update and step == steps - 1):
                w = build.op("_foreach_add_", w, grad, content=vector(f"w {step}"))
                build.name(w, "fc.weight", when="exit")

    return body


@pytest.mark.parametrize("end", [{"exception": "ValueError: empty"}, {"complete": False}, {}])
def test_a_rank_that_stops_before_its_update_is_not_held_against_the_others_next_one(
    end: dict[str, Any],
):
    """It raised, was killed, or left its loop; the others went on to their next collective."""
    left, right = Builder(rank=0, exception="RuntimeError: closed by peer"), Builder(rank=1, **end)
    stepping(steps=3)(left)
    stepping(steps=2, stops_before_update=True)(right)

    found = findings([left.build(), right.build()])

    assert [f.kind for f in found if f.kind == "replica"] == []


def test_a_rank_that_goes_on_without_an_update_is_found():
    """It reduces the next gradient: the moment of the update has passed on all ranks."""
    found = findings(world(stepping(steps=3), stepping(steps=3, skips=1)))

    assert [f.cause.summary for f in found if f.kind == "replica"] == [
        "fc.weight differs between ranks 0 and 1, after its write 2"
    ]


def test_an_update_that_a_rank_leaves_out_at_the_end_is_found():
    """Both ranks ended by themselves, and issued as many collectives."""
    found = findings(world(stepping(steps=2), stepping(steps=2, stops_before_update=True)))

    assert [f.cause.summary for f in found if f.kind == "replica"] == [
        "fc.weight differs between ranks 0 and 1, after its write 2"
    ]


def test_a_rank_that_leaves_out_an_update_is_told_with_the_writes_of_both():
    """What the two wrote last is no pair: one of them has no counterpart."""
    found = findings(world(stepping(steps=3, marked=True), stepping(steps=3, marked=True, skips=1)))

    (split,) = [f for f in found if f.kind == "replica"]

    assert (split.rank, split.step) == (1, 1)
    assert split.cause.evidence[2:] == (
        "until then fc.weight had been written twice on rank 0 and once on rank 1",
        "on rank 0, it was last written by aten._foreach_add_.default (op 6), in step 1",
        "on rank 1, it was last written by aten._foreach_add_.default (op 3), in step 0",
    )
    assert "an optimizer step that a rank leaves out" in split.cause.try_


def test_a_rank_that_loaded_another_checkpoint_is_told_so():
    """No op made what was copied in, on any rank."""

    def body(build: Builder) -> None:
        rank = build.build().header.rank or 0
        w = build.leaf("fc.weight", content=vector("drawn"))
        held = build.leaf("", kind="constant", when="use", content=vector(f"file {rank}"))
        w = build.op("copy_", w, held, content=vector(f"file {rank}"))
        build.name(used(build, w, 0), "fc.weight", kind="gradient", when="exit")

    (split,) = [f for f in findings(world(body, body)) if f.kind == "replica"]

    assert split.cause.summary.startswith(
        "fc.weight differs between ranks 0 and 1, after its write 1"
    )
    assert split.cause.evidence[2:] == tuple(
        f"on rank {rank}, aten.copy_.default (op 1) copied what no recorded op made into it, as from a file"
        for rank in (0, 1)
    )
    assert split.cause.try_.startswith("Load the same checkpoint on all ranks")


def used(build: Builder, weight: int, step: int) -> int:
    """A module reads a parameter; a gradient of it is reduced."""
    rank = build.build().header.rank or 0
    x = build.leaf("x", kind="input", content=vector(f"x {rank} {step}"))
    with build.scope("fc"):
        grad = build.op("mm", x, weight)
    return collective(build, "all_reduce", grad, result=vector(f"sum {step}"))


@pytest.mark.parametrize("right", [True, False])
def test_an_optimizer_that_shares_out_its_work_writes_as_often_as_it_likes(right: bool):
    """Rank 0 computes the update and broadcasts it (ZeRO): what counts is what the next forward reads."""

    def body(build: Builder) -> None:
        w = build.leaf("fc.weight", content=vector("w"))
        for step in range(3):
            grad = used(build, w, step)
            if build.build().header.rank == 0:
                w = build.op("_foreach_add_", w, grad, content=vector(f"w {step}"))
            fault = "" if right or build.build().header.rank == 0 or step != 1 else "other"
            w = collective(build, "broadcast", w, result=vector(f"w {step}{fault}"), root=0)
        build.name(grad, "fc.weight", kind="gradient", when="exit")

    found = [f.cause.summary for f in findings(world(body, body)) if f.kind == "replica"]

    assert found == (
        [] if right else ["fc.weight differs between ranks 0 and 1, after its write 4"]
    )


def test_other_weights_that_one_rank_reads_for_a_while_are_no_finding():
    """Rank 0 evaluates with averaged weights, and puts its own back."""

    def body(build: Builder) -> None:
        w = build.leaf("fc.weight", content=vector("w"))
        for step in range(2):
            grad = used(build, w, step)
            w = build.op("_foreach_add_", w, grad, content=vector(f"w {step}"))
            if build.build().header.rank == 0:
                w = build.op("copy_", w, build.leaf("ema"), content=vector("ema"))
                with build.scope("fc"):
                    build.op("mm", w, w)
                w = build.op("copy_", w, build.leaf("own"), content=vector(f"w {step}"))
        build.name(w, "fc.weight", when="exit")

    assert [f for f in findings(world(body, body)) if f.kind == "replica"] == []


@pytest.mark.parametrize("joined", [False, True])
def test_parameters_that_are_averaged_now_and_then_may_differ_in_between(joined: bool):
    """Local training: each rank steps with its own gradients, and all average their parameters at the end."""
    mean = (vector("step 0") + vector("step 1")) / 2

    def body(build: Builder) -> None:
        rank = build.build().header.rank or 0
        w = build.leaf("fc.weight", content=vector("w"))
        for _ in range(2):
            with build.scope("fc"):
                grad = build.op("mm", build.leaf("x", content=vector(f"x {rank}")), w)
            w = build.op("_foreach_add_", w, grad, content=vector(f"step {rank}"))
            given = build.op("cat", w, content=build.content(w)) if joined else w
            total = collective(build, "all_reduce", given, result=mean * 2, reduction="SUM")
            w = build.op("copy_", w, total) if joined else total
            w = build.op("div_", w, content=mean)
        build.name(w, "fc.weight", when="exit")

    assert said(world(body, body)) == []


def test_ranks_no_two_of_which_agree_are_all_named():
    (found,) = [
        f for f in findings(world(*[trained(weight=text) for text in "abc"])) if f.kind == "replica"
    ]

    assert "differs between ranks 0, 1 and 2, when the run began" in found.cause.summary
