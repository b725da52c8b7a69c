// Chooses the instruction set: the best one that was built and that the CPU has, or the one that
// TORCHWELD_ISA names. Compiled once, without special flags. TORCHWELD_HAVE_<isa> says which
// kernels were linked in.
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernel_api.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace torchweld {

extern "C" {
const Kernels* torchweld_kernels_avx512();
const Kernels* torchweld_kernels_avx2();
const Kernels* torchweld_kernels_avx2wide();
const Kernels* torchweld_kernels_neon();
const Kernels* torchweld_kernels_baseline();
}

namespace {

#if defined(__x86_64__)
// clang 14 does not know f16c by name.
bool cpu_has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

bool cpu_has(const char* isa) {
  if (!std::strcmp(isa, "baseline")) return true;
#if defined(__x86_64__)
  if (!std::strcmp(isa, "avx2") || !std::strcmp(isa, "avx2wide"))
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpu_has_f16c();
  if (!std::strcmp(isa, "avx512"))
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
#if defined(__aarch64__)
  if (!std::strcmp(isa, "neon")) return true;
#endif
  return false;
}

struct Candidate {
  const char* name;
  const Kernels* (*table)();
};
const Candidate candidates[] = {
#ifdef TORCHWELD_HAVE_avx512
    {"avx512", torchweld_kernels_avx512},
#else
    {"avx512", nullptr},
#endif
#ifdef TORCHWELD_HAVE_avx2
    {"avx2", torchweld_kernels_avx2},
#else
    {"avx2", nullptr},
#endif
// For tests. It comes after avx2, so that it runs only if TORCHWELD_ISA names it.
#ifdef TORCHWELD_HAVE_avx2wide
    {"avx2wide", torchweld_kernels_avx2wide},
#endif
#ifdef TORCHWELD_HAVE_neon
    {"neon", torchweld_kernels_neon},
#else
    {"neon", nullptr},
#endif
#ifdef TORCHWELD_HAVE_baseline
    {"baseline", torchweld_kernels_baseline},
#else
    {"baseline", nullptr},
#endif
};

std::atomic<const Kernels*> in_use{nullptr};

const Kernels* pick(const char* wanted) {
  std::string possible;
  for (const Candidate& c : candidates) {
    if (!c.table || !cpu_has(c.name)) continue;
    if (!wanted || !std::strcmp(wanted, c.name)) return c.table();
    possible += possible.empty() ? "" : ", ";
    possible += c.name;
  }
  throw std::runtime_error(std::string("TORCHWELD_ISA=") + (wanted ? wanted : "") +
                           " cannot be used on this machine; built and supported: " +
                           (possible.empty() ? "none" : possible) +
                           ". Unset it to let torchweld choose.");
}

// glibc reads the size from the CPU; where it does not know, sysconf returns 0 or -1.
int64_t cache_bytes(int name, int64_t otherwise) {
  const long bytes = sysconf(name);
  return bytes > 0 ? bytes : otherwise;
}
#if defined(_SC_LEVEL2_CACHE_SIZE)
std::atomic<int64_t> l2{cache_bytes(_SC_LEVEL2_CACHE_SIZE, 512 << 10)};
#else
std::atomic<int64_t> l2{512 << 10};
#endif

std::atomic<bool> forked{false};
const int at_fork = pthread_atfork(nullptr, nullptr, [] { forked = true; });

}  // namespace

const Kernels& kernels() {
  const Kernels* table = in_use.load(std::memory_order_acquire);
  if (!table) {
    const char* wanted = std::getenv("TORCHWELD_ISA");
    table = pick(wanted && *wanted ? wanted : nullptr);
    in_use.store(table, std::memory_order_release);
  }
  return *table;
}

void choose_isa(const char* name) { in_use.store(pick(*name ? name : nullptr)); }

int isa_states(IsaState* out, int most) {
  int n = 0;
  for (const Candidate& c : candidates)
    if (n < most) out[n++] = {c.name, c.table != nullptr, cpu_has(c.name)};
  return n;
}

int64_t l2_bytes() { return l2.load(std::memory_order_relaxed); }
bool in_forked_child() { return forked.load(std::memory_order_relaxed); }

}  // namespace torchweld
