"""Ten kinds of fault, where each can be planted, and how.

A fault is planted by a dispatch mode. Faults of a result sit below the recorder, which sees what came out and not
why. All others sit above it, so that it sees what really ran: other arguments, further ops, or nothing at all
where memory is written through numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten: Final = torch.ops.aten
#: Which output, input or argument of an op a fault is planted at.
Detail = int | str

#: Arguments that say how much, whether the call gives them or not.
_AMOUNTS: Final = frozenset({"alpha", "beta", "scale"})
#: Ops that hide elements where a mask says so, with the mask's argument and what hides nothing.
_HIDING: Final = {"masked_fill": ("mask", False), "where": ("condition", True)}
_FLOATS: Final = frozenset({torch.float32, torch.float64})


# ---- an op that is about to run -----------------------------------------------------------------------------


@dataclass
class Site:
    """One op of a run.

    Attributes:
        func: The overload.
        arguments: All arguments that were given, by name, in the order of the schema.
        weights: The parameters of the model, by name.
        out: What it returned, once it ran.
    """

    func: Any
    arguments: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    out: Any = None
    _schema: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self._schema = {a.name: a for a in self.func._schema.arguments}

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], weights: Any) -> Site:
        """The site of a call."""
        names = (a.name for a in func._schema.arguments)
        return cls(func, {**dict(zip(names, args, strict=False)), **kwargs}, weights)

    @property
    def name(self) -> str:
        """The op without namespace and overload, and without the underscore of its in-place form."""
        return str(self.func._schema.name).partition("::")[2].rstrip("_")

    @property
    def view(self) -> bool:
        """Whether it returns a part of what it is given."""
        return self.func.is_view or self.name in ("detach", "alias", "_unsafe_view", "lift_fresh")

    @property
    def computes(self) -> bool:
        """Whether it reads the content of tensors."""
        return not self.view and bool(self.inputs) and not self.name.startswith(("empty", "new_"))

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Tensors that it reads, by name; parts of a list by number."""
        found = {}
        for name, value in self.arguments.items():
            if self.writes(name) or self.name.endswith("_like"):
                continue
            if isinstance(value, Tensor):
                found[name] = value
            elif isinstance(value, list | tuple):
                found |= {f"{name}.{k}": v for k, v in enumerate(value) if isinstance(v, Tensor)}
        return found

    def writes(self, name: str) -> bool:
        """Whether it writes into an argument."""
        alias = self._schema[name].alias_info
        return alias is not None and alias.is_write

    def amounts(self) -> dict[str, float]:
        """Numbers among its arguments that are no whole ones, and those that default to one."""
        found = {}
        for name, argument in self._schema.items():
            given = name in self.arguments
            value = self.arguments[name] if given else argument.default_value
            if name in _AMOUNTS and value is None and name == "scale":
                found[name] = 0.5
            elif isinstance(value, float) or (name in _AMOUNTS and type(value) is int):
                found[name] = float(value)
        return {name: value for name, value in found.items() if np.isfinite(value)}

    def run(self, changes: Mapping[str, Any] | None = None) -> Any:
        """Run it, with some arguments changed (parts of a list by number)."""
        arguments = dict(self.arguments)
        for name, value in (changes or {}).items():
            head, dot, part = name.partition(".")
            if not dot:
                arguments[head] = value
                continue
            parts = list(arguments[head])
            parts[int(part)] = value
            arguments[head] = parts
        args, kwargs = [], {}
        positional = True
        for name, argument in self._schema.items():
            positional = positional and name in arguments and not argument.kwarg_only
            if positional:
                args.append(arguments[name])
            elif name in arguments:
                kwargs[name] = arguments[name]
        return self.func(*args, **kwargs)


def floats(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those with numbers that are no whole ones."""
    return {n: t for n, t in tensors.items() if t.dtype in _FLOATS and t.numel()}


def outputs(out: Any) -> list[Tensor]:
    """The tensors that an op returned."""
    return [t for t in (out if isinstance(out, list | tuple) else [out]) if isinstance(t, Tensor)]


def memory(tensor: Tensor) -> np.ndarray:
    """A tensor's memory, with no op that anybody sees."""
    with torch._C._DisableTorchDispatch():
        return tensor.detach().numpy()


def unseen(make: Callable[[], Tensor]) -> Tensor:
    """A tensor made with no op that anybody sees."""
    with torch._C._DisableTorchDispatch():
        return make()


# ---- the ten kinds ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        below: Whether it sits below the recorder.
        where: The details at which it can be planted in an op that has run.
        plant: Runs the op with the fault, and returns what comes out.
    """

    name: str
    below: bool
    where: Callable[[Site], Iterator[Detail]]
    plant: Callable[[Site, Detail], Any]


def _results(site: Site, *, truths: bool) -> Iterator[int]:
    """Results that the op made itself and that can be spoiled."""
    if site.view or site.name.startswith(("empty", "new_empty")):
        return
    given = {t.untyped_storage().data_ptr() for t in site.inputs.values()}
    for k, out in enumerate(outputs(site.out)):
        if out.untyped_storage().data_ptr() in given:
            continue  # a part of an input, whatever the schema says (`unsafe_split`)
        if out.numel() and (out.dtype in _FLOATS or (truths and out.dtype is torch.bool)):
            yield k


def _noisy(out: Tensor) -> np.ndarray:
    """Each element one unit in the last place up or down; zeros and non-finite numbers as they are."""
    old = memory(out)
    up = np.random.default_rng(1).random(old.shape) < 0.5
    moved = np.nextafter(old, np.where(up, np.inf, -np.inf).astype(old.dtype))
    return np.where(np.isfinite(old) & (old != 0) & np.isfinite(moved), moved, old)


def _where_ulp(site: Site) -> Iterator[Detail]:
    for k in _results(site, truths=False):
        if not np.array_equal(
            memory(outputs(site.out)[k]), _noisy(outputs(site.out)[k]), equal_nan=True
        ):
            yield k


def _ulp(site: Site, k: Detail) -> Any:
    out = site.run()
    spoiled = outputs(out)[int(k)]
    memory(spoiled)[...] = _noisy(spoiled)
    return out


def _where_flip(site: Site) -> Iterator[Detail]:
    for k in _results(site, truths=True):
        out = memory(outputs(site.out)[k])
        if out.dtype == np.bool_ or np.any(np.isfinite(out) & (out != 0)):
            yield k


def _flip(site: Site, k: Detail) -> Any:
    out = site.run()
    array = memory(outputs(out)[int(k)])
    if array.dtype == np.bool_:
        where = np.unravel_index(array.size // 2, array.shape)
        array[where] = not array[where]
        return out
    sizes = np.where(np.isfinite(array), np.abs(array), 0)
    where = np.unravel_index(int(sizes.argmax()), array.shape)
    array[where] = -array[where]
    return out


def _named(site: Site, tensor: Tensor) -> str | None:
    """The parameter that a tensor is."""
    for name, weight in site.weights.items():
        if weight.data_ptr() == tensor.data_ptr() and weight.shape == tensor.shape:
            return name if weight.stride() == tensor.stride() else None
    return None


def _others(site: Site, name: str) -> list[str]:
    """Parameters of the same shape with another content."""
    own = site.weights[name]
    return [
        other
        for other, weight in site.weights.items()
        if weight.shape == own.shape and not np.array_equal(memory(weight), memory(own))
    ]


def _where_swap(site: Site) -> Iterator[Detail]:
    if site.name in ("detach", "alias"):
        return  # the program keeps such an alias; nothing need read it
    for name, tensor in site.inputs.items():
        weight = _named(site, tensor)
        if weight is not None and _others(site, weight):
            yield name


def swapped(site: Site, name: Detail) -> tuple[str, str]:
    """The parameter that an op reads, and the one that it is given instead."""
    weight = _named(site, site.inputs[str(name)])
    assert weight is not None
    return weight, _others(site, weight)[0]


def _swap(site: Site, name: Detail) -> Any:
    return site.run({str(name): site.weights[swapped(site, name)[1]]})


def _where_scale(site: Site) -> Iterator[Detail]:
    yield from site.amounts()


def _scale(site: Site, name: Detail) -> Any:
    old = site.amounts()[str(name)]
    # probabilities stay probabilities
    return site.run({str(name): old / 2 + 0.1 if 0 <= old <= 1 else old * 1.5})


def _where_mask(site: Site) -> Iterator[Detail]:
    given = site.arguments
    if "attention" in site.name and "backward" not in site.name:
        if isinstance(given.get("attn_mask"), Tensor):
            yield "attn_mask"
        if given.get("is_causal") is True:
            yield "is_causal"
    if site.name in _HIDING and isinstance(given.get(_HIDING[site.name][0]), Tensor):
        yield _HIDING[site.name][0]
    if site.name == "masked_fill":
        yield "left out"
    if site.name == "add":
        yield from (n for n, t in floats(site.inputs).items() if np.isneginf(memory(t)).any())


def _mask(site: Site, name: Detail) -> Any:
    if name == "left out":
        return site.arguments["self"]
    if name == "attn_mask":
        return site.run({"attn_mask": None})
    if name == "is_causal":
        return site.run({"is_causal": False})
    nothing = _HIDING[site.name][1] if site.name in _HIDING else 0.0
    like = site.arguments[str(name)]
    return site.run({str(name): unseen(lambda: torch.full_like(like, nothing))})


def _first_float(site: Site) -> Iterator[Detail]:
    """The first input that holds numbers which can be changed."""
    if site.computes:
        yield from list(floats(site.inputs))[:1]


def _where_cast(site: Site) -> Iterator[Detail]:
    for name in _first_float(site):
        x = site.inputs[str(name)]
        rounded = unseen(lambda x=x: x.detach().bfloat16().to(x.dtype))
        if not np.array_equal(memory(rounded), memory(x), equal_nan=True):
            yield name


def _cast(site: Site, name: Detail) -> Any:
    x = site.inputs[str(name)]
    narrow = aten._to_copy.default(x, dtype=torch.bfloat16)
    return site.run({str(name): aten._to_copy.default(narrow, dtype=x.dtype)})


def _extra(site: Site, name: Detail) -> Any:
    return site.run({str(name): aten.mul.Tensor(site.inputs[str(name)], 1.001)})


def _where_inplace(site: Site) -> Iterator[Detail]:
    if not site.computes:
        return
    for name, x in floats(site.inputs).items():
        if not any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True)):
            yield name


def _inplace(site: Site, name: Detail) -> Any:
    out = site.run()
    aten.mul_.Tensor(site.inputs[str(name)], 1.5)
    return out


def _hidden(site: Site, name: Detail) -> Any:
    array = memory(site.inputs[str(name)])
    array += np.where(np.isfinite(array), 0.5, 0).astype(array.dtype)
    return site.run()


def _where_hidden(site: Site) -> Iterator[Detail]:
    yield from (n for n in _where_inplace(site) if memory(site.inputs[str(n)]).flags.writeable)


def _where_draw(site: Site) -> Iterator[Detail]:
    draws = torch.Tag.nondeterministic_seeded in site.func.tags
    if draws and "attention" not in site.name and "rnn" not in site.name:
        yield "unseen"
        yield "seen"


def _offset(site: Site, how: Detail) -> Any:
    if how == "seen":
        aten.rand.default([3])
    else:
        unseen(lambda: torch.rand(3))
    return site.run()


FAULTS: Final = {
    fault.name: fault
    for fault in (
        Fault("one-ulp noise", True, _where_ulp, _ulp),
        Fault("sign flip", True, _where_flip, _flip),
        Fault("swapped weights", False, _where_swap, _swap),
        Fault("scale argument", False, _where_scale, _scale),
        Fault("dropped mask", False, _where_mask, _mask),
        Fault("dtype cast", False, _where_cast, _cast),
        Fault("extra op", False, _first_float, _extra),
        Fault("in-place write", False, _where_inplace, _inplace),
        Fault("hidden write", False, _where_hidden, _hidden),
        Fault("rng offset", False, _where_draw, _offset),
    )
}


# ---- planting ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plant:
    """One fault at one op.

    Attributes:
        op: Index of the op in the run.
        told: What there is to say about it: the op's name, and the parameters that it is about.
    """

    fault: str
    op: int
    detail: Detail
    told: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.fault} at op {self.op + 1} {self.told[0]} ({self.detail})"


class Planting(TorchDispatchMode):
    """Runs every op as it is, but for the one of a plant."""

    def __init__(self, plant: Plant | None, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._plant = plant
        self._weights = weights
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        index, self.count = self.count, self.count + 1
        if self._plant is None or index != self._plant.op:
            return func(*args, **(kwargs or {}))
        site = Site.of(func, args, kwargs or {}, self._weights)
        return FAULTS[self._plant.fault].plant(site, self._plant.detail)


def _about(fault: str, site: Site, detail: Detail) -> tuple[str, ...]:
    """The parameters that a plant is about."""
    if fault == "swapped weights":
        return swapped(site, detail)
    tensor = site.inputs.get(str(detail))
    if tensor is None:
        return ()
    at = tensor.untyped_storage().data_ptr()
    owners = (n for n, w in site.weights.items() if w.untyped_storage().data_ptr() == at)
    return tuple(list(owners)[:1])


class Scouting(TorchDispatchMode):
    """Finds out what can be planted where."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._weights = weights
        self.count = 0
        self.found: list[Plant] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        index, self.count = self.count, self.count + 1
        out = func(*args, **(kwargs or {}))
        if func.namespace != "aten":
            return out
        site = Site.of(func, args, kwargs or {}, self._weights)
        site.out = out
        for fault in FAULTS.values():
            for detail in list(fault.where(site)):
                about = _about(fault.name, site, detail)
                self.found.append(Plant(fault.name, index, detail, (str(func), *about)))
        return out
