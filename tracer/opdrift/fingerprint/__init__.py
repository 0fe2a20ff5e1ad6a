"""Fingerprints of tensors: what is in a value, written into one fixed row.

`load_engine()` gives the fastest engine of this installation; all engines write the same digests.
"""

from opdrift.fingerprint.engine import ENGINES, LARGE, Engine, load_engine
from opdrift.fingerprint.row import ROW, ROW_BYTES
from opdrift.fingerprint.tensors import can_fingerprint, plain

__all__ = [
    "ENGINES",
    "LARGE",
    "ROW",
    "ROW_BYTES",
    "Engine",
    "can_fingerprint",
    "load_engine",
    "plain",
]
