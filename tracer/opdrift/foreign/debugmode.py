"""Read what `DebugMode.save_logs` of torch 2.14 wrote: one JSON object, format `...DebugMode.logs`, version 1.

The format is torch/utils/_debug_mode/_calls.py of torch 2.14.1. Module paths stand in lines of their own
(`[nn.Mod] Model.layers.0`), and how deep a line lies says which of them an op belongs to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from opdrift.errors import DamagedTraceError, TraceVersionError
from opdrift.foreign import written
from opdrift.foreign.model import Hash, Log, LoggedOp, LoggedTensor
from opdrift.records import Phase

FORMAT: Final = "torch.utils._debug_mode.DebugMode.logs"
VERSION: Final = 1
_FRAME: Final = re.compile(r'File "([^"\n]+)", line (\d+), in ([^\n]+)')
#: Frames of torch itself tell nothing about the user's program.
_TORCH: Final = re.compile(
    r"[/\\]site-packages[/\\]torch[/\\]|[/\\]torch[/\\](?:nn|autograd|utils|_)"
)


def parse(path: str, text: str) -> Log:
    """The log in a file's text.

    Raises:
        DamagedTraceError: It is no such log, or a part of it is not as the format says.
        TraceVersionError: It is of another version of the format.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedTraceError(
            f"{path} cannot be read as JSON ({_said(error)}). Save it again with DebugMode.save_logs()."
        ) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise DamagedTraceError(
            f"{path} is JSON, but no DebugMode log: its format is {found!r}, not {FORMAT!r}."
            " Save it with DebugMode.save_logs() of torch 2.14 or later."
        )
    if data.get("version") != VERSION:
        raise TraceVersionError(
            f"{path} is a DebugMode log of version {data.get('version')!r}; this opdrift reads version {VERSION}."
            " Upgrade opdrift (`pip install -U opdrift`), or save the log with torch 2.14."
        )
    calls = data.get("logs")
    if not isinstance(calls, list):
        raise DamagedTraceError(
            f"{path} has no list of logs. Save it again with DebugMode.save_logs()."
        )
    reader = _Reader(python_calls=any(_is_python(c) for c in calls))
    ops = []
    for number, call in enumerate(calls):
        try:
            op = reader.read(call)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DamagedTraceError(
                f"{path} is damaged at its record {number} ({_said(error)}). Save it again with DebugMode.save_logs()."
            ) from None
        if op is not None:
            ops.append(op)
    return Log(path, "DebugMode", tuple(ops))


def _said(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)


def _is_python(call: Any) -> bool:
    return (
        isinstance(call, dict) and call.get("type") == "op" and "::" not in str(call.get("op_name"))
    )


@dataclass(slots=True)
class _Open:
    """A module call, or another stretch, that the following records lie in."""

    depth: int
    path: str | None
    call: int


class _Reader:
    """Turns records into ops, one after the other."""

    def __init__(self, *, python_calls: bool) -> None:
        # with record_torchfunction an aten op lies below the Python call that made it, one level deeper
        self._step = 2 if python_calls else 1
        self._open: list[_Open] = []
        self._calls: dict[str, int] = {}
        self._seq = 0

    def read(self, call: Any) -> LoggedOp | None:
        """The op that a record is; None for other records."""
        kind, depth = call["type"], call["call_depth"]
        if not isinstance(depth, int):
            raise ValueError(f"call_depth is {depth!r}, not a whole number")
        if kind == "annotate":
            self._enter(depth, str(call["header"]), str(call["tag"]))
            return None
        if kind == "op":
            name = _text(call, "op_name")
            # Python functions: what they compute follows below them, as aten ops
            return self._op(call, depth, _op_name(name)) if "::" in name else None
        if kind == "triton_kernel":
            return self._triton(call, depth)
        if kind in ("redistribute", "output_placement"):
            return None
        raise ValueError(f"{kind!r} is no kind of record in version {VERSION}")

    def _enter(self, depth: int, header: str, tag: str) -> None:
        while self._open and self._open[-1].depth >= depth:
            self._open.pop()
        if header.startswith("nn.Mod"):
            path = self._below_root(tag)
            number = self._calls.get(path, 0)
            self._calls[path] = number + 1
            self._open.append(_Open(depth, path, number))
        elif header == "record function":
            self._open.append(_Open(depth, None, 0))

    def _below_root(self, tag: str) -> str:
        """The path without the class name of the outermost module, which the module tracker puts first."""
        return tag.partition(".")[2]

    def _place(self, depth: int) -> tuple[str, int]:
        while self._open and self._open[-1].depth > depth - self._step:
            self._open.pop()
        for each in reversed(self._open):
            if each.path is not None:
                return each.path, each.call
        return "", 0

    def _op(self, call: Any, depth: int, name: str) -> LoggedOp:
        arguments = _text(call, "args_str")
        rest = _text(call, "kwargs_str")
        given = ", ".join(part for part in (arguments, rest.removeprefix(", ")) if part)
        log = _value(call["log"]) if call.get("log") is not None else {}
        module, number = self._place(depth)
        forward = call.get("fwd_stack_trace")
        phase: Phase | None = "backward" if forward else None
        self._seq += 1
        return LoggedOp(
            seq=self._seq,
            name=name,
            module=module,
            call=number,
            phase=phase,
            source=_source(forward or call.get("stack_trace")),
            arguments=written.settings(given),
            inputs=_tensors(written.tensors(given), log.get("input_hash")),
            outputs=_tensors(written.tensors(call.get("output_str") or ""), log.get("hash")),
        )

    def _triton(self, call: Any, depth: int) -> LoggedOp:
        text = _text(call, "kwargs_str")
        module, number = self._place(depth)
        self._seq += 1
        texts = written.tensors(text)
        before, after = (
            _tensors(texts, list(_value(call[key]).values()) if call.get(key) is not None else None)
            for key in ("pre_hashes", "post_hashes")
        )
        return LoggedOp(
            self._seq, _text(call, "kernel_name"), module, number, None, None,
            written.settings(text), before, after,
        )  # fmt: skip


def _text(call: Any, key: str) -> str:
    value = call[key]
    if not isinstance(value, str):
        raise ValueError(f"{key} is {value!r}, not a text")
    return value


def _op_name(name: str) -> str:
    """`aten::sum.dim_IntList` as opdrift writes it."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return f"{namespace}.{base}.{overload or 'default'}"


def _value(data: Any) -> Any:
    """A value of the log, from its tagged form."""
    kind, items = data["type"], data.get("items")
    if kind == "scalar":
        return data["value"]
    if kind == "nonfinite_float":
        return float(data["value"])
    if kind in ("tuple", "list"):
        return [_value(item) for item in items]
    if kind == "dict":
        return {key: _value(item) for key, item in items}
    raise ValueError(f"{kind!r} is no kind of value in version {VERSION}")


def _tensors(texts: Sequence[str], hashes: Any) -> tuple[LoggedTensor, ...]:
    """Tensors with their hashes: the log holds them apart, in the same order."""
    flat = list(_hashes(hashes))
    if not flat:
        return tuple(LoggedTensor(text, None) for text in texts)
    each = len(flat) // len(texts) if texts and len(flat) % len(texts) == 0 else _functions(flat)
    groups = [tuple(flat[i : i + each]) for i in range(0, len(flat), each)]
    if len(groups) != len(
        texts
    ):  # a tensor that was not hashed leaves no trace of which one it was
        texts = [""] * len(groups)
    return tuple(LoggedTensor(t, g) for t, g in zip(texts, groups, strict=True))


def _functions(flat: list[Hash]) -> int:
    """How many hash functions were applied to each tensor: the kinds repeat."""
    kinds = [h.kind for h in flat]
    for length in range(1, len(kinds)):
        if len(kinds) % length == 0 and kinds == kinds[:length] * (len(kinds) // length):
            return length
    return len(kinds)


def _hashes(data: Any) -> Iterator[Hash]:
    if isinstance(data, list):
        for item in data:
            yield from _hashes(item)
    elif isinstance(data, dict):
        yield from _hashes(list(data.values()))
    elif isinstance(data, float):
        yield Hash("norm", data)
    elif isinstance(data, int) and not isinstance(data, bool):
        yield Hash("xor", data)
    elif data is not None:
        yield Hash("other", str(data))


def _source(stack: Any) -> str | None:
    """The innermost line of the user's program in a stack trace."""
    frames = _FRAME.findall(stack) if isinstance(stack, str) else []
    own = [f for f in frames if not _TORCH.search(f[0])]
    if not own:
        return None
    file, line, function = own[-1]
    return f"{file}:{line} in {function.strip()}"
