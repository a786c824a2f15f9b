/* Optimizer steps of tensors of floats, with what is summed on the way. Plain C99, no Python.
 *
 * Gradient, weight and moments are read once from memory whatever is made of them: in one loop, or again in blocks that
 * stay in the cache. The arithmetic is that of torch's fused kernels (aten/src/ATen/native/cpu/FusedAdamKernel.cpp
 * and FusedSGDKernel.cpp), operation by operation and in their order; where the CPU has fused multiply-add, what the
 * compiler fuses there is fused here too, so that the weights come out equal to the bit. */
#ifndef GRADWATCH_STEPS_H
#define GRADWATCH_STEPS_H

#include "blocks.h"
#include "sums.h"

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

/* The same of an x that is not negative: then Inf, whose remainder is NaN, is distinguished by taking a minimum. */
INLINE float root_over(float x, float divisor, float inverse, int fused)
{
    if (!fused)
        return x / divisor;
    float near = x * inverse, twice = near + near;
    float exact = multiply_add(multiply_add(-near, divisor, x, 1), inverse, near, 1);
    return exact < twice ? exact : twice;
}

/* What a step's loops do, constant where they are compiled. Usual are gradients that are followed down, and a mean of
 * Adam's that goes less than half of the way to them. */
typedef struct {
    int is_adam, is_usual, has_momentum, is_coupled, is_amsgrad, fused; /* has_momentum: SGD only */
} Form;

/* The constants of a step, as its loops use them. */
typedef struct {
    float sign, decay, keep, momentum, rest, rate, lerp, beta2, rest2, eps, step_size, root, inverse;
    int is_small, is_nesterov, is_fresh; /* is_small: the mean goes less than half of the way */
} Pace;

static Pace pace_of(const Item *item)
{
    const Settings *s = item->settings;
    const int is_small = s->lerp < 0.5f;
    return (Pace){
        .sign = s->sign, .decay = s->decay, .keep = s->keep, .momentum = s->momentum, .rest = s->rest, .rate = s->rate,
        .lerp = is_small ? s->lerp : s->lerp - 1, .beta2 = s->beta2, .rest2 = s->rest2, .eps = s->eps,
        .step_size = item->step_size, .root = item->root, .inverse = item->inverse,
        .is_small = is_small, .is_nesterov = s->is_nesterov, .is_fresh = item->is_fresh,
    };
}

/* Where a part of a parameter lies; null what its rule has not. */
typedef struct {
    float *weight, *first, *second, *largest;
    const float *grad;
} Streams;

INLINE Streams streams_of(const Item *item, size_t begin)
{
    return (Streams){item->weight + begin, item->first ? item->first + begin : NULL,
                     item->second ? item->second + begin : NULL, item->largest ? item->largest + begin : NULL,
                     item->grad + begin};
}

/* What one weight becomes. */
INLINE float moved_by_adam(const Pace *c, Form form, const Streams *at, size_t i, int is_tail)
{
    float x = form.is_usual ? at->grad[i] : at->grad[i] * c->sign, p = at->weight[i];
    float *m = at->first + i, *v = at->second + i;
    if (form.is_coupled)
        x = multiply_add(p, c->decay, x, form.fused);
    else
        p *= c->keep;
    float mean = multiply_add(c->lerp, x - *m, form.is_usual || c->is_small ? *m : x, form.fused);
    float square = is_tail ? multiply_add(*v, c->beta2, c->rest2 * x * x, form.fused)
                           : multiply_add(c->rest2 * x, x, *v * c->beta2, form.fused);
    *m = mean;
    *v = square;
    if (form.is_amsgrad) {
        float old = at->largest[i];
        square = (is_tail ? !(old < square) : old > square || old != old) ? old : square;
        at->largest[i] = square;
    }
    return p - c->step_size * mean / (root_over(sqrtf(square), c->root, c->inverse, form.fused) + c->eps);
}

INLINE float moved_by_sgd(const Pace *c, Form form, const Streams *at, size_t i, int is_tail)
{
    float x = form.is_usual ? at->grad[i] : at->grad[i] * c->sign, p = at->weight[i];
    if (form.is_coupled)
        x = multiply_add(p, c->decay, x, form.fused);
    if (form.has_momentum) {
        float *m = at->first + i;
        float mean = is_tail ? multiply_add(*m, c->momentum, x * c->rest, form.fused)
                             : multiply_add(x, c->rest, *m * c->momentum, form.fused);
        mean = c->is_fresh ? x : mean;
        *m = mean;
        x = c->is_nesterov ? multiply_add(mean, c->momentum, x, form.fused) : mean;
    }
    return multiply_add(x, -c->rate, p, form.fused);
}

INLINE float moved(const Pace *c, Form form, const Streams *at, size_t i, int is_tail)
{
    return form.is_adam ? moved_by_adam(c, form, at, i, is_tail) : moved_by_sgd(c, form, at, i, is_tail);
}

/* Move full lanes, and keep what they were before where that is not null. The gradients are read in the same loop, so
 * that no memory lies idle while they are looked at by themselves. */
INLINE void move_lanes(const Pace *c, Form form, const Streams *at, size_t n, float *before, FloatLanes *sums)
{
    FloatLanes lanes = *sums;
    for (size_t i = 0; i < n; i += LANES) {
        fetch_soon(at->grad + i);
        fetch_soon(at->weight + i);
        if (form.is_adam || form.has_momentum)
            fetch_soon(at->first + i);
        if (form.is_adam)
            fetch_soon(at->second + i);
        if (form.is_amsgrad)
            fetch_soon(at->largest + i);
        UNRELATED
        for (int l = 0; l < LANES; l++) {
            if (before)
                before[i + l] = at->weight[i + l];
            at->weight[i + l] = moved(c, form, at, i + l, 0);
        }
        read_lanes((const uint32_t *)(at->grad + i), &lanes);
    }
    *sums = lanes;
}

/* Move what does not fill all lanes. */
INLINE void move_rest(const Pace *c, Form form, const Streams *at, size_t n, float *before)
{
    const size_t whole = n / TAIL * TAIL;
    if (before)
        memcpy(before, at->weight, n * sizeof *before);
    for (size_t i = 0; i < whole; i++)
        at->weight[i] = moved(c, form, at, i, 0);
    for (size_t i = whole; i < n; i++)
        at->weight[i] = moved(c, form, at, i, 1);
}

/* Loops are compiled for either. */
INLINE void move_by(const Pace *c, Form form, const Streams *at, size_t n, float *before, FloatLanes *sums)
{
    if (n % LANES)
        move_rest(c, form, at, n, before);
    else if (before)
        move_lanes(c, form, at, n, before, sums);
    else
        move_lanes(c, form, at, n, NULL, sums);
}

/* Make a call with a flag of `form` as a constant. */
#define SETTLE(flag, call)                                                                                              \
    do {                                                                                                                \
        if (form.flag) {                                                                                                \
            form.flag = 1;                                                                                              \
            call;                                                                                                       \
        } else {                                                                                                        \
            form.flag = 0;                                                                                              \
            call;                                                                                                       \
        }                                                                                                               \
    } while (0)

INLINE void move_by_adam(const Pace *c, Form form, const Streams *at, size_t n, float *before, FloatLanes *sums)
{
    form.is_adam = 1;
    SETTLE(is_usual, SETTLE(is_coupled, SETTLE(is_amsgrad, move_by(c, form, at, n, before, sums))));
}

INLINE void move_by_sgd(const Pace *c, Form form, const Streams *at, size_t n, float *before, FloatLanes *sums)
{
    form.is_adam = form.is_amsgrad = 0;
    SETTLE(is_usual, SETTLE(has_momentum, SETTLE(is_coupled, move_by(c, form, at, n, before, sums))));
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
        length = kept_length(item->numel - begin);
        add_padded_change(&changes, item->weight + begin, item->weight + begin, length);
    }
    write_change(folded(changes.weights), folded(changes.updates), item->change, step->stride);
}

/* Move a block of a parameter, and sum up its gradient. */
INLINE void move_block(const Item *item, size_t begin, size_t n, int fused, FloatSums *sums, ChangeSums *changes)
{
    const Settings *s = item->settings;
    const Pace c = pace_of(item);
    const int is_usual = s->sign > 0 && (s->rule == SGD || c.is_small);
    const Form form = {s->rule == ADAM, is_usual, item->first != NULL, s->is_coupled, s->is_amsgrad, fused};
    const uint32_t *bits = (const uint32_t *)(item->grad + begin);
    uint32_t rest[LANES];
    float kept[KEPT], *before = item->change ? kept : NULL;
    FloatLanes lanes = {{0}, {0}, {0}, {0}};
    FloatBlock block;
    for (size_t i = 0, length; i < n; i += length) {
        const Streams at = streams_of(item, begin + i);
        length = before ? kept_length(n - i) : n - i;
        if (form.is_adam)
            move_by_adam(&c, form, &at, length, before, &lanes);
        else
            move_by_sgd(&c, form, &at, length, before, &lanes);
        if (before)
            add_padded_change(changes, before, at.weight, length);
    }
    if (item->column && n % LANES) {
        add_block(sums, float_bits(bits, 0, n, F32, rest), n);
    } else if (item->column) {
        sum_up_lanes(&lanes, &block);
        foresee(sums, bits);
        take_block(sums, &block, bits, n);
    }
}

/* Move one parameter, or only look at its gradient, and write what was summed. */
INLINE void move(const Step *step, const Item *item, int fused)
{
    FloatSums sums = {{0}, {0}, 0, 0, 0, 0};
    ChangeSums changes = {{0}, {0}};
    uint32_t rest[LANES];
    if (!item->grad) {
        leave(step, item);
        return;
    }
    if (step->is_skipped && !item->column)
        return;
    for (size_t begin = 0, n; begin < item->numel; begin += n) {
        n = block_length(item->numel - begin);
        if (step->is_skipped) {
            add_block(&sums, float_bits(item->grad, begin, n, F32, rest), n);
            continue;
        }
        if (step->scale)
            for (size_t i = begin; i < begin + n; i++)
                item->grad[i] = item->grad[i] / *step->scale;
        move_block(item, begin, n, fused, &sums, &changes);
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
