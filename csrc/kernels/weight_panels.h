// Weights as panels: [panel][K][kPanel], with zeros in columns beyond N, then the bias in the
// compute type. `pack_layer` makes the lasting copy for inference. `pack_panel` makes one block of
// one panel, also during a call whose weights are not packed.
#pragma once
#include <algorithm>
#include <type_traits>

#include "kernel_api.h"
#include "micro_kernels.h"
#include "scratch.h"

namespace {

using torchweld::Layer;
using torchweld::Product;

// Outputs per panel. A gated layer's panel is half gate, half up.
template <class C>
int64_t panel_outputs(const Layer& layer) {
  return layer.gated ? kLanes<C> : kPanel<C>;
}
template <class C>
int64_t panel_count(const Layer& layer) {
  const int64_t width = panel_outputs<C>(layer);
  return (layer.N + width - 1) / width;
}

// One register's column of a panel: its product, its first output, and how many of its outputs
// exist.
struct Column {
  const Product* product;
  int64_t n0;
  int64_t valid;
};
template <class C>
Column column_of(const Layer& layer, int64_t panel, int half) {
  const int64_t L = kLanes<C>;
  const int64_t n0 = layer.gated ? panel * L : panel * 2 * L + half * L;
  return {layer.gated && half == 0 ? &layer.gate : &layer.up, n0,
          std::clamp<int64_t>(layer.N - n0, 0, L)};
}

// kLanes elements as integers, to move them without conversion.
template <class T>
struct Bits {
  static constexpr int L = kLanes<compute_t<T>>;
  using Int = std::conditional_t<sizeof(T) == 2, uint16_t,
                                 std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
  typedef Int type __attribute__((vector_size(L * sizeof(T))));
  typedef Int loose __attribute__((vector_size(L * sizeof(T)), aligned(sizeof(T)), may_alias));
};

// The order that interleaves two registers, from lane `from` of each.
template <int L, int from>
struct Interleaved {
  static constexpr int lane(int i) { return (i % 2) * L + from + i / 2; }
};

// Transposes L x L elements. Interleaving the upper half of the rows with the lower half, log2(L)
// times, is a transpose; each step shuffles two registers.
template <class T>
TW_INLINE void transpose_block(const T* from, int64_t ld_from, T* to, int64_t ld_to) {
  using V = typename Bits<T>::type;
  using Loose = typename Bits<T>::loose;
  constexpr int L = Bits<T>::L;
  constexpr auto lanes = std::make_integer_sequence<int, L>{};
  V row[L];
  TW_UNROLL for (int i = 0; i < L; ++i) {
    row[i] = *reinterpret_cast<const Loose*>(from + i * ld_from);
  }
  TW_UNROLL for (int step = 1; step < L; step *= 2) {
    V next[L];
    TW_UNROLL for (int i = 0; i < L / 2; ++i) {
      next[2 * i] = shuffled<Interleaved<L, 0>>(row[i], row[i + L / 2], lanes);
      next[2 * i + 1] = shuffled<Interleaved<L, L / 2>>(row[i], row[i + L / 2], lanes);
    }
    TW_UNROLL for (int i = 0; i < L; ++i) { row[i] = next[i]; }
  }
  TW_UNROLL for (int i = 0; i < L; ++i) { *reinterpret_cast<Loose*>(to + i * ld_to) = row[i]; }
}

template <class T>
void pack_panel(const Layer& layer, int64_t panel, int64_t k0, int64_t k1, T* out) {
  using C = compute_t<T>;
  constexpr int L = kLanes<C>;
  for (int half = 0; half < 2; ++half) {
    const Column c = column_of<C>(layer, panel, half);
    const int64_t sn = c.product->stride_n, sk = c.product->stride_k;
    const T* w = static_cast<const T*>(c.product->weight) + c.n0 * sn;
    T* to = out + half * L;
    if (c.valid < L)
      for (int64_t k = k0; k < k1; ++k) std::memset(&to[(k - k0) * 2 * L], 0, L * sizeof(T));
    if (sn == 1) {
      for (int64_t k = k0; k < k1; ++k)
        std::memcpy(&to[(k - k0) * 2 * L], &w[k * sk], size_t(c.valid) * sizeof(T));
      continue;
    }
    int64_t k = k0;
    if (sk == 1 && c.valid == L)
      for (; k + L <= k1; k += L) transpose_block(w + k, sn, to + (k - k0) * 2 * L, 2 * L);
    for (int64_t j = 0; j < c.valid; ++j)
      for (int64_t i = k; i < k1; ++i) to[(i - k0) * 2 * L + j] = w[j * sn + i * sk];
  }
  for (int64_t k = k0; k < k1; ++k) pair_up(out + (k - k0) * 2 * L);
}

// The bias of one panel, zero if the layer has none.
template <class T>
void panel_bias(const Layer& layer, int64_t panel, compute_t<T>* out) {
  using C = compute_t<T>;
  for (int half = 0; half < 2; ++half) {
    const Column c = column_of<C>(layer, panel, half);
    const T* bias = static_cast<const T*>(c.product->bias);
    C* to = out + half * kLanes<C>;
    store(to, Vec<C>{});
    if (!bias) continue;
    if (c.product->bias_stride == 1) {
      store(to, c.valid == kLanes<C> ? load(bias + c.n0) : load_first(bias + c.n0, c.valid));
    } else {
      T element[kLanes<C>] = {};
      for (int64_t j = 0; j < c.valid; ++j) element[j] = bias[(c.n0 + j) * c.product->bias_stride];
      store(to, load(element));
    }
  }
}

// Rounded up so that the bias, and the next layer, start on a cache line.
template <class T>
size_t panels_bytes(const Layer& layer) {
  using C = compute_t<T>;
  return whole_lines(size_t(panel_count<C>(layer)) * layer.K * kPanel<C> * sizeof(T));
}
template <class T>
const compute_t<T>* packed_bias(const Layer& layer) {
  return reinterpret_cast<const compute_t<T>*>(static_cast<const char*>(layer.packed) +
                                               panels_bytes<T>(layer));
}

template <class T>
size_t packed_layer_bytes(const Layer& layer) {
  using C = compute_t<T>;
  return panels_bytes<T>(layer) +
         whole_lines(size_t(panel_count<C>(layer)) * kPanel<C> * sizeof(C));
}

template <class T>
void pack_layer(const Layer& layer, void* out) {
  using C = compute_t<T>;
  T* panels = static_cast<T*>(out);
  C* bias = reinterpret_cast<C*>(static_cast<char*>(out) + panels_bytes<T>(layer));
  for (int64_t p = 0; p < panel_count<C>(layer); ++p) {
    pack_panel<T>(layer, p, 0, layer.K, panels + p * layer.K * kPanel<C>);
    panel_bias<T>(layer, p, bias + p * kPanel<C>);
  }
}

}  // namespace
