"""What of a run ran compiled: calls of generated code, ops that compiled functions ran one by one, compilations."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from opdrift.records import COMPILED, CompiledGraph
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace


@dataclass(frozen=True, slots=True)
class RegionCall:
    """One call of a compiled graph.

    Attributes:
        op: Index of the op that stands for it; it follows those that ran inside.
        inside: Indices of the ops that its code called: torch's own kernels.
    """

    op: int
    graph: CompiledGraph
    inside: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compilation:
    """A frame that dynamo compiled during the run.

    Attributes:
        ident: dynamo's id: frame / version.
        reason: Why it was compiled again: the guard that failed, in dynamo's words; None for the first time.
        failed: Why it stays eager, in dynamo's words; None if it was compiled.
    """

    ident: str
    function: str
    file: str
    line: int
    reason: str | None
    failed: str | None


@dataclass(slots=True)
class CompiledFunction:
    """What a function ran compiled.

    Attributes:
        function: As the program calls it; None for a backward pass whose forward was not recorded.
        file: Where it is defined; `line` is its first for generated code, else the line of the ops.
        calls: Calls of its generated code; none if its ops ran one by one.
        module: Class of the module in whose call it first ran; empty outside of every module.
        ops: Ops that its code called, those inside of generated code included.
    """

    function: str | None
    file: str | None
    line: int | None
    module: str = ""
    calls: list[RegionCall] = field(default_factory=list)
    ops: list[int] = field(default_factory=list)

    @property
    def graphs(self) -> tuple[CompiledGraph, ...]:
        """Its graphs, in the order of their first calls."""
        return tuple(dict.fromkeys(call.graph for call in self.calls))

    @property
    def backend(self) -> str | None:
        """`inductor`; None where the ops ran one by one, which says that it is another."""
        return "inductor" if self.calls else None


class Regions:
    """The compiled regions of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    @cached_property
    def calls(self) -> tuple[RegionCall, ...]:
        """Calls of generated code, in order."""
        return tuple(
            RegionCall(op, graph, self._inside(op)) for op, graph in zip(*self._found, strict=True)
        )

    @cached_property
    def at(self) -> dict[int, RegionCall]:
        """The calls by the op that stands for each."""
        return {call.op: call for call in self.calls}

    @cached_property
    def around(self) -> dict[int, RegionCall]:
        """The call that each op ran inside of."""
        return {op: call for call in self.calls for op in call.inside}

    def written(self, op: int) -> list[int]:
        """What a call of generated code left in tensors that it was given; none for other ops."""
        ops = self._trace.ops
        return ops.outputs[op][: int(ops.mutated[op])].tolist() if op in self.at else []

    @cached_property
    def functions(self) -> tuple[CompiledFunction, ...]:
        """By function what ran compiled, in the order of the first op."""
        found: dict[tuple[str | None, str | None], CompiledFunction] = {}
        for call in self.calls:
            graph = call.graph
            each = found.setdefault(
                (graph.function, graph.file),
                CompiledFunction(
                    graph.function, graph.file, graph.line, self._trace.op(call.op).call.type
                ),
            )
            each.calls.append(call)
            each.ops.extend(call.inside)
        for op in self._one_by_one.tolist():
            ran = self._trace.op(op)
            source = ran.source
            key = (source.function, source.file) if source is not None else (None, None)
            line = source.line if source is not None else None
            found.setdefault(key, CompiledFunction(key[0], key[1], line, ran.call.type)).ops.append(
                op
            )
        return tuple(found.values())

    @cached_property
    def compilations(self) -> tuple[Compilation, ...]:
        """What dynamo compiled while the run was recorded."""
        return tuple(
            Compilation(
                ident=str(fields.get("id")),
                function=str(fields.get("function")),
                file=str(fields.get("file")),
                line=int(fields.get("line") or 0),
                reason=fields.get("reason"),
                failed=fields.get("failed"),
            )
            for fields in (m.fields for m in self._trace.marks if m.kind == "compilation")
        )

    @cached_property
    def _found(self) -> tuple[list[int], list[CompiledGraph]]:
        """The ops that stand for calls of generated code, and their graphs."""
        signatures = self._trace.ops.signature
        graphs = {
            int(s): region
            for s in np.unique(signatures)
            if (region := self._trace.op_info(int(s)).region) is not None
        }
        ops = np.flatnonzero(np.isin(signatures, np.array(sorted(graphs), np.int64))).tolist()
        return ops, [graphs[int(signatures[op])] for op in ops]

    @cached_property
    def _one_by_one(self) -> Ints:
        """Ops of compiled functions that no generated code called."""
        flagged = (self._trace.ops.flags & COMPILED) != 0
        flagged[np.array([*self.at, *self.around], np.int64)] = False
        return np.flatnonzero(flagged)

    def _inside(self, op: int) -> tuple[int, ...]:
        """The ops before it that began after it did, on its thread."""
        ops = self._trace.ops
        found = []
        for each in range(op - 1, -1, -1):
            if ops.thread[each] == ops.thread[op]:
                if ops.start[each] < ops.start[op]:
                    break
                found.append(each)
        return tuple(reversed(found))
