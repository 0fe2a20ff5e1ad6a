"""What counts of the origins of one sample: those that make a difference to its results.

Runs of batches of other sizes differ in ways that do no harm: positions that all count padding, where attention
looks at distances only; places in a buffer that all samples share; padding that a library clears where there is some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from opdrift.case import Case
from opdrift.diagnose.judged import Judged
from opdrift.diagnose.reach import reach_of
from opdrift.origins.effects import Effects, cancelled
from opdrift.origins.model import Origin
from opdrift.origins.readers import Readers
from opdrift.origins.search import Found
from opdrift.sizes import Size

#: What rounding may make of float32 at most on a short way, and what turning by an angle of a thousand loses.
_ROUNDING: Final = 1e-5
_TURNED: Final = 1e-4
#: Tables of sines in 16 bits are rounded at other positions otherwise: measured up to 1.5 times what products leave.
_ROTARY: Final = 4
#: What is left where a difference cancelled may still grow by so much beyond that, in models that amplify.
_AMPLIFIED: Final = 16
_WHOLE_NUMBERS: Final = ("int", "uint", "bool")


def with_effect(
    case: Case,
    found: Found,
    judged: list[Judged],
    *,
    judge: Callable[[Origin], Judged],
    unexplained: Callable[[Sequence[Judged]], Iterable[Judged]],
) -> list[Judged]:
    """The origins without those that make no difference to a result of the sample.

    If nothing is left, the first op at which such a difference cancels stands for what is left of it. Rotary
    positions cancel in attention whose padding is hidden: if it is not, that is what is wrong.

    Args:
        case: One sample of each batch.
        found: What the search brought.
        judged: Its origins.
        judge: Judges an origin.
        unexplained: Ops whose inputs do not explain their results, in order, if no origin is material. The first that
            makes a difference counts.
    """
    sinks = [s for s in found.sinks if s.differs]
    limit = rounding_at_results(case)
    readers = Readers(case.compared)
    of_positions = Effects(case, sinks, max(_ROTARY * limit, _TURNED), readers)
    of_places = Effects(case, sinks, limit, readers)
    kept: list[Judged] = []
    ends, bare = set[int](), set[int]()
    for each in judged:
        counts = _counts_padding(each)
        effects = of_positions if counts else of_places
        may_cancel = (
            counts
            or _is_of_all(case, each)
            or _is_unsized(each)
            or _takes_padded_position(case, each)
        )
        ended = effects.ends(each.origin) if may_cancel else None
        if ended is not None:
            ends.update(ended)
            continue
        instead = effects.unmasked(each.origin) if counts else None
        if instead is None:
            kept.append(each)
        elif instead.row not in bare:
            bare.add(instead.row)
            kept.append(judge(instead))
    for each in unexplained(kept):
        # behind the first layer, what positions turn differs by rounding already
        counts = _counts_padding(each)
        ended = of_positions.ends(each.origin) if counts else None
        if ended is None:
            instead = of_positions.unmasked(each.origin) if counts else None
            kept.append(each if instead is None else judge(instead))
            break
        ends.update(ended)
    if len(kept) < len(judged) and not any(j.size.material for j in kept):
        if of_places.result_differs(_AMPLIFIED if ends else 1):
            return judged  # their effect was lost from sight, and something has one
        first = next(filter(None, map(partial(cancelled, case), sorted(ends))), None)
        if not kept and first is not None:
            return [judge(first)]
    return kept or judged


def out_of_sight(case: Case, origin: Origin, size: Size) -> Size:
    """The size of an origin; behind ops at which the sample could not be followed, rounding of all of them counts.

    An op that only moves numbers is exact, but what it moves was computed where nothing is known of the sample.
    """
    gap, bound = size.difference, size.bound
    if not case.by_sample or origin.inputs_match is not None or bound is None or not bound.exact:
        return size
    if origin.story != "op" or origin.settings or gap is None or gap.relative is None:
        return size
    value = origin.values.left
    if value is None or case.left.trace.meta(value).dtype.startswith(_WHOLE_NUMBERS):
        return size
    limit = rounding_at_results(case)
    if gap.nonfinite_changed or gap.relative > limit:
        return size
    return replace(size, limit=limit, material=False)


def rounding_at_results(case: Case) -> float:
    """The largest relative difference of results that rounding explains in these runs."""
    reach = reach_of(case, 0.0)
    return max(_ROUNDING, reach.explained if reach is not None else 0.0)


def _counts_padding(judged: Judged) -> bool:
    return judged.origin.kind == "op" and judged.causes[0].slug == "position-ids"


def _is_of_all(case: Case, judged: Judged) -> bool:
    """Whether an op computes whole numbers of all samples: where a row goes, not what is in it."""
    value = judged.origin.values.left
    if judged.origin.kind != "op" or value is None or judged.causes[0].slug != "batch-mixing":
        return False
    return case.left.trace.meta(value).dtype.startswith(_WHOLE_NUMBERS)


def _takes_padded_position(case: Case, judged: Judged) -> bool:
    """Whether an op takes whole numbers of padding: a position or a token, which the rest may leave out."""
    value = judged.origin.values.left
    if judged.origin.story != "padding" or value is None:
        return False
    return case.left.trace.meta(value).dtype.startswith(_WHOLE_NUMBERS)


def _is_unsized(judged: Judged) -> bool:
    """Whether one run did something that the other did not, and how far that made the sample differ is not known."""
    gap = judged.size.difference
    return judged.origin.kind == "structure" and (gap is None or gap.relative is None)
