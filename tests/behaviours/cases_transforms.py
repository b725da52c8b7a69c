"""Cases with a welded module under transforms, under modes that observe ops, in other threads."""

from __future__ import annotations

import threading

import torch
import torch.nn.functional as F
from tests.behaviours.harness import (
    K,
    Mlp,
    Steps,
    X,
    attempt,
    either,
    inside,
    welded,
)
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torchweld as tw

# ---- transforms ----


@welded
def vmap() -> Steps:
    model = yield Mlp()
    yield model(X)
    yield torch.func.vmap(model)(X)
    yield torch.func.vmap(model)(X.view(2, 4, K))


@welded
def forward_mode_derivatives() -> Steps:
    model = yield Mlp()
    yield model(X)
    with torch.enable_grad():
        yield torch.func.jvp(model, (X,), (torch.ones_like(X),))


@welded
def forward_mode_derivatives_with_respect_to_weights() -> Steps:
    model = yield Mlp()
    yield model(X)
    weights = dict(model.named_parameters())
    tangents = {name: torch.ones_like(w) for name, w in weights.items()}
    yield torch.func.jvp(
        lambda w: torch.func.functional_call(model, w, (X,)), (weights,), (tangents,)
    )


@welded
def dual_numbers_under_no_grad() -> Steps:
    model = yield Mlp()
    yield model(X)
    with torch.autograd.forward_ad.dual_level():
        y = model(torch.autograd.forward_ad.make_dual(X, torch.ones_like(X)))
        dual = torch.autograd.forward_ad.unpack_dual(y)
    yield dual.primal, dual.tangent


@welded
def jacobians() -> Steps:
    model = yield Mlp()
    yield model(X)
    with torch.enable_grad():
        yield torch.func.jacrev(model)(X[0])


@welded
def gradients_by_torch_func() -> Steps:
    model = yield Mlp()
    yield model(X)
    weights = {name: w.detach() for name, w in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(model, weights, (x,)).square().sum()
        return y

    yield torch.func.grad(loss)(weights, X)
    yield torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, X)


# ---- modes that observe ops ----


@welded
def a_torch_function_mode() -> Steps:
    class Doubled(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            y = func(*args, **(kwargs or {}))
            return y * 2 if func is F.gelu else y

    model = yield Mlp()
    yield model(X)
    with Doubled():
        yield model(X)
    yield inside(model(X))


@welded
def a_torch_dispatch_mode() -> Steps:
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    model = yield Mlp()
    yield model(X)
    with Watch():
        yield model(X)
    yield len(seen) > 0


@welded
def calls_from_another_thread() -> Steps:
    model = yield Mlp()
    yield model(X)
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(model(X).detach()))
    thread.start()
    thread.join()
    yield found


@welded
def switched_off_and_on() -> Steps:
    model = yield Mlp()
    yield model(X)
    with tw.disabled(model):
        yield model(X)
    yield inside(model(X))
    tw.undo(model)
    yield model(X)


@either
def deterministic_algorithms_are_asked_for() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if torch.are_deterministic_algorithms_enabled() else y

    model = yield Model()
    yield model(X)
    torch.use_deterministic_algorithms(True)
    try:
        yield model(X)
    finally:
        torch.use_deterministic_algorithms(False)


@welded
def scripting_and_compiling_are_asked_for() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            asked = torch.jit.is_scripting() or torch.compiler.is_compiling()  # type: ignore[attr-defined]
            return y.tanh() if asked else y

    model = yield Model()
    yield model(X)
    yield attempt(lambda: model(2 * X))
