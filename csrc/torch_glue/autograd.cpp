// Gradients and autocast of the ops under torch.ops.torchweld.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "argument_checks.h"
#include "composed_block.h"
#include "tangents.h"

namespace torchweld {

namespace {

template <class Signature>
auto handle(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}
using ChainSignature = Tensor(const Tensor&, TensorList, std::string_view);
using GroupSignature = std::vector<Tensor>(const Tensor&, TensorList, std::string_view);
const auto& chain_op() {
  static const auto op = handle<ChainSignature>("torchweld::chain");
  return op;
}
const auto& group_op() {
  static const auto op = handle<GroupSignature>("torchweld::group");
  return op;
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

c10::SmallVector<bool, 16> needed_of(AutogradContext* ctx, size_t count) {
  c10::SmallVector<bool, 16> needed;
  for (size_t i = 0; i < count; ++i) needed.push_back(ctx->needs_input_grad(i));
  return needed;
}
void keep_inputs(AutogradContext* ctx, const Tensor& x, TensorList params, std::string_view spec) {
  variable_list saved{x};
  saved.insert(saved.end(), params.begin(), params.end());
  ctx->save_for_backward(std::move(saved));
  ctx->saved_data["spec"] = std::string(spec);
}

struct ChainFunction : torch::autograd::Function<ChainFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, TensorList params,
                        const std::string& spec) {
    keep_inputs(ctx, x, params, spec);
    at::AutoDispatchBelowADInplaceOrView guard;
    return chain_op().call(x, params, spec);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grad) {
    const variable_list saved = ctx->get_saved_variables();
    const std::string spec = ctx->saved_data["spec"].toStringRef();
    variable_list grads = chain_backward(grad[0], saved[0], TensorList(saved).slice(1),
                                         spec_of(spec), needed_of(ctx, saved.size()).data());
    grads.emplace_back();  // of the spec
    return grads;
  }
};

struct GroupFunction : torch::autograd::Function<GroupFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, TensorList params,
                               const std::string& spec) {
    keep_inputs(ctx, x, params, spec);
    at::AutoDispatchBelowADInplaceOrView guard;
    return group_op().call(x, params, spec);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grad) {
    const variable_list saved = ctx->get_saved_variables();
    const std::string text = ctx->saved_data["spec"].toStringRef();
    const Spec& spec = spec_of(text);
    const auto needed = needed_of(ctx, saved.size());
    variable_list grads(saved.size() + 1);
    size_t first = 1;
    for (size_t i = 0; i < spec.size(); ++i) {
      const size_t count = size_t(spec[i].tensors());
      if (grad[i].defined()) {
        c10::SmallVector<bool, 16> own{needed[0]};
        own.append(needed.begin() + first, needed.begin() + first + count);
        variable_list member = chain_backward(
            grad[i], saved[0], TensorList(saved).slice(first, count), {spec[i]}, own.data());
        if (member[0].defined()) grads[0] = grads[0].defined() ? grads[0] + member[0] : member[0];
        std::move(member.begin() + 1, member.end(), grads.begin() + first);
      }
      first += count;
    }
    return grads;
  }
};

// A C++ autograd function does not support functorch's transforms and forward-mode differentiation.
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

Tensor chain_autograd(const Tensor& x, TensorList params, std::string_view spec) {
  if (needs_composition(x, params)) {
    spec_of(spec);
    return composed_chain(x, params, spec);
  }
  if (needs_gradient(x, params)) return ChainFunction::apply(x, params, std::string(spec));
  at::AutoDispatchBelowADInplaceOrView guard;
  return chain_op().call(x, params, spec);
}
// A call that needs a gradient goes to chain, which does not read a packed copy.
Tensor chain_kept_autograd(const Tensor& x, TensorList params, std::string_view spec,
                           const Tensor& kept) {
  static const auto op = handle<Tensor(const Tensor&, TensorList, std::string_view, const Tensor&)>(
      "torchweld::chain_kept");
  if (needs_composition(x, params) || needs_gradient(x, params))
    return chain_autograd(x, params, spec);
  at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(x, params, spec, kept);
}
std::vector<Tensor> group_autograd(const Tensor& x, TensorList params, std::string_view spec) {
  if (needs_composition(x, params)) {
    spec_of(spec);
    return composed_group(x, params, spec);
  }
  if (needs_gradient(x, params)) return GroupFunction::apply(x, params, std::string(spec));
  at::AutoDispatchBelowADInplaceOrView guard;
  return group_op().call(x, params, spec);
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
      handle<Tensor(const Tensor&, const Tensor&, std::string_view)>("torchweld::chain_packed");
  return packed_below_autograd(op, x, packed, spec);
}
std::vector<Tensor> group_packed_autograd(const Tensor& x, const Tensor& packed,
                                          std::string_view spec) {
  static const auto op =
      handle<std::vector<Tensor>(const Tensor&, const Tensor&, std::string_view)>(
          "torchweld::group_packed");
  return packed_below_autograd(op, x, packed, spec);
}

// ---- Autocast ----
template <class Op>
auto autocast(const Op& op, const Tensor& x, TensorList params, std::string_view spec) {
  const at::DeviceType device = x.device().type();
  c10::impl::ExcludeDispatchKeyGuard guard(
      c10::DispatchKeySet(at::autocast::get_autocast_dispatch_key_from_device_type(device)));
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  return op.call(at::autocast::cached_cast(dtype, x, device),
                 at::autocast::cached_cast(dtype, params, device), spec);
}
Tensor chain_autocast(const Tensor& x, TensorList params, std::string_view spec) {
  return autocast(chain_op(), x, params, spec);
}
Tensor chain_kept_autocast(const Tensor& x, TensorList params, std::string_view spec,
                           const Tensor&) {
  return autocast(chain_op(), x, params, spec);
}
std::vector<Tensor> group_autocast(const Tensor& x, TensorList params, std::string_view spec) {
  return autocast(group_op(), x, params, spec);
}

}  // namespace

TORCH_LIBRARY_IMPL(torchweld, Autograd, m) {
  m.impl("chain", TORCH_FN(chain_autograd));
  m.impl("chain_kept", TORCH_FN(chain_kept_autograd));
  m.impl("group", TORCH_FN(group_autograd));
  m.impl("pack", torch::CppFunction::makeFallthrough());
  m.impl("chain_packed", TORCH_FN(chain_packed_autograd));
  m.impl("group_packed", TORCH_FN(group_packed_autograd));
}
TORCH_LIBRARY_IMPL(torchweld, AutocastCPU, m) {
  m.impl("chain", TORCH_FN(chain_autocast));
  m.impl("chain_kept", TORCH_FN(chain_kept_autocast));
  m.impl("group", TORCH_FN(group_autocast));
}
TORCH_LIBRARY_IMPL(torchweld, AutocastCUDA, m) {
  m.impl("chain", TORCH_FN(chain_autocast));
  m.impl("chain_kept", TORCH_FN(chain_kept_autocast));
  m.impl("group", TORCH_FN(group_autocast));
}

}  // namespace torchweld
