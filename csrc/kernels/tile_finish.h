// From a tile of sums to the layer's output: adds the bias, applies activation and gate, and
// converts to the destination's element type. There is one function per activation, gating and
// destination type; each part of a layer chooses one.
#pragma once
#include "activations.h"
#include "training_rows.h"
#include "weight_panels.h"

namespace {

// Where a layer's output goes. A hidden buffer is padded to whole registers and gets zeros there; a
// result is contiguous and must not be written beyond N.
template <class D>
struct Destination {
  D* data;
  int64_t ld;
  bool padded;
};

template <class T, class D>
using Finish = void (*)(const compute_t<T>* tile, int64_t ldt, int64_t rows,
                        const compute_t<T>* bias, const Layer& layer, int64_t panel, D* out,
                        int64_t ldo, bool padded, const TrainingRows<T>* training);

template <Act act, bool gated, class T, class D>
void finish_tile(const compute_t<T>* tile, int64_t ldt, int64_t rows, const compute_t<T>* bias,
                 const Layer& layer, int64_t panel, D* out, int64_t ldo, bool padded,
                 const TrainingRows<T>* training) {
  using C = compute_t<T>;
  constexpr int L = kLanes<C>, kOutputs = gated ? 1 : 2;
  const C p0 = C(layer.p0), p1 = C(layer.p1);
  const Vec<C> bias0 = load(bias), bias1 = load(bias + L);
  const int64_t n0 = panel * kOutputs * L;
  for (int h = 0; h < kOutputs; ++h) {
    const int64_t n = n0 + h * L, valid = layer.N - n;
    if (valid <= 0) break;
    const Mask<C> real = first_lanes<C>(valid);
    for (int64_t m = 0; m < rows; ++m) {
      const C* sums = tile + m * ldt + h * L;
      const Vec<C> z = load(sums) + (h ? bias1 : bias0);
      Vec<C> value = activate<act>(z, p0, p1), up{};
      if constexpr (gated) {
        up = load(sums + L) + bias1;
        value *= up;
      }
      if (training) {
        training->keep(m, n, z, up);
        if (training->mask) value *= training->factors(m, n);
        if (!out) continue;
      }
      D* to = out + m * ldo + n;
      if (valid >= L)
        store(to, value);
      else if (padded)
        store(to, keep<C>(value, real));
      else
        store_first(to, value, valid);
    }
  }
}

template <class T, class D>
Finish<T, D> finish_for(const Layer& layer) {
  switch (layer.act) {
#define ACTIVATION(name, ...) \
  case Act::name:             \
    return layer.gated ? finish_tile<Act::name, true, T, D> : finish_tile<Act::name, false, T, D>;
#include "activations.inc"
#undef ACTIVATION
  }
  __builtin_unreachable();
}

}  // namespace
