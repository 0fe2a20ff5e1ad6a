"""Follow the batch without recording: what a rule says of an op's results, held against what really moves.

`Follow` runs ops as the recorder does and keeps where the axes lie in each result. `moved` runs a program
twice, one sample changed, and says which samples of each result changed with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from opdrift.batch import Batch
from opdrift.batches.operands import has_storage, results
from opdrift.batches.rules import guess, rule_for
from opdrift.batches.tracking import Batches
from opdrift.fingerprint.engine import load_engine
from opdrift.neutral import silent
from opdrift.plans import Plan
from opdrift.tracefile.axes import BATCH, MIXED, UNKNOWN, UNSURE, Extents, Position

_NUMBERS = itertools.count()


class NoValues:
    """Stands for the recorder's values: nothing is recorded."""

    def __init__(self) -> None:
        self.key = f"_following_{next(_NUMBERS)}"
        self.engine = load_engine()
        self.devices = None
        self.is_elsewhere = lambda tensor: False


@dataclass
class Result:
    """A result of an op: where the axes lie in it, and what it holds."""

    op: str
    positions: tuple[Position, ...]
    flags: int
    content: Tensor
    guessed: bool

    @property
    def batch(self) -> list[Position]:
        return [p for p in self.positions if p.axis == BATCH]


class Follow(TorchDispatchMode):
    """Follows the batch through the ops that run inside."""

    supports_higher_order_operators = True

    def __init__(
        self,
        batch: Batch,
        inputs: Mapping[str, Tensor] | None = None,
        *,
        padded: int | None = None,
    ) -> None:
        """`inputs` are seeded as a root module's arguments; `padded` is their padded length, if it must be said."""
        super().__init__()
        self.extents: list[Extents] = []
        self.told: list[Mapping[str, Any]] = []
        self.failures: list[tuple[str, BaseException]] = []
        self.results: list[Result] = []
        self._plans: dict[Any, Plan] = {}
        self._signatures: dict[Any, int] = {}
        self.batches = Batches(
            batch,
            NoValues(),  # type: ignore[arg-type]
            write_extents=lambda _, extents: self.extents.append(extents),
            write_mark=self.told.append,
            failed=lambda where, error: self.failures.append((where, error)),
        )
        self.batches._padded = padded
        self.batches.seed((inputs or {}).items())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plan = self._plans.setdefault(func, Plan(func, len(self._plans) + 1))
        key = (func, _signature(args), _signature(kwargs))
        signature = self._signatures.setdefault(key, len(self._signatures) + 1)
        out = func(*args, **kwargs)
        with silent():
            self.batches.follow(plan, signature, args, kwargs, out)
            rule = rule_for(func)
            if rule is not None and not plan.fresh:
                for tensor in results(plan, (), {}, out) if not plan.writes else _first(out):
                    self._keep(plan.name, tensor, guessed=rule is guess)
        return out

    def _keep(self, name: str, tensor: Tensor, *, guessed: bool) -> None:
        positions, flags = self.where(tensor)
        self.results.append(
            Result(name, positions, flags, tensor.detach().clone(), guessed and bool(positions))
        )

    def where(self, tensor: Tensor) -> tuple[tuple[Position, ...], int]:
        """Where the axes lie in a tensor, and flags."""
        track = self.batches._tracks.of(tensor)
        if track is None:
            return (), 0
        positions, flags = self.batches._tracks.located(track, tensor)
        return tuple(p for p in positions if p.axis >= BATCH), flags


def _first(out: Any) -> list[Tensor]:
    items = [out] if isinstance(out, Tensor) else [o for o in out or () if isinstance(o, Tensor)]
    return [item for item in items if has_storage(item)]


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        if not has_storage(value):
            return str(value.layout)
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_signature, value))
    if isinstance(value, dict):
        return tuple((name, _signature(item)) for name, item in value.items())
    return repr(value)


# ---- what really moves -------------------------------------------------------------------------------------


def changed(tensor: Tensor, dim: int, sample: int, *, outer: int = 1, size: int = 0) -> Tensor:
    """A copy in which one sample holds something else."""
    copy = tensor.clone()
    size = size or copy.shape[dim]
    item = copy.unflatten(dim, (outer, size, -1)).select(dim + 1, sample)
    if copy.dtype == torch.bool:
        item.logical_not_()
    elif copy.is_floating_point():
        item.add_(torch.randn_like(item))
    else:
        item.add_(torch.randint(2, 6, item.shape))
    return copy


def bits(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The content as integers, so that nan equals nan and -0 differs from 0."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()]).numpy()


def moved_samples(left: Tensor, right: Tensor, position: Position) -> set[int]:
    """The samples of two contents that differ, the batch lying as in `position`."""
    differs = bits(left) != bits(right)
    dim, outer, size, inner, _ = position
    shape = left.shape
    split = differs.reshape(*shape[:dim], outer, size, inner, *shape[dim + 1 :], -1)
    by_sample = np.moveaxis(split, dim + 1, 0).reshape(size, -1)
    return set(np.flatnonzero(by_sample.any(1)).tolist())


@dataclass
class Count:
    """How many results of a program were followed rightly, and what was not."""

    outputs: int = 0
    followed: int = 0
    mixed: int = 0
    unknown: int = 0
    unsure: int = 0
    wrong: list[str] = field(default_factory=list)


def count(
    run: Callable[..., object],
    inputs: Mapping[str, Tensor],
    dims: Mapping[str, int],
    size: int,
) -> Count:
    """Change one sample after the other, and hold what moves in each result against what was followed.

    Args:
        run: Takes the inputs by name.
        inputs: The inputs; those in `dims` are changed.
        dims: Where the batch lies in them.
        size: Samples of the batch.
    """
    run(**{name: tensor.clone() for name, tensor in inputs.items()})  # models keep tables
    first = _followed(run, inputs, size)
    found = Count(outputs=len(first))
    wrong: dict[int, str] = {}
    for sample in range(size):
        others = {
            name: changed(tensor, dims[name], sample) if name in dims else tensor.clone()
            for name, tensor in inputs.items()
        }
        second = _followed(run, others, size)
        assert [r.op for r in second] == [r.op for r in first]
        for i, (a, b) in enumerate(zip(first, second, strict=True)):
            problem = _problem(a, b, sample)
            if problem:
                wrong.setdefault(i, f"{i} {a.op} {tuple(a.content.shape)}: {problem}")
    for i, result in enumerate(first):
        if i in wrong:
            found.wrong.append(wrong[i])
        elif result.flags & UNKNOWN:
            found.unknown += 1
        elif result.flags & MIXED:
            found.mixed += 1
        elif result.flags & UNSURE:
            found.unsure += 1
        else:
            found.followed += 1
    return found


def _followed(run: Callable[..., object], inputs: Mapping[str, Tensor], size: int) -> list[Result]:
    given = {name: tensor.clone() for name, tensor in inputs.items()}
    torch.manual_seed(0)
    with Follow(Batch(size), given) as follow:
        run(**given)
    assert follow.failures == []
    return follow.results


def _problem(a: Result, b: Result, sample: int) -> str | None:
    """What contradicts where the batch was said to lie, when `sample` was changed between two runs."""
    if a.flags & (UNKNOWN | MIXED | UNSURE) or not a.content.numel():
        return None
    if a.content.shape != b.content.shape:
        return "its shape depends on the content"
    if not a.batch:
        return (
            "it changes, and carries nothing"
            if (bits(a.content) != bits(b.content)).any()
            else None
        )
    others = moved_samples(a.content, b.content, a.batch[0]) - {sample}
    return f"{a.batch[0]} says sample {sample}, {sorted(others)} moved" if others else None
