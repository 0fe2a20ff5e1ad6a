"""Which tensors of a checkpoint reached the model of a trace, and which of the model's came from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from opdrift import CheckpointError, diff, tfp1
from opdrift.checkpoints import StoredCheckpoint, StoredTensor, check, compared, sentence
from opdrift.checkpoints.names import Renaming, match
from opdrift.checkpoints.roundings import Rounding
from opdrift.findings import findings
from opdrift.records import Sides
from opdrift.render.checkpoint_text import checkpoint_report
from opdrift.render.page import Screen
from opdrift.testing import Builder
from opdrift.testing.contents import rounded
from opdrift.tracefile.reader import Trace

Array = np.ndarray
RNG = np.random.default_rng(0)


def noise(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype("<f4")


def key(content: Array) -> tuple[int, int, int]:
    code = {"<f4": tfp1.Code.F32, "<f2": tfp1.Code.F16}[content.dtype.str]
    bits = content.reshape(-1).view(f"<u{content.itemsize}").tolist()
    return tfp1.raw_of(bits, content.itemsize), content.size, int(code)


def stored(contents: Mapping[str, Array]) -> StoredCheckpoint:
    """A checkpoint of float32 tensors, of which the float16 casts are known, too."""
    tensors = [
        StoredTensor(
            name, "float32", each.shape, {"float32": key(each), "float16": key(each.astype("<f2"))}
        )
        for name, each in contents.items()
    ]
    return StoredCheckpoint("file.pt", tuple(tensors))


def sampled(contents: Mapping[str, Array]) -> StoredCheckpoint:
    """The same, with the samples that a reader gives."""
    tensors = [
        replace(
            tensor,
            sample=tuple(
                contents[tensor.name].reshape(-1)[list(tfp1.sample_positions(tensor.size))].tolist()
            ),
        )
        for tensor in stored(contents).tensors
    ]
    return StoredCheckpoint("file.pt", tuple(tensors))


def traced(contents: Mapping[str, Array]) -> Builder:
    """A run whose model has these parameters, and uses each."""
    build = Builder()
    for name, each in contents.items():
        dtype = {"<f4": "float32", "<f2": "float16"}[each.dtype.str]
        weight = build.leaf(name, dtype=dtype, content=each)
        build.output(build.op("relu", weight, dtype=dtype, content=np.maximum(each, 0)), name)
    return build


WEIGHTS = {
    "layers.0.fc.weight": noise(4, 4),
    "layers.0.fc.bias": noise(4),
    "layers.1.fc.weight": noise(4, 4),
    "layers.1.fc.bias": noise(4),
    "norm.weight": np.ones(4, "<f4"),
}


def missing(trace: Trace, contents: Mapping[str, Array]) -> list[tuple[str, str | None]]:
    return [(each.name, each.origin) for each in check(trace, stored(contents)).missing]


# ---- contents ----------------------------------------------------------------------------------------


def test_a_model_that_was_loaded_holds_all_of_the_checkpoint():
    found = check(traced(WEIGHTS).build(), stored(WEIGHTS))

    assert found.arrived == {name: name for name in WEIGHTS}
    assert found.whole
    assert sentence(found) == "5 of 5 tensors of file.pt are in the model"


def test_a_cast_on_the_way_is_recognised_by_its_own_digest():
    half = {name: each.astype("<f2") for name, each in WEIGHTS.items()}

    found = check(traced(half).build(), stored(WEIGHTS))

    assert (found.whole, found.casts) == (True, {"float16": 5})
    assert "5 of them cast to float16" in sentence(found)


def saved_as(dtype: str, contents: Mapping[str, Array]) -> StoredCheckpoint:
    """A checkpoint in a half precision, as its reader tells it to a float32 model: with the cast to that."""
    tensors = []
    for name, each in contents.items():
        held = rounded(each, dtype).astype("<f4")
        sample = held.reshape(-1)[list(tfp1.sample_positions(each.size))]
        keys = {"float32": key(held)}
        tensors.append(StoredTensor(name, dtype, each.shape, keys, tuple(sample.tolist())))
    return StoredCheckpoint("file.pt", tuple(tensors))


BIG = {"fc.weight": noise(40, 40), "fc.bias": noise(40)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_file_that_was_saved_in_half_precision_is_a_cast_of_the_model(dtype):
    """The model was trained in float32; what it holds is in no file, but rounds to the file's numbers."""
    found = check(traced(BIG).build(), saved_as(dtype, BIG))

    assert found.rounded == dict.fromkeys(BIG, Rounding("file", dtype))
    assert found.whole
    assert sentence(found) == (
        f"2 of 2 tensors of file.pt are in the model, 2 of them cast to {dtype} for the file (judged by 32 elements of"
        " each)"
    )


def test_a_model_that_holds_rounded_numbers_in_full_precision_has_the_file_s():
    """Loaded from the bfloat16 release, and asked about the float32 one."""
    model = {name: rounded(each, "bfloat16") for name, each in BIG.items()}

    found = check(traced(model).build(), sampled(BIG))

    assert found.rounded == dict.fromkeys(BIG, Rounding("model", "bfloat16"))
    assert "cast to bfloat16 before they came into the model" in sentence(found)


def test_weights_of_another_training_step_are_no_cast_of_the_file():
    later = {**BIG, "fc.weight": (BIG["fc.weight"] * 1.01).astype("<f4")}

    found = check(traced(later).build(), saved_as("bfloat16", BIG))

    assert [each.name for each in found.missing] == ["fc.weight"]


def test_a_difference_outside_of_the_sample_is_no_rounding():
    """All that was sampled is equal, so rounding is not what differs."""
    file = {name: rounded(each, "bfloat16") for name, each in BIG.items()}
    model = {name: each.copy() for name, each in file.items()}
    model["fc.weight"].reshape(-1)[tfp1.sample_positions(1600)[3] + 1] += 1

    found = check(traced(model).build(), saved_as("bfloat16", file))

    assert "fc.weight" in [each.name for each in found.missing]


def test_a_sample_of_zeros_alone_is_no_evidence():
    """A padded embedding: nearly all of it is zero in any model."""
    sparse = {"embed.weight": np.zeros((40, 40), "<f4"), "fc.bias": BIG["fc.bias"]}
    sparse["embed.weight"][0, 0] = 1 / 3  # the sample begins later
    file = {**sparse, "embed.weight": np.full((40, 40), 1e-30, "<f4")}

    found = check(traced(sparse).build(), saved_as("float16", file))

    assert [each.name for each in found.missing] == ["embed.weight"]


def test_one_changed_element_is_another_content():
    changed = WEIGHTS["layers.1.fc.weight"].copy()
    changed[2, 3] = np.nextafter(changed[2, 3], np.float32(9))

    trace = traced({**WEIGHTS, "layers.1.fc.weight": changed}).build()

    assert missing(trace, WEIGHTS) == [("layers.1.fc.weight", None)]


def test_what_a_missing_weight_was_made_of_instead_is_said():
    build = Builder()
    drawn = build.op("empty", shape=(4, 4))
    drawn = build.op("uniform_", drawn, rng=1, content=noise(4, 4))
    build.name(drawn, "layers.0.fc.weight", when="use")
    build.leaf("layers.0.fc.bias", content=WEIGHTS["layers.0.fc.bias"])
    build.leaf("norm.weight", content=np.ones(4, "<f4"))
    build.output(build.op("relu", drawn))
    wanted = {
        **{name: WEIGHTS[name] for name in ("layers.0.fc.weight", "layers.0.fc.bias")},
        "norm.weight": noise(4),
    }

    assert missing(build.build(), wanted) == [
        ("layers.0.fc.weight", "drawn at random by aten.uniform_"),
        ("norm.weight", "all one number"),
    ]


def test_a_content_that_came_past_the_dispatcher_is_known_by_itself():
    """Offloaded weights come back from files: who drew them is told by the values."""
    build, drawn = Builder(), noise(4, 4)
    made = build.op("empty", shape=(4, 4))
    build.op("normal_", made, rng=1, content=drawn)
    weight = build.leaf("layers.0.fc.weight", when="gather", content=drawn)
    build.leaf("layers.0.fc.bias", content=WEIGHTS["layers.0.fc.bias"])
    build.output(build.op("relu", weight))
    wanted = {name: WEIGHTS[name] for name in ("layers.0.fc.weight", "layers.0.fc.bias")}

    assert missing(build.build(), wanted) == [
        ("layers.0.fc.weight", "drawn at random by aten.normal_")
    ]


def test_a_content_that_came_after_the_first_look_counts():
    """A model that is given to record() and loaded inside it was first seen with its random start."""
    build = Builder()
    weight = build.leaf("fc.weight", content=noise(4, 4))
    weight = build.op(
        "copy_", weight, build.leaf("", kind="constant"), content=WEIGHTS["layers.0.fc.weight"]
    )
    build.output(build.op("relu", weight))

    assert check(build.build(), stored({"fc.weight": WEIGHTS["layers.0.fc.weight"]})).whole


def test_two_tensors_under_each_other_s_name_are_exchanged():
    one, two = WEIGHTS["layers.0.fc.weight"], WEIGHTS["layers.1.fc.weight"]
    swapped = {**WEIGHTS, "layers.0.fc.weight": two, "layers.1.fc.weight": one}

    found = check(traced(swapped).build(), stored(WEIGHTS))

    assert found.exchanged == {
        "layers.0.fc.weight": "layers.1.fc.weight",
        "layers.1.fc.weight": "layers.0.fc.weight",
    }
    assert (found.missing, found.whole) == ((), False)


def test_equal_constants_are_no_exchange():
    """Ones are everywhere; that another tensor holds them tells nothing."""
    model = {"a.weight": np.ones(4, "<f4"), "b.weight": np.zeros(4, "<f4"), "c.weight": noise(4)}
    found = check(traced(model).build(), stored({**model, "b.weight": np.ones(4, "<f4")}))

    assert found.exchanged == {}
    assert [each.name for each in found.missing] == ["b.weight"]


def test_parameters_that_the_file_lacks_are_listed_but_not_tables_that_no_state_dict_holds():
    build = traced({**WEIGHTS, "head.weight": noise(2, 4)})
    build.leaf("rotary.inv_freq", kind="buffer", content=noise(3))
    build.mark("model", name="", non_persistent=["rotary.inv_freq"])

    found = check(build.build(), stored(WEIGHTS))

    assert (found.extra, found.missing, found.whole) == (("head.weight",), (), False)


def test_a_second_name_of_a_tied_weight_is_not_missed_in_the_file():
    build = traced(WEIGHTS)
    tied = build.leaf("embed.weight", content=noise(6, 4))
    build.name(tied, "lm_head.weight")
    embed = build.content(tied)

    assert check(build.build(), stored({**WEIGHTS, "embed.weight": embed})).extra == ()


@pytest.mark.parametrize("fused_in", ["model", "file"])
def test_fused_projections_are_their_parts_laid_end_to_end(fused_in):
    parts = {f"attn.{name}.weight": noise(4, 4) for name in ("q", "k", "v")}
    whole = {
        "attn.qkv.weight": np.concatenate([parts[f"attn.{n}.weight"] for n in ("q", "k", "v")])
    }
    model, file = (whole, parts) if fused_in == "model" else (parts, whole)

    found = check(traced({**WEIGHTS, **model}).build(), stored({**WEIGHTS, **file}))

    assert found.fused == {"attn.qkv.weight": tuple(parts)}
    assert found.whole


def test_parts_in_another_order_are_told_in_that_order():
    parts = {f"attn.{name}.weight": noise(4, 4) for name in ("q", "k", "v")}
    order = tuple(f"attn.{n}.weight" for n in ("k", "v", "q"))
    whole = {"attn.qkv.weight": np.concatenate([parts[name] for name in order])}

    found = check(traced({**WEIGHTS, **whole}).build(), stored({**WEIGHTS, **parts}))

    assert found.fused == {"attn.qkv.weight": order}


def test_a_cast_that_nobody_worked_out_cannot_be_judged():
    """From a mark only the digest of the stored precision is known."""
    half = {name: each.astype("<f2") for name, each in WEIGHTS.items()}
    only_full = [
        StoredTensor(t.name, t.dtype, t.shape, {"float32": t.keys["float32"]})
        for t in stored(WEIGHTS).tensors
    ]

    found = check(traced(half).build(), StoredCheckpoint("mark", tuple(only_full)))

    assert (len(found.unknown), found.missing) == (5, ())
    assert "5 cannot be judged" in sentence(found)


def test_a_draw_that_was_cast_is_no_loaded_weight():
    """Mixed precision hides what the digest would say, but not who made the content."""
    build = traced({"layers.0.fc.bias": WEIGHTS["layers.0.fc.bias"].astype("<f2")})
    made = build.op("empty", shape=(4, 4))
    made = build.op("uniform_", made, rng=1, content=noise(4, 4))
    half = build.op("_to_copy", made, dtype="float16", content=build.content(made).astype("<f2"))
    build.name(half, "layers.0.fc.weight", when="gather")
    build.output(build.op("relu", half))
    names = ("layers.0.fc.weight", "layers.0.fc.bias")
    tensors = [
        StoredTensor(name, "float32", WEIGHTS[name].shape, {"float32": key(WEIGHTS[name])})
        for name in names
    ]

    found = check(build.build(), StoredCheckpoint("mark", tuple(tensors)))

    assert [(each.name, each.origin) for each in found.missing] == [
        ("layers.0.fc.weight", "drawn at random by aten.uniform_")
    ]
    assert found.unknown == ("layers.0.fc.bias",)


# ---- names -------------------------------------------------------------------------------------------


def sizes(*names: str) -> dict[str, int]:
    return dict.fromkeys(names, 4)


@pytest.mark.parametrize(
    ("stored_names", "own_names", "renamings"),
    [
        (["a.w", "b.w"], ["a.w", "b.w"], []),
        (["module.a.w", "module.b.w"], ["a.w", "b.w"], [Renaming("module", "", 2)]),
        (["a.w", "b.w"], ["policy.a.w", "policy.b.w"], [Renaming("", "policy", 2)]),
        (["blocks.0.w", "blocks.1.w"], ["layers.0.w", "layers.1.w"], [Renaming("blocks", "layers", 2)]),
        (
            ["encoder.s.a.w", "encoder.s.b.w", "encoder.head.c"],
            ["a.w", "b.w", "head.c"],
            [Renaming("encoder.s", "", 2), Renaming("encoder", "", 1)],
        ),
    ],
)  # fmt: skip
def test_names_with_other_words_in_front_are_paired(stored_names, own_names, renamings):
    pairs, found = match(sizes(*stored_names), sizes(*own_names))

    assert pairs == dict(zip(stored_names, own_names, strict=True))
    assert found == renamings


def test_two_names_that_only_end_alike_are_not_paired():
    """One name alone is no renaming: a head and an embedding are both called weight."""
    pairs, found = match(sizes("head.weight"), sizes("embed.weight"))

    assert (pairs, found) == ({}, [])


def test_names_of_tensors_of_another_size_are_not_paired():
    assert match({"a.w": 4}, {"a.w": 5}) == ({}, [])


# ---- other models ------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_architecture_is_one_sentence():
    other = {"conv1.weight": noise(2, 3), "bn1.bias": noise(3)}

    with pytest.raises(CheckpointError) as raised:
        check(traced(WEIGHTS).build("a.trace"), stored(other))

    assert str(raised.value) == (
        "file.pt is a checkpoint of another architecture than the model of a.trace: by name and size none of its 2"
        " tensors fits one of the model's 5; the checkpoint has conv1.weight [2, 3], the trace layers.0.fc.weight"
        " [4, 4]."
    )


def test_a_name_and_size_that_two_architectures_share_do_not_make_them_one():
    """A norm of the same width is everywhere."""
    other = {
        "norm.weight": noise(4),
        **{f"convs.{number}.weight": noise(2, 3) for number in range(4)},
    }

    with pytest.raises(CheckpointError, match="1 of its 5 tensors fits one of the model's 5"):
        check(traced(WEIGHTS).build(), stored(other))


def test_a_content_that_is_there_outweighs_names_that_are_not():
    """An embedding was taken from another model: that is no other architecture, but a part of one."""
    other = {
        "embed.weight": WEIGHTS["layers.0.fc.weight"],
        **{f"convs.{number}.weight": noise(2, 3) for number in range(4)},
    }

    found = check(traced(WEIGHTS).build(), stored(other))

    assert found.arrived == {"embed.weight": "layers.0.fc.weight"}


def test_a_head_of_its_own_does_not_make_another_architecture():
    """The file holds the body alone, and the model was never loaded from it."""
    body = {name: noise(*each.shape) for name, each in WEIGHTS.items()}
    heads = {f"heads.{number}.weight": noise(2, 4) for number in range(9)}

    assert len(check(traced({**WEIGHTS, **heads}).build(), stored(body)).missing) == 5


def test_a_larger_one_of_the_same_family_is_named_by_a_size():
    larger = {name: noise(*(2 * n for n in each.shape)) for name, each in WEIGHTS.items()}
    larger["norm.weight"] = WEIGHTS["norm.weight"]

    with pytest.raises(
        CheckpointError, match=r"layers.0.fc.weight is \[8, 8\] in the checkpoint, \[4, 4\]"
    ):
        check(traced(WEIGHTS).build(), stored(larger))


def test_one_tensor_of_another_size_is_missing_and_says_so():
    file = {**WEIGHTS, "norm.weight": noise(8)}

    assert missing(traced(WEIGHTS).build(), file) == [
        ("norm.weight", "of shape [4], in the checkpoint [8]")
    ]


def test_a_trace_without_names_says_how_to_get_them():
    build = Builder()
    build.output(build.op("relu", build.leaf("x", kind="input")))

    with pytest.raises(CheckpointError, match="record with model="):
        check(build.build(), stored(WEIGHTS))


# ---- said --------------------------------------------------------------------------------------------


def dropped(build: Builder, contents: Mapping[str, Array]) -> Builder:
    """The mark that an integration writes where a checkpoint was read."""
    rows = []
    for name, each in contents.items():
        raw, n, code = key(each)
        rows.append(
            [name, "float32", list(each.shape), {"raw": f"{raw:016x}", "n": n, "code": code}]
        )
    build.mark("checkpoint", library="esm", source="load_it", tensors=rows)
    return build


def test_a_checkpoint_that_was_read_and_not_loaded_is_a_finding_of_the_run_alone():
    random = {name: noise(*each.shape) for name, each in WEIGHTS.items()}
    build = dropped(traced(random), WEIGHTS)
    build.mark(
        "checkpoint-dropped",
        library="esm",
        source="load_it",
        summary="never loaded",
        **{"try": "load it"},
    )

    (found,) = findings([build.build()])

    assert (found.kind, found.name, found.cause.slug) == (
        "checkpoint",
        "layers.0.fc.weight",
        "weights",
    )
    assert found.cause.summary.startswith(
        "5 of 5 tensors of what load_it read never reached the model"
    )
    assert (found.cause.evidence[0], found.cause.try_) == ("never loaded", "load it")


def test_a_checkpoint_that_was_read_and_loaded_is_no_finding():
    assert findings([dropped(traced(WEIGHTS), WEIGHTS).build()]) == ()


def test_a_checkpoint_that_was_read_for_another_model_is_no_finding():
    assert findings([dropped(traced(WEIGHTS), {"conv.weight": noise(2, 3)}).build()]) == ()


def test_a_comparison_says_it_of_both_sides():
    """As evidence where weights differ, else as a note."""
    left = traced(WEIGHTS).build("left")
    right = traced({**WEIGHTS, "norm.weight": noise(4)}).build("right")

    told = compared(diff(left, right), Sides(left, right), stored(WEIGHTS))
    same = compared(diff(left, left), Sides(left, left), stored(WEIGHTS))

    assert told.first is not None
    assert told.first.cause.slug == "weights"
    assert "left: 5 of 5 tensors of file.pt are in the model" in told.first.cause.evidence
    assert (
        "right: 1 of 5 tensors of file.pt never reached the model: norm.weight"
        in told.first.cause.evidence
    )
    assert told.notes == diff(left, right).notes
    assert "right: 5 of 5 tensors of file.pt are in the model" in same.notes


def test_the_report_names_what_is_missing_and_what_is_not_of_the_file():
    trace = traced({**WEIGHTS, "norm.weight": noise(4), "head.weight": noise(2, 4)}).build()
    file = {f"module.{name}": each for name, each in WEIGHTS.items()}

    page = checkpoint_report(check(trace, stored(file)), Screen(80))

    assert page == (
        "1 of 5 tensors of file.pt never reached the model: norm.weight\n"
        "1 of the model's 6 tensors is not in it\n"
        "\n"
        "  names      module. is left out of 5 names\n"
        "  missing    norm.weight: the model holds something else\n"
        "  not in it  head.weight\n"
    )


# ---- parts of a tensor ---------------------------------------------------------------------------------


def half_loaded(loaded: int, *, rank: int = 0, gathered: bool = True) -> tuple[Trace, Array]:
    """A parameter that two ranks share out, of which one rank's half holds what the checkpoint holds."""
    whole = noise(8, 8)
    held = noise(8, 8)
    held[4 * loaded : 4 * loaded + 4] = whole[4 * loaded : 4 * loaded + 4]
    build = Builder(rank=rank, world_size=2)
    if gathered:
        build.mark("gather", library="torch_fsdp", unit="fc", nth=1, ranks=[0, 1], rank=rank, layout="each", buffer="fc",
                   parameters=[["fc.weight", 0, [8, 8]]], own=[[0, 32 * rank, 32, "0"]], intact=True)  # fmt: skip
    build.leaf("fc.weight", content=held)
    return build.build(), whole


@pytest.mark.parametrize(
    ("loaded", "rank", "said"),
    [
        (0, 0, "rank 0's part is the checkpoint's, that of the other ranks is not"),
        (1, 0, "the other ranks' part is the checkpoint's, that of rank 0 is not"),
        (1, 1, "rank 1's part is the checkpoint's, that of the other ranks is not"),
    ],
)
def test_of_a_parameter_that_ranks_share_out_the_part_that_was_loaded_is_told(
    loaded: int, rank: int, said: str
):
    """The whole never held the checkpoint's content, and that alone would look as if nobody had loaded it."""
    trace, whole = half_loaded(loaded, rank=rank)

    found = check(trace, sampled({"fc.weight": whole}))

    (missing,) = found.missing
    assert missing.part == f"{said} (judged by 16 and 16 elements)"
    report = checkpoint_report(found, Screen(width=200))
    assert f"of 1 of them a part reached it: of fc.weight, {said}" in report


def test_of_a_parameter_that_nothing_shares_out_the_equal_elements_are_counted():
    trace, whole = half_loaded(0, gathered=False)

    (missing,) = check(trace, sampled({"fc.weight": whole})).missing

    assert missing.part == "16 of 32 elements that are known of it are the checkpoint's"


def test_elements_that_are_equal_by_accident_are_no_part():
    """Zeros, as in a mask or a padding row, are equal to zeros."""
    held, whole = noise(8, 8), noise(8, 8)
    held[:4] = whole[:4] = 0
    build = Builder()
    build.leaf("fc.weight", content=held)

    (missing,) = check(build.build(), sampled({"fc.weight": whole})).missing

    assert missing.part is None
