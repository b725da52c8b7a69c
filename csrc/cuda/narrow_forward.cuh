// A whole narrow chain in one kernel: 32 rows of x in shared memory, then layer by layer, then y.
// Values between layers are rounded to the element type, as eager's are.
#pragma once
#include "narrow_tiles.cuh"

namespace {

// Which rows of weights a warp multiplies by. In a gated layer the first half of a warp's tiles are
// columns of the gate, the second half the same columns of up.
struct ColumnGroup {
  int half, column;  // gate: 0, up: 1; from the first column of the pass on
  __device__ __forceinline__ ColumnGroup(int tile, int gated) {
    constexpr int kHalf = kTilesOfWarp / 2;
    half = gated ? tile / kHalf : 0;
    column = 8 * (warp_number() / 2 + kWarpColumns * (gated ? tile % kHalf : tile));
  }
};

// The products of columns [n0, n0 + width) as sums in shared memory: gate, then up.
template <class T>
__device__ void multiply_layer(const NarrowChain& chain, const NarrowLayer& layer, int n0,
                               int width, const T* input, const T* resident, T* panel,
                               float* sums_tile) {
  using Product = WarpProduct<T>;
  float sums[kTilesOfWarp][4] = {};
  const int K = padded(layer.K), halves = 1 + layer.gated;
  const int depth = chain.resident ? K : kPanelDepth<T>;
  for (int k0 = 0; k0 < K; k0 += depth) {
    const int own = smaller(depth, K - k0);
    const T* weights;
    int stride, up;  // rows from the gate's weights to up's
    if (chain.resident) {
      stride = resident_stride<T>(layer);
      weights = resident + layer.resident + n0 * stride;
      up = padded(layer.N);
    } else {
      stride = kPanelDepth<T> + kPad<T>;
      weights = panel;
      up = width;
      for (int half = 0; half < halves; ++half)
        copy_products(layer, half * padded(layer.N) + n0, width, k0, own,
                      panel + half * width * stride, stride);
      __syncthreads();  // the panel is there
    }
    const T* const a = input + warp_number() % 2 * 16 * chain.stride + k0;
    for (int k = 0; k < own; k += Product::kDepth) {
      const typename Product::A rows = Product::load_a(a + k, chain.stride);
      TORCHWELD_UNROLL
      for (int tile = 0; tile < kTilesOfWarp; ++tile) {
        const ColumnGroup group(tile, layer.gated);
        if (group.column >= width) continue;
        const T* const b = weights + (group.half * up + group.column) * stride + k;
        Product::multiply(sums[tile], rows, Product::load_b(b, stride));
      }
    }
    if (!chain.resident) __syncthreads();  // the panel was read: sums or another panel follow
  }
  TORCHWELD_UNROLL
  for (int tile = 0; tile < kTilesOfWarp; ++tile) {
    const ColumnGroup group(tile, layer.gated);
    if (group.column < width)
      store_sums(sums[tile], sums_tile + group.half * width + group.column, chain.sums_stride);
  }
}

template <class T>
__device__ __forceinline__ float bias_of(const NarrowProduct& product, int n) {
  if (!product.bias) return 0.0f;
  return value_of(static_cast<const T*>(product.bias)[n * product.bias_stride]);
}

// From sums to values: bias, activation, gate, dropout. Keeps pre-activations if there is room for
// them. The last layer's values go to y.
template <class T>
__device__ void finish_layer(const NarrowChain& chain, const NarrowLayer& layer, int64_t row0,
                             int n0, int width, const float* sums_tile, T* output, T* y) {
  T* const z = static_cast<T*>(layer.z);
  T* const v = static_cast<T*>(layer.v);
  with_activation(layer.act, layer.p0, layer.p1, [&](auto act) {
    for (int r = warp_number(); r < kRows; r += kWarps)
      for (int c = lane_number(); c < width; c += kLanesOfWarp) {
        const int n = n0 + c;
        const int64_t row = row0 + r, at = row * layer.N + n;
        float value = 0.0f;
        if (row < chain.M && n < layer.N) {
          const float* const own = sums_tile + r * chain.sums_stride + c;
          const float gate = own[0] + bias_of<T>(layer.gate, n);
          if (z) z[at] = rounded<T>(gate);
          value = act.value(gate);
          if (layer.gated) {
            const float up = own[width] + bias_of<T>(layer.up, n);
            if (v) v[at] = rounded<T>(up);
            value *= up;
          }
          if (layer.mask) value *= kept_factor(layer.mask, row, n, layer.N, layer.scale);
          if (y) y[at] = rounded<T>(value);
        }
        if (!y) output[r * chain.stride + n] = rounded<T>(value);
      }
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocksOfProcessor)
    torchweld_cuda_narrow(const __grid_constant__ NarrowChain chain, T* y) {
  TORCHWELD_SHARED_MEMORY(memory);
  T* input = reinterpret_cast<T*>(memory + chain.values);
  T* output = input + kRows * chain.stride;
  // A panel is read before sums are written, and sums before the next panel.
  T* const panel = reinterpret_cast<T*>(memory + chain.scratch);
  float* const sums_tile = reinterpret_cast<float*>(memory + chain.scratch);
  T* const resident = reinterpret_cast<T*>(memory + chain.weights);
  if (chain.resident) copy_resident_weights(chain, resident);
  for (int64_t tile = blockIdx.x; tile < chain.tiles; tile += gridDim.x) {
    const int64_t row0 = tile * kRows;
    copy_rows(chain.x, chain.M, chain.x_m, chain.x_k, row0, chain.layers[0].K, input, chain.stride);
    __syncthreads();  // x is there, and so are resident weights
    for (int i = 0; i < chain.count; ++i) {
      const NarrowLayer& layer = chain.layers[i];
      const int N = padded(layer.N), most = layer.gated ? kGatedColumns : N;
      for (int n0 = 0; n0 < N; n0 += most) {
        const int width = smaller(most, N - n0);
        multiply_layer(chain, layer, n0, width, input, resident, panel, sums_tile);
        __syncthreads();  // the sums are there
        finish_layer(chain, layer, row0, n0, width, sums_tile, output,
                     i + 1 == chain.count ? y : static_cast<T*>(nullptr));
        __syncthreads();  // the values are there, and the sums were read
      }
      T* const read = input;
      input = output;
      output = read;
    }
  }
}

}  // namespace
