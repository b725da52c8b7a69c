"""What a module computes on a recorded signature, as a graph of aten ops.

Fake tensors stand for the arguments, parameters and buffers, so that a trace takes no memory and
multiplies nothing; a model on meta is traced on its own tensors. Composite ops (linear, chunk,
dropout) stay whole: `make_fx(pre_dispatch=True)`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from torchweld.discovery.reasons import Refused, op_name, raised_at
from torchweld.discovery.recording import (
    Signature,
    TensorSpec,
    attributes_of,
    changed_attributes,
    forward_signature,
    restore_attributes,
)
from torchweld.inputs import first_line


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A graph whose placeholders stand, in order, for `state` and then for `arguments`."""

    graph: fx.Graph
    state: tuple[tuple[str, Tensor], ...]  # the module's own tensors
    arguments: tuple[tuple[str, TensorSpec], ...]
    grad: bool  # whether gradients were enabled
    changes: tuple[str, ...]  # attributes that the call set or changed

    @property
    def multiplies(self) -> bool:
        """Whether there is any product in it."""
        names = (op_name(node.target).removeprefix("aten.") for node in self.graph.nodes)
        return any(name in _PRODUCTS for name in names)


_PRODUCTS = (
    *("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "einsum", "tensordot"),
    *("bilinear", "_grouped_mm", "linalg_multi_dot", "_weight_int8pack_mm", "_weight_int4pack_mm"),
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "mkldnn_rnn_layer"),
)


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; one that has several names has the first."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


class _Forward(nn.Module):
    """Calls a module's forward, and not the hooks around it: those stay where they are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, arguments: dict[str, Any]) -> Any:
        return call_forward(self.inner, arguments)


def call_forward(module: nn.Module, arguments: dict[str, Any]) -> Any:
    """`module.forward` with arguments by name."""
    signature = forward_signature(module)
    parameters = {} if signature is None else signature.parameters
    unnamed = [n for n, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_ONLY]
    first = [arguments[name] for name in unnamed if name in arguments]
    rest = {name: value for name, value in arguments.items() if name not in unnamed}
    return module.forward(*first, **rest)


def call_with(module: nn.Module, tensors: dict[str, Tensor], arguments: dict[str, Any]) -> Any:
    """`module.forward` with other tensors in place of its own."""
    named = {f"inner.{name}": tensor for name, tensor in tensors.items()}
    return torch.func.functional_call(_Forward(module), named, (arguments,))


@functools.cache
def _tracer_options() -> dict[str, Any]:
    options: dict[str, Any] = {"tracing_mode": "real", "pre_dispatch": True}
    if "record_stack_traces" in inspect.signature(make_fx).parameters:
        options["record_stack_traces"] = True  # not in every torch; source lines are lost then
    return options


def trace(module: nn.Module, signature: Signature) -> Traced:
    """Refused if it cannot be traced, with the op and the line that are in the way."""
    state = own_tensors(module)
    specs = {n: s for n, s in signature.arguments if isinstance(s, TensorSpec)}
    plain = {n: s for n, s in signature.arguments if not isinstance(s, TensorSpec)}
    devices = [*(t.device for t in state.values()), *(s.device for s in specs.values())]
    on_meta = any(device.type == "meta" for device in devices)

    def run(own: list[Tensor], given: list[Tensor]) -> Any:
        arguments = {**dict(zip(specs, given, strict=True)), **plain}
        return call_with(module, dict(zip(state, own, strict=True)), arguments)

    with ExitStack() as stack:
        stack.enter_context(in_mode(module, signature.training))
        changed = stack.enter_context(unchanged(module))
        stack.enter_context(torch.set_grad_enabled(signature.grad))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # they were shown when the model ran
        stack.enter_context(_silent(logging.getLogger(FakeTensorMode.__module__)))
        if on_meta:
            own = list(state.values())
        else:
            fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            own = [fake.from_tensor(tensor) for tensor in state.values()]
        given = [_empty(spec) for spec in specs.values()]
        stack.enter_context(_Limit())  # type: ignore[no-untyped-call]
        make: Callable[..., fx.GraphModule] = make_fx(run, **_tracer_options())
        with _refusing():
            graph = make(own, given).graph
        changes = tuple(changed())
    return Traced(
        graph=graph,
        state=tuple(state.items()),
        arguments=tuple(specs.items()),
        grad=signature.grad,
        changes=changes,
    )


# Far more than a chain of the largest size has. A loop over time steps has many more, each of which
# would take a millisecond to trace.
MOST_OPS = 1500


class _Limit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives up on graphs that no chain can have."""

    ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        if self.ops > MOST_OPS:
            raise Refused(f"runs more than {MOST_OPS} ops", op_name(func))
        return func(*args, **(kwargs or {}))


def _empty(spec: TensorSpec) -> Tensor:
    tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    return tensor.requires_grad_(spec.requires_grad)


@contextmanager
def _silent(logger: logging.Logger) -> Iterator[None]:
    """An op that cannot be traced is refused, not logged."""
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _refusing() -> Iterator[None]:
    """What goes wrong in a trace, as a refusal."""
    try:
        yield
    except Refused:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise Refused(
            "its control flow or its shapes depend on values", op_name(error.func), raised_at(error)
        ) from error
    except UnsupportedOperatorException as error:
        op = op_name(error.func)
        raise Refused(f"{op} cannot be traced", op, raised_at(error)) from error
    except Exception as error:  # foreign code, run on tensors that it was not written for
        if "data-dependent" in str(error) or "tracing tensor" in str(error):
            raise Refused(
                "its control flow or its shapes depend on values", "", raised_at(error)
            ) from error
        raise Refused(f"cannot be traced: {first_line(error)}", "", raised_at(error)) from error


@contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Inside, a module that is in the other mode is in this one, with all it holds."""
    modes = [(inner, inner.training) for inner in module.modules()]
    try:
        if module.training != training:
            for inner, _ in modes:
                inner.training = training  # a train() of its own may do more than that
        yield
    finally:
        for inner, mode in modes:
            inner.training = mode


@contextmanager
def unchanged(module: nn.Module) -> Iterator[Callable[[], list[str]]]:
    """Afterwards no fake tensor is left in an attribute. Gives what says which have changed."""
    before = {name: (inner, attributes_of(inner)) for name, inner in module.named_modules()}

    def changed() -> list[str]:
        return [
            f"{name}.{attribute}" if name else attribute
            for name, (inner, attributes) in before.items()
            for attribute in changed_attributes(inner, attributes)
        ]

    try:
        yield changed
    finally:
        for inner, attributes in before.values():
            restore_attributes(inner, attributes)
