// What the forward and the backward of a narrow chain share: the description of a chain, how a
// block's shared memory is divided, and how weights get there.
//
// A block takes 32 rows at a time through all layers. Its 8 warps stand 2 by 4: a warp computes 16
// rows of every fourth group of 8 columns, so that narrow layers occupy all warps too. A layer has
// `products`: rows of its weights, padded to a multiple of 16; a gated one has twice as many, the
// gate's before up's. Padding is zero everywhere.
//
// Weights come to shared memory as they lie in memory, [out, in]. If all of them fit, they stay
// there; otherwise they pass through a panel, piece by piece, for each 32 rows.
#pragma once
#include "cuda_kernels.h"
#include "device_activations.cuh"
#include "warp_products.cuh"

namespace {

using torchweld::cuda::kMostLayers;

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kLanesOfWarp;
constexpr int kRows = 32;           // of a tile: two warps, 16 rows each
constexpr int kWarpColumns = 4;     // warps side by side
constexpr int kTilesOfWarp = 8;     // groups of 8 columns: 4 warps x 8 groups x 8 = 256 columns
constexpr int kGatedColumns = 128;  // of a gated layer at once: as many for the gate and for up

// Blocks that a processor should have room for: up to 128 registers for a thread. Without it nvcc
// 13.0 takes 64 on sm_100, and spills.
constexpr int kBlocksOfProcessor = 2;

// Rows of shared memory are 16 bytes longer than a multiple of 32: neighbours start in other banks.
template <class T>
constexpr int kPad = 16 / int(sizeof(T));
// How many features, or products, a panel of weights holds: 128 bytes.
template <class T>
constexpr int kPanelDepth = 128 / int(sizeof(T));

__host__ __device__ constexpr int padded(int size) { return (size + 15) / 16 * 16; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

struct NarrowProduct {
  const void* weight;
  int64_t stride_n, stride_k;
  const void* bias;
  int64_t bias_stride;
  int vectors;  // whether rows can be read 16 bytes at a time
  // Where the sums for its gradients lie in a block's workspace; -1: not needed.
  int weight_sums, bias_sums;
};
struct NarrowLayer {
  int K, N, act, gated;
  float p0, p1, scale;
  int resident;  // where its weights lie in the resident part of shared memory, in elements
  NarrowProduct gate, up;  // without a gate, `gate` is the only one
  void *z, *v;             // pre-activations of gate and up, [M, N], or null
  const uint8_t* mask;
  int wanted;  // backward: gradients that are needed of the layer: 1, of weights; 2, of biases
};
// An argument of a kernel: at most 4 KB.
struct NarrowChain {
  NarrowLayer layers[kMostLayers];
  const void* x;
  int64_t M, x_m, x_k;
  int64_t tiles;
  int count;
  int resident;                             // whether weights stay in shared memory
  int stride;                               // between rows of values in shared memory, in elements
  int wide_stride;                          // between rows of gradients: room for gate and up
  int sums_stride;                          // between rows of sums, in floats
  int values, gradients, scratch, weights;  // where parts of shared memory begin, in bytes
  // backward
  int64_t grad_m, grad_n;
  void* grad_x;
  float* workspace;
  int64_t workspace_of_block;
  int lowest;  // the lowest layer that a gradient is needed of
};
static_assert(sizeof(NarrowChain) <= 4000, "arguments of a kernel");

__device__ __forceinline__ int warp_number() { return int(threadIdx.x) / kLanesOfWarp; }
__device__ __forceinline__ int products_of(const NarrowLayer& layer) {
  return padded(layer.N) << layer.gated;
}

// ---- weights ----

// Copies `rows` rows of one product from row n0 on, features [k0, k0 + depth), to rows `stride`
// apart. What is beyond the matrix is zero.
template <class T>
__device__ void copy_weights(const NarrowProduct& product, int N, int K, int n0, int rows, int k0,
                             int depth, T* to, int stride) {
  const T* const from = static_cast<const T*>(product.weight);
  constexpr int kVector = 16 / int(sizeof(T));
  if (product.vectors) {
    // Eight lanes side by side: 128 bytes of a row.
    for (int r = int(threadIdx.x) / 8; r < rows; r += kThreads / 8)
      for (int c = int(threadIdx.x) % 8 * kVector; c < depth; c += 8 * kVector) {
        uint4 value{0, 0, 0, 0};
        if (n0 + r < N && k0 + c < K)
          value = *reinterpret_cast<const uint4*>(from + (n0 + r) * product.stride_n + k0 + c);
        *reinterpret_cast<uint4*>(to + r * stride + c) = value;
      }
    return;
  }
  // Neighbouring lanes read neighbours in memory, whichever way the matrix lies.
  const bool turned = product.stride_n < product.stride_k;
  const int outer = turned ? depth : rows, inner = turned ? rows : depth;
  for (int i = warp_number(); i < outer; i += kWarps)
    for (int j = lane_number(); j < inner; j += kLanesOfWarp) {
      const int r = turned ? j : i, c = turned ? i : j;
      T value = rounded<T>(0.0f);
      if (n0 + r < N && k0 + c < K)
        value = from[(n0 + r) * product.stride_n + (k0 + c) * product.stride_k];
      to[r * stride + c] = value;
    }
}
// The same by products: rows [first, first + rows), gate before up.
template <class T>
__device__ void copy_products(const NarrowLayer& layer, int first, int rows, int k0, int depth,
                              T* to, int stride) {
  const int N = padded(layer.N), of_gate = first < N ? smaller(rows, N - first) : 0;
  if (of_gate > 0)
    copy_weights(layer.gate, layer.N, layer.K, first, of_gate, k0, depth, to, stride);
  if (rows > of_gate)
    copy_weights(layer.up, layer.N, layer.K, first + of_gate - N, rows - of_gate, k0, depth,
                 to + of_gate * stride, stride);
}
template <class T>
__device__ __forceinline__ int resident_stride(const NarrowLayer& layer) {
  return padded(layer.K) + kPad<T>;
}
template <class T>
__device__ void copy_resident_weights(const NarrowChain& chain, T* weights) {
  for (int i = 0; i < chain.count; ++i) {
    const NarrowLayer& layer = chain.layers[i];
    copy_products(layer, 0, products_of(layer), 0, padded(layer.K), weights + layer.resident,
                  resident_stride<T>(layer));
  }
}

// ---- values ----

// Rows [row0, row0 + kRows) of a matrix [M, K] as values with zeros around.
template <class T>
__device__ void copy_rows(const void* matrix, int64_t M, int64_t stride_m, int64_t stride_k,
                          int64_t row0, int K, T* to, int stride) {
  const T* const from = static_cast<const T*>(matrix);
  for (int r = warp_number(); r < kRows; r += kWarps)
    for (int k = lane_number(); k < padded(K); k += kLanesOfWarp) {
      T value = rounded<T>(0.0f);
      if (row0 + r < M && k < K) value = from[(row0 + r) * stride_m + k * stride_k];
      to[r * stride + k] = value;
    }
}

// Where a warp's sums of a group of 8 columns belong: to `to`, which is at row 0 and its column 0.
__device__ __forceinline__ void store_sums(const float (&sums)[4], float* to, int stride) {
  const int row = warp_number() % 2 * 16 + lane_number() / 4, column = 2 * (lane_number() % 4);
  float* const at = to + row * stride + column;
  at[0] = sums[0];
  at[1] = sums[1];
  at[8 * stride] = sums[2];
  at[8 * stride + 1] = sums[3];
}

}  // namespace
