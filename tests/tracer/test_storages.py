"""The geometry of tensors within a storage, and what was read of a leaf."""

from __future__ import annotations

import torch

from opdrift.storages import Leaf, StorageState, in_layout, is_readable, key_of


def test_a_tensor_within_its_storage_is_readable():
    assert is_readable(torch.ones(2, 3).t())


def test_a_tensor_whose_storage_was_freed_is_not_readable():
    x = torch.ones(4)
    x.untyped_storage().resize_(0)

    assert not is_readable(x)


def test_a_view_past_the_end_of_a_shrunk_storage_is_not_readable():
    x = torch.ones(4)
    tail = x[2:]
    x.untyped_storage().resize_(8)

    assert not is_readable(tail)
    assert is_readable(x[:2])


def test_a_tensor_without_elements_is_readable_without_memory():
    assert is_readable(torch.empty(0))


def test_a_tensor_can_be_made_in_another_layout_of_its_storage():
    x = torch.arange(4.0)
    tail = in_layout(x.untyped_storage(), key_of(x[2:]))

    assert tail is not None
    assert tail.tolist() == [2.0, 3.0]


def test_a_quantised_tensor_cannot():
    x = torch.arange(4.0)
    key = (x.shape, x.stride(), 0, torch.qint8)

    assert in_layout(x.untyped_storage(), key) is None


def leaf_of(tensor: torch.Tensor) -> Leaf:
    leaf = Leaf(turn=1)
    leaf.read(key_of(tensor), tensor.numel(), raw=7)
    return leaf


def test_what_was_read_tells_of_a_part_of_it():
    x = torch.ones(4, 4)

    assert leaf_of(x).tells(key_of(x[1:3, 1]))


def test_what_was_read_tells_nothing_of_what_lies_outside():
    x = torch.ones(4)

    assert not leaf_of(x[:2]).tells(key_of(x[1:3]))


def test_a_layout_with_gaps_tells_nothing_of_what_lies_in_them():
    x = torch.ones(4, 4)

    assert not leaf_of(x[:, 0]).tells(key_of(x[0]))


def test_the_largest_reading_is_kept():
    x = torch.ones(4)
    leaf = leaf_of(x)
    leaf.read(key_of(x[:2]), 2, raw=8)

    assert (leaf.key, leaf.raw) == (key_of(x), 7)


def test_after_a_write_the_next_reading_counts():
    x = torch.ones(4)
    leaf = leaf_of(x)
    leaf.forget()
    leaf.read(key_of(x[:2]), 2, raw=8)

    assert leaf.key == key_of(x[:2])


def test_a_storage_that_is_freed_may_not_be_read():
    x = torch.ones(2)
    state = StorageState(1, x.device)
    x.untyped_storage().resize_(0)

    assert not state.may_be_read(x)
