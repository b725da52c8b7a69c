// What torch_ops.cpp offers to the Python glue beyond the registered ops.
#pragma once
#include <ATen/core/Tensor.h>

#include "kernels/kernel_api.h"

namespace torchweld {

Run& last_run();  // of the calling thread

// Whether torch's own ops are faster for a chain on CPU; `chain` then uses them.
bool composition_is_faster(const at::Tensor& x, at::TensorList params);

}  // namespace torchweld
