/* Read the memory of a tensor in blocks, as floats or doubles, in lanes. Plain C99, no Python.
 *
 * Float sums use a fixed number of lanes and a fixed order, without fused multiply-add. So they are bit-identical on
 * every instruction set. Lanes are flushed to double after every block. Magnitudes compare as integers: the bits of |x|
 * order like |x|, with NaN above Inf above everything finite. */
#ifndef GRADWATCH_BLOCKS_H
#define GRADWATCH_BLOCKS_H

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

/* Compile one source for several instruction sets; the dynamic linker chooses. This needs ifunc, which glibc has on
 * x86-64. Only with GCC, since clang's version does not link everywhere. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define EVERY_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define EVERY_CPU
#endif

/* Prefetch memory that is read a little later. */
INLINE void fetch(const void *address)
{
#if defined(__GNUC__)
    __builtin_prefetch(address);
#else
    (void)address;
#endif
}

enum { LANES = 16, BLOCK = 1024 }; /* 64 float additions per lane between two flushes: norms good to about 1e-6 */

typedef enum { F32, BF16, F16, F64, OTHER } Kind;

/* Between these magnitudes, squares of a block neither overflow nor lose relevant digits: 2^-48 and 2^55 as float bits. */
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

/* Convert half precision to the bits of the equal float, without branches, so that the loop vectorizes. */
INLINE uint32_t widen_half(uint16_t half)
{
    uint32_t magnitude = half & 0x7fffu, sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t normal = (magnitude << 13) + (112u << 23);
    uint32_t special = magnitude >= 0x7c00u ? 112u << 23 : 0; /* the exponent of Inf and NaN is all ones in both */
    uint32_t subnormal = bits_of((float)(int32_t)magnitude * 5.9604644775390625e-8f); /* 2^-24 */
    uint32_t is_subnormal = 0u - (magnitude < 0x400u);
    return (subnormal & is_subnormal) | ((normal + special) & ~is_subnormal) | sign;
}

/* Return the length of the next block: a whole block, then the rest in full lanes, then the last few elements. */
INLINE size_t block_length(size_t left)
{
    return left >= BLOCK ? BLOCK : left >= LANES ? left / LANES * LANES : left;
}

/* Return a block as the bits of floats: in place, or widened into `buffer`, padded with zeros to a multiple of LANES. */
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

/* Return a block as doubles in the same way, but padded with `fill`. */
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

/* Return the sum of the lanes, adding the upper half to the lower half each time. */
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

/* Add differences from a constant. The loop has a single array of lanes, so that it stays in registers. */
INLINE void add_to_lanes(double *lanes, const double *x, double constant, size_t n)
{
    double sum[LANES] = {0};
    for (size_t i = 0; i < n; i += LANES)
        for (int l = 0; l < LANES; l++)
            sum[l] += x[i + l] - constant;
    for (int l = 0; l < LANES; l++)
        lanes[l] += sum[l];
}

/* Add squares of differences from y, or from a constant if y is null. */
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

#endif
