"""Inputs that differ before any op."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from opdrift.case import Case, Side
from opdrift.causes.evidence import SIDES, Evidence, cause, counted, scope, setting, some
from opdrift.compare import Difference, describe, difference
from opdrift.provenance.ops import operator
from opdrift.records import Cause, TensorMeta
from opdrift.tracefile.schema import RECORDED_SAMPLES

_MASKS: Final = ("mask",)


def input_(e: Evidence) -> Cause | None:
    """An input, or a constant that the program brought along, differs before any op."""
    leaf = e.origin.leaf.left or e.origin.leaf.right
    if e.origin.kind != "leaf" or leaf is None or leaf.kind not in ("input", "constant"):
        return None
    if (loaded := _loaded(e)) is not None:
        return loaded
    name = leaf.name or "a tensor without a name, made before it was first used,"
    values = e.origin.values
    found = _difference(e.case.left, e.case.right, values.left, values.right)
    metas = [
        str(_own_meta(side, v)) if v is not None else "absent"
        for side, v in ((e.case.left, values.left), (e.case.right, values.right))
    ]
    chosen = _of_other_sample(e.case) if leaf.kind == "input" else None
    evidence = [
        f"left {metas[0]}, right {metas[1]}" + (", of the sample" if e.case.by_sample else ""),
        describe(found) if found is not None and found.comparable else "",
        _shifted(e),
        f"further inputs that differ: {some(e.origin.names[1:])}" if e.origin.names[1:] else "",
    ]
    shapes = " in shape" if metas[0] != metas[1] else ""
    return cause(
        "input",
        "certain",
        f"{name} differs{shapes} before the first op that reads it",
        [*evidence, chosen[0]] if chosen is not None else evidence,
        chosen[1]
        if chosen is not None
        else "Feed both runs the same tensors: compare tokenizer, preprocessing and padding, or save the inputs of one"
        " run with torch.save and load them in the other.",
    )


def other_part(e: Evidence) -> Cause | None:
    """A module is given another part of the program's data: a slice or an index outside of modules."""
    region, reader = e.origin.region, e.consumer()
    if e.origin.story != "factory" or not e.origin.settings or e.case.by_sample:
        return None
    if reader.left is None or reader.right is None or not region.left or not region.right:
        return None
    taken = ((e.case.left, region.left[0]), (e.case.right, region.right[0]))
    if not all(_is_of_data(side, op) for side, op in taken):
        return None
    left = e.case.left
    return cause(
        "input",
        "likely",
        f"{left.name(reader.left)} in {scope(left.module(reader.left))} is given another part of the program's data:"
        f" {left.name(region.left[0])} was called with {', '.join(map(setting, e.origin.settings))}",
        [
            *map(setting, e.origin.settings),
            *(
                f"{name}: {side.place(op)} takes it"
                for name, (side, op) in zip(SIDES, taken, strict=True)
            ),
            *(
                f"{name}: {side.place(op)} reads it"
                for name, (side, _), op in zip(
                    SIDES, taken, (reader.left, reader.right), strict=True
                )
            ),
            "what it is taken from is equal in both runs",
        ],
        "Feed both runs the same samples: compare the sampler, the batch size, and by which rank and number of ranks the data is"
        " shared out.",
    )


def _is_of_data(side: Side, op: int) -> bool:
    """Whether an op outside of modules takes a part of what no module made and no parameter is."""
    trace, contents = side.trace, side.contents
    if int(trace.ops.call[op]) or trace.ops.phase[op] or not contents.tokens.view[op]:
        return False
    source = int(trace.ops.inputs[op][0])
    maker = int(contents.maker[source])
    named = any(leaf.kind in ("parameter", "buffer") for leaf in side.leaves.of(source))
    return not named and (maker < 0 or not int(trace.ops.call[maker]))


def _loaded(e: Evidence) -> Cause | None:
    """A tensor without a name that is only copied into a parameter: what a checkpoint held."""
    leaf = e.origin.leaf.left or e.origin.leaf.right
    if e.origin.kind != "leaf" or leaf is None or leaf.name or leaf.kind != "constant":
        return None
    values = e.origin.values
    targets = {
        _copied_into(side, value)
        for side, value in ((e.case.left, values.left), (e.case.right, values.right))
        if value is not None
    }
    name = targets.pop() if len(targets) == 1 else None
    if name is None:
        return None
    found = _difference(e.case.left, e.case.right, values.left, values.right)
    return cause(
        "weights",
        "certain",
        f"other contents were loaded into {name}",
        [
            *(
                f"{side_name}: {side.place(op)} copies them"
                for side_name, side, op in e.sides
                if op is not None
            ),
            describe(found) if found is not None and found.comparable else "",
        ],
        "Load the same checkpoint in both runs: compare the paths and checksums of the checkpoint files.",
    )


def _copied_into(side: Side, value: int) -> str | None:
    """The name of the parameter that a tensor is copied into, whole or in parts, if no other op reads it."""
    ops, storage = side.trace.ops, side.trace.values.storage
    reads = np.unique(ops.inputs.rows()[storage[ops.inputs.values] == storage[value]])
    reads = reads[~side.contents.tokens.view[reads]]
    if len(reads) != 1 or operator(side.name(int(reads[0]))) != "copy":
        return None
    for leaf in side.trace.leaves:
        if leaf.kind in ("parameter", "shard") and leaf.name and leaf.when != "exit":
            made = side.lineage.of(leaf.value)
            if made.kind == "copied" and storage[made.root] == storage[value]:
                return leaf.name
    return None


def mask_input(e: Evidence) -> Cause | None:
    """The input that differs is an attention or padding mask."""
    found = input_(e)
    names = e.origin.names
    if found is None or not names or not any(m in names[0].rpartition(".")[2] for m in _MASKS):
        return None
    return cause(
        "mask",
        "certain",
        f"the mask {names[0]} differs before the first op that reads it",
        found.evidence,
        "Build the mask in the same way in both runs: the same lengths, the same padding side, and the same"
        " meaning of True.",
    )


def _shifted(e: Evidence) -> str:
    """Whether one small input is the other with elements added or dropped at an end."""
    values = e.origin.values
    if values.left is None or values.right is None:
        return ""
    a, b = e.case.left.fingerprint(values.left), e.case.right.fingerprint(values.right)
    if a is None or b is None or a.code != b.code or max(a.n, b.n) > len(a.sample) + len(b.sample):
        return ""
    x, y = a.sample.tolist(), b.sample.tolist()
    if len(x) != a.n or len(y) != b.n or len(x) == len(y):
        return ""
    longer, shorter, side = (x, y, "left") if len(x) > len(y) else (y, x, "right")
    extra = len(longer) - len(shorter)
    if longer[extra:] == shorter:
        return f"the {side} one is the other with {counted(extra, 'element')} more at its start: {longer[:extra]}"
    if longer[: len(shorter)] == shorter:
        return f"the {side} one is the other with {counted(extra, 'element')} more at its end: {longer[len(shorter) :]}"
    return ""


def _own_meta(side: Side, value: int) -> TensorMeta:
    """Of one sample's part of a value where samples are compared."""
    return side.one.meta(value) if side.one is not None else side.trace.meta(value)


def _of_other_sample(case: Case) -> tuple[str, str] | None:
    """What another choice of samples would compare, and a remedy; None where whole batches are compared."""
    left, right = case.left.one, case.right.one
    if left is None or right is None:
        return None
    meant = next(equal_samples(case, [left.sample], range(right.size)), None) or next(
        equal_samples(case, range(left.size), [right.sample]), None
    )
    if meant is not None:
        return (
            f"sample {meant[0]} of the left run and sample {meant[1]} of the right one have equal inputs",
            f"Compare the samples that are the same: --samples {meant[0]}:{meant[1]}.",
        )
    return (
        f"no recorded sample of the right run has the inputs of sample {left.sample} of the left one",
        "Look whether --samples names the same sample in both runs, and whether the lengths and pad_side given to"
        " opdrift.Batch are those of the inputs; else feed both runs the same tensors.",
    )


def equal_samples(
    case: Case, lefts: Iterable[int], rights: Iterable[int]
) -> Iterator[tuple[int, int]]:
    """Pairs of samples for which all inputs that both runs name and recorded are equal."""
    a, b = _inputs_of(case.left, lefts), _inputs_of(case.right, rights)
    for left, mine in a.items():
        for right, theirs in b.items():
            shared = mine.keys() & theirs.keys()
            if shared and all(mine[name] == theirs[name] for name in shared):
                yield left, right


def _inputs_of(side: Side, samples: Iterable[int]) -> dict[int, dict[str, tuple[int, ...]]]:
    """Per sample the keys of its part of the named inputs; of inputs that carry no sample nothing."""
    leaves = [leaf for leaf in side.leaves.starts if leaf.kind == "input" and leaf.name]
    found: dict[int, dict[str, tuple[int, ...]]] = {}
    for number in samples:
        if number >= RECORDED_SAMPLES:
            break
        prints = {leaf.name: side.trace.sample(leaf.value, number) for leaf in reversed(leaves)}
        found[number] = {name: each.key for name, each in prints.items() if each is not None}
    return found


def _difference(left: Side, right: Side, a: int | None, b: int | None) -> Difference | None:
    if a is None or b is None:
        return None
    x, y = left.fingerprint(a), right.fingerprint(b)
    return None if x is None or y is None else difference(x, y)
