"""Assert that two runs agree; the failure says where they come apart first, and why."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TextIO

from opdrift.align import Maps
from opdrift.diagnose import diff
from opdrift.errors import IncomparableTracesError, InvalidOptionError
from opdrift.records import Diagnosis, Verdict
from opdrift.render import text
from opdrift.render.page import Screen
from opdrift.sizes import Tolerance
from opdrift.tracefile.reader import Trace

Allow = Literal["nothing", "rounding"]

_ALLOWED: Final[dict[Allow, tuple[Verdict, ...]]] = {
    "nothing": ("identical",),
    "rounding": ("identical", "rounding"),
}
#: What test runners put before each line of a failure: "E   ".
_MARGIN: Final = 4


def assert_same_run(
    left: Trace | str | os.PathLike[str],
    right: Trace | str | os.PathLike[str],
    *,
    allow: Allow = "rounding",
    rtol: float | None = None,
    atol: float | None = None,
    samples: str | tuple[int, int] | None = None,
    rank: int | None = None,
    maps: Maps | Sequence[str] = (),
) -> None:
    """Fail unless two runs computed the same, as `torch.testing.assert_close` does for two tensors.

    Args:
        left: The run taken as reference: a trace, its path, or the recorder that wrote it.
        right: The run to judge.
        allow: "rounding" lets differences pass that the arithmetic of each op explains; "nothing" wants equal bits.
        rtol: Relative difference that counts as rounding; together with `atol`.
        atol: Absolute difference that counts as rounding; together with `rtol`.
        samples: "L:R": sample L of the left run's batch with sample R of the right one's.
        rank: Only this rank of distributed traces.
        maps: Renamed modules, as of `opdrift.diff`.

    Raises:
        AssertionError: The runs differ; the message is the report of `diff-trace`.
        IncomparableTracesError: The runs cannot be compared, one is incomplete, or neither holds an op: a test that
            compared nothing must not pass.
        InvalidOptionError: An option has a value that opdrift does not accept.
    """
    __tracebackhide__ = True
    comparison = Comparison(allow, rtol, atol)
    diagnosis = diff(
        left, right, samples=samples, tolerance=comparison.tolerance, rank=rank, maps=maps
    )
    comparison.check(diagnosis, options=_options(samples, rank))


@dataclass(frozen=True, slots=True)
class Comparison:
    """What counts as the same run: `allow`, `rtol` and `atol` as of `assert_same_run`.

    Raises:
        InvalidOptionError: An option has a value that opdrift does not accept.
    """

    allow: Allow = "rounding"
    rtol: float | None = None
    atol: float | None = None

    def __post_init__(self) -> None:
        if self.allow not in _ALLOWED:
            raise InvalidOptionError(f"allow={self.allow!r}: choose one of 'nothing', 'rounding'.")
        if (self.rtol is None) != (self.atol is None):
            raise InvalidOptionError(
                f"rtol={self.rtol!r}, atol={self.atol!r}: give both, or neither for the bounds of each op."
            )

    @property
    def tolerance(self) -> Tolerance | None:
        """What `diff` takes."""
        if self.rtol is None or self.atol is None:
            return None
        return Tolerance(self.rtol, self.atol)

    def check(self, diagnosis: Diagnosis, *, options: Sequence[str] = (), hint: str = "") -> None:
        """Fail unless a diagnosis says that the runs agree.

        Args:
            diagnosis: Of the two runs.
            options: As of `render.text.render`.
            hint: What else to do, said below the report.

        Raises:
            AssertionError: The runs differ.
            IncomparableTracesError: They agree as far as they can be compared, which is not to their ends.
        """
        __tracebackhide__ = True
        if diagnosis.verdict not in _ALLOWED[self.allow]:
            hints = [hint] if hint else []
            if self.allow == "nothing" and diagnosis.verdict == "rounding":
                hints.insert(
                    0, "allow='nothing' wants equal bits; allow='rounding' lets this pass."
                )
            raise AssertionError("\n\n".join([_report(diagnosis, options), *hints]))
        _check_whole(diagnosis)


def _check_whole(diagnosis: Diagnosis) -> None:
    """Refuse to call runs the same of which a part was not compared."""
    for one in (diagnosis, *diagnosis.ranks.values()):
        for summary in (one.left, one.right):
            if not summary.complete:
                raise IncomparableTracesError(
                    f"{summary.path} is incomplete, so that the rest of its run was not compared."
                    " `opdrift show` says why. Record the run again, and let it end by itself."
                )
    left, right = diagnosis.left, diagnosis.right
    ranks = max(left.world_size or 1, right.world_size or 1)
    if diagnosis.ranks and len(diagnosis.ranks) != ranks:
        raise IncomparableTracesError(
            f"Of {ranks} ranks only {', '.join(map(str, sorted(diagnosis.ranks)))} could be compared:"
            f" {'; '.join(diagnosis.notes)}. Compare runs of the same ranks, or name one with rank=."
        )
    if not left.ops and not right.ops:
        raise IncomparableTracesError(
            f"Neither {left.path} nor {right.path} holds an op, so that nothing was compared."
            " Run the model inside the `with` block that records, on its thread."
        )


def _report(diagnosis: Diagnosis, options: Sequence[str]) -> str:
    """The report, set for where test runners print it; never coloured, since many keep it in files."""
    width = shutil.get_terminal_size().columns - _MARGIN
    screen = Screen(width, unicode=Screen.of(_terminal()).unicode, folder=os.getcwd())
    return text.render(diagnosis, screen, options=options).rstrip("\n")


def _terminal() -> TextIO:
    """Where failures will be read: test runners put a file in the place of stdout."""
    return sys.__stdout__ or sys.stdout


def _options(samples: str | tuple[int, int] | None, rank: int | None) -> list[str]:
    """The same as options of `diff-trace`, for the command that looks further."""
    found = []
    if samples is not None:
        pair = samples if isinstance(samples, str) else "{}:{}".format(*samples)
        found += ["--samples", pair]
    if rank is not None:
        found += ["--rank", str(rank)]
    return found
