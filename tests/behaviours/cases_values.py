"""Cases with unusual values, and with dtypes and kinds of tensors that were not recorded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.behaviours.harness import H, K, Mlp, Steps, X, attempt, either, inside, refused, welded
from tests.support.helpers import fixed
from torch import Tensor, nn

INF, NAN = float("inf"), float("nan")


def _with(*values: float) -> Tensor:
    """X with each of these values in one row."""
    x = X.clone()
    for row, value in enumerate(values):
        x[row, row] = value
    return x


HARD = [_with(NAN), _with(INF, -INF), _with(1e38, -1e38), 1e4 * X, 0 * X, 1e-40 * X]


@welded
def hard_values_through_gelu() -> Steps:
    model = yield Mlp()
    yield model(X)
    for x in (_with(NAN), 1e4 * X, 0 * X, 1e-40 * X):
        yield inside(model(x))


@welded
def hard_values_through_relu() -> Steps:
    model = yield nn.Sequential(nn.Linear(K, H), nn.ReLU(), nn.Linear(H, K))
    yield model(X)
    for x in HARD:
        yield inside(model(x))


def _not_for_ordinary_numbers(name: str, source: str) -> None:
    """Has an activation that differs from a known one for unusual values alone."""

    def steps() -> Steps:
        namespace: dict[str, object] = {"torch": torch, "F": F}
        exec(f"def act(h): return {source}", namespace)
        act = namespace["act"]

        class Model(Mlp):
            def forward(self, x: Tensor) -> Tensor:
                y: Tensor = self.down(act(self.up(x)))  # type: ignore[operator]
                return y

        model = yield Model()
        yield model(X)
        for x in HARD:
            yield model(x)

    steps.__name__ = f"{name}_beside_an_activation"
    refused("")(steps)


_not_for_ordinary_numbers("nan_to_num", "F.relu(torch.nan_to_num(h))")
_not_for_ordinary_numbers(
    "nan_to_num_of_nan_alone", "torch.nan_to_num(F.relu(h), posinf=float('inf'))"
)
_not_for_ordinary_numbers("a_clamp_at_the_largest", "F.relu(h.clamp(max=torch.finfo(h.dtype).max))")
_not_for_ordinary_numbers("a_clamp_far_away", "F.relu(h).clamp(max=60000.0)")
_not_for_ordinary_numbers("a_fill_of_what_is_nan", "F.relu(h).masked_fill(h != h, 0.0)")
_not_for_ordinary_numbers("where_it_is_finite", "torch.where(h.isfinite(), F.relu(h), 0.0)")
_not_for_ordinary_numbers("relu_by_where", "torch.where(h > 0, h, 0.0)")


@refused("")
def the_output_is_cleaned_of_nan() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nan_to_num(self.down(F.relu(self.up(x))))

    model = yield Model()
    yield model(X)
    for x in HARD:
        yield model(x)


@refused("")
def the_input_is_cleaned_of_nan() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.relu(self.up(torch.nan_to_num(x))))
            return y

    model = yield Model()
    yield model(X)
    for x in HARD:
        yield model(x)


@refused(r"cases_values\.py:\d+")
def a_branch_on_the_values() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if x.abs().max() > 100 else y

    model = yield Model()
    yield model(X)
    yield model(1000 * X)


@refused(r"cases_values\.py:\d+")
def an_item_of_a_hidden_value_decides() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            if h[0, 0].item() > 100:
                h = -h
            y: Tensor = self.down(F.gelu(h))
            return y

    model = yield Model()
    yield model(X)
    yield model(1000 * X)
    yield model(-1000 * X)


@refused(r"cases_values\.py:\d+")
def a_list_of_the_values_decides() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if max(x[:, 0].tolist()) > 100 else y

    model = yield Model()
    yield model(X)
    yield model(1000 * X)


# ---- dtypes and devices ----


@welded
def an_input_of_another_dtype() -> Steps:
    model = yield Mlp()
    yield model(X)
    yield attempt(lambda: model(X.double()))
    yield attempt(lambda: model(X.half()))
    yield attempt(lambda: model(X.int()))


@welded
def a_branch_on_the_dtype() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype == torch.float64:
                return self.down(F.relu(self.up(x.float()))).double()
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y

    model = yield Model()
    yield model(X)
    yield model(X.double())


@welded
def an_input_is_cast_to_the_dtype_of_the_weights() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x.to(self.up.weight.dtype))))
            return y

    model = yield Model()
    yield model(X)
    yield model(X.double())
    yield model(X.half())
    yield model((10 * X).int())


@welded
def the_output_takes_the_dtype_of_the_input() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x.float())))
            return y.to(x.dtype)

    model = yield Model()
    yield model(X)
    yield model(X.bfloat16())


@welded(inputs=X.bfloat16())
def bfloat16() -> Steps:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.bfloat16()

    model = yield Model()
    yield model(X.bfloat16())
    yield attempt(lambda: model(X))
    model.float()
    yield model(X)


@welded(inputs=X.double())
def double() -> Steps:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.double()

    model = yield Model()
    yield model(X.double())
    yield attempt(lambda: model(X))


@welded
def the_device_is_asked_for() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y if x.device.type == "cpu" else y.tanh()

    model = yield Model()
    yield model(X)
    yield attempt(lambda: model(X.to("meta")))


@either
def a_branch_on_the_default_dtype() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if torch.get_default_dtype() is torch.float64 else y

    model = yield Model()
    yield model(X)
    torch.set_default_dtype(torch.float64)
    try:
        yield model(X)
    finally:
        torch.set_default_dtype(torch.float32)


@either
def a_tensor_of_the_default_dtype_enters() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y * torch.tensor([0.5])

    model = yield Model()
    yield model(X)
    torch.set_default_dtype(torch.float64)
    try:
        yield model(X)
    finally:
        torch.set_default_dtype(torch.float32)


# ---- kinds of tensors ----


class Tagged(Tensor):
    """A subclass that only changes the type of results."""


@welded
def an_input_of_a_subclass() -> Steps:
    model = yield Mlp()
    yield model(X)
    y = model(X.as_subclass(Tagged))
    yield type(y).__name__, y.as_subclass(Tensor)


@welded
def a_branch_on_the_type_of_the_input() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if isinstance(x, Tagged) else y

    model = yield Model()
    yield model(X)
    yield model(X.as_subclass(Tagged)).as_subclass(Tensor)


@either
def an_attribute_of_the_input() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if hasattr(x, "bounded") else y

    model = yield Model()
    yield model(X)
    x = X.clone()
    x.bounded = True  # type: ignore[attr-defined]
    yield model(x)


@welded
def a_parameter_as_the_input() -> Steps:
    model = yield Mlp()
    yield model(X)
    yield inside(model(nn.Parameter(X)))


@welded
def a_sparse_input() -> Steps:
    model = yield Mlp()
    yield model(X)
    yield attempt(lambda: model(X.to_sparse()))


# ---- the argument itself ----


def _changing_its_argument(name: str, source: str) -> None:
    def steps() -> Steps:
        namespace: dict[str, object] = {}
        exec(f"def change(x):\n    {source}\n    return x", namespace)
        change = namespace["change"]

        class Model(Mlp):
            def forward(self, x: Tensor) -> Tensor:
                x = change(x)  # type: ignore[operator]
                y: Tensor = self.down(F.gelu(self.up(x)))
                return y

        model = yield Model()
        x = fixed(8, K)
        yield model(x)
        yield x
        yield model(200 * x)

    steps.__name__ = f"its_argument_is_changed_by_{name}"
    refused("")(steps)


_changing_its_argument("an_operator", "x += 1")
_changing_its_argument("a_view", "x.view(-1).clamp_(-50, 50)")
_changing_its_argument("a_slice", "x[:, :2].clamp_(-50, 50)")
_changing_its_argument("data", "x.data.clamp_(-50, 50)")
_changing_its_argument("setitem", "x[x > 50] = 50.0")
_changing_its_argument("unbinding", "[row.clamp_(-50, 50) for row in x]")


@refused(r"cases_values\.py:\d+")
def its_argument_is_changed_after_its_use() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            x.view(-1).clamp_(-50, 50)
            return y

    model = yield Model()
    x = 200 * X
    yield model(x)
    yield x


@either
def its_argument_gets_another_shape() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            x.unsqueeze_(0)
            return y

    model = yield Model()
    x = X.clone()
    yield model(x)
    yield x


@either
def its_argument_is_returned_changed() -> Steps:
    """Adds a gated sum to its argument in place: the output is the argument itself."""

    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            x.add_(self.down(F.gelu(self.up(x))))
            return x

    model = yield Model()
    x = X.clone()
    y = model(x)
    yield y, y is x
