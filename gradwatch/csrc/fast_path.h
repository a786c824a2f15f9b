/* The fast path: record a step without running Python, if no sampled statistic is due. One object serves as the hooks of
 * the optimizer (or as `observe`, for a loop without hooks) and as the first half of `Monitor.step`.
 *
 *            start()            before() or observe()
 *      OFF ----------> WAITING ------------------------> READ
 *       ^               |  ^    (reads the gradients)     ^ |
 *       |               |  |                              | |
 *       |               |  `---- append() writes the row -|-'
 *       |               |                                 |
 *       |               `----> CLIPPING ------------------'
 *       |            before_clip()           before()
 *       |          (reads the gradients)
 *       |
 *       `-- stop(), from any phase; append(), when Python is due
 *
 * Invariants:
 *   - Only `append` makes a row final (`filled` grows). Until then the current row belongs to the step in progress.
 *   - An unsupported step changes nothing here. `before` and `after` call the hook of the full path, which calls `stop`
 *     and continues with the gradients, if they were read. `append` returns False, and Monitor does the same.
 *   - Reading gradients may release the interpreter lock, and another thread may then call `stop`. So the phase is
 *     checked again afterwards. */
#ifndef GRADWATCH_FAST_PATH_H
#define GRADWATCH_FAST_PATH_H

#include <assert.h>
#include <structmember.h>

#include "batch_hash.h"
#include "statistics.h"

enum { LINEAR = 4, GRADIENT = 6, STATISTICS = 8, NONFINITE = 5 }; /* the first LINEAR grow with the gradient */
enum { UNKNOWN = -1 }; /* no sum of version counters */

/* Run statistics of a step, in the order of `FastPath.columns`; the learning rates come last, as many as groups. */
enum { LOSS, HASH, BEFORE_CLIP, AFTER_CLIP, SCALE, SKIPPED, STEP_MS, SAMPLES, MEMORY, WATCH_MS, RATES, NUM_COLUMNS };

/* OFF: Python does everything. WAITING: no update yet. CLIPPING: the gradients are read, and no update has followed. READ:
 * the gradients are read, and updates the parameters. */
typedef enum { OFF, WAITING, CLIPPING, READ } Phase;

typedef struct {
    PyObject_HEAD
    PyObject *params;          /* tuple of tensors */
    PyObject *owned;           /* bytes: for each of them, whether an optimizer holds it; or None if all are held */
    PyObject *factors_L;       /* tensor that holds `factors` */
    PyObject *before, *after;  /* the hooks of the full path */
    PyObject *clock;           /* time.perf_counter */
    PyObject *findings;        /* list of findings, or None */
    PyObject *skip_step;       /* called with a step: whether there is nothing to inspect; or None */
    PyObject *block;           /* tuple of the tensors that hold the rows of a block */
    PyObject *columns_by_name; /* dict of the columns of statistics that a loop may pass */
    int64_t *steps;
    double *runs, *walls;
    float *rows;
    Py_ssize_t columns[NUM_COLUMNS], width, length, num_groups;
    Py_ssize_t capacity, filled; /* rows of the block */
    Py_ssize_t step, until, num_findings;
    double peak_memory, deadline;
    double step_began, row_ended; /* by the clock */
    double hooks_s, carried_s; /* time in hooks since the last row; time elsewhere, charged to the next row */
    double norm, whole_norm; /* of the gradients that an optimizer holds, and of all */
    double clipped_norm;     /* of the gradients that an optimizer holds, after clipping */
    double *factors;         /* by which clipping has scaled each gradient since it was read */
    long long versions;      /* sum of the version counters of the gradients, as clipping left them */
    double clip_tolerance; /* relative; a given norm that is larger by less than this counts as the same norm */
    int phase, threads;
    int is_observed; /* whether the gradients were read before clipping */
} FastPath;

static PyObject *grad_scale_name, *found_inf_name, *groups_name, *rate_name, *dict_name, *version_name;

static int intern_fast_path_names(void)
{
    return (grad_scale_name = PyUnicode_InternFromString("grad_scale"))
        && (found_inf_name = PyUnicode_InternFromString("found_inf"))
        && (groups_name = PyUnicode_InternFromString("param_groups")) && (rate_name = PyUnicode_InternFromString("lr"))
        && (dict_name = PyUnicode_InternFromString("__dict__"))
        && (version_name = PyUnicode_InternFromString("_version"));
}

/* Return the time of the clock, or -1 with a Python error. */
static double now_by(PyObject *clock)
{
    PyObject *now = PyObject_CallNoArgs(clock);
    double seconds = now ? PyFloat_AsDouble(now) : -1;
    Py_XDECREF(now);
    return seconds;
}

static double *current_run(FastPath *self)
{
    return self->runs + self->filled * self->width;
}

static float *current_row(FastPath *self)
{
    return self->rows + self->filled * STATISTICS * self->length;
}

/* Whether a dict has a value other than None under a name. */
static int holds(PyObject *dict, PyObject *name)
{
    PyObject *value = PyDict_GetItemWithError(dict, name);
    return value && value != Py_None;
}

/* Copy the learning rates into the row. Returns false if a rate is not a float, or the number of groups changed. */
static int copy_learning_rates(FastPath *self, PyObject *attributes)
{
    PyObject *groups = PyDict_GetItemWithError(attributes, groups_name);
    double *rates = current_run(self) + self->columns[RATES];
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

/* Return whether an update has no closure, no state of a GradScaler, and learning rates that are floats. */
static int is_supported_update(FastPath *self, PyObject *optimizer, PyObject *args, PyObject *kwargs)
{
    if (!PyTuple_CheckExact(args) || PyTuple_Size(args) != 1 || !PyDict_CheckExact(kwargs) || PyDict_Size(kwargs))
        return 0;
    /* the dict of the instance: a lookup of a missing attribute would make an exception at each step */
    PyObject *attributes = PyObject_GetAttr(optimizer, dict_name);
    int is_supported = attributes && PyDict_CheckExact(attributes) && !holds(attributes, grad_scale_name)
        && !holds(attributes, found_inf_name) && copy_learning_rates(self, attributes);
    Py_XDECREF(attributes);
    return is_supported;
}

/* Return the total norm of a row of statistics, without the columns that have no gradient. It is bit-identical to
 * `total_norm` of `monitor/row.py`, since either may clip a step. Squares of floats are exact in double, and the rounding
 * error of each sum is kept (Knuth, The Art of Computer Programming, volume 2, 4.2.2, theorem B).
 *
 * owned: whether to include each column; NULL includes all. factors: scale each norm first; NULL scales none. */
static double total_norm(const float *row, Py_ssize_t length, const char *owned, const double *factors)
{
    const float *nonfinite = row + NONFINITE * length;
    double sum = 0, lost = 0;
    for (Py_ssize_t i = 0; i < length; i++) {
        if (nonfinite[i] != nonfinite[i] || (owned && !owned[i])) /* nan: the parameter has no gradient */
            continue;
        double value = factors ? (double)row[i] * factors[i] : (double)row[i];
        double square = value * value, before = sum;
        sum += square;
        double added = sum - before;
        lost += (before - (sum - added)) + (square - added);
    }
    return sqrt(isfinite(sum) ? sum + lost : sum); /* Inf - Inf would make the rounding error NaN */
}

static const char *owned_columns(FastPath *self)
{
    return self->owned == Py_None ? NULL : PyBytes_AsString(self->owned);
}

/* Write the statistics of the gradients into a row. Returns whether all were supported; if not, a Python error may be
 * set. */
static int write_gradients(FastPath *self, float *row)
{
    Views all;
    int is_supported = 1;
    if (view_tensors(self->params, 1, &all))
        return 0;
    PyObject *block = Py_NewRef(self->block); /* keeps the block alive while it is written to without the lock */
    write_columns(&all, 1.0, row, (HistogramRange){NULL, 0, 0}, self->threads);
    for (Py_ssize_t i = 0; i < all.length; i++)
        is_supported &= all.views[i].state != UNSUPPORTED;
    release_views(&all);
    Py_DECREF(block);
    return is_supported;
}

/* Read the gradients into the current row. Returns as `write_gradients`. */
static int read_gradients(FastPath *self)
{
    float *row = current_row(self);
    if (!write_gradients(self, row))
        return 0;
    const char *owned = owned_columns(self);
    self->whole_norm = total_norm(row, self->length, NULL, NULL);
    self->norm = self->clipped_norm = owned ? total_norm(row, self->length, owned, NULL) : self->whole_norm;
    return 1;
}

/* Read the gradients again, for their total norm after clipping. Returns as `write_gradients`. */
static int read_clipped(FastPath *self)
{
    float *row = PyMem_Malloc((size_t)(self->length ? self->length : 1) * GRADIENT * sizeof(float));
    int is_supported = row && write_gradients(self, row);
    if (is_supported)
        self->clipped_norm = total_norm(row, self->length, owned_columns(self), NULL);
    PyMem_Free(row);
    return is_supported;
}

/* Return the sum of the version counters of all gradients, which grows when one of them is written to; -1 with a Python
 * error. */
static long long sum_versions(FastPath *self)
{
    long long sum = 0;
    for (Py_ssize_t i = 0; i < self->length; i++) {
        PyObject *grad = PyObject_GetAttr(PyTuple_GetItem(self->params, i), grad_name);
        PyObject *version = grad && grad != Py_None ? PyObject_GetAttr(grad, version_name) : NULL;
        sum += version ? PyLong_AsLongLong(version) : 0;
        Py_XDECREF(version);
        Py_XDECREF(grad);
        if (PyErr_Occurred())
            return -1;
    }
    return sum;
}

PyDoc_STRVAR(FastPath_before_clip_doc,
             "before_clip(is_continued) -> bool | None\n\n"
             "Read the gradients before they are clipped, unless an earlier call has read them and this one continues to\n"
             "clip. Returns whether they were read; None if Python has to.");

static PyObject *FastPath_before_clip(FastPath *self, PyObject *is_continued)
{
    if (self->phase == CLIPPING && is_continued == Py_True)
        return Py_NewRef(Py_False);
    if (self->phase != WAITING && self->phase != CLIPPING)
        return Py_NewRef(Py_None);
    double began = now_by(self->clock), ended = -1;
    if (began >= 0 && read_gradients(self) && (self->versions = sum_versions(self)) >= 0)
        ended = now_by(self->clock);
    if (ended < 0 || self->phase == OFF) { /* stopped by another thread, while the lock was released */
        PyErr_Clear();                     /* the full path meets the same error, and reports it */
        return Py_NewRef(Py_None);
    }
    for (Py_ssize_t i = 0; i < self->length; i++)
        self->factors[i] = 1;
    self->phase = CLIPPING;
    self->hooks_s += ended - began;
    return Py_NewRef(Py_True);
}

PyDoc_STRVAR(FastPath_clip_doc, "clip(factor, columns) -> None\n\n"
                                "Clipping has scaled the gradients of some columns, an int64 tensor, since they were read;\n"
                                "nan if there is no common factor, so that they must be read again.");

static PyObject *FastPath_clip(FastPath *self, PyObject *const *args, Py_ssize_t nargs)
{
    View columns;
    if (!has_arguments(nargs, 2))
        return NULL;
    double factor = PyFloat_AsDouble(args[0]);
    if (PyErr_Occurred())
        return NULL;
    if (self->phase != CLIPPING)
        return Py_NewRef(Py_None);
    view_tensor(args[1], 1, IN_ORDER, &columns);
    const int64_t *indices = (const int64_t *)columns.data;
    if (factor != factor)
        self->versions = UNKNOWN;
    const float *nonfinite = current_row(self) + NONFINITE * self->length;
    for (size_t i = 0; self->versions != UNKNOWN && columns.state == SUPPORTED && i < columns.bytes / sizeof(int64_t); i++) {
        if (indices[i] < 0 || indices[i] >= self->length) {
            PyErr_SetString(PyExc_IndexError, "a column is outside of the row");
            return NULL;
        }
        self->factors[indices[i]] *= factor;
        self->versions += nonfinite[indices[i]] == nonfinite[indices[i]]; /* one write to each gradient */
    }
    self->clipped_norm = total_norm(current_row(self), self->length, owned_columns(self), self->factors);
    return Py_NewRef(Py_None);
}

PyDoc_STRVAR(FastPath_observe_doc, "observe() -> float | None\n\n"
                                "Read the gradients, for a loop whose optimizer has no hooks, and return their total\n"
                                   "norm; None if Python has to.");

static PyObject *FastPath_observe(FastPath *self, PyObject *none)
{
    (void)none;
    if (self->phase != WAITING)
        return Py_NewRef(Py_None);
    double began = now_by(self->clock), ended = -1;
    if (began >= 0 && read_gradients(self))
        ended = now_by(self->clock);
    if (ended < 0 || self->phase == OFF) { /* stopped by another thread, while the lock was released */
        PyErr_Clear();                     /* the full path meets the same error, and reports it */
        return Py_NewRef(Py_None);
    }
    self->phase = READ;
    self->is_observed = 0;
    self->hooks_s += ended - began;
    return PyFloat_FromDouble(self->norm);
}

PyDoc_STRVAR(FastPath_before_doc, "before(optimizer, args, kwargs)\n\n"
                                  "The hook before an update: read the gradients.");

static PyObject *FastPath_before(FastPath *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (!has_arguments(nargs, 3))
        return NULL;
    if (self->phase == OFF)
        return PyObject_CallFunctionObjArgs(self->before, args[0], args[1], args[2], NULL);
    double began = now_by(self->clock);
    int is_read = began >= 0 && is_supported_update(self, args[0], args[1], args[2]);
    if (is_read && self->phase == CLIPPING) /* read before clipping: only what else has changed them is to be read */
        is_read = sum_versions(self) == self->versions || (!PyErr_Occurred() && read_clipped(self));
    else if (is_read)
        is_read = read_gradients(self);
    double ended = is_read ? now_by(self->clock) : -1;
    /* OFF: stopped by another thread while the lock was released */
    if (ended < 0 || PyErr_Occurred() || self->phase == OFF) {
        PyErr_Clear(); /* the full path meets the same error, and reports it */
        return PyObject_CallFunctionObjArgs(self->before, args[0], args[1], args[2], NULL);
    }
    self->is_observed = self->phase == CLIPPING;
    self->phase = READ;
    self->hooks_s += ended - began;
    return Py_NewRef(Py_None);
}

PyDoc_STRVAR(FastPath_after_doc, "after(optimizer, args, kwargs)\n\n"
                                 "The hook after an update, which has nothing left to read.");

static PyObject *FastPath_after(FastPath *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (!has_arguments(nargs, 3))
        return NULL;
    if (self->phase == READ)
        return Py_NewRef(Py_None);
    return PyObject_CallFunctionObjArgs(self->after, args[0], args[1], args[2], NULL);
}

static int has_new_findings(const FastPath *self)
{
    return self->findings != Py_None && PyList_Size(self->findings) != self->num_findings;
}

/* Return whether the step has only numbers to record: 1 or 0, or -1 with a Python error. */
static int needs_no_inspection(FastPath *self)
{
    if (self->skip_step == Py_None)
        return 1;
    PyObject *answer = PyObject_CallFunction(self->skip_step, "n", self->step);
    int is_true = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return is_true;
}

/* Return whether statistics of a loop are floats with a column, and describe an update that was not skipped. */
static int are_supported_statistics(FastPath *self, PyObject *statistics)
{
    PyObject *name, *value;
    Py_ssize_t next = 0;
    if (statistics == Py_None)
        return 1;
    if (!PyDict_CheckExact(statistics))
        return 0;
    while (PyDict_Next(statistics, &next, &name, &value)) {
        PyObject *place = PyDict_GetItemWithError(self->columns_by_name, name);
        if (!place || !PyFloat_CheckExact(value)
            || (PyLong_AsSsize_t(place) == self->columns[SKIPPED] && PyFloat_AsDouble(value) != 0))
            return 0;
    }
    return 1;
}

/* Overwrite columns of the row with statistics that `are_supported_statistics` has checked. */
static void override(FastPath *self, PyObject *statistics)
{
    PyObject *name, *value;
    Py_ssize_t next = 0;
    while (statistics != Py_None && PyDict_Next(statistics, &next, &name, &value))
        current_run(self)[PyLong_AsSsize_t(PyDict_GetItemWithError(self->columns_by_name, name))] = PyFloat_AsDouble(value);
}

/* Scale a row that was read after clipping back to the norm before clipping. */
static void undo_clipping(FastPath *self, double given_norm)
{
    double factor = given_norm / self->whole_norm;
    float *row = current_row(self);
    for (Py_ssize_t i = 0; i < LINEAR * self->length; i++)
        row[i] *= (float)factor;
    current_run(self)[self->columns[BEFORE_CLIP]] = self->owned == Py_None ? given_norm : self->norm * factor;
}

static void write_run(FastPath *self, double loss, const Batch *batch, double given_norm, double began)
{
    double *run = current_run(self);
    const Py_ssize_t *at = self->columns;
    double step_ms = 1e3 * (began - self->step_began);
    run[at[LOSS]] = loss;
    run[at[BEFORE_CLIP]] = self->norm;
    run[at[AFTER_CLIP]] = self->clipped_norm;
    /* false of nan */
    if (!self->is_observed && 0 < self->whole_norm && self->whole_norm * (1 + self->clip_tolerance) < given_norm)
        undo_clipping(self, given_norm);
    run[at[SCALE]] = 1;
    run[at[SKIPPED]] = 0;
    run[at[STEP_MS]] = step_ms;
    run[at[MEMORY]] = self->peak_memory;
    if (batch) {
        run[at[HASH]] = (double)batch->hash;
        run[at[SAMPLES]] = 1e3 * batch->samples / step_ms;
    }
}

/* Add the current row to the block, and continue with the next row. */
static void finish_row(FastPath *self, double began, double now)
{
    assert(self->filled < self->capacity && self->step < self->until); /* `start` and `append` see to it */
    current_run(self)[self->columns[WATCH_MS]] = 1e3 * (self->carried_s + self->hooks_s + now - began);
    self->steps[self->filled] = self->step;
    self->walls[self->filled] = now - self->row_ended;
    self->step_began = self->row_ended = now;
    self->hooks_s = self->carried_s = 0;
    self->filled++;
    self->step++;
    self->phase = WAITING;
}

PyDoc_STRVAR(FastPath_append_doc, "append(loss, batch, val_loss, grad_norm, statistics) -> bool | None\n\n"
                             "Append the row of a step; False if the full path has to. None if appended, and the fast\n"
                              "path has ended, since Python is due.");

static PyObject *FastPath_append(FastPath *self, PyObject *const *args, Py_ssize_t nargs)
{
    double loss, given_norm = NAN;
    Batch batch;
    if (!has_arguments(nargs, 5))
        return NULL;
    if (self->phase != READ || args[2] != Py_None || !are_supported_statistics(self, args[4]))
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
    double began = now_by(self->clock);
    if (began < 0)
        return NULL;
    /* numbers that are not finite need inspection by Python */
    if (!only_value(args[0], &loss) || !isfinite(loss + self->norm)
        || (args[1] != Py_None && !read_batch(args[1], &batch))
        || (args[3] != Py_None && (!only_value(args[3], &given_norm) || !isfinite(given_norm))))
        return Py_NewRef(Py_False);
    int is_supported = needs_no_inspection(self);
    if (is_supported <= 0)
        return is_supported ? NULL : Py_NewRef(Py_False);
    write_run(self, loss, args[1] == Py_None ? NULL : &batch, given_norm, began);
    override(self, args[4]); /* last: the loop's own statistics take precedence */
    double now = now_by(self->clock);
    if (now < 0)
        return NULL;
    finish_row(self, began, now);
    if (self->filled == self->capacity || self->step >= self->until || now >= self->deadline || has_new_findings(self)) {
        self->phase = OFF;
        return Py_NewRef(Py_None);
    }
    return Py_NewRef(Py_True);
}

PyDoc_STRVAR(FastPath_use_block_doc, "use_block(steps_N, run_NR, param_NSL, wall_N)\n\n"
                            "Write from now on into a new block of N rows, which is filled with nan.");

static PyObject *FastPath_use_block(FastPath *self, PyObject *const *args, Py_ssize_t nargs)
{
    View steps;
    if (!has_arguments(nargs, 4))
        return NULL;
    view_tensor(args[0], 1, IN_ORDER, &steps);
    size_t capacity = steps.state == SUPPORTED ? steps.numel : 0;
    int64_t *numbers = output(args[0], capacity * sizeof(int64_t));
    double *runs = numbers ? output(args[1], capacity * (size_t)self->width * sizeof(double)) : NULL;
    float *rows = runs ? output(args[2], capacity * STATISTICS * (size_t)self->length * sizeof(float)) : NULL;
    double *walls = rows ? output(args[3], capacity * sizeof(double)) : NULL;
    PyObject *block = walls ? PyTuple_Pack(4, args[0], args[1], args[2], args[3]) : NULL;
    if (!block)
        return NULL;
    PyObject *before = self->block; /* released last: a destructor may run Python and call this object */
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

PyDoc_STRVAR(FastPath_start_doc, "start(step, until, findings, skip_step, deadline, threads)\n\n"
                                 "Record steps from `step` to before `until`, as long as `findings` does not grow and the\n"
                                 "clock is before `deadline`. `threads` read the gradients.");

static PyObject *FastPath_start(FastPath *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (!has_arguments(nargs, 6))
        return NULL;
    Py_ssize_t step = PyLong_AsSsize_t(args[0]), until = PyLong_AsSsize_t(args[1]);
    double deadline = PyFloat_AsDouble(args[4]);
    int threads = (int)PyLong_AsLong(args[5]);
    if (PyErr_Occurred())
        return NULL;
    if (!self->block || self->filled == self->capacity || !PyList_Check(args[2])) {
        PyErr_SetString(PyExc_ValueError, "the block is full, or the findings are not a list");
        return NULL;
    }
    PyObject *old_findings = self->findings, *old_skip_step = self->skip_step;
    self->findings = Py_NewRef(args[2]);
    self->skip_step = Py_NewRef(args[3]);
    Py_XDECREF(old_findings);
    Py_XDECREF(old_skip_step);
    self->step = step;
    self->until = until;
    self->deadline = deadline;
    self->threads = threads;
    self->num_findings = PyList_Size(self->findings);
    self->hooks_s = 0;
    self->phase = step < until ? WAITING : OFF;
    return Py_NewRef(Py_None);
}

PyDoc_STRVAR(FastPath_stop_doc, "stop() -> bool | None\n\n"
                                "Leave the step in progress to Python. Return None if its gradients were not read yet;\n"
                                "otherwise whether an update has followed.");

static PyObject *FastPath_stop(FastPath *self, PyObject *none)
{
    int phase = self->phase;
    (void)none;
    self->phase = OFF;
    return phase == READ || phase == CLIPPING ? PyBool_FromLong(phase == READ) : Py_NewRef(Py_None);
}

/* Store the arguments of the constructor. Returns 0, or -1 with a Python error. */
static int parse_arguments(FastPath *self, PyObject *args)
{
    PyObject *columns;
    if (!PyArg_ParseTuple(args, "O!OOO!O!nnOOO:FastPath", &PyTuple_Type, &self->params, &self->owned, &self->factors_L,
                          &PyTuple_Type, &columns, &PyDict_Type, &self->columns_by_name, &self->width, &self->num_groups,
                          &self->before, &self->after, &self->clock)) {
        /* the parser may have stored borrowed references, which `dealloc` must not release */
        self->params = self->owned = self->factors_L = self->columns_by_name = NULL;
        self->before = self->after = self->clock = NULL;
        return -1;
    }
    Py_INCREF(self->params);
    Py_INCREF(self->owned);
    Py_INCREF(self->factors_L);
    Py_INCREF(self->columns_by_name);
    Py_INCREF(self->before);
    Py_INCREF(self->after);
    Py_INCREF(self->clock);
    self->length = PyTuple_Size(self->params);
    if (!(self->factors = output(self->factors_L, (size_t)self->length * sizeof(double))))
        return -1;
    if (self->owned != Py_None && (!PyBytes_Check(self->owned) || PyBytes_Size(self->owned) != self->length)) {
        PyErr_SetString(PyExc_ValueError, "`owned` must be None, or one byte for each parameter");
        return -1;
    }
    if (PyTuple_Size(columns) != NUM_COLUMNS) {
        PyErr_SetString(PyExc_ValueError, "the number of columns is wrong");
        return -1;
    }
    for (Py_ssize_t i = 0; i < NUM_COLUMNS; i++) {
        self->columns[i] = PyLong_AsSsize_t(PyTuple_GetItem(columns, i));
        Py_ssize_t end = self->columns[i] + (i == RATES ? self->num_groups : 1);
        if (self->columns[i] < 0 || end > self->width) {
            PyErr_SetString(PyExc_ValueError, "a column is outside of the row");
            return -1;
        }
    }
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *FastPath_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    if (kwargs && PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "FastPath takes no keywords");
        return NULL;
    }
    FastPath *self = (FastPath *)allocate(type, 0); /* all zero */
    if (!self)
        return NULL;
    self->findings = Py_NewRef(Py_None);
    self->skip_step = Py_NewRef(Py_None);
    if (parse_arguments(self, args)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int FastPath_traverse(FastPath *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self)); /* an instance of a heap type owns a reference to its type */
    Py_VISIT(self->params);
    Py_VISIT(self->owned);
    Py_VISIT(self->factors_L);
    Py_VISIT(self->before);
    Py_VISIT(self->after);
    Py_VISIT(self->clock);
    Py_VISIT(self->columns_by_name);
    Py_VISIT(self->findings);
    Py_VISIT(self->skip_step);
    Py_VISIT(self->block);
    return 0;
}

static int FastPath_clear(FastPath *self)
{
    self->phase = OFF; /* a hook that is called after this must not use the cleared objects */
    self->capacity = self->filled = 0;
    Py_CLEAR(self->params);
    Py_CLEAR(self->owned);
    Py_CLEAR(self->factors_L);
    Py_CLEAR(self->before);
    Py_CLEAR(self->after);
    Py_CLEAR(self->clock);
    Py_CLEAR(self->columns_by_name);
    Py_CLEAR(self->findings);
    Py_CLEAR(self->skip_step);
    Py_CLEAR(self->block);
    return 0;
}

static void FastPath_dealloc(FastPath *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyObject_GC_UnTrack(self);
    FastPath_clear(self);
    release(self);
    Py_DECREF(type);
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))FastPath_##name, METH_FASTCALL, FastPath_##name##_doc}
#define MEMBER(name, kind, flags) {#name, kind, offsetof(FastPath, name), flags, NULL}

static PyMethodDef fast_path_methods[] = {
    METHOD(before), METHOD(after), METHOD(append), METHOD(use_block), METHOD(start), METHOD(clip),
    {"before_clip", (PyCFunction)FastPath_before_clip, METH_O, FastPath_before_clip_doc},
    {"observe", (PyCFunction)(void (*)(void))FastPath_observe, METH_NOARGS, FastPath_observe_doc},
    {"stop", (PyCFunction)(void (*)(void))FastPath_stop, METH_NOARGS, FastPath_stop_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef fast_path_members[] = {
    MEMBER(step, T_PYSSIZET, READONLY), MEMBER(filled, T_PYSSIZET, READONLY),
    MEMBER(versions, T_LONGLONG, READONLY), MEMBER(is_observed, T_INT, READONLY),
    MEMBER(clipped_norm, T_DOUBLE, READONLY), MEMBER(hooks_s, T_DOUBLE, READONLY), MEMBER(step_began, T_DOUBLE, 0), MEMBER(row_ended, T_DOUBLE, 0),
    MEMBER(carried_s, T_DOUBLE, 0), MEMBER(peak_memory, T_DOUBLE, 0), MEMBER(clip_tolerance, T_DOUBLE, 0),
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(FastPath_doc, "FastPath(params, owned, factors_L, columns, columns_by_name, width, groups, before, after,\n"
                           "clock)\n\n"
                           "Records steps of an optimizer into blocks of rows. It is off until `start`: then its hooks\n"
                           "read the gradients, and otherwise call `before` and `after`. owned and factors_L are for\n"
                           "total norms: which gradients count, and memory for L doubles. width is the number of run\n"
                           "statistics, columns are those of this class's own numbers, and columns_by_name those of\n"
                           "numbers that a loop may pass.");

static PyType_Slot fast_path_slots[] = {
    {Py_tp_doc, (void *)FastPath_doc},       {Py_tp_new, FastPath_new},         {Py_tp_dealloc, FastPath_dealloc},
    {Py_tp_traverse, FastPath_traverse},     {Py_tp_clear, FastPath_clear},     {Py_tp_methods, fast_path_methods},
    {Py_tp_members, fast_path_members},       {0, NULL},
};

static PyType_Spec fast_path_spec = {
    "gradwatch._native.FastPath", sizeof(FastPath), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, fast_path_slots,
};

#endif
