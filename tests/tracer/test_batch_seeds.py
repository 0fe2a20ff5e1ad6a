"""Where the batch and the padded length are found in what a model is called with."""

from __future__ import annotations

import pytest

from opdrift.batch import Batch
from opdrift.batches.seeds import Input, Seed, find_seeds


def seeds(*inputs: Input, size: int, lengths: list[int] | None = None, known: int | None = None):
    return find_seeds(inputs, Batch(size, lengths), known)


def ids(*shape: int) -> Input:
    return Input("ids", shape, "integer")


def x(*shape: int) -> Input:
    return Input("x", shape)


def mask(*shape: int) -> Input:
    return Input("mask", shape, "bool")


@pytest.mark.parametrize(
    ("given", "dim"),
    [
        (x(3, 8), 0),
        (ids(3, 8), 0),
        (x(8, 3, 4), 1),  # length, batch, features
        (ids(8, 3), 1),
        (x(3, 3, 16, 16), 0),  # as many colours as pictures
        (x(3, 3), 0),  # the first input has the batch in front: that is what Batch says
        (x(8, 4), None),
        (x(8), None),
        (x(), None),
        (x(0, 4), None),
        (x(6, 3, 2), 1),
    ],
)
def test_the_batch_of_one_input(given: Input, dim: int | None):
    assert seeds(given, size=3) == ([Seed(dim)], None)


def test_a_batch_of_one_lies_nowhere():
    assert seeds(x(1, 8), size=1) == ([Seed(None)], None)


def test_what_has_no_dim_of_the_batch_carries_none():
    found, _ = seeds(ids(3, 8), ids(1, 8), x(8, 8), size=3)

    assert found == [Seed(0), Seed(None), Seed(None)]


def test_a_square_that_is_not_the_first_input_is_not_guessed():
    """A mask of 4 positions by 4, or the state of 4 layers, could be a batch of 4."""
    found, _ = seeds(ids(4, 4), mask(4, 4), x(4, 4, 8), ids(4, 4), size=4)

    assert [seed.batch for seed in found] == [0, None, None, 0]
    assert [seed.unknown is not None for seed in found] == [False, True, True, False]
    assert "4" in str(found[1].unknown)


def test_the_padded_length_is_the_dim_of_the_longest_sample():
    found, length = seeds(ids(3, 8), mask(3, 8), x(3, 2, 8), size=3, lengths=[8, 5, 2])

    assert length == 8
    assert [seed.lengths for seed in found] == [(1,), (1,), (2,)]


def test_it_is_found_in_layouts_with_the_length_in_front():
    found, length = seeds(x(8, 3, 4), size=3, lengths=[8, 5, 2])

    assert (found, length) == ([Seed(1, (0,))], 8)


def test_padding_beyond_the_longest_sample_is_found_in_two_dimensional_inputs():
    found, length = seeds(ids(3, 16), x(3, 16, 20), x(3, 20), size=2 + 1, lengths=[8, 5, 2])

    assert length is None  # 16 or 20?
    assert all(seed.length_unknown for seed in found)
    found, length = seeds(ids(3, 16), x(3, 16, 20), size=3, lengths=[8, 5, 2])
    assert length == 16
    assert [seed.lengths for seed in found] == [(1,), (1,)]


def test_two_dims_of_that_length_are_both_only_in_a_mask():
    """Queries by keys; otherwise one of them is the features."""
    found, _ = seeds(ids(3, 8), mask(3, 8, 8), x(3, 1, 8, 8), x(3, 8, 8), size=3, lengths=[8, 5, 2])

    assert [seed.lengths for seed in found] == [(1,), (1, 2), (2, 3), ()]
    assert found[3].length_unknown is not None


def test_a_batch_of_one_has_a_padded_length_too():
    assert seeds(ids(1, 8), size=1, lengths=[5]) == ([Seed(None, (1,))], 8)
    assert seeds(ids(1, 5), size=1, lengths=[5]) == ([Seed(None, (1,))], 5)


def test_later_calls_keep_the_length_of_the_first():
    """A token in the second step, and a mask that grew: of another length is not padded as the inputs were."""
    found, length = seeds(ids(3, 1), ids(3, 9), size=3, lengths=[8, 5, 2], known=8)

    assert length == 8
    assert [seed.lengths for seed in found] == [(), ()]


def test_a_length_of_one_has_no_padding():
    assert seeds(ids(3, 1), size=3, lengths=[1, 1, 1])[0] == [Seed(0)]
