"""Which routine an op ran by what oneDNN and MKL said, beside what torch's rules say.

Lines are as the recorder keeps them: as printed, without times and addresses. oneDNN's fields are
`onednn_verbose,v1,OPERATION,exec,ENGINE,PRIMITIVE,IMPLEMENTATION,PROPAGATION,MEMORY,ATTRIBUTES,AUXILIARY,PROBLEM` (its
own header says so; a problem may hold commas), MKL's `MKL_VERBOSE ROUTINE(ARGUMENTS) CNR:OFF Dyn:1 FastMM:1 NThr:2`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from opdrift.picks.observed import Seen, counted
from opdrift.records import Pick

_MKL: Final = re.compile(r"MKL_VERBOSE (\w+)\((.*)\) CNR:(\S+) Dyn:\d FastMM:\d NThr:(\d+)")
_ONEDNN_FIELDS: Final = 12
#: Attributes of every call of torch's, which tell nothing.
_USUAL: Final = "attr-scratchpad:user"
#: Rules name these after what surrounds the products in them.
_AROUND: Final = re.compile(r"products|GEMM")


@dataclass(frozen=True, slots=True)
class Routine:
    """One call of a library.

    Attributes:
        library: `oneDNN` or `MKL`; None for a line of another form.
        name: `matmul brg_matmul:avx512_core_bf16` (what, and how on which instruction set), `SGEMM`.
        text: The call for people, with its sizes, and for MKL its threads.
    """

    library: str | None
    name: str
    text: str


def read_line(line: str) -> Routine:
    """What a recorded line tells."""
    found = _MKL.fullmatch(line)
    if found is not None:
        return _of_mkl(*found.groups())
    parts = line.split(",")
    if line.startswith("onednn_verbose,") and len(parts) >= _ONEDNN_FIELDS:
        return _of_onednn(parts)
    return Routine(None, line, line)


def _of_mkl(name: str, arguments: str, reproducible: str, threads: str) -> Routine:
    """Addresses, and what follows them (leading dimensions), are left out."""
    sizes = arguments.partition(",*")[0]
    count = f"{threads} thread{'s' if threads != '1' else ''}"
    mode = "" if reproducible == "OFF" else f", CNR:{reproducible}"
    return Routine("MKL", name, f"{name}({sizes}), {count}{mode}")


def _of_onednn(parts: list[str]) -> Routine:
    primitive, implementation, attributes, auxiliary = parts[5], parts[6], parts[9], parts[10]
    kind = re.match(rf"alg:({primitive}_\w+)", auxiliary)
    name = f"{kind[1] if kind and primitive == 'eltwise' else primitive} {implementation}".rstrip()
    special = [a for a in attributes.split() if a != _USUAL]
    return Routine("oneDNN", name, ", ".join((name, ",".join(parts[11:]), *special)))


def with_calls(chosen: Pick | None, op: str, seen: Seen) -> Pick | None:
    """What an op ran, by rule and by what was seen.

    Args:
        chosen: By rule, or by the op's own name; None where there is no rule.
        op: Its name.
        seen: What the libraries said.

    Returns:
        The pick with the library's own words; the one by rule where nothing is known.
    """
    if seen.ambiguous or (seen.raw and not seen.names):
        return chosen
    calls = [read_line(line) for line in seen.names]
    if chosen is None:
        return _unruled(op, calls) if calls else None
    if chosen.source == "dispatcher" or chosen.backend is not None:  # attention: the op tells
        return replace(chosen, observed=_texts(calls))
    if not calls:
        return _without_calls(chosen, op)
    main = _main(calls)
    if main is None:  # rearranging, or lines of a form that this opdrift does not know
        return replace(chosen, observed=_texts(calls))
    detail = chosen.name.partition(": ")[2]
    if chosen.library == main.library:
        return replace(chosen, name=f"{op}: {main.name}", source="verbose", observed=_texts(calls))
    if chosen.library not in ("oneDNN", "MKL") and _AROUND.search(detail):
        return replace(chosen, source="verbose", observed=_texts(calls))
    why = f"by torch's rules it would be {detail or chosen.name} of {chosen.library}"
    return replace(_unruled(op, calls), reason=why)


def _unruled(op: str, calls: list[Routine]) -> Pick:
    """What the calls alone tell."""
    main = _main(calls) or calls[0]
    return Pick(f"{op}: {main.name}", main.library, source="verbose", observed=_texts(calls))


def _without_calls(chosen: Pick, op: str) -> Pick:
    """Neither library said anything: the op is torch's own, or another library's that says nothing."""
    if chosen.library not in ("oneDNN", "MKL"):
        return chosen
    name = chosen.name.partition(": ")[2]
    why = f"no library said anything; by torch's rules it would be {name} of {chosen.library}"
    return Pick(f"{op}: own code", "ATen", reason=why, source="verbose")


def _main(calls: Iterable[Routine]) -> Routine | None:
    """The call that computes; the others rearrange what it takes and gives."""
    return next((c for c in calls if c.library and not c.name.startswith("reorder ")), None)


def _texts(calls: Iterable[Routine]) -> tuple[str, ...]:
    return counted(call.text for call in calls)
