"""The pages "I came with this problem": their commands print what they show, and all ten are there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "problems"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.stem != "README")
#: What the output on such a page must hold.
ANSWERS = {
    "attention": "rounding only",
    "batch": "padding (likely)",
    "compile": "compile (certain)",
    "machine": "rounding only",
    "nan": "NaN first appears in the output of aten.div.Tensor",
    "port": "op-args (certain)",
    "precision": "rotary.inv_freq",
    "seeds": "rng (certain)",
    "sharded": "before the first op",
    "weights": "5 of 7 tensors of encoder.pt never reached the model",
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the pages with what their commands print now."""
    folder = tmp_path_factory.mktemp("problems")
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "_update_problems.py", "--into", folder],
        capture_output=True, text=True, timeout=400, check=False,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def outputs(page: Path) -> list[tuple[str, str]]:
    """Each command of a page with what stands below it."""
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    commands = [part for block in blocks for part in re.split(r"^\$ ", block, flags=re.M)[1:]]
    return [(command, output) for command, _, output in (c.partition("\n") for c in commands)]


def test_there_is_a_page_for_each_problem():
    """Ten pages, each with programs, and a row in the tables."""
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    first = (ROOT / "README.md").read_text(encoding="utf-8")

    assert [page.stem for page in PAGES] == sorted(ANSWERS)
    assert [p.stem for p in PAGES if not list((FOLDER / p.stem).glob("*.py"))] == []
    assert [p.stem for p in PAGES if f"({p.name})" not in table] == []
    assert [p.stem for p in PAGES if f"(docs/problems/{p.name})" not in first] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_print_what_it_shows(page: Path, replayed: Path):
    """But for what the CPU, an unseeded draw or the clock decides, which the script leaves as it is."""
    for shown, now in zip(outputs(page), outputs(replayed / page.name), strict=True):
        assert now == shown, "if what is printed now is right, run `make problems`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_the_answer_to_its_problem(page: Path):
    printed = " ".join(" ".join(output.split()) for _, output in outputs(page))

    assert ANSWERS[page.stem] in printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_says_how_to_read_it_what_to_do_and_what_cannot_be_seen(page: Path):
    headings = re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.M)

    assert headings == ["How to read it", "What to do", "What opdrift cannot see"]
