// A call of a block in autograd's graph: what it keeps, and how its gradients are computed.
//
// The node is written by hand, as torch's own nodes are. torch::autograd::Function would serve too,
// but notes device, type and sizes of each input and output, and looks tensors up in several sets.
// That costs 1 to 2 us per call: 5 us instead of 6 for one row of 64->256->64 (Zen 5, one thread).
#pragma once
#include <ATen/ATen.h>
#include <ATen/FuncTorchTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

#include "refusal.h"
#include "training_ops.h"

namespace torchweld {

// Where the memory of a parameter was at the forward. Cheaper than an alias, which is a tensor.
class Place {
 public:
  explicit Place(const Tensor& t)
      : storage_(t.storage()),
        offset_(t.storage_offset()),
        sizes_(t.sizes()),
        strides_(t.strides()),
        dtype_(t.scalar_type()) {}

  // Not so a tracer's tensors, and meta tensors.
  static bool known_of(const Tensor& t) {
    const c10::DispatchKeySet traced({c10::DispatchKey::Python, c10::DispatchKey::Functionalize});
    return t.has_storage() && !t.is_meta() && !t.is_neg() && !t.key_set().has_any(traced);
  }
  bool holds(const Tensor& t) const {
    return t.storage().unsafeGetStorageImpl() == storage_.unsafeGetStorageImpl() &&
           t.storage_offset() == offset_ && t.sizes() == sizes_ && t.strides() == strides_ &&
           t.scalar_type() == dtype_;
  }
  // The parameter as it was.
  Tensor tensor(const Tensor& now) const {
    at::NoGradGuard guard;
    return at::empty({0}, now.options().dtype(dtype_)).set_(storage_, offset_, sizes_, strides_);
  }

 private:
  c10::Storage storage_;
  int64_t offset_;
  at::DimVector sizes_, strides_;
  at::ScalarType dtype_;
};

// What a block's backward reads: x, the parameters, what the forward computed, dropout masks.
struct Kept {
  const Tensor& x;
  TensorList params, saved, masks;
};

class BlockNode : public torch::autograd::Node {
 public:
  using variable_list = torch::autograd::variable_list;

  BlockNode(std::string_view spec, const Kept& kept)
      : torch::autograd::Node(torch::autograd::collect_next_edges(kept.x, kept.params)),
        spec_(spec),
        params_(kept.params.size()),
        saved_(kept.saved.size()) {
    kept_.reserve(1 + params_ + saved_ + kept.masks.size());
    kept_.emplace_back(kept.x, false);
    for (TensorList part : {kept.params, kept.saved, kept.masks})
      for (const Tensor& t : part) kept_.emplace_back(t, false);
    if (std::all_of(kept.params.begin(), kept.params.end(), Place::known_of))
      places_ = std::vector<Place>(kept.params.begin(), kept.params.end());
  }

  variable_list apply(variable_list&& grads) final {
    const std::lock_guard<std::mutex> lock(mutex_);
    variable_list found(1 + params_);
    if (std::none_of(grads.begin(), grads.end(), [](const Tensor& g) { return g.defined(); }))
      return found;
    for (size_t i = 0; i < grads.size(); ++i)
      if (!grads[i].defined()) grads[i] = input_metadata(i).zeros_like();
    variable_list all;
    all.reserve(kept_.size());
    for (const auto& one : kept_) all.push_back(one.unpack());
    const TensorList now = TensorList(all).slice(1, params_);
    const std::vector<Tensor> before = as_they_were(now);
    const Kept kept{all[0], before.empty() ? now : TensorList(before),
                    TensorList(all).slice(1 + params_, saved_),
                    TensorList(all).slice(1 + params_ + saved_)};
    c10::List<bool> needed;
    needed.reserve(found.size());
    for (size_t i = 0; i < found.size(); ++i) needed.push_back(task_should_compute_output(i));
    std::vector<Tensor> gradients = this->gradients(grads, kept, needed);
    size_t next = 0;
    for (size_t i = 0; i < found.size(); ++i)
      if (needed.get(i)) found[i] = std::move(gradients[next++]);
    return found;
  }

  void release_variables() final {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& one : kept_) one.reset_data();
    places_.clear();
  }

 protected:
  // Those that are needed: of x, then of the parameters.
  virtual std::vector<Tensor> gradients(const variable_list& grads, const Kept& kept,
                                        const c10::List<bool>& needed) const = 0;
  const std::string& spec() const { return spec_; }

 private:
  // If a parameter gets other memory before the backward (`p.data = …`), eager's products still see
  // the memory of the forward. So do ours: they read the parameters as they were. Empty if they are
  // where they were.
  std::vector<Tensor> as_they_were(TensorList now) const {
    const auto holds = [](const Place& place, const Tensor& t) { return place.holds(t); };
    if (std::equal(places_.begin(), places_.end(), now.begin(), holds)) return {};
    // A second derivative needs the parameters themselves.
    TORCHWELD_CHECK(!at::GradMode::is_enabled(),
                    "torchweld: the memory of a parameter was replaced (.data = …) between the "
                    "forward and a backward with create_graph=True; run the forward again");
    std::vector<Tensor> before;
    for (size_t i = 0; i < places_.size(); ++i) before.push_back(places_[i].tensor(now[i]));
    return before;
  }

  const std::string spec_;
  const size_t params_, saved_;
  std::vector<torch::autograd::SavedVariable> kept_;
  std::vector<Place> places_;  // of the parameters; empty if one has no memory of its own
};

// torch counts references to a node in the node; earlier releases did so beside it.
template <class Made, class Pointer = decltype(torch::autograd::Edge::function), class... Arguments>
Pointer new_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>)
    return Pointer(new Made(std::forward<Arguments>(arguments)...),
                   [](auto* node) { deleteNode(node); });
  else
    return c10::make_intrusive<Made>(std::forward<Arguments>(arguments)...);
}

// What a forward runs in whose node is made by hand.
class BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView below_;
  at::NoGradGuard no_gradients_;

 public:
  BelowAutograd() {
    // functorch's levels do not know nodes in C++.
    if (const auto& levels = at::functorch::functorchTLSAccessor())
      levels->checkSupportsCppAutogradFunction();
  }
};

}  // namespace torchweld
