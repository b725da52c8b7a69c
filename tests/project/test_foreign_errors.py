"""Exceptions that are not ours pass through welded modules, tracing and measuring untouched."""

from __future__ import annotations

import copy
import itertools
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.helpers import ISAS
from tests.support.swap_blocks import X, model_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import torchweld as tw
from torchweld.core.errors import OutOfMemoryError, RefusedError
from torchweld.core.passing_exceptions import is_interrupt, is_no_memory
from torchweld.welds.swapping.swap import stats

compiled = pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine")


def training_pair() -> tuple[nn.Module, nn.Module]:
    """Two MLPs in a row, each welded for training, and the same without."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)),
        nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)),
    )
    plain = copy.deepcopy(model)
    x = torch.randn(4, 6)
    return tw.apply(model, tw.plan(model, x, training=True, force=True)), plain


# ---- gradient checkpointing ----


@compiled
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_train_as_the_original_does(early_stop: bool, reentrant: bool) -> None:
    model, plain = training_pair()
    x = torch.randn(4, 6)

    def step(m: nn.Module) -> list[Tensor]:
        given = x.clone().requires_grad_()
        with set_checkpoint_early_stop(early_stop):
            y = given
            for block in m:  # type: ignore[attr-defined]
                y = checkpoint(block, y, use_reentrant=reentrant)
            y.square().sum().backward()
        assert given.grad is not None
        return [y.detach(), given.grad, *(p.grad for p in m.parameters() if p.grad is not None)]

    found, expected = step(model), step(plain)
    assert len(found) == len(expected) == 2 + 8
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert not any(of_block.originals for of_block in stats(model).values())


@compiled
def test_a_whole_model_under_one_checkpoint_trains_as_the_original_does() -> None:
    model, plain = training_pair()
    x = torch.randn(4, 6)
    for m in (model, plain):
        checkpoint(m, x, use_reentrant=False).square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


# ---- hooks of saved tensors ----


class AlarmError(Exception):
    """An error that a signal handler or anyone's hook may raise."""


ERRORS = [
    ValueError("of a hook"),
    RuntimeError("of a hook"),
    MemoryError("of a hook"),
    TimeoutError("of a hook"),
    KeyboardInterrupt("of a hook"),
    AlarmError("of a hook"),
]


@compiled
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("make", ["welded", "fused"])
def test_what_a_hook_raises_arrives_unchanged(make: str, error: BaseException) -> None:
    model: nn.Module = tw.FusedMLP((6, 12, 6)) if make == "fused" else training_pair()[0]
    calls = 0

    def pack(_: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        raise error

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        pytest.raises(type(error)) as caught,
    ):
        model(torch.randn(4, 6))
    assert caught.value is error
    assert calls == 1  # the original was not tried


@compiled
def test_what_an_unpack_hook_raises_arrives_unchanged() -> None:
    error = RuntimeError("of a hook")

    def unpack(_: Tensor) -> Tensor:
        raise error

    model, _ = training_pair()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        y = model(torch.randn(4, 6))
        with pytest.raises(RuntimeError) as caught:
            y.sum().backward()
    assert caught.value is error


@compiled
def test_what_a_dispatch_mode_raises_arrives_unchanged() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    error = ValueError("of a mode")

    class Raising(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            raise error

    model, _ = model_of("mlp")
    with torch.no_grad():
        model(X)
        with Raising(), pytest.raises(ValueError, match="of a mode") as caught:
            model(X)
    assert caught.value is error


# ---- our own ----


@compiled
def test_a_refusal_of_the_op_has_a_type_of_ours() -> None:
    with pytest.raises(RefusedError, match="takes 6 features, but x has 5"):
        tw.FusedMLP((6, 12, 6))(torch.randn(4, 5))


@compiled
def test_too_little_memory_is_ours_and_torchs_and_pythons() -> None:
    model = tw.FusedMLP((1, 1 << 20), "relu").eval()
    with torch.no_grad(), pytest.raises(OutOfMemoryError, match="llocat") as caught:
        model(torch.zeros(1, 1).expand(1 << 34, 1))
    assert isinstance(caught.value, MemoryError)
    assert isinstance(caught.value, RuntimeError)
    assert is_no_memory(caught.value)


# ---- tracing, confirming, measuring ----


class Stopped(nn.Module):
    """Raises in the run of that number and after: the first, the trace, the confirmation."""

    def __init__(self, at: int, error: Callable[[], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        runs = itertools.count(1)
        self.step = lambda: error() if next(runs) >= at else None

    def forward(self, x: Tensor) -> Tensor:
        self.step()
        y: Tensor = self.linear(x).relu()
        return y


def throw(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize(
    "error", [TimeoutError("late"), KeyboardInterrupt("late")], ids=lambda e: type(e).__name__
)
def test_finding_passes_timeouts_and_interrupts_on(at: int, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        tw.find(Stopped(at, partial(throw, error)), torch.randn(4, 6))
    assert caught.value is error


@pytest.mark.parametrize("at", [2, 3])
def test_finding_passes_too_little_memory_on(at: int) -> None:
    with pytest.raises(MemoryError):
        tw.find(Stopped(at, partial(throw, MemoryError())), torch.randn(4, 6))


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="no alarms on this system")
def test_finding_passes_on_what_a_signal_handler_raises(at: int) -> None:
    def handler(number: int, frame: Any) -> None:
        raise AlarmError("late")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(AlarmError):
            tw.find(Stopped(at, partial(signal.raise_signal, signal.SIGALRM)), torch.randn(4, 6))
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_ordinary_error_in_a_trace_is_a_refusal_still() -> None:
    found = tw.find(Stopped(2, partial(throw, ValueError("odd"))), torch.randn(4, 6))
    assert any("odd" in refusal.reason for refusal in found.refused), found.refused


def test_an_error_met_while_a_timeout_is_handled_is_judged_by_itself() -> None:
    error = ValueError()
    error.__context__ = TimeoutError()
    assert not is_interrupt(error)


def test_an_error_raised_from_a_timeout_is_one() -> None:
    error = ValueError()
    error.__cause__ = TimeoutError()
    assert is_interrupt(error)


def test_measuring_passes_timeouts_on() -> None:
    error = TimeoutError("late")
    with pytest.raises(TimeoutError) as caught:
        tw.compare(partial(throw, error), lambda: None, budget_s=0.1)
    assert caught.value is error
