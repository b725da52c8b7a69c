"""Cases that add and remove hooks and parametrisations, on a welded module and inside it."""

from __future__ import annotations

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
from torch.nn.utils import parametrizations, parametrize, prune

# ---- hooks ----


@welded
def a_forward_hook_on_a_child() -> Steps:
    yield from before_and_after(
        Mlp(), lambda m: m.up.register_forward_hook(lambda module, args, y: y * 2.0)
    )


@welded
def a_forward_pre_hook_on_a_child() -> Steps:
    yield from before_and_after(
        Mlp(), lambda m: m.up.register_forward_pre_hook(lambda module, args: (args[0] * 2.0,))
    )


@welded
def a_forward_hook_on_a_child_is_removed_again() -> Steps:
    model = yield Mlp()
    yield model(X)
    handle = model.up.register_forward_hook(lambda module, args, y: y * 2.0)
    yield model(X)
    handle.remove()
    yield inside(model(X))


@welded
def a_forward_hook_on_the_module_itself() -> Steps:
    model = yield Mlp()
    yield model(X)
    model.register_forward_hook(lambda module, args, y: y * 2.0)
    yield inside(model(X))


@welded(path="mlp")
def hooks_around_a_module_inside_a_model() -> Steps:
    model = yield Around(Mlp())
    yield model(X)
    model.mlp.register_forward_pre_hook(lambda module, args: (args[0] * 2.0,))
    yield inside(model(X))
    model.register_forward_hook(lambda module, args, y: y - 1.0)
    yield inside(model(X))


@welded
def a_global_forward_hook() -> Steps:
    seen: list[str] = []
    model = yield Mlp()
    yield model(X)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, y: seen.append(type(module).__name__)
    )
    try:
        yield model(X)
    finally:
        handle.remove()
    yield seen


@refused("hook")
def a_hook_on_a_child_that_was_there_before() -> Steps:
    model = Mlp()
    model.up.register_forward_hook(lambda module, args, y: y * 2.0)
    model = yield model
    yield model(X)


# ---- parametrisations ----


class Doubling(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2.0 * w


@welded
def a_child_is_parametrised() -> Steps:
    yield from before_and_after(
        Mlp(), lambda m: parametrize.register_parametrization(m.up, "weight", Doubling())
    )


@welded
def a_child_gets_a_weight_norm() -> Steps:
    model = yield Mlp()
    yield model(X)
    parametrizations.weight_norm(model.up)
    yield model(X)
    model.up.parametrizations.weight.original0.data.mul_(3.0)
    yield model(X)


@welded
def a_child_is_pruned() -> Steps:
    yield from before_and_after(
        Mlp(), lambda m: prune.random_unstructured(m.up, "weight", amount=0.5)
    )


@either
def a_parametrisation_that_was_there_before() -> Steps:
    model = Mlp()
    parametrize.register_parametrization(model.up, "weight", Doubling())
    model = yield model
    yield model(X)
    model.up.parametrizations.weight.original.data.mul_(3.0)
    yield model(X)


@welded
def a_child_becomes_a_low_rank_adapter() -> Steps:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.a, self.b = base, nn.Linear(K, 2), nn.Linear(2, H)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.base(x) + self.b(self.a(x))
            return y

    yield from before_and_after(Mlp(), lambda m: setattr(m, "up", Adapter(m.up)))
