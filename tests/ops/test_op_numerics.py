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
from tests.support.helpers import (
    ACTIVATION_TEXTS,
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
from tests.support.strategies import Block, blocks
from torch import Tensor

from torchweld.core.blocks import GATES, format_spec, parse_spec, split_tensors
from torchweld.numerics.numerical_rule import Judgement, check_block
from torchweld.ops.backends import reference_backend

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
        assert isinstance(ys, list) == is_group
        for y in ys if isinstance(ys, list) else [ys]:
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
    """Each is tried as a hidden and as the last one; every result is big enough to judge."""
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
    """A product with 1 passes them on: exactly eager's NaN, Inf and signs of zero."""
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
        hidden = reference_backend.layer(hidden, form, own)
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
    """It is a view of nothing, even if all that is computed is a copy."""
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
