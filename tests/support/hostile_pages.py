"""Names that would be markup, break a layout or turn a line around: in a model, all over a page."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from itertools import cycle
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from torch import Tensor, nn

T = TypeVar("T")
LONG = "x" * 9_990 + "<b>the end"
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</script><script>alert(2)</script>",
    "<!--<script>",
    "javascript:alert(3)",
    "\u202egnp.\u2066evil",
    "__proto__",
    "${alert(4)}{{4*4}}",
    "url(https://example.com/x)",
    LONG,
)


class Named(nn.Module):
    """Two Linears under each name, one after the other."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        for name in names:
            inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
            self.add_module(name.replace(".", "_"), inner)

    def forward(self, x: Tensor) -> Tensor:
        for one in self.children():
            x = one(x)
        return x


def hostile_model() -> nn.Module:
    """Every module, and the class itself, has a name meant to do harm."""
    made: type[Named] = type('<svg onload="alert(5)">', (Named,), {})
    return made(HOSTILE).eval()


def with_names(value: T) -> T:
    """A record in which every free text is one of HOSTILE, or empty, equal texts the same one.

    Texts of which only some words are allowed stay, and so do those that are empty.
    """
    found: dict[str, str] = {"": ""}
    endless = cycle((*HOSTILE, ""))

    def named(text: str) -> str:
        if text not in found:
            name = next(endless)
            # A number keeps different texts apart.
            found[text] = name and f"{name}{len(found)}"
        return found[text]

    def inside(value: Any, hint: Any) -> Any:
        if get_origin(hint) is Literal or any(get_origin(one) is Literal for one in get_args(hint)):
            return value
        if isinstance(value, str):
            return named(value)
        if isinstance(value, tuple):
            hints = [one for one in get_args(hint) if get_origin(one) is tuple or one is str]
            return tuple(inside(one, hints[0] if hints else None) for one in value)
        if is_dataclass(value) and not isinstance(value, type):
            declared = get_type_hints(type(value))
            names = [field.name for field in fields(value)]
            texts = {name: inside(getattr(value, name), declared[name]) for name in names}
            return replace(value, **texts)
        return value

    changed: T = inside(value, None)
    return changed
