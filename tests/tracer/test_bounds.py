"""Legitimate alternatives stay inside the bounds, real faults are outside: measured anew on this torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (as torch writes it)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import opdrift
from opdrift.bounds import (
    Bound,
    OpView,
    OpViews,
    arithmetic,
    explained,
    gain_limit,
    grown,
    is_discrete,
    precision_of,
)
from opdrift.bounds.table import FAMILIES
from opdrift.records import TensorArgument, TensorMeta

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Thousands of small ops: on a busy machine threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Problem:
    """A call, and other ways to compute the same."""

    name: str
    call: Callable[[], Tensor]
    alternatives: tuple[Callable[[], Tensor], ...]
    op: str = ""


def recorded(
    path: Path, calls: Sequence[Callable[[], Tensor]], ops: Sequence[str] = ()
) -> tuple[list[Tensor], list[OpView]]:
    """Results of the calls, and the view of the last op of each, or of the last one with the name in `ops`."""
    results = []
    with opdrift.record(path, kernels="off", integrity="off") as recorder:
        recorder.mark("problem")
        for call in calls:
            results.append(call())
            recorder.mark("problem")
    trace = opdrift.load(path)
    views = OpViews(trace)
    ends = [trace.index_of(m.seq) for m in trace.marks if m.kind == "problem"]
    found = []
    for number, (start, end) in enumerate(pairwise(ends)):
        assert end is not None
        first = 0 if start is None else start + 1
        named = [i for i in range(end, first - 1, -1) if ops and views[i].base_name == ops[number]]
        found.append(views[named[0] if named else end])
    assert len(found) == len(calls)
    return results, found


def relative(left: Tensor, right: Tensor) -> float:
    """||left - right|| / ||left||, non-finite values as 0."""
    if left.is_complex():
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    a, b = (t.double().nan_to_num(0.0, 0.0, 0.0) for t in (left, right))
    return ((a - b).norm() / a.norm().clamp_min(1e-300)).item()


def noise(seed: int, shape: Sequence[int], dtype: torch.dtype, mode: str = "normal") -> Tensor:
    g = np.random.default_rng(seed)
    x = g.standard_normal(tuple(shape))
    if mode == "positive":
        x = np.abs(x)
    elif mode == "mean 3":
        x = x + 3
    elif mode == "mean 30":
        x = x + 30
    elif mode == "outlier":
        x[..., g.integers(0, shape[-1], max(1, shape[-1] // 64))] *= 50
    return torch.from_numpy(x).to(torch.float32).to(dtype)


def rows(call: Callable[[Tensor], Tensor], x: Tensor, n: int = 1) -> Tensor:
    return torch.cat([call(part) for part in x.split(n)])


def without_onednn(call: Callable[[], Tensor]) -> Tensor:
    # `torch.backends.mkldnn.flags` warns about Intel GPUs when it restores what it found
    torch._C._set_mkldnn_enabled(False)
    try:
        return call()
    finally:
        torch._C._set_mkldnn_enabled(True)


def on_two_threads(call: Callable[[], Tensor]) -> Tensor:
    torch.set_num_threads(2)
    try:
        return call()
    finally:
        torch.set_num_threads(1)


def in_double(call: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    return call(*(t.double() for t in tensors)).to(tensors[0].dtype)


# ---- problems ----------------------------------------------------------------------------------------


def products(dtype: torch.dtype) -> Iterator[Problem]:
    for seed, k in enumerate((4, 64, 1024, 8192)):
        for mode in ("normal", "positive", "outlier", "cancel"):
            if mode == "cancel":
                a = noise(seed, (16, k // 2), dtype)
                b = noise(seed + 50, (k // 2, 48), dtype)
                a, b = (
                    torch.cat([a, -a], 1),
                    torch.cat([b, b + 0.01 * noise(seed + 7, b.shape, dtype)]),
                )
            else:
                a = noise(seed, (16, k), dtype, mode)
                b = noise(seed + 50, (k, 48), dtype) / math.sqrt(k)
            w, bias = b.t().contiguous(), noise(seed + 90, (48,), dtype)
            half = k // 2
            order = torch.from_numpy(np.random.default_rng(seed).permutation(a.shape[1]))
            yield Problem(
                f"mm {k} {mode}",
                lambda a=a, b=b: a @ b,
                (
                    lambda a=a, b=b: rows(lambda c: c @ b, a),
                    lambda a=a, b=b: rows(lambda c: c @ b, a, 7),
                    lambda a=a, w=w: F.linear(a, w),
                    lambda a=a, b=b: torch.bmm(
                        a[None].expand(2, -1, -1), b[None].expand(2, -1, -1)
                    )[1],
                    lambda a=a, b=b, h=half: a[:, :h] @ b[:h] + a[:, h:] @ b[h:],
                    lambda a=a, b=b: without_onednn(lambda: a @ b),
                    lambda a=a, b=b, i=order: a[:, i] @ b[i],
                    lambda a=a, b=b: on_two_threads(lambda: a @ b),
                    lambda a=a, b=b: in_double(torch.mm, a, b),
                ),
                "mm",
            )
            if mode != "cancel":
                yield Problem(
                    f"addmm {k} {mode}",
                    lambda a=a, w=w, bias=bias: F.linear(a, w, bias),
                    (
                        lambda a=a, w=w, bias=bias: F.linear(a, w) + bias,
                        lambda a=a, w=w, bias=bias: rows(lambda c: F.linear(c, w, bias), a),
                        lambda a=a, w=w, bias=bias: in_double(F.linear, a, w, bias),
                    ),
                    "addmm",
                )


def convolutions(dtype: torch.dtype) -> Iterator[Problem]:
    shapes = ((3, 8, 3, 1, 1), (32, 32, 3, 2, 1), (16, 16, 5, 1, 16), (64, 32, 1, 1, 1))
    for seed, (inner, outer, size, stride, groups) in enumerate(shapes):
        for mode in ("normal", "mean 3"):
            x = noise(seed, (4, inner, 12, 12), dtype, mode)
            w = noise(seed + 9, (outer, inner // groups, size, size), dtype) / math.sqrt(
                inner * size * size / groups
            )
            b = noise(seed + 5, (outer,), dtype)

            def conv(
                c: Tensor,
                w: Tensor = w,
                b: Tensor = b,
                s: int = stride,
                p: int = size // 2,
                g: int = groups,
            ) -> Tensor:
                return F.conv2d(c, w, b, stride=s, padding=p, groups=g)

            yield Problem(
                f"conv {inner} {size} {mode}",
                lambda x=x, conv=conv: conv(x),
                (
                    lambda x=x, conv=conv: rows(conv, x),
                    lambda x=x, conv=conv: without_onednn(lambda: conv(x)),
                    lambda x=x, conv=conv: conv(x.contiguous(memory_format=torch.channels_last)),
                    lambda x=x, b=b, conv=conv: conv(x, b=None) + b[:, None, None],
                    lambda x=x, w=w, b=b, conv=conv: in_double(conv, x, w, b),
                ),
                "convolution",
            )
            back = w.transpose(0, 1).contiguous() if groups == 1 else None
            if back is not None:
                yield Problem(
                    f"transposed conv {inner} {size} {mode}",
                    lambda x=x, back=back, s=stride: F.conv_transpose2d(x, back, stride=s),
                    (
                        lambda x=x, back=back, s=stride: rows(
                            lambda c: F.conv_transpose2d(c, back, stride=s), x
                        ),
                        lambda x=x, back=back, s=stride: in_double(
                            lambda c, d: F.conv_transpose2d(c, d, stride=s), x, back
                        ),
                    ),
                    "convolution",
                )


def attention(dtype: torch.dtype) -> Iterator[Problem]:
    for seed, (batch, heads, length, width) in enumerate(
        ((2, 2, 7, 16), (2, 4, 33, 32), (1, 2, 200, 64))
    ):
        for scale in (0.3, 1.0, 3.0):
            for causal in (False, True):
                q, k, v = (
                    s * noise(seed * 9 + i, (batch, heads, length, width), dtype)
                    for i, s in enumerate((scale, scale, 1.0))
                )

                def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool = causal) -> Tensor:
                    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

                def math_path(
                    q: Tensor, k: Tensor, v: Tensor, sdpa: Callable[..., Tensor] = sdpa
                ) -> Tensor:
                    with sdpa_kernel(SDPBackend.MATH):
                        return sdpa(q, k, v)

                def eager(q: Tensor, k: Tensor, v: Tensor, causal: bool = causal) -> Tensor:
                    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
                    if causal:
                        s = s.masked_fill(
                            torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf
                        )
                    return s.float().softmax(-1).to(q.dtype) @ v

                yield Problem(
                    f"attention {length} {scale} {causal}",
                    lambda q=q, k=k, v=v, f=sdpa: f(q, k, v),
                    (
                        lambda q=q, k=k, v=v, f=math_path: f(q, k, v),
                        lambda q=q, k=k, v=v, f=eager: f(q, k, v),
                        lambda q=q, k=k, v=v, f=sdpa: in_double(f, q, k, v),
                    ),
                    "_scaled_dot_product_flash_attention_for_cpu",
                )


def norms(dtype: torch.dtype) -> Iterator[Problem]:
    for seed, k in enumerate((16, 250, 4096)):
        for mode in ("normal", "mean 3", "mean 30", "outlier"):
            x = noise(seed, (9, k), dtype, mode)
            w, b = 1 + 0.1 * noise(seed + 3, (k,), dtype), 0.1 * noise(seed + 4, (k,), dtype)

            def layer(c: Tensor, w: Tensor = w, b: Tensor = b) -> Tensor:
                return F.layer_norm(c, w.shape, w, b, 1e-5)

            def by_hand(c: Tensor, w: Tensor = w, b: Tensor = b) -> Tensor:
                centred = c - c.mean(-1, keepdim=True)
                return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5) * w + b

            yield Problem(
                f"layer norm {k} {mode}",
                lambda x=x, f=layer: f(x),
                (
                    lambda x=x, f=layer: rows(f, x),
                    lambda x=x, f=by_hand: f(x),
                    lambda x=x, w=w, b=b, f=layer: in_double(f, x, w, b),
                ),
                "native_layer_norm",
            )
    for seed, (channels, groups) in enumerate(((8, 8), (32, 4))):
        for mode in ("normal", "mean 3", "mean 30"):
            x = noise(seed, (4, channels, 60), dtype, mode)
            w, b = (
                1 + 0.1 * noise(seed + 3, (channels,), dtype),
                0.1 * noise(seed + 4, (channels,), dtype),
            )
            mean, var = (
                noise(seed + 5, (channels,), dtype, mode),
                noise(seed + 6, (channels,), dtype).abs() + 0.3,
            )

            def group(c: Tensor, w: Tensor = w, b: Tensor = b, g: int = groups) -> Tensor:
                return F.group_norm(c, g, w, b)

            def batch(
                c: Tensor, mean: Tensor = mean, var: Tensor = var, w: Tensor = w, b: Tensor = b
            ) -> Tensor:
                return F.batch_norm(c, mean, var, w, b)

            def batch_by_hand(
                c: Tensor, mean: Tensor = mean, var: Tensor = var, w: Tensor = w, b: Tensor = b
            ) -> Tensor:
                scale = torch.rsqrt(var + 1e-5) * w
                return (c - mean[:, None]) * scale[:, None] + b[:, None]

            yield Problem(
                f"group norm {channels} {mode}",
                lambda x=x, f=group: f(x),
                (
                    lambda x=x, f=group: rows(f, x),
                    lambda x=x, f=group: f(
                        x[..., None].contiguous(memory_format=torch.channels_last)
                    )[..., 0],
                    lambda x=x, w=w, b=b, f=group: in_double(f, x, w, b),
                ),
                "native_group_norm",
            )
            yield Problem(
                f"batch norm {channels} {mode}",
                lambda x=x, f=batch: f(x),
                (
                    lambda x=x, f=batch_by_hand: f(x),
                    lambda x=x, m=mean, v=var, w=w, b=b, f=batch: in_double(f, x, m, v, w, b),
                ),
                "native_batch_norm",
            )


def reductions(dtype: torch.dtype) -> Iterator[Problem]:
    for seed, k in enumerate((16, 250, 4096)):
        for scale in (1.0, 20.0):
            x = scale * noise(seed, (9, k), dtype)
            for name, call in (
                ("_softmax", lambda c: c.softmax(-1)),
                ("_log_softmax", lambda c: c.log_softmax(-1)),
            ):
                yield Problem(
                    f"{name} {k} {scale}",
                    lambda x=x, f=call: f(x),
                    (
                        lambda x=x, f=call: rows(f, x),
                        lambda x=x, f=call: f(x.t().contiguous().t()),
                        lambda x=x, f=call: in_double(f, x),
                    ),
                    name,
                )
        for mode in ("normal", "mean 3", "outlier"):
            x = noise(seed, (9, k), dtype, mode)
            for name, call in (
                ("sum", lambda c: c.sum(-1)),
                ("mean", lambda c: c.mean(-1)),
                ("var", lambda c: c.var(-1)),
                ("linalg_vector_norm", lambda c: torch.linalg.vector_norm(c, dim=-1)),
                ("cumsum", lambda c: c.cumsum(-1)),
            ):
                yield Problem(
                    f"{name} {k} {mode}",
                    lambda x=x, f=call: f(x),
                    (
                        lambda x=x, f=call: rows(f, x),
                        lambda x=x, f=call: f(x.t().contiguous().t()),
                        lambda x=x, f=call: in_double(f, x),
                    ),
                    name,
                )
    for seed, k in enumerate((10, 300)):
        source = noise(seed, (k * 5, 8), dtype, "mean 3")
        g = np.random.default_rng(seed)
        index, order = (
            torch.from_numpy(g.integers(0, 5, k * 5)),
            torch.from_numpy(g.permutation(k * 5)),
        )

        def add(source: Tensor, index: Tensor) -> Tensor:
            return torch.zeros(5, 8, dtype=source.dtype).index_add(0, index, source)

        yield Problem(
            f"index_add {k}",
            lambda s=source, i=index, f=add: f(s, i),
            (
                lambda s=source, i=index, o=order, f=add: f(s[o], i[o]),
                lambda s=source, i=index, f=add: in_double(lambda t: f(t, i), s),
            ),
            "index_add",
        )


def elementwise(dtype: torch.dtype) -> Iterator[Problem]:
    calls: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "exp": lambda a, _: a.exp(), "sin": lambda a, _: a.sin(), "tanh": lambda a, _: a.tanh(),
        "sigmoid": lambda a, _: a.sigmoid(), "erf": lambda a, _: a.erf(), "gelu": lambda a, _: F.gelu(a),
        "silu": lambda a, _: F.silu(a), "softplus": lambda a, _: F.softplus(a), "elu": lambda a, _: F.elu(a),
        "log": lambda a, _: (a.abs() + 0.01).log(), "rsqrt": lambda a, _: (a.abs() + 0.01).rsqrt(),
        "pow": lambda a, _: a.pow(3), "add": lambda a, b: torch.add(a, b, alpha=0.1),
        "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.3), "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    }  # fmt: skip
    for seed, scale in enumerate((0.1, 1.0, 5.0)):
        a, b = scale * noise(seed, (7, 333), dtype), noise(seed + 20, (7, 333), dtype)
        for name, call in calls.items():
            yield Problem(
                f"{name} {scale}",
                lambda a=a, b=b, f=call: f(a, b),
                (
                    lambda a=a, b=b, f=call: torch.cat(
                        [f(a[:, i : i + 7], b[:, i : i + 7]) for i in range(0, 333, 7)], 1
                    ),
                    lambda a=a, b=b, f=call: f(torch.stack([a, a], -1)[..., 0], b),
                    lambda a=a, b=b, f=call: in_double(f, a, b),
                ),
                name,
            )


def few(dtype: torch.dtype) -> Iterator[Problem]:
    """Families with few members: losses, products of many, interpolation, transforms, distances."""
    for seed, k in enumerate((16, 250, 4096)):
        a, b = noise(seed, (9, k), dtype), noise(seed + 20, (9, k), dtype)
        targets = torch.randint(0, k, (9,), generator=torch.Generator().manual_seed(seed))
        losses: tuple[tuple[str, Callable[[Tensor, Tensor], Tensor]], ...] = (
            ("mse_loss", F.mse_loss),
            ("smooth_l1_loss", F.smooth_l1_loss),
            (
                "binary_cross_entropy_with_logits",
                lambda c, d: F.binary_cross_entropy_with_logits(c, d.abs().clamp(max=1)),
            ),
            ("nll_loss_forward", lambda c, d, t=targets: F.nll_loss(-(c.abs() + d.abs()), t)),
        )
        for name, call in losses:
            yield Problem(
                f"{name} {k}",
                lambda a=a, b=b, f=call: f(a, b),
                (
                    lambda a=a, b=b, f=call: f(a.double(), b.double()).to(a.dtype),
                    lambda a=a, b=b, f=call: f(a.float(), b.float()).to(a.dtype),
                ),
                name,
            )
        near_one = 1 + 0.1 * noise(seed + 40, (9, min(k, 250)), dtype)
        yield Problem(
            f"prod {k}",
            lambda c=near_one: c.prod(-1),
            (
                lambda c=near_one: c.flip(-1).prod(-1),
                lambda c=near_one: rows(lambda d: d.prod(-1), c),
                lambda c=near_one: in_double(lambda d: d.prod(-1), c),
            ),
            "prod",
        )
    for seed, mode in enumerate(("bilinear", "bicubic")):
        for corners in (False, True):
            image = noise(seed, (2, 3, 17, 23), dtype, "mean 3")

            def scale(c: Tensor, m: str = mode, ac: bool = corners) -> Tensor:
                return F.interpolate(c, size=(40, 31), mode=m, align_corners=ac)

            yield Problem(
                f"{mode} {corners}",
                lambda x=image, f=scale: f(x),
                (
                    lambda x=image, f=scale: rows(f, x),
                    lambda x=image, f=scale: f(x.contiguous(memory_format=torch.channels_last)),
                    lambda x=image, f=scale: in_double(f, x),
                ),
                f"upsample_{mode}2d",
            )
    if dtype == torch.float32:  # a CPU has these ops in no other of the three
        for seed, k in enumerate((64, 1000, 4099)):
            signal = noise(seed, (5, k), dtype)
            yield Problem(
                f"fft {k}",
                lambda x=signal: torch.fft.rfft(x),
                (
                    lambda x=signal: torch.fft.rfft(x.double()),
                    lambda x=signal: rows(torch.fft.rfft, x),
                ),
                "_fft_r2c",
            )
            # up to 25 rows are subtracted, more go through a product, where x^2 + y^2 - 2 x y cancels
            for number, mode in ((20, "normal"), (40, "normal"), (40, "mean 3")):
                p, q = (noise(seed + i, (number, k // 8), dtype, mode) for i in (0, 7))
                yield Problem(
                    f"distance {k} {number} {mode}",
                    lambda x=p, y=q: torch.cdist(x, y),
                    (
                        lambda x=p, y=q: torch.cdist(
                            x, y, compute_mode="donot_use_mm_for_euclid_dist"
                        ),
                        lambda x=p, y=q: in_double(torch.cdist, x, y),
                    ),
                    "_cdist_forward" if number == 20 else "_euclidean_dist",
                )


def layers(dtype: torch.dtype) -> Iterator[Problem]:
    """Whole layers in one op: recurrent ones, and the encoder layer that takes the fast path."""
    for seed, (width, steps) in enumerate(((16, 5), (64, 40))):
        torch.manual_seed(seed)
        lstm = torch.nn.LSTM(32, width, batch_first=True).eval().to(dtype)
        x = noise(seed, (3, steps, 32), dtype)
        if dtype == torch.float32:  # in 16 bits a CPU runs it as products and pointwise ops
            yield Problem(
                f"lstm {width} {steps}",
                lambda x=x, m=lstm: m(x)[0],
                (
                    lambda x=x, m=lstm: rows(lambda c: m(c)[0], x),
                    lambda x=x, m=lstm: without_onednn(lambda: m(x)[0]),
                    lambda x=x, m=lstm: copy.deepcopy(m).double()(x.double())[0].to(x.dtype),
                ),
                "mkldnn_rnn_layer",
            )
        encoder = torch.nn.TransformerEncoderLayer(
            width, 2, 2 * width, batch_first=True, dropout=0.0
        )
        encoder = encoder.eval().to(dtype)
        y = noise(seed + 5, (3, steps, width), dtype)

        def apart(c: Tensor, m: torch.nn.Module = encoder) -> Tensor:
            torch.backends.mha.set_fastpath_enabled(False)
            try:
                return m(c)
            finally:
                torch.backends.mha.set_fastpath_enabled(True)

        yield Problem(
            f"encoder layer {width} {steps}",
            lambda y=y, m=encoder: m(y),
            (
                lambda y=y, f=apart: f(y),
                lambda y=y, m=encoder: rows(m, y),
                lambda y=y, m=encoder: copy.deepcopy(m).double()(y.double()).to(y.dtype),
            ),
            "_transformer_encoder_layer_fwd",
        )


PROBLEMS = {
    f.__name__: f
    for f in (
        products,
        convolutions,
        attention,
        norms,
        reductions,
        elementwise,
        few,
        layers,
    )
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", PROBLEMS)
def test_other_ways_to_compute_the_same_are_explained(
    family: str, dtype: str, tmp_path: Path
) -> None:
    """Other orders, layouts, kernels, unfused forms and double precision lie within the loose bound."""
    problems = list(PROBLEMS[family](DTYPES[dtype]))
    with torch.no_grad():
        results, views = recorded(
            tmp_path / "t", [p.call for p in problems], [p.op for p in problems]
        )
        worst = 0.0
        for problem, result, view in zip(problems, results, views, strict=True):
            assert view.base_name == problem.op, problem.name
            output = 2 if problem.op == "native_batch_norm" else 0
            bound = explained(view, output)
            assert bound.family is not None
            assert not bound.exact
            for alternative in problem.alternatives:
                ratio = relative(result, alternative()) / bound.loose
                assert ratio <= 1, f"{problem.name}: {ratio:.2f} times {bound}"
                worst = max(worst, ratio)
    # A bound that nothing comes near would hide faults: fp32 constants have a margin of about 3 to 20.
    assert worst > (0.03 if dtype == "float32" else 0.02)


def test_every_family_is_measured_or_says_that_it_is_not() -> None:
    """A row without a problem here would keep constants that nobody measures again."""
    ops = {p.op for dtype in DTYPES.values() for make in PROBLEMS.values() for p in make(dtype)}
    measured = {f.name for f in FAMILIES if f.ops & ops or f.exact}
    elsewhere = {
        "norm backward": "gradients below",
        "rnn backward": "test_bounds_rnn.py",
        "fused multiply-add": "elementwise, as addition with alpha; linspace alone is not measured",
        "square root": "one operation: equal to the bit in float32, one unit in float16 (below)",
        "linear algebra": "unbounded: the record does not hold the conditioning",
        "rms_norm": "torch takes it apart on a CPU; the fused op runs on devices only",
        "log_softmax": "its backward is in the gradients below",
        "softmax": "its backward is in the gradients below",
    }

    assert {f.name for f in FAMILIES} - measured - elsewhere.keys() == set()


# ---- exact ops ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_ops_are_equal_to_the_bit(dtype: str, tmp_path: Path) -> None:
    """One correctly rounded operation has one answer, whatever the layout; its bound is 0."""
    x, y = noise(1, (7, 333), DTYPES[dtype]), noise(2, (7, 333), DTYPES[dtype])
    calls: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a / b, lambda a, b: a.relu(),
        lambda a, b: torch.maximum(a, b), lambda a, b: a.reciprocal(), lambda a, b: a.clamp(-0.5, 0.5),
        lambda a, b: a.square(), lambda a, b: torch.where(a > 0, a, b), lambda a, b: torch.cat([a, b]),
    ]  # fmt: skip
    _, views = recorded(tmp_path / "t", [lambda f=f: f(x, y) for f in calls])
    for call, view in zip(calls, views, strict=True):
        strided = call(torch.stack([x, x], -1)[..., 0], y.t().contiguous().t())
        assert torch.equal(call(x, y), strided), view.name
        assert explained(view) == Bound(0.0, 0.0, None, explained(view).family, True, False), (
            view.name
        )


def test_arguments_move_an_op_to_another_row(tmp_path: Path) -> None:
    """`x + y` rounds once, `x + 0.1 y` twice; x**2 is a product, x**0.5 a square root, x**3 neither."""
    x, y = noise(1, (50,), torch.float32), noise(2, (50,), torch.float32).abs()
    index = (torch.tensor([0, 0, 1]),)
    source = noise(3, (3,), torch.float32)
    calls = [
        lambda: torch.add(x, y), lambda: torch.add(x, y, alpha=-1), lambda: torch.add(x, y, alpha=0.1),
        lambda: y**2, lambda: y**0.5, lambda: y**3,
        lambda: torch.index_put(x, index, source), lambda: torch.index_put(x, index, source, accumulate=True),
    ]  # fmt: skip
    _, views = recorded(tmp_path / "t", calls)
    bounds = [explained(v) for v in views]
    assert [b.exact for b in bounds] == [True, True, False, True, True, False, True, False]
    assert bounds[4].family == "square root"
    assert bounds[7].family == "index_add"


# ---- faults --------------------------------------------------------------------------------------------


def tf32(x: Tensor) -> Tensor:
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def test_real_faults_are_outside_in_float32(tmp_path: Path) -> None:
    """Faults of the kind that people meet are separated by size alone."""
    x, w = noise(1, (64, 256), torch.float32), noise(2, (512, 256), torch.float32) / 16
    b = 0.1 * noise(3, (512,), torch.float32)
    q, k, v = (noise(4 + i, (2, 4, 32, 64), torch.float32) for i in range(3))
    gamma = 1 + 0.1 * noise(8, (256,), torch.float32)
    masked = torch.ones(32, 32, dtype=torch.bool)
    masked[4, 2] = False
    flipped = F.linear(x, w, b)
    flipped.view(-1)[flipped.abs().argmax()] *= -1
    wrong_weight = w.clone()
    wrong_weight[3, 5] *= -1
    channel = F.linear(x, w, b)
    channel[:, 3] *= 1.01
    sdpa = F.scaled_dot_product_attention
    faults: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "sign flip": (lambda: F.linear(x, w, b), flipped),
        "missing bias": (lambda: F.linear(x, w, b), F.linear(x, w)),
        "computed in bfloat16": (
            lambda: F.linear(x, w, b),
            F.linear(x.bfloat16(), w.bfloat16(), b.bfloat16()).float(),
        ),
        "TF32 inputs": (lambda: F.linear(x, w, b), F.linear(tf32(x), tf32(w), b)),
        "one channel 1% off": (lambda: F.linear(x, w, b), channel),
        "one weight's sign": (lambda: F.linear(x, w, b), F.linear(x, wrong_weight, b)),
        "scaled by 1.001": (lambda: F.linear(x, w, b), F.linear(x, w, b) * 1.001),
        "tanh for erf": (lambda: F.gelu(x), F.gelu(x, approximate="tanh")),
        "epsilon": (
            lambda: F.layer_norm(x, (256,), gamma, eps=1e-5),
            F.layer_norm(x, (256,), gamma, eps=1e-6),
        ),
        "attention scale 1% off": (lambda: sdpa(q, k, v), sdpa(q, k, v, scale=1.01 / 8)),
        "one key masked for one query": (lambda: sdpa(q, k, v), sdpa(q, k, v, attn_mask=masked)),
        "causal mask missing": (lambda: sdpa(q, k, v, is_causal=True), sdpa(q, k, v)),
    }
    with torch.no_grad():
        results, views = recorded(tmp_path / "t", [good for good, _ in faults.values()])
    for (name, (_, bad)), good, view in zip(faults.items(), results, views, strict=True):
        bound = explained(view)
        assert relative(good, bad) > bound.loose, (
            f"{name}: {relative(good, bad):.2g} within {bound}"
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_few_changed_elements_are_held_to_the_tight_bound_in_16_bits(
    dtype: str, tmp_path: Path
) -> None:
    """A flipped sign hides below the loose bound, but an intermediate rounding never touches one element."""
    x, w = noise(1, (64, 256), DTYPES[dtype]), noise(2, (512, 256), DTYPES[dtype]) / 16
    (good,), (view,) = recorded(tmp_path / "t", [lambda: F.linear(x, w)])
    bad = good.clone()
    element = bad.abs().flatten().argsort()[bad.numel() // (2 if dtype == "bfloat16" else 20)]
    bad.view(-1)[element] *= -1
    bound = explained(view)
    assert bound.tight < relative(good, bad) < bound.loose
    assert bound.limit(same_kernel=False, few=True) == bound.tight
    assert bound.limit(same_kernel=False, few=False) == bound.loose
    assert bound.limit(same_kernel=True, few=False) == bound.tight


def test_cancellation_cannot_be_judged_by_size(tmp_path: Path) -> None:
    """Where the bound reaches the size of the output, it says so."""
    a, b = noise(1, (8, 64), torch.bfloat16), noise(2, (64, 8), torch.bfloat16)
    a, b = torch.cat([a, -a], 1), torch.cat([b, b * 1.0078125])
    _, (view,) = recorded(tmp_path / "t", [lambda: a @ b])
    bound = explained(view)
    assert bound.conditioning is not None
    assert bound.conditioning > 100
    assert bound.cannot_judge


# ---- gradients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_in_double_precision_are_explained(dtype: str, tmp_path: Path) -> None:
    """Backward ops have rows of their own; the gradient of every input lies within its bound."""
    x, w = noise(1, (16, 64), DTYPES[dtype]), 1 + 0.1 * noise(2, (64,), DTYPES[dtype])
    image, kernel = (
        noise(3, (3, 8, 10, 10), DTYPES[dtype]),
        noise(4, (6, 8, 3, 3), DTYPES[dtype]) / 8,
    )
    table, index = (
        noise(5, (20, 8), DTYPES[dtype]),
        torch.randint(0, 20, (100,), generator=torch.Generator().manual_seed(0)),
    )
    q, k, v = (noise(6 + i, (2, 2, 12, 16), DTYPES[dtype]) for i in range(3))
    channels = 1 + 0.1 * noise(9, (8,), DTYPES[dtype])
    forwards: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
        "native_layer_norm_backward": (lambda a, b: F.layer_norm(a, (64,), b), (x, w)),
        "native_group_norm_backward": (lambda a, b: F.group_norm(a, 4, b), (image, channels)),
        "native_batch_norm_backward": (
            lambda a, b: F.batch_norm(a, None, None, b, training=True), (image, channels)),
        "gelu_backward": (F.gelu, (x,)),
        "silu_backward": (F.silu, (x,)),
        "tanh_backward": (torch.tanh, (x,)),
        "_softmax_backward_data": (lambda a: a.softmax(-1), (x,)),
        "_log_softmax_backward_data": (lambda a: a.log_softmax(-1), (x,)),
        "convolution_backward": (lambda a, b: F.conv2d(a, b, stride=2), (image, kernel)),
        "embedding_dense_backward": (lambda a: F.embedding(index, a), (table,)),
        "_scaled_dot_product_flash_attention_for_cpu_backward": (F.scaled_dot_product_attention, (q, k, v)),
    }  # fmt: skip
    gradients: dict[str, list[Tensor]] = {}
    with opdrift.record(tmp_path / "t", kernels="off", integrity="off"):
        for name, (forward, tensors) in forwards.items():
            leaves = [t.clone().requires_grad_() for t in tensors]
            result = forward(*leaves)
            weights = noise(77, result.shape, DTYPES[dtype])
            gradients[name] = list(torch.autograd.grad(result, leaves, weights))
    trace = opdrift.load(tmp_path / "t")
    views = OpViews(trace)
    found = {v.base_name: v for v in (views[i] for i in range(len(trace.ops)))}
    for name, (forward, tensors) in forwards.items():
        leaves = [t.double().requires_grad_() for t in tensors]
        result = forward(*leaves)
        weights = noise(77, result.shape, DTYPES[dtype]).double()
        truths = torch.autograd.grad(result, leaves, weights)
        for i, (gradient, truth) in enumerate(zip(gradients[name], truths, strict=True)):
            bound = explained(found[name], i)
            assert bound.family is not None, name
            assert relative(gradient, truth) <= bound.loose, (
                f"{name} {i}: {relative(gradient, truth):.2g}, {bound}"
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_by_products_of_norms_are_explained(dtype: str, tmp_path: Path) -> None:
    """The mean of a layer norm is nearly zero: it cancels where the result does not."""
    x = noise(1, (16, 512), DTYPES[dtype])
    channels = noise(2, (4, 8, 60), DTYPES[dtype], "mean 3")
    calls: list[Callable[[Tensor], tuple[Tensor, ...]]] = [
        lambda t: torch.native_layer_norm(t, (512,), None, None, 1e-5),
        lambda t: torch.native_group_norm(t, None, None, 4, 8, 60, 2, 1e-5),
        lambda t: torch.native_batch_norm(t, None, None, None, None, True, 0.1, 1e-5),
        lambda t: torch.var_mean(t, -1),
    ]
    inputs = (x, channels, channels, x)
    results, views = recorded(
        tmp_path / "t", [lambda f=f, t=t: f(t) for f, t in zip(calls, inputs, strict=True)]
    )
    for call, tensor, result, view in zip(calls, inputs, results, views, strict=True):
        truths = call(tensor.double())
        for i, (got, truth) in enumerate(zip(result, truths, strict=True)):
            bound = explained(view, i)
            assert relative(got, truth) <= bound.loose, (
                f"{view.name} {i}: {relative(got, truth):.2g}, {bound}"
            )
    by_product, result = gain_limit(views[0], 1), gain_limit(views[0], 0)
    assert by_product.formula == by_product.cap > result.cap


# ---- gains ----------------------------------------------------------------------------------------------


def perturbed(x: Tensor, size: float) -> Tensor:
    step = noise(99, x.shape, x.dtype)
    return x + size * x.norm() / step.norm() * step


def test_differences_that_flow_in_are_explained_by_the_gain(tmp_path: Path) -> None:
    """Ordinary ops magnify by less than their cap, ops near a pole by less than their formula."""
    x, w = noise(1, (64, 128), torch.float32), noise(2, (128, 96), torch.float32)
    q, k, v = (noise(3 + i, (2, 2, 20, 32), torch.float32) for i in range(3))
    far = noise(6, (64, 128), torch.float32) + 100
    close = x * (1 + 1e-3 * noise(7, x.shape, torch.float32))
    ordinary: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (lambda t: t @ w, x), (lambda t: t.softmax(-1), 3 * x), (F.gelu, x), (torch.exp, x),
        (lambda t: F.layer_norm(t, (128,)), x), (lambda t: F.scaled_dot_product_attention(t, k, v), q),
        (lambda t: torch.add(t, w.t()[:64]), x), (lambda t: t * 3, x), (lambda t: t.sum(-1), x.abs()),
    ]  # fmt: skip
    near_a_pole: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (lambda t: torch.sub(t, close), x), (lambda t: F.layer_norm(t, (128,)), far),
        (lambda t: (50 * t).sin(), x), (lambda t: t.sum(-1), x),
    ]  # fmt: skip
    cases = ordinary + near_a_pole
    results, views = recorded(tmp_path / "t", [lambda f=f, t=t: f(t) for f, t in cases])
    size = 1e-4
    for number, ((call, t), result, view) in enumerate(zip(cases, results, views, strict=True)):
        gain = gain_limit(view)
        local = 2 * explained(view).loose
        limit = min(gain.formula, gain.cap) if number < len(ordinary) else gain.formula
        moved = relative(result, call(perturbed(t, size)))
        assert moved <= limit * size + local, f"{view.name}: {moved / size:.1f} of {gain}"
    poles = [gain_limit(v) for v in views[len(ordinary) :]]
    assert all(g.formula > g.cap for g in poles)


@pytest.mark.parametrize("foreach", [False, True])
def test_what_a_small_divisor_magnifies_is_explained(tmp_path: Path, foreach: bool) -> None:
    """Elements that are zero but for noise, beside larger ones: the norms of both say nothing of their quotient."""
    size, n = 1e-7, 512
    above, start = noise(1, (n,), torch.float32), noise(2, (n,), torch.float32)
    small = torch.arange(n) % 8 == 0
    above[small] *= 1e-6
    below = above.abs() + 1e-8

    def moved(t: Tensor) -> Tensor:
        return t + size * t.norm() / n**0.5 * noise(3, (n,), torch.float32)

    def added(a: Tensor, b: Tensor) -> Tensor:
        if foreach:
            return torch._foreach_addcdiv([start * 0, start], [a, a], [b, b], 0.1)[1]
        return torch.addcdiv(start, a, b, value=0.1)

    calls = [added, lambda a, b: torch.div(a, b)]
    results, views = recorded(tmp_path / "t", [lambda f=f: f(above, below) for f in calls])

    for call, result, view in zip(calls, results, views, strict=True):
        gain = gain_limit(view, 1 if foreach and call is added else 0)
        differs = relative(result, call(moved(above), moved(above).abs() + 1e-8))
        assert 100 * size < differs <= gain.formula * size, view.name
        assert gain.formula < 1e9
        assert gain.formula > gain.cap  # an amplifier, and called so


def test_an_optimizer_that_divides_noise_by_noise_is_no_fault(tmp_path: Path) -> None:
    """The gradient of a key's bias is zero but for rounding, and AdamW steps by its sign: rounding, amplified."""

    def train(fused: bool, path: Path) -> None:
        torch.manual_seed(0)
        layer, out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 1)
        x, y = torch.randn(8, 6, 32), torch.randn(8, 6, 1)
        optimizer = torch.optim.AdamW([*layer.parameters(), *out.parameters()], lr=1e-2)
        with opdrift.record(path, model=torch.nn.ModuleList([layer, out])):
            for _ in range(2):
                optimizer.zero_grad()
                parts = layer(x).unflatten(-1, (3, 4, 8)).unbind(2)
                q, k, v = (t.transpose(1, 2) for t in parts)
                if fused:
                    heads = F.scaled_dot_product_attention(q, k, v)
                else:
                    heads = (q @ k.mT / 8**0.5).softmax(-1) @ v
                (out(heads.transpose(1, 2).flatten(2)) - y).square().mean().backward()
                optimizer.step()

    train(True, tmp_path / "fused")
    train(False, tmp_path / "in ops")

    found = opdrift.diff(tmp_path / "fused", tmp_path / "in ops")

    assert found.verdict == "rounding"
    assert any(each.op.startswith("aten.addcdiv_") for each in found.amplifiers)


def test_a_fault_larger_than_what_flows_in_is_not_explained(tmp_path: Path) -> None:
    """A fault 30 times the incoming difference exceeds cap times it plus the local bound."""
    x, w = noise(1, (64, 128), torch.float32), noise(2, (96, 128), torch.float32) / 11
    (good,), (view,) = recorded(tmp_path / "t", [lambda: F.linear(x, w)])
    bad = perturbed(F.linear(perturbed(x, 1e-5), w), 3e-4)
    gain = gain_limit(view)
    assert relative(good, bad) > min(gain.formula, gain.cap) * 1e-5 + 2 * explained(view).loose


def test_discrete_ops_are_amplifiers_by_definition(tmp_path: Path) -> None:
    """Where an output jumps, no gain explains or bounds it."""
    x = noise(1, (64,), torch.float32)
    _, views = recorded(
        tmp_path / "t", [lambda: x.argmax(), lambda: x.floor(), lambda: x > 0, lambda: x.sin()]
    )
    assert [is_discrete(v) for v in views] == [True, True, True, False]
    assert gain_limit(views[0]).discrete


# ---- the table and what it is asked ------------------------------------------------------------------------


def test_each_op_is_in_one_row() -> None:
    """An op in two rows would be judged by whichever comes last."""
    ops = [op for family in FAMILIES for op in family.ops]
    assert len(ops) == len(set(ops))


def test_every_op_of_the_table_exists() -> None:
    """A misspelt op would silently be unknown."""
    known = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    known |= {name.removeprefix("_foreach_") for name in known}
    known |= {name.rstrip("_") if not name.startswith("__") else name for name in known}
    missing = {op for family in FAMILIES for op in family.ops} - known
    assert missing == set()


def meta(*shape: int, dtype: str = "float32") -> TensorMeta:
    stride = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return TensorMeta(shape, stride, dtype, "cpu")


def blind(name: str, *operands: TensorMeta, result: TensorMeta, **arguments: object) -> OpView:
    """An op none of whose contents are known."""
    tensors = {f"arg{i}": TensorArgument(m) for i, m in enumerate(operands)}
    return OpView(
        name, {**tensors, **arguments}, [None] * len(operands), operands, [None], [result]
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "complex64", "int64", "bool"],
)
def test_every_row_answers_without_any_statistics(dtype: str) -> None:
    """Contents may be unknown (views, collectives in flight): the answer is then an assumption, no failure."""
    operand = meta(4, 6, 8, 8, dtype=dtype)
    for op in sorted(op for family in FAMILIES for op in family.ops):
        view = blind(f"aten.{op}.default", operand, operand, operand, result=operand, dim=-1)
        bound, gain = explained(view), gain_limit(view)
        assert 0 <= bound.tight <= bound.loose, op
        assert gain.formula >= 1, op
        assert bound.exact == (bound.loose == 0), op


def test_an_op_that_the_table_does_not_know_says_so() -> None:
    """It gets a cautious bound, and its tags are used."""
    x = meta(64, 64)
    view = blind("mylib.fused_thing.default", x, result=x)
    bound = explained(view)
    assert bound.family is None
    assert 1e-7 < bound.loose < 1e-4
    assert not bound.cannot_judge


def test_integer_results_are_exact() -> None:
    """An index or a count that differs on equal inputs is never rounding."""
    view = blind("mylib.router.default", meta(8, 8), result=meta(8, dtype="int64"))
    assert explained(view).exact


def test_double_precision_has_a_floor() -> None:
    """Differences below 1e-9 are never blamed in float64."""
    x = meta(64, 64, dtype="float64")
    assert explained(blind("aten.mm.default", x, x, result=x)).loose == 1e-9


def test_views_lend_the_statistics_of_their_base(tmp_path: Path) -> None:
    """A transposed weight is not fingerprinted, yet its norm is known."""
    layer = torch.nn.Linear(64, 32)
    x = noise(1, (8, 64), torch.float32)
    with torch.no_grad():
        _, (view,) = recorded(tmp_path / "t", [lambda: layer(x)])
    weight = view.tensor("mat2")
    assert weight is not None
    assert weight.l2 == pytest.approx(layer.weight.norm().item(), rel=1e-6)
    bound = explained(view)
    truth = x.norm() * layer.weight.norm() / layer(x).norm()
    assert bound.conditioning == pytest.approx(truth.item(), rel=1e-5)


def test_a_part_of_a_tensor_has_its_share_of_the_norm(tmp_path: Path) -> None:
    """The norm of half of a tensor is estimated from the whole."""
    x = noise(1, (64, 128), torch.float32)
    _, (view,) = recorded(tmp_path / "t", [lambda: x[:32] @ x[:32].t()])
    part = view.tensor("self")
    assert part is not None
    assert part.l2 == pytest.approx(x.norm().item() / math.sqrt(2), rel=1e-6)


# ---- TF32 and other narrow factors -----------------------------------------------------------------------


def product_on(device: str, op: str = "mm", dtype: str = "float32", **flags: object) -> OpView:
    """A product that ran with these flags; "fp32_precision." and dots are put in."""
    given = {name.replace("__", "."): value for name, value in flags.items()}
    operand = TensorMeta((64, 64), (64, 1), dtype, device)
    return OpView(
        f"aten.{op}.default",
        {"self": TensorArgument(operand), "mat2": TensorArgument(operand)},
        [None, None],
        [operand, operand],
        [None],
        [operand],
        setting=lambda name, default: given.get(name.removeprefix("fp32_precision."), default),
    )


@pytest.mark.parametrize(
    ("view", "found", "words"),
    [
        (product_on("cuda:0"), "ieee", "float32, TF32 off"),
        (product_on("cuda:0", cuda__matmul="tf32"), "tf32", "float32, TF32 allowed"),
        (product_on("cuda:0", generic__all="tf32"), "tf32", "float32, TF32 allowed"),
        (product_on("cuda:0", cuda__matmul="ieee", generic__all="tf32"), "ieee", "float32, TF32 off"),
        (product_on("cuda:0", cuda__conv="tf32"), "ieee", "float32, TF32 off"),
        (product_on("cuda:0", "cudnn_convolution", cuda__conv="tf32"), "tf32", "float32, TF32 allowed"),
        (product_on("cuda:0", cuda__matmul__allow_tf32=True), "tf32", "float32, TF32 allowed"),
        (product_on("cuda:0", "cudnn_convolution", cudnn__allow_tf32=True), "tf32", "float32, TF32 allowed"),
        (product_on("cuda:0", dtype="bfloat16", cuda__matmul="tf32"), "ieee", "bfloat16"),
        (product_on("cuda:0", "relu", cuda__matmul="tf32"), "ieee", "float32"),
        (product_on("cpu", cuda__matmul="tf32"), "ieee", "float32"),
        (product_on("cpu", mkldnn__matmul="bf16"), "bf16", "float32, bfloat16 factors allowed"),
        (product_on("mps", cuda__matmul="tf32"), "ieee", "float32"),
    ],
)  # fmt: skip
def test_narrow_factors_are_allowed_by_the_settings_of_the_ops_device(
    view: OpView, found: str, words: str
) -> None:
    """The old flags count where a torch has no fp32_precision; a more special setting hides a general one."""
    assert precision_of(view) == found
    assert arithmetic(view) == words


def test_tf32_on_one_side_is_explained_where_it_is_allowed(tmp_path: Path) -> None:
    """Where TF32 may be used, a kernel that rounds the factors may stand against one that does not."""
    for seed, k in enumerate((64, 1024)):
        a, b = noise(seed, (32, k), torch.float32), noise(seed + 5, (k, 48), torch.float32)
        (result,), (view,) = recorded(tmp_path / f"{k}", [lambda a=a, b=b: a @ b])
        on_device = replace(
            view,
            output_metas=[replace(m, device="cuda:0") for m in view.output_metas],
            setting=lambda name, default: (
                "tf32" if name == "fp32_precision.cuda.matmul" else default
            ),
        )
        narrow = relative(result, tf32(a) @ tf32(b))

        assert explained(view).loose < narrow <= explained(on_device).loose
        # two kernels that both round the factors alike differ as float32 does
        assert explained(on_device).tight == explained(view).tight


def test_settings_are_those_of_the_moment(tmp_path: Path) -> None:
    """A program may change its precision on the way: a mark says so, and the op after it is judged by it."""
    x = noise(1, (8, 8), torch.float32)
    with opdrift.record(tmp_path / "t", kernels="off", integrity="off") as recorder:
        x @ x
        recorder.mark("flags", **{"fp32_precision.mkldnn.matmul": ("none", "bf16")})
        x @ x
    trace = opdrift.load(tmp_path / "t")
    views = OpViews(trace)
    assert [precision_of(views[i]) for i in range(len(trace.ops))] == ["ieee", "bf16"]


# ---- growth over depth -----------------------------------------------------------------------------------


def chain(x: Tensor, weights: Sequence[tuple[Tensor, Tensor]], split: int) -> list[Tensor]:
    """A residual stream through gated layers whose products are added in `split` parts; after each layer."""
    states = []
    for up, down in weights:
        h = F.rms_norm(x, x.shape[-1:])
        for w, last in ((up, False), (down, True)):
            parts = [p @ q for p, q in zip(h.chunk(split, -1), w.chunk(split, 0), strict=True)]
            h = sum(parts[1:], parts[0])
            h = h if last else F.silu(h)
        x = x + h
        states.append(x)
    return states


@pytest.mark.parametrize(
    ("dtype", "roundoff"), [("float32", 2**-24), ("bfloat16", 2**-8), ("float16", 2**-11)]
)
def test_rounding_alone_grows_no_further_than_is_explained(dtype: str, roundoff: float) -> None:
    """Two runs that differ in the order of their sums alone, after 1 to 24 layers."""
    width, kind = 128, DTYPES[dtype]
    weights = [
        (
            noise(2 * i, (width, 256), kind) / math.sqrt(width),
            noise(2 * i + 1, (256, width), kind) / 16,
        )
        for i in range(24)
    ]
    x = noise(99, (40, width), kind)
    gaps = [relative(a, b) for a, b in zip(chain(x, weights, 1), chain(x, weights, 4), strict=True)]

    for number, gap in enumerate(gaps, 1):
        assert gap <= grown(roundoff, number), number
    # and the bound is no blank cheque: what it allows is within a factor of 30 of what happens
    assert gaps[-1] > grown(roundoff, 24) / 30


def test_a_defect_is_beyond_what_rounding_grows_to() -> None:
    """One layer's weights 2 % larger in float32: far outside; in bfloat16 size alone cannot tell."""
    width = 128
    weights = [
        (
            noise(2 * i, (width, 256), torch.float32) / math.sqrt(width),
            noise(2 * i + 1, (256, width), torch.float32) / 16,
        )
        for i in range(12)
    ]
    wrong = [(up * 1.02, down) if i == 5 else (up, down) for i, (up, down) in enumerate(weights)]
    x = noise(99, (40, width), torch.float32)

    gap = relative(chain(x, weights, 1)[-1], chain(x, wrong, 1)[-1])

    assert grown(2.0**-24, 12) < gap < grown(2.0**-8, 12)
