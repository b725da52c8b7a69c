// The formulas of activations: each row of activations.inc as a function, and the parts that are
// longer than a line. They are for registers of several lanes and for single floats alike. The file
// that includes this one has declared before: TW_INLINE, lane_of, exp_v, expm1_v, log1p_v, tanh_v
// and normal_cdf_v. For CPUs that is vector_math.h, for GPUs csrc/cuda/device_activations.cuh.
#pragma once
#include "kernel_api.h"

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
  using C = lane_of<V>;
  const V u2 = (x + C(0.044715) * (x * x * x)) * C(1.5957691216057307117);
  return x / (exp_v(-u2) + C(1));
}
// tanh(log1p(e^x)) = n / (n + 2), n = e^x (e^x + 2); 1 to the last bit from x = 20 on
template <class V>
TW_INLINE V mish_v(V x) {
  using C = lane_of<V>;
  const V e = exp_v(x > C(20) ? V{} + C(20) : x), n = e * (e + C(2));
  return x * (n / (n + C(2)));
}
template <class V>
TW_INLINE V hardswish_v(V x) {
  using C = lane_of<V>;
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

// ---- derivatives ----

// 1 / (1 + e^-x) and its distance to 1, both to the last digits: e^-|x| does not overflow, and
// nothing cancels.
template <class V>
struct Logistic {
  V value, rest;
};
template <class V>
TW_INLINE Logistic<V> logistic_v(V x) {
  using C = lane_of<V>;
  const V e = exp_v(x < C(0) ? x : -x), larger = C(1) / (e + C(1)), smaller = e * larger;
  return {x < C(0) ? smaller : larger, x < C(0) ? larger : smaller};
}
// sigmoid'(x); tanh'(x) is 4 sigmoid'(2x)
template <class V>
TW_INLINE V logistic_slope_v(V x) {
  const Logistic<V> s = logistic_v(x);
  return s.value * s.rest;
}
template <class V>
TW_INLINE V silu_derivative_v(V x) {
  using C = lane_of<V>;
  const Logistic<V> s = logistic_v(x);
  return s.value * (C(1) + x * s.rest);
}
template <class V>
TW_INLINE V quick_gelu_derivative_v(V x) {
  using C = lane_of<V>;
  const Logistic<V> s = logistic_v(x * C(1.702));
  // x * 1.702 overflows next to the largest number, where the slope is 0.
  return s.value + x * (s.value * s.rest) * C(1.702);
}
template <class V>
TW_INLINE V normal_pdf_v(V x) {
  using C = lane_of<V>;
  return exp_v(x * x * C(-0.5)) * C(0.39894228040143267794);
}
// With s = sigmoid(2u), as above: s + x s (1 - s) 2u'. As in eager, NaN where x^2 overflows.
template <class V>
TW_INLINE V gelu_tanh_derivative_v(V x) {
  using C = lane_of<V>;
  const V x2 = x * x;
  const Logistic<V> s = logistic_v((x + C(0.044715) * (x2 * x)) * C(1.5957691216057307117));
  const V slope = (C(1) + C(0.134145) * x2) * C(1.5957691216057307117);
  return s.value + x * (s.value * s.rest) * slope;
}
// With t = tanh(log1p(e^x)) = n / (n + 2): t + x sigmoid(x) (1 - t^2), whose second term is
// 4 x e^x (1 + e^x) / (n + 2)^2. From x = 30 on it is too small to change t = 1.
template <class V>
TW_INLINE V mish_derivative_v(V x) {
  using C = lane_of<V>;
  const V e = exp_v(x > C(30) ? V{} + C(30) : x), n = e * (e + C(2)), r = C(1) / (n + C(2));
  const V slope = (e * r) * ((e + C(1)) * r) * C(4);
  return n * r + x * (x > C(30) ? V{} : slope);
}
template <class V>
TW_INLINE V hardswish_derivative_v(V x) {
  using C = lane_of<V>;
  const V inner = x / C(3) + C(0.5), upper = x >= C(3) ? V{} + C(1) : inner;
  return x <= C(-3) ? V{} : upper;
}
template <class V, class C>
TW_INLINE V softplus_derivative_v(V x, C beta, C threshold) {
  const V z = x * beta;
  return z > threshold ? V{} + C(1) : logistic_v(z).value;
}

template <Act act, class V, class C>
TW_INLINE V activate(V x, [[maybe_unused]] C p0, [[maybe_unused]] C p1) {
  [[maybe_unused]] const V zero{}, one = zero + C(1);
#define ACTIVATION(name, count, d0, d1, kernel, derivative, aten, gradient) \
  if constexpr (act == Act::name) return kernel;
#include "activations.inc"
#undef ACTIVATION
}

// d act(x) / dx
template <Act act, class V, class C>
TW_INLINE V activation_derivative([[maybe_unused]] V x, [[maybe_unused]] C p0,
                                  [[maybe_unused]] C p1) {
  [[maybe_unused]] const V zero{}, one = zero + C(1);
#define ACTIVATION(name, count, d0, d1, kernel, derivative, aten, gradient) \
  if constexpr (act == Act::name) return derivative;
#include "activations.inc"
#undef ACTIVATION
}

// The gradient with respect to x, from g, the gradient with respect to act(x). Where eager selects 0
// instead of multiplying by it, so does this: an Inf in g must not become NaN.
template <Act act, class V, class C>
TW_INLINE V activation_gradient(V x, V g, C p0, C p1) {
  if constexpr (act == Act::identity) return g;
  if constexpr (act == Act::relu) return x <= C(0) ? V{} : g;
  if constexpr (act == Act::relu2) return x <= C(0) ? V{} : g * (x + x);
  if constexpr (act == Act::hardswish) {
    const V inner = g * (x / C(3) + C(0.5)), upper = x >= C(3) ? g : inner;
    return x <= C(-3) ? V{} : upper;
  }
  return g * activation_derivative<act>(x, p0, p1);
}

}  // namespace
