"""The op's numbers: the numerical rule over random blocks, on every instruction set there is here.

Every check runs the kernel that reads weights where they lie and the one that reads packed weights,
and sees from the kernels' own account that they did run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.helpers import (
    ACTIVATION_TEXTS,
    CHAIN_IDS,
    CHAINS,
    DTYPES,
    ISAS,
    NOT_PACKED,
    all_ok,
    all_within,
    chain,
    group,
    kernel_runs,
    last_run,
    left_to_torch,
    not_packed,
    packed_chain,
    packed_group,
    random_tensors,
    using_isa,
    using_threads,
)
from tests.strategies import Block, blocks
from torch import Tensor

from torchweld.blocks import GATES, LayerForm, format_spec, parse_spec, split_tensors
from torchweld.kernels import reference
from torchweld.verification import Judgement, check_block

pytestmark = pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine")

threads = st.sampled_from((1, 2, 3))


def judged(block: Block, *, is_group: bool, packed: bool, count: int) -> dict[str, Judgement]:
    """The op on `count` threads; eager and the reference on one, faster for small blocks."""
    op: Callable[..., Tensor | list[Tensor]]
    op = (packed_group if packed else group) if is_group else packed_chain if packed else chain
    weights = {"packed"} if packed else not_packed(block.x, block.tensors)

    def candidate(x: Tensor, tensors: Sequence[Tensor]) -> Tensor | list[Tensor]:
        with using_threads(count), kernel_runs(*weights):
            ys = op(x, tensors, block.spec)
        assert last_run()["rows"] == block.rows
        assert last_run()["threads"] <= count
        for y in ys if is_group else [ys]:
            assert y.is_contiguous()
            assert y.dtype == x.dtype
        return ys

    with using_threads(1):
        return check_block(candidate, block.x, block.tensors, block.forms, group=is_group)


@pytest.mark.parametrize("packed", [False, True], ids=["natural", "packed"])
@pytest.mark.parametrize("isa", ISAS)
@given(block=blocks(), count=threads)
def test_chain_obeys_the_rule(isa: str, packed: bool, block: Block, count: int) -> None:
    with using_isa(isa):
        all_within(judged(block, is_group=False, packed=packed, count=count))


@pytest.mark.parametrize("packed", [False, True], ids=["natural", "packed"])
@pytest.mark.parametrize("isa", ISAS)
@given(block=blocks(group=True, most_layers=4), count=threads)
@settings(max_examples=30)
def test_group_obeys_the_rule(isa: str, packed: bool, block: Block, count: int) -> None:
    with using_isa(isa):
        all_within(judged(block, is_group=True, packed=packed, count=count))


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["natural", "packed"])
@pytest.mark.parametrize("isa", ISAS)
@given(data=st.data(), count=threads)
@settings(max_examples=800)
def test_many_more_blocks_obey_the_rule(
    isa: str, packed: bool, data: st.DataObject, count: int
) -> None:
    is_group = data.draw(st.booleans())
    block = data.draw(blocks(group=is_group))
    with using_isa(isa):
        all_within(judged(block, is_group=is_group, packed=packed, count=count))


# ---- a grid that cannot be trivial ----


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ACTIVATION_TEXTS)
def test_every_activation_gated_or_not(
    activation: str, isa: str, dtype: torch.dtype, rows: int
) -> None:
    """As a hidden and as the last activation; every result is big enough to be judged."""
    for gate in GATES:
        flag = "" if gate == "none" else f"/{gate}"
        forms = parse_spec(f"{activation}/b{flag};{activation}/b")
        tensors = random_tensors((100, 31, 64), forms, dtype)
        x = (2 * torch.randn(rows, 100)).to(dtype)
        spec = format_spec(forms)
        with using_isa(isa), using_threads(1):
            for op, weights in ((chain, NOT_PACKED), (packed_chain, {"packed"})):
                with kernel_runs(*weights):
                    found = check_block(partial(op, spec=spec), x, tensors, forms)
                all_ok(found)


# ---- inside a block everything is fp32 ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("isa", ISAS)
@given(data=st.data())
@settings(max_examples=25)
def test_16_bit_rounds_only_at_the_end(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    """The same bits as fp32 on the same numbers, rounded once."""
    block = data.draw(blocks(dtypes=[dtype], plain=True, most_size=123))
    x, wide = block.x, [t.float() for t in block.tensors]
    with using_isa(isa):
        assume(not left_to_torch(x, block.tensors))
        for op, weights in ((chain, NOT_PACKED), (packed_chain, {"packed"})):
            with kernel_runs(*weights, calls=2):
                narrow = op(x, block.tensors, block.spec)
                rounded = op(x.float(), wide, block.spec).to(dtype)
            torch.testing.assert_close(narrow, rounded, rtol=0, atol=0, equal_nan=True)


# ---- bits ----

BIT_ROWS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 16, 17, 31, 48, 193, 400)
BIT_CHAINS = [
    ("gelu/b;identity/b", (123, 77, 31)),
    ("silu/separate;identity", (64, 100, 16)),
    ("relu/b;relu/b;relu/b;identity/b", (64, 64, 64, 64, 9)),
    ("silu/interleaved/b/t;tanh", (768, 40, 33)),
    ("identity/b", (600, 50)),
]
BIG_CHAIN = ("gelu/b;identity/b", (256, 1024, 256))  # enough work for several threads at any rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("spec", "sizes"), [*BIT_CHAINS, BIG_CHAIN])
def test_packed_rows_depend_on_nothing_but_themselves(
    spec: str, sizes: tuple[int, ...], isa: str, dtype: torch.dtype
) -> None:
    """Not on how many rows there are, nor which, nor on how many threads work."""
    with using_isa(isa):
        tensors = random_tensors(sizes, parse_spec(spec), dtype)
        packed = torch.ops.torchweld.pack(tensors, spec)
        x = torch.randn(max(BIT_ROWS), sizes[0]).to(dtype)
        with using_threads(1):
            alone = torch.cat(
                [torch.ops.torchweld.chain_packed(row, packed, spec) for row in x[:40].split(1)]
            )
            all_at_once = torch.ops.torchweld.chain_packed(x, packed, spec)
        assert torch.equal(alone, all_at_once[:40])
        for count in (1, 2, 3):
            for rows in BIT_ROWS:
                with using_threads(count), kernel_runs("packed"):
                    y = torch.ops.torchweld.chain_packed(x[:rows], packed, spec)
                assert torch.equal(y, all_at_once[:rows]), (rows, count, last_run())


NATURAL_REGIMES = {"up to 16 rows": (1, 2, 3, 4, 5, 7, 13, 16), "more": (17, 31, 48, 193, 400)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("regime", NATURAL_REGIMES)
@pytest.mark.parametrize(("spec", "sizes"), [*BIT_CHAINS, BIG_CHAIN])
def test_rows_depend_on_nothing_but_themselves_within_a_regime(
    spec: str, sizes: tuple[int, ...], regime: str, isa: str, dtype: torch.dtype
) -> None:
    tensors = random_tensors(sizes, parse_spec(spec), dtype)
    x = torch.randn(400, sizes[0]).to(dtype)
    with using_isa(isa):
        possible = [m for m in NATURAL_REGIMES[regime] if not left_to_torch(x[:m], tensors)]
        x = x[: possible[-1]]
        with using_threads(1):
            expected = chain(x, tensors, spec)
        for count in (1, 2, 3):
            for rows in possible:
                with using_threads(count), kernel_runs(*NOT_PACKED):
                    y = chain(x[:rows], tensors, spec)
                assert torch.equal(y, expected[:rows]), (rows, count, last_run())
                assert torch.equal(chain(x[-rows:], tensors, spec), expected[-rows:])


@pytest.mark.parametrize("isa", ISAS)
@given(block=blocks(), count=threads)
@settings(max_examples=25)
def test_the_same_call_gives_the_same_bits(isa: str, block: Block, count: int) -> None:
    with using_isa(isa), using_threads(count):
        natural = not_packed(block.x, block.tensors)
        for op, weights in ((chain, natural), (packed_chain, {"packed"})):
            with kernel_runs(*weights, calls=3):
                first, second, third = (op(block.x, block.tensors, block.spec) for _ in range(3))
            torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(first, third, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("forms", CHAINS, ids=CHAIN_IDS)
def test_a_group_of_one_is_a_chain_of_one(
    forms: tuple[LayerForm, ...], dtype: torch.dtype, isa: str
) -> None:
    spec = str(forms[0])
    tensors = random_tensors((31, 50), forms[:1], dtype)
    with using_isa(isa):
        for rows in (1, 7, 40):
            x = torch.randn(rows, 31).to(dtype)
            with kernel_runs(*NOT_PACKED, calls=2):
                assert torch.equal(group(x, tensors, spec)[0], chain(x, tensors, spec))
            with kernel_runs("packed", calls=2):
                assert torch.equal(
                    packed_group(x, tensors, spec)[0], packed_chain(x, tensors, spec)
                )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_errors_of_equal_products_do_not_pile_up(rows: int, isa: str) -> None:
    """Equal products are rounded the same way again and again. A running sum of 256 of them may be
    off by 64 units in the last place; 3072 of them are not off by more."""
    K = 3072
    x, w = (torch.randn(n, 1).expand(n, K) for n in (rows, 50))
    exact = x.double() @ w.double().mT
    with using_isa(isa):
        for op, weights in ((chain, NOT_PACKED), (packed_chain, {"packed"})):
            with kernel_runs(*weights):
                y = op(x, [w], "identity")
            assert ((y - exact).abs() / exact.abs()).max() <= 72 * torch.finfo(torch.float32).eps


# ---- which weights are read how ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("layout", "spec", "rows", "weights"),
    [
        ("[out, in]", "gelu/b;identity/b", 1, "natural"),
        ("[out, in]", "gelu/b;identity/b", 16, "natural"),
        ("[out, in]", "gelu/b;identity/b", 17, "repacked"),
        ("[in, out]", "gelu/b/t;identity/b/t", 16, "natural"),
        ("[in, out]", "gelu/b/t;identity/b/t", 17, "repacked"),
        ("gate and up", "silu/separate;identity", 16, "natural"),
        ("gate and up in one", "silu/first;identity", 16, "natural"),
    ],
)
def test_weights_are_read_where_they_lie_up_to_16_rows(
    layout: str, spec: str, rows: int, weights: str, dtype: torch.dtype
) -> None:
    tensors = random_tensors((64, 100, 24), parse_spec(spec), dtype)
    if layout == "[in, out]" and dtype == torch.bfloat16:
        weights = "repacked"  # its panels have an order of their own
    with kernel_runs(weights):
        chain(torch.randn(rows, 64).to(dtype), tensors, spec)


@pytest.mark.parametrize("is_group", [False, True], ids=["chain", "group"])
@pytest.mark.parametrize("isa", ISAS)
def test_big_bf16_calls_are_left_to_torch_where_it_multiplies_bf16(
    isa: str, is_group: bool
) -> None:
    """On such CPUs with the widest kernels, and nowhere else; the rule holds all the same."""
    forms = parse_spec("gelu/b;silu/first;identity/b")
    sizes = (256, 256, 256, 256)
    spec = format_spec(forms)
    tensors = random_tensors(sizes, forms, torch.bfloat16)
    native = isa == "avx512" and torch.cpu._is_avx512_bf16_supported()
    with using_isa(isa), using_threads(1):
        for rows, big in ((1, False), (7, False), (100, True)):
            x = torch.randn(rows, 256).bfloat16()
            weights = {"composed"} if big and native else NOT_PACKED
            with kernel_runs(*weights):
                found = check_block(
                    partial(group if is_group else chain, spec=spec),
                    x,
                    tensors,
                    forms,
                    group=is_group,
                )
            all_ok(found)


@pytest.mark.parametrize(
    ("rows", "sizes", "partition"),
    [(1, (8, 8), "single"), (4, (768, 768, 768), "columns"), (400, (64, 64, 64), "rows")],
)
def test_work_is_split_as_it_should_be(rows: int, sizes: tuple[int, ...], partition: str) -> None:
    spec = ";".join(["relu"] * (len(sizes) - 1))
    with using_threads(2), kernel_runs("packed"):
        packed_chain(torch.randn(rows, sizes[0]), random_tensors(sizes, parse_spec(spec)), spec)
    assert last_run()["partition"] == partition
    assert last_run()["threads"] == (1 if partition == "single" else 2)


# ---- NaN, Inf, denormals, huge and tiny ----

SPECIALS = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0)


@pytest.mark.parametrize("packed", [False, True], ids=["natural", "packed"])
@pytest.mark.parametrize("isa", ISAS)
@given(data=st.data(), count=threads)
@settings(max_examples=60)
def test_nan_and_inf_come_out_where_eagers_do(
    isa: str, packed: bool, data: st.DataObject, count: int
) -> None:
    block = data.draw(blocks(most_size=123, most_rows=40, most_layers=3, plain=True))
    for _ in range(data.draw(st.integers(1, 3))):
        # x more often: one bad weight spoils a whole column, then everything.
        target = data.draw(st.sampled_from([block.x] * 3 + block.tensors))
        at = tuple(data.draw(st.integers(0, size - 1)) for size in target.shape)
        target[at] = data.draw(st.sampled_from(SPECIALS))
    with using_isa(isa):
        all_within(judged(block, is_group=False, packed=packed, count=count))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ACTIVATION_TEXTS)
def test_activations_of_special_values(activation: str, isa: str, dtype: torch.dtype) -> None:
    """Through a product with 1: exactly eager's NaN, Inf and signs of zero."""
    info = torch.finfo(dtype)
    step = info.tiny * info.eps
    values = [*SPECIALS, 1e-3, -1e-3, 4.0, -4.0, 30.0, -30.0, 200.0, -200.0]
    values += [info.max, -info.max, info.tiny, -info.tiny, step, -step]
    x = torch.tensor(values, dtype=torch.float64).to(dtype).unsqueeze(1)
    one = torch.ones(1, 1, dtype=dtype)
    forms = parse_spec(activation)
    spec = format_spec(forms)
    with using_isa(isa):
        for op, weights in ((chain, NOT_PACKED), (packed_chain, {"packed"})):
            with kernel_runs(*weights):
                all_within(check_block(partial(op, spec=spec), x, [one], forms))


def sums_stay_finite(block: Block) -> bool:
    """Where a sum overflows on the way, its order decides between NaN, Inf and a number."""
    most = max(torch.finfo(block.x.dtype).max, torch.finfo(torch.float32).max)
    hidden = block.x.double()
    for form, own in split_tensors(block.forms, [t.double() for t in block.tensors]):
        weights = [t.mT if form.transposed else t for t in own if t.dim() == 2]
        if any(not (hidden.abs() @ w.abs().mT).max() < most / 2 for w in weights):
            return False
        hidden = reference.layer(hidden, form, own)
        if not hidden.abs().max() < most / 2:
            return False
    return True


@pytest.mark.parametrize("packed", [False, True], ids=["natural", "packed"])
@pytest.mark.parametrize("isa", ISAS)
@given(data=st.data(), count=threads)
@settings(max_examples=60)
def test_huge_tiny_and_denormal_values(
    isa: str, packed: bool, data: st.DataObject, count: int
) -> None:
    """Every tensor at a magnitude of its own, from denormal to where fp16 overflows."""
    block = data.draw(blocks(most_size=123, most_rows=40, most_layers=3, plain=True))
    info = torch.finfo(block.x.dtype)
    sizes = (
        info.tiny * info.eps * 10,
        info.tiny,
        info.tiny**0.5,
        1.0,
        info.max**0.5,
        info.max / 16,
    )
    for t in (block.x, *block.tensors):
        t.copy_((t.double() * data.draw(st.sampled_from(sizes))).clamp(-info.max, info.max))
    assume(sums_stay_finite(block))
    with using_isa(isa):
        all_within(judged(block, is_group=False, packed=packed, count=count))


# ---- shapes ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 31), (4, 0, 31), (0, 0, 2, 31)])
def test_zero_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """No kernel runs on nothing; the result has its shape and gradients are zeros."""
    forms = parse_spec("gelu/b;identity/b")
    tensors = [t.requires_grad_() for t in random_tensors((31, 8, 5), forms, dtype)]
    x = torch.empty(shape, dtype=dtype, requires_grad=True)
    with kernel_runs(calls=0):
        y = chain(x, tensors, "gelu/b;identity/b")
        y2 = packed_chain(x.detach(), [t.detach() for t in tensors], "gelu/b;identity/b")
        ys = group(x, tensors[:2], "gelu/b")
    assert y.shape == y2.shape == (*shape[:-1], 5)
    assert ys[0].shape == (*shape[:-1], 8)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    for t in tensors:
        assert t.grad is not None
        assert not t.grad.any()


@pytest.mark.parametrize("layers", [1, 2])
def test_the_output_is_fresh(layers: int) -> None:
    """Not a view of anything, also for what computes nothing but a copy."""
    x, eye = torch.randn(4, 16), torch.eye(16)
    spec = ";".join(["identity"] * layers)
    with kernel_runs("natural"):
        y = chain(x, [eye] * layers, spec)
    assert torch.equal(y, x)
    y.fill_(7.0)
    assert not (x == 7.0).any()
    assert torch.equal(eye, torch.eye(16))


def test_weights_may_overlap_and_repeat() -> None:
    """One tensor in two places, and one that is its own bias's neighbour."""
    w = torch.randn(24, 24) / 5
    spec = "tanh/b;tanh/b;identity"
    tensors = [w, w[0], w.t(), w[:, 1], w]
    forms = parse_spec(spec)
    for op, weights in ((chain, NOT_PACKED), (packed_chain, {"packed"})):
        with kernel_runs(*weights):
            all_ok(check_block(partial(op, spec=spec), torch.randn(9, 24), tensors, forms))
