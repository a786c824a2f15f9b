/* Checksum and histogram of a tensor, in one read each. Plain C99, no Python. */
#ifndef GRADWATCH_COUNTS_H
#define GRADWATCH_COUNTS_H

#include "_blocks.h"

/* Checksum: each 64-bit word is keyed by its position, its halves multiplied (as in NH, doi:10.1007/3-540-48405-1_14),
 * and all are summed, so the order of the work does not matter. The torch twin is in batch_hash.py. */
#define GOLDEN 0x9e3779b97f4a7c15u

INLINE uint64_t keyed(uint64_t word, uint64_t key)
{
    uint64_t x = word ^ key;
    return (uint64_t)(uint32_t)x * (uint32_t)(x >> 32) + word; /* so that vectors multiply halves: one instruction */
}

EVERY_CPU static uint64_t checksum_of(const void *data, size_t bytes)
{
    const unsigned char *bytes_in = data;
    size_t words = bytes / 8;
    uint64_t sum = bytes * GOLDEN, key = 0;
    for (size_t i = 0; i < words; i++) {
        uint64_t word;
        memcpy(&word, bytes_in + 8 * i, 8);
        key += GOLDEN; /* times the position: multiplying 64 bits is what vectors are slow at */
        sum += keyed(word, key);
    }
    if (bytes % 8) {
        uint64_t word = 0;
        memcpy(&word, bytes_in + 8 * words, bytes % 8);
        sum += keyed(word, key + GOLDEN);
    }
    return sum;
}

/* Histogram: the exponent and the two highest mantissa bits of a float are its bin, four to an octave. */
enum {
    TABLES = 2,                        /* by turns: neighbours that fall into one bin would wait for each other */
    BIN_SHIFT = 21,
    KEYS = 1 << 10,                    /* of magnitudes; the sign doubles them */
    LOWEST_KEY = (127 - 40) * 4,       /* 2^-40: what is smaller counts as zero */
    HIGHEST_KEY = (127 + 16) * 4,      /* 2^16: what is larger, Inf too, counts in the outermost bin */
    INFINITE_KEY = 255 * 4,            /* from here on: Inf or NaN */
    SIDE = HIGHEST_KEY - LOWEST_KEY + 1, /* bins on either side of the one for zero */
    BINS = 2 * SIDE + 1
};

/* A block as the bits of floats for any kind: doubles are rounded. */
INLINE const uint32_t *rounded_bits(const void *data, size_t begin, size_t n, Kind kind, uint32_t *buffer)
{
    const double *x = (const double *)data + begin;
    if (kind != F64)
        return float_bits(data, begin, n, kind, buffer);
    for (size_t i = 0; i < n; i++)
        buffer[i] = bits_of((float)x[i]);
    return buffer;
}

INLINE int64_t count_between(const uint32_t *table, int begin, int end)
{
    uint64_t count = 0;
    for (int key = begin; key < end; key++)
        count += table[key];
    return (int64_t)count;
}

/* Add a table of one sign to the bins: outwards from `zero_bin`, upwards with `step` 1 and downwards with -1. */
INLINE void add_side(const uint32_t *table, int64_t *zero_bin, int step)
{
    *zero_bin += count_between(table, 0, LOWEST_KEY);
    for (int bin = 1; bin < SIDE; bin++)
        zero_bin[step * bin] += table[LOWEST_KEY + bin - 1];
    zero_bin[step * SIDE] += count_between(table, HIGHEST_KEY, KEYS);
}

/* NaN was counted as if it were Inf of the same sign: take it out again. */
static void drop_nan(const uint32_t *bits, size_t n, int64_t *counts)
{
    for (size_t i = 0; i < n; i++)
        if ((bits[i] & MAGNITUDE_MASK) > (uint32_t)INFINITE_BITS)
            counts[bits[i] >> 31 ? 0 : BINS - 1]--;
}

/* Add the counts of at most 2^32 values to `counts`: BINS of them, from the most negative bin to the most positive. */
EVERY_CPU static void histogram_of(const void *data, size_t n, Kind kind, int64_t *counts)
{
    uint32_t tables[TABLES][2 * KEYS] = {{0}};
    uint32_t narrow[BLOCK];
    int64_t special = 0;
    for (size_t begin = 0, length; begin < n; begin += length) {
        length = block_length(n - begin);
        const uint32_t *bits = rounded_bits(data, begin, length, kind, narrow);
        size_t i = 0;
        for (; i + TABLES <= length; i += TABLES)
            for (int t = 0; t < TABLES; t++)
                tables[t][bits[i + t] >> BIN_SHIFT]++;
        for (; i < length; i++)
            tables[0][bits[i] >> BIN_SHIFT]++;
    }
    for (int t = 0; t < TABLES; t++) {
        add_side(tables[t], counts + SIDE, 1);
        add_side(tables[t] + KEYS, counts + SIDE, -1);
        special += count_between(tables[t], INFINITE_KEY, KEYS) + count_between(tables[t] + KEYS, INFINITE_KEY, KEYS);
    }
    for (size_t begin = 0, length; special && begin < n; begin += length) {
        length = block_length(n - begin);
        drop_nan(rounded_bits(data, begin, length, kind, narrow), length, counts);
    }
}

#endif
