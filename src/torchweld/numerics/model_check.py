"""`tw.verify`: whether one model gives what another gives, judged against the model in float64.

In: a reference model, a candidate, what they are called with. Out: a `Check`, one `TensorCheck` for
each floating output and, in training, each gradient. A whole model rounds many times in a row, so
its outputs are judged as tensors, not row by row:

    max|candidate − exact| ≤ 2 · max|reference − exact| + slack, the same for the root mean square
    with 1.5; slack = 4 · eps · max|exact| · √(products that follow each other)

`exact` is the reference model run in float64 (`model_truth`). If it cannot run in float64, `exact`
is the reference itself, and `Check.against` says so. One run shows only one sample of the
reference's rounding errors; where everything cancels (the gradient of a key's bias) that says
little. So the reference runs a few times more with other rounding, and the largest of the errors
counts as its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torchweld.core.argument_checks import check_flags, check_model
from torchweld.core.errors import TorchweldError
from torchweld.core.html_shown import ShownInNotebooks
from torchweld.core.model_inputs import as_workloads
from torchweld.core.model_state import put_back
from torchweld.core.muted_warnings import untold
from torchweld.core.number_text import counted
from torchweld.numerics.model_results import Results, results
from torchweld.numerics.model_truth import ModelTruth, truth_of
from torchweld.numerics.numerical_rule import RMS_FACTOR, ROW_FACTOR, SLACK_EPS

# The mean over fewer elements depends on luck; their largest error is still judged.
FEWEST_FOR_RMS = 32

EXACT = "float64, module by module"
EAGER = "the reference itself"


@dataclass(frozen=True, kw_only=True)
class TensorCheck:
    """One tensor of both models. Errors are the largest over the largest exact value."""

    name: str  # "output 0", "grad layers.0.up.weight"
    ok: bool
    error: float  # of the candidate
    reference_error: float
    allowed: float
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Check(ShownInNotebooks):
    """What `verify` found; true if every tensor is as good as the reference's."""

    compared: tuple[TensorCheck, ...]
    against: str
    why_not_exact: str = ""

    @staticmethod
    def of(compared: Sequence[TensorCheck], why_not_exact: str) -> Check:
        against = EAGER if why_not_exact else EXACT
        return Check(compared=tuple(compared), against=against, why_not_exact=why_not_exact)

    @property
    def ok(self) -> bool:
        return bool(self.compared) and all(one.ok for one in self.compared)

    @property
    def error_ratio(self) -> float:
        """The largest error over the reference's own; 0 where that is not known."""
        known = [one for one in self.compared if one.reference_error > 0]
        return max((one.error / one.reference_error for one in known), default=0.0)

    @property
    def reason(self) -> str:
        """What is wrong, in one line; empty if nothing is."""
        if not self.compared:
            return "there is nothing to compare: no floating-point outputs"
        return "; ".join(f"{one.name} {one.reason}" for one in self.compared if not one.ok)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        verdict = "the same numbers" if self.ok else f"not the same: {self.reason}"
        return (
            f"{verdict}; {counted(len(self.compared), 'tensor')}, error {self.error_ratio:.2f} of "
            f"the reference's, judged against {self.against}"
        )


def verify(
    reference: nn.Module, candidate: nn.Module, inputs: Any, *, training: bool = False
) -> Check:
    """Whether `candidate` gives what `reference` gives on `inputs`.

    Both run in eval mode without gradients, or with `training` forward and backward, the loss being
    the sum over the floating outputs; modes and gradients are put back. Both get the same random
    numbers. To compare one model welded and not, see `tw.check_calls` and `tw.disabled`.
    """
    check_model("verify", reference, "reference", scripted=True)
    check_model("verify", candidate, "candidate", scripted=True)
    check_flags("verify", training=training)
    if reference is candidate:
        raise TorchweldError(
            "reference and candidate are the same object, which agrees with itself; give a copy "
            "made before the change (copy.deepcopy)"
        )
    compared: list[TensorCheck] = []
    why = ""
    workloads = as_workloads(inputs)
    for workload in workloads:
        with untold(), put_back(reference, training), put_back(candidate, training):
            expected = results(reference, workload, training)
            truth = truth_of(reference, workload, training)
            got = results(candidate, workload, training)
        why = why or truth.why_not_exact
        found = compare_results(got, expected, truth, depth_of(reference))
        prefix = f"{workload.name}: " if len(workloads) > 1 else ""
        compared += [replace(one, name=f"{prefix}{one.name}") for one in found]
    return Check.of(compared, why)


def depth_of(model: nn.Module) -> int:
    """Roughly how many roundings follow each other."""
    return max(1, sum(p.dim() >= 2 for p in model.parameters()))


def compare_results(
    got: Results, expected: Results, truth: ModelTruth, depth: int
) -> list[TensorCheck]:
    """Each tensor of the candidate beside the reference's."""
    missing = sorted(expected.keys() ^ got.keys())
    found = [
        TensorCheck(
            name=name,
            ok=False,
            error=math.inf,
            reference_error=0.0,
            allowed=0.0,
            reason="exists in only one of the two",
        )
        for name in missing
    ]
    for name in expected:
        if name in got:
            exact = (truth.exact or {}).get(name)
            jittered = [one[name] for one in truth.jittered if name in one]
            found.append(_compared(name, got[name], expected[name], exact, jittered, depth))
    return found


def _compared(
    name: str,
    got: Tensor,
    expected: Tensor,
    exact: Tensor | None,
    jittered: Sequence[Tensor],
    depth: int,
) -> TensorCheck:
    def wrong(reason: str) -> TensorCheck:
        return TensorCheck(
            name=name, ok=False, error=math.inf, reference_error=0.0, allowed=0.0, reason=reason
        )

    if got.shape != expected.shape or got.dtype != expected.dtype:
        return wrong(
            f"is {got.dtype} {list(got.shape)} and not {expected.dtype} {list(expected.shape)}"
        )
    if not torch.equal(got.isfinite(), expected.isfinite()):
        return wrong("has NaN or Inf at other places")
    truth = expected.double() if exact is None else exact
    if truth.shape != got.shape:
        return wrong(f"is {list(truth.shape)} in float64 and {list(got.shape)} here")
    others = [expected, *(other for other in jittered if other.shape == got.shape)]
    finite = truth.isfinite() & expected.isfinite()
    for other in others:
        finite &= other.isfinite()
    if not bool(finite.any()):
        return TensorCheck(name=name, ok=True, error=0.0, reference_error=0.0, allowed=0.0)
    size = float(truth[finite].abs().max())
    ours = (got.double() - truth)[finite]
    theirs = [(other.double() - truth)[finite] for other in others]
    slack = SLACK_EPS * torch.finfo(got.dtype).eps * size * math.sqrt(depth)
    error, (reference_error, *more) = _largest(ours), list(map(_largest, theirs))
    allowed = ROW_FACTOR * max([reference_error, *more]) + slack
    rms, allowed_rms = _rms(ours), RMS_FACTOR * max(map(_rms, theirs)) + slack
    reason = ""
    if error > allowed:
        reason = f"is off by {error:.3g}, {error / max(allowed, 1e-300):.3g} times what is allowed"
    elif ours.numel() >= FEWEST_FOR_RMS and rms > allowed_rms:
        reason = f"has {rms / allowed_rms:.2f} times the root mean square error that is allowed"
    unit = size or 1.0
    return TensorCheck(
        name=name,
        ok=not reason,
        error=error / unit,
        reference_error=reference_error / unit,
        allowed=allowed / unit,
        reason=reason,
    )


def _largest(values: Tensor) -> float:
    return float(values.abs().max())


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
