// Element types: what they are in memory, and fp32 for computing.
#pragma once
#include "device_language.cuh"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace {

__device__ __forceinline__ float value_of(float x) { return x; }
#ifdef __CUDACC__
__device__ __forceinline__ float value_of(fp16_t x) {
  return __half2float(__ushort_as_half(x.bits));
}
__device__ __forceinline__ float value_of(bf16_t x) {
  return __bfloat162float(__ushort_as_bfloat16(x.bits));
}
#else
inline float value_of(fp16_t x) { return cuda_on_host::half_value(x.bits); }
inline float value_of(bf16_t x) { return cuda_on_host::bf16_value(x.bits); }
#endif

// Rounds to nearest, ties to even; NaN stays NaN.
template <class T>
__device__ __forceinline__ T rounded(float x);
template <>
__device__ __forceinline__ float rounded<float>(float x) {
  return x;
}
#ifdef __CUDACC__
template <>
__device__ __forceinline__ fp16_t rounded<fp16_t>(float x) {
  return {__half_as_ushort(__float2half_rn(x))};
}
template <>
__device__ __forceinline__ bf16_t rounded<bf16_t>(float x) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}
#else
template <>
inline fp16_t rounded<fp16_t>(float x) {
  return {cuda_on_host::half_bits(x)};
}
template <>
inline bf16_t rounded<bf16_t>(float x) {
  return {cuda_on_host::bf16_bits(x)};
}
#endif

// What dropout multiplies by, from one bit per value in rows of whole bytes.
__device__ __forceinline__ float kept_factor(const uint8_t* mask, int64_t row, int column, int N,
                                             float scale) {
  const uint8_t byte = mask[row * ((N + 7) / 8) + column / 8];
  return (byte >> (column % 8)) & 1 ? scale : 0.0f;
}

}  // namespace
