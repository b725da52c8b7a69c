"""The recording of real calls: what is kept, what is not, and that the model does not notice."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.core.test_model_inputs import Adder, Pair
from torch import Tensor, nn

from torchweld.core.errors import TorchweldError
from torchweld.core.model_inputs import as_workloads, record


def test_recorded_calls_can_be_run_again() -> None:
    model = Adder()
    xs = [torch.randn(rows, 4) for rows in (1, 3, 1, 1)]
    with record(model) as inputs:
        expected = [model(x, scale=2.0) for x in xs]
    assert inputs.counts == [3, 1]
    workloads = as_workloads(inputs)
    assert [(w.name, w.count) for w in workloads] == [("1x4 float32", 3), ("3x4 float32", 1)]
    assert torch.equal(workloads[0].run(model), expected[0])
    assert torch.equal(workloads[1].run(model), expected[1])
    assert repr(inputs) == "Recorded(3 × (1x4 float32), 1 × (3x4 float32))"
    assert inputs.copied_bytes == 4 * 4 * (1 + 3)


def test_recording_leaves_no_trace_on_the_model() -> None:
    model = Adder()
    before = dict(model.__dict__)
    with pytest.raises(RuntimeError), record(model):
        model(torch.randn(1, 5))
    before["calls"] = 1
    assert model.__dict__ == before
    assert pickle.loads(pickle.dumps(model)).calls == 1


def test_results_hooks_and_order_are_unchanged_while_recording() -> None:
    model, x = Adder(), torch.randn(2, 4)
    order: list[str] = []
    model.register_forward_pre_hook(lambda m, args: order.append("pre"))
    model.register_forward_hook(lambda m, args, y: order.append("post"))
    plain = model(x)
    with record(model):
        assert torch.equal(model(x), plain)
    assert order == ["pre", "post"] * 2


def test_inputs_are_taken_before_the_users_hooks_change_them() -> None:
    model, x = Adder(), torch.randn(2, 4)
    model.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    with record(model) as inputs:
        expected = model(x)
    assert torch.equal(inputs[0].args[0], x)
    assert torch.equal(inputs[0].call(model), expected)


def test_recorded_tensors_do_not_follow_the_original() -> None:
    model, x = Adder(), torch.randn(2, 4)
    kept = x.clone()
    with record(model) as inputs:
        model(x)
        x.zero_()
    assert torch.equal(inputs[0].args[0], kept)


def test_one_tensor_given_twice_stays_one() -> None:
    model, x = Adder(), torch.randn(4, 4)
    with record(model) as inputs:
        model(x, x)
    first, second = inputs[0].args
    assert first is second


def test_layout_and_gradient_flag_are_kept_and_history_is_not() -> None:
    model = Adder()
    leaf = torch.randn(4, 2, requires_grad=True)
    with record(model) as inputs:
        model((leaf * 2).t())
    (kept,) = inputs[0].args
    assert kept.stride() == (1, 2)
    assert kept.requires_grad
    assert kept.grad_fn is None


def test_calls_recorded_in_inference_mode_can_be_trained_on() -> None:
    model = Adder()
    with record(model) as inputs, torch.inference_mode():
        model(torch.randn(2, 4))
    inputs[0].call(model).sum().backward()
    assert model.linear.weight.grad is not None


def test_numbers_do_not_make_a_new_kind_of_call_but_flags_do() -> None:
    model, x = Adder(), torch.randn(2, 4)
    with record(model) as inputs:
        for scale in (1.0, 2.0, 3.0):
            model(x, scale=scale)
        model(x, scale=True)
    assert inputs.counts == [3, 1]


def test_calls_beyond_the_limit_are_counted_only() -> None:
    model = Adder()
    with record(model, limit=2) as inputs:
        for rows in (1, 2, 3, 4, 2):
            model(torch.randn(rows, 4))
    assert inputs.counts == [1, 2]
    assert inputs.left_out == 2
    assert "2 calls of other shapes left out" in repr(inputs)


def test_a_call_that_raises_is_not_kept() -> None:
    model = Adder()
    with record(model) as inputs:
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 5))
        model(torch.randn(2, 4))
    assert len(inputs) == 1


class Recursive(nn.Module):
    def forward(self, x: Tensor, depth: int) -> Tensor:
        return x if depth == 0 else self(x[1:], depth - 1) + 1


def test_only_the_outermost_call_is_recorded() -> None:
    with record(model := Recursive()) as inputs:
        model(torch.zeros(5), 3)
    assert [tuple(i.args[0].shape) for i in inputs] == [(5,)]


class Cache:
    """An object that a call changes, like the key-value caches of decoders."""

    def __init__(self) -> None:
        self.items: list[Tensor] = []


class Cached(nn.Module):
    def forward(self, x: Tensor, cache: Cache, seen: dict[str, int]) -> Tensor:
        cache.items.append(x)
        seen["calls"] = seen.get("calls", 0) + 1
        return torch.cat(cache.items) * seen["calls"]


def test_arguments_that_a_call_changes_are_new_at_every_run() -> None:
    model, cache = Cached(), Cache()
    seen: dict[str, Any] = {}
    with record(model) as inputs:
        prefill = model(torch.randn(5, 2), cache, seen)
        decode = model(torch.randn(1, 2), cache, seen)
        model(torch.randn(1, 2), cache, seen)
    assert inputs.counts == [1, 2]
    for _ in range(2):
        assert torch.equal(inputs[0].call(model), prefill)
        assert torch.equal(inputs[1].call(model), decode)
    assert len(cache.items) == 3


def test_what_cannot_be_copied_is_kept_itself_and_noted() -> None:
    lock = threading.Lock()

    class Locked(nn.Module):
        def forward(self, x: Tensor, guard: Any) -> Tensor:
            with guard:
                return x + 1

    with record(model := Locked()) as inputs:
        model(torch.zeros(1), lock)
        model(torch.zeros(2), lock)
    assert len(inputs.notes) == 1
    assert "lock cannot be copied and is kept itself" in inputs.notes[0]
    assert inputs[0].args[1] is lock
    assert inputs[0].call(model).item() == 1


def test_containers_keep_their_kind() -> None:
    class Summing(nn.Module):
        def forward(self, pair: Pair, items: list[Tensor]) -> Tensor:
            return pair.a + pair.b + items[0]

    with record(model := Summing()) as inputs:
        expected = model(Pair(torch.ones(2), torch.ones(2)), [torch.ones(2)])
    assert torch.equal(inputs[0].call(model), expected)


def test_calls_from_several_threads_are_all_counted() -> None:
    model = Adder()
    with record(model) as inputs:
        threads = [
            threading.Thread(target=lambda: [model(torch.randn(2, 4)) for _ in range(20)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert inputs.counts == [80]


def test_recordings_nest() -> None:
    model = Adder()
    with record(model) as outer:
        model(torch.randn(1, 4))
        with record(model) as inner:
            model(torch.randn(2, 4))
    assert len(outer) == 2
    assert len(inner) == 1


def test_nothing_recorded_says_what_to_do() -> None:
    model = Adder()
    with record(model) as inputs:
        model.forward(torch.randn(1, 4))
    with pytest.raises(TorchweldError, match=r"no call of the model was recorded.*lambda m"):
        as_workloads(inputs)


def test_only_modules_are_recorded() -> None:
    with (
        pytest.raises(TorchweldError, match=r"record: model is a builtin_function.*Module"),
        record(print),  # type: ignore[arg-type]
    ):
        pass


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin() + 1


Compile = Callable[[nn.Module], nn.Module]


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    "compile_it", [compiled_in_place, lambda model: torch.compile(model, backend="eager")]
)
def test_compiled_models_are_recorded_and_stay_compiled(compile_it: Compile) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = compile_it(Plain())
    x = torch.randn(2, 4)
    plain = model(x)
    entry = model.__dict__.get("_compiled_call_impl")
    assert torch._dynamo.utils.counters["frames"]["total"] == 1
    torch._dynamo.utils.counters.clear()
    with record(model) as inputs:
        assert torch.equal(model(x), plain)
    assert model.__dict__.get("_compiled_call_impl") is entry
    assert inputs.counts == [1]
    assert torch._dynamo.utils.counters["frames"]["total"] == 0, "recording made it compile again"


def test_a_model_compiled_while_recording_stays_compiled() -> None:
    model = Adder()
    with record(model):
        model.compile(backend="eager")
    assert model._compiled_call_impl is not None
