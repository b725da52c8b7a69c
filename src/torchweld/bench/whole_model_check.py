"""Tensors of a whole model that were compared, as one check of a bench."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchweld.bench.bench_results import EXACT, NOT_FINITE, OutputCheck, told
from torchweld.core.not_measured import NotMeasured
from torchweld.numerics.model_check import TensorCheck

MOST_TOLD = 3


def output_check(compared: Sequence[TensorCheck]) -> OutputCheck:
    """The worst of all tensors, and what is wrong with some of them."""
    wrong = [f"{one.name} {one.reason}" for one in compared if not one.ok]
    hopeless = any(not math.isfinite(one.error) for one in compared)
    ratios = [one.error / one.reference_error for one in compared if one.reference_error > 0]
    shares = [one.error / one.allowed for one in compared if one.allowed > 0]
    unknown = NotMeasured(NOT_FINITE if hopeless else EXACT)
    return OutputCheck(
        ok=not wrong,
        error_ratio=unknown if hopeless or not ratios else told(max(ratios), NOT_FINITE),
        row_ratio=unknown if hopeless else told(max(shares, default=0.0), NOT_FINITE),
        rms_ratio=0.0,
        reason=_reason(wrong),
    )


def _reason(wrong: Sequence[str]) -> str | None:
    """The first of the reasons, and how many more there are: in training there may be hundreds."""
    more = [f"{len(wrong) - MOST_TOLD} more likewise"] if len(wrong) > MOST_TOLD else []
    return "; ".join([*wrong[:MOST_TOLD], *more]) or None
