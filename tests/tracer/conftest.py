"""What the tests of recording share: run something plain, recorded and plain, and hold the three together."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
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
    warnings: list[tuple[type[Warning], str]]
    random_states: tuple[Any, ...]
    modes: dict[str, Any]


def outcome_of(run: Callable[[], Any]) -> Outcome:
    """Run from fixed seeds; keep the result or the exception, and the process's state after it."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    result, error = None, None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.set_warn_always(True)
        try:
            result = run()
        except Exception as raised:  # the comparison is about whatever the run raises
            error = raised
        finally:
            torch.set_warn_always(False)
    modes = {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "functions": torch._C._len_torch_function_stack(),
    }
    random_states = (torch.get_rng_state(), random.getstate(), numpy.random.get_state())
    return Outcome(
        result, error, [(w.category, str(w.message)) for w in told], random_states, modes
    )


def facts_of(outcome: Outcome, *, but: Collection[str] = ()) -> dict[str, Any]:
    """Everything about an outcome that must be equal, as comparable values; of tensors all `but` these."""
    generator, *others = outcome.random_states
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at sparse and nested tensors warns, too
        result = [_facts(leaf, but) for leaf in pytree.tree_leaves(outcome.result)]
    return {
        "result": result,
        "error": _error_facts(outcome.error),
        "warnings": outcome.warnings,
        "random states": (generator.numpy().tobytes(), repr(others)),
        "modes": outcome.modes,
    }


def _error_facts(error: BaseException | None) -> Any:
    if error is None:
        return None
    chain = (_error_facts(error.__cause__), _error_facts(error.__context__))
    return type(error), str(error), error.args, getattr(error, "__notes__", None), chain


def _facts(leaf: Any, but: Collection[str]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf).__name__, repr(leaf)
    facts = {
        "type": type(leaf).__name__,
        "shape": tuple(leaf.shape) if not leaf.is_nested else leaf.dim(),
        "dtype": leaf.dtype,
        "device": str(leaf.device),
        "layout": leaf.layout,
        "requires_grad": leaf.requires_grad,
        "is_leaf": leaf.is_leaf,
        "graph": _graph(leaf.grad_fn),
        "attributes": sorted(vars(leaf)),
        "inference": leaf.is_inference(),
        "version": None if leaf.is_inference() else leaf._version,
        "flags": (leaf.is_conj(), leaf.is_neg(), leaf._is_zerotensor()),
        "content": [_strided_facts(part) for part in _parts(leaf.detach())],
    }
    return {name: fact for name, fact in facts.items() if name not in but}


def _graph(node: Any, depth: int = 8) -> Any:
    """The names of the autograd nodes behind a tensor."""
    if node is None or depth == 0:
        return None
    return node.name(), [_graph(following, depth - 1) for following, _ in node.next_functions]


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
    if tensor._is_zerotensor():
        tensor = tensor.clone()
    dense = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return (*layout, dense.view(torch.uint8).numpy().tobytes())


def process_wide() -> dict[str, Any]:
    """What a recorder may change in the process while it is open, and must put back."""
    hooks = {
        name: [id(hook) for hook in getattr(torch_module, name).values() if callable(hook)]
        for name in GLOBAL_HOOKS
    }
    dynamo = sys.modules.get("torch._dynamo.callback")
    inductor = sys.modules.get("torch._inductor.output_code")
    handler = None if dynamo is None else dynamo.callback_handler
    return hooks | {
        "hook check": torch_module._has_any_global_hook,
        "importers": list(map(id, sys.meta_path)),
        "filters": list(warnings.filters),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "compiled code": inductor and inductor.CompiledFxGraph.__call__,
        "compile callbacks": handler and (*handler.start_callbacks, *handler.end_callbacks),
    }


@pytest.fixture
def unchanged(tmp_path: Path) -> Callable[..., opdrift.Trace]:
    """Check that `run` does the same plain, recorded and plain again; give back the trace.

    Everything in `facts_of` must be equal, process-wide hooks and modes must be as before, and the
    tracer must not have failed anywhere. `but` names facts of tensors that do not count.
    """

    def check(
        run: Callable[[], Any], *, but: Collection[str] = (), **options: Any
    ) -> opdrift.Trace:
        outcome_of(run)  # the first run of all imports things, with warnings of their own
        process = process_wide()
        before = outcome_of(run)
        with opdrift.record(tmp_path / "run.trace", overwrite=True, **options):
            recorded = outcome_of(run)
        after = outcome_of(run)

        expected = facts_of(before, but=but)
        assert facts_of(recorded, but=but) == expected
        assert facts_of(after, but=but) == expected
        assert process_wide() == process
        trace = opdrift.load(tmp_path / "run.trace")
        assert trace.incomplete is None
        assert trace.footer is not None
        assert trace.footer.failures == ()
        return trace

    return check


@pytest.fixture
def restored() -> Iterator[None]:
    """Check that the test leaves the process as it found it."""
    process = process_wide()
    yield
    assert process_wide() == process


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
