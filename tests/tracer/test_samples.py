"""What a recorded run tells of single samples, and how two runs are held against each other by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from fake_device import HostAccelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import opdrift
from opdrift import values
from opdrift.batches.lengths import Lengths
from opdrift.batches.rows import SampleRows
from opdrift.contents import Contents
from opdrift.errors import IncomparableTracesError
from opdrift.fingerprint import devices
from opdrift.fingerprint.engine import load_engine
from opdrift.fingerprint.torch_ops import TorchOps
from opdrift.samples import OneSample, pair
from opdrift.tracefile.axes import Position
from opdrift.tracefile.fingerprints import Fingerprint, FingerprintColumns
from opdrift.tracefile.schema import RECORDED_SAMPLES, SKETCHED_SAMPLES, TABLES
from opdrift.tracefile.writer import fingerprint_columns

ENGINE = load_engine()


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., opdrift.Trace]:
    """Record one call of a model."""
    numbers = iter(range(100))

    def run(
        model: Callable[..., object], *inputs: Tensor, batch: opdrift.Batch | None, **options: Any
    ) -> opdrift.Trace:
        path = tmp_path / f"{next(numbers)}.trace"
        with torch.no_grad(), opdrift.record(path, batch=batch, **options):
            model(*inputs)
        trace = opdrift.load(path)
        assert trace.incomplete is None
        return trace

    return run


def outputs(trace: opdrift.Trace, op: str) -> list[int]:
    """Value ids of what the ops of this name returned."""
    found = [trace.op(i) for i in range(len(trace.ops))]
    return [value for each in found if each.name == op for value in each.outputs]


def assert_same(left: Fingerprint | None, right: Fingerprint | None) -> None:
    """The same content, and the same of everything else that is known of it."""
    assert left is not None
    assert right is not None
    assert left.key == right.key
    assert left.sample.tolist() == right.sample.tolist()
    for name in ("min", "max", "absmax", "nan", "pinf", "ninf", "zero", "subnormal"):
        assert getattr(left, name) == getattr(right, name)
    assert left.ssq == pytest.approx(right.ssq, rel=1e-9)
    assert (left.sketch is None) == (right.sketch is None)
    if left.sketch is not None:
        np.testing.assert_allclose(left.sketch, right.sketch, rtol=1e-6, atol=1e-6)


# ---- rows ----------------------------------------------------------------------------------------------------


class Written:
    """Takes what would go to disk."""

    def __init__(self) -> None:
        self.tables: dict[str, pa.Table] = {}

    def append(self, table: str, columns: Sequence[Any]) -> None:
        fields = [
            c if isinstance(c, pa.Array) else pa.array(c, field.type)
            for c, field in zip(columns, TABLES[table], strict=True)
        ]
        self.tables[table] = pa.Table.from_arrays(fields, schema=TABLES[table])


def rows_of(
    tensor: Tensor, positions: Sequence[Position], size: int, lengths: Lengths
) -> dict[int, Fingerprint]:
    """The records of the samples of one tensor."""
    rows, written = SampleRows(ENGINE, size, lengths), Written()
    rows.add(tensor, 1, tuple(positions), 0, alone=True)
    rows.write(written)  # type: ignore[arg-type]
    table = written.tables.get("samples")
    if table is None:
        return {}
    prints = FingerprintColumns(table)
    return {item: prints[row] for row, item in enumerate(table["item"].to_pylist())}


def whole(tensor: Tensor) -> Fingerprint:
    """The fingerprint of a tensor, by the way of the table `tensors`."""
    written = Written()
    row = np.array([ENGINE.fingerprint(tensor, 1)], ENGINE.ROW)
    written.append("tensors", fingerprint_columns(row))
    return FingerprintColumns(written.tables["tensors"])[0]


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def filled(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    numbers = torch.randn(*shape) * 8
    return numbers.to(dtype) if dtype != torch.complex64 else torch.complex(numbers, numbers + 1)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4), st.integers(2, 6), st.integers(1, 40), st.integers(1, 3),
    st.sampled_from(DTYPES), st.booleans(),
)  # fmt: skip
def test_a_sample_has_the_fingerprint_of_its_slice(
    outer: int, batch: int, inner: int, after: int, dtype: torch.dtype, transposed: bool
):
    """For any (outer, batch, inner) of one dim, in any layout."""
    tensor = filled((outer * batch * inner, after), dtype)
    if transposed:
        tensor = tensor.T.contiguous().T
    place = Position(0, outer, batch, inner)

    found = rows_of(tensor, [place], batch, Lengths(lambda *_: None))

    assert sorted(found) == list(range(batch))
    split = tensor.reshape(outer, batch, inner, after)
    for sample in range(batch):
        assert_same(found[sample], whole(split[:, sample].clone()))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 5), st.integers(2, 6), st.lists(st.integers(0, 6), min_size=1, max_size=5),
    st.sampled_from(DTYPES), st.booleans(), st.booleans(),
)  # fmt: skip
def test_a_padded_sample_has_the_fingerprint_of_its_valid_part(
    after: int, length: int, sizes: list[int], dtype: torch.dtype, left: bool, batch_first: bool
):
    batch, sizes = len(sizes), [min(n, length) for n in sizes]
    shape = (batch, length, after) if batch_first else (length, batch, after)
    tensor = filled(shape, dtype)
    lengths = Lengths(lambda *_: None)
    axis = lengths.seed(length, sizes, left=left)
    places = [Position(1 if batch_first else 0, 1, length, 1, axis)]
    if batch > 1:
        places.append(Position(0 if batch_first else 1, 1, batch, 1))

    found = rows_of(tensor, places, batch, lengths)

    assert sorted(found) == list(range(batch))
    for sample, size in enumerate(sizes):
        part = tensor.select(0 if batch_first else 1, sample)
        start = length - size if left else 0
        assert_same(found[sample], whole(part[start : start + size].clone()))


def test_a_table_that_all_samples_share_is_cut_for_each():
    lengths = Lengths(lambda *_: None)
    axis = lengths.seed(5, [5, 2], left=True)
    table = torch.randn(1, 5, 3)

    found = rows_of(table, [Position(1, 1, 5, 1, axis)], 2, lengths)

    assert_same(found[0], whole(table))
    assert_same(found[1], whole(table[:, 3:].clone()))


def test_many_samples_are_recorded_with_less_and_then_not_at_all():
    tensor = torch.randn(RECORDED_SAMPLES + 5, 40)

    found = rows_of(tensor, [Position(0, 1, len(tensor), 1)], len(tensor), Lengths(lambda *_: None))

    assert sorted(found) == list(range(RECORDED_SAMPLES))
    assert_same(found[0], whole(tensor[0]))
    last = found[RECORDED_SAMPLES - 1]
    assert last.key == whole(tensor[RECORDED_SAMPLES - 1]).key
    assert found[SKETCHED_SAMPLES - 1].sketch is not None
    assert found[SKETCHED_SAMPLES].sketch is None
    assert len(last.sample) == 32


def test_an_op_with_more_results_than_there_is_room_for_loses_none():
    rows, written = SampleRows(ENGINE, 1000, Lengths(lambda *_: None)), Written()
    tensor = torch.randn(1000, 2)
    for value in range(1, 30):
        rows.add(tensor, value, (Position(0, 1, 1000, 1),), 0, alone=False)

    assert rows.is_full
    rows.write(written)  # type: ignore[arg-type]
    assert not rows.is_full
    assert written.tables["samples"].num_rows == 29 * 1000
    assert written.tables["samples"]["value"].to_pylist()[::1000] == list(range(1, 30))


# ---- recorded runs -------------------------------------------------------------------------------------------


class Elementwise(nn.Module):
    """Ops that compute each element by itself, so a batch and a sample agree in every bit."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(0, 1).clone(memory_format=torch.contiguous_format) * 2
        return torch.where(y > 0, y.sqrt(), y - 1).to(torch.bfloat16)


def test_a_sample_in_a_batch_has_the_fingerprints_of_the_sample_alone(record):
    x = torch.randn(4, 3, 50)
    batch = record(Elementwise(), x, batch=opdrift.Batch(4))

    for sample in range(4):
        alone = record(Elementwise(), x[sample : sample + 1], batch=opdrift.Batch(1))
        assert len(alone.ops) == len(batch.ops)
        for i in range(len(batch.ops)):
            for a, b in zip(batch.op(i).outputs, alone.op(i).outputs, strict=True):
                if batch.fingerprint(a) is None or batch.batch_of(a) is None:
                    continue
                assert_same(batch.sample(a, sample), alone.sample(b, 0))
    assert len(outputs(batch, "aten.where.self")) == 1


def test_a_batch_of_one_stores_nothing_twice(record):
    trace = record(Elementwise(), torch.randn(1, 3, 50), batch=opdrift.Batch(1))

    value = outputs(trace, "aten.sqrt.default")[0]

    assert len(trace.samples.prints) == 0
    assert_same(trace.sample(value, 0), trace.fingerprint(value))
    assert trace.sample(value, 1) is None


def test_a_batch_of_one_without_padding_has_lengths_for_nothing(record):
    trace = record(Elementwise(), torch.randn(1, 5, 50), batch=opdrift.Batch(1, [5]))

    value = outputs(trace, "aten.sqrt.default")[0]

    assert len(trace.samples.prints) == 0
    assert_same(trace.sample(value, 0), trace.fingerprint(value))


def test_a_padded_batch_of_one_is_cut(record):
    x = torch.randn(1, 6, 50)
    padded = record(Elementwise(), x, batch=opdrift.Batch(1, [4]), inputs={"x": x[:, :6]})
    cut = record(Elementwise(), x[:, :4].clone(), batch=opdrift.Batch(1, [4]))

    assert padded.samples.first_extents is None  # neither 6 nor 50 is 4, and it has three dims
    ids = torch.randint(0, 9, (1, 6))
    table = nn.Embedding(9, 3)
    padded = record(table, ids, batch=opdrift.Batch(1, [4]))
    cut = record(table, ids[:, :4].clone(), batch=opdrift.Batch(1, [4]))
    a, b = outputs(padded, "aten.embedding.default")[0], outputs(cut, "aten.embedding.default")[0]
    assert_same(padded.sample(a, 0), cut.sample(b, 0))
    assert padded.extents(padded.batch_of(a).lengths[0].axis).valid == ((0, 4),)


def test_without_batch_nothing_is_known_of_samples(record):
    trace = record(nn.Linear(3, 4), torch.randn(2, 3), batch=None)

    value = outputs(trace, "aten.addmm.default")[0]

    assert trace.batch is None
    assert trace.batch_of(value) is None
    assert trace.sample(value, 0) is None


def test_weights_carry_no_sample(record):
    trace = record(nn.Linear(4, 4), torch.randn(4, 4), batch=opdrift.Batch(4))

    parameters = [leaf.value for leaf in trace.leaves if leaf.kind == "parameter"]

    assert len(parameters) == 2
    for value in parameters:
        assert trace.batch_of(value) is None
        assert trace.sample(value, 0) is None


def test_inputs_and_results_have_samples(record):
    x = torch.randn(3, 4)
    trace = record(nn.Flatten(0), x, batch=opdrift.Batch(3))

    given, returned = (
        [leaf for leaf in trace.leaves if leaf.kind == k] for k in ("input", "output")
    )

    assert_same(trace.sample(given[0].value, 1), whole(x[1]))
    # a view of the input: the batch lies in it as (1, 3, 4)
    assert trace.batch_of(returned[0].value).batch == (Position(0, 1, 3, 4),)


def test_named_inputs_have_samples_without_a_module(record):
    x = torch.randn(3, 2, 5)
    trace = record(torch.exp, x, batch=opdrift.Batch(2), inputs={"x": x})

    value = outputs(trace, "aten.exp.default")[0]

    assert trace.batch_of(value).batch == (Position(1, 1, 2, 1),)
    assert_same(trace.sample(value, 1), whole(x[:, 1].exp()))


def test_what_mixes_the_samples_says_so(record):
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    trace = record(Centred(), torch.randn(3, 4), batch=opdrift.Batch(3))
    mean, centred = (outputs(trace, f"aten.{op}")[0] for op in ("mean.dim", "sub.Tensor"))

    assert trace.batch_of(mean).mixed
    assert trace.batch_of(mean).batch == ()
    assert trace.batch_of(centred).mixed
    assert trace.sample(mean, 0) is None
    assert trace.sample(centred, 0) is not None


def test_what_cannot_be_followed_says_so(record):
    class Shuffled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[torch.tensor([1, 0, 2])].exp().sin()

    trace = record(Shuffled(), torch.randn(3, 4), batch=opdrift.Batch(3))

    for op in ("aten.index.Tensor", "aten.exp.default"):
        value = outputs(trace, op)[0]
        assert trace.batch_of(value).unknown
        assert trace.sample(value, 0) is None


def test_a_result_to_which_nothing_was_followed_is_taken_to_carry_the_batch_as_an_input_does(
    record,
):
    """It may be sorted otherwise, so it is called unsure; one without a dim of the batch's size stays unknown."""

    class Shuffled(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            rows = x[torch.tensor([1, 0, 2])]
            return rows.exp(), rows.view(-1).sin()

    trace = record(Shuffled(), torch.randn(3, 4), batch=opdrift.Batch(3))

    first, second = (leaf.value for leaf in trace.leaves if leaf.kind == "output")
    followed = trace.batch_of(first)
    assert (followed.batch, followed.unsure) == ((Position(0, 1, 3, 1),), True)
    assert trace.sample(first, 2) is not None
    assert trace.batch_of(second).unknown


def test_what_was_lined_up_with_the_batch_has_samples_and_may_be_mixed(record):
    class Shuffled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[torch.tensor([1, 0, 2])] + x

    x = torch.randn(3, 4)
    trace = record(Shuffled(), x, batch=opdrift.Batch(3))

    for op in ("aten.index.Tensor", "aten.add.Tensor"):
        followed = trace.batch_of(outputs(trace, op)[0])
        assert followed.batch == (Position(0, 1, 3, 1),)
        assert followed.unsure
        assert not followed.unknown
    assert_same(trace.sample(outputs(trace, "aten.index.Tensor")[0], 0), whole(x[1]))


def test_a_part_of_a_buffer_has_samples(record):
    class Cache(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            cache = torch.zeros(3, 8, 4)
            cache[:, :2] = x
            return cache[:, :2] * 1

    x = torch.randn(3, 2, 4)
    trace = record(Cache(), x, batch=opdrift.Batch(3))
    copied, read = outputs(trace, "aten.copy_.default")[0], outputs(trace, "aten.mul.Tensor")[0]

    assert_same(trace.sample(copied, 1), whole(x[1]))
    assert_same(trace.sample(read, 1), whole(x[1]))


def test_a_mark_tells_where_the_batch_was_found(record):
    class Two(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x[:, 0] * mask[:, 0]

    trace = record(Two(), torch.randn(4, 3), torch.ones(4, 4), batch=opdrift.Batch(4))

    (mark,) = [mark for mark in trace.marks if mark.kind == "batch"]
    assert mark.fields["inputs"]["x"] == {"batch": 0, "lengths": [], "unknown": None}
    assert mark.fields["inputs"]["mask"]["batch"] is None
    assert "two leading dims of 4" in mark.fields["inputs"]["mask"]["unknown"]


def test_random_numbers_that_meet_the_batch_have_samples(record):
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn(3, 4)

    torch.manual_seed(0)
    trace = record(Noisy(), torch.ones(3, 4), batch=opdrift.Batch(3))

    drawn = outputs(trace, "aten.randn.default")[0]

    assert trace.batch_of(drawn).batch == (Position(0, 1, 3, 1),)
    torch.manual_seed(0)
    assert_same(trace.sample(drawn, 1), whole(torch.randn(3, 4)[1]))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_through_nested_tensors_nothing_is_followed(record):
    """The fast path of an encoder packs its padding away, and unpacks the result, which is unsure."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=True).eval()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])

    trace = record(
        lambda x: model(x, src_key_padding_mask=padding),
        torch.randn(2, 5, 8),
        batch=opdrift.Batch(2),
    )

    result = next(leaf.value for leaf in trace.leaves if leaf.kind == "output")
    assert trace.footer.failures == ()
    assert trace.batch_of(result).unsure
    layers = [v for v in outputs(trace, "aten.to_padded_tensor.default") if v != result]
    assert all(trace.batch_of(v).unknown for v in layers)


def test_a_batch_that_no_input_has_is_told(record):
    trace = record(nn.Linear(4, 2), torch.randn(3, 4), batch=opdrift.Batch(5))

    assert len(trace.samples.own) == 0
    assert any("leading dim of 5" in note for note in trace.footer.notes)
    with pytest.raises(IncomparableTracesError, match="leading dim of 5"):
        OneSample(Contents(trace), 0)


def test_a_padded_length_that_no_input_has_is_told(record):
    trace = record(nn.Linear(4, 2), torch.randn(3, 4), batch=opdrift.Batch(3, [9, 8, 7]))

    assert any("dim of 9" in note for note in trace.footer.notes)


@pytest.mark.parametrize("lengths", [None, [5, 3, 2]], ids=["whole", "padded"])
def test_following_the_batch_does_not_change_the_run(unchanged, lengths: list[int] | None):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    norm = nn.BatchNorm1d(5)
    x = torch.randn(3, 5, 8)

    def run() -> list[Tensor]:
        norm.reset_running_stats()
        layer.zero_grad()
        y = norm(layer(x))
        y.square().mean().backward()
        return [y, *(p.grad.clone() for p in layer.parameters())]

    trace = unchanged(run, model=layer, batch=opdrift.Batch(3, lengths))

    assert len(trace.samples.prints) > 0


@pytest.mark.parametrize("lengths", [None, [5, 3, 2]], ids=["whole", "padded"])
def test_samples_of_tensors_on_a_device_arrive_later_and_are_the_same(
    record, lengths: list[int] | None, monkeypatch: pytest.MonkeyPatch
):
    """The host stands for a device, whose rows come through its ring."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    x = torch.randn(3, 5, 8)
    expected = record(layer, x, batch=opdrift.Batch(3, lengths))

    monkeypatch.setattr(devices, "Accelerator", HostAccelerator)
    monkeypatch.setattr(devices, "kernels_for", lambda device: (TorchOps,))
    monkeypatch.setattr(values.Values, "is_elsewhere", staticmethod(lambda tensor: True))
    found = record(layer, x, batch=opdrift.Batch(3, lengths))

    compared = 0
    for i in range(len(expected.ops)):
        for a, b in zip(expected.op(i).outputs, found.op(i).outputs, strict=True):
            for sample in range(3):
                one, other = expected.sample(a, sample), found.sample(b, sample)
                assert (one is None) == (other is None)
                if one is not None and other is not None:
                    compared += 1
                    assert one.key == other.key
                    assert one.sample.tolist() == other.sample.tolist()
    assert compared > 30


# ---- one sample against another --------------------------------------------------------------------------------


def sides(left: opdrift.Trace, right: opdrift.Trace, a: int, b: int) -> tuple[OneSample, OneSample]:
    return OneSample(Contents(left), a), OneSample(Contents(right), b)


def first_difference(left: OneSample, right: OneSample) -> str:
    """The first op with equal inputs, as far as they can be compared, and another output; by names in order."""
    ops = [[t.op(i) for i in range(len(t.ops))] for t in (left.trace, right.trace)]
    for a, b in zip(*ops, strict=True):
        assert a.name == b.name
        pairs = [pair(left, right, x, y) for x, y in zip(a.outputs, b.outputs, strict=True)]
        if any(found is not None and found[0].key != found[1].key for found in pairs):
            return a.name
    return ""


def test_a_sample_alone_equals_itself_in_a_batch(record):
    x = torch.randn(4, 3, 50)
    left = record(Elementwise(), x[2:3], batch=opdrift.Batch(1))
    right = record(Elementwise(), x, batch=opdrift.Batch(4))

    assert first_difference(*sides(left, right, 0, 2)) == ""


def test_the_wrong_sample_differs_from_the_first_op_on(record):
    x = torch.randn(4, 3, 50)
    left = record(Elementwise(), x[2:3], batch=opdrift.Batch(1))
    right = record(Elementwise(), x, batch=opdrift.Batch(4))

    one, other = sides(left, right, 0, 1)

    assert first_difference(one, other) == "aten.transpose.int"  # a view of the input


def test_words_are_equal_where_fingerprints_are(record):
    x = torch.randn(4, 3, 50)
    model = nn.Sequential(Elementwise())
    left = record(model, x[2:3], batch=opdrift.Batch(1))
    right = record(model, x, batch=opdrift.Batch(4))
    one, other = sides(left, right, 0, 2)

    for i in range(len(left.ops)):
        for a, b in zip(left.op(i).outputs, right.op(i).outputs, strict=True):
            same = one.words[a] == other.words[b] != 0
            if left.fingerprint(a) is not None:
                assert same


def test_values_that_carry_nothing_are_compared_whole(record):
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    left = record(model, x[:1], batch=opdrift.Batch(1))
    right = record(model, x, batch=opdrift.Batch(4))
    one, other = sides(left, right, 0, 0)
    weights = [
        next(leaf.value for leaf in t.leaves if leaf.name == "weight") for t in (left, right)
    ]

    found = pair(one, other, *weights)

    assert found is not None
    assert found[0].key == found[1].key == whole(model.weight).key


def test_reasons_why_a_value_cannot_be_compared(record):
    class Model(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            empty = torch.empty(2)
            shuffled = x[torch.tensor([1, 0, 2])]
            mean = x.mean(0)
            later = x[:, 1:].exp()
            return shuffled.sum() + mean.sum() + later.sum() + mask.sum() + empty.fill_(0).sum()

    x, mask = torch.randn(3, 4), torch.ones(3, 4)
    trace = record(Model(), x, mask, batch=opdrift.Batch(3, [4, 2, 2]))
    whole_one, padded_one = (OneSample(Contents(trace), sample) for sample in (0, 1))
    later = outputs(trace, "aten.exp.default")[0]

    assert whole_one.missing(outputs(trace, "aten.index.Tensor")[0]) == "unknown"
    assert whole_one.missing(outputs(trace, "aten.mean.dim")[0]) == "mixed"
    assert whole_one.missing(outputs(trace, "aten.empty.memory_format")[0]) == "unread"
    assert whole_one.missing(later) is None  # it has no padding
    assert padded_one.missing(later) == "padding"
    assert padded_one.fingerprint(later) is None


def test_a_view_is_stood_for_by_what_it_is_a_view_of(record):
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a, b = (x * 2).chunk(2, -1)
            return a.transpose(0, 1) @ b.transpose(0, 1).transpose(1, 2)

    x = torch.randn(3, 4, 6)
    left = record(Model(), x[1:2], batch=opdrift.Batch(1))
    right = record(Model(), x, batch=opdrift.Batch(3))
    one, other = sides(left, right, 0, 1)
    views = [outputs(t, "aten.split.Tensor")[1] for t in (left, right)]

    found = pair(one, other, *views)

    assert found is not None
    assert found[0].key == found[1].key == whole(x[1] * 2).key


@pytest.mark.parametrize(
    ("sample", "batch", "message"),
    [(0, None, "without batch="), (1, opdrift.Batch(1), "has one sample, 0; there is no sample 1"), (3, opdrift.Batch(3), "samples 0 to 2"), (-1, opdrift.Batch(3), "no sample -1")],
)  # fmt: skip
def test_a_sample_that_is_not_there_is_an_error(
    record, sample: int, batch: opdrift.Batch | None, message: str
):
    trace = record(nn.Linear(2, 2), torch.randn(3, 2), batch=batch)

    with pytest.raises(IncomparableTracesError, match=message):
        OneSample(Contents(trace), sample)


# ---- faults that only a batch shows ------------------------------------------------------------------------------


class Decoder(nn.Module):
    """Learned positions; it counts them from the first token, or from the first padding."""

    def __init__(self, *, counts_padding: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.counts_padding = counts_padding
        self.words, self.places = nn.Embedding(50, 16), nn.Embedding(32, 16)
        self.qkv = nn.Linear(16, 48)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        length = ids.shape[1]
        places = torch.arange(length)[None] if self.counts_padding else mask.cumsum(1) - mask
        x = self.words(ids) + self.places(places)
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        seen = torch.tril(torch.ones(length, length, dtype=torch.bool)) & mask[:, None].bool()
        seen = seen | torch.eye(length, dtype=torch.bool)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])


def left_padded() -> tuple[Tensor, Tensor]:
    ids = torch.tensor([[0, 0, 0, 11, 4, 8], [9, 2, 6, 7, 21, 3]])
    return ids, (ids > 0).long()


def test_positions_that_count_padding_show_at_the_table_of_positions(record):
    ids, mask = left_padded()
    model = Decoder(counts_padding=True).eval()
    left = record(
        model, ids[:1, 3:].clone(), mask[:1, 3:].clone(), batch=opdrift.Batch(1, [3], "left")
    )
    right = record(model, ids, mask, batch=opdrift.Batch(2, [3, 6], "left"))

    one, other = sides(left, right, 0, 0)

    assert first_difference(one, other) == "aten.embedding.default"
    words, places = (
        [outputs(t, "aten.embedding.default")[k] for t in (left, right)] for k in (0, 1)
    )
    assert _relation(pair(one, other, *words)) == "equal"
    assert _relation(pair(one, other, *places)) == "different"


def test_right_positions_differ_by_rounding_at_most(record):
    ids, mask = left_padded()
    model = Decoder(counts_padding=False).eval()
    left = record(
        model, ids[:1, 3:].clone(), mask[:1, 3:].clone(), batch=opdrift.Batch(1, [3], "left")
    )
    right = record(model, ids, mask, batch=opdrift.Batch(2, [3, 6], "left"))
    one, other = sides(left, right, 0, 0)
    compared = 0

    for i in range(len(left.ops)):
        for a, b in zip(left.op(i).outputs, right.op(i).outputs, strict=True):
            found = pair(one, other, a, b)
            if found is None:
                continue
            compared += 1
            norm = math.sqrt(found[0].ssq)
            assert abs(norm - math.sqrt(found[1].ssq)) <= 1e-5 * max(norm, 1)
    assert compared > 15


def _relation(found: tuple[Fingerprint, Fingerprint] | None) -> str:
    if found is None:
        return "unknown"
    return "equal" if found[0].key == found[1].key else "different"
