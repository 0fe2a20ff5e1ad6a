"""How numbers, names and counts are written, the same in every report."""

from __future__ import annotations

import glob
import math
import os
import re
import shlex
import unicodedata
from datetime import datetime, timedelta
from typing import Final

#: Longer names are cut in the middle: both ends of a module path or a C++ kernel name tell most.
NAME_LIMIT: Final = 160
_PACKAGES: Final = f"{os.sep}site-packages{os.sep}"
_INSTALLED: Final = re.compile(
    rf"(?<![^\s(\"'`])[^\s(\"'`]*{re.escape(_PACKAGES)}"  # a backtick before it opens a code span
)
#: Unicode categories that can move the cursor, hide text or break a line: controls, formats (bidi
#: overrides, zero-width), surrogates, private use, unassigned, line and paragraph separators.
_UNPRINTABLE: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
#: What no command line can hold; in a pattern, any character stands for it.
_UNTYPEABLE: Final = re.compile("[\0\ud800-\udfff]")


def readable(text: str, *, limit: int | None = None) -> str:
    r"""Escape what a terminal would act on (`\n`, `\x1b`, bidi overrides) and cut what is huge.

    Args:
        text: Any name or sentence that may come from the traced program.
        limit: Longest result in characters; None keeps everything.
    """
    if limit is not None and len(text) > limit:
        head = (limit - 3) // 2
        text = f"{text[:head]}...{text[len(text) - (limit - 3 - head) :]}"
    if text.isprintable():  # the common case, in C
        return text
    return "".join(c if unicodedata.category(c) not in _UNPRINTABLE else _escape(c) for c in text)


def _escape(character: str) -> str:
    short = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(character)
    if short is not None:
        return short
    point = ord(character)
    return (
        f"\\x{point:02x}"
        if point < 256
        else f"\\u{point:04x}"
        if point < 65536
        else f"\\U{point:08x}"
    )


def relative(text: str, folder: str) -> str:
    """The same text with paths written shorter: from `folder`, or from where packages are installed.

    A path of an installed package begins with its name, as an import does; "" as folder leaves the rest.
    """
    if _PACKAGES in text:
        text = _INSTALLED.sub("", text)
    if not folder or folder == os.sep or folder not in text:
        return text
    return re.sub(rf"(?<![\w./-]){re.escape(folder)}{re.escape(os.sep)}", "", text)


def name(text: str) -> str:
    """A module, leaf, op or kernel name as it is shown: escaped, and cut if it is huge."""
    return readable(text, limit=NAME_LIMIT)


def pattern_of(text: str) -> str:
    """The glob that matches a name, as `--leaf` and `--scope` take it."""
    return _UNTYPEABLE.sub("?", glob.escape(text))


def typed(text: str) -> str:
    r"""An argument of a command as a shell takes it; of what `readable` escapes, bash's `$'new\nline'`."""
    if readable(text) == text:
        return shlex.quote(text)
    return f"$'{''.join(map(_typed, text))}'"


def _typed(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if unicodedata.category(character) not in _UNPRINTABLE:
        return character
    # its bytes: what \u means to bash depends on the locale
    short = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(character)
    return short or "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))


def scope(path: str) -> str:
    """A module path; the root module, whose path is empty, gets a word, and so does a mere number."""
    return (f"module {path}" if path.isdecimal() else name(path)) if path else "the root module"


def cell(path: str) -> str:
    """A module path in a table."""
    return name(path) if path else "(root)"


def count(number: int) -> str:
    """41370 -> "41,370"."""
    return f"{number:,}"


def ordinal(number: int) -> str:
    """Which one, counted from 0: 0 -> "1st", 1 -> "2nd", 11 -> "12th"."""
    place = number + 1
    teens = 11 <= place % 100 <= 13
    return f"{count(place)}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(place % 10, 'th')}"


def plural(number: int, noun: str) -> str:
    """1, "op" -> "1 op"; 2, "op" -> "2 ops"."""
    return f"{count(number)} {noun}" if number == 1 else f"{count(number)} {noun}s"


def size(number: float) -> str:
    """A difference in as few characters as keep two or three digits: 0.35, 1.4, 2.6e-7, inf."""
    if not math.isfinite(number):
        return "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"
    if number == 0:
        return "0"
    if 0.01 <= abs(number) < 1000:
        return f"{number:.2g}" if abs(number) < 10 else f"{number:.3g}"
    mantissa, exponent = f"{number:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def ratio(number: float) -> str:
    """How many times larger: "12x", "3,000x", "2.1e9x"."""
    if not math.isfinite(number) or number >= 1e6:
        return f"{size(number)}x"
    return f"{number:,.0f}x" if number >= 10 else f"{number:.1f}x"


def moment(text: str) -> str:
    """A time as people write it: 2026-03-02 09:00:00 UTC; what is no ISO time stays as it is."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return name(text)
    zone = " UTC" if found.utcoffset() == timedelta() else found.strftime("%z")
    return f"{found:%Y-%m-%d %H:%M:%S}{zone}"


def side(value: object) -> str:
    """One side of a fact that differs; a missing one is said to be missing."""
    return "(none)" if value is None else readable(str(value), limit=NAME_LIMIT)
