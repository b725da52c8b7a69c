// The ops under torch.ops.torchweld: schemas, checks, and one kernel per dispatch key.
//
//   chain         CPU: our kernels. Any other device: the composition. Meta: shapes only.
//   group         the same, several outputs.
//   pack          weights of a chain or group as panels in one byte tensor, for inference.
//   *_packed      CPU, reading that tensor. Not differentiable; the caller sees to freshness.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <sstream>

#include "composed.h"
#include "huge_pages.h"
#include "ops.h"

namespace torchweld {

namespace {

thread_local Run last_run_of_thread;

// As Python calls it.
std::string type_name(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kLong:
      return "int64";
    case at::kInt:
      return "int32";
    case at::kBool:
      return "bool";
    default:
      return c10::toString(t.scalar_type());
  }
}

DType dtype_of(const Tensor& t, const char* what) {
  switch (t.scalar_type()) {
    case at::kFloat:
      return DType::f32;
    case at::kBFloat16:
      return DType::bf16;
    case at::kHalf:
      return DType::f16;
    case at::kDouble:
      return DType::f64;
    default:
      TORCH_CHECK_VALUE(false, "torchweld: ", what, " is ", type_name(t),
                        "; allowed are float32, bfloat16, float16 and float64: cast it with .to()");
  }
}

template <class F>
auto checked_spec(F&& parse) -> decltype(parse()) {
  try {
    return parse();
  } catch (const std::invalid_argument& e) {
    TORCH_CHECK_VALUE(false, "torchweld: ", e.what());
  }
}
const Spec& spec_of(std::string_view text) {
  return checked_spec([&]() -> const Spec& { return parse_spec(text); });
}

int tensor_count(const Spec& spec) {
  int n = 0;
  for (const LayerSpec& l : spec) n += l.tensors();
  return n;
}

// Sizes of one layer, checked against what feeds it. Int is int64_t, or SymInt for the meta kernel.
template <class Int>
struct LayerSizes {
  Int K, N;
};
template <class Int>
Int size_of_dim(const Tensor& t, int64_t dim) {
  if constexpr (std::is_same_v<Int, int64_t>)
    return t.size(dim);
  else
    return t.sym_size(dim);
}

template <class Int>
LayerSizes<Int> check_layer(const LayerTensors& layer, size_t index, const Tensor& x) {
  const LayerSpec& s = layer.spec;
  LayerSizes<Int> sizes;
  for (int i = 0; i < s.weights(); ++i) {
    const Tensor& w = layer.list[i * (s.bias ? 2 : 1)];
    TORCH_CHECK_VALUE(w.dim() == 2, "torchweld: layer ", index, "'s weight has shape ",
                      w.sym_sizes(),
                      "; expected two dimensions, [out, in], or [in, out] with the flag t");
    TORCH_CHECK_VALUE(
        w.scalar_type() == x.scalar_type(), "torchweld: x is ", type_name(x), " but layer ", index,
        "'s weight is ", type_name(w),
        "; all must have one dtype: cast one with .to(), or call under torch.autocast");
    TORCH_CHECK_VALUE(w.device() == x.device(), "torchweld: x is on ", x.device(), " but layer ",
                      index, "'s weight is on ", w.device(), "; move one with .to()");
    TORCH_CHECK_VALUE(w.layout() == at::kStrided, "torchweld: layer ", index,
                      "'s weight has layout ", w.layout(),
                      "; expected strided: convert it with .to_dense()");
    const Int K = size_of_dim<Int>(w, s.transposed ? 0 : 1),
              N = size_of_dim<Int>(w, s.transposed ? 1 : 0);
    if (i == 0) {
      sizes = {K, N};
    } else {
      TORCH_CHECK_VALUE(K == sizes.K && N == sizes.N, "torchweld: layer ", index,
                        "'s gate weight has shape ", layer.list[0].sym_sizes(),
                        " and its up weight ", w.sym_sizes(), "; they must be equal");
    }
    if (s.bias) {
      const Tensor& b = layer.list[i * 2 + 1];
      TORCH_CHECK_VALUE(b.dim() == 1 && size_of_dim<Int>(b, 0) == N, "torchweld: layer ", index,
                        "'s bias has shape ", b.sym_sizes(), "; expected [", N, "]");
      TORCH_CHECK_VALUE(
          b.scalar_type() == x.scalar_type(), "torchweld: x is ", type_name(x), " but layer ",
          index, "'s bias is ", type_name(b),
          "; all must have one dtype: cast one with .to(), or call under torch.autocast");
      TORCH_CHECK_VALUE(b.device() == x.device(), "torchweld: x is on ", x.device(), " but layer ",
                        index, "'s bias is on ", b.device(), "; move one with .to()");
    }
  }
  TORCH_CHECK_VALUE(sizes.K >= 1 && sizes.N >= 1, "torchweld: layer ", index,
                    "'s weight has shape ", layer.list[0].sym_sizes(),
                    "; every size must be at least 1");
  if (s.gated() && s.gate != Gate::separate) {
    TORCH_CHECK_VALUE(sizes.N % 2 == 0, "torchweld: layer ", index, " is gated with one weight of ",
                      sizes.N, " outputs; gate and up need an even number");
    sizes.N = sizes.N / 2;
  }
  return sizes;
}

// All layers; `fed_by_x` for a group. Returns the sizes of each.
template <class Int>
std::vector<LayerSizes<Int>> check_all(const Tensor& x, TensorList params, const Spec& spec,
                                       bool group) {
  TORCH_CHECK_VALUE(int64_t(params.size()) == tensor_count(spec), "torchweld: the spec asks for ",
                    tensor_count(spec), " tensors, ", params.size(), " were given");
  dtype_of(x, "x");
  TORCH_CHECK_VALUE(x.dim() >= 1,
                    "torchweld: x is a scalar; expected at least one dimension, the features");
  std::vector<LayerSizes<Int>> sizes;
  Int features = size_of_dim<Int>(x, -1);
  for (size_t i = 0; i < spec.size(); ++i) {
    sizes.push_back(check_layer<Int>(tensors_of(spec, i, params), i, x));
    const Int given = group || i == 0 ? features : sizes[i - 1].N;
    TORCH_CHECK_VALUE(sizes[i].K == given, "torchweld: layer ", i, "'s weight takes ", sizes[i].K,
                      " features, but ", group || i == 0 ? "x" : "the layer before it", " has ",
                      given, i == 0 ? "; the last dimension of x must match" : "");
  }
  return sizes;
}

Product product_of(const LayerSpec& s, const Tensor& w, const Tensor* bias) {
  Product p;
  p.weight = w.const_data_ptr();
  p.stride_n = w.stride(s.transposed ? 1 : 0);
  p.stride_k = w.stride(s.transposed ? 0 : 1);
  if (bias) {
    p.bias = bias->const_data_ptr();
    p.bias_stride = bias->stride(0);
  }
  return p;
}
// The part of a product that starts `skip` outputs later and takes every `step`-th.
Product part_of(Product p, int64_t skip, int64_t step, size_t element) {
  p.weight = static_cast<const char*>(p.weight) + skip * p.stride_n * int64_t(element);
  p.stride_n *= step;
  if (p.bias) {
    p.bias = static_cast<const char*>(p.bias) + skip * p.bias_stride * int64_t(element);
    p.bias_stride *= step;
  }
  return p;
}

using Layers = c10::SmallVector<Layer, 4>;

Layers natural_layers(TensorList params, const Spec& spec,
                      const std::vector<LayerSizes<int64_t>>& sizes, DType dtype) {
  Layers layers(spec.size());
  for (size_t i = 0; i < spec.size(); ++i) {
    const LayerTensors t = tensors_of(spec, i, params);
    const LayerSpec& s = spec[i];
    const int step = s.bias ? 2 : 1;
    Layer& l = layers[i];
    l.K = sizes[i].K;
    l.N = sizes[i].N;
    l.act = s.act;
    l.p0 = s.p0;
    l.p1 = s.p1;
    l.gated = s.gated();
    const Product one = product_of(s, t.list[0], s.bias ? &t.list[1] : nullptr);
    const size_t e = size_of(dtype);
    switch (s.gate) {
      case Gate::none:
        l.up = one;
        break;
      case Gate::separate:
        l.gate = one;
        l.up = product_of(s, t.list[step], s.bias ? &t.list[step + 1] : nullptr);
        break;
      case Gate::first:
        l.gate = one;
        l.up = part_of(one, l.N, 1, e);
        break;
      case Gate::second:
        l.up = one;
        l.gate = part_of(one, l.N, 1, e);
        break;
      case Gate::interleaved:
        l.gate = part_of(one, 0, 2, e);
        l.up = part_of(one, 1, 2, e);
        break;
    }
  }
  return layers;
}

// x as rows of features; copied only if its rows cannot be walked with one stride.
struct Rows {
  Tensor x;  // keeps the memory
  int64_t M, ld;
};
Rows rows_of(const Tensor& x) {
  const int64_t K = x.size(-1), M = K ? x.numel() / K : 0;
  if (x.is_contiguous()) return {x, M, K};
  if (x.dim() == 2 && x.stride(1) == 1 && x.stride(0) >= 0) return {x, M, x.stride(0)};
  return {x.contiguous(), M, K};
}

int threads_to_use() {
  return in_forked_child() || at::in_parallel_region() ? 1 : at::get_num_threads();
}

Tensor output_like(const Tensor& x, int64_t N) {
  at::DimVector sizes(x.sizes());
  sizes.back() = N;
  // below the dispatcher, which has nothing to decide here
  return at::detail::empty_cpu(sizes, x.scalar_type());
}

const Kernels& kernels_in_use() {
  try {
    return kernels();
  } catch (const std::runtime_error& e) {
    TORCH_CHECK_VALUE(false, "torchweld: ", e.what());
  }
}

void run(const Tensor& x, const Layers& layers, bool group, c10::ArrayRef<Tensor> ys) {
  const Rows rows = rows_of(x);
  if (rows.M == 0) return;
  c10::SmallVector<void*, 8> pointers;
  for (const Tensor& y : ys) pointers.push_back(y.mutable_data_ptr());
  Call call;
  call.dtype = dtype_of(x, "x");
  call.layers = layers.data();
  call.count = int(layers.size());
  call.x = rows.x.const_data_ptr();
  call.M = rows.M;
  call.ldx = rows.ld;
  call.y = pointers.data();
  call.threads = threads_to_use();
  const Kernels& k = kernels_in_use();
  (group ? k.run_group : k.run_chain)(call, last_run_of_thread);
}
Tensor run_chain(const Tensor& x, const Layers& layers) {
  const Tensor y = output_like(x, layers.back().N);
  run(x, layers, false, y);
  return y;
}
std::vector<Tensor> run_group(const Tensor& x, const Layers& layers) {
  std::vector<Tensor> ys;
  for (const Layer& layer : layers) ys.push_back(output_like(x, layer.N));
  run(x, layers, true, ys);
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

void note_composed(const Tensor& x) {
  Run& run = last_run_of_thread;
  run = {"", "composed", "", 0, x.numel() / x.size(-1), run.calls + 1};
}

// ---- CPU ----
Tensor chain_cpu(const Tensor& x, TensorList params, std::string_view text) {
  const Spec& spec = spec_of(text);
  const auto sizes = check_all<int64_t>(x, params, spec, false);
  if (composition_is_faster(x, params)) {
    note_composed(x);
    return composed_chain(x, params, text);
  }
  return run_chain(x, natural_layers(params, spec, sizes, dtype_of(x, "x")));
}
std::vector<Tensor> group_cpu(const Tensor& x, TensorList params, std::string_view text) {
  const Spec& spec = spec_of(text);
  const auto sizes = check_all<int64_t>(x, params, spec, true);
  if (composition_is_faster(x, params)) {
    note_composed(x);
    return composed_group(x, params, text);
  }
  return run_group(x, natural_layers(params, spec, sizes, dtype_of(x, "x")));
}

// ---- packed weights: header, then each layer's panels, all at offsets of whole cache lines ----
struct PackedHeader {
  static constexpr int64_t kMagic = 0x646c657768637274;  // "trchweld"
  int64_t magic, lanes, dtype, count, bytes, spec_hash;
};
struct PackedEntry {
  int64_t K, N, offset;
};
size_t entries_end(size_t count) {
  const size_t raw = sizeof(PackedHeader) + count * sizeof(PackedEntry);
  return (raw + 63) / 64 * 64;
}
int64_t hash_of(std::string_view text) { return int64_t(std::hash<std::string_view>{}(text)); }

// A group's members all read x and may stand in any sizes; a chain's must fit each other.
Tensor pack_cpu(TensorList params, std::string_view text) {
  const Spec& spec = spec_of(text);
  TORCH_CHECK_VALUE(!params.empty() && int64_t(params.size()) == tensor_count(spec),
                    "torchweld: the spec asks for ", tensor_count(spec), " tensors, ",
                    params.size(), " were given");
  const DType dtype = dtype_of(params[0], "layer 0's weight");
  std::vector<LayerSizes<int64_t>> sizes;
  for (size_t i = 0; i < spec.size(); ++i)
    sizes.push_back(check_layer<int64_t>(tensors_of(spec, i, params), i, params[0]));
  const Layers layers = natural_layers(params, spec, sizes, dtype);
  const Kernels& k = kernels_in_use();

  std::vector<PackedEntry> entries;
  size_t end = entries_end(layers.size());
  for (const Layer& l : layers) {
    entries.push_back({l.K, l.N, int64_t(end)});
    end += k.packed_bytes(l, dtype);
  }
  Tensor packed = torchweld::bytes_in_huge_pages(end);
  char* base = static_cast<char*>(packed.mutable_data_ptr());
  const PackedHeader header{PackedHeader::kMagic,   k.lanes_f32,  int64_t(dtype),
                            int64_t(layers.size()), int64_t(end), hash_of(text)};
  std::memcpy(base, &header, sizeof header);
  std::memcpy(base + sizeof header, entries.data(), entries.size() * sizeof(PackedEntry));
  for (size_t i = 0; i < layers.size(); ++i) k.pack(layers[i], dtype, base + entries[i].offset);
  return packed;
}

Layers packed_layers(const Tensor& x, const Tensor& packed, std::string_view text, bool group) {
  const Spec& spec = spec_of(text);
  const char* base = static_cast<const char*>(packed.const_data_ptr());
  PackedHeader header{};
  if (packed.scalar_type() == at::kByte && packed.is_contiguous() &&
      size_t(packed.numel()) >= sizeof header)
    std::memcpy(&header, base, sizeof header);
  TORCH_CHECK_VALUE(header.magic == PackedHeader::kMagic && header.bytes == packed.numel() &&
                        header.count == int64_t(spec.size()) && header.spec_hash == hash_of(text),
                    "torchweld: `packed` was not made by torchweld::pack for this spec");
  TORCH_CHECK_VALUE(header.lanes == kernels_in_use().lanes_f32,
                    "torchweld: `packed` was made for registers of ", header.lanes,
                    " floats, the kernels in use have ", kernels_in_use().lanes_f32,
                    ": pack again");
  TORCH_CHECK_VALUE(header.dtype == int64_t(dtype_of(x, "x")), "torchweld: x is ", type_name(x),
                    " but the packed weights are of another dtype; pack weights of x's dtype");
  TORCH_CHECK_VALUE(x.dim() >= 1,
                    "torchweld: x is a scalar; expected at least one dimension, the features");
  Layers layers(spec.size());
  int64_t features = x.size(-1);
  for (size_t i = 0; i < spec.size(); ++i) {
    PackedEntry entry;
    std::memcpy(&entry, base + sizeof header + i * sizeof entry, sizeof entry);
    TORCH_CHECK_VALUE(entry.K == features, "torchweld: layer ", i, "'s weight takes ", entry.K,
                      " features, but ", group || i == 0 ? "x" : "the layer before it", " has ",
                      features);
    Layer& l = layers[i];
    l.K = entry.K;
    l.N = entry.N;
    l.act = spec[i].act;
    l.p0 = spec[i].p0;
    l.p1 = spec[i].p1;
    l.gated = spec[i].gated();
    l.packed = base + entry.offset;
    if (!group) features = entry.N;
  }
  return layers;
}
Tensor chain_packed_cpu(const Tensor& x, const Tensor& packed, std::string_view text) {
  return run_chain(x, packed_layers(x, packed, text, false));
}
std::vector<Tensor> group_packed_cpu(const Tensor& x, const Tensor& packed, std::string_view text) {
  return run_group(x, packed_layers(x, packed, text, true));
}

// ---- Meta: shapes, with symbols kept, so that a changing batch is not compiled anew ----
Tensor empty_symbolic(const Tensor& x, const c10::SymInt& N) {
  c10::SymDimVector sizes(x.sym_sizes());
  sizes.back() = N;
  return at::empty_symint(sizes, x.options());
}
Tensor chain_meta(const Tensor& x, TensorList params, std::string_view text) {
  const auto sizes = check_all<c10::SymInt>(x, params, spec_of(text), false);
  return empty_symbolic(x, sizes.back().N);
}
std::vector<Tensor> group_meta(const Tensor& x, TensorList params, std::string_view text) {
  std::vector<Tensor> ys;
  for (const auto& s : check_all<c10::SymInt>(x, params, spec_of(text), true))
    ys.push_back(empty_symbolic(x, s.N));
  return ys;
}

// ---- Autograd ----
template <class Signature>
auto handle(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}
using ChainSignature = Tensor(const Tensor&, TensorList, std::string_view);
using GroupSignature = std::vector<Tensor>(const Tensor&, TensorList, std::string_view);
const auto& chain_op() {
  static const auto op = handle<ChainSignature>("torchweld::chain");
  return op;
}
const auto& group_op() {
  static const auto op = handle<GroupSignature>("torchweld::group");
  return op;
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

c10::SmallVector<bool, 16> needed_of(AutogradContext* ctx, size_t count) {
  c10::SmallVector<bool, 16> needed;
  for (size_t i = 0; i < count; ++i) needed.push_back(ctx->needs_input_grad(i));
  return needed;
}
void keep_inputs(AutogradContext* ctx, const Tensor& x, TensorList params, std::string_view spec) {
  variable_list saved{x};
  saved.insert(saved.end(), params.begin(), params.end());
  ctx->save_for_backward(std::move(saved));
  ctx->saved_data["spec"] = std::string(spec);
}

struct ChainFunction : torch::autograd::Function<ChainFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, TensorList params,
                        const std::string& spec) {
    keep_inputs(ctx, x, params, spec);
    at::AutoDispatchBelowADInplaceOrView guard;
    return chain_op().call(x, params, spec);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grad) {
    const variable_list saved = ctx->get_saved_variables();
    const std::string spec = ctx->saved_data["spec"].toStringRef();
    variable_list grads = chain_backward(grad[0], saved[0], TensorList(saved).slice(1),
                                         spec_of(spec), needed_of(ctx, saved.size()).data());
    grads.emplace_back();  // of the spec
    return grads;
  }
};

struct GroupFunction : torch::autograd::Function<GroupFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, TensorList params,
                               const std::string& spec) {
    keep_inputs(ctx, x, params, spec);
    at::AutoDispatchBelowADInplaceOrView guard;
    return group_op().call(x, params, spec);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grad) {
    const variable_list saved = ctx->get_saved_variables();
    const std::string text = ctx->saved_data["spec"].toStringRef();
    const Spec& spec = spec_of(text);
    const auto needed = needed_of(ctx, saved.size());
    variable_list grads(saved.size() + 1);
    size_t first = 1;
    for (size_t i = 0; i < spec.size(); ++i) {
      const size_t count = size_t(spec[i].tensors());
      if (grad[i].defined()) {
        c10::SmallVector<bool, 16> own{needed[0]};
        own.append(needed.begin() + first, needed.begin() + first + count);
        variable_list member = chain_backward(
            grad[i], saved[0], TensorList(saved).slice(first, count), {spec[i]}, own.data());
        if (member[0].defined()) grads[0] = grads[0].defined() ? grads[0] + member[0] : member[0];
        std::move(member.begin() + 1, member.end(), grads.begin() + first);
      }
      first += count;
    }
    return grads;
  }
};

// functorch's transforms and forward-mode differentiation do not go through a C++ autograd function.
bool needs_composition(const Tensor& x, TensorList params) {
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode))
    return true;
  const auto dual = [](const Tensor& t) { return t._fw_grad(0).defined(); };
  return dual(x) || std::any_of(params.begin(), params.end(), dual);
}
bool needs_gradient(const Tensor& x, TensorList params) {
  return at::GradMode::is_enabled() &&
         (x.requires_grad() || std::any_of(params.begin(), params.end(),
                                           [](const Tensor& p) { return p.requires_grad(); }));
}

Tensor chain_autograd(const Tensor& x, TensorList params, std::string_view spec) {
  if (needs_composition(x, params)) {
    spec_of(spec);
    return composed_chain(x, params, spec);
  }
  if (needs_gradient(x, params)) return ChainFunction::apply(x, params, std::string(spec));
  at::AutoDispatchBelowADInplaceOrView guard;
  return chain_op().call(x, params, spec);
}
std::vector<Tensor> group_autograd(const Tensor& x, TensorList params, std::string_view spec) {
  if (needs_composition(x, params)) {
    spec_of(spec);
    return composed_group(x, params, spec);
  }
  if (needs_gradient(x, params)) return GroupFunction::apply(x, params, std::string(spec));
  at::AutoDispatchBelowADInplaceOrView guard;
  return group_op().call(x, params, spec);
}

// Packed copies know nothing of the parameters they were made from.
template <class Op>
auto packed_below_autograd(const Op& op, const Tensor& x, const Tensor& packed,
                           std::string_view spec) {
  TORCH_CHECK_VALUE(
      !(at::GradMode::is_enabled() && x.requires_grad()) && !x._fw_grad(0).defined(),
      "torchweld: packed weights are for inference, and x requires a gradient that would "
      "be lost; call under torch.no_grad(), or use torchweld::chain or group");
  at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(x, packed, spec);
}
Tensor chain_packed_autograd(const Tensor& x, const Tensor& packed, std::string_view spec) {
  static const auto op =
      handle<Tensor(const Tensor&, const Tensor&, std::string_view)>("torchweld::chain_packed");
  return packed_below_autograd(op, x, packed, spec);
}
std::vector<Tensor> group_packed_autograd(const Tensor& x, const Tensor& packed,
                                          std::string_view spec) {
  static const auto op =
      handle<std::vector<Tensor>(const Tensor&, const Tensor&, std::string_view)>(
          "torchweld::group_packed");
  return packed_below_autograd(op, x, packed, spec);
}

// ---- Autocast ----
template <class Op>
auto autocast(const Op& op, const Tensor& x, TensorList params, std::string_view spec) {
  const at::DeviceType device = x.device().type();
  c10::impl::ExcludeDispatchKeyGuard guard(
      c10::DispatchKeySet(at::autocast::get_autocast_dispatch_key_from_device_type(device)));
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  return op.call(at::autocast::cached_cast(dtype, x, device),
                 at::autocast::cached_cast(dtype, params, device), spec);
}
Tensor chain_autocast(const Tensor& x, TensorList params, std::string_view spec) {
  return autocast(chain_op(), x, params, spec);
}
std::vector<Tensor> group_autocast(const Tensor& x, TensorList params, std::string_view spec) {
  return autocast(group_op(), x, params, spec);
}

constexpr const char* kSchemas =
#include "schemas.inc"
    ;

}  // namespace

const Run& last_run() { return last_run_of_thread; }

// Our kernels compute in fp32. Where the CPU multiplies bf16 at twice that rate, torch's own product wins
// on big calls: Zen 4, 768 -> 3072, 8 rows 1.08 and 128 rows 2.0 times as fast; 64 -> 256 from 400 rows.
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
  for (std::string line; std::getline(lines, line);)
    if (!line.empty()) m.def(line.c_str(), {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(torchweld, CPU, m) {
  m.impl("chain", TORCH_FN(chain_cpu));
  m.impl("group", TORCH_FN(group_cpu));
  m.impl("pack", TORCH_FN(pack_cpu));
  m.impl("chain_packed", TORCH_FN(chain_packed_cpu));
  m.impl("group_packed", TORCH_FN(group_packed_cpu));
}
TORCH_LIBRARY_IMPL(torchweld, CompositeExplicitAutograd, m) {
  m.impl("chain", TORCH_FN(composed_chain));
  m.impl("group", TORCH_FN(composed_group));
}
TORCH_LIBRARY_IMPL(torchweld, Meta, m) {
  m.impl("chain", TORCH_FN(chain_meta));
  m.impl("group", TORCH_FN(group_meta));
}
TORCH_LIBRARY_IMPL(torchweld, Autograd, m) {
  m.impl("chain", TORCH_FN(chain_autograd));
  m.impl("group", TORCH_FN(group_autograd));
  m.impl("pack", torch::CppFunction::makeFallthrough());
  m.impl("chain_packed", TORCH_FN(chain_packed_autograd));
  m.impl("group_packed", TORCH_FN(group_packed_autograd));
}
TORCH_LIBRARY_IMPL(torchweld, AutocastCPU, m) {
  m.impl("chain", TORCH_FN(chain_autocast));
  m.impl("group", TORCH_FN(group_autocast));
}
TORCH_LIBRARY_IMPL(torchweld, AutocastCUDA, m) {
  m.impl("chain", TORCH_FN(chain_autocast));
  m.impl("group", TORCH_FN(group_autocast));
}
TORCH_LIBRARY_IMPL(torchweld, FuncTorchBatched, m) {
  m.impl("chain", TORCH_FN(composed_chain));
  m.impl("group", TORCH_FN(composed_group));
}

}  // namespace torchweld
