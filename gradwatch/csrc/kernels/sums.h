/* Compute the statistics of a tensor, with its histogram, and the distance it moved, in one read each. Plain C99, no
 * Python. */
#ifndef GRADWATCH_SUMS_H
#define GRADWATCH_SUMS_H

#include "blocks.h"
#include "counts.h"

typedef struct {
    double sum, squares, deviations; /* of x, of x^2, of (x - mean)^2 */
    double absmax;
    uint64_t zeros, nonfinite;
} Totals;

/* Sums over a block, lane by lane; all zero before the first value. */
typedef struct {
    float sum[LANES], squares[LANES];
    int32_t max;
    uint32_t zeros;
} FloatBlock;

/* Read all sums of a block in one loop; `n` is a multiple of LANES. */
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

/* Sums of a tensor of floats so far, block by block; all zero before the first. */
typedef struct {
    double sum[LANES], squares[LANES];
    uint64_t zeros;
    int32_t absmax;
    int is_begun, has_vanished;
} FloatSums;

/* Add the sums of a block. If a float cannot hold its squares, the block is read again in double, from the cache. */
INLINE void take_block(FloatSums *sums, const FloatBlock *block, const uint32_t *bits, size_t length)
{
    size_t padded = padded_length(length);
    double wide[BLOCK];
    /* NaN and Inf are above the limit, so their blocks are read again, too */
    int fits = block->max == 0 || (block->max >= SMALLEST_FAST && block->max <= LARGEST_FAST);
    if (fits && !sums->has_vanished)
        for (int l = 0; l < LANES; l++) {
            sums->sum[l] += block->sum[l];
            sums->squares[l] += block->squares[l];
        }
    else {
        const double *x = doubles(bits, 0, padded, F32, 0, wide);
        add_to_lanes(sums->sum, x, 0, padded);
        add_squares_to_lanes(sums->squares, x, NULL, 0, padded);
    }
    sums->is_begun = 1;
    sums->has_vanished = block->max && block->max < SMALLEST_FAST;
    sums->absmax = block->max > sums->absmax ? block->max : sums->absmax;
    sums->zeros += block->zeros - (padded - length); /* the padding is zeros */
}

/* Add a block. After squares have vanished, the next blocks are read in double immediately: subnormal products are slow
 * on some hardware. The first values decide for the first block. */
INLINE void add_block(FloatSums *sums, const uint32_t *bits, size_t length)
{
    size_t padded = padded_length(length);
    FloatBlock block = {{0}, {0}, 0, 0};
    int32_t max = sums->is_begun ? 0 : largest(bits, LANES);
    sums->has_vanished |= max && max < SMALLEST_FAST;
    if (sums->has_vanished) {
        block.max = largest(bits, padded);
        block.zeros = (uint32_t)count_zeros(bits, padded);
    } else {
        read_block(bits, padded, &block);
    }
    take_block(sums, &block, bits, length);
}

INLINE void sum_up(const FloatSums *sums, Totals *totals)
{
    totals->sum = folded(sums->sum);
    totals->squares = folded(sums->squares);
    totals->absmax = float_of((uint32_t)sums->absmax);
    totals->zeros = sums->zeros;
}

/* Sum up floats. With `counts`, each block is also counted while it is in the cache. */
INLINE void float_totals(const void *data, size_t n, Kind kind, Totals *totals, Counts *counts)
{
    FloatSums sums = {{0}, {0}, 0, 0, 0, 0};
    uint32_t narrow[BLOCK];
    for (size_t begin = 0, length; begin < n; begin += length) {
        length = block_length(n - begin);
        const uint32_t *bits = float_bits(data, begin, length, kind, narrow);
        add_block(&sums, bits, length);
        if (counts)
            count_block(bits, length, counts);
    }
    sum_up(&sums, totals);
}

INLINE void double_totals(const double *x, size_t n, Totals *totals, Counts *counts)
{
    double sum[LANES] = {0}, squares[LANES] = {0};
    double wide[BLOCK];
    uint32_t narrow[BLOCK];
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
        if (counts)
            count_block(rounded_bits(block, 0, length, F64, narrow), length, counts);
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
            count += !(x[i] - x[i] == 0); /* Inf - Inf and NaN - NaN are NaN */
    }
    return count;
}

/* Read mean and squared deviations again in double, from sums that give an approximate mean. */
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
    double error = folded(sum); /* of the approximate mean, times n: it also shifts the deviations */
    totals->sum += error;
    totals->deviations = folded(squares) - error * error / (double)n;
}

/* Complete the totals. A second read is necessary with NaN or Inf, and if the mean is not small compared with the spread,
 * since sum and squares then cancel. */
INLINE void complete(const void *data, size_t n, Kind kind, Totals *totals)
{
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

/* Read the totals that give the six statistics of a tensor, in one read or two. */
INLINE void read_all(const void *data, size_t n, Kind kind, Totals *totals, Counts *counts)
{
    if (kind == F64)
        double_totals(data, n, totals, counts);
    else
        float_totals(data, n, kind, totals, counts);
    complete(data, n, kind, totals);
}

EVERY_CPU static void totals_of(const void *data, size_t n, Kind kind, Totals *totals)
{
    read_all(data, n, kind, totals, NULL);
}

/* As `totals_of`, with the histogram. */
EVERY_CPU static void totals_and_counts_of(const void *data, size_t n, Kind kind, Totals *totals, int64_t *out)
{
    Counts counts;
    memset(counts.tables, 0, sizeof counts.tables);
    read_all(data, n, kind, totals, &counts);
    write_counts(&counts, data, n, kind, out);
}

/* Weights before and after a step are compared in halves of a block, which fit into the nearest cache with the moments. */
enum { KEPT = BLOCK / 2 };

INLINE size_t kept_length(size_t left)
{
    size_t length = block_length(left);
    return length < KEPT ? length : KEPT;
}

/* Sums of squares of weights and updates. */
typedef struct {
    double weights[LANES], updates[LANES];
} ChangeSums;

INLINE float squared_difference(const float *x, const float *y, size_t i)
{
    float d = y ? x[i] - y[i] : x[i];
    return d * d;
}

/* Sum squares of differences from y, or of x if y is null, lane by lane. A single array of twice as many lanes stays in
 * registers, and additions do not wait for each other. */
INLINE void read_squares(const float *x, const float *y, size_t n, float *out)
{
    float squares[2 * LANES] = {0};
    size_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES)
        for (int l = 0; l < 2 * LANES; l++)
            squares[l] += squared_difference(x, y, i + l);
    for (int l = 0; l < LANES && i < n; l++)
        squares[l] += squared_difference(x, y, i + l);
    for (int l = 0; l < LANES; l++)
        out[l] = squares[l] + squares[l + LANES];
}

#define LEAST_SQUARES 7.9e-31f /* 2^-100: a block's squares that sum up to less may have vanished */

INLINE int is_summed(const float *squares)
{
    float sum = 0;
    for (int l = 0; l < LANES; l++)
        sum += squares[l];
    return sum >= LEAST_SQUARES && sum <= FLT_MAX;
}

/* Add at most a block, in full lanes. If a float cannot hold its squares, it is read again in double, from the cache. */
INLINE void add_change(ChangeSums *sums, const float *before, const float *after, size_t n)
{
    double wide_before[BLOCK], wide_after[BLOCK];
    float weights[LANES], updates[LANES];
    read_squares(before, NULL, n, weights);
    read_squares(after, before, n, updates);
    if (is_summed(weights) && is_summed(updates)) {
        for (int l = 0; l < LANES; l++) {
            sums->weights[l] += weights[l];
            sums->updates[l] += updates[l];
        }
        return;
    }
    const double *w = doubles(before, 0, n, F32, 0, wide_before), *v = doubles(after, 0, n, F32, 0, wide_after);
    add_squares_to_lanes(sums->weights, w, NULL, 0, n);
    add_squares_to_lanes(sums->updates, v, w, 0, n);
}

/* As `add_change`, for any length. */
INLINE void add_padded_change(ChangeSums *sums, const float *before, const float *after, size_t n)
{
    float last_before[LANES] = {0}, last_after[LANES] = {0};
    size_t whole = n / LANES * LANES;
    if (whole)
        add_change(sums, before, after, whole);
    if (n == whole)
        return;
    /* padded with zeros, which have no square and no difference */
    memcpy(last_before, before + whole, (n - whole) * sizeof *before);
    memcpy(last_after, after + whole, (n - whole) * sizeof *after);
    add_change(sums, last_before, last_after, LANES);
}

/* Sum the squares of `before` and of `after - before`: in float for floats, otherwise in double, since two halves may
 * differ by less than the precision of a half. */
EVERY_CPU static void change_of(const void *before, const void *after, size_t n, Kind kind, double *weight,
                                double *update)
{
    ChangeSums sums = {{0}, {0}};
    double wide_before[BLOCK], wide_after[BLOCK];
    for (size_t begin = 0, length; begin < n; begin += length) {
        length = kept_length(n - begin);
        if (kind == F32) {
            add_padded_change(&sums, (const float *)before + begin, (const float *)after + begin, length);
            continue;
        }
        const double *w = doubles(before, begin, length, kind, 0, wide_before);
        const double *v = doubles(after, begin, length, kind, 0, wide_after);
        add_squares_to_lanes(sums.weights, w, NULL, 0, padded_length(length));
        add_squares_to_lanes(sums.updates, v, w, 0, padded_length(length));
    }
    *weight = folded(sums.weights);
    *update = folded(sums.updates);
}

/* Write the norm of a weight, and the norm of its update divided by it, from sums of squares. */
INLINE void write_change(double weight, double update, float *out, size_t stride)
{
    double ratio = sqrt(update / weight); /* Inf or NaN for a weight of zero: reported as nan */
    out[0] = (float)sqrt(weight);
    out[stride] = ratio <= FLT_MAX ? (float)ratio : (float)NAN;
}

#endif
