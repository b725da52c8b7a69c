// The same block as a composition of aten ops. It runs on devices that our kernels do not serve,
// and under functorch and forward-mode differentiation. It also has the formula of the backward
// pass, which is made of differentiable ops and so can be differentiated again.
#pragma once
#include <ATen/ATen.h>

#include <vector>

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
inline Tensor layer_forward(const LayerTensors& layer, const Tensor& x) {
  const PreActivations p = pre_activations(layer, x);
  return layer.spec.gated() ? activation(layer.spec, p.gate) * p.up : activation(layer.spec, p.z);
}

inline Tensor composed_chain(const Tensor& x, TensorList params, std::string_view spec_text) {
  const Spec& spec = parse_spec(spec_text);
  Tensor y = x;
  for (size_t i = 0; i < spec.size(); ++i) y = layer_forward(tensors_of(spec, i, params), y);
  return y;
}
inline std::vector<Tensor> composed_group(const Tensor& x, TensorList params,
                                          std::string_view spec_text) {
  const Spec& spec = parse_spec(spec_text);
  std::vector<Tensor> ys;
  for (size_t i = 0; i < spec.size(); ++i)
    ys.push_back(layer_forward(tensors_of(spec, i, params), x));
  return ys;
}

// Gradients of one layer, from `grad`, the gradient of its output. Writes those of its tensors that
// are needed into `grads`, in order, and returns the gradient of x. `p` has the pre-activations.
inline Tensor layer_backward(const LayerTensors& layer, const PreActivations& p, const Tensor& x,
                             const Tensor& grad, bool x_needed, const bool* needed, Tensor* grads) {
  std::vector<Tensor> gz;  // one per weight
  if (!layer.spec.gated()) {
    gz = {activation_gradient(layer.spec, p.z, grad)};
  } else {
    const Tensor g = activation_gradient(layer.spec, p.gate, grad * p.up);
    const Tensor u = grad * activation(layer.spec, p.gate);
    switch (layer.spec.gate) {
      case Gate::separate:
        gz = {g, u};
        break;
      case Gate::first:
        gz = {at::cat({g, u}, -1)};
        break;
      case Gate::second:
        gz = {at::cat({u, g}, -1)};
        break;
      default:
        gz = {at::stack({g, u}, -1).flatten(-2)};
    }
  }
  Tensor grad_x;
  for (int i = 0; i < layer.spec.weights(); ++i) {
    const int w = i * (layer.spec.bias ? 2 : 1);
    const Tensor gz2 = gz[i].reshape_symint({-1, gz[i].sym_size(-1)});
    if (needed[w]) {
      const Tensor x2 = x.reshape_symint({-1, x.sym_size(-1)});
      grads[w] = layer.spec.transposed ? x2.t().mm(gz2) : gz2.t().mm(x2);
    }
    if (layer.spec.bias && needed[w + 1]) grads[w + 1] = gz2.sum(0);
    if (!x_needed) continue;
    const Tensor part = at::matmul(gz[i], layer.weight(i));
    grad_x = grad_x.defined() ? grad_x + part : part;
  }
  return grad_x;
}

// Gradients of x (first) and of the params that need one. Hidden values are computed again; the
// forward does not keep them. `needed` has one flag for x and one for each of params.
inline std::vector<Tensor> chain_backward(const Tensor& grad, const Tensor& x, TensorList params,
                                          const Spec& spec, const bool* needed) {
  std::vector<Tensor> inputs{x}, grads(1 + params.size());
  std::vector<PreActivations> kept;
  std::vector<size_t> first{1};
  for (size_t i = 0; i < spec.size(); ++i) {
    const LayerTensors layer = tensors_of(spec, i, params);
    const bool last = i + 1 == spec.size();
    first.push_back(first.back() + size_t(spec[i].tensors()));
    if (last && spec[i].act == Act::identity && !spec[i].gated()) {
      kept.emplace_back();  // its gradient does not depend on its value
      break;
    }
    kept.push_back(pre_activations(layer, inputs.back()));
    if (last) break;
    const PreActivations& p = kept.back();
    inputs.push_back(spec[i].gated() ? activation(spec[i], p.gate) * p.up
                                     : activation(spec[i], p.z));
  }
  Tensor g = grad;
  for (size_t i = spec.size(); i-- > 0;)
    g = layer_backward(tensors_of(spec, i, params), kept[i], inputs[i], g, i > 0 || needed[0],
                       needed + first[i], grads.data() + first[i]);
  grads[0] = g;
  return grads;
}

}  // namespace torchweld
