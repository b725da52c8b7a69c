// From a tile of sums to the layer's output: adds the bias, applies activation and gate, and
// converts to the destination's element type. There is one function per activation, gating and
// destination type; each part of a layer chooses one.
#pragma once
#include "activations.h"
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

template <class C, class D>
using Finish = void (*)(const C* tile, int64_t ldt, int64_t rows, const C* bias, const Layer& layer,
                        int64_t panel, D* out, int64_t ldo, bool padded);

template <Act act, bool gated, class C, class D>
void finish_tile(const C* tile, int64_t ldt, int64_t rows, const C* bias, const Layer& layer,
                 int64_t panel, D* out, int64_t ldo, bool padded) {
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
      Vec<C> value = activate<act>(load(sums) + (h ? bias1 : bias0), p0, p1);
      if constexpr (gated) value *= load(sums + L) + bias1;
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

template <class C, class D>
Finish<C, D> finish_for(const Layer& layer) {
  switch (layer.act) {
#define ACTIVATION(name, ...) \
  case Act::name:             \
    return layer.gated ? finish_tile<Act::name, true, C, D> : finish_tile<Act::name, false, C, D>;
#include "activations.inc"
#undef ACTIVATION
  }
  __builtin_unreachable();
}

}  // namespace
