"""How Perfetto's format tells of ops: under the names that reports use."""

from __future__ import annotations

from typing import Final

from opdrift.export.opslices import Dialect, argument_value
from opdrift.export.tracks import Items
from opdrift.records import OpInfo, Signature


def _name(op: OpInfo) -> str:
    return op.name


def _layouts(signature: Signature) -> Items:
    """The arguments: tensors by type and shape, others as they are."""
    given = {name: argument_value(value) for name, value in signature.arguments}
    return (("arguments", given),) if given else ()


def _own(index: int, seq: int, node: int, phase: int) -> Items:
    return (("op", seq),)


DIALECT: Final = Dialect(_name, _layouts, _own)
