"""Tangents of weights: forward-mode differentiation goes through, gradients on or off.

A packed copy knows nothing of tangents, so it must not be read where a weight has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from tests.support.helpers import ISAS
from tests.support.mlps import INPUT as X
from tests.support.mlps import KINDS, by_hand, packed_mlp
from torch import Tensor

import torchweld as tw
from torchweld.core.blocks import parse_spec
from torchweld.ops.backends import BACKENDS, Form

pytestmark = pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine")

MODES: dict[str, Callable[[], torch.no_grad | torch.enable_grad]] = {
    "gradients off": torch.no_grad,
    "gradients on": torch.enable_grad,
}


@contextmanager
def dual_weights(mlp: tw.FusedMLP, *, only: int | None = None) -> Iterator[None]:
    """The parameters themselves have tangents while this lasts; `only` one of them."""
    owners = [
        (module, name, p)
        for module in mlp.modules()
        for name, p in module._parameters.items()
        if p is not None
    ]
    with fwAD.dual_level():
        for i, (module, name, before) in enumerate(owners):
            if only in (None, i):
                weight = before.detach()
                tangent = torch.randn(weight.shape, generator=torch.Generator().manual_seed(i))
                module._parameters[name] = fwAD.make_dual(weight, tangent.to(weight.dtype))
        try:
            yield
        finally:
            for module, name, before in owners:
                module._parameters[name] = before


def same_tangent(y: Tensor, expected: Tensor) -> None:
    got, right = fwAD.unpack_dual(y), fwAD.unpack_dual(expected)
    assert right.tangent is not None
    assert got.tangent is not None, "the tangent was lost"
    torch.testing.assert_close(got.primal, right.primal, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.tangent, right.tangent, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
def test_tangents_of_all_weights(kind: str, mode: str, training: bool) -> None:
    mlp = packed_mlp(kind).train(training)
    with MODES[mode](), dual_weights(mlp):
        same_tangent(mlp(X), by_hand(mlp, X))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("only", range(4))
def test_the_tangent_of_one_tensor_alone(only: int, packing: bool) -> None:
    mlp = tw.FusedMLP((31, 64, 16), packing=packing).eval()
    with torch.no_grad():
        before = mlp(X)
        with dual_weights(mlp, only=only):
            same_tangent(mlp(X), by_hand(mlp, X))
        assert torch.equal(mlp(X), before)


def test_without_gradients_by_functional_call() -> None:
    """`torch.func` code passes parameters so: the module's own have no tangent."""
    mlp = packed_mlp("two")
    with torch.no_grad(), fwAD.dual_level():
        params = {
            name: fwAD.make_dual(p.detach(), torch.ones_like(p))
            for name, p in mlp.named_parameters()
        }
        y = torch.func.functional_call(mlp, params, (X,))
        same_tangent(y, plain(params))


def plain(own: dict[str, Tensor]) -> Tensor:
    h = torch.nn.functional.gelu(X @ own["up.weight"].t() + own["up.bias"])
    return h @ own["down.weight"].t() + own["down.bias"]


@pytest.mark.parametrize("mode", MODES)
def test_jvp_of_the_weights(mode: str) -> None:
    mlp = packed_mlp("two")
    params = {name: p.detach() for name, p in mlp.named_parameters()}
    directions = {name: torch.randn_like(p) for name, p in params.items()}

    def run(own: dict[str, Tensor]) -> Tensor:
        y: Tensor = torch.func.functional_call(mlp, own, (X,))
        return y

    with MODES[mode]():
        got = torch.func.jvp(run, (params,), (directions,))
        expected = torch.func.jvp(plain, (params,), (directions,))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_tangent_of_a_view_of_the_weight() -> None:
    """The tangent belongs to the tensor of which the weight is a view."""
    mlp = packed_mlp("one layer")
    layer = mlp.layers[0]
    before = layer._parameters["weight"]
    whole = torch.randn(20, 31)
    with torch.no_grad(), fwAD.dual_level():
        dual = fwAD.make_dual(whole, torch.randn(20, 31))
        layer._parameters["weight"] = dual[2:18]
        same_tangent(mlp(X), by_hand(mlp, X))
        layer._parameters["weight"] = before


def test_in_inference_mode_it_is_what_eager_gives() -> None:
    mlp = packed_mlp("two")
    with fwAD.dual_level(), torch.inference_mode():
        for module in (mlp.up, mlp.down):
            weight = module.weight.detach()
            module._parameters["weight"] = fwAD.make_dual(weight, torch.ones_like(weight))
        got, expected = fwAD.unpack_dual(mlp(X)), fwAD.unpack_dual(by_hand(mlp, X))
        torch.testing.assert_close(got.primal, expected.primal)
        assert (got.tangent is None) == (expected.tangent is None)
        if expected.tangent is not None:
            torch.testing.assert_close(got.tangent, expected.tangent, rtol=1e-4, atol=1e-4)


def tensors_and_tangents(dual: int) -> list[Tensor]:
    tensors = [torch.randn(64, 31), torch.randn(64), torch.randn(16, 64), torch.randn(16)]
    return [
        fwAD.make_dual(t, torch.randn_like(t)) if i == dual else t for i, t in enumerate(tensors)
    ]


@pytest.mark.parametrize("dual", range(4))
def test_the_ops_themselves(dual: int) -> None:
    spec, ops = "gelu/b;identity/b", torch.ops.torchweld
    with torch.no_grad(), fwAD.dual_level():
        tensors = tensors_and_tangents(dual)
        h = torch.nn.functional.gelu(X @ tensors[0].t() + tensors[1])
        expected = h @ tensors[2].t() + tensors[3]
        same_tangent(ops.chain(X, tensors, spec), expected)
        pack = tw.ops.compiled.Pack()
        same_tangent(ops.chain_kept(X, tensors, spec, pack.number), expected)
        if dual < 2:
            same_tangent(ops.group(X, tensors[:2], "gelu/b")[0], h)


@pytest.mark.parametrize("dual", range(4))
def test_backends_that_keep_a_copy(dual: int) -> None:
    spec = "gelu/b;identity/b"
    with torch.no_grad(), fwAD.dual_level():
        tensors = tensors_and_tangents(dual)
        block = Form.of("chain", parse_spec(spec), tensors)
        expected = torch.ops.torchweld.chain(X, tensors, spec)
        for backend in BACKENDS:
            mode = backend.abilities.packed_mode
            if mode is not None and not backend.unavailable():
                y = backend.build(block, tensors, mode.name)(X)
                assert isinstance(y, Tensor)
                same_tangent(y, expected)
