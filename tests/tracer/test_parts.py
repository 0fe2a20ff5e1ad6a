"""What a view shows of one sample's record: the same elements as indexing the record itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from opdrift.parts import Part, Shown
from opdrift.records import TensorMeta
from opdrift.tracefile.axes import Extents, Position
from opdrift.tracefile.samples import Followed

Numbers = npt.NDArray[np.int64]
B, T, E = 3, 4, 2


def meta(array: Numbers) -> TensorMeta:
    return TensorMeta(array.shape, tuple(s // array.itemsize for s in array.strides), "int64", "")


def followed(batch: Position, length: Position) -> Followed:
    return Followed((batch,), (length,), 0)


#: Layout -> shape of the recorded value, where the axes lie, dims in the order batch, length (or the reverse).
LAYOUTS = {
    "B x T x E": ((B, T, E), followed(Position(0, 1, B, 1), Position(1, 1, T, 1, 1)), True),
    "T x B x E": ((T, B, E), followed(Position(1, 1, B, 1), Position(0, 1, T, 1, 1)), False),
    "BT x E": ((B * T, E), followed(Position(0, 1, B, T), Position(0, B, T, 1, 1)), True),
    "TB x E": ((T * B, E), followed(Position(0, T, B, 1), Position(0, 1, T, B, 1)), False),
}


def shown_elements(shown: Shown) -> list[int]:
    at = np.array([shown.start])
    for count, step in shown.walk:
        at = (at[:, None] + np.arange(count) * step).ravel()
    return [int(i) for i in at]


def viewed(view: Numbers, step: tuple[str, int, int]) -> Numbers:
    """One more view of a view; the same where the step does not fit."""
    kind, dim, number = step
    if view.ndim == 0:
        return view
    dim %= view.ndim
    if kind == "transpose":
        return np.moveaxis(view, dim, number % view.ndim)
    if kind == "slice":
        return view[(slice(None),) * dim + (slice(number % view.shape[dim], None),)]
    if kind == "skip":
        return view[(slice(None),) * dim + (slice(None, None, 2),)]
    if kind == "select":
        return view[(slice(None),) * dim + (number % view.shape[dim],)]
    flat = view.view()
    try:
        flat.shape = (*view.shape[:dim], -1, *view.shape[dim + 2 :])
    except AttributeError:  # NumPy's word for: not without a copy
        return view
    return flat


@settings(max_examples=600, deadline=None)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    sample=st.integers(0, B - 1),
    valid=st.integers(1, T),
    left=st.booleans(),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["transpose", "slice", "skip", "select", "flatten"]),
            st.integers(0, 3),
            st.integers(0, 5),
        ),
        max_size=3,
    ),
)
def test_a_view_shows_the_elements_of_the_sample_that_it_holds(
    layout: str, sample: int, valid: int, left: bool, steps: list[tuple[str, int, int]]
):
    shape, axes, batch_first = LAYOUTS[layout]
    first = T - valid if left else 0
    extents = {1: Extents(T, ((first, valid),) * B)}
    base = np.arange(B * T * E).reshape(shape)
    split = base.reshape((B, T, E) if batch_first else (T, B, E))
    own = split[sample] if batch_first else split[:, sample]
    record = own[first : first + valid].ravel().tolist()
    view = split
    for step in steps:
        view = viewed(view, step)

    shift = (
        view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    ) // base.itemsize
    shown = Part(meta(base), axes, sample, extents).shown(meta(view), shift)

    held = [record.index(x) for x in view.ravel().tolist() if x in record]
    if shown is None:
        return
    assert shown.padding == (not held)
    assert shown.count == len(held)
    if held:
        assert shown_elements(shown) == held


def test_the_whole_value_shows_the_whole_record():
    base = np.arange(B * T * E).reshape(B, T, E)
    _, axes, _ = LAYOUTS["B x T x E"]
    part = Part(meta(base), axes, 1, {1: Extents(T, ((0, 3),) * B)})

    assert part.shown(meta(base), 0) == Shown(0, ((3 * E, 1),))


def test_the_last_position_of_a_padded_sample_is_padding():
    base = np.arange(B * T * E).reshape(B, T, E)
    _, axes, _ = LAYOUTS["B x T x E"]
    part = Part(meta(base), axes, 1, {1: Extents(T, ((0, 3),) * B)})

    shown = part.shown(meta(base[:, -1]), (T - 1) * E)

    assert shown is not None
    assert shown.padding


def test_another_sample_is_not_shown():
    base = np.arange(B * T * E).reshape(B, T, E)
    _, axes, _ = LAYOUTS["B x T x E"]

    assert Part(meta(base), axes, 1, {1: Extents(T, ((0, T),) * B)}).shown(meta(base[0]), 0) is None


def test_without_axes_a_view_is_placed_in_the_whole():
    table = np.arange(20).reshape(10, 2)

    shown = Part(meta(table), None, 0, {}).shown(meta(table[3:7]), 6)

    assert shown == Shown(6, ((8, 1),))


def test_elements_that_lie_on_each_other_say_nothing():
    expanded = TensorMeta((4, 3), (0, 1), "int64", "")

    assert Part(expanded, None, 0, {}).shown(expanded, 0) is None
