"""Operations and bytes of ops, against torch's own counter and against what was really moved."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.dispatched_ops import ops_of
from tests.support.made_profiles import Builder, tensor
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import torchweld as tw
from torchweld import ops
from torchweld.profiles.accounting.op_costs import arithmetic_dtype, work_of
from torchweld.profiles.attributing.op_kinds import Kind, kind_of
from torchweld.profiles.profile import Op, Tensor

HEAVY = ("product", "convolution", "attention")


def op(name: str, *inputs: Tensor | None, makes: int | tuple[int, int] | None = None) -> Op:
    made = Builder()
    made.op(name, inputs=inputs, makes=makes)
    return made.ops[0]


class ExpectedCost(NamedTuple):
    flops: int
    read_bytes: int
    written_bytes: int


def cost_of(found: Op, kind: Kind) -> ExpectedCost | None:
    work = work_of(found, kind)
    if work.flops is None:
        return None
    return ExpectedCost(work.flops, work.read_bytes, work.written_bytes)


def cost(
    name: str, *inputs: Tensor | None, makes: int | tuple[int, int] | None = None
) -> ExpectedCost:
    found = cost_of(op(name, *inputs, makes=makes), kind_of(name))
    assert found is not None
    return found


def heavy_flops(ops: list[Op]) -> int:
    found = [cost_of(item, kind_of(item.name)) for item in ops if kind_of(item.name) in HEAVY]
    assert found
    assert None not in found
    return sum(item.flops for item in found if item is not None)


# ---- against torch's own counter ----


def linear(bias: bool = True) -> Callable[[], object]:
    layer, x = nn.Linear(13, 7, bias=bias), torch.randn(3, 5, 13, requires_grad=True)
    return lambda: layer(x).sum().backward()


def conv(**options: Any) -> Callable[[], object]:
    layer = nn.Conv2d(4, 6, 3, **options)
    x = torch.randn(2, 4, 9, 11, requires_grad=True)
    return lambda: layer(x).sum().backward()


def conv_input_without_gradient() -> Callable[[], object]:
    layer, x = nn.Conv1d(4, 6, 3), torch.randn(2, 4, 17)
    return lambda: layer(x).sum().backward()


def batched() -> Callable[[], object]:
    a, b = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 5, 6, requires_grad=True)
    return lambda: (torch.bmm(a, b).sum() + torch.baddbmm(torch.ones(1), a, b).sum()).backward()


def math_attention() -> Callable[[], object]:
    q, k, v = (torch.randn(2, 3, n, 8, requires_grad=True) for n in (5, 7, 7))

    def run() -> None:
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            F.scaled_dot_product_attention(q, k, v).sum().backward()

    return run


@pytest.mark.parametrize(
    "run",
    [
        linear(),
        linear(bias=False),
        conv(),
        conv(stride=2, padding=1),
        conv(dilation=2, padding=2),
        conv_input_without_gradient(),
        batched(),
        math_attention(),
    ],
)
def test_products_are_counted_as_torch_counts_them(run: Callable[[], object]) -> None:
    counter = FlopCounterMode(display=False)
    with counter:
        run()
    assert counter.get_total_flops() > 0
    assert heavy_flops(ops_of(run)) == counter.get_total_flops()


def test_a_grouped_convolution_counts_as_its_groups() -> None:
    """Torch's counter forgets the groups in the gradient of the weight."""
    whole = heavy_flops(ops_of(conv(groups=2)))
    half = nn.Conv2d(2, 3, 3)
    x = torch.randn(2, 2, 9, 11, requires_grad=True)
    assert whole == 2 * heavy_flops(ops_of(lambda: half(x).sum().backward()))


def test_fused_attention_is_counted_as_torch_counts_it_on_other_devices() -> None:
    """Torch's counter knows the names that GPUs use; the shapes are the same."""
    q, k, v = (torch.randn(2, 3, n, 8, requires_grad=True) for n in (5, 7, 7))
    shapes = [t.shape for t in (q, k, v)]
    aten = torch.ops.aten
    forward = flop_registry[aten._scaled_dot_product_flash_attention](*shapes)
    backward = flop_registry[aten._scaled_dot_product_flash_attention_backward](q.shape, *shapes)
    seen = ops_of(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward())
    found = {
        item.name: cost_of(item, "attention") for item in seen if kind_of(item.name) == "attention"
    }
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert {key: value.flops for key, value in found.items() if value} == {
        name: forward,
        f"{name}_backward": backward,
    }


def test_grouped_query_attention_counts_the_heads_of_the_query() -> None:
    q, kv = tensor(2, 8, 5, 16), tensor(2, 2, 7, 16)
    found = cost("aten::_scaled_dot_product_flash_attention_for_cpu", q, kv, kv, makes=1)
    assert found.flops == 2 * 2 * (2 * 8 * 5 * 7) * 16


@pytest.mark.parametrize(
    ("name", "shapes", "flops"),
    [
        ("mv", ((5, 7), (7,)), 2 * 35),
        ("dot", ((7,), (7,)), 2 * 7),
        ("addmv", ((5,), (5, 7), (7,)), 2 * 35),
        ("addr", ((5, 7), (5,), (7,)), 2 * 35),
        ("addbmm", ((3, 5), (2, 3, 4), (2, 4, 5)), 2 * 2 * 3 * 4 * 5),
        ("addmm", ((7,), (3, 4), (4, 7)), 2 * 3 * 4 * 7),
    ],
)
def test_other_products(name: str, shapes: tuple[tuple[int, ...], ...], flops: int) -> None:
    given = [torch.ones(shape) for shape in shapes]
    (found,) = ops_of(lambda: getattr(torch, name)(*given))
    counted = cost_of(found, kind_of(found.name))
    assert counted is not None
    assert counted.flops == flops
    result = getattr(torch, name)(*given)
    assert counted.written_bytes == 4 * result.numel()
    without_memory = cost(found.name, *[tensor(*shape) for shape in shapes])
    assert without_memory.written_bytes == 4 * result.numel()


def test_products_of_complex_numbers_have_no_model() -> None:
    a = tensor(4, 4, dtype="complex64")
    assert cost_of(op("aten::mm", a, a), "product") is None


def test_integer_arithmetic_is_not_counted() -> None:
    i = tensor(8, 8, dtype="int64")
    assert cost("aten::add", i, i) == ExpectedCost(flops=0, read_bytes=1024, written_bytes=512)


# ---- torchweld's ops ----

M, K, H, N = 5, 8, 12, 6
FORMS = {
    "plain": [tw.Layer(torch.randn(H, K), torch.randn(H), "gelu"), tw.Layer(torch.randn(N, H))],
    "transposed": [tw.Layer(torch.randn(K, H), transposed=True), tw.Layer(torch.randn(N, H))],
    "separate gate": [
        tw.Layer(torch.randn(H, K), None, "silu", gate=torch.randn(H, K)),
        tw.Layer(torch.randn(N, H)),
    ],
    "packed gate": [
        tw.Layer(torch.randn(2 * H, K), None, "silu", gated="first"),
        tw.Layer(torch.randn(N, H)),
    ],
    "one layer": [tw.Layer(torch.randn(N, K), torch.randn(N), "relu")],
    "square": [tw.Layer(torch.randn(K, K)), tw.Layer(torch.randn(N, K))],
}


@pytest.mark.parametrize("form", FORMS)
def test_a_chain_is_counted_by_its_weights(form: str) -> None:
    layers, x = FORMS[form], torch.randn(M, K)
    (found,) = (op for op in ops_of(lambda: tw.mlp(x, layers=layers)) if "::chain" in op.name)
    counted = cost_of(found, kind_of(found.name))
    weights = [w for layer in layers for w in (layer.weight, layer.gate) if w is not None]
    biases = [b for layer in layers for b in (layer.bias, layer.gate_bias) if b is not None]
    assert counted == ExpectedCost(
        flops=2 * M * sum(w.numel() for w in weights),
        read_bytes=4 * (x.numel() + sum(t.numel() for t in weights + biases)),
        written_bytes=4 * M * N,
    )
    # The size of the result follows from the weights, where the recording does not tell.
    untold = cost(found.name, *found.inputs)
    assert untold.written_bytes == 4 * M * N


def test_a_group_writes_the_outputs_of_all_its_layers() -> None:
    x = torch.randn(M, K)
    layers = [tw.Layer(torch.randn(n, K)) for n in (4, 6, 6)]
    (found,) = (op for op in ops_of(lambda: tw.linears(x, layers=layers)) if "::group" in op.name)
    counted = cost_of(found, "fused")
    assert counted is not None
    assert (counted.flops, counted.written_bytes) == (2 * M * K * 16, 4 * M * 16)
    assert cost(found.name, *found.inputs).written_bytes == 4 * M * 16


@pytest.mark.skipif(ops.compiled is None, reason="only the compiled part packs weights")
def test_packed_weights_are_counted_within_what_their_padding_adds() -> None:
    layers = [torch.randn(1024, 256), torch.randn(1024), torch.randn(256, 1024)]
    x, spec = torch.randn(M, 256), "gelu/b;identity"
    packed = torch.ops.torchweld.pack(layers, spec)
    (found,) = ops_of(lambda: torch.ops.torchweld.chain_packed(x, packed, spec))
    counted = cost_of(found, kind_of(found.name))
    assert counted is not None
    exact = 2 * M * 2 * 256 * 1024
    assert exact <= counted.flops < 1.02 * exact


# ---- bytes ----


def moved(name: str, *inputs: Tensor | None, makes: int | None = None) -> tuple[int, int]:
    found = cost(name, *inputs, makes=makes)
    return found.read_bytes, found.written_bytes


def test_inputs_are_read_once_and_results_written_once() -> None:
    a, b = tensor(10, 20), tensor(20)
    assert moved("aten::add", a, b, None) == (880, 800)
    assert moved("aten::gelu", a, None) == (800, 800)
    assert moved("aten::eq", a, b) == (880, 200)
    assert moved("aten::sum", a) == (800, 0)
    assert moved("aten::cat", a, a, None) == (1600, 1600)
    assert moved("aten::native_layer_norm", a, None, b, b, None, makes=800) == (960, 800)
    assert moved("aten::_softmax", a) == (800, 800)


def test_a_result_that_the_recording_shows_counts_as_it_is() -> None:
    assert moved("aten::add", tensor(10, 20), tensor(20), makes=12345) == (880, 12345)


def test_a_broadcast_dimension_is_read_once() -> None:
    a = tensor(10, 20)
    row = tensor(10, 20, strides=(0, 1))
    assert moved("aten::mul", a, row) == (880, 800)


def test_half_precision_takes_half_the_bytes() -> None:
    a = tensor(10, 20, dtype="bfloat16")
    assert moved("aten::mul", a, a) == (800, 400)
    # A number that became a tensor does not make the result wider.
    assert moved("aten::mul", a, tensor(dtype="float64")) == (408, 400)


def test_in_place_ops_write_their_first_input() -> None:
    a, b = tensor(10, 20), tensor(20)
    work = work_of(op("aten::add_", a, b), "pointwise")
    assert work.reads == ((a.storage, 800), (b.storage, 80))
    assert work.writes == ((a.storage, 800),)


def test_results_given_as_out_are_written_and_not_read() -> None:
    a, b, out = tensor(10, 20), tensor(10, 20), tensor(10, 20)
    work = work_of(op("aten::add", a, b, None, out), "pointwise")
    assert work.reads == ((a.storage, 800), (b.storage, 800))
    assert work.writes == ((out.storage, 800),)
    total = tensor(20)
    work = work_of(op("aten::sum", a, None, None, None, total), "reduction")
    assert work.reads == ((a.storage, 800),)
    assert work.writes == ((total.storage, 80),)


def test_copies_and_fills() -> None:
    target, source = tensor(10, 20, dtype="float16"), tensor(10, 20)
    work = work_of(op("aten::copy_", target, source, None), "copy")
    assert work.reads == ((source.storage, 800),)
    assert work.writes == ((target.storage, 400),)
    assert moved("aten::fill_", target, None) == (0, 400)
    assert moved("aten::zero_", target) == (0, 400)
    assert moved("aten::bernoulli_", source, None, None) == (0, 800)
    assert moved("aten::clone", source) == (800, 800)


def test_an_embedding_reads_the_rows_it_takes() -> None:
    table, rows = tensor(50_000, 64), tensor(2, 5, dtype="int64")
    size = 10 * 64 * 4
    assert moved("aten::embedding", table, rows) == (size + 80, size)
    assert moved("aten::index_select", table, None, rows, makes=size) == (size + 80, size)
    assert moved("aten::index", table, rows) == (size + 80, size)
    gradient = tensor(2, 5, 64)
    assert moved("aten::embedding_dense_backward", gradient, rows) == (2 * size + 80, size)
    bags = tensor(2, 64)  # of five rows each
    assert moved("aten::_embedding_bag", table, rows, makes=512) == (size + 80, 512)
    assert moved("aten::_embedding_bag_dense_backward", bags, rows) == (512 + size + 80, size)


def test_scatters_touch_as_much_as_they_are_given() -> None:
    target, index, values = tensor(1000, 64), tensor(10, 64, dtype="int64"), tensor(10, 64)
    size = 10 * 64 * 4
    assert moved("aten::scatter_add_", target, None, index, values) == (2 * size + 2 * size, size)
    assert moved("aten::index_add_", target, None, tensor(10, dtype="int64"), values) == (
        2 * size + 80,
        size,
    )


def test_a_loss_reads_one_score_for_each_target() -> None:
    scores, target = tensor(32, 50_000), tensor(32, dtype="int64")
    assert moved("aten::nll_loss_forward", scores, target, None) == (32 * 4 + 32 * 8, 0)
    one = tensor()
    assert moved("aten::nll_loss_backward", one, scores, target) == (4 + 32 * 8, 32 * 4)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_fused_optimizer_writes_all_but_the_gradients(amsgrad: bool) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(layers.parameters(), fused=True, amsgrad=amsgrad)
    for p in layers.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    (found,) = (op for op in ops_of(optimizer.step) if op.name == "aten::_fused_adamw_")
    counted = cost_of(found, "optimizer")
    assert counted is not None
    elements = sum(p.numel() for p in layers.parameters())
    lists = 5 if amsgrad else 4
    assert counted.read_bytes == 4 * (lists * elements + 4)
    assert counted.written_bytes == 4 * (lists - 1) * elements
    assert counted.flops == 14 * elements


def test_foreach_ops_write_their_first_list() -> None:
    first, second = [tensor(8, 8), tensor(3)], [tensor(8, 8), tensor(3)]
    size = 4 * 67
    assert moved("aten::_foreach_add_", *first, *second, None) == (2 * size, size)
    assert moved("aten::_foreach_sqrt", *first) == (size, size)
    assert moved("aten::_foreach_zero_", *first) == (0, size)
    assert moved("aten::_foreach_addcdiv_", *first, *second, *second) == (3 * size, size)


# ---- arithmetic that is not products ----


def test_expensive_functions_cost_more_than_an_addition() -> None:
    a = tensor(100)
    assert cost("aten::add", a, a).flops == cost("aten::relu", a).flops == 100
    for name in ("gelu", "silu", "exp", "tanh", "sigmoid", "erf"):
        assert cost(f"aten::{name}", a).flops == 1000, name
    assert cost("aten::pow", a).flops == 100
    assert cost("aten::pow", a, a).flops > 1000


def test_normalisations_cost_several_operations_an_element() -> None:
    a = tensor(10, 10)
    for name in ("_softmax", "_log_softmax", "native_layer_norm", "native_layer_norm_backward"):
        assert 400 < cost(f"aten::{name}", a).flops < 2000, name


def test_what_has_no_model_says_so_and_still_moves_its_bytes() -> None:
    a = tensor(10, 10)
    for name in ("aten::sort", "mylib::op", "aten::linalg_qr"):
        assert cost_of(op(name, a), kind_of(name)) is None
        assert work_of(op(name, a), kind_of(name)).read_bytes == 400
    assert (
        cost_of(
            op("aten::mkldnn_convolution", tensor(1, 2, 8, 8), tensor(2, 2, 3, 3)), "convolution"
        )
        is None
    ), "the size of the result is not known"
    assert cost_of(op("graph_0_cpp_fused_gelu_0"), "fused") is None


def test_what_does_no_work_costs_nothing() -> None:
    a = tensor(10, 10)
    for name in ("aten::view", "aten::linear", "aten::empty", "AddmmBackward0"):
        assert cost(name, a, a) == ExpectedCost(flops=0, read_bytes=0, written_bytes=0)


def test_the_type_of_the_arithmetic_is_the_first_floating_one() -> None:
    i, h, f = tensor(2, dtype="int64"), tensor(2, dtype="bfloat16"), tensor(2)
    assert arithmetic_dtype(op("aten::mul", i, h, f)) == "bfloat16"
    assert arithmetic_dtype(op("aten::mul", i)) == "float32"
    assert arithmetic_dtype(op("aten::mul", tensor(2, dtype=""))) == "float32"


NAMES = (
    "mm addmm bmm baddbmm mv dot addr addbmm convolution convolution_backward "
    "mkldnn_convolution _scaled_dot_product_flash_attention_for_cpu add gelu sum _softmax "
    "native_layer_norm copy_ clone cat embedding index index_put_ scatter_add_ gather "
    "nll_loss_forward nll_loss_backward embedding_dense_backward _embedding_bag "
    "_embedding_bag_dense_backward fill_ bernoulli_ native_dropout "
    "_fused_adamw_ _foreach_add_ sort topk glu mkldnn_linear mkldnn_linear_backward_weights"
)
OTHERS = "torchweld::chain torchweld::group torchweld::chain_packed mkldnn::_linear_pointwise"


@pytest.mark.parametrize(
    "name", [*(f"aten::{name}" for name in NAMES.split()), *OTHERS.split(), "mkl::_mkl_linear"]
)
def test_arguments_that_do_not_fit_are_survived(name: str) -> None:
    """Traces hold anything: scalars for tensors, no shapes, no arguments."""
    odd = [None, tensor(), tensor(0), tensor(3), tensor(0, 4), tensor(2, 3, 4), tensor(1, 2, 3, 4)]
    for count in range(5):
        for shift in range(len(odd)):
            given = [odd[(shift + i) % len(odd)] for i in range(count)]
            for makes in (None, 0, 48):
                work = work_of(op(name, *given, makes=makes), kind_of(name))
                assert work.flops is None or work.flops >= 0
                assert work.read_bytes >= 0 <= work.written_bytes
                assert math.isfinite(work.read_bytes)
