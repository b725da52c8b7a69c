"""Traces a module's call to a functional graph of aten ops.

In: a module and a recorded `Signature`. Out: a `Traced` graph, or `Refused`. Fake tensors replace
the arguments, parameters and buffers, so a trace takes no memory and computes no products. A model
on meta is traced on its own tensors. `make_fx(pre_dispatch=True)` keeps composite ops (linear,
split, dropout) whole. `FunctionalTensorMode` turns a change in place, through any alias, into a new
value. A module is refused if it changes a tensor that outlives the call, or changes a tensor in a
way that the trace cannot follow.
"""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, MutableMapping
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
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from torchweld.core.model_inputs import first_line
from torchweld.core.model_state import attributes_put_back, in_mode
from torchweld.core.passing_exceptions import says_nothing
from torchweld.welds.refusal_reasons import Refused, op_name, raised_at, source_of
from torchweld.welds.tracing.call_recording import (
    Signature,
    TensorSpec,
    forward_signature,
)

_torch: Any = torch  # for functions without type annotations


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A graph of one call. Its placeholders are first `state`, then `arguments`, in order."""

    graph: fx.Graph
    state: tuple[tuple[str, Tensor], ...]  # the module's own tensors
    arguments: tuple[tuple[str, TensorSpec], ...]
    grad: bool  # whether gradients were enabled
    changes: tuple[str, ...]  # attributes that the call set or changed

    @property
    def multiplies(self) -> bool:
        """Whether the graph has any product."""
        names = (op_name(node.target).removeprefix("aten.") for node in self.graph.nodes)
        return any(name in _PRODUCTS for name in names)

    @property
    def sizeless(self) -> bool:
        """Whether all ops treat every row alike, whatever sizes x has."""
        calls = [node for node in self.graph.nodes if node.op == "call_function"]
        return all(op_name(node.target) in _SIZELESS for node in calls)


_SIZELESS = frozenset(
    f"aten.{name}"
    for name in (
        *("linear", "gelu", "relu", "silu", "tanh", "sigmoid", "elu", "mish", "hardswish"),
        *("softplus", "leaky_relu", "selu", "celu", "relu6", "hardtanh", "hardsigmoid", "erf"),
        *("mul", "add", "sub", "div", "neg", "pow", "square", "exp", "log1p", "sqrt", "rsqrt"),
        *("clamp", "clamp_min", "clamp_max", "abs", "maximum", "minimum", "where", "dropout"),
        *("alias", "detach"),
    )
)
_PRODUCTS = (
    *("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "einsum", "tensordot"),
    *("bilinear", "_grouped_mm", "linalg_multi_dot", "_weight_int8pack_mm", "_weight_int4pack_mm"),
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "mkldnn_rnn_layer"),
)


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; a tensor with several names has the first."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


class _TracedForward(nn.Module):
    """Calls a module's forward without its hooks: a weld leaves those in place."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, arguments: dict[str, Any]) -> Any:
        return call_forward(self.inner, arguments)


def call_forward(module: nn.Module, arguments: dict[str, Any]) -> Any:
    """Calls `module.forward` with arguments given by name."""
    signature = forward_signature(module)
    parameters = {} if signature is None else signature.parameters
    unnamed = [n for n, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_ONLY]
    first = [arguments[name] for name in unnamed if name in arguments]
    rest = {name: value for name, value in arguments.items() if name not in unnamed}
    return module.forward(*first, **rest)


def call_with(module: nn.Module, tensors: dict[str, Tensor], arguments: dict[str, Any]) -> Any:
    """Calls `module.forward` with other tensors in place of the module's own."""
    named = {f"inner.{name}": tensor for name, tensor in tensors.items()}
    return torch.func.functional_call(_TracedForward(module), named, (arguments,))


@functools.cache
def _tracer_options() -> dict[str, Any]:
    options: dict[str, Any] = {"tracing_mode": "real", "pre_dispatch": True}
    if "record_stack_traces" in inspect.signature(make_fx).parameters:
        options["record_stack_traces"] = True  # not in every torch; else no lines are known
    return options


def trace(module: nn.Module, signature: Signature) -> Traced:
    """Traces one call. If that fails, Refused names the op and the line that prevent it."""
    own, given = own_tensors(module), tensor_specs(signature)
    with traceable(module, signature) as (state, arguments, changed):
        followed = _Followed(module, signature)
        with refusing():
            graph = _graph(followed.run, state, arguments)
        changes = tuple(changed())
    if followed.mutated:
        raise Refused(followed.mutated, *_first_change(module, signature))
    _check_functional(graph)
    return Traced(
        graph=graph,
        state=tuple(own.items()),
        arguments=tuple(given.items()),
        grad=signature.grad,
        changes=changes,
    )


def _graph(run: Callable[..., Any], own: list[Tensor], given: list[Tensor]) -> fx.Graph:
    # A lambda, because make_fx would count `self` among the arguments of a method.
    made: fx.GraphModule = make_fx(lambda a, b: run(a, b), **_tracer_options())(own, given)
    return made.graph


def tensor_specs(signature: Signature) -> dict[str, TensorSpec]:
    return {n: s for n, s in signature.arguments if isinstance(s, TensorSpec)}


@contextmanager
def in_call(module: nn.Module, signature: Signature) -> Iterator[Callable[[], list[str]]]:
    """Sets the modes of a recorded call, and restores the module afterwards.

    Gives a function that names the attributes that have changed.
    """
    with ExitStack() as stack:
        stack.enter_context(in_mode(module, signature.training))
        changed = stack.enter_context(attributes_put_back(module))
        stack.enter_context(torch.set_grad_enabled(signature.grad))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # they were shown when the model ran
        stack.enter_context(_silent(logging.getLogger(FakeTensorMode.__module__)))
        yield changed


@contextmanager
def traceable(
    module: nn.Module, signature: Signature
) -> Iterator[tuple[list[Tensor], list[Tensor], Callable[[], list[str]]]]:
    """Gives tensors to trace on, for the module and for the call, in the modes of the call."""
    state, specs = own_tensors(module), tensor_specs(signature)
    devices = [*(t.device for t in state.values()), *(s.device for s in specs.values())]
    with ExitStack() as stack:
        changed = stack.enter_context(in_call(module, signature))
        if any(device.type == "meta" for device in devices):
            own = list(state.values())
        else:
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            stack.callback(forget_tensors, fake)
            stack.enter_context(fake)
            own = [faked(fake, tensor) for tensor in state.values()]
        given = [_empty(spec) for spec in specs.values()]
        stack.enter_context(_Limit())  # type: ignore[no-untyped-call]
        yield own, given, changed


def faked(fake: FakeTensorMode, tensor: Tensor, **options: Any) -> Tensor:
    """A fake of the module's own tensor.

    A tensor made in inference mode gets an ordinary fake: the computation is the same.
    """
    if tensor.is_inference():
        with fake, torch.inference_mode(False):
            plain = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
            return plain.requires_grad_(tensor.requires_grad)
    return fake.from_tensor(tensor, **options)


def called(module: nn.Module, signature: Signature, own: list[Tensor], given: list[Tensor]) -> Any:
    """Repeats the recorded call with `own` as the module's tensors and `given` as arguments."""
    plain = {n: s for n, s in signature.arguments if not isinstance(s, TensorSpec)}
    arguments = {**dict(zip(tensor_specs(signature), given, strict=True)), **plain}
    return call_with(module, dict(zip(own_tensors(module), own, strict=True)), arguments)


class _Followed:
    """Runs a module's forward on functional tensors, which turn changes in place into values."""

    def __init__(self, module: nn.Module, signature: Signature) -> None:
        self._module, self._signature = module, signature
        self._state = list(own_tensors(module))
        self._specs = list(tensor_specs(signature))
        self.mutated = ""  # which tensor that outlives the call was changed, in words

    def run(self, own: list[Tensor], given: list[Tensor]) -> Any:
        with FunctionalTensorMode(pre_dispatch=True, export=True, _allow_token_discovery=False):
            state: list[Tensor] = [FunctionalTensor.to_functional(tensor) for tensor in own]
            arguments: list[Tensor] = [FunctionalTensor.to_functional(tensor) for tensor in given]
            result = called(self._module, self._signature, state, arguments)
            for name, tensor in zip(self._state, state, strict=True):
                if _was_changed(tensor):
                    self.mutated = f"changes its own {name}"
            for name, tensor in zip(self._specs, arguments, strict=True):
                if _was_changed(tensor):
                    self.mutated = f"changes its argument {name} in place"
            return tree_map_only(FunctionalTensor, _plain_tensor, result)


def _was_changed(tensor: Any) -> bool:
    """Whether contents or shape of a functional tensor were changed, through any alias."""
    _torch._sync(tensor)
    inner = tensor.elem
    return bool(
        _torch._functionalize_has_data_mutation(inner)
        or _torch._functionalize_has_metadata_mutation(inner)
    )


def _plain_tensor(tensor: Any) -> Tensor:
    _torch._sync(tensor)
    plain: Tensor = _torch._from_functional_tensor(tensor.elem)
    return plain


def _first_change(module: nn.Module, signature: Signature) -> tuple[str, str]:
    """The first op that changes something in place, and its line; for a message only."""
    try:
        with traceable(module, signature) as (state, arguments, _):
            run = functools.partial(called, module, signature)
            nodes = list(_graph(run, state, arguments).nodes)
    except Exception as error:  # the refusal is still useful without the line
        if says_nothing(error):
            raise
        return "", ""
    for node in nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            return op_name(node.target), source_of(node.stack_trace)
    return "", ""


# Left in a graph by `h.data = other`, which replaces contents without a trace of it.
_SWAPPED = "_has_compatible_shallow_copy_type"


def _check_functional(graph: fx.Graph) -> None:
    """Raises Refused if an in-place op is left: the trace did not follow it."""
    for node in graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            continue
        op = op_name(target)
        if target._schema.is_mutable or op.endswith(_SWAPPED):
            reason = f"{op.removeprefix('aten.')} changes a tensor in a way that cannot be followed"
            raise Refused(reason, op, source_of(node.stack_trace))


def forget_tensors(fake: FakeTensorMode) -> None:
    """Clears what a mode remembers of the tensors that it has faked.

    The mode holds weak references to them, and stays alive in reference cycles until the next
    garbage collection. Until then torch.utils.swap_tensors would refuse the model's parameters.
    """
    converter = fake.fake_tensor_converter
    meta = getattr(converter, "meta_converter", None)
    for holder in (converter, meta, getattr(meta, "describer", None)):
        for memory in vars(holder).values() if holder is not None else ():
            if isinstance(memory, MutableMapping):
                memory.clear()


# Far more ops than the largest chain has. A loop over time steps has many more, and each would take
# a millisecond to trace.
MOST_OPS = 1500


class _Limit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses a call that runs more ops than a chain can have."""

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
    """Disables a logger: an op that cannot be traced is refused, not logged."""
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def refusing() -> Iterator[None]:
    """Turns errors in a trace into refusals."""
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
    except Exception as error:  # the model's code, run on tensors it was not written for
        if says_nothing(error):
            raise
        if "data-dependent" in str(error) or "tracing tensor" in str(error):
            raise Refused(
                "its control flow or its shapes depend on values", "", raised_at(error)
            ) from error
        raise Refused(f"cannot be traced: {first_line(error)}", "", raised_at(error)) from error
