// See team.h. Compiled without any instruction set's flags: nothing here may depend on one.
#include "team.h"

#include <atomic>
#include <exception>

extern "C" {
void GOMP_parallel(void (*body)(void*), void* context, unsigned threads, unsigned flags);
void GOMP_barrier(void);
int omp_get_thread_num(void);
int omp_get_num_threads(void);
}

namespace torchweld {

struct TeamState {
  void (*body)(void*, const Team&);
  void* context;
  int granted = 1;
  std::atomic<bool> failed{false};
  std::exception_ptr first{};
};

namespace {

void run_thread(void* data) {
  TeamState& state = *static_cast<TeamState*>(data);
  const Team team{omp_get_thread_num(), omp_get_num_threads(), &state};
  if (team.thread == 0) state.granted = team.size;
  try {
    state.body(state.context, team);
  } catch (...) {
    team.keep_exception();
  }
}

}  // namespace

int run_team(int threads, void (*body)(void*, const Team&), void* context) {
  TeamState state{body, context};
  GOMP_parallel(run_thread, &state, unsigned(threads), 0);
  if (state.first) std::rethrow_exception(state.first);
  return state.granted;
}

void Team::wait_for_all() const {
  if (size > 1) GOMP_barrier();
}

void Team::keep_exception() const noexcept {
  if (!state->failed.exchange(true)) state->first = std::current_exception();
}

bool Team::has_failed() const { return state && state->failed.load(std::memory_order_relaxed); }

}  // namespace torchweld
