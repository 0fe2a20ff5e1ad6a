"""Results that only one run returns, though both runs ran the op that makes them."""

from __future__ import annotations

from collections.abc import Iterable

from opdrift.case import Case
from opdrift.matches import made
from opdrift.origins.model import Origin
from opdrift.records import Sides
from opdrift.sinks import Sink


def returned_by_one(case: Case, sinks: Iterable[Sink]) -> Origin | None:
    """An origin at the first op of both runs whose result one of them has not; None if no such op made one.

    With other arguments an op returns more: `need_weights` of attention. With equal ones one program kept what the
    other threw away.

    Args:
        case: Both runs, which differ in nothing that both have.
        sinks: The results that differ.
    """
    found: list[Origin] = []
    for sink in sinks:
        if (sink.left is None) == (sink.right is None):
            continue
        if sink.left is not None:
            op, slot = made(case.left.contents, sink.left)
            ops = op, int(case.pairing.right_of[op]) if op >= 0 else -1
        else:
            assert sink.right is not None
            op, slot = made(case.right.contents, sink.right)
            ops = int(case.pairing.left_of[op]) if op >= 0 else -1, op
        if min(ops) < 0:
            continue
        settings = case.settings(*ops)
        row = int(case.compared.row_of_left[ops[0]])
        found.append(
            Origin(
                kind="op" if settings else "structure",
                story="op" if settings else "region",
                op=Sides(*ops),
                row=row if settings else -1,
                values=Sides(sink.left, sink.right),
                slot=slot,
                order=float(ops[0]),
                settings=settings,
                inputs_match=True if case.compared.inputs_known[row] else None,
            )
        )
    return min(found, key=lambda o: o.order, default=None)
