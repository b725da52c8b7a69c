// What the ways of src/torchweld/ops/gpu need from C++: checks of what their ops are given, and the
// composition, for the type that their kernels do not compute in.
//
//   check_chain, check_saving, check_backward    refuse what does not fit, as the CPU's ops do.
//                                                `way` names the way; its kernels refuse float64.
//                                                "": what the device does without a plan, which
//                                                takes float64 too.
//   composed_chain, _saving, _backward           chain and its training as aten ops, on any device.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "composed_backward.h"
#include "training_checks.h"
#include "way_checks.h"

namespace torchweld {

namespace {

void check_type(const Tensor& x, std::string_view way) {
  if (!way.empty()) check_computed_by(x, way);
}
void check_chain(const Tensor& x, TensorList params, std::string_view text) {
  check_all<int64_t>(x, params, spec_without_dropout(text), false);
}
void check_saving(const Tensor& x, TensorList params, TensorList masks, std::string_view text,
                  std::string_view way) {
  const Spec& spec = spec_of(text);
  check_training(x, masks, spec, check_all<int64_t>(x, params, spec, false));
  check_type(x, way);
}
void check_gradients(const Tensor& grad, const Tensor& x, TensorList params, TensorList saved,
                     TensorList masks, std::string_view text, c10::List<bool> needed,
                     std::string_view way) {
  check_backward<int64_t>(grad, x, params, saved, masks, spec_of(text), needed.size(), false);
  check_type(x, way);
}

std::vector<Tensor> saving(const Tensor& x, TensorList params, TensorList masks,
                           std::string_view text, bool save) {
  return composed_saving(x, params, masks, spec_of(text), save);
}
std::vector<Tensor> backward(const Tensor& grad, const Tensor& x, TensorList params,
                             TensorList saved, TensorList masks, std::string_view text,
                             c10::List<bool> list) {
  const Flags needed = flags_of(list);
  return needed_only(
      composed_backward(grad, x, params, values_in(saved), masks, spec_of(text), needed.data()),
      needed.data());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  m.def("check_chain(Tensor x, Tensor[] params, str spec) -> ()");
  m.def("check_saving(Tensor x, Tensor[] params, Tensor[] masks, str spec, str way) -> ()");
  m.def(
      "check_backward(Tensor grad, Tensor x, Tensor[] params, Tensor[] saved, Tensor[] masks, "
      "str spec, bool[] needed, str way) -> ()");
  m.def("composed_chain(Tensor x, Tensor[] params, str spec) -> Tensor");
  m.def(
      "composed_saving(Tensor x, Tensor[] params, Tensor[] masks, str spec, bool save) -> "
      "Tensor[]");
  m.def(
      "composed_backward(Tensor grad, Tensor x, Tensor[] params, Tensor[] saved, Tensor[] masks, "
      "str spec, bool[] needed) -> Tensor[]");
}
void register_way_ops(torch::Library& m) {
  m.impl("check_chain", TORCH_FN(check_chain));
  m.impl("check_saving", TORCH_FN(check_saving));
  m.impl("check_backward", TORCH_FN(check_gradients));
  m.impl("composed_chain", TORCH_FN(composed_chain));
  m.impl("composed_saving", TORCH_FN(saving));
  m.impl("composed_backward", TORCH_FN(backward));
}
// The CPU stands in for a GPU in tests.
TORCH_LIBRARY_IMPL(torchweld, CPU, m) { register_way_ops(m); }
TORCH_LIBRARY_IMPL(torchweld, CUDA, m) { register_way_ops(m); }

}  // namespace torchweld
