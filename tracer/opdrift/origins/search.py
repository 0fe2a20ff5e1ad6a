"""Find every independent origin: leaves first, then pairs in the order of the left run, then results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from opdrift.case import Case, Side
from opdrift.contents import Flags
from opdrift.extracalls import extra_calls
from opdrift.flow import reaching
from opdrift.origins import leaves as leaf_origins
from opdrift.origins import single
from opdrift.origins.ended import early_end
from opdrift.origins.kinds import draws
from opdrift.origins.model import Origin
from opdrift.origins.regions import Region, representative
from opdrift.origins.returned import returned_by_one
from opdrift.origins.slots import SlotJudge
from opdrift.records import ArgumentDifference, Leaf, Sides
from opdrift.sinks import Sink, find_sinks, sample_sinks
from opdrift.tracefile.columns import Ints

#: After this many origins the search stops: the programs have little in common.
MANY: Final = 200
#: Arguments that say how large or where, not how: they follow from the shapes of the inputs.
_SHAPES: Final = frozenset(
    ["size", "sizes", "shape", "stride", "split_size", "split_sizes", "start", "end", "length", "index", "output_size", "normalized_shape"]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """What the search brought.

    Attributes:
        origins: Leaves in the order of their first use, then the others in the order of the left run.
        receivers: Rows of pairs whose outputs differ because their inputs do.
        sinks: Results of the runs.
        unused: Leaves that differ and have no part in any result that differs.
        stopped: The search was cut short.
        live: Which ops have a part in a result that differs; None if every op counts.
    """

    origins: tuple[Origin, ...]
    receivers: Ints
    sinks: tuple[Sink, ...]
    unused: tuple[Sides[Leaf], ...]
    stopped: bool
    live: Sides[bytearray | None]


def find_origins(case: Case, *, whole: bool) -> Found:
    """Find all origins.

    Args:
        case: Two paired traces.
        whole: The results of both runs are known and can be compared; else every op counts.
    """
    find = sample_sinks if case.by_sample else find_sinks
    sinks = find(case.compared, case.left.leaves, case.right.leaves) if whole else []
    differing = [s for s in sinks if s.differs]
    if whole and not differing:
        unused = tuple(pair.leaf for pair in leaf_origins.differing(case))
        return Found(
            tuple(_raised(case)),
            np.zeros(0, np.int64),
            tuple(sinks),
            unused,
            False,
            Sides(None, None),
        )
    live: Sides[bytearray | None] = _live(case, differing) if whole else Sides(None, None)
    starts, unused_pairs = leaf_origins.find(case, live)
    judge = SlotJudge(case)
    for origin in starts:
        judge.report(origin)
    made = leaf_origins.maker_ops(case, starts)
    origins = list(starts)
    receivers: list[int] = []
    stopped = False
    used = None
    if case.by_sample:
        results = [s.left for s in differing if s.left is not None]
        used = single.used_states(case, live.left, results)
    for found, row in _walk(case, judge, live, made, used):
        if found is None:
            receivers.append(row)
            continue
        judge.report(found)
        origins.append(found)
        if len(origins) - len(starts) >= MANY:
            stopped = True
            break
    rows = np.union1d(np.array(receivers, np.int64), _plain_receivers(case, live))
    if case.by_sample:
        origins += single.padding_views(
            case, _counts(case, live, np.arange(len(case.pairing.left)))
        )
    if not stopped:
        for origin in _at_results(case, judge, differing, origins):
            judge.report(origin)
            origins.append(origin)
        if not case.by_sample:  # other arguments are what batches of other sizes have
            origins += _at_receivers(case, rows, {o.row for o in origins})
    first = sorted((o for o in origins if o.kind == "leaf"), key=lambda o: o.order)
    rest = sorted((o for o in origins if o.kind != "leaf"), key=lambda o: o.order)
    return Found((*first, *rest), rows, tuple(sinks), tuple(unused_pairs), stopped, live)


def _live(case: Case, sinks: list[Sink]) -> Sides[bytearray | None]:
    return Sides(
        reaching(case.left.contents, [s.left for s in sinks if s.left is not None]),
        reaching(case.right.contents, [s.right for s in sinks if s.right is not None]),
    )


def _counts(case: Case, live: Sides[bytearray | None], rows: Ints) -> Ints:
    """Those rows whose op has a part in a result that differs, on either side."""
    if live.left is None or live.right is None:
        return rows
    left = np.frombuffer(live.left, np.uint8)[case.pairing.left[rows]]
    right = np.frombuffer(live.right, np.uint8)[case.pairing.right[rows]]
    found: Ints = rows[(left | right) != 0]
    return found


# ---- pairs -----------------------------------------------------------------------------------------------


def _walk(
    case: Case,
    judge: SlotJudge,
    live: Sides[bytearray | None],
    made: Sides[set[int]],
    used: Flags | None,
) -> Iterator[tuple[Origin | None, int]]:
    """Origins at pairs, in order; None for a pair that turned out to be a receiver."""
    compared = case.compared
    tokens = case.left.contents.tokens
    differs = np.zeros(len(case.pairing.left), np.bool_)
    differs[compared.inputs.pair[compared.input_differs]] = True
    open_slots = np.flatnonzero(compared.input_differs & ~compared.input_explained)
    unexplained = np.zeros(len(differs), np.bool_)
    unexplained[compared.inputs.pair[open_slots]] = True
    i = case.pairing.left
    # a view or a constant that differs is judged where it is used
    passive = tokens.uninitialised[i] | compared.constants | tokens.view[i]
    direct = compared.outputs_differ & ~differs & ~passive
    indirect = compared.outputs_differ & unexplained & ~tokens.view[case.pairing.left]
    slots: dict[int, list[int]] = defaultdict(list)
    for slot in open_slots.tolist():
        slots[int(compared.inputs.pair[slot])].append(slot)
    loads = Sides(_only_loads(case.left, made.left), _only_loads(case.right, made.right))
    for row in _counts(case, live, np.flatnonzero(direct | indirect)).tolist():
        if direct[row]:
            origin = _direct(case, row)
            if case.by_sample:
                at_output = single.at_used_output(case, origin, used)
                if at_output is None:
                    continue
                origin = single.moved(case, at_output)
            if not _makes_leaf(case, row, made):
                yield origin, row
            continue
        if _makes_leaf(case, row, loads):
            yield (
                None,
                row,
            )  # what a checkpoint held is told by the parameter that it was copied into
            continue
        for slot in slots[row]:
            inputs = compared.inputs
            left, right = int(inputs.left[slot]), int(inputs.right[slot])
            if _is_unwritten(case, left, right):
                yield replace(_direct(case, row), inputs_match=False), row
                break
            found = judge.judge(left, right, row, int(inputs.position[slot]))
            if found is not None and not (case.by_sample and single.is_longer_fill(case, found)):
                yield (single.at_maker(case, found) if case.by_sample else found), row
        else:
            # whatever its inputs are made of, they must explain its result
            yield None, row


def _makes_leaf(case: Case, row: int, made: Sides[set[int]]) -> bool:
    """Whether both ops of a pair made a leaf that is an origin by itself."""
    return int(case.pairing.left[row]) in made.left and int(case.pairing.right[row]) in made.right


def _only_loads(side: Side, made: set[int]) -> set[int]:
    """Those of the ops that made leaves whose inputs nothing else computes with: what a checkpoint held, no data."""
    ops, storage = side.trace.ops, side.trace.values.storage
    rows, read = ops.inputs.rows(), storage[ops.inputs.values]
    own = np.isin(rows, np.array(sorted(made), np.int64))
    elsewhere = np.unique(read[~own & ~side.contents.tokens.view[rows]])
    return made - set(rows[own & np.isin(read, elsewhere) & ~_written(side, rows, read)].tolist())


def _written(side: Side, rows: Ints, read: Ints) -> Flags:
    """Which inputs of ops lie in the storage that the op writes, such as the parameter that `copy_` fills."""
    ops, storage = side.trace.ops, side.trace.values.storage
    made = ops.outputs.rows() << 32 | storage[ops.outputs.values]
    found: Flags = np.isin(rows << 32 | read, made)
    return found


def _is_unwritten(case: Case, left: int, right: int) -> bool:
    """Whether two values are memory that the same op handed out and that nothing has written: its reader is at fault."""
    a, b = case.left.contents.states, case.right.contents.states
    op, other = int(a.writer[a.of[left]]), int(b.writer[b.of[right]])
    if op < 0 or int(case.pairing.right_of[op]) != other:
        return False
    return bool(case.left.contents.tokens.uninitialised[op])


def _direct(case: Case, row: int) -> Origin:
    """A pair with equal inputs and other outputs."""
    compared, pairing = case.compared, case.pairing
    i, j = int(pairing.left[row]), int(pairing.right[row])
    slot, values = _first_output(case, row)
    settings = case.settings(i, j) if compared.settings_differ[row] else ()
    return Origin(
        kind="op",
        story="op",
        op=Sides(i, j),
        row=row,
        values=values,
        slot=slot,
        order=float(i),
        settings=settings,
        inputs_match=True if compared.inputs_known[row] else None,
    )


def _first_output(case: Case, row: int) -> tuple[int | None, Sides[int | None]]:
    outputs = case.compared.outputs
    start, end = (
        np.searchsorted(outputs.pair, [row, row + 1]) if _is_sorted(outputs.pair) else (0, 0)
    )
    places = range(int(start), int(end)) if end else np.flatnonzero(outputs.pair == row).tolist()
    for place in places:
        if outputs.status[place] == 2:
            values: Sides[int | None] = Sides(int(outputs.left[place]), int(outputs.right[place]))
            return int(outputs.position[place]), values
    return None, Sides(None, None)


def _is_sorted(values: Ints) -> bool:
    return bool(np.all(values[1:] >= values[:-1]))


def _plain_receivers(case: Case, live: Sides[bytearray | None]) -> Ints:
    """Pairs all of whose differing inputs are explained by pairs before them."""
    compared = case.compared
    differs = np.zeros(len(case.pairing.left), np.bool_)
    differs[compared.inputs.pair[compared.input_differs]] = True
    unexplained = np.zeros(len(differs), np.bool_)
    unexplained[compared.inputs.pair[compared.input_differs & ~compared.input_explained]] = True
    view: Flags = case.left.contents.tokens.view[case.pairing.left]
    rows = np.flatnonzero(compared.outputs_differ & differs & ~unexplained & ~view)
    return _counts(case, live, rows)


# ---- receivers that are origins too ------------------------------------------------------------------------


def _at_receivers(case: Case, rows: Ints, taken: set[int]) -> list[Origin]:
    """Receivers whose arguments differ as well, or that make NaN of finite inputs on one side only."""
    found: list[Origin] = []
    differing = rows[case.compared.settings_differ[rows]]
    for row in differing[:MANY].tolist():
        if row in taken:
            continue
        origin = called_otherwise(case, row)
        if origin is not None:
            taken.add(row)
            found.append(origin)
    found += [
        replace(_direct(case, row), story="nonfinite", inputs_match=False)
        for row in _newly_nonfinite(case, rows)[:MANY].tolist()
        if row not in taken
    ]
    return found


def called_otherwise(case: Case, row: int) -> Origin | None:
    """A pair whose inputs differ, as an origin if it is called with other arguments too, on tensors of the same shapes."""
    direct = _direct(case, row)
    settings = tuple(s for s in direct.settings if _is_setting(s))
    if not settings or not _same_shapes(case, row):
        return None
    return replace(direct, story="settings", settings=settings, inputs_match=False)


def _is_setting(difference: ArgumentDifference) -> bool:
    return difference.name not in _SHAPES


def _same_shapes(case: Case, row: int) -> bool:
    i, j = int(case.pairing.left[row]), int(case.pairing.right[row])
    a = [case.left.trace.meta(v).shape for v in case.left.op(i).inputs]
    b = [case.right.trace.meta(v).shape for v in case.right.op(j).inputs]
    return a == b and case.left.name(i) == case.right.name(j)


def _newly_nonfinite(case: Case, rows: Ints) -> Ints:
    """Rows at which one side has non-finite outputs that its inputs do not have, and the other has not."""
    counts = case.left.contents.nonfinite, case.right.contents.nonfinite
    total = len(case.pairing.left)

    def any_of(pairs: Ints, flags: Flags) -> Flags:
        found = np.zeros(total, np.bool_)
        found[pairs[flags]] = True
        return found

    inputs, outputs = case.compared.inputs, case.compared.outputs
    out_left = any_of(outputs.pair, counts[0][outputs.left] > 0)
    out_right = any_of(outputs.pair, counts[1][outputs.right] > 0)
    in_any = any_of(inputs.pair, (counts[0][inputs.left] > 0) | (counts[1][inputs.right] > 0))
    hits = (out_left != out_right) & ~in_any
    chosen: Ints = rows[hits[rows]]
    return chosen


# ---- results -----------------------------------------------------------------------------------------------


def _at_results(
    case: Case, judge: SlotJudge, sinks: list[Sink], origins: list[Origin]
) -> Iterator[Origin]:
    """Results that differ though no pair that made them does."""
    known = len(origins)
    end = early_end(case)
    explained: list[Origin] = []
    for sink in sinks:
        if sink.left is None or sink.right is None:
            continue
        row = case.compared.made_by_one_pair(sink.left, sink.right)
        if row >= 0 and case.compared.tainted[row]:
            continue
        found = judge.judge(sink.left, sink.right, sink.row, sink.slot)
        if found is not None and end is not None and end.explains(found):
            explained.append(found)
        elif found is not None:
            known += 1
            yield found
    more = [s for s in sinks if s.kind in ("output", "more") and _is_more(case, s)]
    if more and (known or explained):
        found = _everything(case, more, in_extra_calls=True)
        if end is not None and end.explains(found):
            explained.append(found)
        else:
            yield found
    if end is not None and explained:
        yield end.origin(explained)
    elif not known and sinks:
        yield _everything(case, sinks)
    if not explained:
        yield from _raised(case)


def _raised(case: Case) -> Iterator[Origin]:
    """That one run raised where it had all results that the other has."""
    end = early_end(case)
    origin = end.by_itself() if end is not None else None
    if origin is not None:
        yield origin


def _is_more(case: Case, sink: Sink) -> bool:
    """Whether a result is of one run alone, which calls the model more often."""
    if (sink.left is None) == (sink.right is None):
        return False
    return bool(extra_calls(case.compared, 0 if sink.right is None else 1).calls)


def _everything(case: Case, sinks: list[Sink], *, in_extra_calls: bool = False) -> Origin:
    """Results differ, and nothing that both runs have does: what only one of them has.

    If that repeats an op of its own run and returns something else, it is that.
    """
    live = _live(case, sinks)
    assert live.left is not None
    assert live.right is not None
    found: list[tuple[int, ...]] = []
    for number, (partner, alive) in enumerate(
        ((case.pairing.right_of, live.left), (case.pairing.left_of, live.right))
    ):
        own = (partner < 0) & (np.frombuffer(alive, np.uint8) != 0)
        if in_extra_calls:
            own &= extra_calls(case.compared, number).of_op > 0
        found.append(tuple(np.flatnonzero(own).tolist()))
    left, right = found
    if not left and not right and (alone := returned_by_one(case, sinks)) is not None:
        return alone
    region = Region(Sides(left, right), Sides((), ()))
    for number in (0, 1):
        strayed = _strayed(case, number, (left, right)[number])
        if strayed is not None:
            return strayed
    first = next((s for s in sinks if s.left is not None and s.right is not None), sinks[0])
    stands = representative(case, region, Sides(None, None), nonfinite=False)
    return Origin(
        kind="structure",
        story="region",
        op=stands,
        row=-1,
        values=Sides(first.left, first.right),
        slot=None,
        order=leaf_origins.order_of(case, stands),
        region=region.ops,
    )


def _strayed(case: Case, number: int, ops: tuple[int, ...]) -> Origin | None:
    """The first op that returns something else than both runs have for the same op of the same inputs."""
    side = (case.left, case.right)[number]
    trace, tokens, content = side.trace, side.contents.tokens, side.contents.by_lineage
    pairing = case.pairing
    partner = (pairing.right_of, pairing.left_of)[number]
    alike = np.isin(tokens.full.all, tokens.full[np.array(ops, np.int64)]) if ops else np.zeros(0)
    known: dict[tuple[int, ...], int] = {}
    for op in np.flatnonzero(alike).tolist():
        if partner[op] >= 0:
            known.setdefault(_given(side, op), op)
    for op in ops:
        given = _given(side, op)
        twin = known.get(given)
        if twin is None or 0 in given or not len(trace.ops.outputs[op]):
            continue
        if tokens.view[op] or tokens.uninitialised[op] or draws(side, op):
            continue
        mine, theirs = int(trace.ops.outputs[op][0]), int(trace.ops.outputs[twin][0])
        if not content[mine] or not content[theirs] or content[mine] == content[theirs]:
            continue
        other = int(partner[twin])
        row = int(case.compared.row_of_left[twin if number == 0 else other])
        theirs = int((case.right, case.left)[number].trace.ops.outputs[other][0])
        return Origin(
            kind="op",
            story="op",
            op=Sides(op, other) if number == 0 else Sides(other, op),
            row=row,
            values=Sides(mine, theirs) if number == 0 else Sides(theirs, mine),
            slot=0,
            order=float(op if number == 0 else other),
            inputs_match=True,
        )
    return None


def _given(side: Side, op: int) -> tuple[int, ...]:
    """Words for what an op does and is given; a 0 among them for what is not known."""
    inputs = side.trace.ops.inputs[op]
    return int(side.contents.tokens.full[op]), *side.contents.by_lineage[inputs].tolist()


def random_draws(case: Case) -> Sides[list[int]]:
    """Ops of each side that really draw random numbers, in order."""
    return Sides(
        [
            int(i)
            for i in np.flatnonzero(case.left.contents.tokens.seeded.all)
            if draws(case.left, int(i))
        ],
        [
            int(i)
            for i in np.flatnonzero(case.right.contents.tokens.seeded.all)
            if draws(case.right, int(i))
        ],
    )
