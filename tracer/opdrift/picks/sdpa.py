"""One call of scaled_dot_product_attention as torch's chooser sees it, and which backend that takes.

Restates torch 2.13's choosers (notes: kernels, 1 and 2): `select_sdp_backend_cpp` for CPUs, exact; the one for
CUDA as read in its source. Nothing here asks torch: its chooser can print, warn, or end the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

#: torch's names of the backends (`torch.nn.attention.SDPBackend`), by the numbers of its priority order.
FLASH: Final = "FLASH_ATTENTION"
EFFICIENT: Final = "EFFICIENT_ATTENTION"
CUDNN: Final = "CUDNN_ATTENTION"
MATH: Final = "MATH"
OVERRIDEABLE: Final = "OVERRIDEABLE"
CODES: Final = {0: MATH, 1: FLASH, 2: EFFICIENT, 3: CUDNN, 4: OVERRIDEABLE}
#: torch's default order (Context.h:481), and the one that it changes to on sm90 and sm10x.
DEFAULT_ORDER: Final = (1, 2, 0, 3, 4)
CUDNN_FIRST: Final = (3, 1, 2, 0, 4)


@dataclass(frozen=True, slots=True)
class Operand:
    """What the rules need of one tensor."""

    shape: tuple[int, ...]
    last_stride: int
    dtype: str
    requires_grad: bool = False
    nested: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """One call, after autocast.

    Attributes:
        query: And likewise `key` and `value`: as they were passed.
        mask: `attn_mask`, None if none was given.
        dropout: `dropout_p`.
        causal: `is_causal`.
        grouped: `enable_gqa`.
        wants_grad: Autograd records, and query, key or value requires grad.
        device: Type of the device, `cpu` or `cuda`.
    """

    query: Operand
    key: Operand
    value: Operand
    mask: Operand | None = None
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False
    wants_grad: bool = False
    device: str = "cpu"

    @property
    def nested(self) -> bool:
        """Whether an operand is a nested tensor."""
        return self.query.nested or self.key.nested or self.value.nested

    @property
    def empty(self) -> bool:
        """Whether an operand has no elements: torch then computes zeros and chooses nothing."""
        return any(0 in t.shape and not t.nested for t in (self.query, self.key, self.value))


@dataclass(frozen=True, slots=True)
class Switches:
    """State of the process that steers the choice."""

    flash: bool = True
    efficient: bool = True
    cudnn: bool = True
    math: bool = True
    fa3: bool = False
    deterministic: bool = False
    order: tuple[int, ...] = DEFAULT_ORDER


@dataclass(frozen=True, slots=True)
class Gpu:
    """The device that CUDA's rules ask for.

    Attributes:
        major: Of the compute capability; likewise `minor`.
        cudnn: Version of cuDNN as torch counts it, 91600 for 9.16.0; 0 if it is not there.
        cuda: Version of CUDA that torch was built with, 13000 for 13.0.
        cudnn_last: TORCH_CUDNN_SDPA_DEPRIORITIZED is set.
    """

    major: int
    minor: int
    cudnn: int = 0
    cuda: int = 13000
    cudnn_last: bool = False

    @property
    def name(self) -> str:
        """As `sm90`."""
        return f"sm{self.major}{self.minor}"

    def within(self, low: tuple[int, int], high: tuple[int, int]) -> bool:
        """Whether the capability lies in a range, both ends included."""
        return low <= (self.major, self.minor) <= high

    @property
    def prefers_cudnn(self) -> bool:
        """Whether the first choice of a process puts cuDNN first (notes: kernels, 2.2)."""
        return (
            not self.cudnn_last
            and self.cudnn > 91500
            and self.major in (9, 10)
            and (self.cuda >= 13000 or self.minor in (0, 3))
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """What torch chooses for a call.

    Attributes:
        backend: None where torch chooses nothing: an operand is empty, or the call raises.
        refused: For each backend that torch tried before, why it refuses: the first reason decided.
        raises: The exception that the call ends in; None if it runs.
    """

    backend: str | None
    refused: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    raises: str | None = None


class CallRaises(Exception):  # noqa: N818 (it says what torch does, and never leaves `choose`)
    """torch's chooser itself raises for this call."""


def order(switches: Switches, gpu: Gpu) -> tuple[str, ...]:
    """The order in which CUDA tries the backends.

    torch moves cuDNN to the front at the first choice of the process, so a trace that began before it
    holds the default.
    """
    codes = switches.order
    if codes == DEFAULT_ORDER and gpu.prefers_cudnn:
        codes = CUDNN_FIRST
    return tuple(CODES.get(code, f"backend {code}") for code in codes)
