// What a layer does to its products, and the backward of that, in one pass each. For chains whose
// products are not ours. Any strides, so gate and up may be halves of one tensor or lie in turn.
//
// A block has 32 columns side by side and 8 rows at a time; a thread keeps to its column.
#pragma once
#include "cuda_kernels.h"
#include "device_activations.cuh"
#include "device_numbers.cuh"

namespace {

using torchweld::cuda::Matrix;

constexpr int kPointwiseColumns = 32, kPointwiseRows = 8;
constexpr int kActivateRows = 32;  // that a block of the forward takes
// The backward's blocks have more rows where there are many, so that partial sums stay few.
constexpr int64_t kMostRowBlocks = 256;
// A running sum for a bias covers so many rows: over 512 equal rows, one running sum was off by
// three times what the numerical rule allows.
constexpr int kSumRun = 32;

struct Pointwise {
  int64_t M;
  int N, act, gated;
  float p0, p1, scale;
  Matrix gate, up;
  const void *gate_bias, *up_bias;
  int64_t bias_stride;
  const uint8_t* mask;
  void* y;
  // backward
  Matrix d;
  void *grad_gate, *grad_up;
  int64_t grad_m, grad_n;
  float *gate_sums, *up_sums;  // [row blocks, N], or null
  int64_t rows;                // of a block
};

template <class T>
__device__ __forceinline__ float element(const Matrix& matrix, int64_t m, int n) {
  return value_of(static_cast<const T*>(matrix.data)[m * matrix.stride_m + n * matrix.stride_n]);
}

template <class T>
__global__ void __launch_bounds__(kPointwiseColumns* kPointwiseRows)
    torchweld_cuda_pointwise(const __grid_constant__ Pointwise call) {
  const int n = int(blockIdx.y * kPointwiseColumns + threadIdx.x);
  if (n >= call.N) return;
  const int64_t first = int64_t(blockIdx.x) * kActivateRows + threadIdx.y;
  const auto bias_of = [&](const void* bias) {
    return bias ? value_of(static_cast<const T*>(bias)[n * call.bias_stride]) : 0.0f;
  };
  const float gate_bias = bias_of(call.gate_bias), up_bias = bias_of(call.up_bias);
  with_activation(call.act, call.p0, call.p1, [&](auto act) {
    for (int r = 0; r < kActivateRows; r += kPointwiseRows) {
      const int64_t m = first + r;
      if (m >= call.M) break;
      float value = act.value(element<T>(call.gate, m, n) + gate_bias);
      if (call.gated) value *= element<T>(call.up, m, n) + up_bias;
      if (call.mask) value *= kept_factor(call.mask, m, n, call.N, call.scale);
      static_cast<T*>(call.y)[m * call.N + n] = rounded<T>(value);
    }
  });
}

// A sum over many rows, in parts.
struct RowSum {
  float total = 0.0f, run = 0.0f;
  __device__ __forceinline__ void add(float value, int64_t count) {
    if (count % kSumRun == 0) {
      total += run;
      run = 0.0f;
    }
    run += value;
  }
  __device__ __forceinline__ float value() const { return total + run; }
};

// Adds up a block's sums of each column, in order, and stores them in row `blockIdx.x` of `to`.
__device__ __forceinline__ void store_column_sums(float own, float* shared, float* to, int n,
                                                  int N) {
  shared[threadIdx.y * kPointwiseColumns + threadIdx.x] = own;
  __syncthreads();  // all rows' sums are there
  if (threadIdx.y == 0 && n < N) {
    float sum = 0.0f;
    for (int r = 0; r < kPointwiseRows; ++r) sum += shared[r * kPointwiseColumns + threadIdx.x];
    to[int64_t(blockIdx.x) * N + n] = sum;
  }
}

template <class T>
__global__ void __launch_bounds__(kPointwiseColumns* kPointwiseRows)
    torchweld_cuda_pointwise_backward(const __grid_constant__ Pointwise call) {
  TORCHWELD_SHARED_MEMORY(memory);
  const int n = int(blockIdx.y * kPointwiseColumns + threadIdx.x);
  const int64_t begin = int64_t(blockIdx.x) * call.rows;
  const int64_t end = begin + call.rows < call.M ? begin + call.rows : call.M;
  RowSum of_gates, of_ups;
  with_activation(call.act, call.p0, call.p1, [&](auto act) {
    int64_t count = 0;
    for (int64_t m = begin + threadIdx.y; m < end && n < call.N; m += kPointwiseRows, ++count) {
      float d = element<T>(call.d, m, n);
      const float kept = call.mask ? kept_factor(call.mask, m, n, call.N, call.scale) : 1.0f;
      if (call.mask) d *= kept;
      const float before = call.gate.data ? element<T>(call.gate, m, n) : 0.0f;
      float value = act.value(before);
      const int64_t to = m * call.grad_m + n * call.grad_n;
      if (call.gated) {
        const float factor = element<T>(call.up, m, n), of_up = d * value;
        static_cast<T*>(call.grad_up)[to] = rounded<T>(of_up);
        of_ups.add(of_up, count);
        d *= factor;
        value *= factor;
      }
      const float of_gate = act.gradient(before, d);
      static_cast<T*>(call.grad_gate)[to] = rounded<T>(of_gate);
      of_gates.add(of_gate, count);
      if (call.mask) value *= kept;
      if (call.y) static_cast<T*>(call.y)[m * call.N + n] = rounded<T>(value);
    }
  });
  float* const shared = reinterpret_cast<float*>(memory);
  if (call.gate_sums) store_column_sums(of_gates.value(), shared, call.gate_sums, n, call.N);
  if (call.up_sums)
    store_column_sums(of_ups.value(), shared + kPointwiseRows * kPointwiseColumns, call.up_sums, n,
                      call.N);
}

}  // namespace
