// Tests the kernels against a scalar reference in fp64, without torch: for instruction sets and
// compilers that torch does not run on here (64-byte vectors on AVX2, NEON under emulation), and
// for AddressSanitizer. Buffers are exactly as large as promised, so that reading past an end is
// noticed.
//
// The derivatives of activations are also tested by themselves, in the width that this file is
// compiled for.
//
//   selftest [cases] [seed]     exit 0 and "N passed, 0 failed", or 1 and what differed
#include <algorithm>

#include "selftest_backward.h"
#include "selftest_values.h"

namespace {

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
    l.act = Act(std::uniform_int_distribution<int>(0, ACTIVATION_COUNT - 1)(rng));
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
    if (i % 2 == 1)
      backward_case(table, i % 8 == 7);
    else
      one_case(table, i % 8 == 6);
    failed += failures > before;
  }
  std::printf("%d passed, %d failed\n", cases - failed, failed);
  return failed ? 1 : 0;
}
