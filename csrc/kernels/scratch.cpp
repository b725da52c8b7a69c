// See scratch.h. Compiled without any instruction set's flags: nothing here may depend on one.
#include <atomic>
#include <cstdint>

#include "kernel_api.h"

namespace torchweld {

namespace {

std::atomic<size_t> limit{SIZE_MAX};

}  // namespace

size_t scratch_limit() { return limit.load(std::memory_order_relaxed); }
void limit_scratch(size_t bytes) { limit = bytes; }

}  // namespace torchweld
