"""Claim the folder of a trace before anything is recorded; loads nothing that a program could notice."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from opdrift.errors import TraceExistsError, TraceNotWritableError
from opdrift.tracefile.lock import is_held

HEADER: Final = "header.json"
FOOTER: Final = "footer.json"
CHECKS: Final = "checks.jsonl"
RANK_FOLDER: Final = "rank-{:05d}"


def is_trace(folder: Path) -> bool:
    """Whether a folder is a trace, of one process or of several ranks."""
    return (folder / HEADER).exists() or any(folder.glob(f"rank-[0-9]*/{HEADER}"))


@dataclass(frozen=True, slots=True)
class Claim:
    """A folder made for a trace; the trace that it replaces stands aside until the new one is open."""

    folder: Path
    aside: Path | None

    def keep(self) -> None:
        """The new trace is open: what it replaces goes."""
        if self.aside is not None:
            shutil.rmtree(self.aside)

    def give_back(self) -> None:
        """The new trace could not be opened: everything is as it was."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.aside is not None:
            self.aside.rename(self.folder)


def claim(path: Path, *, rank: int | None, overwrite: bool) -> Claim:
    """Make the folder of a trace.

    Args:
        path: Where the user asked for the trace.
        rank: This process's rank in a distributed run; it gets a folder of its own below `path`.
        overwrite: Replace a trace that is there. Nothing but a trace is ever replaced.

    Raises:
        TraceExistsError: Something is there already.
        TraceNotWritableError: The folder cannot be made.
    """
    folder = path if rank is None else path / RANK_FOLDER.format(rank)
    aside = None
    try:
        _check_free(path, folder, rank, overwrite=overwrite)
        if folder.exists():
            aside = folder.with_name(f".{folder.name}.replaced-{os.getpid()}")
            folder.rename(aside)
        folder.mkdir(parents=True)
    except OSError as error:
        raise TraceNotWritableError(
            f"{folder} cannot be made: {reason_of(error)}. Choose a path that you may write to."
        ) from error
    return Claim(folder, aside)


def _check_free(path: Path, folder: Path, rank: int | None, *, overwrite: bool) -> None:
    if folder.exists() or folder.is_symlink():
        if not _is_trace(folder):
            raise TraceExistsError(
                f"{folder} exists and is no opdrift trace, so it is left alone. Choose another path."
            )
        if is_held(folder / CHECKS):
            raise TraceExistsError(
                f"{folder} is being recorded at this moment, so it is not replaced. Choose another path."
            )
        if not overwrite:
            raise TraceExistsError(
                f"{folder} already holds a trace, and nothing recorded is overwritten unasked."
                " Choose another path, delete it, or pass overwrite=True (`opdrift run --overwrite`)."
            )
    if rank is not None and _is_trace(path):
        raise TraceExistsError(
            f"{path} holds the trace of a run with one process; rank {rank} cannot be added to it. Choose another path."
        )
    if rank is None and any(path.glob("rank-[0-9]*")):
        raise TraceExistsError(
            f"{path} holds the traces of a distributed run. Choose another path, or delete it."
        )


def _is_trace(folder: Path) -> bool:
    return folder.is_dir() and (folder / HEADER).is_file()


def reason_of(error: OSError) -> str:
    """Why something cannot be written, in words."""
    return "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)


def announced_rank(environment: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Rank and world size that a launcher such as torchrun has announced; None for a run of one process."""
    try:
        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None, None
    return (rank, world_size) if world_size > 1 else (None, None)
