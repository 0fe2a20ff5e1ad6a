"""All implementations on contents that nobody would draw at random: every bit pattern, extremes, fills."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fingerprint_checks import COMPONENT_DTYPE, DTYPES, EXACT, sketch_of
from hypothesis import given, settings
from hypothesis import strategies as st

from opdrift import tfp1
from opdrift.errors import InvalidOptionError
from opdrift.fingerprint import ENGINES, Engine, load_engine
from opdrift.fingerprint.partials import PARTIAL, WORDS, Ticket, finish
from opdrift.fingerprint.tensors import kinds_by_dtype, plain_on_device
from opdrift.fingerprint.torch_ops import TorchOps
from opdrift.tfp1 import Code

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
HERE = Path(__file__).parent
KINDS = kinds_by_dtype()
CPU = torch.device("cpu")
SPAN = 8192  # so that a few thousand components are several parts
#: around the edges of sample, row, scalar path, chunk, and of the chunks between flushes of the digest
SIZES = (
    *(0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 129, 511, 512, 513, 4095, 4096, 4097, 4160),
    *(8191, 8193, 7 * 4096 + 1, 15 * 4096 - 1, 15 * 4096 + 513),
)
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def engines() -> list[Engine]:
    """Every engine that can be had here."""
    found = []
    for name in ENGINES:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OPDRIFT_FINGERPRINT", name)
            try:
                found.append(load_engine())
            except InvalidOptionError:
                continue
    return found


AVAILABLE = engines()
TORCH_OPS = TorchOps(CPU, span=SPAN)


def by_torch_ops(tensor: torch.Tensor) -> np.void:
    data = plain_on_device(tensor)
    n = data.numel()
    parts, _ = TORCH_OPS.split(n)
    words = torch.full((parts, WORDS), -1, dtype=torch.int64)
    TORCH_OPS.write(data, KINDS[data.dtype], (1, 1, n), words, 0)
    tickets = [Ticket(0, KINDS[data.dtype], n, 1, parts, SPAN)]
    row: np.void = finish(words.numpy().view(PARTIAL)[:, 0], tickets)[0]
    return row


def bits_of(kind: str, width: int, n: int, seed: int) -> np.ndarray:
    """n components as bit patterns: any at all, equal ones, nearly all equal, tiny or huge magnitudes."""
    make, unsigned = np.random.default_rng(seed), UNSIGNED[width]
    ones = int(np.iinfo(unsigned).max)
    any_bits = make.integers(0, ones, n, dtype=unsigned, endpoint=True)
    if kind == "fill":
        return np.full(n, any_bits[0] if n else 0, unsigned)
    if kind == "ones":
        return np.full(n, ones, unsigned)
    if kind == "few":
        return np.where(make.random(n) < 4 / max(n, 4), any_bits, np.zeros(n, unsigned))
    if kind == "tiny":  # around the smallest normal number
        border = {1: 3, 2: 11, 4: 25, 8: 54}[width]
        signs = make.integers(0, 2, n, dtype=unsigned) << unsigned(8 * width - 1)
        return (any_bits & unsigned((1 << border) - 1)) | signs
    if kind == "huge":  # NaN, infinity and the largest numbers, of both signs
        return (unsigned(ones) - (any_bits & unsigned(63))) ^ (any_bits & unsigned(ones // 2 + 1))
    return any_bits


def tensor_of_bits(dtype: torch.dtype, bits: np.ndarray) -> torch.Tensor:
    if not bits.size:
        return torch.empty(0, dtype=dtype)
    data = torch.from_numpy(bits.view(np.uint8).copy())
    if dtype is torch.bool:
        data = data & 1
    if dtype in COMPONENT_DTYPE:
        return torch.view_as_complex(data.view(COMPONENT_DTYPE[dtype]).view(-1, 2))
    return data.view(dtype)


def difference(row: np.void, wanted: np.void) -> list[str]:
    """The fields in which two implementations must agree and do not."""
    wrong = [name for name in EXACT if row[name] != wanted[name]]
    if row["sample"].tolist() != wanted["sample"].tolist():
        wrong.append("sample")
    if not math.isfinite(
        wanted["ssq"]
    ):  # the squares overflowed: what sums give depends on the order
        return wrong if math.isinf(row["ssq"]) else [*wrong, "ssq"]
    # of numbers below 1e-160 the squares are 0, and only the largest one tells the scale
    norm = max(math.sqrt(wanted["ssq"]), float(wanted["absmax"]))
    size = math.sqrt(max(int(wanted["n"]), 1))
    if abs(row["sum"] - wanted["sum"]) > 1e-9 * norm * size:
        wrong.append("sum")
    if abs(row["ssq"] - wanted["ssq"]) > 1e-9 * wanted["ssq"]:
        wrong.append("ssq")
    tolerance = 1e-9 if Code(wanted["code"]).bytes >= 4 else 2e-7
    with np.errstate(invalid="ignore"):
        a, b = sketch_of(row), sketch_of(wanted)
        if not (np.abs(a - b) <= tolerance * norm)[a != b].all():
            wrong.append("sketch")
    return wrong


@given(
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(["any", "fill", "ones", "few", "tiny", "huge"]),
    n=st.sampled_from(SIZES) | st.integers(0, 700),
    seed=st.integers(0, 1 << 32),
)
@settings(max_examples=250, deadline=None)
def test_all_implementations_agree_on_any_bits(dtype, kind, n, seed):
    """Compiled builds, NumPy and torch ops: one definition, bit by bit where it is exact."""
    double = 2 if dtype in COMPONENT_DTYPE else 1
    bits = bits_of(kind, dtype.itemsize // double, n * double, seed)
    tensor = tensor_of_bits(dtype, bits)
    wanted = AVAILABLE[0].fingerprint(tensor)

    for engine in AVAILABLE[1:]:
        assert difference(engine.fingerprint(tensor), wanted) == [], engine.name
    assert difference(by_torch_ops(tensor), wanted) == []
    if n <= 700:
        digits = bits & 1 if dtype is torch.bool else bits
        assert wanted["raw"] == tfp1.raw_of(digits.tolist(), digits.itemsize)


@st.composite
def layouts(draw: st.DrawFn) -> torch.Tensor:
    """A view of some memory: permuted, cut, stepped, expanded, conjugated, negated, in any order."""
    dtype = draw(
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
    )
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    values = torch.arange(math.prod(shape)) * 7919 % 1009 - 500
    tensor = (values > 0 if dtype is torch.bool else values.to(dtype)).view(shape)
    if dtype is torch.complex64:
        tensor = tensor * (1 + 2j)
    for step in draw(
        st.lists(st.sampled_from(["permute", "cut", "step", "expand", "conj"]), max_size=4)
    ):
        dims = tensor.dim()
        if step == "conj" and tensor.is_complex():
            tensor = draw(st.sampled_from([tensor.conj(), tensor.imag, tensor.conj().imag]))
        if dims == 0:
            continue
        dim = draw(st.integers(0, dims - 1))
        if step == "permute":
            tensor = tensor.permute(draw(st.permutations(range(dims))))
        elif step == "cut":
            start = draw(st.integers(0, tensor.shape[dim]))
            tensor = tensor.narrow(dim, start, draw(st.integers(0, tensor.shape[dim] - start)))
        elif step == "step":
            tensor = tensor[(slice(None),) * dim + (slice(None, None, 3),)]
        elif step == "expand":
            tensor = tensor.unsqueeze(dim).expand(*tensor.shape[:dim], 3, *tensor.shape[dim:])
    return tensor


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_all_implementations_read_any_layout_in_the_order_of_its_shape(tensor):
    """A view has the fingerprint of a copy of its elements."""
    copy = torch.from_numpy(
        tensor.resolve_conj()
        .resolve_neg()
        .to(  # numpy knows no bfloat16
            torch.float32 if tensor.dtype is torch.bfloat16 else tensor.dtype
        )
        .numpy()
        .copy()
    ).to(tensor.dtype)
    wanted = AVAILABLE[0].fingerprint(copy)

    for engine in AVAILABLE:
        assert difference(engine.fingerprint(tensor), wanted) == [], engine.name
    assert difference(by_torch_ops(tensor), wanted) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", [1, 3])
def test_memory_that_is_aligned_to_nothing_is_read(dtype, offset):
    """`torch.frombuffer` and memory-mapped files start where they like."""
    data = np.random.default_rng(0).integers(0, 256, 9000 * 8 + 8, dtype=np.uint8)
    tensor = torch.frombuffer(data, dtype=dtype, count=9000, offset=offset)
    end = offset + 9000 * dtype.itemsize
    wanted = AVAILABLE[0].fingerprint(torch.from_numpy(data[offset:end].copy()).view(dtype))

    assert tensor.data_ptr() % dtype.itemsize
    for engine in AVAILABLE:
        assert difference(engine.fingerprint(tensor), wanted) == [], engine.name


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(9).view(3, 3)[1:2, 1:2],
        torch.arange(9.0).view(3, 3).to(torch.float64)[2, 2:],
        torch.arange(64, dtype=torch.uint8).view(torch.bits16)[3::30],
    ],
    ids=["int64", "float64", "bits16"],
)
def test_a_single_element_may_have_any_stride(tensor):
    """It counts as contiguous, but torch views it in another width only if its stride is 1."""
    wanted = AVAILABLE[0].fingerprint(tensor.clone() if tensor.dtype != torch.bits16 else tensor)

    assert by_torch_ops(tensor)["raw"] == wanted["raw"]
    for engine in AVAILABLE:
        assert difference(engine.fingerprint(tensor), wanted) == []


@pytest.mark.slow
def test_more_elements_than_32_bits_count_are_read():
    """2^31 + 5 bytes: positions, digits and counts must not wrap. 2 GB are read once, by the fastest engine."""
    n, page = (1 << 31) + 5, 1 << 20
    # zeros that nobody wrote take no memory
    tensor = torch.from_numpy(np.zeros(n, np.uint8))
    tensor[-1], tensor[page] = 7, 3
    row = AVAILABLE[0].fingerprint(tensor)

    assert row["raw"] == tfp1.compose([(7, n - 1), (3, page)])
    assert (row["n"], row["zero"], row["sum"], row["max"]) == (n, n - 2, 10.0, 7.0)
    bucket, sign = tfp1.sketch_slot(n - 1)
    other, other_sign = tfp1.sketch_slot(page)
    sketch = np.zeros(64)
    sketch[bucket] += 7 * sign
    sketch[other] += 3 * other_sign
    assert sketch_of(row).tolist() == sketch.tolist()


def test_an_expanded_tensor_of_two_billion_elements_needs_no_memory_of_its_own():
    """Its strides are 0; whether its storage is there is asked without touching it."""
    tensor = torch.ones(1, dtype=torch.uint8).expand((1 << 31) + 3)

    assert AVAILABLE[0].can_fingerprint(tensor) is None
    tensor.untyped_storage().resize_(0)
    assert "freed" in (AVAILABLE[0].can_fingerprint(tensor) or "")


@pytest.mark.exhaustive
def test_the_kernel_agrees_on_any_bits():
    """As above, for the Triton kernel in its interpreter: 300 contents take 20 seconds."""
    pytest.importorskip("triton", reason="Triton is not installed")
    program = (
        "import sys, torch, numpy as np, test_fingerprint_patterns as t\n"
        "from opdrift.fingerprint.triton_launch import TritonKernel\n"
        "kernel, make = TritonKernel(t.CPU), np.random.default_rng(0)\n"
        "for seed in range(300):\n"
        "    dtype = t.DTYPES[seed % len(t.DTYPES)]\n"
        "    kind = ['any', 'fill', 'ones', 'few', 'tiny', 'huge'][seed // len(t.DTYPES) % 6]\n"
        "    n = int(make.choice([1, 31, 32, 33, 64, 65, 200]))\n"
        "    double = 2 if dtype in t.COMPONENT_DTYPE else 1\n"
        "    tensor = t.tensor_of_bits(dtype, t.bits_of(kind, dtype.itemsize // double, n * double, seed))\n"
        "    data = t.plain_on_device(tensor)\n"
        "    parts, span = kernel.split(data.numel())\n"
        "    words = torch.full((parts, t.WORDS), -1, dtype=torch.int64)\n"
        "    code = t.KINDS[data.dtype]\n"
        "    kernel.write(data, code, (1, 1, data.numel()), words, 0)\n"
        "    ticket = t.Ticket(0, code, data.numel(), 1, parts, span)\n"
        "    row = t.finish(words.numpy().view(t.PARTIAL)[:, 0], [ticket])[0]\n"
        "    wrong = t.difference(row, t.AVAILABLE[0].fingerprint(tensor))\n"
        "    if wrong: print(dtype, kind, n, wrong)\n"
        "print('done')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parents[1] / "tracer"))),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert (done.stdout, done.stderr) == ("done\n", "")
