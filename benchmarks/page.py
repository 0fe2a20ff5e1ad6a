"""How large the HTML page of two long runs is, and how soon it can be used.

Usage: python benchmarks/page.py [--ops N ...]

The traces are those of benchmarks/diff.py, case "both": something else is returned from the middle on, and the right
run has one more op after every 1000. Usable means that the list of ops has been filled, is at the first divergence and
takes keys. Needs playwright and a chromium.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import diff as made_up
from playwright.sync_api import Browser, sync_playwright

import opdrift
from opdrift.records import Sides
from opdrift.render import html

#: Milliseconds from the start of the navigation to the list, and of one jump to another part of it (a frame is 17).
USABLE = "() => performance.getEntriesByName('usable')[0].startTime"
JUMP = """async () => {
  const list = document.getElementById("list"), start = performance.now();
  for (let i = 0; i < 100; i++) {
    list.scrollTop = (i * 7919 * 24) % list.scrollHeight;
    await new Promise(requestAnimationFrame);
  }
  return (performance.now() - start) / 100;
}"""


def measure(ops: int, browser: Browser, scratch: Path) -> str:
    """One line on a page of two runs of about this many ops."""
    left, right = made_up.case("both", ops)
    for program, name in ((left, "left"), (right, "right")):
        made_up.write(program, scratch / name)
    traces = Sides(opdrift.load(scratch / "left"), opdrift.load(scratch / "right"))
    found = opdrift.diff(traces.left, traces.right)
    start = time.process_time()
    text = html.render(found, traces)
    rendered = time.process_time() - start
    path = scratch / "page.html"
    path.write_text(text, encoding="utf-8")
    times = []
    for _ in range(3):
        page = browser.new_page()
        page.goto(path.as_uri())
        page.locator("html[data-ready]").wait_for(timeout=60_000)
        times.append(page.evaluate(USABLE))
        jump = page.evaluate(JUMP)
        heap = page.evaluate("() => performance.memory.usedJSHeapSize / 1e6")
        page.close()
    return f"{len(traces.left.ops):>10,}{len(text) / 1e6:>9.2f}{rendered:>10.1f}{sorted(times)[1] / 1e3:>10.2f}{jump:>10.2f}{heap:>9.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ops", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    options = parser.parse_args()
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=sandbox)
        print(
            f"{'ops a side':>10}{'MB':>9}{'CPU s':>10}{'usable s':>10}{'jump ms':>10}{'heap MB':>9}"
        )
        for ops in options.ops:
            with tempfile.TemporaryDirectory() as scratch:
                print(measure(ops, browser, Path(scratch)), flush=True)
        browser.close()


if __name__ == "__main__":
    main()
