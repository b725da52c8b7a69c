// torchweld._C.forward: a short path from a module's forward to the ops.
//
// It reads the parameters of plain nn.Linear children, decides whether a packed copy may be used,
// keeps that copy fresh, and calls the op through the dispatcher. It returns None if it does not
// recognise something (another class, a hook, a tensor subclass, a tracer); the caller then does
// the work in Python.
#pragma once
#include <Python.h>

#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>
#include <optional>

#include "pack_object.h"
#include "python_errors.h"
#include "torch_glue/argument_checks.h"
#include "torch_glue/tangents.h"
#include "torch_glue/torch_ops.h"

namespace {

using at::Tensor;

// Releases the GIL: other Python threads may run while this object exists.
struct Unlocked {
  PyThreadState* state = PyEval_SaveThread();
  Unlocked() = default;
  Unlocked(const Unlocked&) = delete;
  ~Unlocked() { PyEval_RestoreThread(state); }
};

template <class Signature>
auto op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}
Tensor call_chain(const Tensor& x, at::TensorList params, std::string_view spec) {
  static const auto chain =
      op<Tensor(const Tensor&, at::TensorList, std::string_view)>("torchweld::chain");
  return chain.call(x, params, spec);
}
Tensor call_training(const Tensor& x, at::TensorList params, std::string_view spec,
                     std::optional<bool> recompute) {
  static const auto chain =
      op<Tensor(const Tensor&, at::TensorList, std::string_view, std::optional<bool>)>(
          "torchweld::chain_training");
  return chain.call(x, params, spec, recompute);
}
Tensor call_packed(const Tensor& x, const Tensor& packed, std::string_view spec) {
  // Packed weights are used only when gradients are off.
  at::AutoDispatchBelowADInplaceOrView guard;
  static const auto chain =
      op<Tensor(const Tensor&, const Tensor&, std::string_view)>("torchweld::chain_packed");
  return chain.call(x, packed, spec);
}

struct AttributeNames {
  PyObject *parameters, *weight, *bias, *forward;
  PyObject *modules, *order, *spec, *pack, *training, *training_spec, *recompute, *holder;
  PyObject* hooks[4];
} names;
PyTypeObject* linear_type = nullptr;  // nn.Linear

// Returns the instance dictionary of a plain nn.Linear without hooks and without its own forward,
// else null.
PyObject* plain_linear(PyObject* child) {
  if (Py_TYPE(child) != linear_type) return nullptr;
  PyObject** slot = _PyObject_GetDictPtr(child);
  if (!slot || !*slot || PyDict_GetItem(*slot, names.forward)) return nullptr;
  const int kinds = at::GradMode::is_enabled() ? 4 : 2;  // backward hooks come last
  for (int i = 0; i < kinds; ++i) {
    PyObject* registered = PyDict_GetItem(*slot, names.hooks[i]);
    if (!registered || !PyDict_Check(registered) || PyDict_Size(registered) != 0) return nullptr;
  }
  return *slot;
}

// Appends the weight, and the bias if there is one. Returns false if the child is not a plain
// nn.Linear.
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

// Whether nothing observes or transforms the call: no mode, tracer, autocast or functorch level.
bool undisturbed() {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  const auto usual = c10::default_included_set;
  return (local.included_ | usual) == usual && !torch::jit::tracer::isTracing() &&
         !at::autocast::is_autocast_enabled(at::kCPU);
}
// Whether a packed copy can stand for this tensor. A tangent forbids it: forward-mode
// differentiation needs more than values, even when gradients are off.
bool packable(const Tensor& t) {
  return t.device().is_cpu() && t.layout() == at::kStrided && !torchweld::has_tangent(t) &&
         !t.key_set().has_any(
             c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                  c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor}));
}

// What `forward` reads from a module's instance dictionary. Reading seven attributes through
// nn.Module would cost more than the rest of the path.
struct ModuleState {
  PyObject *children, *order, *spec, *pack;
  // None, True or False; null if nothing may need a gradient or drop values.
  PyObject* recompute = nullptr;

  // Returns false if the module is not laid out as FusedMLP makes it.
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
      pack = Py_None;  // weights are about to change
      spec = get(names.training_spec);
      if (!spec) return false;
    }
    if (training != Py_False || at::GradMode::is_enabled()) {
      recompute = get(names.recompute);
      if (recompute != Py_None && recompute != Py_True && recompute != Py_False) return false;
    }
    if (holder != Py_None) {
      PyObject* list = PyDict_Check(children) ? PyDict_GetItem(children, holder) : nullptr;
      PyObject** inner = list ? _PyObject_GetDictPtr(list) : nullptr;
      children = inner && *inner ? PyDict_GetItem(*inner, names.modules) : nullptr;
    }
    return children && PyDict_Check(children) && PyTuple_Check(order) && PyUnicode_Check(spec);
  }
  std::optional<bool> wish() const {
    return recompute == Py_None ? std::nullopt : std::optional<bool>(recompute == Py_True);
  }
};

// Whether x is a plain tensor without attributes, which a module may read, and no mode would see
// us touch it.
bool plain_input(PyObject* x) {
  PyObject** attributes = _PyObject_GetDictPtr(x);
  return !(attributes && *attributes && PyDict_GET_SIZE(*attributes)) &&
         THPVariable_CheckExact(x) && !at::impl::torch_function_mode_enabled();
}

// The chain over the module's children, or None if the caller has to compute it.
PyObject* module_forward(PyObject* module, PyObject* input) {
  ModuleState state;
  if (!plain_input(input) || !state.read(module)) Py_RETURN_NONE;
  // Borrowed from the modules, which stay alive while this thread holds the GIL.
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
    // `chain` does the same without a wish or dropout, and shows in graphs what it is.
    const bool trains =
        state.recompute && (state.recompute != Py_None || mask_count(torchweld::spec_of(spec)) > 0);
    if (wanted != borrowed.size()) Py_RETURN_NONE;  // a bias was added or removed
    const Tensor& x = THPVariable_Unpack(input);
    const bool may_pack =
        Py_TYPE(state.pack) == pack_type && !at::GradMode::is_enabled() && undisturbed() &&
        packable(x) &&
        std::all_of(borrowed.begin(), borrowed.end(), [](const Tensor* t) { return packable(*t); });
    Tensor packed, y;
    c10::SmallVector<Tensor, 8> params;  // owned, since another thread may replace them
    if (!may_pack || x.scalar_type() == at::kBFloat16)
      for (const Tensor* t : borrowed) params.push_back(*t);
    if (may_pack && !(x.dim() && torchweld::composition_is_faster(x, params)))
      packed = copy_in(state.pack).get(borrowed, spec);
    // Releasing the GIL does not pay for a few microseconds of work.
    const bool brief = packed.defined() && packed.numel() <= 256 << 10 && x.numel() <= 1024;
    {
      std::optional<Unlocked> unlocked;
      if (!brief) unlocked.emplace();
      if (packed.defined())
        y = call_packed(x, packed, spec);
      else if (trains)
        y = call_training(x, params, spec, state.wish());
      else
        y = call_chain(x, params, spec);
    }
    return THPVariable_Wrap(std::move(y));
  });
}

}  // namespace
