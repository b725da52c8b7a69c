"""`tw.expect` counts what a block launches, in every mode, and fails so that one sees why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchweld.core.errors import TorchweldError
from torchweld.ops.fused_mlp import FusedMLP
from torchweld.profiles.expecting.expectation import ExpectationError, expect


@pytest.fixture
def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 8)


class Layer(nn.Module):
    def __init__(self, late: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), late)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Layers(nn.Module):
    """A model with paths such as layers.0.mlp; the last layer has one more activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*map(Layer, (nn.Identity(), nn.Identity(), nn.ReLU())))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


# ---- what counts ----


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_an_mlp_counts_the_same_in_every_grad_mode(
    mlp: nn.Module, x: Tensor, mode: Callable[[], torch.no_grad]
) -> None:
    with mode(), expect(linear=2, pointwise=1, copies=0, fused=0, ops=3) as e:
        mlp(x)
    assert [op.name for op in e.ops] == ["aten::addmm", "aten::gelu", "aten::addmm"]
    assert e.ops[0].inputs[1] is not None
    assert e.ops[0].inputs[1].shape == (6, 8)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 8)])
def test_a_linear_is_one_linear_and_no_copy(bias: bool, shape: tuple[int, ...]) -> None:
    linear, x = nn.Linear(8, 4, bias=bias), torch.randn(shape)
    with expect(linear=1, copies=0, ops=1):
        linear(x)


@pytest.mark.parametrize(
    ("moves", "count"),
    [
        (lambda x: x.contiguous(), 0),
        (lambda x: x.transpose(0, 1).contiguous(), 1),
        (lambda x: x.to(torch.float32), 0),
        (lambda x: x.to(torch.float64), 1),
        (lambda x: x.clone(), 1),
        (lambda x: x.reshape(6, 8), 0),
        (lambda x: x.transpose(0, 1).reshape(6, 8), 1),
        (lambda x: torch.cat([x, x]), 1),
        (lambda x: torch.empty_like(x).copy_(x), 1),
    ],
)
def test_data_that_move_are_one_copy_and_those_that_stay_none(
    x: Tensor, moves: Callable[[Tensor], Tensor], count: int
) -> None:
    with expect(copies=count, ops=count):
        moves(x)


@pytest.mark.parametrize(
    ("counter", "run"),
    [
        ("bmm", lambda x: torch.bmm(x, x.transpose(1, 2))),
        ("attention", lambda x: F.scaled_dot_product_attention(*[x.unsqueeze(1)] * 3)),
        ("convolutions", lambda x: F.conv1d(x, torch.ones(1, 3, 2))),
        ("pointwise", torch.tanh),
        ("reductions", torch.sum),
        ("norms", lambda x: F.layer_norm(x, (8,))),
        ("norms", lambda x: F.softmax(x, -1)),
        ("gathers", lambda x: F.embedding(torch.tensor([1]), x[0])),
        ("random", torch.rand_like),
        ("fills", torch.zeros_like),
    ],
)
def test_each_kind_of_work_has_its_counter(
    x: Tensor, counter: str, run: Callable[[Tensor], Tensor]
) -> None:
    run(x)
    with torch.no_grad(), expect() as e:
        run(x)
    made_on_the_way = {"convolutions": {"fills": 1}}.get(counter, {})
    work = {
        name: n for name, n in e.counts.items() if n and name not in ("metadata", "allocations")
    }
    assert work == {counter: 1, **made_on_the_way, "ops": 1 + sum(made_on_the_way.values())}


def test_views_and_allocations_are_seen_but_launch_nothing(x: Tensor) -> None:
    with expect(metadata=2, allocations=1, ops=0):
        x.transpose(0, 1).view(3, 2, 2, 4)
        torch.empty(3)


def test_nothing_ran_confirms_zeros_and_breaks_all_else() -> None:
    with expect(linear=0, fused=0, ops="<=12"):
        pass
    with pytest.raises(ExpectationError, match="no op ran inside the block"), expect(ops=">0"):
        pass


def test_a_block_without_guesses_just_counts(mlp: nn.Module, x: Tensor) -> None:
    with expect() as e:
        mlp(x)
    assert (e.counts["linear"], e.counts["ops"], e.counts["bmm"]) == (2, 3, 0)


# ---- fused ----


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_a_fused_mlp_is_one_fused_op_and_no_linear(gated: bool, training: bool, x: Tensor) -> None:
    fused = FusedMLP((8, 16, 4), gated=gated, packing=False).train(training)
    with expect(fused=1, linear=0, pointwise=0, copies=0, ops=1):
        fused(x)


def test_the_packed_copy_is_one_copy_made_once(x: Tensor) -> None:
    fused = FusedMLP((8, 16, 4)).eval()
    with torch.no_grad():
        with expect(fused=1, copies=1, ops=2):
            fused(x)
        with expect(fused=1, copies=0, ops=1):
            fused(x)


def test_a_fused_path_that_stopped_being_fused_is_found_out(x: Tensor) -> None:
    fused = FusedMLP((8, 16, 4)).eval()
    with pytest.raises(ExpectationError, match="aten::mm"), expect(fused=1):
        torch.func.vmap(fused)(x)  # composed of aten's ops there


# ---- failing ----


def test_a_failure_shows_guess_and_truth_and_the_ops_with_their_module(x: Tensor) -> None:
    model = Layers()
    with (
        pytest.raises(ExpectationError) as caught,
        expect(model=model, linear=6, pointwise="<=6") as e,
    ):
        model(x)
    text = str(caught.value)
    assert text.splitlines()[:5] == [
        "1 of 2 guesses did not hold",
        "",
        "             guess  truth",
        "  linear         6      6",
        "  pointwise    <=6      7  <-",
    ]
    assert "    1 x aten::add  (2x3x8, 2x3x8)  in layers.0\n" in text
    assert "    1 x aten::relu  (2x3x8)  in layers.2.mlp.3" in text
    assert "addmm" not in text
    assert e.counts["pointwise"] == 7  # the truth is kept


def test_a_failure_is_a_failed_assertion_and_not_an_error_of_ours(
    mlp: nn.Module, x: Tensor
) -> None:
    with pytest.raises(AssertionError) as caught, expect(linear=1):
        mlp(x)
    assert not isinstance(caught.value, ValueError)
    # pytest leaves such frames out, so that the test's own line is the last one shown.
    ours = [e for e in caught.traceback if Path(e.path).name == "expectation.py"]
    assert ours
    assert all(entry.ishidden(caught) for entry in ours)


@pytest.mark.parametrize(
    "wrong", [{"linera": 3}, {"linear": "three"}, {"modules": {"*": {"linear": 1}}}]
)
def test_a_wrong_guess_is_refused_before_anything_runs(wrong: dict[str, object]) -> None:
    ran = []
    with pytest.raises(TorchweldError), expect(**wrong):  # type: ignore[arg-type]
        ran.append(True)
    assert not ran


def test_an_exception_in_the_block_passes_through_untouched(mlp: nn.Sequential, x: Tensor) -> None:
    error = RuntimeError("mine")
    before = dict(mlp[0].__dict__)

    def fail() -> None:
        mlp(x)
        raise error

    with pytest.raises(RuntimeError) as caught, expect(linear=7, model=mlp) as e:
        fail()
    assert caught.value is error
    assert error.__context__ is None
    assert mlp[0].__dict__ == before
    with pytest.raises(TorchweldError, match="ended without an error"):
        _ = e.counts
    with expect(linear=2):  # and the profiler is free again
        mlp(x)


# ---- modules ----


def test_each_matching_module_has_to_hold(x: Tensor) -> None:
    model = Layers()
    with expect(
        model=model,
        modules={
            "layers.*.mlp": {"linear": 2, "pointwise": "1..2", "norms": 0},
            "layers.*.norm": {"norms": 1, "ops": 1},
            "layers.1.mlp.0": {"linear": 1},
        },
        norms=3,
    ):
        model(x)
    with (
        pytest.raises(ExpectationError) as caught,
        expect(model=model, modules={"layers.*.mlp": {"pointwise": 1}}),
    ):
        model(x)
    rows = [(row.module, row.truth) for row in caught.value.verdict.rows]
    assert rows == [("layers.0.mlp", 1), ("layers.1.mlp", 1), ("layers.2.mlp", 2)]
    assert "layers.2.mlp: pointwise, 2 in all:" in str(caught.value)
    assert "layers.0.mlp: " not in str(caught.value)


def test_two_calls_of_a_module_add_up(mlp: nn.Module, x: Tensor) -> None:
    with expect(model=mlp, modules={"0": {"linear": 2}}):
        mlp(x)
        mlp(x)


def test_patterns_that_match_nothing_or_twice_are_refused() -> None:
    model = Layers()
    with pytest.raises(
        TorchweldError, match=r"no module .* matches 'layers.\*.mpl'.*layers.\d.mlp"
    ):
        expect(model=model, modules={"layers.*.mpl": {"linear": 2}})
    with pytest.raises(TorchweldError, match=r"two patterns of modules= guess linear for layers.0"):
        expect(model=model, modules={"*.mlp": {"linear": 2}, "layers.0.mlp": {"linear": 1}})
    with pytest.raises(TorchweldError, match="give model= too"):
        expect(modules={"layers.*": {"linear": 2}})


# ---- forward and backward ----


def test_only_the_forward_pass_counts_unless_said(mlp: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1)

    def step() -> None:
        checkpoint(mlp, x, use_reentrant=False).sum().backward()
        optimizer.step()

    with expect(linear=2, pointwise=1, reductions=1, ops=4):
        step()
    # Forward, computed again, backward.
    with expect(linear=2 + 2 + 3, backward=True, model=mlp) as e:
        step()
    assert {op.phase for op in e.ops} == {"forward", "recompute", "backward", "optimizer"}


def test_backward_work_belongs_to_the_module_that_caused_it(mlp: nn.Module, x: Tensor) -> None:
    modules = {"0": {"linear": 2}, "1": {"pointwise": 2}, "2": {"linear": 3}}
    with expect(model=mlp, modules=modules, backward=True):
        mlp(x).sum().backward()  # the first Linear's input needs no gradient
