// What a layer keeps and drops in training, for some of its rows.
#pragma once
#include "kernel_api.h"
#include "vectors.h"

namespace {

using torchweld::Layer;
using torchweld::TrainingLayer;

template <class T>
struct TrainingRows {
  using C = compute_t<T>;
  static constexpr int L = kLanes<C>;
  T *z, *up;
  const uint8_t* mask;
  int64_t N, mask_ld;
  C scale;

  // Rows of the layer from `row` on.
  TrainingRows(const TrainingLayer& layer, int64_t N, int64_t row)
      : z(layer.z ? static_cast<T*>(layer.z) + row * N : nullptr),
        up(layer.up ? static_cast<T*>(layer.up) + row * N : nullptr),
        mask(layer.mask ? layer.mask + row * ((N + 7) / 8) : nullptr),
        N(N),
        mask_ld((N + 7) / 8),
        scale(C(layer.scale)) {}

  TW_INLINE void keep(int64_t m, int64_t n, Vec<C> z_value, Vec<C> up_value) const {
    if (z) put(z + m * N + n, z_value, N - n);
    if (up) put(up + m * N + n, up_value, N - n);
  }
  static TW_INLINE Vec<C> get(const T* from, int64_t valid) {
    return valid >= L ? load(from) : load_first(from, valid);
  }

  // What dropout multiplies columns n to n + L by: 0 or the scale. n is a multiple of L.
  TW_INLINE Vec<C> factors(int64_t m, int64_t n) const {
    const uint8_t* row = mask + m * mask_ld;
    unsigned bits = row[n / 8] >> (n % 8);
    if (L > 8 && n / 8 + 1 < mask_ld) bits |= unsigned(row[n / 8 + 1]) << 8;
    Mask<C> lane;
    for (int i = 0; i < L; ++i) lane[i] = 1 << i;
    const Mask<C> kept = ((lane - lane + int(bits)) & lane) != 0;
    return ::keep<C>(splat(scale), kept);
  }

  static TW_INLINE void put(T* to, Vec<C> value, int64_t valid) {
    if (valid >= L)
      store(to, value);
    else
      store_first(to, value, valid);
  }
};

}  // namespace
