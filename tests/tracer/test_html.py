"""The HTML page without a browser: what is on it, that nothing acts in it, and that the columns say what the traces hold."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import tomllib
import zlib
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

import opdrift
from opdrift.commands.main import diff_trace
from opdrift.records import Alignment, Diagnosis, Pick, Sides, TraceSummary
from opdrift.render import card, html
from opdrift.render.html import leaves, ops, picked
from opdrift.render.html.document import embedded, pack
from opdrift.render.html.markup import element, prose, written
from opdrift.render.rows import rows_of
from opdrift.testing import Builder, trace
from opdrift.tracefile.schema import checksum

#: Markup, an end of the script that holds the data, a line break, and characters that turn the line around.
HOSTILE = "</script><img src=x onerror=alert(1)>\n\u202egro.live\u202c'\"&"


class Page(HTMLParser):
    """What a parser finds: elements with attributes, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.plain: list[str] = []
        self.text: list[str] = []
        self._inside: tuple[str, str] | None = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = tag, dict(attrs).get("id") or tag

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._inside = None

    def handle_data(self, data):
        if self._inside is None:
            self.text.append(data)
        elif self._inside[1] in ("facts", "columns"):
            self.scripts[self._inside[1]] = data
        else:
            self.plain.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    def columns(self) -> tuple[dict, dict[str, np.ndarray]]:
        """The facts and the columns as the page's script reads them."""
        facts = json.loads(self.scripts["facts"])
        data = zlib.decompress(base64.b64decode(self.scripts["columns"]))
        found, offset = {}, 0
        for name, kind, length in facts["columns"]:
            found[name] = np.frombuffer(data, f"<{np.dtype(kind).str[1:]}", length, offset)
            offset += found[name].nbytes
        assert offset == len(data)
        return facts, found


def page_of(left, right, **options) -> Page:
    return Page(html.render(opdrift.diff(left, right), Sides(left, right), **options))


def model(*, change="", cast=False, path="layers"):
    """Two blocks with a norm and a product, and a head; the second norm is where it begins."""
    build = Builder()
    x = build.leaf("ids", kind="input")
    for layer in range(2):
        with build.scope(f"{path}.{layer}", type="Block"):
            x = build.op("native_layer_norm", x, change=change if layer == 1 else "")
            x = build.op("addmm", build.leaf(f"{path}.{layer}.fc.weight"), x)
            if cast and layer == 1:
                x = build.op("_to_copy", x)
    with build.scope("head", type="Linear"):
        x = build.op("addmm", build.leaf("head.weight"), x)
    build.output(x)
    return build.build()


@pytest.fixture(scope="module")
def differing():
    return page_of(model(), model(change="*", cast=True))


# ---- what is on it -------------------------------------------------------------------------------------


def test_the_page_opens_with_the_words_of_the_terminal(differing):
    """Headline, cause, evidence and remedy are those of the card."""
    found = opdrift.diff(model(), model(change="*", cast=True))
    shown = card.focus(found)
    assert shown is not None

    assert differing.words.index(card.headline(found)) < differing.words.index("cause")
    for field in card.card(shown, module_type="Block"):
        for line in field.lines:
            assert " ".join(line.removeprefix("- ").replace("`", "").split()) in differing.words


def test_parts_are_landmarks_and_the_contents_lead_to_them(differing):
    """Every link within the page has a target, and every part a heading that names it."""
    ids = {a["id"] for _, a in differing.elements if "id" in a}
    links = {a["href"] for tag, a in differing.elements if tag == "a"}
    sections = [a for tag, a in differing.elements if tag == "section"]

    assert {"#answer", "#growth", "#ops", "#parameters", "#unpaired", "#runs"} <= links
    assert {link[1:] for link in links if not re.search(r"op-\d+$", link)} <= ids
    assert all(a["aria-labelledby"] in ids for a in sections)
    assert {"header", "nav", "main", "aside"} <= {tag for tag, _ in differing.elements}


def test_an_identical_pair_says_so_and_lists_its_ops():
    """No growth, no origins; the list is there."""
    page = page_of(trace("mm relu mm"), trace("mm relu mm"))
    facts, columns = page.columns()

    assert "identical: 3 ops paired" in page.words
    assert "#growth" not in {a.get("href") for _, a in page.elements}
    assert (facts["rows"], facts["focus"], columns["mark"].tolist()) == (3, None, [0, 0, 0])
    assert "computed something else" not in page.words


def test_draws_that_reach_no_result_are_explained_on_the_page_of_identical_runs():
    """A reader sees ops that differ below the word identical."""

    def unused(seed):
        build = Builder()
        x = build.leaf("x", kind="input")
        build.op("normal_", build.op("empty"), rng=seed)
        build.output(build.op("relu", x))
        return build.build()

    page = page_of(unused(1), unused(2))

    assert "identical" in page.words
    assert (
        "1 op computed something else in the other run (marked ~), and nothing of it reaches a result"
        in page.words
    )


def test_logs_of_other_tools_have_a_page_without_a_list():
    """They hold no ops; the answer and the environment are there, and no link leads to a list."""
    side = TraceSummary("a.log", "", "", "", "", "", 2, True, None, None)
    found = Diagnosis(
        "identical", side, side, None, None, (), (), (), (), Sides((), ()), Alignment(2, 0, 0, "", None), exact=False
    )  # fmt: skip
    page = Page(html.render(found, None))

    assert "no difference seen: 2 ops paired" in page.words
    assert "Logs of other tools hold no list of ops" in page.words
    assert json.loads(page.scripts["facts"]) is None


# ---- nothing acts in it ----------------------------------------------------------------------------------


def hostile_page() -> Page:
    def run(change):
        build = Builder(label=HOSTILE)
        x = build.leaf(HOSTILE, kind="input")
        with build.scope(f"a.{HOSTILE}", type=HOSTILE):
            x = build.op(
                "mm", x, change=change, source=(HOSTILE, 3, HOSTILE), settings={HOSTILE: HOSTILE}
            )
        build.output(x, name=HOSTILE)
        return build.build(HOSTILE)

    return page_of(run(""), run("*"))


def test_hostile_names_stay_texts():
    """They open no element, end no script, break no line and turn no line around."""
    page, plain = hostile_page(), page_of(trace("mm"), trace("mm*"))

    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in plain.elements} | {
        "ul",
        "li",
        "code",
    }
    assert all(not name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert not set("\u202e\u202c") & set("".join(page.text) + page.scripts["facts"])
    assert "onerror=alert(1)>\\n\\u202egro.live" in page.words
    assert any("onerror" in text for text in json.loads(page.scripts["facts"])["strings"])


def test_json_in_a_script_cannot_end_it():
    """Whatever a text holds, the element's end is not in it."""
    data = {"<!--": ["</script>", "a & b", "\u2028"]}

    assert not set("<>&\u2028") & set(embedded(data))
    assert json.loads(embedded(data)) == data


def test_the_policy_names_exactly_the_scripts_and_styles_of_the_page(differing):
    """All else is refused: no address, no handler, no style in an attribute."""
    policy = next(a["content"] for tag, a in differing.elements if a.get("http-equiv"))
    assert policy is not None
    named = set(re.findall(r"'sha256-([^']+)'", policy))
    found = {
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in differing.plain
    }

    assert named == found
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    for tag, attributes in differing.elements:
        assert "style" not in attributes, tag
        assert "src" not in attributes, tag
        assert attributes.get("href", "#").startswith("#")


def test_the_plotting_library_is_the_one_that_was_vendored_and_brings_its_licence(differing):
    """Its files have the sums that are written beside them; the page carries licence and banner."""
    folder = files("opdrift.render.html") / "vendor/uplot"
    vendored = tomllib.loads((folder / "VENDOR.toml").read_text(encoding="utf-8"))
    sums = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in vendored["sha256"]
    }

    assert sums == vendored["sha256"]
    assert len(sums) == 3
    chart = next(
        text for text in differing.plain if "uPlot.iife" in text or "leeoniya/uPlot" in text
    )
    assert "The MIT License (MIT)" in chart


def test_markup_escapes_once_and_leaves_out_what_is_none():
    """The one place where HTML is written."""
    node = element(
        "p", "a < b", None, element("b", "&"), class_="x y", title='"', hidden=False, open=True
    )

    assert written(node) == '<p class="x y" title="&quot;" open>a &lt; b<b>&amp;</b></p>'
    assert (
        written(element("p", *prose("call `f(<x>)` now")))
        == "<p>call <code>f(&lt;x&gt;)</code> now</p>"
    )
    assert prose("an odd ` backtick") == ["an odd ` backtick"]
    assert written("/here/run.py:3 and /there/run.py", "/here") == "run.py:3 and /there/run.py"


# ---- the list of ops -------------------------------------------------------------------------------------


def test_rows_ops_and_inputs_come_back_from_the_packed_columns(differing):
    """Added up, the steps are the ops; texts are found by number; inputs lead to the ops that made them."""
    facts, columns = differing.columns()
    strings, right = facts["strings"], facts["right"]
    names = [strings[right["names"][s]] for s in columns["right.signature"]]
    modules = [strings[right["paths"][p]] for p in columns["right.path"]]

    assert "".join(facts["marks"][m][0] for m in columns["mark"]) == "==x~+~"
    assert columns["lone"].tolist() == [0, 0, 0, 0, 2, 0]
    assert np.cumsum(columns["left"]).tolist() == [0, 1, 2, 3, 3, 4]
    assert np.cumsum(columns["right"]).tolist() == [0, 1, 2, 3, 4, 5]
    assert np.cumsum(columns["right.seq"]).tolist() == [1, 2, 3, 4, 5, 6]
    assert names[3:] == ["aten.addmm.default", "aten._to_copy.default", "aten.addmm.default"]
    assert modules == ["layers.0", "layers.0", "layers.1", "layers.1", "layers.1", "head"]
    assert columns["right.inputs"].tolist() == [1, 2, 1, 2, 1, 2]
    made = columns["right.from"].tolist()
    assert [strings[-m] if m < 0 else m for m in made] == [
        "ids", "layers.0.fc.weight", 1, 1, "layers.1.fc.weight", 1, 1, "head.weight", 1,
    ]  # fmt: skip
    assert facts["focus"] == 2
    assert facts["lines"] == [{"row": 2, "says": "first divergence", "material": True}]


def test_packed_columns_begin_at_multiples_of_their_width():
    """A typed array cannot begin elsewhere."""
    columns = {
        "a": np.arange(3, dtype=np.uint8),
        "b": np.arange(5, dtype=np.float32),
        "c": np.arange(7, dtype=np.uint16),
    }
    _, layout = pack(columns)

    offset = 0
    for _, kind, length in layout:
        assert offset % np.dtype(kind).itemsize == 0
        offset += length * np.dtype(kind).itemsize


def test_of_many_ops_some_are_measured_and_the_page_says_how_many(monkeypatch):
    """An even choice, and all around what counts."""
    monkeypatch.setattr(ops, "_MEASURED", 10)
    monkeypatch.setattr(ops, "_AROUND", 2)
    left, right = trace("mm" + " mm" * 99), trace("mm mm mm mm*" + " mm*" * 96)
    page = page_of(left, right)
    facts, columns = page.columns()

    known = np.flatnonzero(~np.isnan(columns["size"]))
    assert facts["focus"] == 3
    assert {3, 4, 5} <= set(known.tolist())
    assert 10 <= len(known) <= 20
    assert f"{len(known)} of 97 were measured" in page.words


def test_differences_beyond_all_bounds_have_a_page():
    """Zeros on the left, sizes that float32 does not hold, and NaN: none of it is a number that JSON lacks."""

    def run(first, second):
        build = Builder()
        x = build.leaf("x", kind="input")
        for number, content in enumerate((first, second)):
            x = build.op("mm", x, content=np.full((4, 8), content, np.float64), dtype="float64")
            build.output(x, name=f"output.{number}")
        return build.build()

    for left, right in (((0.0, 1.0), (1.0, 1e150)), ((1.0, 1.0), (1.0 + 2.0**-52, np.nan))):
        facts, columns = page_of(run(*left), run(*right)).columns()

        assert facts["rows"] == 2
        assert columns["size"].dtype == np.float64
    assert np.isinf(page_of(run(0.0, 1.0), run(1.0, 1e150)).columns()[1]["size"][0])


# ---- leaves and kernels ------------------------------------------------------------------------------------


def leaf_status(left, right, maps=()):
    found = rows_of(left, right, opdrift.diff(left, right, maps=maps), maps=maps)
    return {row.name: row.status for row in leaves.leaf_rows(found.compared, maps)}


def with_leaves(*, weight="a", when="entry", extra=False, name="fc.weight"):
    build = Builder()
    x = build.leaf("x", kind="input")
    w = build.leaf(name, content=weight, when=when)
    if extra:
        build.leaf("fc.bias")
    build.output(build.op("mm", x, w))
    return build.build()


def test_leaves_are_equal_or_differ_or_are_of_one_run():
    """By content, whatever moment each run saw them at first."""
    assert leaf_status(with_leaves(), with_leaves(when="gather")) == {
        "x": "equal", "fc.weight": "equal", "output": "equal",
    }  # fmt: skip
    assert leaf_status(with_leaves(), with_leaves(weight="b", extra=True)) == {
        "x": "equal", "fc.weight": "differs", "output": "differs", "fc.bias": "right only",
    }  # fmt: skip


def test_a_weight_that_differs_is_told_with_its_history_and_one_that_agrees_without(monkeypatch):
    """Where it came from, what it held when, and what became of it on each side; of so many as are told at all."""

    def run(fill):
        build = Builder()
        x = build.leaf("x", kind="input")
        w = build.op("fill_", build.op("empty"), content=np.full((4, 8), fill, np.float32))
        build.name(w, "fc.weight")
        build.name(build.leaf("kept"), "norm.weight")
        build.output(build.op("mm", x, w))
        return build.build()

    page = page_of(run(1.0), run(2.0))
    labels = [a["aria-label"] for _, a in page.elements if "aria-label" in a]

    assert "fc.weight parameter differs" in page.words
    assert "filled by aten.fill_.default (op 2)" in page.words
    assert labels.count("content of fc.weight over time") == 1
    assert [label for label in labels if label and label.startswith("what became of")] == [
        "what became of fc.weight in the left run",
        "what became of fc.weight in the right run",
    ]
    monkeypatch.setattr(leaves, "_LISTED", 1)
    assert (
        "and 4 more; opdrift show TRACE --leaf GLOB tells of each"
        in page_of(run(1.0), run(2.0)).words
    )


def test_renamed_leaves_are_one_row():
    """As the modules were mapped."""

    def run(name):
        build = Builder()
        x = build.leaf("x", kind="input")
        with build.scope(name):
            x = build.op("mm", x, build.leaf(f"{name}.weight", content="same"))
        build.output(x)
        return build.build()

    assert leaf_status(run("old"), run("new"), maps=[("old", "new")])["old.weight"] == "equal"


def layers(*names):
    """Three layers of these ops."""
    build = Builder()
    x = build.leaf("x", kind="input")
    for layer in range(3):
        with build.scope(f"layers.{layer}"):
            for name in names:
                x = build.op(name, x)
    build.output(x)
    return build.build()


def groups(left, right, picks):
    """(module, times, left title, right title) of each line of the kernels."""
    found = rows_of(left, right, opdrift.diff(left, right))
    return [
        (
            g.module,
            g.times,
            *(picked.title(p) if p else None for p in (g.picks.left, g.picks.right)),
        )
        for g in picked.groups_of(found, picks)
    ]


FLASH, MATH, GEMM, GEMV = (
    Pick(f"{n} kernel", "ATen", n) for n in ("FLASH", "MATH", "GEMM", "GEMV")
)


def test_the_same_kernels_in_layers_of_a_kind_are_one_line():
    """Where the runs differ comes first; numbers in paths are left open where there are several."""
    run = layers("mm", "sin")
    picks = Sides(dict.fromkeys((0, 2, 4), GEMM), {0: GEMM, 2: GEMV, 4: GEMM})

    assert groups(run, layers("mm", "sin"), picks) == [
        ("layers.1", 1, "GEMM [ATen]", "GEMV [ATen]"),
        ("layers.*", 2, "GEMM [ATen]", "GEMM [ATen]"),
    ]


def test_what_is_one_op_in_one_run_and_several_in_the_other_stands_side_by_side():
    """One pick on each side of a module, of ops without a counterpart; more on one side are not put together."""
    left, right = layers("mm", "flash"), layers("mm", "bmm", "exp", "bmm")
    flash = dict.fromkeys((1, 3, 5), FLASH)

    assert groups(left, right, Sides(flash, dict.fromkeys((1, 5, 9), MATH))) == [
        ("layers.*", 3, "FLASH [ATen]", "MATH [ATen]"),
    ]
    assert groups(
        left, right, Sides(flash, {1: MATH, 3: MATH, 5: MATH, 7: MATH, 9: MATH, 11: MATH})
    ) == [
        ("layers.*", 3, "FLASH [ATen]", None),
        ("layers.*", 6, None, "MATH [ATen]"),
    ]


# ---- the command ---------------------------------------------------------------------------------------


def test_a_page_needs_a_file(recorded, capsys):
    """A terminal is no place for it: one sentence with what to type, before any work is done."""
    given = [str(recorded / "base.trace"), str(recorded / "eps.trace"), "--format", "html"]

    assert diff_trace(given) == 2
    assert diff_trace([*given, "-q"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("name its file with -o, such as -o report.html") == err.count("\n") == 2


@pytest.mark.parametrize(
    ("right", "options", "status"),
    [("same", (), 0), ("eps", (), 1), ("math", ("--fail-on", "diverged"), 0), ("eps", ("-q",), 1)],
)
def test_the_page_is_written_and_the_verdict_printed(
    right, options, status, recorded, tmp_path, monkeypatch, capsys
):
    """Exit statuses are those of the other formats; nothing else is left in the folder."""
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "report.html"
    target.write_text("an older report")
    given = [str(recorded / "base.trace"), str(recorded / f"{right}.trace")]

    assert diff_trace([*given, "--format", "html", "-o", "report.html", *options]) == status
    out, err = capsys.readouterr()
    assert (out.count("\n"), err) == (1, "")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    page = Page(target.read_text(encoding="utf-8"))
    assert out.strip() in page.words
    facts, columns = page.columns()
    assert len(columns["mark"]) == facts["rows"] > 30


def test_an_interrupted_page_leaves_the_older_one(recorded, tmp_path, monkeypatch, capsys):
    """Ctrl-C while it is written: no part of it stays, and what was there is whole."""

    def interrupted(self, target):
        raise KeyboardInterrupt

    target = tmp_path / "report.html"
    target.write_text("an older report")
    monkeypatch.setattr("pathlib.Path.replace", interrupted)
    given = [str(recorded / "base.trace"), str(recorded / "same.trace")]

    assert diff_trace([*given, "--format", "html", "-o", str(target)]) == 130
    assert target.read_text() == "an older report"
    assert list(tmp_path.iterdir()) == [target]
    assert capsys.readouterr().out == ""


def as_rank(source: Path, folder: Path, rank: int) -> None:
    """A trace again, as one of two ranks."""
    shutil.copytree(source, folder)
    header = json.loads((folder / "header.json").read_text())
    del header["crc"]
    header |= {"rank": rank, "world_size": 2}
    (folder / "header.json").write_text(json.dumps({**header, "crc": checksum(header)}))


def test_ranks_have_their_cards_and_the_rest_is_of_one_of_them(
    recorded, tmp_path, monkeypatch, capsys
):
    """Rank 1 differs, so its ops are listed; rank 0 is told in a line."""
    monkeypatch.chdir(tmp_path)
    for side, sources in (("left", ("base", "base")), ("right", ("same", "eps"))):
        for rank, source in enumerate(sources):
            folder = tmp_path / f"{side}.trace" / f"rank-0000{rank}"
            as_rank(recorded / f"{source}.trace", folder, rank)

    assert diff_trace(["left.trace", "right.trace", "--format", "html", "-o", "page.html"]) == 1
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "rank 0 : identical" in page.words  # the rank is an element of its own
    assert "What stands below is of rank 1; --rank N makes the page of another." in page.words
    assert page.columns()[0]["focus"] is not None


def test_one_process_against_ranks_says_of_which_rank_the_page_is(
    recorded, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for rank, source in enumerate(("same", "eps")):
        as_rank(recorded / f"{source}.trace", tmp_path / "two.trace" / f"rank-0000{rank}", rank)
    one = str(recorded / "base.trace")

    for given in ([one, "two.trace"], ["two.trace", one]):
        assert diff_trace([*given, "--format", "html", "-o", "page.html"]) == 1
        page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
        assert "What stands below is of rank 1; --rank N makes the page of another." in page.words
        (tmp_path / "page.html").unlink()


def test_what_is_shared_names_no_folder_of_this_machine(recorded, tmp_path, monkeypatch, capsys):
    """Paths below the reader's folder are relative to it, in texts and in the packed data."""
    monkeypatch.chdir(recorded)
    target = tmp_path / "page.html"

    assert (
        diff_trace(
            ["base.trace", str(recorded / "eps.trace"), "--format", "html", "-o", str(target)]
        )
        == 1
    )
    page = Page(target.read_text(encoding="utf-8"))
    assert "against eps.trace (right)" in page.words
    assert str(recorded) not in page.words
    assert str(recorded) not in page.scripts["facts"]
