"""Gathers, moves and reshards that are not what they should be, each with the nearest thing that is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opdrift
from opdrift import tfp1
from opdrift.findings import findings
from opdrift.gathers import random_parts
from opdrift.records import Finding
from opdrift.testing import Builder
from opdrift.tracefile.reader import Trace

PARAMETERS = [["layers.0.fc.weight", 0, [8]], ["layers.0.fc.bias", 8, [4]]]


def hashed(content: str) -> str:
    """The hash of four elements that hold these letters."""
    return f"{tfp1.raw_of(map(ord, content), 4):016x}"


def digest(content: str) -> dict[str, Any]:
    return {"raw": hashed(content), "n": len(content), "code": 0}


def gather(build: Builder, rank: int = 0, *, kind: str = "gather", **fields: Any) -> None:
    """A flat buffer of twelve elements over two ranks of six: `weight` is abcdefgh, `bias` ijkl."""
    whole = fields.pop("whole", "abcdefghijkl")
    shard = fields.pop("shard", ("abcdef", "ghijkl")[rank])
    cuts = ((0, 0, 6),) if rank == 0 else ((0, 6, 2), (1, 0, 4))
    own, start = [], 0
    for part, offset, size in cuts:
        own.append([part, offset, size, hashed(shard[start : start + size])])
        start += size
    build.mark(
        kind,
        **{
            "library": "torch_fsdp",
            "unit": "layers.0",
            "buffer": "layers.0._flat_param",
            "nth": 1,
            "ranks": [0, 1],
            "rank": rank,
            "parameters": PARAMETERS,
            "shard": digest(shard),
            "own": own,
            "segments": [digest(whole[:6]), digest(whole[6:])],
            "wholes": [hashed(whole[:8]), hashed(whole[8:])],
            "intact": True,
            **fields,
        },
    )


def mismatch(parameter: str, content: str, *, zeros: bool = False) -> dict[str, Any]:
    return {"parameter": parameter, "offset": 0, "numel": 6, "zeros": zeros, "found": digest(content)}  # fmt: skip


def ranks(*fields: dict[str, Any]) -> list[Trace]:
    traces = []
    for rank, each in enumerate(fields):
        build = Builder(rank=rank)
        gather(build, rank, **each)
        traces.append(build.build())
    return traces


def only(*traces: Trace) -> Finding:
    (found,) = findings(traces)
    return found


# ---- one rank --------------------------------------------------------------------------------------------


def test_a_gather_that_is_not_its_shard_is_a_finding():
    """It names the parameter, how many elements, and that they are zeros."""
    build = Builder()
    gather(build, intact=False, mismatch=[mismatch("layers.0.fc.weight", "\0" * 6, zeros=True)])

    found = only(build.build())

    assert (found.kind, found.cause.slug, found.name, found.module) == (
        "gather", "fsdp-gather", "layers.0.fc.weight", "layers.0",
    )  # fmt: skip
    assert (
        "layers.0.fc.weight: 6 elements from 0 on are not the shard's, all zeros"
        in found.cause.evidence
    )


@pytest.mark.parametrize("kind", ["gather", "use", "cast", "move", "reshard"])
@pytest.mark.parametrize("intact", [True, None])
def test_what_is_intact_or_could_not_be_read_is_no_finding(kind, intact):
    build = Builder()
    gather(build, kind=kind, intact=intact)

    assert findings([build.build()]) == ()


def test_content_that_the_shard_held_before_is_stale():
    """It was gathered from this shard, the shard was written since, and it is used once more."""
    build = Builder()
    gather(build)
    build.mark("step", step=4)
    gather(build, kind="use", shard="ABCDEF", intact=False, mismatch=[mismatch("layers.0.fc.weight", "abcdef")])  # fmt: skip

    found = only(build.build())

    assert "that is what this shard held at gather 1 (op 0)" in found.cause.evidence
    assert found.cause.try_.startswith("Gather again after the shards change")


def test_content_that_the_shard_holds_later_is_not_stale():
    build = Builder()
    gather(build, intact=False, mismatch=[mismatch("layers.0.fc.weight", "ABCDEF")])
    build.op("relu", build.leaf("x", kind="input", content=np.ones(2, "<f4")))
    gather(build, nth=2, shard="ABCDEF", whole="ABCDEFghijkl")

    found = only(build.build())

    assert not any("this shard held" in line for line in found.cause.evidence)


def test_the_same_fault_again_and_again_is_told_once():
    build = Builder()
    for nth in (1, 2, 3):
        gather(build, nth=nth, intact=False, mismatch=[mismatch("layers.0.fc.weight", "??????")])
    gather(build, nth=4, intact=False, mismatch=[mismatch("layers.0.fc.bias", "??????")])

    found = findings([build.build()])

    assert [each.name for each in found] == ["layers.0.fc.weight", "layers.0.fc.bias"]
    assert found[0].cause.evidence[-1].startswith("the same is wrong 2 times more")


# ---- several ranks -----------------------------------------------------------------------------------------


def test_segments_that_are_their_owners_shards_are_no_finding():
    assert findings(ranks({}, {})) == ()


def test_another_rank_s_segment_is_held_against_its_shard():
    """Rank 1's own half is right, the other half is not what rank 0 held; only one parameter is in it."""
    found = only(*ranks({}, {"whole": "xbcdefghijkl"}))

    assert (found.rank, found.name) == (1, "layers.0.fc.weight")
    assert found.cause.evidence[-1] == "the segment of rank 0 is not what rank 0 held"


def test_segments_in_the_wrong_order_are_told_as_that():
    """Rank 0 sees its own half at the wrong place, and rank 1's in place of it."""
    fault = {"whole": "ghijklabcdef", "intact": False, "mismatch": [mismatch("layers.0.fc.weight", "ghijkl")]}  # fmt: skip

    found = only(*ranks(fault, {}))

    assert found.rank == 0
    assert "it is rank 0's shard" in found.cause.evidence


def test_what_differs_in_padding_alone_is_no_finding():
    """The segment differs, and all parameters are as the ranks had them."""
    fault = {"segments": [digest("abcdef"), digest("ghijkx")]}

    assert findings(ranks(fault, {})) == ()


def test_other_gathers_are_not_held_against_each_other():
    """The second gather of one rank is not the first of the other."""
    assert findings(ranks({"nth": 2}, {"whole": "xbcdefghijkl"})) == ()


def test_marks_of_a_library_that_tells_less_are_compared_too():
    """fairscale's have no `own` and no `wholes`: what is wrong is told with all parameters of the buffer."""
    less = {"own": None, "wholes": None}

    found = only(*ranks(less, {**less, "whole": "xbcdefghijkl"}))

    assert (found.rank, found.name) == (1, "layers.0.fc.weight")


# ---- giving back ---------------------------------------------------------------------------------------------


def given_back(*, write: bool, **changed: Any) -> Trace:
    """A parameter that is gathered, perhaps written, and given back."""
    build = Builder()
    content = np.arange(8, dtype="<f4")
    weight = build.op("_allgather_base_", build.op("empty", shape=(8,)), content=content)
    build.name(weight, "layers.0.fc.weight", when="gather")
    gather(build)
    if write:
        with build.scope("layers.0"):
            build.op("clamp_", weight, content=content.clip(0, 1))
    change = {"parameter": "layers.0.fc.weight", "written_back": False, **changed}
    gather(build, kind="reshard", intact=bool(change["written_back"]), changed=[change])
    return build.build()


def test_a_change_that_is_thrown_away_names_the_op_that_made_it():
    found = only(given_back(write=True))

    assert (found.name, found.op, found.cause.slug) == (
        "layers.0.fc.weight", "aten.clamp_.default", "fsdp-gather",
    )  # fmt: skip


def test_what_one_line_does_at_every_step_is_told_once_with_all_its_parameters():
    build = Builder()
    for _ in range(3):
        gathered = []
        for name in ("layers.0.fc.weight", "layers.0.fc.bias"):
            made = build.op(
                "_allgather_base_", build.op("empty", shape=(8,)), content=np.ones(8, "<f4")
            )
            build.name(made, name, when="gather")
            gathered.append((name, made))
        gather(build)
        with build.scope("layers.0"):
            for _, made in gathered:
                build.op(
                    "clamp_", made, content=np.zeros(8, "<f4"), source=("critic.py", 7, "forward")
                )
        changed = [{"parameter": name, "written_back": False} for name, _ in gathered]
        gather(build, kind="reshard", intact=False, changed=changed)

    found = only(build.build())

    assert found.cause.summary == (
        "layers.0.fc.weight, layers.0.fc.bias were changed while they were gathered, and the changes were thrown away"
    )
    assert found.cause.evidence[-1] == "the same happens 2 times more, last before op 18"


def used(*, write: bool = True, before: bool = False, shard: str = "abcdef", **use: Any) -> Trace:
    """A weight that is gathered, perhaps written, used for a second time and given back; `before`: used, then written.

    `shard` is what this rank's part is at that use.
    """
    build = Builder()
    content = np.arange(8, dtype="<f4")
    weight = build.op("_allgather_base_", build.op("empty", shape=(8,)), content=content)
    build.name(weight, "layers.0.fc.weight", when="gather")
    gather(build)
    use = {"intact": not write, "shard": shard, **use}
    if before:
        gather(build, kind="use", nth=2, **use)
    if write:
        weight = build.op(
            "clamp_", weight, content=content.clip(0, 1), source=("critic.py", 7, "f")
        )
    with build.scope("layers.0"):
        build.output(build.op("relu", weight, content=content.clip(0, 1) if write else content))
    if not before:
        gather(build, kind="use", nth=2, **use)
    changed = [{"parameter": "layers.0.fc.weight", "written_back": False}] if write else []
    gather(build, kind="reshard", intact=not write, changed=changed)
    return build.build()


def test_a_use_of_what_an_op_had_changed_is_told_with_the_op_alone():
    """The finding stands at the op, not where the parameters were given back."""
    found = only(used(mismatch=[mismatch("layers.0.fc.weight", "??????")]))

    assert (found.op, found.seq) == ("aten.clamp_.default", 3)
    assert "(op 3, critic.py:7 in f)" in found.cause.evidence[0]


@pytest.mark.parametrize(
    ("before", "name"),
    [(True, "layers.0.fc.weight"), (False, "layers.0.fc.bias")],
    ids=["used before the op", "another parameter"],
)
def test_a_use_that_the_op_does_not_explain_is_told_beside_it(before, name):
    found = findings([used(before=before, mismatch=[mismatch(name, "??????")])])

    assert sorted(str(each.op) for each in found) == ["None", "aten.clamp_.default"]


def test_a_use_of_what_the_shard_held_before_is_told_beside_an_op_that_changed_what_was_gathered():
    """The shard was written since: the op does not explain that the use does not have it."""
    found = findings([used(shard="ABCDEF", mismatch=[mismatch("layers.0.fc.weight", "abcdef")])])

    assert sorted(str(each.op) for each in found) == ["None", "aten.clamp_.default"]
    assert any(each.cause.summary.startswith("stale parameters") for each in found)


def torn(*, wrong_from_the_start: bool = False, steps: bool = False) -> Trace:
    """A weight that changes with no op while it is gathered, is used as it then is, and given back."""
    build = Builder()
    if steps:
        build.mark("step", step=3)
    x = build.leaf("x", kind="input", shape=(8,))
    wrong = {"intact": False, "mismatch": [mismatch("layers.0.fc.weight", "abcxef")]}
    gather(build, **(wrong if wrong_from_the_start else {}))
    build.output(build.op("relu", x))
    if steps:
        build.mark("step", step=4)
    gather(build, kind="use", **wrong)
    change = {
        "parameter": "layers.0.fc.weight",
        "written_back": False,
        "before": digest("abcdefgh"),
        "found": digest("abcxefgh"),
    }
    gather(build, kind="reshard", intact=False, changed=[change])
    return build.build()


def test_a_use_of_what_changed_with_no_op_is_told_with_the_change_alone():
    """The gather was right, and so was what it was gathered from."""
    found = only(torn())

    assert (found.cause.slug, found.cause.confidence) == ("race", "likely")
    assert "one element differs: 3 of the parameter" in found.cause.evidence


def test_a_gather_that_is_wrong_is_told_beside_what_changes_later():
    assert [each.cause.slug for each in findings([torn(wrong_from_the_start=True)])] == [
        "fsdp-gather",
        "race",
    ]


def test_a_change_that_shows_in_a_later_step_names_both():
    """Parameters that are kept after a forward are given back in the next step's backward."""
    found = only(torn(steps=True))

    assert found.step == 4
    assert found.cause.evidence[-1] == (
        "it was gathered in step 3 and given back in step 4: it changed somewhere between"
    )


def test_an_op_that_changed_what_was_gathered_is_told_in_its_own_step():
    build = Builder()
    content = np.arange(8, dtype="<f4")
    weight = build.op("_allgather_base_", build.op("empty", shape=(8,)), content=content)
    build.name(weight, "layers.0.fc.weight", when="gather")
    build.mark("step", step=3)
    gather(build)
    weight = build.op("clamp_", weight, content=content.clip(0, 1))
    build.mark("step", step=4)
    build.output(build.op("relu", weight, content=content.clip(0, 1)))
    changed = [{"parameter": "layers.0.fc.weight", "written_back": False}]
    gather(build, kind="reshard", intact=False, changed=changed)

    assert only(build.build()).step == 3


def test_two_runs_name_the_op_that_changed_what_was_gathered():
    """The same finding as of one run, and its advice."""
    right = used(mismatch=[mismatch("layers.0.fc.weight", "??????")])

    first = opdrift.diff(used(write=False), right).first

    assert first is not None
    assert first.seq.right == 3
    assert first.cause.summary == f"in the right run, {only(right).cause.summary}"
    assert first.cause.try_ == only(right).cause.try_


def test_a_change_that_no_op_made_is_a_race_and_its_place_is_found():
    """One element of eight differs; the digests give it away."""
    found = only(given_back(write=False, before=digest("abcdefgh"), found=digest("abcxefgh")))

    assert (found.cause.slug, found.cause.confidence) == ("race", "likely")
    assert "one element differs: 3 of the parameter" in found.cause.evidence


def test_a_change_that_went_into_the_shard_is_no_finding():
    """summon_full_params(writeback=True) does that."""
    assert findings([given_back(write=True, written_back=True)]) == ()


def test_a_parameter_that_was_exchanged_is_told_once():
    build = Builder()
    for _ in range(2):
        gather(build, kind="reshard", intact=False, rebound=["layers.0.fc.bias"])

    assert only(build.build()).name == "layers.0.fc.bias"


# ---- shards ----------------------------------------------------------------------------------------------------


def test_a_shard_that_changed_with_no_op_is_a_hidden_write():
    build = Builder()
    change = {"parameter": "layers.0.fc.weight", "offset": 2, "numel": 4, "before": digest("abcd"), "found": digest("abce")}  # fmt: skip
    gather(build, kind="shard-changed", mismatch=[change])

    found = only(build.build())

    assert (found.kind, found.name, found.cause.slug) == (
        "hidden-write", "layers.0.fc.weight", "race",
    )  # fmt: skip
    assert "one element differs: 5 of the parameter" in found.cause.evidence


#: This rank's part of the weight is abcdef, and abcxef once it was poked.
POKED = {"parameter": "layers.0.fc.weight", "offset": 0, "numel": 6, "before": digest("abcdef"), "found": digest("abcxef")}  # fmt: skip


def test_what_was_gathered_before_its_shard_was_poked_is_not_stale():
    """It is what the shard should be: the parameters are still there, and nothing that is recorded wrote since."""
    build = Builder()
    gather(build)
    gather(build, kind="shard-changed", mismatch=[POKED])
    use = {"shard": "abcxef", "intact": False, "mismatch": [mismatch("layers.0.fc.weight", "abcdef")]}  # fmt: skip
    gather(build, kind="use", **use)
    gather(build, kind="use", nth=2, **use)

    assert only(build.build()).kind == "hidden-write"


def test_a_stale_parameter_is_told_beside_another_s_shard_that_was_poked():
    """An optimizer wrote it since the gather."""
    build = Builder()
    gather(build)
    gather(build, kind="shard-changed", mismatch=[{**POKED, "parameter": "layers.0.fc.bias"}])
    gather(build, kind="use", shard="ABCDEF", intact=False, mismatch=[mismatch("layers.0.fc.weight", "abcdef")])  # fmt: skip

    assert {each.kind for each in findings([build.build()])} == {"gather", "hidden-write"}


@pytest.mark.parametrize("written", [False, True])
def test_a_shard_that_an_op_finds_changed_as_well_is_told_once(written):
    """A flat one is read again as a whole, under the names of all that it holds; not after it was written anew."""
    build = Builder()
    content = np.arange(6, dtype="<f4")
    shard = build.leaf("layers.0.fc.weight", kind="shard", content=content)
    build.name(shard, "layers.0.fc.bias", kind="shard")
    gather(build, kind="shard-changed", mismatch=[POKED])
    if written:
        shard = build.op("mul_", shard, content=content * 2)
    changed = build.hidden_write(shard, "layers.0.fc.weight", content=content + 1, kind="shard")
    build.name(changed, "layers.0.fc.bias", kind="shard", when="changed")
    build.output(build.op("relu", changed))

    found = findings([build.build()])

    assert len(found) == 1 + written
    assert found[0].cause.summary.startswith("layers.0.fc.weight: this rank's shard changed")


def test_a_mark_belongs_to_the_step_that_was_marked_right_before_it():
    """No op lies between."""
    build = Builder()
    build.mark("step", step=0)
    build.output(build.op("relu", build.leaf("x", kind="input", shape=(8,))))
    build.mark("step", step=1)
    gather(build, kind="shard-changed", mismatch=[POKED])

    assert only(build.build()).step == 1


def shard_made_by(rank: int, op: str) -> Trace:
    """This rank's part of a parameter: a copy of a checkpoint's, or drawn."""
    build = Builder(rank=rank)
    content = np.arange(4, dtype="<f4")
    if op == "clone":
        value = build.op(op, build.leaf("checkpoint", kind="input", content=content))
    else:
        value = build.op(op, build.op("empty", shape=(4,)), content=content)
    build.name(value, "fc.weight", kind="shard", when="gather")
    return build.build()


def test_a_rank_that_never_loaded_is_told_with_its_parameters():
    found = only(shard_made_by(0, "clone"), shard_made_by(1, "normal_"))

    assert (found.kind, found.rank, found.name, found.cause.slug) == (
        "weights", 1, "fc.weight", "weights",
    )  # fmt: skip


def test_of_several_ranks_that_never_loaded_none_is_said_to_have():
    first, again = findings([shard_made_by(r, "clone" if r > 1 else "normal_") for r in range(4)])

    assert (first.rank, again.rank) == (0, 1)
    for each in (first, again):
        assert each.cause.evidence[1].startswith(
            "ranks 2 and 3 have parts of them that were copied"
        )


@pytest.mark.parametrize("op", ["clone", "normal_"])
def test_ranks_that_all_loaded_or_all_drew_are_no_finding(op):
    assert findings([shard_made_by(0, op), shard_made_by(1, op)]) == ()


def drawn_part(rank: int, *, state: int, names: tuple[str, ...] = ("fc.weight",)) -> Trace:
    """This rank's part of parameters that it drew, with its generator in a state."""
    build = Builder(rank=rank)
    for name in names:
        content = np.full(4, state, "<f4")
        value = build.op("normal_", build.op("empty", shape=(4,)), content=content, rng=state)
        build.name(value, name, kind="shard", when="gather")
    return build.build()


def test_parts_of_two_draws_are_random_halves():
    """Ranks that are not seeded alike each keep a half of a model of their own."""
    two = ("fc.weight", "fc.bias")
    said = random_parts([drawn_part(0, state=1, names=two), drawn_part(1, state=2, names=two)])

    assert said == (
        "what was gathered are rank 0's and rank 1's random halves: rank 0 drew its part of 2 parameters, rank 1 of 2,"
        " each from another state of its generator (fc.weight, fc.bias)"
    )


def test_parts_of_one_draw_are_nothing_to_tell():
    """Ranks that are seeded alike draw the same model; each keeps its part of it."""
    assert random_parts([drawn_part(0, state=1), drawn_part(1, state=1)]) is None
    assert random_parts([drawn_part(0, state=1)]) is None


# ---- against a run that is not sharded ---------------------------------------------------------------------------


def trained(*, sharded: bool, same: bool = True) -> Trace:
    """A forward with a weight, and what training left of it: all of it, or this rank's half."""
    build = Builder()
    x = build.leaf("x", kind="input", content=np.ones((2, 4), "<f4"))
    weight = build.leaf("fc.weight", when="gather" if sharded else "entry", content=np.eye(4, dtype="<f4"))  # fmt: skip
    if sharded:
        gather(build, parameters=[["fc.weight", 0, [4, 4]]], own=None, wholes=None)
    with build.scope("fc"):
        y = build.op("mm", x, weight, content=np.full((2, 4), 1.0 if same else 2.0, "<f4"))
    build.output(y)
    left = build.leaf("fc.weight", when="exit", content=np.ones((2 if sharded else 4, 4), "<f4"))
    build.name(left, "fc.weight", kind="gradient", when="exit")
    return build.build()


def test_a_part_of_a_parameter_is_not_held_against_all_of_it():
    assert opdrift.diff(trained(sharded=False), trained(sharded=True)).verdict == "identical"


def test_parts_are_held_against_parts():
    """Two runs that are sharded alike are compared to their end, as ever."""
    one, other = trained(sharded=True), trained(sharded=True, same=False)

    assert opdrift.diff(one, other).verdict == "diverged"


# ---- beside a comparison -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_comparison_that_calls_nothing_wrong_notes_what_one_run_shows(wrong: int):
    """Rounding of a cast hides what a damaged weight changes."""
    bad = {"shard": "abcdef", "whole": "abcdeX" + "ghijkl", "intact": False, "mismatch": [mismatch("layers.0.fc.weight", "abcdeX")]}  # fmt: skip
    runs = [ranks(*([bad] if n == wrong else [{}]))[0] for n in (0, 1)]

    found = opdrift.diff(*runs)

    assert found.verdict == "identical"
    (note,) = (n for n in found.notes if "alone shows 1 finding" in n)
    assert note.startswith(f"the {('left', 'right')[wrong]} run alone")
    assert "layers.0.fc.weight" in note
    assert note.endswith("No result differs for it")


def test_what_both_runs_show_alike_is_no_difference():
    bad = {"whole": "abcdeX" + "ghijkl", "intact": False, "mismatch": [mismatch("layers.0.fc.weight", "abcdeX")]}  # fmt: skip

    assert not any(
        "alone shows" in n for n in opdrift.diff(*(ranks(bad)[0] for _ in range(2))).notes
    )
