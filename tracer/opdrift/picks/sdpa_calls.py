"""What the trace holds of a call of scaled_dot_product_attention: facts, switches, device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from opdrift.picks.answers import TorchsAnswers
from opdrift.picks.attention import AttentionRegion
from opdrift.picks.sdpa import (
    DEFAULT_ORDER,
    FLASH,
    MATH,
    Choice,
    Facts,
    Gpu,
    Operand,
    Switches,
    order,
)
from opdrift.picks.sdpa_rules import CPU_FLASH, Rule, choose, cuda_rules, objections
from opdrift.picks.settings import Settings
from opdrift.picks.values import Flow
from opdrift.records import (
    GRAD_ENABLED,
    MASK_GRAD,
    OPERAND_GRAD,
    Argument,
    TensorArgument,
    TensorMeta,
)

#: Said of a backend that the rules would have taken.
UNKNOWN: Final = "torch refused it, for a reason that the trace does not hold"
#: What torch's own check, asked after the op, adds to that.
_REFUSES: Final = "torch's own check refuses it, for a reason that opdrift does not know"
_TAKES: Final = "torch refused it, but its own check takes what the op got: heads may have been padded, or a mask expanded, in between"
_CONFIRMED: Final = " (confirmed by torch)"
_DENIED: Final = " (by opdrift's rules; torch's own check, asked after the op, takes it)"


@dataclass(frozen=True, slots=True)
class SdpaCall:
    """One call, with what it was chosen by.

    Attributes:
        facts: Of the call.
        switches: In force at it.
        gpu: None on a CPU, and where it is not known or none that the rules are for.
        answers: Backend -> whether torch, asked after the op, would have let it compute the call.
    """

    facts: Facts
    switches: Switches
    gpu: Gpu | None
    answers: Mapping[str, bool] = field(default_factory=dict[str, bool])

    @property
    def judged(self) -> bool:
        """Whether there are rules for its device."""
        return self.facts.device == "cpu" or (self.facts.device == "cuda" and self.gpu is not None)

    def choice(self) -> Choice | None:
        """What torch's rules say; None where they ask for what is not known."""
        return choose(self.facts, self.switches, self.gpu) if self.judged else None

    def taken(self) -> str | None:
        """The backend that torch takes, by its own answers where it was asked; None where that is not known."""
        if not self.answers:
            choice = self.choice()
            return None if choice is None else choice.backend
        if not self.judged:
            return None  # the order of backends is not known
        for backend in self._tried():
            if self.answers.get(backend) or (backend == MATH and self.switches.math):
                return backend
        return None

    def refused_before(self, backend: str) -> dict[str, str]:
        """Backends that torch tries before one that ran, and why each refuses."""
        if not self.judged:
            return {
                name: _REFUSES
                for name, takes in self.answers.items()
                if not takes and name != backend
            }
        found: dict[str, str] = {}
        for other in self._tried():
            if other == backend:
                return found
            if other == MATH or (rules := self._rules(other)) is None:
                continue
            why = objections(rules, self.facts, self.switches, self.gpu or Gpu(0, 0))
            found[other] = self._said("; also ".join(why), self.answers.get(other))
        return {}  # the backend is none that torch tries, so its order says nothing

    def _said(self, why: str, takes: bool | None) -> str:
        """What the rules object, beside what torch's own check says of it."""
        if takes is None:
            return why or UNKNOWN
        if why:
            return why + (_DENIED if takes else _CONFIRMED)
        return _TAKES if takes else _REFUSES

    def _tried(self) -> tuple[str, ...]:
        if self.gpu is None:
            return (FLASH, MATH)
        return order(self.switches, self.gpu)

    def _rules(self, backend: str) -> tuple[Rule, ...] | None:
        if self.gpu is None:
            return CPU_FLASH
        return cuda_rules(backend, nested=self.facts.nested)


class SdpaCalls:
    """Reads the calls of one trace."""

    def __init__(self, flow: Flow, settings: Settings) -> None:
        self._flow = flow
        self._settings = settings
        self._answers = TorchsAnswers(flow.trace)

    def of_op(self, index: int) -> SdpaCall | None:
        """The call that a fused op is, or that is seen whole; None if it is no such op.

        Ops below those (`_flash_attention_forward`) have the dims of their operands in another order, and are called
        for nested tensors and by programs themselves: no choice of SDPA's led to them.
        """
        if "scaled_dot_product" not in self._flow.name(index):
            return None
        op = self._flow.trace.op(index)
        arguments = {**op.signature.op.defaults, **dict(op.signature.arguments)}
        operands = [_operand(arguments.get(name)) for name in ("query", "key", "value")]
        query, key, value = operands
        if query is None or key is None or value is None:
            return None
        mask = _operand(arguments.get("attn_mask") or arguments.get("attn_bias"))
        if mask is not None and op.flags & MASK_GRAD:
            mask = replace(mask, requires_grad=True)
        grouped = arguments.get("enable_gqa")
        call = self._call(
            Facts(
                query,
                key,
                value,
                mask,
                dropout=_float(arguments.get("dropout_p")),
                causal=bool(arguments.get("is_causal")),
                grouped=_grouped(query, key) if grouped is None else bool(grouped),
                wants_grad=_wants_grad(op.flags),
                device=_device(arguments.get("query")),
            ),
            op.seq,
        )
        return replace(call, answers=self._answers.of(index))

    def of_region(self, region: AttentionRegion) -> SdpaCall:
        """The call that torch's math path computed."""
        flow, trace = self._flow, self._flow.trace
        mask = None if region.mask is None else _layout(flow.meta(region.mask))
        if mask is not None and region.added is not None:
            grad = bool(trace.ops.flags[region.added] & MASK_GRAD)
            mask = replace(mask, requires_grad=grad and mask.dtype != "bool")
        flags = int(trace.ops.flags[region.softmax])
        return self._call(
            Facts(
                _layout(flow.meta(region.query)),
                _layout(flow.meta(region.key)),
                _layout(flow.meta(region.value)),
                mask,
                dropout=region.dropout,
                causal=region.causal,
                grouped=region.grouped,
                wants_grad=_wants_grad(flags),
                device=flow.meta(region.query).device.partition(":")[0],
            ),
            # switches that changed are marked at the softmax, which is looked at
            int(trace.ops.seq[region.softmax]),
        )

    def _call(self, facts: Facts, seq: int) -> SdpaCall:
        flag = self._settings.before(seq)
        strict = flag("deterministic_algorithms", False) is True
        tried = flag("sdp.priority", None)
        switches = Switches(
            flash=flag("sdp.flash", True) is not False,
            efficient=flag("sdp.mem_efficient", True) is not False,
            cudnn=flag("sdp.cudnn", True) is not False,
            math=flag("sdp.math", True) is not False,
            fa3=flag("sdp.fa3", False) is True,
            deterministic=strict and flag("deterministic_algorithms_warn_only", False) is not True,
            order=tuple(tried) if isinstance(tried, list | tuple) else DEFAULT_ORDER,
        )
        return SdpaCall(
            facts,
            switches,
            self._gpu(flag("cuda.capability", None)) if facts.device == "cuda" else None,
        )

    def _gpu(self, capability: object) -> Gpu | None:
        found = re.fullmatch(r"(\d+)\.(\d+)", str(capability))
        header = self._flow.trace.header
        if found is None or "hip" in header.versions:
            return None  # AMD's have rules of their own, which are not written down here
        return Gpu(
            int(found[1]),
            int(found[2]),
            cudnn=_number(header.versions, "cudnn"),
            cuda=_cuda(header.versions.get("cuda", "")),
            cudnn_last="TORCH_CUDNN_SDPA_DEPRIORITIZED" in header.variables,
        )


# ---- what changed the choice ---------------------------------------------------------------------------


def decisive(left: SdpaCall, right: SdpaCall) -> list[str]:
    """The facts that, taken from one call into the other, make torch choose as it did there: `dropout_p 0 against 0.1`."""
    a, b = left.choice(), right.choice()
    if a is None or b is None or a.backend == b.backend:
        return []
    found: dict[str, list[str]] = {}  # what differs -> the facts of which it is said
    for part in ("facts", "switches", "gpu"):
        here, there = getattr(left, part), getattr(right, part)
        if here is None or there is None:
            continue
        for each in fields(here):
            x, y = getattr(here, each.name), getattr(there, each.name)
            if x != y and _flips((left, a), (right, b), part, each.name):
                words = f"{_said(x, y)} against {_said(y, x)}"
                found.setdefault(words, []).append(_NAMES.get(each.name, each.name))
    return [f"{', '.join(names)}: {words}" for words, names in found.items()]


def _flips(
    left: tuple[SdpaCall, Choice], right: tuple[SdpaCall, Choice], part: str, name: str
) -> bool:
    """Whether a fact of one call in the other one makes torch choose as in the first."""
    for (call, choice), (other, _) in ((left, right), (right, left)):
        fact = getattr(getattr(call, part), name)
        changes: dict[str, Any] = {part: replace(getattr(other, part), **{name: fact})}
        chosen = replace(other, **changes).choice()
        if chosen is not None and chosen.backend == choice.backend:
            return True
    return False


#: Fields that users know by other names.
_NAMES: Final = {
    "mask": "attn_mask",
    "dropout": "dropout_p",
    "causal": "is_causal",
    "grouped": "enable_gqa",
    "wants_grad": "training",
    "flash": "the flash switch",
    "efficient": "the efficient switch",
    "cudnn": "cuDNN",
    "math": "the math switch",
    "deterministic": "deterministic algorithms",
    "order": "the priority order",
}


def _said(value: object, other: object) -> str:
    """A fact in words, with what tells it from the other one."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if not isinstance(value, Operand):
        return "none" if value is None else str(value)
    words = f"{value.dtype}{list(value.shape)}"
    if not isinstance(other, Operand):
        return words + (", requires grad" if value.requires_grad else "")
    if value.last_stride != other.last_stride:
        words += f", last stride {value.last_stride}"
    if value.requires_grad != other.requires_grad:
        words += ", requires grad" if value.requires_grad else ", without grad"
    return words


# ---- reading arguments -------------------------------------------------------------------------------------


def _operand(argument: Argument) -> Operand | None:
    if isinstance(argument, TensorArgument):
        return _layout(argument.meta)
    if isinstance(argument, tuple) and argument and isinstance(argument[0], TensorArgument):
        # a nested tensor is recorded by its parts; its own sizes are not known
        return Operand((-1, *argument[0].meta.shape), 1, argument[0].meta.dtype, nested=True)
    return None


def _layout(meta: TensorMeta) -> Operand:
    return Operand(meta.shape, meta.stride[-1] if meta.stride else 1, meta.dtype)


def _device(argument: Argument) -> str:
    if isinstance(argument, tuple) and argument:
        argument = argument[0]
    return argument.meta.device.partition(":")[0] if isinstance(argument, TensorArgument) else ""


def _grouped(query: Operand, key: Operand) -> bool:
    """Fused ops no longer know enable_gqa; they would not have run without it."""
    return query.shape[-3:-2] != key.shape[-3:-2]


def _wants_grad(flags: int) -> bool:
    return flags & (GRAD_ENABLED | OPERAND_GRAD) == GRAD_ENABLED | OPERAND_GRAD


def _float(argument: Argument) -> float:
    return float(argument) if isinstance(argument, int | float) else 0.0


def _number(versions: Mapping[str, str], name: str) -> int:
    found = versions.get(name, "")
    return int(found) if found.isdigit() else 0


def _cuda(version: str) -> int:
    """`13.0` -> 13000, as torch counts."""
    major, _, minor = version.partition(".")
    return int(major) * 1000 + int(minor) * 10 if major.isdigit() and minor.isdigit() else 0
