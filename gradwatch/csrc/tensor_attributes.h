/* Describe a tensor with its Python attributes, in about 1 us: torch before 2.10 has no exchange table. */
#ifndef GRADWATCH_TENSOR_ATTRIBUTES_H
#define GRADWATCH_TENSOR_ATTRIBUTES_H

#include "tensor_view.h"

/* Number of descriptions that stay valid: with one parameter, an optimizer's step needs five other tensors. */
enum { DESCRIPTIONS = 16, NUM_FLOATS = 4 };

static const struct {
    const char *name;
    uint8_t code, bits;
} floats[NUM_FLOATS] = {
    {"float32", DL_FLOAT, 32}, {"float64", DL_FLOAT, 64}, {"float16", DL_FLOAT, 16}, {"bfloat16", DL_BFLOAT, 16}
};
static PyObject *float_dtypes[NUM_FLOATS];

static const char *const attribute_names[] = {
    "is_cpu", "data_ptr", "dtype", "shape", "stride", "itemsize", "is_complex",
};
enum { IS_CPU, DATA_PTR, DTYPE, SHAPE, STRIDE, ITEMSIZE, IS_COMPLEX, NUM_NAMES };
static PyObject *attributes[NUM_NAMES];

/* Read an attribute of an object as a number. Returns -1 with a Python error. */
static int64_t number_of(PyObject *object, int attribute)
{
    PyObject *value = PyObject_GetAttr(object, attributes[attribute]);
    int64_t number = value ? PyLong_AsLongLong(value) : -1;
    Py_XDECREF(value);
    return number;
}

/* Copy a tuple of numbers, and release the tuple. Returns the number of numbers, or -1. */
static int32_t copy_numbers(PyObject *tuple, int64_t *out)
{
    Py_ssize_t length = tuple && PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1;
    if (length > MAX_DIMS)
        length = -1;
    for (Py_ssize_t i = 0; i < length; i++)
        out[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
    Py_XDECREF(tuple);
    return (int32_t)length;
}

static void describe_dtype(PyObject *dtype, DLTensor *out)
{
    out->lanes = 1;
    for (int i = 0; i < NUM_FLOATS; i++)
        if (dtype == float_dtypes[i]) {
            out->code = floats[i].code;
            out->bits = floats[i].bits;
            return;
        }
    /* of other dtypes only the size matters: they are hashed or written to, never read as numbers */
    out->code = number_of(dtype, IS_COMPLEX) ? DL_COMPLEX : 0;
    out->bits = (uint8_t)(8 * number_of(dtype, ITEMSIZE));
}

/* Describe a tensor, like `borrow` of an exchange table. */
static int borrow_by_attributes(void *object, DLTensor *out)
{
    static int64_t shapes[DESCRIPTIONS][MAX_DIMS], strides[DESCRIPTIONS][MAX_DIMS];
    static int turn;
    memset(out, 0, sizeof *out);
    /* a table describes tensors on other devices, too, and all callers skip them: device_type stays 0 here */
    if (number_of(object, IS_CPU) != 1)
        return PyErr_Occurred() ? -1 : 0;
    PyObject *address = PyObject_CallMethodObjArgs(object, attributes[DATA_PTR], NULL); /* fails without storage */
    PyObject *dtype = address ? PyObject_GetAttr(object, attributes[DTYPE]) : NULL;
    if (dtype) {
        turn = (turn + 1) % DESCRIPTIONS;
        out->data = PyLong_AsVoidPtr(address);
        out->device_type = DL_CPU;
        out->shape = shapes[turn];
        out->strides = strides[turn];
        out->ndim = copy_numbers(PyObject_GetAttr(object, attributes[SHAPE]), out->shape);
        describe_dtype(dtype, out);
        if (copy_numbers(PyObject_CallMethodObjArgs(object, attributes[STRIDE], NULL), out->strides) != out->ndim)
            out->ndim = -1;
    }
    Py_XDECREF(dtype);
    Py_XDECREF(address);
    return PyErr_Occurred() || out->ndim < 0 ? -1 : 0;
}

/* Return a table for tensors that have these attributes; NULL with a Python error if they lack one. */
static const ExchangeTable *attribute_table(PyObject *type)
{
    static const ExchangeTable table = {.major = 1, .borrow = borrow_by_attributes};
    PyObject *method = PyObject_GetAttrString(type, "data_ptr");
    PyObject *torch = method ? PyImport_ImportModule("torch") : NULL;
    for (int i = 0; torch && i < NUM_FLOATS && !PyErr_Occurred(); i++)
        float_dtypes[i] = PyObject_GetAttrString(torch, floats[i].name); /* live as long as the process */
    for (int i = 0; torch && i < NUM_NAMES && !PyErr_Occurred(); i++)
        attributes[i] = PyUnicode_InternFromString(attribute_names[i]);
    Py_XDECREF(method);
    Py_XDECREF(torch);
    return PyErr_Occurred() ? NULL : &table;
}

#endif
