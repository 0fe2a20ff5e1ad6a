"""One sample alone against the same sample in a batch, in models of many kinds: the verdict, place and cause are right.

Every mistake has its sound twin: the same model without it, which differs by rounding at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import torch
from batch_models import (
    EagerBert,
    Esm,
    FusedBert,
    Llama,
    Mixing,
    Mixture,
    OneByOne,
    Pooling,
    Recurrent,
    Speech,
    Stepwise,
)
from torch import Tensor, nn

import opdrift
from opdrift.errors import IncomparableTracesError
from opdrift.records import DifferingSamples

Inputs = Sequence[Tensor]


@dataclass(frozen=True)
class Scenario:
    """One model, its inputs for the sample alone and for the batch, and what is to be said.

    `verdict` "sound" is identical or rounding.
    """

    name: str
    model: Callable[[], nn.Module]
    alone: Callable[[], Inputs]
    together: Callable[[], Inputs]
    lengths: tuple[int, ...] | None
    sample: int
    verdict: Literal["diverged", "sound"] = "sound"
    ops: frozenset[str] = field(default_factory=frozenset)
    module: str | None = None
    causes: frozenset[str] = field(default_factory=frozenset)
    pad_side: Literal["left", "right"] = "right"
    alone_lengths: tuple[int, ...] | None = None


SCENARIOS: list[Scenario] = []


def add(
    family: Family,
    fault: str,
    ops: str = "",
    *,
    module: str | None = None,
    cause: str = "",
    side: Literal["left", "right"] = "right",
    **options: object,
) -> None:
    """A mistake if `ops` are given, which it is found at; else a sound run."""
    make, given = family
    alone, together, lengths, sample = given(side)
    SCENARIOS.append(
        Scenario(
            f"{make.__name__}: {fault or 'sound'}, {side}",
            lambda: make(fault, **options),
            alone,
            together,
            lengths,
            sample,
            "diverged" if ops else "sound",
            frozenset(f"aten.{op}" for op in ops.split()),
            module,
            frozenset(cause.split()),
            side,
        )
    )


Given = tuple[Callable[[], Inputs], Callable[[], Inputs], tuple[int, ...] | None, int]
Family = tuple[Callable[..., nn.Module], Callable[[str], Given]]

LENGTHS = (9, 5, 7)


def tokens(side: str, *, low: int = 2, pad: int = 0) -> tuple[list[Tensor], Tensor]:
    """Token ids of each sample, and all of them padded."""
    torch.manual_seed(3)
    each = [torch.randint(low, 20, (n,)) for n in LENGTHS]
    padded = torch.full((len(LENGTHS), max(LENGTHS)), pad)
    for row, ids in zip(padded, each, strict=True):
        row[len(row) - len(ids) if side == "left" else 0 :][: len(ids)] = ids
    return each, padded


def masked_tokens(side: str) -> Given:
    """Ids and a mask; sample 1."""
    each, padded = tokens(side)
    one = each[1][None]
    return (
        lambda: (one, torch.ones_like(one, dtype=torch.bool)),
        lambda: (padded, padded != 0),
        LENGTHS,
        1,
    )


def esm_tokens(side: str) -> Given:
    """Ids whose padding is 1; some are masked; sample 2."""
    each, padded = tokens(side, pad=1)
    for ids, row in zip(each, padded, strict=True):
        row[row == ids[2]] = 32
        ids[ids == ids[2].clone()] = 32
    padded[0, 4:6] = 32
    return lambda: (each[2][None],), lambda: (padded,), LENGTHS, 2


def counted_tokens(side: str) -> Given:
    """Ids and lengths; sample 1."""
    each, padded = tokens(side)
    return (
        lambda: (each[1][None], torch.tensor([LENGTHS[1]])),
        lambda: (padded, torch.tensor(LENGTHS)),
        LENGTHS,
        1,
    )


def waves(side: str) -> Given:
    """Waveforms and lengths; sample 1."""
    torch.manual_seed(4)
    lengths = (60, 38, 44)
    padded = torch.zeros(3, 60)
    each = [torch.randn(n) for n in lengths]
    for row, wave in zip(padded, each, strict=True):
        row[: len(wave)] = wave
    return (
        lambda: (each[1][None], torch.tensor([38])),
        lambda: (padded, torch.tensor(lengths)),
        lengths,
        1,
    )


def features(side: str) -> Given:
    """Rows of features without a length; sample 2."""
    torch.manual_seed(5)
    x = torch.randn(5, 12) * torch.tensor([1.0, 4.0, 0.5, 2.0, 1.0])[:, None]
    return lambda: (x[2:3],), lambda: (x,), None, 2


def sequences(side: str) -> Given:
    """Sequences of features of equal length; sample 1."""
    torch.manual_seed(6)
    x = torch.randn(3, 6, 8)
    return lambda: (x[1:2],), lambda: (x,), None, 1


def padded_features(side: str) -> Given:
    """Sequences of features and a mask; padding is zeros; sample 1."""
    torch.manual_seed(7)
    each = [torch.randn(n, 8) for n in LENGTHS]
    padded = torch.zeros(3, 9, 8)
    mask = torch.zeros(3, 9, dtype=torch.bool)
    for k, x in enumerate(each):
        start = 9 - len(x) if side == "left" else 0
        padded[k, start : start + len(x)] = x
        mask[k, start : start + len(x)] = True
    one = each[1][None]
    return (
        lambda: (one, torch.ones(1, 5, dtype=torch.bool)),
        lambda: (padded, mask),
        LENGTHS,
        1,
    )


SDPA = "_scaled_dot_product_flash_attention_for_cpu.default"
ADDMM = "addmm.default"

bert: Family = (EagerBert, masked_tokens)
add(bert, "")
add(bert, "positions from the mask", side="left")
add(
    bert,
    "",
    "embedding.default arange.default",
    module="positions",
    cause="position-ids",
    side="left",
)
add(bert, "mask never arrives", "_softmax.default", module="attention", cause="mask")
add(bert, "mask of the other polarity", "_softmax.default", module="attention", cause="mask")
add(
    bert,
    "mask from the other side",
    "rsub.Scalar lt.Tensor masked_fill.Scalar _softmax.default",
    module="attention",
    cause="mask",
)
add(bert, "softmax over the batch", "_softmax.default", module="attention", cause="batch-mixing")
add(bert, "softmax over the heads", "bmm.default", module="attention", cause="padding mask")

fused: Family = (FusedBert, masked_tokens)
add(fused, "")
add(fused, "", side="left")
add(fused, "second layer forgets the mask", SDPA, module="layers.1", cause="mask")

llama: Family = (Llama, masked_tokens)
add(llama, "")
add(llama, "", side="left")
add(llama, "rotary of the padded length", side="left")
add(
    llama,
    "sinusoids of the padded length",
    "sin.default cos.default cat.default repeat.default mul.Tensor",
    cause="position-ids",
    side="left",
)
add(llama, "causal only", SDPA, module="layers.0", cause="mask", side="left")
add(llama, "causal only", side="right")

esm: Family = (Esm, esm_tokens)
add(esm, "")
add(esm, "share over the batch", "sum.default div.Tensor", module="", cause="batch-mixing")
add(
    esm,
    "batch and length exchanged",
    "_scaled_dot_product_flash_attention_for_cpu.default _scaled_dot_product_attention_math.default bmm.default baddbmm.default _softmax.default",
    module="attention",
    cause="batch-mixing mask",
)

speech: Family = (Speech, waves)
add(speech, "")
add(speech, "masked mean")
add(
    speech,
    "convolution reaches into padding",
    "convolution.default",
    module="second",
    cause="padding",
)
add(speech, "instance norm over time", "native_batch_norm.default", module="norm", cause="padding")
add(speech, "group norm over time", "native_group_norm.default", module="norm", cause="padding")
add(speech, "mean over time", "mean.dim", module="", cause="padding")
add(speech, "maximum over time", "amax.default", module="", cause="padding")
add(speech, "pooled over time", "_adaptive_avg_pool2d.default mean.dim", module="", cause="padding")
add(
    speech,
    "divides by the padded length",
    "div.Tensor div.Scalar",
    module="",
    cause="padding op-args",
)
add(speech, "spectrum over time", "_fft_r2c.default", module="", cause="padding")

lstm: Family = (Recurrent, counted_tokens)
add(lstm, "")
add(lstm, "packed")
add(
    lstm,
    "packed, then the wrong one",
    "_pack_padded_sequence.default index_select.default mkldnn_rnn_layer.default roll.default",
    module=None,
    cause="batch-mixing",
)
add(lstm, "last valid position")
add(lstm, "last state after padding", "mkldnn_rnn_layer.default", module="lstm", cause="padding")
add(lstm, "both directions", "mkldnn_rnn_layer.default", module="lstm", cause="padding")
add(lstm, "last position", "select.int", module="", cause="padding")
add(lstm, "batch taken for length", "mkldnn_rnn_layer.default", module="lstm", cause="batch-mixing")

mixture: Family = (Mixture, sequences)
add(mixture, "")
add(
    mixture,
    "capacity of the batch",
    "cumsum.default where.default lt.Scalar",
    module="",
    cause="batch-mixing",
)

mixing: Family = (Mixing, features)
add(mixing, "")
add(mixing, "quantised by the sample")
add(mixing, "centred by the batch", "mean.dim", module="", cause="batch-mixing")
add(mixing, "scaled by the largest of the batch", "max.default", module="", cause="batch-mixing")
add(mixing, "standardised over everything", "mean.default", module="", cause="batch-mixing")
add(mixing, "softmax over the samples", "_softmax.default", module="", cause="batch-mixing")
add(mixing, "quantised by the batch", "amax.default", module="", cause="batch-mixing")
add(mixing, "rolled", "roll.default", module="", cause="batch-mixing")
add(mixing, "sum over the batch size", "div.Tensor", module="", cause="batch-mixing op-args")
add(
    mixing,
    "dropout",
    "bernoulli_.float native_dropout.default div_.Scalar mul.Tensor",
    module="",
    cause="dropout rng",
)

stepwise: Family = (Stepwise, sequences)
add(stepwise, "")
add(stepwise, "centred in the cache", "mean.dim", module="", cause="batch-mixing")
add((OneByOne, features), "")

pooling: Family = (Pooling, padded_features)
add(pooling, "")
add(pooling, "", side="left")
add(pooling, "no mask", "_softmax.default", module="", cause="mask padding")


def recorded(path: Path, model: nn.Module, inputs: Inputs, batch: opdrift.Batch) -> opdrift.Trace:
    """The trace of one call."""
    with torch.no_grad(), opdrift.record(path, model=model, batch=batch):
        model(*inputs)
    return opdrift.load(path)


def compared(scenario: Scenario, folder: Path, *, flipped: bool = False) -> opdrift.Diagnosis:
    """Alone against together, or the other way round."""
    torch.manual_seed(0)
    model = scenario.model().eval()
    lengths, sample = scenario.lengths, scenario.sample
    torch.manual_seed(1)
    together = scenario.together()
    torch.manual_seed(1)
    alone = scenario.alone()
    size = len(lengths) if lengths else len(together[0])
    torch.manual_seed(2)
    many = recorded(
        folder / "many.trace", model, together, opdrift.Batch(size, lengths, scenario.pad_side)
    )
    own = None if lengths is None else [lengths[sample]]
    torch.manual_seed(2)
    one = recorded(folder / "one.trace", model, alone, opdrift.Batch(1, own, scenario.pad_side))
    if flipped:
        return opdrift.diff(many, one, samples=(sample, 0))
    return opdrift.diff(one, many, samples=(0, sample))


@pytest.mark.parametrize("flipped", [False, True], ids=["alone first", "batch first"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_a_sample_in_a_batch(scenario: Scenario, flipped: bool, tmp_path: Path):
    found = compared(scenario, tmp_path, flipped=flipped)

    if scenario.verdict == "sound":
        assert found.verdict in ("identical", "rounding"), found.first
        return
    assert found.verdict == "diverged"
    assert found.first is not None
    assert found.first.op in scenario.ops
    assert scenario.module is None or found.first.module == scenario.module
    assert found.first.cause.slug in scenario.causes


# ---- one batch against another, other programs -------------------------------------------------------------------


def padded(rows: Sequence[Tensor], to: int) -> tuple[Tensor, Tensor]:
    """Rows of ids in a batch, and their mask."""
    ids = torch.zeros(len(rows), to, dtype=torch.long)
    for row, given in zip(ids, rows, strict=True):
        row[: len(given)] = given
    return ids, ids != 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sample_of_two_batches_that_are_padded_otherwise(dtype: torch.dtype, tmp_path: Path):
    torch.manual_seed(0)
    model = FusedBert().eval().to(dtype)
    a, b, c = (torch.randint(2, 20, (n,)) for n in (9, 5, 7))
    left = recorded(
        tmp_path / "left.trace", model, padded([a, b, c], 9), opdrift.Batch(3, [9, 5, 7])
    )
    right = recorded(
        tmp_path / "right.trace", model, padded([c, b, b[:3]], 8), opdrift.Batch(3, [7, 5, 3])
    )

    for samples in ("1:1", "2:0"):
        found = opdrift.diff(left, right, samples=samples)
        assert found.verdict in ("identical", "rounding"), found.first
    with pytest.raises(IncomparableTracesError, match="not the same sample"):
        opdrift.diff(left, right, samples="0:0")


def test_padding_that_the_recorder_was_not_told_of_is_named(tmp_path: Path):
    torch.manual_seed(0)
    model, b = FusedBert().eval(), torch.randint(2, 20, (5,))
    one = recorded(tmp_path / "one.trace", model, padded([b], 5), opdrift.Batch(1))
    many = recorded(tmp_path / "many.trace", model, padded([b, b], 9), opdrift.Batch(2))

    with pytest.raises(IncomparableTracesError, match=r"ids holds 5 elements .* 9 .*lengths=.*"):
        opdrift.diff(one, many, samples="0:1")


def test_a_weight_that_differs_comes_before_what_the_batch_does(tmp_path: Path):
    torch.manual_seed(0)
    model, x = Sums().eval(), torch.randn(3, 12)
    one = recorded(tmp_path / "one.trace", model, [x[:1]], opdrift.Batch(1))
    with torch.no_grad():
        model.first.weight[0, 0] += 1
        model.first.bias += 1
    many = recorded(tmp_path / "many.trace", model, [x], opdrift.Batch(3))

    found = opdrift.diff(one, many, samples=(0, 0))

    assert found.first is not None
    assert (found.first.name, found.first.cause.slug) == ("first.weight", "weights")


def test_a_small_fault_in_few_bits_is_not_taken_for_what_cancels(tmp_path: Path):
    """One sign in bfloat16: its effect is small, and not nothing."""
    torch.manual_seed(0)
    model, rows = FusedBert().eval().bfloat16(), torch.randint(2, 20, (2, 7))
    mask = torch.ones(2, 7, dtype=torch.bool)
    one = recorded(tmp_path / "one.trace", model, [rows[:1], mask[:1]], opdrift.Batch(1))
    with torch.no_grad():
        model.get_parameter("layers.1.up.weight")[0, 0] *= -1
    many = recorded(tmp_path / "many.trace", model, [rows, mask], opdrift.Batch(2))

    found = opdrift.diff(one, many, samples=(0, 0))

    assert found.verdict == "diverged"
    assert found.first is not None
    assert found.first.name == "layers.1.up.weight"


def test_an_argument_that_is_no_size_is_a_defect_in_a_batch_too(tmp_path: Path):
    torch.manual_seed(0)
    x = torch.randn(3, 12)
    models = [nn.Sequential(nn.ReLU(), nn.LayerNorm(12, eps=eps)).eval() for eps in (1e-5, 1e-2)]
    one = recorded(tmp_path / "one.trace", models[0], [x[:1]], opdrift.Batch(1))
    many = recorded(tmp_path / "many.trace", models[1], [x], opdrift.Batch(3))

    found = opdrift.diff(one, many, samples=(0, 0))

    assert found.first is not None
    assert (found.first.module, found.first.cause.slug) == ("1", "op-args")


def test_the_sample_may_be_cut_out_while_recording(tmp_path: Path):
    """Then its input is a part of a larger tensor."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv1d(4, 4, 3), nn.ReLU()).eval(), torch.randn(3, 4, 9)
    with (
        torch.no_grad(),
        opdrift.record(tmp_path / "one.trace", model=model, batch=opdrift.Batch(1)),
    ):
        model(x[1:2])
    many = recorded(tmp_path / "many.trace", model, [x], opdrift.Batch(3))

    found = opdrift.diff(tmp_path / "one.trace", many, samples=(0, 1))

    assert found.verdict in ("identical", "rounding")
    assert found.first is None or found.first.op == "aten.convolution.default"


# ---- whole batches ---------------------------------------------------------------------------------------------


class Sums(nn.Module):
    """Two layers over each row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize("changed", [[2], [0, 4], [0, 1, 2, 3, 4]])
def test_whole_batches_name_the_samples_that_differ_and_no_others(
    changed: list[int], tmp_path: Path
):
    torch.manual_seed(0)
    model, x = Sums().eval(), torch.randn(5, 12)
    y = x.clone()
    y[changed] += 1
    left = recorded(tmp_path / "left.trace", model, [x], opdrift.Batch(5))
    right = recorded(tmp_path / "right.trace", model, [y], opdrift.Batch(5))

    found = opdrift.diff(left, right)

    assert found.samples == DifferingSamples(5, tuple(changed))
    words = "all 5 samples" if len(changed) == 5 else f"only sample{'s' * (len(changed) > 1)} "
    assert any(words in note for note in found.notes)


def test_equal_batches_name_no_sample(tmp_path: Path):
    torch.manual_seed(0)
    model, x = Sums().eval(), torch.randn(5, 12)
    traces = [
        recorded(tmp_path / f"{name}.trace", model, [x], opdrift.Batch(5)) for name in ("a", "b")
    ]

    found = opdrift.diff(*traces)

    assert found.verdict == "identical"
    assert found.samples is None or found.samples.numbers == ()
    assert not any("sample" in note for note in found.notes)


# ---- what cannot be compared -----------------------------------------------------------------------------------


def test_a_sample_out_of_range_is_an_error(tmp_path: Path):
    model, x = Sums().eval(), torch.randn(3, 12)
    one = recorded(tmp_path / "one.trace", model, [x[:1]], opdrift.Batch(1))
    many = recorded(tmp_path / "many.trace", model, [x], opdrift.Batch(3))

    with pytest.raises(IncomparableTracesError, match="there is no sample 3"):
        opdrift.diff(one, many, samples=(0, 3))
    with pytest.raises(IncomparableTracesError, match="there is no sample 1"):
        opdrift.diff(one, many, samples="1:0")


class Loss(nn.Module):
    """The mean square over all samples of what a model gives."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y.square().mean()


def losses(tmp_path: Path, body: nn.Module) -> list[opdrift.Trace]:
    torch.manual_seed(0)
    x, model = torch.randn(3, 12), Loss(body).eval()
    return [
        recorded(tmp_path / f"{len(rows)}.trace", model, [rows], opdrift.Batch(len(rows)))
        for rows in (x[:1], x)
    ]


def test_a_loss_of_all_samples_is_no_result_of_one(tmp_path: Path):
    """It differs with the batch and says nothing of a sample; what comes before it does."""
    found = opdrift.diff(*losses(tmp_path, Mixing("centred by the batch")), samples=(0, 0))

    assert found.first is not None
    assert (found.first.op, found.first.module) == ("aten.mean.dim", "body")
    assert any("made of all samples" in note for note in found.notes)


def test_nothing_is_said_of_a_sample_without_results(tmp_path: Path):
    """All that is the sample's own is equal, but no result is: that is no verdict."""
    with pytest.raises(IncomparableTracesError, match="made of all samples"):
        opdrift.diff(*losses(tmp_path, nn.ReLU()), samples=(0, 0))
