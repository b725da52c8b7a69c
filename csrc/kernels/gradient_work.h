// The two products of a backward, for one block of rows.
//
//   InputGradient   dIn[M, K] = sum over parts of dZ[M, N] * W[N, K]. A panel is kPanel columns of
//                   W, read where they lie. Where that is impossible (bfloat16, [K, N] weights, the
//                   last columns), panels are made on the way. A gated layer has two parts, a group
//                   one or two per member.
//   WeightGradient  dW[N, K] = dZ^T[N, M] * In[M, K]. A tile takes kMaxRows columns of dZ, copied
//                   to lie side by side, and a panel of In.
//
// Weights that are [K, N] in memory swap the roles of dZ and In in the second product, so that
// gradients are always written in the order of memory.
#pragma once
#include <algorithm>

#include "layer_work.h"
#include "micro_kernels.h"
#include "weight_panels.h"

namespace {

// Steps of N at a time: each is a stream along a row of the weights, which all tiles of rows read
// before the next steps. Fewer steps keep the streams in L1, more of them load and store the sums
// less often. 16 steps were up to 20 % slower at 8 to 64 rows, and panels copied first 1.7 times as
// slow at 32 rows, as fast at 512 (768 -> 3072, Zen 4).
inline int64_t streams_of(int64_t M) { return M <= 48 ? 32 : M <= 256 ? 64 : 128; }

// ---- the gradient of a layer's input ----

template <class T>
struct InputGradient {
  using C = compute_t<T>;
  static constexpr int P = kPanel<C>;
  struct Part {
    const C* A;  // dZ [M, N]
    int64_t lda;
    Layer weights;  // W read as the weights of a layer from N to K
  };
  const Part* parts;
  int count;

  static Part part(const C* dz, int64_t ld, const Product& product, int64_t N, int64_t K) {
    Layer l;
    l.K = N;
    l.N = K;
    l.up = {product.weight, product.stride_k, product.stride_n, nullptr, 0};
    return {dz, ld, l};
  }

  // Calls finish(tile, ldt, panel) for each of these panels of dIn, with the sums of all rows.
  template <class F>
  void run(int64_t M, Range panels, F&& finish) const {
    const Tiling tiles({0, M}, kMaxRows);
    const bool in_place = can_lie();
    const int at_once = panels_at_once(int(tiles.tallest()));
    const int64_t block = in_place ? streams_of(M) : block_of_K<C>(M);
    const int64_t fit = int64_t(kScratchBytes) / (M * P * int64_t(sizeof(C)));
    const int64_t chunk = std::max<int64_t>(at_once, fit / at_once * at_once);
    C* sums = sums_arena.get<C>(size_t(M * std::min(chunk, panels.size()) * P));
    for (int64_t first = panels.begin; first < panels.end; first += chunk) {
      const Range taken{first, std::min(first + chunk, panels.end)};
      bool add = false;
      for (int i = 0; i < count; ++i) {
        const Part& part = parts[i];
        const int64_t steps = part.weights.K;
        for (int64_t k = 0; k < steps; k += block, add = true) {
          const int64_t stop = std::min(k + block, steps);
          for_panel_groups(taken, at_once, [&](int64_t p, int np) {
            PanelJob<T> job = block_of(part, p, np, k, stop, in_place);
            job.lda = part.lda;
            job.ldo = np * P;
            job.accumulate = add;
            C* out = sums + (p - first) * M * P;
            tiles.each([&](Range tile, int64_t) {
              job.A = part.A + tile.begin * part.lda + k;
              job.out = out + tile.begin * np * P;
              TileTable<T>::panel(int(tile.size()), np, 1)(job);
            });
          });
        }
      }
      for_panel_groups(taken, at_once, [&](int64_t p, int np) {
        for (int i = 0; i < np; ++i) finish(sums + (p - first) * M * P + i * P, np * P, p + i);
      });
    }
  }

 private:
  bool can_lie() const {
    if (std::is_same_v<T, bf16>) return false;  // its panels have their own order, see load_pair
    for (int i = 0; i < count; ++i)
      if (parts[i].weights.up.stride_n != 1) return false;
    return true;
  }
  static PanelJob<T> block_of(const Part& part, int64_t p, int np, int64_t k, int64_t stop,
                              bool in_place) {
    const Layer& w = part.weights;
    PanelJob<T> job{};
    job.K = stop - k;
    if (in_place && (p + np) * P <= w.N) {
      job.ldb = w.up.stride_k;
      job.next_panel = P;
      job.B = static_cast<const T*>(w.up.weight) + p * P + k * job.ldb;
      job.ahead = np * P;  // the same steps of the next panels
      job.ahead_step = kSteps * job.ldb;
      return job;
    }
    job.ldb = P;
    job.next_panel = job.K * P;
    T* own = panel_arena.get<T>(size_t(job.next_panel) * np);
    for (int i = 0; i < np; ++i) pack_panel<T>(w, p + i, k, stop, own + i * job.next_panel);
    job.B = own;
    return job;
  }
};

// ---- the gradient of a weight ----

// out[i, :] = sum over m of A[m][i] * B[m, :], for MR rows i and one panel. A's rows are MR apart.
// Prefetches the next panel, `ahead` of this one: another core may have made it. For 256 rows of
// 64 -> 256 that is 1.7 times as fast (Zen 4, 2 threads).
template <int MR, class C>
__attribute__((noinline)) void outer_tile(const C* A, const C* B, int64_t ldb, int64_t ahead,
                                          int64_t M, C* out, int64_t ldo, bool add) {
  constexpr int L = kLanes<C>;
  for (int64_t m = 0; m < M; add = true) {
    Vec<C> sum[MR][2];
    TW_UNROLL for (int i = 0; i < MR; ++i) {
      TW_UNROLL for (int v = 0; v < 2; ++v) { sum[i][v] = Vec<C>{}; }
    }
    const auto step = [&](int u) __attribute__((always_inline)) {
      const Vec<C> w[2] = {load(B), load(B + L)};
      bring_near<1>(B + ahead, 0);
      TW_UNROLL for (int i = 0; i < MR; ++i) {
        const Vec<C> a = splat(A[u * MR + i]);
        TW_UNROLL for (int v = 0; v < 2; ++v) { add_product<C>(sum[i][v], a, w[v]); }
      }
      B += ldb;
    };
    const int64_t stop = std::min(m + kRunningSum, M);
    for (; m + kSteps <= stop; m += kSteps, A += kSteps * MR) {
      TW_UNROLL for (int u = 0; u < kSteps; ++u) {
        step(u);
        asm volatile("" ::: "memory");  // as in panel_tile
      }
    }
    for (; m < stop; ++m, A += MR) step(0);
    TW_UNROLL for (int i = 0; i < MR; ++i) {
      TW_UNROLL for (int v = 0; v < 2; ++v) {
        C* to = out + i * ldo + v * L;
        store(to, add ? load(to) + sum[i][v] : sum[i][v]);
      }
    }
  }
}
template <class C>
using OuterTile = void (*)(const C*, const C*, int64_t, int64_t, int64_t, C*, int64_t, bool);
template <class C, int... R>
OuterTile<C> outer_tile_of(int rows, std::integer_sequence<int, R...>) {
  static constexpr OuterTile<C> tiles[] = {outer_tile<R + 1, C>...};
  return tiles[rows - 1];
}

// A matrix [M, columns] in the compute type: rows `ld` apart, or panels [M][kPanel].
template <class C>
struct Values {
  const C* data;
  int64_t ld;  // 0: panels
  int64_t M;

  static constexpr int P = kPanel<C>;
  const C* panel(int64_t p) const { return ld ? data + p * P : data + p * M * P; }
  int64_t step() const { return ld ? ld : P; }
  int64_t next_panel() const { return ld ? P : M * P; }
  // Columns c to c + count of all rows, side by side: to[m * count + i].
  void gather(int64_t c, int count, C* to) const {
    if (ld && count == kMaxRows) return gather_rows<kMaxRows>(data + c, to);
    for (int i = 0; i < count; ++i) {
      const C* from = ld ? data + c + i : data + (c + i) / P * (M * P) + (c + i) % P;
      for (int64_t m = 0; m < M; ++m) to[m * count + i] = from[m * step()];
    }
  }

 private:
  template <int N>
  void gather_rows(const C* from, C* to) const {
    for (int64_t m = 0; m < M; ++m, from += ld, to += N) std::copy_n(from, N, to);
  }
};

// dW[r, c] = sum over m of rows[m, r] * columns[m, c].
template <class T>
struct WeightGradient {
  using C = compute_t<T>;
  static constexpr int P = kPanel<C>;
  Values<C> rows, columns;
  int64_t R, K;  // how many of each
  T* out;
  int64_t row_stride, column_stride;
  // Sums over several blocks of rows, in the compute type and as `out` lies; null if there is one
  // block. They are `out` itself if that is in the compute type.
  C* sums;
  bool first, last;  // of the blocks

  static int64_t tiles_of(int64_t R) { return (R + kMaxRows - 1) / kMaxRows; }

  // `tiles` counts groups of kMaxRows rows.
  void run(Range tiles) const {
    // Several tiles per panel, to read panels less often, were 5 to 30 % slower: they write many
    // rows a line at a time (Zen 4).
    C* gathered = panel_arena.get<C>(size_t(rows.M * kMaxRows));
    for (int64_t t = tiles.begin; t < tiles.end; ++t) {
      rows.gather(t * kMaxRows, height(t), gathered);
      for (int64_t p = 0; p * P < K; ++p) tile(gathered, t, p);
    }
  }

 private:
  int height(int64_t tile) const { return int(std::min<int64_t>(kMaxRows, R - tile * kMaxRows)); }
  void tile(const C* gathered, int64_t index, int64_t panel) const {
    const int h = height(index);
    const int64_t r = index * kMaxRows, c = panel * P, width = std::min<int64_t>(P, K - c);
    const auto multiply = outer_tile_of<C>(h, std::make_integer_sequence<int, kMaxRows>{});
    const int64_t at = r * row_stride + c * column_stride;
    if constexpr (std::is_same_v<T, C>) {
      if (width == P && column_stride == 1)
        return multiply(gathered, columns.panel(panel), columns.step(), columns.next_panel(),
                        rows.M, out + at, row_stride, !first);
    }
    alignas(64) C own[kMaxRows * P];
    multiply(gathered, columns.panel(panel), columns.step(), columns.next_panel(), rows.M, own, P,
             false);
    for (int i = 0; i < h; ++i)
      for (int64_t j = 0; j < width; ++j) {
        const int64_t to = at + i * row_stride + j * column_stride;
        C value = own[i * P + j];
        if (!first) value += sums[to];
        own[i * P + j] = value;
        if (!last) sums[to] = value;
      }
    if (!last && !std::is_same_v<T, C>) return;
    for (int i = 0; i < h; ++i) put(own + i * P, width, out + at + i * row_stride);
  }
  void put(const C* from, int64_t width, T* to) const {
    constexpr int L = kLanes<C>;
    for (int64_t j = 0; j < width; j += L) {
      const int64_t valid = std::min<int64_t>(L, width - j);
      if (column_stride != 1) {
        T element[L];
        store(element, load(from + j));
        for (int64_t i = 0; i < valid; ++i) to[(j + i) * column_stride] = element[i];
      } else if (valid == L) {
        store(to + j, load(from + j));
      } else {
        store_first(to + j, load(from + j), valid);
      }
    }
  }
};

}  // namespace
