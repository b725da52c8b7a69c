"""What users give as inputs, brought into one form."""

from __future__ import annotations

import collections
import copy
import pickle
from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchweld.core.errors import TorchweldError
from torchweld.core.model_inputs import Inputs, as_workloads


class Adder(nn.Module):
    """Takes what it is given in any form; returns a sum that depends on each argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor, other: Any = None, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        y = self.linear(x) * scale
        return y if other is None else y + other


# ---- one form for all ----


def test_a_tensor_is_the_only_argument() -> None:
    model, x = Adder(), torch.randn(3, 4)
    (workload,) = as_workloads(x)
    assert torch.equal(workload.run(model), model(x))
    assert workload.name == "3x4 float32"
    assert [t is x for t in workload.tensors()] == [True]


@pytest.mark.parametrize("kind", [dict, UserDict, collections.OrderedDict])
def test_any_mapping_is_keyword_arguments(kind: type) -> None:
    model, x = Adder(), torch.randn(2, 4)
    (workload,) = as_workloads(kind({"x": x, "scale": 2.0}))
    assert torch.equal(workload.run(model), model(x, scale=2.0))
    assert workload.name == "x 2x4 float32"


def test_inputs_are_positional_and_keyword_arguments() -> None:
    model, x, other = Adder(), torch.randn(2, 4), torch.randn(4)
    (workload,) = as_workloads(Inputs(x, other, scale=0.5))
    assert torch.equal(workload.run(model), model(x, other, scale=0.5))
    assert workload.name == "2x4 float32, 4 float32"


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_sequence_is_several_calls_not_several_arguments(kind: type) -> None:
    model = Adder()
    items = [torch.randn(rows, 4) for rows in (1, 5)]
    workloads = as_workloads(kind(items))
    assert [w.name for w in workloads] == ["1x4 float32", "5x4 float32"]
    for workload, x in zip(workloads, items, strict=True):
        assert torch.equal(workload.run(model), model(x))


def test_a_callable_runs_the_model_itself() -> None:
    model, x = Adder(), torch.randn(2, 4)

    def twice(m: nn.Module) -> Tensor:
        return m(m(x))

    workloads = as_workloads([twice, lambda m: m(x)])
    assert [w.name for w in workloads] == ["twice", "callable"]
    assert torch.equal(workloads[0].run(model), model(model(x)))
    assert workloads[0].tensors() == []
    assert workloads[0].inputs is None


def test_workloads_pass_through_and_mix_with_other_forms() -> None:
    first = as_workloads(torch.randn(1, 4))
    assert as_workloads(first) == first
    names = [w.name for w in as_workloads([*first, {"x": torch.randn(2, 4)}, Inputs()])]
    assert names == ["1x4 float32", "x 2x4 float32", "no tensors"]


def test_equal_names_are_told_apart() -> None:
    names = [w.name for w in as_workloads([torch.zeros(2), torch.ones(2), torch.ones(2)])]
    assert names == ["2 float32", "2 float32 (2)", "2 float32 (3)"]


@dataclass
class Batch:
    ids: Tensor
    label: str


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


def test_tensors_are_found_inside_containers() -> None:
    a, b, c, d = (torch.randn(i + 1) for i in range(4))
    inputs = Inputs([a, {"k": (b, "text")}], batch=Batch(ids=c, label="x"), n=3, d=d)
    assert [t.numel() for t in inputs.tensors()] == [1, 2, 3, 4]
    assert as_workloads(inputs)[0].name == "2 tensors, batch 3 float32, d 4 float32"


def test_names_stay_short_and_say_dtype_and_scalars() -> None:
    inputs = Inputs(**{f"a{i}": torch.tensor(i, dtype=torch.int32) for i in range(5)})
    expected = "a0 scalar int32, a1 scalar int32, a2 scalar int32, 2 more"
    assert as_workloads(inputs)[0].name == expected
    assert repr(Inputs(torch.ones(2, 3, dtype=torch.bfloat16))) == "Inputs(2x3 bfloat16)"


def test_inputs_do_not_change_and_can_be_copied_and_pickled() -> None:
    inputs = Inputs(torch.ones(2), scale=3.0)
    with pytest.raises(AttributeError, match="make new ones"):
        inputs.args = ()
    for other in (copy.deepcopy(inputs), pickle.loads(pickle.dumps(inputs))):
        assert torch.equal(other.args[0], inputs.args[0])
        assert other.kwargs == {"scale": 3.0}


def test_an_argument_may_be_called_self_or_args() -> None:
    assert Inputs(self=1, args=2).kwargs == {"self": 1, "args": 2}


# ---- what is refused ----


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (None, "no inputs; give a tensor"),
        ([], "inputs are empty"),
        ((), "inputs are empty"),
        ({}, r"an empty mapping; .*tw\.Inputs\(\)"),
        ({1: torch.ones(1)}, "key 1"),
        (3, "the inputs: int; give a tensor"),
        ("8x768", "the inputs: str; give a tensor"),
        ([torch.ones(1), 2.5], "item 1 of the inputs: float"),
        ([(torch.ones(1), torch.ones(1))], r"item 0 .*several arguments are tw\.Inputs\(a, b\)"),
        (np.ones(3), r"ndarray; torch\.as_tensor\(x\)"),
        (iter([torch.ones(1)]), r"list_iterator; .*list\(x\)"),
        (nn.Linear(1, 1), "Linear; a model is no input"),
        (Tensor, "the class Tensor"),
    ],
)
def test_what_cannot_be_inputs_is_refused_with_a_remedy(inputs: Any, message: str) -> None:
    with pytest.raises(TorchweldError, match=message):
        as_workloads(inputs)


def test_inputs_that_the_model_rejects_are_named() -> None:
    model = Adder()
    workloads = as_workloads((torch.randn(2, 5), lambda m: m.nothing()))
    with pytest.raises(TorchweldError, match=r"Adder does not run on '2x5 float32': RuntimeError"):
        workloads[0].try_on(model)
    with pytest.raises(TorchweldError, match=r"'callable': AttributeError.*f\(model\)") as caught:
        workloads[1].try_on(model)
    assert isinstance(caught.value.__cause__, AttributeError)
    assert "\n" not in str(caught.value)
