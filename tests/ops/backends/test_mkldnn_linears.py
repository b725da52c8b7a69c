"""oneDNN's linears: eager's numbers on any input, and one op for a product with its activation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from tests.support import strategies
from tests.support.backend_samples import CPU, chain_of
from tests.support.helpers import (
    ACTIVATION_TEXTS,
    CHAIN_IDS,
    CHAINS,
    all_ok,
    all_within,
    random_tensors,
)
from torch import Tensor

from torchweld.core.blocks import LayerForm
from torchweld.core.errors import UnsupportedError
from torchweld.numerics.numerical_rule import check_block
from torchweld.ops.backends import Form, mkldnn_linears
from torchweld.ops.backends.torch_backend import BACKEND
from torchweld.profiles.dispatch_counts import count

pytestmark = pytest.mark.skipif(
    bool(mkldnn_linears.reasons(torch.float32, CPU)), reason="this torch has no oneDNN linears"
)
DTYPES = [
    d for d in (torch.float32, torch.bfloat16, torch.float16) if not mkldnn_linears.reasons(d, CPU)
]


def run_chain(forms: Sequence[LayerForm], x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    y = BACKEND.build(Form.of("chain", forms, tensors), tensors, "mkldnn")(x)
    assert isinstance(y, Tensor)
    assert y.is_contiguous()
    return y


@given(block=strategies.blocks(dtypes=DTYPES, most_rows=16, most_size=123, most_layers=3))
def test_any_chain_obeys_the_numerical_rule(block: strategies.Block) -> None:
    found = check_block(
        lambda x, tensors: run_chain(block.forms, x, tensors), block.x, block.tensors, block.forms
    )
    all_within(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATION_TEXTS)
def test_every_activation_obeys_the_rule(activation: str, dtype: torch.dtype) -> None:
    block, tensors = chain_of(f"{activation}/b;identity", (24, 40, 9), dtype)
    x = torch.randn(7, 24).mul_(3.0).to(dtype)
    all_ok(check_block(lambda x, ts: run_chain(block.forms, x, ts), x, tensors, block.forms))


@pytest.mark.parametrize("activation", ["relu", "relu2", "leaky_relu", "tanh", "silu", "gelu"])
def test_nan_stays_nan(activation: str) -> None:
    block, tensors = chain_of(activation, (8, 8))
    x = torch.randn(2, 8)
    x[1, 3] = torch.nan
    with torch.no_grad():
        y = run_chain(block.forms, x, tensors)
    assert not y[0].isnan().any()
    assert y[1].isnan().all()


@torch.no_grad()
@pytest.mark.parametrize("forms", CHAINS, ids=CHAIN_IDS)
def test_a_gated_layer_is_two_ops_and_any_other_one(forms: tuple[LayerForm, ...]) -> None:
    tensors = random_tensors((6, 16, 16, 5)[: len(forms) + 1], forms)
    run = BACKEND.build(Form.of("chain", forms, tensors), tensors, "mkldnn")
    x = torch.randn(2, 3, 6)
    counts = count(lambda: run(x))
    gated = sum(form.gate != "none" for form in forms)
    assert len(counts.ops) == len(forms) + gated == counts.buffers
    assert {op.split(".")[1] for op in counts.ops} == {"_linear_pointwise"}


def test_what_it_cannot_do_is_said() -> None:
    block, tensors = chain_of("gelu", (8, 8), torch.float64)
    assert mkldnn_linears.reasons(torch.float64, CPU) == [
        "oneDNN's linears take float32, bfloat16 and float16, not torch.float64"
    ]
    assert "cuda" in mkldnn_linears.reasons(torch.float32, torch.device("cuda"))[0]
    with pytest.raises(UnsupportedError, match="mode mkldnn cannot run chain 8→8"):
        BACKEND.build(block, tensors, "mkldnn")
