"""Finds what a model's code asks about a call: modes, layouts, sizes.

In: the code that ran. Out: the modes it asks about, which a weld requires to be as recorded in
every call, and whether it asks for sizes. A module is refused if it asks for something that may
differ from call to call.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import CodeType

from torchweld.welds.guarding.bytecode_names import line_of, names_of
from torchweld.welds.guarding.executed_code import is_users
from torchweld.welds.refusal_reasons import Refused, place_of_line

# Modes that code may ask about, by the name in the code. At a call they must be the same.
MODES = {
    "is_grad_enabled": "grad",
    "is_inference_mode_enabled": "inference",
    "is_inference": "inference",
    "requires_grad": "requires_grad",
    "is_leaf": "requires_grad",
    "grad_fn": "requires_grad",
    "retains_grad": "requires_grad",
    "is_contiguous": "layout",
    "stride": "layout",
    "storage_offset": "layout",
    "get_default_dtype": "default_dtype",
    "is_compiling": "compiling",
    "is_dynamo_compiling": "compiling",
    "is_tracing": "compiling",
    "is_exporting": "compiling",
    "is_scripting": "compiling",
    "is_autocast_enabled": "autocast",
    "is_autocast_cpu_enabled": "autocast",
    "is_autocast_cache_enabled": "autocast",
}
# May differ from call to call, or cannot be compared.
_UNKNOWABLE = {
    *("data_ptr", "untyped_storage", "storage", "_typed_storage", "_version", "_base", "_cdata"),
    *("_is_view", "const_data_ptr", "get_rng_state", "initial_seed", "default_generator"),
    *("get_num_threads", "get_num_interop_threads", "current_stream", "is_shared", "is_pinned"),
    *("get_float32_matmul_precision", "are_deterministic_algorithms_enabled", "grad"),
    *("get_autocast_dtype", "get_autocast_cpu_dtype", "get_autocast_gpu_dtype"),
    *("__getattribute__", "__dict__", "attrgetter", "methodcaller", "getattr_static"),
    *("getmembers", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks"),
    *("_backward_pre_hooks", "_modules", "get_parameter", "get_buffer", "get_submodule"),
    # State of torch and of the process.
    *("backends", "is_anomaly_enabled", "is_initialized", "get_rank", "get_world_size"),
    *("get_deterministic_debug_mode", "is_deterministic_algorithms_warn_only_enabled"),
    *("current_thread", "get_ident", "getpid"),
}

# Names by which code learns how large a tensor is. Ops that take parts of it are in the graph.
_SIZES = frozenset(
    [
        *("shape", "size", "numel", "nelement", "dim", "ndim", "ndimension", "nbytes", "len"),
        *("__len__", "stride", "is_same_size", "element_size", "itemsize", "names", "sizes"),
        *("iter", "enumerate", "zip", "map", "list", "tuple", "repr", "str", "format", "tolist"),
        *("is_contiguous", "storage_offset", "sym_size", "sym_numel", "hash", "bool", "any"),
        *("flatten", "unflatten", "ravel", "view", "view_as", "reshape", "reshape_as", "squeeze"),
        *("unsqueeze", "t", "T", "mT", "H", "mH", "transpose", "permute", "movedim", "moveaxis"),
        *("swapaxes", "swapdims", "expand", "expand_as", "repeat", "broadcast_to", "tile"),
        *("contiguous", "memory_format", "narrow", "select", "chunk", "split", "unbind", "stack"),
        *("cat", "concat", "atleast_1d", "atleast_2d", "atleast_3d", "squeeze_", "t_", "set_"),
    ]
)
# Files of torch.nn.modules whose modules treat every row alike.
_SIZELESS_MODULES = ("linear.py", "activation.py", "container.py", "dropout.py")


# Ways to go through all tensors of a module; an added tensor would change the result.
TABLES_OF_TENSORS = frozenset(
    [
        *("parameters", "named_parameters", "buffers", "named_buffers", "state_dict"),
        *("_parameters", "_buffers"),
    ]
)


def asked_modes(codes: Iterable[CodeType], called: frozenset[str]) -> frozenset[str]:
    """Values of `MODES` that code asks about; Refused if it asks for what may differ.

    `called` are the real names of the C functions called, whatever the code calls them.
    """
    modes = {MODES[name] for name in called if name in MODES}
    for name in sorted(called & _UNKNOWABLE):
        raise Refused(f"asks for {name}, which can differ by call")
    for code in codes:
        if not is_users(code.co_filename):
            continue
        names = names_of(code)
        asked = names.read | frozenset(names.globals)
        if names.asks_class:
            raise Refused(
                "asks for the class of an object, which welding changes",
                where=_place(code, names.asks_class),
            )
        if names.passes_getattr:
            raise Refused("reads attributes by computed names", where=_place(code, "getattr"))
        for name in sorted(asked & _UNKNOWABLE):
            raise Refused(f"asks for {name}, which can differ by call", where=_place(code, name))
        modes |= {MODES[name] for name in asked if name in MODES}
    return frozenset(modes)


def asks_sizes(codes: Iterable[CodeType], called: frozenset[str]) -> bool:
    """Whether code may ask how large a tensor is, or rearrange it."""
    if called & _SIZES:
        return True
    for code in codes:
        names = names_of(code)
        if is_users(code.co_filename):
            if _SIZES & (names.read | set(names.globals)):
                return True
        elif os.path.basename(code.co_filename) not in _SIZELESS_MODULES:
            return True  # for example nn.Flatten, which leaves two dimensions as they are
    return False


def _place(code: CodeType, name: str) -> str:
    return place_of_line(code, line_of(code, name))
