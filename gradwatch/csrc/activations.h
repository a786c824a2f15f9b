/* Measure the output of an activation module: moments, values outside of a range, units that never leave a range. */
#ifndef GRADWATCH_ACTIVATIONS_H
#define GRADWATCH_ACTIVATIONS_H

#include "kernels/sums.h"
#include "tensor_view.h"

/* An output as `outer` pieces of `units` units of `inner` values. Either inner is 1 and the units of a piece are
 * contiguous (features last), or the values of a unit are contiguous (channels first). */
typedef struct {
    const float *data;
    size_t outer, units, inner;
    int64_t outer_stride, unit_stride;
} Output;

typedef struct {
    double n, sum, squares, flat;
} Moments;

/* Collapse dimensions first to last into one with a length and a stride. Returns 0 if no single stride fits. */
static int collapse(const DLTensor *t, int first, int last, size_t *length, int64_t *stride)
{
    *length = 1;
    *stride = 0;
    for (int d = last; d >= first; d--) {
        if (t->shape[d] == 1) /* the stride of a single element may be anything */
            continue;
        if (*length > 1 && t->strides[d] != *stride * (int64_t)*length)
            return 0;
        if (*length == 1)
            *stride = t->strides[d];
        *length *= (size_t)t->shape[d];
    }
    return 1;
}

/* Cut a tensor to its leading samples: to `most` values, if necessary to a part of one sample. */
static void keep_leading(DLTensor *t, int64_t most)
{
    int64_t size = 1;
    for (int d = 1; d < t->ndim; d++)
        size *= t->shape[d];
    for (; t->ndim > 1 && size > most; size /= *t->shape) {
        t->ndim--;
        t->shape++;
        t->strides++;
    }
    int64_t samples = most > size ? most / size : 1;
    *t->shape = samples < *t->shape ? samples : *t->shape;
}

/* Find the layout of the leading samples of a tensor with its units in dimension 1 or the last. Returns 0 without values,
 * or if the memory fits neither layout. */
static int lay_out(const DLTensor *tensor, int are_channels_first, int64_t most, Output *out)
{
    int64_t shape[MAX_DIMS], strides[MAX_DIMS];
    DLTensor t = *tensor;
    if (t.ndim < 1 + are_channels_first || t.ndim > MAX_DIMS || !t.strides)
        return 0;
    for (int d = 0, to = 0; d < t.ndim; d++) {
        int place = are_channels_first && d == 1 ? t.ndim - 1 : to++; /* the units move to the end */
        if (t.shape[d] < 1)
            return 0;
        shape[place] = t.shape[d];
        strides[place] = t.strides[d];
    }
    t.shape = shape;
    t.strides = strides;
    keep_leading(&t, most);
    int last = t.ndim - 1;
    out->data = (const float *)((const char *)t.data + t.byte_offset);
    out->units = (size_t)t.shape[last];
    out->unit_stride = t.strides[last];
    if (out->units == 1 || out->unit_stride == 1) {
        out->inner = out->unit_stride = 1;
        return collapse(&t, 0, last - 1, &out->outer, &out->outer_stride);
    }
    for (int split = 0; split < last; split++) {
        int64_t stride;
        if (collapse(&t, split, last - 1, &out->inner, &stride) && stride == 1)
            return collapse(&t, 0, split - 1, &out->outer, &out->outer_stride);
    }
    return 0;
}

static void add_moments(Moments *moments, const float *x, size_t n)
{
    Totals totals;
    totals_of(x, n, F32, &totals);
    moments->n += (double)n;
    moments->sum += totals.sum;
    /* not totals.squares: `totals_of` computes the deviations again if the squares would cancel */
    moments->squares += totals.deviations + totals.sum * (totals.sum / (double)n);
}

EVERY_CPU static uint64_t count_outside(const float *x, size_t n, float low, float high)
{
    uint64_t count = 0;
    for (size_t begin = 0, length; begin < n; begin += length) {
        uint32_t outside = 0;
        length = n - begin < BLOCK ? n - begin : BLOCK;
        for (size_t i = begin; i < begin + length; i++)
            outside += (uint32_t)((x[i] <= low) | (x[i] >= high)); /* | and not ||: without a branch */
        count += outside;
    }
    return count;
}

EVERY_CPU static void keep_inside(uint8_t *inside, const float *x, size_t units, float low, float high)
{
    for (size_t c = 0; c < units; c++)
        inside[c] &= (uint8_t)((x[c] >= low) & (x[c] <= high));
}

/* As `keep_inside`, for units with contiguous values. */
EVERY_CPU static void keep_inside_maps(uint8_t *inside, const float *x, const Output *out, float low, float high)
{
    for (size_t c = 0; c < out->units; c++, x += out->unit_stride) {
        uint32_t are_inside = 1;
        /* a unit that has fired already needs no further read */
        for (size_t i = 0; inside[c] && i < out->inner; i++)
            are_inside &= (uint32_t)((x[i] >= low) & (x[i] <= high));
        inside[c] &= (uint8_t)are_inside;
    }
}

/* Write a bit for each flag, the first to the lowest bit, and return the number of set flags. */
static uint64_t pack(const uint8_t *flags, size_t number, uint8_t *bits)
{
    uint64_t count = 0;
    memset(bits, 0, (number + 7) / 8);
    for (size_t c = 0; c < number; c++) {
        bits[c >> 3] |= (uint8_t)(flags[c] << (c & 7));
        count += flags[c];
    }
    return count;
}

static void unpack(const uint8_t *bits, size_t number, uint8_t *flags)
{
    for (size_t c = 0; c < number; c++)
        flags[c] = bits[c >> 3] >> (c & 7) & 1;
}

/* Add each piece of contiguous values; a dense output is one piece. */
static void add_pieces(const Output *out, float low, float high, Moments *moments)
{
    int rows = out->inner == 1;
    size_t size = rows ? out->units : out->inner;
    size_t per_outer = rows ? 1 : out->units;
    int dense = (rows || out->unit_stride == (int64_t)out->inner) &&
                (out->outer == 1 || out->outer_stride == (int64_t)(out->units * out->inner));
    if (dense)
        size = out->outer * out->units * out->inner;
    for (size_t o = 0; o < (dense ? 1 : out->outer); o++)
        for (size_t c = 0; c < (dense ? 1 : per_outer); c++) {
            const float *x = out->data + (int64_t)o * out->outer_stride + (int64_t)c * out->unit_stride;
            add_moments(moments, x, size);
            if (low == low) /* not nan: the activation can saturate */
                moments->flat += (double)count_outside(x, size, low, high);
        }
}

/* Clear the flag of each unit with a value outside of the range. NaN is in no range. */
static void keep_dead(const Output *out, float low, float high, uint8_t *dead)
{
    for (size_t o = 0; o < out->outer; o++) {
        const float *x = out->data + (int64_t)o * out->outer_stride;
        if (out->inner == 1)
            keep_inside(dead, x, out->units, low, high);
        else
            keep_inside_maps(dead, x, out, low, high);
    }
}

#endif
