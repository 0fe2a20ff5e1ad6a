"""A diagnosis as JSON, schema `opdrift.diagnosis/1`: no field is removed within version 1."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from opdrift.records import (
    DIAGNOSIS_SCHEMA,
    Amplifier,
    Cause,
    Diagnosis,
    Divergence,
    Finding,
    Pick,
    TraceSummary,
    UnpairedGroup,
)


def render(diagnosis: Diagnosis) -> str:
    """The document, indented; ASCII, so that any terminal and any name survives it."""
    return dumps(diagnosis_object(diagnosis)) + "\n"


def dumps(document: object) -> str:
    """Indented JSON without NaN or infinity; numbers that JSON has no word for are strings."""
    return json.dumps(safe(document), indent=2, allow_nan=False)


def safe(data: Any) -> Any:
    """The same data with "nan", "inf" and "-inf" for the numbers JSON lacks."""
    if isinstance(data, float) and not math.isfinite(data):
        return "nan" if math.isnan(data) else "inf" if data > 0 else "-inf"
    if isinstance(data, Mapping):
        return {str(key): safe(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [safe(value) for value in data]
    return data


def diagnosis_object(diagnosis: Diagnosis) -> dict[str, Any]:
    """The document's data; DESIGN 3.4 names the fields; `exact`, `growth`, `final_explained`, `samples`, `notes` and `ranks` are ours."""
    d = diagnosis
    return {
        "schema": DIAGNOSIS_SCHEMA,
        "verdict": d.verdict,
        "exact": d.exact,
        "left": _summary(d.left),
        "right": _summary(d.right),
        "first": _divergence(d.first),
        "first_bitwise": _divergence(d.first_bitwise),
        "origins": [_divergence(o) for o in d.origins],
        "amplifiers": [_amplifier(a) for a in d.amplifiers],
        "causes": [cause_object(c) for c in d.causes],
        "environment": [{"name": e.name, "left": e.left, "right": e.right} for e in d.environment],
        "unpaired": {
            "left": [_unpaired(u) for u in d.unpaired.left],
            "right": [_unpaired(u) for u in d.unpaired.right],
        },
        "alignment": {
            "paired": d.alignment.paired,
            "left_only": d.alignment.left_only,
            "right_only": d.alignment.right_only,
            "method": d.alignment.method,
            "fallback_reason": d.alignment.fallback_reason,
        },
        "growth": [
            {
                "module": g.module,
                "ops": g.ops,
                "differing": g.differing,
                "relative_difference": g.relative_difference,
                "unpaired": g.unpaired,
            }
            for g in d.growth
        ],
        "final_explained": d.final_explained,
        "samples": None
        if d.samples is None
        else {"size": d.samples.size, "differing": list(d.samples.numbers)},
        "notes": list(d.notes),
        "ranks": {str(rank): diagnosis_object(one) for rank, one in sorted(d.ranks.items())},
    }


def _summary(s: TraceSummary) -> dict[str, Any]:
    return {
        "path": s.path,
        "run_id": s.run_id,
        "label": s.label,
        "created": s.created,
        "torch": s.torch,
        "device": s.device,
        "ops": s.ops,
        "complete": s.complete,
        "world_size": s.world_size,
        "rank": s.rank,
    }


def _divergence(d: Divergence | None) -> dict[str, Any] | None:
    if d is None:
        return None
    return {
        "kind": d.kind,
        "name": d.name,
        "op": d.op,
        "module": d.module,
        "call": d.call,
        "phase": d.phase,
        "source": d.source,
        "seq": {"left": d.seq.left, "right": d.seq.right},
        "output": d.output,
        "inputs_match": d.inputs_match,
        "material": d.material,
        "relative_difference": d.relative_difference,
        "explained": d.explained,
        "conditioning": d.conditioning,
        "max_abs_difference": d.max_abs_difference,
        "ulp": d.ulp,
        "nonfinite": {"left": d.nonfinite.left, "right": d.nonfinite.right},
        "kernel": {"left": pick_object(d.kernel.left), "right": pick_object(d.kernel.right)},
        "arguments": [{"name": a.name, "left": a.left, "right": a.right} for a in d.arguments],
        "final_relative_difference": d.final_relative_difference,
        "cause": cause_object(d.cause),
        "tensors": {"left": d.tensors.left, "right": d.tensors.right},
        "members": list(d.members),
        "how": d.how,
        "arithmetic": d.arithmetic,
        "outside": d.outside,
        "ranks": None
        if d.ranks is None
        else {"left": list(d.ranks.left), "right": list(d.ranks.right)},
    }


def pick_object(p: Pick | None) -> dict[str, Any] | None:
    """{name, library, backend, reason, refused, source, observed}; null where it is not known."""
    if p is None:
        return None
    return {
        "name": p.name,
        "library": p.library,
        "backend": p.backend,
        "reason": p.reason,
        "refused": dict(p.refused),
        "source": p.source,
        "observed": list(p.observed),
    }


def cause_object(c: Cause) -> dict[str, Any]:
    """{slug, confidence, summary, evidence, try}."""
    return {
        "slug": c.slug,
        "confidence": c.confidence,
        "summary": c.summary,
        "evidence": list(c.evidence),
        "try": c.try_,
    }


def finding_object(f: Finding) -> dict[str, Any]:
    """{kind, cause, name, op, module, seq, step, rank}."""
    return {
        "kind": f.kind,
        "cause": cause_object(f.cause),
        "name": f.name,
        "op": f.op,
        "module": f.module,
        "seq": f.seq,
        "step": f.step,
        "rank": f.rank,
    }


def _amplifier(a: Amplifier) -> dict[str, Any]:
    return {
        "op": a.op,
        "module": a.module,
        "seq": {"left": a.seq.left, "right": a.seq.right},
        "input_difference": a.input_difference,
        "output_difference": a.output_difference,
        "gain": a.gain,
    }


def _unpaired(u: UnpairedGroup) -> dict[str, Any]:
    return {"op": u.op, "module": u.module, "count": u.count, "first_seq": u.first_seq}
