"""Options and fixtures of the whole suite."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"

#: Records one small model several times, in a process of its own: the tests of the reading half stay free of torch.
_RECORD = """
import sys
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
import opdrift

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (p.unflatten(-1, (2, 8)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

class Block(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16, eps=eps), Attention()
        self.ffn = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.ffn(x)

def model(*, seed=0, eps=1e-5):
    torch.manual_seed(seed)
    layers = [Block(eps if i == 1 else 1e-5) for i in range(3)]
    return nn.Sequential(nn.Embedding(30, 16), *layers, nn.Linear(16, 30)).eval()

def record(name, run, label=""):
    with opdrift.record(f"{sys.argv[1]}/{name}.trace", model=run, label=label), torch.no_grad():
        run(torch.arange(10).view(2, 5))

record("base", model(), "as published")
record("same", model())
record("weights", model(seed=1))
record("eps", model(eps=1e-2))
with sdpa_kernel([SDPBackend.MATH]):
    record("math", model())
broken = model()
with torch.no_grad():
    broken[2].attention.out.weight[3, 4] = float("nan")
record("nan", broken)
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write what the tests got as the new expectation",
    )
    parser.addoption(
        "--all-plants",
        action="store_true",
        help="plant every fault at every op (tests/quality), not a subset",
    )
    parser.addoption(
        "--mlflow",
        nargs="?",
        const="install",
        metavar="COMMAND",
        help="send spans to MLflow: to the server of this command, else of one installed in an environment of its own",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Among several workers, files with slow tests come first: what one takes last keeps the others waiting.

    With `--no-loadscope-reorder`; else the files with the fewest tests come last, and three tests may take a minute.
    """
    if not hasattr(config, "workerinput"):
        return
    count = Counter(item.path for item in items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, -count[item.path], item.path))


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


def environment(**changes: str) -> dict[str, str]:
    """The environment of a process that finds opdrift in this checkout, and nothing that changes reports."""
    reports = ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "OPDRIFT_DEBUG")
    kept = {name: value for name, value in os.environ.items() if name not in reports}
    sources = os.pathsep.join(str(ROOT / root) for root in ("tracer", "integrations"))
    return {**kept, "PYTHONPATH": sources, "PYTHONIOENCODING": "utf-8", **changes}


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python in a process of its own that finds opdrift in this checkout."""

    def run(
        *arguments: str, timeout: float = 60, cwd: Path | None = None, **changes: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, encoding="utf-8", cwd=cwd,
            timeout=timeout, env=environment(**changes), check=False,
        )  # fmt: skip

    return run


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with traces of one small model: base, same, weights, eps, math, nan."""
    folder = tmp_path_factory.mktemp("recorded")
    subprocess.run(
        [sys.executable, "-c", _RECORD, str(folder)], env=environment(), check=True, timeout=120
    )
    return folder


@pytest.fixture
def follow(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[str], dict[str, int]]:
    """Run a command line, and each command that it prints under "next:"; their exit statuses.

    What they write, they write into `tmp_path`.
    """

    def run(line: str) -> tuple[int, str]:
        from opdrift.commands import main

        command, *arguments = shlex.split(line)
        status = {"diff-trace": main.diff_trace, "opdrift": main.opdrift}[command](arguments)
        return status, capsys.readouterr().out

    def following(line: str) -> dict[str, int]:
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.chdir(tmp_path)
        _, out = run(line)
        after = out.partition("\nnext: ")[2]
        return {each.strip(): run(each.strip())[0] for each in after.splitlines()}

    return following


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's Chromium; without it, or without playwright to drive it, the test is skipped."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    # Debian's name of it, and what others call it
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("there is no chromium to open pages with")
    with sync_api.sync_playwright() as playwright:
        # root, as in a container, has no sandbox
        sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        launched = playwright.chromium.launch(
            executable_path=path, args=[*sandbox, "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield launched
        launched.close()
