"""Which routines of the CPU's libraries an op ran, by what oneDNN and MKL print when they are verbose.

Both are made verbose only while an op runs, and print into memory then (`cstdout`). How they print was seen with
oneDNN 3.7 to 3.12 and MKL 2024 (notes: kernels, 5.2); what they print and is not understood is kept as it is.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import torch

from opdrift.kernels import CannotWatchError
from opdrift.kernels.cstdout import CStdout
from opdrift.kernels.observed import ObservedOps
from opdrift.kernels.silent import why_not_its_own
from opdrift.neutral import silent

#: Variables by which a program makes the libraries verbose itself, or sends elsewhere what they print.
_VARIABLES: Final = ("ONEDNN_VERBOSE", "DNNL_VERBOSE", "MKL_VERBOSE", "MKL_VERBOSE_OUTPUT_FILE")
#: Ops of torch. Those of others may be Python code that prints, and what C code prints then would come too late.
_TORCHS: Final = ("aten.", "mkldnn.", "mkldnn_prepacked.", "onednn.", "quantized.")
#: torch's function that makes a library verbose -> the library.
_SETTERS: Final = {"mkldnn_set_verbose": "oneDNN", "mkl_set_verbose": "MKL"}

_OURS: Final = re.compile(rb"(?:onednn_verbose|dnnl_verbose|MKL_VERBOSE)[, ][^\n]*\n?")
#: What a library prints once: versions, and which fields its lines have.
_BANNER: Final = re.compile(r"onednn_verbose,v\d+,(?:\w+,)?info,|MKL_VERBOSE .*Product build ")
_ONEDNN: Final = re.compile(r"(onednn_verbose,v\d+,\w+,exec,.*),[\d.e+-]+")
_MKL: Final = re.compile(
    r"(MKL_VERBOSE \w+\(.*\)) [\d.e+-]+[num]?s( CNR:\S+ Dyn:\d FastMM:\d) TID:\d+  *(NThr:\d+)"
)
_ADDRESS: Final = re.compile(r"0x[0-9a-f]+")


def call_of(line: str) -> str | None:
    """A line without what differs from call to call: times, addresses, the thread's number.

    Returns:
        The call; an empty text for lines that tell of none; None for a format that is not known.
    """
    found = _ONEDNN.fullmatch(line)
    if found is not None:
        return found[1]
    found = _MKL.fullmatch(line)
    if found is not None:
        return f"{_ADDRESS.sub('*', found[1])}{found[2]} {found[3]}"
    return "" if _BANNER.match(line) else None


class Verbose:
    """Watches what the CPU's libraries say while ops run. One at a time in a process.

    Args:
        ops: Where it is noted.
        stopped: Called with the reason when watching is given up or interrupted.

    Raises:
        CannotWatchError: The libraries are verbose for somebody else, or do not print what is understood.
    """

    def __init__(self, ops: ObservedOps, stopped: Callable[[str], None]) -> None:
        self._ops = ops
        self._stopped = stopped
        self._pid = os.getpid()
        # reentrant, as collecting garbage may run ops of the program anywhere
        self._lock = threading.RLock()
        #: the ops that run now, and those of them that did not run alone
        self._running: dict[int, str] = {}
        self._together: set[int] = set()
        #: whether the libraries are verbose for us now
        self._is_on = False
        #: libraries that the program has made verbose itself
        self._theirs: set[str] = set()
        #: whether nothing is watched any more
        self._over = False
        _refuse_variables()
        self._set = _setters()
        self._stdout = CStdout()
        self._stack = ExitStack()
        self._stack.callback(self._stdout.close)
        try:
            self._try()
        except BaseException:
            self._stack.close()
            raise
        for name, library in _SETTERS.items():
            self._replace_setter(name, library)

    def close(self) -> None:
        """Write what was noted, and leave everything as it was."""
        if self._is_on:  # an interrupt came before the end of an op
            self._off()
        self._over = True
        self._stack.close()
        if self._is_ours():
            self._ops.write()

    def _is_ours(self) -> bool:
        """Whether this is not a forked child, where a lock may be held by a thread that was not forked."""
        return os.getpid() == self._pid

    # ---- ops -------------------------------------------------------------------------------------------

    def begin(self, seq: int, name: str, /) -> None:
        """The op with this number and name runs next."""
        if not self._is_ours():
            return
        try:
            with self._lock:
                self._running[seq] = name
                if len(self._running) > 1:
                    self._together.update(self._running)
                elif not self._theirs and not self._over and name.startswith(_TORCHS):
                    self._on()
        except Exception as error:
            self._give_up(error)

    def end(self, seq: int, /) -> None:
        """It has returned, or raised."""
        if not self._is_ours():
            return
        try:
            with self._lock:
                self._note(seq, self._running.pop(seq, ""))
        except Exception as error:
            self._give_up(error)

    def _note(self, seq: int, name: str) -> None:
        alone = seq not in self._together
        self._together.discard(seq)
        if not self._is_on:
            return
        text = b"" if self._running else self._off()
        names, raw = self._calls(text) if text else ([], [])
        reason = why_not_its_own(name, names) if alone else None
        if reason is not None:
            self._stop(
                "another thread of the program calls oneDNN or MKL, and whose calls are whose cannot be told"
                f" ({name}, which {reason}, was seen to)",
                foreign=True,
            )
        elif alone:
            self._ops.add(seq, names, raw=raw)
        else:
            self._ops.add(seq, ambiguous=True)

    def _give_up(self, error: Exception) -> None:
        if self._is_on:
            self._off()
        self._stop(f"opdrift failed at it: {error!r}")

    def _stop(self, why: str, *, foreign: bool = False) -> None:
        """Watch no more; what was seen so far may be of another thread if it is `foreign`."""
        self._over = True
        if foreign:
            self._ops.disown(why)
        else:
            self._ops.refuse(why)
        self._stopped(why)

    def _on(self) -> None:
        self._is_on = True
        self._stdout.take()
        for set_verbose in self._set.values():
            set_verbose(1)

    def _off(self) -> bytes:
        for set_verbose in self._set.values():
            set_verbose(0)
        text = self._stdout.give_back()
        self._is_on = False
        return text

    def _calls(self, text: bytes) -> tuple[list[str], list[str]]:
        """The calls in what was printed, and lines of the libraries that are not understood.

        What others printed meanwhile is printed where they meant it to be.
        """
        names: list[str] = []
        raw: list[str] = []
        others = _OURS.sub(b"", text)
        if others:
            self._stdout.put_back(others)
        for line in _OURS.findall(text):
            said = line.decode("utf-8", "backslashreplace").rstrip()
            call = call_of(said)
            if call is None:
                raw.append(said)
            elif call:
                names.append(call)
        return names, raw

    # ---- who else is verbose -----------------------------------------------------------------------------

    def _try(self) -> None:
        """See whether the libraries are quiet, and are understood when they are not.

        Raises:
            CannotWatchError: Something printed before it was asked to, or nothing does, or in another format.
        """
        self._stdout.take()
        try:
            _small_ops()
        finally:
            before = self._stdout.give_back()
        if before:
            self._stdout.put_back(before)
        if _OURS.search(before):
            raise CannotWatchError("the program has made the CPU's libraries verbose itself")
        self._on()
        try:
            _small_ops()
        finally:
            text = self._off()
        said = text.decode("utf-8", "backslashreplace").splitlines()
        unknown = [line for line in said if line and call_of(line) is None]
        if unknown:
            raise CannotWatchError(
                f"oneDNN or MKL prints in a format that is not known: {unknown[0]!r}"
            )
        if not any(map(call_of, said)):
            raise CannotWatchError("neither oneDNN nor MKL prints anything")

    def _replace_setter(self, name: str, library: str) -> None:
        """Notice when the program makes a library verbose: then it is the program's until it ends that.

        Torch has no function that reads the level.
        """
        module: Any = torch._C._verbose
        original = self._set[name]

        def set_verbose(level: Any) -> Any:
            with self._lock:
                self._give_way(library, level)
                return original(level)

        def restore() -> None:
            if getattr(module, name) is set_verbose:
                setattr(module, name, original)

        setattr(module, name, set_verbose)
        self._stack.callback(restore)

    def _give_way(self, library: str, level: Any) -> None:
        """The program sets the level of a library."""
        if self._over:
            return
        if not level:
            self._theirs.discard(library)
            return
        self._theirs.add(library)
        if self._is_on:  # from another thread, while an op runs
            others = _OURS.sub(b"", self._off())
            if others:
                self._stdout.put_back(others)
        why = f"the program made {library} verbose itself, and reads what it prints until it ends that"
        self._ops.refuse(why)
        self._stopped(why)


def _refuse_variables() -> None:
    values = [(name, os.environ.get(name, "")) for name in _VARIABLES]
    taken = [f"{name}={value}" for name, value in values if value not in ("", "0")]
    if taken:
        raise CannotWatchError(
            f"{' and '.join(taken)} is set: what the CPU's libraries print is the program's to read"
        )


def _setters() -> dict[str, Callable[[int], Any]]:
    module = getattr(torch._C, "_verbose", None)
    found = {name: f for name in _SETTERS if (f := getattr(module, name, None)) is not None}
    if len(found) < len(_SETTERS):
        raise CannotWatchError(
            f"this torch {torch.__version__} cannot make the CPU's libraries verbose"
        )
    if any(each.__module__ == __name__ for each in found.values()):
        raise CannotWatchError(
            "another recording in this process watches the CPU's libraries already"
        )
    return found


def _small_ops() -> None:
    """One op of each library: MKL takes every float64 product, oneDNN float32 gelu unless it is switched off."""
    with (
        silent(),
        torch._C.DisableTorchFunction(),
        torch._C._DisableAutocast(),
        torch.no_grad(),
    ):
        ones = torch.ones(8, 8, dtype=torch.float64, device="cpu")
        torch.mm(ones, ones)
        torch._C._nn.gelu(ones.float())
