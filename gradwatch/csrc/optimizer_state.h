/* Read groups and state of one of torch's optimizers, and trace its last step. */
#ifndef GRADWATCH_OPTIMIZER_STATE_H
#define GRADWATCH_OPTIMIZER_STATE_H

#include <Python.h>

#include "kernels/traces.h"
#include "tensor_view.h"
#include "threads.h"

/* Outcome of a trace: one of these, or the index of an unsupported parameter. Only TRACED has written anything. */
enum { TRACED = -1, OTHER_PARAMS = -3, RAISED = -5 };

#define NAMES(X)                                                                                                        \
    X(params) X(lr) X(betas) X(eps) X(weight_decay) X(amsgrad) X(decoupled_weight_decay) X(exp_avg) X(exp_avg_sq)       \
    X(max_exp_avg_sq) X(momentum_buffer) X(step)
#define DECLARE(name) static PyObject *name_##name;
#define INTERN(name) && (name_##name = PyUnicode_InternFromString(#name))
NAMES(DECLARE)

static int intern_names(void)
{
    return 1 NAMES(INTERN);
}

/* The data of a running trace. */
typedef struct {
    Rule rule;
    PyObject *params;           /* in the order of the columns */
    const int32_t *columns;
    const char *moved;          /* a byte for each of params: whether it has moved */
    Py_ssize_t num_moved;
    float *changes;             /* two rows */
    size_t stride;              /* of the rows, in floats */
    PyObject **owners;          /* references, which keep memory alive while the lock is released */
    size_t num_owners, room, length;
    Settings *settings;
    Item *items;
    size_t bytes;               /* of the weights that moved */
} Walk;

static double number_in(PyObject *group, PyObject *name)
{
    PyObject *value = PyDict_GetItemWithError(group, name);
    if (!value && !PyErr_Occurred())
        PyErr_Format(PyExc_KeyError, "%U", name);
    return value ? PyFloat_AsDouble(value) : -1;
}

static int is_on(PyObject *group, PyObject *name)
{
    PyObject *value = PyDict_GetItemWithError(group, name);
    return value ? PyObject_IsTrue(value) : 0;
}

static int read_settings(PyObject *group, Settings *s, Rule rule)
{
    memset(s, 0, sizeof *s);
    s->rule = rule;
    s->lr = number_in(group, name_lr);
    s->rate = (float)s->lr; /* SGD multiplies in float, Adam divides in double first */
    if (rule == ADAM) {
        PyObject *betas = PyDict_GetItemWithError(group, name_betas);
        PyObject *pair = betas ? PySequence_Tuple(betas) : NULL; /* a config may give a list */
        if (!pair || PyTuple_Size(pair) != 2) {
            Py_XDECREF(pair);
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "betas must be two numbers");
            return -1;
        }
        s->beta1 = PyFloat_AsDouble(PyTuple_GetItem(pair, 0));
        s->beta2 = PyFloat_AsDouble(PyTuple_GetItem(pair, 1));
        Py_DECREF(pair);
        s->eps = (float)number_in(group, name_eps);
        s->is_amsgrad = is_on(group, name_amsgrad);
        double decay = number_in(group, name_weight_decay);
        s->keep = is_on(group, name_decoupled_weight_decay) && decay != 0 ? (float)(1 - s->lr * decay) : 1;
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Return whether elements of equal index have equal offsets. Both tensors are dense. */
static int is_alike(const DLTensor *a, const DLTensor *b)
{
    int are_strides_equal = !a->strides == !b->strides, is_empty = 0;
    if (a->ndim != b->ndim)
        return 0;
    for (int d = 0; d < a->ndim; d++) {
        if (a->shape[d] != b->shape[d])
            return 0;
        if (are_strides_equal && a->strides && a->shape[d] != 1) /* the stride of a single element may be anything */
            are_strides_equal = a->strides[d] == b->strides[d];
        is_empty |= a->shape[d] == 0;
    }
    return are_strides_equal || is_empty;
}

static const float nothing = 0; /* an empty tensor has no address, and that is no reason */

/* Return the floats of a state tensor with the layout of `like`, and keep the tensor alive. Returns NULL if the tensor is
 * missing, has another layout, or is not a supported float32 tensor. */
static const float *floats_of(Walk *walk, PyObject *state, PyObject *name, const DLTensor *like)
{
    DLTensor t;
    View view;
    PyObject *tensor = PyDict_GetItemWithError(state, name);
    if (!tensor)
        return NULL;
    view_and_describe(tensor, 0, IN_ANY_ORDER, &view, &t);
    if (view.state != SUPPORTED || view.kind != F32 || (like && !is_alike(&t, like)))
        return NULL;
    walk->owners[walk->num_owners++] = Py_NewRef(tensor);
    return view.numel ? (const float *)view.data : &nothing;
}

/* Find the moments of an item. Returns whether all of them exist and are supported. */
static int find_moments(Walk *walk, Item *item, PyObject *state, const DLTensor *like)
{
    const Settings *s = item->settings;
    if (s->rule == SGD)
        return (item->first = floats_of(walk, state, name_momentum_buffer, like)) != NULL;
    const float *count = floats_of(walk, state, name_step, NULL);
    item->first = floats_of(walk, state, name_exp_avg, like);
    item->second = floats_of(walk, state, s->is_amsgrad ? name_max_exp_avg_sq : name_exp_avg_sq, like);
    if (count)
        set_pace(item, (double)*count);
    return count && item->first && item->second;
}

/* Make the next item of a parameter. */
static Py_ssize_t visit(Walk *walk, PyObject *param, const Settings *settings, PyObject *states)
{
    DLTensor t;
    View view;
    Py_ssize_t index = (Py_ssize_t)walk->length;
    /* the groups may have changed since Python made params and columns */
    if (walk->length == walk->room || index >= walk->num_moved || index >= PyTuple_Size(walk->params)
        || PyTuple_GetItem(walk->params, index) != param)
        return OTHER_PARAMS;
    Item *item = &walk->items[walk->length++];
    memset(item, 0, sizeof *item);
    item->settings = settings;
    if (walk->columns[index] >= 0)
        item->change = walk->changes + walk->columns[index];
    view_and_describe(param, 0, IN_ANY_ORDER, &view, &t);
    if (view.state == SUPPORTED && view.kind == F32) {
        item->weight = view.numel ? (const float *)view.data : &nothing;
        item->numel = view.numel;
        walk->owners[walk->num_owners++] = Py_NewRef(param);
    }
    if (!walk->moved[index]) /* needs no moments: only its weight is read */
        return TRACED;
    walk->bytes += view.bytes;
    PyObject *state = PyDict_GetItemWithError(states, param);
    if (!item->weight || !state || !PyDict_Check(state) || !find_moments(walk, item, state, &t))
        return index;
    return TRACED;
}

/* Make the items of all groups. This writes no result, whatever it returns. */
static Py_ssize_t visit_all(Walk *walk, PyObject *groups, PyObject *states)
{
    for (Py_ssize_t i = 0; i < PyList_Size(groups); i++) {
        PyObject *group = PyList_GetItem(groups, i);
        PyObject *params = PyDict_GetItemWithError(group, name_params);
        if (!params || read_settings(group, &walk->settings[i], walk->rule))
            return RAISED;
        for (Py_ssize_t j = 0; j < PyList_Size(params); j++) {
            Py_ssize_t outcome = visit(walk, PyList_GetItem(params, j), &walk->settings[i], states);
            if (outcome != TRACED)
                return outcome;
        }
    }
    return (Py_ssize_t)walk->length == PyTuple_Size(walk->params) ? TRACED : OTHER_PARAMS;
}

static Py_ssize_t count_params(PyObject *groups)
{
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < PyList_Size(groups); i++) {
        PyObject *params = PyDict_GetItemWithError(PyList_GetItem(groups, i), name_params);
        if (!params || !PyList_Check(params)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError, "a group's params must be a list");
            return -1;
        }
        count += PyList_Size(params);
    }
    return count;
}

enum { MAX_OWNERS = 4 }; /* for one parameter: itself, two moments, its steps */

static int begin_walk(Walk *walk, PyObject *groups)
{
    Py_ssize_t length = count_params(groups);
    if (length < 0)
        return -1;
    walk->room = (size_t)length;
    /* on failure, `end_walk` frees the allocated arrays */
    walk->items = PyMem_Malloc((walk->room + 1) * sizeof(Item));
    walk->owners = PyMem_Malloc((walk->room + 1) * MAX_OWNERS * sizeof(PyObject *));
    walk->settings = PyMem_Malloc(((size_t)PyList_Size(groups) + 1) * sizeof(Settings));
    if (walk->items && walk->owners && walk->settings)
        return 0;
    PyErr_NoMemory();
    return -1;
}

static void end_walk(Walk *walk)
{
    for (size_t i = 0; i < walk->num_owners; i++)
        Py_DECREF(walk->owners[i]);
    PyMem_Free(walk->items);
    PyMem_Free(walk->owners);
    PyMem_Free(walk->settings);
}

typedef struct {
    const Walk *walk;
    Tracer tracer;
} Traces;

static void trace_one(void *of, size_t index)
{
    const Traces *traces = of;
    traces->tracer(&traces->walk->items[index], traces->walk->stride);
}

static void trace_all(const Walk *walk, int threads)
{
    Traces traces = {walk, best_trace()};
    PyThreadState *saved = walk->bytes > LOCKED_BYTES ? PyEval_SaveThread() : NULL;
    WorkItem *items = work_items_for(walk->length, walk->bytes, threads);
    for (size_t i = 0; items && i < walk->length; i++)
        items[i] = (WorkItem){walk->items[i].numel, i};
    do_all(trace_one, &traces, items, walk->length, threads);
    if (saved)
        PyEval_RestoreThread(saved);
}

/* Read the arguments of `traces`, except for the groups, the state and the threads. Returns 0, or -1 with an error. */
static int take_arguments(Walk *walk, PyObject *const *args)
{
    DLTensor seen;
    View view;
    if (!exchange || !PyList_Check(args[1]) || !PyDict_Check(args[2]) || !PyTuple_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError, "bind() first, then pass groups, state and params as list, dict and tuple");
        return -1;
    }
    walk->rule = PyLong_AsLong(args[0]) == 1 ? ADAM : SGD;
    walk->params = args[4];
    if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[3], (char **)&walk->moved, &walk->num_moved))
        return -1;
    walk->columns = output(args[5], (size_t)PyTuple_Size(args[4]) * sizeof(int32_t));
    view_and_describe(args[6], 1, IN_ORDER, &view, &seen);
    walk->stride = view.state == SUPPORTED && seen.ndim == 2 ? (size_t)seen.shape[1] : 0;
    walk->changes = walk->columns ? output(args[6], 2 * walk->stride * sizeof(float)) : NULL;
    return walk->changes ? 0 : -1;
}

PyDoc_STRVAR(traces_doc,
             "traces(rule, groups, state, moved, params, columns, changes_2L, threads) -> int\n\n"
             "Write into columns[i] what the last step of a stock optimizer has done to params[i]: the norm of its weight\n"
             "before it, and that of the update divided by it. rule 0 is SGD with momentum and without Nesterov's, 1 is\n"
             "Adam. moved is bytes, 1 for each of params that had a gradient; columns is int32, -1 for none. Returns -1; or,\n"
             "if nothing was written, the index of a parameter that is unsupported or without its moments, or -3 where the\n"
             "groups hold other params.");

static PyObject *traces(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Walk walk;
    (void)self;
    memset(&walk, 0, sizeof walk);
    if (!has_arguments(nargs, 8) || take_arguments(&walk, args))
        return NULL;
    int threads = (int)PyLong_AsLong(args[7]);
    Py_ssize_t outcome = PyErr_Occurred() || begin_walk(&walk, args[1]) ? RAISED : visit_all(&walk, args[1], args[2]);
    if (outcome == TRACED && !PyErr_Occurred())
        trace_all(&walk, threads);
    PyObject *answer = PyErr_Occurred() ? NULL : PyLong_FromSsize_t(outcome);
    end_walk(&walk);
    return answer;
}

#endif
