"""A diagnosis as one HTML page, to be read offline: the card, the growth, and every op of both runs.

What is small is written as plain HTML by the modules beside this one, and can be read without scripts; the list of
ops and the plot are drawn in the browser from packed columns (`ops`, `document`, `assets/`).
"""

from __future__ import annotations

from collections.abc import Sequence

from opdrift.align import Maps
from opdrift.records import Diagnosis, Sides
from opdrift.render import card
from opdrift.render.html.answer import amplifiers, answer, causes, origins, ranks
from opdrift.render.html.document import document
from opdrift.render.html.facts import environment, growth, runs, unpaired
from opdrift.render.html.frame import frame, list_of_ops
from opdrift.render.html.leaves import parameters
from opdrift.render.html.markup import Node
from opdrift.render.html.ops import OpList, marked_rows, op_list
from opdrift.render.html.picked import kernels, looked_up, picks_of
from opdrift.render.rows import rows_of
from opdrift.render.words import count, plural
from opdrift.tracefile.reader import Trace

__all__ = ["render"]


def render(
    diagnosis: Diagnosis,
    traces: Sides[Trace] | None,
    *,
    samples: tuple[int, int] | None = None,
    maps: Maps = (),
    options: Sequence[str] = (),
    folder: str = "",
) -> str:
    """The page.

    Args:
        diagnosis: What to say.
        traces: What was compared; None for logs of other tools, which hold no ops to list.
        samples: Which sample of each batch was compared.
        maps: Renamed modules, as they were compared.
        options: What chose what was compared, for the commands: `--samples`, `0:1`.
        folder: Where the reader is; paths below it are shown relative to it.
    """
    linked = traces is not None
    types: dict[str, str] = {}
    listed: OpList | None = None
    further: list[Node | None] = []
    if traces is not None:
        types = {path: type_ for path, type_ in traces.left.module_types.items() if type_}
        rows = rows_of(traces.left, traces.right, diagnosis, samples=samples, maps=maps)
        chosen = looked_up(rows, marked_rows(rows, diagnosis))
        picks = picks_of(rows, chosen)
        listed = op_list(rows, diagnosis, picks, folder=folder)
        further = [kernels(rows, picks, chosen), parameters(rows.compared, maps)]
    parts: list[Node | None] = [
        answer(diagnosis, module_types=types, options=options, linked=linked),
        causes(diagnosis),
        ranks(diagnosis, linked=linked),
        growth(diagnosis, measured=_measured(listed)),
        list_of_ops(linked=linked, note=_harmless(diagnosis, listed)),
        origins(diagnosis, module_types=types),
        amplifiers(diagnosis, linked=linked),
        *further,
        environment(diagnosis),
        unpaired(diagnosis),
        runs(diagnosis),
    ]
    headline = card.headline(diagnosis)
    return document(
        f"{headline} - opdrift",
        frame([part for part in parts if part is not None]),
        folder=folder,
        facts=None if listed is None else listed.facts,
        columns={} if listed is None else listed.columns,
    )


def _measured(listed: OpList | None) -> str:
    """Of which ops the plot shows the size; empty where there is nothing to show."""
    if listed is None or not listed.plotted:
        return ""
    if listed.measured == listed.differing:
        return "Each point is an op of the left run whose output differs. Drag to zoom, double-click to see all, click to go to the op."
    return (
        f"Each point is an op of the left run whose output differs: {count(listed.measured)} of"
        f" {count(listed.differing)} were measured, evenly spread. Drag to zoom, double-click to see all, click to go to the op."
    )


def _harmless(diagnosis: Diagnosis, listed: OpList | None) -> str:
    """Why ops of identical runs differ, where some do."""
    if listed is None or diagnosis.verdict != "identical" or not listed.differing:
        return ""
    return (
        f"{plural(listed.differing, 'op')} computed something else in the other run (marked ~), and nothing of it reaches"
        " a result: values that are drawn and then overwritten, or never used."
    )
