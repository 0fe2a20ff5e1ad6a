"""The tensors of a call: what an op reads, what it returns and writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from opdrift.batches.calls import Operand
from opdrift.neutral import written_tensors

if TYPE_CHECKING:
    from opdrift.plans import Plan

Arguments = tuple[Sequence[Any], Mapping[str, Any]]


def read_arguments(plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """The arguments that an op reads: not those of an out= variant."""
    if not kwargs or not plan.writes:
        return args, kwargs
    out = {name for position, name in plan.writes if position is None}
    return args, {name: item for name, item in kwargs.items() if name not in out}


def tensors(items: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments or results, lists flattened."""
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from tensors(item)


def replaced(item: Any, operands: Iterator[Operand]) -> Any:
    """An argument with operands, taken in order, in place of its tensors."""
    if isinstance(item, Tensor):
        return next(operands)
    if isinstance(item, list | tuple):
        return [replaced(each, operands) for each in item]
    return item


def results(plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> list[Tensor]:
    """What an op returned, then what else it wrote."""
    found = [out] if isinstance(out, Tensor) else list(tensors((out,)))
    if plan.writes:
        for tensor in written_tensors(plan, args, kwargs):
            if not any(tensor is each for each in found):
                found.append(tensor)
    return [tensor for tensor in found if has_storage(tensor)]


def has_storage(tensor: Tensor) -> bool:
    """Whether a tensor is plain and strided, so that something can hang on its storage."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def is_part(tensor: Tensor) -> bool:
    """Whether a tensor covers less than its storage."""
    return tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()


def kind_of(tensor: Tensor) -> Literal["float", "integer", "bool"]:
    """What kind of numbers a tensor holds."""
    if tensor.dtype is torch.bool:
        return "bool"
    return "float" if tensor.is_floating_point() or tensor.is_complex() else "integer"


def counts(plan: Plan, args: Sequence[Any]) -> bool:
    """Whether an op makes 0, 1, ..."""
    if not plan.name.startswith("aten.arange."):
        return False
    start, _, step = (0, args[0], 1) if len(args) == 1 else (*args[:3], 1)[:3]
    return bool(start == 0 and step == 1)
