"""FusedMLP: ordinary Linears inside, one op outside, and the user's changes respected."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.helpers import DTYPES, ISAS, all_ok, kernel_runs, random_tensors
from tests.support.mlps import MLP_IDS, MLP_SHAPES, by_hand, same_as_by_hand
from torch import Tensor, nn

import torchweld as tw
from torchweld.core.blocks import format_spec
from torchweld.numerics.numerical_rule import check_block

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]


# ---- what it is made of ----


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        (MLP_SHAPES[0], ["layers.0"]),
        (MLP_SHAPES[1], ["up", "down"]),
        (MLP_SHAPES[3], ["gate", "up", "down"]),
        (MLP_SHAPES[5], ["layers.0", "layers.1", "layers.2", "layers.3"]),
    ],
)
def test_children_are_plain_linears_with_the_usual_names(
    shape: dict[str, Any], names: list[str]
) -> None:
    mlp = tw.FusedMLP(**shape)
    assert [n for n, child in mlp.named_modules() if type(child) is nn.Linear] == names
    parts = ["weight", "bias"] if shape.get("bias", True) else ["weight"]
    assert list(mlp.state_dict()) == [f"{name}.{part}" for name in names for part in parts]


def test_initialisation_is_linears_own() -> None:
    torch.manual_seed(3)
    mlp = tw.FusedMLP((7, 9, 5), gated=True)
    torch.manual_seed(3)
    expected = [nn.Linear(7, 9), nn.Linear(7, 9), nn.Linear(9, 5)]
    for child, other in zip(mlp.children(), expected, strict=True):
        assert isinstance(child, nn.Linear)
        assert torch.equal(child.weight, other.weight)
        assert torch.equal(child.bias, other.bias)


def test_checkpoints_are_anyones() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(7, 9), nn.Linear(9, 5)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y

    plain, mlp, x = Plain(), tw.FusedMLP((7, 9, 5)), torch.randn(4, 7)
    mlp.load_state_dict(plain.state_dict())
    with kernel_runs("natural"):
        torch.testing.assert_close(mlp(x), plain(x))
    Plain().load_state_dict(mlp.state_dict())


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_and_device_reach_the_parameters(dtype: torch.dtype) -> None:
    mlp = tw.FusedMLP((7, 9, 5), dtype=dtype)
    assert {p.dtype for p in mlp.parameters()} == {dtype}
    with kernel_runs("natural"):
        assert mlp(torch.randn(4, 7).to(dtype)).dtype == dtype
    empty = tw.FusedMLP((7, 9, 5), dtype=dtype, device="meta")
    assert empty(torch.empty(4, 7, dtype=dtype, device="meta")).shape == (4, 5)
    real = empty.to_empty(device="cpu")
    real.load_state_dict(mlp.state_dict())
    with kernel_runs("natural"):
        real(torch.randn(4, 7).to(dtype))


def test_repr_says_what_it_computes() -> None:
    text = repr(
        tw.FusedMLP((7, 9, 5), "elu:0.5", gated=True, dropout=0.1, output_activation="tanh")
    )
    for part in ("elu:0.5", "output_activation='tanh'", "gated=True", "dropout=0.1", "(gate): Lin"):
        assert part in text


# ---- forward ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", MLP_SHAPES, ids=MLP_IDS)
def test_forward_obeys_the_rule(shape: dict[str, Any], dtype: torch.dtype) -> None:
    mlp = tw.FusedMLP(**shape, dtype=dtype)
    tensors = random_tensors((31, *shape["sizes"][1:]), mlp._forms(), dtype)
    with torch.no_grad():
        for parameter, value in zip(mlp.parameters(), tensors, strict=True):
            parameter.copy_(value)
    x = torch.randn(3, 4, 31).to(dtype)
    for mode, weights in (("train", "natural"), ("eval", "packed")):
        getattr(mlp, mode)()
        with kernel_runs(weights):
            found = check_block(lambda x, _: mlp(x), x, tensors, mlp._forms())
        all_ok(found)
    assert mlp._spec == format_spec(mlp._forms())


@pytest.mark.parametrize("shape", MLP_SHAPES, ids=MLP_IDS)
def test_which_weights_are_read_when(shape: dict[str, Any]) -> None:
    """Packed only where nobody could differentiate: eval, and gradients off."""
    mlp = tw.FusedMLP(**shape)
    x = torch.randn(5, 31)
    same_as_by_hand(mlp, x, "natural")
    mlp.eval()
    same_as_by_hand(mlp, x, "natural")
    with torch.no_grad():
        same_as_by_hand(mlp, x, "packed")
        mlp.train()
        same_as_by_hand(mlp, x, "natural")
    mlp.eval()
    with torch.inference_mode():
        same_as_by_hand(mlp, x, "packed")
    same_as_by_hand(mlp, x, "natural")


@pytest.mark.parametrize("shape", MLP_SHAPES, ids=MLP_IDS)
def test_gradients_are_eagers(shape: dict[str, Any]) -> None:
    mlp = tw.FusedMLP(**shape, dtype=torch.float64)
    x = torch.randn(2, 3, 31, dtype=torch.float64, requires_grad=True)
    inputs = [x, *mlp.parameters()]
    with kernel_runs("natural"):
        y = mlp(x)
    g = torch.randn_like(y)
    expected = torch.autograd.grad(by_hand(mlp, x), inputs, g)
    for got, wanted in zip(torch.autograd.grad(y, inputs, g), expected, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("make", [lambda x: x.t(), lambda x: x[:, None, ::2], lambda x: x[0]])
def test_any_input(make: Callable[[Tensor], Tensor]) -> None:
    x = make(torch.randn(6, 6))
    mlp = tw.FusedMLP((x.shape[-1], 9, 5)).eval()
    same_as_by_hand(mlp, x, "natural")
    with torch.no_grad():
        same_as_by_hand(mlp, x, "packed")
        assert mlp(x[..., :0, :] if x.dim() > 1 else x[None][:0]).shape[-1] == 5


def test_autocast() -> None:
    mlp = tw.FusedMLP((31, 64, 16), gated=True, activation="silu").eval()
    x = torch.randn(5, 31)
    low = copy.deepcopy(mlp).bfloat16()
    for grad in (False, True):
        autocast = torch.autocast("cpu", dtype=torch.bfloat16)
        with torch.set_grad_enabled(grad), kernel_runs("natural"), autocast:
            y = mlp(x)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y, low(x.bfloat16()))


# ---- dropout ----


@pytest.mark.parametrize("shape", MLP_SHAPES[1:], ids=MLP_IDS[1:])
def test_dropout_falls_between_the_layers_in_training(shape: dict[str, Any]) -> None:
    """The same random numbers as by hand, so the same elements are dropped."""
    mlp = tw.FusedMLP(**shape, dropout=0.4)
    x = torch.randn(5, 31)
    torch.manual_seed(5)
    with kernel_runs("natural"):
        y = mlp(x)
    torch.manual_seed(5)
    torch.testing.assert_close(y, by_hand(mlp, x))
    assert not torch.allclose(y, by_hand(mlp.eval(), x))
    same_as_by_hand(mlp, x, "natural")
    with torch.no_grad():
        same_as_by_hand(mlp, x, "packed")


def test_dropout_has_gradients() -> None:
    mlp = tw.FusedMLP((7, 9, 5), dropout=0.5, dtype=torch.float64)
    x = torch.randn(6, 7, dtype=torch.float64, requires_grad=True)
    grads = []
    for run in (mlp, lambda x: by_hand(mlp, x)):
        torch.manual_seed(7)
        grads.append(torch.autograd.grad(run(x).sum(), [x, *mlp.parameters()]))
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected)


def test_dropout_is_drawn_without_gradients_too() -> None:
    mlp, x = tw.FusedMLP((7, 9, 5), dropout=0.5), torch.randn(6, 7)
    torch.manual_seed(7)
    with torch.no_grad():
        y = mlp(x)
    torch.manual_seed(7)
    torch.testing.assert_close(y, by_hand(mlp, x))


def test_dropout_set_later_counts_from_the_next_call_on() -> None:
    mlp, x = tw.FusedMLP((7, 9, 9, 5)), torch.randn(6, 7)
    for dropout in (0.5, 0.25, 0.0):
        mlp.dropout = dropout
        drop = f"/drop:{dropout}" * (dropout > 0)
        assert mlp.__dict__["_spec"] == "gelu/b;gelu/b;identity/b"
        assert mlp.__dict__["_training_spec"] == f"gelu/b{drop};gelu/b{drop};identity/b"
        torch.manual_seed(7)
        y = mlp(x)
        torch.manual_seed(7)
        torch.testing.assert_close(y, by_hand(mlp, x))


# ---- what is kept for the backward ----


def kept_bytes(run: Callable[[], Tensor], *given: Tensor) -> int:
    """Bytes that autograd keeps of a call, without the tensors that it was given."""
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        found[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = run()
    for tensor in (*given, y):
        found.pop(tensor.data_ptr(), None)
    return sum(found.values())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gated", [False, True])
def test_recompute_says_what_is_kept(gated: bool, training: bool) -> None:
    mlp = tw.FusedMLP((16, 64, 16), gated=gated, recompute=True).train(training)
    x = torch.randn(8, 16, requires_grad=True)
    given = (x, *mlp.parameters())
    assert kept_bytes(lambda: mlp(x), *given) == 8  # a checksum
    mlp.recompute = False
    assert kept_bytes(lambda: mlp(x), *given) == 4 * 8 * 64 * (2 if gated else 1)


@pytest.mark.parametrize("recompute", [True, False, None])
@pytest.mark.parametrize("shape", MLP_SHAPES, ids=MLP_IDS)
def test_gradients_do_not_depend_on_what_is_kept(
    shape: dict[str, Any], recompute: bool | None
) -> None:
    mlp = tw.FusedMLP(**shape, recompute=recompute, dropout=0.3, dtype=torch.float64)
    x = torch.randn(5, 31, dtype=torch.float64, requires_grad=True)
    found = []
    for run in (mlp, lambda x: by_hand(mlp, x)):
        torch.manual_seed(5)
        y = run(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *mlp.parameters()])])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


def test_recompute_is_checked_shown_and_copied() -> None:
    mlp = tw.FusedMLP((3, 4, 3))
    assert mlp.recompute is None
    assert "recompute" not in repr(mlp)
    mlp.recompute = True
    assert "recompute=True" in repr(mlp)
    assert copy.deepcopy(mlp).recompute is True
    with pytest.raises(tw.TorchweldError, match="recompute is 1; expected True, False or None"):
        mlp.recompute = 1  # type: ignore[assignment]
    with pytest.raises(tw.TorchweldError, match="recompute is 'yes'"):
        tw.FusedMLP((3, 4, 3), recompute="yes")  # type: ignore[arg-type]
    linears = [nn.Linear(3, 4), nn.Linear(4, 3)]
    assert tw.FusedMLP.from_linears(linears, recompute=False).recompute is False


def test_pickles_of_before_have_no_recompute() -> None:
    mlp = tw.FusedMLP((3, 4, 3), dropout=0.5)
    state = mlp.__getstate__()
    for name in ("recompute", "_training_spec"):
        del state[name]
    state["_specs"] = ["gelu/b", "identity/b"]
    old: tw.FusedMLP = tw.FusedMLP.__new__(tw.FusedMLP)
    old.__setstate__(state)
    assert old.recompute is None
    torch.manual_seed(1)
    y = old(torch.ones(2, 3))
    torch.manual_seed(1)
    torch.testing.assert_close(y, by_hand(mlp, torch.ones(2, 3)))


@pytest.mark.parametrize("recompute", [True, False, None])
def test_the_function_takes_it_too(recompute: bool | None) -> None:
    layers = [
        tw.Layer(torch.randn(64, 16, requires_grad=True), activation="gelu"),
        tw.Layer(torch.randn(16, 64, requires_grad=True)),
    ]
    x = torch.randn(4, 16)
    kept = kept_bytes(lambda: tw.mlp(x, layers, recompute), x, *(layer.weight for layer in layers))
    assert recompute is None or kept == (8 if recompute else 4 * 4 * 64)
    with pytest.raises(tw.TorchweldError, match="mlp: recompute is 0"):
        tw.mlp(x, layers, recompute=0)  # type: ignore[arg-type]


# ---- existing Linears ----


@pytest.mark.parametrize("gated", [False, True])
def test_from_linears_shares_the_very_modules(gated: bool) -> None:
    linears = [nn.Linear(7, 9), nn.Linear(7, 9), nn.Linear(9, 5)][0 if gated else 1 :]
    mlp = tw.FusedMLP.from_linears(linears, "silu", gated=gated, output_activation="tanh")
    assert all(a is b for a, b in zip(mlp.children(), linears, strict=True))
    same_as_by_hand(mlp, torch.randn(3, 7), "natural")
    mlp.eval()
    with torch.no_grad():
        same_as_by_hand(mlp, torch.randn(3, 7), "packed")
        linears[-1].weight.mul_(2.0)
        same_as_by_hand(mlp, torch.randn(3, 7), "packed")


def test_from_linears_of_one_and_of_many_mixed_biases() -> None:
    linears = [nn.Linear(7, 9), nn.Linear(9, 8, bias=False), nn.Linear(8, 5)]
    for count in (1, 3):
        mlp = tw.FusedMLP.from_linears(linears[:count], "relu").eval()
        with torch.no_grad():
            same_as_by_hand(mlp, torch.randn(3, 7), "packed")


# ---- errors ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": ()}, r"sizes=\[\]; expected two or more"),
        ({"sizes": (5,)}, r"sizes=\[5\]; expected two or more whole numbers of at least 1"),
        ({"sizes": (5, 0)}, r"sizes=\[5, 0\]; expected"),
        ({"sizes": (5, -3, 2)}, r"sizes=\[5, -3, 2\]"),
        ({"sizes": (5, 2.5)}, r"sizes=\[5, 2.5\]"),
        ({"sizes": (5, 6), "gated": True}, r"sizes=\[5, 6\] with gated=True.*exactly three"),
        ({"sizes": (5, 6, 7, 8), "gated": True}, r"gated=True.*exactly three"),
        ({"sizes": (5, 6), "activation": "swish"}, r"'swish'; there are: identity relu"),
        ({"sizes": (5, 6), "output_activation": "elu:a"}, r"elu takes 1 number"),
        ({"sizes": (5, 6), "dropout": 1.0}, r"dropout=1.0; allowed is 0 ≤ dropout < 1"),
        ({"sizes": (5, 6), "dropout": -0.1}, r"dropout=-0.1"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(tw.TorchweldError, match=message):
        tw.FusedMLP(**arguments)


@pytest.mark.parametrize(
    ("linears", "gated", "message"),
    [
        ([], False, "expected two or more"),
        ([nn.Linear(3, 4), nn.ReLU()], False, r"linears\[1\] is a ReLU; expected nn.Linear"),
        (
            [nn.Linear(3, 4), nn.Linear(5, 6)],
            False,
            "Linear 0 has 4 outputs but the next one takes 5",
        ),
        ([nn.Linear(3, 4)] * 2, True, r"gated takes 3 Linears \(gate, up, down\); 2 were given"),
        (
            [nn.Linear(3, 5), nn.Linear(3, 4), nn.Linear(4, 2)],
            True,
            r"gate has weight \[5, 3\], up \[4, 3\]; they must be equal",
        ),
        (
            [nn.Linear(3, 4), nn.Linear(3, 4, bias=False), nn.Linear(4, 2)],
            True,
            "gate and up must both have a bias, or neither",
        ),
    ],
)
def test_linears_that_do_not_fit_are_named(
    linears: list[nn.Linear], gated: bool, message: str
) -> None:
    with pytest.raises(tw.TorchweldError, match=message):
        tw.FusedMLP.from_linears(linears, gated=gated)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(2, 8), "weight takes 7 features, but x has 8"),
        (torch.randn(2, 7).double(), "x is float64 but"),
        (torch.randn(2, 7).half(), "x is float16 but"),
        (torch.randn(2, 7).int(), "x is int32"),
        (torch.randn(()), "x is a scalar"),
    ],
)
def test_wrong_inputs_are_named(x: Tensor, message: str, grad: bool) -> None:
    """The same words whether the packed copy or the parameters would have been read."""
    mlp = tw.FusedMLP((7, 9, 5)).eval()
    refused = pytest.raises(ValueError, match=message)
    with torch.set_grad_enabled(grad), kernel_runs(calls=0), refused:
        mlp(x)


def test_what_is_not_a_tensor_is_refused() -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        tw.FusedMLP((7, 9, 5))([1.0] * 7)


# ---- copies ----


def through_torch_save(mlp: tw.FusedMLP) -> tw.FusedMLP:
    buffer = io.BytesIO()
    torch.save(mlp, buffer)
    buffer.seek(0)
    loaded: tw.FusedMLP = torch.load(buffer, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda mlp: pickle.loads(pickle.dumps(mlp)), through_torch_save],
    ids=["deepcopy", "pickle", "torch.save"],
)
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("shape", [MLP_SHAPES[3], MLP_SHAPES[5]], ids=["gated", "deep"])
def test_copies_compute_the_same_and_go_their_own_way(
    shape: dict[str, Any], packing: bool, copied: Callable[[tw.FusedMLP], tw.FusedMLP]
) -> None:
    weights = "packed" if packing else "natural"
    mlp, x = tw.FusedMLP(**shape, packing=packing).eval(), torch.randn(4, 31)
    with torch.no_grad():
        before = mlp(x)  # the copy is made of a module that has packed already
        other = copied(mlp)
        assert other.packed_bytes == 0
        with kernel_runs(weights):
            assert torch.equal(other(x), before)
        for parameter in other.parameters():
            parameter.mul_(1.5)
        same_as_by_hand(other, x, weights)
        with kernel_runs(weights):
            assert torch.equal(mlp(x), before)
    assert repr(other) == repr(mlp)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_casting_there_and_back(dtype: torch.dtype) -> None:
    mlp, x = tw.FusedMLP((31, 64, 16)).eval(), torch.randn(4, 31)
    with torch.no_grad():
        mlp(x)
        mlp.to(dtype)
        same_as_by_hand(mlp, x.to(dtype), "packed")
        mlp.float()
        same_as_by_hand(mlp, x, "packed")
