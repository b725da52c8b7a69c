// Runs CUDA source on the host, for tests: g++ compiles the kernels with this header in place of
// CUDA's. Blocks run one after the other. The threads of a block are fibers, or, with
// -DTORCHWELD_HOST_THREADS, real threads for ThreadSanitizer. Warp collectives (mma.sync, ldmatrix)
// work on the lanes' registers in the layouts that PTX describes.
//
// Between two barriers the warps run one after the other, each up to its next block barrier, in an
// order drawn from TORCHWELD_HOST_SEED; so do the lanes of a warp up to their next collective. A
// missing barrier thus meets the worst order soon. Shared memory is as large as was asked for, and
// full of NaN before each block.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef TORCHWELD_HOST_THREADS
#include <pthread.h>

#include <thread>
#else
#include <setjmp.h>
#include <ucontext.h>
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

namespace cuda_on_host {

// What a lane brings to a collective and takes from it. `far` are addresses of shared memory.
struct Slot {
  uint32_t in[6];
  float sums[4];
  const void* far;
  uint32_t out[4];
};
// A collective: called once for a warp, when all of its lanes have come. Null: a plain barrier.
using Collective = void (*)(Slot* lanes);

struct Lane {
  dim3 thread, block;
  unsigned number = 0;
};

inline dim3 block_dim, grid_dim;
inline unsigned char* shared_memory = nullptr;
inline Slot slots[1024];
inline Collective waiting[32];

inline std::mt19937& order() {
  static std::mt19937 generator([] {
    const char* seed = std::getenv("TORCHWELD_HOST_SEED");
    return unsigned(seed ? std::atoi(seed) : 1);
  }());
  return generator;
}

#ifdef TORCHWELD_HOST_THREADS

inline thread_local Lane* me;
inline pthread_barrier_t of_block, of_warps[32];

inline void sync_block() { pthread_barrier_wait(&of_block); }
inline void meet(Collective run) {
  const unsigned warp = me->number / 32;
  if (pthread_barrier_wait(&of_warps[warp]) == PTHREAD_BARRIER_SERIAL_THREAD && run)
    run(&slots[32 * warp]);
  pthread_barrier_wait(&of_warps[warp]);
}
inline void run_block(std::vector<Lane>& lanes, const std::function<void()>& body) {
  const unsigned count = unsigned(lanes.size()), warps = count / 32;
  pthread_barrier_init(&of_block, nullptr, count);
  for (unsigned w = 0; w < warps; ++w) pthread_barrier_init(&of_warps[w], nullptr, 32);
  std::vector<std::thread> threads;
  for (Lane& lane : lanes)
    threads.emplace_back([&lane, &body] {
      me = &lane;
      body();
    });
  for (std::thread& t : threads) t.join();
}

#else

enum class State { ready, at_block, at_warp, done };
struct Fiber {
  ucontext_t start;
  jmp_buf place;
  bool begun = false;
  State state = State::ready;
  std::unique_ptr<char[]> stack;
};
inline Lane* me = nullptr;
inline Fiber fibers[1024];
inline ucontext_t scheduler;
inline jmp_buf scheduler_place;
inline const std::function<void()>* running = nullptr;
constexpr size_t kStack = 128 << 10;

// _longjmp asks nothing of the kernel, unlike swapcontext; AddressSanitizer knows the latter only.
inline void leave(State state) {
  Fiber& fiber = fibers[me->number];
  fiber.state = state;
#ifdef __SANITIZE_ADDRESS__
  swapcontext(&fiber.start, &scheduler);
#else
  if (_setjmp(fiber.place) == 0) _longjmp(scheduler_place, 1);
#endif
}
inline void enter() {
  (*running)();
  leave(State::done);
}
inline void resume(Lane& lane) {
  Fiber& fiber = fibers[lane.number];
  me = &lane;
#ifdef __SANITIZE_ADDRESS__
  swapcontext(&scheduler, &fiber.start);
#else
  if (_setjmp(scheduler_place) != 0) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  setcontext(&fiber.start);
#endif
}
inline void sync_block() { leave(State::at_block); }
inline void meet(Collective run) {
  waiting[me->number / 32] = run;
  leave(State::at_warp);
}

// Runs a warp until all of its lanes are at a block barrier or done.
inline void run_warp(std::vector<Lane>& lanes, unsigned warp) {
  unsigned lane_order[32];
  std::iota(lane_order, lane_order + 32, 32 * warp);
  for (;;) {
    std::shuffle(lane_order, lane_order + 32, order());
    unsigned at[4] = {};
    for (const unsigned i : lane_order)
      if (fibers[i].state == State::ready) resume(lanes[i]);
    for (const unsigned i : lane_order) ++at[int(fibers[i].state)];
    if (at[int(State::at_warp)] == 0) return;
    if (at[int(State::at_warp)] != 32)
      throw std::runtime_error("a warp meets without all of its lanes");
    if (waiting[warp]) waiting[warp](&slots[32 * warp]);
    for (const unsigned i : lane_order) fibers[i].state = State::ready;
  }
}
// A function of its own: getcontext may return twice, so a compiler distrusts variables around it.
[[gnu::noinline]] inline void prepare(Fiber& fiber) {
  if (!fiber.stack) fiber.stack.reset(new char[kStack]);
  fiber.begun = false;
  fiber.state = State::ready;
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = fiber.stack.get();
  fiber.start.uc_stack.ss_size = kStack;
  fiber.start.uc_link = &scheduler;
  makecontext(&fiber.start, enter, 0);
}
inline void run_block(std::vector<Lane>& lanes, const std::function<void()>& body) {
  const unsigned count = unsigned(lanes.size()), warps = count / 32;
  running = &body;
  for (unsigned i = 0; i < count; ++i) prepare(fibers[i]);
  std::vector<unsigned> warp_order(warps);
  std::iota(warp_order.begin(), warp_order.end(), 0u);
  for (;;) {
    std::shuffle(warp_order.begin(), warp_order.end(), order());
    for (const unsigned warp : warp_order) run_warp(lanes, warp);
    unsigned done = 0;
    for (unsigned i = 0; i < count; ++i) done += fibers[i].state == State::done;
    if (done == count) return;
    if (done != 0) throw std::runtime_error("a block meets without all of its threads");
    for (unsigned i = 0; i < count; ++i) fibers[i].state = State::ready;
  }
}

#endif

// TORCHWELD_HOST_WITHOUT=narrow_forward.cuh:37 takes out the barrier of this line: tests ask
// whether anything fails then.
inline bool is_taken_out(const char* file, int line) {
  static const std::string without = [] {
    const char* given = std::getenv("TORCHWELD_HOST_WITHOUT");
    return given ? std::string(given) : std::string();
  }();
  if (without.empty()) return false;
  const std::string name = std::string(file) + ":" + std::to_string(line);
  return name.size() >= without.size() &&
         name.compare(name.size() - without.size(), without.size(), without) == 0;
}
inline void barrier(const char* file, int line) {
  if (!is_taken_out(file, line)) sync_block();
}

template <class Body>
void run(dim3 grid, dim3 block, size_t shared, Body body) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  grid_dim = grid;
  block_dim = block;
  const std::unique_ptr<uint4[]> memory(new uint4[std::max<size_t>(1, (shared + 15) / 16)]);
  shared_memory = reinterpret_cast<unsigned char*>(memory.get());
  std::vector<Lane> lanes(block.x * block.y * block.z);
  if (lanes.size() % 32 || lanes.size() > 1024) throw std::runtime_error("blocks are whole warps");
  const std::function<void()> whole = body;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        std::memset(shared_memory, 0xff, shared);
        for (unsigned i = 0; i < lanes.size(); ++i)
          lanes[i] = {{i % block.x, i / block.x % block.y, i / (block.x * block.y)}, {x, y, z}, i};
        run_block(lanes, whole);
      }
}

inline float half_value(uint16_t bits) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return float(value);
}
inline uint16_t half_bits(float value) {
  const _Float16 rounded = _Float16(value);
  uint16_t bits;
  std::memcpy(&bits, &rounded, 2);
  return bits;
}
inline float bf16_value(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
inline uint16_t bf16_bits(float value) {
  uint32_t wide;
  std::memcpy(&wide, &value, 4);
  if (value != value) return 0x7fff;
  return uint16_t((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16);
}

// mma.sync m16n8k16, row times column, sums in fp32. PTX: lane = 4 g + t. A's register i has row g
// + 8 (i % 2), columns 2 t + 8 (i / 2) and the next. B's register i has rows 2 t + 8 i and the
// next, column g. The sums are of rows g and g + 8, columns 2 t and 2 t + 1.
template <float (*value)(uint16_t)>
void multiply_warp(Slot* lanes) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i)
      for (int part = 0; part < 2; ++part)
        a[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + part] =
            value(uint16_t(lanes[lane].in[i] >> (16 * part)));
    for (int i = 0; i < 2; ++i)
      for (int part = 0; part < 2; ++part)
        b[2 * t + 8 * i + part][g] = value(uint16_t(lanes[lane].in[4 + i] >> (16 * part)));
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
      float sum = lanes[lane].sums[i];
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      lanes[lane].sums[i] = sum;
    }
}

// ldmatrix: lane 8 i + r has the address of row r of matrix i, 8 values of 16 bits. A lane gets of
// matrix i row lane / 4, values 2 (lane % 4) and the next; turned, the matrix's columns are rows.
template <int matrices, bool turned>
void load_warp(Slot* lanes) {
  for (int i = 0; i < matrices; ++i) {
    uint16_t rows[8][8];
    for (int r = 0; r < 8; ++r) std::memcpy(rows[r], lanes[8 * i + r].far, 16);
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = 2 * (lane % 4);
      const uint32_t low = turned ? rows[t][g] : rows[g][t],
                     high = turned ? rows[t + 1][g] : rows[g][t + 1];
      lanes[lane].out[i] = low | high << 16;
    }
  }
}

}  // namespace cuda_on_host

#define threadIdx (cuda_on_host::me->thread)
#define blockIdx (cuda_on_host::me->block)
#define gridDim (cuda_on_host::grid_dim)
#define __syncthreads() cuda_on_host::barrier(__FILE__, __LINE__)
