// torchweld._C.Watch: whether everything that a welded module depends on is unchanged.
//
// Python code collects the facts once (welds/guarding/guard.py). `holds` compares all of them by
// address at every call, in 0.7 us for the five modules of an RL policy (Zen 4), and never calls
// back into Python code. After a "no" the caller compares by value, and says what has changed.
#pragma once
#include <Python.h>

#include <c10/util/SmallVector.h>

#include <utility>
#include <vector>

namespace {

// An owned reference.
struct Ref {
  PyObject* p = nullptr;
  Ref() = default;
  explicit Ref(PyObject* object) : p(object) { Py_XINCREF(p); }
  Ref(Ref&& other) noexcept : p(other.p) { other.p = nullptr; }
  Ref(const Ref&) = delete;
  Ref& operator=(Ref&& other) noexcept {
    std::swap(p, other.p);
    return *this;
  }
  ~Ref() { Py_XDECREF(p); }
};

// A module of the block. It is held weakly, so that a module its user has replaced can be freed.
struct WatchedModule {
  Ref weak;  // null for the welded module itself, which is an argument of `holds`
  Ref type;
  std::vector<std::pair<Ref, int>> children;  // name and number, -1 for an empty place
  bool switched;                              // its training mode was read
};
enum class Expect { value, absent, tensor, tied };
struct WatchedEntry {
  int module;  // -1: `dict` is used instead
  int table;   // 0 __dict__, 1 _parameters, 2 _buffers
  Ref dict, key;
  Expect expect;
  Ref value;
};
struct WatchedItems {
  Ref container;
  std::vector<Ref> values;  // keys and values in turn, for a dictionary
};
struct WatchedPair {
  Ref object, value;
};
struct WatchedKind {
  Ref object, type, dict;
};
struct WatchedTag {
  Ref type;
  unsigned int tag;
};
struct WatchedFunction {
  Ref function, code, defaults, kwdefaults;
};

struct WatchState {
  std::vector<WatchedModule> modules;
  std::vector<WatchedEntry> entries;
  std::vector<WatchedItems> items;
  std::vector<WatchedKind> kinds;
  std::vector<WatchedTag> tags;
  std::vector<WatchedFunction> functions;
  std::vector<WatchedPair> cells;

  template <class F>
  void each(F&& visit) const {
    for (const auto& m : modules) {
      visit(m.weak), visit(m.type);
      for (const auto& [name, number] : m.children) visit(name);
    }
    for (const auto& e : entries) visit(e.dict), visit(e.key), visit(e.value);
    for (const auto& i : items) {
      visit(i.container);
      for (const auto& value : i.values) visit(value);
    }
    for (const auto& k : kinds) visit(k.object), visit(k.type), visit(k.dict);
    for (const auto& c : cells) visit(c.object), visit(c.value);
    for (const auto& t : tags) visit(t.type);
    for (const auto& f : functions)
      visit(f.function), visit(f.code), visit(f.defaults), visit(f.kwdefaults);
  }
};

struct WatchObject {
  PyObject_HEAD;
  WatchState* state;
};

struct WatchNames {
  PyObject *modules, *parameters, *buffers, *training;
  PyObject* hooks[4];  // backward hooks come last
} watch_names;

// ---- comparing ----

inline PyObject* instance_dict(PyObject* object) {  // borrowed
  PyObject** slot = _PyObject_GetDictPtr(object);
  return slot ? *slot : nullptr;
}
inline bool same_text(PyObject* a, PyObject* b) {
  return a == b || (PyUnicode_CheckExact(a) && PyUnicode_CheckExact(b) && !PyUnicode_Compare(a, b));
}
inline PyObject* weak_target(PyObject* ref) {  // borrowed; the model keeps it alive
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* target = nullptr;
  if (PyWeakref_GetRef(ref, &target) <= 0) return nullptr;
  Py_DECREF(target);
  return target;
#else
  PyObject* target = PyWeakref_GET_OBJECT(ref);
  return target == Py_None ? nullptr : target;
#endif
}

class WatchComparison {
 public:
  WatchComparison(const WatchState& state, PyObject* module) : state_(state) {
    for (const auto& m : state.modules) {
      PyObject* object = m.weak.p ? weak_target(m.weak.p) : module;
      objects_.push_back(object);
      dicts_.push_back(object ? instance_dict(object) : nullptr);
    }
  }
  bool holds(PyObject* training, bool gradients) const {
    for (size_t i = 0; i < objects_.size(); ++i)
      if (!module_holds(i, training, gradients)) return false;
    for (const auto& t : state_.tags)
      if (!t.tag || reinterpret_cast<PyTypeObject*>(t.type.p)->tp_version_tag != t.tag)
        return false;
    for (const auto& k : state_.kinds)
      if (reinterpret_cast<PyObject*>(Py_TYPE(k.object.p)) != k.type.p ||
          instance_dict(k.object.p) != k.dict.p)
        return false;
    for (const auto& e : state_.entries)
      if (!entry_holds(e)) return false;
    for (const auto& i : state_.items)
      if (!items_hold(i)) return false;
    for (const auto& f : state_.functions)
      if (PyFunction_GET_CODE(f.function.p) != f.code.p ||
          PyFunction_GET_DEFAULTS(f.function.p) != f.defaults.p ||
          PyFunction_GET_KW_DEFAULTS(f.function.p) != f.kwdefaults.p)
        return false;
    for (const auto& c : state_.cells)
      if (PyCell_GET(c.object.p) != c.value.p) return false;
    return true;
  }

 private:
  bool module_holds(size_t i, PyObject* training, bool gradients) const {
    const WatchedModule& m = state_.modules[i];
    PyObject* dict = dicts_[i];
    if (!dict || reinterpret_cast<PyObject*>(Py_TYPE(objects_[i])) != m.type.p) return false;
    if (m.switched && PyDict_GetItem(dict, watch_names.training) != training) return false;
    PyObject* children = PyDict_GetItem(dict, watch_names.modules);
    if (!children || !PyDict_CheckExact(children) ||
        PyDict_GET_SIZE(children) != Py_ssize_t(m.children.size()))
      return false;
    Py_ssize_t at = 0;
    PyObject *name, *child;
    for (size_t c = 0; PyDict_Next(children, &at, &name, &child); ++c) {
      const auto& [expected, number] = m.children[c];
      if (!same_text(name, expected.p) ||
          child != (number < 0 ? Py_None : objects_[size_t(number)]))
        return false;
    }
    for (int h = 0; i > 0 && h < (gradients ? 4 : 2); ++h) {
      PyObject* hooks = PyDict_GetItem(dict, watch_names.hooks[h]);
      if (!hooks || !PyDict_Check(hooks) || PyDict_GET_SIZE(hooks) != 0) return false;
    }
    return true;
  }
  // Returns a borrowed reference, or null if there is none.
  PyObject* find(int module, int table, PyObject* dict, PyObject* key) const {
    if (module >= 0) {
      dict = dicts_[size_t(module)];
      if (table)
        dict = PyDict_GetItem(dict, table == 1 ? watch_names.parameters : watch_names.buffers);
    }
    return dict && PyDict_Check(dict) ? PyDict_GetItem(dict, key) : nullptr;
  }
  bool entry_holds(const WatchedEntry& e) const {
    PyObject* found = find(e.module, e.table, e.dict.p, e.key.p);
    switch (e.expect) {
      case Expect::absent:
        return !found;
      case Expect::tensor:
        return found && found != Py_None;
      case Expect::value:
        return found == e.value.p;
      case Expect::tied: {  // the value is the place of the same tensor: module, table, key
        PyObject* at = e.value.p;
        return found && found == find(int(PyLong_AsLong(PyTuple_GET_ITEM(at, 0))),
                                      int(PyLong_AsLong(PyTuple_GET_ITEM(at, 1))), nullptr,
                                      PyTuple_GET_ITEM(at, 2));
      }
    }
    return false;
  }
  static bool items_hold(const WatchedItems& i) {
    PyObject* container = i.container.p;
    const Py_ssize_t count = Py_ssize_t(i.values.size());
    if (PyList_Check(container)) {
      if (PyList_GET_SIZE(container) != count) return false;
      for (Py_ssize_t n = 0; n < count; ++n)
        if (PyList_GET_ITEM(container, n) != i.values[size_t(n)].p) return false;
      return true;
    }
    if (PyDict_CheckExact(container)) {
      if (2 * PyDict_GET_SIZE(container) != count) return false;
      Py_ssize_t at = 0;
      PyObject *key, *value;
      for (size_t n = 0; PyDict_Next(container, &at, &key, &value); n += 2)
        if (key != i.values[n].p || value != i.values[n + 1].p) return false;
      return true;
    }
    return false;  // the comparison by value decides about sets and the like
  }

  const WatchState& state_;
  c10::SmallVector<PyObject*, 16> objects_, dicts_;  // borrowed: the lock is held
};

// watch.holds(module, training, gradients)
PyObject* watch_holds(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "holds(module, training, gradients)");
    return nullptr;
  }
  const WatchState* state = reinterpret_cast<WatchObject*>(self)->state;
  if (!state) Py_RETURN_FALSE;  // cleared by the garbage collector
  const WatchComparison now(*state, args[0]);
  return PyBool_FromLong(now.holds(args[1], args[2] == Py_True));
}

// ---- making ----

inline Ref owned(PyObject* tuple, Py_ssize_t i) { return Ref(PyTuple_GET_ITEM(tuple, i)); }
inline Ref owned_or_null(PyObject* tuple, Py_ssize_t i) {
  PyObject* object = PyTuple_GET_ITEM(tuple, i);
  return Ref(object == Py_None ? nullptr : object);
}

// Calls `make` with each tuple of a list. Returns false, with an error set, if an item is not a
// tuple of `width`.
template <class F>
bool each_tuple(PyObject* list, Py_ssize_t width, F&& make) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    PyObject* one = PyList_GET_ITEM(list, i);
    if (!PyTuple_Check(one) || PyTuple_GET_SIZE(one) != width) {
      PyErr_Format(PyExc_TypeError, "a fact is a tuple of %zd", width);
      return false;
    }
    make(one);
    if (PyErr_Occurred()) return false;
  }
  return true;
}
inline int number_at(PyObject* tuple, Py_ssize_t i) {
  return int(PyLong_AsLong(PyTuple_GET_ITEM(tuple, i)));
}

bool fill_watch(WatchState& state, PyObject* const (&lists)[7]) {
  return each_tuple(lists[0], 4,
                    [&](PyObject* t) {
                      WatchedModule m{
                          owned_or_null(t, 0), owned(t, 1), {}, PyTuple_GET_ITEM(t, 3) == Py_True};
                      PyObject* children = PyTuple_GET_ITEM(t, 2);
                      for (Py_ssize_t c = 0; c < PyTuple_GET_SIZE(children); c += 2)
                        m.children.emplace_back(owned(children, c), number_at(children, c + 1));
                      state.modules.push_back(std::move(m));
                    }) &&
         each_tuple(lists[1], 6,
                    [&](PyObject* t) {
                      state.entries.push_back({number_at(t, 0), number_at(t, 1), owned(t, 2),
                                               owned(t, 3), Expect(number_at(t, 4)), owned(t, 5)});
                    }) &&
         each_tuple(lists[2], 2,
                    [&](PyObject* t) {
                      WatchedItems items{owned(t, 0), {}};
                      PyObject* values = PyTuple_GET_ITEM(t, 1);
                      for (Py_ssize_t v = 0; v < PyTuple_GET_SIZE(values); ++v)
                        items.values.push_back(owned(values, v));
                      state.items.push_back(std::move(items));
                    }) &&
         each_tuple(lists[3], 3,
                    [&](PyObject* t) {
                      state.kinds.push_back({owned(t, 0), owned(t, 1), owned(t, 2)});
                    }) &&
         each_tuple(lists[4], 1,
                    [&](PyObject* t) {
                      auto* type = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(t, 0));
                      state.tags.push_back({owned(t, 0), type->tp_version_tag});
                    }) &&
         each_tuple(lists[5], 4,
                    [&](PyObject* t) {
                      state.functions.push_back(
                          {owned(t, 0), owned(t, 1), owned_or_null(t, 2), owned_or_null(t, 3)});
                    }) &&
         each_tuple(lists[6], 2, [&](PyObject* t) {
           state.cells.push_back({owned(t, 0), Ref(PyCell_GET(PyTuple_GET_ITEM(t, 0)))});
         });
}

// Watch(modules, entries, items, kinds, types, functions, cells): lists of tuples, as guard.py
// makes them.
PyObject* watch_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* lists[7];
  if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!O!", &PyList_Type, &lists[0], &PyList_Type, &lists[1],
                        &PyList_Type, &lists[2], &PyList_Type, &lists[3], &PyList_Type, &lists[4],
                        &PyList_Type, &lists[5], &PyList_Type, &lists[6]))
    return nullptr;
  auto* self = reinterpret_cast<WatchObject*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->state = new WatchState;
  if (!fill_watch(*self->state, lists)) {
    Py_DECREF(self);
    return nullptr;
  }
  return reinterpret_cast<PyObject*>(self);
}
int watch_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const WatchState* state = reinterpret_cast<WatchObject*>(self)->state;
  int stopped = 0;
  if (state)
    state->each([&](const Ref& ref) {
      if (ref.p && !stopped) stopped = visit(ref.p, arg);
    });
  return stopped;
}
int watch_clear(PyObject* self) {
  WatchState* state = std::exchange(reinterpret_cast<WatchObject*>(self)->state, nullptr);
  delete state;
  return 0;
}
void watch_free(PyObject* self) {
  PyObject_GC_UnTrack(self);
  watch_clear(self);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}
PyMethodDef watch_methods[] = {
    {"holds", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(watch_holds)),
     METH_FASTCALL, "holds(module, training, gradients) -> bool"},
    {nullptr, nullptr, 0, nullptr}};
PyType_Slot watch_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(watch_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(watch_free)},
    {Py_tp_traverse, reinterpret_cast<void*>(watch_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(watch_clear)},
    {Py_tp_methods, watch_methods},
    {Py_tp_doc,
     const_cast<char*>("Facts that a welded module depends on, compared at every call.")},
    {0, nullptr}};
PyType_Spec watch_spec = {"torchweld._C.Watch", sizeof(WatchObject), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, watch_slots};
PyTypeObject* watch_type = nullptr;

}  // namespace
