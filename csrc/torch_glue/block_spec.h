// The grammar of an op's `spec` argument, which is the form of a chain or group as text.
// Torch-free.
//
//   spec   = layer { ";" layer }
//   layer  = activation [ ":" number { "," number } ] { "/" flag }
//   flag   = "b"            the layer has a bias
//          | "t"            weights are [in, out], as Conv1D keeps them
//          | "separate"     gated, gate and up are two weights
//          | "first"        gated, one weight, the gate's outputs come first
//          | "second"       gated, one weight, the gate's outputs come second
//          | "interleaved"  gated, one weight, gate and up outputs take turns, gate first
//          | "drop:" number in training, dropout of this probability acts on the layer's output
//
// For instance "gelu/b;identity/b", "silu/separate;identity", "leaky_relu:0.2". The tensors of all
// layers follow each other in one list, each weight followed by its bias, the gate before up.
#pragma once
#include <charconv>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <unordered_map>
#include <vector>

#include "kernels/kernel_api.h"

namespace torchweld {

enum class Gate { none, separate, first, second, interleaved };

struct LayerSpec {
  Act act = Act::identity;
  double p0 = 0, p1 = 0;
  bool bias = false, transposed = false;
  Gate gate = Gate::none;
  double drop = 0;  // the probability of dropout on its output

  bool gated() const { return gate != Gate::none; }
  int weights() const { return gate == Gate::separate ? 2 : 1; }
  int tensors() const { return weights() * (bias ? 2 : 1); }
};
using Spec = std::vector<LayerSpec>;

// Layers with dropout; each has a mask.
inline size_t mask_count(const Spec& spec) {
  size_t count = 0;
  for (const LayerSpec& layer : spec) count += layer.drop > 0;
  return count;
}

inline std::string quoted(std::string_view s) { return std::string("'").append(s).append("'"); }

inline void parse_activation(std::string_view text, LayerSpec& layer) {
  const size_t colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  int wanted = -1;
  std::string known;
#define ACTIVATION(act_name, count, d0, d1, ...) \
  known += known.empty() ? "" : " ";             \
  known += #act_name;                            \
  if (name == #act_name) {                       \
    layer.act = Act::act_name;                   \
    wanted = count;                              \
    layer.p0 = d0;                               \
    layer.p1 = d1;                               \
  }
#include "kernels/activations.inc"
#undef ACTIVATION
  if (wanted < 0)
    throw std::invalid_argument("unknown activation " + quoted(name) + "; there are: " + known);
  if (colon == std::string_view::npos) return;
  const char *at = text.data() + colon + 1, *const stop = text.data() + text.size();
  for (int i = 0; at != stop || i == 0; ++i) {
    // strtod would read a comma as a decimal point in some locales. Like strtod and Python, skip
    // spaces and a plus.
    while (at != stop && *at == ' ') ++at;
    if (stop - at > 1 && *at == '+' && at[1] != '-') ++at;
    double value = 0;
    const auto [end, problem] = std::from_chars(at, stop, value);
    if (i >= wanted || problem != std::errc() || (end != stop && *end != ','))
      throw std::invalid_argument("activation " + quoted(text) + ": " + std::string(name) +
                                  " takes " + std::to_string(wanted) +
                                  " number(s), separated by commas");
    (i == 0 ? layer.p0 : layer.p1) = value;
    at = end != stop ? end + 1 : end;
  }
}

inline double parse_drop(std::string_view flag) {
  const char *const begin = flag.data() + 5, *const stop = flag.data() + flag.size();
  double p = 0;
  const auto [end, problem] = std::from_chars(begin, stop, p);
  if (problem != std::errc() || end != stop || !(p > 0 && p < 1))
    throw std::invalid_argument("flag " + quoted(flag) +
                                " in a spec: a probability above 0 and below 1 follows drop:");
  return p;
}

inline LayerSpec parse_layer(std::string_view text) {
  LayerSpec layer;
  size_t slash = text.find('/');
  parse_activation(text.substr(0, slash), layer);
  while (slash != std::string_view::npos) {
    text.remove_prefix(slash + 1);
    slash = text.find('/');
    const std::string_view flag = text.substr(0, slash);
    if (flag == "b")
      layer.bias = true;
    else if (flag == "t")
      layer.transposed = true;
    else if (flag == "separate")
      layer.gate = Gate::separate;
    else if (flag == "first")
      layer.gate = Gate::first;
    else if (flag == "second")
      layer.gate = Gate::second;
    else if (flag == "interleaved")
      layer.gate = Gate::interleaved;
    else if (flag.substr(0, 5) == "drop:")
      layer.drop = parse_drop(flag);
    else
      throw std::invalid_argument(
          "unknown flag " + quoted(flag) +
          " in a spec; there are: b t separate first second interleaved drop:p");
  }
  return layer;
}

// Each spec is parsed once per thread; later calls look it up.
inline const Spec& parse_spec(std::string_view text) {
  thread_local std::unordered_map<std::string, std::unique_ptr<const Spec>> known;
  thread_local std::string last_text;
  thread_local const Spec* last = nullptr;
  if (last && text == last_text) return *last;
  const std::string key(text);
  auto& entry = known[key];
  if (!entry) {
    auto spec = std::make_unique<Spec>();
    for (std::string_view rest = text;;) {
      const size_t end = rest.find(';');
      spec->push_back(parse_layer(rest.substr(0, end)));
      if (end == std::string_view::npos) break;
      rest.remove_prefix(end + 1);
    }
    entry = std::move(spec);
  }
  last_text = key;
  return *(last = entry.get());
}

}  // namespace torchweld
