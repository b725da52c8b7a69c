// What the torch-free kernels offer, one table of functions per instruction set.
//
// A *layer* computes  y[m, n] = act( sum_k x[m, k] * w[n, k] + bias[n] ), or, gated,
//                     y[m, n] = act( gate[m, n] ) * up[m, n],  a product each for gate and up.
// In a *chain* each layer reads the output of the one before; in a *group* all layers read the same
// input. M is rows, K is features in, N is features out, everywhere. All strides count elements.
#pragma once
#include <cstddef>
#include <cstdint>

namespace torchweld {

enum class DType : int { f32, bf16, f16, f64 };

inline constexpr size_t size_of(DType t) { return t == DType::f64 ? 8 : t == DType::f32 ? 4 : 2; }

enum class Act : int {
#define ACTIVATION(name, ...) name,
#include "activations.inc"
#undef ACTIVATION
};

// A matrix [N, K] and its bias [N], or null without one. Any strides are allowed.
struct Product {
  const void* weight = nullptr;
  int64_t stride_n = 0, stride_k = 0;
  const void* bias = nullptr;
  int64_t bias_stride = 0;
};

struct Layer {
  int64_t K = 0, N = 0;  // N counts outputs: a gated layer computes 2 N products
  Act act = Act::identity;
  double p0 = 0, p1 = 0;  // the activation's parameters
  bool gated = false;
  Product up;  // the only product of a layer that is not gated
  Product gate;
  const void* packed = nullptr;  // panels made by `pack`; if set, the products are not read
};

// What a layer keeps and drops in training: the forward writes z and up, the backward reads them.
// All are [M, N] and contiguous.
struct TrainingLayer {
  void* z = nullptr;              // pre-activations, the gate's if gated; null: not kept
  void* up = nullptr;             // gated: the pre-activations of up
  const uint8_t* mask = nullptr;  // dropout of the output: bits in rows of whole bytes; or null
  double scale = 1;               // of the values that are not dropped
};

// Where the gradients of one product go; null where none is needed.
struct ProductGradient {
  void* weight = nullptr;
  int64_t stride_n = 0, stride_k = 0;
  void* bias = nullptr;
  int64_t bias_stride = 0;
};
struct LayerGradient {
  ProductGradient up, gate;
};

struct Call {
  DType dtype = DType::f32;
  const Layer* layers = nullptr;
  int count = 0;
  const void* x = nullptr;  // [M, K], unit stride in K
  int64_t M = 0, ldx = 0;
  void* const* y = nullptr;  // one output for a chain, `count` for a group; contiguous. A null
                             // output is not written
  const TrainingLayer* training = nullptr;  // one per layer, or null
  int threads = 1;  // at most; small work uses one, and OpenMP may grant fewer
};

// The gradients of a chain or group, from grad_y, the gradients of its outputs.
struct BackwardCall {
  DType dtype = DType::f32;
  const Layer* layers = nullptr;
  const TrainingLayer* training = nullptr;  // with z wherever the gradient depends on it
  const LayerGradient* gradients = nullptr;
  int count = 0;
  bool group = false;
  const void* x = nullptr;  // [M, K], unit stride in K
  int64_t M = 0, ldx = 0;
  const void* const* grad_y = nullptr;  // one for a chain, `count` for a group; contiguous
  void* grad_x = nullptr;               // [M, K], contiguous; null if not needed
  int threads = 1;
};

// A layer without its products, forward or backward: pre-activations in, outputs or gradients out.
// All are [M, N] and contiguous, except the gradients, whose rows are `ld` apart. bfloat16 only.
struct PointwiseCall {
  int64_t M = 0, N = 0;
  Act act = Act::identity;
  double p0 = 0, p1 = 0;
  bool gated = false;
  TrainingLayer training;                      // with z, and up if gated
  void* y = nullptr;                           // in a backward: the outputs again, or null
  const void* grad_y = nullptr;                // of a backward; null: forward
  void *grad_z = nullptr, *grad_up = nullptr;  // of the gate, if gated; of up
  int64_t ld = 0;
  void *bias = nullptr, *up_bias = nullptr;  // sums of their columns, contiguous; or null
  int threads = 1;
};

// How a call was carried out, for tests and reports.
struct Run {
  const char* isa = "";
  const char* pass = "forward";  // or "backward"
  const char* weights = "";      // "packed", "natural", "repacked" (panels made during the call)
  const char* partition = "";    // "single", "rows", "columns"
  int threads = 0;
  int64_t M = 0;
  uint64_t calls = 0;      // forward passes by this thread so far
  int products = 0;        // that the last backward computed
  uint64_t backwards = 0;  // backward passes by this thread so far
};

struct Kernels {
  const char* isa;
  int lanes_f32;
  void (*run_chain)(const Call&, Run&);
  void (*run_group)(const Call&, Run&);
  void (*run_backward)(const BackwardCall&, Run&);
  void (*run_pointwise)(const PointwiseCall&);
  // Packed form of one layer: panels of weights, then the bias in the compute type, padded to
  // panels.
  size_t (*packed_bytes)(const Layer&, DType);
  void (*pack)(const Layer&, DType, void* out);
  double (*probe_fma)(DType, int threads, double seconds);
  double (*probe_native)(DType, int threads, double seconds);
  double (*probe_read)(size_t bytes, int threads, double seconds);
};

// isa_dispatch.cpp: the table in use (the best that the CPU supports, or TORCHWELD_ISA's), and all
// that were built.
struct IsaState {
  const char* name;
  bool built, supported;
};
const Kernels& kernels();  // throws std::runtime_error for an impossible TORCHWELD_ISA
int isa_states(IsaState* out, int most);  // fills `out` and returns how many there are
void choose_isa(const char* name);        // for tests; same errors
int64_t l2_bytes();                       // of one core
bool in_forked_child();  // OpenMP's pool does not survive a fork: use one thread there

// scratch.cpp: the most that a thread may allocate at once for its work. Tests limit it, to see
// what happens when memory runs out.
size_t scratch_limit();
void limit_scratch(size_t bytes);

}  // namespace torchweld
