"""Timelines in the JSON of Chrome's tracing, as torch.profiler's library kineto writes it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from opdrift.export.opslices import Dialect, argument_value
from opdrift.export.timeline import written
from opdrift.export.tracks import Event, Facts, Instant, Items, Level, Slice, Timeline, Value
from opdrift.plugins import Export
from opdrift.records import Argument, Header, OpInfo, Signature, TensorArgument

#: kineto counts time from the last multiple of this since 1970, so that traces of one cluster share a time axis
#: (libkineto's ChromeTraceBaseTime: a quarter of a year).
_BASE_PERIOD_NS: Final = 7_889_238 * 10**9
#: Encoded arguments that are remembered.
_REMEMBERED: Final = 1 << 17
#: Events that are written at a time.
_BATCH: Final = 1 << 12
#: kineto's word for what a program told a profiler of; modules, steps and phases are that here.
_ANNOTATIONS: Final = dict.fromkeys(("forward", "backward", "step", "phase"), "user_annotation")
#: What C++ calls the types, as kineto does.
_CPP: Final[Mapping[str, str]] = {
    "float32": "float", "float64": "double", "float16": "c10::Half", "bfloat16": "c10::BFloat16", "int64": "long int",
    "int32": "int", "int16": "short int", "int8": "signed char", "uint8": "unsigned char", "bool": "bool",
    "complex64": "c10::complex<float>", "complex128": "c10::complex<double>",
}  # fmt: skip


class _File(Protocol):
    def write(self, data: bytes, /) -> object: ...


class Document:
    """A document of kineto's schema 1 that is being written.

    Args:
        file: To write to.
        name: What the document says it is called.
    """

    def __init__(self, file: _File, name: str) -> None:
        self._file = file
        self._name = name
        self._base = 0
        self._began = False

    def write(self, export: Export) -> str:
        """Write all processes, and return a sentence that says what."""
        alone = len(export.processes) == 1

        def process(drawn: Timeline, progress: Callable[[float], None]) -> int:
            if not self._began:
                self._begin(drawn.header, alone=alone)
            return _Writer(self._file, drawn, self._base).write(progress)

        said = written(export, DIALECT, process)
        self._file.write(b"\n]}\n")
        return said

    def _begin(self, header: Header, *, alone: bool) -> None:
        self._began = True
        self._base = header.start_unix_ns // _BASE_PERIOD_NS * _BASE_PERIOD_NS
        facts: dict[str, Value] = {
            "schemaVersion": 1,
            "deviceProperties": [],
            "record_shapes": 1,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": self._base,
            "traceName": self._name,
        }
        if alone:  # HTA asks for it, also of a run that was not distributed
            facts["distributedInfo"] = {
                "rank": header.rank or 0,
                "world_size": header.world_size or 1,
            }
        # the process's metadata comes first: every later event begins with a comma
        self._file.write(encoded(facts)[:-1].encode() + b',"traceEvents":[\n')
        self._file.write(
            b'{"ph":"M","name":"trace_config","pid":0,"tid":0,"args":{"writer":"opdrift"}}'
        )


class _Writer:
    """Writes one process."""

    def __init__(self, file: _File, drawn: Timeline, base: int) -> None:
        self._file = file
        self._drawn = drawn
        self._base = base
        self._pid = drawn.number
        self._counters = {
            track.id: encoded(track.name) for track in drawn.tracks if track.unit is not None
        }
        #: parts of slices' JSON that repeat
        self._heads: dict[tuple[int, str, str], str] = {}
        self._facts: dict[Facts, str] = {}

    def write(self, progress: Callable[[float], None]) -> int:
        """Write everything, and return how many events that is."""
        self._describe()
        lines: list[str] = []
        number = 0
        for number, event in enumerate(self._drawn.events, 1):
            self._add(event, lines)
            if number % _BATCH == 0:
                self._flush(lines)
                progress(min(number / max(self._drawn.count, 1), 1.0))
        self._flush(lines)
        return number

    def _flush(self, lines: list[str]) -> None:
        self._file.write("".join(lines).encode())
        lines.clear()

    def _describe(self) -> None:
        """The process and its tracks, which are threads here; counters belong to the process."""
        header, lines = self._drawn.header, list[str]()

        def meta(what: str, tid: int, args: dict[str, Value]) -> None:
            lines.append(
                f',\n{{"ph":"M","name":"{what}","pid":{self._pid},"tid":{tid},"args":{encoded(args)}}}'
            )

        meta("process_name", 0, {"name": self._drawn.name})
        rank = "" if header.rank is None else f"rank {header.rank}, "
        meta("process_labels", 0, {"labels": rank + header.device})
        meta("process_sort_index", 0, {"sort_index": self._pid})
        for track in self._drawn.tracks:
            if track.unit is None:
                meta("thread_name", track.id, {"name": track.name})
                meta("thread_sort_index", track.id, {"sort_index": track.id})
        self._flush(lines)

    def _add(self, event: Event, lines: list[str]) -> None:
        if isinstance(event, Slice):
            head = self._heads.get((event.track, event.name, event.category))
            if head is None:
                head = self._head(event)
            facts = self._facts.get(event.facts)
            if facts is None:
                facts = self._remember(event.facts)
            own = "".join([f'"{key}":{_plain(value)},' for key, value in event.own])
            args = f"{own}{facts}"[: -1 if not facts else None]
            lines.append(
                f'{head}{self._time(event.start)},"dur":{_us(event.duration)},"args":{{{args}}}}}'
            )
            if event.arrows_out or event.arrows_in:
                self._arrows(event, lines)
        elif isinstance(event, Level):
            lines.append(
                f',\n{{"ph":"C","name":{self._counters[event.track]},"pid":{self._pid},"tid":0,'
                f'"ts":{self._time(event.time)},"args":{{"value":{event.value}}}}}'
            )
        else:
            lines.append(self._instant(event))

    def _head(self, event: Slice) -> str:
        if len(self._heads) >= _REMEMBERED:
            self._heads.clear()
        found = (
            f',\n{{"ph":"X","cat":{encoded(_ANNOTATIONS.get(event.category, event.category))},"name":{encoded(event.name)},'
            f'"pid":{self._pid},"tid":{event.track},"ts":'
        )
        self._heads[event.track, event.name, event.category] = found
        return found

    def _remember(self, facts: Facts) -> str:
        if len(self._facts) >= _REMEMBERED:
            self._facts.clear()
        found = self._facts[facts] = encoded(dict(facts.items))[1:-1]
        return found

    def _instant(self, event: Instant) -> str:
        return (
            f',\n{{"ph":"i","s":"t","cat":{encoded(event.category)},"name":{encoded(event.name)},'
            f'"pid":{self._pid},"tid":{event.track},"ts":{self._time(event.time)},'
            f'"args":{encoded(dict(event.own))}}}'
        )

    def _arrows(self, event: Slice, lines: list[str]) -> None:
        """They begin and end within their slices: `bp` binds an end to the slice around it."""
        where = f'"pid":{self._pid},"tid":{event.track},"ts":{self._time(event.start)},"cat":"difference","name":"difference"'
        for phase, ids in (('"s"', event.arrows_out), ('"f","bp":"e"', event.arrows_in)):
            for each in ids:
                ident = self._pid << 32 | each
                lines.append(f',\n{{"ph":{phase},"id":{ident},{where}}}')

    def _time(self, ns: int) -> str:
        return _us(ns - self._base)


def _us(ns: int) -> str:
    """Nanoseconds as microseconds, exactly."""
    whole, rest = divmod(ns, 1000)
    return f"{whole}.{rest:03d}"


def _plain(value: Value) -> str:
    """The JSON of a number or a digest without asking a library; of other values with it."""
    return str(value) if type(value) is int else encoded(value)


def encoded(value: Value) -> str:
    """JSON in UTF-8, since Perfetto leaves escapes in arguments as they are; what JSON has no word for is text."""
    return json.dumps(_sayable(value), separators=(",", ":"), ensure_ascii=False)


def _sayable(value: Value) -> Value:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()  # half of a surrogate pair
    if isinstance(value, Mapping):
        return {str(_sayable(str(key))): _sayable(each) for key, each in value.items()}
    if isinstance(value, Sequence):
        return [_sayable(each) for each in value]
    return value


# ---- how kineto tells of an op ----------------------------------------------------------------------------


def _name(op: OpInfo) -> str:
    """`aten.mm.default` as `aten::mm`, by which torch.profiler knows it."""
    parts = op.name.split(".")
    return "::".join(parts[:2]) if len(parts) == 3 else op.name


def _layouts(signature: Signature) -> Items:
    """All arguments of the schema, also those that the call left out."""
    given, op = dict(signature.arguments), signature.op
    names = [*op.arguments, *(name for name in given if name not in op.arguments)]
    all_ = [given.get(name, op.defaults.get(name)) for name in names]
    return (
        ("overload", op.name),
        ("Input Dims", [_each(a, lambda t: list(t.meta.shape)) for a in all_]),
        ("Input type", [_type(a) for a in all_]),
        ("Input Strides", [_each(a, lambda t: list(t.meta.stride)) for a in all_]),
        ("Concrete Inputs", [_concrete(a) for a in all_]),
    )


def _each(argument: Argument, told: Callable[[TensorArgument], Value]) -> Value:
    if isinstance(argument, TensorArgument):
        return told(argument)
    if isinstance(argument, tuple) and any(isinstance(a, TensorArgument) for a in argument):
        return [_each(a, told) for a in argument]
    return []


def _type(argument: Argument) -> str:
    if isinstance(argument, TensorArgument):
        return _CPP.get(argument.meta.dtype, argument.meta.dtype)
    if isinstance(argument, tuple):
        return (
            "TensorList" if any(isinstance(a, TensorArgument) for a in argument) else "ScalarList"
        )
    return "Scalar" if isinstance(argument, bool | int | float) else ""


def _concrete(argument: Argument) -> str:
    if isinstance(argument, TensorArgument) or argument is None:
        return ""
    if isinstance(argument, tuple) and any(isinstance(a, TensorArgument) for a in argument):
        return ""
    return str(argument_value(argument))


def _own(index: int, seq: int, node: int, phase: int) -> Items:
    told: list[tuple[str, Value]] = [
        ("External id", seq),
        ("Ev Idx", index),
        ("Record function id", 0),
    ]
    if node > 0 or phase:
        # opdrift sees a forward op after autograd has counted it, kineto before
        told.append(("Sequence number", node if phase else node - 1))
    return tuple(told)


DIALECT: Final = Dialect(_name, _layouts, _own, category="cpu_op", step="ProfilerStep#{}")
