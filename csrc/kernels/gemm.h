// The two micro-kernels. Both write a small tile of sums in the compute type; bias and activation come
// after, on the tile, while it is in L1.
//
// A *panel* is kPanel<C> = 2 registers' worth of neighbouring outputs, stored [K][kPanel] (bf16 with the
// two taking turns, see load_pair). A gated layer has one register of gate and one of up in each panel,
// so that both halves of a product meet.
//
//   panel_tile  MR rows x NP panels, k outermost: one broadcast of x, NP * 2 loads of weights, MR * NP * 2
//               FMAs a step. Sums run over kRunningSum steps, and those are added up in order, whatever
//               MR, NP and the blocking of K are: a row's result is the same bits in every call.
//   dot_tile    MR rows x NC outputs straight from [N, K] weights: a register of partial sums per
//               output, added up at the end.
//
// Accumulators stay in registers only if every loop over them is unrolled, zeroing and storing too
// (GCC 12: 62 against 136 GFLOP/s on Zen 3).
#pragma once
#include <algorithm>
#include <utility>

#include "vec.h"

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

// Few rows need several panels at once, or the FMA's latency of 4 cycles shows: 8 sums in flight at least.
constexpr int panels_at_once(int rows) {
  return kRegisters == 32 ? (rows <= 3   ? 4
                             : rows <= 6 ? 2
                                         : 1)
                          : (rows == 1   ? 4
                             : rows <= 3 ? 2
                                         : 1);
}

// One running sum over all of K = 3072 has three times the rounding error of MKL's blocked ones; summed
// in parts of 256 it is on a par, for 1 % of the time.
constexpr int64_t kRunningSum = 256;

template <class T>
struct PanelJob {
  using C = compute_t<T>;
  const C* A;  // [rows, K]
  int64_t lda;
  const T* B;  // [K][kPanel], rows ldb apart; the next panel next_panel on
  int64_t ldb, next_panel;
  int64_t K;
  C* out;  // [rows, panels * kPanel]
  int64_t ldo;
  bool accumulate;            // add to what is there
  int64_t ahead, ahead_step;  // with step k, have B + ahead + k * ahead_step brought near
};

// One pointer for every row where the general registers hold that many, else for three rows.
constexpr int kRowsPerPointer = kRegisters == 32 ? 3 : 1;

// Steps of K that a turn of the loop takes. A core whose sibling is busy has half of its front end, three
// operations a cycle, and a step of 12 FMAs has 8 loads beside them: what else a step costs shows then. Four
// steps a turn instead of one, on Zen 3: as fast on a free core, 70 -> 87 GFLOP/s on a shared one. 8 are
// slower, 2 gain half. With 32 registers it has not been tried.
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

// kTimes: in how many steps of a turn something is brought near.
template <int MR, int NP, int kTimes, class T>
__attribute__((noinline)) void panel_tile(const PanelJob<T>& job) {
  using C = compute_t<T>;
  constexpr int L = kLanes<C>, NV = 2 * NP, R = kRowsPerPointer, kPointers = (MR + R - 1) / R;
  const int64_t lda = job.lda, ldb = job.ldb, ldo = job.ldo, next_panel = job.next_panel;
  const C* a[kPointers];
  TW_UNROLL for (int b = 0; b < kPointers; ++b) { a[b] = job.A + R * b * lda; }
  const T* B = job.B;
  const T* ahead = job.B + job.ahead;
  const int64_t ahead_step = job.ahead_step;
  bool add = job.accumulate;
  for (int64_t k = 0; k < job.K; add = true) {
    Vec<C> sum[MR][NV];
    TW_UNROLL for (int i = 0; i < MR; ++i) {
      TW_UNROLL for (int v = 0; v < NV; ++v) { sum[i][v] = Vec<C>{}; }
    }
    const int64_t stop = std::min(k + kRunningSum, job.K);
    for (; k + kSteps <= stop; k += kSteps) {
      TW_UNROLL for (int u = 0; u < kSteps; ++u) {
        if (u % (kSteps / kTimes) == 0) {
          bring_near<NP>(ahead, next_panel);
          ahead += kSteps / kTimes * ahead_step;
        }
        panel_step<MR, NP>(sum, a, lda, u, B, next_panel);
        B += ldb;
        asm volatile("" ::: "memory");  // or GCC loads the weights of all steps first, and spills
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

// K counts whole registers but for the last, whose lanes beyond K are dropped from the weights. A must be
// readable to the end of that register and finite there. Nothing is read from `end` on.
template <int MR, int NC, class T>
__attribute__((noinline)) void dot_tile(const compute_t<T>* A, int64_t lda, const T* W, int64_t ldw,
                                        int64_t K, const T* end, compute_t<T>* out, int64_t ldo) {
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
    TW_UNROLL for (int j = 0; j < NC; ++j) { out[i * ldo + j] = sum_lanes<C>(sum[i][j]); }
  }
}

template <class T>
struct Tiles {
  using C = compute_t<T>;
  using Panel = void (*)(const PanelJob<T>&);
  using Dot = void (*)(const C*, int64_t, const T*, int64_t, int64_t, const T*, C*, int64_t);

  // `at_once` panels: 1, 2 or 4, at most panels_at_once(rows)
  static Panel panel(int rows, int at_once, int64_t ahead_step) {
    constexpr auto heights = std::make_integer_sequence<int, kMaxRows>{};
    const int64_t lines = kSteps * ahead_step * int64_t(sizeof(T)) / 64;  // that a turn moves on
    if (kSteps >= 2 && lines == 2) return pick<std::min(kSteps, 2)>(rows, at_once, heights);
    return lines <= 1 ? pick<1>(rows, at_once, heights) : pick<kSteps>(rows, at_once, heights);
  }
  template <int kTimes, int... R>
  static Panel pick(int rows, int at_once, std::integer_sequence<int, R...>) {
    static constexpr Panel one[] = {panel_tile<R + 1, 1, kTimes, T>...};
    static constexpr Panel two[] = {
        panel_tile<R + 1, std::min(2, panels_at_once(R + 1)), kTimes, T>...};
    static constexpr Panel four[] = {panel_tile<R + 1, panels_at_once(R + 1), kTimes, T>...};
    return (at_once == 1 ? one : at_once == 2 ? two : four)[rows - 1];
  }

  static constexpr int kDotRows = 4;
  static constexpr int dot_columns(int rows) {
    return kRegisters == 32 ? (rows <= 2 ? 8 : 4) : (rows == 1 ? 8 : rows == 2 ? 4 : 3);
  }
  static Dot dot(int rows, bool several) {
    static constexpr Dot one[] = {dot_tile<1, 1, T>, dot_tile<2, 1, T>, dot_tile<3, 1, T>,
                                  dot_tile<4, 1, T>};
    static constexpr Dot many[] = {dot_tile<1, dot_columns(1), T>, dot_tile<2, dot_columns(2), T>,
                                   dot_tile<3, dot_columns(3), T>, dot_tile<4, dot_columns(4), T>};
    return (several ? many : one)[rows - 1];
  }
};

}  // namespace
