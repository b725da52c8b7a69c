"""Says that a welded model runs its original code, once for each model and condition of the call.

In: a condition that a joint has counted. Out: an `OriginalCodeWarning` with the remedy, if there is
one and the user does not know already. A model that has run fused is called as it should be, so
what it meets later is only counted. The exception is a long row of calls with gradients whose
weights never change: a server's threads, say, since torch.inference_mode() ends at a thread's edge.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchweld.core.muted_warnings import is_untold
from torchweld.core.safe_text import clean
from torchweld.welds.guarding.call_modes import remedy_of
from torchweld.welds.weld_decisions import Decision
from torchweld.welds.weld_marks import plain_class

# Calls of one block with gradients, after it has run fused: whoever trains has stepped by then.
LONG_ROW = 100

_PLAN_TOO = "Plan with such inputs too: tw.fuse(model, [these, those])."

# Conditions of the model's surroundings. All others are about what one block was given.
_WHOLE = frozenset(("training mode", "gradients", "autocast", "global hooks"))


class OriginalCodeWarning(UserWarning):
    """A welded model was called so that it runs its original code."""


class WeldedModel:
    """What the joints of one welding share; a copy of the model has one of its own."""

    def __init__(self, name: str, muted: bool = False) -> None:
        self.name, self.muted = name, muted
        self.fused = False  # whether any block of it has run fused
        self.gatherings: dict[str, Any] = {}  # of its groups, by name: see gathering.py
        self._said: set[str] = set()
        self._lock = threading.Lock()

    @staticmethod
    def of(root: nn.Module) -> WeldedModel:
        return WeldedModel(plain_class(type(root)).__name__, is_untold())

    def __reduce__(self) -> tuple[Any, ...]:
        return WeldedModel, (self.name, self.muted)

    def first(self, condition: str) -> bool:
        with self._lock:
            if condition in self._said:
                return False
            self._said.add(condition)
            return True


class Telling:
    """Warns about one welded module; `done` has conditions that need no further warning."""

    def __init__(self, decision: Decision, model: WeldedModel) -> None:
        self.decision, self.model = decision, model
        self.done: set[str] = set()
        self.fused = False  # whether a call was served, other than in a compiled graph
        self._row = 0
        self._versions: list[int] = []

    def served(self) -> None:
        self.fused = self.model.fused = True

    def hear(self, condition: str, x: object, weights: Sequence[Tensor]) -> None:
        """Warns about a condition that is not in `done`, if that helps the user."""
        if self.model.muted or is_untold():
            return
        if self.model.fused if condition in _WHOLE else self.fused:
            if condition != "gradients":
                self.done.add(condition)
                return
            if not self._goes_on(weights):
                return
        self.done.add(condition)
        said = advice(condition, self.decision, x)
        if said is None or not self.model.first(condition):
            return
        path, name = clean(self.decision.block.path), clean(self.model.name)
        what = f"block {path} of {name}" if path and condition not in _WHOLE else name
        purpose = "training" if self.decision.training else "inference"
        why, remedy = said
        warnings.warn(
            f"torchweld: {what} is welded for {purpose}, but runs its original code, because {why}."
            f" {remedy} tw.stats(model) counts such calls.",
            OriginalCodeWarning,
            stacklevel=_stacklevel(),
        )

    def _goes_on(self, weights: Sequence[Tensor]) -> bool:
        """Whether many calls in a row had gradients on, but no weight was trained."""
        versions = [0 if t.is_inference() else t._version for t in weights]
        if self._row == 0:
            self._versions = versions
        self._row += 1
        if self._row < LONG_ROW:
            return False
        self.done.add("gradients")
        trained = any(t.is_leaf and t.grad is not None for t in weights)
        idle = versions == self._versions and not trained
        return idle and any(t.requires_grad for t in weights)


def advice(condition: str, decision: Decision, x: object) -> tuple[str, str] | None:
    """The reason and a remedy; None if there is no remedy, or this is intended."""
    if condition == "training mode":
        if decision.training:  # a dropout that was not seen in training, say
            return None
        if torch.is_grad_enabled():
            return "it is in training mode and gradients are on", (
                "Call model.eval() first, and the model under torch.inference_mode(); or weld it "
                "with training=True."
            )
        return "it is in training mode", (
            "Call model.eval() first, or weld the model with training=True."
        )
    if condition == "gradients":
        return "gradients are on", (
            "Call the model under torch.inference_mode() or torch.no_grad(), or weld it with "
            "training=True."
        )
    if condition == "autocast":
        return "autocast is on", (
            "Call the model outside of torch.autocast; to have it in bfloat16, convert it "
            "(model.bfloat16()) and weld it then."
        )
    if condition == "global hooks":
        return "hooks on all modules are set, and have to see the modules inside", (
            "Remove them, if you can do without."
        )
    if (remedy := remedy_of(condition)) is not None:
        return f"its code asks about modes of the call, which has {condition}", remedy
    return _about(condition, decision, x) if isinstance(x, Tensor) else None


def _about(condition: str, decision: Decision, x: Tensor) -> tuple[str, str] | None:
    """About what a block was given."""
    block = decision.block
    width = x.shape[-1] if x.dim() else 0
    if condition == "another dtype":
        found = str(x.dtype).removeprefix("torch.")
        return f"its input is {found}, and it was planned in {block.dtype}", (
            f"Give it {block.dtype}, or weld the model again in {found}."
        )
    if condition == "another device":
        return f"its input is on {x.device.type}", (
            "Move model and inputs to the device that it was welded on, or weld it again there."
        )
    if width != block.in_features:
        return None  # the original has an error for it
    if condition == "rows":
        rows = x.numel() // block.in_features
        if not rows or any(first <= rows <= last for first, last, _ in decision.by_rows):
            return None  # nothing to do, or measured and not faster
        welded = [r[:2] for r in (*decision.by_rows, *decision.in_group) if r[2] is not None]
        ranges = ", ".join(
            str(first) if first == last else f"{first} to {last}"
            for first, last in dict.fromkeys(sorted(welded))
        )
        return f"its input has {rows} rows, and the plan covers {ranges}", _PLAN_TOO
    if condition == "another shape":
        return f"its input has the shape {list(x.shape)}, unlike those planned with", _PLAN_TOO
    if condition == "other arguments":
        return "it was given arguments that it was not planned with", _PLAN_TOO
    return None


def _stacklevel() -> int:
    """The stack level of the line that calls the model."""
    entries = (nn.Module._wrapped_call_impl.__code__, nn.Module._call_impl.__code__)
    frame, level, found = sys._getframe(1), 1, 2  # 1 is the caller, which warns
    while frame.f_back is not None:
        level += 1
        if frame.f_code in entries:
            found = level
        frame = frame.f_back
    return found
