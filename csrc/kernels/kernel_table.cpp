// The table of functions of one instruction set. This file is compiled once for each.
#include "backward_by_rows.h"
#include "forward_pass.h"
#include "kernel_api.h"
#include "machine_probes.h"
#include "pointwise.h"
#include "weight_panels.h"

#define TW_NAME(a, b) a##b
#define TW_ENTRY(isa) TW_NAME(torchweld_kernels_, isa)
#define TW_STRING2(s) #s
#define TW_STRING(s) TW_STRING2(s)

namespace {

using torchweld::DType;
using torchweld::Kernels;

template <class F>
void with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f(float{});
    case DType::bf16:
      return f(bf16{});
    case DType::f16:
      return f(fp16{});
    case DType::f64:
      return f(double{});
  }
}

void run(const Call& call, bool group, Run& run) {
  run.isa = TW_STRING(TORCHWELD_ISA);
  run.pass = "forward";
  run.M = call.M;
  ++run.calls;
  with_type(call.dtype,
            [&](auto element) { ForwardPass<decltype(element)>(call, group).run(run); });
}

void run_backward(const BackwardCall& call, Run& run) {
  run.isa = TW_STRING(TORCHWELD_ISA);
  run.pass = "backward";
  run.M = call.M;
  ++run.backwards;
  with_type(call.dtype, [&](auto element) {
    using T = decltype(element);
    // 16-bit gradients would be rounded once for every part.
    if constexpr (std::is_same_v<T, compute_t<T>>) {
      if (BackwardByRows<T>::serves(call)) return BackwardByRows<T>(call).run(run);
    }
    BackwardPass<T>(call).run(run);
  });
}

const Kernels table = {
    TW_STRING(TORCHWELD_ISA),
    kLanes<float>,
    [](const Call& call, Run& r) { run(call, false, r); },
    [](const Call& call, Run& r) { run(call, true, r); },
    [](const BackwardCall& call, Run& r) { run_backward(call, r); },
    [](const PointwiseCall& call) { run_pointwise<bf16>(call); },
    [](const Layer& layer, DType dtype) {
      size_t bytes = 0;
      with_type(dtype, [&](auto e) { bytes = packed_layer_bytes<decltype(e)>(layer); });
      return bytes;
    },
    [](const Layer& layer, DType dtype, void* out) {
      with_type(dtype, [&](auto e) { pack_layer<decltype(e)>(layer, out); });
    },
    [](DType dtype, int threads, double seconds) { return probe_fma(dtype, threads, seconds); },
    [](DType dtype, int threads, double seconds) { return probe_native(dtype, threads, seconds); },
    [](size_t bytes, int threads, double seconds) {
      return probe_read_gbps(bytes, threads, seconds);
    },
};

}  // namespace

extern "C" __attribute__((visibility("hidden"))) const torchweld::Kernels* TW_ENTRY(
    TORCHWELD_ISA)() {
  return &table;
}
