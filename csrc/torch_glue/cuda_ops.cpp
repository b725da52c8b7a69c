// The way `cuda`: torchweld::cuda_saving and cuda_backward on the kernels of csrc/cuda. Narrow
// chains run in one launch, others as torch's products and the pointwise kernels.
//
// With TORCHWELD_CUDA_ON_HOST the ops take CPU tensors and the kernels run on the host: tests build
// the same file so.
#include <ATen/ATen.h>
#include <torch/library.h>

#ifndef TORCHWELD_CUDA_ON_HOST
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include "cuda_products.h"
#include "training_checks.h"
#include "training_layers.h"
#include "way_checks.h"

namespace torchweld {

namespace {

#ifdef TORCHWELD_CUDA_ON_HOST
#define TORCHWELD_CUDA_KEY CPU
struct OnDeviceOf {
  explicit OnDeviceOf(const Tensor&) {}
  void* stream() const { return nullptr; }
};
#else
#define TORCHWELD_CUDA_KEY CUDA
// Kernels and memory are of the tensor's device, and wait for what is in its current stream.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& t) : guard_(t.device()) {}
  void* stream() const { return c10::cuda::getCurrentCUDAStream().stream(); }

 private:
  c10::cuda::CUDAGuard guard_;
};
#endif

Tensor rows_of(const Tensor& t) { return t.dim() == 2 ? t : t.reshape({-1, t.size(-1)}); }
Tensor values_like(const Tensor& x, int64_t N) {
  at::DimVector sizes(x.sizes());
  sizes.back() = N;
  return at::empty(sizes, x.options());
}
std::vector<Tensor> empty_saved(const Tensor& x, const Spec& spec,
                                const std::vector<LayerSizes<int64_t>>& sizes) {
  std::vector<Tensor> saved;
  for (size_t i = 0; i < spec.size(); ++i)
    for (size_t j = saved_count(spec[i], i + 1 == spec.size()); j > 0; --j)
      saved.push_back(values_like(x, sizes[i].N));
  return saved;
}
// Autocast would cast the operands of torch's products: a backward that is called under it runs with
// it on. The op's own cast has been made by then.
struct WithoutAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};
DType served(const Tensor& x) { return check_computed_by(x, "cuda"); }

// A chain's tensors as kernels take them, and the two ways to run it.
class CudaChain {
 public:
  CudaChain(const Tensor& x, TensorList params, TensorList masks, const Spec& spec,
            const std::vector<LayerSizes<int64_t>>& sizes, void* stream)
      : spec_(spec),
        sizes_(sizes),
        params_(params),
        dtype_(served(x)),
        stream_(stream),
        x_(rows_of(x)),
        masks_(contiguous(masks)),
        layers_(natural_layers(params, spec, sizes, dtype_)),
        products_(params, masks_, spec, dtype_, stream) {}

  // The first `count` layers. Fills `saved`, if there is room. An undefined y is not made.
  Tensor forward(TensorList saved, size_t count, bool output) const {
    const auto training = training_layers(spec_, false, saved, masks_);
    cuda::NarrowCall call;
    fill(call, training.data(), count);
    const cuda::NarrowPlan plan = cuda::plan_narrow(call);
    if (!plan.problem.empty()) return products_.forward(x_, rows(saved), count);
    const Tensor y = output ? at::empty({call.M, sizes_[count - 1].N}, x_.options()) : Tensor();
    cuda::run_narrow(call, plan, output ? y.mutable_data_ptr() : nullptr);
    return y;
  }

  // Gradients of x and the tensors; undefined where none is needed.
  std::vector<Tensor> backward(const Tensor& grad, TensorList saved, const Flags& needed) const {
    const Tensor d = rows_of(grad);
    const auto training = training_layers(spec_, false, saved, masks_);
    cuda::NarrowBackwardCall call;
    fill(call, training.data(), spec_.size());
    call.grad_y = matrix(d);
    if (!cuda::plan_narrow_backward(call).problem.empty())
      return products_.backward(d, x_, rows(saved), needed.data());
    std::vector<Tensor> grads(1 + params_.size());
    if (needed[0]) grads[0] = at::empty(x_.sizes(), x_.options());
    for (size_t i = 0; i < params_.size(); ++i)
      if (needed[1 + i]) grads[1 + i] = at::empty(params_[i].sizes(), params_[i].options());
    const GradientPlaces places =
        layer_gradients({grads.begin() + 1, grads.end()}, spec_, sizes_, x_.element_size());
    call.gradients = places.data();
    if (needed[0]) call.grad_x = grads[0].mutable_data_ptr();
    const cuda::NarrowPlan plan = cuda::plan_narrow_backward(call);
    const Tensor workspace = at::empty({int64_t(plan.workspace)}, x_.options().dtype(at::kFloat));
    cuda::run_narrow_backward(call, plan, workspace.mutable_data_ptr<float>());
    return grads;
  }

 private:
  static cuda::Matrix matrix(const Tensor& t) {
    return {t.const_data_ptr(), t.stride(0), t.stride(1)};
  }
  static std::vector<Tensor> rows(TensorList list) {
    std::vector<Tensor> found;
    for (const Tensor& t : list) found.push_back(t.view({-1, t.size(-1)}));
    return found;
  }
  void fill(cuda::NarrowCall& call, const TrainingLayer* training, size_t count) const {
    call.dtype = dtype_;
    call.layers = layers_.data();
    call.training = training;
    call.count = int(count);
    call.x = matrix(x_);
    call.M = x_.size(0);
    call.stream = stream_;
  }

  const Spec& spec_;
  const std::vector<LayerSizes<int64_t>>& sizes_;
  const TensorList params_;
  const DType dtype_;
  void* const stream_;
  const Tensor x_;
  const std::vector<Tensor> masks_;
  const Layers layers_;
  const CudaProducts products_;
};

std::vector<Tensor> cuda_saving(const Tensor& x, TensorList params, TensorList masks,
                                std::string_view text, bool save) {
  const Spec& spec = spec_of(text);
  const auto sizes = check_all<int64_t>(x, params, spec, false);
  check_training(x, masks, spec, sizes);
  served(x);
  const OnDeviceOf device(x);
  const WithoutAutocast plain;
  std::vector<Tensor> saved;
  if (save) saved = empty_saved(x, spec, sizes);
  at::DimVector shape(x.sizes());
  shape.back() = sizes.back().N;
  std::vector<Tensor> results;
  if (x.numel()) {
    const CudaChain chain(x, params, masks, spec, sizes, device.stream());
    results.push_back(chain.forward(saved, spec.size(), true).view(shape));
  } else {
    results.push_back(at::empty(shape, x.options()));
  }
  results.insert(results.end(), saved.begin(), saved.end());
  if (!save && saved_count(spec, false)) results.push_back(no_checksum(x));
  return results;
}

std::vector<Tensor> cuda_backward(const Tensor& grad, const Tensor& x, TensorList params,
                                  TensorList given_saved, TensorList masks, std::string_view text,
                                  c10::List<bool> list) {
  const Spec& spec = spec_of(text);
  const Flags needed = flags_of(list);
  const auto sizes =
      check_backward<int64_t>(grad, x, params, given_saved, masks, spec, needed.size(), false);
  served(x);
  const OnDeviceOf device(x);
  const WithoutAutocast plain;
  if (x.numel() == 0) {
    std::vector<Tensor> zeros;
    if (needed[0]) zeros.push_back(at::zeros(x.sizes(), x.options()));
    for (size_t i = 0; i < params.size(); ++i)
      if (needed[1 + i]) zeros.push_back(at::zeros(params[i].sizes(), params[i].options()));
    return zeros;
  }
  const CudaChain chain(x, params, masks, spec, sizes, device.stream());
  std::vector<Tensor> saved = contiguous(values_in(given_saved));
  if (saved.empty() && saved_count(spec, false)) {  // nothing was kept: computed again
    saved = empty_saved(x, spec, sizes);
    // The last layer runs only if its own are needed.
    const size_t count = spec.size() - (saved_count(spec.back(), true) == 0 ? 1 : 0);
    if (count > 0) chain.forward(saved, count, false);
  }
  std::vector<Tensor> grads = chain.backward(grad, saved, needed);
  if (needed[0]) grads[0] = grads[0].view(x.sizes());
  return needed_only(std::move(grads), needed.data());
}

c10::List<std::string> cuda_launched() {
  c10::List<std::string> names;
  for (const std::string& name : cuda::launched()) names.push_back(name);
  return names;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  m.def("cuda_launched() -> str[]", cuda_launched);
  m.def("forget_cuda_launches() -> ()", cuda::forget_launches);
}
TORCH_LIBRARY_IMPL(torchweld, TORCHWELD_CUDA_KEY, m) {
  m.impl("cuda_saving", TORCH_FN(cuda_saving));
  m.impl("cuda_backward", TORCH_FN(cuda_backward));
}

}  // namespace torchweld
