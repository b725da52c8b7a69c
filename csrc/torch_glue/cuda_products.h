// A chain as torch's products and our pointwise CUDA kernels, forward and backward: for chains that
// are not narrow. It launches no more than eager does. x and gradients are [M, N] here.
#pragma once
#include <ATen/ATen.h>

#include <optional>
#include <utility>
#include <vector>

#include "composed_backward.h"
#include "cuda/cuda_kernels.h"

namespace torchweld {

class CudaProducts {
 public:
  // `masks`: one per layer with dropout, contiguous.
  CudaProducts(TensorList params, TensorList masks, const Spec& spec, DType dtype, void* stream)
      : params_(params), spec_(spec), dtype_(dtype), stream_(stream) {
    size_t mask = 0, first = 0;
    for (const LayerSpec& layer : spec) {
      masks_.push_back(layer.drop > 0 ? masks[mask++] : Tensor());
      first_.push_back(first);
      first += size_t(layer.tensors());
    }
  }

  // Fills `saved`, pre-activations of the first `count` layers, if there are any.
  Tensor forward(Tensor x, TensorList saved, size_t count) const {
    size_t next = 0;
    for (size_t i = 0; i < count; ++i) {
      const size_t own = saved.empty() ? 0 : saved_count(spec_[i], last(i));
      x = layer_forward(i, x, saved.slice(next, own));
      next += own;
    }
    return x;
  }

  // Gradients of x (first) and of params; undefined where none is needed.
  std::vector<Tensor> backward(const Tensor& grad, const Tensor& x, TensorList saved,
                               const bool* needed) const {
    std::vector<Tensor> grads(1 + params_.size());
    std::vector<TensorList> kept;
    size_t lowest = needed[0] ? 0 : spec_.size(), next = 0;
    for (size_t i = 0; i < spec_.size(); ++i) {
      kept.push_back(saved.slice(next, saved_count(spec_[i], last(i))));
      next += kept.back().size();
      for (size_t j = 0; j < size_t(spec_[i].tensors()); ++j)
        if (needed[1 + first_[i] + j]) lowest = std::min(lowest, i);
    }
    Tensor d = grad;
    Made above;  // of the layer above, whose weights wait for this one's output
    for (size_t i = spec_.size(); i-- > lowest;) {
      const bool output = !last(i) && needs_weight(i + 1, needed);
      Made own = layer_gradients(i, d, kept[i], output, needed, grads);
      if (output) weight_gradients(i + 1, above, own.output, needed, grads);
      if (i > lowest || needed[0]) d = input_gradient(i, own);
      above = std::move(own);
    }
    if (lowest < spec_.size() && needs_weight(lowest, needed))
      weight_gradients(lowest, above, lowest == 0 ? x : output_again(lowest - 1, kept[lowest - 1]),
                       needed, grads);
    if (needed[0]) grads[0] = d;
    return grads;
  }

 private:
  // Gradients of a layer's products, one per weight; the layer's output again, if it is wanted.
  struct Made {
    std::vector<Tensor> of_products;
    Tensor output;
  };
  using Pair = std::pair<Tensor, Tensor>;

  bool last(size_t i) const { return i + 1 == spec_.size(); }
  bool plain(size_t i) const {
    return spec_[i].act == Act::identity && !spec_[i].gated() && spec_[i].drop == 0;
  }
  size_t weight_index(size_t i, int w) const {
    return first_[i] + size_t(w * (spec_[i].bias ? 2 : 1));
  }
  bool needs_weight(size_t i, const bool* needed) const {
    for (int w = 0; w < spec_[i].weights(); ++w)
      if (needed[1 + weight_index(i, w)]) return true;
    return false;
  }
  bool needs_bias(size_t i, const bool* needed) const {
    for (int w = 0; w < spec_[i].weights(); ++w)
      if (spec_[i].bias && needed[1 + weight_index(i, w) + 1]) return true;
    return false;
  }
  int64_t features(size_t i) const {
    const int64_t N = tensors_of(spec_, i, params_).weight(0).size(0);
    return spec_[i].gated() && spec_[i].gate != Gate::separate ? N / 2 : N;
  }

  // Views of what belongs to gate and up along `dim`. Without a gate both are the one tensor.
  static Pair gate_and_up(const LayerSpec& s, const std::vector<Tensor>& list, int64_t dim) {
    const auto part = [&](int64_t first, int64_t step) {
      const int64_t size = list[0].size(dim);
      return step == 2 ? list[0].slice(dim, first, size, 2)
                       : list[0].slice(dim, first * (size / 2), (first + 1) * (size / 2));
    };
    switch (s.gate) {
      case Gate::none:
        return {list[0], list[0]};
      case Gate::separate:
        return {list[0], list[1]};
      case Gate::first:
        return {part(0, 1), part(1, 1)};
      case Gate::second:
        return {part(1, 1), part(0, 1)};
      case Gate::interleaved:
        return {part(0, 2), part(1, 2)};
    }
    TORCH_INTERNAL_ASSERT(false);
  }
  Pair weights_of(size_t i) const {
    const LayerTensors layer = tensors_of(spec_, i, params_);
    std::vector<Tensor> list;
    for (int w = 0; w < spec_[i].weights(); ++w) list.push_back(layer.weight(w));
    return gate_and_up(spec_[i], list, 0);
  }
  Pair biases_of(size_t i) const {
    const LayerTensors layer = tensors_of(spec_, i, params_);
    std::vector<Tensor> list;
    for (int w = 0; w < spec_[i].weights(); ++w) list.push_back(*layer.bias(w));
    return gate_and_up(spec_[i], list, 0);
  }

  static cuda::Matrix matrix_of(const Tensor& t) {
    return {t.const_data_ptr(), t.stride(0), t.stride(1)};
  }
  template <class Call>
  Call call_of(size_t i, int64_t M) const {
    const LayerSpec& s = spec_[i];
    Call call;
    call.dtype = dtype_;
    call.M = M;
    call.N = features(i);
    call.act = s.act;
    call.p0 = s.p0;
    call.p1 = s.p1;
    call.gated = s.gated();
    if (s.drop > 0) {
      call.mask = masks_[i].const_data_ptr<uint8_t>();
      call.scale = 1 / (1 - s.drop);
    }
    call.stream = stream_;
    return call;
  }
  Tensor activated(size_t i, const Tensor& gate, const Tensor& up, const Pair* biases) const {
    const Tensor y = at::empty({gate.size(0), features(i)}, gate.options());
    cuda::ActivateCall call = call_of<cuda::ActivateCall>(i, gate.size(0));
    call.gate = matrix_of(gate);
    call.up = matrix_of(up);
    if (biases) {
      call.gate_bias = biases->first.const_data_ptr();
      call.up_bias = biases->second.const_data_ptr();
      call.bias_stride = biases->first.stride(0);
    }
    call.y = y.mutable_data_ptr();
    cuda::run_activate(call);
    return y;
  }
  Tensor output_again(size_t i, TensorList saved) const {
    return plain(i) ? saved[0] : activated(i, saved[0], saved.back(), nullptr);
  }

  static void product_into(Tensor to, const Tensor& x, const Tensor& weight,
                           const std::optional<Tensor>& bias) {
    if (bias)
      at::addmm_out(to, *bias, x, weight.t());
    else
      at::mm_out(to, x, weight.t());
  }
  Tensor layer_forward(size_t i, const Tensor& x, TensorList saved) const {
    const LayerTensors layer = tensors_of(spec_, i, params_);
    const bool biased = spec_[i].bias;
    if (!saved.empty()) {  // biases are part of what is kept
      const Pair weights = weights_of(i);
      const std::optional<Pair> biases = biased ? std::optional(biases_of(i)) : std::nullopt;
      const auto bias = [&](bool up) {
        return biases ? std::optional(up ? biases->second : biases->first) : std::nullopt;
      };
      product_into(saved[0], x, weights.first, bias(false));
      if (saved.size() > 1) product_into(saved[1], x, weights.second, bias(true));
      return output_again(i, saved);
    }
    if (plain(i)) {
      const Tensor weight = layer.weight(0).t();
      return biased ? at::addmm(*layer.bias(0), x, weight) : at::mm(x, weight);
    }
    std::vector<Tensor> made;
    for (int w = 0; w < spec_[i].weights(); ++w) made.push_back(at::mm(x, layer.weight(w).t()));
    const Pair both = gate_and_up(spec_[i], made, 1);
    if (!biased) return activated(i, both.first, both.second, nullptr);
    Pair biases = biases_of(i);
    if (biases.first.stride(0) != biases.second.stride(0))  // kernels take one
      biases = {biases.first.contiguous(), biases.second.contiguous()};
    return activated(i, both.first, both.second, &biases);
  }

  Made layer_gradients(size_t i, const Tensor& d, TensorList saved, bool output, const bool* needed,
                       std::vector<Tensor>& grads) const {
    const LayerSpec& s = spec_[i];
    if (plain(i)) {
      if (needs_bias(i, needed)) grads[1 + weight_index(i, 0) + 1] = d.sum(0);
      return {{d}, output ? saved[0] : Tensor()};
    }
    std::vector<Tensor> biases;
    if (needs_bias(i, needed))
      for (int w = 0; w < s.weights(); ++w) {
        const size_t at = weight_index(i, w) + 1;
        biases.push_back(at::empty(params_[at].sizes(), params_[at].options()));
        if (needed[1 + at]) grads[1 + at] = biases.back();
      }
    const int64_t M = d.size(0), N = features(i);
    Made made;
    const int64_t rows = s.gated() && s.gate != Gate::separate ? 2 * N : N;
    for (int w = 0; w < s.weights(); ++w)
      made.of_products.push_back(at::empty({M, rows}, d.options()));
    const Pair products = gate_and_up(s, made.of_products, 1);
    auto call = call_of<cuda::ActivateBackwardCall>(i, M);
    if (!saved.empty()) {
      call.gate = matrix_of(saved[0]);
      call.up = matrix_of(saved.back());
    }
    call.d = matrix_of(d);
    call.grad_gate = products.first.mutable_data_ptr();
    call.grad_up = products.second.mutable_data_ptr();
    call.grad_m = products.first.stride(0);
    call.grad_n = products.first.stride(1);
    if (output) {
      made.output = at::empty({M, N}, d.options());
      call.y = made.output.mutable_data_ptr();
    }
    if (!biases.empty()) {
      const Pair sums = gate_and_up(s, biases, 0);
      call.gate_sums = sums.first.mutable_data_ptr();
      if (s.gated()) call.up_sums = sums.second.mutable_data_ptr();
      call.sums_stride = sums.first.stride(0);
    }
    const Tensor workspace = at::empty({int64_t(cuda::activate_backward_workspace(call))},
                                       d.options().dtype(at::kFloat));
    cuda::run_activate_backward(call, workspace.mutable_data_ptr<float>());
    return made;
  }
  Tensor input_gradient(size_t i, const Made& own) const {
    const LayerTensors layer = tensors_of(spec_, i, params_);
    Tensor d = at::mm(own.of_products[0], layer.weight(0));
    if (own.of_products.size() > 1) d = at::addmm(d, own.of_products[1], layer.weight(1));
    return d;
  }
  void weight_gradients(size_t i, const Made& own, const Tensor& input, const bool* needed,
                        std::vector<Tensor>& grads) const {
    for (int w = 0; w < spec_[i].weights(); ++w) {
      const size_t at = weight_index(i, w);
      if (!needed[1 + at]) continue;
      const Tensor& dz = own.of_products[size_t(w)];
      grads[1 + at] = spec_[i].transposed ? at::mm(input.t(), dz) : at::mm(dz.t(), input);
    }
  }

  const TensorList params_;
  const Spec& spec_;
  const DType dtype_;
  void* const stream_;
  std::vector<Tensor> masks_;  // undefined without dropout
  std::vector<size_t> first_;  // tensor of each layer
};

}  // namespace torchweld
