"""The Triton kernel: in its interpreter against the core, and compiled for GPUs that are not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opdrift.fingerprint.partials import PARTIAL, SAMPLE_WORD, SKETCH_WORD, WORDS
from opdrift.tfp1 import Code

triton = pytest.importorskip("triton", reason="Triton is not installed")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from opdrift.fingerprint import triton_kernel, triton_launch  # noqa: E402

HERE = Path(__file__).parent
TYPES = {1: "i8", 2: "i16", 4: "i32", 8: "i64"}


@pytest.mark.slow
def test_the_kernel_writes_what_the_core_writes():
    """Every dtype at the edges of rows and chunks, several programs, several tiles, items of a batch."""
    roots = (HERE, HERE.parents[1] / "tracer")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(HERE / "interpret_kernel.py")],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join(map(str, roots)),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.stderr == ""
    assert done.stdout == "compared 129\n"


def compiled(
    code: Code, target: GPUTarget, *, small: bool, strided: bool = False, aligned: bool = True
):
    """The kernel for a GPU, as Triton's launcher would compile it there."""
    signature = {
        "x_ptr": f"*{TYPES[code.bytes]}",
        "out_ptr": "*i64",
        "table_ptr": "*i64",
        "n": "i64",
        "tiles": "i32",
        "inner": "i64",
        **dict.fromkeys(("code", "strided", "small"), "constexpr"),
    }
    divisible = [["tt.divisibility", 16]]
    source = ASTSource(
        triton_kernel.fingerprint,
        signature,
        {(6,): int(code), (7,): strided, (8,): small},
        {(position,): divisible for position in ((0, 1, 2) if aligned else (1, 2))},
    )
    return triton.compile(source, target=target, options=triton_launch._OPTIONS)


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    """Compile anew."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
@pytest.mark.parametrize("code", [Code.F32, Code.BF16, Code.FP8, Code.I64, Code.RAW], ids=str)
def test_the_kernel_compiles_for_nvidia(code, small):
    """Also where memory is not aligned and items are in pieces; nothing flushes subnormals or fuses."""
    kernel = compiled(code, GPUTarget("cuda", 90, 32), small=small, strided=True, aligned=False)

    assert len(kernel.asm["cubin"]) > 1000
    assert ".ftz" not in kernel.asm["ptx"]
    assert "fma" not in kernel.asm["ptx"]
    assert "atom" not in kernel.asm["ptx"]
    assert ".local" not in kernel.asm["ptx"]  # no arrays outside of registers


@pytest.mark.slow
@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("code", [Code.F32, Code.I64], ids=str)
def test_the_kernel_compiles_for_amd(code):
    """No register is spilled, and subnormals are kept."""
    assembly = compiled(code, GPUTarget("hip", "gfx942", 64), small=False).asm["amdgcn"]

    assert ".vgpr_spill_count: 0" in assembly
    assert "float_denorm_mode_32 3" in assembly


def test_sizes_and_offsets_are_no_reason_to_compile_anew():
    """Triton would else specialise on 1 and on multiples of 16, and take 32 bits where they suffice."""
    parameters = {p.name: p for p in triton_kernel.fingerprint.params}

    for name, kind in (("n", "i64"), ("tiles", "i32"), ("inner", "i64")):
        assert parameters[name].do_not_specialize
        assert parameters[name].annotation_type == kind


def test_the_kernel_and_the_host_mean_the_same_words():
    """The row's fields, and the codes, are written down twice: Triton reads constants of its own only."""
    fields = {name: PARTIAL.fields[name][1] // 8 for name in PARTIAL.names}

    assert triton_kernel.PARTIAL_WORDS.value == WORDS
    assert triton_kernel.COUNTS_AT.value == fields["nan"]
    assert triton_kernel.SUMS_AT.value == fields["min"]
    assert triton_kernel.SAMPLE_AT.value == SAMPLE_WORD
    assert triton_kernel.SKETCH_AT.value == SKETCH_WORD
    for code in Code:
        assert getattr(triton_kernel, code.name).value == code


@pytest.mark.parametrize("n", [0, 1, 4096, 4097, 65536, 65537, 1 << 25, (1 << 25) + 1, 10**10])
def test_tensors_are_split_into_a_bounded_number_of_parts(n):
    """Few enough rows for the copy to cost little, and no part empty."""
    parts, span = triton_launch.TritonKernel(torch.device("cpu")).split(n)

    assert 1 <= parts <= triton_launch.PROGRAMS
    assert (parts - 1) * span < max(n, 1) <= parts * span


def test_more_components_than_counters_hold_are_refused():
    """Counts of a lane are kept in 16 bits: 2e12 components would be too many."""
    with pytest.raises(ValueError, match="more than the kernel counts"):
        triton_launch.TritonKernel(torch.device("cpu")).split(1 << 46)


class FakeCompiled:
    """Stands for what Triton compiles: notes its launches."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *arguments: self.launches.append((grid, arguments))


def test_what_was_compiled_is_launched_directly(monkeypatch):
    """One variant for a way of reading memory; addresses and sizes are plain numbers."""
    kernel = triton_launch.TritonKernel(torch.device("cpu"))
    made = []
    monkeypatch.setattr(
        kernel, "_launch", lambda grid, *_: made.append((grid, FakeCompiled())) or made[-1][1]
    )
    rows = torch.zeros(600, WORDS, dtype=torch.int64)
    data = torch.zeros(70_000)
    kernel.write(data, Code.F32, (1, 1, 70_000), rows, 0)
    kernel.write(data, Code.F32, (1, 1, 70_000), rows, 5)
    kernel.write(data[:40], Code.F32, (1, 1, 40), rows, 7)  # small: another variant
    kernel.write(data[4:], Code.F32, (1, 1, 69_996), rows, 8)  # aligned, too
    kernel.write(data[1:], Code.F32, (1, 1, 69_999), rows, 9)  # not aligned: another

    assert [grid for grid, _ in made] == [(2, 1, 1), (1, 1, 1), (2, 1, 1)]
    launched = made[0][1].launches
    assert [grid for grid, _ in launched] == [(2, 1, 1), (2, 1, 1)]
    address, row, _, *numbers = launched[0][1]
    assert (address, row) == (data.data_ptr(), rows[5].data_ptr())
    assert numbers == [70_000, 1, 70_000, Code.F32, False, False]
