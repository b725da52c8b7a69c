// Scratch memory of a thread, kept between calls, and how its rows are laid out.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "kernel_api.h"
#include "vectors.h"

namespace {

constexpr size_t kLine = 64;  // of the caches
inline size_t whole_lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// One buffer that only grows: a fresh one of 2 MB would cost 500 page faults per call.
class Arena {
 public:
  ~Arena() { std::free(data_); }
  template <class C>
  C* get(size_t count) {
    const size_t bytes = whole_lines(count * sizeof(C));
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      data_ = bytes > torchweld::scratch_limit() ? nullptr : std::aligned_alloc(kLine, bytes);
      if (!data_) throw std::bad_alloc();
      size_ = bytes;
    }
    return static_cast<C*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};
// Input and hidden values of a block of rows; sums of a layer's tiles; panels made during a call;
// gradients of parts of the rows.
thread_local Arena block_arena, sums_arena, panel_arena, parts_arena;

// How far apart the rows of a buffer lie: whole registers, and never a multiple of 2 KB, since rows
// a multiple of 4 KB apart fall into one set of the L1 cache.
template <class C>
int64_t padded_ld(int64_t columns) {
  const int64_t L = kLanes<C>;
  const int64_t ld = (columns + L - 1) / L * L;
  return ld * sizeof(C) % 2048 == 0 ? ld + 64 / int64_t(sizeof(C)) : ld;
}

}  // namespace
