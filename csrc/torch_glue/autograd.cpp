// Gradients and autocast of the ops under torch.ops.torchweld.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "argument_checks.h"
#include "block_node.h"
#include "composed_backward.h"
#include "pooled_cast.h"
#include "tangents.h"
#include "training_checks.h"
#include "training_ops.h"

namespace torchweld {

namespace {

using ChainSignature = Tensor(const Tensor&, TensorList, std::string_view);
using GroupSignature = std::vector<Tensor>(const Tensor&, TensorList, std::string_view);
using TrainingSignature = Tensor(const Tensor&, TensorList, std::string_view, std::optional<bool>);
const auto& chain_op() {
  static const auto op = op_handle<ChainSignature>("torchweld::chain");
  return op;
}
const auto& group_op() {
  static const auto op = op_handle<GroupSignature>("torchweld::group");
  return op;
}
using WaySignature = Tensor(const Tensor&, TensorList, std::string_view, std::string_view,
                            std::optional<bool>);
const auto& chain_way_op() {
  static const auto op = op_handle<WaySignature>("torchweld::chain_way");
  return op;
}
const auto& chain_training_op() {
  static const auto op = op_handle<TrainingSignature>("torchweld::chain_training");
  return op;
}

BlockBackward chain_backward_of(std::string_view spec, const Kept& kept, const WayOps& ops) {
  const auto gradients = [](const BlockBackward& own, TensorList grads, const Kept& kept,
                            const c10::List<bool>& needed) {
    return own.ops->backward.call(grads[0], kept.x, kept.params, kept.saved, kept.masks, own.spec,
                                  needed);
  };
  return {gradients,         "ChainBackward",    &ops,
          std::string(spec), kept.params.size(), kept.saved.size()};
}
BlockBackward group_backward_of(std::string_view spec, const Kept& kept) {
  const auto gradients = [](const BlockBackward& own, TensorList grads, const Kept& kept,
                            const c10::List<bool>& needed) {
    return training_ops().group_backward.call(grads, kept.x, kept.params, kept.saved, own.spec,
                                              needed);
  };
  return {gradients,         "GroupBackward",    nullptr,
          std::string(spec), kept.params.size(), kept.saved.size()};
}

// The forward of a chain that needs a gradient.
Tensor train_chain(const Tensor& x, TensorList params, TensorList masks, std::string_view spec,
                   bool recompute, const WayOps& ops) {
  std::vector<Tensor> results;
  {
    const BelowAutograd guard;
    results = ops.saving.call(x, params, masks, spec, !recompute);
  }
  const Tensor y = std::move(results[0]);
  const Kept kept{x, params, TensorList(results).slice(1), masks};
  torch::autograd::set_history(y, new_node(chain_backward_of(spec, kept, ops), kept));
  return y;
}
std::vector<Tensor> train_group(const Tensor& x, TensorList params, std::string_view spec) {
  std::vector<Tensor> ys;
  {
    const BelowAutograd guard;
    ys = training_ops().group_saving.call(x, params, spec);
  }
  const size_t outputs = spec_of(spec).size();
  const Kept kept{x, params, TensorList(ys).slice(outputs), {}};
  const auto node = new_node(group_backward_of(spec, kept), kept);
  ys.resize(outputs);
  torch::autograd::set_history(ys, node);
  return ys;
}

// A node in C++ does not support functorch's transforms and forward-mode differentiation.
bool needs_composition(const Tensor& x, TensorList params) {
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode))
    return true;
  return has_tangent(x) || std::any_of(params.begin(), params.end(), has_tangent);
}
bool needs_gradient(const Tensor& x, TensorList params) {
  return at::GradMode::is_enabled() &&
         (x.requires_grad() || std::any_of(params.begin(), params.end(),
                                           [](const Tensor& p) { return p.requires_grad(); }));
}

// Without a wish of the caller, pre-activations are saved: computing them again costs a product
// per layer, and has not been faster at any size (docs/training.md).
constexpr bool kRecompute = false;

Tensor chain_autograd(const Tensor& x, TensorList params, std::string_view spec) {
  if (needs_composition(x, params)) return composed_chain(x, params, spec);
  if (needs_gradient(x, params)) {
    spec_without_dropout(spec);
    return train_chain(x, params, {}, spec, kRecompute, way_ops("chain"));
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return chain_op().call(x, params, spec);
}
Tensor chain_way_autograd(const Tensor& x, TensorList params, std::string_view text,
                          std::string_view way, std::optional<bool> recompute) {
  if (needs_composition(x, params)) return composed_training(x, params, text);
  const std::vector<Tensor> masks = draw_masks(x, params, spec_of(text));
  if (needs_gradient(x, params))
    return train_chain(x, params, masks, text, recompute.value_or(kRecompute), way_ops(way));
  at::AutoDispatchBelowADInplaceOrView guard;
  if (masks.empty() && way == "chain") return chain_op().call(x, params, text);
  return way_ops(way).saving.call(x, params, masks, text, false)[0];
}
Tensor chain_training_autograd(const Tensor& x, TensorList params, std::string_view text,
                               std::optional<bool> recompute) {
  return chain_way_autograd(x, params, text, "chain", recompute);
}
// A call that needs a gradient goes to chain, which does not read a packed copy.
Tensor chain_kept_autograd(const Tensor& x, TensorList params, std::string_view spec,
                           const Tensor& kept) {
  static const auto op =
      op_handle<Tensor(const Tensor&, TensorList, std::string_view, const Tensor&)>(
          "torchweld::chain_kept");
  if (needs_composition(x, params) || needs_gradient(x, params))
    return chain_autograd(x, params, spec);
  at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(x, params, spec, kept);
}
std::vector<Tensor> group_autograd(const Tensor& x, TensorList params, std::string_view spec) {
  if (needs_composition(x, params)) return composed_group(x, params, spec);
  if (needs_gradient(x, params)) return train_group(x, params, spec);
  at::AutoDispatchBelowADInplaceOrView guard;
  return group_op().call(x, params, spec);
}

// A gradient of a gradient goes through the composition, which computes hidden values again: the
// saved ones have no history.
bool differentiates(const Tensor& x, TensorList params, TensorList grads) {
  return needs_composition(x, params) || needs_gradient(x, params) || needs_gradient(x, grads) ||
         std::any_of(grads.begin(), grads.end(), has_tangent);
}
// It would be wrong if what they are computed from was changed since, where torch saw no change
// (`p.data.mul_(2)`). `save` runs the forward once more, and returns what it saves.
template <class Save>
void check_before_composing(const Tensor& x, TensorList params, TensorList saved,
                            const Save& save) {
  if (saved.empty() || !x.is_cpu() || !Place::known_of(x) || !Place::known_of(saved[0]) ||
      !std::all_of(params.begin(), params.end(), Place::known_of))
    return;
  at::AutoDispatchBelowADInplaceOrView guard;
  at::NoGradGuard no_gradients;
  TORCHWELD_CHECK(are_unchanged(save(), saved),
                  "torchweld: a weight, bias or input of a block was changed between the forward "
                  "and a backward with create_graph=True, so its hidden values cannot be computed "
                  "again; run the forward again");
}
// The backward of way kWays[number - 1]; 0 is "chain".
template <size_t number>
std::vector<Tensor> way_backward_autograd(const Tensor& grad, const Tensor& x, TensorList params,
                                          TensorList saved, TensorList masks, std::string_view text,
                                          c10::List<bool> needed) {
  const WayOps& ops = way_ops(number ? kWays[number - 1] : "chain");
  if (differentiates(x, params, grad)) {
    check_before_composing(x, params, saved, [&] {
      auto results = ops.saving.call(x, params, masks, text, true);
      results.erase(results.begin());
      return results;
    });
    const Flags flags = flags_of(needed);
    return needed_only(composed_backward(grad, x, params, {}, masks, spec_of(text), flags.data()),
                       flags.data());
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return ops.backward.call(grad, x, params, saved, masks, text, needed);
}
template <size_t... numbers>
void register_way_backwards(torch::Library& m, std::index_sequence<numbers...>) {
  (m.impl((std::string(kWays[numbers]) + "_backward").c_str(),
          TORCH_FN(way_backward_autograd<numbers + 1>)),
   ...);
}
std::vector<Tensor> group_backward_autograd(TensorList grads, const Tensor& x, TensorList params,
                                            TensorList saved, std::string_view text,
                                            c10::List<bool> needed) {
  if (differentiates(x, params, grads)) {
    check_before_composing(x, params, saved, [&] {
      auto results = training_ops().group_saving.call(x, params, text);
      results.erase(results.begin(), results.begin() + int64_t(grads.size()));
      return results;
    });
    const Flags flags = flags_of(needed);
    return needed_only(composed_group_backward(grads, x, params, {}, spec_of(text), flags.data()),
                       flags.data());
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return training_ops().group_backward.call(grads, x, params, saved, text, needed);
}

// A packed copy does not know its parameters, so their gradients would be lost.
template <class Op>
auto packed_below_autograd(const Op& op, const Tensor& x, const Tensor& packed,
                           std::string_view spec) {
  TORCHWELD_CHECK(
      !(at::GradMode::is_enabled() && x.requires_grad()) && !has_tangent(x),
      "torchweld: packed weights are for inference, and x requires a gradient that would "
      "be lost; call under torch.no_grad(), or use torchweld::chain or group");
  at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(x, packed, spec);
}
Tensor chain_packed_autograd(const Tensor& x, const Tensor& packed, std::string_view spec) {
  static const auto op =
      op_handle<Tensor(const Tensor&, const Tensor&, std::string_view)>("torchweld::chain_packed");
  return packed_below_autograd(op, x, packed, spec);
}
std::vector<Tensor> group_packed_autograd(const Tensor& x, const Tensor& packed,
                                          std::string_view spec) {
  static const auto op =
      op_handle<std::vector<Tensor>(const Tensor&, const Tensor&, std::string_view)>(
          "torchweld::group_packed");
  return packed_below_autograd(op, x, packed, spec);
}

// ---- Autocast ----
template <class Op, class... Rest>
auto autocast(const Op& op, const Tensor& x, TensorList params, std::string_view spec,
              Rest... rest) {
  const at::DeviceType device = x.device().type();
  c10::impl::ExcludeDispatchKeyGuard guard(
      c10::DispatchKeySet(at::autocast::get_autocast_dispatch_key_from_device_type(device)));
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  return op.call(at::autocast::cached_cast(dtype, x, device),
                 at::autocast::cached_cast(dtype, params, device), spec, rest...);
}
// Whether CastFunction can make the casts that autocast would make of the parameters.
bool casts_in_pool(const Tensor& x, TensorList params) {
  const auto castable = [](const Tensor& p) {
    return p.is_cpu() && p.scalar_type() == at::kFloat && Place::known_of(p);
  };
  return x.is_cpu() && needs_gradient(x, params) && !needs_composition(x, params) &&
         std::all_of(params.begin(), params.end(), castable) && few_rows(x, params);
}
// Only those that need a gradient go through the node: all of its results would ask for one.
std::vector<Tensor> cast_params(TensorList params, at::ScalarType dtype) {
  std::vector<Tensor> trained, copies;
  for (const Tensor& p : params)
    if (p.requires_grad()) trained.push_back(p);
  if (!trained.empty()) trained = CastFunction::apply(TensorList(trained), dtype);
  size_t next = 0;
  for (const Tensor& p : params)
    copies.push_back(p.requires_grad() ? trained[next++] : cast_in_pool(p, dtype));
  return copies;
}
template <class Op, class... Rest>
Tensor autocast_chain(const Op& op, const Tensor& x, TensorList params, std::string_view spec,
                      Rest... rest) {
  if (!casts_in_pool(x, params)) return autocast(op, x, params, spec, rest...);
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastCPU);
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(at::kCPU);
  return op.call(at::autocast::cached_cast(dtype, x, at::kCPU), cast_params(params, dtype), spec,
                 rest...);
}
Tensor chain_autocast(const Tensor& x, TensorList params, std::string_view spec) {
  return autocast_chain(chain_op(), x, params, spec);
}
Tensor chain_kept_autocast(const Tensor& x, TensorList params, std::string_view spec,
                           const Tensor&) {
  return autocast_chain(chain_op(), x, params, spec);
}
Tensor chain_training_autocast(const Tensor& x, TensorList params, std::string_view spec,
                               std::optional<bool> recompute) {
  return autocast_chain(chain_training_op(), x, params, spec, recompute);
}
Tensor chain_way_autocast(const Tensor& x, TensorList params, std::string_view spec,
                          std::string_view way, std::optional<bool> recompute) {
  return autocast(chain_way_op(), x, params, spec, way, recompute);
}
std::vector<Tensor> group_autocast(const Tensor& x, TensorList params, std::string_view spec) {
  return autocast(group_op(), x, params, spec);
}

}  // namespace

TORCH_LIBRARY_IMPL(torchweld, Autograd, m) {
  m.impl("chain", TORCH_FN(chain_autograd));
  m.impl("chain_kept", TORCH_FN(chain_kept_autograd));
  m.impl("group", TORCH_FN(group_autograd));
  m.impl("chain_training", TORCH_FN(chain_training_autograd));
  m.impl("chain_way", TORCH_FN(chain_way_autograd));
  m.impl("chain_backward", TORCH_FN(way_backward_autograd<0>));
  register_way_backwards(m, std::make_index_sequence<kWayCount>());
  m.impl("group_backward", TORCH_FN(group_backward_autograd));
  m.impl("dropout_mask", torch::CppFunction::makeFallthrough());
  m.impl("pack", torch::CppFunction::makeFallthrough());
  m.impl("chain_packed", TORCH_FN(chain_packed_autograd));
  m.impl("group_packed", TORCH_FN(group_packed_autograd));
}
TORCH_LIBRARY_IMPL(torchweld, AutocastCPU, m) {
  m.impl("chain", TORCH_FN(chain_autocast));
  m.impl("chain_kept", TORCH_FN(chain_kept_autocast));
  m.impl("chain_training", TORCH_FN(chain_training_autocast));
  m.impl("chain_way", TORCH_FN(chain_way_autocast));
  m.impl("group", TORCH_FN(group_autocast));
}
TORCH_LIBRARY_IMPL(torchweld, AutocastCUDA, m) {
  m.impl("chain", TORCH_FN(chain_autocast));
  m.impl("chain_kept", TORCH_FN(chain_kept_autocast));
  m.impl("chain_training", TORCH_FN(chain_training_autocast));
  m.impl("chain_way", TORCH_FN(chain_way_autocast));
  m.impl("group", TORCH_FN(group_autocast));
}

}  // namespace torchweld
