"""Wholes that ranks loaded differently, and of which each then kept its part."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from opdrift.neighbours import Key, Neighbours
from opdrift.provenance import Lineage
from opdrift.records import Cause, Finding, Leaf
from opdrift.steps import Steps
from opdrift.tracefile.reader import Trace
from opdrift.wording import listed, some

_TRY = (
    "Load the same file on every rank before the model is sharded, or broadcast it from one rank"
    " (sync_module_states=True; broadcast_from_rank0 with set_model_state_dict)."
)


@dataclass(frozen=True, slots=True)
class _Whole:
    """What a rank held of a parameter when it was cut into parts.

    Attributes:
        key: Its content.
        how: "loaded": copied from elsewhere while the rank was recorded; "kept": no op wrote it; or "other".
        part: This rank's part of it.
    """

    key: Key
    how: Literal["loaded", "kept", "other"]
    part: Leaf


def loaded_apart(traces: Sequence[Trace]) -> Iterator[Finding]:
    """Parameters that some rank loaded, that others held otherwise when each kept its part of its own.

    What no rank is seen to load is left out: ranks may draw their models as they like. So is what one is seen to draw:
    `loading` tells of that.
    """
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = defaultdict(list)
    held = [_wholes(trace) for trace in traces]
    for name in dict.fromkeys(name for wholes in held for name in wholes):
        found = {n: wholes[name] for n, wholes in enumerate(held) if name in wholes}
        loaded = tuple(n for n, whole in found.items() if whole.how == "loaded")
        if not loaded or len({whole.key for whole in found.values()}) < 2:
            continue
        usual = Counter(whole.key for whole in found.values()).most_common(1)[0][0]
        others = tuple(n for n in found if n not in loaded)
        groups[loaded, others or tuple(n for n in found if found[n].key != usual)].append(name)
    for (loaded, odd), names in groups.items():
        yield _finding(traces, held, loaded, odd, names)


def _finding(
    traces: Sequence[Trace],
    held: Sequence[dict[str, _Whole]],
    loaded: tuple[int, ...],
    odd: tuple[int, ...],
    names: list[str],
) -> Finding:
    ranks = {n: traces[n].header.rank or 0 for n in (*loaded, *odd)}
    who = listed([ranks[n] for n in odd])
    if set(odd) <= set(loaded):
        rest = listed([ranks[n] for n in loaded if n not in odd])
        summary = f"{who} loaded {some(names)} from something else than {rest}"
    elif any(held[n][name].how == "other" for n in odd for name in names):
        summary = f"{who} held something else than {some(names)} that {listed([ranks[n] for n in loaded])} loaded"
    else:
        summary = f"{who} did not load {some(names)} while recorded, {listed([ranks[n] for n in loaded])} did"
    cause = Cause(
        "weights",
        "certain",
        summary,
        (
            f"before the model was sharded {names[0]} was not the same on all ranks, and each kept its part of its own:"
            " what is gathered is put together of both",
        ),
        _TRY,
    )
    first, trace = held[odd[0]][names[0]].part, traces[odd[0]]
    return Finding(
        "weights", cause, names[0], None, names[0].rpartition(".")[0], first.seq or None,
        Steps(trace).at(first.seq), trace.header.rank,
    )  # fmt: skip


def _wholes(trace: Trace) -> dict[str, _Whole]:
    """By name what this rank had of each parameter that it cut its part from."""
    whole: dict[str, Leaf] = {}
    parts: dict[str, Leaf] = {}
    for leaf in trace.leaves:
        if leaf.kind == "parameter" and leaf.when == "entry":
            whole.setdefault(leaf.name, leaf)
        elif leaf.kind == "shard" and leaf.when == "gather":
            parts.setdefault(leaf.name, leaf)
    found: dict[str, _Whole] = {}
    both = [name for name in parts if name in whole]
    if not both:
        return found
    lineage, near, storage = Lineage(trace), Neighbours(trace), trace.values.storage
    for name in both:
        entry, part = whole[name], parts[name]
        if int(storage[entry.value]) not in lineage.passes(part.value) - {int(storage[part.value])}:
            continue
        before = [v for v in near.versions(entry.value).tolist() if _made_at(trace, v) <= part.seq]
        key = near.key(before[-1]) if before else None
        made = lineage.of(before[-1]) if before else None
        if key is not None and made is not None and made.kind != "drawn":
            own = int(storage[made.root]) == int(storage[entry.value])
            kept = made.kind == "leaf" or (made.kind == "copied" and own)
            loaded = made.kind == "copied" and not own
            found[name] = _Whole(key, "kept" if kept else "loaded" if loaded else "other", part)
    return found


def _made_at(trace: Trace, value: int) -> int:
    """The number of the op that made a value; 0 where none did."""
    op = int(trace.producer[value])
    return int(trace.ops.seq[op]) if op >= 0 else 0
