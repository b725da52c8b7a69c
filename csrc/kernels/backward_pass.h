// The backward of a chain or a group in one call: what each phase computes. partition.h says how it
// is cut.
//
// A block of rows goes through these phases, from the last stage to the first (a stage is a layer
// of a chain, or all layers of a group):
//   prepare       the gradient of the last stage's pre-activations; x as panels
//   input         for each stage but the first: the gradient of its input, which becomes the
//                 gradient of the pre-activations before it while the tile is in L1; and the weight
//                 gradients of the stage after it
//   last          the gradient of x, and the weight gradients that are left
// Nothing is computed that no needed gradient depends on. No sum is split between the threads of a
// pass; backward_by_rows.h has passes over parts of the rows.
#pragma once
#include <algorithm>
#include <vector>

#include "gradient_finish.h"
#include "gradient_work.h"
#include "kernel_api.h"
#include "partition.h"
#include "scratch.h"
#include "team.h"

namespace {

using torchweld::BackwardCall;
using torchweld::LayerGradient;
using torchweld::ProductGradient;
using torchweld::Run;

// How far apart the first and the last element of a weight gradient lie.
inline size_t extent_of(const Layer& l, const ProductGradient& g) {
  return size_t((l.N - 1) * g.stride_n + (l.K - 1) * g.stride_k + 1);
}

template <class T>
class BackwardPass {
  using C = compute_t<T>;
  static constexpr int P = kPanel<C>;
  static constexpr bool kSumsInPlace = std::is_same_v<T, C>;

 public:
  explicit BackwardPass(const BackwardCall& call)
      : BackwardPass(call, {0, call.M}, call.gradients, call.threads) {}
  // Computes these rows alone: their gradients of x, and their part of the other gradients.
  BackwardPass(const BackwardCall& call, Range rows, const LayerGradient* gradients, int threads)
      : call_(call),
        rows_(rows),
        gradients_(gradients),
        stages_(call.group ? 1 : call.count),
        K_(call.layers[0].K) {
    double weights = 0;
    lowest_ = call.grad_x ? 0 : stages_;
    for (int i = 0; i < call.count; ++i) {
      const Layer& l = call.layers[i];
      weights += double(l.K) * double(l.N) * (l.gated ? 2 : 1);
      if (needs_any(i)) lowest_ = std::min(lowest_, call.group ? 0 : i);
    }
    const double flops = 4 * weights * double(rows.size());
    threads_ = is_small(flops, weights * sizeof(T)) ? 1 : threads;
  }

  void run(Run& run) {
    run.partition = threads_ > 1 ? "columns" : "single";
    run.weights = "natural";
    run.products = 0;
    run.threads = 1;
    if (lowest_ == stages_) return;
    lay_out();
    count_products(run);
    run.threads = on_team(threads_, [this](const Team& team) { work(team); });
  }

 private:
  // ---- what is needed ----
  const LayerGradient& gradient(int i) const { return gradients_[i]; }
  bool needs_weight(int i) const { return gradient(i).up.weight || gradient(i).gate.weight; }
  bool needs_any(int i) const {
    return needs_weight(i) || gradient(i).up.bias || gradient(i).gate.bias;
  }
  bool needs_input(int s) const { return s > lowest_ || (s == 0 && call_.grad_x); }
  int first_layer(int s) const { return call_.group ? 0 : s; }
  int last_layer(int s) const { return call_.group ? call_.count : s + 1; }

  void count_products(Run& run) const {
    for (int s = lowest_; s < stages_; ++s)
      for (int i = first_layer(s); i < last_layer(s); ++i) {
        const int products = call_.layers[i].gated ? 2 : 1;
        if (needs_input(s)) run.products += products;
        run.products += (gradient(i).up.weight != nullptr) + (gradient(i).gate.weight != nullptr);
      }
  }

  // ---- memory of one block of rows ----
  struct LayerBuffers {
    C *gradients, *inputs;  // of pre-activations; of the layer's input, as panels, or null
    int64_t ld, up;
    C *up_bias, *gate_bias;
    C *up_sums, *gate_sums;  // of weight gradients, see WeightGradient
  };
  static int64_t whole_panels(int64_t n) { return (n + P - 1) / P * P; }
  static int64_t gradient_ld(const Layer& l) {
    return padded_ld<C>(whole_panels(l.N) * (l.gated ? 2 : 1));
  }

  // A block of 512 rows reads and writes the weight gradients once in 70 ms (768 -> 3072, Zen 4).
  // Wide layers take 256, to keep its memory small.
  int64_t rows_per_block() const {
    int64_t columns = whole_panels(K_);
    for (int i = 0; i < call_.count; ++i)
      columns += gradient_ld(call_.layers[i]) + whole_panels(call_.layers[i].K);
    const int64_t most = columns * 512 * int64_t(sizeof(C)) <= (32 << 20) ? 512 : 256;
    return std::min(rows_.size(), most);
  }

  void lay_out() {
    block_rows_ = rows_per_block();
    blocks_ = (rows_.size() + block_rows_ - 1) / block_rows_;
    buffers_.resize(size_t(call_.count));
    // Twice: once to count, once to hand out.
    C* base = nullptr;
    for (int round = 0; round < 2; ++round) {
      size_t used = 0;
      const auto take = [&](size_t count) {
        C* at = base ? base + used : nullptr;
        used += whole_lines(count * sizeof(C)) / sizeof(C);
        return at;
      };
      C* shared = nullptr;  // x, which all layers of a group read
      for (int s = lowest_; s < stages_; ++s)
        for (int i = first_layer(s); i < last_layer(s); ++i) {
          const Layer& l = call_.layers[i];
          LayerBuffers& b = buffers_[size_t(i)];
          b.ld = gradient_ld(l);
          b.up = l.gated ? whole_panels(l.N) : 0;
          b.gradients = take(size_t(block_rows_ * b.ld));
          b.inputs = shared;
          if (needs_weight(i) && !shared) b.inputs = take(size_t(block_rows_ * whole_panels(l.K)));
          if (call_.group) shared = b.inputs;
          const ProductGradient &up = gradient(i).up, &gate = gradient(i).gate;
          const size_t N = size_t(whole_panels(l.N));
          b.up_bias = up.bias ? take(N) : nullptr;
          b.gate_bias = gate.bias ? take(N) : nullptr;
          const bool sums = blocks_ > 1 && !kSumsInPlace;
          b.up_sums = sums && up.weight ? take(extent_of(l, up)) : static_cast<C*>(nullptr);
          b.gate_sums = sums && gate.weight ? take(extent_of(l, gate)) : static_cast<C*>(nullptr);
        }
      if (round == 0) base = block_arena.get<C>(used);
    }
  }

  // ---- work ----
  // A part of a phase: `units` of one kind for one layer, which take one core so many microseconds.
  enum class Kind { gradients, inputs, outputs_again, input_gradient, up_weight, gate_weight };
  struct Task {
    Kind kind;
    int index;  // of a layer; of a stage for input_gradient
    int64_t units;
    double micros;
    int64_t pieces;
  };
  using Tasks = std::vector<Task>;

  void add_weights(Tasks& tasks, int s, int64_t M) const {
    for (int i = first_layer(s); i < last_layer(s); ++i) {
      const Layer& l = call_.layers[i];
      for (const Kind kind : {Kind::up_weight, Kind::gate_weight}) {
        const ProductGradient& g = product_gradient(kind, i);
        if (!g.weight) continue;
        const double size = double(l.N) * double(l.K);
        tasks.push_back({kind, i, WeightGradient<T>::tiles_of(swapped(g) ? l.K : l.N),
                         phase_micros(2 * size * double(M), size * sizeof(T)), 1});
      }
    }
  }
  void add_input(Tasks& tasks, int s, int64_t M) const {
    if (!needs_input(s)) return;
    double size = 0;
    for (int i = first_layer(s); i < last_layer(s); ++i)
      size +=
          double(call_.layers[i].N) * double(call_.layers[i].K) * (call_.layers[i].gated ? 2 : 1);
    tasks.push_back({Kind::input_gradient, s, whole_panels(call_.layers[first_layer(s)].K) / P,
                     phase_micros(2 * size * double(M), size * sizeof(T)), 1});
  }
  Tasks preparation(int64_t M) const {
    Tasks tasks;
    const int s = stages_ - 1;
    const auto copying = [&](int64_t columns) {
      return phase_micros(0, 3.0 * double(columns) * double(M) * sizeof(C));
    };
    for (int i = first_layer(s); i < last_layer(s); ++i)
      tasks.push_back(
          {Kind::gradients, i, whole_panels(call_.layers[i].N) / P, copying(call_.layers[i].N), 1});
    for (int i = first_layer(0); i < last_layer(0); ++i)
      if (lowest_ == 0 && needs_weight(i)) {
        tasks.push_back({Kind::inputs, i, whole_panels(K_) / P, copying(K_), 1});
        break;  // the layers of a group share it
      }
    if (lowest_ > 0 && needs_weight(lowest_)) {
      const int64_t K = call_.layers[lowest_].K;
      tasks.push_back({Kind::outputs_again, lowest_ - 1, whole_panels(K) / P, copying(K), 1});
    }
    return tasks;
  }

  void work(const Team& team) {
    PhaseCursor phases(team, tickets_);
    for_blocks(rows_, block_rows_, [&](Range block, int64_t index) {
      const int64_t M = block.size();
      if (index > 0) team.wait_for_all();
      run_phase(phases, team, preparation(M), block, index);
      for (int s = stages_ - 1; s >= lowest_; --s) {
        Tasks tasks;
        add_input(tasks, s, M);
        if (s + 1 < stages_) add_weights(tasks, s + 1, M);
        if (s == lowest_) add_weights(tasks, s, M);
        if (tasks.empty()) continue;
        team.wait_for_all();
        run_phase(phases, team, std::move(tasks), block, index);
      }
    });
  }

  void run_phase(PhaseCursor& phases, const Team& team, Tasks tasks, Range block, int64_t index) {
    double micros = 0;
    for (const Task& task : tasks) micros += task.micros;
    const bool drawn = team.size > 1 && micros > 2 * kPieceMicros * team.size;
    if (!drawn) {
      team.attempt([&] {
        for (const Task& task : tasks)
          run_task(task, share(task.units, team.thread, team.size), block, index);
      });
      return;
    }
    const double piece = std::max(kPieceMicros, micros / double(kPiecesPerThread * team.size));
    int64_t pieces = 0;
    for (Task& task : tasks) {
      task.pieces = std::clamp<int64_t>(int64_t(task.micros / piece + 0.5), 1, task.units);
      pieces += task.pieces;
    }
    phases.draw(pieces, [&](int64_t p) {
      const Task* task = tasks.data();
      for (; p >= task->pieces; ++task) p -= task->pieces;
      run_task(*task, share(task->units, p, task->pieces), block, index);
    });
  }

  void run_task(const Task& task, Range units, Range block, int64_t index) {
    if (units.size() <= 0) return;
    switch (task.kind) {
      case Kind::gradients:
        return prepare_gradients(task.index, units, block, index);
      case Kind::inputs:
        return copy_inputs(buffers_[size_t(task.index)].inputs, units, block);
      case Kind::outputs_again:
        return outputs_again(task.index, units, block);
      case Kind::input_gradient:
        return input_gradient(task.index, units, block, index);
      default:
        return weight_gradient(task.kind, task.index, units, block.size(), index);
    }
  }

  // ---- the gradient of pre-activations ----
  PreActivationGradients<C> target(int i, int64_t index) const {
    const LayerBuffers& b = buffers_[size_t(i)];
    // The output of a layer is the input of the next one.
    C* outputs = !call_.group && i + 1 < call_.count ? buffers_[size_t(i) + 1].inputs : nullptr;
    return {b.gradients, b.ld, b.up, outputs, b.up_bias, b.gate_bias, index == 0};
  }
  void prepare_gradients(int i, Range panels, Range block, int64_t index) {
    const Layer& l = call_.layers[i];
    const auto finish = gradient_finish_for<T, T>(l);
    const TrainingRows<T> kept(call_.training[i], l.N, block.begin);
    const T* from = static_cast<const T*>(call_.grad_y[call_.group ? i : 0]) + block.begin * l.N;
    for (int64_t p = panels.begin; p < panels.end; ++p)
      finish(from + p * P, l.N, block.size(), p * P, l, kept, target(i, index));
    finish_bias(i, panels, index);
  }
  void finish_bias(int i, Range panels, int64_t index) const {
    if (index + 1 < blocks_) return;
    const Range columns{panels.begin * P, std::min(panels.end * P, call_.layers[i].N)};
    write_bias(buffers_[size_t(i)].up_bias, gradient(i).up, columns);
    write_bias(buffers_[size_t(i)].gate_bias, gradient(i).gate, columns);
  }
  static void write_bias(const C* sums, const ProductGradient& to, Range columns) {
    if (!sums) return;
    T* bias = static_cast<T*>(to.bias);
    constexpr int L = kLanes<C>;
    for (int64_t n = columns.begin; n < columns.end; n += L) {
      T element[L];
      store(element, load(sums + n));
      for (int64_t j = 0; j < std::min<int64_t>(L, columns.end - n); ++j)
        bias[(n + j) * to.bias_stride] = element[j];
    }
  }

  void copy_inputs(C* to, Range panels, Range block) const {
    const int64_t M = block.size();
    constexpr int L = kLanes<C>;
    for (int64_t p = panels.begin; p < panels.end; ++p)
      for (int64_t m = 0; m < M; ++m)
        for (int h = 0; h < 2; ++h) {
          const int64_t k = p * P + h * L;
          const T* from = static_cast<const T*>(call_.x) + (block.begin + m) * call_.ldx + k;
          store(to + (p * M + m) * P + h * L, k + L <= K_ ? load(from)
                                              : k < K_    ? load_first(from, K_ - k)
                                                          : Vec<C>{});
        }
  }

  void outputs_again(int i, Range panels, Range block) const {
    const Layer& l = call_.layers[i];
    const TrainingRows<T> kept(call_.training[i], l.N, block.begin);
    for (int64_t p = panels.begin; p < panels.end; ++p)
      outputs_again_for<T>(l)(block.size(), p * P, l, kept, buffers_[size_t(i) + 1].inputs);
  }

  // ---- products ----
  void input_gradient(int s, Range panels, Range block, int64_t index) {
    std::vector<typename InputGradient<T>::Part> parts;
    for (int i = first_layer(s); i < last_layer(s); ++i) {
      const Layer& l = call_.layers[i];
      const LayerBuffers& b = buffers_[size_t(i)];
      if (l.gated) parts.push_back(InputGradient<T>::part(b.gradients, b.ld, l.gate, l.N, l.K));
      parts.push_back(InputGradient<T>::part(b.gradients + b.up, b.ld, l.up, l.N, l.K));
    }
    const InputGradient<T> product{parts.data(), int(parts.size())};
    const int64_t M = block.size();
    if (s == 0) {
      product.run(M, panels, [&](const C* tile, int64_t ldt, int64_t p) {
        write_input_gradient(tile, ldt, p, block);
      });
      return;
    }
    const int before = s - 1;
    const Layer& l = call_.layers[before];
    const auto finish = gradient_finish_for<T, C>(l);
    const TrainingRows<T> kept(call_.training[before], l.N, block.begin);
    product.run(M, panels, [&](const C* tile, int64_t ldt, int64_t p) {
      finish(tile, ldt, M, p * P, l, kept, target(before, index));
    });
    finish_bias(before, panels, index);
  }
  void write_input_gradient(const C* tile, int64_t ldt, int64_t p, Range block) const {
    constexpr int L = kLanes<C>;
    for (int64_t m = 0; m < block.size(); ++m)
      for (int h = 0; h < 2; ++h) {
        const int64_t k = p * P + h * L, valid = K_ - k;
        if (valid <= 0) break;
        T* to = static_cast<T*>(call_.grad_x) + (block.begin + m) * K_ + k;
        const Vec<C> value = load(tile + m * ldt + h * L);
        if (valid >= L)
          store(to, value);
        else
          store_first(to, value, valid);
      }
  }

  const ProductGradient& product_gradient(Kind kind, int i) const {
    return kind == Kind::gate_weight ? gradient(i).gate : gradient(i).up;
  }
  static bool swapped(const ProductGradient& g) { return g.stride_k != 1; }

  void weight_gradient(Kind kind, int i, Range tiles, int64_t M, int64_t index) const {
    const Layer& l = call_.layers[i];
    const LayerBuffers& b = buffers_[size_t(i)];
    const bool gate = kind == Kind::gate_weight;
    const ProductGradient& g = product_gradient(kind, i);
    const Values<C> outputs{b.gradients + (gate ? 0 : b.up), b.ld, M}, inputs{b.inputs, 0, M};
    T* out = static_cast<T*>(g.weight);
    C* sums = gate ? b.gate_sums : b.up_sums;
    if constexpr (kSumsInPlace) sums = out;
    const bool first = index == 0, last = index + 1 == blocks_;
    const WeightGradient<T> product =
        swapped(g) ? WeightGradient<T>{inputs,     outputs,    l.K,  l.N,   out,
                                       g.stride_k, g.stride_n, sums, first, last}
                   : WeightGradient<T>{outputs,    inputs,     l.N,  l.K,   out,
                                       g.stride_n, g.stride_k, sums, first, last};
    product.run(tiles);
  }

  const BackwardCall& call_;
  const Range rows_;
  const LayerGradient* const gradients_;
  const int stages_;
  const int64_t K_;
  int lowest_ = 0;  // the first stage that anything is needed of
  int threads_ = 1;
  int64_t block_rows_ = 0, blocks_ = 0;
  std::vector<LayerBuffers> buffers_;
  Tickets tickets_{0};
};

}  // namespace
