// torchweld._C: the short way from a module's forward to the ops, and facts about the kernels.
//
// `forward` reads the parameters of plain nn.Linear children, decides whether a packed copy may be used,
// sees to its freshness, and calls the op through the dispatcher.
// What it does not recognise (another class, a hook, a tensor subclass, a tracer) it leaves to the caller
// by returning None.
#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/library.h>

#include <cstring>
#include <optional>

#include "dependency_watch.h"
#include "kernels/team.h"
#include "pack_object.h"
#include "torch_glue/argument_checks.h"
#include "torch_glue/tangents.h"

namespace {

using at::Tensor;
using torchweld::kernels;

// torchweld.errors.RefusedError and OutOfMemoryError.
PyObject *refused_error = nullptr, *memory_error = nullptr;

// CPU memory that torch's allocator did not get is an error without a type of its own.
bool is_out_of_memory(const c10::Error& e) {
  return std::strstr(e.what_without_backtrace(), "DefaultCPUAllocator: ") != nullptr;
}

// Runs `body`, turning a C++ exception into a Python one. Ours get types of ours; all others are what torch
// makes of them, above all a Python exception that has come through C++: it goes on as it was raised.
template <class F>
PyObject* guarded(F&& body) {
  try {
    return body();
  } catch (const torchweld::Refusal& e) {
    PyErr_SetString(refused_error, e.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    PyErr_SetString(memory_error, "torchweld: out of memory");
  } catch (const std::exception& e) {
    const auto* error = dynamic_cast<const c10::Error*>(&e);
    if (error && is_out_of_memory(*error))
      PyErr_SetString(memory_error, error->what_without_backtrace());
    else
      torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}

// Other Python threads may run while this lives.
struct Unlocked {
  PyThreadState* state = PyEval_SaveThread();
  Unlocked() = default;
  Unlocked(const Unlocked&) = delete;
  ~Unlocked() { PyEval_RestoreThread(state); }
};

// ---- forward ----

template <class Signature>
auto op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}
Tensor call_chain(const Tensor& x, at::TensorList params, std::string_view spec) {
  static const auto chain =
      op<Tensor(const Tensor&, at::TensorList, std::string_view)>("torchweld::chain");
  return chain.call(x, params, spec);
}
Tensor call_packed(const Tensor& x, const Tensor& packed, std::string_view spec) {
  at::AutoDispatchBelowADInplaceOrView guard;  // gradients are off, or packed would not be used
  static const auto chain =
      op<Tensor(const Tensor&, const Tensor&, std::string_view)>("torchweld::chain_packed");
  return chain.call(x, packed, spec);
}

struct Names {
  PyObject *parameters, *weight, *bias, *forward;
  PyObject *modules, *order, *spec, *pack, *training, *dropout, *holder;
  PyObject* hooks[4];
} names;
PyTypeObject* linear_type = nullptr;  // nn.Linear

// The instance dictionary of a plain nn.Linear without hooks or a forward of its own; else null.
PyObject* plain_linear(PyObject* child) {
  if (Py_TYPE(child) != linear_type) return nullptr;
  PyObject** slot = _PyObject_GetDictPtr(child);
  if (!slot || !*slot || PyDict_GetItem(*slot, names.forward)) return nullptr;
  const int kinds = at::GradMode::is_enabled() ? 4 : 2;  // those of the backward come second
  for (int i = 0; i < kinds; ++i) {
    PyObject* registered = PyDict_GetItem(*slot, names.hooks[i]);
    if (!registered || !PyDict_Check(registered) || PyDict_Size(registered) != 0) return nullptr;
  }
  return *slot;
}

// Appends the weight, and the bias if there is one; false for anything out of the ordinary.
bool append_parameters(PyObject* child, c10::SmallVectorImpl<const Tensor*>& params) {
  PyObject* dict = plain_linear(child);
  PyObject* own = dict ? PyDict_GetItem(dict, names.parameters) : nullptr;
  if (!own || !PyDict_Check(own)) return false;
  for (PyObject* name : {names.weight, names.bias}) {
    PyObject* p = PyDict_GetItem(own, name);
    if (p == Py_None) continue;
    if (!p || !THPVariable_CheckExact(p)) return false;
    params.push_back(&THPVariable_Unpack(p));
  }
  return true;
}

// Nothing is watching or transforming the call: no mode, tracer, autocast or functorch level.
bool undisturbed() {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  const auto usual = c10::default_included_set;
  return (local.included_ | usual) == usual && !torch::jit::tracer::isTracing() &&
         !at::autocast::is_autocast_enabled(at::kCPU);
}
// Neither is it with a tangent: forward-mode differentiation asks for more than values, gradients off or not.
bool packable(const Tensor& t) {
  return t.device().is_cpu() && t.layout() == at::kStrided && !torchweld::has_tangent(t) &&
         !t.key_set().has_any(
             c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                  c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor}));
}

// What `forward` finds in a module's instance dictionary. Reading seven attributes
// through nn.Module would cost more than the rest of the way.
struct ModuleState {
  PyObject *children, *order, *spec, *pack;

  // False where the module is not as FusedMLP makes it, or has dropout to do.
  bool read(PyObject* module) {
    PyObject** slot = _PyObject_GetDictPtr(module);
    if (!slot || !*slot) return false;
    const auto get = [&](PyObject* name) { return PyDict_GetItem(*slot, name); };
    children = get(names.modules);
    order = get(names.order);
    spec = get(names.spec);
    pack = get(names.pack);
    PyObject* training = get(names.training);
    PyObject* holder = get(names.holder);
    if (!children || !order || !spec || !pack || !training || !holder) return false;
    if (training != Py_False) {
      PyObject* dropout = get(names.dropout);
      if (!dropout || PyObject_IsTrue(dropout) != 0) return false;
      pack = Py_None;  // weights are about to change
    }
    if (holder != Py_None) {
      PyObject* list = PyDict_Check(children) ? PyDict_GetItem(children, holder) : nullptr;
      PyObject** inner = list ? _PyObject_GetDictPtr(list) : nullptr;
      children = inner && *inner ? PyDict_GetItem(*inner, names.modules) : nullptr;
    }
    return children && PyDict_Check(children) && PyTuple_Check(order) && PyUnicode_Check(spec);
  }
};

// forward(module, x): the chain over the module's children; None if the caller has to do it.
PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "forward(module, x)");
    return nullptr;
  }
  ModuleState state;
  PyObject** attributes = _PyObject_GetDictPtr(args[1]);  // of x, which a module may ask for
  if ((attributes && *attributes && PyDict_GET_SIZE(*attributes)) ||
      !THPVariable_CheckExact(args[1]) || at::impl::torch_function_mode_enabled() ||
      !state.read(args[0]))
    Py_RETURN_NONE;
  // Borrowed from the modules, which this thread keeps alive while it holds the lock.
  c10::SmallVector<const Tensor*, 8> borrowed;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(state.order); ++i) {
    PyObject* child = PyDict_GetItem(state.children, PyTuple_GET_ITEM(state.order, i));
    if (!child || !append_parameters(child, borrowed)) Py_RETURN_NONE;
  }
  return guarded([&]() -> PyObject* {
    Py_ssize_t length = 0;
    const char* text = PyUnicode_AsUTF8AndSize(state.spec, &length);
    if (!text) return nullptr;
    const std::string_view spec(text, size_t(length));
    size_t wanted = 0;
    for (const auto& layer : torchweld::spec_of(spec)) wanted += size_t(layer.tensors());
    if (wanted != borrowed.size()) Py_RETURN_NONE;  // a bias came or went
    const Tensor& x = THPVariable_Unpack(args[1]);
    const bool may_pack =
        Py_TYPE(state.pack) == pack_type && !at::GradMode::is_enabled() && undisturbed() &&
        packable(x) &&
        std::all_of(borrowed.begin(), borrowed.end(), [](const Tensor* t) { return packable(*t); });
    Tensor packed, y;
    c10::SmallVector<Tensor, 8> params;  // references of our own: another thread may replace them
    if (!may_pack || x.scalar_type() == at::kBFloat16)
      for (const Tensor* t : borrowed) params.push_back(*t);
    if (may_pack && !(x.dim() && torchweld::composition_is_faster(x, params)))
      packed = copy_in(state.pack).get(borrowed, spec);
    // Giving the lock away and taking it back is not worth it for a few microseconds of work.
    const bool brief = packed.defined() && packed.numel() <= 256 << 10 && x.numel() <= 1024;
    {
      std::optional<Unlocked> unlocked;
      if (!brief) unlocked.emplace();
      y = packed.defined() ? call_packed(x, packed, spec) : call_chain(x, params, spec);
    }
    return THPVariable_Wrap(std::move(y));
  });
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
  return Py_BuildValue("{s:s,s:s,s:s,s:i,s:L,s:K}", "isa", run.isa, "weights", run.weights,
                       "partition", run.partition, "threads", run.threads, "rows", (long long)run.M,
                       "calls", (unsigned long long)run.calls);
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

}  // namespace

PyMODINIT_FUNC PyInit__C() {
  PyObject* nn = PyImport_ImportModule("torch.nn");
  if (!nn) return nullptr;
  linear_type = reinterpret_cast<PyTypeObject*>(PyObject_GetAttrString(nn, "Linear"));
  Py_DECREF(nn);
  if (!linear_type) return nullptr;
  PyObject* errors = PyImport_ImportModule("torchweld.errors");
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
           name("dropout"),
           name("_holder"),
           {name("_forward_hooks"), name("_forward_pre_hooks"), name("_backward_hooks"),
            name("_backward_pre_hooks")}};

  watch_names = {names.modules, names.parameters, name("_buffers"), names.training, {}};
  std::copy(std::begin(names.hooks), std::end(names.hooks), std::begin(watch_names.hooks));
  pack_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&pack_spec));
  if (!pack_type) return nullptr;
  PyObject* module = PyModule_Create(&module_def);
  if (!module) return nullptr;
  PyObject* watch_type = PyType_FromSpec(&watch_spec);
  PyObject* rolling_type = PyType_FromSpec(&rolling_spec);
  if (!watch_type || PyModule_AddObjectRef(module, "Watch", watch_type) < 0 || !rolling_type ||
      PyModule_AddObjectRef(module, "Rolling", rolling_type) < 0 ||
      PyModule_AddObjectRef(module, "Pack", reinterpret_cast<PyObject*>(pack_type)) < 0) {
    Py_XDECREF(watch_type);
    Py_XDECREF(rolling_type);
    Py_DECREF(module);
    return nullptr;
  }
  Py_DECREF(watch_type);
  Py_DECREF(rolling_type);
  return module;
}
