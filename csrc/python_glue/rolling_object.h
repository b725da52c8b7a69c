// torchweld._C.Rolling: the rolling check, for weights that Python code has copied.
#pragma once
#include <Python.h>

#include <torch/csrc/autograd/python_variable.h>

#include <vector>

#include "torch_glue/rolling_check.h"

namespace {

struct CheckedTensors {
  std::vector<at::Tensor> tensors;
  std::vector<const void*> places;
  torchweld::RollingCheck rolling;

  bool unchanged() {
    for (size_t i = 0; i < tensors.size(); ++i)
      if (tensors[i].const_data_ptr() != places[i] || !torchweld::has_its_memory(tensors[i]))
        return false;
    return rolling.unchanged();
  }
};
struct RollingObject {
  PyObject_HEAD;
  CheckedTensors checked;
};
CheckedTensors& checked_in(PyObject* self) {
  return reinterpret_cast<RollingObject*>(self)->checked;
}

PyObject* rolling_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* list;
  if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &list)) return nullptr;
  auto* self = reinterpret_cast<RollingObject*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  CheckedTensors& checked = *new (&self->checked) CheckedTensors;
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
    checked.tensors.push_back(THPVariable_Unpack(item));
  }
  for (const at::Tensor& t : checked.tensors) {
    checked.places.push_back(t.const_data_ptr());
    pointers.push_back(&t);
  }
  checked.rolling.watch(pointers);
  return reinterpret_cast<PyObject*>(self);
}
void rolling_free(PyObject* object) {
  checked_in(object).~CheckedTensors();
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}
PyObject* rolling_unchanged(PyObject* self, PyObject*) {
  return PyBool_FromLong(checked_in(self).unchanged());
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
PyTypeObject* rolling_type = nullptr;

}  // namespace
