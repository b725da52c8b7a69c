// torchweld._C.Pack: a packed copy of a chain's weights, owned by a Python object.
#pragma once
#include <Python.h>

#include <torch/csrc/autograd/python_variable.h>

#include "torch_glue/packed_copies.h"

namespace {

struct PackObject {
  PyObject_HEAD;
  torchweld::PackedCopies::Numbered held;
};

PyObject* pack_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<PackObject*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  new (&self->held) torchweld::PackedCopies::Numbered(torchweld::PackedCopies::add());
  return reinterpret_cast<PyObject*>(self);
}
void pack_free(PyObject* object) {
  reinterpret_cast<PackObject*>(object)->held.~Numbered();
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}
torchweld::PackedCopy& copy_in(PyObject* pack) {
  return *reinterpret_cast<PackObject*>(pack)->held.copy;
}
PyObject* pack_clear(PyObject* self, PyObject*) {
  copy_in(self).clear();
  Py_RETURN_NONE;
}
PyObject* pack_nbytes(PyObject* self, void*) { return PyLong_FromLongLong(copy_in(self).nbytes()); }
PyObject* pack_times(PyObject* self, void*) { return PyLong_FromLongLong(copy_in(self).times()); }
PyObject* pack_number(PyObject* self, void*) {
  return THPVariable_Wrap(reinterpret_cast<PackObject*>(self)->held.number);
}
PyMethodDef pack_methods[] = {
    {"clear", pack_clear, METH_NOARGS, "Drop the packed copy; the next call makes it anew."},
    {nullptr, nullptr, 0, nullptr}};
PyGetSetDef pack_getset[] = {
    {"nbytes", pack_nbytes, nullptr, "Memory of the packed copy, in bytes.", nullptr},
    {"times", pack_times, nullptr, "How often a copy was made.", nullptr},
    {"number", pack_number, nullptr, "What chain_kept takes, as a tensor.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot pack_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(pack_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(pack_free)},
    {Py_tp_methods, pack_methods},
    {Py_tp_getset, pack_getset},
    {Py_tp_doc,
     const_cast<char*>("A packed copy of a chain's weights; made and checked by forward().")},
    {0, nullptr}};
PyType_Spec pack_spec = {"torchweld._C.Pack", sizeof(PackObject), 0, Py_TPFLAGS_DEFAULT,
                         pack_slots};
PyTypeObject* pack_type = nullptr;

}  // namespace
