/* Writes the statistics of many tensors into the columns of a row. */
#ifndef GRADWATCH_COLUMNS_H
#define GRADWATCH_COLUMNS_H

#include "_counts.h"
#include "_sums.h"
#include "_threads.h"
#include "_views.h"

/* Write the statistics of a tensor, and its histogram where there is room for it. */
static void write_column(const View *view, double scale, float *row, Py_ssize_t stride, int64_t *counts)
{
    Totals totals;
    if (view->state != PLAIN || !view->numel) {
        write_nothing(view->state == PLAIN, row, (size_t)stride);
        return;
    }
    if (counts)
        totals_and_counts_of(view->data, view->numel, view->kind, &totals, counts);
    else
        totals_of(view->data, view->numel, view->kind, &totals);
    write_totals(&totals, view->numel, scale, row, (size_t)stride);
}

typedef struct {
    const Views *all;
    double scale;
    float *row;
    int64_t *counts;
} Columns;

static void write_one(void *of, size_t index)
{
    const Columns *columns = of;
    int64_t *counts = columns->counts ? columns->counts + index * BINS : NULL;
    write_column(&columns->all->views[index], columns->scale, columns->row + index, columns->all->length, counts);
}

/* The same of all tensors, of which each has a column; where there is much to read, without the interpreter's lock. */
static void write_columns(const Views *all, double scale, float *row, int64_t *counts, int threads)
{
    Columns columns = {all, scale, row, counts};
    size_t length = (size_t)all->length;
    PyThreadState *saved = all->bytes > QUICK_BYTES ? PyEval_SaveThread() : NULL;
    Turn *turns = turns_for(length, all->bytes, threads);
    for (size_t i = 0; turns && i < length; i++)
        turns[i] = (Turn){all->views[i].bytes, i};
    do_all(write_one, &columns, turns, length, threads);
    if (saved)
        PyEval_RestoreThread(saved);
}

#endif
