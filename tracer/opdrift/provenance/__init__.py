"""Where a content came from: drawn at random, filled, copied from a leaf, computed, never written.

A value is (storage, write count, part of the storage); the op that brought the storage to that count
is its last writer. From there the walk goes back through copies, casts and concatenations, by position,
to the first writer or the leaf. It is a loop with a memory, so long chains cost time but no stack.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import numpy as np

from opdrift.flow import is_collective
from opdrift.provenance.ops import (
    COPIES,
    DRAWS,
    FILLS,
    INITIALISING,
    QUANTISERS,
    REBINDING,
    operator,
    short_name,
)
from opdrift.provenance.placement import Place, Placement
from opdrift.records import Mark, Op, OpInfo
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace

Kind = Literal["drawn", "filled", "copied", "computed", "leaf", "uninitialised", "hidden"]

#: Ops that one walk follows, writes of one storage that it looks back through, ops with several inputs
#: that it looks behind, names that it keeps.
FOLLOW_LIMIT: Final = 200_000
LOOK_BACK_LIMIT: Final = 4_096
ORIGIN_LIMIT: Final = 256
CHAIN_LENGTH: Final = 64
#: torch's own first seed is a random 64-bit number; people choose small ones.
_CHOSEN_SEED: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class Provenance:
    """How a content came to be.

    Attributes:
        kind: "drawn" from a generator, "filled" with a constant, "copied" from a leaf, "computed" from
            several tensors, a "leaf" (existed before recording, or came past the dispatcher, and was
            never written), "uninitialised" memory, or "hidden": it changed with no op that wrote it.
        op: The op that wrote it last; None if no recorded op did.
        seq: That op's number.
        source: That op's line in the program.
        first_op: The op at the other end of the chain, such as `aten.uniform_.default`.
        first_seq: That op's number.
        chain: Names of the writers from the last to the first (at most `CHAIN_LENGTH`).
        casts: dtypes on the way, from the value's own to the first; one if nothing was cast.
        quantised: A rounding or quantising op is on the way.
        partial: Ops that later overwrote a smaller part of it.
        root: The value at the other end of the chain: the leaf, or what the first writer wrote.
        root_name: The leaf's name, if the root is a named leaf.
        generator: What the first writer was given as generator, if anything.
        seed: Of a drawn content: the seed of the default generator at the draw; None where another
            generator was given, or where the trace does not say.
        rng: Of a drawn content: digest of the generator's state before the draw.
    """

    kind: Kind
    op: str | None
    seq: int | None
    source: str | None
    first_op: str | None
    first_seq: int | None
    chain: tuple[str, ...]
    casts: tuple[str, ...]
    quantised: bool
    partial: tuple[str, ...]
    root: int
    root_name: str | None
    generator: str | None
    seed: int | None
    rng: int

    @property
    def seeded(self) -> bool | None:
        """Whether someone chose the seed: torch's own is a random 64-bit number, people's are below 2**32."""
        return None if self.seed is None else self.seed < _CHOSEN_SEED


@dataclass(frozen=True, slots=True)
class _Step:
    """One writer: what it did, and where its content came from, if it only passed it on."""

    kind: Kind
    index: int | None
    root: int
    dtype: str | None
    next: Place | None = None
    partial: tuple[str, ...] = ()


class Lineage:
    """Answers where values of one trace came from; keeps what it finds, so ask one for many values."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._places = Placement(trace)
        self._steps: dict[Place, _Step] = {}

    def of(self, value: int) -> Provenance:
        """How the content of a value came to be."""
        steps = self._walk(self._places.of(value))
        end = steps[-1]
        if end.kind == "computed" and end.index is not None:
            steps += self._common_origin(end.index)
        return self._summary(value, self._trace.meta(value).dtype, steps)

    def passes(self, value: int) -> frozenset[int]:
        """The storages that a content was copied through, its own included."""
        place: Place | None = self._places.of(value)
        found: set[Place] = set()
        while place is not None and place not in found and len(found) < FOLLOW_LIMIT:
            found.add(place)
            self._walk(place)
            place = self._steps[place].next
        return frozenset(each.storage for each in found)

    def _walk(self, place: Place) -> list[_Step]:
        """From the last writer back, as long as each took its content from one place."""
        steps: list[_Step] = []
        seen: set[Place] = set()
        while len(steps) < FOLLOW_LIMIT and place not in seen:
            seen.add(place)
            step = self._steps.get(place)
            if step is None:
                step = self._steps[place] = self._step(place)
            steps.append(step)
            if step.next is None:
                break
            place = step.next
        return steps

    def _common_origin(self, index: int) -> list[_Step]:
        """Steps to a draw or fill, if an op made a content of nothing else; empty if it was computed.

        Some initialisers make it of several tensors: rejection of outliers, QR of a draw. A product, a mean or a
        gradient of draws is none.
        """
        found: list[_Step] = []
        waiting, seen = [index], {index}
        while waiting:
            index = waiting.pop()
            if len(seen) > ORIGIN_LIMIT or not self._initialises(index):
                return []
            for value in self._trace.ops.inputs[index].tolist():
                steps = self._walk(self._places.of(value))
                end = steps[-1]
                if end.kind == "computed" and end.index is not None:
                    if end.index not in seen:
                        seen.add(end.index)
                        waiting.append(end.index)
                elif end.kind == "drawn":
                    found = steps
                elif end.kind == "filled":
                    found = found or steps
                elif end.kind != "uninitialised" and not self._is_number(end):
                    return []
        return found

    def _initialises(self, index: int) -> bool:
        """Whether an op is of the kinds that initialisers and quantisers make contents with."""
        info = self._info(index)
        return info.pointwise or operator(info.name) in INITIALISING | QUANTISERS

    def _is_number(self, end: _Step) -> bool:
        """Whether a leaf is a constant of one element: torch wraps Python numbers in such tensors."""
        return end.kind == "leaf" and self._trace.meta(end.root).shape == ()

    # ---- one step back -----------------------------------------------------------------------------

    def _step(self, place: Place) -> _Step:
        unwritten, index, written, partial = self._last_writer(place)
        if index is None:
            return _Step(unwritten, None, self._value_at(place), None, None, partial)
        kind, source = self._kind(index), None
        if kind == "copied":
            source = self._places.source(index, written, place)
        elif kind == "computed":
            source = self._only_input(index, written)
        following = None
        if source is not None:
            following = self._places.mapped(index, place, written, source)
        return _Step(kind, index, written, self._trace.meta(written).dtype, following, partial)

    def _info(self, index: int) -> OpInfo:
        return self._trace.op_info(int(self._trace.ops.signature[index]))

    def _kind(self, index: int) -> Kind:
        info = self._info(index)
        name = operator(info.name)
        if info.uninitialised:
            return "uninitialised"
        if name in DRAWS:
            return "drawn"
        if name in FILLS:
            return "filled"
        return "copied" if name in COPIES else "computed"

    def _only_input(self, index: int, written: int) -> int | None:
        """The tensor that an op like `mul_(x, 0.5)` works on, if it is the only one."""
        if is_collective(self._info(index).name):
            return None  # what it reads here is what it overwrites with another rank's
        inputs = [int(v) for v in self._trace.ops.inputs[index]]
        if not inputs or not (
            self._info(index).pointwise if len(inputs) > 1 else self._initialises(index)
        ):
            return None
        first = self._places.of(inputs[0])
        if first == self._places.of(written) or any(self._places.of(v) != first for v in inputs):
            return None
        return inputs[0]

    def _last_writer(self, place: Place) -> tuple[Kind, int | None, int, tuple[str, ...]]:
        """The op that wrote most of a place, looking back through writes of other parts of its storage.

        Returns what it is if no op wrote it, else the op's index and the value that it wrote; and the
        names of later, smaller writes.
        """
        remaining = place.size
        best: tuple[int, int, int] | None = None  # bytes, op, value
        smaller: list[int] = []
        first, write = self._first_write(place.storage), place.write
        for _ in range(LOOK_BACK_LIMIT):
            index = self._writer(place.storage, write)
            if index is not None:
                value, covered = self._covered(index, place, write)
                covered = max(remaining, 0) if write == first else min(covered, remaining)
                if covered > (best[0] if best else 0) or not place.size:
                    smaller += [best[1]] if best else []
                    best = covered, index, value
                elif covered > 0:
                    smaller.append(index)
                remaining -= covered
            elif write > first and self._changed_unseen(place.storage, write):
                return "hidden", None, 0, ()
            if remaining <= 0 or write <= first:
                break
            write -= 1
        if best is None or remaining > best[0]:
            smaller += [best[1]] if best else []
            return "leaf", None, 0, self._short_names(smaller)
        later = [index for index in smaller if index > best[1]]
        return "computed", best[1], best[2], self._short_names(later)

    def _short_names(self, indices: list[int]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(short_name(self._info(i).name) for i in indices))

    def _covered(self, index: int, place: Place, write: int) -> tuple[int, int]:
        """Which of an op's outputs covers most of a place at a write count, and how many of its bytes."""
        best, most = 0, 0
        for value in self._trace.ops.outputs[index].tolist():
            written = self._places.of(value)
            if written.storage == place.storage and written.write == write:
                covered = place.overlap(written)
                if covered > most or not best:
                    best, most = value, covered
        return best, most

    def _changed_unseen(self, storage: int, write: int) -> bool:
        """Whether a storage's content at a write count without a writer is another than before it.

        The recorder counts on when a leaf may have changed behind the dispatcher's back; the
        fingerprints tell whether it did.
        """
        before, after = (self._contents(storage, w) for w in (write - 1, write))
        return any(before[layout] != key for layout, key in after.items() if layout in before)

    def _contents(self, storage: int, write: int) -> dict[tuple[int, int], tuple[int, int, int]]:
        """(offset, layout) -> fingerprint key of the values of a storage at a write count."""
        values = self._trace.values
        found = {}
        for value in self._values_of(storage, write):
            fingerprint = self._trace.fingerprint(value)
            if fingerprint is not None:
                layout = int(values.offset[value]), int(values.meta[value])
                found[layout] = fingerprint.key
        return found

    def _value_at(self, place: Place) -> int:
        """The first value that was seen of a storage at its oldest write count, for a leaf."""
        found = self._values_of(place.storage, self._first_write(place.storage))
        return found[0] if found else 0

    # ---- indexes ---------------------------------------------------------------------------------

    @cached_property
    def _keys(self) -> Ints:
        """(storage, write count) of each value as one number."""
        values = self._trace.values
        return values.storage << 32 | values.write

    @cached_property
    def _by_key(self) -> tuple[Ints, Ints]:
        """Value ids in the order of their keys, and the keys."""
        order = np.argsort(self._keys, kind="stable")
        return order, self._keys[order]

    def _values_of(self, storage: int, write: int) -> list[int]:
        order, keys = self._by_key
        key = storage << 32 | write
        start, end = np.searchsorted(keys, [key, key + 1])
        return [int(v) for v in order[start:end] if v > 0]

    def _first_write(self, storage: int) -> int:
        order, keys = self._by_key
        start = int(np.searchsorted(keys, storage << 32))
        return int(self._trace.values.write[order[start]])

    @cached_property
    def _writers(self) -> tuple[Ints, Ints]:
        """Sorted keys that an op wrote, and the first op that did.

        An op whose input already has the key returned an alias of it (a view) and wrote nothing.
        """
        ops = self._trace.ops
        writes = np.ones(len(ops), np.bool_)
        for signature in np.unique(ops.signature).tolist():
            if operator(self._trace.op_info(signature).name) in REBINDING:
                writes[ops.signature == signature] = False
        rows, keys = ops.outputs.rows(), self._keys[ops.outputs.values]
        known, ids = np.unique(
            np.concatenate([keys, self._keys[ops.inputs.values]]), return_inverse=True
        )
        size = max(len(known), 1)
        output_pairs = rows * size + ids[: len(keys)]
        input_pairs = ops.inputs.rows() * size + ids[len(keys) :]
        written = writes[rows] & ~np.isin(output_pairs, input_pairs)
        found, first = np.unique(keys[written], return_index=True)
        return found, rows[written][first]

    def _writer(self, storage: int, write: int) -> int | None:
        keys, ops = self._writers
        key = storage << 32 | write
        at = int(np.searchsorted(keys, key))
        return int(ops[at]) if at < len(keys) and keys[at] == key else None

    @cached_property
    def _leaf_names(self) -> dict[int, str]:
        """Storage -> name of the leaf that it held at its first write count."""
        found: dict[int, str] = {}
        storage = self._trace.values.storage
        for leaf in self._trace.leaves:
            if leaf.name and leaf.kind in ("parameter", "buffer", "input", "constant"):
                found.setdefault(int(storage[leaf.value]), leaf.name)
        return found

    def _leaf_name(self, value: int) -> str | None:
        return self._leaf_names.get(int(self._trace.values.storage[value]))

    # ---- the answer --------------------------------------------------------------------------------

    def _summary(self, value: int, dtype: str, steps: list[_Step]) -> Provenance:
        indices = [step.index for step in steps if step.index is not None]
        last = self._trace.op(indices[0]) if indices else None
        first = self._trace.op(indices[-1]) if indices else None
        names = [self._info(i).name for i in _ends(indices)]
        kind = self._final_kind(steps)
        drawn = first if kind == "drawn" else None
        root = steps[-1].root or value
        return Provenance(
            kind=kind,
            op=last.name if last else None,
            seq=last.seq if last else None,
            source=str(last.source) if last and last.source else None,
            first_op=first.name if first else None,
            first_seq=first.seq if first else None,
            chain=tuple(names),
            casts=self._casts(dtype, steps, root),
            quantised=any(operator(name) in QUANTISERS for name in names),
            partial=tuple(dict.fromkeys(name for step in steps for name in step.partial)),
            root=root,
            root_name=self._leaf_name(root) if steps[-1].kind == "leaf" else None,
            generator=_generator(drawn),
            seed=None if drawn is None else self._seed(drawn),
            rng=drawn.rng if drawn else 0,
        )

    def _final_kind(self, steps: list[_Step]) -> Kind:
        """What the end of the chain says: a copy of a draw is drawn, a scaled leaf is computed."""
        end = steps[-1].kind
        if end != "leaf" or len(steps) == 1:
            return end
        return "computed" if any(step.kind == "computed" for step in steps) else "copied"

    def _casts(self, dtype: str, steps: list[_Step], root: int) -> tuple[str, ...]:
        seen = [dtype, *(step.dtype for step in steps if step.dtype), self._trace.meta(root).dtype]
        return tuple(
            name for i, name in enumerate(seen) if name and (i == 0 or name != seen[i - 1])
        )

    @cached_property
    def _seed_marks(self) -> list[Mark]:
        """When the program seeded a default generator, last first."""
        return [mark for mark in reversed(self._trace.marks) if mark.kind == "seed"]

    def _seed(self, op: Op) -> int | None:
        """The seed of the default generator that an op drew from: at the start, or as set since."""
        if _generator(op) is not None:
            return None
        device = self._trace.meta(op.outputs[0]).device if op.outputs else "cpu"
        for mark in self._seed_marks:
            if mark.seq <= op.seq and mark.fields["device"] == device:
                return int(mark.fields["seed"])
        text = self._trace.header.flags.get(f"seed.{device}")
        if not isinstance(text, str) or not text.startswith("seed "):
            return None
        return int(text[5:].split(",")[0])


def _ends(indices: list[int]) -> list[int]:
    """A chain cut to its newest writers and the first one."""
    if len(indices) <= CHAIN_LENGTH:
        return indices
    return [*indices[: CHAIN_LENGTH - 1], indices[-1]]


def _generator(op: Op | None) -> str | None:
    given = dict(op.signature.arguments).get("generator") if op else None
    return None if given is None else str(given)
