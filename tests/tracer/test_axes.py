"""An axis is found again in any layout of its storage, and a sample's part is cut out of it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opdrift.batches.tracks import byte_strides
from opdrift.tracefile.axes import (
    BATCH,
    Extents,
    Missing,
    Position,
    Step,
    factor,
    locate,
    outer_inner,
    step_of,
    valid_part,
)

sizes = st.integers(1, 4)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[torch.Tensor, Position]:
    """A contiguous tensor and where a batch of 2 to 5 lies in it."""
    outer, batch, inner = draw(sizes), draw(st.integers(2, 5)), draw(sizes)
    before, after = draw(st.lists(sizes, max_size=2)), draw(st.lists(sizes, max_size=2))
    shape = (*before, outer * batch * inner, *after)
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    return numbers, Position(len(before), outer, batch, inner)


def sample_of(tensor: torch.Tensor, position: Position, sample: int) -> torch.Tensor:
    dim, outer, batch, inner, _ = position
    return tensor.unflatten(dim, (outer, batch, inner)).select(dim + 1, sample)


def elements(tensor: torch.Tensor) -> set[int]:
    return set(tensor.flatten().tolist())


@settings(deadline=None)
@given(layouts(), st.randoms())
def test_an_axis_is_found_again_after_views(layout: tuple[torch.Tensor, Position], random):
    """Through a permutation of the dims and a split of the one that holds it."""
    tensor, position = layout
    step = step_of(position, byte_strides(tensor))
    split = tensor.unflatten(position.dim, (position.outer, position.size, position.inner))
    order = list(range(split.ndim))
    random.shuffle(order)
    for view in (tensor, split, split.permute(order)):
        found = locate(step, view.shape, byte_strides(view))

        assert isinstance(found, Position)
        for sample in range(position.size):
            assert elements(sample_of(view, found, sample)) == elements(
                sample_of(tensor, position, sample)
            )


@settings(deadline=None)
@given(layouts())
def test_a_part_of_the_samples_is_never_taken_for_all(layout: tuple[torch.Tensor, Position]):
    tensor, position = layout
    split = tensor.unflatten(position.dim, (position.outer, position.size, position.inner))
    step = step_of(position, byte_strides(tensor))
    dim = position.dim + 1
    for view, missing in (
        (split.select(dim, 1), Missing.GONE),
        (split.narrow(dim, 0, 1), Missing.GONE),
        *([(split.narrow(dim, 0, position.size - 1), Missing.CUT)] if position.size > 2 else []),
    ):
        assert locate(step, view.shape, byte_strides(view)) is missing


def test_every_second_item_and_a_diagonal_are_cuts():
    tensor = torch.zeros(4, 4)
    step = Step(16, 4)

    assert locate(step, (2, 4), byte_strides(tensor[::2])) is Missing.CUT
    assert locate(step, (4,), byte_strides(tensor.diagonal())) is Missing.CUT


def test_an_expanded_dim_holds_no_axis():
    tensor = torch.zeros(1, 4).expand(3, 4)

    assert step_of(Position(0, 1, 3, 1), byte_strides(tensor)) is None


@settings(deadline=None)
@given(layouts())
def test_outer_and_inner_are_those_of_the_fingerprint(layout: tuple[torch.Tensor, Position]):
    """Sample b of a contiguous tensor is [:, b, :] of (outer, batch, inner)."""
    tensor, position = layout
    outer, inner = outer_inner(tensor.shape, position)

    items = tensor.reshape(outer, position.size, inner)

    for sample in range(position.size):
        wanted = sample_of(tensor, position, sample).flatten()
        assert items[:, sample].flatten().tolist() == wanted.tolist()


@st.composite
def padded(draw: st.DrawFn) -> tuple[np.ndarray, list[Position], Extents, int]:
    """A batch with one or two padded dims, merged or not, padded on either side."""
    batch, length = draw(st.integers(2, 4)), draw(st.integers(2, 6))
    left = draw(st.booleans())
    lengths = draw(st.lists(st.integers(0, length), min_size=batch, max_size=batch))
    valid = tuple((length - n if left else 0, n) for n in lengths)
    scores, merged, batch_first = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    before = (batch, length) if batch_first else (length, batch)
    shape = (*before, *((length,) if scores else ()), draw(sizes))
    data = np.arange(math.prod(shape)).reshape(shape)
    places = [Position(0 if batch_first else 1, 1, batch, 1)]
    places.append(Position(1 if batch_first else 0, 1, length, 1, 1))
    if scores:
        places.append(Position(2, 1, length, 1, 1))
    if merged:
        data = data.reshape(-1, *shape[2:])
        places = [
            p._replace(
                dim=max(p.dim - 1, 0),
                outer=1 if p.dim == 0 else before[0] if p.dim == 1 else 1,
                inner=before[1] if p.dim == 0 else 1,
            )
            for p in places
        ]
    return data, places, Extents(length, valid), batch


@settings(max_examples=200, deadline=None)
@given(padded())
def test_the_valid_part_is_what_the_sample_alone_would_be(case):
    data, places, extents, batch = case
    factors = factor(data.shape, places)
    assert factors is not None
    split = data.reshape([part.size for part in factors])
    for sample in range(batch):
        start, length = extents.valid[sample]
        wanted = split
        for dim, part in enumerate(factors):
            if part.axis == 1:
                wanted = wanted.take(range(start, start + length), dim)
        wanted = wanted.take(sample, [part.axis for part in factors].index(BATCH))

        part = valid_part(data, factors, sample, [extents])

        assert part is not None
        assert part.flatten().tolist() == wanted.flatten().tolist()


def test_a_sample_whose_extent_is_not_known_has_no_valid_part():
    extents = Extents(4, ((0, 2), None))
    factors = factor((2, 4), [Position(0, 1, 2, 1), Position(1, 1, 4, 1, 1)])

    data = np.zeros((2, 4))

    assert valid_part(data, factors, 0, [extents]).shape == (2, 1)
    assert valid_part(data, factors, 1, [extents]) is None


def test_axes_that_overlap_in_a_dim_cannot_be_split():
    overlapping = [Position(0, 1, 4, 3), Position(0, 2, 3, 2, 1)]

    assert factor((12,), overlapping) is None


def test_factors_of_a_dim_multiply_to_its_size():
    for outer, size, inner in itertools.product((1, 2, 3), (2, 5), (1, 2)):
        n = outer * size * inner
        found = factor((3, n, 2), [Position(1, outer, size, inner)])

        assert math.prod(part.size for part in found) == 6 * n
        assert [part.size for part in found if part.axis == BATCH] == [size]
