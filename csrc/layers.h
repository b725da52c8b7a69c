// Weights as the kernels take them: where they lie in their tensors, or packed.
#pragma once
#include "checks.h"
#include "huge_pages.h"

namespace torchweld {

inline const Kernels& kernels_in_use() {
  try {
    return kernels();
  } catch (const std::runtime_error& e) {
    TORCHWELD_CHECK(false, "torchweld: ", e.what());
  }
}

inline Product product_of(const LayerSpec& s, const Tensor& w, const Tensor* bias) {
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
inline Product part_of(Product p, int64_t skip, int64_t step, size_t element) {
  p.weight = static_cast<const char*>(p.weight) + skip * p.stride_n * int64_t(element);
  p.stride_n *= step;
  if (p.bias) {
    p.bias = static_cast<const char*>(p.bias) + skip * p.bias_stride * int64_t(element);
    p.bias_stride *= step;
  }
  return p;
}

using Layers = c10::SmallVector<Layer, 4>;

inline Layers natural_layers(TensorList params, const Spec& spec,
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

// ---- packed weights: header, then each layer's panels, all at offsets of whole cache lines ----
struct PackedHeader {
  static constexpr int64_t kMagic = 0x646c657768637274;  // "trchweld"
  int64_t magic, lanes, dtype, count, bytes, spec_hash;
};
struct PackedEntry {
  int64_t K, N, offset;
};
inline size_t entries_end(size_t count) {
  const size_t raw = sizeof(PackedHeader) + count * sizeof(PackedEntry);
  return (raw + 63) / 64 * 64;
}
inline int64_t hash_of(std::string_view text) {
  return int64_t(std::hash<std::string_view>{}(text));
}

// A group's members all read x and may stand in any sizes; a chain's must fit each other.
inline Tensor pack_weights(TensorList params, std::string_view text) {
  const Spec& spec = spec_of(text);
  TORCHWELD_CHECK(!params.empty() && int64_t(params.size()) == tensor_count(spec),
                  "torchweld: the spec asks for ", tensor_count(spec), " tensors, ", params.size(),
                  " were given");
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

inline Layers packed_layers(const Tensor& x, const Tensor& packed, std::string_view text,
                            bool group) {
  const Spec& spec = spec_of(text);
  const char* base = static_cast<const char*>(packed.const_data_ptr());
  PackedHeader header{};
  if (packed.scalar_type() == at::kByte && packed.is_contiguous() &&
      size_t(packed.numel()) >= sizeof header)
    std::memcpy(&header, base, sizeof header);
  TORCHWELD_CHECK(header.magic == PackedHeader::kMagic && header.bytes == packed.numel() &&
                      header.count == int64_t(spec.size()) && header.spec_hash == hash_of(text),
                  "torchweld: `packed` was not made by torchweld::pack for this spec");
  TORCHWELD_CHECK(header.lanes == kernels_in_use().lanes_f32,
                  "torchweld: `packed` was made for registers of ", header.lanes,
                  " floats, the kernels in use have ", kernels_in_use().lanes_f32, ": pack again");
  TORCHWELD_CHECK(header.dtype == int64_t(dtype_of(x, "x")), "torchweld: x is ", type_name(x),
                  " but the packed weights are of another dtype; pack weights of x's dtype");
  TORCHWELD_CHECK(x.dim() >= 1,
                  "torchweld: x is a scalar; expected at least one dimension, the features");
  Layers layers(spec.size());
  int64_t features = x.size(-1);
  for (size_t i = 0; i < spec.size(); ++i) {
    PackedEntry entry;
    std::memcpy(&entry, base + sizeof header + i * sizeof entry, sizeof entry);
    TORCHWELD_CHECK(entry.K == features, "torchweld: layer ", i, "'s weight takes ", entry.K,
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

}  // namespace torchweld
