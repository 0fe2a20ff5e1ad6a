"""What of a run ran compiled, for the reports on one trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from opdrift.causes.compiled import in_words, kernel_name, why
from opdrift.picks import Picks
from opdrift.records import CompiledGraph, Pick
from opdrift.regions import Compilation, CompiledFunction, Regions
from opdrift.render.page import Page
from opdrift.render.words import name, plural, readable
from opdrift.tracefile.reader import Trace

#: Functions, graphs of one, ops of one, and compilations that are listed; JSON has all.
_ROWS: Final = 12
_KERNELS: Final = 4


def compiled_section(page: Page, trace: Trace) -> None:
    """Which functions ran compiled, what torch's own kernels they called, and what was compiled again."""
    regions = Regions(trace)
    if not regions.functions and not regions.compilations:
        return
    page.heading("compiled")
    picks = Picks(trace)
    for function in regions.functions[:_ROWS]:
        page.line(readable(in_words(function)), indent=2, hang=2)
        for graph in function.graphs[:_ROWS]:
            page.line(_graph_line(graph, function), "quiet", indent=4, hang=2)
        for line in _extern(trace, function, picks):
            page.line(line, "quiet", indent=4, hang=2)
    _rest(page, len(regions.functions))
    again = [c for c in regions.compilations if c.reason or c.failed]
    for compilation in again[:_ROWS]:
        page.line(readable(why(compilation)), "bad", indent=2, hang=2)
    _rest(page, len(again))


def region_lines(trace: Trace, op: int) -> list[str]:
    """Of an op that stands for a compiled region, what that is and what ran inside."""
    regions = Regions(trace)
    call = regions.at.get(op)
    if call is None:
        return []
    function = next(f for f in regions.functions if call in f.calls)
    lines = [readable(in_words(function)), _graph_line(call.graph, function)]
    if call.graph.key:
        lines.append(
            f"inductor's key {name(call.graph.key)}: equal keys mean the same generated code"
        )
    inside = [
        f"{seq} {name(trace.op(i).name)}"
        for i, seq in zip(call.inside, _seqs(trace, call.inside), strict=True)
    ]
    if inside:
        more = f" and {len(inside) - _ROWS} more" if len(inside) > _ROWS else ""
        lines.append(f"inside: op {', '.join(inside[:_ROWS])}{more}")
    return lines


def _rest(page: Page, number: int) -> None:
    if number > _ROWS:
        page.line(f"and {number - _ROWS} more", "quiet", indent=2)


def _graph_line(graph: CompiledGraph, function: CompiledFunction) -> str:
    calls = sum(call.graph == graph for call in function.calls)
    words = [f"graph {graph.graph}, {graph.direction}: {plural(calls, 'call')}"]
    if graph.kernels:
        shown = ", ".join(name(kernel_name(k)) for k in graph.kernels[:_KERNELS])
        more = f" and {len(graph.kernels) - _KERNELS} more" if len(graph.kernels) > _KERNELS else ""
        words.append(f"{plural(len(graph.kernels), 'generated kernel')} ({shown}{more})")
    if graph.dynamic:
        words.append("sizes are arguments")
    if graph.cudagraphs:
        words.append("replayed as a CUDA graph")
    elif graph.cudagraphs_refused:
        words.append(f"no CUDA graph: {readable(graph.cudagraphs_refused)}")
    return ", ".join(words)


def _extern(trace: Trace, function: CompiledFunction, picks: Picks) -> Iterator[str]:
    """The ops that its code called, with the kernels that they ran as far as those are known."""
    found: Counter[tuple[str, str]] = Counter()
    chosen = picks.among(function.ops)
    for op in function.ops:
        info = trace.op_info(int(trace.ops.signature[op]))
        if info.view:
            continue
        op_name = info.name
        found[op_name, _kernel(chosen.get(op), op_name)] += 1
    for (op_name, kernel), times in found.most_common(_ROWS):
        yield f"{name(op_name)} x{times}{kernel}"
    if len(found) > _ROWS:
        yield f"and {plural(len(found) - _ROWS, 'other op')}"


def _kernel(pick: Pick | None, op_name: str) -> str:
    if pick is None:
        return ""
    ran = pick.backend or pick.name.removeprefix(f"{op_name}: ")
    library = f" [{name(pick.library)}]" if pick.library else ""
    return f": {name(ran)}{library}"


def compiled_object(trace: Trace) -> dict[str, Any] | None:
    """The same as JSON, whole, with ops given by their numbers; None for a run without compiled code."""
    regions = Regions(trace)
    if not regions.functions and not regions.compilations:
        return None
    return {
        "functions": [_function_object(trace, each) for each in regions.functions],
        "compilations": [_compilation_object(each) for each in regions.compilations],
    }


def _function_object(trace: Trace, function: CompiledFunction) -> dict[str, Any]:
    return {
        "function": function.function,
        "file": function.file,
        "line": function.line,
        "backend": function.backend,
        "graphs": [asdict(graph) for graph in function.graphs],
        "calls": [
            {
                "op": _seqs(trace, [call.op])[0],
                "graph": function.graphs.index(call.graph),
                "inside": _seqs(trace, call.inside),
            }
            for call in function.calls
        ],
        "ops": _seqs(trace, function.ops),
    }


def _seqs(trace: Trace, ops: Sequence[int]) -> list[int]:
    return [int(trace.ops.seq[op]) for op in ops]


def _compilation_object(compilation: Compilation) -> dict[str, Any]:
    found = asdict(compilation)
    return {"id": found.pop("ident"), **found}
