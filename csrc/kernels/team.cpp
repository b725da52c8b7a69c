// See team.h. Compiled without any instruction set's flags: nothing here may depend on one.
#include "team.h"

#include <atomic>
#include <cstdint>
#include <exception>

extern "C" {
void GOMP_parallel(void (*body)(void*), void* context, unsigned threads, unsigned flags);
void GOMP_barrier(void);
int omp_get_thread_num(void);
int omp_get_num_threads(void);
}

namespace torchweld {

struct Team {
  void (*body)(void*, Team&, int, int);
  void* context;
  int granted = 1;
  std::atomic<bool> failed{false};
  std::exception_ptr first{};
};

namespace {

void work(void* data) {
  Team& team = *static_cast<Team*>(data);
  const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
  if (thread == 0) team.granted = threads;
  try {
    team.body(team.context, team, thread, threads);
  } catch (...) {
    keep_exception(team);
  }
}

std::atomic<size_t> limit{SIZE_MAX};

}  // namespace

int run_team(int threads, void (*body)(void*, Team&, int, int), void* context) {
  Team team{body, context};
  GOMP_parallel(work, &team, unsigned(threads), 0);
  if (team.first) std::rethrow_exception(team.first);
  return team.granted;
}

void wait_for_all(Team&) { GOMP_barrier(); }

void keep_exception(Team& team) noexcept {
  if (!team.failed.exchange(true)) team.first = std::current_exception();
}

bool has_failed(const Team& team) { return team.failed.load(std::memory_order_relaxed); }

size_t scratch_limit() { return limit.load(std::memory_order_relaxed); }
void limit_scratch(size_t bytes) { limit = bytes; }

}  // namespace torchweld
