"""The HTML page in a real browser: nothing is fetched, nothing fails, and the list of ops does what it says."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

import opdrift
from opdrift.records import Alignment, Diagnosis, Sides, TraceSummary
from opdrift.render import html
from opdrift.testing import Builder
from opdrift.tracefile.opening import load

ROOT = Path(__file__).parents[2]

HOSTILE = "</script><img src=x onerror=alert(1)>\n\u202egro.live"


class Opened:
    """A page, with all that it asked for and complained of."""

    def __init__(self, browser, path, *, address="", width=1280, scheme="light"):
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, offline=True, color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda r: self.requests.append(r.url))
        self.page.on("console", lambda m: self.complaints.append(m.text))
        self.page.on("pageerror", lambda e: self.complaints.append(str(e)))
        self.page.on("dialog", lambda d: self.complaints.append(f"dialog: {d.message}"))
        self.page.goto(path.as_uri() + address)
        self.page.locator("html[data-ready]").wait_for()

    def chosen(self) -> str:
        """Number and op of the chosen row."""
        row = self.page.locator("#visible .row[aria-selected=true]")
        return " ".join(row.locator(".seq, .op").all_inner_texts()).strip()

    def shown(self) -> str:
        return self.page.locator("#count").inner_text()

    def number_of_rows(self) -> int:
        return self.page.locator("#visible .row").count()


def run(*, change="", ops=40):
    """Blocks of four ops each; from the fifth op on the runs differ. The last block has a hostile name."""
    build = Builder()
    x = build.leaf("x", kind="input", shape=(4, 8))
    for number in range(ops // 4):
        path = f"layers.{number}" if number < ops // 4 - 1 else HOSTILE
        with build.scope(path, type="Block"):
            x = build.op(
                "mm", x, build.leaf(f"{path}.weight"), change=change if number == 1 else ""
            )
            for name in ("relu", "sin", "cos"):
                x = build.op(name, x, source=(HOSTILE, number, "forward"))
    if change:
        x = build.op("_to_copy", x)
    build.output(x)
    return build.build()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    left, right = run(), run(change="*")
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html.render(opdrift.diff(left, right), Sides(left, right)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def opened(browser, report):
    """The page at 1280, light; each test leaves it as it likes."""
    return Opened(browser, report)


def test_the_page_asks_for_nothing_and_complains_of_nothing(browser, report):
    """With hostile names in modules, sources and weights, at both widths and in both themes."""
    for width in (1280, 400):
        for scheme in ("light", "dark"):
            page = Opened(browser, report, width=width, scheme=scheme)
            wide = page.page.evaluate("document.documentElement.scrollWidth")
            page.page.keyboard.press("End")

            assert page.requests == [report.as_uri()]
            assert page.complaints == []
            assert wide <= width
            assert page.page.locator("img").count() == 0
            page.context.close()


def test_the_list_opens_at_the_first_divergence(opened):
    """It is chosen, marked, and told in the details beside the list."""
    assert opened.chosen() == "5 5 first aten.mm"
    detail = opened.page.locator("#detail").inner_text()
    assert "x a difference begins here" in detail
    assert "layers.1.weight" in detail
    assert opened.page.locator("#plot canvas").count() == 1
    assert (
        opened.page.locator("#plot")
        .get_attribute("aria-label")
        .endswith("the table below tells the same")
    )


def test_the_plot_says_what_is_under_the_pointer_and_else_nothing(opened):
    page = opened.page
    legend = page.locator("#plot .u-legend")
    assert not legend.is_visible()

    page.locator("#plot .u-over").hover()
    legend.wait_for(state="visible")
    assert re.search(r"differs by:?\s*[0-9]", legend.inner_text())
    page.locator("#grid").hover()
    legend.wait_for(state="hidden")


def test_keys_move_through_the_list(opened):
    """j k n p f, Home and End; the row is announced by the grid, and the address follows."""
    page = opened.page
    page.locator("#grid").focus()
    steps = []
    for key in ("Home", "j", "j", "k", "n", "End", "p", "f", "PageDown"):
        page.keyboard.press(key)
        steps.append(opened.chosen().split(" aten")[0].replace(" first", ""))

    assert steps[:8] == ["1 1", "2 2", "3 3", "2 2", "5 5", "41", "5 5", "5 5"]
    assert int(steps[8].split()[0]) > 5
    active = page.locator("#grid").get_attribute("aria-activedescendant")
    assert page.locator(f"#{active}").get_attribute("aria-selected") == "true"
    page.keyboard.press("Home")
    assert page.evaluate("location.hash") == "#op-1"


def test_the_help_opens_and_takes_the_keys_with_it(opened):
    """While it is open, j moves nothing; Escape closes it."""
    page = opened.page
    page.keyboard.press("Home")
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("j")
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()
    page.locator("#help-button").click()
    page.locator("#help button").click()

    assert not page.locator("#help").is_visible()
    assert opened.chosen() == "1 1 aten.mm"
    assert opened.complaints == []


def test_enter_leads_to_the_details_and_tab_to_the_links_in_them(opened):
    """Without a mouse, the inputs of an op can be followed."""
    page = opened.page
    page.locator("#grid").focus()
    page.keyboard.press("f")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "detail"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")

    assert opened.chosen() == "4 4 aten.cos"


def test_the_filter_narrows_by_module_op_and_status(opened):
    """A part of a name or a pattern with *; Escape empties a field; a link to a hidden op shows all again."""
    page = opened.page
    page.keyboard.press("/")
    page.keyboard.type("layers.*")
    assert opened.shown() == "36 of 41 ops"
    page.locator("#op-filter").fill("MM")
    assert opened.shown() == "9 of 41 ops"
    page.locator(".mark-filter[value='=']").uncheck()
    assert opened.shown() == "8 of 41 ops"
    page.locator("#op-filter").focus()
    page.keyboard.press("Escape")
    assert page.locator("#op-filter").input_value() == ""
    assert opened.shown() == "32 of 41 ops"
    page.locator("#scope-filter").fill("nowhere")
    assert (opened.shown(), opened.number_of_rows()) == ("0 of 41 ops", 0)

    page.evaluate("location.hash = '#op-2'")
    page.locator("#visible .row[aria-selected=true]").wait_for()
    assert opened.chosen() == "2 2 aten.relu"
    assert opened.shown() == "41 ops"


def test_ops_that_ran_other_kernels_are_marked_and_can_be_filtered(browser, tmp_path):
    """An attention that another backend computed, as the op says; the product before it is the same."""

    def attention(backend):
        build = Builder(device="cuda:0")
        x = build.op("mm", build.leaf("x", kind="input", shape=(2, 4, 8, 8), dtype="float16"))
        build.output(build.op(f"_scaled_dot_product_{backend}_attention", x, x, x))
        return build.build()

    left, right = attention("flash"), attention("efficient")
    path = tmp_path / "report.html"
    path.write_text(html.render(opdrift.diff(left, right), Sides(left, right)), encoding="utf-8")
    opened = Opened(browser, path)
    opened.page.locator("#kernel-filter").check()

    assert opened.shown() == "2 of 3 ops"  # each is another op, which the other run does not have
    assert opened.page.locator("#visible .row .tag.kernel").count() == 2
    opened.page.locator("#visible .row").first.click()
    detail = opened.page.locator("#detail").inner_text()
    assert "FLASH_ATTENTION" in detail
    assert "EFFICIENT_ATTENTION" in detail
    opened.context.close()


def test_details_say_where_one_run_gave_no_argument(browser, tmp_path):
    """An op that only the right run gave an argument, which defaults to another."""

    def gelu(**settings):
        build = Builder()
        x = build.leaf("x", kind="input", shape=(4, 8))
        build.output(build.op("gelu", x, settings=settings, change="*" if settings else ""))
        return build.build()

    left, right = gelu(), gelu(approximate="tanh")
    path = tmp_path / "report.html"
    path.write_text(html.render(opdrift.diff(left, right), Sides(left, right)), encoding="utf-8")
    opened = Opened(browser, path)

    line = opened.page.locator("#detail tr", has_text="arguments")
    assert line.locator("td").all_inner_texts() == ["none given", "approximate=tanh"]
    opened.context.close()


def test_escape_does_to_the_filter_what_the_help_says(opened):
    """The first empties it, the next leaves it."""
    page = opened.page
    page.keyboard.press("/")
    page.keyboard.type("layers.1")
    page.keyboard.press("Escape")
    emptied = page.evaluate("[document.activeElement.tagName, document.activeElement.value]")
    page.keyboard.press("Escape")

    assert emptied == ["INPUT", ""]
    assert page.evaluate("document.activeElement.tagName") != "INPUT"
    said = page.locator("#help div", has_text="Esc").locator("dd").text_content()
    assert said == "empty the filter; once more leaves it"


def test_an_address_leads_to_its_op(browser, report):
    """Of the left run, or of the right one where only that has it; an unknown one is no trouble."""
    for address, wanted in (
        ("#op-7", "7 7 aten.sin"),
        ("#right-op-41", "41 aten._to_copy"),
        ("#op-999", "5 5 first aten.mm"),
    ):
        page = Opened(browser, report, address=address)
        assert page.chosen() == wanted
        assert page.complaints == []
        page.context.close()


def test_inputs_in_the_details_lead_to_the_op_that_made_them(opened):
    """A difference can be followed back by hand."""
    page = opened.page
    page.evaluate("location.hash = '#op-7'")
    page.locator("#detail a", has_text="op 6").first.click()

    assert opened.chosen() == "6 6 aten.relu"


def test_the_theme_is_the_systems_until_it_is_chosen(browser, report):
    """The button goes through system, light and dark; the plot is drawn anew."""
    page = Opened(browser, report, scheme="dark")
    paper = lambda: page.page.evaluate("getComputedStyle(document.body).backgroundColor")  # noqa: E731
    dark = paper()
    page.page.locator("#theme").click()
    light = paper()
    page.page.locator("#theme").click()

    assert light == "rgb(255, 255, 255)"
    assert paper() == dark != light
    assert page.page.locator("#plot canvas").count() == 1
    page.context.close()


def test_texts_keep_their_contrast(browser, report):
    """4.5 to 1 or more against what is behind them, in both themes (WCAG 2.1, 1.4.3)."""
    for scheme in ("light", "dark"):
        page = Opened(browser, report, scheme=scheme)
        low = page.page.evaluate(CONTRAST)
        assert low == []
        page.context.close()


#: Texts whose contrast with the nearest background is below 4.5, by WCAG's formula of relative luminance.
CONTRAST = """() => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const found = numbers(getComputedStyle(e).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const e of document.querySelectorAll("body *:not(script):not(canvas)")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !e.checkVisibility()) continue;
    const [a, b] = [light(numbers(getComputedStyle(e).color)), light(behind(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${e.tagName} ${e.className} ${e.textContent.slice(0, 20)} ${ratio.toFixed(2)}`);
  }
  return low;
}"""


def unjudged() -> Diagnosis:
    """No answer at all: comparing would take longer than all else here, and the list needs none."""
    side = TraceSummary("made-up.trace", "", "", "", "", "", 0, True, None, None)
    return Diagnosis(
        "identical", side, side, None, None, (), (), (), (), Sides((), ()), Alignment(0, 0, 0, "", None)
    )  # fmt: skip


def test_a_hundred_thousand_ops_are_a_list_of_few_rows(browser, tmp_path):
    """Whatever the length, the page holds the rows that are seen; filter, End and addresses reach all of them."""
    spec = importlib.util.spec_from_file_location(
        "benchmarks_diff", ROOT / "benchmarks" / "diff.py"
    )
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made  # dataclasses look their module up
    spec.loader.exec_module(made)
    left, right = made.case("every", 100_000)
    made.write(left, tmp_path / "left")
    made.write(right, tmp_path / "right")
    traces = Sides(load(tmp_path / "left"), load(tmp_path / "right"))
    path = tmp_path / "report.html"
    path.write_text(html.render(unjudged(), traces), encoding="utf-8")

    opened = Opened(browser, path)
    total = len(traces.right.ops)
    assert opened.shown() == f"{total:,} ops"
    opened.page.locator("#grid").focus()
    opened.page.keyboard.press("End")
    last = opened.chosen()
    assert f"{total:,} " in last
    assert opened.number_of_rows() < 100
    opened.page.locator("#scope-filter").fill("layers.3.*")
    assert opened.number_of_rows() < 100
    number = int(opened.shown().split()[0].replace(",", ""))
    assert 0.05 * total < number < 0.15 * total
    opened.page.evaluate("location.hash = '#op-54321'")
    opened.page.locator("#count", has_text=f"{total:,} ops").wait_for()
    assert opened.chosen().startswith("54,321 ")
    assert (opened.requests, opened.complaints) == ([path.as_uri()], [])
    opened.context.close()
