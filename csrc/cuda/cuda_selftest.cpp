// Tests the CUDA kernels on the host against a scalar reference in fp64, without torch: under
// sanitizers, and with barriers taken out. Buffers are exactly as large as promised.
//
//   cuda_selftest [cases]     exit 0 and "N passed, 0 failed", or 1 and what differed
//
// Build: g++ -std=c++17 -I csrc -x c++ csrc/cuda/cuda_selftest.cpp, with -DTORCHWELD_HOST_THREADS
// for threads instead of fibers.
#include "cuda_kernels.cu"
#include "launch_log.cpp"

#include <cstdio>
#include <memory>

namespace {

using namespace torchweld;
using namespace torchweld::cuda;

struct TestLayer {
  int N;
  Act act;
  bool gated, biased, turned;
};
struct TestCase {
  const char* name;
  DType dtype;
  int64_t M;
  int K;
  std::vector<TestLayer> layers;
  int shared = 163;  // KB of a block
  bool input_gradient = true;
  bool drops = false;
};

std::mt19937& random_numbers() {
  static std::mt19937 generator(7);
  return generator;
}
double random_value(double scale) {
  return std::uniform_real_distribution<double>(-scale, scale)(random_numbers());
}

// Numbers in an element type, in memory of exactly their size.
class Values {
 public:
  Values() = default;
  Values(DType dtype, size_t count, double scale)
      : dtype_(dtype), count_(count), memory_(new char[count * size_of(dtype)]) {
    for (size_t i = 0; i < count; ++i) set(i, random_value(scale));
  }
  void set(size_t i, double value) {
    if (dtype_ == DType::f32) {
      const float f = float(value);
      std::memcpy(&memory_[4 * i], &f, 4);
    } else {
      const uint16_t bits = dtype_ == DType::f16 ? cuda_on_host::half_bits(float(value))
                                                 : cuda_on_host::bf16_bits(float(value));
      std::memcpy(&memory_[2 * i], &bits, 2);
    }
  }
  double operator[](size_t i) const {
    if (dtype_ == DType::f32) {
      float f;
      std::memcpy(&f, &memory_[4 * i], 4);
      return f;
    }
    uint16_t bits;
    std::memcpy(&bits, &memory_[2 * i], 2);
    return dtype_ == DType::f16 ? cuda_on_host::half_value(bits) : cuda_on_host::bf16_value(bits);
  }
  void* data() const { return memory_.get(); }
  size_t size() const { return count_; }

 private:
  DType dtype_ = DType::f32;
  size_t count_ = 0;
  std::unique_ptr<char[]> memory_;
};

double value_of_act(Act act, double z) {
  switch (act) {
    case Act::relu:
      return z < 0 ? 0 : z;
    case Act::silu:
      return z / (1 + std::exp(-z));
    case Act::tanh:
      return std::tanh(z);
    default:
      return z;
  }
}
double slope_of_act(Act act, double z) {
  const double s = 1 / (1 + std::exp(-z));
  switch (act) {
    case Act::relu:
      return z <= 0 ? 0 : 1;
    case Act::silu:
      return s * (1 + z * (1 - s));
    case Act::tanh:
      return 1 - std::tanh(z) * std::tanh(z);
    default:
      return 1;
  }
}

// Values may differ by roundings of the type, which a chain passes on; a race differs by far more.
bool agrees(const char* name, const char* what, const Values& found,
            const std::vector<double>& expected, DType dtype) {
  const double unit = dtype == DType::f32 ? 2e-5 : dtype == DType::f16 ? 1e-2 : 6e-2;
  double scale = 1e-3;
  for (const double e : expected) scale = std::max(scale, std::fabs(e));
  for (size_t i = 0; i < expected.size(); ++i)
    if (!(std::fabs(found[i] - expected[i]) <= unit * scale)) {
      std::printf("%s: %s[%zu] is %g, expected %g\n", name, what, i, found[i], expected[i]);
      return false;
    }
  return true;
}

struct LayerMemory {
  Values weight[2], bias[2], weight_gradient[2], bias_gradient[2], z, v;
  std::vector<uint8_t> mask;
  std::vector<double> before[2], output, gradient[2];  // the reference's
};
constexpr double kScale = 2.0;

class ChainTest {
 public:
  explicit ChainTest(const TestCase& test) : test_(test), dtype_(test.dtype) {
    x_ = Values(dtype_, size_t(test.M * test.K), 1);
    int K = test.K;
    for (const TestLayer& layer : test.layers) {
      LayerMemory memory;
      const size_t N = size_t(layer.N), M = size_t(test.M);
      for (int half = 0; half < 1 + layer.gated; ++half) {
        memory.weight[half] = Values(dtype_, N * size_t(K), 1.5 / std::sqrt(K));
        memory.weight_gradient[half] = Values(dtype_, N * size_t(K), 1);
        if (!layer.biased) continue;
        memory.bias[half] = Values(dtype_, N, 0.5);
        memory.bias_gradient[half] = Values(dtype_, N, 1);
      }
      memory.z = Values(dtype_, M * N, 1);
      if (layer.gated) memory.v = Values(dtype_, M * N, 1);
      if (test.drops) {
        memory.mask.resize(M * ((N + 7) / 8));
        for (uint8_t& byte : memory.mask) byte = uint8_t(random_numbers()());
      }
      layers_.push_back(std::move(memory));
      K = layer.N;
    }
    y_ = Values(dtype_, size_t(test.M * K), 1);
    grad_y_ = Values(dtype_, size_t(test.M * K), 1);
    grad_x_ = Values(dtype_, size_t(test.M * test.K), 1);
  }

  bool passes() {
    setenv("TORCHWELD_HOST_SHARED", std::to_string(test_.shared << 10).c_str(), 1);
    describe();
    NarrowBackwardCall call;
    call.dtype = dtype_;
    call.layers = layers_of_call_.data();
    call.training = training_.data();
    call.count = int(layers_.size());
    call.x = {x_.data(), test_.K, 1};
    call.M = test_.M;
    run_narrow(call, planned(plan_narrow(call)), y_.data());
    call.gradients = gradients_.data();
    call.grad_y = {grad_y_.data(), test_.layers.back().N, 1};
    call.grad_x = test_.input_gradient ? grad_x_.data() : nullptr;
    const NarrowPlan plan = planned(plan_narrow_backward(call));
    const std::unique_ptr<float[]> workspace(new float[plan.workspace]);
    run_narrow_backward(call, plan, workspace.get());
    return compare_forward() & compare_backward() & compare_pointwise();
  }

 private:
  static NarrowPlan planned(NarrowPlan plan) {
    if (!plan.problem.empty()) throw std::runtime_error(plan.problem);
    return plan;
  }
  int64_t inputs(size_t i) const { return i ? test_.layers[i - 1].N : test_.K; }
  double input(size_t i, int64_t m, int64_t k) const {
    return i ? layers_[i - 1].output[size_t(m * inputs(i) + k)] : x_[size_t(m * test_.K + k)];
  }
  double weight(size_t i, int half, int64_t n, int64_t k) const {
    const TestLayer& layer = test_.layers[i];
    return layers_[i].weight[half][size_t(layer.turned ? k * layer.N + n : n * inputs(i) + k)];
  }
  double kept(size_t i, int64_t m, int64_t n) const {
    if (!test_.drops) return 1;
    const int64_t bytes = (test_.layers[i].N + 7) / 8;
    return (layers_[i].mask[size_t(m * bytes + n / 8)] >> (n % 8)) & 1 ? kScale : 0;
  }

  // What the calls take: pointers and strides.
  void describe() {
    for (size_t i = 0; i < layers_.size(); ++i) {
      const TestLayer& from = test_.layers[i];
      LayerMemory& memory = layers_[i];
      const int64_t K = inputs(i), N = from.N;
      Layer layer;
      LayerGradient gradient;
      layer.K = K;
      layer.N = N;
      layer.act = from.act;
      layer.gated = from.gated;
      for (int half = 0; half < 1 + from.gated; ++half) {
        // Without a gate the product is `up`.
        Product& product = from.gated && half == 0 ? layer.gate : layer.up;
        ProductGradient& to = from.gated && half == 0 ? gradient.gate : gradient.up;
        product = {memory.weight[half].data(), from.turned ? 1 : K, from.turned ? N : 1,
                   memory.bias[half].data(), 1};
        to = {memory.weight_gradient[half].data(), from.turned ? 1 : K, from.turned ? N : 1,
              memory.bias_gradient[half].data(), 1};
      }
      TrainingLayer training;
      training.z = memory.z.data();
      training.up = memory.v.data();
      training.mask = test_.drops ? memory.mask.data() : nullptr;
      training.scale = kScale;
      layers_of_call_.push_back(layer);
      gradients_.push_back(gradient);
      training_.push_back(training);
    }
  }

  bool compare_forward() {
    bool good = true;
    for (size_t i = 0; i < layers_.size(); ++i) {
      const TestLayer& layer = test_.layers[i];
      LayerMemory& own = layers_[i];
      for (int64_t m = 0; m < test_.M; ++m)
        for (int64_t n = 0; n < layer.N; ++n) {
          double sums[2] = {};
          for (int half = 0; half < 1 + layer.gated; ++half) {
            for (int64_t k = 0; k < inputs(i); ++k)
              sums[half] += input(i, m, k) * weight(i, half, n, k);
            if (layer.biased) sums[half] += own.bias[half][size_t(n)];
            own.before[half].push_back(sums[half]);
          }
          const double value = value_of_act(layer.act, sums[0]) * (layer.gated ? sums[1] : 1);
          own.output.push_back(value * kept(i, m, n));
        }
      good &= agrees(test_.name, "z", own.z, own.before[0], dtype_);
      if (layer.gated) good &= agrees(test_.name, "v", own.v, own.before[1], dtype_);
    }
    return good & agrees(test_.name, "y", y_, layers_.back().output, dtype_);
  }

  bool compare_backward() {
    bool good = true;
    std::vector<double> d;
    for (size_t i = 0; i < grad_y_.size(); ++i) d.push_back(grad_y_[i]);
    for (size_t i = layers_.size(); i-- > 0;) {
      const TestLayer& layer = test_.layers[i];
      LayerMemory& own = layers_[i];
      const int64_t K = inputs(i), N = layer.N;
      std::vector<double> below(size_t(test_.M * K));
      for (int half = 0; half < 1 + layer.gated; ++half) {
        std::vector<double> weights(size_t(N * K)), biases(static_cast<size_t>(N));
        for (int64_t m = 0; m < test_.M; ++m)
          for (int64_t n = 0; n < N; ++n) {
            const size_t at = size_t(m * N + n);
            const double gate = own.before[0][at], given = d[at] * kept(i, m, n);
            double g = given * value_of_act(layer.act, gate);
            if (half == 0)
              g = given * slope_of_act(layer.act, gate) * (layer.gated ? own.before[1][at] : 1);
            own.gradient[half].push_back(g);
            biases[size_t(n)] += g;
            for (int64_t k = 0; k < K; ++k) {
              weights[size_t(layer.turned ? k * N + n : n * K + k)] += g * input(i, m, k);
              below[size_t(m * K + k)] += g * weight(i, half, n, k);
            }
          }
        good &=
            agrees(test_.name, "a weight's gradient", own.weight_gradient[half], weights, dtype_);
        if (layer.biased)
          good &= agrees(test_.name, "a bias's gradient", own.bias_gradient[half], biases, dtype_);
      }
      d = below;
    }
    return good & (!test_.input_gradient || agrees(test_.name, "x's gradient", grad_x_, d, dtype_));
  }

  // The last layer's pointwise parts, from its own pre-activations.
  bool compare_pointwise() {
    const size_t last = layers_.size() - 1;
    const TestLayer& layer = test_.layers[last];
    LayerMemory& own = layers_[last];
    const size_t size = size_t(test_.M * layer.N);
    Values again(dtype_, size, 1), gate(dtype_, size, 1), up(dtype_, size, 1),
        sums(dtype_, size_t(layer.N), 1), up_sums(dtype_, size_t(layer.N), 1);
    ActivateBackwardCall call;
    call.dtype = dtype_;
    call.M = test_.M;
    call.N = layer.N;
    call.act = layer.act;
    call.gated = layer.gated;
    call.gate = {own.z.data(), layer.N, 1};
    call.up = {own.v.data(), layer.N, 1};
    call.mask = test_.drops ? own.mask.data() : nullptr;
    call.scale = kScale;
    call.y = again.data();
    run_activate(call);
    bool good = agrees(test_.name, "pointwise y", again, own.output, dtype_);
    call.d = {grad_y_.data(), layer.N, 1};
    call.grad_gate = gate.data();
    call.grad_up = up.data();
    call.grad_m = layer.N;
    call.grad_n = 1;
    call.gate_sums = sums.data();
    call.up_sums = layer.gated ? up_sums.data() : nullptr;
    call.sums_stride = 1;
    const std::unique_ptr<float[]> workspace(new float[activate_backward_workspace(call)]);
    run_activate_backward(call, workspace.get());
    std::vector<double> expected(size_t(layer.N)), expected_up(expected);
    for (size_t i = 0; i < size; ++i) expected[i % size_t(layer.N)] += own.gradient[0][i];
    good &= agrees(test_.name, "pointwise gradient", gate, own.gradient[0], dtype_);
    good &= agrees(test_.name, "pointwise sums", sums, expected, dtype_);
    if (!layer.gated) return good;
    for (size_t i = 0; i < size; ++i) expected_up[i % size_t(layer.N)] += own.gradient[1][i];
    good &= agrees(test_.name, "pointwise gradient of up", up, own.gradient[1], dtype_);
    return good & agrees(test_.name, "pointwise sums of up", up_sums, expected_up, dtype_);
  }

  const TestCase& test_;
  const DType dtype_;
  Values x_, y_, grad_y_, grad_x_;
  std::vector<LayerMemory> layers_;
  std::vector<Layer> layers_of_call_;
  std::vector<LayerGradient> gradients_;
  std::vector<TrainingLayer> training_;
};

const std::vector<TestCase>& cases() {
  using A = Act;
  static const std::vector<TestCase> all{
      {"fp32",
       DType::f32,
       70,
       9,
       {{20, A::silu, false, true, false}, {5, A::tanh, false, true, true}}},
      {"bf16",
       DType::bf16,
       40,
       24,
       {{33, A::relu, false, true, false}, {8, A::identity, false, false, false}}},
      {"fp32 gated, through a panel",
       DType::f32,
       70,
       50,
       {{40, A::silu, true, true, false},
        {30, A::tanh, false, true, false},
        {7, A::silu, true, true, true}},
       52},
      {"fp16 gated, dropout, through a panel",
       DType::f16,
       35,
       80,
       {{70, A::silu, true, true, true}, {66, A::tanh, false, false, false}},
       68,
       true,
       true},
      {"fp32, no gradient of x",
       DType::f32,
       140,
       6,
       {{18, A::tanh, false, true, false}, {17, A::silu, false, true, false}},
       163,
       false},
      {"fp16 gated in parts",
       DType::f16,
       33,
       10,
       {{140, A::silu, true, false, false}, {3, A::identity, false, true, false}}},
  };
  return all;
}

// A device whose kernels have limits, as CUDA keeps them.
struct MadeRuntime {
  int* limit;

  int most_of_block() const { return 163 << 10; }
  int fixed_of(const void*) const { return 16; }
  void set_limit(const void*, int bytes) const { *limit = bytes; }
};
// Two threads ask one after the other, and launch then.
bool limits_of_shared_memory_hold() {
  int limit = int(kPlainShared);
  const MadeRuntime runtime{&limit};
  allow_shared(runtime, nullptr, kPlainShared);
  if (limit != int(kPlainShared)) return std::puts("a small block raised the limit") < 0;
  const size_t first = 100 << 10, second = 60 << 10;
  allow_shared(runtime, nullptr, first);
  allow_shared(runtime, nullptr, second);
  if (limit < int(first)) return std::puts("the second request took away the first one's") < 0;
  if (limit + 16 > 163 << 10) return std::puts("the limit is above the device's") < 0;
  return true;
}

}  // namespace

int main(int count, char** arguments) {
  const size_t most = count > 1 ? size_t(std::atoi(arguments[1])) : cases().size();
  size_t passed = 0, failed = 0;
  ++(limits_of_shared_memory_hold() ? passed : failed);
  for (size_t i = 0; i < std::min(most, cases().size()); ++i) {
    bool good = false;
    try {
      good = ChainTest(cases()[i]).passes();
    } catch (const std::exception& problem) {
      std::printf("%s: %s\n", cases()[i].name, problem.what());
    }
    ++(good ? passed : failed);
  }
  std::printf("%zu passed, %zu failed\n", passed, failed);
  return failed != 0;
}
