// What a layer does to its pre-activations, and the backward of that, in one pass each. For
// products that are not ours: bfloat16 where the CPU multiplies it natively and torch's products
// are faster. Values are bfloat16 in memory, float32 in registers.
#pragma once
#include <algorithm>

#include "activations.h"
#include "kernel_api.h"
#include "partition.h"
#include "scratch.h"
#include "team.h"
#include "training_rows.h"

namespace {

using torchweld::PointwiseCall;

// y = act(z), or act(gate) * up; then dropout. `rows` of all columns.
template <Act act, bool gated, class T>
void pointwise_rows(const PointwiseCall& call, Range rows) {
  using C = compute_t<T>;
  using Kept = TrainingRows<T>;
  constexpr int L = kLanes<C>;
  const Kept kept(call.training, call.N, 0);
  T* y = static_cast<T*>(call.y);
  for (int64_t m = rows.begin; m < rows.end; ++m)
    for (int64_t n = 0; n < call.N; n += L) {
      const int64_t at = m * call.N + n, valid = call.N - n;
      Vec<C> value = activate<act>(Kept::get(kept.z + at, valid), C(call.p0), C(call.p1));
      if constexpr (gated) value *= Kept::get(kept.up + at, valid);
      if (kept.mask) value *= kept.factors(m, n);
      Kept::put(y + at, value, valid);
    }
}

// From the gradient of y: those of z and up, the sums of their columns, and y again. `vectors`
// counts columns by registers. Row by row: column by column took 5 times as long (128 x 3072).
template <Act act, bool gated, class T>
void pointwise_backward_columns(const PointwiseCall& call, Range vectors) {
  using C = compute_t<T>;
  using Kept = TrainingRows<T>;
  constexpr int L = kLanes<C>;
  if (vectors.size() <= 0) return;
  const Kept kept(call.training, call.N, 0);
  const C p0 = C(call.p0), p1 = C(call.p1);
  const Range columns{vectors.begin * L, std::min(vectors.end * L, call.N)};
  const int64_t width = vectors.size() * L;
  C *sums = sums_arena.get<C>(size_t(2 * width)) - columns.begin, *up_sums = sums + width;
  std::fill(sums + columns.begin, sums + columns.begin + 2 * width, C(0));
  T* y = static_cast<T*>(call.y);
  for (int64_t m = 0; m < call.M; ++m) {
    const T* grad_y = static_cast<const T*>(call.grad_y) + m * call.N;
    T* grad_z = static_cast<T*>(call.grad_z) + m * call.ld;
    for (int64_t n = columns.begin; n < columns.end; n += L) {
      const int64_t at = m * call.N + n, valid = call.N - n;
      Vec<C> g = Kept::get(grad_y + n, valid);
      Vec<C> factors{};
      if (kept.mask) g *= factors = kept.factors(m, n);
      const Vec<C> z = Kept::get(kept.z + at, valid);
      Vec<C> output = activate<act>(z, p0, p1);
      if constexpr (gated) {
        const Vec<C> up = Kept::get(kept.up + at, valid), of_up = g * output;
        Kept::put(static_cast<T*>(call.grad_up) + m * call.ld + n, of_up, valid);
        store(up_sums + n, load(up_sums + n) + of_up);
        g *= up;
        output *= up;
      }
      g = activation_gradient<act>(z, g, p0, p1);
      Kept::put(grad_z + n, g, valid);
      store(sums + n, load(sums + n) + g);
      if (!y) continue;
      if (kept.mask) output *= factors;
      Kept::put(y + at, output, valid);
    }
  }
  for (int64_t n = columns.begin; n < columns.end; n += L) {
    const int64_t valid = call.N - n;
    if (call.bias) Kept::put(static_cast<T*>(call.bias) + n, load(sums + n), valid);
    if (call.up_bias) Kept::put(static_cast<T*>(call.up_bias) + n, load(up_sums + n), valid);
  }
}

template <class T>
using PointwisePart = void (*)(const PointwiseCall&, Range);
template <class T>
PointwisePart<T> pointwise_part(const PointwiseCall& call) {
  switch (call.act) {
#define ACTIVATION(name, ...)                                              \
  case Act::name:                                                          \
    if (call.grad_y)                                                       \
      return call.gated ? pointwise_backward_columns<Act::name, true, T>   \
                        : pointwise_backward_columns<Act::name, false, T>; \
    return call.gated ? pointwise_rows<Act::name, true, T> : pointwise_rows<Act::name, false, T>;
#include "activations.inc"
#undef ACTIVATION
  }
  __builtin_unreachable();
}

template <class T>
void run_pointwise(const PointwiseCall& call) {
  constexpr int L = kLanes<compute_t<T>>;
  const int64_t units = call.grad_y ? (call.N + L - 1) / L : call.M;
  const int threads = call.M * call.N < 16384 ? 1 : call.threads;
  const auto part = pointwise_part<T>(call);
  on_team(threads, [&](const Team& team) {
    // Pieces of four registers, so that no two threads write one line.
    const int64_t step = call.grad_y ? 4 : 1, pieces = (units + step - 1) / step;
    const Range mine = share(pieces, team.thread, team.size);
    part(call, {mine.begin * step, std::min(mine.end * step, units)});
  });
}

}  // namespace
