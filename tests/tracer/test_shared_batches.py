"""One process with a whole batch against ranks that share it: what the first step and the results come to."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest
from ranks import START, together

import opdrift
from opdrift.diagnose.across_ranks import across_ranks
from opdrift.errors import IncomparableTracesError
from opdrift.records import Diagnosis

#: Every case is recorded by one process with whole batches, and by two ranks with a half each.
PROGRAM = dedent(START) + dedent(
    """
    import contextlib
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
    from torch.nn import functional as F
    world = int(sys.argv[3])
    data = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1))
    aims = torch.randn(3, 8, 40, generator=torch.Generator().manual_seed(2))

    def share(batch, same=False):
        if same == "whole":
            return batch
        return batch.chunk(world)[0 if same else rank]

    def net(seed=0):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 40))

    def train(name, kind="ddp", optimizer=torch.optim.SGD, lr=0.1, same=False, mean=True, scaled=False,
              batches=2, last=True, seed=0, frozen=False, keeps=False, times=1.0, clip="", **settings):
        model = net(seed if world > 1 else 0)
        model[3].weight.requires_grad_(world == 1 or not frozen)
        root = model
        if world > 1 and kind == "ddp":
            root = DistributedDataParallel(model)
        if world > 1 and kind == "fsdp":
            narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if name.startswith("narrow") else MixedPrecisionPolicy()
            for layer in (model[0], model[3]):
                fully_shard(layer, mp_policy=narrow)
            fully_shard(model, mp_policy=narrow)
        if world > 1 and kind == "fsdp1":
            options = {"use_orig_params": True, "device_id": torch.device("cpu")}
            model[0] = FullyShardedDataParallel(model[0], **options)
            root = FullyShardedDataParallel(model, **options)
        settings = settings if world > 1 else {}
        update = optimizer(root.parameters(), lr=lr if world > 1 else 0.1, **settings)
        with opdrift.record(name, model=root):
            for x, y in zip(data[:batches], aims):
                loss = F.mse_loss(root(share(x, same)).float(), share(y, same))
                (loss * (times if world > 1 else 1.0)).backward()
                if world > 1 and kind == "manual":
                    for p in model.parameters():
                        dist.all_reduce(p.grad)
                        p.grad /= world if mean else 1
                if world > 1 and scaled:
                    model[3].weight.grad.mul_(1.1)
                if clip == "parts" and world > 1:
                    parts = [getattr(p.grad, "_local_tensor", p.grad) for p in root.parameters() if p.grad is not None]
                    norm = torch.stack([part.norm() for part in parts]).norm()
                    for part in parts:
                        part.mul_(0.01 / norm)
                elif clip and kind == "fsdp1" and world > 1:
                    root.clip_grad_norm_(0.01)
                elif clip:
                    nn.utils.clip_grad_norm_(root.parameters(), 0.01)
                update.step()
                if world == 1 or not keeps:
                    update.zero_grad()
            if last:
                with torch.no_grad():
                    root(data[2])

    def attend(name):
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        if world > 1:
            fully_shard(model)
        update = torch.optim.AdamW(model.parameters(), lr=0.01)
        x = torch.randn(2, 8, 5, 16, generator=torch.Generator().manual_seed(4))
        with opdrift.record(name, model=model):
            model(share(x[0])).sin().mean().backward()
            update.step()
            with torch.no_grad():
                model(x[1])

    def drift(name):
        # a rank's own gradients go into the second step; more are clipped at once than a walk looks at one by one
        def run():
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(10)))
            root = DistributedDataParallel(model) if world > 1 else model
            update = torch.optim.SGD(root.parameters(), lr=0.1)
            for step, x in enumerate(data):
                alone = root.no_sync() if world > 1 and step == 1 else contextlib.nullcontext()
                with alone:
                    root(share(x)).square().mean().backward()
                nn.utils.clip_grad_norm_(root.parameters(), 0.01)
                update.step()
                update.zero_grad()

        with opdrift.record(name):
            run()  # the model is gone before the recording ends

    def fail(name):
        model = net()
        if world > 1:
            fully_shard(model)
            model.set_gradient_divide_factor(1.0)  # gloo cannot multiply while it adds up
        with contextlib.suppress(RuntimeError), opdrift.record(name, model=model):
            model(share(data[0])).mean().backward()

    def infer(name, rows=8, seed=0):
        model = net(seed if world > 1 else 0).double()
        with opdrift.record(name, model=model), torch.no_grad():
            for x in data.double():
                model(share(x[:rows]))

    train("ddp")
    train("fsdp", kind="fsdp")
    train("adam", kind="fsdp", optimizer=torch.optim.AdamW)
    train("sum", kind="manual", mean=False)
    train("rate", lr=0.12)
    train("fsdp-rate", kind="fsdp", lr=0.12)
    train("same", same=True)
    train("scaled", scaled=True)
    train("fsdp-scaled", kind="fsdp", scaled=True)
    train("frozen", kind="fsdp", frozen=True)
    train("other-weights", seed=5)
    train("kept", keeps=True)
    train("fsdp-kept", kind="fsdp", keeps=True)
    train("adam-decay", kind="fsdp", optimizer=torch.optim.AdamW, lr=0.1, weight_decay=0.0101)
    train("no-more", kind="fsdp", batches=1, last=False)
    train("narrow", kind="fsdp")
    for kind in ("fsdp", "fsdp1"):
        train(f"{kind}-clipped", kind=kind, optimizer=torch.optim.AdamW, clip="whole")
        train(f"{kind}-clipped-apart", kind=kind, optimizer=torch.optim.AdamW, clip="parts")
        train(f"{kind}-twice", kind=kind, optimizer=torch.optim.AdamW, times=2.0)
        for clip in ("whole", "parts"):
            train(f"{kind}-all-{clip}", kind=kind, optimizer=torch.optim.AdamW, same="whole", clip=clip)
        train(f"{kind}-halved", kind=kind, optimizer=torch.optim.AdamW, clip="whole", times=0.5)
    train("narrow-twice", kind="fsdp", times=2.0)
    train("no-more-twice", kind="fsdp", batches=1, last=False, times=2.0)
    attend("noise")
    drift("drifted")
    fail("failed")
    infer("infer")
    infer("infer-other", seed=5)
    dist.destroy_process_group()
    """
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of what one process recorded, and two ranks."""
    folders = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    for number, folder in enumerate(folders, 1):
        for done in together(PROGRAM, folder, ranks=number):
            assert not done.returncode, done.stderr
    return folders


def compared(runs: tuple[Path, Path], name: str, *, swapped: bool = False) -> Diagnosis:
    """One process against two ranks, or the other way round."""
    left, right = (folder / name for folder in runs[:: -1 if swapped else 1])
    return opdrift.diff(left, right)


def summary(runs: tuple[Path, Path], name: str, slug: str) -> str:
    """What is said of two runs that diverge."""
    found = compared(runs, name)
    assert found.verdict == "diverged"
    assert found.first is not None
    assert found.first.cause.slug == slug
    return found.first.cause.summary


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("ddp", "the gradients"),
        ("fsdp", "the updates of"),
        ("adam", "the updates of"),
        ("noise", "the updates of"),
        ("fsdp-clipped", "the updates of"),
        ("fsdp1-clipped", "the updates of"),
    ],
)
def test_shares_of_a_batch_differ_by_rounding(runs, name: str, what: str, swapped: bool):
    """Whole gradients are compared where they are read; where ranks hold parts, what a step made of the parameters."""
    found = compared(runs, name, swapped=swapped)

    assert found.verdict == "rounding"
    assert found.first is not None
    assert found.first.cause.slug == "rounding"
    one, two = ("right", "left") if swapped else ("left", "right")
    assert (
        f"whole in the {one} run and in 2 parts (a part on each of 2 ranks) in the {two} one; {what}"
        in found.first.cause.summary
    )
    assert len(found.origins) == 1


def test_gradients_that_are_summed_are_told_by_their_factor(runs):
    """all_reduce sums; DistributedDataParallel and a whole batch take the mean."""
    said = summary(runs, "sum", "structure")

    assert "are 2 times as large, as if they were summed over the ranks" in said


@pytest.mark.parametrize("name", ["rate", "fsdp-rate"])
def test_another_learning_rate_is_told_with_both_numbers(runs, name: str):
    assert "-0.1 against -0.12" in summary(runs, name, "op-args")


def test_ranks_that_are_all_given_the_same_share_have_other_gradients(runs):
    """The first half twice is not the batch."""
    assert "by no single factor" in summary(runs, "same", "structure")


@pytest.mark.parametrize("name", ["scaled", "frozen"])
def test_a_parameter_that_alone_is_treated_otherwise_is_named(runs, name: str):
    """The others agree, so the parts hold the same samples."""
    said = summary(runs, name, "structure")

    assert "of the first step agree for " in said
    assert said.endswith("parameters, and not for 3.weight")


def test_what_a_step_does_to_a_part_alone_is_named(runs):
    assert "update of 3.weight has aten.mul_.Tensor (other: 1.1) more" in summary(
        runs, "fsdp-scaled", "structure"
    )


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", ["kept", "fsdp-kept"])
def test_what_goes_wrong_behind_the_first_step_is_no_rounding(runs, name: str, swapped: bool):
    """Gradients that are never zeroed: the first step is right, and what the runs end with, or read last, is not."""
    found = compared(runs, name, swapped=swapped)

    assert found.verdict == "diverged"


def test_another_decay_is_told_although_rounding_explains_what_comes_of_it(runs):
    assert "other: 0.999 against 0.99899" in summary(runs, "adam-decay", "op-args")


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", ["fsdp-twice", "fsdp1-twice", "narrow-twice", "no-more-twice"])
def test_a_factor_that_the_optimizer_or_a_cast_hides_is_told_by_norms(
    runs, name: str, swapped: bool
):
    """Adam divides gradients by their size, bfloat16 hides a step, and a step may be the last that is recorded."""
    found = compared(runs, name, swapped=swapped).first

    assert found is not None
    assert found.cause.slug == "structure"
    many = "left" if swapped else "right"
    said = re.search(
        rf"the norms of the gradients of the {many} run are ([0-9.]+) times as large",
        found.cause.summary,
    )
    assert said
    assert float(said[1]) == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("kind", ["fsdp", "fsdp1"])
def test_each_rank_with_the_whole_batch_clips_alike_or_by_its_part(runs, kind: str, swapped: bool):
    """By one call for all gradients, or one for each: that is no difference, and other norms are, though Adam hides them."""
    right = compared(runs, f"{kind}-all-whole", swapped=swapped)
    wrong = compared(runs, f"{kind}-all-parts", swapped=swapped)

    assert right.verdict in ("identical", "rounding")
    assert wrong.verdict == "diverged"
    assert wrong.first is not None
    assert "differ in length by" in wrong.first.cause.summary


@pytest.mark.parametrize("kind", ["fsdp", "fsdp1"])
def test_a_factor_that_a_clipping_takes_away_is_told_as_it_was_before(runs, kind: str):
    said = summary(runs, f"{kind}-halved", "structure")

    assert "are 0.5 times as large, as if they were divided by the number of ranks once too" in said


@pytest.mark.parametrize("kind", ["fsdp", "fsdp1"])
def test_gradients_that_each_rank_clips_by_the_norm_of_its_part_are_told(runs, kind: str):
    found = compared(runs, f"{kind}-clipped-apart").first

    assert found is not None
    assert found.cause.slug == "structure"
    assert "the norms of the gradients of the first step differ by" in found.cause.summary
    assert "clipped by the norm of all parts together" in found.cause.try_
    assert any("the updates of the parameters agree to" in words for words in found.cause.evidence)


def test_what_ranks_alone_show_is_noted_where_only_the_first_step_is_compared(runs):
    """One rank did not reduce its gradients in the second step: the first one agrees."""
    across = across_ranks(runs[1] / "drifted")
    found = compared(runs, "drifted")

    assert across.first is not None
    assert across.first.cause.slug == "replica"
    assert found.verdict == "rounding"
    assert found.first is not None
    assert found.first.cause.try_.startswith("In the first step, which alone was compared")
    assert any("later steps were not compared" in each for each in found.first.cause.evidence)
    assert any("the right run alone shows 1 finding" in note for note in found.notes)


def test_weights_that_differ_from_the_start_come_first(runs):
    assert "tensors of the model differ before the first op" in summary(
        runs, "other-weights", "weights"
    )


@pytest.mark.parametrize("swapped", [False, True])
def test_a_run_that_raises_in_a_reduction_cannot_be_compared_and_the_reason_is_told(
    runs, swapped: bool
):
    which = "left" if swapped else "right"

    with pytest.raises(IncomparableTracesError, match=f"the {which} run ended with RuntimeError"):
        compared(runs, "failed", swapped=swapped)


def test_results_that_are_equal_end_to_end_are_identical(runs):
    """Rows of float64 products do not depend on how many there are here; nothing else can be compared."""
    found = compared(runs, "infer")

    assert found.verdict == "identical"
    assert any("put end to end, is equal bit for bit" in note for note in found.notes)


def test_weights_are_compared_where_nothing_else_is(runs):
    found = compared(runs, "infer-other")

    assert found.first is not None
    assert found.first.cause.slug == "weights"
    assert {o.cause.slug for o in found.origins} == {"weights"}


def test_a_recording_that_ends_with_the_step_cannot_be_compared(runs):
    """What a rank holds of a parameter is a part, until it is gathered again."""
    with pytest.raises(IncomparableTracesError, match="beginning of the next forward"):
        compared(runs, "no-more")


def test_what_rounding_hides_is_not_called_rounding(runs):
    """Parameters in bfloat16 do not show what a step did to them."""
    with pytest.raises(IncomparableTracesError, match="of which rounding"):
        compared(runs, "narrow")
