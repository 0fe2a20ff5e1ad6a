"""Record every op of a PyTorch run, diff two runs, and learn which op diverged first and why.

Names are loaded when they are first used: recording needs torch, reading traces does not, and
neither is paid for by `import opdrift`.

pytest would rewrite the asserts of what brings a plugin: PYTEST_DONT_REWRITE.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from opdrift.errors import (
    CheckpointError,
    DamagedTraceError,
    ExportError,
    IncomparableTracesError,
    InvalidOptionError,
    NotATraceError,
    OpdriftError,
    RecorderStateError,
    TraceExistsError,
    TraceNotWritableError,
    TraceVersionError,
)

if TYPE_CHECKING:
    from opdrift.batch import Batch
    from opdrift.diagnose import diff
    from opdrift.recorder import Recorder, record
    from opdrift.records import Diagnosis
    from opdrift.tracefile.opening import load
    from opdrift.tracefile.reader import Trace

    __version__: str

__all__ = [
    "Batch",
    "CheckpointError",
    "DamagedTraceError",
    "Diagnosis",
    "ExportError",
    "IncomparableTracesError",
    "InvalidOptionError",
    "NotATraceError",
    "OpdriftError",
    "Recorder",
    "RecorderStateError",
    "Trace",
    "TraceExistsError",
    "TraceNotWritableError",
    "TraceVersionError",
    "__version__",
    "diff",
    "load",
    "record",
]

_HOMES = {
    "Batch": "opdrift.batch",
    "Recorder": "opdrift.recorder",
    "record": "opdrift.recorder",
    "Diagnosis": "opdrift.records",
    "Trace": "opdrift.tracefile.reader",
    "load": "opdrift.tracefile.opening",
    "diff": "opdrift.diagnose",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = _version()
    elif name in _HOMES:
        value = getattr(_import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # the next use finds it without asking here
    return value


def _version() -> str:
    metadata = _import_module("importlib.metadata")
    try:
        return str(metadata.version("opdrift"))
    except metadata.PackageNotFoundError:
        return "0+uninstalled"  # a checkout on the path


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
