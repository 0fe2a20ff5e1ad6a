"""Which ops of a trace are asked for: by module, by step."""

from __future__ import annotations

from fnmatch import fnmatchcase

import numpy as np

from opdrift.errors import InvalidOptionError
from opdrift.render.words import cell
from opdrift.steps import Steps
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace


def in_scope(trace: Trace, pattern: str) -> Ints:
    """Indices of the ops that ran in modules whose path matches, or below one of them.

    Raises:
        InvalidOptionError: No op did.
    """
    columns = trace.call_columns.path
    chosen = np.zeros(int(columns.max(initial=0)) + 1, np.bool_)
    for path in np.unique(
        columns
    ).tolist():  # a long run has few paths and hundreds of thousands of calls
        chosen[path] = _below(trace.call_name(path)[0], pattern)
    found = np.flatnonzero(chosen[columns[trace.ops.call]])
    if not len(found):
        raise InvalidOptionError(
            f"No op of {trace.path} ran in {pattern!r}. `opdrift show {trace.path}` lists the modules."
        )
    return found


def in_steps(trace: Trace, first: int, last: int) -> Ints:
    """Indices of the ops of these steps, both ends included.

    Raises:
        InvalidOptionError: There are none.
    """
    steps = Steps(trace)
    found = np.flatnonzero(steps.between(trace.ops.seq, first, last))
    if not len(found):
        held = steps.numbers
        has = f"its steps are {min(held)} to {max(held)}" if held else "it has no step marks"
        asked = f"step {first}" if first == last else f"the steps {first} to {last}"
        raise InvalidOptionError(f"No op of {trace.path} is of {asked}: {has}.")
    return found


def _below(path: str, pattern: str) -> bool:
    if pattern == cell(""):  # as tables call the root module, which has no path
        return not path
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")
