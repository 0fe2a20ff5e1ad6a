"""How far two right answers of an op may be apart, family by family: the terms A and L.

A is the relative L2 difference between two orders of the same arithmetic with float32 accumulation, in
units of 2**-24; L is the conditioning of an intermediate that one form rounds to the output's dtype and
the other does not, in units of twice the unit roundoff. Forms follow from the probabilistic analysis of
summation (Higham and Mary 2019: sqrt K instead of K; Blanchard, Higham and Mary 2020: blocked kernels do
better), the constants were measured on 86,592 comparisons of legitimate alternatives (notes: diagnosis, 1).
A sequential sum of zero-mean data errs by about u ||A|| ||B|| with no K left, one of one-signed data by
u sqrt(K) ||C||: hence conditioning + sqrt K.

K is always the number of terms that make one output element.
"""

from __future__ import annotations

import math

from opdrift.bounds.products import product
from opdrift.bounds.view import TINY, Operand, OpView

# ---- matmul, linear, convolution ---------------------------------------------------------------------


def product_order(view: OpView, output: int) -> float:
    """A = (||A|| ||B|| + ||bias||) / ||C|| + sqrt K; worst measured ratio 0.33 at every K and conditioning."""
    p, result = product(view, output), view.result(output)
    return p.excess(result) + p.bias_part(result) + math.sqrt(p.length)


def product_intermediate(view: OpView, output: int) -> float:
    """L = 1 + (||A|| ||B|| / sqrt K + ||bias||) / ||C||: a partial sum or the unfused product was rounded."""
    p, result = product(view, output), view.result(output)
    return 1 + p.excess(result) / math.sqrt(p.length) + p.bias_part(result)


# ---- attention -----------------------------------------------------------------------------------------


def attention_order(view: OpView, output: int) -> float:
    """A = (1 + lg) (rms v sqrt n / ||o|| + sqrt S), lg the rms logit: norms of q's and k's rows, scaled."""
    query, key, value = attention_operands(view)
    length = _keys(view, key)
    if output - view.mutated == 1:  # the log of the sum of the exponentials
        return (1 + _logit(view, query, key)) * (4 + math.sqrt(length))
    spread = _spread(value, view.result(output), 1.0)
    return (1 + _logit(view, query, key)) * (spread + math.sqrt(length))


def attention_intermediate(view: OpView, output: int) -> float:
    """L = 1 + lg + rms v sqrt(n / S) / ||o||: scores or weights were rounded."""
    query, key, value = attention_operands(view)
    spread = _spread(value, view.result(output), 1.0) if output - view.mutated == 0 else 1.0
    return 1 + _logit(view, query, key) + spread / math.sqrt(_keys(view, key))


def attention_operands(view: OpView) -> tuple[Operand | None, Operand | None, Operand | None]:
    """Query, key and value."""
    return view.tensor("query"), view.tensor("key"), view.tensor("value")


def fused_layer_order(view: OpView, _output: int) -> float:
    """A whole attention block or encoder layer in one op: eight steps of width K, at random conditioning.

    Derived from the families of its parts; worst measured ratio 0.03.
    """
    return 8 * (4 + math.sqrt(view.operand(0).size(-1)))


def _spread(value: Operand | None, result: Operand, fallback: float) -> float:
    """Return rms v sqrt(n_out) / ||o||: how much the averaging over keys cancelled."""
    if value is None or value.rms is None or result.l2 is None:
        return fallback * 4
    return value.rms * math.sqrt(result.n) / max(result.l2, TINY)


def _logit(view: OpView, query: Operand | None, key: Operand | None) -> float:
    if query is None or key is None or query.rms is None or key.rms is None:
        return 4.0
    width = max(query.size(-1), 1)
    return query.rms * key.rms * width * view.number("scale", 1 / math.sqrt(width))


def _keys(view: OpView, key: Operand | None) -> int:
    if key is None:
        return 1
    # The varlen kernels take (tokens, heads, width) and say how long the longest sample is.
    return max(int(view.number("max_k", view.number("max_seqlen_k", key.size(-2)))), 1)


# ---- softmax -------------------------------------------------------------------------------------------


def softmax_order(view: OpView, _output: int) -> float:
    """A = 4 + ln K + 2 min(absmax, 4 + ln K): exp magnifies a rounded argument, up to what still counts."""
    source = view.operand(0)
    log = 4 + math.log(_along(view, source))
    absmax = source.absmax
    return log + 2 * (log if absmax is None else min(absmax, log))


def log_softmax_order(view: OpView, output: int) -> float:
    """A = 4 + ln K + 2 absmax_in / max(1, absmax_out)."""
    source, result = view.operand(0), view.result(output)
    base = 4 + math.log(_along(view, source))
    if source.absmax is None or result.absmax is None:
        return 2 * base
    return base + 2 * source.absmax / max(1.0, result.absmax)


def softmax_backward_order(view: OpView, output: int) -> float:
    """A = (4 + ln K)(1 + max y ||g|| / ||dx||): dx = y (g - sum g y), so the parts are at most max y ||g||."""
    gradient, probabilities = view.operand(0), view.tensor("output")
    absmax = 1.0 if probabilities is None or probabilities.absmax is None else probabilities.absmax
    return (4 + math.log(_along(view, gradient))) * (
        1 + absmax * _over(gradient, view.result(output))
    )


def log_softmax_backward_order(view: OpView, output: int) -> float:
    """A = (4 + ln K)(1 + ||g|| / ||dx||): dx = g - exp(y) sum g."""
    gradient = view.operand(0)
    return (4 + math.log(_along(view, gradient))) * (1 + _over(gradient, view.result(output)))


def loss_order(view: OpView, output: int) -> float:
    """A = 4 + sqrt K: terms of one sign, averaged or added."""
    source, result = view.operand(0), view.result(output)
    return 4 + math.sqrt(max(source.n / max(result.n, 1), 1))


def _along(view: OpView, source: Operand) -> int:
    """The length of the dim that the op works along."""
    dim = view.arguments.get("dim")
    return max(source.size(dim if isinstance(dim, int) else -1), 1)


# ---- normalisation ---------------------------------------------------------------------------------------


def layer_norm_order(view: OpView, output: int) -> float:
    """A = 2 + K**(1/4) + m, m = absmax(mean) absmax(rstd): centring cancels."""
    length = math.prod(view.numbers("normalized_shape")) or 1
    return 2 + _fourth_root(length) + centring(view, output)


def group_norm_order(view: OpView, output: int) -> float:
    """A = 2 + K**(1/4) + m + 4 m**2: channels-last kernels take E[x^2] - E[x]^2 (95 times too small without)."""
    m = centring(view, output)
    return 2 + _fourth_root(_group_length(view)) + m + 4 * m * m


def norm_intermediate(view: OpView, output: int) -> float:
    """L = 2 + m: the centred value was rounded."""
    return 2 + centring(view, output)


def rms_norm_order(view: OpView, _output: int) -> float:
    """A = 2 + K**(1/4)."""
    length = math.prod(view.numbers("normalized_shape")) or view.operand(0).size(-1)
    return 2 + _fourth_root(length)


def batch_norm_order(view: OpView, output: int) -> float:
    """A as for group norm in training; 3 + ||scale mean|| / ||y|| in eval, evaluated as scale x + shift."""
    if view.arguments.get("training", view.arguments.get("train")):
        return group_norm_order(view, output)
    mean, var, weight = (view.tensor(n) for n in ("running_mean", "running_var", "weight"))
    result = view.result(output)
    if mean is None or var is None or mean.rms is None or var.mean is None or not result.l2:
        return 6.0
    scale = (1.0 if weight is None or weight.rms is None else weight.rms) / math.sqrt(
        max(var.mean + view.number("eps", 1e-5), TINY)
    )
    return 3 + scale * mean.rms * math.sqrt(result.n) / result.l2


def norm_backward_order(view: OpView, output: int) -> float:
    """A of gradients: (4 + K**(1/4) + m)(1 + ||g|| rms w rms rstd / ||dx||), sums over the rows for weight and bias.

    dx = rstd (g w - mean(g w) - x_hat mean(g w x_hat)): two subtractions, and x_hat as in the forward.
    """
    gradient, result = view.operand(0), view.result(output)
    m = centring(view, output)
    if output - view.mutated > 0:
        rows = gradient.n / max(result.n, 1)
        return (1 + m) * (_over(gradient, result) + 1) * math.sqrt(max(rows, 1))
    weight, rstd = view.tensor("weight"), view.tensor("rstd", "save_invstd")
    scale = 1.0
    for operand in (weight, rstd):
        scale *= 1.0 if operand is None or operand.rms is None else operand.rms
    length = max(gradient.n / max(rstd.n, 1) if rstd else 1, 1)
    return (4 + _fourth_root(length) + m) * (1 + scale * _over(gradient, result))


def centring(view: OpView, _output: int) -> float:
    """Return m = absmax(mean) absmax(rstd): how much larger the mean is than the deviation."""
    forward = view.returned(1), view.returned(2)
    backward = view.tensor("mean", "save_mean"), view.tensor("rstd", "save_invstd")
    for mean, rstd in (backward, forward):
        if mean and rstd and mean.absmax is not None and rstd.absmax is not None:
            return mean.absmax * rstd.absmax
    source = view.tensor("input", "self")
    if source is None or source.mean is None or source.rms is None:
        return 4.0
    variance = source.rms**2 - source.mean**2
    return abs(source.mean) / math.sqrt(max(variance, 1e-12 * source.rms**2, TINY))


def _group_length(view: OpView) -> float:
    channels, places, groups = (view.number(n, 0) for n in ("C", "HxW", "group"))
    if channels and places and groups:
        return channels * places / groups
    source = view.tensor("input", "self")
    if source is None:
        return 1.0
    return max(source.n / max(source.size(1), 1), 1)


def gives_mean(view: OpView, output: int) -> bool:
    """Whether an output of a norm, `var_mean` or `std_mean` is the mean, which may cancel to nearly 0.

    A norm returns (result, mean, rstd), after the running mean and variance that it may have updated.
    """
    name = view.base_name
    if name.endswith("backward") or name in ("_fused_rms_norm", "rms_norm"):
        return False
    if "norm" not in name and name not in ("var_mean", "std_mean"):
        return False
    return output == 0 if output < view.mutated else output - view.mutated == 1


# ---- reductions -----------------------------------------------------------------------------------------


def sum_order(view: OpView, output: int) -> float:
    """A = ||x|| sqrt K / ||y|| + sqrt K."""
    length = _terms(view, output)
    return (_over(view.operand(0), view.result(output)) + 1) * math.sqrt(length)


def sum_intermediate(view: OpView, output: int) -> float:
    """L = 1 + ||x|| / ||y||: a partial sum was rounded."""
    return 1 + _over(view.operand(0), view.result(output))


def mean_order(view: OpView, output: int) -> float:
    """A = ||x|| / (sqrt K ||y||) + sqrt K."""
    length = _terms(view, output)
    return _over(view.operand(0), view.result(output)) / math.sqrt(length) + math.sqrt(length)


def mean_intermediate(view: OpView, output: int) -> float:
    """L = 1 + ||x|| / (K ||y||): a partial sum was rounded."""
    return 1 + _over(view.operand(0), view.result(output)) / _terms(view, output)


def cumsum_order(view: OpView, output: int) -> float:
    """A = ||x|| K / ||y|| + sqrt K."""
    source = view.operand(0)
    length = _along(view, source)
    return _over(source, view.result(output)) * length + math.sqrt(length)


def var_order(view: OpView, output: int) -> float:
    """A = sqrt K + 2 mean rms sqrt(n_out) / ||y||: the mean is taken off before squaring."""
    source, result = view.operand(0), view.result(output)
    length = math.sqrt(_terms(view, output))
    if source.mean is None or source.rms is None or result.l2 is None:
        return 8 * length
    return length + 2 * abs(source.mean) * source.rms * math.sqrt(result.n) / max(result.l2, TINY)


def var_intermediate(view: OpView, _output: int) -> float:
    """L = 2 + mean / rms: the mean was rounded."""
    source = view.operand(0)
    return 2 + (abs(source.mean) / source.rms if source.mean is not None and source.rms else 4.0)


def root_length_order(view: OpView, output: int) -> float:
    """A = sqrt K: squares or factors, nothing cancels."""
    return math.sqrt(_terms(view, output))


def scatter_order(view: OpView, output: int) -> float:
    """A = ||x|| sqrt K / ||y|| + sqrt K, K = rows per target."""
    length = _rows_per_target(view, output)
    return (_over(_source(view), view.result(output)) + 1) * math.sqrt(length)


def scatter_intermediate(view: OpView, output: int) -> float:
    """L = ||x|| sqrt K / ||y|| + K: adding to a 16-bit total stagnates (10,000 rows of mean 3: 0.93 apart)."""
    length = _rows_per_target(view, output)
    return _over(_source(view), view.result(output)) * math.sqrt(length) + length


def _source(view: OpView) -> Operand:
    found = view.tensor("source", "src", "values", "grad_output", "grad")
    return view.operand(0) if found is None else found


def _rows_per_target(view: OpView, output: int) -> float:
    """On average; of an embedding's gradient only the rows that were hit count (the others are zero)."""
    source, result = _source(view), view.result(output)
    touched = float(result.n)
    if result.fingerprint is not None and view.base_name.endswith("backward"):
        touched = max(result.n - result.fingerprint.zero, 1)
    return max(source.n / max(touched, 1), 1)


def _terms(view: OpView, output: int) -> float:
    return max(view.operand(0).n / max(view.result(output).n, 1), 1)


# ---- the rest --------------------------------------------------------------------------------------------


def rnn_order(view: OpView, output: int) -> float:
    """A = sqrt(K steps): a product of width K in each step."""
    return math.sqrt(
        max(view.result(output).size(-1), 1) * max(view.operand(0).meta.shape, default=1)
    )


def rnn_backward_order(view: OpView, _output: int) -> float:
    """A = 3 (sqrt K + sqrt N): products of width K in each step, sums over N steps of all samples.

    Measured against float64 on 162 LSTMs: at most 0.91 of it (tests/tracer/test_bounds_rnn.py).
    """
    inputs, hidden = view.operand(0), view.number("hidden_size", 1)
    width = max(4 * hidden, inputs.size(-1), 1)
    return 3 * (math.sqrt(width) + math.sqrt(inputs.n / max(inputs.size(-1), 1)))


def periodic_order(view: OpView, _output: int) -> float:
    """A = 4 + absmax_in: exp, sin and powers magnify a rounded argument by its size."""
    return 4 + max((o.absmax or 0.0 for o in view.operands()), default=0.0)


def tailed_order(view: OpView, output: int) -> float:
    """A = 4 + 4 ||x|| / ||y||: a tail that is small beside its argument (gelu, silu, erf; gradients by them)."""
    return 4 + 4 * _over(view.operand(0), view.result(output))


def interpolation_order(view: OpView, output: int) -> float:
    """A = 8 + size: weights come from coordinates as large as the image. Worst measured ratio 0.13 of it."""
    return 8 + max(view.result(output).meta.shape[2:], default=1)


def fft_order(view: OpView, _output: int) -> float:
    """A = 4 + 2 log2 K: unitary butterflies, log2 K of them (Higham 2002, 24.1). Worst measured ratio 0.1."""
    return 4 + 2 * math.log2(max(view.operand(0).n, 2))


def distance_order(view: OpView, output: int) -> float:
    """A = sqrt K + (rms x^2 + rms y^2) K / rms d^2: x^2 + y^2 - 2 x y cancels. Worst measured ratio 0.6."""
    left, right, result = view.operand(0), view.operand(1), view.result(output)
    length = max(left.size(-1), 1)
    if left.rms is None or right.rms is None or not result.rms:
        return 8 * math.sqrt(length)
    return math.sqrt(length) + (left.rms**2 + right.rms**2) * length / result.rms**2


def unknown_order(view: OpView, output: int) -> float:
    """A = 8 + sqrt K + 4 ||x|| / ||y|| over the largest input, for an op that the table does not know."""
    result = view.result(output)
    inputs = list(view.operands())
    length = max((o.n for o in inputs), default=1) / max(result.n, 1)
    over = max((_over(o, result) for o in inputs), default=1.0)
    return 8 + math.sqrt(max(length, 1)) + 4 * over


def _over(source: Operand, result: Operand) -> float:
    """||source|| / ||result||; 4 where a norm is not known."""
    if source.l2 is None or result.l2 is None:
        return 4.0
    return source.l2 / max(result.l2, TINY)


def _fourth_root(length: float) -> float:
    return math.sqrt(math.sqrt(length))
