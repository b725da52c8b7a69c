// One random backward, compared with a scalar reference that starts from the pre-activations that
// the forward kept.
#pragma once
#include "selftest_values.h"

namespace {

// Rows of doubles: a value and, for the tolerance, what it would be if nothing cancelled.
struct Reference {
  int64_t columns;
  std::vector<double> value, scale;
  Reference(int64_t rows, int64_t columns)
      : columns(columns), value(size_t(rows * columns)), scale(size_t(rows * columns)) {}
  void add(int64_t row, int64_t column, double v, double s) {
    value[size_t(row * columns + column)] += v;
    scale[size_t(row * columns + column)] += std::fabs(s);
  }
};

struct BackwardCase {
  DType t;
  int64_t M, K;  // K of the first layer
  bool group;
  std::vector<Layer> layers;
  std::vector<TrainingLayer> training;
  std::vector<LayerGradient> gradients;
  Buffers keep;

  void* fresh(int64_t count, double size = 1) {
    keep.push_back(std::make_unique<Buffer>(count, t, size));
    return keep.back()->data;
  }
  // A gradient as large as its product, in another memory with the same strides; sometimes not
  // needed.
  ProductGradient gradient_of(const Product& p, int64_t N, int64_t own_K) {
    ProductGradient g;
    if (coin() || coin()) {
      g.stride_n = p.stride_k == 1 ? own_K : p.stride_n == 1 ? 1 : 2;
      g.stride_k = p.stride_k == 1 ? 1 : p.stride_n == 1 ? N : 2 * N;
      g.weight = fresh((N - 1) * g.stride_n + (own_K - 1) * g.stride_k + 1);
    }
    if (p.bias && (coin() || coin())) {
      g.bias_stride = pick({1, 2});
      g.bias = fresh((N - 1) * g.bias_stride + 1);
    }
    return g;
  }

  bool kept(const TrainingLayer& l, int64_t i) const {
    const int64_t N = layers[size_t(&l - training.data())].N, m = i / N, n = i % N;
    return !l.mask || (l.mask[m * ((N + 7) / 8) + n / 8] >> (n % 8)) & 1;
  }

  void compare(const char* what, int layer, const Reference& expected, const void* got,
               int64_t stride_row, int64_t stride_column) const {
    const double eps = t == DType::f64 ? epsilon(t) : epsilon(DType::f32);
    const int64_t rows = int64_t(expected.value.size()) / expected.columns;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < expected.columns; ++c) {
        const size_t i = size_t(r * expected.columns + c);
        const double v = expected.value[i], y = get(got, r * stride_row + c * stride_column, t);
        const double allowed = 64 * eps * expected.scale[i] + epsilon(t) * std::fabs(v) + 1e-7;
        if (std::fabs(y - v) <= allowed) continue;
        if (failures++ < 10)
          std::printf(
              "backward: %s of layer %d at %lld, %lld: got %.9g, expected %.9g, allowed "
              "error %.3g\n",
              what, layer, (long long)r, (long long)c, y, v, allowed);
        return;
      }
  }
  void compare(const char* what, int layer, const Reference& dz, const Reference& in,
               const ProductGradient& g) const {
    if (g.weight) {
      Reference dw(dz.columns, in.columns);
      for (int64_t m = 0; m < M; ++m)
        for (int64_t n = 0; n < dz.columns; ++n)
          for (int64_t k = 0; k < in.columns; ++k) {
            const size_t a = size_t(m * dz.columns + n), b = size_t(m * in.columns + k);
            dw.add(n, k, dz.value[a] * in.value[b], dz.scale[a] * in.scale[b]);
          }
      compare(what, layer, dw, g.weight, g.stride_n, g.stride_k);
    }
    if (g.bias) {
      Reference db(1, dz.columns);
      for (int64_t m = 0; m < M; ++m)
        for (int64_t n = 0; n < dz.columns; ++n)
          db.add(0, n, dz.value[size_t(m * dz.columns + n)], dz.scale[size_t(m * dz.columns + n)]);
      compare("bias", layer, db, g.bias, 0, g.bias_stride);
    }
  }

  // The layer's output, from what was kept; x for layer -1.
  Reference output(int i, const void* x, int64_t ldx) const {
    if (i < 0) {
      Reference r(M, K);
      for (int64_t m = 0; m < M; ++m)
        for (int64_t k = 0; k < K; ++k) {
          const double v = get(x, m * ldx + k, t);
          r.add(m, k, v, v);
        }
      return r;
    }
    const Layer& l = layers[size_t(i)];
    const TrainingLayer& tr = training[size_t(i)];
    Reference r(M, l.N);
    for (int64_t j = 0; j < M * l.N; ++j) {
      const double z = get(tr.z, j, t), factor = kept(tr, j) ? tr.scale : 0;
      const double up = l.gated ? get(tr.up, j, t) : 1;
      const double v = activation(l, z) * up * factor;
      r.add(j / l.N, j % l.N, v, (std::fabs(v) + (std::fabs(z) + 1) * std::fabs(up)) * 2);
    }
    return r;
  }

  // Checks everything from layer i down, from the gradient of its output.
  void check(int i, const Reference& grad, const void* x, int64_t ldx, const void* grad_x,
             Reference* sum_x) const {
    const Layer& l = layers[size_t(i)];
    const TrainingLayer& tr = training[size_t(i)];
    Reference up_dz(M, l.N), gate_dz(M, l.N);
    for (int64_t j = 0; j < M * l.N; ++j) {
      const double factor = kept(tr, j) ? tr.scale : 0, g = grad.value[size_t(j)] * factor;
      const double s = grad.scale[size_t(j)] * tr.scale;
      const double z = tr.z ? get(tr.z, j, t) : 0;
      const double slope = double(derivative_of(l.act, l.p0, l.p1, z));
      const double steep = 2 + std::fabs(slope);
      if (l.gated) {
        const double up = get(tr.up, j, t), a = activation(l, z);
        gate_dz.add(j / l.N, j % l.N, g * up * slope, s * up * steep);
        up_dz.add(j / l.N, j % l.N, g * a, s * (std::fabs(a) + std::fabs(z) + 1));
      } else {
        up_dz.add(j / l.N, j % l.N, g * slope, s * steep);
      }
    }
    const Reference in = output(group ? -1 : i - 1, x, ldx);
    compare("up", i, up_dz, in, gradients[size_t(i)].up);
    if (l.gated) compare("gate", i, gate_dz, in, gradients[size_t(i)].gate);
    Reference below(M, l.K);
    for (const bool gate : {false, true}) {
      if (gate && !l.gated) break;
      const Product& p = gate ? l.gate : l.up;
      const Reference& dz = gate ? gate_dz : up_dz;
      for (int64_t m = 0; m < M; ++m)
        for (int64_t n = 0; n < l.N; ++n)
          for (int64_t k = 0; k < l.K; ++k) {
            const double w = get(p.weight, n * p.stride_n + k * p.stride_k, t);
            const size_t at = size_t(m * l.N + n);
            below.add(m, k, dz.value[at] * w, dz.scale[at] * w);
          }
    }
    if (group) {
      for (size_t j = 0; j < below.value.size(); ++j)
        sum_x->add(int64_t(j) / K, int64_t(j) % K, below.value[j], below.scale[j]);
    } else if (i > 0) {
      check(i - 1, below, x, ldx, grad_x, sum_x);
    } else if (grad_x) {
      compare("x", 0, below, grad_x, K, 1);
    }
  }
};

void backward_case(const Kernels& kernels, bool group) {
  BackwardCase c;
  c.t = DType(pick({0, 0, 1, 2, 3}));
  c.group = group;
  c.M = pick({1, 2, 3, 5, 8, 12, 13, 25, 40, 70});
  if (pick({0, 0, 0, 0, 0, 0, 0, 0, 0, 1})) c.M = 530;  // more than one block of rows
  int64_t K = c.K = pick({1, 2, 7, 8, 16, 31, 33, 64});
  const int64_t count = pick({1, 2, 2, 3});
  std::vector<std::vector<uint8_t>> masks;
  for (int64_t i = 0; i < count; ++i) {
    Layer l;
    l.K = group ? c.K : K;
    l.N = pick({1, 2, 7, 8, 16, 17, 31, 33, 64, 70});
    l.act = Act(std::uniform_int_distribution<int>(0, int(Act::softplus))(rng));
    if (i > 0 && l.act == Act::relu2) l.act = Act::relu;
    l.p0 = l.act == Act::softplus ? 1.5 : 0.3;
    l.p1 = 20;
    l.gated = coin();
    const bool bias = coin();
    l.up = random_product(l.N, l.K, c.t, bias, c.keep);
    if (l.gated) l.gate = random_product(l.N, l.K, c.t, bias, c.keep);
    TrainingLayer tr;
    const bool last = group || i + 1 == count;
    if (l.gated || !last || l.act != Act::identity) tr.z = c.fresh(c.M * l.N);
    if (l.gated) tr.up = c.fresh(c.M * l.N);
    if (pick({0, 0, 1})) {
      masks.emplace_back(size_t(c.M * ((l.N + 7) / 8)));
      for (uint8_t& byte : masks.back()) byte = uint8_t(rng());
      tr.mask = masks.back().data();
      tr.scale = 1.25;
    }
    c.layers.push_back(l);
    c.training.push_back(tr);
    c.gradients.push_back({c.gradient_of(l.up, l.N, l.K),
                           l.gated ? c.gradient_of(l.gate, l.N, l.K) : ProductGradient{}});
    K = l.N;
  }
  const int64_t ldx = c.K + pick({0, 5});
  const void* x = c.fresh((c.M - 1) * ldx + c.K);

  Call forward;
  forward.dtype = c.t;
  forward.layers = c.layers.data();
  forward.count = int(count);
  forward.x = x;
  forward.M = c.M;
  forward.ldx = ldx;
  std::vector<void*> ys(size_t(group ? count : 1), nullptr);  // not written
  forward.y = ys.data();
  forward.training = c.training.data();
  forward.threads = int(pick({1, 2, 3}));
  Run run;
  (group ? kernels.run_group : kernels.run_chain)(forward, run);

  std::vector<const void*> grad_y;
  for (int64_t i = group ? 0 : count - 1; i < count; ++i)
    grad_y.push_back(c.fresh(c.M * c.layers[size_t(i)].N));
  BackwardCall call;
  call.dtype = c.t;
  call.layers = c.layers.data();
  call.training = c.training.data();
  call.gradients = c.gradients.data();
  call.count = int(count);
  call.group = group;
  call.x = x;
  call.M = c.M;
  call.ldx = ldx;
  call.grad_y = grad_y.data();
  call.grad_x = coin() ? c.fresh(c.M * c.K) : nullptr;
  call.threads = int(pick({1, 2, 3}));
  kernels.run_backward(call, run);

  Reference sum_x(c.M, c.K);
  for (int64_t i = group ? 0 : count - 1; i < count; ++i) {
    Reference grad(c.M, c.layers[size_t(i)].N);
    const void* from = grad_y[size_t(group ? i : 0)];
    for (int64_t j = 0; j < c.M * grad.columns; ++j) {
      const double v = get(from, j, c.t);
      grad.add(j / grad.columns, j % grad.columns, v, v);
    }
    c.check(int(i), grad, x, ldx, call.grad_x, &sum_x);
  }
  if (group && call.grad_x) c.compare("x", 0, sum_x, call.grad_x, c.K, 1);
}

}  // namespace
