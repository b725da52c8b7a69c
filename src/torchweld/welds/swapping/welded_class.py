"""The class of a welded module: a subclass of the module's own, made once for each class.

Welding assigns it to the instance's `__class__`; everything but `forward` is inherited, and what
is kept stands in the instance's `__dict__` under one name. So `isinstance`, parameters, names and
hooks stay as they are. Pickles name the original class and weld what was loaded again.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from torchweld.core.errors import RefusedError
from torchweld.ops import compiled_forward
from torchweld.welds.swapping.graph_capture import record, recording
from torchweld.welds.swapping.joint import Joint
from torchweld.welds.weld_marks import KEY

Forward = Callable[..., Any]


class Welded(nn.Module):
    """What welded classes have in common; stands before the module's own class."""

    # Stands in the instance's __dict__; None in an instance that the module's own code created.
    _torchweld: Joint | None = None
    # Tells whoever watches calls to leave the modules inside alone: if one of them is changed, the
    # original code runs, and the welded module is not what is watched.
    runs_whole = True

    def __init_subclass__(cls) -> None:
        """Does not call the base's: a class that lists its subclasses must not list ours."""

    def train(self, mode: bool = True) -> Any:
        joint = self.__dict__.get(KEY)
        if mode and joint is not None:
            joint.drop_copies()
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:  # what .to(), .half() and .cuda() come to
        joint = self.__dict__.get(KEY)
        if joint is not None:
            joint.drop_copies()
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state: Any = self.__getstate__()  # type: ignore[no-untyped-call]
        joint = self.__dict__.get(KEY)
        if isinstance(state, dict) and joint is not None:
            state = {**state, KEY: Joint(*joint.__reduce__()[1])}
        return _rebuild, (type(self)._torchweld_base,), state  # type: ignore[attr-defined]


def _rebuild(base: type[nn.Module]) -> nn.Module:
    """An empty instance of the welded class, for pickle and copy to fill. Pickles name it."""
    module: nn.Module = base.__new__(base)
    object.__setattr__(module, "__class__", welded_class(base))
    return module


# A class that no module has any more is freed.
_classes: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def welded_class(base: type) -> type:
    """The welded subclass of a module class; raises TypeError if there cannot be one."""
    with _lock:
        known = _classes.get(base)
        if known is None:
            known = _classes[base] = _make_class(base)
        return known


def _make_class(base: type) -> type:
    body = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__annotations__": getattr(base, "__annotations__", {}),
        "__jit_ignored_attributes__": [*getattr(base, "__jit_ignored_attributes__", ()), KEY],
        "forward": _make_forward(base),
        "_torchweld_base": base,
    }
    made = types.new_class(base.__name__, (Welded, base), {}, lambda own: own.update(body))
    made._torchweld_class = made  # type: ignore[attr-defined]
    return made


def _make_forward(base: Any) -> Forward:
    """`forward` of the welded class. Its body reads nothing from globals: see below."""
    # Served here is the usual call: x alone, values alone, of a size seen before, on a module that
    # nobody has touched. Against FusedMLP's forward, which asks for less, that costs 1.1 us more
    # for a Linear and 2.2 us more for three Linears with two Tanh (one core of an EPYC Zen 4). All
    # other calls are left to `_call`, which takes a few microseconds. A stand is remembered only
    # where the backend's abilities say `c_forward`: the forward in C, which takes CPU tensors.
    in_c, call, dynamo_compiling = compiled_forward, _call, is_dynamo_compiling
    grad_enabled, autocast_enabled = torch.is_grad_enabled, torch.is_autocast_enabled
    function_modes, tracing = torch._C._len_torch_function_stack, torch._C._get_tracing_state
    length, kind_of, plain, any_of, read, key = len, type, Tensor, any, getattr, KEY
    refused_error = RefusedError

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if dynamo_compiling():
            return call(self, base, args, kwargs)
        joint: Any = read(self, key, None)  # gone, if undone in another thread meanwhile
        bound = None if joint is None else joint.bound
        x: Any = args[0] if length(args) == 1 and not kwargs else None
        if bound is not None and kind_of(x) is plain and not function_modes() and not tracing():
            if self.training or grad_enabled():
                if joint.infers and (self.training or bound.wants_gradients(x)):
                    joint.count("training mode" if self.training else "gradients")
                    return base.forward(self, x)
                return call(self, base, args, kwargs)
            stand = bound.fast.get(x.shape)
            if stand is False:
                joint.count("rows")
                return base.forward(self, x)
            watch = joint.watch
            if (
                stand is not None
                and watch is not None
                and x.dtype is joint.dtype
                and x.is_cpu
                and not autocast_enabled("cpu")
                and not any_of(bound.hooks)
                and watch.holds(self, False, False)
            ):
                try:
                    y = in_c(stand, x)
                except refused_error:  # `_call` meets it again and handles it
                    y = None
                if y is not None:
                    return y
        return call(self, base, args, kwargs)

    original = base.forward
    if not isinstance(original, types.FunctionType):
        return functools.wraps(original)(forward)
    # With the original's globals, so that torch.jit.script, which reads the source of what is
    # wrapped, finds the names in it.
    made = types.FunctionType(
        forward.__code__, original.__globals__, "forward", None, forward.__closure__
    )
    return functools.update_wrapper(made, original)


def _call(module: Any, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any call: the op where it is covered, the original where it is not."""
    joint: Joint | None = getattr(module, KEY, None)
    if joint is None:
        return base.forward(module, *args, **kwargs)
    if recording():
        y = record(module, base, joint, args, kwargs)
        return base.forward(module, *args, **kwargs) if y is None else y
    refused: str | None = None
    try:
        y = joint.serve(module, args, kwargs)
    except RefusedError as error:
        y, refused = None, str(error).partition("\n")[0]
    if y is not None:
        return y
    y = base.forward(module, *args, **kwargs)
    if refused is not None:  # the original accepted the call; otherwise it has raised its own error
        joint.say(f"the op refused a call: {refused}")
    return y
