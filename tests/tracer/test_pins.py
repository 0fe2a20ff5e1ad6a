"""What a report tells to type so that both runs take the same kernel: for every kind of pick, and that it can be typed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch

import opdrift
from opdrift.causes import pins
from opdrift.records import Pick
from opdrift.testing import Builder


def routine(detail: str, library: str, reason: str = "float32 goes to BLAS") -> Pick:
    return Pick(f"aten.mm.default: {detail}", library, None, reason)


SGEMM = routine("SGEMM", "MKL")
ONEDNN = routine("matmul", "oneDNN", "bfloat16, m n k = 8000 > 4096")
FLASH = Pick("aten._scaled_dot_product_flash_attention.default", "ATen", "FLASH_ATTENTION")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Puts back what the advice sets."""
    engine, threads = torch.backends.quantized.engine, torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch._C._set_mkldnn_enabled(True)
    torch.backends.nnpack.set_flags(True)
    torch.backends.mha.set_fastpath_enabled(True)
    torch.backends.quantized.engine = engine


@pytest.mark.parametrize(
    ("left", "right", "words"),
    [
        (FLASH, Pick("math path", "ATen", "MATH"), "sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"),
        (FLASH, Pick("eager attention", "ATen", None, "attention written out in ops"), "attn_implementation"),
        (
            Pick("aten._native_multi_head_attention.default", "ATen", None, "the fast path of nn.MultiheadAttention"),
            FLASH,
            "torch.backends.mha.set_fastpath_enabled(False)",
        ),
        (ONEDNN, routine("own loop", "ATen", "oneDNN is switched off"), "torch.backends.mkldnn.enabled = False"),
        (ONEDNN, routine("own loop", "ATen", "m n k = 4000 <= 4096"), "same batch size"),
        (ONEDNN, routine("own loop", "ATen", "m n k = 4000 <= 4096"), "torch.backends.mkldnn.enabled = False"),
        (
            routine("matmul", "oneDNN", "float32, rounded to bf16, m n k = 8000 > 4096"),
            SGEMM,
            'torch.set_float32_matmul_precision("highest")',
        ),
        (routine("own dot products", "ATen", "one row of float16"), ONEDNN, "a single row of 16 bits"),
        (
            routine("product", "FBGEMM", "the quantized engine is x86"),
            routine("product", "oneDNN", "the quantized engine is onednn"),
            "torch.backends.quantized.engine",
        ),
        (routine("convolution", "NNPACK"), routine("im2col and SGEMM", "ATen"), "torch.backends.nnpack.set_flags(False)"),
        (
            routine("im2col and SGEMM", "ATen", "1x1 kernel and batch 4 < 16 on one thread"),
            routine("convolution", "oneDNN", "batch 4 > 1, on 2 threads"),
            "torch.set_num_threads(1)",
        ),
        (
            routine("im2col and SGEMM", "ATen", "1x1 kernel and batch 4 < 16 on one thread"),
            routine("convolution", "oneDNN", "batch 20 > 1"),
            "same batch size",
        ),
        (ONEDNN, routine("brg_matmul:avx2", "oneDNN"), "ONEDNN_MAX_CPU_ISA=AVX2"),
        (SGEMM, routine("SGEMM_BATCH", "MKL"), "same batch size: which routine multiplies"),
        (Pick("gemm_a", "cuBLAS", None, source="profiler"), Pick("gemm_b", "cuBLAS", None, source="profiler"), "torch.backends.cudnn.benchmark = False"),
    ],
)  # fmt: skip
def test_every_kind_of_pick_has_advice_of_its_own(left: Pick, right: Pick, words: str):
    assert words in pins.of_other_picks(left, right)
    assert words in pins.of_other_picks(right, left)


def test_the_statements_can_be_typed():
    """Without an error and without a warning: each statement in the advice runs as it stands."""
    advice = [value for value in vars(pins).values() if isinstance(value, str)]
    statements = {
        found
        for text in advice
        for found in re.findall(r"torch\.[\w.]+ = \w+|torch\.[\w.]+\([^()]*\)", text)
        if "STRICT" not in found
    }

    for statement in statements:
        exec(statement, {"torch": torch})

    assert len(statements) >= 5
    assert not torch.backends.mkldnn.enabled


def test_products_of_mkl_have_a_variable_that_makes_them_alike_and_others_have_none():
    """By the vector units that the run used."""
    assert "set MKL_CBWR=AVX512,STRICT" in pins.of_other_sizes(SGEMM, "AVX512")
    assert "set MKL_CBWR=AVX2,STRICT" in pins.of_other_sizes(SGEMM, None)
    assert "MKL_CBWR" not in pins.of_other_sizes(ONEDNN, "AVX512")


Run = Callable[[Builder], None]


def notes(left: Run, right: Run) -> str:
    """What is said beside the diagnosis of two runs that read the same input in the module `a`."""
    traces = []
    for body in (left, right):
        build = Builder()
        with build.scope("a"):
            body(build)
        traces.append(build.build())
    return " ".join(opdrift.diff(*traces).notes)


def viewed(build: Builder) -> None:
    build.output(build.op("view", build.leaf("x", kind="input"), shape=(8, 4)))


def copied(build: Builder) -> None:
    clone = build.op("clone", build.leaf("x", kind="input"), content=build.content(1))
    build.output(
        build.op("_unsafe_view", clone, shape=(8, 4), content=build.content(1).reshape(8, 4))
    )


def test_a_reshape_that_copies_on_one_side_is_explained_and_is_no_divergence():
    """One sample makes a transposed tensor contiguous; the program decided nothing."""
    assert "1 times the left run views what the right one copies" in notes(viewed, copied)
    assert "1 times the right run views what the left one copies" in notes(copied, viewed)


def test_a_copy_that_the_program_makes_is_not_explained_so():
    """A clone alone is no `reshape`."""

    def cloned(build: Builder) -> None:
        clone = build.op("clone", build.leaf("x", kind="input"), content=build.content(1))
        build.output(build.op("view", clone, shape=(8, 4)))

    assert "copies" not in notes(viewed, cloned)


def test_the_cause_of_a_material_difference_has_the_advice_too():
    """One run has oneDNN switched off, and the product differs by more than rounding: the switch, and the kernels it chose."""

    def product(enabled: bool, change: str) -> opdrift.Trace:
        build = Builder(
            flags={"mkldnn.enabled": enabled, "cpu.onednn_bf16": True}, versions={"mkl": "2024.2"}
        )
        x, w = (
            build.op("sin", build.leaf(n, kind="input", shape=(64, 64), dtype="bfloat16"))
            for n in ("x", "w")
        )
        build.output(build.op("mm", x, w, shape=(64, 64), change=change))  # type: ignore[arg-type]
        return build.build()

    found = {c.slug: c.try_ for c in opdrift.diff(product(True, ""), product(False, "*")).causes}

    assert "As in the left run: torch.backends.mkldnn.enabled = True" in found["flags"]
    assert found["kernel"].startswith("Switch oneDNN on or off in both runs")
