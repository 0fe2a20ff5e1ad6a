"""Write the marks of the program and of integrations, their fields as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from opdrift.errors import InvalidOptionError
from opdrift.options import check_text, finite
from opdrift.plugins import SeesMarks
from opdrift.spool import Spool

#: Makes fields of marks.
Fields = Callable[[], Mapping[str, Any]]
#: Of so many mappings of fields the JSON is kept: FSDP has a unit for each block of a model.
_MAX_SHARED: Final = 1024
#: Values that are JSON whatever they are.
_SIMPLE: Final = frozenset({int, str, bool, type(None)})


class Marks:
    """The marks of one recording that it does not write by itself.

    Args:
        spool: Takes them.
        guarded: Calls what may fail, for a place.
        failed: Notes a failure of the tracer itself, at a place.
        must_be_open: Raises if the recorder is not, in the name of a function.
    """

    def __init__(
        self,
        spool: Spool,
        guarded: Callable[[str, Callable[[], object]], None],
        failed: Callable[[str, BaseException], None],
        must_be_open: Callable[[str], None],
    ) -> None:
        self._spool = spool
        self._failed = failed
        self._guarded = guarded
        self._must_be_open = must_be_open
        #: by identity, fields that were shared last, and their JSON
        self._shared: dict[int, tuple[Mapping[str, Any], str]] = {}
        #: integrations that are told of each mark
        self.told: list[SeesMarks] = []

    def mark(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write a mark."""
        check_text("mark", "kind", kind)
        self._spool.mark(self._spool.thread(), kind, _as_json(kind, fields))
        self._tell(kind, fields, None)

    def form(
        self, kind: str, shared: Mapping[str, Any], rest: Fields | None
    ) -> Callable[..., None]:
        """What writes marks that have these fields and those that it is given.

        `rest` makes further ones, once the first of the marks goes to disk.
        """
        check_text("form", "kind", kind)
        form, spool = _Form(kind, self._json_of(kind, shared), rest, self._failed), self._spool

        def write(**fields: Any) -> None:
            self._must_be_open("mark")
            if not shared.keys().isdisjoint(fields):
                twice = ", ".join(sorted(shared.keys() & fields))
                raise InvalidOptionError(
                    f"A form of {kind!r} marks was given {twice} again. Leave out what the form has, or make another."
                )
            spool.mark(spool.thread(), kind, form.text_with(fields))
            if self.told:
                whole = partial(self._tell, kind, {**shared, **fields}, rest)
                self._guarded("a mark", whole)

        return write

    def _json_of(self, kind: str, shared: Mapping[str, Any]) -> str:
        known = self._shared.get(id(shared))
        if known is None or known[0] is not shared:
            if len(self._shared) >= _MAX_SHARED:
                self._shared.clear()
            known = self._shared[id(shared)] = shared, _as_json(kind, shared)
        return known[1]

    def _tell(self, kind: str, fields: Mapping[str, Any], rest: Fields | None) -> None:
        whole = {**fields, **rest()} if self.told and rest is not None else fields
        for each in self.told:
            self._guarded("a mark", partial(each.marked, kind, whole))


class _Form:
    """Fields that marks share, as JSON."""

    def __init__(
        self,
        kind: str,
        text: str,
        rest: Fields | None,
        failed: Callable[[str, BaseException], None],
    ) -> None:
        self._kind = kind
        self._text = text
        self._rest = rest
        self._failed = failed

    def text_with(self, fields: Mapping[str, Any]) -> str | Callable[[], str]:
        """The JSON of a mark with these fields, too.

        That of a few numbers and words is made when the mark goes to disk. There, mark after mark, it takes a tenth of the
        time that it takes between two ops of the program, when nothing of it is in the processor's caches.
        """
        if self._rest is None and not all(type(value) in _SIMPLE for value in fields.values()):
            return self._with(_as_json(self._kind, fields))
        return partial(self._later, fields)

    def _later(self, fields: Mapping[str, Any]) -> str:
        try:
            if self._rest is not None:
                self._text = self._with(_as_json(self._kind, self._rest()))
                self._rest = None
            return self._with(_as_json(self._kind, fields))
        except Exception as error:
            self._failed(f"a mark {self._kind}", error)
            return self._text

    def _with(self, other: str) -> str:
        return _joined(self._text, other)


def _joined(one: str, other: str) -> str:
    """Two JSON objects as one."""
    if one == "{}" or other == "{}":
        return other if one == "{}" else one
    return f"{one[:-1]}, {other[1:]}"


def _as_json(kind: str, fields: Mapping[str, Any]) -> str:
    """The fields as JSON; inf and nan as text."""
    try:
        try:
            return _encode(fields)
        except ValueError:
            return json.dumps(finite(fields))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidOptionError(
            f"mark({kind!r}) has a field that is no JSON value: {error}. Use numbers, text, lists and dicts."
        ) from None


#: `json.dumps` makes another encoder at each call that asks for something.
_encode = json.JSONEncoder(allow_nan=False).encode
