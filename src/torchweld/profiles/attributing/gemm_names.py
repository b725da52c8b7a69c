"""A matrix product's kernel by its name: whose it is, tile, layout, type, tensor cores or not.

cuBLAS, CUTLASS, cuDNN's xmma, nvjet (Hopper and later), Tensile (ROCm), Inductor's and our Triton
kernels. What a name does not say is None: nothing is guessed.

    ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_nn
           A type, sum in fp32, instruction 16x8x16, tile 128x128x64, three stages, layout nn
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from torchweld.profiles.attributing.kernel_names import adds_up_a_split


@dataclass(frozen=True, kw_only=True)
class GemmName:
    """What the name of a product's kernel tells.

    maker:        cuBLAS, CUTLASS, xmma, nvjet, Tensile, Triton, torchweld
    tile:         M, N, and K where the name has it
    stages:       steps along K in flight
    layout:       of the operands as the library has them, columns first: n, or t for transposed
    dtype:        what is multiplied: bfloat16, float16, tf32, float32, float64, float8, complex64
    tensor_cores: or AMD's matrix cores
    """

    maker: str
    tile: tuple[int, ...] | None = None
    stages: int | None = None
    layout: str | None = None
    dtype: str | None = None
    tensor_cores: bool | None = None

    @property
    def words(self) -> str:
        """`cuBLAS 128x128x64 nn bfloat16, tensor cores`."""
        parts = [
            self.maker,
            "x".join(map(str, self.tile)) if self.tile else "",
            self.layout or "",
            self.dtype or "",
        ]
        cores = {True: "tensor cores", False: "no tensor cores", None: ""}[self.tensor_cores]
        return ", ".join(part for part in (" ".join(filter(None, parts)), cores) if part)


# ---- pieces of names ----

_TYPES = {
    **dict.fromkeys(("bf16", "bfloat16", "__nv_bfloat16"), "bfloat16"),
    **dict.fromkeys(("f16", "fp16", "h", "half", "__half"), "float16"),
    **dict.fromkeys(("f32", "s", "float"), "float32"),
    **dict.fromkeys(("f64", "d", "double"), "float64"),
    **dict.fromkeys(("e4m3", "e5m2"), "float8"),
    "tf32": "tf32",
}
_TILE = re.compile(r"_(\d+)x(\d+)(?:x(\d+))?(?=_|$)")
# CUTLASS: a tile of M x N, then a step of K x stages.
_TILE_AND_STEP = re.compile(r"_(\d+)x(\d+)_(\d+)x(\d+)(?=_|$)")
_STAGES = re.compile(r"_stages_(\d+)x(\d+)")
_LAYOUT = re.compile(r"_([nt][nt])(?=_|$|>|\(|[nt]_)")


def _layout(name: str) -> str | None:
    found = _LAYOUT.search(name)
    return found[1] if found else None


# ---- one reader for each maker ----

# ampere_sgemm_128x64_nn, volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn, ampere_gcgemm_64x64_nt
_CUBLAS = re.compile(
    r"^(?:maxwell|pascal|volta|turing|ampere|ada|hopper|blackwell)_"
    r"(?:(?P<type>bf16|fp16|tf32|int8)_)?(?P<sum>gc|c|z|[sdhi])?(?P<shape>\d{3,5})?gemm"
)


def _cublas(name: str) -> GemmName | None:
    found = _CUBLAS.match(name)
    if found is None:
        return None
    tile, steps = _TILE.search(name), _STAGES.search(name)
    sizes: tuple[int, ...] | None = (int(tile[1]), int(tile[2])) if tile else None
    if sizes and steps:
        sizes = (*sizes, int(steps[1]))
    if found["type"]:
        dtype = _TYPES.get(found["type"])
    elif found["shape"]:  # h1688gemm, and s1688gemm of fp32: TF32
        dtype = {"h": "float16", "s": "tf32", "d": "float64"}.get(found["sum"] or "")
    else:
        plain = {"s": "float32", "d": "float64", "h": "float16", "gc": "complex64"}
        dtype = {**plain, "c": "complex64", "z": "complex128"}.get(found["sum"] or "")
    return GemmName(
        maker="cuBLAS",
        tile=sizes,
        stages=int(steps[2]) if steps else None,
        layout=_layout(name),
        dtype=dtype,
        tensor_cores=bool(found["shape"]),
    )


# cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8, cutlass_80_simt_sgemm_…
_CUTLASS_2 = re.compile(
    r"cutlass_\d+_(?P<unit>wmma_tensorop|tensorop|simt)_(?:(?P<type>bf16|f16|tf32|e4m3|e5m2)_)?"
    r"(?P<sum>[sdhicz])(?P<shape>\d+)?gemm"
)
# cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_void_bf16_128x128x64_2x1x1_0_tnn_align8
_CUTLASS_3 = re.compile(
    r"cutlass3x_sm\d+_(?P<unit>tensorop|simt)_[a-z]*\d+x\d+x\d+gemm_(?P<type>[a-z0-9]+)_"
)


def _cutlass(name: str) -> GemmName | None:
    found = _CUTLASS_2.search(name)
    if found is not None:
        rest = name[found.end() :]
        tile = _TILE_AND_STEP.search(rest)
        kind = found["type"]
        plain = {"s": "tf32" if found["shape"] else "float32", "d": "float64", "h": "float16"}
        return GemmName(
            maker="CUTLASS",
            tile=(int(tile[1]), int(tile[2]), int(tile[3])) if tile else None,
            stages=int(tile[4]) if tile else None,
            layout=_layout(rest),
            dtype=_TYPES.get(kind) if kind else plain.get(found["sum"]),
            tensor_cores=found["unit"] != "simt",
        )
    found = _CUTLASS_3.search(name)
    if found is None:
        return None
    rest = name[found.end() :]
    sizes = _TILE.search(rest)
    return GemmName(
        maker="CUTLASS",
        tile=tuple(int(n) for n in sizes.groups() if n) if sizes else None,
        layout=_layout(rest),
        dtype=_TYPES.get(found["type"]),
        tensor_cores=found["unit"] == "tensorop",
    )


# sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_stage3_…_tensor16x8x16_…
_XMMA = re.compile(
    r"^sm\d+_xmma_gemm_(?P<ends>[a-z0-9]+)_(?P<type>bf16|f16|tf32|f32|f64|e4m3|e5m2)[a-z0-9]*_"
)


def _xmma(name: str) -> GemmName | None:
    found = _XMMA.match(name)
    if found is None:
        return None
    tile, stage = re.search(r"tilesize(\d+)x(\d+)x(\d+)", name), re.search(r"_stage(\d+)", name)
    dtype = _TYPES[found["type"]]
    on_cores: bool | None = None
    if re.search(r"_tensor\d|warpgroupsize", name) or dtype in ("bfloat16", "tf32", "float8"):
        on_cores = True
    elif "_simt" in name or "_ffma" in name:
        on_cores = False
    return GemmName(
        maker="xmma",
        tile=(int(tile[1]), int(tile[2]), int(tile[3])) if tile else None,
        stages=int(stage[1]) if stage else None,
        layout=_layout(name[found.end() - 1 :]),
        dtype=dtype,
        tensor_cores=on_cores,
    )


# nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT: types of input, sum and output; layouts of A, B, C
_NVJET = re.compile(r"^nvjet(?:_sm\d+)?_(?P<types>[a-z]+)_(\d+)x(\d+)_(\d+)x(\d+)_")
_NVJET_TYPES = {"t": "bfloat16", "h": "float16", "q": "float8", "d": "float64"}


def _nvjet(name: str) -> GemmName | None:
    found = _NVJET.match(name)
    if found is None:
        return GemmName(maker="nvjet", tensor_cores=True) if name.startswith("nvjet_") else None
    layout = re.search(r"_([NT]{2})[NT]$", name)
    return GemmName(
        maker="nvjet",
        tile=(int(found[2]), int(found[3]), int(found[4])),
        stages=int(found[5]),
        layout=layout[1].lower() if layout else None,
        dtype=_NVJET_TYPES.get(found["types"][0]),
        tensor_cores=True,
    )


# Cijk_Alik_Bljk_BBS_BH_…_MT128x64x32_MI16x16x16x1_…: indices say what is transposed
_TENSILE = re.compile(r"^Cijk_A(?P<a>lik|ilk)_B(?P<b>ljk|jlk)_(?P<type>[A-Z0-9]+?)_")
_TENSILE_TYPES = {"B": "bfloat16", "H": "float16", "S": "float32", "D": "float64", "F": "float8"}


def _tensile(name: str) -> GemmName | None:
    found = _TENSILE.match(name)
    if found is None:
        return None
    tile = re.search(r"_MT(\d+)x(\d+)x(\d+)", name)
    matrix = re.search(r"_MI(\d+)x", name)
    layout = ("t" if found["a"] == "lik" else "n") + ("n" if found["b"] == "ljk" else "t")
    return GemmName(
        maker="Tensile",
        tile=(int(tile[1]), int(tile[2]), int(tile[3])) if tile else None,
        layout=layout,
        dtype=_TENSILE_TYPES.get(found["type"][0]),
        tensor_cores=int(matrix[1]) > 0 if matrix else None,
    )


# gemv2T_kernel_val<int, int, float, …>, internal::gemvx::kernel<int, int, __nv_bfloat16, …>,
# gemmk1_kernel<float, …>, dot_kernel<float, …>
_VECTOR = re.compile(r"\b(?:gemv\w*|gemvx::kernel|gemmk1_kernel|dot_kernel)<(?P<types>[^>]*)")


def _vector(name: str) -> GemmName | None:
    found = _VECTOR.search(name)
    if found is None:
        return None
    types = (one.strip() for one in found["types"].split(","))
    dtype = next((_TYPES[one] for one in types if one in _TYPES), None)
    return GemmName(maker="cuBLAS", dtype=dtype, tensor_cores=False)


_OURS = re.compile(r"\btorchweld_(?:cuda_)?(?:linear|narrow)")


def _triton(name: str) -> GemmName | None:
    if _OURS.search(name):
        return GemmName(maker="torchweld")
    return GemmName(maker="Triton") if name.startswith("triton_tem_") else None


_READERS: tuple[Callable[[str], GemmName | None], ...] = (
    *(_cublas, _cutlass, _xmma, _nvjet, _tensile, _vector, _triton),
)


@cache
def gemm_of(name: str) -> GemmName | None:
    """The product that a kernel's name tells; None if it is of another kind, or not understood."""
    if adds_up_a_split(name):
        return None
    return next((found for read in _READERS if (found := read(name)) is not None), None)
