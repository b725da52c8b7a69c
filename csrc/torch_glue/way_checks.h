// Which types the ways of a GPU compute in.
#pragma once
#include <ATen/ATen.h>

#include "argument_checks.h"

namespace torchweld {

// x's type, if the kernels of this way compute in it.
inline DType check_computed_by(const Tensor& x, std::string_view way) {
  const DType dtype = dtype_of(x, "x");
  TORCHWELD_CHECK(dtype != DType::f64, "torchweld: x is float64; the way ", way,
                  " computes in float32, bfloat16 and float16: cast it with .to(), or take another "
                  "way");
  return dtype;
}

}  // namespace torchweld
