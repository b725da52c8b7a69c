"""The ops of training in plain PyTorch, for a torchweld without its kernels.

Modules call `chain_training`, and autograd differentiates what it is made of. The other ops are
parts of the compiled one. Here they serve graphs that were made where there are kernels; their
backward computes everything again from x, whatever was saved. M rows, K in, N out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from torchweld.core.blocks import LayerForm, parse_spec, split_tensors
from torchweld.core.errors import BlockError
from torchweld.ops.backends import reference_backend
from torchweld.ops.backends.reference_backend import Primitives, layer_output, pre_activations


def parse_spec_without_dropout(spec: str) -> tuple[LayerForm, ...]:
    """Parses a spec, and refuses dropout: only the ops for training draw random numbers."""
    forms = parse_spec(spec)
    if any(form.dropout for form in forms):
        raise BlockError(
            f"the spec {spec!r} has dropout, which torchweld::chain_training alone applies; leave "
            "the flag drop out for inference"
        )
    return forms


def chain_training(
    x: Tensor, params: list[Tensor], spec: str, recompute: bool | None = None
) -> Tensor:
    """Autograd keeps what it keeps in eager: there is no kernel that could do with less."""
    return reference_backend.chain(x, params, parse_spec(spec))


def dropout_mask(like: Tensor, features: int, p: float) -> Tensor:
    """Bit i of byte j is column 8 j + i."""
    shape = (*like.shape[:-1], features)
    bits = torch.empty(shape, dtype=torch.bool, device=like.device).bernoulli_(1 - p)
    whole = torch.nn.functional.pad(bits.byte(), (0, -features % 8))
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=like.device)
    return (whole.reshape(*like.shape[:-1], -1, 8) * powers).sum(-1, dtype=torch.uint8)


def chain_saving(
    x: Tensor, params: list[Tensor], masks: list[Tensor], spec: str, save: bool
) -> list[Tensor]:
    forms, saved = parse_spec(spec), []
    by = Primitives(drop=_masked(masks))
    for i, (form, own) in enumerate(split_tensors(forms, params)):
        before = pre_activations(x, form, own)
        saved += [t.contiguous() for t in before] if save and _saves(forms, i) else []
        x = layer_output(form, before, by)
    if not save and any(_saves(forms, i) for i in range(len(forms))):
        saved = [torch.zeros(1, dtype=torch.int64)]  # in place of a checksum: not taken
    return [x, *saved]


def group_saving(x: Tensor, params: list[Tensor], spec: str) -> list[Tensor]:
    ys, saved = [], []
    for form, own in split_tensors(parse_spec_without_dropout(spec), params):
        before = pre_activations(x, form, own)
        saved += [t.contiguous() for t in before] if _saves([form], 0) else []
        ys.append(layer_output(form, before))
    return [*ys, *saved]


def chain_backward(
    grad: Tensor,
    x: Tensor,
    params: list[Tensor],
    saved: list[Tensor],
    masks: list[Tensor],
    spec: str,
    needed: list[bool],
) -> list[Tensor]:
    forms = parse_spec(spec)

    def run(x: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
        return [reference_backend.chain(x, params, forms, Primitives(drop=_masked(masks)))]

    return _gradients(run, [grad], [x, *params], needed)


def group_backward(
    grads: list[Tensor],
    x: Tensor,
    params: list[Tensor],
    saved: list[Tensor],
    spec: str,
    needed: list[bool],
) -> list[Tensor]:
    forms = parse_spec_without_dropout(spec)

    def run(x: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
        return reference_backend.group(x, params, forms)

    return _gradients(run, grads, [x, *params], needed)


def _saves(forms: Sequence[LayerForm], i: int) -> bool:
    """The gradient of a last layer without activation and gate does not depend on its value."""
    last = i + 1 == len(forms)
    return not (last and forms[i].activation == "identity" and forms[i].gate == "none")


def _masked(masks: Sequence[Tensor]) -> Callable[[LayerForm, Tensor], Tensor]:
    """Dropout by given masks, one after the other."""
    left: Iterator[Tensor] = iter(masks)

    def drop(form: LayerForm, y: Tensor) -> Tensor:
        mask = next(left)
        shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
        bits = (mask.unsqueeze(-1) >> shifts) & 1
        kept = bits.flatten(-2)[..., : y.shape[-1]]
        return y * kept.to(y.dtype).div(1 - form.dropout)

    return drop


def _gradients(
    run: Callable[[Tensor, Sequence[Tensor]], list[Tensor]],
    grads: Sequence[Tensor],
    given: Sequence[Tensor],
    needed: Sequence[bool],
) -> list[Tensor]:
    """The gradients that are needed, in order; differentiable where gradients are on."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # A tensor of the user's graph stays in it, for a second derivative.
        own = [t if again and t.requires_grad else t.detach().requires_grad_() for t in given]
        ys = run(own[0], own[1:])
        wanted = [t for t, asked in zip(own, needed, strict=True) if asked]
        found = torch.autograd.grad(ys, wanted, grads, create_graph=again) if wanted else ()
    return [grad.contiguous() for grad in found]
