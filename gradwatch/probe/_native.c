/* Reads gradients and weights in place, one call per step, over the tensors' own memory. CPython's limited API, and no
 * header of torch: a tensor's address, shape and strides come through the C exchange table of DLPack that torch.Tensor
 * carries (__dlpack_c_exchange_api__, https://dmlc.github.io/dlpack/latest/python_spec.html).
 *
 * Every function takes tensors that may be anything and answers for those that are plain: on the CPU, dense, of a
 * floating dtype it knows. It returns the indices of the others, for torch operations to deal with. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_counts.h"
#include "_sums.h"
#include "_views.h"

static int has_arguments(Py_ssize_t given, Py_ssize_t expected)
{
    if (given != expected)
        PyErr_Format(PyExc_TypeError, "got %zd arguments, expected %zd", given, expected);
    return given == expected;
}

static void write_column(const View *view, double scale, float *row, Py_ssize_t stride)
{
    Totals totals;
    double n = (double)view->numel;
    if (view->state != PLAIN || !view->numel) {
        int empty = view->state == PLAIN;
        for (int s = 0; s < 6; s++)
            row[s * stride] = empty && (s < 2 || s == 5) ? 0.0f : (float)NAN;
        return;
    }
    totals_of(view->data, view->numel, view->kind, &totals);
    row[0] = (float)(sqrt(totals.squares) * scale);
    row[stride] = (float)(totals.absmax * scale);
    row[2 * stride] = (float)(totals.sum / n * scale);
    row[3 * stride] = (float)(sqrt(totals.deviations < 0 ? 0 : totals.deviations / n) * scale);
    row[4 * stride] = (float)((double)totals.zeros / n);
    row[5 * stride] = (float)totals.nonfinite;
}

PyDoc_STRVAR(statistics_doc,
             "statistics(tensors, gradients, out_SL, scale) -> list[int] | None\n\n"
             "Write the six statistics of each tensor, or of its gradient, into out_SL of shape (6, L), float32.");

static PyObject *statistics(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Views all;
    (void)self;
    if (!has_arguments(nargs, 4))
        return NULL;
    double scale = PyFloat_AsDouble(args[3]);
    if ((scale == -1 && PyErr_Occurred()) || gather(args[0], args[1] == Py_True, &all))
        return NULL;
    float *row = output(args[2], 6 * (size_t)all.length * sizeof(float));
    if (!row) {
        forget(&all);
        return NULL;
    }
    PyThreadState *saved = all.bytes > QUICK_BYTES ? PyEval_SaveThread() : NULL;
    for (Py_ssize_t i = 0; i < all.length; i++)
        write_column(&all.views[i], scale, row + i, all.length);
    if (saved)
        PyEval_RestoreThread(saved);
    return left_out(&all);
}

/* Copy weights to `kept`, or compare them with it. offsets[i] to offsets[i + 1] is the room of tensor i. */
static PyObject *keep_or_compare(PyObject *const *args, int compare)
{
    Views all;
    if (gather(args[0], 0, &all))
        return NULL;
    const int64_t *offsets = output(args[2], ((size_t)all.length + 1) * sizeof(int64_t));
    char *kept = offsets ? output(args[1], (size_t)offsets[all.length]) : NULL;
    float *row = compare && kept ? output(args[3], 2 * (size_t)all.length * sizeof(float)) : NULL;
    if (!kept || (compare && !row)) {
        forget(&all);
        return NULL;
    }
    PyThreadState *saved = all.bytes > QUICK_BYTES ? PyEval_SaveThread() : NULL;
    for (Py_ssize_t i = 0; i < all.length; i++) {
        View *view = &all.views[i];
        if (view->state != PLAIN || view->bytes > (size_t)(offsets[i + 1] - offsets[i])) {
            view->state = STRANGE;
            if (compare)
                row[i] = row[all.length + i] = (float)NAN;
        } else if (!compare) {
            memcpy(kept + offsets[i], view->data, view->bytes);
        } else {
            double weight, update;
            change_of(kept + offsets[i], view->data, view->numel, view->kind, &weight, &update);
            double ratio = sqrt(update / weight);
            row[i] = (float)sqrt(weight);
            row[all.length + i] = ratio <= FLT_MAX ? (float)ratio : (float)NAN;
        }
    }
    if (saved)
        PyEval_RestoreThread(saved);
    return left_out(&all);
}

PyDoc_STRVAR(keep_doc, "keep(tensors, kept, offsets) -> list[int] | None\n\n"
                       "Copy each tensor's bytes to kept[offsets[i]:]; offsets is int64 of length L + 1.");

static PyObject *keep(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    return has_arguments(nargs, 3) ? keep_or_compare(args, 0) : NULL;
}

PyDoc_STRVAR(changes_doc, "changes(tensors, kept, offsets, out_2L) -> list[int] | None\n\n"
                          "Write the norm of each kept tensor, and that of its change since divided by it.");

static PyObject *changes(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    return has_arguments(nargs, 4) ? keep_or_compare(args, 1) : NULL;
}

PyDoc_STRVAR(checksum_doc, "checksum(tensor) -> int | None\n\n"
                           "64-bit checksum of a contiguous CPU tensor of any dtype; None for any other tensor.");

static PyObject *checksum(PyObject *self, PyObject *tensor)
{
    View view;
    uint64_t sum;
    (void)self;
    if (!exchange) {
        PyErr_SetString(PyExc_TypeError, "bind() first");
        return NULL;
    }
    look_at(tensor, 1, 1, &view);
    if (view.state != PLAIN)
        return Py_NewRef(Py_None);
    PyThreadState *saved = view.bytes > QUICK_BYTES ? PyEval_SaveThread() : NULL;
    sum = checksum_of(view.data, view.bytes);
    if (saved)
        PyEval_RestoreThread(saved);
    return PyLong_FromUnsignedLongLong(sum);
}

PyDoc_STRVAR(histograms_doc, "histograms(tensors, gradients, out_LB) -> list[int] | None\n\n"
                             "Write how many values of each tensor fall into each of BINS bins; out_LB is int64.");

static PyObject *histograms(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Views all;
    (void)self;
    if (!has_arguments(nargs, 3) || gather(args[0], args[1] == Py_True, &all))
        return NULL;
    int64_t *counts = output(args[2], (size_t)all.length * BINS * sizeof(int64_t));
    if (!counts) {
        forget(&all);
        return NULL;
    }
    memset(counts, 0, (size_t)all.length * BINS * sizeof(int64_t));
    PyThreadState *saved = all.bytes > QUICK_BYTES ? PyEval_SaveThread() : NULL;
    for (Py_ssize_t i = 0; i < all.length; i++)
        if (all.views[i].state == PLAIN)
            histogram_of(all.views[i].data, all.views[i].numel, all.views[i].kind, counts + i * BINS);
    if (saved)
        PyEval_RestoreThread(saved);
    return left_out(&all);
}

PyDoc_STRVAR(bind_doc, "bind(tensor_type, parameter_type) -> None\n\n"
                       "Learn from torch.Tensor how to look at a tensor. Raises where this torch has no such table.");

static PyObject *bind(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (!has_arguments(nargs, 2))
        return NULL;
    PyObject *capsule = PyObject_GetAttrString(args[0], "__dlpack_c_exchange_api__");
    if (!capsule)
        return NULL;
    const ExchangeTable *table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api"); /* lives as long as torch */
    Py_DECREF(capsule);
    if (!table)
        return NULL;
    if (table->major != 1 || !table->borrow) {
        PyErr_Format(PyExc_RuntimeError, "DLPack %u.%u lends no tensors", table->major, table->minor);
        return NULL;
    }
    tensor_type = (PyTypeObject *)Py_NewRef(args[0]);
    parameter_type = (PyTypeObject *)Py_NewRef(args[1]);
    exchange = table;
    return Py_NewRef(Py_None);
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, name##_doc}

static PyMethodDef methods[] = {
    FAST(bind), FAST(statistics), FAST(keep), FAST(changes), FAST(histograms),
    {"checksum", checksum, METH_O, checksum_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "gradwatch.probe._native", "One-pass statistics of tensors in CPU memory.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    grad_name = PyUnicode_InternFromString("grad");
    return grad_name ? PyModule_Create(&definition) : NULL;
}
