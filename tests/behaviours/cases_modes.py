"""Cases that call in different modes: gradients, inference, autocast, training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.behaviours.harness import (
    Around,
    H,
    K,
    Mlp,
    Steps,
    X,
    before_and_after,
    either,
    inside,
    refused,
    welded,
)
from torch import Tensor, nn

W = X.clone().requires_grad_()


# ---- gradients ----


@welded
def a_call_with_gradients() -> Steps:
    model = yield Mlp()
    yield model(X)
    with torch.enable_grad():
        y = model(W)
        yield y
        yield torch.autograd.grad(y.square().sum(), [W, *model.parameters()])


@welded
def a_branch_on_the_grad_mode() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if torch.is_grad_enabled() else y

    model = yield Model()
    model.requires_grad_(False)
    yield model(X)
    with torch.enable_grad():
        yield model(X)


@welded
def a_branch_on_whether_x_wants_gradients() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if x.requires_grad else y

    model = yield Model()
    yield model(X)
    yield model(W)


@welded
def a_branch_on_whether_a_weight_wants_gradients() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y if self.up.weight.requires_grad else y.tanh()

    yield from before_and_after(Model(), lambda m: m.requires_grad_(False))


@welded
def inference_mode() -> Steps:
    model = yield Mlp()
    yield model(X)
    with torch.inference_mode():
        y = model(X)
    yield y.clone(), y.is_inference()
    yield inside(model(X))


@welded
def a_branch_on_inference_mode() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if torch.is_inference_mode_enabled() else y

    model = yield Model()
    yield model(X)
    with torch.inference_mode():
        y = model(X)
    yield y.clone()


@welded
def a_branch_on_whether_x_was_made_in_inference_mode() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if x.is_inference() else y

    model = yield Model()
    yield model(X)
    with torch.inference_mode():
        x = X.clone()
    yield model(x)


# ---- autocast ----


@welded
def autocast() -> Steps:
    model = yield Mlp()
    yield model(X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield model(X)
    with torch.autocast("cpu", enabled=False):
        yield inside(model(X))


@welded
def a_branch_on_autocast() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if torch.is_autocast_enabled("cpu") else y

    model = yield Model()
    yield model(X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield model(X)


@either
def a_branch_on_autocast_of_another_device() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if torch.is_autocast_enabled("xpu") else y

    model = yield Model()
    yield model(X)
    torch.set_autocast_enabled("xpu", True)
    try:
        yield model(X)
    finally:
        torch.set_autocast_enabled("xpu", False)


@either
def autocast_is_switched_off_inside() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                y: Tensor = self.down(F.gelu(self.up(x.float())))
            return y

    model = yield Model()
    yield model(X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield model(X)


# ---- training ----


@welded
def training_mode_with_dropout() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.dropout(F.gelu(self.up(x)), 0.5, self.training))
            return y

    yield from before_and_after(Model(), lambda m: m.train())


@welded
def a_branch_on_training() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if self.training else y

    model = yield Model()
    yield model(X)
    model.train()
    yield model(X)
    model.eval()
    yield inside(model(X))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(K, H), nn.Dropout(0.5), nn.Linear(H, K)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.drop(F.gelu(self.up(x))))
        return y


@welded
def training_of_a_child_alone() -> Steps:
    yield from before_and_after(Dropping(), lambda m: m.drop.train())


@welded
def training_of_a_child_set_as_an_attribute() -> Steps:
    yield from before_and_after(Dropping(), lambda m: setattr(m.drop, "training", True))


@welded
def training_of_a_child_is_asked_for() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if self.up.training else y

    yield from before_and_after(Model(), lambda m: m.up.train())


@welded
def the_probability_of_a_dropout_changes() -> Steps:
    model = yield Dropping()
    yield model(X)
    model.drop.p = 0.9
    yield model(X)
    model.train()
    yield model(X)


@refused("")
def dropout_that_is_always_on() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.dropout(F.gelu(self.up(x)), 0.5, True))
            return y

    model = yield Model()
    yield model(X)
    yield model(X)


@welded(path="mlp")
def the_parent_is_in_training_and_the_module_is_not() -> Steps:
    model = yield Around(Dropping())
    yield model(X)
    model.train()
    model.mlp.eval()
    yield inside(model(X))
