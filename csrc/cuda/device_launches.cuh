// Launches of kernels, and what is asked of the device for them. On the host, the stand-in's.
#pragma once
#include <stdexcept>
#include <string>

#include "device_language.cuh"
#include "launch_log.h"

#ifdef __CUDACC__
#include <cuda_runtime.h>
#endif

namespace {

// How much of a device kernels can have.
struct DeviceLimits {
  int processors = 0;
  int shared_of_block = 0, shared_of_processor = 0;
};

// More than 48 KB of shared memory must be asked for.
constexpr size_t kPlainShared = 48 << 10;

// Lets blocks of a kernel have that much shared memory. The limit is the kernel's on the current
// device, not a launch's: one as low as this launch needs could take away, between the request of
// another thread and its launch, what that one needs. So it is always the most there is.
template <class Runtime>
void allow_shared(const Runtime& runtime, const void* kernel, size_t shared) {
  if (shared > kPlainShared)
    runtime.set_limit(kernel, runtime.most_of_block() - runtime.fixed_of(kernel));
}

#ifdef __CUDACC__

inline void check(cudaError_t found, const char* what) {
  if (found != cudaSuccess)
    throw std::runtime_error(std::string("torchweld: ") + what + ": " + cudaGetErrorString(found));
}
// Of the current device. These questions do not synchronise.
inline DeviceLimits device_limits() {
  int device = 0;
  check(cudaGetDevice(&device), "no CUDA device");
  const auto ask = [&](cudaDeviceAttr attribute) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, attribute, device), "asking the device");
    return value;
  };
  return {ask(cudaDevAttrMultiProcessorCount), ask(cudaDevAttrMaxSharedMemoryPerBlockOptin),
          ask(cudaDevAttrMaxSharedMemoryPerMultiprocessor)};
}

// What `allow_shared` asks of CUDA; `name` is the kernel's.
struct CudaRuntime {
  const char* name;

  int most_of_block() const { return device_limits().shared_of_block; }
  int fixed_of(const void* kernel) const {
    cudaFuncAttributes found;
    check(cudaFuncGetAttributes(&found, kernel), name);
    return int(found.sharedSizeBytes);
  }
  void set_limit(const void* kernel, int bytes) const {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), name);
  }
};

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared,
            void* stream, const Arguments&... arguments) {
  allow_shared(CudaRuntime{name}, reinterpret_cast<const void*>(kernel), shared);
  kernel<<<grid, block, shared, static_cast<cudaStream_t>(stream)>>>(arguments...);
  check(cudaGetLastError(), name);
  torchweld::cuda::note_launch(name);
}

#else

// Two processors with room for one block each, so that in small tests too there are several blocks,
// and tiles that follow each other in a block. Shared memory as on sm_80; tests change it.
inline DeviceLimits device_limits() {
  const char* given = std::getenv("TORCHWELD_HOST_SHARED");
  return {2, given ? std::atoi(given) : 163 << 10, 0};
}

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared,
            void*, const Arguments&... arguments) {
  if (grid.y > 65535 || grid.z > 65535) throw std::runtime_error(std::string(name) + ": grid");
  cuda_on_host::run(grid, block, shared, [&] { kernel(arguments...); });
  torchweld::cuda::note_launch(name);
}

#endif

}  // namespace
