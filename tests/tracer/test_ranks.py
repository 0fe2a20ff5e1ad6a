"""Two real ranks on gloo: their collectives are written down, met, and survive what they do to a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import START, found_in, together

import opdrift
from opdrift.tracefile.opening import rank_folders
from opdrift.world import World
from opdrift.world.handed import got

#: One pair of processes records everything but what aborts a rank.
RUNS = (
    START
    + """
    def made(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def train(model, recorder=None, poke=lambda step: None):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        torch.manual_seed(rank)
        for step in range(2):
            if recorder is not None:
                recorder.mark("step", step=step)
            optimizer.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
            poke(step)
            optimizer.step()

    for name in ("right", "unseeded", "gradient", "replaced", "replaced-alike"):
        net = made(rank if name == "unseeded" else 0)
        model = DistributedDataParallel(net, init_sync=name != "unseeded")

        def poke(step):
            if name == "gradient" and rank == 1 and step == 1:
                net[0].weight.grad.mul_(1.5)
            if step == 1 and name == "replaced-alike" or (name, rank, step) == ("replaced", 1, 1):
                net[0].weight.data = net[0].weight.data * 0.5

        with opdrift.record(f"{name}.trace", model=model) as recorder:
            train(model, recorder, poke)

    states = []
    for name in ("plain", "right", "synchronised"):
        os.environ["OPDRIFT_SYNCHRONISED"] = str(int(name == "synchronised"))
        model = DistributedDataParallel(made(0))
        if name == "plain":
            train(model)
        else:
            with opdrift.record(f"again-{name}.trace", model=model):
                train(model)
        states.append([*model.state_dict().values(), torch.get_rng_state()])
    for recorded in states[1:]:
        assert all(map(torch.equal, states[0], recorded)), "recording changed the run"
    os.environ["OPDRIFT_SYNCHRONISED"] = "0"

    x = torch.arange(64.0) * (rank + 1)
    other = dist.new_group([0, 1])
    with opdrift.record("collectives.trace"):
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        dist.all_reduce(x, async_op=True).wait()
        x.view(8, 8)[2:4] * 1  # a part is read first
        dist.broadcast(x.clone(), 1)
        dist.all_gather_into_tensor(torch.zeros(128), x, group=other)
        dist.all_gather([torch.zeros(64), torch.zeros(64)], x)
        dist.reduce_scatter_tensor(torch.zeros(32), x)
        dist.reduce(x.clone(), 0)
        torch.distributed._functional_collectives.all_reduce(x, "sum", other) + 1
        dist.barrier()
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    y = torch.ones(8, dtype=torch.float32 if rank else torch.int32)
    with opdrift.record("dtype.trace"):
        dist.all_reduce(y)
    z = torch.ones(8)
    with opdrift.record("reduction.trace"):
        dist.all_reduce(z, op=dist.ReduceOp.SUM if rank else dist.ReduceOp.MAX)

    with opdrift.record("messages.trace"):
        if rank == 0:
            dist.send(z, 1)
            dist.send(z[:2], 1, tag=3)
            dist.isend(z, 1, group=other).wait()
        else:
            dist.recv(z, 0)
            dist.recv(z[:2], 0, tag=3)
            dist.irecv(z, 0, group=other).wait()
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, z, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]
        )
        for work in works:
            work.wait()

    read = Path("read")
    x = torch.full((4_000_000,), rank + 1.0)
    with opdrift.record("race.trace"):
        while rank == 1 and not read.exists():  # rank 0 reads before this rank has given anything
            time.sleep(0.01)
        work = dist.all_reduce(x, async_op=True)
        x * 2
        read.touch()
        work.wait()
    os.environ["OPDRIFT_SYNCHRONISED"] = "1"
    x, part = torch.full((4_000_000,), rank + 1.0), torch.zeros(2_000_000)
    functional = torch.distributed._functional_collectives
    with opdrift.record("waited.trace"):
        work = dist.all_reduce(x, async_op=True)
        early = [x * 2]
        work.wait()
        work = dist.reduce_scatter_tensor(part, x.clone(), async_op=True)
        early.append(part * 1)
        work.wait()
        early.append(functional.all_reduce(torch.ones(3), "sum", other) * 3)
    assert all(bool((each == 6).all()) for each in early), early
    os.environ["OPDRIFT_SYNCHRONISED"] = "0"

    with opdrift.record("killed.trace"):
        dist.all_reduce(torch.ones(8))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.broadcast(torch.ones(8), 0)
        dist.all_reduce(torch.ones(8))
"""
)

ABORTS = (
    START
    + """
    with opdrift.record("aborts.trace"):
        dist.all_reduce(torch.ones(8))
        dist.all_reduce(torch.ones(8 + 100_000 * rank))
"""
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    done = together(RUNS, folder)
    assert done[1].returncode == -signal.SIGKILL, done[0].stderr + done[1].stderr
    return folder


@pytest.mark.slow
def test_training_with_equal_replicas_has_no_findings(runs: Path):
    """Buffers are broadcast, gradients reduced while the program goes on; batches differ between the ranks."""
    assert found_in(runs / "right.trace") == []


@pytest.mark.slow
def test_training_is_the_same_when_it_is_recorded(runs: Path):
    """The program holds weights, buffers and random state against those of a run without recorder, bit for bit."""
    for name in ("right", "synchronised"):
        trace = opdrift.load(runs / f"again-{name}.trace", rank=0)
        assert trace.footer is not None
        assert trace.footer.failures == ()


@pytest.mark.slow
def test_replicas_that_start_from_other_weights_are_found(runs: Path):
    (found,) = found_in(runs / "unseeded.trace")

    assert (found.kind, found.name, found.cause.confidence) == ("replica", "0.weight", "certain")
    assert found.cause.summary == (
        "0.weight, 0.bias, 3.weight, 3.bias differ between ranks 0 and 1, when the run began"
    )


@pytest.mark.slow
def test_a_gradient_that_one_rank_changes_is_traced_to_its_line(runs: Path):
    (found,) = found_in(runs / "gradient.trace")

    assert (found.name, found.step) == ("0.weight", 1)
    assert any("aten.mul_.Tensor" in line and "in poke" in line for line in found.cause.evidence)


@pytest.mark.slow
def test_a_parameter_whose_tensor_one_rank_replaces_is_told_with_both_contents(runs: Path):
    """`.data =` passes no op; its history goes on in the new tensor, and is not that of the old one."""
    (found,) = found_in(runs / "replaced.trace")

    assert (found.kind, found.name, found.rank, found.step) == ("replica", "0.weight", 1, 1)
    assert found.cause.summary == (
        "0.weight differs between ranks 0 and 1: rank 1 replaced its tensor"
    )
    (said,) = [line for line in found.cause.evidence if "`.data =`" in line]
    assert said.startswith("on rank 1, ")
    assert "the new one was computed by aten.mul.Tensor" in said


@pytest.mark.slow
def test_parameters_that_all_ranks_replace_alike_stay_replicas(runs: Path):
    assert found_in(runs / "replaced-alike.trace") == []


@pytest.mark.slow
def test_every_collective_meets_its_counterparts_and_is_what_was_given(runs: Path):
    """What each asked for is read without changing it; messages between two ranks are left out."""
    trace = runs / "collectives.trace"
    world = World(opdrift.load(folder) for folder in rank_folders(trace).values())

    met = [(m.group, m.number, m.members[0].asked) for m in world.meetings]

    assert met == [
        ("0", 1, "all_reduce of float32[64] by MAX"),
        ("0", 2, "all_reduce of float32[64] by SUM"),
        ("0", 3, "broadcast of float32[64] from rank 1"),
        ("0", 4, "all_gather of float32[64]"),
        ("0", 5, "reduce_scatter of float32[64] by SUM"),
        ("0", 6, "reduce of float32[64] by SUM to rank 0"),
        ("0", 7, "barrier"),
        (met[7][0], 1, "all_gather of float32[64]"),
        (met[7][0], 2, "all_reduce of float32[64] by SUM"),
    ]
    assert met[7][0] != "0"
    assert found_in(trace) == []
    assert not list(trace.glob("*/journal.jsonl"))


@pytest.mark.slow
def test_a_result_that_came_late_is_known_whole_whatever_part_is_read_first(runs: Path):
    """Else two equal runs would be recorded differently, as time would have it."""
    folders = rank_folders(runs / "collectives.trace").values()
    world = World(opdrift.load(folder) for folder in folders)

    for part in world.meetings[1].members.values():
        (result,) = got(world, part)
        assert result is not None
        assert result.whole is not None


@pytest.mark.slow
@pytest.mark.parametrize("about", ["dtype", "reduction"])
def test_what_no_library_raises_an_error_for_is_found(runs: Path, about: str):
    (found,) = found_in(runs / f"{about}.trace")

    assert found.cause.slug == "collective"
    assert f"do not agree about the {about} of collective 1 of group 0" in found.cause.summary


@pytest.mark.slow
def test_messages_meet_and_one_that_is_taken_for_another_dtype_is_found(runs: Path):
    """gloo raises nothing: rank 0 takes the bytes of rank 1's numbers for integers."""
    trace = runs / "messages.trace"
    world = World(opdrift.load(folder) for folder in rank_folders(trace).values())

    (found,) = found_in(trace)

    assert (len(world.messages.met), world.messages.alone) == (5, [])
    assert (found.rank, found.op) == (0, "c10d.recv_.default")
    assert found.cause.summary == (
        "rank 1 and rank 0 do not agree about a message: send 1 to rank 0 in group 0 is send of float32[8], recv 1 from"
        " rank 1 in group 0 recv of int32[8]"
    )


@pytest.mark.slow
def test_a_result_that_is_read_before_it_is_there_is_a_race(runs: Path):
    """Rank 0 read before rank 1 had given anything; what rank 1 read may or may not have been there."""
    found = [finding for finding in found_in(runs / "race.trace") if finding.rank == 0]

    assert [(f.kind, f.cause.slug, f.op) for f in found] == [("race", "race", "aten.mul.Tensor")]


@pytest.mark.slow
def test_a_synchronised_run_has_every_wait_in_place(runs: Path):
    """The same reads, early, of complete results: the program itself checks the numbers."""
    trace = opdrift.load(runs / "waited.trace", rank=0)

    assert trace.header.options["synchronised"] is True
    assert found_in(runs / "waited.trace") == []


@pytest.mark.slow
def test_a_collective_that_ends_the_process_is_on_disk_before_it_is_issued(
    tmp_path: Path, follow: Callable[[str], dict[str, int]]
):
    """Another size aborts a rank: no handler runs, and its last rows are lost, but not what it was about to do."""
    done = together(ABORTS, tmp_path)

    (found,) = found_in(tmp_path / "aborts.trace")

    assert min(one.returncode for one in done) < 0
    assert "do not agree about the size of collective 2 of group 0" in found.cause.summary
    assert any("ended without closing its trace" in line for line in found.cause.evidence)
    assert 2 not in follow(f"diff-trace --across-ranks {tmp_path}/aborts.trace").values()


@pytest.mark.slow
def test_a_rank_that_is_killed_is_told_by_the_other_one(runs: Path):
    """The other rank's trace is whole, and its error is its own, not the tracer's."""
    (found,) = found_in(runs / "killed.trace")

    assert (found.kind, found.rank) == ("rank-ended", 1)
    assert (
        found.cause.summary
        == "rank 1 ended in the middle of the run, in or after all_reduce 1 of group 0"
    )
    other = opdrift.load(runs / "killed.trace", rank=0)
    assert other.footer is not None
    assert (other.complete, other.footer.ended, other.footer.failures) == (True, "raised", ())


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        *(
            f"diff-trace --across-ranks {{0}}/{name}.trace"
            for name in ("unseeded", "gradient", "dtype", "reduction", "messages", "killed")
        ),
        *(f"diff-trace {{0}}/right.trace {{0}}/{name}.trace" for name in ("unseeded", "gradient")),
        *(f"opdrift show {{0}}/{name}.trace" for name in ("unseeded", "killed")),
    ],
)
def test_every_command_that_is_printed_of_ranks_can_be_typed(
    runs: Path, line: str, follow: Callable[[str], dict[str, int]]
):
    """The ranks of one run are looked at one by one: they are no two runs to be compared."""
    statuses = follow(line.format(runs))

    assert statuses
    assert 2 not in statuses.values(), statuses


# ---- started by torch's launcher -----------------------------------------------------------------------

LAUNCHED = """
    import warnings, torch, opdrift
    import torch.distributed as dist
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x = torch.ones(8)
    with opdrift.record("right.trace"):
        dist.all_reduce(x)
    with opdrift.record("raised.trace"):
        dist.all_reduce(x)
        if dist.get_rank() == 1:
            raise ValueError("no batch left")
        dist.all_reduce(x)
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program of two ranks that `python -m torch.distributed.run` started, and one of which raised."""
    folder = tmp_path_factory.mktemp("launched")
    (folder / "train.py").write_text(textwrap.dedent(LAUNCHED))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]  # fmt: skip
    sources = os.pathsep.join([str(ROOT / "tracer"), str(ROOT / "integrations")])
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "ValueError: no batch left" in done.stderr, done.stderr
    return folder


@pytest.mark.slow
def test_the_launcher_s_ranks_have_a_folder_each(launched: Path):
    """The rank and the world's size are those of the process group."""
    folders = rank_folders(launched / "right.trace")

    traces = [opdrift.load(folder) for folder in folders.values()]

    assert [folder.name for folder in folders.values()] == ["rank-00000", "rank-00001"]
    assert [(t.header.rank, t.header.world_size, t.complete) for t in traces] == [(0, 2, True), (1, 2, True)]  # fmt: skip
    assert traces[0].header.launch == traces[1].header.launch is not None
    assert found_in(launched / "right.trace") == []


@pytest.mark.slow
def test_of_ranks_that_a_launcher_ended_the_one_that_raised_is_told(launched: Path):
    """The launcher kills the others, or they raise themselves as it is gone: that follows from it."""
    (found,) = found_in(launched / "raised.trace")

    assert (found.kind, found.rank) == ("rank-ended", 1)
    assert found.cause.summary.startswith("rank 1 ended with ValueError at ")
    assert found.cause.summary.endswith("train.py:13 in <module>: no batch left")
