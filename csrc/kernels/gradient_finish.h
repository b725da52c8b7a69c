// From the gradient of a layer's output to the gradient of its pre-activations, panel by panel:
// undoes dropout, activation and gate, sums up the bias gradients, and makes the layer's output
// again, which the next layer's weight gradient needs.
#pragma once
#include "activations.h"
#include "micro_kernels.h"
#include "training_rows.h"

namespace {

// Where the results for one block of rows go. Gradients are [rows, ld], the gate's columns before
// up's; outputs are panels [rows][kPanel], side by side.
template <class C>
struct PreActivationGradients {
  C* data;
  int64_t ld;
  int64_t up;              // the column where up's gradients begin; 0 if not gated
  C* outputs;              // or null
  C *up_bias, *gate_bias;  // sums of each column, or null
  bool first;              // of the blocks: sums begin anew
};

// One panel: kPanel<C> columns from n0 on. `from` has the gradients of the outputs, from n0 on.
template <class T, class S>
using GradientFinish = void (*)(const S* from, int64_t ld_from, int64_t rows, int64_t n0,
                                const Layer& layer, const TrainingRows<T>& kept,
                                const PreActivationGradients<compute_t<T>>& to);

// Bias gradients are sums over rows. A running sum covers only this many: over 512 equal rows, one
// running sum was off by three times what the numerical rule allows.
constexpr int64_t kBiasRun = 32;

template <class C>
TW_INLINE void add_to(C* sums, Vec<C> value, bool first) {
  store(sums, first ? value : load(sums) + value);
}

template <Act act, bool gated, class T, class S>
void finish_gradient(const S* from, int64_t ld_from, int64_t rows, int64_t n0, const Layer& layer,
                     const TrainingRows<T>& kept, const PreActivationGradients<compute_t<T>>& to) {
  using C = compute_t<T>;
  constexpr int L = kLanes<C>, P = kPanel<C>;
  const C p0 = C(layer.p0), p1 = C(layer.p1);
  for (int h = 0; h < 2; ++h) {
    const int64_t n = n0 + h * L, valid = layer.N - n;
    if (valid <= 0) break;
    Vec<C> sum{}, gate_sum{}, total{}, gate_total{};
    for (int64_t m = 0; m < rows; ++m) {
      if (m % kBiasRun == 0) {
        total += sum;
        gate_total += gate_sum;
        sum = gate_sum = Vec<C>{};
      }
      const S* at = from + m * ld_from + h * L;
      Vec<C> g = valid >= L ? load(at) : load_first(at, valid);
      if (kept.mask) g *= kept.factors(m, n);
      Vec<C> z{}, output{};
      if (gated || act != Act::identity || to.outputs)
        z = TrainingRows<T>::get(kept.z + m * kept.N + n, valid);
      C* gradient = to.data + m * to.ld + n;
      if constexpr (gated) {
        const Vec<C> up = TrainingRows<T>::get(kept.up + m * kept.N + n, valid);
        const Vec<C> activated = activate<act>(z, p0, p1);
        const Vec<C> gate_gradient = activation_gradient<act>(z, g * up, p0, p1);
        g *= activated;
        output = activated * up;
        store(gradient, gate_gradient);
        store(gradient + to.up, g);
        gate_sum += gate_gradient;
      } else {
        if (to.outputs) output = activate<act>(z, p0, p1);
        g = activation_gradient<act>(z, g, p0, p1);
        store(gradient, g);
      }
      sum += g;
      if (to.outputs) {
        if (kept.mask) output *= kept.factors(m, n);
        store(to.outputs + n0 * rows + m * P + h * L, output);
      }
    }
    if (to.up_bias) add_to(to.up_bias + n, total + sum, to.first);
    if (gated && to.gate_bias) add_to(to.gate_bias + n, gate_total + gate_sum, to.first);
  }
}

template <class T, class S>
GradientFinish<T, S> gradient_finish_for(const Layer& layer) {
  switch (layer.act) {
#define ACTIVATION(name, ...)                                   \
  case Act::name:                                               \
    return layer.gated ? finish_gradient<Act::name, true, T, S> \
                       : finish_gradient<Act::name, false, T, S>;
#include "activations.inc"
#undef ACTIVATION
  }
  __builtin_unreachable();
}

// The outputs alone, where no gradient goes further back: panels of these rows from n0 on.
template <class T>
using OutputsAgain = void (*)(int64_t rows, int64_t n0, const Layer& layer,
                              const TrainingRows<T>& kept, compute_t<T>* outputs);

template <Act act, bool gated, class T>
void make_outputs(int64_t rows, int64_t n0, const Layer& layer, const TrainingRows<T>& kept,
                  compute_t<T>* outputs) {
  using C = compute_t<T>;
  constexpr int L = kLanes<C>;
  for (int64_t m = 0; m < rows; ++m)
    for (int h = 0; h < 2; ++h) {
      const int64_t n = n0 + h * L, valid = layer.N - n, at = m * kept.N + n;
      if (valid <= 0) break;
      Vec<C> value =
          activate<act>(TrainingRows<T>::get(kept.z + at, valid), C(layer.p0), C(layer.p1));
      if constexpr (gated) value *= TrainingRows<T>::get(kept.up + at, valid);
      if (kept.mask) value *= kept.factors(m, n);
      store(outputs + n0 * rows + m * kPanel<C> + h * L, value);
    }
}
template <class T>
OutputsAgain<T> outputs_again_for(const Layer& layer) {
  switch (layer.act) {
#define ACTIVATION(name, ...) \
  case Act::name:             \
    return layer.gated ? make_outputs<Act::name, true, T> : make_outputs<Act::name, false, T>;
#include "activations.inc"
#undef ACTIVATION
  }
  __builtin_unreachable();
}

}  // namespace
