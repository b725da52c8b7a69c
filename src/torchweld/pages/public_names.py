"""Names that say nothing about a user's model: torch's own, vendors', and torchweld's own words.

A text on a page is made of torchweld's sentences and of names from models, traces and machines. The
words of its own sources are public; whatever else stands in a text is taken for a name.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import torch

import torchweld
from torchweld.profiles.attributing.kernel_names import is_generated

WORD = re.compile(r"[^\W\d]\w*")
# Kernels of torch and of vendors' libraries; those of Inductor list the ops that they compute.
_KERNELS = re.compile(
    r"(void )?(at::|c10::|cub::|thrust::|cutlass|cublas|cudnn|ampere_|volta_|turing_|maxwell_"
    r"|sm\d+_|nvjet|splitKreduce|gemm|flash_|pytorch_flash|fmha_|nccl|rccl|__amd_rocclr|Cijk_"
    r"|xmma_|cunn_|implicit_convolve|cask)"
)
_RUNTIME = re.compile(r"(cuda|hip|cu)[A-Z]\w*|Mem(cpy|set)( \([\w >-]+\)| \w+)*|ProfilerStep#\d+")
_OPS = re.compile(
    r"(aten|prims?|torchweld|torch|c10d|_c10d_functional|inductor|quantized|mkldnn)::[\w.:]+"
)
_NODE = re.compile(r"([A-Z]\w*?)Backward\d*")
ENGINES = ("engine: ", "autograd::engine::evaluate_function: ")


@cache
def own_words() -> frozenset[str]:
    """Every word in torchweld's own sources, in lower case."""
    found: set[str] = set()
    for path in Path(torchweld.__file__).parent.rglob("*.py"):
        found.update(map(str.lower, WORD.findall(path.read_text("utf-8"))))
    return frozenset(found)


def is_own_word(word: str) -> bool:
    return word.lower() in own_words()


def is_torch_class(name: str) -> bool:
    """Whether torch has a module of this class: Linear, ModuleList, AdamW."""
    holders = (torch.nn, torch.optim)
    return any(isinstance(getattr(holder, name, None), type) for holder in holders)


def is_public_op(name: str) -> bool:
    """An op, a node of torch's autograd, a call of a runtime or a kernel, none of them a user's."""
    for start in ENGINES:
        name = name.removeprefix(start)
    if _OPS.fullmatch(name) or _RUNTIME.fullmatch(name) or is_generated(name):
        return True
    node = _NODE.fullmatch(name)
    return _is_torch_op(node[1]) if node is not None else _KERNELS.match(name) is not None


@cache
def _is_torch_op(camel: str) -> bool:
    """ "NativeLayerNorm" is of aten::native_layer_norm, "UnsafeView" of aten::_unsafe_view."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", camel).lower()
    return any(hasattr(torch.ops.aten, name) for name in (snake, f"_{snake}", f"{snake}_"))
