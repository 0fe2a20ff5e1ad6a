"""What turned one content into another, told from two fingerprints; and that chance and rounding do not look so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from opdrift.causes.likeness import Likeness, likeness
from opdrift.testing import Builder
from opdrift.tracefile.fingerprints import Fingerprint

Array = np.ndarray
RNG = np.random.default_rng(5)
WEIGHT = RNG.standard_normal((64, 48)).astype("<f4")


def print_of(content: Array) -> Fingerprint:
    build = Builder()
    value = build.leaf("w", content=np.ascontiguousarray(content))
    build.output(build.op("sin", value))
    found = build.build().fingerprint(value)
    assert found is not None
    return found


def relation(left: Array, right: Array) -> Likeness:
    found = likeness(print_of(left), print_of(right))
    assert found is not None
    return found


def rounded(weight: Array, levels: int, *, rows: bool) -> Array:
    largest = np.abs(weight).max(1, keepdims=True) if rows else np.abs(weight).max()
    step = (largest / np.float32(levels)).astype("<f4")
    return (np.round(weight / step) * step).astype("<f4")


def bfloat16(weight: Array) -> Array:
    bits = weight.view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view("<f4")


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda w: w.T.copy(), "rearranged"),
        (lambda w: w[::-1], "rearranged"),
        (lambda w: -w, "negated"),
        (lambda w: w * np.float32(0.3), "scaled"),
        (lambda w: np.where(np.abs(w) > 0.5, w, 0).astype("<f4"), "zeroed"),
        (lambda w: np.ones_like(w), "constant"),
        (bfloat16, "cast"),
        (lambda w: w.astype("<f2").astype("<f4"), "cast"),
        (lambda w: rounded(w, 127, rows=False), "levels"),
        (lambda w: rounded(w, 127, rows=True), "levels"),
        (lambda w: rounded(w, 7, rows=False), "levels"),
        (lambda w: w * (1 + 2e-8 * RNG.standard_normal(w.shape)).astype("<f4"), "rounding"),
        (lambda w: w + np.float32(0.02) * RNG.standard_normal(w.shape).astype("<f4"), "near"),
        (lambda w: RNG.standard_normal(w.shape).astype("<f4"), "far"),
    ],
)
def test_a_change_is_told_in_both_directions(change: Callable[[Array], Array], kind: str):
    """Whichever run holds the changed weights."""
    changed = change(WEIGHT)

    assert relation(WEIGHT, changed).kind == kind
    assert relation(changed, WEIGHT).kind == kind


def test_rounding_that_leaves_the_extremes_alone_is_no_other_order():
    """The statistics agree as they do for a permutation; the distance does not."""
    changed = WEIGHT.copy()
    inner = np.abs(changed) < 1
    changed[inner] = np.nextafter(changed[inner], np.float32(9))

    assert relation(WEIGHT, changed).kind == "rounding"


def test_noise_of_the_size_of_eight_bits_is_not_taken_for_levels():
    """The largest element moves with the others."""
    changed = WEIGHT + np.float32(4e-3) * RNG.standard_normal(WEIGHT.shape).astype("<f4")

    assert relation(WEIGHT, changed).kind == "near"


def test_two_contents_that_both_fit_a_narrow_type_were_not_cast():
    """Both checkpoints are of bfloat16: what differs is something else."""
    other = bfloat16(WEIGHT + np.float32(0.01) * RNG.standard_normal(WEIGHT.shape).astype("<f4"))

    assert relation(bfloat16(WEIGHT), other).kind == "near"


def test_the_side_and_the_factor_are_told():
    """What a report needs to say it."""
    assert relation(WEIGHT, bfloat16(WEIGHT)).side == 1
    assert relation(bfloat16(WEIGHT), WEIGHT).side == 0
    assert relation(WEIGHT, WEIGHT * np.float32(0.5)).detail == "0.5"
    assert relation(WEIGHT, WEIGHT * np.float32(-2)).detail == "-2"
