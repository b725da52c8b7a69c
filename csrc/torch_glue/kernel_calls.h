// From tensors to a call of the kernels, forward and backward.
#pragma once
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>

#include "kernel_layers.h"
#include "torch_ops.h"

namespace torchweld {

// x as rows of features. It is copied only if its rows are not one stride apart.
struct Rows {
  Tensor x;  // keeps the memory
  int64_t M, ld;
};
inline Rows rows_of(const Tensor& x) {
  const int64_t K = x.size(-1), M = K ? x.numel() / K : 0;
  if (x.is_contiguous()) return {x, M, K};
  if (x.dim() == 2 && x.stride(1) == 1 && x.stride(0) >= 0) return {x, M, x.stride(0)};
  return {x.contiguous(), M, K};
}

inline int threads_to_use() {
  return in_forked_child() || at::in_parallel_region() ? 1 : at::get_num_threads();
}

inline Tensor output_like(const Tensor& x, int64_t N) {
  at::DimVector sizes(x.sizes());
  sizes.back() = N;
  // below the dispatcher, which would only cost time here
  return at::detail::empty_cpu(sizes, x.scalar_type());
}

// An undefined y is not written. `training` has one entry per layer, or is null.
inline void run_forward(const Tensor& x, const Layers& layers, bool group, c10::ArrayRef<Tensor> ys,
                        const TrainingLayer* training = nullptr) {
  const Rows rows = rows_of(x);
  if (rows.M == 0) return;
  c10::SmallVector<void*, 8> pointers;
  for (const Tensor& y : ys) pointers.push_back(y.defined() ? y.mutable_data_ptr() : nullptr);
  Call call;
  call.dtype = dtype_of(x, "x");
  call.layers = layers.data();
  call.count = int(layers.size());
  call.x = rows.x.const_data_ptr();
  call.M = rows.M;
  call.ldx = rows.ld;
  call.y = pointers.data();
  call.training = training;
  call.threads = threads_to_use();
  const Kernels& k = kernels_in_use();
  (group ? k.run_group : k.run_chain)(call, last_run());
}

// Torch's ops did the work of a kernel.
inline void note_composed(const Tensor& x, const char* pass) {
  Run& run = last_run();
  const bool forward = pass == std::string_view("forward");
  run.isa = "";
  run.pass = pass;
  run.weights = "composed";
  run.partition = "";
  run.threads = 0;
  run.products = 0;
  run.M = x.size(-1) ? x.numel() / x.size(-1) : 0;
  ++(forward ? run.calls : run.backwards);
}

}  // namespace torchweld
