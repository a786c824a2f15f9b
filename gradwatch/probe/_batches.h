/* Looks at what a loop hands over with a step: the value of its loss, the hash of its batch. */
#ifndef GRADWATCH_BATCHES_H
#define GRADWATCH_BATCHES_H

#include "_counts.h"
#include "_views.h"

typedef struct {
    uint64_t hash;
    double samples; /* nan where there are none */
} Batch;

/* Add what a part of a batch holds to its hash, as `joined` in batch_hash.py does. False where it is not plain. */
static int hash_part(PyObject *part, uint64_t *total, double *samples)
{
    View view;
    DLTensor seen;
    look_closely(part, 1, 1, &view, &seen);
    if (view.state != PLAIN || view.bytes > QUICK_BYTES)
        return 0;
    if (*samples != *samples && seen.ndim)
        *samples = (double)seen.shape[0];
    *total = (*total ^ *total >> 29) * GOLDEN + checksum_of(view.data, view.bytes);
    return 1;
}

static int hash_parts(PyObject *batch, uint64_t *total, double *samples)
{
    int is_list = PyList_CheckExact(batch);
    if (!is_list && !PyTuple_CheckExact(batch)) {
        *total = 1;
        return hash_part(batch, total, samples);
    }
    Py_ssize_t length = is_list ? PyList_Size(batch) : PyTuple_Size(batch);
    *total = (uint64_t)length;
    for (Py_ssize_t i = 0; i < length; i++)
        if (!hash_part(is_list ? PyList_GetItem(batch, i) : PyTuple_GetItem(batch, i), total, samples))
            return 0;
    return 1;
}

/* Look at a tensor, or a list or tuple of tensors, which are plain and not large. False for anything else. */
static int read_batch(PyObject *object, Batch *batch)
{
    uint64_t total;
    batch->samples = NAN;
    if (!hash_parts(object, &total, &batch->samples))
        return 0;
    total = (total ^ total >> 32) * GOLDEN;
    batch->hash = ((total ^ total >> 29) * GOLDEN) >> 16;
    return 1;
}

/* The only value of a plain float32 or float64 tensor, or a Python float. False for anything else. */
static int only_value(PyObject *object, double *value)
{
    View view;
    if (PyFloat_CheckExact(object)) {
        *value = PyFloat_AsDouble(object);
        return 1;
    }
    look_at(object, 0, 0, &view);
    if (view.state != PLAIN || view.numel != 1 || (view.kind != F32 && view.kind != F64))
        return 0;
    *value = view.kind == F32 ? *(const float *)view.data : *(const double *)view.data;
    return 1;
}

#endif
