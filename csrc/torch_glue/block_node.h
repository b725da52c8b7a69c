// A call of a block in autograd's graph: what it keeps, and how its gradients are computed.
//
// The node is written by hand, as torch's own nodes are. torch::autograd::Function would serve too,
// but notes device, type and sizes of each input and output, and looks tensors up in several sets.
// That costs 1 to 2 us per call: 5 us instead of 6 for one row of 64->256->64 (Zen 5, one thread).
#pragma once
#include <ATen/ATen.h>
#include <ATen/FuncTorchTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/version.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "refusal.h"
#include "training_ops.h"

// The interface of compiled autograd has changed from release to release.
#define TORCHWELD_COMPILED_AUTOGRAD \
  (TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 13))
#if TORCHWELD_COMPILED_AUTOGRAD
#include <torch/csrc/dynamo/compiled_autograd.h>
#endif

namespace torchweld {

using torch::autograd::variable_list;

// Where the memory of a parameter was at the forward. Cheaper than an alias, which is a tensor.
class Place {
 public:
  explicit Place(const Tensor& t)
      : storage_(t.storage()),
        offset_(t.storage_offset()),
        sizes_(t.sizes()),
        strides_(t.strides()),
        dtype_(t.scalar_type()) {}

  // Whether t has memory of its own; a tracer's tensors and meta tensors do not.
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

// How the gradients of a call are computed from what it kept. Plain data: a compiled graph keeps a
// copy, and calls it with tensors of later steps.
struct BlockBackward {
  using Gradients = std::vector<Tensor> (*)(const BlockBackward&, TensorList grads,
                                            const Kept& kept, const c10::List<bool>& needed);
  Gradients gradients;  // those that are needed: of x, then of the parameters
  const char* name;
  const WayOps* ops;
  std::string spec;
  size_t params, saved;

  // `kept` in the order of Kept. Outputs without a gradient have an undefined one in `grads`.
  variable_list operator()(variable_list grads, TensorList kept,
                           const c10::List<bool>& needed) const {
    // Autocast was heeded in the forward: gradients have the types that it left.
    const c10::impl::ExcludeDispatchKeyGuard as_typed(c10::autocast_dispatch_keyset);
    variable_list found(1 + params);
    if (std::none_of(grads.begin(), grads.end(), [](const Tensor& g) { return g.defined(); }))
      return found;
    const Kept parts{kept[0], kept.slice(1, params), kept.slice(1 + params, saved),
                     kept.slice(1 + params + saved)};
    define(grads, parts);
    std::vector<Tensor> some = gradients(*this, grads, parts, needed);
    size_t next = 0;
    for (size_t i = 0; i < found.size(); ++i)
      if (needed.get(i)) found[i] = std::move(some[next++]);
    return found;
  }

 private:
  // Only groups have several outputs.
  void define(variable_list& grads, const Kept& kept) const {
    if (std::all_of(grads.begin(), grads.end(), [](const Tensor& g) { return g.defined(); }))
      return;
    const auto sizes = check_all<c10::SymInt>(kept.x, kept.params, spec_of(spec), true);
    c10::SymDimVector shape(kept.x.sym_sizes());
    for (size_t i = 0; i < grads.size(); ++i) {
      shape.back() = sizes[i].N;
      if (!grads[i].defined()) grads[i] = at::zeros_symint(shape, kept.x.options());
    }
  }
};

class BlockNode final : public torch::autograd::Node {
 public:
  BlockNode(BlockBackward backward, const Kept& kept)
      : torch::autograd::Node(torch::autograd::collect_next_edges(kept.x, kept.params)),
        backward_(std::move(backward)) {
    kept_.reserve(1 + kept.params.size() + kept.saved.size() + kept.masks.size());
    kept_.emplace_back(kept.x, false);
    for (TensorList part : {kept.params, kept.saved, kept.masks})
      for (const Tensor& t : part) kept_.emplace_back(t, false);
    note_places(kept.params);
  }

  std::string name() const override { return backward_.name; }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return backward_(std::move(grads), unpacked(), needed());
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& one : kept_) one.reset_data();
    places_.clear();
  }

#if TORCHWELD_COMPILED_AUTOGRAD
  // What a compiled graph of this node depends on, and its inputs.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    TORCHWELD_CHECK(in_place(), "torchweld: the memory of a parameter was replaced (.data = …) ",
                    "between the forward and a compiled backward; run the forward again");
    args.collect(std::string(backward_.name));
    args.collect(reinterpret_cast<uint64_t>(backward_.ops));
    args.collect(backward_.spec);
    args.collect(uint64_t(backward_.params));
    args.collect(uint64_t(backward_.saved));
    args.collect(kept_, false);
    for (const bool one : needed()) args.collect(one);
  }
  // Puts a call of `backward_` into the graph that is being compiled.
  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swapped) override {
    namespace compiled = torch::dynamo::autograd;
    swapped.before(kept_);
    variable_list all;
    for (const auto& one : kept_) all.push_back(one.unpack());
    const std::vector<at::IValue> arguments{all, needed()};
    const auto run = [backward = backward_](const variable_list& grads,
                                            const std::vector<at::IValue>& given) {
      return backward(grads, given[0].toTensorVector(), given[1].toBoolList());
    };
    const auto& compiler = compiled::getPyCompilerInterface();
    const std::string bound = compiler->bind_function(
        swapped.get_py_compiler(), backward_.name, run, {arguments[0].type(), arguments[1].type()},
        /*is_custom_function=*/true, /*is_traceable=*/true);
    const auto outputs =
        compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            compiled::get_input_metadata(next_edges()));
    variable_list found = compiler->call_function(swapped.get_py_compiler(), "apply_functional",
                                                  bound, grads, arguments, outputs);
    swapped.after(kept_);
    return found;
  }
#endif

 private:
  c10::List<bool> needed() const {
    c10::List<bool> needed;
    needed.reserve(1 + backward_.params);
    for (size_t i = 0; i <= backward_.params; ++i) needed.push_back(task_should_compute_output(i));
    return needed;
  }

  // Where the parameters are now, and with hooks on saved tensors, which tensors they are.
  void note_places(TensorList params) {
    if (!std::all_of(params.begin(), params.end(), Place::known_of)) return;
    const bool hooked = !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
    const Spec& spec = spec_of(backward_.spec);
    size_t i = 0;
    for (const LayerSpec& layer : spec)
      for (int j = 0; j < layer.tensors(); ++j, ++i) {
        const bool weight = !layer.bias || j % 2 == 0;
        places_.emplace_back();
        // nn.Linear's product saves a view of its weight, which keeps the old memory after
        // `p.data = …`. A product with a weight that is [in, out] saves the weight itself, and
        // then reads the new memory: so do we, without a place.
        if (!(weight && layer.transposed)) places_.back().emplace(params[i]);
        if (hooked) hooked_.emplace_back(params[i].getIntrusivePtr());
      }
  }
  // Whether `now`, which is what parameter i was unpacked to, is not where the parameter was at the
  // forward. Not if a hook has made other memory of it: that is what the backward is to read.
  bool moved(size_t i, const Tensor& now) const {
    if (i >= places_.size() || !places_[i] || places_[i]->holds(now)) return false;
    if (hooked_.empty()) return true;
    const auto parameter = hooked_[i].lock();
    return parameter && parameter->unsafe_storage().is_alias_of(now.storage());
  }
  // Whether all parameters are where they were. What hooks would return is not asked for: they run
  // in the compiled graph.
  bool in_place() const {
    for (size_t i = 0; i < places_.size(); ++i) {
      if (!places_[i]) continue;
      const Tensor now = hooked_.empty() ? kept_[1 + i].unpack() : Tensor(hooked_[i].lock());
      if (now.defined() && !places_[i]->holds(now)) return false;
    }
    return true;
  }

  // If a parameter gets other memory before the backward (`p.data = …`), eager's products still see
  // the memory of the forward. So do ours: they read the parameters as they were.
  variable_list unpacked() const {
    variable_list all;
    all.reserve(kept_.size());
    for (const auto& one : kept_) all.push_back(one.unpack());
    for (size_t i = 0; i < backward_.params; ++i) {
      Tensor& now = all[1 + i];
      if (!moved(i, now)) continue;
      // A second derivative needs the parameters themselves.
      TORCHWELD_CHECK(!at::GradMode::is_enabled(),
                      "torchweld: the memory of a parameter was replaced (.data = …) between the "
                      "forward and a backward with create_graph=True; run the forward again");
      now = places_[i]->tensor(now);
    }
    return all;
  }

  const BlockBackward backward_;
  std::vector<torch::autograd::SavedVariable> kept_;
  std::vector<std::optional<Place>> places_;  // of the parameters; empty if one has no memory
  std::vector<c10::weak_intrusive_ptr<at::TensorImpl>> hooked_;  // the parameters; empty: no hooks
};

// torch counts references to a node in the node; earlier releases did so beside it.
template <class Pointer = decltype(torch::autograd::Edge::function)>
Pointer new_node(BlockBackward backward, const Kept& kept) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>)
    return Pointer(new BlockNode(std::move(backward), kept), [](auto* node) { deleteNode(node); });
  else
    return c10::make_intrusive<BlockNode>(std::move(backward), kept);
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
