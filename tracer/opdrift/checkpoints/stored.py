"""What a checkpoint file holds, read by a process of its own: this half never imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from opdrift.errors import CheckpointError

#: (raw, n, code) of a content, as `Fingerprint.key`.
Key = tuple[int, int, int]

_READER: Final = "opdrift.checkpoint_digests"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
        name: As the file calls it.
        dtype: Without the "torch.".
        shape: Its shape.
        keys: dtype -> content: its own, and what it is when it is cast.
        sample: Of floats, the components at `tfp1.sample_positions`; empty where they are not known.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    keys: Mapping[str, Key]
    sample: tuple[float, ...] = ()

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint: where it comes from, in words, and its tensors."""

    source: str
    tensors: tuple[StoredTensor, ...]


def read(paths: Iterable[Path], *, dtypes: Iterable[str]) -> StoredCheckpoint:
    """Read checkpoint files as one checkpoint.

    Args:
        paths: Files of `safetensors` or `torch.save`, an index of several, or folders with one.
        dtypes: Which casts of each tensor are to be known.

    Raises:
        CheckpointError: A file cannot be read, or two hold a tensor of the same name.
    """
    sources, tensors = [], dict[str, StoredTensor]()
    for path in paths:
        part, found = _read(path, sorted(set(dtypes)))
        sources.append(f"{path}, {part!r}" if part else str(path))
        for tensor in found:
            if tensor.name in tensors:
                raise CheckpointError(
                    f"{path} holds {tensor.name!r}, which another --checkpoint holds as well. Give one of them."
                )
            tensors[tensor.name] = tensor
    return StoredCheckpoint(" and ".join(sources), tuple(tensors.values()))


def _read(path: Path, dtypes: list[str]) -> tuple[str | None, list[StoredTensor]]:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    casts = [word for dtype in dtypes for word in ("--as", dtype)]
    done = subprocess.run(
        [sys.executable, "-P", "-m", _READER, *casts, "--", str(path)],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    lines = done.stdout.splitlines()
    if done.returncode == 2 and done.stderr.strip():
        raise CheckpointError(done.stderr.strip().splitlines()[-1])
    try:
        first, *rows, last = [json.loads(line) for line in lines]
        complete = done.returncode == 0 and last["tensors"] == len(rows)
    except (ValueError, KeyError, TypeError):
        complete = False
    if not complete:
        said = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise CheckpointError(f"{path} cannot be read: its reader ended with {said[0]}.")
    return first["part"], [_tensor(row) for row in rows]


def _tensor(row: Mapping[str, Any]) -> StoredTensor:
    keys = {dtype: (int(raw, 16), n, code) for dtype, (raw, n, code) in row["digests"].items()}
    return StoredTensor(
        row["name"], row["dtype"], tuple(row["shape"]), keys, tuple(row.get("sample", ()))
    )


def from_mark(fields: Mapping[str, Any]) -> tuple[StoredTensor, ...]:
    """The tensors that an integration wrote into a `checkpoint` mark."""
    found = []
    for name, dtype, shape, digest in fields.get("tensors") or ():
        keys = {}
        if digest is not None:
            keys[str(dtype)] = (int(digest["raw"], 16), int(digest["n"]), int(digest["code"]))
        found.append(StoredTensor(str(name), str(dtype), tuple(shape), keys))
    return tuple(found)
