"""Checks of the arguments of public functions, with one kind of message.

A message names the function, the argument, the given value and what is allowed. The checks come
first, so that a wrong call fails before anything is changed.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchweld.core.errors import TorchweldError

# Called with what is being done and how far it is, from 0 to 1.
Progress = Callable[[str, float], None]


def shown(value: Any) -> str:
    """A value in a message: itself if it is short, else its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, (bool, numbers.Number, str, bytes)):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    return f"a {type(value).__name__}"


def misfit(who: str, name: str, value: Any, allowed: str) -> TorchweldError:
    return TorchweldError(f"{who}: {name} is {shown(value)}; expected {allowed}")


def check_model(who: str, value: Any, name: str = "model", *, scripted: bool = False) -> None:
    """An nn.Module. A scripted or traced one passes only if its Python code is not needed."""
    if not isinstance(value, nn.Module):
        raise misfit(who, name, value, "a torch.nn.Module, or one wrapped by torch.compile")
    if isinstance(getattr(value, "_orig_mod", value), torch.jit.ScriptModule) and not scripted:
        raise TorchweldError(
            f"{who}: {name} was made by torch.jit.script or torch.jit.trace, which leave no Python "
            "code to look into; give the model that it was made of, and script the result"
        )


def check_kind(who: str, name: str, value: Any, kind: type, remedy: str) -> None:
    if not isinstance(value, kind):
        raise misfit(who, name, value, f"a {kind.__name__}: {remedy}")


def check_flags(who: str, **given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, bool):
            raise misfit(who, name, value, "True or False")


def check_optional_flags(who: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None and not isinstance(value, bool):
            raise misfit(who, name, value, "True, False or None")


def check_number(
    who: str, name: str, value: Any, *, above: float, most: float | None = None
) -> None:
    """A finite number; a bool or a text is not one."""
    allowed = f"a number above {above:g}" + (f", at most {most:g}" if most is not None else "")
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or value <= above:
        raise misfit(who, name, value, allowed)
    if most is not None and value > most:
        raise misfit(who, name, value, allowed)


def check_whole(who: str, name: str, value: Any, *, least: int) -> None:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise misfit(who, name, value, f"a whole number of at least {least}")


def check_progress(who: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise misfit(who, "progress", value, "a function of what is being done and how far it is")


def check_path(who: str, value: Any) -> None:
    """A path as open() takes it; a number would mean a file that is already open."""
    if not isinstance(value, (str, os.PathLike)):
        raise misfit(who, "path", value, "the path of a file, as text or a pathlib.Path")
