"""Tests welded modules that the user has changed: new weights are used, other changes respected."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.helpers import ISAS, kernel_runs
from tests.support.mlps import LowRank
from tests.support.swap_blocks import (
    CASES,
    GATED,
    LINEAR,
    MLP,
    NATURAL,
    PACKED,
    Gated,
    H,
    K,
    Mlp,
    N,
    Quiet,
    X,
    decide,
    model_of,
)
from torch import Tensor, nn
from torch.nn.utils import parametrize

from torchweld.core.errors import TorchweldError
from torchweld.welds.swapping.swap import stats, undo, weld
from torchweld.welds.weld_decisions import Choice

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]

TORCH = Choice(backend="torch")


# ---- changed weights are used ----


def multiply(module: nn.Module) -> None:
    with torch.no_grad():
        for t in module.parameters():
            t.mul_(1.5)


def multiply_data(module: nn.Module) -> None:
    for t in module.parameters():
        t.data.mul_(1.5)


def new_data(module: nn.Module) -> None:
    for t in module.parameters():
        t.data = 1.5 * t.data


def new_parameters(module: nn.Module) -> None:
    for inner in module.modules():
        for name, t in list(inner._parameters.items()):
            if t is not None:
                setattr(inner, name, nn.Parameter(1.5 * t.detach()))


def load(module: nn.Module) -> None:
    module.load_state_dict({name: 1.5 * t for name, t in module.state_dict().items()})


def assign(module: nn.Module) -> None:
    state = {name: 1.5 * t for name, t in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def fused_step(module: nn.Module) -> None:
    for t in module.parameters():
        t.grad = -5 * t.detach()
    torch.optim.SGD(module.parameters(), lr=0.1, fused=True).step()


EDITS: list[Callable[[nn.Module], None]] = [
    multiply,
    multiply_data,
    new_data,
    new_parameters,
    load,
    assign,
    fused_step,
]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("choice", [PACKED, NATURAL, TORCH], ids=["packed", "natural", "torch"])
@pytest.mark.parametrize("kind", CASES)
def test_changed_weights_are_used(
    kind: str, choice: Choice, edit: Callable[[nn.Module], None]
) -> None:
    model, plain = model_of(kind, choice)
    with torch.no_grad():
        for _ in range(2):
            before = model(X)
    edit(model[1])
    edit(plain[1])
    with torch.no_grad(), kernel_runs(calls=2 if choice.backend == "cpu" else 0):
        y = model(X)
        assert (y - before).abs().max() > 1e-3
        torch.testing.assert_close(y, plain(X))
        torch.testing.assert_close(model(X), plain(X))
    assert stats(model)["1"].originals == {}


def test_functional_call() -> None:
    model, plain = model_of("mlp")
    state = {f"1.{n}": t + 0.1 for n, t in plain[1].named_parameters()}
    with torch.no_grad():
        before = model(X)
        for _ in range(2):
            with kernel_runs("packed"):
                y = torch.func.functional_call(model, state, (X,))
            torch.testing.assert_close(y, torch.func.functional_call(plain, state, (X,)))
            with kernel_runs("packed"):
                assert torch.equal(model(X), before)


def test_an_ensemble_by_vmap() -> None:
    model, plain = model_of("mlp")
    others = [copy.deepcopy(plain[1]) for _ in range(3)]
    for other in others:
        for t in other.parameters():
            nn.init.normal_(t)
    params, buffers = torch.func.stack_module_state(others)

    def run(params: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(model[1], (params, buffers), (x,))
        return y

    with torch.no_grad():
        model(X)
        ys = torch.func.vmap(run, in_dims=(0, None))(params, X)
        for y, other in zip(ys, others, strict=True):
            torch.testing.assert_close(y, other(X))


def test_tied_weights() -> None:
    layers = {"a": nn.Linear(K, K), "b": nn.Linear(K, K)}
    layers["b"].weight = layers["a"].weight
    model = nn.ModuleDict(layers).eval()
    block = replace(LINEAR, in_features=K, out_features=K)
    weld(model, [decide(block, path="a"), decide(block, path="b")])
    with torch.no_grad():
        model["a"](X), model["b"](X)
        layers["a"].weight.mul_(2.0)
        for name in "ab":
            with kernel_runs("packed"):
                y = model[name](X)
            torch.testing.assert_close(y, F.linear(X, layers["a"].weight, layers[name].bias))
    assert model["a"].weight is model["b"].weight


def test_packed_copies_are_dropped() -> None:
    def copied() -> int:
        return stats(model)["1"].copied_bytes

    model, _ = model_of("mlp")
    for drop in (model.train, model.double, lambda: model.to("cpu"), lambda: model[1].train()):
        model.float().eval()
        with torch.no_grad():
            model(X)
        assert copied() > 0
        drop()
        assert copied() == 0
    model.eval()
    assert copied() == 0


# ---- changes of the module run the original ----


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


Change = Callable[[Any], Any]


def replaced(name: str, make: Callable[[Any], nn.Module]) -> Change:
    def change(module: Any) -> None:
        setattr(module, name, make(getattr(module, name)))

    return change


def in_place(name: str) -> Change:
    """Replaces a child without an assignment that __setattr__ would see."""

    def change(module: Any) -> None:
        module._modules[name] = nn.Sequential(module._modules[name], nn.Tanh())

    return change


def own_forward(name: str) -> Change:
    def change(module: Any) -> None:
        inner = getattr(module, name)
        plain = inner.forward
        inner.forward = lambda x: 3.0 * plain(x)

    return change


def hooked(name: str, kind: str = "forward") -> Change:
    def change(module: Any) -> Any:
        inner = getattr(module, name)
        if kind == "forward":
            return inner.register_forward_hook(lambda m, args, y: 2 * y)
        if kind == "pre":
            return inner.register_forward_pre_hook(lambda m, args: (2 * args[0],))
        # A new dictionary replaces the one for hooks.
        inner._forward_hooks = type(inner._forward_hooks)()
        return inner.register_forward_hook(lambda m, args, y: 2 * y)

    return change


def attribute(path: str, value: Any) -> Change:
    def change(module: Any) -> None:
        holder, _, name = path.rpartition(".")
        setattr(module.get_submodule(holder), name, value)

    return change


def of_class(name: str, kind: type) -> Change:
    def change(module: Any) -> None:
        getattr(module, name).__class__ = kind

    return change


class Shouting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 10 * super().forward(x)


class Tripled(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


CHANGES: list[tuple[str, Change, str]] = [
    ("lora", replaced("up", LowRank), "up was replaced by a LowRank"),
    ("new linear", replaced("down", lambda _: nn.Linear(H, N)), "down was replaced by a Linear"),
    ("new activation", replaced("act", lambda _: nn.ReLU()), "act was replaced by a ReLU"),
    ("in place", in_place("act"), "act was replaced by a Sequential"),
    ("linear's forward", own_forward("up"), "up has a forward of its own"),
    ("act's forward", own_forward("act"), "act has a forward of its own"),
    ("linear's hook", hooked("down"), "down has forward hooks"),
    ("linear's pre-hook", hooked("up", "pre"), "up has forward pre hooks"),
    ("act's hook", hooked("act"), "act has forward hooks"),
    ("act's pre-hook", hooked("act", "pre"), "act has forward pre hooks"),
    ("new hooks", hooked("act", "other"), "act has forward hooks"),
    ("linear's new hooks", hooked("up", "other"), "up has forward hooks"),
    ("act's attribute", attribute("act.approximate", "tanh"), "act's approximate was changed"),
    ("own attribute", attribute("gain", 2.0), "its gain was changed"),
    ("linear's class", of_class("up", Shouting), "up became a Shouting"),
    ("act's class", of_class("act", Tripled), "act became a Tripled"),
    (
        "parametrised",
        lambda m: parametrize.register_parametrization(m.up, "weight", Doubled()),
        "up became a ParametrizedLinear",
    ),
]


@pytest.mark.parametrize("choice", [PACKED, NATURAL, TORCH], ids=["packed", "natural", "torch"])
@pytest.mark.parametrize(
    ("change", "because"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES]
)
def test_a_change_is_yielded_to_and_said_once(change: Change, because: str, choice: Choice) -> None:
    torch.manual_seed(3)
    module = Mlp().eval()
    plain = copy.deepcopy(module)
    weld(module, [decide(MLP, choice)])
    with torch.no_grad():
        for _ in range(2):
            before = module(X)
        torch.manual_seed(4)
        change(module)
        torch.manual_seed(4)
        change(plain)
        with kernel_runs(calls=0):
            with pytest.warns(
                UserWarning, match=f"the Mlp runs its original code, because {because}"
            ):
                y = module(X)
            assert torch.equal(y, plain(X))
            for _ in range(3):  # without a warning, which would be an error here
                assert torch.equal(module(X), y)
        assert not torch.allclose(y, before)
        assert stats(module)[""].changes == (because,)
        assert stats(module)[""].originals == {because: 4}


def test_a_change_of_a_function_that_is_an_attribute() -> None:
    module = Gated().eval()
    weld(module, [decide(GATED)])
    with torch.no_grad():
        module(X)
        module.act_fn = F.relu
        with kernel_runs(calls=0), pytest.warns(UserWarning, match="its act_fn was changed"):
            y = module(X)
        torch.testing.assert_close(
            y, module.down(F.relu(module.gate(X)) * module.up(X)), rtol=0, atol=0
        )


@pytest.mark.parametrize("choice", [PACKED, TORCH], ids=["packed", "torch"])
def test_what_is_put_back_is_welded_again(choice: Choice) -> None:
    module: Any = Mlp().eval()
    weld(module, [decide(MLP, choice)])
    calls = 1 if choice.backend == "cpu" else 0
    up, act = module.up, module.act
    with torch.no_grad():
        expected = module(X)
        handles = [module.up.register_forward_hook(lambda *_: None)]
        handles += [module.act.register_forward_pre_hook(lambda *_: None)]
        module.up, module.act = LowRank(up), nn.ReLU()
        module.gain = 2.0
        with pytest.warns(UserWarning, match="its gain"):
            module(X)
        module.gain = 1.0
        with pytest.warns(UserWarning, match="up was replaced"):
            module(X)
        module.up = up
        with pytest.warns(UserWarning, match="act was replaced"):
            module(X)
        module.act = act
        for handle, name in zip(handles, ("up", "act"), strict=True):
            with pytest.warns(UserWarning, match=f"{name} has forward"):
                module(X)
            handle.remove()
        for _ in range(2):
            with kernel_runs(calls=calls):
                assert torch.equal(module(X), expected)


def test_backward_hooks_inside_count_only_with_gradients() -> None:
    module = Mlp().eval()
    weld(module, [decide(MLP, training=True)])
    seen: list[Any] = []
    module.act.register_full_backward_hook(lambda *_: seen.append(1))
    with torch.no_grad(), kernel_runs("packed"):
        module(X)
    x = X.clone().requires_grad_()
    with kernel_runs(calls=0), pytest.warns(UserWarning, match="act has backward hooks"):
        y = module(x)
    y.sum().backward()
    assert seen == [1]


def test_hooks_on_the_module_itself_are_called() -> None:
    module = Mlp().eval()
    weld(module, [decide(MLP)])
    seen: list[str] = []
    module.register_forward_pre_hook(lambda m, args: seen.append("before"))
    module.register_forward_hook(lambda m, args, y: seen.append("after"))
    module.register_forward_hook(lambda m, args, y: 2 * y)
    with torch.no_grad(), kernel_runs("packed", calls=2):
        torch.testing.assert_close(module(X), 2 * module.forward(X))
    assert seen == ["before", "after"]


def test_hooks_on_all_modules_are_called_for_those_inside() -> None:
    module, leaf = Mlp().eval(), nn.Linear(K, N).eval()
    weld(module, [decide(MLP)])
    weld(leaf, [decide(LINEAR)])
    seen: list[str] = []
    with torch.no_grad():
        module(X), leaf(X)
        handle = nn.modules.module.register_module_forward_hook(
            lambda m, args, y: seen.append(type(m).__name__)
        )
        try:
            with kernel_runs(calls=0):
                module(X)
            assert seen == ["Linear", "GELU", "Dropout", "Linear", "Mlp"]
            with kernel_runs("packed"):
                leaf(X)
        finally:
            handle.remove()
        assert stats(module)[""].originals == {"global hooks": 1}
        with kernel_runs("packed"):
            module(X)


def test_another_forward_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces forward of the module's class, and of the class of a module inside."""
    module = Mlp().eval()
    weld(module, [decide(MLP)])
    with torch.no_grad():
        expected = module(X)
        for kind in (Mlp, nn.Linear, nn.GELU):
            with monkeypatch.context() as patch:
                plain = kind.forward
                patch.setattr(kind, "forward", lambda self, x, plain=plain: 2 * plain(self, x))
                with kernel_runs(calls=0):
                    with pytest.warns(UserWarning, match=rf"{kind.__name__}.forward was replaced"):
                        y = module(X)
                    assert not torch.allclose(y, expected)
            with kernel_runs("packed"):
                assert torch.equal(module(X), expected)


def test_attributes_of_a_linear_do_not_matter() -> None:
    """A Linear computes with its parameters; tools that resize them set its attributes."""
    for kind in ("linear", "mlp"):
        model, plain = model_of(kind)
        with torch.no_grad():
            model(X)
            for inner in model[1].modules():
                if isinstance(inner, nn.Linear):
                    inner.in_features, inner.out_features = 7, 8
            with kernel_runs("packed", calls=2):
                torch.testing.assert_close(model(X), plain(X))
                model(X)


def test_attributes_that_were_not_there_do_not_matter() -> None:
    model, _ = model_of("mlp")
    with torch.no_grad():
        model(X)
        modules: list[Any] = list(model.modules())
        for inner in modules:
            inner.tag = "layer"
        with kernel_runs("packed"):
            model(X)


def test_an_attribute_that_is_not_read_does_not_count() -> None:
    module = Mlp().eval()
    module.table = torch.zeros(3)
    weld(module, [decide(MLP)])
    with torch.no_grad(), kernel_runs("packed", calls=3):
        module(X), module(X)
        module.table = torch.ones(3)
        module(X)


def test_a_replaced_child_is_not_kept() -> None:
    module = Mlp().eval()
    weld(module, [decide(MLP)])
    with torch.no_grad():
        module(X)
        old = weakref.ref(module.up.weight)
        module.up = nn.Linear(K, H)
        with pytest.warns(UserWarning, match="up was replaced"):
            module(X)
    gc.collect()
    assert old() is None


def test_an_attribute_that_is_deleted() -> None:
    module = Gated().eval()
    weld(module, [decide(GATED)])
    with torch.no_grad():
        module(X)
        del module.act_fn
        with (
            kernel_runs(calls=0),
            pytest.raises(AttributeError, match="act_fn"),
            pytest.warns(UserWarning, match="its act_fn was changed"),
        ):
            module(X)


@pytest.mark.parametrize("kind", ["subclass", "mlp", "raw"])
def test_a_model_that_is_let_go_is_freed_at_once(kind: str) -> None:
    """It does not have to wait for the garbage collector."""
    model, _ = model_of(kind)
    with torch.no_grad():
        model(X), model(X)
    held = [weakref.ref(m) for m in model.modules()]
    gc.collect()
    gc.disable()
    try:
        del model
        assert [ref() for ref in held] == [None] * len(held)
    finally:
        gc.enable()


# ---- a welded Linear ----


def test_parametrising_a_welded_linear() -> None:
    model, plain = model_of("linear")
    with torch.no_grad():
        before = model(X)
        for m in (model, plain):
            parametrize.register_parametrization(m[1], "weight", Doubled())
        with kernel_runs(calls=0):
            with pytest.warns(UserWarning, match="it became a ParametrizedLinear"):
                y = model(X)
            assert torch.equal(y, plain(X))
        with pytest.raises(TorchweldError, match="made modules ParametrizedLinear; take that back"):
            undo(model)
        copied = copy.deepcopy(model)
        with kernel_runs(calls=0), pytest.warns(UserWarning, match="has no weight any more"):
            assert torch.equal(copied(X), y)
        parametrize.remove_parametrizations(model[1], "weight", leave_parametrized=False)
        with kernel_runs("packed"):
            assert torch.equal(model(X), before)
    undo(model)
    assert type(model[1]) is nn.Linear


def test_an_adapter_around_a_welded_linear() -> None:
    """The adapter runs its own code; the Linear inside stays welded."""
    model, plain = model_of("linear")
    for m in (model, plain):
        torch.manual_seed(5)
        linear = m[1]
        assert isinstance(linear, nn.Linear)
        m[1] = LowRank(linear)
    with torch.no_grad(), kernel_runs("packed"):
        torch.testing.assert_close(model(X), plain(X))
    undo(model)
    assert type(model.get_submodule("1.base")) is nn.Linear


def test_a_subclass_with_other_attributes() -> None:
    class Scaled(Quiet):
        gain = 1.0

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return super().forward(input) * self.gain

    module = Scaled(K, N).eval()
    module.gain = 1.0
    weld(module, [decide(replace(LINEAR, kind="Scaled"))])
    with torch.no_grad():
        with kernel_runs("packed"):
            y = module(X)
        module.gain = 3.0
        with kernel_runs(calls=0), pytest.warns(UserWarning, match="its gain was changed"):
            torch.testing.assert_close(module(X), 3 * y)


def test_a_bias_that_comes_or_goes() -> None:
    model, plain = model_of("linear")
    with torch.no_grad():
        model(X)
        linears: list[Any] = [model[1], plain[1]]
        for linear in linears:
            linear.bias = None
        with kernel_runs(calls=0):
            with pytest.warns(UserWarning, match="its bias was changed"):
                y = model(X)
            assert torch.equal(y, plain(X))
    model, plain = model_of("linear without bias")
    with torch.no_grad():
        model(X)
        for m in (model, plain):
            m[1].bias = nn.Parameter(torch.ones(N))
        with pytest.warns(UserWarning, match="its bias was changed"):
            torch.testing.assert_close(model(X), plain(X))


def test_weights_of_another_shape_are_left_to_the_original() -> None:
    model, plain = model_of("mlp")
    with torch.no_grad():
        model(X)
        for m in (model, plain):
            mlp = m[1]
            assert isinstance(mlp, Mlp)
            mlp.up.weight = nn.Parameter(torch.ones(H + 1, K))
            mlp.up.bias = nn.Parameter(torch.ones(H + 1))
            mlp.down.weight = nn.Parameter(torch.ones(3, H + 1))
            mlp.down.bias = nn.Parameter(torch.ones(1))  # eager broadcasts it
        with kernel_runs(calls=0):
            with pytest.warns(UserWarning, match="the op refused a call: .*bias has shape"):
                y = model(X)
            assert torch.equal(y, plain(X))
