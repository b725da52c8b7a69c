// Activations on registers: each row of activations.inc as a function, and the parts that are longer than a line.
#pragma once
#include <type_traits>

#include "kernel_api.h"
#include "vector_math.h"

namespace {

using torchweld::Act;

// V is a register of C.
template <class V>
TW_INLINE V square(V x) {
  return x * x;
}
// 0.5 (1 + tanh(u)) = 1 / (1 + e^(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3)
template <class V>
TW_INLINE V gelu_tanh_v(V x) {
  using C = std::decay_t<decltype(x[0])>;
  const V u2 = (x + C(0.044715) * (x * x * x)) * C(1.5957691216057307117);
  return x / (exp_v(-u2) + C(1));
}
// tanh(log1p(e^x)) = n / (n + 2), n = e^x (e^x + 2); 1 to the last bit from x = 20 on
template <class V>
TW_INLINE V mish_v(V x) {
  using C = std::decay_t<decltype(x[0])>;
  const V e = exp_v(x > C(20) ? V{} + C(20) : x), n = e * (e + C(2));
  return x * (n / (n + C(2)));
}
template <class V>
TW_INLINE V hardswish_v(V x) {
  using C = std::decay_t<decltype(x[0])>;
  V c = x + C(3);
  c = c < C(0) ? V{} : c;
  c = c > C(6) ? V{} + C(6) : c;
  return x * c / C(6);
}
// log(1 + e^z) = max(z, 0) + log1p(e^-|z|)
template <class V, class C>
TW_INLINE V softplus_v(V x, C beta, C threshold) {
  const V z = x * beta, a = z < C(0) ? z : -z;
  const V soft = ((z < C(0) ? V{} : z) + log1p_v(exp_v(a))) / beta;
  return z > threshold ? x : soft;
}

template <Act act, class V, class C>
TW_INLINE V activate(V x, [[maybe_unused]] C p0, [[maybe_unused]] C p1) {
  [[maybe_unused]] const V zero{};
#define ACTIVATION(name, count, d0, d1, kernel, aten, gradient) \
  if constexpr (act == Act::name) return kernel;
#include "activations.inc"
#undef ACTIVATION
}

}  // namespace
