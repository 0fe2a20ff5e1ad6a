"""Build hook: compile the fingerprint's C core when a C compiler is there, else make a pure wheel.

The libraries are plain shared objects loaded with ctypes, so one wheel per platform serves every Python.
Set OPDRIFT_NO_COMPILE=1 for a pure wheel, CC for another compiler.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("tracer", "opdrift", "fingerprint")
# No contraction: a fused multiply-add would make the sums differ between the builds.
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
)
AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
AVX512 = (*AVX2, "-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mprefer-vector-width=512")
AVX512IFMA = (*AVX512, "-mavx512ifma")
X86_BUILDS = {"baseline": (), "avx2": AVX2, "avx512": AVX512, "avx512ifma": AVX512IFMA}


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]  # hatchling looks for a subclass
    """Puts the compiled libraries into the wheel, or beside their source for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds a wheel; `version` is "standard" or "editable"."""
        source = Path(self.root) / FOLDER / "_tfp1.c"
        self.scratch = tempfile.TemporaryDirectory()
        target = source.parent if version == "editable" else Path(self.scratch.name)
        try:
            built = compile_core(source, target, self.app.display_warning)
        except CannotCompileError as error:
            self.app.display_warning(
                f"opdrift: no compiled fingerprint core ({error}); the slower NumPy one is used"
            )
            return
        if version == "editable":
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"
        for library in built:
            build_data["force_include"][str(library)] = f"opdrift/fingerprint/{library.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called by hatchling when the wheel is written."""
        self.scratch.cleanup()


class CannotCompileError(Exception):
    """No compiler, or one that does not compile the core; the message says which."""


def compile_core(source: Path, target: Path, warn: Callable[[str], None]) -> list[Path]:
    """Compile every build this compiler and machine can make; the plainest one must work.

    Afterwards `target` holds the libraries of this call and no older ones.
    """
    built: list[Path] = []
    try:
        compiler = find_compiler()
        for name, extra in builds_of_machine().items():
            library = target / f"_tfp1_{name}.so"
            failure = compile_one(compiler, source, extra, library)
            if failure is None:
                built.append(library)
            elif name == "baseline":
                raise CannotCompileError(f"{' '.join(compiler)}: {failure}")
            else:
                warn(f"opdrift: no {name} build of the fingerprint core ({failure})")
        return built
    finally:
        for stale in set(target.glob("_tfp1_*.so")) - set(built):
            stale.unlink()


def find_compiler() -> list[str]:
    """The command of the C compiler."""
    if os.environ.get("OPDRIFT_NO_COMPILE", "") not in ("", "0"):
        raise CannotCompileError("OPDRIFT_NO_COMPILE is set")
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not compiler or shutil.which(compiler[0]) is None:
        raise CannotCompileError(f"no C compiler {' '.join(compiler)!r}")
    return compiler


def builds_of_machine() -> dict[str, tuple[str, ...]]:
    """Compiler flags of each build, the plainest first."""
    return X86_BUILDS if platform.machine().lower() in ("x86_64", "amd64") else {"baseline": ()}


def compile_one(
    compiler: list[str], source: Path, extra: tuple[str, ...], library: Path
) -> str | None:
    """Compile one library; what went wrong, or None. The file appears whole or not at all."""
    partial = library.with_suffix(f".{os.getpid()}")
    parts = sorted(source.parent.glob("_tfp1*.[ch]"))  # compiled.py compares this checksum
    checksum = zlib.crc32(b"".join(part.read_bytes() for part in parts))
    define = f"-DOPDRIFT_SOURCE={checksum}u"
    command = [*compiler, *FLAGS, *extra, define, "-o", str(partial), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        partial.replace(library)
        return None
    partial.unlink(missing_ok=True)
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return next((line for line in lines if "error" in line), lines[-1])


def platform_tag() -> str:
    """This platform in a wheel's name; a universal macOS Python still compiles for one machine only."""
    return (
        sysconfig.get_platform()
        .replace("universal2", platform.machine())
        .replace("-", "_")
        .replace(".", "_")
    )
