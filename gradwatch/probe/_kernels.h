/* The loops over a tensor's memory: statistics, update norms, checksum and histogram, one read each. Plain C99, no Python.
 *
 * Float sums run in a fixed number of lanes and in a fixed order, without fused multiply-add, so that their bits are the
 * same on every instruction set. Lanes are flushed to double after every block. Magnitudes compare as integers: the bits
 * of |x| order like |x|, with NaN above Inf above everything finite. */
#ifndef GRADWATCH_KERNELS_H
#define GRADWATCH_KERNELS_H

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
#define EVERY_CPU __attribute__((target_clones("avx512bw", "avx2", "default")))
#else
#define EVERY_CPU
#endif

enum { LANES = 16, BLOCK = 2048 }; /* 128 float additions per lane between two flushes: norms good to about 1e-6 */

typedef enum { F32, BF16, F16, F64, OTHER } Kind;

/* Within these, squares of a block neither overflow nor lose digits that matter: 2^-48 and 2^55 as float bits. */
#define SMALLEST_FAST ((int32_t)(127 - 48) << 23)
#define LARGEST_FAST ((int32_t)(127 + 55) << 23)
#define INFINITE_BITS ((int32_t)0x7f800000)
#define MAGNITUDE_MASK 0x7fffffffu

typedef struct {
    double sum, squares, deviations; /* of x, of x^2, of (x - mean)^2 */
    double absmax;
    uint64_t zeros, nonfinite;
} Totals;

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
    return (magnitude < 0x400u ? subnormal : normal + special) | sign;
}

/* Bits of element i as a float; `kind` is a constant wherever this is inlined. */
INLINE uint32_t float_bits(const void *data, size_t i, Kind kind)
{
    switch (kind) {
    case BF16:
        return (uint32_t)((const uint16_t *)data)[i] << 16;
    case F16:
        return widen_half(((const uint16_t *)data)[i]);
    default:
        return ((const uint32_t *)data)[i];
    }
}

INLINE double value_at(const void *data, size_t i, Kind kind)
{
    return kind == F64 ? ((const double *)data)[i] : (double)float_of(float_bits(data, i, kind));
}

INLINE size_t size_of(Kind kind)
{
    return kind == F64 ? 8 : kind == F32 ? 4 : 2;
}

/* Sum of the lanes, halves onto halves. */
INLINE double folded(double *lanes)
{
    for (int width = LANES / 2; width; width /= 2)
        for (int l = 0; l < width; l++)
            lanes[l] += lanes[l + width];
    return lanes[0];
}

typedef struct {
    float sum[LANES], squares[LANES];
    int32_t max;
    uint32_t zeros;
} FloatBlock;

/* All of a block in one go; `n` is a multiple of LANES. */
INLINE void float_block(const void *data, size_t begin, size_t n, Kind kind, FloatBlock *out)
{
    float sum[LANES] = {0}, squares[LANES] = {0};
    int32_t max[LANES] = {0};
    uint32_t zeros[LANES] = {0};
    for (size_t i = begin; i < begin + n; i += LANES)
        for (int l = 0; l < LANES; l++) {
            uint32_t bits = float_bits(data, i + l, kind);
            int32_t magnitude = (int32_t)(bits & MAGNITUDE_MASK);
            float x = float_of(bits);
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

typedef struct {
    double sum[LANES], squares[LANES];
    int32_t max;
    uint64_t zeros;
} Lanes;

INLINE void add_float_block(Lanes *lanes, const FloatBlock *block)
{
    for (int l = 0; l < LANES; l++) {
        lanes->sum[l] += block->sum[l];
        lanes->squares[l] += block->squares[l];
    }
    lanes->max = block->max > lanes->max ? block->max : lanes->max;
    lanes->zeros += block->zeros;
}

/* The same in double, for magnitudes whose squares a float cannot hold, Inf and NaN. Returns the block's maximum. */
INLINE int32_t add_double_block(Lanes *lanes, const void *data, size_t begin, size_t n, Kind kind)
{
    int32_t max = 0;
    for (size_t i = begin; i < begin + n; i += LANES)
        for (int l = 0; l < LANES; l++) {
            uint32_t bits = float_bits(data, i + l, kind);
            int32_t magnitude = (int32_t)(bits & MAGNITUDE_MASK);
            double x = float_of(bits);
            lanes->sum[l] += x;
            lanes->squares[l] += x * x;
            max = magnitude > max ? magnitude : max;
            lanes->zeros += magnitude == 0;
        }
    lanes->max = max > lanes->max ? max : lanes->max;
    return max;
}

/* Add a block. `careful` remembers that the block before was too small for float squares: where the hardware is slow on
 * subnormal products, a vanished gradient must not pay for them block after block. */
INLINE void add_block(Lanes *lanes, const void *data, size_t begin, size_t n, Kind kind, int *careful)
{
    if (!*careful) {
        FloatBlock block;
        float_block(data, begin, n, kind, &block);
        if ((block.max >= SMALLEST_FAST && block.max <= LARGEST_FAST) || block.max == 0) {
            add_float_block(lanes, &block);
            return;
        }
    }
    int32_t max = add_double_block(lanes, data, begin, n, kind);
    *careful = max && max < SMALLEST_FAST;
}

/* Sum of squared deviations, for data whose mean is not small beside its spread: there sum and squares would cancel. */
INLINE double deviations(const void *data, size_t n, Kind kind, double mean)
{
    double squares[LANES] = {0}, sum[LANES] = {0};
    size_t full = n / LANES * LANES;
    for (size_t i = 0; i < full; i += LANES)
        for (int l = 0; l < LANES; l++) {
            double d = value_at(data, i + l, kind) - mean;
            sum[l] += d;
            squares[l] += d * d;
        }
    for (size_t i = full; i < n; i++) {
        double d = value_at(data, i, kind) - mean;
        sum[i - full] += d;
        squares[i - full] += d * d;
    }
    double rest = folded(sum); /* what rounding left in the mean */
    return folded(squares) - rest * rest / (double)n;
}

INLINE uint64_t count_nonfinite(const void *data, size_t n, Kind kind)
{
    uint64_t count = 0;
    for (size_t i = 0; i < n; i++) {
        double x = value_at(data, i, kind);
        count += !(x - x == 0);
    }
    return count;
}

/* Everything that follows from the sums, and the rare second reads. */
INLINE void finish(Totals *totals, const void *data, size_t n, Kind kind)
{
    double mean = totals->sum / (double)n, spread = totals->squares - totals->sum * mean;
    totals->nonfinite = 0;
    totals->deviations = spread;
    if (!(totals->absmax <= 1.7976931348623157e308)) {
        totals->nonfinite = count_nonfinite(data, n, kind);
        totals->deviations = (double)NAN;
    } else if (totals->sum * mean > spread) {
        totals->deviations = deviations(data, n, kind, mean);
    }
}

INLINE void narrow_totals(const void *data, size_t n, Kind kind, Totals *totals)
{
    Lanes lanes = {{0}, {0}, 0, 0};
    size_t full = n / LANES * LANES;
    int32_t first = 0;
    for (size_t i = 0; i < LANES && i < full; i++) {
        int32_t magnitude = (int32_t)(float_bits(data, i, kind) & MAGNITUDE_MASK);
        first = magnitude > first ? magnitude : first;
    }
    int careful = first && first < SMALLEST_FAST;
    for (size_t begin = 0; begin < full; begin += BLOCK)
        add_block(&lanes, data, begin, full - begin < BLOCK ? full - begin : BLOCK, kind, &careful);
    if (full < n) {
        uint32_t padded[LANES] = {0};
        for (size_t i = full; i < n; i++)
            padded[i - full] = float_bits(data, i, kind);
        add_block(&lanes, padded, 0, LANES, F32, &careful);
        lanes.zeros -= LANES - (n - full);
    }
    totals->sum = folded(lanes.sum);
    totals->squares = folded(lanes.squares);
    totals->absmax = float_of((uint32_t)lanes.max);
    totals->zeros = lanes.zeros;
    finish(totals, data, n, kind);
}

INLINE void double_totals(const void *data, size_t n, Totals *totals)
{
    const double *x = data;
    double sum[LANES] = {0}, squares[LANES] = {0};
    const uint64_t *words = data;
    int64_t max = 0;
    uint64_t zeros = 0;
    size_t full = n / LANES * LANES;
    for (size_t i = 0; i < full; i += LANES)
        for (int l = 0; l < LANES; l++) {
            sum[l] += x[i + l];
            squares[l] += x[i + l] * x[i + l];
        }
    for (size_t i = full; i < n; i++) {
        sum[i - full] += x[i];
        squares[i - full] += x[i] * x[i];
    }
    for (size_t i = 0; i < n; i++) {
        int64_t magnitude = (int64_t)(words[i] & 0x7fffffffffffffffu);
        max = magnitude > max ? magnitude : max;
        zeros += magnitude == 0;
    }
    totals->sum = folded(sum);
    totals->squares = folded(squares);
    memcpy(&totals->absmax, &max, sizeof max);
    totals->zeros = zeros;
    finish(totals, data, n, F64);
}

EVERY_CPU static void totals_f32(const void *data, size_t n, Totals *out)
{
    narrow_totals(data, n, F32, out);
}

EVERY_CPU static void totals_bf16(const void *data, size_t n, Totals *out)
{
    narrow_totals(data, n, BF16, out);
}

EVERY_CPU static void totals_f16(const void *data, size_t n, Totals *out)
{
    narrow_totals(data, n, F16, out);
}

EVERY_CPU static void totals_f64(const void *data, size_t n, Totals *out)
{
    double_totals(data, n, out);
}

static void totals_of(const void *data, size_t n, Kind kind, Totals *out)
{
    switch (kind) {
    case F32:
        totals_f32(data, n, out);
        return;
    case BF16:
        totals_bf16(data, n, out);
        return;
    case F16:
        totals_f16(data, n, out);
        return;
    default:
        totals_f64(data, n, out);
    }
}

/* Sums of squares of `before` and of `after - before`, in double: memory is the limit here, not arithmetic. */
INLINE void change_squares(const void *before, const void *after, size_t n, Kind kind, double *weight, double *update)
{
    double weights[LANES] = {0}, updates[LANES] = {0};
    size_t full = n / LANES * LANES;
    for (size_t i = 0; i < full; i += LANES)
        for (int l = 0; l < LANES; l++) {
            double w = value_at(before, i + l, kind), d = value_at(after, i + l, kind) - w;
            weights[l] += w * w;
            updates[l] += d * d;
        }
    for (size_t i = full; i < n; i++) {
        double w = value_at(before, i, kind), d = value_at(after, i, kind) - w;
        weights[i - full] += w * w;
        updates[i - full] += d * d;
    }
    *weight = folded(weights);
    *update = folded(updates);
}

EVERY_CPU static void change_of(const void *before, const void *after, size_t n, Kind kind, double *weight, double *update)
{
    switch (kind) {
    case F32:
        change_squares(before, after, n, F32, weight, update);
        return;
    case BF16:
        change_squares(before, after, n, BF16, weight, update);
        return;
    case F16:
        change_squares(before, after, n, F16, weight, update);
        return;
    default:
        change_squares(before, after, n, F64, weight, update);
    }
}
