"""What the tests of recording share: run something plain, recorded and plain, and hold the three together."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

import opdrift

ROOT = Path(__file__).parents[2]

#: The registries of process-wide module hooks; a recorder may use them only while it is open.
GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_module_registration_hooks",
    "_global_parameter_registration_hooks",
    "_global_buffer_registration_hooks",
)


@dataclass(frozen=True)
class Outcome:
    """What a run gave and left behind, not yet looked at (looking runs ops)."""

    result: Any
    error: BaseException | None
    random_state: torch.Tensor
    modes: dict[str, Any]


def outcome_of(run: Callable[[], Any]) -> Outcome:
    """Run from a fixed seed; keep the result or the exception, and the process's state after it."""
    torch.manual_seed(0)
    try:
        result, error = run(), None
    except Exception as raised:  # the comparison is about whatever the run raises
        result, error = None, raised
    modes = {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "functions": torch._C._len_torch_function_stack(),
    }
    return Outcome(result, error, torch.get_rng_state(), modes)


def facts_of(outcome: Outcome) -> dict[str, Any]:
    """Everything about an outcome that must be equal, as comparable values."""
    error = outcome.error
    return {
        "result": [_facts(leaf) for leaf in pytree.tree_leaves(outcome.result)],
        "error": None if error is None else (type(error), str(error), error.args),
        "random state": outcome.random_state.numpy().tobytes(),
        "modes": outcome.modes,
    }


def _facts(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf).__name__, repr(leaf)
    return {
        "type": type(leaf).__name__,
        "shape": tuple(leaf.shape) if not leaf.is_nested else leaf.dim(),
        "dtype": leaf.dtype,
        "device": str(leaf.device),
        "layout": leaf.layout,
        "requires_grad": leaf.requires_grad,
        "is_leaf": leaf.is_leaf,
        "grad_fn": type(leaf.grad_fn).__name__,
        "inference": leaf.is_inference(),
        "version": None if leaf.is_inference() else leaf._version,
        "flags": (leaf.is_conj(), leaf.is_neg()),
        "content": [_strided_facts(part) for part in _parts(leaf.detach())],
    }


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The strided tensors that a tensor is made of."""
    if tensor.is_nested:
        yield from tensor.unbind()
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout == torch.sparse_csr:
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout == torch._mkldnn:  # type: ignore[attr-defined]
        yield tensor.to_dense()
    elif tensor.is_quantized:
        yield from (
            tensor.int_repr(),
            torch.tensor(tensor.q_scale()),
            torch.tensor(tensor.q_zero_point()),
        )
    else:
        yield tensor


def _strided_facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
    if tensor.device.type == "meta" or type(tensor) is not torch.Tensor:
        return layout
    dense = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return (*layout, dense.view(torch.uint8).numpy().tobytes())


def global_hooks() -> dict[str, list[int]]:
    """Per registry, the ids of the process-wide module hooks."""
    return {
        name: [id(hook) for hook in getattr(torch_module, name).values() if callable(hook)]
        for name in GLOBAL_HOOKS
    }


@pytest.fixture
def unchanged(tmp_path: Path) -> Callable[..., opdrift.Trace]:
    """Check that `run` does the same plain, recorded and plain again; give back the trace.

    Everything in `facts_of` must be equal, process-wide hooks and modes must be as before, and the
    tracer must not have failed anywhere.
    """

    def check(run: Callable[[], Any], **options: Any) -> opdrift.Trace:
        hooks = global_hooks()
        before = outcome_of(run)
        with opdrift.record(tmp_path / "run.trace", overwrite=True, **options):
            recorded = outcome_of(run)
        after = outcome_of(run)

        expected = facts_of(before)
        assert facts_of(recorded) == expected
        assert facts_of(after) == expected
        assert global_hooks() == hooks
        assert torch._C._len_torch_dispatch_stack() == 0
        trace = opdrift.load(tmp_path / "run.trace")
        assert trace.incomplete is None
        assert trace.footer is not None
        assert trace.footer.failures == ()
        return trace

    return check


@pytest.fixture
def op_names() -> Callable[[opdrift.Trace], list[str]]:
    """The names of a trace's ops in order, such as `aten.mm.default`."""

    def names(trace: opdrift.Trace) -> list[str]:
        return [trace.op(index).name for index in range(len(trace.ops))]

    return names


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a program in a process of its own, in an empty folder, with opdrift importable."""

    def run(program: str, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                sys.executable,
                "-W",
                "error",
                "-c",
                prologue() + textwrap.dedent(program),
                *arguments,
            ],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=timeout,
            check=False,
        )

    return run


def prologue() -> str:
    """First line of a program in a process of its own: the source roots, as pytest's `pythonpath` has them."""
    return f"import sys; sys.path[:0] = {[str(ROOT / 'tracer'), str(ROOT / 'integrations')]!r}\n"
