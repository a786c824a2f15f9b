/* Distribute tensors over threads. One thread reads a whole tensor, so that sums do not depend on the threads. */
#ifndef GRADWATCH_THREADS_H
#define GRADWATCH_THREADS_H

#include <stdlib.h>

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#include <pthread.h>
#define HAS_THREADS 1
#endif

enum { MAX_THREADS = 64 };
/* with fewer bytes, waking threads of a pool (first) or starting threads (second) is not worth it */
enum { POOLED_BYTES = 1 << 20, THREADED_BYTES = 1 << 23 };

typedef struct {
    size_t size, index;
} WorkItem;

/* A function of one tensor out of many. */
typedef void (*Task)(void *of, size_t index);

#ifdef HAS_THREADS
typedef struct {
    Task task;
    void *of;
    const WorkItem *items;
    size_t length, next;
    pthread_mutex_t lock;
} Work;

static int larger_first(const void *a, const void *b)
{
    size_t x = ((const WorkItem *)a)->size, y = ((const WorkItem *)b)->size;
    return (x < y) - (x > y); /* not x - y, which wraps for unsigned numbers */
}

/* Run a function on a team of threads. GCC's `#pragma omp parallel` calls this entry, and Clang's library has it, too.
 * https://gcc.gnu.org/onlinedocs/libgomp/Implementing-PARALLEL-construct.html */
typedef void (*Team)(void (*function)(void *), void *shared, unsigned threads, unsigned flags);

/* Return the team of the OpenMP that torch has loaded, or NULL. Its threads wait busily for torch's next operation, so
 * additional threads would compete with them for the cores. */
static Team openmp_team(void)
{
    static Team team;
    static int is_known; /* separate, since NULL is an answer, too */
    if (!is_known) {
        team = (Team)dlsym(RTLD_DEFAULT, "GOMP_parallel");
        is_known = 1;
    }
    return team;
}

static void run_items(void *shared)
{
    Work *work = shared;
    for (;;) {
        pthread_mutex_lock(&work->lock);
        size_t turn = work->next++;
        pthread_mutex_unlock(&work->lock);
        if (turn >= work->length)
            return;
        work->task(work->of, work->items[turn].index);
    }
}

static void *run_items_on_thread(void *shared)
{
    run_items(shared);
    return NULL;
}

static void start_and_join(Work *work, int threads)
{
    pthread_t others[MAX_THREADS];
    int started = 0;
    /* if a thread does not start, the others do its work */
    while (started < threads - 1 && started < MAX_THREADS
           && !pthread_create(&others[started], NULL, run_items_on_thread, work))
        started++;
    run_items(work);
    while (started)
        pthread_join(others[--started], NULL);
}

#endif

/* Return memory for the items of `length` tensors, not filled yet; NULL if one thread is as fast, or without memory. */
static WorkItem *work_items_for(size_t length, size_t bytes, int threads)
{
#ifdef HAS_THREADS
    size_t enough = openmp_team() ? POOLED_BYTES : THREADED_BYTES;
    return threads > 1 && length > 1 && bytes > enough ? malloc(length * sizeof(WorkItem)) : NULL;
#else
    (void)length;
    (void)bytes;
    (void)threads;
    return NULL;
#endif
}

/* Do a task for all items on several threads, and free the items. Without items, do it on this thread, in order. */
static void do_all(Task task, void *of, WorkItem *items, size_t length, int threads)
{
#ifdef HAS_THREADS
    if (items) {
        Work work = {task, of, items, length, 0, PTHREAD_MUTEX_INITIALIZER};
        qsort(items, length, sizeof(WorkItem), larger_first); /* a large item at the end would keep one thread busy alone */
        if (openmp_team())
            openmp_team()(run_items, &work, (unsigned)threads, 0);
        else
            start_and_join(&work, threads);
        pthread_mutex_destroy(&work.lock);
        free(items);
        return;
    }
#endif
    (void)items;
    (void)threads;
    for (size_t i = 0; i < length; i++)
        task(of, i);
}

#endif
