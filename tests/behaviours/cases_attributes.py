"""What forward reads from the module itself changes after welding: attributes, classes, methods."""

from __future__ import annotations

import functools
import types
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
    """Reads `self.flag`, wherever it stands."""

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


# ---- methods ----


class Acting(Mlp):
    """Its activation is a method."""

    def act(self, h: Tensor) -> Tensor:
        return F.gelu(h)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.up(x)))
        return y


@welded
def a_method_is_replaced_on_the_instance_by_a_function() -> Steps:
    yield from before_and_after(Acting(), lambda m: setattr(m, "act", F.relu))


@welded
def a_method_is_replaced_on_the_instance_by_a_module() -> Steps:
    """A module goes to `_modules`, where the method still hides it."""
    yield from before_and_after(Acting(), lambda m: setattr(m, "act", nn.ReLU()))


@welded
def a_method_is_replaced_on_the_instance_by_a_bound_method() -> Steps:
    def act(self: nn.Module, h: Tensor) -> Tensor:
        return F.relu(h)

    yield from before_and_after(Acting(), lambda m: setattr(m, "act", types.MethodType(act, m)))


@welded
def a_method_is_replaced_on_the_class() -> Steps:
    class Model(Acting):
        def act(self, h: Tensor) -> Tensor:
            return F.silu(h)

    yield from before_and_after(Model(), lambda _: setattr(Model, "act", lambda self, h: F.relu(h)))


@welded
def a_method_of_a_base_is_overridden_in_the_class() -> Steps:
    class Model(Acting):
        pass

    yield from before_and_after(Model(), lambda _: setattr(Model, "act", lambda self, h: F.relu(h)))


@welded
def the_code_of_a_method_is_replaced() -> Steps:
    class Model(Acting):
        def act(self, h: Tensor) -> Tensor:
            return F.silu(h)

    def other(self: nn.Module, h: Tensor) -> Tensor:
        return F.relu(h)

    yield from before_and_after(Model(), lambda _: setattr(Model.act, "__code__", other.__code__))


@welded
def forward_is_replaced_on_the_instance() -> Steps:
    yield from before_and_after(Mlp(), lambda m: setattr(m, "forward", lambda x: x + 1.0))


@welded
def forward_is_replaced_on_the_class() -> Steps:
    class Model(Mlp):
        pass

    yield from before_and_after(Model(), lambda _: setattr(Model, "forward", lambda s, x: x + 1))


@welded
def the_code_of_forward_is_replaced() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.silu(self.up(x)))
            return y

    def other(self: nn.Module, x: Tensor) -> Tensor:
        return x + 1.0

    yield from before_and_after(
        Model(), lambda _: setattr(Model.forward, "__code__", other.__code__)
    )


@welded
def the_class_of_the_module_is_swapped() -> Steps:
    class Other(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.relu(self.up(x)))
            return y

    yield from before_and_after(Mlp(), lambda m: setattr(m, "__class__", Other))


@welded
def the_exact_type_is_asked_for() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y if type(self) is Model else y.tanh()

    model = yield Model()
    yield model(X)
    yield model(X[:3])


@either
def a_key_of_the_class_dict() -> Steps:
    class Model(Mlp):
        flag = False

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if type(self).__dict__.get("flag") else y

    model = yield Model()
    yield model(X)
    Model.flag = True
    yield model(X[:3])
    yield model(X)


# ---- properties and descriptors ----


@welded
def a_property_reads_an_attribute_that_changes() -> Steps:
    class Model(Flagged):
        _flag = False

        @property
        def flag(self) -> bool:
            return self._flag

    yield from before_and_after(Model(), lambda m: setattr(m, "_flag", True))


@welded
def a_property_is_replaced() -> Steps:
    class Model(Flagged):
        @property
        def flag(self) -> bool:
            return False

    yield from before_and_after(
        Model(), lambda _: setattr(Model, "flag", property(lambda self: True))
    )


@either
def a_cached_property_is_cleared() -> Steps:
    class Model(Flagged):
        source = False

        @functools.cached_property
        def flag(self) -> bool:
            return self.source

    def change(model: nn.Module) -> None:
        model.source = True
        vars(model).pop("flag", None)

    yield from before_and_after(Model(), change)


@either
def a_descriptor_with_state() -> Steps:
    class Descriptor:
        value = False

        def __get__(self, instance: object, owner: type) -> bool:
            return self.value

    descriptor = Descriptor()

    class Model(Flagged):
        flag = descriptor

    yield from before_and_after(Model(), lambda _: setattr(descriptor, "value", True))
