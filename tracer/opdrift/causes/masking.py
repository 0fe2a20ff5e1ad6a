"""What hides keys from attention: causal flags, masks that are given, filled in or added, padding that is left out."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from opdrift.case import Side
from opdrift.causes.evidence import Evidence, cause, scope, setting
from opdrift.causes.reading import AROUND_MASKS, HIDES, MASK_ARGUMENTS, MASKING_OPS, reads_as_mask
from opdrift.causes.shown import Shown, inverted, keys_of, shown
from opdrift.records import Cause, TensorArgument
from opdrift.tokens import base

#: Ops that write a value where a mask says so, and the position of the mask among their inputs.
_FILLING: Final = {"masked_fill": 1, "masked_fill_": 1, "_masked_softmax": 1, "where": 0}
_ADDING: Final = frozenset(["add", "add_", "sub", "baddbmm"])
_ATTENDING: Final = ("attention", "softmax", "encoder_layer_fwd")
_REMEDY: Final = (
    "Hand the same mask to the attention in both runs: print the mask where the module receives it, and follow it"
    " from the caller; check is_causal and the meaning of True."
)
_OWN_HIDDEN: Final = (
    "it hides positions of the sample itself, not only padding: True hides in key_padding_mask and keeps in attn_mask of"
    " scaled_dot_product_attention"
)


@dataclass(frozen=True, slots=True)
class Hiding:
    """One way in which an op hides keys.

    Attributes:
        op: Index of the op.
        how: In words.
        sure: That something is hidden was seen in the mask's numbers.
    """

    op: int
    how: str
    sure: bool


def attends(side: Side, op: int) -> bool:
    """Whether an op is, or ends, the scores of an attention; its backward is told by what runs forward."""
    name = side.name(op)
    return "backward" not in name and any(word in name for word in _ATTENDING)


def hidings(side: Side, ops: list[int]) -> list[Hiding]:
    """What hides keys among ops, in order; a mask that lets all through hides nothing."""
    found = [each for op in ops for each in _hidings_of(side, op)]
    inside = set(ops)
    for region in side.attention:
        if region.causal and inside.intersection(region.ops):
            found += [Hiding(region.ops[0], "is_causal=True", sure=True)]
    return sorted({h.op: h for h in found}.values(), key=lambda h: h.op)


def _hidings_of(side: Side, op: int) -> list[Hiding]:
    name = base(side.name(op))
    inputs = [int(v) for v in side.trace.ops.inputs[op]]
    if name in _FILLING and len(inputs) > _FILLING[name]:
        if name == "where" and not _fills_low(side, inputs[1:]):
            return []
        mask = inputs[_FILLING[name]]
        if name != "where" and _all_true(side, mask):  # where True hides, all is hidden
            return [Hiding(op, f"{name} by a mask", sure=True)]
        return _by_mask(side, op, mask, f"{name} by a mask")
    if name in _ADDING:
        masks = [v for v in inputs if is_low(side, v) or _all_low(side, v)]
        return [Hiding(op, "a mask that is added to the scores", sure=True)] if masks else []
    if name == "_nested_tensor_from_mask":
        return _by_mask(side, op, inputs[-1], "padding left out by a mask")
    if not attends(side, op):
        return []
    signature = side.op(op).signature
    given = dict(signature.arguments)
    found = []
    if given.get("is_causal") is True:
        found.append(Hiding(op, "is_causal=True", sure=True))
    names = side.contents.tokens.table[int(side.trace.ops.signature[op])].slots
    for slot, value in zip(names, inputs, strict=False):
        if slot in MASK_ARGUMENTS and isinstance(given.get(slot), TensorArgument):
            found += _by_mask(side, op, value, f"{slot}={side.trace.meta(value)}")
    return found


def _by_mask(side: Side, op: int, mask: int, how: str) -> list[Hiding]:
    hides = hides_something(side, mask)
    return [] if hides is False else [Hiding(op, how, sure=bool(hides))]


def hides_something(side: Side, mask: int) -> bool | None:
    """Whether a mask lets some through and hides others; None where its content is not known.

    The meaning of True is not the same everywhere, so a mask of truth values hides something if it holds both.
    """
    print_ = side.nearest_fingerprint(mask)
    if print_ is None:
        return None
    if side.trace.meta(mask).dtype == "bool":
        return print_.min != print_.max
    return print_.ninf > 0 or print_.min < HIDES


def is_low(side: Side, value: int) -> bool:
    """Whether a tensor is a mask of zeros and very low numbers, not scores that were masked before."""
    print_ = side.nearest_fingerprint(value)
    return print_ is not None and (
        print_.max == 0
        and print_.zero + print_.ninf > 0
        and (print_.ninf > 0 or print_.min < HIDES)
    )


def _all_true(side: Side, mask: int) -> bool:
    print_ = side.nearest_fingerprint(mask)
    return print_ is not None and side.trace.meta(mask).dtype == "bool" and print_.zero == 0


def _all_low(side: Side, value: int) -> bool:
    """Whether nothing is left: of one sample a mask may hide all."""
    print_ = side.nearest_fingerprint(value)
    return print_ is not None and print_.n > 0 and print_.ninf == print_.n


def _fills_low(side: Side, values: list[int]) -> bool:
    """Whether one of the two things that `where` chooses between is -inf, or very low, and nothing else."""
    prints = [side.nearest_fingerprint(v) for v in values]
    known = [p for p in prints if p is not None]
    return any(p.ninf == p.n or (p.min == p.max and p.min < HIDES) for p in known) or not known


# ---- causes --------------------------------------------------------------------------------------------


def mask(e: Evidence) -> Cause | None:
    """What attention may see differs: a mask is there or not, causal or not, or built otherwise."""
    settings = [s for s in e.origin.settings if s.name in MASK_ARGUMENTS]
    ops = [
        (name, side, i) for number, (name, side, _) in enumerate(e.sides) for i in e.ops_of(number)
    ]
    masking = [(name, side, i) for name, side, i in ops if base(side.name(i)) in MASKING_OPS]
    built = e.origin.story == "factory" and bool(masking or _reads_mask(e))
    # tril and triu make masks: with another diagonal they make another one
    built = built or (e.origin.story == "op" and bool(e.origin.settings) and _makes_mask(e))
    only_one = e.origin.story == "region" and _hides_in_one_run(e)
    made = not (settings or built or only_one) and _makes_other_mask(e)
    if not settings and not built and not only_one and not made:
        return None
    op = e.op()
    where = scope(op.call.path) if op else "the model"
    evidence = [setting(s) for s in settings or e.origin.settings]
    evidence += [f"{name}: {side.place(i)}" for name, side, i in (ops if made else masking)[:4]]
    evidence += [f"{name}: {side.place(i)}" for name, side, i in e.sides if i is not None]
    if made:
        evidence.append("attention reads what comes of it as its mask")
    return cause(
        "mask",
        "certain" if settings else "likely",
        f"what attention may see differs in {where}",
        evidence,
        _REMEDY,
    )


def _hides_in_one_run(e: Evidence) -> bool:
    """Whether all that stands in this place in one run only is a mask being made or used."""
    regions = e.origin.region.left, e.origin.region.right
    ops = [(n, side.name(i)) for n, (_, side, _) in enumerate(e.sides) for i in regions[n]]
    hiding = {n for n, name in ops if base(name) in MASKING_OPS}
    return len(hiding) == 1 and all(_is_mask_op(name) for _, name in ops)


def _makes_mask(e: Evidence) -> bool:
    """Whether the op of the origin makes a mask: tril or triu of truth values, or of one constant."""
    found = e.any_op
    if found is None or base(found[1].name(found[2])).rstrip("_") not in ("tril", "triu"):
        return False
    print_ = found[1].nearest_fingerprint(int(found[1].trace.ops.inputs[found[2]][0]))
    return print_ is not None and (print_.min == print_.max or print_.nonfinite == print_.n)


def _makes_other_mask(e: Evidence) -> bool:
    """Whether the runs made a value in different ways that attention reads as its mask."""
    values = (e.origin.values.left, e.origin.values.right)
    return e.origin.story == "region" and any(
        value is not None and reads_as_mask(side, value)
        for value, (_, side, _) in zip(values, e.sides, strict=True)
    )


def _reads_mask(e: Evidence) -> bool:
    """Whether the differing value is read as a mask."""
    row, slot = e.origin.row, e.origin.slot
    if row < 0 or slot is None:
        return False
    side = e.case.left
    op = int(e.case.pairing.left[row])
    names = side.contents.tokens.table[int(side.trace.ops.signature[op])].slots
    return slot < len(names) and names[slot].partition("[")[0] in MASK_ARGUMENTS


def _is_mask_op(name: str) -> bool:
    return base(name) in MASKING_OPS or base(name) in AROUND_MASKS


def mask_on_one_side(e: Evidence) -> Cause | None:
    """The runs attend by different ops, and only one of them hides keys, whichever backend runs."""
    if e.origin.story != "region" or e.lacks_result:
        return None  # without the result there is no attention that could be compared
    reader = e.consumer()
    ops = list(e.origin.region.left), list(e.origin.region.right)
    # a run without the layer attends to nothing there
    attending = [
        any(attends(side, op) for op in (*own, *([op] if op is not None else [])))
        for side, own, op in (
            (e.case.left, ops[0], reader.left),
            (e.case.right, ops[1], reader.right),
        )
    ]
    found = hidings(e.case.left, ops[0]), hidings(e.case.right, ops[1])
    if not all(attending) or bool(found[0]) == bool(found[1]):
        return None
    number = 0 if found[0] else 1
    name, side, _ = e.sides[number]
    other = e.sides[1 - number][0]
    first = found[number][0]
    return cause(
        "mask",
        "certain" if first.sure else "likely",
        f"attention in {scope(side.module(first.op))} is masked in the {name} run only: {first.how}",
        [
            *(f"{name}: {hiding.how}: {side.place(hiding.op)}" for hiding in found[number][:3]),
            f"{other}: no mask, not causal, on the way to the same result",
            _OWN_HIDDEN if _has_lengths(e, side) else "",
            "another attention backend may run because of the mask; without it the results cannot agree",
        ],
        _REMEDY,
    )


def mask_otherwise(e: Evidence) -> Cause | None:
    """The runs attend by different ops, and both hide keys, but not the same: another share of them, or the opposite."""
    found = both_shown(e)
    if found is None or not e.size.material:
        return None
    left, right = found
    opposite = inverted(left, right)
    if not opposite and left.least <= right.most and right.least <= left.most:
        return None
    where = scope(e.sides[0][1].module(left.masks[0].op))
    what = "in one run hides what it keeps in the other" if opposite else "lets through other keys"
    return cause(
        "mask",
        # that nothing else hides keys in either run cannot be known
        "certain" if opposite else "likely",
        f"the mask of attention in {where} {what}: {_share(left)} against {_share(right)} of the pairs of query and key"
        " take part",
        [
            *(
                f"{name}: {mask.how}, by which {_percent(mask.kept)} take part: {side.place(mask.op)}"
                for (name, side, _), each in zip(e.sides, found, strict=True)
                for mask in each.masks[:3]
            ),
            "both masks are made of the same truth values: one of the runs takes them for their opposite"
            if opposite
            else "",
        ],
        "Mind what True means: it keeps in attn_mask of scaled_dot_product_attention, and hides in masked_fill and in"
        " key_padding_mask. Print both masks where attention is called; negate one, or build both in one place.",
    )


def both_shown(e: Evidence) -> tuple[Shown, Shown] | None:
    """What masks of two different ways of attention let through, over the same number of keys; None where not known."""
    if e.origin.story != "region" or e.lacks_result or e.case.by_sample:
        return None
    reader = e.consumer()
    ops = [
        [*own, *([op] if op is not None else [])]
        for own, op in (
            (e.origin.region.left, reader.left),
            (e.origin.region.right, reader.right),
        )
    ]
    keys = [keys_of(side, ops[n]) for n, (_, side, _) in enumerate(e.sides)]
    if len(keys[0]) != 1 or keys[0] != keys[1]:
        return None
    left, right = shown(e.case.left, ops[0]), shown(e.case.right, ops[1])
    return None if left is None or right is None else (left, right)


def _share(each: Shown) -> str:
    if each.least == each.most:
        return _percent(each.most)
    return f"{_percent(each.least)} to {_percent(each.most)}"


def _percent(share: Fraction | None) -> str:
    return "an unknown share" if share is None else f"{float(share):.1%}"


def _has_lengths(e: Evidence, side: Side) -> bool:
    """Whether the sample's own positions are known, and only they are looked at."""
    batch = side.trace.batch
    return e.case.by_sample and batch is not None and batch.lengths is not None


def mask_written(e: Evidence) -> Cause | None:
    """One run hides elements in place, and the other leaves them as they are."""
    found = e.any_op
    if e.origin.story != "written" or found is None:
        return None
    name, side, op = found
    inputs = side.trace.ops.inputs[op].tolist()
    if base(side.name(op)) != "masked_fill_" or hides_something(side, int(inputs[1])) is False:
        return None
    return cause(
        "mask",
        "certain",
        f"{side.name(op)} in {scope(side.module(op))} hides elements in the {name} run only",
        [f"{name}: {side.place(op)}", "the other run reads the same tensor as it was before"],
        _REMEDY,
    )


def decided_otherwise(e: Evidence) -> Cause | None:
    """A comparison with other arguments decides what is hidden: another window, another length."""
    found, values = e.any_op, e.origin.values
    if e.origin.story != "op" or not e.origin.settings or found is None:
        return None
    name, side, op = found
    value = values.left if name == "left" else values.right
    if value is None or side.trace.meta(value).dtype != "bool" or not reads_as_mask(side, value):
        return None
    return cause(
        "mask",
        "certain",
        f"{side.name(op)} in {scope(side.module(op))} decides otherwise what attention may see",
        [
            *(f"{s.name}: {s.left} against {s.right}" for s in e.origin.settings),
            *(f"{label}: {s.place(i)}" for label, s, i in e.sides if i is not None),
            "attention reads what comes of it as its mask",
        ],
        _REMEDY,
    )


def mask_leaf(e: Evidence) -> Cause | None:
    """A buffer or a constant that differs is read as a mask."""
    leaf, values = e.origin.leaf.left or e.origin.leaf.right, e.origin.values
    if e.origin.kind != "leaf" or leaf is None or leaf.kind not in ("buffer", "constant", "input"):
        return None
    if values.left is None or not reads_as_mask(e.case.left, values.left):
        return None
    what = leaf.name or "a tensor without a name, made before it was first used,"
    reads = [f"{name}: {side.place(i)} reads it" for name, side, i in e.sides if i is not None]
    hidden = [
        f"{name}: {print_.zero} of {print_.n} elements are zero or False"
        for name, side, value in (
            ("left", e.case.left, values.left),
            ("right", e.case.right, values.right),
        )
        if value is not None and (print_ := side.nearest_fingerprint(value)) is not None
    ]
    return cause(
        "mask",
        "certain",
        f"the mask {what} differs before the first op that reads it",
        [*reads, *hidden, "attention reads it as its mask"],
        _REMEDY,
    )
