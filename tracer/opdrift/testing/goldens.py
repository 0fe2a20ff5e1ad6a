"""Keep the run of a test, and hold later ones against it."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from opdrift.diagnose import diff
from opdrift.errors import IncomparableTracesError, OpdriftError
from opdrift.records import Diagnosis
from opdrift.render.words import plural, relative
from opdrift.sizes import Tolerance
from opdrift.tracefile.opening import load, rank_folders
from opdrift.tracefile.packed import pack, unpack

#: The folder of goldens, beside the tests.
FOLDER: Final = "opdrift-goldens"
_SUFFIX: Final = ".trace.zip"
#: Longer names of tests are cut, and told apart by a number.
_LONGEST: Final = 100
_UNUSUAL: Final = re.compile(r"[^A-Za-z0-9_.,=+\-\[\]]")


@dataclass(frozen=True, slots=True)
class Golden:
    """The kept run of a test: the file, and the label that says whose run it is."""

    file: Path
    label: str

    def compare(self, run: Path, unpacked: Path, *, tolerance: Tolerance | None) -> Diagnosis:
        """What `diff` says of the kept run and another one, `run`; the kept one is unpacked to a folder for it.

        Raises:
            IncomparableTracesError: The file holds the run of another test, or the other run is distributed.
            OpdriftError: It cannot be read.
        """
        _check_alone(run)
        unpack(self.file, unpacked)
        kept = load(unpacked)
        if kept.header.label != self.label:
            raise IncomparableTracesError(
                f"{self.file} holds the run of {kept.header.label!r}, not of {self.label!r}. If the test was renamed, delete"
                " the file and run it with --opdrift-update."
            )
        return diff(kept, load(run), tolerance=tolerance)

    def keep(self, run: Path, *, root: Path) -> str:
        """Make the run the kept one, and say how large it is.

        Args:
            run: The trace of the run.
            root: Paths of source files are kept relative to this folder.

        Raises:
            IncomparableTracesError: The run holds nothing, or not all, of what could be compared with it later.
        """
        _check_alone(run)
        trace = load(run)
        if trace.incomplete is not None or not len(trace.ops):
            said = trace.incomplete or "without any op"
            raise IncomparableTracesError(
                f"{run} is {said}, so that it is not kept: nothing could be held against it."
            )
        self.file.parent.mkdir(parents=True, exist_ok=True)
        program = ("pytest", self.label)
        length = pack(run, self.file, program=program, shorten=_shorter(root))
        return f"{plural(len(trace.ops), 'op')}, {plural(length, 'byte')}"

    def is_current(self, run: Path, unpacked: Path) -> bool:
        """Whether the kept run equals another one bit for bit.

        Raises:
            IncomparableTracesError: The file holds the run of another test.
        """
        try:
            return self.compare(run, unpacked, tolerance=None).verdict == "identical"
        except IncomparableTracesError:
            raise
        except OpdriftError:  # damaged, or of another version: it is to be replaced
            return False


def golden_of(test_file: Path, names: tuple[str, ...], name: str) -> Golden:
    """The golden of a test.

    Args:
        test_file: The test's file; goldens lie in a folder beside it.
        names: Its classes, if any, and its own name with its parameters.
        name: Which run of the test; empty for its only one.
    """
    label = "::".join([test_file.name, *names]) + (f" {name}" if name else "")
    text = ".".join(filter(None, [*names, name]))
    file = _UNUSUAL.sub("_", text)
    if file != text or len(file) > _LONGEST:  # two names may have become one
        file = f"{file[:_LONGEST]}-{zlib.crc32(text.encode()):08x}"
    return Golden(test_file.parent / FOLDER / test_file.stem / f"{file}{_SUFFIX}", label)


def _check_alone(run: Path) -> None:
    if rank_folders(run):
        raise IncomparableTracesError(
            f"{run} is of a distributed run; goldens are kept of runs of one process. Compare two runs of the test instead."
        )


def _shorter(root: Path) -> Callable[[str], str]:
    def shorten(path: str) -> str:
        return Path(relative(path, str(root))).as_posix()

    return shorten
