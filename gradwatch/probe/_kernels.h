/* The loops over a tensor's memory: statistics, update norms, checksum and histogram, one read each. Plain C99, no Python.
 *
 * Float sums run in a fixed number of lanes and in a fixed order, without fused multiply-add, so that their bits are the
 * same on every instruction set. Lanes are flushed to double after every block. Magnitudes compare as integers: the bits
 * of |x| order like |x|, with NaN above Inf above everything finite. */
#ifndef GRADWATCH_KERNELS_H
#define GRADWATCH_KERNELS_H

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#elif defined(_MSC_VER)
#define INLINE static __forceinline
#else
#define INLINE static inline
#endif

/* One source, several instruction sets, chosen by the dynamic linker: needs ifunc, which glibc has on x86-64. */
#if defined(__x86_64__) && defined(__GLIBC__) && (defined(__clang__) ? __clang_major__ >= 16 : defined(__GNUC__))
#define EVERY_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define EVERY_CPU
#endif

enum { LANES = 16, BLOCK = 1024 }; /* 64 float additions per lane between two flushes: norms good to about 1e-6 */

typedef enum { F32, BF16, F16, F64, OTHER } Kind;

/* Within these, squares of a block neither overflow nor lose digits that matter: 2^-48 and 2^55 as float bits. */
#define SMALLEST_FAST ((int32_t)(127 - 48) << 23)
#define LARGEST_FAST ((int32_t)(127 + 55) << 23)
#define INFINITE_BITS ((int32_t)0x7f800000)
#define MAGNITUDE_MASK 0x7fffffffu

INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Half precision to the bits of the equal float, without branches so that it vectorises. */
INLINE uint32_t widen_half(uint16_t half)
{
    uint32_t magnitude = half & 0x7fffu, sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t normal = (magnitude << 13) + (112u << 23);
    uint32_t special = magnitude >= 0x7c00u ? 112u << 23 : 0; /* the exponent of Inf and NaN is all ones in both */
    uint32_t subnormal = bits_of((float)(int32_t)magnitude * 5.9604644775390625e-8f); /* 2^-24 */
    uint32_t is_subnormal = 0u - (magnitude < 0x400u);
    return (subnormal & is_subnormal) | ((normal + special) & ~is_subnormal) | sign;
}

/* Tensors are read in blocks: whole ones, then what is left in full lanes, then the last few elements. */
INLINE size_t block_length(size_t left)
{
    return left >= BLOCK ? BLOCK : left >= LANES ? left / LANES * LANES : left;
}

/* A block as the bits of floats: in place, or widened into `buffer`, zeros behind it up to a multiple of LANES. */
INLINE const uint32_t *float_bits(const void *data, size_t begin, size_t n, Kind kind, uint32_t *buffer)
{
    const uint16_t *halves = (const uint16_t *)data + begin;
    const uint32_t *words = (const uint32_t *)data + begin;
    if (kind == F32 && n % LANES == 0)
        return words;
    if (kind == F32)
        memcpy(buffer, words, n * sizeof *words);
    else if (kind == BF16)
        for (size_t i = 0; i < n; i++)
            buffer[i] = (uint32_t)halves[i] << 16;
    else
        for (size_t i = 0; i < n; i++)
            buffer[i] = widen_half(halves[i]);
    for (size_t i = n; i % LANES; i++)
        buffer[i] = 0;
    return buffer;
}

/* A block as doubles in the same way, but with `fill` behind it. */
INLINE const double *doubles(const void *data, size_t begin, size_t n, Kind kind, double fill, double *buffer)
{
    uint32_t narrow[BLOCK];
    if (kind == F64 && n % LANES == 0)
        return (const double *)data + begin;
    if (kind == F64) {
        memcpy(buffer, (const double *)data + begin, n * sizeof *buffer);
    } else {
        const uint32_t *bits = float_bits(data, begin, n, kind, narrow);
        for (size_t i = 0; i < n; i++)
            buffer[i] = float_of(bits[i]);
    }
    for (size_t i = n; i % LANES; i++)
        buffer[i] = fill;
    return buffer;
}

/* Sum of the lanes, halves onto halves. */
INLINE double folded(const double *lanes)
{
    double part[LANES / 2];
    for (int l = 0; l < LANES / 2; l++)
        part[l] = lanes[l] + lanes[l + LANES / 2];
    for (int width = LANES / 4; width; width /= 2)
        for (int l = 0; l < width; l++)
            part[l] += part[l + width];
    return part[0];
}

/* Add differences from a constant. One array of lanes per loop, and nothing else: that is what stays in registers. */
INLINE void add_to_lanes(double *lanes, const double *x, double constant, size_t n)
{
    double sum[LANES] = {0};
    for (size_t i = 0; i < n; i += LANES)
        for (int l = 0; l < LANES; l++)
            sum[l] += x[i + l] - constant;
    for (int l = 0; l < LANES; l++)
        lanes[l] += sum[l];
}

/* Add squares of differences from y, or from a constant where y is null. */
INLINE void add_squares_to_lanes(double *lanes, const double *x, const double *y, double constant, size_t n)
{
    double sum[LANES] = {0};
    for (size_t i = 0; i < n; i += LANES)
        for (int l = 0; l < LANES; l++) {
            double d = x[i + l] - (y ? y[i + l] : constant);
            sum[l] += d * d;
        }
    for (int l = 0; l < LANES; l++)
        lanes[l] += sum[l];
}

INLINE size_t padded_length(size_t n)
{
    return (n + LANES - 1) / LANES * LANES;
}

typedef struct {
    double sum, squares, deviations; /* of x, of x^2, of (x - mean)^2 */
    double absmax;
    uint64_t zeros, nonfinite;
} Totals;

typedef struct {
    float sum[LANES], squares[LANES];
    int32_t max;
    uint32_t zeros;
} FloatBlock;

/* All of a block in one go; `n` is a multiple of LANES. */
INLINE void read_block(const uint32_t *bits, size_t n, FloatBlock *out)
{
    float sum[LANES] = {0}, squares[LANES] = {0};
    int32_t max[LANES] = {0};
    uint32_t zeros[LANES] = {0};
    for (size_t i = 0; i < n; i += LANES)
        for (int l = 0; l < LANES; l++) {
            int32_t magnitude = (int32_t)(bits[i + l] & MAGNITUDE_MASK);
            float x = float_of(bits[i + l]);
            sum[l] += x;
            squares[l] += x * x;
            max[l] = magnitude > max[l] ? magnitude : max[l];
            zeros[l] += magnitude == 0;
        }
    memcpy(out->sum, sum, sizeof sum);
    memcpy(out->squares, squares, sizeof squares);
    out->max = 0;
    out->zeros = 0;
    for (int l = 0; l < LANES; l++) {
        out->max = max[l] > out->max ? max[l] : out->max;
        out->zeros += zeros[l];
    }
}

INLINE int32_t largest(const uint32_t *bits, size_t n)
{
    int32_t max = 0;
    for (size_t i = 0; i < n; i++) {
        int32_t magnitude = (int32_t)(bits[i] & MAGNITUDE_MASK);
        max = magnitude > max ? magnitude : max;
    }
    return max;
}

INLINE uint64_t count_zeros(const uint32_t *bits, size_t n)
{
    uint32_t zeros = 0;
    for (size_t i = 0; i < n; i++)
        zeros += (bits[i] & MAGNITUDE_MASK) == 0;
    return zeros;
}

/* Sums of a tensor of floats. A block whose squares a float cannot hold is read again, in double, from the cache. Once
 * values have vanished that way, the next blocks go there at once: subnormal products are slow on some hardware. */
INLINE void float_totals(const void *data, size_t n, Kind kind, Totals *totals)
{
    double sum[LANES] = {0}, squares[LANES] = {0};
    uint32_t narrow[BLOCK];
    double wide[BLOCK];
    int32_t absmax = 0;
    int vanished = 0;
    uint64_t zeros = 0;
    for (size_t begin = 0, length; begin < n; begin += length) {
        length = block_length(n - begin);
        const uint32_t *bits = float_bits(data, begin, length, kind, narrow);
        size_t padded = padded_length(length);
        FloatBlock block;
        if (begin == 0)
            vanished = (block.max = largest(bits, LANES)) && block.max < SMALLEST_FAST;
        if (vanished) {
            block.max = largest(bits, padded);
            block.zeros = (uint32_t)count_zeros(bits, padded);
        } else {
            read_block(bits, padded, &block);
        }
        int fits = block.max == 0 || (block.max >= SMALLEST_FAST && block.max <= LARGEST_FAST);
        if (fits && !vanished)
            for (int l = 0; l < LANES; l++) {
                sum[l] += block.sum[l];
                squares[l] += block.squares[l];
            }
        else {
            const double *x = doubles(bits, 0, padded, F32, 0, wide);
            add_to_lanes(sum, x, 0, padded);
            add_squares_to_lanes(squares, x, NULL, 0, padded);
        }
        vanished = block.max && block.max < SMALLEST_FAST;
        absmax = block.max > absmax ? block.max : absmax;
        zeros += block.zeros - (padded - length);
    }
    totals->sum = folded(sum);
    totals->squares = folded(squares);
    totals->absmax = float_of((uint32_t)absmax);
    totals->zeros = zeros;
}

INLINE void double_totals(const double *x, size_t n, Totals *totals)
{
    double sum[LANES] = {0}, squares[LANES] = {0};
    double wide[BLOCK];
    int64_t absmax = 0;
    uint64_t zeros = 0;
    for (size_t begin = 0, length; begin < n; begin += length) {
        length = block_length(n - begin);
        const double *block = doubles(x, begin, length, F64, 0, wide);
        for (size_t i = 0; i < length; i++) {
            int64_t magnitude;
            memcpy(&magnitude, block + i, sizeof magnitude);
            magnitude &= INT64_MAX;
            absmax = magnitude > absmax ? magnitude : absmax;
            zeros += magnitude == 0;
        }
        add_to_lanes(sum, block, 0, padded_length(length));
        add_squares_to_lanes(squares, block, NULL, 0, padded_length(length));
    }
    totals->sum = folded(sum);
    totals->squares = folded(squares);
    memcpy(&totals->absmax, &absmax, sizeof absmax);
    totals->zeros = zeros;
}

INLINE uint64_t count_nonfinite(const void *data, size_t n, Kind kind)
{
    double wide[BLOCK];
    uint64_t count = 0;
    for (size_t begin = 0, length; begin < n; begin += length) {
        length = block_length(n - begin);
        const double *x = doubles(data, begin, length, kind, 0, wide);
        for (size_t i = 0; i < length; i++)
            count += !(x[i] - x[i] == 0);
    }
    return count;
}

/* Mean and squared deviations from it, read anew in double, from sums whose mean is about right. */
INLINE void refine(const void *data, size_t n, Kind kind, Totals *totals)
{
    double mean = totals->sum / (double)n;
    double sum[LANES] = {0}, squares[LANES] = {0};
    double wide[BLOCK];
    for (size_t begin = 0, length; begin < n; begin += length) {
        length = block_length(n - begin);
        const double *x = doubles(data, begin, length, kind, mean, wide);
        add_to_lanes(sum, x, mean, padded_length(length));
        add_squares_to_lanes(squares, x, NULL, mean, padded_length(length));
    }
    double error = folded(sum);
    totals->sum += error;
    totals->deviations = folded(squares) - error * error / (double)n;
}

/* All that the six statistics of a tensor follow from, in one read; in two where it holds NaN or Inf, or where its mean
 * is not small beside its spread, since sum and squares then cancel. */
EVERY_CPU static void totals_of(const void *data, size_t n, Kind kind, Totals *totals)
{
    if (kind == F64)
        double_totals(data, n, totals);
    else
        float_totals(data, n, kind, totals);
    double mean = totals->sum / (double)n;
    totals->deviations = totals->squares - totals->sum * mean;
    totals->nonfinite = 0;
    if (!(totals->absmax <= DBL_MAX)) {
        totals->nonfinite = count_nonfinite(data, n, kind);
        totals->deviations = (double)NAN;
    } else if (totals->sum * mean > totals->deviations) {
        refine(data, n, kind, totals);
    }
}

EVERY_CPU static double squares_of(const void *data, size_t n, Kind kind)
{
    double squares[LANES] = {0};
    double wide[BLOCK];
    for (size_t begin = 0, length; begin < n; begin += length) {
        length = block_length(n - begin);
        add_squares_to_lanes(squares, doubles(data, begin, length, kind, 0, wide), NULL, 0, padded_length(length));
    }
    return folded(squares);
}

/* Sums of squares of `before` and of `after - before`, in double: updates may be tiny, and memory is the limit here. */
EVERY_CPU static void change_of(const void *before, const void *after, size_t n, Kind kind, double *weight, double *update)
{
    double weights[LANES] = {0}, updates[LANES] = {0};
    double wide_before[BLOCK], wide_after[BLOCK];
    for (size_t begin = 0, length; begin < n; begin += length) {
        length = block_length(n - begin);
        const double *w = doubles(before, begin, length, kind, 0, wide_before);
        const double *v = doubles(after, begin, length, kind, 0, wide_after);
        add_squares_to_lanes(weights, w, NULL, 0, padded_length(length));
        add_squares_to_lanes(updates, v, w, 0, padded_length(length));
    }
    *weight = folded(weights);
    *update = folded(updates);
}

/* Checksum: each 64-bit word is keyed by its position, its halves multiplied (as in NH, doi:10.1007/3-540-48405-1_14),
 * and all are summed, so the order of the work does not matter. The torch twin is in batch_hash.py. */
#define GOLDEN 0x9e3779b97f4a7c15u

INLINE uint64_t keyed(uint64_t word, uint64_t position)
{
    uint64_t x = word ^ (position * GOLDEN);
    return (x & 0xffffffffu) * (x >> 32) + word;
}

EVERY_CPU static uint64_t checksum_of(const void *data, size_t bytes)
{
    const unsigned char *bytes_in = data;
    size_t words = bytes / 8;
    uint64_t sum = bytes * GOLDEN;
    for (size_t i = 0; i < words; i++) {
        uint64_t word;
        memcpy(&word, bytes_in + 8 * i, 8);
        sum += keyed(word, i + 1);
    }
    if (bytes % 8) {
        uint64_t word = 0;
        memcpy(&word, bytes_in + 8 * words, bytes % 8);
        sum += keyed(word, words + 1);
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
