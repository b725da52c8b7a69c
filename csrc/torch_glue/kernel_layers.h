// An op's tensors as the layers that kernels take, with weights read where they lie.
// packed_weights.h does the same for packed weights.
#pragma once
#include "argument_checks.h"
#include "layer_tensors.h"

namespace torchweld {

inline const Kernels& kernels_in_use() {
  try {
    return kernels();
  } catch (const std::runtime_error& e) {
    TORCHWELD_CHECK(false, "torchweld: ", e.what());
  }
}

inline Product product_of(const LayerSpec& s, const Tensor& w, const Tensor* bias) {
  Product p;
  p.weight = w.const_data_ptr();
  p.stride_n = w.stride(s.transposed ? 1 : 0);
  p.stride_k = w.stride(s.transposed ? 0 : 1);
  if (bias) {
    p.bias = bias->const_data_ptr();
    p.bias_stride = bias->stride(0);
  }
  return p;
}
// Every `step`-th output of a product, from output `skip` on.
inline Product part_of(Product p, int64_t skip, int64_t step, size_t element) {
  if (p.weight)
    p.weight = static_cast<const char*>(p.weight) + skip * p.stride_n * int64_t(element);
  p.stride_n *= step;
  if (p.bias) {
    p.bias = static_cast<const char*>(p.bias) + skip * p.bias_stride * int64_t(element);
    p.bias_stride *= step;
  }
  return p;
}

using Layers = c10::SmallVector<Layer, 4>;

// The products of a layer that keeps gate and up in one weight, or in two, or has no gate. `first`
// is the product of the first weight, `second` that of the second, if there is one.
struct LayerProducts {
  Product up, gate;
};
inline LayerProducts products_of(Gate gate, Product first, Product second, int64_t N, size_t e) {
  switch (gate) {
    case Gate::none:
      return {first, {}};
    case Gate::separate:
      return {second, first};
    case Gate::first:
      return {part_of(first, N, 1, e), first};
    case Gate::second:
      return {first, part_of(first, N, 1, e)};
    case Gate::interleaved:
      return {part_of(first, 1, 2, e), part_of(first, 0, 2, e)};
  }
  TORCH_INTERNAL_ASSERT(false);
}

inline Layers natural_layers(TensorList params, const Spec& spec,
                             const std::vector<LayerSizes<int64_t>>& sizes, DType dtype) {
  Layers layers(spec.size());
  for (size_t i = 0; i < spec.size(); ++i) {
    const LayerTensors t = tensors_of(spec, i, params);
    const LayerSpec& s = spec[i];
    Layer& l = layers[i];
    l.K = sizes[i].K;
    l.N = sizes[i].N;
    l.act = s.act;
    l.p0 = s.p0;
    l.p1 = s.p1;
    l.gated = s.gated();
    const auto product = [&](int w) {
      const int at = w * (s.bias ? 2 : 1);
      return product_of(s, t.list[at], s.bias ? &t.list[at + 1] : nullptr);
    };
    const LayerProducts products = products_of(
        s.gate, product(0), s.weights() > 1 ? product(1) : Product{}, l.N, size_of(dtype));
    l.up = products.up;
    l.gate = products.gate;
  }
  return layers;
}

}  // namespace torchweld
