"""Parts of parameters that several ranks hold alike (hybrid sharding), held against each other where they are gathered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opdrift.gathers.words import finding_at
from opdrift.records import Cause, Finding, Mark
from opdrift.steps import Steps
from opdrift.tracefile.reader import Trace
from opdrift.wording import some


@dataclass(frozen=True, slots=True)
class _Held:
    """What a rank gave to a gather; `reduced`: gradients were reduced among its replicas since the gather before."""

    trace: Trace
    mark: Mark
    reduced: bool


def replicas_apart(traces: Sequence[Trace]) -> Iterator[Finding]:
    """The first gather of each buffer to which replicas gave different parts although their gradients are reduced.

    Without a reduction since the gather before they may differ by right: ranks that average now and then.
    """
    held: dict[tuple[str, tuple[int, ...]], dict[int, list[_Held]]] = {}
    told: set[tuple[int | None, object]] = set()
    for trace in traces:
        rank = trace.header.rank
        told.update((rank, name) for name in _told(trace))
        for key, gathers in _gathers(trace).items():
            held.setdefault(key, {})[rank or 0] = gathers
    for by_rank in held.values():
        for number in range(min(map(len, by_rank.values()))):
            at = {rank: gathers[number] for rank, gathers in sorted(by_rank.items())}
            if len(at) > 1 and all(each.reduced for each in at.values()):
                found = _apart(at, told)
                if found is not None:
                    yield found
                    break


def _told(trace: Trace) -> Iterator[object]:
    """Names of parameters of which a finding of their own says that a shard was written."""
    for mark in trace.marks:
        if mark.kind == "shard-changed":
            yield from (part.get("parameter") for part in mark.fields.get("mismatch") or ())


def _gathers(trace: Trace) -> dict[tuple[str, tuple[int, ...]], list[_Held]]:
    """(buffer, ranks that hold the same parts) -> what was gathered, in order."""
    found: dict[tuple[str, tuple[int, ...]], list[_Held]] = {}
    #: ranks -> seq of the last reduction among them
    last: dict[tuple[int, ...], int] = {}
    for mark in trace.marks:
        fields = mark.fields
        if mark.kind == "collective" and fields.get("what") == "all_reduce":
            last[tuple(fields.get("ranks") or ())] = mark.seq
        elif mark.kind == "gather" and fields.get("replicas"):
            ranks = tuple(fields["replicas"])
            before = found.setdefault((str(fields.get("buffer")), ranks), [])
            since = before[-1].mark.seq if before else mark.seq
            before.append(_Held(trace, mark, last.get(ranks, -1) > since))
    return found


def _apart(at: Mapping[int, _Held], told: set[tuple[int | None, object]]) -> Finding | None:
    first, *others = at
    for rank in others:
        one, other = at[first], at[rank]
        names = [
            name
            for name in _different(one.mark.fields, other.mark.fields)
            if (first, name) not in told and (rank, name) not in told
        ]
        if not names:
            continue
        verb = "differ" if len(names) > 1 else "differs"
        cause = Cause(
            "replica",
            "certain",
            f"{some(names)} {verb} between ranks {first} and {rank}, which hold the same part",
            (
                f"at gather {other.mark.fields.get('nth')} of {other.mark.fields.get('buffer')}",
                f"their gradients are reduced over ranks {', '.join(map(str, at))}",
            ),
            "Let nothing but the reduced gradient change a parameter, and begin with equal parts on all ranks: look at"
            " what one of them does between the optimizer's step and this gather, and compare the ranks' folders with"
            f" opdrift show TRACE --leaf '{names[0]}'.",
        )
        return finding_at(
            "replica", cause, other.trace, other.mark, Steps(other.trace), names=names
        )
    return None


def _different(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Parameters of which two ranks gave different parts."""
    names = [str(part[0]) for part in one.get("parameters") or ()]
    pieces = [
        {(part, offset, size): raw for part, offset, size, raw in each.get("own") or ()}
        for each in (one, other)
    ]
    return [
        names[part]
        for (part, offset, size), raw in pieces[0].items()
        if part is not None and pieces[1].get((part, offset, size), raw) != raw
    ]
