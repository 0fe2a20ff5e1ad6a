"""Record a model with one fault after another, and hold each diagnosis against what was planted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from expectations import Sound, expected
from plants import FAULTS, Plant, Planting, Scouting
from small_models import Workload
from torch import Tensor

import opdrift
from opdrift.records import Diagnosis
from opdrift.tracefile.reader import Trace


@dataclass(frozen=True)
class Run:
    """A recorded run.

    Attributes:
        results: All that the run left behind.
        raised: What it ended with, if it did not come to its end.
    """

    trace: Trace
    results: list[np.ndarray]
    raised: str | None


@dataclass
class Tally:
    """What came of the plants.

    Attributes:
        planted: Those with an effect on the results, by kind.
        found: Those of them that were found at their op for the right cause, by kind.
        placed: Those that were found at their op, by kind.
        silent: Those that changed no result: the runs have to be called identical.
        raised: Those at which the program ended by itself.
        misses: What is wrong, one line a plant.
    """

    planted: Counter[str] = field(default_factory=Counter)
    placed: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    silent: Counter[str] = field(default_factory=Counter)
    raised: Counter[str] = field(default_factory=Counter)
    misses: list[str] = field(default_factory=list)


class Garden:
    """One model, its sound run, and a place for traces."""

    def __init__(self, make: Callable[[], Workload], folder: Path) -> None:
        self._make = make
        self._folder = folder
        self.plain = self.record(None)
        self.sound = Sound(self.plain.trace)

    def record(self, plant: Plant | None, *, name: str = "sound") -> Run:
        """A run from the same state, with a fault or without."""
        path = self._folder / (name if plant is None else "planted")
        work = self._make()
        mode = Planting(plant, dict(work.model.named_parameters()))
        below = plant is not None and FAULTS[plant.fault].below
        returned: Sequence[Tensor] = ()
        raised = None
        with ExitStack() as stack:
            if below:
                stack.enter_context(mode)
            stack.enter_context(
                opdrift.record(path, model=work.model, integrity="full", overwrite=True)
            )
            if not below:
                stack.enter_context(mode)
            try:
                returned = work.run()
            except (RuntimeError, IndexError) as error:
                raised = str(error)
        results = [each.numpy().copy() for each in work.results(returned)]
        return Run(opdrift.load(path), results, raised)

    def scout(self) -> list[Plant]:
        """Everything that can be planted and may have an effect."""
        work = self._make()
        with Scouting(dict(work.model.named_parameters())) as scout:
            work.run()
        assert len(self.plain.trace.ops) == scout.count
        return scout.found

    def diagnose(self, plant: Plant, tally: Tally) -> Diagnosis | None:
        """Plant one fault, and count what is said of it."""
        run = self.record(plant)
        if run.raised is not None:
            tally.raised[plant.fault] += 1
            return None
        found = opdrift.diff(self.plain.trace, run.trace)
        if all(map(_same, self.plain.results, run.results)):
            tally.silent[plant.fault] += 1
            if found.verdict != "identical":
                tally.misses.append(
                    f"{plant}: no result differs, and the verdict is {found.verdict}"
                )
            return found
        tally.planted[plant.fault] += 1
        wrong = expected(plant, self.sound, run.trace).missed_by(found)
        tally.placed[plant.fault] += wrong is None or not wrong.startswith(("place", "nothing"))
        tally.found[plant.fault] += wrong is None
        if wrong is not None:
            tally.misses.append(f"{plant}: {wrong}")
        return found


def _same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.shape == right.shape and left.tobytes() == right.tobytes()


def every(plants: Sequence[Plant], step: int) -> Iterator[Plant]:
    """Each step-th plant of each kind, so that every kind is there."""
    seen: Counter[str] = Counter()
    for plant in plants:
        if seen[plant.fault] % step == 0:
            yield plant
        seen[plant.fault] += 1


def summary(model: str, tally: Tally) -> str:
    """The figures of one model: a row a kind, and every miss."""
    lines = [f"\n{model}: planted, found at the op, with the cause; no effect, raised"]
    for fault in FAULTS:
        counts = [
            c[fault] for c in (tally.planted, tally.placed, tally.found, tally.silent, tally.raised)
        ]
        if any(counts):
            lines.append(
                f"  {fault:16s} {counts[0]:5d} {counts[1]:5d} {counts[2]:5d}; {counts[3]:4d} {counts[4]:4d}"
            )
    total = [
        c.total() for c in (tally.planted, tally.placed, tally.found, tally.silent, tally.raised)
    ]
    lines.append(
        f"  {'all':16s} {total[0]:5d} {total[1]:5d} {total[2]:5d}; {total[3]:4d} {total[4]:4d}"
    )
    return "\n".join([*lines, *(f"  miss: {miss}" for miss in tally.misses)])
