"""Which implementation each op of a trace ran, for the reports on one trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from opdrift.picks import Picks
from opdrift.records import Pick
from opdrift.render.page import Page, Screen
from opdrift.render.words import count, name, plural, readable
from opdrift.tracefile.reader import Trace


@dataclass(slots=True)
class _Group:
    """Ops of one name that ran one implementation."""

    op: str
    pick: Pick
    first: int
    number: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


def kernel_report(trace: Trace, ops: Sequence[int], screen: Screen) -> str:
    """Which implementations ran, ops of one kind and one pick together, and why not another."""
    page = Page(screen)
    groups: dict[tuple[str, str], _Group] = {}
    for index, chosen in Picks(trace).among(ops).items():
        op = name(trace.op_info(int(trace.ops.signature[index])).name)
        title = name(chosen.backend or chosen.name)
        group = groups.setdefault((title, op), _Group(op, chosen, int(trace.ops.seq[index])))
        group.number += 1
        group.reasons.update(
            f"{name(b)} refused: {readable(why)}" for b, why in chosen.refused.items()
        )
        if chosen.reason:
            group.reasons[readable(chosen.reason)] += 1
    if not groups:
        page.line(
            "no op whose implementation is known: no attention, matmul or convolution", "quiet"
        )
        return page.render()
    for (title, op), group in groups.items():
        library = f" [{name(group.pick.library)}]" if group.pick.library else ""
        number = plural(group.number, "op")
        page.line(f"{title}{library}  {number}, first op {count(group.first)}", "strong", hang=2)
        if op not in title:
            page.field("op", (op, group.pick.name) if group.pick.name != op else (op,))
        if group.reasons:
            page.field(
                "why",
                [
                    f"{why} ({count(n)})" if n != group.number else why
                    for why, n in group.reasons.items()
                ],
            )
    return page.render()
