"""What the rounding bounds need to know of one op: arguments, layouts and statistics of its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from opdrift.picks.settings import Settings
from opdrift.records import Argument, TensorArgument, TensorMeta
from opdrift.tracefile.fingerprints import Fingerprint
from opdrift.tracefile.reader import Trace

#: Stands for the norm of an all-zero tensor, so that ratios are large instead of undefined.
TINY = 1e-300


def _no_setting(_name: str, default: Any) -> Any:
    return default


@dataclass(frozen=True, slots=True)
class OpView:
    """One op with the statistics of its tensors.

    Attributes:
        name: `aten.mm.default`.
        arguments: By name, tensors as `TensorArgument`; defaults may be left out.
        inputs: Fingerprints of the tensor arguments, in order; None where the content is not known.
        input_metas: Their layouts.
        outputs: Fingerprints of the outputs: first `mutated` written arguments, then what was returned.
        output_metas: Their layouts.
        mutated: How many of the outputs are written arguments.
        pointwise: torch tags the op as pointwise.
        reduction: torch tags the op as a reduction.
        setting: Asks for a flag that was in force at the op, with a default.
    """

    name: str
    arguments: Mapping[str, Argument]
    inputs: Sequence[Fingerprint | None]
    input_metas: Sequence[TensorMeta]
    outputs: Sequence[Fingerprint | None]
    output_metas: Sequence[TensorMeta]
    mutated: int = 0
    pointwise: bool = False
    reduction: bool = False
    setting: Callable[[str, Any], Any] = _no_setting

    @property
    def base_name(self) -> str:
        """The op without namespace, overload and the underscore of its in-place form: `add`, `_softmax`."""
        return base_name(self.name)

    def tensor(self, *names: str) -> Operand | None:
        """The tensor argument with the first of these names that was given; None if there is none."""
        for name in names:
            if (position := self._position(name)) is not None and position < len(self.input_metas):
                return self.operand(position)
        return None

    def tensor_of(self, name: str, output: int) -> Operand | None:
        """As `tensor`; of a list of tensors, as the foreach forms take, the one that belongs to an output."""
        if (position := self._position(name)) is None:
            return None
        position += output if isinstance(self.arguments[name], tuple) else 0
        return self.operand(position) if position < len(self.input_metas) else None

    def operand(self, position: int) -> Operand:
        """The tensor argument at a position among the tensor arguments."""
        return Operand(self.inputs[position], self.input_metas[position])

    def operands(self) -> Iterator[Operand]:
        """All tensor arguments."""
        return (self.operand(i) for i in range(len(self.input_metas)))

    def result(self, output: int) -> Operand:
        """An output, counted as in `outputs`."""
        return Operand(self.outputs[output], self.output_metas[output])

    def returned(self, position: int) -> Operand | None:
        """What the op returned at a position, the written arguments left out."""
        index = self.mutated + position
        return self.result(index) if index < len(self.output_metas) else None

    def number(self, name: str, default: float) -> float:
        """A number among the arguments."""
        value = self.arguments.get(name)
        return float(value) if isinstance(value, int | float) else default

    def numbers(self, name: str) -> tuple[int, ...]:
        """A list of integers among the arguments; empty if it was not given."""
        value = self.arguments.get(name)
        if isinstance(value, int):
            return (value,)
        if isinstance(value, tuple):
            return tuple(v for v in value if isinstance(v, int))
        return ()

    def _position(self, name: str) -> int | None:
        """Where the tensor argument `name` is among the tensor arguments."""
        position = 0
        for other, argument in self.arguments.items():
            if other == name:
                return position if _tensors(argument) else None
            position += _tensors(argument)
        return None


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor's statistics and layout."""

    fingerprint: Fingerprint | None
    meta: TensorMeta

    @property
    def n(self) -> int:
        """Number of elements."""
        return math.prod(self.meta.shape)

    @property
    def l2(self) -> float | None:
        """Norm over the finite components; None where it is not known."""
        if self.fingerprint is None or not math.isfinite(self.fingerprint.ssq):
            return None
        return math.sqrt(max(self.fingerprint.ssq, 0.0))

    @property
    def rms(self) -> float | None:
        """Root of the mean square; None where it is not known."""
        norm = self.l2
        return None if norm is None else norm / math.sqrt(max(self.n, 1))

    @property
    def absmax(self) -> float | None:
        """Largest magnitude among the finite components; None where it is not known."""
        if self.fingerprint is None or not math.isfinite(self.fingerprint.absmax):
            return None
        return self.fingerprint.absmax

    @property
    def absmin(self) -> float | None:
        """Smallest magnitude among the finite components, at least: 0 where some are above and some below zero."""
        if self.fingerprint is None or not math.isfinite(
            self.fingerprint.min + self.fingerprint.max
        ):
            return None
        return max(self.fingerprint.min, -self.fingerprint.max, 0.0)

    @property
    def mean(self) -> float | None:
        """Mean over the finite components; None where it is not known."""
        if self.fingerprint is None or not math.isfinite(self.fingerprint.sum):
            return None
        return self.fingerprint.sum / max(self.fingerprint.n - self.fingerprint.nonfinite, 1)

    def size(self, dim: int) -> int:
        """Length of a dim, 1 for a dim that a scalar lacks."""
        return self.meta.shape[dim] if -len(self.meta.shape) <= dim < len(self.meta.shape) else 1


class OpViews:
    """Makes the `OpView` of any op of a trace.

    A view has no fingerprint of its own; its statistics are those of a tensor that was fingerprinted
    in the same storage at the same write: exactly, if the view only reorders it, else as an estimate
    (the same largest magnitude, the norm scaled by the number of elements).
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._settings = Settings(trace)
        values = trace.values
        known = np.flatnonzero(values.fingerprint >= 0)
        sizes = trace.fingerprints.n[values.fingerprint[known]]
        # the largest value that was fingerprinted in each storage at each write; of equals the first
        by_size = known[np.lexsort((known, -sizes))]
        keys = values.storage[by_size] << 32 | values.write[by_size]
        self._keys, first = np.unique(keys, return_index=True)
        self._known = by_size[first]

    def __getitem__(self, index: int) -> OpView:
        """The view of the op at an index."""
        op = self._trace.op(index)
        info = op.signature.op
        return OpView(
            name=info.name,
            arguments=dict(op.signature.arguments),
            inputs=[self.statistics(v) for v in op.inputs],
            input_metas=[self.meta(v) for v in op.inputs],
            outputs=[self.statistics(v) for v in op.outputs],
            output_metas=[self.meta(v) for v in op.outputs],
            mutated=op.mutated,
            pointwise=info.pointwise,
            reduction=info.reduction,
            setting=self._settings.before(op.seq),
        )

    def meta(self, value: int) -> TensorMeta:
        """A value's layout."""
        return self._trace.meta(value)

    def statistics(self, value: int) -> Fingerprint | None:
        """A value's fingerprint, or its base's restated for it (digest, sketch and sample left out)."""
        own = self._trace.fingerprint(value)
        if own is not None:
            return own
        values = self._trace.values
        key = values.storage[value] << 32 | values.write[value]
        at = int(np.searchsorted(self._keys, key))
        if at == len(self._keys) or self._keys[at] != key:
            return None
        found = self._trace.fingerprint(int(self._known[at]))
        assert found is not None
        return restated(found, self._trace.meta(value))


def restated(found: Fingerprint, meta: TensorMeta) -> Fingerprint:
    """The statistics that a part of a tensor has if it is like the whole; it has no digest, sketch or sample."""
    components = math.prod(meta.shape) * (2 if meta.dtype.startswith("complex") else 1)
    scale = components / max(found.n, 1)
    return replace(
        found,
        raw=0,
        n=components,
        sum=found.sum * scale,
        ssq=found.ssq * scale,
        sketch=None,
        sample=np.zeros(0, np.uint64),
    )


def base_name(name: str) -> str:
    """`aten.add_.Tensor` -> `add`; the foreach form counts as the op that it repeats."""
    parts = name.split(".")
    op = parts[1] if len(parts) > 1 else name
    if op.endswith("_") and not op.endswith("__"):
        op = op[:-1]
    return op.removeprefix("_foreach_")


def _tensors(argument: Argument) -> int:
    """How many tensors an argument holds."""
    if isinstance(argument, TensorArgument):
        return 1
    return sum(_tensors(a) for a in argument) if isinstance(argument, tuple) else 0
