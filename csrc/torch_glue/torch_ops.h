// What torch_ops.cpp offers to extension_module.cpp beyond the registered ops.
#pragma once
#include <ATen/core/Tensor.h>

#include "kernels/kernel_api.h"

namespace torchweld {

const Run& last_run();  // of the calling thread

// Whether a chain on CPU is better left to torch's own ops; `chain` then does so.
bool composition_is_faster(const at::Tensor& x, at::TensorList params);

}  // namespace torchweld
