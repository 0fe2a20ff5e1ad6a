"""What became of a checkpoint over all ranks of a run: copies of a model, or parts that are spread over the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from opdrift.checkpoints.answer import Check, Matching, Missing, other_architecture, unnamed
from opdrift.checkpoints.model import Model
from opdrift.checkpoints.names import Renaming
from opdrift.checkpoints.stored import StoredCheckpoint
from opdrift.tracefile.reader import Trace

_T = TypeVar("_T")


def check_ranks(traces: Mapping[int, Trace], checkpoint: StoredCheckpoint) -> Check:
    """What became of a checkpoint's tensors in a run of several ranks.

    A rank that has no parameter for a tensor, or one that is smaller, holds another part of the model: the tensor is in
    the model if another rank holds it. A rank that has the parameter and holds something else lacks it.

    Raises:
        CheckpointError: No rank names a parameter, or the checkpoint is of another model.
    """
    models = {rank: Model(trace) for rank, trace in traces.items()}
    named = [rank for rank, model in models.items() if model.tensors]
    if not named:
        raise unnamed(next(iter(traces.values())))
    matchings = {rank: Matching(traces[rank], models[rank], checkpoint) for rank in named}
    found = {rank: matching.result() for rank, matching in matchings.items()}
    names = {name for rank in named for name in models[rank].tensors}
    fitting = frozenset(n for rank, m in matchings.items() for n in m.fitting(found[rank]))
    if not any(m.suits(found[rank], fitting, len(names)) for rank, m in matchings.items()):
        misfit = next(
            (said for m in matchings.values() if (said := m.misfit(fitting)) is not None), None
        )
        first = named[0]
        raise other_architecture(found[first], traces[first], (len(fitting), len(names)), misfit)
    return _joined(matchings, found, len(names), tuple(sorted(set(traces) - set(named))))


def _joined(
    matchings: Mapping[int, Matching],
    found: Mapping[int, Check],
    own: int,
    unjudged: tuple[int, ...],
) -> Check:
    first = next(iter(found.values()))
    unknown = {name for each in found.values() for name in each.unknown}
    missing = list(_missing(matchings, found))
    gone = {each.name for each in missing}
    arrived = _union(each.arrived for each in found.values())
    reached = {name: own for name, own in arrived.items() if name not in gone | unknown}
    casts = _union(matching.casts for matching in matchings.values())
    return Check(
        first.source,
        first.tensors,
        reached,
        Counter(dtype for name, dtype in casts.items() if name in reached),
        _of(reached, _union(each.rounded for each in found.values())),
        _of(reached, _union(each.exchanged for each in found.values())),
        _union(each.fused for each in found.values()),
        tuple(missing),
        tuple(sorted(unknown - gone)),
        tuple(_renamed(found)),
        tuple(_extra(matchings, found, arrived)),
        own,
        tuple(found),
        unjudged,
    )


def _missing(matchings: Mapping[int, Matching], found: Mapping[int, Check]) -> Iterator[Missing]:
    """Tensors that no rank holds, and those that a rank lacks which has their parameter."""
    by_name: dict[str, dict[int, Missing]] = {}
    for rank, each in found.items():
        for missing in each.missing:
            by_name.setdefault(missing.name, {})[rank] = missing
    for name, told in by_name.items():
        reached = tuple(rank for rank, each in found.items() if name in each.arrived)
        called = {found[rank].arrived[name] for rank in reached}
        lacking = {
            rank: each
            for rank, each in told.items()
            if each.own is not None
            and not (reached and _elsewhere(matchings[rank], found[rank], each, called))
        }
        if not reached and len(told) == len(found):
            best = next(iter(lacking.values()), next(iter(told.values())))
            yield replace(best, lacking=tuple(lacking))
        elif lacking:
            yield replace(
                next(iter(lacking.values())),
                origin=_joined_words(each.origin for each in lacking.values()),
                reached=reached,
                lacking=tuple(lacking),
            )


def _elsewhere(
    matching: Matching, found: Check, missing: Missing, called: Container[str | None]
) -> bool:
    """Whether a rank's tensor is no copy of the one that another rank holds, and calls by one of these names.

    It is a part of it, or it is another tensor: stages of a pipeline may count their layers from 0.
    """
    return (
        missing.own not in called
        or matching.is_smaller(missing.name)
        or missing.own in found.arrived.values()
    )


def _extra(
    matchings: Mapping[int, Matching], found: Mapping[int, Check], arrived: Mapping[str, str]
) -> list[str]:
    """Tensors of the model that nothing in the checkpoint stands for, but for parts of one that another rank holds."""
    names: dict[str, None] = {}
    for rank, each in found.items():
        parts = {
            own.name
            for name, own in matchings[rank].other_sizes.items()
            if arrived.get(name) == own.name and matchings[rank].is_smaller(name)
        }
        names.update(dict.fromkeys(name for name in each.extra if name not in parts))
        held = {*each.arrived.values(), *arrived.values()}
        names.update(
            (missing.own, None)  # taken for a tensor that another rank holds, and has another name
            for missing in each.missing
            if missing.own is not None and missing.name in arrived and missing.own not in held
        )
    return list(names)


def _renamed(found: Mapping[int, Check]) -> Iterator[Renaming]:
    """Leading words that differ; of each, the most names that one rank has."""
    most: dict[tuple[str, str], Renaming] = {}
    for check in found.values():
        for each in check.renamed:
            old = most.get((each.stored, each.own))
            if old is None or old.count < each.count:
                most[each.stored, each.own] = each
    yield from most.values()


def _joined_words(origins: Iterable[str | None]) -> str | None:
    return " or ".join(dict.fromkeys(each for each in origins if each)) or None


def _union(each: Iterable[Mapping[str, _T]]) -> dict[str, _T]:
    """Of several mappings, the first value of each name."""
    joined: dict[str, _T] = {}
    for mapping in each:
        for name, value in mapping.items():
            joined.setdefault(name, value)
    return joined


def _of(names: Iterable[str], mapping: Mapping[str, _T]) -> dict[str, _T]:
    return {name: mapping[name] for name in names if name in mapping}
