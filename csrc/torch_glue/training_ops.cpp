// The ops of training below autograd. autograd.cpp strings them together.
//
//   dropout_mask    one bit per value, drawn as eager's dropout draws them.
//   *_saving        the forward; also returns the pre-activations that the backward needs.
//   *_backward      the gradients that are needed, and no others.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "argument_checks.h"
#include "composed_backward.h"
#include "training_ops.h"

namespace torchweld {

namespace {

// One flag for x, one for each of params.
using Flags = c10::SmallVector<bool, 16>;
Flags flags_of(const c10::List<bool>& list) {
  Flags flags;
  for (size_t i = 0; i < list.size(); ++i) flags.push_back(list.get(i));
  return flags;
}

// ---- Checks ----
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
  if (saved.empty()) return;
  TORCHWELD_CHECK(saved.size() == saved_count(spec, group), "torchweld: the forward saves ",
                  saved_count(spec, group), " tensors for this spec, ", saved.size(),
                  " were given; give all, or none to have them computed again");
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

// ---- Dropout masks ----
Tensor random_bits(const Tensor& like, const c10::SymInt& features, double p,
                   const at::TensorOptions& options) {
  TORCHWELD_CHECK(like.dim() >= 1 && features >= 1 && p > 0 && p < 1,
                  "torchweld: dropout_mask takes a tensor with a dimension of features, at least "
                  "one feature, and 0 < p < 1; p is ",
                  p, ", features ", features);
  c10::SymDimVector sizes(like.sym_sizes());
  sizes.back() = features;
  return at::empty_symint(sizes, options).bernoulli_(1 - p);
}
// Draws into bools the numbers that eager's dropout draws into values: one per value, in order.
Tensor dropout_mask_cpu(const Tensor& like, c10::SymInt features, double p) {
  const Tensor bits = random_bits(like, features, p, like.options().dtype(at::kBool));
  const int64_t N = bits.size(-1), rows = bits.numel() / N, bytes = (N + 7) / 8;
  at::DimVector sizes(bits.sizes());
  sizes.back() = bytes;
  const Tensor mask = at::empty(sizes, like.options().dtype(at::kByte));
  const bool* from = bits.const_data_ptr<bool>();
  uint8_t* to = mask.mutable_data_ptr<uint8_t>();
  for (int64_t m = 0; m < rows; ++m, from += N, to += bytes) {
    for (int64_t j = 0; j < bytes; ++j) {
      unsigned byte = 0;
      for (int64_t i = 8 * j; i < std::min<int64_t>(8 * j + 8, N); ++i)
        byte |= unsigned(from[i]) << (i - 8 * j);
      to[j] = uint8_t(byte);
    }
  }
  return mask;
}
Tensor dropout_mask_elsewhere(const Tensor& like, c10::SymInt features, double p) {
  const Tensor bits = random_bits(like, features, p, like.options().dtype(at::kByte));
  const c10::SymInt rest = (features + 7) / 8 * 8 - features;
  const Tensor whole = at::constant_pad_nd_symint(bits, {0, rest});
  const Tensor powers =
      at::bitwise_left_shift(at::ones({8}, bits.options()), at::arange(8, bits.options()));
  return (whole.unflatten_symint(-1, {(features + 7) / 8, 8}) * powers).sum(-1, false, at::kByte);
}
Tensor dropout_mask_meta(const Tensor& like, c10::SymInt features, double) {
  c10::SymDimVector sizes(like.sym_sizes());
  sizes.back() = (features + 7) / 8;
  return at::empty_symint(sizes, like.options().dtype(at::kByte));
}

// ---- Forward ----
// For calls that need no gradient; autograd.cpp handles the others.
Tensor run_training(const Tensor& x, TensorList params, std::string_view text) {
  const Spec& spec = spec_of(text);
  const std::vector<Tensor> masks = draw_masks(x, params, spec);
  return training_ops().chain_saving.call(x, params, masks, text, false)[0];
}
std::vector<Tensor> chain_saving_composed(const Tensor& x, TensorList params, TensorList masks,
                                          std::string_view text, bool save) {
  const Spec& spec = spec_of(text);
  check_training(x, masks, spec, check_all<c10::SymInt>(x, params, spec, false));
  return composed_saving(x, params, masks, spec, save);
}
std::vector<Tensor> group_saving_composed(const Tensor& x, TensorList params,
                                          std::string_view text) {
  const Spec& spec = spec_without_dropout(text);
  check_all<c10::SymInt>(x, params, spec, true);
  std::vector<Tensor> ys, saved;
  for (size_t i = 0; i < spec.size(); ++i) {
    const PreActivations p = pre_activations(tensors_of(spec, i, params), x);
    if (saved_count(spec[i], true)) append(saved, spec[i], p);
    ys.push_back(layer_output(spec[i], p));
  }
  ys.insert(ys.end(), saved.begin(), saved.end());
  return ys;
}

Tensor chain_training_below(const Tensor& x, TensorList params, std::string_view text,
                            std::optional<bool>) {
  return run_training(x, params, text);
}

// ---- Backward ----
std::vector<Tensor> chain_backward_composed(const Tensor& grad, const Tensor& x, TensorList params,
                                            TensorList saved, TensorList masks,
                                            std::string_view text, c10::List<bool> list) {
  const Spec& spec = spec_of(text);
  const Flags needed = flags_of(list);
  check_backward<c10::SymInt>(grad, x, params, saved, masks, spec, needed.size(), false);
  return needed_only(composed_backward(grad, x, params, saved, masks, spec, needed.data()),
                     needed.data());
}
std::vector<Tensor> group_backward_composed(TensorList grads, const Tensor& x, TensorList params,
                                            TensorList saved, std::string_view text,
                                            c10::List<bool> list) {
  const Spec& spec = spec_without_dropout(text);
  const Flags needed = flags_of(list);
  check_backward<c10::SymInt>(grads, x, params, saved, {}, spec, needed.size(), true);
  return needed_only(composed_group_backward(grads, x, params, saved, spec, needed.data()),
                     needed.data());
}

// ---- Meta ----
Tensor values_meta(const Tensor& x, const c10::SymInt& features) {
  c10::SymDimVector sizes(x.sym_sizes());
  sizes.back() = features;
  return at::empty_symint(sizes, x.options());
}
Tensor chain_training_meta(const Tensor& x, TensorList params, std::string_view text,
                           std::optional<bool>) {
  return values_meta(x, check_all<c10::SymInt>(x, params, spec_of(text), false).back().N);
}
void append_saved_meta(std::vector<Tensor>& results, const Tensor& x, const Spec& spec, bool group,
                       const std::vector<LayerSizes<c10::SymInt>>& sizes) {
  for (size_t i = 0; i < spec.size(); ++i)
    for (size_t j = saved_count(spec[i], group || i + 1 == spec.size()); j > 0; --j)
      results.push_back(values_meta(x, sizes[i].N));
}
std::vector<Tensor> chain_saving_meta(const Tensor& x, TensorList params, TensorList masks,
                                      std::string_view text, bool save) {
  const Spec& spec = spec_of(text);
  const auto sizes = check_all<c10::SymInt>(x, params, spec, false);
  check_training(x, masks, spec, sizes);
  std::vector<Tensor> results{values_meta(x, sizes.back().N)};
  if (save) append_saved_meta(results, x, spec, false, sizes);
  return results;
}
std::vector<Tensor> group_saving_meta(const Tensor& x, TensorList params, std::string_view text) {
  const Spec& spec = spec_without_dropout(text);
  const auto sizes = check_all<c10::SymInt>(x, params, spec, true);
  std::vector<Tensor> results;
  for (const auto& s : sizes) results.push_back(values_meta(x, s.N));
  append_saved_meta(results, x, spec, true, sizes);
  return results;
}
std::vector<Tensor> gradients_meta(const Tensor& x, TensorList params, const Flags& needed) {
  std::vector<Tensor> found;
  const auto contiguous = [](const Tensor& t) {
    return at::empty_symint(t.sym_sizes(), t.options());
  };
  if (needed[0]) found.push_back(contiguous(x));
  for (size_t i = 0; i < params.size(); ++i)
    if (needed[1 + i]) found.push_back(contiguous(params[i]));
  return found;
}
std::vector<Tensor> chain_backward_meta(const Tensor& grad, const Tensor& x, TensorList params,
                                        TensorList saved, TensorList masks, std::string_view text,
                                        c10::List<bool> list) {
  const Flags needed = flags_of(list);
  check_backward<c10::SymInt>(grad, x, params, saved, masks, spec_of(text), needed.size(), false);
  return gradients_meta(x, params, needed);
}
std::vector<Tensor> group_backward_meta(TensorList grads, const Tensor& x, TensorList params,
                                        TensorList saved, std::string_view text,
                                        c10::List<bool> list) {
  const Flags needed = flags_of(list);
  check_backward<c10::SymInt>(grads, x, params, saved, {}, spec_without_dropout(text),
                              needed.size(), true);
  return gradients_meta(x, params, needed);
}

}  // namespace

TORCH_LIBRARY_IMPL(torchweld, CPU, m) { m.impl("dropout_mask", TORCH_FN(dropout_mask_cpu)); }
TORCH_LIBRARY_IMPL(torchweld, CompositeExplicitAutograd, m) {
  m.impl("dropout_mask", TORCH_FN(dropout_mask_elsewhere));
  m.impl("chain_training", TORCH_FN(chain_training_below));
  m.impl("chain_saving", TORCH_FN(chain_saving_composed));
  m.impl("group_saving", TORCH_FN(group_saving_composed));
  m.impl("chain_backward", TORCH_FN(chain_backward_composed));
  m.impl("group_backward", TORCH_FN(group_backward_composed));
}
TORCH_LIBRARY_IMPL(torchweld, Meta, m) {
  m.impl("dropout_mask", TORCH_FN(dropout_mask_meta));
  m.impl("chain_training", TORCH_FN(chain_training_meta));
  m.impl("chain_saving", TORCH_FN(chain_saving_meta));
  m.impl("group_saving", TORCH_FN(group_saving_meta));
  m.impl("chain_backward", TORCH_FN(chain_backward_meta));
  m.impl("group_backward", TORCH_FN(group_backward_meta));
}

}  // namespace torchweld
