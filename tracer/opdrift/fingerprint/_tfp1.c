/* tfp1: the fingerprint of a tensor's content, in one pass over its memory.
 *
 *     raw = sum_i digit[i] * r^i  mod p,    p = 2^61 - 1,  r a primitive root of GF(p)
 *
 * plus counts, extremes, sums, a count-sketch and 32 sample values, written into a row of 640 bytes.
 * docs/decisions/0004-fingerprint.md says why this hash; opdrift/tfp1.py is the readable definition.
 *
 * The file is compiled up to three times (hatch_build.py): for any machine, for AVX2, for AVX-512.
 * Every build gives the same raw, counts, extremes and sample. Sums and sketches agree to rounding
 * (1e-9 of the norm), because the builds add in different orders: compile with -ffp-contract=off.
 *
 * It needs `unsigned __int128` (gcc, clang) and a little-endian machine, calls no library function
 * but memcpy and memset, and keeps no state but tables that opdrift_init fills once. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "tfp1 reads components as little-endian"
#endif

#ifndef OPDRIFT_SOURCE
#define OPDRIFT_SOURCE 0
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#define EXPORT __attribute__((visibility("default")))

typedef unsigned __int128 u128;

enum {
    P_BITS = 61,
    LANES = 64,                  /* elements of one row */
    CHUNK = 4096,                /* components of one chunk: 64 rows, at most 32 KB, stays in L1 */
    MAX_DIGIT_ROWS = 1024,       /* between flushes: 2^32 * 2^21 * 1024 < 2^64, so lanes can't overflow */
    CHUNK_DIGIT_ROWS = 128,      /* the most that one chunk adds: 4096 components of two digits */
    SCALAR_DIGITS = 512,         /* below this a plain loop beats setting up the lanes */
    SAMPLES = 32,
    FP8_TABLES = 5,
};

#define P ((1ull << P_BITS) - 1)
#define R 0x05a49cfda2babfd3ull
#define SIGN_SEED 0x7466703173676e00ull
#define SAMPLE_SEED 0x7466703170736e00ull
#define CHUNK_SEED 0x74660000u

#define F32_INFINITY 0x7f800000u
#define F64_INFINITY 0x7ff0000000000000ull

enum { F32, F64, F16, BF16, FP8, I8, U8, I16, U16, I32, U32, I64, U64, RAW, CODES };
enum { FIRST_FP8_KIND = 16 };    /* a kind is a code, or 16 + the number of an fp8 table */
enum { HAS_RAW = 1, HAS_STATISTICS = 2, HAS_SKETCH = 4, HAS_SAMPLE = 8 };

static const uint8_t COMPONENT_BYTES[CODES] = {4, 8, 2, 2, 1, 1, 1, 2, 2, 4, 4, 8, 8, 1};

typedef struct {
    uint64_t raw;
    int64_t n;
    double min, max, absmax, sum, ssq;
    int64_t nan, pinf, ninf, zero, sub;
    union {
        float narrow[64];        /* components of 1 and 2 bytes */
        double wide[32];         /* the others: bucket j holds s[j] + s[j + 32] */
    } sketch;
    uint64_t sample[SAMPLES];
    uint32_t version, code, flags, item;
    int64_t value;
    uint32_t unused[2];
} Row;

_Static_assert(sizeof(Row) == 640, "the row's layout is part of the format");

/* ---- arithmetic modulo p -------------------------------------------------------------------- */

ALWAYS_INLINE uint64_t reduce(u128 x) {
    uint64_t sum = ((uint64_t)x & P) + ((uint64_t)(x >> 61) & P) + (uint64_t)(x >> 122);
    sum = (sum & P) + (sum >> 61);
    return sum >= P ? sum - P : sum;
}

ALWAYS_INLINE uint64_t mulmod(uint64_t a, uint64_t b) {
    return reduce((u128)a * b);
}

ALWAYS_INLINE uint64_t addmod(uint64_t a, uint64_t b) {
    uint64_t sum = a + b;
    return sum >= P ? sum - P : sum;
}

static uint64_t powmod(uint64_t base, uint64_t exponent) {
    uint64_t result = 1;
    for (; exponent; exponent >>= 1) {
        if (exponent & 1)
            result = mulmod(result, base);
        base = mulmod(base, base);
    }
    return result;
}

static uint64_t splitmix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

ALWAYS_INLINE uint32_t mix32(uint32_t x) {
    x *= 0x9E3779B1u;
    x ^= x >> 16;
    x *= 0x85EBCA6Bu;
    x ^= x >> 13;
    x *= 0xC2B2AE35u;
    return x ^ (x >> 16);
}

/* ---- tables --------------------------------------------------------------------------------- */

static uint64_t power[SCALAR_DIGITS];            /* r^j */
static uint32_t limbs3[MAX_DIGIT_ROWS][3];       /* r^(64 row) in 21, 20 and 20 bits: 32-bit digits */
static uint32_t limbs2[MAX_DIGIT_ROWS][2];       /* r^(64 row) in 31 and 30 bits: 8 and 16-bit digits */
static uint64_t sign_word[64];                   /* the sketch's signs of a row; bit l set: lane l negative */
static float lane_sign[64][LANES];               /* the same as +1 and -1 */
static uint32_t sample_jitter[SAMPLES];
static float fp8_value[FP8_TABLES][256];
static double smallest_normal[FIRST_FP8_KIND + FP8_TABLES];   /* by kind; 0: no subnormal values */

/* ---- raw: the digest ------------------------------------------------------------------------ */

typedef struct {
    uint64_t lane[3][LANES];     /* sums of digit * limb, exact in 64 bits */
    int rows;                    /* rows in the lanes; the lanes are garbage while it is 0 */
    uint64_t raw;
    uint64_t scale;              /* r^(digits before the lanes' first row) */
} Digest;

ALWAYS_INLINE uint64_t digit_at(const void *digits, int width, size_t i) {
    if (width == 4)
        return ((const uint32_t *)digits)[i];
    if (width == 2)
        return ((const uint16_t *)digits)[i];
    return ((const uint8_t *)digits)[i];
}

/* Add `rows` rows to the lanes. The weight r^(64 row) is the same for all lanes of a row and split
 * into limbs, so a row costs 32 x 32 -> 64 multiplications only; r^lane is left to flush_lanes. */
ALWAYS_INLINE void add_rows(Digest *digest, const void *digits, int width, int rows) {
    uint64_t a0[LANES], a1[LANES], a2[LANES];
    memcpy(a0, digest->lane[0], sizeof a0);
    memcpy(a1, digest->lane[1], sizeof a1);
    if (width == 4)
        memcpy(a2, digest->lane[2], sizeof a2);
    for (int row = 0; row < rows; row++) {
        int at = digest->rows + row;
        const void *source = (const char *)digits + (size_t)row * LANES * width;
        if (width == 4) {
            uint32_t w0 = limbs3[at][0], w1 = limbs3[at][1], w2 = limbs3[at][2];
            for (int l = 0; l < LANES; l++) {
                uint64_t digit = digit_at(source, width, l);
                a0[l] += digit * w0;
                a1[l] += digit * w1;
                a2[l] += digit * w2;
            }
        } else {
            uint32_t w0 = limbs2[at][0], w1 = limbs2[at][1];
            for (int l = 0; l < LANES; l++) {
                uint64_t digit = digit_at(source, width, l);
                a0[l] += digit * w0;
                a1[l] += digit * w1;
            }
        }
    }
    memcpy(digest->lane[0], a0, sizeof a0);
    memcpy(digest->lane[1], a1, sizeof a1);
    if (width == 4)
        memcpy(digest->lane[2], a2, sizeof a2);
    digest->rows += rows;
}

NOINLINE void add_rows_32(Digest *digest, const void *digits, int rows) { add_rows(digest, digits, 4, rows); }
NOINLINE void add_rows_16(Digest *digest, const void *digits, int rows) { add_rows(digest, digits, 2, rows); }
NOINLINE void add_rows_8(Digest *digest, const void *digits, int rows) { add_rows(digest, digits, 1, rows); }

static uint64_t sum_lanes(const Digest *digest, int width) {
    u128 total = 0;
    for (int l = 0; l < LANES; l++) {
        u128 value = digest->lane[0][l];
        if (width == 4)
            value += ((u128)digest->lane[1][l] << 21) + ((u128)digest->lane[2][l] << 41);
        else
            value += (u128)digest->lane[1][l] << 31;
        total += (u128)reduce(value) * power[l];
        if (l == LANES / 2 - 1)
            total = reduce(total);       /* 32 products of 122 bits fill 127 bits */
    }
    return reduce(total);
}

ALWAYS_INLINE uint64_t sum_digits(const void *digits, int width, int count) {
    u128 total = 0;                      /* 512 products of 32 and 61 bits: 102 bits */
    for (int i = 0; i < count; i++)
        total += (u128)digit_at(digits, width, i) * power[i];
    return reduce(total);
}

static uint64_t sum_few_digits(const void *digits, int width, int count) {
    if (width == 4)
        return sum_digits(digits, 4, count);
    if (width == 2)
        return sum_digits(digits, 2, count);
    return sum_digits(digits, 1, count);
}

/* Add digits; `last` says that none follow. Before that, `count` must be a multiple of 64. */
static void add_digits(Digest *digest, const void *digits, int width, int count, int last) {
    if (digest->rows == 0) {
        if (last && count < SCALAR_DIGITS) {
            uint64_t sum = sum_few_digits(digits, width, count);
            digest->raw = addmod(digest->raw, mulmod(sum, digest->scale));
            return;
        }
        memset(digest->lane, 0, sizeof digest->lane);
    }
    int rows = count / LANES;
    int rest = count % LANES;
    if (width == 4)
        add_rows_32(digest, digits, rows);
    else if (width == 2)
        add_rows_16(digest, digits, rows);
    else
        add_rows_8(digest, digits, rows);
    if (!last && digest->rows + CHUNK_DIGIT_ROWS <= MAX_DIGIT_ROWS)
        return;
    uint64_t sum = sum_lanes(digest, width);
    uint64_t advance = powmod(R, (uint64_t)digest->rows * LANES);
    if (rest) {
        const void *tail = (const char *)digits + (size_t)rows * LANES * width;
        sum = addmod(sum, mulmod(sum_few_digits(tail, width, rest), advance));
    }
    digest->raw = addmod(digest->raw, mulmod(sum, digest->scale));
    digest->scale = mulmod(digest->scale, advance);
    digest->rows = 0;
}

/* ---- statistics of a chunk ------------------------------------------------------------------- */

enum { WIDE = 8 };               /* accumulators are spread over 8 lanes, summed up at the chunk's end */

typedef struct {
    double sketch[LANES];
    double sum[WIDE], ssq[WIDE];
    double low[WIDE], high[WIDE];
    double least[WIDE];          /* smallest magnitude: tells whether zeros and subnormals need counting */
} Pass;

/* Where the sketch puts a row: the source's group g of 8 lanes goes to bucket group g ^ rotation, with
 * the signs of the row's sign word, complemented for half of the rows. */
typedef struct {
    uint64_t word;
    int complement;
    int rotation;
} RowPlan;

ALWAYS_INLINE RowPlan plan_row(uint64_t row) {
    uint32_t hash = mix32((uint32_t)row);
    RowPlan plan = {sign_word[row & 63], (int)(hash & 1), (int)((hash >> 1) & 7)};
    return plan;
}

static void start_pass(Pass *pass) {
    memset(pass, 0, sizeof *pass);
    for (int l = 0; l < WIDE; l++) {
        pass->low[l] = pass->least[l] = __builtin_inf();
        pass->high[l] = -__builtin_inf();
    }
}

/* Half to single without F16C: shift exponent and mantissa into place, rescale (exact), and restore
 * the exponent of infinities and NaNs. */
ALWAYS_INLINE float widen_half(uint16_t half) {
    union { uint32_t bits; float value; } x = {.bits = (uint32_t)(half & 0x7fff) << 13};
    x.value *= 0x1p112f;
    x.bits |= x.value >= 65536.0f ? 0x7f800000u : 0;
    x.bits |= (uint32_t)(half & 0x8000) << 16;
    return x.value;
}

ALWAYS_INLINE float widen_bfloat(uint16_t bfloat) {
    union { uint32_t bits; float value; } x = {.bits = (uint32_t)bfloat << 16};
    return x.value;
}

#define WIDEN(TYPE, EXPRESSION)                                    \
    for (int i = 0; i < count; i++) {                              \
        TYPE x = ((const TYPE *)source)[start + i];                \
        values[i] = (double)(EXPRESSION);                          \
    }                                                              \
    return

/* Components [start, start + count) as float64: exact but for 64-bit integers beyond 2^53. */
ALWAYS_INLINE void widen(const void *source, int kind, size_t start, int count, double *values) {
    switch (kind) {
    case F32: WIDEN(float, x);
    case F64: WIDEN(double, x);
    case F16: WIDEN(uint16_t, widen_half(x));
    case BF16: WIDEN(uint16_t, widen_bfloat(x));
    case I8: WIDEN(int8_t, x);
    case U8: WIDEN(uint8_t, x);
    case I16: WIDEN(int16_t, x);
    case U16: WIDEN(uint16_t, x);
    case I32: WIDEN(int32_t, x);
    case U32: WIDEN(uint32_t, x);
    case I64: WIDEN(int64_t, x);
    case U64: WIDEN(uint64_t, x);
    default: {
        const float *table = fp8_value[kind - FIRST_FP8_KIND];
        WIDEN(uint8_t, table[x]);
    }
    }
}

NOINLINE void widen_row(const void *source, int kind, size_t start, double *values) {
    widen(source, kind, start, LANES, values);
}

NOINLINE void widen_tail(const void *source, int kind, size_t start, int count, double *values) {
    memset(values, 0, LANES * sizeof *values);
    widen(source, kind, start, count, values);
}

ALWAYS_INLINE void add_extremes(Pass *pass, const double *values) {
    for (int start = 0; start < LANES; start += WIDE)
        for (int l = 0; l < WIDE; l++) {
            double value = values[start + l];
            double magnitude = __builtin_fabs(value);
            pass->low[l] = value < pass->low[l] ? value : pass->low[l];
            pass->high[l] = value > pass->high[l] ? value : pass->high[l];
            pass->least[l] = magnitude < pass->least[l] ? magnitude : pass->least[l];
        }
}

ALWAYS_INLINE void add_tail_extremes(Pass *pass, const double *values, int count) {
    for (int i = 0; i < count; i++) {
        double value = values[i];
        double magnitude = __builtin_fabs(value);
        pass->low[0] = value < pass->low[0] ? value : pass->low[0];
        pass->high[0] = value > pass->high[0] ? value : pass->high[0];
        pass->least[0] = magnitude < pass->least[0] ? magnitude : pass->least[0];
    }
}

ALWAYS_INLINE void add_sums(Pass *pass, const double *values, uint64_t row) {
    for (int start = 0; start < LANES; start += WIDE)
        for (int l = 0; l < WIDE; l++) {
            pass->sum[l] += values[start + l];
            pass->ssq[l] += values[start + l] * values[start + l];
        }
    RowPlan plan = plan_row(row);
    const float *sign = lane_sign[row & 63];
    double flip = plan.complement ? -1.0 : 1.0;
    for (int group = 0; group < 8; group++) {
        int from = 8 * (group ^ plan.rotation);
        for (int l = 0; l < 8; l++)              /* times 1 or -1: exact */
            pass->sketch[8 * group + l] += values[from + l] * (sign[from + l] * flip);
    }
}

NOINLINE void pass_rows_portable(const void *source, int kind, int rows, uint64_t first_row, Pass *pass) {
    for (int row = 0; row < rows; row++) {
        double values[LANES];
        widen_row(source, kind, (size_t)row * LANES, values);
        add_extremes(pass, values);
        add_sums(pass, values, first_row + row);
    }
}

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#define HAS_FUSED_PASS 1

ALWAYS_INLINE __m512 load_16(const void *source, int kind, size_t i) {
    const uint8_t *bytes = (const uint8_t *)source + i;
    const uint16_t *words = (const uint16_t *)source + i;
    switch (kind) {
    case F16: return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)words));
    case BF16: return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)words)), 16));
    case U8: return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes)));
    default: return _mm512_loadu_ps((const float *)source + i);
    }
}

ALWAYS_INLINE __m512d low_half(__m512 v) {
    return _mm512_cvtps_pd(_mm512_castps512_ps256(v));
}

ALWAYS_INLINE __m512d high_half(__m512 v) {
    return _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
}

/* All statistics in one pass: separate passes over the chunk were three quarters of the whole cost. */
ALWAYS_INLINE void pass_rows_fused(const void *source, int kind, int rows, uint64_t first_row, Pass *pass) {
    __m512d bucket[8], sum[2], ssq[2];
    for (int g = 0; g < 8; g++)
        bucket[g] = _mm512_setzero_pd();
    for (int h = 0; h < 2; h++)
        sum[h] = ssq[h] = _mm512_setzero_pd();
    __m512 low = _mm512_set1_ps(__builtin_inff());
    __m512 high = _mm512_set1_ps(-__builtin_inff());
    __m512i least = _mm512_set1_epi32(0x7f800000);       /* least magnitude, as float32 bits */
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512d minus = _mm512_set1_pd(-0.0);
    const __m512i straight = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i crossed = _mm512_set_epi32(7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8);

    for (int row = 0; row < rows; row++) {
        RowPlan plan = plan_row(first_row + row);
        uint64_t signs = plan.word ^ (0 - (uint64_t)plan.complement);
        int cross = plan.rotation & 1;                   /* a vector's two groups of 8 change places */
        __m512i order = cross ? crossed : straight;
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; pair++) {
            int block = pair ^ (plan.rotation >> 1);
            __m512 values = load_16(source, kind, (size_t)row * LANES + 16 * block);
            low = _mm512_min_ps(low, values);
            high = _mm512_max_ps(high, values);
            least = _mm512_min_epu32(least, _mm512_and_si512(_mm512_castps_si512(values), magnitude));
            values = _mm512_permutexvar_ps(order, values);
            __m512d even = low_half(values);
            __m512d odd = high_half(values);
            sum[0] = _mm512_add_pd(sum[0], even);
            sum[1] = _mm512_add_pd(sum[1], odd);
            /* The square of a float32 is exact in float64: fused or not, the sum rounds alike. */
            ssq[0] = _mm512_fmadd_pd(even, even, ssq[0]);
            ssq[1] = _mm512_fmadd_pd(odd, odd, ssq[1]);
            uint64_t block_signs = signs >> (16 * block);
            __mmask8 even_signs = (__mmask8)(block_signs >> (8 * cross));
            __mmask8 odd_signs = (__mmask8)(block_signs >> (8 - 8 * cross));
            even = _mm512_mask_xor_pd(even, even_signs, even, minus);
            odd = _mm512_mask_xor_pd(odd, odd_signs, odd, minus);
            bucket[2 * pair] = _mm512_add_pd(bucket[2 * pair], even);
            bucket[2 * pair + 1] = _mm512_add_pd(bucket[2 * pair + 1], odd);
        }
    }

    for (int g = 0; g < 8; g++)
        _mm512_storeu_pd(pass->sketch + 8 * g, bucket[g]);
    _mm512_storeu_pd(pass->sum, _mm512_add_pd(sum[0], sum[1]));
    _mm512_storeu_pd(pass->ssq, _mm512_add_pd(ssq[0], ssq[1]));
    _mm512_storeu_pd(pass->low, _mm512_min_pd(low_half(low), high_half(low)));
    _mm512_storeu_pd(pass->high, _mm512_max_pd(low_half(high), high_half(high)));
    __m512 magnitudes = _mm512_castsi512_ps(least);
    _mm512_storeu_pd(pass->least, _mm512_min_pd(low_half(magnitudes), high_half(magnitudes)));
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HAS_FUSED_PASS 1

ALWAYS_INLINE __m256 load_8(const void *source, int kind, size_t i) {
    const uint8_t *bytes = (const uint8_t *)source + i;
    const uint16_t *words = (const uint16_t *)source + i;
    switch (kind) {
    case F16: return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)words));
    case BF16: return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)words)), 16));
    case U8: return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes)));
    default: return _mm256_loadu_ps((const float *)source + i);
    }
}

ALWAYS_INLINE __m256d low_half(__m256 v) {
    return _mm256_cvtps_pd(_mm256_castps256_ps128(v));
}

ALWAYS_INLINE __m256d high_half(__m256 v) {
    return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
}

/* Negate the doubles whose bit in `signs` is set, bit 0 for the first one. */
ALWAYS_INLINE __m256d apply_signs(__m256d v, uint64_t signs) {
    const __m256i to_top = _mm256_set_epi64x(60, 61, 62, 63);
    __m256i bits = _mm256_sllv_epi64(_mm256_set1_epi64x((long long)signs), to_top);
    return _mm256_xor_pd(v, _mm256_and_pd(_mm256_castsi256_pd(bits), _mm256_set1_pd(-0.0)));
}

/* All statistics in one pass, in two sweeps: 16 registers hold half of the buckets, so the first sweep
 * reads one half of each row and the second the other. */
ALWAYS_INLINE void pass_rows_fused(const void *source, int kind, int rows, uint64_t first_row, Pass *pass) {
    __m256d sum = _mm256_setzero_pd(), ssq = _mm256_setzero_pd();
    __m256 low = _mm256_set1_ps(__builtin_inff());
    __m256 high = _mm256_set1_ps(-__builtin_inff());
    __m256i least = _mm256_set1_epi32(0x7f800000);       /* least magnitude, as float32 bits */
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);

    for (int half = 0; half < 2; half++) {
        __m256d bucket[8];
        for (int b = 0; b < 8; b++)
            bucket[b] = _mm256_setzero_pd();
        for (int row = 0; row < rows; row++) {
            RowPlan plan = plan_row(first_row + row);
            uint64_t signs = plan.word ^ (0 - (uint64_t)plan.complement);
#pragma GCC unroll 4
            for (int g = 0; g < 4; g++) {
                int group = (4 * half + g) ^ plan.rotation;
                __m256 values = load_8(source, kind, (size_t)row * LANES + 8 * group);
                low = _mm256_min_ps(low, values);
                high = _mm256_max_ps(high, values);
                least = _mm256_min_epu32(least, _mm256_and_si256(_mm256_castps_si256(values), magnitude));
                __m256d first = low_half(values);
                __m256d second = high_half(values);
                sum = _mm256_add_pd(sum, _mm256_add_pd(first, second));
                ssq = _mm256_add_pd(ssq, _mm256_fmadd_pd(first, first, _mm256_mul_pd(second, second)));
                uint64_t group_signs = signs >> (8 * group);
                bucket[2 * g] = _mm256_add_pd(bucket[2 * g], apply_signs(first, group_signs));
                bucket[2 * g + 1] = _mm256_add_pd(bucket[2 * g + 1], apply_signs(second, group_signs >> 4));
            }
        }
        for (int b = 0; b < 8; b++)
            _mm256_storeu_pd(pass->sketch + 32 * half + 4 * b, bucket[b]);
    }

    _mm256_storeu_pd(pass->sum, sum);
    _mm256_storeu_pd(pass->ssq, ssq);
    _mm256_storeu_pd(pass->low, _mm256_min_pd(low_half(low), high_half(low)));
    _mm256_storeu_pd(pass->high, _mm256_max_pd(low_half(high), high_half(high)));
    __m256 magnitudes = _mm256_castsi256_ps(least);
    _mm256_storeu_pd(pass->least, _mm256_min_pd(low_half(magnitudes), high_half(magnitudes)));
}

#endif

#ifdef HAS_FUSED_PASS
NOINLINE void pass_rows_f32(const void *source, int rows, uint64_t first_row, Pass *pass) {
    pass_rows_fused(source, F32, rows, first_row, pass);
}

NOINLINE void pass_rows_f16(const void *source, int rows, uint64_t first_row, Pass *pass) {
    pass_rows_fused(source, F16, rows, first_row, pass);
}

NOINLINE void pass_rows_bf16(const void *source, int rows, uint64_t first_row, Pass *pass) {
    pass_rows_fused(source, BF16, rows, first_row, pass);
}

NOINLINE void pass_rows_u8(const void *source, int rows, uint64_t first_row, Pass *pass) {
    pass_rows_fused(source, U8, rows, first_row, pass);
}
#endif

/* `pass` is fresh. */
static void pass_rows(const void *source, int kind, int rows, uint64_t first_row, Pass *pass) {
    switch (kind) {
#ifdef HAS_FUSED_PASS
    case F32: pass_rows_f32(source, rows, first_row, pass); return;
    case F16: pass_rows_f16(source, rows, first_row, pass); return;
    case BF16: pass_rows_bf16(source, rows, first_row, pass); return;
    case U8: pass_rows_u8(source, rows, first_row, pass); return;      /* also bool: masks */
#endif
    default: pass_rows_portable(source, kind, rows, first_row, pass);
    }
}

/* ---- statistics of a tensor ------------------------------------------------------------------- */

typedef struct {
    double min, max, sum, ssq;
    int64_t nan, pinf, ninf, zero, sub;
    double sketch[LANES];
    uint64_t chunks;
} Statistics;

/* Count what few tensors have, and turn non-finite values into 0. */
NOINLINE void count_special(Statistics *statistics, double *values, int count, double normal) {
    int64_t nan = 0, pinf = 0, ninf = 0, zero = 0, sub = 0;
    for (int i = 0; i < count; i++) {
        double value = values[i];
        double magnitude = __builtin_fabs(value);
        nan += value != value;
        pinf += value == __builtin_inf();
        ninf += value == -__builtin_inf();
        zero += value == 0.0;
        sub += (magnitude > 0.0) & (magnitude < normal);
    }
    statistics->nan += nan;
    statistics->pinf += pinf;
    statistics->ninf += ninf;
    statistics->zero += zero;
    statistics->sub += sub;
}
