// Checks of an op's arguments before a kernel sees them. Each refusal says what was given, what was
// expected, and the remedy.
#pragma once
#include <ATen/ATen.h>

#include "layer_tensors.h"
#include "refusal.h"
#include "tensor_memory.h"

namespace torchweld {

// The dtype's name in Python.
inline std::string type_name(const Tensor& t) {
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

inline DType dtype_of(const Tensor& t, const char* what) {
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
      TORCHWELD_CHECK(false, "torchweld: ", what, " is ", type_name(t),
                      "; allowed are float32, bfloat16, float16 and float64: cast it with .to()");
  }
}

template <class F>
auto checked_spec(F&& parse) -> decltype(parse()) {
  try {
    return parse();
  } catch (const std::invalid_argument& e) {
    TORCHWELD_CHECK(false, "torchweld: ", e.what());
  }
}
inline const Spec& spec_of(std::string_view text) {
  return checked_spec([&]() -> const Spec& { return parse_spec(text); });
}

// Only the ops for training draw random numbers.
inline const Spec& spec_without_dropout(std::string_view text) {
  const Spec& spec = spec_of(text);
  for (const LayerSpec& layer : spec)
    TORCHWELD_CHECK(layer.drop == 0, "torchweld: the spec ", quoted(text),
                    " has dropout, which torchweld::chain_training alone applies; leave the flag "
                    "drop out for inference");
  return spec;
}

inline int tensor_count(const Spec& spec) {
  int n = 0;
  for (const LayerSpec& l : spec) n += l.tensors();
  return n;
}

// Sizes of one layer. Int is int64_t, or SymInt in the meta kernel.
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

// Only tensors that will be read are checked; the meta kernel's have no memory.
template <class Int>
void check_memory(const Tensor& t, size_t layer, const char* what) {
  if constexpr (std::is_same_v<Int, int64_t>)
    TORCHWELD_CHECK(!t.device().is_cpu() || has_its_memory(t), "torchweld: layer ", layer, "'s ",
                    what, " has shape ", t.sizes(), " but its storage holds only ",
                    t.storage().nbytes(), " bytes: it was resized; give it memory before the call");
}

template <class Int>
LayerSizes<Int> check_layer(const LayerTensors& layer, size_t index, const Tensor& x) {
  const LayerSpec& s = layer.spec;
  LayerSizes<Int> sizes;
  for (int i = 0; i < s.weights(); ++i) {
    const Tensor& w = layer.list[i * (s.bias ? 2 : 1)];
    TORCHWELD_CHECK(w.dim() == 2, "torchweld: layer ", index, "'s weight has shape ", w.sym_sizes(),
                    "; expected two dimensions, [out, in], or [in, out] with the flag t");
    TORCHWELD_CHECK(w.scalar_type() == x.scalar_type(), "torchweld: x is ", type_name(x),
                    " but layer ", index, "'s weight is ", type_name(w),
                    "; all must have one dtype: cast one with .to(), or call under torch.autocast");
    TORCHWELD_CHECK(w.device() == x.device(), "torchweld: x is on ", x.device(), " but layer ",
                    index, "'s weight is on ", w.device(), "; move one with .to()");
    TORCHWELD_CHECK(w.layout() == at::kStrided, "torchweld: layer ", index, "'s weight has layout ",
                    w.layout(), "; expected strided: convert it with .to_dense()");
    check_memory<Int>(w, index, "weight");
    const Int K = size_of_dim<Int>(w, s.transposed ? 0 : 1),
              N = size_of_dim<Int>(w, s.transposed ? 1 : 0);
    if (i == 0) {
      sizes = {K, N};
    } else {
      TORCHWELD_CHECK(K == sizes.K && N == sizes.N, "torchweld: layer ", index,
                      "'s gate weight has shape ", layer.list[0].sym_sizes(), " and its up weight ",
                      w.sym_sizes(), "; they must be equal");
    }
    if (s.bias) {
      const Tensor& b = layer.list[i * 2 + 1];
      TORCHWELD_CHECK(b.dim() == 1 && size_of_dim<Int>(b, 0) == N, "torchweld: layer ", index,
                      "'s bias has shape ", b.sym_sizes(), "; expected [", N, "]");
      TORCHWELD_CHECK(
          b.scalar_type() == x.scalar_type(), "torchweld: x is ", type_name(x), " but layer ",
          index, "'s bias is ", type_name(b),
          "; all must have one dtype: cast one with .to(), or call under torch.autocast");
      TORCHWELD_CHECK(b.device() == x.device(), "torchweld: x is on ", x.device(), " but layer ",
                      index, "'s bias is on ", b.device(), "; move one with .to()");
      check_memory<Int>(b, index, "bias");
    }
  }
  TORCHWELD_CHECK(sizes.K >= 1 && sizes.N >= 1, "torchweld: layer ", index, "'s weight has shape ",
                  layer.list[0].sym_sizes(), "; every size must be at least 1");
  if (s.gated() && s.gate != Gate::separate) {
    TORCHWELD_CHECK(sizes.N % 2 == 0, "torchweld: layer ", index, " is gated with one weight of ",
                    sizes.N, " outputs; gate and up need an even number");
    sizes.N = sizes.N / 2;
  }
  return sizes;
}

// Checks all layers against each other and x, and returns their sizes. In a group every layer reads
// x.
template <class Int>
std::vector<LayerSizes<Int>> check_all(const Tensor& x, TensorList params, const Spec& spec,
                                       bool group) {
  TORCHWELD_CHECK(int64_t(params.size()) == tensor_count(spec), "torchweld: the spec asks for ",
                  tensor_count(spec), " tensors, ", params.size(), " were given");
  dtype_of(x, "x");
  TORCHWELD_CHECK(x.dim() >= 1,
                  "torchweld: x is a scalar; expected at least one dimension, the features");
  std::vector<LayerSizes<Int>> sizes;
  Int features = size_of_dim<Int>(x, -1);
  for (size_t i = 0; i < spec.size(); ++i) {
    sizes.push_back(check_layer<Int>(tensors_of(spec, i, params), i, x));
    const Int given = group || i == 0 ? features : sizes[i - 1].N;
    TORCHWELD_CHECK(sizes[i].K == given, "torchweld: layer ", i, "'s weight takes ", sizes[i].K,
                    " features, but ", group || i == 0 ? "x" : "the layer before it", " has ",
                    given, i == 0 ? "; the last dimension of x must match" : "");
  }
  return sizes;
}

}  // namespace torchweld
