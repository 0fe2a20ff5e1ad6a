"""Recognise attention that ran as several ops: torch's math path, and what models write out themselves.

The math path is anchored at `_safe_softmax`, which nothing else in torch calls; hand-written attention at
a softmax between two products. From there the makers lead back to query, key and mask, the users forward
to value and output. Only value ids are needed (notes: kernels, 3.3: 1500 of 1500 random calls).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Final

from opdrift.picks.values import Flow
from opdrift.tracefile.reader import Trace

_ALONG: Final = frozenset(
    ("view", "_unsafe_view", "expand", "clone", "reshape", "alias", "detach", "unflatten", "_reshape_alias", "contiguous", "squeeze")
)  # fmt: skip
_CAST: Final = frozenset(("_to_copy", "to"))
_PRODUCT: Final = frozenset(("bmm", "mm", "matmul", "baddbmm"))
_TURN: Final = frozenset(("transpose", "permute", "t", "mT"))
_SCALE: Final = frozenset(("mul", "div", "true_divide"))
_MASK: Final = frozenset(("add", "masked_fill", "where", "sub"))
_SOFTMAX: Final = ("_softmax", "softmax")  # the second under inference_mode
_HALF: Final = ("float16", "bfloat16")
#: No chain of views, casts, masks or scalings around a softmax is longer.
_DEEPEST: Final = 32


@dataclass(frozen=True, slots=True)
class AttentionRegion:
    """Ops that compute one attention call, and the values at their boundary.

    Attributes:
        ops: Indices, in order; not always consecutive.
        query: Value id, as the backends take it where that can be told (before scaling and transposing).
        key: Likewise.
        value: Likewise.
        mask: What was added to the scores or filled them; None for none, and for torch's causal mask.
        output: The result.
        softmax: Index of the softmax.
        added: Index of the op that added the mask to the scores; None where none was added.
        backend: "MATH" for torch's own decomposition, None for attention written by hand.
        name: "math path" or "eager attention".
        causal: torch made the mask from `is_causal`.
        dropout: Its probability, 0 if there is none.
        grouped: Keys were repeated over heads.
    """

    ops: tuple[int, ...]
    query: int
    key: int
    value: int
    mask: int | None
    output: int
    softmax: int
    added: int | None
    backend: str | None
    name: str
    causal: bool = False
    dropout: float = 0.0
    grouped: bool = False


def attention_regions(
    trace: Trace, flow: Flow | None = None, *, calls: Container[int] | None = None
) -> list[AttentionRegion]:
    """All attention calls of a trace that ran as several ops, in order.

    Args:
        trace: The trace.
        flow: Of that trace, if it is known.
        calls: Only those whose softmax ran in one of these module calls; each takes a millisecond to find.
    """
    flow = flow or Flow(trace)
    found = [
        _around(flow, i, torch_made=torch_made)
        for names, torch_made in ((("_safe_softmax",), True), (_SOFTMAX, False))
        for i in flow.indices(*names)
        if calls is None or int(trace.ops.call[i]) in calls
    ]
    return sorted((r for r in found if r is not None), key=lambda r: r.ops)


@dataclass(slots=True)
class _Region:
    """What is known of a region while it is walked."""

    flow: Flow
    members: list[int]
    softmax: int
    before: int  # walks look at ops before this one: a later call can make the same view again
    mask: int | None = None
    added: int | None = None
    causal: bool = False
    dropout: float = 0.0
    grouped: bool = False
    scaled: int = -1  # torch's form: what torch makes of query, key and value comes after this op
    cast: bool = False  # torch's form: it computed half precision in float32

    def maker(self, value: int) -> int | None:
        """Index of the op that made a value for this call; None for a leaf."""
        return self.flow.maker(value, self.before)

    def back(self, value: int, names: Container[str]) -> int:
        """Follow a value to its makers while they are named in `names`."""
        for _ in range(_DEEPEST):
            index = self.maker(value)
            if index is None or self.flow.name(index) not in names:
                break
            inputs = self.flow.inputs(index)
            if not inputs:
                break
            self.members.append(index)
            value = inputs[0]
        return value

    def uncast(self, value: int) -> int:
        """Undo a cast from or to half precision."""
        index = self.maker(value)
        if index is None or self.flow.name(index) not in _CAST or not self.flow.inputs(index):
            return value
        source = self.flow.inputs(index)[0]
        if not {self.flow.meta(v).dtype for v in (value, source)} & set(_HALF):
            return value
        self.members.append(index)
        return source

    def unrepeat(self, value: int) -> int:
        """Undo the repetition of keys over heads: unsqueeze, expand, clone, view."""
        kept = len(self.members)
        source = self.back(value, _ALONG)
        index = self.maker(source)
        if index is not None and self.flow.name(index) == "unsqueeze":
            before = self.flow.inputs(index)[0]
            if index > self.scaled and self._repeats(self.members[kept:], before, source):
                self.members.append(index)
                self.grouped = True
                return before
        del self.members[kept:]
        return value

    def _repeats(self, trail: list[int], before: int, unsqueezed: int) -> bool:
        """Whether heads are repeated between an unsqueeze and here; repeated once, expand makes no new value."""
        if any(self.flow.name(i) == "expand" for i in trail):
            return True
        shape = self.flow.meta(before).shape
        folded = any(self.flow.meta(self.flow.outputs(i)[0]).shape == shape for i in trail)
        return folded and self.flow.meta(unsqueezed).shape[-3:-2] == (1,)

    def finished(
        self, query: int, key: int, value: int, output: int, backend: str | None
    ) -> AttentionRegion:
        return AttentionRegion(
            ops=self._with_aliases({query, key, value, output}),
            query=query,
            key=key,
            value=value,
            mask=self.mask,
            output=output,
            softmax=self.softmax,
            added=self.added,
            backend=backend,
            name="math path" if backend else "eager attention",
            causal=self.causal,
            dropout=self.dropout,
            grouped=self.grouped,
        )

    def _with_aliases(self, boundary: set[int]) -> tuple[int, ...]:
        """The members, and the views among them that returned the value they were given."""
        members = set(self.members)
        values = boundary.union(*(self.flow.outputs(i) for i in members))
        first, last = min(members), max(members)
        for value in values:
            members |= {
                index
                for index in self.flow.users(value)
                if first < index < last
                and self.flow.name(index) in _ALONG
                and self.flow.outputs(index) == [value]
            }
        return tuple(sorted(members))


def _around(flow: Flow, anchor: int, *, torch_made: bool) -> AttentionRegion | None:
    if not flow.outputs(anchor):  # it raised
        return None
    region = _Region(flow, [anchor], anchor, anchor)
    scores = flow.inputs(anchor)[0]
    product = _torch_scores(region, scores) if torch_made else _own_scores(region, scores)
    if product is None:
        return None
    region.members.append(product)
    operands = flow.inputs(product)[-2:]
    sides = _torch_sides(region, operands) if torch_made else _own_sides(region, operands)
    if sides is None:
        return None
    if torch_made and region.mask is not None:
        _torch_mask(region, region.mask)
    forward = _forward(region, anchor, torch_made=torch_made)
    if forward is None:
        return None
    value, output = forward
    if not torch_made:
        return region.finished(*sides, value, output, None)
    query, key, value = (region.uncast(v) if region.cast else v for v in (*sides, value))
    return region.finished(query, key, value, output, "MATH")


# ---- back from the softmax, torch's form ---------------------------------------------------------------


def _torch_scores(region: _Region, value: int) -> int | None:
    """The product that made the scores; takes the mask on the way."""
    flow = region.flow
    value = region.back(value, _ALONG)
    index = region.maker(value)
    if index is not None and flow.name(index) == "add" and len(flow.inputs(index)) == 2:
        region.members.append(index)
        region.mask, region.added = flow.inputs(index)[1], index
        index = region.maker(region.back(flow.inputs(index)[0], _ALONG))
    return index if index is not None and flow.name(index) in _PRODUCT else None


def _torch_mask(region: _Region, mask: int) -> None:
    """Undo what torch makes of bool masks and of is_causal: where(mask, 0, -inf), of a tril of ones."""
    flow = region.flow
    index = region.maker(mask)
    if index is None or flow.name(index) != "where":
        return
    # torch scales the query before it makes a causal mask, and after it converted a given one
    scaled = min(region.members)
    region.members.append(index)
    inputs = flow.inputs(index)
    for value in inputs[1:]:
        maker = region.maker(value)
        if maker is not None and flow.name(maker) == "scalar_tensor":
            region.members.append(maker)
    region.mask = inputs[0]
    inner = region.maker(inputs[0])
    if inner is None or flow.name(inner) != "tril" or inner < scaled:
        return
    region.causal, region.mask = True, None
    region.members.append(inner)
    ones = region.maker(flow.inputs(inner)[0])
    if ones is not None and flow.name(ones) == "ones":
        region.members.append(ones)


def _torch_sides(region: _Region, operands: list[int]) -> tuple[int, int] | None:
    """Query and key: both sides were scaled, the key was transposed, both may have been cast."""
    flow = region.flow
    scaled = []
    for operand in operands:
        index = region.maker(region.back(operand, _ALONG))
        if index is None or flow.name(index) != "mul":
            return None
        region.members.append(index)
        region.scaled = index if region.scaled < 0 else min(index, region.scaled)
        scaled.append(flow.inputs(index)[0])
    index = region.maker(scaled[1])
    if index is None or flow.name(index) not in _TURN:
        return None
    region.members.append(index)
    return scaled[0], region.unrepeat(flow.inputs(index)[0])


# ---- back from the softmax, as models write it ---------------------------------------------------------


def _own_scores(region: _Region, value: int) -> int | None:
    """The product that made the scores; passes masks, scalings and casts in any order."""
    flow = region.flow
    for _ in range(_DEEPEST):
        value = region.back(value, _ALONG | _CAST)
        index = region.maker(value)
        if index is None:
            return None
        name, inputs = flow.name(index), flow.inputs(index)
        if name in _PRODUCT:
            if name == "baddbmm" and flow.arguments(index).get("beta", 1) != 0:
                region.mask = inputs[0]
            return index
        if name in _SCALE and _scales(flow, inputs):
            region.members.append(index)
            value = inputs[0]
        elif name in _MASK and inputs:
            region.members.append(index)
            value = _masked(region, name, inputs)
        else:
            return None
    return None


def _scales(flow: Flow, inputs: list[int]) -> bool:
    """Whether an op multiplies by a number, or by a tensor of one element."""
    return len(inputs) == 1 or not flow.meta(inputs[1]).shape


def _masked(region: _Region, name: str, inputs: list[int]) -> int:
    """The scores that a masking op worked on; keeps the mask."""
    if name == "where":
        region.mask = inputs[0]
        return max(inputs[1:] or inputs, key=lambda v: len(region.flow.meta(v).shape))
    if len(inputs) > 1:
        region.mask = inputs[1]
    return inputs[0]


def _own_sides(region: _Region, operands: list[int]) -> tuple[int, int]:
    """Query and key before the products' reshapes; the key before its last two dims were turned."""
    query = region.back(operands[0], _ALONG)
    key = region.back(operands[1], _ALONG)
    index = region.maker(key)
    if index is not None and region.flow.name(index) in _TURN:
        region.members.append(index)
        key = region.unrepeat(region.flow.inputs(index)[0])
    return query, key


# ---- forward to the value -------------------------------------------------------------------------------


def _forward(region: _Region, anchor: int, *, torch_made: bool) -> tuple[int, int] | None:
    """Value and output, past dropout and casts of the weights."""
    flow = region.flow
    current, seen = flow.outputs(anchor)[0], anchor
    for _ in range(_DEEPEST):
        later = [i for i in flow.users(current) if i > seen]
        if torch_made:  # half precision casts the weights and throws them away
            casts = [i for i in later[:2] if flow.name(i) in _CAST]
            region.members += casts
            region.cast |= bool(casts)
            later = [i for i in later if flow.name(i) not in _CAST]
        later = [i for i in later if flow.name(i) != "detach"]
        if not later:
            return None
        seen, name = later[0], flow.name(later[0])
        if not flow.outputs(seen):  # it raised
            return None
        if name in _PRODUCT:
            if flow.inputs(seen)[-2] != current:
                return None
            return _result(region, seen, torch_made=torch_made)
        if name == "empty_like":
            after = _dropped(region, seen)
            if after is None:
                return None
            seen, current = after, flow.outputs(after)[0]
            continue
        if name in ("native_dropout", "dropout"):
            region.dropout = _number(flow, seen, "p", 0.5)
        elif name == "mul" and _drops_all(region, seen, current):
            region.dropout = 1.0
        elif name not in _ALONG and (torch_made or name not in _CAST):
            return None
        region.members.append(seen)
        current = flow.outputs(seen)[0]
    return None


def _drops_all(region: _Region, index: int, weights: int) -> bool:
    """Dropout of probability 1: a product with a zero, which torch makes for it."""
    others = [v for v in region.flow.inputs(index) if v != weights]
    made = [region.flow.maker(v, index) for v in others]
    if not others or None in made:
        return _number(region.flow, index, "other", 1.0) == 0.0
    zeros = [i for i in made if i is not None and region.flow.name(i) == "zeros"]
    region.members += zeros
    return len(zeros) == len(others)


def _dropped(region: _Region, index: int) -> int | None:
    """Dropout in ops: empty_like, bernoulli_, div_, mul; returns the mul."""
    flow = region.flow
    noise = flow.outputs(index)[0]
    region.members.append(index)
    for _ in range(3):
        following = [i for i in flow.users(noise) if i > index]
        if not following:
            return None
        index = following[0]
        if not flow.outputs(index):
            return None
        region.members.append(index)
        if flow.name(index) == "bernoulli":
            # 0.5 is the default, which a dispatched call leaves out
            region.dropout = round(1.0 - _number(flow, index, "p", 0.5), 12)
        if flow.name(index) == "mul":
            return index
        noise = flow.outputs(index)[0]
    return None


def _result(region: _Region, product: int, *, torch_made: bool) -> tuple[int, int]:
    flow = region.flow
    region.members.append(product)
    region.before = product
    operand = flow.inputs(product)[-1]
    if torch_made:
        value = region.unrepeat(_unfolded(region, operand, product))
    else:
        value = region.unrepeat(operand)
        if value == operand:
            value = region.back(operand, _ALONG)
        value = region.uncast(value)
    output, seen = flow.outputs(product)[-1], product
    own = ("_unsafe_view", "_to_copy") if region.cast or not torch_made else ("_unsafe_view",)
    for _ in range(_DEEPEST):
        following = next((i for i in flow.users(output) if i > seen), None)
        if following is None or not flow.outputs(following) or flow.name(following) not in own:
            break
        region.members.append(following)
        output, seen = flow.outputs(following)[0], following
    return value, output


def _unfolded(region: _Region, value: int, product: int) -> int:
    """The operand of a matmul that became this product: it broadcasts, then folds all leading dims into one."""
    flow = region.flow

    def undo(*names: str) -> bool:
        nonlocal value
        index = region.maker(value)
        if index is None or index < region.scaled or flow.name(index) not in names:
            return False
        region.members.append(index)
        value = flow.inputs(index)[0]
        return True

    if flow.name(product) == "bmm" and not undo("view") and undo("_unsafe_view"):
        undo("clone")
    undo("expand")
    return value


def _number(flow: Flow, index: int, name: str, default: float) -> float:
    value = flow.arguments(index).get(name)
    return float(value) if isinstance(value, int | float) else default
