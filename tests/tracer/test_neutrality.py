"""Recording never changes the run: each case runs plain, recorded and plain, with equal bits each time.

`unchanged` (conftest.py) compares results, layouts, version counters, random state, exceptions, modes
and process-wide hooks. A case is a function without arguments; it starts from seed 0.
"""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import opdrift

CASES: list[Callable[[], Any]] = []


def case(run: Callable[[], Any]) -> Callable[[], Any]:
    """Mark a function as something that must do the same with and without recording."""
    CASES.append(run)
    return run


@case
def in_place_writes_and_views():
    a = torch.randn(4, 4)
    a.add_(1)
    a[:2].mul_(3)
    a.t_()
    return a, a[1:], a.unsqueeze(0).expand(3, 4, 4)


@case
def out_arguments():
    out = torch.empty(3)
    return (
        torch.add(torch.randn(3), torch.randn(3), out=out),
        torch.mm(torch.randn(2, 2), torch.randn(2, 2), out=torch.empty(0)),
        out,
    )


@case
def foreach_ops():
    tensors = [torch.randn(3), torch.randn(4, 2)]
    torch._foreach_add_(tensors, 1.5)
    return torch._foreach_mul(tensors, 2), torch._foreach_norm(tensors), tensors


@case
def foreach_write_to_a_saved_tensor():
    """Autograd must notice the write; under a bare dispatch mode it returns a wrong gradient instead."""
    weight = torch.ones(3, requires_grad=True)
    saved = weight.exp()
    loss = (saved * saved).sum()
    with torch.no_grad():
        torch._foreach_mul_([saved], 10.0)
    loss.backward()
    return weight.grad


@case
def fused_optimiser():
    model = nn.Linear(3, 2)
    optimiser = torch.optim.Adam(model.parameters(), fused=True)
    for _ in range(2):
        optimiser.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimiser.step()
    return list(model.parameters()), optimiser.state_dict()["state"]


@case
def results_that_are_no_tensors():
    torch._assert_async(torch.tensor(True))
    a = torch.randn(3)
    return (
        a.sum().item(),
        torch.equal(a, a),
        bool(a[0] > 0),
        a.tolist(),
        a.size(),
        a.nonzero().numel(),
    )


@case
def several_views_at_once():
    return (
        torch.randn(6).split(2),
        torch.randn(6).chunk(3),
        torch.randn(3, 2).unbind(0),
        torch.randn(2, 3).view(torch.int32),
    )


@case
def complex_numbers():
    c = torch.randn(4, dtype=torch.complex64)
    return (
        c.conj() + 1,
        c.conj().imag * 2,
        c.real,
        torch.view_as_real(c),
        c.abs(),
        c.conj(),
        torch.fft.fft(c),
    )


@case
def ops_made_of_others_on_complex_tensors():
    """A bare dispatch mode forgets to conjugate inside them: `pinv` would return wrong numbers."""
    c = torch.randn(4, 3, dtype=torch.complex64, requires_grad=True)
    inverse = torch.linalg.pinv(c)
    inverse.abs().sum().backward()
    return inverse, c.grad


@case
def every_dtype():
    names = [
        "float16",
        "bfloat16",
        "float64",
        "int8",
        "uint8",
        "int16",
        "int32",
        "int64",
        "bool",
        "complex64",
        "complex128",
        "uint16",
        "uint32",
        "uint64",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ]
    found = [getattr(torch, name) for name in names if hasattr(torch, name)]
    return [torch.randn(8).abs().to(dtype) for dtype in found]


@case
def odd_shapes():
    return (
        torch.empty(2, 2).fill_(1),
        torch.tensor(3.0),
        torch.randn(0, 4) * 2,
        torch.randn(1, 3).expand(4, 3),
        torch.randn(4).flip(0),
        torch.randn(3, 1, 2).as_strided((2, 2), (1, 1)),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last) + 1,
        torch.randn(1, 1, 1)[:, :0],
    )


@case
def uninitialised_memory_that_is_then_written():
    a, b = torch.empty(4), torch.empty_strided((2, 2), (1, 2))
    a.copy_(torch.randn(4))
    b.zero_()
    return a, b, torch.empty_like(b).copy_(b)


@case
def an_op_that_raises():
    return torch.mm(torch.randn(2, 3), torch.randn(2, 3))


@case
def an_op_that_does_not_exist_for_the_dtype():
    return torch.linalg.cholesky(torch.ones(2, 2, dtype=torch.int32))


@case
def an_error_that_the_program_catches():
    try:
        torch.randn(2).view(3)
    except RuntimeError as error:
        return str(error), torch.randn(2)
    return None


@case
def a_failing_assertion_in_backward():
    leaf = torch.randn(2, requires_grad=True)
    leaf.register_hook(lambda _: (_ for _ in ()).throw(KeyError("in a hook")))
    (leaf * 2).sum().backward()


@case
def random_ops():
    generator = torch.Generator().manual_seed(4)
    drawn = (
        functional.dropout(torch.randn(50)),
        torch.rand(3),
        torch.empty(3).normal_(),
        torch.multinomial(torch.ones(9), 4),
        torch.rand(2, generator=generator),
        torch.randperm(7),
        torch.bernoulli(torch.full((5,), 0.5)),
        functional.rrelu(torch.randn(5), training=True),
    )
    with torch.random.fork_rng():
        torch.manual_seed(9)
        inner = torch.randn(2)
    return drawn, inner, torch.randn(1), generator.get_state()


@case
def sparse_tensors():
    sparse = torch.randn(3, 3).relu().to_sparse()
    return (
        sparse,
        torch.sparse.mm(sparse, torch.randn(3, 2)),
        (sparse + sparse).coalesce(),
        sparse.to_dense(),
    )


@case
def compressed_sparse_tensors():
    rows = torch.randn(3, 3).to_sparse_csr()
    return rows, rows @ torch.randn(3, 1), rows.to_dense()


@case
def nested_tensors():
    strided = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]) * 2
    jagged = torch.nested.nested_tensor([torch.randn(2, 2), torch.randn(3, 2)], layout=torch.jagged)
    return strided, (jagged * 2).sum(), jagged.values()


@case
def quantised_tensors():
    quantised = torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)
    return quantised, quantised.dequantize(), quantised.int_repr()


@case
def mkldnn_tensors():
    return torch.randn(3, 3).to_mkldnn(), (
        torch.randn(3, 3).to_mkldnn() + torch.randn(3, 3).to_mkldnn()
    ).to_dense()


@case
def meta_tensors():
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    return model(torch.empty(4, 3, device="meta")), list(model.parameters())


@case
def fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        made = torch.zeros(3) + 1
        converted = mode.from_tensor(torch.randn(2)) * 2
    return tuple(made.shape), tuple(converted.shape), type(made).__name__


@case
def function_transforms():
    from torch.func import functionalize, grad, jvp, vmap

    return (
        vmap(lambda a: a.sin().sum())(torch.randn(3, 4)),
        grad(lambda a: (a**2).sum())(torch.randn(3)),
        jvp(lambda a: a.exp(), (torch.randn(2),), (torch.ones(2),))[1],
        jvp(lambda a: a.sgn() + 1, (torch.randn(2),), (torch.ones(2),)),
        functionalize(lambda a: a.clone().add_(1))(torch.randn(2)),
        vmap(lambda a: a + torch.randn(2), randomness="different")(torch.randn(3, 2)),
        vmap(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))(torch.randn(4, 3)),
        torch.func.functional_call(nn.Linear(2, 2), {"bias": torch.ones(2)}, torch.randn(1, 2)),
    )


class Tagged(torch.Tensor):
    """A subclass that only passes through `__torch_function__`."""


@case
def subclass_by_torch_function():
    return torch.randn(3).as_subclass(Tagged) * 2 + 1


class Wrapped(torch.Tensor):
    """A wrapper subclass: every op runs on the tensor inside."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(leaf: Any) -> Any:
            return leaf.inner if isinstance(leaf, Wrapped) else leaf

        def wrap(leaf: Any) -> Any:
            return Wrapped(leaf) if isinstance(leaf, torch.Tensor) else leaf

        tree_map = torch.utils._pytree.tree_map
        return tree_map(wrap, func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {})))


@case
def subclass_by_torch_dispatch():
    return (Wrapped(torch.randn(3)) * 2 + 1).inner


@case
def two_tensors():
    from torch.testing._internal.two_tensor import TwoTensor

    both = TwoTensor(torch.randn(3), torch.randn(3)).sin() * 2
    return both.a, both.b


@case
def a_program_with_its_own_modes():
    """The user's dispatch mode and function mode see what they would see without us."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Calls(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    with Ops(), Calls():
        result = functional.linear(torch.randn(2, 3), torch.randn(4, 3)).softmax(-1)
    return result, seen


@case
def higher_order_op():
    from torch._higher_order_ops.out_dtype import out_dtype

    ones = torch.ones(2, 2, dtype=torch.int8)
    return out_dtype(torch.ops.aten.mm.default, torch.int32, ones, ones)


@case
def checkpointed_backward():
    from torch.utils.checkpoint import checkpoint

    weight = torch.randn(3, 3, requires_grad=True)
    inputs = torch.randn(2, 3, requires_grad=True)
    result = checkpoint(
        lambda a: functional.dropout((a @ weight).sin()).sum(), inputs, use_reentrant=False
    )
    result.backward()
    return weight.grad, inputs.grad


@case
def training_steps():
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2)
    )
    optimiser = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(3):
        optimiser.zero_grad()
        loss = model(torch.randn(5, 4)).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimiser.step()
        losses.append(loss)
    return (
        losses,
        list(model.parameters()),
        list(model.buffers()),
        [p.grad for p in model.parameters()],
    )


@case
def second_derivatives():
    a = torch.randn(3, requires_grad=True)
    (first,) = torch.autograd.grad((a**3).sum(), a, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), a)
    return first, second, torch.autograd.functional.jacobian(torch.sin, torch.randn(2))


class Doubled(torch.autograd.Function):
    """A function with a backward written by hand."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a)
        return a * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2 + ctx.saved_tensors[0]


@case
def zeros_without_memory():
    """Backward of `sgn` hands out zeros that have a shape and a storage, but no memory."""
    a = torch.randn(3, requires_grad=True)
    torch.sgn(a).sum().backward()
    return a.grad, torch._efficientzerotensor(4), torch._efficientzerotensor(4) + 1


@case
def custom_autograd_function():
    a = torch.randn(3, requires_grad=True)
    Doubled.apply(a).sum().backward()
    return a.grad


@case
def tensor_hooks_and_module_hooks():
    """Hooks of the program fire as often and in the same order."""
    calls: list[str] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model[0].register_forward_pre_hook(lambda *_: calls.append("pre"))
    model[0].register_forward_hook(lambda *_: calls.append("forward"))
    model.register_full_backward_hook(lambda *_: calls.append("backward"))
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: calls.append("global"))
    a = torch.randn(1, 2, requires_grad=True)
    a.register_hook(lambda grad: calls.append("tensor") or grad * 2)
    try:
        model(a).sum().backward()
    finally:
        everywhere.remove()
    return (
        calls,
        a.grad,
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
    )


@case
def a_hook_that_raises():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("from a hook")))
    return model(torch.randn(1, 2))


@case
def a_child_whose_error_is_caught():
    class Bad(nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            raise ValueError((a + 1).sum().item())

    class Patient(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.good = Bad(), nn.Linear(2, 2)

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            try:
                self.bad(a)
            except ValueError:
                a = a * 2
            return self.good(a)

    return Patient()(torch.randn(1, 2))


@case
def inference_mode_tensors():
    with torch.inference_mode():
        a = torch.randn(3)
        b = a * 2
        a.add_(1)
        c = a[1:]
    return a, b, c


@case
def folded_linear_in_inference_mode():
    """A bare dispatch mode would run bmm where the program runs mm, with other bits."""
    layer = nn.Linear(5, 6)
    with torch.inference_mode():
        return layer(torch.randn(3, 4, 5).transpose(0, 1)), torch.randn(3, 4, 5).transpose(
            0, 1
        ) @ layer.weight.t()


@case
def composite_ops_in_inference_mode():
    layer = nn.LSTM(3, 4, batch_first=True)
    with torch.inference_mode():
        return (
            layer(torch.randn(2, 5, 3)),
            torch.einsum("bij,bjk->bik", torch.randn(2, 3, 4), torch.randn(2, 4, 5)),
            functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 4, 8)),
            functional.layer_norm(torch.randn(2, 8), (8,)),
            functional.conv2d(torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3), padding="same"),
            torch.randn(3, 4, 5) @ torch.randn(5),
        )


@case
def autocast():
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = model(torch.randn(3, 4))
    result.float().sum().backward()
    return result, [p.grad for p in model.parameters()]


@case
def transformer_fast_path():
    """One fused op per layer; a hook on a module or a function mode would split it into many."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    a = torch.randn(2, 3, 8)
    with torch.no_grad():
        return layer(a), attention(a, a, a)


@case
def attention_backends():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = torch.randn(3, 2, 4, 6, 8)
    mask = torch.randn(6, 6) > 0
    found = [functional.scaled_dot_product_attention(q, k, v, is_causal=True)]
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            found.append(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    return found, functional.scaled_dot_product_attention(q.requires_grad_(), k, v, dropout_p=0.2)


@case
def recurrent_and_convolution_layers():
    a = torch.randn(2, 3, 8, 8, requires_grad=True)
    convolved = nn.Conv2d(3, 4, 3)(a)
    pooled = functional.max_pool2d(nn.BatchNorm2d(4)(convolved), 2, return_indices=True)
    recurrent = nn.GRU(3, 4)(torch.randn(5, 2, 3))
    (pooled[0].sum() + recurrent[0].sum()).backward()
    return pooled, recurrent, a.grad


@case
def data_swapped_under_a_parameter():
    parameter = nn.Parameter(torch.randn(3))
    found = [(parameter * 2).detach()]
    parameter.data = torch.ones(3)
    found.append((parameter * 2).detach())
    parameter.data.add_(1)
    return found, parameter, parameter * 2


@case
def writes_through_numpy():
    a = torch.zeros(3)
    before = a * 1
    a.numpy()[0] = 4
    return before, a * 1, torch.from_numpy(a.numpy()).mul_(2), a


@case
def a_storage_freed_and_allocated_again():
    a = torch.randn(64)
    copied = a * 1
    a.untyped_storage().resize_(0)
    view = a.view(8, 8)
    a.untyped_storage().resize_(256)
    a.zero_()
    return copied, a * 1, view


@case
def a_freed_storage_that_stays_freed():
    """What FSDP leaves everywhere: reading such a tensor kills the process."""
    a = torch.randn(64)
    total = a.sum()
    a.untyped_storage().resize_(0)
    view = a.view(8, 8).t()
    return total, tuple(view.shape), a.untyped_storage().nbytes()


@case
def resized_and_rebound_tensors():
    a = torch.zeros(2)
    a.resize_(4).fill_(3)
    b = torch.randn(6)
    a.set_(b.untyped_storage(), 1, (2, 2), (2, 1))
    b.resize_(3)
    return a, b


@case
def parameters_that_change_identity():
    model = nn.Linear(2, 2)
    a = torch.randn(1, 2)
    found = [model(a)]
    model.weight = nn.Parameter(torch.ones(2, 2))
    found.append(model(a))
    model.load_state_dict({"weight": torch.eye(2), "bias": torch.zeros(2)}, assign=True)
    found.append(model(a))
    torch.utils.swap_tensors(model.weight, nn.Parameter(torch.full((2, 2), 3.0)))
    found.append(model(a))
    del model._parameters["bias"]
    model.register_parameter("bias", None)
    return found, model(a), list(model.state_dict().items())


@case
def deep_copies_and_files():
    model = nn.Linear(3, 3)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    size = buffer.tell()
    buffer.seek(0)
    return copy.deepcopy(model)(torch.randn(1, 3)), torch.load(buffer), size


@case
def weight_norm_and_tied_weights():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    tied = nn.Linear(3, 3)
    tied.weight = nn.Parameter(model.weight.detach())
    model(tied(torch.randn(2, 3))).sum().backward()
    return [p.grad for p in model.parameters()], tied.weight.grad


@torch.library.custom_op("opdrift_tests::doubled", mutates_args=())
def doubled(a: torch.Tensor) -> torch.Tensor:
    """An op that leaves the dispatcher: its inside is not seen."""
    return torch.from_numpy(a.numpy() * 2)


@torch.library.custom_op("opdrift_tests::bump", mutates_args=("a",))
def bump(a: torch.Tensor) -> None:
    """An op that writes into its argument."""
    a.add_(1)


@case
def ops_written_in_python():
    a = torch.randn(3)
    before = doubled(a)
    bump(a)
    return before, doubled(a), a.clone()


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch deprecates TorchScript
    SCRIPTED = torch.jit.trace(lambda a: a * 2 + 1, (torch.ones(3),))


@case
def scripted_function():
    return [SCRIPTED(torch.randn(3)) for _ in range(3)]


@case
def function_traced_by_torchscript():
    """It prints constants, which reach a mode as numbers where the ops want tensors."""
    return torch.jit.trace(lambda a: a * 2 + 1, (torch.ones(3),))(torch.randn(3))


@case
def deep_recursion():
    def deeper(depth: int, a: torch.Tensor) -> torch.Tensor:
        return a if depth == 0 else deeper(depth - 1, a + 1)

    return deeper(200, torch.randn(2))


@case
def other_threads():
    """A thread that the program starts itself does not inherit the mode, and must not suffer from it."""
    import threading

    results: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        a = torch.full((3,), 2.0)
        for _ in range(50):
            a = a * 1.01
        results[number] = nn.Sequential(nn.Identity())(a)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(3)]


@case
def data_loader():
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.arange(10.0).reshape(5, 2)), batch_size=2, shuffle=True)
    return [batch * 2 for (batch,) in loader]


Unchanged = Callable[..., opdrift.Trace]
OpNames = Callable[[opdrift.Trace], list[str]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_run_is_bit_identical_with_and_without_recording(
    case: Callable[[], Any], unchanged: Unchanged
):
    unchanged(case)


@pytest.mark.slow
def test_every_op_of_torch_is_bit_identical_forward_and_backward(tmp_path: Path):
    """On the samples that torch tests its ops with; `prod` is one of the known exceptions below."""
    program = Path(__file__).with_name("every_op.py")
    paths = os.pathsep.join(path for path in sys.path if path)

    done = subprocess.run(
        [sys.executable, program, tmp_path / "run.trace"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["differ"] == ["prod complex64", "prod float32"]
    assert (found["failures"], found["incomplete"]) == ([], None)
    assert found["samples"] > 2000


@pytest.mark.parametrize("integrity", ["off", "full"])
@pytest.mark.parametrize("kernels", ["off", "full"])
def test_training_is_bit_identical_under_every_option(
    integrity: str, kernels: str, unchanged: Unchanged
):
    unchanged(training_steps, integrity=integrity, kernels=kernels)


@pytest.mark.parametrize("case", [training_steps, an_op_that_raises, a_hook_that_raises])
def test_a_run_is_bit_identical_while_spans_are_opened(
    case: Callable[[], Any], unchanged: Unchanged
):
    """Through a tracer of the SDK, which by itself takes its ids from the program's `random`."""
    from opentelemetry.sdk.trace import TracerProvider

    from opdrift_integrations.opentelemetry import OpenTelemetryIntegration

    spans = OpenTelemetryIntegration(TracerProvider(shutdown_on_exit=False).get_tracer("test"))

    unchanged(case, integrations=[spans])


@pytest.mark.parametrize(
    "surroundings",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("meta"),
        lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    ],
    ids=["no_grad", "inference_mode", "autocast", "device", "anomaly"],
)
def test_a_recorder_may_be_opened_inside_any_mode(
    surroundings: Callable[[], Any], unchanged: Unchanged
):
    """What the tracer itself computes must not fall under the program's modes."""
    with surroundings():
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
        unchanged(lambda: model(torch.randn(3, 4)), model=model)


def test_another_default_dtype_does_not_reach_the_tracer(unchanged: Unchanged):
    torch.set_default_dtype(torch.float64)
    try:
        unchanged(
            lambda: (
                torch.randn(3) * 2,
                torch.randn(2, 3, dtype=torch.bfloat16).t() + 1,
                torch.rand(2).half(),
            )
        )
    finally:
        torch.set_default_dtype(torch.float32)


def test_nothing_is_kept_alive_by_being_recorded(tmp_path: Path):
    """Tensors, their memory, graphs and models die when the program lets them go."""
    with opdrift.record(tmp_path / "run.trace"):
        model = nn.Linear(3, 3)
        result = model(torch.randn(2, 3))
        references = [
            weakref.ref(each) for each in (model, model.weight, result, result.untyped_storage())
        ]
        del model, result
        gc.collect()
        died = [reference() is None for reference in references]

    assert died == [True] * 4


def test_the_comparison_can_fail(unchanged: Unchanged):
    """A run that is not reproducible is told from one that is, or the tests above would prove nothing."""
    bits = iter((0.0, 0.0, 0.0, -0.0))

    with pytest.raises(AssertionError):
        unchanged(lambda: torch.tensor(next(bits)))


def test_a_model_keeps_its_parameters_hooks_and_attributes(unchanged: Unchanged):
    """Naming the model fingerprints its parameters; nothing may stick to it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    inputs = torch.randn(3, 4)
    start = copy.deepcopy(model.state_dict())

    def state() -> dict[str, Any]:
        modules = {
            name: (sorted(vars(m)), m.training, *map(len, (m._forward_hooks, m._forward_pre_hooks)))
            for name, m in model.named_modules()
        }
        tensors = {
            name: (id(t), t.data_ptr(), t.requires_grad, sorted(vars(t)))
            for name, t in model.named_parameters()
        }
        return {"modules": modules, "tensors": tensors}

    def run() -> Any:
        model.load_state_dict(start)
        model.zero_grad()
        model(inputs).sum().backward()
        return (
            state(),
            list(model.buffers()),
            [p.grad.clone() for p in model.parameters() if p.grad is not None],
        )

    unchanged(run, model=model)


def test_files_written_while_recording_are_byte_identical(unchanged: Unchanged):
    """`torch.save` must not carry anything of the tracer's into a checkpoint."""

    def run() -> bytes:
        model = nn.Linear(3, 3)
        model(torch.randn(1, 3))
        buffer = io.BytesIO()
        torch.save(model, buffer)
        return buffer.getvalue()

    unchanged(run)


def test_linear_in_inference_mode_is_not_taken_apart_into_another_kernel(
    unchanged: Unchanged, op_names: OpNames
):
    """Under inference_mode composite ops arrive whole, and decompose as in the plain run."""
    names = op_names(unchanged(folded_linear_in_inference_mode))

    assert names.count("aten.linear.default") == 1
    assert names.count("aten.matmul.default") == 1
    assert "aten.bmm.default" not in names


def test_the_fused_transformer_layer_stays_one_op(unchanged: Unchanged, op_names: OpNames):
    names = op_names(unchanged(transformer_fast_path))

    assert names.count("aten._transformer_encoder_layer_fwd.default") == 1
    assert names.count("aten._native_multi_head_attention.default") == 1


def test_a_foreach_write_to_a_saved_tensor_still_stops_backward(tmp_path: Path):
    """Without care the gradient would be wrong, in silence."""
    with (
        opdrift.record(tmp_path / "run.trace"),
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        foreach_write_to_a_saved_tensor()


class TestWhatNoDispatchModeCanKeep:
    """torch itself behaves otherwise under any dispatch mode in these places (docs/tricky-cases.md).

    Each test fails when torch stops doing so, or when the tracer has learnt to prevent it.
    """

    def test_an_op_written_in_python_counts_its_inner_writes_no_more(self, tmp_path: Path):
        """Once instead of twice: autograd's check, which asks whether the count moved, still works."""

        def version_after_bump() -> int:
            a = torch.zeros(3)
            bump(a)
            return a._version

        assert version_after_bump() == 2
        with opdrift.record(tmp_path / "run.trace"):
            assert version_after_bump() == 1

    def test_backward_of_prod_divides_in_another_order(self, tmp_path: Path):
        def run() -> torch.Tensor:
            torch.manual_seed(0)
            a = torch.randn(5, 7, requires_grad=True)
            (a.prod(1) * torch.arange(1.0, 6.0)).sum().backward()
            assert a.grad is not None
            return a.grad

        plain = run()
        with opdrift.record(tmp_path / "run.trace"):
            recorded = run()

        assert not torch.equal(recorded, plain)
        torch.testing.assert_close(recorded, plain)

    def test_a_mask_that_enlarges_the_scores_is_accepted(self, tmp_path: Path):
        def run() -> torch.Tensor:
            q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=torch.randn(2, 5))

        with pytest.raises(RuntimeError, match="broadcast shape"):
            run()
        with opdrift.record(tmp_path / "run.trace"):
            assert run().shape == (1, 2, 2, 8)
