"""One distributed run held against itself: what should be equal on all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from opdrift.commands.main import diff_trace
from opdrift.diagnose.across_ranks import diagnose_world
from opdrift.errors import IncomparableTracesError
from opdrift.records import Diagnosis
from opdrift.render import card, markdown
from opdrift.render import json as as_json
from opdrift.testing import Builder, collective


def vector(text: str) -> np.ndarray:
    return np.random.default_rng(sum(text.encode())).standard_normal(256).astype(np.float32)


def rank(
    *,
    weight: str = "w",
    result: str = "sum",
    statistics: str = "",
    issued: int = 1,
    extra: str = "",
) -> Callable[[Builder], None]:
    """A rank that reduces a gradient and updates a parameter with it."""

    def body(build: Builder) -> None:
        header = build.build().header
        number, ranks = header.rank, range(header.world_size or 1)
        w = build.leaf("fc.weight", content=vector(weight))
        mean = build.leaf("norm.running_mean", kind="buffer", content=vector("mean"))
        grad = build.op("mm", build.leaf("x", kind="input", content=vector(f"x {number}")), w)
        for _ in range(issued):
            grad = collective(
                build, "all_reduce", grad, result=vector(result), ranks=ranks, reduction="another"
            )
        if extra:
            grad = build.op(extra, grad)
        build.name(build.op("add_", w, grad), "fc.weight", when="exit")
        build.name(grad, "fc.weight", kind="gradient", when="exit")
        if statistics:
            mean = build.op("native_batch_norm_", mean, content=vector(f"{statistics} {number}"))
            build.name(mean, "norm.running_mean", kind="buffer", when="exit")

    return body


def checked(
    *bodies: Callable[[Builder], None],
    complete: bool = True,
    size: int = 0,
    raised: dict[int, str] | None = None,
) -> Diagnosis:
    builders = [
        Builder(
            rank=number,
            world_size=size or len(bodies),
            complete=complete or number == 0,
            exception=(raised or {}).get(number),
        )
        for number in range(len(bodies))
    ]
    for build, body in zip(builders, bodies, strict=True):
        body(build)
    return diagnose_world([b.build(f"run.trace/rank-{i:05d}") for i, b in enumerate(builders)])


def test_what_should_be_equal_is():
    """Inputs, activations and gradients before the reduction differ, by right."""
    diagnosis = checked(rank(), rank(), rank())

    assert (diagnosis.verdict, diagnosis.first, diagnosis.notes) == ("identical", None, ())
    assert (
        card.headline(diagnosis)
        == "identical: what should be equal on all ranks is equal (3 checks)"
    )


def test_a_parameter_that_differs_names_the_ranks_of_both_sides():
    """Two of three ranks agree: left stands for them, right for the third."""
    diagnosis = checked(rank(), rank(weight="other"), rank())

    first = diagnosis.first
    assert first is not None
    assert first.ranks is not None
    assert (first.kind, first.name, first.cause.slug) == ("leaf", "fc.weight", "replica")
    assert (first.ranks.left, first.ranks.right) == ((0, 2), (1,))
    assert (diagnosis.left.rank, diagnosis.right.rank) == (0, 1)
    assert card.headline(diagnosis) == (
        "diverged: before the first op: fc.weight differs (rank 1 against 0, 2)"
    )


def test_the_earliest_of_several_comes_first():
    """Ranks that got other sums hold other parameters after them: the sum comes first."""
    diagnosis = checked(rank(), rank(result="other"), rank())

    assert [(o.kind, o.op, o.cause.slug) for o in diagnosis.origins] == [
        ("op", "c10d.allreduce_.default", "collective"),
        ("op", "aten.add_.default", "replica"),
    ]


def test_a_change_that_one_rank_makes_by_itself_is_found_at_its_op():
    (origin,) = checked(rank(), rank(extra="_foreach_mul_")).origins

    assert (origin.kind, origin.op, origin.name) == ("op", "aten.add_.default", "fc.weight")
    assert (origin.seq.left, origin.seq.right) == (3, 4)


def test_ranks_that_disagree_about_a_collective_do_different_things():
    diagnosis = checked(rank(issued=2), rank())

    assert diagnosis.first is not None
    assert (diagnosis.first.kind, diagnosis.first.cause.slug) == ("structure", "collective")
    assert "the ranks do different things" in card.headline(diagnosis)


def with_inputs_for(steps: int, *, spoiled: bool = False) -> Callable[[Builder], None]:
    """A rank of three steps (as of `Join`): without inputs it only answers, and is handed the parameters at the end."""

    def body(build: Builder) -> None:
        w = build.leaf("fc.weight", content=vector("w"))
        for number in range(3):
            grad = build.op("zeros", shape=(256,), content=np.zeros(256, np.float32))
            if number < steps:
                with build.scope("fc"):
                    x = build.leaf(f"x{number}", kind="input", content=vector(f"x {number}"))
                    grad = build.op("mm", x, w)
            grad = collective(
                build, "all_reduce", grad, result=vector(f"sum {number}"), reduction="another"
            )
            if number < steps:
                last = vector("last") if number == 2 else None
                change = "*" if spoiled and number == 0 else ""
                w = build.op("add_", w, grad, change=change, content=last)
        flat = build.op("cat", w, content=vector("last"))
        handed = collective(build, "broadcast", flat, result=vector("last"), root=1)
        build.name(build.op("copy_", w, handed), "fc.weight", when="exit")
        build.name(grad, "fc.weight", kind="gradient", when="exit")

    return body


def test_a_rank_that_ran_out_of_inputs_need_not_hold_what_the_others_go_on_with():
    assert checked(with_inputs_for(1), with_inputs_for(3)).verdict == "identical"


def test_a_parameter_that_comes_apart_while_both_ranks_have_inputs_is_found():
    diagnosis = checked(with_inputs_for(2), with_inputs_for(3, spoiled=True))

    assert diagnosis.first is not None
    assert (diagnosis.first.name, diagnosis.first.cause.slug) == ("fc.weight", "replica")


def test_statistics_that_each_rank_keeps_are_a_note():
    """Nothing synchronises them, and nothing says that it should: no verdict."""
    diagnosis = checked(rank(statistics="own"), rank(statistics="own"))

    assert diagnosis.verdict == "identical"
    assert diagnosis.notes == (
        "norm.running_mean is kept by each rank for itself: equal at the start, and no longer at the end",
    )


def test_what_nothing_tells_of_is_said_not_judged():
    """Two ranks of a model that is split look just like two that were not synchronised."""

    def body(build: Builder) -> None:
        build.leaf("fc.weight", content=vector(f"rank {build.build().header.rank}"))

    with pytest.raises(IncomparableTracesError) as caught:
        checked(body, body)

    assert (
        "fc.weight differs between ranks, and nothing recorded says whether that is right"
        in str(caught.value)
    )


def test_a_rank_that_ended_leaves_the_answer_open():
    """The rank that ended is named with its last collective."""
    with pytest.raises(
        IncomparableTracesError, match="Nothing differs in what the ranks have"
    ) as e:
        checked(rank(), rank(), complete=False)
    assert "; rank 1 ended in the middle of the run, in or after all_reduce 1 of" in str(e.value)


def test_a_rank_that_ended_while_another_waited_is_the_answer():
    diagnosis = checked(rank(issued=2), rank(), complete=False)

    assert diagnosis.first is not None
    assert diagnosis.first.cause.slug == "rank-ended"


def test_a_rank_without_a_trace_is_named():
    assert checked(rank(), rank(), size=3).notes == ("rank 2 of 3 left no trace here",)


def test_the_trace_of_another_run_is_refused():
    builders = [Builder(rank=rank, launch=f"launch {rank}") for rank in (0, 1)]
    for build in builders:
        rank()(build)

    with pytest.raises(
        IncomparableTracesError, match="ranks 0 and 1 are not of one run: they were launched apart"
    ):
        diagnose_world([build.build() for build in builders])


def test_ranks_with_other_models_are_said():
    """The stages of a pipeline, or a mistake: what both hold alike is compared."""

    def body(build: Builder) -> None:
        number = build.build().header.rank or 0
        build.leaf("shared.weight", content=vector("shared"))
        build.leaf("head.weight", shape=(4, 8 + number))
        build.leaf(f"stage{number}.weight")

    diagnosis = checked(body, body)

    assert diagnosis.verdict == "identical"
    assert diagnosis.notes == (
        "rank 1's model is another one than rank 0's: stage0.weight only on rank 0; stage1.weight only on rank 1;"
        " head.weight of another shape or type: these are not compared",
    )


def test_what_a_rank_gathered_is_told_with_its_op_and_step():
    """It is not what the ranks began with."""

    def body(build: Builder) -> None:
        rank()(build)
        right = build.build().header.rank == 0
        wrong = {"parameter": "fc.weight", "offset": 0, "numel": 4}
        build.mark("use", unit="fc", step=3, intact=right, mismatch=[] if right else [wrong])

    diagnosis = checked(body, body)

    assert diagnosis.notes[0] == "the first difference lies in step 3"
    assert card.headline(diagnosis) == (
        "diverged: at op 3 of rank 1: fc.weight differs (rank 1 against 0)"
    )


def test_the_reports_say_the_same():
    """JSON names the ranks of each side; Markdown has the same card."""
    diagnosis = checked(rank(), rank(weight="other"), rank())

    document = json.loads(as_json.render(diagnosis))
    assert document["first"]["ranks"] == {"left": [0, 2], "right": [1]}
    assert document["alignment"]["method"] == "across the ranks of one run"
    assert "rank 1 against 0, 2" in markdown.render(diagnosis)


# ---- the command ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a", "b", "--across-ranks"], "looks into one distributed trace; 2 were given"),
        (["a", "--across-ranks", "--rank", "1"], "--rank compares two runs"),
        (["a", "--across-ranks", "--tree"], "--tree compares two runs"),
        (["a", "--across-ranks", "--samples", "0:1"], "--samples compares two runs"),
    ],
)
def test_options_of_two_runs_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert diff_trace(arguments) == 2
    assert said in capsys.readouterr().err


def test_a_path_without_ranks_is_one_sentence(
    tmp_path: Path, recorded: Path, capsys: pytest.CaptureFixture[str]
):
    assert diff_trace([str(tmp_path / "nothing"), "--across-ranks"]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert diff_trace([str(recorded / "base.trace"), "--across-ranks"]) == 2
    assert "holds the trace of one process" in capsys.readouterr().err


def test_a_rank_that_raised_after_all_that_is_checked_is_not_identical():
    """Nobody waited for it: the other rank came to the end of the run, and this one did not."""
    diagnosis = checked(rank(), rank(), raised={1: "ValueError: no such key"})

    (origin,) = diagnosis.origins
    assert (diagnosis.verdict, origin.kind) == ("diverged", "structure")
    assert origin.cause.summary == "rank 1 ended with ValueError: no such key"


@pytest.mark.parametrize("exception", ["SystemExit: 0", "SystemExit: "])
def test_a_rank_that_asked_to_end_is_no_difference(exception: str):
    diagnosis = checked(rank(), rank(), raised={1: exception})

    assert (diagnosis.verdict, diagnosis.notes) == ("identical", ())


def test_ranks_that_all_raised_are_said_to():
    """What they did until then is equal; it is not all that they were to do."""
    diagnosis = checked(rank(), rank(), raised=dict.fromkeys((0, 1), "ValueError: no such key"))

    assert diagnosis.verdict == "identical"
    assert diagnosis.notes == ("ranks 0 and 1 ended with ValueError: no such key",)


@pytest.mark.parametrize("raised", [False, True])
def test_ranks_of_which_nothing_can_be_checked_have_no_verdict(raised: bool):
    """Each computes something of its own, and no two of them meet."""

    def alone(build: Builder) -> None:
        build.output(build.op("relu", build.leaf("x", kind="input")))

    ends = dict.fromkeys((0, 1), "ValueError: no such key") if raised else None
    with pytest.raises(IncomparableTracesError) as caught:
        checked(alone, alone, raised=ends)

    assert "Nothing of ranks 0 and 1 could be held against each other" in str(caught.value)
    assert ("ended with ValueError: no such key" in str(caught.value)) is raised


def stepping(*, left_out: int | None = None) -> Callable[[Builder], None]:
    """A rank that reduces a gradient in each of three steps, or leaves one out (`no_sync`), and updates a parameter with it."""

    def body(build: Builder) -> None:
        number = build.build().header.rank
        w = build.leaf("fc.weight", content=vector("w"))
        x = build.leaf("x", kind="input", content=vector(f"x {number}"))
        reduced = 0
        for step in range(3):
            build.mark("step", step=step)
            with build.scope("fc"):
                grad = build.op("mm", x, w, content=vector(f"grad {step} {number}"))
            if step != left_out:
                result = vector(f"sum {reduced}")
                grad = collective(build, "all_reduce", grad, result=result, reduction="another")
                reduced += 1
            else:
                result = vector(f"own {number}")
            w = build.op("add_", w, grad, content=result)
        build.name(w, "fc.weight", when="exit")
        build.name(grad, "fc.weight", kind="gradient", when="exit")

    return body


def test_a_step_that_one_rank_does_not_reduce_in_is_told_with_the_steps_that_met():
    """Nothing raises an error for it: the reduction of the next step meets that of the step before."""
    diagnosis = checked(stepping(), stepping(left_out=1))

    told = [line for cause in diagnosis.causes for line in cause.evidence]
    assert any(
        line.startswith("in step 1, collectives of group 0 were issued 1 on rank 0 and 0 on rank 1")
        for line in told
    )
    assert "all_reduce 2 of group 0 is of step 1 on rank 0 and of step 2 on rank 1" in told


def test_ranks_that_step_alike_are_told_nothing_of_steps():
    diagnosis = checked(stepping(left_out=1), stepping(left_out=1))

    told = [line for cause in diagnosis.causes for line in cause.evidence]
    assert told
    assert not any("of step" in line for line in told)
