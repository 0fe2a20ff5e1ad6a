"""How `make docs` builds the site: all pages of the repository, with README.md as the first one.

The pages are plain Markdown, read as they are on the host of the repository as well, so what only the site
needs is added here when it is built: the tables of contents. The source folder is the repository's root;
links between pages of docs/ and those beside them lead somewhere on both.
"""

from __future__ import annotations

import re
import shutil
from importlib import metadata
from pathlib import Path
from typing import Final

from sphinx.application import Sphinx
from sphinx.errors import SphinxError

ROOT: Final = Path(__file__).parent.parent

# ---- settings, as Sphinx reads them --------------------------------------------------------------------

project = "opdrift"
author = "The opdrift developers"
project_copyright = "The opdrift developers, BSD-3-Clause"
release = metadata.version("opdrift")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "README"
source_suffix = {".md": "markdown"}
include_patterns = ["*.md", "docs/**", "examples/README.md"]
# Left out by folder, so that Sphinx does not look into them: an environment holds thousands of files.
exclude_patterns = [
    ".*", "**/.*", "benchmarks", "build", "changelog.d", "dist", "integrations", "tests", "tracer",
]  # fmt: skip

myst_heading_anchors = 4
nitpicky = True
# Names of other projects have no page here, nor has a type variable; ours must lead somewhere.
nitpick_ignore_regex = [("py:.*", r"(?!opdrift).*|opdrift\.records\.T")]

default_role = "literal"  # a backtick in our docstrings is Markdown's
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80

html_theme = "furo"
html_title = "opdrift"
html_static_path = ["_site"]
html_css_files = ["wide.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
# What is copied from a console block are its commands, without the prompt and the output.
copybutton_prompt_text = "$ "

# ---- tables of contents --------------------------------------------------------------------------------

_START: Final = ["Overview <self>", "docs/use", "examples/README"]
_REFERENCE: Final = [
    "docs/api", "docs/messages", "docs/causes/README", "docs/html-report", "docs/trace-format",
    "docs/otel-attributes",
]  # fmt: skip
_INTERNALS: Final = [
    "ARCHITECTURE", "CONTRIBUTING", "docs/tricky-cases", "docs/fingerprint", "docs/quality",
    "docs/decisions/README", "CHANGELOG",
]  # fmt: skip
#: Pages whose own folder makes up their table of contents.
_FOLDERS: Final = ["docs/problems/README", "docs/causes/README", "docs/decisions/README"]


def _guides() -> list[str]:
    """The pages of docs/ that no other part takes, the ones for a first reading first."""
    first = ["docs/sharding", "docs/checkpoints", "docs/compile", "docs/kernels"]
    last = ["docs/testing", "docs/gallery"]
    pages = sorted(f"docs/{path.stem}" for path in (ROOT / "docs").glob("*.md"))
    taken = {*first, *last, *_START, *_REFERENCE, *_INTERNALS}
    return [*first, *(page for page in pages if page not in taken), *last]


def _contents(caption: str, pages: list[str]) -> str:
    lines = "\n".join(page if page.endswith("<self>") else f"/{page}" for page in pages)
    return f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n:maxdepth: 1\n\n{lines}\n```\n"


def _add_contents(app: Sphinx, page: str, text: list[str]) -> None:
    """Give a page the table of contents that it has on the site only."""
    if page == root_doc:
        text[0] += _contents("Start", _START)
        text[0] += _contents("Problems", ["docs/problems/README"])
        text[0] += _contents("Guides", _guides())
        text[0] += _contents("Reference", _REFERENCE)
        text[0] += _contents("Internals", _INTERNALS)
    elif page in _FOLDERS:
        folder = (ROOT / page).parent
        below = sorted(path for path in folder.glob("*.md") if path.stem != "README")
        pages = [path.relative_to(ROOT).with_suffix("").as_posix() for path in below]
        text[0] += _contents("", pages).replace(":caption: \n", "")


# ---- docstrings ----------------------------------------------------------------------------------------

_SECTION: Final = re.compile(r"(Args|Returns|Raises|Yields|Attributes|Note|Example):$")


def _mark_code(
    app: Sphinx, what: str, name: str, subject: object, options: object, lines: list[str]
) -> None:
    """Show what a docstring indents as code, as Markdown does; sections of arguments are napoleon's."""
    marked: list[str] = []
    before, section = "", False
    for line in lines:
        if line and not line.startswith(" "):
            section = bool(_SECTION.match(line))
        if line.startswith("    ") and not before and not section and not _indented(marked):
            marked += ["::", ""]
        marked.append(line)
        before = line
    lines[:] = marked


def _indented(lines: list[str]) -> bool:
    """Whether the last line that is not empty is indented."""
    return next((line for line in reversed(lines) if line), "").startswith(" ")


# ---- what the finished site must be ----------------------------------------------------------------------

#: What a browser fetches by itself when it shows a page.
_FETCHED: Final = re.compile(
    r"""<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)="((?:https?:)?//[^"]+)"|"""
    r"""(?:@import|url\()\s*["']?((?:https?:)?//[^"')]+)"""
)


def _finish(app: Sphinx, failure: Exception | None) -> None:
    """Make the first page answer as index.html too, and refuse a site that would ask others for something."""
    if failure is not None or app.builder.format != "html":
        return
    built = Path(app.outdir)
    shutil.copyfile(built / f"{root_doc}.html", built / "index.html")
    for path in sorted([*built.rglob("*.html"), *built.rglob("*.css")]):
        for match in _FETCHED.finditer(path.read_text(encoding="utf-8")):
            address = match[1] or match[2]
            raise SphinxError(
                f"{path.relative_to(built)} fetches {address}; the site is to work offline"
            )


def setup(app: Sphinx) -> None:
    """Register what this file adds."""
    app.connect("source-read", _add_contents)
    app.connect("autodoc-process-docstring", _mark_code, priority=400)  # before napoleon
    app.connect("build-finished", _finish)
