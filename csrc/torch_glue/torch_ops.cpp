// The ops under torch.ops.torchweld: schemas, and one kernel per dispatch key.
//
//   chain         CPU: our kernels. CUDA: a way of src/torchweld/ops/gpu, if Triton is there. Any
//                 other device: the composition. Meta: shapes only.
//   group         the same, several outputs.
//   pack          weights of a chain or group as panels in one byte tensor, for inference.
//   *_packed      CPU, reading that tensor; group_of_packed reads one per member. Not
//                 differentiable; the caller makes sure that it is fresh. Only the tensor's
//                 contents say how many features come out; src/torchweld/ops/ handles tensors that
//                 have only shapes.
//   chain_way     chain_training in one of a GPU's ways, <way>_saving and <way>_backward: the
//                 kernels of src/torchweld/ops/gpu and csrc/cuda.
//   chain_kept    chain, for graphs: on CPU it may read the packed copy of that number, and keeps
//                 it fresh. Elsewhere it is chain.
//
// argument_checks.h refuses, kernel_layers.h and packed_weights.h find the weights, autograd.cpp
// has gradients and autocast.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <sstream>

#include "composed_block.h"
#include "kernel_calls.h"
#include "kernel_layers.h"
#include "packed_copies.h"
#include "packed_weights.h"
#include "torch_ops.h"
#include "training_ops.h"

namespace torchweld {

namespace {

Tensor run_chain(const Tensor& x, const Layers& layers) {
  const Tensor y = output_like(x, layers.back().N);
  run_forward(x, layers, false, y);
  return y;
}
std::vector<Tensor> run_group(const Tensor& x, const Layers& layers) {
  std::vector<Tensor> ys;
  for (const Layer& layer : layers) ys.push_back(output_like(x, layer.N));
  run_forward(x, layers, true, ys);
  return ys;
}

bool multiplies_bf16() {
#if defined(__x86_64__)
  static const bool has = __builtin_cpu_supports("avx512bf16");
  return has && std::string_view(kernels_in_use().isa) == "avx512";
#else
  return false;
#endif
}

// ---- CPU ----
Tensor chain_cpu(const Tensor& x, TensorList params, std::string_view text) {
  const Spec& spec = spec_without_dropout(text);
  const auto sizes = check_all<int64_t>(x, params, spec, false);
  if (composition_is_faster(x, params)) {
    note_composed(x, "forward");
    return composed_chain(x, params, text);
  }
  return run_chain(x, natural_layers(params, spec, sizes, dtype_of(x, "x")));
}
std::vector<Tensor> group_cpu(const Tensor& x, TensorList params, std::string_view text) {
  const Spec& spec = spec_without_dropout(text);
  const auto sizes = check_all<int64_t>(x, params, spec, true);
  if (composition_is_faster(x, params)) {
    note_composed(x, "forward");
    return composed_group(x, params, text);
  }
  return run_group(x, natural_layers(params, spec, sizes, dtype_of(x, "x")));
}

Tensor chain_packed_cpu(const Tensor& x, const Tensor& packed, std::string_view text) {
  return run_chain(x, packed_layers(x, packed, text, false));
}
std::vector<Tensor> group_packed_cpu(const Tensor& x, const Tensor& packed, std::string_view text) {
  return run_group(x, packed_layers(x, packed, text, true));
}

// Members that were packed one by one: one packed tensor per layer of the spec.
std::vector<Tensor> group_of_packed_cpu(const Tensor& x, TensorList packed, std::string_view text) {
  const size_t members = spec_without_dropout(text).size();
  TORCHWELD_CHECK(packed.size() == members, "torchweld: the spec has ", members, " members, but ",
                  packed.size(), " packed tensors were given; give one per member");
  Layers layers;
  for (const Tensor& one : packed) {
    const std::string_view own = text.substr(0, text.find(';'));
    layers.append(packed_layers(x, one, own, true));
    text.remove_prefix(std::min(own.size() + 1, text.size()));
  }
  return run_group(x, layers);
}

Tensor chain_kept_cpu(const Tensor& x, TensorList params, std::string_view text,
                      const Tensor& kept) {
  const std::shared_ptr<PackedCopy> copy = PackedCopies::find(kept);
  const auto strided = [](const Tensor& t) { return t.layout() == at::kStrided; };
  if (!copy || !x.dim() || composition_is_faster(x, params) ||
      !std::all_of(params.begin(), params.end(), strided))
    return chain_cpu(x, params, text);
  c10::SmallVector<const Tensor*, 8> borrowed;
  for (const Tensor& p : params) borrowed.push_back(&p);
  return run_chain(x, packed_layers(x, copy->get(borrowed, text), text, false));
}
// Other devices have no copies: this is what they do for chain.
Tensor chain_kept_elsewhere(const Tensor& x, TensorList params, std::string_view text,
                            const Tensor&) {
  static const auto op =
      op_handle<Tensor(const Tensor&, TensorList, std::string_view)>("torchweld::chain");
  return op.call(x, params, text);
}

Tensor chain_training_batched(const Tensor& x, TensorList params, std::string_view text,
                              std::optional<bool>) {
  return composed_training(x, params, text);
}
Tensor chain_way_batched(const Tensor& x, TensorList params, std::string_view text,
                         std::string_view, std::optional<bool>) {
  return composed_training(x, params, text);
}

// ---- Meta: shapes only. Symbols are kept, so that another batch size does not compile again ----
Tensor empty_symbolic(const Tensor& x, const c10::SymInt& N) {
  c10::SymDimVector sizes(x.sym_sizes());
  sizes.back() = N;
  return at::empty_symint(sizes, x.options());
}
Tensor chain_meta(const Tensor& x, TensorList params, std::string_view text) {
  const auto sizes = check_all<c10::SymInt>(x, params, spec_without_dropout(text), false);
  return empty_symbolic(x, sizes.back().N);
}
Tensor chain_kept_meta(const Tensor& x, TensorList params, std::string_view text, const Tensor&) {
  return chain_meta(x, params, text);
}
std::vector<Tensor> group_meta(const Tensor& x, TensorList params, std::string_view text) {
  std::vector<Tensor> ys;
  for (const auto& s : check_all<c10::SymInt>(x, params, spec_without_dropout(text), true))
    ys.push_back(empty_symbolic(x, s.N));
  return ys;
}

constexpr const char* kSchemas =
#include "schemas.inc"
    ;

// An op that draws random numbers must not be run again in place of its result.
std::vector<at::Tag> tags_of(std::string_view schema) {
  std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  const std::string_view name = schema.substr(0, schema.find('('));
  if (name == "dropout_mask" || name == "chain_training" || name == "chain_way")
    tags.push_back(at::Tag::nondeterministic_seeded);
  return tags;
}

}  // namespace

Run& last_run() {
  thread_local Run run;
  return run;
}

// Our kernels compute in fp32. Where the CPU multiplies bf16 at twice that rate, torch's own
// product is faster on big calls: on Zen 4 1.08 times at 8 rows of 768 -> 3072 and 2.0 times at 128
// rows; for 64 -> 256 from 400 rows on.
bool composition_is_faster(const Tensor& x, TensorList params) {
  if (x.scalar_type() != at::kBFloat16 || !multiplies_bf16()) return false;
  const int64_t rows = x.size(-1) ? x.numel() / x.size(-1) : 0;
  double weights = 0;
  for (const Tensor& p : params)
    if (p.dim() == 2) weights += double(p.numel());
  return rows >= 8 && 2.0 * weights * double(rows) >= 25e6;
}

TORCH_LIBRARY(torchweld, m) {
  std::istringstream lines(kSchemas);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty()) continue;
    const std::vector<at::Tag> tags = tags_of(line);
    m.def(line.c_str(), tags);
  }
}
TORCH_LIBRARY_IMPL(torchweld, CPU, m) {
  m.impl("chain", TORCH_FN(chain_cpu));
  m.impl("group", TORCH_FN(group_cpu));
  m.impl("pack", TORCH_FN(pack_weights));
  m.impl("chain_packed", TORCH_FN(chain_packed_cpu));
  m.impl("chain_kept", TORCH_FN(chain_kept_cpu));
  m.impl("group_packed", TORCH_FN(group_packed_cpu));
  m.impl("group_of_packed", TORCH_FN(group_of_packed_cpu));
}
TORCH_LIBRARY_IMPL(torchweld, CompositeExplicitAutograd, m) {
  m.impl("chain", TORCH_FN(composed_chain));
  m.impl("chain_kept", TORCH_FN(chain_kept_elsewhere));
  m.impl("group", TORCH_FN(composed_group));
  m.impl("pack", TORCH_FN(pack_elsewhere));
}
TORCH_LIBRARY_IMPL(torchweld, Meta, m) {
  m.impl("chain", TORCH_FN(chain_meta));
  m.impl("chain_kept", TORCH_FN(chain_kept_meta));
  m.impl("group", TORCH_FN(group_meta));
  m.impl("pack", TORCH_FN(pack_meta));
}
TORCH_LIBRARY_IMPL(torchweld, FuncTorchBatched, m) {
  m.impl("chain", TORCH_FN(composed_chain));
  m.impl("chain_kept", TORCH_FN(chain_kept_elsewhere));
  m.impl("chain_training", TORCH_FN(chain_training_batched));
  m.impl("chain_way", TORCH_FN(chain_way_batched));
  m.impl("group", TORCH_FN(composed_group));
}

}  // namespace torchweld
