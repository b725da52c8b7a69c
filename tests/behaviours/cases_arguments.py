"""Cases with arguments other than x: given or not, by position or name, of any value and kind."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.behaviours.harness import (
    Around,
    K,
    Mlp,
    Steps,
    X,
    attempt,
    either,
    inside,
    refused,
    welded,
)
from tests.support.helpers import fixed
from torch import Tensor

import torchweld as tw

MASK = torch.ones(8, 1)


class Flag(Mlp):
    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y.tanh() if flag else y


@welded
def a_flag_that_was_not_given() -> Steps:
    model = yield Flag()
    yield model(X)
    yield model(X, True)
    yield model(X, flag=True)
    yield inside(model(X))


@welded
def a_flag_given_at_its_default() -> Steps:
    model = yield Flag()
    yield model(X)
    yield model(X, False)
    yield model(X, flag=False)
    yield model(X, 0)
    yield model(X, flag=None)
    yield model(X, flag=1)


@welded
def x_by_name() -> Steps:
    model = yield Flag()
    yield model(X)
    yield model(x=X)
    yield model(flag=True, x=X)


@welded(inputs={"x": X})
def x_recorded_by_name() -> Steps:
    model = yield Flag()
    yield model(x=X)
    yield inside(model(X))
    yield model(X, True)


@either(inputs=tw.Inputs(X, flag=True))
def a_flag_that_was_given() -> Steps:
    model = yield Flag()
    yield model(X, flag=True)
    yield model(X)
    yield model(X, flag=False)
    yield model(X, True)


@either(inputs=tw.Inputs(X, 2.0))
def a_scale_that_was_given() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y * scale

    model = yield Model()
    yield model(X, 2.0)
    yield model(X)
    yield model(X, 3.0)
    yield model(X, scale=2)
    yield model(X, scale=torch.tensor(3.0))
    yield model(X, scale=float("nan"))


@welded
def a_scale_that_was_not_given() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y * scale

    model = yield Model()
    yield model(X)
    yield model(X, 3.0)
    yield model(X, scale=torch.tensor(3.0))
    yield model(X, 1)
    yield model(X, True)


class Masked(Mlp):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y if mask is None else y * mask


@welded
def a_tensor_where_none_was() -> Steps:
    model = yield Masked()
    yield model(X)
    yield model(X, MASK * 3)
    yield model(X, mask=MASK * 3)
    yield model(X, mask=None)


@refused(r"cases_arguments\.py:\d+|mask", inputs=tw.Inputs(X, MASK))
def a_tensor_that_enters_the_result() -> Steps:
    model = yield Masked()
    yield model(X, MASK)
    yield model(X, 3 * MASK)
    yield model(X)


class Unused(Mlp):
    """Takes an argument and only asks whether it is given, and of what kind it is."""

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        if cache is None:
            return y
        return y if cache.dtype is torch.float32 and cache.dim() == 2 else y.tanh()


@welded(inputs=tw.Inputs(X, MASK))
def a_tensor_that_does_not_enter_the_result() -> Steps:
    model = yield Unused()
    yield model(X, MASK)
    yield inside(model(X, 5 * MASK))


@welded(inputs=tw.Inputs(X, MASK))
def none_where_a_tensor_was() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor, cache: Tensor | None = None) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if cache is None else y

    model = yield Model()
    yield model(X, MASK)
    yield model(X, None)
    yield model(X)


@welded(inputs=tw.Inputs(X, MASK))
def an_unused_tensor_of_another_dtype() -> Steps:
    model = yield Unused()
    yield model(X, MASK)
    yield model(X, MASK.double())


@welded(inputs=tw.Inputs(X, MASK))
def an_unused_tensor_of_another_rank() -> Steps:
    model = yield Unused()
    yield model(X, MASK)
    yield model(X, MASK[None])


@welded(inputs=tw.Inputs(X, MASK))
def something_else_where_an_unused_tensor_was() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor, cache: Any) -> Tensor:  # type: ignore[override]
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y if isinstance(cache, Tensor) else y.tanh()

    model = yield Model()
    yield model(X, MASK)
    yield model(X, 3)
    yield model(X, [MASK])


@either(inputs=tw.Inputs(X, MASK))
def the_size_of_an_unused_tensor_decides() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor, cache: Tensor) -> Tensor:  # type: ignore[override]
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if cache.shape[0] > 100 else y

    model = yield Model()
    yield model(X, MASK)
    yield model(X, torch.ones(101, 1))


@refused(r"argument.*cases_arguments\.py:\d+", inputs=tw.Inputs(X, torch.ones(8, 1)))
def another_argument_is_changed() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor, cache: Tensor) -> Tensor:  # type: ignore[override]
            cache.view(-1)[0].add_(1.0)
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y

    model = yield Model()
    cache = torch.ones(8, 1)
    yield model(X, cache), model(X, cache)
    yield cache


@refused("", inputs=lambda model: model(X, []))
def a_list_argument_is_appended_to() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor, seen: list[int]) -> Tensor:  # type: ignore[override]
            seen.append(x.shape[0])
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y

    model = yield Model()
    seen: list[int] = []
    yield model(X, seen), model(X[:2], seen)
    yield seen


@welded
def extra_keywords_that_were_not_given() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if kwargs.get("bounded") else y

    model = yield Model()
    yield model(X)
    yield model(X, bounded=True)
    yield model(X, bounded=False)
    yield inside(model(X))


@either(inputs=tw.Inputs(X, note="a"))
def extra_keywords_that_were_given() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if kwargs.get("note") == "b" else y

    model = yield Model()
    yield model(X, note="a")
    yield model(X, note="b")
    yield model(X)


@either
def extra_positional_arguments() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor, *more: Any) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if more else y

    model = yield Model()
    yield model(X)
    yield model(X, 1)


@either
def all_arguments_are_anonymous() -> Steps:
    class Model(Mlp):
        def forward(self, *args: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(args[0])))
            return y.tanh() if len(args) > 1 else y

    model = yield Model()
    yield model(X)
    yield model(X, X)


@either(inputs=tw.Inputs(X, X))
def the_same_tensor_twice() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y if x is other else y.tanh()

    model = yield Model()
    yield model(X, X)
    yield model(X, X.clone())


@either(inputs=tw.Inputs(X, X.clone()))
def two_tensors_that_become_one() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y if x is not other else y.tanh()

    model = yield Model()
    yield model(X, X.clone())
    yield model(X, X)


@refused("", inputs=tw.Inputs((X, X)))
def x_inside_a_tuple() -> Steps:
    class Model(Mlp):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
            y: Tensor = self.down(F.gelu(self.up(pair[0])))
            return y

    model = yield Model()
    yield model((X, X))
    yield model((2 * X, X))


@either(inputs=tw.Inputs(MASK, X))
def x_is_the_second_argument() -> Steps:
    class Model(Mlp):
        def forward(self, mask: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y

    model = yield Model()
    yield model(MASK, X)
    yield model(X, 2 * X)
    yield model(x=2 * X, mask=MASK)


@welded
def missing_and_unknown_arguments_raise() -> Steps:
    model = yield Flag()
    yield model(X)
    yield attempt(lambda: model())
    yield attempt(lambda: model(None))
    yield attempt(lambda: model(X, True, 3))
    yield attempt(lambda: model(X, unknown=1))
    yield attempt(lambda: model(X, x=X))
    yield attempt(lambda: model([1.0, 2.0]))


@welded(path="mlp", inputs=tw.Inputs(X))
def a_keyword_that_only_the_parent_gives() -> Steps:
    model = yield Around(Flag())
    yield model(X)
    yield model(X, flag=True)
    yield inside(model(X))


@welded(path="mlp")
def forward_called_directly() -> Steps:
    model = yield Around(Flag())
    yield model(X)
    yield model.mlp.forward(X)
    yield model.mlp.forward(X, flag=True)
    yield type(model.mlp).forward(model.mlp, X, True)


@welded(inputs=tw.Inputs(X, mode="fast"))
def a_text_at_its_default() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor, mode: str = "fast") -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y if mode == "fast" else y.tanh()

    model = yield Model()
    yield model(X, mode="fast")
    yield inside(model(X))
    yield model(X, mode="slow")
    yield model(X, "fa" + "st")


@welded
def a_tuple_given_where_none_was() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor, factors: tuple[float, ...] = ()) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            for factor in factors:
                y = y * factor
            return y

    model = yield Model()
    yield model(X)
    yield model(X, (3.0,))
    yield model(X, factors=())
    yield model(fixed(8, K), [0.5])
