/* Read gradients and weights in place, one call per step. The extension uses CPython's limited API, and no header of
 * torch. The address, shape and strides of a tensor come from the C exchange table of DLPack that torch.Tensor has
 * (__dlpack_c_exchange_api__, https://dmlc.github.io/dlpack/latest/python_spec.html). With torch before 2.10 they come
 * from attributes of the tensor.
 *
 * Every function accepts any tensors and reads the supported ones: on the CPU, dense, of a known floating dtype. It
 * returns the indices of the others, which torch operations then read. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "activations.h"
#include "batch_hash.h"
#include "statistics.h"
#include "fast_path.h"
#include "optimizer_state.h"
#include "tensor_attributes.h"

/* Increase this with each change of a function or its arguments: `probe/device/backend.py` accepts no other revision. */
#define REVISION 14

/* Memory for the histograms of `length` tensors, all zero; NULL with a Python error if the memory is too small. */
static int64_t *empty_counts(PyObject *tensor, Py_ssize_t length)
{
    size_t bytes = (size_t)length * BINS * sizeof(int64_t);
    int64_t *counts = output(tensor, bytes);
    return counts ? memset(counts, 0, bytes) : NULL;
}

PyDoc_STRVAR(statistics_doc,
             "statistics(tensors, gradients, out_SL, scale, out_KB, first, last, threads) -> list[int] | None\n\n"
             "Write the six statistics of each tensor, or of its gradient, into out_SL of shape (6, L), float32; where\n"
             "out_KB is not None, what histograms() writes there for tensors[first:last], from the same read.");

static PyObject *statistics(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Views all;
    (void)self;
    if (!has_arguments(nargs, 8))
        return NULL;
    double scale = PyFloat_AsDouble(args[3]);
    HistogramRange counted = {NULL, PyLong_AsSsize_t(args[5]), PyLong_AsSsize_t(args[6])};
    int threads = (int)PyLong_AsLong(args[7]);
    if (PyErr_Occurred() || view_tensors(args[0], args[1] == Py_True, &all))
        return NULL;
    float *row = output(args[2], 6 * (size_t)all.length * sizeof(float));
    if (row && args[4] != Py_None)
        counted.out = empty_counts(args[4], counted.first < counted.last ? counted.last - counted.first : 0);
    if (!row || (args[4] != Py_None && !counted.out)) {
        release_views(&all);
        return NULL;
    }
    write_columns(&all, scale, row, counted, threads);
    return unsupported_indices(&all);
}

/* Copy weights to `kept`, or compare them with `kept`. Tensor i has the bytes from offsets[i] to offsets[i + 1]. */
static PyObject *keep_or_compare(PyObject *const *args, int compare)
{
    Views all;
    if (view_tensors(args[0], 0, &all))
        return NULL;
    const int64_t *offsets = output(args[2], ((size_t)all.length + 1) * sizeof(int64_t));
    char *kept = offsets ? output(args[1], (size_t)offsets[all.length]) : NULL;
    float *row = compare && kept ? output(args[3], 2 * (size_t)all.length * sizeof(float)) : NULL;
    if (!kept || (compare && !row)) {
        release_views(&all);
        return NULL;
    }
    /* the views own references, so the memory stays without the lock */
    PyThreadState *saved = all.bytes > LOCKED_BYTES ? PyEval_SaveThread() : NULL;
    for (Py_ssize_t i = 0; i < all.length; i++) {
        View *view = &all.views[i];
        /* a tensor may have grown since its memory was allocated */
        if (view->state != SUPPORTED || view->bytes > (size_t)(offsets[i + 1] - offsets[i])) {
            view->state = UNSUPPORTED;
            if (compare)
                row[i] = row[all.length + i] = (float)NAN;
        } else if (!compare) {
            if (view->bytes) /* an empty tensor has no address */
                memcpy(kept + offsets[i], view->data, view->bytes);
        } else {
            double weight, update;
            change_of(kept + offsets[i], view->data, view->numel, view->kind, &weight, &update);
            write_change(weight, update, row + i, (size_t)all.length);
        }
    }
    if (saved)
        PyEval_RestoreThread(saved);
    return unsupported_indices(&all);
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
    view_tensor(tensor, 1, IN_ORDER, &view);
    if (view.state != SUPPORTED)
        return Py_NewRef(Py_None);
    PyThreadState *saved = view.bytes > LOCKED_BYTES ? PyEval_SaveThread() : NULL;
    sum = checksum_of(view.data, view.bytes);
    if (saved)
        PyEval_RestoreThread(saved);
    return PyLong_FromUnsignedLongLong(sum);
}

PyDoc_STRVAR(batch_hash_doc, "batch_hash(batch) -> int | None\n\n"
                             "Hash of a tensor, or of a nest of lists, tuples and dictionaries of tensors, text and\n"
                             "numbers; None for what takes a closer look.");

static PyObject *batch_hash(PyObject *self, PyObject *object)
{
    Batch batch;
    (void)self;
    if (!exchange || !read_batch(object, &batch))
        return Py_NewRef(Py_None);
    return PyLong_FromUnsignedLongLong(batch.hash);
}

PyDoc_STRVAR(histograms_doc, "histograms(tensors, gradients, out_LB, threads) -> list[int] | None\n\n"
                             "Write how many values of each tensor fall into each of BINS bins; out_LB is int64.");

static PyObject *histograms(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Views all;
    (void)self;
    if (!has_arguments(nargs, 4))
        return NULL;
    int threads = (int)PyLong_AsLong(args[3]);
    if (PyErr_Occurred() || view_tensors(args[0], args[1] == Py_True, &all))
        return NULL;
    int64_t *counts = empty_counts(args[2], all.length);
    if (!counts) {
        release_views(&all);
        return NULL;
    }
    count_columns(&all, counts, threads);
    return unsupported_indices(&all);
}

/* One output, the ranges to compare with, and the memory for the results. */
typedef struct {
    Output out;
    const float *ranges;
    double *totals;
    uint8_t *dead; /* bits */
    int is_supported, is_first;
    uint64_t num_dead;
} ActivationCall;

/* Parse the arguments of one call. Returns 0, or -1 with a Python error. */
static int parse_call(PyObject *given_norm, PyObject *totals_A4, ActivationCall *call)
{
    PyObject *tensor, *ranges, *dead;
    Py_ssize_t most, row;
    int are_channels_first;
    DLTensor seen;
    if (!PyArg_ParseTuple(given_norm, "OpnOOpn", &tensor, &are_channels_first, &most, &ranges, &dead, &call->is_first, &row))
        return -1;
    call->is_supported = Py_TYPE(tensor) == tensor_type && !exchange->borrow(tensor, &seen) && seen.device_type == DL_CPU
                     && kind_of(&seen) == F32 && lay_out(&seen, are_channels_first, most, &call->out);
    PyErr_Clear(); /* a tensor that cannot be borrowed is only unsupported */
    if (!call->is_supported)
        return 0;
    /* a negative row asks for more bytes than any tensor has, which is an error */
    double *totals = output(totals_A4, row < 0 ? SIZE_MAX : ((size_t)row + 1) * 4 * sizeof(double));
    call->totals = totals ? totals + 4 * row : NULL;
    call->ranges = totals ? output(ranges, 4 * sizeof(float)) : NULL;
    call->dead = call->ranges && dead != Py_None ? output(dead, (call->out.units + 7) / 8) : NULL;
    return PyErr_Occurred() ? -1 : 0;
}

/* Measure one output. `flags` has one byte for each unit. */
static void measure(ActivationCall *call, uint8_t *flags)
{
    const float *ranges = call->ranges;
    Moments moments = {0, 0, 0, 0};
    add_pieces(&call->out, ranges[2], ranges[3], &moments);
    call->totals[0] += moments.n;
    call->totals[1] += moments.sum;
    call->totals[2] += moments.squares;
    call->totals[3] += moments.flat;
    call->num_dead = 0;
    if (!call->dead)
        return;
    if (call->is_first) /* the bits are not set yet: each unit is dead until it leaves the range */
        memset(flags, 1, call->out.units);
    else
        unpack(call->dead, call->out.units, flags);
    keep_dead(&call->out, ranges[0], ranges[1], flags);
    call->num_dead = pack(flags, call->out.units, call->dead);
}

/* Measure the supported outputs. */
static PyObject *measure_calls(ActivationCall *calls, Py_ssize_t length)
{
    size_t bytes = 0, most_units = 1;
    for (Py_ssize_t i = 0; i < length; i++)
        if (calls[i].is_supported) {
            const Output *out = &calls[i].out;
            bytes += out->outer * out->units * out->inner * sizeof(float);
            most_units = calls[i].dead && out->units > most_units ? out->units : most_units;
        }
    uint8_t *flags = PyMem_Malloc(most_units); /* before the lock is released, which PyMem_Malloc needs */
    if (!flags)
        return PyErr_NoMemory();
    PyThreadState *saved = bytes > LOCKED_BYTES ? PyEval_SaveThread() : NULL;
    for (Py_ssize_t i = 0; i < length; i++)
        if (calls[i].is_supported)
            measure(&calls[i], flags);
    if (saved)
        PyEval_RestoreThread(saved);
    PyMem_Free(flags);
    PyObject *counts = PyList_New(length);
    for (Py_ssize_t i = 0; counts && i < length; i++) {
        PyObject *count = calls[i].is_supported ? PyLong_FromUnsignedLongLong(calls[i].num_dead) : Py_NewRef(Py_None);
        if (!count || PyList_SetItem(counts, i, count))
            Py_CLEAR(counts);
    }
    return counts;
}

PyDoc_STRVAR(activations_doc,
             "activations(calls, totals_A4) -> list[int | None]\n\n"
             "Measure the leading samples of outputs. A call is a tuple of the output, whether its units are dimension 1\n"
             "rather than the last, how many values to read at most, its ranges_4, its dead units, whether all count as\n"
             "dead so far, and its row of totals_A4, float64. To that row, add the number of values, their sum, sum of\n"
             "squares, and number outside of the last two of ranges_4. Where the dead ones, a bit for each unit, are not\n"
             "None, clear those that leave the first two of ranges_4. Returns how many units of each are dead; None where\n"
             "an output is unsupported.");

static PyObject *activations(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (!has_arguments(nargs, 2))
        return NULL;
    if (!exchange || !PyTuple_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "bind() first, then pass a tuple of calls");
        return NULL;
    }
    Py_ssize_t length = PyTuple_Size(args[0]);
    ActivationCall *calls = PyMem_Malloc((size_t)(length ? length : 1) * sizeof(ActivationCall));
    if (!calls)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < length; i++)
        if (parse_call(PyTuple_GetItem(args[0], i), args[1], &calls[i])) {
            PyMem_Free(calls);
            return NULL;
        }
    PyObject *counts = measure_calls(calls, length);
    PyMem_Free(calls);
    return counts;
}

PyDoc_STRVAR(bind_doc, "bind(tensor_type, parameter_type) -> None\n\n"
                       "Learn from torch.Tensor how to look at a tensor. Raises where this torch offers no way.");

static PyObject *bind(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (!has_arguments(nargs, 2))
        return NULL;
    PyObject *capsule = PyObject_GetAttrString(args[0], "__dlpack_c_exchange_api__");
    if (!capsule)
        PyErr_Clear(); /* torch before 2.10 */
    const ExchangeTable *table = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") /* lives as long as torch */
                                         : attribute_table(args[0]);
    Py_XDECREF(capsule);
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
    FAST(bind), FAST(statistics), FAST(keep), FAST(changes), FAST(histograms), FAST(traces), FAST(activations),
    {"checksum", checksum, METH_O, checksum_doc},
    {"batch_hash", batch_hash, METH_O, batch_hash_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "gradwatch._native", "One-pass statistics of tensors in CPU memory.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    grad_name = PyUnicode_InternFromString("grad");
    PyObject *module = grad_name && intern_names() && intern_fast_path_names() ? PyModule_Create(&definition) : NULL;
    PyObject *fast_path = module ? PyType_FromSpec(&fast_path_spec) : NULL;
    if (!fast_path || PyModule_AddObjectRef(module, "FastPath", fast_path)
        || PyModule_AddIntConstant(module, "REVISION", REVISION))
        Py_CLEAR(module);
    Py_XDECREF(fast_path);
    return module;
}
