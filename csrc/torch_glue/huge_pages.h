// Memory for packed copies, in huge pages where the system grants them: streaming 19 MB of panels
// through 4 KB pages walks the page table 4,700 times. Small copies share slabs, since a model has
// many. A slab goes back to the system when its last copy is gone; malloc would keep blocks of this
// size.
#pragma once
#include <ATen/ATen.h>
#include <sys/mman.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <new>

namespace torchweld {

class Slab {
 public:
  static constexpr size_t kHuge = size_t(2) << 20;

  explicit Slab(size_t bytes) : size_((bytes + kHuge - 1) / kHuge * kHuge) {
    // Reserve one huge page more than needed, and unmap what lies before and behind the aligned
    // part.
    const size_t reserved = size_ + kHuge;
    void* start =
        mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) throw std::bad_alloc();
    const size_t before = (kHuge - reinterpret_cast<uintptr_t>(start) % kHuge) % kHuge;
    data_ = static_cast<char*>(start) + before;
    if (before) munmap(start, before);
    munmap(data_ + size_, kHuge - before);
#if defined(MADV_HUGEPAGE)
    madvise(data_, size_, MADV_HUGEPAGE);  // only advice: the copy works without it
#endif
  }
  Slab(const Slab&) = delete;
  ~Slab() { munmap(data_, size_); }

  // Returns null if there is no room.
  char* take(size_t bytes) {
    constexpr size_t kLine = 64;
    const size_t rounded = (bytes + kLine - 1) / kLine * kLine;
    if (rounded > size_ - used_) return nullptr;
    char* found = data_ + used_;
    used_ += rounded;
    return found;
  }

 private:
  char* data_;
  size_t size_, used_ = 0;
};

// A byte tensor that keeps its slab alive.
inline at::Tensor bytes_in_huge_pages(size_t bytes) {
  constexpr size_t kSmall = 64 << 10, kShared = 16 * Slab::kHuge;
  if (bytes < kSmall) return at::empty({int64_t(bytes)}, at::kByte);
  std::shared_ptr<Slab> slab;
  char* data = nullptr;
  if (bytes < 2 * Slab::kHuge) {
    static std::mutex mutex;
    static std::weak_ptr<Slab> current;
    const std::lock_guard<std::mutex> lock(mutex);
    slab = current.lock();
    data = slab ? slab->take(bytes) : nullptr;
    if (!data) {
      current = slab = std::make_shared<Slab>(kShared);
      data = slab->take(bytes);
    }
  } else {
    slab = std::make_shared<Slab>(bytes);
    data = slab->take(bytes);
  }
  return at::from_blob(data, {int64_t(bytes)}, [slab](void*) {}, at::kByte);
}

}  // namespace torchweld
