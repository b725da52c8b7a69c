"""Runs a model and records how each of its modules is called.

In: a model and workloads. Out: `RecordedCalls`. For every module that was called, it has the
distinct `Signature`s (shapes, strides, dtypes, modes, output) and how often each occurred. No input
tensor is kept. Modules are watched by shadowing `forward` on the instance, because a hook would
switch off the fast paths of some modules.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchweld.core.model_state import forwards_replaced
from torchweld.welds.cloning.model_clone import Clone
from torchweld.welds.refusal_reasons import called_from

# Most signatures kept per module. Decoding with growing masks makes a new one at every step.
MOST_KINDS = 256


# ---- the signature of a call ----


@dataclass(frozen=True)
class TensorSpec:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    contiguous: bool

    def __str__(self) -> str:
        return f"a tensor {list(self.shape)}"


@dataclass(frozen=True)
class Nested:
    """A list, tuple or mapping that holds tensors or other objects."""

    kind: str
    items: tuple[Any, ...]

    def __str__(self) -> str:
        return f"a {self.kind}"


@dataclass(frozen=True)
class Opaque:
    """An object that is neither a tensor nor a plain value."""

    kind: str

    def __str__(self) -> str:
        return f"a {self.kind}"


def spec_of(value: Any) -> Any:
    """A hashable description of an argument or output; a plain value describes itself."""
    if isinstance(value, Tensor):
        if value.is_nested or value.layout != torch.strided or type(value) not in _PLAIN:
            return Opaque(f"{type(value).__name__} ({_odd_kind(value)})")
        return TensorSpec(
            tuple(value.shape),
            tuple(value.stride()),
            value.dtype,
            value.device,
            value.requires_grad,
            value.is_contiguous(),
        )
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return value
    if isinstance(value, (list, tuple)):
        return Nested(type(value).__name__, tuple(spec_of(item) for item in value))
    if isinstance(value, Mapping):
        return Nested(type(value).__name__, tuple((k, spec_of(v)) for k, v in value.items()))
    return Opaque(type(value).__name__)


_PLAIN = (Tensor, nn.Parameter)


def _odd_kind(value: Tensor) -> str:
    if value.is_nested:
        return "nested"
    return "a subclass" if value.layout == torch.strided else str(value.layout)


@dataclass(frozen=True, kw_only=True)
class Signature:
    """One kind of call of a module."""

    arguments: tuple[tuple[str, Any], ...]  # that were given: (name in forward, spec)
    output: Any  # the spec of the result
    grad: bool  # whether gradients were enabled
    training: bool  # whether the module was in training mode
    autocast: bool  # whether autocast was enabled on a device of the arguments
    twice: bool = False  # whether one tensor was given as two arguments


@dataclass(kw_only=True)
class SeenModule:
    """The recorded calls of one module."""

    path: str  # in the model
    order: int  # position of its first call among the first calls of all modules
    where: str  # the line that first called it
    unreadable: str = ""  # why the arguments of its calls are not known
    # How often each signature occurred, in the order of first calls.
    counts: dict[Signature, int] = field(default_factory=dict)
    left_out: int = 0  # calls not recorded, because there were more than MOST_KINDS signatures
    callers: set[str] = field(default_factory=set)  # paths of the modules that called it
    # Per argument: one hash of which tensors were given, call by call.
    tensors: dict[str, int] = field(default_factory=dict)

    @property
    def filled(self) -> dict[Signature, int]:
        """The counts without calls on empty tensors, as of an expert that got no tokens."""
        return {
            signature: count
            for signature, count in self.counts.items()
            if not any(isinstance(s, TensorSpec) and 0 in s.shape for _, s in signature.arguments)
        }


@dataclass(kw_only=True)
class RecordedCalls:
    paths: dict[nn.Module, list[str]]  # every module that can be watched, with all its paths
    seen: dict[nn.Module, SeenModule]  # every module that was called
    calls: list[int]  # number of module calls, per run


# ---- watching ----


def places(model: nn.Module) -> dict[nn.Module, list[str]]:
    """All modules that can be watched, each with its paths, in the order of the model."""
    found: dict[nn.Module, list[str]] = {}

    def walk(module: nn.Module, path: str, around: tuple[nn.Module, ...]) -> None:
        if module in around:
            return
        found.setdefault(module, []).append(path)
        if closed_reason(module):
            return
        for name, child in module._modules.items():
            if child is not None:
                walk(child, f"{path}.{name}" if path else name, (*around, module))

    walk(model, "", ())
    return found


def closed_reason(module: nn.Module) -> str:
    """Why nothing inside this module is analysed; "" if it is analysed."""
    if isinstance(module, torch.jit.ScriptModule):
        return "is TorchScript"
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        return "is compiled"
    if getattr(module, "runs_whole", False):
        return "runs as one op already"
    return ""


def record(model: nn.Module, runs: Sequence[tuple[Callable[[], object], int]]) -> RecordedCalls:
    """Records the modules' calls in `runs`: callables that run the model, each with its count."""
    paths = places(model)
    watch = _CallWatch()
    calls: list[int] = []
    shadows = {
        module: watch.shadow(module, at[0])
        for module, at in paths.items()
        if not isinstance(module, torch.jit.ScriptModule)
    }
    with forwards_replaced(shadows):
        for run, count in runs:
            watch.count, watch.calls = count, 0
            run()
            calls.append(watch.calls)
    return RecordedCalls(paths=paths, seen=watch.seen, calls=calls)


class _CallWatch:
    def __init__(self) -> None:
        self.seen: dict[nn.Module, SeenModule] = {}
        self.count = 1  # how many times the current run counts
        self.calls = 0  # in the current run
        self._local = threading.local()  # the stack of running modules, per thread
        self._tensors = _Tensors()
        self._signatures: dict[Any, inspect.Signature | None] = {}

    def shadow(self, module: nn.Module, path: str) -> Callable[..., Any]:
        forward = module.forward

        @functools.wraps(forward)
        def shadowed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return forward(*args, **kwargs)
            active = self._local.__dict__.setdefault("active", [])
            note = self._before(module, path, active[-1] if active else "", args, kwargs)
            active.append(path)
            try:
                result = forward(*args, **kwargs)
            finally:
                active.pop()
            note(result)
            return result

        return shadowed

    def _before(
        self, module: nn.Module, path: str, caller: str, args: Any, kwargs: Any
    ) -> Callable[[Any], None]:
        """Reads the arguments before the call runs; gives a function that notes the result."""
        self.calls += 1
        seen = self.seen.get(module)
        if seen is None:
            seen = SeenModule(path=path, order=len(self.seen), where=called_from())
            self.seen[module] = seen
        given = self._bound(module, args, kwargs)
        if given is None:
            seen.unreadable = "its forward takes arguments without names"
            return lambda _: None
        arguments = tuple((name, spec_of(value)) for name, value in given.items())
        tensors = tuple(
            (name, self._tensors.number(value))
            for name, value in given.items()
            if isinstance(value, Tensor)
        )
        grad, training = torch.is_grad_enabled(), module.training
        autocast = _autocast(arguments)

        def note(result: Any) -> None:
            signature = Signature(
                arguments=arguments,
                output=spec_of(result),
                grad=grad,
                training=training,
                autocast=autocast,
                twice=len(tensors) > len({number for _, number in tensors}),
            )
            if signature in seen.counts or len(seen.counts) < MOST_KINDS:
                seen.counts[signature] = seen.counts.get(signature, 0) + self.count
            else:
                seen.left_out += self.count
            seen.callers.add(caller)
            for name, number in tensors:
                seen.tensors[name] = hash((seen.tensors.get(name), number))

        return note

    def _bound(self, module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any] | None:
        """The arguments by the names of forward's parameters; None if some have no name."""
        kind = type(module)
        if kind not in self._signatures:
            self._signatures[kind] = forward_signature(module)
        signature = self._signatures[kind]
        if signature is None:
            return None
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # the call of forward will raise it
            return None
        given: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            match signature.parameters[name].kind:
                case inspect.Parameter.VAR_POSITIONAL:
                    return None
                case inspect.Parameter.VAR_KEYWORD:
                    given |= value
                case _:
                    given[name] = value
        return given


def forward_signature(module: nn.Module) -> inspect.Signature | None:
    """The signature of the class's forward, without self."""
    try:
        full = inspect.signature(type(module).forward)
    except (TypeError, ValueError):
        return None
    return full.replace(parameters=list(full.parameters.values())[1:])


def _autocast(arguments: tuple[tuple[str, Any], ...]) -> bool:
    kinds = {spec.device.type for _, spec in arguments if isinstance(spec, TensorSpec)}
    return any(torch.is_autocast_enabled(kind) for kind in kinds - {"meta"})


class _Tensors:
    """Numbers tensors: the same number only for the same tensor with the same contents."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        self._next = 0

    def number(self, tensor: Tensor) -> int:
        version = -1 if tensor.is_inference() else tensor._version
        known = self._known.get(id(tensor))
        # Python may reuse an id after its tensor is gone.
        if known is not None and known[0]() is tensor and known[1] == version:
            return known[2]
        self._next += 1
        self._known[id(tensor)] = (weakref.ref(tensor), version, self._next)
        return self._next


# ---- changes made by a run ----


@contextmanager
def noticing(clone: Clone, notices: list[str]) -> Iterator[None]:
    """Adds a notice for each change that a run makes to tensors the clone shares with the model."""
    weights = [(parameter, _version(parameter)) for parameter in clone.model.parameters()]
    shared = [(name, tensor, _version(tensor)) for name, tensor in clone.shared]
    yield
    if any(_version(parameter) != version for parameter, version in weights):
        notices.append("the workload changed parameters of the model: they stay changed")
    for name, tensor, version in shared:
        if _version(tensor) != version:
            notices.append(f"running the model changed its buffer {name}: it stays changed")


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
