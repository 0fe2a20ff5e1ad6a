"""Runs whose lists of ops differ though they compute the same: nothing is blamed, and a fault is found at its op.

Each scenario is a sound pair of real recordings. As it is, the runs are identical or differ by
rounding, and the ops that only one of them has are those that we put there. Then the right run is
recorded once more with one result spoiled, behind what makes the lists differ: that op is the first
material divergence, and no other is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import gelu, linear, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import opdrift
from opdrift.errors import IncomparableTracesError
from opdrift.tracefile.reader import Trace

Body = Callable[[], object]
Models = tuple[nn.Module, nn.Module]
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Runs:
    """Two runs, their models, and where the right one is spoiled.

    Attributes:
        left: The left run.
        right: The right run.
        models: Their models.
        fault: An op's name, and which of its calls in the right run; negative ones count from the end.
        only: Ops that only the left, and that only the right run has; None where they are not counted.
        maps: As of `--map`.
        verdict: Of the sound pair.
    """

    left: Body
    right: Body
    models: Models
    fault: tuple[str, int] = ("aten.addmm.default", -1)
    only: tuple[int, int] | None = None
    maps: tuple[tuple[str, str], ...] = ()
    verdict: str = "identical"


class Plant(TorchDispatchMode):
    """Changes the sign of the largest element of one result; entered around the recorder, which sees it spoiled."""

    def __init__(self, name: str, which: int) -> None:
        super().__init__()
        self._name = name
        self._left = which

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if str(func) == self._name:
            self._left -= 1
            if self._left == -1:
                _spoil(out[0] if isinstance(out, tuple | list) else out)
        return out


def _spoil(result: Tensor) -> None:
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        size = result.untyped_storage().nbytes() // result.element_size()
        flat = result.as_strided((size,), (1,), 0)
        largest = int(flat.abs().argmax())
        flat[largest] = -flat[largest]


def record(path: Path, body: Body, model: nn.Module, plant: Plant | None = None) -> Trace:
    for parameter in model.parameters():
        parameter.grad = None
    with plant or nullcontext(), opdrift.record(path, model=model):
        kept = body()
    del kept
    trace = opdrift.load(path)
    assert trace.complete, trace.incomplete
    return trace


def calls_of(trace: Trace, name: str) -> list[int]:
    """Seqs of the calls of an op."""
    return [op.seq for op in map(trace.op, range(len(trace.ops))) if op.name == name]


def check(folder: Path, runs: Runs) -> None:
    """The sound pair, and the spoiled one."""
    left = record(folder / "left.trace", runs.left, runs.models[0])
    right = record(folder / "right.trace", runs.right, runs.models[1])
    sound = opdrift.diff(left, right, maps=runs.maps)
    number = range(len(calls_of(right, runs.fault[0])))[runs.fault[1]]
    plant = Plant(runs.fault[0], number)
    spoiled = record(folder / "spoiled.trace", runs.right, runs.models[1], plant)
    seq = calls_of(spoiled, runs.fault[0])[number]
    faulty = opdrift.diff(left, spoiled, maps=runs.maps)

    assert sound.verdict == runs.verdict
    if runs.only is not None:
        assert (sound.alignment.left_only, sound.alignment.right_only) == runs.only
    assert sound.alignment.fallback_reason is None
    assert faulty.verdict == "diverged"
    material = [(d.op, d.name, d.seq.right) for d in faulty.origins if d.material]
    assert material == [(runs.fault[0], None, seq)]
    assert faulty.first is not None
    assert faulty.first.seq.right == seq


SCENARIOS: dict[str, Callable[[], Runs]] = {}


def scenario(make: Callable[[], Runs]) -> Callable[[], Runs]:
    SCENARIOS[make.__name__] = make
    return make


# ---- models ----------------------------------------------------------------------------------------------


class Of(nn.Module):
    """A module whose forward is a function of itself and the input."""

    def __init__(self, forward: Callable[..., Any], **children: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self._forward = forward
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *x: Any) -> Any:
        return self._forward(self, *x)


def twins(
    make: Callable[[], nn.Module],
    other: Callable[[], nn.Module] | None = None,
    *,
    rename: Callable[[str], str] = lambda name: name,
) -> Models:
    """Two models in evaluation mode with the same weights."""
    left, right = make().eval(), (other or make)().eval()
    state = {rename(name): value for name, value in left.state_dict().items()}
    right.load_state_dict(state, strict=False)
    return left, right


def infer(models: Models, x: Tensor, **options: Any) -> Runs:
    """Both models on one input, without gradients."""
    left, right = (torch.no_grad()(lambda m=m: m(x)) for m in models)
    return Runs(left, right, models, **options)


def attend(m: nn.Module, x: Tensor, names: Sequence[str] = ("q", "k", "v")) -> Tensor:
    """Attention of two heads; the projections are computed in the order of `names`."""
    b, t, d = x.shape
    heads = {n[0]: getattr(m, n)(x).view(b, t, 2, d // 2).transpose(1, 2) for n in names}
    y = scaled_dot_product_attention(heads["q"], heads["k"], heads["v"])
    return m.o(y.transpose(1, 2).reshape(b, t, d))


def attention(*names: str) -> nn.Module:
    names = names or ("q", "k", "v")
    layers = {n: nn.Linear(16, 16) for n in (*names, "o")}
    return Of(lambda m, x: attend(m, x, names), **layers)


def block(
    extra: Change = lambda x: x, at: str = "", attn: Callable[[], nn.Module] = attention
) -> nn.Module:
    """A layer; `extra` is done to the residual stream, or inside of the feed-forward part."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = extra(x) if at == "start" else x
        x = x + m.attn(m.n1(x))
        x = extra(x) if at == "middle" else x
        y = m.up(m.n2(x))
        y = extra(y) if at == "inside" else y
        x = x + m.down(gelu(y))
        return extra(x) if at == "end" else x

    return Of(
        forward,
        n1=nn.LayerNorm(16),
        attn=attn(),
        n2=nn.LayerNorm(16),
        up=nn.Linear(16, 32),
        down=nn.Linear(32, 16),
    )


def stack(*blocks: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(20, 16), *blocks, nn.LayerNorm(16), nn.Linear(16, 20))


def layers(count: int) -> nn.Sequential:
    return stack(*(block() for _ in range(count)))


IDS = torch.tensor([[1, 5, 9, 3, 7], [2, 8, 4, 6, 0]])
X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))


# ---- ops more, ops less ------------------------------------------------------------------------------------

#: Ops that change no value, and how many they are.
HARMLESS: dict[str, tuple[Change, int]] = {
    "factor": (lambda x: x * 1.0, 1),
    "casts": (lambda x: x.double().float(), 2),
    "branch": (lambda x: x + (x - x).relu(), 3),
}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("at", ["start", "middle", "inside", "end"])
@pytest.mark.parametrize("what", list(HARMLESS))
def test_ops_that_one_run_has_shift_nothing(
    tmp_path: Path, what: str, at: str, layer: int, side: str
):
    """Wherever they stand, and in whichever run."""
    change, count = HARMLESS[what]
    models = twins(
        lambda: layers(3),
        lambda: stack(*(block(change, at if i == layer else "") for i in range(3))),
    )
    runs = infer(models, IDS, only=(0, count))
    if side == "left":
        runs = Runs(runs.right, runs.left, models[::-1], only=(count, 0))

    check(tmp_path, runs)


@scenario
def an_op_more_in_every_layer() -> Runs:
    change, count = HARMLESS["casts"]
    other = lambda: stack(*(block(change, "inside") for _ in range(4)))  # noqa: E731
    return infer(twins(lambda: layers(4), other), IDS, only=(0, 4 * count))


@scenario
def a_cast_more_in_front_of_every_norm() -> Runs:
    class Wide(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.double().float())

    def model(norm: type[nn.LayerNorm]) -> nn.Module:
        return nn.Sequential(
            nn.Linear(16, 16), norm(16), nn.Linear(16, 16), norm(16), nn.Linear(16, 8)
        )

    return infer(twins(lambda: model(nn.LayerNorm), lambda: model(Wide)), X, only=(0, 4))


@scenario
def weights_are_cast_there_and_back() -> Runs:
    class Wide(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return linear(x, self.weight.double().float(), self.bias)

    def model(kind: type[nn.Linear]) -> nn.Module:
        return nn.Sequential(kind(16, 16), nn.ReLU(), kind(16, 16), nn.ReLU(), kind(16, 8))

    return infer(twins(lambda: model(nn.Linear), lambda: model(Wide)), X, only=(0, 6))


# ---- names and order ---------------------------------------------------------------------------------------


def chain(*names: str, order: str = "") -> nn.Module:
    """Linear layers in a row, registered in the order of `names` and run in that of `order`."""
    run = order or "".join(names)

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        for name in run[:-1] if order else names[:-1]:
            x = getattr(m, name)(x).relu()
        return getattr(m, run[-1] if order else names[-1])(x)

    return Of(forward, **{name: nn.Linear(16, 16) for name in names})


@scenario
def modules_are_renamed() -> Runs:
    names = {"a": "first", "b": "second", "c": "third"}
    models = twins(
        lambda: chain("a", "b", "c"),
        lambda: chain("first", "second", "third"),
        rename=lambda name: names[name[0]] + name[1:],
    )
    return infer(models, X, only=(0, 0))


@scenario
def modules_are_registered_in_another_order() -> Runs:
    models = twins(lambda: chain("a", "b", "c"), lambda: chain("c", "b", "a", order="abc"))
    return infer(models, X, only=(0, 0))


@scenario
def projections_run_in_another_order() -> Runs:
    other = lambda: stack(*(block(attn=lambda: attention("v", "k", "q")) for _ in range(3)))  # noqa: E731
    return infer(twins(lambda: layers(3), other), IDS, only=(0, 0))


def _long_names(name: str) -> str:
    for short, long in (("q", "query"), ("k", "key"), ("v", "value")):
        name = name.replace(f"attn.{short}.", f"attn.{long}.")
    return name


@scenario
def renamed_projections_run_in_another_order() -> Runs:
    def other() -> nn.Module:
        return stack(*(block(attn=lambda: attention("value", "key", "query")) for _ in range(3)))

    return infer(twins(lambda: layers(3), other, rename=_long_names), IDS, only=(0, 0))


@scenario
def the_same_with_a_map() -> Runs:
    names = [f"{i}.attn.{n}" for i in (1, 2, 3) for n in "qkv"]
    maps = tuple((name, _long_names(f"{name}.")[:-1]) for name in names)
    return replace(renamed_projections_run_in_another_order(), maps=maps)


@scenario
def two_modules_exchange_their_names() -> Runs:
    exchanged = {"a": "b", "b": "a", "c": "c"}
    models = twins(
        lambda: chain("a", "b", "c"),
        lambda: chain("a", "b", "c", order="bac"),
        rename=lambda name: exchanged[name[0]] + name[1:],
    )
    return infer(models, X, only=(0, 0))


@scenario
def modules_lie_below_another_parent() -> Runs:
    def nested() -> nn.Module:
        return Of(lambda m, x: m.c(m.body(x).relu()), body=chain("a", "b"), c=nn.Linear(16, 16))

    models = twins(
        lambda: chain("a", "b", "c"),
        nested,
        rename=lambda name: name if name[0] == "c" else f"body.{name}",
    )
    return infer(models, X, only=(0, 0))


@scenario
def functions_instead_of_modules() -> Runs:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = linear(linear(x, m.a, m.ab).relu(), m.b, m.bb).relu()
        return linear(x, m.c, m.cb)

    left = chain("a", "b", "c").eval()
    own = {
        n + "b" * (kind == "bias"): getattr(left, n).get_parameter(kind)
        for n in "abc"
        for kind in ("weight", "bias")
    }
    return infer((left, Of(forward, **own).eval()), X, only=(0, 0))


@scenario
def a_wrapper_around_the_model() -> Runs:
    model = layers(2).eval()
    return infer((model, Of(lambda m, x: m.module(x), module=model).eval()), IDS, only=(0, 0))


# ---- kernels -----------------------------------------------------------------------------------------------


def with_math(runs: Runs) -> Runs:
    def right() -> object:
        with sdpa_kernel(SDPBackend.MATH):
            return runs.right()

    return replace(runs, right=right, verdict="rounding")


@scenario
def flash_against_math() -> Runs:
    return with_math(infer(twins(lambda: layers(3)), IDS))


@scenario
def flash_against_math_and_a_fault_right_behind() -> Runs:
    return replace(flash_against_math(), fault=("aten.add.Tensor", 0))


@scenario
def flash_against_math_and_a_fault_in_the_product_that_reads_it() -> Runs:
    """Flash returns a transposed view, math a copy of one: the same elements in another order in memory."""
    return replace(flash_against_math(), fault=("aten.addmm.default", 3))


@scenario
def math_against_flash_and_a_fault_in_the_last_product_that_reads_it() -> Runs:
    runs = flash_against_math()
    models = runs.models[::-1]
    fault = ("aten.addmm.default", -4)
    return replace(runs, left=runs.right, right=runs.left, models=models, fault=fault)


@scenario
def flash_against_math_causal_grouped_bfloat16() -> Runs:
    def grouped(m: nn.Module, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, -1, 4).transpose(1, 2) for f in (m.q, m.k, m.v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return m.o(y.transpose(1, 2).reshape(b, t, d))

    def attn() -> nn.Module:
        sizes = {"q": 16, "k": 8, "v": 8, "o": 16}
        return Of(grouped, **{name: nn.Linear(16, size) for name, size in sizes.items()})

    models = twins(lambda: stack(*(block(attn=attn) for _ in range(3))).bfloat16())
    return with_math(infer(models, IDS))


@contextmanager
def no_fast_path() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@scenario
def fused_encoder_layers_against_their_parts() -> Runs:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = lambda: nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)  # noqa: E731
    runs = infer(twins(lambda: nn.Sequential(encoder(), nn.Linear(16, 4))), X, verdict="rounding")
    return replace(runs, right=no_fast_path()(runs.right))


@scenario
def parts_against_fused_encoder_layers() -> Runs:
    runs = fused_encoder_layers_against_their_parts()
    return replace(runs, left=runs.right, right=runs.left)


@scenario
def fused_encoder_layers_against_a_run_with_gradients() -> Runs:
    runs = fused_encoder_layers_against_their_parts()
    return replace(runs, right=lambda: runs.models[1](X))


LAYER = "aten._transformer_encoder_layer_fwd.default"


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_fault_in_one_of_several_fused_layers_is_found_in_that_layer(
    tmp_path: Path, side: str, layer: int
):
    """The runs have no op in common between the first layer and the last; what each layer returns is compared."""
    torch.manual_seed(0)
    fused = side == "right"
    runs = (
        parts_against_fused_encoder_layers()
        if fused
        else fused_encoder_layers_against_their_parts()
    )
    fault = (LAYER, layer) if fused else ("aten.addmm.default", 3 * layer + 1)
    left = record(tmp_path / "left", runs.left, runs.models[0])
    spoiled = record(tmp_path / "spoiled", runs.right, runs.models[1], Plant(*fault))

    faulty = opdrift.diff(left, spoiled)

    fast = calls_of(spoiled if fused else left, LAYER)[layer]
    material = [d for d in faulty.origins if d.material]
    assert [d.op for d in material] == [LAYER]
    assert (material[0].seq.right if fused else material[0].seq.left) == fast
    assert material[0].module.endswith(f"0.layers.{layer}")


def test_a_module_that_returns_something_else_is_not_blamed_where_the_runs_come_together_again(
    tmp_path: Path,
):
    """The first returns twice as much, the second makes up for it, the third is spoiled."""
    torch.manual_seed(0)

    def model(*parts: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
        inner = {n: Of(f) for n, f in zip("abc", parts, strict=True)}
        return Of(lambda m, x: m.head(m.c(m.b(m.a(x)))), **inner, head=nn.Linear(16, 4))

    def tanh(_: nn.Module, y: Tensor) -> Tensor:
        e = (-y).exp()  # y is twice what it should be
        return (1 - e) / (1 + e)

    models = twins(
        lambda: model(lambda _, x: x.sigmoid(), lambda _, x: x.tanh(), lambda _, x: x.square()),
        lambda: model(lambda _, x: 2 / (1 + (-x).exp()), tanh, lambda _, x: x * x),
    )
    runs = infer(models, X)
    left = record(tmp_path / "left", runs.left, models[0])
    right = record(tmp_path / "right", runs.right, models[1])
    plant = Plant("aten.mul.Tensor", len(calls_of(right, "aten.mul.Tensor")) - 1)
    spoiled = record(tmp_path / "spoiled", runs.right, models[1], plant)

    sound, faulty = opdrift.diff(left, right), opdrift.diff(left, spoiled)

    assert sound.verdict == "rounding"
    assert [d.module for d in faulty.origins if d.material] == ["c"]


class Apart(nn.Linear):
    """A product, and then a sum."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() + self.bias


def sums(left: type[nn.Linear], right: type[nn.Linear], factor: float = 1.0) -> Runs:
    def model(kind: type[nn.Linear]) -> nn.Module:
        return nn.Sequential(
            kind(16, 16), nn.ReLU(), kind(16, 16), nn.Hardtanh(-factor, factor), kind(16, 8)
        )

    models = twins(lambda: model(left), lambda: model(right))
    return infer(models, X.reshape(10, 16), only=(3, 6) if left is nn.Linear else (6, 3))


@scenario
def a_product_with_a_sum_against_both_apart() -> Runs:
    """A fault in an op that both runs have, behind one that they have not."""
    return replace(sums(nn.Linear, Apart), fault=("aten.hardtanh.default", 0))


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_fault_in_a_product_with_a_sum_is_found_with_its_counterpart(
    tmp_path: Path, side: str, which: int
):
    """One op in one run, the sum in the other: both are named, and the fused one is shown."""
    torch.manual_seed(0)
    fused = side == "right"
    runs = sums(Apart, nn.Linear) if fused else sums(nn.Linear, Apart)
    names = ("aten.add.Tensor", "aten.addmm.default")
    left = record(tmp_path / "left", runs.left, runs.models[0])
    fault = names[1] if fused else names[0]
    spoiled = record(tmp_path / "spoiled", runs.right, runs.models[1], Plant(fault, which))

    faulty = opdrift.diff(left, spoiled)

    seqs = (
        calls_of(left, names[0] if fused else names[1])[which],
        calls_of(spoiled, fault)[which],
    )
    assert [(d.op, (d.seq.left, d.seq.right)) for d in faulty.origins if d.material] == [
        (names[1], seqs)
    ]


def test_several_ops_that_are_no_sum_have_no_counterpart(tmp_path: Path):
    """A fused product against an activation and another product: they are not the same in steps."""
    torch.manual_seed(0)
    other = lambda: Of(  # noqa: E731
        lambda m, x: m.a(x).tanh() @ m.a.weight.t(), a=nn.Linear(16, 16, bias=False)
    )
    models = twins(lambda: nn.Linear(16, 16)), twins(other)
    x = X.reshape(10, 16)
    left = record(tmp_path / "left", infer(models[0], x).left, models[0][0])
    right = record(tmp_path / "right", infer(models[1], x).left, models[1][0])

    found = opdrift.diff(left, right)

    regions = [d for d in found.origins if d.kind == "structure"]
    assert regions
    assert all(None in (d.seq.left, d.seq.right) for d in regions)


# ---- checkpointing -----------------------------------------------------------------------------------------


def trained(model: nn.Sequential, *, reentrant: bool | None) -> Body:
    """A step with its backward pass; the blocks are checkpointed unless `reentrant` is None."""

    def run() -> Tensor:
        x = model[0](IDS)
        for each in model[1:-2]:
            x = each(x) if reentrant is None else checkpoint(each, x, use_reentrant=reentrant)
        loss = model[-1](model[-2](x)).logsumexp(-1).mean()
        loss.backward()
        return loss

    return run


FORWARD, BACKWARD = ("aten.addmm.default", 12), ("aten.mm.default", -1)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    "fault",
    [
        FORWARD,
        BACKWARD,
        ("aten.native_layer_norm_backward.default", 3),
        ("aten.gelu_backward.default", 1),
        ("aten._scaled_dot_product_flash_attention_for_cpu_backward.default", 0),
    ],
)
def test_checkpointing_repeats_the_forward_pass(
    tmp_path: Path, fault: tuple[str, int], side: str, reentrant: bool
):
    """A backward op is that of the module's first call, though the module was called again for it."""
    models = twins(lambda: layers(3))
    kinds = (None, reentrant) if side == "right" else (reentrant, None)
    left, right = (trained(m, reentrant=k) for m, k in zip(models, kinds, strict=True))

    check(tmp_path, Runs(left, right, models, fault))


@pytest.mark.parametrize(("reentrant", "which"), [(True, -2), (False, -1), (False, 21)])
def test_a_repeat_that_strays_is_named(tmp_path: Path, reentrant: bool, which: int):
    """The forward pass is right, and one product of its repetition is not."""
    models = twins(lambda: layers(3))
    left, right = trained(models[0], reentrant=None), trained(models[1], reentrant=reentrant)

    check(tmp_path, Runs(left, right, models, ("aten.addmm.default", which)))


# ---- other numbers of calls --------------------------------------------------------------------------------


def generated(model: nn.Module, steps: int, *, kept: bool = False) -> Body:
    """Greedy decoding; the tokens are dropped, or `kept`."""

    @torch.no_grad()
    def run() -> Tensor | None:
        ids = IDS[:1, :2]
        for _ in range(steps):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
        return ids if kept else None

    return run


#: The head of the third of the decoding steps, of 13 products each.
THIRD_HEAD = ("aten.addmm.default", 3 * 13 - 1)


@scenario
def the_right_run_decodes_for_longer() -> Runs:
    models = twins(lambda: layers(2))
    return Runs(generated(models[0], 4), generated(models[1], 6), models, THIRD_HEAD)


@scenario
def the_left_run_decodes_for_longer() -> Runs:
    models = twins(lambda: layers(2))
    return Runs(generated(models[0], 6), generated(models[1], 4), models, THIRD_HEAD)


def twice(model: nn.Module) -> Body:
    """The same call two times; both results are kept."""
    return torch.no_grad()(lambda: (model(IDS), model(IDS)))


@scenario
def the_right_run_makes_the_same_call_once_more() -> Runs:
    models = twins(lambda: layers(2))
    return replace(infer(models, IDS), right=twice(models[1]))


@scenario
def the_right_run_makes_the_same_call_once_more_and_the_first_is_spoiled() -> Runs:
    runs = the_right_run_makes_the_same_call_once_more()
    return replace(runs, fault=("aten.addmm.default", 8))


@scenario
def the_left_run_makes_the_same_call_once_more() -> Runs:
    models = twins(lambda: layers(2))
    return replace(infer(models, IDS), left=twice(models[0]))


@pytest.mark.parametrize("side", ["right", "left"])
def test_further_steps_whose_tokens_were_kept_are_named(tmp_path: Path, side: str):
    """Six tokens are no four: the steps that only one run makes are said, behind a fault that both share."""
    torch.manual_seed(0)
    models = twins(lambda: layers(2))
    steps = (4, 6) if side == "right" else (6, 4)
    left = record(tmp_path / "left", generated(models[0], steps[0], kept=True), models[0])
    body = generated(models[1], steps[1], kept=True)
    right = record(tmp_path / "right", body, models[1])
    spoiled = record(tmp_path / "spoiled", body, models[1], Plant(*THIRD_HEAD))
    seq = calls_of(spoiled, THIRD_HEAD[0])[THIRD_HEAD[1]]

    sound, faulty = opdrift.diff(left, right), opdrift.diff(left, spoiled)

    said = f"the {side} run makes 2 more calls of the model: calls 5 and 6 of 6"
    assert sound.verdict == "diverged"
    assert [(d.kind, d.cause.slug, d.cause.summary) for d in sound.origins] == [
        ("structure", "structure", said)
    ]
    assert faulty.first is not None
    assert (faulty.first.op, faulty.first.seq.right) == (THIRD_HEAD[0], seq)
    assert [d.cause.summary for d in faulty.origins[1:]] == [said]


def test_a_step_more_is_said_beside_rounding(tmp_path: Path):
    """What both runs have differs by rounding, and one has more: that is no rounding."""
    torch.manual_seed(0)
    models = twins(lambda: layers(2))
    left = record(tmp_path / "left", generated(models[0], 2, kept=True), models[0])
    longer = generated(models[1], 3, kept=True)
    body = with_math(replace(infer(models, IDS), right=longer)).right
    right = record(tmp_path / "right", body, models[1])

    found = opdrift.diff(left, right)

    assert found.verdict == "diverged"
    assert [d.cause.summary for d in found.origins if d.material] == [
        "the right run makes 1 more call of the model: call 3 of 3"
    ]


def deeper(new: int) -> Models:
    """Three layers, and the same with one more of number `new`, which adds nothing."""
    models = twins(
        lambda: layers(3),
        lambda: layers(4),
        rename=lambda name: f"{int(name[0]) + (int(name[0]) >= new)}{name[1:]}",
    )
    added: Any = models[1].get_submodule(str(new))
    with torch.no_grad():
        for parameter in (*added.attn.o.parameters(), *added.down.parameters()):
            parameter.zero_()
    return models


@scenario
def a_layer_more_behind_the_others() -> Runs:
    return infer(deeper(4), IDS, only=(0, 38))


@scenario
def a_layer_more_in_front_of_the_others() -> Runs:
    return infer(deeper(1), IDS, only=(0, 38))


@scenario
def the_right_run_warms_up_with_another_input() -> Runs:
    models = twins(lambda: layers(2))
    runs = infer(models, IDS)

    def right() -> object:
        with torch.no_grad():
            models[1](IDS[:, :3])
        return runs.right()

    return replace(runs, right=right)


@scenario
def a_shared_layer_is_called_once_more() -> Runs:
    def model(idle: int) -> nn.Module:
        def forward(m: nn.Module, x: Tensor) -> Tensor:
            for _ in range(idle):
                m.mid(x)
            for _ in range(3):
                x = m.mid(x).tanh()
            return m.head(x)

        return Of(forward, mid=nn.Linear(16, 16), head=nn.Linear(16, 4))

    return infer(twins(lambda: model(0), lambda: model(1)), X, only=(0, 4))


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_other_ops_and_the_same_results(tmp_path: Path, name: str):
    """Sound, nothing is blamed; with a fault, it is found where it is."""
    torch.manual_seed(0)

    check(tmp_path, SCENARIOS[name]())


class Cached(nn.Module):
    """One layer of attention that keeps its keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, ids: Tensor, cache: tuple[Tensor, Tensor] | None = None) -> Any:
        x = self.embed(ids)
        k, v = self.k(x), self.v(x)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        later = ~torch.ones(x.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - x.shape[1])
        scores = (self.q(x) @ k.transpose(1, 2)).masked_fill(later, float("-inf"))
        return self.head(x + scores.softmax(-1) @ v), (k, v)


@torch.no_grad()
def test_one_long_call_and_cached_steps_are_not_compared(tmp_path: Path):
    """They give the same, in shapes that no op of the other has; to call the input another would mislead."""
    model, ids = Cached().eval(), torch.arange(8)[None]

    def steps() -> Tensor:
        logits, cache = model(ids[:, :5])
        found = [logits]
        for t in range(5, 8):
            logits, cache = model(ids[:, t : t + 1], cache)
            found.append(logits)
        return torch.cat(found, 1)

    left = record(tmp_path / "left.trace", lambda: model(ids), model)
    right = record(tmp_path / "right.trace", steps, model)

    for sides in ((left, right), (right, left)):
        with pytest.raises(IncomparableTracesError, match=r"in 4 parts \(5, 1, 1, 1\)"):
            opdrift.diff(*sides)


@torch.no_grad()
def test_cached_steps_are_compared_with_cached_steps(tmp_path: Path):
    """The same steps in both runs: nothing is refused."""
    model, ids = Cached().eval(), torch.arange(8)[None]

    def steps() -> Tensor:
        _, cache = model(ids[:, :5])
        return model(ids[:, 5:], cache)[0]

    traces = [record(tmp_path / f"{name}.trace", steps, model) for name in ("left", "right")]

    assert opdrift.diff(*traces).verdict == "identical"


# ---- shards ------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A gloo process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(model: nn.Module) -> nn.Module:
    """With torch's FSDP2, each block apart."""
    mesh = init_device_mesh("cpu", (1,))
    for each in model.children():
        fully_shard(each, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.usefixtures("alone")
def test_sharded_against_plain(tmp_path: Path):
    """Gathers, copies in and out and reshards are in one run only."""
    torch.manual_seed(0)
    models = twins(lambda: layers(2))
    models = models[0], sharded(models[1])

    check(tmp_path, infer(models, IDS))
