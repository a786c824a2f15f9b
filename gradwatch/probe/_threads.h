/* Shares the parameters of a step out among threads. Each is one thread's whole, so that sums do not depend on it. */
#ifndef GRADWATCH_THREADS_H
#define GRADWATCH_THREADS_H

#include <stdlib.h>

#include "_steps.h"

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#define HAS_THREADS 1
#endif

enum { THREADED_BYTES = 1 << 23, MOST_THREADS = 64 }; /* for less, 2 million floats, starting threads is not worth it */

static void move_alone(const Step *step, Mover mover)
{
    for (size_t i = 0; i < step->length; i++)
        mover(step, &step->items[i]);
}

#ifdef HAS_THREADS
typedef struct {
    size_t numel, index;
} Turn;

typedef struct {
    const Step *step;
    Mover mover;
    Turn *turns;
    size_t next;
    pthread_mutex_t lock;
} Work;

static int larger_first(const void *a, const void *b)
{
    size_t x = ((const Turn *)a)->numel, y = ((const Turn *)b)->numel;
    return (x < y) - (x > y);
}

static void *take_turns(void *shared)
{
    Work *work = shared;
    for (;;) {
        pthread_mutex_lock(&work->lock);
        size_t turn = work->next++;
        pthread_mutex_unlock(&work->lock);
        if (turn >= work->step->length)
            return NULL;
        work->mover(work->step, &work->step->items[work->turns[turn].index]);
    }
}

/* Returns 0 where memory for it is short, and nothing has moved. */
static int move_together(const Step *step, Mover mover, int threads)
{
    pthread_t others[MOST_THREADS];
    Work work = {step, mover, malloc(step->length * sizeof(Turn)), 0, PTHREAD_MUTEX_INITIALIZER};
    int started = 0;
    if (!work.turns)
        return 0;
    for (size_t i = 0; i < step->length; i++)
        work.turns[i] = (Turn){step->items[i].numel, i};
    qsort(work.turns, step->length, sizeof(Turn), larger_first);
    while (started < threads - 1 && started < MOST_THREADS && !pthread_create(&others[started], NULL, take_turns, &work))
        started++;
    take_turns(&work);
    while (started)
        pthread_join(others[--started], NULL);
    pthread_mutex_destroy(&work.lock);
    free(work.turns);
    return 1;
}
#endif

static void move_all(const Step *step, Mover mover, int threads)
{
#ifdef HAS_THREADS
    if (threads > 1 && step->length > 1 && move_together(step, mover, threads))
        return;
#else
    (void)threads;
#endif
    move_alone(step, mover);
}

#endif
