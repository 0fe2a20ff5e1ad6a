"""Where a planted fault is to be found, and which causes are right: decided by what the fault is, not by what is said.

| fault | place | causes, and why these |
|---|---|---|
| one-ulp noise | the op | `rounding` at an op whose result depends on the order of summation or on the library; at an exact op (one rounding or none, or a constant) no order explains it: `kernel`, an implementation or memory that is not the other run's, and material; of a copy `race`: it is not what was copied |
| sign flip | the op | `kernel`, material: the same inputs give another number; of a copy `race` |
| swapped weights | the op that reads the weight, through views | `weights`, with both names |
| scale argument | the op; for a constant the op that reads it | `op-args`, with the argument's name |
| dropped mask | the op that hides | `mask` |
| dtype cast | the cast, or the op that reads what was cast | `dtype`, with the type |
| extra op | that op, or the op that reads its result | `structure`; before a norm `rounding` is as true, since a norm divides a scale out |
| in-place write | the op that writes | `inplace`; into a parameter `weights` is as true, and after the backward `structure`: one more write there is one more step |
| hidden write | the first op whose result it changes | `race`, of a leaf with its name; of a tensor that nobody knew before `input`, since it is not known what it held |
| rng offset | the op that draws | `rng` |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from plants import Plant

from opdrift.records import Diagnosis, Divergence, Sides
from opdrift.tracefile.reader import Trace

#: Ops whose result is exact or rounded once, whatever library computes it: equal inputs, equal bits (notes:
#: diagnosis, 1.1), and constants.
_EXACT: Final = frozenset(
    [
        "add",
        "sub",
        "rsub",
        "mul",
        "div",
        "neg",
        "abs",
        "sqrt",
        "reciprocal",
        "relu",
        "leaky_relu",
        "maximum",
        "amax",
        "where",
        "clamp",
        "masked_fill",
        "threshold_backward",
        "leaky_relu_backward",
        "copy",
        "_to_copy",
        "clone",
        "cat",
        "stack",
        "embedding",
        "gather",
        "index",
        "index_select",
        "scatter",
        "select_backward",
        "slice_backward",
        "sort",
        "topk",
        "aminmax",
        "max_pool2d_with_indices",
        "upsample_nearest2d",
        "zeros",
        "ones",
        "full",
        "arange",
        "scalar_tensor",
        "zeros_like",
        "ones_like",
        "full_like",
        "bernoulli",
        "randn",
        "randn_like",
        "_foreach_mul",
        "eq",
    ]
)

#: Moments at which a value is seen that the run leaves behind.
_RESULTS: Final = frozenset({"return", "exit"})


@dataclass(frozen=True)
class Expectation:
    """What a right answer says.

    Attributes:
        places: Numbers of the op in both runs, any of them.
        causes: Slugs, any of them.
        material: Whether it is more than rounding; None if it may be either.
        words: What cause or arguments must say.
    """

    places: frozenset[Sides[int | None]]
    causes: frozenset[str]
    material: bool | None = True
    words: tuple[str, ...] = ()

    def missed_by(self, found: Diagnosis) -> str | None:
        """What is wrong with an answer; None if it is right."""
        first = found.first_bitwise
        if first is None:
            return "nothing found"
        if first.seq not in self.places:
            return f"place: {_said(first)}"
        if first.cause.slug not in self.causes:
            return f"cause: {_said(first)}"
        wanted = {True: ("diverged",), False: ("rounding",), None: ("diverged", "rounding")}
        if found.verdict not in wanted[self.material]:
            return f"verdict: {found.verdict}, {_said(found.first or first)}"
        said = " ".join(
            [
                first.name or "",
                first.cause.summary,
                *first.cause.evidence,
                *(a.name for a in first.arguments),
            ]
        )
        lacking = [word for word in self.words if word not in said]
        return f"words: {lacking} in {_said(first)}" if lacking else None


def _said(d: Divergence) -> str:
    return f"{d.cause.slug} ({d.cause.confidence}) at {d.name or d.op} {d.seq.left}|{d.seq.right}: {d.cause.summary}"


class Sound:
    """The run without a fault."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._readers: dict[int, list[int]] = {}
        for op in range(len(trace.ops)):
            for value in trace.ops.inputs[op].tolist():
                self._readers.setdefault(value, []).append(op)

    @cached_property
    def _live(self) -> set[int]:
        """Ops with a part in a result: what they write is read by such an op, or left at the end."""
        storage, ops = self.trace.values.storage, self.trace.ops
        needed = {int(storage[leaf.value]) for leaf in self.trace.leaves if leaf.when in _RESULTS}
        found = set()
        for op in range(len(ops) - 1, -1, -1):
            if needed.intersection(storage[ops.outputs[op]].tolist()):
                found.add(op)
                needed.update(storage[ops.inputs[op]].tolist())
        return found

    def affected(self, op: int, planted: Trace) -> int:
        """The first op that reads what an op reads, gives another result for it, and has a part in a result.

        Some ops take a tensor for its shape alone, and some results are never used. Where nothing that is read has
        an effect, what was written is a result itself: the op that was to read it next.
        """
        ops, storage = self.trace.ops, self.trace.values.storage
        touched = {
            int(storage[a])
            for a, b in zip(ops.inputs[op].tolist(), planted.ops.inputs[op].tolist(), strict=True)
            if _key(self.trace, a) != _key(planted, b)
        } or set(storage[ops.inputs[op]].tolist())
        for later in range(op, len(ops)):
            if (
                later not in self._live
                or self.is_view(later)
                or not touched.intersection(storage[ops.inputs[later]].tolist())
            ):
                continue
            pairs = zip(
                ops.outputs[later].tolist(), planted.ops.outputs[later].tolist(), strict=True
            )
            if any(_key(self.trace, a) != _key(planted, b) for a, b in pairs):
                return later
        return op

    def reader(self, op: int) -> int:
        """The first op that computes with what an op returned, itself or a view of it; the op itself if none does."""
        reached = set(self.trace.ops.outputs[op].tolist())
        for later in range(op + 1, len(self.trace.ops)):
            if not reached.intersection(self.trace.ops.inputs[later].tolist()):
                continue
            info = self.trace.op_info(int(self.trace.ops.signature[later]))
            if not info.view or info.mutates:
                return later
            reached.update(self.trace.ops.outputs[later].tolist())
        return op

    def steps(self, op: int) -> bool:
        """Whether an op is outside modules, after a backward: where an optimizer steps."""
        trained = bool((self.trace.ops.phase[:op] == 1).any())
        return trained and self.trace.op(op).call.id == 0 and self.trace.op(op).phase == "forward"

    def meets(self, op: int) -> bool:
        """Whether an op is the first that takes a tensor from before the run that nobody named."""
        inputs = set(self.trace.ops.inputs[op].tolist())
        return any(
            leaf.when == "use" and leaf.kind == "constant" and leaf.value in inputs
            for leaf in self.trace.leaves
            if leaf.seq == op
        )

    def is_view(self, op: int) -> bool:
        """Whether an op returns a part of what it is given."""
        info = self.trace.op_info(int(self.trace.ops.signature[op]))
        return info.view and not info.mutates

    def makes_constant(self, op: int) -> bool:
        """Whether an op starts from no tensor."""
        return not len(self.trace.ops.inputs[op])

    def rounds(self, op: int) -> bool:
        """Whether another order of summation, or another library, may give other bits."""
        name = self.trace.op(op).name.split(".")[1].rstrip("_")
        given = dict(self.trace.op(op).signature.arguments)
        if name == "pow" and given.get("exponent") == 2:
            return False  # one multiplication
        return name not in _EXACT or (name in ("add", "sub") and given.get("alpha", 1) != 1)

    def is_copy(self, op: int) -> bool:
        """Whether an op gives the very content of its input, and that is known."""
        called = self.trace.op(op)
        name = called.name.split(".")[1]
        if name not in ("clone", "copy_", "_to_copy", "lift_fresh_copy"):
            return False
        source = called.inputs[1 if name == "copy_" else 0]
        keys = [_key(self.trace, value) for value in (source, called.outputs[0])]
        return keys[0] is not None and keys[0] == keys[1]


def _key(trace: Trace, value: int) -> tuple[int, int, int] | None:
    """What a value's content is known by; None where it was not fingerprinted."""
    found = trace.fingerprint(value)
    return None if found is None else found.key


def expected(plant: Plant, sound: Sound, planted: Trace) -> Expectation:
    """What is to be said of a plant."""
    op = plant.op + 1
    same = frozenset({Sides(op, op)})
    match plant.fault:
        case "one-ulp noise" if sound.rounds(plant.op):
            return Expectation(same, frozenset({"rounding"}), material=False)
        case "one-ulp noise" | "sign flip":
            wrong = frozenset({"race"} if sound.is_copy(plant.op) else {"kernel"})
            return Expectation(same, wrong)
        case "swapped weights":
            read = (sound.reader(plant.op) if sound.is_view(plant.op) else plant.op) + 1
            return Expectation(
                frozenset({Sides(read, read)}),
                frozenset({"weights"}),
                words=plant.told[1:],
            )
        case "scale argument":
            read = sound.reader(plant.op) + 1 if sound.makes_constant(plant.op) else op
            return Expectation(
                frozenset({Sides(read, read)}),
                frozenset({"op-args"}),
                words=(str(plant.detail),),
            )
        case "dropped mask":
            gone = frozenset({Sides(op, None)})
            return Expectation(gone if plant.detail == "left out" else same, frozenset({"mask"}))
        case "dtype cast":
            places = frozenset({Sides(op, op + 2), Sides(None, op), Sides(None, op + 1)})
            return Expectation(places, frozenset({"dtype"}), words=("bfloat16",))
        case "extra op":
            places = frozenset({Sides(op, op + 1), Sides(None, op)})
            if "norm" in plant.told[0]:
                return Expectation(places, frozenset({"structure", "rounding"}), material=None)
            return Expectation(places, frozenset({"structure"}))
        case "in-place write":
            right = {"inplace", "weights"} if plant.told[1:] else {"inplace"}
            if plant.told[1:] and sound.steps(plant.op):
                right.add("structure")
            return Expectation(frozenset({Sides(None, op + 1)}), frozenset(right))
        case "hidden write":
            read = sound.affected(plant.op, planted) + 1
            causes = {"race", "input"} if sound.meets(plant.op) else {"race"}
            return Expectation(
                frozenset({Sides(read, read)}), frozenset(causes), words=plant.told[1:]
            )
        case "rng offset":
            later = op + 1 if plant.detail == "seen" else op
            return Expectation(frozenset({Sides(op, later)}), frozenset({"rng"}))
    raise AssertionError(plant.fault)
