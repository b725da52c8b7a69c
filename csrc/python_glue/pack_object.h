// torchweld._C.Pack: a packed copy of a chain's weights, owned by a Python object; and torchweld._C.Rolling: the
// look at weights from which Python made a copy of its own.
#pragma once
#include <Python.h>

#include <torch/csrc/autograd/python_variable.h>

#include "torch_glue/packed_copies.h"

namespace {

struct Pack {
  PyObject_HEAD;
  torchweld::Copies::Numbered held;
};

PyObject* pack_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<Pack*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  new (&self->held) torchweld::Copies::Numbered(torchweld::Copies::add());
  return reinterpret_cast<PyObject*>(self);
}
void pack_free(PyObject* object) {
  reinterpret_cast<Pack*>(object)->held.~Numbered();
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}
torchweld::PackedCopy& copy_in(PyObject* pack) { return *reinterpret_cast<Pack*>(pack)->held.copy; }
PyObject* pack_clear(PyObject* self, PyObject*) {
  copy_in(self).clear();
  Py_RETURN_NONE;
}
PyObject* pack_nbytes(PyObject* self, void*) { return PyLong_FromLongLong(copy_in(self).nbytes()); }
PyObject* pack_times(PyObject* self, void*) { return PyLong_FromLongLong(copy_in(self).times()); }
PyObject* pack_number(PyObject* self, void*) {
  return THPVariable_Wrap(reinterpret_cast<Pack*>(self)->held.number);
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
PyType_Spec pack_spec = {"torchweld._C.Pack", sizeof(Pack), 0, Py_TPFLAGS_DEFAULT, pack_slots};
PyTypeObject* pack_type = nullptr;

struct Watched {
  std::vector<at::Tensor> tensors;
  std::vector<const void*> places;
  torchweld::Rolling rolling;

  bool unchanged() {
    for (size_t i = 0; i < tensors.size(); ++i)
      if (tensors[i].const_data_ptr() != places[i] || !torchweld::has_its_memory(tensors[i]))
        return false;
    return rolling.unchanged();
  }
};
struct RollingObject {
  PyObject_HEAD;
  Watched watched;
};
Watched& watched_in(PyObject* self) { return reinterpret_cast<RollingObject*>(self)->watched; }

PyObject* rolling_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* list;
  if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &list)) return nullptr;
  auto* self = reinterpret_cast<RollingObject*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  Watched& watched = *new (&self->watched) Watched;
  c10::SmallVector<const at::Tensor*, 8> pointers;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    PyObject* item = PyList_GET_ITEM(list, i);
    const bool usable = THPVariable_Check(item) && THPVariable_Unpack(item).device().is_cpu() &&
                        THPVariable_Unpack(item).layout() == at::kStrided;
    if (!usable) {
      Py_DECREF(self);
      PyErr_SetString(PyExc_TypeError, "Rolling takes a list of strided tensors on the CPU");
      return nullptr;
    }
    watched.tensors.push_back(THPVariable_Unpack(item));
  }
  for (const at::Tensor& t : watched.tensors) {
    watched.places.push_back(t.const_data_ptr());
    pointers.push_back(&t);
  }
  watched.rolling.watch(pointers);
  return reinterpret_cast<PyObject*>(self);
}
void rolling_free(PyObject* object) {
  watched_in(object).~Watched();
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}
PyObject* rolling_unchanged(PyObject* self, PyObject*) {
  return PyBool_FromLong(watched_in(self).unchanged());
}
PyMethodDef rolling_methods[] = {
    {"unchanged", rolling_unchanged, METH_NOARGS, "Whether the part that is next is what it was."},
    {nullptr, nullptr, 0, nullptr}};
PyType_Slot rolling_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(rolling_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(rolling_free)},
    {Py_tp_methods, rolling_methods},
    {Py_tp_doc, const_cast<char*>("Rolling(tensors): looks at their memory, part by part.")},
    {0, nullptr}};
PyType_Spec rolling_spec = {"torchweld._C.Rolling", sizeof(RollingObject), 0, Py_TPFLAGS_DEFAULT,
                            rolling_slots};

}  // namespace
