"""Cases in which forward reads from containers and arrays that the module holds."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.behaviours.harness import Mlp, Steps, X, before_and_after, either, welded
from torch import Tensor

# ---- containers ----


class Holding(Mlp):
    """Reads `self.held["scale"]`."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y * self.held["scale"] if self.held["scale"] != 1.0 else y


@welded
def a_dict_changes() -> Steps:
    yield from before_and_after(Holding({"scale": 1.0}), lambda m: m.held.update(scale=3.0))


@welded
def a_dict_is_replaced() -> Steps:
    yield from before_and_after(
        Holding({"scale": 1.0}), lambda m: setattr(m, "held", {"scale": 3.0})
    )


@either
def a_nested_dict_changes() -> Steps:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.held = {"mlp": {"scale": 1.0}}

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            scale = self.held["mlp"]["scale"]
            return y * scale if scale != 1.0 else y

    yield from before_and_after(Model(), lambda m: m.held["mlp"].update(scale=3.0))


@either
def a_default_dict_changes() -> Steps:
    yield from before_and_after(
        Holding(collections.defaultdict(lambda: 1.0)), lambda m: m.held.update(scale=3.0)
    )


@either
def a_read_of_a_default_dict_adds_a_key() -> Steps:
    model = yield Holding(collections.defaultdict(lambda: 1.0))
    model.held.clear()
    yield model(X)
    yield dict(model.held)


@either
def a_subclass_of_dict_with_getitem_of_its_own() -> Steps:
    class Held(dict[str, float]):
        factor = 1.0

        def __getitem__(self, key: str) -> float:
            return self.factor

    yield from before_and_after(Holding(Held()), lambda m: setattr(m.held, "factor", 3.0))


class Listing(Mlp):
    """Multiplies its output by everything in `self.held`."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        for factor in self.held:
            y = y * factor
        return y


@welded
def an_empty_list_is_appended_to() -> Steps:
    yield from before_and_after(Listing([]), lambda m: m.held.append(3.0))


@welded
def an_item_of_a_list_changes() -> Steps:
    yield from before_and_after(Listing([0.5]), lambda m: m.held.__setitem__(0, 3.0))


@welded
def a_tuple_is_replaced() -> Steps:
    yield from before_and_after(Listing((0.5,)), lambda m: setattr(m, "held", (3.0,)))


@either
def a_set_changes() -> Steps:
    yield from before_and_after(Listing(set()), lambda m: m.held.add(3.0))


@either
def a_deque_changes() -> Steps:
    yield from before_and_after(Listing(collections.deque()), lambda m: m.held.append(3.0))


@either
def a_list_inside_a_tuple_changes() -> Steps:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.held: tuple[list[float], ...] = ([],)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if len(self.held[0]) > 0 else y

    yield from before_and_after(Model(), lambda m: m.held[0].append(1.0))


@either
def a_generator_is_used_up() -> Steps:
    model = yield Listing(iter([]))
    yield model(X)
    model.held = iter([3.0])
    yield model(X)
    yield model(X)


# ---- arrays, and tensors that are not parameters ----


@either
def a_numpy_array_changes() -> Steps:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.held = np.zeros(2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if self.held.any() else y

    yield from before_and_after(Model(), lambda m: m.held.fill(1.0))


@either
def a_plain_tensor_changes() -> Steps:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.held = torch.zeros(2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if self.held.any() else y

    yield from before_and_after(Model(), lambda m: m.held.fill_(1.0))


@either
def a_plain_tensor_is_the_scale() -> Steps:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.held = torch.tensor(0.5)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y * self.held

    yield from before_and_after(Model(), lambda m: m.held.fill_(3.0))
