"""Each cause: how it shows in two traces, and that what it says is in them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from opdrift.causes import CAUSES
from opdrift.causes.evidence import some
from opdrift.causes.nondeterministic import NONDETERMINISTIC
from opdrift.compare import number
from opdrift.diagnose import diff
from opdrift.records import PENDING, READ_IN_FLIGHT, Cause, Diagnosis
from opdrift.testing import Builder
from opdrift.testing.contents import noise
from opdrift.tracefile.reader import Trace

PAGES = Path(__file__).parents[2] / "docs" / "causes"
Run = Callable[[Builder], int]


def run(body: Run, **options: object) -> Trace:
    """A trace of a body that returns the run's output."""
    build = Builder(**options)  # type: ignore[arg-type]
    build.output(body(build))
    return build.build()


def cause(left: Trace, right: Trace) -> Cause:
    """The cause of the first divergence."""
    found = diff(left, right).first
    assert found is not None
    return found.cause


def says(found: Cause, *words: str) -> bool:
    """Whether the cause's words are in it."""
    text = " | ".join([found.summary, *found.evidence])
    return all(word in text for word in words)


def draw(text: str, shape: tuple[int, ...] = (16, 16)) -> np.ndarray:
    """Normal numbers that follow from a text."""
    seed = sum(map(ord, text))
    return np.random.default_rng(seed).standard_normal(shape).astype("<f4")


# ---- leaves ---------------------------------------------------------------------------------------------


def model(contents: dict[str, np.ndarray | str], kind: str = "parameter") -> Run:
    """x * each of the leaves, in turn."""

    def body(build: Builder) -> int:
        y = build.leaf("x", kind="input", shape=(16, 16))
        for name, content in contents.items():
            leaf = build.leaf(name, kind=kind, shape=(16, 16), content=content)  # type: ignore[arg-type]
            with build.scope(name.rpartition(".")[0]):
                y = build.op("mul", y, leaf)
        return y

    return body


def test_weights_that_were_drawn_twice_are_called_so():
    """Or loaded from two trainings: where neither run shows it, neither is said. Constants beside them are no evidence."""
    ones = np.ones((16, 16), "<f4")
    left = run(model({"a.weight": draw("1"), "b.weight": draw("2"), "norm.weight": ones}))
    right = run(model({"a.weight": draw("3"), "b.weight": draw("4"), "norm.weight": ones}))

    found = cause(left, right)

    assert found.slug == "weights"
    assert says(
        found,
        "2 of 3 tensors of the model differ before the first op",
        "unrelated",
        "no load of them is recorded",
        "or two checkpoints",
    )
    assert says(found, "hold a single number", "norm.weight")
    assert "load_state_dict" in found.try_


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            "2",
            "1 of 2 tensors of the model differs before the first op; its two contents are unrelated",
        ),
        ("4", "2 of 2 tensors of the model differ before the first op; they are unrelated"),
    ],
)
def test_one_weight_and_several_agree_with_their_verbs(other: str, said: str):
    """Nobody writes of one tensor what they are."""
    left = run(model({"a.weight": draw("1"), "b.weight": draw("2")}))
    right = run(model({"a.weight": draw("3"), "b.weight": draw(other)}))

    assert cause(left, right).summary.startswith(said)


def test_weights_drawn_during_the_run_name_the_draw():
    """The trace saw the draws, and no copy from a checkpoint."""

    def body(seed: int) -> Run:
        def inner(build: Builder) -> int:
            w = build.op("empty", shape=(16, 16), dtype="float32")
            w = build.op("uniform_", w, rng=seed)
            build.name(w, "fc.weight", when="use")
            return build.op("mm", build.leaf("x", kind="input", shape=(16, 16)), w)

        return inner

    left, right = run(body(11)), run(body(12))
    diagnosis = diff(left, right)
    found = cause(left, right)

    assert diagnosis.first is not None
    assert (diagnosis.first.kind, diagnosis.first.name) == ("leaf", "fc.weight")
    assert found.slug == "weights"
    assert says(
        found, "1 of 1 tensor of the model differs", "aten.uniform_.default", "none by a copy"
    )
    assert len(diagnosis.origins) == 1


def test_one_flipped_bit_is_located():
    """One element of one matrix: its index and what changed."""
    before = draw("w")
    after = before.copy()
    after[3, 5] *= -1

    found = cause(run(model({"fc.weight": before})), run(model({"fc.weight": after})))

    assert found.slug == "weights"
    assert says(found, "one element", "[3, 5]", "sign bit")


def test_weights_of_another_checkpoint_say_how_far_they_are_apart():
    """Neither drawn anew nor one bit: weights that moved a little everywhere."""
    before, noise = draw("w", (64, 64)), draw("noise", (64, 64))

    found = cause(
        run(model({"fc.weight": before})),
        run(model({"fc.weight": before + np.float32(0.03) * noise})),
    )

    assert found.slug == "weights"
    assert says(found, "near each other", "relative difference 0.0")


def test_a_parameter_overwritten_during_the_run_names_the_write():
    """Loaded in both runs, initialised again in one."""

    def body(again: bool) -> Run:
        def inner(build: Builder) -> int:
            w = build.leaf("fc.weight", content="checkpoint")
            if again:
                w = build.op("uniform_", w)
            return build.op("mm", build.leaf("x", kind="input"), w)

        return inner

    found = cause(run(body(False)), run(body(True)))

    assert (found.slug, found.confidence) == ("weights", "certain")
    assert says(
        found,
        "the right run drew it at random again, the left run kept what both had before",
        "op 1 (aten.uniform_.default)",
    )


@pytest.mark.parametrize(("read", "slug"), [(False, "weights"), (True, "input")])
def test_a_tensor_that_is_only_copied_into_a_weight_is_a_checkpoints(read: bool, slug: str):
    """What else reads it makes it data of the program."""

    def body(seed: str) -> Run:
        def inner(build: Builder) -> int:
            held = build.leaf("", kind="constant", shape=(16, 16), content=draw(seed))
            if read:
                build.op("relu", held)
            w = build.op("uniform_", build.op("empty", shape=(16, 16)), rng=1)
            w = build.op("copy_", w, held)
            build.name(w, "fc.weight", when="use")
            return build.op("mm", build.leaf("x", kind="input", shape=(16, 16)), w)

        return inner

    found = cause(run(body("1")), run(body("2")))

    assert found.slug == slug
    assert ("both runs loaded it, each from something else" in found.summary) is not read


def test_a_generator_that_an_op_was_given_is_told_from_the_default_one():
    """Both runs begin with one state of the default generator, and seed their own otherwise."""

    def drawn(state: int) -> Trace:
        build = Builder()
        build.op("rand", rng=1)
        x = build.op("rand", rng=state, settings={"generator": "Generator"})
        build.op("mul", x, build.leaf("fc.weight"))
        return build.build()

    found = cause(drawn(7), drawn(8))

    assert found.slug == "rng"
    assert "the generators that it was given differ" in found.summary
    assert "both began alike" not in found.summary


def poked(*ops: str) -> Trace:
    """A step of training on weights and data that the run drew, and the program's own writes behind it."""
    build = Builder()
    w = build.op("uniform_", build.op("empty", shape=(8, 8)), rng=1)
    x = build.op("randn", shape=(8, 8), rng=2)
    build.name(w, "fc.weight")
    with build.scope("fc"):
        y = build.op("mm", x, w)
    gradient = build.op("mm", x, y, phase="backward")
    w = build.op("add_.Tensor", w, gradient, source=("train.py", 5, "step"))
    for name in ops:
        w = build.op(name, w, rng=3, source=("train.py", 9, "main"))
    with build.scope("fc"):
        build.op("mm", x, w)
    return build.build()


def test_arithmetic_on_a_drawn_weight_is_a_change_and_no_draw():
    """The weight and the data were drawn in the run; what is added to the weight draws nothing."""
    found = cause(poked(), poked("add_.Tensor"))

    assert (found.slug, found.confidence) == ("weights", "certain")
    assert "fc.weight was changed by aten.add_ (op 7, train.py:9 in main) in the right run" in (
        found.summary
    )
    assert says(cause(poked(), poked("uniform_")), "fc.weight was drawn at random again")
    assert "drawn" not in cause(poked("mul_.Tensor"), poked()).summary


def trained(*, steps: int, extra: bool = False, ends: bool = True) -> Trace:
    """Weights and data drawn within the run, as of a whole program; `ends`: the model lives as long as the recording."""
    build = Builder()
    if extra:
        build.op("randint")
    w = build.op("uniform_", build.op("empty", shape=(8, 8)), rng=1)
    x = build.op("randn", shape=(8, 8), rng=2)
    build.name(w, "fc.weight")
    for step in range(steps):
        with build.scope("fc"):
            y = build.op("mm", x, w)
            mask = build.op("bernoulli_", build.op("empty_like", y), rng=10 * (1 + extra) + step)
            y = build.op("mul", y, mask)
        build.op("sum", y)
        w = build.op("add_.Tensor", w, build.op("mm", x, y, phase="backward"))
    if ends:
        build.name(w, "fc.weight", when="exit")
    return build.build()


def test_a_model_that_one_recording_outlives_is_held_against_its_last_weights():
    """Which run still has its model at the end is the garbage collector's choice, and no difference."""
    same = diff(trained(steps=2, ends=False), trained(steps=2))
    other = diff(trained(steps=2, ends=False), trained(steps=2, extra=True))

    assert (same.verdict, same.origins) == ("identical", ())
    assert {origin.cause.slug for origin in other.origins} == {"rng"}


def test_a_step_of_the_optimizer_is_no_second_draw_of_the_weights():
    """All that the step computes with was drawn, and it is an update all the same."""
    causes = diff(trained(steps=2), trained(steps=3)).causes

    assert causes
    assert not any("drawn at random again" in each.summary for each in causes)


def test_buffers_are_told_from_weights():
    """A running mean differs."""
    found = cause(
        run(model({"bn.running_mean": draw("1")}, "buffer")),
        run(model({"bn.running_mean": draw("1") + 1}, "buffer")),
    )

    assert found.slug == "buffer-state"
    assert says(found, "bn.running_mean", "running statistics")


def test_a_buffer_full_of_small_integers_is_called_uninitialised():
    """Subnormal numbers are what freed memory looks like."""
    garbage = np.full((16, 16), 7e-41, "<f4")

    left = run(model({"rotary.inv_freq": draw("1")}, "buffer"))
    right = Builder()
    y = right.leaf("x", kind="input", shape=(16, 16))
    leaf = right.leaf("rotary.inv_freq", kind="buffer", content=garbage)
    with right.scope("rotary"):
        right.output(right.op("mul", y, leaf))

    found = cause(left, right.build())

    assert found.slug == "uninitialised"
    assert says(found, "subnormal", "right")


def test_an_input_that_lost_its_first_token_says_which():
    """One run's ids are the other's with one element more at the start."""

    def body(ids: list[int]) -> Run:
        def inner(build: Builder) -> int:
            x = build.leaf("input_ids", kind="input", dtype="int64", content=np.array([ids]))
            return build.op(
                "embedding", build.leaf("embed.weight"), x, shape=(1, len(ids), 8), dtype="float32"
            )

        return inner

    found = cause(run(body([0, 5, 7, 9])), run(body([5, 7, 9])))

    assert found.slug == "input"
    assert says(
        found, "input_ids", "int64[1, 4]", "int64[1, 3]", "1 element more at its start: [0]"
    )


@pytest.mark.parametrize(
    ("name", "slug"), [("attention_mask", "mask"), ("position_ids", "position-ids")]
)
def test_masks_and_positions_among_the_inputs_are_named(name: str, slug: str):
    """The input's name says what it is for."""

    def body(content: str) -> Run:
        return lambda build: build.op(
            "add", build.leaf("x", kind="input"), build.leaf(name, kind="input", content=content)
        )

    assert cause(run(body("a")), run(body("b"))).slug == slug


def test_an_input_that_the_other_run_changed_in_place_names_the_write():
    """What the first run left in its input is what the second one starts from."""
    first = Builder()
    x = first.leaf("embeds", kind="input")
    y = first.op("mul_", x, settings={"other": 4})
    first.output(first.op("sin", y))
    left_behind = first.content(y)

    second = Builder()
    x = second.leaf("embeds", kind="input", content=left_behind)
    second.output(second.op("sin", second.op("mul_", x, settings={"other": 4})))

    for found in (cause(first.build(), second.build()), cause(second.build(), first.build())):
        assert (found.slug, found.confidence) == ("inplace", "certain")
        assert says(found, "aten.mul_.default", "bit for bit")


def test_a_leaf_in_another_type_is_a_matter_of_dtype():
    """The same numbers, held in half precision on one side."""

    def body(dtype: str) -> Run:
        def inner(build: Builder) -> int:
            content = draw("w", (4, 8)).astype("<f2").astype("<f4" if dtype == "float32" else "<f2")
            w = build.leaf("fc.weight", dtype=dtype, content=content)
            return build.op("mm", build.leaf("x", kind="input"), w, content=draw(dtype, (4, 8)))

        return inner

    left, right = run(body("float32")), run(body("float16"))
    found = cause(left, right)

    assert found.slug == "dtype"
    assert "weights" not in {each.slug for each in diff(left, right).causes}
    assert says(
        found,
        "fc.weight is float32 in the left run and float16 in the right one",
        "the numbers are the same",
    )


def quantised(weights: np.ndarray, bits: int) -> np.ndarray:
    levels = 2 ** (bits - 1) - 1
    step = np.abs(weights).max(1, keepdims=True) / np.float32(levels)
    return (np.round(weights / step) * step).astype("<f4")


def test_weights_on_a_grid_are_called_quantised():
    """Whole multiples of a step a row on one side; the same weights without on the other."""
    weights = draw("w", (8, 64))

    def body(content: np.ndarray) -> Run:
        def inner(build: Builder) -> int:
            x = build.leaf("x", kind="input", shape=(8, 64))
            return build.op("mul", x, build.leaf("fc.weight", content=content))

        return inner

    found = cause(run(body(weights)), run(body(quantised(weights, 4))))

    assert found.slug == "quantisation"
    assert says(found, "fc.weight", "whole multiples", "right")


def test_a_dequantised_weight_is_called_quantised():
    """One side makes the weight from an int8 one and its scale."""

    def body(low: bool) -> Run:
        def inner(build: Builder) -> int:
            x = build.leaf("x", kind="input")
            if not low:
                return build.op("mm", x, build.leaf("fc.weight"))
            whole = build.leaf(
                "fc.qweight", kind="buffer", dtype="int8", content=np.ones((4, 8), "i1")
            )
            w = build.op(
                "mul",
                build.op("_to_copy", whole, dtype="float32"),
                build.leaf("fc.scale", kind="buffer"),
            )
            return build.op("mm", x, w)

        return inner

    found = cause(run(body(False)), run(body(True)))

    assert found.slug == "quantisation"


# ---- memory ----------------------------------------------------------------------------------------------


def test_memory_read_before_it_was_written_names_both_ops():
    """The op that handed it out, and the op that read it."""

    def body(content: np.ndarray) -> Run:
        def inner(build: Builder) -> int:
            out = build.op("empty", shape=(4, 8), dtype="float32", source=("net.py", 3, "forward"))
            return build.op("tanh", out, content=content, read_uninitialised=True)

        return inner

    found = cause(run(body(draw("1", (4, 8)))), run(body(draw("2", (4, 8)))))

    assert (found.slug, found.confidence) == ("uninitialised", "certain")
    assert says(found, "op 1 (aten.empty.default)", "net.py:3", "op 2 (aten.tanh.default)")


def slots(late: bool) -> Run:
    """Three layers read one slot; a copy that no op shows brings the next weights, too late on one side."""

    def body(build: Builder) -> int:
        y = build.leaf("x", kind="input")
        slot = build.leaf("layers.0.slot", kind="buffer", content="host 0")
        build.name(slot, "layers.1.slot", kind="buffer")
        for layer in range(2):
            if layer and not late:
                slot = build.hidden_write(slot, "layers.0.slot", content="host 1")
                build.name(slot, "layers.1.slot", kind="buffer", when="changed")
            with build.scope(f"layers.{layer}"):
                y = build.op("mul", y, slot)
        return y

    return body


def test_a_hidden_write_names_the_slot_by_its_reader():
    """One run reads the new content, the other what the layer before had read."""
    left, right = run(slots(late=False)), run(slots(late=True))

    diagnosis, found = diff(left, right), cause(left, right)

    assert diagnosis.first is not None
    assert (diagnosis.first.kind, diagnosis.first.name, diagnosis.first.module) == (
        "hidden-write", "layers.1.slot", "layers.1",
    )  # fmt: skip
    assert found.slug == "race"
    assert says(found, "no recorded op", "reads the same content as op 1", "layers.0.slot")


def test_an_op_in_place_that_others_still_need_names_writer_and_reader():
    """relu_ on one side, relu on the other; the tensor is read again afterwards."""

    def body(name: str) -> Run:
        def inner(build: Builder) -> int:
            h = build.op("sin", build.leaf("x", kind="input"))
            with build.scope("act"):
                r = build.op(name, h, content=None)
            return build.op("add", r if name == "relu_" else h, r)

        return inner

    diagnosis = diff(run(body("relu")), run(body("relu_")))

    assert diagnosis.first is not None
    assert diagnosis.first.cause.slug == "inplace"
    assert (diagnosis.first.op, diagnosis.first.module) == ("aten.relu_.default", "act")
    assert says(
        diagnosis.first.cause,
        "op 2 (aten.relu_.default)",
        "op 3 (aten.add.default)",
        "aten.relu.default ran instead",
    )


def test_a_leaf_that_was_not_read_again_is_suspected():
    """Equal as far as known, and the result is nowhere near: the leaf may have changed unseen."""

    def body(change: str) -> Run:
        return lambda build: build.op(
            "mm", build.leaf("x", kind="input"), build.leaf("fc.weight"), change=change
        )  # type: ignore[arg-type]

    found = cause(run(body("")), run(body("*")))

    assert (found.slug, found.confidence) == ("race", "possible")
    assert "integrity='full'" in found.try_


# ---- random numbers ---------------------------------------------------------------------------------------


def dropout(
    state: int, *, training: bool = True, extra: bool = False, backward: bool = False
) -> Run:
    """A mask drawn in a dropout module, as torch draws it on a CPU."""

    def body(build: Builder) -> int:
        x = build.leaf("x", kind="input")
        if extra:
            build.op("random_", build.op("empty", shape=(1,), dtype="int64"), rng=100)
            state_ = state
        else:
            state_ = state
        with build.scope("drop", type="Dropout", training=training):
            if training:
                mask = build.op(
                    "bernoulli_", build.op("empty_like", x), settings={"p": 0.8}, rng=state_
                )
                x = build.op("mul", x, build.op("div_", mask, settings={"other": 0.8}))
        y = build.op("sin", x)
        if backward:
            build.op("mul", y, x, phase="backward")
        return y

    return body


def test_dropout_at_inference_is_called_dropout():
    """Both runs draw, nothing is trained: somebody forgot eval()."""
    found = cause(run(dropout(1)), run(dropout(2)))

    assert found.slug == "dropout"
    assert says(found, "drop", "training=True", "0000000000000001", "0000000000000002")
    assert "eval()" in found.try_


def test_dropout_in_one_run_only_is_called_dropout():
    """One module trains, the other does not."""
    found = cause(run(dropout(1)), run(dropout(1, training=False)))

    assert found.slug == "dropout"
    assert says(found, "in the left run only", "left: drop ran with training=True")


def test_dropout_in_training_is_a_matter_of_the_seed():
    """With a backward pass dropout is meant; the generators differ from the first draw on."""
    found = cause(run(dropout(1, backward=True)), run(dropout(2, backward=True)))

    assert found.slug == "rng"
    assert says(found, "from the first draw on")
    assert "manual_seed" in found.try_


def test_an_extra_draw_upstream_is_named():
    """The generators began alike; one run drew once more before."""
    left = run(lambda build: dropout(2)(build) if build.op("rand", shape=(1,), rng=100) else 0)
    right = run(
        lambda build: dropout(3, extra=True)(build) if build.op("rand", shape=(1,), rng=100) else 0
    )

    found = cause(left, right)

    assert (found.slug, found.confidence) == ("rng", "certain")
    assert says(found, "right", "aten.random_.default", "1 random op")


def test_attention_without_dropout_draws_nothing():
    """Its tag says it may draw; without dropout_p it does not, so other states are no cause."""

    def body(state: int) -> Run:
        def inner(build: Builder) -> int:
            q = build.leaf("q", kind="input")
            return build.op(
                "_scaled_dot_product_flash_attention_for_cpu",
                q,
                q,
                q,
                rng=state,
                content=draw("o", (4, 8)),
            )

        return inner

    assert diff(run(body(1)), run(body(2))).verdict == "identical"


def test_a_norm_in_training_mode_on_one_side_only():
    """The op's own argument says so."""

    def body(training: bool) -> Run:
        def inner(build: Builder) -> int:
            with build.scope("bn", type="BatchNorm2d", training=training):
                return build.op(
                    "native_batch_norm",
                    build.leaf("x", kind="input"),
                    settings={"training": training},
                )

        return inner

    found = cause(run(body(False)), run(body(True)))

    assert found.slug == "train-mode"
    assert says(found, "training: False against True", "BatchNorm2d")


def test_a_replaced_module_with_a_mode_of_its_own_is_no_training_mode():
    """A Linear in eval mode against another class that nobody put into it: nothing there depends on the mode."""

    def body(kind: str) -> Run:
        def inner(build: Builder) -> int:
            x = build.leaf("x", kind="input", shape=(16, 16))
            with build.scope("head", type=kind, training=kind != "Linear"):
                weight = build.leaf("head.weight", shape=(16, 16))
                if kind != "Linear":
                    weight = build.op("tanh", weight)
                return build.op("mm", x, weight)

        return inner

    assert cause(run(body("Linear")), run(body("Normed"))).slug == "structure"


# ---- settings ----------------------------------------------------------------------------------------------


def test_another_argument_is_op_args_whatever_its_size():
    """A last-bit difference with another epsilon is no rounding."""

    def body(eps: float, change: str) -> Run:
        return lambda build: build.op(
            "native_layer_norm", build.leaf("x", kind="input"), settings={"eps": eps},
            content=draw("y", (4, 8)) + np.float32(1e-7 if change else 0),
        )  # fmt: skip

    found = cause(run(body(1e-5, "")), run(body(1e-4, "x")))

    assert (found.slug, found.confidence) == ("op-args", "certain")
    assert says(found, "eps: 1e-05 against 0.0001", "equal in both runs")


@pytest.mark.parametrize(
    "settings", [({"is_causal": True}, {}), ({"is_causal": True}, {"is_causal": False})]
)
def test_what_attention_may_see_is_a_mask(settings: tuple[dict[str, object], dict[str, object]]):
    """Causal on one side only."""

    def body(options: dict[str, object]) -> Run:
        def inner(build: Builder) -> int:
            q = build.leaf("q", kind="input")
            return build.op(
                "_scaled_dot_product_flash_attention_for_cpu", q, q, q, settings=options
            )

        return inner

    diagnosis = diff(run(body(settings[0])), run(body(settings[1])))

    assert diagnosis.first is not None
    assert diagnosis.first.cause.slug == "mask"
    assert "is_causal" in [a.name for a in diagnosis.first.arguments]


def test_other_positions_are_told_by_the_table_that_reads_them():
    """arange starts elsewhere, and an embedding reads it."""

    def body(start: int) -> Run:
        def inner(build: Builder) -> int:
            at = build.op("arange", shape=(4,), dtype="int64", settings={"start": start})
            with build.scope("wpe"):
                return build.op(
                    "embedding", build.leaf("wpe.weight"), at, dtype="float32", shape=(4, 8)
                )

        return inner

    diagnosis = diff(run(body(0)), run(body(3)))

    assert diagnosis.first is not None
    assert (diagnosis.first.op, diagnosis.first.module) == ("aten.embedding.default", "wpe")
    assert diagnosis.first.cause.slug == "position-ids"
    assert says(diagnosis.first.cause, "start: 0 against 3")


def test_a_cache_written_at_another_place_is_called_so():
    """The same key goes into another row of the cache, which attention then reads."""

    def body(place: int) -> Run:
        def inner(build: Builder) -> int:
            x = build.leaf("x", kind="input", shape=(4, 8))
            cache = build.leaf("cache", kind="constant", content=np.zeros((4, 8), "<f4"))
            key = build.op("sin", x, shape=(1, 8))
            row = build.op(
                "slice",
                cache,
                shape=(1, 8),
                offset=8 * place,
                settings={"start": place, "end": place + 1},
            )
            written = build.op("copy_", row, key, shape=(1, 8))
            now = np.zeros((4, 8), "<f4")
            now[place] = build.content(written)
            return build.op("mm", x, build.again(cache, printed=True, content=now))

        return inner

    diagnosis = diff(run(body(2)), run(body(1)))

    assert diagnosis.first is not None
    assert (diagnosis.first.op, diagnosis.first.cause.slug) == ("aten.copy_.default", "kv-cache")
    assert says(diagnosis.first.cause, "start: 2 against 1", "end: 3 against 2")


@pytest.mark.parametrize("read", ["mm", "addmm", "bmm"])
def test_another_part_of_the_data_is_an_input_and_no_cache(read: str):
    """A program gives each rank a share of its rows: data that it made itself is kept by no forward."""

    def body(start: int) -> Run:
        def inner(build: Builder) -> int:
            data = build.op("randn", shape=(8, 8))
            settings = {"start": start, "end": start + 4}
            part = build.op("slice", data, shape=(4, 8), offset=8 * start, settings=settings)
            with build.scope("fc"):
                return build.op(read, part, build.leaf("fc.weight"))

        return inner

    first = diff(run(body(4)), run(body(0))).first

    assert first is not None
    assert (first.module, first.cause.slug, first.cause.confidence) == ("fc", "input", "likely")
    assert "another part of the program's data" in first.cause.summary
    assert says(first.cause, "start: 4 against 0")


def test_what_changed_after_the_same_op_made_it_is_no_other_tensor():
    """Both runs read what the same op returned: that one of them reads another tensor would be wrong."""

    def run(content: str) -> Trace:
        build = Builder()
        made = build.op("add_", build.op("zeros_like", build.leaf("x", kind="input")))
        now = build.again(made, printed=True, content=noise(content, (4, 8), "float32"))
        build.output(build.op("relu", now))
        return build.build()

    diagnosis = diff(run("a"), run("b"))

    assert diagnosis.first is not None
    assert (diagnosis.verdict, diagnosis.first.op) == ("diverged", "aten.relu.default")
    assert [c for c in diagnosis.causes if c.confidence == "certain"] == []
    assert not says(diagnosis.first.cause, "both runs have both tensors")


def test_another_output_of_the_same_op_is_another_tensor():
    """The hidden state is read in place of the cell state: both runs have both."""

    def run(number: int) -> Trace:
        build = Builder()
        first = build.op("_thnn_fused_lstm_cell", build.leaf("x", kind="input"), outputs=2)
        build.output(build.op("relu", first + number))
        return build.build()

    diagnosis = diff(run(0), run(1))

    assert diagnosis.first is not None
    assert (diagnosis.first.cause.slug, diagnosis.first.cause.confidence) == (
        "structure",
        "certain",
    )
    assert says(diagnosis.first.cause, "both runs have both tensors")


# ---- kernels -----------------------------------------------------------------------------------------------


def test_rounding_says_how_far_and_how_far_is_explained():
    """With the thread counts that differ."""

    def body(change: str) -> Run:
        return lambda build: build.op("sum", build.leaf("x", kind="input"), change=change)  # type: ignore[arg-type]

    found = cause(run(body(""), flags={"num_threads": 1}), run(body("~"), flags={"num_threads": 2}))

    assert found.slug == "rounding"
    assert says(found, "relative difference", "explained up to", "threads: left 1, right 2")
    assert "torch.set_num_threads(1)" in found.try_


def test_an_op_on_torchs_list_is_called_nondeterministic():
    """Equal inputs, other outputs, and torch itself says that it may happen."""

    def body(change: str) -> Run:
        def inner(build: Builder) -> int:
            x = build.leaf("x", kind="input")
            return build.op(
                "index_put",
                x,
                build.leaf("i", kind="input"),
                change=change,
                settings={"accumulate": True},
            )  # type: ignore[arg-type]

        return inner

    found = cause(run(body(""), flags={"num_threads": 4}), run(body("~"), flags={"num_threads": 4}))

    assert (found.slug, found.confidence) == ("nondeterministic-op", "certain")
    assert says(found, "torch's list", "threads")
    assert "use_deterministic_algorithms" in found.try_


def test_an_op_on_torchs_list_is_not_called_so_where_deterministic_algorithms_were_on():
    """Switched on during the run, before the op: the header alone does not tell."""

    def body(change: str) -> Run:
        def inner(build: Builder) -> int:
            x, i = build.leaf("x", kind="input"), build.leaf("i", kind="input")
            build.mark("flags", deterministic_algorithms=[False, True])
            return build.op("index_put", x, i, change=change)  # type: ignore[arg-type]

        return inner

    started = {"num_threads": 4, "deterministic_algorithms": False}

    found = cause(run(body(""), flags=started), run(body("~"), flags=started))

    assert found.slug != "nondeterministic-op"


def test_torchs_list_of_nondeterministic_ops_is_known_whole():
    """As its documentation has it; a torch that adds one makes this fail."""
    text = torch.use_deterministic_algorithms.__doc__ or ""
    listed = text[text.index("The following normally-nondet") : text.index("In addition, several")]
    names = {
        name.rpartition(".")[2].rstrip("_") for name in re.findall(r"`(torch\.[\w.]+)`", listed)
    }
    ours = {
        **{
            name: name for name in ["bmm", "index_put", "put", "index_add", "index_copy", "scatter"]
        },
        **{
            name: name
            for name in ["scatter_reduce", "histc", "bincount", "median", "cumsum", "scatter_add"]
        },
        **{f"Conv{d}d": "convolution" for d in (1, 2, 3)},
        **{f"ConvTranspose{d}d": "convolution" for d in (1, 2, 3)},
        **{f"ReplicationPad{d}d": f"replication_pad{d}d_backward" for d in (1, 2, 3)},
        **{f"ReflectionPad{d}d": f"reflection_pad{d}d_backward" for d in (1, 2, 3)},
        **{f"AdaptiveAvgPool{d}d": f"_adaptive_avg_pool{d}d_backward" for d in (2, 3)},
        **{f"FractionalMaxPool{d}d": f"fractional_max_pool{d}d_backward" for d in (2, 3)},
        "AvgPool3d": "avg_pool3d_backward",
        "AdaptiveMaxPool2d": "adaptive_max_pool2d_backward",
        "MaxPool3d": "max_pool3d_with_indices_backward",
        "MaxUnpool1d": "max_unpool2d",  # what it calls
        "MaxUnpool2d": "max_unpool2d",
        "MaxUnpool3d": "max_unpool3d",
        "interpolate": "upsample_bilinear2d_backward",
        "NLLLoss": "nll_loss2d_forward",
        "CTCLoss": "_ctc_loss_backward",
        "EmbeddingBag": "_embedding_bag_dense_backward",
        "grid_sample": "grid_sampler_2d_backward",
        "__getitem": "_index_put_impl_",  # backward, as the next three
        "gather": "scatter_add",
        "index_select": "index_add",
        "repeat_interleave": "index_add",
    }
    no_result = {"resize", "RuntimeError"}  # memory that nothing has written: cause `uninitialised`

    assert names - no_result == set(ours)
    assert set(ours.values()) <= set(NONDETERMINISTIC)
    assert all(hasattr(torch.ops.aten, name) for name in NONDETERMINISTIC)


@pytest.mark.parametrize(
    ("layout", "slug"), [("sparse", "nondeterministic-op"), ("dense", "rounding")]
)
def test_bmm_is_nondeterministic_only_where_an_operand_is_sparse(layout: str, slug: str):
    """A sparse operand is two inputs in a trace: indices and values."""

    def body(change: str) -> Run:
        def inner(build: Builder) -> int:
            parts = [
                build.leaf(f"x{n}", kind="input") for n in range(3 if layout == "sparse" else 2)
            ]
            return build.op("bmm", *parts, change=change)  # type: ignore[arg-type]

        return inner

    found = cause(run(body(""), device="cuda:0"), run(body("~"), device="cuda:0"))

    assert found.slug == slug


def test_a_difference_beyond_rounding_with_nothing_else_is_the_kernels():
    """Same op, same arguments, equal inputs that ops made: something computes otherwise."""

    def body(change: str) -> Run:
        return lambda build: build.op(
            "exp", build.op("sin", build.leaf("x", kind="input")), change=change
        )  # type: ignore[arg-type]

    found = cause(run(body("")), run(body("*")))

    assert (found.slug, found.confidence) == ("kernel", "possible")
    assert says(found, "inputs equal bit for bit", "explained up to")


def test_a_fused_path_on_one_side_is_the_kernel():
    """The fast path of the encoder layer against its parts."""

    def body(fused: bool) -> Run:
        def inner(build: Builder) -> int:
            x = build.leaf("x", kind="input")
            with build.scope("layer"):
                if fused:
                    return build.op("_transformer_encoder_layer_fwd", x)
                return build.op("add", build.op("_softmax", build.op("sin", x)), x)

        return inner

    found = cause(run(body(False)), run(body(True)))

    assert found.slug == "kernel"
    assert says(found, "_transformer_encoder_layer_fwd", "right run takes a fused path")


MKL = {"flags": {"mkldnn.enabled": True}, "versions": {"mkl": "2024.2"}}


def multiplied(rows: int, *, change: str = "") -> Run:
    """One product; the left operand is cut to some of its rows, as a smaller batch is."""

    def inner(build: Builder) -> int:
        x = build.op("sin", build.leaf("x", kind="input", shape=(30, 64)), shape=(30, 64))
        few = build.op("slice", x, shape=(rows, 64))
        other = build.op("t", build.leaf("w", shape=(64, 64)), shape=(64, 64))
        return build.op("mm", few, other, shape=(rows, 64), change=change)  # type: ignore[arg-type]

    return inner


def test_a_product_that_differs_by_rounding_names_its_routine():
    """One routine on both sides, and sizes are not spoken of where they are the same."""
    found = cause(run(multiplied(4), **MKL), run(multiplied(4, change="~"), **MKL))

    assert found.slug == "rounding"
    assert says(found, "kernel: SGEMM of MKL in both")
    assert not says(found, "sizes (m, n, k)")


def test_rounding_of_compiled_code_names_the_compiler():
    """The advice is to compile both sides or neither, not to change the batch; two compiled runs are not told so."""

    def body(*, compiled: bool, change: str = "") -> Run:
        def inner(build: Builder) -> int:
            x = build.op("sin", build.leaf("x", kind="input", shape=(4, 64)), shape=(4, 64))
            w = build.op("t", build.leaf("w", shape=(64, 64)), shape=(64, 64))
            return build.op("mm", x, w, shape=(4, 64), change=change, compiled=compiled)  # type: ignore[arg-type]

        return inner

    one = cause(run(body(compiled=False), **MKL), run(body(compiled=True, change="~"), **MKL))
    both = cause(run(body(compiled=True), **MKL), run(body(compiled=True, change="~"), **MKL))

    assert one.slug == both.slug == "rounding"
    assert says(one, "the right run is compiled", "torch.compile made the code")
    assert "TORCH_COMPILE_DISABLE=1" in one.try_
    assert not says(both, "compile")
    assert "COMPILE" not in both.try_


def folded(*, batched: bool, factor: float = 1 + 2**-22) -> Run:
    """The same product as one of all rows, and as a batch of products; the former off by a factor."""
    exact = draw("out", (15, 8, 64))
    near = exact * np.float32(factor)

    def inner(build: Builder) -> int:
        x = build.op("sin", build.leaf("x", kind="input", shape=(15, 8, 64)), shape=(15, 8, 64))
        w = build.leaf("w", shape=(64, 64))
        with build.scope("fc", type="Linear"):
            if batched:
                wide = build.op("repeat", w, shape=(15, 64, 64))
                out = build.op("bmm", x, wide, shape=(15, 8, 64), content=exact)
            else:
                flat = build.op("view", x, shape=(120, 64))
                out = build.op("mm", flat, w, shape=(120, 64), content=near.reshape(120, 64))
                out = build.op("_unsafe_view", out, shape=(15, 8, 64), content=near)
        return build.op("neg", out, content=-(exact if batched else near))

    return inner


def test_a_product_in_batches_and_in_one_is_two_routines_of_a_library():
    """SGEMM against SGEMM_BATCH: explained, with the sizes that choose, and no difference in structure."""
    diagnosis = diff(run(folded(batched=False), **MKL), run(folded(batched=True), **MKL))

    assert (diagnosis.verdict, diagnosis.first.cause.slug) == ("rounding", "rounding")
    assert (
        "left ran SGEMM of MKL (float32 goes to BLAS); right ran SGEMM_BATCH of MKL"
        " (float32 goes to BLAS, batch 15 > 1)"
    ) in diagnosis.first.cause.summary


def test_another_routine_is_no_excuse_for_a_large_difference():
    """Other ops on both sides and another result: the runs do different things, whatever multiplies."""
    left = run(folded(batched=False, factor=1.5), **MKL)

    found = cause(left, run(folded(batched=True), **MKL))

    assert found.slug == "structure"


def test_compiled_code_that_draws_otherwise_is_called_so():
    """One run draws in the graph, the other op by op."""

    def body(compiled: bool) -> Run:
        def inner(build: Builder) -> int:
            x = build.op("sin", build.leaf("x", kind="input"))
            if compiled:
                build.op("random_", build.op("empty", shape=(1,), dtype="int64"), compiled=True)
                return build.leaf("", kind="alive", when="exit", content="compiled result")
            return build.op("add", x, build.op("randn_like", x))

        return inner

    diagnosis = diff(run(body(False)), run(body(True)))

    assert diagnosis.first is not None
    assert (diagnosis.first.op, diagnosis.first.cause.slug) == (
        "aten.randn_like.default",
        "compile",
    )
    assert "fallback_random" in diagnosis.first.cause.try_


# ---- numbers ------------------------------------------------------------------------------------------------


def test_nan_is_named_at_the_op_that_makes_it():
    """Hand-written attention of a row without keys, against a fused one."""
    bad = draw("p", (4, 8))
    bad[0] = np.nan

    def body(fused: bool) -> Run:
        def inner(build: Builder) -> int:
            x = build.leaf("x", kind="input")
            if fused:
                return build.op(
                    "sin", build.op("_scaled_dot_product_flash_attention_for_cpu", x, x, x)
                )
            scores = build.op("bmm", x, x)
            return build.op(
                "sin", build.op("bmm", build.op("_softmax", scores, content=bad), x, content=bad)
            )

        return inner

    diagnosis = diff(run(body(False)), run(body(True)))

    assert diagnosis.first is not None
    assert (diagnosis.first.op, diagnosis.first.cause.slug) == ("aten._softmax.default", "nan")
    assert says(diagnosis.first.cause, "8 NaN", "none went in")


def test_a_stretch_in_half_precision_is_a_matter_of_dtype():
    """One run casts, computes and casts back: no rounding, however small."""

    def body(low: bool) -> Run:
        def inner(build: Builder) -> int:
            x, w = build.op("sin", build.leaf("x", kind="input")), build.leaf("w")
            if not low:
                return build.op("tanh", build.op("mm", x, w))
            y = build.op(
                "mm", *(build.op("_to_copy", v, dtype="bfloat16") for v in (x, w)), dtype="bfloat16"
            )
            return build.op("tanh", build.op("_to_copy", y, dtype="float32"))

        return inner

    found = cause(run(body(False)), run(body(True)))

    assert found.slug == "dtype"
    assert says(found, "the right run computes in bfloat16", "cast by op")


# ---- structure -----------------------------------------------------------------------------------------------


def test_a_stale_gather_names_the_shards_that_nobody_reads():
    """One run puts the weight together from its shards, the other uses a copy from before."""

    def body(stale: bool) -> Run:
        def inner(build: Builder) -> int:
            x = build.leaf("x", kind="input", shape=(4, 4))
            shards = [build.leaf(f"unit.shards.{i}", shape=(2, 4)) for i in range(2)]
            if stale:
                full = build.leaf("", kind="constant", when="use", shape=(4, 4), content="old")
            else:
                full = build.op("cat", *shards, shape=(4, 4))
            with build.scope("unit"):
                return build.op("mm", x, build.op("t", full))

        return inner

    found = cause(run(body(False)), run(body(True)))

    assert found.slug == "fsdp-gather"
    assert says(found, "unit.shards.0, unit.shards.1", "never read", "existed before the run")


def kept(copies: bool, reads: bool = True) -> Run:
    """A product with a copy of a weight, made here or kept from before the run."""

    def body(build: Builder) -> int:
        x = build.leaf("x", kind="input", shape=(16, 16))
        weight = build.leaf("fc.weight", shape=(16, 16))
        with build.scope("fc", type="Cached"):
            if copies:
                copy = build.op("clone", weight, content=build.content(weight))
            else:
                copy = build.leaf("", kind="constant", when="use", shape=(16, 16), content="older")
            if not copies and not reads:
                x = build.op("add", x, weight)
            return build.op("mm", x, copy)

    return body


def test_a_copy_of_a_weight_that_is_kept_from_before_is_called_so():
    """One run copies the weight and multiplies with the copy, the other multiplies with what it kept."""
    found = cause(run(kept(copies=True)), run(kept(copies=False)))

    assert (found.slug, found.confidence) == ("weights", "likely")
    assert says(
        found, "the right run uses a copy of fc.weight from before", "fc.weight is never read"
    )


def test_a_weight_that_is_read_elsewhere_is_not_called_kept():
    """Both its sides compute with the weight: the old tensor may be anything."""
    found = cause(run(kept(copies=True)), run(kept(copies=False, reads=False)))

    assert found.slug == "structure"


def test_structure_lists_what_each_run_does():
    """Both op lists, and who reads the result."""
    left = run(
        lambda b: b.op(
            "sin", b.op("relu", b.leaf("x", kind="input")), source=("net.py", 9, "forward")
        )
    )
    right = run(lambda b: b.op("sin", b.leaf("x", kind="input"), source=("net.py", 9, "forward")))

    found = cause(left, right)

    assert found.slug == "structure"
    assert says(found, "left only: relu", "right has nothing of its own here", "net.py:9")


def test_layers_in_another_order_say_whose_result_each_reads():
    """The first layer of one run reads what the second made."""

    def body(order: list[int]) -> Run:
        def inner(build: Builder) -> int:
            y = build.leaf("x", kind="input")
            for i in order:
                with build.scope(f"layers.{i}"):
                    y = build.op("mm", y, build.leaf(f"layers.{i}.weight"))
            return y

        return inner

    diagnosis = diff(run(body([0, 1])), run(body([1, 0])))

    assert diagnosis.first is not None
    assert (diagnosis.first.module, diagnosis.first.cause.slug) == ("layers.0", "structure")


# ---- flags and environment -------------------------------------------------------------------------------------


def product(change: str) -> Run:
    """A matrix product of two computed tensors, on the CPU."""
    return lambda b: b.op(
        "mm",
        b.op("sin", b.leaf("x", kind="input")),
        b.op("cos", b.leaf("y", kind="input")),
        change=change,
    )  # type: ignore[arg-type]


def test_a_precision_flag_explains_what_rounding_does_not():
    """The op is the same, its inputs too; the setting that steers it differs."""
    found = cause(
        run(product(""), flags={"fp32_precision.mkldnn.matmul": "ieee"}),
        run(product("*"), flags={"fp32_precision.mkldnn.matmul": "bf16"}),
    )

    assert found.slug == "flags"
    assert says(found, "fp32_precision.mkldnn.matmul: ieee against bf16")
    assert 'torch.backends.mkldnn.matmul.fp32_precision = "ieee"' in found.try_


def scaled(factor: float) -> Run:
    """That product, apart from another's by a factor an element that narrowed factors explain."""
    noise = 1 + factor * draw("noise", (4, 4)).astype("f8")
    result = (draw("product", (4, 4)) * noise).astype("<f4")
    return lambda b: b.op(
        "mm",
        b.op("sin", b.leaf("x", kind="input")),
        b.op("cos", b.leaf("y", kind="input")),
        content=result,
    )


def test_narrowed_factors_on_one_side_only_are_a_setting_and_no_rounding():
    """bfloat16 factors explain 1e-3: where both runs allow them it is rounding, where one does the flag is the cause."""
    bf16, ieee = ({"fp32_precision.mkldnn.matmul": value} for value in ("bf16", "ieee"))
    both = diff(run(scaled(0), flags=bf16), run(scaled(1e-3), flags=bf16))
    one = diff(run(scaled(0), flags=ieee), run(scaled(1e-3), flags=bf16))

    assert both.first is not None
    assert one.first is not None
    assert (both.verdict, both.first.cause.slug) == ("rounding", "rounding")
    assert (one.verdict, one.first.cause.slug) == ("diverged", "flags")


@pytest.mark.parametrize("flag", ["fp32_precision.cuda.matmul", "sdp.flash", "grad_mode"])
def test_a_flag_that_does_not_steer_the_op_explains_nothing(flag: str):
    """Of another device, of attention, of no op at all."""
    found = cause(run(product(""), flags={flag: "a"}), run(product("*"), flags={flag: "b"}))

    assert found.slug != "flags"


def test_a_flag_that_one_trace_does_not_tell_of_explains_nothing():
    """It was recorded by another opdrift, or with another torch: unknown, not another setting."""
    flag = {"fp32_precision.mkldnn.matmul": "bf16"}

    assert cause(run(product("")), run(product("*"), flags=flag)).slug != "flags"


def test_versions_are_offered_as_a_further_cause():
    """Another torch, with nothing better to say about the op."""

    def body(change: str) -> Run:
        return lambda b: b.op("exp", b.op("sin", b.leaf("x", kind="input")), change=change)  # type: ignore[arg-type]

    found = diff(
        run(body(""), versions={"torch": "2.12"}), run(body("*"), versions={"torch": "2.13"})
    )

    assert "environment" in [c.slug for c in found.causes]


def drawn(factor: float) -> Run:
    """A model whose weight is apart from another's by a factor an element."""
    noise = 1 + factor * draw("noise").astype("f8")
    return model({"fc.weight": (draw("w") * noise).astype("<f4")})


def test_weights_apart_by_rounding_on_another_machine_are_of_the_environment():
    """Seeded draws differ in the last bits with the instructions of the CPU."""
    found = cause(
        run(drawn(0), flags={"cpu_capability": "AVX512"}),
        run(drawn(2e-8), flags={"cpu_capability": "DEFAULT"}),
    )

    assert found.slug == "environment"
    assert says(found, "no more than rounding", "cpu_capability: AVX512 against DEFAULT")


@pytest.mark.parametrize(("factor", "other"), [(2e-8, "AVX512"), (1e-2, "DEFAULT")])
def test_weights_are_not_put_down_to_the_machine_without_reason(factor: float, other: str):
    """The same machine, or more than rounding."""
    found = cause(
        run(drawn(0), flags={"cpu_capability": "AVX512"}),
        run(drawn(factor), flags={"cpu_capability": other}),
    )

    assert found.slug == "weights"


# ---- all of them -----------------------------------------------------------------------------------------------


#: Rules that answer with the slug of another one.
OTHER_RULES = {
    "op-args-fused",
    "environment-draws",
    "mask-decided-otherwise",
    "mask-input",
    "mask-exchanged",
    "mask-leaf",
    "mask-on-one-side",
    "mask-otherwise",
    "mask-without-keys",
    "mask-written",
    "moved",
    "padded-mask",
    "padded-positions",
    "position-counted",
    "raised",
    "reshaped",
    "split-products",
    "unseen-kernel",
    "unseen-write",
    "copied-otherwise",
    "moved-otherwise",
    "input-of-other-part",
    "race-gathered",
    "race-in-flight",
    "dtype-gathered",
    "dtype-of-gradient",
    "op-args-reduced",
    "structure-accumulated",
    "structure-of-gradient",
    "op-args-gathered",
    "rounding-gathered",
    "structure-gathered",
    "structure-left-out",
    "structure-updated",
    "weights-exchanged",
    "weights-kept",
    "weights-packed",
    "weights-replaced",
    "weights-retied",
    "weights-written",
}


#: Told of the ranks of a run (`opdrift.world`, `opdrift.diagnose.by_rank`), not asked of an origin.
OF_RANKS = {"collective", "other-rank", "other-run", "rank-ended", "replica"}


def slugs() -> set[str]:
    """Every slug that a cause can have."""
    return set(CAUSES) - OTHER_RULES | OF_RANKS


@pytest.mark.parametrize("slug", sorted(slugs()))
def test_every_cause_has_its_page(slug: str):
    """What it means, how it shows, how to confirm it, how to fix it."""
    text = (PAGES / f"{slug}.md").read_text(encoding="utf-8")

    assert text.startswith(f"# {slug}")
    for heading in ("## What it means", "## How it shows", "## How to confirm", "## How to fix"):
        assert heading in text


def test_every_page_is_of_a_cause():
    """No page without the code that speaks of it."""
    assert {page.stem for page in PAGES.glob("*.md")} - {"README"} == slugs()


def test_the_list_of_nondeterministic_ops_names_devices():
    """Each entry says on which devices."""
    devices = {d for known, _ in NONDETERMINISTIC.values() for d in known.split()}

    assert devices == {"cpu", "cuda"}


def test_no_answer_is_an_error():
    """A divergence always has a cause, with something to try."""
    left = run(lambda b: b.op("sin", b.leaf("x", kind="input")))
    right = run(lambda b: b.op("sin", b.leaf("x", kind="input"), change="*"))

    diagnosis: Diagnosis = diff(left, right)

    assert all(d.cause.summary and d.cause.evidence and d.cause.try_ for d in diagnosis.origins)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "an unknown size"),
        (float("inf"), "infinite"),
        (0.0, "0"),
        (0.5, "0.5"),
        (1.2345e-7, "1.2e-7"),
        (123456.0, "1.2e5"),
    ],
)
def test_sizes_have_two_or_three_digits(value: float | None, text: str):
    """As people write them."""
    assert number(value) == text


def test_long_lists_are_cut():
    """A few names, and how many more."""
    assert some(list("abcdef"), 2) == "a, b and 4 more"
    assert some(["a"]) == "a"


def reduced(*, early: bool) -> Run:
    """A sum over ranks that is read before it is done, or after."""

    def body(build: Builder) -> int:
        x = build.op("c10d.allreduce_.default", build.leaf("x", kind="input"), flags=PENDING)
        with build.scope("fc"):
            return build.op(
                "mul", x, change="*" if early else "", flags=READ_IN_FLIGHT if early else 0
            )

    return body


def test_what_was_read_before_it_was_there_is_a_race():
    """A run with every wait in place stands beside it: the kernel is not to blame."""
    found = cause(run(reduced(early=True)), run(reduced(early=False)))

    assert (found.slug, found.confidence) == ("race", "certain")
    assert says(found, "left: op 1 (c10d.allreduce_.default) was not waited for", "it was not done")


def test_another_result_of_what_was_waited_for_is_no_race():
    def body(build: Builder) -> int:
        x = build.op("c10d.allreduce_.default", build.leaf("x", kind="input"), flags=PENDING)
        return build.op("mul", x, change="*")

    assert cause(run(reduced(early=False)), run(body)).slug != "race"
