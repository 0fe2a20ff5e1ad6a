"""Which attributes spans have; docs/otel-attributes.md explains each, and a test holds the two together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from opdrift.plugins import OP_STATUSES, Comparison
from opdrift.records import (
    FLAG_WORDS,
    Argument,
    Cause,
    Divergence,
    Header,
    Mark,
    Pick,
    Signature,
    Source,
    TensorArgument,
    TensorMeta,
)
from opdrift.tracefile.reader import Trace
from opdrift_integrations.otlp.encoding import Value

#: Version of docs/otel-attributes.md; sent as the version of the schema.
VERSION: Final = "1"
SCOPE_NAME: Final = "opdrift"
#: Elements of a list that are sent: an op may take thousands of tensors.
_LONGEST: Final = 256

Made = dict[str, Value]


def schema_url() -> str:
    """Names the version of the attributes; backends compare it, nobody opens it."""
    return f"urn:opdrift:otel-attributes:{VERSION}"


# ---- resource, run, step -------------------------------------------------------------------------------


def resource(header: Header, version: str) -> Made:
    """What all spans of a process have in common."""
    made: Made = {
        "service.name": "opdrift",
        "service.instance.id": header.run_id,
        "telemetry.sdk.name": "opdrift",
        "telemetry.sdk.language": "python",
        "telemetry.sdk.version": version,
        "process.runtime.name": "cpython",
        "torch.version": header.torch,
        "torch.device": header.device,
    }
    if "python" in header.versions:
        made["process.runtime.version"] = header.versions["python"]
    if header.rank is not None:
        made["torch.distributed.rank"] = header.rank
        made["torch.distributed.world_size"] = header.world_size or 0
    return made


def run(trace: Trace) -> Made:
    """Of the run's span."""
    header = trace.header
    made: Made = {
        "torch.run.id": header.run_id,
        "torch.run.ops": len(trace.ops),
        "torch.run.complete": trace.complete,
        "torch.run.settings": _json(header.flags),
        "torch.run.versions": _json(header.versions),
    }
    if header.label:
        made["torch.run.label"] = header.label
    if header.variables:
        made["torch.run.variables"] = _json(header.variables)
    if trace.incomplete is not None:
        made["torch.run.incomplete"] = trace.incomplete
    return made


def step(number: int) -> Made:
    """Of a step's span."""
    return {"torch.step": number}


# ---- modules -------------------------------------------------------------------------------------------


def module(path: str, kind: str, training: bool, called: Source | None) -> Made:
    """Of the spans of a module's calls."""
    return {
        "torch.module.path": path,
        "torch.module.type": kind,
        "torch.module.training": training,
        **source(called),
    }


def call(number: int) -> Made:
    """Of the span of one call of a module."""
    return {"torch.module.call_index": number}


def differing(ops: int) -> Made:
    """Of the span of a run or module call that was compared."""
    return {"torch.diff.differing_ops": ops}


# ---- ops -----------------------------------------------------------------------------------------------


def source(found: Source | None) -> Made:
    """Where in the program; OpenTelemetry's own names."""
    if found is None:
        return {}
    return {
        "code.file.path": found.file,
        "code.line.number": found.line,
        "code.function.name": found.function,
    }


def signature(found: Signature) -> Made:
    """What all calls of an op with the same layouts and arguments share."""
    tensors = [
        argument.meta for _, value in found.arguments for argument in _tensor_arguments(value)
    ]
    made: Made = {"torch.op.name": found.op.name}
    if tensors:
        made["torch.op.inputs.shapes"] = _some([_shape(meta.shape) for meta in tensors])
        made["torch.op.inputs.dtypes"] = _some([meta.dtype for meta in tensors])
        devices = sorted({meta.device for meta in tensors})
        made["torch.op.inputs.devices"] = devices
    settings = {
        name: _plain(value)
        for name, value in found.arguments
        if not any(True for _ in _tensor_arguments(value))
    }
    if settings:
        made["torch.op.arguments"] = _json(settings)
    return made


def op_flags(flags: int) -> Made:
    """What was special about an op."""
    words = [word for bit, word in FLAG_WORDS.items() if flags & bit]
    return {"torch.op.flags": words} if words else {}


def outputs(layouts: Sequence[TensorMeta]) -> Made:
    """Of an op's outputs: first the arguments that it wrote into, then what it returned."""
    if not layouts:
        return {}
    return {
        "torch.op.outputs.shapes": _some([_shape(meta.shape) for meta in layouts]),
        "torch.op.outputs.dtypes": _some([meta.dtype for meta in layouts]),
    }


def inputs_held(digests: list[str]) -> Made:
    """What the tensors of an op held."""
    return {"torch.op.inputs.fingerprints": _some(digests)}


def outputs_held(digests: list[str], absmax: list[float], nonfinite: list[int]) -> Made:
    """What its outputs hold; `absmax` is NaN where there is no fingerprint."""
    return {
        "torch.op.outputs.fingerprints": _some(digests),
        "torch.op.outputs.absmax": absmax[:_LONGEST],
        "torch.op.outputs.nonfinite": nonfinite[:_LONGEST],
    }


def place(path: str, backward: bool, thread: int) -> Made:
    """Where an op ran."""
    return {
        "torch.module.path": path,
        "torch.phase": "backward" if backward else "forward",
        "torch.thread": thread,
    }


def kernel(pick: Pick) -> Made:
    """Which implementation of an op ran, and why."""
    optional = {
        "torch.op.kernel": pick.name,
        "torch.op.kernel.library": pick.library,
        "torch.op.backend": pick.backend,
        "torch.op.kernel.reason": pick.reason,
    }
    made: Made = {name: value for name, value in optional.items() if value is not None}
    if pick.refused:
        made["torch.op.kernel.refused"] = [f"{b}: {why}" for b, why in pick.refused.items()]
    return {**made, "torch.op.kernel.source": pick.source}


# ---- marks ---------------------------------------------------------------------------------------------


def mark(found: Mark) -> Made:
    """Of the span of a gather or move, or of an event."""
    made: Made = {}
    for name, value in found.fields.items():
        key = f"torch.{found.kind.replace('-', '_')}.{name}"
        if name == "parameters" and isinstance(value, list):
            names = [each[0] if isinstance(each, list) and each else each for each in value]
            made[key] = _some([str(each) for each in names])
        elif value is not None:
            made[key] = value if isinstance(value, str | bool | int | float) else _json(value)
    return made


# ---- comparison ------------------------------------------------------------------------------------------


def verdict(comparison: Comparison, baseline: str) -> Made:
    """Of the run's span, compared with another run."""
    diagnosis, left = comparison.diagnosis, comparison.diagnosis.left
    first = diagnosis.first or diagnosis.first_bitwise
    return {
        "torch.diff.verdict": diagnosis.verdict,
        **({} if first is None else {"torch.diff.summary": first.cause.summary}),
        "torch.diff.baseline.trace_id": baseline,
        "torch.diff.baseline.run_id": left.run_id,
        "torch.diff.baseline.path": left.path,
    }


def status(place: int) -> Made:
    """Of an op that was compared."""
    return {"torch.diff.status": OP_STATUSES[place]}


def divergence(found: Divergence) -> Made:
    """Of the event at the first divergence."""
    made: Made = {
        "torch.diff.kind": found.kind,
        "torch.diff.material": found.material,
        "torch.module.path": found.module,
        **_cause(found.cause),
    }
    optional = {
        "torch.diff.name": found.name,
        "torch.op.name": found.op,
        "torch.diff.seq": found.seq.right,
        "torch.diff.baseline.seq": found.seq.left,
        "torch.diff.max_rel": found.relative_difference,
        "torch.diff.max_abs": found.max_abs_difference,
        "torch.diff.explained": found.explained,
        "torch.diff.final_rel": found.final_relative_difference,
    }
    return made | {name: value for name, value in optional.items() if value is not None}


def _cause(cause: Cause) -> Made:
    return {
        "torch.diff.cause": cause.slug,
        "torch.diff.confidence": cause.confidence,
        "torch.diff.summary": cause.summary,
        "torch.diff.evidence": _some(list(cause.evidence)),
        "torch.diff.try": cause.try_,
    }


def link(seq: int) -> Made:
    """Of the link to the same op of the other run."""
    return {"torch.diff.role": "baseline", "torch.diff.baseline.seq": seq}


def exception(text: str) -> Made:
    """Of the event of a run that ended with an exception; OpenTelemetry's own names."""
    kind, _, message = text.partition(": ")
    return {"exception.type": kind, "exception.message": message}


# ---- values ----------------------------------------------------------------------------------------------


def _tensor_arguments(value: Argument) -> Iterator[TensorArgument]:
    if isinstance(value, TensorArgument):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _tensor_arguments(each)


def _plain(value: Argument) -> Any:
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _shape(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _some(texts: list[str]) -> list[str]:
    """A list with an end to it; what is left out is counted in its last element."""
    if len(texts) <= _LONGEST:
        return texts
    return [*texts[:_LONGEST], f"and {len(texts) - _LONGEST} more"]


def _json(data: Any) -> str:
    if isinstance(data, Mapping):
        data = dict(data)
    return json.dumps(data, separators=(",", ":"), default=str)
