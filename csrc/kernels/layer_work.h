// One thread's part of one layer: how its weights are read, and the loops around the tiles.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <new>

#include "api.h"
#include "finish.h"
#include "panels.h"

namespace {

// Natural weights: dots up to here, panels made on the way beyond.
constexpr int64_t kMaxDotRows = 16;
constexpr size_t kScratchBytes = 256 << 10;  // sums of one thread while K is worked off in blocks

// Memory kept from call to call by the thread that asks: a fresh 2 MB buffer costs 500 page faults.
class Arena {
 public:
  ~Arena() { std::free(data_); }
  template <class C>
  C* get(size_t count) {
    const size_t bytes = whole_lines(count * sizeof(C));
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      data_ = std::aligned_alloc(kLine, bytes);
      if (!data_) throw std::bad_alloc();
      size_ = bytes;
    }
    return static_cast<C*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};
thread_local Arena shared_arena, sums_arena, panel_arena;

// Rows a multiple of 4 KB apart would fall into one set of the L1 cache.
template <class C>
int64_t padded_ld(int64_t columns) {
  const int64_t L = kLanes<C>;
  const int64_t ld = (columns + L - 1) / L * L;
  return ld * sizeof(C) % 2048 == 0 ? ld + 64 / int64_t(sizeof(C)) : ld;
}

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};
Range share(int64_t total, int64_t index, int64_t of) {
  return {total * index / of, total * (index + 1) / of};
}

enum class Source { packed, dots, panels_in_place, repacked };

template <class T>
Source source_of(const Layer& layer, int64_t M) {
  if (layer.packed) return Source::packed;
  if (M <= kMaxDotRows) {
    const auto rows_of_k = [&](const Product& p) {
      return p.stride_k == 1 && (p.stride_n >= layer.K || layer.N == 1);
    };
    if (rows_of_k(layer.up) && (!layer.gated || rows_of_k(layer.gate))) return Source::dots;
    const bool paired = std::is_same_v<T, bf16>;  // its panels have an order of their own
    if (!paired && !layer.gated && layer.up.stride_n == 1) return Source::panels_in_place;
  }
  return Source::repacked;
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

  void run(Range rows, Range panels) const {
    if (rows.size() <= 0 || panels.size() <= 0) return;
    if (source == Source::dots)
      run_dots(rows, panels);
    else
      run_panels(rows, panels);
  }

 private:
  static constexpr int P = kPanel<C>;

  void finish(Finish<C, D> f, const C* tile, int64_t ldt, Range rows, int64_t panel) const {
    C own[P];
    const C* bias = own;
    if (layer.packed)
      bias = packed_bias<T>(layer) + panel * P;
    else
      panel_bias<T>(layer, panel, own);
    f(tile, ldt, rows.size(), bias, layer, panel, to.data + rows.begin * to.ld, to.ld, to.padded);
  }

  // Heights of tiles differ by at most one: 8 rows as 4 + 4, not 6 + 2.
  template <class F>
  static void for_tiles(Range rows, int64_t most, F&& body) {
    const int64_t count = (rows.size() + most - 1) / most;
    for (int64_t i = 0; i < count; ++i) {
      const Range part = share(rows.size(), i, count);
      body(Range{rows.begin + part.begin, rows.begin + part.end});
    }
  }

  // Up to 128 rows of A in half of L2, in whole running sums.
  static int64_t block_of_K(int64_t M) {
    const int64_t fits =
        torchweld::l2_bytes() / 2 / (std::min<int64_t>(M, 128) * int64_t(sizeof(C)));
    return std::clamp<int64_t>(fits / kRunningSum, 1, 3) * kRunningSum;
  }

  // Panels in groups that one tile kernel takes at once: 4, 2 or 1, as long as there are so many.
  template <class F>
  static void for_groups(Range panels, int at_once, F&& body) {
    for (int64_t p = panels.begin; p < panels.end;) {
      int np = at_once;
      while (np > panels.end - p) np /= 2;
      body(p, np);
      p += np;
    }
  }

  void run_panels(Range rows, Range panels) const {
    const Finish<C, D> f = finish_for<C, D>(layer);
    const int64_t K = layer.K, M = rows.size();
    const int64_t tiles = (M + kMaxRows - 1) / kMaxRows;
    const int at_once = panels_at_once(int((M + tiles - 1) / tiles));
    // While K is worked off block by block, the sums of `chunk` panels are kept, each group's by itself
    // and close together: rows 4 KB apart would evict each other from L1 (51 against 98 GFLOP/s).
    const int64_t block_K = tiles == 1 ? K : std::min(K, block_of_K(M));
    const int64_t chunk =
        block_K == K
            ? at_once
            : std::max<int64_t>(at_once, int64_t(kScratchBytes) / (M * P * int64_t(sizeof(C))));
    C* sums = sums_arena.get<C>(size_t(M * std::min(chunk, panels.size()) * P));

    for (int64_t first = panels.begin; first < panels.end; first += chunk) {
      const Range part{first, std::min(first + chunk, panels.end)};
      for (int64_t k = 0; k < K; k += block_K) {
        const int64_t k_stop = std::min(k + block_K, K);
        for_groups(part, at_once, [&](int64_t p, int np) {
          PanelJob<T> job = block_of(p, np, k, k_stop);
          job.lda = lda;
          job.ldo = np * P;
          job.accumulate = k > 0;
          C* out = sums + (p - first) * M * P;
          int64_t index = 0;
          for_tiles(rows, kMaxRows, [&](Range tile) {
            job.A = A + tile.begin * lda + k;
            job.out = out + (tile.begin - rows.begin) * np * P;
            if (source == Source::packed) look_ahead(job, np, index++, tiles, tile.size());
            Tiles<T>::panel(int(tile.size()), np, job.ahead_step)(job);
          });
        });
      }
      for_groups(part, at_once, [&](int64_t p, int np) {
        for (int i = 0; i < np; ++i)
          finish(f, sums + (p - first) * M * P + i * P, np * P, rows, p + i);
      });
    }
  }

  // Packed panels come from L3 or memory. With several tiles, the first four fetch the next group's
  // panels while they work on these (AVX2, 64 rows of 768 -> 3072 on Zen 4: 166 -> 203 GFLOP/s), a quarter
  // each; of three tiles the first fetches half, of two each does. Whole lines at whole steps: at 12 and 16
  // rows 5 to 13 % faster than equal parts, which asked for most lines several times (Zen 3). A single
  // tile of four rows or more reads 4 KB ahead of itself (3 %); below, the hardware does better alone.
  static void look_ahead(PanelJob<T>& job, int np, int64_t index, int64_t tiles, int64_t height) {
    const int64_t quarters = tiles >= 4 ? 1 : tiles == 3 ? (index == 0 ? 2 : 1) : 2;
    const int64_t done = tiles == 3 && index > 0 ? index + 1 : index * quarters;
    job.ahead = job.ahead_step = 0;
    if (tiles == 1 && height >= 4) {
      job.ahead = 4096 / int64_t(sizeof(T));
      job.ahead_step = job.ldb;
    } else if (tiles > 1 && done < 4) {
      job.ahead_step = quarters * P / 4;
      job.ahead = np * job.next_panel + done * job.K * (P / 4);
    }
  }

  // `np` panels from p, steps k to k_stop of K.
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

  void run_dots(Range rows, Range panels) const {
    const Finish<C, D> f = finish_for<C, D>(layer);
    C* sums = sums_arena.get<C>(size_t(rows.size()) * P);
    for (int64_t p = panels.begin; p < panels.end; ++p) {
      for (int half = 0; half < 2; ++half) {
        const Column c = column_of<C>(layer, p, half);
        if (c.valid < kLanes<C>)
          for (int64_t m = 0; m < rows.size(); ++m)
            store(sums + m * P + half * kLanes<C>, Vec<C>{});
        const int64_t ldw = c.product->stride_n;
        const T* w = static_cast<const T*>(c.product->weight);
        const T* end = w + (layer.N - 1) * ldw + layer.K;
        w += c.n0 * ldw;
        for_tiles(rows, Tiles<T>::kDotRows, [&](Range tile) {
          const int height = int(tile.size()), step = Tiles<T>::dot_columns(height);
          C* out = sums + (tile.begin - rows.begin) * P + half * kLanes<C>;
          for (int64_t j = 0; j < c.valid;) {
            const bool several = j + step <= c.valid;
            Tiles<T>::dot(height, several)(A + tile.begin * lda, lda, w + j * ldw, ldw, layer.K,
                                           end, out + j, P);
            j += several ? step : 1;
          }
        });
      }
      finish(f, sums, P, rows, p);
    }
  }
};

}  // namespace
