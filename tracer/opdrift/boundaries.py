"""Record each call of code that inductor generated as one op: what it was given, and what came out.

Such code runs kernels that the dispatcher does not see. Its extern calls (products, attention, random numbers) are
ops like any other; the op of the region follows them, and is the maker of what no op made
(docs/decisions/0012-compiled-regions.md).
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from time import perf_counter_ns as now
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from opdrift.compilations import plain_name
from opdrift.memory import Use
from opdrift.mode import current_node, is_grad_enabled, sequence_number
from opdrift.neutral import hide_from_dynamo, silent
from opdrift.plans import Plan
from opdrift.records import COMPILED, COMPILED_REGION, GRAD_ENABLED, RAISED, CompiledGraph
from opdrift.scopes import unwrapped
from opdrift.sources import CALL_IMPL
from opdrift.tracefile.graphs import facts_of

if TYPE_CHECKING:
    from opdrift.batches.tracking import Batches
    from opdrift.buffers import ThreadBuffers
    from opdrift.mode import RecordingMode
    from opdrift.sources import Sources
    from opdrift.values import Values

#: The module of inductor that calls generated code.
GRAPHS: Final = "torch._inductor.output_code"
#: Folders of torch whose frames stand between a compiled function and its generated code.
_MACHINERY: Final = tuple(
    os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), folder) + os.sep
    for folder in ("_dynamo", "_functorch", "_inductor", "autograd")
)
_PACKAGE: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep
#: In the source that inductor writes: calls of torch's own kernels, and the kernels that it generated.
_EXTERN: Final = re.compile(r"\bextern_kernels\.(\w+)\(|\btorch\.ops\.(\w+\.\w+)\.\w+\(")
_KERNEL: Final = re.compile(r"^(\w+) = async_compile\.\w+\(", re.MULTILINE)
#: So many kernels of a region are listed.
_MAX_KERNELS: Final = 200

#: Held while a recorder joins or leaves those that are told of each call.
_CHAIN: Final = threading.Lock()

#: Ends the record of a call: takes what it returned, or None if it raised.
Ended = Callable[[Sequence[Any] | None], None]


class RegionPlan(Plan):
    """The plan of a compiled graph, which stands for the overload of an op."""

    __slots__ = ()

    func: CompiledGraph

    def __init__(self, func: CompiledGraph, ident: int) -> None:
        super().__init__(func, ident)
        self.name = f"{COMPILED_REGION}.{func.direction}"
        self.bumps = True  # AOTAutograd counts the versions of what the region writes

    def describe(self) -> str:
        """As of any op, and the facts of the graph."""
        facts = facts_of(self.func)
        return json.dumps({"name": self.name, "is": ["higher_order"], "region": facts})


class Boundaries:
    """The compiled regions of one recorder.

    Args:
        mode: What records ops.
        values: Identity and content of tensors.
        sources: Source lines.
        here: The buffers of the current thread; None for one whose ops are not recorded.
        failed: Notes a failure of the tracer itself.
        before: Called before a region that is recorded.
        batches: Follows the batch, if the run was recorded with `batch=`.
    """

    def __init__(
        self,
        mode: RecordingMode,
        values: Values,
        sources: Sources,
        *,
        here: Callable[[], ThreadBuffers | None],
        before: Callable[[], None],
        failed: Callable[[str, BaseException], None],
        batches: Batches | None,
    ) -> None:
        self._mode = mode
        self._values = values
        self._sources = sources
        self._here = here
        self._before = before
        self._failed = failed
        self._batches = batches
        #: of each graph by its id: the graph, and its plan
        self._plans: dict[int, tuple[weakref.ref[Any], RegionPlan]] = {}
        #: inductor's number of a graph -> the function that it was compiled from
        self._functions: dict[int | None, CodeType] = {}

    def begin(self, graph: Any, inputs: Sequence[Any]) -> Ended | None:
        """A graph is about to be called; None if the call is not recorded."""
        t = self._here()
        if t is None or t.paused or not self._mode.recording:
            return None
        try:
            tensors = [each for each in inputs if isinstance(each, Tensor)]
            if any(
                type(each).__torch_dispatch__ is not Tensor.__torch_dispatch__ for each in tensors
            ):
                return None  # fake tensors: torch only asks for shapes
            self._before()
            with silent():
                return self._begin(t, graph, inputs, tensors)
        except Exception as error:
            self._failed("a compiled region", error)
            return None

    def _begin(
        self, t: ThreadBuffers, graph: Any, inputs: Sequence[Any], tensors: Sequence[Tensor]
    ) -> Ended:
        frame = sys._getframe(2)
        plan = self._plan(t, graph, inputs, frame)
        source = self._sources.find(frame, t.source)
        use = Use(plan, tensors, {})
        ids, signature, flags = self._mode.read(t, use)
        flags |= COMPILED
        if is_grad_enabled():
            flags |= GRAD_ENABLED
        node = current_node()
        phase = 0 if node is None else 1
        number = sequence_number() if node is None else node._sequence_nr() & 0x7FFFFFFFFFFFFFFF
        # the call empties its list of inputs, and the others must not be kept alive
        places = sorted(graph.mutated_input_idxs)
        written = [inputs[i] for i in places if isinstance(inputs[i], Tensor)]
        storages = frozenset(map(self._values.storage_id, tensors))
        follows_batch = self._batches is not None and self._batches.carry(tensors)
        started = now()

        def end(out: Sequence[Any] | None) -> None:
            """The call is over."""
            took = now() - started
            ins, mutated = len(ids), 0
            try:
                with silent():
                    if out is not None:
                        self._values.written(t, written, ids, use=Use(plan, written, {}))
                        mutated = len(ids) - ins
                        results = [each for each in out if isinstance(each, Tensor)]
                        self._results(t, plan, results, storages, ids)
                        if follows_batch and self._batches is not None:
                            self._batches.lose([*written, *results], written)
                    raised = RAISED if out is None else 0
                    self._mode.commit(
                        t, ids, ins, mutated, self._mode.next_seq(t), started, took, number, 0,
                        signature, source, phase, flags | raised,
                    )  # fmt: skip
            except Exception as error:
                self._failed("a compiled region", error)

        return end

    def _results(
        self,
        t: ThreadBuffers,
        plan: RegionPlan,
        results: Sequence[Tensor],
        given: frozenset[int],
        ids: list[int],
    ) -> None:
        """Register what a region returned.

        A kernel may have written into what an extern call made: what was not given to the region counts as made here.
        """
        numbers = map(self._values.storage_id, results)
        made = [
            r
            for r, storage in zip(results, numbers, strict=True)
            if storage and storage not in given
        ]
        self._values.handed_over(t, made)
        for tensor in results:
            self._values.output(t, tensor, ids, plan)

    def _plan(
        self, t: ThreadBuffers, graph: Any, inputs: Sequence[Any], frame: FrameType
    ) -> RegionPlan:
        ident = id(graph)
        known = self._plans.get(ident)
        if known is not None and known[0]() is graph:
            return known[1]
        facts = self._facts(t, graph, inputs, frame)
        plan = self._mode.interning.add_plan(facts, RegionPlan)
        assert isinstance(plan, RegionPlan)
        plans = self._plans
        plans[ident] = weakref.ref(graph, lambda _: plans.pop(ident, None) and None), plan
        return plan

    def _facts(
        self, t: ThreadBuffers, graph: Any, inputs: Sequence[Any], frame: FrameType
    ) -> CompiledGraph:
        options = graph.fx_kwargs
        number = options.get("graph_id")
        backward = bool(options.get("is_backward"))
        if backward:
            code = self._functions.get(number)
        else:
            code = compiled_function(frame)
            if code is not None:
                self._functions[number] = code
        text = graph.source_code
        inference = bool(options.get("is_inference"))
        return CompiledGraph(
            direction="backward" if backward else "inference" if inference else "forward",
            function=code and _function_name(t, code),
            file=code and code.co_filename,
            line=code and code.co_firstlineno,
            graph=number,
            key=graph._fx_graph_cache_key,
            kernels=tuple(_KERNEL.findall(text)[:_MAX_KERNELS]),
            extern=tuple((a or b) for a, b in _EXTERN.findall(text)[:_MAX_KERNELS]),
            dynamic=any(not isinstance(each, Tensor) for each in inputs),
            cudagraphs=bool(options.get("cudagraphs")),
            cudagraphs_refused=graph.disabled_cudagraphs_reason or None,
        )


def compiled_function(frame: FrameType | None) -> CodeType | None:
    """The function whose code dynamo replaced: the first one outside the machinery that calls generated code."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_MACHINERY, _PACKAGE)):
            return frame.f_code
        frame = frame.f_back
    return None


def _function_name(t: ThreadBuffers, code: CodeType) -> str:
    """What the program calls a function; a module whose call was compiled whole has none of its own."""
    module = t.module() if t.module is not None else None
    if code.co_filename == CALL_IMPL.co_filename and module is not None:
        return f"{type(unwrapped(module)).__name__}.__call__"
    return plain_name(code.co_qualname)


def why_none_is_seen() -> str | None:
    """Why calls of generated code cannot be recorded although inductor is loaded: its graphs are not where they were."""
    if "torch._inductor.compile_fx" in sys.modules and GRAPHS not in sys.modules:
        return f"this torch has no {GRAPHS}: calls of code that torch.compile generated are not in this trace"
    return None


def around_generated_code(
    begin: Callable[[Any, Sequence[Any]], Ended | None],
) -> Callable[[], None]:
    """Call `begin` before each call of code that inductor generated, and what that returns after it.

    Inductor must be loaded. Returns what undoes it.
    """
    from torch._inductor.output_code import (  # noqa: PLC0415  # as in `neutral.around_compilation`
        CompiledFxGraph,
    )

    undone = False

    def watched(graph: CompiledFxGraph, inputs: Sequence[Any]) -> Any:
        call = watched.inner  # type: ignore[attr-defined]
        ended = None if undone else begin(graph, inputs)
        if ended is None:
            return call(graph, inputs)
        try:
            out = call(graph, inputs)
        except BaseException:
            ended(None)
            raise
        ended(out)
        return out

    def undo() -> None:
        nonlocal undone
        undone = True
        with _CHAIN:
            inner = watched.inner  # type: ignore[attr-defined]
            outer: Any = CompiledFxGraph.__call__
            if outer is watched:
                CompiledFxGraph.__call__ = inner  # type: ignore[method-assign]
                return
            # recorders of several threads end in any order: one that began later may call this one
            while (deeper := getattr(outer, "inner", None)) not in (None, watched):
                outer = deeper
            if deeper is watched:
                outer.inner = inner

    hide_from_dynamo(watched)
    with _CHAIN:
        watched.inner = CompiledFxGraph.__call__  # type: ignore[attr-defined]
        CompiledFxGraph.__call__ = watched  # type: ignore[method-assign,assignment]
    return undo
