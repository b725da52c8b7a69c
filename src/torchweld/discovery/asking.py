"""What a model's own code asks about a call: modes, layouts, sizes.

What is asked has to be the same in every call that is served; what no two calls have in common
refuses the module.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import CodeType

from torchweld.discovery.bytecode import line_of, names_of
from torchweld.discovery.executing import is_users
from torchweld.discovery.reasons import Refused, place_of_line

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
    *("__getattribute__", "__dict__"),
}

# By these a tensor tells how large it is. What takes parts of it shows in the graph.
_SIZES = frozenset(
    [
        *("shape", "size", "numel", "nelement", "dim", "ndim", "ndimension", "nbytes", "len"),
        *("__len__", "stride", "is_same_size", "element_size", "itemsize", "names", "sizes"),
        *("iter", "enumerate", "zip", "map", "list", "tuple", "repr", "str", "format", "tolist"),
        *("is_contiguous", "storage_offset", "sym_size", "sym_numel", "hash", "bool", "any"),
    ]
)


def asked_modes(codes: Iterable[CodeType]) -> frozenset[str]:
    """Values of `MODES`; Refused if something is asked that calls do not share."""
    modes: set[str] = set()
    for code in codes:
        if not is_users(code.co_filename):
            continue
        names = names_of(code)
        asked = names.attributes | frozenset(names.globals)
        if names.asks_class:
            raise Refused(
                "asks for the class of an object, which welding changes",
                where=_place(code, names.asks_class),
            )
        for name in sorted(asked & _UNKNOWABLE):
            raise Refused(f"asks for {name}, which no two calls share", where=_place(code, name))
        modes |= {MODES[name] for name in asked if name in MODES}
    return frozenset(modes)


def asks_sizes(codes: Iterable[CodeType]) -> bool:
    """Whether code may ask how large a tensor is."""
    users = [names_of(code) for code in codes if is_users(code.co_filename)]
    return any(_SIZES & (names.read | set(names.globals)) for names in users)


def _place(code: CodeType, name: str) -> str:
    return place_of_line(code, line_of(code, name))
