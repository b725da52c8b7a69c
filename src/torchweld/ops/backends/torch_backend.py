"""Backend `torch`: the fused variant in pure PyTorch, for any device.

If a call needs only values, it skips work that eager does:

    views      x is folded into rows once and the output unfolded once; weights are transposed at
               build
    buffers    activations and gates overwrite the product they read, which nothing else sees
    products   gate and up, or the members of a group, are one product if their weights lie side by
               side in one storage
    calls      torch's own fused ops: `_addmm_activation` for relu, `glu` for a sigmoid gate, and in
               mode `mkldnn` oneDNN's linears (`mkldnn_linears.py`)

The arithmetic of mode `aten` is eager's. A call that needs a gradient, or runs under autocast or a
tracer, runs the reference. If one product makes the outputs of a group, they are views of it, as
those of a chunked projection are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchweld.core.activations import ACTIVATIONS
from torchweld.core.blocks import LayerForm, split_tensors
from torchweld.ops.backends import mkldnn_linears, reference_backend
from torchweld.ops.backends.abilities import Abilities, BackendMode
from torchweld.ops.backends.backend import (
    Backend,
    Form,
    Runner,
    check_build,
    check_features,
    mode_of,
    plain_reasons,
    values_alone,
)
from torchweld.ops.backends.weight_watch import WeightWatch, check_watchable, watchable

Step = Callable[[Tensor], Tensor]

# Devices that have `_addmm_activation`, as one kernel or one call.
_FUSED_RELU = ("cpu", "cuda")


# ---- parts of a layer: rows in, rows out ----


def _overwrite(form: LayerForm) -> Step | None:
    """The activation, overwriting its argument where torch can; None for identity."""
    if form.activation == "identity":
        return None
    known_ = ACTIVATIONS[form.activation]
    act, parameters = known_.apply_ or known_.apply, form.parameters
    return (lambda z: act(z, *parameters)) if parameters else act


def _product(weight_KN: Tensor, bias: Tensor | None) -> Step:
    if bias is None:
        return lambda x: torch.mm(x, weight_KN)
    return lambda x: torch.addmm(bias, x, weight_KN)


def _plain(form: LayerForm, weight_KN: Tensor, bias: Tensor | None) -> Step:
    if form.activation == "relu" and bias is not None and weight_KN.device.type in _FUSED_RELU:
        return lambda x: torch._addmm_activation(bias, x, weight_KN)
    product, act = _product(weight_KN, bias), _overwrite(form)
    return product if act is None else lambda x: act(product(x))


def _gated(form: LayerForm, products: Sequence[Step], last: bool) -> Step:
    """act(gate) · up, from one product that holds both or from one product each.

    Inside a chain the result may overwrite the gate, strided; an output must be contiguous.
    """
    act, gate_second = _overwrite(form), form.gate == "second"

    def finish(gate: Tensor, up: Tensor, contiguous: bool) -> Tensor:
        if act is not None:
            gate = act(gate)
        return gate.mul_(up) if contiguous or not last else gate * up

    def separate(x: Tensor) -> Tensor:
        return finish(products[0](x), products[1](x), True)

    def halves(x: Tensor) -> Tensor:
        gate, up = products[0](x).chunk(2, -1)
        return finish(up, gate, False) if gate_second else finish(gate, up, False)

    def interleaved(x: Tensor) -> Tensor:
        both = products[0](x)
        gate = both[:, ::2] if act is None else act(both[:, ::2])
        # The next product cannot read every second column without a copy, so this is one.
        return gate * both[:, 1::2]

    if len(products) == 2:
        return separate
    if form.gate == "interleaved":
        return interleaved
    if gate_second and form.activation == "sigmoid":
        return lambda x: torch.ops.aten.glu.default(products[0](x))
    return halves


# ---- weights ----


def _turned(weight: Tensor, form: LayerForm) -> Tensor:
    return weight if form.transposed else weight.t()


def joined(tensors: Sequence[Tensor], dim: int) -> Tensor | None:
    """One view of tensors that follow each other along `dim` in one storage, or None."""
    first = tensors[0]
    size, end = 0, first.storage_offset()
    for t in tensors:
        if (
            t.untyped_storage()._cdata != first.untyped_storage()._cdata
            or t.dtype != first.dtype
            or t.stride() != first.stride()
            or t.shape[:dim] + t.shape[dim + 1 :] != first.shape[:dim] + first.shape[dim + 1 :]
            or t.storage_offset() != end
        ):
            return None
        size += t.shape[dim]
        end += t.shape[dim] * t.stride(dim)
    shape = list(first.shape)
    shape[dim] = size
    return first.as_strided(shape, first.stride(), first.storage_offset())


def _joined_linears(
    forms: Sequence[LayerForm], weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None] | None:
    """Several Linears on one input as one, if they lie side by side: `[K, N]` weight and bias."""
    if len({form.transposed for form in forms}) > 1 or len(biases) not in (0, len(weights)):
        return None
    weight = joined(weights, 1 if forms[0].transposed else 0)
    if weight is None:
        return None
    if not biases:
        return _turned(weight, forms[0]), None
    bias = joined(biases, 0)
    return None if bias is None else (_turned(weight, forms[0]), bias)


def _layer(form: LayerForm, tensors: Sequence[Tensor], last: bool) -> Step:
    step = 2 if form.bias else 1
    weights, biases = tensors[::step], tensors[1::2] if form.bias else []
    if form.gate == "none":
        return _plain(form, _turned(weights[0], form), biases[0] if biases else None)
    if form.gate == "separate":
        one = _joined_linears([form], weights, biases)
        if one is not None:
            # Side by side, gate before up: the layout of "first".
            first = LayerForm(activation=form.activation, parameters=form.parameters, gate="first")
            return _gated(first, [_product(*one)], last)
    pairs = [(_turned(w, form), biases[i] if biases else None) for i, w in enumerate(weights)]
    return _gated(form, [_product(*pair) for pair in pairs], last)


# ---- whole blocks: x of any rank ----


def _fold(x: Tensor, K: int) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, K)


def _unfold(y: Tensor, x: Tensor) -> Tensor:
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def _chain(block: Form, tensors: Sequence[Tensor]) -> Step:
    parts = split_tensors(block.forms, tensors)
    steps = [_layer(form, own, i + 1 == len(parts)) for i, (form, own) in enumerate(parts)]
    K = block.K

    def run(x: Tensor) -> Tensor:
        z = _fold(x, K)
        for step in steps:
            z = step(z)
        return _unfold(z, x)

    return run


def _group(block: Form, tensors: Sequence[Tensor]) -> Callable[[Tensor], list[Tensor]]:
    parts = split_tensors(block.forms, tensors)
    K = block.K
    if all(form.gate == "none" for form in block.forms):
        weights = [own[0] for _, own in parts]
        biases = [own[1] for form, own in parts if form.bias]
        one = _joined_linears(block.forms, weights, biases)
        if one is not None and len(parts) > 1:
            return _one_product(block, *one)
    steps = [_layer(form, own, True) for form, own in parts]

    def run(x: Tensor) -> list[Tensor]:
        z = _fold(x, K)
        return [_unfold(step(z), x) for step in steps]

    return run


def _one_product(
    block: Form, weight_KN: Tensor, bias: Tensor | None
) -> Callable[[Tensor], list[Tensor]]:
    widths, K = [N for _, N in block.sizes], block.K
    acts = [_overwrite(form) for form in block.forms]
    alike = len({(form.activation, form.parameters) for form in block.forms}) == 1
    product = _plain(block.forms[0], weight_KN, bias) if alike else _product(weight_KN, bias)

    def run(x: Tensor) -> list[Tensor]:
        ys = torch.split_with_sizes(_unfold(product(_fold(x, K)), x), widths, -1)
        if alike:
            return list(ys)
        return [y if act is None else act(y) for y, act in zip(ys, acts, strict=True)]

    return run


# ---- the backend ----


@dataclass(frozen=True, kw_only=True)
class _Bound:
    """A way to run the block, valid as long as `watch` says so."""

    watch: WeightWatch
    run: Callable[[Tensor], Tensor | list[Tensor]]
    copied_bytes: int


class TorchRunner:
    """`block` bound to `tensors`. `mode` is one of TorchBackend's."""

    def __init__(self, block: Form, tensors: Sequence[Tensor], mode: str) -> None:
        self._block = block
        self._tensors = list(tensors)
        self._mode = mode
        self._bound = self._bind()

    @property
    def copied_bytes(self) -> int:
        return self._bound.copied_bytes

    @torch.no_grad()
    def _bind(self) -> _Bound:
        copying = self._mode == "mkldnn"
        # Watched before copying: the next call then finds an edit that happens in between.
        watch = WeightWatch(self._tensors, contents=copying)
        plain = [t.detach() for t in self._tensors]
        if copying:
            run, copied_bytes = mkldnn_linears.bind(self._block, plain)
            return _Bound(watch=watch, run=run, copied_bytes=copied_bytes)
        bind = _chain if self._block.kind == "chain" else _group
        return _Bound(watch=watch, run=bind(self._block, plain), copied_bytes=0)

    def __call__(self, x: Tensor) -> Tensor | list[Tensor]:
        if not values_alone(x, self._tensors):
            return reference_backend.run(self._block, x, self._tensors)
        check_features(x, self._block)
        bound = self._bound
        if not bound.watch.unchanged():
            bound = self._bound = self._bind()
        return bound.run(x)


class TorchBackend:
    """Fewer ops and fewer buffers than eager, and nothing compiled."""

    name = "torch"
    abilities = Abilities(
        devices=None,
        # With gradients it is the reference, so plans for training do not try it.
        modes=(
            BackendMode(name="aten", planned=("inference",)),
            BackendMode(name="mkldnn", packs=True),
        ),
        needs="nothing but torch",
        trains=True,
        deterministic=True,
    )

    def unavailable(self) -> list[str]:
        return []

    def unsupported_reasons(
        self,
        block: Form,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
        mode: str | None = None,
    ) -> list[str]:
        mode = mode_of(self, mode)
        reasons = plain_reasons(self, block, dtype, device)
        return reasons + (mkldnn_linears.reasons(dtype, device) if mode == "mkldnn" else [])

    def build(self, block: Form, tensors: Sequence[Tensor], mode: str | None = None) -> Runner:
        mode = check_build(self, block, tensors, mode)
        if mode == "mkldnn":
            check_watchable(tensors, "mode mkldnn of backend torch")
        elif not watchable(tensors):  # a transform or subclass needs more than values
            return reference_backend.ReferenceRunner(block, tensors)
        return TorchRunner(block, tensors, mode)


BACKEND: Backend = TorchBackend()
