"""What torch itself said of the backends of an attention, asked once for all calls of one kind."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Final

import numpy as np

from opdrift.records import GRAD_ENABLED, MASK_GRAD, OPERAND_GRAD
from opdrift.tracefile.reader import Trace

_GRADIENTS: Final = GRAD_ENABLED | OPERAND_GRAD | MASK_GRAD
_NONE: Final[Mapping[str, bool]] = MappingProxyType({})

#: Signature and gradients of a call, and the answers from an op's number on.
_Kind = tuple[int, int]


class TorchsAnswers:
    """Reads the marks of kind `can-use` of one trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def of(self, index: int) -> Mapping[str, bool]:
        """Backend -> whether torch would have let it compute the op at an index; empty where it was not asked."""
        found = self._found.get(self._kind(index), ())
        seq = int(self._trace.ops.seq[index])
        at = bisect_right(found, seq, key=lambda each: each[0])
        return found[at - 1][1] if at else _NONE

    def _kind(self, index: int) -> _Kind:
        ops = self._trace.ops
        return int(ops.signature[index]), int(ops.flags[index]) & _GRADIENTS

    @cached_property
    def _found(self) -> dict[_Kind, list[tuple[int, Mapping[str, bool]]]]:
        found: dict[_Kind, list[tuple[int, Mapping[str, bool]]]] = {}
        seqs = self._trace.ops.seq
        for mark in self._trace.marks:
            seq, backends = mark.fields.get("op"), mark.fields.get("backends")
            if mark.kind != "can-use" or type(seq) is not int or not isinstance(backends, dict):
                continue
            index = int(np.searchsorted(seqs, seq))
            if index < len(seqs) and seqs[index] == seq:
                answers = {str(name): answer is True for name, answer in backends.items()}
                found.setdefault(self._kind(index), []).append((seq, answers))
        for each in found.values():
            each.sort(key=lambda asked: asked[0])
        return found
