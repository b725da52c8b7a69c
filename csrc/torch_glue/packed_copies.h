// Packed copies of weights that outlive a call, and the check that the weights have not changed
// since. Copies have numbers, so that a graph can refer to one: see chain_kept.
#pragma once
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernels/kernel_api.h"
#include "rolling_check.h"
#include "tensor_memory.h"

namespace torchweld {

using at::Tensor;

// One tensor as it was when it was packed. The storage is held weakly, so its address cannot be
// reused and comparing addresses is enough (after `p.data = new` the allocator gave the same
// pointer and version in 15 of 50 tries). A fused optimizer and edits through `.data` do not change
// the version. A strided sample of the contents catches most of those; rolling_check.h finds the
// rest within 1,000 calls.
struct SeenTensor {
  static constexpr int kSamples = 16;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  const char* data;
  size_t nbytes;  // of the storage, which can be resized in place under the tensor
  uint32_t version;
  at::DimVector sizes, strides;
  std::array<int64_t, kSamples> offsets;  // in elements
  std::array<uint64_t, kSamples> contents;
  int64_t element;  // bytes per element

  static uint32_t version_of(const Tensor& t) {
    return t.is_inference() ? 0 : t.unsafeGetTensorImpl()->version_counter().current_version();
  }
  explicit SeenTensor(const Tensor& t)
      : storage(t.storage().getWeakStorageImpl()),
        data(static_cast<const char*>(t.const_data_ptr())),
        nbytes(t.storage().nbytes()),
        version(version_of(t)),
        sizes(t.sizes()),
        strides(t.strides()),
        element(int64_t(t.element_size())) {
    offsets.fill(0);
    contents.fill(0);
    // Do not read what `pack` will refuse.
    if (t.numel() == 0 || t.dim() < 1 || t.dim() > 2 || !has_its_memory(t)) return;
    // One sample in every sixteenth of the rows and in every sixteenth of the columns, so that an
    // edit of an eighth of all rows or columns is seen wherever it lies.
    const int64_t columns = t.dim() == 2 ? t.size(1) : 1, rows = t.numel() / columns;
    for (int i = 0; i < kSamples; ++i) {
      const int64_t row = (rows - 1) * i / (kSamples - 1);
      const int64_t column = (columns - 1) * (7 * i % kSamples) / (kSamples - 1);
      offsets[i] = row * t.stride(0) + (columns > 1 ? column * t.stride(1) : 0);
    }
    visit([&](auto bits) {
      for (int i = 0; i < kSamples; ++i) contents[i] = bits[offsets[i]];
      return true;
    });
  }

  // Calls `body` with the data as integers of the element's size.
  template <class F>
  bool visit(F&& body) const {
    if (element == 2) return body(reinterpret_cast<const uint16_t*>(data));
    if (element == 4) return body(reinterpret_cast<const uint32_t*>(data));
    return body(reinterpret_cast<const uint64_t*>(data));
  }

  bool same(const Tensor& t) const {
    if (t.storage().unsafeGetStorageImpl() != storage._unsafe_get_target() ||
        static_cast<const char*>(t.const_data_ptr()) != data || t.storage().nbytes() != nbytes ||
        version_of(t) != version || t.sizes() != at::IntArrayRef(sizes) ||
        t.strides() != at::IntArrayRef(strides) || int64_t(t.element_size()) != element)
      return false;
    return visit([&](auto bits) {
      uint64_t difference = 0;
      for (int i = 0; i < kSamples; ++i) difference |= bits[offsets[i]] ^ contents[i];
      return difference == 0;
    });
  }
};

// Safe to use from any thread. A tensor that `get` returned stays valid when another thread makes a
// new copy.
class PackedCopy {
 public:
  // Returns the copy, and makes it first if there is none of exactly these weights. `times` gets
  // the number of copies made so far.
  Tensor get(c10::ArrayRef<const Tensor*> params, std::string_view spec, int64_t* times = nullptr) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!fresh(params, spec) || !rolling_.unchanged()) make(params, spec);
    if (times) *times = times_;
    return packed_;
  }
  // Whether the copy of that time is still there, and still the one of exactly these weights.
  bool still(c10::ArrayRef<const Tensor*> params, std::string_view spec, int64_t times) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return times == times_ && fresh(params, spec);
  }
  void clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    drop();
  }
  int64_t nbytes() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return packed_.defined() ? packed_.numel() : 0;
  }
  int64_t times() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return times_;
  }

 private:
  bool fresh(c10::ArrayRef<const Tensor*> params, std::string_view spec) const {
    if (!packed_.defined() || seen_.size() != params.size() || made_by_ != &kernels() ||
        spec_ != spec)
      return false;
    for (size_t i = 0; i < params.size(); ++i)
      if (params[i]->scalar_type() != dtype_ || !seen_[i].same(*params[i])) return false;
    return true;
  }
  void make(c10::ArrayRef<const Tensor*> params, std::string_view spec) {
    static const auto pack = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("torchweld::pack", "")
                                 .typed<Tensor(at::TensorList, std::string_view)>();
    drop();
    std::vector<Tensor> owned;
    for (const Tensor* p : params) owned.push_back(*p);
    // Record the weights before copying them: a later check then sees an edit made in between.
    for (const Tensor& p : owned) seen_.emplace_back(p);
    rolling_.watch(params);
    packed_ = pack.call(owned, spec);
    spec_ = spec;
    dtype_ = owned[0].scalar_type();
    made_by_ = &kernels();
    ++times_;
  }
  void drop() {
    packed_ = Tensor();
    seen_.clear();
    rolling_.clear();
  }

  std::mutex mutex_;
  Tensor packed_;
  std::vector<SeenTensor> seen_;
  RollingCheck rolling_;
  std::string spec_;
  at::ScalarType dtype_ = at::kFloat;
  const Kernels* made_by_ = nullptr;
  int64_t times_ = 0;  // made so far
};

// The copies of this process by number. They live as long as their owners. A number is never
// reused.
class PackedCopies {
 public:
  struct Numbered {
    std::shared_ptr<PackedCopy> copy;
    Tensor number;  // one int64
  };
  static Numbered add() {
    PackedCopies& all = instance();
    const int64_t number = ++all.last_;
    // Below the dispatcher, since this has to be a real tensor under every mode.
    Tensor tensor = at::detail::empty_cpu({1}, at::kLong);
    *tensor.mutable_data_ptr<int64_t>() = number;
    // Done before locking, since the copy's deleter takes the same lock.
    std::shared_ptr<PackedCopy> copy(new PackedCopy, [number](PackedCopy* p) {
      instance().remove(number);
      delete p;
    });
    const std::lock_guard<std::mutex> lock(all.mutex_);
    all.copies_[number] = copy;
    return {std::move(copy), std::move(tensor)};
  }
  // Returns null for a number of another process, or of a copy that is gone.
  static std::shared_ptr<PackedCopy> find(const Tensor& number) {
    if (number.scalar_type() != at::kLong || number.numel() != 1 || !number.device().is_cpu())
      return nullptr;
    PackedCopies& all = instance();
    const std::lock_guard<std::mutex> lock(all.mutex_);
    const auto found = all.copies_.find(*number.const_data_ptr<int64_t>());
    return found == all.copies_.end() ? nullptr : found->second.lock();
  }

 private:
  static PackedCopies& instance() {
    static PackedCopies* all =
        new PackedCopies;  // never destroyed: modules may outlive static objects
    return *all;
  }
  void remove(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    copies_.erase(number);
  }

  std::mutex mutex_;
  std::unordered_map<int64_t, std::weak_ptr<PackedCopy>> copies_;
  std::atomic<int64_t> last_{0};
};

}  // namespace torchweld
