// The product of a warp: sums [16, 8] += A [16, depth] · B [depth, 8], both in shared memory. 16-bit
// types go to the tensor cores (mma.sync m16n8k16), fp32 to IEEE multiply-adds. Either way lane
// 4 g + t has the sums of rows g and g + 8, columns 2 t and 2 t + 1, so all else is written once.
//
// An operand lies with its depth side by side (A: [16, depth], B: [8, depth]), or turned, with its
// depth from row to row. `stride` is between rows in memory; rows of 16-bit types start at 16 bytes.
#pragma once
#include "device_numbers.cuh"

namespace {

__device__ __forceinline__ int lane_number() { return int(threadIdx.x) % kLanesOfWarp; }

template <class T>
struct WarpProduct {
  static constexpr int kDepth = 16;
  using A = FragmentA;
  using B = FragmentB;

  static __device__ __forceinline__ A load_a(const T* at, int stride) {
    const int lane = lane_number();
    return load_four<false>(at + lane % 16 * stride + lane / 16 * 8);
  }
  static __device__ __forceinline__ A load_a_turned(const T* at, int stride) {
    const int lane = lane_number();
    return load_four<true>(at + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8);
  }
  static __device__ __forceinline__ B load_b(const T* at, int stride) {
    const int lane = lane_number() % 16;
    return load_two<false>(at + lane % 8 * stride + lane / 8 * 8);
  }
  static __device__ __forceinline__ B load_b_turned(const T* at, int stride) {
    return load_two<true>(at + lane_number() % 16 * stride);
  }
  static __device__ __forceinline__ void multiply(float (&sums)[4], const A& a, const B& b) {
    multiply_add(sums, a, b, T{});
  }
};

template <>
struct WarpProduct<float> {
  static constexpr int kDepth = 4;
  struct A {
    float low[4], high[4];  // rows g and g + 8
  };
  struct B {
    float even[4], odd[4];  // columns 2 t and 2 t + 1
  };

  static __device__ __forceinline__ void load_row(float (&to)[4], const float* at) {
    const float4 four = *reinterpret_cast<const float4*>(at);
    to[0] = four.x;
    to[1] = four.y;
    to[2] = four.z;
    to[3] = four.w;
  }
  static __device__ __forceinline__ A load_a(const float* at, int stride) {
    const int g = lane_number() / 4;
    A a;
    load_row(a.low, at + g * stride);
    load_row(a.high, at + (g + 8) * stride);
    return a;
  }
  static __device__ __forceinline__ A load_a_turned(const float* at, int stride) {
    const int g = lane_number() / 4;
    A a;
    TORCHWELD_UNROLL
    for (int k = 0; k < 4; ++k) {
      a.low[k] = at[k * stride + g];
      a.high[k] = at[k * stride + g + 8];
    }
    return a;
  }
  static __device__ __forceinline__ B load_b(const float* at, int stride) {
    const int t = lane_number() % 4;
    B b;
    load_row(b.even, at + 2 * t * stride);
    load_row(b.odd, at + (2 * t + 1) * stride);
    return b;
  }
  static __device__ __forceinline__ B load_b_turned(const float* at, int stride) {
    const int t = lane_number() % 4;
    B b;
    TORCHWELD_UNROLL
    for (int k = 0; k < 4; ++k) {
      const float2 two = *reinterpret_cast<const float2*>(at + k * stride + 2 * t);
      b.even[k] = two.x;
      b.odd[k] = two.y;
    }
    return b;
  }
  static __device__ __forceinline__ void multiply(float (&sums)[4], const A& a, const B& b) {
    TORCHWELD_UNROLL
    for (int k = 0; k < 4; ++k) {
      sums[0] += a.low[k] * b.even[k];
      sums[1] += a.low[k] * b.odd[k];
      sums[2] += a.high[k] * b.even[k];
      sums[3] += a.high[k] * b.odd[k];
    }
  }
};

}  // namespace
