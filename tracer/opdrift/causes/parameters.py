"""Parameters and buffers that differ."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from opdrift import components
from opdrift.case import Side
from opdrift.causes.evidence import SIDES, Evidence, cause, counted, some, tally
from opdrift.causes.likeness import Kind
from opdrift.causes.loaded import Ways, both_wrote, held, how_drawn, one_run_wrote
from opdrift.causes.memory import is_optimised, left_behind, left_behind_words
from opdrift.causes.relations import Relations, common, moved_words
from opdrift.compare import Difference, describe, difference, number
from opdrift.provenance import Provenance
from opdrift.provenance.ops import COPIES, DRAWS, FILLS, operator, short_name
from opdrift.records import Cause, Leaf, Sides
from opdrift.tracefile.fingerprints import Fingerprint

#: Leaves whose provenance and size are looked at one by one.
_LOOKED_AT: Final = 2_000
#: Two independent draws of the same spread are sqrt(2) apart, beside the norm of one; a sketch of 16 buckets says so
#: to 18 % (one standard deviation).
_INDEPENDENT: Final = (0.9, 1.95)
#: Their 32 samples have a correlation of 0.18 (one standard deviation).
_UNCORRELATED: Final = 0.5
#: Spreads that differ by less than this factor count as the same.
_SAME_SPREAD: Final = 1.5


def weights(e: Evidence) -> Cause | None:
    """Parameters differ between the runs."""
    relations = e.shared.once(Relations)
    leaf = e.origin.leaf.left or e.origin.leaf.right
    if e.origin.kind != "leaf" or leaf is None or leaf.kind != "parameter":
        return None
    members = _members(e)
    if all(map(e.shared.are_casts, members)):
        return None  # the type, which is told, is all that differs
    headline = _headline(e, leaf)
    equal = e.shared.model_leaves[2]
    ways = Ways(e, members)
    sizes = _sizes(e, members)
    how = _how(e, members, sizes, ways)
    evidence = [
        *how.evidence,
        *_left_behind(e),
        _under_one_prefix(e.origin.names, equal),
        *how_drawn(ways),
        *_dropped(e),
        *sizes.words,
        (sizes.drawn_words if how.drawn else sizes.apart_words) if how.never_loaded else "",
        *relations.tie_words(e.origin.names),
        _constant_fills(e, equal, ways) if how.never_loaded else "",
        *_transfers(e),
    ]
    summary = f"{headline}; {_agreeing(e, how.words)}"
    remedy = how.remedy
    if how.never_loaded:
        remedy = _seed_remedy(e, members) + _load_remedy(e, certain=how.drawn)
    return cause("weights", "certain", summary, evidence, remedy)


def _headline(e: Evidence, leaf: Leaf) -> str:
    total, differing = e.shared.model_leaves[0], _differing(e)
    if not leaf.name or not total:
        return f"the weight {leaf.name or 'without a name'} differs"
    return (
        f"{differing} of {counted(total, 'tensor')} of the model "
        f"{'differs' if differing == 1 else 'differ'} before the first op"
    )


def _differing(e: Evidence) -> int:
    """How many tensors of the model differ; those that a cast alone sets apart count only where there are no others."""
    return e.shared.model_leaves[1] or len(e.origin.names)


def _agreeing(e: Evidence, words: str) -> str:
    """How weights differ, after the headline: "they", or of a single one its two contents."""
    if _differing(e) > 1:
        return words
    return re.sub(r"\bthem\b", "it", re.sub("^they ", "its two contents ", words))


_SAME_CHECKPOINT: Final = "Load the same checkpoint in both runs: compare the paths and checksums of what torch.load reads, and record again."
_SAME_LOAD: Final = (
    "Load the same checkpoint into the model that runs, in both: begin the recordings before the load, compare the paths and"
    " checksums of what is read, and look at what the load says: result = model.load_state_dict(state, strict=True); with"
    " strict=False print result.missing_keys."
)
_SAME_FILES: Final = (
    "Compare what these files hold with the checkpoint that is meant: an offload folder keeps the files of the model that was"
    " offloaded into it before. Give it an empty folder, or delete this one."
)


#: What is written into a parameter by who initialises or loads it, not by who trains it.
_INITIALISED: Final = frozenset(["drawn", "filled", "copied", "uninitialised"])


@dataclass(frozen=True, slots=True)
class _How:
    """In which way weights differ."""

    words: str
    remedy: str = _SAME_CHECKPOINT
    evidence: tuple[str, ...] = ()
    never_loaded: bool = False
    drawn: bool = False


def _how(e: Evidence, members: Sequence[Sides[Leaf | None]], sizes: _Sizes, ways: Ways) -> _How:
    """In which way weights differ: the first that explains most of them."""
    relations = e.shared.once(Relations)
    moved = relations.moved(members)
    if 2 * len(moved) > len(members):
        return _How(
            moved_words(moved, len(members)),
            "Compare the keys of the two state dicts with the names of the modules: a renaming, an order of layers or"
            " two assignments are mixed up.",
            ("their digests are equal bit for bit",),
        )
    one = one_run_wrote(e, ways)
    if one is not None:
        words, evidence, number = one
        if ways.files():
            return _How(words, _SAME_FILES, evidence)
        return _How(words, evidence=evidence, never_loaded=ways.sides[number][0].way == "loaded")
    if (fresh := _fresh(ways)) is not None:
        return fresh
    both = both_wrote(e, ways)
    way = common([f for f in relations.likenesses(members) if f.kind != "constant"])
    if way is not None and way[0] in _WAYS:
        kind, found = way
        words, remedy = _WAYS[kind]
        which = "" if found[0].side is None else SIDES[found[0].side]
        told = {"side": which, "detail": found[0].detail}
        return _How(
            words.format(**told),
            remedy.format(**told),
            (
                found[0].words
                + (f" ({len(found)} of {len(members)} alike)" if len(members) > 1 else ""),
                *(both[1] if both is not None else ()),
            ),
        )
    if both is not None and (way is None or way[0] == "far"):
        return _How(both[0], _SAME_FILES if ways.files() else _SAME_CHECKPOINT, both[1])
    if sizes.independent:
        shown = "" if _has_offloaded(e) else "; no load of them is recorded"
        return _How(
            "they are unrelated, as two random initialisations are, or two checkpoints that were trained from such"
            + shown,
            never_loaded=True,
        )
    if sizes.single is not None:
        return _How(
            f"one element of {e.origin.names[0]} changed",
            "Compare checksums of the two weight files, copy the file anew, and test the disk and memory it came from.",
        )
    if way is not None and way[0] == "near":
        return _How(
            "they are near each other, as two checkpoints of one training are, or weights that one run changed"
            " (merged, averaged, trained on)",
            "Load the same checkpoint in both runs: compare the step, path and checksum of what torch.load reads; look"
            " for EMA weights, merged adapters and an optimizer step before the comparison.",
        )
    return _How("the runs were given different weights")


def _has_offloaded(e: Evidence) -> bool:
    """Whether a run wrote tensors into files: what a library wrote there may be a checkpoint that it loaded."""
    return any(e.marks(lambda m: m.kind == "move" and m.fields.get("direction") == "write"))


def _fresh(ways: Ways) -> _How | None:
    """Words for what a run drew and no checkpoint reached."""
    fresh = [SIDES[n] for n in (0, 1) if ways.is_fresh(n)]
    if fresh:
        where = f"in the {fresh[0]} run " if len(fresh) == 1 else ""
        every = [h.made.kind for n in (0, 1) if SIDES[n] in fresh for h in ways.sides[n]]
        if set(every) == {"drawn"}:
            words = "each was last written by a random draw, none by a copy from a checkpoint"
        else:
            words = "each was last drawn at random or filled with a constant, none was copied from a checkpoint"
        return _How(where + words, never_loaded=True, drawn=True)
    drawn = [f"{len(ways.drawn(n))} in the {SIDES[n]} run" for n in (0, 1) if ways.drawn(n)]
    if not drawn:
        return None
    return _How(
        f"some were last written by a random draw, not by a copy from a checkpoint: {' and '.join(drawn)}",
        never_loaded=True,
        drawn=True,
    )


#: Kind of likeness -> what happened, and what to do.
_WAYS: Final[dict[Kind, tuple[str, str]]] = {
    "rearranged": (
        "they are the same numbers in another order: rows or columns permuted, or a weight transposed",
        "Look at how the checkpoint is converted: transpose (Conv1D holds the transposed weight of Linear), the order of"
        " q, k and v in a packed projection, the interleaving of rotary halves, the order of vocabulary entries.",
    ),
    "negated": (
        "every number has the other sign",
        "Look for a sign in the conversion of the checkpoint, and compare checksums of the two weight files.",
    ),
    "scaled": (
        "they differ by one factor, {detail}",
        "Look for a scale that was folded into the weights in one run only (attention scale, LoRA alpha, weight norm).",
    ),
    "zeroed": (
        "some elements are 0 in the {side} run, and the others are the same",
        "Look for pruning, weight masks, or a copy that stopped early, in the {side} run's weights.",
    ),
    "cast": (
        "the {side} run's went through {detail} and back",
        "Save and load the weights in one dtype: look for .half(), .bfloat16(), torch_dtype= and a checkpoint that was"
        " exported in less precision.",
    ),
    "rounding": (
        "they differ by as little as rounding leaves: computed, merged or converted twice, in another order or on"
        " another machine",
        "Compute the weights once, save them, and load that file in both runs.",
    ),
}


def weights_written(e: Evidence) -> Cause | None:
    """A parameter was written once more in one run: initialised again, or updated."""
    leaf = e.origin.leaf.left or e.origin.leaf.right
    found = e.any_op
    if e.origin.story != "written" or leaf is None or leaf.kind != "parameter" or found is None:
        return None
    name, side, writer = found
    value = (e.origin.values.left, e.origin.values.right)[0 if name == "left" else 1]
    made = side.lineage.of(value) if value is not None else None
    replaces = operator(side.name(writer)) in DRAWS | FILLS | COPIES
    initialised = replaces and made is not None and made.kind in _INITIALISED
    if not initialised and is_optimised(e, leaf) and not _writes_by_itself(side, writer):
        return None  # a step of the optimizer: what that does more in one run is the cause
    what = {
        "drawn": "drawn at random again",
        "filled": "filled with a constant",
        "copied": "copied over",
    }
    how = what.get(made.kind, "changed") if initialised and made is not None else "changed"
    op = side.op(writer)
    at = f" by {short_name(op.name)} (op {op.seq}{f', {op.source}' if op.source else ''})"
    return cause(
        "weights",
        "certain",
        f"{leaf.name} was {how}{at if how == 'changed' else ''} in the {name} run, and not in the other",
        [
            f"{name}: {side.place(writer)} wrote it",
            f"{name}: written last by {' <- '.join(made.chain[:4])}"
            if made is not None and made.chain
            else "",
            "the other run still has what it had before that write",
        ],
        "Look at the line that changes it: let only the optimizer change a parameter, and equally often in both runs."
        if how == "changed"
        else "Initialise first, then load the checkpoint, and step the optimizer equally often in both runs.",
    )


def _writes_by_itself(side: Side, writer: int) -> bool:
    """Whether the line that writes does nothing that an optimizer's step does: no op of it reads another tensor."""
    ops = side.trace.ops
    line = int(ops.source[writer])
    if line < 0 or side.op(writer).source is None:
        return False
    return not any(_updates(side, int(op)) for op in np.flatnonzero(ops.source == line))


def _updates(side: Side, writer: int) -> bool:
    """Whether an op makes the next content of a tensor of the one before and of another tensor, as `add_` does."""
    storages = side.trace.values.storage[side.trace.ops.inputs[writer]]
    return len(set(storages.tolist())) > 1 and operator(side.name(writer)) not in COPIES


def retied(e: Evidence) -> Cause | None:
    """A parameter with two names is one in one run and two in the other, so its gradients are added in one only."""
    value = e.origin.values.left if e.origin.values.left is not None else e.origin.values.right
    backward = any(
        side.trace.ops.phase[op] for n, (_, side, _) in enumerate(e.sides) for op in e.ops_of(n)
    )
    if e.origin.story != "region" or value is None or not backward:
        return None
    side = e.case.left if e.origin.values.left is not None else e.case.right
    shape = side.trace.meta(value).shape
    ties = [
        tie
        for tie in e.shared.once(Relations).ties
        if side.trace.meta(side.leaves.by_name[tie.names[0]][0].value).shape == shape
    ]
    if not ties:
        return None
    names, one = some(ties[0].names), SIDES[ties[0].side]
    return cause(
        "weights",
        "likely",
        f"{names} are one parameter in the {one} run and {len(ties[0].names)} in the other",
        [
            *e.shared.once(Relations).tie_words(ties[0].names),
            "the backward pass adds the gradients of all its uses where it is one parameter",
            *(f"{name}: {s.place(op)}" for name, s, op in e.sides if op is not None),
        ],
        "Tie the weights again after the model is built, loaded or moved (head.weight = embed.weight, tie_weights()), or"
        " in neither run.",
    )


def buffer_state(e: Evidence) -> Cause | None:
    """A buffer differs: running statistics, counters, caches, tables."""
    leaf = e.origin.leaf.left or e.origin.leaf.right
    if e.origin.kind != "leaf" or leaf is None or leaf.kind != "buffer":
        return None
    names = e.origin.names
    sizes = _sizes(e, _members(e))
    total, differing = e.shared.model_leaves[0], _differing(e)
    what = (
        "buffers differ before the first op that reads them"
        if len(names) > 1
        else "the buffer differs before the first op that reads it"
    )
    evidence = [
        f"{some(names, 6)} ({differing} of {counted(total, 'tensor')} of the model differ)",
        *how_drawn(Ways(e, _members(e))),
        *_casts(e),
        *_left_behind(e),
        *sizes.words,
        sizes.drawn_words,
        _running_statistics(names),
    ]
    return cause(
        "buffer-state",
        "certain",
        f"{what}: {some(names)}",
        evidence,
        "Save and load buffers with the weights (persistent buffers are in state_dict()); call model.eval() so that"
        " running statistics stay as they are; reset caches between runs.",
    )


# ---- facts -------------------------------------------------------------------------------------------


def _members(e: Evidence) -> list[Sides[Leaf | None]]:
    return [e.origin.leaf, *e.origin.members][:_LOOKED_AT]


def _provenances(e: Evidence, members: Sequence[Sides[Leaf | None]]) -> Sides[list[Provenance]]:
    left = [e.case.left.lineage.of(m.left.value) for m in members if m.left is not None]
    right = [e.case.right.lineage.of(m.right.value) for m in members if m.right is not None]
    return Sides(left, right)


class _Sizes:
    """How far the leaves are apart."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.drawn_words = ""
        self.apart_words = ""
        self.independent = False
        self.single: Difference | None = None


def _sizes(e: Evidence, members: Sequence[Sides[Leaf | None]]) -> _Sizes:
    found = _Sizes()
    relatives: list[float] = []
    singles: list[tuple[Leaf, Difference]] = []
    independent = 0
    for m in members:
        if m.left is None or m.right is None:
            continue
        a, b = e.case.left.fingerprint(m.left.value), e.case.right.fingerprint(m.right.value)
        if a is None or b is None:
            continue
        gap = difference(a, b)
        if not gap.comparable or gap.relative is None:
            continue
        relatives.append(gap.relative)
        independent += _is_independent(a, b, gap)
        if gap.changed_index is not None:
            singles.append((m.left, gap))
    if len(relatives) == len(singles) == 1:
        (leaf, found.single) = singles[0]
        index = _index(e, leaf, found.single.changed_index or 0)
        found.words.append(f"{leaf.name}{index}: {describe(found.single)}")
    if relatives:
        low, high = min(relatives), max(relatives)
        spread = number(low) if low == high else f"{number(low)} to {number(high)}"
        found.words.append(f"relative difference {spread}")
    # a bias or a norm may be constant at the start; most of what differs must look drawn
    found.independent = independent > 0 and independent * 2 > len(relatives)
    if found.independent:
        apart = (
            f"{independent} of them are about sqrt(2) times their size apart with the same spread"
        )
        found.drawn_words = f"{apart}: that is what two independent random initialisations give, no training or rounding does"
        found.apart_words = (
            f"{apart}: so far apart are two random initialisations, and what is trained from two; rounding and further"
            " training leave less between them"
        )
    return found


def _is_independent(a: Fingerprint, b: Fingerprint, gap: Difference) -> bool:
    if gap.relative is None or a.ssq <= 0 or b.ssq <= 0:
        return False
    ratio = (a.ssq / b.ssq) ** 0.5
    same = 1 / _SAME_SPREAD < ratio < _SAME_SPREAD
    apart = _INDEPENDENT[0] < gap.relative / max(1.0, 1 / ratio) < _INDEPENDENT[1]
    x, y = components.numbers(a), components.numbers(b)
    if not same or not apart or x is None or y is None or len(x) != len(y):
        return False
    return bool(abs(x @ y) < _UNCORRELATED * math.sqrt((x @ x) * (y @ y)))


def _index(e: Evidence, leaf: Leaf, flat: int) -> str:
    shape = e.case.left.trace.meta(leaf.value).shape
    if len(shape) < 2:
        return ""
    index: list[int] = []
    for size in reversed(shape):
        index.append(flat % size)
        flat //= size
    return f" [{', '.join(map(str, reversed(index)))}]"


def _under_one_prefix(names: Sequence[str], equal: Sequence[str]) -> str:
    """Whether all that differ are in one part of the model, and the rest is not."""
    if len(names) < 2 or not equal:
        return ""
    path = _common_path(names)
    if not path or any(n == path or n.startswith(f"{path}.") for n in equal):
        return f"{counted(len(equal), 'tensor')} of the model are equal in both runs: {some(equal)}"
    return f"all that differ are below {path}; what is elsewhere is equal: {some(equal)}"


def _common_path(names: Sequence[str]) -> str:
    """The module that all names lie in."""
    paths = [n.split(".")[:-1] for n in names]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _constant_fills(e: Evidence, equal: Sequence[str], ways: Ways) -> str:
    """Equal tensors that hold one number, as a fresh model's norms and biases do, and that a run loaded no more than these."""
    sides = e.case.left, e.case.right
    # who is known, or taken, not to have loaded what differs
    without = [n for n in (0, 1) if ways.sides[n] and ways.sides[n][0].way in ("fresh", "kept")]
    constant = []
    for name in equal:
        starts = [side.starts.of(name) for side in sides]
        found = [s and held(side, s.leaf) for side, s in zip(sides, starts, strict=True)]
        print_ = sides[0].fingerprint(starts[0].leaf.value) if starts[0] is not None else None
        if print_ is None or print_.n <= 1 or print_.min != print_.max:
            continue
        if any((own := found[n]) and own.way == ways.sides[n][0].way for n in without):
            constant.append(name)
    if not constant:
        return ""
    return (
        f"{len(constant)} of the {len(equal)} tensors that agree hold a single number, as a fresh norm or bias"
        f" does ({some(constant, 3)}): they may not be loaded either"
    )


def _dropped(e: Evidence) -> list[str]:
    """What integrations say about checkpoints that were read and not used."""
    found = [
        f"{side}: {mark.fields['summary']}"
        for side, mark in e.marks(lambda m: m.kind == "checkpoint-dropped")
        if mark.fields.get("summary")
    ]
    return list(dict.fromkeys(found))


def _seed_remedy(e: Evidence, members: Sequence[Sides[Leaf | None]]) -> str:
    """What to do where both runs drew their weights with seeds that were chosen, and differ."""
    made = _provenances(e, members)
    seeds = [
        sorted({p.seed for p in side if p.seeded and p.seed is not None})
        for side in (made.left, made.right)
    ]
    if not all(seeds) or seeds[0] == seeds[1]:
        return ""
    left, right = (some([str(seed) for seed in side]) for side in seeds)
    return f"If random weights are meant, seed both runs alike: torch.manual_seed was given {left} against {right}. Otherwise: "


def _load_remedy(e: Evidence, *, certain: bool) -> str:
    """What to do where a checkpoint did not reach the model; not `certain`: or where another one did."""
    for _, mark in e.marks(lambda m: m.kind == "checkpoint-dropped"):
        if mark.fields.get("try"):
            return str(mark.fields["try"])
    if not certain:
        return _SAME_LOAD
    return (
        "Load the checkpoint into the model that runs, and look at what the load says:"
        " result = model.load_state_dict(state, strict=True); with strict=False print result.missing_keys."
    )


def _transfers(e: Evidence) -> list[str]:
    """What integrations checked about gathers and moves."""
    found = []
    for name, side, _ in e.sides:
        checked = [
            m for m in side.trace.marks if m.kind in ("gather", "move") and "intact" in m.fields
        ]
        if not checked:
            continue
        bad = sum(1 for m in checked if m.fields["intact"] is False)
        kinds = ", ".join(counted(n, kind) for kind, n in tally(m.kind for m in checked))
        found.append(
            f"{name}: {kinds} checked, "
            + (f"{bad} not intact" if bad else "all intact: moving the weights changed nothing")
        )
    return found


def _casts(e: Evidence) -> list[str]:
    """Buffers that a library cast for good."""
    names = set(e.origin.names)
    found = []
    for side, mark in e.marks(lambda m: m.kind == "buffer-cast"):
        name = str(mark.fields.get("name") or mark.fields.get("buffer") or "")
        if name in names or any(n.endswith(name) for n in names if name):
            found.append(f"{side}: {mark.fields.get('library', 'a library')} cast {name} for good")
    return found


def _left_behind(e: Evidence) -> list[str]:
    """Whether one run starts from what the other left."""
    found = left_behind(e)
    if found is None:
        return []
    name, side, writer = found
    return [f"{name}: {side.place(writer)} writes into it", left_behind_words(name)]


def _running_statistics(names: Sequence[str]) -> str:
    running = [n for n in names if "running_" in n or "num_batches_tracked" in n]
    return (
        f"running statistics, rewritten by every forward in training mode: {some(running)}"
        if running
        else ""
    )
