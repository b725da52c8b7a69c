// Finds changes of weights that leave no other trace. Every few calls it compares the next part of
// their memory with its checksum, so that 1,000 calls see all of it. Weights of more than 16 MB
// take proportionally more calls, so that a check costs no more. Two threads must not use it at
// once.
#pragma once
#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tensor_memory.h"

namespace torchweld {

using at::Tensor;

// A checksum of 64 bits, which misses a change with a chance of about 1 in 2^64. Each step
// multiplies two words to 128 bits and folds them, so every bit reaches every other. Four
// independent lanes hide the latency of the product. One product per word would never miss the
// change of a single word, but took 1.5 times as long (EPYC).
inline uint64_t checksum(const char* data, size_t bytes, uint64_t seed) {
  constexpr size_t kLanes = 4, kStep = kLanes * 2 * sizeof(uint64_t);
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;
  __extension__ using Wide = unsigned __int128;
  const auto folded = [](uint64_t a, uint64_t b) {
    const Wide product = Wide(a) * b;
    return uint64_t(product) ^ uint64_t(product >> 64);
  };
  std::array<uint64_t, kLanes> state;
  for (size_t i = 0; i < kLanes; ++i) state[i] = seed + (i + 1) * kOdd;
  const auto step = [&](const char* from) {
    for (size_t i = 0; i < kLanes; ++i) {
      uint64_t a, b;
      std::memcpy(&a, from + 2 * i * sizeof a, sizeof a);
      std::memcpy(&b, from + (2 * i + 1) * sizeof b, sizeof b);
      state[i] = folded(state[i] ^ a, kOdd ^ b);
    }
  };
  // The data comes from memory, and a loop of multiplications does not request it early enough by
  // itself.
  constexpr size_t kAhead = 2 << 10;
  for (size_t i = 0; i < std::min(kAhead, bytes); i += kStep) __builtin_prefetch(data + i);
  size_t at = 0;
  for (; at + kAhead < bytes; at += kStep) {
    __builtin_prefetch(data + at + kAhead);
    step(data + at);
  }
  for (; at + kStep <= bytes; at += kStep) step(data + at);
  if (at < bytes) {
    char rest[kStep] = {};
    std::memcpy(rest, data + at, bytes - at);
    step(rest);
  }
  uint64_t all = bytes;
  for (const uint64_t one : state) all = folded(all ^ kOdd, one + kOdd);
  return all;
}

// The elements of a tensor as rows of equal length.
class Elements {
 public:
  explicit Elements(const Tensor& t) : element_(int64_t(t.element_size())) {
    if (t.numel() == 0 || !has_its_memory(t)) return;
    data_ = static_cast<const char*>(t.const_data_ptr());
    if (t.is_non_overlapping_and_dense()) {
      inner_ = t.numel();
      inner_stride_ = element_;
    } else if (t.dim() == 1) {
      inner_ = t.size(0);
      inner_stride_ = t.stride(0) * element_;
    } else if (t.dim() == 2) {
      const int along = t.stride(0) < t.stride(1) ? 0 : 1;
      inner_ = t.size(along);
      inner_stride_ = t.stride(along) * element_;
      outer_ = t.size(1 - along);
      outer_stride_ = t.stride(1 - along) * element_;
    }  // tensors of more dimensions are refused before they get here
  }
  int64_t count() const { return inner_ * outer_; }
  int64_t bytes() const { return count() * element_; }
  int64_t element() const { return element_; }

  // The checksum of `many` elements from `first` on, row after row.
  uint64_t checksum_of(int64_t first, int64_t many) const {
    uint64_t sum = 0;
    for (int64_t row = first / inner_, column = first % inner_; many > 0; ++row, column = 0) {
      const int64_t taken = std::min(many, inner_ - column);
      const char* from = data_ + row * outer_stride_ + column * inner_stride_;
      if (inner_stride_ == element_)
        sum = checksum(from, size_t(taken * element_), sum);
      else
        sum = apart(from, taken, sum);
      many -= taken;
    }
    return sum;
  }

 private:
  uint64_t apart(const char* from, int64_t count, uint64_t sum) const {
    char near[512];
    const int64_t fit = int64_t(sizeof near) / element_;
    for (int64_t done = 0; done < count; done += fit) {
      const int64_t taken = std::min(fit, count - done);
      for (int64_t i = 0; i < taken; ++i)
        std::memcpy(near + i * element_, from + (done + i) * inner_stride_, size_t(element_));
      sum = checksum(near, size_t(taken * element_), sum);
    }
    return sum;
  }

  const char* data_ = nullptr;
  int64_t element_, inner_ = 0, inner_stride_ = 0, outer_ = 1, outer_stride_ = 0;
};

class RollingCheck {
 public:
  static constexpr int64_t kCalls = 1000;      // after which everything was checked,
  static constexpr int64_t kBytes = 16 << 20;  // if there is at most so much

  // Takes the checksums; reads all of the tensors.
  void watch(c10::ArrayRef<const Tensor*> tensors) {
    clear();
    int64_t total = 0;
    for (const Tensor* t : tensors) total += elements_.emplace_back(*t).bytes();
    const int64_t part = part_bytes(total);
    for (size_t i = 0; i < elements_.size(); ++i) {
      const Elements& e = elements_[i];
      const int64_t many = std::max<int64_t>(part / e.element(), 1);
      for (int64_t first = 0; first < e.count(); first += many) {
        const int64_t taken = std::min(many, e.count() - first);
        parts_.push_back({i, first, taken, e.checksum_of(first, taken)});
      }
    }
    const int64_t count = std::max<int64_t>(int64_t(parts_.size()), 1);
    every_ = std::clamp<int64_t>(kCalls / count, 1, kRarest);
    at_once_ = total > kBytes ? 1 : (count + kCalls - 1) / kCalls;
  }

  // Checks the next part if it is time for one, and returns whether it is unchanged. The tensors
  // given to `watch` must be alive and must not have moved.
  bool unchanged() {
    if (++calls_ < every_ || parts_.empty()) return true;
    calls_ = 0;
    for (int64_t i = 0; i < at_once_; ++i) {
      const Part& part = parts_[next_];
      next_ = next_ + 1 == parts_.size() ? 0 : next_ + 1;
      if (elements_[part.tensor].checksum_of(part.first, part.count) != part.sum) return false;
    }
    return true;
  }

  void clear() {
    elements_.clear();
    parts_.clear();
    next_ = 0;
    calls_ = 0;
  }

 private:
  struct Part {
    size_t tensor;
    int64_t first, count;  // in elements
    uint64_t sum;
  };
  // Nothing else reads this memory, so the first line of each part is a cache miss. A few long
  // parts cost less than many short ones, but a call that checks one should not be much slower than
  // others.
  static constexpr int64_t kLong = 8 << 10, kShort = 1 << 10, kRarest = 64;
  static constexpr int64_t kParts =
      kCalls * 19 / 20;  // leaves room for shorter parts at the ends of tensors
  static int64_t part_bytes(int64_t total) {
    const int64_t every =
        std::clamp<int64_t>(kLong * kParts / std::max<int64_t>(total, 1) + 1, 1, kRarest);
    const int64_t part = std::max(kShort, std::min(total, kBytes) * every / kParts);
    return (part + 63) / 64 * 64;
  }

  std::vector<Elements> elements_;
  std::vector<Part> parts_;
  size_t next_ = 0;
  int64_t calls_ = 0, every_ = 1, at_once_ = 1;
};

}  // namespace torchweld
