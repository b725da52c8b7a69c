// Which of an op's tensors belong to which layer.
#pragma once
#include <ATen/ATen.h>

#include <optional>

#include "block_spec.h"

namespace torchweld {

using at::Tensor;
using at::TensorList;

// The tensors of one layer, in the order the op gets them.
struct LayerTensors {
  const LayerSpec& spec;
  TensorList list;

  Tensor weight(int i) const {
    const Tensor& w = list[i * (spec.bias ? 2 : 1)];
    return spec.transposed ? w.t() : w;
  }
  std::optional<Tensor> bias(int i) const {
    return spec.bias ? std::optional<Tensor>(list[i * 2 + 1]) : std::nullopt;
  }
};

inline LayerTensors tensors_of(const Spec& spec, size_t layer, TensorList params) {
  size_t first = 0;
  for (size_t i = 0; i < layer; ++i) first += size_t(spec[i].tensors());
  return {spec[layer], params.slice(first, size_t(spec[layer].tensors()))};
}

}  // namespace torchweld
