"""Mode `mkldnn` of backend `torch`: oneDNN's linears, with the activation in the same op.

`mkldnn::_linear_pointwise` takes x of any rank and a weight that `_reorder_linear_weight` has
copied into oneDNN's own layout. Its binary form multiplies by another tensor, so a gated layer is
two ops. It does not always win: 8 × 768 → 3072 gelu in fp32 took 0.5 times eager's time, 1 × 64 →
256 took 1.5 times (one core of an EPYC Zen 4, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from torchweld.core.activations import ACTIVATIONS
from torchweld.core.blocks import LayerForm, split_tensors
from torchweld.ops.backends.backend import Form

Step = Callable[[Tensor], Tensor]

# activation -> (attribute, algorithm). relu is missing on purpose: oneDNN's turns NaN into 0.
FUSED = {
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
    "tanh": ("tanh", ""),
    "sigmoid": ("sigmoid", ""),
    "hardswish": ("hardswish", ""),
    "leaky_relu": ("leaky_relu", ""),
}


def reasons(dtype: torch.dtype, device: torch.device) -> list[str]:
    """Why oneDNN's linears cannot be used; empty if they can."""
    if device.type != "cpu":
        return [f"oneDNN's linears run on the CPU, but the tensors are on {device}"]
    ops = torch.ops.mkldnn
    built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not built or not hasattr(ops, "_linear_pointwise"):
        return ["this torch was built without oneDNN's linears"]
    if dtype == torch.float32:
        return []
    supported = {
        torch.bfloat16: ops._is_mkldnn_bf16_supported,
        torch.float16: ops._is_mkldnn_fp16_supported,
    }
    if dtype not in supported:
        return [f"oneDNN's linears take float32, bfloat16 and float16, not {dtype}"]
    return [] if supported[dtype]() else [f"oneDNN has no {dtype} linears for this CPU"]


def bind(
    block: Form,
    tensors: Sequence[Tensor],
    rows: int | None = None,
    fused: Mapping[str, tuple[str, str]] = FUSED,
) -> tuple[Callable[[Tensor], Tensor | list[Tensor]], int]:
    """The block with its weights copied into oneDNN's layout, and the bytes of the copies.

    The layout is for this number of `rows`, or for any. `fused` are the activations in the op.
    """
    copies: list[Tensor] = []
    steps = [
        _layer(form, own, copies, rows, fused) for form, own in split_tensors(block.forms, tensors)
    ]
    copied_bytes = sum(copy.numel() * copy.element_size() for copy in copies)

    def chain(x: Tensor) -> Tensor:
        for step in steps:
            x = step(x)
        return x

    def group(x: Tensor) -> list[Tensor]:
        return [step(x) for step in steps]

    return (chain if block.kind == "chain" else group), copied_bytes


def _layer(
    form: LayerForm,
    tensors: Sequence[Tensor],
    copies: list[Tensor],
    rows: int | None,
    fused: Mapping[str, tuple[str, str]],
) -> Step:
    parts = _gate_and_up(form, tensors)
    linears = []
    for weight, bias in parts:
        # A copy made for 1 row was 60 % slower at 8 rows, while one made without a row count was as
        # fast at 1 to 512 rows as copies made for each.
        copies.append(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows))
        # The op ignores the stride of a bias.
        linears.append((copies[-1], None if bias is None else bias.contiguous()))
    act = _linear(form, *linears[0], fused)
    if len(linears) == 1:
        return act
    multiply = torch.ops.mkldnn._linear_pointwise.binary
    weight, bias = linears[1]
    return lambda x: multiply(x, act(x), weight, bias, "mul")


def _gate_and_up(form: LayerForm, tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
    """Weights `[N, K]` with their biases: the gate's and up's, or the only one."""
    step = 2 if form.bias else 1
    weights = [w.t() if form.transposed else w for w in tensors[::step]]
    biases: list[Tensor | None] = list(tensors[1::2]) if form.bias else [None] * len(weights)
    if form.gate in ("none", "separate"):
        return list(zip(weights, biases, strict=True))
    weight, bias = weights[0], biases[0]
    N = weight.shape[0] // 2
    first, second = slice(0, N), slice(N, None)
    if form.gate == "interleaved":
        first, second = slice(0, None, 2), slice(1, None, 2)
    if form.gate == "second":
        first, second = second, first
    return [(weight[s], None if bias is None else bias[s]) for s in (first, second)]


def _linear(
    form: LayerForm, weight: Tensor, bias: Tensor | None, fused: Mapping[str, tuple[str, str]]
) -> Step:
    """One product with its activation, in the same op if that is one of `fused`."""
    linear = torch.ops.mkldnn._linear_pointwise.default
    if form.activation in fused:
        attribute, algorithm = fused[form.activation]
        scalars = list(form.parameters)
        return lambda x: linear(x, weight, bias, attribute, scalars, algorithm)
    if form.activation == "identity":
        return lambda x: linear(x, weight, bias, "none", [], "")
    known = ACTIVATIONS[form.activation]
    act, parameters = known.apply_ or known.apply, form.parameters
    return lambda x: act(linear(x, weight, bias, "none", [], ""), *parameters)
