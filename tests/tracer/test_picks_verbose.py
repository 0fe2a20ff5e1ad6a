"""What oneDNN and MKL said of an op comes first, torch's rules second; and the diff tells both sides' calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import opdrift
from opdrift.picks import Picks
from opdrift.picks.verbose import Routine, read_line
from opdrift.records import Diagnosis, Pick
from opdrift.render.kernels import kernel_report
from opdrift.render.page import Screen
from opdrift.render.trace_text import one_op
from opdrift.testing import Builder

MATMUL = "onednn_verbose,v1,primitive,exec,cpu,matmul,{},undef,src:bf16::blocked:ab::f0,attr-scratchpad:user{},,{}"
BRG = MATMUL.format("brg_matmul:avx512_core_bf16", " attr-post-ops:sum", "64x64:64x64")
AMX = MATMUL.format("brg_matmul:avx512_core_amx", " attr-post-ops:sum", "64x64:64x64")
REORDER = "onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef,src:f32::blocked:ab::f0,attr-scratchpad:user,,8x3"
GELU = "onednn_verbose,v1,primitive,exec,cpu,eltwise,jit:avx2,forward_training,data:f32::blocked:a::f0,,alg:eltwise_gelu_erf alpha:0 beta:0,8"


def sgemm(rows: int, threads: int, name: str = "SGEMM") -> str:
    return f"MKL_VERBOSE {name}(T,N,64,{rows},64,*,*,64,*,64,*,*,64) CNR:OFF Dyn:1 FastMM:1 NThr:{threads}"


def build(
    op: str,
    dtype: str,
    lines: Sequence[str] | None,
    *,
    rows: int = 64,
    change: Any = "",
    raw: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    ambiguous: bool = False,
) -> opdrift.Trace:
    """A run of one product of two matrices, and what the libraries said of it; None if nobody listened."""
    found = Builder(
        flags={"mkldnn.enabled": True, "cpu_capability": "AVX512", **(flags or {})},
        versions={"mkl": "2024.2"},
    )
    x = found.leaf("x", kind="input", shape=(rows, 64), dtype=dtype)
    w = found.leaf("w", shape=(64, 64), dtype=dtype)
    out = found.op(op, x, w, shape=(rows, 64), change=change)
    found.output(out)
    if lines is not None:
        names = list(dict.fromkeys(lines))
        found.mark(
            "kernels",
            source="verbose",
            first=1,
            last=1,
            names=names,
            ops=[[1, [names.index(line) for line in lines]]] if lines else [],
            raw=[[1, text] for text in raw],
            ambiguous=[1] if ambiguous else [],
        )
    return found.build()


def chosen(trace: opdrift.Trace) -> Pick | None:
    return Picks(trace).of(0)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            sgemm(1, 2),
            Routine("MKL", "SGEMM", "SGEMM(T,N,64,1,64), 2 threads"),
        ),
        (
            "MKL_VERBOSE SGETRF(64,64,*,64,*,0) CNR:AVX2 Dyn:1 FastMM:1 NThr:1",
            Routine("MKL", "SGETRF", "SGETRF(64,64), 1 thread, CNR:AVX2"),
        ),
        (
            BRG,
            Routine(
                "oneDNN",
                "matmul brg_matmul:avx512_core_bf16",
                "matmul brg_matmul:avx512_core_bf16, 64x64:64x64, attr-post-ops:sum",
            ),
        ),
        (GELU, Routine("oneDNN", "eltwise_gelu_erf jit:avx2", "eltwise_gelu_erf jit:avx2, 8")),
        ("onednn_verbose,v1,graph,exec,cpu", Routine(None, "onednn_verbose,v1,graph,exec,cpu", "onednn_verbose,v1,graph,exec,cpu")),
    ],
)  # fmt: skip
def test_a_line_tells_library_routine_sizes_and_threads(line: str, expected: Routine):
    """A line of another form is itself."""
    assert read_line(line) == expected


class TestPick:
    """One op, by rule and by what was said."""

    def test_the_library_that_the_rules_name_is_refined(self):
        found = chosen(build("mm", "bfloat16", [REORDER, BRG, BRG]))

        assert found == Pick(
            "aten.mm.default: matmul brg_matmul:avx512_core_bf16",
            "oneDNN",
            None,
            "bfloat16, m n k = 262144 > 4096",
            source="verbose",
            observed=(
                "reorder jit:uni, 8x3",
                "2 x matmul brg_matmul:avx512_core_bf16, 64x64:64x64, attr-post-ops:sum",
            ),
        )

    def test_another_library_than_by_rule_is_believed_and_said(self):
        found = chosen(build("mm", "float32", [BRG]))

        assert found is not None
        assert (found.library, found.source) == ("oneDNN", "verbose")
        assert found.reason == "by torch's rules it would be SGEMM of MKL"

    def test_silence_of_both_libraries_is_believed_too(self):
        found = chosen(build("mm", "float32", []))

        assert found is not None
        assert (found.name, found.library, found.observed) == (
            "aten.mm.default: own code",
            "ATen",
            (),
        )
        assert found.reason == "no library said anything; by torch's rules it would be SGEMM of MKL"

    def test_an_op_without_a_rule_is_what_was_said(self):
        found = chosen(
            build(
                "linalg_thing",
                "float32",
                ["MKL_VERBOSE SGETRF(64,64,*) CNR:OFF Dyn:1 FastMM:1 NThr:1"],
            )
        )

        assert found is not None
        assert (found.name, found.library, found.reason) == (
            "aten.linalg_thing.default: SGETRF",
            "MKL",
            None,
        )

    def test_an_op_without_a_rule_that_called_nothing_is_no_choice(self):
        assert chosen(build("relu", "float32", [])) is None

    @pytest.mark.parametrize("told", [None, []], ids=["not watched", "no lines"])
    def test_torchs_own_code_stays_torchs_own(self, told: list[str] | None):
        found = chosen(build("mm", "int64", told))

        assert found is not None
        assert (found.name, found.library, found.source) == (
            "aten.mm.default: own loop",
            "ATen",
            "inferred",
        )

    @pytest.mark.parametrize(
        "said",
        [{"lines": None}, {"lines": [], "raw": ["onednn_verbose,v9,x"]}, {"lines": [BRG], "ambiguous": True}],
        ids=["not watched", "not understood", "ambiguous"],
    )  # fmt: skip
    def test_what_is_not_known_leaves_the_rules(self, said: dict[str, Any]):
        found = chosen(build("mm", "float32", **said))

        assert found is not None
        assert (found.name, found.source, found.observed) == (
            "aten.mm.default: SGEMM",
            "inferred",
            (),
        )

    def test_lines_of_a_form_that_the_reader_does_not_know_do_not_hide_the_rule(self):
        """Recorded by a newer opdrift, say."""
        found = chosen(build("mm", "float32", ["MKL_VERBOSE {new}"]))

        assert found is not None
        assert (found.name, found.observed) == ("aten.mm.default: SGEMM", ("MKL_VERBOSE {new}",))

    def test_attention_stays_the_backend_that_the_op_is(self):
        build = Builder()
        q = build.leaf("q", kind="input", shape=(1, 2, 4, 8))
        build.op("_scaled_dot_product_flash_attention_for_cpu", q, q, q, outputs=2)
        build.mark(
            "kernels", source="verbose", first=1, last=1, names=[sgemm(4, 1)], ops=[[1, [0] * 4]]
        )

        found = Picks(build.build()).of(0)

        assert found is not None
        assert (found.backend, found.source) == ("FLASH_ATTENTION", "dispatcher")
        assert found.observed == ("4 x SGEMM(T,N,64,4,64), 1 thread",)


class TestReports:
    """What people read of one trace."""

    def test_show_kernels_counts_the_calls(self):
        trace = build("mm", "bfloat16", [BRG])

        text = kernel_report(trace, [0], Screen())

        assert "aten.mm.default: matmul brg_matmul:avx512_core_bf16 [oneDNN]  1 time" in text
        assert "ran matmul brg_matmul:avx512_core_bf16, 64x64:64x64, attr-post-ops:sum" in text

    def test_show_kernels_says_first_why_nothing_was_observed(self):
        build = Builder()
        build.mark("kernels", source="verbose", refused="MKL_VERBOSE=1 is set")

        text = kernel_report(build.build(), [], Screen())

        assert text.startswith("which kernels ran was not observed: MKL_VERBOSE=1 is set\n")

    def test_show_op_quotes_what_was_not_understood(self):
        trace = build("mm", "float32", [], raw=["onednn_verbose,v9,x"])

        text = one_op(trace, trace.op(0), Screen())

        assert "said, and not understood: onednn_verbose,v9,x" in text

    def test_show_op_says_when_ops_ran_at_once(self):
        trace = build("mm", "float32", [], ambiguous=True)

        text = one_op(trace, trace.op(0), Screen())

        assert "other ops ran at the same time" in text


def evidence(found: Diagnosis) -> str:
    assert found.first is not None
    return "\n".join(found.first.cause.evidence)


class TestDiff:
    """Two runs of one product whose inputs are equal and whose results are not."""

    def test_another_implementation_is_the_cause_with_both_lines(self):
        left = build("mm", "bfloat16", [BRG])
        right = build("mm", "bfloat16", [AMX], change="*")

        found = opdrift.diff(left, right)

        assert found.first is not None
        assert found.first.cause.slug == "kernel"
        assert (
            "left ran matmul brg_matmul:avx512_core_bf16 of oneDNN (bfloat16, m n k = 262144 > 4096); right ran matmul"
            " brg_matmul:avx512_core_amx of oneDNN"
        ) in found.first.cause.summary
        assert "left called matmul brg_matmul:avx512_core_bf16, 64x64:64x64" in evidence(found)
        assert "right called matmul brg_matmul:avx512_core_amx, 64x64:64x64" in evidence(found)

    def test_within_rounding_the_advice_pins_the_instruction_set(self):
        left = build("mm", "bfloat16", [BRG])
        right = build("mm", "bfloat16", [AMX], change="~")

        found = opdrift.diff(left, right)

        assert found.first is not None
        assert "ONEDNN_MAX_CPU_ISA=AVX2 in the environment of both" in found.first.cause.try_

    def test_within_rounding_it_is_said_beside_rounding(self):
        left = build("mm", "bfloat16", [BRG])
        right = build("mm", "bfloat16", [AMX], change="~")

        found = opdrift.diff(left, right)

        assert found.first is not None
        assert found.first.cause.slug == "rounding"
        assert "right ran matmul brg_matmul:avx512_core_amx of oneDNN" in found.first.cause.summary

    def test_the_same_routine_on_more_threads_is_told(self):
        left = build("mm", "float32", [sgemm(64, 1)])
        right = build("mm", "float32", [sgemm(64, 2)], change="~")

        found = opdrift.diff(left, right)

        assert "kernel: SGEMM of MKL in both" in evidence(found)
        assert "left called SGEMM(T,N,64,64,64), 1 thread" in evidence(found)
        assert "right called SGEMM(T,N,64,64,64), 2 threads" in evidence(found)

    def test_equal_calls_are_not_spoken_of(self):
        """The order in which threads called is no difference."""
        both = [sgemm(64, 1), sgemm(32, 1)]
        left = build("mm", "float32", both)
        right = build("mm", "float32", both[::-1], change="~")

        assert " called " not in evidence(opdrift.diff(left, right))

    def test_a_run_that_was_not_watched_is_held_against_the_library_only(self):
        """The rules know nothing of implementations inside oneDNN: that is no other kernel."""
        left = build("mm", "bfloat16", [BRG])
        right = build("mm", "bfloat16", None, change="*")

        found = opdrift.diff(left, right)

        assert found.first is not None
        assert " ran " not in found.first.cause.summary
        assert " called " not in evidence(found)

    def test_a_run_that_was_not_watched_and_another_library_differ(self):
        left = build("mm", "bfloat16", [sgemm(64, 1, "GEMM_BF16BF16F32")])
        right = build("mm", "bfloat16", None, change="*")

        found = opdrift.diff(left, right)

        assert found.first is not None
        assert "left ran GEMM_BF16BF16F32 of MKL" in found.first.cause.summary


def test_a_trace_reads_back_what_it_observed(tmp_path: Path):
    """Recorded, not built: the pick is MKL's, with sizes and threads, and in JSON."""
    torch = pytest.importorskip("torch")
    if not torch.backends.mkl.is_available():
        pytest.skip("a build without MKL")
    from opdrift.render.json import pick_object

    with opdrift.record(tmp_path / "t", kernels="full", integrations=()):
        torch.mm(torch.zeros(5, 7), torch.zeros(7, 9))

    trace = opdrift.load(tmp_path / "t")

    found = pick_object(Picks(trace).of(len(trace.ops) - 1))
    assert found is not None
    assert (found["library"], found["source"]) == ("MKL", "verbose")
    assert found["observed"][0].startswith("SGEMM(N,N,9,5,7), ")
