// Peak rates of this machine: multiply-adds per second by element type, and bytes read per second
// by working-set size. Kernels are judged against these figures, so the probes use the same
// vectors, the same widening loads and the same thread team as the kernels.
//
// probe_fma        acc[r][v] = acc[r][v] * c + w[v], w loaded and widened from a buffer that is in
//                  L1; one widened vector serves kProbeRows sums, as in a register tile over rows.
// probe_native     the same multiply-adds by the CPU's own instruction for 16-bit elements, which
//                  widens inside. Our kernels do not use it. Other libraries do, whatever
//                  TORCHWELD_ISA says.
// probe_read_gbps  the sum of a buffer of `bytes`, repeatedly; each thread sums its own slice.
// All return the best of many short rounds, since noise only makes a round slower.
#pragma once
#if defined(__linux__)
#include <sys/mman.h>
#endif
#include <time.h>

#include <cstdint>
#include <new>

#include "kernel_api.h"
#include "team.h"
#include "vectors.h"

// GCC 10 and clang 9 are the first to have this header.
#if defined(__x86_64__) && defined(__has_include)
#if __has_include(<avx512bf16intrin.h>)
#include <immintrin.h>
#define TW_AVX512_BF16 1
#endif
#endif

namespace {

using torchweld::Team;

constexpr int kProbeVecs = 2;
// A multiply-add takes 4 cycles, and two to four start per cycle, so 8 to 16 must be in flight. 16
// registers hold 12 accumulators, 2 loaded vectors and the factor; 32 registers hold twice that.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kProbeRows = 12;
#else
constexpr int kProbeRows = 6;
#endif
constexpr int kProbeSteps = 64;         // 8 KiB of 64-byte vectors: inside any L1
constexpr int kProbeReadVecs = 8;       // independent sums, to hide the latency of the addition
constexpr double kRoundSeconds = 1e-3;  // far above a team's start (about 1 us), below a time slice
constexpr int kMinRounds = 5;

// Makes the compiler believe that a result is used.
template <class C>
TW_INLINE void sink(Vec<C> value) {
  asm volatile("" : : "m"(value) : "memory");
}

double seconds_now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

// Seconds that `work` takes on this thread alone: the least of three, since other load only adds.
template <class Work>
double least_seconds(const Work& work) {
  double least = 0;
  for (int i = 0; i < 3; ++i) {
    const double start = seconds_now();
    work();
    const double elapsed = seconds_now() - start;
    if (i == 0 || elapsed < least) least = elapsed;
  }
  return least;
}

// Units per second. Every thread runs `work(thread, team, passes)`; `units(team)` is what the whole
// team does in one pass. The number of passes per round is found without a team, whose start can
// take longer than a round on a busy machine.
template <class Work, class Units>
double best_rate(int threads, double seconds, const Work& work, const Units& units) {
  int64_t passes = 1;
  while (least_seconds([&] { work(0, threads, passes); }) < kRoundSeconds) passes *= 2;
  double best = 0, now = seconds_now();
  const double end = now + seconds;
  for (int round = 0; round < kMinRounds || now < end; ++round) {
    const double start = seconds_now();
    const int granted =
        on_team(threads, [&](const Team& team) { work(team.thread, team.size, passes); });
    now = seconds_now();
    const double rate = units(granted) * double(passes) / (now - start);
    if (rate > best) best = rate;
  }
  return best;
}

template <class T>
void multiply_add(const T* weights, int64_t passes) {
  using C = compute_t<T>;
  Vec<C> acc[kProbeRows][kProbeVecs];
  TW_UNROLL for (int r = 0; r < kProbeRows; ++r) {
    TW_UNROLL for (int v = 0; v < kProbeVecs; ++v)
      acc[r][v] = splat<C>(C(r + v));
  }
  Vec<C> factor = splat<C>(C(0.5));
  // Hides both values from the compiler, which would otherwise simplify the products away.
  asm volatile("" : "+m"(factor), "+r"(weights));
  for (int64_t pass = 0; pass < passes; ++pass) {
    for (int k = 0; k < kProbeSteps; ++k) {
      Vec<C> w[kProbeVecs];
      TW_UNROLL for (int v = 0; v < kProbeVecs; ++v) {
        w[v] = load(weights + (k * kProbeVecs + v) * kLanes<C>);
      }
      TW_UNROLL for (int r = 0; r < kProbeRows; ++r) {
        TW_UNROLL for (int v = 0; v < kProbeVecs; ++v)
          acc[r][v] = acc[r][v] * factor + w[v];
      }
    }
  }
  TW_UNROLL for (int r = 0; r < kProbeRows; ++r) {
    TW_UNROLL for (int v = 0; v < kProbeVecs; ++v)
      sink<C>(acc[r][v]);
  }
}

// GFLOP/s, a multiply-add counted as two.
template <class T>
double probe_fma_gflops(int threads, double seconds) {
  using C = compute_t<T>;
  constexpr int kCount = kProbeSteps * kProbeVecs * kLanes<C>;
  alignas(64) static const T weights[kCount] = {};  // zeros: sums stay finite, the time is the same
  const double flops = 2.0 * kCount * kProbeRows;
  const auto work = [&](int, int, int64_t passes) { multiply_add<T>(weights, passes); };
  return best_rate(threads, seconds, work, [&](int team) { return flops * team; }) * 1e-9;
}

double probe_fma(torchweld::DType dtype, int threads, double seconds) {
  switch (dtype) {
    case torchweld::DType::f32:
      return probe_fma_gflops<float>(threads, seconds);
    case torchweld::DType::f64:
      return probe_fma_gflops<double>(threads, seconds);
    case torchweld::DType::bf16:
      return probe_fma_gflops<bf16>(threads, seconds);
    case torchweld::DType::f16:
      return probe_fma_gflops<fp16>(threads, seconds);
  }
  return 0;
}

#if defined(TW_AVX512_BF16)
constexpr int kNativeRows = 12;  // the CPUs that have the instruction have 32 registers

bool cpu_has_bf16_dots() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bf16");
}

// acc[r][v] += a pair of products per lane. Compiled for this instruction whatever the file is
// compiled for, and called only if the CPU has it.
__attribute__((target("avx512f,avx512bf16"))) void multiply_add_pairs(const bf16* weights,
                                                                      int64_t passes) {
  __m512 acc[kNativeRows][kProbeVecs];
  TW_UNROLL for (int r = 0; r < kNativeRows; ++r) {
    TW_UNROLL for (int v = 0; v < kProbeVecs; ++v)
      acc[r][v] = _mm512_set1_ps(float(r + v));
  }
  __m512i factor = _mm512_set1_epi16(0x3f00);  // 0.5, twice in each lane
  asm volatile("" : "+m"(factor), "+r"(weights));
  for (int64_t pass = 0; pass < passes; ++pass) {
    for (int k = 0; k < kProbeSteps; ++k) {
      __m512i w[kProbeVecs];
      TW_UNROLL for (int v = 0; v < kProbeVecs; ++v) {
        w[v] = _mm512_loadu_si512(weights + (k * kProbeVecs + v) * 32);
      }
      TW_UNROLL for (int r = 0; r < kNativeRows; ++r) {
        TW_UNROLL for (int v = 0; v < kProbeVecs; ++v)
          acc[r][v] = _mm512_dpbf16_ps(acc[r][v], (__m512bh)factor, (__m512bh)w[v]);
      }
    }
  }
  TW_UNROLL for (int r = 0; r < kNativeRows; ++r) {
    TW_UNROLL for (int v = 0; v < kProbeVecs; ++v) {
      const __m512 sum = acc[r][v];  // a copy: the address of acc would keep it out of registers
      asm volatile("" : : "m"(sum) : "memory");
    }
  }
}
#endif

// GFLOP/s by the CPU's own multiply-add of this type; 0 if the CPU has none, or the compiler does
// not know it.
double probe_native(torchweld::DType dtype, int threads, double seconds) {
#if defined(TW_AVX512_BF16)
  if (dtype == torchweld::DType::bf16 && cpu_has_bf16_dots()) {
    constexpr int kCount = kProbeSteps * kProbeVecs * 32;
    alignas(64) static const bf16 weights[kCount] = {};
    const double flops = 2.0 * kCount * kNativeRows;
    const auto work = [&](int, int, int64_t passes) { multiply_add_pairs(weights, passes); };
    return best_rate(threads, seconds, work, [&](int team) { return flops * team; }) * 1e-9;
  }
#endif
  (void)dtype, (void)threads, (void)seconds;
  return 0;
}

// Memory for a working set, in huge pages if it is large and the system has them. With small pages
// the probe would also measure reading the page tables.
struct ProbeMemory {
  static constexpr size_t kHuge = 2 << 20;
  const std::align_val_t alignment;
  float* const data;
  explicit ProbeMemory(size_t bytes)
      : alignment(std::align_val_t(bytes < 2 * kHuge ? 64 : kHuge)),
        data(static_cast<float*>(::operator new(bytes, alignment))) {
#if defined(__linux__)
    if (bytes >= 2 * kHuge) madvise(data, bytes / kHuge * kHuge, MADV_HUGEPAGE);
#endif
  }
  ~ProbeMemory() { ::operator delete(data, alignment); }
};

// GB/s over a working set of `bytes`, in whole blocks. Each thread reads four streams at once; one
// does not keep the memory busy (38 against 45 GB/s on Zen 3, two threads).
double probe_read_gbps(size_t bytes, int threads, double seconds) {
  constexpr int kStreams = 4, kVecs = kProbeReadVecs / kStreams, L = kLanes<float>;
  constexpr int64_t kBlock = int64_t(kProbeReadVecs) * L;
  int64_t blocks = int64_t(bytes / sizeof(float)) / kBlock;
  if (blocks < threads) blocks = threads;
  if (blocks < 1) blocks = 1;
  const size_t size = size_t(blocks * kBlock) * sizeof(float);
  const ProbeMemory memory(size);
  float* data = memory.data;
  const auto start_of = [&](int thread, int team) { return blocks * thread / team * kBlock; };

  // Each slice is written by the thread that will read it, so that its pages are near that thread.
  on_team(threads, [&](const Team& team) {
    const int64_t stop = start_of(team.thread + 1, team.size);
    for (int64_t i = start_of(team.thread, team.size); i < stop; ++i) data[i] = 1.0f;
  });
  const auto work = [&](int thread, int team, int64_t passes) {
    const int64_t from = start_of(thread, team),
                  stream = (start_of(thread + 1, team) - from) / kStreams;
    VecF sum[kProbeReadVecs];
    TW_UNROLL for (int v = 0; v < kProbeReadVecs; ++v)
      sum[v] = VecF{};
    for (int64_t pass = 0; pass < passes; ++pass) {
      for (int64_t i = 0; i < stream; i += kVecs * L) {
        TW_UNROLL for (int v = 0; v < kProbeReadVecs; ++v) {
          sum[v] += load(data + from + v / kVecs * stream + i + v % kVecs * L);
        }
      }
      asm volatile("" : : : "memory");  // the next pass must read again
    }
    TW_UNROLL for (int v = 0; v < kProbeReadVecs; ++v)
      sink<float>(sum[v]);
  };
  const double rate = best_rate(threads, seconds, work, [&](int) { return double(size); });
  return rate * 1e-9;
}

}  // namespace
