"""Two distributed runs: where among the ranks a difference originates, and who only receives it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from opdrift.diagnose import one_process
from opdrift.diagnose.ended import Compare, Endings
from opdrift.errors import IncomparableTracesError
from opdrift.gathers import gather_findings
from opdrift.records import RANK_ENDED, Cause, Confidence, Diagnosis, Divergence
from opdrift.tracefile.reader import Trace
from opdrift.wording import counted, listed
from opdrift.world.causes import READ_LATE, of_wrong_message
from opdrift.world.parts import Gathered
from opdrift.world.received import Arrived, Exchanges, Received

_WEIGHT = {"diverged": 0, "rounding": 1, "identical": 2}
_SURE: Mapping[Confidence, int] = {"certain": 0, "likely": 1, "possible": 2}
SLUG = "other-rank"


def of_ranks(
    found: Mapping[int, Diagnosis],
    failed: Mapping[int, IncomparableTracesError],
    left: Mapping[int, Trace],
    right: Mapping[int, Trace],
    *,
    compare: Compare,
) -> Diagnosis:
    """The answer of the rank that a difference originates on; `ranks` holds those of all.

    Args:
        found: The diagnosis of each rank by itself.
        failed: Ranks that could not be compared, and why.
        left: The left run's traces.
        right: The right run's.
        compare: Compares a rank as far as both of its traces go.

    Raises:
        IncomparableTracesError: Nothing differs, and a rank could not be compared.
    """
    exchanges, endings = Exchanges(left, right), Endings(left, right)
    alone = one_process.side_of(left, right)
    apart = one_process.with_other_data(found) if alone is not None else frozenset[int]()
    found = {rank: one for rank, one in found.items() if rank not in apart}
    told: dict[int, Diagnosis] = {}
    handed: dict[int, Received | Gathered] = {}
    for rank, one in found.items():
        told[rank], first = _attributed(rank, one, exchanges)
        if first is not None:
            handed[rank] = first
    own = {r: one.first for r, one in told.items() if one.first is not None and r not in handed}
    # what rounding explains on one rank makes no more than rounding on another
    own = {r: first for r, first in own.items() if first.material} or own
    for rank, first_of_rank in own.items():
        got = exchanges.from_wrong(rank, first_of_rank, own)
        if got is not None and _may_be_handed(first_of_rank):
            told[rank], handed[rank] = _received_first(told[rank], got), got
    told = {rank: endings.explained(rank, one) for rank, one in told.items()}
    for rank in failed:
        unfinished = endings.unfinished(rank, compare)
        if unfinished is not None:
            told[rank] = unfinished
    open_ended = {rank: error for rank, error in failed.items() if rank not in told}

    def place(rank: int) -> tuple[int, bool, int, int, int, bool, int, float, int]:
        one = told[rank]
        first = one.first
        seq = first.seq.left if first is not None and first.seq.left is not None else float("inf")
        before = exchanges.before(rank, first) if first is not None else 0
        leaf = 0 if first is not None and first.kind == "leaf" else 1
        # of two ranks at one place, the one that shows what was done
        vague = first is not None and first.cause.slug == "structure"
        sure = _SURE[first.cause.confidence] if first is not None and vague else 0
        # what differs before a run ended, on whatever rank, is more than that it ended
        end = 0
        if first is not None and first.cause.slug == RANK_ENDED:
            end = 1 if endings.is_of(rank, first.cause) else 2
        return _WEIGHT[one.verdict], rank in handed, end, before, leaf, vague, sure, seq, rank

    best = min(told, key=place, default=None)
    if best is None or (open_ended and told[best].verdict == "identical"):
        raise _with_reason(next(iter(open_ended.values())), endings)
    notes = [
        *(_said(told, handed, best) if alone is None or handed else ()),
        *(one_process.said_of(alone, tuple(sorted(told)), apart, best) if alone else ()),
        *(f"rank {rank} could not be compared: {error}" for rank, error in open_ended.items()),
        *_uneven(left, right),
        *_loads_apart(told[best], {"left": left, "right": right}),
    ]
    return replace(told[best], notes=(*told[best].notes, *notes), ranks=told)


def _loads_apart(one: Diagnosis, sides: Mapping[str, Mapping[int, Trace]]) -> Iterator[str]:
    """Where weights differ: ranks whose parts were not loaded, or from something else, as one run alone shows it."""
    if one.first is None or one.first.cause.slug != "weights":
        return
    for name, traces in sides.items():
        if len(traces) > 1:
            for finding in gather_findings(list(traces.values())):
                if finding.cause.slug == "weights":
                    yield f"in the {name} run, {finding.cause.summary}"


def _with_reason(error: IncomparableTracesError, endings: Endings) -> IncomparableTracesError:
    """Why ranks cannot be compared, with which of them ended early, where a run shows that."""
    return IncomparableTracesError(" ".join([str(error), *(f"{each}." for each in endings.said())]))


def of_one_rank(
    rank: int,
    one: Diagnosis | IncomparableTracesError,
    left: Mapping[int, Trace],
    right: Mapping[int, Trace],
    *,
    compare: Compare,
) -> Diagnosis:
    """The diagnosis of one rank, with what it only receives from others said as such.

    Args:
        rank: Which.
        one: Its diagnosis by itself, or why it has none.
        left: All traces of the left run.
        right: Those of the right run.
        compare: Compares a rank as far as both of its traces go.

    Raises:
        IncomparableTracesError: It has none, and no rank that ended early explains that.
    """
    endings = Endings(left, right)
    if isinstance(one, IncomparableTracesError):
        found = endings.unfinished(rank, compare)
        if found is None:
            raise _with_reason(one, endings)
        return found
    exchanges = Exchanges(left, right)
    told, handed = _attributed(rank, one, exchanges)
    if handed is None and told.first is not None and exchanges.one_sided:
        others = _firsts_of_others(rank, left.keys() & right.keys(), compare)
        got = exchanges.from_wrong(rank, told.first, others)
        if got is not None and _may_be_handed(told.first):
            told = _received_first(told, got)
    return endings.explained(rank, told)


def _firsts_of_others(rank: int, ranks: Iterable[int], compare: Compare) -> dict[int, Divergence]:
    """What differs first on each other rank: where one run has no collectives, what was given to them tells nothing."""
    found = {}
    for other in sorted(ranks):
        if other != rank:
            try:
                first = compare(other).first
            except IncomparableTracesError:
                continue
            if first is not None:
                found[other] = first
    return found


def _attributed(
    rank: int, one: Diagnosis, exchanges: Exchanges
) -> tuple[Diagnosis, Received | Gathered | None]:
    """A rank's diagnosis, with what it only receives said as such; the first of all if it has nothing of its own."""
    one = _with_messages(rank, one, exchanges)
    received: list[Received | Gathered | None] = [
        exchanges.received(rank, origin)
        if _may_be_handed(origin)
        else exchanges.parts.gathered(rank, origin)
        for origin in one.origins
    ]
    if not any(received):
        return one, None
    origins = tuple(
        origin if got is None else _handed_on(origin, got)
        for origin, got in zip(one.origins, received, strict=True)
    )
    own = [origin for origin in origins if origin.cause.slug != SLUG]
    material = next((o for o in own if o.material), None) or next(
        (o for o in origins if o.material), None
    )
    first = material or origins[0]
    # further collectives and messages bring more of the same
    told = [first.cause, *(o.cause for o in own), *(o.cause for o in origins)]
    handed = next((c for c in told if c.slug == SLUG), None)
    causes = tuple(dict.fromkeys(c for c in told if c.slug != SLUG or c is handed))
    changed = replace(one, origins=origins, first=first, first_bitwise=origins[0], causes=causes)
    return changed, next(got for got in received if got) if first.cause.slug == SLUG else None


def _with_messages(rank: int, one: Diagnosis, exchanges: Exchanges) -> Diagnosis:
    """A rank's diagnosis; where a message did not arrive as it was sent, or was read too early, that is the cause."""
    found = {
        origin: got
        for origin in one.origins
        if _may_be_handed(origin)
        and origin.cause.confidence == "possible"
        and (got := exchanges.arrived(rank, origin)) is not None
    }
    if not found:
        return one
    changed = {origin: replace(origin, cause=_not_as_sent(got)) for origin, got in found.items()}
    before = {origin.cause for origin in found}
    origins = tuple(changed.get(origin, origin) for origin in one.origins)
    first = None if one.first is None else changed.get(one.first, one.first)
    causes = [*(o.cause for o in origins), *(c for c in one.causes if c not in before)]
    if first is not None:
        causes.insert(0, first.cause)
    return replace(
        one,
        origins=origins,
        first=first,
        first_bitwise=origins[0],
        causes=tuple(dict.fromkeys(causes)),
    )


def _not_as_sent(got: Arrived) -> Cause:
    sender, place = got.sent.rank, got.received.place
    same = f"rank {sender} sent the same in both runs (op {got.sent.seq} there in the left one)"
    if got.wrong is not None:
        word, wrong = got.wrong
        cause = of_wrong_message(wrong)
        return replace(
            cause,
            summary=f"in the {word} run, {cause.summary}",
            evidence=(same, *cause.evidence),
        )
    return Cause(
        "race",
        "possible",
        f"{place} gave this rank something else, although rank {sender} sent the same in both runs",
        (same, "what arrived was not read when it was there, so nothing tells which run is wrong"),
        READ_LATE,
    )


def _received_first(one: Diagnosis, got: Received) -> Diagnosis:
    """A rank's diagnosis whose first difference another rank handed on, in a run that alone has collectives."""
    assert one.first is not None
    first = _handed_on(one.first, got)
    origins = tuple(first if origin is one.first else origin for origin in one.origins)
    causes = tuple(dict.fromkeys([first.cause, *(o.cause for o in origins)]))
    return replace(one, first=first, origins=origins, causes=causes)


def _may_be_handed(origin: Divergence) -> bool:
    """Whether what differs at an origin may have come through a collective: it is no leaf, nor seen to begin there."""
    return origin.kind == "op" or (origin.kind != "leaf" and origin.inputs_match is not True)


def _handed_on(origin: Divergence, got: Received | Gathered) -> Divergence:
    if isinstance(got, Gathered):
        return replace(origin, cause=_in_a_gather(got))
    if got.sent is not None:
        return replace(origin, cause=_in_a_message(got, *got.sent), inputs_match=False)
    gave = (
        f"this rank gave the same to {got.place} (op {got.seq}) in both runs; {listed(got.givers)} did not"
        if got.seen
        else f"what {listed(got.givers)} gave to {got.place} (op {got.seq} here) is made of what differs there; the other"
        " run has no such collective"
    )
    carried = [f"it carries {got.carried}"] if got.carried else []
    cause = Cause(
        SLUG,
        "certain" if got.seen else "likely",
        f"{got.place} hands on what differs on {listed(got.givers)}",
        (gave, *carried, "a collective's inputs are those of all its ranks"),
        f"Look at {listed(got.givers)}: diff-trace LEFT RIGHT --rank {got.givers[0]}",
    )
    return replace(origin, cause=cause, inputs_match=False)


def _in_a_message(got: Received, left: int, right: int) -> Cause:
    (sender,) = got.givers
    same = (
        f"op {left} there"
        if left == right
        else f"op {left} there in the left run, op {right} in the right one"
    )
    return Cause(
        SLUG,
        "certain",
        f"{got.place} hands on what differs on rank {sender}",
        (f"rank {sender} sent something else in the right run than in the left one ({same})",),
        f"Look at rank {sender}: diff-trace LEFT RIGHT --rank {sender}",
    )


def _in_a_gather(got: Gathered) -> Cause:
    are = "is" if len(got.givers) == 1 else "are"
    return Cause(
        SLUG,
        "certain",
        f"{got.place} puts together what differs on {listed(got.givers)}",
        (
            f"this rank's own parts are equal in both runs; those of {listed(got.givers)} {are} not"
            f" (after op {got.seq})",
        ),
        f"Look at {listed(got.givers)}: diff-trace LEFT RIGHT --rank {got.givers[0]}",
    )


def _said(
    told: Mapping[int, Diagnosis], handed: Mapping[int, Received | Gathered], best: int
) -> list[str]:
    ranks = sorted(told)
    if handed:
        origin = [r for r in ranks if told[r].verdict != "identical" and r not in handed]
        by_place: dict[str, list[int]] = {}
        for rank, got in sorted(handed.items()):
            carried = f" ({got.carried})" if isinstance(got, Received) and got.carried else ""
            by_place.setdefault(f"{got.place}{carried}", []).append(rank)
        receivers = [
            f"{listed(got)} {'receives' if len(got) == 1 else 'receive'} it through {place}"
            for place, got in by_place.items()
        ]
        start = (
            f"{listed(origin)} {'originates' if len(origin) == 1 else 'originate'} the difference"
            if origin
            else "no compared rank originates the difference"
        )
        return [f"{start}; {', '.join(receivers)}"]
    if len(ranks) == 1:
        return [f"only {listed(ranks)} could be compared"]
    return [f"compared {listed(ranks)}, rank by rank; this is rank {best}"]


def _uneven(left: Mapping[int, Trace], right: Mapping[int, Trace]) -> list[str]:
    """Ranks that only one run has, or that were not recorded."""
    said = []
    sizes = [next(iter(side.values())).header.world_size or 1 for side in (left, right)]
    if sizes[0] != sizes[1]:
        said.append(
            f"the left run had {counted(sizes[0], 'rank')}, the right one {sizes[1]}: reductions add up other numbers of parts, and"
            " each rank may have another share of the data"
        )
    for word, side, size, other in (
        ("left", left, sizes[0], right),
        ("right", right, sizes[1], left),
    ):
        missing = [rank for rank in range(size) if rank not in side]
        if missing:
            said.append(f"the {word} trace lacks {listed(missing)}")
        extra = sorted(
            side.keys() - other.keys() - set(range(sizes[0] if other is left else sizes[1]))
        )
        if extra:
            said.append(f"only the {word} trace has {listed(extra)}")
    return said
