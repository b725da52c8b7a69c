// exp, log1p, tanh and the like on registers. fp32 functions are polynomials after range reduction,
// at most 2 ulp from the exact value (tests/core/test_activations.py goes through every exponent).
// fp64 calls libm lane by lane; it serves gradient checks. The coefficients are our own minimax
// fits, by weighted least squares in 40 digits.
#pragma once
#include <cmath>

#include "vectors.h"

namespace {

template <class V>
TW_INLINE V choose(MaskF mask, V a, V b) {
  return mask ? a : b;
}
TW_INLINE VecF magnitude(VecF x) { return as_float(as_bits(x) & 0x7fffffffu); }
TW_INLINE VecF copy_sign(VecF value, VecF sign) {
  return as_float((as_bits(value) & 0x7fffffffu) | (as_bits(sign) & 0x80000000u));
}
// A comparison with NaN is false, so NaN passes through both.
TW_INLINE VecF at_most(VecF x, float bound) { return choose(x > bound, splat(bound), x); }
TW_INLINE VecF at_least(VecF x, float bound) { return choose(x < bound, splat(bound), x); }

// x = n ln2 + r with |r| <= ln2 / 2. Adding 1.5 * 2^23 rounds to the integer n and leaves it in the
// low bits. The high part of ln2 has 9 trailing zero bits, so n * high is exact without an FMA too.
struct Reduced {
  VecF n, r;
};
TW_INLINE Reduced reduce_by_ln2(VecF x) {
  const VecF n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  return {n, (x - n * 0.693359375f) + n * 2.12194440e-4f};
}
TW_INLINE VecF power_of_two(VecF n) {
  return as_float((as_bits(n + 12582912.0f) + (127u - 0x4b400000u)) << 23);
}
// e^r - 1 - r, |r| <= 0.35, relative to e^r within 3.3e-9
TW_INLINE VecF exp_tail(VecF r) {
  VecF p = r * 0.001381308897f + 0.008369423825f;
  p = p * r + 0.04166845796f;
  p = p * r + 0.1666651474f;
  p = p * r + 0.4999999304f;
  return p * (r * r);
}
TW_INLINE VecF exp_v(VecF x) {
  const Reduced z = reduce_by_ln2(at_least(at_most(x, 89.0f), -104.0f));
  const VecF value = (exp_tail(z.r) + z.r) + 1.0f;
  // 2^n in two factors: n reaches 128 (Inf) and -150 (denormals, zero)
  const VecF half = (z.n * 0.5f + 12582912.0f) - 12582912.0f;
  return value * power_of_two(half) * power_of_two(z.n - half);
}
// x <= 0 only
TW_INLINE VecF expm1_v(VecF x) {
  const Reduced z = reduce_by_ln2(at_least(x, -30.0f));
  const VecF scale = power_of_two(z.n);
  return scale * (exp_tail(z.r) + z.r) + (scale - 1.0f);
}
// 0 <= u <= 1: log1p(u) = 2 atanh(s), s = u / (2 + u)
TW_INLINE VecF log1p_v(VecF u) {
  const VecF s = u / (u + 2.0f), q = s * s;
  VecF p = q * 0.2802461388f + 0.2799910269f;
  p = p * q + 0.4002170207f;
  p = p * q + 0.6666641306f;
  return (p * q) * s + 2.0f * s;
}
TW_INLINE VecF tanh_v(VecF x) {
  const VecF a = magnitude(x), s = x * x;
  VecF p = s * -0.005603703192f + 0.02055150321f;
  p = p * s + -0.05371403008f;
  p = p * s + 0.133311517f;
  p = p * s + -0.3333327203f;
  const VecF small = (p * s) * x + x;
  const VecF large = 1.0f - 2.0f / (exp_v(a + a) + 1.0f);
  return choose(a < 0.625f, small, copy_sign(large, x));
}
// The normal distribution function, (1 + erf(x / sqrt 2)) / 2, by which gelu multiplies. For x < 0
// it is 2^(u - 1), where u(|x|) is a polynomial without constant term; for x > 0 it is 1 minus
// that. Beyond 5.6 it is 0 or 1 to the last bit of a float. It is within 2 ulp for x > 0; for x < 0
// it keeps digits that 1 + erf loses. It takes a third less time than erf in two branches (Zen 4,
// 64 rows of 64 -> 256: 6.5 against 9.4 us).
TW_INLINE VecF normal_cdf_v(VecF x) {
  const VecF t = magnitude(x);
  VecF u = t * -2.83474284e-6f + 3.937532376e-5f;
  u = u * t + -0.0001861679063f;
  u = u * t + -0.0001369676702f;
  u = u * t + 0.007063461613f;
  u = u * t + -0.05249620658f;
  u = u * t + -0.4592081878f;
  u = (u * t + -1.151105206f) * t;
  const VecF shifted = u + 12582912.0f, f = u - (shifted - 12582912.0f);
  VecF p = f * 0.000153536975f + 0.001339889682f;  // 2^f, |f| <= 1/2
  p = p * f + 0.009618436207f;
  p = p * f + 0.05550332396f;
  p = p * f + 0.2402264792f;
  p = p * f + 0.6931472029f;
  p = p * (f * 0.5f) + 0.5f;
  // The low bits of `shifted` hold the integer part of u, which is added to the exponent.
  VecF below = as_float(as_bits(p) + (as_bits(shifted) << 23));
  below = keep<float>(below, t < 5.6f);
  return choose(x < 0.0f, below, 1.0f - below);
}

using VecD = Vec<double>;
template <double (*f)(double)>
TW_INLINE VecD each(VecD x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = f(x[i]);
  return x;
}
TW_INLINE VecD exp_v(VecD x) { return each<std::exp>(x); }
TW_INLINE VecD expm1_v(VecD x) { return each<std::expm1>(x); }
TW_INLINE VecD log1p_v(VecD x) { return each<std::log1p>(x); }
TW_INLINE VecD tanh_v(VecD x) { return each<std::tanh>(x); }
TW_INLINE VecD normal_cdf_v(VecD x) {
  return (each<std::erf>(x * 0.70710678118654752440) + 1.0) * 0.5;
}

}  // namespace
