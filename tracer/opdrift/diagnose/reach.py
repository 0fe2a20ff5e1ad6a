"""Whether the difference at the output is what rounding grows to on the way there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from opdrift.bounds import grown, precision_of
from opdrift.bounds.precision import ROUNDOFF
from opdrift.bounds.products import PRODUCT_OPS
from opdrift.bounds.view import base_name
from opdrift.case import Case
from opdrift.compare import dtype_epsilon, number
from opdrift.wording import counted

#: Products of a decoder layer (q, k, v, output, three of a gated FFN), where modules have no numbers to count.
_PRODUCTS_A_LAYER = 7


@dataclass(frozen=True, slots=True)
class Reach:
    """What rounding explains at the output, and how the difference there compares, in a sentence."""

    explained: float
    sentence: str


def reach_of(case: Case, final: float | None) -> Reach | None:
    """Of two runs that differ by rounding alone; None where the output's difference is not known.

    The arithmetic is the coarsest that a product of the left run is computed in: that is where
    differences settle (notes: diagnosis, 3).
    """
    if final is None:
        return None
    found = _depth(case)
    if found is None:
        return None
    roundoff, layers, passed, words = found
    explained = grown(roundoff, layers)
    depth = f"behind {passed} in {words}"
    if final <= explained:
        said = f"{number(final)} at the output {depth}: rounding explains up to {number(explained)}, so nothing else is needed"
    elif case.left.regions.calls or case.right.regions.calls:
        said = (
            f"{number(final)} at the output {depth} is more than rounding usually grows to ({number(explained)}): each op that is"
            " seen is within its bounds, but kernels of compiled code are not seen; they compute something else, or this model"
            " amplifies"
        )
    else:
        said = (
            f"{number(final)} at the output {depth} is more than rounding usually grows to ({number(explained)}), though"
            " every op is within its bounds: this model amplifies (sharp attention, cancellation); look at where the"
            " difference grows"
        )
    return Reach(explained, said)


def _depth(case: Case) -> tuple[float, int, str, str] | None:
    """Of the products that differ: the coarsest unit roundoff, their layers, those and that arithmetic in words."""
    trace = case.left.trace
    rows = np.flatnonzero(case.compared.outputs_differ)
    ops = [
        i for i in case.pairing.left[rows].tolist() if base_name(case.left.name(i)) in _ANY_PRODUCT
    ]
    coarsest: float | None = None
    words = ""
    for signature, op in {int(trace.ops.signature[i]): i for i in ops}.items():
        del signature  # one op of each kind is enough
        view = case.left.views[op]
        dtype = view.output_metas[view.mutated].dtype
        unit = dtype_epsilon(dtype) / 2
        narrow = precision_of(view, view.mutated)
        if narrow != "ieee":
            unit = ROUNDOFF[narrow]
        if unit and (coarsest is None or unit > coarsest):
            coarsest = unit
            words = (
                dtype
                if narrow == "ieee"
                else f"{dtype} with {'TF32' if narrow == 'tf32' else 'bfloat16'} factors"
            )
    blocks = {part for i in ops if (part := _block(case.left.module(i))) is not None}
    if coarsest is None:
        return None
    passed = counted(len(blocks), "layer") if blocks else counted(len(ops), "product")
    return coarsest, len(blocks) or -(-len(ops) // _PRODUCTS_A_LAYER), passed, words


_ANY_PRODUCT = PRODUCT_OPS | {
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
}


def _block(path: str) -> str | None:
    """The numbered part of a model that a path lies in: `layers.3` of `layers.3.fc1`."""
    names = path.split(".")
    for i, name in enumerate(names):
        if name.isdecimal() and i:
            return ".".join(names[: i + 1])
    return None
