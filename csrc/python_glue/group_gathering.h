// torchweld._C.Gathering and GroupMember: calls of welded modules that read the same input, run as
// one op.
//
// The first member of a group that is called with an x leads: it runs the group op for all members,
// and keeps the outputs of the others together with a copy of x. If another member is called in the
// same thread with an x of the same bytes, it takes its output, once. The bytes are compared, so an
// edit of x is noticed, whatever alias it went through. The member's packed copy is compared with
// its weights again. A group reads packed copies only: without one, a block reads its weights at
// every call and cannot be stale, while a group would read them at its first member's call.
//
// Whether a member may be served at all is decided when it is called. A lead does not ask for the
// others: the output of a member that may not be served is dropped.
//
// One step of one group is kept per thread. A group stops for good after three misses in a row: a
// step whose outputs were not all taken, or a call that could not lead.
#pragma once
#include <Python.h>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "dependency_watch.h"
#include "module_forward.h"

namespace {

PyObject* joint_name = nullptr;  // KEY in welds/weld_marks.py, which only welded modules have

// What the members of a group share. It is read and written while the GIL is held.
struct GroupState {
  static constexpr int kMostMisses = 3;
  struct Joined {
    Ref module;                // a weak reference
    std::vector<Ref> linears;  // the dictionaries that hold the weight and bias of each product
    Ref spec, pack;
    int64_t calls = 0;  // that the group served
  };
  std::vector<Joined> members;
  std::string spec;  // of all members
  int misses = 0;    // in a row
  bool stopped = false;

  void miss() { stopped = ++misses >= kMostMisses; }
};

// The outputs of one lead that are still to be taken.
struct KeptOutputs {
  std::weak_ptr<GroupState> group;
  std::vector<Tensor> outputs;   // by member; undefined once taken
  std::vector<int64_t> makings;  // the number of each member's packed copy, which a new one changes
  size_t left = 0;
  std::vector<char> x;
  at::DimVector sizes;
  at::ScalarType dtype = at::kFloat;
  bool inference = false;

  bool is_of(const Tensor& other) const {
    return dtype == other.scalar_type() && at::IntArrayRef(sizes) == other.sizes() &&
           inference == c10::InferenceMode::is_enabled() &&
           !std::memcmp(x.data(), other.const_data_ptr(), x.size());
  }
  void copy(const Tensor& other) {
    const char* bytes = static_cast<const char*>(other.const_data_ptr());
    x.assign(bytes, bytes + other.nbytes());
    sizes = other.sizes();
    dtype = other.scalar_type();
    inference = c10::InferenceMode::is_enabled();
  }
  // Outputs that nobody took are a miss of their group.
  void drop() {
    if (left)
      if (const auto owner = group.lock()) owner->miss();
    left = 0;
    outputs.clear();
    group.reset();
  }
};
thread_local KeptOutputs kept_outputs;

struct GatheringObject {
  PyObject_HEAD;
  std::shared_ptr<GroupState> state;
};
struct MemberObject {
  PyObject_HEAD;
  PyObject* gathering;
  size_t index;
  PyObject* single;  // what stands for it when it runs alone; null if the caller runs it
};
PyTypeObject *gathering_type = nullptr, *member_type = nullptr;

std::shared_ptr<GroupState>& state_of(PyObject* gathering) {
  return reinterpret_cast<GatheringObject*>(gathering)->state;
}

// ---- a member's weights ----

using Weights = c10::SmallVector<const Tensor*, 4>;  // borrowed, valid while the GIL is held

// Returns false for anything out of the ordinary.
bool read_weights(const GroupState::Joined& member, Weights& params) {
  if (member.linears.empty()) return false;  // it was forgotten
  for (const Ref& own : member.linears)
    for (PyObject* name : {names.weight, names.bias}) {
      PyObject* p = PyDict_GetItem(own.p, name);
      if (p == Py_None) continue;
      if (!p || !THPVariable_CheckExact(p) || !packable(THPVariable_Unpack(p))) return false;
      params.push_back(&THPVariable_Unpack(p));
    }
  return true;
}
std::string_view spec_of_member(const GroupState::Joined& member) {
  Py_ssize_t length = 0;
  const char* text = PyUnicode_AsUTF8AndSize(member.spec.p, &length);
  return {text, size_t(length)};  // `join` has read it once, so this cannot fail
}

// Whether only values are wanted, and x can be compared by its bytes.
bool gatherable(const Tensor& x) {
  return !at::GradMode::is_enabled() && undisturbed() && packable(x) && x.dim() >= 1 &&
         x.numel() > 0 && x.is_contiguous() && !x.is_conj();
}

// ---- taking ----

// The member's output; undefined if there is none to take.
Tensor take(size_t i, const std::shared_ptr<GroupState>& group, const Tensor& x) {
  KeptOutputs& kept = kept_outputs;
  if (!kept.left || kept.group.owner_before(group) || group.owner_before(kept.group) ||
      i >= kept.outputs.size() || !kept.outputs[i].defined() || !kept.is_of(x))
    return {};
  const GroupState::Joined& member = group->members[i];
  Weights params;
  if (!read_weights(member, params)) return {};
  if (!copy_in(member.pack.p).still(params, spec_of_member(member), kept.makings[i])) return {};
  Tensor y = std::exchange(kept.outputs[i], Tensor());
  if (--kept.left == 0) {
    kept.drop();
    group->misses = 0;
  }
  return y;
}

// ---- leading ----

// Whether the module still exists and is welded. If not, its weights are forgotten.
bool is_there(GroupState::Joined& member) {
  PyObject* module = weak_target(member.module.p);
  PyObject* own = module ? instance_dict(module) : nullptr;
  if (own && PyDict_GetItem(own, joint_name)) return true;
  member.linears.clear();
  return false;
}

std::vector<Tensor> call_group(const Tensor& x, at::TensorList copies, std::string_view spec) {
  at::AutoDispatchBelowADInplaceOrView guard;  // gradients are off
  using Signature = std::vector<Tensor>(const Tensor&, at::TensorList, std::string_view);
  static const auto group_of_packed = op<Signature>("torchweld::group_of_packed");
  return group_of_packed.call(x, copies, spec);
}

// The member's own output; those of the others are kept. Undefined if the group cannot run as one.
Tensor lead(const MemberObject& self, const std::shared_ptr<GroupState>& group, const Tensor& x) {
  const size_t count = group->members.size();
  if (count < 2) return {};
  // References of our own, since another thread may replace the members' tensors.
  c10::SmallVector<Tensor, 8> params, copies;
  KeptOutputs& kept = kept_outputs;
  kept.drop();
  kept.makings.resize(count);
  int64_t bytes = 0;
  for (size_t i = 0; i < count; ++i) {
    GroupState::Joined& member = group->members[i];
    Weights own;
    if (!is_there(member) || !read_weights(member, own)) return {};
    copies.push_back(copy_in(member.pack.p).get(own, spec_of_member(member), &kept.makings[i]));
    bytes += copies.back().numel();
    if (x.scalar_type() == at::kBFloat16)
      for (const Tensor* t : own) params.push_back(*t);
  }
  if (x.scalar_type() == at::kBFloat16 && torchweld::composition_is_faster(x, params)) return {};
  const std::string spec = group->spec;  // a member may join while the GIL is released
  kept.copy(x);
  {
    std::optional<Unlocked> unlocked;
    if (bytes > 256 << 10 || x.numel() > 1024) unlocked.emplace();
    kept.outputs = call_group(x, copies, spec);
  }
  kept.group = group;
  kept.left = count - 1;
  return std::exchange(kept.outputs[self.index], Tensor());
}

// The member's output, or None if the caller has to compute it.
PyObject* member_forward(PyObject* object, PyObject* input) {
  const auto& member = *reinterpret_cast<MemberObject*>(object);
  const std::shared_ptr<GroupState>& group = state_of(member.gathering);
  if (group->stopped || !plain_input(input)) Py_RETURN_NONE;
  const Tensor& x = THPVariable_Unpack(input);
  if (gatherable(x)) {
    Tensor y;
    try {
      y = take(member.index, group, x);
      if (!y.defined()) y = lead(member, group, x);
    } catch (const std::exception&) {  // the member alone succeeds, or has the better message
    }
    if (y.defined()) {
      ++group->members[member.index].calls;
      return THPVariable_Wrap(std::move(y));
    }
    group->miss();
  }
  if (member.single) return module_forward(member.single, input);
  Py_RETURN_NONE;
}

// ---- types ----

PyObject* gathering_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<GatheringObject*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  new (&self->state) std::shared_ptr<GroupState>(std::make_shared<GroupState>());
  return reinterpret_cast<PyObject*>(self);
}
void gathering_free(PyObject* object) {
  state_of(object).~shared_ptr();
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}
// join(module, linears, spec, pack) -> the member's number, which is the same for the same module.
// `module` is a weak reference, `linears` a list of the dictionaries that hold weights and biases.
PyObject* gathering_join(PyObject* self, PyObject* args) {
  PyObject *module, *linears, *spec, *pack;
  if (!PyArg_ParseTuple(args, "OO!O!O!", &module, &PyList_Type, &linears, &PyUnicode_Type, &spec,
                        pack_type, &pack))
    return nullptr;
  bool right = PyWeakref_Check(module) && weak_target(module) && PyUnicode_AsUTF8(spec);
  for (Py_ssize_t i = 0; right && i < PyList_GET_SIZE(linears); ++i)
    right = PyDict_Check(PyList_GET_ITEM(linears, i));
  if (!right) {
    PyErr_SetString(PyExc_TypeError, "join(weak reference to a module, [dict, ...], spec, pack)");
    return nullptr;
  }
  GroupState& group = *state_of(self);
  size_t number = 0;
  while (number < group.members.size() &&
         weak_target(group.members[number].module.p) != weak_target(module))
    ++number;
  if (number == group.members.size()) group.members.emplace_back().module = Ref(module);
  GroupState::Joined& member = group.members[number];
  member.linears.clear();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(linears); ++i)
    member.linears.emplace_back(PyList_GET_ITEM(linears, i));
  member.spec = Ref(spec);
  member.pack = Ref(pack);
  group.spec.clear();
  for (const GroupState::Joined& one : group.members)
    group.spec.append(group.spec.empty() ? "" : ";").append(spec_of_member(one));
  return PyLong_FromSize_t(number);
}
PyObject* gathering_calls(PyObject* self, PyObject* index) {
  const size_t i = PyLong_AsSize_t(index);
  if (PyErr_Occurred()) return nullptr;
  const auto& members = state_of(self)->members;
  return PyLong_FromLongLong(i < members.size() ? members[i].calls : 0);
}
PyObject* gathering_stopped(PyObject* self, void*) {
  return PyBool_FromLong(state_of(self)->stopped);
}
PyMethodDef gathering_methods[] = {
    {"join", gathering_join, METH_VARARGS, "join(module, linears, spec, pack) -> number"},
    {"calls", gathering_calls, METH_O, "calls(number) -> calls of that member served together"},
    {nullptr, nullptr, 0, nullptr}};
PyGetSetDef gathering_getset[] = {
    {"stopped", gathering_stopped, nullptr, "Whether it has given up.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot gathering_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(gathering_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(gathering_free)},
    {Py_tp_methods, gathering_methods},
    {Py_tp_getset, gathering_getset},
    {Py_tp_doc, const_cast<char*>("What the welded members of one group share.")},
    {0, nullptr}};
PyType_Spec gathering_spec = {"torchweld._C.Gathering", sizeof(GatheringObject), 0,
                              Py_TPFLAGS_DEFAULT, gathering_slots};

// GroupMember(gathering, number, single): stands for a welded module in forward().
PyObject* member_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *gathering, *single;
  Py_ssize_t index;
  if (!PyArg_ParseTuple(args, "O!nO", gathering_type, &gathering, &index, &single)) return nullptr;
  if (index < 0 || size_t(index) >= state_of(gathering)->members.size()) {
    PyErr_SetString(PyExc_ValueError, "no member of this number has joined");
    return nullptr;
  }
  auto* self = reinterpret_cast<MemberObject*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->gathering = Py_NewRef(gathering);
  self->index = size_t(index);
  self->single = single == Py_None ? nullptr : Py_NewRef(single);
  return reinterpret_cast<PyObject*>(self);
}
void member_free(PyObject* object) {
  auto* self = reinterpret_cast<MemberObject*>(object);
  Py_XDECREF(self->gathering);
  Py_XDECREF(self->single);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}
PyType_Slot member_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(member_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(member_free)},
    {Py_tp_doc, const_cast<char*>("A welded module as a member of a group, for forward().")},
    {0, nullptr}};
PyType_Spec member_spec = {"torchweld._C.GroupMember", sizeof(MemberObject), 0, Py_TPFLAGS_DEFAULT,
                           member_slots};

}  // namespace
