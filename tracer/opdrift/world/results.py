"""What a collective's results must be, given what its ranks gave: equal, laid end to end, or summed up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from opdrift import components, composition
from opdrift.compare import describe, difference, number
from opdrift.tfp1 import Code
from opdrift.tracefile.fingerprints import Fingerprint
from opdrift.world.collectives import Meeting, World
from opdrift.world.handed import Handed, given, got
from opdrift.world.passed import wrong_parts
from opdrift.world.sampled import not_at_samples

#: Relative error that a sum over ranks may have, by component (notes: integrity 11; measured up to 1.3e-7 in
#: float32 and 5e-4 in float16).
TOLERANCE: Final = {Code.F64: 1e-12, Code.F32: 1e-5, Code.F16: 2.0**-9, Code.BF16: 2.0**-7}
#: What storing a sketch leaves out, relative to its norm: 28 bits of each bucket (decision 4).
_STORED: Final = 2.0**-27
_WORDS: Final = {"SUM": "sum", "AVG": "mean", None: "sum or mean"}

#: A reduction that is a sum, or a sum divided; where nothing told which, either may be right.
_LINEAR: Final = frozenset({"SUM", "AVG", None})

#: Every rank gets the same.
_ALIKE: Final = ("all_reduce", "broadcast", "all_gather")

Doubles = npt.NDArray[np.float64]
Tensors = Mapping[int, Sequence[Handed | None]]


@dataclass(frozen=True, slots=True)
class WrongResult:
    """A collective whose result is not what its ranks gave.

    Attributes:
        meeting: Which one.
        kind: "unequal" where ranks got different results that must be the same; "other" where a result is not what
            was given, whether or not all ranks got the same.
        ranks: Ranks that got the wrong one, as far as a majority or a comparison tells; else all.
        evidence: In words, with the values.
    """

    meeting: Meeting
    kind: Literal["unequal", "other"]
    ranks: tuple[int, ...]
    evidence: tuple[str, ...]


def wrong_results(world: World) -> Iterator[WrongResult]:
    """Check every collective whose inputs or outputs are known."""
    for meeting in world.meetings:
        found = _check(world, meeting)
        if found is not None:
            yield found


def by_place(found: Iterable[WrongResult]) -> list[list[WrongResult]]:
    """Those that go wrong alike, at one line of the program and again and again, together."""
    groups: dict[object, list[WrongResult]] = {}
    for wrong in found:
        meeting = wrong.meeting
        part = meeting.members[wrong.ranks[0]]
        key = (
            meeting.group,
            meeting.ranks,
            meeting.what,
            wrong.kind,
            wrong.ranks,
            part.source,
            part.module,
        )
        groups.setdefault(key, []).append(wrong)
    return list(groups.values())


def unread(world: World) -> int:
    """Collectives whose results should be equal and are known on fewer than two ranks: nobody read them in time."""
    return sum(
        meeting.what in _ALIKE
        and sum(any(got(world, part)) for r, part in meeting.members.items()) < 2
        for meeting in world.meetings
    )


def minority(keys: Mapping[int, object]) -> tuple[tuple[int, ...], int]:
    """Ranks that are not with the largest group of equal keys, and the first rank of that group.

    Among groups of one size the one with the lowest rank counts as the usual one: of two ranks nobody can tell
    which is wrong.
    """
    groups: dict[object, list[int]] = {}
    for rank, key in sorted(keys.items()):
        groups.setdefault(key, []).append(rank)
    if len(groups) < 2:
        return (), min(keys, default=0)
    usual = max(groups.values(), key=len)
    return tuple(rank for rank in sorted(keys) if rank not in usual), usual[0]


def _check(world: World, meeting: Meeting) -> WrongResult | None:
    inputs = {rank: given(world, part) for rank, part in meeting.members.items()}
    outputs = {rank: got(world, part) for rank, part in meeting.members.items()}
    if meeting.what in _ALIKE:
        unequal = _unequal(meeting, outputs)
        if unequal is not None:
            return unequal
    if meeting.what == "broadcast":
        return _broadcast(meeting, inputs, outputs)
    if meeting.what == "all_gather":
        return _gathered(meeting, inputs, outputs)
    if meeting.what in ("gather", "scatter", "all_to_all"):
        passed = wrong_parts(world, meeting, outputs)
        return None if passed is None else WrongResult(meeting, "other", (passed[0],), passed[1])
    if meeting.is_whole and meeting.what in ("all_reduce", "reduce"):
        return _reduced(meeting, inputs, outputs)
    if meeting.is_whole and meeting.what == "reduce_scatter":
        return _scattered(meeting, inputs, outputs)
    return None


def _unequal(meeting: Meeting, outputs: Tensors) -> WrongResult | None:
    """Ranks that got something else than most."""
    for slot in range(max(map(len, outputs.values()), default=0)):
        known = {r: h for r, each in outputs.items() if (h := _at(each, slot)) is not None}
        odd, usual = minority({rank: handed.key for rank, handed in known.items()})
        if not odd:
            continue
        said = f"rank {odd[0]} got another result than rank {usual}"
        parts = zip(known[usual].parts, known[odd[0]].parts, strict=False)
        differing = next(((a, b) for a, b in parts if a.key != b.key), None)
        if differing is not None:
            said += f": {describe(difference(*differing))}"
        return WrongResult(meeting, "unequal", odd, (said,))
    return None


def _at(tensors: Sequence[Handed | None], slot: int) -> Handed | None:
    return tensors[slot] if slot < len(tensors) else None


def _broadcast(meeting: Meeting, inputs: Tensors, outputs: Tensors) -> WrongResult | None:
    sender = next(iter(meeting.members.values())).root
    if sender is None:
        return None
    for slot, sent in enumerate(inputs.get(sender, ())):
        wrong = tuple(rank for rank, each in outputs.items() if _other(sent, _at(each, slot)))
        if wrong:
            who = ", ".join(map(str, wrong))
            said = f"what rank {who} got is not what rank {sender} sent"
            return WrongResult(meeting, "other", wrong, (said,))
    return None


def _other(one: Handed | None, other: Handed | None) -> bool:
    return one is not None and other is not None and one.key != other.key


def _gathered(meeting: Meeting, inputs: Tensors, outputs: Tensors) -> WrongResult | None:
    """Each rank's segment must be what that rank gave, in the order of the group."""
    sent = [inputs.get(rank, ()) for rank in meeting.ranks]
    if any(len(mine) != 1 for mine in sent):
        return None
    shards = [mine[0] for mine in sent]
    for rank, pieces in outputs.items():
        wrong: list[str] = []
        if len(pieces) == len(shards) > 1:
            wrong = [
                f"on rank {rank}, the part of rank {owner} is not what rank {owner} gave"
                for owner, mine, piece in zip(meeting.ranks, shards, pieces, strict=True)
                if _other(mine, piece)
            ]
        elif len(pieces) == 1 and _is_not_joined(pieces[0], shards):
            wrong = [f"what rank {rank} got is not what the ranks gave, laid end to end"]
        if wrong:
            return WrongResult(meeting, "other", (rank,), tuple(wrong))
    return None


def _is_not_joined(whole: Handed | None, shards: Sequence[Handed | None]) -> bool:
    known = [shard.digest for shard in shards if shard is not None]
    if whole is None or len(known) < len(shards) or {s.code for s in known} != {whole.digest.code}:
        return False
    if sum(s.n for s in known) != whole.digest.n:
        return False  # waited for on a view: what pads uneven shards (DTensor) is not read
    return not composition.is_gathered(whole.digest, known)


# ---- reductions ----------------------------------------------------------------------------------------


def _reduced(meeting: Meeting, inputs: Tensors, outputs: Tensors) -> WrongResult | None:
    for rank, results in outputs.items():
        if meeting.what == "reduce" and meeting.members[rank].root != rank:
            continue  # scratch on the other ranks
        for slot, result in enumerate(results):
            summands = [_at(inputs[r], slot) for r in meeting.ranks]
            said = _not_reduced(result, summands, _reduction(meeting))
            if said is not None:
                return WrongResult(meeting, "other", (rank,), (f"on rank {rank}, {said}",))
    return None


def _scattered(meeting: Meeting, inputs: Tensors, outputs: Tensors) -> WrongResult | None:
    """The results of all ranks together hold the sum of what all gave."""
    reduction = _reduction(meeting)
    if reduction is None or not all((*inputs.values(), *outputs.values())):
        return None  # nothing told which, or the rows of a rank were lost when it was killed
    results = list(chain.from_iterable(outputs.values()))
    said = _not_summed(
        results, list(chain.from_iterable(inputs.values())), reduction, len(meeting.ranks)
    )
    return None if said is None else WrongResult(meeting, "other", tuple(meeting.members), (said,))


def _reduction(meeting: Meeting) -> str | None:
    return next((p.reduction for p in meeting.members.values() if p.reduction is not None), None)


def _not_reduced(
    result: Handed | None, summands: Sequence[Handed | None], reduction: str | None
) -> str | None:
    """Why a result is not the reduction of its summands; None if it is, or if that cannot be told."""
    known = [s for s in summands if s is not None]
    if result is None or len(known) < len(summands) or any(s.n != result.n for s in known):
        return None
    wholes = [handed.whole for handed in (result, *known)]
    prints = [p for p in wholes if p is not None]
    if len(prints) < len(wholes):
        return _not_summed([result], known, reduction, len(known))
    told, *terms = prints
    if len({p.code for p in prints}) > 1 or any(p.nonfinite for p in prints):
        return None
    said = not_at_samples(told, terms, reduction, _tolerance(told, len(terms)))
    if said is not None:
        return said
    if reduction in ("MAX", "MIN"):
        return _not_extreme(told, terms, reduction)
    # a sum of whole numbers may run over; DDP, which says nothing of its reduction, has none
    whole = not components.is_float(told)
    if whole and (reduction != "SUM" or sum(t.absmax for t in terms) >= _largest(told)):
        return None
    return _not_linear(told, terms, reduction)


def _largest(fingerprint: Fingerprint) -> float:
    """A bound of what whole numbers of a type hold, and of those that float64 holds exactly."""
    return min(2.0 ** (8 * Code(fingerprint.code).bytes - 1), 2.0**53)


def _not_extreme(
    result: Fingerprint, summands: Sequence[Fingerprint], reduction: str
) -> str | None:
    name = reduction.lower()
    pick = max if reduction == "MAX" else min
    wanted, found = pick(getattr(s, name) for s in summands), getattr(result, name)
    if wanted == found:
        return None
    return f"its {name}imum is {number(found)}, that of what was given is {number(wanted)}"


def _not_linear(
    result: Fingerprint, summands: Sequence[Fingerprint], reduction: str | None
) -> str | None:
    size = len(summands)
    vectors = [_vector(p) for p in (result, *summands)]
    known = [v for v in vectors if v is not None]
    if reduction not in _LINEAR or len(known) < len(vectors) or len(set(map(len, known))) > 1:
        return None
    told, *terms = known
    total, norms = np.sum(terms, axis=0), sum(float(np.linalg.norm(term)) for term in terms)
    off = min(
        float(np.linalg.norm(total / d - told)) / (norms / d or 1.0)
        for d in _divisors(reduction, size)
    )
    tolerance = _tolerance(result, size) + (_STORED if result.sketch is not None else 0.0)
    if off <= tolerance:
        return None
    return (
        f"it is {number(off)} of what was given away from the {_WORDS[reduction]} of the {size} ranks' parts;"
        f" rounding explains {number(tolerance)}"
    )


def _divisors(reduction: str | None, size: int) -> tuple[int, ...]:
    """By what the sum over so many ranks may be divided."""
    return {"SUM": (1,), "AVG": (size,)}.get(reduction or "", (1, size))


def _vector(fingerprint: Fingerprint) -> Doubles | None:
    """What is linear in the content: its sketch, or all of it where it is small."""
    if fingerprint.sketch is not None:
        return fingerprint.sketch if bool(np.isfinite(fingerprint.sketch).all()) else None
    found = components.numbers(fingerprint)
    return found if found is not None and len(found) == fingerprint.n else None


def _tolerance(fingerprint: Fingerprint, size: int) -> float:
    return TOLERANCE.get(Code(fingerprint.code), 0.0) * math.sqrt(size)


def _not_summed(
    results: Sequence[Handed | None],
    summands: Sequence[Handed | None],
    reduction: str | None,
    size: int,
) -> str | None:
    """As `_not_linear` where results are known in parts only: all elements must add up.

    A sketch goes by an element's position in its tensor, so those of parts do not add up to that of the whole.
    """
    known = [each for each in (*results, *summands) if each is not None]
    prints = [part for each in known for part in each.parts]
    if reduction not in _LINEAR or not results or len(known) < len(results) + len(summands):
        return None
    if any(p.nonfinite or not components.is_float(p) for p in prints):
        return None
    found, total = (
        sum(p.sum for each in side if each is not None for p in each.parts)
        for side in (results, summands)
    )
    # by Cauchy and Schwarz an error of this part of the norm moves the sum by no more than sqrt(n) times it
    scale = sum(math.sqrt(p.ssq * p.n) for each in summands if each is not None for p in each.parts)
    tolerance = _tolerance(prints[0], size)
    divisors = _divisors(reduction, size)
    if any(abs(total / d - found) <= tolerance * (scale / d or 1.0) for d in divisors):
        return None
    return (
        f"its elements add up to {number(found)}, the {_WORDS[reduction]} of what {size} ranks gave to"
        f" {number(total / divisors[0])}"
    )
