"""Why the runs differ: one function a cause, asked in a fixed order; the first that answers is the cause.

A cause is a function of the evidence about one origin. It answers only where the trace holds what it
says; later answers are kept as further explanations. To add one: write the function, put it where it
belongs in `CAUSES` (the more specific, the earlier), and write its page in docs/causes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from opdrift.causes import (
    arguments,
    batch,
    casts,
    compiled,
    environment,
    exchanged,
    fused,
    gradients,
    inflight,
    inputs,
    kernels,
    keyless,
    masking,
    memory,
    moved,
    packed,
    parameters,
    positions,
    precision,
    quantisation,
    randomness,
    sharded,
    splitproducts,
    stepsleftout,
    structure,
    unseen,
)
from opdrift.causes.evidence import Evidence, Shared, cause
from opdrift.records import Cause

__all__ = ["CAUSES", "Evidence", "Shared", "causes_of"]

#: Slug -> function, from specific to general.
CAUSES: Final[dict[str, Callable[[Evidence], Cause | None]]] = {
    "rounding-gathered": sharded.updated_alike,
    "split-products": splitproducts.split_products,
    "rounding": kernels.rounding,
    "padded-mask": batch.padded_mask,
    "padded-positions": batch.padded_positions,
    "padding": batch.padding,
    "batch-mixing": batch.batch_mixing,
    "uninitialised": memory.uninitialised,
    "unseen-kernel": memory.unseen_kernel,
    "weights-replaced": exchanged.weights_replaced,
    "moved": moved.moved,
    "race-gathered": moved.gathered,
    "race-in-flight": inflight.read_in_flight,
    "race": memory.race,
    "fsdp-gather": structure.fsdp_gather,
    "compile": compiled.compile_,
    "dropout": randomness.dropout,
    "train-mode": randomness.train_mode,
    "rng": randomness.rng,
    "weights-retied": parameters.retied,
    "weights-written": parameters.weights_written,
    "weights-packed": packed.packed_weights,
    "weights-exchanged": exchanged.weights_exchanged,
    # what a run did not come to is no mask, padding or cache that it lacks
    "raised": structure.raised,
    "structure-left-out": stepsleftout.step_left_out,
    "mask-written": masking.mask_written,
    "dtype-of-gradient": gradients.gradient_narrowed,
    "structure-of-gradient": gradients.gradient_changed,
    "inplace": memory.inplace,
    "kv-cache": arguments.kv_cache,
    "mask-exchanged": exchanged.mask_exchanged,
    "mask-on-one-side": masking.mask_on_one_side,
    "mask-otherwise": masking.mask_otherwise,
    "mask-without-keys": keyless.no_key,
    "mask-decided-otherwise": masking.decided_otherwise,
    "mask-leaf": masking.mask_leaf,
    "mask": masking.mask,
    "position-ids": arguments.position_ids,
    "position-counted": positions.counted_otherwise,
    "mask-input": inputs.mask_input,
    "input-of-other-part": inputs.other_part,
    "autocast-cache": casts.autocast_cache,
    "dtype": precision.dtype,
    "quantisation": quantisation.quantisation,
    "op-args-reduced": gradients.reduced_otherwise,
    "op-args": arguments.op_args,
    "op-args-fused": fused.fused_args,
    "nan": precision.nan,
    "environment-draws": environment.drawn_elsewhere,
    "weights": parameters.weights,
    "buffer-state": parameters.buffer_state,
    "input": inputs.input_,
    "reshaped": structure.reshaped,
    "nondeterministic-op": kernels.nondeterministic_op,
    "flags": environment.flags,
    "copied-otherwise": unseen.copied_otherwise,
    "moved-otherwise": unseen.moved_otherwise,
    "unseen-write": unseen.unseen_write,
    "kernel": kernels.kernel,
    "environment": environment.environment,
    "weights-kept": structure.stale_copy,
    "op-args-gathered": sharded.updated_with_other_numbers,
    "dtype-gathered": sharded.gradient_in_another_type,
    "structure-accumulated": gradients.accumulated_otherwise,
    "structure-updated": sharded.updated_by_other_ops,
    "structure-gathered": sharded.gathered_otherwise,
    "structure": structure.structure,
}


#: What gives other bits without anything being wrong: it may stand beside a cause that says so.
_HARMLESS: Final = frozenset(
    [
        "rounding",
        "kernel",
        "flags",
        "environment",
        "nondeterministic-op",
        "compile",
        "dtype",
        "autocast-cache",
        "op-args",
        "structure",
    ]
)


def causes_of(evidence: Evidence) -> tuple[Cause, ...]:
    """What explains an origin, the most specific first; never empty.

    Where only rounding is left, nothing is said to be wrong beside it: a mask that lets padding through, or
    positions that count it, would have made more of a difference.
    """
    found: dict[str, Cause] = {}
    for ask in CAUSES.values():
        answer = ask(evidence)
        if answer is not None:
            found.setdefault(answer.slug, answer)
    if "rounding" in found:
        # a batch has masks and flags that its samples alone do not need
        known = _HARMLESS - {"op-args"} if evidence.case.by_sample else _HARMLESS
        found = {slug: each for slug, each in found.items() if slug in known}
    # what torch itself calls nondeterministic says more than that the size is rounding's
    if "nondeterministic-op" in found and "rounding" in found:
        first = found.pop("nondeterministic-op")
        return (first, *found.values())
    return tuple(found.values()) or (_unknown(evidence),)


def _unknown(evidence: Evidence) -> Cause:
    op = evidence.op()
    name = op.name if op is not None else "the result"
    return cause(
        "structure",
        "possible",
        f"{name} differs, and nothing that was recorded says why",
        [f"{side}: {s.place(i)}" for side, s, i in evidence.sides if i is not None],
        "Record both runs again with integrity='full' and kernels='full', and look at the lines named here.",
    )
