"""A content that may have been written since it was last read, by nothing that the dispatcher shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from opdrift import components
from opdrift.case import Side
from opdrift.causes.compiled import other_code
from opdrift.causes.evidence import Evidence, cause, scope
from opdrift.causes.picked import other_calls
from opdrift.compare import number
from opdrift.copies import wrong_copy
from opdrift.flow import is_collective
from opdrift.origins.kinds import draws
from opdrift.provenance.ops import COPIES, operator
from opdrift.records import REREAD, Cause
from opdrift.tfp1 import sample_positions
from opdrift.tokens import base

#: An output this many times further off than rounding explains is no matter of rounding.
_FAR: Final = 1e3
_FAR_LEAST: Final = 1e-6
_OTHER_MACHINE: Final = frozenset(["device", "torch", "cpu_capability", "mkl", "mkldnn", "cuda"])
#: What hands out memory that numpy, DLPack and `.data` then write into.
_ALIASES: Final = frozenset(["detach", "alias", "detach_"])
#: Differences of one column that are nearer than this part of the largest are the same.
_ALIKE: Final = 1e-3
#: So many tensors are named.
_NAMED: Final = 4


@dataclass(frozen=True, slots=True)
class _Suspect:
    """An input of the op.

    Attributes:
        name: In words.
        model: A parameter, a buffer or a constant: something that lives on, and is read seldom.
        pointed: Evidence that one run alone took an alias of it.
        ruled_out: Why its content cannot be what changed; empty where it can.
    """

    name: str
    model: bool
    pointed: tuple[str, ...]
    ruled_out: str


def output_words(side: Side, op: int) -> str:
    """What an op wrote, in words: `the output of op 3 (aten.addmm.default) in a`."""
    return f"the output of op {side.seq(op)} ({side.name(op)}) in {scope(side.module(op))}"


def maker_of(side: Side, value: int) -> int | None:
    """The op that wrote a storage last, whatever changed in it since."""
    states = side.contents.states
    state = int(states.of[value])
    while state >= 0 and states.writer[state] < 0:
        state = int(states.before[state])
    return None if state < 0 else int(states.writer[state])


def copied_otherwise(e: Evidence) -> Cause | None:
    """A copy that does not hold what it was copied from, in one run."""
    if e.origin.story != "op" or e.origin.inputs_match is not True:
        return None
    found = {
        word: wrong
        for word, side, op in e.sides
        if op is not None and (wrong := wrong_copy(side.trace, op)) is not None
    }
    if len(found) != 1:
        return None
    ((word, wrong),) = found.items()
    return replace(
        wrong,
        summary=f"{wrong.summary}, in the {word} run",
        evidence=(*wrong.evidence, "in the other run what arrived is what was copied"),
    )


def moved_otherwise(e: Evidence) -> Cause | None:
    """An op that only moves elements gave others of equal inputs: it computes nothing, so that what it read was another content."""
    op, bound, types = e.origin.op, e.size.bound, e.dtypes()
    if e.origin.story != "op" or e.origin.settings or e.origin.inputs_match is not True:
        return None
    if op.left is None or op.right is None or bound is None or not bound.exact:
        return None
    name = e.case.left.name(op.left)
    if operator(name) not in COPIES or is_collective(name) or types.left != types.right:
        return None
    if other_code(e) is not None or _is_read_again(e):
        return None
    found = _suspects(e, op.left, op.right)
    gap = e.size.difference
    return cause(
        "race",
        "likely",
        f"{name} in {scope(e.case.left.module(op.left))} only moves elements, and they are others in the two runs:"
        f" {_one_of([s.name for s in found])} was written behind the dispatcher's back before it, or while it ran",
        [
            "its inputs are equal in both runs, as they were last read",
            f"relative difference {number(gap.relative)}: a move rounds nothing"
            if gap is not None and gap.relative is not None
            else "",
            *(line for s in found for line in s.pointed[:1]),
            *(f"{word}: {side.place(i)}" for word, side, i in e.sides if i is not None),
        ],
        "Record both runs with integrity='full': what an op reads is then read again at each use, and a hidden write is seen"
        " where it shows first. Look for numpy, .data, other threads, streams and custom kernels that write into these tensors.",
    )


def unseen_write(e: Evidence) -> Cause | None:
    """Equal inputs, far apart outputs, no other kernel: an input may have changed since it was last read.

    Leaves are read on entry, and again at use only within a budget; what ops made is read when it is made.
    Which input it was is told only where something tells: an alias that one run alone took of it, or an
    output that the others cannot have spoiled in this way.
    """
    op, gap = e.origin.op, e.size.difference
    if op.left is None or op.right is None or gap is None or gap.relative is None or not _fits(e):
        return None
    found = _suspects(e, op.left, op.right)
    pointed = [s for s in found if s.pointed and not s.ruled_out]
    if not pointed and not any(s.model for s in found):
        return None
    possible = [s for s in found if not s.ruled_out] or found
    named = pointed or possible
    others = [s for s in possible if s not in named]
    return cause(
        "race",
        "possible",
        f"{_one_of([s.name for s in named])} may have been written between the last reading and this op, behind the"
        " dispatcher's back",
        [
            "same op, same arguments, inputs equal as far as they were read",
            f"relative difference {number(gap.relative)}: no order of summation gives that",
            *(line for s in named for line in s.pointed[:1]),
            *(s.ruled_out for s in found if s not in named),
            f"nothing rules out {_one_of([s.name for s in others])}" if others else "",
            "none of these was read again at this op",
        ],
        "Record both runs with integrity='full': every leaf, and on the CPU all that ops made, is then read again at each"
        " use, and a hidden write is seen. Look for numpy, .data, other threads and custom kernels that write into these"
        " tensors.",
    )


def _fits(e: Evidence) -> bool:
    """Whether nothing else that is known explains the difference."""
    gap, limit = e.size.difference, e.size.limit
    if e.origin.story != "op" or e.origin.settings or e.origin.inputs_match is not True:
        return False
    if gap is None or gap.relative is None or limit is None or gap.changed_index is not None:
        return False
    if gap.relative < _FAR * max(limit, _FAR_LEAST):
        return False
    if other_code(e) is not None:
        return False  # generated kernels write unseen, and those of the runs are not the same
    if any(d.name in _OTHER_MACHINE for d in e.shared.environment) or other_calls(e):
        return False
    if any(index is not None and draws(side, index) for _, side, index in e.sides):
        return False
    return not _is_read_again(e)


def _is_read_again(e: Evidence) -> bool:
    """Whether a run read what the op was given again at that op: then it is not another content than was last read."""
    for _, side, index in e.sides:
        if side.trace.header.options.get("integrity") == "full":
            return True
        if index is not None and side.trace.ops.flags[index] & REREAD:
            return True
    return False


def _suspects(e: Evidence, left: int, right: int) -> list[_Suspect]:
    """The inputs of a pair, each once."""
    found: dict[str, _Suspect] = {}
    inputs = (
        e.case.left.trace.ops.inputs[left].tolist(),
        e.case.right.trace.ops.inputs[right].tolist(),
    )
    for place, (a, b) in enumerate(zip(*inputs, strict=False)):
        name, model = _words(e.case.left, a, left)
        pointed = [
            f"{word}: {side.place(k)} took an alias of {name}, and the other run has no such op"
            for word, side, value, index, partner in (
                ("left", e.case.left, a, left, e.case.pairing.right_of),
                ("right", e.case.right, b, right, e.case.pairing.left_of),
            )
            for k in _aliases(side, value, index)
            if partner[k] < 0
        ]
        known = found.get(name)
        if known is None:
            why = f"{name} is added to each row alike, and the rows are off by different amounts"
            ruled_out = why if place == 0 and _is_no_bias(e, a, left) else ""
            found[name] = _Suspect(name, model, tuple(dict.fromkeys(pointed)), ruled_out)
    return list(found.values())


def _words(side: Side, value: int, reader: int) -> tuple[str, bool]:
    """What an input is, and whether it is of the model; a view is what it looks at."""
    leaf = side.leaves.best(value, side.module(reader))
    if leaf is not None:
        return leaf.name or "a nameless constant", leaf.kind != "input"
    maker = maker_of(side, value)
    return ("a nameless tensor" if maker is None else output_words(side, maker)), False


def _aliases(side: Side, value: int, before: int) -> list[int]:
    """Ops before another that took an alias of a whole state."""
    state = int(side.contents.states.of[value])
    inputs = side.trace.ops.inputs
    hits = np.flatnonzero(side.contents.states.of[inputs.values] == state)
    ops = dict.fromkeys(int(k) for k in inputs.rows()[hits] if k < before)
    return [k for k in ops if base(side.name(k)) in _ALIASES]


def _is_no_bias(e: Evidence, bias: int, op: int) -> bool:
    """Whether the first input of an addmm is a row, and the rows of the result are off by different amounts."""
    side, values = e.case.left, e.origin.values
    if e.case.by_sample or base(side.name(op)) != "addmm" or None in (values.left, values.right):
        return False
    assert values.left is not None
    assert values.right is not None
    shape = side.trace.meta(values.left).shape
    left, right = e.case.left.fingerprint(values.left), e.case.right.fingerprint(values.right)
    if left is None or right is None or len(shape) != 2 or left.n != right.n:
        return False
    if side.trace.meta(bias).shape not in ((shape[1],), (1, shape[1])) or left.n != np.prod(shape):
        return False
    deltas = components.deltas(left, right)
    if deltas is None or not np.isfinite(deltas).all():
        return False
    columns = np.array(sample_positions(left.n)) % shape[1]
    spread = max(float(np.ptp(deltas[columns == c])) for c in np.unique(columns))
    return spread > _ALIKE * float(np.abs(deltas).max())


def _one_of(names: Sequence[str]) -> str:
    """`a`, `one of a or b`, `one of a, b or c`."""
    if len(names) == 1:
        return names[0]
    if len(names) > _NAMED:
        return f"one of {', '.join(names[:_NAMED])} or {len(names) - _NAMED} more"
    return f"one of {', '.join(names[:-1])} or {names[-1]}"
