/* Walks an optimizer's groups and state, and steps all of it at once or nothing of it. */
#ifndef GRADWATCH_OPTIMIZER_STATE_H
#define GRADWATCH_OPTIMIZER_STATE_H

#include <Python.h>

#include "kernels/steps.h"
#include "tensor_view.h"

/* Why nothing was done: the index of a parameter that is unsupported, or one of these. */
enum { STEPPED = -1, NO_STATE = -2, OTHER_PARAMS = -3, OTHER_MODE = -4, RAISED = -5 };

#define NAMES(X)                                                                                                        \
    X(params) X(lr) X(betas) X(eps) X(weight_decay) X(amsgrad) X(maximize) X(momentum) X(dampening) X(nesterov)         \
    X(capturable) X(differentiable) X(decoupled_weight_decay) X(exp_avg) X(exp_avg_sq) X(max_exp_avg_sq)                \
    X(momentum_buffer) X(step)
#define DECLARE(name) static PyObject *name_##name;
#define INTERN(name) && (name_##name = PyUnicode_InternFromString(#name))
NAMES(DECLARE)

static int intern_names(void)
{
    return 1 NAMES(INTERN);
}

/* All that a step holds on to while it runs. */
typedef struct {
    Rule rule;
    PyObject *params, *fresh;       /* in the order of the columns; whose state was just made */
    const char *moved;              /* which params have moved already, to be traced, a byte for each; or null */
    Py_ssize_t num_moved;
    const int32_t *columns;
    float *gradients, *changes;     /* rows, or null */
    PyObject **owners;              /* references, so that memory stays while the lock is let go */
    size_t num_owners, room;
    Settings *settings;
    float **counts;                 /* of the steps of each item, to be raised by one */
    Step step;
    Py_ssize_t walked;
    size_t bytes;                   /* of gradients */
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
    double decay = number_in(group, name_weight_decay);
    s->rule = rule;
    s->lr = number_in(group, name_lr);
    s->rate = (float)s->lr;
    s->sign = is_on(group, name_maximize) ? -1.0f : 1.0f;
    s->decay = (float)decay;
    s->keep = 1;
    s->is_coupled = decay != 0;
    if (rule == SGD) {
        s->momentum = (float)number_in(group, name_momentum);
        s->rest = (float)(1 - number_in(group, name_dampening));
        s->is_nesterov = is_on(group, name_nesterov);
    } else {
        PyObject *betas = PyDict_GetItemWithError(group, name_betas);
        PyObject *pair = betas ? PySequence_Tuple(betas) : NULL;
        if (!pair || PyTuple_Size(pair) != 2) {
            Py_XDECREF(pair);
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "betas must be two numbers");
            return -1;
        }
        s->beta1 = PyFloat_AsDouble(PyTuple_GetItem(pair, 0));
        s->beta2_exact = PyFloat_AsDouble(PyTuple_GetItem(pair, 1));
        Py_DECREF(pair);
        s->beta2 = (float)s->beta2_exact;
        s->rest2 = (float)(1 - s->beta2_exact);
        s->lerp = (float)(1 - s->beta1);
        s->eps = (float)number_in(group, name_eps);
        s->is_amsgrad = is_on(group, name_amsgrad);
        if (is_on(group, name_decoupled_weight_decay)) {
            s->is_coupled = 0;
            s->keep = decay != 0 ? (float)(1 - s->lr * decay) : 1;
        }
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Whether elements of equal index lie at equal places. Both are dense. */
static int is_alike(const DLTensor *a, const DLTensor *b)
{
    int are_strides_equal = !a->strides == !b->strides, is_empty = 0;
    if (a->ndim != b->ndim)
        return 0;
    for (int d = 0; d < a->ndim; d++) {
        if (a->shape[d] != b->shape[d])
            return 0;
        if (are_strides_equal && a->strides && a->shape[d] != 1)
            are_strides_equal = a->strides[d] == b->strides[d];
        is_empty |= a->shape[d] == 0;
    }
    return are_strides_equal || is_empty;
}

static float nothing; /* an empty tensor has no address, and that is no reason */

/* The floats of a tensor that lies like `like`, kept alive; NULL where it does not, or is no supported float32 tensor. */
static float *floats_of(Walk *walk, PyObject *tensor, const DLTensor *like)
{
    DLTensor t;
    View view;
    view_and_describe(tensor, 0, IN_ANY_ORDER, &view, &t);
    if (view.state != SUPPORTED || view.kind != F32 || (like && !is_alike(&t, like)))
        return NULL;
    walk->owners[walk->num_owners++] = Py_NewRef(tensor);
    return view.numel ? (float *)view.data : &nothing;
}

static float *state_floats(Walk *walk, PyObject *state, PyObject *name, const DLTensor *like)
{
    PyObject *tensor = PyDict_GetItemWithError(state, name);
    return tensor ? floats_of(walk, tensor, like) : NULL;
}

/* Find the moments of an item. Returns whether they are all there and supported. */
static int find_moments(Walk *walk, Item *item, PyObject *state, PyObject *param, const DLTensor *like)
{
    const Settings *s = item->settings;
    size_t i = (size_t)(item - walk->step.items);
    walk->counts[i] = NULL;
    if (s->rule == SGD) {
        item->is_fresh = walk->fresh != Py_None && PySet_Contains(walk->fresh, param) == 1;
        return (item->first = state_floats(walk, state, name_momentum_buffer, like)) != NULL;
    }
    item->first = state_floats(walk, state, name_exp_avg, like);
    item->second = state_floats(walk, state, name_exp_avg_sq, like);
    item->largest = s->is_amsgrad ? state_floats(walk, state, name_max_exp_avg_sq, like) : NULL;
    walk->counts[i] = state_floats(walk, state, name_step, NULL);
    item->count = walk->counts[i] ? (double)*walk->counts[i] + !walk->moved : 0;
    set_pace(item);
    return item->first && item->second && walk->counts[i] && (item->largest || !s->is_amsgrad);
}

static void place(const Walk *walk, Item *item)
{
    int32_t column = walk->columns ? walk->columns[walk->walked] : -1;
    item->column = walk->gradients && column >= 0 ? walk->gradients + column : NULL;
    item->change = walk->changes && column >= 0 ? walk->changes + column : NULL;
}

/* Whether a state holds nothing yet of what the rule needs. */
static int is_new(PyObject *state, Rule rule)
{
    if (!state || PyDict_Size(state) == 0)
        return 1;
    PyObject *buffer = rule == SGD ? PyDict_GetItemWithError(state, name_momentum_buffer) : state;
    return !buffer || buffer == Py_None;
}

/* Make the next item of a parameter. */
static Py_ssize_t visit(Walk *walk, PyObject *param, const Settings *settings, PyObject *states)
{
    DLTensor t;
    View view;
    if (walk->columns && (walk->walked >= PyTuple_Size(walk->params)
                          || PyTuple_GetItem(walk->params, walk->walked) != param))
        return OTHER_PARAMS;
    if (walk->moved && walk->walked >= walk->num_moved)
        return OTHER_PARAMS;
    PyObject *grad = walk->moved ? Py_NewRef(Py_None) : PyObject_GetAttr(param, grad_name);
    if (!grad)
        return RAISED;
    Item *item = &walk->step.items[walk->step.length];
    memset(item, 0, sizeof *item);
    walk->counts[walk->step.length++] = NULL;
    item->param = param; /* its list has it */
    item->settings = settings;
    place(walk, item);
    view_and_describe(param, 0, IN_ANY_ORDER, &view, &t);
    if (view.state == SUPPORTED && view.kind == F32) {
        item->weight = view.numel ? (float *)view.data : &nothing;
        item->numel = view.numel;
        walk->owners[walk->num_owners++] = Py_NewRef(param);
        item->grad = grad == Py_None ? NULL : floats_of(walk, grad, &t);
    }
    int is_moving = walk->moved ? walk->moved[walk->walked] : grad != Py_None;
    Py_DECREF(grad);
    if (!is_moving)
        return STEPPED;
    if (!item->weight || (!item->grad && !walk->moved))
        return walk->walked;
    walk->bytes += view.bytes;
    if (walk->step.is_skipped || (settings->rule == SGD && settings->momentum == 0))
        return STEPPED;
    PyObject *state = PyDict_GetItemWithError(states, param);
    if (is_new(state, settings->rule))
        return PyErr_Occurred() ? RAISED : NO_STATE;
    return find_moments(walk, item, state, param, &t) ? STEPPED : walk->walked;
}

/* Make the items of all groups. Nothing has moved when this returns, whatever it returns. */
static Py_ssize_t visit_all(Walk *walk, PyObject *groups, PyObject *states)
{
    Py_ssize_t outcome = STEPPED, found;
    for (Py_ssize_t i = 0; i < PyList_Size(groups); i++) {
        PyObject *group = PyList_GetItem(groups, i);
        PyObject *params = PyDict_GetItemWithError(group, name_params);
        if (!params || read_settings(group, &walk->settings[i], walk->rule))
            return RAISED;
        if (is_on(group, name_capturable) || is_on(group, name_differentiable))
            return OTHER_MODE;
        for (Py_ssize_t j = 0; j < PyList_Size(params); j++, walk->walked++) {
            if (walk->step.length == walk->room)
                return OTHER_PARAMS; /* a hook of somebody's changed the groups meanwhile */
            found = visit(walk, PyList_GetItem(params, j), &walk->settings[i], states);
            if (found == NO_STATE)
                outcome = NO_STATE; /* unless something worse comes */
            else if (found != STEPPED)
                return found;
        }
    }
    return walk->columns && walk->walked != PyTuple_Size(walk->params) ? OTHER_PARAMS : outcome;
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

enum { MAX_OWNERS = 6 }; /* of one parameter: itself, its gradient, three moments, its steps */

static int begin_walk(Walk *walk, PyObject *groups)
{
    Py_ssize_t length = count_params(groups);
    if (length < 0)
        return -1;
    walk->room = (size_t)length;
    walk->step.items = PyMem_Malloc((walk->room + 1) * sizeof(Item));
    walk->counts = PyMem_Malloc((walk->room + 1) * sizeof(float *));
    walk->owners = PyMem_Malloc((walk->room + 1) * MAX_OWNERS * sizeof(PyObject *));
    walk->settings = PyMem_Malloc(((size_t)PyList_Size(groups) + 1) * sizeof(Settings));
    if (walk->step.items && walk->counts && walk->owners && walk->settings)
        return 0;
    PyErr_NoMemory();
    return -1;
}

static void end_walk(Walk *walk)
{
    for (size_t i = 0; i < walk->num_owners; i++)
        Py_DECREF(walk->owners[i]);
    PyMem_Free(walk->step.items);
    PyMem_Free(walk->counts);
    PyMem_Free(walk->owners);
    PyMem_Free(walk->settings);
}

#endif
