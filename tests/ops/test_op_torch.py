"""The op as a citizen of torch: errors, meta, autocast, inference mode, opcheck."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.support.helpers import (
    CHAIN_IDS,
    CHAINS,
    DTYPES,
    ISAS,
    NOT_PACKED,
    chain,
    fixed,
    group,
    group_tensors,
    kernel_runs,
    packed_chain,
    tensors_for,
    using_isa,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torchweld as tw
from torchweld import ops
from torchweld.core.blocks import LayerForm, format_spec, parse_spec
from torchweld.ops.backends import reference_backend

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]


GELU = "gelu/b;identity/b"
QKV = "identity/b;identity;silu/first/b"


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
        (
            X.int(),
            [W1.int()],
            "gelu",
            "is int32; allowed are float32, bfloat16, float16 and float64",
        ),
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
            (
                X.half(),
                packed,
                "gelu/b",
                "x is float16 but the packed weights are of another dtype",
            ),
            (X[:, :2], packed, "gelu/b", "weight takes 3 features, but x has 2"),
            (X[0, 0], packed, "gelu/b", "x is a scalar"),
        ]:
            with pytest.raises(ValueError, match=message):
                run(x, bytes_, spec)


@pytest.mark.skipif(not {"avx2", "avx512"} & set(ISAS), reason="needs registers of two widths")
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


# ---- a copy that is found by its number ----


def kept_chain(x: Tensor, tensors: list[Tensor], spec: str, number: Tensor) -> Tensor:
    y: Tensor = torch.ops.torchweld.chain_kept(x, tensors, spec, number)
    return y


def test_a_kept_copy_is_made_once_and_follows_the_weights() -> None:
    pack, tensors = ops.compiled.Pack(), [W1.clone(), B1, W2, B2]
    for edit, times in ((False, 1), (False, 1), (True, 2), (False, 2)):
        if edit:
            tensors[0].neg_()
        with kernel_runs("packed"):
            y = kept_chain(X, tensors, GELU, pack.number)
        torch.testing.assert_close(y, chain(X, tensors, GELU))
        assert pack.times == times
    pack.clear()
    assert pack.nbytes == 0
    with kernel_runs("packed"):
        kept_chain(X, tensors, GELU, pack.number)
    assert pack.nbytes > 0


def test_without_the_copy_of_that_number_the_weights_are_read() -> None:
    """A graph may outlive the module, and numbers mean nothing in another process."""
    tensors = [W1, B1, W2, B2]
    pack = ops.compiled.Pack()
    gone = pack.number
    del pack
    for number in (gone, torch.tensor([10**12]), torch.tensor([1.0]), torch.tensor([1, 2])):
        with kernel_runs("natural"):
            y = kept_chain(X, tensors, GELU, number)
        assert torch.equal(y, chain(X, tensors, GELU))


def test_a_gradient_does_not_come_from_a_copy() -> None:
    pack, x = ops.compiled.Pack(), X.clone().requires_grad_()
    with kernel_runs("natural"):
        y = kept_chain(x, [W1, B1, W2, B2], GELU, pack.number)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(chain(x, [W1, B1, W2, B2], GELU).sum(), x)
    assert torch.equal(gradient, expected)
    assert pack.times == 0
    with torch.autocast("cpu", dtype=torch.bfloat16), kernel_runs("natural"):
        assert kept_chain(X, [W1, B1, W2, B2], GELU, pack.number).dtype is torch.bfloat16


def test_wrong_calls_with_a_number_are_refused_as_without() -> None:
    pack = ops.compiled.Pack()
    with torch.no_grad(), kernel_runs(calls=0):
        for x, tensors in (
            (X.half(), [W1, B1, W2, B2]),
            (X[:, :2], [W1, B1, W2, B2]),
            (X[0, 0], [W1, B1, W2, B2]),
            (X, [W1, B1, W2]),
            (X, [W2, B1, W2, B2]),
        ):
            for _ in range(2):
                with pytest.raises(ValueError, match="torchweld: "):
                    kept_chain(x, tensors, GELU, pack.number)


def test_a_kept_chain_on_another_device_is_what_chain_is_there() -> None:
    """Sparse tensors stand in for a device whose `chain` is registered from outside."""
    called: list[str] = []

    def chain_there(x: Tensor, params: list[Tensor], spec: str) -> Tensor:
        called.append(spec)
        return torch.zeros(2, 5)

    library = torch.library.Library("torchweld", "IMPL")
    library.impl("chain", chain_there, "SparseCPU")
    try:
        with kernel_runs(calls=0):
            y = kept_chain(X.to_sparse(), [W1, B1, W2, B2], GELU, ops.compiled.Pack().number)
    finally:
        library._destroy()
    assert called == [GELU]
    assert torch.equal(y, torch.zeros(2, 5))


def test_threads_share_a_kept_copy() -> None:
    pack, tensors = ops.compiled.Pack(), [W1.clone(), B1, W2, B2]
    other = ops.compiled.Pack()
    with kernel_runs("packed"):
        expected = kept_chain(X, tensors, GELU, other.number)

    def calls(_: int) -> bool:
        return all(
            torch.equal(kept_chain(X, tensors, GELU, pack.number), expected) for _ in range(200)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(calls, range(4)))
    assert pack.times == 1


# ---- functions ----


def test_mlp_and_linears_run_one_op() -> None:
    x, gate = torch.randn(2, 5, 3), torch.randn(4, 3)
    with kernel_runs("natural"):
        y = tw.mlp(x, [tw.Layer(W1, B1, "silu", gate=gate, gate_bias=B1), tw.Layer(W2, B2)])
    forms = parse_spec("silu/b/separate;identity/b")
    torch.testing.assert_close(y, reference_backend.chain(x, [gate, B1, W1, B1, W2, B2], forms))
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


def test_opcheck_of_a_kept_chain() -> None:
    pack = ops.compiled.Pack()
    given = (X, [W1, B1, W2, B2], GELU, pack.number)
    found = torch.library.opcheck(torch.ops.torchweld.chain_kept.default, given)
    assert set(found.values()) == {"SUCCESS"}


PACKABLE: dict[str, tuple[str, list[tuple[int, ...]]]] = {
    "chain": (GELU, [(4, 3), (4,), (5, 4), (5,)]),
    "gated": ("silu/first/b;identity/t", [(8, 3), (8,), (4, 17)]),
    "separate": ("silu/separate;identity", [(33, 3), (33, 3), (17, 33)]),
}


@pytest.mark.parametrize("kind", PACKABLE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_a_fake_pack_is_as_large_as_a_real_one(kind: str, dtype: torch.dtype, isa: str) -> None:
    spec, shapes = PACKABLE[kind]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    pack = torch.ops.torchweld.pack
    with using_isa(isa):
        real = pack(tensors, spec)
        on_meta = pack([t.to("meta") for t in tensors], spec)
        with FakeTensorMode() as mode:
            fake = pack([mode.from_tensor(t) for t in tensors], spec)
    for made in (on_meta, fake):
        assert (made.shape, made.dtype, made.stride()) == (real.shape, real.dtype, real.stride())
    assert on_meta.is_meta
    with pytest.raises(ValueError, match="asks for"):
        pack([t.to("meta") for t in tensors[:-1]], spec)


def test_opcheck_of_the_packed_ops() -> None:
    tensors = [W1, B1, W2, B2]
    packed = torch.ops.torchweld.pack(tensors, GELU)
    found = torch.library.opcheck(torch.ops.torchweld.pack.default, (tensors, GELU))
    assert set(found.values()) == {"SUCCESS"}
    for x in (X, fixed(2, 4, 3), fixed(3)):
        given = (x, packed, GELU)
        found = torch.library.opcheck(torch.ops.torchweld.chain_packed.default, given)
        assert set(found.values()) == {"SUCCESS"}
    group = torch.ops.torchweld.pack([W1, B1, W1], "gelu/b;identity")
    given = (X, group, "gelu/b;identity")
    found = torch.library.opcheck(torch.ops.torchweld.group_packed.default, given)
    assert set(found.values()) == {"SUCCESS"}


def test_packed_ops_inside_a_compiled_graph() -> None:
    """The features that come out are written in the packed tensor: a size known at the call."""

    def run(x: Tensor, tensors: list[Tensor]) -> Tensor:
        packed = torch.ops.torchweld.pack(tensors, GELU)
        y: Tensor = torch.ops.torchweld.chain_packed(x, packed, GELU) * 2
        return y

    tensors = [W1, B1, W2, B2]
    expected = 2 * chain(X, tensors, GELU)
    torch.testing.assert_close(torch.compile(run, backend="aot_eager")(X, tensors), expected)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch._dynamo.reset()
        whole = torch.compile(run, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(whole(X, tensors), expected)
    torch._dynamo.reset()
