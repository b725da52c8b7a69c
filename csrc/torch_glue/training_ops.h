// How the ops of training are called, and what autograd shares with them.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <string>

#include "argument_checks.h"

namespace torchweld {

template <class Signature>
auto op_handle(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// The registered ops, looked up once.
struct TrainingOps {
  using Mask = Tensor(const Tensor&, c10::SymInt, double);
  using ChainSaving = std::vector<Tensor>(const Tensor&, TensorList, TensorList, std::string_view,
                                          bool);
  using GroupSaving = std::vector<Tensor>(const Tensor&, TensorList, std::string_view);
  using ChainBackward = std::vector<Tensor>(const Tensor&, const Tensor&, TensorList, TensorList,
                                            TensorList, std::string_view, c10::List<bool>);
  using GroupBackward = std::vector<Tensor>(TensorList, const Tensor&, TensorList, TensorList,
                                            std::string_view, c10::List<bool>);
  c10::TypedOperatorHandle<Mask> dropout_mask = op_handle<Mask>("torchweld::dropout_mask");
  c10::TypedOperatorHandle<ChainSaving> chain_saving =
      op_handle<ChainSaving>("torchweld::chain_saving");
  c10::TypedOperatorHandle<GroupSaving> group_saving =
      op_handle<GroupSaving>("torchweld::group_saving");
  c10::TypedOperatorHandle<ChainBackward> chain_backward =
      op_handle<ChainBackward>("torchweld::chain_backward");
  c10::TypedOperatorHandle<GroupBackward> group_backward =
      op_handle<GroupBackward>("torchweld::group_backward");
};
inline const TrainingOps& training_ops() {
  static const TrainingOps ops;
  return ops;
}

// The ways in which a GPU can run a chain. Each has two ops of its own, <way>_saving and
// <way>_backward, with the contracts of chain_saving and chain_backward.
inline constexpr const char* kWays[] = {"pointwise", "epilogue", "narrow", "cuda"};
constexpr size_t kWayCount = std::size(kWays);

struct WayOps {
  c10::TypedOperatorHandle<TrainingOps::ChainSaving> saving;
  c10::TypedOperatorHandle<TrainingOps::ChainBackward> backward;
  explicit WayOps(const std::string& way)
      : saving(op_handle<TrainingOps::ChainSaving>(("torchweld::" + way + "_saving").c_str())),
        backward(
            op_handle<TrainingOps::ChainBackward>(("torchweld::" + way + "_backward").c_str())) {}
};
// The ops of a way; "chain" is what the device of the tensors does by itself.
inline const WayOps& way_ops(std::string_view way) {
  static const std::array<WayOps, kWayCount + 1> ops{
      WayOps("chain"), WayOps(kWays[0]), WayOps(kWays[1]), WayOps(kWays[2]), WayOps(kWays[3])};
  if (way == "chain") return ops[0];
  for (size_t i = 0; i < kWayCount; ++i)
    if (way == kWays[i]) return ops[1 + i];
  TORCHWELD_CHECK(false, "torchweld: there is no way ", way,
                  " to run a chain; there are: pointwise, epilogue, narrow, cuda");
  return ops[0];
}

// One mask for each layer with dropout, drawn in the order of the layers, as eager draws them.
inline std::vector<Tensor> draw_masks(const Tensor& x, TensorList params, const Spec& spec) {
  std::vector<Tensor> masks;
  if (mask_count(spec) == 0) return masks;
  const auto sizes = check_all<c10::SymInt>(x, params, spec, false);
  for (size_t i = 0; i < spec.size(); ++i)
    if (spec[i].drop > 0)
      masks.push_back(training_ops().dropout_mask.call(x, sizes[i].N, spec[i].drop));
  return masks;
}

}  // namespace torchweld
