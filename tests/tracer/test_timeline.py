"""What became of a leaf over the run, on traces that are built by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from opdrift.diagnose.across_ranks import diagnose_world
from opdrift.findings import findings
from opdrift.records import Sides
from opdrift.render import leaf_text, trace_json
from opdrift.render.page import Screen
from opdrift.testing import Builder
from opdrift.timeline import Event, Timelines
from opdrift.tracefile.reader import Trace


def events(trace: Trace, name: str) -> Sequence[Event]:
    return Timelines(trace).of(name, [leaf for leaf in trace.leaves if leaf.name == name])


def told(trace: Trace, name: str) -> list[tuple[str, int, int | None]]:
    return [(event.what, event.seq, event.content) for event in events(trace, name)]


def trained(*, drawn_after: bool = False, read_between: bool = False) -> Trace:
    """A parameter is drawn, loaded, perhaps drawn again, read, and updated in two steps."""
    build = Builder()
    file = build.leaf("", kind="constant", when="use", content="checkpoint")
    w = build.op("empty", shape=(4, 8))
    w = build.op("uniform_", w, source=("net.py", 3, "init"))
    w = build.op("copy_", w, file, source=("net.py", 7, "load"))
    x = build.leaf("x", kind="input")
    if read_between:
        build.op("mm", x, w)
    if drawn_after:
        w = build.op("normal_", w, source=("net.py", 9, "init"))
    build.name(w, "fc.weight")
    for step in range(2):
        build.mark("step", step=step)
        with build.scope("fc"):
            y = build.op("mm", x, w)
        w = build.op("add_", w, y)
    build.name(w, "fc.weight", when="exit")
    build.output(y)
    return build.build()


def test_a_parameter_is_followed_from_its_memory_to_the_end():
    """Each content has a number; the steps are the program's."""
    trace = trained()

    assert told(trace, "fc.weight") == [
        ("memory", 1, None),
        ("draw", 2, 1),
        ("load", 3, 2),
        ("start", 3, 2),
        ("use", 4, 2),
        ("write", 5, 3),
        ("use", 6, 3),
        ("write", 7, 4),
        ("end", 7, 4),
    ]
    assert [e.step for e in events(trace, "fc.weight")] == [None, None, None, None, 0, 0, 1, 1, 1]


def test_readers_are_counted_and_the_first_is_named():
    build = Builder()
    w, x = build.leaf("w"), build.leaf("x", kind="input")
    build.op("t", w)  # a view reads nothing
    for scope in ("a", "b", "c"):
        with build.scope(scope):
            x = build.op("mm", x, w)

    (_, use) = events(build.build(), "w")

    assert (use.what, use.by, use.module, use.times, use.until) == (
        "use",
        "aten.mm.default",
        "a",
        3,
        4,
    )


def test_a_content_that_is_back_is_said_to_be():
    """A copy that was taken before is put back: stale weights look like this."""
    build = Builder()
    w = build.leaf("w", content="first")
    kept = build.leaf("", kind="constant", content="first")
    w = build.op("copy_", w, build.leaf("", kind="constant", content="second"))
    build.op("copy_", w, kept)

    assert [(e.content, e.again) for e in events(build.build(), "w") if e.what == "load"] == [
        (2, False),
        (1, True),
    ]


def test_a_hidden_write_and_other_memory_are_told_apart():
    build = Builder()
    w, x = build.leaf("w", kind="buffer", content="one"), build.leaf("x", kind="input")
    x = build.op("mm", x, w)
    w = build.hidden_write(w, "w", content="two")
    x = build.op("mm", x, w)
    other = build.leaf("w", kind="buffer", when="use", content="three")
    build.op("mm", x, other)

    assert [what for what, _, _ in told(build.build(), "w")] == [
        "start",
        "use",
        "hidden",
        "use",
        "data",
        "use",
    ]


def test_marks_of_integrations_that_name_it_are_part_of_it():
    """Also those of a tied name; what is about other parameters is not."""
    build = Builder()
    build.leaf("w")
    common = {"library": "lib", "unit": "fc"}
    build.mark("gather", parameters=[["w", 0, [4, 8]]], bytes=128, **common)
    build.mark("move", parameters=["v"], tied=[["w", "v"]], direction="load", source_device="cpu",
               destination_device="cuda:0", intact=False, **common)  # fmt: skip
    build.mark("gather", parameters=[["other", 0, [4, 8]]], **common)
    build.mark("free", buffer="flat", **common)

    _, gather, move = events(build.build(), "w")

    assert (gather.what, gather.by, gather.module, gather.note) == (
        "gather",
        "lib",
        "fc",
        "128 bytes",
    )
    assert (move.what, move.note, move.intact) == ("move", "load, cpu to cuda:0", False)


# ---- reports -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80])
def test_the_table_fits_its_screen(width: int):
    shown = leaf_text.leaf_report(trained(), _rows(trained()), Screen(width=width, unicode=False))

    assert shown.isascii()
    assert all(len(line) <= width for line in shown.splitlines())


def test_a_long_timeline_is_cut_in_the_middle():
    build = Builder()
    w = build.leaf("w")
    for _ in range(60):
        w = build.op("add_", w, w)
    trace = build.build()

    shown = leaf_text.leaf_report(trace, list(trace.leaves), Screen(width=80))

    assert "... 97 events more; --format json lists all" in shown
    assert len(shown.splitlines()) < 40


def test_ranks_that_hold_other_contents_are_named():
    """`opdrift show` of a distributed trace says of each parameter whether the ranks agree."""

    def rank(number: int, content: str) -> Trace:
        build = Builder(rank=number, world_size=3)
        build.leaf("w", content=content)
        return build.build()

    first, *rest = rank(0, "a"), rank(1, "b"), rank(2, "a")
    others = [(each, _rows(each, "w")) for each in rest]
    shown = leaf_text.leaf_report(first, _rows(first, "w"), Screen(width=80), others=others)

    assert "at first different: 0, 2 | 1; at last different: 0, 2 | 1" in shown
    assert [line for line in shown.splitlines() if line.startswith("w ")] == [
        "w  parameter float32[4, 8], ranks 0 and 2",
        "w  parameter float32[4, 8], rank 1",
    ]


def test_ranks_that_all_hold_other_contents_are_shown_up_to_a_number():
    """The rest is named with a command that shows it."""

    def rank(number: int) -> Trace:
        build = Builder(rank=number, world_size=6)
        build.leaf("w", content=f"of {number}")
        return build.build(f"run.trace/rank-{number:05d}")

    first, *rest = map(rank, range(6))
    others = [(each, _rows(each, "w")) for each in rest]
    shown = leaf_text.leaf_report(first, _rows(first, "w"), Screen(), others=others)

    assert sum(line.startswith("w ") for line in shown.splitlines()) == 4
    assert (
        "ranks 4 and 5: other contents again; opdrift show run.trace/rank-00004 --leaf w" in shown
    )


def test_a_leaf_that_another_rank_holds_is_shown():
    """A stage of a pipeline has the rest of the model on other ranks."""
    first, other = Builder(rank=0, world_size=2), Builder(rank=1, world_size=2)
    first.leaf("a")
    other.leaf("b")
    stages = first.build(), other.build()

    shown = leaf_text.leaf_report(
        stages[0], [], Screen(width=80), others=[(stages[1], _rows(stages[1], "b"))]
    )

    assert shown.startswith("b  parameter float32[4, 8], rank 1")


def test_json_lists_every_event():
    trace = trained()

    text = "".join(trace_json.render(trace, (), _rows(trace), (), marks=(), timelines=True))

    (line,) = json.loads(text)["timeline"]
    assert (line["name"], line["kind"], len(line["events"])) == ("fc.weight", "parameter", 9)
    assert len(line["events"][1]["digest"]) == 16


def _rows(trace: Trace, name: str = "fc.weight") -> list:
    return [leaf for leaf in trace.leaves if leaf.name == name]


# ---- loaded, then overwritten --------------------------------------------------------------------------


def test_a_load_that_is_drawn_over_before_it_is_read_is_found():
    (found,) = findings([trained(drawn_after=True)])

    assert (found.kind, found.cause.slug, found.name, found.seq) == (
        "overwritten",
        "weights",
        "fc.weight",
        4,
    )
    assert "net.py:7 in load" in found.cause.evidence[0]
    assert "net.py:9 in init" in found.cause.evidence[1]


def test_initialising_first_and_loading_then_is_right():
    assert findings([trained()]) == ()


def test_a_load_that_was_used_may_be_drawn_over():
    """Something was made of it: a second model, a check."""
    assert findings([trained(drawn_after=True, read_between=True)]) == ()


# ---- loaded on one rank only ---------------------------------------------------------------------------


def rank_with(number: int, *, load: bool) -> Trace:
    build = Builder(rank=number)
    w = build.op("uniform_", build.op("empty", shape=(4, 8)))
    if load:
        w = build.op("copy_", w, build.leaf("", kind="constant", when="use", content="file"))
    build.mark("model", sharded=["fc.weight"])
    build.name(w, "fc.weight")
    return build.build()


def test_a_rank_that_never_loaded_is_found_by_where_its_weights_came_from():
    """Also where each rank holds a part, so that contents cannot be held against each other."""
    (found,) = findings([rank_with(0, load=True), rank_with(1, load=False)])

    assert (found.name, found.rank, found.cause.slug) == ("fc.weight", 1, "weights")
    assert found.cause.summary == "fc.weight was loaded on rank 0 and never on rank 1"


def test_what_ranks_loaded_otherwise_is_told_where_they_are_held_against_each_other():
    first = diagnose_world([rank_with(0, load=True), rank_with(1, load=False)]).first

    assert first is not None
    assert (first.name, first.ranks) == ("fc.weight", Sides((0,), (1,)))
    assert first.cause.summary == "fc.weight was loaded on rank 0 and never on rank 1"


def test_a_parameter_that_the_first_rank_does_not_have_is_looked_at_too():
    """Stages of a pipeline, each on two ranks."""
    other = Builder(rank=0)
    other.name(other.op("uniform_", other.op("empty", shape=(4, 8))), "stage.weight")
    (found,) = findings([other.build(), rank_with(1, load=True), rank_with(2, load=False)])

    assert (found.name, found.rank, found.cause.slug) == ("fc.weight", 2, "weights")


def test_a_parameter_that_an_op_made_and_nothing_wrote_into_is_looked_at_too():
    """A new tensor took the parameter's place: `nn.Parameter(state["fc.weight"].clone())`."""

    def rank(number: int) -> Trace:
        build = Builder(rank=number)
        file = build.leaf("", kind="constant", when="use", content="file", shape=(4, 8))
        w = build.op("rand", shape=(4, 8)) if number else build.op("clone", file)
        build.mark("model", sharded=["fc.weight"])
        build.name(w, "fc.weight")
        return build.build()

    (found,) = findings([rank(0), rank(1)])

    assert found.cause.summary == "fc.weight was loaded on rank 0 and never on rank 1"


@pytest.mark.parametrize("load", [True, False])
def test_ranks_that_came_the_same_way_are_no_finding(load: bool):
    assert findings([rank_with(0, load=load), rank_with(1, load=load)]) == ()
