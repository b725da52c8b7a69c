// C++ exceptions as Python ones.
#pragma once
#include <Python.h>

#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

#include <cstring>
#include <new>

#include "torch_glue/refusal.h"

namespace {

// torchweld.core.errors.RefusedError and OutOfMemoryError.
PyObject *refused_error = nullptr, *memory_error = nullptr;

// torch's CPU allocator has no error type of its own for lack of memory, so its text decides.
bool is_out_of_memory(const c10::Error& e) {
  return std::strstr(e.what_without_backtrace(), "DefaultCPUAllocator: ") != nullptr;
}

// Runs `body` and turns a C++ exception into a Python one. Ours become torchweld's errors. torch
// translates all others; a Python exception that passed through C++ is raised as it was.
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

}  // namespace
