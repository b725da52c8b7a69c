// What layers keep, drop and give in training, as kernels take it.
#pragma once
#include <ATen/ATen.h>

#include "composed_backward.h"
#include "kernel_layers.h"

namespace torchweld {

inline c10::SmallVector<TrainingLayer, 4> training_layers(const Spec& spec, bool group,
                                                          TensorList saved, TensorList masks) {
  c10::SmallVector<TrainingLayer, 4> layers(spec.size());
  size_t next_saved = 0, next_mask = 0;
  for (size_t i = 0; i < spec.size(); ++i) {
    const size_t count = saved_count(spec[i], group || i + 1 == spec.size());
    if (!saved.empty() && count > 0) layers[i].z = saved[next_saved].data_ptr();
    if (!saved.empty() && count > 1) layers[i].up = saved[next_saved + 1].data_ptr();
    next_saved += count;
    if (spec[i].drop == 0) continue;
    layers[i].mask = masks[next_mask++].const_data_ptr<uint8_t>();
    // In float, as eager divides; float64 keeps its digits.
    layers[i].scale = 1 / (1 - spec[i].drop);
  }
  return layers;
}
inline std::vector<Tensor> contiguous(TensorList list) {
  std::vector<Tensor> found;
  for (const Tensor& t : list) found.push_back(t.contiguous());
  return found;
}

// Where the gradients of each layer go: `all` has one tensor per parameter, undefined where none is
// needed.
using GradientPlaces = c10::SmallVector<LayerGradient, 4>;
inline ProductGradient gradient_of(const Product& p) {
  return {const_cast<void*>(p.weight), p.stride_n, p.stride_k, const_cast<void*>(p.bias),
          p.bias_stride};
}
inline GradientPlaces layer_gradients(const std::vector<Tensor>& all, const Spec& spec,
                                      const std::vector<LayerSizes<int64_t>>& sizes,
                                      size_t element) {
  GradientPlaces layers;
  size_t next = 0;
  for (size_t i = 0; i < spec.size(); ++i) {
    const LayerSpec& s = spec[i];
    const auto product = [&](int w) {
      const Tensor& weight = all[next + size_t(w * (s.bias ? 2 : 1))];
      Product p;
      if (weight.defined()) p = product_of(s, weight, nullptr);
      const Tensor* bias = s.bias ? &all[next + size_t(w * 2 + 1)] : nullptr;
      if (bias && bias->defined()) {
        p.bias = bias->data_ptr();
        p.bias_stride = 1;
      }
      return p;
    };
    const LayerProducts products = products_of(
        s.gate, product(0), s.weights() > 1 ? product(1) : Product{}, sizes[i].N, element);
    layers.push_back({gradient_of(products.up), gradient_of(products.gate)});
    next += size_t(s.tensors());
  }
  return layers;
}

}  // namespace torchweld
