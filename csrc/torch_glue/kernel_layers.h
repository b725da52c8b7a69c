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
  p.weight = static_cast<const char*>(p.weight) + skip * p.stride_n * int64_t(element);
  p.stride_n *= step;
  if (p.bias) {
    p.bias = static_cast<const char*>(p.bias) + skip * p.bias_stride * int64_t(element);
    p.bias_stride *= step;
  }
  return p;
}

using Layers = c10::SmallVector<Layer, 4>;

inline Layers natural_layers(TensorList params, const Spec& spec,
                             const std::vector<LayerSizes<int64_t>>& sizes, DType dtype) {
  Layers layers(spec.size());
  for (size_t i = 0; i < spec.size(); ++i) {
    const LayerTensors t = tensors_of(spec, i, params);
    const LayerSpec& s = spec[i];
    const int step = s.bias ? 2 : 1;
    Layer& l = layers[i];
    l.K = sizes[i].K;
    l.N = sizes[i].N;
    l.act = s.act;
    l.p0 = s.p0;
    l.p1 = s.p1;
    l.gated = s.gated();
    const Product one = product_of(s, t.list[0], s.bias ? &t.list[1] : nullptr);
    const size_t e = size_of(dtype);
    switch (s.gate) {
      case Gate::none:
        l.up = one;
        break;
      case Gate::separate:
        l.gate = one;
        l.up = product_of(s, t.list[step], s.bias ? &t.list[step + 1] : nullptr);
        break;
      case Gate::first:
        l.gate = one;
        l.up = part_of(one, l.N, 1, e);
        break;
      case Gate::second:
        l.up = one;
        l.gate = part_of(one, l.N, 1, e);
        break;
      case Gate::interleaved:
        l.gate = part_of(one, 0, 2, e);
        l.up = part_of(one, 1, 2, e);
        break;
    }
  }
  return layers;
}

}  // namespace torchweld
