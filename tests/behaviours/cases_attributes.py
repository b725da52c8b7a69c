"""Cases that change what forward reads from the module itself: attributes, classes, methods."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.behaviours.harness import (
    Mlp,
    Steps,
    X,
    before_and_after,
    either,
    inside,
    refused,
    welded,
)
from torch import Tensor, nn


class Flagged(Mlp):
    """Reads `self.flag`, wherever it is defined."""

    flag: Any

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y.tanh() if self.flag else y


@welded
def an_instance_attribute_changes() -> Steps:
    class Model(Flagged):
        def __init__(self) -> None:
            super().__init__()
            self.flag = False

    yield from before_and_after(Model(), lambda m: setattr(m, "flag", True))


@welded
def an_instance_attribute_changes_and_changes_back() -> Steps:
    class Model(Flagged):
        def __init__(self) -> None:
            super().__init__()
            self.flag = False

    model = yield Model()
    yield model(X)
    model.flag = True
    yield model(X)
    model.flag = False
    yield inside(model(X))


@welded
def an_instance_attribute_takes_an_equal_value_of_another_type() -> Steps:
    class Model(Flagged):
        def __init__(self) -> None:
            super().__init__()
            self.flag = 0

    yield from before_and_after(Model(), lambda m: setattr(m, "flag", False))


@welded
def an_attribute_that_forward_does_not_read_changes() -> Steps:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.note: object = ["anything"]

    model = yield Model()
    yield model(X)
    model.note = {"else": object()}
    yield inside(model(X))


@welded
def a_new_attribute_that_forward_does_not_read() -> Steps:
    model = yield Mlp()
    yield model(X)
    model.note = 3
    yield inside(model(X))


@welded
def a_class_attribute_is_shadowed_on_the_instance() -> Steps:
    class Model(Flagged):
        flag = False

    yield from before_and_after(Model(), lambda m: setattr(m, "flag", True))


@welded
def a_class_attribute_changes() -> Steps:
    class Model(Flagged):
        flag = False

    yield from before_and_after(Model(), lambda _: setattr(Model, "flag", True))


@welded
def a_class_attribute_of_a_base_changes() -> Steps:
    class Base(Flagged):
        flag = False

    class Model(Base):
        pass

    yield from before_and_after(Model(), lambda _: setattr(Base, "flag", True))


@welded
def a_class_attribute_of_a_base_is_shadowed_by_the_class() -> Steps:
    class Base(Flagged):
        flag = False

    class Model(Base):
        pass

    yield from before_and_after(Model(), lambda _: setattr(Model, "flag", True))


@welded
def an_instance_attribute_is_deleted_from_over_a_class_attribute() -> Steps:
    class Model(Flagged):
        flag = True

        def __init__(self) -> None:
            super().__init__()
            self.flag = False

    yield from before_and_after(Model(), lambda m: delattr(m, "flag"))


@welded
def an_attribute_read_through_type_self() -> Steps:
    class Model(Mlp):
        flag = False

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if type(self).flag else y

    yield from before_and_after(Model(), lambda _: setattr(Model, "flag", True))


@welded
def an_attribute_read_through_dunder_class() -> Steps:
    class Model(Mlp):
        flag = False

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if self.__class__.flag else y

    yield from before_and_after(Model(), lambda _: setattr(Model, "flag", True))


@welded
def an_attribute_appears_that_getattr_had_a_default_for() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if getattr(self, "flag", False) else y

    yield from before_and_after(Model(), lambda m: setattr(m, "flag", True))


@welded
def an_attribute_appears_on_the_class_that_getattr_had_a_default_for() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if getattr(self, "flag", False) else y

    yield from before_and_after(Model(), lambda _: setattr(Model, "flag", True))


@welded
def an_attribute_appears_that_hasattr_asked_for() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if hasattr(self, "gate") else y

    yield from before_and_after(Model(), lambda m: setattr(m, "gate", None))


@welded
def an_attribute_appears_that_was_missed_with_attribute_error() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            try:
                return y * self.factor  # type: ignore[operator]
            except AttributeError:
                return y

    yield from before_and_after(Model(), lambda m: setattr(m, "factor", 3.0))


@welded
def a_module_appears_that_hasattr_asked_for() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return self.last(y) if hasattr(self, "last") else y  # type: ignore[operator]

    yield from before_and_after(Model(), lambda m: setattr(m, "last", nn.Tanh()))


@welded
def a_none_attribute_becomes_a_module() -> Steps:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.last = None

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y if self.last is None else self.last(y)

    yield from before_and_after(Model(), lambda m: setattr(m, "last", nn.Tanh()))


@welded
def a_buffer_appears_that_was_none() -> Steps:
    class Model(Mlp):
        mask: Tensor | None

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", None)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y if self.mask is None else y * self.mask

    yield from before_and_after(Model(), lambda m: setattr(m, "mask", torch.zeros(12)))


@refused(r"cases_attributes\.py:\d+")
def an_attribute_whose_name_is_computed() -> Steps:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.flag_up = self.flag_down = False

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if any(getattr(self, f"flag_{n}") for n in ("up", "down")) else y

    yield from before_and_after(Model(), lambda m: setattr(m, "flag_down", True))


@either
def a_key_of_the_instance_dict() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if self.__dict__.get("flag") else y

    yield from before_and_after(Model(), lambda m: setattr(m, "flag", True))


@either
def vars_of_the_instance() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if "flag" in vars(self) else y

    yield from before_and_after(Model(), lambda m: setattr(m, "flag", True))


@either
def a_getattr_of_its_own() -> Steps:
    class Model(Mlp):
        def __getattr__(self, name: str) -> Any:
            if name == "flag":
                return torch.get_default_dtype() is torch.float64
            return super().__getattr__(name)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if self.flag else y

    def change(_: nn.Module) -> None:
        Model.__getattr__ = lambda self, name: (  # type: ignore[method-assign]
            True if name == "flag" else nn.Module.__getattr__(self, name)
        )

    yield from before_and_after(Model(), change)
