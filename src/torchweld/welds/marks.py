"""How a welded module is known: by names in its `__dict__`, and by its class."""

from __future__ import annotations

from torch import nn

KEY = "_torchweld"  # the one name that welding adds to a module's __dict__
PLAN_KEY = "_torchweld_plan"  # in the model itself: the plan that it was welded by


def plain_class(kind: type) -> type:
    """The class under a welded one; any other class is itself."""
    # A subclass made of a welded class (by parametrize, say) inherits the attribute.
    if getattr(kind, "_torchweld_class", None) is kind:
        base: type = kind._torchweld_base
        return base
    return kind


def plain_root(model: nn.Module) -> nn.Module:
    """The model itself, or what torch.compile has wrapped."""
    inner = model.__dict__.get("_modules", {}).get("_orig_mod")
    return inner if isinstance(inner, nn.Module) else model
