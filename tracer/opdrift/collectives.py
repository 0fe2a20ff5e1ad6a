"""Write down each collective before it is issued: a mismatch between ranks may end the process in it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from opdrift.neutral import Work, silent
from opdrift.plans import Plan

if TYPE_CHECKING:
    from types import FrameType

    from opdrift.sources import Sources
    from opdrift.values import Values

#: Of a c10d op: what it is called in reports, the position of what a rank gives, and of what it gets (notes:
#: integrity 9); None for nothing.
_ARGUMENTS: Final[dict[str, tuple[str, int | None, int | None]]] = {
    "allreduce_": ("all_reduce", 0, 0),
    "allreduce_coalesced_": ("all_reduce", 0, 0),
    "broadcast_": ("broadcast", 0, 0),
    "reduce_": ("reduce", 0, 0),
    "allgather_": ("all_gather", 1, 0),
    "_allgather_base_": ("all_gather", 1, 0),
    "allgather_coalesced_": ("all_gather", 1, 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 1, 0),
    "reduce_scatter_": ("reduce_scatter", 1, 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1, 0),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, 0),
    "gather_": ("gather", 1, 0),
    "scatter_": ("scatter", 1, 0),
    "alltoall_": ("all_to_all", 1, 0),
    "alltoall_base_": ("all_to_all", 1, 0),
    "barrier": ("barrier", None, None),
    "monitored_barrier_": ("barrier", None, None),
    "send": ("send", 0, None),
    "recv_": ("recv", None, 0),
    "recv_any_source_": ("recv", None, 0),
}
#: The same of `_c10d_functional`; what these return is no argument.
_FUNCTIONAL: Final = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
#: What one rank hands to another as it is; no integration and no sum checks these.
_PASSED: Final = frozenset({"send", "gather", "scatter", "all_to_all"})
#: Names of a reduction, as `torch.distributed.ReduceOp` has them.
_REDUCTIONS: Final = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
#: Seconds between two looks at a collective that is under way.
_PATIENCE: Final = 50e-6
#: More tensors than these are summed up: their number of elements counts.
_MOST_TENSORS: Final = 8


_resolve: Final[Callable[[str], Any]] = torch._C._distributed_c10d._resolve_process_group  # type: ignore[assignment]


class Collectives:
    """Announces the collectives of one recording.

    Args:
        announce: Writes a mark that is on disk when this returns: (thread buffers, kind, fields).
        sources: Source lines.
        values: Reads what is handed to another rank.
        synchronised: Everything that a program may leave under way is waited for where it is issued.
    """

    def __init__(
        self,
        announce: Callable[[Any, str, Mapping[str, Any]], None],
        sources: Sources,
        values: Values,
        *,
        synchronised: bool,
    ) -> None:
        self._announce = announce
        self._sources = sources
        self._values = values
        self.synchronised = synchronised
        #: names of the arguments by op
        self._names: dict[int, tuple[str, ...]] = {}

    def issue(
        self,
        t: Any,
        plan: Plan,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        frame: FrameType | None,
    ) -> None:
        """Announce a collective that is about to run; `t.seq` is its number already.

        Args:
            t: The buffers of the current thread.
            plan: Its overload.
            args: Its positional arguments.
            kwargs: Its other arguments.
            frame: Whatever called it: what the program asked for, and where, is read there.
        """
        space, base = plan.func._schema.name.split("::")
        names = self._names.get(plan.id)
        if names is None:  # asked for once: torch makes them anew each time
            names = self._names[plan.id] = tuple(a.name for a in plan.func._schema.arguments)
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        found = (
            _of_c10d(base, args, named, frame)
            if space == "c10d"
            else _functional(base, args, named)
        )
        if found is not None:
            sent = self._sent(found["what"], base, args, named, len(found["ranks"]))
            fields = {"op": plan.name, **found, **sent, "source": self._sources.in_words(frame)}
            self._announce(t, "collective", fields)

    def _sent(
        self, what: str, base: str, args: Sequence[Any], named: Mapping[str, Any], ranks: int
    ) -> Mapping[str, Any]:
        """Digests of what goes to each rank as it is right now, whatever wrote it, for whoever receives it to be held to."""
        if what not in _PASSED or self._values.integrity == "off":
            return {}
        position = _ARGUMENTS[base][1] if base in _ARGUMENTS else 0  # of a functional one
        tensors: list[Tensor] = []
        if position is not None and position < len(args):
            _collect(args[position], tensors)
        parts = [
            part
            for tensor in tensors
            for part in self._handed(tensor, _sizes(what, tensor, len(tensors), named, ranks))
        ]
        return {
            "sent": [None if part is None else [f"{part[0]:016x}", *part[1:]] for part in parts]
        }

    def _handed(
        self, tensor: Tensor, sizes: Sequence[int]
    ) -> Sequence[tuple[int, int, int] | None]:
        """Digest, components and their code of stretches of a tensor of the host; None if it must not be read."""
        values = self._values
        if values.is_elsewhere(tensor) or values.is_pending(tensor) or not values.can_read(tensor):
            return [None] * len(sizes)
        with silent():
            return values.engine.digests(tensor, sizes)

    def after(self, plan: Plan, out: Any) -> None:
        """Let a functional collective arrive before the program goes on, in a synchronised run.

        A second wait for one does nothing: the first takes it off torch's list.
        """
        if self.synchronised and plan.deferred and isinstance(out, Tensor):
            with silent(), contextlib.suppress(RuntimeError):  # the program's own wait raises it
                torch.ops._c10d_functional.wait_tensor(out)

    def settled(self, work: Work, *, readable: bool) -> bool:
        """In a synchronised run, wait for a collective that the program may leave under way; else False.

        Args:
            work: The collective's.
            readable: `is_completed()` tells when its output is there. To wait for such a one twice may hang on gloo;
                of the others a second wait writes the same result again (notes: integrity I1).
        """
        if not self.synchronised:
            return False
        if not readable:
            return waited(work)
        while not work.is_completed():
            time.sleep(_PATIENCE)
        return True


def waited(work: Work) -> bool:
    """Whether a collective came to a good end; what ended it the program is told when it waits itself."""
    try:
        work.wait()
    except RuntimeError:
        return False
    return True


def takes_part(plan: Plan) -> bool:
    """Whether an op talks to other ranks, and is announced."""
    if not hasattr(plan.func, "_schema"):
        return False
    space, base = plan.func._schema.name.split("::")
    if space == "c10d":
        return base in _ARGUMENTS
    return space == "_c10d_functional" and _plain(base) in _FUNCTIONAL


def _plain(base: str) -> str:
    """`all_reduce` of `all_reduce_`, `all_reduce_coalesced`, `all_gather_into_tensor_out`."""
    return base.removesuffix("_").removesuffix("_out").removesuffix("_coalesced")


def _of_c10d(
    base: str, args: Sequence[Any], named: Mapping[str, Any], frame: FrameType | None
) -> dict[str, Any]:
    what, gives, gets = _ARGUMENTS[base]
    group = torch._C._distributed_c10d.ProcessGroup.unbox(named["process_group"])
    ranks = torch.distributed.get_process_group_ranks(group)
    found: dict[str, Any] = {
        "what": what,
        "group": group.group_name,
        "ranks": ranks,
        "given": _tensors(args, gives),
        "got": _tensors(args, gets),
        "reduction": None,
        "root": _global(named.get("root_rank"), ranks),
        "waited": named.get("async_op") is False,
    }
    if "reduce_op" in named:
        found |= _reduction_of(frame)
    if what in ("send", "recv"):
        found["peer"] = named.get("dst", named.get("src"))
        found["tag"] = named.get("tag")
    return found


def _functional(base: str, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any] | None:
    name = named.get("group_name")
    if not isinstance(name, str):
        return None
    group = _resolve(name)
    reduction = named.get("reduce_op")
    ranks = torch.distributed.get_process_group_ranks(group)
    return {
        "what": _FUNCTIONAL[_plain(base)],
        "group": name,
        "ranks": ranks,
        "given": _tensors(args, 0),
        "got": None,
        "reduction": str(reduction).upper() if reduction is not None else None,
        "root": _global(named.get("src"), ranks),
        "waited": False,
    }


def _global(root: Any, ranks: Sequence[int]) -> int | None:
    """The global rank of a group's n-th rank, by which its roots are named."""
    return ranks[root] if isinstance(root, int) and 0 <= root < len(ranks) else None


def _tensors(args: Sequence[Any], position: int | None) -> list[list[Any]] | None:
    """[dtype, elements] of each tensor of an argument; of many, of each dtype."""
    if position is None or position >= len(args):
        return None
    tensors: list[Tensor] = []
    _collect(args[position], tensors)
    found: list[list[Any]] = [[str(t.dtype).removeprefix("torch."), t.numel()] for t in tensors]
    if len(found) <= _MOST_TENSORS:
        return found
    total: dict[str, int] = {}
    for dtype, elements in found:
        total[dtype] = total.get(dtype, 0) + elements
    return [[dtype, elements] for dtype, elements in total.items()]


def _collect(argument: Any, found: list[Tensor]) -> None:
    if isinstance(argument, Tensor):
        found.append(argument)
    elif isinstance(argument, list | tuple):
        for item in argument:
            _collect(item, found)


def _sizes(
    what: str, tensor: Tensor, tensors: int, named: Mapping[str, Any], ranks: int
) -> list[int]:
    """Elements of a tensor that go to each rank; all of them where it goes to one, or is one of many."""
    if what != "all_to_all" or tensors != 1:
        return [tensor.numel()]
    splits = named.get("input_split_sizes") or ()
    if not splits:
        return [tensor.numel() // ranks] * ranks
    row = tensor.numel() // max(1, tensor.shape[0])
    return [int(split) * row for split in splits]


def _reduction_of(frame: FrameType | None) -> dict[str, Any]:
    """The reduction that `torch.distributed` was asked for, and its factor; None where C++ asked (DDP), which tells nobody.

    The dispatcher hands over a boxed `ReduceOp` that cannot be read (notes: integrity I5).
    """
    if frame is None:
        return {"reduction": None}
    names = frame.f_locals
    options = names.get("opts")
    if type(names) is dict:
        names.clear()  # up to Python 3.12 it is a copy, which would keep tensors alive
    asked = getattr(options, "reduceOp", None)
    if asked is None:
        return {"reduction": None}
    reduce_op = torch.distributed.ReduceOp
    name = next((name for name in _REDUCTIONS if asked == getattr(reduce_op, name)), None)
    return {"reduction": name} if name is not None else _with_factor(asked)


def _with_factor(asked: Any) -> dict[str, Any]:
    """A reduction that multiplies what each rank gives: by a number, or by a tensor, which is not read."""
    kind, factor = asked.__getstate__()
    plain = isinstance(factor, int | float)
    return {"reduction": str(kind).rpartition(".")[2], "factor": factor if plain else None}
