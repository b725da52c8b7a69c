"""Cases in which forward has side effects: they must happen at every call."""

from __future__ import annotations

import warnings

import torch.nn.functional as F
from tests.behaviours.harness import Mlp, Steps, X, either, refused
from torch import Tensor

LOG: list[str] = []
CALLS = 0


class Stream:
    def __init__(self) -> None:
        self.written: list[str] = []

    def write(self, text: str) -> None:
        self.written.append(text)


STREAM = Stream()


@refused(r"cases_effects\.py:\d+")
def a_global_list_is_appended_to() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            LOG.append("called")
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y

    model = yield Model()
    LOG.clear()
    yield model(X), model(X)
    yield list(LOG)


@refused("calls")
def calls_are_counted_on_the_instance() -> Steps:
    class Model(Mlp):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y

    model = yield Model()
    model.calls = 0
    yield model(X), model(X)
    yield model.calls


@refused(r"cases_effects\.py:\d+")
def calls_are_counted_in_a_global() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            global CALLS
            CALLS += 1
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y

    model = yield Model()
    globals()["CALLS"] = 0
    yield model(X), model(X)
    yield CALLS


@refused(r"cases_effects\.py:\d+")
def calls_are_counted_in_a_closure() -> Steps:
    calls = 0

    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y

    model = yield Model()
    calls = 0
    yield model(X), model(X)
    yield calls


@refused(r"cases_effects\.py:\d+")
def the_hidden_value_is_kept() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.up(x)
            y: Tensor = self.down(F.gelu(self.kept))
            return y

    model = yield Model()
    yield model(X)
    yield model.kept
    yield model(2 * X)
    yield model.kept


@either
def something_is_printed() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            print("forward", file=STREAM)
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y

    model = yield Model()
    STREAM.written.clear()
    yield model(X)
    yield list(STREAM.written)


@either
def something_is_warned_about() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 8:
                warnings.warn("eight rows", UserWarning, stacklevel=1)
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = yield Model()
        said.clear()
        yield model(X)
        yield [str(one.message) for one in said if "torchweld" not in str(one.message)]
