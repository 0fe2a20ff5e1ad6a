"""The fingerprint as one Triton kernel, for CUDA and ROCm. Imported only where such a device is met.

A tile is 16 chunks of 4,096 components (one chunk for small tensors), a program does some tiles in a row
and writes one partial row. As in the compiled core the weight r^(64 row) is the same for all lanes of a
row and split into limbs, so a component costs two or three multiplications into sums that stay in
registers; what depends on the lane is multiplied in once at the end. Nothing is added up atomically, so
results do not depend on timing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# Triton compiles these functions: annotations are for it, and helpers are inlined.

import triton
import triton.language as tl

# ---- the table of one kind of digits, in int64 words: what is not worth computing for each component ----

WEIGHTS = tl.constexpr(0)  # 64 rows of 4: the limbs of the weight of a row
LANES = tl.constexpr(256)  # 16 chunks of 64: the weights of a tile's lanes
SIGNS = tl.constexpr(1280)  # 64: tfp1's sign words
JITTER = tl.constexpr(1344)  # 32: where samples are taken
STEP = tl.constexpr(1376)  # the weight of a tile
SMALLEST = tl.constexpr(1377)  # the smallest normal number of an fp8 format, as float32 bits
VALUES = tl.constexpr(1378)  # 256: the values of an fp8 format, as float32 bits
TABLE_WORDS = tl.constexpr(1634)

# ---- tfp1.Code, and where the fields of partials.PARTIAL start ----

F32 = tl.constexpr(0)
F64 = tl.constexpr(1)
F16 = tl.constexpr(2)
BF16 = tl.constexpr(3)
FP8 = tl.constexpr(4)
I8 = tl.constexpr(5)
U8 = tl.constexpr(6)
I16 = tl.constexpr(7)
U16 = tl.constexpr(8)
I32 = tl.constexpr(9)
U32 = tl.constexpr(10)
I64 = tl.constexpr(11)
U64 = tl.constexpr(12)
RAW = tl.constexpr(13)
COUNTS_AT = tl.constexpr(4)
SUMS_AT = tl.constexpr(9)
SAMPLE_AT = tl.constexpr(16)
SKETCH_AT = tl.constexpr(48)
PARTIAL_WORDS = tl.constexpr(112)

LARGE_CHUNKS = tl.constexpr(16)
SMALL_ROWS = tl.constexpr(16)
PRIME = tl.constexpr((1 << 61) - 1)
CHUNK_SEED = tl.constexpr(0x74660000)


@triton.jit
def _reduce(x):
    """Weakly: to below 2^61 + 8."""
    return (x & PRIME) + (x >> 61)


@triton.jit
def _turn(x, by: tl.constexpr):
    """`x * 2^by mod P`, of x below 2^61 + 8."""
    rest: tl.constexpr = 61 - by
    mask: tl.constexpr = (1 << rest) - 1
    return ((x & mask) << by) + (x >> rest)


@triton.jit
def _multiply(x, y):
    """`x * y mod P`, weakly, of x below 2^62 and y below 2^61."""
    low = x * y
    high = tl.umulhi(x, y)
    return _reduce((low & PRIME) + ((low >> 61) | (high << 3)))


@triton.jit
def _join(first, second, third, narrow: tl.constexpr):
    """The sums of limbs put together, below 2^62: limbs of 31 and 30 bits, or of 21, 20 and 20."""
    if narrow:
        joined = _reduce(first) + _turn(_reduce(second), 31)
    else:
        joined = _reduce(_reduce(first) + _turn(_reduce(second), 21)) + _turn(_reduce(third), 41)
    return _reduce(joined)


@triton.jit
def _mix32(x):
    x = x * 0x9E3779B1
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _load(item_ptr, base, at, mask, inner, strided: tl.constexpr):
    """Components of an item, from `base` on; if `strided`, `inner` of them lie side by side."""
    if strided:
        at = base + at
        at = (at // inner) * (tl.num_programs(1) * inner) + at % inner
        u = tl.load(item_ptr + at, mask=mask, other=0)
    else:  # the base is the same for all: what differs is computed with 32 bits
        u = tl.load(item_ptr + base + at, mask=mask, other=0)
    return u


@triton.jit
def _digit(u, code: tl.constexpr):
    """The bit pattern of a component, zero-extended."""
    if (code == F64) or (code == I64) or (code == U64):
        d = u.to(tl.uint64, bitcast=True)
    elif (code == F32) or (code == I32) or (code == U32):
        d = u.to(tl.uint32, bitcast=True).to(tl.uint64)
    elif (code == F16) or (code == BF16) or (code == I16) or (code == U16):
        d = u.to(tl.uint16, bitcast=True).to(tl.uint64)
    else:
        d = u.to(tl.uint8, bitcast=True).to(tl.uint64)
    return d


@triton.jit
def _value(u, table_ptr, code: tl.constexpr):
    """The number in a component: float64 where float32 would round it, else float32."""
    if code == F32:
        v = u.to(tl.float32, bitcast=True)
    elif code == F64:
        v = u.to(tl.float64, bitcast=True)
    elif code == F16:
        v = u.to(tl.float16, bitcast=True).to(tl.float32)
    elif code == BF16:
        v = (u.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif code == FP8:
        byte = u.to(tl.uint8, bitcast=True).to(tl.int32)
        v = tl.load(table_ptr + VALUES + byte).to(tl.int32).to(tl.float32, bitcast=True)
    elif (code == I8) or (code == I16):
        v = u.to(tl.float32)
    elif code == U8:
        v = u.to(tl.uint8, bitcast=True).to(tl.float32)
    elif code == U16:
        v = u.to(tl.uint16, bitcast=True).to(tl.float32)
    elif code == U32:
        v = u.to(tl.uint32, bitcast=True).to(tl.float64)
    elif code == U64:
        v = u.to(tl.uint64, bitcast=True).to(tl.float64)
    else:
        v = u.to(tl.float64)
    return v


@triton.jit
def _store_double(at, x):
    tl.store(at, x.to(tl.float64).to(tl.int64, bitcast=True))


@triton.jit
def _store_digest(at, weighted):
    """As two sums over lanes that stay below 2^63."""
    tl.store(at, tl.sum((weighted & 0xFFFFFFFF).to(tl.int64)))
    tl.store(at + 1, tl.sum((weighted >> 32).to(tl.int64)))


@triton.jit
def _store_sample(
    item_ptr, out_ptr, table_ptr, n, inner, code: tl.constexpr, strided: tl.constexpr
):
    """The components at tfp1.sample_positions(n)."""
    k = tl.arange(0, 32)
    stride = (n >> 5).to(tl.uint64)
    jitter = tl.load(table_ptr + JITTER + k).to(tl.uint64)
    spread = (k.to(tl.uint64) * stride + (jitter * stride >> 32)).to(tl.int64)
    at = tl.where(n <= 32, k.to(tl.int64), spread)
    u = _load(item_ptr, 0, at, k < n, inner, strided)
    tl.store(out_ptr + SAMPLE_AT + k, _digit(u, code).to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["n", "tiles", "inner"])
def fingerprint(
    x_ptr,
    out_ptr,
    table_ptr,
    n: tl.int64,
    tiles: tl.int32,
    inner: tl.int64,
    code: tl.constexpr,
    strided: tl.constexpr,
    small: tl.constexpr,
):
    """Write the partial rows of a tensor's items: program (g, b) does `tiles` tiles from tile g * tiles of item b.

    Args:
        x_ptr: Components, as integers of their width.
        out_ptr: The rows: of item 0, of item 1, ...
        table_ptr: The table for the component's digits.
        n: Components of an item.
        tiles: Tiles of a program, below 1000: counts of a lane are kept in 16 bits.
        inner: Components of an item that lie side by side.
        code: tfp1.Code.
        strided: Whether items are of several pieces of `inner` components.
        small: Whether n is at most 4,096; then there is one program an item, and one tile.
    """
    wide: tl.constexpr = (code == F64) or (code == I64) or (code == U64)
    narrow: tl.constexpr = ((code >= F16) and (code <= U16)) or (code == RAW)
    double: tl.constexpr = wide or (code == I32) or (code == U32)
    floating: tl.constexpr = code <= FP8
    infinite: tl.constexpr = 0x7FF0000000000000 if double else 0x7F800000
    chunks: tl.constexpr = 1 if small else LARGE_CHUNKS
    rows: tl.constexpr = SMALL_ROWS if small else 1  # of a chunk, done at once
    height: tl.constexpr = chunks * rows
    tile: tl.constexpr = chunks * 4096

    program = tl.program_id(0).to(tl.int64)
    item_ptr = x_ptr + tl.program_id(1).to(tl.int64) * inner
    side = tl.arange(0, height)[:, None]
    chunk = side // rows
    lane = tl.arange(0, 64)[None, :]

    digest = tl.zeros((height, 64), dtype=tl.uint64)
    digest_upper = tl.zeros((height, 64), dtype=tl.uint64)
    total = tl.zeros((height, 64), dtype=tl.float64)
    squares = tl.zeros((height, 64), dtype=tl.float64)
    sketch = tl.zeros((64,), dtype=tl.float64)
    if double:
        low = tl.full((height, 64), float("inf"), tl.float64)
        high = tl.full((height, 64), float("-inf"), tl.float64)
    else:
        low = tl.full((height, 64), float("inf"), tl.float32)
        high = tl.full((height, 64), float("-inf"), tl.float32)
    nans = tl.zeros((height, 64), dtype=tl.int32)  # and subnormals, 16 bits up
    infinities = tl.zeros((height, 64), dtype=tl.int32)  # and negative ones, 16 bits up
    zeros = tl.zeros((height, 64), dtype=tl.int32)
    if code == FP8:
        smallest = tl.load(table_ptr + SMALLEST).to(tl.uint32)
    elif code == F16:
        smallest = 0x38800000
    else:
        smallest = 0x00800000
    step = tl.load(table_ptr + STEP).to(tl.uint64, bitcast=True)

    for back in range(tiles):  # from the last to the first: Horner's scheme
        base = (program * tiles + (tiles - 1 - back)) * tile
        first = tl.zeros((height, 64), dtype=tl.uint64)
        second = tl.zeros((height, 64), dtype=tl.uint64)
        third = tl.zeros((height, 64), dtype=tl.uint64)
        first_upper = tl.zeros((height, 64), dtype=tl.uint64)
        second_upper = tl.zeros((height, 64), dtype=tl.uint64)
        third_upper = tl.zeros((height, 64), dtype=tl.uint64)
        lanes = tl.zeros((height, 64), dtype=tl.float64)
        first_row = (base // 64).to(tl.uint32)  # tfp1 takes rows modulo 2^32
        left = tl.minimum(tl.maximum(n - base, 0), tile).to(tl.int32)
        chunk_rows = (tl.minimum(left, 4096) + 63) // 64  # of the first, which has the most
        for turn in range((chunk_rows + rows - 1) // rows):
            row = turn * rows + side % rows
            start = chunk * 4096 + row * 64
            mask = start + lane < left
            u = _load(item_ptr, base, start + lane, mask, inner, strided)
            digit = _digit(u, code)
            weight0 = tl.load(table_ptr + WEIGHTS + row * 4).to(tl.uint32).to(tl.uint64)
            weight1 = tl.load(table_ptr + WEIGHTS + row * 4 + 1).to(tl.uint32).to(tl.uint64)
            if wide:
                upper = digit >> 32
                digit = digit & 0xFFFFFFFF
                first_upper += upper * weight0
                second_upper += upper * weight1
            first += digit * weight0
            second += digit * weight1
            if not narrow:
                weight2 = tl.load(table_ptr + WEIGHTS + row * 4 + 2).to(tl.uint32).to(tl.uint64)
                third += digit * weight2
                if wide:
                    third_upper += upper * weight2

            if code != RAW:
                v = _value(u, table_ptr, code)
                if double:
                    word = v.to(tl.uint64, bitcast=True)
                    magnitude = word & 0x7FFFFFFFFFFFFFFF
                    negative = (word >> 63) != 0
                else:
                    word = v.to(tl.uint32, bitcast=True)
                    magnitude = word & 0x7FFFFFFF
                    negative = (word >> 31) != 0
                zeros += ((magnitude == 0) & mask).to(tl.int32)
                finite = magnitude < infinite
                if floating:
                    if code == F64:
                        subnormal = (magnitude != 0) & (magnitude < 0x0010000000000000)
                    else:
                        subnormal = (magnitude != 0) & (magnitude < smallest)
                    # what lies beyond n was loaded as 0: none of these
                    nans += (magnitude > infinite).to(tl.int32) + (subnormal.to(tl.int32) << 16)
                    infinity = magnitude == infinite
                    infinities += (infinity & (negative == 0)).to(tl.int32)
                    infinities += (infinity & negative).to(tl.int32) << 16
                kept = finite & mask
                low = tl.where(kept & (v < low), v, low)
                high = tl.where(kept & (v > high), v, high)
                x = tl.where(kept, v, 0.0).to(tl.float64)
                total += x
                squares += x * x

                # the sketch: this lane takes the component that belongs into its bucket, from cache
                mixed = _mix32((first_row + chunk * 64 + row).to(tl.uint32))
                other = lane ^ (((mixed >> 1) & 7) << 3).to(tl.int32)
                at = start + other
                within = at < left
                u = _load(item_ptr, base, at, within, inner, strided)
                v = _value(u, table_ptr, code)
                kept = tl.abs(v) < float("inf")
                if code == FP8:  # a byte of 0, as loaded beyond n, is 2^-127 in float8_e8m0fnu
                    kept = kept & within
                x = tl.where(kept, v, 0.0).to(tl.float64)
                signs = tl.load(table_ptr + SIGNS + row).to(tl.uint64, bitcast=True)
                sign = (signs >> other.to(tl.uint64)).to(tl.uint32) ^ mixed
                lanes += tl.where((sign & 1) != 0, -x, x)

        digest = _reduce(_multiply(digest, step) + _join(first, second, third, narrow))
        if wide:
            joined = _join(first_upper, second_upper, third_upper, narrow)
            digest_upper = _reduce(_multiply(digest_upper, step) + joined)
        if code != RAW:
            swap = (_mix32((base // 4096 + chunk).to(tl.uint32) ^ CHUNK_SEED) & 63).to(tl.int32)
            sketch += tl.sum(tl.gather(lanes, lane ^ swap, 1), 0)

    row_ptr = out_ptr + (tl.program_id(1) * tl.num_programs(0) + program) * PARTIAL_WORDS
    lane_weights = tl.load(table_ptr + LANES + chunk * 64 + lane).to(tl.uint64, bitcast=True)
    _store_digest(row_ptr, _multiply(digest, lane_weights))
    if wide:
        _store_digest(row_ptr + 2, _multiply(digest_upper, lane_weights))
    if program == 0:
        _store_sample(item_ptr, row_ptr, table_ptr, n, inner, code, strided)
    if code != RAW:
        tl.store(row_ptr + COUNTS_AT, tl.sum((nans & 0xFFFF).to(tl.int64)))
        tl.store(row_ptr + COUNTS_AT + 1, tl.sum((infinities & 0xFFFF).to(tl.int64)))
        tl.store(row_ptr + COUNTS_AT + 2, tl.sum((infinities >> 16).to(tl.int64)))
        tl.store(row_ptr + COUNTS_AT + 3, tl.sum(zeros.to(tl.int64)))
        tl.store(row_ptr + COUNTS_AT + 4, tl.sum((nans >> 16).to(tl.int64)))
        _store_double(row_ptr + SUMS_AT, tl.min(low))
        _store_double(row_ptr + SUMS_AT + 1, tl.max(high))
        _store_double(row_ptr + SUMS_AT + 2, tl.sum(total))
        _store_double(row_ptr + SUMS_AT + 3, tl.sum(squares))
        buckets = tl.arange(0, 64)
        tl.store(row_ptr + SKETCH_AT + buckets, sketch.to(tl.int64, bitcast=True))
