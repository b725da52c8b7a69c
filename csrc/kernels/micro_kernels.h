// The two micro-kernels. Both write a small tile of sums in the compute type. Bias and activation
// are applied afterwards, while the tile is in L1.
//
// A *panel* is kPanel<C> neighbouring outputs, which fill 2 registers, stored [K][kPanel] (bf16
// interleaves the two, see load_pair). A gated layer's panel has one register of gate and one of
// up, so that both meet in one tile.
//
//   panel_tile  MR rows x NP panels, k outermost. A step has MR broadcasts of x, NP * 2 loads of
//               weights and MR * NP * 2 FMAs. Sums run over kRunningSum steps, and those are added
//               up in order, whatever MR, NP and the blocking of K are: a row's result has the same
//               bits in every call.
//   dot_tile    MR rows x NC outputs, which may lie far apart, straight from [N, K] weights. Each
//               sum has one register of partial sums, added up at the end.
//
// Accumulators stay in registers only if every loop over them is unrolled, also those that zero and
// store them (GCC 12: 62 against 136 GFLOP/s on Zen 3).
#pragma once
#include <algorithm>
#include <utility>

#include "vectors.h"

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

template <class C>
constexpr int kPanel = 2 * kLanes<C>;

// The tallest tile: 2 * kMaxRows accumulators leave room for two weights and one broadcast.
constexpr int kMaxRows = kRegisters == 32 ? 12 : 6;

// Few rows need several panels at once: hiding the FMA's latency of 4 cycles takes at least 8 sums
// in flight.
constexpr int panels_at_once(int rows) {
  return kRegisters == 32 ? (rows <= 3   ? 4
                             : rows <= 6 ? 2
                                         : 1)
                          : (rows == 1   ? 4
                             : rows <= 3 ? 2
                                         : 1);
}

// A single running sum over K = 3072 has three times the rounding error of MKL's blocked sums.
// Parts of 256 are on a par with MKL, and cost 1 % of the time.
constexpr int64_t kRunningSum = 256;

template <class T>
struct PanelJob {
  using C = compute_t<T>;
  const C* A;  // [rows, K]
  int64_t lda;
  const T* B;  // [K][kPanel], rows ldb apart, panels next_panel apart
  int64_t ldb, next_panel;
  int64_t K;
  C* out;  // [rows, panels * kPanel]
  int64_t ldo;
  bool accumulate;  // add to what is there
  // What to prefetch meanwhile: a line `ahead` of B, the line `apart` from that one, then both
  // ahead_step further. A turn of the loop asks for 1, 2 or kSteps lines, depending on the tile.
  int64_t ahead, apart, ahead_step;
};

// Rows that share one pointer: with tall tiles the general registers do not hold one per row.
constexpr int kRowsPerPointer = kRegisters == 32 ? 3 : 1;

// Steps of K per turn of the loop. If the core's other hyperthread is busy, half of the front end
// is left, three operations per cycle. A step has 12 FMAs and 8 loads, so each further operation
// shows. Four steps per turn instead of one are as fast on a free core of Zen 3, and reach 87
// instead of 70 GFLOP/s on a shared one. Eight are slower, two gain half. Not tried with 32
// registers.
constexpr int kSteps = kRegisters == 32 ? 1 : 4;

template <int NP, class T>
TW_INLINE void bring_near(const T* from, int64_t next_panel) {
  constexpr int kLineElements = 64 / int(sizeof(T));
  TW_UNROLL for (int p = 0; p < NP; ++p) {
    TW_UNROLL for (int e = 0; e < kPanel<compute_t<T>>; e += kLineElements) {
      __builtin_prefetch(from + p * next_panel + e);
    }
  }
}

// Step u of a turn: NP * 2 registers of weights times one element of each row.
template <int MR, int NP, class T, class C = compute_t<T>>
TW_INLINE void panel_step(Vec<C> (&sum)[MR][2 * NP], const C* const* a, int64_t lda, int u,
                          const T* B, int64_t next_panel) {
  Vec<C> w[2 * NP];
  TW_UNROLL for (int p = 0; p < NP; ++p) {
    const Pair<C> row = load_pair(B + p * next_panel);
    w[2 * p] = row.first;
    w[2 * p + 1] = row.second;
  }
  TW_UNROLL for (int i = 0; i < MR; ++i) {
    const Vec<C> x = splat(a[i / kRowsPerPointer][(i % kRowsPerPointer) * lda + u]);
    TW_UNROLL for (int v = 0; v < 2 * NP; ++v) { add_product<C>(sum[i][v], x, w[v]); }
  }
}

// kAsked: lines to prefetch per turn, 1 or an even number.
template <int MR, int NP, int kAsked, class T>
__attribute__((noinline)) void panel_tile(const PanelJob<T>& job) {
  using C = compute_t<T>;
  constexpr int L = kLanes<C>, NV = 2 * NP, R = kRowsPerPointer, kPointers = (MR + R - 1) / R;
  const int64_t lda = job.lda, ldb = job.ldb, ldo = job.ldo, next_panel = job.next_panel;
  const C* a[kPointers];
  TW_UNROLL for (int b = 0; b < kPointers; ++b) { a[b] = job.A + R * b * lda; }
  const T* B = job.B;
  const T* ahead = job.B + job.ahead;
  const int64_t apart = job.apart, ahead_step = job.ahead_step;
  bool add = job.accumulate;
  for (int64_t k = 0; k < job.K; add = true) {
    Vec<C> sum[MR][NV];
    TW_UNROLL for (int i = 0; i < MR; ++i) {
      TW_UNROLL for (int v = 0; v < NV; ++v) { sum[i][v] = Vec<C>{}; }
    }
    const int64_t stop = std::min(k + kRunningSum, job.K);
    for (; k + kSteps <= stop; k += kSteps) {
      TW_UNROLL for (int u = 0; u < kSteps; ++u) {
        constexpr int kEvery = kSteps / kAsked;
        if (u % kEvery == 0) {
          const bool second = u / kEvery % 2 == 1;
          bring_near<NP>(second ? ahead + apart : ahead, next_panel);
          if (second || kAsked == 1) ahead += ahead_step;
        }
        panel_step<MR, NP>(sum, a, lda, u, B, next_panel);
        B += ldb;
        // Otherwise GCC loads the weights of all steps first, and spills.
        asm volatile("" ::: "memory");
      }
      TW_UNROLL for (int b = 0; b < kPointers; ++b) { a[b] += kSteps; }
    }
    for (; k < stop; ++k, B += ldb) {
      panel_step<MR, NP>(sum, a, lda, 0, B, next_panel);
      TW_UNROLL for (int b = 0; b < kPointers; ++b) { ++a[b]; }
    }
    TW_UNROLL for (int i = 0; i < MR; ++i) {
      TW_UNROLL for (int v = 0; v < NV; ++v) {
        C* to = job.out + i * ldo + v * L;
        store(to, add ? load(to) + sum[i][v] : sum[i][v]);
      }
    }
  }
}

// Outputs are `ldw` apart in W and `next` apart in out. If K is not a multiple of the register's
// width, the weights' lanes beyond K are dropped; A must be readable to the end of that register,
// and finite. W is not read from `end` on.
template <int MR, int NC, class T>
__attribute__((noinline)) void dot_tile(const compute_t<T>* A, int64_t lda, const T* W, int64_t ldw,
                                        int64_t K, const T* end, compute_t<T>* out, int64_t ldo,
                                        int64_t next) {
  using C = compute_t<T>;
  constexpr int L = kLanes<C>;
  Vec<C> sum[MR][NC];
  TW_UNROLL for (int i = 0; i < MR; ++i) {
    TW_UNROLL for (int j = 0; j < NC; ++j) { sum[i][j] = Vec<C>{}; }
  }
  int64_t k = 0;
  for (; k + L <= K; k += L) {
    Vec<C> w[NC];
    TW_UNROLL for (int j = 0; j < NC; ++j) { w[j] = load(W + j * ldw + k); }
    TW_UNROLL for (int i = 0; i < MR; ++i) {
      const Vec<C> x = load(A + i * lda + k);
      TW_UNROLL for (int j = 0; j < NC; ++j) { sum[i][j] += x * w[j]; }
    }
  }
  if (k < K) {
    const Mask<C> mask = first_lanes<C>(K - k);
    Vec<C> w[NC];
    TW_UNROLL for (int j = 0; j < NC; ++j)
      w[j] = end - (W + j * ldw + k) < L ? load_first(W + j * ldw + k, K - k)
                                         : keep<C>(load(W + j * ldw + k), mask);
    TW_UNROLL for (int i = 0; i < MR; ++i) {
      const Vec<C> x = load(A + i * lda + k);
      TW_UNROLL for (int j = 0; j < NC; ++j) { sum[i][j] += x * w[j]; }
    }
  }
  TW_UNROLL for (int i = 0; i < MR; ++i) {
    TW_UNROLL for (int j = 0; j < NC; ++j) { out[i * ldo + j * next] = sum_lanes<C>(sum[i][j]); }
  }
}

template <class T>
struct TileTable {
  using C = compute_t<T>;
  using PanelTile = void (*)(const PanelJob<T>&);
  using DotTile = void (*)(const C*, int64_t, const T*, int64_t, int64_t, const T*, C*, int64_t,
                           int64_t);

  // `at_once` panels: 1, 2 or 4, at most panels_at_once(rows). `asked`: lines to prefetch per turn.
  static PanelTile panel(int rows, int at_once, int asked) {
    constexpr auto heights = std::make_integer_sequence<int, kMaxRows>{};
    return asked <= 1   ? pick<1>(rows, at_once, heights)
           : asked == 2 ? pick<std::min(kSteps, 2)>(rows, at_once, heights)
                        : pick<kSteps>(rows, at_once, heights);
  }
  template <int kAsked, int... R>
  static PanelTile pick(int rows, int at_once, std::integer_sequence<int, R...>) {
    static constexpr PanelTile one[] = {panel_tile<R + 1, 1, kAsked, T>...};
    static constexpr PanelTile two[] = {
        panel_tile<R + 1, std::min(2, panels_at_once(R + 1)), kAsked, T>...};
    static constexpr PanelTile four[] = {panel_tile<R + 1, panels_at_once(R + 1), kAsked, T>...};
    return (at_once == 1 ? one : at_once == 2 ? two : four)[rows - 1];
  }

  // Outputs at once; `near` means that the weights are in L2. One row of 768 -> 3072 from memory: 8
  // neighbours read 28 GB/s, 8 far apart 31, 4 far apart 33, 2 far apart 30. In L2, 64 -> 64 -> 64:
  // 4 are 12 % slower than 8 (Zen 3; not tried with 32 registers).
  static constexpr int kDotRows = 4;
  static constexpr int kNearDots = 8, kLowDots = kRegisters == 32 ? 8 : 4;
  static constexpr int kTallDots = kRegisters == 32 ? 4 : 3;
  static constexpr int dots_at_once(int64_t rows, bool near) {
    return rows == 1 && near ? kNearDots : rows <= 2 ? kLowDots : kTallDots;
  }
  static DotTile dot(int rows, int at_once) {
    static constexpr DotTile one[] = {dot_tile<1, 1, T>, dot_tile<2, 1, T>, dot_tile<3, 1, T>,
                                      dot_tile<4, 1, T>};
    static constexpr DotTile low[] = {dot_tile<1, kLowDots, T>, dot_tile<2, kLowDots, T>};
    static constexpr DotTile tall[] = {dot_tile<1, kTallDots, T>, dot_tile<2, kTallDots, T>,
                                       dot_tile<3, kTallDots, T>, dot_tile<4, kTallDots, T>};
    if (at_once == kNearDots && rows == 1) return dot_tile<1, kNearDots, T>;
    return (at_once == 1 ? one : at_once == kLowDots ? low : tall)[rows - 1];
  }
};

}  // namespace
