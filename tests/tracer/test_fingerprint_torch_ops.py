"""The fingerprint in torch ops: what every other implementation writes, without reading anything back."""

import math

import numpy as np
import pytest
import torch
from fingerprint_checks import assert_same, tensor_of
from hypothesis import given, settings
from hypothesis import strategies as st

from opdrift.fingerprint import ROW, load_engine
from opdrift.fingerprint.partials import PARTIAL, WORDS, Ticket, finish
from opdrift.fingerprint.tensors import kinds_by_dtype, plain_on_device
from opdrift.fingerprint.torch_ops import TorchOps

KINDS = kinds_by_dtype()
SPAN = 8192  # so that tensors of some thousand components have several parts
EDGES = (0, 1, 31, 32, 33, 64, 65, 4095, 4097, SPAN - 1, SPAN, SPAN + 1, 3 * SPAN + 5)
CPU = torch.device("cpu")


def rows_of(
    tensor: torch.Tensor, batch: tuple[int, int, int] | None = None, span: int = SPAN
) -> np.ndarray:
    """The fingerprints of a tensor's items, by way of partial rows."""
    data = plain_on_device(tensor)
    kind = KINDS[data.dtype]
    batch = batch or (1, 1, data.numel())
    ops = TorchOps(CPU, span=span)
    n, items = batch[0] * batch[2], batch[1]
    parts, _ = ops.split(n)
    words = torch.full((parts * items, WORDS), -1, dtype=torch.int64)  # whatever was there before
    ops.write(data, kind, batch, words, 0)
    return finish(words.numpy().view(PARTIAL)[:, 0], [Ticket(7, kind, n, items, parts, span)])


@pytest.mark.parametrize("name", sorted(str(dtype) for dtype in KINDS if dtype != torch.bits8))
def test_every_dtype_at_every_edge(name):
    """Sizes around the edges of sample, row, chunk and part, with infinities, NaNs and subnormals."""
    dtype = getattr(torch, name.removeprefix("torch."))
    for n in EDGES:
        tensor = tensor_of(dtype, n)
        (row,) = rows_of(tensor)
        assert_same(row, load_engine().fingerprint(tensor))
        assert row["value"] == 7


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(30, 40).t(),
        torch.randn(5).expand(7, 5),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(90, dtype=torch.complex64).conj(),
        torch.randn(90, dtype=torch.complex128).conj().imag,
        torch.randn(9, dtype=torch.complex64).view(3, 3).mH,
        torch.tensor(2.5),
        torch.arange(64, dtype=torch.uint8).view(torch.uint4),
        torch.arange(64, dtype=torch.uint8).view(torch.bits16),
        torch.ones(3, requires_grad=True),
    ],
    ids=[
        "transposed",
        "expanded",
        "channels last",
        "conjugate",
        "negative",
        "adjoint",
        "0-dim",
        "sub-byte",
        "bits",
        "with grad",
    ],
)
def test_every_layout(tensor):
    """Components are in row-major order of the shape, whatever the memory looks like."""
    assert_same(rows_of(tensor)[0], load_engine().fingerprint(tensor))


@pytest.mark.parametrize("shape", [(1, 6, 11550), (6, 5, 231), (330, 21, 1), (3, 4, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_items_of_a_batch(shape, dtype):
    """Item b of (outer, batch, inner) is what the core writes for it."""
    tensor = tensor_of(dtype, math.prod(shape))
    wanted = np.zeros(shape[1], ROW)
    load_engine().put_batch(wanted.ctypes.data, tensor.data_ptr(), *shape, KINDS[dtype], 7)
    rows = rows_of(tensor, shape)

    for row, one in zip(rows, wanted, strict=True):
        assert_same(row, one)
        assert row["item"] == one["item"]


@given(st.integers(0, 40_000), st.sampled_from([4096, 8192, 12288]))
@settings(max_examples=25, deadline=None)
def test_the_digest_does_not_depend_on_the_parts(n, span):
    """Digest, counts and extremes are the same however a tensor is split."""
    tensor = torch.randn(n, generator=torch.Generator().manual_seed(n))
    split, whole = rows_of(tensor, span=span)[0], rows_of(tensor, span=1 << 20)[0]

    for name in ("raw", "n", "min", "max", "absmax", "zero", "sub", "code", "flags"):
        assert split[name] == whole[name]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.uint64, torch.bits8], ids=str
)
def test_nothing_is_read_back(dtype):
    """On the meta device any op that needs a content raises; here none does."""
    meta = torch.device("meta")
    ops = TorchOps(meta, span=SPAN)
    data = torch.empty(2, 10_000, device=meta, dtype=torch.uint8).view(dtype)
    n = data.numel() // 2
    rows = torch.empty(8, WORDS, dtype=torch.int64, device=meta)

    ops.write(data, KINDS[dtype], (1, 2, n), rows, 0)


def test_no_mode_sees_it_and_autograd_does_not_record_it():
    """A recorder around it would otherwise record a hundred ops for each op."""
    seen = []

    class Witness(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    tensor = torch.randn(50, requires_grad=True)
    ops = TorchOps(CPU)
    rows = torch.zeros(1, WORDS, dtype=torch.int64)
    with Witness():
        ops.write(plain_on_device(tensor), 0, (1, 1, 50), rows, 0)

    assert seen == []
    assert not rows.requires_grad


def test_rows_can_be_written_in_and_outside_of_inference_mode():
    """Tables that were made inside must not be inference tensors."""
    ops = TorchOps(CPU)
    rows = torch.zeros(2, WORDS, dtype=torch.int64)
    tensor = tensor_of(torch.float32, 5000)
    with torch.inference_mode():
        ops.write(tensor, 0, (1, 1, 5000), rows, 0)
    ops.write(tensor, 0, (1, 1, 5000), rows, 1)

    assert torch.equal(rows[0], rows[1])
