"""Ops by family, each run forward and backward in every mode of torch: what recording must leave alone.

Imported by a test, which compares bits, layouts and version counters. As a program of its own it prints which
routines oneDNN and MKL say that they ran, plain and recorded, by family:

    ONEDNN_VERBOSE=1 MKL_VERBOSE=1 MKL_VERBOSE_OUTPUT_FILE=... python op_families.py FOLDER > LINES
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (as torch writes it)
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import opdrift

Case = Callable[[], Any]

#: Case -> the modes in which torch itself does otherwise under any dispatch mode (docs/tricky-cases.md).
EXCEPTIONS = {
    "eig": {"no_grad"},
    "eigh": {"no_grad"},
    "norms": {"no_grad"},
    "svd": {"no_grad"},
}
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "backward": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}
#: Families of which oneDNN or MKL has something to say.
COMPUTED_BY_LIBRARIES = (
    "matmul",
    "convolution",
    "recurrent",
    "attention",
    "linear algebra",
    "complex",
    "quantised",
    "nested",
)
#: An optimizer's step sets modes of its own.
OF_ONE_MODE = {"optimizer"}


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A leaf that wants a gradient where gradients are kept."""
    wants = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return torch.randn(shape).to(dtype).requires_grad_(wants)


def complexes(*shape: int) -> Tensor:
    wants = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return torch.randn(shape, dtype=torch.complex64).requires_grad_(wants)


def with_gradients(found: Any) -> Any:
    """Results, and the gradients of all leaves behind them."""
    heads = [
        t for t in pytree.tree_leaves(found) if isinstance(t, Tensor) and t.grad_fn is not None
    ]
    heads = [t for t in heads if not t.is_nested and t.layout == torch.strided]
    leaves = list(dict.fromkeys(leaf for t in heads for leaf in _leaves_behind(t)))
    if not heads or not leaves:
        return found
    seeds = [torch.ones_like(t) * 1.37 for t in heads]
    return found, torch.autograd.grad(heads, leaves, seeds, allow_unused=True)


def _leaves_behind(head: Tensor) -> Iterator[Tensor]:
    """The leaves of a graph, in an order that is always the same."""
    waiting, seen = [head.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [following for following, _ in node.next_functions]


def run(family: str) -> list[Any]:
    """Each case of a family in each mode: what it gives, or how it fails."""
    found = []
    modes = MODES if family not in OF_ONE_MODE else {"backward": nullcontext}
    for name, case in FAMILIES[family].items():
        for mode_name, mode in modes.items():
            if mode_name in EXCEPTIONS.get(name, ()):
                continue
            torch.manual_seed(0)
            try:
                with mode():
                    result = case()
                    found.append(with_gradients(result))
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                found.append((type(error).__name__, str(error)))
    return found


def layer(module: nn.Module, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    """A fresh layer on normal numbers."""
    return module.to(dtype)(normal(*shape, dtype=dtype))


BF16, FP16 = torch.bfloat16, torch.float16

MATMUL: dict[str, Case] = {
    "mm": lambda: normal(20, 24) @ normal(24, 20),
    "turned": lambda: normal(24, 20).t() @ normal(20, 24).t(),
    "addmm": lambda: torch.addmm(normal(20), normal(20, 24), normal(24, 20), alpha=0.5),
    "bmm": lambda: torch.bmm(normal(3, 20, 24), normal(3, 24, 20)),
    "one in a batch": lambda: torch.bmm(normal(1, 20, 24), normal(1, 24, 20)),
    "baddbmm": lambda: torch.baddbmm(normal(3, 1, 20), normal(3, 20, 24), normal(3, 24, 20)),
    "mv and dot": lambda: (torch.mv(normal(90, 60), normal(60)), torch.dot(normal(9), normal(9))),
    "linear": lambda: layer(nn.Linear(24, 20), 4, 8, 24),
    "linear on turned rows": lambda: nn.Linear(24, 20)(normal(8, 4, 24).transpose(0, 1)),
    "linear on a part": lambda: nn.Linear(24, 20)(normal(4, 9, 24)[:, :5]),
    "16 bits": lambda: (
        layer(nn.Linear(24, 20), 4, 8, 24, dtype=BF16),
        layer(nn.Linear(24, 20), 1, 24, dtype=FP16),
        normal(20, 24, dtype=FP16) @ normal(24, 20, dtype=FP16),
    ),
    "matmul": lambda: (normal(2, 3, 8, 24) @ normal(3, 24, 8), normal(24) @ normal(3, 24, 8)),
    "einsum": lambda: torch.einsum("bij,bjk,k->bi", normal(3, 8, 9), normal(3, 9, 7), normal(7)),
    "bilinear": lambda: F.bilinear(normal(5, 6), normal(5, 7), normal(8, 6, 7), normal(8)),
    "kron and outer": lambda: (torch.kron(normal(3, 4), normal(2, 2)), torch.outer(normal(5), normal(4))),
    "cdist": lambda: torch.cdist(normal(30, 8), normal(40, 8)),
}  # fmt: skip

CONVOLUTION: dict[str, Case] = {
    "1d": lambda: layer(nn.Conv1d(4, 6, 3), 2, 4, 16),
    "2d": lambda: layer(nn.Conv2d(4, 6, 3), 2, 4, 10, 10),
    "one image": lambda: layer(nn.Conv2d(4, 6, 3), 1, 4, 10, 10),
    "no batch": lambda: layer(nn.Conv2d(4, 6, 3), 4, 10, 10),
    "3d": lambda: layer(nn.Conv3d(2, 3, 3), 2, 2, 6, 6, 6),
    "groups": lambda: layer(nn.Conv2d(4, 8, 3, groups=4, dilation=2), 2, 4, 10, 10),
    "same": lambda: layer(nn.Conv2d(4, 6, 4, padding="same"), 2, 4, 10, 10),
    "reflected": lambda: layer(nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), 2, 4, 9, 9),
    "channels last": lambda: nn.Conv2d(4, 6, 3)(
        normal(2, 4, 10, 10).to(memory_format=torch.channels_last)
    ),
    "transposed": lambda: layer(nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), 2, 4, 6, 6),
    "bfloat16": lambda: layer(nn.Conv2d(4, 6, 3), 1, 4, 10, 10, dtype=BF16),
    "float64": lambda: layer(nn.Conv2d(4, 6, 3), 2, 4, 10, 10, dtype=torch.float64),
    "unfold": lambda: F.fold(F.unfold(normal(1, 2, 6, 6), 3), (6, 6), 3),
}  # fmt: skip

RECURRENT: dict[str, Case] = {
    "LSTM": lambda: layer(nn.LSTM(8, 16, 2, batch_first=True), 2, 5, 8),
    "both ways": lambda: layer(nn.LSTM(8, 16, bidirectional=True), 5, 2, 8),
    "GRU": lambda: layer(nn.GRU(8, 16), 5, 2, 8),
    "RNN": lambda: layer(nn.RNN(8, 16, nonlinearity="relu"), 5, 2, 8),
    "cells": lambda: (layer(nn.LSTMCell(8, 9), 2, 8), layer(nn.GRUCell(8, 9), 2, 8)),
    "bfloat16": lambda: layer(nn.LSTM(8, 16), 5, 2, 8, dtype=BF16),
    "packed": lambda: (
        nn.LSTM(8, 16)(nn.utils.rnn.pack_padded_sequence(normal(5, 2, 8), torch.tensor([5, 3])))[
            0
        ].data
    ),
}

NORM: dict[str, Case] = {
    "layer": lambda: layer(nn.LayerNorm(24), 3, 5, 24),
    "layer in bfloat16": lambda: layer(nn.LayerNorm(24), 3, 5, 24, dtype=BF16),
    "rms": lambda: layer(nn.RMSNorm(24), 3, 5, 24),
    "group": lambda: layer(nn.GroupNorm(2, 4), 3, 4, 5),
    "batch, training": lambda: _batch_norm(nn.BatchNorm2d(4)),
    "batch, evaluating": lambda: _batch_norm(nn.BatchNorm2d(4).eval()),
    "instance": lambda: layer(nn.InstanceNorm1d(4, affine=True), 3, 4, 5),
    "local": lambda: layer(nn.LocalResponseNorm(2), 3, 4, 5),
    "weight": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 5))(normal(3, 6)),
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5))(normal(3, 6)),
    "normalize": lambda: (F.normalize(normal(4, 6)), torch.renorm(normal(4, 6), 2, 0, 1.0)),
}


def _batch_norm(norm: nn.BatchNorm2d) -> Any:
    return norm(normal(3, 4, 5, 5)), list(norm.buffers())


SOFTMAX: dict[str, Case] = {
    "softmax": lambda: (F.softmax(normal(4, 9), -1), F.softmax(normal(4, 9), 0)),
    "log": lambda: F.log_softmax(normal(4, 9), -1),
    "long": lambda: F.softmax(normal(2, 3000), -1),
    "16 bits": lambda: F.softmax(normal(4, 9, dtype=BF16), -1, dtype=torch.float32),
    "masked": lambda: normal(4, 4).masked_fill(torch.eye(4) > 0, float("-inf")).softmax(-1),
    "gumbel": lambda: F.gumbel_softmax(normal(4, 9), hard=True),
    "logsumexp": lambda: torch.logsumexp(normal(4, 9), 1),
    "activations": lambda: [
        f(normal(4, 9))
        for f in (F.gelu, F.silu, F.elu, F.mish, F.softplus, F.hardswish, F.logsigmoid, F.selu)
    ],
    "dropout": lambda: (F.dropout(normal(4, 9), 0.3), F.alpha_dropout(normal(4, 9), 0.3, True)),
}  # fmt: skip


def _attention(**options: Any) -> Tensor:
    q, k, v = normal(2, 4, 6, 8), normal(2, 4, 6, 8), normal(2, 4, 6, 8)
    return F.scaled_dot_product_attention(q, k, v, **options)


def _multihead(training: bool) -> Any:
    module = nn.MultiheadAttention(16, 2, batch_first=True).train(training)
    x = normal(2, 5, 16)
    return module(x, x, x, need_weights=training)


def _encoder_layer(training: bool) -> Any:
    module = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).train(training)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    return module(normal(2, 5, 16), src_key_padding_mask=padding)


ATTENTION: dict[str, Case] = {
    "flash": lambda: _attention(),
    "causal": lambda: _attention(is_causal=True, scale=0.3),
    "mask": lambda: _attention(attn_mask=torch.randn(6, 6) > 0),
    "mask with a gradient": lambda: _attention(attn_mask=normal(2, 4, 6, 6)),
    "dropout": lambda: _attention(dropout_p=0.2),
    "grouped": lambda: F.scaled_dot_product_attention(
        normal(1, 4, 6, 8), normal(1, 2, 6, 8), normal(1, 2, 6, 8), enable_gqa=True
    ),
    "bfloat16": lambda: F.scaled_dot_product_attention(*(normal(1, 2, 6, 8, dtype=BF16) for _ in "qkv")),
    "module": lambda: (_multihead(True), _multihead(False)),
    "layer": lambda: (_encoder_layer(True), _encoder_layer(False)),
}  # fmt: skip

REDUCTION: dict[str, Case] = {
    "sums": lambda: [f(normal(40, 30), 1) for f in (torch.sum, torch.mean, torch.var, torch.std)],
    "whole": lambda: [f(normal(300, 200)) for f in (torch.sum, torch.mean, torch.norm)],
    "16 bits": lambda: normal(300, 20, dtype=BF16).sum(0),
    "extremes": lambda: [f(normal(4, 9), 1) for f in (torch.amax, torch.max, torch.min, torch.median)],
    "running": lambda: [f(normal(4, 9), 1) for f in (torch.cumsum, torch.cumprod, torch.logcumsumexp)],
    "prod, forward": lambda: normal(4, 9).detach().prod(1),
    "quantile": lambda: (torch.quantile(normal(40), 0.3), torch.nanmean(normal(40))),
    "counts": lambda: (normal(4, 9).detach() > 0).sum(1),
    "histogram": lambda: (torch.histc(normal(40).detach()), torch.bincount(torch.arange(9) % 4)),
    "distances": lambda: (torch.dist(normal(9), normal(9)), F.cosine_similarity(normal(4, 9), normal(4, 9))),
}  # fmt: skip

SORT: dict[str, Case] = {
    "sort": lambda: torch.sort(normal(4, 9), 1, descending=True),
    "stable": lambda: torch.sort(normal(40).round(), stable=True),
    "topk": lambda: torch.topk(normal(4, 9), 3),
    "kthvalue": lambda: torch.kthvalue(normal(4, 9), 2),
    "mode": lambda: torch.mode(normal(4, 9).round()),
    "unique": lambda: torch.unique(normal(40).detach().round(), return_inverse=True),
    "searched": lambda: torch.searchsorted(normal(9).detach().sort().values, normal(4).detach()),
}

INDEX = torch.tensor([[0, 2, 2], [1, 0, 3]])
SCATTER: dict[str, Case] = {
    "gather": lambda: torch.gather(normal(4, 9), 1, INDEX),
    "scatter": lambda: normal(4, 9).scatter(0, INDEX, normal(2, 3)),
    "scatter_add": lambda: normal(4, 9).scatter_add(0, INDEX, normal(2, 3)),
    "scatter_reduce": lambda: normal(4, 9).scatter_reduce(0, INDEX, normal(2, 3), "mean"),
    "index": lambda: (normal(4, 9)[INDEX], normal(4, 9)[:, [1, 1]], normal(4, 9)[::2, 1:]),
    "index_select": lambda: torch.index_select(normal(4, 9), 1, INDEX[0]),
    "index_add": lambda: normal(4, 9).index_add(0, INDEX[0], normal(3, 9)),
    "index_put": lambda: normal(4, 9).index_put((INDEX,), normal(2, 3, 9), accumulate=True),
    "masks": lambda: (normal(4, 9).masked_fill(torch.eye(4, 9) > 0, 2.0), normal(40)[torch.arange(40) > 9]),
    "where": lambda: torch.where(torch.eye(4) > 0, normal(4, 4), normal(4, 4)),
    "take": lambda: (torch.take(normal(4, 9), INDEX), torch.take_along_dim(normal(2, 9), INDEX, 1)),
    "in place": lambda: _written_in_place(),
    "repeat": lambda: (normal(4).repeat_interleave(torch.arange(4)), normal(4, 2).tile(2, 2)),
}  # fmt: skip


def _written_in_place() -> Any:
    x = normal(4, 9) * 1
    x[1:3] = 5
    x[:, INDEX[0]] += 1
    x.clamp_(min=-0.5).mul_(2).copy_(x * 2)
    return x, x.t(), x[0]


FOURIER: dict[str, Case] = {
    "real": lambda: torch.fft.irfft(torch.fft.rfft(normal(4, 16)) * 2),
    "complex": lambda: torch.fft.fft2(complexes(3, 8, 8)),
    "odd": lambda: torch.fft.fft(normal(4, 15), n=12),
    "stft": lambda: torch.stft(normal(400), 64, window=torch.hann_window(64), return_complex=True),
    "back": lambda: torch.istft(complexes(33, 26), 64, window=torch.hann_window(64)),
}


def square(n: int = 6) -> Tensor:
    return normal(n, n) + 4 * torch.eye(n)


LINEAR_ALGEBRA: dict[str, Case] = {
    "cholesky": lambda: torch.linalg.cholesky(square() @ square().mT + torch.eye(6) * 40),
    "qr": lambda: torch.linalg.qr(normal(7, 4)),
    "svd": lambda: torch.linalg.svdvals(normal(7, 4)),
    "eigh": lambda: torch.linalg.eigvalsh(square() + square().mT),
    "eig": lambda: torch.linalg.eigvals(square()).abs(),
    "inverse": lambda: (torch.linalg.inv(square()), torch.linalg.pinv(normal(7, 4))),
    "solve": lambda: (torch.linalg.solve(square(), normal(6, 2)), torch.linalg.solve(square(), normal(6))),
    "triangular": lambda: torch.linalg.solve_triangular(square().triu(), normal(6, 2), upper=True),
    "determinants": lambda: (torch.linalg.det(square()), torch.linalg.slogdet(square())),
    "power": lambda: (torch.linalg.matrix_exp(square() / 9), torch.linalg.matrix_power(square(), 5)),
    "lu": lambda: torch.linalg.lu(square()),
    "norms": lambda: torch.linalg.matrix_norm(square(), 2),
    "products": lambda: torch.linalg.multi_dot([normal(7, 4), normal(4, 9), normal(9, 3)]),
}  # fmt: skip

LOSS: dict[str, Case] = {
    "cross entropy": lambda: F.cross_entropy(normal(6, 5), torch.arange(6) % 5, label_smoothing=0.1),
    "weighted": lambda: F.cross_entropy(normal(6, 5), torch.arange(6) % 5, torch.rand(5), ignore_index=2),
    "probabilities": lambda: F.cross_entropy(normal(6, 5), torch.rand(6, 5).softmax(1)),
    "images": lambda: F.nll_loss(normal(2, 5, 3, 3).log_softmax(1), torch.ones(2, 3, 3).long()),
    "binary": lambda: F.binary_cross_entropy(normal(6).sigmoid(), torch.rand(6)),
    "logits": lambda: F.binary_cross_entropy_with_logits(
        normal(6, 5), torch.rand(6, 5), torch.rand(5), pos_weight=torch.rand(5)
    ),
    "squares": lambda: [f(normal(9), normal(9)) for f in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)],
    "divergence": lambda: F.kl_div(normal(4, 9).log_softmax(1), torch.rand(4, 9), reduction="batchmean"),
    "ctc": lambda: F.ctc_loss(
        normal(9, 2, 5).log_softmax(-1), torch.tensor([[1, 2], [3, 4]]), (9, 8), (2, 1)
    ),
    "embeddings": lambda: F.cosine_embedding_loss(normal(4, 9), normal(4, 9), torch.tensor([1, -1, 1, -1])),
    "triplets": lambda: F.triplet_margin_loss(normal(4, 9), normal(4, 9), normal(4, 9)),
    "counts": lambda: (F.poisson_nll_loss(normal(9), torch.ones(9)), F.gaussian_nll_loss(normal(9), torch.ones(9), torch.ones(9))),
}  # fmt: skip

EMBEDDING: dict[str, Case] = {
    "rows": lambda: F.embedding(INDEX, normal(9, 4), padding_idx=2),
    "by frequency": lambda: F.embedding(INDEX, normal(9, 4), scale_grad_by_freq=True),
    "bounded": lambda: nn.Embedding(9, 4, max_norm=1.0)(INDEX),
    "sums": lambda: F.embedding_bag(
        INDEX, normal(9, 4), mode="sum", per_sample_weights=normal(2, 3)
    ),
    "means": lambda: F.embedding_bag(INDEX, normal(9, 4), mode="mean", padding_idx=2),
    "largest": lambda: F.embedding_bag(INDEX, normal(9, 4), mode="max"),
    "one hot": lambda: F.one_hot(INDEX, 9),
}

POOLING: dict[str, Case] = {
    "largest": lambda: (F.max_pool1d(normal(2, 3, 8), 2), F.max_pool3d(normal(1, 2, 6, 6, 6), 2)),
    "with indices": lambda: F.max_pool2d(normal(2, 3, 8, 8), 3, 2, return_indices=True),
    "unpooled": lambda: F.max_unpool2d(*F.max_pool2d(normal(2, 3, 8, 8), 2, return_indices=True), 2),
    "means": lambda: (F.avg_pool2d(normal(2, 3, 8, 8), 3, 2), F.avg_pool3d(normal(1, 2, 6, 6, 6), 2)),
    "to a size": lambda: (F.adaptive_avg_pool2d(normal(2, 3, 8, 8), 3), F.adaptive_max_pool2d(normal(2, 3, 8, 8), 3)),
    "channels last": lambda: F.max_pool2d(normal(2, 3, 8, 8).to(memory_format=torch.channels_last), 2),
    "fractions": lambda: F.fractional_max_pool2d(normal(2, 3, 8, 8), 3, output_size=4),
    "power": lambda: F.lp_pool2d(normal(2, 3, 8, 8), 2, 2),
}  # fmt: skip

INTERPOLATION: dict[str, Case] = {
    **{
        mode: lambda mode=mode: F.interpolate(normal(2, 3, 8, 8), 5, mode=mode)
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
    },
    "smooth": lambda: F.interpolate(normal(2, 3, 8, 8), 5, mode="bilinear", antialias=True),
    "volumes": lambda: F.interpolate(normal(1, 2, 4, 4, 4), 6, mode="trilinear", align_corners=True),
    "lines": lambda: F.interpolate(normal(1, 2, 8), 5, mode="linear"),
    "grids": lambda: F.grid_sample(
        normal(1, 2, 8, 8), F.affine_grid(normal(1, 2, 3), (1, 2, 5, 5), False), align_corners=False
    ),
    "shuffled": lambda: (F.pixel_shuffle(normal(1, 8, 3, 3), 2), F.pixel_unshuffle(normal(1, 2, 6, 6), 2)),
    "padded": lambda: [F.pad(normal(1, 2, 6, 6), (1, 2, 1, 1), mode=m) for m in ("constant", "reflect", "replicate", "circular")],
}  # fmt: skip


def _optimised(kind: type[torch.optim.Optimizer], **options: Any) -> Any:
    """Parameters, their counters and the optimizer's state after two steps."""
    with torch.enable_grad():
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        optimizer = kind(model.parameters(), **options)  # type: ignore[call-arg]
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    state = list(optimizer.state_dict()["state"].values())
    return [p.detach() for p in model.parameters()], [p._version for p in model.parameters()], state


OPTIMIZER: dict[str, Case] = {
    f"{kind.__name__} {form}": lambda kind=kind, form=form: _optimised(kind, lr=0.01, **{form: True})
    for kind, forms in (
        (torch.optim.SGD, ("foreach", "fused")),
        (torch.optim.Adam, ("foreach", "fused", "amsgrad")),
        (torch.optim.AdamW, ("fused",)),
        (torch.optim.Adagrad, ("fused",)),
        (torch.optim.RMSprop, ("foreach",)),
        (torch.optim.NAdam, ("foreach",)),
        (torch.optim.Adadelta, ("foreach",)),
        (torch.optim.Adamax, ("foreach",)),
        (torch.optim.RAdam, ("foreach",)),
        (torch.optim.Rprop, ("foreach",)),
        (torch.optim.ASGD, ("foreach",)),
    )
    for form in forms
}  # fmt: skip

COMPLEX: dict[str, Case] = {
    "product": lambda: complexes(5, 6) @ complexes(6, 4),
    "conjugated": lambda: (complexes(5, 6).conj().t() @ complexes(5, 4), complexes(4).conj().imag * 2),
    "vdot": lambda: torch.vdot(complexes(9), complexes(9)),
    "inverse": lambda: (torch.linalg.pinv(complexes(4, 3)), torch.linalg.inv(complexes(4, 4) + 4 * torch.eye(4))),
    "parts": lambda: (complexes(4).real, torch.view_as_real(complexes(4)), complexes(4).angle()),
    "polar": lambda: torch.polar(normal(4).abs(), normal(4)),
    "einsum": lambda: torch.einsum("ij,jk->ik", complexes(4, 5).conj(), complexes(5, 3)),
}  # fmt: skip


def _quantised_layer() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch moves its quantised layers elsewhere
        model = nn.Sequential(nn.Linear(8, 8))
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})(torch.randn(4, 8))


QUANTISED: dict[str, Case] = {
    "tensor": lambda: torch.quantize_per_tensor(torch.randn(9), 0.1, 3, torch.qint8).dequantize(),
    "channels": lambda: torch.quantize_per_channel(
        torch.randn(3, 4), torch.rand(3) + 0.1, torch.zeros(3), 0, torch.qint8
    ).dequantize(),
    "fake": lambda: torch.fake_quantize_per_tensor_affine(normal(9), 0.1, 0, -128, 127),
    "layer": _quantised_layer,
    "int8": lambda: torch._int_mm(torch.ones(32, 32).char(), torch.ones(32, 32).char()),
    "float8": lambda: torch._scaled_mm(
        torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 16).to(torch.float8_e4m3fn).t(),
        torch.tensor(1.0), torch.tensor(1.0), out_dtype=torch.bfloat16,
    ),
}  # fmt: skip


def _nested(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, says torch
        return torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=layout)


NESTED: dict[str, Case] = {
    "linear": lambda: nn.Linear(8, 6)(_nested(torch.strided)),
    "padded": lambda: torch.nested.to_padded_tensor(_nested(torch.strided) * 2, 0.0),
    "jagged": lambda: nn.Linear(8, 6)(_nested(torch.jagged)).values(),
    "jagged norm": lambda: nn.LayerNorm(8)(_nested(torch.jagged).relu()).values(),
    "jagged sum": lambda: (_nested(torch.jagged).sum(-1).values(), _nested(torch.jagged).sum(1)),
}

SPARSE: dict[str, Case] = {
    "coo": lambda: torch.sparse.mm(torch.eye(6).to_sparse(), normal(6, 4)),
    "csr": lambda: torch.eye(6).to_sparse_csr() @ normal(6, 4),
    "added": lambda: torch.sparse.addmm(normal(6, 4), torch.eye(6).to_sparse(), normal(6, 4)),
    "gradient": lambda: torch.sparse.sum((normal(6, 4) * torch.eye(6, 4)).to_sparse()),
    "softmax": lambda: torch.sparse.softmax(torch.randn(4, 4).relu().to_sparse(), 1).to_dense(),
    "embedding": lambda: F.embedding(INDEX, normal(9, 4), sparse=True).detach(),
    "coalesced": lambda: (
        (torch.eye(4).to_sparse() + torch.eye(4).to_sparse()).coalesce().to_dense()
    ),
}

FUNCTIONAL: dict[str, Case] = {
    "vmap": lambda: torch.vmap(lambda a, b: a @ b.t())(normal(3, 5, 6), normal(3, 4, 6)),
    "vmap of a layer": lambda: torch.vmap(nn.Linear(6, 5))(normal(3, 4, 6)),
    "grad": lambda: torch.func.grad(lambda a: (a @ a.t()).sin().sum())(normal(4, 5)),
    "jvp": lambda: torch.func.jvp(torch.tanh, (normal(4),), (torch.ones(4),)),
    "jacobian": lambda: torch.func.jacrev(lambda a: (a @ a).sum(0))(normal(4, 4)),
    "hessian": lambda: torch.func.hessian(lambda a: a.pow(3).sum())(normal(3)),
    "functional_call": lambda: torch.func.functional_call(
        layer_ := nn.Linear(6, 5), dict(layer_.named_parameters()), (normal(4, 6),)
    ),
    "twice": lambda: _differentiated_twice(),
    "checkpoint": lambda: torch.utils.checkpoint.checkpoint(
        nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5)), normal(4, 6), use_reentrant=False
    ),
}


def _differentiated_twice() -> Any:
    x = normal(4, 5)
    if not x.requires_grad:
        return x.sin()
    (first,) = torch.autograd.grad((x @ x.t()).sin().sum(), x, create_graph=True)
    return first


def _written_through(view: Callable[[Tensor], Any]) -> Any:
    """A tensor of the program's, its counter after writes through a view of it, and what the view says it is."""
    with torch.inference_mode(False):
        x = torch.arange(24.0).reshape(4, 6)
        parameter = torch.ones(4, 6, requires_grad=True)
    found = view(x)
    found.add_(1)
    with torch.no_grad():
        of_parameter = view(parameter)
    return x, x._version, found, of_parameter.requires_grad, of_parameter._is_view()


VIEWS: dict[str, Case] = {
    name: lambda view=view: _written_through(view)
    for name, view in {
        "T": lambda x: x.T,
        "mT": lambda x: x.mT,
        "t": lambda x: x.t(),
        "reshape": lambda x: x.reshape(6, 4),
        "flatten": lambda x: x.flatten(),
        "view_as": lambda x: x.view_as(x),
        "swapaxes": lambda x: x.swapaxes(0, 1),
        "chunk": lambda x: x.chunk(2)[0],
        "narrow": lambda x: x.narrow(0, 1, 2),
        "tensor_split": lambda x: x.tensor_split(2)[1],
        "unflatten": lambda x: x.unflatten(1, (2, 3)),
        "contiguous": lambda x: x.contiguous(),
        "to": lambda x: x.to(torch.float32),
        "part": lambda x: x[1:, ::2],
        "written": lambda x: x.detach().multiply_(2),
        "as_strided": lambda x: x.as_strided((2, 2), (1, 1)),
        "einsum": lambda x: torch.einsum("ij->ji", x),
    }.items()
}

FAMILIES: dict[str, dict[str, Case]] = {
    "views": VIEWS,
    "matmul": MATMUL,
    "convolution": CONVOLUTION,
    "recurrent": RECURRENT,
    "norm": NORM,
    "softmax": SOFTMAX,
    "attention": ATTENTION,
    "reduction": REDUCTION,
    "sort": SORT,
    "scatter": SCATTER,
    "fourier": FOURIER,
    "linear algebra": LINEAR_ALGEBRA,
    "loss": LOSS,
    "embedding": EMBEDDING,
    "pooling": POOLING,
    "interpolation": INTERPOLATION,
    "optimizer": OPTIMIZER,
    "complex": COMPLEX,
    "quantised": QUANTISED,
    "nested": NESTED,
    "sparse": SPARSE,
    "functional": FUNCTIONAL,
}


def said_by(run_: Callable[[], object], mkl: Path) -> list[str]:
    """What oneDNN and MKL say that they ran, without times and addresses."""
    before = os.fstat(1).st_size, mkl.stat().st_size
    run_()
    found = []
    for path, start in zip((Path("/proc/self/fd/1"), mkl), before, strict=True):
        text = path.read_bytes()[start:].decode()
        found += [
            ",".join(line.split(",")[5:11])
            for line in text.splitlines()
            if line.startswith("onednn_verbose,v1,primitive,exec")
        ]
        found += [
            re.sub(r"0x[0-9a-f]+", "", call[1])
            for line in text.splitlines()
            if (call := re.match(r"MKL_VERBOSE (\w+\(.*?\)) ", line))
        ]
    return found


def main(folder: Path) -> None:
    """Leave beside the trace what the libraries said, by family: plain, and recorded."""
    warnings.simplefilter("ignore")
    mkl = Path(os.environ["MKL_VERBOSE_OUTPUT_FILE"])
    mkl.touch()

    def said() -> dict[str, list[str]]:
        return {name: said_by(lambda name=name: run(name), mkl) for name in COMPUTED_BY_LIBRARIES}

    first = said()
    with opdrift.record(folder / "t"):
        recorded = said()
    (folder / "said.json").write_text(json.dumps([first, recorded]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
