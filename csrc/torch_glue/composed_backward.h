// The backward of a block as a composition of aten ops. It serves devices that our kernels do not
// serve and bfloat16 where torch's own products are faster. It is made of differentiable ops, so it
// is also what a second derivative goes through.
//
// Pre-activations come from `saved`, or are computed again from x if nothing was saved. A dropout
// mask has one bit per value: bit i of byte j is column 8 j + i.
#pragma once
#include <ATen/ATen.h>

#include <vector>

#include "composed_block.h"

namespace torchweld {

// How many tensors of pre-activations a layer saves. The last layer's gradient does not depend on
// its value if it has no activation; others also give the next layer's input.
inline size_t saved_count(const LayerSpec& layer, bool last) {
  return layer.gated() ? 2 : last && layer.act == Act::identity ? 0 : 1;
}
inline size_t saved_count(const Spec& spec, bool group) {
  size_t count = 0;
  for (size_t i = 0; i < spec.size(); ++i)
    count += saved_count(spec[i], group || i + 1 == spec.size());
  return count;
}

// Without saved pre-activations, the forward keeps a checksum of them, one int64. The backward
// computes them again, and would be wrong if a weight or x had changed meanwhile. 0: not taken.
inline bool is_checksum(TensorList saved) {
  return saved.size() == 1 && saved[0].scalar_type() == at::kLong;
}
// Pre-activations for the backward, or none if they are to be computed again.
inline TensorList values_in(TensorList saved) { return is_checksum(saved) ? TensorList() : saved; }
inline Tensor no_checksum(const Tensor& x) { return at::zeros({1}, x.options().dtype(at::kLong)); }

// What eager's dropout multiplies by: 0 or 1 / (1 - p).
inline Tensor mask_factors(const Tensor& mask, const c10::SymInt& features, double p,
                           const Tensor& like) {
  const Tensor bits = at::arange(8, mask.options());
  return at::bitwise_and(at::bitwise_right_shift(mask.unsqueeze(-1), bits), 1)
      .flatten(-2)
      .slice_symint(-1, 0, features)
      .to(like.scalar_type())
      .div(1 - p);
}
inline Tensor dropped(const Tensor& y, const LayerSpec& layer, const Tensor& mask) {
  return y * mask_factors(mask, y.sym_size(-1), layer.drop, y);
}

inline void append(std::vector<Tensor>& saved, const LayerSpec& layer, const PreActivations& p) {
  if (layer.gated()) {
    saved.push_back(p.gate.contiguous());
    saved.push_back(p.up.contiguous());
  } else {
    saved.push_back(p.z);
  }
}
// Returns y, then the pre-activations if they are to be saved, or no checksum.
inline std::vector<Tensor> composed_saving(const Tensor& x, TensorList params, TensorList masks,
                                           const Spec& spec, bool save) {
  std::vector<Tensor> results{x};
  size_t mask = 0;
  for (size_t i = 0; i < spec.size(); ++i) {
    const PreActivations p = pre_activations(tensors_of(spec, i, params), results[0]);
    if (save && saved_count(spec[i], i + 1 == spec.size())) append(results, spec[i], p);
    results[0] = layer_output(spec[i], p);
    if (spec[i].drop > 0) results[0] = dropped(results[0], spec[i], masks[mask++]);
  }
  if (!save && saved_count(spec, false)) results.push_back(no_checksum(x));
  return results;
}

// Gradients of one layer, from `grad`, the gradient of its output. Writes those of its tensors that
// are needed into `grads`, in order, and returns the gradient of x. `p` has the pre-activations.
inline Tensor layer_backward(const LayerTensors& layer, const PreActivations& p, const Tensor& x,
                             const Tensor& grad, bool x_needed, const bool* needed, Tensor* grads) {
  std::vector<Tensor> gz;  // one per weight
  if (!layer.spec.gated()) {
    gz = {activation_gradient(layer.spec, p.z, grad)};
  } else {
    const Tensor g = activation_gradient(layer.spec, p.gate, grad * p.up);
    const Tensor u = grad * activation(layer.spec, p.gate);
    switch (layer.spec.gate) {
      case Gate::separate:
        gz = {g, u};
        break;
      case Gate::first:
        gz = {at::cat({g, u}, -1)};
        break;
      case Gate::second:
        gz = {at::cat({u, g}, -1)};
        break;
      default:
        gz = {at::stack({g, u}, -1).flatten(-2)};
    }
  }
  Tensor grad_x;
  for (int i = 0; i < layer.spec.weights(); ++i) {
    const int w = i * (layer.spec.bias ? 2 : 1);
    const Tensor gz2 = gz[i].reshape_symint({-1, gz[i].sym_size(-1)});
    if (needed[w]) {
      const Tensor x2 = x.reshape_symint({-1, x.sym_size(-1)});
      grads[w] = layer.spec.transposed ? x2.t().mm(gz2) : gz2.t().mm(x2);
    }
    if (layer.spec.bias && needed[w + 1]) grads[w + 1] = gz2.sum(0);
    if (!x_needed) continue;
    const Tensor part = at::matmul(gz[i], layer.weight(i));
    grad_x = grad_x.defined() ? grad_x + part : part;
  }
  return grad_x;
}

// Gradients of x (first) and of params; those that are not needed are undefined. `needed` has one
// flag for x and one for each of params. If `saved` is empty, hidden values are computed again.
inline std::vector<Tensor> composed_backward(const Tensor& grad, const Tensor& x, TensorList params,
                                             TensorList saved, TensorList masks, const Spec& spec,
                                             const bool* needed) {
  std::vector<Tensor> inputs{x}, grads(1 + params.size());
  std::vector<PreActivations> kept;
  std::vector<size_t> first{1};
  size_t lowest = needed[0] ? 0 : spec.size();  // the lowest layer that anything is needed of
  size_t mask = 0, next_saved = 0;
  for (size_t i = 0; i < spec.size(); ++i) {
    const LayerTensors layer = tensors_of(spec, i, params);
    const bool last = i + 1 == spec.size();
    first.push_back(first.back() + size_t(spec[i].tensors()));
    for (size_t j = first[i]; j < first[i + 1]; ++j)
      if (needed[j]) lowest = std::min(lowest, i);
    PreActivations p;
    if (saved_count(spec[i], last)) {
      if (saved.empty())
        p = pre_activations(layer, inputs.back());
      else if (spec[i].gated())
        p = {{}, saved[next_saved], saved[next_saved + 1]};
      else
        p = {saved[next_saved], {}, {}};
      next_saved += saved_count(spec[i], last);
    }
    kept.push_back(p);
    if (last) break;
    Tensor a = layer_output(spec[i], p);
    if (spec[i].drop > 0) a = dropped(a, spec[i], masks[mask++]);
    inputs.push_back(a);
  }
  Tensor g = grad;
  mask = masks.size();
  for (size_t i = spec.size(); i-- > lowest;) {
    if (spec[i].drop > 0) g = dropped(g, spec[i], masks[--mask]);
    g = layer_backward(tensors_of(spec, i, params), kept[i], inputs[i], g, i > lowest || needed[0],
                       needed + first[i], grads.data() + first[i]);
  }
  if (needed[0]) grads[0] = g;
  return grads;
}
// The same for a group: every layer reads x, and `grads` has one gradient per layer.
inline std::vector<Tensor> composed_group_backward(TensorList grads, const Tensor& x,
                                                   TensorList params, TensorList saved,
                                                   const Spec& spec, const bool* needed) {
  std::vector<Tensor> all(1 + params.size());
  size_t first = 1, next_saved = 0;
  for (size_t i = 0; i < spec.size(); ++i) {
    const size_t count = size_t(spec[i].tensors()), own_saved = saved_count(spec[i], true);
    c10::SmallVector<bool, 8> own{needed[0]};
    own.append(needed + first, needed + first + count);
    std::vector<Tensor> member = composed_backward(
        grads[i], x, params.slice(first - 1, count),
        saved.empty() ? saved : saved.slice(next_saved, own_saved), {}, {spec[i]}, own.data());
    if (member[0].defined()) all[0] = all[0].defined() ? all[0] + member[0] : member[0];
    std::move(member.begin() + 1, member.end(), all.begin() + first);
    first += count;
    next_saved += own_saved;
  }
  return all;
}

// The gradients that are needed, in order.
inline std::vector<Tensor> needed_only(std::vector<Tensor> all, const bool* needed) {
  std::vector<Tensor> found;
  for (size_t i = 0; i < all.size(); ++i)
    if (needed[i]) found.push_back(std::move(all[i]));
  return found;
}

}  // namespace torchweld
