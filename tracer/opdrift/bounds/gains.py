"""How far an op may magnify a difference of its inputs: G, by family (notes: diagnosis, 2).

Measured on 17,110 receivers in five models and three dtypes, and in isolation at hard points (softmax of
logits with deviation 100: 7.8; layer norm with mean / deviation 1000: 1021; x - y with a gap of 1e-3: 1395).
"""

from __future__ import annotations

import math

from opdrift.bounds.formulas import attention_operands, centring
from opdrift.bounds.products import product
from opdrift.bounds.view import TINY, Operand, OpView


def product_gain(view: OpView, output: int) -> float:
    """G = 8 k / sqrt(rank) + 4."""
    p = product(view, output)
    return 8 * p.excess(view.result(output)) / math.sqrt(p.rank) + 4


def addition_gain(view: OpView, output: int) -> float:
    """G = 6 sqrt(sum ||in||^2) / ||out|| + 2: terms that nearly cancel leave their differences."""
    norms = [o.l2 for o in view.operands()]
    result = view.result(output).l2
    if result is None or any(n is None for n in norms):
        return 4.0
    return 6 * math.sqrt(sum(n * n for n in norms if n is not None)) / max(result, TINY) + 2


def sum_gain(view: OpView, output: int) -> float:
    """G = 8 ||in|| sqrt K / ||out|| + 4, as a product with ones."""
    source, result = view.operand(0), view.result(output)
    if source.l2 is None or result.l2 is None:
        return 4.0
    length = max(source.n / max(result.n, 1), 1)
    return 8 * source.l2 * math.sqrt(length) / max(result.l2, TINY) + 4


def quotient_gain(view: OpView, output: int) -> float:
    """G = (||a|| + absmax(a / b) ||b||) / (absmin b ||a / b||): a divisor near 0 magnifies what differs there.

    To first order, element by element: d(a / b) = da / b - (a / b) db / b.
    """
    above, below = view.tensor_of("self", output), view.tensor_of("other", output)
    result = view.result(output)
    if below is None:  # by a number
        return addition_gain(view, output)
    return _quotient(above, below, result.absmax, 1.0, result.l2)


def added_quotient_gain(view: OpView, output: int) -> float:
    """As `addition_gain` and `quotient_gain`: the quotient's largest element is at most what self and result hold.

    Adam's step is m / (sqrt(v) + eps): for a gradient that is zero but for rounding, a key's bias, both are noise.
    """
    own, result = view.tensor_of("self", output), view.result(output)
    above, below = view.tensor_of("tensor1", output), view.tensor_of("tensor2", output)
    added = addition_gain(view, output)
    if own is None or below is None or own.absmax is None or result.absmax is None:
        return math.inf
    factor = abs(view.number("value", 1.0))
    return added + _quotient(above, below, own.absmax + result.absmax, factor, result.l2)


def _quotient(
    above: Operand | None, below: Operand, largest: float | None, factor: float, norm: float | None
) -> float:
    """The gain of `factor` a / b, of which no element is above `largest`, in something of this norm."""
    if above is None or above.l2 is None or below.l2 is None or not below.absmin:
        return math.inf
    if largest is None or norm is None:
        return math.inf
    return (factor * above.l2 + largest * below.l2) / (below.absmin * max(norm, TINY))


def softmax_gain(view: OpView, _output: int) -> float:
    """G = 4 (absmax + 1)."""
    return 4 * ((view.operand(0).absmax or 0.0) + 1)


def periodic_gain(view: OpView, _output: int) -> float:
    """G = 4 (absmax + 2), for exp, sin and powers."""
    return 4 * (max((o.absmax or 0.0 for o in view.operands()), default=0.0) + 2)


def attention_gain(view: OpView, _output: int) -> float:
    """G = 8 (1 + absmax q absmax k sqrt D)."""
    query, key, _ = attention_operands(view)
    if query is None or key is None or query.absmax is None or key.absmax is None:
        return math.inf
    return 8 * (1 + query.absmax * key.absmax * math.sqrt(query.size(-1)))


def norm_gain(view: OpView, output: int) -> float:
    """G = 4 (2 + (1 / rms out + 1)(1 + absmax mean absmax rstd)): small rows and large means magnify."""
    rms = view.result(output).rms
    small = 1.0 if not rms else 1 / rms
    return 4 * (2 + (small + 1) * (1 + centring(view, output)))


def unlimited_gain(_view: OpView, _output: int) -> float:
    """For ops whose gain the record does not bound."""
    return math.inf
