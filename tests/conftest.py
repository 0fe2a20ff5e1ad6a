"""Options and fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write what the tests got as the new expectation",
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Hold a text against a file under tests/golden; say how to accept a change."""

    def check(name: str, got: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(got, encoding="utf-8", newline="\n")
            return
        assert path.exists(), f"{name} is missing; run pytest --update-golden and read the new file"
        wanted = path.read_text(encoding="utf-8")
        assert got == wanted, f"{name} changed; if that is right, run pytest --update-golden"

    return check
