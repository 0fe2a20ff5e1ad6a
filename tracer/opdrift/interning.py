"""Ops and the ways they are called, each told to the trace once and known by a number from then on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Size, Tensor

from opdrift.collectives import takes_part
from opdrift.neutral import has_complex, needs_repair, silent
from opdrift.plans import Plan, encode

if TYPE_CHECKING:
    from opdrift.values import Values

#: Arguments that are their own identity.
_FIXED: Final = frozenset({torch.dtype, torch.device, torch.layout, torch.memory_format, str})
_MAX_SIGNATURES: Final = 65536


class Interning:
    """The ops and signatures of a recording.

    Args:
        values: Tell what a tensor among an op's arguments is.
        write_name: Interns a text.
    """

    def __init__(self, values: Values, write_name: Callable[[str, int, str], None]) -> None:
        self._values = values
        self._write_name = write_name
        #: id of an overload -> what is known of it
        self.plans: dict[int, Plan] = {}
        #: op, layouts and other arguments -> the number of that signature
        self.signatures: dict[tuple[Any, ...], int] = {}
        #: numbers of signatures with complex tensors, whose ops need a repair
        self.complex: set[int] = set()
        self._ids = itertools.count(1)

    def add_plan(self, func: Any, make: Callable[[Any, int], Plan] = Plan) -> Plan:
        """Tell the trace of an op that it does not know yet."""
        plan = self.plans[id(func)] = make(func, len(self.plans) + 1)
        plan.joins = takes_part(plan)
        plan.repair = plan.joins or needs_repair(plan)
        self._write_name("op", plan.id, plan.describe())
        return plan

    def add_signature(
        self, plan: Plan, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> int:
        """Give a call that is like none before it a number."""
        if len(self.signatures) >= _MAX_SIGNATURES:
            # bounded; ids go on, a signature seen again gets a second one
            self.signatures.clear()
            self.complex.clear()
        found = self.signatures[key] = next(self._ids)
        if has_complex(args) or has_complex(kwargs.values()):
            self.complex.add(found)
        text = {
            "op": plan.id,
            "args": [self._encode(a) for a in args],
            "kwargs": {n: self._encode(a) for n, a in kwargs.items()},
        }
        self._write_name("signature", found, json.dumps(text))
        return found

    def _encode(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            try:
                known = self._values.value_of(a)
            except (RuntimeError, NotImplementedError):
                # one TensorArgument a part, so that arguments and inputs stay in step
                return [self._encode(part) for part in parts(a)]
            return (
                {"t": known[1][1]}
                if known is not None and known[1] is not None
                else {"x": "tensor"}
            )
        if isinstance(a, list | tuple):
            return [self._encode(item) for item in a]
        return encode(a)


def add_literal(key: list[Any], a: Any, kind: type) -> bool:
    """Add an argument without tensors to a signature's key; False, and nothing added, if it is none.

    As keys 1 == 1.0 == True and 0.0 == -0.0 and nan != nan, so floats go in as hex, bools tagged.
    """
    if kind is int or a is None:
        key.append(a)
    elif kind is float:
        key.append(a.hex())
    elif kind is bool:
        key.append("T" if a else "F")
    elif kind is list or kind is tuple or kind is Size:
        before = len(key)
        key.append("[")
        for item in a:
            inner = type(item)
            if inner is int:
                key.append(item)
            elif not add_literal(key, item, inner):
                del key[before:]
                return False
        key.append("]")
    elif kind in _FIXED:
        key.append(kind)
        key.append(a)
    elif kind is complex:
        key.append(str(a))
    else:
        return False
    return True


def parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold a sparse or nested tensor's content; none for opaque layouts (mkldnn)."""
    with silent(), torch.no_grad():
        if tensor.is_nested:
            return list(tensor.unbind())
        if tensor.layout is torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []
