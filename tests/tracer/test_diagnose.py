"""What `diff` says of two runs: the verdict, the place, the size, and what it leaves out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opdrift.diagnose import Tolerance, diff
from opdrift.errors import IncomparableTracesError, InvalidOptionError
from opdrift.records import Diagnosis, Divergence, Sides
from opdrift.testing import Builder, trace
from opdrift.testing.contents import Change
from opdrift.tracefile.reader import Trace


def first(diagnosis: Diagnosis) -> Divergence:
    assert diagnosis.first is not None
    return diagnosis.first


def pair(build: Builder, *, bias: str | None = None) -> Trace:
    """x -> fc -> relu, with weights named as given."""
    x = build.leaf("x", kind="input")
    with build.scope("fc"):
        w = build.op("t", build.leaf("fc.weight", shape=(8, 8)))
        y = build.op("mm", x, w)
        y = build.op("add", y, build.leaf("fc.bias", content=bias))
    build.output(build.op("relu", y))
    return build.build()


# ---- verdicts ------------------------------------------------------------------------------------------


def test_equal_runs_are_identical():
    """Nothing differs: no origin, nothing to show."""
    found = diff(trace("mm relu mm"), trace("mm relu mm"))

    assert (found.verdict, found.first, found.origins, found.causes) == ("identical", None, (), ())


def calls(number: int, *, kept: bool, exception: str | None = None) -> Trace:
    """So many calls on inputs of their own."""
    build = Builder(exception=exception)
    for i in range(number):
        y = build.op("relu", build.leaf(f"x{i}", kind="input"))
        build.output(y)
        if kept:
            build.alive(y)
    return build.build()


@pytest.mark.parametrize("numbers", [(3, 2), (2, 3)])
def test_a_run_that_ends_early_is_not_identical(numbers: tuple[int, int]):
    """What both runs returned is equal, and one of them lacks a result that the other kept."""
    found = diff(calls(numbers[0], kept=True), calls(numbers[1], kept=True))

    assert (found.verdict, first(found).kind) == ("diverged", "structure")


@pytest.mark.parametrize("numbers", [(3, 2), (2, 3)])
def test_a_result_that_a_run_threw_away_is_no_difference(numbers: tuple[int, int]):
    """A warm-up, or a call for its side effects, before or after what both runs returned."""
    found = diff(calls(numbers[0], kept=False), calls(numbers[1], kept=False))

    assert found.verdict == "identical"


def test_a_run_that_raised_lacks_every_result_it_did_not_come_to():
    """Thrown away or not: the exception is what differs."""
    found = diff(calls(3, kept=False), calls(2, kept=False, exception="ValueError: no such key"))

    assert (found.verdict, first(found).kind) == ("diverged", "structure")
    assert "the right run ended with ValueError: no such key" in first(found).cause.summary


@pytest.mark.parametrize("swapped", [False, True])
def test_a_run_that_raised_after_its_last_result_is_not_identical(swapped: bool):
    """It lacks nothing that the other returned, and yet did not come to its end."""
    runs = calls(2, kept=True), calls(2, kept=True, exception="ValueError: no such key")

    found = diff(*(runs[::-1] if swapped else runs))

    assert (found.verdict, first(found).kind) == ("diverged", "structure")
    name = "left" if swapped else "right"
    assert f"the {name} run ended with ValueError: no such key" in first(found).cause.summary


@pytest.mark.parametrize(
    "exceptions", [("ValueError: no such key",) * 2, (None, "SystemExit: 0"), (None, None)]
)
def test_runs_that_end_alike_are_identical(exceptions: tuple[str | None, str | None]):
    """Both raised, or one asked to end and had nothing to complain of."""
    found = diff(*(calls(2, kept=True, exception=each) for each in exceptions))

    assert found.verdict == "identical"


def steps(number: int, *, exception: str | None = None) -> Trace:
    """So many steps of an optimizer with a state; each gives its state and the weight a new content."""
    build = Builder(exception=exception)
    x = build.leaf("x", kind="input")
    weight = build.leaf("fc.weight", shape=(8, 8))
    state = build.op("zeros_like", weight)
    for _ in range(number):
        with build.scope("fc"):
            y = build.op("mm", x, weight)
        build.output(y)
        state = build.op("lerp_", state, build.op("mm", y, y, shape=(8, 8), phase="backward"))
        weight = build.op("add_", weight, state)
    build.alive(state)
    build.alive(weight)
    build.name(weight, "fc.weight", when="exit")
    return build.build()


@pytest.mark.parametrize("swapped", [False, True])
def test_what_a_run_that_raised_did_not_come_to_is_one_difference(swapped: bool):
    """No op of the other run after that wrote too much, and no weight was changed in it that should not have been."""
    runs = steps(2), steps(1, exception="ValueError: no such key")
    found = diff(*(runs[::-1] if swapped else runs))

    assert [origin.kind for origin in found.origins] == ["structure"]
    name = "left" if swapped else "right"
    assert f"the {name} run ended with ValueError: no such key" in first(found).cause.summary
    assert {cause.slug for cause in found.causes} == {"structure"}


def test_what_differs_before_a_run_raised_is_still_told():
    """A weight that was changed before the end is no consequence of it."""

    def run(*, decays: bool, exception: str | None = None) -> Trace:
        build = Builder(exception=exception)
        weight = build.leaf("fc.weight", shape=(8, 8))
        if decays:
            weight = build.op("mul_", weight, settings={"other": 0.5})
        build.name(weight, "fc.weight", when="exit")
        y = build.op("relu", build.leaf("x", kind="input"))
        if exception is None:
            build.output(build.op("exp", y))
        build.alive(y)
        return build.build()

    found = diff(run(decays=True), run(decays=False, exception="ValueError: no such key"))

    told = {origin.op: origin.cause.summary for origin in found.origins}
    assert "ended with" not in told["aten.mul_.default"]


def test_an_extra_op_on_the_right_does_not_hide_a_later_divergence():
    """An inserted cast shifts positions; the changed matmul is still found."""
    found = diff(trace("mm relu mm"), trace("mm _to_copy relu mm*"))

    assert (found.verdict, first(found).op, first(found).seq) == (
        "diverged", "aten.mm.default", Sides(3, 4),
    )  # fmt: skip


def test_the_last_bits_are_rounding():
    """A difference that the op's arithmetic explains is no divergence, and says what was explained."""
    found = diff(trace("mm relu mm"), trace("mm~ relu mm"))

    assert found.verdict == "rounding"
    assert not first(found).material
    assert first(found).relative_difference is not None
    assert first(found).explained is not None
    assert first(found).relative_difference < first(found).explained


def test_exact_ops_have_no_rounding():
    """relu of equal inputs gives equal bits, so the smallest difference is material."""
    found = diff(trace("mm relu"), trace("mm relu~"))

    assert (found.verdict, first(found).op) == ("diverged", "aten.relu.default")


def test_the_first_bitwise_and_the_first_material_difference_are_told_apart():
    """Rounding comes first, a defect later: both are reported."""
    found = diff(trace("mm sin exp"), trace("mm~ sin exp*"))

    assert found.first_bitwise is not None
    assert found.first_bitwise.op == "aten.mm.default"
    assert (first(found).op, found.verdict) == ("aten.exp.default", "diverged")


def test_weights_come_before_ops():
    """A differing weight that is used last is reported ahead of an op that differs first."""
    found = diff(trace("mm relu mm"), trace("mm* relu mm!"))

    assert [(d.kind, d.name, d.op) for d in found.origins] == [
        ("leaf", "w1", "aten.mm.default"),
        ("op", None, "aten.mm.default"),
    ]


def test_what_follows_from_an_origin_is_no_origin():
    """One change at the start, thirty differing ops after it: one origin."""
    words = " ".join(["mm", "sin"] * 15)

    found = diff(trace(f"mm {words}"), trace(f"mm* {words}"))

    assert [d.seq for d in found.origins] == [Sides(1, 1)]


def test_independent_changes_are_all_listed():
    """Two branches that do not feed each other."""

    def run(a: str, b: str) -> Trace:
        build = Builder()
        x = build.leaf("x", kind="input")
        one = build.op("sin", x, change=a)  # type: ignore[arg-type]
        two = build.op("cos", x, change=b)  # type: ignore[arg-type]
        build.output(build.op("add", one, two))
        return build.build()

    found = diff(run("", ""), run("*", "*"))

    assert [d.op for d in found.origins] == ["aten.sin.default", "aten.cos.default"]


# ---- what does not count ---------------------------------------------------------------------------------


def test_what_reaches_no_result_does_not_count():
    """An unused head differs; the output does not."""

    def run(change: str) -> Trace:
        build = Builder()
        x = build.leaf("x", kind="input")
        build.op("sin", x, change=change)  # type: ignore[arg-type]
        build.output(build.op("relu", x))
        return build.build()

    assert diff(run(""), run("*")).verdict == "identical"


def test_an_unused_weight_that_differs_is_a_note():
    """Not read by anything that reaches the output."""

    def run(content: str) -> Trace:
        build = Builder()
        build.leaf("aux.weight", content=content)
        build.output(build.op("relu", build.leaf("x", kind="input")))
        return build.build()

    found = diff(run("a"), run("b"))

    assert found.verdict == "identical"
    assert any("aux.weight" in note for note in found.notes)


def test_a_result_that_became_equal_again_is_identical():
    """Whatever differed inside: the output is the same."""

    def run(change: str) -> Trace:
        build = Builder()
        x = build.op("sin", build.leaf("x", kind="input"), change=change)  # type: ignore[arg-type]
        build.output(build.op("mul", x, content=np.zeros((4, 8), "<f4")))
        return build.build()

    assert diff(run(""), run("*")).verdict == "identical"


def test_a_weight_overwritten_before_its_use_does_not_count():
    """It differs on entry, and both runs load it before they read it."""

    def run(entry: str) -> Trace:
        build = Builder()
        w = build.leaf("fc.weight", content=entry)
        w = build.op("copy_", w, build.leaf("", kind="constant", when="use", content="checkpoint"))
        build.output(build.op("mm", build.leaf("x", kind="input"), w))
        return build.build()

    assert diff(run("a"), run("b")).verdict == "identical"


def test_memory_that_is_written_before_it_is_read_does_not_count():
    """`empty` holds anything; both halves are written, then the whole is read."""

    def run(order: list[int]) -> Trace:
        build = Builder()
        x = build.leaf("x", kind="input")
        out = build.op("empty", shape=(4, 8), dtype="float32")
        for half in order:
            part = build.op("slice", out, shape=(2, 8), offset=16 * half, settings={"start": half})
            build.op("copy_", part, x, shape=(2, 8))
        whole = build.again(out, content=np.ones((4, 8), "<f4"))
        build.output(build.op("tanh", whole, content=np.ones((4, 8), "<f4")))
        return build.build()

    assert diff(run([0, 1]), run([0, 1])).verdict == "identical"


def test_the_layout_in_memory_does_not_count():
    """A reshaped view with the same elements is the same content."""

    def run(shape: tuple[int, ...]) -> Trace:
        build = Builder()
        x = build.leaf("x", kind="input", shape=(4, 8))
        y = build.op("view", x, shape=shape)
        build.output(build.op("relu", y, content=build.content(x)))
        return build.build()

    assert diff(run((4, 8)), run((2, 16))).verdict == "identical"


# ---- places ------------------------------------------------------------------------------------------------


def test_a_leaf_is_named_with_the_module_and_op_that_use_it_first():
    """The view of the weight is passed over: the product is what computes with it."""
    found = diff(pair(Builder()), pair(Builder(), bias="other"))

    assert (first(found).kind, first(found).name, first(found).op, first(found).module) == (
        "leaf", "fc.bias", "aten.add.default", "fc",
    )  # fmt: skip


def test_leaves_that_differ_alike_are_one_divergence():
    """The first used one stands for the others."""
    found = diff(trace("mm mm mm"), trace("mm! mm mm!"))

    assert [(d.name, d.members) for d in found.origins] == [("w0", ("w2",))]


def test_shared_memory_is_named_by_the_module_that_uses_it():
    """One slot under three names: the layer that reads it first names it."""

    def run(content: str) -> Trace:
        build = Builder()
        slot = build.leaf("layers.0.slot", kind="buffer", content=content)
        build.name(slot, "layers.1.slot", kind="buffer")
        with build.scope("layers.1"):
            build.output(build.op("mul", build.leaf("x", kind="input"), slot))
        return build.build()

    assert first(diff(run("a"), run("b"))).name == "layers.1.slot"


def test_a_differing_constant_is_judged_where_it_is_used():
    """The factory makes something else; the op that reads it is the place, the argument the reason."""

    def run(end: int) -> Trace:
        build = Builder()
        scale = build.op("full", shape=(4, 8), settings={"fill_value": end})
        build.output(build.op("mul", build.leaf("x", kind="input"), scale))
        return build.build()

    found = first(diff(run(2), run(3)))

    assert (found.op, found.inputs_match) == ("aten.mul.default", False)
    assert [(a.name, a.left, a.right) for a in found.arguments] == [("fill_value", "2", "3")]
    assert found.made_otherwise


def test_a_view_of_another_part_is_named_itself():
    """Both runs slice the same tensor, at another start."""

    def run(start: int) -> Trace:
        build = Builder()
        x = build.leaf("x", kind="input", shape=(8, 8))
        with build.scope("pool"):
            part = build.op("slice", x, shape=(4, 8), offset=8 * start, settings={"start": start})
            with build.scope("pool.head"):
                build.output(build.op("sin", build.op("t", part)))
        return build.build()

    found = first(diff(run(0), run(1)))

    assert (found.op, found.module) == ("aten.slice.default", "pool")
    assert [a.name for a in found.arguments] == ["start"]
    assert found.inputs_match


def test_a_view_of_what_differs_already_is_not_made_otherwise():
    """Equal arguments of another tensor: nothing was taken otherwise."""

    def run(mark: str) -> Trace:
        build = Builder()
        x = build.op("cos", build.leaf("x", kind="input", shape=(8, 8)), change=mark)
        part = build.op("slice", x, shape=(4, 8), settings={"start": 0})
        build.output(build.op("sin", part))
        return build.build()

    assert not any(d.made_otherwise for d in diff(run(""), run("*")).origins)


def test_an_op_that_reads_another_tensor_is_the_place():
    """u + v against v + v: both runs have u and v."""

    def run(bug: bool) -> Trace:
        build = Builder()
        x = build.leaf("x", kind="input")
        u, v = build.op("sin", x), build.op("cos", x)
        build.output(build.op("add", v if bug else u, v))
        return build.build()

    found = first(diff(run(False), run(True)))

    assert (found.kind, found.op, found.cause.slug) == (
        "structure",
        "aten.add.default",
        "structure",
    )


def test_a_missing_op_is_named_itself():
    """The right run lacks the activation."""
    found = first(diff(trace("mm relu sin"), trace("mm sin")))

    assert (found.kind, found.op, found.seq) == ("structure", "aten.relu.default", Sides(2, None))


def test_a_fused_op_stands_for_its_decomposition():
    """One side has one op, the other has four: the one is named."""
    found = first(diff(trace("mm _softmax mm"), trace("mm exp sum div mm")))

    assert (found.kind, found.op, found.seq) == (
        "structure",
        "aten._softmax.default",
        Sides(2, None),
    )


def test_runs_that_return_different_things_differ():
    """All pairs agree; one run does one op more before it returns."""
    found = first(diff(trace("mm relu"), trace("mm relu sin")))

    assert (found.kind, found.op, found.seq) == ("structure", "aten.sin.default", Sides(None, 3))


def test_a_receiver_with_other_arguments_is_an_origin_too():
    """Rounding flows in, and epsilon differs: the argument is what matters."""

    def run(change: str, eps: float) -> Trace:
        build = Builder()
        x = build.op("mm", build.leaf("x", kind="input"), build.leaf("w"), change=change)  # type: ignore[arg-type]
        y = build.op("native_layer_norm", x, settings={"eps": eps})
        build.output(y)
        return build.build()

    found = diff(run("", 1e-5), run("~", 1e-3))

    assert (first(found).op, first(found).cause.slug) == (
        "aten.native_layer_norm.default",
        "op-args",
    )


def test_new_non_finite_values_make_a_receiver_an_origin():
    """Rounding flows in, NaN comes out on one side."""

    def run(change: str, content: np.ndarray | None) -> Trace:
        build = Builder()
        x = build.op("mm", build.leaf("x", kind="input"), build.leaf("w"), change=change)  # type: ignore[arg-type]
        build.output(build.op("log", x, content=content))
        return build.build()

    bad = np.full((4, 8), np.nan, "<f4")
    found = diff(run("", np.ones((4, 8), "<f4")), run("~", bad))

    assert (first(found).op, first(found).cause.slug, first(found).nonfinite) == (
        "aten.log.default", "nan", Sides(0, 32),
    )  # fmt: skip


def test_an_output_that_its_inputs_do_not_explain_is_material():
    """Rounding flows in, and far more comes out, with nothing about the op to explain it."""
    found = diff(trace("mm sin"), trace("mm~ sin*"))

    assert found.verdict == "diverged"
    assert (first(found).op, first(found).inputs_match) == ("aten.sin.default", False)


def test_amplifiers_are_listed():
    """What comes out is much larger than what went in."""
    found = diff(trace("mm sin"), trace("mm~ sin*"))

    assert [(a.op, a.gain > 100) for a in found.amplifiers] == [("aten.sin.default", True)]


# ---- options ------------------------------------------------------------------------------------------------


def test_a_tolerance_replaces_the_bounds():
    """A difference that the user allows is rounding; a smaller allowance makes it material."""
    left, right = trace("mm sin"), trace("mm* sin")

    assert diff(left, right, tolerance=Tolerance(atol=100.0)).verdict == "rounding"
    assert diff(left, right, tolerance=(0.0, 1e-6)).verdict == "diverged"


def test_maps_rename_modules():
    """Pairs or texts; what they name is paired as if it had the same name."""
    left, right = trace("a{ relu* } b{ relu }"), trace("q{ relu } p{ relu* }")

    assert diff(left, right, maps=["a=p", "b=q"]).alignment.paired == 2
    assert diff(left, right, maps=[("a", "p"), ("b", "q")]).alignment.paired == 2


@pytest.mark.parametrize("options", [{"samples": "0"}, {"samples": "a:b"}, {"maps": ["a"]}])
def test_options_that_cannot_be_understood_are_refused(options: dict[str, object]):
    """The message says what the form is."""
    with pytest.raises(InvalidOptionError, match="form"):
        diff(trace("mm"), trace("mm"), **options)  # type: ignore[arg-type]


def test_a_trace_without_samples_has_none_to_compare():
    """The error says how to record some."""
    with pytest.raises(IncomparableTracesError, match="without batch="):
        diff(trace("mm"), trace("mm"), samples="0:2")


def test_fingerprints_of_different_kinds_cannot_be_compared():
    """The error names both kinds."""
    with pytest.raises(IncomparableTracesError, match=r"'tfp1'.*'tfp2'"):
        diff(trace("mm"), trace("mm", fingerprint="tfp2"))


# ---- incomplete and distributed traces ------------------------------------------------------------------------


def test_an_incomplete_trace_is_never_called_identical():
    """Nothing differs in what is there, but the end is missing."""
    with pytest.raises(IncomparableTracesError, match="incomplete at op 1"):
        diff(trace("mm relu"), trace("mm", complete=False))


def test_an_incomplete_trace_that_differs_says_so():
    """The difference is reported, and the note tells what could not be compared."""
    found = diff(trace("mm relu mm"), trace("mm* relu", complete=False))

    assert (found.verdict, first(found).seq) == ("diverged", Sides(1, 1))
    assert any("incomplete" in note for note in found.notes)
    assert not found.right.complete


def test_a_run_that_raised_is_noted():
    """It ended early by an exception; the trace itself is whole."""
    found = diff(trace("mm relu"), trace("mm", exception="ValueError: no"))

    assert found.verdict == "diverged"
    assert any("ValueError" in note for note in found.notes)


def test_traces_of_other_ranks_cannot_be_compared():
    """No rank is in both."""
    with pytest.raises(IncomparableTracesError, match="rank"):
        diff(trace("mm", rank=0), trace("mm", rank=1))


def test_unrelated_programs_diverge_with_a_reason():
    """Hardly anything has a counterpart: a structure divergence, and the alignment says why it is poor."""
    found = diff(trace("sin " * 12), trace("cos " * 12))

    assert (found.verdict, first(found).kind) == ("diverged", "structure")
    assert found.alignment.fallback_reason is not None
    assert "unrelated" in found.alignment.fallback_reason


def test_a_fault_in_a_long_run_that_rounds_from_its_start_is_found():
    """More receivers than are looked at one by one: where the difference jumps, all are."""

    def chain(*, other: bool) -> Trace:
        build = Builder()
        value = build.leaf("x", kind="input")
        for number in range(4000):
            change = {3: "~", 2501: "*"}.get(number, "") if other else ""
            value = build.op("sin", value, change=change)
        build.output(value)
        return build.build()

    found = diff(chain(other=False), chain(other=True))

    assert found.verdict == "diverged"
    assert [(d.seq.left, d.material) for d in found.origins] == [(4, False), (2502, True)]


def test_traces_with_nothing_in_common_are_not_compared():
    """Other modules, other weights, other values: whatever was paired would be by chance."""
    left, right = Builder(), Builder()
    for build, part in ((left, "encoder"), (right, "stem")):
        value = build.leaf(f"{part}.x", kind="input")
        with build.scope(part):
            for name in ("sin", "cos", "exp") * 4 if part == "encoder" else ("tanh", "erf") * 6:
                value = build.op(name, value)
        build.output(value)

    with pytest.raises(IncomparableTracesError, match="nothing in common"):
        diff(left.build("left.trace"), right.build("right.trace"))


def test_traces_that_share_a_weight_are_compared():
    """Another program on the same weight: that is a divergence."""
    left, right = Builder(), Builder()
    for build, part in ((left, "encoder"), (right, "stem")):
        value = build.leaf(f"{part}.x", kind="input")
        weight = build.leaf("table")
        with build.scope(part):
            for name in ("sin", "cos", "exp") * 4 if part == "encoder" else ("tanh", "erf") * 6:
                value = build.op(name, value, weight)
        build.output(value)

    assert diff(left.build(), right.build()).verdict == "diverged"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("enc=body", "the left run has no module 'enc'; it has encoder"),
        ("encoder=bdy", "the right run has no module 'bdy'; it has body"),
        ("body=encoder", "the left run has no module 'body'"),
    ],
)
def test_a_map_that_matches_nothing_is_refused(entry: str, words: str):
    """Names that are not there, and names of the wrong side; a close name is offered."""
    left, right = trace("encoder{ mm } head{ relu }"), trace("body{ mm } head{ relu }")

    with pytest.raises(InvalidOptionError, match=words):
        diff(left, right, maps=[entry])


def test_a_map_of_a_module_that_only_holds_others_is_taken():
    """A ModuleList is never called; the modules in it are."""
    left, right = trace("enc.layer{ mm }"), trace("body.layer{ mm }")

    assert diff(left, right, maps=["enc=body"]).verdict == "identical"


# ---- around it ---------------------------------------------------------------------------------------------


def test_the_environment_is_listed():
    """Flags, variables and versions that differ, both sides as text."""
    found = diff(
        trace(
            "mm",
            flags={"num_threads": 1},
            variables={"MKL_CBWR": "AVX2"},
            versions={"numpy": "2.1"},
        ),
        trace("mm", flags={"num_threads": 2}, versions={"numpy": "2.2"}),
    )

    assert [(e.name, e.left, e.right) for e in found.environment] == [
        ("numpy", "2.1", "2.2"), ("num_threads", "1", "2"), ("MKL_CBWR", "AVX2", None),
    ]  # fmt: skip
    assert found.verdict == "identical"


def test_a_flag_that_only_one_header_has_is_unknown_and_no_difference():
    """Another opdrift or torch reads other flags; how the generator of a device began is a fact all the same."""
    found = diff(
        trace(
            "mm", flags={"num_threads": 1, "cpu.units": "avx2", "seed.cuda:0": "seed 3, offset 0"}
        ),
        trace("mm", flags={"num_threads": 1}),
    )

    assert [e.name for e in found.environment] == ["seed.cuda:0"]
    assert found.verdict == "identical"


def test_ops_without_counterpart_are_grouped():
    """By op and module, with their number and where the first is."""
    found = diff(trace("mm a{ sin sin } mm"), trace("mm mm"))

    assert [(g.op, g.module, g.count, g.first_seq) for g in found.unpaired.left] == [
        ("aten.sin.default", "a", 2, 2)
    ]
    assert (found.alignment.paired, found.alignment.left_only, found.alignment.right_only) == (
        2,
        2,
        0,
    )


def test_growth_tells_where_the_difference_grew():
    """One point a stretch; none differs before the origin."""
    found = diff(trace("a{ mm } b{ mm sin } c{ mm }"), trace("a{ mm } b{ mm~ sin } c{ mm }"))

    assert [(g.module, g.ops, g.differing) for g in found.growth] == [
        ("a", 1, 0), ("b", 2, 2), ("c", 1, 1),
    ]  # fmt: skip


def test_growth_and_card_give_an_origin_one_size():
    """Also where another output of the op than the one that is told differs by more."""

    def run(change: Change = "") -> Trace:
        build = Builder()
        x = build.leaf("x", kind="input")
        with build.scope("norm"):
            made = build.op("native_layer_norm", x, change=change, outputs=3)
        build.output(made)
        return build.build()

    found = diff(run(), run("*"))

    (point,) = found.growth
    assert point.relative_difference == first(found).relative_difference


def test_the_size_at_the_result_is_told():
    """`final_relative_difference` is that of the output."""
    found = first(diff(trace("mm sin"), trace("mm* sin")))

    assert found.final_relative_difference is not None
    assert found.final_relative_difference > 0.1


def test_who_asks_is_told_what_is_being_done():
    """In words for a line on a terminal."""
    told: list[str] = []

    diff(trace("mm sin"), trace("mm* sin"), progress=told.append)

    assert told == ["pairing ops", "looking for where differences begin", "looking for causes"]


# ---- properties ----------------------------------------------------------------------------------------------

_OPS = ("mm", "relu", "sin", "exp", "addmm", "_softmax", "_to_copy", "bernoulli_", "add_")


@st.composite
def programs(draw: st.DrawFn, changes: str = "") -> str:
    """Words of a program; some of them with a change."""
    kept: list[str] = []
    open_ = 0
    for token in draw(st.lists(st.sampled_from([*_OPS, "a{", "b{", "}"]), min_size=1, max_size=12)):
        if token == "}":
            if open_:
                open_ -= 1
                kept.append(token)
        elif token.endswith("{"):
            open_ += 1
            kept.append(token)
        else:
            change = draw(st.sampled_from(["", "", "", *changes]))
            kept.append(token + change)
    return " ".join([*kept, *["}"] * open_])


@settings(max_examples=60, deadline=None)
@given(programs("*~"))
def test_a_run_is_identical_to_itself(program: str):
    """diff(a, a) has nothing to say."""
    built = trace(program)

    assert (diff(built, built).verdict, diff(built, trace(program)).origins) == ("identical", ())


def mirrored(d: Divergence) -> tuple[object, ...]:
    return (
        d.kind,
        d.op,
        d.name,
        d.module,
        Sides(d.seq.right, d.seq.left),
        d.material,
        d.cause.slug,
    )


def plain(d: Divergence) -> tuple[object, ...]:
    return (d.kind, d.op, d.name, d.module, d.seq, d.material, d.cause.slug)


@settings(max_examples=80, deadline=None)
@given(programs(), st.data())
def test_exchanging_the_runs_mirrors_the_answer(program: str, data: st.DataObject):
    """diff(a, b) and diff(b, a): the same verdict and the same places, sides exchanged."""
    words = program.split()
    changed = [
        word + data.draw(st.sampled_from(["", "", "*", "~"]))
        if word not in "}" and "{" not in word
        else word
        for word in words
    ]
    left, right = trace(program), trace(" ".join(changed))

    found, back = diff(left, right), diff(right, left)

    assert found.verdict == back.verdict
    assert sorted(map(repr, map(plain, found.origins))) == sorted(
        map(repr, map(mirrored, back.origins))
    )


@settings(max_examples=60, deadline=None)
@given(programs(), programs("*~"))
def test_any_two_runs_have_an_answer(a: str, b: str):
    """Whatever the programs: a verdict, and a first divergence exactly if they are not identical."""
    found = diff(trace(a), trace(b))

    assert (found.first is None) == (found.verdict == "identical")
    assert (found.verdict == "diverged") == any(d.material for d in found.origins)
    assert all(d.cause.summary and d.cause.try_ for d in found.origins)


@settings(max_examples=60, deadline=None)
@given(programs(), st.data())
def test_one_planted_change_is_found_at_its_op(program: str, data: st.DataObject):
    """A change at any op that matters is found at exactly that op."""
    words = program.split()
    places = [i for i, word in enumerate(words) if word not in "}" and "{" not in word]
    if not places:
        return
    at = data.draw(st.sampled_from(places))
    changed = [f"{word}*" if i == at else word for i, word in enumerate(words)]

    found = diff(trace(program), trace(" ".join(changed)))

    if found.verdict == "identical":  # a later draw or fill overwrote it
        assert any(w.startswith("bernoulli_") for w in words[at:])
        return
    seq = places.index(at) + 1
    assert [(d.kind, d.seq) for d in found.origins] == [("op", Sides(seq, seq))]


def test_a_diagnosis_can_be_changed_and_compared():
    """Plain frozen data: equal traces give equal answers."""
    one, other = (diff(trace("mm relu"), trace("mm* relu")) for _ in range(2))

    assert replace(one, notes=("x",)) == replace(other, notes=("x",))


def test_a_diagnosis_is_one_line_as_text():
    """For a print in a notebook, or an assertion that fails."""
    assert str(diff(trace("mm relu"), trace("mm relu"))).startswith("identical: all that reaches")
    assert str(diff(trace("mm relu"), trace("mm* relu"))).startswith(
        "diverged: first at aten.mm.default in the root module: "
    )


def test_the_step_of_the_first_difference_is_told():
    """The program marked its steps: step 7 is the one to look at."""

    def run(change: str) -> Trace:
        build = Builder()
        y = build.leaf("x", kind="input")
        for step in (6, 7):
            build.mark("step", step=step)
            y = build.op("exp", y, change=change if step == 7 else "")  # type: ignore[arg-type]
        build.output(y)
        return build.build()

    assert "the first difference lies in step 7" in diff(run(""), run("*")).notes
