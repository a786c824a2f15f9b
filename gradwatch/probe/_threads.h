/* Shares the parameters of a step out among threads. Each is one thread's whole, so that sums do not depend on it. */
#ifndef GRADWATCH_THREADS_H
#define GRADWATCH_THREADS_H

#include <stdlib.h>

#include "_steps.h"

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#include <pthread.h>
#define HAS_THREADS 1
#endif

enum { MOST_THREADS = 64 };
enum { POOLED_BYTES = 1 << 20, THREADED_BYTES = 1 << 23 }; /* for less, waking or starting threads is not worth it */

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

/* Runs a function on a team of threads: what `#pragma omp parallel` of GCC calls, and Clang's library has for it.
 * https://gcc.gnu.org/onlinedocs/libgomp/Implementing-PARALLEL-construct.html */
typedef void (*Team)(void (*function)(void *), void *shared, unsigned threads, unsigned flags);

/* The team of the OpenMP that torch has loaded, or NULL. Its threads wait busily for torch's next operation, so that
 * others beside them would have to share the cores with them. */
static Team torchs_team(void)
{
    static Team team;
    static int is_known;
    if (!is_known) {
        team = (Team)dlsym(RTLD_DEFAULT, "GOMP_parallel");
        is_known = 1;
    }
    return team;
}

static void take_turns(void *shared)
{
    Work *work = shared;
    for (;;) {
        pthread_mutex_lock(&work->lock);
        size_t turn = work->next++;
        pthread_mutex_unlock(&work->lock);
        if (turn >= work->step->length)
            return;
        work->mover(work->step, &work->step->items[work->turns[turn].index]);
    }
}

static void *take_turns_apart(void *shared)
{
    take_turns(shared);
    return NULL;
}

static void start_and_join(Work *work, int threads)
{
    pthread_t others[MOST_THREADS];
    int started = 0;
    while (started < threads - 1 && started < MOST_THREADS
           && !pthread_create(&others[started], NULL, take_turns_apart, work))
        started++;
    take_turns(work);
    while (started)
        pthread_join(others[--started], NULL);
}

/* Returns 0 where memory for it is short, and nothing has moved. */
static int move_together(const Step *step, Mover mover, int threads)
{
    Work work = {step, mover, malloc(step->length * sizeof(Turn)), 0, PTHREAD_MUTEX_INITIALIZER};
    if (!work.turns)
        return 0;
    for (size_t i = 0; i < step->length; i++)
        work.turns[i] = (Turn){step->items[i].numel, i};
    qsort(work.turns, step->length, sizeof(Turn), larger_first);
    if (torchs_team())
        torchs_team()(take_turns, &work, (unsigned)threads, 0);
    else
        start_and_join(&work, threads);
    pthread_mutex_destroy(&work.lock);
    free(work.turns);
    return 1;
}
#endif

static void move_all(const Step *step, Mover mover, size_t bytes, int threads)
{
#ifdef HAS_THREADS
    size_t enough = torchs_team() ? POOLED_BYTES : THREADED_BYTES;
    if (threads > 1 && step->length > 1 && bytes > enough && move_together(step, mover, threads))
        return;
#else
    (void)threads;
    (void)bytes;
#endif
    move_alone(step, mover);
}

#endif
