"""What a kernel does, read from its name. A recording tells nothing else about it.

`category_of` for kernels on a device; `ops_inside("cpp_fused_add_gelu_1")` -> `("add", "gelu")` for
those that Inductor wrote, on a device or for the CPU.
"""

from __future__ import annotations

import re
from functools import cache

import torch

from torchweld.profiles.recorded_events import MEMCPY, MEMSET

# Moving data to, from and between devices, or filling memory: no computation.
NOT_COMPUTING = frozenset({"copy", "set", "communication"})

# The first pattern found in a kernel's name gives its category.
_CATEGORIES = tuple(
    (category, re.compile(pattern, re.IGNORECASE))
    for category, pattern in (
        # NCCL, RCCL and the like put their own name first; others name the collective.
        ("communication", r"^(void )?(nccl|rccl|msccl|nvshmem|oneccl)|cross_device_reduce"),
        ("communication", r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"),
        # Kernels that ROCm's runtime runs for its own copies and fills.
        ("copy", r"^__amd_rocclr_copy"),
        ("set", r"^__amd_rocclr_fill"),
        # Ours.
        ("gemm", r"\btorchweld_(cuda_)?(linear|narrow)"),
        ("pointwise", r"\btorchweld_(cuda_)?(pointwise|dropout)"),
        ("reduction", r"\btorchweld_cuda_gradient_sums"),
        # Inductor's; other Triton kernels have the name of the user's function.
        ("triton", r"^triton_"),
        ("attention", r"flash_|fmha|attention|attn|sdpa"),
        # cuBLAS and CUTLASS say gemm (nvjet from Hopper on), Tensile begins with Cijk. A product
        # whose K was split ends in a splitKreduce. FBGEMM's kernels for embeddings are no gemm.
        ("gemm", r"(?<!fb)gemm|gemv|gemm?k1|splitKreduce|^Cijk_|nvjet|\bdot_kernel"),
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


_SPLIT_SUM = re.compile(r"splitK_?reduce", re.IGNORECASE)


def adds_up_a_split(name: str) -> bool:
    """Whether it adds up the parts of a product whose K was split."""
    return _SPLIT_SUM.search(name) is not None


# "graph_0_cpp_fused_gelu_0", "triton_poi_fused_add_cos_sin_0": how it iterates, the ops it came
# from, a number. Old releases of Triton add a number per specialised argument: "_0d1d2d".
_GENERATED = re.compile(r"(?:graph_\d+_)?(?:cpp|triton(?:_[a-z]{3})?)_(?:fused_)?")
_NUMBER = re.compile(r"_\d+(?:d[\dd]*)?$")
# Inductor names ten ops at most, and no name of an op has ten words.
_MOST_WORDS = 100


def is_generated(name: str) -> bool:
    """Whether this is the name of a kernel that Inductor wrote."""
    return _GENERATED.match(name) is not None


@cache
def ops_inside(name: str) -> tuple[str, ...]:
    """The ops that a kernel of Inductor's computes, as its name lists them; () if it lists none.

    The name joins the ops' sorted names by underscores, which names have too: `fused__softmax_add`.
    So it is cut where that gives the fewest known names in order.
    """
    start = _GENERATED.match(name)
    if start is None or not start[0].endswith("_fused_"):
        return ()
    words = _NUMBER.sub("", name[start.end() - 1 :]).removeprefix("_").split("_")
    if len(words) > _MOST_WORDS:
        return ()
    known, longest = _op_names()
    # By position in `words`: the cheapest way to get there, one for each last name, since the next
    # has to sort after it. A word that is not an op costs more than any number of ops.
    ways: list[dict[str, tuple[int, tuple[str, ...]]]] = [{} for _ in range(len(words) + 1)]
    ways[0][""] = (0, ())
    for i in range(len(words)):
        for last, (cost, names) in ways[i].items():
            for end in range(i + 1, min(i + longest, len(words)) + 1):
                op = "_".join(words[i:end])
                if op in known and op > last:
                    price, now_last = 1, op
                elif end == i + 1:
                    price, now_last = len(words) + 1, last
                else:
                    continue
                way = (cost + price, (*names, op) if op else names)
                if now_last not in ways[end] or way < ways[end][now_last]:
                    ways[end][now_last] = way
    return min(ways[-1].values())[1]


@cache
def _op_names() -> tuple[frozenset[str], int]:
    """Names of torch's ops, and the most words in one. Without them, names come word by word."""
    listed = getattr(torch._C, "_dispatch_get_all_op_names", None)
    parts = (name.partition("::") for name in (listed() if listed is not None else ()))
    names = frozenset(
        name.partition(".")[0] for space, _, name in parts if space in ("aten", "prims")
    )
    return names, max((name.count("_") + 1 for name in names), default=1)
