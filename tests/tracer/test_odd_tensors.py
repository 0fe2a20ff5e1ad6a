"""Tensors that are not just memory: their parts have fingerprints, as leaves and as outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import opdrift
from opdrift.fingerprint import load_engine

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*prototype.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*"),
    pytest.mark.filterwarnings("ignore:.*is deprecated.*"),
]

Traced = Callable[[Callable[[], Any]], "opdrift.Trace"]


@pytest.fixture
def traced(tmp_path: Path) -> Traced:
    """Record a run without failures of the tracer, and without contents that were left out."""

    def record(run: Callable[[], Any], **options: Any) -> opdrift.Trace:
        with opdrift.record(tmp_path / "a.trace", overwrite=True, **options):
            kept = run()
        trace = opdrift.load(tmp_path / "a.trace")
        assert trace.incomplete is None
        assert trace.footer is not None
        assert (trace.footer.failures, trace.footer.notes) == ((), ())
        del kept
        return trace

    return record


def raw(tensor: Tensor) -> int:
    return int(load_engine().fingerprint(tensor)["raw"])


def raws(trace: opdrift.Trace, values: Any) -> list[int | None]:
    """The digest of each value; None for values without a fingerprint."""
    found = []
    for value in values:
        fingerprint = trace.fingerprint(int(value))
        found.append(None if fingerprint is None else fingerprint.raw)
    return found


def outputs(trace: opdrift.Trace, name: str) -> list[int | None]:
    """The digests of what the last op of this name returned."""
    found = [trace.op(k) for k in range(len(trace.ops)) if trace.op(k).name == name]
    return raws(trace, found[-1].outputs)


def leaves(trace: opdrift.Trace) -> list[int | None]:
    """The digests of what no op made."""
    kinds = ("constant", "input", "parameter", "buffer")
    return raws(trace, [leaf.value for leaf in trace.leaves if leaf.kind in kinds])


# ---- dtypes ----------------------------------------------------------------------------------------------

PLAIN = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
TO_COPY, ADD, MUL = "aten._to_copy.default", "aten.add.Tensor", "aten.mul.Tensor"
#: name -> (the leaf, what to do with it, the op that does it)
CASES: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Any], str]] = {
    "float8": (lambda: PLAIN.to(torch.float8_e4m3fn), lambda x: x.to(torch.float32), TO_COPY),
    "to float8": (lambda: PLAIN, lambda x: x.to(torch.float8_e5m2), TO_COPY),
    "complex": (lambda: PLAIN.to(torch.complex64), lambda x: x * 1j, MUL),
    "complex half": (
        lambda: torch.view_as_complex(PLAIN.half().view(16, 2)),
        lambda x: torch.view_as_real(x) * 2,
        MUL,
    ),
    "unsigned": (lambda: torch.arange(9).to(torch.uint32), lambda x: x.to(torch.int64), TO_COPY),
    "bool": (lambda: PLAIN > 0, lambda x: ~x, "aten.bitwise_not.default"),
    "quantised": (
        lambda: torch.quantize_per_tensor(PLAIN, 0.1, 3, torch.qint8),
        lambda x: x.dequantize(),
        "aten.dequantize.self",
    ),
    "to quantised": (
        lambda: PLAIN,
        lambda x: torch.quantize_per_tensor(x, 0.1, 3, torch.quint8),
        "aten.quantize_per_tensor.default",
    ),
    "0-dim": (lambda: torch.tensor(3.0), lambda x: x + 1, ADD),
    "empty": (lambda: torch.empty(0, 3), lambda x: x + 1, ADD),
    "transposed": (lambda: PLAIN.t(), lambda x: x + 1, ADD),
    "expanded": (lambda: PLAIN[:1].expand(5, 8), lambda x: x + 1, ADD),
    "channels last": (
        lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        lambda x: x + 1,
        ADD,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_content_is_fingerprinted(traced, case):
    """As a leaf that no op made, and as an output."""
    make, run, name = CASES[case]
    leaf, results = make(), []
    trace = traced(lambda: results.append(run(leaf)))

    assert leaves(trace) == [raw(leaf)]
    assert outputs(trace, name) == [raw(results[0])]


def test_sub_byte_types_are_their_bytes(traced):
    """An unsigned 4-bit type is read as it lies in memory; so is fp4."""
    packed = torch.arange(8, dtype=torch.uint8)
    for dtype in (torch.uint4, torch.float4_e2m1fn_x2):
        trace = traced(lambda dtype=dtype: packed.view(dtype).view(torch.uint8) + 1)

        assert leaves(trace)[0] == raw(packed)
        assert outputs(trace, "aten.add.Tensor") == [raw(packed + 1)]


def test_conjugate_and_negative_views_are_read_resolved(traced):
    """What an op makes of a lazy view is what it would make of the numbers."""
    z = torch.randn(5, dtype=torch.complex64)
    trace = traced(lambda: (z.conj() * 2, z.conj().imag * 3))

    assert raw(z.conj_physical() * 2) in outputs(trace, "aten.mul.Tensor") or raw(
        -z.imag * 3
    ) in outputs(trace, "aten.mul.Tensor")


# ---- tensors of several parts ----------------------------------------------------------------------------


def test_a_sparse_tensor_is_its_indices_and_values(traced):
    """As a leaf, as an output, and what is computed with it."""
    sparse = PLAIN.relu().to_sparse().coalesce()
    trace = traced(lambda: sparse * 2)

    assert leaves(trace) == [raw(sparse._indices()), raw(sparse._values())]
    assert outputs(trace, "aten.mul.Tensor") == [raw(sparse._indices()), raw(sparse._values() * 2)]


@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_a_compressed_sparse_tensor_is_its_three_parts(traced, layout):
    """Pointers, indices and values."""
    made = PLAIN.relu()
    sparse = made.to_sparse_csr() if layout == "csr" else made.to_sparse_csc()
    trace = traced(lambda: sparse @ torch.ones(8, 2))
    pointers = sparse.crow_indices() if layout == "csr" else sparse.ccol_indices()

    assert raw(pointers) in leaves(trace)
    assert raw(sparse.values()) in leaves(trace)


def test_a_strided_nested_tensor_is_its_components(traced):
    """It has no sizes, but a storage, which must not lead astray."""
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    nested = torch.nested.nested_tensor(parts)
    trace = traced(lambda: nested * 2)

    assert raws(trace, trace.op(0).inputs) == [raw(part) for part in parts]
    assert outputs(trace, "aten.mul.Tensor") == [raw(part * 2) for part in parts]


def test_a_jagged_nested_tensor_is_its_values(traced):
    """Its ops run on the values, which are plain."""
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    trace = traced(lambda: nested * 2)

    assert leaves(trace) == [raw(nested.values())]
    assert outputs(trace, "aten.mul.Tensor") == [raw(nested.values() * 2)]


class Model(nn.Module):
    """Multiplies by a parameter of any kind."""

    def __init__(self, parameter: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def named(trace: opdrift.Trace) -> dict[str, int | None]:
    """Digest by name, of what was named on entry."""
    rows = [leaf for leaf in trace.leaves if leaf.when == "entry"]
    return dict(
        zip([leaf.name for leaf in rows], raws(trace, [leaf.value for leaf in rows]), strict=True)
    )


def test_a_wrapper_s_parts_are_named_after_it(traced):
    """A parameter that wraps other tensors, as quantised weights do, is known by them."""
    model = Model(TwoTensor(torch.ones(3), torch.full((3,), 2.0)))
    trace = traced(lambda: model(torch.ones(3)), model=model)

    assert named(trace) == {"weight.a": raw(torch.ones(3)), "weight.b": raw(torch.full((3,), 2.0))}
    inside = {leaf.value for leaf in trace.leaves if leaf.when == "entry"}
    used = {v for k in range(len(trace.ops)) for v in trace.op(k).inputs}
    assert inside <= used


def test_a_jagged_parameter_s_parts_are_named_after_it(traced):
    """Values and offsets."""
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    model = nn.Module()
    model.register_buffer("packed", nested)
    trace = traced(lambda: model.packed * 2, model=model)

    assert named(trace)["packed._values"] == raw(nested.values())
    assert named(trace)["packed._offsets"] == raw(nested.offsets())


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of this process alone."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_a_dtensor_is_its_local_part(traced, mesh):
    """Under its own name as a parameter, and in the ops that it runs."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x = distribute_tensor(PLAIN, mesh, [Shard(0)])
    model = Model(distribute_tensor(torch.full((8,), 2.0), mesh, [Replicate()]))
    trace = traced(lambda: model(x), model=model)

    assert named(trace) == {"weight": raw(torch.full((8,), 2.0))}
    assert outputs(trace, "aten.mul.Tensor") == [raw(PLAIN * 2)]


def test_digests_of_the_same_content_do_not_depend_on_its_wrapping(traced):
    """Sparse values, nested components and plain tensors are comparable."""
    dense = torch.arange(1.0, 7.0)
    wrapped = TwoTensor(dense, dense)
    trace = traced(lambda: (wrapped * 2, dense * 2))
    digests = np.array(
        [d for k in range(len(trace.ops)) for d in raws(trace, trace.op(k).outputs)], np.uint64
    )

    assert set(digests.tolist()) == {raw(dense * 2)}


# ---- tensors of more elements than memory -----------------------------------------------------------------


def test_an_expanded_leaf_of_billions_of_elements_is_known_by_what_it_repeats(tmp_path):
    """Writing 2^33 elements out to read them would take 32 GB; another content is found all the same."""
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        mask = torch.full((1,), value).expand(1 << 31, 4)
        with opdrift.record(tmp_path / name):
            mask[:5] * 2
    trace = opdrift.load(tmp_path / "a")
    changed = opdrift.diff(tmp_path / "a", tmp_path / "c")

    assert trace.footer is not None
    assert (trace.footer.failures, trace.footer.notes) == ((), ())
    assert opdrift.diff(tmp_path / "a", tmp_path / "b").verdict == "identical"
    assert changed.first is not None
    assert changed.first.kind == "leaf"


@pytest.mark.parametrize("integrity", ["auto", "full"])
def test_an_expanded_buffer_is_checked_by_what_it_repeats(traced, integrity):
    """As a buffer it is read on entry, and again at its uses."""
    model = nn.Module()
    model.register_buffer("mask", torch.ones(1, 8, 1).expand(1 << 12, 8, 1 << 10))
    model.forward = lambda x: x * model.mask[:2, :2, :2]

    trace = traced(
        lambda: [model(torch.ones(1)) for _ in range(3)], model=model, integrity=integrity
    )

    assert raw(torch.ones(8)) in raws(trace, range(1, len(trace.values.storage)))


@pytest.mark.slow
def test_a_leaf_of_more_than_2_to_the_31_elements_is_read_whole(traced):
    """Every element counts, the last one too."""
    large = torch.from_numpy(
        np.zeros((1 << 31) + 5, np.uint8)
    )  # pages that nobody writes take no memory
    large[-1] = 9
    trace = traced(lambda: large[-3:] + 1)
    found = trace.fingerprint(trace.leaves[0].value)

    assert found is not None
    assert (found.n, found.max, found.zero) == ((1 << 31) + 5, 9.0, (1 << 31) + 4)


# ---- wrappers ----------------------------------------------------------------------------------------------


class Packed(Tensor):
    """A weight of int8 and a scale, as torchao's are."""

    @staticmethod
    def __new__(cls, packed: Tensor, scale: Tensor) -> Packed:
        return Tensor._make_wrapper_subclass(cls, packed.shape, dtype=torch.float32)

    def __init__(self, packed: Tensor, scale: Tensor) -> None:
        self.packed, self.scale = packed, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["packed", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].packed, args[0].scale)
        numbers = [a.packed * a.scale if isinstance(a, Packed) else a for a in args]
        return func(*numbers, **(kwargs or {}))


def test_a_quantised_weight_is_its_parts_and_the_ops_that_it_runs(traced):
    """What a wrapper computes inside is recorded like anything else."""
    weight = Packed(torch.arange(-16, 16, dtype=torch.int8).view(4, 8), torch.tensor(0.1))
    model = nn.Linear(8, 4, bias=False)
    model.weight = nn.Parameter(weight, requires_grad=False)
    trace = traced(lambda: model(PLAIN), model=model)

    assert named(trace) == {"weight.packed": raw(weight.packed), "weight.scale": raw(weight.scale)}
    assert outputs(trace, "aten.mul.Tensor") == [raw(weight.packed * weight.scale)]
    assert outputs(trace, "aten.mm.default") == [raw(PLAIN @ (weight.packed * weight.scale).t())]


class Named(Tensor):
    """A subclass that only overrides functions."""


def test_a_subclass_with_memory_of_its_own_is_its_content(traced):
    """It has no parts; its ops are those of plain tensors."""
    trace = traced(lambda: PLAIN.as_subclass(Named) * 2)

    assert leaves(trace) == [raw(PLAIN)]
    assert outputs(trace, "aten.mul.Tensor") == [raw(PLAIN * 2)]


@pytest.mark.parametrize("layout", ["coo", "bsr"])
def test_sparse_tensors_of_every_layout_have_parts(traced, layout):
    """An uncoalesced one is what it holds, duplicates and all; blocks are values of three dims."""
    if layout == "coo":
        sparse = torch.sparse_coo_tensor(
            [[0, 0], [1, 1]], [1.0, 2.0], (2, 2), check_invariants=True
        )
        own = [sparse._indices(), sparse._values()]
    else:
        sparse = PLAIN.relu().to_sparse_bsr((2, 2))
        own = [sparse.crow_indices(), sparse.col_indices(), sparse.values()]
    trace = traced(lambda: sparse.to_dense() * 2)

    assert set(map(raw, own)) <= set(leaves(trace))
    assert outputs(trace, "aten.mul.Tensor") == [raw(sparse.to_dense() * 2)]
