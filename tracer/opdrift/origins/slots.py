"""Explain two corresponding values that differ although no one pair of ops made them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from opdrift.case import Case, Side
from opdrift.origins.kinds import computes
from opdrift.origins.leaves import order_of
from opdrift.origins.model import NO_LEAF, Origin, Story
from opdrift.origins.regions import Region, is_sum, region_of, representative, unseen_results
from opdrift.origins.updates import gathered_parameter
from opdrift.pairs import EQUAL
from opdrift.records import DivergenceKind, Leaf, Sides
from opdrift.replacements import Replacement
from opdrift.shards import puts_together
from opdrift.sizes import measure, size_of

#: How many earlier writes of a storage are looked at for one that the other run stopped at.
_LOOK_BACK = 64
#: By a replacement a parameter comes this much further from the other run's than it was.
_FURTHER = 10.0


class SlotJudge:
    """Decides for one value after another; remembers what has been reported."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._leaf_states: Sides[set[int]] = Sides(set(), set())
        self._ops: Sides[set[int]] = Sides(set(), set())
        #: Digests of both sides of leaves that were reported.
        self._leaf_contents: set[tuple[object, object]] = set()
        self._judged: set[tuple[int, int]] = set()

    def report(self, origin: Origin) -> None:
        """What an origin stands for explains everything that follows from it."""
        self._ops.left.update(origin.region.left)
        self._ops.right.update(origin.region.right)
        if origin.story == "written":
            for op, known in ((origin.op.left, self._ops.left), (origin.op.right, self._ops.right)):
                if op is not None:
                    known.add(op)
        if origin.kind in ("leaf", "hidden-write"):
            for side, value, known in (
                (self._case.left, origin.values.left, self._leaf_states.left),
                (self._case.right, origin.values.right, self._leaf_states.right),
            ):
                if value is not None:
                    known.add(int(side.contents.states.of[value]))
            self._leaf_contents.update(self._gathered_contents(origin))

    def _gathered_contents(self, origin: Origin) -> Iterator[tuple[object, object]]:
        """The digests of both sides of the parameters of an origin that are gathered in one run at least."""
        for pair in (origin.leaf, *origin.members):
            if pair.left is None or pair.right is None:
                continue
            if "gather" in (pair.left.when, pair.right.when):
                contents = self._contents_of(self._states(pair.left.value, pair.right.value))
                if contents is not None:
                    yield contents

    def judge(self, left: int, right: int, row: int, position: int | None) -> Origin | None:
        """The origin behind a value that differs, or None if one that was reported explains it.

        Args:
            left: Left value.
            right: Right value.
            row: Row of the pair that reads them; -1 for a result.
            position: Position among that pair's inputs.
        """
        states = self._states(left, right)
        if states in self._judged:
            return None
        self._judged.add(states)
        seen = _Seen(row, position, self._consumer(row))
        if self._is_reported_again(states) or self._are_reported(states):
            return None
        if self._is_generated(left, right):
            return None  # what generated code made of what it read cannot be seen
        if self._is_changed(left, right):
            return None if self._is_reported(states) else self._hidden_write(left, right, seen)
        made_by = self._constant(left, right)
        if made_by >= 0:
            return self._factory(left, right, made_by, seen)
        replaced = self._replaced(states, left, right)
        if replaced is not None:
            known = self._is_reported(states)
            return None if known else self._replaced_origin(*replaced, left, right, seen)
        if self._writers(states) == (-1, -1):
            if self._is_reported(states) or self._is_told_where_gathered(left, right):
                return None
            found = self._between_leaves(left, right, seen)
            if found is not None:
                return found
        placed = self._placed(states, left, right, seen)
        if placed is not None:
            return placed
        written = self._written(left, right, seen)
        if written is not None:
            return written
        return self._region(left, right, seen)

    # ---- leaves ----------------------------------------------------------------------------------------

    def _is_reported(self, states: tuple[int, int]) -> bool:
        return states[0] in self._leaf_states.left or states[1] in self._leaf_states.right

    def _are_reported(self, states: tuple[int, int]) -> bool:
        """Whether both are leaves that were reported, loaded or drawn since they were met."""
        return states[0] in self._leaf_states.left and states[1] in self._leaf_states.right

    def _is_reported_again(self, states: tuple[int, int]) -> bool:
        """Whether both hold what a pair of leaves holds that was reported: gathered once more, for the backward pass."""
        return self._contents_of(states) in self._leaf_contents

    def _bases(self, states: tuple[int, int]) -> tuple[int, int]:
        """The value that tells most of each state; -1 where none does."""
        left, right = self._case.left.contents.states, self._case.right.contents.states
        return int(left.base[states[0]]), int(right.base[states[1]])

    def _contents_of(self, states: tuple[int, int]) -> tuple[object, object] | None:
        """The digests of what two states hold; None where one is not known."""
        keys = []
        sides = self._case.left, self._case.right
        for side, base in zip(sides, self._bases(states), strict=True):
            if base < 0:
                return None
            keys.append(side.trace.fingerprints.key(int(side.trace.values.fingerprint[base])))
        return keys[0], keys[1]

    def _is_generated(self, left: int, right: int) -> bool:
        """Whether code that torch.compile generated wrote both values."""
        rows = self._case.left.leaves.of(left), self._case.right.leaves.of(right)
        return all(any(leaf.when == "generated" for leaf in side) for side in rows)

    def _is_changed(self, left: int, right: int) -> bool:
        """Whether a run holds something here that no op wrote."""
        rows = *self._case.left.leaves.of(left), *self._case.right.leaves.of(right)
        return any(leaf.when == "changed" for leaf in rows)

    def _hidden_write(self, left: int, right: int, seen: _Seen) -> Origin:
        """A leaf, or what an op made, changed with no op that wrote it."""
        rows = self._case.left.leaves.of(left), self._case.right.leaves.of(right)
        module = self._module(seen)
        best = Sides(
            self._case.left.leaves.best(left, module), self._case.right.leaves.best(right, module)
        )
        shared = {leaf.name for leaf in rows[0] if leaf.name} & {leaf.name for leaf in rows[1]}
        if shared and best.left is not None and best.left.name not in shared:
            best = _named(rows, sorted(shared)[0])
        at = self._where_changed(rows) if seen.row < 0 else None
        return self._origin("hidden-write", "hidden-write", left, right, seen, leaf=best, op=at)

    def _where_changed(self, rows: tuple[list[Leaf], list[Leaf]]) -> Sides[int | None] | None:
        """The op at whose reading a change was noticed, with its counterpart; None if it was at the end of the run."""
        pairing = self._case.pairing
        for side, leaves, partner in (
            (self._case.left, rows[0], pairing.right_of),
            (self._case.right, rows[1], pairing.left_of),
        ):
            for leaf in leaves:
                op = side.trace.index_of(leaf.seq + 1) if leaf.when == "changed" else None
                if op is not None:
                    other = int(partner[op]) if partner[op] >= 0 else None
                    return Sides(op, other) if side is self._case.left else Sides(other, op)
        return None

    def _between_leaves(self, left: int, right: int, seen: _Seen) -> Origin | None:
        """Both values are leaves, or parts of leaves."""
        case = self._case
        rows = case.left.leaves.of(left), case.right.leaves.of(right)
        if not rows[0] or not rows[1]:
            return None
        module = self._module(seen)
        best = Sides(case.left.leaves.best(left, module), case.right.leaves.best(right, module))
        assert best.left is not None
        assert best.right is not None
        shared = {leaf.name for leaf in rows[0] if leaf.name} & {leaf.name for leaf in rows[1]}
        if shared and best.left.name not in shared:
            best = _named(rows, sorted(shared)[0])
        if not shared and self._both_have_both(best):
            return self._origin("structure", "other-source", left, right, seen, leaf=best)
        assert best.left is not None
        assert best.right is not None
        values = Sides(best.left.value, best.right.value)
        if self._equal(values.left, values.right):
            return None  # other parts of the same leaf
        return self._origin("leaf", "leaf", values.left, values.right, seen, leaf=best)

    def _is_told_where_gathered(self, left: int, right: int) -> bool:
        """Whether nameless tensors hold parts of parameters, and one of these differs where it is gathered."""
        leaves = self._case.left.leaves, self._case.right.leaves
        if any(leaf.name for leaf in (*leaves[0].of(left), *leaves[1].of(right))):
            return False
        held = leaves[0].parts_in(left) & leaves[1].parts_in(right)
        named = leaves[0].by_name, leaves[1].by_name
        return any(
            not self._equal(named[0][name][0].value, named[1][name][0].value)
            for name in held & named[0].keys() & named[1].keys()
        )

    def _both_have_both(self, leaf: Sides[Leaf | None]) -> bool:
        """Whether each run has the other's leaf too, with the same content: they read different ones."""
        assert leaf.left is not None
        assert leaf.right is not None
        left, right = self._case.left.leaves.by_name, self._case.right.leaves.by_name
        theirs, ours = right.get(leaf.left.name), left.get(leaf.right.name)
        if not leaf.left.name or not leaf.right.name or not theirs or not ours:
            return False
        return self._equal(leaf.left.value, theirs[0].value) and self._equal(
            ours[0].value, leaf.right.value
        )

    def _replaced(
        self, states: tuple[int, int], left: int, right: int
    ) -> tuple[int, Replacement] | None:
        """The run, 0 or 1, that alone put another tensor in the place of a parameter, and how; it differs by that."""
        case = self._case
        found = case.left.replaced.get(states[0]), case.right.replaced.get(states[1])
        for number, replacement in enumerate(found):
            if replacement is None or found[1 - number] is not None:
                continue
            other = (case.right, case.left)[number].leaves.of_storage((right, left)[number])
            if other is None or other.name != replacement.name:
                continue
            now = self._bases(states)
            before = (replacement.last, now[1]) if number == 0 else (now[0], replacement.last)
            gaps = [measure(case, *pair) if min(pair) >= 0 else None for pair in (before, now)]
            sizes = [None if gap is None else gap.relative for gap in gaps]
            if sizes[0] is not None and sizes[1] is not None and _FURTHER * sizes[0] < sizes[1]:
                return number, replacement
        return None

    def _replaced_origin(
        self, number: int, replacement: Replacement, left: int, right: int, seen: _Seen
    ) -> Origin:
        kept = (self._case.right, self._case.left)[number].leaves.of_storage((right, left)[number])
        leaf = Sides(replacement.after, kept) if number == 0 else Sides(kept, replacement.after)
        region = region_of(self._case, left, right)
        found = self._origin(
            "hidden-write", "replaced", left, right, seen, leaf=leaf, region=region
        )
        return replace(found, on_right=number == 1)

    # ---- ops -------------------------------------------------------------------------------------------

    def _constant(self, left: int, right: int) -> int:
        """Row of the constant factory, or of the view of equal tensors, behind two values; -1 if there is none."""
        compared, tokens = self._case.compared, self._case.left.contents.tokens
        while (row := compared.made_by_one_pair(left, right)) >= 0:
            op = int(self._case.pairing.left[row])
            if compared.constants[row]:
                return row
            if not tokens.view[op]:
                return -1
            sources = (
                int(self._case.left.trace.ops.inputs[op][0]),
                int(self._case.right.trace.ops.inputs[int(self._case.pairing.right[row])][0]),
            )
            if self._equal(*sources):
                return row
            if sources == (left, right):
                return -1
            left, right = sources
        return -1

    def _factory(self, left: int, right: int, row: int, seen: _Seen) -> Origin:
        """A constant that the program makes differs: judged at its first use, with the constant's arguments."""
        pairing = self._case.pairing
        made = int(pairing.left[row]), int(pairing.right[row])
        settings = self._case.settings(*made)
        found = self._origin(
            "op",
            "factory",
            left,
            right,
            seen,
            region=Region(Sides((made[0],), (made[1],)), Sides((), ())),
        )
        return replace(found, settings=settings)

    def _placed(self, states: tuple[int, int], left: int, right: int, seen: _Seen) -> Origin | None:
        """The same op wrote the same content into another part of a larger tensor."""
        case = self._case
        a, b = states
        found: tuple[int, int] | None = None
        targets = (-1, -1)
        for _ in range(_LOOK_BACK):
            writers = self._writers((a, b))
            if writers[0] < 0 or int(case.pairing.right_of[writers[0]]) != writers[1]:
                break
            if writers[0] in self._ops.left:
                return None
            into = self._target(case.left, writers[0], a), self._target(case.right, writers[1], b)
            if min(into) >= 0 and self._lies(case.left, into[0]) != self._lies(case.right, into[1]):
                found, targets = writers, into
            a = int(case.left.contents.states.before[a])
            b = int(case.right.contents.states.before[b])
            if a < 0 or b < 0:
                break
        if found is None:
            return None
        views = (
            _view_before(case.left, found[0], targets[0]),
            _view_before(case.right, found[1], targets[1]),
        )
        region = Region(Sides((found[0],), (found[1],)), Sides((), ()))
        origin = self._origin("op", "placed", left, right, seen, region=region, op=Sides(*found))
        return replace(origin, settings=case.settings(*views) if min(views) >= 0 else ())

    @staticmethod
    def _lies(side: Side, value: int) -> tuple[int, tuple[int, ...]]:
        """Where a value lies in its storage, and how large it is."""
        return int(side.trace.values.offset[value]), side.trace.meta(value).shape

    def _target(self, side: Side, writer: int, state: int) -> int:
        """What an op was given to write into: its input in the state before; -1 if it made the storage."""
        before = int(side.contents.states.before[state])
        for value in side.trace.ops.inputs[writer].tolist():
            if before >= 0 and int(side.contents.states.of[value]) == before:
                return int(value)
        return -1

    def _written(self, left: int, right: int, seen: _Seen) -> Origin | None:
        """One run wrote once more into a tensor that the other only reads."""
        case = self._case
        for number in (0, 1):
            side, value = ((case.left, left), (case.right, right))[number]
            contents = side.contents
            state = int(contents.states.of[value])
            later: list[int] = []
            for _ in range(_LOOK_BACK):
                writer = int(contents.states.writer[state])
                earlier = int(contents.states.before[state])
                if writer < 0 or earlier < 0:
                    break
                if puts_together(side.name(writer)):
                    break  # what the parts of all ranks are now, not what it was and something more
                if writer in side.regions.at and (
                    contents.value_of_state(state) not in side.regions.written(writer)
                ):
                    break  # a region handed it over: what it made, not what it was given
                later.append(writer)
                state = earlier
                if self._same_before(number, state, left, right):
                    first = later[-1]
                    return self._write_origin(number, first, left, right, seen)
        return None

    def _same_before(self, number: int, state: int, left: int, right: int) -> bool:
        """Whether a run's tensor was, at an earlier state, what the other run reads."""
        case = self._case
        if number == 0:
            early, other = case.left.contents.value_of_state(state), right
            pair = (early, other)
        else:
            early, other = case.right.contents.value_of_state(state), left
            pair = (other, early)
        if case.compared.made_by_one_pair(*pair) >= 0:
            return True
        if self._writers(self._states(*pair)) == (-1, -1) and self._equal(*pair):
            return True  # a tensor from before the run, whatever it is called
        # what was gathered has the name of its parameter, whatever an optimizer had made of it until then
        names = [_names_held(s, v) for s, v in zip((case.left, case.right), pair, strict=True)]
        return bool(names[0] & names[1])

    def _write_origin(
        self, number: int, writer: int, left: int, right: int, seen: _Seen
    ) -> Origin | None:
        if writer in (self._ops.left, self._ops.right)[number]:
            return None
        case = self._case
        partner = int((case.pairing.right_of, case.pairing.left_of)[number][writer])
        other = partner if partner >= 0 else None
        ops = Sides(writer, other) if number == 0 else Sides(other, writer)
        region = Region(
            Sides((writer,), ()) if number == 0 else Sides((), (writer,)), Sides((), ())
        )
        kind: DivergenceKind = "op" if other is not None else "structure"
        found = self._origin(
            kind,
            "written",
            left,
            right,
            seen,
            region=region,
            op=ops,
            leaf=self._storage_names(left, right),
        )
        if seen.row < 0:
            # nothing reads it but the end of the run: what changes the results on the way comes first
            found = replace(found, order=found.order + len(case.left.trace.ops))
        return replace(found, on_right=number == 1)

    def _storage_names(self, left: int, right: int) -> Sides[Leaf | None]:
        """The leaves that the storages of two values were called, whatever was written into them since."""
        return Sides(
            self._case.left.leaves.of_storage(left), self._case.right.leaves.of_storage(right)
        )

    def _region(self, left: int, right: int, seen: _Seen) -> Origin | None:
        """The runs made the values in different ways."""
        case = self._case
        gathered = gathered_parameter(case, left, right)
        behind = region_of(case, left, right, since_agreed=gathered is not None)
        region = unseen_results(case, behind, left, right)
        shared = self._told(region)
        if any(shared) and (all(shared) or gathered is not None or self._gathers(region)):
            return None
        limit = order_of(case, seen.consumer)
        if any(self._tainted(case.left, 0, v, limit) for v in region.boundary.left):
            return None
        if any(self._tainted(case.right, 1, v, limit) for v in region.boundary.right):
            return None
        if region.empty:
            if self._differed_before(left, right, limit):
                return None
            return self._origin("structure", "other-source", left, right, seen, region=region)
        if gathered is not None:
            return self._origin(
                "structure", "gathered", left, right, seen, leaf=gathered, region=region
            )
        nonfinite = case.left.nonfinite(left) != case.right.nonfinite(right)
        stands = representative(case, region, seen.consumer, nonfinite=nonfinite)
        found = self._origin("structure", "region", left, right, seen, region=region, op=stands)
        # of a product and a sum in one op and their steps in the other run, the one op is shown
        shown = stands.left is not None and is_sum(case.left, stands.left)
        other = stands.right is not None and is_sum(case.right, stands.right)
        if any(shared) and not size_of(case, found, None).material:
            return None  # one packed product for three: the first of them tells of the rest
        return replace(found, on_right=stands.left is not None and other and not shown)

    def _gathers(self, region: Region) -> bool:
        """Whether a run gathers parameters in a region: one gather brings many, and which of them differ is told at each."""
        return any(
            puts_together(side.name(op))
            for side, ops in (
                (self._case.left, region.ops.left),
                (self._case.right, region.ops.right),
            )
            for op in ops
        )

    def _told(self, region: Region) -> list[bool]:
        """Per side that has ops of its own: whether one of those that compute stands for something reported."""
        found = []
        for side, known, ops in (
            (self._case.left, self._ops.left, region.ops.left),
            (self._case.right, self._ops.right, region.ops.right),
        ):
            own = [op for op in ops if computes(side, op)] or ops
            if own:
                found.append(not known.isdisjoint(own))
        return found

    def _differed_before(self, left: int, right: int, limit: float) -> bool:
        """Whether the same op wrote a part of both, equal on both sides, and the rest is known to differ."""
        case = self._case
        a, b = self._states(left, right)
        for _ in range(_LOOK_BACK):
            writers = self._writers((a, b))
            if writers[0] < 0 or int(case.pairing.right_of[writers[0]]) != writers[1]:
                return False
            a = int(case.left.contents.states.before[a])
            b = int(case.right.contents.states.before[b])
            if a < 0 or b < 0:
                return False
            values = case.left.contents.value_of_state(a), case.right.contents.value_of_state(b)
            if self._tainted(case.left, 0, values[0], limit) and self._tainted(
                case.right, 1, values[1], limit
            ):
                return True
        return False

    def _tainted(self, side: Side, number: int, value: int, limit: float) -> bool:
        """Whether a value at the edge of a region differs already, for a reason found before."""
        case = self._case
        contents = side.contents
        state = int(contents.states.of[value])
        known = (self._leaf_states.left, self._leaf_states.right)[number]
        if state in known:
            return True
        for op in (int(contents.producer[value]), int(contents.states.writer[state])):
            if op < 0:
                continue
            rows = (case.compared.row_of_left, case.compared.row_of_right)[number]
            row = int(rows[op])
            if row >= 0 and case.compared.tainted[row] and float(case.pairing.left[row]) < limit:
                return True
            if op in (self._ops.left, self._ops.right)[number]:
                return True
        return False

    # ---- helpers ---------------------------------------------------------------------------------------

    def _origin(
        self,
        kind: DivergenceKind,
        story: Story,
        left: int,
        right: int,
        seen: _Seen,
        *,
        leaf: Sides[Leaf | None] = NO_LEAF,
        region: Region | None = None,
        op: Sides[int | None] | None = None,
    ) -> Origin:
        stands = op or seen.consumer
        order = order_of(self._case, stands)
        if stands.left is None and seen.consumer.left is not None:
            order = min(order, seen.consumer.left - 0.5)
        return Origin(
            kind=kind,
            story=story,
            op=stands,
            row=seen.row,
            values=Sides(left, right),
            slot=seen.position,
            order=order,
            leaf=leaf,
            region=region.ops if region else Sides((), ()),
            boundary=region.boundary if region else Sides((), ()),
            inputs_match=False,
        )

    def _consumer(self, row: int) -> Sides[int | None]:
        if row < 0:
            return Sides(None, None)
        pairing = self._case.pairing
        return Sides(int(pairing.left[row]), int(pairing.right[row]))

    def _module(self, seen: _Seen) -> str:
        return "" if seen.consumer.left is None else self._case.left.module(seen.consumer.left)

    def _states(self, left: int, right: int) -> tuple[int, int]:
        return (
            int(self._case.left.contents.states.of[left]),
            int(self._case.right.contents.states.of[right]),
        )

    def _writers(self, states: tuple[int, int]) -> tuple[int, int]:
        return (
            int(self._case.left.contents.states.writer[states[0]]),
            int(self._case.right.contents.states.writer[states[1]]),
        )

    def _equal(self, left: int, right: int) -> bool:
        status = self._case.compared.status(np.array([left]), np.array([right]))
        return int(status[0]) == EQUAL


def _names_held(side: Side, value: int) -> set[str]:
    """What a value is called, but for what was gathered, and what was put in the place of a parameter."""
    rows = side.leaves.of(value)
    if int(side.contents.states.of[value]) in side.replaced:
        return set()
    gathered = {leaf.name for leaf in rows if leaf.when == "gather"}
    return {leaf.name for leaf in rows} - gathered - {""}


def _view_before(side: Side, op: int, value: int) -> int:
    """The last op before another that returned a value as a view; -1 if there is none close by."""
    for index in range(op - 1, max(op - _LOOK_BACK, -1), -1):
        if side.contents.tokens.view[index] and value in side.trace.ops.outputs[index]:
            return index
    return -1


class _Seen:
    """Where two values were seen to differ: the pair that reads them."""

    __slots__ = ("consumer", "position", "row")

    def __init__(self, row: int, position: int | None, consumer: Sides[int | None]) -> None:
        self.row = row
        self.position = position
        self.consumer = consumer


def _named(rows: tuple[list[Leaf], list[Leaf]], name: str) -> Sides[Leaf | None]:
    return Sides(
        next(leaf for leaf in rows[0] if leaf.name == name),
        next(leaf for leaf in rows[1] if leaf.name == name),
    )
