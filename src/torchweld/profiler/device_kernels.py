"""What a kernel does, read from its name: the only thing that a trace tells of it."""

from __future__ import annotations

import re
from functools import cache

import torch

from torchweld.profiler.events import MEMCPY, MEMSET

# Moving data to, from and between devices, or filling memory: no computation.
NOT_COMPUTING = frozenset({"copy", "set", "communication"})

# The first pattern found in a kernel's name gives its category.
_CATEGORIES = tuple(
    (category, re.compile(pattern, re.IGNORECASE))
    for category, pattern in (
        # NCCL, RCCL and their like put their own name first; others name the collective.
        ("communication", r"^(void )?(nccl|rccl|msccl|nvshmem|oneccl)|cross_device_reduce"),
        ("communication", r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"),
        # What ROCm's runtime runs for a copy or a fill of its own.
        ("copy", r"^__amd_rocclr_copy"),
        ("set", r"^__amd_rocclr_fill"),
        # Inductor's; other Triton kernels have the name of the user's function.
        ("triton", r"^triton_"),
        ("attention", r"flash_|fmha|attention|attn|sdpa"),
        # cuBLAS and CUTLASS say gemm (nvjet from Hopper on), Tensile begins with Cijk. A product
        # whose K was split ends in a splitKreduce.
        ("gemm", r"gemm|gemv|gemm?k1|splitKreduce|^Cijk_|nvjet|\bdot_kernel"),
        ("reduction", r"reduce|softmax|norm_|_norm|LayerNorm|RowwiseMoments|GammaBeta|batch_norm"),
        ("reduction", r"cumsum|argmax|argmin|DeviceScan"),
        ("pointwise", r"elementwise|multi_tensor_apply|CatArray|copy_kernel|fused_dropout"),
    )
)


@cache
def category_of(name: str, kind: str) -> str:
    """gemm, attention, pointwise, reduction, copy, set, communication, triton or other.

    `kind` is from the event's "cat": a memcpy is a copy and a memset a set, whatever their names.
    """
    if kind == MEMCPY:
        return "copy"
    if kind == MEMSET:
        return "set"
    return next((category for category, found in _CATEGORIES if found.search(name)), "other")


# "triton_poi_fused_add_cos_sin_0": how it iterates, the ops it came from, a number.
_FUSED = re.compile(r"^triton_[a-z]+_fused_(\w+?)(_\d+)?$")


@cache
def ops_inside(name: str) -> tuple[str, ...]:
    """The ops that Inductor names in a fused kernel: ("add", "cos", "sin").

    Inductor joins the names with underscores, which names have too; of the ways to take them apart
    the one with the longest names of aten ops is chosen, from the left.
    """
    match = _FUSED.match(name)
    if match is None:
        return ()
    words = match[1].split("_")
    known = _aten_ops()
    found = []
    at = 0
    while at < len(words):
        end = next(
            (end for end in range(len(words), at, -1) if "_".join(words[at:end]) in known), at + 1
        )
        if word := "_".join(words[at:end]):
            found.append(word)
        at = end
    return tuple(found)


@cache
def _aten_ops() -> frozenset[str]:
    """Names of aten's ops. Without them, names of several words come word by word."""
    listed = getattr(torch._C, "_dispatch_get_all_op_names", None)
    names = listed() if listed is not None else ()
    return frozenset(
        name.removeprefix("aten::").partition(".")[0] for name in names if name.startswith("aten::")
    )
