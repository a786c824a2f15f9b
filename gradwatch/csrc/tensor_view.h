/* Find the memory of Python's tensors, through the DLPack table of torch.Tensor. */
#ifndef GRADWATCH_TENSOR_VIEW_H
#define GRADWATCH_TENSOR_VIEW_H

#include <Python.h>

#include "kernels/blocks.h"

/* The part of dlpack.h that this file reads. */
typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    uint32_t major, minor;
    void *previous;
    void *allocate, *to_managed, *from_managed;
    int (*borrow)(void *object, DLTensor *out);
    void *current_stream;
} ExchangeTable;

enum { DL_CPU = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_COMPLEX = 5, MAX_DIMS = 16 };
enum { LOCKED_BYTES = 1 << 22 }; /* about 100 us: for shorter reads, other threads can wait for the interpreter lock */

static const ExchangeTable *exchange;
static PyTypeObject *tensor_type, *parameter_type; /* subclasses may keep their data elsewhere */
static PyObject *grad_name;

typedef struct {
    PyObject *owner; /* a reference, which keeps the memory alive while it is read without the lock */
    const char *data;
    size_t numel, bytes;
    Kind kind;
    enum { SUPPORTED, ABSENT, UNSUPPORTED } state;
} View;

typedef struct {
    View *views;
    Py_ssize_t length;
    size_t bytes;
} Views;

/* Return whether the elements fill one piece of memory, in any order of the dimensions (channels_last, too). */
static int is_dense(const DLTensor *t, int in_order)
{
    int order[MAX_DIMS], dims = 0;
    int64_t expected = 1;
    if (!t->strides) /* DLPack: contiguous */
        return 1;
    for (int d = t->ndim - 1; d >= 0; d--) {
        if (t->shape[d] == 1)
            continue;
        int place = dims++;
        if (place == MAX_DIMS)
            return 0;
        /* insertion sort by stride: there are few dimensions, mostly in order already */
        for (; !in_order && place > 0 && t->strides[order[place - 1]] > t->strides[d]; place--)
            order[place] = order[place - 1];
        order[place] = d;
    }
    for (int i = 0; i < dims; i++) {
        if (t->strides[order[i]] != expected)
            return 0;
        expected *= t->shape[order[i]];
    }
    /* a single element is dense whatever its stride, but may be the lazily negated imaginary part of a complex one */
    for (int d = 0; dims == 0 && d < t->ndim; d++)
        if (t->strides[d] > 1)
            return 0;
    return 1;
}

static Kind kind_of(const DLTensor *t)
{
    if (t->lanes == 1 && t->code == DL_FLOAT)
        return t->bits == 32 ? F32 : t->bits == 64 ? F64 : t->bits == 16 ? F16 : OTHER;
    return t->lanes == 1 && t->code == DL_BFLOAT && t->bits == 16 ? BF16 : OTHER;
}

/* Required layout: one piece of memory; one piece in row-major order; or rows that are each one piece. A lazily negated
 * tensor, the imaginary part of a conjugate one, has none of these layouts. */
enum { IN_ANY_ORDER, IN_ORDER, IN_PIECES };

static int has_layout(const DLTensor *t, int how)
{
    if (how != IN_PIECES || t->ndim > MAX_DIMS || t->bits * t->lanes % 8)
        return is_dense(t, how != IN_ANY_ORDER);
    return is_dense(t, 0) || (t->ndim > 0 && t->strides[t->ndim - 1] == 1);
}

/* View the memory of a tensor object. Anything unusual is UNSUPPORTED, and no Python error stays set. */
static void view_and_describe(PyObject *object, int any_dtype, int how, View *view, DLTensor *seen)
{
    view->state = UNSUPPORTED;
    view->numel = view->bytes = 0;
    if (Py_TYPE(object) != tensor_type && Py_TYPE(object) != parameter_type)
        return;
    if (exchange->borrow(object, seen)) {
        PyErr_Clear();
        return;
    }
    DLTensor t = *seen;
    size_t numel = 1;
    for (int d = 0; d < t.ndim; d++)
        numel *= (size_t)t.shape[d];
    view->kind = kind_of(&t);
    if (t.device_type != DL_CPU || (view->kind == OTHER && !any_dtype))
        return;
    if (t.code == DL_COMPLEX) /* may be lazily conjugate, which DLPack does not show */
        return;
    if (numel && (!t.data || !has_layout(&t, how)))
        return;
    view->data = (const char *)t.data + t.byte_offset;
    view->numel = numel;
    view->bytes = (numel * t.bits * t.lanes + 7) / 8; /* rounded up: some dtypes have less than a byte */
    view->state = SUPPORTED;
}

static void view_tensor(PyObject *object, int any_dtype, int how, View *view)
{
    DLTensor seen;
    view_and_describe(object, any_dtype, how, view, &seen);
}

static int has_arguments(Py_ssize_t given, Py_ssize_t expected)
{
    if (given != expected)
        PyErr_Format(PyExc_TypeError, "got %zd arguments, expected %zd", given, expected);
    return given == expected;
}

static void release_views(Views *all)
{
    for (Py_ssize_t i = 0; i < all->length; i++)
        Py_XDECREF(all->views[i].owner);
    PyMem_Free(all->views);
}

/* View a tuple of tensors, or their gradients. Returns 0, or -1 with a Python error. */
static int view_tensors(PyObject *tensors, int gradients, Views *all)
{
    all->length = 0;
    all->bytes = 0;
    if (!exchange || !PyTuple_Check(tensors)) {
        PyErr_SetString(PyExc_TypeError, "bind() first, then pass a tuple of tensors");
        return -1;
    }
    Py_ssize_t length = PyTuple_Size(tensors);
    all->views = PyMem_Malloc((length ? length : 1) * sizeof(View));
    if (!all->views) {
        PyErr_NoMemory();
        return -1;
    }
    for (; all->length < length; all->length++) {
        PyObject *tensor = PyTuple_GetItem(tensors, all->length);
        View *view = &all->views[all->length];
        view->owner = gradients ? PyObject_GetAttr(tensor, grad_name) : Py_NewRef(tensor);
        if (!view->owner) {
            release_views(all);
            return -1;
        }
        if (view->owner == Py_None) {
            view->state = ABSENT;
            view->numel = view->bytes = 0;
        } else {
            view_tensor(view->owner, 0, IN_ANY_ORDER, view);
        }
        all->bytes += view->bytes;
    }
    return 0;
}

/* Return the indices of the unsupported tensors, or None, which is cheaper to test. Releases the views. */
static PyObject *unsupported_indices(Views *all)
{
    PyObject *indices = NULL;
    for (Py_ssize_t i = 0; i < all->length; i++) {
        if (all->views[i].state != UNSUPPORTED)
            continue;
        PyObject *index = PyLong_FromSsize_t(i);
        if (!indices)
            indices = PyList_New(0);
        int failed = !index || !indices || PyList_Append(indices, index);
        Py_XDECREF(index);
        if (failed) {
            Py_XDECREF(indices);
            release_views(all);
            return NULL;
        }
    }
    release_views(all);
    return indices ? indices : Py_NewRef(Py_None);
}

/* Return the memory of a contiguous CPU tensor of at least `bytes` bytes; NULL with a Python error otherwise. */
static void *output(PyObject *tensor, size_t bytes)
{
    static char nothing; /* an empty tensor has no address, and that is no error */
    View view;
    if (exchange)
        view_tensor(tensor, 1, IN_ORDER, &view);
    if (!exchange || view.state != SUPPORTED || view.bytes < bytes) {
        PyErr_SetString(PyExc_ValueError, "the output must be a contiguous CPU tensor that is large enough");
        return NULL;
    }
    return view.numel ? (void *)view.data : &nothing;
}

#endif
