"""The recording of a program: begun once it has torch, ended when it ends, told of in one line."""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdrift.commands.console import complain
from opdrift.errors import OpdriftError
from opdrift.tracefile.claiming import FOOTER, RANK_FOLDER, announced_rank

if TYPE_CHECKING:
    from opdrift.recorder import Recorder


class Recording:
    """What `opdrift run` records; `options` are those of `opdrift.record`."""

    def __init__(self, output: Path, **options: Any) -> None:
        self._output = output
        self._path = output.absolute()  # the program may go to another folder
        self._options = options
        self._process = os.getpid()
        self._recorder: Recorder | None = None
        self._trouble = (
            "the program did not import torch, so there is nothing to record and no trace"
        )

    def begin(self) -> None:
        """Record from now on. Whatever prevents it is told at the end, and is nothing to the program."""
        if os.getpid() != self._process:
            return  # a child of the program's, which has its own torch
        if threading.current_thread() is not threading.main_thread():
            self._trouble = (
                "the program imported torch on another thread than its main one, so nothing was recorded;"
                " import torch at the program's start"
            )
            return
        try:
            import opdrift

            recorder = opdrift.record(self._path, **self._options)
            self._recorder = recorder.__enter__()
        except OpdriftError as error:
            self._trouble = f"nothing was recorded: {error}"
        except Exception as error:
            self._trouble = (
                f"nothing was recorded, by a bug in opdrift ({type(error).__name__}: {error})."
                " Please report it with the output of `opdrift env`"
            )

    def end(self, error: BaseException | None) -> None:
        """Close the trace, and say where it is."""
        if self._recorder is not None:
            trace = None if error is None else error.__traceback__
            self._recorder.__exit__(None if error is None else type(error), error, trace)
        if os.getpid() != self._process:
            return
        with suppress(ValueError, AttributeError):  # the program closed or took away stderr
            complain("opdrift", self._said())

    def _said(self) -> str:
        if self._recorder is None:
            return self._trouble
        if self._ops() == 0:
            return (
                f"the trace is in {self._output}; it holds no op: the program called torch on other threads, in other"
                " processes, or not at all"
            )
        return f"the trace is in {self._output}"

    def _ops(self) -> int | None:
        rank, _ = announced_rank(os.environ)
        folder = self._path if rank is None else self._path / RANK_FOLDER.format(rank)
        try:
            return int(json.loads((folder / FOOTER).read_text(encoding="utf-8"))["ops"])
        except (OSError, ValueError, KeyError, TypeError):
            return None  # a full disk, say; the recorder has told of it
