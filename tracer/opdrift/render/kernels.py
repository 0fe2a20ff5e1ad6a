"""Which implementations the ops of a trace ran, by module, for the reports on one trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opdrift.picks import Picks
from opdrift.picks.observed import Observed
from opdrift.records import Pick
from opdrift.render.page import Page, Screen
from opdrift.render.words import cell, count, name, plural, readable
from opdrift.tracefile.reader import Trace


@dataclass(slots=True)
class KernelGroup:
    """Ops of one name that ran one implementation, in modules that differ by a number only.

    Attributes:
        module: Their path, with `*` for the numbers that differ: `layers.*.self_attn`.
        op: The op; of an attention of several ops, its first.
        pick: What ran, as said of the first of them.
        first: Number of the first of them.
        paths: The modules.
        count: How many ops, or attentions of several ops.
        reasons: Why this one, and of how many it is said.
        refused: Likewise for each implementation that was refused.
        observed: What libraries or the device said that they ran, and of how many.
    """

    module: str
    op: str
    pick: Pick
    first: int
    paths: set[str] = field(default_factory=set)
    count: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    refused: dict[str, Counter[str]] = field(default_factory=dict)
    observed: Counter[str] = field(default_factory=Counter)

    def add(self, path: str, chosen: Pick) -> None:
        """Count one more."""
        self.paths.add(path)
        self.count += 1
        if chosen.reason and chosen.reason not in chosen.refused.values():
            self.reasons[chosen.reason] += 1
        for other, why in chosen.refused.items():
            self.refused.setdefault(other, Counter())[why] += 1
        self.observed.update(chosen.observed)


def kernel_groups(trace: Trace, picks: Mapping[int, Pick]) -> list[KernelGroup]:
    """What ran, by module and implementation, in the order in which the modules came."""
    groups: dict[tuple[str, str, str], KernelGroup] = {}
    for index, chosen in picks.items():
        path = trace.calls[int(trace.ops.call[index])].path
        op = trace.op_info(int(trace.ops.signature[index])).name
        key = (_pattern(path), op, chosen.backend or chosen.name)
        group = groups.get(key)
        if group is None:
            seq = int(trace.ops.seq[index])
            group = groups[key] = KernelGroup(key[0], op, chosen, seq)
        group.add(path, chosen)
    order = {module: number for number, module in enumerate(dict.fromkeys(k[0] for k in groups))}
    found = sorted(groups.values(), key=lambda g: order[g.module])
    for group in found:
        if len(group.paths) == 1:
            (group.module,) = group.paths
    return found


def _pattern(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def group_object(group: KernelGroup) -> dict[str, Any]:
    """A group as JSON."""
    return {
        "module": group.module,
        "modules": len(group.paths),
        "op": group.op,
        "name": group.pick.name,
        "library": group.pick.library,
        "backend": group.pick.backend,
        "source": group.pick.source,
        "count": group.count,
        "first": group.first,
        "reasons": dict(group.reasons),
        "refused": {other: dict(why) for other, why in group.refused.items()},
        "observed": dict(group.observed),
    }


def kernel_report(trace: Trace, ops: Sequence[int], screen: Screen) -> str:
    """Which implementations ran in which modules, how often, and why not another."""
    page = Page(screen)
    for why in dict.fromkeys(Observed(trace).refused):
        page.line(f"which kernels ran was not observed: {readable(why)}", "quiet", hang=2)
    groups = kernel_groups(trace, Picks(trace).among(ops))
    if not groups:
        page.line(
            "no op whose implementation is known: no attention, matmul, convolution or recurrent layer",
            "quiet",
        )
        return page.render()
    before: str | None = None
    for group in groups:
        if _pattern(group.module) != before:
            before = _pattern(group.module)
            same = [g for g in groups if _pattern(g.module) == before]
            modules = set[str]().union(*(g.paths for g in same))
            several = f"  {plural(len(modules), 'module')}" if len(modules) > 1 else ""
            page.line(cell(same[0].module if not several else before) + several, "strong", hang=2)
        _group(page, group)
    return page.render()


def _group(page: Page, group: KernelGroup) -> None:
    chosen = group.pick
    title = name(chosen.backend or chosen.name)
    library = f" [{name(chosen.library)}]" if chosen.library else ""
    by = "" if chosen.name in title or not chosen.backend else f", {name(chosen.name)}"
    page.line(
        f"{title}{library}{by}  {plural(group.count, 'time')}, first op {count(group.first)}",
        indent=2,
        hang=2,
    )
    for line in _counted(group.reasons.items(), group.count):
        page.line(line, "quiet", indent=6, hang=2)
    told = chosen.name.partition(": ")[2]
    calls = [each for each in group.observed.items() if each != (told, group.count)]
    for line in _counted(calls, group.count, before="ran ", more="other calls"):
        page.line(line, "quiet", indent=6, hang=2)
    for other, why in group.refused.items():
        for line in _counted(why.items(), group.count):
            page.line(f"not {name(other)}: {line}", "quiet", indent=6, hang=2)


def _counted(
    reasons: Iterable[tuple[str, int]], total: int, *, before: str = "", more: str = "other reasons"
) -> list[str]:
    """Reasons, with how often each was given where not always; many of a kind are cut short."""
    found = [
        f"{before}{readable(why)} ({count(n)})" if n != total else f"{before}{readable(why)}"
        for why, n in reasons
    ]
    return found if len(found) <= 4 else [*found[:3], f"and {len(found) - 3} {more}"]
