"""What stands around a diagnosis: the traces, the environment, ops without counterpart, notes."""

from __future__ import annotations

from typing import Any

import numpy as np

from opdrift.case import Case, Side
from opdrift.causes.inputs import equal_samples
from opdrift.diagnose.batches import uneven_inputs
from opdrift.origins.leaves import not_followed
from opdrift.origins.search import Found, random_draws
from opdrift.records import EnvironmentDifference, Header, Sides, TraceSummary, UnpairedGroup
from opdrift.shards import parts_not_followed
from opdrift.sinks import results_of_all
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace
from opdrift.unfollowed import unfollowed
from opdrift.wording import some

#: Groups of unpaired ops that are listed.
_GROUPS = 200


def summary_of(trace: Trace) -> TraceSummary:
    """Which trace it is."""
    header = trace.header
    return TraceSummary(
        path=str(trace.path),
        run_id=header.run_id,
        label=header.label,
        created=header.created,
        torch=header.torch,
        device=header.device,
        ops=len(trace.ops),
        complete=trace.complete,
        world_size=header.world_size,
        rank=header.rank,
    )


def environment_of(left: Header, right: Header) -> tuple[EnvironmentDifference, ...]:
    """Flags, versions, variables and seeds that differ.

    A flag that only one header has (of another opdrift or torch) is unknown in the other, and no difference; a
    variable or a library that only one has is one, and so is the seed of a device.
    """
    found = []
    for name, a, b in (
        ("device", left.device, right.device),
        ("engine", left.engine, right.engine),
    ):
        if a != b:
            found.append(EnvironmentDifference(name, a, b))
    tables: tuple[tuple[Any, Any], ...] = (
        (left.versions, right.versions),
        (left.flags, right.flags),
        (left.variables, right.variables),
    )
    for first, second in tables:
        for name in dict.fromkeys([*first, *second]):
            a, b = first.get(name), second.get(name)
            unknown = first is left.flags and not (name in first and name in second)
            if a != b and not (unknown and not name.startswith("seed.")):
                found.append(EnvironmentDifference(name, _text(a), _text(b)))
    return tuple(found)


def without_unused_seeds(
    case: Case, environment: tuple[EnvironmentDifference, ...]
) -> tuple[EnvironmentDifference, ...]:
    """Leave out how generators began where the first draws of both runs came from the same state.

    Where nothing is drawn it stays: the weights may have been drawn before the recording.
    """
    draws = random_draws(case)
    if not draws.left or not draws.right:
        return environment
    left = int(case.left.trace.ops.rng[draws.left[0]])
    right = int(case.right.trace.ops.rng[draws.right[0]])
    if left != right or not left:
        return environment
    return tuple(d for d in environment if not d.name.startswith("seed."))


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def unpaired_of(case: Case) -> Sides[tuple[UnpairedGroup, ...]]:
    """Ops that only one run has, grouped by op and module."""
    return Sides(
        _groups(case.left, np.flatnonzero(case.pairing.right_of < 0)),
        _groups(case.right, np.flatnonzero(case.pairing.left_of < 0)),
    )


def _groups(side: Side, ops: Ints) -> tuple[UnpairedGroup, ...]:
    if not len(ops):
        return ()
    key = np.stack([side.trace.ops.signature[ops], side.home[ops]], axis=1)
    _, first, counts = np.unique(key, axis=0, return_index=True, return_counts=True)
    merged: dict[tuple[str, str], tuple[int, int]] = {}
    for start, count in zip(first.tolist(), counts.tolist(), strict=True):
        op = int(ops[start])
        name = side.name(op), side.module(op)
        seen, seq = merged.get(name, (0, side.seq(op)))
        merged[name] = seen + count, min(seq, side.seq(op))
    groups = [UnpairedGroup(op, module, n, seq) for (op, module), (n, seq) in merged.items()]
    return tuple(sorted(groups, key=lambda g: g.first_seq)[:_GROUPS])


def notes_of(case: Case, found: Found, *, samples: tuple[int, int] | None) -> tuple[str, ...]:
    """Sentences about what could not be judged, or does not count."""
    notes = []
    for name, side in (("left", case.left), ("right", case.right)):
        trace = side.trace
        if trace.incomplete is not None:
            notes.append(
                f"the {name} trace is {trace.incomplete}; what follows could not be compared"
            )
        if trace.footer is not None and trace.footer.exception:
            notes.append(f"the {name} run ended with {trace.footer.exception}")
        if trace.footer is not None and trace.footer.failures:
            notes.append(
                f"opdrift itself failed at {len(trace.footer.failures)} places while recording the {name} run"
            )
        notes += [f"{name}: {sentence}" for sentence in unfollowed([trace])]
    notes += _of_parts(case)
    if found.unused:
        told = {name for origin in found.origins for name in origin.names}
        names = list(
            dict.fromkeys(
                name
                for name in (pair.left.name for pair in found.unused)
                if name and name not in told
            )
        )
        if names:
            verbs = "differ but have" if len(names) > 1 else "differs but has"
            notes.append(f"{some(names)} {verbs} no part in a result that differs")
    if samples is not None:
        notes += _of_samples(case, samples)
    else:
        notes += _of_other_batches(case)
    return tuple(notes)


def _of_parts(case: Case) -> list[str]:
    """Parameters of which a rank holds a part that is never gathered, or not seen to be: no wholes to compare."""
    apart = not_followed(case)
    said = []
    for label, side in (("left", case.left), ("right", case.right)):
        names = [name for name in parts_not_followed(side.trace) if name in apart]
        if names:
            said.append(
                f"{some(names, 2)}: the {label} trace holds only this rank's part of each: they are not compared. What"
                " tensor parallelism splits stays so; if FSDP shards them, record with"
                ' integrations="auto" (torch_fsdp), and look for a mark integration-failed in the trace'
            )
    return said


def _of_other_batches(case: Case) -> list[str]:
    """That single samples can be compared, where batches of other sizes were recorded that have samples in common."""
    left, right = case.left.trace.batch, case.right.trace.batch
    if left is None or right is None or left.size == right.size:
        return []
    same = next(equal_samples(case, range(left.size), range(right.size)), None)
    if same is None:
        return []
    return [
        f"the batches hold {left.size} and {right.size} samples, and sample {same[0]} of the left one is sample {same[1]}"
        f" of the right one: compare that with --samples {same[0]}:{same[1]}"
    ]


def _of_samples(case: Case, samples: tuple[int, int]) -> list[str]:
    """Which samples were compared, and which results were not."""
    batches = [s.trace.batch for s in (case.left, case.right)]
    words = [
        f"sample {number} of a batch of {batch.size if batch is not None else 1}"
        for number, batch in zip(samples, batches, strict=True)
    ]
    found = [f"{words[0]} on the left against {words[1]} on the right"]
    found += [
        f"{uneven}, so padding may count as content: record padded runs with lengths="
        for uneven in uneven_inputs(case)
    ]
    other = results_of_all(case.compared, case.left.leaves, case.right.leaves)
    if other.common:
        found.append(f"{some(other.common)}: made of all samples, so not compared")
    if other.unknown:
        found.append(
            f"{some(other.unknown)}: the sample could not be followed to it, so not compared"
        )
    return found
