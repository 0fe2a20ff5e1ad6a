"""Attention is recognised however it ran, and CPU libraries follow from torch's rules."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (as torch writes it)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import opdrift
from opdrift.picks import AttentionRegion, Picks, attention_regions
from opdrift.picks.quantised import scaled
from opdrift.records import Pick, TensorMeta
from opdrift.testing import Builder
from opdrift.tracefile.reader import Trace


def recorded(path: Path, *calls: Callable[[], object]) -> tuple[Trace, list[range]]:
    """The trace, and the ops (by index) of each call."""
    with torch.no_grad(), opdrift.record(path, kernels="off", integrity="off") as recorder:
        recorder.mark("case")
        for call in calls:
            call()
            recorder.mark("case")
    trace = opdrift.load(path)
    ends = [m.seq for m in trace.marks if m.kind == "case"]
    return trace, [
        range(first, last) for first, last in pairwise(ends)
    ]  # seqs count from 1, indices from 0


def names(trace: Trace, ops: range | tuple[int, ...]) -> list[str]:
    return [trace.op(i).name.split(".")[1] for i in ops]


# ---- backends by op --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "backend", "library"),
    [
        ("_scaled_dot_product_flash_attention_for_cpu", "FLASH_ATTENTION", "ATen"),
        ("_scaled_dot_product_flash_attention", "FLASH_ATTENTION", "FlashAttention"),
        ("_scaled_dot_product_flash_attention_backward", "FLASH_ATTENTION", "FlashAttention"),
        ("_scaled_dot_product_efficient_attention", "EFFICIENT_ATTENTION", "CUTLASS"),
        ("_efficient_attention_backward", "EFFICIENT_ATTENTION", "CUTLASS"),
        ("_flash_attention_forward_no_dropout_inplace", "FLASH_ATTENTION", "FlashAttention"),
        ("_scaled_dot_product_cudnn_attention", "CUDNN_ATTENTION", "cuDNN"),
        ("_scaled_dot_product_fused_attention_overrideable", "OVERRIDEABLE", "backend"),
        ("_scaled_dot_product_attention_math", "MATH", "ATen"),
        ("_safe_softmax", "MATH", "ATen"),
    ],
)
def test_a_fused_attention_op_is_the_pick(op: str, backend: str, library: str) -> None:
    build = Builder()
    x = build.leaf("x")
    build.op(op, x, x, x)
    found = Picks(build.build()).of(0)
    assert found is not None
    assert (found.backend, found.library, found.source) == (backend, library, "dispatcher")
    assert hasattr(SDPBackend, backend)


@pytest.mark.parametrize(
    ("op", "library"),
    [
        ("_scaled_dot_product_flash_attention", "AOTriton or Composable Kernel"),
        ("_scaled_dot_product_efficient_attention_backward", "AOTriton or Composable Kernel"),
        ("_scaled_dot_product_attention_math", "ATen"),
    ],
)
def test_on_amds_devices_the_same_ops_are_of_other_libraries(op: str, library: str) -> None:
    build = Builder(device="cuda:0", versions={"hip": "6.4"})
    x = build.leaf("x")
    build.op(op, x, x, x)
    found = Picks(build.build()).of(0)
    assert found is not None
    assert found.library == library


def test_kernels_below_sdpa_are_no_choice_of_its() -> None:
    """Their operands are (batch, length, heads, size): read as SDPA's, heads of 300 would be lengths."""
    build = Builder(device="cuda:0", flags={"cuda.capability": "9.0"}, versions={"cuda": "13.0"})
    x = build.leaf("x", shape=(2, 300, 4, 512), dtype="bfloat16")
    build.op("_efficient_attention_forward", x, x, x)
    found = Picks(build.build()).of(0)
    assert found is not None
    assert (found.backend, dict(found.refused)) == ("EFFICIENT_ATTENTION", {})


def test_ops_without_a_choice_have_no_pick() -> None:
    build = Builder()
    x = build.leaf("x")
    build.op("relu", x)
    assert Picks(build.build()).of(0) is None


def test_the_fast_path_of_an_encoder_layer_is_told(tmp_path: Path) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    trace, (ops,) = recorded(tmp_path / "t", lambda: layer(torch.zeros(2, 5, 16)))
    found = Picks(trace).of(ops[-1])
    assert found is not None
    assert found.backend is None
    assert found.reason == "the fast path of nn.TransformerEncoderLayer"


# ---- torch's math path -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One attention call with everything that changes its decomposition."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    dropout: float
    grouped: bool
    out_of: str

    def __call__(self) -> Tensor:
        scaled = self.query * 1.5  # looks like the scaling inside
        result = F.scaled_dot_product_attention(
            scaled,
            self.key,
            self.value,
            self.mask,
            self.dropout,
            self.causal,
            enable_gqa=self.grouped,
        )
        return result + 1


def random_call(rng: random.Random) -> Call:
    batch, heads, width = rng.choice((1, 2, 3)), rng.choice((1, 2, 4)), rng.choice((4, 8))
    length, keys = rng.choice((1, 5, 8)), rng.choice((5, 8))
    rank, grouped = rng.choice((2, 3, 4, 4, 4, 5)), heads > 1 and rng.random() < 0.3
    grouped = grouped and rank > 2
    shapes = {
        2: lambda _, n: (n, width),
        3: lambda h, n: (h, n, width),
        4: lambda h, n: (batch, h, n, width),
        5: lambda h, n: (1, batch, h, n, width),
    }[rank]
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.float64))
    kind = rng.choice(("none", "none", "bool", "float", "causal", "tril"))
    mask = {
        "bool": lambda: torch.rand(length, keys) > 0.3,
        "float": lambda: torch.randn(length, keys).to(dtype),
        "tril": lambda: torch.ones(length, keys, dtype=torch.bool).tril(),
    }.get(kind, lambda: None)()
    kv_heads = 1 if grouped else heads
    query, key, value = (
        torch.randn(shapes(h, n)).to(dtype)
        for h, n in ((heads, length), (kv_heads, keys), (kv_heads, keys))
    )
    if rank == 4 and rng.random() < 0.3:
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
    dropout = rng.choice((0.0, 0.0, 0.1, 0.5))
    return Call(query, key, value, mask, kind == "causal", dropout, grouped, kind)


def test_the_math_path_is_recognised_in_every_form(tmp_path: Path) -> None:
    """Ranks, masks, dropout, grouped heads, half precision: boundary and members are exact."""
    rng = random.Random(0)
    calls = [random_call(rng) for _ in range(60)]
    with sdpa_kernel(SDPBackend.MATH):
        trace, cases = recorded(tmp_path / "t", *calls)
    regions = attention_regions(trace)
    assert len(regions) == len(calls)
    for call, ops, region in zip(calls, cases, regions, strict=True):
        assert (region.backend, region.name) == ("MATH", "math path")
        assert region.query == trace.op(ops[0]).outputs[0]
        assert trace.meta(region.key).shape == tuple(call.key.shape)
        assert trace.meta(region.value).shape == tuple(call.value.shape)
        assert region.output == trace.op(ops[-1]).inputs[0]
        assert (region.causal, region.dropout, region.grouped) == (
            call.causal,
            call.dropout,
            call.grouped,
        )
        assert (region.mask is None) == (call.mask is None)
        if call.mask is not None and region.mask is not None:
            assert trace.meta(region.mask).shape == tuple(call.mask.shape)
        left_out = [i for i in ops[1:-1] if i not in region.ops]
        assert set(names(trace, tuple(left_out))) <= {"detach"}
        assert set(region.ops) <= set(ops[1:-1])


def test_what_the_program_does_before_is_no_part_of_the_call(tmp_path: Path) -> None:
    """Views, repeated heads, and casts of its own look like torch's."""
    flat = [torch.randn(8, 6, 8) for _ in range(3)]
    half = [torch.randn(2, 4, 6, 8).bfloat16() for _ in range(3)]
    few = torch.randn(2, 2, 6, 8)

    def views() -> Tensor:
        q, k, v = (x.view(2, 4, 6, 8) for x in flat)
        return F.scaled_dot_product_attention(q, k, v)

    def repeats() -> Tensor:
        k = few.repeat_interleave(2, 1)
        return F.scaled_dot_product_attention(half[0].float(), k, k)

    def casts() -> Tensor:
        q, k, v = (x.float() for x in half)
        return F.scaled_dot_product_attention(q, k, v).bfloat16()

    with sdpa_kernel(SDPBackend.MATH):
        trace, cases = recorded(tmp_path / "t", views, repeats, casts)
    found = attention_regions(trace)
    for region in found:
        metas = [trace.meta(v) for v in (region.query, region.key, region.value)]
        assert {(m.shape, m.dtype) for m in metas} == {((2, 4, 6, 8), "float32")}
        assert not region.grouped
    own = [names(trace, tuple(set(ops) - set(r.ops))) for ops, r in zip(cases, found, strict=True)]
    assert [sorted(each) for each in own] == [
        ["view"] * 3,
        ["_to_copy", "clone", "expand", "unsqueeze", "view"],
        ["_to_copy"] * 4,
    ]


def refused(path: Path, *operands: Tensor, **options: Any) -> str | None:
    """Why flash did not run, asked of a call that torch itself gave to the math path."""
    trace, _ = recorded(path, lambda: F.scaled_dot_product_attention(*operands, **options))
    (region,) = attention_regions(trace)
    found = Picks(trace).of_region(region)
    assert found.refused == ({} if found.reason is None else {"FLASH_ATTENTION": found.reason})
    return found.reason


def test_the_reason_against_flash_is_named(tmp_path: Path) -> None:
    """torch's own words exist for some refusals only; the rules have one for each."""
    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    turned = torch.randn(2, 4, 8, 6).transpose(2, 3)
    grad = torch.zeros(6, 6, requires_grad=True)
    cases: dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]] = {
        "dropout_p is 0.5, above 0": ((q, k, v), {"dropout_p": 0.5}),
        "query, key and value must have 4 dims, not 3": ((q[0], k[0], v[0]), {}),
        "numbers of heads differ: 4, 1 and 1 (query, key, value), and enable_gqa is not set": (
            (q, k[:, :1], v[:, :1]), {}),
        "the last dim is not contiguous (stride of query 6)": ((turned, k, v), {}),
        "attn_mask has 3 dims; fused kernels take 2 or 4": (
            (q, k, v), {"attn_mask": torch.zeros(4, 6, 6)}),
        "attn_mask requires grad": ((q, k, v), {"attn_mask": grad}),
        "dropout_p is 0.5, above 0; also attn_mask requires grad": (
            (q, k, v), {"attn_mask": grad, "dropout_p": 0.5}),
        "batch sizes differ: 2, 1 and 1 (query, key, value)": ((q, k[:1], v[:1]), {}),
        "head sizes differ: 8, 8 and 6 (query, key, value)": ((q, k, v[..., :6]), {}),
    }  # fmt: skip
    for number, (reason, (operands, options)) in enumerate(cases.items()):
        assert refused(tmp_path / str(number), *operands, **options) == reason


def test_flash_switched_off_is_the_reason(tmp_path: Path) -> None:
    q = torch.randn(2, 4, 6, 8)
    with sdpa_kernel(SDPBackend.MATH):
        assert refused(tmp_path / "t", q, q, q) == "the flash backend is switched off"


def test_flash_switched_off_during_the_run_is_the_reason(tmp_path: Path) -> None:
    """A change of a flag is a mark; what counts is what was in force at the op."""
    layer, q = torch.nn.Identity(), torch.randn(2, 4, 6, 8)

    class Attention(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    def run() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            Attention()(layer(q))

    trace, _ = recorded(tmp_path / "t", run, lambda: Attention()(q))
    (region,) = attention_regions(trace)
    assert trace.header.flags["sdp.flash"] is True
    assert Picks(trace).of_region(region).reason == "the flash backend is switched off"


def test_a_switch_that_changes_at_a_line_that_is_known_is_seen(tmp_path: Path) -> None:
    """The second time around the loop no line is new and no module is called."""
    q = torch.randn(2, 4, 6, 8)

    def run() -> None:
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(q, q, q)

    trace, _ = recorded(tmp_path / "t", run)
    (region,) = attention_regions(trace)
    assert Picks(trace).of_region(region).reason == "the flash backend is switched off"


def test_wherever_torch_chooses_math_a_reason_is_found(tmp_path: Path) -> None:
    """120 random calls: the op that ran and the rules agree in every one."""
    rng = random.Random(1)
    calls = [random_call(rng) for _ in range(120)]
    trace, cases = recorded(tmp_path / "t", *calls)
    regions = {r.ops[0]: r for r in attention_regions(trace)}
    flash = 0
    for call, ops in zip(calls, cases, strict=True):
        inside = [regions[i] for i in ops if i in regions]
        if inside:
            assert Picks(trace).of_region(inside[0]).reason is not None, call
        else:
            flash += 1
            assert "_scaled_dot_product_flash_attention_for_cpu" in names(trace, ops)
    assert 15 < flash < 105


# ---- wherever SDPA is called ------------------------------------------------------------------------------


def attention_picks(path: Path, call: Callable[[], object]) -> list[tuple[str, Pick]]:
    """(phase, pick) of each attention of a call."""
    with opdrift.record(path, kernels="off", integrity="off"):
        call()
    trace = opdrift.load(path)
    assert trace.footer is not None
    assert trace.footer.failures == ()
    found = Picks(trace).among(range(len(trace.ops)))
    return [(trace.op(i).phase, p) for i, p in found.items() if p.backend or "attention" in p.name]


def test_the_backward_pass_and_what_checkpoints_compute_again_are_told(tmp_path: Path) -> None:
    """The op of the backward is the backend's; what runs again is a call of its own."""
    q = torch.randn(2, 4, 6, 8, requires_grad=True)

    def run() -> None:
        def attend(x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

        checkpoint(attend, q, use_reentrant=False).sum().backward()

    found = attention_picks(tmp_path / "t", run)
    assert [(phase, pick.backend, pick.reason) for phase, pick in found] == [
        ("forward", "FLASH_ATTENTION", "torch tries it first, and it takes the call"),
        ("backward", "FLASH_ATTENTION", "torch tries it first, and it takes the call"),
        ("backward", "FLASH_ATTENTION", "backward of the backend that ran forward"),
    ]


def test_under_inference_mode_the_rules_tell_the_backend(tmp_path: Path) -> None:
    """There the dispatcher hands SDPA on whole; the op alone would not tell."""
    q = torch.randn(2, 4, 6, 8)
    mask = torch.zeros(6, 6, requires_grad=True)

    @torch.inference_mode()
    def run() -> None:
        F.scaled_dot_product_attention(q, q, q)
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(q, q, q)

    found = [pick for _, pick in attention_picks(tmp_path / "t", run)]
    assert [(p.backend, dict(p.refused), p.source) for p in found] == [
        ("FLASH_ATTENTION", {}, "inferred"),
        ("MATH", {"FLASH_ATTENTION": "attn_mask requires grad"}, "inferred"),
        ("MATH", {"FLASH_ATTENTION": "the flash backend is switched off"}, "inferred"),
    ]


def test_a_call_that_raised_has_no_pick(tmp_path: Path) -> None:
    """Also where the math path raised half-way, at the softmax of complex numbers."""
    q = torch.zeros(2, 4, 6, 8, dtype=torch.complex64)

    def run() -> None:
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode, contextlib.suppress(NotImplementedError):
                F.scaled_dot_product_attention(q, q, q)

    found = [pick for _, pick in attention_picks(tmp_path / "t", run)]
    assert [p.reason for p in found] == ["nothing but the math path of SDPA calls it"]


def test_torchs_words_against_fast_paths_are_kept(tmp_path: Path) -> None:
    """Attention inside modules says why none of the modules around it took its fast path."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    x = torch.randn(2, 5, 16)
    (training,) = (p for _, p in attention_picks(tmp_path / "1", lambda: encoder(x)))
    assert training.refused["fast path of nn.MultiheadAttention"] == "training is enabled"
    assert training.refused["fast path of nn.TransformerEncoderLayer"] == "training is enabled"

    encoder.eval()
    (grads,) = (p for _, p in attention_picks(tmp_path / "2", lambda: encoder(x)))
    assert grads.backend == "FLASH_ATTENTION"
    assert "grad is enabled" in grads.refused["fast path of nn.MultiheadAttention"]
    with torch.no_grad():
        trace, _ = recorded(tmp_path / "3", lambda: encoder(x))
    fast = Picks(trace).of(len(trace.ops) - 1)
    assert fast is not None
    assert fast.reason == "the fast path of nn.TransformerEncoderLayer"
    assert "use_nested_tensor" in fast.refused["fast path of nn.TransformerEncoder"]
    assert len(fast.refused) == 1


def test_words_of_an_earlier_call_are_not_kept_for_a_later_one(tmp_path: Path) -> None:
    """Trained, then evaluated: the words change with each call of the same module."""
    attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 5, 16)

    def run() -> None:
        for train in (True, False, True):
            with torch.set_grad_enabled(train):
                attention.train(train)(x, x, x, need_weights=False)

    found = [p for _, p in attention_picks(tmp_path / "t", run)]
    said = [p.refused.get("fast path of nn.MultiheadAttention") for p in found]
    assert said == ["training is enabled", None, "training is enabled"]


def test_words_are_read_without_keeping_tensors_alive(tmp_path: Path) -> None:
    """Looking at a frame's locals makes a copy of them, which must not outlive the look."""
    kept: list[weakref.ref[Tensor]] = []

    class Watched(torch.nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            passed = args[0] + 0
            result = super().forward(passed, passed, passed, need_weights=False)
            kept.append(weakref.ref(passed))
            return result

    attention, x = Watched(16, 2, batch_first=True), torch.randn(2, 5, 16)
    with opdrift.record(tmp_path / "t", kernels="off", integrity="off"):
        attention(x)
        assert kept[0]() is None or kept[0]().grad_fn is not None
        del attention
    gc.collect()
    assert kept[0]() is None


@pytest.mark.filterwarnings("ignore:flex_attention called")
def test_other_attention_is_told_by_its_name(tmp_path: Path) -> None:
    """flex_attention and libraries of attention are none of SDPA's backends; other ops of theirs are nothing."""
    q = torch.randn(1, 2, 16, 16)
    (flex,) = (p for _, p in attention_picks(tmp_path / "t", lambda: flex_attention(q, q, q)))
    assert (flex.library, flex.backend) == ("FlexAttention", None)
    told = {}
    for name in (
        "flash_attn._flash_attn_forward.default",
        "flash_attn_3.fwd.default",
        "xformers.efficient_attention_forward_cutlass.default",
        "xformers_flash.flash_fwd.default",
        "xformers.sequence_pad.default",
        "aten._triton_scaled_dot_attention.default",
        "aten._scaled_dot_product_sparkling_attention.default",
    ):
        build = Builder()
        x = build.leaf("x")
        build.op(name, x, x, x)
        found = Picks(build.build()).of(0)
        told[name.split(".")[1]] = found and (found.library, found.backend)
    assert told == {
        "_flash_attn_forward": ("flash-attn", None),
        "fwd": ("flash-attn 3", None),
        "efficient_attention_forward_cutlass": ("xFormers", None),
        "flash_fwd": ("xFormers' flash-attn", None),
        "sequence_pad": None,
        "_triton_scaled_dot_attention": ("Triton", None),
        "_scaled_dot_product_sparkling_attention": (None, None),
    }


# ---- attention that models write out -------------------------------------------------------------------------


def eager(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + mask
    return torch.matmul(F.dropout(scores.softmax(-1, dtype=torch.float32).to(q.dtype), dropout), v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_written_by_hand_is_a_region(
    dtype: torch.dtype, dropout: float, masked: bool, tmp_path: Path
) -> None:
    q, k, v = (
        torch.randn(2, 4, 6, 8).to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
        for _ in range(3)
    )
    mask = torch.zeros(6, 6).to(dtype) if masked else None
    trace, (ops,) = recorded(tmp_path / "t", lambda: eager(q, k, v, mask, dropout))
    (region,) = attention_regions(trace)
    assert (region.name, region.backend) == ("eager attention", None)
    assert region.ops == tuple(ops)
    assert region.dropout == dropout
    assert (region.mask is not None) == masked
    shapes = [trace.meta(x).shape for x in (region.query, region.key, region.value, region.output)]
    assert shapes == [(2, 4, 6, 8)] * 4
    found = Picks(trace).of_region(region)
    assert (found.name, found.backend, found.source) == ("eager attention", None, "inferred")


def test_forms_of_the_mask_and_of_the_scaling(tmp_path: Path) -> None:
    """masked_fill, where, baddbmm, a scaled query, bmm of folded heads, keys turned beforehand."""
    q, k, v = (torch.randn(4, 6, 8) for _ in range(3))
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    bias = torch.zeros(4, 6, 6)
    zero = torch.tensor(-1e9)

    def masked_fill() -> Tensor:
        return (torch.bmm(q, k.mT) * 0.3).masked_fill(hidden, -math.inf).softmax(-1) @ v

    def where() -> Tensor:
        return torch.where(hidden, zero, torch.bmm(q, k.mT)).softmax(-1) @ v

    def baddbmm() -> Tensor:
        return torch.bmm(torch.baddbmm(bias, q, k.mT, alpha=0.3).softmax(-1), v)

    def scaled_query() -> Tensor:
        return torch.bmm(torch.bmm(q * 0.3, k.permute(0, 2, 1)).softmax(-1), v)

    trace, cases = recorded(tmp_path / "t", masked_fill, where, baddbmm, scaled_query)
    regions = attention_regions(trace)
    assert len(regions) == 4
    assert [r.mask is None for r in regions] == [False, False, False, True]
    for region, ops in zip(regions, cases, strict=True):
        assert set(region.ops) <= set(ops)
        assert region.ops[-1] == ops[-1]
        assert trace.meta(region.key).shape == (4, 6, 8)


def test_modules_attention_is_a_region(tmp_path: Path) -> None:
    attention = torch.nn.MultiheadAttention(16, 2)
    x = torch.randn(5, 2, 16)
    trace, _ = recorded(tmp_path / "t", lambda: attention(x, x, x))
    assert [r.name for r in attention_regions(trace)] == ["eager attention"]


def test_a_softmax_that_is_no_attention_is_none(tmp_path: Path) -> None:
    """A router, a classifier, a pooling by weights that no product made."""
    x, w, v = torch.randn(6, 8), torch.randn(8, 4), torch.randn(6, 6)

    def router() -> Tensor:
        return (x @ w).softmax(-1).topk(2).values

    def classifier() -> Tensor:
        return (x @ w).softmax(-1)

    def pooling() -> Tensor:
        return v.softmax(-1) @ x

    def right_operand() -> Tensor:
        return v @ (x @ w).softmax(-1)

    trace, _ = recorded(tmp_path / "t", router, classifier, pooling, right_operand)
    assert attention_regions(trace) == []


def test_regions_of_several_layers_come_in_order(tmp_path: Path) -> None:
    q = torch.randn(2, 6, 8)
    with sdpa_kernel(SDPBackend.MATH):
        trace, _ = recorded(
            tmp_path / "t",
            lambda: eager(q, q, q),
            lambda: F.scaled_dot_product_attention(q, q, q),
            lambda: eager(q, q, q),
        )
    found: list[AttentionRegion] = attention_regions(trace)
    assert [r.name for r in found] == ["eager attention", "math path", "eager attention"]
    assert all(a.ops[-1] < b.ops[0] for a, b in pairwise(found))


# ---- CPU libraries -----------------------------------------------------------------------------------------------


def product(op: str, dtype: str, shapes: list[tuple[int, ...]], **flags: Any) -> str | None:
    """The library of a product of two leaves, and its routine."""
    build = Builder(
        flags={"mkldnn.enabled": True, "cpu_capability": "AVX512", **flags},
        versions={"mkl": "2024.2"},
    )
    leaves = [build.leaf(f"x{i}", shape=shape, dtype=dtype) for i, shape in enumerate(shapes)]
    build.op(op, *leaves, shape=(1,))
    found = Picks(build.build()).of(0)
    return None if found is None else f"{found.library} {found.name.split(': ')[1]}"


@pytest.mark.parametrize(
    ("op", "dtype", "shapes", "expected"),
    [
        ("mm", "float32", [(4, 8), (8, 4)], "MKL SGEMM"),
        ("mm", "float64", [(4, 8), (8, 4)], "MKL DGEMM"),
        ("addmm", "float32", [(4,), (4, 8), (8, 4)], "MKL SGEMM"),
        ("mm", "bfloat16", [(16, 16), (16, 16)], "ATen own loop"),
        ("mm", "bfloat16", [(16, 16), (16, 17)], "oneDNN matmul"),
        ("mm", "int64", [(4, 8), (8, 4)], "ATen own loop"),
        ("bmm", "float32", [(2, 4, 8), (2, 8, 4)], "ATen own loop"),
        ("bmm", "float32", [(2, 8, 8), (2, 8, 8)], "MKL SGEMM_BATCH"),
        ("bmm", "float32", [(1, 8, 8), (1, 8, 8)], "MKL SGEMM"),
        ("bmm", "bfloat16", [(9, 8, 8), (9, 8, 8)], "oneDNN matmul"),
        ("mm", "float32", [(0, 8), (8, 4)], None),
        ("mm", "float16", [(64, 64), (64, 64)], None),
    ],
)
def test_products_follow_torchs_rules(
    op: str, dtype: str, shapes: list[tuple[int, ...]], expected: str | None
) -> None:
    """The limits 4096 and 400 are where the library changes; what depends on the CPU has no answer."""
    assert product(op, dtype, shapes) == expected


def test_flags_change_the_library() -> None:
    big = [(64, 64), (64, 64)]
    assert product("mm", "bfloat16", big, **{"mkldnn.enabled": False}) == "ATen own loop"
    assert product("mm", "bfloat16", big, cpu_capability="AVX2") is None
    lower = {"fp32_precision.mkldnn.matmul": "bf16"}
    assert product("mm", "float32", big, **lower) == "oneDNN matmul"
    assert product("mm", "float32", big, **lower, **{"cpu.onednn_bf16": False}) == "MKL SGEMM"
    assert product("mm", "float32", [*big[:1], (64, 0)], **lower) is None
    tf32 = {"fp32_precision.mkldnn.matmul": "tf32"}
    assert product("mm", "float32", big, **tf32) is None
    assert product("mm", "float32", big, **tf32, **{"cpu.units": "avx2 amx_bf16"}) == "MKL SGEMM"
    assert product("mm", "float32", big, **tf32, **{"cpu.units": "amx_fp16"}) == "oneDNN matmul"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_types_of_16_bits_follow_what_onednn_has_units_for(dtype: str) -> None:
    """A flag of the header says so; old traces lack it, and then AVX-512 tells of bfloat16 only."""
    big = [(64, 64), (64, 64)]
    name = {"bfloat16": "cpu.onednn_bf16", "float16": "cpu.onednn_fp16"}[dtype]

    assert product("mm", dtype, big, cpu_capability="AVX2", **{name: True}) == "oneDNN matmul"
    assert product("mm", dtype, big, **{name: False}) == "ATen own loop"
    assert product("mm", dtype, big, cpu_capability="AVX2") is None
    assert product("mm", dtype, big, **{name: "unreadable: RuntimeError"}) == (
        "oneDNN matmul" if dtype == "bfloat16" else None
    )


def test_one_row_of_half_precision_is_torchs_own_dot_products() -> None:
    """A decode step: `linear` of one token. Two rows, or a weight that lies in rows, go to oneDNN."""

    def row(dtype: str, rows: int, units: str, *, turned: bool = True) -> str | None:
        build = Builder(
            flags={
                "mkldnn.enabled": True,
                "cpu.units": units,
                "cpu.onednn_bf16": True,
                "cpu.onednn_fp16": True,
            },
            versions={"mkl": "2024.2"},
        )
        x = build.leaf("x", shape=(rows, 800), dtype=dtype)
        if turned:
            w = build.op("t", build.leaf("w", shape=(40, 800), dtype=dtype))
        else:
            w = build.leaf("w", shape=(800, 40), dtype=dtype)
        build.op("mm", x, w, shape=(rows, 40))
        found = Picks(build.build()).of(int(turned))
        return None if found is None else f"{found.library} {found.name.split(': ')[1]}"

    assert row("float16", 1, "avx512_bf16") == "ATen own dot products"
    assert row("float16", 2, "avx512_bf16") == "oneDNN matmul"
    assert row("float16", 1, "avx512_bf16", turned=False) == "oneDNN matmul"
    assert row("bfloat16", 1, "avx512_bf16") == "oneDNN matmul"
    assert row("bfloat16", 1, "avx2") == "ATen own dot products"


@pytest.mark.parametrize(
    ("op", "engine", "library"),
    [
        ("quantized.linear.default", "x86", "FBGEMM"),
        ("quantized.linear_relu.default", "onednn", "oneDNN"),
        ("quantized.linear_dynamic.default", "qnnpack", "QNNPACK"),
        ("quantized.conv2d.new", "fbgemm", "FBGEMM"),
        ("quantized.conv2d.new", "x86", None),
        ("quantized.linear.default", "an engine of tomorrow", None),
        ("quantized.linear.default", "unreadable: RuntimeError", None),
        ("their_own.linear.default", "x86", None),
    ],
)
def test_quantised_layers_follow_the_engine(op: str, engine: str, library: str | None) -> None:
    """An op of another namespace is none of torch's, whatever its name."""
    build = Builder(flags={"quantized.engine": engine}, versions={"mkl": "2024.2"})
    build.op(op, build.leaf("x"), shape=(1,))
    found = Picks(build.build()).of(0)

    assert (found.library if found is not None else None) == library


def test_the_rules_are_those_of_builds_with_mkl() -> None:
    build = Builder(flags={"mkldnn.enabled": True})
    build.op("mm", build.leaf("x"), build.leaf("y", shape=(8, 4)))
    assert Picks(build.build()).of(0) is None


def test_what_an_op_writes_is_no_factor(tmp_path: Path) -> None:
    """Compiled code calls `addmm.out`: its sizes are those of `addmm`."""
    bias, x, w, out = torch.zeros(5), torch.zeros(4, 32), torch.zeros(32, 5), torch.empty(4, 5)
    trace, cases = recorded(
        tmp_path / "t", lambda: torch.addmm(bias, x, w), lambda: torch.addmm(bias, x, w, out=out)
    )
    sizes = [Picks(trace).sizes(ops[-1]) for ops in cases]

    assert trace.op(cases[1][-1]).name == "aten.addmm.out"
    assert sizes == [(4, 5, 32)] * 2


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="rules of builds with MKL")
def test_convolutions_follow_torchs_own_chooser(tmp_path: Path) -> None:
    """150 random convolutions: oneDNN exactly where `_select_conv_backend` takes it."""
    rng = random.Random(0)
    calls: list[Callable[[], Tensor]] = []
    chosen: list[bool] = []
    for _ in range(150):
        batch, size, kernel = (
            rng.choice((1, 1, 2, 16)),
            rng.choice((6, 30, 90)),
            rng.choice((1, 3, 5)),
        )
        groups, stride, dims = rng.choice((1, 1, 2)), rng.choice((1, 1, 2)), rng.choice((1, 2, 2))
        dtype = rng.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16))
        x = torch.zeros(batch, 4, *(size,) * dims).to(dtype)
        w = torch.zeros(6, 4 // groups, *(kernel,) * dims).to(dtype)
        call = F.conv1d if dims == 1 else F.conv2d
        calls.append(lambda call=call, x=x, w=w, s=stride, g=groups: call(x, w, stride=s, groups=g))
        backend = torch._C._select_conv_backend(
            x, w, None, [stride] * dims, [0] * dims, [1] * dims, False, [0] * dims, groups, None
        )
        chosen.append("Mkldnn" in str(backend))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace, cases = recorded(tmp_path / "t", *calls)
    for ops, onednn in zip(cases, chosen, strict=True):
        found = Picks(trace).of(ops[-1])
        assert found is not None
        assert (found.library == "oneDNN") == onednn, (trace.op(ops[-1]), found)
    assert 0.1 < sum(chosen) / len(chosen) < 0.9


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="rules of builds with MKL")
def test_threads_choose_who_computes_a_1x1_convolution_of_a_small_batch(tmp_path: Path) -> None:
    """A 3x3 kernel and a batch of 16 go to oneDNN on one thread, too, and their reason names no thread."""
    x = torch.zeros(16, 4, 8, 8)
    pointwise, wider = torch.zeros(6, 4, 1, 1), torch.zeros(6, 4, 3, 3)
    threads = torch.get_num_threads()
    found: dict[int, list[tuple[str | None, str | None]]] = {}
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            trace, cases = recorded(
                tmp_path / f"t{count}",
                lambda: F.conv2d(x[:4], pointwise),
                lambda: F.conv2d(x, pointwise),
                lambda: F.conv2d(x[:4], wider),
            )
            picks = [Picks(trace).of(ops[-1]) for ops in cases]
            found[count] = [(p.library, p.reason) for p in picks if p is not None]
    finally:
        torch.set_num_threads(threads)

    others = [("oneDNN", "batch 16 > 1"), ("oneDNN", "batch 4 > 1")]
    assert found == {
        1: [("ATen", "1x1 kernel and batch 4 < 16 on one thread"), *others],
        2: [("oneDNN", "batch 4 > 1, on 2 threads"), *others],
    }


@dataclass
class Named:
    """As much of an op as the rule asks for."""

    name: str


@pytest.mark.parametrize(
    ("units", "other", "library"),
    [
        ("avx2 avx512_f", "float8_e4m3fn", "MKL"),
        ("avx2 avx512_f amx_tile amx_int8", "float8_e4m3fn", "oneDNN"),
        ("avx2 avx512_f amx_tile amx_int8", "float8_e5m2", "MKL"),
        ("avx2 avx512_f amx_tile amx_int8 amx_fp16", "float8_e5m2", "oneDNN"),
    ],
)
def test_products_of_float8_follow_the_units_of_the_cpu(units: str, other: str, library: str):
    """Of one type they go to oneDNN with AMX-INT8, of two with AMX-FP16; else they are multiplied as float32."""
    flags = {"mkldnn.enabled": True, "cpu.units": units}
    one = TensorMeta((), (), "float32", "cpu")
    metas = [
        *(TensorMeta((16, 16), (16, 1), dtype, "cpu") for dtype in ("float8_e4m3fn", other)),
        one, one,
    ]  # fmt: skip

    found = scaled(
        Named("aten._scaled_mm.default"), metas, {}, lambda name, default: flags.get(name, default)
    )  # type: ignore[arg-type]

    assert found is not None
    assert found.library == library
