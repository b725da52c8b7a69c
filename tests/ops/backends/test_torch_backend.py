"""The pure-PyTorch variant: eager's numbers from fewer ops and buffers, on any input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from tests.support import strategies
from tests.support.backend_samples import chain_of, packed_projection
from tests.support.helpers import (
    ACTIVATION_TEXTS,
    CHAIN_IDS,
    CHAINS,
    all_ok,
    all_within,
    random_tensors,
)
from torch import Tensor, nn

from torchweld.core.blocks import LayerForm, parse_spec
from torchweld.core.errors import BlockError
from torchweld.numerics.numerical_rule import check_block
from torchweld.ops.backends import Form, reference_backend
from torchweld.ops.backends.backend import FormKind
from torchweld.ops.backends.torch_backend import BACKEND, joined
from torchweld.profiles.dispatch_counts import count


def candidate(kind: FormKind, forms: Sequence[LayerForm]) -> Any:
    """What `check_block` runs: x and tensors in, the built block's output out."""

    def run(x: Tensor, tensors: Sequence[Tensor]) -> Tensor | list[Tensor]:
        return BACKEND.build(Form.of(kind, forms, tensors), tensors)(x)

    return run


def built(block: Form, tensors: Sequence[Tensor]) -> Any:
    """The runner of a chain, which returns one tensor."""
    return BACKEND.build(block, tensors)


def eager(block: Form, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    return reference_backend.chain(x, tensors, block.forms)


# ---- numbers ----


@settings(max_examples=80)
@given(block=strategies.blocks(most_rows=16, most_size=123, most_layers=3))
def test_any_chain_obeys_the_numerical_rule(block: strategies.Block) -> None:
    all_within(check_block(candidate("chain", block.forms), block.x, block.tensors, block.forms))


@settings(max_examples=40)
@given(block=strategies.blocks(group=True, most_rows=16, most_size=123, most_layers=3))
def test_any_group_obeys_the_numerical_rule(block: strategies.Block) -> None:
    found = check_block(
        candidate("group", block.forms), block.x, block.tensors, block.forms, group=True
    )
    all_within(found)


@torch.no_grad()
@pytest.mark.parametrize("activation", ACTIVATION_TEXTS)
@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 8), (0, 8), (2, 0, 8)])
def test_without_gates_the_bits_are_eagers(activation: str, shape: tuple[int, ...]) -> None:
    block, tensors = chain_of(f"{activation}/b;{activation};identity/b", (8, 24, 24, 3))
    x = torch.randn(shape)
    assert torch.equal(built(block, tensors)(x), eager(block, x, tensors))


@torch.no_grad()
@pytest.mark.parametrize("forms", CHAINS, ids=CHAIN_IDS)
def test_nan_and_inf_come_out_where_eagers_do(forms: tuple[LayerForm, ...]) -> None:
    sizes = (6, 16, 16, 5)[: len(forms) + 1]
    tensors = random_tensors(sizes, forms)
    x = torch.randn(4, 6)
    x[1, 2], x[2, 0], x[3, 5] = torch.nan, torch.inf, -torch.inf
    all_ok(check_block(candidate("chain", forms), x, tensors, forms))


@torch.no_grad()
def test_relu_keeps_nan() -> None:
    block, tensors = chain_of("relu/b", (4, 4))
    x = torch.full((2, 4), torch.nan)
    assert built(block, tensors)(x).isnan().all()


# ---- gradients ----


@pytest.mark.parametrize("forms", CHAINS, ids=CHAIN_IDS)
def test_gradients_obey_the_rule(forms: tuple[LayerForm, ...]) -> None:
    sizes = (6, 16, 16, 5)[: len(forms) + 1]
    tensors = random_tensors(sizes, forms)
    x, grad = torch.randn(4, 6), torch.randn(4, sizes[-1])
    all_ok(check_block(candidate("chain", forms), x, tensors, forms, grads=[grad]))


def test_a_built_block_can_be_used_with_and_without_gradients_in_turn() -> None:
    block, tensors = chain_of("gelu/b;identity/b", (8, 16, 4))
    parameters = [nn.Parameter(t) for t in tensors]
    run, x = built(block, parameters), torch.randn(3, 8)
    for _ in range(2):
        with torch.no_grad():
            before = run(x)
        y = run(x)
        assert isinstance(y, Tensor)
        assert y.requires_grad
        assert torch.equal(y, before)
        grads = torch.autograd.grad(y.sum(), parameters)
        expected = torch.autograd.grad(eager(block, x, parameters).sum(), parameters)
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_a_gradient_of_x_alone_is_seen() -> None:
    block, tensors = chain_of("relu/b;identity", (8, 16, 4))
    x = torch.randn(3, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(built(block, tensors)(x).sum(), x)
    (expected,) = torch.autograd.grad(eager(block, x, tensors).sum(), x)
    assert torch.equal(grad, expected)


# ---- fewer ops, fewer buffers ----

LINEAR_3D = ("aten.view", "aten.t", "aten.addmm", "aten.view")


@torch.no_grad()
def test_counts_of_a_gelu_mlp_on_a_3d_input() -> None:
    block, tensors = chain_of("gelu/b;identity/b", (8, 32, 8))
    run, x = built(block, tensors), torch.randn(2, 3, 8)
    before = count(lambda: eager(block, x, tensors))
    assert before.ops == (*LINEAR_3D, "aten.gelu", *LINEAR_3D)
    assert before.buffers == 3
    after = count(lambda: run(x))
    assert after.ops == ("aten.view", "aten.addmm", "aten.gelu_", "aten.addmm", "aten.view")
    assert after.buffers == 2
    assert after.buffer_bytes == 6 * (32 + 8) * 4


@torch.no_grad()
@pytest.mark.parametrize(
    ("spec", "sizes", "ops", "buffers"),
    [
        ("relu/b;identity", (8, 32, 8), ("_addmm_activation", "mm"), 2),
        ("tanh", (8, 32), ("mm", "tanh_"), 1),
        ("identity/t", (8, 32), ("mm",), 1),
        (
            "silu/separate;identity",
            (8, 32, 8),
            ("mm", "mm", "silu_", "mul_.Tensor", "mm"),
            3,
        ),
        (
            "silu/first;identity",
            (8, 32, 8),
            ("mm", "split.Tensor", "silu_", "mul_.Tensor", "mm"),
            2,
        ),
        ("silu/second", (8, 32), ("mm", "split.Tensor", "silu_", "mul.Tensor"), 2),
        ("sigmoid/b/second", (8, 32), ("addmm", "glu"), 2),
        (
            "gelu/interleaved",
            (8, 32),
            ("mm", "slice.Tensor", "gelu_", "slice.Tensor", "mul.Tensor"),
            2,
        ),
    ],
)
def test_counts_on_a_2d_input(
    spec: str, sizes: tuple[int, ...], ops: tuple[str, ...], buffers: int
) -> None:
    block, tensors = chain_of(spec, sizes)
    run, x = built(block, tensors), torch.randn(5, 8)
    counts = count(lambda: run(x))
    assert counts.ops == tuple(f"aten.{op}" for op in ops)
    assert counts.buffers == buffers
    before = count(lambda: eager(block, x, tensors))
    assert len(before.ops) > len(ops)
    assert before.buffers >= buffers


@torch.no_grad()
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_members_side_by_side_are_one_product(transposed: bool, bias: bool) -> None:
    flags = "/b" * bias + "/t" * transposed
    spec = ";".join(f"identity{flags}" for _ in range(3))
    block, tensors = packed_projection(spec, 8, (16, 4, 4), transposed=transposed, bias=bias)
    run, x = built(block, tensors), torch.randn(2, 3, 8)
    product = "aten.addmm" if bias else "aten.mm"
    counts = count(lambda: run(x))
    assert counts.ops == ("aten.view", product, "aten.view", "aten.split_with_sizes")
    assert counts.buffers == 1
    all_ok(check_block(candidate("group", block.forms), x, tensors, block.forms, group=True))


@torch.no_grad()
def test_members_side_by_side_keep_their_own_activations() -> None:
    block, tensors = packed_projection("silu/b;identity/b;tanh/b", 8, (16, 4, 4))
    run, x = built(block, tensors), torch.randn(5, 8)
    assert count(lambda: run(x)).ops == (
        "aten.addmm",
        "aten.split_with_sizes",
        "aten.silu_",
        "aten.tanh_",
    )
    for y, expected in zip(run(x), reference_backend.group(x, tensors, block.forms), strict=True):
        torch.testing.assert_close(y, expected)


@torch.no_grad()
def test_members_side_by_side_in_different_layouts_are_products_of_their_own() -> None:
    whole = torch.randn(16, 8)
    forms, tensors = parse_spec("identity;identity/t"), list(whole.split(8))
    run, x = BACKEND.build(Form.of("group", forms, tensors), tensors), torch.randn(5, 8)
    assert count(lambda: run(x)).ops == ("aten.mm", "aten.mm")
    for y, expected in zip(run(x), reference_backend.group(x, tensors, forms), strict=True):
        torch.testing.assert_close(y, expected)


@torch.no_grad()
def test_a_group_of_one_is_not_split() -> None:
    block, tensors = packed_projection("identity/b", 8, (16,))
    run, x = built(block, tensors), torch.randn(5, 8)
    assert count(lambda: run(x)).ops == ("aten.addmm",)


@torch.no_grad()
def test_gate_and_up_side_by_side_are_one_product() -> None:
    both, bias = torch.randn(32, 8), torch.randn(32)
    forms = parse_spec("silu/b/separate")
    tensors = [both[:16], bias[:16], both[16:], bias[16:]]
    run = BACKEND.build(Form.of("chain", forms, tensors), tensors)
    x = torch.randn(5, 8)
    assert count(lambda: run(x)).ops.count("aten.addmm") == 1
    torch.testing.assert_close(run(x), reference_backend.chain(x, tensors, forms))


def test_joined_is_only_what_is_side_by_side() -> None:
    whole = torch.arange(48.0).view(6, 8)
    first, second, third = whole.split(2)
    both = joined([first, second], 0)
    assert both is not None
    assert torch.equal(both, whole[:4])
    columns = joined([whole[:, :3], whole[:, 3:]], 1)
    assert columns is not None
    assert torch.equal(columns, whole)
    assert joined([second, first], 0) is None
    assert joined([first, third], 0) is None
    assert joined([first, second.clone()], 0) is None
    assert joined([first, second[:, :4]], 0) is None
    assert joined([whole[:, :3], whole[:, 3:]], 0) is None
    assert joined([first, whole.clone()[2:4]], 0) is None  # the right place in another storage
    meta = torch.empty(4, 8, device="meta")  # all at address 0
    assert joined([meta[:2], torch.empty_like(meta)[2:]], 0) is None
    assert joined([meta[:2], meta[2:]], 0) is not None


# ---- nothing else sees what it writes ----


@torch.no_grad()
@pytest.mark.parametrize("forms", CHAINS, ids=CHAIN_IDS)
def test_inputs_are_left_alone_and_the_output_is_fresh(forms: tuple[LayerForm, ...]) -> None:
    sizes = (6, 16, 16, 5)[: len(forms) + 1]
    tensors = random_tensors(sizes, forms)
    run = BACKEND.build(Form.of("chain", forms, tensors), tensors)
    for x in (torch.randn(4, 6), torch.randn(2, 2, 6), torch.randn(6, 4).t(), torch.randn(6)):
        before = [t.clone() for t in (x, *tensors)]
        y = run(x)
        assert isinstance(y, Tensor)
        assert y.is_contiguous()
        y.fill_(7.0)
        assert all(torch.equal(a, b) for a, b in zip((x, *tensors), before, strict=True))


@torch.no_grad()
def test_features_that_do_not_fit_are_refused_even_where_rows_would_fold() -> None:
    block, tensors = chain_of("gelu;identity", (8, 16, 4))
    run = built(block, tensors)
    with pytest.raises(BlockError, match=r"\[2, 6, 4\]; expected 8 features"):
        run(torch.randn(2, 6, 4))
    with pytest.raises(BlockError, match="expected 8 features"):
        run(torch.tensor(1.0))


# ---- weights that change ----


@torch.no_grad()
@pytest.mark.parametrize("spec", ["gelu/b;identity/b", "silu/first;identity", "gelu/t;identity/t"])
def test_new_data_in_the_same_parameter_is_used(spec: str) -> None:
    block, tensors = chain_of(spec, (8, 8, 8))
    parameters = [nn.Parameter(t) for t in tensors]
    run, x = built(block, parameters), torch.randn(3, 8)
    run(x)
    for p in parameters:
        p.data = torch.randn_like(p)
        assert torch.equal(run(x), eager(block, x, parameters))
        p.data.add_(1.0)
        assert torch.equal(run(x), eager(block, x, parameters))
    if spec.startswith("gelu"):
        parameters[0].data = parameters[0].data.t()  # the same memory, other strides
        assert torch.equal(run(x), eager(block, x, parameters))


@torch.no_grad()
def test_a_parameter_cast_after_the_build_is_used_as_it_is() -> None:
    linear = nn.Linear(8, 4)
    tensors = [linear.weight, linear.bias]
    run = built(Form.of("chain", parse_spec("identity/b"), tensors), tensors)
    run(torch.randn(3, 8))
    linear.double()
    x = torch.randn(3, 8, dtype=torch.float64)
    assert torch.equal(run(x), linear(x))


# ---- a citizen of torch ----


def test_autocast_is_eagers() -> None:
    block, tensors = chain_of("gelu/b;identity/b", (8, 16, 4))
    run, x = built(block, tensors), torch.randn(3, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = run(x)
        assert torch.equal(y, eager(block, x, tensors))
    assert isinstance(y, Tensor)
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("grad", [False, True])
def test_vmap_over_the_weights(grad: bool) -> None:
    forms = parse_spec("gelu/b;identity/b")
    stacked = [torch.stack([t, 2 * t]) for t in random_tensors((8, 16, 4), forms)]
    x = torch.randn(3, 8)
    run = candidate("chain", forms)
    with torch.set_grad_enabled(grad):
        ys = torch.vmap(lambda *tensors: run(x, tensors))(*stacked)
    for i in range(2):
        own = [t[i] for t in stacked]
        torch.testing.assert_close(ys[i], reference_backend.chain(x, own, forms))


def test_vmap_and_jvp_over_x() -> None:
    block, tensors = chain_of("silu/b/first;identity/b", (8, 16, 4))
    run, x = built(block, tensors), torch.randn(2, 3, 8)
    torch.testing.assert_close(torch.vmap(run)(x), eager(block, x, tensors))
    tangent = torch.randn_like(x)
    slope = torch.func.jvp(run, (x,), (tangent,))[1]
    expected = torch.func.jvp(lambda x: eager(block, x, tensors), (x,), (tangent,))[1]
    torch.testing.assert_close(slope, expected)


def test_compiling_and_tracing_see_plain_ops() -> None:
    block, tensors = chain_of("gelu/b;identity/b", (8, 16, 4))
    run, x = built(block, tensors), torch.randn(3, 8)
    compiled = torch.compile(lambda x: run(x), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), eager(block, x, tensors))
    traced = torch.jit.trace(lambda x: run(x), x)
    assert "gelu_" not in str(traced.graph)
    assert torch.equal(traced(x), eager(block, x, tensors))


@torch.no_grad()
def test_meta_tensors_give_shapes() -> None:
    block, tensors = chain_of("gelu/b;silu/first", (8, 16, 4))
    run = built(block, [t.to("meta") for t in tensors])
    y = run(torch.empty(2, 3, 8, device="meta"))
    assert isinstance(y, Tensor)
    assert y.shape == (2, 3, 4)


def test_tensor_subclasses_are_left_to_plain_ops() -> None:
    class Logged(Tensor):
        pass

    block, tensors = chain_of("gelu/b;identity/b", (8, 16, 4))
    own = [t.as_subclass(Logged) for t in tensors]
    run = built(block, own)
    x = torch.randn(3, 8)
    assert torch.equal(run(x), eager(block, x, own))
    assert isinstance(run, reference_backend.ReferenceRunner)


@torch.inference_mode()
def test_inference_tensors() -> None:
    block, tensors = chain_of("gelu/b;identity/b", (8, 16, 4))
    run, x = built(block, tensors), torch.randn(3, 8)
    assert torch.equal(run(x), eager(block, x, tensors))
    tensors[0].mul_(2.0)
    assert torch.equal(run(x), eager(block, x, tensors))
