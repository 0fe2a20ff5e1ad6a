"""How large a difference rounding explains at an op, and how far the op may magnify one of its inputs.

Everything is computed from what a trace holds: layouts, arguments and statistics. The rows of `table` say
which ops follow which rule, `formulas` and `gains` hold the rules with their sources, and the constants
here were measured (notes: diagnosis, 1 and 2; decision 0006).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from opdrift.bounds.depth import grown
from opdrift.bounds.formulas import gives_mean, mean_intermediate, mean_order
from opdrift.bounds.gains import sum_gain
from opdrift.bounds.precision import ROUNDOFF, Precision, product_precision, setting_of
from opdrift.bounds.products import product
from opdrift.bounds.table import FAMILIES, Family, family_of
from opdrift.bounds.view import TINY, Operand, OpView, OpViews
from opdrift.compare import dtype_epsilon

__all__ = [
    "FAMILIES",
    "Bound",
    "Family",
    "Gain",
    "OpView",
    "OpViews",
    "Operand",
    "arithmetic",
    "explained",
    "gain_limit",
    "grown",
    "is_discrete",
    "precision_of",
]

#: Safety over the worst ratio that was measured (1.17 in float32; 0.9 and 0.6 in 16 bits).
FLOAT32_SAFETY: Final = 3.0
TIGHT_SAFETY: Final = 2.0
LOOSE_SAFETY: Final = 1.5
FLOAT64: Final = 1e-9
_ACCUMULATOR: Final = 2.0**-24
_WIDE: Final = ("float64", "complex128")
_SINGLE: Final = ("float32", "complex64")


@dataclass(frozen=True, slots=True)
class Bound:
    """The largest relative L2 differences that rounding explains on equal inputs.

    Attributes:
        tight: Another order of the same arithmetic, with the same intermediates.
        loose: An intermediate was rounded to the output's dtype by one form only; equal to `tight`
            in float32 and wider, but where one side may have rounded the factors of a float32
            product to TF32 or bfloat16.
        conditioning: ||A|| ||B|| / ||C|| of matmul-like ops.
        family: Which rule; None for an op that the table does not know.
        exact: Equal inputs give equal bits: any difference is an origin.
        cannot_judge: The bound reaches the size of the output (cancellation), or the op's
            conditioning is not in the record.
    """

    tight: float
    loose: float
    conditioning: float | None
    family: str | None
    exact: bool
    cannot_judge: bool

    def limit(self, *, same_kernel: bool, few: bool) -> float:
        """The bound that counts: the tight one for the same kernel, or where only a few elements changed.

        An intermediate rounded to 16 bits touches many elements, never a few (1,460 pairs).
        """
        return self.tight if same_kernel or few else self.loose


@dataclass(frozen=True, slots=True)
class Gain:
    """How far an op may magnify the largest relative difference of its inputs.

    Up to `cap` nothing is remarkable; between `cap` and `formula` the op is an amplifier; above `formula`
    the output's difference is not explained by the inputs'. A discrete op jumps: it amplifies by definition.
    """

    formula: float
    cap: float
    discrete: bool


def explained(op: OpView, output: int = 0) -> Bound:
    """What rounding explains at one output of an op whose inputs are equal.

    `output` counts as in `op.outputs`: first the written arguments, then what the op returned.
    """
    family = family_of(op)
    name = None if family.name == "unknown" else family.name
    result = op.result(output)
    epsilon = dtype_epsilon(result.meta.dtype)
    if epsilon == 0.0 or (family.exact and not _complex_product(op, result)):
        return Bound(0.0, 0.0, None, name, exact=True, cannot_judge=False)
    if family.unbounded or _auxiliary(family, op, output):
        return Bound(math.inf, math.inf, None, name, exact=False, cannot_judge=True)
    if family.exact:  # a complex product is two multiply-adds
        tight, loose = _fused(2.0, epsilon)
    elif family.fused:
        tight, loose = _fused(family.order(op, output), epsilon)
    else:
        tight, loose = _ordered(family, op, output)
    conditioning = None
    if family.name == "matmul":
        conditioning = product(op, output).conditioning(result)
    return Bound(tight, loose, conditioning, name, exact=loose == 0, cannot_judge=loose >= 1)


def gain_limit(op: OpView, output: int = 0) -> Gain:
    """How far an op may magnify a difference of its inputs in one output."""
    family = family_of(op)
    if gives_mean(op, output):  # a by-product that may cancel: nothing about it is remarkable
        formula = sum_gain(op, output)
        return Gain(formula, formula, discrete=False)
    return Gain(max(family.gain(op, output), 1.0), family.cap, family.discrete)


def precision_of(op: OpView, output: int = 0) -> Precision:
    """In which precision the float32 products of an op may be computed; "ieee" for an op without any."""
    setting = setting_of(family_of(op), op.base_name)
    meta = op.output_metas[output]
    if setting is None or meta.dtype not in _SINGLE:
        return "ieee"
    return product_precision(meta.device, setting, op.setting)


def arithmetic(op: OpView, output: int = 0) -> str:
    """In what an op computes, in words: `bfloat16`, `float32`, `float32, TF32 off`.

    TF32 is named where it is a question: for products of float32 on CUDA, and wherever factors are narrowed.
    """
    meta = op.output_metas[output]
    narrow = precision_of(op, output)
    if narrow != "ieee":
        return f"{meta.dtype}, {'TF32' if narrow == 'tf32' else 'bfloat16 factors'} allowed"
    asked = setting_of(family_of(op), op.base_name) is not None and meta.dtype in _SINGLE
    return f"{meta.dtype}, TF32 off" if asked and meta.device.startswith("cuda") else meta.dtype


def is_discrete(op: OpView) -> bool:
    """Whether the op's output jumps where its input crosses a threshold (comparisons, argmax, rounding)."""
    return family_of(op).discrete


def _ordered(family: Family, op: OpView, output: int) -> tuple[float, float]:
    """(tight, loose) by the rule of notes diagnosis 1.1: d = 2**-24 A, and 2u L.

    In 16 bits with float32 accumulation outputs differ only where a sum falls near a rounding boundary:
    an element flips by one unit with probability d / u, so the norm is about sqrt(d u).
    """
    result = op.result(output)
    dtype = result.meta.dtype
    order, intermediate = family.order, family.intermediate
    if gives_mean(op, output):
        order, intermediate = mean_order, mean_intermediate
    terms = order(op, output)
    if dtype in _WIDE:
        bound = max(FLOAT64, FLOAT32_SAFETY * 2.0**-53 * terms)
        return bound, bound
    d = _ACCUMULATOR * terms
    if dtype in _SINGLE:
        tight = FLOAT32_SAFETY * d
        unit = ROUNDOFF[precision_of(op, output)]
        if unit <= _ACCUMULATOR:
            return tight, tight
        # both round the factors alike, or one side's kernel does not round them at all
        return tight, max(tight, LOOSE_SAFETY * 2 * unit * intermediate(op, output))
    unit = dtype_epsilon(dtype) / 2
    tight = d + math.sqrt(d * unit) + 2 * unit * _peak(result)
    loose = max(tight, 2 * unit * intermediate(op, output))
    return TIGHT_SAFETY * tight, LOOSE_SAFETY * loose


def _fused(order: float, epsilon: float) -> tuple[float, float]:
    """A multiply-add rounded once or twice: half a unit in half of the elements, u / sqrt 2."""
    unit = epsilon / 2
    if unit < 2.0**-30:
        return FLOAT64, FLOAT64
    if unit <= _ACCUMULATOR:
        return FLOAT32_SAFETY * order * unit, FLOAT32_SAFETY * order * unit
    tight = TIGHT_SAFETY * unit * math.sqrt(0.5) * max(order, 1.0)
    return tight, max(tight, LOOSE_SAFETY * 2 * unit * 1.5)


def _peak(result: Operand) -> float:
    """Return absmax / ||y||: how large one flipped element can be beside the whole."""
    if result.absmax is None or result.l2 is None:
        return min(4 / math.sqrt(max(result.n, 1)), 1.0)
    return result.absmax / max(result.l2, TINY)


def _complex_product(op: OpView, result: Operand) -> bool:
    return result.meta.dtype.startswith("complex") and op.base_name in (
        "mul", "div", "reciprocal", "square", "pow",
    )  # fmt: skip


def _auxiliary(family: Family, op: OpView, output: int) -> bool:
    """Outputs of attention kernels past the first two: seeds and offsets, unwritten without dropout."""
    forward = family.name == "attention" and not op.base_name.endswith("backward")
    return forward and output - op.mutated > 1
