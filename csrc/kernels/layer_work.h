// One thread's part of one layer: how its weights are read, and the loops around the tiles.
#pragma once
#include <algorithm>

#include "kernel_api.h"
#include "partition.h"
#include "scratch.h"
#include "tile_finish.h"
#include "weight_panels.h"

namespace {

// Natural weights: up to this many rows, dot products; beyond, panels are made during the call.
constexpr int64_t kMaxDotRows = 16;
// Room for the sums of one thread, kept while it goes through K block by block.
constexpr size_t kScratchBytes = 256 << 10;

enum class Source { packed, dots, panels_in_place, repacked };

template <class T>
Source source_of(const Layer& layer, int64_t M) {
  if (layer.packed) return Source::packed;
  if (M <= kMaxDotRows) {
    const auto rows_of_k = [&](const Product& p) {
      return p.stride_k == 1 && (p.stride_n >= layer.K || layer.N == 1);
    };
    if (rows_of_k(layer.up) && (!layer.gated || rows_of_k(layer.gate))) return Source::dots;
    const bool paired = std::is_same_v<T, bf16>;  // bf16 panels have their own order, see load_pair
    if (!paired && !layer.gated && layer.up.stride_n == 1) return Source::panels_in_place;
  }
  return Source::repacked;
}

// Heights of tiles differ by at most one: 8 rows as 4 + 4, not 6 + 2.
struct Tiling {
  Range rows;
  int64_t count, least, taller;  // the first `taller` have one row more than `least`

  Tiling(Range rows, int64_t most)
      : rows(rows),
        count((rows.size() + most - 1) / most),
        least(rows.size() / count),
        taller(rows.size() % count) {}

  int64_t tallest() const { return least + (taller > 0); }

  template <class F>
  void each(F&& body) const {
    int64_t begin = rows.begin;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t end = begin + least + (i < taller);
      body(Range{begin, end}, i);
      begin = end;
    }
  }
};

// How many steps of K of up to 128 rows of A fit into half of L2, in whole running sums.
template <class C>
int64_t block_of_K(int64_t M) {
  const int64_t fits = torchweld::l2_bytes() / 2 / (std::min<int64_t>(M, 128) * int64_t(sizeof(C)));
  return std::clamp<int64_t>(fits / kRunningSum, 1, 3) * kRunningSum;
}

// Calls body(first, count) for groups of panels that one tile takes at once: at_once of them,
// and fewer at the end.
template <class F>
void for_panel_groups(Range panels, int at_once, F&& body) {
  for (int64_t p = panels.begin; p < panels.end;) {
    int np = at_once;
    while (np > panels.end - p) np /= 2;
    body(p, np);
    p += np;
  }
}

// One thread's part of one layer: rows x panels of A[rows, K] -> out.
template <class T, class D>
struct LayerWork {
  using C = compute_t<T>;
  const Layer& layer;
  Source source;
  const C* A;
  int64_t lda;
  Destination<D> to;
  const TrainingLayer* training = nullptr;
  int64_t first_row = 0;  // what row of the call A begins with

  void run(Range rows, Range panels) const {
    if (rows.size() <= 0 || panels.size() <= 0) return;
    if (source == Source::dots)
      run_dots(rows, panels);
    else
      run_panels(rows, panels);
  }

 private:
  static constexpr int P = kPanel<C>;

  void finish(Finish<T, D> f, const C* tile, int64_t ldt, Range rows, int64_t panel) const {
    C own[P];
    const C* bias = own;
    if (layer.packed)
      bias = packed_bias<T>(layer) + panel * P;
    else
      panel_bias<T>(layer, panel, own);
    D* out = to.data ? to.data + rows.begin * to.ld : nullptr;
    if (!training)
      return f(tile, ldt, rows.size(), bias, layer, panel, out, to.ld, to.padded, nullptr);
    const TrainingRows<T> kept(*training, layer.N, first_row + rows.begin);
    f(tile, ldt, rows.size(), bias, layer, panel, out, to.ld, to.padded, &kept);
  }

  // With few rows, packed weights are bound by memory, and a core reads two streams faster than one
  // (43 against 31 GB/s on two threads of Zen 3). So two panels take turns, kRunningSum steps each,
  // while the next steps of both are prefetched, a line of each in turn. That is 5 to 16 % faster
  // at 4 to 8 rows, and 7 % at 16 rows of 3072 -> 768. It costs 2 to 10 % if the weights are in L3.
  static constexpr bool kStepIsLine = P * sizeof(T) == 64;
  bool in_pairs(const Tiling& tiles) const {
    return kStepIsLine && kSteps > 1 && source == Source::packed && tiles.count <= 3 &&
           panels_at_once(int(tiles.tallest())) == 1;
  }

  void run_panels(Range rows, Range panels) const {
    const Finish<T, D> f = finish_for<T, D>(layer);
    const int64_t K = layer.K, M = rows.size();
    const Tiling tiles(rows, kMaxRows);
    const int at_once = panels_at_once(int(tiles.tallest()));
    const bool pairs = in_pairs(tiles);
    // K is split into blocks, and the sums of `chunk` panels are kept from block to block. The sums
    // of each group lie close together: rows 4 KB apart would evict each other from L1 (51 against
    // 98 GFLOP/s).
    const int64_t block_K = std::min(K, pairs              ? kRunningSum
                                        : tiles.count == 1 ? K
                                                           : block_of_K<C>(M));
    const int64_t chunk =
        pairs ? 2
        : block_K == K
            ? at_once
            : std::max<int64_t>(at_once, int64_t(kScratchBytes) / (M * P * int64_t(sizeof(C))));
    C* sums = sums_arena.get<C>(size_t(M * std::min(chunk, panels.size()) * P));

    for (int64_t first = panels.begin; first < panels.end; first += chunk) {
      const Range part{first, std::min(first + chunk, panels.end)};
      for (int64_t k = 0; k < K; k += block_K) {
        const int64_t k_stop = std::min(k + block_K, K);
        for_panel_groups(part, at_once, [&](int64_t p, int np) {
          PanelJob<T> job = block_of(p, np, k, k_stop);
          job.lda = lda;
          job.ldo = np * P;
          job.accumulate = k > 0;
          C* out = sums + (p - first) * M * P;
          tiles.each([&](Range tile, int64_t index) {
            job.A = A + tile.begin * lda + k;
            job.out = out + (tile.begin - rows.begin) * np * P;
            int asked = 0;
            if (pairs)
              asked = look_ahead_in_pair(job, p - first, k, index, tiles.count);
            else if (source == Source::packed)
              asked = look_ahead(job, np, index, tiles);
            TileTable<T>::panel(int(tile.size()), np, asked)(job);
          });
        });
      }
      for_panel_groups(part, at_once, [&](int64_t p, int np) {
        for (int i = 0; i < np; ++i)
          finish(f, sums + (p - first) * M * P + i * P, np * P, rows, p + i);
      });
    }
  }

  // Prefetches packed panels, which come from L3 or memory. With several tiles, the first four
  // prefetch a quarter of the next group's panels each (AVX2, 64 rows of 768 -> 3072 on Zen 4: 166
  // -> 203 GFLOP/s). Of three tiles the first prefetches half, of two each does. Each step asks for
  // whole lines: at 12 and 16 rows that is 5 to 13 % faster than equal parts, which asked for most
  // lines several times (Zen 3). A single tile of four rows or more reads 4 KB ahead of itself (3
  // %); with fewer rows the hardware alone does better. Returns how many lines a turn asks for.
  static int look_ahead(PanelJob<T>& job, int np, int64_t index, const Tiling& tiles) {
    const int64_t quarters = tiles.count >= 4 ? 1 : tiles.count == 3 ? (index == 0 ? 2 : 1) : 2;
    const int64_t done = tiles.count == 3 && index > 0 ? index + 1 : index * quarters;
    int64_t turn = 0;  // elements per turn of the loop
    job.ahead = 0;
    if (tiles.count == 1 && tiles.least >= 4) {
      job.ahead = 4096 / int64_t(sizeof(T));
      turn = kSteps * job.ldb;
    } else if (tiles.count > 1 && done < 4) {
      job.ahead = np * job.next_panel + done * job.K * (P / 4);
      turn = kSteps * quarters * P / 4;
    }
    const int asked = std::clamp(int(turn * int64_t(sizeof(T)) / 64), 1, kSteps);
    job.apart = turn / asked;
    job.ahead_step = asked == 1 ? turn : 2 * job.apart;
    return asked;
  }

  // The same where two panels take turns, for the panel `side`: the first two tiles of each panel
  // share the prefetching of what comes next of both.
  int look_ahead_in_pair(PanelJob<T>& job, int64_t side, int64_t k, int64_t index,
                         int64_t tiles) const {
    const int64_t asking = std::min<int64_t>(tiles, 2);
    job.ahead = job.apart = job.ahead_step = 0;
    if (index >= asking) return 0;
    const int64_t pair = -side * job.next_panel - k * P;  // where the pair begins, relative to B
    const int64_t next = k + job.K < layer.K ? pair + (k + job.K) * P : pair + 2 * job.next_panel;
    job.ahead = next + (side * asking + index) * (job.K / (2 * asking)) * P;
    job.apart = job.next_panel;
    job.ahead_step = P;
    return asking == 1 ? kSteps : 2;
  }

  // Where the weights of `np` panels from p lie, for steps k to k_stop of K.
  PanelJob<T> block_of(int64_t p, int np, int64_t k, int64_t k_stop) const {
    PanelJob<T> job{};
    job.K = k_stop - k;
    job.ldb = P;
    if (source == Source::packed) {
      job.next_panel = layer.K * P;
      job.B = static_cast<const T*>(layer.packed) + p * job.next_panel + k * P;
      return job;
    }
    if (source == Source::panels_in_place && (p + np) * P <= layer.N) {
      job.ldb = layer.up.stride_k;
      job.next_panel = P;
      job.B = static_cast<const T*>(layer.up.weight) + p * P + k * job.ldb;
      return job;
    }
    job.next_panel = job.K * P;
    T* own = panel_arena.get<T>(size_t(job.next_panel) * np);
    for (int i = 0; i < np; ++i) pack_panel<T>(layer, p + i, k, k_stop, own + i * job.next_panel);
    job.B = own;
    return job;
  }

  // Takes as many panels at a time as there is room for sums. They are split into equal parts, and
  // every tile takes one output from each part, so the weights are read in a few long streams.
  // Tiles of neighbouring outputs would read streams of one row each: from memory, long ones are
  // 1.1 to 1.3 times as fast at one row, and 1.4 to 1.6 times at 2 to 16 rows (Zen 3).
  void run_dots(Range rows, Range panels) const {
    const Finish<T, D> f = finish_for<T, D>(layer);
    const Tiling tiles(rows, TileTable<T>::kDotRows);
    const bool near = layer.K * layer.N * int64_t(sizeof(T)) < torchweld::l2_bytes() / 2;
    const int at_once = TileTable<T>::dots_at_once(tiles.tallest(), near);
    const int64_t M = rows.size(), whole = layer.N / panel_outputs<C>(layer);
    const int64_t fit = int64_t(kScratchBytes) / (M * P * int64_t(sizeof(C)));
    const int64_t chunk = std::max<int64_t>(fit / at_once, 1) * at_once;
    C* sums = sums_arena.get<C>(size_t(M * std::min(chunk, panels.size()) * P));
    for (int64_t p = panels.begin; p < panels.end;) {
      const int64_t far = (std::min({p + chunk, panels.end, whole}) - p) / at_once;
      const Range taken{p, p + std::max<int64_t>(far * at_once, 1)};
      const int64_t ldo = taken.size() * P;
      for (int half = 0; half < 2; ++half) dots_of_half(tiles, taken, half, at_once, sums, ldo);
      for (int64_t i = taken.begin; i < taken.end; ++i)
        finish(f, sums + (i - taken.begin) * P, ldo, rows, i);
      p = taken.end;
    }
  }

  // The outputs that register `half` of each of these panels holds. `panels` is a single panel,
  // which may be cut off by N, or a multiple of at_once.
  void dots_of_half(const Tiling& tiles, Range panels, int half, int at_once, C* sums,
                    int64_t ldo) const {
    const Column first = column_of<C>(layer, panels.begin, half);
    const int64_t ldw = first.product->stride_n, width = panel_outputs<C>(layer), L = kLanes<C>;
    const T* w = static_cast<const T*>(first.product->weight);
    const T* end = w + (layer.N - 1) * ldw + layer.K;
    w += first.n0 * ldw;
    sums += half * L;
    // `count` outputs from this lane of this panel on: `apart` outputs apart in the weights, `next`
    // elements in sums.
    const auto dots = [&](int64_t panel, int64_t lane, int count, int64_t apart, int64_t next) {
      tiles.each([&](Range tile, int64_t) {
        C* out = sums + (tile.begin - tiles.rows.begin) * ldo + panel * P + lane;
        TileTable<T>::dot(int(tile.size()), count)(A + tile.begin * lda, lda,
                                                   w + (panel * width + lane) * ldw, apart * ldw,
                                                   layer.K, end, out, ldo, next);
      });
    };
    if (panels.size() > 1) {
      const int64_t far = panels.size() / at_once;
      for (int64_t panel = 0; panel < far; ++panel)
        for (int64_t lane = 0; lane < L; ++lane) dots(panel, lane, at_once, far * width, far * P);
      return;
    }
    if (first.valid < L)
      for (int64_t m = 0; m < tiles.rows.size(); ++m) store(sums + m * ldo, Vec<C>{});
    for (int64_t lane = 0; lane < first.valid;) {
      const int count = lane + at_once <= first.valid ? at_once : 1;
      dots(0, lane, count, 1, 1);
      lane += count;
    }
  }
};

}  // namespace
