"""What torch.compile changed: generated code that computes something else, writes, draws, or rounds otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from opdrift.case import Case, Side
from opdrift.causes.evidence import SIDES, Evidence, cause, counted, some, tally
from opdrift.compare import number
from opdrift.origins.compiled import Gap, gap_of, gaps
from opdrift.origins.kinds import draws
from opdrift.records import COMPILED, Cause, Sides
from opdrift.regions import Compilation, CompiledFunction, RegionCall
from opdrift.sizes import measure
from opdrift.tokens import base

_STAGES: Final = (
    "Run it with torch.compile(..., backend='aot_eager'): if that agrees with eager code, inductor's code is at fault, and"
    " `python -m torch._inductor.compiler_bisector run python SCRIPT` (one that exits with 1 where the results differ) names"
    " the pass"
)
_PRECISION: Final = "; torch._inductor.config.emulate_precision_casts = True rounds in 16 bits where eager code does"
_RANDOM: Final = "Set torch._inductor.config.fallback_random = True to draw as eager code does, or pass the random numbers in."
_OTHER_KEYS: Final = "the generated code is another one in each run, by inductor's cache key"
_OTHER_CODE: Final = (
    "Look whether a setting of the model (an activation, an epsilon) was another one when this code was compiled. "
    + _STAGES
    + "."
)
_NOT_COMPARED: Final = (
    "Compare what the compiled function returned yourself, or let a module return it, or keep it until the end of the"
    " recording, in both runs: then it is compared."
)
#: Characters of a generated kernel's name that are shown.
_NAME: Final = 56
#: Functions, and compilations, that are told one by one.
_TOLD: Final = 3


def compile_(e: Evidence) -> Cause | None:
    """What code that torch.compile made has to do with it; not where the runs compute in other types."""
    gap = region_gap(e)
    if gap is not None and gap.narrowed:
        return None
    return _astray(e) or _written(e) or _other_code_before(e) or _compiled_on_one_side(e)


def _astray(e: Evidence) -> Cause | None:
    """A region returns what its inputs do not explain."""
    gap = region_gap(e)
    if gap is None or not gap.is_material or not e.size.material:
        return None
    side = (e.case.left, e.case.right)[gap.number]
    random = _drawn(e, gap)
    same = "equal bit for bit" if gap.before == 0 else f"at most {number(gap.before)} apart"
    if not gap.known:
        same += ", as far as the other run has them"
    sizes = f"its results are {number(gap.after)} apart, rounding explains {number(gap.limit)}"
    if gap.nonfinite:
        sizes = "its results have other NaN or infinite elements"
    what = called(gap.call)
    evidence = [f"its inputs are {same}; {sizes}", *_both(e, gap), *random]
    if random:
        return cause(
            "compile",
            "certain",
            f"{what} draws other random numbers than the other run from the same seed",
            evidence,
            _RANDOM,
        )
    last = _last_agreeing(e.case, side, gap)
    return cause(
        "compile",
        "likely" if gap.known else "possible",
        f"{what} ({_lines(gap.call)}), compiled by inductor, returns something else in the {SIDES[gap.number]} run",
        [*evidence, *last, *recompiled(e.case)],
        _STAGES + (_PRECISION if "float16" in "".join(filter(None, _types(e))) else "") + ".",
    )


def region_gap(e: Evidence) -> Gap | None:
    """The compiled region that an origin is, or that is a part of it, beside what the other run has for it."""
    return gap_of(e.origin, e.shared.once(gaps))


def stands_for(e: Evidence) -> tuple[list[int], list[int]]:
    """The ops of each run that an origin is about: of a compiled region all that it stands for, in both runs."""
    gap = region_gap(e)
    if gap is None or not gap.others:
        return e.ops_of(0), e.ops_of(1)
    ops = [*gap.call.inside, gap.call.op], list(gap.others)
    return ops if gap.number == 0 else (ops[1], ops[0])


def _types(e: Evidence) -> tuple[str | None, str | None]:
    types = e.dtypes()
    return types.left, types.right


def _both(e: Evidence, gap: Gap) -> Iterator[str]:
    """What each run ran there."""
    calls: list[RegionCall | None] = [None, None]
    calls[gap.number] = gap.call
    other = (e.origin.op.left, e.origin.op.right)[1 - gap.number]
    theirs = (e.case.left, e.case.right)[1 - gap.number]
    calls[1 - gap.number] = None if other is None else theirs.regions.at.get(other)
    for name, call in zip(SIDES, calls, strict=True):
        if call is not None:
            yield f"{name}: {_described(call)}"
    if calls[0] is not None and calls[1] is not None:
        same = calls[0].graph.key == calls[1].graph.key
        yield ("both ran the same generated code, by inductor's cache key" if same else _OTHER_KEYS)
    elif gap.others:
        kinds = [f"{n} x{k}" if k > 1 else n for n, k in tally(_short(theirs, gap.others))]
        yield f"{SIDES[1 - gap.number]}: {counted(len(gap.others), 'op')} instead: {some(kinds, 6)}"


def _short(side: Side, ops: tuple[int, ...]) -> list[str]:
    return [base(side.name(op)) for op in ops if not side.contents.tokens.view[op]]


def _described(call: RegionCall) -> str:
    graph = call.graph
    parts = [f"{called(call)} at {_lines(call)}, graph {graph.graph} ({graph.direction})"]
    if graph.kernels:
        parts.append(
            f"{counted(len(graph.kernels), 'generated kernel')}: {some([kernel_name(k) for k in graph.kernels])}"
        )
    if graph.extern:
        kinds = [f"{n} x{k}" if k > 1 else n for n, k in tally(graph.extern)]
        parts.append(f"calls of torch's own: {some(kinds)}")
    if graph.cudagraphs:
        parts.append("replayed as a CUDA graph")
    return "; ".join(parts)


def _last_agreeing(case: Case, side: Side, gap: Gap) -> Iterator[str]:
    """The last op inside of the region that still agrees: the fault lies behind it."""
    partner = (case.pairing.right_of, case.pairing.left_of)[gap.number]
    ops = (case.left.trace.ops, case.right.trace.ops)
    agreed: int | None = None
    for op in gap.call.inside:
        other = int(partner[op])
        if other < 0 or not len(side.trace.ops.outputs[op]):
            continue
        left, right = (op, other) if gap.number == 0 else (other, op)
        values = int(ops[0].outputs[left][-1]), int(ops[1].outputs[right][-1])
        size = measure(case, *values)
        if size is None or size.relative is None or size.relative > gap.before + gap.limit:
            yield f"{SIDES[gap.number]}: {side.place(op)}, inside of it, is the first that disagrees"
            break
        agreed = op
    if agreed is not None:
        yield f"{SIDES[gap.number]}: {side.place(agreed)}, inside of it, still agrees"


def _drawn(e: Evidence, gap: Gap) -> list[str]:
    """Ops of both runs that draw random numbers for the region's results."""
    side = (e.case.left, e.case.right)[gap.number]
    other = (e.case.left, e.case.right)[1 - gap.number]
    found = [(SIDES[gap.number], side, op) for op in gap.call.inside if draws(side, op)]
    found += [(SIDES[1 - gap.number], other, op) for op in gap.others if draws(other, op)]
    return [f"{name}: {s.place(op)} draws random numbers" for name, s, op in found[:_TOLD]]


# ---- writes, and whole runs ------------------------------------------------------------------------------


def _written(e: Evidence) -> Cause | None:
    """A region wrote this in one run, and ops, or nothing, in the other."""
    if not e.size.material:
        return None
    writers: list[RegionCall | None] = []
    for side, value in (
        (e.case.left, e.origin.values.left),
        (e.case.right, e.origin.values.right),
    ):
        writers.append(None if value is None else _writer(side, value))
    if (writers[0] is None) == (writers[1] is None):
        return None
    number_ = 0 if writers[0] is not None else 1
    call = writers[number_]
    assert call is not None
    name, other = SIDES[number_], SIDES[1 - number_]
    what = _names(e, number_)
    theirs = [e.sides[1 - number_][1].place(op) for op in e.ops_of(1 - number_)]
    return cause(
        "compile",
        "likely",
        f"{what} was written by code that torch.compile generated in the {name} run, and not in the {other} one",
        [
            f"{name}: {_described(call)}",
            f"{other}: {theirs[-1]}" if theirs else f"{other}: nothing of the kind wrote it",
        ],
        "Run this part eager in both runs (an optimizer's step without torch.compile); if the runs then agree, compare"
        " backend='aot_eager' and 'inductor'.",
    )


def other_code(e: Evidence) -> Sides[RegionCall] | None:
    """The calls of generated code that a pair of ops stands for, or ran inside of, if that is another code in each run."""
    op = e.origin.op
    if op.left is None or op.right is None:
        return None
    found = [
        regions.at.get(each) or regions.around.get(each)
        for regions, each in ((e.case.left.regions, op.left), (e.case.right.regions, op.right))
    ]
    left, right = found
    if left is None or right is None or left.graph.key == right.graph.key:
        return None
    return Sides(left, right)


def _other_code_before(e: Evidence) -> Cause | None:
    """An op inside of a region makes something else of memory that generated kernels wrote since it was last read."""
    calls, op = other_code(e), e.origin.op
    if calls is None or e.origin.story != "op" or e.origin.settings or not e.size.material:
        return None
    left, right = e.case.left, e.case.right
    assert op.left is not None
    assert op.right is not None
    if op.left not in calls.left.inside or op.right not in calls.right.inside:
        return None
    written = (left, op.left), (right, op.right)
    if not all(
        any(
            not side.leaves.of(int(v)) or _is_generated(side, int(v))
            for v in side.trace.ops.inputs[i]
        )
        for side, i in written
    ):
        return None
    what = called(calls.right)
    ahead = [
        each for each in calls.left.inside if each < op.left and not left.contents.tokens.view[each]
    ]
    before = f"between {left.place(ahead[-1])} and" if ahead else "before"
    return cause(
        "compile",
        "likely",
        f"the code that torch.compile generated for {what} ({_lines(calls.right)}) is another one in each run, and what it"
        f" wrote ahead of {right.name(op.right)} differs",
        [
            f"it differs {before} {left.place(op.left)}: generated kernels write into memory that this op reads, unseen",
            *(
                f"{name}: {_described(call)}"
                for name, call in zip(SIDES, (calls.left, calls.right), strict=True)
            ),
            _OTHER_KEYS,
            *recompiled(e.case),
        ],
        "Look for what the compiled function depends on beside its inputs: a setting of the model or of inductor that was"
        " another one when it was compiled. " + _STAGES + ".",
    )


def _is_generated(side: Side, value: int) -> bool:
    return any(leaf.when == "generated" for leaf in side.leaves.of(value))


def _writer(side: Side, value: int) -> RegionCall | None:
    """The call of a region that wrote a value into a tensor that it was given."""
    states = side.contents.states
    writer = int(states.writer[states.of[value]])
    return side.regions.at[writer] if value in side.regions.written(writer) else None


def _names(e: Evidence, number_: int) -> str:
    side = (e.case.left, e.case.right)[number_]
    value = (e.origin.values.left, e.origin.values.right)[number_]
    leaf = None if value is None else side.leaves.of_storage(value)
    named = [*e.origin.names, *([leaf.name] if leaf is not None and leaf.name else [])]
    return named[0] if named else "a tensor"


def _compiled_on_one_side(e: Evidence) -> Cause | None:
    compiled = e.shared.compiled
    if compiled.left == compiled.right or e.origin.kind in ("leaf", "hidden-write"):
        return None
    name = "left" if compiled.left else "right"
    if compiled_side(e) is None and e.origin.row >= 0:
        return None
    if not e.size.material:
        return None
    random = [
        (label, s, op)
        for n, (label, s, _) in enumerate(e.sides)
        for op in e.ops_of(n)
        if draws(s, op)
    ]
    evidence = [*ran_compiled(e), f"{_other(name)}: eager"]
    evidence += [f"{label}: {s.place(op)} draws random numbers" for label, s, op in random[:_TOLD]]
    evidence += recompiled(e.case)
    summary = (
        "compiled and eager code draw different random numbers from the same seed"
        if random
        else f"the {name} run is compiled, the other is not"
    )
    remedy = _RANDOM if random else _STAGES + "."
    return cause("compile", "certain" if random else "likely", summary, evidence, remedy)


def _other(name: str) -> str:
    return "right" if name == "left" else "left"


def compiled_side(e: Evidence) -> str | None:
    """The one run that is compiled, if its op here, or the one that reads the result, was called from that code."""
    compiled = e.shared.compiled
    if compiled.left == compiled.right:
        return None
    number_ = 0 if compiled.left else 1
    name, side, _ = e.sides[number_]
    reader = (e.consumer().left, e.consumer().right)[number_]
    ops = [*e.ops_of(number_), *([] if reader is None else [reader])]
    return name if any(side.trace.ops.flags[op] & COMPILED for op in ops) else None


# ---- words -------------------------------------------------------------------------------------------


def called(call: RegionCall) -> str:
    """What a call of a region is: `Net.forward`, `the backward pass of Net.forward`."""
    name = call.graph.function or "a compiled function"
    return f"the backward pass of {name}" if call.graph.direction == "backward" else name


def _lines(call: RegionCall) -> str:
    file = (call.graph.file or "?").replace("\\", "/").rpartition("/")[2]
    return f"{file}:{call.graph.line}"


def ran_compiled(e: Evidence) -> Iterator[str]:
    """What ran compiled in each run, and how well its results agree."""
    found = e.shared.once(gaps)
    for number_, name in enumerate(SIDES):
        functions = (e.case.left, e.case.right)[number_].regions.functions
        for each in functions[:_TOLD]:
            own = [g for g in found if g.number == number_ and _of(g, each)]
            # gradients that are zero but for rounding have nothing in common
            ahead = [g.after for g in own if g.call.graph.direction != "backward"]
            agree = max(ahead or [g.after for g in own], default=None)
            size = f"; its results agree to {number(agree)}" if agree is not None else ""
            if each in uncompared(e, number_):
                size = "; its results were not compared: the other run has none of their kind"
            yield f"{name}: {in_words(each)}{size}"
        if len(functions) > _TOLD:
            yield f"{name}: and {len(functions) - _TOLD} more functions ran compiled"


def uncompared(e: Evidence, number_: int) -> list[CompiledFunction]:
    """Functions of a run whose generated code returned nothing that could be held against the other run."""
    found = e.shared.once(gaps)
    partner = (e.case.pairing.right_of, e.case.pairing.left_of)[number_]
    return [
        each
        for each in (e.case.left, e.case.right)[number_].regions.functions
        if each.calls
        and not any(g.number == number_ and _of(g, each) for g in found)
        and all(partner[call.op] < 0 for call in each.calls)
    ]


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why a difference that rounding explains may still come of other code, and what to do about it."""

    why: str
    evidence: tuple[str, ...]
    remedy: str


def doubt(e: Evidence) -> Doubt | None:
    """What speaks against mere rounding where code is compiled: bounds of what is not seen are wide."""
    if other_code(e) is not None:
        return Doubt("the generated code is another one", (_OTHER_KEYS,), _OTHER_CODE)
    name = compiled_side(e)
    if name is None:
        return None
    if uncompared(e, SIDES.index(name)):
        return Doubt("not all that compiled code returned was compared", (), _NOT_COMPARED)
    found = e.shared.once(gaps)
    ahead = [g for g in found if g.call.graph.direction != "backward"] or found
    large = [g for g in ahead if g.after > g.usual]
    if not large:
        return None
    worst = max(large, key=lambda g: g.after / g.usual)
    line = (
        f"what {called(worst.call)} returns is {number(worst.after)} apart; rounding can explain {number(worst.limit)} there,"
        f" and usually grows to {number(worst.usual)}"
    )
    return Doubt("its results are further apart than usual", (line,), _OTHER_CODE)


def kernel_name(name: str) -> str:
    """A generated kernel's name, which lists all that was fused, cut short."""
    return name if len(name) <= _NAME else f"{name[: _NAME - 3]}..."


def _of(gap: Gap, function: CompiledFunction) -> bool:
    return any(gap.call.op == call.op for call in function.calls)


def in_words(function: CompiledFunction) -> str:
    """`Net.forward (model.py:14) ran compiled (inductor, 3 graphs, 12 calls)`."""
    name = function.function or "a compiled function"
    if function.module.isidentifier() and function.module not in name:
        name = f"{name} of {function.module}"
    place = ""
    if function.file is not None:
        place = f" ({function.file.replace(chr(92), '/').rpartition('/')[2]}:{function.line})"
    if not function.calls:
        return f"{name}{place} ran compiled, op by op: {counted(len(function.ops), 'op')}"
    graphs = counted(len(function.graphs), "graph")
    return (
        f"{name}{place} ran compiled (inductor, {graphs}, {counted(len(function.calls), 'call')})"
    )


def recompiled(case: Case) -> Iterator[str]:
    """Compilations during a run that dynamo had a reason for."""
    for name, side in zip(SIDES, (case.left, case.right), strict=True):
        again = [c for c in side.regions.compilations if c.reason or c.failed]
        for each in again[:_TOLD]:
            yield f"{name}: {why(each)}"
        if len(again) > _TOLD:
            yield f"{name}: and {len(again) - _TOLD} more recompilations; TORCH_LOGS=recompiles prints them as they come"


def why(compilation: Compilation) -> str:
    """A recompilation, or one that failed, with dynamo's reason."""
    if compilation.failed:
        return f"{compilation.function} stays eager: {compilation.failed}"
    return f"{compilation.function} was compiled again: {compilation.reason}"
