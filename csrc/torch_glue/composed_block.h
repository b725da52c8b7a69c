// The same block as a composition of aten ops. It runs on devices that our kernels do not serve,
// and under functorch and forward-mode differentiation. composed_backward.h has its backward.
#pragma once
#include <ATen/ATen.h>

#include <vector>

#include "argument_checks.h"
#include "layer_tensors.h"

namespace torchweld {

// Torch's silu_backward and mish_backward cannot be differentiated again.
inline Tensor silu_gradient(const Tensor& g, const Tensor& z) {
  if (!at::GradMode::is_enabled()) return at::silu_backward(g, z);
  const Tensor s = at::sigmoid(z);
  return g * s * (1 + z * (1 - s));
}
inline Tensor mish_gradient(const Tensor& g, const Tensor& z) {
  if (!at::GradMode::is_enabled()) return at::mish_backward(g, z);
  const Tensor t = at::tanh(at::softplus(z));
  return g * (t + z * at::sigmoid(z) * (1 - t * t));
}
inline Tensor quick_gelu_gradient(const Tensor& g, const Tensor& z) {
  const Tensor s = at::sigmoid(z * 1.702);
  return g * (s + z * 1.702 * s * (1 - s));
}

inline Tensor activation(const LayerSpec& layer, const Tensor& z) {
  [[maybe_unused]] const double p0 = layer.p0, p1 = layer.p1;
  switch (layer.act) {
#define ACTIVATION(name, count, d0, d1, kernel, derivative, aten, gradient) \
  case Act::name:                                                           \
    return aten;
#include "kernels/activations.inc"
#undef ACTIVATION
  }
  TORCH_INTERNAL_ASSERT(false);
}
// The gradient with respect to z, from g, the gradient with respect to act(z).
inline Tensor activation_gradient(const LayerSpec& layer, const Tensor& z, const Tensor& g) {
  [[maybe_unused]] const double p0 = layer.p0, p1 = layer.p1;
  switch (layer.act) {
#define ACTIVATION(name, count, d0, d1, kernel, derivative, aten, gradient) \
  case Act::name:                                                           \
    return gradient;
#include "kernels/activations.inc"
#undef ACTIVATION
  }
  TORCH_INTERNAL_ASSERT(false);
}

// Pre-activations of a layer: one product, or gate and up.
struct PreActivations {
  Tensor z, gate, up;
};
inline PreActivations pre_activations(const LayerTensors& layer, const Tensor& x) {
  const Tensor z = at::linear(x, layer.weight(0), layer.bias(0));
  const auto halves = [&] { return z.chunk(2, -1); };
  switch (layer.spec.gate) {
    case Gate::none:
      return {z, {}, {}};
    case Gate::separate:
      return {{}, z, at::linear(x, layer.weight(1), layer.bias(1))};
    case Gate::first:
      return {{}, halves()[0], halves()[1]};
    case Gate::second:
      return {{}, halves()[1], halves()[0]};
    case Gate::interleaved:
      return {{}, z.slice(-1, 0, std::nullopt, 2), z.slice(-1, 1, std::nullopt, 2)};
  }
  TORCH_INTERNAL_ASSERT(false);
}
inline Tensor layer_output(const LayerSpec& spec, const PreActivations& p) {
  return spec.gated() ? activation(spec, p.gate) * p.up : activation(spec, p.z);
}
inline Tensor layer_forward(const LayerTensors& layer, const Tensor& x) {
  return layer_output(layer.spec, pre_activations(layer, x));
}

inline Tensor composed_chain(const Tensor& x, TensorList params, std::string_view spec_text) {
  const Spec& spec = spec_without_dropout(spec_text);
  Tensor y = x;
  for (size_t i = 0; i < spec.size(); ++i) y = layer_forward(tensors_of(spec, i, params), y);
  return y;
}
inline std::vector<Tensor> composed_group(const Tensor& x, TensorList params,
                                          std::string_view spec_text) {
  const Spec& spec = spec_without_dropout(spec_text);
  std::vector<Tensor> ys;
  for (size_t i = 0; i < spec.size(); ++i)
    ys.push_back(layer_forward(tensors_of(spec, i, params), x));
  return ys;
}
// With torch's own dropout, so that functorch's rules for random numbers hold.
inline Tensor composed_training(const Tensor& x, TensorList params, std::string_view spec_text) {
  const Spec& spec = spec_of(spec_text);
  Tensor y = x;
  for (size_t i = 0; i < spec.size(); ++i) {
    y = layer_forward(tensors_of(spec, i, params), y);
    if (spec[i].drop > 0) y = at::dropout(y, spec[i].drop, true);
  }
  return y;
}

}  // namespace torchweld
