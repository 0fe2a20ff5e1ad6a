"""A content is followed to what first wrote it, on real recordings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import opdrift
from opdrift.provenance import CHAIN_LENGTH, Lineage, Provenance
from opdrift.testing import Builder
from opdrift.tracefile.reader import Trace

Asks = Callable[..., Provenance]


@pytest.fixture
def origin(tmp_path: Path) -> Asks:
    """Records a function that returns a tensor and says where that tensor's content came from."""

    def ask(run: Callable[[], Tensor], **options: Any) -> Provenance:
        options = {"kernels": "off", "integrity": "off", "overwrite": True, **options}
        with opdrift.record(tmp_path / "t", **options) as recorder:
            recorder.name_tensor(run(), "asked")
        trace = opdrift.load(tmp_path / "t")
        value = next(leaf.value for leaf in reversed(trace.leaves) if leaf.name == "asked")
        return Lineage(trace).of(value)

    return ask


# ---- kinds -----------------------------------------------------------------------------------------------


def test_a_new_layer_is_drawn_at_random(origin: Asks) -> None:
    found = origin(lambda: nn.Linear(4, 4).weight)
    assert found.kind == "drawn"
    assert found.op == found.first_op == "aten.uniform_.default"
    assert found.chain == ("aten.uniform_.default",)
    assert found.source is not None
    assert "test_provenance.py" in found.source
    assert found.rng != 0


def test_loaded_weights_are_a_copy_of_a_leaf(origin: Asks) -> None:
    """`load_state_dict` overwrites the draw."""
    checkpoint = nn.Linear(4, 4).state_dict()

    def run() -> Tensor:
        layer = nn.Linear(4, 4)
        layer.load_state_dict(checkpoint)
        return layer.weight

    found = origin(run)
    assert found.kind == "copied"
    assert found.chain == ("aten.copy_.default",)
    assert found.first_op == "aten.copy_.default"


def test_a_copy_of_a_named_leaf_names_it(origin: Asks) -> None:
    weights = torch.ones(3)
    found = origin(lambda: weights.clone(), inputs={"weights": weights})
    assert (found.kind, found.root_name) == ("copied", "weights")


def test_a_buffer_of_ones_is_filled(origin: Asks) -> None:
    assert origin(lambda: nn.LayerNorm(4).weight).kind == "filled"
    assert origin(lambda: torch.zeros(4)).kind == "filled"
    assert origin(lambda: torch.arange(4) * 2).kind == "filled"


def test_memory_that_nothing_wrote_is_uninitialised(origin: Asks) -> None:
    found = origin(lambda: torch.empty(5).clone())
    assert found.kind == "uninitialised"
    assert found.first_op == "aten.empty.memory_format"


def test_what_existed_before_is_a_leaf(origin: Asks) -> None:
    x = torch.ones(3)
    found = origin(lambda: x.view(3, 1))
    assert found.kind == "leaf"
    assert found.op is None
    assert found.chain == ()


def test_arithmetic_on_several_tensors_is_computed(origin: Asks) -> None:
    x = torch.randn(3, 3)
    found = origin(lambda: x @ x.t())
    assert (found.kind, found.op) == ("computed", "aten.mm.default")


def test_an_updated_weight_is_computed(origin: Asks) -> None:
    """As after a step of an optimiser: what it was before and the gradient both count."""
    gradient = torch.ones(4)
    found = origin(lambda: torch.rand(4).sub_(gradient, alpha=0.1))
    assert (found.kind, found.op) == ("computed", "aten.sub_.Tensor")


@pytest.mark.parametrize(
    ("run", "op"),
    [
        (lambda: torch.rand(3, 4) @ torch.rand(4, 2), "aten.mm.default"),
        (lambda: torch.addmm(torch.zeros(2), torch.rand(3, 4), torch.rand(4, 2)), "aten.addmm.default"),
        (lambda: nn.Embedding(5, 4)(torch.tensor([[0, 1]])).mean(1).detach(), "aten.mean.dim"),
        (lambda: torch.rand(4).add_(torch.rand(3, 4).sum(0), alpha=-0.1), "aten.add_.Tensor"),
    ],
)  # fmt: skip
def test_what_a_network_makes_of_draws_is_computed(
    origin: Asks, run: Callable[[], Tensor], op: str
) -> None:
    """Where weights and data are drawn within the run, its results and gradients are no draws for that."""
    found = origin(run)
    assert (found.kind, found.op, found.chain) == ("computed", op, (op,))


# ---- the way back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "initialise", [nn.init.trunc_normal_, nn.init.orthogonal_, nn.init.sparse_, nn.init.dirac_]
)
def test_initialisers_are_drawn_or_filled(origin: Asks, initialise: Callable[..., Tensor]) -> None:
    """Some compute with several tensors (rejection, QR), but no tensor that was there before enters."""
    options = (0.5,) if initialise is nn.init.sparse_ else ()
    shape = (4, 5, 3) if initialise is nn.init.dirac_ else (6, 5)
    found = origin(lambda: initialise(torch.empty(shape), *options))
    assert found.kind == ("filled" if initialise is nn.init.dirac_ else "drawn")


def test_a_scaled_draw_is_still_drawn(origin: Asks) -> None:
    found = origin(lambda: torch.rand(50).mul_(2).sub_(1))
    assert found.kind == "drawn"
    assert found.chain == ("aten.sub_.Tensor", "aten.mul_.Tensor", "aten.rand.default")
    assert (found.op, found.first_op) == ("aten.sub_.Tensor", "aten.rand.default")


def test_a_draw_that_meets_a_leaf_is_computed(origin: Asks) -> None:
    x = torch.ones(4)
    assert origin(lambda: torch.rand(4) + x).kind == "computed"
    assert origin(lambda: torch.rand(4) + torch.rand(4)).kind == "drawn"


def test_a_scaled_leaf_is_computed(origin: Asks) -> None:
    x = torch.ones(4)
    found = origin(lambda: (x * 0.5).clone())
    assert found.kind == "computed"
    assert found.chain == ("aten.clone.default", "aten.mul.Tensor")


def test_casts_on_the_way_are_told(origin: Asks) -> None:
    found = origin(lambda: torch.rand(4).half().float())
    assert found.kind == "drawn"
    assert found.casts == ("float32", "float16", "float32")


def test_views_and_detach_are_no_writers(origin: Asks) -> None:
    found = origin(lambda: torch.rand(4, 6).t().detach()[1:3].reshape(2, 2, 2).transpose(0, 1))
    assert found.chain == ("aten.rand.default",)


def test_rounding_to_a_grid_is_noticed(origin: Asks) -> None:
    """Dequantised weights look like any others but for the `round` on their way."""
    x = torch.randn(8)
    assert origin(lambda: (x / 0.1).round().clamp(-127, 127) * 0.1).quantised
    assert not origin(lambda: (x / 0.1).clamp(-127, 127) * 0.1).quantised


def test_a_generator_is_told(origin: Asks) -> None:
    generator = torch.Generator().manual_seed(3)
    assert origin(lambda: torch.empty(4).normal_(generator=generator)).generator == "Generator"
    assert origin(lambda: torch.empty(4).normal_()).generator is None


@pytest.fixture
def random_state() -> Iterator[None]:
    state = torch.random.get_rng_state()
    yield
    torch.random.set_rng_state(state)


@pytest.mark.usefixtures("random_state")
def test_a_chosen_seed_is_told_from_torchs_own(origin: Asks) -> None:
    """A seed below 2**32 was chosen by someone; torch draws 64 bits."""
    torch.seed()
    assert origin(lambda: torch.rand(3)).seeded is False
    torch.manual_seed(1234)
    assert origin(lambda: torch.rand(3)).seeded is True
    assert origin(lambda: torch.zeros(3)).seeded is None


def test_a_seed_that_is_set_inside_the_run_counts_from_then_on(origin):
    def seeded() -> torch.Tensor:
        torch.manual_seed(1234)
        return torch.rand(3)

    assert origin(seeded).seed == 1234


def test_a_generator_of_its_own_says_nothing_of_the_default_seed(origin):
    assert origin(lambda: torch.rand(3, generator=torch.Generator().manual_seed(1))).seed is None


# ---- by position ----------------------------------------------------------------------------------------------


def flattened(dim: int) -> list[Tensor]:
    """Three parts of a concatenation, sliced out again."""
    parts = [torch.rand(2, 3), torch.zeros(2, 3), torch.randn(2, 3)]
    whole = torch.cat(parts, dim)
    return [whole.narrow(dim, 2 * i if dim == 0 else 3 * i, 2 if dim == 0 else 3) for i in range(3)]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("part", "op"), [(0, "aten.rand.default"), (1, "aten.zeros.default"), (2, "aten.randn.default")]
)
def test_a_part_of_a_concatenation_comes_from_its_operand(
    origin: Asks, dim: int, part: int, op: str
) -> None:
    found = origin(lambda: flattened(dim)[part])
    assert found.first_op == op
    assert found.chain[0] == "aten.cat.default"


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_part_of_a_stack_comes_from_its_operand(origin: Asks, dim: int) -> None:
    found = origin(lambda: torch.stack([torch.rand(2, 3), torch.randn(2, 3)], dim).select(dim, 1))
    assert found.first_op == "aten.randn.default"


def test_flat_parameters_are_followed_through_gathers_of_views(origin: Asks) -> None:
    """As FSDP does it: cat, cast, split, view; each part knows its own draw."""

    def run() -> Tensor:
        weight, bias = torch.rand(4, 5).reshape(-1), torch.zeros(4)
        flat = torch.cat([weight, bias]).half()
        return flat.split([20, 4])[1].view(2, 2)

    found = origin(run)
    assert (found.kind, found.first_op) == ("filled", "aten.zeros.default")
    assert found.casts == ("float16", "float32")


def test_a_tensor_written_in_pieces_is_its_pieces(origin: Asks) -> None:
    """No single write covers it, and the memory below is not what it holds."""
    first, second = torch.ones(4), torch.ones(4)

    def run() -> Tensor:
        buffer = torch.empty(8)
        buffer[:4].copy_(first)
        buffer[4:].copy_(second)
        return buffer

    assert origin(run).kind == "copied"


def test_columns_written_one_by_one_are_its_pieces(origin: Asks) -> None:
    """Strided writes overlap in span but not in elements."""
    source = torch.ones(4)

    def run() -> Tensor:
        buffer = torch.empty(4, 3)
        for i in range(3):
            buffer[:, i].copy_(source)
        return buffer

    assert origin(run).kind == "copied"


def test_a_zeroed_row_does_not_hide_the_draw(origin: Asks) -> None:
    """Embedding zeroes its padding row after the draw."""
    found = origin(lambda: nn.Embedding(100, 8, padding_idx=0).weight)
    assert found.kind == "drawn"
    assert found.partial == ("aten.fill_",)


def test_the_part_that_was_overwritten_knows_it(origin: Asks) -> None:
    found = origin(lambda: nn.Embedding(100, 8, padding_idx=0).weight[0])
    assert (found.kind, found.op) == ("filled", "aten.fill_.Scalar")


def test_lists_are_copied_pairwise(origin: Asks) -> None:
    def run() -> Tensor:
        targets = [torch.empty(3), torch.empty(3)]
        torch._foreach_copy_(targets, [torch.rand(3), torch.randn(3)])
        return targets[1]

    assert origin(run).first_op == "aten.randn.default"


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor:FutureWarning")
def test_a_gathered_parameter_is_what_was_gathered(origin: Asks) -> None:
    """Collectives declare no writes; their output is filled from every rank's input."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:

        def run() -> Tensor:
            gathered = torch.empty(6)
            dist.all_gather_into_tensor(gathered, torch.rand(6))
            return gathered[2:4]

        found = origin(run)
    finally:
        dist.destroy_process_group()
    assert (found.kind, found.first_op) == ("drawn", "aten.rand.default")
    assert found.chain[0] == "c10d._allgather_base_.default"


def test_an_empty_tensor_has_a_writer_too(origin: Asks) -> None:
    assert origin(lambda: torch.rand(0)).kind == "drawn"
    assert origin(lambda: torch.rand(3)[3:]).kind == "drawn"


def test_a_loaded_file_is_a_copy(origin: Asks, tmp_path: Path) -> None:
    """`torch.load` fills its storages past the dispatcher."""
    torch.save({"w": torch.rand(4)}, tmp_path / "w.pt")
    assert origin(lambda: torch.load(tmp_path / "w.pt")["w"]).kind == "leaf"
    assert origin(lambda: torch.load(tmp_path / "w.pt")["w"].clone()).kind == "copied"


@pytest.mark.parametrize("rank", [0, 1])
def test_what_other_ranks_contributed_came_to_be_as_it_did_here(rank: int) -> None:
    """All ranks run one program: the whole that each cuts its part from is made alike."""
    build = Builder(rank=rank)
    weight = build.op("uniform_", build.op("empty", shape=(20,)), shape=(20,))
    bias = build.op("zeros", shape=(4,))
    flat = build.op("cat", weight, bias, shape=(24,))
    part = build.op("split", flat, shape=(12,), outputs=2) + rank
    shard = build.op("clone", part, shape=(12,))
    target = build.op("empty", shape=(24,))
    build.op("c10d._allgather_base_", target, shard, shape=(24,))
    gathered = build.again(target)
    parts = build.op("split", gathered, shape=(20,)), build.op("split", gathered, shape=(4,))
    lineage = Lineage(_moved(build, part, 12 * rank, parts[1], 20))
    assert lineage.of(parts[0]).first_op == "aten.uniform_.default"
    assert lineage.of(parts[1]).first_op == "aten.zeros.default"


@pytest.mark.parametrize("rank", [0, 1])
def test_parts_of_what_fsdp_gathered_come_from_their_own_shards(rank: int) -> None:
    """FSDP2 lays its shards end to end, gathers them from all ranks, and splits each rank's row."""
    build = Builder(rank=rank)
    shards = [build.op(name, shape=(12,)) for name in ("normal", "rand", "zeros")]
    buffer = build.op("empty", shape=(72,))
    laid = build.op("fsdp.all_gather_copy_in", *shards, buffer, shape=(36,))
    target = build.op("empty", shape=(72,))
    build.op("c10d._allgather_base_", target, laid, shape=(72,))
    rows = build.op("view", build.again(target), shape=(2, 36))
    parts = [
        build.op("fsdp.split_with_sizes_copy", rows, shape=(2, 12), outputs=3, settings={"dim": 1})
    ]
    parts += [parts[0] + 1, parts[0] + 2]
    lineage = Lineage(build.build())
    names = [lineage.of(part).first_op for part in parts]
    assert names == ["aten.normal.default", "aten.rand.default", "aten.zeros.default"]


def _moved(build: Builder, *places: int) -> Trace:
    """The built trace, with offsets for views that the builder lays at the start of their storage."""
    trace = build.build()
    for value, offset in zip(places[::2], places[1::2], strict=True):
        trace.values.offset[value] = offset
    return trace


# ---- hidden writes ------------------------------------------------------------------------------------------------


def test_a_content_that_changed_with_no_op_is_hidden(origin: Asks) -> None:
    x = torch.ones(4)

    def run() -> Tensor:
        x.sum()
        x.numpy()[1] = 5.0
        x.sum()
        return x.clone()

    found = origin(run, integrity="full")
    assert found.kind == "hidden"
    assert found.chain == ("aten.clone.default",)


def test_a_version_that_moved_without_a_change_is_no_hidden_write(origin: Asks) -> None:
    """The recorder counts on when a leaf may have changed; equal fingerprints say that it did not."""
    x = torch.ones(4)

    def run() -> Tensor:
        x.sum()
        with torch._C._DisableTorchDispatch():
            x.mul_(1.0)
        x.sum()
        return x

    assert origin(run).kind == "leaf"


def test_a_hand_built_hidden_write_is_hidden() -> None:
    build = Builder()
    x = build.leaf("running_mean", kind="buffer")
    build.op("relu", x)
    y = build.hidden_write(x, "running_mean", content="other")
    build.op("relu", y)
    trace = build.build()
    assert Lineage(trace).of(x).kind == "leaf"
    assert Lineage(trace).of(y).kind == "hidden"


# ---- many -----------------------------------------------------------------------------------------------------------


def test_long_chains_end(origin: Asks) -> None:
    """5,000 in-place ops are followed without recursion, and the report stays short."""

    def run() -> Tensor:
        x = torch.rand(2)
        for _ in range(5_000):
            x.mul_(1.0)
        return x

    found = origin(run)
    assert (found.kind, found.first_op) == ("drawn", "aten.rand.default")
    assert len(found.chain) == CHAIN_LENGTH
    assert found.chain[-1] == "aten.rand.default"


def test_what_another_rank_scattered_is_no_unwritten_memory() -> None:
    """The receiver of a scatter hands in nothing but the memory that it is to be written into."""
    build = Builder(rank=1, world_size=2)
    shard = build.op("c10d.scatter_", build.op("empty_like"))

    found = Lineage(build.build()).of(shard)

    assert (found.kind, found.op) == ("computed", "c10d.scatter_.default")
