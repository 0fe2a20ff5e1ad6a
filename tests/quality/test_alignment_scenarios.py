"""Runs whose lists of ops differ, and agree in what they compute: nothing is blamed, and a fault is found at its op.

Each scenario is a sound pair of real recordings. As it is, the runs are identical or differ by
rounding, and the ops that only one of them has are those that we put there. Then the same pair is
recorded once more with one result spoiled in the right run, behind all that makes the lists differ:
that op is the first material divergence, and no other is one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import opdrift
from opdrift.records import Diagnosis
from opdrift.tracefile.reader import Trace

Body = Callable[[], object]


@dataclass(frozen=True)
class Runs:
    """Two runs, their models, and where the right one is spoiled.

    Attributes:
        fault: An op's name, and which of its calls in the right run; negative ones count from the end.
        only: Ops that only the left, and that only the right run has; None where they are not counted.
        maps: As of `--map`.
    """

    left: Body
    right: Body
    models: tuple[nn.Module, nn.Module]
    fault: tuple[str, int] = ("aten.addmm.default", -1)
    only: tuple[int, int] | None = None
    maps: tuple[tuple[str, str], ...] = ()
    verdict: str = "identical"
    material: int = 1


class Plant(TorchDispatchMode):
    """Changes the sign of the largest element of one result; entered around the recorder, which sees it spoiled."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += 1
        if self.count == self._at:
            first = out[0] if isinstance(out, tuple | list) else out
            with torch._C._DisableTorchDispatch(), torch.no_grad():
                flat = first.as_strided((first.untyped_storage().nbytes() // first.element_size(),), (1,), 0)
                largest = int(flat.abs().argmax())
                flat[largest] = -flat[largest]
        return out


SCENARIOS: dict[str, Callable[[], Runs]] = {}


def scenario(make: Callable[[], Runs]) -> Callable[[], Runs]:
    SCENARIOS[make.__name__] = make
    return make


class Of(nn.Module):
    """A module whose forward is a function of itself and the input."""

    def __init__(self, forward: Callable[..., Any], **children: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self._forward = forward
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *x: Any, **options: Any) -> Any:
        return self._forward(self, *x, **options)


def twins(make: Callable[[], nn.Module], other: Callable[[], nn.Module] | None = None, **renames: str):
    """Two models in evaluation mode with the same weights."""
    left, right = make().eval(), (other or make)().eval()
    state = left.state_dict()
    for old, new in renames.items():
        state = {k.replace(old, new): v for k, v in state.items()}
    right.load_state_dict(state, strict=False)
    return left, right


def infer(models, *x: Tensor, right: tuple[Tensor, ...] | None = None, **options: Any) -> Runs:
    return Runs(
        torch.no_grad()(lambda: models[0](*x)),
        torch.no_grad()(lambda: models[1](*(right or x))),
        models,
        **options,
    )


def attend(m: nn.Module, x: Tensor) -> Tensor:
    b, t, d = x.shape
    q, k, v = (f(x).view(b, t, 2, d // 2).transpose(1, 2) for f in (m.q, m.k, m.v))
    return m.o(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))


def attention(d: int = 16) -> nn.Module:
    return Of(attend, q=nn.Linear(d, d), k=nn.Linear(d, d), v=nn.Linear(d, d), o=nn.Linear(d, d))


def block(extra: Callable[[Tensor], Tensor] = lambda x: x, at: str = "", attn=attention) -> nn.Module:
    """A layer; `extra` is done to the residual stream before attention, before the norm or after the last product."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = extra(x) if at == "start" else x
        x = x + m.attn(m.n1(x))
        x = extra(x) if at == "middle" else x
        y = m.up(m.n2(x))
        y = extra(y) if at == "inside" else y
        x = x + m.down(nn.functional.gelu(y))
        return extra(x) if at == "end" else x

    return Of(
        forward, n1=nn.LayerNorm(16), attn=attn(), n2=nn.LayerNorm(16), up=nn.Linear(16, 32), down=nn.Linear(32, 16)
    )


def stack(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 16), *blocks, nn.LayerNorm(16), nn.Linear(16, 20))


IDS = torch.tensor([[1, 5, 9, 3, 7], [2, 8, 4, 6, 0]])
X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))

#: Ops that change no value.
HARMLESS = {
    "mul": lambda x: x * 1.0,
    "clone": lambda x: x.clone(),
    "casts": lambda x: x.double().float(),
    "relu of square": lambda x: x + (x - x).relu(),
    "view": lambda x: x.flatten(0, 1).view(x.shape),
}


for _at in ("start", "middle", "inside", "end"):
    for _number in (0, 2):
        for _name in ("mul", "casts", "relu of square"):

            def _inserted(at=_at, number=_number, name=_name) -> Runs:
                count = {"mul": 1, "casts": 2, "relu of square": 3}[name]
                models = twins(
                    lambda: stack(*(block() for _ in range(3))),
                    lambda: stack(*(block(HARMLESS[name], at if i == number else "") for i in range(3))),
                )
                return infer(models, IDS, only=(0, count))

            _inserted.__name__ = f"{_name} inserted at the {_at} of layer {_number}"
            scenario(_inserted)

            def _removed(at=_at, number=_number, name=_name) -> Runs:
                r = _inserted(at, number, name)
                return Runs(r.right, r.left, r.models[::-1], only=r.only[::-1])

            _removed.__name__ = f"{_name} removed at the {_at} of layer {_number}"
            scenario(_removed)


@scenario
def an_op_inserted_in_every_layer() -> Runs:
    return infer(
        twins(lambda: stack(*(block() for _ in range(4))), lambda: stack(*(block(HARMLESS["casts"], "inside") for _ in range(4)))),
        IDS, only=(0, 8),
    )


# ---- names

@scenario
def modules_are_renamed() -> Runs:
    def model(names) -> nn.Module:
        def forward(m, x):
            a, b, c = (getattr(m, n) for n in names)
            return c(b(a(x).relu()).relu())
        return Of(forward, **{n: nn.Linear(16, 16) for n in names})
    left, right = model("abc").eval(), model(("first", "second", "third")).eval()
    right.load_state_dict(dict(zip(right.state_dict(), left.state_dict().values())))
    return infer((left, right), X, only=(0, 0))


@scenario
def registration_order_differs() -> Runs:
    def model(names) -> nn.Module:
        return Of(lambda m, x: m.c(m.b(m.a(x).relu()).relu()), **{n: nn.Linear(16, 16) for n in names})
    return infer(twins(lambda: model("abc"), lambda: model("cba")), X, only=(0, 0))


@scenario
def submodules_run_in_another_order() -> Runs:
    def swapped(m, x):
        b, t, d = x.shape
        v, k, q = (f(x).view(b, t, 2, d // 2).transpose(1, 2) for f in (m.v, m.k, m.q))
        return m.o(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
    return infer(twins(lambda: stack(*(block() for _ in range(3))), lambda: stack(*(block(attn=lambda: Of(swapped, **dict(attention().named_children()))) for _ in range(3)))), IDS, only=(0, 0))


@scenario
def renamed_submodules_run_in_another_order() -> Runs:
    def swapped(m, x):
        b, t, d = x.shape
        v, k, q = (f(x).view(b, t, 2, d // 2).transpose(1, 2) for f in (m.val, m.key, m.query))
        return m.o(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
    d = 16
    return infer(twins(lambda: stack(*(block() for _ in range(3))), lambda: stack(*(block(attn=lambda: Of(swapped, query=nn.Linear(d, d), key=nn.Linear(d, d), val=nn.Linear(d, d), o=nn.Linear(d,d))) for _ in range(3))), **{"attn.q.": "attn.query.", "attn.k.": "attn.key.", "attn.v.": "attn.val."}), IDS, only=(0, 0))


@scenario
def renamed_reordered_with_map() -> Runs:
    r = renamed_submodules_run_in_another_order()
    maps = tuple((f"{i}.attn.{a}", f"{i}.attn.{b}") for i in (1, 2, 3) for a, b in (("q", "query"), ("k", "key"), ("v", "val")))
    return replace(r, maps=maps)


@scenario
def two_modules_swapped_names() -> Runs:
    def f1(m, x):
        return m.head(m.b(m.a(x).relu()).relu())
    def f2(m, x):
        return m.head(m.a(m.b(x).relu()).relu())
    mk = lambda f: Of(f, a=nn.Linear(16, 16), b=nn.Linear(16, 16), head=nn.Linear(16, 4)).eval()
    left, right = mk(f1), mk(f2)
    s = left.state_dict()
    right.load_state_dict({{"a": "b", "b": "a"}.get(k[0], k[0]) + k[1:] if k[0] in "ab" else k: v for k, v in s.items()})
    return infer((left, right), X, only=(0, 0))


@scenario
def modules_moved_below_another_parent() -> Runs:
    def flat(m, x):
        return m.c(m.b(m.a(x).relu()).relu())
    inner = lambda: Of(lambda m, x: m.b(m.a(x).relu()).relu(), a=nn.Linear(16, 16), b=nn.Linear(16, 16))
    left = Of(flat, a=nn.Linear(16, 16), b=nn.Linear(16, 16), c=nn.Linear(16, 4)).eval()
    right = Of(lambda m, x: m.c(m.body(x)), body=inner(), c=nn.Linear(16, 4)).eval()
    right.load_state_dict({("body." + k if k[0] in "ab" else k): v for k, v in left.state_dict().items()})
    return infer((left, right), X, only=(0, 0))


@scenario
def a_module_against_functions() -> Runs:
    left = Of(lambda m, x: m.c(m.b(m.a(x).relu()).relu()), a=nn.Linear(16, 16), b=nn.Linear(16, 16), c=nn.Linear(16, 4)).eval()
    right = Of(lambda m, x: linear(linear(linear(x, m.aw, m.ab).relu(), m.bw, m.bb).relu(), m.cw, m.cb),
        aw=left.a.weight, ab=left.a.bias, bw=left.b.weight, bb=left.b.bias, cw=left.c.weight, cb=left.c.bias).eval()
    return infer((left, right), X, only=(0, 0))


@scenario
def a_wrapper() -> Runs:
    model = stack(*(block() for _ in range(2))).eval()
    return infer((model, Of(lambda m, x: m.module(x), module=model).eval()), IDS, only=(0, 0))


# ---- kernels

@scenario
def flash_against_math() -> Runs:
    models = twins(lambda: stack(*(block() for _ in range(3))))
    r = infer(models, IDS, verdict="rounding")
    def right():
        with sdpa_kernel(SDPBackend.MATH):
            return r.right()
    return replace(r, right=right)


@scenario
def flash_against_math_gqa_causal_bf16() -> Runs:
    def attn():
        def fwd(m, x):
            b, t, d = x.shape
            q, k, v = (f(x).view(b, t, -1, 4).transpose(1, 2) for f in (m.q, m.k, m.v))
            return m.o(scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).reshape(b, t, d))
        return Of(fwd, q=nn.Linear(16, 16), k=nn.Linear(16, 8), v=nn.Linear(16, 8), o=nn.Linear(16, 16))
    models = twins(lambda: stack(*(block(attn=attn) for _ in range(3))).bfloat16())
    r = infer(models, IDS, verdict="rounding")
    def right():
        with sdpa_kernel(SDPBackend.MATH):
            return r.right()
    return replace(r, right=right)


@scenario
def fast_path_of_an_encoder_layer() -> Runs:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
    make = lambda: nn.Sequential(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(16, 4))
    models = twins(make)
    r = infer(models, X, verdict="rounding")
    def right():
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            return r.right()
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    return replace(r, right=right)


@scenario
def fast_path_of_an_encoder_layer_swapped() -> Runs:
    r = fast_path_of_an_encoder_layer()
    return replace(r, left=r.right, right=r.left)


@scenario
def fast_path_of_an_encoder_layer_fault_in_layer_1() -> Runs:
    return replace(fast_path_of_an_encoder_layer_swapped(), fault=("aten._transformer_encoder_layer_fwd.default", 1))


@scenario
def fast_path_against_grad() -> Runs:
    r = fast_path_of_an_encoder_layer()
    with torch.enable_grad():
        pass
    m = r.models[1]
    return replace(r, right=lambda: m(X))


@scenario
def addmm_against_mm_and_add() -> Runs:
    def apart(m, x):
        return x.flatten(0, -2).mm(m.weight.t()).view(*x.shape[:-1], -1) + m.bias
    class Apart(nn.Linear):
        def forward(self, x):
            return apart(self, x)
    def model(kind):
        return nn.Sequential(kind(16, 16), nn.ReLU(), kind(16, 16), nn.ReLU(), kind(16, 8))
    return infer(twins(lambda: model(nn.Linear), lambda: model(Apart)), X, fault=("aten.mm.default", -1), verdict="rounding")


@scenario
def addmm_against_mm_and_add_fault_at_add() -> Runs:
    return replace(addmm_against_mm_and_add(), fault=("aten.add.Tensor", 1))


# ---- checkpointing

def trained(model, ids, *, reentrant: bool | None) -> Body:
    def run():
        x = model[0](ids)
        for each in model[1:-2]:
            if reentrant is None:
                x = each(x)
            else:
                x = checkpoint(each, x, use_reentrant=reentrant)
        loss = model[-1](model[-2](x)).float().logsumexp(-1).mean()
        loss.backward()
        return loss
    return run


for _reentrant in (True, False):
    for _swap in (False, True):
        for _fault in (("aten.addmm.default", 12), ("aten.addmm.default", -1), ("aten.mm.default", -1), ("aten.native_layer_norm_backward.default", 3), ("aten.gelu_backward.default", 1)):

            def _checkpointed(reentrant=_reentrant, swap=_swap, fault=_fault) -> Runs:
                models = twins(lambda: stack(*(block() for _ in range(3))))
                runs = Runs(trained(models[0], IDS, reentrant=None), trained(models[1], IDS, reentrant=reentrant), models, fault=fault)
                return Runs(runs.right, runs.left, models[::-1], fault) if swap else runs

            _checkpointed.__name__ = f"checkpointing {'reentrant' if _reentrant else 'new'} {'off' if _swap else 'on'} {_fault[0]} {_fault[1]}"
            scenario(_checkpointed)


# ---- counts

def generated(model, steps: int) -> Body:
    @torch.no_grad()
    def run():
        ids = IDS[:1, :2]
        for _ in range(steps):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
        return ids
    return run


@scenario
def more_decode_steps_on_the_right() -> Runs:
    models = twins(lambda: stack(*(block() for _ in range(2))))
    return Runs(generated(models[0], 4), generated(models[1], 6), models, fault=("aten.addmm.default", 3 * 13 - 1))


@scenario
def fewer_decode_steps_on_the_right() -> Runs:
    models = twins(lambda: stack(*(block() for _ in range(2))))
    return Runs(generated(models[0], 6), generated(models[1], 4), models, fault=("aten.addmm.default", 3 * 13 - 1))


@scenario
def one_layer_more_that_adds_nothing() -> Runs:
    def model(n):
        return stack(*(block() for _ in range(n)))
    left, right = model(3).eval(), model(4).eval()
    s = left.state_dict()
    new = {k: s[k] for k in s if k.split(".")[0] in "0123"}
    new |= {"5" + k[1:]: v for k, v in s.items() if k[0] == "4"} | {"6" + k[1:]: v for k, v in s.items() if k[0] == "5"}
    right.load_state_dict(new, strict=False)
    with torch.no_grad():
        for p in (*right[4].attn.o.parameters(), *right[4].down.parameters()):
            p.zero_()
    return infer((left, right), IDS)


@scenario
def one_layer_more_in_front() -> Runs:
    def model(n):
        return stack(*(block() for _ in range(n)))
    left, right = model(3).eval(), model(4).eval()
    s = left.state_dict()
    new = {k: v for k, v in s.items() if k[0] == "0"} | {f"{int(k[0]) + 1}{k[1:]}": v for k, v in s.items() if k[0] != "0"}
    right.load_state_dict(new, strict=False)
    with torch.no_grad():
        for p in (*right[1].attn.o.parameters(), *right[1].down.parameters()):
            p.zero_()
    return infer((left, right), IDS)


@scenario
def a_warm_up_with_the_same_input() -> Runs:
    models = twins(lambda: stack(*(block() for _ in range(2))))
    @torch.no_grad()
    def right():
        models[1](IDS)
        return models[1](IDS)
    return Runs(torch.no_grad()(lambda: models[0](IDS)), right, models)


@scenario
def a_warm_up_with_another_input() -> Runs:
    models = twins(lambda: stack(*(block() for _ in range(2))))
    @torch.no_grad()
    def right():
        models[1](IDS[:, :3])
        return models[1](IDS)
    return Runs(torch.no_grad()(lambda: models[0](IDS)), right, models)


@scenario
def a_shared_layer_called_more_often() -> Runs:
    def model(n):
        return Of(lambda m, x: m.head([x := m.mid(x).tanh() for _ in range(3)][-1]) if n == 3 else m.head([m.mid(x), [x := m.mid(x).tanh() for _ in range(3)]][1][-1]), mid=nn.Linear(16, 16), head=nn.Linear(16, 4))
    return infer(twins(lambda: model(3), lambda: model(4)), X)


# ---- caches

class Cached(nn.Module):
    """One attention layer with a cache that is concatenated."""
    def __init__(self, inplace=False):
        super().__init__()
        self.embed, self.q, self.k, self.v, self.o = nn.Embedding(20, 16), *(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 20)

    def forward(self, ids, cache=None):
        x = self.embed(ids)
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, 2, d // 2).transpose(1, 2) for f in (self.q, self.k, self.v))
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        mask = torch.ones(t, k.shape[2], dtype=torch.bool).tril(k.shape[2] - t)
        scores = (q @ k.transpose(2, 3)) * 8 ** -0.5
        y = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return self.head(x + self.o(y.transpose(1, 2).reshape(b, t, d))), (k, v)


@scenario
def one_long_call_against_prefill_and_steps() -> Runs:
    models = twins(Cached)
    ids = torch.arange(8)[None]
    @torch.no_grad()
    def right():
        out, cache = models[1](ids[:, :5])
        outs = [out]
        for t in range(5, 8):
            out, cache = models[1](ids[:, t : t + 1], cache)
            outs.append(out)
        return torch.cat(outs, 1)
    return Runs(torch.no_grad()(lambda: models[0](ids)), right, models)


# ---- casts, devices

@scenario
def extra_casts() -> Runs:
    class Wide(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.double().float())
    def model(norm):
        return nn.Sequential(nn.Linear(16, 16), norm(16), nn.Linear(16, 16), norm(16), nn.Linear(16, 8))
    return infer(twins(lambda: model(nn.LayerNorm), lambda: model(Wide)), X, only=(0, 4))


@scenario
def extra_casts_of_weights() -> Runs:
    class Wide(nn.Linear):
        def forward(self, x):
            return linear(x, self.weight.double().float(), self.bias)
    def model(kind):
        return nn.Sequential(kind(16, 16), nn.ReLU(), kind(16, 16), nn.ReLU(), kind(16, 8))
    return infer(twins(lambda: model(nn.Linear), lambda: model(Wide)), X, only=(0, 6))


def record(path: Path, body: Body, model: nn.Module, plant: Plant | None = None) -> Trace:
    with plant or nullcontext():
        with opdrift.record(path, model=model):
            kept = body()
    del kept
    trace = opdrift.load(path)
    assert trace.complete, trace.incomplete
    return trace


def place_of(trace: Trace, name: str, which: int) -> int:
    names = [trace.op(i).name for i in range(len(trace.ops))]
    return [i for i, n in enumerate(names) if n == name][which]
