"""What each side ran at an origin, why it did, and what made the choice another one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from opdrift.case import Side
from opdrift.causes.evidence import SIDES, Evidence
from opdrift.causes.pins import (
    is_routine,
    of_other_picks,
    of_other_sizes,
    of_other_threads,
    written_out,
)
from opdrift.modelsettings import ATTENTION
from opdrift.picks import AttentionRegion, SdpaCall, decisive
from opdrift.records import Pick, Sides
from opdrift.sizes import threads

#: One op for what is otherwise several: the fast paths of torch.nn and attention.
FUSED: Final = (
    ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"),
    ("scaled_dot_product", "flash_attention", "efficient_attention", "cudnn_attention"),
)
#: Calls of a side that are quoted.
_CALLS: Final = 4


@dataclass(frozen=True, slots=True)
class Choices:
    """Both picks, where they are not the same.

    Attributes:
        sentence: `left ran FLASH_ATTENTION; right ran MATH because attn_mask requires grad`.
        evidence: What each side ran and refused, and which facts made the choice another one.
        pin: How to make both sides run the same, to be typed.
        attention: Another backend or path of attention, not another routine of a library.
    """

    sentence: str
    evidence: tuple[str, ...]
    pin: str
    attention: bool


def kernel_picks(e: Evidence) -> Sides[Pick | None]:
    """What ran on each side: the op's own kernel, or what a stretch of ops stands for."""
    found = [_here(e, n)[0] for n in (0, 1)]
    return Sides(found[0], found[1])


def attention_calls(e: Evidence) -> Sides[SdpaCall | None]:
    """The facts of the call of SDPA that each side makes here, as one op or as torch's math path."""
    return Sides(_here(e, 0)[1], _here(e, 1)[1])


def choices(e: Evidence) -> Choices | None:
    """Both picks in words; None where one is not known, or they are the same."""
    (left, a), (right, b) = _here(e, 0), _here(e, 1)
    if left is None or right is None or _same(left, right):
        return None
    evidence = [f"{label}: {told(p)}" for label, p in zip(SIDES, (left, right), strict=True)]
    evidence += [
        f"{label}: not {other}: {why}"
        for label, p in zip(SIDES, (left, right), strict=True)
        for other, why in p.refused.items()
    ]
    evidence += [
        f"{d.name}: left {d.left}, right {d.right}"
        for d in e.shared.environment
        if d.name.startswith(ATTENTION)
    ]
    changed = decisive(a, b) if a is not None and b is not None else []
    evidence += [f"what changed the pick: {each}" for each in changed]
    return Choices(
        f"left ran {_because(left, right)}; right ran {_because(right, left)}",
        tuple(evidence),
        of_other_picks(left, right),
        attention=left.backend != right.backend or not (is_routine(left) or is_routine(right)),
    )


def other_calls(e: Evidence) -> bool:
    """Whether both sides were seen, and not to call the same: other kernels, sizes, threads, instruction sets."""
    picks = kernel_picks(e)
    left, right = picks.left, picks.right
    if left is None or right is None or not left.observed or not right.observed:
        return False
    return Counter(left.observed) != Counter(right.observed)


def calls_seen(e: Evidence) -> list[str]:
    """What each side was seen to call, where that is not the same and the picks do not tell it."""
    picks = kernel_picks(e)
    if not other_calls(e):
        return []
    return [
        f"{label} called {'; '.join(p.calls[:_CALLS])}"
        + (f"; and {len(p.calls) - _CALLS} others" if len(p.calls) > _CALLS else "")
        for label, p in zip(SIDES, (picks.left, picks.right), strict=True)
        if p is not None and p.calls
    ]


def other_sizes(e: Evidence) -> str:
    """What is said of a product that has other sizes on each side; empty for other ops."""
    op = e.origin.op
    if op.left is None or op.right is None:
        return ""
    left, right = e.case.left.picks.sizes(op.left), e.case.right.picks.sizes(op.right)
    if left is None or right is None or left == right:
        return ""
    words = "batch, m, n, k" if len(left) == len(right) == 4 else "m, n, k"
    shown = [", ".join(map(str, sizes)) for sizes in (left, right)]
    return (
        f"sizes ({words}): {shown[0]} against {shown[1]}; a routine of the same name may add in another order"
        " where the sizes differ"
    )


def for_equal_bits(e: Evidence) -> str:
    """What to do where both sides ran the same with other sizes, or on other numbers of threads; a sentence without its end."""
    picks, op = kernel_picks(e), e.origin.op
    if op.left is None or op.right is None:
        return ""
    if picks.left is not None and other_sizes(e):
        return of_other_sizes(picks.left, e.case.left.trace.header.flags.get("cpu_capability"))
    counts = threads(e.case.left, op.left), threads(e.case.right, op.right)
    return of_other_threads(counts[0]) if counts[0] != counts[1] else ""


def told(pick: Pick) -> str:
    """A pick in a few words: `SGEMM of MKL`."""
    name = pick.backend or pick.name.partition(": ")[2] or pick.name
    return f"{name} of {pick.library}" if pick.library else name


def _same(left: Pick, right: Pick) -> bool:
    if (left.source == "verbose") != (right.source == "verbose") and left.backend == right.backend:
        # rules know MKL's routines by name, and nothing of what oneDNN has inside
        return left.library == right.library and (
            left.library != "MKL" or told(left) == told(right)
        )
    if left.backend is not None or right.backend is not None:
        return (left.backend, left.library) == (right.backend, right.library)
    # a routine is named after its op, and compiled code calls `addmm.out`
    return (
        told(left) == told(right)
        if is_routine(left) and is_routine(right)
        else ((left.name, left.library) == (right.name, right.library))
    )


def _here(e: Evidence, number: int) -> tuple[Pick | None, SdpaCall | None]:
    _, side, op = e.sides[number]
    picks = side.picks
    chosen = side.pick(op)
    if op is not None and chosen is not None and e.origin.story != "region":
        return chosen, picks.call(op)
    found = _stretch(side, e.ops_of(number))
    if isinstance(found, AttentionRegion):
        return picks.of_region(found), picks.call_of_region(found)
    if found is not None:
        return side.pick(found), picks.call(found)
    if chosen is None:
        products = [i for i in e.ops_of(number) if picks.sizes(i) is not None]
        chosen = side.pick(products[0]) if len(products) == 1 else None
    return chosen, None if op is None else picks.call(op)


def _stretch(side: Side, ops: list[int]) -> int | AttentionRegion | None:
    """The fused op in a stretch of ops, or the attention that is written out there."""
    for op in ops:
        if any(word in side.name(op) for words in FUSED for word in words):
            return op
    if not any("softmax" in side.name(op) for op in ops):
        return None
    inside = set(ops)
    return next((r for r in side.attention if inside.intersection(r.ops)), None)


# ---- words -------------------------------------------------------------------------------------------


def _because(own: Pick, other: Pick) -> str:
    """What a side ran, and why not what the other one did."""
    name = _named(own)
    why = own.refused.get(other.backend or "") or own.refused.get(
        _named(other).removeprefix("the ")
    )
    if why is None and own.backend is None and is_routine(own) and own.reason:
        return f"{name} ({own.reason})"
    if why is None and own.backend is not None and other.backend is not None and own.refused:
        backend, reason = next(iter(own.refused.items()))
        why = f"{backend} is refused: {reason}"
    return name if why is None else f"{name} because {why}"


def _named(pick: Pick) -> str:
    if pick.backend is not None:
        return pick.backend
    if is_routine(pick):
        return told(pick)
    if pick.reason is not None and (written_out(pick) or pick.reason.startswith("the fast path")):
        return pick.reason
    return f"attention of {pick.library}" if pick.library else pick.name
