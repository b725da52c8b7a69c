// The backward of narrow blocks at many rows: the rows are cut into parts, and a thread takes a part
// through all phases alone. Nobody waits, and no core reads what another has just made: a pass that
// is cut by columns runs at 1.5 times the speed of one thread, this at 1.9 (64 -> 256 -> 64, 256
// rows, Zen 4, 2 threads).
//
// Each part has its own sums for weights and biases. They are added in the order of the rows. How
// many parts there are depends on the shapes alone, so the number of threads does not change a bit
// of the result.
#pragma once
#include <algorithm>
#include <vector>

#include "backward_pass.h"

namespace {

template <class T>
class BackwardByRows {
  static constexpr int64_t kLeastRows = 32, kUsualRows = 64, kMostParts = 8;
  // The sums of all parts stay in the caches of the cores, and adding them costs little beside this
  // much work.
  static constexpr double kMostWeightBytes = 384 << 10, kLeastFlops = 4e6;

 public:
  static bool serves(const BackwardCall& call) {
    double weights = 0;
    for (int i = 0; i < call.count; ++i) {
      const Layer& l = call.layers[i];
      weights += double(l.K) * double(l.N) * (l.gated ? 2 : 1);
    }
    return call.M >= 2 * kLeastRows && weights * sizeof(T) <= kMostWeightBytes &&
           4 * weights * double(call.M) >= kLeastFlops;
  }

  explicit BackwardByRows(const BackwardCall& call)
      : call_(call), parts_(std::clamp<int64_t>(call.M / kUsualRows, 2, kMostParts)) {}

  void run(Run& run) {
    lay_out();
    Run first;
    const int threads = int(std::min<int64_t>(call_.threads, parts_));
    run.threads = on_team(threads, [&](const Team& team) {
      PhaseCursor phases(team, tickets_);
      phases.draw(parts_, [&](int64_t p) {
        Run own;
        BackwardPass<T>(call_, share(call_.M, p, parts_), gradients(p), 1).run(p ? own : first);
      });
      team.wait_for_all();
      team.attempt([&] { add_up(team); });
    });
    run.partition = "rows";
    run.weights = first.weights;
    run.products = first.products;
  }

 private:
  // The first part writes where the result goes.
  const LayerGradient* gradients(int64_t part) const {
    return part ? &sums_[size_t((part - 1) * call_.count)] : call_.gradients;
  }

  void lay_out() {
    sums_.assign(size_t((parts_ - 1) * call_.count), {});
    T* base = nullptr;
    for (int round = 0; round < 2; ++round) {  // once to count, once to hand out
      size_t used = 0;
      const auto take = [&](size_t count) {
        T* at = base ? base + used : nullptr;
        used += whole_lines(count * sizeof(T)) / sizeof(T);
        return at;
      };
      for (size_t s = 0; s < sums_.size(); ++s) {
        const size_t i = s % size_t(call_.count);
        const auto own = [&](const ProductGradient& g) {
          ProductGradient sums = g;
          if (g.weight) sums.weight = take(extent_of(call_.layers[i], g));
          if (g.bias) sums.bias = take(size_t(call_.layers[i].N));
          sums.bias_stride = 1;
          return sums;
        };
        sums_[s] = {own(call_.gradients[i].up), own(call_.gradients[i].gate)};
      }
      if (round == 0) base = parts_arena.get<T>(used);
    }
  }

  // ---- adding the parts ----
  void add_up(const Team& team) const {
    for (int i = 0; i < call_.count; ++i)
      for (const auto product : {&LayerGradient::up, &LayerGradient::gate}) {
        const ProductGradient& to = call_.gradients[i].*product;
        const Layer& l = call_.layers[i];
        if (to.weight) add_weights(l, to, i, product, team);
        if (to.bias) add_bias(to, i, product, share(l.N, team.thread, team.size));
      }
  }
  void add_weights(const Layer& l, const ProductGradient& to, int i,
                   ProductGradient LayerGradient::* product, const Team& team) const {
    const bool along_k = to.stride_k == 1;
    const int64_t rows = along_k ? l.N : l.K, columns = along_k ? l.K : l.N;
    const int64_t row = along_k ? to.stride_n : to.stride_k;
    const int64_t step = along_k ? 1 : to.stride_n;
    const Range own = share(rows, team.thread, team.size);
    for (int64_t r = own.begin; r < own.end; ++r) {
      T* const sum = static_cast<T*>(to.weight) + r * row;
      for (int64_t part = 1; part < parts_; ++part)
        add(sum, static_cast<const T*>((gradients(part)[i].*product).weight) + r * row, columns,
            step);
    }
  }
  void add_bias(const ProductGradient& to, int i, ProductGradient LayerGradient::* product,
                Range columns) const {
    T* const sum = static_cast<T*>(to.bias);
    for (int64_t part = 1; part < parts_; ++part) {
      const T* from = static_cast<const T*>((gradients(part)[i].*product).bias);
      for (int64_t n = columns.begin; n < columns.end; ++n) sum[n * to.bias_stride] += from[n];
    }
  }
  static void add(T* __restrict to, const T* __restrict from, int64_t count, int64_t step) {
    if (step == 1)
      for (int64_t j = 0; j < count; ++j) to[j] += from[j];
    else
      for (int64_t j = 0; j < count; ++j) to[j * step] += from[j * step];
  }

  const BackwardCall& call_;
  const int64_t parts_;
  std::vector<LayerGradient> sums_;  // of the second part and those after it, `count` each
  Tickets tickets_{0};
};

}  // namespace
