"""Say which calls of a model only one run makes, where their results count for nothing."""

from __future__ import annotations

from collections.abc import Sequence

from opdrift.case import Case
from opdrift.extracalls import extra_calls, held
from opdrift.sinks import Sink


def calls_without_counterpart(case: Case, sinks: Sequence[Sink]) -> tuple[str, ...]:
    """A sentence for each run about calls that it alone makes and of whose results nothing is compared.

    Nothing is said of a call whose results the other run has as well: the same call made twice.

    Args:
        case: Both runs.
        sinks: The results that are compared.
    """
    found = []
    sides = case.left, case.right
    for number, (name, side) in enumerate((("left", case.left), ("right", case.right))):
        other = sides[1 - number]
        known = held(other.contents, other.leaves)
        compared = {(s.left, s.right)[number] for s in sinks}
        word = side.contents.by_place
        extra = extra_calls(case.compared, number).calls
        calls = {
            leaf.call
            for leaf in side.leaves.outputs
            if leaf.kind == "output" and leaf.call in extra and leaf.value not in compared
            if not word[leaf.value] or int(word[leaf.value]) not in known
        }
        if not calls:
            continue
        path, numbers, total = extra_calls(case.compared, number).numbers(side.contents, calls)
        which = ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")
        found.append(
            f"not compared: call {which} of {total} of {path or 'the model'} in the {name} run; the other run has no"
            " such call, and nothing that it returned was kept to the end"
        )
    return tuple(found)
