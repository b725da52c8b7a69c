// Threads of the OpenMP runtime that torch loaded, so that there is never a second pool.
//
// The code calls libgomp's entries, as g++ does for `#pragma omp`. clang would turn the pragma into
// calls of a runtime that torch on Linux does not have; libomp has these entries too.
#pragma once
#include <type_traits>

namespace torchweld {

struct TeamState;  // what the threads of one team share, in team.cpp

// What a thread's body gets: its number, the size of its team, and the means to meet the others.
//
// An exception must not skip a wait, or the other threads would wait forever. So a body runs
// everything that may throw between two waits through `attempt`: it keeps the team's first
// exception, which on_team throws again when all threads are done. After a failure no thread of the
// team attempts anything more.
struct Team {
  const int thread, size;  // the caller of on_team is thread 0
  TeamState* const state;  // null if OpenMP was not asked for threads

  void wait_for_all() const;
  bool has_failed() const;               // some thread of the team
  void keep_exception() const noexcept;  // inside a catch

  template <class F>
  void attempt(F&& part) const {
    if (size == 1) return part();
    if (has_failed()) return;
    try {
      part();
    } catch (...) {
      keep_exception();
    }
  }
};

// For on_team: runs body(context, team) on up to `threads` threads, and returns how many were
// granted.
int run_team(int threads, void (*body)(void*, const Team&), void* context);

}  // namespace torchweld

namespace {

// Runs work(team) on up to `threads` threads, and returns how many were granted. One thread is the
// caller's own, without OpenMP.
template <class F>
int on_team(int threads, F&& work) {
  using torchweld::Team;
  using Work = std::remove_reference_t<F>;
  if (threads <= 1) {
    work(Team{0, 1, nullptr});
    return 1;
  }
  return torchweld::run_team(
      threads, [](void* context, const Team& team) { (*static_cast<Work*>(context))(team); },
      const_cast<std::remove_const_t<Work>*>(&work));
}

}  // namespace
