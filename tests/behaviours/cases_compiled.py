"""Cases with a welded module in torch.compile'd code, where Dynamo guards what forward reads.

The backend runs the captured graph as it is: the cases test which code runs, not what Inductor
makes of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.behaviours.harness import Around, H, K, Mlp, Steps, X, welded
from torch import Tensor, nn


def _compiled(model: nn.Module) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="eager")


@welded
def compiled() -> Steps:
    model = yield Mlp()
    yield model(X)
    fast = _compiled(model)
    yield fast(X)
    yield fast(X.view(2, 4, K))
    yield fast(X[:3])


@welded(path="mlp")
def compiled_and_a_weight_changes() -> Steps:
    model = yield Around(Mlp())
    yield model(X)
    fast = _compiled(model)
    yield fast(X)
    model.mlp.up.weight.data.mul_(3.0)
    yield fast(X)


@welded
def compiled_and_an_attribute_changes() -> Steps:
    class Model(Mlp):
        flag = False

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if self.flag else y

    model = yield Model()
    yield model(X)
    fast = _compiled(model)
    yield fast(X)
    model.flag = True
    yield fast(X)


@welded
def compiled_and_an_activation_is_replaced() -> Steps:
    model = yield nn.Sequential(nn.Linear(K, H), nn.ReLU(), nn.Linear(H, K))
    yield model(X)
    fast = _compiled(model)
    yield fast(X)
    model[1] = nn.Tanh()
    yield fast(X)


@welded
def compiled_and_a_sequential_is_appended_to() -> Steps:
    model = yield nn.Sequential(nn.Linear(K, H), nn.ReLU(), nn.Linear(H, K))
    yield model(X)
    fast = _compiled(model)
    yield fast(X)
    model.append(nn.Tanh())
    yield fast(X)


@welded
def compiled_with_a_branch_on_the_dimensions() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if x.dim() == 3 else y

    model = yield Model()
    yield model(X)
    fast = _compiled(model)
    yield fast(X)
    yield fast(X.view(2, 4, K))


@welded
def compiled_with_a_flag_beside_x() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor, flag: bool = False) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if flag else y

    model = yield Model()
    yield model(X)
    fast = _compiled(model)
    yield fast(X)
    yield fast(X, flag=True)


@welded
def changed_before_it_is_compiled() -> Steps:
    class Model(Mlp):
        flag = False

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if self.flag else y

    model = yield Model()
    yield model(X)
    model.flag = True
    yield _compiled(model)(X)


@welded
def compiled_with_gradients() -> Steps:
    model = yield Mlp()
    yield model(X)
    fast = _compiled(model)
    with torch.enable_grad():
        y = fast(X)
        yield y
        yield torch.autograd.grad(y.sum(), list(model.parameters()))
