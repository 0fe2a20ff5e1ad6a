"""A program for a process of its own: what a program and its C code print is the same while ops are watched.

Prints one line of JSON: where standard output went -> [what was printed plain, what was printed recorded, how many
ops were seen to call a library].
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import opdrift
from opdrift.picks.observed import Observed

libc = ctypes.CDLL(None)
c_stdout = ctypes.c_void_p.in_dll(libc, "stdout")


def c_print(text: str, *, flush: bool) -> None:
    """Print as C code does."""
    libc.printf(b"%s", text.encode())
    if flush:
        libc.fflush(c_stdout)


def loud(x: torch.Tensor) -> torch.Tensor:
    """An op of the program that prints from Python, from C and to the descriptor, around calls of libraries."""
    sys.stdout.write("from Python in an op\n")
    sys.stdout.flush()
    c_print("from C in an op, ", flush=False)
    out = x @ x
    c_print("after a product of MKL, ", flush=False)
    torch.nn.functional.gelu(x)
    c_print("and one of oneDNN\n", flush=True)
    os.write(1, b"written to the descriptor in an op\n")
    return out


library = torch.library.Library("stdout_checks", "DEF")
library.define("loud(Tensor x) -> Tensor")
library.impl("loud", loud, "CompositeExplicitAutograd")


def program() -> None:
    """Print in every way between ops, and inside one."""
    x = torch.ones(16, 16)
    for step in range(3):
        sys.stdout.write(f"step {step}\n")
        if step == 1:
            sys.stdout.flush()
        c_print(f"C before {step}\n", flush=step == 2)
        torch.ops.stdout_checks.loud(x)
        torch.mm(x, x)
        torch.conv2d(torch.ones(2, 3, 9, 9), torch.ones(4, 3, 3, 3))
        c_print(f"C after {step}\n", flush=False)
    try:
        torch.mm(x, torch.ones(3, 3))
    except RuntimeError:
        sys.stdout.write("raised\n")
    sys.stdout.flush()
    libc.fflush(c_stdout)


def quiet() -> None:
    """Ops alone."""
    x = torch.ones(16, 16)
    torch.mm(x, x)
    torch.nn.functional.gelu(x)


def recorded(what: Callable[[], None], folder: Path) -> int:
    """Record a program; returns how many ops were seen to call a library."""
    with opdrift.record(folder / "t", kernels="full", integrations=(), overwrite=True):
        what()
    trace = opdrift.load(folder / "t")
    seen = Observed(trace)
    assert seen.refused == []
    found = [seen.of(int(seq), "verbose") for seq in trace.ops.seq]
    return sum(each is not None and bool(each.names) for each in found)


def into_file(run: Callable[[], object]) -> str:
    """What `run` prints when standard output is a file."""
    with tempfile.TemporaryFile() as file:
        _redirected(file.fileno(), run)
        file.seek(0)
        return file.read().decode()


def into_pipe(run: Callable[[], object]) -> str:
    """What `run` prints when standard output is a pipe (which holds it all)."""
    read, write = os.pipe()
    _redirected(write, run)
    os.close(write)
    with open(read, "rb") as pipe:
        return pipe.read().decode()


def _redirected(descriptor: int, run: Callable[[], object]) -> None:
    kept = os.dup(1)
    os.dup2(descriptor, 1)
    try:
        run()
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def closed(run: Callable[[], object]) -> str:
    """`run` while standard output is closed."""
    kept = os.dup(1)
    os.close(1)
    try:
        run()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    return ""


def main(folder: Path) -> None:
    program()  # the first run imports things
    found: dict[str, list[object]] = {}
    for way, what in ((into_file, program), (into_pipe, program), (closed, quiet)):
        plain, calls = way(what), []
        watched = way(lambda what=what, calls=calls: calls.append(recorded(what, folder)))
        found[way.__name__] = [plain, watched, calls]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
