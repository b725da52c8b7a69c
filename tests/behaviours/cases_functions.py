"""Cases in which forward reads outside the module: globals, closures, defaults, the clock."""

from __future__ import annotations

import contextvars
import functools
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests.behaviours import helper_module
from tests.behaviours.harness import Mlp, Steps, X, before_and_after, either, refused, welded
from torch import Tensor

SCALE = 1.0
TABLE: dict[str, Any] = {}
FACTORS: list[float] = []
CONTEXT: contextvars.ContextVar[bool] = contextvars.ContextVar("CONTEXT", default=False)
LOCAL = threading.local()


def act(h: Tensor) -> Tensor:
    return F.gelu(h)


def act_of_another_function(h: Tensor) -> Tensor:
    return act(h)


def relu_act(h: Tensor) -> Tensor:
    return F.relu(h)


_ACT, _ACT_CODE = act, act.__code__


def _reset() -> None:
    """Resets everything that the cases in this file change."""
    globals().update(SCALE=1.0, act=_ACT)
    _ACT.__code__ = _ACT_CODE
    TABLE.clear()
    TABLE.update(scale=1.0, act=F.gelu)
    FACTORS.clear()
    CONTEXT.set(False)
    LOCAL.flag = False
    helper_module.reset()


def _set_global(name: str, value: object) -> Callable[[object], None]:
    return lambda _: globals().__setitem__(name, value)


def _model(after: Callable[[Tensor], Tensor] | None = None) -> type[Mlp]:
    """An MLP whose output goes through the closure `after`."""

    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y if after is None else after(y)

    return Model


# ---- globals ----


class Scaled(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y * SCALE if SCALE != 1.0 else y


@welded
def a_global_changes() -> Steps:
    _reset()
    yield from before_and_after(Scaled(), _set_global("SCALE", 3.0))
    _reset()


@welded
def a_global_dict_changes() -> Steps:
    _reset()

    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y * TABLE["scale"] if TABLE["scale"] != 1.0 else y

    yield from before_and_after(Model(), lambda _: TABLE.update(scale=3.0))
    _reset()


@welded
def a_global_table_of_activations_changes() -> Steps:
    _reset()

    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(TABLE["act"](self.up(x)))
            return y

    yield from before_and_after(Model(), lambda _: TABLE.update(act=F.relu))
    _reset()


@welded
def a_global_list_changes() -> Steps:
    _reset()

    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            for factor in FACTORS:
                y = y * factor
            return y

    yield from before_and_after(Model(), lambda _: FACTORS.append(3.0))
    _reset()


@welded
def a_global_of_another_module_changes() -> Steps:
    _reset()

    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if helper_module.BOUNDED else y

    yield from before_and_after(Model(), lambda _: setattr(helper_module, "BOUNDED", True))
    _reset()


@either
def a_name_of_the_builtins_is_shadowed_by_a_global() -> Steps:
    _reset()

    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if abs(-1) == 2 else y

    yield from before_and_after(Model(), _set_global("abs", lambda _: 2))
    globals().pop("abs")


# ---- helper functions ----


class Helped(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(act_of_another_function(self.up(x)))
        return y


@welded
def a_helper_of_a_helper_is_replaced() -> Steps:
    _reset()
    yield from before_and_after(Helped(), _set_global("act", relu_act))
    _reset()


@welded
def the_code_of_a_helper_is_replaced() -> Steps:
    _reset()
    yield from before_and_after(Helped(), lambda _: setattr(act, "__code__", relu_act.__code__))
    _reset()


@welded
def a_helper_in_another_module_is_replaced() -> Steps:
    _reset()

    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(helper_module.act(self.up(x)))
            return y

    yield from before_and_after(Model(), lambda _: setattr(helper_module, "act", F.relu))
    _reset()


@welded
def a_helper_reads_a_global_of_its_own_module() -> Steps:
    _reset()

    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return helper_module.finish(self.down(F.gelu(self.up(x))))

    yield from before_and_after(Model(), lambda _: setattr(helper_module, "BOUNDED", True))
    _reset()


@welded
def a_helper_that_takes_the_module_reads_its_attribute() -> Steps:
    def finish(module: Any, y: Tensor) -> Tensor:
        return y.tanh() if module.flag else y

    class Model(Mlp):
        flag = False

        def forward(self, x: Tensor) -> Tensor:
            return finish(self, self.down(F.gelu(self.up(x))))

    yield from before_and_after(Model(), lambda m: setattr(m, "flag", True))


@welded
def a_default_of_a_helper_is_replaced() -> Steps:
    def finish(y: Tensor, bounded: bool = False) -> Tensor:
        return y.tanh() if bounded else y

    yield from before_and_after(
        _model(finish)(), lambda _: setattr(finish, "__defaults__", (True,))
    )


@welded
def a_keyword_default_of_a_helper_is_replaced() -> Steps:
    def finish(y: Tensor, *, bounded: bool = False) -> Tensor:
        return y.tanh() if bounded else y

    defaults: Any = finish.__kwdefaults__
    yield from before_and_after(_model(finish)(), lambda _: defaults.update(bounded=True))


@welded
def a_default_of_forward_is_replaced() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor, bounded: bool = False) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if bounded else y

    yield from before_and_after(Model(), lambda _: setattr(Model.forward, "__defaults__", (True,)))


@either
def a_mutable_default_of_a_helper_changes() -> Steps:
    kept: list[float] = []

    def finish(y: Tensor, factors: list[float] = kept) -> Tensor:
        for factor in factors:
            y = y * factor
        return y

    yield from before_and_after(_model(finish)(), lambda _: kept.append(3.0))


@either
def a_mutable_default_of_a_function_in_an_attribute_changes() -> Steps:
    kept: list[float] = []

    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.finish = lambda y, factors=kept: y.tanh() if factors else y

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.finish(self.down(F.gelu(self.up(x))))
            return y

    yield from before_and_after(Model(), lambda _: kept.append(3.0))


@either
def an_attribute_of_a_function_changes() -> Steps:
    def finish(y: Tensor) -> Tensor:
        return y.tanh() if finish.flag else y  # type: ignore[attr-defined]

    finish.flag = False  # type: ignore[attr-defined]
    yield from before_and_after(_model(finish)(), lambda _: setattr(finish, "flag", True))


# ---- closures ----


@welded
def a_closure_cell_changes() -> Steps:
    bounded = False

    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if bounded else y

    model = yield Model()
    yield model(X)
    bounded = True
    yield model(X)


@welded
def a_closure_cell_of_a_helper_changes() -> Steps:
    bounded = False

    def finish(y: Tensor) -> Tensor:
        return y.tanh() if bounded else y

    model = yield _model(finish)()
    yield model(X)
    bounded = True
    yield model(X)


@welded
def a_list_in_a_closure_changes() -> Steps:
    factors: list[float] = []

    def finish(y: Tensor) -> Tensor:
        for factor in factors:
            y = y * factor
        return y

    yield from before_and_after(_model(finish)(), lambda _: factors.append(3.0))


@welded
def a_function_in_a_closure_is_replaced() -> Steps:
    act: Any = F.gelu

    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(act(self.up(x)))
            return y

    model = yield Model()
    yield model(X)
    act = F.relu
    yield model(X)


# ---- callables that cannot be inspected, and the outside world ----


@either
def a_cached_function_is_cleared() -> Steps:
    _reset()

    @functools.lru_cache
    def factor() -> float:
        return SCALE

    def change(_: object) -> None:
        globals()["SCALE"] = 3.0
        factor.cache_clear()

    yield from before_and_after(_model(lambda y: y * factor())(), change)
    _reset()


@either
def a_context_variable_changes() -> Steps:
    _reset()
    yield from before_and_after(
        _model(lambda y: y.tanh() if CONTEXT.get() else y)(), lambda _: CONTEXT.set(True)
    )
    _reset()


@either
def a_thread_local_changes() -> Steps:
    _reset()
    yield from before_and_after(
        _model(lambda y: y.tanh() if LOCAL.flag else y)(), lambda _: setattr(LOCAL, "flag", True)
    )
    _reset()


@refused(r"cases_functions\.py:\d+")
def a_random_number_decides() -> Steps:
    model = yield _model(lambda y: y.tanh() if random.random() < 0.5 else y)()
    random.seed(3)
    yield [model(X) for _ in range(8)]


@refused(r"cases_functions\.py:\d+")
def a_random_tensor_decides() -> Steps:
    model = yield _model(lambda y: y.tanh() if torch.rand(()) < 0.5 else y)()
    torch.manual_seed(3)
    yield [model(X) for _ in range(8)]


@refused(r"cases_functions\.py:\d+")
def the_time_decides() -> Steps:
    begun = time.monotonic()
    model = yield _model(lambda y: y.tanh() if time.monotonic() - begun > 1e6 else y)()
    yield model(X)
    begun = -1e7
    yield model(X)
