// Packed weights: all layers of a block in one byte tensor. A header comes first, then each layer's
// panels, all at offsets of whole cache lines.
#pragma once
#include <cstddef>
#include <cstring>

#include "huge_pages.h"
#include "kernel_layers.h"
#include "tensor_memory.h"

namespace torchweld {

// `sum` is the checksum of everything from `version` to the first panel.
struct PackedHeader {
  static constexpr int64_t kMagic = 0x646c657768637274;  // "trchweld"
  static constexpr int64_t kVersion = 2;
  int64_t magic, sum, version, lanes, dtype, count, bytes, spec_hash;
};
static_assert(sizeof(PackedHeader) == 64);
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
// Each word has its own odd factor, so the change of a single word is always seen.
inline int64_t sum_of_header(const char* base, size_t count) {
  const size_t end = entries_end(count);
  uint64_t sum = 0, factor = 0x9e3779b97f4a7c15;
  for (size_t at = offsetof(PackedHeader, version); at < end; at += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, base + at, sizeof word);
    sum += word * factor;
    factor += 2 * 0x9e3779b97f4a7c15;
  }
  return int64_t(sum);
}

// Where each layer of a packed tensor begins, and where the last one ends. Depends on sizes only.
struct PackedPlan {
  std::vector<PackedEntry> entries;
  size_t end;
};
inline PackedPlan plan_packed(const Layers& layers, DType dtype) {
  PackedPlan plan{{}, entries_end(layers.size())};
  for (const Layer& l : layers) {
    plan.entries.push_back({l.K, l.N, int64_t(plan.end)});
    plan.end += kernels_in_use().packed_bytes(l, dtype);
  }
  return plan;
}

// Checks each layer by itself. Whether a chain's layers fit each other is checked when the packed
// tensor is used, since a group's need not.
template <class Int>
std::vector<LayerSizes<Int>> check_packable(TensorList params, const Spec& spec) {
  TORCHWELD_CHECK(!params.empty() && int64_t(params.size()) == tensor_count(spec),
                  "torchweld: the spec asks for ", tensor_count(spec), " tensors, ", params.size(),
                  " were given");
  dtype_of(params[0], "layer 0's weight");
  std::vector<LayerSizes<Int>> sizes;
  for (size_t i = 0; i < spec.size(); ++i)
    sizes.push_back(check_layer<Int>(tensors_of(spec, i, params), i, params[0]));
  return sizes;
}

inline Tensor pack_weights(TensorList params, std::string_view text) {
  const Spec& spec = spec_without_dropout(text);
  const auto sizes = check_packable<int64_t>(params, spec);
  const DType dtype = dtype_of(params[0], "layer 0's weight");
  const Layers layers = natural_layers(params, spec, sizes, dtype);
  const Kernels& k = kernels_in_use();
  const PackedPlan plan = plan_packed(layers, dtype);
  Tensor packed = torchweld::bytes_in_huge_pages(plan.end);
  char* base = static_cast<char*>(packed.mutable_data_ptr());
  std::memset(base, 0, entries_end(layers.size()));
  PackedHeader header{PackedHeader::kMagic,   0,
                      PackedHeader::kVersion, k.lanes_f32,
                      int64_t(dtype),         int64_t(layers.size()),
                      int64_t(plan.end),      hash_of(text)};
  std::memcpy(base, &header, sizeof header);
  std::memcpy(base + sizeof header, plan.entries.data(), layers.size() * sizeof(PackedEntry));
  header.sum = sum_of_header(base, layers.size());
  std::memcpy(base, &header, sizeof header);
  for (size_t i = 0; i < layers.size(); ++i)
    k.pack(layers[i], dtype, base + plan.entries[i].offset);
  return packed;
}

// Refuses: there are no tensors, or the kernels cannot read them.
inline Tensor pack_elsewhere(TensorList params, std::string_view text) {
  check_packable<c10::SymInt>(params, spec_without_dropout(text));
  TORCHWELD_CHECK(false, "torchweld: weights on ", params[0].device(),
                  " cannot be packed: the kernels that read them run on the CPU; use "
                  "torchweld::chain or group there");
}

// Shapes only: as large as pack_weights would make it, with the kernels in use.
inline Tensor pack_meta(TensorList params, std::string_view text) {
  const Spec& spec = spec_without_dropout(text);
  const auto sizes = check_packable<c10::SymInt>(params, spec);
  Layers layers(spec.size());
  for (size_t i = 0; i < spec.size(); ++i) {
    layers[i].K = sizes[i].K.guard_int(__FILE__, __LINE__);
    layers[i].N = sizes[i].N.guard_int(__FILE__, __LINE__);
    layers[i].gated = spec[i].gated();
  }
  const size_t bytes = plan_packed(layers, dtype_of(params[0], "layer 0's weight")).end;
  return at::empty({int64_t(bytes)}, params[0].options().dtype(at::kByte));
}

// The tensor can hold anything, so no field may lead outside of it. The sum finds edits and cuts;
// beyond that, packed_layers computes every size again from checked values.
inline PackedHeader checked_header(const Tensor& packed, const Spec& spec, std::string_view text) {
  const char* refused = nullptr;
  PackedHeader header{};
  const char* base = nullptr;
  if (packed.scalar_type() != at::kByte || packed.layout() != at::kStrided ||
      !packed.is_contiguous())
    refused = "it is not a contiguous tensor of uint8";
  else if (size_t(packed.numel()) < entries_end(spec.size()) || !has_its_memory(packed))
    refused = "it is too short";
  else if (base = static_cast<const char*>(packed.const_data_ptr());
           reinterpret_cast<uintptr_t>(base) % alignof(double) != 0)
    refused = "it does not start at a multiple of 8 bytes";
  else
    std::memcpy(&header, base, sizeof header);
  if (!refused) {
    if (header.magic != PackedHeader::kMagic)
      refused = "it does not begin as they do";
    else if (header.version != PackedHeader::kVersion)
      refused = "it was made by another version of torchweld";
    else if (header.count != int64_t(spec.size()) || header.spec_hash != hash_of(text))
      refused = "it was made for another spec";
    else if (header.bytes != packed.numel())
      refused = "it is not as long as it says";
    else if (header.sum != sum_of_header(base, spec.size()))
      refused = "its header was changed";
  }
  TORCHWELD_CHECK(!refused,
                  "torchweld: `packed` was not made by torchweld::pack for this spec: ", refused,
                  "; pack the weights again");
  return header;
}

inline Layers packed_layers(const Tensor& x, const Tensor& packed, std::string_view text,
                            bool group) {
  const Spec& spec = spec_without_dropout(text);
  const PackedHeader header = checked_header(packed, spec, text);
  const Kernels& k = kernels_in_use();
  const DType dtype = dtype_of(x, "x");
  TORCHWELD_CHECK(header.lanes == k.lanes_f32, "torchweld: `packed` was made for registers of ",
                  header.lanes, " floats, the kernels in use have ", k.lanes_f32, ": pack again");
  TORCHWELD_CHECK(header.dtype == int64_t(dtype), "torchweld: x is ", type_name(x),
                  " but the packed weights are of another dtype; pack weights of x's dtype");
  TORCHWELD_CHECK(x.dim() >= 1,
                  "torchweld: x is a scalar; expected at least one dimension, the features");
  const char* base = static_cast<const char*>(packed.const_data_ptr());
  Layers layers(spec.size());
  int64_t features = x.size(-1);
  size_t end = entries_end(spec.size());
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
    const bool fits = entry.K >= 1 && entry.N >= 1 && entry.offset == int64_t(end) &&
                      entry.N <= header.bytes / entry.K;  // so that no product overflows
    if (fits) end += k.packed_bytes(l, dtype);
    TORCHWELD_CHECK(fits && end <= size_t(header.bytes), "torchweld: `packed` is broken: layer ", i,
                    " of ", entry.K, " x ", entry.N, " at ", entry.offset,
                    " does not lie within its ", header.bytes, " bytes; pack the weights again");
    l.packed = base + entry.offset;
    if (!group) features = entry.N;
  }
  TORCHWELD_CHECK(end == size_t(header.bytes), "torchweld: `packed` is broken: its layers end at ",
                  end, " of ", header.bytes, " bytes; pack the weights again");
  return layers;
}

}  // namespace torchweld
