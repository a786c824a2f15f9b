/* How far a step has moved a weight, from what it leaves behind: the weight after it, its moments and its constants.
 *
 * The update is computed as the step did, and taken off the weight. That is rounded to a float, as the weight before was
 * one, which undoes the rounding of the step but where that was nearly a tie. Plain C99, no Python. */
#ifndef GRADWATCH_TRACES_H
#define GRADWATCH_TRACES_H

#include "steps.h"

/* Weights of before the step, of one block. SGD is that with momentum and without Nesterov's. Of a weight of
 * zero the step leaves the rounded update, which has to come out as zero again, whichever way it was rounded. */
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
    const float *restrict v = (s->is_amsgrad ? item->largest : item->second) + begin;
    const float step_size = item->step_size, root = item->root, inverse = item->inverse;
    const float eps = s->eps, keep = s->keep, grow = 1 / keep;
    for (size_t i = 0; i < n; i++) {
        float update = step_size * m[i] / (root_over(sqrtf(v[i]), root, inverse, fused) + eps), old = w[i] + update;
        before[i] = fabsf(old) <= NOISE * fabsf(update) ? 0 : over(old, keep, grow, fused);
    }
}

INLINE void trace(const Step *step, const Item *item, int fused)
{
    ChangeSums changes = {{0}, {0}};
    float before[KEPT];
    if (!item->first || !item->change) {
        leave(step, item);
        return;
    }
    for (size_t begin = 0, length; begin < item->numel; begin += length) {
        length = kept_length(item->numel - begin);
        weights_before(item, begin, length, before, fused);
        add_padded_change(&changes, before, item->weight + begin, length);
    }
    write_change(folded(changes.weights), folded(changes.updates), item->change, step->stride);
}

FOR_EVERY_CPU(trace)

#endif
