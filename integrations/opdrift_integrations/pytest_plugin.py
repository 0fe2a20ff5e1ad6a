"""A pytest plugin: record what a test runs, and hold it against another run, or against one that was kept.

pytest loads this module in every run of everybody who has opdrift installed. It imports nothing of opdrift's before
a fixture is used; `pytest -p no:opdrift` leaves it out.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from opdrift import Recorder
    from opdrift.testing.assertions import Comparison
    from opdrift.testing.goldens import Golden

_UPDATE = "--opdrift-update"
#: The property of a test's report under which it tells what became of its golden.
_PROPERTY = "opdrift_golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare `--opdrift-update`."""
    parser.getgroup("opdrift").addoption(
        _UPDATE,
        action="store_true",
        help="keep the runs of opdrift_golden as those to compare with from now on",
    )


@pytest.fixture
def opdrift_record(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Recorder]:
    """Record what runs in a block of the test, into a folder in its `tmp_path`.

    What it gives is called as `with opdrift_record("eager", model=model) as left:`. The name is that of the trace and may be
    left out for one; the options are those of `opdrift.record`. The trace is labelled with the test's id.
    """
    used: set[str] = set()

    def record(name: str = "run", **options: Any) -> Recorder:
        import opdrift

        _check_name(name)
        if name in used and not options.get("overwrite"):
            raise opdrift.InvalidOptionError(
                f"opdrift_record({name!r}) was called before in this test; give the second recording a name of its own."
            )
        used.add(name)
        return opdrift.record(
            tmp_path / f"{name}.trace", **{"label": request.node.nodeid, **options}
        )

    return record


@pytest.fixture
def opdrift_golden(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., GoldenRun]:
    """Hold what runs in a block of the test against the run that was kept of it.

    What it gives is called as `with opdrift_golden(model=model):`. A name tells the runs of one test apart. `allow`,
    `rtol` and `atol` are those of `assert_same_run`, the other options those of `opdrift.record`. `--opdrift-update`
    keeps the run instead, in `opdrift-goldens` beside the test's file.
    """
    used: set[str] = set()

    def golden(name: str = "", **options: Any) -> GoldenRun:
        import opdrift
        from opdrift.testing.assertions import Comparison
        from opdrift.testing.goldens import golden_of

        if name != "":
            _check_name(name)
        if name in used:
            raise opdrift.InvalidOptionError(
                f"opdrift_golden({name!r}) was called before in this test; give each of its runs a name of its own."
            )
        used.add(name)
        chosen = {word: options.pop(word) for word in ("allow", "rtol", "atol") if word in options}
        kept = golden_of(request.path, _names(request.node), name)
        run = tmp_path / "goldens" / f"{name or 'run'}.trace"
        recorder = opdrift.record(run, **{**options, "label": kept.label})
        return GoldenRun(request, kept, recorder, Comparison(**chosen))

    return golden


class GoldenRun:
    """A block of a test that is recorded and held against the run that was kept of it."""

    def __init__(
        self,
        request: pytest.FixtureRequest,
        golden: Golden,
        recorder: Recorder,
        comparison: Comparison,
    ) -> None:
        self._request = request
        self._golden = golden
        self._recorder = recorder
        self._comparison = comparison
        self._update: bool = request.config.getoption(_UPDATE)

    def __enter__(self) -> Recorder:
        """Begin to record; a test without a golden fails before its block runs."""
        __tracebackhide__ = True
        if not self._update and not self._golden.file.exists():
            pytest.fail(
                f"No run of this test was kept so far: {self._below(self._golden.file)} does not exist.\n"
                f"{self._command('Keep this one, and commit the file')}",
                pytrace=False,
            )
        return self._recorder.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop recording, and compare or keep the run; what the block raised goes on."""
        __tracebackhide__ = True
        self._recorder.__exit__(kind, error, trace)
        if kind is not None:
            return
        run = self._recorder.path
        unpacked = run.with_name(f"{run.stem}.golden.trace")
        if self._update:
            self._keep(run, unpacked)
            return
        self._comparison.check(
            self._golden.compare(run, unpacked, tolerance=self._comparison.tolerance),
            hint=self._command("If the run is right as it is now, keep it"),
        )

    def _keep(self, run: Path, unpacked: Path) -> None:
        if self._golden.file.exists() and self._golden.is_current(run, unpacked):
            said = "unchanged"
        else:
            said = self._golden.keep(run, root=self._request.config.rootpath)
        self._request.node.user_properties.append(
            (_PROPERTY, f"{self._below(self._golden.file)}: {said}")
        )

    def _below(self, path: Path) -> str:
        """A path as it is shown: from where pytest was started, if it is below."""
        start = self._request.config.invocation_params.dir
        return str(path.relative_to(start) if path.is_relative_to(start) else path)

    def _command(self, aim: str) -> str:
        test = "::".join([self._below(self._request.path), *_names(self._request.node)])
        return f"{aim}: pytest {_UPDATE} {shlex.quote(test)}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which goldens were written, and how large they are."""
    if not terminalreporter.config.getoption(_UPDATE):
        return
    told = [
        str(value)
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, value in report.user_properties
        if name == _PROPERTY
    ]
    if told:
        terminalreporter.section("opdrift goldens")
        for line in sorted(told):
            terminalreporter.line(line)


def _names(node: pytest.Item) -> tuple[str, ...]:
    """The classes that a test lies in and its own name, with its parameters."""
    chain = node.listchain()
    inner = [each.name for each in chain if isinstance(each, pytest.Class)]
    return (*inner, node.name)


def _check_name(name: object) -> None:
    """Refuse what is no name of a folder, or leads elsewhere.

    Raises:
        opdrift.InvalidOptionError: It is none.
    """
    from opdrift import InvalidOptionError

    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
        raise InvalidOptionError(
            f"The first argument names the trace, such as 'eager'; {name!r} is no name of a folder. Models go into model=."
        )
