"""Moves of parameters that went wrong: bad copies, sources that changed, changes that were lost.

Integrations write a "move" mark for each; those of one tensor share a `slot`. What the recorder could not
judge is judged here: whether an op that was recorded made a change.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from opdrift import tfp1
from opdrift.records import Cause, Confidence, Finding, Mark, Op
from opdrift.tracefile.reader import Trace
from opdrift.wording import some

StepAt = Callable[[int | None], int | None]

#: So many names or writers are listed.
_LISTED: Final = 4
_SEEN: Final = {
    "attach": "when it was taken out of the module",
    "write": "when the file was written",
    "load": "at the load before",
}


def moves(trace: Trace, step_at: StepAt) -> Iterator[Finding]:
    """What is wrong with the moves of one trace.

    Args:
        trace: The trace of one process.
        step_at: The step of the program that an op belongs to.
    """
    looked_at = _Moves(trace, step_at)
    first: dict[tuple[Any, ...], tuple[Finding, list[Mark]]] = {}
    for mark in trace.marks:
        finding = looked_at.judged(mark) if mark.kind == "move" else None
        if finding is None:
            continue
        # what goes wrong at every step is one fault
        key = _slot(mark), finding.name, finding.module, finding.cause.slug, finding.op
        first.setdefault(key, (finding, []))[1].append(mark)
    alike: dict[tuple[Any, ...], list[Finding]] = {}
    for finding, marks in first.values():
        told = looked_at.repeated(finding, marks)
        alike.setdefault((_story(finding, marks[0]), finding.cause.slug, finding.op), []).append(
            told
        )
    yield from map(_of_many, alike.values())


def _story(finding: Finding, mark: Mark) -> str:
    """What went wrong, without the names of the tensor, its module and its file."""
    said = finding.cause.summary.replace(str(mark.fields.get("file")), "")
    return said.removeprefix(_name(mark)).replace(_module(mark), "")


def _of_many(found: Sequence[Finding]) -> Finding:
    """One finding of tensors with which the same went wrong; the first leads."""
    first, *more = found
    if not more:
        return first
    names = [str(each.name) for each in more]
    line = f"the same with {len(names)} more: {some(names)}"
    cause = replace(first.cause, evidence=(*first.cause.evidence, line))
    return replace(first, cause=cause, names=tuple(name for each in found for name in each.names))


@dataclass(frozen=True)
class _Moves:
    """The moves of one trace, and which op wrote what they moved."""

    trace: Trace
    step_at: StepAt

    # ---- findings ----------------------------------------------------------------------------------

    def judged(self, mark: Mark) -> Finding | None:
        """What is wrong with one move; None if nothing is."""
        if mark.fields.get("intact") is False:
            drops = mark.fields.get("direction") == "drop"
            return self.lost(mark) if drops else self.bad_copy(mark)
        if mark.fields.get("source_unchanged") is False:
            return self.source_changed(mark)
        return None

    def repeated(self, finding: Finding, marks: list[Mark]) -> Finding:
        """A finding, with how often it came again."""
        if len(marks) == 1:
            return finding
        last = marks[-1]
        step = self._step(last)
        when = f"op {last.seq}" if step is None else f"op {last.seq}, step {step}"
        times = f"{len(marks) - 1} more times" if len(marks) > 2 else "once more"
        again = f"the same happened {times}, the last time after {when}"
        return replace(
            finding, cause=replace(finding.cause, evidence=(*finding.cause.evidence, again))
        )

    def bad_copy(self, mark: Mark) -> Finding:
        """What arrived is not what was sent."""
        fields, name = mark.fields, _name(mark)
        evidence = [_move(mark), *_digests(mark, "source", "destination"), *_where(mark)]
        held = [str(each) for each in fields.get("holds") or ()]
        if held:
            evidence.append(f"it is what {', '.join(held[:_LISTED])} holds")
        else:
            evidence += self._earlier(mark, "destination")
        return self._finding(
            mark,
            Cause(
                "fsdp-gather",
                "certain",
                f"{name}: what was put into {_module(mark)} is not what it was copied from",
                tuple(evidence),
                "The copy is torn, stale, or of another tensor: wait for it before the module runs, and do not"
                " let two names share one place while only one of them is up to date.",
            ),
        )

    def lost(self, mark: Mark) -> Finding:
        """What was changed in the module is thrown away when it is taken out."""
        name = _name(mark)
        load = self._load_before(mark)
        writers = self._writers(load, mark)
        evidence = [_move(mark), *_digests(mark, "destination", "source")]
        if load is not None:
            evidence[1:] = [
                f"its digest was {_raw(mark.fields.get('destination'))} when it was loaded after op {load.seq},"
                f" and is {_raw(mark.fields.get('source'))} now"
            ]
        evidence += _located(mark.fields.get("destination"), mark.fields.get("source"))
        rebound = mark.fields.get("rebound") is True
        if rebound:
            evidence.append("the module's tensor lies in other memory than what was loaded")
        elif not writers:
            evidence.append("no op that was recorded wrote it in between")
        evidence += _written(writers)
        seen = bool(writers) or rebound
        return self._finding(
            mark,
            Cause(
                "fsdp-gather" if seen else "race",
                "certain" if seen else "likely",
                f"{name}: changed while it was in {_module(mark)}, and the change is lost with the next load",
                tuple(evidence),
                "An offloaded tensor is read from its source at every call: change it there, or take the hooks"
                " off first (accelerate.hooks.remove_hook_from_module(model, recurse=True))."
                if seen
                else _WRITE_UNSEEN,
            ),
            op=writers[0] if writers else None,
            since=None if load is None else load.seq,
        )

    def source_changed(self, mark: Mark) -> Finding | None:
        """What a load brings is not what was there before; None where an op of the program made or wrote it."""
        fields, name, file = mark.fields, _name(mark), mark.fields.get("file")
        seen = str(fields.get("seen"))
        when = _SEEN.get(seen, "before")
        others = self._others(mark, "source")
        moved = fields.get("source_moved") is True
        if moved and not others and self._made_by_an_op(mark):
            return None
        if not file and not moved and self._writers(self._load_before(mark), mark):
            return None
        what = f"the file {file}" if file else "the memory that it is loaded from"
        evidence = [
            _move(mark),
            f"its digest was {_raw(fields.get('known'))} {when}, and is {_raw(fields.get('source'))} now",
            *_located(fields.get("known"), fields.get("source")),
        ]
        if others:
            rest = f" and {len(others) - 1} more" if len(others) > 1 else ""
            evidence.append(f"it is what {others[0]}{rest} held")
        else:
            evidence += self._earlier(mark, "source")
        if moved:
            evidence.append("it lies elsewhere than at the load before")
        elif not file:
            evidence.append("no op that was recorded wrote it in between")
        slug, confidence, try_ = _why_changed(
            file, stale=bool(file) and seen == "attach", another=bool(others), moved=moved
        )
        holds = "another tensor's values" if others else f"other values than {when}"
        return self._finding(
            mark, Cause(slug, confidence, f"{name}: {what} holds {holds}", tuple(evidence), try_)
        )

    def _finding(
        self, mark: Mark, cause: Cause, *, op: Op | None = None, since: int | None = None
    ) -> Finding:
        return Finding(
            "move",
            cause,
            _name(mark),
            None if op is None else op.name,
            mark.fields.get("unit") or "",
            mark.seq,
            self._step(mark),
            self.trace.header.rank,
            (_name(mark),),
            since,
        )

    def _step(self, mark: Mark) -> int | None:
        """The step that a move belongs to: where no op lies between, that of the mark which began it."""
        return self.step_at(mark.seq + 1 if id(mark) in self._beginning else mark.seq)

    @cached_property
    def _beginning(self) -> set[int]:
        """Moves (by their id) that come after the mark of a step, and before its first op."""
        found, began = set(), None
        for mark in self.trace.marks:
            if mark.kind == "step":
                began = mark.seq
            elif mark.kind == "move" and mark.seq == began:
                found.add(id(mark))
        return found

    # ---- what the trace knows ------------------------------------------------------------------------

    @cached_property
    def _by_slot(self) -> dict[tuple[str, int | None], list[Mark]]:
        found: dict[tuple[str, int | None], list[Mark]] = {}
        for mark in self.trace.marks:
            if mark.kind == "move" and isinstance(mark.fields.get("slot"), int):
                found.setdefault(_slot(mark), []).append(mark)
        return found

    def _before(self, mark: Mark) -> list[Mark]:
        """Earlier moves of the same tensor, the latest first."""
        if not isinstance(mark.fields.get("slot"), int):
            return []
        all_ = self._by_slot[_slot(mark)]
        return all_[: next(i for i, each in enumerate(all_) if each is mark)][::-1]

    def _load_before(self, mark: Mark) -> Mark | None:
        return next((m for m in self._before(mark) if m.fields.get("direction") == "load"), None)

    def _earlier(self, mark: Mark, which: str) -> Iterator[str]:
        """Which earlier load brought what this one brings."""
        content = mark.fields.get(which)
        for each in self._before(mark)[1:]:
            if content is not None and content in (
                each.fields.get("source"),
                each.fields.get("destination"),
            ):
                yield f"it is what it held after op {each.seq}"
                return

    @cached_property
    def _values(self) -> dict[str, tuple[list[int], list[int]]]:
        """Name -> the values that loads put into a module, and the last op before each."""
        found: dict[str, tuple[list[int], list[int]]] = {}
        for leaf in self.trace.leaves:
            if leaf.when == "gather":
                seqs, values = found.setdefault(leaf.name, ([], []))
                seqs.append(leaf.seq)
                values.append(leaf.value)
        return found

    def _value(self, load: Mark | None) -> int | None:
        """The value that a load put into a module."""
        if load is None:
            return None
        seqs, values = self._values.get(_name(load), ([], []))
        # memory that a load finds as it was named before is not named again
        named = bisect_right(seqs, load.seq)
        return values[named - 1] if named else None

    def _made_by_an_op(self, load: Mark) -> bool:
        value = self._value(load)
        return value is not None and bool(self.trace.producer[value] >= 0)

    @cached_property
    def _holders(self) -> dict[str, list[tuple[int, tuple[str, int | None], str]]]:
        """Content -> what held it: the number of a move, the tensor's slot and name."""
        found: dict[str, list[tuple[int, tuple[str, int | None], str]]] = {}
        for number, mark in enumerate(self._all):
            contents = {str(mark.fields.get(which)) for which in ("known", "source", "destination")}
            for content in contents:
                found.setdefault(content, []).append((number, _slot(mark), _name(mark)))
        return found

    @cached_property
    def _all(self) -> list[Mark]:
        return [mark for mark in self.trace.marks if mark.kind == "move"]

    def _others(self, mark: Mark, which: str) -> list[str]:
        """Other tensors that held the content of a move before it; none if it is one number throughout, as many are."""
        content = mark.fields.get(which)
        if not isinstance(content, Mapping):
            return []
        if tfp1.is_constant(
            int(content["raw"], 16), content["n"], tfp1.Code(content["code"]).bytes
        ):
            return []
        number = next(i for i, each in enumerate(self._all) if each is mark)
        names = [
            name
            for before, slot, name in self._holders.get(str(content), [])
            if before < number and slot != _slot(mark) and name != _name(mark)
        ]
        return list(dict.fromkeys(names))

    def _writers(self, load: Mark | None, until: Mark) -> list[Op]:
        """The ops that wrote what a load brought, up to another mark."""
        value = self._value(load)
        if load is None or value is None:
            return []
        trace = self.trace
        start, end = np.searchsorted(trace.ops.seq, [load.seq, until.seq], side="right")
        storage = trace.values.storage
        found = []
        for index in range(int(start), int(end)):
            op = trace.op(index)
            if any(storage[v] == storage[value] for v in op.outputs[: op.mutated]):
                found.append(op)
        return found


_WRITE_UNSEEN: Final = (
    "Look for a write that the dispatcher cannot see: another thread, a copy that nobody waited for, numpy, .data,"
    " a custom kernel. Wait for it before the tensor is moved."
)


def _why_changed(
    file: Any, *, stale: bool, another: bool, moved: bool
) -> tuple[str, Confidence, str]:
    """Cause, confidence and what to try where a source is not what it was."""
    if another:
        return "fsdp-gather", "likely", _EXCHANGED_FILE if file else _EXCHANGED_ENTRY
    if stale:
        return "fsdp-gather", "certain", _STALE_FOLDER
    if file:
        return (
            "race",
            "likely",
            f"Look for what writes {file}: another process, or a second model that is offloaded to the same folder.",
        )
    if moved:
        return "fsdp-gather", "possible", _REPLACED_ENTRY
    return "race", "likely", _WRITE_UNSEEN


_STALE_FOLDER: Final = (
    "The offload folder is an older one: disk_offload() keeps the files that it finds. Give it an empty folder, or delete"
    " this one."
)
_EXCHANGED_FILE: Final = (
    "The offload folder has another tensor's values under this name: files were exchanged, or its index names the wrong"
    " one. Offload into an empty folder, and compare the names of the checkpoint with those of the model."
)
_EXCHANGED_ENTRY: Final = (
    "The state dict that the model is offloaded to has another tensor's values under this name: compare its keys with the"
    " names of the model's parameters, and look for what assigns to them."
)
_REPLACED_ENTRY: Final = (
    "If the program gave the model these weights, all is right. Else look for what replaces the entry in the state dict"
    " that the model is offloaded to, or its .data."
)


def _slot(mark: Mark) -> tuple[str, int | None]:
    return str(mark.fields.get("library")), mark.fields.get("slot")


def _name(mark: Mark) -> str:
    """The first parameter that is wrong, else the first that was moved."""
    for part in mark.fields.get("mismatch") or ():
        return str(part.get("parameter"))
    for part in mark.fields.get("parameters") or ():
        return str(part[0])
    return "a tensor"


def _module(mark: Mark) -> str:
    return str(mark.fields.get("unit") or "the root module")


def _move(mark: Mark) -> str:
    fields = mark.fields
    nth = f" {fields['nth']}" if isinstance(fields.get("nth"), int) else ""
    others = len(fields.get("parameters") or ()) - 1
    more = f" and {others} more" if others > 0 else ""
    size = f", {fields['bytes']:,} bytes" if isinstance(fields.get("bytes"), int) else ""
    return (
        f"{fields.get('library', 'a library')}, {fields.get('direction')}{nth} of {_name(mark)}{more} from"
        f" {fields.get('source_device')} to {fields.get('destination_device')}{size},"
        f" after op {mark.seq}"
    )


def _digests(mark: Mark, first: str, second: str) -> Iterator[str]:
    if mark.fields.get(first) is not None and mark.fields.get(second) is not None:
        yield (
            f"the digest of the {first} is {_raw(mark.fields[first])}, that of the {second}"
            f" {_raw(mark.fields[second])}"
        )


def _raw(digest: Any) -> str:
    return str(digest.get("raw")) if isinstance(digest, Mapping) else "unknown"


def _where(mark: Mark) -> Iterator[str]:
    for part in (mark.fields.get("mismatch") or ())[:_LISTED]:
        offset, length = part.get("offset"), part.get("numel")
        differing = part.get("differing", length)
        zeros = ", all of them zero" if part.get("zeros") else ""
        if differing == 1:
            yield f"{part.get('parameter')}: element {offset:,} differs{zeros}"
        else:
            yield (
                f"{part.get('parameter')}: {differing:,} elements differ, from {offset:,} to"
                f" {offset + length - 1:,}{zeros}"
            )


def _located(before: Any, after: Any) -> Iterator[str]:
    """The one element that changed, where two digests tell it."""
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        return
    if (before["n"], before["code"]) != (after["n"], after["code"]):
        return
    raws = int(before["raw"], 16), int(after["raw"], 16)
    element = tfp1.changed_element(*raws, after["n"], after["code"])
    if element is not None:
        yield f"one element differs: {element:,} of {after['n']:,}"


def _written(writers: list[Op]) -> list[str]:
    lines = []
    for op in writers[:_LISTED]:
        where = f", {op.source}" if op.source is not None else ""
        lines.append(f"{op.name} (op {op.seq}{where}) wrote it")
    return lines
