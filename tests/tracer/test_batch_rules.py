"""Each rule on its own: where the batch and a padded length are said to lie after one op.

A row is a program, its operands and the answer. An operand is written `t(shape, batch, length)` with the dims of
the axes, or dim and inner size. The answer is checked twice: as written, and by changing a sample and
looking at what moves: what is not its own, in a result that claims to keep samples apart, is a failure; and
where a result claims to be mixed, another sample's part must move in at least one of the changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from following import Follow, bits, changed, moved_samples
from torch import Tensor
from torch.nn import functional

from opdrift.batch import Batch
from opdrift.batches.calls import Placed
from opdrift.batches.tracks import track_of
from opdrift.tracefile.axes import (
    BATCH,
    LENGTH_UNKNOWN,
    MIXED,
    UNKNOWN,
    UNSURE,
    Position,
)

B, T = 3, 5
#: How many items of the padded axis are valid, for each sample.
LENGTHS = (5, 4, 2)
Place = int | tuple[int, int, int] | None
"""A dim, or (dim, outer, inner) where the axis shares it with others."""


@dataclass
class Operand:
    tensor: Tensor
    batch: Place
    length: Place

    def positions(self, axis: int) -> list[Position]:
        found = []
        for place, size, number in ((self.batch, B, BATCH), (self.length, T, axis)):
            if place is not None:
                dim, outer, inner = place if isinstance(place, tuple) else (place, 1, 1)
                found.append(Position(dim, outer, size, inner, number))
        return found

    def changed(self, sample: int) -> Tensor:
        if self.batch is None:
            return self.tensor.clone()
        dim, outer, _ = self.batch if isinstance(self.batch, tuple) else (self.batch, 1, 1)
        if self.tensor.dtype == torch.int64:  # an index: 0 becomes 1
            return changed(self.tensor.bool(), dim, sample, outer=outer, size=B).long()
        return changed(self.tensor, dim, sample, outer=outer, size=B)


def t(*shape: int, b: Place = None, l: Place = None) -> Operand:  # noqa: E741
    return Operand(torch.randn(shape), b, l)


def whole(*shape: int, below: int = 2, b: Place = None, l: Place = None) -> Operand:  # noqa: E741
    return Operand(torch.randint(0, below, shape), b, l)


def mask(*shape: int, b: Place = None, l: Place = None) -> Operand:  # noqa: E741
    return Operand(torch.rand(shape) > 0.5, b, l)


@dataclass(frozen=True)
class Answer:
    batch: Place
    length: Place | Sequence[Place]
    flags: int


def at(b: Place, l: Place | list[Place] = None, flags: int = 0) -> Answer:  # noqa: E741
    return Answer(b, l, flags)


#: Without a place: all samples are in it; or where it lies is not known.
MEAN = at(None, flags=MIXED)
LOST = at(None, flags=UNKNOWN)
#: It depends on no sample.
NONE = at(None)

Row = tuple[str, Callable[..., Any], Sequence[Operand], Answer]


def rows() -> list[Row]:
    torch.manual_seed(0)
    f = functional
    x = t(B, T, 4, b=0, l=1)
    y = t(T, B, 4, b=1, l=0)
    lstm, lstm_first = torch.nn.LSTM(4, 3).eval(), torch.nn.LSTM(4, 3, batch_first=True).eval()
    return [
        # element by element
        ("add", torch.add, [x, t(B, T, 4, b=0, l=1)], at(0, 1)),
        ("add a bias", torch.add, [x, t(4)], at(0, 1)),
        ("add, broadcast to a new dim", torch.add, [t(B, 1, b=0), t(T)], at(0)),
        ("add to a later dim", torch.add, [t(T, 4), x], at(0, 1)),
        ("every sample with every other", torch.sub, [t(B, 1, b=0), t(1, B, b=1)], MEAN),
        ("a batch merged with the length", torch.mul, [t(B * T, 4, b=(0, 1, T), l=(0, B, 1)), t(4)], at((0, 1, T), (0, B, 1))),
        ("where", torch.where, [mask(B, 1, 1, b=0), x, t(1)], at(0, 1)),
        ("masked_fill", lambda x, m: x.masked_fill(m, 0.0), [x, mask(B, T, 1, b=0, l=1)], at(0, 1)),
        ("clamp", lambda x: x.clamp(0, 1), [x], at(0, 1)),
        ("cast", lambda x: x.to(torch.float64), [y], at(1, 0)),
        ("complex", torch.polar, [x, x], at(0, 1)),
        ("dropout", lambda x: f.dropout(x, 0.0), [x], at(0, 1)),
        ("glu", f.glu, [x], at(0, 1)),
        ("glu over the batch", lambda x: f.glu(x, 0), [t(2 * B, 4, b=(0, 2, 1))], LOST),
        ("cumsum along the length", lambda x: x.cumsum(1), [x], at(0, 1)),
        ("cumsum along the batch", lambda x: x.cumsum(0), [x], at(0, 1, MIXED)),
        ("triangle", torch.tril, [t(B, T, T, b=0, l=1)], at(0, 1)),
        ("bucketize", torch.bucketize, [x, t(4)], at(0, 1)),
        ("isin", torch.isin, [whole(B, T, b=0, l=1), whole(4)], at(0, 1)),
        # layouts and constants
        ("zeros_like", torch.zeros_like, [x], at(0, 1)),
        ("new_zeros", lambda x: x.new_zeros(B, 2), [x], NONE),
        ("clone of an expanded view", lambda x: x[:, None].expand(B, 2, 4).clone(), [t(B, 4, b=0)], at(0)),
        # reductions
        ("sum over features", lambda x: x.sum(-1), [x], at(0, 1)),
        ("mean over the length", lambda x: x.mean(1), [x], at(0)),
        ("mean over the length, kept", lambda x: x.mean(1, keepdim=True), [x], at(0)),
        ("mean over the batch", lambda x: x.mean(0), [x], at(None, 0, MIXED)),
        ("mean over everything", torch.mean, [x], MEAN),
        ("amax over two dims", lambda x: x.amax((0, 2)), [y], at(0)),
        ("max with indices", lambda x: x.max(2), [x], at(0, 1)),
        ("max of two", torch.maximum, [x, t(4)], at(0, 1)),
        ("argmax", lambda x: x.argmax(-1), [y], at(1, 0)),
        ("logsumexp", lambda x: x.logsumexp(2), [x], at(0, 1)),
        ("variance", lambda x: x.var(-1), [x], at(0, 1)),
        ("norm", lambda x: torch.linalg.vector_norm(x, dim=-1), [x], at(0, 1)),
        ("any", lambda x: x.any(1), [mask(B, T, b=0, l=1)], at(0)),
        ("median", lambda x: x.median(2), [x], at(0, 1)),
        ("loss, one number", lambda x, y: f.mse_loss(x, y), [x, x], MEAN),
        ("loss of each element", lambda x, y: f.mse_loss(x, y, reduction="none"), [x, x], at(0, 1)),
        ("loss of each sample", lambda x, y: f.cross_entropy(x, y, reduction="none"), [t(B, 4, b=0), whole(B, b=0)], at(0)),
        ("mean cross-entropy", f.cross_entropy, [t(B, 4, b=0), whole(B, b=0)], MEAN),
        # softmax and order
        ("softmax", lambda x: x.softmax(-1), [x], at(0, 1)),
        ("softmax along the length", lambda x: x.softmax(1), [x], at(0, 1)),
        ("softmax along the batch", lambda x: x.softmax(0), [x], at(0, 1, MIXED)),
        ("sort", lambda x: x.sort(-1), [x], at(0, 1)),
        ("sort along the length", lambda x: x.sort(1), [x], at(0, flags=LENGTH_UNKNOWN)),
        ("sort along the batch", lambda x: x.sort(0), [t(B, 4, b=0)], LOST),
        ("topk", lambda x: x.topk(2), [x], at(0, 1)),
        ("topk of the batch", lambda x: x.topk(2, 0), [t(B, 4, b=0)], LOST),
        # products
        ("mm by a weight", torch.mm, [t(B, 4, b=0), t(4, 6)], at(0)),
        ("mm of a flattened batch", torch.mm, [t(B * T, 4, b=(0, 1, T), l=(0, B, 1)), t(4, 6)], at((0, 1, T), (0, B, 1))),
        ("mm with the batch in the columns", torch.mm, [t(6, 4), t(4, B, b=1)], at(1)),
        ("mm over the batch", torch.mm, [t(4, B, b=1), t(B, 6, b=0)], MEAN),
        ("mm of samples with samples", lambda x, y: x @ y.T, [t(B, 4, b=0), t(B, 4, b=0)], MEAN),
        ("addmm", torch.addmm, [t(6), t(B, 4, b=0), t(4, 6)], at(0)),
        ("addmm of a bias that carries", torch.addmm, [t(B, 6, b=0), t(B, 4), t(4, 6)], at(0)),
        ("bmm", torch.bmm, [t(B, T, 4, b=0, l=1), t(B, 4, T, b=0, l=2)], at(0, [1, 2])),
        ("bmm over the length", torch.bmm, [t(B, 2, T, b=0, l=2), t(B, T, 4, b=0, l=1)], at(0)),
        ("bmm of heads", torch.bmm, [t(B * 2, T, 4, b=(0, 1, 2), l=1), t(B * 2, 4, T, b=(0, 1, 2), l=2)], at((0, 1, 2), [1, 2])),
        ("baddbmm", torch.baddbmm, [t(B, T, T, b=0), t(B, T, 4, b=0), t(B, 4, T, b=0)], at(0)),
        ("addbmm over the batch", torch.addbmm, [t(2, 6), t(B, 2, 4, b=0), t(B, 4, 6, b=0)], MEAN),
        ("mv", torch.mv, [t(B, 4, b=0), t(4)], at(0)),
        ("dot over the batch", torch.dot, [t(B, b=0), t(B)], MEAN),
        ("cdist", torch.cdist, [t(B, T, 4, b=0, l=1), t(B, 2, 4, b=0)], at(0, 1)),
        ("cdist of samples", torch.cdist, [t(1, B, 4, b=1), t(1, 6, 4)], at(1)),
        # norms
        ("layer_norm", lambda x: f.layer_norm(x, (4,)), [x], at(0, 1)),
        ("layer_norm over the batch", lambda x: f.layer_norm(x, (B, 4)), [y], at(1, 0, MIXED)),
        ("group_norm", lambda x: f.group_norm(x, 2), [t(B, 4, T, b=0, l=2)], at(0, 2)),
        ("batch_norm, trained", lambda x: f.batch_norm(x, None, None, training=True), [t(B, 4, b=0)], at(0, flags=MIXED)),
        ("batch_norm, not trained", lambda x, m: f.batch_norm(x, m, m.exp()), [t(B, 4, b=0), t(4)], at(0)),
        ("instance_norm", f.instance_norm, [t(B, 4, T, b=0, l=2)], at(0, 2)),
        # windows
        ("conv", f.conv1d, [t(B, 4, 9, b=0), t(6, 4, 3)], at(0)),
        ("conv of groups that are samples", lambda x, w: f.conv1d(x, w, groups=B), [t(1, B * 2, 9, b=(1, 1, 2)), t(B * 4, 2, 3)], at((1, 1, 4))),
        ("conv over samples as channels", f.conv1d, [t(1, B, 9, b=1), t(4, B, 3)], MEAN),
        ("conv by kernels of each sample", f.conv1d, [t(1, 2, 9), t(B, 2, 3, b=0)], LOST),
        ("transposed conv", f.conv_transpose1d, [t(B, 4, 9, b=0), t(4, 6, 3)], at(0)),
        ("max_pool", lambda x: f.max_pool2d(x, 2), [t(B, 4, 6, 6, b=0)], at(0)),
        ("adaptive_avg_pool", lambda x: f.adaptive_avg_pool2d(x, 2), [t(B, 4, 6, 6, b=0)], at(0)),
        ("upsample", lambda x: f.interpolate(x, scale_factor=2), [t(B, 4, 6, b=0)], at(0)),
        ("unfold", lambda x: f.unfold(x, 2), [t(B, 4, 5, 5, b=0)], at(0)),
        ("pixel_shuffle", lambda x: f.pixel_shuffle(x, 2), [t(B, 4, 2, 2, b=0)], at(0)),
        ("rfft", lambda x: torch.fft.rfft(x), [t(B, 8, b=0)], at(0)),
        ("fft over the batch", lambda x: torch.fft.fft(x, dim=0), [t(B, 8, b=0)], MEAN),
        # attention and recurrence
        ("attention", f.scaled_dot_product_attention, [t(B, 2, T, 4, b=0, l=2)] * 3, at(0, 2)),
        ("attention to other keys", f.scaled_dot_product_attention, [t(B, 2, T, 4, b=0, l=2), t(B, 2, 7, 4, b=0), t(B, 2, 7, 4, b=0)], at(0, 2)),
        ("attention of one query", f.scaled_dot_product_attention, [t(B, 2, 1, 4, b=0), t(B, 2, T, 4, b=0, l=2), t(B, 2, T, 4, b=0, l=2)], at(0)),
        ("attention over samples", f.scaled_dot_product_attention, [t(1, 2, B, 4, b=2)] * 3, at(2, flags=MIXED)),
        ("lstm, length first", lambda x: lstm(x)[0], [y], at(1, 0)),
        ("lstm, batch first", lambda x: lstm_first(x)[1][0], [x], at(1)),
        # joining
        ("cat of features", lambda a, b: torch.cat([a, b], -1), [x, x], at(0, 1)),
        ("cat with what carries nothing", lambda a, b: torch.cat([a, b], 1), [t(B, 4, b=0), t(B, 4)], at(0)),
        ("cat of two batches", lambda a, b: torch.cat([a, b]), [t(B, 4, b=0), t(B, 4, b=0)], at((0, 2, 1))),
        ("cat of a batch and something else", lambda a, b: torch.cat([a, b]), [t(B, 4, b=0), t(2, 4)], LOST),
        ("stack", lambda a, b: torch.stack([a, b], 1), [x, x], at(0, 2)),
        ("repeat", lambda x: x.repeat(2, 1), [t(B, 4, b=0)], at((0, 2, 1))),
        ("repeat into a new dim", lambda x: x.repeat(2, 1, 1), [t(B, 4, b=0)], at(1)),
        ("repeat_interleave", lambda x: x.repeat_interleave(2, 0), [t(B, 4, b=0)], at((0, 1, 2))),
        ("flip of features", lambda x: x.flip(-1), [x], at(0, 1)),
        ("flip of the batch", lambda x: x.flip(0), [t(B, 4, b=0)], LOST),
        ("roll of features", lambda x: x.roll(1, -1), [x], at(0, 1)),
        ("roll of the length", lambda x: x.roll(1, 1), [x], at(0, flags=LENGTH_UNKNOWN)),
        ("roll of everything", lambda x: x.roll(1), [t(B, 4, b=0)], LOST),
        ("pad of features", lambda x: f.pad(x, (1, 2)), [x], at(0, 1)),
        ("pad of the batch", lambda x: f.pad(x, (0, 0, 1, 1)), [t(B, 4, b=0)], LOST),
        # indexing
        ("embedding", f.embedding, [whole(B, T, b=0, l=1), t(2, 6)], at(0, 1)),
        ("index by one index", lambda x: x[:, torch.tensor([0, 1])], [t(B, 6, 4, b=0)], at(0)),
        ("index of the length", lambda x: x[:, torch.tensor([0, 1])], [x], at(0, flags=LENGTH_UNKNOWN)),
        ("index of the batch", lambda x: x[torch.tensor([2, 0, 1])], [t(B, 4, b=0)], LOST),
        ("one place of each sample", lambda x, i: x[torch.arange(B), i], [x, whole(B, b=0)], at(0)),
        ("places of each sample", lambda x, i: x[torch.arange(B)[:, None], i], [x, whole(B, 2, b=0)], at(0)),
        ("rows of a table", lambda x, i: x[i], [t(6, 4), whole(B, T, b=0, l=1)], at(0, 1)),
        ("mask of everything", lambda x, m: x[m], [x, mask(B, T, b=0, l=1)], at(None, flags=UNKNOWN | LENGTH_UNKNOWN)),
        ("index_select of features", lambda x: x.index_select(2, torch.tensor([1, 0])), [x], at(0, 1)),
        ("index_select of the batch", lambda x: x.index_select(0, torch.tensor([1, 0, 2])), [t(B, 4, b=0)], LOST),
        ("index_select of all in order", lambda x: x.index_select(0, torch.arange(B)), [x], at(0, 1)),
        ("gather of features", lambda x, i: x.gather(2, i), [x, whole(B, T, 2, b=0, l=1)], at(0, 1)),
        ("gather along the length", lambda x, i: x.gather(1, i), [t(B, T, b=0, l=1), whole(B, 2, b=0)], at(0)),
        ("gather along the batch", lambda x, i: x.gather(0, i), [t(B, 4, b=0), whole(B, 4)], LOST),
        ("scatter", lambda x, i, s: x.scatter(1, i, s), [t(B, 4), whole(B, 2, b=0), t(B, 2, b=0)], at(0)),
        ("one_hot", lambda i: f.one_hot(i, 2), [whole(B, T, b=0, l=1)], at(0, 1)),
        ("index_add of features", lambda x, s: x.index_add(1, torch.tensor([0, 0]), s), [t(B, 4, b=0), t(B, 2, b=0)], at(0)),
        ("index_add of samples", lambda x, s: x.index_add(0, torch.tensor([0, 0, 1]), s), [t(B, 4), t(B, 4, b=0)], LOST),
        ("index_copy into a cache", lambda x, s: x.index_copy(1, torch.tensor([2]), s), [t(B, 6, 4), t(B, 1, 4, b=0)], at(0)),
        ("put at one place", lambda x, s: torch.ops.aten.index_put(x, [None, torch.tensor([2])], s), [t(B, 6, 4), t(B, 1, 4, b=0)], at(0)),
        ("put at a place of each sample", lambda x, i: x.index_put((torch.arange(B), i), torch.ones(())), [t(B, 6), whole(B, b=0)], at(0)),
        ("put where a mask says", lambda x, m: x.index_put((m,), torch.ones(())), [t(B, 6), mask(B, 6, b=0)], at(0)),
        ("masked_scatter", lambda x, m, s: x.masked_scatter(m, s), [x, mask(B, T, 4, b=0), t(B * T * 4)], at(0, 1, UNSURE)),
        ("nonzero", torch.nonzero, [whole(B, 4, b=0)], LOST),
        # many in one op
        ("foreach", lambda a, b: torch._foreach_mul([a, b], [a, b])[1], [t(4), x], at(0, 1)),
        ("inverse of each", torch.linalg.inv, [t(B, 4, 4, b=0)], at(0)),
        # written in place
        ("add_", lambda x: x.clone().add_(1), [x], at(0, 1)),
        ("into a part of a buffer", lambda x: torch.zeros(B, 6, 4)[:, 1:2].copy_(x), [t(B, 1, 4, b=0)], at(0)),
        ("out=", lambda x: torch.add(x, 1, out=torch.empty(B, 4)), [t(B, 4, b=0)], at(0)),
        ("overwritten", lambda x: x.clone().copy_(torch.zeros(B, 4)), [t(B, 4, b=0)], at(0)),
        # through views: nothing to decide
        ("view and transposes", lambda x: x.view(B, T, 2, 2).transpose(1, 2).flatten(0, 1).exp(), [x], at((0, 1, 2), 1)),
        ("a slice of features", lambda x: x[..., 1:3].exp(), [x], at(0, 1)),
        ("the first place", lambda x: x[:, 0].exp(), [x], at(0)),
        ("a slice of the length", lambda x: x[:, 1:].exp(), [x], at(0, flags=LENGTH_UNKNOWN)),
        ("a slice of the batch", lambda x: x[:2].exp(), [t(B, 4, b=0)], LOST),
        ("one sample", lambda x: x[1].exp(), [t(B, 4, b=0)], LOST),
        ("seen as another dtype", lambda x: x.view(torch.int32).add(1), [x], at(0, 1)),
        ("as real", lambda x: torch.view_as_real(torch.complex(x, x)).sin(), [x], at(0, 1)),
    ]  # fmt: skip


ROWS = rows()


def _follow(run: Callable[..., Any], operands: Sequence[Operand], tensors: Sequence[Tensor]):
    torch.manual_seed(0)
    follow = Follow(Batch(B))
    axis = follow.batches._lengths.seed(T, LENGTHS, left=False)
    assert axis == 1
    follow.batches._active = True
    for operand, tensor in zip(operands, tensors, strict=True):
        placed = Placed(tuple(operand.positions(axis)))
        follow.batches._tracks.put(tensor, track_of(placed, tensor))
    with torch.no_grad(), follow:
        out = run(*tensors)
    assert follow.failures == []
    while isinstance(out, list | tuple):
        out = out[0]
    return (*follow.where(out), out)


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference_mode"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_where_the_axes_lie_after(row: Row, inference: bool):
    _, run, operands, answer = row

    def follow(tensors: Sequence[Tensor]):
        if not inference:
            return _follow(run, operands, tensors)
        with torch.inference_mode():
            return _follow(run, operands, tensors)

    positions, flags, out = follow([operand.tensor.clone() for operand in operands])

    assert _places(positions) == (_expected(answer.batch), _expected_all(answer.length))
    assert flags == answer.flags
    moved = [follow([o.changed(sample) for o in operands]) for sample in range(B)]
    _hold_against(positions, flags, out, [each[2] for each in moved])


def _places(positions: Sequence[Position]) -> tuple[Any, list[Any]]:
    batch = [(*p[:2], p.inner) for p in positions if p.axis == BATCH]
    lengths = sorted((*p[:2], p.inner) for p in positions if p.axis != BATCH)
    return (batch[0] if len(batch) == 1 else None), lengths


def _expected(place: Place) -> tuple[int, int, int] | None:
    return place if place is None or isinstance(place, tuple) else (place, 1, 1)


def _expected_all(places: Place | Sequence[Place]) -> list[Any]:
    return [
        _expected(p) for p in (places if isinstance(places, list) else [places]) if p is not None
    ]


def _hold_against(
    positions: Sequence[Position], flags: int, out: Tensor, moved: Sequence[Tensor]
) -> None:
    batch = [p for p in positions if p.axis == BATCH]
    others = []
    for sample, other in enumerate(moved):
        if flags & (UNKNOWN | UNSURE):
            continue
        if len(batch) == 1:
            others.append(moved_samples(out, other, batch[0]) - {sample})
        else:
            others.append({-1} if (bits(out) != bits(other)).any() else set())
    if flags & (UNKNOWN | UNSURE):
        return
    assert any(others) == bool(flags & MIXED)


def test_an_op_that_no_row_knows_is_unsure():
    @torch.library.custom_op("opdrift_test::scaled", mutates_args=())
    def scaled(x: Tensor) -> Tensor:
        return x * 2

    positions, flags, _ = _follow(scaled, [t(B, 4, b=0)], [torch.randn(B, 4)])

    assert (_places(positions), flags) == (((0, 1, 1), []), UNSURE)


def test_an_op_that_no_row_knows_and_that_changes_the_shape_is_unknown():
    @torch.library.custom_op("opdrift_test::halved", mutates_args=())
    def halved(x: Tensor) -> Tensor:
        return x[:, ::2].clone()

    positions, flags, _ = _follow(halved, [t(B, 4, b=0)], [torch.randn(B, 4)])

    assert (positions, flags) == ((), UNKNOWN)


def test_a_rule_that_fails_is_told_and_leaves_its_result_unknown(monkeypatch: pytest.MonkeyPatch):
    def fail(call: object, k: int) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("opdrift.batches.tracking.rule_for", lambda func: fail)
    x = torch.randn(B, 4)
    with Follow(Batch(B), {"x": x}) as follow:
        y = x.exp()

    assert [where for where, _ in follow.failures] == ["the batch of aten.exp.default"]
    assert follow.where(y) == ((), UNKNOWN | LENGTH_UNKNOWN)


def test_residual_connections_tell_again_where_the_batch_is():
    """Samples that were shuffled and added to the others: the place is known, that they may be mixed is said."""
    x = torch.randn(B, 4)
    with Follow(Batch(B), {"x": x}) as follow:
        y = x[torch.tensor([2, 0, 1])] + x
        z = y * 2

    assert follow.where(z) == ((Position(0, 1, B, 1),), UNSURE)


def test_a_weight_that_an_optimiser_steps_carries_nothing():
    weight = torch.nn.Parameter(torch.randn(4, 6))
    optimiser = torch.optim.SGD([weight], lr=0.1)
    x = torch.randn(B, 4)
    with Follow(Batch(B), {"x": x}) as follow:
        (x @ weight).sum().backward()
        optimiser.step()

    assert follow.where(weight.grad)[1] == MIXED
    assert follow.where(weight) == ((), 0)
