"""Settings, versions and machines that differ."""

from __future__ import annotations

from typing import Final

from opdrift.causes.evidence import Evidence, cause, scope
from opdrift.records import Cause, EnvironmentDifference

#: Beginnings of the names of flags that change what an op computes.
_PRECISION: Final = (
    "fp32_precision",
    "float32_matmul_precision",
    "cuda.matmul",
    "cudnn.",
    "mkldnn.",
    "cpu.allow",
    "sdp.",
    "flush_denormal",
    "deterministic_algorithms",
    "autocast",
    "default_dtype",
)
_MACHINE: Final = (
    "torch",
    "device",
    "cuda",
    "hip",
    "cudnn",
    "mkl",
    "mkldnn",
    "onednn",
    "cpu_capability",
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "NVIDIA_TF32_OVERRIDE",
)


def flags(e: Evidence) -> Cause | None:
    """A setting that changes what this op computes differs."""
    found = _of_op(e, _PRECISION)
    if not found:
        return None
    op = e.op()
    return cause(
        "flags",
        "likely",
        f"{op.name if op else 'an op'} in {scope(op.call.path if op else '')} ran under other settings: {found[0].name}",
        [_words(d) for d in found],
        "Set the flags above to the same value in both runs, before the model runs.",
    )


def environment(e: Evidence) -> Cause | None:
    """The runs used other versions or another machine."""
    found = _of_op(e, _MACHINE)
    if not found:
        return None
    return cause(
        "environment",
        "possible",
        f"the runs differ in {', '.join(d.name for d in found[:3])}",
        [_words(d) for d in found],
        "Record both runs with the same versions on the same kind of machine, or see which of these changes the result.",
    )


def _of_op(e: Evidence, names: tuple[str, ...]) -> list[EnvironmentDifference]:
    if e.origin.story not in ("op", "region", "amplified") or not e.size.material:
        return []
    return [d for d in e.shared.environment if d.name.startswith(names)]


def _words(d: EnvironmentDifference) -> str:
    return f"{d.name}: {d.left if d.left is not None else 'unset'} against {d.right if d.right is not None else 'unset'}"
