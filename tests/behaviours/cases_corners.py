"""Cases in which forward reaches its settings in ways that are easily overlooked."""

from __future__ import annotations

import builtins
import collections
import copy
import enum
import functools
import random
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests.behaviours.harness import (
    K,
    Mlp,
    Steps,
    X,
    before_and_after,
    either,
    refused,
    welded,
)
from tests.support.helpers import fixed
from torch import Tensor, nn

LONG = torch.cat([X, X])


class Asking(Mlp):
    """Ends in tanh if a condition on the module and x holds."""

    def __init__(self, condition: Callable[[Any, Tensor], Any], **attributes: Any) -> None:
        super().__init__()
        self.condition = condition
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y.tanh() if self.condition(self, x) else y


class Config:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


# ---- classes ----


@welded
def a_class_attribute_appears_over_a_child() -> Steps:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.GELU()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(self.act(self.up(x)))
            return y

    yield from before_and_after(Model(), lambda _: setattr(Model, "act", staticmethod(F.relu)))


@either
def a_property_appears_over_an_attribute_of_a_config() -> Steps:
    class Own(Config):
        pass

    yield from before_and_after(
        Asking(lambda m, _: m.config.flag, config=Own(flag=False)),
        lambda _: setattr(Own, "flag", property(lambda _: True)),
    )


@either
def an_attribute_of_a_metaclass_changes() -> Steps:
    class Meta(type):
        flag = False

    class Named(metaclass=Meta):
        pass

    yield from before_and_after(
        Asking(lambda *_: Named.flag), lambda _: setattr(Meta, "flag", True)
    )


@either
def another_dictionary_takes_the_place_of_an_objects_own() -> Steps:
    config: Any = Config(flag=False)
    yield from before_and_after(
        Asking(lambda *_: config.flag), lambda _: setattr(config, "__dict__", {"flag": True})
    )


@either
def a_member_of_an_enumeration_gets_an_attribute() -> Steps:
    class Own(enum.Enum):
        ONE = 1

    yield from before_and_after(
        Asking(lambda *_: getattr(Own.ONE, "flag", False)), lambda _: setattr(Own.ONE, "flag", True)
    )


# ---- sizes ----


@welded(inputs=[X, LONG])
def what_only_the_second_size_reads_changes() -> Steps:
    def small(model: Any) -> Any:
        return model.first

    def big(model: Any) -> Any:
        return model.second

    model = yield Asking(
        lambda m, x: (big if x.shape[0] > 10 else small)(m), first=False, second=False
    )
    yield model(X), model(LONG)
    model.second = True
    yield model(X), model(LONG)


@welded(inputs=[X[:4], fixed(64, K)])
def a_copy_has_another_limit() -> Steps:
    model = yield Asking(lambda m, x: m.limit is not None and x.shape[0] == m.limit, limit=None)
    yield model(X)
    other = copy.deepcopy(model)
    other.limit = 16
    yield other(X), other(LONG)


@either
def a_flatten_does_nothing_to_two_dimensions() -> Steps:
    layers = (nn.Flatten(), nn.Linear(K, 20), nn.GELU(), nn.Linear(20, K))
    model = yield nn.Sequential(*layers)
    yield model(X)
    yield model(X.view(8, 1, K))


@either
def a_flatten_of_all_but_the_last_dimension() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x.flatten(0, -2))))
            return y

    model = yield Model()
    yield model(X)
    yield model(X.view(2, 4, K))


# ---- settings reached in other ways ----


@refused("a module outside of it")
def an_activation_in_a_list_is_hooked() -> Steps:
    act = nn.GELU()

    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.acts = [act]

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(self.acts[0](self.up(x)))
            return y

    yield from before_and_after(
        Model(), lambda _: act.register_forward_hook(lambda _m, _i, out: out * 2)
    )


@refused("computed names")
def a_name_is_read_by_reduce() -> Steps:
    config = Config(flag=False)
    yield from before_and_after(
        Asking(lambda m, _: functools.reduce(getattr, ("config", "flag"), m), config=config),
        lambda _: setattr(config, "flag", True),
    )


@either
def a_user_dict_changes() -> Steps:
    table = collections.UserDict(flag=False)
    yield from before_and_after(Asking(lambda *_: table["flag"]), lambda _: table.update(flag=True))


@either
def a_table_behind_its_own_get_changes() -> Steps:
    table = {"flag": False}
    yield from before_and_after(
        Asking(lambda m, _: m.get("flag"), get=table.get), lambda _: table.update(flag=True)
    )


@either
def a_name_appears_in_an_empty_module() -> Steps:
    empty = types.ModuleType("empty")
    yield from before_and_after(
        Asking(lambda *_: getattr(empty, "flag", False)), lambda _: setattr(empty, "flag", True)
    )


@either
def a_function_gets_another_implementation_for_tensors() -> Steps:
    @functools.singledispatch
    def act(h: Any) -> Tensor:
        return F.gelu(h)

    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(act(self.up(x)))
            return y

    yield from before_and_after(Model(), lambda _: act.register(Tensor, F.relu))


@either
def a_builtin_is_shadowed() -> Steps:
    try:
        yield from before_and_after(
            Asking(lambda *_: abs(-1) == 2), lambda _: setattr(builtins, "abs", lambda _: 2)
        )
    finally:
        builtins.abs = _abs


_abs = builtins.abs


@refused("random")
def a_number_is_drawn_by_the_library() -> Steps:
    model = yield Asking(lambda *_: random.uniform(0, 1) < 0)
    yield model(X)


@either
def a_parameter_joins_those_that_are_gone_through() -> Steps:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(fixed(K, K, seed=1))
            self.b = nn.Parameter(fixed(K, K, seed=2))

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.parameters():
                x = F.gelu(F.linear(x, weight))
            return x

    yield from before_and_after(
        Model(), lambda m: m.register_parameter("c", nn.Parameter(fixed(K, K, seed=3)))
    )


# ---- modes and effects ----


@either
def gradients_are_asked_for_under_another_name() -> Steps:
    asked = torch.is_grad_enabled
    model = yield Asking(lambda *_: asked()).requires_grad_(False)
    yield model(X)
    with torch.enable_grad():
        yield model(X)


@either
def the_weights_are_frozen_before_the_first_call() -> Steps:
    model = yield Asking(lambda m, _: not m.up.weight.requires_grad)
    model.requires_grad_(False)
    yield model(X)


@either
def a_result_is_noted_in_a_namespace() -> Steps:
    noted = types.SimpleNamespace(shape=None)

    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            noted.shape = tuple(h.shape)
            y: Tensor = self.down(F.gelu(h))
            return y

    model = yield Model()
    noted.shape = None
    yield model(X)
    yield noted.shape


@either
def an_activation_has_a_narrow_bump() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            bump = 1e3 * F.relu(0.004 - (h - 0.505).abs())
            y: Tensor = self.down(F.gelu(h) + bump)
            return y

    model = yield Model()
    yield model(fixed(64, K))
