"""What the op's bits depend on, and which kernel reads which weights how."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.helpers import (
    CHAIN_IDS,
    CHAINS,
    DTYPES,
    ISAS,
    MULTIPLIES_BF16,
    NOT_PACKED,
    all_ok,
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

from torchweld.core.blocks import LayerForm, format_spec, parse_spec
from torchweld.numerics.numerical_rule import check_block

pytestmark = pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine")

threads = st.sampled_from((1, 2, 3))


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
    """It does not matter how many rows there are, which ones, or how many threads work."""
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


# More than the sums of 16 rows that are kept at a time, and no whole number of panels.
WIDE = 5003


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("spec", ["identity", "silu/separate"])
def test_an_output_depends_on_no_other(spec: str, isa: str, dtype: torch.dtype) -> None:
    """Weights are read from several places at once: which ones depends on how many there are."""
    tensors = random_tensors((40, WIDE), parse_spec(spec), dtype)
    with using_isa(isa), using_threads(1):
        for rows in (1, 2, 4, 7, 16):
            x = torch.randn(rows, 40).to(dtype)
            for op, weights in ((chain, NOT_PACKED), (packed_chain, {"packed"})):
                with kernel_runs(*weights, calls=4):
                    y = op(x, tensors, spec)
                    for some in (slice(0, 9), slice(100, 431), slice(WIDE - 77, WIDE)):
                        assert torch.equal(op(x, [t[some] for t in tensors], spec), y[:, some])


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
    """Only such CPUs with the widest kernels do so. The rule holds all the same."""
    forms = parse_spec("gelu/b;silu/first;identity/b")
    sizes = (256, 256, 256, 256)
    spec = format_spec(forms)
    tensors = random_tensors(sizes, forms, torch.bfloat16)
    native = isa == "avx512" and MULTIPLIES_BF16
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
