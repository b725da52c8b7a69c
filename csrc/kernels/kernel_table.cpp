// A whole chain, or a group, in one call: compiled once per instruction set.
//
// Work is cut in one of two ways:
//   rows     every thread takes its rows through all layers alone. For weights that fit in each core's
//            L2, and rows enough for all.
//   columns  the panels of a layer are cut into pieces that the threads draw one after the other, for all
//            rows of a block, then they wait for each other. Each weight is read once, by one core.
// Either way a block of rows goes from input to output before the next begins, so the hidden values of at
// most kBlockRows rows exist at a time, and each output is the same sum in the same order: the thread
// count does not change a bit of the result.
#include <atomic>

#include "kernel_api.h"
#include "layer_work.h"
#include "machine_probes.h"
#include "team.h"

#define TW_NAME(a, b) a##b
#define TW_ENTRY(isa) TW_NAME(torchweld_kernels_, isa)
#define TW_STRING2(s) #s
#define TW_STRING(s) TW_STRING2(s)

namespace {

using torchweld::Call;
using torchweld::DType;
using torchweld::Kernels;
using torchweld::Run;
using torchweld::Team;

constexpr int64_t kBlockRows = 192;
// A piece of a layer that a thread draws: this long at least, so many for each thread at most. On a machine
// whose cores are not equally free, 1 to 8 % faster than equal shares at 64 to 512 rows, on a quiet one
// as fast (Zen 3, 2 threads); 4 or 16 pieces gained less. Pieces of 20 us cost 3 to 6 % at 8 and 16 rows of
// 768 -> 768.
constexpr double kPieceMicros = 60;
constexpr int64_t kPiecesPerThread = 8;
// What a core does in a microsecond, roughly: where arithmetic, and where memory is the limit.
constexpr double kFlopsPerMicro = 1e5, kBytesPerMicro = 2e4;

// A chain is a sequence of stages with one layer each; a group is one stage with many, which read the
// same input.
template <class T>
class Runner {
  using C = compute_t<T>;

 public:
  Runner(const Call& call, bool group) : call_(call), group_(group) {
    stages_ = group ? 1 : call.count;
    double weights = 0;
    for (int i = 0; i < call.count; ++i) {
      const Layer& l = call.layers[i];
      weights += elements_of(l);
      if (!group && i + 1 < call.count) hidden_ld_ = std::max(hidden_ld_, padded_ld<C>(l.N));
    }
    flops_ = 2.0 * weights * double(call.M);
    weight_bytes_ = weights * sizeof(T);
    K_ = call.layers[0].K;
    const int64_t L = kLanes<C>;
    // x is used where it lies if it is in the compute type, its rows do not fall into one cache set, and
    // no kernel will read beyond its end.
    const bool aliased = call.ldx * sizeof(C) % 2048 == 0 && call.M > 4;
    in_place_ = sizeof(T) == sizeof(C) && !aliased && K_ % L == 0;
  }

  void run(Run& run) {
    int threads = call_.threads;
    if (small()) threads = 1;
    by_rows_ = threads > 1 && weight_bytes_ < 0.75 * double(torchweld::l2_bytes()) &&
               call_.M >= 4 * threads;
    block_ = by_rows_ || threads == 1 ? block_rows_alone() : kBlockRows;
    if (threads > 1 && !by_rows_) allocate(shared_arena);
    int granted = 1;
    if (threads == 1) {
      work_alone({0, call_.M});
    } else {
      granted = on_team(threads, [this](Team& team, int t, int n) {
        if (by_rows_)
          work_alone(share(call_.M, t, n));
        else
          work_together(team, t, n);
      });
    }
    run.threads = granted;
    run.partition = threads == 1 ? "single" : by_rows_ ? "rows" : "columns";
    const Source source = source_of<T>(call_.layers[0], call_.M);
    run.weights = source == Source::packed     ? "packed"
                  : source == Source::repacked ? "repacked"
                                               : "natural";
  }

 private:
  // A second thread costs about 1 us when it spins and 7 when it sleeps.
  bool small() const { return flops_ < 6e5 && weight_bytes_ < 256 << 10; }

  // Input and hidden values of a block in half of L2.
  int64_t block_rows_alone() const {
    const int64_t row_bytes = int64_t(sizeof(C)) * (padded_ld<C>(K_) + 2 * hidden_ld_);
    return std::clamp<int64_t>(torchweld::l2_bytes() / 2 / row_bytes, 2 * kMaxRows, kBlockRows);
  }

  struct Buffers {
    C *x, *hidden[2];
  } buffers_{};

  void allocate(Arena& arena) { buffers_ = carve(arena); }
  Buffers carve(Arena& arena) const {
    const int64_t rows = std::min(block_, call_.M);
    const size_t x = in_place_ ? 0 : size_t(rows * padded_ld<C>(K_)), h = size_t(rows * hidden_ld_);
    C* base = arena.get<C>(x + 2 * h);
    return {base, {base + x, base + x + h}};
  }

  void stage_rows(Range rows, int64_t block_begin, C* to) const {
    const int64_t ld = padded_ld<C>(K_), L = kLanes<C>;
    for (int64_t m = rows.begin; m < rows.end; ++m) {
      const T* from = static_cast<const T*>(call_.x) + m * call_.ldx;
      C* row = to + (m - block_begin) * ld;
      int64_t k = 0;
      for (; k + L <= K_; k += L) store(row + k, load(from + k));
      if (k < K_) store(row + k, load_first(from + k, K_ - k));
    }
  }

  struct Input {
    const C* data;
    int64_t ld;
  };
  Input input(int64_t block_begin, const Buffers& b) const {
    if (in_place_) return {static_cast<const C*>(call_.x) + block_begin * call_.ldx, call_.ldx};
    return {b.x, padded_ld<C>(K_)};
  }

  // Members and panels [panels) of one stage, for rows of the block that begins at block_begin.
  void stage(int s, Range rows, Range panels, int64_t block_begin, const Buffers& b) const {
    const Input in = s == 0 ? input(block_begin, b) : Input{b.hidden[(s - 1) % 2], hidden_ld_};
    const int first = group_ ? 0 : s, count = group_ ? call_.count : 1;
    int64_t base = 0;
    for (int i = first; i < first + count; ++i) {
      const Layer& layer = call_.layers[i];
      const int64_t own = panel_count<C>(layer);
      const Range part{std::max<int64_t>(panels.begin - base, 0), std::min(panels.end - base, own)};
      base += own;
      if (part.size() <= 0) continue;
      const Source source = source_of<T>(layer, call_.M);
      if (s + 1 == stages_) {
        T* y = static_cast<T*>(call_.y[group_ ? i : 0]) + block_begin * layer.N;
        LayerWork<T, T>{layer, source, in.data, in.ld, {y, layer.N, false}}.run(rows, part);
      } else {
        LayerWork<T, C>{layer, source, in.data, in.ld, {b.hidden[s % 2], hidden_ld_, true}}.run(
            rows, part);
      }
    }
  }

  int64_t panels_of(int s) const {
    if (!group_) return panel_count<C>(call_.layers[s]);
    int64_t total = 0;
    for (int i = 0; i < call_.count; ++i) total += panel_count<C>(call_.layers[i]);
    return total;
  }

  void work_alone(Range mine) const {
    if (mine.size() <= 0) return;
    const Buffers b = carve(shared_arena);
    const int64_t blocks = (mine.size() + block_ - 1) / block_;
    for (int64_t i = 0; i < blocks; ++i) {
      const Range part = share(mine.size(), i, blocks);
      const int64_t begin = mine.begin + part.begin;
      if (!in_place_) stage_rows({begin, begin + part.size()}, begin, b.x);
      for (int s = 0; s < stages_; ++s) stage(s, {0, part.size()}, {0, panels_of(s)}, begin, b);
    }
  }

  // A thread whose part fails goes on to every wait and draws its pieces, or the others would wait for ever.
  void work_together(Team& team, int t, int n) {
    const Buffers b = buffers_;
    int64_t first_ticket = 0;
    const int64_t blocks = (call_.M + block_ - 1) / block_;
    for (int64_t i = 0; i < blocks; ++i) {
      const Range block = share(call_.M, i, blocks);
      if (!in_place_) {
        const Range mine = share(block.size(), t, n);
        stage_rows({block.begin + mine.begin, block.begin + mine.end}, block.begin, b.x);
      }
      if (!in_place_ || i > 0) wait_for_all(team);
      for (int s = 0; s < stages_; ++s) {
        if (s > 0) wait_for_all(team);
        const int64_t panels = panels_of(s), pieces = pieces_of(s, block.size(), n);
        if (pieces > n) {
          for (int64_t piece; (piece = draw() - first_ticket) < pieces;)
            attempt(team, [&] {
              stage(s, {0, block.size()}, share(panels, piece, pieces), block.begin, b);
            });
          first_ticket += pieces + n;  // each thread drew one in vain
          continue;
        }
        const int across = columns_of_grid(block.size(), panels, n), down = n / across;
        if (t < across * down)
          attempt(team, [&] {
            stage(s, share(block.size(), t / across, down), share(panels, t % across, across),
                  block.begin, b);
          });
      }
      // One stage has no barrier between its reading of b.x and the next block's writing.
      if (stages_ == 1 && !in_place_) wait_for_all(team);
    }
  }

  int64_t draw() { return tickets_.fetch_add(1, std::memory_order_relaxed); }

  // Into how many pieces a stage is cut; no more than there are threads: into equal shares.
  int64_t pieces_of(int s, int64_t M, int n) const {
    const int first = group_ ? 0 : s, count = group_ ? call_.count : 1;
    double weights = 0;
    for (int i = first; i < first + count; ++i) weights += elements_of(call_.layers[i]);
    const double micros = std::max(2.0 * weights * double(M) / kFlopsPerMicro,
                                   weights * double(sizeof(T)) / kBytesPerMicro);
    const int64_t each = std::min(int64_t(micros / kPieceMicros), panels_of(s) / 4) / n;
    return n * std::min(each, kPiecesPerThread);  // as many for each, if all are equally fast
  }

  static double elements_of(const Layer& l) {
    return double(l.K) * double(l.N) * (l.gated ? 2 : 1);
  }

  // Threads as a grid of rows x panels: the split with the least work for the busiest thread, and of
  // those the one that reads weights least often.
  static int columns_of_grid(int64_t M, int64_t panels, int threads) {
    int best = 1;
    int64_t least = INT64_MAX;
    for (int across = threads; across >= 1; --across) {
      const int64_t down = threads / across;
      const int64_t work = ((panels + across - 1) / across) * ((M + down - 1) / down);
      if (work < least) {
        least = work;
        best = across;
      }
    }
    return best;
  }

  const Call& call_;
  const bool group_;
  int stages_;
  int64_t K_, hidden_ld_ = 0, block_ = kBlockRows;
  double flops_, weight_bytes_;
  bool in_place_, by_rows_ = false;
  std::atomic<int64_t> tickets_{0};
};

template <class F>
void with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f(float{});
    case DType::bf16:
      return f(bf16{});
    case DType::f16:
      return f(fp16{});
    case DType::f64:
      return f(double{});
  }
}

void run(const Call& call, bool group, Run& run) {
  run.isa = TW_STRING(TORCHWELD_ISA);
  run.M = call.M;
  ++run.calls;
  with_type(call.dtype, [&](auto element) { Runner<decltype(element)>(call, group).run(run); });
}

const Kernels table = {
    TW_STRING(TORCHWELD_ISA),
    kLanes<float>,
    [](const Call& call, Run& r) { run(call, false, r); },
    [](const Call& call, Run& r) { run(call, true, r); },
    [](const Layer& layer, DType dtype) {
      size_t bytes = 0;
      with_type(dtype, [&](auto e) { bytes = packed_layer_bytes<decltype(e)>(layer); });
      return bytes;
    },
    [](const Layer& layer, DType dtype, void* out) {
      with_type(dtype, [&](auto e) { pack_layer<decltype(e)>(layer, out); });
    },
    [](DType dtype, int threads, double seconds) { return probe_fma(dtype, threads, seconds); },
    [](DType dtype, int threads, double seconds) { return probe_native(dtype, threads, seconds); },
    [](size_t bytes, int threads, double seconds) {
      return probe_read_gbps(bytes, threads, seconds);
    },
};

}  // namespace

extern "C" __attribute__((visibility("hidden"))) const torchweld::Kernels* TW_ENTRY(
    TORCHWELD_ISA)() {
  return &table;
}
