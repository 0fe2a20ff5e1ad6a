"""Undo what a dispatch mode by itself changes in a run.

Measured on torch 2.13 (notes: recorder Q8, kernels 3.4, integrity I2). Each repair asks for the private
function it needs once, so that a torch without it runs unrepaired rather than not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final, Protocol

import torch

from opdrift.plans import Plan

_force_keys: Final = getattr(torch._C, "_ForceDispatchKeyGuard", None)
_include_keys: Final = getattr(torch._C, "_dispatch_tls_local_include_set", None)
_exclude_keys: Final = getattr(torch._C, "_dispatch_tls_local_exclude_set", None)
_set_excluded: Final = getattr(torch._C, "_SetExcludeDispatchKeyGuard", None)
#: The thread's dispatch keys as they were where the program called the op.
_as_on_entry: Final = getattr(torch._C, "_RestorePythonTLSSnapshot", None)
_AUTOCAST: Final = (
    ("cpu", torch._C.DispatchKey.AutocastCPU),
    ("cuda", torch._C.DispatchKey.AutocastCUDA),
)
_CONJUGATE: Final = torch._C.DispatchKey.Conjugate
_NEGATIVE: Final = torch._C.DispatchKey.Negative
#: No op of any mode, of a subclass or of an outer recorder is dispatched inside.
silent: Final[Callable[[], AbstractContextManager[None]]] = torch._C._DisableTorchDispatch

DispatchKeys = tuple[Any, Any]


def dispatch_keys() -> DispatchKeys | None:
    """The program's own dispatch keys; to be taken before the mode is entered."""
    if _force_keys is None or _include_keys is None or _exclude_keys is None:
        return None
    return _include_keys(), _exclude_keys()


def run(
    plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], keys: DispatchKeys | None
) -> Any:
    """Run an op that needs a repair as it would have run without the mode.

    - Ops on complex tensors run with the keys that resolve conjugate views: under a mode an op that is made
      of others forgets them, and `torch.linalg.pinv` returns wrong numbers in silence.
    - Composite ops (seen whole under inference_mode) decompose with the program's keys: `linear` keeps `mm`.
      Those that return views or write decompose with ADInplaceOrView instead (with all keys torch refuses them as
      differentiable views): a bare mode makes `x.T` a tensor of its own, whose writes `x` does not count.
    - Ops that autograd knows as one and that multiply inside run with autocast as the program has it: below an op it
      is always off, so that `affine_grid` would multiply in float32 and not in bfloat16.
    - Foreach ops bump their tensors' version counters, else autograd returns a wrong gradient in silence.
    - c10d ops run with ADInplaceOrView, so that version counters move as they do without a mode.
    """
    if _set_excluded is not None and (has_complex(args) or has_complex(kwargs.values())):
        with _set_excluded(_CONJUGATE, False), _set_excluded(_NEGATIVE, False):
            return _run(plan, args, kwargs, keys)
    return _run(plan, args, kwargs, keys)


def has_complex(arguments: Iterable[Any]) -> bool:
    """Whether a complex tensor is among the arguments."""
    for a in arguments:
        if isinstance(a, torch.Tensor):
            if a.is_complex():
                return True
        elif isinstance(a, list | tuple) and has_complex(a):
            return True
    return False


def _run(
    plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], keys: DispatchKeys | None
) -> Any:
    if plan.composite and keys is not None and torch.is_inference_mode_enabled():
        with _force_keys(*keys):  # type: ignore[misc]
            return plan.func(*args, **kwargs)
    if plan.casts_inside and (keys_of_autocast := _autocast_in_use()):
        with ExitStack() as stack:
            for key in keys_of_autocast:
                stack.enter_context(_set_excluded(key, False))  # type: ignore[misc]
            return plan.call(*args, **kwargs)
    aliasing = plan.aliasing and torch.is_inference_mode_enabled()
    if (plan.collective or aliasing) and _set_excluded is not None:
        with _set_excluded(torch._C.DispatchKey.ADInplaceOrView, False):
            return plan.call(*args, **kwargs)
    if not plan.lists_written:
        return plan.call(*args, **kwargs)
    before = [
        (tensor, tensor._version)
        for tensor in written_tensors(plan, args, kwargs)
        if not tensor.is_inference()
    ]
    out = plan.call(*args, **kwargs)
    for tensor, version in before:
        if tensor._version == version:
            torch.autograd.graph.increment_version(tensor)
    return out


def _autocast_in_use() -> list[Any]:
    """The keys of the autocasts that are on where the program called the op whose handler is running."""
    if _as_on_entry is None or _set_excluded is None:
        return []
    try:
        with _as_on_entry():
            return [key for device, key in _AUTOCAST if torch.is_autocast_enabled(device)]
    except RuntimeError:  # torch kept no state on entry
        return []


def numbers_as_tensors(
    plan: Plan, args: Sequence[Any], error: BaseException
) -> tuple[Any, ...] | None:
    """The arguments with which an op would have run that refused its own; None if it did run.

    torch hands a tensor that wraps a Python number to a mode as that number, and then takes a number
    for a tensor in arithmetic only. `zeros + 1` of autograd's zeros without memory ends so, in `expand`.
    """
    if type(error) is not RuntimeError or "Expected a value of type 'Tensor'" not in str(error):
        return None
    wanted = plan.func._schema.arguments
    found = tuple(
        _wrapped(a) if str(wanted[i].type) == "Tensor" and type(a) in _NUMBERS else a
        for i, a in enumerate(args)
    )
    return found if any(a is not b for a, b in zip(args, found, strict=True)) else None


_NUMBERS: Final = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}


def _wrapped(number: complex) -> torch.Tensor:
    with silent(), torch._C.DisableTorchFunction():
        return torch.tensor(number, dtype=_NUMBERS[type(number)], device="cpu")


def needs_repair(plan: Plan) -> bool:
    """Whether `run` does anything for this op, whatever its arguments, that a plain call does not."""
    return (
        plan.composite
        or plan.aliasing
        or plan.casts_inside
        or plan.collective
        or plan.lists_written
    )


def written_tensors(
    plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The tensors that an op writes into, lists flattened."""
    found: list[torch.Tensor] = []
    for position, name in plan.writes:
        argument = (
            args[position] if position is not None and position < len(args) else kwargs.get(name)
        )
        _collect(argument, found)
    return found


def filled_parts(plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """What an op fills of the tensors that it writes into: all of them, but for FSDP2's copy before a gather.

    That one hands out the whole buffer and fills the slice of its own rank; the rest is unwritten until the gather
    (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, `all_gather_copy_in_cpu`).
    """
    written = written_tensors(plan, args, kwargs)
    if plan.fills_own_slice and not kwargs:
        size, rank = args[3:5]
        return [tensor.narrow(0, size * rank, size) for tensor in written]
    return written


def _collect(argument: Any, found: list[torch.Tensor]) -> None:
    if isinstance(argument, torch.Tensor):
        found.append(argument)
    elif isinstance(argument, list | tuple):
        for item in argument:
            _collect(item, found)


class Work(Protocol):
    """A c10d Work."""

    def wait(self) -> Any:
        """Block until the outputs may be read."""

    def is_completed(self) -> bool:
        """Whether the collective is done; on gloo that is not enough to read a reduce_scatter's output."""
        ...


def work_of(out: Any) -> Work | None:
    """The Work among a collective's results."""
    for item in out if isinstance(out, tuple | list) else (out,):
        if isinstance(item, torch.ScriptObject):
            return torch._C._distributed_c10d.Work.unbox(item)
    return None


def is_synchronous(plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the program waits for this collective at once: it then passes async_op=False (integrity I3)."""
    index = plan.async_index
    if index is not None and index < len(args):
        return args[index] is False
    return kwargs.get("async_op") is False


def around_compilation(off: Callable[[str], None], on: Callable[[str], None]) -> Callable[[], None]:
    """Call `off` before dynamo compiles and `on` after it, with its id; dynamo must be loaded. Returns what undoes it."""
    import torch._dynamo.callback as callbacks  # noqa: PLC0415  # 0.8 s where the program does not compile

    handler = callbacks.callback_handler
    forget = handler.clear
    undone = False

    def start(args: Any) -> None:
        off(str(args.compile_id))

    def end(args: Any) -> None:
        on(str(args.compile_id))

    def register() -> None:
        handler.register_start_callback(start)
        handler.register_end_callback(end)

    def clear() -> None:
        """What torch._dynamo.reset() calls: it forgets callbacks, and we must not be forgotten."""
        forget()
        if not undone:
            register()

    def undo() -> None:
        nonlocal undone
        undone = True
        if start in handler.start_callbacks:
            handler.remove_start_callback(start)
        if end in handler.end_callbacks:
            handler.remove_end_callback(end)
        if (
            handler.clear is clear
        ):  # else a recorder that began later still needs its own, which calls this
            handler.clear = forget  # type: ignore[method-assign]

    register()
    handler.clear = clear  # type: ignore[method-assign]
    return undo


def hide_from_dynamo(*functions: Callable[..., Any]) -> None:
    """Let dynamo skip these functions without wrapping them, which would import it (0.8 s) at the first op."""
    try:
        from torch._C._dynamo.eval_frame import (  # noqa: PLC0415
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    except ImportError:
        return
    for function in functions:
        set_code_exec_strategy(
            function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        )


class Unseen:
    """Ops inside run below every mode and subclass, and without a graph.

    Entered by hand: `contextlib.contextmanager` takes longer than the three that it would hold.
    """

    __slots__ = ("_guards", "_with_graph")

    def __enter__(self) -> None:
        self._guards = silent(), torch._C.DisableTorchFunction()
        for guard in self._guards:
            guard.__enter__()
        self._with_graph = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch._C._set_grad_enabled(self._with_graph)
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)
