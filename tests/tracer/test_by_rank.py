"""Two distributed runs: the rank that a difference originates on is told from those that receive it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from opdrift.diagnose.answer import diagnose
from opdrift.diagnose.by_rank import of_one_rank, of_ranks
from opdrift.diagnose.one_process import with_each
from opdrift.errors import IncomparableTracesError
from opdrift.records import Diagnosis, Sides
from opdrift.render.card import headline
from opdrift.testing import Builder, collective
from opdrift.tracefile.reader import Trace
from opdrift.world.parts import Parts
from opdrift.world.received import Exchanges


def ranks(
    *,
    fault: int | None = None,
    size: int = 3,
    own: str = "",
    lost: int | None = None,
    plain: bool = False,
) -> dict[int, Trace]:
    """Each rank multiplies by weights of its own, all add up, and each goes on.

    Args:
        fault: The rank whose first product is another one.
        size: How many ranks.
        own: "all" if every rank's second product is another one; a rank's number if that rank's is.
        lost: A rank whose trace was not closed.
        plain: Each computes the sum by itself, without a collective.
    """
    builders = [Builder(rank=r, world_size=size, complete=r != lost) for r in range(size)]
    products = []
    for rank, build in enumerate(builders):
        x = build.leaf("x", kind="input")
        w = build.leaf("a.weight", content=f"a {rank}")
        products.append(build.op("mm", x, w, change="*" if rank == fault else ""))
    total = sum(build.content(p) for build, p in zip(builders, products, strict=True))
    for rank, (build, product) in enumerate(zip(builders, products, strict=True)):
        y = (
            build.op("relu", product, content=np.float32(total))
            if plain
            else collective(build, "all_reduce", product, result=np.float32(total), ranks=range(size), reduction="SUM")
        )  # fmt: skip
        changed = own in ("all", str(rank))
        with build.scope("head"):
            y = build.op("mm", y, build.leaf("head.weight"), change="*" if changed else "")
        build.output(y)
    return {rank: build.build(f"run.trace/rank-{rank:05d}") for rank, build in enumerate(builders)}


def compared(left: dict[int, Trace], right: dict[int, Trace]) -> Diagnosis:
    ones = {rank: one_of(rank, left, right) for rank in sorted(left.keys() & right.keys())}
    found = {rank: one for rank, one in ones.items() if isinstance(one, Diagnosis)}
    failed = {rank: e for rank, e in ones.items() if isinstance(e, IncomparableTracesError)}
    return of_ranks(found, failed, left, right, compare=as_far_as_it_goes(left, right))


def alone(rank: int, left: dict[int, Trace], right: dict[int, Trace]) -> Diagnosis:
    """As `--rank` does."""
    one = one_of(rank, left, right)
    return of_one_rank(rank, one, left, right, compare=as_far_as_it_goes(left, right))


def one_of(
    rank: int, left: dict[int, Trace], right: dict[int, Trace]
) -> Diagnosis | IncomparableTracesError:
    try:
        return diagnose(left[rank], right[rank])
    except IncomparableTracesError as error:
        return error


def as_far_as_it_goes(
    left: dict[int, Trace], right: dict[int, Trace]
) -> Callable[[int], Diagnosis]:
    return lambda rank: diagnose(left[rank], right[rank], unfinished=True)


def firsts(diagnosis: Diagnosis) -> dict[int, tuple[str | None, str]]:
    return {
        rank: (one.first.op, one.first.cause.slug)
        for rank, one in diagnosis.ranks.items()
        if one.first is not None
    }


def test_the_rank_whose_op_went_wrong_originates_and_the_others_receive():
    """By itself each other rank would blame its all_reduce: its own input is equal, and the sum is not."""
    diagnosis = compared(ranks(), ranks(fault=1))

    assert diagnosis.left.rank == 1
    assert diagnosis.first is not None
    assert (diagnosis.first.op, diagnosis.first.cause.slug != "other-rank") == (
        "aten.mm.default",
        True,
    )
    assert firsts(diagnosis)[0] == firsts(diagnosis)[2] == ("c10d.allreduce_.default", "other-rank")
    assert diagnosis.notes[-1] == (
        "rank 1 originates the difference; ranks 0 and 2 receive it through all_reduce 1 of group 0"
    )


def test_what_a_rank_receives_has_inputs_that_differ():
    """The collective's inputs are those of all ranks."""
    received = compared(ranks(), ranks(fault=1)).ranks[0]

    assert received.first is not None
    assert received.first.inputs_match is False
    assert received.first.cause.evidence[0] == (
        "this rank gave the same to all_reduce 1 of group 0 (op 2) in both runs; rank 1 did not"
    )


def test_a_rank_that_also_has_a_fault_of_its_own_is_told_of_that():
    """What it receives comes first, what it adds is still found."""
    one = compared(ranks(), ranks(fault=1, own="0")).ranks[0]

    assert [o.cause.slug for o in one.origins] == [
        "other-rank"
    ]  # the head reads what differs already


def test_a_difference_after_the_last_collective_belongs_to_its_rank():
    diagnosis = compared(ranks(), ranks(own="2"))

    assert (diagnosis.left.rank, {r: one.verdict for r, one in diagnosis.ranks.items()}) == (
        2,
        {0: "identical", 1: "identical", 2: "diverged"},
    )
    assert "compared ranks 0, 1 and 2, rank by rank; this is rank 2" in diagnosis.notes


def test_what_comes_before_a_collective_comes_first():
    """Rank 2's own difference lies after the sum, rank 1's before it."""
    diagnosis = compared(ranks(), ranks(fault=1, own="2"))

    assert diagnosis.left.rank == 1


def test_equal_runs_are_identical_on_all_ranks():
    diagnosis = compared(ranks(), ranks())

    assert (diagnosis.verdict, set(diagnosis.ranks)) == ("identical", {0, 1, 2})


def test_one_rank_by_itself_is_told_what_it_received():
    """`--rank 0`: the other ranks' traces are looked at, and only this one's is compared."""
    left, right = ranks(), ranks(fault=1)

    one = alone(0, left, right)

    assert one.first is not None
    assert one.first.cause.slug == "other-rank"


def test_one_rank_by_itself_is_told_what_it_received_in_a_run_that_alone_has_collectives():
    """What the others gave is not known to differ: where their own difference lies, tells it, as without `--rank`."""
    left, right = ranks(plain=True), ranks(fault=1)

    slugs = {rank: slug for rank, (_, slug) in firsts(compared(left, right)).items()}

    assert [slugs[0], slugs[2]] == ["other-rank", "other-rank"] != [slugs[1]] * 2
    for rank in range(3):
        one = alone(rank, left, right)
        assert one.first is not None
        assert (rank, one.first.cause.slug) == (rank, slugs[rank])


def test_runs_of_different_sizes_are_compared_as_far_as_they_go():
    diagnosis = compared(ranks(size=2), ranks(size=3))

    assert set(diagnosis.ranks) == {0, 1}
    assert any("the left run had 2 ranks, the right one 3" in note for note in diagnosis.notes)
    assert "only the right trace has rank 2" in diagnosis.notes


def test_a_rank_without_a_trace_is_named():
    left, right = ranks(), ranks()
    del right[1]

    assert "the right trace lacks rank 1" in compared(left, right).notes


def test_a_rank_that_ended_early_leaves_the_answer_open():
    """Nothing differs in what both have: that is no "identical". If another rank differs, that is said."""
    with pytest.raises(IncomparableTracesError, match=r"rank-00001 is incomplete") as error:
        compared(ranks(), ranks(lost=1))
    assert str(error.value).endswith(
        "In the right run, rank 1 ended in the middle of the run, in or after all_reduce 1 of group 0."
    )
    diagnosis = compared(ranks(), ranks(lost=1, own="2"))
    assert any(note.startswith("rank 1 could not be compared: ") for note in diagnosis.notes)


def test_a_run_of_one_process_has_no_rank_to_name():
    """The heading names that of the distributed run."""
    build = Builder()
    x = build.leaf("x", kind="input")
    build.output(build.op("mm", x, build.leaf("a.weight", content="a 0"), change="*"))

    diagnosis = compared({0: build.build()}, ranks(size=2))

    assert headline(diagnosis).endswith(" (rank 0 of 2)")
    assert "only rank 0 could be compared" in diagnosis.notes


def test_a_leaf_without_a_name_is_called_so():
    left, right = Builder(), Builder()
    for build, content in ((left, "a"), (right, "b")):
        x = build.leaf("", kind="constant", when="use", content=content)
        build.output(build.op("neg", x))

    found = diagnose(left.build(), right.build())

    assert headline(found) == "diverged: before the first op: a tensor without a name differs"


# ---- parameters that the ranks share out ---------------------------------------------------------------


def sharded(*loaded: str) -> dict[int, Trace]:
    """Each rank holds a part of a parameter, whose content follows from what it loaded, and gathers the whole."""
    traces = {}
    for rank, own in enumerate(loaded):
        build = Builder(rank=rank, world_size=len(loaded))
        build.leaf("fc.weight", kind="shard", when="gather", shape=(2, 8), content=own)
        build.mark(
            "gather", library="torch_fsdp", unit="fc", nth=1, ranks=[0, 1], rank=rank, layout="each",
            buffer="fc", parameters=[["fc.weight", 0, [4, 8]]], intact=True,
        )  # fmt: skip
        w = build.leaf("fc.weight", when="gather", content=f"whole {'+'.join(loaded)}")
        norm = build.leaf("norm.weight", when="gather", content="ones")
        with build.scope("fc"):
            y = build.op("mul", build.op("mm", build.leaf("x", kind="input"), w), norm)
        # what training makes of it is gathered again
        build.leaf("norm.weight", when="gather", content=f"trained {'+'.join(loaded)}")
        build.output(y)
        traces[rank] = build.build(f"run.trace/rank-{rank:05d}")
    return traces


def test_a_rank_that_loaded_other_weights_originates_and_the_others_gather_them():
    """The gathered parameter differs on all ranks; the parts that go into it do on one."""
    diagnosis = compared(sharded("a", "b"), sharded("a", "other"))

    assert diagnosis.left.rank == 1
    assert firsts(diagnosis) == {
        0: ("aten.mm.default", "other-rank"),
        1: ("aten.mm.default", "weights"),
    }
    assert diagnosis.notes[-1] == (
        "rank 1 originates the difference; rank 0 receives it through gather 1 of fc (torch_fsdp)"
    )


def test_a_rank_of_whose_own_part_nothing_is_known_may_be_the_one_that_gave_another():
    """Its part has a name and no fingerprint, in both runs: who received what is not claimed."""

    def unread(rank: int, own: str) -> Trace:
        build = Builder(rank=rank, world_size=2)
        part = build.leaf("flat", kind="shard", when="gather", shape=(2, 8), content=own)
        if not rank:
            part = build.again(part)
        build.name(part, "fc.weight", kind="shard", when="gather")
        build.mark(
            "gather", library="torch_fsdp", unit="fc", nth=1, ranks=[0, 1], rank=rank, layout="each",
            buffer="fc", parameters=[["fc.weight", 0, [4, 8]]], intact=True,
        )  # fmt: skip
        return build.build()

    left, right = ({r: unread(r, own) for r in (0, 1)} for own in ("one", "other"))
    parts = Parts(left, right)
    weight = compared(sharded("a", "b"), sharded("a", "other")).origins[0]
    leaf = replace(weight, kind="leaf", name="fc.weight", members=())

    assert parts.gathered(0, leaf) is None
    assert parts.gathered(1, leaf) is None


def test_of_what_is_gathered_again_only_the_first_counts_as_before_the_first_op():
    """The norm's weight was equal when the run began."""
    one = compared(sharded("a", "b"), sharded("a", "other")).first

    assert one is not None
    assert one.cause.summary.startswith("1 of 2 tensors of the model differs before the first op")


def test_ranks_that_all_loaded_other_weights_all_originate():
    diagnosis = compared(sharded("a", "b"), sharded("c", "d"))

    assert firsts(diagnosis) == dict.fromkeys((0, 1), ("aten.mm.default", "weights"))
    assert "compared ranks 0 and 1, rank by rank; this is rank 0" in diagnosis.notes


# ---- a run that ended early ----------------------------------------------------------------------------


CLOSED = "RuntimeError: Connection closed by peer"


def reducing(*issued: int, exceptions: tuple[str, ...] = (), lost: tuple[int, ...] = (), change: int | None = None, left_behind: float = 1.0) -> dict[int, Trace]:  # fmt: skip
    """Each rank issues so many collectives, and goes on if it did not raise.

    One that raised has `left_behind` in the tensor of its last one.
    """
    traces = {}
    for rank, count in enumerate(issued):
        raised = exceptions[rank] if exceptions else ""
        build = Builder(rank=rank, world_size=len(issued), complete=rank not in lost, **({"exception": raised} if raised else {}))  # fmt: skip
        y = build.leaf("x", kind="input")
        for number in range(count):
            y = build.op(
                "mm", y, build.leaf(f"w{number}.weight"), change="*" if rank == change else ""
            )
            y = collective(build, "all_reduce", y, result=np.full(4, left_behind if raised and number == count - 1 else 1.0, "<f4"), ranks=range(len(issued)))  # fmt: skip
        if not raised and rank not in lost:
            build.output(build.op("relu", y))
        traces[rank] = build.build(f"run.trace/rank-{rank:05d}")
    return traces


def test_a_rank_that_was_killed_is_the_cause_of_what_the_others_raised():
    """By itself the other one would be told with what its communication library raised."""
    left, right = reducing(3, 3), reducing(2, 1, exceptions=(CLOSED, ""), lost=(1,))

    for found in (compared(left, right), alone(0, left, right), alone(1, left, right)):
        assert found.first is not None
        assert found.first.cause.slug == found.causes[0].slug == "rank-ended"
        assert found.first.cause.summary.startswith("in the right run, rank 1 ended in the middle")


@pytest.mark.parametrize("number", [0, 1])
def test_of_ranks_that_were_all_killed_the_one_that_the_others_waited_for_is_told(number: int):
    """A launcher kills the rest: no trace is whole and nothing differs, but what is missing never came."""
    runs = [reducing(3, 3), reducing(2, 1, lost=(0, 1))]
    name = ("left", "right")[number]

    found = compared(*(runs if number else runs[::-1]))

    assert (found.verdict, found.left.rank, found.causes[0].slug) == ("diverged", 1, "rank-ended")
    assert headline(found) == (
        f"diverged: in the {name} run, rank 1 ended in the middle of the run, in or after all_reduce 1 of group 0"
        " (rank 1 of 2)"
    )
    assert [one.causes[0].slug for one in found.ranks.values()] == ["rank-ended"] * 2
    assert [o.op for one in found.ranks.values() for o in one.origins] == ["c10d.allreduce_.default"] * 2  # fmt: skip


def test_ranks_that_were_lost_at_one_place_leave_the_answer_open():
    """They may still be running: nobody waited for another one."""
    with pytest.raises(IncomparableTracesError, match=r"In the right run, rank \d ended") as error:
        compared(reducing(3, 3), reducing(2, 2, lost=(0, 1)))

    assert "is incomplete" in str(error.value)


def test_what_differs_before_a_rank_was_killed_comes_first():
    left, right = reducing(3, 3), reducing(2, 1, lost=(0, 1), change=0)

    found = compared(left, right)

    assert (found.left.rank, found.first is not None and found.first.op) == (0, "aten.mm.default")
    assert found.ranks[1].causes[0].slug == "rank-ended"


def test_ranks_that_all_raised_by_themselves_end_as_each_of_them_says():
    """No rank was missed by another one."""
    own = "ValueError: empty"

    found = compared(reducing(3, 3), reducing(2, 2, exceptions=(own, own)))

    assert found.first is not None
    assert found.first.cause.summary.startswith(f"the right run ended with {own}")


# ---- collectives that went wrong in one run ------------------------------------------------------------


def added_up(reductions: tuple[str, str], result: float) -> dict[int, Trace]:
    """Two ranks reduce, each as it asks for."""
    traces = {}
    for rank, reduction in enumerate(reductions):
        build = Builder(rank=rank, world_size=2)
        x = build.leaf("x", kind="input")
        y = collective(build, "all_reduce", x, result=np.full(4, result, "<f4"), reduction=reduction)  # fmt: skip
        build.output(build.op("relu", y, content=np.full(4, result, "<f4")))
        traces[rank] = build.build(f"run.trace/rank-{rank:05d}")
    return traces


@pytest.mark.parametrize("number", [0, 1])
def test_what_ranks_do_not_agree_about_is_the_cause_of_another_result_of_a_collective(number: int):
    """Each rank's inputs are equal in both runs: by itself it would blame the kernel."""
    runs = [added_up(("SUM", "SUM"), 1.0), added_up(("SUM", "MAX"), 9.0)]
    name = ("left", "right")[number]
    left, right = runs if number else runs[::-1]

    for found in (compared(left, right), alone(0, left, right), alone(1, left, right)):
        assert found.first is not None
        assert (found.first.op, found.first.cause.slug, found.first.cause.confidence) == (
            "c10d.allreduce_.default",
            "collective",
            "certain",
        )
        assert found.first.cause.summary.startswith(
            f"in the {name} run, the ranks do not agree about the reduction of collective 1"
        )


def test_what_ranks_agree_about_in_neither_run_explains_no_difference():
    left, right = added_up(("SUM", "MAX"), 1.0), added_up(("SUM", "MAX"), 9.0)

    assert {slug for _, slug in firsts(compared(left, right)).values()} == {"structure"}


def test_a_collective_that_gives_something_else_is_never_told_as_a_kernel():
    """What the other ranks gave to it is an input, too, and a rank by itself does not know that."""
    found = diagnose(added_up(("SUM", "SUM"), 1.0)[0], added_up(("SUM", "SUM"), 9.0)[0])

    assert found.first is not None
    assert found.first.op == "c10d.allreduce_.default"
    assert "kernel" not in {each.slug for each in found.causes}


def test_what_is_read_of_a_collective_behind_a_wait_was_received_from_it():
    """Functional collectives return at once, and what is read is what `wait_tensor` returns."""

    def run(given: str) -> dict[int, Trace]:
        traces = {}
        for rank in (0, 1):
            build = Builder(rank=rank, world_size=2)
            x = build.leaf("x", kind="input", shape=(4,), content=given if rank else "own")
            result = np.full(4, len(given), "<f4")
            y = collective(build, "all_reduce", x, result=result, reduction="SUM")
            y = build.op("_c10d_functional.wait_tensor.default", y, content=result)
            build.output(build.op("relu", y))
            traces[rank] = build.build(f"run.trace/rank-{rank:05d}")
        return traces

    left, right = run("this"), run("another")
    reader = len(left[0].ops)
    origin = replace(diagnose(left[0], right[0]).origins[0], seq=Sides(reader, reader))

    found = Exchanges(left, right).received(0, origin)

    assert left[0].op(reader - 1).name == "aten.relu.default"
    assert found is not None
    assert found.givers == (1,)


def test_what_a_collective_left_when_its_peer_was_gone_is_no_result():
    """Its tensor may hold a part of a sum: that the peer ended is what happened."""
    left = reducing(3, 3)
    right = reducing(2, 1, exceptions=(CLOSED, ""), lost=(1,), left_behind=7.0)

    for found in (compared(left, right), alone(0, left, right)):
        assert found.first is not None
        assert found.first.cause.slug == found.causes[0].slug == "rank-ended"
        assert found.first.cause.summary.startswith("in the right run, rank 1 ended in the middle")
    assert firsts(compared(left, right))[0] == ("c10d.allreduce_.default", "rank-ended")


def share(data: str, *, rank: int | None = None, wrong: bool = False) -> Trace:
    """A model that is given some data: one process, or a rank of two."""
    build = Builder() if rank is None else Builder(rank=rank, world_size=2)
    x = build.leaf("x", kind="input", content=data)
    build.output(build.op("mm", x, build.leaf("fc.weight"), change="*" if wrong else ""))
    return build.build()


def with_one_process(data: str, *right: Trace) -> Diagnosis:
    ranks = dict(enumerate(right))
    return compared(dict(with_each({0: share(data)}, ranks)), ranks)


def test_a_rank_with_other_data_than_the_one_process_is_named_and_not_compared():
    """Each rank may have a share of its own: the one that has what the process had tells."""
    found = with_one_process("x", share("x", rank=0), share("y", rank=1))

    assert found.verdict == "identical"
    assert any(
        "rank 1 had other data than the one process, and is not compared" in note
        for note in found.notes
    )


def test_where_no_rank_has_the_data_of_the_one_process_that_is_the_difference():
    found = with_one_process("x", share("y", rank=0), share("z", rank=1))

    assert found.first is not None
    assert (found.verdict, found.first.cause.slug) == ("diverged", "input")


def test_ranks_that_all_differ_from_the_one_process_on_the_right_are_told():
    """The right run has no rank 1 of its own, to whose collectives others could have given something else."""
    one = ranks(size=2, plain=True)[0]
    found = compared(ranks(size=2, own="all"), dict.fromkeys((0, 1), one))

    first = found.ranks[0].first
    assert first is not None
    assert (first.op, first.module) == ("aten.mm.default", "head")
    assert found.ranks[1].verdict == "diverged"


def test_what_one_rank_does_otherwise_than_the_one_process_is_found():
    found = with_one_process("x", share("x", rank=0), share("x", rank=1, wrong=True))

    assert (found.verdict, found.right.rank) == ("diverged", 1)
    assert (
        "the one process of the left run was compared with each of ranks 0 and 1; this is rank 1"
        in found.notes
    )


ORDER = ("a", "b", "c", "d")
DATA = np.linspace(-1, 1, 16, dtype=np.float32)


def stage(*names: str, rank: int | None = None, wrong: str = "", extra: str = "") -> Trace:
    """A chain of layers, all of them in one process, or some on a rank that receives what it is not given.

    Args:
        names: The layers.
        rank: The rank; None for one process.
        wrong: A layer that computes something else.
        extra: A layer that does something more, or "after" one: what is done in no layer.
    """
    build = Builder() if rank is None else Builder(rank=rank, world_size=2)
    before = ORDER.index(names[0])
    x = build.leaf("x", kind="input", content=DATA)
    if before:
        x = build.op("recv_", x, content=DATA * np.float32(2**before))
    for name in names:
        with build.scope(name):
            factor = np.float32(2.5 if name == wrong else 2)
            x = build.op("mm", x, build.leaf(f"{name}.weight"), content=build.content(x) * factor)
            if name == extra:
                x = build.op("dropout", x, content=build.content(x) * np.float32(1.25))
        if extra == f"after {name}":
            x = build.op("mul", x, content=build.content(x) * np.float32(1.25))
    build.output(x)
    return build.build()


def of_stage(whole: Trace, part: Trace, other: Trace) -> Diagnosis:
    return diagnose(whole, part, fellows=Sides((), (other,)))


FIRST, SECOND = stage("a", "b", rank=0), stage("c", "d", rank=1)


@pytest.mark.parametrize(("part", "other"), [(FIRST, SECOND), (SECOND, FIRST)])
def test_a_stage_lacks_nothing_that_other_ranks_hold(part: Trace, other: Trace):
    """What both have is equal; the rest of the model is on the other rank."""
    found = of_stage(stage("a", "b", "c", "d"), part, other)

    assert found.verdict == "identical"
    assert any("a part of the model" in note for note in found.notes)


def test_without_the_rank_that_holds_the_rest_a_part_of_a_model_is_another_model():
    found = diagnose(stage("a", "b", "c", "d"), FIRST)

    assert found.verdict == "diverged"


@pytest.mark.parametrize(
    "part",
    [
        stage("c", "d", rank=1, wrong="c"),
        stage("c", "d", rank=1, extra="c"),
        stage("c", "d", rank=1, extra="after c"),
        stage("c", "d", rank=1, extra="after d"),
    ],
    ids=[
        "another result",
        "an op more in a module of the stage",
        "an op more between its modules",
        "an op more behind its modules",
    ],
)
def test_what_a_stage_does_otherwise_is_found(part: Trace):
    found = of_stage(stage("a", "b", "c", "d"), part, FIRST)

    assert found.verdict == "diverged"
