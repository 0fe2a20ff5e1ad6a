"""Exit statuses, as `diff` and `cmp` have them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a command's exit status says. `opdrift run` passes on the program's own instead."""

    #: The runs are identical (with `--fail-on diverged`: or differ by rounding only); nothing found.
    SAME = 0
    #: The runs differ; `opdrift show --findings` found something.
    DIFFER = 1
    #: No answer: a wrong argument, a path that is no trace, traces that cannot be compared, a bug.
    TROUBLE = 2
    #: The user pressed Ctrl-C (128 + SIGINT, as shells say it).
    INTERRUPTED = 130
