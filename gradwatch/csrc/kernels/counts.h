/* Compute the checksum and the histogram of a tensor, in one read each. Plain C99, no Python. */
#ifndef GRADWATCH_COUNTS_H
#define GRADWATCH_COUNTS_H

#include "blocks.h"

/* Checksum: each 64-bit word is keyed by its position, its halves are multiplied (as in NH,
 * doi:10.1007/3-540-48405-1_14), and all products are summed, so the order of the work does not matter. The torch version
 * is in batch_hash.py. */
#define GOLDEN 0x9e3779b97f4a7c15u

INLINE uint64_t keyed(uint64_t word, uint64_t key)
{
    uint64_t x = word ^ key;
    return (uint64_t)(uint32_t)x * (uint32_t)(x >> 32) + word; /* a vector multiplies halves in one instruction */
}

/* Return the sum over some words. The key belongs to the word before them, and afterwards to the last word. */
EVERY_CPU static uint64_t sum_of_words(const unsigned char *data, size_t words, uint64_t *key_before)
{
    uint64_t sum = 0, key = *key_before;
    for (size_t i = 0; i < words; i++) {
        uint64_t word;
        memcpy(&word, data + 8 * i, 8); /* the bytes may not be aligned */
        key += GOLDEN; /* position times GOLDEN, by addition: vectors multiply 64 bits slowly */
        sum += keyed(word, key);
    }
    *key_before = key;
    return sum;
}

/* Return the sum over the last bytes, of any length; the last word is padded with zeros. */
static uint64_t sum_of_end(const unsigned char *data, size_t bytes, uint64_t key)
{
    uint64_t sum = sum_of_words(data, bytes / 8, &key), word = 0;
    if (bytes % 8 == 0)
        return sum;
    memcpy(&word, data + bytes / 8 * 8, bytes % 8);
    return sum + keyed(word, key + GOLDEN);
}

static uint64_t checksum_of(const void *data, size_t bytes)
{
    return bytes * GOLDEN + sum_of_end(data, bytes, 0);
}

/* Histogram: the exponent and the two highest mantissa bits of a float are its bin, 4 to an octave. */
enum {
    BIN_SHIFT = 21,
    LOWEST_KEY = (127 - 40) * 4,         /* 2^-40: smaller magnitudes count as zero */
    HIGHEST_KEY = (127 + 16) * 4,        /* 2^16: larger magnitudes and Inf count in the outermost bin */
    SIDE = HIGHEST_KEY - LOWEST_KEY + 1, /* bins on either side of the one for zero */
    BINS = 2 * SIDE + 1,
    PIECE = BLOCK / 4,
    TABLES = 4
};

#if defined(__GNUC__)
#define LINE_ALIGNED __attribute__((aligned(64)))
#elif defined(_MSC_VER)
#define LINE_ALIGNED __declspec(align(64))
#else
#define LINE_ALIGNED
#endif

/* Counts so far, and the bins of the values of a piece. Neighbors count in different tables, and zeros lane by lane after
 * the bins: many increments of one bin would wait for each other. Places begin on a cache line, since a vector stored
 * across two lines is slow to load. */
typedef struct {
    LINE_ALIGNED uint32_t places[PIECE];
    uint32_t tables[TABLES][BINS + LANES];
} Counts;

/* Return a block as the bits of floats for any kind; doubles are rounded. */
INLINE const uint32_t *rounded_bits(const void *data, size_t begin, size_t n, Kind kind, uint32_t *buffer)
{
    const double *x = (const double *)data + begin;
    if (kind != F64)
        return float_bits(data, begin, n, kind, buffer);
    for (size_t i = 0; i < n; i++)
        buffer[i] = bits_of((float)x[i]);
    for (size_t i = n; i % LANES; i++)
        buffer[i] = 0;
    return buffer;
}

/* Find the bin of each value of a piece; `n` is a multiple of LANES. */
INLINE void find_places(const uint32_t *bits, size_t n, uint32_t *places)
{
    for (size_t i = 0; i < n; i += LANES)
        for (int l = 0; l < LANES; l++) {
            int32_t step = (int32_t)((bits[i + l] & MAGNITUDE_MASK) >> BIN_SHIFT) - (LOWEST_KEY - 1);
            step = step < 0 ? 0 : step > SIDE ? SIDE : step;
            int32_t bin = bits[i + l] >> 31 ? SIDE - step : SIDE + step;
            places[i + l] = (uint32_t)(step ? bin : BINS + l);
        }
}

/* Count a block, in vectors as far as possible. */
INLINE void count_block(const uint32_t *bits, size_t length, Counts *counts)
{
    for (size_t begin = 0, n; begin < length; begin += n) {
        n = length - begin < PIECE ? length - begin : PIECE;
        find_places(bits + begin, padded_length(n), counts->places);
        size_t i = 0;
        for (; i + TABLES <= n; i += TABLES)
            for (int t = 0; t < TABLES; t++)
                counts->tables[t][counts->places[i + t]]++;
        for (; i < n; i++)
            counts->tables[0][counts->places[i]]++;
    }
}

/* Remove NaN from the counts: it was counted like Inf of the same sign. */
INLINE void drop_nan(const uint32_t *bits, size_t n, int64_t *out)
{
    for (size_t i = 0; i < n; i++)
        if ((bits[i] & MAGNITUDE_MASK) > (uint32_t)INFINITE_BITS)
            out[bits[i] >> 31 ? 0 : BINS - 1]--;
}

/* Write the counts of at most 2^32 values: BINS of them, from the most negative bin to the most positive. */
INLINE void write_counts(const Counts *counts, const void *data, size_t n, Kind kind, int64_t *out)
{
    uint32_t narrow[BLOCK];
    memset(out, 0, BINS * sizeof *out);
    for (int t = 0; t < TABLES; t++) {
        for (int bin = 0; bin < BINS; bin++)
            out[bin] += counts->tables[t][bin];
        for (int lane = 0; lane < LANES; lane++)
            out[SIDE] += counts->tables[t][BINS + lane];
    }
    /* a second read only if an outermost bin is not empty, as NaN is counted there */
    for (size_t begin = 0, length; (out[0] || out[BINS - 1]) && begin < n; begin += length) {
        length = block_length(n - begin);
        drop_nan(rounded_bits(data, begin, length, kind, narrow), length, out);
    }
}

EVERY_CPU static void histogram_of(const void *data, size_t n, Kind kind, int64_t *out)
{
    Counts counts;
    uint32_t narrow[BLOCK];
    memset(counts.tables, 0, sizeof counts.tables);
    for (size_t begin = 0, length; begin < n; begin += length) {
        length = block_length(n - begin);
        count_block(rounded_bits(data, begin, length, kind, narrow), length, &counts);
    }
    write_counts(&counts, data, n, kind, out);
}

#endif
