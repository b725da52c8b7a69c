"""What a kernel's name tells: its category, and the ops that a compiler put inside."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweld.profiles.attributing import kernel_names
from torchweld.profiles.attributing.kernel_names import category_of, is_generated, ops_inside
from torchweld.profiles.recorded_events import KERNEL, MEMCPY, MEMSET


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_16x6_nn>(Params)", "gemm"),
        ("ampere_sgemm_128x64_nn", "gemm"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT", "gemm"),
        ("Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32", "gemm"),
        ("void gemv2T_kernel_val<int, int, float>(cublasGemvParams)", "gemm"),
        ("void splitKreduce_kernel<float, float>(cublasSplitKParams<float>)", "gemm"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "pointwise"),
        ("void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>", "pointwise"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>", "pointwise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reduction"),
        ("void at::native::vectorized_layer_norm_kernel<float>", "reduction"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>", "reduction"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage)", "communication"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>", "communication"),
        ("triton_red_fused_native_layer_norm_3", "triton"),
        ("void at::native::indexing_backward_kernel<float, 4>", "other"),
        ("void fbgemm_gpu::permute_2D_lengths_kernel<int>(int, int, int const*)", "other"),
        ("void torchweld::cuda::torchweld_cuda_narrow<float>(NarrowChain, float*)", "gemm"),
        ("void torchweld::cuda::torchweld_cuda_pointwise<bf16_t>(Pointwise)", "pointwise"),
        ("void torchweld::cuda::torchweld_cuda_gradient_sums<float>(SummedParts)", "reduction"),
        ("torchweld_linear", "gemm"),
        ("torchweld_linear_backward", "gemm"),
        ("torchweld_narrow", "gemm"),
        ("torchweld_pointwise", "pointwise"),
        ("torchweld_pointwise_backward", "pointwise"),
        ("torchweld_dropout_mask", "pointwise"),
    ],
)  # fmt: skip
def test_the_category_of_a_kernel_is_in_its_name(name: str, category: str) -> None:
    assert category_of(name, KERNEL) == category


def test_a_copy_is_a_copy_whatever_its_name() -> None:
    assert category_of("gemm", MEMCPY) == "copy"
    assert category_of("gemm", MEMSET) == "set"


@pytest.mark.parametrize(
    ("name", "ops"),
    [
        ("cpp_fused_add_gelu_1", ("add", "gelu")),
        ("cpp_fused_relu_0", ("relu",)),
        ("cpp_fused__softmax_add_12", ("_softmax", "add")),
        ("cpp_fused_gelu_gelu_backward_sum_1", ("gelu", "gelu_backward", "sum")),
        ("cpp_fused_add_frobnicate_mul_0", ("add", "frobnicate", "mul")),
        ("graph_0_cpp_fused_gelu_0", ("gelu",)),
        ("cpp_fused_0", ()),
        ("triton_poi_fused_add_cos_sin_0", ("add", "cos", "sin")),
        ("triton_per_fused_native_layer_norm_2", ("native_layer_norm",)),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0",
         ("_to_copy", "add", "mean", "mul", "pow", "rsqrt")),
        ("triton_red_fused_add_native_layer_norm_native_layer_norm_backward_11",
         ("add", "native_layer_norm", "native_layer_norm_backward")),
        ("triton_tem_fused_addmm_relu_threshold_backward_4",
         ("addmm", "relu", "threshold_backward")),
        ("triton_poi_fused_gelu", ("gelu",)),
        ("triton_poi_fused_add_0d1d2d", ("add",)),
        ("triton_fused_add_3", ("add",)),
    ],
)  # fmt: skip
def test_the_name_of_a_generated_kernel_tells_its_ops(name: str, ops: tuple[str, ...]) -> None:
    assert is_generated(name)
    assert ops_inside(name) == ops


@pytest.mark.parametrize(
    "name", ["", "volta_sgemm_128x64_nn", "void mine::rms_norm_fused_add_kernel<float>", "aten::mm"]
)
def test_other_names_tell_of_no_ops(name: str) -> None:
    assert not is_generated(name)
    assert ops_inside(name) == ()


def test_a_name_as_long_as_no_compiler_writes_is_not_searched() -> None:
    assert ops_inside("triton_poi_fused_" + "a_" * 50_000) == ()


KNOWN, _ = kernel_names._op_names()


@given(st.sets(st.sampled_from(sorted(KNOWN)), min_size=1, max_size=6))
def test_a_name_is_cut_into_known_ops_and_nothing_is_lost(ops: set[str]) -> None:
    name = "triton_poi_fused_" + "_".join(sorted(ops)) + "_7"
    found = ops_inside(name)
    assert "_".join(found) == "_".join(sorted(ops))
    assert set(found) <= KNOWN
    assert len(found) <= len(ops)
