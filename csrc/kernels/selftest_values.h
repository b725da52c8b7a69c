// What the parts of selftest.cpp share: random values of every element type, activations and their
// derivatives one value at a time, and the count of failures.
#pragma once
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "activations.h"
#include "kernel_api.h"

using namespace torchweld;

namespace {

constexpr int ACTIVATION_COUNT = 0
#define ACTIVATION(...) +1
#include "activations.inc"
#undef ACTIVATION
    ;

std::mt19937 rng;
int64_t pick(std::initializer_list<int64_t> from) {
  return from.begin()[std::uniform_int_distribution<size_t>(0, from.size() - 1)(rng)];
}
bool coin() { return pick({0, 1}) == 1; }

// ---- element types, one value at a time ----
float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
double half_to_double(uint16_t h) {
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  const double value =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return h & 0x8000 ? -value : value;
}
double get(const void* data, int64_t i, DType t) {
  switch (t) {
    case DType::f32:
      return static_cast<const float*>(data)[i];
    case DType::f64:
      return static_cast<const double*>(data)[i];
    case DType::bf16:
      return bits_to_float(uint32_t(static_cast<const uint16_t*>(data)[i]) << 16);
    default:
      return half_to_double(static_cast<const uint16_t*>(data)[i]);
  }
}
// A random value that the type holds exactly.
void put_random(void* data, int64_t i, DType t, double size) {
  const double v = std::normal_distribution<double>(0, size)(rng);
  if (t == DType::f64) {
    static_cast<double*>(data)[i] = v;
    return;
  }
  const float f = float(v);
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if (t == DType::f32)
    static_cast<float*>(data)[i] = f;
  else if (t == DType::bf16)
    static_cast<uint16_t*>(data)[i] = uint16_t(u >> 16);
  else  // 8 bits of mantissa, exponents from -14 to -2
    static_cast<uint16_t*>(data)[i] = uint16_t(
        ((u >> 16) & 0x8000) | (pick({1, 4, 7, 9, 10, 11, 12, 13}) << 10) | ((u >> 13) & 1020));
}
double epsilon(DType t) {
  return t == DType::f64    ? 0x1p-52
         : t == DType::f32  ? 0x1p-23
         : t == DType::bf16 ? 0x1p-7
                            : 0x1p-10;
}

struct Buffer {
  Buffer(int64_t count, DType t, double size) : data(std::malloc(size_t(count) * size_of(t))) {
    for (int64_t i = 0; i < count; ++i) put_random(data, i, t, size);
  }
  ~Buffer() { std::free(data); }
  Buffer(const Buffer&) = delete;
  void* data;
};
using Buffers = std::vector<std::unique_ptr<Buffer>>;

double activation(const Layer& l, double z) {
  switch (l.act) {
    case Act::identity:
      return z;
    case Act::relu:
      return z > 0 ? z : 0;
    case Act::relu2:
      return z > 0 ? z * z : 0;
    case Act::leaky_relu:
      return z > 0 ? z : z * l.p0;
    case Act::silu:
      return z / (1 + std::exp(-z));
    case Act::gelu:
      return 0.5 * z * (1 + std::erf(z / std::sqrt(2.0)));
    case Act::gelu_tanh:
      return 0.5 * z * (1 + std::tanh(std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z)));
    case Act::quick_gelu:
      return z / (1 + std::exp(-1.702 * z));
    case Act::tanh:
      return std::tanh(z);
    case Act::sigmoid:
      return 1 / (1 + std::exp(-z));
    case Act::elu:
      return z > 0 ? z : l.p0 * std::expm1(z);
    case Act::mish:
      return z * std::tanh(std::log1p(std::exp(z)));
    case Act::hardswish:
      return z * std::fmin(std::fmax(z + 3, 0), 6) / 6;
    case Act::softplus:
      return z * l.p0 > l.p1 ? z : std::log1p(std::exp(z * l.p0)) / l.p0;
  }
  std::abort();
}

// A product of N x K in its own memory: contiguous along K, along N, or along neither.
Product random_product(int64_t N, int64_t K, DType t, bool bias, Buffers& keep) {
  Product p;
  const int64_t gap = pick({0, 0, 3}), form = pick({0, 0, 1, 2});
  if (form == 0) {
    p.stride_n = K + gap;
    p.stride_k = 1;
  } else if (form == 1) {
    p.stride_n = 1;
    p.stride_k = N + gap;
  } else {
    p.stride_n = 2 * K;
    p.stride_k = 2;
  }
  const int64_t span = (N - 1) * p.stride_n + (K - 1) * p.stride_k + 1;
  keep.push_back(std::make_unique<Buffer>(span, t, 1 / std::sqrt(double(K))));
  p.weight = keep.back()->data;
  if (bias) {
    p.bias_stride = pick({1, 1, 2});
    keep.push_back(std::make_unique<Buffer>((N - 1) * p.bias_stride + 1, t, 1));
    p.bias = keep.back()->data;
  }
  return p;
}

int failures = 0;

// d act(z) / dz by the textbook, with eager's choice at kinks and NaN where eager's formula gives
// it. In more than fp64, since 1 - t * t and its like lose digits.
using Extended = long double;
const Extended kPi = std::acos(Extended(-1));
Extended derivative_of(Act act, Extended p0, Extended p1, Extended z) {
  const auto sigmoid = [](Extended v) { return 1 / (1 + std::exp(-v)); };
  const Extended root = std::sqrt(2 / kPi);
  const Extended s = sigmoid(z);
  switch (act) {
    case Act::identity:
      return 1;
    case Act::relu:
      return z <= 0 ? 0 : 1;
    case Act::relu2:
      return z < 0 ? 0 : 2 * z;
    case Act::leaky_relu:
      return z > 0 ? 1 : p0;
    case Act::silu:
      return s * (1 + z * (1 - s));
    case Act::gelu:
      return 0.5L * (1 + std::erf(z / std::sqrt(Extended(2)))) +
             z * std::exp(-z * z / 2) / std::sqrt(2 * kPi);
    case Act::gelu_tanh: {
      const Extended t = std::tanh(root * (z + 0.044715L * z * z * z));
      return 0.5L * (1 + t) + 0.5L * z * (1 - t * t) * root * (1 + 3 * 0.044715L * z * z);
    }
    case Act::quick_gelu: {
      const Extended q = sigmoid(1.702L * z);
      return q + 1.702L * z * q * (1 - q);
    }
    case Act::tanh:
      return 1 - std::tanh(z) * std::tanh(z);
    case Act::sigmoid:
      return s * (1 - s);
    case Act::elu:
      return z > 0 ? 1 : p0 * std::exp(z);
    case Act::mish: {
      const Extended t = std::tanh(std::log1p(std::exp(z)));
      return t + z * s * (1 - t * t);
    }
    case Act::hardswish:
      return z <= -3 ? 0 : z >= 3 ? 1 : z / 3 + 0.5L;
    case Act::softplus:
      return z * p0 > p1 ? 1 : sigmoid(z * p0);
  }
  std::abort();
}

}  // namespace
