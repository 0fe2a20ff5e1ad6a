"""Which content a tensor holds, as the trace has it: write counts, layouts, leaves, hidden writes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from recordings import recorded, recording
from torch import nn

import opdrift
from opdrift.records import READ_UNINITIALISED, REREAD


def reads_unwritten(found, name: str) -> bool:
    return bool(found.op(name).flags & READ_UNINITIALISED)


# ---- what a write does -------------------------------------------------------------------------------


def test_a_write_gives_the_storage_another_content():
    with recording() as found:
        x = torch.ones(2)
        x.add_(1)
        x * 2

    assert found.read("mul.Tensor") == [[2.0, 2.0]]
    assert found.trace.values.write[found.op("mul.Tensor").inputs[0]] == 1


def test_an_op_that_only_reads_gives_no_other_content():
    with recording() as found:
        x = torch.ones(2)
        x + 1
        x * 2

    assert found.op("add.Tensor").inputs == found.op("mul.Tensor").inputs


def test_a_write_through_a_view_is_seen_in_its_base():
    with recording() as found:
        x = torch.zeros(3)
        x[1] = 5.0
        x * 2

    assert found.read("mul.Tensor") == [[0.0, 5.0, 0.0]]


def test_a_write_into_the_base_is_seen_in_a_view_that_was_taken_before():
    with recording() as found:
        x = torch.zeros(2, 2)
        row = x[1]
        x[1, 0] = 7.0
        row * 2

    assert found.read("mul.Tensor") == [[7.0, 0.0]]


def test_an_out_argument_is_a_write_even_if_it_is_resized():
    with recording() as found:
        out = torch.empty(0)
        torch.add(torch.ones(2), 1, out=out)
        out * 2

    assert found.read("mul.Tensor") == [[2.0, 2.0]]


def test_an_op_over_a_list_of_tensors_writes_each_of_them():
    with recording() as found:
        parts = [torch.ones(1), torch.full((1,), 2.0)]
        torch._foreach_mul_(parts, 3)

    assert found.wrote("_foreach_mul_.Scalar") == [[3.0], [6.0]]


def test_detach_returns_the_same_value():
    with recording() as found:
        x = torch.ones(2)
        x.detach() * 2

    assert found.op("mul.Tensor").inputs == found.op("ones.default").outputs


def test_a_tensor_set_onto_another_storage_has_that_storages_content():
    with recording() as found:
        x, y = torch.zeros(2), torch.ones(2)
        x.set_(y)
        x * 2

    assert found.op("mul.Tensor").inputs == found.op("ones.default").outputs


def test_the_fingerprint_of_an_expanded_tensor_is_that_of_all_its_elements():
    with recording() as found:
        x = torch.ones(1, 2).expand(2, 2).contiguous()
        x * 2

    assert found.read("mul.Tensor") == [[1.0, 1.0, 1.0, 1.0]]


def test_a_copy_that_a_view_op_makes_in_inference_mode_is_fingerprinted():
    """There `reshape` and `to` come whole, and their schemas call them views."""
    with torch.inference_mode(), recording() as found:
        x = torch.arange(4.0).view(2, 2)
        x.t().reshape(-1)
        x.double().float()

    assert found.wrote("reshape.default") == [[0.0, 2.0, 1.0, 3.0]]
    assert found.wrote("to.dtype") == [[0.0, 1.0, 2.0, 3.0]]


def test_inference_tensors_have_values_though_they_have_no_versions():
    with recording() as found:
        with torch.inference_mode():
            x = torch.ones(2)
            x.add_(1)
        x * 2

    assert found.read("mul.Tensor") == [[2.0, 2.0]]


def test_empty_tensors_are_values_like_others():
    with recording() as found:
        torch.zeros(0, 3) * 2

    assert found.read("mul.Tensor") == [[]]


# ---- memory that nobody has written --------------------------------------------------------------------


def test_reading_memory_that_nothing_has_written_is_flagged():
    with recording() as found:
        torch.empty(3).clone()

    assert reads_unwritten(found, "clone.default")


def test_a_cache_that_is_written_by_slices_may_be_read_where_it_was_written():
    with recording() as found:
        cache = torch.empty(4, 2)
        cache[:2] = 1.0
        cache[:2].clone()

    assert not reads_unwritten(found, "clone.default")
    assert found.findings == []


def test_a_cache_that_is_written_by_slices_is_flagged_where_it_was_not_written():
    with recording() as found:
        cache = torch.empty(4, 2)
        cache[:2] = 1.0
        cache[:3].clone()

    assert reads_unwritten(found, "clone.default")


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("index_copy_", lambda x: x.index_copy_(0, torch.tensor([0, 1]), torch.ones(2, 2))),
        ("index_put_", lambda x: x.__setitem__(torch.tensor([0, 1]), torch.ones(2, 2))),
        ("index_fill_", lambda x: x.index_fill_(0, torch.tensor([0, 1]), 1.0)),
        ("masked_fill_", lambda x: x.masked_fill_(torch.arange(4)[:, None] < 2, 1.0)),
        ("scatter_", lambda x: x.scatter_(0, torch.tensor([[0, 0], [1, 1]]), 1.0)),
    ],
)
class TestIndexedWritesIntoUnwrittenMemory:
    """A static cache is allocated with `empty` and filled by index."""

    def test_they_do_not_read_what_they_write_into(self, name, write):
        found = recorded(lambda: write(torch.empty(4, 2)))

        assert not any(op.flags & READ_UNINITIALISED for op in found.ops)

    def test_what_they_wrote_may_be_read(self, name, write):
        def run():
            x = torch.empty(4, 2)
            write(x)
            return x[:2].clone()

        found = recorded(run)

        assert not reads_unwritten(found, "clone.default")
        assert found.read("clone.default") == [[1.0] * 4]

    def test_what_they_left_is_still_unwritten(self, name, write):
        def run():
            x = torch.empty(4, 2)
            write(x)
            return x[:3].clone()

        assert reads_unwritten(recorded(run), "clone.default")

    def test_the_rest_of_the_memory_is_not_fingerprinted(self, name, write):
        """Its content is other at every run, and would look like a divergence."""
        found = recorded(lambda: write(torch.empty(4, 2)))

        written = next(op for op in found.ops if op.name.startswith(f"aten.{name}"))
        assert found.trace.fingerprint(written.outputs[0]) is None


def test_adding_to_unwritten_memory_by_index_reads_it():
    with recording() as found:
        x = torch.empty(2)
        x.index_put_((torch.tensor([0]),), torch.ones(1), accumulate=True)

    assert reads_unwritten(found, "index_put_.default")


def test_a_copy_of_unwritten_memory_is_unwritten_memory():
    """FSDP2 pads the shards that `to_empty` hands out, before anything fills them."""
    with recording() as found:
        shard, padded = torch.empty(3), torch.zeros(4)
        padded[:3].copy_(shard)
        padded[3:] + 1
        padded * 2

    assert not reads_unwritten(found, "copy_.default")
    assert not reads_unwritten(found, "add.Tensor")
    assert reads_unwritten(found, "mul.Tensor")


def test_what_is_written_of_a_copied_tensor_may_be_read():
    with recording() as found:
        half, whole = torch.empty(4), torch.empty(2, 4)
        half[:2] = 1.0
        whole.copy_(half)
        whole[:, :2] + 1
        whole * 2
        whole.uniform_()
        whole / 2

    assert not reads_unwritten(found, "add.Tensor")
    assert reads_unwritten(found, "mul.Tensor")
    assert not reads_unwritten(found, "div.Tensor")


def test_memory_that_numpy_has_filled_is_not_called_unwritten():
    """No op tells of that write, nor of a kernel's that is called through ctypes."""
    with recording() as found:
        x = torch.empty(4)
        x.numpy()[:] = 3.0
        x * 2

    assert not reads_unwritten(found, "mul.Tensor")
    assert found.op("mul.Tensor").flags & REREAD
    assert found.read("mul.Tensor") == [[3.0] * 4]


def test_an_empty_on_the_meta_device_has_nothing_to_write():
    with recording() as found:
        torch.empty(2, device="meta").clone()

    assert not reads_unwritten(found, "clone.default")


# ---- leaves ----------------------------------------------------------------------------------------------


def test_a_tensor_from_before_the_run_is_a_leaf_with_its_content():
    x = torch.ones(2)
    with recording() as found:
        x * 2

    assert [(leaf.kind, found.elements(leaf.value)) for leaf in found.trace.leaves[:1]] == [
        ("constant", [1.0, 1.0])
    ]


def test_two_views_of_one_tensor_from_before_the_run_are_both_fingerprinted():
    """A data set that was cut into batches before."""
    first, second = torch.arange(4.0).split(2)
    with recording() as found:
        first * 2
        second * 2

    assert found.read("mul.Tensor") == [[2.0, 3.0]]


def test_an_argument_that_an_op_only_overwrites_is_not_read():
    """Generated code hands such buffers over; their content is other at every run."""
    out = torch.full((2,), 9.0)
    with recording() as found:
        torch.add(torch.ones(2), 1, out=out)

    assert found.read("add.out") == [[1.0, 1.0], None]


def test_two_recorders_have_values_of_their_own():
    x = torch.ones(2)
    with recording() as outer:
        x.add_(1)
        with recording() as inner:
            x * 2

    assert inner.trace.values.write[inner.op("mul.Tensor").inputs[0]] == 0
    assert outer.trace.values.write[outer.op("mul.Tensor").inputs[0]] == 1


# ---- writes that no op makes -------------------------------------------------------------------------------


def test_a_hidden_write_after_a_visible_one_is_found():
    """Training writes every parameter each step; they are watched after that, too."""
    model = nn.Linear(2, 1, bias=False)
    with recording(model=model, integrity="full") as found:
        with torch.no_grad():
            model.weight.fill_(1.0)
        model.weight.detach().numpy()[0, 0] = 9.0
        model(torch.ones(1, 2))

    assert [finding.name for finding in found.findings] == ["weight"]


def test_a_hidden_write_is_found_through_a_view_that_was_kept():
    model = nn.Linear(2, 1, bias=False)
    transposed = model.weight.detach().t()
    with recording(model=model, integrity="full") as found:
        model.weight.detach().numpy()[0, 0] = 9.0
        torch.ones(1, 2) @ transposed

    assert [finding.name for finding in found.findings] == ["weight"]


def test_a_hidden_write_into_a_parameter_that_the_run_made_is_found():
    with recording(integrity="full") as found:
        model = nn.Linear(2, 1, bias=False)
        model(torch.ones(1, 2))
        model.weight.detach().numpy()[0, 0] = 9.0
        model(torch.ones(1, 2))

    assert [finding.name for finding in found.findings] == ["weight"]


@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_makes_no_hidden_writes(foreach: bool):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    with recording(model=model, integrity="full") as found:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    assert found.findings == []


def test_a_conjugate_view_is_no_hidden_write():
    """It lies where its base lies, and holds another content."""
    x = torch.randn(2, dtype=torch.complex64)
    with recording(integrity="full") as found:
        x.conj() * 2
        x * 2
        x.conj() * 2

    assert found.findings == []


def test_a_view_with_a_version_counter_of_its_own_is_no_hidden_write():
    weight = nn.Parameter(torch.ones(2, 2))
    with torch.no_grad():
        weight.add_(1)
    with recording(inputs={"weight": weight}, integrity="full") as found:
        weight.data * 2
        weight * 2

    assert found.findings == []
    assert [leaf.when for leaf in found.leaves("weight")] == ["entry"]


def test_a_tensor_that_moved_with_its_content_is_the_same_value():
    x = torch.ones(4)
    with recording(inputs={"x": x}) as found:
        x * 2
        x.untyped_storage().resize_(4096)
        x * 2

    first, second = (op.inputs for op in found.ops if op.name == "aten.mul.Tensor")
    assert first == second


def give_other_memory(x: torch.Tensor) -> None:
    """What FSDP does with what it gathered: free the storage, and later fill it again."""
    before = x.data_ptr()
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(1 << 16)
    assert x.data_ptr() != before


def test_memory_that_was_given_back_and_filled_again_is_no_hidden_write():
    x = torch.ones(4)
    with recording(inputs={"x": x}, integrity="full") as found:
        give_other_memory(x)
        x.copy_(torch.full((4,), 2.0))
        x * 2

    assert found.findings == []
    assert found.read("mul.Tensor") == [[2.0] * 4]


def test_memory_that_was_given_back_and_filled_with_no_op_is_a_hidden_write():
    x = torch.ones(4)
    with recording(inputs={"x": x}) as found:
        give_other_memory(x)
        x.numpy()[:] = 5.0
        x * 2

    assert [finding.name for finding in found.findings] == ["x"]


def test_a_view_of_memory_that_was_given_back_reads_nothing():
    x = torch.ones(4)
    with recording(inputs={"x": x}, integrity="full") as found:
        give_other_memory(x)
        x.split(2)

    assert found.findings == []


# ---- memory of the recorder ------------------------------------------------------------------------------------


def test_storages_that_died_are_forgotten():
    with recording() as found:
        x = torch.ones(2)
        for _ in range(2000):
            x = x + 1
        made = found.recorder._values.made
        held = len(made.latest) + len(made._others)

    assert held <= 512


def test_the_layouts_of_one_storage_are_bounded():
    """A data set is read through other windows at every step."""
    data = torch.zeros(10_000)
    with recording(inputs={"data": data}) as found:
        for start in range(6000):
            data[start : start + 2]
        state, _ = found.recorder._values.value_of(data)

    assert len(state.values) <= 4096


def test_the_versions_of_a_leaf_are_bounded():
    weight = nn.Parameter(torch.zeros(2))
    with recording(inputs={"weight": weight}) as found, torch.no_grad():
        for _ in range(100):
            weight.add_(1)
        state, _ = found.recorder._values.value_of(weight)

    assert len(state.leaf.versions) < 30


def test_recording_holds_no_tensor_alive():
    """The last op is a write: its arguments must not stay with the recorder."""
    with recording():
        x = torch.ones(2)
        reference = torch._C._WeakTensorRef(x)
        x.copy_(torch.zeros(2))
        del x
        gc.collect()
        gone = reference.expired()

    assert gone


def test_what_outlives_the_run_is_told():
    kept = []
    with recording() as found:
        for number in range(300):
            kept.append(torch.full((1,), float(number)))
            torch.ones(1)

    alive = [leaf for leaf in found.trace.leaves if leaf.kind == "alive"]
    assert len(alive) == 300


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8])
def test_bits_that_are_read_as_another_dtype_are_no_other_result(
    tmp_path: Path, dtype: torch.dtype
):
    """accelerate writes bfloat16 to disk as integers; what lives on at the end is still the tensor."""

    def run(name: str, look: Callable[[torch.Tensor], object]) -> torch.Tensor:
        with opdrift.record(tmp_path / name):
            x = torch.ones(4) * 2
            look(x)
        return x

    results = [run("left", lambda x: None), run("right", lambda x: x.view(dtype))]

    assert opdrift.diff(tmp_path / "left", tmp_path / "right").verdict == "identical"
    assert len(results) == 2
