// Memory for weight gradients that does not fault anew at every step.
//
// Gradients are freed before every step (`zero_grad`) and needed again after it. malloc gives blocks
// of this size back to the system, so every step touches fresh pages: 18.9 MB of them cost 5.7 ms,
// more than the products of eight rows (Zen 4). The pool keeps them, in huge pages where the system
// grants them, up to a limit, and never more than was in use at once.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

#include <cstdint>
#include <list>
#include <map>
#include <mutex>

#include "huge_pages.h"

namespace torchweld {

constexpr size_t kPooledBytes = 256 << 10;  // smaller tensors malloc keeps

class GradientPool {
 public:
  struct State {
    size_t in_use, idle, limit;  // bytes
  };

  static GradientPool& instance() {
    static GradientPool* pool = new GradientPool;  // gradients may outlive any destructor
    return *pool;
  }

  // An uninitialised, contiguous CPU tensor.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) {
    size_t bytes = c10::elementSize(dtype);
    for (const int64_t s : sizes) bytes *= size_t(s);
    const size_t rounded = (bytes + kPage - 1) / kPage * kPage;
    void* data;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (bytes == 0 || limit_ == 0) return at::empty(sizes, dtype);
      data = take(rounded);
    }
    tell_profiler(data, int64_t(bytes));
    const auto free = [bytes, rounded](void* p) {
      tell_profiler(p, -int64_t(bytes));
      instance().give_back(p, rounded);
    };
    return at::from_blob(data, sizes, free, dtype);
  }

  State state() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {in_use_, idle(), limit_};
  }
  // Idle memory above the limit goes back to the system; 0 turns the pool off.
  void limit(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    limit_ = bytes;
    release_above(limit_);
  }
  // Gives all idle memory back to the system, as far as no gradient lies in the same slab.
  void release() {
    const std::lock_guard<std::mutex> lock(mutex_);
    release_above(0);
  }

 private:
  static constexpr size_t kPage = 4096, kSlabBytes = size_t(64) << 20;

  // Tells profilers what torch's own allocator tells: which op made the memory, when it was freed.
  static void tell_profiler(void* data, int64_t bytes) {
    if (c10::memoryProfilingEnabled())
      c10::reportMemoryUsageToProfiler(data, bytes, instance().state().in_use, 0, at::kCPU);
  }

  // A slab and its free ranges, by where they begin. What was never handed out is not resident.
  struct Region {
    Slab slab;
    char* begin;
    size_t size, touched = 0;
    std::map<size_t, size_t> free;
    explicit Region(size_t bytes)
        : slab(bytes), begin(slab.take(bytes)), size(bytes), free{{0, bytes}} {}
    bool is_idle() const { return free.size() == 1 && free.begin()->second == size; }
  };

  // First fit: steps repeat, so gradients find the places of the step before.
  void* take(size_t bytes) {
    for (Region& r : regions_)
      if (void* p = take_from(r, bytes)) return p;
    regions_.emplace_back(std::max(bytes, kSlabBytes));
    return take_from(regions_.back(), bytes);
  }
  void* take_from(Region& r, size_t bytes) {
    for (auto at = r.free.begin(); at != r.free.end(); ++at) {
      if (at->second < bytes) continue;
      const auto [offset, size] = *at;
      r.free.erase(at);
      if (size > bytes) r.free.emplace(offset + bytes, size - bytes);
      in_use_ += bytes;
      r.touched = std::max(r.touched, offset + bytes);
      return r.begin + offset;
    }
    return nullptr;
  }
  void give_back(void* data, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    char* p = static_cast<char*>(data);
    for (Region& r : regions_) {
      if (p < r.begin || p >= r.begin + r.size) continue;
      size_t offset = size_t(p - r.begin);
      in_use_ -= bytes;
      auto next = r.free.lower_bound(offset);
      if (next != r.free.end() && offset + bytes == next->first) {
        bytes += next->second;
        next = r.free.erase(next);
      }
      if (next != r.free.begin()) {
        const auto before = std::prev(next);
        if (before->first + before->second == offset) {
          offset = before->first;
          bytes += before->second;
          r.free.erase(before);
        }
      }
      r.free.emplace(offset, bytes);
      break;
    }
    release_above(limit_);
  }
  size_t idle() const {
    size_t touched = 0;
    for (const Region& r : regions_) touched += r.touched;
    return touched - in_use_;
  }
  void release_above(size_t most) {
    for (auto r = regions_.begin(); r != regions_.end() && idle() > most;)
      r = r->is_idle() ? regions_.erase(r) : std::next(r);
  }

  std::mutex mutex_;
  std::list<Region> regions_;
  size_t in_use_ = 0;
  size_t limit_ = size_t(1) << 30;
};

}  // namespace torchweld
