// From calls to launches: plans, arguments of kernels, grids. nvcc compiles it; g++ does for tests,
// with cuda_on_host.h.
#include "cuda_kernels.h"

#include <algorithm>

#include "device_launches.cuh"
#include "device_pointwise.cuh"
#include "gradient_sums.cuh"
#include "narrow_backward.cuh"
#include "narrow_forward.cuh"

namespace torchweld::cuda {

namespace {

template <class Run>
void with_type(DType dtype, const Run& run) {
  switch (dtype) {
    case DType::f32:
      return run(float{});
    case DType::f16:
      return run(fp16_t{});
    case DType::bf16:
      return run(bf16_t{});
    case DType::f64:
      break;
  }
  throw std::runtime_error("torchweld: the CUDA kernels compute in float32, float16 and bfloat16");
}

// ---- narrow chains ----

// More memory for partial sums than this is not asked for: fewer blocks take more rows each.
constexpr size_t kMostWorkspace = size_t(32) << 20;  // floats

int aligned(int bytes) { return (bytes + 15) / 16 * 16; }

// Sizes of a chain, in elements.
struct ChainSizes {
  int widest = 0;    // values of a layer
  int products = 0;  // of a layer; at once, in the forward
  int at_once = 0;
  int weights = 0;  // all of them, resident
};
ChainSizes sizes_of(const NarrowCall& call) {
  const int pad = 16 / int(size_of(call.dtype));
  ChainSizes sizes;
  sizes.widest = padded(int(call.layers[0].K));
  for (int i = 0; i < call.count; ++i) {
    const Layer& layer = call.layers[i];
    const int N = padded(int(layer.N)), K = padded(int(layer.K)), halves = layer.gated ? 2 : 1;
    sizes.widest = std::max(sizes.widest, N);
    sizes.products = std::max(sizes.products, halves * N);
    sizes.at_once = std::max(sizes.at_once, layer.gated ? 2 * std::min(N, kGatedColumns) : N);
    sizes.weights += halves * N * (K + pad);
  }
  return sizes;
}

// How shared memory is divided. The offsets are those of NarrowChain.
struct SharedLayout {
  int values, gradients, scratch, weights, total;
  int stride, wide_stride, sums_stride;
};
SharedLayout layout_of(const NarrowCall& call, const ChainSizes& sizes, bool backward,
                       bool resident) {
  const int element = int(size_of(call.dtype)), pad = 16 / element, depth = 128 / element;
  SharedLayout at{};
  at.stride = sizes.widest + pad;
  at.wide_stride = sizes.products + pad;
  at.sums_stride = (backward ? sizes.widest : sizes.at_once) + 4;
  at.values = 0;
  at.gradients = aligned((backward ? 1 : 2) * kRows * at.stride * element);
  at.scratch = at.gradients + (backward ? aligned(2 * kRows * at.wide_stride * element) : 0);
  int scratch = kRows * at.sums_stride * 4;
  if (!resident)
    scratch = std::max(scratch, element * (backward ? std::min(depth, sizes.products) * at.stride
                                                    : sizes.at_once * (depth + pad)));
  at.weights = at.scratch + aligned(scratch);
  at.total = at.weights + (resident ? aligned(sizes.weights * element) : 0);
  return at;
}

// The forward of `layers` cannot be compared with torch's products by anything that is known here,
// so the only questions are sizes.
std::string size_problem(const NarrowCall& call) {
  if (call.dtype == DType::f64) return "float64 is not computed by the CUDA kernels";
  if (call.count > kMostLayers)
    return std::to_string(call.count) + " layers; it takes up to " + std::to_string(kMostLayers);
  int64_t widest = call.layers[0].K;
  for (int i = 0; i < call.count; ++i) widest = std::max(widest, call.layers[i].N);
  if (widest > kMostNarrow)
    return "a layer is " + std::to_string(widest) + " wide; it takes up to " +
           std::to_string(kMostNarrow);
  return "";
}

NarrowPlan plan(const NarrowCall& call, bool backward, size_t workspace_of_block) {
  NarrowPlan plan;
  plan.problem = size_problem(call);
  if (!plan.problem.empty()) return plan;
  const DeviceLimits device = device_limits();
  const ChainSizes sizes = sizes_of(call);
  plan.resident = layout_of(call, sizes, backward, true).total <= device.shared_of_block;
  const int shared = layout_of(call, sizes, backward, plan.resident).total;
  plan.shared = size_t(shared);
  if (shared > device.shared_of_block) {
    plan.problem = "it needs " + std::to_string(shared) + " bytes of shared memory; a block has " +
                   std::to_string(device.shared_of_block);
    return plan;
  }
  const int64_t tiles = (call.M + kRows - 1) / kRows;
  const int64_t at_once = std::max(1, std::min(4, device.shared_of_processor / (shared + 1024)));
  int64_t blocks = std::min(tiles, at_once * device.processors);
  if (workspace_of_block)
    blocks = std::min(blocks, std::max<int64_t>(1, kMostWorkspace / workspace_of_block));
  plan.blocks = int(blocks);
  plan.workspace = size_t(blocks) * workspace_of_block;
  return plan;
}

bool reads_vectors(const Product& product, int64_t K, DType dtype) {
  const int64_t element = int64_t(size_of(dtype));
  const bool aligned_rows = product.stride_n * element % 16 == 0 && K * element % 16 == 0;
  return product.stride_k == 1 && aligned_rows &&
         reinterpret_cast<uintptr_t>(product.weight) % 16 == 0;
}
NarrowProduct product_of(const Product& product, int64_t K, DType dtype) {
  return {product.weight,
          product.stride_n,
          product.stride_k,
          product.bias,
          product.bias_stride,
          reads_vectors(product, K, dtype),
          -1,
          -1};
}
NarrowChain chain_of(const NarrowCall& call, const NarrowPlan& plan, bool backward) {
  NarrowChain chain{};
  const SharedLayout at = layout_of(call, sizes_of(call), backward, plan.resident);
  int resident = 0;
  for (int i = 0; i < call.count; ++i) {
    const Layer& from = call.layers[i];
    const TrainingLayer& kept = call.training[i];
    NarrowLayer& to = chain.layers[i];
    to.K = int(from.K);
    to.N = int(from.N);
    to.act = int(from.act);
    to.gated = from.gated;
    to.p0 = float(from.p0);
    to.p1 = float(from.p1);
    to.scale = float(kept.scale);
    to.gate = product_of(from.gated ? from.gate : from.up, from.K, call.dtype);
    to.up = product_of(from.up, from.K, call.dtype);
    to.z = kept.z;
    to.v = kept.up;
    to.mask = kept.mask;
    to.resident = resident;
    resident +=
        (from.gated ? 2 : 1) * padded(to.N) * (padded(to.K) + 16 / int(size_of(call.dtype)));
  }
  chain.x = call.x.data;
  chain.M = call.M;
  chain.x_m = call.x.stride_m;
  chain.x_k = call.x.stride_n;
  chain.tiles = (call.M + kRows - 1) / kRows;
  chain.count = call.count;
  chain.resident = plan.resident;
  chain.stride = at.stride;
  chain.wide_stride = at.wide_stride;
  chain.sums_stride = at.sums_stride;
  chain.values = at.values;
  chain.gradients = at.gradients;
  chain.scratch = at.scratch;
  chain.weights = at.weights;
  return chain;
}

// The sums of a backward, one after the other: where each lies in a block's, and where it goes.
struct SumsLayout {
  SummedParts parts{};
  int count = 0, size = 0, most = 0;

  // Its place, or -1 if it is not needed.
  int add(void* to, int64_t stride_n, int64_t stride_k, int64_t N, int64_t K) {
    if (!to) return -1;
    const int from = size;
    parts.parts[count++] = {to, stride_n, stride_k, from, int(N), int(K)};
    size += int(N * K);
    most = std::max(most, int(N * K));
    return from;
  }
};
// Also writes the places into `chain`, if there is one.
SumsLayout sums_of(const NarrowBackwardCall& call, NarrowChain* chain) {
  SumsLayout sums;
  for (int i = 0; i < call.count; ++i) {
    const Layer& layer = call.layers[i];
    for (int half = 0; half < (layer.gated ? 2 : 1); ++half) {
      const LayerGradient& both = call.gradients[i];
      const ProductGradient& to = layer.gated && half == 0 ? both.gate : both.up;
      const int weight = sums.add(to.weight, to.stride_n, to.stride_k, layer.N, layer.K);
      const int bias = sums.add(to.bias, to.bias_stride, 0, layer.N, 1);
      if (!chain) continue;
      NarrowProduct& product = half == 0 ? chain->layers[i].gate : chain->layers[i].up;
      product.weight_sums = weight;
      product.bias_sums = bias;
      chain->layers[i].wanted |= (weight >= 0 ? 1 : 0) | (bias >= 0 ? 2 : 0);
    }
  }
  return sums;
}

void run_sums(DType dtype, const SumsLayout& sums, void* stream) {
  const unsigned blocks = unsigned((sums.most + kSumThreads - 1) / kSumThreads);
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    launch("torchweld_cuda_gradient_sums", torchweld_cuda_gradient_sums<T>,
           dim3{blocks, unsigned(sums.count), 1}, dim3{kSumThreads, 1, 1}, 0, stream, sums.parts);
  });
}

}  // namespace

NarrowPlan plan_narrow(const NarrowCall& call) { return plan(call, false, 0); }
NarrowPlan plan_narrow_backward(const NarrowBackwardCall& call) {
  if (!call.gradients || !size_problem(call).empty()) return plan(call, true, 0);
  return plan(call, true, size_t(sums_of(call, nullptr).size));
}

void run_narrow(const NarrowCall& call, const NarrowPlan& plan, void* y) {
  const NarrowChain chain = chain_of(call, plan, false);
  with_type(call.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch("torchweld_cuda_narrow", torchweld_cuda_narrow<T>, dim3{unsigned(plan.blocks), 1, 1},
           dim3{kThreads, 1, 1}, plan.shared, call.stream, chain, static_cast<T*>(y));
  });
}

void run_narrow_backward(const NarrowBackwardCall& call, const NarrowPlan& plan, float* workspace) {
  NarrowChain chain = chain_of(call, plan, true);
  SumsLayout sums = sums_of(call, &chain);
  chain.grad_m = call.grad_y.stride_m;
  chain.grad_n = call.grad_y.stride_n;
  chain.grad_x = call.grad_x;
  chain.workspace = workspace;
  chain.workspace_of_block = sums.size;
  chain.lowest = 0;
  if (!call.grad_x)
    while (chain.lowest < call.count && !chain.layers[chain.lowest].wanted) ++chain.lowest;
  if (chain.lowest == call.count) return;  // nothing is needed
  with_type(call.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch("torchweld_cuda_narrow_backward", torchweld_cuda_narrow_backward<T>,
           dim3{unsigned(plan.blocks), 1, 1}, dim3{kThreads, 1, 1}, plan.shared, call.stream, chain,
           static_cast<const T*>(call.grad_y.data));
  });
  if (sums.count == 0) return;
  sums.parts.sums = workspace;
  sums.parts.blocks = plan.blocks;
  sums.parts.of_block = sums.size;
  run_sums(call.dtype, sums, call.stream);
}

// ---- pointwise ----

namespace {

Pointwise pointwise_of(const ActivateCall& call) {
  Pointwise to{};
  to.M = call.M;
  to.N = int(call.N);
  to.act = int(call.act);
  to.gated = call.gated;
  to.p0 = float(call.p0);
  to.p1 = float(call.p1);
  to.scale = float(call.scale);
  to.gate = call.gate;
  to.up = call.up;
  to.gate_bias = call.gate_bias;
  to.up_bias = call.up_bias;
  to.bias_stride = call.bias_stride;
  to.mask = call.mask;
  to.y = call.y;
  return to;
}
constexpr dim3 kPointwiseBlock{kPointwiseColumns, kPointwiseRows, 1};
dim3 pointwise_grid(const ActivateCall& call, int64_t rows) {
  return {unsigned((call.M + rows - 1) / rows),
          unsigned((call.N + kPointwiseColumns - 1) / kPointwiseColumns), 1};
}
// Rows of a block of the backward: a multiple of 8, at least 64.
int64_t backward_rows(int64_t M) {
  const int64_t rows = (M + kMostRowBlocks - 1) / kMostRowBlocks;
  return std::max<int64_t>(64, (rows + kPointwiseRows - 1) / kPointwiseRows * kPointwiseRows);
}

}  // namespace

void run_activate(const ActivateCall& call) {
  const Pointwise arguments = pointwise_of(call);
  with_type(call.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch("torchweld_cuda_pointwise", torchweld_cuda_pointwise<T>,
           pointwise_grid(call, kActivateRows), kPointwiseBlock, 0, call.stream, arguments);
  });
}

size_t activate_backward_workspace(const ActivateBackwardCall& call) {
  const int64_t rows = backward_rows(call.M), blocks = (call.M + rows - 1) / rows;
  return size_t(blocks * call.N * ((call.gate_sums ? 1 : 0) + (call.up_sums ? 1 : 0)));
}

void run_activate_backward(const ActivateBackwardCall& call, float* workspace) {
  Pointwise arguments = pointwise_of(call);
  arguments.d = call.d;
  arguments.grad_gate = call.grad_gate;
  arguments.grad_up = call.grad_up;
  arguments.grad_m = call.grad_m;
  arguments.grad_n = call.grad_n;
  arguments.rows = backward_rows(call.M);
  const dim3 grid = pointwise_grid(call, arguments.rows);
  // Each part is [blocks, N]; to the kernel that adds them up they are rows N apart.
  float* next = workspace;
  const auto part = [&](void* wanted, float*& partial) {
    if (!wanted) return;
    partial = next;
    next += int64_t(grid.x) * call.N;
  };
  part(call.gate_sums, arguments.gate_sums);
  part(call.up_sums, arguments.up_sums);
  with_type(call.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch("torchweld_cuda_pointwise_backward", torchweld_cuda_pointwise_backward<T>, grid,
           kPointwiseBlock, 2 * kPointwiseRows * kPointwiseColumns * sizeof(float), call.stream,
           arguments);
  });
  for (const auto& [to, partial] : {std::pair(call.gate_sums, arguments.gate_sums),
                                    std::pair(call.up_sums, arguments.up_sums)}) {
    if (!to) continue;
    SumsLayout sums;
    sums.add(to, call.sums_stride, 0, call.N, 1);
    sums.parts.sums = partial;
    sums.parts.blocks = grid.x;
    sums.parts.of_block = call.N;
    run_sums(call.dtype, sums, call.stream);
  }
}

}  // namespace torchweld::cuda
