"""Numbers of the ways of a GPU, through the op and its autograd.

In Triton's interpreter, on CPU tensors; with `make gpu-test` on a GPU.
The numerical rule judges outputs and every gradient: all activations, gates and dtypes on one small
odd shape, and sizes, strides and tiles on few of them. Which kernels ran is asserted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from tests.support.gpu_device import needs_memory, on_real_gpu
from tests.support.helpers import CHAIN_IDS, CHAINS, all_within, random_tensors
from torch import Tensor

from torchweld.core.activations import ACTIVATIONS
from torchweld.core.blocks import GATES, LayerForm, format_spec, parse_spec
from torchweld.numerics.numerical_rule import check_block
from torchweld.ops.gpu.gpu_launches import forget, launched
from torchweld.ops.gpu.gpu_ways import WAYS
from torchweld.ops.gpu.kernel_tiles import Tile
from torchweld.ops.gpu.tile_tuning import forcing

pytestmark = pytest.mark.usefixtures("gpu")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def few_programs(rows: int, columns: int, depth: int) -> Tile:
    """The interpreter takes its time for each program, and has any tile.

    On a GPU the tile has to fit into the memory that a block shares.
    """
    if on_real_gpu():
        return Tile(rows=rows, columns=min(columns, 64), depth=min(depth, 32), stages=1)
    return Tile(rows=rows, columns=columns, depth=depth)


WHOLE = few_programs(32, 64, 64)
SMALL = Tile(rows=16, columns=16, depth=16)
FORWARD = {
    "pointwise": {"torchweld_pointwise"},
    "epilogue": {"torchweld_linear"},
    "narrow": {"torchweld_narrow"},
}
BACKWARD = {
    "pointwise": {"torchweld_pointwise_backward"},
    "epilogue": {"torchweld_linear_backward", "torchweld_pointwise_backward"},
    "narrow": {"torchweld_linear_backward", "torchweld_pointwise_backward"},
}


def judged(
    way: str,
    forms: Sequence[LayerForm],
    x: Tensor,
    tensors: Sequence[Tensor],
    *,
    recompute: bool = False,
) -> None:
    """Output and all gradients obey the rule."""
    spec = format_spec(forms)

    def candidate(x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        y: Tensor = torch.ops.torchweld.chain_way(x, list(tensors), spec, way, recompute)
        return y

    width = random_output(forms, tensors)
    grad = torch.randn(*x.shape[:-1], width).to(x.dtype)
    all_within(check_block(candidate, x, tensors, forms, grads=[grad]))


def random_output(forms: Sequence[LayerForm], tensors: Sequence[Tensor]) -> int:
    last = forms[-1]
    weight = tensors[-2 if last.bias else -1]
    rows = weight.shape[1 if last.transposed else 0]
    return rows if last.gate in ("none", "separate") else rows // 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("way", WAYS)
def test_every_activation_gate_and_dtype(way: str, gate: str, dtype: torch.dtype) -> None:
    for activation in ACTIVATIONS:
        flag = "" if gate == "none" else f"/{gate}"
        forms = parse_spec(f"{activation}/b{flag};{activation}/b")
        forget()
        with forcing(WHOLE):
            judged(way, forms, torch.randn(3, 7).to(dtype), random_tensors((7, 9, 5), forms, dtype))
        expected = FORWARD[way] | BACKWARD[way]
        if way == "pointwise" and activation == "identity" and gate == "none":
            expected = {"torchweld_pointwise_backward"}  # a plain Linear is torch's product
        if activation == "identity":
            expected -= {"torchweld_pointwise_backward"} if way != "pointwise" else set()
        assert set(launched()) == expected, activation


def test_parameters_of_activations() -> None:
    for text, way in itertools.product(
        ("leaky_relu:0.3", "elu:0.5", "softplus:3,2", "elu:2"), ("epilogue", "narrow", "pointwise")
    ):
        forms = parse_spec(f"{text}/b;{text}")
        with forcing(WHOLE):
            judged(way, forms, 2 * torch.randn(4, 6), random_tensors((6, 5, 3), forms))


@pytest.mark.parametrize("forms", CHAINS, ids=CHAIN_IDS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_every_layout_over_several_tiles(
    way: str, recompute: bool, forms: tuple[LayerForm, ...]
) -> None:
    sizes = (*(37, 21, 18, 33)[: len(forms)], 19)
    with forcing(SMALL):
        judged(
            way, forms, torch.randn(2, 17, 37), random_tensors(sizes, forms), recompute=recompute
        )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(1, (1, 1, 1)), (1, (16, 16, 16)), (5, (1, 40, 2)), (2, (70, 3, 65)), (33, (8, 256, 8))],
)
def test_sizes(way: str, rows: int, sizes: tuple[int, ...]) -> None:
    forms = parse_spec("gelu/b;identity/b")
    with forcing(few_programs(16, 64, 32)):
        judged(way, forms, torch.randn(rows, sizes[0]), random_tensors(sizes, forms))


@pytest.mark.parametrize("way", WAYS)
def test_wide_narrow_chains_in_parts(way: str) -> None:
    """Layers of 256 are computed some columns at a time, and put together."""
    forms = parse_spec("gelu/b;silu/b/separate;identity")
    with forcing(few_programs(16, 128, 128)):
        judged(way, forms, torch.randn(5, 200), random_tensors((200, 256, 130, 31), forms))


@pytest.mark.parametrize("way", WAYS)
def test_strides(way: str) -> None:
    """x, weights, biases and the output's gradient may have any strides."""
    spec = "silu/b/separate;identity/b"
    forms = parse_spec(spec)
    x = torch.randn(12, 5, 2).transpose(0, 1)[..., 0]
    tensors = [
        torch.randn(*t.shape, 2)[..., 1] if t.dim() == 1 else torch.randn(*t.shape[::-1]).t()
        for t in random_tensors((12, 9, 6), forms)
    ]
    with forcing(WHOLE):
        judged(way, forms, x, tensors)
        leaves = [t.detach().requires_grad_() for t in (x, *tensors)]
        y = torch.ops.torchweld.chain_way(leaves[0], leaves[1:], spec, way)
        whole = torch.autograd.grad(y.sum(), leaves, retain_graph=True)  # a gradient of stride 0
        plain = torch.autograd.grad(y, leaves, torch.ones_like(y))
    for a, b in zip(whole, plain, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("way", WAYS)
def test_no_rows(way: str) -> None:
    forms = parse_spec("gelu/b;identity/b")
    x = torch.randn(2, 0, 6, requires_grad=True)
    tensors = [t.requires_grad_() for t in random_tensors((6, 5, 3), forms)]
    y = torch.ops.torchweld.chain_way(x, tensors, "gelu/b;identity/b", way)
    assert y.shape == (2, 0, 3)
    for t, grad in zip((x, *tensors), torch.autograd.grad(y.sum(), [x, *tensors]), strict=True):
        assert grad.shape == t.shape
        assert not grad.any()
    assert launched() == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("activation", ["relu", "relu2", "hardswish", "leaky_relu"])
def test_gradients_are_selected_as_eager_selects_them(way: str, activation: str) -> None:
    """An infinite gradient of a value that was cut off is zero, not NaN."""
    spec = f"{activation};identity"
    x, up, down = torch.eye(2), torch.tensor([[-5.0, 2.0]]), torch.ones(1, 1)
    leaves = [t.requires_grad_() for t in (x, up, down)]
    grad = torch.tensor([[float("inf")], [1.0]])
    with forcing(WHOLE):
        ours = torch.ops.torchweld.chain_way(x, [up, down], spec, way)
        found = torch.autograd.grad(ours, x, grad)[0]
    act = ACTIVATIONS[activation]
    eager = act.apply(x @ up.t(), *act.defaults) @ down.t()
    torch.testing.assert_close(found, torch.autograd.grad(eager, leaves[0], grad)[0])


# cuBLAS takes no rows that lie so far apart; nor does eager there.
OWN_PRODUCTS = [way for way in WAYS if way != "pointwise" or not on_real_gpu()]


@pytest.mark.parametrize("way", OWN_PRODUCTS)
def test_offsets_beyond_two_billion_elements(way: str) -> None:
    """The pages between the rows are never touched."""
    far = 2**31 + 8
    needs_memory(2 * far + (1 << 30))
    x = torch.empty(far + 16, dtype=torch.float16).as_strided((2, 5), (far, 1))
    values = torch.randn(2, 5).half()
    x.copy_(values)
    forms = parse_spec("gelu/b;identity")
    tensors = random_tensors((5, 4, 3), forms, torch.float16)
    with forcing(WHOLE):
        far_y = torch.ops.torchweld.chain_way(x, tensors, "gelu/b;identity", way)
        near_y = torch.ops.torchweld.chain_way(values, tensors, "gelu/b;identity", way)
    torch.testing.assert_close(far_y, near_y, rtol=0, atol=0)


class FarMemory:
    """Tensors whose features lie `stride` elements apart, all in one piece of memory.

    The pages in between are never touched.
    """

    def __init__(self, features: int, stride: int) -> None:
        self._stride, self._next = stride, 0
        self._memory = torch.empty(features * stride, dtype=torch.float16)

    def like(self, values: Tensor) -> Tensor:
        """A copy; rows lie beside each other."""
        strides = (1, self._stride) if values.dim() == 2 else (self._stride,)
        storage, far = self._memory.untyped_storage(), self._memory.new_empty(0)
        far.set_(storage, self._next, values.shape, strides)
        self._next += values.shape[0] if values.dim() == 2 else 1
        return far.copy_(values)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "spec", ["gelu/b;identity/b", "gelu/b/t;tanh/b/t", "silu/b/separate;gelu/b"]
)
@pytest.mark.parametrize(
    ("features", "stride"),
    [(3, 2**30), (18, 2**27)],  # the second reaches 2^31 by one step of 16 in a product
)
def test_features_that_lie_two_billion_elements_apart(
    way: str, spec: str, features: int, stride: int
) -> None:
    """A stride of less than 2^31 is passed in 32 bits; what it is multiplied to is not."""
    forms = parse_spec(spec)
    tensors = random_tensors((features,) * 3, forms, torch.float16)
    near = [torch.randn(2, features).half(), *tensors]
    grad = torch.randn(2, features).half()
    needs_memory(2 * features * stride + (1 << 30))
    memory = FarMemory(features, stride)
    results = []
    for place in (torch.clone, memory.like):
        *leaves, above = (place(t) for t in (*near, grad))
        leaves = [t.requires_grad_() for t in leaves]
        with forcing(SMALL):
            y = torch.ops.torchweld.chain_way(leaves[0], leaves[1:], spec, way)
            results.append([y, *torch.autograd.grad(y, leaves, above)])
    for far, one in zip(*results, strict=True):
        torch.testing.assert_close(far, one, rtol=1e-3, atol=1e-3)
