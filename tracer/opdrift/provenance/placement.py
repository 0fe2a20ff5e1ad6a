"""Which bytes of which storage a value is, and where a copied part of it was copied from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from opdrift.provenance.ops import CONCATENATIONS, GATHERS, SOURCE_POSITION, operator
from opdrift.records import Op, TensorMeta
from opdrift.tracefile.reader import Trace

#: Bytes of an element, by dtype as torch writes it.
_BYTES: Final = {
    "float64": 8, "int64": 8, "uint64": 8, "complex64": 8, "complex128": 16,
    "float32": 4, "int32": 4, "uint32": 4, "complex32": 4, "qint32": 4,
    "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a storage at a write count, in bytes; `size` is less than the span if it has holes."""

    storage: int
    write: int
    start: int
    end: int
    size: int

    def at(self, write: int) -> Place:
        """The same part at another write count."""
        return replace(self, write=write)

    def overlap(self, written: Place) -> int:
        """How many of this place's bytes another one covers; of a place with holes, at most its size."""
        span = min(self.end, written.end) - max(self.start, written.start)
        return max(min(span, written.size, self.size), 0)


def place_of(trace: Trace, value: int) -> Place:
    """Where a value's content lies."""
    values, meta = trace.values, trace.meta(value)
    width = element_bytes(meta.dtype)
    start = int(values.offset[value]) * width
    elements = math.prod(meta.shape)
    last = (
        sum((n - 1) * s for n, s in zip(meta.shape, meta.stride, strict=False)) if elements else -1
    )
    end = start + (last + 1) * width
    size = min(elements * width, end - start)
    return Place(int(values.storage[value]), int(values.write[value]), start, end, size)


def element_bytes(dtype: str) -> int:
    """Bytes of an element of a dtype; types that are not listed have one."""
    return _BYTES.get(dtype, 1)


def source_of(trace: Trace, op: Op, written: int, place: Place) -> int | None:
    """The input that the part `place` of what a copying op wrote was copied from; None if there is none."""
    name, inputs = operator(op.name), op.inputs
    if not inputs:
        return None
    if name in CONCATENATIONS:
        return _operand(trace, op, written, place)
    if name == "_foreach_copy":
        half = len(inputs) // 2
        at = op.outputs.index(written) if written in op.outputs else 0
        return inputs[half + at] if half + at < len(inputs) else inputs[-1]
    position = SOURCE_POSITION.get(name, 0)
    if position < 0:
        return inputs[position]
    return inputs[position] if position < len(inputs) else inputs[0]


def mapped(trace: Trace, place: Place, written: int, source: int) -> Place:
    """Where the content of a part of `written` lies in what it was made from.

    By position where both are in row-major order and the sizes allow it, else the whole source.
    """
    whole = place_of(trace, source)
    target, meta, origin = place_of(trace, written), trace.meta(written), trace.meta(source)
    if not (is_contiguous(meta) and is_contiguous(origin)):
        return whole
    old, new = element_bytes(meta.dtype), element_bytes(origin.dtype)
    first = max(place.start - target.start, 0) // old
    count = max(min(place.end, target.end) - max(place.start, target.start), 0) // old
    producer = int(trace.producer[written])
    if producer >= 0:
        op = trace.op(producer)
        name = operator(op.name)
        if name in CONCATENATIONS:
            first -= _elements_before(trace, op, source, first)
        elif name in GATHERS:
            first %= max(math.prod(origin.shape), 1)  # each rank's part has the size of one input
        elif math.prod(meta.shape) != math.prod(origin.shape):
            return whole
    if first < 0 or first + count > math.prod(origin.shape):
        return whole
    start = whole.start + first * new
    return replace(
        whole, start=start, end=start + count * new, size=min(place.size // old, count) * new
    )


def is_contiguous(meta: TensorMeta) -> bool:
    """Whether a layout is dense and in row-major order."""
    expected = 1
    for n, stride in zip(reversed(meta.shape), reversed(meta.stride), strict=False):
        if n != 1 and stride != expected:
            return False
        expected *= n
    return True


def _dim(op: Op, dims: int) -> int:
    dim = dict(op.signature.arguments).get("dim", 0)
    return dim % max(dims, 1) if isinstance(dim, int) else 0


def _operand(trace: Trace, op: Op, written: int, place: Place) -> int:
    """Which operand of a concatenation made most of a place."""
    meta, target = trace.meta(written), place_of(trace, written)
    sizes = _operand_sizes(trace, op, written)
    inner = math.prod(meta.shape[_dim(op, len(meta.shape)) + 1 :]) if meta.shape else 1
    row = max(inner * sum(sizes), 1)
    width = element_bytes(meta.dtype)
    first = max(place.start - target.start, 0) // width
    count = max(place.end - place.start, 0) // width
    covers = [0] * len(sizes)
    begin = 0
    for i, size in enumerate(sizes):
        end = begin + size * inner
        low = first % row
        covers[i] = end - begin if count >= row else min(low + count, end) - max(low, begin)
        begin = end
    return op.inputs[max(range(len(sizes)), key=lambda i: covers[i])]


def _operand_sizes(trace: Trace, op: Op, written: int) -> list[int]:
    """How much each operand takes of the concatenated dim; operands of a stack take one."""
    if operator(op.name) == "stack":
        return [1] * len(op.inputs)
    dims = len(trace.meta(written).shape)
    dim = _dim(op, dims)
    shapes = [trace.meta(v).shape for v in op.inputs]
    return [shape[dim] if len(shape) == dims else 0 for shape in shapes]


def _elements_before(trace: Trace, op: Op, source: int, first: int) -> int:
    """How many elements of a concatenation along its outermost dim lie before an operand; else none fit."""
    written = op.outputs[-1]
    meta = trace.meta(written)
    dim = _dim(op, len(meta.shape))
    if math.prod(meta.shape[:dim]) != 1:
        return first + 1  # interleaved: no part of the operand is one part of the result
    inner = math.prod(meta.shape[dim + 1 :])
    before = 0
    for value, size in zip(op.inputs, _operand_sizes(trace, op, written), strict=True):
        if value == source and before + size * inner > first:
            break
        before += size * inner
    return before
