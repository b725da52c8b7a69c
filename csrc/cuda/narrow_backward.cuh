// The backward of a narrow chain in one kernel. For 32 rows at a time, from the last layer down: the
// gradients of a layer's products, [32, products], lie in shared memory as the element type; from
// them come the gradients of the layer's input, and sums for those of its weights and biases.
//
// A block takes every so many-th tile and adds the products of all of its tiles to its own sums in
// the workspace, in order; `torchweld_cuda_gradient_sums` adds up the blocks.
#pragma once
#include "narrow_tiles.cuh"

namespace {

// What a layer's values are made from and where its gradients come from. `sums`: gradients of its
// output as a tile of sums; else `grad` has them, in global memory; else no gradients are wanted.
template <class T>
struct GradientSource {
  const float* sums;
  const T* grad;
};

// The gradients of a layer's products, and the layer's output again, if there is room for it.
template <class T>
__device__ void finish_gradients(const NarrowChain& chain, const NarrowLayer& layer, int64_t row0,
                                 const GradientSource<T>& source, T* gradients, T* values) {
  const T* const z = static_cast<const T*>(layer.z);
  const T* const v = static_cast<const T*>(layer.v);
  const int N = padded(layer.N);
  with_activation(layer.act, layer.p0, layer.p1, [&](auto act) {
    for (int r = warp_number(); r < kRows; r += kWarps)
      for (int n = lane_number(); n < N; n += kLanesOfWarp) {
        const int64_t row = row0 + r, at = row * layer.N + n;
        float of_gate = 0.0f, of_up = 0.0f, value = 0.0f;
        if (row < chain.M && n < layer.N) {
          float d = 0.0f;
          if (source.sums)
            d = source.sums[r * chain.sums_stride + n];
          else if (source.grad)
            d = value_of(source.grad[row * chain.grad_m + n * chain.grad_n]);
          const float kept =
              layer.mask ? kept_factor(layer.mask, row, n, layer.N, layer.scale) : 1.0f;
          if (layer.mask) d *= kept;
          const float before = z ? value_of(z[at]) : 0.0f;
          value = act.value(before);
          if (layer.gated) {
            const float factor = value_of(v[at]);
            of_up = d * value;
            d *= factor;
            value *= factor;
          }
          of_gate = act.gradient(before, d);
          if (layer.mask) value *= kept;
        }
        if (source.sums || source.grad) {
          gradients[r * chain.wide_stride + n] = rounded<T>(of_gate);
          if (layer.gated) gradients[r * chain.wide_stride + N + n] = rounded<T>(of_up);
        }
        if (values) values[r * chain.stride + n] = rounded<T>(value);
      }
  });
}

// The gradients of a layer's input as sums: those of its products times its weights.
template <class T>
__device__ void multiply_gradients(const NarrowChain& chain, const NarrowLayer& layer,
                                   const T* gradients, const T* resident, T* panel,
                                   float* sums_tile) {
  using Product = WarpProduct<T>;
  float sums[kTilesOfWarp][4] = {};
  const int K = padded(layer.K), products = products_of(layer);
  const int stride = K + kPad<T>, depth = chain.resident ? products : kPanelDepth<T>;
  const int column = 8 * (warp_number() / 2);
  for (int q0 = 0; q0 < products; q0 += depth) {
    const int own = smaller(depth, products - q0);
    const T* weights = resident + layer.resident;
    if (!chain.resident) {
      weights = panel;
      copy_products(layer, q0, own, 0, K, panel, stride);
      __syncthreads();  // the panel is there
    }
    const T* const a = gradients + warp_number() % 2 * 16 * chain.wide_stride + q0;
    for (int q = 0; q < own; q += Product::kDepth) {
      const typename Product::A rows = Product::load_a(a + q, chain.wide_stride);
      TORCHWELD_UNROLL
      for (int tile = 0; tile < kTilesOfWarp; ++tile) {
        const int k = column + 8 * kWarpColumns * tile;
        if (k >= K) continue;
        Product::multiply(sums[tile], rows,
                          Product::load_b_turned(weights + q * stride + k, stride));
      }
    }
    if (!chain.resident) __syncthreads();  // the panel was read: sums or another panel follow
  }
  TORCHWELD_UNROLL
  for (int tile = 0; tile < kTilesOfWarp; ++tile) {
    const int k = column + 8 * kWarpColumns * tile;
    if (k < K) store_sums(sums[tile], sums_tile + k, chain.sums_stride);
  }
}

// Adds gradientsᵀ · values to the sums for the gradients of a layer's weights. Each sum is always
// added to by the same thread.
template <class T>
__device__ void add_weight_gradients(const NarrowChain& chain, const NarrowLayer& layer, bool first,
                                     const T* gradients, const T* values, float* workspace) {
  using Product = WarpProduct<T>;
  const int K = padded(layer.K), N = padded(layer.N), columns = 8 * kTilesOfWarp;
  const int row_tiles = products_of(layer) / 16;
  const int jobs = row_tiles * ((K + columns - 1) / columns);
  for (int job = warp_number(); job < jobs; job += kWarps) {
    const int q0 = job % row_tiles * 16, k0 = job / row_tiles * columns;
    const NarrowProduct& product = q0 < N ? layer.gate : layer.up;
    if (product.weight_sums < 0) continue;
    float sums[kTilesOfWarp][4] = {};
    for (int r = 0; r < kRows; r += Product::kDepth) {
      const typename Product::A rows =
          Product::load_a_turned(gradients + r * chain.wide_stride + q0, chain.wide_stride);
      TORCHWELD_UNROLL
      for (int tile = 0; tile < kTilesOfWarp; ++tile) {
        const int k = k0 + 8 * tile;
        if (k >= K) continue;
        Product::multiply(sums[tile], rows,
                          Product::load_b_turned(values + r * chain.stride + k, chain.stride));
      }
    }
    float* const to = workspace + product.weight_sums;
    const int n = q0 % N + lane_number() / 4;
    TORCHWELD_UNROLL
    for (int tile = 0; tile < kTilesOfWarp; ++tile) TORCHWELD_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int row = n + i / 2 * 8, k = k0 + 8 * tile + 2 * (lane_number() % 4) + i % 2;
      if (row >= layer.N || k >= layer.K) continue;
      float* const sum = to + row * layer.K + k;
      *sum = first ? sums[tile][i] : *sum + sums[tile][i];
    }
  }
}
template <class T>
__device__ void add_bias_gradients(const NarrowChain& chain, const NarrowLayer& layer, bool first,
                                   const T* gradients, float* workspace) {
  const int N = padded(layer.N);
  for (int q = int(threadIdx.x); q < products_of(layer); q += kThreads) {
    const NarrowProduct& product = q < N ? layer.gate : layer.up;
    const int n = q % N;
    if (product.bias_sums < 0 || n >= layer.N) continue;
    float sum = 0.0f;
    for (int r = 0; r < kRows; ++r) sum += value_of(gradients[r * chain.wide_stride + q]);
    float* const to = workspace + product.bias_sums + n;
    *to = first ? sum : *to + sum;
  }
}

// Rows of the gradient of x, contiguous.
template <class T>
__device__ void store_input_gradients(const NarrowChain& chain, int64_t row0,
                                      const float* sums_tile) {
  const int K = chain.layers[0].K;
  T* const to = static_cast<T*>(chain.grad_x);
  for (int r = warp_number(); r < kRows && row0 + r < chain.M; r += kWarps)
    for (int k = lane_number(); k < K; k += kLanesOfWarp)
      to[(row0 + r) * K + k] = rounded<T>(sums_tile[r * chain.sums_stride + k]);
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocksOfProcessor)
    torchweld_cuda_narrow_backward(const __grid_constant__ NarrowChain chain, const T* grad_y) {
  TORCHWELD_SHARED_MEMORY(memory);
  T* const values = reinterpret_cast<T*>(memory + chain.values);
  T* gradients = reinterpret_cast<T*>(memory + chain.gradients);
  T* below = gradients + kRows * chain.wide_stride;
  T* const panel = reinterpret_cast<T*>(memory + chain.scratch);
  float* const sums_tile = reinterpret_cast<float*>(memory + chain.scratch);
  T* const resident = reinterpret_cast<T*>(memory + chain.weights);
  float* const workspace = chain.workspace + blockIdx.x * chain.workspace_of_block;
  if (chain.resident) copy_resident_weights(chain, resident);
  for (int64_t tile = blockIdx.x; tile < chain.tiles; tile += gridDim.x) {
    const int64_t row0 = tile * kRows;
    const bool first = tile == blockIdx.x;
    finish_gradients<T>(chain, chain.layers[chain.count - 1], row0, {nullptr, grad_y}, gradients,
                        nullptr);
    __syncthreads();  // gradients of the last layer are there, and so are resident weights
    for (int i = chain.count - 1; i >= chain.lowest; --i) {
      const NarrowLayer& layer = chain.layers[i];
      const bool goes_on = i > chain.lowest || chain.grad_x;
      if (goes_on) multiply_gradients(chain, layer, gradients, resident, panel, sums_tile);
      __syncthreads();  // the sums are there; the layer above has read `values` and `below`
      if (i > 0) {
        const GradientSource<T> source{goes_on ? sums_tile : nullptr, nullptr};
        finish_gradients<T>(chain, chain.layers[i - 1], row0, source, below, values);
      } else {
        if (goes_on) store_input_gradients<T>(chain, row0, sums_tile);
        copy_rows(chain.x, chain.M, chain.x_m, chain.x_k, row0, layer.K, values, chain.stride);
      }
      __syncthreads();  // values and gradients of the layer below are there; the sums were read
      if (layer.wanted & 1) add_weight_gradients(chain, layer, first, gradients, values, workspace);
      if (layer.wanted & 2) add_bias_gradients(chain, layer, first, gradients, workspace);
      T* const done = gradients;
      gradients = below;
      below = done;
    }
    // The next rows' gradients go where nobody reads: the lowest layer's were in the other half.
  }
}

}  // namespace
