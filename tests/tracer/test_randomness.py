"""Digests of random state, taken before ops that may draw."""

from __future__ import annotations

import torch
from recordings import recording

from opdrift.randomness import Seeds, digest_before, generator_digest


def test_equal_states_have_equal_digests():
    torch.manual_seed(3)
    first = digest_before((), {})
    torch.rand(2)
    torch.manual_seed(3)

    assert digest_before((), {}) == first


def test_a_draw_changes_the_digest():
    torch.manual_seed(3)
    first = digest_before((), {})
    torch.rand(1)

    assert digest_before((), {}) != first


def test_ten_thousand_states_have_digests_of_their_own():
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(10_000):
        seen.add(generator_digest(generator))
        torch.rand(1, generator=generator)

    assert len(seen) == 10_000


def test_a_digest_is_never_zero():
    assert digest_before((), {}) > 0


def test_the_generator_that_the_op_was_given_counts():
    own = torch.Generator().manual_seed(7)

    assert digest_before((), {"generator": own}) == generator_digest(own)
    assert digest_before((own,), {}) == generator_digest(own)


def test_taking_the_digest_draws_nothing():
    torch.manual_seed(3)
    digest_before((), {})
    drawn = torch.rand(1)
    torch.manual_seed(3)

    assert torch.equal(drawn, torch.rand(1))


def test_an_op_that_draws_carries_the_digest():
    torch.manual_seed(3)
    expected = digest_before((), {})
    with recording() as found:
        torch.rand(2)

    assert found.op("rand.default").rng == expected


def test_an_op_that_does_not_draw_carries_none():
    with recording() as found:
        torch.ones(2)

    assert found.op("ones.default").rng == 0


def test_taking_the_digest_records_no_ops():
    with recording() as found:
        torch.rand(2)

    assert [op.name for op in found.ops] == ["aten.rand.default"]


def test_a_seed_that_the_program_sets_is_marked_once_at_the_first_draw_from_it():
    torch.manual_seed(3)
    with recording() as found:
        torch.rand(2)
        torch.manual_seed(5)
        torch.rand(2)
        torch.rand(2)

    marks = [(mark.seq, dict(mark.fields)) for mark in found.trace.marks if mark.kind == "seed"]
    assert marks == [(2, {"device": "cpu", "seed": 5})]


def test_a_generator_of_the_program_s_own_is_no_seeding_of_the_default_one():
    seeds = Seeds()

    assert seeds.changed((), {"generator": torch.Generator().manual_seed(11)}) is None
