// The module torchweld._C: a short path from a module's forward to the ops, types for Python to
// hold, and facts about the kernels.
#include <Python.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "dependency_watch.h"
#include "group_gathering.h"
#include "kernels/kernel_api.h"
#include "module_forward.h"
#include "pack_object.h"
#include "python_errors.h"
#include "rolling_object.h"
#include "torch_glue/gradient_pool.h"
#include "torch_glue/torch_ops.h"

namespace {

using torchweld::kernels;

// forward(module, x): module is a FusedMLP, a stand-in for a welded module, or a GroupMember.
PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "forward(module, x)");
    return nullptr;
  }
  return Py_TYPE(args[0]) == member_type ? member_forward(args[0], args[1])
                                         : module_forward(args[0], args[1]);
}

// ---- facts ----

PyObject* isas(PyObject*, PyObject*) {
  torchweld::IsaState states[8];
  const int n = torchweld::isa_states(states, 8);
  PyObject* dict = PyDict_New();
  for (int i = 0; dict && i < n; ++i) {
    PyObject* pair = Py_BuildValue("(OO)", states[i].built ? Py_True : Py_False,
                                   states[i].supported ? Py_True : Py_False);
    if (!pair || PyDict_SetItemString(dict, states[i].name, pair) < 0) Py_CLEAR(dict);
    Py_XDECREF(pair);
  }
  return dict;
}
PyObject* isa(PyObject*, PyObject*) {
  return guarded([] { return PyUnicode_FromString(kernels().isa); });
}
PyObject* choose_isa(PyObject*, PyObject* name) {
  return guarded([&]() -> PyObject* {
    const char* text = PyUnicode_AsUTF8(name);
    if (!text) return nullptr;
    try {
      torchweld::choose_isa(text);
    } catch (const std::runtime_error& e) {
      return PyErr_Format(PyExc_ValueError, "%s", e.what());
    }
    Py_RETURN_NONE;
  });
}
PyObject* last_run(PyObject*, PyObject*) {
  const torchweld::Run& run = torchweld::last_run();
  return Py_BuildValue("{s:s,s:s,s:s,s:s,s:i,s:L,s:K,s:i,s:K}", "isa", run.isa, "pass", run.pass,
                       "weights", run.weights, "partition", run.partition, "threads", run.threads,
                       "rows", (long long)run.M, "calls", (unsigned long long)run.calls, "products",
                       run.products, "backwards", (unsigned long long)run.backwards);
}
using Probe = double (*)(torchweld::DType, int threads, double seconds);
PyObject* probed(Probe probe, PyObject* args) {
  const char* name;
  int threads;
  double seconds;
  if (!PyArg_ParseTuple(args, "sid", &name, &threads, &seconds)) return nullptr;
  static const std::pair<const char*, torchweld::DType> types[] = {
      {"float32", torchweld::DType::f32},
      {"bfloat16", torchweld::DType::bf16},
      {"float16", torchweld::DType::f16},
      {"float64", torchweld::DType::f64}};
  for (const auto& [known, dtype] : types)
    if (!std::strcmp(name, known)) return PyFloat_FromDouble(probe(dtype, threads, seconds));
  return PyErr_Format(PyExc_ValueError,
                      "unknown dtype %s; allowed: float32 bfloat16 float16 float64", name);
}
PyObject* probe_fma(PyObject*, PyObject* args) {
  return guarded([&] { return probed(kernels().probe_fma, args); });
}
PyObject* probe_native(PyObject*, PyObject* args) {
  return guarded([&] { return probed(kernels().probe_native, args); });
}
PyObject* probe_read(PyObject*, PyObject* args) {
  Py_ssize_t bytes;
  int threads;
  double seconds;
  if (!PyArg_ParseTuple(args, "nid", &bytes, &threads, &seconds)) return nullptr;
  return guarded(
      [&] { return PyFloat_FromDouble(kernels().probe_read(size_t(bytes), threads, seconds)); });
}

PyObject* limit_scratch(PyObject*, PyObject* bytes) {
  const size_t most = PyLong_AsSize_t(bytes);
  if (PyErr_Occurred()) return nullptr;
  torchweld::limit_scratch(most);
  Py_RETURN_NONE;
}

// ---- memory of gradients ----
PyObject* gradient_pool(PyObject*, PyObject*) {
  const auto state = torchweld::GradientPool::instance().state();
  return Py_BuildValue("{s:n,s:n,s:n}", "in_use", Py_ssize_t(state.in_use), "idle",
                       Py_ssize_t(state.idle), "limit", Py_ssize_t(state.limit));
}
PyObject* release_gradient_pool(PyObject*, PyObject*) {
  torchweld::GradientPool::instance().release();
  Py_RETURN_NONE;
}
PyObject* limit_gradient_pool(PyObject*, PyObject* bytes) {
  const size_t most = PyLong_AsSize_t(bytes);
  if (PyErr_Occurred()) return nullptr;
  torchweld::GradientPool::instance().limit(most);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"forward", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(forward)), METH_FASTCALL,
     "forward(module, x) -> Tensor | None"},
    {"isas", isas, METH_NOARGS, "{name: (built, supported)}"},
    {"isa", isa, METH_NOARGS, "The instruction set in use."},
    {"choose_isa", choose_isa, METH_O, "Use another instruction set; '' for the best."},
    {"last_run", last_run, METH_NOARGS, "How this thread's last call was carried out."},
    {"probe_fma", probe_fma, METH_VARARGS, "probe_fma(dtype, threads, seconds) -> GFLOP/s"},
    {"probe_native", probe_native, METH_VARARGS,
     "probe_native(dtype, threads, seconds) -> GFLOP/s by the CPU's own instruction; 0: none"},
    {"probe_read", probe_read, METH_VARARGS, "probe_read(bytes, threads, seconds) -> GB/s"},
    {"limit_scratch", limit_scratch, METH_O, "For tests: a larger buffer is out of memory."},
    {"gradient_pool", gradient_pool, METH_NOARGS, "Bytes in use, idle, and the most to keep idle."},
    {"release_gradient_pool", release_gradient_pool, METH_NOARGS, "Gives idle memory back."},
    {"limit_gradient_pool", limit_gradient_pool, METH_O, "Keep at most so many bytes idle."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_def = {PyModuleDef_HEAD_INIT,
                          "torchweld._C",
                          nullptr,
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

// Makes a type, which lives as long as the process, and gives it a name in the module.
bool add_type(PyObject* module, const char* name, PyType_Spec& spec, PyTypeObject*& type) {
  type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return type && PyModule_AddObjectRef(module, name, reinterpret_cast<PyObject*>(type)) == 0;
}

}  // namespace

PyMODINIT_FUNC PyInit__C() {
  PyObject* nn = PyImport_ImportModule("torch.nn");
  if (!nn) return nullptr;
  linear_type = reinterpret_cast<PyTypeObject*>(PyObject_GetAttrString(nn, "Linear"));
  Py_DECREF(nn);
  if (!linear_type) return nullptr;
  PyObject* errors = PyImport_ImportModule("torchweld.core.errors");
  if (!errors) return nullptr;
  refused_error = PyObject_GetAttrString(errors, "RefusedError");
  memory_error = PyObject_GetAttrString(errors, "OutOfMemoryError");
  Py_DECREF(errors);
  if (!refused_error || !memory_error) return nullptr;
  const auto name = PyUnicode_InternFromString;
  names = {name("_parameters"),
           name("weight"),
           name("bias"),
           name("forward"),
           name("_modules"),
           name("_names"),
           name("_spec"),
           name("_pack"),
           name("training"),
           name("_training_spec"),
           name("recompute"),
           name("_holder"),
           {name("_forward_hooks"), name("_forward_pre_hooks"), name("_backward_hooks"),
            name("_backward_pre_hooks")}};

  watch_names = {names.modules, names.parameters, name("_buffers"), names.training, {}};
  std::copy(std::begin(names.hooks), std::end(names.hooks), std::begin(watch_names.hooks));
  joint_name = name("_torchweld");
  PyObject* module = PyModule_Create(&module_def);
  if (!module) return nullptr;
  const bool added = add_type(module, "Pack", pack_spec, pack_type) &&
                     add_type(module, "Watch", watch_spec, watch_type) &&
                     add_type(module, "Rolling", rolling_spec, rolling_type) &&
                     add_type(module, "Gathering", gathering_spec, gathering_type) &&
                     add_type(module, "GroupMember", member_spec, member_type);
  if (!added) Py_CLEAR(module);
  return module;
}
