"""A trace for a terminal: overview, ops, single ops."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from opdrift.picks import Picks
from opdrift.picks.observed import SOURCES
from opdrift.records import Argument, Finding, Op, TensorArgument
from opdrift.render import card
from opdrift.render.finding_text import one_line
from opdrift.render.page import Column, Page, Screen
from opdrift.render.regions import compiled_section, region_lines
from opdrift.render.trace_json import digest, flag_words
from opdrift.render.words import (
    cell,
    count,
    moment,
    name,
    ordinal,
    pattern_of,
    plural,
    readable,
    scope,
    size,
    typed,
)
from opdrift.tracefile.reader import Trace
from opdrift.unfollowed import unfollowed

#: Rows of the overview's lists.
_ROWS: Final = 12
#: Digits of a digest that are shown; JSON has all.
_DIGITS: Final = 8
_TOP: Final = re.compile(r"[^.]*(?:\.\d+)?")


def overview(
    trace: Trace, findings: Sequence[Finding], screen: Screen, *, path: Path | None = None
) -> str:
    """What was recorded, in a screenful.

    Args:
        trace: The trace; of a distributed run, that of one rank.
        findings: Of all ranks.
        screen: Where it goes.
        path: The folder that was asked for, which may hold several ranks.
    """
    page = Page(screen)
    page.line(
        f"{name(str(trace.path))}: {plural(len(trace.ops), 'op')}, {_ending(trace)}",
        "strong",
        hang=2,
    )
    page.line()
    for label, text in _about(trace):
        page.field(label, (text,))
    _modules(page, trace)
    _frequent(page, trace)
    compiled_section(page, trace)
    if findings:
        page.heading(plural(len(findings), "finding"))
        for finding in findings[:_ROWS]:
            page.line(f"- {one_line(finding)}", "bad", indent=2, hang=2)
    page.line()
    for number, command in enumerate(_further(trace, path or trace.path, bool(findings))):
        page.command("      " if number else "next: ", command)
    return page.render()


def _further(trace: Trace, path: Path, found: bool) -> Iterator[str]:
    """Commands that look further into a trace: its findings, the module with most ops, a parameter."""
    shown = f"opdrift show {typed(str(path))}"
    if found:
        yield f"{shown} --findings"
    numbers = np.bincount(trace.ops.call, minlength=len(trace.calls))
    busy = max(
        (c for c in trace.calls if numbers[c.id]),
        key=lambda c: (c.path != "", numbers[c.id]),
        default=None,
    )
    if busy is not None:
        top = _top(busy.path)
        yield f"{shown} --scope {typed(pattern_of(top) or cell(top))}"
    leaf = next((each.name for each in trace.leaves if each.name), None)
    if leaf is not None:
        yield f"{shown} --leaf {typed(pattern_of(leaf))}"


def _ending(trace: Trace) -> str:
    if trace.incomplete is not None:
        return readable(trace.incomplete)
    footer = trace.footer
    if footer is not None and footer.ended == "raised":
        return f"complete; the program raised {readable(footer.exception or 'an exception')}"
    return "complete"


def _about(trace: Trace) -> Iterator[tuple[str, str]]:
    header = trace.header
    if header.label:
        yield "label", header.label
    yield "program", " ".join(header.program)
    rank = f", rank {header.rank} of {header.world_size}" if header.world_size else ""
    yield "ran with", f"torch {header.torch}, {header.device}{rank}, {moment(header.created)}"
    leaves: Counter[str] = Counter(leaf.kind for leaf in trace.leaves if leaf.kind != "alive")
    yield "leaves", _tally(leaves) or "none"
    marks = Counter(mark.kind for mark in trace.marks)
    if marks:
        yield "marks", _tally(marks)
    if trace.footer is not None:
        for failure in trace.footer.failures:
            yield (
                "failure",
                f"opdrift itself failed at {failure.get('where')}: {failure.get('error')} (x{failure.get('count')})",
            )
        for note in trace.footer.notes:
            yield "note", note
    for sentence in unfollowed([trace]):
        yield "note", sentence


def _tally(counts: Counter[str]) -> str:
    return ", ".join(f"{count(n)} {word}" for word, n in counts.most_common())


def _modules(page: Page, trace: Trace) -> None:
    calls = trace.calls
    tops = {call.id: _top(call.path) for call in calls}
    number = np.bincount(trace.ops.call, minlength=len(calls))
    spent = np.bincount(trace.ops.call, weights=trace.ops.duration, minlength=len(calls))
    ops: dict[str, int] = {}
    times: dict[str, float] = {}
    for call in calls:
        if number[call.id]:
            top = tops[call.id]
            ops[top] = ops.get(top, 0) + int(number[call.id])
            times[top] = times.get(top, 0.0) + float(spent[call.id])
    page.heading("modules")
    columns = (
        Column("module", shorten=True),
        Column("ops", "right", keep=8),
        Column("ms", "right", keep=7),
    )
    rows = [(cell(top), count(n), f"{times[top] / 1e6:,.2f}") for top, n in ops.items()]
    _table(page, columns, rows)


def _top(path: str) -> str:
    found = _TOP.match(path)
    return found.group() if found else path


def _frequent(page: Page, trace: Trace) -> None:
    signatures, counts = np.unique(trace.ops.signature, return_counts=True)
    names: Counter[str] = Counter()
    for signature, n in zip(signatures.tolist(), counts.tolist(), strict=True):
        names[trace.op_info(signature).name] += n
    page.heading("most frequent ops")
    _table(
        page,
        (Column("op"), Column("number", "right")),
        [(name(op), count(n)) for op, n in names.most_common(_ROWS)],
    )


def _table(page: Page, columns: Sequence[Column], rows: Sequence[tuple[str, ...]]) -> None:
    page.entries(columns, rows[:_ROWS])
    if len(rows) > _ROWS:
        page.line(f"and {count(len(rows) - _ROWS)} more", "quiet", indent=2)


def op_table(trace: Trace, ops: Sequence[int], screen: Screen) -> str:
    """One line an op."""
    page = Page(screen)
    columns = (
        Column("op", "right"),
        Column("name", keep=8),
        Column("module", keep=7, shorten=True),
        Column("output", keep=5),
        Column("digest", keep=6, named=True),
        Column("us", "right", keep=4),
    )
    page.entries(columns, [_row(trace, trace.op(i)) for i in ops], indent=0)
    return page.render()


def _row(trace: Trace, op: Op) -> tuple[str, ...]:
    first = next((v for v in op.outputs if v), 0)
    shown = digest(trace, first) if first else None
    return (
        count(op.seq),
        name(op.name),
        cell(op.call.path),
        str(trace.meta(first)) if first else "",
        shown[:_DIGITS] if shown else "",
        f"{op.duration_ns / 1e3:,.1f}",
    )


def one_op(trace: Trace, op: Op, screen: Screen) -> str:
    """Everything that is recorded of one op."""
    page = Page(screen)
    page.line(
        f"op {count(op.seq)} of {count(len(trace.ops))} ({op.phase}): {name(op.name)}",
        "strong",
        hang=2,
    )
    page.line()
    module = scope(op.call.path) + (f" ({name(op.call.type)})" if op.call.type else "")
    where = [
        f"{module}, {ordinal(op.call.number)} call" + (", training" if op.call.training else "")
    ]
    if op.source is not None:
        where.append(readable(str(op.source)))
    page.field("where", where)
    plain = [
        f"{name(n)}={argument_text(a)}" for n, a in op.signature.arguments if not holds_tensor(a)
    ]
    if plain:
        page.field("arguments", (", ".join(plain),))
    for label, values in (("inputs", op.inputs), ("outputs", op.outputs)):
        lines = [
            line
            for position, value in enumerate(values)
            for line in _value(trace, op, label, position, value)
        ]
        page.field(label, lines or ["none"])
    lines = region_lines(trace, op.index)
    if lines:
        page.field("region", lines)
    words = flag_words(op.flags)
    if words:
        page.field("flags", (", ".join(words),))
    page.field("ran", (f"{op.duration_ns / 1e3:,.1f} us on thread {op.thread}",))
    kernel = _kernel(trace, op)
    if kernel:
        page.field("kernel", kernel)
    if op.rng:
        page.field("random", (f"generator state {op.rng:016x} before it",))
    return page.render()


def _kernel(trace: Trace, op: Op) -> list[str]:
    """What ran, what was seen of it, and what did not run and why."""
    picks = Picks(trace)
    chosen = picks.among([op.index]).get(op.index) or picks.of(op.index)
    lines: list[str] = []
    if chosen is not None:
        lines.append(card.pick(chosen, op.name))
        lines += [f"ran {readable(call)}" for call in chosen.calls]
        lines += [f"not {name(b)}: {readable(w)}" for b, w in chosen.refused.items()]
    for source in SOURCES:
        seen = picks.seen(op.index, source)
        if seen is not None and seen.ambiguous:
            lines.append("other ops ran at the same time, so what was seen could be any of theirs")
        elif seen is not None:
            lines += [f"said, and not understood: {readable(text)}" for text in seen.raw]
    return lines


def holds_tensor(argument: Argument) -> bool:
    """Whether an argument is a tensor, or a list with one in it."""
    if isinstance(argument, tuple):
        return any(holds_tensor(a) for a in argument)
    return isinstance(argument, TensorArgument)


def argument_text(argument: Argument) -> str:
    """An argument that is no tensor, as it is shown."""
    if isinstance(argument, tuple):
        return f"[{', '.join(map(argument_text, argument))}]"
    return readable(str(argument))


def _value(trace: Trace, op: Op, label: str, position: int, value: int) -> Iterator[str]:
    if not value:
        yield f"{position}  none"
        return
    written = " (written in place)" if label == "outputs" and position < op.mutated else ""
    yield f"{position}  {trace.meta(value)}{_made_by(trace, op, value)}{written}"
    yield f"   {content(trace, value)}"


def _made_by(trace: Trace, op: Op, value: int) -> str:
    maker = int(trace.producer[value])
    if maker == op.index:
        return ""
    if maker >= 0:
        made = trace.op(maker)
        return f" from op {count(made.seq)}, {name(made.name)}"
    names = [leaf.name for leaf in trace.leaves if leaf.value == value and leaf.name]
    return f" {name(names[0])}" if names else " a leaf without a name"


def content(trace: Trace, value: int) -> str:
    """A value's statistics in one line."""
    fingerprint = trace.fingerprint(value)
    if fingerprint is None:
        maker = int(trace.producer[value])
        view = maker >= 0 and trace.op_info(int(trace.ops.signature[maker])).view
        return "a view: its content is that of what it views" if view else "no fingerprint"
    bad = [
        f"{count(n)} {word}"
        for n, word in (
            (fingerprint.nan, "NaN"),
            (fingerprint.pinf, "inf"),
            (fingerprint.ninf, "-inf"),
        )
        if n
    ]
    norm = size(float(np.sqrt(fingerprint.ssq)))
    finite = fingerprint.n - fingerprint.nonfinite
    span = (
        f"{size(fingerprint.min)} to {size(fingerprint.max)}, norm {norm}"
        if finite
        else "no finite value"
    )
    return ", ".join([f"digest {fingerprint.raw:016x}", span, *bad])
