"""Assert that two runs agree; build traces by hand, from words or op by op. Needs no torch.

    assert_same_run("monday.trace", "tuesday.trace")

    left = trace("mm relu mm")
    right = trace("mm _to_copy relu mm*")      # one op more, and another output of the last one
    opdrift.diff(left, right)

A built trace behaves like a recorded one: every value has a content (a small array), and an op's
output follows from its name, its settings and its inputs, so that a planted difference flows
downstream with a gain of about 1. Contents of up to 32 elements are held whole by their fingerprints.
docs/pytest.md shows the first, docs/testing.md the rest.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any, Final, cast

from opdrift.errors import InvalidOptionError
from opdrift.testing.assertions import assert_same_run
from opdrift.testing.builder import Builder
from opdrift.testing.collectives import collective
from opdrift.testing.contents import Change
from opdrift.testing.exports import export
from opdrift.tracefile.reader import Trace

__all__ = ["Builder", "assert_same_run", "collective", "export", "plant", "trace"]

#: Ops of `trace()` words that take a parameter besides the chain.
_WEIGHTED: Final = frozenset(["mm", "addmm", "embedding"])
_WORD: Final = re.compile(r"([\w.]*)\{|([A-Za-z_][\w.]*)([*~!]?)|\}")
_OP: Final = re.compile(r"(?<![\w.])([A-Za-z_][\w.]*)([*~!]?)(?![\w.{*~!])")
_CHANGES: Final = ("*", "~", "!")


def trace(words: str, **options: Any) -> Trace:
    """Build a trace of a chain of ops: each takes what the one before returned.

    Args:
        words: Op names, `aten.` and `.default` left out. `mm*` has a changed output, `mm~` one that
            differs in the last bits, `mm!` a changed weight. `fc{ t addmm }` runs ops in a scope.
            `mm`, `addmm` and `embedding` take a parameter of their own. A trailing underscore writes
            in place.
        options: As of `Builder`.

    Raises:
        InvalidOptionError: The words cannot be read.
    """
    build = Builder(**options)
    value = build.leaf("x", kind="input")
    scopes: list[AbstractContextManager[None]] = []
    weights = 0
    for match in _read(words):
        scope, name, change = match.groups()
        if match.group() == "}":
            scopes.pop().__exit__(None, None, None)
        elif scope is not None:
            scopes.append(build.scope(scope))
            scopes[-1].__enter__()
        else:
            inputs = [value]
            if name in _WEIGHTED:
                inputs.append(
                    build.leaf(f"w{weights}", content="changed" if change == "!" else None)
                )
                weights += 1
            value = build.op(name, *inputs, change=cast("Change", change if change in "*~" else ""))
    build.output(value)
    return build.build()


def plant(words: str, op: int, change: str = "*", **options: Any) -> Trace:
    """Build the same trace with a fault at one op.

        left, right = trace("mm relu mm"), plant("mm relu mm", 2)

    Args:
        words: As of `trace`, without faults of its own at that op.
        op: Which op, from 1 as in reports.
        change: "*" another output, "~" one that differs in the last bits, "!" a changed weight (of `mm`,
            `addmm` and `embedding`).
        options: As of `Builder`.

    Raises:
        InvalidOptionError: There is no such op, it cannot have such a fault, or the words cannot be read.
    """
    _read(words)
    ops = list(_OP.finditer(words))
    if not 1 <= op <= len(ops):
        raise InvalidOptionError(f"op={op}: {words!r} has ops 1 to {len(ops)}.")
    if change not in _CHANGES:
        raise InvalidOptionError(f"change={change!r} is none of {', '.join(map(repr, _CHANGES))}.")
    found = ops[op - 1]
    if change == "!" and found[1] not in _WEIGHTED:
        raise InvalidOptionError(
            f"change='!' changes a weight, and {found[1]} has none; take one of {', '.join(sorted(_WEIGHTED))}."
        )
    return trace(f"{words[: found.start()]}{found[1]}{change}{words[found.end() :]}", **options)


def _read(words: str) -> list[re.Match[str]]:
    """The words, or an error that shows the first place that is none."""
    found: list[re.Match[str]] = []
    depth, place = 0, 0
    while True:
        place += len(words[place:]) - len(words[place:].lstrip())
        if place == len(words):
            break
        match = _WORD.match(words, place)
        if match is None:
            raise InvalidOptionError(
                f"{words!r} cannot be read from {words[place : place + 12]!r} on."
                " Words are op names, with *, ~ or ! behind them, and scopes as in 'fc{ t addmm }'."
            )
        depth += {"{": 1, "}": -1}.get(match.group()[-1], 0)
        if depth < 0:
            raise InvalidOptionError(f"{words!r} closes a scope that was not opened.")
        found.append(match)
        place = match.end()
    if depth:
        raise InvalidOptionError(f"{words!r} leaves {depth} of its scopes open: a '}}' is missing.")
    return found
