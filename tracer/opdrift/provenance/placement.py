"""Which bytes of which storage a value is, and where a copied part of it was copied from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from opdrift.provenance.ops import CONCATENATIONS, GATHERS, SOURCE_POSITION, operator
from opdrift.records import TensorMeta
from opdrift.tracefile.reader import Trace

#: Bytes of an element, by dtype as torch writes it.
_BYTES: Final = {
    "float64": 8, "int64": 8, "uint64": 8, "complex64": 8, "complex128": 16,
    "float32": 4, "int32": 4, "uint32": 4, "complex32": 4, "qint32": 4,
    "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2,
}  # fmt: skip

#: Views of views that are followed to the tensor that they are parts of.
_DEEPEST_VIEW: Final = 16


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a storage at a write count, in bytes; `size` is less than the span if it has holes.

    `shift` is set on the way back from a gather, for a part that another rank contributed: this rank's
    part at the same position, and how many elements further the other's lies in what both were cut from.
    """

    storage: int
    write: int
    start: int
    end: int
    size: int
    shift: int = 0

    @property
    def is_dense(self) -> bool:
        """Whether it has no holes."""
        return self.size == self.end - self.start

    def overlap(self, written: Place) -> int:
        """How many of this place's bytes another one covers; of a place with holes, at most its size."""
        span = min(self.end, written.end) - max(self.start, written.start)
        return max(min(span, written.size, self.size), 0)


class Placement:
    """Places of the values of one trace, and how copying ops map one onto another."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._places: dict[int, Place] = {}

    def of(self, value: int) -> Place:
        """Where a value's content lies."""
        found = self._places.get(value)
        if found is None:
            found = self._places[value] = self._placed(value)
        return found

    def _placed(self, value: int) -> Place:
        values, meta = self._trace.values, self._trace.meta(value)
        width = element_bytes(meta.dtype)
        start = int(values.offset[value]) * width
        elements = math.prod(meta.shape)
        last = -1
        if elements:
            last = sum((n - 1) * s for n, s in zip(meta.shape, meta.stride, strict=False))
        end = start + (last + 1) * width
        size = min(elements * width, end - start)
        return Place(int(values.storage[value]), int(values.write[value]), start, end, size)

    def source(self, index: int, written: int, place: Place) -> int | None:
        """The input that the part `place` of what a copying op wrote was copied from; None if it has none."""
        name, inputs = self._name(index), self._inputs(index)
        if not inputs:
            return None
        if name in CONCATENATIONS:
            return inputs[self._operand(index, written, place)]
        if name == "_foreach_copy":
            outputs = [int(v) for v in self._trace.ops.outputs[index]]
            return inputs[min(len(inputs) // 2 + outputs.index(written), len(inputs) - 1)]
        position = SOURCE_POSITION.get(name, 0)
        return inputs[position if position < len(inputs) else 0]

    def mapped(self, index: int, place: Place, written: int, source: int) -> Place:
        """Where the content of a part of what an op wrote lies in what it was made from.

        By position where both are in row-major order and the sizes allow it, else the whole source.
        """
        target, whole = self.of(written), self.of(source)
        meta, origin = self._trace.meta(written), self._trace.meta(source)
        if not (is_contiguous(meta) and is_contiguous(origin)):
            return whole
        old, new = element_bytes(meta.dtype), element_bytes(origin.dtype)
        first = max(place.start - target.start, 0) // old
        count = max(min(place.end, target.end) - max(place.start, target.start), 0) // old
        available = max(math.prod(origin.shape), 1)
        shift = place.shift
        name = self._name(index)
        if name in CONCATENATIONS:
            before = self._elements_before(index, written, source, first)
            if before is None:
                return whole
            first -= before
        elif name in GATHERS:
            slot, first, count = _largest_part(first, count, available)
            shift = (slot - self._rank(math.prod(meta.shape) // available)) * available
        elif name == "split_with_sizes_copy":
            first, count = self._in_split(index, written, source, (first, count))
        elif math.prod(meta.shape) != available and not self._pads_behind(index):
            return whole
        if first < 0 or first + count > available:
            return whole
        start = whole.start + first * new
        size = min(place.size // old, count) * new
        found = replace(whole, start=start, end=start + count * new, size=size, shift=shift)
        return self._shifted(source, found, new) if shift else found

    # ---- gathers -----------------------------------------------------------------------------------

    def _rank(self, world: int) -> int:
        """This process's part of a gather: its rank among the `world` that take part."""
        return (self._trace.header.rank or 0) % max(world, 1)

    def _pads_behind(self, index: int) -> bool:
        """Whether an op only adds elements behind the last one, as FSDP does to cut evenly."""
        if self._name(index) != "constant_pad_nd":
            return False
        signature = self._trace.signature(int(self._trace.ops.signature[index]))
        pad = dict(signature.arguments).get("pad")
        return isinstance(pad, tuple) and len(pad) == 2 and pad[0] == 0

    def _shifted(self, source: int, place: Place, width: int) -> Place:
        """Another rank's part in what this rank's was cut from, once the way back has come to that.

        All ranks run one program, so the whole that each cuts its part from came to be in the same way.
        """
        whole = self.of(source)
        for _ in range(_DEEPEST_VIEW):
            producer = int(self._trace.producer[source])
            if producer < 0 or not self._inputs(producer):
                break
            source = self._inputs(producer)[0]
            if self.of(source).storage != place.storage:
                break
            whole = max(whole, self.of(source), key=lambda p: p.end - p.start)
        start, end = (at + place.shift * width for at in (place.start, place.end))
        if start < whole.start or end > whole.end:
            return place
        return replace(place, start=start, end=end, shift=0)

    def _in_split(
        self, index: int, written: int, source: int, part: tuple[int, int]
    ) -> tuple[int, int]:
        """Where a stretch of one output of a split lies in what was split: (start, length) in elements.

        FSDP2 splits what it gathered along dim 1, with a row from each rank; of several rows it is this rank's.
        """
        own, whole = self._trace.meta(written).shape, self._trace.meta(source).shape
        dim = self._dim(index, len(own))
        outputs = list(dict.fromkeys(self._trace.ops.outputs[index].tolist()))
        before = sum(self._trace.meta(v).shape[dim] for v in outputs[: outputs.index(written)])
        length, row = math.prod(own[dim:]), math.prod(whole[dim:])
        number, first = divmod(part[0], max(length, 1))
        count = min(part[1], length - first)
        if part[1] > length:
            number, first, count = self._rank(math.prod(own[:dim])), 0, length
        return number * row + before * math.prod(own[dim + 1 :]) + first, count

    # ---- concatenations ----------------------------------------------------------------------------

    def _operand(self, index: int, written: int, place: Place) -> int:
        """Which operand of a concatenation made most of a place."""
        meta, target = self._trace.meta(written), self.of(written)
        sizes = self._operand_sizes(index, written)
        inner = math.prod(meta.shape[self._dim(index, len(meta.shape)) + 1 :])
        row = max(inner * sum(sizes), 1)
        width = element_bytes(meta.dtype)
        low = max(place.start - target.start, 0) // width % row
        # A place with holes is a slice along the dim: where it starts tells whose it is.
        count = max(place.end - place.start, 0) // width if place.is_dense else 1
        best, most, begin = 0, -1, 0
        for number, size in enumerate(sizes):
            end = begin + size * inner
            covered = end - begin if count >= row else min(low + count, end) - max(low, begin)
            if covered > most:
                best, most = number, covered
            begin = end
        return best

    def _operand_sizes(self, index: int, written: int) -> list[int]:
        """How much each operand takes of the concatenated dim; operands of a stack take one."""
        inputs = self._inputs(index)
        if self._name(index) == "stack":
            return [1] * len(inputs)
        dims = len(self._trace.meta(written).shape)
        dim = self._dim(index, dims)
        shapes = [self._trace.meta(v).shape for v in inputs]
        return [shape[dim] if len(shape) == dims else 0 for shape in shapes]

    def _elements_before(self, index: int, written: int, source: int, first: int) -> int | None:
        """How many elements of a concatenation lie before an operand; None if its rows are interleaved."""
        shape = self._trace.meta(written).shape
        dim = self._dim(index, len(shape))
        if math.prod(shape[:dim]) != 1:
            return None
        inner = math.prod(shape[dim + 1 :])
        before = 0
        sizes = self._operand_sizes(index, written)
        for value, size in zip(self._inputs(index), sizes, strict=True):
            if value == source and before + size * inner > first:
                break  # an operand may be given twice
            before += size * inner
        return before

    def _dim(self, index: int, dims: int) -> int:
        signature = self._trace.signature(int(self._trace.ops.signature[index]))
        dim = dict(signature.arguments).get("dim", 0)
        return dim % max(dims, 1) if isinstance(dim, int) else 0

    def _name(self, index: int) -> str:
        return operator(self._trace.op_info(int(self._trace.ops.signature[index])).name)

    def _inputs(self, index: int) -> list[int]:
        return [int(v) for v in self._trace.ops.inputs[index]]


def _largest_part(first: int, count: int, part: int) -> tuple[int, int, int]:
    """Of a stretch of a gathered tensor, what lies in one rank's part: (rank's number, start in it, length)."""
    slot, start = divmod(first, part)
    here = min(count, part - start)
    if 2 * here >= count:
        return slot, start, here
    return slot + 1, 0, min(count - here, part)


def element_bytes(dtype: str) -> int:
    """Bytes of an element of a dtype; types that are not listed have one."""
    return _BYTES.get(dtype, 1)


def is_contiguous(meta: TensorMeta) -> bool:
    """Whether a layout is dense and in row-major order."""
    expected = 1
    for n, stride in zip(reversed(meta.shape), reversed(meta.stride), strict=False):
        if n != 1 and stride != expected:
            return False
        expected *= n
    return True
