"""Settings, versions and machines that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from opdrift.case import Case
from opdrift.causes.evidence import SIDES, Evidence, cause, counted, scope, some
from opdrift.causes.likeness import likeness
from opdrift.causes.setters import statements
from opdrift.origins.kinds import draws
from opdrift.records import Cause, EnvironmentDifference
from opdrift.tracefile.reader import Trace

#: Beginnings of the names of flags that change what an op computes, and the devices whose ops they change.
_STEERING: Final = {
    "fp32_precision.generic": ("cpu", "cuda"),
    "fp32_precision.mkldnn": ("cpu",),
    "fp32_precision.cuda": ("cuda",),
    "cpu.allow": ("cpu",),
    "mkldnn.": ("cpu",),
    "nnpack.": ("cpu",),
    "quantized.engine": ("cpu",),
    "flush_denormal": ("cpu",),
    "cuda.": ("cuda",),
    "cudnn.": ("cuda",),
    "miopen.": ("cuda",),
    "sdp.flash": ("cpu", "cuda"),
    "sdp.math": ("cpu", "cuda"),
    "sdp.": ("cuda",),
    "mha.fastpath": ("cpu", "cuda"),
    "deterministic_algorithms": ("cpu", "cuda"),
    "fill_uninitialized_memory": ("cpu", "cuda"),
    "autocast": ("cpu", "cuda"),
    "default_dtype": ("cpu", "cuda"),
}
#: Flags of attention and of fused layers steer only these.
_OF_ATTENTION: Final = ("sdp.", "mha.")
_ATTENDING: Final = ("attention", "softmax", "encoder_layer", "baddbmm", "bmm")
#: Flags of matrix products and convolutions steer only these.
_OF_PRODUCTS: Final = (
    "fp32_precision",
    "cuda.matmul",
    "cpu.allow",
    "mkldnn.",
    "nnpack.",
    "cudnn.",
    "miopen.",
)
_PRODUCTS: Final = (
    "mm",
    "bmm",
    "matmul",
    "linear",
    "conv",
    "lstm",
    "gru",
    "rnn",
    "attention",
    "einsum",
    "dot",
    "mv",
)
#: What a machine is: other numbers may be computed on another.
MACHINE: Final = (
    "torch",
    "device",
    "cuda",
    "hip",
    "cudnn",
    "mkl",
    "mkldnn",
    "onednn",
    "cpu_capability",
    "cpu.units",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
)


@dataclass(frozen=True, slots=True)
class FlagDifference:
    """A flag that was in force with another value at an op."""

    name: str
    left: Any
    right: Any


class Timelines:
    """The flags of both runs over time."""

    def __init__(self, case: Case) -> None:
        self._sides = case.left, case.right
        self._settings = case.left.settings, case.right.settings
        # a flag that one of them does not know (of another opdrift or torch) is unknown there, not another
        self._names = sorted(_known(case.left.trace) & _known(case.right.trace))

    def differences(self, left: int, right: int) -> list[FlagDifference]:
        """Flags that were not the same when two ops ran."""
        get = (
            self._settings[0].before(self._sides[0].seq(left)),
            self._settings[1].before(self._sides[1].seq(right)),
        )
        found = [
            FlagDifference(name, get[0](name, None), get[1](name, None)) for name in self._names
        ]
        return [d for d in found if d.left != d.right]

    def where(self, name: str, number: int, before: int) -> str:
        """Where a run last changed a flag before an op; empty if it began with it."""
        side = self._sides[number]
        seq = side.seq(before)
        marks = [
            m for m in side.trace.marks if m.kind == "flags" and name in m.fields and m.seq < seq
        ]
        if not marks:
            return ""
        old, new = marks[-1].fields[name]
        after = side.trace.index_of(marks[-1].seq + 1)
        place = f", before {side.place(after)}" if after is not None else ""
        return f"{SIDES[number]}: {name} was changed from {old} to {new} during the run{place}"


def _known(trace: Trace) -> set[str]:
    """Names of the flags that a trace tells of."""
    return {*trace.header.flags} | {
        name for mark in trace.marks if mark.kind == "flags" for name in mark.fields
    }


def flags(e: Evidence) -> Cause | None:
    """A setting that changes what this op computes differs, from the start or since it was changed."""
    if e.origin.story not in ("op", "region", "amplified", "factory") or not e.size.material:
        return None
    ops = _ops(e)
    if ops is None:
        return None
    left, right = ops
    timelines = e.shared.once(Timelines)
    found = [d for d in timelines.differences(left, right) if _steers(e, d.name)]
    if not found:
        return None
    op = e.op()
    changes = [
        words
        for d in found[:4]
        for number, index in enumerate(ops)
        if (words := timelines.where(d.name, number, index))
    ]
    names = some([d.name for d in found], 3)
    return cause(
        "flags",
        "likely",
        f"{op.name if op else 'an op'} in {scope(op.call.path if op else '')} ran under other settings: {names}",
        [*(_words(d.name, d.left, d.right) for d in found), *changes],
        _alike(found),
    )


def _alike(found: Sequence[FlagDifference]) -> str:
    """How to give both runs the same flags."""
    left = statements([(d.name, d.left) for d in found])
    advice = "Set the flags above to the same value in both runs, before the model runs and for as long as it does"
    return f"{advice}. As in the left run: {left}" if left else f"{advice}."


def _ops(e: Evidence) -> tuple[int, int] | None:
    """The ops at which flags are read: the origin's, else those that read what comes of it."""
    reader = e.consumer()
    left = e.origin.op.left if e.origin.op.left is not None else reader.left
    right = e.origin.op.right if e.origin.op.right is not None else reader.right
    return None if left is None or right is None else (left, right)


def _steers(e: Evidence, name: str) -> bool:
    """Whether a flag changes what the ops of an origin compute on their devices."""
    devices = next((d for start, d in _STEERING.items() if name.startswith(start)), ())
    names, used = set(), set()
    for number, (_, side, own) in enumerate(e.sides):
        for op in {*e.ops_of(number), *([own] if own is not None else [])}:
            names.add(side.name(op))
            used |= {
                side.trace.meta(v).device.partition(":")[0]
                for v in side.trace.ops.outputs[op].tolist()
            }
    if not used.intersection(devices):
        return False
    if name.startswith(_OF_ATTENTION):
        return any(word in each for each in names for word in _ATTENDING)
    if name.startswith(_OF_PRODUCTS):
        return any(word in each for each in names for word in _PRODUCTS)
    return True


def drawn_elsewhere(e: Evidence) -> Cause | None:
    """Weights or other draws of one seed that differ by rounding: other instructions drew, or transformed, them."""
    machine = machine_differences(e)
    if not machine:
        return None
    if e.origin.kind == "leaf":
        return _leaf_of_another_machine(e, machine)
    op = e.origin.op
    if e.origin.story != "op" or op.left is None or op.right is None:
        return None
    if not (draws(e.case.left, op.left) and draws(e.case.right, op.right)):
        return None
    if int(e.case.left.trace.ops.rng[op.left]) != int(e.case.right.trace.ops.rng[op.right]):
        return None
    name = e.case.left.name(op.left)
    return cause(
        "environment",
        "certain",
        f"{name} in {scope(e.case.left.module(op.left))} draws other numbers from the same state of its generator: the"
        f" runs differ in {some([d.name for d in machine], 3)}",
        [
            *(_words(d.name, d.left, d.right) for d in machine),
            f"the generator's state before it is {int(e.case.left.trace.ops.rng[op.left]):016x} in both runs",
            *(f"{label}: {side.place(i)}" for label, side, i in e.sides if i is not None),
        ],
        "A seed gives the same numbers only on the same kind of machine and version: draw once, save the numbers, and load"
        " them in both runs.",
    )


def _leaf_of_another_machine(e: Evidence, machine: list[EnvironmentDifference]) -> Cause | None:
    kinds: Counter[str] = Counter()
    for m in (e.origin.leaf, *e.origin.members):
        if m.left is None or m.right is None:
            continue
        a, b = e.case.left.fingerprint(m.left.value), e.case.right.fingerprint(m.right.value)
        like = likeness(a, b) if a is not None and b is not None else None
        if like is not None:
            kinds[like.kind] += 1
    if not kinds or kinds["rounding"] < sum(kinds.values()):
        return None
    gap = e.size.difference
    largest = gap.relative if gap is not None and gap.relative is not None else 0.0
    names = e.origin.names
    return cause(
        "environment",
        "likely",
        f"{counted(len(names), 'tensor')} of the model {'differs' if len(names) == 1 else 'differ'} by no more than rounding, and the runs differ in"
        f" {some([d.name for d in machine], 3)}",
        [
            *(_words(d.name, d.left, d.right) for d in machine),
            f"relative difference {largest:.1e}: what seeded draws, or the functions that follow them, give with other"
            " instructions",
            f"{some(names)}: no other checkpoint and no other seed is so near",
        ],
        "A seed gives the same bits only on the same kind of machine and version: draw or compute the weights once, save"
        " them, and load that file in both runs; or set ATEN_CPU_CAPABILITY alike.",
    )


def environment(e: Evidence) -> Cause | None:
    """The runs used other versions or another machine."""
    if e.origin.story not in ("op", "region", "amplified") or not e.size.material:
        return None
    found = machine_differences(e)
    if not found:
        return None
    return cause(
        "environment",
        "possible",
        f"the runs differ in {', '.join(d.name for d in found[:3])}",
        [_words(d.name, d.left, d.right) for d in found],
        "Record both runs with the same versions on the same kind of machine, or see which of these changes the result.",
    )


def machine_differences(e: Evidence) -> list[EnvironmentDifference]:
    """Versions and properties of the machine that differ."""
    return [d for d in e.shared.environment if d.name in MACHINE]


def _words(name: str, left: object, right: object) -> str:
    return f"{name}: {left if left is not None else 'unset'} against {right if right is not None else 'unset'}"
