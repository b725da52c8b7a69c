// Whether a tensor's storage is large enough for its shape.
#pragma once
#include <ATen/ATen.h>

namespace torchweld {

// A storage can be resized under a strided tensor, so its shape alone does not tell.
inline bool has_its_memory(const at::Tensor& t) {
  if (t.numel() == 0) return true;
  if (!t.has_storage() || !t.const_data_ptr()) return false;
  int64_t last = t.storage_offset();
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return size_t(last + 1) * t.element_size() <= t.storage().nbytes();
}

}  // namespace torchweld
