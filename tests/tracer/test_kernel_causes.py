"""Two recorded runs that torch gave to different kernels: what each ran, why, and what made the difference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (as torch writes it)
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import opdrift
from opdrift.records import Diagnosis
from opdrift.testing import Builder

Q, K, V = torch.randn(3, 2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
BIAS = torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(1))


def compared(folder: Path, left: Callable[[], object], right: Callable[[], object]) -> Diagnosis:
    """The diagnosis of two calls."""
    for name, call in (("left", left), ("right", right)):
        with opdrift.record(folder / name, kernels="off", integrity="off"):
            call()
    return opdrift.diff(folder / "left", folder / "right")


class Attention(nn.Module):
    """Attention with given tensors, so that both runs have one scope."""

    def __init__(self, *, mask: Tensor | None = None, turn: bool = False) -> None:
        super().__init__()
        self.mask, self.turn = mask, turn

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.turn:
            q = q.transpose(2, 3).contiguous().transpose(2, 3)
        return F.scaled_dot_product_attention(q.sin(), k, v, self.mask) * 2


def attend(**options: object) -> Callable[[], object]:
    """One call of an `Attention` that no gradient is wanted of."""
    return lambda: torch.no_grad()(Attention(**options))(Q, K, V)  # type: ignore[arg-type]


def said(found: Diagnosis) -> str:
    assert found.first is not None
    return found.first.cause.summary


def test_a_mask_of_another_shape_changes_the_backend(tmp_path: Path) -> None:
    """The same numbers: a bias of 3 dims is broadcast by torch, and taken by no fused kernel."""
    found = compared(tmp_path, attend(mask=BIAS[None]), attend(mask=BIAS))

    assert found.verdict == "rounding"
    assert "right ran MATH because attn_mask has 3 dims; fused kernels take 2 or 4" in said(found)
    assert found.first is not None
    assert (
        "what changed the pick: attn_mask: float32[1, 4, 6, 6] against float32[4, 6, 6]"
        in found.first.cause.evidence
    )
    assert found.first.kernel.left is not None
    assert found.first.kernel.left.backend == "FLASH_ATTENTION"


def test_under_inference_mode_both_backends_are_told_though_the_op_is_the_same(
    tmp_path: Path,
) -> None:
    """One op on both sides, equal inputs: only the rules tell that other kernels ran."""

    def run(backend: SDPBackend) -> Callable[[], object]:
        def inner() -> None:
            with torch.inference_mode(), sdpa_kernel(backend):
                Attention()(Q, K, V)

        return inner

    found = compared(tmp_path, run(SDPBackend.FLASH_ATTENTION), run(SDPBackend.MATH))

    assert found.verdict == "rounding"
    assert (
        "left ran FLASH_ATTENTION; right ran MATH because the flash backend is switched off"
        in said(found)
    )
    assert found.first is not None
    assert "what changed the pick: the flash switch: on against off" in found.first.cause.evidence


def inferred(**options: object) -> Callable[[], object]:
    """One call of an `Attention` under inference mode, where it is a single op."""
    return lambda: torch.inference_mode()(Attention(**options))(Q, K, V)  # type: ignore[arg-type]


def test_a_tensor_that_lies_otherwise_gives_rounding_under_inference_mode(tmp_path: Path) -> None:
    """The query's numbers are equal and lie in another order: only the pick of the backend differs."""
    found = compared(tmp_path, inferred(), inferred(turn=True))

    assert found.verdict == "rounding"
    assert "right ran MATH because the last dim is not contiguous" in said(found)


@pytest.mark.parametrize(
    ("hides", "verdict", "slug"), [(False, "rounding", "rounding"), (True, "diverged", "mask")]
)
def test_a_mask_of_zeros_is_no_other_argument(
    tmp_path: Path, hides: bool, verdict: str, slug: str
) -> None:
    """It changes no score, and the backend that runs because of it rounds otherwise; one element that hides is a mask."""
    mask = torch.zeros(6, 6)
    mask[0, 5] = float("-inf") if hides else 0.0
    found = compared(tmp_path, inferred(), inferred(mask=mask.requires_grad_()))

    assert found.first is not None
    assert (found.verdict, found.first.cause.slug) == (verdict, slug)


def test_equal_backends_are_not_spoken_of(tmp_path: Path) -> None:
    """Another mask, another result, the same kernel: nothing changed the pick."""
    found = compared(tmp_path, attend(mask=BIAS[None]), attend(mask=BIAS[None] * 2))

    words = " ".join(w for c in found.causes for w in (c.summary, *c.evidence))
    assert found.verdict == "diverged"
    assert " ran " not in words
    assert "changed the pick" not in words


def test_narrower_values_are_the_cause_and_the_backend_follows(tmp_path: Path) -> None:
    """No backend gives back the numbers that the call was not given."""

    def run(size: int) -> Callable[[], object]:
        return lambda: F.pad(F.scaled_dot_product_attention(Q, K, V[..., :size]), (0, 8 - size)) * 2

    found = compared(tmp_path, run(8), run(4))

    assert found.first is not None
    assert found.first.cause.slug == "op-args"
    assert said(found).endswith("and head size of value: 8 against 4")
    assert any("right ran MATH because head sizes differ" in c.summary for c in found.causes)


def test_equal_heads_are_no_setting_that_differs(tmp_path: Path) -> None:
    """Another backend and another result, by a mask whose numbers differ."""
    found = compared(tmp_path, attend(mask=BIAS[None]), attend(mask=BIAS * 2))

    words = " ".join(w for c in found.causes for w in (c.summary, *c.evidence))
    assert found.verdict == "diverged"
    assert "head size of" not in words


def test_attention_in_a_wider_type_names_the_casts_and_not_the_batch(tmp_path: Path) -> None:
    """It agrees up to rounding, and equal bits need equal types."""

    def wide() -> Tensor:
        doubles = [t.double() for t in (Q, K, V)]
        return F.scaled_dot_product_attention(*doubles).float() * 2

    found = compared(tmp_path, lambda: F.scaled_dot_product_attention(Q, K, V) * 2, wide)

    assert found.verdict == "rounding"
    assert found.first is not None
    assert said(found).endswith(": the right run computes it in float64")
    assert "cast to float64 in both runs, or in neither" in found.first.cause.try_
    assert any("right: cast by " in each for each in found.first.cause.evidence)


def test_types_are_not_spoken_of_where_both_runs_compute_in_one(tmp_path: Path) -> None:
    """Another backend, with float64 on both sides."""
    q, k, v = Q.double(), K.double(), V.double()

    def run(backend: SDPBackend) -> Callable[[], object]:
        def inner() -> None:
            with torch.no_grad(), sdpa_kernel(backend):
                F.scaled_dot_product_attention(q.float().double(), k, v) * 2

        return inner

    found = compared(tmp_path, run(SDPBackend.FLASH_ATTENTION), run(SDPBackend.MATH))

    assert found.verdict == "rounding"
    assert found.first is not None
    assert "computes it in" not in said(found)
    assert "in both runs, or in neither" not in found.first.cause.try_


def test_the_fast_path_of_multihead_attention_is_told_with_torchs_words(tmp_path: Path) -> None:
    """With gradients the module computes by itself; torch says why, and the report quotes it."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 16)

    def run(grad: bool) -> Callable[[], object]:
        def inner() -> None:
            with torch.set_grad_enabled(grad):
                attention(x, x, x, need_weights=False)

        return inner

    found = compared(tmp_path, run(False), run(True))

    assert (
        "left ran the fast path of nn.MultiheadAttention; right ran FLASH_ATTENTION because grad is enabled"
        in said(found)
    )
    trace = opdrift.load(tmp_path / "right")
    words = [m.fields["MultiheadAttention"] for m in trace.marks if m.kind == "fast-path"]
    assert len(words) == 1
    assert words[0].startswith("grad is enabled")


def test_attention_that_the_program_writes_out_is_not_pinned_by_switches(tmp_path: Path) -> None:
    """No setting of torch makes it another kernel; the advice is to write both alike."""

    class Written(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            weights = (q.sin() @ k.transpose(-1, -2) / 8**0.5).softmax(-1)
            return weights @ v * 2

    found = compared(tmp_path, attend(), lambda: torch.no_grad()(Written())(Q, K, V))

    assert found.verdict == "rounding"
    assert "left ran FLASH_ATTENTION; right ran attention written out in ops" in said(found)
    assert found.first is not None
    assert "attn_implementation" in found.first.cause.try_
    assert "sdpa_kernel" not in found.first.cause.try_


class Projected(nn.Module):
    """Attention under a mask, behind a projection that has gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)
        nn.init.eye_(self.q.weight)
        nn.init.zeros_(self.q.bias)

    def forward(self, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(self.q(Q), K, V, mask) * 2


def inferred_and_trained(folder: Path, masks: tuple[Tensor | None, Tensor | None]) -> Diagnosis:
    """Inference on the left against a step of training on the right, each under a mask."""
    model = Projected()
    with torch.no_grad(), opdrift.record(folder / "left", model=model, integrity="off"):
        model(masks[0])
    with opdrift.record(folder / "right", model=model, integrity="off"):
        model(masks[1]).sum().backward()
    return opdrift.diff(folder / "left", folder / "right")


def test_a_backward_pass_of_masked_attention_is_not_taken_for_a_mask_of_one_run(
    tmp_path: Path,
) -> None:
    """Inference against a step of training, both masked: what the step has alone are its gradients."""
    found = inferred_and_trained(tmp_path, (BIAS[None], BIAS[None]))

    assert {c.slug for c in found.causes} == {"structure"}
    assert said(found).startswith("the right run goes backward as well, the left run does not")
    assert found.first is not None
    assert any("none of them is known to differ" in w for w in found.first.cause.evidence)


def test_a_mask_that_only_the_training_step_has_is_still_told(tmp_path: Path) -> None:
    """The nearest case: there is a backward pass, and the forward one is masked in one run only."""
    hiding = torch.full((1, 1, 6, 6), float("-inf")).triu(1)
    found = inferred_and_trained(tmp_path, (None, hiding))

    assert found.verdict == "diverged"
    assert found.first is not None
    assert found.first.phase == "forward"
    assert found.first.cause.slug == "mask"


@pytest.mark.parametrize("other", [True, False])
def test_an_input_in_another_memory_format_is_named(other: bool):
    """The convolution's kernel follows from the strides of its input: equal elements, another order of adding."""
    traces = []
    for strides, change in ((None, ""), ((3136, 1, 224, 16) if other else None, "~")):
        build = Builder()
        shape = (2, 16, 14, 14)
        x = build.leaf("x", kind="input", shape=shape, stride=strides)
        weight = build.leaf("conv.weight", shape=(16, 16, 3, 3))
        with build.scope("conv"):
            build.output(build.op("convolution", x, weight, shape=shape, change=change))
        traces.append(build.build())

    found = opdrift.diff(*traces)

    assert found.verdict == "rounding"
    assert found.first is not None
    said = " ".join(found.first.cause.evidence)
    named = "lies in memory in another order: left contiguous, right channels_last" in said
    assert named == other
    assert ("memory_format" in found.first.cause.try_) == other
