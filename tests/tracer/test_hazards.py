"""Hazards of tracing torch: what the dispatcher does not tell, and whose reading is forbidden or too early."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import opdrift
from opdrift.records import Leaf, Op

Python = Callable[..., subprocess.CompletedProcess[str]]
OpNames = Callable[[opdrift.Trace], list[str]]


def whole(path: Path) -> opdrift.Trace:
    """The trace, which must be complete and free of failures of the tracer."""
    trace = opdrift.load(path)
    assert trace.incomplete is None
    assert trace.footer is not None
    assert trace.footer.failures == ()
    return trace


def ops(trace: opdrift.Trace) -> list[Op]:
    return [trace.op(index) for index in range(len(trace.ops))]


def named(trace: opdrift.Trace, name: str) -> list[Leaf]:
    return [leaf for leaf in trace.leaves if leaf.name == name]


def maxima(trace: opdrift.Trace, leaves: list[Leaf]) -> list[float | None]:
    """The largest element of each leaf's content."""
    found = [trace.fingerprint(leaf.value) for leaf in leaves]
    return [None if fingerprint is None else fingerprint.max for fingerprint in found]


# ---- writes that no op announces ---------------------------------------------------------------------


def test_a_write_through_numpy_is_seen_at_the_next_use(tmp_path: Path):
    """No op, no version counter: only the content tells."""
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    with opdrift.record(tmp_path / "run.trace", model=model, integrity="full"):
        model(torch.ones(1, 2))
        model.weight.detach().numpy()[0, 0] = 9
        model(torch.ones(1, 2))

    trace = whole(tmp_path / "run.trace")
    found = named(trace, "weight")

    assert [leaf.when for leaf in found] == ["entry", "changed", "exit"]
    assert maxima(trace, found) == [1.0, 9.0, 9.0]


def test_a_write_into_data_is_recorded_as_the_op_that_it_is(tmp_path: Path):
    """`p.data` has a version counter of its own; the write itself goes through the dispatcher."""
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    with opdrift.record(tmp_path / "run.trace", model=model, integrity="full"):
        model.weight.data.add_(1)
        model(torch.ones(1, 2))

    trace = whole(tmp_path / "run.trace")
    reread = [leaf for leaf in named(trace, "weight") if leaf.when == "changed"]

    assert set(maxima(trace, reread)) <= {1.0}
    assert any(op.name == "aten.add_.Tensor" and op.mutated == 1 for op in ops(trace))


def test_a_tensor_set_as_data_keeps_the_parameters_name(tmp_path: Path):
    """`p.data = x` gives the same Python object another storage, without an op."""
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    with opdrift.record(tmp_path / "run.trace", model=model):
        model(torch.ones(1, 2))
        model.weight.data = torch.full((2, 2), 5.0)
        model(torch.ones(1, 2))

    trace = whole(tmp_path / "run.trace")
    weights = [trace.fingerprint(op.inputs[0]) for op in ops(trace) if op.name == "aten.t.default"]

    assert maxima(trace, named(trace, "weight")[:1]) == [1.0]
    assert weights[-1] is not None
    assert weights[-1].max == 5.0


def test_running_statistics_are_written_by_batch_norm(tmp_path: Path):
    """The schema of `native_batch_norm` does not say that it writes them."""
    model = nn.BatchNorm1d(3)
    with opdrift.record(tmp_path / "run.trace", model=model):
        model(torch.randn(4, 3))

    trace = whole(tmp_path / "run.trace")
    norms = [trace.op(i) for i in range(len(trace.ops)) if "batch_norm" in trace.op(i).name]

    assert [op.mutated for op in norms] == [2]
    assert norms[0].signature.op.mutates == ("running_mean", "running_var")


# ---- memory that must not be read --------------------------------------------------------------------


def test_a_freed_storage_is_never_read(python: Python):
    """Reading it kills the process, so this runs in one of its own. FSDP leaves such tensors everywhere."""
    done = python(
        """
        import torch, opdrift
        kept, freed = torch.randn(64), torch.randn(4096, 64)
        model = torch.nn.Linear(2, 2)
        model.weight.untyped_storage().resize_(0)
        with opdrift.record("run.trace", model=model, inputs={"freed": freed}, integrity="full"):
            kept * freed[0]
            freed.untyped_storage().resize_(0)
            view = freed.view(64, 4096)
            freed.untyped_storage().resize_(4096 * 64 * 4)
            freed.zero_()
            kept * freed[0]
            freed.untyped_storage().resize_(0)
            freed.detach()
        print(opdrift.load("run.trace").footer.failures)
        """
    )

    assert (done.returncode, done.stdout.strip()) == (0, "()")
    assert done.stderr == (  # the weight's; the other tensors without memory are read by no op
        "opdrift recorded 1 values without their contents: its storage was freed: 0 bytes are left of the 16 it needs."
        " The run is not affected; the trace lists them.\n"
    )


def test_memory_that_nobody_has_written_is_not_fingerprinted(tmp_path: Path):
    with opdrift.record(tmp_path / "run.trace"):
        a = torch.empty(4)
        a.fill_(2.0)

    trace = whole(tmp_path / "run.trace")

    made, written = ops(trace)
    filled = trace.fingerprint(written.outputs[0])

    assert (made.name, written.name) == ("aten.empty.memory_format", "aten.fill_.Scalar")
    assert trace.fingerprint(made.outputs[0]) is None
    assert filled is not None
    assert (filled.min, filled.max) == (2.0, 2.0)


COLLECTIVES = """
    import json, sys, warnings, torch, opdrift
    import torch.distributed as dist
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames collectives
    torch.set_num_threads(1)
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=size)

    def run():
        mine = torch.full((200_000,), float(rank + 1))
        gathered = torch.empty(size * 200_000)
        dist.all_gather_into_tensor(gathered, mine)
        reduced = mine.clone()
        dist.all_reduce(reduced)
        later = mine.clone()
        work = dist.all_reduce(later, async_op=True)
        busy = (mine * 3).sum()
        work.wait()
        after = later * 2
        told = torch.full((3,), float(rank))
        dist.broadcast(told, src=0)
        parts = [torch.empty(2) for _ in range(size)]
        dist.all_gather(parts, torch.full((2,), float(rank + 1)))
        versions = [t._version for t in (gathered, reduced, later, told, *parts)]
        return [t.sum().item() for t in (gathered, reduced, busy, later, after, told, *parts)], versions

    plain = run()
    with opdrift.record("run.trace"):
        recorded = run()
    again = run()
    dist.barrier()
    dist.destroy_process_group()

    trace = opdrift.load("run.trace", rank=rank)
    contents = {}
    for i in range(len(trace.ops)):
        op = trace.op(i)
        if op.name.startswith("c10d.") and op.mutated:
            contents.setdefault(op.name, []).append([None if (f := trace.fingerprint(v)) is None else f.sum for v in op.outputs[: op.mutated]])
    failures = [dict(f) for f in trace.footer.failures]
    print(json.dumps({"equal": plain == recorded == again, "sums": plain[0], "contents": contents, "failures": failures, "incomplete": trace.incomplete}))
"""


@pytest.fixture
def ranks(python: Python, tmp_path: Path) -> Callable[[str, int], list[dict[str, Any]]]:
    """Run a program once a rank, and read the line of JSON that each prints."""

    def run(program: str, size: int) -> list[dict[str, Any]]:
        done: dict[int, subprocess.CompletedProcess[str]] = {}

        def start(rank: int) -> None:
            done[rank] = python(program, str(rank), str(size), str(tmp_path / "store"))

        threads = [threading.Thread(target=start, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank in range(size):
            assert done[rank].returncode == 0, done[rank].stderr
        return [json.loads(done[rank].stdout.strip().splitlines()[-1]) for rank in range(size)]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_collectives_are_recorded_with_what_they_deliver(
    size: int, ranks: Callable[[str, int], list[dict[str, Any]]]
):
    """The output of a collective is not there yet when the op returns, and its schema names no write.

    A synchronous one is waited for; an asynchronous one is never waited for twice, so its content may be
    missing but never wrong.
    """
    gathered = 200_000.0 * sum(range(1, size + 1))
    for found in ranks(COLLECTIVES, size):
        assert found["equal"]
        assert (found["failures"], found["incomplete"]) == ([], None)
        assert found["sums"][:2] == [gathered, gathered]
        contents = found["contents"]
        assert contents["c10d._allgather_base_.default"] == [[gathered]]
        synchronous, asynchronous = contents["c10d.allreduce_.default"]
        assert synchronous == [gathered]
        assert asynchronous in ([None], [gathered])
        assert contents["c10d.broadcast_.default"] == [[0.0]]
        assert contents["c10d.allgather_.default"] == [[2.0 * (rank + 1) for rank in range(size)]]


DTENSOR = """
    import json, sys, warnings, torch, opdrift
    import torch.distributed as dist
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames collectives
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
    torch.set_num_threads(1)
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    left, right = torch.randn(4, 4), torch.randn(4, 4)

    def run():
        sharded, whole = distribute_tensor(left, mesh, [Shard(0)]), distribute_tensor(right, mesh, [Replicate()])
        return (sharded @ whole).relu().full_tensor()

    plain = run()
    with opdrift.record("run.trace"):
        recorded = run()
    again = run()
    dist.barrier()
    dist.destroy_process_group()
    trace = opdrift.load("run.trace", rank=rank)
    names = [trace.op(i).name for i in range(len(trace.ops))]
    failures = [dict(f) for f in trace.footer.failures]
    print(json.dumps({"equal": torch.equal(plain, recorded) and torch.equal(plain, again), "names": names, "failures": failures}))
"""


@pytest.mark.slow
def test_distributed_tensors_run_themselves_and_show_their_local_ops(
    ranks: Callable[[str, int], list[dict[str, Any]]],
):
    for found in ranks(DTENSOR, 2):
        assert found["equal"]
        assert found["failures"] == []
        assert {
            "aten.mm.default",
            "aten.relu.default",
            "_c10d_functional.wait_tensor.default",
        } <= set(found["names"])


# ---- identity ----------------------------------------------------------------------------------------


def test_parameters_that_an_offloader_makes_anew_keep_their_name(tmp_path: Path):
    """accelerate makes a new Parameter at every forward; a map by `id(p)` goes stale."""
    model = nn.Linear(2, 2)
    with opdrift.record(tmp_path / "run.trace", model=model):
        for filling in (1.0, 2.0):
            model._parameters["weight"] = nn.Parameter(torch.full((2, 2), filling))
            model(torch.ones(1, 2))

    trace = whole(tmp_path / "run.trace")

    assert {1.0, 2.0} <= set(maxima(trace, named(trace, "weight")))


def test_storages_at_the_same_address_are_different_values(tmp_path: Path):
    """The allocator hands the same address out again and again."""
    with opdrift.record(tmp_path / "run.trace"):
        for number in range(50):
            torch.full((64,), float(number))

    trace = whole(tmp_path / "run.trace")
    storages = [int(trace.values.storage[op.outputs[-1]]) for op in ops(trace)]

    assert len(set(storages)) == 50


# ---- where the program goes while it is recorded -------------------------------------------------------


@pytest.mark.usefixtures("restored")
def test_nested_recorders_each_see_the_program_and_nothing_of_the_other(
    tmp_path: Path, op_names: OpNames
):
    """Reading a non-contiguous tensor costs ops; they are the inner recorder's, and nobody's business."""
    with opdrift.record(tmp_path / "outer.trace"):
        a = torch.randn(4, 4)
        with opdrift.record(tmp_path / "inner.trace"):
            a.t() * 2
            torch.randn(3, dtype=torch.complex64).conj() + 1
        a + 1

    inner = op_names(whole(tmp_path / "inner.trace"))
    outer = op_names(whole(tmp_path / "outer.trace"))

    assert inner[:2] == ["aten.t.default", "aten.mul.Tensor"]
    assert outer == ["aten.randn.default", *inner, "aten.add.Tensor"]


@pytest.mark.usefixtures("restored")
def test_two_recorders_in_two_threads_do_not_mix(tmp_path: Path, op_names: OpNames):
    results: dict[int, torch.Tensor] = {}
    barrier = threading.Barrier(2)

    def work(count: int) -> None:
        with opdrift.record(tmp_path / f"{count}.trace"):
            a = torch.ones(3)
            barrier.wait()
            for _ in range(count):
                a = a + 1
            results[count] = a

    threads = [threading.Thread(target=work, args=(count,)) for count in (50, 90)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for count in (50, 90):
        assert op_names(whole(tmp_path / f"{count}.trace")) == [
            "aten.ones.default",
            *["aten.add.Tensor"] * count,
        ]
        assert results[count].tolist() == [count + 1.0] * 3


@pytest.mark.usefixtures("restored")
def test_a_generator_suspended_inside_the_trace_can_be_closed(tmp_path: Path, op_names: OpNames):
    """While it waits, the mode stays on for its caller; closing it ends the trace properly."""

    def batches() -> Iterator[torch.Tensor]:
        with opdrift.record(tmp_path / "run.trace"):
            yield torch.ones(2) + 1
            yield torch.ones(2) + 2

    iterator = batches()
    next(iterator)
    torch.ones(3)
    iterator.close()  # type: ignore[attr-defined]

    trace = whole(tmp_path / "run.trace")
    assert op_names(trace)[:2] == ["aten.ones.default", "aten.add.Tensor"]


def test_a_fork_inside_the_trace_leaves_the_file_to_the_parent(python: Python):
    done = python(
        """
        import os, sys, torch, opdrift
        with opdrift.record("run.trace"):
            a = torch.ones(2) + 1
            child = os.fork()
            if child == 0:
                for _ in range(3000):
                    a = a * 1
                sys.exit(0 if a.tolist() == [2.0, 2.0] else 3)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            a + 2
        trace = opdrift.load("run.trace")
        print(status, trace.incomplete, [trace.op(i).name for i in range(len(trace.ops))])
        """
    )

    assert (
        done.stdout.strip() == "0 None ['aten.ones.default', 'aten.add.Tensor', 'aten.add.Tensor']"
    ), done.stderr


def test_a_data_loader_may_fork_its_workers_inside_the_trace(python: Python):
    done = python(
        """
        import torch, opdrift
        from torch.utils.data import DataLoader, TensorDataset
        torch.set_num_threads(1)

        class Doubled(TensorDataset):
            def __getitem__(self, index):
                return self.tensors[0][index] * 2

        def run():
            torch.manual_seed(0)
            loader = DataLoader(Doubled(torch.arange(12.0)), batch_size=3, shuffle=True, num_workers=2, multiprocessing_context="fork")
            return [(batch + 1).tolist() for batch in loader]

        plain = run()
        with opdrift.record("run.trace"):
            recorded = run()
        trace = opdrift.load("run.trace")
        names = [trace.op(i).name for i in range(len(trace.ops))]
        print(plain == recorded == run(), trace.incomplete, trace.footer.failures, names.count("aten.add.Tensor"))
        """
    )

    assert done.stdout.strip() == "True None () 4", done.stderr


def test_ops_of_backward_are_recorded_with_their_phase(tmp_path: Path):
    with opdrift.record(tmp_path / "run.trace"):
        weight = torch.randn(3, 3, requires_grad=True)
        (weight @ weight).relu().sum().backward()

    trace = whole(tmp_path / "run.trace")
    phases = {op.name: op.phase for op in ops(trace)}

    assert phases["aten.relu.default"] == "forward"
    assert phases["aten.threshold_backward.default"] == "backward"
