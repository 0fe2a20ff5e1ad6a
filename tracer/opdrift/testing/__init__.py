"""Build traces by hand, from words or op by op: for tests, and for trying out a diagnosis.

    left = trace("mm relu mm")
    right = trace("mm _to_copy relu mm*")      # one op more, and another output of the last one

A built trace behaves like a recorded one: every value has a content (a small array), and an op's
output follows from its name, its settings and its inputs, so that a planted difference flows
downstream with a gain of about 1. Contents of up to 32 elements are held whole by their fingerprints.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any, Final, cast

from opdrift.testing.builder import Builder
from opdrift.testing.contents import Change
from opdrift.tracefile.reader import Trace

__all__ = ["Builder", "trace"]

#: Ops of `trace()` words that take a parameter besides the chain.
_WEIGHTED: Final = frozenset(["mm", "addmm", "embedding"])
_WORD: Final = re.compile(r"([\w.]*)\{|([A-Za-z_][\w.]*)([*~!]?)|\}")


def trace(words: str, **options: Any) -> Trace:
    """Build a trace of a chain of ops: each takes what the one before returned.

    Args:
        words: Op names, `aten.` and `.default` left out. `mm*` has a changed output, `mm~` one that
            differs in the last bits, `mm!` a changed weight. `fc{ t addmm }` runs ops in a scope.
            `mm`, `addmm` and `embedding` take a parameter of their own. A trailing underscore writes
            in place.
        options: As of `Builder`.
    """
    build = Builder(**options)
    value = build.leaf("x", kind="input")
    scopes: list[AbstractContextManager[None]] = []
    weights = 0
    for match in _WORD.finditer(words):
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
