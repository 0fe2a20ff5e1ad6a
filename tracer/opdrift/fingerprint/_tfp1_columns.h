/* Rows turned into the columns that a trace stores (opdrift/tracefile/schema.py, table `tensors`). */

#pragma once

#include "_tfp1_common.h"

enum {
    NUMBERS = 12, /* of 8 bytes, at the beginning of a row: raw, n, the statistics */
    NUMBER_GAP = 8,    /* else columns of 2048 rows would fall into the same lines of the cache */
    WIDE_BUCKET_BYTES = 5,
    FOLDED_BELOW = 4096, /* opdrift/tfp1.py */
};

/* Where the columns go. Sketches and samples are bytes of any length: offset i is where that of row i
 * begins, and the last one where all end. */
typedef struct {
    uint64_t *value;
    uint64_t *numbers; /* NUMBERS columns, NUMBER_GAP more than rows apart */
    uint8_t *code;
    int32_t *sketch_offset;
    uint8_t *sketch;
    int32_t *sample_offset;
    uint8_t *sample;
} Columns;

_Static_assert(offsetof(Row, sub) == 8 * (NUMBERS - 1), "the numbers are the beginning of a row");

/* A sketch as it is stored: doubles cut to their upper 40 bits, rounded; floats as they are. That of a small
 * content is folded: its halves added. */
static int store_sketch(const Row *row, int bytes, uint8_t *to) {
    if (row->n <= SAMPLES)
        return 0; /* the sample is the whole content */
    int folded = row->n < FOLDED_BELOW;
    if (bytes < 4) {
        int buckets = folded ? 32 : 64;
        for (int bucket = 0; bucket < buckets; bucket++) {
            float sum = row->sketch.narrow[bucket];
            if (folded)
                sum += row->sketch.narrow[bucket + 32];
            memcpy(to + sizeof sum * bucket, &sum, sizeof sum);
        }
        return buckets * (int)sizeof(float);
    }
    int buckets = folded ? 16 : 32;
    for (int bucket = 0; bucket < buckets; bucket++) {
        double sum = row->sketch.wide[bucket];
        if (folded)
            sum += row->sketch.wide[bucket + 16];
        uint64_t bits;
        memcpy(&bits, &sum, sizeof bits);
        bits = (bits + (1 << 23)) >> 24;
        memcpy(to + WIDE_BUCKET_BYTES * bucket, &bits, WIDE_BUCKET_BYTES);
    }
    return buckets * WIDE_BUCKET_BYTES;
}

#define PACK(TYPE)                                                                                 \
    for (int k = 0; k < samples; k++)                                                              \
        ((TYPE *)to)[k] = (TYPE)row->sample[k];                                                    \
    break

/* Samples packed to the width of a component. */
static int store_sample(const Row *row, int bytes, uint8_t *to) {
    int samples = row->n < SAMPLES ? (int)row->n : SAMPLES;
    switch (bytes) {
    case 1: PACK(uint8_t);
    case 2: PACK(uint16_t);
    case 4: PACK(uint32_t);
    default: PACK(uint64_t);
    }
    return samples * bytes;
}

NOINLINE void fill_columns(const Row *rows, int64_t count, const Columns *to) {
    int32_t sketch_end = 0, sample_end = 0;
    for (int64_t i = 0; i < count; i++) {
        const Row *row = rows + i;
        int bytes = COMPONENT_BYTES[row->code];
        to->value[i] = (uint64_t)row->value;
        for (int number = 0; number < NUMBERS; number++)
            memcpy(to->numbers + number * (count + NUMBER_GAP) + i, (const char *)row + 8 * number, 8);
        to->code[i] = (uint8_t)row->code;
        to->sketch_offset[i] = sketch_end;
        sketch_end += store_sketch(row, bytes, to->sketch + sketch_end);
        to->sample_offset[i] = sample_end;
        sample_end += store_sample(row, bytes, to->sample + sample_end);
    }
    to->sketch_offset[count] = sketch_end;
    to->sample_offset[count] = sample_end;
}
