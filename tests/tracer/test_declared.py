"""Tensors that a program declares to be the same on several ranks: placements of DTensors, recorded and checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import START, found_in, together
from torch.distributed.tensor import Replicate, Shard

from opdrift.diagnose.across_ranks import diagnose_world
from opdrift.placements import replicated_over
from opdrift.records import Diagnosis, Finding
from opdrift.testing import Builder
from opdrift.tracefile.opening import rank_folders
from opdrift.world.collectives import World
from opdrift.world.findings import world_findings


class Mesh:
    """A mesh of ranks, as seen from one of them."""

    def __init__(self, ranks: list[list[int]], here: tuple[int, int] | None) -> None:
        self.mesh = torch.tensor(ranks)
        self.shape = tuple(self.mesh.shape)
        self._here = here

    def get_coordinate(self) -> tuple[int, int] | None:
        return self._here


@pytest.mark.parametrize(
    ("placements", "ranks"),
    [
        ((Replicate(), Shard(0)), (1, 5)),
        ((Shard(0), Replicate()), (4, 5)),
        ((Replicate(), Replicate()), (0, 1, 4, 5)),
        ((Shard(0), Shard(1)), (5,)),
    ],
)
def test_ranks_that_differ_in_replicated_dims_only_hold_the_same(placements, ranks):
    """Rank 5 in a mesh of two by two; it shares a column with rank 1 and a row with rank 4."""
    assert replicated_over(Mesh([[0, 1], [4, 5]], (1, 1)), placements) == ranks


def test_a_rank_outside_a_mesh_holds_nothing_of_it():
    assert replicated_over(Mesh([[0, 1]], None), (Replicate(), Replicate())) == ()


def vector(text: str) -> np.ndarray:
    return np.random.default_rng(sum(text.encode())).standard_normal(64).astype(np.float32)


def block(
    *, data: str = "x", weight: str = "w", poked: bool = False, drift: float = 0.0
) -> Callable[[Builder], None]:
    """A norm whose result goes into a split module: that result is declared to be the same on ranks 0 and 1."""

    def body(build: Builder) -> None:
        weights = build.leaf("norm.weight", content=vector(weight))
        if poked:
            weights = build.op("mul_", weights, content=vector("poked"))
        given = build.leaf("x", kind="input", content=vector(data))
        with build.scope("norm"):
            made = vector(f"{data} {weight} {poked}") * np.float32(1 + drift)
            normed = build.op("native_layer_norm", given, weights, content=made)
        build.mark("replicated", op="aten.addmm.default", values=[normed], ranks=[0, 1])
        part = build.op("addmm", normed, content=vector(f"part {build.build().header.rank}"))
        build.output(part)

    return body


def ranks_of(*bodies: Callable[[Builder], None]) -> list[Builder]:
    builders = [Builder(rank=number, world_size=len(bodies)) for number in range(len(bodies))]
    for build, body in zip(builders, bodies, strict=True):
        body(build)
    return builders


def checked(*bodies: Callable[[Builder], None]) -> Diagnosis:
    return diagnose_world([build.build() for build in ranks_of(*bodies)])


def findings(*bodies: Callable[[Builder], None]) -> list[Finding]:
    return list(world_findings(World([build.build() for build in ranks_of(*bodies)])))


def test_what_is_declared_to_be_the_same_and_is_is_no_finding():
    """What the ranks make of it in their parts of the model differs by right."""
    diagnosis = checked(block(), block())

    assert (diagnosis.verdict, diagnosis.alignment.paired) == ("identical", 2)
    assert findings(block(), block()) == []


def test_ranks_of_a_split_model_that_got_other_data_are_named():
    """Nothing is reduced yet, and no parameter differs: the placement alone tells."""
    diagnosis = checked(block(), block(data="y"))

    (origin,) = diagnosis.origins
    assert (diagnosis.verdict, origin.kind, origin.name) == ("diverged", "leaf", "x")
    assert origin.cause.slug == "replica"
    assert origin.cause.confidence == "certain"
    assert origin.cause.summary == "x differs between ranks 0 and 1, and should be the same on them"


def test_a_parameter_that_one_rank_changed_is_named_with_its_writer():
    """Of a model that is split little else says that the rest should be equal."""
    (found,) = findings(block(weight="w"), block(weight="w", poked=True))

    assert (found.kind, found.name, found.rank) == ("replica", "norm.weight", 1)
    assert any("was last written by aten.mul_.default (op 1)" in e for e in found.cause.evidence)


def test_a_difference_of_rounding_is_no_finding():
    """Another order of additions on another device."""
    assert findings(block(), block(drift=1e-7)) == []
    assert len(findings(block(), block(drift=1e-3))) == 1


PROGRAM = (
    START
    + """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        def forward(self, x):
            return x + self.down(torch.relu(self.up(self.norm(x))))

    def run(name, fault=None):
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block())
        plan = {f"{i}.{n}": how() for i in range(2) for n, how in (("up", ColwiseParallel), ("down", RowwiseParallel))}
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
        data = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(rank if fault == "data" else 7))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        def steps():
            losses = []
            for x in data:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                if fault == "gradient" and rank == 1:
                    model[1].norm.weight.grad.mul_(2)
                optimizer.step()
                losses.append(loss.item())
            return losses
        if name is None:
            return steps()
        with opdrift.record(name, model=model):
            return steps()

    assert run("right.trace") == run(None)
    run("data.trace", "data")
    run("gradient.trace", "gradient")
    dist.destroy_process_group()
"""
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor-parallel")
    for done in together(PROGRAM, folder):
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_tensor_parallel_training_has_no_findings(runs: Path):
    """Weights that are split differ; what is replicated is compared, and equal."""
    traces = rank_folders(runs / "right.trace")

    assert found_in(runs / "right.trace") == []
    assert len(traces) == 2


@pytest.mark.slow
def test_other_data_on_one_rank_of_a_split_model_is_found(runs: Path):
    (found,) = found_in(runs / "data.trace")

    assert (found.kind, found.name, found.cause.confidence) == ("replica", "input", "certain")
    assert found.cause.summary == (
        "input differs between ranks 0 and 1, and should be the same on them"
    )


@pytest.mark.slow
def test_a_gradient_that_one_rank_of_a_split_model_changed_is_found(runs: Path):
    """The norm is no DTensor: the values that are computed with it are."""
    found = found_in(runs / "gradient.trace")

    assert [(one.kind, one.name) for one in found] == [("replica", "1.norm.weight")]
    assert any("aten.mul_.Tensor" in line for line in found[0].cause.evidence)
