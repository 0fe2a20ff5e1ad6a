"""Ops in two columns, modules as a tree, and one trace on its own: from traces built by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from rich.cells import cell_len

import opdrift
from opdrift.findings import findings
from opdrift.records import (
    Alignment,
    Cause,
    Diagnosis,
    Divergence,
    Sides,
    TraceSummary,
)
from opdrift.render import finding_text, kernels, leaf_text, trace_json, trace_text, tree, views
from opdrift.render.page import Screen
from opdrift.render.rows import rows_of
from opdrift.testing import Builder, trace

WIDE = Screen(width=100, unicode=True)


def origin(left, right):
    return Divergence(
        kind="op", name=None, op=None, module="", call=0, phase=None, source=None, seq=Sides(left, right), output=0,
        inputs_match=True, material=True, relative_difference=None, explained=None, conditioning=None,
        max_abs_difference=None, ulp=None, nonfinite=Sides(None, None), kernel=Sides(None, None), arguments=(),
        final_relative_difference=None, cause=Cause("op-args", "certain", "", (), ""),
    )  # fmt: skip


def answer(*origins):
    """A diagnosis with origins at these (left, right) ops; the first one is the one to look at."""
    found = tuple(origin(*seqs) for seqs in origins)
    side = TraceSummary("a.trace", "", "", "", "", "", 0, True, None, None)
    first = found[0] if found else None
    return Diagnosis(
        "diverged" if found else "identical", side, side, first, first, found, (), (), (), Sides((), ()),
        Alignment(0, 0, 0, "", None),
    )  # fmt: skip


def rows(left, right, *origins):
    return rows_of(left, right, answer(*origins))


def marks(left, right, *origins):
    return "".join(rows(left, right, *origins).marks())


def model(*, change="", cast=False, adapter=False):
    """Two blocks and a head; the second block's norm is where it begins."""
    build = Builder()
    x = build.op(
        "embedding",
        build.leaf("embed.weight", shape=(30, 8)),
        build.leaf("ids", kind="input", dtype="int64"),
    )
    for layer in range(2):
        with build.scope(f"layers.{layer}", type="Block"):
            with build.scope("norm", type="LayerNorm"):
                x = build.op("native_layer_norm", x, change=change if layer == 1 else "")
            with build.scope("fc", type="Linear"):
                x = build.op("addmm", build.op("t", build.leaf(f"layers.{layer}.fc.weight")), x)
            if cast and layer == 1:
                x = build.op("_to_copy", x)
            if adapter and layer == 1:
                with build.scope("adapter"):
                    x = build.op("mul.Tensor", x, x)
    with build.scope("head", type="Linear"):
        x = build.op("addmm", build.leaf("head.weight"), x)
    build.output(x)
    return build.build()


# ---- marks ---------------------------------------------------------------------------------------------


def test_equal_ops_are_marked_equal():
    """A trace against itself."""
    assert marks(trace("mm relu mm"), trace("mm relu mm")) == "==="


def test_what_follows_an_origin_is_inherited():
    """x where it begins, ~ below."""
    assert marks(trace("mm relu mm"), trace("mm relu* mm"), (2, 2)) == "=x~"


def test_ops_of_one_run_stand_where_they_ran():
    """An op only the right run has comes before the one that follows it there."""
    found = rows(trace("mm relu mm"), trace("mm _to_copy relu mm*"), (3, 4))
    assert "".join(found.marks()) == "=+=x"
    assert [(found[i].left, found[i].right) for i in range(4)] == [
        (0, 0),
        (None, 1),
        (1, 2),
        (2, 3),
    ]
    assert found.focus == 3


def test_ops_of_one_run_at_the_end():
    """Nothing follows them; they are last."""
    assert marks(trace("mm relu"), trace("mm")) == "=-"
    assert marks(trace("mm"), trace("mm relu")) == "=+"


def test_empty_traces_have_no_rows():
    """Nothing was recorded on either side."""
    nothing = Builder().build()
    assert len(rows(nothing, nothing)) == 0
    assert "the run" in tree.tree(rows(nothing, nothing), WIDE)


def test_an_origin_that_only_the_right_run_has_is_found():
    """The first divergence may have no left op."""
    found = rows(trace("mm relu"), trace("mm sin relu"), (None, 2))
    assert found[found.focus or 0].right == 1


# ---- views ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "width"),
    [
        *((name, width) for name in ("around", "side_by_side", "tree") for width in (40, 100)),
        ("side_by_side", 60),
        ("side_by_side", 80),
    ],
)
def test_views_read_as_they_were_accepted(name, width, golden):
    """Wide and narrow, from one pair of models that differ in a norm, a cast and an adapter."""
    found = rows(model(), model(change="*", cast=True, adapter=True), (5, 5))
    screen = Screen(width=width, unicode=width > 40)
    shown = {
        "around": lambda: views.around(found, 4, screen),
        "side_by_side": lambda: views.side_by_side(found, 4, screen),
        "tree": lambda: tree.tree(found, screen),
    }[name]()
    golden(f"views/{name}-{width}.txt", shown)
    assert max(map(cell_len, shown.splitlines())) <= width


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_both_runs_stay_readable_side_by_side(width):
    """The ops of either run, their numbers and the size of the difference are there at any width."""
    found = rows(model(), model(change="*", cast=True, adapter=True), (5, 5))

    shown = views.side_by_side(found, 4, Screen(width=width, unicode=True)).splitlines()

    heads = shown[2].split()
    assert {"left", "right", "op", "differs"} <= set(heads)
    assert any(line.split()[-1:] == ["0.1"] and "x" in line.split() for line in shown)
    assert [line.split()[1] for line in shown if "_to_copy" in line] == (
        ["8"] if width < 100 else ["+"]
    )


def test_an_op_of_other_shapes_takes_two_lines_where_it_is_narrow():
    """One line a run, the right one below."""

    def one(shape: tuple[int, ...]):
        build = Builder()
        weight = build.leaf("w", shape=(4, 4))
        build.output(
            build.op("mm", weight, build.leaf("x", kind="input", shape=shape), shape=shape)
        )
        return build.build()

    shown = views.side_by_side(rows(one((4, 8)), one((4, 9)), (1, 1)), 4, Screen(width=60))

    assert [line.split() for line in shown.splitlines() if "mm" in line] == [
        ["x", "1", "aten.mm", "float32[4,", "8]"],
        ["1", "aten.mm", "float32[4,", "9]"],
    ]


def test_context_counts_ops_on_each_side():
    """N before, N after, and the divergence itself."""
    found = rows(trace("mm relu mm relu mm relu mm"), trace("mm relu mm relu* mm relu mm"), (4, 4))
    lines = views.around(found, 2, WIDE).splitlines()
    assert [line[:1] for line in lines[3:-1]] == ["=", "=", "x", "~", "~"]


def test_a_weight_that_differs_is_named_where_it_is_read():
    """The op begins no difference of its own; whoever reads the view alone should not take it for the culprit."""
    left, right = trace("mm relu mm"), trace("mm relu mm!")
    page = views.around(rows_of(left, right, opdrift.diff(left, right)), 1, WIDE)

    assert "ops around the first that reads w1, which differs" in page
    assert "first divergence" not in page


def test_without_a_divergence_the_first_ops_are_shown():
    """Identical runs have no place to look at."""
    found = rows(trace("mm relu mm"), trace("mm relu mm"))
    assert "the first 3 ops" in views.side_by_side(found, 5, WIDE)


def test_equal_modules_are_folded_and_the_way_to_the_origin_is_open():
    """One line for what is equal; the op that begins it all is named and sized."""
    lines = tree.tree(rows(model(), model(change="*"), (5, 5)), WIDE).splitlines()
    assert "│ ├ = 0  3 ops" in lines
    assert "│   │ └ x op 5 aten.native_layer_norm.default, differs by 0.1   <- first" in lines


# ---- one trace -----------------------------------------------------------------------------------------


def single():
    """A run with a NaN, an in-place write and a random parameter."""
    build = Builder(label="one run")
    weight = build.op("uniform_", build.op("empty", shape=(4, 8)), source=("model.py", 3, "init"))
    build.name(weight, "fc.weight")
    x = build.leaf("x", kind="input")
    build.mark("step", step=0)
    with build.scope("fc", type="Linear"):
        x = build.op("mm", x, weight, source=("model.py", 7, "forward"))
    x = build.op("div.Tensor", x, x, content=np.full((4, 8), math.nan, np.float32))
    x = build.op("native_layer_norm", x, settings={"eps": 1e-5, "normalized_shape": [8]})
    build.output(x)
    return build.build("single.trace")


def attending():
    """Three layers of attention, the last on the math path, and a head in half precision."""
    build = Builder(
        label="attention",
        flags={"mkldnn.enabled": True, "cpu_capability": "AVX512", "sdp.flash": True},
        versions={"mkl": "2024.2"},
    )
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    x = build.leaf("x", kind="input", shape=(2, 4, 6, 8))
    weight = build.leaf("weight", shape=(8, 8))
    for layer in range(3):
        with build.scope(f"layers.{layer}.attention", type="MultiheadAttention"):
            flat = build.op("view", x, shape=(48, 8))
            flat = build.op("mm", flat, weight, shape=(48, 8))
            x = build.op("view", flat, shape=(2, 4, 6, 8))
            build.mark("fast-path", MultiheadAttention="training is enabled")
            x = build.op(flash if layer < 2 else "_safe_softmax", x, x, x)
    with build.scope("head", type="Linear"):
        half = build.op("_to_copy", flat, dtype="bfloat16", shape=(48, 8))
        build.op("mm", half, build.op("_to_copy", weight, dtype="bfloat16"), shape=(48, 8))
        build.op("mm", half, build.leaf("wide", shape=(8, 32), dtype="bfloat16"), shape=(48, 32))
    return build.build("attention.trace")


@pytest.mark.parametrize("width", [40, 100])
def test_kernels_are_listed_by_module_as_accepted(width, golden):
    """Modules that differ by a number stand together; each implementation has its count and its reasons."""
    run = attending()
    shown = kernels.kernel_report(run, range(len(run.ops)), Screen(width=width, unicode=width > 40))
    golden(f"show/kernels-by-module-{width}.txt", shown)
    assert max(map(cell_len, shown.splitlines())) <= width


def test_kernel_groups_count_what_the_ops_say():
    """The document's `kernels` and the field `kernel` of each op hold the same number of picks."""
    run = attending()
    every = range(len(run.ops))
    document = json.loads("".join(trace_json.render(run, every, (), (), marks=(), kernels=True)))
    groups = document["kernels"]
    assert sum(g["count"] for g in groups) == sum(
        op["kernel"] is not None for op in document["ops"]
    )
    assert [(g["module"], g["modules"], g["backend"], g["count"]) for g in groups] == [
        ("layers.*.attention", 3, None, 3),
        ("layers.*.attention", 2, "FLASH_ATTENTION", 2),
        ("layers.2.attention", 1, "MATH", 1),
        ("head", 1, None, 1),
        ("head", 1, None, 1),
    ]
    assert groups[1]["refused"] == {
        "fast path of nn.MultiheadAttention": {"training is enabled": 2}
    }


@pytest.mark.parametrize("width", [40, 100])
@pytest.mark.parametrize("name", ["overview", "ops", "op", "leaf", "kernels", "findings"])
def test_a_trace_reads_as_it_was_accepted(name, width, golden):
    """Every form of `opdrift show`, wide and narrow."""
    run, screen = single(), Screen(width=width, unicode=width > 40)
    every = range(len(run.ops))
    shown = {
        "overview": lambda: trace_text.overview(run, findings([run]), screen),
        "ops": lambda: trace_text.op_table(run, every, screen),
        "op": lambda: trace_text.one_op(run, run.op(4), screen),
        "leaf": lambda: leaf_text.leaf_report(
            run, [leaf for leaf in run.leaves if leaf.name], screen
        ),
        "kernels": lambda: kernels.kernel_report(run, every, screen),
        "findings": lambda: finding_text.finding_report(findings([run]), screen),
    }[name]()
    golden(f"show/{name}-{width}.txt", shown)
    assert [
        line for line in shown.splitlines() if cell_len(line) > width and "opdrift show" not in line
    ] == []
