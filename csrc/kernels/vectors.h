// Vectors as wide as a register, by GCC's vector extensions, so that one source serves every
// instruction set. The file that includes this one is compiled once per set, and
// TORCHWELD_VEC_BYTES is the width of a register. `a * b + c` contracts to a fused multiply-add
// where the CPU has one.
//
// Everything is in an anonymous namespace. Two objects built with different flags must not share a
// symbol, or the linker may keep the wider version for a CPU that cannot run it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef TORCHWELD_VEC_BYTES
#if defined(__AVX512F__)
#define TORCHWELD_VEC_BYTES 64
#elif defined(__AVX2__)
#define TORCHWELD_VEC_BYTES 32
#else
#define TORCHWELD_VEC_BYTES 16
#endif
#endif

#define TW_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define TW_UNROLL _Pragma("unroll")
#else
#define TW_UNROLL _Pragma("GCC unroll 32")
#endif

namespace {

// 16-bit elements are bit patterns in memory; loading one makes it a float.
struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

// The compute type of an element type: fp64 computes in fp64, all others in fp32.
template <class T>
struct Compute {
  using type = float;
};
template <>
struct Compute<double> {
  using type = double;
};
template <class T>
using compute_t = typename Compute<T>::type;

template <class C>
struct VecOf;
template <>
struct VecOf<float> {
  typedef float type __attribute__((vector_size(TORCHWELD_VEC_BYTES)));
  typedef float loose __attribute__((vector_size(TORCHWELD_VEC_BYTES), aligned(4), may_alias));
  typedef int32_t mask __attribute__((vector_size(TORCHWELD_VEC_BYTES)));
};
template <>
struct VecOf<double> {
  typedef double type __attribute__((vector_size(TORCHWELD_VEC_BYTES)));
  typedef double loose __attribute__((vector_size(TORCHWELD_VEC_BYTES), aligned(8), may_alias));
  typedef int64_t mask __attribute__((vector_size(TORCHWELD_VEC_BYTES)));
};
template <class C>
using Vec = typename VecOf<C>::type;
template <class C>
using Mask = typename VecOf<C>::mask;
template <class V>
using lane_of = std::decay_t<decltype(std::declval<V>()[0])>;
template <class C>
constexpr int kLanes = TORCHWELD_VEC_BYTES / int(sizeof(C));

using VecF = Vec<float>;
using MaskF = Mask<float>;
typedef uint32_t VecU __attribute__((vector_size(TORCHWELD_VEC_BYTES)));
typedef uint16_t Half __attribute__((vector_size(TORCHWELD_VEC_BYTES / 2), aligned(2), may_alias));

template <class C>
TW_INLINE Vec<C> splat(C value) {
  return value -
         Vec<C>{};  // GCC broadcasts the scalar; x - 0 keeps the sign of zero, 0 + x does not
}

// sum += x * w in one instruction that keeps the sum in its register. GCC 12 by itself chooses
// forms that move it between registers as soon as a loop has more than one step.
template <class C>
TW_INLINE void add_product(Vec<C>& sum, Vec<C> x, Vec<C> w) {
#if defined(__FMA__) && !defined(__AVX512F__)
  if constexpr (sizeof(Vec<C>) == 32) {
    if constexpr (sizeof(C) == 4)
      asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(x), "x"(w));
    else
      asm("vfmadd231pd %2, %1, %0" : "+x"(sum) : "x"(x), "x"(w));
    return;
  }
#endif
  sum += x * w;
}

TW_INLINE VecF as_float(VecU u) { return (VecF)u; }
TW_INLINE VecU as_bits(VecF f) { return (VecU)f; }

// ---- loading: any element type to its compute type ----
TW_INLINE VecF load(const float* p) { return *reinterpret_cast<const VecOf<float>::loose*>(p); }
TW_INLINE Vec<double> load(const double* p) {
  return *reinterpret_cast<const VecOf<double>::loose*>(p);
}
TW_INLINE VecF load(const bf16* p) {
#if defined(__AVX2__) && TORCHWELD_VEC_BYTES == 32
  // GCC 12 would compile the conversion below to five instructions (79 against 113 GFLOP/s on Zen
  // 4).
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (VecF)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
#else
  return as_float(__builtin_convertvector(*reinterpret_cast<const Half*>(p), VecU) << 16);
#endif
}

// Converts halves by bit arithmetic: shift exponent and mantissa up, rescale by 2^112 (exact, also
// for denormals), and restore the all-ones exponent of Inf and NaN.
TW_INLINE VecF half_bits_to_float(VecU h) {
  const VecU magnitude = (h & 0x7fffu) << 13;
  const VecU scaled = as_bits(as_float(magnitude) * 0x1p112f);
  const VecU special = (VecU)(magnitude >= (0x7c00u << 13));
  return as_float((scaled | (special & 0x7f800000u)) | ((h & 0x8000u) << 16));
}
TW_INLINE VecF load(const fp16* p) {
#if defined(__AVX512F__) && TORCHWELD_VEC_BYTES == 64
  return (VecF)_mm512_maskz_cvtph_ps(0xffff,
                                     _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__) && TORCHWELD_VEC_BYTES == 32
  return (VecF)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__aarch64__) && TORCHWELD_VEC_BYTES == 16
  return (VecF)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))));
#else
  return half_bits_to_float(__builtin_convertvector(*reinterpret_cast<const Half*>(p), VecU));
#endif
}

// ---- one row of a panel: two registers' worth of neighbouring outputs ----
template <class C>
struct Pair {
  Vec<C> first, second;
};
template <class T>
TW_INLINE Pair<compute_t<T>> load_pair(const T* p) {
  return {load(p), load(p + kLanes<compute_t<T>>)};
}
// bf16 panels are 32-bit words with an output of the first register in the low half and one of the
// second in the high half. A shift and a mask widen both; two separate loads would take two
// conversions and two shifts. `pair_up` brings a plain row into that order.
TW_INLINE Pair<float> load_pair(const bf16* p) {
  VecU words;
  std::memcpy(&words, p, sizeof words);
  return {as_float(words << 16), as_float(words & 0xffff0000u)};
}
template <class T>
TW_INLINE void pair_up(T*) {}
template <>
TW_INLINE void pair_up(bf16* row) {
  const VecU low = __builtin_convertvector(*reinterpret_cast<const Half*>(row), VecU);
  const VecU high =
      __builtin_convertvector(*reinterpret_cast<const Half*>(row + kLanes<float>), VecU);
  const VecU words = low | (high << 16);
  std::memcpy(row, &words, sizeof words);
}

// ---- storing: round to nearest even, NaN stays NaN ----
TW_INLINE void store(float* p, VecF v) { *reinterpret_cast<VecOf<float>::loose*>(p) = v; }
TW_INLINE void store(double* p, Vec<double> v) { *reinterpret_cast<VecOf<double>::loose*>(p) = v; }
TW_INLINE void store(bf16* p, VecF v) {
  const VecU u = as_bits(v);
  const VecU rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const VecU nan = (VecU)(v != v);
  *reinterpret_cast<Half*>(p) = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0u), Half);
}
TW_INLINE VecU float_to_half_bits(VecF v) {
  const VecU u = as_bits(v), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  // normal: rebias by subtracting 112 << 23, round at bit 13; a carry into the exponent is correct
  const VecU normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // below 2^-14: adding 0.5 aligns the mantissa, so that the FPU rounds at a denormal half's last
  // bit
  const VecU denormal = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u;
  const VecU is_small = (VecU)(magnitude < (113u << 23));
  const VecU is_big = (VecU)(magnitude >= 0x477ff000u);  // 65520 and above round to Inf
  const VecU is_nan = (VecU)(magnitude > 0x7f800000u);
  VecU h = (is_small & denormal) | (~is_small & normal);
  h = (is_big & 0x7c00u) | (~is_big & h);
  h = (is_nan & 0x7e00u) | (~is_nan & h);
  return h | sign;
}
TW_INLINE void store(fp16* p, VecF v) {
#if defined(__AVX512F__) && TORCHWELD_VEC_BYTES == 64
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtps_ph(0xffff, (__m512)v, 0));
#elif defined(__F16C__) && TORCHWELD_VEC_BYTES == 32
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, 0));
#else
  *reinterpret_cast<Half*>(p) = __builtin_convertvector(float_to_half_bits(v), Half);
#endif
}

// Loads the first `count` lanes and sets the rest to zero. Slow; for the ends of rows.
template <class T>
TW_INLINE Vec<compute_t<T>> load_first(const T* p, int64_t count) {
  T whole[kLanes<compute_t<T>>] = {};
  std::memcpy(whole, p, size_t(count) * sizeof(T));
  return load(whole);
}
template <class T>
TW_INLINE void store_first(T* p, Vec<compute_t<T>> v, int64_t count) {
  T whole[kLanes<compute_t<T>>];
  store(whole, v);
  std::memcpy(p, whole, size_t(count) * sizeof(T));
}

// All ones in the first `count` lanes.
template <class C>
TW_INLINE Mask<C> first_lanes(int64_t count) {
  Mask<C> m;
  for (int i = 0; i < kLanes<C>; ++i) m[i] = i < count ? -1 : 0;
  return m;
}
template <class C>
TW_INLINE Vec<C> keep(Vec<C> v, Mask<C> mask) {
  return (Vec<C>)((Mask<C>)v & mask);  // bitwise, so that NaN and Inf in dropped lanes become zero
}

// Lane i of the result is lane Order::lane(i) of a and b, numbered through both. GCC takes the
// order as a vector, and has __builtin_shufflevector only since version 12; clang takes constants.
template <class Order, class V, int... I>
TW_INLINE V shuffled(V a, V b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Order::lane(I)...);
#else
  using Lane = decltype(a < b);
  return __builtin_shuffle(a, b, Lane{Order::lane(I)...});
#endif
}

// The sum of the lanes, added half to half, in the same order at every call.
template <int half>
struct FromOtherHalf {
  static constexpr int lane(int i) { return i ^ half; }
};
template <class C, int half = kLanes<C> / 2>
TW_INLINE C sum_lanes(Vec<C> v) {
  if constexpr (half == 0) {
    return v[0];
  } else {
    constexpr auto lanes = std::make_integer_sequence<int, kLanes<C>>{};
    return sum_lanes<C, half / 2>(v + shuffled<FromOtherHalf<half>>(v, v, lanes));
  }
}

}  // namespace
