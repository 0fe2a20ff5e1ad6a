"""Tensors of one side that are those of the other side laid end to end: fused projections, and split ones.

A digest is linear, so that of the whole follows from those of its parts (`composition.joined`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import Final

from opdrift import tfp1
from opdrift.checkpoints.stored import Key
from opdrift.tfp1 import Code

#: So many parts make a whole (query, key, value), out of so many candidates.
_MOST_PARTS: Final = 3
_MOST_CANDIDATES: Final = 16


def made_of(
    wholes: Mapping[str, Sequence[Key]], parts: Mapping[str, Sequence[Key]]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Which wholes are which parts, in which order.

    Only parts in the whole's module are tried, and parts beside that module that are called like the whole
    (`attn.q.weight` of `attn.qkv.weight`): among all tensors of a model the number of ways would be too large.

    Args:
        wholes: Name -> contents that it may be.
        parts: Name -> contents that it may be.
    """
    for whole, contents in wholes.items():
        module, _, called = whole.rpartition(".")
        beside = module.rpartition(".")[0]
        near = [name for name in parts if _is_in(name, module)]
        near += [
            name
            for name in parts
            if _is_in(name, beside) and name.endswith(f".{called}") and name not in near
        ]
        found = next((f for key in contents if (f := _of(key, near, parts)) is not None), None)
        if found is not None:
            yield whole, found


def _is_in(name: str, module: str) -> bool:
    return not module or name.startswith(f"{module}.")


def _of(
    whole: Key, names: Sequence[str], parts: Mapping[str, Sequence[Key]]
) -> tuple[str, ...] | None:
    raw, n, code = whole
    keys = {
        name: next((k for k in parts[name] if k[2] == code and k[1] < n), None) for name in names
    }
    fitting = [(name, key) for name, key in keys.items() if key is not None][:_MOST_CANDIDATES]
    width = Code(code).bytes
    for number in range(2, _MOST_PARTS + 1):
        for chosen in permutations(fitting, number):
            if sum(key[1] for _, key in chosen) != n:
                continue
            joined = tfp1.concat((key[0], tfp1.digits(key[1], width)) for _, key in chosen)
            if joined == raw:
                return tuple(name for name, _ in chosen)
    return None
