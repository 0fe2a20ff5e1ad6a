/* Counts, extremes, sums and the sketch, chunk by chunk. */

#pragma once

#include "_tfp1_common.h"

enum { WIDE = 8 }; /* accumulators are spread over 8 lanes, summed up at the chunk's end */

enum { NANS, POSITIVE_INFINITIES, NEGATIVE_INFINITIES, ZEROS, SUBNORMALS, COUNTS };

typedef struct {
    double sketch[LANES];
    double sum[WIDE], ssq[WIDE];
    double low[WIDE], high[WIDE];
    double least[WIDE]; /* smallest magnitude: tells whether zeros and subnormals need counting */
} Pass;

/* Where the sketch puts a row: the source's group g of 8 lanes goes to bucket group g ^ rotation,
 * with the signs of the row's sign word, complemented for half of the rows. */
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
    union {
        uint32_t bits;
        float value;
    } x = {.bits = (uint32_t)(half & 0x7fff) << 13};
    x.value *= 0x1p112f;
    x.bits |= x.value >= 65536.0f ? 0x7f800000u : 0;
    x.bits |= (uint32_t)(half & 0x8000) << 16;
    return x.value;
}

ALWAYS_INLINE float widen_bfloat(uint16_t bfloat) {
    union {
        uint32_t bits;
        float value;
    } x = {.bits = (uint32_t)bfloat << 16};
    return x.value;
}

#define WIDEN(TYPE, EXPRESSION)                                                                    \
    for (int i = 0; i < count; i++) {                                                              \
        TYPE x = ((const TYPE *)source)[start + i];                                                \
        values[i] = (double)(EXPRESSION);                                                          \
    }                                                                                              \
    return

/* Components [start, start + count) as float64: exact but for 64-bit integers beyond 2^53. */
ALWAYS_INLINE void widen(const void *restrict source, int kind, size_t start, int count,
                         double *restrict values) {
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
ALWAYS_INLINE void count_special(const double *values, int count, double normal, int finite,
                                 int64_t *counts) {
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

NOINLINE void count_special_rows(const void *source, int kind, int rows, int finite,
                                 int64_t *counts) {
    for (int row = 0; row < rows; row++) {
        double values[LANES];
        widen(source, kind, (size_t)row * LANES, LANES, values);
        count_special(values, LANES, smallest_normal[kind], finite, counts);
    }
}

NOINLINE void count_special_tail(const void *source, int kind, size_t start, int count, int finite,
                                 int64_t *counts) {
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

/* Whole rows of a chunk, and where its next one begins. While a pass computes, which takes longer than
 * reading memory, it asks for the lines that the next chunk will need; 0 where none follows. */
typedef struct {
    const void *source;
    int rows;
    uint64_t first;
    size_t ahead;
} Rows;

ALWAYS_INLINE const char *row_at(const Rows *in, int kind, int row) {
    return (const char *)in->source + (size_t)row * LANES * COMPONENT_BYTES[code_of(kind)];
}

/* Rows of any kind in plain C: fixed loops over local arrays, which the compiler vectorises.
 * `clean`: extremes over the finite values, the others count as 0. */
ALWAYS_INLINE void pass_rows_plain(const Rows *in, int kind, int clean, Pass *pass) {
    double sum[LANES], ssq[LANES], low[LANES], high[LANES], least[LANES], bucket[LANES];
    for (int l = 0; l < LANES; l++) {
        sum[l] = ssq[l] = bucket[l] = 0.0;
        low[l] = least[l] = __builtin_inf();
        high[l] = -__builtin_inf();
    }
    for (int row = 0; row < in->rows; row++) {
        double values[LANES];
        prefetch_row(row_at(in, kind, row), in->ahead, COMPONENT_BYTES[code_of(kind)]);
        widen(in->source, kind, (size_t)row * LANES, LANES, values);
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
        RowPlan plan = plan_row(in->first + row);
        const float *sign = lane_sign[plan.complement][(in->first + row) & 63];
        for (int group = 0; group < 8; group++) {
            int from = 8 * (group ^ plan.rotation);
            for (int l = 0; l < 8; l++) /* times 1 or -1: exact */
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

NOINLINE void pass_rows_any(const Rows *in, int kind, Pass *pass) {
    pass_rows_plain(in, kind, 0, pass);
}

NOINLINE void pass_rows_clean(const Rows *in, int kind, Pass *pass) {
    pass_rows_plain(in, kind, 1, pass);
}

/* The last, incomplete row. */
NOINLINE void pass_tail(const void *source, int kind, size_t start, int count, uint64_t row,
                        int clean, Pass *pass) {
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

/* For _mm512_range_ps: the smaller magnitude, without its sign. A NaN is passed over or spreads, as it
 * is quiet or not; either way the sum tells of it, and what it is then does not matter. */
enum { LEAST_MAGNITUDE = 0x0a };

ALWAYS_INLINE __m512 load_16(const void *source, int kind, size_t i) {
    const uint8_t *bytes = (const uint8_t *)source + i;
    const uint16_t *words = (const uint16_t *)source + i;
    switch (kind) {
    case F16: return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)words));
    case BF16:
        return _mm512_castsi512_ps(_mm512_slli_epi32(
            _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)words)), 16));
    case U8:
        return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes)));
    default: return _mm512_loadu_ps((const float *)source + i);
    }
}

ALWAYS_INLINE __m512d low_half(__m512 v) {
    return _mm512_cvtps_pd(_mm512_castps512_ps256(v));
}

ALWAYS_INLINE __m512d high_half(__m512 v) {
    return _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
}

/* All statistics in one pass: separate passes over a chunk were three quarters of the whole cost.
 *
 * It is bound by the two ports for 512-bit work, so each instruction counts. Values become float64 on
 * their way from memory, which takes half of what a register does. A bucket is not summed up with signs:
 * `all` takes every value and `plus` those whose sign is kept, so the bucket is 2 plus - all, and `all`
 * gives the sum, too. */
ALWAYS_INLINE void pass_rows_fused(const Rows *in, int kind, Pass *pass) {
    __m512d all[8], plus[8], ssq[2];
    for (int g = 0; g < 8; g++)
        all[g] = plus[g] = _mm512_setzero_pd();
    ssq[0] = ssq[1] = _mm512_setzero_pd();
    __m512 low = _mm512_set1_ps(__builtin_inff());
    __m512 high = _mm512_set1_ps(-__builtin_inff());
    __m512 least = low;
    float widened[LANES] __attribute__((aligned(64)));

    for (int row = 0; row < in->rows; row++) {
        RowPlan plan = plan_row(in->first + row);
        uint64_t kept = ~(plan.word ^ (0 - (uint64_t)plan.complement));
        const float *values = kind == F32 ? (const float *)row_at(in, F32, row) : widened;
        prefetch_row(row_at(in, kind, row), in->ahead, COMPONENT_BYTES[kind]);
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            __m512 x = load_16(in->source, kind, (size_t)row * LANES + 16 * v);
            if (kind != F32)
                _mm512_store_ps(widened + 16 * v, x);
            low = _mm512_min_ps(low, x);
            high = _mm512_max_ps(high, x);
            least = _mm512_range_ps(least, x, LEAST_MAGNITUDE);
        }
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            int from = 8 * (g ^ plan.rotation);
            __m512d x = _mm512_cvtps_pd(_mm256_loadu_ps(values + from));
            all[g] = _mm512_add_pd(all[g], x);
            plus[g] = _mm512_mask_add_pd(plus[g], (__mmask8)(kept >> from), plus[g], x);
            /* The square of a float32 is exact in float64: fused or not, the sum rounds alike. */
            ssq[g & 1] = _mm512_fmadd_pd(x, x, ssq[g & 1]);
        }
    }

    __m512d sum = _mm512_setzero_pd();
    for (int g = 0; g < 8; g++) {
        __m512d bucket = _mm512_sub_pd(_mm512_add_pd(plus[g], plus[g]), all[g]);
        _mm512_storeu_pd(pass->sketch + 8 * g, bucket);
        sum = _mm512_add_pd(sum, all[g]);
    }
    _mm512_storeu_pd(pass->sum, sum);
    _mm512_storeu_pd(pass->ssq, _mm512_add_pd(ssq[0], ssq[1]));
    _mm512_storeu_pd(pass->low, _mm512_min_pd(low_half(low), high_half(low)));
    _mm512_storeu_pd(pass->high, _mm512_max_pd(low_half(high), high_half(high)));
    _mm512_storeu_pd(pass->least, _mm512_min_pd(low_half(least), high_half(least)));
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HAS_FUSED_PASS 1

ALWAYS_INLINE __m256 load_8(const void *source, int kind, size_t i) {
    const uint8_t *bytes = (const uint8_t *)source + i;
    const uint16_t *words = (const uint16_t *)source + i;
    switch (kind) {
    case F16: return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)words));
    case BF16:
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)words)), 16));
    case U8:
        return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes)));
    default: return _mm256_loadu_ps((const float *)source + i);
    }
}

ALWAYS_INLINE __m256d low_half(__m256 v) {
    return _mm256_cvtps_pd(_mm256_castps256_ps128(v));
}

ALWAYS_INLINE __m256d high_half(__m256 v) {
    return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
}

/* On its way from memory, which takes half of what a register does. */
ALWAYS_INLINE __m256d four_at(const float *from) {
    return _mm256_cvtps_pd(_mm_loadu_ps(from));
}

/* Negate the doubles whose bit in `signs` is set, bit 0 for the first one. */
ALWAYS_INLINE __m256d apply_signs(__m256d v, uint64_t signs) {
    const __m256i to_top = _mm256_set_epi64x(60, 61, 62, 63);
    __m256i bits = _mm256_sllv_epi64(_mm256_set1_epi64x((long long)signs), to_top);
    return _mm256_xor_pd(v, _mm256_and_pd(_mm256_castsi256_pd(bits), _mm256_set1_pd(-0.0)));
}

/* All statistics in one pass, in two sweeps: 16 registers hold half of the buckets, so the first
 * sweep reads one half of each row and the second the other. */
ALWAYS_INLINE void pass_rows_fused(const Rows *in, int kind, Pass *pass) {
    __m256d sum = _mm256_setzero_pd(), ssq = _mm256_setzero_pd();
    __m256 low = _mm256_set1_ps(__builtin_inff());
    __m256 high = _mm256_set1_ps(-__builtin_inff());
    __m256i least = _mm256_set1_epi32(0x7f800000); /* least magnitude, as float32 bits */
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);

    for (int half = 0; half < 2; half++) {
        __m256d bucket[8];
        for (int b = 0; b < 8; b++)
            bucket[b] = _mm256_setzero_pd();
        for (int row = 0; row < in->rows; row++) {
            RowPlan plan = plan_row(in->first + row);
            if (half)
                prefetch_row(row_at(in, kind, row), in->ahead, COMPONENT_BYTES[kind]);
            uint64_t signs = plan.word ^ (0 - (uint64_t)plan.complement);
#pragma GCC unroll 4
            for (int g = 0; g < 4; g++) {
                int group = (4 * half + g) ^ plan.rotation;
                size_t at = (size_t)row * LANES + 8 * group;
                __m256 values = load_8(in->source, kind, at);
                low = _mm256_min_ps(low, values);
                high = _mm256_max_ps(high, values);
                least = _mm256_min_epu32(least,
                                         _mm256_and_si256(_mm256_castps_si256(values), magnitude));
                const float *from = (const float *)in->source + at;
                __m256d first = kind == F32 ? four_at(from) : low_half(values);
                __m256d second = kind == F32 ? four_at(from + 4) : high_half(values);
                sum = _mm256_add_pd(sum, _mm256_add_pd(first, second));
                ssq = _mm256_add_pd(ssq,
                                    _mm256_fmadd_pd(first, first, _mm256_mul_pd(second, second)));
                uint64_t group_signs = signs >> (8 * group);
                bucket[2 * g] = _mm256_add_pd(bucket[2 * g], apply_signs(first, group_signs));
                bucket[2 * g + 1] =
                    _mm256_add_pd(bucket[2 * g + 1], apply_signs(second, group_signs >> 4));
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
NOINLINE void pass_rows_f32(const Rows *in, Pass *pass) {
    pass_rows_fused(in, F32, pass);
}

NOINLINE void pass_rows_f16(const Rows *in, Pass *pass) {
    pass_rows_fused(in, F16, pass);
}

NOINLINE void pass_rows_bf16(const Rows *in, Pass *pass) {
    pass_rows_fused(in, BF16, pass);
}

NOINLINE void pass_rows_u8(const Rows *in, Pass *pass) {
    pass_rows_fused(in, U8, pass);
}
#endif

/* `pass` is fresh. */
static void pass_rows(const Rows *in, int kind, Pass *pass) {
    switch (kind) {
#ifdef HAS_FUSED_PASS
    case F32: pass_rows_f32(in, pass); return;
    case F16: pass_rows_f16(in, pass); return;
    case BF16: pass_rows_bf16(in, pass); return;
    case U8: pass_rows_u8(in, pass); return; /* also bool: masks */
#endif
    default: pass_rows_any(in, kind, pass);
    }
}

/* ---- statistics of a tensor ------------------------------------------------------------------ */

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

static Totals pass_chunk(const Rows *in, int kind, int rest, int clean, Pass *pass) {
    start_pass(pass);
    if (in->rows && clean)
        pass_rows_clean(in, kind, pass);
    else if (in->rows)
        pass_rows(in, kind, pass);
    if (rest)
        pass_tail(in->source, kind, (size_t)in->rows * LANES, rest, in->first + in->rows, clean,
                  pass);
    return total(pass);
}

/* `last`: no chunk follows this one in memory. */
static void add_statistics(Statistics *statistics, const void *source, int kind, int count,
                           int last) {
    size_t ahead = last ? 0 : (size_t)CHUNK * COMPONENT_BYTES[code_of(kind)];
    Rows in = {source, count / LANES, statistics->chunks * (CHUNK / LANES), ahead};
    Pass pass;
    Totals t = pass_chunk(&in, kind, count % LANES, 0, &pass);
    /* A NaN among the values makes the sum one. So can float64 values that overflow it: harmless, the
     * clean pass then finds nothing to clean. */
    int finite = t.sum == t.sum && t.low > -__builtin_inf() && t.high < __builtin_inf();
    if (!finite)
        t = pass_chunk(&in, kind, count % LANES, 1, &pass);
    if (!finite || t.least == 0.0 || t.least < smallest_normal[kind]) {
        count_special_rows(source, kind, count / LANES, finite, statistics->counts);
        count_special_tail(source, kind, count / LANES * LANES, count % LANES, finite,
                           statistics->counts);
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
