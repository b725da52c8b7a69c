"""What a model's own code asks about a call: modes, layouts, sizes.

What is asked has to be the same in every call that is served; what no two calls have in common
refuses the module.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import CodeType

from torchweld.welds.guarding.bytecode_names import line_of, names_of
from torchweld.welds.guarding.executed_code import is_users
from torchweld.welds.refusal_reasons import Refused, place_of_line

# What code may ask about a call besides its shapes: name in the code -> what has to be the same.
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
# What no call has in common with another.
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

# By these a tensor tells how large it is. What takes parts of it shows in the graph.
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
# Of torch.nn.modules: they do the same to every row.
_SIZELESS_MODULES = ("linear.py", "activation.py", "container.py", "dropout.py")


# Ways to go through all tensors of a module, so that one more would count.
TABLES_OF_TENSORS = frozenset(
    [
        *("parameters", "named_parameters", "buffers", "named_buffers", "state_dict"),
        *("_parameters", "_buffers"),
    ]
)


def asked_modes(codes: Iterable[CodeType], called: frozenset[str]) -> frozenset[str]:
    """Values of `MODES`; Refused if something is asked that calls do not share.

    `called` are C functions by their own names, under whatever name the code knows them.
    """
    modes = {MODES[name] for name in called if name in MODES}
    for name in sorted(called & _UNKNOWABLE):
        raise Refused(f"asks for {name}, which no two calls share")
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
            raise Refused(f"asks for {name}, which no two calls share", where=_place(code, name))
        modes |= {MODES[name] for name in asked if name in MODES}
    return frozenset(modes)


def asks_sizes(codes: Iterable[CodeType], called: frozenset[str]) -> bool:
    """Whether code may ask how large a tensor is, or arrange it otherwise."""
    if called & _SIZES:
        return True
    for code in codes:
        names = names_of(code)
        if is_users(code.co_filename):
            if _SIZES & (names.read | set(names.globals)):
                return True
        elif os.path.basename(code.co_filename) not in _SIZELESS_MODULES:
            return True  # nn.Flatten, say, which does nothing to two dimensions
    return False


def _place(code: CodeType, name: str) -> str:
    return place_of_line(code, line_of(code, name))
