// Checks of what the ops of training are given beside x and the tensors of the layers.
#pragma once
#include <ATen/ATen.h>

#include "argument_checks.h"
#include "composed_backward.h"
#include "rolling_check.h"

namespace torchweld {

// One flag for x, one for each of params.
using Flags = c10::SmallVector<bool, 16>;
inline Flags flags_of(const c10::List<bool>& list) {
  Flags flags;
  for (size_t i = 0; i < list.size(); ++i) flags.push_back(list.get(i));
  return flags;
}

template <class Int>
void check_training(const Tensor& x, TensorList masks, const Spec& spec,
                    const std::vector<LayerSizes<Int>>& sizes) {
  TORCHWELD_CHECK(masks.size() == mask_count(spec), "torchweld: the spec has ", mask_count(spec),
                  " layers with dropout, ", masks.size(), " masks were given");
  size_t next = 0;
  for (size_t i = 0; i < spec.size(); ++i) {
    if (spec[i].drop == 0) continue;
    const Tensor& mask = masks[next++];
    c10::SymDimVector expected(x.sym_sizes());
    expected.back() = (c10::SymInt(sizes[i].N) + 7) / 8;
    TORCHWELD_CHECK(mask.scalar_type() == at::kByte && mask.device() == x.device() &&
                        mask.sym_sizes() == c10::SymIntArrayRef(expected),
                    "torchweld: the mask of layer ", i, " is ", mask.sym_sizes(), " of ",
                    type_name(mask), " on ", mask.device(), "; expected ",
                    c10::SymIntArrayRef(expected), " of uint8 on ", x.device(),
                    ", as torchweld::dropout_mask makes it");
  }
}
template <class Int>
void check_values(const Tensor& given, const Tensor& x, const Int& features, const char* what) {
  c10::SymDimVector expected(x.sym_sizes());
  expected.back() = features;
  TORCHWELD_CHECK(given.scalar_type() == x.scalar_type() && given.device() == x.device() &&
                      given.sym_sizes() == c10::SymIntArrayRef(expected),
                  "torchweld: ", what, " is ", given.sym_sizes(), " of ", type_name(given), " on ",
                  given.device(), "; expected ", c10::SymIntArrayRef(expected), " of ",
                  type_name(x), " on ", x.device());
}
template <class Int>
void check_saved(TensorList saved, const Tensor& x, const Spec& spec, bool group,
                 const std::vector<LayerSizes<Int>>& sizes) {
  if (saved.empty() || is_checksum(saved)) return;
  TORCHWELD_CHECK(saved.size() == saved_count(spec, group), "torchweld: the forward saves ",
                  saved_count(spec, group), " tensors for this spec, ", saved.size(),
                  " were given; give all, or their checksum or none to have them computed again");
  size_t next = 0;
  for (size_t i = 0; i < spec.size(); ++i)
    for (size_t j = saved_count(spec[i], group || i + 1 == spec.size()); j > 0; --j)
      check_values(saved[next++], x, sizes[i].N, "a saved pre-activation");
}
template <class Int>
std::vector<LayerSizes<Int>> check_backward(TensorList grads, const Tensor& x, TensorList params,
                                            TensorList saved, TensorList masks, const Spec& spec,
                                            size_t needed, bool group) {
  auto sizes = check_all<Int>(x, params, spec, group);
  check_training(x, masks, spec, sizes);
  check_saved(saved, x, spec, group, sizes);
  TORCHWELD_CHECK(needed == 1 + params.size(), "torchweld: needed has ", needed,
                  " flags; expected one for x and one for each of ", params.size(), " tensors");
  TORCHWELD_CHECK(grads.size() == (group ? spec.size() : 1), "torchweld: ", grads.size(),
                  " gradients were given for ", group ? spec.size() : 1, " outputs");
  for (size_t i = 0; i < grads.size(); ++i)
    check_values(grads[i], x, group ? sizes[i].N : sizes.back().N, "the gradient of an output");
  return sizes;
}

// A checksum of pre-activations on the CPU; never 0.
inline uint64_t checksum_of(TensorList values) {
  uint64_t sum = 1;
  for (const Tensor& t : values) {
    const Tensor plain = t.contiguous();
    sum = checksum(static_cast<const char*>(plain.const_data_ptr()), plain.nbytes(), sum);
  }
  return sum ? sum : 1;
}
inline Tensor checksum_tensor(TensorList values) {
  const Tensor one = at::detail::empty_cpu({1}, at::kLong);
  *one.mutable_data_ptr<int64_t>() = int64_t(checksum_of(values));
  return one;
}
// Whether `again`, computed again, is what the forward saved, or took the checksum of.
inline bool are_unchanged(TensorList again, TensorList saved) {
  if (!is_checksum(saved)) return checksum_of(again) == checksum_of(saved);
  const int64_t then = saved[0].item<int64_t>();
  return then == 0 || then == int64_t(checksum_of(again));
}
inline void check_unchanged(TensorList again, TensorList saved) {
  TORCHWELD_CHECK(!is_checksum(saved) || are_unchanged(again, saved),
                  "torchweld: a weight, bias or input of a block with recompute=True was changed "
                  "between forward and backward, so its hidden values cannot be computed again; "
                  "run the forward again, or save hidden values with recompute=False");
}

}  // namespace torchweld
