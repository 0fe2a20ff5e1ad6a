"""`tfp1`: what a fingerprint means, in plain integers; used by the recording and the reading half.

The digest of a value is `raw = sum digit[i] * R**i mod P` over its digits: one digit for a component
of 1, 2 or 4 bytes, two (low half first) for one of 8 bytes. Components are the elements in row-major
order of the shape, whatever the strides; a complex element is two components. Being linear, digests of
parts compose into the digest of the whole at any offset, and a change of one digit can be located from
two digests. Two contents are equal when raw, number of components and component code are.

Source of every formula and constant here: docs/decisions/0004-fingerprint.md, the specification of
version 1. None of them may change without a new version.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

VERSION: Final = 1
P: Final = (1 << 61) - 1
"""The modulus, a Mersenne prime: reduction is a shift and an addition."""
R: Final = 0x05A49CFDA2BABFD3
"""The base: splitmix64("tfp1" as a little-endian integer, + 2) mod P.

A primitive root: its order is P - 1, so below 2**61 - 2 no two positions weigh the same."""
R_INVERSE: Final = pow(R, P - 2, P)
SIGN_SEED: Final = 0x7466703173676E00
SAMPLE_SEED: Final = 0x7466703170736E00
CHUNK_SEED: Final = 0x74660000
SAMPLES: Final = 32
SKETCH_BUCKETS: Final = 64
FOLDED_BELOW: Final = 4096
"""Contents of fewer components are stored with half of their buckets."""
ROW_LANES: Final = 64
"""The sketch and the sums work on rows of 64 components; 64 rows are a chunk."""

_M32: Final = (1 << 32) - 1
_M64: Final = (1 << 64) - 1


class Code(enum.IntEnum):
    """How a value's components are to be read; part of a fingerprint's identity."""

    F32 = 0
    F64 = 1
    F16 = 2
    BF16 = 3
    FP8 = 4
    I8 = 5
    U8 = 6
    """Also bool."""
    I16 = 7
    U16 = 8
    I32 = 9
    U32 = 10
    I64 = 11
    U64 = 12
    RAW = 13
    """Bytes without a number in them (sub-byte and quantised types): digest and sample only."""

    @property
    def bytes(self) -> int:
        """Width of a component."""
        return _BYTES[self]

    @property
    def is_float(self) -> bool:
        """Whether a component can be an infinity, a NaN or a subnormal number."""
        return self <= Code.FP8


_BYTES: Final = (4, 8, 2, 2, 1, 1, 1, 2, 2, 4, 4, 8, 8, 1)
_STRUCT: Final = ("<f", "<d", "<e", "", "", "<b", "<B", "<h", "<H", "<i", "<I", "<q", "<Q", "<B")


# -- mixing and modular arithmetic ---------------------------------------------------------------


def splitmix64(x: int) -> int:
    """Mix 64 bits (Steele, Lea and Flood, 2014: the output function of SplitMix64)."""
    x = (x + 0x9E3779B97F4A7C15) & _M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M64
    return x ^ (x >> 31)


def mix32(x: int) -> int:
    """Mix 32 bits: a multiplication by 2^32 / golden ratio, then MurmurHash3's finalizer."""
    x = (x * 0x9E3779B1) & _M32
    x ^= x >> 16
    x = (x * 0x85EBCA6B) & _M32
    x ^= x >> 13
    x = (x * 0xC2B2AE35) & _M32
    return x ^ (x >> 16)


def digits_per_component(component_bytes: int) -> int:
    """2 for components of 8 bytes, else 1."""
    return 2 if component_bytes == 8 else 1


def digits(n: int, component_bytes: int) -> int:
    """How many digits n components have: the exponent by which what follows them is shifted."""
    return n * digits_per_component(component_bytes)


def key64(raw: int, n: int, component_bytes: int) -> int:
    """One 64-bit identity of a content, for indexes: `raw` alone is 0 for zeros of any length."""
    return splitmix64(raw ^ splitmix64((n << 4) | component_bytes))


# -- digests and their composition ----------------------------------------------------------------


def digits_of(components: Iterable[int], component_bytes: int) -> Iterator[int]:
    """The digits of components given as integers (bit patterns; negative ones are taken modulo)."""
    mask = (1 << 8 * component_bytes) - 1
    for component in components:
        bits = component & mask
        if component_bytes == 8:
            yield bits & _M32
            yield bits >> 32
        else:
            yield bits


def raw_of(components: Iterable[int], component_bytes: int) -> int:
    """The digest by its definition: slow, for tests and for traces made by hand."""
    raw, weight = 0, 1
    for digit in digits_of(components, component_bytes):
        raw = (raw + digit * weight) % P
        weight = weight * R % P
    return raw


def compose(parts: Iterable[tuple[int, int]]) -> int:
    """The digest of a whole from its parts.

    Args:
        parts: The digest of each part and the digit offset at which it starts, in any order. What no
            part covers counts as zero bytes.

    Returns:
        `sum R**offset * raw mod P`.
    """
    return sum(raw * pow(R, offset, P) for raw, offset in parts) % P


def concat(parts: Iterable[tuple[int, int]]) -> int:
    """The digest of parts laid end to end, each given as its digest and its number of digits."""
    raw, offset = 0, 0
    for part, length in parts:
        raw = (raw + part * shift(offset)) % P
        offset += length
    return raw


def shift(offset: int) -> int:
    """By what digits count that lie behind so many others: `R**offset mod P`."""
    return pow(R, offset, P)


def remove_suffix(raw: int, kept_digits: int, suffix: int) -> int:
    """The digest of the first `kept_digits` digits, given that of what follows them.

    Zero padding needs no removal: zero digits at the end add nothing.
    """
    return (raw - suffix * pow(R, kept_digits, P)) % P


def constant(bits: int, n: int, component_bytes: int) -> int:
    """The digest of n equal components (a geometric series), such as padding or a filled tensor."""
    one = raw_of((bits,), component_bytes)
    ratio = pow(R, digits_per_component(component_bytes), P)
    return one * (pow(ratio, n, P) - 1) * pow(ratio - 1, P - 2, P) % P


def is_constant(raw: int, n: int, component_bytes: int) -> bool:
    """Whether a digest is that of n equal components; for components of 8 bytes only if their upper half is zero."""
    one = constant(1, n, component_bytes)
    return raw * pow(one, P - 2, P) % P < 1 << min(8 * component_bytes, 32)


# -- sketch and sample ----------------------------------------------------------------------------

_SIGN_WORDS: Final = tuple(splitmix64(SIGN_SEED + row) for row in range(64))
_JITTER: Final = tuple(splitmix64(SAMPLE_SEED + k) >> 32 for k in range(SAMPLES))


def _row_plan(row: int) -> tuple[int, int]:
    """What a row of 64 components does: its sign bits, and by what its buckets are xored."""
    mixed = mix32(row & _M32)
    turn = mix32(((row >> 6) ^ CHUNK_SEED) & _M32) & 63
    signs = _SIGN_WORDS[row & 63] ^ (_M64 if mixed & 1 else 0)
    return signs, ((mixed >> 1) & 7) << 3 ^ turn


def sketch_slot(index: int) -> tuple[int, int]:
    """The bucket (0 to 63) and sign (1 or -1) with which a component enters the sketch."""
    signs, xor = _row_plan(index >> 6)
    lane = index & 63
    return lane ^ xor, -1 if signs >> lane & 1 else 1


def row_buckets(component_bytes: int) -> int:
    """Buckets of a sketch as it is computed: 64 in float32, or 32 in float64 for components of 4 and 8 bytes."""
    return 32 if component_bytes >= 4 else 64


def stored_buckets(component_bytes: int, n: int) -> int:
    """Buckets of a stored sketch: half of them, the halves added, where it would be most of a small content's record.

    The stored bucket of a component is `sketch_slot(index)[0] % stored_buckets(...)`.
    """
    return row_buckets(component_bytes) // (2 if n < FOLDED_BELOW else 1)


def sample_positions(n: int) -> tuple[int, ...]:
    """Which components the sample holds: all of up to 32, else a jittered one of every n // 32."""
    if n <= SAMPLES:
        return tuple(range(n))
    stride = n >> 5
    return tuple(k * stride + (_JITTER[k] * stride >> 32) for k in range(SAMPLES))


# -- component values -----------------------------------------------------------------------------

FP8_FORMATS: Final = (
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
"""The fp8 family by torch's dtype names, in the order of the compiled core's tables."""


@cache
def fp8_values(name: str) -> tuple[float, ...]:
    """The 256 values of an fp8 format (OCP 8-bit floating point 1.0, OCP MX 1.0; fnuz: arXiv 2206.02915)."""
    if name == "float8_e8m0fnu":
        return (*(2.0 ** (byte - 127) for byte in range(255)), float("nan"))
    exponent_bits, mantissa_bits = (4, 3) if "e4m3" in name else (5, 2)
    bias = (1 << exponent_bits - 1) - (0 if name.endswith("fnuz") else 1)
    return tuple(_fp8_value(name, byte, mantissa_bits, bias) for byte in range(256))


def _fp8_value(name: str, byte: int, mantissa_bits: int, bias: int) -> float:
    sign = -1.0 if byte & 0x80 else 1.0
    magnitude = byte & 0x7F
    if name.endswith("fnuz") and byte == 0x80:
        return float("nan")
    if name == "float8_e4m3fn" and magnitude == 0x7F:
        return float("nan")
    if name == "float8_e5m2" and magnitude >= 0x7C:
        return sign * float("inf") if magnitude == 0x7C else float("nan")
    exponent, mantissa = divmod(magnitude, 1 << mantissa_bits)
    scale = 2.0 ** (max(exponent, 1) - bias - mantissa_bits)
    return sign * (mantissa + ((1 << mantissa_bits) if exponent else 0)) * scale


def fp8_smallest_normal(name: str) -> float:
    """The smallest normal value of an fp8 format; 0 for e8m0, all of whose values are normal."""
    if name == "float8_e8m0fnu":
        return 0.0
    bias = (
        7
        if name == "float8_e4m3fn"
        else 8
        if "e4m3" in name
        else 15
        if name == "float8_e5m2"
        else 16
    )
    return 2.0 ** (1 - bias)


def component_value(bits: int, code: Code, fp8: str = "float8_e4m3fn") -> float | int:
    """The number in a component, from its bit pattern (as in a sample); `fp8` names the format of FP8."""
    if code is Code.FP8:
        return fp8_values(fp8)[bits]
    if code is Code.BF16:
        return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])
    value: float | int = struct.unpack(_STRUCT[code], bits.to_bytes(code.bytes, "little"))[0]
    return value


# -- locating a single change ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SingleChange:
    """The one digit in which two contents of equal size differ."""

    index: int
    """The component."""
    half: int
    """0, or 1 for the high half of a component of 8 bytes."""
    delta: int
    """Right digit minus left digit."""


def locate_single_change(
    raw_left: int,
    raw_right: int,
    digits: int,
    component_bytes: int,
    *,
    bucket: int | None = None,
    limit: int = 1 << 20,
) -> SingleChange | None:
    """Find the only digit that differs, from the two digests alone.

    If only digit i differs, `raw_right - raw_left = delta * R**i` with a small delta, so every i is
    tried. A wrong i gives a small delta by chance with probability `2**(w + 1) / P` for digits of w
    bits: nothing for 8 and 16 bits, 2**-28 for 32 bits. There the sketch is the second witness.

    Args:
        raw_left: Digest of the left content.
        raw_right: Digest of the right content.
        digits: Number of digits of each.
        component_bytes: Width of a component.
        bucket: The only stored bucket in which the sketches differ; limits the search to its
            components. None if the sketches cannot tell (a changed NaN or sign of zero, raw bytes).
        limit: The most digits to try.

    Returns:
        The change; None if no single digit explains the difference, if more than one does, or if the
        search was not made: it would exceed `limit`, or chance hits be likelier than 1 in 1000.
    """
    difference = (raw_right - raw_left) % P
    per_component = digits_per_component(component_bytes)
    n = digits // per_component
    buckets = stored_buckets(component_bytes, n)
    lanes = ROW_LANES if bucket is None else SKETCH_BUCKETS // buckets
    tried = -(-n // ROW_LANES) * lanes * per_component
    bound = 1 << min(8 * component_bytes, 32)
    if difference == 0 or tried > limit or tried * 2 * bound > P // 1000:
        return None
    found = list(_small_deltas(difference, n, per_component, bound, bucket, buckets))
    return found[0] if len(found) == 1 else None


def changed_element(before: int, after: int, n: int, code: int) -> int | None:
    """The only element that differs between two contents, from their digests; None where these do not tell.

    Args:
        before: Digest of the one.
        after: Digest of the other, of as many components of the same kind.
        n: Number of components.
        code: Their kind, a `Code`.
    """
    width = Code(code).bytes
    change = locate_single_change(before, after, digits(n, width), width)
    return None if change is None else change.index


def _small_deltas(
    difference: int, n: int, per_component: int, bound: int, bucket: int | None, buckets: int
) -> Iterator[SingleChange]:
    """Every digit whose change by less than `bound` would make the difference."""
    back = [pow(R_INVERSE, digit, P) for digit in range(ROW_LANES * per_component)]
    row_step = pow(R_INVERSE, ROW_LANES * per_component, P)
    scaled = difference
    for row in range(-(-n // ROW_LANES)):
        for lane in _lanes_in_bucket(row, bucket, buckets):
            index = row * ROW_LANES + lane
            if index >= n:
                continue
            for half in range(per_component):
                delta = scaled * back[lane * per_component + half] % P
                if delta < bound:
                    yield SingleChange(index, half, delta)
                elif P - delta < bound:
                    yield SingleChange(index, half, delta - P)
        scaled = scaled * row_step % P


def _lanes_in_bucket(row: int, bucket: int | None, buckets: int) -> Sequence[int]:
    if bucket is None:
        return range(ROW_LANES)
    _, xor = _row_plan(row)
    return [stored ^ xor for stored in range(bucket, SKETCH_BUCKETS, buckets)]
