/* What all parts of the core share: types, constants, arithmetic modulo p, tables. */

#pragma once

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

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))

typedef unsigned __int128 u128;

enum {
    P_BITS = 61,
    LANES = 64,            /* elements of one row */
    CHUNK = 4096,          /* components of one chunk: 64 rows, at most 32 KB, stays in L1 */
    MAX_DIGIT_ROWS = 1024, /* between flushes: 2^32 * 2^21 * 1024 < 2^64, so lanes can't overflow */
    CHUNK_DIGIT_ROWS = 128, /* the most that one chunk adds: 4096 components of two digits */
    SCALAR_DIGITS = 512,    /* below this a plain loop beats setting up the lanes */
    SAMPLES = 32,
    FP8_TABLES = 5,
};

#define P ((1ull << P_BITS) - 1)
#define R 0x05a49cfda2babfd3ull
#define SIGN_SEED 0x7466703173676e00ull
#define SAMPLE_SEED 0x7466703170736e00ull
#define CHUNK_SEED 0x74660000u

enum { F32, F64, F16, BF16, FP8, I8, U8, I16, U16, I32, U32, I64, U64, RAW, CODES };
enum { FIRST_FP8_KIND = 16 }; /* a kind is a code, or 16 + the number of an fp8 table */
enum { HAS_RAW = 1, HAS_STATISTICS = 2, HAS_SKETCH = 4, HAS_SAMPLE = 8 };

static const uint8_t COMPONENT_BYTES[CODES] = {4, 8, 2, 2, 1, 1, 1, 2, 2, 4, 4, 8, 8, 1};

ALWAYS_INLINE int code_of(int kind) {
    return kind >= FIRST_FP8_KIND ? FP8 : kind;
}

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

/* Ask for the cache lines of the row that lies `ahead` bytes behind a row of `bytes` x 64 bytes. What is
 * asked for beyond the end of a tensor is not read, so it may be anything. */
ALWAYS_INLINE void prefetch_row(const char *row, size_t ahead, int bytes) {
    for (int line = 0; line < bytes; line++)
        __builtin_prefetch(row + ahead + 64 * line);
}

/* ---- tables --------------------------------------------------------------------------------- */

static uint64_t power[SCALAR_DIGITS];      /* r^j */
static uint32_t limbs3[MAX_DIGIT_ROWS][3]; /* r^(64 row) in 21, 20 and 20 bits: 32-bit digits */
static uint32_t limbs2[MAX_DIGIT_ROWS][2]; /* r^(64 row) in 31 and 30 bits: 8 and 16-bit digits */
static uint64_t limbs52[MAX_DIGIT_ROWS][2]; /* r^(64 row) in 52 and 9 bits: 32-bit digits with IFMA */
static uint64_t limbs36[MAX_DIGIT_ROWS][2]; /* r^(64 row) in 36 and 25 bits: narrower digits with IFMA */
static uint64_t sign_word[64];        /* the sketch's signs of a row; bit l set: lane l negative */
static float lane_sign[2][64][LANES]; /* the same as +1 and -1, and its complement */
static uint32_t sample_jitter[SAMPLES];
static float fp8_value[FP8_TABLES][256];
static double smallest_normal[FIRST_FP8_KIND + FP8_TABLES]; /* by kind; 0: no subnormal values */
