"""The documentation names what the code has, links lead somewhere, and its examples run."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from opdrift import errors, records
from opdrift.tracefile.schema import TABLES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


def section(page: Path, heading: str) -> str:
    """The part of a page under a heading, subsections included."""
    text = page.read_text(encoding="utf-8")
    found = re.search(
        rf"^(#+) {re.escape(heading)}$(.*?)(?=^\1 |\Z)", text, re.MULTILINE | re.DOTALL
    )
    assert found, f"{page.name} has no section {heading!r}"
    return found[2]


def rows(text: str) -> Iterator[list[str]]:
    """What stands in backticks in the first cell of each table row."""
    for line in text.splitlines():
        if line.startswith("| `"):
            yield re.findall(r"`([^`]+)`", line.split(" | ")[0])


def first_cells(text: str) -> list[str]:
    return [name for cell in rows(text) for name in cell]


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


# ---- messages ----------------------------------------------------------------------------------------


def test_every_error_has_a_row_with_meaning_and_remedy():
    known = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }

    assert set(first_cells(section(DOCS / "messages.md", "Errors"))) == known - {"OpdriftError"}


def warnings_in_code() -> set[str]:
    """The first words of what the recorder and the integrations warn of, up to what is filled in."""
    found = set()
    for folder in ("tracer/opdrift", "integrations/opdrift_integrations"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr == "warning"
                    and isinstance(node.args[0], ast.Constant)
                ):
                    found.add(re.split(r" ?%|:", node.args[0].value)[0])
    return found


def test_every_warning_has_a_row():
    told = first_cells(section(DOCS / "messages.md", "Warnings of the recorder"))

    assert len(warnings_in_code()) > 8
    assert [w for w in warnings_in_code() if not any(row.startswith(w) for row in told)] == []


def slugs_in_code() -> set[str]:
    """The slugs that anything in opdrift gives a Cause."""
    found = set()
    for path in (ROOT / "tracer" / "opdrift").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("Cause", "cause")
                and node.args
            ):
                slug = node.args[0]
                if isinstance(slug, ast.Constant) and isinstance(slug.value, str):
                    found.add(slug.value)
    return found


def test_every_cause_that_the_code_names_has_a_row():
    assert len(slugs_in_code()) > 15
    assert slugs_in_code() <= set(first_cells(section(DOCS / "messages.md", "Causes")))


def test_every_cause_that_the_code_names_has_a_page():
    pages = {path.stem for path in (DOCS / "causes").glob("*.md")} - {"README"}

    assert slugs_in_code() <= pages
    assert pages <= set(first_cells(section(DOCS / "messages.md", "Causes")))


# ---- trace format --------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES)
def test_every_field_of_a_table_is_explained(table: str):
    explained = first_cells(section(DOCS / "trace-format.md", table))

    assert [name for name in TABLES[table].names if name not in explained] == []


@pytest.mark.parametrize(
    ("file", "record"), [("header.json", records.Header), ("footer.json", records.Footer)]
)
def test_every_key_of_header_and_footer_is_explained(file: str, record: type):
    explained = first_cells(section(DOCS / "trace-format.md", file))

    assert set(explained) == {field.name for field in fields(record)} | {"crc"}  # type: ignore[arg-type]


def test_every_flag_of_an_op_is_explained_with_its_bit():
    table = {
        name: int(bit)
        for bit, name in re.findall(
            r"^\| (\d+) \| `([A-Z_]+)`", section(DOCS / "trace-format.md", "ops"), re.MULTILINE
        )
    }

    assert table == {
        name: value
        for name, value in vars(records).items()
        if name.isupper() and isinstance(value, int)
    }


def test_the_trace_can_be_read_as_the_format_says(tmp_path: Path):
    """The snippet of the page, with pyarrow alone, on a trace that was recorded."""
    import torch

    import opdrift

    with opdrift.record(tmp_path / "monday.trace"):
        torch.ones(2, 2).mm(torch.ones(2, 2))
    (snippet,) = code_blocks(DOCS / "trace-format.md", "python")

    done = subprocess.run(
        [sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["1", "aten.ones.default"],
        ["2", "aten.ones.default"],
        ["3", "aten.mm.default"],
    ]


# ---- all pages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]

    assert [t for t in targets if t and "://" not in t and not (page.parent / t).exists()] == []


@pytest.fixture(scope="module")
def site_settings() -> ModuleType:
    """docs/conf.py, as Sphinx runs it."""
    pytest.importorskip("sphinx")
    spec = importlib.util.spec_from_file_location("conf", DOCS / "conf.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("written", "fetches"),
    [
        ('<link rel="stylesheet" href="https://fonts.example/sans.css">', True),
        ('<script async src="//cdn.example/math.js"></script>', True),
        ("@font-face { src: url(http://fonts.example/sans.woff2) }", True),
        ('<a href="https://github.com/pytorch/pytorch">torch</a>', False),
        ('<img src="../_images/html-report.png">', False),
    ],
)
def test_a_site_that_asks_other_hosts_for_something_is_refused(
    site_settings: ModuleType, tmp_path: Path, written: str, fetches: bool
):
    """`make docs` fails where a page would not work offline; links that a reader clicks are fine."""
    (tmp_path / "README.html").write_text(written)
    app = SimpleNamespace(builder=SimpleNamespace(format="html"), outdir=tmp_path)

    if fetches:
        with pytest.raises(Exception, match=r"README\.html fetches .*example"):
            site_settings._finish(app, None)
    else:
        site_settings._finish(app, None)
        assert (tmp_path / "index.html").read_text() == written


def test_a_new_page_is_a_guide_by_itself(site_settings: ModuleType):
    """Whoever adds a page need not know the settings of the site."""
    listed = {
        page
        for name in ("_START", "_REFERENCE", "_INTERNALS")
        for page in vars(site_settings)[name]
    }

    assert {f"docs/{path.stem}" for path in DOCS.glob("*.md")} - listed == set(
        site_settings._guides()
    )


def test_every_make_target_that_a_page_names_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        name
        for page in PAGES
        for name in re.findall(r"(?:`|\$ )make ([a-z]+)", page.read_text(encoding="utf-8"))
    }

    assert {"demo", "test"} <= named
    assert named <= targets


def test_every_module_that_the_architecture_names_exists():
    named = set(re.findall(r"`([a-z_]+)/?`", section(ROOT / "ARCHITECTURE.md", "Layers")))
    package = ROOT / "tracer" / "opdrift"

    assert [
        name
        for name in sorted(named)
        if not (package / name).is_dir() and not (package / f"{name}.py").exists()
    ] == []


def test_changelog_entries_have_a_kind_and_one_sentence():
    kinds = {
        kind["directory"]
        for kind in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"][
            "type"
        ]
    }
    entries = list((ROOT / "changelog.d").glob("*.md"))

    assert entries
    assert {path.name for path in entries if path.suffixes[0].lstrip(".") not in kinds} == set()
    assert {path.name for path in entries if not path.read_text().rstrip().endswith(".")} == set()


def test_the_readmes_example_prints_what_it_says(tmp_path: Path):
    (example,) = code_blocks(ROOT / "README.md", "python")

    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == example.rstrip().rpartition("  # ")[2]


#: A program as the README's commands want it: with `--new`, something is wrong.
PREDICT = """
import sys
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8, eps=1e-2 if "--new" in sys.argv else 1e-5))
with torch.no_grad():
    print(model(torch.randn(2, 8)).sum().item())
"""


@pytest.mark.slow
def test_the_readmes_three_commands_lead_from_a_failing_run_to_the_page(tmp_path: Path):
    """Typed as they stand, with nothing but a program that runs."""
    block = section(ROOT / "README.md", "From a failing run to a page that explains it")
    commands = re.findall(r"^\$ (opdrift run .*|diff-trace .*)$", block, re.MULTILINE)
    (tmp_path / "predict.py").write_text(PREDICT)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

    done = [
        subprocess.run(
            shlex.split(command, comments=True), cwd=tmp_path, env={**os.environ, "PATH": path},
            capture_output=True, text=True, check=False, timeout=120,
        )
        for command in commands
    ]  # fmt: skip

    assert [each.returncode for each in done] == [0, 0, 1]
    assert done[-1].stdout.startswith("diverged: at op")
    assert "eps: 1e-05 against 0.01" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_test_that_contributing_shows_passes():
    test = code_blocks(ROOT / "CONTRIBUTING.md", "python")[1]
    setting = (
        "import opdrift\nfrom opdrift.records import Sides\nfrom opdrift.testing import trace\n"
    )
    name = re.findall(r"def (test_\w+)", test)[0]

    subprocess.run(
        [sys.executable, "-c", f"{setting}{test}\n{name}()"],
        capture_output=True,
        text=True,
        check=True,
    )


def test_the_exporter_of_the_page_works(tmp_path: Path):
    """The class and its test, as docs/export.md shows them."""
    text = section(DOCS / "export.md", "An exporter of your own")
    program = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))

    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60)
