// What the CUDA kernels offer. Nothing of torch or CUDA is needed to include this: pointers, sizes,
// strides, and a stream as void*. All strides count elements. M rows, K features in, N out.
//
// Two ways to run a chain:
//
//   narrow     all widths up to 256: every layer in one launch, hidden values never leave the chip;
//              the whole backward in one launch, and a second one that adds up partial sums
//   pointwise  for other chains, between products that are not ours: bias, activation, gate and
//              dropout in one launch, and their gradients with the sums for biases in another
//
// Nothing is allocated here and nothing synchronises, so that calls can be captured into a CUDA
// graph; the caller gives workspace. Partial sums are added in one order: the same bits at every
// run on the same kind of device. A launch that fails throws std::runtime_error.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/kernel_api.h"

namespace torchweld::cuda {

constexpr int kMostNarrow = 256;  // the widest layer of a narrow chain
constexpr int kMostLayers = 12;   // of a narrow chain: its description is an argument of a kernel

// A matrix [M, N] in the memory of the device.
struct Matrix {
  const void* data = nullptr;
  int64_t stride_m = 0, stride_n = 0;
};

// ---- narrow chains ----

struct NarrowCall {
  DType dtype = DType::f32;
  const Layer* layers = nullptr;
  const TrainingLayer* training = nullptr;  // one per layer: what is kept and dropped
  int count = 0;
  Matrix x;
  int64_t M = 0;
  void* stream = nullptr;
};
struct NarrowBackwardCall : NarrowCall {
  const LayerGradient* gradients = nullptr;  // one per layer; contiguous or not
  Matrix grad_y;
  void* grad_x = nullptr;  // contiguous; null if not needed
};

// How a narrow chain would be run on the current device. If it cannot be, `problem` says why: then
// torch's products and the pointwise kernels take the chain.
struct NarrowPlan {
  std::string problem;  // empty: it can be run
  int blocks = 0;
  size_t shared = 0;      // bytes of shared memory of a block
  bool resident = false;  // all weights stay in shared memory
  size_t workspace = 0;   // floats that a backward needs; 0 as long as `gradients` is null
};
NarrowPlan plan_narrow(const NarrowCall& call);
NarrowPlan plan_narrow_backward(const NarrowBackwardCall& call);
void run_narrow(const NarrowCall& call, const NarrowPlan& plan, void* y);  // y is contiguous
void run_narrow_backward(const NarrowBackwardCall& call, const NarrowPlan& plan, float* workspace);

// ---- pointwise ----

// y = act(gate + gate_bias) * (up + up_bias), then dropout; without a gate, act(gate + gate_bias).
struct ActivateCall {
  DType dtype = DType::f32;
  int64_t M = 0, N = 0;
  Act act = Act::identity;
  double p0 = 0, p1 = 0;
  bool gated = false;
  Matrix gate, up;
  const void *gate_bias = nullptr, *up_bias = nullptr;  // or null
  int64_t bias_stride = 0;
  const uint8_t* mask = nullptr;  // dropout: bits in rows of whole bytes; or null
  double scale = 1;               // of the values that are not dropped
  void* y = nullptr;              // contiguous
  void* stream = nullptr;
};
void run_activate(const ActivateCall& call);

// From d, the gradient of y: those of gate and up, the sums of their columns, and y again. Biases
// are part of gate and up here.
struct ActivateBackwardCall : ActivateCall {
  Matrix d;
  void *grad_gate = nullptr, *grad_up = nullptr;
  int64_t grad_m = 0, grad_n = 0;                 // strides of both
  void *gate_sums = nullptr, *up_sums = nullptr;  // or null
  int64_t sums_stride = 0;
};
size_t activate_backward_workspace(const ActivateBackwardCall& call);  // floats
void run_activate_backward(const ActivateBackwardCall& call, float* workspace);

// ---- what ran ----

// The names of the last kernels that were launched, oldest first; `forget` empties the list.
std::vector<std::string> launched();
void forget_launches();

}  // namespace torchweld::cuda
