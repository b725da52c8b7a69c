"""Products by the names of their kernels. The names are real: of the traces here, and as others
report them of their GPUs."""

from __future__ import annotations

import gzip
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.made_traces import TRACES

from torchweld.profiles.attributing.gemm_names import GemmName, gemm_of
from torchweld.profiles.attributing.kernel_names import category_of
from torchweld.profiles.recorded_events import KERNEL

CASES: dict[str, tuple[str, tuple[int, ...] | None, str | None, str | None, bool | None]] = {
    "ampere_sgemm_128x64_nn": ("cuBLAS", (128, 64), "nn", "float32", False),
    "ampere_sgemm_32x32_sliced1x4_tn": ("cuBLAS", (32, 32), "tn", "float32", False),
    "ampere_gcgemm_64x64_nt": ("cuBLAS", (64, 64), "nt", "complex64", False),
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_nn":
        ("cuBLAS", (128, 128, 64), "nn", "bfloat16", True),
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_relu_f2f_stages_64x3_nn":
        ("cuBLAS", (128, 128, 64), "nn", "bfloat16", True),
    "ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_32x3_tn":
        ("cuBLAS", (256, 128, 32), "tn", "bfloat16", True),
    "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4>"
    "(cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4::Params)":
        ("CUTLASS", (64, 64, 32), "tn", "tf32", True),
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>"
    "(Params)": ("CUTLASS", (256, 128, 32), "tn", "bfloat16", True),
    "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_32x6_nn_align8":
        ("CUTLASS", (64, 64, 32), "nn", "bfloat16", True),
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute":
        ("xmma", (128, 128, 64), "tn", "bfloat16", True),
    "sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize64x128x32_stage4":
        ("xmma", (64, 128, 32), "nn", "tf32", True),
    "sm89_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x64x64_stage3":
        ("xmma", (64, 64, 64), "tn", "float8", True),
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT": ("nvjet", (128, 256, 64), "tn", "bfloat16", True),
    "nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNN": ("nvjet", (64, 8, 64), "tn", "bfloat16", True),
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT": ("nvjet", (128, 256, 64), "nt", "float16", True),
    "nvjet_tst_256x96_64x5_2x1_2cta_v_badd_NNT": ("nvjet", (256, 96, 64), "nn", "bfloat16", True),
    "Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32_MI16x16x1_SN_LDSB0":
        ("Tensile", (64, 16, 32), "tn", "float32", True),
    "Cijk_Ailk_Bjlk_SB_Bias_AS_SAV_UserArgs_MT64x16x16_MI16x16x1_SN_LDSB0":
        ("Tensile", (64, 16, 16), "nt", "float32", True),
    "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 2, 2, false>(P)":
        ("cuBLAS", None, None, "float32", False),
    "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, float>":
        ("cuBLAS", None, None, "bfloat16", False),
    "void gemmk1_kernel<float, 256, 5, false, false>(cublasGemmk1Params<float>)":
        ("cuBLAS", None, None, "float32", False),
    "torchweld_linear": ("torchweld", None, None, None, None),
    "triton_tem_fused_addmm_0": ("Triton", None, None, None, None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_a_name_tells(name: str) -> None:
    maker, tile, layout, dtype, cores = CASES[name]
    found = gemm_of(name)
    assert found is not None
    assert (found.maker, found.tile, found.layout) == (maker, tile, layout)
    assert (found.dtype, found.tensor_cores) == (dtype, cores)


def test_stages() -> None:
    for name, stages in (
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_nn", 3),
        ("cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4", 6),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", 4),
        ("ampere_sgemm_128x64_nn", None),
    ):
        found = gemm_of(name)
        assert found is not None
        assert found.stages == stages


def test_in_words() -> None:
    found = gemm_of("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_nn")
    assert found is not None
    assert found.words == "cuBLAS 128x128x64 nn bfloat16, tensor cores"
    assert GemmName(maker="Triton").words == "Triton"


def names_of(trace: str) -> Counter[str]:
    data = json.loads(gzip.decompress((TRACES / trace).read_bytes()))
    return Counter(e["name"] for e in data["traceEvents"] if e.get("cat") in ("kernel", "Kernel"))


@pytest.mark.parametrize("trace", ["a100_training_step.json.gz", "mi250_toy_training.json.gz"])
def test_every_product_of_real_traces_is_read(trace: str) -> None:
    sums = ("splitKreduce", "epilogue::impl")
    products = [
        name
        for name in names_of(trace)
        if category_of(name, KERNEL) == "gemm" and not any(part in name for part in sums)
    ]
    assert len(products) >= 2
    for name in products:
        found = gemm_of(name)
        assert found is not None, name
        assert found.dtype is not None, name
        assert found.tensor_cores is not None, name
        assert found.tile is not None or "gemv" in name or "gemmk1" in name, name


@pytest.mark.parametrize(
    "name",
    [
        "void splitKreduce_kernel<float, float, float, float, true>(cublasSplitKParams<float>)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>",
        "triton_poi_fused_add_cos_sin_0",
        "Memcpy HtoD (Pinned -> Device)",
        "",
    ],
)
def test_what_is_no_product(name: str) -> None:
    assert gemm_of(name) is None


@given(st.text(max_size=80), st.sampled_from(sorted(CASES)))
def test_odd_names_raise_nothing(text: str, real: str) -> None:
    gemm_of(text)
    gemm_of(real[: len(text)] + text)
