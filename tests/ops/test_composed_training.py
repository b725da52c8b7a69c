"""The ops of training in plain PyTorch, without kernels, give what the compiled ones give."""

from __future__ import annotations

import pytest
import torch
from tests.support.helpers import CHAIN_IDS, CHAINS, ISAS, group_tensors, tensors_for
from torch import Tensor

from torchweld.core.blocks import LayerForm, format_spec, with_dropout
from torchweld.core.errors import BlockError
from torchweld.ops import composed_training

pytestmark = pytest.mark.skipif(not ISAS, reason="nothing to compare with on this machine")
OPS = torch.ops.torchweld


def close(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)


def dropping(forms: tuple[LayerForm, ...]) -> str:
    """The spec with dropout on every layer."""
    return format_spec(with_dropout(forms, [0.25 + 0.1 * i for i in range(len(forms))]))


@pytest.mark.parametrize("forms", CHAINS, ids=CHAIN_IDS)
def test_a_chain_in_training(forms: tuple[LayerForm, ...]) -> None:
    x, tensors = torch.randn(7, 5, dtype=torch.float64, requires_grad=True), tensors_for(forms)
    found = []
    for run in (composed_training.chain_training, OPS.chain_training):
        torch.manual_seed(3)
        y = run(x, tensors, dropping(forms), None)
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *tensors])])
    close(*found)


@pytest.mark.parametrize("features", [1, 7, 8, 385])
def test_masks_have_the_same_bits(features: int) -> None:
    like, masks = torch.randn(3, 2, 4), []
    for run in (composed_training.dropout_mask, OPS.dropout_mask):
        torch.manual_seed(3)
        masks.append(run(like, features, 0.3))
    assert masks[0].dtype == torch.uint8
    assert torch.equal(*masks)


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("forms", CHAINS, ids=CHAIN_IDS)
def test_the_parts_of_a_chain(forms: tuple[LayerForm, ...], saves: bool) -> None:
    """Forward with given masks, and from what it saved the gradients that are asked for."""
    spec, x = dropping(forms), torch.randn(2, 3, 5, dtype=torch.float64)
    tensors = [t.detach() for t in tensors_for(forms)]
    widths = [*[4, 6, 3][: len(forms) - 1], 3]
    masks = [OPS.dropout_mask(x, width, 0.4) for width in widths]
    y, *saved = composed_training.chain_saving(x, tensors, masks, spec, saves)
    expected = OPS.chain_saving(x, tensors, masks, spec, saves)
    assert [t.dtype for t in (y, *saved)] == [t.dtype for t in expected]
    if saves:
        close([y, *saved], expected)
    else:  # what follows is a checksum, which only kernels take
        close([y], expected[:1])
    grad = torch.randn_like(y)
    for first in range(2):  # every other gradient, from either end
        needed = [(first + i) % 2 == 0 for i in range(1 + len(tensors))]
        arguments = (grad, x, tensors, saved, masks, spec, needed)
        got = composed_training.chain_backward(*arguments)
        assert len(got) == sum(needed)
        close(got, OPS.chain_backward(*arguments))


def test_the_parts_of_a_group() -> None:
    forms = [LayerForm(bias=True), LayerForm(activation="gelu"), LayerForm(gate="first")]
    spec, x = format_spec(forms), torch.randn(7, 5, dtype=torch.float64)
    tensors = [t.detach() for t in group_tensors(forms, 5, torch.float64)]
    found = composed_training.group_saving(x, tensors, spec)
    close(found, OPS.group_saving(x, tensors, spec))
    grads, saved = [torch.randn_like(y) for y in found[:3]], found[3:]
    needed = [True, False, True, True, False]
    arguments = (grads, x, tensors, saved, spec, needed)
    close(composed_training.group_backward(*arguments), OPS.group_backward(*arguments))


def test_a_backward_can_be_differentiated() -> None:
    forms = CHAINS[0]
    x, tensors = torch.randn(4, 5, dtype=torch.float64, requires_grad=True), tensors_for(forms)
    grad = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def run(grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        needed = [True] * (1 + len(tensors))
        spec = format_spec(forms)
        return tuple(composed_training.chain_backward(grad, x, list(tensors), [], [], spec, needed))

    assert torch.autograd.gradcheck(run, (grad, x, *tensors))


def test_a_group_does_not_drop() -> None:
    with pytest.raises(BlockError, match="chain_training alone applies"):
        composed_training.group_saving(torch.randn(2, 3), [torch.randn(4, 3)], "gelu/drop:0.5")
