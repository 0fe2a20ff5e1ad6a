"""Which tensors can be read, and the plain form in which they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from opdrift.tfp1 import FP8_FORMATS, Code

FIRST_FP8_KIND = 16
"""A kind says how to read memory: a component code, or 16 + the number of an fp8 format."""

MANY = 1 << 24
"""An expanded tensor of more elements is not written out to be read: 16 million, tens of megabytes."""

WITHOUT_CONTENT = ("has no content", "has no memory of its own", "fingerprint those")
"""How reasons end for which nothing is missing: there is no content, or it has fingerprints of its own."""

_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})

_NUMBERS = {
    torch.float32: Code.F32,
    torch.float64: Code.F64,
    torch.float16: Code.F16,
    torch.bfloat16: Code.BF16,
    torch.int8: Code.I8,
    torch.uint8: Code.U8,
    torch.bool: Code.U8,
    torch.int16: Code.I16,
    torch.uint16: Code.U16,
    torch.int32: Code.I32,
    torch.uint32: Code.U32,
    torch.int64: Code.I64,
    torch.uint64: Code.U64,
}
_RAW_DTYPE = torch.bits8


def kinds_by_dtype() -> dict[torch.dtype, int]:
    """The kind of every dtype whose contiguous memory can be read as it is."""
    kinds = {dtype: int(code) for dtype, code in _NUMBERS.items()}
    for table, name in enumerate(FP8_FORMATS):
        dtype = getattr(torch, name, None)  # torch 2.9 has them all; a later one may drop some
        if dtype is not None:
            kinds[dtype] = FIRST_FP8_KIND + table
    kinds[_RAW_DTYPE] = int(Code.RAW)
    return kinds


_READABLE = frozenset(kinds_by_dtype())
#: Of the two ways not to be recorded by autograd the cheap one: `torch.no_grad` is Python, 2 us.
_below_autograd = torch._C._AutoDispatchBelowAutograd
_nobody_sees = torch._C._DisableTorchDispatch


def can_fingerprint(tensor: Tensor) -> str | None:
    """Why a tensor's content cannot be read; None if it can.

    Reading a tensor whose storage was freed (FSDP resizes them to 0) ends the process, so callers ask
    first.
    """
    with torch._C.DisableTorchFunction():  # else a subclass or a mode would see every look
        return _why_unreadable(tensor)


def _why_unreadable(tensor: Tensor) -> str | None:
    if _is_plain(tensor):
        needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        if tensor.untyped_storage().nbytes() >= needed:
            return None  # as below, in a third of the time
    if isinstance(tensor, FakeTensor):
        return "a fake tensor has no content"
    if hasattr(tensor, "__tensor_flatten__"):
        return f"a {type(tensor).__name__} wraps other tensors: fingerprint those"
    if tensor.is_meta:
        return "a meta tensor has no content"
    if tensor.is_nested:
        return "a nested tensor consists of other tensors: fingerprint those"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout} consists of other tensors: fingerprint those"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor inside a functorch transform has no memory of its own"
    if torch._is_functional_tensor(tensor):
        return "a functional tensor has no memory of its own"
    if tensor.numel() == 0:
        return None
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    held = tensor.untyped_storage().nbytes()
    if held < needed and not _packs_elements(tensor):
        return f"its storage was freed: {held} bytes are left of the {needed} it needs"
    return None


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is torch's own, in the host's memory, and its elements follow each other."""
    return (
        type(tensor) in _TYPES
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not torch._is_functional_tensor(tensor)
        and tensor.is_contiguous()
    )


def _packs_elements(tensor: Tensor) -> bool:
    """Whether several elements share a byte; such types give 1 as their element size."""
    return (
        tensor.dtype in (torch.quint4x2, torch.quint2x4) and tensor.untyped_storage().nbytes() > 0
    )


def without_repeats(tensor: Tensor) -> Tensor:
    """What an expanded tensor repeats: each dim of stride 0 cut to one element."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
        tensor = tensor.detach()
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dim]:
                tensor = tensor.narrow(dim, 0, 1)
        return tensor


def plain(tensor: Tensor) -> Tensor:
    """The same content as contiguous memory of the host, of a dtype that has a kind.

    Conjugation and negation are resolved, complex elements become two components, and types without
    numbers (sub-byte, quantised) become bytes. No mode or subclass sees the ops, autograd does not
    record them, and nothing about `tensor` itself changes. Waits for a device that holds the tensor.
    """
    with _nobody_sees(), torch._C.DisableTorchFunction(), _below_autograd():
        if tensor.dtype in _NUMBERS and not tensor.is_neg() and not tensor._is_zerotensor():
            return tensor.cpu().contiguous()  # as below, in a third of the time
        return _components(tensor).cpu().contiguous()


def plain_on_device(tensor: Tensor) -> Tensor:
    """As `plain`, but where the tensor is, and without waiting for anything.

    What has to be copied is copied on the current stream, which orders its memory's next use, too.
    """
    with _nobody_sees(), torch._C.DisableTorchFunction(), _below_autograd():
        return _components(tensor).contiguous()


def _components(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor._is_zerotensor():  # autograd's zeros without memory; only a copy has some
        tensor = tensor.clone()
    if tensor.is_quantized:
        return flat(tensor.int_repr()).view(torch.uint8).view(_RAW_DTYPE)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj().resolve_neg())
    elif tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor if tensor.dtype in _READABLE else _as_bytes(tensor)


def _as_bytes(tensor: Tensor) -> Tensor:
    if (
        tensor.element_size() == 1
    ):  # as bytes first: copies are not implemented for all of these types
        return tensor.view(torch.uint8).contiguous().view(_RAW_DTYPE)
    return flat(tensor).view(torch.uint8).view(_RAW_DTYPE)


def stretches(tensor: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """The elements of a tensor in row-major order, cut into stretches of so many."""
    elements, start = tensor.detach().reshape(-1), 0
    for size in sizes:
        yield elements.narrow(0, start, size)
        start += size


def flat(tensor: Tensor) -> Tensor:
    """The elements in one dim of stride 1, which `view` to another width asks for.

    A single element is contiguous whatever its strides are, and `reshape` keeps them.
    """
    return tensor.contiguous().as_strided((tensor.numel(),), (1,))
