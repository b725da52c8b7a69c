// Activations on a float of a thread. The formulas are those of the kernels for CPUs; what they
// call, exp_v and the like, is CUDA's own library here, and libm on the host.
#pragma once
#include "device_language.cuh"

#ifdef __CUDACC__
#define TW_INLINE __device__ __forceinline__
#else
#define TW_INLINE inline __attribute__((always_inline))
#endif

namespace {

template <class V>
using lane_of = V;

TW_INLINE float exp_v(float x) { return expf(x); }
TW_INLINE float expm1_v(float x) { return expm1f(x); }
TW_INLINE float log1p_v(float x) { return log1pf(x); }
TW_INLINE float tanh_v(float x) { return tanhf(x); }
// The normal distribution function, with all digits below zero too.
TW_INLINE float normal_cdf_v(float x) { return 0.5f * erfcf(x * -0.70710678f); }

}  // namespace

#include "kernels/activation_formulas.h"

namespace {

// Calls `run` with the activation as a type, so that the choice is made once and not per value.
template <Act name>
struct Activation {
  float p0, p1;
  __device__ __forceinline__ float value(float z) const { return activate<name>(z, p0, p1); }
  __device__ __forceinline__ float gradient(float z, float g) const {
    return activation_gradient<name>(z, g, p0, p1);
  }
};
template <class Run>
__device__ __forceinline__ void with_activation(int act, float p0, float p1, const Run& run) {
  switch (Act(act)) {
#define ACTIVATION(name, ...) \
  case Act::name:             \
    return run(Activation<Act::name>{p0, p1});
#include "kernels/activations.inc"
#undef ACTIVATION
  }
}

}  // namespace
