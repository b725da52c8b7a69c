// Adds up the partial sums that blocks left, in one order, and stores them as gradients.
#pragma once
#include "cuda_kernels.h"
#include "device_numbers.cuh"

namespace {

constexpr int kSumThreads = 256;
constexpr int kMostParts = 4 * torchweld::cuda::kMostLayers;  // gate, up; weights, biases
constexpr int kPartsRun = 16;  // partial sums that a running sum covers

// A matrix [N, K] of sums, which begins at `from` in each block's; a bias has K = 1.
struct SummedPart {
  void* to;
  int64_t stride_n, stride_k;
  int from, N, K;
};
// An argument of a kernel: at most 4 KB.
struct SummedParts {
  SummedPart parts[kMostParts];
  const float* sums;
  int64_t blocks, of_block;  // partial sums of each element, and where the next block's begin
};
static_assert(sizeof(SummedParts) <= 4000, "arguments of a kernel");

// A row of the grid for each part.
template <class T>
__global__ void __launch_bounds__(kSumThreads)
    torchweld_cuda_gradient_sums(const __grid_constant__ SummedParts call) {
  const SummedPart& part = call.parts[blockIdx.y];
  const int size = part.N * part.K;
  for (int e = int(blockIdx.x * kSumThreads + threadIdx.x); e < size;
       e += int(gridDim.x) * kSumThreads) {
    const float* const from = call.sums + part.from + e;
    float total = 0.0f;
    for (int64_t b = 0; b < call.blocks; b += kPartsRun) {
      float run = 0.0f;
      for (int64_t i = b; i < b + kPartsRun && i < call.blocks; ++i) run += from[i * call.of_block];
      total += run;
    }
    const int n = e / part.K, k = e % part.K;
    static_cast<T*>(part.to)[n * part.stride_n + k * part.stride_k] = rounded<T>(total);
  }
}

}  // namespace
