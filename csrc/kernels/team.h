// Threads of the OpenMP runtime that torch loaded, so that there is never a second pool.
//
// Not through `#pragma omp`: what clang makes of it calls a runtime that torch on Linux does not have, while these
// entries of libgomp serve every compiler, and libomp has them too. The code is the same that g++ makes of the pragma.
#pragma once
#include <cstddef>
#include <type_traits>

namespace torchweld {

struct Team;  // one call of run_team, in team.cpp

// Runs body(context, team, thread, threads) on up to `threads` threads, the caller being number 0; returns how
// many were granted. No exception leaves a thread: the first is kept, and thrown again here when all are done.
int run_team(int threads, void (*body)(void*, Team&, int, int), void* context);

// A thread that throws would leave the others waiting: between two waits, keep the exception instead, and go on.
void wait_for_all(Team&);
void keep_exception(Team&) noexcept;  // inside a catch
bool has_failed(const Team&);         // some thread of the team

// What a thread may allocate at once for its work; for tests of what happens when memory runs out.
size_t scratch_limit();
void limit_scratch(size_t bytes);

}  // namespace torchweld

namespace {

template <class F>
int on_team(int threads, F&& work) {
  using Work = std::remove_reference_t<F>;
  return torchweld::run_team(
      threads,
      [](void* context, torchweld::Team& team, int thread, int size) {
        (*static_cast<Work*>(context))(team, thread, size);
      },
      const_cast<std::remove_const_t<Work>*>(&work));
}

// `part`, unless some thread has failed: what it throws is kept for the end.
template <class F>
void attempt(torchweld::Team& team, F&& part) {
  if (torchweld::has_failed(team)) return;
  try {
    part();
  } catch (...) {
    torchweld::keep_exception(team);
  }
}

}  // namespace
