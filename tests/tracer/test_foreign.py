"""Logs of DebugMode and of torchtitan's numerics debugger are compared as far as they go, and never further."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import opdrift
from opdrift.commands.main import diff_trace
from opdrift.errors import (
    DamagedTraceError,
    IncomparableTracesError,
    InvalidOptionError,
    NotATraceError,
    OpdriftError,
    TraceVersionError,
)
from opdrift.foreign import read_log
from opdrift.foreign.debugmode import FORMAT
from opdrift.foreign.matching import match_ops
from opdrift.foreign.model import Hash, LoggedOp, LoggedTensor
from opdrift.foreign.written import settings, tensors
from opdrift.records import ArgumentDifference, Sides
from opdrift.render import json as json_report
from opdrift.render import text
from opdrift.render.page import Screen

# ---- logs written by hand, as torch 2.14 writes them ------------------------------------------------------


def tagged(value: Any) -> dict[str, Any]:
    """A value as torch/utils/_debug_mode/_calls.py of torch 2.14 serialises it."""
    if isinstance(value, float) and str(value) in ("nan", "inf", "-inf"):
        return {"type": "nonfinite_float", "value": str(value)}
    if isinstance(value, tuple | list):
        return {
            "type": "tuple" if isinstance(value, tuple) else "list",
            "items": [tagged(v) for v in value],
        }
    if isinstance(value, dict):
        return {"type": "dict", "items": [[k, tagged(v)] for k, v in value.items()]}
    return {"type": "scalar", "value": value}


def record(
    kind: str, depth: int, log: Any = None, out: str | None = None, **fields: Any
) -> dict[str, Any]:
    return {
        "call_depth": depth, "log": None if log is None else tagged(log), "output_str": out,
        "stack_trace": None, "fwd_stack_trace": None, "type": kind, **fields,
    }  # fmt: skip


def module(path: str, depth: int) -> dict[str, Any]:
    return record("annotate", depth, tag=path, header="nn.Mod")


def op(
    name: str,
    inputs: Sequence[float | None],
    output: float | tuple[Any, ...] | None,
    *,
    depth: int = 2,
    args: str = "",
    out: str = "t: f32[4, 4]",
    **fields: Any,
) -> dict[str, Any]:
    """An op of tensors `f32[4, 4]`, with the hashes of what it reads and returns."""
    text_ = args or ", ".join("t: f32[4, 4]" for _ in inputs)
    log = {} if output is None else {"input_hash": (tuple(inputs), {}), "hash": output}
    given = {"args_str": text_, "kwargs_str": "", **fields}
    return record("op", depth, log or None, f"  ->  {out}", op_name=f"aten::{name}", **given)


def saved(path: Path, *calls: dict[str, Any], **fields: Any) -> Path:
    path.write_text(
        json.dumps({"format": FORMAT, "version": 1, "logs": list(calls), **fields}) + "\n"
    )
    return path


def mlp(
    *, weight: float = 5.0, hidden: float = 7.0, eps: str = "1e-05", final: float = 9.0
) -> list[dict[str, Any]]:
    """A linear layer and a norm, as DebugMode(record_nn_module=True) with hashes of inputs logs them."""
    return [
        module("Model", 1),
        module("Model.fc", 2),
        op("t", [weight], weight, depth=3),
        op("mm", [2.0, weight], hidden, depth=3),
        module("Model.norm", 2),
        op("native_layer_norm", [hidden], final, depth=3, args=f"t: f32[4, 4], [4], {eps}"),
        op("sum", [final], final + 1, depth=2, out="t: f32[]"),
    ]


@pytest.fixture
def pair(tmp_path: Path):
    def make(
        left: list[dict[str, Any]], right: list[dict[str, Any]], **options: Any
    ) -> opdrift.Diagnosis:
        return opdrift.diff(
            saved(tmp_path / "left.json", *left), saved(tmp_path / "right.json", *right), **options
        )

    return make


# ---- what is read -----------------------------------------------------------------------------------------


def test_a_log_becomes_ops_with_module_arguments_and_hashes(tmp_path: Path):
    """Paths lose the root's class name, overloads are written as opdrift does."""
    stack = '  File "/home/me/model.py", line 12, in forward\n    x\n  File "/v/site-packages/torch/nn/functional.py", line 2, in f\n'
    calls = mlp()
    calls[3] = {**calls[3], "stack_trace": stack}

    log = read_log(saved(tmp_path / "a.json", *calls))

    assert log.ops[1] == LoggedOp(
        seq=2,
        name="aten.mm.default",
        module="fc",
        call=0,
        phase=None,
        source="/home/me/model.py:12 in forward",
        arguments={},
        inputs=(LoggedTensor("float32[4, 4]", (Hash("norm", 2.0),)), LoggedTensor("float32[4, 4]", (Hash("norm", 5.0),))),
        outputs=(LoggedTensor("float32[4, 4]", (Hash("norm", 7.0),)),),
    )  # fmt: skip
    assert [o.module for o in log.ops] == ["fc", "fc", "norm", ""]
    assert log.ops[2].arguments == {"argument 1": "[4]", "argument 2": "1e-05"}


def test_several_outputs_and_several_hash_functions_are_told_apart(tmp_path: Path):
    """Three outputs with one hash each and one output with two hashes look alike in the log."""
    three = op(
        "native_layer_norm", [1.0], (1.0, 2.0, 3.0), out="('t: f32[2]', 't: f32[1]', 't: f32[1]')"
    )
    double = op("mm", [], (4.5, 77), args="t: f32[4, 4]")

    log = read_log(saved(tmp_path / "a.json", three, double))

    assert [[h.value for h in t.hashes or ()] for t in log.ops[0].outputs] == [[1.0], [2.0], [3.0]]
    assert log.ops[1].outputs == (
        LoggedTensor("float32[4, 4]", (Hash("norm", 4.5), Hash("xor", 77))),
    )


def test_modules_are_right_below_python_calls(tmp_path: Path):
    """With record_torchfunction an op lies one level deeper, and Python calls are left out."""
    calls = [
        module("Model", 1),
        module("Model.fc", 2),
        record("op", 2, op_name="torch._C._nn.linear", args_str="t: f32[4, 4]", kwargs_str=""),
        op("mm", [2.0, 5.0], 7.0, depth=4),
        record("op", 1, op_name="torch.relu", args_str="t: f32[4, 4]", kwargs_str=""),
        op("relu", [7.0], 6.0, depth=3),
    ]

    log = read_log(saved(tmp_path / "a.json", *calls))

    assert [(o.name, o.module) for o in log.ops] == [
        ("aten.mm.default", "fc"),
        ("aten.relu.default", ""),
    ]


@pytest.mark.parametrize(
    ("written", "found", "others"),
    [
        ("t: f32[8, 16], [16], 1e-05", ["float32[8, 16]"], {"argument 1": "[16]", "argument 2": "1e-05"}),
        ("t$3: bf16[2]{device=cpu}, memory_format=torch.preserve_format", ["bfloat16[2]"], {"memory_format": "torch.preserve_format"}),
        ("['t: i64[3]', 't: b8[3]'], dim=-1", ["int64[3]", "bool[3]"], {"dim": "-1"}),
        ("dt: f32[8]| S(0), 'a, b', <function f at 0x7f00>", ["float32[8] S(0)"], {"argument 1": "'a, b'", "argument 2": "<function f at 0x...>"}),
        ("", [], {}),
    ],
)  # fmt: skip
def test_arguments_are_read_as_torch_writes_them(
    written: str, found: list[str], others: dict[str, str]
):
    assert list(tensors(written)) == found
    assert settings(written) == others


# ---- what is said -----------------------------------------------------------------------------------------


def test_equal_hashes_are_never_called_identical_in_words(pair):
    """The verdict's word is "identical", so that scripts can go on; `exact` and the text say what it is worth."""
    diagnosis = pair(mlp(), mlp())

    assert (diagnosis.verdict, diagnosis.exact, diagnosis.first) == ("identical", False, None)
    assert json.loads(json_report.render(diagnosis))["exact"] is False
    said = text.render(diagnosis, Screen(100, unicode=True))
    assert said.startswith("no difference seen: 4 ops paired")
    assert "identical" not in said
    assert "permuted rows" in said


def test_a_traces_diagnosis_is_exact(pair):
    from opdrift.testing import trace

    assert opdrift.diff(trace("mm"), trace("mm")).exact


def test_another_output_from_equal_hashes_begins_there(pair):
    """The first op whose inputs have equal hashes and whose output has not; what follows is a receiver."""
    diagnosis = pair(mlp(), mlp(hidden=7.5, final=9.5))

    first = diagnosis.first
    assert first is not None
    assert (first.kind, first.op, first.module, first.seq) == (
        "op",
        "aten.mm.default",
        "fc",
        Sides(2, 2),
    )
    assert (first.cause.slug, first.cause.confidence, first.inputs_match) == (
        "kernel",
        "possible",
        True,
    )
    assert first.relative_difference == pytest.approx(0.5 / 7)
    assert first.how == "norms"
    assert any("permuted" in e for e in first.cause.evidence)
    assert len(diagnosis.origins) == 1


def test_an_input_that_no_op_made_is_told_where_it_is_read(pair):
    """A log names no weight; it is told by the op that reads it first, once."""
    diagnosis = pair(mlp(), mlp(weight=5.5, hidden=7.5, final=9.5))

    first = diagnosis.first
    assert first is not None
    assert (first.kind, first.name, first.module) == ("leaf", "input 0 of aten.t.default", "fc")
    assert (first.cause.slug, first.cause.confidence) == ("input", "possible")
    assert len(diagnosis.origins) == 1
    assert text.render(diagnosis, Screen(100)).startswith(
        "diverged: at op 1 of 4: input 0 of aten.t.default in fc differs"
    )


def test_other_arguments_are_told_with_both_values(pair):
    """Shapes and tensors are no arguments; 1e-05 against 0.001 is."""
    diagnosis = pair(mlp(), mlp(eps="0.001", final=9.5))

    first = diagnosis.first
    assert first is not None
    assert (first.op, first.cause.slug) == ("aten.native_layer_norm.default", "op-args")
    assert first.arguments == (ArgumentDifference("argument 2", "1e-05", "0.001"),)


def test_other_arguments_that_change_nothing_are_no_difference(pair):
    """The nearest thing that must not count: the norm came out the same."""
    assert pair(mlp(), mlp(eps="0.001")).verdict == "identical"


def test_an_op_more_shifts_nothing(pair):
    """DebugMode itself raises where logs have different lengths."""
    extra = mlp(hidden=7.5, final=9.5)
    extra.insert(2, op("ones", [], 16.0, depth=3, args="[4, 4]"))

    diagnosis = pair(mlp(), extra)

    assert diagnosis.first is not None
    assert (diagnosis.first.op, diagnosis.first.seq) == ("aten.mm.default", Sides(2, 3))
    assert diagnosis.alignment.right_only == 1


def test_what_a_lone_op_made_is_a_structure(pair):
    """The right run scales before the norm; that op is named, not the norm."""
    scaled = mlp(final=9.5)
    scaled[5] = op("native_layer_norm", [3.5], 9.5, depth=3, args="t: f32[4, 4], [4], 1e-05")
    scaled.insert(5, op("mul.Scalar", [7.0], 3.5, depth=3, args="t: f32[4, 4], 0.5"))

    first = pair(mlp(), scaled).first

    assert first is not None
    assert (first.kind, first.cause.slug) == ("structure", "structure")
    assert "aten.mul.Scalar" in first.cause.summary


def test_a_cast_that_one_run_has_is_a_dtype(pair):
    cast = mlp(final=9.5)
    cast[5] = op("native_layer_norm", [6.9], 9.5, depth=3, args="t: bf16[4, 4], [4], 1e-05")
    cast.insert(5, op("_to_copy", [7.0], 6.9, depth=3, out="t: bf16[4, 4]"))

    first = pair(mlp(), cast).first

    assert first is not None
    assert first.cause.slug == "dtype"


def test_ops_that_only_one_run_has_are_told_even_if_all_hashes_agree(pair):
    diagnosis = pair(mlp(), [*mlp(), op("relu", [10.0], 10.0)])

    assert diagnosis.first is not None
    assert (diagnosis.verdict, diagnosis.first.cause.slug) == ("diverged", "structure")
    assert diagnosis.first.op == "aten.relu.default"


def test_a_view_that_only_one_run_has_is_no_difference(pair):
    assert (
        pair(mlp(), [*mlp(), op("view", [10.0], 10.0, args="t: f32[4, 4], [16]")]).verdict
        == "identical"
    )


def test_a_small_difference_that_stays_small_is_possibly_rounding(pair):
    """Never more than possible: a norm may hide what differs."""
    diagnosis = pair(mlp(), mlp(hidden=7.0 * (1 + 2e-7), final=9.0 * (1 + 3e-7)))

    first = diagnosis.first
    assert first is not None
    assert (diagnosis.verdict, first.cause.slug, first.cause.confidence) == (
        "rounding",
        "rounding",
        "possible",
    )
    assert first.explained == pytest.approx(20 * 2**-24)


def test_a_small_difference_that_becomes_large_is_not_called_rounding(pair):
    """A permutation begins with a tiny change of the norm and shows where rows are mixed."""
    diagnosis = pair(mlp(), mlp(hidden=7.0 * (1 + 2e-7), final=9.9))

    assert diagnosis.first is not None
    assert (diagnosis.verdict, diagnosis.first.cause.slug) == ("diverged", "kernel")


def test_a_draw_is_a_draw(pair):
    """What an in-place draw overwrites is no input."""
    left = [op("bernoulli_.float", [0.0], 8.0, args="t: f32[4, 4], 0.9")]
    right = [op("bernoulli_.float", [3.1e38], 9.0, args="t: f32[4, 4], 0.9")]

    first = pair(left, right).first

    assert first is not None
    assert (first.kind, first.cause.slug) == ("op", "rng")


def test_a_norm_that_is_nan_on_one_side_is_nan(pair):
    first = pair(mlp(), mlp(hidden=float("nan"), final=float("nan"))).first

    assert first is not None
    assert (first.op, first.cause.slug) == ("aten.mm.default", "nan")


def test_a_norm_that_is_nan_on_both_sides_tells_nothing(pair):
    """DebugMode calls it a mismatch, because NaN is not NaN."""
    nan = mlp(hidden=float("nan"), final=float("nan"))

    assert pair(nan, nan).verdict == "identical"


def test_without_hashes_of_inputs_only_the_first_op_is_told(pair):
    """And the report says why, and how to get more."""

    def bare(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {**c, "log": {"type": "dict", "items": [i for i in c["log"]["items"] if i[0] == "hash"]}}
            if c["type"] == "op" else c for c in calls
        ]  # fmt: skip

    diagnosis = pair(bare(mlp()), bare(mlp(hidden=7.5, final=9.5)))

    assert [o.op for o in diagnosis.origins] == ["aten.mm.default"]
    assert diagnosis.origins[0].inputs_match is None
    assert any("hash_inputs=True" in note for note in diagnosis.notes)


def test_xor_hashes_have_no_distance(pair):
    first = pair([op("mm", [1, 2], 3)], [op("mm", [1, 2], 4)]).first

    assert first is not None
    assert (first.relative_difference, first.how) == (None, "hashes")


@pytest.mark.parametrize("text", ["fc", "=", " = "])
def test_a_map_names_a_module(pair, text):
    """Nothing on both sides says nothing; one empty side is the root module."""
    with pytest.raises(InvalidOptionError, match="LEFT=RIGHT"):
        pair(mlp(), mlp(), maps=[text])


def test_modules_can_be_renamed(pair):
    """`--map` holds for logs as for traces."""
    other = [
        {**c, "tag": c["tag"].replace(".fc", ".dense")} if c["type"] == "annotate" else c
        for c in mlp(hidden=7.5, final=9.5)
    ]

    diagnosis = pair(mlp(), other, maps=["fc=dense"])

    assert diagnosis.alignment.paired == 4
    assert diagnosis.first is not None
    assert diagnosis.first.module == "fc"


def test_the_answer_of_exchanged_logs_is_the_same_place(pair):
    a, b = mlp(), mlp(hidden=7.5, final=9.5)

    one, other = pair(a, b).first, pair(b, a).first

    assert one is not None
    assert other is not None
    assert (one.op, one.cause.slug, one.seq) == (other.op, other.cause.slug, other.seq)


def test_pairs_keep_their_order_whatever_is_inserted():
    ops = [
        LoggedOp(i, f"aten.op{i % 3}.default", "m", 0, None, None, {}, (), ()) for i in range(1, 40)
    ]

    matched = match_ops(
        ops, [ops[5], *ops[:20], *(replace(o, name="aten.new.default") for o in ops[:7]), *ops[20:]]
    )

    lefts, rights = zip(*matched.pairs, strict=True)
    assert list(lefts) == sorted(set(lefts))
    assert list(rights) == sorted(set(rights))
    assert len(matched.pairs) >= 38


# ---- what DebugMode of the installed torch writes ----------------------------------------------------------


def test_the_installed_debug_mode_writes_what_is_read(tmp_path: Path):
    """torch 2.13 has no save_logs: its records are put into the format of 2.14 here, field by field."""
    torch = pytest.importorskip("torch")
    from torch.utils._debug_mode import DebugMode
    from torch.utils._debug_mode._calls import _AnnotateCall

    def run(path: Path, eps: float) -> Path:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.LayerNorm(16, eps=eps), torch.nn.Linear(16, 4)
        )
        with (
            DebugMode(record_nn_module=True, record_stack_trace=True) as mode,
            DebugMode.log_tensor_hashes(hash_inputs=True),
        ):
            model(torch.ones(3, 8)).sum().backward()
        if hasattr(DebugMode, "save_logs"):
            DebugMode.save_logs(mode.logs, path)
            return path
        return saved(
            path,
            *(
                record(
                    "annotate" if isinstance(c, _AnnotateCall) else "op", c.call_depth, c.log, c.output_str,
                    **({"tag": c.tag, "header": c.header} if isinstance(c, _AnnotateCall) else
                       {"op_name": c.op.__qualname__, "args_str": c.args_str, "kwargs_str": c.kwargs_str}),
                )
                for c in mode.logs
            ),
        )  # fmt: skip

    left, right = run(tmp_path / "a.json", 1e-5), run(tmp_path / "b.json", 1e-3)

    assert opdrift.diff(left, left).verdict == "identical"
    first = opdrift.diff(left, right).first
    assert first is not None
    assert (first.op, first.module, first.cause.slug) == (
        "aten.native_layer_norm.default",
        "1",
        "op-args",
    )
    assert first.tensors == Sides("float32[3, 16]", "float32[3, 16]")


# ---- torchtitan -------------------------------------------------------------------------------------------

TITAN = """\
Total captured activations: 3
Excluded ops dispatched: _to_copy, t, view
================================================================================

[layers.0.attention.wq/op_0_mm]
  Shape: torch.Size([64, 32]), Dtype: torch.bfloat16
  L2 norm: 4.525483e+01
  Min: -3.812500e+00
  Max: 3.937500e+00
  Mean: 1.052856e-03
  Output hash: 1.634721e+03
  Input hashes: 1.632000e+03, 2.610000e+02
  Input producers: ;
  Location: common/attention.py:534

[layers.0.feed_forward/op_0_silu]
  Shape: torch.Size([64, 32]), Dtype: torch.bfloat16
  L2 norm: 2.1e+01
  Output hash: 8.000000e+02
  Input hashes: 1.634721e+03
  Location: common/ffn.py:20

[<none>/op_0__fused_adam_]
  Input hashes: 2.610000e+02, 3.300000e+01
  Phase: backward

"""


def titan(path: Path, text_: str = TITAN) -> Path:
    path.write_text(text_)
    return path


def test_a_log_of_torchtitan_is_read(tmp_path: Path):
    log = read_log(titan(tmp_path / "rank_3_activations.log"))

    assert (log.format, log.rank, log.left_out) == ("torchtitan", 3, ("_to_copy", "t", "view"))
    assert [(o.name, o.module, o.phase) for o in log.ops] == [
        ("mm", "layers.0.attention.wq", "forward"),
        ("silu", "layers.0.feed_forward", "forward"),
        ("_fused_adam_", "", "backward"),
    ]
    assert log.ops[0].outputs[0].text == "bfloat16[64, 32]"
    assert log.ops[0].source == "common/attention.py:534"


def test_the_first_op_of_torchtitan_logs_is_told_and_what_seven_digits_hide(tmp_path: Path):
    left = titan(tmp_path / "rank_0_activations.log")
    changed = TITAN.replace("8.000000e+02", "9.000000e+02").replace(
        "2.610000e+02, 3.3", "2.610000e+02, 3.4"
    )
    right = titan(tmp_path / "other.log", changed)

    diagnosis = opdrift.diff(left, right)

    assert diagnosis.first is not None
    assert (diagnosis.first.op, diagnosis.first.module) == ("silu", "layers.0.feed_forward")
    # ops are missing in such logs, so an input that nothing explains is told only before all others
    assert len(diagnosis.origins) == 1
    assert any("7 digits" in note for note in diagnosis.notes)
    assert any("views, copies and casts (_to_copy, t, view)" in note for note in diagnosis.notes)


# ---- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        (b"PK\x03\x04rest", NotATraceError, "torch.save"),
        (pickle.dumps({"a": 1}), NotATraceError, "a pickle"),
        (b"\x1f\x8b\x08", NotATraceError, "gzip"),
        (b"\xff\xfe\x00", NotATraceError, "not UTF-8"),
        (b"hello", NotATraceError, "none that opdrift reads"),
        (b"", NotATraceError, "none that opdrift reads"),
        (b'{"format": ', DamagedTraceError, "JSON"),
        (b"[" * 200_000, DamagedTraceError, "nested too deeply"),
        (b"[1, 2]", DamagedTraceError, "no DebugMode log"),
        (b'{"format": "other"}', DamagedTraceError, "'other'"),
        (json.dumps({"format": FORMAT, "version": 2, "logs": []}).encode(), TraceVersionError, "version 2"),
        (json.dumps({"format": FORMAT, "version": 1, "logs": {}}).encode(), DamagedTraceError, "no list of logs"),
        (json.dumps({"format": FORMAT, "version": 1, "logs": [7]}).encode(), DamagedTraceError, "record 0"),
        (json.dumps({"format": FORMAT, "version": 1, "logs": [{"type": "op", "call_depth": 1}]}).encode(), DamagedTraceError, "op_name"),
        (json.dumps({"format": FORMAT, "version": 1, "logs": [{"type": "future", "call_depth": 1}]}).encode(), DamagedTraceError, "future"),
        (json.dumps({"format": FORMAT, "version": 1, "logs": []}).encode(), IncomparableTracesError, "holds no op"),
        (TITAN.replace(": 3", ": 4", 1).encode(), DamagedTraceError, "promises 4"),
        (TITAN.replace("[layers.0.feed_forward/op_0_silu]", "[what]").encode(), DamagedTraceError, "line 16"),
        (TITAN.replace("torch.Size([64, 32])", "nothing", 1).encode(), DamagedTraceError, "nothing"),
        (TITAN.replace("4.525483e+01", "many").encode(), DamagedTraceError, "'many'"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_refused_in_one_sentence(
    content: bytes,
    error: type[OpdriftError],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    path = tmp_path / "log"
    path.write_bytes(content)

    with pytest.raises(error, match=re.escape(said)):
        opdrift.diff(path, path)
    assert diff_trace([str(path), str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "bug in opdrift" not in captured.err


def test_every_record_may_be_damaged_and_none_gives_a_traceback(tmp_path: Path):
    """Each field of each record, taken away or replaced by something of another kind."""
    whole = mlp()
    good = saved(tmp_path / "good.json", *whole)
    refused = 0
    for number, call in enumerate(whole):
        for key in call:
            for junk in (
                None,
                [],
                {},
                7,
                "text",
                {"type": "tuple"},
                {"type": "dict", "items": [1]},
            ):
                broken = [*whole]
                broken[number] = {**call, key: junk}
                try:
                    opdrift.diff(good, saved(tmp_path / "bad.json", *broken))
                except OpdriftError:
                    refused += 1
    assert refused > 100


def test_logs_without_hashes_cannot_be_compared(tmp_path: Path):
    """The ops are the same: that says nothing about their results."""
    path = saved(tmp_path / "a.json", op("mm", [], None))

    with pytest.raises(IncomparableTracesError, match="log_tensor_hashes"):
        opdrift.diff(path, path)


def test_logs_of_two_tools_or_two_kinds_of_hashes_cannot_be_compared(tmp_path: Path):
    debug = saved(tmp_path / "a.json", *mlp())

    with pytest.raises(IncomparableTracesError, match="torchtitan"):
        opdrift.diff(debug, titan(tmp_path / "b.log"))
    with pytest.raises(IncomparableTracesError, match="hash_fn"):
        opdrift.diff(debug, saved(tmp_path / "c.json", op("mm", [1, 2], 3)))


def test_a_log_and_a_trace_cannot_be_compared(tmp_path: Path):
    from opdrift.testing import trace

    log = saved(tmp_path / "a.json", *mlp())

    with pytest.raises(IncomparableTracesError, match="is a trace"):
        opdrift.diff(trace("mm"), log)
    with pytest.raises(NotATraceError, match="does not exist"):
        opdrift.diff(log, tmp_path / "nothing")


@pytest.mark.parametrize(
    "options",
    [
        ["--samples", "0:0"],
        ["--rank", "0"],
        ["--rtol", "1", "--atol", "1"],
        ["--tree"],
        ["--context", "3"],
    ],
)
def test_options_that_need_a_trace_are_refused(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = str(saved(tmp_path / "a.json", *mlp()))

    assert diff_trace([path, path, *options]) == 2
    assert "need traces of opdrift.record()" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["text", "json", "markdown"])
def test_every_report_takes_a_log(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """No report offers to open a log as a trace."""
    left = str(saved(tmp_path / "a.json", *mlp()))
    right = str(saved(tmp_path / "b.json", *mlp(hidden=7.5, final=9.5)))

    assert diff_trace([left, right, "--format", form]) == 1
    said = capsys.readouterr().out
    assert "aten.mm.default" in said
    assert "opdrift show" not in said
    assert "bit for bit: the difference" not in said
    with pytest.raises(InvalidOptionError):
        opdrift.diff(left, right, samples="0:0")
