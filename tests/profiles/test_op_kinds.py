"""What an op does, by its name."""

from __future__ import annotations

import pytest
import torch

from torchweld.profiles.attributing.op_kinds import IDLE_KINDS, KINDS, WORK_KINDS, kind_of

KNOWN = {
    "product": "aten::mm aten::addmm aten::addmm_ aten::bmm aten::baddbmm aten::mv aten::dot "
    "aten::addr aten::mkldnn_linear mkl::_mkl_linear aten::_int_mm quantized::linear_dynamic",
    "attention": "aten::_scaled_dot_product_flash_attention_for_cpu "
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward aten::_flash_attention_forward "
    "aten::_scaled_dot_product_efficient_attention flash_attn_2::flash_attn_fwd",
    "convolution": "aten::convolution aten::mkldnn_convolution aten::convolution_backward "
    "aten::cudnn_convolution aten::_slow_conv2d_forward aten::slow_conv_transpose2d",
    "pointwise": "aten::add aten::add_ aten::mul aten::relu aten::relu_ aten::gelu aten::gelu_ "
    "aten::gelu_backward aten::silu aten::silu_backward aten::tanh_backward aten::clamp_min "
    "aten::threshold_backward aten::where aten::masked_fill_ aten::hardswish aten::glu "
    "aten::copysign_ aten::elu_backward aten::hardtanh_backward aten::rsqrt aten::pow aten::eq_",
    "reduction": "aten::sum aten::mean aten::amax aten::argmax aten::max aten::cumsum aten::topk "
    "aten::nll_loss_forward aten::nll_loss_backward aten::max_pool2d_with_indices "
    "aten::_adaptive_avg_pool2d aten::linalg_vector_norm aten::var aten::logsumexp",
    "normalisation": "aten::native_layer_norm aten::native_layer_norm_backward aten::_softmax "
    "aten::_softmax_backward_data aten::_log_softmax aten::native_batch_norm aten::_fused_rms_norm "
    "aten::native_group_norm aten::cudnn_batch_norm",
    "copy": "aten::copy_ aten::clone aten::cat aten::_to_copy aten::stack aten::repeat "
    "aten::constant_pad_nd aten::slice_backward aten::view_copy aten::_local_scalar_dense "
    "torchweld::pack",
    "gather": "aten::embedding aten::embedding_dense_backward aten::index aten::index_select "
    "aten::index_put_ aten::_index_put_impl_ aten::gather aten::scatter_add_ aten::nonzero "
    "aten::masked_select aten::upsample_bilinear2d",
    "random": "aten::bernoulli_ aten::native_dropout aten::uniform_ aten::randn_like "
    "aten::multinomial aten::randperm",
    "fill": "aten::fill_ aten::zero_ aten::zeros aten::ones_like aten::full aten::arange aten::eye",
    "allocation": "aten::empty aten::empty_like aten::empty_strided aten::resize_ aten::new_empty",
    "metadata": "aten::view aten::_unsafe_view aten::t aten::transpose aten::as_strided "
    "aten::expand aten::slice aten::select aten::unsqueeze aten::squeeze_ aten::detach detach "
    "aten::detach_ aten::permute aten::split aten::unbind aten::alias aten::lift_fresh "
    "aten::resolve_conj aten::_fused_sdp_choice aten::_reshape_alias aten::unfold",
    "composite": "aten::linear aten::matmul aten::to aten::contiguous aten::reshape aten::dropout "
    "aten::softmax aten::layer_norm aten::conv2d aten::scaled_dot_product_attention aten::item "
    "aten::_scaled_dot_product_attention_math aten::cross_entropy_loss aten::einsum aten::lstm "
    "aten::flatten aten::chunk aten::type_as aten::rms_norm my_own_range "
    "Optimizer.step#AdamW.step enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
    "autograd": "AddmmBackward0 CompiledFunctionBackward torch::autograd::AccumulateGrad "
    "torch::autograd::CopyBackwards torch::autograd::GraphRoot",
    "fused": "torchweld::chain torchweld::group torchweld::chain_packed mkldnn::_linear_pointwise "
    "mkldnn::_convolution_pointwise graph_0_cpp_fused_gelu_0 cpp_fused_add_mul_1 "
    "triton_poi_fused_add_0 triton_red_fused_native_layer_norm_3",
    "optimizer": "aten::_foreach_add_ aten::_foreach_addcdiv_ aten::_fused_adamw_ "
    "aten::_fused_sgd_ aten::_amp_foreach_non_finite_check_and_unscale_",
    "communication": "nccl:all_reduce c10d::allreduce_ _c10d_functional::all_gather_into_tensor "
    "record_param_comms gloo:broadcast",
    "unknown": "mylib::something aten::linalg_qr aten::an_op_of_another_release",
}
WITH_SPACES = {
    "autograd::engine::evaluate_function: AddmmBackward0": "autograd",
    "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad": "autograd",
    "Torch-Compiled Region: 0/0": "dynamo",
    "TorchDynamo Cache Lookup": "dynamo",
    "Pregraph bytecode": "dynamo",
    "AOTDispatcher Runtime Wrapper Prologue": "dynamo",
    "## Call CompiledFxGraph fabc123 ##": "fused",
    "nccl:all_reduce": "communication",
    "a range of the user": "composite",
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for kind, names in KNOWN.items() for name in names.split()]
    + list(WITH_SPACES.items()),
)
def test_the_kind_of_an_op(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def all_aten_ops() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return sorted({name.partition(".")[0] for name in names if name.startswith("aten::")})


def test_every_op_of_this_torch_has_a_kind_and_few_are_unknown() -> None:
    names = all_aten_ops()
    assert len(names) > 1000
    unknown = [name for name in names if kind_of(name) == "unknown"]
    assert {kind_of(name) for name in names} <= set(KINDS)
    # Sparse, quantised and nested tensors, linear algebra, Fourier transforms.
    assert len(unknown) < len(names) / 6, unknown


def test_ops_that_torch_calls_core_are_known() -> None:
    """The set that every model can be written in."""
    found = set()
    for name in all_aten_ops():
        packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
        if any(torch.Tag.core in getattr(packet, o).tags for o in packet.overloads()):
            found.add(name)
    assert len(found) > 100
    assert {name for name in found if kind_of(name) == "unknown"} <= {
        "aten::_fft_c2r",
        "aten::_fft_r2c",
        "aten::_pdist_forward",
    }


def test_names_that_are_no_ops_do_no_harm() -> None:
    for name in ("", "::", "aten::", "::mm", "aten::__class__", "load_library::x", "a::b::c", "é"):
        assert kind_of(name) in KINDS


def test_kinds_that_work_and_kinds_that_do_not_are_all_kinds() -> None:
    assert set(KINDS) == WORK_KINDS | IDLE_KINDS
    assert not WORK_KINDS & IDLE_KINDS
