"""Sentences about ranks: what happened, what speaks for it, what to try."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from textwrap import shorten
from typing import Final

from opdrift.compare import describe, difference
from opdrift.provenance import Lineage
from opdrift.provenance.words import made_words
from opdrift.records import RAISED, RANK_ENDED, Cause, Op
from opdrift.steps import Steps
from opdrift.tracefile.reader import Trace
from opdrift.wording import listed, some
from opdrift.world.apart import at, came_apart, last_written
from opdrift.world.collectives import Collective, Disagreement, World
from opdrift.world.ends import End, ends
from opdrift.world.loads import LoadedDifferently
from opdrift.world.messages import Message
from opdrift.world.models import other_models
from opdrift.world.passed import WrongMessage
from opdrift.world.replicas import Replicas, Split
from opdrift.world.results import WrongResult
from opdrift.world.shifted import met_in_other_steps

#: Of what a rank raised so much is quoted.
_LONGEST: Final = 160
_COPY: Final = "aten.copy_.default"
_SAME_ORDER: Final = (
    "Let every rank issue the same collectives in the same order, on tensors of one size and dtype: look for a branch"
    " on the rank or on a rank's own data around this line."
)
_NEW_FOLDER: Final = (
    "Delete the folder and record the run again, each run into a folder of its own; look whether every rank comes to"
    " record()."
)
_TOGETHER: Final = (
    "give every rank as many steps (batches), or use DistributedDataParallel's join()"
)


def of_disagreement(world: World, found: Disagreement, odd: Sequence[int]) -> Cause:
    """Ranks issued different collectives, or one did not issue it."""
    place = f"collective {found.number} of group {found.group}"
    others = [rank for rank in found.members if rank not in odd]
    if found.about == "missing":
        first = next(iter(found.members.values()))
        summary = f"{listed(odd)} never issued {place}: {listed(others)} issued {first.asked}"
    else:
        one, other = found.members[odd[0]], found.members[(others or list(found.members))[0]]
        summary = (
            f"the ranks do not agree about the {_ABOUT[found.about]} of {place}:"
            f" {listed(odd)} issued {one.asked}, {listed([other.rank])} {other.asked}"
        )
    evidence = [
        f"rank {rank}: {part.asked}, {_where(part)}" for rank, part in found.members.items()
    ]
    for rank in found.absent:
        issued = sum(c.group == found.group for c in world.collectives[rank])
        evidence.append(
            f"rank {rank} issued {issued} in this group, and then {_ending(world.traces[rank])}"
        )
    evidence += [
        f"rank {rank} {_ending(trace)}"
        for rank, trace in world.traces.items()
        if rank not in found.absent and not _ended_well(trace)
    ]
    if found.about == "missing":
        evidence += met_in_other_steps(world)
    else:
        evidence += other_models(world)
    if found.about in ("dtype", "reduction"):
        evidence.append(
            "nothing raises an error for this: the bytes are taken for what they are not"
        )
    closed = all(_ended_well(world.traces[rank]) for rank in found.absent)
    remedy = (
        f"Let {listed(odd)} come to the end together with the others: {_TOGETHER}."
        if found.absent and closed
        else _SAME_ORDER
    )
    return Cause("collective", "certain", summary, tuple(evidence), remedy)


_ABOUT: Final = {
    "operation": "operation",
    "dtype": "dtype",
    "size": "size",
    "reduction": "reduction",
    "root": "root",
}


def of_another_run(trace: Trace, said: str) -> Cause:
    """A rank did not record in this run, and what lies there is of another one."""
    return Cause(
        "other-run",
        "certain",
        said,
        (f"{trace.path} began at {trace.header.created}",),
        _NEW_FOLDER,
    )


def of_message(sent: Message, received: Message) -> Cause:
    """A rank sent something else than its peer has room for."""
    return Cause(
        "collective",
        "certain",
        f"rank {sent.rank} and rank {received.rank} do not agree about a message: {sent.place} is {sent.asked},"
        f" {received.place} {received.asked}",
        tuple(f"rank {part.rank}: {part.asked}, {_where(part)}" for part in (sent, received)),
        "Let the receiver have room for what is sent, of its dtype and size; of messages with one tag the first that is"
        " sent is the first that is received.",
    )


READ_LATE: Final = (
    "Let nothing write into a tensor between isend() and its wait(), and read what irecv() fills after its wait() only:"
    " look for a buffer that is used again too early, numpy, and other threads and streams."
)


def of_wrong_message(wrong: WrongMessage) -> Cause:
    """A rank received something else than its peer sent."""
    sent, received = wrong.sent, wrong.received
    more = f"{wrong.more} more of these messages did not arrive as they were sent"
    return Cause(
        "collective",
        "likely",
        f"what rank {received.rank} got by {received.place} is not what rank {sent.rank} gave to {sent.place}",
        (
            *wrong.evidence,
            *(f"rank {part.rank}: {part.asked}, {_where(part)}" for part in (sent, received)),
            *([more] if wrong.more else []),
        ),
        READ_LATE,
    )


def of_waiting(world: World, message: Message) -> Cause:
    """A rank ended in a message that its peer, which came to its own end, had no part in."""
    peer = message.peer
    others = [
        each for each in world.messages.alone if (each.rank, each.peer) == (peer, message.rank)
    ]
    evidence = [
        f"rank {message.rank}: {message.asked}, {_where(message)}, and then it {_ending(world.traces[message.rank])}",
        *(f"rank {peer}: {each.place} ({_where(each)}) met nothing, either" for each in others),
        f"rank {peer} {_ending(world.traces[peer])}",
    ]
    return Cause(
        "collective",
        "certain",
        f"rank {message.rank} waited in {message.place}, which rank {peer} had no part in",
        tuple(evidence),
        "Let each message have its sender and its receiver, with the same tag and process group.",
    )


def _where(part: Collective | Message) -> str:
    line = f" at {part.source}" if part.source is not None else ""
    return f"op {part.seq}{line}"


def _ended_well(trace: Trace) -> bool:
    return trace.footer is not None and trace.footer.ended == "ok"


def _ending(trace: Trace) -> str:
    """How a rank's trace ends, in words."""
    if trace.footer is None:
        return "ended without closing its trace"
    if trace.footer.ended == "raised":
        return f"raised {shorten(trace.footer.exception or 'an exception', _LONGEST, placeholder=' ...')}"
    return "ended by itself"


def of_end(world: World, end: End) -> Cause:
    """A rank was killed or died, or an exception ended it, and the others were left without it."""
    trace, rank = world.traces[end.rank], end.rank
    issued = world.collectives[rank]
    evidence = []
    if issued:
        evidence.append(
            f"the last collective that it issued is {issued[-1].asked}, {_where(issued[-1])}"
        )
    evidence += [_left_alone(world, rank, other) for other in world.traces if other != rank]
    footer, last = trace.footer, last_op(trace)
    if footer is None:
        summary = f"rank {rank} ended in the middle of the run"
        if issued:
            summary += f", in or after {issued[-1].place}"
        path = shlex.quote(str(trace.path))
        look = f" The last op on disk: `opdrift show {path} --op {last.seq}`." if last else ""
        return Cause(
            RANK_ENDED,
            "likely",
            summary,
            (f"its trace is {trace.incomplete}", *evidence),
            f"Read the last lines that rank {rank} wrote to stderr; a rank that is killed from outside (out of memory, a"
            f" signal) says nothing.{look}",
        )
    kind, _, message = (footer.exception or "an exception").partition(": ")
    place = f" at {footer.raised_at}" if footer.raised_at is not None else ""
    message = f": {shorten(message, _LONGEST, placeholder=' ...')}" if message else ""
    if last is not None:
        within = "raised in" if last.flags & RAISED else "its last op is"
        evidence.insert(0, f"{within} {last.name} (op {last.seq}){at(last)}")
    return Cause(
        RANK_ENDED,
        "certain",
        f"rank {rank} ended with {kind}{place}{message}",
        tuple(evidence),
        f"Let rank {rank} end together with the others: {_TOGETHER}."
        if kind == "SystemExit"
        else f"Look at what rank {rank} raised{place}: what the others ended with follows from it.",
    )


def last_op(trace: Trace) -> Op | None:
    """The last op of a trace; None if it has none."""
    return trace.op(len(trace.ops) - 1) if len(trace.ops) else None


def _left_alone(world: World, rank: int, other: int) -> str:
    """How another rank ended, and where it waited for this one."""
    end = ends(world)[other]
    if end.waited_in is not None and rank in end.waited_for:
        never = "issued" if isinstance(end.waited_in, Collective) else "had a part in"
        return (
            f"rank {other} waited in {end.waited_in.place} ({_where(end.waited_in)}), which rank {rank} never {never}, and"
            f" {_ending(world.traces[other])}"
        )
    return f"rank {other} {_ending(world.traces[other])}"


def of_wrong_results(found: Sequence[WrongResult]) -> Cause:
    """A collective's result is not what its ranks gave; the first of those that go wrong at one line."""
    wrong, *more = found
    meeting = wrong.meeting
    part = meeting.members[wrong.ranks[0]]
    if wrong.kind == "unequal":
        summary = f"{part.place} left other contents on {listed(wrong.ranks)} than on the others"
    else:
        summary = f"the result of {part.place} on {listed(wrong.ranks)} is not what its ranks gave"
    evidence = [*wrong.evidence, f"{part.asked}, {_where(part)}"]
    if more:
        last = more[-1].meeting.members[wrong.ranks[0]]
        times = "once more" if len(more) == 1 else f"{len(more)} times more"
        evidence.append(f"the same is wrong {times}, last with {last.place} (op {last.seq})")
    return Cause(
        "collective",
        "likely" if meeting.what in ("all_reduce", "reduce", "reduce_scatter") else "certain",
        summary,
        tuple(evidence),
        "Look for something that writes into the tensors of this collective while it runs: an asynchronous call that is"
        ' not waited for, another stream or thread, a tensor that is reused. Record once more with integrity="full";'
        " if it persists, suspect the communication library.",
    )


def of_loads(found: Sequence[LoadedDifferently]) -> Cause:
    """Parameters that one rank loaded and another one drew."""
    first = found[0]
    names = [each.name for each in found]
    said = some(names)
    word = "were" if len(names) > 1 else "was"
    return Cause(
        "weights",
        "certain",
        f"{said} {word} loaded on rank {first.loaded} and never on rank {first.drawn}",
        (
            f"on rank {first.loaded}, {first.name} {made_words(first.how.left)}",
            f"on rank {first.drawn}, {first.name} {made_words(first.how.right)}",
        ),
        "Load the checkpoint on every rank before the model is sharded, or broadcast it from the rank that did.",
    )


def of_split(world: World, replicas: Replicas, group: Sequence[Split]) -> Cause:
    """Ranks hold other contents of what they should hold alike."""
    first = group[0]
    names = [split.replica.name for split in group]
    said = some(names)
    when = "when the run began"
    if first.step:
        read = first.before_training
        when = "when a module first read it" if read else f"after its write {first.step}"
    copies = _copied_from_outside(world, replicas, first)
    evidence = [
        f"{first.replica.name}: {describe(difference(replicas.print(first.usual, first.left), replicas.print(first.odd[0], first.right)))}",
        f"it should be equal: {first.replica.why}",
    ]
    apart = came_apart(
        world,
        replicas,
        (first.usual, first.odd[0]),
        (first.left.value, first.right.value),
        first.replica.name,
    )
    replaced = apart.replaced
    if replaced:
        evidence += apart.told
    elif first.lacks_writes:
        evidence += _written_last(world, replicas, first)
    elif copies is not None:
        evidence += [
            f"on rank {rank}, {op.name} (op {op.seq}){at(op)} copied what no recorded op made into it, as from a file"
            for rank, op in copies.items()
        ]
    elif first.step:
        evidence += apart.told
    else:
        lineages = {rank: Lineage(world.traces[rank]) for rank in (first.usual, first.odd[0])}
        evidence += [
            f"on rank {rank} it {made_words(lineages[rank].of(state.value))}"
            for rank, state in ((first.usual, first.left), (first.odd[0], first.right))
        ]
    evidence += met_in_other_steps(world)
    return Cause(
        "replica",
        "certain" if first.replica.certain else "likely",
        f"{said} {'differ' if len(group) > 1 else 'differs'} {_between(first)}"
        + (f": {listed(replaced)} replaced its tensor" if replaced else f", {when}")
        + (f": {apart.called}" if apart.called and apart.told[0] in evidence else ""),
        tuple(evidence),
        "Let every rank replace the parameter alike, or write into it on all ranks: `with torch.no_grad():"
        " parameter.copy_(new)`."
        if replaced
        else _remedy(first, loaded=copies is not None),
    )


def _copied_from_outside(world: World, replicas: Replicas, split: Split) -> dict[int, Op] | None:
    """The ops that copied the contents in, where both ranks got theirs from what no recorded op made: a checkpoint."""
    found = {}
    for rank, state in ((split.usual, split.left), (split.odd[0], split.right)):
        maker = replicas.contents(rank).maker
        op = world.traces[rank].op(int(maker[state.value])) if maker[state.value] >= 0 else None
        source = op.inputs[-1] if op is not None and op.name == _COPY else 0
        if op is None or not source or maker[source] >= 0:
            return None
        found[rank] = op
    return found


def _remedy(split: Split, *, loaded: bool) -> str:
    if split.before_training and split.lacks_writes and split.replica.kind == "buffer":
        return (
            "Seed or load all ranks alike, and write a buffer alike on all of them, or broadcast it before it is read: look for a"
            " branch on the rank around the op named above. Only DistributedDataParallel synchronises buffers."
        )
    if not split.step or (split.before_training and not loaded):
        return (
            "Seed or load all ranks alike, or broadcast the parameters before training (DistributedDataParallel does, unless"
            " init_sync=False)."
        )
    if loaded and not split.lacks_writes:
        return (
            "Load the same checkpoint on all ranks, or broadcast the parameters after loading: look at the path that each rank"
            " reads at the line above."
        )
    if split.lacks_writes and split.replica.kind == "buffer":
        return (
            "Let all ranks write a buffer alike, or broadcast it before it is read: look for a branch on the rank, on its data"
            " or on what it computed around the op named above. Only DistributedDataParallel synchronises buffers."
        )
    if split.lacks_writes:
        return (
            "Let all ranks write a parameter alike: look for an optimizer step that a rank leaves out or makes twice, behind a"
            " branch on the rank, on its data or on what it computed (a check for NaN, a scaler that skips)."
        )
    return (
        "Let nothing but the reduced gradient change a parameter: look at the op named above, and at what the rank does"
        " that the others do not."
    )


def _written_last(world: World, replicas: Replicas, split: Split) -> Iterator[str]:
    """How often and where the ranks had written a parameter, where that is not the same."""
    states = ((split.usual, split.left), (split.odd[0], split.right))
    often = " and ".join(f"{_times(state.step)} on rank {rank}" for rank, state in states)
    yield f"until then {split.replica.name} had been written {often}"
    for rank, state in states:
        maker = int(replicas.contents(rank).maker[state.value])
        op = world.traces[rank].op(maker) if maker >= 0 else None
        step = Steps(world.traces[rank]).known_at(op.seq) if op is not None else None
        within = f", in step {step}" if step is not None else ""
        yield f"on rank {rank}, it {last_written(op)}{within}"


def _times(number: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(number, f"{number} times")


def _between(split: Split) -> str:
    alike = len(split.replica.ranks) - len(split.odd)
    if (
        alike == 1
    ):  # no two of them agree, or there are but two: nobody can tell which is the odd one
        return f"between {listed(sorted((split.usual, *split.odd)))}"
    return f"on {listed(split.odd)} from rank {split.usual} and {alike - 1} more"
