"""Cases that change parameters, buffers and copies of a welded module: calls must follow."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
import torch.nn.functional as F
from tests.behaviours.harness import (
    Around,
    H,
    K,
    Mlp,
    Steps,
    X,
    attempt,
    before_and_after,
    either,
    inside,
    refused,
    welded,
)
from torch import Tensor, nn


class Picklable(Mlp):
    """A module at the top level of the file, as pickle requires."""

    flag = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y.tanh() if self.flag else y


def _tripled(model: nn.Module) -> dict[str, Tensor]:
    return {name: 3.0 * t for name, t in model.state_dict().items()}


# ---- values ----


@welded
def weights_are_multiplied() -> Steps:
    model = yield Mlp()
    yield model(X)
    with torch.no_grad():
        model.up.weight.mul_(3.0)
    yield inside(model(X))


@welded
def weights_are_multiplied_through_data() -> Steps:
    model = yield Mlp()
    yield model(X)
    model.up.weight.data.mul_(3.0)
    yield inside(model(X))


@welded
def weights_get_new_data() -> Steps:
    yield from before_and_after(Mlp(), lambda m: setattr(m.up.weight, "data", torch.ones(H, K)))


@welded
def a_bias_is_changed_through_data() -> Steps:
    yield from before_and_after(Mlp(), lambda m: m.down.bias.data.add_(1.0))


@welded
def a_state_dict_is_loaded() -> Steps:
    model = yield Mlp()
    yield model(X)
    model.load_state_dict(_tripled(model))
    yield inside(model(X))


@welded
def a_state_dict_is_assigned() -> Steps:
    model = yield Mlp()
    yield model(X)
    model.load_state_dict(_tripled(model), assign=True)
    yield inside(model(X))


@welded
def a_parameter_is_replaced() -> Steps:
    model = yield Mlp()
    yield model(X)
    model.up.weight = nn.Parameter(torch.ones(H, K))
    yield inside(model(X))


@welded
def a_parameter_is_replaced_by_one_of_another_dtype() -> Steps:
    model = yield Mlp()
    yield model(X)
    model.up.weight = nn.Parameter(model.up.weight.detach().double())
    yield attempt(lambda: model(X))


@welded
def a_parameter_is_replaced_by_one_of_another_shape() -> Steps:
    model = yield Mlp()
    yield model(X)
    model.up.weight = nn.Parameter(torch.ones(H + 1, K))
    yield attempt(lambda: model(X))


@welded
def a_bias_is_taken_away() -> Steps:
    yield from before_and_after(Mlp(), lambda m: setattr(m.up, "bias", None))


@welded
def a_bias_appears() -> Steps:
    model: Any = Mlp()
    model.up.bias = None
    yield from before_and_after(model, lambda m: setattr(m.up, "bias", nn.Parameter(torch.ones(H))))


@welded
def a_parameter_is_replaced_by_a_transposed_view() -> Steps:
    yield from before_and_after(
        Mlp(), lambda m: setattr(m.up, "weight", nn.Parameter(torch.randn(K, H).t()))
    )


@welded
def weights_go_to_half_and_back() -> Steps:
    yield from before_and_after(Mlp(), lambda m: m.half().float())


@welded
def weights_go_to_double() -> Steps:
    model = yield Mlp()
    yield model(X)
    model.double()
    yield model(X.double())
    yield attempt(lambda: model(X))


@welded
def weights_become_nan() -> Steps:
    model = yield Mlp()
    yield model(X)
    model.up.weight.data[0, 0] = float("nan")
    yield model(X)


@welded
def tied_weights_change_together() -> Steps:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(K, K), nn.Linear(K, K)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.b(F.gelu(self.a(x)))
            return y

    model = yield Model()
    yield model(X)
    model.a.weight.data.mul_(3.0)
    yield inside(model(X))
    model.b.weight = nn.Parameter(model.b.weight.detach().clone())
    model.a.weight.data.mul_(3.0)
    yield inside(model(X))


@welded
def one_module_called_twice() -> Steps:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(K, K)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.a(F.gelu(self.a(x)))
            return y

    yield from before_and_after(Model(), lambda m: m.a.weight.data.mul_(3.0))


@welded(path="first")
def one_module_at_two_places() -> Steps:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Mlp()
            self.norm = nn.LayerNorm(K)
            self.second = self.first

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.second(self.norm(self.first(x)))
            return y

    model = yield Model()
    yield model(X)
    model.second.up.weight.data.mul_(3.0)
    yield inside(model(X))
    model.second = Mlp()
    yield model(X)


@welded
def buffers_as_weights() -> Steps:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w1", torch.randn(H, K))
            self.register_buffer("w2", torch.randn(K, H))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.gelu(F.linear(x, self.w1)), self.w2)  # type: ignore[arg-type]

    model = yield Model()
    yield model(X)
    model.w1.mul_(3.0)
    yield inside(model(X))
    model.w2 = torch.ones(K, H)
    yield inside(model(X))


@welded
def requires_grad_is_switched_off_and_on() -> Steps:
    model = yield Mlp()
    yield model(X)
    model.requires_grad_(False)
    yield inside(model(X))
    with torch.enable_grad():
        yield model(X)
        model.requires_grad_(True)
        yield model(X)


@welded
def functional_call_with_other_weights() -> Steps:
    model = yield Mlp()
    yield model(X)
    yield torch.func.functional_call(model, _tripled(model), (X,))
    yield inside(model(X))


@refused(r"cases_weights\.py:\d+")
def a_parameter_is_changed_by_forward() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.up.weight.mul_(0.99)
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y

    model = yield Model()
    saved = {name: t.clone() for name, t in Model().state_dict().items()}
    model.load_state_dict({name: torch.ones_like(t) for name, t in saved.items()})
    yield model(X), model(X)
    yield model.up.weight


@refused(r"cases_weights\.py:\d+")
def a_buffer_is_changed_by_forward() -> Steps:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1.0)  # type: ignore[operator]
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y

    model = yield Model()
    yield model(X), model(X)
    yield model.calls


@refused(r"cases_weights\.py:\d+")
def a_buffer_is_changed_by_forward_through_a_view_of_its_data() -> Steps:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.data.view(-1)[0].add_(1.0)  # type: ignore[operator]
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y

    model = yield Model()
    yield model(X), model(X)
    yield model.seen


# ---- copies ----


@welded
def a_deep_copy_is_changed() -> Steps:
    model = yield Picklable()
    yield model(X)
    other = copy.deepcopy(model)
    yield other(X)
    other.flag = True
    yield other(X)
    yield inside(model(X))


@welded
def a_deep_copy_has_weights_of_its_own() -> Steps:
    model = yield Mlp()
    yield model(X)
    other = copy.deepcopy(model)
    other.up.weight.data.mul_(3.0)
    yield other(X)
    yield inside(model(X))


@welded
def a_shallow_copy_is_changed() -> Steps:
    model = yield Picklable()
    yield model(X)
    other = copy.copy(model)
    other.flag = True
    yield other(X)
    yield inside(model(X))


@welded
def a_pickled_module_is_loaded_and_changed() -> Steps:
    model = yield Picklable()
    yield model(X)
    other = pickle.loads(pickle.dumps(model))
    yield other(X)
    other.flag = True
    yield other(X)


@welded
def the_class_of_a_pickled_module_is_changed_before_it_is_loaded() -> Steps:
    model = yield Picklable()
    yield model(X)
    data = pickle.dumps(model)
    Picklable.flag = True
    try:
        yield pickle.loads(data)(X)
    finally:
        Picklable.flag = False


@welded(path="mlp")
def a_saved_model_is_loaded() -> Steps:
    model = yield Around(Picklable())
    yield model(X)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other: Any = torch.load(file, weights_only=False)
    yield other(X)
    other.mlp.up.weight.data.mul_(3.0)
    yield other(X)


@either
def a_config_shared_by_a_copy_is_changed() -> Steps:
    class Config:
        scale = 1.0

        def __deepcopy__(self, memo: Any) -> Config:
            return self

    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.config = Config()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y * self.config.scale if self.config.scale != 1.0 else y

    model = yield Model()
    yield model(X)
    other = copy.deepcopy(model)
    model.config.scale = 3.0
    yield other(X)
    yield model(X)
