/* raw = sum digit[i] * r^i mod p. */

#pragma once

#include "_tfp1_common.h"

/* Bytes between what is read and what is asked for meanwhile, where only the digest reads: it is faster than
 * memory answers. Statistics ask for themselves. */
enum { DIGITS_AHEAD = 4096 };

typedef struct {
    uint64_t lane[3][LANES]; /* sums of digit * limb, exact in 64 bits; with IFMA two */
    int rows;                /* rows in the lanes; the lanes are garbage while it is 0 */
    uint64_t raw;
    uint64_t scale; /* r^(digits before the lanes' first row) */
    size_t ahead;   /* DIGITS_AHEAD, or 0 */
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

/* Vectors per sweep: their accumulators stay in registers. With AVX-512 a sweep is a whole row, so that memory
 * is read from one end to the other. */
enum {
    VECTOR = sizeof(Vector) / 8,
#if defined(__AVX512F__)
    SWEEP = 8,
#else
    SWEEP = 4,
#endif
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
    int four; /* not _mm_loadu_si32: gcc 10 lacks it */
    memcpy(&four, from, sizeof four);
    return _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
#endif
}

#if defined(__AVX512IFMA__)

/* IFMA multiplies 52 x 52 bits and adds the lower or the upper 52 bits of the product. For digits of 32 bits the
 * weight is split into 52 and 9 bits, and the upper half of the first product has the weight of the second one:
 * three instructions, where multiplying and adding apart take six. Digits of 16 bits leave room for 36 bits of the
 * weight below bit 52: split into 36 and 25 bits it takes two. At most 1024 * 2^52 < 2^64 a lane. */
enum { NARROW_BITS = 36 };

ALWAYS_INLINE void add_rows(Digest *digest, const void *digits, int width, int rows) {
    for (int first = 0; first < LANES; first += SWEEP * VECTOR) {
        __m512i low[SWEEP], high[SWEEP];
        for (int v = 0; v < SWEEP; v++) {
            low[v] = vector_load(&digest->lane[0][first + v * VECTOR]);
            high[v] = vector_load(&digest->lane[1][first + v * VECTOR]);
        }
        const char *from = (const char *)digits + first * width;
        for (int row = digest->rows; row < digest->rows + rows; row++, from += LANES * width) {
            const uint64_t *weight = width == 4 ? limbs52[row] : limbs36[row];
            __m512i w0 = vector_fill(weight[0]), w1 = vector_fill(weight[1]);
            prefetch_row(from, digest->ahead, width);
#pragma GCC unroll 8
            for (int v = 0; v < SWEEP; v++) {
                __m512i digit = load_digits(from + v * VECTOR * width, width);
                low[v] = _mm512_madd52lo_epu64(low[v], digit, w0);
                if (width == 4)
                    high[v] = _mm512_madd52hi_epu64(high[v], digit, w0);
                high[v] = _mm512_madd52lo_epu64(high[v], digit, w1);
            }
        }
        for (int v = 0; v < SWEEP; v++) {
            vector_store(&digest->lane[0][first + v * VECTOR], low[v]);
            vector_store(&digest->lane[1][first + v * VECTOR], high[v]);
        }
    }
    digest->rows += rows;
}

ALWAYS_INLINE u128 lane_total(const Digest *digest, int lane, int width) {
    return digest->lane[0][lane] +
           ((u128)digest->lane[1][lane] << (width == 4 ? 52 : NARROW_BITS));
}

#else

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
            if (first == 0)
                prefetch_row(from, digest->ahead, width);
            Vector w0 = vector_fill(weight[0]), w1 = vector_fill(weight[1]);
            Vector w2 = width == 4 ? vector_fill(weight[2]) : w1;
#pragma GCC unroll 8
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

#endif

#else

ALWAYS_INLINE void add_rows(Digest *digest, const void *digits, int width, int rows) {
    uint64_t sum[3][LANES];
    memcpy(sum, digest->lane, sizeof sum);
    for (int row = 0; row < rows; row++) {
        const uint32_t *weight =
            width == 4 ? limbs3[digest->rows + row] : limbs2[digest->rows + row];
        uint32_t w0 = weight[0], w1 = weight[1], w2 = width == 4 ? weight[2] : 0;
        const char *from = (const char *)digits + (size_t)row * LANES * width;
        prefetch_row(from, digest->ahead, width);
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

#if !defined(__AVX512IFMA__)
ALWAYS_INLINE u128 lane_total(const Digest *digest, int lane, int width) {
    u128 total = digest->lane[0][lane];
    if (width == 4)
        return total + ((u128)digest->lane[1][lane] << 21) + ((u128)digest->lane[2][lane] << 41);
    return total + ((u128)digest->lane[1][lane] << 31);
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
        total += (u128)reduce(lane_total(digest, l, width)) * power[l];
        if (l == LANES / 2 - 1)
            total = reduce(total); /* 32 products of 122 bits fill 127 bits */
    }
    return reduce(total);
}

ALWAYS_INLINE uint64_t sum_digits(const void *digits, int width, int count) {
    u128 total = 0; /* 512 products of 32 and 61 bits: 102 bits */
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
