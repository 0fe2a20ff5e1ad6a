"""What a log of another tool says about a run: ops with hashes of their tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from opdrift.records import Phase

#: "norm" is an L1 norm in double precision, "xor" torch.hash_tensor (an XOR of 64-bit words),
#: "other" whatever a user's own function gave.
HashKind = Literal["norm", "xor", "other"]
Format = Literal["DebugMode", "torchtitan"]


def words(text: str) -> frozenset[str]:
    """A set of names, written with blanks between them."""
    return frozenset(text.split())


@dataclass(frozen=True, slots=True)
class Hash:
    """One number that stands for a tensor's content."""

    kind: HashKind
    value: float | int | str

    def same(self, other: Hash) -> bool:
        """Equal numbers; two NaN norms count as equal, because they tell nothing."""
        if isinstance(self.value, float) and isinstance(other.value, float):
            both_nan = math.isnan(self.value) and math.isnan(other.value)
            return self.kind == other.kind and (both_nan or self.value == other.value)
        return self == other

    @property
    def nonfinite(self) -> bool:
        """A norm that is NaN or infinite: the tensor holds such values, or its norm overflowed."""
        return isinstance(self.value, float) and not math.isfinite(self.value)


@dataclass(frozen=True, slots=True)
class LoggedTensor:
    """A tensor as a log shows it.

    Attributes:
        text: `float32[3, 16]`; "" where the log does not say.
        hashes: None where it was not hashed.
        statistics: Further numbers by name, such as "L2 norm".
    """

    text: str
    hashes: tuple[Hash, ...] | None
    statistics: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def dtype(self) -> str:
        """`float32`; "" where it is not known."""
        return self.text.partition("[")[0]

    def same(self, other: LoggedTensor) -> bool | None:
        """Whether the hashes agree; None where one side has none of that kind."""
        if self.hashes is None or other.hashes is None:
            return None
        if [h.kind for h in self.hashes] != [h.kind for h in other.hashes]:
            return None
        return all(a.same(b) for a, b in zip(self.hashes, other.hashes, strict=True))

    def distance(self, other: LoggedTensor) -> float | None:
        """How far two norms are apart, relative to the left one: a lower bound of the L1 difference.

        | ||a|| - ||b|| | <= ||a - b||, the reverse triangle inequality. XOR hashes have no distance.
        """
        pairs = [
            (a.value, b.value)
            for a, b in zip(self.hashes or (), other.hashes or (), strict=False)
            if a.kind == b.kind == "norm"
        ]
        if "L2 norm" in self.statistics and "L2 norm" in other.statistics:
            pairs.append((self.statistics["L2 norm"], other.statistics["L2 norm"]))
        found = [_relative(float(a), float(b)) for a, b in pairs]
        return max(found, default=None)


def _relative(left: float, right: float) -> float:
    if left == right or (math.isnan(left) and math.isnan(right)):
        return 0.0
    if not math.isfinite(left) or not math.isfinite(right):
        return math.inf
    return abs(left - right) / abs(left) if left else math.inf


@dataclass(frozen=True, slots=True)
class LoggedOp:
    """One op of a log.

    Attributes:
        seq: Its number in the log, from 1.
        name: As opdrift writes it, `aten.mm.default`; a kernel's own name for a Triton kernel.
        module: Path of the module without the root's class name; "" is the root, or unknown.
        call: Which call of that module, from 0.
        phase: None where the log does not say.
        source: `file:line in function`.
        arguments: Non-tensor arguments as text, by keyword or as "argument 3".
        inputs: Tensor arguments in order.
        outputs: Tensors that it returned.
    """

    seq: int
    name: str
    module: str
    call: int
    phase: Phase | None
    source: str | None
    arguments: Mapping[str, str]
    inputs: tuple[LoggedTensor, ...]
    outputs: tuple[LoggedTensor, ...]

    @property
    def view(self) -> bool:
        """It only looks at its input in another way, so it can neither be at fault nor differ alone."""
        return self.base_name in _VIEWS

    @property
    def overwrites(self) -> bool:
        """It writes over its first argument without reading it."""
        return self.base_name in _OVERWRITING

    @property
    def base_name(self) -> str:
        """The name without namespace and overload: `mm`."""
        parts = self.name.split(".")
        return parts[min(1, len(parts) - 1)]


#: In-place ops that do not look at what they overwrite.
_OVERWRITING = words(
    "copy_ fill_ zero_ set_ uniform_ normal_ bernoulli_ random_ exponential_ cauchy_ geometric_ log_normal_ one_"
)
_VIEWS = words(
    "t transpose permute view _unsafe_view reshape _reshape_alias expand squeeze unsqueeze slice select"
    " split unbind detach alias as_strided diagonal unfold narrow view_as_real view_as_complex"
    " split_with_sizes chunk"
)


@dataclass(frozen=True, slots=True)
class Log:
    """A log that was read.

    Attributes:
        path: As it was given.
        format: Whose it is.
        ops: In order.
        rank: The rank that the file's name tells.
        digits: Significant digits of its norms; None where they are whole.
        left_out: What the log itself says it left out.
    """

    path: str
    format: Format
    ops: tuple[LoggedOp, ...]
    rank: int | None = None
    digits: int | None = None
    left_out: tuple[str, ...] = ()

    @property
    def hashed(self) -> int:
        """How many outputs have a hash."""
        return sum(t.hashes is not None for op in self.ops for t in op.outputs)

    @property
    def kinds(self) -> frozenset[HashKind]:
        """Which kinds of hashes its tensors have."""
        return frozenset(
            h.kind for op in self.ops for t in (*op.inputs, *op.outputs) for h in t.hashes or ()
        )

    @property
    def hashes_inputs(self) -> bool:
        """Whether inputs were hashed as well."""
        return any(t.hashes is not None for op in self.ops for t in op.inputs)
