"""Cases in which forward reads from objects that the module holds: configs and callables."""

from __future__ import annotations

import enum
import functools
import types
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch.nn.functional as F
from tests.behaviours.harness import Mlp, Steps, X, before_and_after, either, inside, welded
from torch import Tensor, nn


class Configured(Mlp):
    """Scales its output by `self.config.scale`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y * self.config.scale if self.config.scale != 1.0 else y


class Config:
    def __init__(self) -> None:
        self.scale, self.act, self.unread = 1.0, "gelu", 0


@welded
def a_field_of_a_config_changes() -> Steps:
    yield from before_and_after(Configured(Config()), lambda m: setattr(m.config, "scale", 3.0))


@welded
def a_config_is_replaced_by_another() -> Steps:
    def change(model: Any) -> None:
        model.config = Config()
        model.config.scale = 3.0

    yield from before_and_after(Configured(Config()), change)


@welded
def a_field_of_a_config_that_forward_does_not_read_changes() -> Steps:
    model = yield Configured(Config())
    yield model(X)
    model.config.unread = 7
    yield inside(model(X))


@welded
def a_field_of_a_config_names_the_activation() -> Steps:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.config = Config()

        def forward(self, x: Tensor) -> Tensor:
            act: Any = {"gelu": F.gelu, "relu": F.relu}[self.config.act]
            y: Tensor = self.down(act(self.up(x)))
            return y

    yield from before_and_after(Model(), lambda m: setattr(m.config, "act", "relu"))


@welded
def a_field_of_a_nested_config_changes() -> Steps:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.config = types.SimpleNamespace(mlp=Config())

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y * self.config.mlp.scale if self.config.mlp.scale != 1.0 else y

    yield from before_and_after(Model(), lambda m: setattr(m.config.mlp, "scale", 3.0))


@welded
def a_nested_config_is_replaced() -> Steps:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.config = types.SimpleNamespace(mlp=Config())

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y * self.config.mlp.scale if self.config.mlp.scale != 1.0 else y

    def change(model: Any) -> None:
        model.config.mlp = types.SimpleNamespace(scale=3.0)

    yield from before_and_after(Model(), change)


@welded
def a_class_attribute_of_a_config_changes() -> Steps:
    class Shared:
        scale = 1.0

    yield from before_and_after(Configured(Shared()), lambda _: setattr(Shared, "scale", 3.0))


@welded
def a_config_that_is_a_class() -> Steps:
    class Shared:
        scale = 1.0

    yield from before_and_after(Configured(Shared), lambda _: setattr(Shared, "scale", 3.0))


@welded
def a_dataclass_changes() -> Steps:
    @dataclass
    class Data:
        scale: float = 1.0

    yield from before_and_after(Configured(Data()), lambda m: setattr(m.config, "scale", 3.0))


@welded
def a_frozen_dataclass_is_replaced() -> Steps:
    @dataclass(frozen=True)
    class Data:
        scale: float = 1.0

    yield from before_and_after(
        Configured(Data()), lambda m: setattr(m, "config", replace(m.config, scale=3.0))
    )


@welded
def a_named_tuple_is_replaced() -> Steps:
    class Data(NamedTuple):
        scale: float = 1.0

    yield from before_and_after(Configured(Data()), lambda m: setattr(m, "config", Data(3.0)))


@either
def an_object_with_slots_changes() -> Steps:
    class Data:
        __slots__ = ("scale",)

        def __init__(self) -> None:
            self.scale = 1.0

    yield from before_and_after(Configured(Data()), lambda m: setattr(m.config, "scale", 3.0))


@either
def an_object_with_a_getattr_of_its_own_changes() -> Steps:
    class Data:
        def __init__(self) -> None:
            self.values = {"scale": 1.0}

        def __getattr__(self, name: str) -> Any:
            return self.values[name]

    yield from before_and_after(Configured(Data()), lambda m: m.config.values.update(scale=3.0))


@either
def a_config_with_a_property_changes() -> Steps:
    class Data:
        _scale = 1.0

        @property
        def scale(self) -> float:
            return self._scale

    yield from before_and_after(Configured(Data()), lambda m: setattr(m.config, "_scale", 3.0))


@either
def a_property_of_a_config_counts_its_reads() -> Steps:
    class Data:
        reads = 0

        @property
        def scale(self) -> float:
            self.reads += 1
            return 1.0

    model = yield Configured(Data())
    model.config.reads = 0
    yield model(X)
    yield model.config.reads


@welded
def an_enum_member_is_replaced() -> Steps:
    class Kind(enum.Enum):
        PLAIN = 1
        BOUNDED = 2

    class Model(Mlp):
        kind = Kind.PLAIN

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if self.kind is Kind.BOUNDED else y

    yield from before_and_after(Model(), lambda m: setattr(m, "kind", Kind.BOUNDED))


# ---- callables ----


class Calling(Mlp):
    """Has `self.act` as its activation."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.up(x)))
        return y


@welded
def a_function_is_replaced() -> Steps:
    yield from before_and_after(Calling(F.gelu), lambda m: setattr(m, "act", F.relu))


@welded
def a_lambda_is_replaced() -> Steps:
    yield from before_and_after(
        Calling(lambda h: F.gelu(h)), lambda m: setattr(m, "act", lambda h: F.relu(h))
    )


@welded
def a_function_is_replaced_by_a_module() -> Steps:
    yield from before_and_after(Calling(F.gelu), lambda m: setattr(m, "act", nn.ReLU()))


@welded
def a_partial_is_replaced() -> Steps:
    yield from before_and_after(
        Calling(functools.partial(F.leaky_relu, negative_slope=0.1)),
        lambda m: setattr(m, "act", functools.partial(F.leaky_relu, negative_slope=0.9)),
    )


@either
def the_keywords_of_a_partial_change() -> Steps:
    yield from before_and_after(
        Calling(functools.partial(F.leaky_relu, negative_slope=0.1)),
        lambda m: m.act.keywords.update(negative_slope=0.9),
    )


@either
def a_callable_object_with_state() -> Steps:
    class Act:
        slope = 0.1

        def __call__(self, h: Tensor) -> Tensor:
            return F.leaky_relu(h, self.slope)

    yield from before_and_after(Calling(Act()), lambda m: setattr(m.act, "slope", 0.9))


@either
def the_call_of_a_callable_object_is_replaced() -> Steps:
    class Act:
        def __call__(self, h: Tensor) -> Tensor:
            return F.gelu(h)

    yield from before_and_after(
        Calling(Act()), lambda _: setattr(Act, "__call__", lambda self, h: F.relu(h))
    )


@either
def a_bound_method_of_another_object() -> Steps:
    class Acts:
        slope = 0.1

        def leaky(self, h: Tensor) -> Tensor:
            return F.leaky_relu(h, self.slope)

    acts = Acts()
    yield from before_and_after(Calling(acts.leaky), lambda _: setattr(acts, "slope", 0.9))


@welded
def a_table_of_activations_changes() -> Steps:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.acts = {"default": F.gelu}

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(self.acts["default"](self.up(x)))
            return y

    yield from before_and_after(Model(), lambda m: m.acts.update(default=F.relu))
