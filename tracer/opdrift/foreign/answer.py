"""The diagnosis of two logs: the schema of a diagnosis of traces, with less in it, and what is missing said."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from opdrift.align.calls import Maps
from opdrift.compare import dtype_epsilon
from opdrift.errors import IncomparableTracesError
from opdrift.foreign.causes import Judged, arguments_of, judge, known_distance
from opdrift.foreign.comparison import Compared, Origin, compare
from opdrift.foreign.matching import Matched, match_ops
from opdrift.foreign.model import Log, LoggedOp, LoggedTensor, words
from opdrift.foreign.opening import read_log
from opdrift.records import (
    Alignment,
    Diagnosis,
    Divergence,
    DivergenceKind,
    Sides,
    TraceSummary,
    UnpairedGroup,
    Verdict,
)

#: How rounding grows along a smooth model, in units of the dtype's roundoff, by the root of the number of
#: products passed: 3 u sqrt(L) in 16 bits, 20 u sqrt(L) in float32 (notes: diagnosis, 3).
_GROWTH: Final = {2.0**-8: 3.0, 2.0**-11: 3.0, 2.0**-24: 20.0, 2.0**-53: 20.0}
_PRODUCTS: Final = words(
    "mm addmm bmm baddbmm linear matmul convolution _scaled_mm"
    " _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu"
    " _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _grouped_mm"
)
_METHOD: Final = "ops of two logs by module, call, name and shapes, in order"


def diff_logs(left: str | Path, right: str | Path, *, maps: Maps = ()) -> Diagnosis:
    """Compare two logs of the same tool.

    Equal hashes do not prove equal tensors: `exact` is False in the answer, and its notes say what such a
    log cannot tell.

    Raises:
        NotATraceError: A file is none of the logs that opdrift reads.
        DamagedTraceError: A log cannot be read.
        TraceVersionError: A log is of another version of its format.
        IncomparableTracesError: The logs are of different tools, hold no ops, or nothing to compare.
    """
    logs = read_log(left), read_log(right)
    _check(logs)
    matched = match_ops(logs[0].ops, logs[1].ops, maps)
    compared = compare(logs[0], logs[1], matched)
    if not compared.checked and not compared.origins:
        raise IncomparableTracesError(_nothing_to_compare(logs, matched))
    judged = _judge(logs, matched, compared)
    divergences = tuple(_divergence(j, logs, matched) for j in judged)
    material = next((d for d in divergences if d.material), None)
    return Diagnosis(
        verdict=_verdict(divergences),
        left=_summary(logs[0]),
        right=_summary(logs[1]),
        first=material or (divergences[0] if divergences else None),
        first_bitwise=divergences[0] if divergences else None,
        origins=divergences,
        amplifiers=(),
        causes=tuple(
            {(j.cause.slug, j.cause.summary): j.cause for j in sorted(judged, key=lambda j: not j.material)}.values()
        ),
        environment=(),
        unpaired=Sides(
            _groups(logs[0].ops, matched.left_only), _groups(logs[1].ops, matched.right_only)
        ),
        alignment=Alignment(
            len(matched.pairs),
            len(matched.left_only),
            len(matched.right_only),
            _METHOD,
            matched.fallback_reason,
        ),
        notes=(*_largest(logs, matched, compared), *_limits(logs, compared)),
        exact=False,
    )  # fmt: skip


def _check(logs: Sequence[Log]) -> None:
    a, b = logs
    if a.format != b.format:
        raise IncomparableTracesError(
            f"{a.path} is a log of {a.format}, {b.path} one of {b.format}. Record both runs with the same tool."
        )
    for log in logs:
        if not log.ops:
            raise IncomparableTracesError(
                f"{log.path} holds no op. Was anything run while it was recorded? DebugMode sees nothing of"
                " regions that torch.compile compiled with Inductor on CPU."
            )
    if a.hashed and b.hashed and not a.kinds & b.kinds:
        raise IncomparableTracesError(
            f"{a.path} holds hashes of kind {_listed(a.kinds)}, {b.path} of kind {_listed(b.kinds)}."
            " Record both runs with the same hash_fn."
        )


def _listed(kinds: frozenset[str]) -> str:
    return " and ".join(sorted(kinds))


def _nothing_to_compare(logs: Sequence[Log], matched: Matched) -> str:
    bare = [log.path for log in logs if not log.hashed]
    if bare:
        return (
            f"{' and '.join(bare)} {'holds' if len(bare) == 1 else 'hold'} no hashes of outputs, and the ops are the"
            " same: whether their results are equal cannot be told. Record inside DebugMode.log_tensor_hashes()."
        )
    return (
        f"Of the {len(matched.pairs)} ops that {logs[0].path} and {logs[1].path} share, none has a hash of the same"
        " kind in both. Record both runs with the same hash_fn."
    )


def _judge(logs: Sequence[Log], matched: Matched, compared: Compared) -> list[Judged]:
    judged = [judge(o, logs, _explained(o, matched, logs)) for o in compared.origins]
    limits = _limit_by_pair(logs, matched)
    beyond = any(
        distance is None or (limit is not None and distance > limit)
        for place in compared.differing
        for distance, limit in ((compared.distances[place], limits[place]),)
    )
    if not beyond or any(j.material for j in judged):
        return judged
    # small where it begins, large further on: a norm may hide where it becomes large
    return [judge(j.origin, logs, None) for j in judged]


def _explained(origin: Origin, matched: Matched, logs: Sequence[Log]) -> float | None:
    """How far apart rounding brings two norms at an origin: the norm's difference is at most the tensors'."""
    tensor = origin.values[0]
    if origin.left is None or tensor is None:
        return None
    return _limit(tensor, _products_before(logs[0].ops, matched, origin.left))


def _limit(tensor: LoggedTensor, products: int) -> float | None:
    """What rounding explains after so many products; float32 where the log does not tell the dtype: the stricter."""
    unit = dtype_epsilon(tensor.dtype or "float32") / 2
    if not unit or unit not in _GROWTH:
        return None
    return _GROWTH[unit] * unit * math.sqrt(max(products, 1))


def _products_before(ops: Sequence[LoggedOp], matched: Matched, op: LoggedOp) -> int:
    return sum(_is_product(ops[i]) for i, _ in matched.pairs if ops[i].seq <= op.seq)


def _is_product(op: LoggedOp) -> bool:
    return op.base_name in _PRODUCTS


def _limit_by_pair(logs: Sequence[Log], matched: Matched) -> list[float | None]:
    found: list[float | None] = []
    products = 0
    for i, _ in matched.pairs:
        op = logs[0].ops[i]
        products += _is_product(op)
        limits = [_limit(t, products) for t in op.outputs]
        found.append(max((limit for limit in limits if limit is not None), default=None))
    return found


def _divergence(judged: Judged, logs: Sequence[Log], matched: Matched) -> Divergence:
    origin, op = judged.origin, judged.origin.op
    kind: DivergenceKind = "op"
    if origin.story == "input":
        kind = "leaf"
    elif origin.story in ("lone", "other-source"):
        kind = "structure"
    left, right = origin.values
    distance = known_distance(origin.distance)
    return Divergence(
        kind=kind,
        name=f"input {origin.slot} of {op.name}" if kind == "leaf" else None,
        op=op.name,
        module=op.module,
        call=op.call,
        phase=op.phase,
        source=op.source,
        seq=Sides(
            origin.left.seq if origin.left is not None else None,
            origin.right.seq if origin.right is not None else None,
        ),
        output=origin.slot if origin.story == "op" else None,
        inputs_match=origin.inputs_match,
        material=judged.material,
        relative_difference=distance,
        explained=_explained(origin, matched, logs) if kind == "op" else None,
        conditioning=None,
        max_abs_difference=None,
        ulp=None,
        nonfinite=Sides(None, None),
        kernel=Sides(None, None),
        arguments=arguments_of(origin),
        final_relative_difference=None,
        cause=judged.cause,
        tensors=Sides(
            (left.text or None) if left is not None else None,
            (right.text or None) if right is not None else None,
        ),
        how="hashes" if distance is None else "norms",
    )


def _verdict(divergences: Sequence[Divergence]) -> Verdict:
    if not divergences:
        return "identical"
    return "diverged" if any(d.material for d in divergences) else "rounding"


def _summary(log: Log) -> TraceSummary:
    return TraceSummary(
        path=log.path,
        run_id="",
        label=f"{log.format} log",
        created="",
        torch="",
        device="",
        ops=len(log.ops),
        complete=True,
        world_size=None,
        rank=log.rank,
    )


def _groups(ops: Sequence[LoggedOp], lone: Sequence[int]) -> tuple[UnpairedGroup, ...]:
    found: dict[tuple[str, str], list[int]] = {}
    for place in lone:
        found.setdefault((ops[place].name, ops[place].module), []).append(ops[place].seq)
    return tuple(UnpairedGroup(op, module, len(s), s[0]) for (op, module), s in found.items())


def _largest(logs: Sequence[Log], matched: Matched, compared: Compared) -> Iterator[str]:
    """Where the norms are furthest apart."""
    found = [
        (d, place) for place in compared.differing if (d := compared.distances[place]) is not None
    ]
    if found:
        distance, place = max(found)
        op = logs[0].ops[matched.pairs[place][0]]
        where = f" in {op.module}" if op.module else ""
        said = f"{distance:.2g} apart" if math.isfinite(distance) else "infinitely far apart"
        yield (
            f"{len(compared.differing)} of {len(matched.pairs)} ops differ; the norms are furthest apart at op"
            f" {op.seq}, {op.name}{where}: {said}"
        )


def _limits(logs: Sequence[Log], compared: Compared) -> Iterator[str]:
    """What logs of this kind cannot tell."""
    kinds = logs[0].kinds | logs[1].kinds
    if "norm" in kinds and "xor" not in kinds:
        yield (
            "these logs hold an L1 norm of each tensor: permuted rows, a transposition and flipped signs leave it as it is,"
            " so equal norms do not prove that two tensors are equal"
        )
    elif "xor" in kinds:
        also = "an L1 norm and " if "norm" in kinds else ""
        yield (
            f"these logs hold {also}an XOR of each tensor's words: the order of the elements does not count, and what"
            " occurs twice cancels, so equal hashes do not prove that two tensors are equal"
        )
    digits = next((log.digits for log in logs if log.digits), None)
    if digits:
        yield (
            f"norms are printed with {digits} digits: a relative difference below {10.0 ** (1 - digits):.0e}"
            " is not seen, and one last bit of a float32 tensor never"
        )
    yield (
        "the logs hold no names of weights and inputs, no kernels, no settings and no random state, so causes are"
        " guesses; distances are those of norms, and the tensors may lie further apart"
    )
    yield from _left_out(logs)
    unhashed = sum(len(log.ops) for log in logs) and not all(log.hashes_inputs for log in logs)
    if unhashed:
        yield (
            "inputs were not hashed, so only the first op that differs is told; record with"
            " DebugMode.log_tensor_hashes(hash_inputs=True)"
        )
    if not any(op.module for log in logs for op in log.ops) and logs[0].format == "DebugMode":
        yield "the logs name no modules; record with DebugMode(record_nn_module=True)"
    if compared.checked and compared.checked < sum(len(op.outputs) for op in logs[0].ops):
        total = sum(len(op.outputs) for op in logs[0].ops)
        yield f"{compared.checked} of {total} outputs could be compared; the others have no hash in both logs"


def _left_out(logs: Sequence[Log]) -> Iterator[str]:
    if logs[0].format == "torchtitan":
        names = sorted(set(logs[0].left_out) | set(logs[1].left_out))
        said = (
            f" ({', '.join(names[:8])}{' and others' if len(names) > 8 else ''})" if names else ""
        )
        yield (
            f"torchtitan leaves out views, copies and casts{said}, tensors of fewer than 1,000 elements and all that are"
            " no float32, float16 or bfloat16: masks, indices and moves are not compared"
        )
    else:
        yield (
            "DebugMode does not see other threads, unknown tensor subclasses, changes of `.data` and what a kernel does"
            " that is not a torch op"
        )
