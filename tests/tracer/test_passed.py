"""What one rank hands to another as it is: messages, gather, scatter, all_to_all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from ranks import POKE, START, found_in, together

from opdrift.diagnose.across_ranks import diagnose_world
from opdrift.findings import findings
from opdrift.records import Finding, Sides
from opdrift.testing import Builder
from opdrift.tracefile.reader import Trace

#: Each with a fault that only one side can be blamed for, beside the same without it.
RUNS = (
    START
    + POKE
    + """
    import contextlib
    from torch.utils._python_dispatch import TorchDispatchMode

    class Corrupt(TorchDispatchMode):
        "Entered before the recorder, it sits below it: what is handed over is not what was recorded."
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "c10d" in str(func):
                given = args[1]
                while isinstance(given, (list, tuple)) and given:
                    given = given[0]
                if isinstance(given, torch.Tensor):
                    poke(given)
            return func(*args, **(kwargs or {}))

    peer = 1 - rank

    def send(fault):
        x, y = torch.randn(64), torch.zeros(64)
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(y, 0)
            if fault:
                poke(y)
            y * 2

    def exchange(fault):
        x, y = torch.randn(64), torch.zeros(64)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)])
        for work in works:
            work.wait()
        if fault and rank == 0:
            poke(y)
        y.sum()

    def rewritten(fault):
        "The receiver comes late, and the sender uses its buffer again before it has waited."
        x = torch.randn(4_000_000)
        dist.barrier()
        if rank == 0:
            work = dist.isend(x, 1)
            if fault:
                x.numpy()[:] = 5.0
            dist.barrier()
            work.wait()
        else:
            dist.barrier()
            dist.recv(x, 0)
            x.sum()

    def used_again(fault):
        "Every message through one buffer that numpy fills: what is sent is read when it is sent."
        x = torch.zeros(64)
        for number in range(3):
            if rank == 0:
                x.numpy()[:] = number
                dist.send(x, 1)
            else:
                dist.recv(x, 0)
                if fault and number == 1:
                    poke(x)
                x.sum()

    def gather(fault):
        x, parts = torch.randn(8), [torch.zeros(8), torch.zeros(8)]
        work = dist.gather(x, parts if rank == 0 else None, dst=0, async_op=True)
        work.wait()
        if rank == 0:
            for part in parts:
                part.sum()

    def scatter(fault):
        x, parts = torch.zeros(8), [torch.randn(8), torch.randn(8)]
        dist.scatter(x, parts if rank == 0 else None, src=0, async_op=True).wait()
        x.sum()

    def single(fault):
        x = torch.zeros(16)
        dist.all_to_all_single(x, torch.randn(16), async_op=True).wait()
        x.sum()

    def uneven(fault):
        splits = [[2, 3], [4, 1]]
        out = [splits[0][rank], splits[1][rank]]
        x = torch.zeros(sum(out), 2)
        work = dist.all_to_all_single(x, torch.randn(sum(splits[rank]), 2), out, splits[rank], async_op=True)
        work.wait()
        x.sum()

    def functional(fault):
        from torch.distributed._functional_collectives import all_to_all_single
        x = all_to_all_single(torch.randn(16), None, None, dist.group.WORLD)
        x = x * 1 if not fault else x + 0

    for body in (send, exchange, rewritten, used_again, gather, scatter, single, uneven, functional):
        for fault in (False, True):
            torch.manual_seed(rank)
            dist.barrier()
            lower = fault and body in (gather, scatter, single, uneven)
            with Corrupt() if lower else contextlib.nullcontext(), opdrift.record(f"{body.__name__}-{fault}.trace"):
                body(fault)
    dist.barrier()
"""
)
FAULTS = ["send", "exchange", "rewritten", "used_again", "gather", "scatter", "single", "uneven"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("passed")
    done = together(RUNS, folder)
    assert [one.returncode for one in done] == [0, 0], done[0].stderr + done[1].stderr
    return folder


def others_than(kind: str, found: Sequence[Finding]) -> list[Finding]:
    return [each for each in found if each.kind != kind]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAULTS, "functional"])
def test_what_arrives_as_it_was_handed_over_is_no_finding(runs: Path, name: str):
    """Also from a buffer that numpy fills anew each time, and in parts of other sizes."""
    assert others_than("hidden-write", found_in(runs / f"{name}-False.trace")) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_what_arrives_as_something_else_is_found(runs: Path, name: str):
    (found,) = others_than("hidden-write", found_in(runs / f"{name}-True.trace"))

    assert (found.kind, found.cause.slug) == ("collective", "collective")
    said = " ".join([found.cause.summary, *found.cause.evidence])
    assert "is not what rank" in said


# ---- which message is which ----------------------------------------------------------------------------


def ranks_of(sent: Sequence[float], received: Sequence[float]) -> list[Trace]:
    """Rank 0 sends these contents, and rank 1 receives those."""
    builders = [Builder(rank=0), Builder(rank=1)]
    tensors = [["float32", 8]]
    for build, contents, what in zip(builders, (sent, received), ("send", "recv"), strict=True):
        op = "c10d.send.default" if what == "send" else "c10d.recv_.default"
        for each in contents:
            content = np.full(8, each, np.float32)
            if what == "send":
                build.op(op, build.leaf("x", kind="input", content=content))
            else:
                build.op(op, build.leaf("y", kind="input"), content=content)
            build.mark(
                "collective", op=op, what=what, group="0", ranks=[0, 1], peer=int(what == "send"), tag=0,
                given=tensors if what == "send" else None, got=None if what == "send" else tensors,
                reduction=None, root=None, waited=False, source=None,
            )  # fmt: skip
    return [build.build() for build in builders]


def line_of(sent: Sequence[float], received: Sequence[float]) -> list[Finding]:
    return list(findings(ranks_of(sent, received)))


def test_a_nan_that_a_message_brings_is_not_where_it_begins():
    assert [f.kind for f in line_of([1, np.nan], [1, np.nan])] == ["nan"]


def test_each_message_is_held_against_the_one_of_its_number():
    assert line_of([1, 2, 3], [1, 2, 3]) == []


def test_only_the_first_wrong_message_of_a_line_is_told_with_their_number():
    (found,) = line_of([1, 2, 3, 4], [1, 7, 8, 4])

    assert found.seq == 2
    assert "1 more of these messages did not arrive as they were sent" in found.cause.evidence


def test_ranks_held_against_each_other_show_the_same():
    first = diagnose_world(ranks_of([1, 2, 3], [1, 7, 3])).first

    assert first is not None
    assert (first.cause.slug, first.ranks, first.seq) == (
        "collective",
        Sides((0,), (1,)),
        Sides(2, 2),
    )
    assert first.cause == line_of([1, 2, 3], [1, 7, 3])[0].cause


@pytest.mark.parametrize("early", [1, 2])
def test_messages_under_way_when_the_recording_began_shift_the_others(early: int):
    """A pipeline whose ranks begin to record at different moments."""
    contents = [1.0, 2.0, 3.0, 4.0, 5.0]

    assert line_of(contents[early:], [*contents[: 5 - early], 5.0]) == []
    assert line_of([*contents[: 5 - early], 5.0], contents[early:]) == []
