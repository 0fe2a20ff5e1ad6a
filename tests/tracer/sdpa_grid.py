"""Calls of scaled_dot_product_attention along every axis that torch's CPU chooser looks at, and some it does not.

A call is made from a point of the grid; its facts are taken from the tensors themselves, as the chooser
gets them after autocast.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (as torch writes it)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from opdrift.picks.sdpa import Facts, Operand, Switches

Shape = tuple[int, ...]

#: Name -> shapes of query, key and value.
SHAPES: Final[dict[str, tuple[Shape, Shape, Shape]]] = {
    "self": ((2, 4, 8, 16),) * 3,
    "cross": ((2, 4, 8, 16), (2, 4, 12, 16), (2, 4, 12, 16)),
    "one query": ((2, 4, 1, 16), (2, 4, 8, 16), (2, 4, 8, 16)),
    "one key": ((2, 4, 8, 16), (2, 4, 1, 16), (2, 4, 1, 16)),
    "head 1": ((2, 4, 8, 1),) * 3,
    "head 300": ((1, 2, 4, 300),) * 3,
    "head 7": ((1, 2, 4, 7),) * 3,
    "value head": ((2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 32)),
    "key head": ((2, 4, 8, 16), (2, 4, 8, 8), (2, 4, 8, 16)),
    "2d": ((8, 16),) * 3,
    "3d": ((4, 8, 16),) * 3,
    "5d": ((1, 2, 4, 8, 16),) * 3,
    "mixed rank": ((2, 4, 8, 16), (4, 8, 16), (4, 8, 16)),
    "gqa 4:2": ((2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16)),
    "mqa 4:1": ((2, 4, 8, 16), (2, 1, 8, 16), (2, 1, 8, 16)),
    "gqa 4:3": ((2, 4, 8, 16), (2, 3, 8, 16), (2, 3, 8, 16)),
    "gqa k2 v4": ((2, 4, 8, 16), (2, 2, 8, 16), (2, 4, 8, 16)),
    "kv batch 1": ((2, 4, 8, 16), (1, 4, 8, 16), (1, 4, 8, 16)),
    "batch 3:2": ((3, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16)),
    "no batch": ((0, 4, 8, 16),) * 3,
    "no query": ((2, 4, 0, 16), (2, 4, 8, 16), (2, 4, 8, 16)),
    "no keys": ((2, 4, 8, 16), (2, 4, 0, 16), (2, 4, 0, 16)),
    "no head": ((2, 4, 8, 0),) * 3,
    "batch 15": ((15, 8, 8, 8),) * 3,
    "batch 1": ((1, 8, 8, 8),) * 3,
}
#: "dtype sizes [grad|strided]"; the sizes are of batch, heads, L queries and S keys.
MASKS: Final = (
    "none", "bool LS", "bool 11LS", "bool B11S", "bool BHLS", "same LS", "same B1LS", "f32 LS", "f64 LS",
    "same 1S", "same L1", "same BLS", "same 5d", "same 1d", "same bad", "same b3", "same LS grad",
    "same BHLS grad", "same LS strided", "i64 LS",
)  # fmt: skip
DTYPES: Final = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.complex64,
)
LAYOUTS: Final = ("dense", "bthd", "last2", "transposed")
BACKENDS: Final[dict[str, list[SDPBackend] | None]] = {
    "default": None,
    "math": [SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "overrideable": [SDPBackend.OVERRIDEABLE],
    "math,flash": [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION],
    "efficient,math": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}
GRADS: Final = ("none", "q", "kv", "no_grad q", "inference")
#: Types that autocast casts; float64 is none of them.
_CASTABLE: Final = (torch.float32, torch.float16, torch.bfloat16)


class Point(NamedTuple):
    """One place of the grid."""

    shape: str
    mask: str
    dtype: torch.dtype
    layout: str
    backend: str
    grad: str
    dropout: float
    causal: bool
    grouped: bool
    scale: float | None
    autocast: bool


AXES: Final[tuple[tuple[Any, ...], ...]] = (
    tuple(SHAPES),
    MASKS,
    DTYPES,
    LAYOUTS,
    tuple(BACKENDS),
    GRADS,
    (0.0, 0.1, 1.0),
    (False, True),
    (False, True),
    (None, 0.5, -1.0),
    (False, True),
)


def points(limit: int, seed: int = 0) -> Iterator[Point]:
    """Every shape with every mask, dtype and enable_gqa; then points with two odd axes, and random ones."""
    rng = random.Random(seed)
    fixed = [
        Point(shape, mask, dtype, "dense", "default", "none", 0.0, False, grouped, None, False)
        for shape, mask, dtype, grouped in itertools.product(
            AXES[0], AXES[1], DTYPES[:4], (False, True)
        )
    ]
    rng.shuffle(fixed)
    yield from fixed[:limit]
    for _ in range(limit - len(fixed)):
        if rng.random() < 0.75:
            masks = MASKS[:9] if rng.random() < 0.6 else MASKS
            chosen = [rng.choice(AXES[0]), rng.choice(masks), torch.float32, "dense", "default"]
            chosen += ["none", 0.0, False, False, None, False]
            for axis in rng.sample(range(2, len(AXES)), 2):
                chosen[axis] = rng.choice(AXES[axis])
            yield Point(*chosen)
        else:
            yield Point(*(rng.choice(axis) for axis in AXES))


@dataclass(frozen=True)
class Call:
    """A call, ready to be made."""

    point: Point
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None

    @classmethod
    def at(cls, point: Point) -> Call:
        """The call of a point."""
        shapes = SHAPES[point.shape]
        query = _tensor(shapes[0], point, grad="q" in point.grad)
        key, value = (_tensor(s, point, grad=point.grad == "kv") for s in shapes[1:])
        return cls(point, query, key, value, _mask(point))

    def __call__(self) -> Tensor:
        """Make it."""
        return F.scaled_dot_product_attention(
            self.query, self.key, self.value, self.mask, **self._options()
        )

    def _options(self) -> dict[str, Any]:
        return {
            "dropout_p": self.point.dropout,
            "is_causal": self.point.causal,
            "scale": self.point.scale,
            "enable_gqa": self.point.grouped,
        }

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """The switches and modes of the point."""
        with contextlib.ExitStack() as stack:
            backends = BACKENDS[self.point.backend]
            if backends:
                stack.enter_context(sdpa_kernel(backends, set_priority="," in self.point.backend))
            if self.point.grad.startswith("no_grad"):
                stack.enter_context(torch.no_grad())
            if self.point.grad == "inference":
                stack.enter_context(torch.inference_mode())
            if self.point.autocast:
                stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            yield

    def facts(self) -> Facts:
        """What the chooser sees; to be asked within `settings`."""
        query, key, value = (_operand(t, self._cast) for t in (self.query, self.key, self.value))
        return Facts(
            query,
            key,
            value,
            None if self.mask is None else _operand(self.mask, self._cast),
            dropout=self.point.dropout,
            causal=self.point.causal,
            grouped=self.point.grouped,
            wants_grad=torch.is_grad_enabled()
            and any(t.requires_grad for t in (self.query, self.key, self.value)),
        )

    def torchs_choice(self) -> str:
        """What `torch._fused_sdp_choice` answers, which knows no autocast; "raises" if it does."""
        query, key, value = (self._cast(t) for t in (self.query, self.key, self.value))
        mask = None if self.mask is None else self._cast(self.mask)
        try:
            number = torch._fused_sdp_choice(query, key, value, mask, **self._options())
        except (RuntimeError, IndexError):
            return "raises"
        return SDPBackend(number).name

    def _cast(self, tensor: Tensor) -> Tensor:
        """As autocast does: its cache casts float32 leaves with grad enabled, whatever the grad mode."""
        if not self.point.autocast or tensor.dtype not in _CASTABLE[:2]:
            return tensor
        cached = tensor.dtype == torch.float32 and tensor.is_leaf and not tensor._is_view()
        with torch.set_grad_enabled(torch.is_grad_enabled() or cached):
            return tensor.to(torch.bfloat16)


def switches() -> Switches:
    """Those in force."""
    return Switches(
        flash=torch.backends.cuda.flash_sdp_enabled(),
        efficient=torch.backends.cuda.mem_efficient_sdp_enabled(),
        cudnn=torch.backends.cuda.cudnn_sdp_enabled(),
        math=torch.backends.cuda.math_sdp_enabled(),
    )


def _operand(tensor: Tensor, cast: Callable[[Tensor], Tensor]) -> Operand:
    tensor = cast(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    stride = tensor.stride(-1) if tensor.dim() else 1
    return Operand(tuple(tensor.shape), stride, dtype, tensor.requires_grad)


def _tensor(shape: Shape, point: Point, *, grad: bool) -> Tensor:
    if point.layout == "last2" and shape[-1] > 0:
        tensor = torch.ones(*shape[:-1], shape[-1] * 2).to(point.dtype)[..., ::2]
    elif point.layout == "bthd" and len(shape) == 4:
        tensor = torch.ones(shape[0], shape[2], shape[1], shape[3]).to(point.dtype).transpose(1, 2)
    elif point.layout == "transposed":
        tensor = torch.ones(*shape[:-2], shape[-1], shape[-2]).to(point.dtype).transpose(-1, -2)
    else:
        tensor = torch.ones(shape).to(point.dtype)
    if grad and (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.detach().requires_grad_()
    return tensor


def _mask(point: Point) -> Tensor | None:
    if point.mask == "none":
        return None
    kind, name, *rest = point.mask.split()
    query, key, _ = SHAPES[point.shape]
    batch = query[0] if len(query) == 4 else 1
    heads = query[-3] if len(query) >= 3 else 1
    length, keys = query[-2], key[-2]
    size = {
        "LS": (length, keys),
        "11LS": (1, 1, length, keys),
        "B11S": (batch, 1, 1, keys),
        "BHLS": (batch, heads, length, keys),
        "B1LS": (batch, 1, length, keys),
        "1S": (1, keys),
        "L1": (length, 1),
        "BLS": (heads, length, keys),
        "5d": (1, 1, 1, length, keys),
        "1d": (keys,),
        "bad": (length + 1, keys),
        "b3": (batch + 1, 1, 1, keys),
    }[name]
    dtype = {
        "bool": torch.bool,
        "same": point.dtype,
        "f32": torch.float32,
        "f64": torch.float64,
        "i64": torch.int64,
    }[kind]
    if "strided" in rest:
        return torch.zeros(*size[:-1], size[-1] * 2).to(dtype)[..., ::2]
    mask = torch.ones(size).to(dtype)
    if "grad" in rest and (mask.is_floating_point() or mask.is_complex()):
        mask.requires_grad_()
    return mask
