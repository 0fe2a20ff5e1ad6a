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
#define OPDRIFT_SOURCE 0         /* hatch_build.py defines it */
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
    uint64_t unused;
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
static float lane_sign[2][64][LANES];            /* the same as +1 and -1, and its complement */
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
 * into limbs, so a row costs 32 x 32 -> 64 multiplications only; r^lane is left to sum_lanes. */
#if defined(__AVX512F__) || defined(__AVX2__)

#if defined(__AVX512F__)
typedef __m512i Vector;
#define vector_load _mm512_loadu_si512
#define vector_store _mm512_storeu_si512
#define vector_add _mm512_add_epi64
#define vector_multiply _mm512_mul_epu32
#define vector_fill(x) _mm512_set1_epi64((long long)(x))
#else
typedef __m256i Vector;
#define vector_load(p) _mm256_loadu_si256((const __m256i *)(p))
#define vector_store(p, v) _mm256_storeu_si256((__m256i *)(p), v)
#define vector_add _mm256_add_epi64
#define vector_multiply _mm256_mul_epu32
#define vector_fill(x) _mm256_set1_epi64x((long long)(x))
#endif

enum {
    VECTOR = sizeof(Vector) / 8,
    SWEEP = 4,                   /* vectors per sweep: their accumulators stay in registers */
};

ALWAYS_INLINE Vector load_digits(const char *from, int width) {
#if defined(__AVX512F__)
    if (width == 4)
        return _mm512_cvtepu32_epi64(_mm256_loadu_si256((const __m256i *)from));
    if (width == 2)
        return _mm512_cvtepu16_epi64(_mm_loadu_si128((const __m128i *)from));
    return _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)from));
#else
    if (width == 4)
        return _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)from));
    if (width == 2)
        return _mm256_cvtepu16_epi64(_mm_loadl_epi64((const __m128i *)from));
    return _mm256_cvtepu8_epi64(_mm_loadu_si32(from));
#endif
}

ALWAYS_INLINE void add_rows(Digest *digest, const void *digits, int width, int rows) {
    const int limbs = width == 4 ? 3 : 2;
    for (int first = 0; first < LANES; first += SWEEP * VECTOR) {
        Vector sum[3][SWEEP];
        for (int k = 0; k < limbs; k++)
            for (int v = 0; v < SWEEP; v++)
                sum[k][v] = vector_load(&digest->lane[k][first + v * VECTOR]);
        const char *from = (const char *)digits + first * width;
        for (int row = digest->rows; row < digest->rows + rows; row++, from += LANES * width) {
            const uint32_t *weight = width == 4 ? limbs3[row] : limbs2[row];
            Vector w0 = vector_fill(weight[0]), w1 = vector_fill(weight[1]);
            Vector w2 = width == 4 ? vector_fill(weight[2]) : w1;
#pragma GCC unroll 4
            for (int v = 0; v < SWEEP; v++) {
                Vector digit = load_digits(from + v * VECTOR * width, width);
                sum[0][v] = vector_add(sum[0][v], vector_multiply(digit, w0));
                sum[1][v] = vector_add(sum[1][v], vector_multiply(digit, w1));
                if (limbs == 3)
                    sum[2][v] = vector_add(sum[2][v], vector_multiply(digit, w2));
            }
        }
        for (int k = 0; k < limbs; k++)
            for (int v = 0; v < SWEEP; v++)
                vector_store(&digest->lane[k][first + v * VECTOR], sum[k][v]);
    }
    digest->rows += rows;
}

#else

ALWAYS_INLINE void add_rows(Digest *digest, const void *digits, int width, int rows) {
    uint64_t sum[3][LANES];
    memcpy(sum, digest->lane, sizeof sum);
    for (int row = 0; row < rows; row++) {
        const uint32_t *weight = width == 4 ? limbs3[digest->rows + row] : limbs2[digest->rows + row];
        uint32_t w0 = weight[0], w1 = weight[1], w2 = width == 4 ? weight[2] : 0;
        const void *from = (const char *)digits + (size_t)row * LANES * width;
        for (int l = 0; l < LANES; l++) {
            uint64_t digit = digit_at(from, width, l);
            sum[0][l] += digit * w0;
            sum[1][l] += digit * w1;
            if (width == 4)
                sum[2][l] += digit * w2;
        }
    }
    memcpy(digest->lane, sum, sizeof sum);
    digest->rows += rows;
}

#endif

NOINLINE void add_rows_32(Digest *digest, const void *digits, int rows) {
    add_rows(digest, digits, 4, rows);
}

NOINLINE void add_rows_16(Digest *digest, const void *digits, int rows) {
    add_rows(digest, digits, 2, rows);
}

NOINLINE void add_rows_8(Digest *digest, const void *digits, int rows) {
    add_rows(digest, digits, 1, rows);
}

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

enum { NANS, POSITIVE_INFINITIES, NEGATIVE_INFINITIES, ZEROS, SUBNORMALS, COUNTS };

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
ALWAYS_INLINE void widen(const void *restrict source, int kind, size_t start, int count, double *restrict values) {
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

/* Count what few chunks have; one simple loop each, so that they become vectors. */
ALWAYS_INLINE void count_special(const double *values, int count, double normal, int finite, int64_t *counts) {
    int64_t zero = 0, sub = 0, nan = 0, pinf = 0, ninf = 0;
    for (int i = 0; i < count; i++)
        zero += values[i] == 0.0;
    counts[ZEROS] += zero;
    if (normal > 0.0) {
        for (int i = 0; i < count; i++)
            sub += __builtin_fabs(values[i]) < normal;
        counts[SUBNORMALS] += sub - zero;
    }
    if (finite)
        return;
    for (int i = 0; i < count; i++) {
        nan += values[i] != values[i];
        pinf += values[i] == __builtin_inf();
        ninf += values[i] == -__builtin_inf();
    }
    counts[NANS] += nan;
    counts[POSITIVE_INFINITIES] += pinf;
    counts[NEGATIVE_INFINITIES] += ninf;
}

NOINLINE void count_special_rows(const void *source, int kind, int rows, int finite, int64_t *counts) {
    for (int row = 0; row < rows; row++) {
        double values[LANES];
        widen(source, kind, (size_t)row * LANES, LANES, values);
        count_special(values, LANES, smallest_normal[kind], finite, counts);
    }
}

NOINLINE void count_special_tail(const void *source, int kind, size_t start, int count, int finite, int64_t *counts) {
    double values[LANES];
    widen(source, kind, start, count, values);
    count_special(values, count, smallest_normal[kind], finite, counts);
}

ALWAYS_INLINE double at_least(double a, double b) {
    return a < b ? b : a;
}

ALWAYS_INLINE double at_most(double a, double b) {
    return b < a ? b : a;
}

/* Whole rows of any kind in plain C: fixed loops over local arrays, which the compiler vectorises.
 * `clean`: extremes over the finite values, the others count as 0. */
ALWAYS_INLINE void pass_rows_plain(const void *source, int kind, int rows, uint64_t first_row, int clean, Pass *pass) {
    double sum[LANES], ssq[LANES], low[LANES], high[LANES], least[LANES], bucket[LANES];
    for (int l = 0; l < LANES; l++) {
        sum[l] = ssq[l] = bucket[l] = 0.0;
        low[l] = least[l] = __builtin_inf();
        high[l] = -__builtin_inf();
    }
    for (int row = 0; row < rows; row++) {
        double values[LANES];
        widen(source, kind, (size_t)row * LANES, LANES, values);
        for (int l = 0; l < LANES; l++) {
            double value = values[l];
            double magnitude = __builtin_fabs(value);
            int kept = !clean || magnitude < __builtin_inf();
            low[l] = at_most(low[l], kept ? value : __builtin_inf());
            high[l] = at_least(high[l], kept ? value : -__builtin_inf());
            least[l] = at_most(least[l], magnitude);
            value = kept ? value : 0.0;
            values[l] = value;
            sum[l] += value;
            ssq[l] += value * value;
        }
        RowPlan plan = plan_row(first_row + row);
        const float *sign = lane_sign[plan.complement][(first_row + row) & 63];
        for (int group = 0; group < 8; group++) {
            int from = 8 * (group ^ plan.rotation);
            for (int l = 0; l < 8; l++)                  /* times 1 or -1: exact */
                bucket[8 * group + l] += values[from + l] * (double)sign[from + l];
        }
    }
    memcpy(pass->sketch, bucket, sizeof bucket);
    for (int start = 0; start < LANES; start += WIDE)
        for (int l = 0; l < WIDE; l++) {
            pass->sum[l] += sum[start + l];
            pass->ssq[l] += ssq[start + l];
            pass->low[l] = at_most(pass->low[l], low[start + l]);
            pass->high[l] = at_least(pass->high[l], high[start + l]);
            pass->least[l] = at_most(pass->least[l], least[start + l]);
        }
}

NOINLINE void pass_rows_any(const void *source, int kind, int rows, uint64_t first_row, Pass *pass) {
    pass_rows_plain(source, kind, rows, first_row, 0, pass);
}

NOINLINE void pass_rows_clean(const void *source, int kind, int rows, uint64_t first_row, Pass *pass) {
    pass_rows_plain(source, kind, rows, first_row, 1, pass);
}

/* The last, incomplete row. */
NOINLINE void pass_tail(const void *source, int kind, size_t start, int count, uint64_t row, int clean, Pass *pass) {
    double values[LANES];
    widen(source, kind, start, count, values);
    RowPlan plan = plan_row(row);
    const float *sign = lane_sign[plan.complement][row & 63];
    for (int l = 0; l < count; l++) {
        double value = values[l];
        double magnitude = __builtin_fabs(value);
        if (clean && !(magnitude < __builtin_inf()))
            continue;
        int lane = l % WIDE;
        pass->low[lane] = at_most(pass->low[lane], value);
        pass->high[lane] = at_least(pass->high[lane], value);
        pass->least[lane] = at_most(pass->least[lane], magnitude);
        pass->sum[lane] += value;
        pass->ssq[lane] += value * value;
        pass->sketch[l ^ (8 * plan.rotation)] += value * (double)sign[l];
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
    default: pass_rows_any(source, kind, rows, first_row, pass);
    }
}

/* ---- statistics of a tensor ------------------------------------------------------------------- */

typedef struct {
    double min, max, sum, ssq;
    int64_t counts[COUNTS];
    double sketch[LANES];
    uint64_t chunks;
} Statistics;

/* One number per field, from the lanes. */
typedef struct {
    double sum, ssq, low, high, least;
} Totals;

ALWAYS_INLINE Totals total(const Pass *pass) {
    Totals t = {pass->sum[0], pass->ssq[0], pass->low[0], pass->high[0], pass->least[0]};
    for (int l = 1; l < WIDE; l++) {
        t.sum += pass->sum[l];
        t.ssq += pass->ssq[l];
        t.low = at_most(t.low, pass->low[l]);
        t.high = at_least(t.high, pass->high[l]);
        t.least = at_most(t.least, pass->least[l]);
    }
    return t;
}

static Totals pass_chunk(const void *source, int kind, int count, uint64_t first_row, int clean, Pass *pass) {
    int rows = count / LANES;
    int rest = count % LANES;
    start_pass(pass);
    if (rows && clean)
        pass_rows_clean(source, kind, rows, first_row, pass);
    else if (rows)
        pass_rows(source, kind, rows, first_row, pass);
    if (rest)
        pass_tail(source, kind, (size_t)rows * LANES, rest, first_row + rows, clean, pass);
    return total(pass);
}

static void add_statistics(Statistics *statistics, const void *source, int kind, int count) {
    uint64_t first_row = statistics->chunks * (CHUNK / LANES);
    Pass pass;
    Totals t = pass_chunk(source, kind, count, first_row, 0, &pass);
    /* A NaN among the values is one in the sum; so are float64 values that overflow it, harmlessly. */
    int finite = t.sum == t.sum && t.low > -__builtin_inf() && t.high < __builtin_inf();
    if (!finite)
        t = pass_chunk(source, kind, count, first_row, 1, &pass);
    if (!finite || t.least == 0.0 || t.least < smallest_normal[kind]) {
        count_special_rows(source, kind, count / LANES, finite, statistics->counts);
        count_special_tail(source, kind, count / LANES * LANES, count % LANES, finite, statistics->counts);
    }
    statistics->min = at_most(statistics->min, t.low);
    statistics->max = at_least(statistics->max, t.high);
    statistics->sum += t.sum;
    statistics->ssq += t.ssq;
    uint32_t turn = mix32((uint32_t)statistics->chunks ^ CHUNK_SEED) & 63;
    for (int l = 0; l < LANES; l++)
        statistics->sketch[l ^ turn] += pass.sketch[l];
    statistics->chunks++;
}

/* ---- rows ------------------------------------------------------------------------------------ */

typedef struct {
    int kind;
    int bytes;                   /* per component */
    int everything;              /* or the digest only */
    Digest digest;
    Statistics statistics;
} State;

ALWAYS_INLINE int code_of(int kind) {
    return kind >= FIRST_FP8_KIND ? FP8 : kind;
}

static void start(State *state, int kind, int everything) {
    state->kind = kind;
    state->bytes = COMPONENT_BYTES[code_of(kind)];
    state->everything = everything && kind != RAW;
    state->digest.rows = 0;
    state->digest.raw = 0;
    state->digest.scale = 1;
    if (state->everything) {
        memset(&state->statistics, 0, sizeof state->statistics);
        state->statistics.min = __builtin_inf();
        state->statistics.max = -__builtin_inf();
    }
}

/* Digest and statistics of a chunk one after the other, while it is in the cache. */
static void add_chunk(State *state, const void *source, int count, int last) {
    if (state->bytes == 8)
        add_digits(&state->digest, source, 4, 2 * count, last);
    else
        add_digits(&state->digest, source, state->bytes, count, last);
    if (state->everything)
        add_statistics(&state->statistics, source, state->kind, count);
}

static void add_all(State *state, const char *source, int64_t n) {
    if (n == 0)
        return;
    for (; n > CHUNK; n -= CHUNK) {
        add_chunk(state, source, CHUNK, 0);
        source += (size_t)CHUNK * state->bytes;
    }
    add_chunk(state, source, (int)n, 1);
}

static int64_t sample_position(int k, int64_t n) {
    if (n <= SAMPLES)
        return k;
    uint64_t stride = (uint64_t)n / SAMPLES;
    return (int64_t)(k * stride + (uint64_t)(((u128)sample_jitter[k] * stride) >> 32));
}

static uint64_t component_at(const char *source, int64_t i, int bytes) {
    uint64_t bits = 0;
    switch (bytes) {
    case 1: memcpy(&bits, source + i, 1); break;
    case 2: memcpy(&bits, source + 2 * i, 2); break;
    case 4: memcpy(&bits, source + 4 * i, 4); break;
    default: memcpy(&bits, source + 8 * i, 8);
    }
    return bits;
}

/* Everything in the row but the sample. */
static void write_row(const State *state, Row *row, int64_t n, int64_t value) {
    memset(row, 0, sizeof *row);
    row->raw = state->digest.raw;
    row->n = n;
    row->version = 1;
    row->code = code_of(state->kind);
    row->flags = HAS_RAW;
    row->value = value;
    row->min = __builtin_inf();
    row->max = -__builtin_inf();
    if (!state->everything)
        return;
    const Statistics *from = &state->statistics;
    row->flags |= HAS_STATISTICS | HAS_SKETCH;
    row->min = from->min + 0.0;          /* -0 becomes 0: which of the two comes first is chance */
    row->max = from->max + 0.0;
    if (row->min <= row->max) {
        double low = __builtin_fabs(row->min), high = __builtin_fabs(row->max);
        row->absmax = low > high ? low : high;
    }
    row->sum = from->sum;
    row->ssq = from->ssq;
    row->nan = from->counts[NANS];
    row->pinf = from->counts[POSITIVE_INFINITIES];
    row->ninf = from->counts[NEGATIVE_INFINITIES];
    row->zero = from->counts[ZEROS];
    row->sub = from->counts[SUBNORMALS];
    if (state->bytes >= 4)
        for (int j = 0; j < 32; j++)
            row->sketch.wide[j] = from->sketch[j] + from->sketch[j + 32];
    else
        for (int j = 0; j < 64; j++)
            row->sketch.narrow[j] = (float)from->sketch[j];
}

NOINLINE void fill_row(Row *row, const char *source, int64_t n, int kind, int64_t value) {
    State state;
    start(&state, kind, 1);
    add_all(&state, source, n);
    write_row(&state, row, n, value);
    row->flags |= HAS_SAMPLE;
    int samples = n < SAMPLES ? (int)n : SAMPLES;
    for (int k = 0; k < samples; k++)
        row->sample[k] = component_at(source, sample_position(k, n), state.bytes);
}

/* Element `i` of an item lies at this component of an (outer, batch, inner) tensor. */
ALWAYS_INLINE int64_t item_component(int64_t i, int64_t item, int64_t batch, int64_t inner) {
    return (i / inner * batch + item) * inner + i % inner;
}

/* Copy components [first, first + count) of an item to `to`. */
static void gather(char *to, const char *source, int bytes, int64_t first, int count, int64_t item, int64_t batch,
                   int64_t inner) {
    for (int done = 0; done < count;) {
        int64_t at = item_component(first + done, item, batch, inner);
        int64_t run = inner - (first + done) % inner;
        if (run > count - done)
            run = count - done;
        memcpy(to + (size_t)done * bytes, source + (size_t)at * bytes, (size_t)run * bytes);
        done += (int)run;
    }
}

NOINLINE void fill_item_row(Row *row, const char *source, int64_t outer, int64_t batch, int64_t inner, int64_t item,
                            int kind, int64_t value) {
    char chunk[CHUNK * 8] __attribute__((aligned(64)));
    State state;
    start(&state, kind, 1);
    int64_t n = outer * inner;
    for (int64_t first = 0; first < n; first += CHUNK) {
        int count = n - first < CHUNK ? (int)(n - first) : CHUNK;
        gather(chunk, source, state.bytes, first, count, item, batch, inner);
        add_chunk(&state, chunk, count, first + count == n);
    }
    write_row(&state, row, n, value);
    row->flags |= HAS_SAMPLE;
    int samples = n < SAMPLES ? (int)n : SAMPLES;
    for (int k = 0; k < samples; k++) {
        int64_t at = item_component(sample_position(k, n), item, batch, inner);
        row->sample[k] = component_at(source, at, state.bytes);
    }
}

NOINLINE uint64_t digest_only(const char *source, int64_t n, int kind) {
    State state;
    start(&state, kind, 0);
    add_all(&state, source, n);
    return state.digest.raw;
}

/* ---- the thread's floating-point environment --------------------------------------------------- */

/* A program may flush subnormals to zero (torch.set_flush_denormal), trap exceptions or round another
 * way. The fingerprint must not depend on that, and the program's own settings and exception flags must
 * be what they were. */
#if defined(__x86_64__)
typedef unsigned FloatEnvironment;

static FloatEnvironment default_floats(void) {
    unsigned saved = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return saved;
}

static void restore_floats(FloatEnvironment saved) {
    _mm_setcsr(saved);
}
#elif defined(__aarch64__)
typedef uint64_t FloatEnvironment;

static FloatEnvironment default_floats(void) {
    uint64_t saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, xzr" ::: "memory");
    return saved;
}

static void restore_floats(FloatEnvironment saved) {
    __asm__ volatile("msr fpcr, %0" ::"r"(saved) : "memory");
}
#else
typedef int FloatEnvironment;

static FloatEnvironment default_floats(void) {
    return 0;
}

static void restore_floats(FloatEnvironment saved) {
    (void)saved;
}
#endif

/* ---- what Python calls (opdrift/fingerprint/compiled.py) ---------------------------------------- */

/* The crc32 of this file when it was compiled: a library left over from another version is refused. */
EXPORT uint32_t opdrift_source(void) {
    return OPDRIFT_SOURCE;
}

/* The best build for this machine: 2 AVX-512, 1 AVX2, 0 any. Ask it of the plainest build. */
EXPORT int opdrift_best_build(void) {
#if defined(__x86_64__)
    unsigned a, b, c = 0, d;
    __builtin_cpu_init();
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 29)))    /* F16C: no name in older compilers */
        return 0;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi2"))
        return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512dq"))
        return 1;
    if (!__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512bw"))
        return 1;
    return 2;
#else
    return 0;
#endif
}

/* Fill the tables; before anything else, and again with the same arguments at will.
 * fp8: the 256 values of each fp8 format; fp8_normal: its smallest normal value, 0 if all are normal. */
EXPORT void opdrift_init(const float *fp8, const double *fp8_normal) {
    power[0] = 1;
    for (int j = 1; j < SCALAR_DIGITS; j++)
        power[j] = mulmod(power[j - 1], R);
    uint64_t row_step = powmod(R, LANES), weight = 1;
    for (int row = 0; row < MAX_DIGIT_ROWS; row++) {
        limbs3[row][0] = weight & 0x1fffff;
        limbs3[row][1] = (weight >> 21) & 0xfffff;
        limbs3[row][2] = (uint32_t)(weight >> 41);
        limbs2[row][0] = weight & 0x7fffffff;
        limbs2[row][1] = (uint32_t)(weight >> 31);
        weight = mulmod(weight, row_step);
    }
    for (int row = 0; row < 64; row++) {
        sign_word[row] = splitmix64(SIGN_SEED + row);
        for (int l = 0; l < LANES; l++) {
            lane_sign[0][row][l] = (sign_word[row] >> l) & 1 ? -1.0f : 1.0f;
            lane_sign[1][row][l] = -lane_sign[0][row][l];
        }
    }
    for (int k = 0; k < SAMPLES; k++)
        sample_jitter[k] = (uint32_t)(splitmix64(SAMPLE_SEED + k) >> 32);
    memcpy(fp8_value, fp8, sizeof fp8_value);
    smallest_normal[F32] = smallest_normal[BF16] = 0x1p-126;
    smallest_normal[F64] = 0x1p-1022;
    smallest_normal[F16] = 0x1p-14;
    for (int table = 0; table < FP8_TABLES; table++)
        smallest_normal[FIRST_FP8_KIND + table] = fp8_normal[table];
}

/* The row of n contiguous components at `source`. */
EXPORT void opdrift_put(Row *row, const void *source, int64_t n, int kind, int64_t value) {
    FloatEnvironment saved = default_floats();
    fill_row(row, source, n, kind, value);
    restore_floats(saved);
}

/* One row per item of a contiguous (outer, batch, inner) tensor: item b is [:, b, :]. */
EXPORT void opdrift_put_batch(Row *rows, const void *source, int64_t outer, int64_t batch, int64_t inner, int kind,
                              int64_t value) {
    FloatEnvironment saved = default_floats();
    for (int64_t item = 0; item < batch; item++) {
        if (outer == 1 || inner == 0) {
            const char *at = (const char *)source + (size_t)(item * inner) * COMPONENT_BYTES[code_of(kind)];
            fill_row(rows + item, at, outer * inner, kind, value);
        } else {
            fill_item_row(rows + item, source, outer, batch, inner, item, kind, value);
        }
        rows[item].item = (uint32_t)item;
    }
    restore_floats(saved);
}

/* Only raw, at two to three times the speed. */
EXPORT uint64_t opdrift_raw(const void *source, int64_t n, int kind) {
    return digest_only(source, n, kind);
}
