"""Write an origin down as the diagnosis shows it."""

from __future__ import annotations

from opdrift.bounds import arithmetic
from opdrift.case import Case, Side
from opdrift.causes.evidence import Evidence, Shared
from opdrift.causes.picked import kernel_picks
from opdrift.causes.unseen import maker_of, output_words
from opdrift.compare import Difference
from opdrift.origins.model import Origin
from opdrift.records import Cause, Divergence, DivergenceKind, Phase, Pick, Sides
from opdrift.sizes import Size


def divergence(
    case: Case, origin: Origin, size: Size, cause: Cause, final: float | None
) -> Divergence:
    """The divergence of an origin."""
    stands = _place(case, origin)
    gap, bound = size.difference, size.bound
    seq: Sides[int | None] = Sides(
        None if origin.op.left is None else case.left.seq(origin.op.left),
        None if origin.op.right is None else case.right.seq(origin.op.right),
    )
    side, op = stands if stands is not None else (case.left, None)
    call = side.call(op) if op is not None else None
    source = side.op(op).source if op is not None else None
    phase: Phase | None = None
    if op is not None:
        phase = "backward" if side.trace.ops.phase[op] else "forward"
    values = origin.values
    return Divergence(
        kind=origin.kind,
        name=origin.names[0] if origin.names else None,
        op=side.name(op) if op is not None else None,
        module=call.path if call is not None else "",
        call=call.number if call is not None else 0,
        phase=phase,
        source=str(source) if source is not None else None,
        seq=seq,
        output=origin.slot
        if origin.story in ("op", "settings", "nonfinite", "amplified")
        else None,
        inputs_match=origin.inputs_match,
        material=size.material,
        relative_difference=gap.relative if gap is not None else None,
        explained=size.limit,
        conditioning=bound.conditioning if bound is not None else None,
        max_abs_difference=gap.max_abs if gap is not None else None,
        ulp=gap.ulp if gap is not None else None,
        nonfinite=Sides(_nonfinite(case.left, values.left), _nonfinite(case.right, values.right)),
        kernel=_kernel(case, origin, size),
        arguments=origin.settings,
        final_relative_difference=final,
        cause=cause,
        tensors=Sides(_meta(case.left, values.left), _meta(case.right, values.right)),
        members=(*origin.names[1:], *origin.alike),
        how=gap.how if gap is not None else None,
        arithmetic=_arithmetic(case, origin),
        outside=call is not None and not call.id,
        made_otherwise=origin.story == "factory" and bool(origin.settings),
        content=_content(case, origin),
    )


def between_ranks(
    kind: DivergenceKind,
    cause: Cause,
    ranks: Sides[tuple[int, ...]] | None,
    *,
    op: str | None,
    module: str,
    seq: Sides[int | None],
    source: str | None = None,
    outside: bool = False,
    name: str | None = None,
    members: tuple[str, ...] = (),
    gap: Difference | None = None,
) -> Divergence:
    """A divergence that ranks show together: what needs a pair of ops is not known of it."""
    return Divergence(
        kind=kind,
        name=name,
        op=op,
        module=module,
        call=0,
        phase=None,
        source=source,
        seq=seq,
        output=0 if kind == "op" else None,
        inputs_match=None,
        material=True,
        relative_difference=gap.relative if gap is not None else None,
        explained=None,
        conditioning=None,
        max_abs_difference=gap.max_abs if gap is not None else None,
        ulp=gap.ulp if gap is not None else None,
        nonfinite=Sides(gap.nonfinite.left, gap.nonfinite.right)
        if gap is not None
        else Sides(None, None),
        kernel=Sides(None, None),
        arguments=(),
        final_relative_difference=None,
        cause=cause,
        members=members,
        how=gap.how if gap is not None else None,
        outside=outside,
        ranks=ranks,
    )


def _content(case: Case, origin: Origin) -> str | None:
    """What was written with no op, where no leaf gives it a name: the output of the op that wrote it before."""
    if origin.kind != "hidden-write" or any(origin.names):
        return None
    for side, value in ((case.left, origin.values.left), (case.right, origin.values.right)):
        maker = maker_of(side, value) if value is not None else None
        if maker is not None:
            return output_words(side, maker)
    return None


def _arithmetic(case: Case, origin: Origin) -> str | None:
    """What the op of an origin computes in, both sides named where they differ."""
    if origin.kind in ("leaf", "hidden-write"):
        return None
    found = []
    for side, op in ((case.left, origin.op.left), (case.right, origin.op.right)):
        if op is not None and len(side.trace.ops.outputs[op]):
            slot = min(origin.slot or 0, len(side.trace.ops.outputs[op]) - 1)
            found.append(arithmetic(side.views[op], slot))
    return " against ".join(dict.fromkeys(found)) or None


def _place(case: Case, origin: Origin) -> tuple[Side, int] | None:
    shown = origin.shown
    return None if shown is None else ((case.left, case.right)[shown[0]], shown[1])


def _meta(side: Side, value: int | None) -> str | None:
    return None if value is None else str(side.contents.meta(value))


def _nonfinite(side: Side, value: int | None) -> int | None:
    if value is None:
        return None
    found = side.nearest_fingerprint(value)
    return None if found is None else found.nonfinite


def _kernel(case: Case, origin: Origin, size: Size) -> Sides[Pick | None]:
    if origin.kind in ("leaf", "hidden-write"):
        return Sides(None, None)
    return kernel_picks(Evidence(origin, size, Shared(case, ())))
