"""What a diagnosis makes of the marks that integrations write."""

from __future__ import annotations

import numpy as np
import pytest

from opdrift import diff
from opdrift.records import Diagnosis
from opdrift.testing import Builder

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((4, 4)).astype("<f4")
TABLE = (10_000.0 ** -(np.arange(4) / 4)).astype("<f4")


def cast_mark(build: Builder, **changes: object) -> None:
    fields = {
        "what": "shard",
        "parameters": [["fc.weight", 0, [4, 4]]],
        "tied": [["tied.weight", "fc.weight"]],
        "source_dtype": "float32",
        "destination_dtype": "float16",
        "intact": True,
    }
    build.mark("cast", library="fairscale", **{**fields, **changes})


def computed_in(dtype: str, *, mark: dict[str, object] | None = None) -> Builder:
    """A run that multiplies by a weight of one dtype."""
    build = Builder()
    x = build.leaf("x", kind="input", shape=(4, 4))
    if mark is not None:
        cast_mark(build, **mark)
    numpy_type = {"float32": "<f4", "float16": "<f2"}[dtype]
    weight = build.leaf("fc.weight", when="gather", dtype=dtype, content=WEIGHT.astype(numpy_type))
    with build.scope("fc"):
        product = (build.content(x) @ WEIGHT).astype(numpy_type)
        y = build.op("mm", x, weight, dtype=dtype, content=product)
    build.output(y)
    return build


def of_weights(mark: dict[str, object] | None) -> Diagnosis:
    return diff(computed_in("float32").build(), computed_in("float16", mark=mark).build())


def test_weights_cast_to_compute_with_are_rounding():
    """Mixed precision keeps the originals; that it rounds is what was asked for."""
    found = of_weights({})

    (leaf,) = [origin for origin in found.origins if origin.kind == "leaf"]
    assert (leaf.name, leaf.material, leaf.explained) == ("fc.weight", False, 2.0**-11)
    assert leaf.cause.slug == "rounding"
    assert "mixed precision keeps the original" in leaf.cause.summary


@pytest.mark.parametrize(
    "mark",
    [
        None,
        {"intact": False},
        {"what": "input"},
        {"destination_dtype": "bfloat16"},
        {"parameters": [["other.weight", 0, [4, 4]]], "tied": []},
    ],
    ids=["no mark", "a bad cast", "a cast of inputs", "another dtype", "another weight"],
)
def test_other_casts_of_weights_are_not_explained(mark):
    leaf = of_weights(mark).origins[0]

    bad = (
        mark is not None and mark.get("intact") is False
    )  # then the integration says what is wrong
    slug = "fsdp-gather" if bad else "dtype"
    assert (leaf.name, leaf.material, leaf.cause.slug) == ("fc.weight", True, slug)


def rotary(*, cast: bool) -> Builder:
    """A run that reads a table of frequencies; a library may have cast it before."""
    build = Builder()
    x = build.leaf("x", kind="input", shape=(4,))
    table = build.leaf("rot_emb.inv_freq", kind="buffer", content=TABLE)
    if cast:
        table = build.op("_to_copy", table, dtype="float16", content=TABLE.astype("<f2"))
        build.name(table, "rot_emb.inv_freq", kind="buffer", when="gather")
        build.mark(
            "buffer-cast",
            library="fairscale",
            name="rot_emb.inv_freq",
            source_dtype="float32",
            destination_dtype="float16",
            lossless=False,
        )
    with build.scope("rot_emb"):
        angle = build.op(
            "mul", x, table, dtype="float32", content=build.content(x) * build.content(table)
        )
        y = build.op("sin", angle, content=np.sin(build.content(angle)))
    build.output(y)
    return build


def test_a_buffer_that_a_library_cast_for_good_is_named():
    found = diff(rotary(cast=False).build(), rotary(cast=True).build())

    assert found.verdict == "diverged"
    assert found.first is not None
    assert (found.first.kind, found.first.name) == ("leaf", "rot_emb.inv_freq")
    assert found.first.cause.slug == "dtype"
    assert any(
        "fairscale cast rot_emb.inv_freq from float32 to float16 for good" in line
        for line in found.first.cause.evidence
    )


def test_both_runs_cast_it_alike_and_are_identical():
    assert diff(rotary(cast=True).build(), rotary(cast=True).build()).verdict == "identical"


def initialised(seed: int) -> Builder:
    """A run that draws an embedding, zeroes its padding row as torch does, and copies it."""
    build = Builder()
    drawn = build.op("empty", shape=(4, 4))
    drawn = build.op("normal_", drawn, rng=seed, content=RNG.standard_normal((4, 4)).astype("<f4"))
    row = build.op("select", drawn, shape=(4,), settings={"dim": 0, "index": 1})
    build.op("fill_", row, settings={"value": 0}, content=np.zeros(4, "<f4"))
    weight = build.again(drawn)
    flat = build.op("cat", weight, content=RNG.standard_normal((4, 4)).astype("<f4"))
    build.name(flat, "embed.weight", when="gather")
    build.output(build.op("mul", flat, flat))
    return build


def test_a_part_that_was_written_alike_does_not_hide_where_the_rest_came_from():
    """The padding row is zero in both runs; what differs was drawn before, which the weight stands for."""
    found = diff(initialised(1).build(), initialised(2).build())

    assert [(origin.kind, origin.cause.slug) for origin in found.origins] == [("leaf", "weights")]


def dropped(build: Builder) -> None:
    build.mark(
        "checkpoint-dropped",
        library="esm",
        summary="a state dict of 62 tensors was never loaded",
        **{"try": "load the third return value"},
    )


def test_a_dropped_checkpoint_is_the_remedy_and_said_once():
    left, right = initialised(1), initialised(2)
    dropped(left)
    dropped(right)

    found = diff(left.build(), right.build())

    assert found.first is not None
    assert found.first.cause.try_ == "load the third return value"
    said = [line for line in found.first.cause.evidence if "never loaded" in line]
    assert said == ["both: a state dict of 62 tensors was never loaded"]
