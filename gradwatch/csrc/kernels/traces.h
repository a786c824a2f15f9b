/* Compute the distance that a step moved a weight, from the weight after the step, the moments and the constants.
 *
 * The update is computed like in torch's fused kernels (aten/src/ATen/native/cpu/FusedAdamKernel.cpp and
 * FusedSGDKernel.cpp), operation by operation and in the same order, and subtracted from the weight. The result is
 * rounded to a float, like the weight before the step. This undoes the rounding of the step, except near a tie. Plain
 * C99, no Python. */
#ifndef GRADWATCH_TRACES_H
#define GRADWATCH_TRACES_H

#include "sums.h"

typedef enum { SGD, ADAM } Rule;

/* Settings of a parameter group, as a step uses them. */
typedef struct {
    Rule rule;
    int is_amsgrad;
    float keep; /* fraction of the weight that decoupled weight decay leaves */
    float rate, eps;
    double lr, beta1, beta2;
} Settings;

/* One parameter of an optimizer. */
typedef struct {
    const Settings *settings;
    const float *weight, *first, *second; /* first: momentum; second, the largest with amsgrad: Adam only. Null unmoved */
    float step_size, root, inverse;       /* Adam; root corrects the second moment, inverse is its reciprocal */
    size_t numel;
    float *change;                        /* memory for its column, or null */
} Item;

/* Return a * b + c, rounded once if `fused`. */
INLINE float multiply_add(float a, float b, float c, int fused)
{
#if defined(__GNUC__)
    if (fused)
        return __builtin_fmaf(a, b, c);
#else
    (void)fused;
#endif
    return a * b + c;
}

/* Compute the constants of Adam that depend on the number of steps. */
static void set_pace(Item *item, double count)
{
    const Settings *s = item->settings;
    item->step_size = (float)(s->lr / (1 - pow(s->beta1, count)));
    item->root = (float)sqrt(1 - pow(s->beta2, count));
    item->inverse = 1 / item->root;
}

/* Return x / divisor, bit-identical: the rounded reciprocal and the remainder give the correctly rounded quotient
 * (Markstein, doi:10.1147/rd.341.0111, theorem 8.1), and division is the slowest operation here. For |x| < 1e-37 the
 * remainder may underflow, and the last bit may differ. */
INLINE float over(float x, float divisor, float inverse, int fused)
{
    if (!fused)
        return x / divisor;
    float near = x * inverse;
    float exact = multiply_add(multiply_add(-near, divisor, x, 1), inverse, near, 1);
    return fabsf(near) <= FLT_MAX ? exact : near; /* the remainder of Inf is NaN */
}

/* As `over`, for an x that is not negative. Inf has the remainder NaN, and a minimum is enough to exclude it. */
INLINE float root_over(float x, float divisor, float inverse, int fused)
{
    if (!fused)
        return x / divisor;
    float near = x * inverse, twice = near + near;
    float exact = multiply_add(multiply_add(-near, divisor, x, 1), inverse, near, 1);
    return exact < twice ? exact : twice;
}

/* Compute the weights of one block before the step. SGD is with momentum, and without Nesterov's. After a step from a
 * weight of zero, only the rounded update is left, so the result must be zero again, whichever way it was rounded. */
#define NOISE 2.4e-7f /* 2^-22 */

INLINE void weights_before(const Item *item, size_t begin, size_t n, float *restrict before, int fused)
{
    const Settings *s = item->settings;
    const float *restrict w = item->weight + begin, *restrict m = item->first + begin;
    if (s->rule == SGD) {
        const float rate = s->rate;
        for (size_t i = 0; i < n; i++) {
            float update = m[i] * rate, old = w[i] + update;
            before[i] = fabsf(old) <= NOISE * fabsf(update) ? 0 : old;
        }
        return;
    }
    const float *restrict v = item->second + begin;
    const float step_size = item->step_size, root = item->root, inverse = item->inverse;
    const float eps = s->eps, keep = s->keep, grow = 1 / keep;
    for (size_t i = 0; i < n; i++) {
        float update = step_size * m[i] / (root_over(sqrtf(v[i]), root, inverse, fused) + eps), old = w[i] + update;
        before[i] = fabsf(old) <= NOISE * fabsf(update) ? 0 : over(old, keep, grow, fused);
    }
}

/* Write the change of a parameter. For one that did not move, the weight is still read for its norm. */
INLINE void trace(const Item *item, size_t stride, int fused)
{
    ChangeSums changes = {{0}, {0}};
    float before[KEPT];
    if (!item->change)
        return;
    if (!item->weight) {
        item->change[0] = item->change[stride] = (float)NAN;
        return;
    }
    for (size_t begin = 0, length; begin < item->numel; begin += length) {
        const float *after = item->weight + begin;
        length = kept_length(item->numel - begin);
        if (item->first)
            weights_before(item, begin, length, before, fused);
        add_padded_change(&changes, item->first ? before : after, after, length);
    }
    write_change(folded(changes.weights), folded(changes.updates), item->change, stride);
}

/* One source for several instruction sets. The dynamic linker does not choose here, since fused operations depend on the
 * choice, as in torch. */
typedef void (*Tracer)(const Item *, size_t stride);

#if defined(__GNUC__) && defined(__x86_64__)
__attribute__((target("avx512f,avx2,fma"))) static void trace_by_sixteen(const Item *item, size_t stride)
{
    trace(item, stride, 1);
}

__attribute__((target("avx2,fma"))) static void trace_by_eight(const Item *item, size_t stride)
{
    trace(item, stride, 1);
}
#endif

static void trace_by_default(const Item *item, size_t stride)
{
#if defined(__FP_FAST_FMAF)
    trace(item, stride, 1);
#else
    trace(item, stride, 0);
#endif
}

static Tracer best_trace(void)
{
#if defined(__GNUC__) && defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("fma") && __builtin_cpu_supports("avx2"))
        return __builtin_cpu_supports("avx512f") ? trace_by_sixteen : trace_by_eight;
#endif
    return trace_by_default;
}

#endif
