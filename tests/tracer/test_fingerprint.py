"""Every engine writes the fingerprint that the specification defines, and reads nothing it must not."""

import itertools
import math
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from fingerprint_checks import DTYPES, EXACT, assert_same, sketch_of, tensor_of
from hypothesis import given, settings
from hypothesis import strategies as st

from opdrift import tfp1
from opdrift.errors import InvalidOptionError
from opdrift.fingerprint import (
    ENGINES,
    LARGE,
    ROW,
    Engine,
    load_engine,
)
from opdrift.tfp1 import Code

EDGES = (0, 1, 2, 31, 32, 33, 63, 64, 65, 511, 512, 513, 4095, 4096, 4097, 8192 + 77)
CODES = {
    torch.float32: Code.F32,
    torch.float64: Code.F64,
    torch.float16: Code.F16,
    torch.bfloat16: Code.BF16,
    torch.int8: Code.I8,
    torch.uint8: Code.U8,
    torch.bool: Code.U8,
    torch.int16: Code.I16,
    torch.uint16: Code.U16,
    torch.int32: Code.I32,
    torch.uint32: Code.U32,
    torch.int64: Code.I64,
    torch.uint64: Code.U64,
}


def engine_called(name: str) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPDRIFT_FINGERPRINT", name)
        return load_engine()


def engines() -> Iterator[Engine]:
    """Every engine this machine has; NumPy always, the compiled ones where there was a compiler."""
    for name in ENGINES:
        try:
            yield engine_called(name)
        except InvalidOptionError:
            continue


AVAILABLE = tuple(engines())
every_engine = pytest.mark.parametrize(
    "engine", AVAILABLE, ids=[e.name.split(" (")[1][:-1] for e in AVAILABLE]
)


def specification(x: torch.Tensor) -> dict[str, object]:
    """The row by the specification, in Python integers and floats; x is 1-dimensional and real."""
    code = Code.FP8 if "float8" in str(x.dtype) else CODES[x.dtype]
    name = str(x.dtype).removeprefix("torch.")
    bits = x.view(
        {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[code.bytes]
    ).tolist()
    values = [float(tfp1.component_value(b, code, name)) for b in bits]
    finite = [v for v in values if math.isfinite(v)]
    normal = torch.finfo(x.dtype).smallest_normal if code.is_float and "e8m0" not in name else 0.0
    sketch = np.zeros(64)
    for i, value in enumerate(values):
        if math.isfinite(value):
            bucket, sign = tfp1.sketch_slot(i)
            sketch[bucket] += sign * value
    return {
        "raw": tfp1.raw_of(bits, code.bytes),
        "n": len(bits),
        "min": min(finite, default=math.inf) + 0.0,
        "max": max(finite, default=-math.inf) + 0.0,
        "absmax": max(map(abs, finite), default=0.0),
        "sum": math.fsum(finite),
        "ssq": math.fsum(v * v for v in finite),
        "nan": sum(map(math.isnan, values)),
        "pinf": values.count(math.inf),
        "ninf": values.count(-math.inf),
        "zero": values.count(0.0),
        "sub": sum(0 < abs(v) < normal for v in values),
        "sketch": sketch,
        "sample": [bits[k] for k in tfp1.sample_positions(len(bits))],
        "version": 1,
        "code": code,
        "flags": 15,
    }


def assert_row_is(row: np.void, wanted: dict[str, object]) -> None:
    """Exact fields bit by bit, sums and sketch to the specification's tolerance."""
    assert {name: row[name].item() for name in EXACT} == {name: wanted[name] for name in EXACT}
    sample = wanted["sample"]
    assert row["sample"].tolist() == sample + [0] * (32 - len(sample))
    norm = math.sqrt(wanted["ssq"])
    assert row["sum"] == pytest.approx(
        wanted["sum"], rel=1e-9, abs=1e-9 * norm * math.sqrt(len(sample) + 1)
    )
    assert row["ssq"] == pytest.approx(wanted["ssq"], rel=1e-9)
    sketch, tolerance = wanted["sketch"], 2e-7
    if Code(wanted["code"]).bytes >= 4:
        sketch, tolerance = sketch[:32] + sketch[32:], 1e-9
    else:
        with np.errstate(over="ignore"):  # e8m0 reaches 2**127: "estimate unavailable"
            sketch = sketch.astype(np.float32)
    np.testing.assert_allclose(sketch_of(row), sketch, rtol=tolerance, atol=tolerance * norm)


# -- the specification -----------------------------------------------------------------------------


@every_engine
@pytest.mark.parametrize(
    ("tensor", "raw"),
    [
        (torch.arange(8, dtype=torch.float32), 0x15599BA5A616DD0F),
        (torch.arange(8).bfloat16(), 0x1BA1F5599BA5A616),
        (torch.arange(8) - 4, 0x05CF018C9A7C7924),
        (torch.arange(256).to(torch.uint8), 0x1DCC24EB2F604662),
        (torch.tensor([True, False, True]), 0x0BAFF1EBC727AAFF),
        (torch.tensor([1 + 2j, 3 - 4j]), 0x126B7B2B18758EA4),
        (torch.ones(100_000), 0x13603794BEDE10CA),
        (torch.empty(0), 0),
        (torch.tensor([-0.0, math.nan], dtype=torch.float64), 0x04D3EA896007E966),
    ],
    ids=lambda value: str(value.dtype) if isinstance(value, torch.Tensor) else "",
)
def test_the_published_vectors_hold(engine, tensor, raw):
    """The specification's table, through each engine."""
    assert engine.fingerprint(tensor)["raw"] == raw


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_engine_follows_the_specification_at_every_edge(dtype):
    """All dtypes, at sizes around the edges of sample, row, scalar path and chunk."""
    for n in EDGES:
        tensor = tensor_of(dtype, n)
        components = torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor
        wanted = specification(components)
        for engine in AVAILABLE:
            assert_row_is(engine.fingerprint(tensor), wanted)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool], ids=str
)
def test_engines_agree_on_tensors_of_many_chunks(dtype):
    """Beyond the number of rows after which the digest's lanes are flushed, and of blocks in NumPy."""
    tensor = tensor_of(dtype, 200_003)
    rows = [engine.fingerprint(tensor) for engine in AVAILABLE]

    for row in rows[1:]:
        assert_same(row, rows[0])
    assert rows[0]["sample"].tolist() == specification_sample(tensor)


def specification_sample(tensor: torch.Tensor) -> list[int]:
    width = tensor.element_size()
    bits = tensor.view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[width])
    return bits[list(tfp1.sample_positions(len(tensor)))].tolist()


@every_engine
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf])
def test_non_finite_values_do_not_hide_the_others(engine, dtype, fill):
    """Chunks that are wholly, half (a causal mask) or nearly non-finite."""
    whole = torch.full((5000,), fill, dtype=dtype)
    half = tensor_of(dtype, 5000)
    half[::2] = fill
    for tensor in (whole, half, whole.index_fill(0, torch.tensor([4999]), -3.0)):
        assert_row_is(engine.fingerprint(tensor), specification(tensor))


@every_engine
def test_float64_values_whose_sum_overflows_are_finite(engine):
    """An infinite or NaN sum is no sign of a non-finite value."""
    tensor = torch.tensor([1.7e308, 1.7e308, -1.7e308, -1.7e308] * 50, dtype=torch.float64)
    row = engine.fingerprint(tensor)

    assert (row["min"], row["max"], row["nan"], row["pinf"], row["ninf"]) == (
        -1.7e308,
        1.7e308,
        0,
        0,
        0,
    )


@every_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_zero_extreme_has_no_sign(engine, dtype):
    """Which of -0 and 0 comes out of a minimum is chance; the row must not depend on it."""
    row = engine.fingerprint(torch.tensor([-0.0] * 70, dtype=dtype))

    assert not np.signbit([row["min"], row["max"], row["absmax"]]).any()
    assert row["zero"] == 70


@every_engine
def test_large_tensors_take_the_same_path_without_the_gil(engine):
    """put_large writes what put writes, from many threads at once."""
    tensor = tensor_of(torch.float32, 2 * LARGE)
    rows = np.zeros(5, ROW)
    arguments = (tensor.data_ptr(), tensor.numel(), engine.kinds[tensor.dtype], 42)
    engine.put(rows[0:].ctypes.data, *arguments)
    threads = [
        threading.Thread(target=engine.put_large, args=(rows[k:].ctypes.data, *arguments))
        for k in range(1, 5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert all(row.tobytes() == rows[0].tobytes() for row in rows)
    assert rows[0]["value"] == 42


@every_engine
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str
)
def test_the_digest_alone_is_the_rows_digest(engine, dtype):
    """raw() is what re-checks use; it must be the same number."""
    for n in (0, 5, 600, 70_001):
        tensor = tensor_of(dtype, n)
        alone = engine.raw(tensor.data_ptr(), n, engine.kinds[dtype])

        assert alone == engine.fingerprint(tensor)["raw"]


# -- layouts and types -----------------------------------------------------------------------------

LAYOUTS = {
    "transposed": lambda x: x.view(100, 130).t(),
    "permuted": lambda x: x.view(10, 13, 100).permute(2, 0, 1),
    "channels_last": lambda x: x.view(10, 13, 10, 10).to(memory_format=torch.channels_last),
    "strided": lambda x: x.view(100, 130)[::2, 1::3],
    "expanded": lambda x: x.view(100, 130)[:, 5:6].expand(100, 64),
    "offset": lambda x: x[777:9000],
    "scalar": lambda x: x[3],
    "broadcast scalar": lambda x: x[3].expand(50, 7),
}


@every_engine
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_matter(engine, dtype, layout):
    """Row-major order of the shape counts, not memory."""
    tensor = LAYOUTS[layout](tensor_of(dtype, 13_000))
    copy = tensor.contiguous().clone()

    assert engine.fingerprint(tensor).tobytes() == engine.fingerprint(copy).tobytes()


@every_engine
def test_lazy_conjugates_and_negatives_are_resolved(engine):
    """The bits of the value count, not those in memory."""
    z = tensor_of(torch.complex64, 1000)
    for lazy, eager in (
        (z.conj(), z.conj_physical()),
        (z.conj().imag, -z.imag),
        (z.conj().t(), z.conj_physical()),
    ):
        assert engine.fingerprint(lazy).tobytes() == engine.fingerprint(eager).tobytes()


@every_engine
@pytest.mark.parametrize(
    "dtype", [torch.uint4, torch.int3, torch.float4_e2m1fn_x2, torch.bits16], ids=str
)
def test_types_without_numbers_are_bytes(engine, dtype):
    """Digest and sample of the bytes, and flags that say that there are no statistics."""
    data = torch.arange(64, dtype=torch.uint8)
    row = engine.fingerprint(data.view(dtype))

    assert row["raw"] == engine.fingerprint(data)["raw"]
    assert (row["code"], row["n"], row["flags"]) == (Code.RAW, 64, 9)
    assert row["sample"].tolist() == [data[k] for k in tfp1.sample_positions(64)]


@every_engine
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantised_tensors_are_their_stored_bytes(engine):
    """Scale and zero point are no content."""
    x = torch.linspace(-1, 1, 50)
    quantised = torch.quantize_per_tensor(x, 0.01, 3, torch.qint8)
    row = engine.fingerprint(quantised)

    assert row["raw"] == engine.fingerprint(quantised.int_repr())["raw"]
    assert row["code"] == Code.RAW


@every_engine
@pytest.mark.parametrize(
    "shape", [(1, 6, 1155), (6, 5, 231), (42, 33, 5), (330, 21, 1), (3, 4, 0), (0, 4, 3)]
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str
)
def test_items_of_a_batch_have_the_rows_of_tensors_of_their_own(engine, shape, dtype):
    """Item b of an (outer, batch, inner) tensor is what a run with batch 1 records."""
    tensor = tensor_of(dtype, math.prod(shape)).view(shape)
    outer, batch, inner = shape
    rows = np.zeros(batch, ROW)
    engine.put_batch(
        rows.ctypes.data, tensor.data_ptr(), outer, batch, inner, engine.kinds[dtype], 7
    )

    assert rows["item"].tolist() == list(range(batch))
    assert set(rows["value"].tolist()) == {7}
    for item in range(batch):
        assert_same(rows[item], engine.fingerprint(tensor[:, item]))


# -- composition --------------------------------------------------------------------


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8]),
    st.integers(0, 9000),
    st.lists(st.floats(0, 1), max_size=4),
    st.integers(0, 70),
)
@settings(max_examples=60, deadline=None)
def test_shards_compose_into_the_gathered_tensor(dtype, n, cuts, padding):
    """Digests of parts cut anywhere give the whole, with zero padding at the end or without."""
    engine = AVAILABLE[0]
    tensor = tensor_of(dtype, n)
    edges = [0, *sorted(int(cut * n) for cut in cuts), n]
    parts = [tensor[a:b] for a, b in itertools.pairwise(edges)]
    width = dtype.itemsize
    composed = tfp1.concat(
        (int(engine.fingerprint(p)["raw"]), tfp1.digits(len(p), width)) for p in parts
    )
    padded = torch.cat([tensor, torch.zeros(padding, dtype=dtype)])

    assert composed == engine.fingerprint(tensor)["raw"] == engine.fingerprint(padded)["raw"]


@pytest.mark.parametrize(
    ("dtype", "bit", "half"),
    [(torch.float32, 9, 0), (torch.bfloat16, 9, 0), (torch.float64, 40, 1), (torch.int64, 9, 0)],
    ids=str,
)
def test_a_flipped_bit_is_located_from_two_rows(dtype, bit, half):
    """Index and bit of a single change; the sketch is the witness that makes 32-bit digits sure."""
    engine, n, index = AVAILABLE[0], 300_000, 123_456
    left = torch.randn(n, generator=torch.Generator().manual_seed(1)).mul(1000).to(dtype)
    right = left.clone()
    bits = right.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    bits[index] ^= 1 << bit
    a, b = engine.fingerprint(left), engine.fingerprint(right)
    bucket = int(np.abs(sketch_of(a) - sketch_of(b)).argmax())

    found = tfp1.locate_single_change(
        int(a["raw"]), int(b["raw"]), tfp1.digits(n, dtype.itemsize), dtype.itemsize, bucket=bucket
    )

    assert found is not None
    assert (found.index, found.half) == (index, half)
    assert abs(found.delta) == 1 << (bit - 32 * half)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU cannot flush subnormals")
@pytest.mark.parametrize("name", [e for e in ENGINES if e != "numpy"])
def test_flushing_subnormals_changes_neither_the_row_nor_the_setting(name):
    """A program may have called set_flush_denormal; NumPy's float conversions do depend on it."""
    try:
        engine = engine_called(name)
    except InvalidOptionError as error:
        pytest.skip(str(error))
    tensor = torch.full((500,), 1e-42)
    unflushed = engine.fingerprint(tensor)
    torch.set_flush_denormal(True)
    try:
        flushed = engine.fingerprint(tensor)
        still_set = (torch.tensor([1e-42]) * 1.0).item() == 0.0
    finally:
        torch.set_flush_denormal(False)

    assert unflushed["sub"] == 500
    assert flushed.tobytes() == unflushed.tobytes()
    assert still_set
