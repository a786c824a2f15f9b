/* Read the values that a loop passes with a step: the value of its loss, the hash of its batch. */
#ifndef GRADWATCH_BATCH_HASH_H
#define GRADWATCH_BATCH_HASH_H

#include "kernels/counts.h"
#include "tensor_view.h"

typedef struct {
    uint64_t hash;
    double samples; /* nan without a tensor that has samples */
} Batch;

enum { STREAMED = 4096, SHORT_TEXT = 256, MAX_DEPTH = 16 };

/* Copy strided elements to contiguous memory. */
INLINE void copy_strided(unsigned char *to, const char *from, int64_t number, int64_t stride, size_t size)
{
    for (int64_t i = 0; i < number; i++)
        memcpy(to + (size_t)i * size, from + i * stride * (int64_t)size, size);
}

static void copy_contiguous(unsigned char *to, const char *from, int64_t number, int64_t stride, size_t size)
{
    if (stride == 1)
        memcpy(to, from, (size_t)number * size);
    else if (size == 4) /* a constant size turns the copy of an element into one instruction */
        copy_strided(to, from, number, stride, 4);
    else if (size == 8)
        copy_strided(to, from, number, stride, 8);
    else
        copy_strided(to, from, number, stride, size);
}

/* Return the checksum of a tensor that consists of pieces: the checksum of its elements in row-major order. */
static uint64_t checksum_of_pieces(const DLTensor *t, const char *row, size_t bytes)
{
    unsigned char buffer[STREAMED];
    int64_t index[MAX_DIMS] = {0}, size = t->bits * t->lanes / 8, room = STREAMED / size, filled = 0;
    uint64_t sum = bytes * GOLDEN, key = 0;
    int last = t->ndim - 1, d;
    do {
        for (int64_t i = 0; i < t->shape[last];) {
            int64_t number = t->shape[last] - i < room - filled ? t->shape[last] - i : room - filled;
            int64_t stride = t->strides[last];
            copy_contiguous(buffer + filled * size, row + i * stride * size, number, stride, (size_t)size);
            i += number;
            filled += number;
            if (filled == room) {
                sum += sum_of_words(buffer, STREAMED / 8, &key);
                filled = 0;
            }
        }
        /* the next row: count up the indices like an odometer */
        for (d = last - 1; d >= 0; d--) {
            row += t->strides[d] * size;
            if (++index[d] < t->shape[d])
                break;
            row -= t->shape[d] * t->strides[d] * size;
            index[d] = 0;
        }
    } while (d >= 0);
    return sum + sum_of_end(buffer, (size_t)(filled * size), key);
}

/* Compute the checksum of a supported tensor that is not large. Returns false for any other tensor. */
static int checksum_of_tensor(PyObject *object, uint64_t *sum, double *samples)
{
    View view;
    DLTensor seen;
    view_and_describe(object, 1, IN_PIECES, &view, &seen);
    if (view.state != SUPPORTED || view.bytes > LOCKED_BYTES)
        return 0;
    if (*samples != *samples && seen.ndim) /* nan so far: the first tensor with dimensions counts */
        *samples = (double)seen.shape[0];
    *sum = !view.numel || is_dense(&seen, 1) ? checksum_of(view.data, view.bytes)
                                             : checksum_of_pieces(&seen, view.data, view.bytes);
    return 1;
}

/* Compute the checksum of short text, a number or None: the CRC-32 of zlib, of its `repr`. Returns false for others. */
static int checksum_of_value(PyObject *object, uint64_t *sum)
{
    if (object != Py_None && !PyUnicode_CheckExact(object) && !PyLong_CheckExact(object) && !PyFloat_CheckExact(object)
        && !PyBool_Check(object))
        return 0;
    PyObject *shown = PyObject_Repr(object);
    Py_ssize_t length = 0;
    const char *text = shown ? PyUnicode_AsUTF8AndSize(shown, &length) : NULL;
    int is_short = text && length <= SHORT_TEXT; /* for longer text, zlib is faster */
    uint32_t crc = 0xffffffffu;
    for (Py_ssize_t i = 0; is_short && i < length; i++) {
        crc ^= (unsigned char)text[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    }
    Py_XDECREF(shown);
    PyErr_Clear();
    *sum = ~crc;
    return is_short;
}

/* Add the contents of a batch to its hash, as `joined` in batch_hash.py does. Without a batch, only count the leaves.
 * Returns false if the part is unsupported. */
static int hash_part(PyObject *part, int depth, Py_ssize_t *leaves, Batch *batch)
{
    PyObject *key, *value;
    Py_ssize_t place = 0;
    uint64_t sum = 0;
    int is_list = PyList_CheckExact(part), is_supported = 1;
    if (is_list || PyTuple_CheckExact(part)) {
        for (; depth && is_supported && place < (is_list ? PyList_Size(part) : PyTuple_Size(part)); place++) {
            value = is_list ? PyList_GetItem(part, place) : PyTuple_GetItem(part, place);
            is_supported = hash_part(value, depth - 1, leaves, batch);
        }
        return is_supported && depth; /* deeper nests are left to Python */
    }
    if (PyDict_CheckExact(part)) {
        while (depth && is_supported && PyDict_Next(part, &place, &key, &value))
            is_supported = hash_part(key, depth - 1, leaves, batch) && hash_part(value, depth - 1, leaves, batch);
        return is_supported && depth;
    }
    ++*leaves;
    if (!batch)
        return 1;
    is_supported = checksum_of_tensor(part, &sum, &batch->samples) || checksum_of_value(part, &sum);
    batch->hash = (batch->hash ^ batch->hash >> 29) * GOLDEN + sum;
    return is_supported;
}

/* Hash a tensor, or a nest of lists, tuples and dictionaries of tensors and plain values that are not large. Returns
 * false for anything else. */
static int read_batch(PyObject *object, Batch *batch)
{
    Py_ssize_t leaves = 0, seen = 0;
    batch->samples = NAN;
    if (!hash_part(object, MAX_DEPTH, &leaves, NULL))
        return 0;
    batch->hash = (uint64_t)leaves; /* the hash starts with their number, hence the first pass */
    if (!hash_part(object, MAX_DEPTH, &seen, batch))
        return 0;
    uint64_t total = (batch->hash ^ batch->hash >> 32) * GOLDEN;
    batch->hash = ((total ^ total >> 29) * GOLDEN) >> 16;
    return 1;
}

/* Read the only value of a supported float32 or float64 tensor, or a Python float. Returns false for anything else. */
static int only_value(PyObject *object, double *value)
{
    View view;
    if (PyFloat_CheckExact(object)) {
        *value = PyFloat_AsDouble(object);
        return 1;
    }
    view_tensor(object, 0, IN_ANY_ORDER, &view);
    if (view.state != SUPPORTED || view.numel != 1 || (view.kind != F32 && view.kind != F64))
        return 0;
    *value = view.kind == F32 ? *(const float *)view.data : *(const double *)view.data;
    return 1;
}

#endif
