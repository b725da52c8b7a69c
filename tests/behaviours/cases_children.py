"""Cases that change modules inside a welded one: replace, reorder, reset, hook, parametrise."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.behaviours.harness import (
    H,
    K,
    Mlp,
    Steps,
    X,
    before_and_after,
    welded,
)
from torch import Tensor, nn


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Linear(K, H), nn.ReLU(), nn.Linear(H, K))


# ---- containers ----


@welded
def a_sequential_is_appended_to() -> Steps:
    yield from before_and_after(sequential(), lambda m: m.append(nn.Tanh()))


@welded
def a_sequential_is_inserted_into() -> Steps:
    yield from before_and_after(sequential(), lambda m: m.insert(0, nn.Tanh()))


@welded
def an_item_of_a_sequential_is_replaced() -> Steps:
    yield from before_and_after(sequential(), lambda m: m.__setitem__(1, nn.SiLU()))


@welded
def an_item_of_a_sequential_is_deleted() -> Steps:
    yield from before_and_after(sequential(), lambda m: m.__delitem__(1))


@welded
def a_sequential_is_extended() -> Steps:
    yield from before_and_after(sequential(), lambda m: m.extend([nn.Tanh(), nn.ReLU()]))


@welded
def a_sequential_gets_a_named_child() -> Steps:
    yield from before_and_after(sequential(), lambda m: m.add_module("last", nn.Tanh()))


@welded
def the_children_of_a_sequential_are_reordered() -> Steps:
    def change(model: nn.Sequential) -> None:
        """Moves the activation to the end; names and modules stay the same."""
        model._modules["1"] = model._modules.pop("1")

    yield from before_and_after(sequential(), change)


@welded
def a_sequential_is_emptied() -> Steps:
    yield from before_and_after(sequential(), lambda m: m._modules.clear())


@welded
def an_inner_sequential_is_appended_to() -> Steps:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Sequential(nn.Linear(K, H), nn.ReLU())
            self.down = nn.Sequential(nn.Linear(H, K))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(self.up(x))
            return y

    yield from before_and_after(Model(), lambda m: m.down.append(nn.Tanh()))


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(K, K) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        y: Tensor = self.layers[-1](x)
        return y


@welded
def a_module_list_is_appended_to() -> Steps:
    yield from before_and_after(Listed(), lambda m: m.layers.append(nn.Linear(K, K)))


@welded
def a_module_list_is_reversed() -> Steps:
    def change(model: Any) -> None:
        model.layers = nn.ModuleList(reversed(model.layers))

    yield from before_and_after(Listed(), change)


@welded
def two_items_of_a_module_list_are_swapped() -> Steps:
    def change(model: Any) -> None:
        model.layers[0], model.layers[2] = model.layers[2], model.layers[0]

    yield from before_and_after(Listed(), change)


@welded
def an_item_of_a_module_list_is_popped() -> Steps:
    yield from before_and_after(Listed(), lambda m: m.layers.pop(1))


class Chosen(nn.Module):
    """Takes its activation from a ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(K, H), nn.Linear(H, K)
        self.acts = nn.ModuleDict({"first": nn.GELU()})

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        for act in self.acts.values():
            y = act(y)
        y = self.down(y)
        return y


@welded
def a_module_dict_gets_a_key() -> Steps:
    yield from before_and_after(Chosen(), lambda m: m.acts.update({"second": nn.Tanh()}))


@welded
def a_value_of_a_module_dict_is_replaced() -> Steps:
    yield from before_and_after(Chosen(), lambda m: m.acts.update({"first": nn.ReLU()}))


# ---- children ----


class Acted(Mlp):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.up(x)))
        return y


def _declare(name: str, act: nn.Module, attribute: str, value: Any) -> None:
    def steps() -> Steps:
        yield from before_and_after(Acted(act), lambda m: setattr(m.act, attribute, value))
        setattr(act, attribute, before)

    before = getattr(act, attribute)
    steps.__name__ = f"{attribute}_of_{name}_changes"
    welded(steps)


_declare("leaky_relu", nn.LeakyReLU(0.1), "negative_slope", 0.9)
_declare("gelu", nn.GELU(), "approximate", "tanh")
_declare("softplus", nn.Softplus(), "beta", 3.0)
_declare("elu", nn.ELU(), "alpha", 3.0)
_declare("relu", nn.ReLU(), "inplace", True)


@welded
def an_activation_is_replaced() -> Steps:
    yield from before_and_after(Acted(nn.GELU()), lambda m: setattr(m, "act", nn.ReLU()))


@welded
def the_class_of_an_activation_is_swapped() -> Steps:
    yield from before_and_after(Acted(nn.SiLU()), lambda m: setattr(m.act, "__class__", nn.Tanh))


@welded
def forward_of_an_activation_is_replaced_on_the_instance() -> Steps:
    yield from before_and_after(Acted(nn.GELU()), lambda m: setattr(m.act, "forward", F.relu))


@welded
def forward_of_a_linear_is_replaced_on_the_instance() -> Steps:
    yield from before_and_after(
        Mlp(), lambda m: setattr(m.up, "forward", lambda x: F.pad(x, (4, 4)))
    )


@welded
def forward_of_a_child_is_replaced_on_its_class() -> Steps:
    class Act(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return F.gelu(h)

    yield from before_and_after(
        Acted(Act()), lambda _: setattr(Act, "forward", lambda self, h: F.relu(h))
    )


@welded
def call_of_a_child_is_replaced_on_its_class() -> Steps:
    class Act(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return F.gelu(h)

    yield from before_and_after(
        Acted(Act()), lambda _: setattr(Act, "__call__", lambda self, h: F.relu(h))
    )


@welded
def a_linear_is_replaced_by_another() -> Steps:
    yield from before_and_after(Mlp(), lambda m: setattr(m, "up", nn.Linear(K, H)))


@welded
def a_linear_is_replaced_by_a_subclass() -> Steps:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2.0 * super().forward(x)

    yield from before_and_after(Mlp(), lambda m: setattr(m, "up", Doubled(K, H)))


@welded
def a_linear_is_replaced_by_a_wider_one() -> Steps:
    def change(model: Any) -> None:
        model.up, model.down = nn.Linear(K, 2 * H), nn.Linear(2 * H, K)

    yield from before_and_after(Mlp(), change)


@welded
def a_child_is_deleted() -> Steps:
    from tests.behaviours.harness import attempt

    model = yield Mlp()
    yield model(X)
    del model.up
    yield attempt(lambda: model(X))


@welded
def an_unused_child_is_replaced() -> Steps:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Dropout(0.5)

    model = yield Model()
    yield model(X)
    model.unused = nn.Tanh()
    yield model(X)


@welded
def two_children_are_swapped() -> Steps:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(K, K), nn.Linear(K, K)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.second(F.gelu(self.first(x)))
            return y

    def change(model: Any) -> None:
        model.first, model.second = model.second, model.first

    yield from before_and_after(Model(), change)
