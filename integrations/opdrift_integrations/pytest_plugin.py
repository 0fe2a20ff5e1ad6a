"""A pytest plugin: record what a test runs, and hold it against another run.

pytest loads this module in every run of everybody who has opdrift installed. It imports nothing of opdrift's before
a fixture is used; `pytest -p no:opdrift` leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from opdrift import Recorder


@pytest.fixture
def opdrift_record(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Recorder]:
    """Record what runs in a block of the test, into a folder in its `tmp_path`.

    What it gives is called as `with opdrift_record("eager", model=model) as left:`. The name is that of the trace and may be
    left out for one; the options are those of `opdrift.record`. The trace is labelled with the test's id.
    """

    def record(name: str = "run", **options: Any) -> Recorder:
        import opdrift

        return opdrift.record(_below(tmp_path, name), **{"label": request.node.nodeid, **options})

    return record


def _below(folder: Path, name: object) -> Path:
    """Where the trace of a name goes, in the test's own folder.

    Raises:
        opdrift.InvalidOptionError: The name is none, or leads elsewhere.
    """
    from opdrift import InvalidOptionError

    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
        raise InvalidOptionError(
            f"The first argument names the trace, such as 'eager'; {name!r} is no name of a folder. Models go into model=."
        )
    return folder / f"{name}.trace"
