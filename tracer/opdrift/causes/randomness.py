"""Random numbers: who drew them, from which state."""

from __future__ import annotations

from opdrift.case import Side
from opdrift.causes.evidence import SIDES, Evidence, cause, counted, scope, some
from opdrift.causes.quantisation import quantised_ops
from opdrift.origins.kinds import TRAINING, draws, mixes
from opdrift.records import Call, Cause, Sides
from opdrift.tokens import base

_DROPOUT = frozenset(
    ["native_dropout", "dropout", "dropout_", "feature_dropout", "alpha_dropout", "_fused_dropout"]
)


def dropout(e: Evidence) -> Cause | None:
    """Dropout is active where it should not be, or in one run only."""
    drawing = _drawing(e)
    if not drawing or not any(is_dropout(side, op) for _, side, op in drawing):
        return None
    one_sided = len(drawing) == 1
    otherwise = _trains(e) or _extra_draws(e) or _same_state(drawing) or _seeds(e)
    # of batches of other sizes the same state gives a sample other numbers
    if not one_sided and otherwise and not e.case.by_sample:
        return None
    name, side, op = next(d for d in drawing if is_dropout(d[1], d[2]))
    call = side.call(op)
    evidence = [
        f"{name_}: {side_.place(op_)} drew random numbers" + _generator(side_, op_)
        for name_, side_, op_ in drawing
    ]
    calls = e.calls()
    for label, module in (("left", calls.left), ("right", calls.right)):
        if module is not None and module.id:
            evidence.append(f"{label}: {scope(module.path)} ran with training={module.training}")
    evidence += [
        f"{s.name}: {s.left or 'absent'} against {s.right or 'absent'}" for s in e.origin.settings
    ]
    if not one_sided:
        evidence.append("no backward pass was recorded: this looks like inference")
        summary = f"dropout is active in {scope(call.path)}, so no two calls agree"
    else:
        summary = f"dropout is active in {scope(call.path)} in the {name} run only"
    return cause(
        "dropout",
        "certain",
        summary,
        evidence,
        "Call model.eval() before inference, and pass dropout_p=0.0 (or self.training-dependent values) to"
        " scaled_dot_product_attention.",
    )


def rng(e: Evidence) -> Cause | None:
    """A random op drew from another state of its generator."""
    if (
        e.origin.story not in ("op", "settings")
        or e.origin.op.left is None
        or e.origin.op.right is None
    ):
        return None
    i, j = e.origin.op.left, e.origin.op.right
    left, right = e.case.left, e.case.right
    if not (draws(left, i) and draws(right, j)):
        return None
    states = int(left.trace.ops.rng[i]), int(right.trace.ops.rng[j])
    if states[0] == states[1] != 0 and not e.case.by_sample:
        return None  # the same state gave other numbers: another implementation
    first = e.shared.draws
    evidence = [
        f"the generator's state before {left.name(i)} was {states[0]:016x} against {states[1]:016x}"
    ]
    extra = _extra_draws(e)
    remedy = "Call torch.manual_seed(seed) at the same place in both runs, or give random ops a generator of their own."
    if extra:
        label, side, ops = extra
        evidence.append(
            f"{label}: {counted(len(ops), 'random op')} that the other run does not have drew before it:"
            f" {some([side.place(op) for op in ops], 3)}"
        )
        summary = f"{left.name(i)} in {scope(left.module(i))} draws other numbers: the {label} run has drawn more before"
        remedy = (
            "Make both runs draw equally often: seed again after the extra draw, or give it a generator of its own"
            " (DataLoader(generator=...))."
        )
    elif states[0] != states[1] and all(
        dict(op.signature.arguments).get("generator") is not None
        for op in (left.op(i), right.op(j))
    ):
        summary = f"{left.name(i)} in {scope(left.module(i))} draws other numbers: the generators that it was given differ"
        remedy = (
            "Seed the generator that is passed to it alike in both runs (torch.Generator().manual_seed(seed)), and draw"
            " from it equally often before."
        )
    elif (seeds := _seeds(e)) is not None:
        evidence += [f"{name}: {words}" for name, words in zip(SIDES, seeds, strict=True)]
        summary = f"{left.name(i)} in {scope(left.module(i))} draws other numbers: the runs were seeded differently"
        remedy = "Call torch.manual_seed with the same seed at the same place in both runs."
    elif states[0] == states[1]:
        evidence.append("the state is the same: numbers are drawn for the whole batch at once")
        summary = f"{left.name(i)} in {scope(left.module(i))} draws for all samples, so a sample's numbers depend on the batch"
        remedy = "Draw for each sample by itself, or leave the random op out when you compare single samples."
    else:
        at_start = [d for d in e.shared.environment if d.name.startswith("seed.")]
        evidence += [f"{d.name}: {d.left} against {d.right}" for d in at_start]
        started = bool(first.left and first.right) and int(
            left.trace.ops.rng[first.left[0]]
        ) != int(right.trace.ops.rng[first.right[0]])
        where = "from the first draw on" if started else "although both began alike"
        summary = f"{left.name(i)} in {scope(left.module(i))} draws other numbers: the generators differ {where}"
    return cause("rng", "certain", summary, evidence, remedy)


def train_mode(e: Evidence) -> Cause | None:
    """A layer runs in training mode in one run only, or uses batch statistics at inference."""
    differs = [s for s in e.origin.settings if s.name in TRAINING]
    calls = _calls(e)
    # call 0 is the program outside every module, which has no mode
    modes = tuple(c.training if c is not None and c.id else None for c in (calls.left, calls.right))
    norms = [
        (name, side, op)
        for number, (name, side, _) in enumerate(e.sides)
        for op in e.ops_of(number)
        if "batch_norm" in side.name(op) or "instance_norm" in side.name(op)
    ]
    one_sided = None not in modes and modes[0] != modes[1]
    if (
        not differs
        and (e.origin.inputs_match is None or e.case.by_sample)
        and (found := _batch_statistics(e)) is not None
    ):
        return found
    # another kind of module has a mode of its own, which says nothing unless something there depends on it
    comparable = norms or (e.origin.kind == "structure" and _type(calls.left) == _type(calls.right))
    if not differs and not (one_sided and comparable):
        return None
    if not differs and (_drawing(e) or (not norms and quantised_ops(e))):
        return None  # dropout says it better; a module that computes with quantised numbers is another one
    evidence = [f"{s.name}: {s.left} against {s.right}" for s in differs]
    for label, module in (("left", calls.left), ("right", calls.right)):
        if module is not None and module.id:
            kind = f" ({module.type})" if module.type else ""
            evidence.append(
                f"{label}: {scope(module.path)}{kind} ran with training={module.training}"
            )
    evidence += [f"{name}: {side.place(op)}" for name, side, op in norms[:2]]
    module = calls.left or calls.right
    return cause(
        "train-mode",
        "certain" if differs else "likely",
        f"{scope(module.path) if module else 'a layer'} runs in training mode in one run and not in the other",
        evidence,
        "Call model.eval() before inference in both runs (or model.train() in both), also after loading or copying the model.",
    )


def _calls(e: Evidence) -> Sides[Call | None]:
    """The module calls of the origin; where one run has no op of it, the call that corresponds to the other's."""
    left, right = e.calls().left, e.calls().right
    if e.origin.kind == "structure" and left is None and right is not None:
        other = int(e.case.pairing.calls[1][right.id])
        left = e.case.left.trace.calls[other] if other >= 0 else None
    elif e.origin.kind == "structure" and right is None and left is not None:
        other = int(e.case.pairing.calls[0][left.id])
        right = e.case.right.trace.calls[other] if other >= 0 else None
    return Sides(left, right)


def _type(call: Call | None) -> str:
    return "" if call is None else call.type


def _batch_statistics(e: Evidence) -> Cause | None:
    """A norm in training mode whose inputs are batches of different size: its result depends on the batch."""
    sizes = []
    for _, side, op in e.sides:
        if op is None or "batch_norm" not in side.name(op):
            return None
        given = dict(side.op(op).signature.arguments)
        if not any(given.get(argument) is True for argument in TRAINING):
            return None
        if e.case.by_sample and not any(
            s.one and mixes(s, o) for _, s, o in e.sides if o is not None
        ):
            return None  # instance norm: statistics of each sample by itself
        sizes.append(str(side.trace.meta(int(side.trace.ops.inputs[op][0]))))
    found = e.any_op
    if found is None or sizes[0] == sizes[1]:
        return None
    _, side, op = found
    return cause(
        "train-mode",
        "likely",
        f"{side.name(op)} in {scope(side.module(op))} normalises by the statistics of the batch, and the batches differ",
        [
            f"both: training=True, so mean and variance are those of the batch: {side.place(op)}",
            f"its input is {sizes[0]} against {sizes[1]}",
        ],
        "Call model.eval() before inference: the norm then uses its running statistics.",
    )


# ---- facts -------------------------------------------------------------------------------------------


def is_dropout(side: Side, op: int) -> bool:
    """Whether a random op drops elements: a dropout op, attention with dropout, or a mask drawn for one."""
    name = base(side.name(op))
    if name in _DROPOUT or "attention" in name:
        return True
    if not name.startswith("bernoulli"):
        return False
    if "dropout" in side.call(op).type.lower():
        return True
    # F.dropout draws into an empty tensor and divides what it drew by what it keeps
    trace = side.trace
    written = set(trace.ops.outputs[op].tolist())
    following = range(op + 1, min(op + 4, len(trace.ops)))
    return any(
        base(side.name(k)) in ("div_", "div") and written.intersection(trace.ops.inputs[k].tolist())
        for k in following
    )


def _drawing(e: Evidence) -> list[tuple[str, Side, int]]:
    """The origin's random ops, at most one a side."""
    found = []
    for number, (name, side, op) in enumerate(e.sides):
        candidates = [op] if op is not None and draws(side, op) else []
        candidates += [o for o in e.ops_of(number) if draws(side, o)]
        if candidates:
            found.append((name, side, candidates[0]))
    return found


def _trains(e: Evidence) -> bool:
    return e.shared.trains.left or e.shared.trains.right


def _generator(side: Side, op: int) -> str:
    state = int(side.trace.ops.rng[op])
    return f" (generator state {state:016x})" if state else ""


def _same_state(drawing: list[tuple[str, Side, int]]) -> bool:
    """Whether both runs drew from the same state, so that what differs is how, not what."""
    states = {int(side.trace.ops.rng[op]) for _, side, op in drawing}
    return len(states) == 1 and 0 not in states


def _seeds(e: Evidence) -> tuple[str, str] | None:
    """With which seed each run seeded its generator last, if both did while recording and not alike."""
    found = []
    for _, side, op in e.sides:
        if op is None:
            return None
        meta = [side.trace.meta(int(v)) for v in side.trace.ops.outputs[op].tolist()]
        device = meta[0].device if meta else "cpu"
        last = None
        for mark in side.trace.marks:
            if mark.kind == "seed" and mark.seq <= side.seq(op) and mark.fields["device"] == device:
                last = mark
        if last is None:
            return None
        found.append(
            f"the program seeded its generator with {last.fields['seed']} before op {last.seq}"
        )
    seeds = [words.partition(" before ")[0] for words in found]
    return None if seeds[0] == seeds[1] else (found[0], found[1])


def _extra_draws(e: Evidence) -> tuple[str, Side, list[int]] | None:
    """Random ops before the origin that only one run has, if both generators began alike."""
    first = e.shared.draws
    left, right = e.case.left, e.case.right
    i, j = e.origin.op.left, e.origin.op.right
    if i is None or j is None or not first.left or not first.right:
        return None
    extra = (
        [op for op in first.left if op < i and e.case.pairing.right_of[op] < 0],
        [op for op in first.right if op < j and e.case.pairing.left_of[op] < 0],
    )
    if not extra[0] and not extra[1]:
        return None
    starts = int(left.trace.ops.rng[first.left[0]]), int(right.trace.ops.rng[first.right[0]])
    if starts[0] != starts[1]:
        return None
    number = 0 if len(extra[0]) > len(extra[1]) else 1
    label, side, _ = e.sides[number]
    return label, side, extra[number]
