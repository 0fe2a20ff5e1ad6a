"""Rules for ops that move data: joining, indexing, repeating, padding, embedding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from opdrift.batches.arithmetic import lost_along
from opdrift.batches.calls import (
    Call,
    Operand,
    Placed,
    Shape,
    aligned,
    dim_of,
    line_up,
    moved,
)
from opdrift.tracefile.axes import BATCH, LENGTH_UNKNOWN, MIXED, UNKNOWN, Position

# ---- joining -----------------------------------------------------------------------------------------


def cat(call: Call, k: int) -> Placed:
    """What lies in other dims is kept; along the dim itself the parts must fit together."""
    shape = call.outputs[k]
    # an empty vector may be among tensors of any shape
    parts = [part for part in call.operands if part.ndim == len(shape) and 0 not in part.shape]
    dim = dim_of(call.value("dim", 0), len(shape))
    elsewhere = [p for part in parts for p in part.positions if p.dim != dim]
    for part in parts:
        line_up(call, part, shape, elsewhere)
    batch, lost = _joined_batch(parts, dim)
    lengths, cut = _joined_lengths(call, parts, dim, shape)
    return Placed((*elsewhere, *batch, *lengths), lost | cut)


def _joined_batch(parts: Sequence[Operand], dim: int) -> tuple[list[Position], int]:
    here = [[p for p in part.batch if p.dim == dim] for part in parts]
    if not any(here):
        return [], 0
    if all(len(each) == 1 for each in here):
        places = [each[0] for each in here]
        if len(places) == 1:
            return places, 0
        if len({(p.size, p.inner) for p in places}) == 1:
            return [places[0]._replace(outer=sum(p.outer for p in places))], 0
    return [], UNKNOWN


def _joined_lengths(
    call: Call, parts: Sequence[Operand], dim: int, shape: Shape
) -> tuple[list[Position], int]:
    """Padded lengths along the joined dim: a cache that grows, a token that is put in front."""
    here = [[p for p in part.lengths if p.dim == dim] for part in parts]
    if not any(here):
        return [], 0
    if len(parts) == 1:
        return here[0], 0
    sizes = {p.size for each in here for p in each}
    joined: list[tuple[int, int | None]] = []
    for part, each in zip(parts, here, strict=True):
        if len(each) > 1 or any(p.outer != 1 or p.inner != 1 for p in each):
            return [], LENGTH_UNKNOWN
        if not each and (part.shape[dim] in sizes or part.flags & LENGTH_UNKNOWN):
            return (
                [],
                LENGTH_UNKNOWN,
            )  # as long as the padded axis: it may be one that was not followed
        joined.append((part.shape[dim], each[0].axis if each else None))
    axis = call.lengths.joined(joined)
    if axis is None:
        return [], LENGTH_UNKNOWN
    return [Position(dim, 1, shape[dim], 1, axis)], 0


def stack(call: Call, k: int) -> Placed:
    """A new dim; the others move behind it."""
    dim = dim_of(call.value("dim", 0), len(call.outputs[k]))
    found = [moved(p, p.dim + (p.dim >= dim)) for part in call.operands for p in part.positions]
    return Placed(tuple(found))


def split(call: Call, k: int) -> Placed:
    """A piece of the first operand along one dim (copied, not a view)."""
    first = next(call.operands)
    dim = dim_of(call.value("dim", 0), first.ndim)
    return _without(first, [dim])


def _without(operand: Operand, dims: Iterable[int]) -> Placed:
    """What an operand carries elsewhere than in dims whose items are lost."""
    gone = set(dims)
    kept = tuple(p for p in operand.positions if p.dim not in gone)
    return Placed(kept, lost_along(operand, gone))


# ---- the same elements in another shape -----------------------------------------------------------------


def reshaped(call: Call, k: int) -> Placed:
    """A copy with the same elements in row-major order under another shape."""
    first = next(call.operands)
    found, lost = [], 0
    for p in first.positions:
        place = _regroup(p, first.shape, call.outputs[k])
        if place is None:
            lost |= UNKNOWN if p.axis == BATCH else LENGTH_UNKNOWN
        else:
            found.append(place)
    return Placed(tuple(found), lost)


def _regroup(p: Position, old: Shape, new: Shape) -> Position | None:
    stride = p.inner * math.prod(old[p.dim + 1 :])
    step = 1
    for dim in reversed(range(len(new))):
        if stride % step == 0:
            inner = stride // step
            if new[dim] % (inner * p.size) == 0:
                return Position(dim, new[dim] // (inner * p.size), p.size, inner, p.axis)
        step *= new[dim]
    return None


def repeated(call: Call, k: int) -> Placed:
    """repeat, tile: dims are laid end to end, new ones come in front."""
    first = next(call.operands)
    times = list(call.args[1])
    times = [1] * (first.ndim - len(times)) + times
    shift = len(times) - first.ndim
    return Placed(
        tuple(
            p._replace(dim=p.dim + shift, outer=p.outer * int(times[p.dim + shift]))
            for p in first.positions
        )
    )


def interleaved(call: Call, k: int) -> Placed:
    """repeat_interleave: each item of a dim is repeated, as often for each."""
    first = next(call.operands)
    times, dim = call.args[1], call.value("dim")
    if not isinstance(times, int) or dim is None:
        return _everywhere_lost(first)
    dim = dim_of(dim, first.ndim)
    return Placed(
        tuple(p._replace(inner=p.inner * times) if p.dim == dim else p for p in first.positions)
    )


def flipped(call: Call, k: int) -> Placed:
    """A padded length is turned around; a batch that is reversed is another batch."""
    first = next(call.operands)
    dims = [dim_of(d, first.ndim) for d in call.value("dims")]
    found, lost = [], 0
    for p in first.positions:
        if p.dim not in dims:
            found.append(p)
        elif p.axis == BATCH:
            lost |= UNKNOWN
        else:
            axis = call.lengths.flipped(p.axis) if p.outer == p.inner == 1 else None
            if axis is None:
                lost |= LENGTH_UNKNOWN
            else:
                found.append(p._replace(axis=axis))
    return Placed(tuple(found), lost)


def rolled(call: Call, k: int) -> Placed:
    """Items move around the end of some dims."""
    first = next(call.operands)
    dims = {dim_of(d, first.ndim) for d in call.value("dims") or range(first.ndim)}
    if call.value("dims") and any(p.dim in dims for p in first.batch):
        # each sample's place holds another one now
        found = _without(first, dims - {p.dim for p in first.batch})
        return found._replace(flags=found.flags | MIXED)
    return _without(first, dims)


def padded(call: Call, k: int) -> Placed:
    """Padding with a constant or by reflection: (before, after) pairs from the last dim on."""
    first = next(call.operands)
    pads = list(call.args[1])
    found, lost = [], 0
    for p in first.positions:
        at = 2 * (first.ndim - 1 - p.dim)
        before, after = pads[at : at + 2] if at < len(pads) else (0, 0)
        if before == after == 0:
            found.append(p)
        elif p.axis == BATCH:
            lost |= UNKNOWN
        else:
            axis = None
            if min(before, after) >= 0 and p.outer == p.inner == 1:
                axis = call.lengths.joined([(before, None), (p.size, p.axis), (after, None)])
            if axis is None:
                lost |= LENGTH_UNKNOWN
            else:
                found.append(p._replace(size=p.size + before + after, axis=axis))
    return Placed(tuple(found), lost)


def halved(call: Call, k: int) -> Placed:
    """glu: one dim is halved."""
    first = next(call.operands)
    return _without(first, [dim_of(call.value("dim", -1), first.ndim)])


# ---- indexing ------------------------------------------------------------------------------------------


def embedding(call: Call, k: int) -> Placed:
    """Rows of a table: the dims of the indices, then the table's."""
    table, indices = list(call.operands)[:2]
    return Placed(indices.positions, UNKNOWN if table.batch else 0)


def embedding_bag(call: Call, k: int) -> Placed:
    """A row for each bag: the dim of the offsets."""
    offsets = list(call.operands)[2]
    return Placed(offsets.positions if k == 0 else (), 0 if k == 0 else UNKNOWN)


def index_select(call: Call, k: int) -> Placed:
    """One dim is replaced by that of the index."""
    first, index = list(call.operands)[:2]
    dim = dim_of(call.value("dim"), first.ndim)
    if is_identity(index, first.shape[dim]):
        return Placed(first.positions)
    rest = _without(first, [dim])
    return Placed((*rest.positions, *(moved(p, dim) for p in index.positions)), rest.flags)


def gather(call: Call, k: int) -> Placed:
    """The dims of the index; along `dim` it reads anywhere."""
    first, index = list(call.operands)[:2]
    dim = dim_of(call.value("dim"), first.ndim)
    found, lost = list(index.positions), 0
    for p in first.positions:
        if p.dim == dim:
            lost |= UNKNOWN if p.axis == BATCH else 0
        elif index.shape[p.dim] == first.shape[p.dim]:
            found.append(p)
    line_up(call, index, call.outputs[k], [p for p in found if p.dim != dim])
    return Placed(tuple(found), lost)


def scatter(call: Call, k: int) -> Placed:
    """The dims of what is written into; along `dim` it writes anywhere."""
    first, *rest = list(call.operands)
    dim = dim_of(call.value("dim"), first.ndim)
    same = [operand for operand in rest if operand.ndim == first.ndim]
    return _written_along(first, same, dim, moves=any(p.dim == dim for o in same for p in o.batch))


def index_add(call: Call, k: int) -> Placed:
    """index_add, index_copy, index_fill: slices along `dim` are written wherever the index says."""
    first, index, *rest = list(call.operands)
    dim = dim_of(call.value("dim"), first.ndim)
    source = [operand for operand in rest if operand.ndim == first.ndim]
    moves = bool(index.batch) or any(p.dim == dim for o in source for p in o.batch)
    return _written_along(first, source, dim, moves=moves)


def _written_along(first: Operand, sources: Sequence[Operand], dim: int, *, moves: bool) -> Placed:
    """An operand into which others were written along one dim; `moves`: between samples, perhaps."""
    found = [
        p
        for source in sources
        for p in source.positions
        if p.dim != dim and source.shape[p.dim] == first.shape[p.dim]
    ]
    moves = moves or any(p.dim == dim for p in first.batch)
    return Placed((*first.positions, *found), UNKNOWN if moves else 0)


def index(call: Call, k: int) -> Placed:
    """x[a, :, b]: the indexed dims are replaced by those of the indices, broadcast."""
    first = next(call.operands)
    indices = call.args[1]
    at = [d for d, each in enumerate(indices) if each is not None]
    if any(indices[d].boolean for d in at):
        return _everywhere_lost(*call.operands)
    shape = _broadcast([indices[d].shape for d in at])
    together = at == list(range(at[0], at[-1] + 1))
    start = at[0] if together else 0
    found = [moved(p, p.dim + start) for d in at for p in aligned(indices[d], shape)]
    flags = 0
    for p in first.positions:
        if p.dim not in at:
            before = sum(d < p.dim for d in at)
            shift = len(shape) if not together or p.dim > start else 0
            found.append(moved(p, p.dim - before + shift))
        elif is_identity(each := indices[p.dim], first.shape[p.dim]):
            found.append(moved(p, start + len(shape) - each.ndim + (each.counts or 0)))
        elif p.axis != BATCH:
            # x[:, [0, 5]] reads at given places, x[ids] wherever the ids say: as gather
            flags |= 0 if indices[p.dim].positions else LENGTH_UNKNOWN
        else:
            flags |= UNKNOWN
    return Placed(tuple(found), flags)


def is_identity(index: Operand, size: int) -> bool:
    """Whether an index is 0, 1, ... for all of a dim, so that its items stay where they are."""
    return index.counts is not None and index.shape[index.counts] == size


def _broadcast(shapes: Sequence[Shape]) -> Shape:
    ndim = max(map(len, shapes))
    filled = [(1,) * (ndim - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes) for sizes in zip(*filled, strict=True))


def _everywhere_lost(*operands: Operand) -> Placed:
    """Nothing of what the operands carry has a dim of its own in the result."""
    flags = 0
    for operand in operands:
        flags |= lost_along(operand, range(operand.ndim))
    return Placed((), flags)


def index_put(call: Call, k: int) -> Placed:
    """x[a, :, b] = values: keeps the dims of x, and takes on what indices and values carry."""
    first = next(call.operands)
    indices, values = call.args[1], call.args[2]
    at = [d for d, each in enumerate(indices) if each is not None]
    if any(indices[d].boolean for d in at):
        return _put_where(first, indices, values)
    shape = _broadcast([indices[d].shape for d in at])
    start = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    rest = [d for d in range(first.ndim) if d not in at]
    # which dim of x each dim of x[a, :, b] is; None for those of the indices that pick
    dims: list[int | None] = [*rest[:start], *([None] * len(shape)), *rest[start:]]
    in_place = set()
    for d in at:
        if is_identity(indices[d], first.shape[d]):
            dims[start + len(shape) - indices[d].ndim + (indices[d].counts or 0)] = d
            in_place.add(d)
    moves = any(p.dim in at and p.dim not in in_place for p in first.batch)
    found = list(first.positions)
    for operand, ndim in ((values, len(dims)), *((indices[d], start + len(shape)) for d in at)):
        for p in operand.positions:
            dim = dims[p.dim + ndim - operand.ndim]
            if dim is not None and operand.shape[p.dim] == first.shape[dim]:
                found.append(moved(p, dim))
            else:
                moves = moves or p.axis == BATCH
    return Placed(tuple(found), UNKNOWN if moves else 0)


def _put_where(first: Operand, indices: Sequence[Operand | None], values: Operand) -> Placed:
    """Written where masks of some dims say; the values come in the order in which they are found."""
    found, dim = list(first.positions), 0
    moves = bool(values.batch) or math.prod(values.shape) > 1
    for each in indices:
        if each is not None and each.boolean:
            found += [moved(p, p.dim + dim) for p in each.positions]
        elif each is not None:
            moves = moves or bool(each.batch)
        dim += each.ndim if each is not None and each.boolean else 1
    return Placed(tuple(found), UNKNOWN if moves else 0)


def by_content(call: Call, k: int) -> Placed:
    """Results whose dims come from the content: nonzero, unique, masked_select."""
    return _everywhere_lost(*call.operands)


def masked_scatter(call: Call, k: int) -> Placed:
    """Where a mask says, items of a source are put in order: whose they are is not known."""
    first, mask, source = list(call.operands)[:3]
    shape = call.outputs[k]
    found = [p for operand in (first, mask) for p in aligned(operand, shape)]
    return Placed(tuple(found), UNKNOWN if mask.batch or source.batch else 0)


def kept(dims: Callable[[Operand], int]) -> Callable[[Call, int], Placed]:
    """Keeps what lies in the first `dims` dims of the first operand; what lies in the others is lost."""

    def rule(call: Call, k: int) -> Placed:
        first = next(call.operands)
        return _without(first, range(dims(first), first.ndim))

    return rule
