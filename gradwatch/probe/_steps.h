/* Optimizer steps of tensors of floats, with what is summed on the way. Plain C99, no Python.
 *
 * A tensor goes by in blocks that stay in the cache, so that gradient, weight and moments are read once from memory
 * whatever is made of them. The arithmetic is that of torch's fused kernels (aten/src/ATen/native/cpu/FusedAdamKernel.cpp
 * and FusedSGDKernel.cpp), operation by operation and in their order; where the CPU has fused multiply-add, what the
 * compiler fuses there is fused here too, so that the weights come out equal to the bit. */
#ifndef GRADWATCH_STEPS_H
#define GRADWATCH_STEPS_H

#include "_blocks.h"
#include "_sums.h"

enum { TAIL = 8 }; /* torch steps eight floats at a time, and what is left one by one, fusing another sum */

typedef enum { SGD, ADAM } Rule;

/* Settings of a parameter group, as a step uses them. */
typedef struct {
    Rule rule;
    int is_coupled, is_amsgrad, is_nesterov; /* is_coupled: weight decay goes into the gradient */
    float sign, decay, keep;                 /* keep: what decoupled weight decay leaves of the weight */
    float momentum, rest, rate;              /* SGD; rest: the gradient's part of the momentum */
    float lerp, beta2, rest2, eps;           /* Adam; lerp and rest2: the gradient's part of the moments */
    double lr, beta1, beta2_exact;
} Settings;

/* One parameter of a step. */
typedef struct {
    const Settings *settings;
    float *weight, *grad, *first, *second, *largest; /* first: momentum; second, largest: Adam only */
    double count;                                    /* steps, this one included */
    float step_size, root, inverse;                  /* Adam; root corrects the second moment, inverse is its reciprocal */
    size_t numel;
    int is_fresh;                                    /* the momentum of SGD starts as the gradient */
    float *column, *change;                          /* where statistics go, or null */
    void *param;
} Item;

typedef struct {
    Item *items;
    size_t length, stride;  /* of the rows, in floats */
    const float *scale;     /* of the gradients, or null */
    int is_skipped;         /* gradients are looked at, and nothing moves */
} Step;

/* a * b + c, rounded once where `fused` */
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

/* The constants of Adam that depend on the count. */
static void set_pace(Item *item)
{
    const Settings *s = item->settings;
    item->step_size = (float)(s->lr / (1 - pow(s->beta1, item->count)));
    item->root = (float)sqrt(1 - pow(s->beta2_exact, item->count));
    item->inverse = 1 / item->root;
}

/* x / divisor, to the bit: with the rounded reciprocal and the remainder at hand the quotient is rounded right
 * (Markstein, doi:10.1147/rd.341.0111, theorem 8.1), and dividing is what an Adam step is slow at. Of |x| < 1e-37, whose
 * remainder may underflow, the last bit may be another. */
INLINE float over(float x, float divisor, float inverse, int fused)
{
    if (!fused)
        return x / divisor;
    float near = x * inverse;
    float exact = multiply_add(multiply_add(-near, divisor, x, 1), inverse, near, 1);
    return fabsf(near) <= FLT_MAX ? exact : near;
}

INLINE void adam_floats(const Item *item, size_t begin, size_t n, float *restrict before, int is_tail, int fused,
                        int is_coupled, int is_amsgrad)
{
    const Settings *s = item->settings;
    float *restrict w = item->weight + begin, *restrict m = item->first + begin, *restrict v = item->second + begin;
    float *restrict largest = is_amsgrad ? item->largest + begin : NULL;
    const float *restrict g = item->grad + begin;
    const float sign = s->sign, decay = s->decay, keep = s->keep, eps = s->eps, beta2 = s->beta2, rest2 = s->rest2;
    const int is_small = s->lerp < 0.5f;
    const float weight = is_small ? s->lerp : s->lerp - 1;
    const float step_size = item->step_size, root = item->root, inverse = item->inverse;
    for (size_t i = 0; i < n; i++) {
        float x = g[i] * sign, p = w[i];
        if (before)
            before[i] = p;
        if (is_coupled)
            x = multiply_add(p, decay, x, fused);
        else
            p *= keep;
        float mean = multiply_add(weight, x - m[i], is_small ? m[i] : x, fused);
        float square = is_tail ? multiply_add(v[i], beta2, rest2 * x * x, fused)
                               : multiply_add(rest2 * x, x, v[i] * beta2, fused);
        m[i] = mean;
        v[i] = square;
        if (is_amsgrad) {
            float old = largest[i];
            square = (is_tail ? !(old < square) : old > square || old != old) ? old : square;
            largest[i] = square;
        }
        w[i] = p - step_size * mean / (over(sqrtf(square), root, inverse, fused) + eps);
    }
}

INLINE void adam_part(const Item *item, size_t begin, size_t n, float *before, int is_tail, int fused)
{
    const Settings *s = item->settings;
    if (s->is_coupled && s->is_amsgrad)
        adam_floats(item, begin, n, before, is_tail, fused, 1, 1);
    else if (s->is_coupled)
        adam_floats(item, begin, n, before, is_tail, fused, 1, 0);
    else if (s->is_amsgrad)
        adam_floats(item, begin, n, before, is_tail, fused, 0, 1);
    else
        adam_floats(item, begin, n, before, is_tail, fused, 0, 0);
}

INLINE void sgd_floats(const Item *item, size_t begin, size_t n, float *restrict before, int is_tail, int fused,
                       int is_coupled, int has_momentum)
{
    const Settings *s = item->settings;
    const int is_fresh = item->is_fresh, is_nesterov = s->is_nesterov;
    float *restrict w = item->weight + begin, *restrict m = has_momentum ? item->first + begin : NULL;
    const float *restrict g = item->grad + begin;
    const float sign = s->sign, decay = s->decay, momentum = s->momentum, rest = s->rest, rate = s->rate;
    for (size_t i = 0; i < n; i++) {
        float x = g[i] * sign;
        if (before)
            before[i] = w[i];
        if (is_coupled)
            x = multiply_add(w[i], decay, x, fused);
        if (has_momentum) {
            float mean = is_tail ? multiply_add(m[i], momentum, x * rest, fused)
                                 : multiply_add(x, rest, m[i] * momentum, fused);
            mean = is_fresh ? x : mean;
            m[i] = mean;
            x = is_nesterov ? multiply_add(mean, momentum, x, fused) : mean;
        }
        w[i] = multiply_add(x, -rate, w[i], fused);
    }
}

INLINE void sgd_part(const Item *item, size_t begin, size_t n, float *before, int is_tail, int fused)
{
    if (item->first && item->settings->is_coupled)
        sgd_floats(item, begin, n, before, is_tail, fused, 1, 1);
    else if (item->first)
        sgd_floats(item, begin, n, before, is_tail, fused, 0, 1);
    else if (item->settings->is_coupled)
        sgd_floats(item, begin, n, before, is_tail, fused, 1, 0);
    else
        sgd_floats(item, begin, n, before, is_tail, fused, 0, 0);
}

/* Move some parameters, and keep what they were before where that is not null; loops are compiled for either. */
INLINE void move_part(const Item *item, size_t begin, size_t n, float *before, int is_tail, int fused)
{
    if (item->settings->rule == ADAM && before)
        adam_part(item, begin, n, before, is_tail, fused);
    else if (item->settings->rule == ADAM)
        adam_part(item, begin, n, NULL, is_tail, fused);
    else if (before)
        sgd_part(item, begin, n, before, is_tail, fused);
    else
        sgd_part(item, begin, n, NULL, is_tail, fused);
}

INLINE void write_change(double weight, double update, float *out, size_t stride)
{
    double ratio = sqrt(update / weight);
    out[0] = (float)sqrt(weight);
    out[stride] = ratio <= FLT_MAX ? (float)ratio : (float)NAN;
}

INLINE void write_totals(const Totals *totals, size_t numel, double scale, float *out, size_t stride)
{
    double n = (double)numel;
    out[0] = (float)(sqrt(totals->squares) * scale);
    out[stride] = (float)(totals->absmax * scale);
    out[2 * stride] = (float)(totals->sum / n * scale);
    out[3 * stride] = (float)(sqrt(totals->deviations < 0 ? 0 : totals->deviations / n) * scale);
    out[4 * stride] = (float)((double)totals->zeros / n);
    out[5 * stride] = (float)totals->nonfinite;
}

/* What stands in the row of a tensor without values: nan where it has no gradient, else norm, maximum and count 0. */
INLINE void write_nothing(int is_empty, float *out, size_t stride)
{
    for (size_t s = 0; s < 6; s++)
        out[s * stride] = is_empty && (s < 2 || s == 5) ? 0.0f : (float)NAN;
}

/* A parameter without gradient: it stays where it is, and its weight is known all the same. */
INLINE void leave(const Step *step, const Item *item)
{
    ChangeSums changes = {{0}, {0}};
    if (item->column)
        write_nothing(0, item->column, step->stride);
    if (!item->change || step->is_skipped)
        return;
    if (!item->weight) {
        item->change[0] = item->change[step->stride] = (float)NAN;
        return;
    }
    for (size_t begin = 0, length; begin < item->numel; begin += length) {
        length = block_length(item->numel - begin);
        add_padded_change(&changes, item->weight + begin, item->weight + begin, length);
    }
    write_change(folded(changes.weights), folded(changes.updates), item->change, step->stride);
}

/* Move one parameter, or only look at its gradient, and write what was summed. */
INLINE void move(const Step *step, const Item *item, int fused)
{
    FloatSums sums = {{0}, {0}, 0, 0, 0, 0};
    ChangeSums changes = {{0}, {0}};
    uint32_t narrow[BLOCK];
    float before[BLOCK];
    if (!item->grad) {
        leave(step, item);
        return;
    }
    for (size_t begin = 0, length; begin < item->numel; begin += length) {
        length = block_length(item->numel - begin);
        const size_t whole = length / TAIL * TAIL;
        float *grad = item->grad + begin;
        if (step->scale && !step->is_skipped)
            for (size_t i = 0; i < length; i++)
                grad[i] = grad[i] / *step->scale;
        if (item->column)
            add_block(&sums, float_bits(grad, 0, length, F32, narrow), length);
        if (step->is_skipped)
            continue;
        move_part(item, begin, whole, item->change ? before : NULL, 0, fused);
        if (length > whole)
            move_part(item, begin + whole, length - whole, item->change ? before + whole : NULL, 1, fused);
        if (item->change)
            add_padded_change(&changes, before, item->weight + begin, length);
    }
    if (item->column && item->numel) {
        Totals totals;
        sum_up(&sums, &totals);
        complete(item->grad, item->numel, F32, &totals);
        write_totals(&totals, item->numel, step->scale && step->is_skipped ? 1 / (double)*step->scale : 1, item->column,
                     step->stride);
    } else if (item->column) {
        write_nothing(1, item->column, step->stride);
    }
    if (item->change && !step->is_skipped)
        write_change(folded(changes.weights), folded(changes.updates), item->change, step->stride);
}

typedef void (*Mover)(const Step *, const Item *);

#if defined(__FP_FAST_FMAF)
#define IS_FUSED 1
#else
#define IS_FUSED 0
#endif

/* `best_` of what is done to an item: the same for each instruction set that makes a difference. Not chosen by the
 * dynamic linker: what is fused depends on it. */
#if defined(__GNUC__) && defined(__x86_64__)
#define FOR_EVERY_CPU(name)                                                                                             \
    __attribute__((target("avx512f,avx2,fma"))) static void name##_by_sixteen(const Step *step, const Item *item)       \
    {                                                                                                                   \
        name(step, item, 1);                                                                                            \
    }                                                                                                                   \
    __attribute__((target("avx2,fma"))) static void name##_by_eight(const Step *step, const Item *item)                 \
    {                                                                                                                   \
        name(step, item, 1);                                                                                            \
    }                                                                                                                   \
    static void name##_by_default(const Step *step, const Item *item)                                                   \
    {                                                                                                                   \
        name(step, item, IS_FUSED);                                                                                     \
    }                                                                                                                   \
    static Mover best_##name(void)                                                                                      \
    {                                                                                                                   \
        __builtin_cpu_init();                                                                                           \
        if (__builtin_cpu_supports("fma") && __builtin_cpu_supports("avx2"))                                            \
            return __builtin_cpu_supports("avx512f") ? name##_by_sixteen : name##_by_eight;                             \
        return name##_by_default;                                                                                       \
    }
#else
#define FOR_EVERY_CPU(name)                                                                                             \
    static void name##_by_default(const Step *step, const Item *item)                                                   \
    {                                                                                                                   \
        name(step, item, IS_FUSED);                                                                                     \
    }                                                                                                                   \
    static Mover best_##name(void)                                                                                      \
    {                                                                                                                   \
        return name##_by_default;                                                                                       \
    }
#endif

FOR_EVERY_CPU(move)

#endif
