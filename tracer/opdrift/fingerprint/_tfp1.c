/* tfp1: the fingerprint of a tensor's content, in one pass over its memory.
 *
 *     raw = sum_i digit[i] * r^i  mod p,    p = 2^61 - 1,  r a primitive root of GF(p)
 *
 * plus counts, extremes, sums, a count-sketch and 32 sample values, written into a row of 640
 * bytes. docs/decisions/0004-fingerprint.md says why this hash; opdrift/tfp1.py is the readable
 * definition.
 *
 * Compiled up to four times (hatch_build.py): for any machine, for AVX2, for AVX-512, and for that
 * with IFMA. Every build
 * gives the same raw, counts, extremes and sample. Sums and sketches agree to rounding (1e-9 of the
 * norm), as the builds add in different orders. Compile with -ffp-contract=off, which keeps float64
 * sums the same from one compiler to the next, and -fno-strict-aliasing, as bytes are read as what
 * their kind says.
 *
 * It needs `unsigned __int128` (gcc, clang) and a little-endian machine, calls no library function
 * but memcpy and memset, and keeps no state but tables that opdrift_init fills once. */

#include "_tfp1_common.h"
#include "_tfp1_digest.h"
#include "_tfp1_statistics.h"

#ifndef OPDRIFT_SOURCE
#define OPDRIFT_SOURCE 0 /* hatch_build.py defines it */
#endif

#define EXPORT __attribute__((visibility("default")))

typedef struct {
    uint64_t raw;
    int64_t n;
    double min, max, absmax, sum, ssq;
    int64_t nan, pinf, ninf, zero, sub;
    union {
        float narrow[64]; /* components of 1 and 2 bytes */
        double wide[32];  /* the others: bucket j holds s[j] + s[j + 32] */
    } sketch;
    uint64_t sample[SAMPLES];
    uint32_t version, code, flags, item;
    int64_t value;
    uint64_t unused;
} Row;

_Static_assert(sizeof(Row) == 640, "the row's layout is part of the format");

#include "_tfp1_columns.h"

/* ---- rows ------------------------------------------------------------------------------------ */

typedef struct {
    int kind;
    int bytes;      /* per component */
    int everything; /* or the digest only */
    Digest digest;
    Statistics statistics;
} State;

static void start(State *state, int kind, int everything) {
    state->kind = kind;
    state->bytes = COMPONENT_BYTES[code_of(kind)];
    state->everything = everything && kind != RAW;
    state->digest.rows = 0;
    state->digest.raw = 0;
    state->digest.scale = 1;
    state->digest.ahead = state->everything ? 0 : DIGITS_AHEAD;
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
        add_statistics(&state->statistics, source, state->kind, count, last);
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
    row->min = from->min + 0.0; /* -0 becomes 0: which of the two comes first is chance */
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
static void gather(char *to, const char *source, int bytes, int64_t first, int count, int64_t item,
                   int64_t batch, int64_t inner) {
    for (int done = 0; done < count;) {
        int64_t at = item_component(first + done, item, batch, inner);
        int64_t run = inner - (first + done) % inner;
        if (run > count - done)
            run = count - done;
        memcpy(to + (size_t)done * bytes, source + (size_t)at * bytes, (size_t)run * bytes);
        done += (int)run;
    }
}

NOINLINE void fill_item_row(Row *row, const char *source, int64_t outer, int64_t batch,
                            int64_t inner, int64_t item, int kind, int64_t value) {
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

/* Bits, not floats: what the thread does with subnormals does not matter. */
static int round_to_bfloat16(uint16_t *to, const char *source, int count) {
    uint32_t largest = 0;
    for (int i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, source + 4 * i, 4);
        uint32_t magnitude = bits & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
        to[i] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
    return largest <= 0x7f800000;
}

/* Both while the chunk is in the cache. */
NOINLINE int digest_and_as_bfloat16(const char *source, int64_t n, uint64_t *raw, uint64_t *cast) {
    uint16_t chunk[CHUNK] __attribute__((aligned(64)));
    State kept, rounded;
    start(&kept, F32, 0);
    start(&rounded, BF16, 0);
    rounded.digest.ahead = 0;
    for (int64_t first = 0; first < n; first += CHUNK) {
        int count = n - first < CHUNK ? (int)(n - first) : CHUNK;
        add_chunk(&kept, source + 4 * first, count, first + count == n);
        if (!round_to_bfloat16(chunk, source + 4 * first, count))
            return 0;
        add_chunk(&rounded, chunk, count, first + count == n);
    }
    *raw = kept.digest.raw;
    *cast = rounded.digest.raw;
    return 1;
}

/* ---- the thread's floating-point environment ------------------------------------------------- */

/* A program may flush subnormals to zero (torch.set_flush_denormal), trap exceptions or round
 * another way. The fingerprint must not depend on that, and the program's own settings and exception
 * flags must be what they were. */
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

/* ---- what Python calls (opdrift/fingerprint/compiled.py) ------------------------------------- */

/* The crc32 of the source that was compiled: a library left over from another version is refused. */
EXPORT uint32_t opdrift_source(void) {
    return OPDRIFT_SOURCE;
}

/* The best build for this machine: 3 AVX-512 with IFMA, 2 AVX-512, 1 AVX2, 0 any. Ask it of the plainest build. Asked of
 * the processor itself: __builtin_cpu_supports needs a run-time library that not every clang has. */
EXPORT int opdrift_best_build(void) {
#if defined(__x86_64__)
    enum { FMA = 1 << 12, OSXSAVE = 1 << 27, F16C = 1 << 29 };                    /* leaf 1, ecx */
    enum { AVX2 = 1 << 5, BMI2 = 1 << 8, AVX512F = 1 << 16, AVX512DQ = 1 << 17 }; /* leaf 7, ebx */
    enum { AVX512IFMA = 1 << 21 };
    const unsigned avx512bw = 1u << 30, avx512vl = 1u << 31;
    const unsigned need1 = FMA | OSXSAVE | F16C;
    const unsigned need7 = AVX2 | BMI2;
    const unsigned need512 = AVX512F | AVX512DQ | avx512bw | avx512vl;
    const unsigned ymm_state = 0x06, zmm_state = 0xe6; /* what the system saves between threads */
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & need1) != need1)
        return 0;
    unsigned state, state_high;
    __asm__ volatile("xgetbv" : "=a"(state), "=d"(state_high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (b & need7) != need7)
        return 0;
    if ((state & ymm_state) != ymm_state)
        return 0;
    if ((b & need512) != need512 || (state & zmm_state) != zmm_state)
        return 1;
    return b & AVX512IFMA ? 3 : 2;
#else
    return 0;
#endif
}

/* Fill the tables; before anything else, and again with the same arguments at will.
 * fp8: the 256 values of each fp8 format; fp8_normal: its smallest normal value, 0 if it has no
 * subnormal ones. */
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
        limbs52[row][0] = weight & 0xfffffffffffff;
        limbs52[row][1] = weight >> 52;
        limbs36[row][0] = weight & 0xfffffffff;
        limbs36[row][1] = weight >> 36;
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
EXPORT void opdrift_put_batch(Row *rows, const void *source, int64_t outer, int64_t batch,
                              int64_t inner, int kind, int64_t value) {
    FloatEnvironment saved = default_floats();
    for (int64_t item = 0; item < batch; item++) {
        if (outer == 1 || inner == 0) {
            const char *at =
                (const char *)source + (size_t)(item * inner) * COMPONENT_BYTES[code_of(kind)];
            fill_row(rows + item, at, outer * inner, kind, value);
        } else {
            fill_item_row(rows + item, source, outer, batch, inner, item, kind, value);
        }
        rows[item].item = (uint32_t)item;
    }
    restore_floats(saved);
}

/* Rows as the columns that a trace stores; see _tfp1_columns.h. */
EXPORT void opdrift_columns(const Row *rows, int64_t count, const Columns *to) {
    fill_columns(rows, count, to);
}

/* Only raw, at two to three times the speed. */
EXPORT uint64_t opdrift_raw(const void *source, int64_t n, int kind) {
    return digest_only(source, n, kind);
}

/* The same for many contents at once. */
EXPORT void opdrift_raws(const int64_t *addresses, const int64_t *lengths, const int64_t *kinds,
                         int64_t count, uint64_t *raws) {
    for (int64_t i = 0; i < count; i++)
        raws[i] = digest_only((const char *)addresses[i], lengths[i], (int)kinds[i]);
}

/* The same of contents of float32, and what they are as bfloat16, rounded to the nearest, ties to even. 0 if there is
 * a NaN among them: what becomes of it is torch's choice, and differs between the start and the end of a tensor. */
EXPORT int opdrift_bfloat16_raws(const int64_t *addresses, const int64_t *lengths, int64_t count,
                                 uint64_t *raws, uint64_t *casts) {
    for (int64_t i = 0; i < count; i++)
        if (!digest_and_as_bfloat16((const char *)addresses[i], lengths[i], raws + i, casts + i))
            return 0;
    return 1;
}
