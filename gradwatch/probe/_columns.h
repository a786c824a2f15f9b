/* Writes the statistics of many tensors into the columns of a row. */
#ifndef GRADWATCH_COLUMNS_H
#define GRADWATCH_COLUMNS_H

#include "_counts.h"
#include "_steps.h"
#include "_sums.h"
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

/* The same of all tensors, of which each has a column; where there is much to read, without the interpreter's lock. */
static void write_columns(const Views *all, double scale, float *row, int64_t *counts)
{
    PyThreadState *saved = all->bytes > QUICK_BYTES ? PyEval_SaveThread() : NULL;
    for (Py_ssize_t i = 0; i < all->length; i++)
        write_column(&all->views[i], scale, row + i, all->length, counts ? counts + i * BINS : NULL);
    if (saved)
        PyEval_RestoreThread(saved);
}

#endif
