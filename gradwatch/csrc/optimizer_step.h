/* The two calls that an optimizer's step makes: to take it, and to trace what one of torch's has done. */
#ifndef GRADWATCH_OPTIMIZER_STEP_H
#define GRADWATCH_OPTIMIZER_STEP_H

#include "optimizer_state.h"
#include "threads.h"
#include "kernels/traces.h"

static float *row_of(PyObject *tensor, size_t rows, size_t columns, int *has_failed)
{
    float *row = tensor == Py_None ? NULL : output(tensor, rows * columns * sizeof(float));
    *has_failed |= tensor != Py_None && !row;
    return row;
}

/* Take the arguments that both calls have: where params are in the rows, and the rows. Returns 0, or -1 with an error. */
static int take_arguments(Walk *walk, PyObject *const *args, PyObject *columns, PyObject *gradients, PyObject *changes)
{
    DLTensor seen;
    View view;
    int failed = 0;
    if (!exchange || !PyList_Check(args[1]) || !PyDict_Check(args[2]) || !PyTuple_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError, "bind() first, then pass groups, state and params as list, dict and tuple");
        return -1;
    }
    walk->rule = PyLong_AsLong(args[0]) == 1 ? ADAM : SGD;
    walk->params = args[4];
    if (columns != Py_None) {
        walk->columns = output(columns, (size_t)PyTuple_Size(args[4]) * sizeof(int32_t));
        failed |= !walk->columns;
        view_and_describe(gradients == Py_None ? changes : gradients, 1, IN_ORDER, &view, &seen);
        walk->step.stride = view.state == SUPPORTED && seen.ndim == 2 ? (size_t)seen.shape[1] : 0;
    }
    walk->gradients = row_of(gradients, 6, walk->step.stride, &failed);
    walk->changes = row_of(changes, 2, walk->step.stride, &failed);
    return failed || PyErr_Occurred() ? -1 : 0;
}

static void run_walk(Walk *walk, Mover mover, int threads)
{
    PyThreadState *saved = walk->bytes > LOCKED_BYTES ? PyEval_SaveThread() : NULL;
    move_all(&walk->step, mover, walk->bytes, threads);
    for (size_t i = 0; i < walk->step.length && !walk->step.is_skipped && !walk->moved; i++)
        if (walk->counts[i])
            *walk->counts[i] += 1;
    if (saved)
        PyEval_RestoreThread(saved);
}

PyDoc_STRVAR(step_doc,
             "step(rule, groups, state, fresh, params, columns, gradients_SL, changes_2L, scale, skip, threads)"
             " -> list | int\n\n"
             "Step every parameter of an optimizer's groups, rule 0 as SGD and 1 as Adam, and write the statistics of\n"
             "params[i] into columns[i], int32, of the rows, where they are not None. scale, of gradients, is a float32\n"
             "tensor or None; with skip, nothing moves. Returns the parameters that moved; or, where none did, the\n"
             "index of one that is unsupported or of unlike moments, -2 where state is still to be made, -3 where params\n"
             "are others, -4 where a group wants a mode that this does not have.");

static PyObject *moved_params(const Walk *walk)
{
    PyObject *moved = PyList_New(0);
    for (size_t i = 0; moved && i < walk->step.length && !walk->step.is_skipped; i++)
        if (walk->step.items[i].grad && PyList_Append(moved, walk->step.items[i].param))
            Py_CLEAR(moved);
    return moved;
}

static PyObject *step(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Walk walk;
    int failed = 0;
    (void)self;
    memset(&walk, 0, sizeof walk);
    if (!has_arguments(nargs, 11) || take_arguments(&walk, args, args[5], args[6], args[7]))
        return NULL;
    walk.fresh = args[3];
    walk.step.scale = row_of(args[8], 1, 1, &failed);
    walk.step.is_skipped = PyObject_IsTrue(args[9]);
    int threads = (int)PyLong_AsLong(args[10]);
    if (failed || PyErr_Occurred())
        return NULL;
    Py_ssize_t outcome = begin_walk(&walk, args[1]) ? RAISED : visit_all(&walk, args[1], args[2]);
    if (outcome == STEPPED && !PyErr_Occurred())
        run_walk(&walk, best_move(), threads);
    PyObject *moved = PyErr_Occurred() ? NULL : outcome == STEPPED ? moved_params(&walk) : PyLong_FromSsize_t(outcome);
    end_walk(&walk);
    return moved;
}

PyDoc_STRVAR(traces_doc,
             "traces(rule, groups, state, moved, params, columns, changes_2L, threads) -> int\n\n"
             "Write into columns[i] what the last step of a stock optimizer has done to params[i]: the norm of its weight\n"
             "before it, and that of the update divided by it. moved is bytes, 1 for each of params that had a gradient.\n"
             "rule 0 is SGD with momentum and without Nesterov's. Returns -1, or the reason why not, as step does.");

static PyObject *traces(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Walk walk;
    (void)self;
    memset(&walk, 0, sizeof walk);
    if (!has_arguments(nargs, 8) || take_arguments(&walk, args, args[5], Py_None, args[6]))
        return NULL;
    if (PyBytes_AsStringAndSize(args[3], (char **)&walk.moved, &walk.num_moved))
        return NULL;
    walk.fresh = Py_None;
    int threads = (int)PyLong_AsLong(args[7]);
    Py_ssize_t outcome = PyErr_Occurred() || begin_walk(&walk, args[1]) ? RAISED : visit_all(&walk, args[1], args[2]);
    if (outcome == STEPPED && !PyErr_Occurred())
        run_walk(&walk, best_trace(), threads);
    PyObject *answer = PyErr_Occurred() ? NULL : PyLong_FromSsize_t(outcome);
    end_walk(&walk);
    return answer;
}

#endif
