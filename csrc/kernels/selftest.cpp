// Tests the kernels against a scalar reference in fp64, without torch: for instruction sets and
// compilers that torch does not run on here (64-byte vectors on AVX2, NEON under emulation), and
// for AddressSanitizer. Buffers are exactly as large as promised, so that reading past an end is
// noticed.
//
// No kernel uses the derivatives of activations yet, so their vector functions are tested directly,
// in the width that this file is compiled for.
//
//   selftest [cases] [seed]     exit 0 and "N passed, 0 failed", or 1 and what differed
#include <algorithm>
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

struct ScalarDot {
  double sum, scale;  // scale: the sum of absolute products
};
ScalarDot dot(const Product& p, int64_t n, const std::vector<double>& x, DType t) {
  ScalarDot d{0, 0};
  for (size_t k = 0; k < x.size(); ++k) {
    const double term = x[k] * get(p.weight, n * p.stride_n + int64_t(k) * p.stride_k, t);
    d.sum += term;
    d.scale += std::fabs(term);
  }
  if (p.bias) {
    const double b = get(p.bias, n * p.bias_stride, t);
    d.sum += b;
    d.scale += std::fabs(b);
  }
  return d;
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

// Points of interest: kinks with their neighbours, special values, and what lies between, densely.
template <class C>
std::vector<C> derivative_points() {
  const C inf = std::numeric_limits<C>::infinity();
  std::vector<C> points{-inf, inf, std::numeric_limits<C>::quiet_NaN(), C(-1e15), C(1e15), C(-0.0)};
  for (const C kink : {C(-3), C(0), C(3), C(20), C(30)})
    for (const C at : {std::nextafter(kink, -inf), kink, std::nextafter(kink, inf)})
      points.push_back(at);
  for (int i = -4000; i <= 4000; ++i) points.push_back(C(i * 0.0123));
  for (int exponent = -40; exponent < 10; ++exponent)
    for (const C sign : {C(-1), C(1)}) points.push_back(sign * C(std::ldexp(1.37, exponent)));
  return points;
}

// Within 2 ulp of 1 or of the value, whichever is larger: a derivative is a sum of terms of about
// 1. The worst that was seen is 1.6 ulp, of tanh (AVX2).
template <class C, Act act>
void check_derivative(const char* name, C p0, C p1) {
  const std::vector<C> points = derivative_points<C>();
  constexpr size_t L = size_t(kLanes<C>);
  for (size_t i = 0; i < points.size(); i += L) {
    const size_t count = std::min(L, points.size() - i);
    C got[L];
    store(got, activation_derivative<act>(load_first(&points[i], int64_t(count)), p0, p1));
    for (size_t j = 0; j < count; ++j) {
      const Extended x = points[i + j], y = got[j], expected = derivative_of(act, p0, p1, x);
      const Extended allowed =
          2 * std::numeric_limits<C>::epsilon() * std::fmax(Extended(1), std::fabs(expected));
      if (y == expected || (y != y && expected != expected) || std::fabs(y - expected) <= allowed)
        continue;
      if (failures++ < 10)
        std::printf("derivative of %s in %zu bits at %.9Lg: got %.9Lg, expected %.9Lg\n", name,
                    8 * sizeof(C), x, y, expected);
      return;
    }
  }
}
void check_derivatives() {
#define ACTIVATION(name, count, d0, d1, ...)          \
  check_derivative<float, Act::name>(#name, d0, d1);  \
  check_derivative<double, Act::name>(#name, d0, d1); \
  check_derivative<float, Act::name>(#name, 0.3, 5);  \
  check_derivative<double, Act::name>(#name, 0.3, 5);
#include "activations.inc"
#undef ACTIVATION
}

void check(const char* what, const std::vector<Layer>& layers, DType t,
           const std::vector<double>& x, const void* y, int64_t offset, int64_t m) {
  // Errors of a hidden layer propagate through weights of about unit norm and activations of slope
  // ~1.1.
  std::vector<double> h = x;
  double slack = 0;
  for (const Layer& l : layers) {
    std::vector<double> next;
    double widest = 0;
    for (int64_t n = 0; n < l.N; ++n) {
      const ScalarDot up = dot(l.up, n, h, t);
      if (!l.gated) {
        next.push_back(activation(l, up.sum));
        widest = std::fmax(widest,
                           l.act == Act::relu2 ? up.scale * (1 + 2 * std::fabs(up.sum)) : up.scale);
      } else {
        const ScalarDot gate = dot(l.gate, n, h, t);
        const double a = activation(l, gate.sum);
        const double slope = l.act == Act::relu2 ? 2 * std::fabs(gate.sum) + 1 : 1.2;
        next.push_back(a * up.sum);
        widest = std::fmax(widest,
                           (std::fabs(a) + 1) * up.scale + slope * gate.scale * std::fabs(up.sum));
      }
    }
    const double eps = t == DType::f64 ? epsilon(t) : epsilon(DType::f32);
    slack = slack * 8 + 4 * eps * widest;
    h = next;
  }
  for (size_t n = 0; n < h.size(); ++n) {
    const double got = get(y, offset + int64_t(n), t);
    const double allowed = slack + epsilon(t) * std::fabs(h[n]) + 1e-7;
    if (std::fabs(got - h[n]) <= allowed) continue;
    if (failures++ < 10)
      std::printf("%s: row %lld output %zu of %zu: got %.9g, expected %.9g, allowed error %.3g\n",
                  what, (long long)m, n, h.size(), got, h[n], allowed);
    return;
  }
}

void one_case(const Kernels& kernels, bool group) {
  const DType t = DType(pick({0, 0, 1, 2, 3}));
  Buffers keep;
  std::vector<Layer> layers;
  const int64_t M = pick({1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 17, 25, 40});
  int64_t K = pick({1, 2, 3, 7, 8, 9, 16, 31, 64, 100}), first = K;
  const int64_t count = pick({1, 2, 2, 3});
  for (int64_t i = 0; i < count; ++i) {
    Layer l;
    l.K = group ? first : K;
    // sometimes wider than a block of K
    l.N =
        pick({1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100, group || i + 1 == count ? 5 : 1100});
    l.act = Act(std::uniform_int_distribution<int>(0, int(Act::softplus))(rng));
    if (i > 0 && l.act == Act::relu2) l.act = Act::relu;  // squares of squares leave fp16's range
    l.p0 = l.act == Act::softplus ? 1.5 : 0.3;
    l.p1 = 20;
    l.gated = coin();
    const bool bias = coin();
    l.up = random_product(l.N, l.K, t, bias, keep);
    if (l.gated) l.gate = random_product(l.N, l.K, t, bias, keep);
    layers.push_back(l);
    K = l.N;
  }
  const int64_t ldx = first + pick({0, 5});
  Buffer x((M - 1) * ldx + first, t, 1);

  std::vector<Layer> packed = layers;
  std::vector<std::unique_ptr<void, void (*)(void*)>> panels;
  for (Layer& l : packed) {
    panels.emplace_back(std::aligned_alloc(64, kernels.packed_bytes(l, t)), std::free);
    kernels.pack(l, t, panels.back().get());
    l.packed = panels.back().get();
    l.up = l.gate = Product{};  // must not be read
  }
  for (const std::vector<Layer>* form : {&layers, &packed}) {
    std::vector<void*> ys;
    Buffers outputs;
    for (size_t i = group ? 0 : layers.size() - 1; i < layers.size(); ++i) {
      outputs.push_back(std::make_unique<Buffer>(M * layers[i].N, t, 1));
      ys.push_back(outputs.back()->data);
    }
    Call call;
    call.dtype = t;
    call.layers = form->data();
    call.count = int(layers.size());
    call.x = x.data;
    call.M = M;
    call.ldx = ldx;
    call.y = ys.data();
    call.threads = int(pick({1, 2, 3}));
    Run run;
    (group ? kernels.run_group : kernels.run_chain)(call, run);
    for (int64_t m = 0; m < M; ++m) {
      std::vector<double> row;
      for (int64_t k = 0; k < first; ++k) row.push_back(get(x.data, m * ldx + k, t));
      const char* what = form == &packed ? "packed" : "natural";
      if (!group) {
        check(what, layers, t, row, ys[0], m * layers.back().N, m);
      } else {
        for (size_t i = 0; i < layers.size(); ++i)
          check(what, {layers[i]}, t, row, ys[i], m * layers[i].N, m);
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 400;
  rng.seed(argc > 2 ? unsigned(std::atoi(argv[2])) : 0u);
  const Kernels& table = kernels();
  std::printf("%s, %d floats a register\n", table.isa, table.lanes_f32);
  check_derivatives();
  if (failures) return 1;
  int failed = 0;
  for (int i = 0; i < cases; ++i) {
    const int before = failures;
    one_case(table, i % 4 == 3);
    failed += failures > before;
  }
  std::printf("%d passed, %d failed\n", cases - failed, failed);
  return failed ? 1 : 0;
}
