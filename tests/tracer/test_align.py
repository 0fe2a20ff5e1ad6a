"""Ops of two traces are paired in order, by scope, signature and value."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opdrift.align import Pairing, align
from opdrift.align.sequence import SEARCHED_CELLS, Level, increasing, match, refine
from opdrift.contents import Contents
from opdrift.diagnose import diff
from opdrift.records import Sides
from opdrift.testing import Builder, trace
from opdrift.tokens import mix
from opdrift.tracefile.reader import Trace


def paired(left: Trace, right: Trace, **options: object) -> list[tuple[int, int]]:
    found = pairing(left, right, **options)
    return list(zip(found.left.tolist(), found.right.tolist(), strict=True))


def pairing(left: Trace, right: Trace, **options: object) -> Pairing:
    return align(Contents(left), Contents(right), **options)  # type: ignore[arg-type]


def words(text: str) -> np.ndarray:
    return np.array([ord(c) for c in text], np.uint64)


# ---- whole traces -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("mm relu mm", "mm relu mm", [(0, 0), (1, 1), (2, 2)]),
        ("mm relu mm", "mm _to_copy relu mm*", [(0, 0), (1, 2), (2, 3)]),
        ("mm relu mm", "relu mm", [(1, 0), (2, 1)]),
        ("sin mm cos", "mm", [(1, 0)]),
        ("mm relu", "sin cos tan", []),
        ("", "mm", []),
    ],
)
def test_inserted_and_removed_ops_shift_nothing(left: str, right: str, expected: object):
    """What both have is paired; what only one has is left alone."""
    assert paired(trace(left), trace(right)) == expected


def in_precision(dtype: str) -> Trace:
    """A norm and a product, all in one dtype: no content and no layout of two precisions are equal."""
    build = Builder()
    x = build.leaf("x", kind="input", shape=(4, 4), dtype=dtype)
    with build.scope("norm"):
        scale = build.leaf("norm.weight", shape=(4,), dtype=dtype)
        y = build.op("native_layer_norm", x, scale, shape=(4, 4), dtype=dtype)
    with build.scope("fc"):
        weight = build.leaf("fc.weight", shape=(4, 4), dtype=dtype)
        y = build.op("mm", y, weight, shape=(4, 4), dtype=dtype)
    build.output(y)
    return build.build()


def test_ops_that_read_the_weight_of_one_name_are_pairs_in_another_precision():
    """Nothing of a model in bfloat16 is equal to the one in float32, and neither is its input."""
    assert paired(in_precision("float32"), in_precision("bfloat16")) == [(0, 0), (1, 1)]


def two_ways(build: Builder, *, fused: bool) -> int:
    """Attention with a bias: in ops, which copy the key, or fused, which copies the bias."""
    q, k = (build.op("mm", build.leaf(name, shape=(8, 8)), shape=(8, 8)) for name in "qk")
    bias = build.op("embedding", build.leaf("bias", shape=(8, 8)), shape=(8, 8))
    if fused:
        bias = build.op("clone", build.op("where", bias, shape=(8, 8)), shape=(8, 8))
        return build.op("attention", q, k, bias, shape=(8, 8))
    key = build.op("clone", build.op("neg", k, shape=(8, 8)), shape=(8, 8))
    return build.op("add", build.op("bmm", q, key, shape=(8, 8)), bias, shape=(8, 8))


def test_copies_of_unrelated_tensors_are_no_pair():
    """One run copies a key, the other a mask of the same shape, in the same scope."""
    runs = []
    for fused in (False, True):
        build = Builder()
        build.output(two_ways(build, fused=fused))
        runs.append(build.build())

    assert paired(*runs) == [(0, 0), (1, 1), (2, 2)]


def test_copies_of_what_an_op_more_has_changed_stay_a_pair():
    """Both copy what comes of the same product; one run changed it before."""
    runs = []
    for changed in (False, True):
        build = Builder()
        x = build.op("mm", build.leaf("q", shape=(8, 8)), shape=(8, 8))
        if changed:
            x = build.op("neg", x, shape=(8, 8))
        build.output(build.op("clone", x, shape=(8, 8)))
        runs.append(build.build())

    assert paired(*runs) == [(0, 0), (1, 2)]


def test_renamed_modules_are_found_by_structure():
    """Every path differs; types, ops and order are the same."""
    left = trace("fc{ mm } relu a{ mm b{ relu } }")
    right = trace("stem{ mm } relu c{ mm d{ relu } }")

    found = pairing(left, right)

    assert list(zip(found.left.tolist(), found.right.tolist(), strict=True)) == [
        (0, 0), (1, 1), (2, 2), (3, 3),
    ]  # fmt: skip
    assert "renamed" in found.method


def test_a_wrapper_around_the_model_is_looked_through():
    """One run calls the model inside another module, so all its paths carry a prefix."""
    left, right = trace("fc{ mm } relu a{ mm }"), trace("module{ fc{ mm } relu a{ mm } }")

    found = pairing(left, right)

    assert found.right_of.tolist() == [0, 1, 2]
    assert "module" in found.method


def test_a_map_pairs_what_structure_cannot():
    """Two modules that look alike: the user says which is which."""
    left = trace("a{ relu } b{ relu }")
    right = trace("q{ relu } p{ relu }")

    found = pairing(left, right, maps=[("a", "p"), ("b", "q")])

    assert found.right_of.tolist() == [1, 0]


def test_an_empty_side_of_a_map_is_the_root_module():
    """The encoder alone against the encoder in a larger model, and the other way round."""
    alone, within = trace("a{ relu } b{ sin }"), trace("encoder{ a{ relu } b{ sin } } head{ mm }")

    assert pairing(alone, within, maps=[("", "encoder")]).right_of.tolist() == [0, 1]
    assert pairing(within, alone, maps=[("encoder", "")]).right_of.tolist() == [0, 1, -1]


def modules(*names: str, weights: str | None = None, prefix: str = "") -> Trace:
    """A module a name, each with a product of its own; `weights` says which weight each one reads."""
    build = Builder()
    x = build.leaf("x", kind="input")
    for name, weight in zip(names, weights or "".join(names), strict=True):
        with build.scope(prefix + name):
            x = build.op("mm", x, build.leaf(f"{prefix}{name}.weight", content=weight))
    build.output(x)
    return build.build()


def test_modules_that_run_in_another_order_are_paired_by_name():
    """The scopes decide, not the position in the run."""
    assert paired(modules("q", "k"), modules("k", "q")) == [(0, 1), (1, 0)]


def test_modules_that_exchanged_their_names_are_told_by_their_weights():
    """By name the pairs would cross, by weights they do not."""
    assert paired(modules("a", "b", "c"), modules("b", "a", "c", weights="abc")) == [
        (0, 0), (1, 1), (2, 2),
    ]  # fmt: skip


def test_weights_in_the_wrong_modules_do_not_make_the_modules_others():
    """The modules run in their order, with each other's weights: that is a fault, and no renaming."""
    assert paired(modules("a", "b", "c"), modules("a", "b", "c", weights="bac")) == [
        (0, 0), (1, 1), (2, 2),
    ]  # fmt: skip


def test_a_module_more_in_front_shifts_the_names_of_all():
    """Layer 0 of the left run is layer 1 of the right one, and so on."""
    assert paired(modules("0", "1", "2", weights="abc"), modules("0", "1", "2", "3", weights="xabc")) == [
        (0, 1), (1, 2), (2, 3),
    ]  # fmt: skip


def test_renamed_modules_that_run_in_another_order_are_told_by_their_weights():
    """Neither names nor order say which is which."""
    left = modules("query", "key", "value", weights="qkv")

    assert paired(left, modules("v", "k", "q")) == [(0, 2), (1, 1), (2, 0)]


def test_an_op_that_moved_into_a_module_is_found_in_the_gap():
    """A functional call on one side, a module on the other."""
    assert paired(trace("mm fc{ mm } relu"), trace("mm mm relu")) == [(0, 0), (1, 1), (2, 2)]


def test_a_call_more_is_told_from_the_others_by_its_values():
    """The right run warms up with another input first: the second call is the one that corresponds."""
    left, right = Builder(), Builder()
    for build, inputs in ((left, ["x"]), (right, ["warm up", "x"])):
        for content in inputs:
            x = build.leaf("x", kind="input", content=content)
            with build.scope("fc"):
                build.op("mm", x, build.leaf("w"))

    assert paired(left.build(), right.build()) == [(0, 1)]


def test_equal_values_win_over_positions():
    """Of two equal ops the one with the same result is the counterpart."""
    left, right = Builder(), Builder()
    a, b = left.leaf("a"), left.leaf("b")
    left.op("relu", a)
    left.op("relu", b)
    right.leaf("a")
    right.op("relu", right.leaf("b"))

    assert paired(left.build(), right.build()) == [(1, 0)]


def test_casts_of_one_name_are_paired_by_their_layouts():
    """Only the second of two casts is in both runs: shapes belong into the key."""
    left, right = Builder(), Builder()
    for build, shapes in ((left, [(2, 3), (4, 5)]), (right, [(4, 5)])):
        for shape in shapes:
            build.op("_to_copy", build.leaf(f"w{shape}", shape=shape))

    assert paired(left.build(), right.build()) == [(1, 0)]


def test_backward_ops_belong_to_the_module_of_their_forward_op():
    """Forward and backward ops of a scope are paired apart."""
    left, right = Builder(), Builder()
    for build, extra in ((left, False), (right, True)):
        x = build.leaf("x", kind="input")
        with build.scope("fc"):
            y = build.op("mm", x, build.leaf("w"))
        if extra:
            build.op("sin", y)
        build.op("mm", y, x, phase="backward")

    assert paired(left.build(), right.build()) == [(0, 0), (1, 2)]


def test_a_stretch_that_is_too_long_to_search_is_named():
    """A long stretch in which nothing occurs once is paired by occurrence, and the pairing says so."""
    length = int(SEARCHED_CELLS**0.5) + 10
    left, right = Builder(), Builder()
    for build, pattern in ((left, ("exp", "relu")), (right, ("relu", "exp", "sin"))):
        x = build.leaf("x", kind="input", shape=(1,))
        for _ in range(length // 2):
            for name in pattern:
                build.op(name, x)

    found = pairing(left.build(), right.build())

    assert found.fallback_reason is not None
    assert "paired by occurrence" in found.fallback_reason
    assert len(found.left) >= length // 2


@st.composite
def programs(draw: st.DrawFn) -> str:
    """Words of a small program with scopes."""
    tokens = draw(
        st.lists(st.sampled_from(["mm", "relu", "sin", "exp", "a{", "b{", "}"]), max_size=12)
    )
    open_, kept = 0, []
    for token in tokens:
        if token == "}" and not open_:
            continue
        open_ += token.endswith("{") - (token == "}")
        kept.append(token)
    return " ".join([*kept, *["}"] * open_])


@settings(max_examples=60, deadline=None)
@given(programs())
def test_a_trace_aligns_with_itself(program: str):
    """Every op is its own counterpart."""
    built = trace(program)

    found = pairing(built, built)

    assert found.right_of.tolist() == list(range(len(built.ops)))


@settings(max_examples=60, deadline=None)
@given(programs(), programs())
def test_pairs_cover_each_op_once_and_mirror(a: str, b: str):
    """No op has two counterparts; exchanging the traces exchanges the pairs."""
    left, right = trace(a), trace(b)

    found, mirrored = pairing(left, right), pairing(right, left)

    assert len(set(found.right.tolist())) == len(found.right)
    assert found.left.tolist() == sorted(set(found.left.tolist()))
    assert sorted(zip(found.left.tolist(), found.right.tolist(), strict=True)) == sorted(
        zip(mirrored.right.tolist(), mirrored.left.tolist(), strict=True)
    )
    assert all(found.left_of[j] == i for i, j in zip(found.left, found.right, strict=True))


# ---- the same program with changes ---------------------------------------------------------------------


@dataclass(frozen=True)
class Edited:
    """A chain of modules, and how the other run of it differs; all numbers are places in `ops`.

    Attributes:
        ops: Name of the op of each place; there are four a module.
        inserted: An op that changes no value stands before these, in the other run.
        renamed: Modules that have another name there.
        fault: This op returns something else there; None for none.
    """

    ops: tuple[str, ...]
    inserted: frozenset[int]
    renamed: frozenset[int]
    fault: int | None

    def build(self, *, edited: bool) -> tuple[Trace, list[int]]:
        """The trace, and the index of the op of each place."""
        build = Builder()
        value = build.leaf("x", kind="input")
        where: list[int] = []
        count = 0
        for start in range(0, len(self.ops), 4):
            other = edited and start // 4 in self.renamed
            with build.scope(f"{'part' if other else 'layer'}{start // 4}"):
                for place in range(start, min(start + 4, len(self.ops))):
                    if edited and place in self.inserted:
                        value = build.op("clone", value)
                        count += 1
                    name = self.ops[place]
                    more = [build.leaf(f"w{place}")] if name == "mm" else []
                    change = "*" if edited and place == self.fault else ""
                    value = build.op(name, value, *more, change=change)
                    where.append(count)
                    count += 1
        build.output(value)
        return build.build(), where


@st.composite
def edited_programs(draw: st.DrawFn) -> Edited:
    """Chains in which ops look alike, so that only their places and values tell them apart."""
    ops = draw(st.lists(st.sampled_from(["mm", "relu", "sin"]), min_size=1, max_size=16))
    places = st.integers(0, len(ops) - 1)
    return Edited(
        tuple(ops),
        draw(st.frozensets(places, max_size=5)),
        draw(st.frozensets(st.integers(0, 3), max_size=4)),
        draw(st.none() | places),
    )


@settings(max_examples=150, deadline=None)
@given(edited_programs())
def test_ops_keep_their_counterparts_through_changes(program: Edited):
    """Whatever is inserted and renamed: each op is paired with itself up to the fault, and none with another's."""
    (left, here), (right, there) = program.build(edited=False), program.build(edited=True)

    pairs = dict(paired(left, right))

    certain = len(here) if program.fault is None else program.fault + 1
    assert [pairs.get(i) for i in here[:certain]] == there[:certain]


@settings(max_examples=100, deadline=None)
@given(edited_programs())
def test_the_fault_is_the_first_divergence_from_either_side(program: Edited):
    """`diff(b, a)` mirrors `diff(a, b)`: the same verdict at the same ops, with the sides exchanged."""
    (left, here), (right, there) = program.build(edited=False), program.build(edited=True)

    found, mirrored = diff(left, right), diff(right, left)

    if program.fault is None:
        assert (found.verdict, mirrored.verdict) == ("identical", "identical")
        return
    assert found.first is not None
    assert mirrored.first is not None
    seq = Sides(here[program.fault] + 1, there[program.fault] + 1)
    assert (found.first.seq, mirrored.first.seq) == (seq, Sides(seq.right, seq.left))
    assert [d.material for d in found.origins] == [d.material for d in mirrored.origins] == [True]


# ---- sequences ----------------------------------------------------------------------------------------


def matched(left: str, right: str, **options: bool) -> list[tuple[int, int]]:
    i, j = match(words(left), words(right), **options).sorted()
    return list(zip(i.tolist(), j.tolist(), strict=True))


@settings(max_examples=150, deadline=None)
@given(st.text("abcd", max_size=30), st.text("abcd", max_size=30))
def test_matches_are_equal_and_keep_the_order(left: str, right: str):
    """Pairs are of equal words, ascending on both sides."""
    pairs = matched(left, right)

    assert all(left[i] == right[j] for i, j in pairs)
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(pairs))


@settings(max_examples=100, deadline=None)
@given(st.text("abcdefgh", max_size=40), st.integers(0, 40), st.text("xyz", min_size=1, max_size=5))
def test_an_insertion_costs_no_pair(text: str, at: int, inserted: str):
    """All of the shorter sequence is found in the longer one."""
    at = min(at, len(text))

    pairs = matched(text, text[:at] + inserted + text[at:])

    assert [i for i, _ in pairs] == list(range(len(text)))


def test_anchored_matching_takes_only_what_occurs_once():
    """A word that repeats is no anchor; one that occurs once in both is."""
    assert matched("zaaz", "yaby", anchored=True) == []
    assert matched("zqz", "yabqay", anchored=True) == [(1, 3)]


def test_runs_of_words_anchor_what_single_words_cannot():
    """Long sequences over two letters are still split near linearly."""
    random = np.random.default_rng(3)
    left = random.integers(0, 2, 20_000).astype(np.uint64)
    right = np.concatenate([left[:10_000], np.array([7], np.uint64), left[10_000:]])[1:]

    found = match(left, right)
    i, _ = found.sorted()

    assert found.cut_short is None
    assert len(i) >= 19_999 - 64


def test_a_window_without_anchors_is_paired_by_occurrence_and_named():
    """Beyond the searched size the k-th occurrence meets the k-th."""
    half = int(SEARCHED_CELLS**0.5)
    left = np.tile(np.array([1, 2], np.uint64), half)
    right = np.tile(np.array([2, 1, 3], np.uint64), half)

    found = match(left, right)
    i, j = found.sorted()

    assert found.cut_short is not None
    assert len(i) >= half
    assert np.all(left[i] == right[j])
    assert np.all(np.diff(j) > 0)


@given(st.lists(st.integers(0, 50), unique=True, max_size=30))
def test_increasing_picks_an_increasing_subsequence(values: list[int]):
    """It increases, and no longer one is missed at a glance: a sorted list is kept whole."""
    array = np.array(values, np.int64)

    kept = increasing(array)

    assert np.all(np.diff(array[kept]) > 0)
    assert len(increasing(np.sort(array))) == len(values)


def test_later_levels_work_in_the_gaps_of_earlier_ones():
    """The strict level pairs b with b; the loose one pairs what lies between."""
    strict = words("pbq"), words("rbs")
    loose = words("xxx"), words("xxx")

    found = refine([Level(*strict), Level(*loose)])

    assert list(zip(found.left.tolist(), found.right.tolist(), found.level.tolist(), strict=True)) == [
        (0, 0, 1), (1, 1, 0), (2, 2, 1),
    ]  # fmt: skip


def test_mixing_words_depends_on_the_order():
    """A run of words is told from the same words in another order."""
    a, b = words("ab"), words("ba")

    assert not np.any(mix(a, b) == mix(b, a))
