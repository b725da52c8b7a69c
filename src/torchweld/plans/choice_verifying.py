"""Whether a choice gives right numbers for a block, by the numerical rule.

In: a model, a block of it, a call to verify on. Out: a `Trial` without a speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from torchweld.core.blocks import LayerForm, parse_spec, split_tensors, with_dropout
from torchweld.core.not_measured import NotMeasured
from torchweld.core.safe_text import clean
from torchweld.numerics.numerical_rule import Judgement, check_block
from torchweld.ops import backends
from torchweld.ops.backends.backend import Form, device_of
from torchweld.plans.block_calls import input_like, tensors_of
from torchweld.plans.plan import UNASKED, TensorError, Trial, Verdict
from torchweld.welds.found_blocks import Block, Call
from torchweld.welds.weld_decisions import Choice

# The most rows and columns that a block is verified on: all are alike, and float64 is slow and
# large.
MOST_VERIFIED_ROWS = 32
MOST_VERIFIED_COLUMNS = 4096
MOST_SAID = 400  # characters of what a backend said when it failed


def verify_choice(
    model: nn.Module, block: Block, call: Call, choice: Choice, training: bool
) -> Trial:
    """Whether the choice gives right numbers, by the numerical rule; nothing is timed.

    In training the gradients are judged too. A block with dropout is verified while it drops out.
    A backend that fails is a trial with its reason: the plan goes on with the others.
    """
    try:
        return _verify(model, block, call, choice, training)
    except Exception as error:
        return failed(choice, error)


def _verify(model: nn.Module, block: Block, call: Call, choice: Choice, training: bool) -> Trial:
    tensors = [tensor.detach() for tensor in tensors_of(model, block)]
    forms = parse_spec(block.form)
    if training:
        if 1.0 in block.dropout:
            return unverified(choice, "cannot serve", "its dropout leaves nothing")
        forms = with_dropout(forms, block.dropout)
    form = Form.of("chain", forms, tensors)
    backend = backends.backend_named(choice.backend)
    dtype, device = getattr(torch, call.dtype), device_of(tensors[0])
    reasons = backend.unsupported_reasons(form, [call.shape], dtype, device, choice.mode)
    if reasons:
        return unverified(choice, "cannot serve", "; ".join(reasons))
    if tensors[0].is_meta:
        return unverified(choice, "not measured", "the weights are on meta: no numbers, no times")
    x = input_like(call, rows=max(1, min(call.rows, MOST_VERIFIED_ROWS))).to(device)
    columns = _some_columns(forms[-1], block.out_features)
    grads = None
    if training:
        generator = torch.Generator("cpu").manual_seed(1)
        judged_columns = len(range(block.out_features)[columns])
        shape = (*x.shape[:-1], judged_columns)
        grads = [torch.randn(shape, generator=generator, device="cpu").to(x)]

    copied = 0

    def judged(tensors: Sequence[Tensor]) -> dict[str, Judgement]:
        def candidate(x: Tensor, given: Sequence[Tensor]) -> Tensor:
            nonlocal copied
            whole = _widened(forms, tensors, columns, given) if training else tensors
            runner = backend.build(form, whole, choice.mode)
            y = runner(x)
            copied = runner.copied_bytes
            assert isinstance(y, Tensor)
            return y[..., columns]

        few = _narrowed(forms, tensors, columns)
        return check_block(candidate, x, few, forms, grads=grads)

    return replace(judged_trial(choice, judged, tensors), copied_bytes=copied)


def judged_trial(
    choice: Choice,
    judged: Callable[[Sequence[Tensor]], dict[str, Judgement]],
    tensors: Sequence[Tensor],
) -> Trial:
    """What `judged` says of the tensors, as a trial that is still to be timed."""
    found = judged(tensors)
    if not all(judgement.meaningful for judgement in found.values()):
        # The weights are zero, as those of a new adapter are. Random weights say more.
        found = {k: v for k, v in found.items() if not v.within} or judged(_random_like(tensors))
    wrong = [f"{what}: {j.reason}" for what, j in found.items() if not j.within]
    ratio = max(max(j.row_ratio, j.rms_ratio) for j in found.values())
    return Trial(
        choice=choice,
        verified=not wrong,
        verdict="wrong" if wrong else "not measured",
        speed=NotMeasured("; ".join(wrong)) if wrong else UNASKED,
        error_ratio=min(ratio, 1e30),
        errors=tuple(_error(what, judgement) for what, judgement in found.items()),
    )


def _error(what: str, found: Judgement) -> TensorError:
    return TensorError(
        tensor=what,
        eager=brief(found.eager_error),
        fused=brief(found.error),
        of_allowed=brief(max(found.row_ratio, found.rms_ratio)),
        ok=found.within,
    )


def brief(value: float) -> float:
    """Four digits: more say nothing about an error, and make plans larger."""
    return float(f"{value:.4g}")


def unverified(choice: Choice, verdict: Verdict, reason: str) -> Trial:
    why = NotMeasured(reason)
    return Trial(choice=choice, verified=False, verdict=verdict, speed=why, error_ratio=why)


FAILED = "it failed while it was verified: "


def failed(choice: Choice, error: Exception) -> Trial:
    """The trial of a choice that raised. Only the first line of its message is kept."""
    return unverified(choice, "cannot serve", FAILED + said_by(error))


def said_by(error: Exception) -> str:
    """The kind of an error and the first line of its message, as a trial can keep them."""
    first = next(iter(str(error).strip().splitlines()), "")
    words = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return clean(words[:MOST_SAID])


def has_failed(trial: Trial) -> bool:
    """Whether its backend raised; another time it may not."""
    return trial.verdict == "cannot serve" and trial.reason.startswith(FAILED)


def _random_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator("cpu").manual_seed(2)
    return [
        (drawn / max(drawn.shape[-1], 1) ** 0.5).to(t)
        for t in tensors
        for drawn in [torch.randn(t.shape, generator=generator, device="cpu")]
    ]


def _some_columns(form: LayerForm, count: int) -> slice:
    """All, or a part of a wide last layer: in float64 a language model's head is as large as the
    model. The random numbers of a dropout go by all columns, so it needs them all."""
    if form.gate != "none" or form.dropout > 0 or count <= MOST_VERIFIED_COLUMNS:
        return slice(None)
    step = -(-count // MOST_VERIFIED_COLUMNS)
    return slice(count - 1 - (count - 1) // step * step, None, step)  # the last one is among them


def _narrowed(
    forms: Sequence[LayerForm], tensors: Sequence[Tensor], columns: slice
) -> list[Tensor]:
    """The tensors, with only these columns of the last layer."""
    if columns == slice(None):
        return list(tensors)
    earlier, own = _at_last_layer(forms, tensors)
    return [*earlier, *(t[_columns_of(t, forms[-1], columns)] for t in own)]


def _widened(
    forms: Sequence[LayerForm], tensors: Sequence[Tensor], columns: slice, given: Sequence[Tensor]
) -> list[Tensor]:
    """The whole tensors, with what is given in these columns of the last layer.

    Gradients reach what is given. The other columns of the output have a gradient of zero.
    """
    if columns == slice(None):
        return list(given)
    _, own = _at_last_layer(forms, tensors)
    earlier, narrow = _at_last_layer(forms, given)
    wide = [whole.detach().clone() for whole in own]
    for whole, part in zip(wide, narrow, strict=True):
        whole[_columns_of(whole, forms[-1], columns)] = part
    return [*earlier, *wide]


def _at_last_layer(
    forms: Sequence[LayerForm], tensors: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Two lists: the tensors of the layers before the last one, and those of the last."""
    *earlier, (_, own) = split_tensors(forms, tensors)
    return [t for _, before in earlier for t in before], list(own)


def _columns_of(tensor: Tensor, form: LayerForm, columns: slice) -> tuple[slice, ...]:
    """The index that selects columns of the output in a weight or a bias of its layer."""
    return (slice(None), columns) if tensor.dim() == 2 and form.transposed else (columns,)
