"""Names that say nothing about a user's model: torch's own, vendors', and torchweld's own words.

A text on a page is made of torchweld's sentences and of names from models, traces and machines.
The words of its own sentences are public; whatever else stands in a text is taken for a name. How a
name begins tells nothing: `flash_attn_of_a_company` begins as a public kernel does. So a name
passes only if it is known as a whole, or if every word in it is.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from types import ModuleType

import torch
from torch.nn import functional

import torchweld
from torchweld.pages.public_words import WORD as WORD
from torchweld.pages.public_words import aten_names, of_kernel_words, op_names, own_words
from torchweld.profiles.attributing.kernel_names import ops_inside

# Kernels of torch and of vendors' libraries.
_KERNELS = re.compile(
    r"(void |std::enable_if<[^>]*>::type )?"
    r"(at::|c10::|cub::|thrust::|cutlass|cublas|cudnn|cask_cudnn::|cask__|ampere_|volta_|turing_"
    r"|maxwell_|hopper_|sm\d+_|nvjet|splitKreduce|gemm|internal::gemvx::|gemv|dot_kernel"
    r"|flash_|flash::|pytorch_flash::|fmha_|nccl|rccl|__amd_rocclr|Cijk_|xmma_|cunn_"
    r"|implicit_convolve|cask|epilogue::impl::|fft2d_|torchweld_)"
)
# Kernels that Inductor writes: how they iterate, the ops they came from, a number.
_GENERATED = re.compile(
    r"(?:graph_\d+_)?(?:cpp|triton_(?:poi|red|per|tem|for|spl|mix|ngs)?)_?"
    r"(?P<ops>fused_\w+?)?_\d+(?:d[\dd]*)?"
)
_RUNTIME = re.compile(r"(?:cuda|hip|cu)((?:[A-Z][a-z]*|\d+)+)")
_RUNTIME_WORDS = frozenset(
    """
    Access Active Address Alloc Arch Array Async At Attribute Attributes Available Back Base
    Batch Begin Block Blocks Bus By Cache Callback Can Capture Capturing Carveout Clear Cluster
    Code Config Context Control Convert Cooperative Copy Count Create Ctx Current Data Default
    Destroy Device Devices Dim Disable Driver Edge Elapsed Enable End Entry Error Event Ex Exec
    Export Ext Extent External Flags Flush For Free From Func Function Get Global Graph Graphs
    Handle Has Host Id Import Info Init Instantiate Ipc Is Kernel Kernels Last Launch Launches
    Level Library Limit Linear List Load Loading Main Malloc Managed Map Max Mem Memcpy Memory
    Memset Method Mode Module Multi Multiprocessor Name Node Nodes Num Occupancy Of On Opaque
    Open Param Params Peek Peer Per Pitch Pointer Pointers Pool Pop Prefetch Primary Priority
    Process Properties Property Push Query Range Record Register Release Remove Reserve Reset
    Resource Retain Runtime Set Shared Signal Size Stream Support Symbol Sync Synchronize Table
    Tensor Texture Thread Threads To Trim Unload Unmap Unregister Update Usage Use User Value
    Values Version Wait With Write
    """.split()  # noqa: SIM905 (as in public_words)
)
_KINDS_OF_MEMORY = r"(?:Pageable|Pinned|Device|Host|Array|Managed|Unified|Unknown)"
_FIXED = re.compile(
    rf"Memcpy (?:HtoD|DtoH|DtoD|HtoH|PtoP|HtoA|AtoH|DtoA|AtoD|AtoA)"
    rf"(?: \({_KINDS_OF_MEMORY} -> {_KINDS_OF_MEMORY}\))?"
    rf"|Memset(?: \({_KINDS_OF_MEMORY}\))?|ProfilerStep#\d+|Torch-Compiled Region: \d+/\d+"
    r"|TorchDynamo Cache Lookup|(?:Context|Stream|Event) Sync|Stream Wait Event|INVALID"
    r"|torch::autograd::(?:AccumulateGrad|GraphRoot|CopySlices|UndefinedGrad|Error)"
    r"|record_param_comms|is_leaf|DistributedDataParallel\.forward"
)
_COLLECTIVE = re.compile(r"(?:nccl|gloo|mpi|ucc):([a-z_]+)")
_OPTIMIZER = re.compile(r"Optimizer\.(?:step|zero_grad)#(\w+)\.(?:step|zero_grad)")
# A user may register ops too, but not in these.
_SPACES = frozenset(
    (
        *("aten", "prim", "prims", "torchweld", "c10d", "_c10d_functional", "symm_mem"),
        *("_c10d_functional_autograd", "inductor", "inductor_prims", "quantized", "quantization"),
        *("mkldnn", "mkldnn_prepacked", "mkl", "onednn", "profiler", "rngprims", "sparse"),
        *("static_runtime", "torch"),
    )
)
_NODE = re.compile(r"([A-Z]\w*?)Backward\d*")
ENGINES = ("engine: ", "autograd::engine::evaluate_function: ")
# What sentences call parts of torch.
_LIBRARIES: dict[str, ModuleType] = {
    "torch": torch,
    "nn": torch.nn,
    "F": functional,
}


def is_own_word(word: str) -> bool:
    return word.lower() in own_words()


def is_torch_class(name: str) -> bool:
    """Whether torch has a module of this class: Linear, torch.nn.ModuleList, AdamW."""
    space, _, last = name.rpartition(".")
    public = not space or re.fullmatch(r"(torch\.)?(nn|optim)(\.modules\.\w+)?", space)
    holders = (torch.nn, torch.optim)
    return bool(public) and any(isinstance(vars(one).get(last), type) for one in holders)


def is_public_op(name: str) -> bool:
    """Whether it is an op, a node of autograd, a runtime's call or a kernel, none a user's."""
    for start in ENGINES:
        name = name.removeprefix(start)
    if _FIXED.fullmatch(name) or name in aten_names():
        return True
    if (found := _COLLECTIVE.fullmatch(name)) is not None:
        return of_kernel_words(found[1])
    if (found := _OPTIMIZER.fullmatch(name)) is not None:
        return is_torch_class(found[1])
    if (found := _RUNTIME.fullmatch(name)) is not None:
        return all(w in _RUNTIME_WORDS for w in re.findall(r"[A-Z][a-z]+", found[1]))
    if (found := _GENERATED.fullmatch(name)) is not None:
        return found["ops"] is None or _computes_known_ops(name)
    if (found := _NODE.fullmatch(name)) is not None:
        return _is_torch_op(found[1])
    return _is_registered(name) or (_KERNELS.match(name) is not None and of_kernel_words(name))


def _is_registered(name: str) -> bool:
    """ "aten::mm", or with an overload "aten::add.Tensor"."""
    return name.partition("::")[0] in _SPACES and name in _registered()


@cache
def _registered() -> frozenset[str]:
    names = op_names()
    return frozenset((*names, *(name.partition(".")[0] for name in names)))


def _computes_known_ops(name: str) -> bool:
    """Whether every op that the name of a kernel of Inductor's lists is torch's."""
    found = ops_inside(name)
    return bool(found) and all(op in aten_names() for op in found)


@cache
def _is_torch_op(camel: str) -> bool:
    """ "NativeLayerNorm" is of aten::native_layer_norm, "UnsafeView" of aten::_unsafe_view."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", camel).lower()
    return any(name in aten_names() for name in (snake, f"_{snake}", f"{snake}_"))


def is_library_path(text: str) -> bool:
    """Whether it is of torch or torchweld: "torch.compile", "torch.ops.aten.mm"."""
    first, *others = text.split(".")
    if (first, *others[:1]) == ("torch", "ops"):
        first, *others = others[1:] or ("",)
        return first in _SPACES and (not others or f"{first}::{'.'.join(others)}" in _registered())
    if first == "aten":
        return f"aten::{'.'.join(others).removesuffix('.default')}" in _registered()
    if first in ("tw", "torchweld"):  # it gets most of its names when they are asked for
        return len(others) == 1 and others[0] in dir(torchweld)
    holder: object = _LIBRARIES.get(first)
    for part in others:
        # Not `getattr`: namespaces of torch make up whatever they are asked for.
        holder = inspect.getattr_static(holder, part, None) if holder is not None else None
    return holder is not None and bool(others)
