"""Confirms by numbers that a module computes the chain that was read from its graph.

In: a module, the chain, and a recorded signature. Out: the disagreement in words, or "". The module
runs on random inputs of that signature, in eval mode and in its own precision. Some rows of the
result are compared with the chain on those rows alone. If they are not close, the numerical rule
decides: the module has to be as close to the chain in float64 as the chain in plain PyTorch is.
"""

from __future__ import annotations

import math
import warnings
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchweld import ops
from torchweld.core.blocks import split_tensors
from torchweld.core.model_inputs import first_line
from torchweld.core.model_state import attributes_put_back, in_mode
from torchweld.core.passing_exceptions import says_nothing
from torchweld.numerics.numerical_rule import check_block
from torchweld.welds.recognising.chain_recognition import Chain
from torchweld.welds.tracing.call_recording import Signature, TensorSpec, spec_of
from torchweld.welds.tracing.forward_trace import (
    call_forward,
    call_with,
    own_tensors,
)

ROWS = 4
SEED = 20_000
# Relative to the largest value. Summing in another order usually differs by much less.
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
assert ops  # the import defines torch.ops.torchweld


def disagreement(module: nn.Module, chain: Chain, signature: Signature) -> str:
    """The difference in a few words; "" if module and chain agree."""
    own = own_tensors(module)
    weights = [own[name].detach() for name in chain.tensors]
    try:
        ran = None
        if all(_tells(tensor) for tensor in weights):
            ran = _run(module, chain, signature, weights, own=True)
        if ran is None or not bool(ran.y.isfinite().all()):
            random = torch.Generator("cpu").manual_seed(SEED)
            weights = [random_like(tensor, random) for tensor in weights]
            ran = _run(module, chain, signature, weights, own=False)
        reason = _compared(ran, chain, weights)
        if not reason and signature.training and chain.dropout:
            reason = _dropout_disagreement(module, chain, signature)
    except Exception as error:  # the model's code, run on inputs it was not written for
        if says_nothing(error):
            raise
        return f"does not run on random inputs: {first_line(error)}"
    return reason


class _Ran(NamedTuple):
    """Some rows of the module's input and of its output."""

    x: Tensor
    y: Tensor


def _run(
    module: nn.Module, chain: Chain, signature: Signature, weights: list[Tensor], own: bool
) -> _Ran:
    random = torch.Generator("cpu").manual_seed(SEED + 1)
    arguments = made_arguments(signature, random)
    x: Tensor = arguments[chain.argument].clone()  # the module may change its argument
    with ExitStack() as stack:
        enter(stack, module, training=False)
        if own:
            y = call_forward(module, arguments)
        else:
            y = call_with(module, dict(zip(chain.tensors, weights, strict=True)), arguments)
    expected = (*x.shape[:-1], chain.out_features)
    if not isinstance(y, Tensor) or tuple(y.shape) != expected:
        raise TypeError(f"it returns {spec_of(y)}, expected a tensor {list(expected)}")
    x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    keep = torch.randperm(len(x), generator=random, device="cpu")[:ROWS].to(x.device)
    return _Ran(x[keep], y[keep])


def _compared(ran: _Ran, chain: Chain, weights: list[Tensor]) -> str:
    with torch.no_grad():
        expected = torch.ops.torchweld.chain(ran.x, weights, chain.form) * chain.scale
        if expected.dtype == ran.y.dtype:
            size = max(float(expected.abs().amax()), float(ran.y.abs().amax()))
            if float((expected - ran.y).abs().amax()) <= CLOSE[ran.y.dtype] * size:
                return ""
        # Either the block's shape makes rounding large, or the function differs: the rule decides.
        scaled = ran.y / chain.scale
        judged = check_block(lambda *_: scaled, ran.x, weights, chain.forms)["output"]
    return "" if judged.ok else f"does not compute {chain.form}: {judged.reason}"


def _tells(weight: Tensor) -> bool:
    """Whether results depend on this tensor: with zeros, as in fresh models, they do not."""
    sample = weight.reshape(-1)[:: max(1, weight.numel() // 1000)]
    return bool(sample.isfinite().all()) and (weight.dim() < 2 or bool(sample.any()))


def _dropout_disagreement(module: nn.Module, chain: Chain, signature: Signature) -> str:
    """How the module in training differs from the chain with its dropout, from the same seed."""
    own = own_tensors(module)
    tensors = [own[name].detach() for name in chain.tensors]
    random = torch.Generator("cpu").manual_seed(SEED + 2)
    arguments = made_arguments(signature, random)
    with ExitStack() as stack:
        enter(stack, module, training=True)
        torch.manual_seed(SEED)
        y = call_forward(module, arguments)
        torch.manual_seed(SEED)
        x: Tensor = arguments[chain.argument]
        parts = split_tensors(chain.forms, tensors)
        for (form, layer), probability in zip(parts, chain.dropout, strict=True):
            x = F.dropout(torch.ops.torchweld.chain(x, layer, str(form)), probability)
        x = x * chain.scale
        allowed = 100 * torch.finfo(x.dtype).eps * float(x.abs().amax())
        if float((x - y).abs().amax()) > allowed:
            return "drops other values in training than a chain with dropout does"
    return ""


def enter(stack: ExitStack, module: nn.Module, training: bool) -> None:
    """Makes runs of the module leave no change behind and show no warnings."""
    stack.enter_context(in_mode(module, training))
    stack.enter_context(attributes_put_back(module))
    stack.enter_context(torch.no_grad())
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")


# ---- made-up tensors ----


def made_arguments(signature: Signature, random: torch.Generator) -> dict[str, Any]:
    return {
        name: _made(spec, random) if isinstance(spec, TensorSpec) else spec
        for name, spec in signature.arguments
    }


def _made(spec: TensorSpec, random: torch.Generator) -> Tensor:
    """Random numbers with the strides of the recorded tensor."""
    steps = zip(spec.shape, spec.stride, strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in steps) if 0 not in spec.shape else 0
    if spec.dtype.is_floating_point:
        values = torch.randn(count, generator=random, device="cpu").to(spec.dtype)
    else:
        values = torch.zeros(count, dtype=spec.dtype, device="cpu")
    tensor: Tensor = values.to(spec.device).as_strided(spec.shape, spec.stride)
    return tensor


def random_like(tensor: Tensor, random: torch.Generator) -> Tensor:
    """A random weight with values of the usual size."""
    values = torch.randn(tensor.shape, generator=random, device="cpu")
    values /= math.sqrt(max(tensor.shape[-1], 1))
    return values.to(device=tensor.device, dtype=tensor.dtype)
