"""Read what `torch.utils._debug_mode` writes of an op's arguments: `t$3: f32[8, 16]{device=cpu}, [16], eps=1e-05`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final

#: torch's short names of dtypes (torch/utils/_dtype_abbrs.py); a name that is not here is kept as it is.
_DTYPES: Final = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16",
    "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "f8e4m3fnuz": "float8_e4m3fnuz",
    "f8e5m2fnuz": "float8_e5m2fnuz", "f8e8m0fnu": "float8_e8m0fnu", "f4e2m1fnx2": "float4_e2m1fn_x2",
    "c32": "complex32", "c64": "complex64", "c128": "complex128",
    "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64", "b8": "bool",
}  # fmt: skip
#: A tensor (t), DTensor (dt) or fake tensor (ft), with its number if record_ids was on, its attributes and placement.
_TENSOR: Final = re.compile(
    r"""['"]?\b(?:d|f)?t(?:\$\d+)?:\ (?P<dtype>\w+)\[(?P<shape>[^\]]*)\](?:\{[^}]*\})?(?P<placement>\|\ [A-Z()\[\]0-9a-z]+)?['"]?""",
    re.VERBOSE,
)
#: Texts of arguments that are kept: a model calls the same ops with the same shapes again and again.
_REMEMBERED: Final = 20_000
_ADDRESS: Final = re.compile(r"\bat 0x[0-9a-fA-F]+")
_KEYWORD: Final = re.compile(r"([A-Za-z_]\w*)=(?!=)(.*)", re.DOTALL)
_OPEN, _CLOSE = "([{<", ")]}>"


@lru_cache(_REMEMBERED)
def tensors(text: str) -> tuple[str, ...]:
    """The tensors in a text of arguments, as opdrift writes them: `float32[8, 16]`."""
    return tuple(_name(match) for match in _TENSOR.finditer(text))


def _name(match: re.Match[str]) -> str:
    dtype = _DTYPES.get(match["dtype"], match["dtype"])
    placed = (match["placement"] or "").removeprefix("| ")
    return f"{dtype}[{match['shape']}]" + (f" {placed}" if placed else "")


@lru_cache(_REMEMBERED)
def settings(text: str) -> Mapping[str, str]:
    """The arguments that hold no tensor, by keyword or as "argument 3", counted from 0."""
    found = {}
    for position, part in enumerate(_parts(text)):
        keyword = _KEYWORD.fullmatch(part)
        name, value = (keyword[1], keyword[2]) if keyword else (f"argument {position}", part)
        if not _TENSOR.search(value):
            found[name] = _ADDRESS.sub("at 0x...", value)
    return MappingProxyType(found)


def _parts(text: str) -> Iterator[str]:
    """Split at commas that stand in no bracket and no quotes."""
    depth, quote, start = 0, "", 0
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in _OPEN:
            depth += 1
        elif character in _CLOSE and text[place - 1 : place + 1] != "->":
            depth = max(depth - 1, 0)
        elif character == "," and not depth:
            yield from _nonempty(text[start:place])
            start = place + 1
    yield from _nonempty(text[start:])


def _nonempty(part: str) -> Iterator[str]:
    if part.strip():
        yield part.strip()
