"""Cases that change methods, properties, descriptors and the class itself after welding."""

from __future__ import annotations

import functools
import types

import torch.nn.functional as F
from tests.behaviours.cases_attributes import Flagged
from tests.behaviours.harness import (
    Mlp,
    Steps,
    X,
    before_and_after,
    either,
    refused,
    welded,
)
from torch import Tensor, nn

# ---- methods ----


class Acting(Mlp):
    """Has a method as its activation."""

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
    """Sets a module, which goes to `_modules`, where the method still hides it."""
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


@refused(r"asks for the class of an object.*cases_methods\.py:\d+")
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

    def change(model: Model) -> None:
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
