"""What a trace's header says: when, where and with what a run was recorded."""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from time import perf_counter_ns as now
from typing import Any

import torch

from opdrift import environment
from opdrift.options import Options
from opdrift.records import TRACE_SCHEMA
from opdrift.tracefile.claiming import announced_rank


def header_of(
    options: Options,
    flags: Mapping[str, Any],
    variables: Mapping[str, str],
    *,
    engine: str,
    rank: int | None,
    world_size: int | None,
) -> dict[str, Any]:
    """The header of a recording that begins now.

    Args:
        options: What the user asked for.
        flags: A snapshot of torch's.
        variables: Environment variables.
        engine: What fingerprints.
        rank: This process's, in a distributed run.
        world_size: How many there are.
    """
    seeds = environment.seeds()
    return {
        "schema": TRACE_SCHEMA,
        "fingerprint": "tfp1",
        "label": options.label,
        "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "torch": torch.__version__,
        "device": environment.device(),
        "rank": rank,
        "world_size": world_size,
        "program": [os.path.basename(a) if i == 0 else a for i, a in enumerate(sys.orig_argv)],
        "flags": {**flags, **{f"seed.{name}": value for name, value in seeds.items()}},
        "variables": variables,
        "versions": environment.versions(),
        "options": options.described(),
        "engine": engine,
        "start_unix_ns": time.time_ns(),
        "start_ns": now(),
        "launch": None if rank is None else _launch(),
    }


def rank_here() -> tuple[int | None, int | None]:
    """Rank and world size of a distributed run that is set up, or that a launcher has announced."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        world_size = distributed.get_world_size()
        return (distributed.get_rank(), world_size) if world_size > 1 else (None, None)
    return announced_rank(os.environ)


def _launch() -> str | None:
    """What a launcher told all ranks of a run alike, as a number: its name is nobody's business."""
    told = [os.environ.get(name) for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT")]
    return f"{zlib.crc32(repr(told).encode()):08x}" if any(told) else None
