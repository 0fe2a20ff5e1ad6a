"""Where in the model an op runs: module paths, calls, training mode.

Global hooks, never hooks on a module (one hook on a submodule switches torch's fused attention off),
and none while dynamo compiles, else the compiled code would guard on them (notes: recorder, Q4).
"""

from __future__ import annotations

import inspect
import itertools
import json
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.nn.modules.module as torch_modules
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from opdrift.buffers import CALL, CALLS, Place
from opdrift.neutral import hide_from_dynamo
from opdrift.plugins import ModuleCall, SeesModules
from opdrift.sources import CALL_IMPL, Sources

if TYPE_CHECKING:
    from opdrift.buffers import ThreadBuffers

current_node: Final[Callable[[], Any]] = torch._C._current_autograd_node

#: Segments that wrappers put into module paths (FSDP, fairscale, torch.compile, checkpointing).
WRAPPERS: Final = frozenset(
    {"_fsdp_wrapped_module", "_fpw_module", "_orig_mod", "_checkpoint_wrapped_module"}
)
_INNER: Final = (*sorted(WRAPPERS), "module")
_WRAPPER_TYPES: Final = frozenset(
    {
        "FullyShardedDataParallel",
        "FlattenParamsWrapper",
        "OptimizedModule",
        "CheckpointWrapper",
        "DistributedDataParallel",
        "DataParallel",
    }
)
#: Wrappers whose segment is a common word, which counts as theirs only where they stand.
_PARALLEL: Final = frozenset({"DistributedDataParallel", "DataParallel"})


def clean(path: str) -> str:
    """A module or tensor path without the segments of wrappers."""
    if "_" not in path:
        return path
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def cleaner(model: Module) -> Callable[[str], str]:
    """What takes the segments of wrappers out of paths within a model, DDP's `module` too."""
    parallel = [
        f"{path}.module" if path else "module"
        for path, module in model.named_modules()
        if type(module).__name__ in _PARALLEL
    ]
    if not parallel:
        return clean

    def without(path: str) -> str:
        # the innermost first, while the paths before it are whole
        for segment in reversed(parallel):
            if path == segment or path.startswith(f"{segment}."):
                path = segment.removesuffix("module") + path[len(segment) + 1 :]
        return clean(path.removesuffix("."))

    return without


def unwrapped(module: Module) -> Module:
    """What a chain of wrappers (FSDP, torch.compile, DDP) wraps."""
    while type(module).__name__ in _WRAPPER_TYPES:
        inner = next(
            (m for name in _INNER if isinstance(m := getattr(module, name, None), Module)), None
        )
        if inner is None:
            break
        module = inner
    return module


class _Known:
    """A module, its path, and that path's number in the trace."""

    __slots__ = ("id", "path", "ref")

    def __init__(self, ident: int, path: str, ref: weakref.ref[Module]) -> None:
        self.id = ident
        self.path = path
        self.ref = ref


class Scopes:
    """Module calls of one recorder, by global forward hooks.

    Args:
        here: The buffers of the current thread; None for one whose ops are not recorded.
        sources: Where module calls come from.
        write_name: Interns a text.
        flush: Empties a full buffer.
        failed: Notes a failure of the tracer itself.
        on_root: Called at a call outside every other: (thread, module, args, kwargs).
        on_root_done: Called when it returned: (thread, module, call id, output).
    """

    def __init__(
        self,
        here: Callable[[], ThreadBuffers | None],
        sources: Sources,
        *,
        write_name: Callable[[str, int, str], None],
        flush: Callable[[ThreadBuffers], None],
        failed: Callable[[str, BaseException], None],
        on_call: Callable[[ThreadBuffers], None],
        on_root: Callable[[ThreadBuffers, Module, tuple[Any, ...], Mapping[str, Any]], None],
        on_root_done: Callable[[ThreadBuffers, Module, int, Any], None],
    ) -> None:
        self._here = here
        self._sources = sources
        self._write_name = write_name
        self._flush = flush
        self._failed = failed
        self._on_call = on_call
        self._on_root = on_root
        self._on_root_done = on_root_done
        self._known: dict[int, _Known] = {}
        self._paths: dict[tuple[str, str], int] = {}
        self._roots: dict[str, int] = {}
        self._call_ids = itertools.count(1)
        self._handles: list[RemovableHandle] = []
        self._numbers: dict[str, int] = {}
        #: integrations that follow module calls
        self.watchers: list[SeesModules] = []

    # ---- life ----------------------------------------------------------------------------------------

    def on(self) -> None:
        """Install the hooks."""
        if not self._handles:
            self._handles = [
                torch_modules.register_module_forward_pre_hook(self.enter),
                # always_call: an exception in a child must not leave the stack unbalanced
                torch_modules.register_module_forward_hook(self.leave, always_call=True),
            ]
            torch_modules._has_any_global_hook = _has_hook_of_the_program

    def off(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if not any(isinstance(owner, Scopes) for owner in _owners_of_global_hooks()):
            torch_modules._has_any_global_hook = _has_any_global_hook

    # ---- names ---------------------------------------------------------------------------------------

    def add(self, model: Module, prefix: str = "") -> None:
        """Name a module and all below it; wrappers share the path of what they wrap."""
        own = cleaner(model)
        named = [
            (".".join(part for part in (prefix, own(name)) if part), module)
            for name, module in model.named_modules()
        ]
        # the innermost module of a path gives it its type: it comes last
        kinds = {path: type(module).__name__ for path, module in named}
        for path, module in named:
            if self.path_of(module) is None:
                self._learn(module, path, kinds[path])

    def _learn(self, module: Module, path: str, kind: str) -> _Known:
        ident = id(module)
        known = _Known(
            self._path_id(path, kind),
            path,
            weakref.ref(module, lambda _: self._known.pop(ident, None)),
        )
        self._known[ident] = known
        return known

    def _path_id(self, path: str, kind: str) -> int:
        found = self._paths.get((path, kind))
        if found is None:
            found = self._paths[path, kind] = len(self._paths) + 1
            self._write_name("path", found, json.dumps({"path": path, "type": kind}))
        return found

    def path_of(self, module: Module) -> str | None:
        """The path of a known module."""
        known = self._known.get(id(module))
        return known.path if known is not None and known.ref() is module else None

    def discover(self, module: Module) -> str:
        """Name a root module that nobody announced: the first is "", later ones have their type's name."""
        inner = unwrapped(module)
        path = self.path_of(inner)
        if path is not None:  # a wrapper around a known model: torch.compile, FSDP
            self._learn(module, path, type(inner).__name__)
            return path
        prefix = ""
        if self._roots or self._known:
            name = type(module).__name__
            number = self._roots.get(name, 0)
            prefix = name if not number else f"{name}#{number}"
            self._roots[name] = number + 1
        else:
            self._roots[""] = 1
        self.add(module, prefix)
        return prefix

    # ---- hooks ---------------------------------------------------------------------------------------

    def enter(self, module: Module, args: tuple[Any, ...]) -> None:
        """A module is about to run."""
        t = self._here()
        if t is None:
            return
        known = self._known.get(id(module))
        stack = t.stack
        if stack and (known is None or id(module) == stack[0].holder):
            self._forget_interrupted(t)
        stack.append(Place(t.call, t.source, t.path, t.module, id(module)))
        t.modules += 1
        if t.paused:
            return
        try:
            if known is None or known.ref() is not module:
                known = self._meet(t, module)
            line = self._sources.of_module_call(2, t.source)
            if t.modules == 1:
                # a module that backward runs again (checkpointing) is part of what it recomputes
                if current_node() is None:
                    self._on_root(t, module, args, _keyword_arguments())
            elif known.path == t.path and known.ref is not t.module:
                t.module = known.ref  # what a wrapper wraps runs in the wrapper's call
                return
            else:
                self._on_call(t)
            t.call = self._open(t, known.id, known.path, module.training, line)
            t.source, t.path, t.module = line, known.path, known.ref
            if self.watchers:
                self._tell_entered(t, type(module).__name__, module.training)
        except Exception as error:
            self._failed("module call", error)

    def _meet(self, t: ThreadBuffers, module: Module) -> _Known:
        """A module seen for the first time: a root, or one made or called in a way that hid it."""
        if t.modules == 1:
            self.discover(module)
            return self._known[id(module)]
        name = type(module).__name__
        return self._learn(module, f"{t.path}.<{name}>" if t.path else f"<{name}>", name)

    def _open(self, t: ThreadBuffers, path_id: int, path: str, training: bool, line: int) -> int:
        call = next(self._call_ids)
        number = self._numbers.get(path, 0)
        self._numbers[path] = number + 1
        row = t.call_count
        if row == CALLS:
            self._flush(t)
            row = 0
        CALL.pack_into(
            t.calls, row * CALL.size, call, t.call, path_id, number, line, training, t.index
        )
        t.call_count = row + 1
        return call

    def leave(self, module: Module, args: tuple[Any, ...], output: Any) -> None:
        """A module returned or raised."""
        t = self._here()
        if t is None:
            return
        stack, holder, call = t.stack, id(module), t.call
        if stack and stack[-1].holder == holder:
            t.call, t.source, t.path, t.module, _ = stack.pop()
            t.modules -= 1
        elif self._is_open(t, holder):
            self._return_to(t, holder)
        else:
            return  # a hook of the program raised before ours ran
        if self.watchers:
            self._tell_returned(t.call)
        if not t.modules and not t.paused and current_node() is None:
            try:
                self._on_root_done(t, module, call, output)
            except Exception as error:
                self._failed("module return", error)

    @staticmethod
    def _is_open(t: ThreadBuffers, holder: int) -> bool:
        """Whether a call is on the stack; it nearly always lies on top."""
        stack = t.stack
        return bool(stack) and (
            stack[-1].holder == holder or any(place.holder == holder for place in stack)
        )

    def _return_to(self, t: ThreadBuffers, holder: int) -> None:
        """Take places off the stack up to and with the one that `holder` put there."""
        while True:
            place = t.stack.pop()
            t.modules -= place.is_module
            t.call, t.source, t.path, t.module = place[:4]
            if place.holder == holder:
                return

    def _forget_interrupted(self, t: ThreadBuffers) -> None:
        """Drop calls that ended without our hook: torch does not call it for a KeyboardInterrupt."""
        running = -1  # this call, which is not on the stack yet
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            running += frame.f_code is CALL_IMPL
            frame = frame.f_back
        while t.modules > max(running, 0):
            self._return_to(t, t.stack[-1].holder)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Ops inside run in `name`, below the present scope."""
        t = self._here()
        if t is None:
            yield
            return
        path = f"{t.path}.{name}" if t.path else name
        call = self._open(t, self._path_id(path, "scope"), path, training=False, line=t.source)
        t.stack.append(Place(t.call, t.source, t.path, t.module, -call))
        t.call, t.path = call, path
        if self.watchers:
            self._tell_entered(t, "scope", training=False)
        try:
            yield
        finally:
            if self._is_open(t, -call):
                self._return_to(t, -call)
                if self.watchers:
                    self._tell_returned(t.call)

    def _tell_entered(self, t: ThreadBuffers, kind: str, training: bool) -> None:
        number = self._numbers[t.path] - 1  # it counts the calls so far, this one among them
        call = ModuleCall(t.call, t.stack[-1].call, t.path, kind, number, training)
        for watcher in self.watchers:
            try:
                watcher.entered(call)
            except Exception as error:
                self._failed("a module call", error)

    def _tell_returned(self, call: int) -> None:
        for watcher in self.watchers:
            try:
                watcher.returned(call)
            except Exception as error:
                self._failed("the end of a module call", error)


hide_from_dynamo(Scopes.enter, Scopes.leave)

_has_any_global_hook: Final = torch_modules._has_any_global_hook


def _has_hook_of_the_program() -> bool:
    """As torch's `_has_any_global_hook`, hooks of recorders left out.

    torch asks it for one thing only: to warn at every call of a compiled module while there are any.
    """
    return any(not isinstance(owner, Scopes) for owner in _owners_of_global_hooks())


def _owners_of_global_hooks() -> Iterator[object]:
    """Of each process-wide module hook, the object whose method it is; None for a plain function."""
    for name in ("backward_pre", "backward", "forward", "forward_pre"):
        for hook in getattr(torch_modules, f"_global_{name}_hooks").values():
            yield getattr(hook, "__self__", None)


def _keyword_arguments() -> Mapping[str, Any]:
    """The keyword arguments of the module call whose pre-hook is running; global hooks do not get them."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not CALL_IMPL:
        frame = frame.f_back
    found = None if frame is None else frame.f_locals.get("kwargs")
    return found if isinstance(found, dict) else {}


def name_arguments(
    module: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The tensors among a forward's arguments, named by its signature: `input_ids`, `cache[0].key`."""
    names = _positional_names(unwrapped(module)) if args else ()
    for position, value in enumerate(args):
        yield from walk(names[position] if position < len(names) else f"args[{position}]", value)
    for name, value in kwargs.items():
        yield from walk(name, value)


#: What the arguments of a class's `forward` are called: `inspect` takes 50 us to find out.
_names_of_forwards: Final[WeakKeyDictionary[Any, tuple[str, ...]]] = WeakKeyDictionary()


def _positional_names(module: Module) -> tuple[str, ...]:
    """The names of a forward's positional arguments; none if it does not tell."""
    # a module of torch.jit has a forward, and its class has none that can be read
    own = None if "forward" in module.__dict__ else getattr(type(module), "forward", None)
    found = None if own is None else _names_of_forwards.get(own)
    if found is None:
        try:
            found = tuple(
                p.name
                for p in inspect.signature(module.forward).parameters.values()
                if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            )
        except (TypeError, ValueError):
            found = ()
        if isinstance(own, FunctionType):
            _names_of_forwards[own] = found
    return found


def walk(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The tensors in a structure of lists, tuples, mappings and dataclass-like objects, with their paths."""
    if isinstance(value, Tensor):
        yield name, value
    elif depth < 4:
        if isinstance(value, Mapping):
            for key, item in value.items():
                yield from walk(
                    f"{name}.{key}" if isinstance(key, str) else f"{name}[{key!r}]", item, depth + 1
                )
        elif isinstance(value, list | tuple):
            for position, item in enumerate(value):
                yield from walk(f"{name}[{position}]", item, depth + 1)
        elif hasattr(type(value), "__dataclass_fields__"):  # an fx.Proxy has every attribute
            for field in value.__dataclass_fields__:
                yield from walk(f"{name}.{field}", getattr(value, field, None), depth + 1)
