"""Stale weights are never used: every way of changing parameters.

Each change is made between two calls in inference. The second call must compute with the new
weights, from a packed copy again, in every shape of module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.support.helpers import ISAS, kernel_runs
from tests.support.mlps import INPUT as X
from tests.support.mlps import (
    KINDS,
    by_hand,
    in_place,
    packed_mlp,
    result,
    uses_the_new_weights,
)
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

import torchweld as tw

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture(params=list(KINDS))
def mlp(request: pytest.FixtureRequest) -> tw.FusedMLP:
    return packed_mlp(request.param)


# ---- steps of optimizers ----

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "sgd loop": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.5, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.5, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.05),
}


@pytest.mark.parametrize("through_train", [False, True], ids=["in eval", "through train"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_steps(mlp: tw.FusedMLP, name: str, through_train: bool) -> None:
    optimizer = OPTIMIZERS[name](list(mlp.parameters()))
    for _ in range(2):
        before = result(mlp)
        mlp.train(through_train)
        with kernel_runs("natural"):
            loss = mlp(X).square().sum()
        loss.backward()
        optimizer.step()
        mlp.eval()
        uses_the_new_weights(mlp, before)


@pytest.mark.parametrize("name", ["sgd fused", "adamw fused"])
def test_fused_steps_on_one_tensor_alone(mlp: tw.FusedMLP, name: str) -> None:
    """No version counter moves, and all other tensors stay as they are."""
    for parameter in mlp.parameters():
        before = result(mlp)
        optimizer = OPTIMIZERS[name]([parameter])
        mlp(X).square().sum().backward()
        optimizer.step()
        mlp.zero_grad()
        uses_the_new_weights(mlp, before)


# ---- other changes ----


def load_copying(mlp: tw.FusedMLP) -> None:
    mlp.load_state_dict({name: value + 0.1 for name, value in mlp.state_dict().items()})


def load_assigning(mlp: tw.FusedMLP) -> None:
    state = {name: value + 0.1 for name, value in mlp.state_dict().items()}
    mlp.load_state_dict(state, assign=True)


def in_place_of_the_first(mlp: tw.FusedMLP) -> None:
    with torch.no_grad():
        next(mlp.parameters()).add_(0.1)


def one_element(mlp: tw.FusedMLP) -> None:
    with torch.no_grad():
        next(mlp.parameters())[3, 5] += 2.0


def copied_into(mlp: tw.FusedMLP) -> None:
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.copy_(torch.randn_like(parameter))


def initialised(mlp: tw.FusedMLP) -> None:
    for parameter in mlp.parameters():
        nn.init.normal_(parameter, std=0.5)


def reset(mlp: tw.FusedMLP) -> None:
    for module in mlp.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()


def data_edited(mlp: tw.FusedMLP) -> None:
    for parameter in mlp.parameters():
        parameter.data.add_(0.1)


def data_edited_in_one(mlp: tw.FusedMLP) -> None:
    list(mlp.parameters())[-1].data.mul_(3.0)


def half_edited_through_data(mlp: tw.FusedMLP) -> None:
    weight = next(mlp.parameters())
    weight.data[: weight.shape[0] // 2].add_(0.3)


def right_half_edited_through_data(mlp: tw.FusedMLP) -> None:
    weight = next(mlp.parameters())
    weight.data[:, weight.shape[1] // 2 :].add_(0.3)


def data_replaced(mlp: tw.FusedMLP) -> None:
    for parameter in mlp.parameters():
        parameter.data = torch.randn_like(parameter.data)


def data_turned(mlp: tw.FusedMLP) -> None:
    """The same storage and contents in another order."""
    weight = next(mlp.parameters())
    weight.data = weight.data.flatten().view(weight.shape[1], weight.shape[0]).t()


def through_numpy(mlp: tw.FusedMLP) -> None:
    for parameter in mlp.parameters():
        parameter.detach().numpy()[...] += 0.1


def through_dlpack(mlp: tw.FusedMLP) -> None:
    for parameter in mlp.parameters():
        from_dlpack(parameter.detach()).add_(0.1)


def through_storage(mlp: tw.FusedMLP) -> None:
    for parameter in mlp.parameters():
        parameter.untyped_storage().copy_((parameter.detach() * 2).untyped_storage())


def there_and_back(mlp: tw.FusedMLP) -> None:
    mlp.double()
    in_place(mlp)
    mlp.float()


def new_parameters(mlp: tw.FusedMLP) -> None:
    for module in mlp.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(torch.randn_like(module.weight))


def new_children(mlp: tw.FusedMLP) -> None:
    holder = mlp.layers if "layers" in mlp._modules else mlp
    for name, child in list(holder.named_children()):
        assert isinstance(child, nn.Linear)
        setattr(
            holder, name, nn.Linear(child.in_features, child.out_features, child.bias is not None)
        )


def swapped(mlp: tw.FusedMLP) -> None:
    """Another module's tensors, of the same shapes."""
    other = copy.deepcopy(mlp)
    in_place(other)
    for mine, its in zip(mlp.parameters(), other.parameters(), strict=True):
        mine.data, its.data = its.data, mine.data


def in_inference_mode(mlp: tw.FusedMLP) -> None:
    with torch.inference_mode():
        in_place(mlp)


CHANGES = [
    load_copying,
    load_assigning,
    in_place,
    in_place_of_the_first,
    one_element,
    copied_into,
    initialised,
    reset,
    data_edited,
    data_edited_in_one,
    half_edited_through_data,
    right_half_edited_through_data,
    data_replaced,
    data_turned,
    through_numpy,
    through_dlpack,
    through_storage,
    there_and_back,
    new_parameters,
    new_children,
    swapped,
    in_inference_mode,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_stale_weights_are_never_used(
    mlp: tw.FusedMLP, change: Callable[[tw.FusedMLP], None]
) -> None:
    before = result(mlp)
    change(mlp)
    uses_the_new_weights(mlp, before)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_nor_when_the_old_memory_is_handed_out_again(
    mlp: tw.FusedMLP, change: Callable[[tw.FusedMLP], None]
) -> None:
    """The allocator often gives a freed tensor's place, and version 0, to its successor."""
    for _ in range(10):
        before = result(mlp)
        change(mlp)
        with torch.no_grad():
            expected = by_hand(mlp, X)
            if (expected - before).abs().max() > 1e-3:
                close = 1e-5 * expected.abs().max().item()  # some grow with every change
                torch.testing.assert_close(mlp(X), expected, rtol=0, atol=close)


def test_the_original_dtype_with_other_numbers_after_a_cast(mlp: tw.FusedMLP) -> None:
    """float → bfloat16 → float loses digits: the copy of the first float weights is not used."""
    before = result(mlp)
    mlp.bfloat16().float()
    with torch.no_grad():
        expected = by_hand(mlp, X)
        assert not torch.equal(expected, before)
        with kernel_runs("packed"):
            y = mlp(X)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_inference_tensors_as_parameters(kind: str) -> None:
    """A module made or moved in inference mode has parameters without a version counter."""
    with torch.inference_mode():
        mlp = KINDS[kind]().eval()
        assert next(mlp.parameters()).is_inference()
        before = result(mlp)
        for parameter in mlp.parameters():
            parameter.mul_(1.5)
        uses_the_new_weights(mlp, before)
        before = result(mlp)
        mlp.double().float()
        mlp.load_state_dict({name: value + 0.1 for name, value in mlp.state_dict().items()})
        uses_the_new_weights(mlp, before)


def test_moved_inside_inference_mode(mlp: tw.FusedMLP) -> None:
    before = result(mlp)
    with torch.inference_mode():
        mlp.double()
        for parameter in mlp.parameters():
            parameter.add_(0.1)
        mlp.float()
    uses_the_new_weights(mlp, before)


def test_functional_call_neither_uses_nor_spoils_the_copy(mlp: tw.FusedMLP) -> None:
    before = result(mlp)
    other = copy.deepcopy(mlp)
    in_place(other)
    with torch.no_grad():
        y = torch.func.functional_call(mlp, dict(other.named_parameters()), (X,))
        torch.testing.assert_close(y, by_hand(other, X))
        assert not torch.allclose(y, before)
        with kernel_runs("packed"):
            assert torch.equal(mlp(X), before)


def test_parameters_shared_by_two_modules() -> None:
    linears = [nn.Linear(31, 64), nn.Linear(64, 16)]
    one, other = (tw.FusedMLP.from_linears(linears).eval() for _ in range(2))
    before = result(one), result(other)
    in_place(one)
    uses_the_new_weights(one, before[0])
    uses_the_new_weights(other, before[1])


def test_views_of_one_storage() -> None:
    """A whole model flattened into one tensor, as optimizers and FSDP do."""
    mlp = tw.FusedMLP((31, 64, 16)).eval()
    flat = torch.cat([p.detach().flatten() for p in mlp.parameters()])
    start = 0
    for parameter in mlp.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    before = result(mlp)
    flat.mul_(1.5)
    uses_the_new_weights(mlp, before)


@pytest.mark.parametrize("along", ["rows", "columns"])
@pytest.mark.parametrize(
    ("K", "N"),
    [(64, 64), (64, 15), (64, 960), (60, 64), (960, 64), (31, 33), (120, 120), (768, 16)],
)
def test_a_block_of_an_eighth_is_met_wherever_it_lies(K: int, N: int, along: str) -> None:
    """Edited through `.data`, where only the sample of the contents can tell."""
    mlp, x = tw.FusedMLP((K, N)).eval(), torch.randn(3, K)
    weight = mlp.get_parameter("layers.0.weight")
    dim = 0 if along == "rows" else 1
    for block in weight.data.chunk(8, dim):
        with torch.no_grad():
            mlp(x)
            block.add_(1.0)
            with kernel_runs("packed"):
                torch.testing.assert_close(mlp(x), by_hand(mlp, x), rtol=1e-4, atol=1e-4)
