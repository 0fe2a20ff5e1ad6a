"""What a trace says of sharding: which names are of parts that this rank holds, and where the parts belong.

Integrations write it into the marks of gathers (docs/sharding.md): the parameters of a buffer, where they lie in
it, and which of the ranks that share it this one is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from opdrift.tracefile.reader import Trace

#: Marks that say how parameters are sharded.
GATHERS: Final = frozenset({"gather", "use"})
#: Parts go in and wholes come out, or a buffer of which only this rank's slice is written.
_GATHERING: Final = frozenset(
    [
        "all_gather",
        "all_gather_copy_in",
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "all_gather_into_tensor_out",
        "all_reduce",
        "_allgather_base_",
        "allgather_",
        "allgather_coalesced_",
        "allgather_into_tensor_coalesced_",
        # out of FSDP2's gathered buffer into each parameter
        "split_with_sizes_copy",
    ]
)
#: Wholes go in and parts come out.
_SCATTERING: Final = frozenset(
    [
        "_reduce_scatter_base_",
        "reduce_scatter_",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_tensor_coalesced_",
    ]
)
#: What lays gradients end to end for that, with padding, in another type or divided before.
_PACKING: Final = frozenset(
    ["_to_copy", "cat", "chunk_cat", "constant_pad_nd", "copy_", "div_", "mul_", "pad", "stack"]
)
#: What is written at the end of a step may have been read at its beginning.
_PASSES: Final = 3


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a name's tensor is kept between gathers.

    Attributes:
        layout: "each" by itself, or "flat": as a stretch of a tensor that holds many; "unknown" where the recorder knew a
            part when it met it, and no integration followed it.
        ranks: The ranks that hold a part.
        rank: This one's number among them.
        library: Who shards it.
        cast: The type that it is cast to before it is gathered to compute with; empty where it is gathered as it is.
    """

    layout: str
    ranks: tuple[int, ...]
    rank: int
    library: str
    cast: str = ""


_UNKNOWN: Final = Sharding("unknown", (), 0, "")


def sharding(trace: Trace) -> dict[str, Sharding]:
    """Name of each parameter that is kept in parts, and of each tensor that holds such parts, and how."""
    found: dict[str, Sharding] = {}
    casts = {
        str(mark.fields.get("buffer")): str(mark.fields.get("destination_dtype", ""))
        for mark in trace.marks
        if mark.kind == "cast" and mark.fields.get("what") == "shard"
    }
    for mark in trace.marks:
        fields = mark.fields
        ranks = fields.get("ranks")
        if mark.kind not in GATHERS or not isinstance(ranks, list) or len(ranks) < 2:
            continue
        how = Sharding(
            str(fields.get("layout", "flat")),
            tuple(ranks),
            int(fields.get("rank", 0)),
            str(fields.get("library", "")),
            casts.get(str(fields.get("buffer")), ""),
        )
        for name in (str(fields.get("buffer")), *names_of(fields)):
            found.setdefault(name, how)
    return found


def parts_not_followed(trace: Trace) -> tuple[str, ...]:
    """Names of parameters that are parts wherever they are seen.

    Those that the recorder knew for parts, and of which no mark tells what became of them: tensor parallelism, or FSDP
    that no integration followed. And those of which FSDP gathers what tensor parallelism has left on this rank.
    """
    if (trace.header.world_size or 1) < 2:
        return ()
    told: set[str] = set()
    known: dict[str, None] = {}
    split: dict[str, None] = {}
    for mark in trace.marks:
        if mark.kind in GATHERS:
            told.update(names_of(mark.fields))
            split.update(dict.fromkeys(mark.fields.get("split") or ()))
        elif mark.kind == "model":
            known.update(dict.fromkeys(mark.fields.get("sharded") or ()))
    return (*(name for name in known if name not in told), *split)


def differently_sharded(left: Trace, right: Trace) -> frozenset[str]:
    """Names whose tensors are parts in one run, and whole, other parts or cast ones in the other."""
    alone = parts_not_followed(left), parts_not_followed(right)
    a, b = (
        {**dict.fromkeys(names, _UNKNOWN), **sharding(trace)}
        for names, trace in zip(alone, (left, right), strict=True)
    )
    found = {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
    return frozenset(found.union(_held(alone[0], left, right), _held(alone[1], right, left)))


def _held(alone: tuple[str, ...], trace: Trace, other: Trace) -> set[str]:
    """Names of the other run's parameters that tensors of this one may hold: parts that nothing followed.

    Such a tensor has a name of its own, in the module whose parameters it holds, and these have no name in this run.
    """
    known, theirs = (
        {leaf.name for leaf in each.leaves if leaf.kind == "parameter"} for each in (trace, other)
    )
    modules = {name.rpartition(".")[0] for name in alone if name not in theirs}
    return {
        name
        for name in theirs - known
        if any(not module or name.startswith(f"{module}.") for module in modules)
    }


def ops_on_parts(trace: Trace) -> npt.NDArray[np.bool_]:
    """Which ops read or make this rank's parts of parameters and gradients: gathers, an optimizer, a norm of gradients.

    Everything is a part that is in the memory of a shard, that a reduce_scatter brings, or that is made of parts,
    until it is gathered. What packs gradients for a reduce_scatter counts, too: the padding is that of the parts.
    """
    ops, storage = trace.ops, trace.values.storage
    found = np.zeros(len(ops), np.bool_)
    signatures = np.unique(ops.signature).tolist()
    base = {s: trace.op_info(s).name.split(".")[1] for s in signatures}
    gathers = {s for s, name in base.items() if name in _GATHERING}
    scatters = {s for s, name in base.items() if name in _SCATTERING}
    alone = set(parts_not_followed(trace))
    parts = {
        int(storage[leaf.value])
        for leaf in trace.leaves
        if leaf.kind == "shard" or (leaf.when in ("entry", "gather") and leaf.name in alone)
    }
    for _ in range(_PASSES):
        known = len(parts)
        for op, signature in enumerate(ops.signature.tolist()):
            scatter = signature in scatters
            if scatter or not parts.isdisjoint(storage[ops.inputs[op]].tolist()):
                found[op] = True
                if scatter or signature not in gathers:
                    parts.update(storage[ops.outputs[op]].tolist())
        if len(parts) == known:
            break
    packing = {s for s, name in base.items() if name in _PACKING}
    # FSDP2's own ops do nothing else
    own = [s for s in signatures if trace.op_info(s).name.startswith("fsdp.")]
    return found | _packed(trace, scatters, packing) | np.isin(ops.signature, own)


def _packed(trace: Trace, scatters: set[int], packing: set[int]) -> npt.NDArray[np.bool_]:
    """Which ops only lay together what a reduce_scatter takes."""
    ops, storage = trace.ops, trace.values.storage
    found = np.zeros(len(ops), np.bool_)
    taken: set[int] = set()
    for op in range(len(ops) - 1, -1, -1):
        signature = int(ops.signature[op])
        packs = signature in packing and not taken.isdisjoint(storage[ops.outputs[op]].tolist())
        if packs or signature in scatters:
            found[op] = packs
            taken.update(storage[ops.inputs[op]].tolist())
    return found


def puts_together(op: str) -> bool:
    """Whether an op, by its full name, fills a whole tensor with the parts of all ranks."""
    name = op.split(".")[1]
    return name in _GATHERING and name != "all_reduce"


def moves_parts(op: str) -> bool:
    """Whether an op, by its full name, puts parts together or takes a whole apart: a collective, or what lies around it."""
    name = op.split(".")[1]
    return name in _GATHERING or name in _SCATTERING or op.startswith(("c10d.", "fsdp."))


def names_of(fields: Mapping[str, Any]) -> list[str]:
    """The names of all parameters that a mark is about, tied ones included."""
    names = [
        part if isinstance(part, str) else str(part[0]) for part in fields.get("parameters") or ()
    ]
    return names + [str(pair[0]) for pair in fields.get("tied") or ()]
