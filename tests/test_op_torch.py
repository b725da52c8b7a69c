"""The op as a citizen of torch: errors, meta, autocast, gradients of every kind, transforms."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from tests.helpers import (
    ACTIVATION_TEXTS,
    CHAIN_IDS,
    CHAINS,
    DTYPES,
    ISAS,
    NOT_PACKED,
    all_ok,
    chain,
    fixed,
    group,
    kernel_runs,
    packed_chain,
    random_tensors,
    using_isa,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import torchweld as tw
from torchweld import ops
from torchweld.blocks import LayerForm, format_spec, parse_spec
from torchweld.kernels import reference
from torchweld.verification import check_block

pytestmark = pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # small products: a second thread only waits


GELU = "gelu/b;identity/b"
QKV = "identity/b;identity;silu/first/b"


def sizes_for(forms: Sequence[LayerForm]) -> tuple[int, ...]:
    return (5, *([4, 6, 3][: len(forms) - 1]), 3)


def tensors_for(forms: Sequence[LayerForm], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [t.requires_grad_() for t in random_tensors(sizes_for(forms), forms, dtype)]


def group_tensors(forms: Sequence[LayerForm], K: int, dtype: torch.dtype) -> list[Tensor]:
    return [
        t.requires_grad_()
        for i, form in enumerate(forms)
        for t in random_tensors((K, 3 + i), [form], dtype)
    ]


def counted(op: Callable[..., Tensor | list[Tensor]], spec: str) -> Callable[..., object]:
    """The op as a function of tensors alone, seen to run our kernel at every call."""

    def function(x: Tensor, *tensors: Tensor) -> object:
        with kernel_runs(*NOT_PACKED):
            ys = op(x, tensors, spec)
        return tuple(ys) if isinstance(ys, list) else ys

    return function


# ---- errors ----

X, W1, B1, W2, B2 = fixed(2, 3), fixed(4, 3), fixed(4), fixed(5, 4), fixed(5)


@pytest.mark.parametrize("op", [chain, packed_chain], ids=["chain", "packed"])
@pytest.mark.parametrize(
    ("x", "tensors", "spec", "message"),
    [
        (X, [W1, B1, W2], GELU, "asks for 4 tensors, 3 were given"),
        (X, [W1, B1], "gelu", "asks for 1 tensors, 2 were given"),
        (X, [W1, B1], "swish/b", "unknown activation 'swish'; there are: identity relu"),
        (X, [W1, B1], "gelu/bias", "unknown flag 'bias' in a spec; there are: b t separate"),
        (X, [W1, B1], "elu:1,2/b", "elu takes 1 number"),
        (torch.randn(2, 7), [W1], "gelu", r"weight takes 3 features, but x has 7"),
        (
            X,
            [W1, torch.randn(5, 9)],
            "gelu;gelu",
            "layer 1's weight takes 9 features, but the layer",
        ),
        (X, [W1, B2], "gelu/b", r"layer 0's bias has shape \[5\]; expected \[4\]"),
        (X, [W1, B1[None]], "gelu/b", r"layer 0's bias has shape \[1, 4\]; expected \[4\]"),
        (X, [W1[None]], "gelu", r"weight has shape \[1, 4, 3\]; expected two dimensions"),
        (X, [W1[:3]], "silu/first", "one weight of 3 outputs; gate and up need an even number"),
        (X, [W1, W1[:2]], "silu/separate", r"shape \[4, 3\] and its up weight \[2, 3\]; they must"),
        (X[0, 0], [W1], "gelu", "x is a scalar; expected at least one dimension"),
        (X, [torch.randn(4, 0)], "gelu", "every size must be at least 1"),
        (X, [W1, B1.int()], "gelu/b", "bias is int32"),
        (X.int(), [W1.int()], "gelu", "is int32; allowed are float32, bfloat16, float16 and float64"),
    ],
)
def test_what_does_not_fit_is_named(
    op: Callable[..., Tensor], x: Tensor, tensors: list[Tensor], spec: str, message: str
) -> None:
    """A ValueError with what was given and what is allowed."""
    with kernel_runs(calls=0), pytest.raises(ValueError, match=message):
        op(x, tensors, spec)


def test_sparse_tensors_are_served_by_the_composition() -> None:
    expected = chain(X, [W1], "gelu")
    with kernel_runs(calls=0):
        for x, w in ((X.to_sparse(), W1), (X, W1.to_sparse())):
            torch.testing.assert_close(chain(x, [w], "gelu"), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.half(), r"is float16;? .*all must have one dtype: cast one with .to\(\)"),
        (lambda t: t.double(), r"is float64;? .*all must have one dtype"),
        (lambda t: t.to("meta"), r"is on meta; move one with .to\(\)"),
    ],
)
@pytest.mark.parametrize("which", range(4))
def test_mixed_types_and_devices_are_refused(
    which: int, change: Callable[[Tensor], Tensor], message: str
) -> None:
    tensors = [W1, B1, W2, B2]
    tensors[which] = change(tensors[which])
    with kernel_runs(calls=0), pytest.raises(ValueError, match=message) as caught:
        chain(X, tensors, GELU)
    assert f"layer {which // 2}'s {'bias' if which % 2 else 'weight'}" in str(caught.value)
    assert "x is " in str(caught.value)


def test_packed_weights_are_checked() -> None:
    packed = torch.ops.torchweld.pack([W1, B1], "gelu/b")
    run = torch.ops.torchweld.chain_packed
    with kernel_runs("packed"):
        run(X, packed, "gelu/b")
    with kernel_runs(calls=0):
        for x, bytes_, spec, message in [
            (X, packed, "relu/b", "not made by torchweld::pack for this spec"),
            (X, packed[:-1], "gelu/b", "not made by torchweld::pack"),
            (X, packed[::2], "gelu/b", "not made by torchweld::pack"),
            (X, torch.zeros_like(packed), "gelu/b", "not made by torchweld::pack"),
            (X, torch.randn(100), "gelu/b", "not made by torchweld::pack"),
            (X, packed[:0], "gelu/b", "not made by torchweld::pack"),
            (X.half(), packed, "gelu/b", "x is float16 but the packed weights are of another dtype"),
            (X[:, :2], packed, "gelu/b", "weight takes 3 features, but x has 2"),
            (X[0, 0], packed, "gelu/b", "x is a scalar"),
        ]:
            with pytest.raises(ValueError, match=message):
                run(x, bytes_, spec)


@pytest.mark.skipif(len(ISAS) < 2, reason="needs two instruction sets")
def test_panels_of_another_instruction_set_are_refused() -> None:
    with using_isa("baseline"):
        packed = torch.ops.torchweld.pack([W1, B1], "gelu/b")
    with using_isa(ISAS[0]), pytest.raises(ValueError, match=r"registers of 4 floats.*pack again"):
        torch.ops.torchweld.chain_packed(X, packed, "gelu/b")


def test_an_impossible_instruction_set_is_named() -> None:
    with pytest.raises(ValueError, match=r"TORCHWELD_ISA=mmx cannot be used.*built and supp"):
        ops.compiled.choose_isa("mmx")


def test_packed_ops_do_not_pretend_to_differentiate() -> None:
    """A gradient that would be lost is an error, not a result without history."""
    packed = torch.ops.torchweld.pack([W1, B1], "gelu/b")
    x = X.clone().requires_grad_()
    with pytest.raises((ValueError, RuntimeError), match=r"gradient|no_grad"):
        torch.ops.torchweld.chain_packed(x, packed, "gelu/b")


# ---- functions ----


def test_mlp_and_linears_run_one_op() -> None:
    x, gate = torch.randn(2, 5, 3), torch.randn(4, 3)
    with kernel_runs("natural"):
        y = tw.mlp(x, [tw.Layer(W1, B1, "silu", gate=gate, gate_bias=B1), tw.Layer(W2, B2)])
    forms = parse_spec("silu/b/separate;identity/b")
    torch.testing.assert_close(y, reference.chain(x, [gate, B1, W1, B1, W2, B2], forms))
    with kernel_runs("natural"):
        ys = tw.linears(x, [tw.Layer(W1, B1), tw.Layer(W1[:2]), tw.Layer(W1.t(), transposed=True)])
    for y, expected in zip(ys, (x @ W1.t() + B1, x @ W1[:2].t(), x @ W1.t()), strict=True):
        torch.testing.assert_close(y, expected)


# ---- meta and fake tensors ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("forms", CHAINS, ids=CHAIN_IDS)
def test_meta_knows_shape_type_and_layout(forms: tuple[LayerForm, ...], dtype: torch.dtype) -> None:
    tensors = [t.detach() for t in tensors_for(forms, dtype)]
    for x in (torch.randn(5), torch.randn(2, 7, 5), torch.randn(5, 2).t(), torch.randn(0, 5)):
        x = x.to(dtype)
        y = chain(x, tensors, format_spec(forms))
        with kernel_runs(calls=0):
            meta = chain(x.to("meta"), [t.to("meta") for t in tensors], format_spec(forms))
            with FakeTensorMode() as mode:
                fake = chain(
                    mode.from_tensor(x), [mode.from_tensor(t) for t in tensors], format_spec(forms)
                )
        for other in (meta, fake):
            assert other.shape == y.shape
            assert other.dtype == y.dtype
            assert other.stride() == y.stride()
        assert meta.device.type == "meta"
        assert fake.device.type == "cpu"


def test_meta_of_a_group_and_its_errors() -> None:
    forms = parse_spec(QKV)
    tensors = [t.detach().to("meta") for t in group_tensors(forms, 5, torch.float32)]
    ys = group(torch.empty(2, 7, 5, device="meta"), tensors, QKV)
    assert [tuple(y.shape) for y in ys] == [(2, 7, 3), (2, 7, 4), (2, 7, 5)]
    with pytest.raises(ValueError, match="weight takes 5 features, but x has 6"):
        group(torch.empty(2, 6, device="meta"), tensors, QKV)


# ---- autocast and inference mode ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("forms", CHAINS, ids=CHAIN_IDS)
def test_autocast_is_casting_by_hand(forms: tuple[LayerForm, ...], dtype: torch.dtype) -> None:
    spec = format_spec(forms)
    tensors = tensors_for(forms, torch.float32)
    x = torch.randn(7, 5, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype), kernel_runs(*NOT_PACKED):
        y = chain(x, tensors, spec)
    with kernel_runs(*NOT_PACKED):
        by_hand = chain(x.to(dtype), [t.to(dtype) for t in tensors], spec)
    assert y.dtype == dtype
    assert torch.equal(y, by_hand)
    inputs = [x, *tensors]
    g = torch.randn(y.shape).to(dtype)
    for got, expected in zip(
        torch.autograd.grad(y, inputs, g), torch.autograd.grad(by_hand, inputs, g), strict=True
    ):
        assert got.dtype == torch.float32
        assert torch.equal(got, expected)


def test_autocast_of_a_group_mixed_inputs_and_regions_without() -> None:
    forms = parse_spec(QKV)
    tensors = group_tensors(forms, 5, torch.float32)
    x = torch.randn(7, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with kernel_runs(*NOT_PACKED):
            ys = group(x.bfloat16(), tensors, QKV)
        with torch.autocast("cpu", enabled=False), kernel_runs(*NOT_PACKED):
            plain = group(x, tensors, QKV)
    expected = group(x.bfloat16(), [t.bfloat16() for t in tensors], QKV)
    assert all(torch.equal(y, e) for y, e in zip(ys, expected, strict=True))
    assert all(y.dtype == torch.float32 for y in plain)


@pytest.mark.parametrize("op", [chain, packed_chain])
def test_inference_mode(op: Callable[..., Tensor]) -> None:
    tensors = [t.requires_grad_() for t in (W1.clone(), B1.clone())]
    expected = op(X, [t.detach() for t in tensors], "gelu/b")
    weights = "packed" if op is packed_chain else "natural"
    with torch.inference_mode(), kernel_runs(weights, calls=2):
        y = op(X, tensors, "gelu/b")
        own = [t.clone() for t in tensors]  # inference tensors themselves
        again = op(X.clone(), own, "gelu/b")
    assert y.is_inference()
    assert not y.requires_grad
    assert torch.equal(y, expected)
    assert torch.equal(again, expected)


# ---- opcheck ----


@pytest.mark.parametrize(
    ("spec", "x", "dtype"),
    [
        (GELU, fixed(2, 3, 5), torch.float32),
        ("silu/separate;identity", fixed(5), torch.bfloat16),
        ("silu/interleaved/t/b", fixed(5, 4).t(), torch.float64),
    ],
)
def test_opcheck_of_a_chain(spec: str, x: Tensor, dtype: torch.dtype) -> None:
    tensors = tensors_for(parse_spec(spec), dtype)
    x = x.to(dtype).detach().requires_grad_()
    found = torch.library.opcheck(torch.ops.torchweld.chain.default, (x, tensors, spec))
    assert set(found.values()) == {"SUCCESS"}


def test_opcheck_of_a_group() -> None:
    tensors = group_tensors(parse_spec(QKV), 5, torch.float32)
    x = torch.randn(2, 3, 5, requires_grad=True)
    found = torch.library.opcheck(torch.ops.torchweld.group.default, (x, tensors, QKV))
    assert set(found.values()) == {"SUCCESS"}


# ---- gradients ----


@pytest.mark.parametrize("activation", ACTIVATION_TEXTS)
@pytest.mark.parametrize("gate", ["none", "separate", "first", "second", "interleaved"])
def test_gradients_of_every_activation_and_gate(activation: str, gate: str) -> None:
    flag = "" if gate == "none" else f"/{gate}"
    forms = parse_spec(f"{activation}/b{flag};{activation}/b")
    inputs = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True), *tensors_for(forms))
    assert torch.autograd.gradcheck(counted(chain, format_spec(forms)), inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(counted(chain, format_spec(forms)), inputs, fast_mode=True)


@pytest.mark.parametrize("rows", [(), (4,), (20,), (2, 3)])
@pytest.mark.parametrize("forms", CHAINS, ids=CHAIN_IDS)
def test_gradients_to_the_second_order(forms: tuple[LayerForm, ...], rows: tuple[int, ...]) -> None:
    """Element by element, a dozen rows and more too, where weights are repacked on the way."""
    x = torch.randn(*rows, 5, dtype=torch.float64, requires_grad=True)
    inputs = (x, *tensors_for(forms))
    f = counted(chain, format_spec(forms))
    assert torch.autograd.gradcheck(f, inputs, fast_mode=x.numel() > 50)
    assert torch.autograd.gradgradcheck(f, inputs, fast_mode=True)


def test_gradients_of_a_group() -> None:
    forms = parse_spec(QKV)
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    inputs = (x, *group_tensors(forms, 5, torch.float64))
    assert torch.autograd.gradcheck(counted(group, QKV), inputs)
    assert torch.autograd.gradgradcheck(counted(group, QKV), inputs, fast_mode=True)


def test_a_group_whose_outputs_are_not_all_used() -> None:
    forms = parse_spec(QKV)
    tensors = group_tensors(forms, 5, torch.float64)
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    with kernel_runs("natural"):
        ys = group(x, tensors, QKV)
    (ys[1].sum() + ys[2].square().sum()).backward()
    expected = reference.group(x, tensors, forms)
    used = [x, *tensors[2:]]
    wanted = torch.autograd.grad(expected[1].sum() + expected[2].square().sum(), used)
    for t, grad in zip(used, wanted, strict=True):
        torch.testing.assert_close(t.grad, grad)
    assert all(t.grad is None or not t.grad.any() for t in tensors[:2])


@pytest.mark.parametrize("spec", [GELU, "silu/separate;identity/b", "silu/second/b/t;identity"])
def test_every_combination_of_frozen_parameters(spec: str) -> None:
    forms = parse_spec(spec)
    tensors = tensors_for(forms)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    g = torch.randn(3, 3, dtype=torch.float64)
    everything = [x, *tensors]
    full = torch.autograd.grad(reference.chain(x, tensors, forms), everything, g)
    for needed in itertools.product((False, True), repeat=len(everything)):
        for t, need in zip(everything, needed, strict=True):
            t.requires_grad_(need)
            t.grad = None
        with kernel_runs(*NOT_PACKED):
            y = chain(x, tensors, spec)
        assert y.requires_grad == any(needed)
        if not any(needed):
            continue
        y.backward(g)
        for t, need, expected in zip(everything, needed, full, strict=True):
            assert (t.grad is not None) == need
            if need:
                torch.testing.assert_close(t.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("forms", CHAINS, ids=CHAIN_IDS)
def test_gradients_obey_the_rule(forms: tuple[LayerForm, ...], dtype: torch.dtype) -> None:
    sizes = (123, *([100, 31][: len(forms) - 1]), 64)
    tensors = random_tensors(sizes, forms, dtype)
    x, grads = torch.randn(2, 21, 123).to(dtype), [torch.randn(2, 21, 64).to(dtype)]
    with kernel_runs(*NOT_PACKED):
        found = check_block(partial(chain, spec=format_spec(forms)), x, tensors, forms, grads=grads)
    all_ok(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_group_obey_the_rule(dtype: torch.dtype) -> None:
    forms = parse_spec(QKV)
    tensors = [
        t
        for form, n in zip(forms, (64, 16, 16), strict=True)
        for t in random_tensors((100, n), [form], dtype)
    ]
    x = torch.randn(21, 100).to(dtype)
    grads = [torch.randn(21, n).to(dtype) for n in (64, 16, 16)]
    with kernel_runs(*NOT_PACKED):
        found = check_block(partial(group, spec=QKV), x, tensors, forms, group=True, grads=grads)
    all_ok(found)


@pytest.mark.parametrize(
    "reduce",
    [Tensor.sum, Tensor.mean, lambda y: y[..., 0].sum(), lambda y: y.t().sum(0).max()],
    ids=["sum", "mean", "one column", "turned"],
)
def test_gradients_of_any_strides(reduce: Callable[[Tensor], Tensor]) -> None:
    """`sum` hands back a gradient with stride 0."""
    forms = parse_spec(GELU)
    tensors = tensors_for(forms)
    for x in (
        torch.randn(3, 5, dtype=torch.float64),
        torch.randn(5, 3, dtype=torch.float64).t(),
        torch.randn(6, 10, dtype=torch.float64)[::2, ::2],
        torch.randn(1, 5, dtype=torch.float64).expand(3, 5),
    ):
        x = x.detach().requires_grad_()
        inputs = [x, *tensors]
        with kernel_runs("natural"):
            y = chain(x, tensors, GELU)
        expected = torch.autograd.grad(reduce(reference.chain(x, tensors, forms)), inputs)
        for got, wanted in zip(torch.autograd.grad(reduce(y), inputs), expected, strict=True):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant: bool) -> None:
    forms = parse_spec(GELU)
    tensors = tensors_for(forms)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    with kernel_runs("natural", calls=2):  # once forward, once again in backward
        y = checkpoint(chain, x, tensors, GELU, use_reentrant=use_reentrant)
        y.square().sum().backward()
    expected = torch.autograd.grad(reference.chain(x, tensors, forms).square().sum(), x)
    torch.testing.assert_close(x.grad, expected[0])


def test_changed_inputs_are_noticed_by_backward() -> None:
    tensors = tensors_for(parse_spec(GELU))
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    with kernel_runs("natural"):
        y = chain(x, tensors, GELU)
    with torch.no_grad():
        tensors[0].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- transforms: the composition runs there, and is right ----


def function_and_inputs() -> tuple[Callable[..., Tensor], tuple[LayerForm, ...], list[Tensor]]:
    forms = parse_spec("gelu/b;silu/first/b;identity")
    tensors = [t.detach() for t in tensors_for(forms)]
    return partial(chain, spec=format_spec(forms)), forms, tensors


@pytest.mark.parametrize("over", ["x", "parameters", "both"])
def test_vmap(over: str) -> None:
    f, forms, tensors = function_and_inputs()
    x = (
        torch.randn(4, 3, 5, dtype=torch.float64)
        if over != "parameters"
        else torch.randn(3, 5).double()
    )
    if over != "x":
        tensors = [torch.stack([t, 2 * t, 3 * t, t / 2]) for t in tensors]
    dims = (0 if over != "parameters" else None, [0 if over != "x" else None] * len(tensors))
    y = torch.func.vmap(f, in_dims=dims)(x, tensors)
    for i in range(4):
        own = [t if over == "x" else t[i] for t in tensors]
        torch.testing.assert_close(
            y[i], reference.chain(x if over == "parameters" else x[i], own, forms)
        )


def test_vmap_of_a_group() -> None:
    forms = parse_spec(QKV)
    tensors = [t.detach() for t in group_tensors(forms, 5, torch.float64)]
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    ys = torch.func.vmap(lambda x: tuple(group(x, tensors, QKV)))(x)
    for y, expected in zip(ys, reference.group(x, tensors, forms), strict=True):
        torch.testing.assert_close(y, expected)


def test_func_grad_and_per_sample_gradients() -> None:
    f, forms, tensors = function_and_inputs()
    x = torch.randn(4, 5, dtype=torch.float64)

    def loss(run: Callable[..., Tensor], tensors: list[Tensor], x: Tensor) -> Tensor:
        return run(x, tensors).square().sum()

    eager = partial(loss, partial(reference.chain, forms=forms))
    ours = partial(loss, f)
    for got, expected in zip(
        torch.func.grad(ours)(tensors, x), torch.func.grad(eager)(tensors, x), strict=True
    ):
        torch.testing.assert_close(got, expected)
    per_sample = torch.func.vmap(torch.func.grad(ours), in_dims=(None, 0))(tensors, x)
    for i in range(4):
        for got, expected in zip(per_sample, torch.func.grad(eager)(tensors, x[i]), strict=True):
            torch.testing.assert_close(got[i], expected)


def test_jvp_jacobian_and_hessian() -> None:
    f, forms, tensors = function_and_inputs()
    eager = partial(reference.chain, forms=forms)
    x, direction = (torch.randn(5, dtype=torch.float64) for _ in range(2))
    got = torch.func.jvp(lambda x: f(x, tensors), (x,), (direction,))
    expected = torch.func.jvp(lambda x: eager(x, tensors), (x,), (direction,))
    torch.testing.assert_close(got, expected)
    assert expected[1].abs().max() > 1e-3
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(
            transform(lambda x: f(x, tensors))(x), transform(lambda x: eager(x, tensors))(x)
        )
    torch.testing.assert_close(
        torch.func.hessian(lambda x: f(x, tensors).sum())(x),
        torch.func.hessian(lambda x: eager(x, tensors).sum())(x),
    )


@pytest.mark.parametrize("grad_mode", [False, True])
@pytest.mark.parametrize("which", ["x", "parameter"])
def test_forward_mode_differentiation(which: str, grad_mode: bool) -> None:
    """A tangent is neither dropped nor zero, whether or not gradients are on."""
    f, forms, tensors = function_and_inputs()
    x = torch.randn(3, 5, dtype=torch.float64)
    tangent = torch.randn_like(x if which == "x" else tensors[0])
    with torch.set_grad_enabled(grad_mode), forward_ad.dual_level():
        if which == "x":
            x = forward_ad.make_dual(x, tangent)
        else:
            tensors[0] = forward_ad.make_dual(tensors[0], tangent)
        got = forward_ad.unpack_dual(f(x, tensors))
        expected = forward_ad.unpack_dual(reference.chain(x, tensors, forms))
    assert got.tangent is not None
    torch.testing.assert_close(got.primal, expected.primal)
    torch.testing.assert_close(got.tangent, expected.tangent)


def test_double_backward_by_hand() -> None:
    """A gradient penalty, as those who train with one write it."""
    forms = parse_spec(GELU)
    tensors = tensors_for(forms)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    penalties = []
    for run in (partial(chain, spec=GELU), partial(reference.chain, forms=forms)):
        (grad,) = torch.autograd.grad(run(x, tensors).sum(), x, create_graph=True)
        penalties.append(torch.autograd.grad(grad.square().sum(), tensors[:3]))
    for got, expected in zip(*penalties, strict=True):
        torch.testing.assert_close(got, expected)
