"""The runs do different things here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from opdrift.case import Side
from opdrift.causes.evidence import Evidence, cause, counted, main_ops, op_names, scope, some
from opdrift.causes.optimizers import scope_of
from opdrift.extracalls import extra_calls
from opdrift.records import RAISED, Cause, Footer, TensorMeta
from opdrift.tokens import base

_GATHERING: Final = frozenset(
    [
        "cat",
        "all_gather_into_tensor",
        "allgather_",
        "_allgather_base_",
        "all_gather_copy_in",
        "all_gather_copy_out",
        "split_with_sizes_copy",
        "wait_tensor",
        "stack",
    ]
)
#: What takes a weight as it is, or as another type or on another device holds it.
_COPYING: Final = frozenset(["clone", "_to_copy"])


def fsdp_gather(e: Evidence) -> Cause | None:
    """Gathered weights are not what their shards are: gathered in one run, left over from before in the other."""
    found = _bad_gathers(e)
    if found is not None:
        return found
    kept = _kept_from_before(e, _GATHERING)
    return None if kept is None else _stale(e, kept)


def stale_copy(e: Evidence) -> Cause | None:
    """One run copies a weight before it computes with it, the other uses a copy from before and never the weight."""
    kept = _kept_from_before(e, _COPYING)
    if kept is None:
        return None
    n = kept.maker
    name, side, _ = e.sides[n]
    other_name, other, _ = e.sides[1 - n]
    unread = [each for each in kept.sources if _is_never_read(other, each)]
    reader = (e.consumer().left, e.consumer().right)[1 - n]
    if not unread or reader is None:
        return None
    what = side.name(kept.ops[0])
    return cause(
        "weights",
        "likely",
        f"the {other_name} run uses a copy of {some(unread)} from before, the {name} run copies it anew ({what})",
        [
            f"{name}: {side.place(kept.ops[0])} copies {some(kept.sources)}",
            f"{other_name}: {other.place(reader)} reads a tensor {other.trace.meta(kept.old[0])} that existed before the run and that no op made",
            f"{other_name}: {some(unread)} {'is' if len(unread) == 1 else 'are'} never read",
        ],
        "Drop what is kept of the weight (a cast, packed or moved copy) whenever the weight changes: after every load and"
        " every optimizer step.",
    )


@dataclass(frozen=True, slots=True)
class _Kept:
    """What one run makes of parameters, where the other uses a tensor from before."""

    #: the number of the side that makes it
    maker: int
    ops: list[int]
    #: the names of the parameters
    sources: list[str]
    #: what the other side uses
    old: list[int]


def _kept_from_before(e: Evidence, making: frozenset[str]) -> _Kept | None:
    if e.origin.story != "region":
        return None
    for n, (_, side, _) in enumerate(e.sides):
        _, other, _ = e.sides[1 - n]
        ops = [op for op in e.ops_of(n) if base(side.name(op)) in making]
        read = [v for op in ops for v in side.trace.ops.inputs[op].tolist()]
        sources = sorted(
            {leaf.name for v in read for leaf in side.leaves.of(v) if leaf.kind == "parameter"}
        )
        if not sources or any(base(other.name(op)) in making for op in e.ops_of(1 - n)):
            continue
        theirs = (e.origin.boundary.left, e.origin.boundary.right)[1 - n]
        old = [
            v for v in theirs if not any(leaf.kind == "parameter" for leaf in other.leaves.of(v))
        ]
        states = other.contents.states
        if not old or any(int(states.writer[states.of[v]]) >= 0 for v in old):
            continue
        return _Kept(n, ops, sources, old)
    return None


def _stale(e: Evidence, kept: _Kept) -> Cause:
    n = kept.maker
    name, side, _ = e.sides[n]
    other_name, other, _ = e.sides[1 - n]
    unread = [s for s in kept.sources if _is_never_read(other, s)]
    reader = (e.consumer().left, e.consumer().right)[1 - n]
    evidence = [
        f"{name}: {side.place(kept.ops[0])} puts the weight together from {some(kept.sources)}",
        f"{other_name}: {other.place(reader)} reads a tensor {other.trace.meta(kept.old[0])} that existed before the run and that no op made"
        if reader is not None
        else "",
        f"{other_name}: {some(unread)} {'is' if len(unread) == 1 else 'are'} never read"
        if unread
        else "",
    ]
    return cause(
        "fsdp-gather",
        "likely",
        f"the {other_name} run uses a gathered weight from before, the {name} run gathers it anew from its shards",
        evidence,
        "Gather again after the shards change: reshard after the forward (reshard_after_forward=True), or drop the"
        " gathered copy after every optimizer step and weight load.",
    )


def _is_never_read(side: Side, name: str) -> bool:
    """Whether a run has a leaf, and no op of it computes with the leaf."""
    rows = side.leaves.by_name.get(name, ())
    return bool(rows) and all(
        side.leaves.first_use(int(side.contents.states.of[row.value]), None) is None for row in rows
    )


def _bad_gathers(e: Evidence) -> Cause | None:
    """Gathers that an integration found not to be their shards."""
    if (
        e.origin.kind == "leaf"
        and e.origin.leaf.left is not None
        and e.origin.leaf.left.when == "entry"
    ):
        return None
    names = set(e.origin.names)
    bad = [
        (side, mark)
        for side, mark in e.marks(
            lambda m: m.kind in ("gather", "use") and m.fields.get("intact") is False
        )
    ]
    about = [
        (side, mark)
        for side, mark in bad
        if not names or names & {str(p[0]) for p in mark.fields.get("parameters") or () if p}
    ]
    if not about:
        return None
    side, mark = about[0]
    unit = mark.fields.get("unit")
    return cause(
        "fsdp-gather",
        "certain",
        f"gathered weights of {scope(str(unit or ''))} are not their shards in the {side} run",
        [
            f"{side}: {mark.fields.get('library', 'the library')} {mark.kind} at op {mark.seq} is not intact",
            f"{counted(len(bad), 'gather')} of both runs are not intact",
        ],
        "Wait for the gather before use, and gather again after the shards change; compare with offload and prefetch off.",
    )


def reshaped(e: Evidence) -> Cause | None:
    """The same op reads the same numbers in other shapes."""
    op = e.origin.op
    if (
        e.origin.story not in ("op", "factory", "amplified")
        or op.left is None
        or op.right is None
        or e.origin.settings
    ):
        return None
    read = [
        [_own_meta(side, int(v)) for v in side.trace.ops.inputs[i]]
        for side, i in ((e.case.left, op.left), (e.case.right, op.right))
    ]
    shapes = [[str(meta) for meta in metas] for metas in read]
    counts = [[math.prod(meta.shape) for meta in metas] for metas in read]
    if shapes[0] == shapes[1] or counts[0] != counts[1]:
        return None
    name = e.case.left.name(op.left)
    return cause(
        "structure",
        # behind rounding, that the numbers are the same is not proved by their digests
        "likely" if e.origin.story == "amplified" else "certain",
        f"{name} in {scope(e.case.left.module(op.left))} reads the same numbers in another shape: {', '.join(shapes[0])}"
        f" against {', '.join(shapes[1])}",
        [
            *(f"{label}: {side.place(i)}" for label, side, i in e.sides if i is not None),
            "the elements of its inputs are equal in both runs, in row-major order"
            if e.origin.story != "amplified"
            else "what differs before it is rounding, and explains less than this",
        ],
        "Compare the view, reshape and transpose calls before this op: the number of heads, the order of the dims, the"
        " length of a window.",
    )


def _own_meta(side: Side, value: int) -> TensorMeta:
    """Of one sample's part of a value where samples are compared: what the batch and its padding add is no shape."""
    return side.one.meta(value) if side.one is not None else side.trace.meta(value)


def raised(e: Evidence) -> Cause | None:
    """A run ended with an exception, and lacks what the other went on to do."""
    if e.origin.kind != "structure" or e.origin.story != "region" or e.origin.row >= 0:
        return None
    for n, (name, side, _) in enumerate(e.sides):
        footer = side.trace.footer
        other_name, other, _ = e.sides[1 - n]
        if footer is None or footer.ended != "raised" or not len(side.trace.ops):
            continue
        if other.trace.footer is not None and other.trace.footer.ended == "raised":
            continue
        last = len(side.trace.ops) - 1
        itself = bool(side.trace.ops.flags[last] & RAISED)
        own = [op for op in e.ops_of(n) if op != last]
        theirs = e.ops_of(1 - n)
        if own and not itself:
            continue
        where = f"{'at' if itself else 'after'} {side.place(last)}"
        return cause(
            "structure",
            "certain",
            f"{end_of(name, footer)} {where}",
            [
                f"{name}: {_operands(side, last)}" if itself else "",
                f"{name} only: {op_names(side, own)}" if own else "",
                f"{other_name}: goes on with {op_names(other, theirs)}, from {other.place(theirs[0])}"
                if theirs
                else "",
                f"up to there {counted(len(e.case.pairing.left), 'op')} of both runs are paired",
            ],
            f"Look at the exception first: nothing after it can be compared. Run the {name} program under a debugger at"
            " that line, or compare the shapes and keys that it was given with those of the other run.",
        )
    return None


def end_of(name: str, footer: Footer) -> str:
    """That a run ended with an exception, in words."""
    return f"the {name} run ended with {footer.exception}"


def _operands(side: Side, op: int) -> str:
    given = [str(side.trace.meta(int(v))) for v in side.trace.ops.inputs[op]]
    return f"it was given {', '.join(given)}" if given else "it was given no tensors"


def structure(e: Evidence) -> Cause | None:
    """One run has ops here that the other has not, or reads another tensor."""
    if e.origin.kind != "structure" or e.origin.story == "gathered":
        return None
    reader = e.consumer()
    if e.origin.story == "other-source":
        return _other_source(e)
    ops = e.ops_of(0) if e.origin.region.left else [], e.ops_of(1) if e.origin.region.right else []
    if e.lacks_result and not any(ops):
        return _returned_alone(e)
    trained = _trained_alone(e, ops)
    if trained is not None:
        return trained
    evidence = []
    for n, (name, side, _) in enumerate(e.sides):
        if ops[n]:
            main = main_ops(side, ops[n])
            modules = list(dict.fromkeys(scope_of(side, op) for op in main))
            evidence.append(f"{name} only: {op_names(side, ops[n])} in {some(modules, 3)}")
        else:
            evidence.append(f"{name} has nothing of its own here")
    for name, side, op in (
        ("left", e.case.left, reader.left),
        ("right", e.case.right, reader.right),
    ):
        if op is not None:
            evidence.append(f"{name}: the result is first read by {side.place(op)}")
    raised = [
        f"{name}: the run ended with {side.trace.footer.exception}"
        for name, side, _ in e.sides
        if side.trace.footer is not None and side.trace.footer.exception
    ]
    one_sided = [name for n, (name, _, _) in enumerate(e.sides) if ops[n]]
    if len(one_sided) == 1:
        n = 0 if one_sided[0] == "left" else 1
        side = e.sides[n][1]
        more = _more_calls(e, n, ops[n])
        summary = (
            f"the {one_sided[0]} run makes {more}"
            if more
            else f"the {one_sided[0]} run has {counted(len(main_ops(side, ops[n])), 'op')} more here: {op_names(side, ops[n])}"
        )
    else:
        summary = "the runs compute this in different ways"
    return cause(
        "structure",
        "certain",
        summary,
        [*evidence, *raised],
        "Compare the two configurations and code versions at the lines above; if the ops are meant to be the same,"
        " map renamed modules with --map LEFT=RIGHT.",
    )


def _trained_alone(e: Evidence, ops: tuple[list[int], list[int]]) -> Cause | None:
    """One run goes backward, the other does not: what only the first has are gradients and what leads to them."""
    trains = e.shared.trains
    if not e.lacks_result or trains.left == trains.right:
        return None
    n = 0 if trains.left else 1
    name, side, _ = e.sides[n]
    if not any(side.trace.ops.phase[op] for op in ops[n]):
        return None
    other = e.sides[1 - n][0]
    equal = not e.case.compared.outputs_differ.any()
    return cause(
        "structure",
        "certain",
        f"the {name} run goes backward as well, the {other} run does not: {counted(len(ops[n]), 'op')} more",
        [
            f"{name} only: {op_names(side, ops[n])}",
            f"{counted(len(e.case.pairing.left), 'op')} of both runs are paired, and none of them is known to differ"
            if equal
            else "",
        ],
        "Compare a training step with a training step, or what both runs compute forward: record the forward alone.",
    )


def _returned_alone(e: Evidence) -> Cause:
    """One run has a result that the other also computed, and did not return or keep."""
    n = 0 if e.origin.values.right is None else 1
    name, side, op = e.sides[n]
    other = e.sides[1 - n][0]
    value = (e.origin.values.left, e.origin.values.right)[n]
    assert value is not None
    what = side.name(op) if op is not None else "no op"
    return cause(
        "structure",
        "certain",
        f"the {name} run has a result {side.trace.meta(value)} that the {other} run neither returned nor kept",
        [
            f"{name}: {what} made it",
            *(f"{label}: {s.place(i)}" for label, s, i in e.sides if i is not None),
            "neither run has an op that the other has not on the way to it",
        ],
        "Compare what both programs return and keep: an option such as need_weights or output_attentions, or a value"
        " that is held until the recording ends.",
    )


def _more_calls(e: Evidence, n: int, ops: Sequence[int]) -> str:
    """Which calls of the model one run makes that the other does not; empty where it is something else."""
    side = e.sides[n][1]
    extra = extra_calls(e.case.compared, n)
    within = {int(extra.of_op[op]) for op in ops} - {0}
    if not within or not extra.of_op[ops[0]]:
        return ""
    path, numbers, total = extra.numbers(side.contents, within)
    listed = ", ".join(map(str, numbers[:-1])) + " and " if len(numbers) > 1 else ""
    what = f"{counted(len(numbers), 'more call')} of {path or 'the model'}"
    return f"{what}: {'calls' if listed else 'call'} {listed}{numbers[-1]} of {total}"


def _other_source(e: Evidence) -> Cause | None:
    if _is_one_source(e):
        return None
    reader = e.consumer()
    evidence = []
    names = []
    for name, side, value, op, leaf in (
        ("left", e.case.left, e.origin.values.left, reader.left, e.origin.leaf.left),
        ("right", e.case.right, e.origin.values.right, reader.right, e.origin.leaf.right),
    ):
        if value is None:
            continue
        what = _described(side, value, leaf.name if leaf is not None else None)
        names.append(what)
        where = side.place(op) if op is not None else "the result"
        evidence.append(f"{name}: {where} reads {what}")
    evidence.append("both runs have both tensors, with equal contents")
    op_name = e.case.left.name(reader.left) if reader.left is not None else "the result"
    return cause(
        "structure",
        "certain",
        f"{op_name} reads {names[0]} in the left run and {names[-1]} in the right one"
        if len(names) == 2
        else f"{op_name} reads different tensors",
        evidence,
        "Look at the lines above: a variable or a module is mixed up, layers run in another order, or weights are tied in one run only.",
    )


def _is_one_source(e: Evidence) -> bool:
    """Whether both runs read the same place of what the same op returned: then something unseen wrote there since."""
    values = (e.origin.values.left, e.origin.values.right)
    makers, places = [], []
    for (_, side, _), value, leaf in zip(
        e.sides, values, (e.origin.leaf.left, e.origin.leaf.right), strict=True
    ):
        if value is None or leaf is not None:
            return False
        contents = side.contents
        state = int(contents.states.of[value])
        makers.append(int(contents.states.writer[state]))
        output = int(contents.root_slot[contents.value_of_state(state)])
        places.append((output, contents.lies(value)))
    paired = makers[0] >= 0 and int(e.case.pairing.right_of[makers[0]]) == makers[1]
    return paired and places[0] == places[1]


def _described(side: Side, value: int, name: str | None) -> str:
    if name:
        return name
    leaf = next((each for each in side.leaves.of(value) if each.name), None)
    if leaf is not None:
        return leaf.name
    contents = side.contents
    op = int(contents.states.writer[contents.states.of[value]])
    return f"what {side.place(op)} returned" if op >= 0 else "a tensor from before the run"
