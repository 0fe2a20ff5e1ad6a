"""Where an integration could not follow a library, every answer says so: nothing found is not all is well."""

from __future__ import annotations

from opdrift import diff
from opdrift.render import finding_text, trace_text
from opdrift.render.page import Screen
from opdrift.testing import Builder
from opdrift.tracefile.reader import Trace
from opdrift.unfollowed import unfollowed

SAID = "not all that fairscale did was followed, and what was not is not checked: X._gather is not there"
SCREEN = Screen(200)


def run(*errors: str) -> Trace:
    build = Builder()
    build.output(build.op("relu", build.leaf("x", kind="input")))
    for error in errors:
        build.mark("integration-failed", library="fairscale", error=error)
    return build.build()


def test_what_was_not_followed_is_said_once():
    assert unfollowed([run("X._gather is not there"), run("X._gather is not there")]) == [SAID]
    assert unfollowed([run()]) == []


def test_findings_and_overview_say_it():
    trace = run("X._gather is not there")

    assert f"note: {SAID}" in finding_text.finding_report((), SCREEN, notes=unfollowed([trace]))
    assert SAID in trace_text.overview(trace, (), SCREEN)


def test_a_comparison_says_of_which_run():
    found = diff(run(), run("X._gather is not there"))

    assert found.verdict == "identical"
    assert f"right: {SAID}" in found.notes
