"""A rank that holds a part of the model (a stage of a pipeline) against a run of the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from opdrift.case import Case
from opdrift.flow import is_collective
from opdrift.origins.kinds import computes
from opdrift.origins.model import Origin
from opdrift.origins.search import Found
from opdrift.records import Sides
from opdrift.tracefile.reader import Trace
from opdrift.wording import some


@dataclass(frozen=True, slots=True)
class Stage:
    """Which run holds a part, and of what.

    Attributes:
        case: Both runs.
        number: 0 if it is the left one, 1 if it is the right one.
        modules: The modules whose parameters it holds.
    """

    case: Case
    number: int
    modules: frozenset[str]

    def judged(self, found: Found) -> Found:
        """What differs in the part that both have: ops of modules that other ranks hold are not missing.

        That is said only where all ops that both have gave the same; else what only one run has may be the reason.
        """
        case = self.case
        # a view may be paired with one of another part of the model: what it passes on is no result of its own
        views = case.left.contents.tokens.view[case.pairing.left]
        if bool((case.compared.outputs_differ & ~views).any()):
            return found
        origins = tuple(each for each in found.origins if not self._lies_elsewhere(each))
        return replace(found, origins=origins)

    @property
    def sentence(self) -> str:
        """In words, what was compared."""
        side = ("left", "right")[self.number]
        return (
            f"the {side} run holds {some(sorted(self.modules), 4)} on this rank, a part of the model: what other ranks compute is not"
            f" missing, and {len(self.case.pairing.left)} ops of both runs were compared"
        )

    def _lies_elsewhere(self, origin: Origin) -> bool:
        """Whether an origin consists of ops alone that other ranks may have: none in a module of this part.

        Of its own, the part may have what hands on and receives; what computes has no other place.
        """
        if origin.kind != "structure" or origin.story != "region":
            return False
        sides = (self.case.left, origin.region.left), (self.case.right, origin.region.right)
        if any(side.module(op) in self.modules for side, ops in sides for op in ops):
            return False
        own, ops = sides[self.number]
        return not any(computes(own, op) and not is_collective(own.name(op)) for op in ops)


def stage_of(case: Case, fellows: Sides[Sequence[Trace]]) -> Stage | None:
    """The stage that one of two runs is, if it is: it has some of the parameters, and its fellows have the others.

    Args:
        case: Both runs.
        fellows: The other ranks of each.
    """
    held = _parameters(case.left.trace), _parameters(case.right.trace)
    for number, others in enumerate((fellows.left, fellows.right)):
        mine, whole = held[number], held[1 - number]
        elsewhere = frozenset[str]().union(*map(_parameters, others))
        if mine and mine < whole <= mine | elsewhere:
            return Stage(case, number, frozenset(name.rpartition(".")[0] for name in mine))
    return None


def _parameters(trace: Trace) -> frozenset[str]:
    return frozenset(leaf.name for leaf in trace.leaves if leaf.kind == "parameter")
