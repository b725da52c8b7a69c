// How a call is cut between threads. Nothing here knows what is computed.
//
//   single   one thread takes everything: a second one would cost more than it saves.
//   rows     each thread takes its rows through all phases alone, without waiting. For weights that
//            fit into each core's L2, and enough rows for all.
//   columns  all threads go through the phases together, waiting for each other in between. A phase
//            is a grid of rows x columns (a layer's panels), cut into pieces that the threads draw
//            one after the other. Each weight is read once, by one core.
//
// In each case a block of at most kBlockRows rows goes through all phases before the next begins,
// so the hidden values of one block exist at a time. No sum is split between threads: the number of
// threads does not change a bit of the result.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "kernel_api.h"
#include "team.h"

namespace {

using torchweld::Team;

constexpr int64_t kBlockRows = 192;
// A piece takes at least this long, and there are at most so many per thread. On a machine whose
// cores are not equally free, pieces are 1 to 8 % faster than equal shares at 64 to 512 rows, on a
// quiet one as fast (Zen 3, 2 threads); 4 or 16 pieces gained less. Pieces of 20 us cost 3 to 6 %
// at 8 and 16 rows of 768 -> 768.
constexpr double kPieceMicros = 60;
constexpr int64_t kPiecesPerThread = 8;
// Roughly what one core does in a microsecond, limited by arithmetic or by memory.
constexpr double kFlopsPerMicro = 1e5, kBytesPerMicro = 2e4;

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};
inline Range share(int64_t total, int64_t index, int64_t of) {
  return {total * index / of, total * (index + 1) / of};
}

// Calls body(block, index) for equal blocks of at most `most` rows.
template <class F>
void for_blocks(Range rows, int64_t most, F&& body) {
  const int64_t count = (rows.size() + most - 1) / most;
  for (int64_t i = 0; i < count; ++i) {
    const Range part = share(rows.size(), i, count);
    body(Range{rows.begin + part.begin, rows.begin + part.end}, i);
  }
}

// What the choice of a cut depends on.
struct Workload {
  double flops, weight_bytes;
  int64_t M;
  int64_t row_bytes;    // input and hidden values of one row
  int64_t least_block;  // rows that a block should have at least
};

enum class Cut { single, rows, columns };

struct Partition {
  Cut cut;
  int threads;         // the most to use; OpenMP may grant fewer
  int64_t block_rows;  // at most

  const char* name() const {
    return cut == Cut::single ? "single" : cut == Cut::rows ? "rows" : "columns";
  }
};

// Whether one thread alone is as fast. A second one costs about 1 us when it spins and 7 when it
// sleeps, and every layer is a wait. 128 -> 384 -> 128, 386 KB: 8.5 us on one thread at one row,
// 10.9 on two; 771 KB: 14.9 and 10.5 (Zen 4).
inline bool is_small(double flops, double weight_bytes) {
  return flops < 6e5 && weight_bytes <= 400 << 10;
}

inline Partition partition_of(const Workload& work, int threads) {
  // A thread that works alone keeps a block's input and hidden values in half of its L2.
  const int64_t alone =
      std::clamp<int64_t>(torchweld::l2_bytes() / 2 / work.row_bytes, work.least_block, kBlockRows);
  if (threads <= 1 || is_small(work.flops, work.weight_bytes)) return {Cut::single, 1, alone};
  if (work.weight_bytes < 0.75 * double(torchweld::l2_bytes()) && work.M >= 4 * threads)
    return {Cut::rows, threads, alone};
  return {Cut::columns, threads, kBlockRows};
}

// How long one core takes for a phase, roughly.
inline double phase_micros(double flops, double bytes) {
  return std::max(flops / kFlopsPerMicro, bytes / kBytesPerMicro);
}

// Where the threads of a team draw the pieces of all phases of a call.
using Tickets = std::atomic<int64_t>;

// One thread's way through the phases of a call that is cut by columns. All threads of the team run
// the same phases in the same order; the caller waits between two phases that depend on each other.
class PhaseCursor {
 public:
  PhaseCursor(const Team& team, Tickets& tickets) : team_(team), tickets_(tickets) {}

  // Calls part(rows, columns) for this thread's parts of a phase that takes one core `micros`.
  template <class F>
  void run(int64_t rows, int64_t columns, double micros, F&& part) {
    const int64_t pieces = pieces_of(columns, micros, team_.size);
    if (pieces > team_.size)
      return draw(pieces,
                  [&](int64_t piece) { part(Range{0, rows}, share(columns, piece, pieces)); });
    const int t = team_.thread, across = columns_of_grid(rows, columns, team_.size);
    const int down = team_.size / across;
    if (t < across * down)
      team_.attempt(
          [&] { part(share(rows, t / across, down), share(columns, t % across, across)); });
  }

  // Calls part(piece) for the pieces that this thread draws. The caller waits before the next phase.
  template <class F>
  void draw(int64_t pieces, F&& part) {
    // A thread that has failed goes on drawing, so that all count the same tickets.
    for (int64_t piece; (piece = ticket() - first_) < pieces;) team_.attempt([&] { part(piece); });
    first_ += pieces + team_.size;  // each thread drew one in vain
  }

 private:
  int64_t ticket() { return tickets_.fetch_add(1, std::memory_order_relaxed); }

  // No more pieces than threads: the phase is cut into equal shares.
  static int64_t pieces_of(int64_t columns, double micros, int threads) {
    const int64_t each = std::min(int64_t(micros / kPieceMicros), columns / 4) / threads;
    return threads * std::min(each, kPiecesPerThread);  // as many for each, if all are equally fast
  }

  // Threads as a grid of rows x columns: the split with the least work for the busiest thread, and
  // of those the one that reads weights least often.
  static int columns_of_grid(int64_t rows, int64_t columns, int threads) {
    int best = 1;
    int64_t least = INT64_MAX;
    for (int across = threads; across >= 1; --across) {
      const int64_t down = threads / across;
      const int64_t work = ((columns + across - 1) / across) * ((rows + down - 1) / down);
      if (work < least) {
        least = work;
        best = across;
      }
    }
    return best;
  }

  const Team& team_;
  Tickets& tickets_;
  int64_t first_ = 0;  // ticket of the phase to come
};

}  // namespace
