"""The columns of an export to Parquet; docs/export.md explains them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pyarrow as pa

TIME: Final = pa.timestamp("ns", tz="UTC")
IDS: Final = pa.list_(pa.int64())
#: Statistics over the finite components.
NUMBERS: Final = ("min", "max", "absmax", "sum", "ssq")
#: How many components are that.
COUNTS: Final = ("nan", "pinf", "ninf", "zero", "subnormal")

#: Columns of each table, in order.
TABLES: Final[Mapping[str, pa.Schema]] = {
    "ops": pa.schema(
        [
            ("rank", pa.int32()),
            ("seq", pa.int64()),
            ("op", pa.string()),
            ("module", pa.string()),
            ("module_type", pa.string()),
            ("call", pa.int64()),
            ("phase", pa.string()),
            ("step", pa.int64()),
            ("thread", pa.int32()),
            ("start", TIME),
            ("duration_ns", pa.int64()),
            ("file", pa.string()),
            ("line", pa.int64()),
            ("function", pa.string()),
            ("arguments", pa.string()),
            ("inputs", IDS),
            ("outputs", IDS),
            ("mutated", pa.int32()),
            ("raised", pa.bool_()),
            ("flags", pa.string()),
            ("node", pa.int64()),
            ("rng", pa.string()),
            ("kernel", pa.string()),
            ("library", pa.string()),
            ("backend", pa.string()),
            ("reason", pa.string()),
            ("status", pa.string()),
            ("counterpart", pa.int64()),
        ]
    ),
    "tensors": pa.schema(
        [
            ("rank", pa.int32()),
            ("value", pa.int64()),
            ("maker", pa.int64()),
            ("dtype", pa.string()),
            ("shape", IDS),
            ("stride", IDS),
            ("offset", pa.int64()),
            ("device", pa.string()),
            ("storage", pa.int64()),
            ("write", pa.int64()),
            ("digest", pa.string()),
            ("components", pa.int64()),
            ("code", pa.string()),
            *((name, pa.float64()) for name in NUMBERS),
            *((name, pa.int64()) for name in COUNTS),
        ]
    ),
    "leaves": pa.schema(
        [
            ("rank", pa.int32()),
            ("name", pa.string()),
            ("kind", pa.string()),
            ("when", pa.string()),
            ("value", pa.int64()),
            ("seq", pa.int64()),
            ("module", pa.string()),
        ]
    ),
    "marks": pa.schema(
        [
            ("rank", pa.int32()),
            ("seq", pa.int64()),
            ("time", TIME),
            ("kind", pa.string()),
            ("module", pa.string()),
            ("thread", pa.int32()),
            ("fields", pa.string()),
        ]
    ),
    "calls": pa.schema(
        [
            ("rank", pa.int32()),
            ("call", pa.int64()),
            ("parent", pa.int64()),
            ("module", pa.string()),
            ("module_type", pa.string()),
            ("number", pa.int64()),
            ("training", pa.bool_()),
            ("thread", pa.int32()),
            ("file", pa.string()),
            ("line", pa.int64()),
            ("function", pa.string()),
        ]
    ),
    "runs": pa.schema(
        [
            ("rank", pa.int32()),
            ("label", pa.string()),
            ("created", pa.string()),
            ("start", TIME),
            ("torch", pa.string()),
            ("device", pa.string()),
            ("world_size", pa.int32()),
            ("program", pa.string()),
            ("flags", pa.string()),
            ("variables", pa.string()),
            ("versions", pa.string()),
            ("incomplete", pa.string()),
            ("ended", pa.string()),
            ("exception", pa.string()),
        ]
    ),
}

#: Lists of values, and what differs in nearly every row.
_VALUES: Final = ("inputs", "outputs")
_UNIQUE: Final = ("digest", "rng")


def repeating(schema: pa.Schema) -> list[str]:
    """Columns of few different texts or layouts: a dictionary makes them small."""
    return [
        f"{field.name}.list.element" if field.type == IDS else field.name
        for field in schema
        if field.type in (pa.string(), IDS) and field.name not in (*_VALUES, *_UNIQUE)
    ]


def rising(schema: pa.Schema) -> dict[str, str]:
    """Columns of numbers that hardly change from row to row: written as differences, they take a quarter."""
    return {
        f"{field.name}.list.element" if field.type == IDS else field.name: "DELTA_BINARY_PACKED"
        for field in schema
        if field.name in _VALUES or pa.types.is_integer(field.type) or field.type == TIME
    }
