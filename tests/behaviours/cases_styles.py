"""Cases that write a forward in different ways: only what it computes counts."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from tests.behaviours.harness import (
    H,
    K,
    Mlp,
    Steps,
    X,
    before_and_after,
    either,
    on_other_inputs,
    welded,
)
from torch import Tensor, nn


@welded
def forward_of_a_base_by_super() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * super().forward(x)

    yield from on_other_inputs(Model())


@welded
def forward_of_a_base_is_replaced_under_super() -> Steps:
    class Base(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y

    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * super().forward(x)

    yield from before_and_after(
        Model(), lambda _: setattr(Base, "forward", lambda self, x: self.down(F.relu(self.up(x))))
    )


@welded
def a_mixin() -> Steps:
    class Bounded:
        bounded = False

        def finish(self, y: Tensor) -> Tensor:
            return y.tanh() if self.bounded else y

    class Model(Bounded, Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return self.finish(super().forward(x))

    yield from before_and_after(Model(), lambda _: setattr(Bounded, "bounded", True))


@welded
def a_static_method() -> Steps:
    class Model(Mlp):
        @staticmethod
        def act(h: Tensor) -> Tensor:
            return F.gelu(h)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(self.act(self.up(x)))
            return y

    yield from before_and_after(Model(), lambda _: setattr(Model, "act", staticmethod(F.relu)))


@welded
def a_class_method() -> Steps:
    class Model(Mlp):
        slope = 0.1

        @classmethod
        def act(cls, h: Tensor) -> Tensor:
            return F.leaky_relu(h, cls.slope)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(self.act(self.up(x)))
            return y

    yield from before_and_after(Model(), lambda _: setattr(Model, "slope", 0.9))


@welded
def a_decorated_forward() -> Steps:
    def halved(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(forward)
        def wrapper(self: nn.Module, x: Tensor) -> Tensor:
            return 0.5 * forward(self, x)

        return wrapper

    class Model(Mlp):
        @halved
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y

    yield from on_other_inputs(Model())


@welded
def a_decorator_without_wraps() -> Steps:
    def halved(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapper(self: nn.Module, x: Tensor) -> Tensor:
            return 0.5 * forward(self, x)

        return wrapper

    class Model(Mlp):
        @halved
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y

    yield from on_other_inputs(Model())


@welded
def a_decorator_with_a_setting_that_changes() -> Steps:
    factor = 0.5

    def scaled(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(forward)
        def wrapper(self: nn.Module, x: Tensor) -> Tensor:
            return factor * forward(self, x)

        return wrapper

    class Model(Mlp):
        @scaled
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y

    model = yield Model()
    yield model(X)
    factor = 3.0
    yield model(X)


@either
def forward_under_the_no_grad_decorator() -> Steps:
    class Model(Mlp):
        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y

    model = yield Model()
    yield model(X)
    with torch.enable_grad():
        yield model(X)


@welded
def a_match_statement() -> Steps:
    class Model(Mlp):
        kind = "plain"

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            match self.kind:
                case "plain":
                    return y
                case _:
                    return y.tanh()

    yield from before_and_after(Model(), lambda m: setattr(m, "kind", "bounded"))


@welded
def a_match_on_the_dimensions() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            match tuple(x.shape):
                case (_, _):
                    return y
                case _:
                    return y.tanh()

    yield from on_other_inputs(Model())


@welded
def a_loop_over_the_layers_by_name() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            for name, layer in self.named_children():
                x = layer(x)
                x = F.gelu(x) if name == "up" else x
            return x

    yield from before_and_after(Model(), lambda m: m.add_module("last", nn.Tanh()))


@welded
def a_reduction_over_the_children() -> Steps:
    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return functools.reduce(lambda h, layer: layer(h), self, x)

    yield from before_and_after(
        Model(nn.Linear(K, H), nn.ReLU(), nn.Linear(H, K)), lambda m: m.append(nn.Tanh())
    )


@welded
def a_walrus_and_an_early_return() -> Steps:
    class Model(Mlp):
        skip = False

        def forward(self, x: Tensor) -> Tensor:
            if self.skip:
                return x
            y: Tensor = self.down(F.gelu(h)) if (h := self.up(x)) is not None else x
            return y

    yield from before_and_after(Model(), lambda m: setattr(m, "skip", True))


@welded
def unpacked_arguments() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            args, kwargs = (self.up(x),), {"approximate": "tanh"}
            y: Tensor = self.down(F.gelu(*args, **kwargs))  # type: ignore[arg-type]
            return y

    yield from on_other_inputs(Model())


@welded
def a_generator_expression() -> Steps:
    class Model(Mlp):
        slopes = (0.1,)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.leaky_relu(self.up(x), sum(s for s in self.slopes)))
            return y

    yield from before_and_after(Model(), lambda m: setattr(m, "slopes", (0.1, 0.8)))


@welded
def a_context_manager_of_its_own() -> Steps:
    @contextlib.contextmanager
    def scope() -> Iterator[float]:
        yield 0.5

    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            with scope() as factor:
                y: Tensor = self.down(F.gelu(self.up(x)))
            return y * factor

    yield from on_other_inputs(Model())


@welded
def a_constant_computed_in_forward() -> Steps:
    class Model(Mlp):
        width = 4

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y / math.sqrt(self.width)

    yield from before_and_after(Model(), lambda m: setattr(m, "width", 9))


@welded
def operators_as_functions() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = operator.mul(self.down(F.gelu(self.up(x))), 0.5)
            return y

    yield from on_other_inputs(Model())


@welded
def weights_used_by_matmul() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = F.gelu(x @ self.up.weight.t() + self.up.bias)
            return h @ self.down.weight.t() + self.down.bias

    yield from on_other_inputs(Model())
