"""Numbers of the way `cuda`, through the op and its autograd, with its kernels on the host.

The numerical rule judges outputs and every gradient: all activations, gates and dtypes on one small
odd shape, and sizes, strides and layouts on few of them. Which kernels ran is asserted.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.support.cuda_on_host import forget, launched
from tests.support.gpu_device import needs_memory, on_real_gpu, shared_memory
from tests.support.helpers import CHAIN_IDS, CHAINS, all_within, random_tensors
from torch import Tensor

from torchweld.core.activations import ACTIVATIONS
from torchweld.core.blocks import GATES, LayerForm, format_spec, parse_spec
from torchweld.numerics.numerical_rule import check_block

pytestmark = pytest.mark.usefixtures("cuda_on_host")
SHARED_IS_CHOSEN = pytest.mark.skipif(on_real_gpu(), reason="a GPU's shared memory is what it is")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROW = {
    "torchweld_cuda_narrow",
    "torchweld_cuda_narrow_backward",
    "torchweld_cuda_gradient_sums",
}
POINTWISE = {
    "torchweld_cuda_pointwise",
    "torchweld_cuda_pointwise_backward",
    "torchweld_cuda_gradient_sums",
}


def run(x: Tensor, tensors: Sequence[Tensor], spec: str, recompute: bool | None = None) -> Tensor:
    y: Tensor = torch.ops.torchweld.chain_way(x, list(tensors), spec, "cuda", recompute)
    return y


def judged(
    forms: Sequence[LayerForm], x: Tensor, tensors: Sequence[Tensor], *, recompute: bool = False
) -> set[str]:
    """Output and all gradients obey the rule. Returns the names of the kernels that ran."""
    spec = format_spec(forms)
    forget()
    y = run(x, tensors, spec)
    grad = torch.randn(y.shape).to(x.dtype)
    all_within(
        check_block(
            lambda x, tensors: run(x, tensors, spec, recompute), x, tensors, forms, grads=[grad]
        )
    )
    return set(launched())


def ran_narrow(names: set[str]) -> None:
    """A GPU with less shared memory than an A100 may take torch's products for the widest."""
    assert names == NARROW or (shared_memory() < 163 << 10 and names == POINTWISE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_every_activation_gate_and_dtype(gate: str, dtype: torch.dtype) -> None:
    for activation in ACTIVATIONS:
        flag = "" if gate == "none" else f"/{gate}"
        forms = parse_spec(f"{activation}/b{flag};{activation}/b")
        tensors = random_tensors((7, 9, 5), forms, dtype)
        assert judged(forms, torch.randn(3, 7).to(dtype), tensors) == NARROW, activation


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_chains_that_are_not_narrow(gate: str, dtype: torch.dtype) -> None:
    """Torch's products, and ours for the rest."""
    for activation in ACTIVATIONS:
        flag = "" if gate == "none" else f"/{gate}"
        forms = parse_spec(f"{activation}/b{flag};identity")
        tensors = random_tensors((7, 258, 5), forms, dtype)
        plain = activation == "identity" and gate == "none"  # torch's product is all of it
        expected = set() if plain else POINTWISE
        assert judged(forms, torch.randn(3, 7).to(dtype), tensors) == expected, activation


def test_parameters_of_activations() -> None:
    for text in ("leaky_relu:0.3", "elu:0.5", "softplus:3,2", "elu:2"):
        for width in (5, 257):
            forms = parse_spec(f"{text}/b;{text}")
            judged(forms, 2 * torch.randn(4, 6), random_tensors((6, width, 3), forms))


@pytest.mark.parametrize("forms", CHAINS, ids=CHAIN_IDS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("width", [21, 270])
def test_every_layout_over_several_tiles(
    width: int, recompute: bool, forms: tuple[LayerForm, ...]
) -> None:
    sizes = (*(37, width, 18, 33)[: len(forms)], 19)
    x, tensors = torch.randn(2, 57, 37), random_tensors(sizes, forms)
    names = judged(forms, x, tensors, recompute=recompute)
    narrow = width == 21 or len(forms) == 1
    assert names <= (NARROW if narrow else POINTWISE)
    assert names or not narrow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        *((1, (1, 1, 1)), (1, (16, 16, 16)), (5, (1, 40, 2)), (2, (70, 3, 65)), (33, (8, 256, 8))),
        *((31, (200, 130, 31)), (32, (64, 128, 64)), (65, (17, 16, 15)), (200, (3, 5, 2))),
    ],
)
def test_sizes(rows: int, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    forms = parse_spec("gelu/b;identity/b")
    x = torch.randn(rows, sizes[0]).to(dtype)
    ran_narrow(judged(forms, x, random_tensors(sizes, forms, dtype)))


@SHARED_IS_CHOSEN
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("resident", [True, False])
def test_weights_that_stay_and_weights_that_pass(
    resident: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights pass through a panel where a block's shared memory cannot hold them all."""
    monkeypatch.setenv("TORCHWELD_HOST_SHARED", str(227 << 10 if resident else 64 << 10))
    forms = parse_spec("gelu/b;silu/b/separate;identity/b/t")
    sizes = (70, 80, 40, 90) if resident else (100, 80, 40, 90)
    x = torch.randn(70, sizes[0]).to(dtype)
    assert judged(forms, x, random_tensors(sizes, forms, dtype)) == NARROW


def test_wide_gates_pass_in_parts() -> None:
    """A gated layer is computed 128 columns at a time."""
    forms = parse_spec("silu/b/first;identity")
    for width in (128, 140, 256):
        tensors = random_tensors((20, width, 10), forms, torch.bfloat16)
        ran_narrow(judged(forms, torch.randn(5, 20).bfloat16(), tensors))


@SHARED_IS_CHOSEN
def test_what_does_not_fit_takes_torchs_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHWELD_HOST_SHARED", str(48 << 10))
    forms = parse_spec("gelu/b;identity")
    assert judged(forms, torch.randn(5, 256), random_tensors((256, 256, 256), forms)) == POINTWISE
    many = parse_spec(";".join(["gelu"] * 13))
    names = judged(many, torch.randn(3, 4), random_tensors((4,) * 14, many))
    assert names == POINTWISE - {"torchweld_cuda_gradient_sums"}  # there are no biases


@pytest.mark.parametrize("width", [9, 260])
def test_strides(width: int) -> None:
    """x, weights, biases and the output's gradient may have any strides."""
    spec = "silu/b/separate;identity/b"
    forms = parse_spec(spec)
    x = torch.randn(12, 5, 2).transpose(0, 1)[..., 0]
    tensors = [
        torch.randn(*t.shape, 2)[..., 1] if t.dim() == 1 else torch.randn(*t.shape[::-1]).t()
        for t in random_tensors((12, width, 6), forms)
    ]
    judged(forms, x, tensors)
    leaves = [t.detach().requires_grad_() for t in (x, *tensors)]
    y = run(leaves[0], leaves[1:], spec)
    whole = torch.autograd.grad(y.sum(), leaves, retain_graph=True)  # a gradient of stride 0
    plain = torch.autograd.grad(y, leaves, torch.ones_like(y))
    for a, b in zip(whole, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("width", [6, 260])
def test_no_rows(width: int) -> None:
    forms = parse_spec("gelu/b;identity/b")
    x = torch.randn(2, 0, 6, requires_grad=True)
    tensors = [t.requires_grad_() for t in random_tensors((6, width, 3), forms)]
    y = run(x, tensors, "gelu/b;identity/b")
    assert y.shape == (2, 0, 3)
    for t, grad in zip((x, *tensors), torch.autograd.grad(y.sum(), [x, *tensors]), strict=True):
        assert grad.shape == t.shape
        assert not grad.any()
    assert launched() == []


@pytest.mark.parametrize("width", [6, 260])
@pytest.mark.parametrize("spec", ["gelu/b;silu/b/interleaved;tanh/b", "silu/first;identity"])
def test_only_needed_gradients_are_made_and_they_are_the_same(spec: str, width: int) -> None:
    forms = parse_spec(spec)
    sizes = (7, width, 6, 5)[: len(forms) + 1]
    x, tensors = torch.randn(40, 7), random_tensors(sizes, forms)
    grad = torch.randn(40, sizes[-1])

    def gradients(wanted: Sequence[int]) -> list[Tensor]:
        leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate((x, *tensors))]
        y = run(leaves[0], leaves[1:], spec)
        return list(torch.autograd.grad(y, [leaves[i] for i in wanted], grad))

    everything = range(1 + len(tensors))
    whole = gradients(everything)
    for wanted in [(i,) for i in everything] + [(1, 2), (len(tensors), 0)]:
        for i, found in zip(wanted, gradients(wanted), strict=True):
            torch.testing.assert_close(found, whole[i], rtol=0, atol=0)


@pytest.mark.parametrize("width", [20, 260])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_backwards_have_the_same_bits(dtype: torch.dtype, width: int) -> None:
    spec = "gelu/b;silu/b/separate;identity/b"
    forms = parse_spec(spec)
    leaves = [
        t.requires_grad_()
        for t in (torch.randn(150, 12).to(dtype), *random_tensors((12, width, 9, 7), forms, dtype))
    ]
    y = run(leaves[0], leaves[1:], spec)
    grad = torch.randn(y.shape).to(dtype)
    first = torch.autograd.grad(y, leaves, grad, retain_graph=True)
    second = torch.autograd.grad(y, leaves, grad)
    recomputed = run(leaves[0], leaves[1:], spec, True)
    again = torch.autograd.grad(recomputed, leaves, grad)
    for a, b, c in zip(first, second, again, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        torch.testing.assert_close(a, c, rtol=0, atol=0)


@pytest.mark.parametrize("width", [1, 300])
@pytest.mark.parametrize("activation", ["relu", "relu2", "hardswish", "leaky_relu"])
def test_gradients_are_selected_as_eager_selects_them(activation: str, width: int) -> None:
    """An infinite gradient of a value that was cut off is zero, not NaN."""
    x = torch.eye(2).requires_grad_()
    up, down = torch.tensor([[-5.0, 2.0]]).repeat(width, 1), torch.ones(1, width)
    grad = torch.tensor([[float("inf")], [1.0]])
    found = torch.autograd.grad(run(x, [up, down], f"{activation};identity"), x, grad)[0]
    act = ACTIVATIONS[activation]
    eager = act.apply(x @ up.t(), *act.defaults) @ down.t()
    torch.testing.assert_close(found, torch.autograd.grad(eager, x, grad)[0])


@pytest.mark.parametrize("width", [20, 300])
def test_not_a_number_and_infinity_stay_where_eager_has_them(width: int) -> None:
    spec = "gelu/b;identity/b"
    forms = parse_spec(spec)
    x, tensors = torch.randn(40, 8), random_tensors((8, width, 5), forms)
    x[3, 2], x[35, 1] = float("nan"), float("inf")
    up, bias, down, last = tensors
    eager = torch.nn.functional.linear(
        torch.nn.functional.gelu(torch.nn.functional.linear(x, up, bias)), down, last
    )
    ours = run(x, tensors, spec)
    assert torch.equal(ours.isfinite(), eager.isfinite())
    good = eager.isfinite()
    torch.testing.assert_close(ours[good], eager[good])


@pytest.mark.parametrize("width", [20, 300])
@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_is_the_masks(width: int, recompute: bool) -> None:
    """Masks have one bit per value, are drawn by the device's op, and kept for the backward."""
    spec = "gelu/b/drop:0.4;silu/b/separate/drop:0.25;identity/b/drop:0.5"
    forms = parse_spec(spec)
    widths = (9, width, 11, 5)
    tensors = random_tensors(widths, forms)
    leaves = [t.requires_grad_() for t in (torch.randn(37, 9), *tensors)]
    torch.manual_seed(3)
    y = run(leaves[0], leaves[1:], spec, recompute)
    torch.manual_seed(3)
    masks = [
        torch.ops.torchweld.dropout_mask(leaves[0], N, form.dropout)
        for N, form in zip(widths[1:], forms, strict=True)
    ]

    def factors(mask: Tensor, N: int, p: float) -> Tensor:
        bits = (mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
        return bits.flatten(-2)[..., :N] / (1 - p)

    h, left = leaves[0], iter(leaves[1:])
    for form, mask, N in zip(forms, masks, widths[1:], strict=True):
        act = ACTIVATIONS[form.activation]
        made = [torch.nn.functional.linear(h, next(left), next(left)) for _ in range(form.weights)]
        h = act.apply(made[0], *act.defaults)
        if form.weights == 2:
            h = h * made[1]
        h = h * factors(mask, N, form.dropout)
    torch.testing.assert_close(y, h)
    grad = torch.randn(y.shape)
    for a, b in zip(
        torch.autograd.grad(y, leaves, grad), torch.autograd.grad(h, leaves, grad), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_many_equal_rows_keep_the_rule() -> None:
    """A running sum over all of them would be off by more than the rule allows."""
    forms = parse_spec("gelu/b;identity/b")
    x = torch.randn(1, 6).expand(1000, 6)
    for width in (8, 260):
        judged(forms, x, random_tensors((6, width, 3), forms))


# cuBLAS, which multiplies what is not narrow, takes no rows that lie so far apart.
@pytest.mark.parametrize("width", [4] if on_real_gpu() else [4, 260])
def test_offsets_beyond_two_billion_elements(width: int) -> None:
    """The pages between the rows are never touched."""
    far = 2**31 + 8
    needs_memory(2 * far + (1 << 30))
    x = torch.empty(far + 16, dtype=torch.float16).as_strided((2, 5), (far, 1))
    values = torch.randn(2, 5).half()
    x.copy_(values)
    forms = parse_spec("gelu/b;identity")
    tensors = random_tensors((5, width, 3), forms, torch.float16)
    far_y = run(x, tensors, "gelu/b;identity")
    torch.testing.assert_close(far_y, run(values, tensors, "gelu/b;identity"), rtol=0, atol=0)


def test_float64_is_refused() -> None:
    forms = parse_spec("gelu;identity")
    tensors = random_tensors((5, 4, 3), forms, torch.float64)
    with pytest.raises(ValueError, match="the way cuda computes in float32, bfloat16 and float16"):
        run(torch.randn(2, 5).double(), tensors, "gelu;identity")
