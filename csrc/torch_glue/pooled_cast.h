// Autocast's casts of a block's parameters as one node of the graph, with memory from the pool.
//
// Autocast makes 16-bit copies of the parameters in every forward, and gradients of their own type
// in every backward. All are as large as weight gradients, and cost as many fresh pages: a step of
// 32 rows of 768 -> 3072 took 6 or 15 ms, depending on what malloc had kept (Zen 4).
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "gradient_pool.h"

namespace torchweld {

// A copy of another type. It is plain memory, so nothing that traces may see it.
inline Tensor cast_in_pool(const Tensor& t, at::ScalarType dtype) {
  if (t.scalar_type() == dtype) return t;
  const size_t bytes = size_t(t.numel()) * c10::elementSize(dtype);
  if (bytes < kPooledBytes || !t.is_contiguous()) return t.to(dtype);
  Tensor copy = GradientPool::instance().empty(t.sizes(), dtype);
  copy.copy_(t);
  return copy;
}

struct CastFunction : torch::autograd::Function<CastFunction> {
  using Context = torch::autograd::AutogradContext;
  using Variables = torch::autograd::variable_list;

  static Variables forward(Context* ctx, TensorList tensors, at::ScalarType dtype) {
    at::AutoDispatchBelowADInplaceOrView guard;
    Variables copies;
    std::vector<int64_t> types;
    for (const Tensor& t : tensors) {
      copies.push_back(cast_in_pool(t, dtype));
      types.push_back(int64_t(t.scalar_type()));
    }
    ctx->saved_data["types"] = std::move(types);
    return copies;
  }
  static Variables backward(Context* ctx, Variables grads) {
    const auto types = ctx->saved_data["types"].toIntVector();
    for (size_t i = 0; i < grads.size(); ++i) {
      if (!grads[i].defined()) continue;
      const auto own = at::ScalarType(types[i]);
      grads[i] = at::GradMode::is_enabled() ? grads[i].to(own) : cast_in_pool(grads[i], own);
    }
    grads.emplace_back();  // of dtype
    return grads;
  }
};

// Whether the pool may hold them: as for gradients, only where rows are few beside the weights.
inline bool few_rows(const Tensor& x, TensorList params) {
  if (x.dim() == 0 || x.size(-1) == 0) return false;
  double weights = 0, widths = 0;
  for (const Tensor& p : params) {
    if (p.dim() != 2) continue;
    weights += double(p.numel());
    widths += double(p.size(0) + p.size(1));
  }
  return 4 * widths * double(x.numel() / x.size(-1)) <= weights;
}

}  // namespace torchweld
