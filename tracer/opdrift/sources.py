"""Find the line of the user's program that an op came from."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Final

import torch
import typing_extensions
from torch.nn.modules.module import Module

from opdrift.compilations import plain_name

#: The frame at which the walk stops: the module hook has stored the line of its caller.
CALL_IMPL: Final = Module._call_impl.__code__
_PACKAGE: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep
_INTEGRATIONS: Final = (
    os.path.join(os.path.dirname(os.path.dirname(_PACKAGE.rstrip(os.sep))), "opdrift_integrations")
    + os.sep
)
_TORCH: Final = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
#: its `deprecated` stands between the program and torch's own deprecated functions
_DECORATORS: Final = os.path.abspath(typing_extensions.__file__)
_LIBRARY: Final = (_TORCH, _PACKAGE, _INTEGRATIONS, _DECORATORS, "<frozen", "<__array_function__")
#: It stands between a module call and the module's forward, in every module that accelerate offloads.
_FORWARD_WRAPPER: Final = os.path.join("accelerate", "hooks.py")
#: So many code objects and lines are known at a time; programs that make code as they run make ever more.
_MAX_CODES: Final = 65536
_COMPILED_NAMES: Final = ("<eval_with_key>",)
#: Inductor's folder by default, and the path of a file in whichever folder it was given: its key, and two letters of it.
_COMPILED_PATH: Final = re.compile(
    r"torchinductor|(?:^|[/\\])([a-z2-7]{2})[/\\]c\1[a-z2-7]{49}\.py$"
)


class CodeEntry:
    """What is known of one code object; it is kept, so that its id stays its own."""

    __slots__ = ("code", "compiled", "is_call", "lines")

    def __init__(self, code: CodeType) -> None:
        self.code = code
        name = code.co_filename
        self.compiled = name.startswith(_COMPILED_NAMES) or _COMPILED_PATH.search(name) is not None
        self.is_call = code is CALL_IMPL
        #: instruction offset -> source id, for the user's code; None for libraries and generated code
        self.lines: dict[int, int] | None = None if self.compiled or _is_library(name) else {}


def _is_library(filename: str) -> bool:
    integration = os.sep + "opdrift_integrations" + os.sep in filename
    return integration or filename.startswith(_LIBRARY) or filename.endswith(_FORWARD_WRAPPER)


def raised_at(error: BaseException) -> str | None:
    """`file:line in function` of the innermost line outside libraries that an exception came through."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if CodeEntry(code).lines is not None:
            found = f"{code.co_filename}:{trace.tb_lineno} in {code.co_qualname}"
        trace = trace.tb_next
    return found


def _nothing() -> None:
    """What happens at a new line by default."""


class Sources:
    """Source lines by (code object, instruction); 0.2 us when the caller's line is known.

    Code objects are told apart by id, not by equality: equality ignores the file name (notes: recorder, Q3).
    """

    def __init__(self, write_name: Callable[[str, int, str], None]) -> None:
        self.codes: dict[int, CodeEntry] = {}
        self._ids: dict[tuple[str, int, str], int] = {}
        self._numbers = itertools.count(1)
        self._write_name = write_name
        #: set by `find` when it passed through code that torch.compile generated
        self.passed_compiled = False
        #: called when a line of the program is met for the first time: before its op, or its module call
        self.on_new_line: Callable[[], None] = _nothing

    def find(self, frame: FrameType | None, fallback: int) -> int:
        """The id of the first line outside libraries, from `frame` outwards.

        The walk stops at a module call, whose own line is `fallback`. 0 means none was found.
        """
        self.passed_compiled = False
        codes = self.codes
        while frame is not None:
            code = frame.f_code
            entry = codes.get(id(code))
            if entry is None:
                if len(codes) >= _MAX_CODES:
                    codes.clear()
                entry = codes[id(code)] = CodeEntry(code)
            lines = entry.lines
            if lines is not None:
                found = lines.get(frame.f_lasti)
                if found is None:
                    found = lines[frame.f_lasti] = self._line(code, frame.f_lineno)
                    self.on_new_line()
                return found
            if entry.is_call:
                return fallback
            if entry.compiled:
                self.passed_compiled = True
            frame = frame.f_back
        return 0

    def in_words(self, frame: FrameType | None) -> str | None:
        """`file:line in function` of the first line outside libraries, of those that `find` has met."""
        while frame is not None:
            entry = self.codes.get(id(frame.f_code))
            if entry is not None and entry.lines is not None:
                code = frame.f_code
                return f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
            frame = frame.f_back
        return None

    def of_module_call(self, depth: int, fallback: int) -> int:
        """The line that called the module whose forward hook is running, `depth` frames up."""
        frame: FrameType | None = sys._getframe(depth)
        while frame is not None and frame.f_code is not CALL_IMPL:
            frame = frame.f_back
        return self.find(frame.f_back if frame is not None else None, fallback)

    def _line(self, code: CodeType, line: int | None) -> int:
        key = (code.co_filename, line or 0, plain_name(code.co_qualname))
        found = self._ids.get(key)
        if found is None:
            if len(self._ids) >= _MAX_CODES:
                self._ids.clear()  # ids go on: a line seen again gets a second one
            found = self._ids[key] = next(self._numbers)
            self._write_name("source", found, json.dumps(key))
        return found
