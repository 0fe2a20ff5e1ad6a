"""Memory that was read too early, written by someone else, or written behind the program's back."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from opdrift.case import Side
from opdrift.causes.evidence import Evidence, cause, scope, some
from opdrift.causes.optimizers import in_words, scope_of
from opdrift.causes.stepsleftout import is_of_step_left_out
from opdrift.causes.unseen import maker_of, output_words
from opdrift.compare import describe, number
from opdrift.origins.updates import step_of
from opdrift.records import READ_UNINITIALISED, Cause, Leaf
from opdrift.sizes import measure
from opdrift.tracefile.fingerprints import Fingerprint

#: Two contents of fresh memory that are nearer than this were computed; garbage has nothing in common.
_COMPUTED: Final = 0.1
#: Magnitudes that no table of a model has; freed memory holds them as addresses and counters.
_LARGEST: Final = 1e30
_SMALLEST: Final = 1e-30


def uninitialised(e: Evidence) -> Cause | None:
    """Memory was read before anything was written there."""
    return _uninitialised_leaf(e) if e.origin.kind == "leaf" else _uninitialised_op(e)


def _uninitialised_op(e: Evidence) -> Cause | None:
    reads = []
    consumer = e.consumer()
    for name, side, op in e.sides:
        reader = consumer.left if name == "left" else consumer.right
        for each in {op, reader} - {None}:
            assert each is not None
            if side.trace.ops.flags[each] & READ_UNINITIALISED:
                reads.append((name, side, each))
    if not reads or _hidden_maker(e) is not None:
        return None
    evidence = []
    for name, side, op in reads:
        evidence.append(f"{name}: {side.place(op)} read memory that no op had written")
        maker = _empty_behind(side, op)
        if maker is not None:
            evidence.append(f"{name}: {side.place(maker)} handed the memory out")
    _, side, op = reads[0]
    return cause(
        "uninitialised",
        "certain",
        f"{side.name(op)} in {scope(side.module(op))} read memory before it was written",
        dict.fromkeys(evidence),
        "Write every element before it is read: use torch.zeros or torch.full instead of torch.empty, or fill the rest.",
    )


def unseen_kernel(e: Evidence) -> Cause | None:
    """A kernel that the dispatcher does not see wrote into memory that an op handed out, in both runs otherwise.

    Such a kernel (a C++ or CUDA extension, Triton, ctypes, numpy) shows one hop later: at the first op that
    reads what it wrote.
    """
    found = _hidden_maker(e)
    reader = e.any_op
    if found is None or reader is None:
        return None
    makers, relative = found
    name, side, op = reader
    return cause(
        "kernel",
        "possible",
        f"what {side.name(op)} in {scope(side.module(op))} reads differs: no recorded op wrote it, so a kernel that"
        " bypasses the dispatcher did",
        [
            *(
                f"{label}: {s.place(i)} handed the memory out, and no op wrote into it"
                for label, s, i in makers
            ),
            f"{name}: {side.place(op)} is the first op that reads it, one hop after the kernel",
            f"the two contents are {number(relative)} apart: both were computed, they are no garbage",
        ],
        "Look at the extension, Triton, numpy or ctypes call before this line: compare its inputs in both runs, and whether"
        " it adds in the order in which threads arrive.",
    )


def _hidden_maker(e: Evidence) -> tuple[list[tuple[str, Side, int]], float] | None:
    """The ops that handed out memory which nothing recorded wrote, if its two contents are near each other."""
    op = e.origin.op
    if e.origin.story != "op" or e.origin.inputs_match or op.left is None or op.right is None:
        return None
    left = e.case.left.trace.ops.inputs[op.left].tolist()
    right = e.case.right.trace.ops.inputs[op.right].tolist()
    for a, b in zip(left, right, strict=False):
        states = (e.case.left.contents.states, a), (e.case.right.contents.states, b)
        writers = [int(s.writer[s.of[v]]) for s, v in states]
        if min(writers) < 0 or not e.case.left.contents.tokens.uninitialised[writers[0]]:
            continue
        gap = measure(e.case, a, b)
        near = gap is not None and gap.comparable and not gap.nonfinite_changed
        if gap is None or not near or gap.relative is None or not 0 < gap.relative < _COMPUTED:
            continue
        return [
            ("left", e.case.left, writers[0]),
            ("right", e.case.right, writers[1]),
        ], gap.relative
    return None


def _empty_behind(side: Side, op: int) -> int | None:
    """The op that handed out the memory behind an op's inputs."""
    contents = side.contents
    for value in side.trace.ops.inputs[op].tolist():
        state = int(contents.states.of[value])
        while state >= 0:
            writer = int(contents.states.writer[state])
            if writer >= 0 and contents.tokens.uninitialised[writer]:
                return writer
            state = int(contents.states.before[state])
    return None


def _uninitialised_leaf(e: Evidence) -> Cause | None:
    leaf = e.origin.leaf.left or e.origin.leaf.right
    if leaf is None or leaf.kind not in ("buffer", "parameter"):
        return None
    signs: list[str] = []
    certain = False
    for name, side, _ in e.sides:
        value = e.origin.values.left if name == "left" else e.origin.values.right
        if value is None:
            continue
        made = side.lineage.of(value)
        if made.kind == "uninitialised":
            certain = True
            signs.append(
                f"{name}: {made.first_op} (op {made.first_seq}) handed out the memory, and nothing wrote it"
            )
    left, right = (_print(e, "left"), _print(e, "right"))
    if not signs and left is not None and right is not None and leaf.kind == "buffer":
        for name, own, other in (("left", left, right), ("right", right, left)):
            why = _looks_like_memory(own, other, persistent=leaf.name not in _non_persistent(e))
            if why:
                signs.append(f"{name}: {why}")
    if not signs:
        return None
    names = e.origin.names
    if set(names) & _non_persistent(e):
        signs.append(
            f"{some([n for n in names if n in _non_persistent(e)])} is not persistent: no state_dict holds it"
        )
    gap = None
    if e.origin.values.left is not None and e.origin.values.right is not None:
        gap = measure(e.case, e.origin.values.left, e.origin.values.right)
    if gap is not None and gap.comparable:
        signs.append(describe(gap))
    return cause(
        "uninitialised",
        "certain" if certain else "likely",
        f"{names[0] if names else 'a leaf'} holds memory that nothing initialised",
        signs,
        "After Module.to_empty() or construction on the meta device, compute non-persistent buffers again"
        " (call the module's reset_parameters or init_buffers), then load the state dict.",
    )


def _print(e: Evidence, side: str) -> Fingerprint | None:
    values = e.origin.values
    if side == "left":
        return None if values.left is None else e.case.left.fingerprint(values.left)
    return None if values.right is None else e.case.right.fingerprint(values.right)


def _non_persistent(e: Evidence) -> set[str]:
    """Names of buffers that state dicts leave out, as the traces say."""
    found: set[str] = set()
    for _, mark in e.marks(lambda m: m.kind == "model"):
        prefix = str(mark.fields.get("name") or "")
        for name in mark.fields.get("non_persistent") or ():
            found.update({str(name), f"{prefix}.{name}" if prefix else str(name)})
    return found


def _looks_like_memory(own: Fingerprint, other: Fingerprint, *, persistent: bool) -> str | None:
    """What about a content says that no program computed it; None if nothing does."""
    if own.code > 4:  # whole numbers say nothing about themselves
        return None
    if own.subnormal > other.subnormal:
        return f"{own.subnormal} of {own.n} elements are subnormal numbers, as addresses and small integers look"
    if own.nonfinite > other.nonfinite:
        return f"{own.nonfinite} of {own.n} elements are not finite"
    if own.absmax > _LARGEST and other.absmax < _LARGEST:
        return f"magnitudes reach {number(own.absmax)}"
    if 0 < own.absmax < _SMALLEST <= other.absmax:
        return f"the largest magnitude is {number(own.absmax)}"
    constant = own.n > 1 and own.min == own.max and other.min < other.max
    if constant and not persistent:
        return f"all {own.n} elements are {number(own.min)}, the other run's range from {number(other.min)} to {number(other.max)}"
    wild = own.absmax > 0 and other.absmax > 0 and abs(math.log10(own.absmax / other.absmax)) > 6
    if wild and not persistent:
        return (
            f"magnitudes reach {number(own.absmax)}, those of the other run {number(other.absmax)}"
        )
    return None


def inplace(e: Evidence) -> Cause | None:
    """An op wrote into a tensor that others still use."""
    if e.origin.story == "written":
        return _written(e)
    return _caller_input(e) if e.origin.kind == "leaf" else None


def _written(e: Evidence) -> Cause | None:
    found = e.any_op
    leaf = e.origin.leaf.left or e.origin.leaf.right
    if found is None or is_optimised(e, leaf) or is_of_step_left_out(e):
        return None
    name, side, writer = found
    number_ = 0 if name == "left" else 1
    if _is_part_of_more(e, number_, writer):
        return None
    reader = (e.consumer().left, e.consumer().right)[number_]
    names = () if leaf is not None else _parts_written(side, writer)
    what = leaf.name if leaf is not None else some(names) if names else "a tensor"
    evidence = [
        f"{name}: {side.place(writer)} wrote into it",
        f"{name}: {side.place(reader)} reads it afterwards" if reader is not None else "",
        f"the other run reads the same tensor as it was before that write{_partner(e, number_, writer)}",
        f"it is {leaf.name}" if leaf is not None else "",
        f"it is this rank's part of {what}" if names else "",
    ]
    return cause(
        "inplace",
        "certain",
        f"{in_words(side, writer, step_of(side, writer))} in {scope_of(side, writer)} changes {what},"
        f" which is still used, in the {name} run only",
        evidence,
        "Let only the optimizer change a parameter, and equally often in both runs and on all ranks: look at the line that"
        " wrote it."
        if names
        else "Use the op that returns a new tensor (x = x.add(y) instead of x.add_(y), x = x * y instead of x *= y), or"
        " clone() the tensor first.",
    )


def _parts_written(side: Side, writer: int) -> tuple[str, ...]:
    """The parameters of which an op writes this rank's parts."""
    updated = side.gradients.of(side.trace.ops.outputs[writer].tolist())
    return updated.names if updated is not None and updated.role == "parameter" else ()


def is_optimised(e: Evidence, leaf: Leaf | None) -> bool:
    """Whether a leaf is a parameter of a run that trains, written where optimizers write: outside modules and backward."""
    trains, found = e.shared.trains.left or e.shared.trains.right, e.any_op
    if leaf is None or leaf.kind != "parameter" or not trains or found is None:
        return False
    writer = found[1].op(found[2])
    return writer.phase == "forward" and writer.call.id == 0


def _is_part_of_more(e: Evidence, number_: int, writer: int) -> bool:
    """Whether the write is the end of a stretch that only this run has: then the stretch is the cause."""
    side = (e.case.left, e.case.right)[number_]
    partner = (e.case.pairing.right_of, e.case.pairing.left_of)[number_]
    if partner[writer] >= 0:
        return False
    makers = [int(side.contents.maker[v]) for v in side.trace.ops.inputs[writer].tolist()]
    return any(op >= 0 and partner[op] < 0 for op in makers)


def _partner(e: Evidence, number_: int, writer: int) -> str:
    other = (e.case.pairing.right_of, e.case.pairing.left_of)[number_][writer]
    if other < 0:
        return ""
    side = (e.case.right, e.case.left)[number_]
    return f"; there {side.name(int(other))} ran instead"


def _caller_input(e: Evidence) -> Cause | None:
    """A run changed its own input in place, and the other run starts from what it left behind."""
    leaf = e.origin.leaf.left or e.origin.leaf.right
    found = left_behind(e)
    if leaf is None or found is None or leaf.kind in ("parameter", "buffer"):
        return None
    name, side, writer = found
    return cause(
        "inplace",
        "certain",
        f"{leaf.name or 'an input'} differs because {side.name(writer)} wrote into it in the {name} run",
        [
            f"{name}: {side.place(writer)} writes into {leaf.name or 'the tensor'}, which it was given",
            left_behind_words(name),
        ],
        "Do not change what the caller passed: use the op that returns a new tensor (x = x * 4 instead of x *= 4),"
        " or clone() the input first.",
    )


def left_behind(e: Evidence) -> tuple[str, Side, int] | None:
    """The run that wrote into a leaf what the other run starts from, and its first op that did."""
    for name, side, other, value, theirs in (
        ("left", e.case.left, e.case.right, e.origin.values.left, e.origin.values.right),
        ("right", e.case.right, e.case.left, e.origin.values.right, e.origin.values.left),
    ):
        if value is None or theirs is None:
            continue
        writers = _later_writers(side, value)
        if not writers:
            continue
        last = _last_fingerprint(side, value)
        start = other.fingerprint(theirs)
        if last is not None and start is not None and last.key == start.key:
            return name, side, writers[0]
    return None


def left_behind_words(name: str) -> str:
    """What a run left in a leaf, in words."""
    other = "right" if name == "left" else "left"
    return f"what the {name} run left in it is, bit for bit, what the {other} run started from"


def _later_writers(side: Side, value: int) -> list[int]:
    """Ops that wrote into a leaf's storage during the run, in order."""
    contents = side.contents
    storage = side.trace.values.storage
    same = storage == storage[value]
    states = {int(s) for s in contents.states.of[same]}
    return sorted(
        {int(contents.states.writer[s]) for s in states if contents.states.writer[s] >= 0}
    )


def _last_fingerprint(side: Side, value: int) -> Fingerprint | None:
    """Of the last content of a leaf's storage that has the same place and size."""
    values, sizes = side.trace.values, side.contents.layouts.size
    same = np.flatnonzero(
        (values.storage == values.storage[value])
        & (values.offset == values.offset[value])
        & (values.fingerprint >= 0)
    )
    candidates = same[sizes[same] == sizes.at(value)]
    if not len(candidates):
        return None
    return side.trace.fingerprint(int(candidates[values.write[candidates].argmax()]))


def race(e: Evidence) -> Cause | None:
    """A content changed with no op that wrote it: in one run only, or before its use in one and after it in the other."""
    if e.origin.story != "hidden-write":
        return None
    names = e.origin.names
    reader = e.consumer()
    evidence: list[str] = []
    written: list[str] = []
    what = names[0] if names else None
    for name, side, op, value in (
        ("left", e.case.left, reader.left, e.origin.values.left),
        ("right", e.case.right, reader.right, e.origin.values.right),
    ):
        if value is None:
            continue
        rows = side.leaves.of(value)
        changed = next((leaf for leaf in rows if leaf.when == "changed"), None)
        where = f" when {side.place(op)} read it" if op is not None else ""
        maker = maker_of(side, value)
        if what is None and maker is not None:
            what = output_words(side, maker)
        if _is_written(side, value):
            written.append(name)
        if changed is not None:
            evidence.append(
                f"{name}: the content had changed by op {changed.seq + 1}, with no recorded op that wrote it{where and ',' + where}"
            )
        elif maker is not None:
            evidence.append(f"{name}: it still held what {side.place(maker)} wrote{where}")
        else:
            evidence.append(f"{name}: it still held what it held on entry{where}")
        aliases = sorted({leaf.name for leaf in rows if leaf.name})
        if len(aliases) > 1 and name == "left":
            evidence.append(f"one storage has the names {some(aliases, 6)}")
    stale = _stale(e)
    once = len(written) == 1
    when = f"seen in the {written[0]} run only" if once else "in the two runs at different times"
    return cause(
        "race",
        "likely",
        f"{what or 'a tensor'} was written behind the dispatcher's back, {when}",
        [*evidence, *stale],
        # who reads what an earlier reader had read may have come before a write, in either run
        _remedy(e, written[0] if once and not stale else None),
    )


def _is_written(side: Side, value: int) -> bool:
    """Whether a storage was, at any time of the run, seen to have changed with no op that wrote it."""
    storage = side.trace.values.storage
    return any(storage[leaf.value] == storage[value] for leaf in side.leaves.changed)


def _remedy(e: Evidence, only: str | None) -> str:
    """What to do about a hidden write: what can have written depends on where the tensor is."""
    value = e.origin.values.left
    side = e.case.left
    if value is None:
        value, side = e.origin.values.right, e.case.right
    if value is not None and side.trace.meta(value).device != "cpu":
        return (
            "Wait for the copy before the tensor is read: stream.wait_stream or event.synchronize for non_blocking copies,"
            " future.result() for threads; do not reuse a slot before its last reader is done."
        )
    writers = "numpy (Tensor.numpy()), .data, DLPack, C++ code and other threads"
    where = f"in the {only} run" if only is not None else "in both runs"
    return (
        f"Look {where} for what writes into this memory past torch: {writers}. Write with torch ops, or clone() before the"
        " memory is shared; wait for a thread (future.result()) before the tensor is read, and do not reuse a slot before its"
        " last reader is done."
    )


def _stale(e: Evidence) -> list[str]:
    """Whether one run read what an earlier op of the same run had read from the same storage."""
    found = []
    reader = e.consumer()
    for name, side, value, op in (
        ("left", e.case.left, e.origin.values.left, reader.left),
        ("right", e.case.right, e.origin.values.right, reader.right),
    ):
        if value is None or op is None:
            continue
        state = int(side.contents.states.of[value])
        first = int(side.contents.states.first_read[state])
        if first < op and side.module(first) != side.module(op):
            found.append(
                f"{name}: {side.place(op)} reads the same content as {side.place(first)} before it"
            )
    return found
