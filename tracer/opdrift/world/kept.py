"""The collectives that a leaf is kept alike by: those that it, or its gradient, is a result of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from opdrift.contents import Contents
from opdrift.flow import of_the_same
from opdrift.provenance.ops import COPIES, operator
from opdrift.world.collectives import Meeting, World

#: So many ops are followed back.
_WALK: Final = 64
#: They put copies of several tensors into one.
_JOINS: Final = frozenset({"cat", "stack", "_foreach_copy"})


def collectives_behind(
    world: World,
    rank: int,
    contents: Contents,
    values: Sequence[int],
    size: int,
    *,
    copied: bool = False,
) -> Iterator[Meeting]:
    """The all_reduces and broadcasts that values are results of, nearest first.

    Args:
        world: All ranks.
        rank: Whose values.
        contents: That rank's.
        values: Where to begin.
        size: So many elements at least the collective has.
        copied: The values are copies of the result; else also what elementwise ops made of it.
    """
    trace = contents.trace
    waiting, seen = list(values), set(values)
    for _ in range(_WALK):
        if not waiting:
            break
        value = waiting.pop(0)
        op = int(contents.maker[value])
        if op < 0:
            continue
        info = trace.op_info(int(trace.ops.signature[op]))
        meeting = world.by_op.get((rank, int(trace.ops.seq[op])))
        if meeting is not None:
            part = meeting.members[rank]
            elements = sum(n for _, n in part.got or part.given or ())
            # a norm for clipping is reduced, too, and multiplied in
            if meeting.what in ("all_reduce", "broadcast") and elements >= size:
                yield meeting
            continue
        plain = operator(info.name)
        moved = info.view or plain in COPIES
        of_lists = plain.startswith(("_foreach_", "_fused_"))
        if moved or ((info.pointwise or of_lists) and not copied):
            inputs = trace.ops.inputs[op].tolist()
            if plain == "copy":  # what it writes into is gone
                inputs = inputs[-1:]
            elif of_lists:
                inputs = of_the_same(inputs, trace.ops.outputs[op].tolist(), value)
            fresh = [v for v in inputs if v and v not in seen]
            seen.update(fresh)
            waiting += fresh


def gives(world: World, rank: int, contents: Contents, meeting: Meeting, leaf: int) -> bool:
    """Whether a rank gave a leaf itself, or a copy of it among others, to a collective: no gradient of it."""
    trace = contents.trace
    index = meeting.members[rank].index
    storage = trace.values.storage
    waiting = [] if index is None else trace.ops.inputs[index].tolist()
    seen = set(waiting)
    for _ in range(_WALK):
        if not waiting:
            break
        value = waiting.pop(0)
        if value and storage[value] == storage[leaf]:
            return True
        op = int(contents.maker[value]) if value else -1
        if op < 0:
            continue
        info = trace.op_info(int(trace.ops.signature[op]))
        if info.view or operator(info.name) in COPIES | _JOINS:
            fresh = [v for v in trace.ops.inputs[op].tolist() if v not in seen]
            seen.update(fresh)
            waiting += fresh
    return False
