"""Another implementation: kernels, backends, compiled code, order of summation."""

from __future__ import annotations

from typing import Final

from opdrift.case import Side
from opdrift.causes.compiled import compiled_side, doubt, ran_compiled
from opdrift.causes.evidence import SIDES, Evidence, cause, op_names, scope, some
from opdrift.causes.keyless import keyless
from opdrift.causes.likeness import likeness
from opdrift.causes.memoryformat import other_memory_format
from opdrift.causes.nondeterministic import NONDETERMINISTIC, SPARSE
from opdrift.causes.picked import (
    FUSED,
    Choices,
    calls_seen,
    choices,
    for_equal_bits,
    kernel_picks,
    other_calls,
    other_sizes,
    told,
)
from opdrift.causes.pins import FAST_PATH, PADDED
from opdrift.causes.precision import cast_on_one_side, casts_at
from opdrift.compare import number
from opdrift.flow import is_collective
from opdrift.origins.kinds import draws
from opdrift.records import Cause
from opdrift.sizes import threads
from opdrift.tokens import base

_SAME_CODE: Final = (
    "Nothing is wrong. For equal bits run both sides eager, or both compiled by the same backend: set"
    " TORCH_COMPILE_DISABLE=1 on the compiled side, or torch.compile(backend='aot_eager') to keep eager kernels."
)


def nondeterministic_op(e: Evidence) -> Cause | None:
    """An op on torch's list of nondeterministic ones gave another result for equal inputs."""
    op = e.origin.op
    if e.origin.story != "op" or op.left is None or op.right is None or e.origin.settings:
        return None
    name = base(e.case.left.name(op.left))
    known = NONDETERMINISTIC.get(name)
    value = e.origin.values.left
    device = e.case.left.trace.meta(value).device.partition(":")[0] if value is not None else "cpu"
    if known is None or device not in known[0].split():
        return None
    if known[1] == SPARSE and len(e.case.left.trace.ops.inputs[op.left]) < 3:
        return None
    if any(
        side.settings.before(side.seq(i))("deterministic_algorithms", None) is True
        for _, side, i in e.sides
        if i is not None
    ):
        return None
    condition = f" ({known[1]})" if known[1] else ""
    count, others = threads(e.case.left, op.left), threads(e.case.right, op.right)
    return cause(
        "nondeterministic-op",
        "certain" if device != "cpu" or (isinstance(count, int) and count > 1) else "likely",
        f"{e.case.left.name(op.left)} in {scope(e.case.left.module(op.left))} adds in the order in which threads arrive",
        [
            "same op, same arguments, inputs equal bit for bit, other outputs",
            f"it is on torch's list of nondeterministic ops on {device}{condition}",
            f"threads: left {count}, right {others}",
            _size(e),
        ],
        "Call torch.use_deterministic_algorithms(True), or torch.set_num_threads(1) on a CPU; on CUDA set"
        " CUBLAS_WORKSPACE_CONFIG=:4096:8 as well.",
    )


def rounding(e: Evidence) -> Cause | None:
    """The same arithmetic in another order: the size is what rounding gives."""
    if e.size.material or keyless(e.case, e.origin) is not None:
        return None
    if e.origin.kind == "leaf":
        return _leaf_rounding(e)
    if e.origin.story == "region" and _rearranged(e):
        return _other_order(e)
    if _differs_on_the_way(e):
        return _come_together(e)
    found = e.any_op
    where = (
        f"{found[1].name(found[2])} in {scope(found[1].module(found[2]))}"
        if found
        else "the results"
    )
    evidence = [_size(e)]
    picks, ran = kernel_picks(e), choices(e)
    if ran is not None:
        evidence += ran.evidence
    elif picks.left is not None and picks.right is not None:
        evidence.append(f"kernel: {told(picks.left)} in both")
    evidence += calls_seen(e)
    compiled = compiled_side(e)
    if compiled is not None:
        evidence += ran_compiled(e)
        evidence.append(
            f"{compiled}: torch.compile made the code around this op: it fuses what stands between products into loops of"
            " its own, which opdrift does not see, and which round and add in another order"
        )
    cast = cast_on_one_side(e) if compiled is None else None
    if cast is not None:
        evidence += casts_at(e, cast[0])
    evidence.append(other_sizes(e))
    evidence.append(_other_threads(e))
    evidence.append(other_memory_format(e))
    evidence += _regions(e)
    evidence += [
        f"{d.name}: {d.left} against {d.right}"
        for d in e.shared.environment
        if d.name.startswith(("cpu_capability", "cpu.", "mkldnn", "MKL", "torch", "mkl"))
    ]
    if e.size.bound is not None and e.size.bound.cannot_judge:
        evidence.append(
            "the op cancels so much that its result cannot be judged by size: look at the next op"
        )
    bound = e.size.bound
    exact = bound is not None and bound.exact  # then what it reads was rounded, out of sight
    certain = e.size.same_kernel or (bound is not None and bound.tight == bound.loose and not exact)
    if exact:
        evidence.append(
            "it only moves numbers: they were computed where the sample could not be followed, and rounded there"
        )
    why = f": {ran.sentence}" if ran is not None else ""
    if compiled is not None:
        why = f": the {compiled} run is compiled, the other is eager"
    if cast is not None:
        why = f": the {SIDES[cast[0]]} run computes it in {cast[1]}" + why.replace(":", ";", 1)
    open_ = doubt(e)
    if open_ is not None:
        return cause(
            "rounding",
            "possible",
            f"{where} gives the same result up to rounding{why}, as far as sizes tell: {open_.why}",
            [*evidence, *open_.evidence],
            open_.remedy,
        )
    return cause(
        "rounding",
        "certain" if certain else "likely",
        f"{where} gives the same result up to rounding{why}",
        evidence,
        _SAME_CODE if compiled is not None else _for_equal_bits(e, ran, cast),
    )


def _for_equal_bits(e: Evidence, ran: Choices | None, cast: tuple[int, str] | None) -> str:
    """What makes the bits equal, where nothing is wrong."""
    if cast is not None:
        return f"Nothing is wrong. For equal bits compute in one type: cast to {cast[1]} in both runs, or in neither."
    if ran is not None:
        return f"Nothing is wrong. {ran.pin}; then the bits can be compared."
    alike = for_equal_bits(e)
    if alike:
        return f"Nothing is wrong. {alike}."
    if other_memory_format(e):
        return "Nothing is wrong. For equal bits give both runs one memory format: x.to(memory_format=torch.channels_last), or .contiguous()."
    return (
        "Nothing is wrong. For equal bits use the same kernel on both sides: the same batch size, threads"
        " (torch.set_num_threads), attention backend (sdpa_kernel) and library versions."
    )


def _other_threads(e: Evidence) -> str:
    reader = e.consumer()
    left = e.origin.op.left if e.origin.op.left is not None else reader.left
    right = e.origin.op.right if e.origin.op.right is not None else reader.right
    if left is None or right is None:
        return ""
    a, b = threads(e.case.left, left), threads(e.case.right, right)
    return f"threads: left {a}, right {b}, so sums are split differently" if a != b else ""


def _leaf_rounding(e: Evidence) -> Cause:
    """Weights that one run casts to compute with, or a difference that the user allows."""
    names, types = e.origin.names, e.dtypes()
    which = some(names, 1)
    if types.left == types.right and _rearranged(e):
        return cause(
            "rounding",
            "certain",
            f"{which} {'is' if len(names) == 1 else 'are'} held in another order in the two runs, transposed say, and used accordingly: the results that"
            " are made of it agree up to rounding",
            [_size(e)],
            "Nothing is wrong: both runs compute with the same numbers.",
        )
    if types.left == types.right and e.size.limit is not None:
        return cause(
            "rounding",
            "likely",
            f"{which} differs, and so does what is made of it, until ops that only one of the runs has make up for that: the"
            " results agree up to rounding",
            [
                _size(e),
                *(f"{name}: {side.place(op)}" for name, side, op in e.sides if op is not None),
            ],
            "Nothing is wrong if one run folds into the weights what the other computes apart: a norm behind a convolution,"
            " a scale, the order of rotary halves. Compare the weights after undoing that to be sure.",
        )
    if types.left == types.right:
        return cause(
            "rounding",
            "certain",
            f"{which} differs by less than the given tolerance",
            [_size(e)],
            "Nothing is wrong by the tolerance that you gave. Compare without it to see what differs.",
        )
    return cause(
        "rounding",
        "certain",
        f"{which}: {types.left} in the left run, {types.right} in the right one, the same numbers up to"
        " the rounding of the cast; mixed precision keeps the original",
        [_size(e)],
        "Nothing is wrong. For equal bits compute in the same precision on both sides.",
    )


def _other_order(e: Evidence) -> Cause:
    """Rotary halves for rotary neighbours, heads in another order: used accordingly."""
    found = e.any_op
    where = scope(found[1].module(found[2])) if found else "the results"
    return cause(
        "rounding",
        "likely",
        f"the runs hold the same numbers in another order in {where}, and use them accordingly: the results that are made"
        " of them agree up to rounding",
        [_size(e), *_regions(e)],
        "Nothing is wrong: both runs compute with the same numbers.",
    )


def _differs_on_the_way(e: Evidence) -> bool:
    """Whether what the runs computed in different ways is further apart here than rounding, and the results are not."""
    gap, limit = e.size.difference, e.size.limit
    if e.origin.kind != "structure" or gap is None or gap.relative is None or limit is None:
        return False
    return gap.relative > limit


def _come_together(e: Evidence) -> Cause:
    """Other ways to the same results: weights of experts scaled to one before or after the best are picked."""
    reader = e.consumer()
    op = e.case.left.name(reader.left) if reader.left is not None else "the result"
    where = f" in {scope(e.case.left.module(reader.left))}" if reader.left is not None else ""
    return cause(
        "rounding",
        "likely",
        f"the runs compute what {op}{where} reads in different ways, and come together again: the results agree up to"
        " rounding",
        [
            f"here they are {number(e.size.difference.relative)} apart"
            if e.size.difference is not None and e.size.difference.relative is not None
            else "",
            *_regions(e),
        ],
        "Nothing is wrong if both ways are meant to compute the same; these inputs show no difference. Compare the two at"
        " the lines above to be sure.",
    )


def _rearranged(e: Evidence) -> bool:
    values = e.origin.values
    if values.left is None or values.right is None:
        return False
    a, b = e.case.left.fingerprint(values.left), e.case.right.fingerprint(values.right)
    like = likeness(a, b) if a is not None and b is not None else None
    return like is not None and like.kind == "rearranged"


def kernel(e: Evidence) -> Cause | None:
    """Another backend or kernel ran, with a result that rounding does not explain."""
    if not e.size.material or e.origin.kind in ("leaf", "hidden-write"):
        return None
    if e.origin.story in ("op", "amplified"):
        return _other_result(e)
    if e.origin.story != "region":
        return None
    ran = choices(e)
    fused = _fused_on_one_side(e)
    if not e.ops_of(0) or not e.ops_of(1) or not (fused or (ran and ran.attention)):
        return None
    evidence = [f"{name}: {side.place(op)}" for name, side, op in fused[:1]]
    evidence += ran.evidence if ran is not None else ()
    evidence += calls_seen(e)
    evidence += _regions(e)
    modes = [side.trace.header.flags.get("grad_mode") for _, side, _ in e.sides]
    grads = [_grad_enabled(side, e.ops_of(n)) for n, (_, side, _) in enumerate(e.sides)]
    if grads[0] != grads[1]:
        evidence.append(
            f"autograd: {'on' if grads[0] else 'off'} against {'on' if grads[1] else 'off'}; fast paths need it off"
        )
    elif modes[0] != modes[1]:
        evidence.append(f"grad_mode: {modes[0]} against {modes[1]}")
    evidence.append(_size(e))
    where = scope(fused[0][1].module(fused[0][2])) if fused else "the model"
    which = ran.sentence if ran else f"the {fused[0][0]} run takes a fused path"
    return cause(
        "kernel",
        # left out padding is known to come out otherwise; else something else may be wrong on that way
        "certain" if _leaves_padding_out(e) else "likely",
        f"{which}, in {where}; the result differs by more than rounding",
        evidence,
        f"{ran.pin if ran else FAST_PATH}; then compare again."
        + (PADDED if fused and "scaled_dot_product" not in fused[0][1].name(fused[0][2]) else ""),
    )


def _leaves_padding_out(e: Evidence) -> bool:
    """Whether one run packs the valid positions, so that padded ones come out as zeros."""
    return any(
        "_nested_tensor_from_mask" in side.name(op)
        for number, (_, side, _) in enumerate(e.sides)
        for op in e.ops_of(number)
    )


def _other_result(e: Evidence) -> Cause | None:
    op = e.origin.op
    if op.left is None or op.right is None or e.is_region:
        return None
    if is_collective(e.case.left.name(op.left)):
        return None  # what the other ranks gave, and how they ended, is its input, too
    if e.origin.settings and not e.case.by_sample:
        return None  # it was asked to compute something else
    states = int(e.case.left.trace.ops.rng[op.left]), int(e.case.right.trace.ops.rng[op.right])
    drawing = draws(e.case.left, op.left) or draws(e.case.right, op.right)
    if drawing and (states[0] != states[1] or not states[0]):
        return None
    ran = choices(e)
    devices = {
        side.trace.meta(int(v)).device.partition(":")[0]
        for _, side, i in e.sides
        if i is not None
        for v in side.trace.ops.outputs[i]
    }
    before = (
        "inputs equal bit for bit"
        if e.origin.inputs_match
        else "inputs that explain less than this"
    )
    evidence = [f"same op, same arguments, {before}", _size(e)]
    if drawing:
        evidence.append(f"the generator's state was the same, too: {states[0]:016x}")
    evidence += ran.evidence if ran is not None else ()
    evidence += calls_seen(e)
    if len(devices) > 1:
        evidence.append(f"devices: {', '.join(sorted(devices))}")
    gap = e.size.difference
    if gap is not None and gap.changed_index is not None:
        evidence.append(f"one element changed, index {gap.changed_index}")
    evidence += [f"{name}: {side.place(i)}" for name, side, i in e.sides if i is not None]
    name = e.case.left.name(op.left)
    return cause(
        "kernel",
        "likely" if ran or other_calls(e) or len(devices) > 1 else "possible",
        f"{name} in {scope(e.case.left.module(op.left))} computes something else from"
        f" {'the same inputs' if e.origin.inputs_match is not False else 'inputs that differ by less'}"
        + (f": {ran.sentence}" if ran else ""),
        evidence,
        (f"{ran.pin}, and compare again. " if ran else "")
        + "Run the op alone on saved inputs in both environments; if it disagrees there, the kernel or the hardware is at"
        " fault, else something wrote into its result (a custom kernel, another stream or thread).",
    )


# ---- facts -------------------------------------------------------------------------------------------


def _fused_on_one_side(e: Evidence) -> list[tuple[str, Side, int]]:
    """Fused ops that only one side has here: those of whole layers first, else those of attention."""
    partners = (e.case.pairing.right_of, e.case.pairing.left_of)
    for words in FUSED:
        found = [
            (name, side, op)
            for n, (name, side, _) in enumerate(e.sides)
            for op in e.ops_of(n)
            if partners[n][op] < 0 and any(word in side.name(op) for word in words)
        ]
        if len({name for name, _, _ in found}) == 1:
            return found
        if found:
            return []
    return []


def _regions(e: Evidence) -> list[str]:
    if e.origin.story != "region":
        return []
    return [
        f"{name}: {op_names(side, e.ops_of(n))}"
        for n, (name, side, _) in enumerate(e.sides)
        if e.ops_of(n)
    ]


def _grad_enabled(side: Side, ops: list[int]) -> bool:
    return any(side.trace.ops.flags[op] & 64 for op in ops)


def _size(e: Evidence) -> str:
    gap, limit = e.size.difference, e.size.limit
    if gap is None or gap.relative is None:
        return ""
    words = f"relative difference {number(gap.relative)}"
    if limit is not None and limit > 0:
        words += f", explained up to {number(limit)}"
    elif e.size.bound is not None and e.size.bound.exact:
        words += ", and the op is exact: equal inputs give equal bits"
    return words
