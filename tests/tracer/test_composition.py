"""Wholes from parts: what the composition of digests says is what reading the whole would say."""

from __future__ import annotations

import itertools
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opdrift import composition, tfp1
from opdrift.composition import Content, Digests, Joints
from opdrift.tfp1 import Code


@st.composite
def contents(draw: st.DrawFn) -> tuple[int, list[int]]:
    """A component width and some components as bit patterns."""
    width = draw(st.sampled_from((1, 2, 4, 8)))
    bits = st.integers(0, (1 << 8 * width) - 1)
    return width, draw(st.lists(bits, max_size=40))


def content(components: list[int], width: int) -> Content:
    """What a recorder would say of components."""
    code = {1: Code.U8, 2: Code.BF16, 4: Code.F32, 8: Code.I64}[width]
    return Content(tfp1.raw_of(components, width), len(components), code)


@given(contents(), st.data())
def test_shards_placed_anywhere_make_up_the_buffer(drawn, data):
    """At any offsets, in any order, with gaps of zero bytes: as if the buffer had been read."""
    width, components = drawn
    cuts = sorted(data.draw(st.lists(st.integers(0, len(components)), max_size=5)))
    pieces = [components[a:b] for a, b in itertools.pairwise([0, *cuts, len(components)])]
    buffer: list[int] = []
    parts = []
    for piece in pieces:
        buffer += [0] * data.draw(st.integers(0, 4))
        parts.append((content(piece, width), len(buffer)))
        buffer += piece
    buffer += [0] * data.draw(st.integers(0, 4))
    shuffled = data.draw(st.permutations(parts))

    assert composition.placed(shuffled, len(buffer)) == content(buffer, width)
    assert composition.joined([part for part, _ in parts]) == content(components, width)


@given(contents(), st.integers(0, 9), st.integers(1, 255))
def test_padding_of_any_kind_is_taken_off(drawn, count, fill):
    """Zeros need no word; a fill is named by its bits."""
    width, components = drawn
    kept = content(components, width)
    padding = composition.filled(fill, count, kept.code)

    assert padding == content([fill] * count, width)
    assert (
        composition.without_padding(content(components + [0] * count, width), len(components))
        == kept
    )
    padded = content(components + [fill] * count, width)
    assert composition.without_padding(padded, len(components), padding) == kept


@given(contents().filter(lambda drawn: any(drawn[1])), st.integers(1, 5), st.integers(0, 3))
def test_a_gathered_buffer_is_told_from_one_with_shards_in_another_order(drawn, world, zeros):
    """Lengths may differ by zeros only where that is said."""
    width, components = drawn
    size = -(-len(components) // world)
    padded = components + [0] * (world * size - len(components))
    shards = [content(padded[r * size : (r + 1) * size], width) for r in range(world)]
    buffer, longer = content(padded, width), content(padded + [0] * zeros, width)

    assert composition.is_gathered(buffer, shards)
    assert composition.is_gathered(longer, shards, padded=True)
    assert composition.is_gathered(longer, shards) == (zeros == 0)
    turned = shards[1:] + shards[:1]
    assert composition.is_gathered(buffer, turned) == (padded[size:] + padded[:size] == padded)
    other = Code.U16 if buffer.code != Code.U16 else Code.I16
    assert not composition.is_gathered(Content(buffer.raw, buffer.n, other), shards)
    assert not composition.is_gathered(buffer, [])


def test_parts_that_cannot_make_up_a_buffer_are_refused():
    """Overlaps, parts beyond the end, several types, paddings of another length."""
    one, two = content([1, 2, 3], 4), content([1, 2, 3], 2)
    for parts, n, words in (
        ([(one, 0), (one, 2)], 9, "lies before component 3"),
        ([(one, 0), (one, 3)], 5, "reach to component 6 of a buffer of 5"),
        ([(one, 0), (two, 3)], 9, "BF16, F32"),
        ([], 9, "none"),
    ):
        with pytest.raises(ValueError, match=words):
            composition.placed(parts, n)
    with pytest.raises(ValueError, match="2 components are to be kept of 3, and the padding has 3"):
        composition.without_padding(one, 2, one)
    with pytest.raises(ValueError, match="4 components are to be kept of 3"):
        composition.without_padding(one, 4)
    with pytest.raises(ValueError, match="BF16, F32"):
        composition.joined([one, two])


@given(contents())
def test_the_same_content_in_another_type_is_another_content(drawn):
    """int8 and bool may have the same bits; equality asks for the type, too."""
    width, components = drawn
    one = content(components, width)

    assert composition.same(one, content(components, width))
    assert not composition.same(one, Content(one.raw, one.n, (one.code + 1) % 13))
    assert one.digits == len(components) * (2 if width == 8 else 1)


def test_what_a_recorder_and_a_trace_say_composes(tmp_path):
    """Digests of slices of a tensor, taken while recording, make up the fingerprint that its op has."""
    torch = pytest.importorskip("torch")
    import opdrift

    x = torch.randn(300, 7, generator=torch.Generator().manual_seed(0))
    with opdrift.record(tmp_path / "a.trace") as recorder:
        whole = x * 2
        parts = [recorder.digest(part) for part in whole.split((100, 1, 199))]
        columns = [recorder.digest(part) for part in whole.split(3, dim=1)]
    trace = opdrift.load(tmp_path / "a.trace")
    recorded = trace.fingerprint(trace.op(0).outputs[0])

    assert composition.is_gathered(recorded, parts)
    assert not composition.is_gathered(recorded, columns)


# ---- many at a time ------------------------------------------------------------------------------------


def digests(*parts: Content) -> Digests:
    """As a recorder gives them."""
    raws, lengths = [part.raw for part in parts], [part.n for part in parts]
    return Digests(array("Q", raws), tuple(lengths), parts[0].code)


PARTS = [content(list(range(k, 3 * k)), 2) for k in range(6)]


def test_digests_are_those_that_they_were_made_of():
    found = digests(*PARTS)

    assert list(found) == PARTS
    assert list(found[1::2]) == PARTS[1::2]
    assert found == PARTS
    assert found == digests(*PARTS)
    assert found != digests(*PARTS[1:], PARTS[0])
    assert found != PARTS[:-1]
    assert None not in found
    assert PARTS[2] in found


@pytest.mark.parametrize("groups", [[slice(0, 3), slice(3, 6)], [slice(0, 6, 2), slice(1, 6, 2)]])
def test_stretches_that_are_joined_again_and_again_are_what_they_are_end_to_end(groups):
    joints = Joints([part.n for part in PARTS], groups)
    wanted = [composition.joined(PARTS[group]) for group in groups]

    assert list(joints.of(digests(*PARTS))) == wanted
    assert list(joints.of(PARTS)) == wanted
    assert list(joints.of(digests(*reversed(PARTS)))) == [
        composition.joined(PARTS[::-1][group]) for group in groups
    ]


def test_what_could_not_be_read_is_joined_with_nothing():
    joints = Joints([part.n for part in PARTS], [slice(0, 2), slice(2, 6)])

    found = joints.of([PARTS[0], None, *PARTS[2:]])

    assert list(found) == [None, composition.joined(PARTS[2:])]
