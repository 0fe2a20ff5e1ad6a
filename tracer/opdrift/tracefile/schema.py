"""Tables of a trace on disk; `docs/trace-format.md` explains each field.

History:
    1: first version.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

from opdrift.tracefile.claiming import CHECKS as CHECKS
from opdrift.tracefile.claiming import FOOTER as FOOTER
from opdrift.tracefile.claiming import HEADER as HEADER
from opdrift.tracefile.claiming import RANK_FOLDER as RANK_FOLDER

_IDS: Final = pa.list_(pa.int64())

_FINGERPRINT: Final = (
    ("raw", pa.uint64()),
    ("n", pa.int64()),
    ("code", pa.uint8()),
    ("min", pa.float64()),
    ("max", pa.float64()),
    ("absmax", pa.float64()),
    ("sum", pa.float64()),
    ("ssq", pa.float64()),
    ("nan", pa.int64()),
    ("pinf", pa.int64()),
    ("ninf", pa.int64()),
    ("zero", pa.int64()),
    ("subnormal", pa.int64()),
    ("sketch", pa.binary()),
    ("sample", pa.binary()),
)

#: One Arrow IPC stream a table, in the file `<table>.arrows`. Ids start at 1; 0 means none.
TABLES: Final[dict[str, pa.Schema]] = {
    # interned texts: what the ids of the other tables stand for. kind: op, signature, meta, path, source, extents
    "names": pa.schema([("kind", pa.string()), ("id", pa.int64()), ("text", pa.string())]),
    # module calls
    "calls": pa.schema(
        [
            ("call", pa.uint32()),
            ("parent", pa.uint32()),
            ("path", pa.uint32()),
            ("number", pa.uint32()),
            ("source", pa.uint32()),
            ("training", pa.uint8()),
            ("thread", pa.uint8()),
        ]
    ),
    # ops, in the order in which they ended, per thread; sort by seq
    "ops": pa.schema(
        [
            ("seq", pa.int64()),
            ("start", pa.int64()),
            ("duration", pa.int64()),
            ("node", pa.int64()),
            ("rng", pa.uint64()),
            ("signature", pa.uint32()),
            ("call", pa.uint32()),
            ("source", pa.uint32()),
            ("thread", pa.uint8()),
            ("phase", pa.uint8()),
            ("flags", pa.uint16()),
            ("mutated", pa.uint16()),
            ("inputs", _IDS),
            ("outputs", _IDS),
        ]
    ),
    # values: (storage, write count, offset, layout)
    "values": pa.schema(
        [
            ("value", pa.int64()),
            ("storage", pa.int64()),
            ("offset", pa.int64()),
            ("write", pa.uint32()),
            ("meta", pa.uint32()),
        ]
    ),
    # fingerprints (tfp1) of values
    "tensors": pa.schema([("value", pa.int64()), *_FINGERPRINT]),
    # fingerprints of single samples of a value that carries the batch; fields as in tensors
    "samples": pa.schema([("value", pa.int64()), ("item", pa.uint32()), *_FINGERPRINT]),
    # where the batch and padded lengths lie in a value
    "axes": pa.schema(
        [
            ("value", pa.int64()),
            ("flags", pa.uint8()),
            ("batch", pa.list_(pa.int64())),
            ("length", pa.list_(pa.int64())),
        ]
    ),
    # named and nameless leaves, outputs of root modules, gradients, what lived at exit
    "leaves": pa.schema(
        [
            ("name", pa.string()),
            ("kind", pa.string()),
            ("when", pa.string()),
            ("value", pa.int64()),
            ("seq", pa.int64()),
            ("call", pa.uint32()),
        ]
    ),
    # what is no op
    "marks": pa.schema(
        [
            ("seq", pa.int64()),
            ("time", pa.int64()),
            ("kind", pa.string()),
            ("call", pa.uint32()),
            ("thread", pa.uint8()),
            ("fields", pa.string()),
        ]
    ),
}

#: Bytes of a stored bucket: a double cut to its upper 40 bits for components of 4 bytes and more (relative
#: error 2e-9), a float32 for narrower ones. How many there are says `tfp1.stored_buckets`; none for tensors of
#: at most 32 components, whose sample is their whole content (notes: recorder, Q7).
BUCKET_WIDE_BYTES: Final = 5
BUCKET_NARROW_BYTES: Final = 4
SAMPLES: Final = 32
#: Samples of a batch from this number on have no sketch: statistics and a few components must do.
SKETCHED_SAMPLES: Final = 64
#: Samples from this number on have no records: a row costs about a microsecond.
RECORDED_SAMPLES: Final = 1024


def checksum(data: Mapping[str, Any]) -> int:
    """CRC-32 of a JSON object; header and footer carry it as "crc"."""
    return zlib.crc32(json.dumps(data, sort_keys=True).encode())
