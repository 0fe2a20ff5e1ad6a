"""Why each backend of scaled_dot_product_attention refuses a call, in torch's order of checks.

A rule answers with a sentence, or None if it has no objection. Where torch's own code is: CPU in
sdp_utils_cpp.h and .cpp, CUDA in cuda/sdp_utils.cpp, read in torch 2.13 and two copies near it
(notes: kernels, 1.2 and 2.1). 80,000 random calls agreed on CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from opdrift.picks.sdpa import (
    CUDNN,
    EFFICIENT,
    FLASH,
    MATH,
    CallRaises,
    Choice,
    Facts,
    Gpu,
    Operand,
    Switches,
    order,
)

#: Answers why a backend refuses a call on a device.
Rule = Callable[[Facts, Switches, Gpu], str | None]

_HALF: Final = ("float16", "bfloat16")
_CPU_DTYPES: Final = ("float32", "float64", "bfloat16", "float16")
#: What CUDA's rules are asked with on a CPU, whose rules do not look at it.
_NO_GPU: Final = Gpu(0, 0)


def choose(facts: Facts, switches: Switches, gpu: Gpu | None = None) -> Choice:
    """What torch chooses for a call; on CUDA `gpu` must be given."""
    try:
        if facts.device == "cpu":
            return _choose_cpu(facts, switches)
        assert gpu is not None
        return _choose_cuda(facts, switches, gpu)
    except CallRaises as error:
        return Choice(None, raises=str(error))


def _choose_cpu(facts: Facts, switches: Switches) -> Choice:
    """Flash, else math: the priority order and the other backends' switches have no say."""
    if not switches.flash and not switches.math:
        return Choice(None, raises="RuntimeError: No viable backend")
    found = objections(CPU_FLASH, facts, switches, _NO_GPU)
    if not found:
        return Choice(FLASH)
    refused = {FLASH: found}
    if not switches.math:
        return Choice(None, refused, "RuntimeError: No available kernel")
    return Choice(MATH, refused)


def _choose_cuda(facts: Facts, switches: Switches, gpu: Gpu) -> Choice:
    refused: dict[str, tuple[str, ...]] = {}
    for backend in order(switches, gpu):
        if backend == MATH:
            if switches.math:
                return Choice(MATH, refused)
            refused[MATH] = (_switched_off("math"),)
        elif (rules := cuda_rules(backend, nested=facts.nested)) is not None:
            found = objections(rules, facts, switches, gpu)
            if not found:
                return Choice(backend, refused)
            refused[backend] = found
    return Choice(None, refused, "RuntimeError: No available kernel")


def objections(
    rules: Sequence[Rule], facts: Facts, switches: Switches, gpu: Gpu
) -> tuple[str, ...]:
    """Every reason against a backend, in torch's order; the first one is what torch saw."""
    found: list[str] = []
    for rule in rules:
        try:
            why = rule(facts, switches, gpu)
        except CallRaises:
            if not found:
                raise
            continue  # torch stopped before it
        if why is not None:
            found.append(why)
            if rule is _rank:
                break  # the rules after it count on four dims
    return tuple(found)


# ---- rules that CPU and CUDA share -------------------------------------------------------------------


def _switched_off(name: str) -> str:
    return f"the {name} backend is switched off"


def _enabled(name: str, facts: Facts, switches: Switches, gpu: Gpu) -> str | None:
    return None if getattr(switches, name) else _switched_off(name)


def _operands(facts: Facts) -> tuple[Operand, Operand, Operand]:
    return facts.query, facts.key, facts.value


def _head_sizes(facts: Facts) -> tuple[int, int, int]:
    q, k, v = (t.shape[-1] for t in _operands(facts))
    return q, k, v


def _three(values: Sequence[object]) -> str:
    """`8`, or `8, 8 and 16` for query, key and value where they differ."""
    if len(set(values)) == 1:
        return str(values[0])
    return f"{values[0]}, {values[1]} and {values[2]} (query, key, value)"


def _rank(facts: Facts, switches: Switches, gpu: Gpu) -> str | None:
    ranks = [len(t.shape) for t in _operands(facts)]
    return (
        None
        if ranks == [4, 4, 4]
        else f"query, key and value must have 4 dims, not {_three(ranks)}"
    )


def _batch_and_heads(
    facts: Facts, switches: Switches, gpu: Gpu, *, grouped: bool = True, same_kv: bool = True
) -> str | None:
    """Args as torch's: whether the backend knows grouped heads, and needs as many of keys as of values."""
    shapes = [t.shape for t in _operands(facts)]
    batches, heads = [s[0] for s in shapes], [s[-3] for s in shapes]
    if len(set(batches)) > 1:
        return f"batch sizes differ: {_three(batches)}"
    query, key, value = heads
    if not (facts.grouped and grouped):
        if query == key == value:
            return None
        hint = ", and it has no grouped heads" if facts.grouped else ", and enable_gqa is not set"
        return f"numbers of heads differ: {_three(heads)}{hint}"
    if same_kv and key != value:
        return f"key has {key} heads and value {value}"
    if key == 0 or (not same_kv and value == 0):
        raise CallRaises("SIGFPE")
    if query % key or (not same_kv and query % value):
        return f"{query} query heads are no multiple of {key} key and {value} value heads"
    return None


def _mask(facts: Facts, switches: Switches, gpu: Gpu) -> str | None:
    mask = facts.mask
    if mask is None:
        return None
    if mask.requires_grad:  # whatever the grad mode
        return "attn_mask requires grad"
    shape = mask.shape
    if len(shape) < 2:
        raise CallRaises("IndexError")
    (batch, heads, length), keys = facts.query.shape[:3], facts.key.shape[2]
    if shape[-2] not in (length, 1) or shape[-1] not in (keys, 1):
        return f"attn_mask of shape {list(shape)} does not end in {length} or 1, {keys} or 1"
    if len(shape) == 2:
        return None
    if len(shape) != 4:
        return f"attn_mask has {len(shape)} dims; fused kernels take 2 or 4"
    if shape[0] in (batch, 1) and shape[1] in (heads, 1):
        return None
    return f"attn_mask of shape {list(shape)} does not begin with {batch} or 1, {heads} or 1"


def _lengths(facts: Facts, switches: Switches, gpu: Gpu) -> str | None:
    query, key = facts.query.shape[-2], facts.key.shape[-2]
    return f"a length is 0 (query {query}, key {key})" if 0 in (query, key) else None


def _last_stride(
    facts: Facts, switches: Switches, gpu: Gpu, *, one_is_dense: bool, mask_too: bool
) -> str | None:
    """Args: whether heads of size 1 are exempt, and whether the mask's stride counts."""
    strides = [t.last_stride for t in _operands(facts)]
    if strides != [1, 1, 1] and not (one_is_dense and facts.query.shape[-1] == 1):
        which = ", ".join(
            f"{name} {stride}"
            for name, stride in zip(("query", "key", "value"), strides, strict=True)
            if stride != 1
        )
        return f"the last dim is not contiguous (stride of {which})"
    if mask_too and facts.mask is not None and facts.mask.last_stride != 1:
        return f"attn_mask's last dim is not contiguous (stride {facts.mask.last_stride})"
    return None


def _dtypes(facts: Facts, allowed: Sequence[str]) -> str | None:
    found = [t.dtype for t in _operands(facts)]
    if len(set(found)) == 1 and found[0] in allowed:
        return None
    return f"it takes {' or '.join(allowed)}, not {_three(found)}"


# ---- CPU -------------------------------------------------------------------------------------------------


def _cpu_nested(facts: Facts, switches: Switches, gpu: Gpu) -> str | None:
    return "an operand is a nested tensor" if facts.nested else None


def _cpu_dropout(facts: Facts, switches: Switches, gpu: Gpu) -> str | None:
    return f"dropout_p is {facts.dropout:g}, above 0" if facts.dropout > 0 else None


def _cpu_head_sizes(facts: Facts, switches: Switches, gpu: Gpu) -> str | None:
    sizes = _head_sizes(facts)
    return f"head sizes differ: {_three(sizes)}" if len(set(sizes)) > 1 else None


def _cpu_dtypes(facts: Facts, switches: Switches, gpu: Gpu) -> str | None:
    return _dtypes(facts, _CPU_DTYPES)


CPU_FLASH: Final[tuple[Rule, ...]] = (
    partial(_enabled, "flash"),
    _cpu_nested,
    _cpu_dropout,
    _rank,
    _batch_and_heads,
    _mask,
    _cpu_head_sizes,
    _lengths,
    partial(_last_stride, one_is_dense=False, mask_too=False),
    _cpu_dtypes,
)


# ---- CUDA ------------------------------------------------------------------------------------------------


def _capability(
    low: tuple[int, int], high: tuple[int, int], facts: Facts, switches: Switches, gpu: Gpu
) -> str | None:
    if gpu.within(low, high):
        return None
    return f"the GPU is {gpu.name}; it needs sm{low[0]}{low[1]} to sm{high[0]}{high[1]}"


def _half_dtypes(facts: Facts, switches: Switches, gpu: Gpu) -> str | None:
    return _dtypes(facts, _HALF if gpu.major >= 8 else _HALF[:1])


def _flash_mask(facts: Facts, switches: Switches, gpu: Gpu) -> str | None:
    return None if facts.mask is None else "an attn_mask is given"


def _flash_head_sizes(facts: Facts, switches: Switches, gpu: Gpu) -> str | None:
    sizes = _head_sizes(facts)
    if len(set(sizes)) > 1 or sizes[0] > 256:
        return f"head sizes must be equal and at most 256, not {_three(sizes)}"
    return None


def _flash_training(facts: Facts, switches: Switches, gpu: Gpu) -> str | None:
    """Consumer GPUs have too little shared memory for the backward of large heads."""
    size = facts.query.shape[-1]
    small = gpu.within((8, 6), (8, 9)) or gpu.within((12, 0), (12, 1))
    if facts.wants_grad and small and (192 < size <= 224 or (size > 224 and facts.dropout > 0)):
        dropout = " and dropout" if facts.dropout > 0 else ""
        return f"training with head size {size}{dropout} on {gpu.name}"
    return None


def _flash_causal(facts: Facts, switches: Switches, gpu: Gpu) -> str | None:
    query, key = facts.query.shape[-2], facts.key.shape[-2]
    if facts.causal and not facts.nested and query != key:
        return f"is_causal with {query} queries and {key} keys"
    return None


def _flash_dtypes(facts: Facts, switches: Switches, gpu: Gpu) -> str | None:
    if gpu.major >= 9 and switches.fa3:
        return _dtypes(facts, (*_HALF, "float8_e4m3fn"))
    return _half_dtypes(facts, switches, gpu)


def _efficient_head_sizes(facts: Facts, switches: Switches, gpu: Gpu) -> str | None:
    multiple = _alignment(facts, gpu)
    query, key, value = sizes = _head_sizes(facts)
    if query == key and min(sizes) > 0 and not (query % multiple or value % multiple):
        return None
    of = f", and all multiples of {multiple}" if multiple > 1 else ""
    return f"head sizes of query and key must be equal{of}, not {_three(sizes)}"


def _alignment(facts: Facts, gpu: Gpu) -> int:
    """The multiple that CUTLASS's products need of head sizes."""
    half = facts.query.dtype in _HALF
    tensor_cores = gpu.major >= 8 or (gpu.major >= 7 and half)
    return max(4 if gpu.major >= 8 else 1, (8 if half else 4) if tensor_cores else 1)


def _efficient_training_nested(facts: Facts, switches: Switches, gpu: Gpu) -> str | None:
    return "training with nested tensors" if facts.wants_grad else None


def _efficient_dtypes(facts: Facts, switches: Switches, gpu: Gpu) -> str | None:
    return _dtypes(facts, ("float32", *(_HALF if gpu.major >= 8 else _HALF[:1])))


def _cudnn_version(facts: Facts, switches: Switches, gpu: Gpu) -> str | None:
    if gpu.cudnn == 0:
        return "torch was built without cuDNN"
    if facts.dropout > 0 and 91100 < gpu.cudnn < 91400:
        return f"dropout is broken in cuDNN {gpu.cudnn}"
    return None


def _cudnn_nested(facts: Facts, switches: Switches, gpu: Gpu) -> str | None:
    if not facts.nested:
        return None
    return "nested tensors need TORCH_CUDNN_SDPA_NESTED_TENSOR_ENABLED=1"


def _cudnn_deterministic(facts: Facts, switches: Switches, gpu: Gpu) -> str | None:
    return "deterministic algorithms are required" if switches.deterministic else None


def _cudnn_dropout(facts: Facts, switches: Switches, gpu: Gpu) -> str | None:
    sixteenths = facts.dropout * 16
    if sixteenths == math.floor(sixteenths):
        return None
    return f"dropout_p is {facts.dropout:g}, no multiple of 1/16"


def _cudnn_shapes(facts: Facts, switches: Switches, gpu: Gpu) -> str | None:
    batch, heads, length, _ = facts.query.shape
    query, _, value = sizes = _head_sizes(facts)
    keys = facts.key.shape[2]
    limit = 128
    if gpu.cudnn >= 91000 and (gpu.major, gpu.minor) == (9, 0):
        limit = 256
    if gpu.cudnn >= 91100 and gpu.major == 10 and (query, value) == (192, 128):
        limit = 192
    if batch > 65535 or heads > 65535:
        return f"batch {batch} or heads {heads} above 65535"
    if query > limit or value > limit:
        return f"head sizes must be at most {limit} here, not {_three(sizes)}"
    if query % 8 or value % 8:
        return f"head sizes must be multiples of 8, not {_three(sizes)}"
    if keys == 1:
        return "there is a single key"
    return "a single query with dropout" if length == 1 and facts.dropout != 0 else None


_SM80_ON: Final = partial(_capability, (8, 0), (12, 1))
#: Backend -> its rules, those for nested tensors, and those for dense ones, which come after.
_CUDA: Final[dict[str, tuple[tuple[Rule, ...], tuple[Rule, ...], tuple[Rule, ...]]]] = {
    FLASH: (
        (
            partial(_enabled, "flash"),
            _rank,
            _flash_mask,
            _flash_head_sizes,
            _SM80_ON,
            _flash_training,
            _flash_causal,
            _flash_dtypes,
        ),
        (),
        (_batch_and_heads, _lengths, partial(_last_stride, one_is_dense=True, mask_too=True)),
    ),
    EFFICIENT: (
        (
            partial(_enabled, "efficient"),
            partial(_capability, (5, 0), (12, 1)),
            _rank,
            _efficient_head_sizes,
        ),
        (_efficient_training_nested, _efficient_dtypes),
        (
            _lengths,
            partial(_last_stride, one_is_dense=False, mask_too=True),
            partial(_batch_and_heads, grouped=False),
            _efficient_dtypes,
        ),
    ),
    CUDNN: (
        (
            _cudnn_version,
            partial(_enabled, "cudnn"),
            _cudnn_nested,
            _rank,
            _cudnn_deterministic,
            _half_dtypes,
            _mask,
            _SM80_ON,
            _cudnn_dropout,
        ),
        (),
        (
            _lengths,
            partial(_last_stride, one_is_dense=True, mask_too=True),
            partial(_batch_and_heads, same_kv=False),
            _cudnn_shapes,
        ),
    ),
}


def cuda_rules(backend: str, *, nested: bool) -> tuple[Rule, ...] | None:
    """A backend's rules in torch's order; None for one without rules."""
    if backend not in _CUDA:
        return None
    always, for_nested, for_dense = _CUDA[backend]
    return always + (for_nested if nested else for_dense)
