"""Put the page together: one file that asks the network for nothing, and runs no script but its own.

The policy in the page's head names its scripts and styles by their hashes; all else is refused, so a name from
a trace could not act even if it came through unescaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

import numpy.typing as npt

from opdrift.render.html.markup import Element, element, shown, written

#: In the order in which they stand in the one script; they share a scope.
_SCRIPTS: Final = (
    "data.js", "filter.js", "list.js", "detail.js", "plot.js", "controls.js", "main.js",
)  # fmt: skip
_STYLES: Final = ("colours.css", "page.css", "ops.css")
_VENDORED: Final = "vendor/uplot"
#: zlib's level: 6 takes twice as long for a tenth less.
_LEVEL: Final = 4


def document(
    title: str,
    body: Element,
    *,
    folder: str,
    facts: Mapping[str, Any] | None,
    columns: Mapping[str, npt.NDArray[Any]],
) -> str:
    """The page as text.

    Args:
        title: Of the browser's window.
        body: All that stands on it.
        folder: As in `markup.written`.
        facts: What the list of ops needs besides its columns; None where there is no list.
        columns: The list's columns.
    """
    styles = "\n".join([_asset(f"{_VENDORED}/uPlot.min.css"), *map(_asset, _STYLES)])
    licence = _asset(f"{_VENDORED}/LICENSE")
    chart = f"/*! uPlot:\n{licence}*/\n{_asset(f'{_VENDORED}/uPlot.iife.min.js')}"
    script = "\n".join(['(() => {\n"use strict";', *map(_asset, _SCRIPTS), "})();"])
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(chart)} {_hash(script)}",
            f"style-src {_hash(styles)}",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    packed, layout = pack(columns)
    known = None if facts is None else {**facts, "columns": layout}
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        written(element("title", shown(title, folder))),
        f"<style>{styles}</style>",
    ]
    data = [
        f'<script type="application/json" id="facts">{embedded(known)}</script>',
        f'<script type="application/octet-stream" id="columns">{packed}</script>',
        f"<script>{chart}</script>",
        f"<script>{script}</script>",
    ]
    lines = ["<!doctype html>", '<html lang="en">', *head, written(body, folder), *data, "</html>"]
    return "\n".join(lines) + "\n"


def embedded(data: object) -> str:
    """JSON that can stand in a script element: no text in it can end that."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def pack(columns: Mapping[str, npt.NDArray[Any]]) -> tuple[str, Sequence[tuple[str, str, int]]]:
    """Columns as one compressed block in base64, and the name, type and length of each, in its order.

    The widest come first, so that each begins at a multiple of its width. Numbers are little-endian.
    """
    ordered = sorted(columns.items(), key=lambda item: -item[1].itemsize)
    compressor = zlib.compressobj(_LEVEL)
    parts = [compressor.compress(_bytes(column)) for _, column in ordered]
    parts.append(compressor.flush())
    layout = [(name, column.dtype.name, len(column)) for name, column in ordered]
    return base64.b64encode(b"".join(parts)).decode("ascii"), layout


def _bytes(column: npt.NDArray[Any]) -> bytes:
    return column.astype(column.dtype.newbyteorder("<"), copy=False).tobytes()


def _asset(path: str) -> str:
    folder = "" if path.startswith("vendor") else "assets/"
    return files("opdrift.render.html").joinpath(folder + path).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
