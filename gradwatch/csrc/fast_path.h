/* Records plain steps, at which nothing is to be said but their numbers, with no Python in between: it is the hooks of
 * an optimizer, or what a loop calls before an update, and what one calls after it. What is not plain it leaves alone,
 * for Python to deal with. */
#ifndef GRADWATCH_PLAIN_H
#define GRADWATCH_PLAIN_H

#include <structmember.h>

#include "batch_hash.h"
#include "statistics.h"

enum { GRADIENTS = 6, LINEAR = 4, STATISTICS = 8, NONFINITE = 5 }; /* the first LINEAR grow with the gradient */

/* Where the numbers of a step stand in the row of the run, in the order of `Plain.columns`; the rates come last. */
enum { LOSS, HASH, BEFORE_CLIP, AFTER_CLIP, SCALE, SKIPPED, STEP_MS, SAMPLES, MEMORY, WATCH_MS, RATES, PLACES };

/* OFF: Python does all. The others in turn: an update is waited for; a watched optimizer makes it; it is read. */
typedef enum { OFF, WAITING, UPDATING, READ } Phase;

typedef struct {
    PyObject_HEAD
    PyObject *params;         /* tuple of tensors */
    PyObject *before, *after; /* the hooks of the long way */
    PyObject *clock;          /* time.perf_counter */
    PyObject *own;            /* where a watched optimizer writes, of shape (6, L), or None */
    PyObject *found;          /* list of findings, or None */
    PyObject *glance;         /* what says whether a step has nothing to look at, or None */
    PyObject *block;          /* tuple of the tensors that the rows of a block lie in */
    PyObject *names;          /* dict of where statistics stand that a loop may hand over */
    int64_t *steps;
    double *runs, *walls;
    float *rows, *own_row;
    Py_ssize_t places[PLACES], width, length, num_groups;
    Py_ssize_t capacity, filled; /* rows of the block */
    Py_ssize_t step, until, num_found;
    double memory, deadline;
    double began, ended, recorded; /* by the clock: the update, the last call and the last row */
    double spent_s, carried_s;     /* in hooks since the last row; elsewhere, to be charged to the next */
    double fastest_s, norm;
    double rounding; /* part of a norm that a larger one must exceed for gradients to have been clipped */
    int phase, threads;
} Plain;

static PyObject *grad_scale_name, *found_inf_name, *groups_name, *rate_name, *dict_name;

static int intern_plain_names(void)
{
    return (grad_scale_name = PyUnicode_InternFromString("grad_scale"))
        && (found_inf_name = PyUnicode_InternFromString("found_inf"))
        && (groups_name = PyUnicode_InternFromString("param_groups")) && (rate_name = PyUnicode_InternFromString("lr"))
        && (dict_name = PyUnicode_InternFromString("__dict__"));
}

/* What the clock says, or -1 with a Python error. */
static double now_by(PyObject *clock)
{
    PyObject *now = PyObject_CallNoArgs(clock);
    double seconds = now ? PyFloat_AsDouble(now) : -1;
    Py_XDECREF(now);
    return seconds;
}

static double *run_of(Plain *self)
{
    return self->runs + self->filled * self->width;
}

static float *row_under_way(Plain *self)
{
    return self->rows + self->filled * STATISTICS * self->length;
}

/* Whether something stands under a name that is not None. */
static int holds(PyObject *dict, PyObject *name)
{
    PyObject *value = PyDict_GetItemWithError(dict, name);
    return value && value != Py_None;
}

/* Write the learning rates down; false where one is no number, or groups have come or gone. */
static int read_rates(Plain *self, PyObject *attributes)
{
    PyObject *groups = PyDict_GetItemWithError(attributes, groups_name);
    double *rates = run_of(self) + self->places[RATES];
    if (!groups || !PyList_CheckExact(groups) || PyList_Size(groups) != self->num_groups)
        return 0;
    for (Py_ssize_t i = 0; i < self->num_groups; i++) {
        PyObject *group = PyList_GetItem(groups, i);
        PyObject *rate = PyDict_Check(group) ? PyDict_GetItemWithError(group, rate_name) : NULL;
        if (!rate || !PyFloat_CheckExact(rate))
            return 0;
        rates[i] = PyFloat_AsDouble(rate);
    }
    return 1;
}

/* Whether an update is plain as far as its optimizer tells: no closure, nothing of a GradScaler, rates that are numbers. */
static int is_plain_update(Plain *self, PyObject *optimizer, PyObject *args, PyObject *kwargs)
{
    if (!PyTuple_CheckExact(args) || PyTuple_Size(args) != 1 || !PyDict_CheckExact(kwargs) || PyDict_Size(kwargs))
        return 0;
    PyObject *attributes = PyObject_GetAttr(optimizer, dict_name);
    int is_plain = attributes && PyDict_CheckExact(attributes) && !holds(attributes, grad_scale_name)
        && !holds(attributes, found_inf_name) && read_rates(self, attributes);
    Py_XDECREF(attributes);
    return is_plain;
}

/* The total norm of a row of statistics; columns without gradient are left out. It has the same bits as `total_norm` of
 * `part.py`, since steps are clipped by either: squares of floats are exact in double, and what their sum loses is kept
 * (Knuth, The Art of Computer Programming, volume 2, 4.2.2, theorem B). */
static double total_norm(const float *row, Py_ssize_t length)
{
    const float *nonfinite = row + NONFINITE * length;
    double sum = 0, lost = 0;
    for (Py_ssize_t i = 0; i < length; i++) {
        if (nonfinite[i] != nonfinite[i])
            continue;
        double square = (double)row[i] * (double)row[i], before = sum;
        sum += square;
        double added = sum - before;
        lost += (before - (sum - added)) + (square - added);
    }
    return sqrt(isfinite(sum) ? sum + lost : sum);
}

/* Read the gradients into the row under way. Returns whether all were plain; there may be a Python error if not. */
static int read_gradients(Plain *self)
{
    Views all;
    float *row = row_under_way(self);
    int is_plain = 1;
    if (gather(self->params, 1, &all))
        return 0;
    PyObject *block = Py_NewRef(self->block); /* it stays while it is written to without the lock */
    write_columns(&all, 1.0, row, (Counted){NULL, 0, 0}, self->threads);
    for (Py_ssize_t i = 0; i < all.length; i++)
        is_plain &= all.views[i].state != STRANGE;
    forget(&all);
    Py_DECREF(block);
    self->norm = total_norm(row, self->length);
    return is_plain;
}

static void clear_own_row(Plain *self)
{
    for (Py_ssize_t i = 0; i < GRADIENTS * self->length; i++)
        self->own_row[i] = (float)NAN;
}

PyDoc_STRVAR(Plain_observe_doc, "observe() -> float | None\n\n"
                                "Read the gradients for a loop whose optimizer has no hooks, and return their total\n"
                                "norm; None where that is left to Python.");

static PyObject *Plain_observe(Plain *self, PyObject *none)
{
    (void)none;
    if (self->phase != WAITING)
        return Py_NewRef(Py_None);
    double began = now_by(self->clock), ended = -1;
    if (began >= 0 && read_gradients(self))
        ended = now_by(self->clock);
    if (ended < 0 || self->phase == OFF) { /* off by another thread, while there was no lock */
        PyErr_Clear();                     /* the closer look meets it too, and says so */
        return Py_NewRef(Py_None);
    }
    self->phase = READ;
    self->spent_s += ended - began;
    return PyFloat_FromDouble(self->norm);
}

PyDoc_STRVAR(Plain_before_doc, "before(optimizer, args, kwargs)\n\n"
                               "The hook before an update: read the gradients, or have the optimizer do so.");

static PyObject *Plain_before(Plain *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (!has_arguments(nargs, 3))
        return NULL;
    if (self->phase == OFF)
        return PyObject_CallFunctionObjArgs(self->before, args[0], args[1], args[2], NULL);
    double began = now_by(self->clock);
    int is_plain = began >= 0 && is_plain_update(self, args[0], args[1], args[2]);
    if (is_plain && self->own_row)
        clear_own_row(self);
    else if (is_plain)
        is_plain = read_gradients(self);
    if (is_plain)
        self->began = now_by(self->clock);
    if (!is_plain || PyErr_Occurred() || self->phase == OFF) { /* off by another thread, while there was no lock */
        PyErr_Clear(); /* the closer look meets it too, and says so */
        return PyObject_CallFunctionObjArgs(self->before, args[0], args[1], args[2], NULL);
    }
    self->phase = self->own_row ? UPDATING : READ;
    self->spent_s += self->began - began;
    return Py_NewRef(Py_None);
}

PyDoc_STRVAR(Plain_after_doc, "after(optimizer, args, kwargs)\n\n"
                              "The hook after an update: take over what a watched optimizer has written.");

static PyObject *Plain_after(Plain *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (!has_arguments(nargs, 3))
        return NULL;
    if (self->phase == READ && !self->own_row)
        return Py_NewRef(Py_None);
    double ended = self->phase == UPDATING ? now_by(self->clock) : -1;
    if (ended < 0) {
        PyErr_Clear(); /* as above */
        return PyObject_CallFunctionObjArgs(self->after, args[0], args[1], args[2], NULL);
    }
    self->norm = total_norm(self->own_row, self->length);
    memcpy(row_under_way(self), self->own_row, GRADIENTS * (size_t)self->length * sizeof(float));
    self->phase = READ;
    if (ended - self->began < self->fastest_s)
        self->fastest_s = ended - self->began;
    double now = now_by(self->clock);
    self->spent_s += now - ended;
    return now < 0 ? NULL : Py_NewRef(Py_None);
}

static int has_news(const Plain *self)
{
    return self->found != Py_None && PyList_Size(self->found) != self->num_found;
}

/* Whether nothing but numbers is to be said of the step: 1 or 0, or -1 with a Python error. */
static int has_nothing_to_look_at(Plain *self)
{
    if (self->glance == Py_None)
        return 1;
    PyObject *answer = PyObject_CallFunction(self->glance, "n", self->step);
    int is_true = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return is_true;
}

/* Whether what a loop hands over are numbers that have a place in the row, and of an update that was made. */
static int are_plain_statistics(Plain *self, PyObject *statistics)
{
    PyObject *name, *value;
    Py_ssize_t next = 0;
    if (statistics == Py_None)
        return 1;
    if (!PyDict_CheckExact(statistics))
        return 0;
    while (PyDict_Next(statistics, &next, &name, &value)) {
        PyObject *place = PyDict_GetItemWithError(self->names, name);
        if (!place || !PyFloat_CheckExact(value)
            || (PyLong_AsSsize_t(place) == self->places[SKIPPED] && PyFloat_AsDouble(value) != 0))
            return 0;
    }
    return 1;
}

/* Put statistics of which that is true over what stands in the row. */
static void override(Plain *self, PyObject *statistics)
{
    PyObject *name, *value;
    Py_ssize_t next = 0;
    while (statistics != Py_None && PyDict_Next(statistics, &next, &name, &value))
        run_of(self)[PyLong_AsSsize_t(PyDict_GetItemWithError(self->names, name))] = PyFloat_AsDouble(value);
}

/* Scale a row back that was read after clipping, to the norm before it. */
static void undo_clipping(Plain *self, double told)
{
    float *row = row_under_way(self), factor = (float)(told / self->norm);
    for (Py_ssize_t i = 0; i < LINEAR * self->length; i++)
        row[i] *= factor;
    run_of(self)[self->places[BEFORE_CLIP]] = told;
}

static void write_run(Plain *self, double loss, const Batch *batch, double told, double began)
{
    double *run = run_of(self);
    const Py_ssize_t *at = self->places;
    double step_ms = 1e3 * (began - self->ended);
    run[at[LOSS]] = loss;
    run[at[BEFORE_CLIP]] = run[at[AFTER_CLIP]] = self->norm;
    if (0 < self->norm && self->norm * (1 + self->rounding) < told) /* false of nan */
        undo_clipping(self, told);
    run[at[SCALE]] = 1;
    run[at[SKIPPED]] = 0;
    run[at[STEP_MS]] = step_ms;
    run[at[MEMORY]] = self->memory;
    if (batch) {
        run[at[HASH]] = (double)batch->hash;
        run[at[SAMPLES]] = 1e3 * batch->samples / step_ms;
    }
}

/* Make the row under way one of the block, and the next one the row under way. */
static void pass_on(Plain *self, double began, double now)
{
    run_of(self)[self->places[WATCH_MS]] = 1e3 * (self->carried_s + self->spent_s + now - began);
    self->steps[self->filled] = self->step;
    self->walls[self->filled] = now - self->recorded;
    self->ended = self->recorded = now;
    self->spent_s = self->carried_s = 0;
    self->filled++;
    self->step++;
    self->phase = WAITING;
}

PyDoc_STRVAR(Plain_record_doc, "record(loss, batch, val_loss, grad_norm, statistics) -> bool | None\n\n"
                             "Record a step; say whether it was plain. None if so, and Python has its turn now.");

static PyObject *Plain_record(Plain *self, PyObject *const *args, Py_ssize_t nargs)
{
    double loss, told = NAN;
    Batch batch;
    if (!has_arguments(nargs, 5))
        return NULL;
    if (self->phase != READ || args[2] != Py_None || !are_plain_statistics(self, args[4]))
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
    double began = now_by(self->clock);
    if (began < 0)
        return NULL;
    if (!only_value(args[0], &loss) || !isfinite(loss + self->norm)
        || (args[1] != Py_None && !read_batch(args[1], &batch))
        || (args[3] != Py_None && (!only_value(args[3], &told) || !isfinite(told))))
        return Py_NewRef(Py_False);
    int is_plain = has_nothing_to_look_at(self);
    if (is_plain <= 0)
        return is_plain ? NULL : Py_NewRef(Py_False);
    write_run(self, loss, args[1] == Py_None ? NULL : &batch, told, began);
    override(self, args[4]);
    double now = now_by(self->clock);
    if (now < 0)
        return NULL;
    pass_on(self, began, now);
    if (self->filled == self->capacity || self->step >= self->until || now >= self->deadline || has_news(self)) {
        self->phase = OFF;
        return Py_NewRef(Py_None);
    }
    return Py_NewRef(Py_True);
}

PyDoc_STRVAR(Plain_use_doc, "use(steps_N, run_NR, param_NSL, wall_N)\n\n"
                            "Write from now on into a new block of N rows, which holds nan.");

static PyObject *Plain_use(Plain *self, PyObject *const *args, Py_ssize_t nargs)
{
    View steps;
    if (!has_arguments(nargs, 4))
        return NULL;
    look_at(args[0], 1, IN_ORDER, &steps);
    size_t capacity = steps.state == PLAIN ? steps.numel : 0;
    int64_t *numbers = output(args[0], capacity * sizeof(int64_t));
    double *runs = numbers ? output(args[1], capacity * (size_t)self->width * sizeof(double)) : NULL;
    float *rows = runs ? output(args[2], capacity * STATISTICS * (size_t)self->length * sizeof(float)) : NULL;
    double *walls = rows ? output(args[3], capacity * sizeof(double)) : NULL;
    PyObject *block = walls ? PyTuple_Pack(4, args[0], args[1], args[2], args[3]) : NULL;
    if (!block)
        return NULL;
    PyObject *before = self->block;
    self->block = block;
    self->steps = numbers;
    self->runs = runs;
    self->rows = rows;
    self->walls = walls;
    self->capacity = (Py_ssize_t)capacity;
    self->filled = 0;
    Py_XDECREF(before);
    return Py_NewRef(Py_None);
}

PyDoc_STRVAR(Plain_arm_doc, "arm(step, until, found, glance, deadline, threads)\n\n"
                            "Record steps from now on: those before `until`, as long as nothing is found. Gradients\n"
                            "are read on so many threads.");

static PyObject *Plain_arm(Plain *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (!has_arguments(nargs, 6))
        return NULL;
    Py_ssize_t step = PyLong_AsSsize_t(args[0]), until = PyLong_AsSsize_t(args[1]);
    double deadline = PyFloat_AsDouble(args[4]);
    int threads = (int)PyLong_AsLong(args[5]);
    if (PyErr_Occurred())
        return NULL;
    if (!self->block || self->filled == self->capacity || !PyList_Check(args[2])) {
        PyErr_SetString(PyExc_ValueError, "there is no room for a row, or the findings are no list");
        return NULL;
    }
    PyObject *found = self->found, *glance = self->glance;
    self->found = Py_NewRef(args[2]);
    self->glance = Py_NewRef(args[3]);
    Py_XDECREF(found);
    Py_XDECREF(glance);
    self->step = step;
    self->until = until;
    self->deadline = deadline;
    self->threads = threads;
    self->num_found = PyList_Size(self->found);
    self->spent_s = 0;
    self->fastest_s = HUGE_VAL;
    self->phase = step < until ? WAITING : OFF;
    return Py_NewRef(Py_None);
}

PyDoc_STRVAR(Plain_disarm_doc, "disarm() -> int\n\n"
                               "Leave the step under way to Python, and return how far it has come: 0 where that has\n"
                               "it already, 1 before the update, 2 in it, 3 after it.");

static PyObject *Plain_disarm(Plain *self, PyObject *none)
{
    long phase = self->phase;
    (void)none;
    self->phase = OFF;
    return PyLong_FromLong(phase);
}

/* Take the arguments of the constructor; they are kept as they are. Returns 0, or -1 with a Python error. */
static int take_parts(Plain *self, PyObject *args)
{
    PyObject *places;
    if (!PyArg_ParseTuple(args, "O!OO!O!nnOOO:Plain", &PyTuple_Type, &self->params, &self->own, &PyTuple_Type, &places,
                          &PyDict_Type, &self->names, &self->width, &self->num_groups, &self->before, &self->after,
                          &self->clock)) {
        self->params = self->own = self->names = NULL;
        self->before = self->after = self->clock = NULL;
        return -1;
    }
    Py_INCREF(self->params);
    Py_INCREF(self->own);
    Py_INCREF(self->names);
    Py_INCREF(self->before);
    Py_INCREF(self->after);
    Py_INCREF(self->clock);
    self->length = PyTuple_Size(self->params);
    if (PyTuple_Size(places) != PLACES) {
        PyErr_SetString(PyExc_ValueError, "there is a place too many or too few");
        return -1;
    }
    for (Py_ssize_t i = 0; i < PLACES; i++) {
        self->places[i] = PyLong_AsSsize_t(PyTuple_GetItem(places, i));
        Py_ssize_t end = self->places[i] + (i == RATES ? self->num_groups : 1);
        if (self->places[i] < 0 || end > self->width) {
            PyErr_SetString(PyExc_ValueError, "a place lies outside of the row");
            return -1;
        }
    }
    if (self->own != Py_None)
        self->own_row = output(self->own, GRADIENTS * (size_t)self->length * sizeof(float));
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *Plain_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    if (kwargs && PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Plain takes no keywords");
        return NULL;
    }
    Plain *self = (Plain *)allocate(type, 0); /* all zero */
    if (!self)
        return NULL;
    self->found = Py_NewRef(Py_None);
    self->glance = Py_NewRef(Py_None);
    if (take_parts(self, args)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int Plain_traverse(Plain *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->params);
    Py_VISIT(self->before);
    Py_VISIT(self->after);
    Py_VISIT(self->clock);
    Py_VISIT(self->own);
    Py_VISIT(self->names);
    Py_VISIT(self->found);
    Py_VISIT(self->glance);
    Py_VISIT(self->block);
    return 0;
}

static int Plain_clear(Plain *self)
{
    self->phase = OFF;
    self->capacity = self->filled = 0;
    Py_CLEAR(self->params);
    Py_CLEAR(self->before);
    Py_CLEAR(self->after);
    Py_CLEAR(self->clock);
    Py_CLEAR(self->own);
    Py_CLEAR(self->names);
    Py_CLEAR(self->found);
    Py_CLEAR(self->glance);
    Py_CLEAR(self->block);
    return 0;
}

static void Plain_dealloc(Plain *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyObject_GC_UnTrack(self);
    Plain_clear(self);
    release(self);
    Py_DECREF(type);
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))Plain_##name, METH_FASTCALL, Plain_##name##_doc}
#define SHOWN(name, kind, flags) {#name, kind, offsetof(Plain, name), flags, NULL}

static PyMethodDef plain_methods[] = {
    METHOD(before), METHOD(after), METHOD(record), METHOD(use), METHOD(arm),
    {"observe", (PyCFunction)(void (*)(void))Plain_observe, METH_NOARGS, Plain_observe_doc},
    {"disarm", (PyCFunction)(void (*)(void))Plain_disarm, METH_NOARGS, Plain_disarm_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef plain_members[] = {
    SHOWN(step, T_PYSSIZET, READONLY), SHOWN(filled, T_PYSSIZET, READONLY), SHOWN(phase, T_INT, READONLY),
    SHOWN(spent_s, T_DOUBLE, READONLY), SHOWN(fastest_s, T_DOUBLE, READONLY), SHOWN(began, T_DOUBLE, READONLY),
    SHOWN(ended, T_DOUBLE, 0), SHOWN(recorded, T_DOUBLE, 0), SHOWN(carried_s, T_DOUBLE, 0), SHOWN(memory, T_DOUBLE, 0),
    SHOWN(rounding, T_DOUBLE, 0),
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(Plain_doc, "Plain(params, own_SL, places, names, width, groups, before, after, clock)\n\n"
                        "Records the plain steps of an optimizer into blocks of rows. It is off until it is armed: then\n"
                        "its hooks call `before` and `after`. own_SL is where a watched optimizer writes, or None; width\n"
                        "that of a row of the run, places where its numbers stand, and names where those do that a loop\n"
                        "may hand over.");

static PyType_Slot plain_slots[] = {
    {Py_tp_doc, (void *)Plain_doc},       {Py_tp_new, Plain_new},         {Py_tp_dealloc, Plain_dealloc},
    {Py_tp_traverse, Plain_traverse},     {Py_tp_clear, Plain_clear},     {Py_tp_methods, plain_methods},
    {Py_tp_members, plain_members},       {0, NULL},
};

static PyType_Spec plain_spec = {
    "gradwatch._native.Plain", sizeof(Plain), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, plain_slots,
};

#endif
