"""Which tensors of an op on lists belong together."""

from __future__ import annotations

import pytest

from opdrift.flow import list_length, of_the_same


@pytest.mark.parametrize(
    ("outputs", "inputs", "length"),
    [
        pytest.param(8, 8, 8, id="one list"),
        pytest.param(8, 24, 8, id="three lists"),
        pytest.param(14, 15, 14, id="a list and a factor"),
        pytest.param(7, 36, 7, id="five lists and a rate"),
        pytest.param(1, 2, 1, id="lists of one"),
        pytest.param(0, 3, 3, id="nothing is returned"),
    ],
)
def test_the_length_of_lists_follows_from_what_is_given_and_returned(
    outputs: int, inputs: int, length: int
):
    assert list_length(outputs, inputs) == length


def test_a_result_is_made_of_what_stands_in_its_place():
    """A tensor for all lists stands where the first of the next list would, and counts as that one's."""
    assert of_the_same([1, 2, 3, 4, 5, 6], [11, 12, 13], 12) == [2, 5]
    assert of_the_same([1, 2, 3, 9], [11, 12, 13], 13) == [3]
    assert of_the_same([1, 2], [11], 11) == [1, 2]
