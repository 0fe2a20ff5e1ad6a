"""How much of an optimizer's step rounding explains, where it divides a gradient by its own size.

Adam's first step of an element is lr g / |g|, so whatever moves g by an amount d moves the step by up to min(2, 2 d / |g|) of
lr: an element whose gradient is noise is stepped at random. Keys' biases have such gradients in every attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from opdrift import components
from opdrift.case import Side
from opdrift.tokens import base
from opdrift.tracefile.fingerprints import Fingerprint

#: Ops by which optimizers divide a gradient by its size, or take its sign.
_DIVIDING: Final = ("_fused_ada", "addcdiv", "rsqrt", "sign", "sqrt")
#: Of elements drawn from a density p(0) at zero, the squares of 2 d / |g|, cut at 2, average to about 8 p(0) d; for a normal
#: one that is 3.2 d / rms, and its root 1.8. Densities of gradients are sharper at zero.
_SHARP: Final = 4.0


def divides_by_size(side: Side) -> bool:
    """Whether an optimizer of a run divides gradients by their own size: outside modules and backward passes, behind one."""
    ops = side.trace.ops
    backward = np.flatnonzero(ops.phase)
    if not len(backward):
        return False
    after = np.arange(len(ops.phase)) > backward[0]
    signatures = np.unique(ops.signature[after & (ops.phase == 0) & (ops.call == 0)])
    return any(
        base(side.trace.op_info(number).name).removeprefix("_foreach_").startswith(_DIVIDING)
        for number in signatures.tolist()
    )


def noise_of_steps(gradients: Mapping[str, Fingerprint], limit: float) -> dict[str, float]:
    """By parameter how much of its step rounding explains, in parts of the step.

    Args:
        gradients: By parameter.
        limit: What rounding explains of all gradients together, in parts of them.
    """
    count = sum(g.n for g in gradients.values())
    total = sum(g.ssq for g in gradients.values())
    if not total:
        return {}
    moved = limit * math.sqrt(total / count)  # what rounding moves an element by
    return {name: _noise(gradient, moved) for name, gradient in gradients.items()}


def _noise(gradient: Fingerprint, moved: float) -> float:
    sampled = components.numbers(gradient)
    rms = math.sqrt(gradient.ssq / gradient.n)
    if sampled is None or not len(sampled) or moved >= rms:
        return 2.0
    sizes = np.abs(components.finite(sampled))
    # what is zero is not computed: rows of a table that no sample reads
    ratio = np.where(sizes > 0, moved / np.maximum(sizes, moved), 0.0)
    return min(2.0, 2 * math.sqrt(float(np.mean(ratio**2))) + _SHARP * math.sqrt(moved / rms))
