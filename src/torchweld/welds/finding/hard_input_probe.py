"""Finds out whether a module differs in kind from the chain that was read from its graph.

In: a module, the chain, and a recorded signature. Out: the difference in words, or "". Ordinary
numbers do not show a clamp at a large value, or what happens to NaN. So the module runs on hard
rows (NaN, infinite, huge, zero, denormal, one far larger than the others), and with gradients
enabled its gradients are compared too. The same block made of torch's own ops in the same precision
is the reference, so another order of summation is not a reason to refuse. The weights are random:
the check is about the code, and holds for every module that is built alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from torchweld.core.model_inputs import first_line
from torchweld.core.passing_exceptions import says_nothing
from torchweld.numerics.numerical_rule import composed
from torchweld.welds.finding.numeric_confirmation import (
    CLOSE,
    SEED,
    enter,
    made_arguments,
    random_like,
)
from torchweld.welds.recognising.chain_recognition import Chain
from torchweld.welds.tracing.call_recording import Signature
from torchweld.welds.tracing.forward_trace import call_with, own_tensors

# Either side may flush denormal results to zero.
_DENORMAL_STEPS = 64
# Factor on what CLOSE allows for ordinary rows.
_LOOSER = 10


def difference_in_kind(module: nn.Module, chain: Chain, signature: Signature) -> str:
    """The difference in a few words; "" if there is none."""
    try:
        for name, x, y, expected in _on_hard_rows(module, chain, signature):
            if reason := _different(name, x, y, expected):
                return reason
        return _other_gradients(module, chain, signature) if signature.grad else ""
    except Exception as error:  # the model's code, run on inputs it was not written for
        if says_nothing(error):
            raise
        return f"does not run on hard inputs: {first_line(error)}"


def _weights(module: nn.Module, chain: Chain) -> dict[str, Tensor]:
    random = torch.Generator("cpu").manual_seed(SEED + 3)
    own = own_tensors(module)
    return {
        name: random_like(own[name].detach(), random).requires_grad_(own[name].requires_grad)
        for name in dict.fromkeys(chain.tensors)
    }


def _composed(x: Tensor, weights: dict[str, Tensor], chain: Chain) -> Tensor:
    y = composed(x, [weights[name] for name in chain.tensors], chain.forms)
    return y if chain.scale == 1.0 else y * chain.scale


# ---- hard rows ----


def hard_rows(like: Tensor) -> dict[str, Tensor]:
    """Hard rows `[K]` by name, made from an ordinary row."""
    limits, rows = torch.finfo(like.dtype), {}
    for name, value in (("NaN", torch.nan), ("Inf", torch.inf), ("-Inf", -torch.inf)):
        rows[name] = like.clone()
        rows[name][len(like) // 2] = value
    rows["huge values"] = like * limits.max**0.75 / 8
    rows["zeros"] = torch.zeros_like(like)
    rows["denormal values"] = (like.double() * limits.tiny / 16).to(like.dtype)
    rows["values of 1e4"] = like * 1e4
    return rows


def _on_hard_rows(
    module: nn.Module, chain: Chain, signature: Signature
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """For each hard row: its name, the row, the module's result, and the chain's result."""
    weights = _weights(module, chain)
    random = torch.Generator("cpu").manual_seed(SEED + 4)
    arguments = made_arguments(signature, random)
    x: Tensor = arguments[chain.argument]
    width = x.shape[-1]
    hard = list(hard_rows(x.reshape(-1, width)[0].clone()).items())
    rows = x.numel() // width
    for first in range(0, len(hard), rows):
        some = hard[first : first + rows]
        filled = x.reshape(-1, width).clone()
        for i, (_, row) in enumerate(some):
            filled[i] = row
        given = filled.view(x.shape)
        before = given.clone()  # the module may change its argument
        with ExitStack() as stack:
            enter(stack, module, training=False)
            y = call_with(module, weights, {**arguments, chain.argument: given})
            expected = _composed(before, weights, chain)
        y, expected = y.reshape(rows, -1), expected.reshape(rows, -1)
        for i, (name, row) in enumerate(some):
            yield name, row, y[i], expected[i]


def _different(name: str, x: Tensor, y: Tensor, expected: Tensor) -> str:
    kinds, wanted = _kinds(y), _kinds(expected)
    differs = kinds != wanted
    if name in ("Inf", "-Inf"):
        # A written-out formula gives NaN there, as 0 · Inf; a single op gives a number.
        differs &= ~y.isnan()
    if bool(differs.any()):
        i = int(differs.nonzero()[0])
        return f"gives {_NAMES[int(kinds[i])]} for {name}, a chain gives {_NAMES[int(wanted[i])]}"
    finite = y.isfinite() & expected.isfinite()
    if not bool(finite.any()):
        return ""
    a, b = y[finite].double(), expected[finite].double()
    tiny = torch.finfo(x.dtype).smallest_normal
    allowed = _LOOSER * CLOSE[x.dtype] * float(b.abs().amax()) + _DENORMAL_STEPS * tiny
    if float((a - b).abs().amax()) > allowed:
        return f"computes something different on {name}"
    return ""


_NAMES = ("a finite value", "NaN", "Inf", "-Inf")


def _kinds(y: Tensor) -> Tensor:
    return y.isnan() * 1 + y.isposinf() * 2 + y.isneginf() * 3


# ---- gradients ----


def _other_gradients(module: nn.Module, chain: Chain, signature: Signature) -> str:
    """How gradients differ: a detach, or a custom gradient, does not show in the values."""
    random = torch.Generator("cpu").manual_seed(SEED + 5)
    weights = _weights(module, chain)
    arguments = made_arguments(signature, random)
    x = arguments[chain.argument].clone().requires_grad_()
    leaves = [x, *(tensor for tensor in weights.values() if tensor.requires_grad)]
    names = ["x", *(name for name, tensor in weights.items() if tensor.requires_grad)]
    with ExitStack() as stack:
        enter(stack, module, training=False)
        stack.enter_context(torch.enable_grad())
        expected = _composed(x, weights, chain)
        back = torch.randn(expected.shape, generator=random, device="cpu").to(expected)
        wanted = torch.autograd.grad(expected, leaves, back)
        y = call_with(module, weights, {**arguments, chain.argument: x * 1})
        if not y.requires_grad:
            return "gives no gradients"
        found = torch.autograd.grad(y, leaves, back, allow_unused=True)
    for name, a, b in zip(names, found, wanted, strict=True):
        if a is None:
            return f"gives {name} no gradient"
        allowed = _LOOSER * CLOSE[a.dtype] * max(float(b.abs().amax()), 1e-30)
        if float((a - b).abs().amax()) > allowed:
            return f"gives {name} a different gradient than the chain does"
    return ""
