"""How far rounding alone grows along a smooth model (notes: diagnosis, 3)."""

from __future__ import annotations

import math
from typing import Final

#: In 16 bits and with TF32 the difference of two runs settles at u sqrt(L) after L layers, whatever began it
#: (within 25 % from layer 3 on; decoders of width 512 to 2048, 1 to 24 layers); in float32 at about 6 u L**0.4.
#: Three times as much is explained, and 20 u sqrt(L) in float32.
_SHORT: Final = 3.0
_LONG: Final = 20.0


def grown(roundoff: float, layers: int) -> float:
    """The largest relative difference at the output that rounding explains after so many layers.

    Args:
        roundoff: Unit roundoff of the arithmetic: 2**-8 for bfloat16, 2**-11 for float16 and TF32, 2**-24.
        layers: Blocks that the values passed, at least 1.
    """
    factor = _LONG if roundoff <= 2.0**-24 else _SHORT
    return factor * roundoff * math.sqrt(max(layers, 1))
