// The forward of a chain or a group in one call: what each phase computes. partition.h says how it
// is cut.
//
// A chain is a sequence of stages with one layer each; a group is one stage of several layers that
// read the same input. A stage is a phase; so is copying the input, where it cannot be used where
// it lies.
#pragma once
#include <algorithm>

#include "kernel_api.h"
#include "layer_work.h"
#include "partition.h"
#include "scratch.h"
#include "team.h"

namespace {

using torchweld::Call;
using torchweld::Run;

template <class T>
class ForwardPass {
  using C = compute_t<T>;

 public:
  ForwardPass(const Call& call, bool group)
      : call_(call), group_(group), stages_(group ? 1 : call.count), K_(call.layers[0].K) {
    double weights = 0;
    for (int i = 0; i < call.count; ++i) {
      const Layer& l = call.layers[i];
      weights += elements_of(l);
      if (!group && i + 1 < call.count) hidden_ld_ = std::max(hidden_ld_, padded_ld<C>(l.N));
    }
    // x is used where it lies if it is in the compute type, its rows do not fall into one cache
    // set, and no kernel will read beyond its end.
    const bool aliased = call.ldx * sizeof(C) % 2048 == 0 && call.M > 4;
    in_place_ = sizeof(T) == sizeof(C) && !aliased && K_ % kLanes<C> == 0;
    const int64_t row_bytes = int64_t(sizeof(C)) * (padded_ld<C>(K_) + 2 * hidden_ld_);
    partition_ = partition_of(
        {2.0 * weights * double(call.M), weights * sizeof(T), call.M, row_bytes, 2 * kMaxRows},
        call.threads);
  }

  void run(Run& run) {
    if (partition_.cut == Cut::columns) shared_ = carve();
    run.threads = on_team(partition_.threads, [this](const Team& team) {
      if (partition_.cut == Cut::columns)
        work_together(team);
      else
        work_alone(share(call_.M, team.thread, team.size));
    });
    run.partition = partition_.name();
    const Source source = source_of<T>(call_.layers[0], call_.M);
    run.weights = source == Source::packed     ? "packed"
                  : source == Source::repacked ? "repacked"
                                               : "natural";
  }

 private:
  // The buffers of one block of rows. Hidden values alternate between two of them.
  struct BlockBuffers {
    C *x, *hidden[2];
  };
  // Takes them from the calling thread's memory.
  BlockBuffers carve() const {
    const int64_t rows = std::min(partition_.block_rows, call_.M);
    const size_t x = in_place_ ? 0 : size_t(rows * padded_ld<C>(K_)), h = size_t(rows * hidden_ld_);
    C* base = block_arena.get<C>(x + 2 * h);
    return {base, {base + x, base + x + h}};
  }

  void work_alone(Range mine) const {
    if (mine.size() <= 0) return;
    const BlockBuffers b = carve();
    for_blocks(mine, partition_.block_rows, [&](Range block, int64_t) {
      if (!in_place_) copy_input(block, block.begin, b.x);
      for (int s = 0; s < stages_; ++s)
        compute_stage(s, {0, block.size()}, {0, panels_of(s)}, block.begin, b);
    });
  }

  void work_together(const Team& team) {
    PhaseCursor phases(team, tickets_);
    for_blocks({0, call_.M}, partition_.block_rows, [&](Range block, int64_t index) {
      if (!in_place_) {
        const Range mine = share(block.size(), team.thread, team.size);
        copy_input({block.begin + mine.begin, block.begin + mine.end}, block.begin, shared_.x);
      }
      if (!in_place_ || index > 0) team.wait_for_all();
      for (int s = 0; s < stages_; ++s) {
        if (s > 0) team.wait_for_all();
        phases.run(block.size(), panels_of(s), stage_micros(s, block.size()),
                   [&](Range rows, Range panels) {
                     compute_stage(s, rows, panels, block.begin, shared_);
                   });
      }
      // A single stage has no wait between its reading of the input and the next block's writing.
      if (stages_ == 1 && !in_place_) team.wait_for_all();
    });
  }

  // Rows of x, in the compute type and padded.
  void copy_input(Range rows, int64_t block_begin, C* to) const {
    const int64_t ld = padded_ld<C>(K_), L = kLanes<C>;
    for (int64_t m = rows.begin; m < rows.end; ++m) {
      const T* from = static_cast<const T*>(call_.x) + m * call_.ldx;
      C* row = to + (m - block_begin) * ld;
      int64_t k = 0;
      for (; k + L <= K_; k += L) store(row + k, load(from + k));
      if (k < K_) store(row + k, load_first(from + k, K_ - k));
    }
  }

  struct StageInput {
    const C* data;
    int64_t ld;
  };
  StageInput input_of(int s, int64_t block_begin, const BlockBuffers& b) const {
    if (s > 0) return {b.hidden[(s - 1) % 2], hidden_ld_};
    if (in_place_) return {static_cast<const C*>(call_.x) + block_begin * call_.ldx, call_.ldx};
    return {b.x, padded_ld<C>(K_)};
  }

  // These panels of a stage, counted through all of its layers, for rows of the block that begins
  // at block_begin.
  void compute_stage(int s, Range rows, Range panels, int64_t block_begin,
                     const BlockBuffers& b) const {
    const StageInput in = input_of(s, block_begin, b);
    int64_t base = 0;
    for (int i = first_layer(s); i < last_layer(s); ++i) {
      const Layer& layer = call_.layers[i];
      const int64_t own = panel_count<C>(layer);
      const Range part{std::max<int64_t>(panels.begin - base, 0), std::min(panels.end - base, own)};
      base += own;
      if (part.size() <= 0) continue;
      const Source source = source_of<T>(layer, call_.M);
      const TrainingLayer* training = call_.training ? call_.training + i : nullptr;
      if (s + 1 == stages_) {
        T* y = static_cast<T*>(call_.y[group_ ? i : 0]);
        if (y) y += block_begin * layer.N;
        const LayerWork<T, T> work{layer,    source,     in.data, in.ld, {y, layer.N, false},
                                   training, block_begin};
        work.run(rows, part);
      } else {
        const LayerWork<T, C> work{
            layer,    source,     in.data, in.ld, {b.hidden[s % 2], hidden_ld_, true},
            training, block_begin};
        work.run(rows, part);
      }
    }
  }

  // The layers of a stage are [first_layer, last_layer).
  int first_layer(int s) const { return group_ ? 0 : s; }
  int last_layer(int s) const { return group_ ? call_.count : s + 1; }

  int64_t panels_of(int s) const {
    int64_t total = 0;
    for (int i = first_layer(s); i < last_layer(s); ++i) total += panel_count<C>(call_.layers[i]);
    return total;
  }
  double stage_micros(int s, int64_t rows) const {
    double weights = 0;
    for (int i = first_layer(s); i < last_layer(s); ++i) weights += elements_of(call_.layers[i]);
    return phase_micros(2.0 * weights * double(rows), weights * double(sizeof(T)));
  }
  static double elements_of(const Layer& l) {
    return double(l.K) * double(l.N) * (l.gated ? 2 : 1);
  }

  const Call& call_;
  const bool group_;
  const int stages_;
  const int64_t K_;
  int64_t hidden_ld_ = 0;
  bool in_place_ = false;
  Partition partition_{};
  BlockBuffers shared_{};  // of all threads, where work is cut by columns
  Tickets tickets_{0};
};

}  // namespace
