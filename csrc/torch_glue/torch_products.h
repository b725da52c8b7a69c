// Training of a chain with torch's products and our pointwise passes: bfloat16 where the CPU
// multiplies it natively (composition_is_faster). Against eager that saves the passes over hidden
// values: activation, its gradient, the outputs again and the bias gradients are one pass.
#pragma once
#include <ATen/ATen.h>

#include <functional>
#include <vector>

#include "composed_backward.h"
#include "kernel_calls.h"

namespace torchweld {

// Makes the tensor that the gradient of params[index] is written to.
using GradientMaker = std::function<Tensor(size_t index)>;

class TorchProducts {
 public:
  TorchProducts(const Tensor& x, TensorList params, TensorList masks, const Spec& spec)
      : x_(x.contiguous()), params_(params), spec_(spec) {
    size_t mask = 0, first = 0;
    for (const LayerSpec& layer : spec) {
      masks_.push_back(layer.drop > 0 ? masks[mask++].contiguous() : Tensor());
      first_.push_back(first);
      first += size_t(layer.tensors());
    }
  }
  // One gradient is [M, 2 N] with gate and up element by element: that is left to the composition.
  static bool serves(const Spec& spec) {
    return std::none_of(spec.begin(), spec.end(),
                        [](const LayerSpec& l) { return l.gate == Gate::interleaved; });
  }

  // y, then the pre-activations if they are to be saved.
  std::vector<Tensor> forward(bool save) const {
    std::vector<Tensor> results{x_};
    for (size_t i = 0; i < spec_.size(); ++i) {
      const PreActivations p = products(i, results[0]);
      if (save && saved_count(spec_[i], last(i))) append(results, spec_[i], p);
      results[0] = output(i, p);
    }
    return results;
  }

  std::vector<Tensor> backward(const Tensor& grad, TensorList saved, const bool* needed,
                               const GradientMaker& make) const {
    const std::vector<PreActivations> kept = pre_activations_of(saved);
    std::vector<Tensor> grads(1 + params_.size());
    size_t lowest = needed[0] ? 0 : spec_.size();
    for (size_t i = spec_.size(); i-- > 0;)
      for (size_t j = 0; j < size_t(spec_[i].tensors()); ++j)
        if (needed[1 + first_[i] + j]) lowest = std::min(lowest, i);
    Tensor g = grad.contiguous();
    LayerGradients after;  // those of the layer after, whose weights wait for this one's output
    for (size_t i = spec_.size(); i-- > lowest;) {
      const bool outputs = i + 1 < spec_.size() && needs_weight(i + 1, needed);
      LayerGradients own = pre_activation_gradients(i, kept[i], g, outputs, needed, make, grads);
      if (outputs) weight_gradients(i + 1, after, own.output, needed, make, grads);
      if (i > lowest || needed[0]) g = input_gradient(i, own);
      after = std::move(own);
    }
    if (lowest < spec_.size() && needs_weight(lowest, needed))
      weight_gradients(lowest, after, lowest == 0 ? x_ : output(lowest - 1, kept[lowest - 1]),
                       needed, make, grads);
    if (needed[0]) grads[0] = g;
    return grads;
  }

 private:
  // Gradients of the pre-activations, one per weight, as [M, N of the weight]; the output again.
  struct LayerGradients {
    std::vector<Tensor> z;
    Tensor output;
  };

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
  static Tensor rows(const Tensor& t) { return t.view({-1, t.size(-1)}); }

  PreActivations products(size_t i, const Tensor& x) const {
    PreActivations p = pre_activations(tensors_of(spec_, i, params_), x);
    for (Tensor* t : {&p.z, &p.gate, &p.up})
      if (t->defined()) *t = t->contiguous();
    return p;
  }
  std::vector<PreActivations> pre_activations_of(TensorList saved) const {
    std::vector<PreActivations> kept;
    size_t next = 0;
    Tensor x = x_;
    for (size_t i = 0; i < spec_.size(); ++i) {
      const size_t count = saved_count(spec_[i], last(i));
      PreActivations p;
      if (count && saved.empty()) p = products(i, x);
      if (count == 1 && !saved.empty()) p.z = saved[next].contiguous();
      if (count == 2 && !saved.empty())
        p = {{}, saved[next].contiguous(), saved[next + 1].contiguous()};
      next += count;
      if (saved.empty() && !last(i)) x = output(i, p);
      kept.push_back(std::move(p));
    }
    return kept;
  }

  PointwiseCall call_of(size_t i, const PreActivations& p) const {
    const LayerSpec& s = spec_[i];
    const Tensor& z = s.gated() ? p.gate : p.z;
    PointwiseCall call;
    call.N = z.size(-1);
    call.M = z.numel() / call.N;
    call.act = s.act;
    call.p0 = s.p0;
    call.p1 = s.p1;
    call.gated = s.gated();
    call.training.z = z.data_ptr();
    if (s.gated()) call.training.up = p.up.data_ptr();
    if (s.drop > 0) {
      call.training.mask = masks_[i].const_data_ptr<uint8_t>();
      call.training.scale = 1 / (1 - s.drop);
    }
    call.threads = threads_to_use();
    return call;
  }
  Tensor output(size_t i, const PreActivations& p) const {
    if (plain(i)) return p.z;
    const Tensor y = at::empty_like(spec_[i].gated() ? p.gate : p.z);
    PointwiseCall call = call_of(i, p);
    call.y = y.mutable_data_ptr();
    kernels_in_use().run_pointwise(call);
    return y;
  }

  LayerGradients pre_activation_gradients(size_t i, const PreActivations& p, const Tensor& g,
                                          bool outputs, const bool* needed,
                                          const GradientMaker& make,
                                          std::vector<Tensor>& grads) const {
    const LayerSpec& s = spec_[i];
    const auto bias = [&](int w) {
      const size_t at = first_[i] + size_t(2 * w + 1);
      if (s.bias && needed[1 + at]) grads[1 + at] = make(at);
      return s.bias && needed[1 + at] ? grads[1 + at] : Tensor();
    };
    const bool unsaved = !s.gated() && !p.z.defined();  // no activation, but perhaps dropout
    if (plain(i) || unsaved) {
      const Tensor dz = s.drop > 0 ? dropped(g, s, masks_[i]) : g;
      if (const Tensor b = bias(0); b.defined()) b.copy_(rows(dz).sum(0));
      return {{dz}, outputs ? p.z : Tensor()};
    }
    PointwiseCall call = call_of(i, p);
    LayerGradients own;
    call.grad_y = g.const_data_ptr();
    const int64_t N = call.N;
    at::DimVector sizes(g.sizes());
    if (s.gated() && s.gate != Gate::separate) sizes.back() = 2 * N;
    for (int w = 0; w < s.weights(); ++w) own.z.push_back(at::empty(sizes, g.options()));
    call.ld = sizes.back();
    const auto halves = [&](const Tensor& both) {
      // gate, up
      char* begin = static_cast<char*>(both.mutable_data_ptr());
      char* second = begin + N * both.element_size();
      return s.gate == Gate::first ? std::pair(begin, second) : std::pair(second, begin);
    };
    if (!s.gated() || s.gate == Gate::separate) {
      call.grad_z = own.z[0].mutable_data_ptr();
      if (s.gated()) call.grad_up = own.z[1].mutable_data_ptr();
      if (const Tensor b = bias(0); b.defined()) call.bias = b.mutable_data_ptr();
      if (s.gated())
        if (const Tensor b = bias(1); b.defined()) call.up_bias = b.mutable_data_ptr();
    } else {
      std::tie(call.grad_z, call.grad_up) = halves(own.z[0]);
      if (const Tensor b = bias(0); b.defined()) std::tie(call.bias, call.up_bias) = halves(b);
    }
    if (outputs) call.y = (own.output = at::empty_like(g)).mutable_data_ptr();
    kernels_in_use().run_pointwise(call);
    return own;
  }
  Tensor input_gradient(size_t i, const LayerGradients& own) const {
    const LayerTensors layer = tensors_of(spec_, i, params_);
    Tensor g = at::mm(rows(own.z[0]), layer.weight(0));
    if (own.z.size() > 1) g = at::addmm(g, rows(own.z[1]), layer.weight(1));
    at::DimVector sizes(x_.sizes());
    sizes.back() = g.size(-1);
    return g.view(sizes);
  }
  void weight_gradients(size_t i, const LayerGradients& own, const Tensor& input,
                        const bool* needed, const GradientMaker& make,
                        std::vector<Tensor>& grads) const {
    for (int w = 0; w < spec_[i].weights(); ++w) {
      const size_t at = weight_index(i, w);
      if (!needed[1 + at]) continue;
      Tensor to = grads[1 + at] = make(at);
      const Tensor in = rows(input), dz = rows(own.z[size_t(w)]);
      if (spec_[i].transposed)
        at::mm_out(to, in.t(), dz);
      else
        at::mm_out(to, dz.t(), in);
    }
  }

  const Tensor x_;
  const TensorList params_;
  const Spec& spec_;
  std::vector<Tensor> masks_;  // undefined without dropout
  std::vector<size_t> first_;  // tensor of each layer
};

}  // namespace torchweld
