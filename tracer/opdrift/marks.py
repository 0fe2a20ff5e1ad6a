"""Write the marks of the program and of integrations, their fields as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from opdrift.errors import InvalidOptionError
from opdrift.options import check_text, finite
from opdrift.plugins import SeesMarks
from opdrift.spool import Spool


class Marks:
    """The marks of one recording that it does not write by itself.

    Args:
        spool: Takes them.
        guarded: Calls what may fail, for a place.
        must_be_open: Raises if the recorder is not, in the name of a function.
    """

    def __init__(
        self,
        spool: Spool,
        guarded: Callable[[str, Callable[[], object]], None],
        must_be_open: Callable[[str], None],
    ) -> None:
        self._spool = spool
        self._guarded = guarded
        self._must_be_open = must_be_open
        #: integrations that are told of each mark
        self.told: list[SeesMarks] = []

    def mark(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write a mark."""
        check_text("mark", "kind", kind)
        self._spool.mark(self._spool.thread(), kind, _as_json(kind, fields))
        self._tell(kind, fields)

    def form(self, kind: str, shared: Mapping[str, Any]) -> Callable[..., None]:
        """What writes marks that have these fields and those that it is given."""
        check_text("form", "kind", kind)
        head, spool = _as_json(kind, shared), self._spool

        def write(**fields: Any) -> None:
            self._must_be_open("mark")
            if not shared.keys().isdisjoint(fields):
                twice = ", ".join(sorted(shared.keys() & fields))
                raise InvalidOptionError(
                    f"A form of {kind!r} marks was given {twice} again. Leave out what the form has, or make another."
                )
            spool.mark(spool.thread(), kind, _joined(head, _few_as_json(kind, fields)))
            if self.told:
                self._tell(kind, {**shared, **fields})

        return write

    def _tell(self, kind: str, fields: Mapping[str, Any]) -> None:
        for each in self.told:
            self._guarded("a mark", partial(each.marked, kind, fields))


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


def _few_as_json(kind: str, fields: Mapping[str, Any]) -> str:
    """As `_as_json`; the commonest, a number or two, in a third of the time."""
    if all(type(value) is int for value in fields.values()):
        return "{" + ", ".join([f'"{name}": {value}' for name, value in fields.items()]) + "}"
    return _as_json(kind, fields)


#: `json.dumps` makes another encoder at each call that asks for something.
_encode = json.JSONEncoder(allow_nan=False).encode
