// The ops of training below autograd. autograd.cpp strings them together.
//
//   dropout_mask    one bit per value, drawn as eager's dropout draws them.
//   *_saving        the forward; also returns the pre-activations that the backward needs.
//   *_backward      the gradients that are needed, and no others.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "argument_checks.h"
#include "composed_backward.h"
#include "gradient_pool.h"
#include "kernel_calls.h"
#include "torch_products.h"
#include "training_checks.h"
#include "training_layers.h"
#include "training_ops.h"

namespace torchweld {

namespace {

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

// For calls below autograd; dropout is drawn here, as there.
Tensor chain_way_below(const Tensor& x, TensorList params, std::string_view text,
                       std::string_view way, std::optional<bool>) {
  return way_ops(way).saving.call(x, params, draw_masks(x, params, spec_of(text)), text, false)[0];
}

// ---- Backward ----
std::vector<Tensor> chain_backward_composed(const Tensor& grad, const Tensor& x, TensorList params,
                                            TensorList saved, TensorList masks,
                                            std::string_view text, c10::List<bool> list) {
  const Spec& spec = spec_of(text);
  const Flags needed = flags_of(list);
  check_backward<c10::SymInt>(grad, x, params, saved, masks, spec, needed.size(), false);
  return needed_only(
      composed_backward(grad, x, params, values_in(saved), masks, spec, needed.data()),
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

// ---- Kernels ----
void append_saved(std::vector<Tensor>& results, const Tensor& x, const Spec& spec, bool group,
                  const std::vector<LayerSizes<int64_t>>& sizes) {
  for (size_t i = 0; i < spec.size(); ++i)
    for (size_t j = saved_count(spec[i], group || i + 1 == spec.size()); j > 0; --j)
      results.push_back(output_like(x, sizes[i].N));
}

// y, then the pre-activations or their checksum.
std::vector<Tensor> chain_saving_cpu(const Tensor& x, TensorList params, TensorList given_masks,
                                     std::string_view text, bool save) {
  const Spec& spec = spec_of(text);
  const auto sizes = check_all<int64_t>(x, params, spec, false);
  check_training(x, given_masks, spec, sizes);
  std::vector<Tensor> results;
  if (composition_is_faster(x, params)) {
    note_composed(x, "forward");
    results = TorchProducts::serves(spec)
                  ? TorchProducts(x, params, given_masks, spec).forward(true)
                  : composed_saving(x, params, given_masks, spec, true);
  } else {
    const std::vector<Tensor> masks = contiguous(given_masks);
    results.push_back(output_like(x, sizes.back().N));
    append_saved(results, x, spec, false, sizes);
    const Layers layers = natural_layers(params, spec, sizes, dtype_of(x, "x"));
    const auto training = training_layers(spec, false, TensorList(results).slice(1), masks);
    const bool plain = results.size() == 1 && masks.empty();
    run_forward(x, layers, false, results[0], plain ? nullptr : training.data());
  }
  if (save || results.size() == 1) return results;
  return {results[0], checksum_tensor(TensorList(results).slice(1))};
}
std::vector<Tensor> group_saving_cpu(const Tensor& x, TensorList params, std::string_view text) {
  const Spec& spec = spec_without_dropout(text);
  const auto sizes = check_all<int64_t>(x, params, spec, true);
  if (composition_is_faster(x, params)) {
    note_composed(x, "forward");
    return group_saving_composed(x, params, text);
  }
  std::vector<Tensor> results;
  for (const auto& s : sizes) results.push_back(output_like(x, s.N));
  append_saved(results, x, spec, true, sizes);
  const Layers layers = natural_layers(params, spec, sizes, dtype_of(x, "x"));
  const auto training = training_layers(spec, true, TensorList(results).slice(spec.size()), {});
  run_forward(x, layers, true, TensorList(results).slice(0, spec.size()),
              results.size() == spec.size() ? nullptr : training.data());
  return results;
}

// Pre-activations that were not saved. The last layer of a chain runs only if its own are needed.
std::vector<Tensor> saved_again(const Tensor& x, const Spec& spec, bool group, const Layers& layers,
                                const std::vector<LayerSizes<int64_t>>& sizes, TensorList masks) {
  std::vector<Tensor> saved;
  append_saved(saved, x, spec, group, sizes);
  if (saved.empty()) return saved;
  const auto training = training_layers(spec, group, saved, masks);
  const bool without_last = !group && saved_count(spec.back(), true) == 0;
  const Layers run(layers.begin(), layers.end() - (without_last ? 1 : 0));
  const std::vector<Tensor> nowhere(group ? layers.size() : 1);
  run_forward(x, run, group, nowhere, training.data());
  return saved;
}

// Weight gradients come from the pool where rows are few. The pool keeps their memory through the
// next forward, in which eager has activations instead. So it serves only where eager's activations
// take at most a quarter of the gradients' memory: its peak is at the end of the backward, as ours.
bool gradients_from_pool(const Tensor& x, const Spec& spec, TensorList params, const Flags& needed,
                         const std::vector<LayerSizes<int64_t>>& sizes) {
  double gradients = 0, activations = double(x.size(-1));
  for (size_t i = 0; i < params.size(); ++i)
    if (needed[1 + i]) gradients += double(params[i].numel());
  for (size_t i = 0; i < spec.size(); ++i)
    activations += double(sizes[i].N) * (spec[i].gated() ? 4 : 2);
  return activations * double(x.numel() / x.size(-1)) * 4 <= gradients;
}
Tensor gradient_like(const Tensor& param, bool pooled) {
  if (pooled && param.nbytes() >= kPooledBytes)
    return GradientPool::instance().empty(param.sizes(), param.scalar_type());
  return at::detail::empty_cpu(param.sizes(), param.scalar_type());
}

// The gradients that are needed, x's first, and where the kernels write those of each layer.
struct GradientTensors {
  std::vector<Tensor> needed;
  Tensor of_x;
  GradientPlaces layers;
};
GradientTensors make_gradients(const Tensor& x, TensorList params, const Spec& spec,
                               const Flags& needed, const std::vector<LayerSizes<int64_t>>& sizes) {
  GradientTensors made;
  if (needed[0]) made.needed.push_back(made.of_x = output_like(x, x.size(-1)));
  const bool pooled = gradients_from_pool(x, spec, params, needed, sizes);
  std::vector<Tensor> all(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    if (!needed[1 + i]) continue;
    all[i] = gradient_like(params[i], pooled);
    made.needed.push_back(all[i]);
  }
  made.layers = layer_gradients(all, spec, sizes, x.element_size());
  return made;
}

std::vector<Tensor> backward_cpu(TensorList grads, const Tensor& x, TensorList params,
                                 TensorList given_saved, TensorList given_masks, const Spec& spec,
                                 const Flags& needed, bool group) {
  const auto sizes = check_backward<int64_t>(grads, x, params, given_saved, given_masks, spec,
                                             needed.size(), group);
  const auto dtype = dtype_of(x, "x");
  const Rows rows = rows_of(x);
  GradientTensors made = make_gradients(x, params, spec, needed, sizes);
  if (rows.M == 0) {
    for (Tensor& t : made.needed) t.zero_();
    return made.needed;
  }
  const std::vector<Tensor> from = contiguous(grads), masks = contiguous(given_masks);
  const Layers layers = natural_layers(params, spec, sizes, dtype);
  const bool again = values_in(given_saved).empty();
  const std::vector<Tensor> saved =
      again ? saved_again(x, spec, group, layers, sizes, masks) : contiguous(given_saved);
  if (again) check_unchanged(saved, given_saved);
  const auto training = training_layers(spec, group, saved, masks);
  c10::SmallVector<const void*, 4> grad_y;
  for (const Tensor& g : from) grad_y.push_back(g.const_data_ptr());
  BackwardCall call;
  call.dtype = dtype;
  call.layers = layers.data();
  call.training = training.data();
  call.gradients = made.layers.data();
  call.count = int(layers.size());
  call.group = group;
  call.x = rows.x.const_data_ptr();
  call.M = rows.M;
  call.ldx = rows.ld;
  call.grad_y = grad_y.data();
  call.grad_x = made.of_x.defined() ? made.of_x.mutable_data_ptr() : nullptr;
  call.threads = threads_to_use();
  kernels_in_use().run_backward(call, last_run());
  return made.needed;
}
std::vector<Tensor> chain_backward_cpu(const Tensor& grad, const Tensor& x, TensorList params,
                                       TensorList saved, TensorList masks, std::string_view text,
                                       c10::List<bool> list) {
  const Spec& spec = spec_of(text);
  const Flags needed = flags_of(list);
  if (x.dim() == 0 || !composition_is_faster(x, params))
    return backward_cpu(grad, x, params, saved, masks, spec, needed, false);
  note_composed(x, "backward");
  const auto sizes =
      check_backward<int64_t>(grad, x, params, saved, masks, spec, needed.size(), false);
  if (!TorchProducts::serves(spec)) {
    std::vector<Tensor> again;
    if (is_checksum(saved)) {
      again = composed_saving(x, params, masks, spec, true);
      check_unchanged(TensorList(again).slice(1), saved);
      saved = TensorList(again).slice(1);
    }
    return chain_backward_composed(grad, x, params, saved, masks, text, std::move(list));
  }
  const bool pooled = gradients_from_pool(x, spec, params, needed, sizes);
  const TorchProducts products(x, params, masks, spec);
  return needed_only(products.backward(
                         grad, values_in(saved), needed.data(),
                         [&](size_t i) { return gradient_like(params[i], pooled); },
                         [&](TensorList again) { check_unchanged(again, saved); }),
                     needed.data());
}
std::vector<Tensor> group_backward_cpu(TensorList grads, const Tensor& x, TensorList params,
                                       TensorList saved, std::string_view text,
                                       c10::List<bool> list) {
  if (x.dim() > 0 && composition_is_faster(x, params)) {
    note_composed(x, "backward");
    return group_backward_composed(grads, x, params, saved, text, std::move(list));
  }
  return backward_cpu(grads, x, params, saved, {}, spec_without_dropout(text), flags_of(list),
                      true);
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
Tensor chain_way_meta(const Tensor& x, TensorList params, std::string_view text, std::string_view,
                      std::optional<bool> recompute) {
  return chain_training_meta(x, params, text, recompute);
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
  if (save)
    append_saved_meta(results, x, spec, false, sizes);
  else if (saved_count(spec, false))
    results.push_back(at::empty({1}, x.options().dtype(at::kLong)));
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

TORCH_LIBRARY_IMPL(torchweld, CPU, m) {
  m.impl("dropout_mask", TORCH_FN(dropout_mask_cpu));
  m.impl("chain_saving", TORCH_FN(chain_saving_cpu));
  m.impl("group_saving", TORCH_FN(group_saving_cpu));
  m.impl("chain_backward", TORCH_FN(chain_backward_cpu));
  m.impl("group_backward", TORCH_FN(group_backward_cpu));
}
TORCH_LIBRARY_IMPL(torchweld, CompositeExplicitAutograd, m) {
  m.impl("dropout_mask", TORCH_FN(dropout_mask_elsewhere));
  m.impl("chain_training", TORCH_FN(chain_training_below));
  m.impl("chain_way", TORCH_FN(chain_way_below));
  m.impl("chain_saving", TORCH_FN(chain_saving_composed));
  m.impl("group_saving", TORCH_FN(group_saving_composed));
  m.impl("chain_backward", TORCH_FN(chain_backward_composed));
  m.impl("group_backward", TORCH_FN(group_backward_composed));
}
// Several gradients at once: functorch's batches, and those of `is_grads_batched`.
TORCH_LIBRARY_IMPL(torchweld, FuncTorchBatched, m) {
  m.impl("chain_backward", TORCH_FN(chain_backward_composed));
  for (const std::string way : kWays)
    m.impl((way + "_backward").c_str(), TORCH_FN(chain_backward_composed));
  m.impl("group_backward", TORCH_FN(group_backward_composed));
}
TORCH_LIBRARY_IMPL(torchweld, Batched, m) {
  m.impl("chain_backward", TORCH_FN(chain_backward_composed));
  for (const std::string way : kWays)
    m.impl((way + "_backward").c_str(), TORCH_FN(chain_backward_composed));
  m.impl("group_backward", TORCH_FN(group_backward_composed));
}
TORCH_LIBRARY_IMPL(torchweld, Meta, m) {
  m.impl("dropout_mask", TORCH_FN(dropout_mask_meta));
  m.impl("chain_training", TORCH_FN(chain_training_meta));
  m.impl("chain_way", TORCH_FN(chain_way_meta));
  for (const std::string way : kWays) {
    m.impl((way + "_saving").c_str(), TORCH_FN(chain_saving_meta));
    m.impl((way + "_backward").c_str(), TORCH_FN(chain_backward_meta));
  }
  m.impl("chain_saving", TORCH_FN(chain_saving_meta));
  m.impl("group_saving", TORCH_FN(group_saving_meta));
  m.impl("chain_backward", TORCH_FN(chain_backward_meta));
  m.impl("group_backward", TORCH_FN(group_backward_meta));
}

}  // namespace torchweld
