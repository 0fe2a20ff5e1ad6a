"""The definition of tfp1: published vectors, composition, and the search for a single change."""

import itertools
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opdrift import tfp1
from opdrift.tfp1 import Code, SingleChange

WIDTHS = (1, 2, 4, 8)


def float_bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


@st.composite
def contents(draw):
    """A component width and some components as bit patterns."""
    width = draw(st.sampled_from(WIDTHS))
    bits = st.integers(0, (1 << 8 * width) - 1)
    return width, draw(st.lists(bits, max_size=40))


@pytest.mark.parametrize(
    ("components", "width", "raw", "key"),
    [
        ([float_bits(i) for i in range(8)], 4, 0x15599BA5A616DD0F, 0x9CFD79F80FF931A9),
        ([float_bits(i) >> 16 for i in range(8)], 2, 0x1BA1F5599BA5A616, 0xAE4831903493F759),
        ([i - 4 for i in range(8)], 8, 0x05CF018C9A7C7924, 0x4A825DE4B438B726),
        (list(range(256)), 1, 0x1DCC24EB2F604662, 0x4D04B3A1405B09F5),
        ([1, 0, 1], 1, 0x0BAFF1EBC727AAFF, 0xFD0E8FCC21F333DA),
        ([float_bits(v) for v in (1, 2, 3, -4)], 4, 0x126B7B2B18758EA4, 0x5160E92253C3FC58),
        ([], 4, 0, 0xA0567EF80DEDF5CB),
        ([1 << 63, 0x7FF8 << 48], 8, 0x04D3EA896007E966, 0x11B1C9B603ED2EFD),
    ],
)
def test_digests_and_keys_are_those_of_the_specification(components, width, raw, key):
    """The table of test vectors of the specification (float32 ones(100000) is in the next test)."""
    assert tfp1.raw_of(components, width) == raw
    assert tfp1.key64(raw, len(components), width) == key


@pytest.mark.parametrize(("bits", "width"), [(0x3F80, 2), (0x3F800000, 4), (0, 4), (255, 1)])
def test_a_constant_content_is_told_by_its_digest(bits: int, width: int):
    raw = tfp1.constant(bits, 7, width)
    other = tfp1.raw_of([bits] * 6 + [bits ^ 1], width)

    assert tfp1.is_constant(raw, 7, width)
    assert not tfp1.is_constant(other, 7, width)


def test_a_constant_tensor_has_the_published_digest():
    """Vector float32 ones(100000), from the closed form."""
    raw = tfp1.constant(float_bits(1.0), 100_000, 4)

    assert raw == 0x13603794BEDE10CA
    assert tfp1.key64(raw, 100_000, 4) == 0x4EAA5B9EB4FD0F5A


def test_the_base_is_a_primitive_root_so_no_two_positions_weigh_the_same():
    """R has order P - 1: no power with an exponent (P - 1) / q is 1, for the primes q of P - 1."""
    primes = (2, 3, 5, 7, 11, 13, 31, 41, 61, 151, 331, 1321)
    rest = tfp1.P - 1
    for q in primes:
        while rest % q == 0:
            rest //= q

    assert rest == 1
    assert all(pow(tfp1.R, (tfp1.P - 1) // q, tfp1.P) != 1 for q in primes)
    assert tfp1.splitmix64(int.from_bytes(b"tfp1", "little") + 2) % tfp1.P == tfp1.R


def test_sketch_slots_are_those_of_the_specification():
    """Bucket and sign at the edges of a row, of a chunk, and far out."""
    slots = {i: tfp1.sketch_slot(i) for i in (0, 1, 63, 64, 65, 4095, 4096, 10**6)}

    assert slots == {
        0: (50, 1),
        1: (51, 1),
        63: (13, -1),
        64: (26, 1),
        65: (27, -1),
        4095: (45, 1),
        4096: (26, -1),
        10**6: (1, -1),
    }


def test_sample_positions_are_those_of_the_specification():
    """All components of a small tensor; increasing positions, one in each 32nd, of a larger one."""
    assert tfp1.sample_positions(32) == tuple(range(32))
    positions = tfp1.sample_positions(1000)
    assert positions[:4] == (28, 51, 62, 118)
    assert positions[-2:] == (945, 989)
    for n in (33, 63, 64, 4097, 10**9):
        assert all(
            k * (n >> 5) <= p < (k + 1) * (n >> 5) for k, p in enumerate(tfp1.sample_positions(n))
        )


@given(contents(), st.data())
def test_parts_compose_into_the_whole_wherever_it_is_cut(content, data):
    """compose and concat of the parts give the digest of the whole."""
    width, components = content
    cuts = sorted(data.draw(st.lists(st.integers(0, len(components)), max_size=5)))
    edges = [0, *cuts, len(components)]
    parts = [components[a:b] for a, b in itertools.pairwise(edges)]
    raws = [tfp1.raw_of(part, width) for part in parts]
    whole = tfp1.raw_of(components, width)

    assert (
        tfp1.concat((r, tfp1.digits(len(p), width)) for r, p in zip(raws, parts, strict=True))
        == whole
    )
    offsets = [tfp1.digits(start, width) for start in edges[:-1]]
    assert tfp1.compose(reversed(list(zip(raws, offsets, strict=True)))) == whole


@given(contents(), st.integers(0, 30), st.integers(0, 255))
def test_padding_at_the_end_can_be_taken_off(content, count, fill):
    """Zeros need nothing; any other padding is subtracted, constant or not."""
    width, components = content
    raw = tfp1.raw_of(components, width)
    kept = tfp1.digits(len(components), width)

    assert tfp1.raw_of(components + [0] * count, width) == raw
    padded = tfp1.raw_of(components + [fill] * count, width)
    assert tfp1.remove_suffix(padded, kept, tfp1.constant(fill, count, width)) == raw


def test_equal_raws_of_unequal_lengths_have_different_keys():
    """Zeros of any length have raw 0; the key tells them apart."""
    keys = {tfp1.key64(0, n, width) for n in range(100) for width in WIDTHS}

    assert len(keys) == 400


@given(contents().filter(lambda c: len(c[1]) > 0), st.data())
def test_a_single_change_is_located_with_its_delta(content, data):
    """One digit changed: the component, the half and the exact difference come back."""
    width, components = content
    index = data.draw(st.integers(0, len(components) - 1))
    half = data.draw(st.integers(0, 1)) if width == 8 else 0
    digit = (components[index] >> 32 * half) & 0xFFFFFFFF
    new = data.draw(st.integers(0, (1 << min(8 * width, 32)) - 1).filter(lambda d: d != digit))
    changed = list(components)
    changed[index] += (new - digit) << 32 * half

    found = tfp1.locate_single_change(
        tfp1.raw_of(components, width),
        tfp1.raw_of(changed, width),
        tfp1.digits(len(components), width),
        width,
    )

    assert found == SingleChange(index, half, new - digit)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_sketch_bucket_narrows_the_search_to_its_components(width):
    """With the bucket of the change a tensor is searched that would be refused without it."""
    n, index = 3_000_000, 2_345_678
    delta = 5
    offset = tfp1.digits(index, width)
    right = tfp1.compose([(delta, offset)])
    digits = tfp1.digits(n, width)
    bucket = tfp1.sketch_slot(index)[0] % tfp1.stored_buckets(width, n)
    other = (bucket + 1) % tfp1.stored_buckets(width, n)

    assert tfp1.locate_single_change(0, right, digits, width) is None
    assert tfp1.locate_single_change(0, right, digits, width, bucket=bucket) == SingleChange(
        index, 0, delta
    )
    assert tfp1.locate_single_change(0, right, digits, width, bucket=other) is None


@pytest.mark.parametrize("width", WIDTHS)
def test_two_changes_are_not_taken_for_one(width):
    """Two changed digits have no single explanation; equal digests have none either."""
    left = tfp1.raw_of([3] * 500, width)
    right = tfp1.raw_of([3] * 100 + [4] + [3] * 200 + [9] + [3] * 198, width)
    digits = tfp1.digits(500, width)

    assert tfp1.locate_single_change(left, right, digits, width) is None
    assert tfp1.locate_single_change(left, left, digits, width) is None


def test_a_search_in_which_chance_hits_are_likely_is_not_made():
    """32-bit digits without the sketch: beyond some 260,000 positions a hit would prove nothing."""
    right = tfp1.compose([(1, 7)])

    assert tfp1.locate_single_change(0, right, 250_000, 4) == SingleChange(7, 0, 1)
    assert tfp1.locate_single_change(0, right, 400_000, 4, limit=1 << 40) is None
    assert tfp1.locate_single_change(0, right, 400_000, 2) == SingleChange(7, 0, 1)


@pytest.mark.parametrize(
    ("bits", "code", "value"),
    [
        (0x3FC00000, Code.F32, 1.5),
        (0xBFF8000000000000, Code.F64, -1.5),
        (0x3E00, Code.F16, 1.5),
        (0xBFC0, Code.BF16, -1.5),
        (0x3C, Code.FP8, 1.5),
        (0xFF, Code.I8, -1),
        (0xFF, Code.U8, 255),
        (0x8000, Code.I16, -32768),
        (0xFFFFFFFF, Code.I32, -1),
        (0xFFFFFFFFFFFFFFFF, Code.I64, -1),
        (0xFFFFFFFFFFFFFFFF, Code.U64, 2**64 - 1),
        (0x80, Code.RAW, 128),
    ],
)
def test_sample_bits_read_as_the_number_they_are(bits, code, value):
    """Samples hold bit patterns; this is how a report turns them into numbers."""
    assert tfp1.component_value(bits, code) == value


def test_the_definition_needs_only_the_standard_library():
    """Both halves use it, so it must pull in neither torch nor numpy."""
    program = (
        "import runpy, sys; runpy.run_path(sys.argv[1]);"
        "print(sorted({m.split('.')[0] for m in sys.modules} - sys.stdlib_module_names - {'__main__'}))"
    )
    command = [sys.executable, "-I", "-S", "-c", program, tfp1.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
