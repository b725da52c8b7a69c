"""Cases welded for training: outputs and all gradients must be those of the original."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tests.behaviours.harness import H, K, Mlp, Steps, X, either, inside, refused, welded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def stepped(model: nn.Module, x: Tensor = X) -> Sequence[Any]:
    """The output of a call, and the gradients of x and of all parameters."""
    x = x.clone().requires_grad_()
    wanted = [p for p in model.parameters() if p.requires_grad]
    y = model(x)
    grads = torch.autograd.grad(y.square().sum(), [x, *wanted], allow_unused=True)
    return [y.detach(), *grads]


@welded(training=True)
def gradients() -> Steps:
    model = yield Mlp()
    yield stepped(model)
    yield inside(stepped(model, 2 * X))


@welded(training=True)
def an_optimiser_steps() -> Steps:
    model = yield Mlp()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimiser.zero_grad()
        model(X).square().sum().backward()
        optimiser.step()
        yield list(model.parameters())


@welded(training=True)
def eval_mode_and_back() -> Steps:
    model = yield Mlp()
    yield stepped(model)
    model.eval()
    with torch.no_grad():
        yield model(X)
    model.train()
    yield stepped(model)


@welded(training=True)
def some_weights_are_frozen() -> Steps:
    model = yield Mlp()
    yield stepped(model)
    model.up.requires_grad_(False)
    yield stepped(model)
    yield model(X).requires_grad


@welded(training=True)
def gradients_of_gradients() -> Steps:
    model = yield Mlp()
    yield stepped(model)
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    yield torch.autograd.grad(grad.square().sum(), [x, *model.parameters()], allow_unused=True)


@welded(training=True)
def a_flag_is_set_between_steps() -> Steps:
    class Model(Mlp):
        flag = False

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if self.flag else y

    model = yield Model()
    yield stepped(model)
    model.flag = True
    yield stepped(model)


@either(training=True)
def a_branch_on_training_in_training() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y if self.training else y.tanh()

    model = yield Model()
    yield stepped(model)
    model.eval()
    yield stepped(model)


@either(training=True)
def no_grad_around_the_first_linear() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.up(x)
            y: Tensor = self.down(F.gelu(h))
            return y

    model = yield Model()
    yield stepped(model)


@either(training=True)
def a_hidden_value_is_detached() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x).detach()))
            return y

    model = yield Model()
    yield stepped(model)


@either(training=True)
def the_input_is_detached() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x.detach())))
            return y

    model = yield Model()
    yield stepped(model)


@either(training=True)
def a_weight_is_detached() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = F.linear(x, self.up.weight.detach(), self.up.bias)
            y: Tensor = self.down(F.gelu(h))
            return y

    model = yield Model()
    yield stepped(model)


@either(training=True)
def data_of_a_hidden_value() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            y: Tensor = self.down(F.gelu(h.data))
            return y

    model = yield Model()
    yield stepped(model)


@either(training=True)
def a_hidden_value_is_clamped_through_data() -> Steps:
    """Clamps values, but not their gradients."""

    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            h.data.clamp_(-0.5, 0.5)
            y: Tensor = self.down(F.gelu(h))
            return y

    model = yield Model()
    yield stepped(model)
    yield stepped(model, 3 * X)


@either(training=True)
def an_activation_through_data() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            h.data.relu_()
            y: Tensor = self.down(h)
            return y

    model = yield Model()
    yield stepped(model)


@either(training=True)
def a_branch_on_the_grad_mode_in_training() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y if torch.is_grad_enabled() else y.tanh()

    model = yield Model()
    yield stepped(model)
    with torch.no_grad():
        yield model(X)


class Straight(torch.autograd.Function):
    """A relu whose gradient is passed straight through."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.relu()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Straightened(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(Straight.apply(self.up(x)))
        return y


@either(training=True)
def a_gradient_of_its_own() -> Steps:
    model = yield Straightened()
    yield stepped(model)


@either
def a_gradient_of_its_own_in_inference() -> Steps:
    model = yield Straightened()
    yield model(X)
    with torch.enable_grad():
        yield stepped(model)


@either(training=True)
def a_gradient_is_scaled_by_a_hook_on_a_hidden_value() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            if h.requires_grad:
                h.register_hook(lambda grad: 2.0 * grad)
            y: Tensor = self.down(F.gelu(h))
            return y

    model = yield Model()
    yield stepped(model)


@either(training=True)
def a_hidden_value_keeps_its_gradient() -> Steps:
    class Model(Mlp):
        kept: Tensor

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            h.retain_grad()
            object.__setattr__(self, "kept", h)
            y: Tensor = self.down(F.gelu(h))
            return y

    model = yield Model()
    model(X).sum().backward()
    yield model.kept.grad


@welded(training=True)
def a_backward_hook_on_a_child() -> Steps:
    model = yield Mlp()
    yield stepped(model)
    model.up.register_full_backward_hook(lambda module, into, out: (into[0] * 2.0,))
    yield stepped(model)


@welded(training=True)
def a_hook_on_a_parameter() -> Steps:
    model = yield Mlp()
    yield stepped(model)
    model.up.weight.register_hook(lambda grad: 2.0 * grad)
    model(X).sum().backward()
    yield model.up.weight.grad


@welded(training=True)
def dropout_is_switched_on_between_steps() -> Steps:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.drop, self.down = nn.Linear(K, H), nn.Dropout(0.0), nn.Linear(H, K)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(self.drop(F.gelu(self.up(x))))
            return y

    model = yield Model()
    yield stepped(model)
    model.drop.p = 0.5
    yield stepped(model)


@either(training=True)
def dropout_in_training() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.dropout(F.gelu(self.up(x)), 0.5, self.training))
            return y

    model = yield Model()
    yield stepped(model)


@refused("", training=True)
def the_output_depends_on_running_statistics() -> Steps:
    model = yield nn.Sequential(nn.Linear(K, H), nn.BatchNorm1d(H), nn.ReLU(), nn.Linear(H, K))
    yield stepped(model)


# ---- checkpointing ----


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.mlp, self.norm, self.reentrant = Mlp(), nn.LayerNorm(K), reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.mlp, self.norm(x), use_reentrant=self.reentrant)
        return y


@welded(training=True, path="mlp")
def a_checkpointed_block() -> Steps:
    model = yield Checkpointed(reentrant=False)
    yield stepped(model)
    yield stepped(model, 2 * X)


@welded(training=True, path="mlp")
def a_block_checkpointed_the_old_way() -> Steps:
    model = yield Checkpointed(reentrant=True)
    x = X.clone().requires_grad_()
    model(x).square().sum().backward()
    yield [x.grad, *(p.grad for p in model.parameters())]


@welded(path="mlp")
def a_block_welded_for_inference_is_checkpointed() -> Steps:
    model = yield Checkpointed(reentrant=False)
    yield model(X)
    model.train()
    with torch.enable_grad():
        yield stepped(model)


@welded(training=True, path="mlp")
def a_checkpointed_block_after_a_change() -> Steps:
    model = yield Checkpointed(reentrant=False)
    yield stepped(model)
    model.mlp.up.register_forward_hook(lambda module, args, y: 2.0 * y)
    yield stepped(model)


@welded(training=True)
def parts_of_a_block_are_checkpointed() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y

    model = yield Model()
    yield stepped(model)
    x = X.clone().requires_grad_()
    y = checkpoint(model, x, use_reentrant=False)
    yield torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
