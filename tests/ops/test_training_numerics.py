"""The numerical rule for every gradient: of x, of every weight and of every bias, by the kernels.

Activations, gates, dtypes, sizes, layouts and instruction sets. Each check judges both ways of
keeping, saved and recomputed.
"""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.helpers import (
    ACTIVATION_TEXTS,
    DTYPES,
    ISAS,
    all_within,
    last_run,
    random_tensors,
    using_isa,
)
from tests.support.strategies import LAYOUTS, Block, blocks, layouts
from tests.support.training_steps import (
    all_right,
    backward_runs,
    chain_training,
    gradients_for,
    judge_gradients,
)
from torch import Tensor

from torchweld.core.blocks import GATES, parse_spec
from torchweld.ops.backends import reference_backend

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),  # the kernels take as many as a test gives them
]

GELU = "gelu/b;identity/b"
GATED = "silu/separate;identity"
QKV = "identity/b;identity;silu/first/b"


# ---- activations, gates and dtypes ----

# Every day each activation meets each gate once, the dtypes in turn; the slow test has the rest.
PAIRS = [(activation, gate) for activation in ACTIVATION_TEXTS for gate in GATES]
SOME = [(*pair, dtype) for pair, dtype in zip(PAIRS, cycle(DTYPES), strict=False)]
REST = [(*pair, dtype) for pair in PAIRS for dtype in DTYPES if (*pair, dtype) not in SOME]


def check_activation(activation: str, gate: str, dtype: torch.dtype) -> None:
    spec = f"{activation}/b{'' if gate == 'none' else f'/{gate}'};{activation}/b"
    tensors = random_tensors((31, 45, 19), parse_spec(spec), dtype)
    all_right(judge_gradients(torch.randn(21, 31).to(dtype), tensors, spec))


@pytest.mark.parametrize(("activation", "gate", "dtype"), SOME)
def test_every_activation_and_gate(activation: str, gate: str, dtype: torch.dtype) -> None:
    check_activation(activation, gate, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("activation", "gate", "dtype"), REST)
def test_every_activation_gate_and_dtype(activation: str, gate: str, dtype: torch.dtype) -> None:
    check_activation(activation, gate, dtype)


# ---- sizes ----


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9, 16, 31, 64, 129, 193, 385, 511, 513, 600])
def test_any_number_of_rows(rows: int) -> None:
    """Hardly any of these fill their last block of rows."""
    tensors = random_tensors((37, 61, 21), parse_spec(GELU))
    all_right(judge_gradients(torch.randn(rows, 37), tensors, GELU, threads=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("sizes", "spec"),
    [
        ((1, 1, 1), GELU),
        ((385, 1, 385), GELU),
        ((1, 385, 1), GATED),
        ((123, 431, 3), GATED),
        ((17, 7), "gelu/b"),
        ((64, 9, 33, 128, 5, 7), "tanh/b;silu/b;relu/b;mish/b;identity/b"),
        ((256, 256), "identity"),
    ],
    ids=str,
)
def test_sizes_that_fit_no_block(sizes: tuple[int, ...], spec: str, dtype: torch.dtype) -> None:
    tensors = random_tensors(sizes, parse_spec(spec), dtype)
    all_right(judge_gradients(torch.randn(2, 9, sizes[0]).to(dtype), tensors, spec, threads=2))


@pytest.mark.parametrize("spec", [GELU, "silu/separate/b;identity/b", "gelu/first/t;identity"])
def test_bfloat16_that_may_be_left_to_torch(spec: str) -> None:
    """Big enough for torch's own products, where CPUs have them for bfloat16."""
    tensors = random_tensors((256, 512, 256), parse_spec(spec), torch.bfloat16)
    all_right(judge_gradients(torch.randn(70, 256).bfloat16(), tensors, spec, threads=2))


# ---- layouts ----


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["x", "grad", "weights"])
def test_any_strides(which: str, layout: str) -> None:
    """`.sum().backward()` hands in a gradient of stride 0; a mixer's x is turned."""
    spec = "gelu/b;silu/first/b/t;identity/interleaved/b" if which == "weights" else GELU
    sizes = (33, 20, 26, 15) if which == "weights" else (33, 20, 15)
    tensors = random_tensors(sizes, parse_spec(spec))
    x, grad = torch.randn(19, 33), torch.randn(19, 15)
    if which == "x":
        x = LAYOUTS[layout](x)
    elif which == "grad":
        grad = LAYOUTS[layout](grad)
    else:
        tensors = [LAYOUTS[layout](t) for t in tensors]
    all_right(judge_gradients(x, tensors, spec, [grad]))


@pytest.mark.parametrize("rows", [4, 40])
@pytest.mark.parametrize(("gate", "dtype"), [*zip(GATES * 2, cycle(DTYPES), strict=False)])
def test_transposed_weights_of_every_gate(gate: str, dtype: torch.dtype, rows: int) -> None:
    spec = f"gelu/t{'' if gate == 'none' else f'/{gate}'};tanh/b/t"
    tensors = random_tensors((29, 34, 11), parse_spec(spec), dtype)
    all_right(judge_gradients(torch.randn(rows, 29).to(dtype), tensors, spec))


def test_a_gradient_of_stride_zero_by_sum() -> None:
    tensors = [t.requires_grad_() for t in random_tensors((33, 20, 15), parse_spec(GELU))]
    x = torch.randn(19, 33, requires_grad=True)
    y = chain_training(x, tensors, GELU)
    expected = torch.autograd.grad(y, [x, *tensors], torch.ones_like(y), retain_graph=True)
    with backward_runs():
        y.sum().backward()
    for t, wanted in zip([x, *tensors], expected, strict=True):
        assert t.grad is not None
        assert torch.equal(t.grad, wanted)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [64, 512, 600])
def test_bias_gradients_of_equal_rows(rows: int, isa: str) -> None:
    """A loss that is a sum or a mean has them. One running sum over all rows would lose digits: its
    errors have all one sign."""
    tensors = random_tensors((9, 40), parse_spec("identity/b"))
    grad = torch.randn(1, 40).expand(rows, 40)
    with using_isa(isa):
        all_right(judge_gradients(torch.randn(rows, 9), tensors, "identity/b", [grad]))


# ---- random blocks, on every instruction set ----

threads = st.sampled_from((1, 2, 3))


def fits(block: Block, grad: Tensor) -> bool:
    """Whether all of eager's values are finite."""
    inputs = [t.detach().requires_grad_() for t in (block.x, *block.tensors)]
    y = reference_backend.chain(inputs[0], inputs[1:], block.forms)
    return all(bool(t.isfinite().all()) for t in (y, *torch.autograd.grad(y, inputs, grad)))


def check_random(
    block: Block, count: int, isa: str, layout: str = "plain", *, group: bool = False
) -> None:
    torch.manual_seed(0)  # the same at every try
    grads = gradients_for(block.x, block.tensors, block.spec, group=group)
    # Biases have sums of equal numbers, a case of its own: see above.
    grads = [LAYOUTS["plain" if layout == "expanded" else layout](grad) for grad in grads]
    # Above 65504 eager's hidden values are Inf, ours are not, and neither trains.
    assume(group or block.x.dtype != torch.float16 or fits(block, grads[0]))
    with using_isa(isa):
        found = judge_gradients(
            block.x, block.tensors, block.spec, grads, group=group, threads=count
        )
    all_within(found)


@pytest.mark.parametrize("isa", ISAS)
@given(
    block=blocks(most_layers=3, most_size=123, most_rows=193),
    count=threads,
    layout=layouts,
)
@settings(max_examples=20)
def test_random_chains(isa: str, block: Block, count: int, layout: str) -> None:
    check_random(block, count, isa, layout)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
# Not float64: its reference is eager itself, whose errors add up in deep chains.
@given(block=blocks(dtypes=DTYPES[:3]), count=threads, layout=layouts)
@settings(max_examples=400)
def test_many_random_chains(isa: str, block: Block, count: int, layout: str) -> None:
    check_random(block, count, isa, layout)


# ---- groups ----


@pytest.mark.parametrize("isa", ISAS)
@given(block=blocks(group=True, most_layers=4, most_size=123, most_rows=193), count=threads)
@settings(max_examples=15)
def test_random_groups(isa: str, block: Block, count: int) -> None:
    check_random(block, count, isa, group=True)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
@given(block=blocks(group=True, most_layers=5), count=threads, layout=layouts)
@settings(max_examples=150)
def test_many_random_groups(isa: str, block: Block, count: int, layout: str) -> None:
    check_random(block, count, isa, layout, group=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_of_every_dtype(dtype: torch.dtype) -> None:
    parts = zip(parse_spec(QKV), (64, 17, 16), strict=True)
    tensors = [t for form, n in parts for t in random_tensors((101, n), [form], dtype)]
    all_right(judge_gradients(torch.randn(21, 101).to(dtype), tensors, QKV, group=True, threads=2))


# ---- narrow blocks, whose rows are cut into parts ----


@pytest.mark.parametrize("swapped", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_gradients_of_parts_of_the_rows_add_up(
    gate: str, dtype: torch.dtype, swapped: bool
) -> None:
    spec = f"gelu/b{'' if gate == 'none' else f'/{gate}'};identity/b"
    tensors = random_tensors((64, 170, 67), parse_spec(spec), dtype)
    if swapped:
        tensors = [t.t().contiguous().t() if t.dim() == 2 else t for t in tensors]
    all_right(judge_gradients(torch.randn(131, 64).to(dtype), tensors, spec, threads=2))
    assert last_run()["partition"] == "rows"


def test_a_narrow_group_is_cut_by_rows_too() -> None:
    parts = zip(parse_spec(QKV), (64, 90, 65), strict=True)
    tensors = [t for form, n in parts for t in random_tensors((70, n), (form,))]
    all_right(judge_gradients(torch.randn(70, 70), tensors, QKV, group=True, threads=2))
    assert last_run()["partition"] == "rows"
