"""Kernels that the profiler saw are what an op ran, and two sides that ran others are told so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import opdrift
from opdrift.picks import Picks
from opdrift.picks.device import kernel_library, kernel_text
from opdrift.records import Diagnosis, Pick
from opdrift.render import text as report
from opdrift.render.kernels import kernel_report
from opdrift.render.page import Screen
from opdrift.render.trace_text import one_op
from opdrift.testing import Builder

SMALL = "ampere_sgemm_32x32_sliced1x4_tn"
LARGE = "ampere_sgemm_128x64_tn"
SPLIT = [
    "Memset (Device)",
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4>(cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4::Params)",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, float>(cublasLt::cublasSplitKParams<float>, float const*)",
]
RELU = "void at::native::vectorized_elementwise_kernel<4, at::native::launch_clamp_scalar(at::TensorIteratorBase&, c10::Scalar)::{lambda()#1}, std::array<char*, 2ul> >(int, std::array<char*, 2ul>)"
FLASH = "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4> >(pytorch_flash::Flash_fwd_params)"


def run(
    op: str,
    kernels: Sequence[str] | None,
    *,
    change: Any = "",
    raw: Sequence[str] = (),
    ambiguous: bool = False,
    rows: int = 4,
) -> opdrift.Trace:
    """A run of one op of two operands on a GPU, and the kernels that it launched; None if nobody looked on."""
    build = Builder(device="cuda:0", flags={"cuda.capability": "8.0"}, versions={"cuda": "12.8"})
    x = build.leaf("x", kind="input", shape=(rows, 8))
    with build.scope("fc"):
        out = build.op(op, x, build.leaf("w", shape=(8, 8)), shape=(rows, 8), change=change)
    build.output(out)
    if kernels is not None:
        names = list(dict.fromkeys(kernels))
        build.mark(
            "kernels",
            source="profiler",
            first=1,
            last=1,
            names=names,
            ops=[[1, [names.index(kernel) for kernel in kernels]]] if kernels else [],
            raw=[[1, text] for text in raw],
            ambiguous=[1] if ambiguous else [],
        )
    return build.build()


def chosen(trace: opdrift.Trace) -> Pick | None:
    return Picks(trace).of(0)


# ---- names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "library"),
    [
        (SMALL, SMALL, "cuBLAS"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT", "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT", "cuBLAS"),
        ("void gemv2T_kernel_val<int, int, float>(cublasGemvTensorStridedBatched<float>, float)", "gemv2T_kernel_val<int, int, float>", "cuBLAS"),
        (RELU, RELU.removeprefix("void ").rpartition("(int, std")[0], "ATen"),
        ("void (anonymous namespace)::softmax_warp_forward<float, 8>(float*, int)", "(anonymous namespace)::softmax_warp_forward<float, 8>", None),
        (FLASH, FLASH.removeprefix("void ").partition("(")[0], "FlashAttention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<>::Params)", "fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "CUTLASS"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128", "cuDNN"),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128", "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128", "cuDNN"),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize64x64", "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize64x64", "cuBLAS"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "NCCL"),
        ("triton_poi_fused_add_relu_0", "triton_poi_fused_add_relu_0", "Triton"),
        ("Cijk_Ailk_Bljk_HHS_BH_MT64x64x16", "Cijk_Ailk_Bljk_HHS_BH_MT64x64x16", "hipBLAS"),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH (Device -> Pinned)", None),
        ("somebodys_kernel", "somebodys_kernel", None),
        ("void marlin::Marlin_gemm_kernel<4>(int4 const*)", "marlin::Marlin_gemm_kernel<4>", None),
        ("_w8a8_block_fp8_matmul_gemm", "_w8a8_block_fp8_matmul_gemm", None),
        ("void gemmSN_TN_kernel<float, 128, 16>(cublasGemmSmallNParams<float>)", "gemmSN_TN_kernel<float, 128, 16>", "cuBLAS"),
        ("void cutlass::device_kernel<GemmUniversal<Shape>>(GemmUniversal<Shape>::Params)", "cutlass::device_kernel<GemmUniversal<Shape>>", "CUTLASS"),
        ("void regular_fft<256u, 16u, float>(kernel_arguments_t<unsigned int>)", "regular_fft<256u, 16u, float>", "cuFFT"),
        ("broken)", "broken)", None),
        ("", "", None),
    ],
)  # fmt: skip
def test_a_kernels_name_is_shortened_and_tells_its_library(
    name: str, text: str, library: str | None
):
    """Template arguments tell kernels apart and stay; what is not known keeps its name."""
    assert (kernel_text(name), kernel_library(name)) == (text, library)


# ---- picks -------------------------------------------------------------------------------------------------


def test_an_op_ran_the_kernel_that_computes_among_those_it_launched():
    """Not the fill before it, nor the sum of its parts after it."""
    assert chosen(run("mm", SPLIT)) == Pick(
        "aten.mm.default: cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4",
        "cuBLAS",
        source="profiler",
        observed=(
            "Memset (Device)",
            "cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4>",
            "cublasLt::splitKreduce_kernel<32, 16, int, float, float>",
        ),
    )


def test_kernels_of_one_name_are_counted():
    found = chosen(run("mm", [SMALL, SMALL, LARGE]))

    assert found is not None
    assert found.observed == (f"2 x {SMALL}", LARGE)


def test_attention_keeps_its_backend_and_gains_its_kernel():
    found = chosen(run("_scaled_dot_product_flash_attention", [FLASH]))

    assert found is not None
    assert (found.backend, found.library, found.source) == ("FLASH_ATTENTION", "FlashAttention", "dispatcher")  # fmt: skip
    assert found.observed == (FLASH.removeprefix("void ").partition("(")[0],)


@pytest.mark.parametrize(
    ("kernels", "ambiguous"), [(None, False), ([], False), ([LARGE], True)], ids=["unwatched", "none", "cut"]
)  # fmt: skip
def test_what_is_not_known_is_not_told(kernels: list[str] | None, ambiguous: bool):
    """Nobody looked on; nothing was launched; the window was cut within the op."""
    assert chosen(run("mm", kernels, ambiguous=ambiguous)) is None


def test_the_reports_on_one_trace_show_kernels():
    """By module, and for one op with what could not be joined."""
    trace = run("mm", [LARGE], raw=["nccl, launched by nothing that the profiler saw"])

    assert f"aten.mm.default: {LARGE} [cuBLAS]" in kernel_report(trace, [0], Screen())
    shown = one_op(trace, trace.op(0), Screen())
    assert f"aten.mm.default: {LARGE} [cuBLAS]" in shown
    assert f"ran {LARGE}" not in shown  # said already
    assert "nccl, launched by nothing that the profiler saw" in shown


def test_why_nothing_was_seen_is_said_once():
    """A profiler of the program's that came and went."""
    build = Builder()
    for _ in range(3):
        build.mark("kernels", source="profiler", refused="the program started its own profiler")

    shown = kernel_report(build.build(), [], Screen())

    assert shown.count("the program started its own profiler") == 1


# ---- two runs ----------------------------------------------------------------------------------------------


def diff(left: opdrift.Trace, right: opdrift.Trace) -> Diagnosis:
    return opdrift.diff(left, right)


def test_another_kernel_with_another_result_is_the_cause():
    """A product that the batch size gave to another kernel: both names, and how to make them the same."""
    found = diff(run("mm", [SMALL]), run("mm", [LARGE], change="*")).first

    assert found is not None
    assert found.cause.slug == "kernel"
    assert f"left ran {SMALL} of cuBLAS; right ran {LARGE} of cuBLAS" in found.cause.summary
    assert (found.kernel.left, found.kernel.right) == (
        Pick(f"aten.mm.default: {SMALL}", "cuBLAS", source="profiler", observed=(SMALL,)),
        Pick(f"aten.mm.default: {LARGE}", "cuBLAS", source="profiler", observed=(LARGE,)),
    )


def test_another_kernel_that_only_rounds_otherwise_is_named_too():
    """Nothing is wrong then, and the names say why the bits differ."""
    found = diff(run("mm", [SMALL]), run("mm", [LARGE], change="~")).first

    assert found is not None
    assert found.cause.slug == "rounding"
    assert f"left ran {SMALL} of cuBLAS; right ran {LARGE} of cuBLAS" in found.cause.summary
    assert "the same batch size" in (found.cause.try_ or "")


def test_the_same_kernel_on_both_sides_is_no_cause():
    """The nearest thing: it is shown, and said to be the same."""
    diagnosis = diff(run("mm", [LARGE]), run("mm", [LARGE], change="~"))

    assert diagnosis.first is not None
    assert diagnosis.first.cause.slug == "rounding"
    assert "left ran" not in diagnosis.first.cause.summary
    assert f"same on both sides: aten.mm.default: {LARGE} [cuBLAS]" in report.render(
        diagnosis, Screen()
    )


def test_one_side_without_kernels_is_no_difference():
    """It was recorded without kernels='full'."""
    found = diff(run("mm", None), run("mm", [LARGE], change="~")).first

    assert found is not None
    assert "ran" not in found.cause.summary


def test_one_kernel_with_other_template_arguments_is_told_by_its_calls():
    """An elementwise kernel vectorised by 4 against one by 2."""
    left, right = run("mul", [RELU]), run("mul", [RELU.replace("<4, ", "<2, ")], change="*")

    found = diff(left, right).first

    assert found is not None
    assert found.cause.slug == "kernel"
    assert [e.partition("<")[2][:3] for e in found.cause.evidence if " called " in e] == ["4, ", "2, "]  # fmt: skip
