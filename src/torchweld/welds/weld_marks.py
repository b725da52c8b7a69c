"""Tells welded modules from others: by names in their `__dict__`, and by their class."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchweld.core.argument_checks import check_model

KEY = "_torchweld"  # the only name that a weld adds to a module's __dict__
PLAN_KEY = "_torchweld_plan"  # in the root's __dict__: the plan by which the model was welded


def plain_class(kind: type) -> type:
    """The original class of a welded class; any other class is returned as it is."""
    # A subclass of a welded class (made by parametrize, for example) inherits the attribute.
    if getattr(kind, "_torchweld_class", None) is kind:
        base: type = kind._torchweld_base
        return base
    return kind


def plain_root(model: nn.Module) -> nn.Module:
    """The model itself, or the model inside torch.compile's wrappers."""
    inner = model.__dict__.get("_modules", {}).get("_orig_mod")
    return plain_root(inner) if isinstance(inner, nn.Module) else model


def checked_root(model: Any) -> nn.Module:
    """`plain_root` of what a user gave as the model; a TorchweldError if it is none."""
    check_model("torchweld", model)
    return plain_root(model)
