"""Tests what `find` records of a run, and that the run leaves no change behind."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support import module_zoo as zoo
from tests.support.module_zoo import H, K, N
from torch import Tensor, nn

from torchweld.core.errors import TorchweldError
from torchweld.core.model_inputs import Inputs, record
from torchweld.core.records import from_plain, to_plain
from torchweld.welds.finding.block_rereading import reread
from torchweld.welds.finding.find import find
from torchweld.welds.finding.numeric_confirmation import disagreement
from torchweld.welds.found_blocks import Block, Call, Refusal
from torchweld.welds.guarding.block_validity import read_chain
from torchweld.welds.tracing import call_recording
from torchweld.welds.tracing.forward_trace import trace
from torchweld.welds.tracing.graph_reading import read

X = torch.randn(3, 5, K, generator=torch.Generator().manual_seed(1))


def call(*shape: int, count: int = 1, **other: Any) -> Call:
    plain = Call(
        shape=shape, dtype="float32", contiguous=True, grad=False, training=False, count=count
    )
    return replace(plain, **other)


# ---- calls ----


def test_every_kind_of_call_is_counted() -> None:
    model = nn.Sequential(zoo.Gated(), nn.LayerNorm(N), nn.Linear(N, K))
    inputs = [X, X[:1], X.clone(), X.transpose(0, 1)]
    blocks = find(model, inputs)
    assert [block.path for block in blocks] == ["0", "2"]
    assert blocks[0].calls == (
        call(3, 5, K, count=2),
        call(1, 5, K),
        call(5, 3, K, contiguous=False),
    )
    assert blocks[0].calls[0].rows == 15


def test_prefill_and_decoding_are_calls_of_one_block() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = zoo.Functional(F.gelu)
            self.back = nn.Linear(N, K)

        def forward(self, x: Tensor, past: list[Tensor]) -> Tensor:
            past.append(x)
            return self.back(self.mlp(x)) + torch.cat(past, dim=1).mean(dim=1, keepdim=True)

        def generate(self, x: Tensor, count: int) -> None:
            past: list[Tensor] = []
            for _ in range(count):
                x = self(x, past)[:, -1:]

    blocks = find(Decoder(), lambda m: m.generate(torch.randn(1, 7, K), 6))
    assert [block.path for block in blocks] == ["mlp", "back"]
    assert blocks[0].calls == (call(1, 7, K), call(1, 1, K, count=5))
    assert [refusal.path for refusal in blocks.refused] == []


def test_recorded_inputs_count_as_often_as_they_were_seen() -> None:
    model = zoo.Functional(F.relu)
    with record(model) as inputs:
        for x in (X, X, X[0]):
            model(x)
    (block,) = find(model, inputs)
    assert block.calls == (call(3, 5, K, count=2), call(5, K))


def test_one_dimension_and_one_row() -> None:
    (block,) = find(zoo.Functional(F.relu), [X[0, 0], X[0, :1]])
    assert block.calls == (call(K), call(1, K))
    assert block.calls[0].rows == 1


def test_calls_without_rows_are_left_out() -> None:
    (block,) = find(zoo.Functional(F.relu), [X[:0], X])
    assert block.calls == (call(3, 5, K),)
    assert len(find(zoo.Functional(F.relu), X[:0])) == 0


def test_a_shared_module_is_one_block() -> None:
    shared = zoo.Functional(F.relu)
    model = nn.ModuleDict({"first": shared, "second": shared, "back": nn.Linear(N, K)})
    blocks = find(model, lambda m: m["second"](m["back"](m["first"](X))))
    assert [block.path for block in blocks] == ["first", "back"]
    assert blocks[0].calls[0].count == 2
    assert blocks.notices == ("first is also second: one module, one block",)


def test_tied_weights_have_one_name() -> None:
    model = nn.Sequential(nn.Linear(K, K), nn.ReLU(), nn.Linear(K, K))
    model[2].weight = model[0].weight
    (block,) = find(model, X)
    assert block.tensors == ("0.weight", "0.bias", "0.weight", "2.bias")


def test_what_was_not_called_is_told() -> None:
    model = nn.ModuleList([nn.Linear(K, N), nn.Linear(K, N), nn.Linear(K, N)])
    blocks = find(model, lambda m: m[1](X))
    assert [block.path for block in blocks] == ["1"]
    assert blocks.notices == ("not called by these inputs, so not looked at: [0,2]",)


def test_gradients_are_recorded_as_they_are() -> None:
    model = zoo.Functional(F.relu)
    assert find(model, X)[0].calls[0].grad is False
    assert find(model, X, training=True)[0].calls[0].grad is True
    frozen = copy.deepcopy(model).requires_grad_(False)
    assert find(frozen, X, training=True)[0].calls[0].grad is False


def test_training_and_inference_in_one_workload() -> None:
    model = zoo.FunctionalDropout()

    def run(m: nn.Module) -> None:
        m.train()(X)
        m.eval()(X)

    (block,) = find(model, run)
    assert block.dropout == (0.0, 0.2)
    assert {c.training for c in block.calls} == {True, False}
    assert model.training


def test_a_new_tensor_at_an_old_place_is_another() -> None:
    numbers = call_recording._Tensors()
    first, second = torch.ones(2), torch.ones(2)
    one = numbers.number(first)
    assert numbers.number(first) == one
    assert numbers.number(second) != one
    numbers._known[id(second)] = numbers._known[id(first)]  # as if it had reused the id
    assert numbers.number(second) != one


def test_kinds_of_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_recording, "MOST_KINDS", 2)
    blocks = find(zoo.Functional(F.relu), [X, X[:1], X[:2], X[:2], X])
    assert blocks[0].calls == (call(3, 5, K, count=2), call(1, 5, K))
    assert blocks.notices[0].endswith(": 2 calls left out")


def test_dropout_at_another_place_is_noticed_in_the_numbers() -> None:
    model = zoo.FunctionalDropout().train()
    seen = call_recording.record(model, [(lambda: model(X), 1)]).seen[model]
    (signature,) = seen.counts
    chain = read_chain(model, signature)
    assert disagreement(model, chain, signature) == ""
    for wrong in ((0.2, 0.0), (0.0, 0.3), (0.2, 0.2)):
        reason = disagreement(model, replace(chain, dropout=wrong), signature)
        assert reason == "drops other values in training than a chain with dropout does"


# ---- no change is left behind ----


class Stateful(nn.Module):
    """Counts its calls, caches, keeps statistics and has a dropout."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mlp = zoo.TransposedMlp()
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("seen", torch.zeros(()))
        self.history: list[Tensor] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(x)
        self.last = x
        self.seen += 1
        return self.norm(self.mlp(x))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("mode", [False, True])
def test_the_model_is_left_as_it_was(training: bool, mode: bool) -> None:
    model = Stateful().train(mode)
    model.mlp.dropout.eval()
    model.mlp.c_fc.weight.grad = torch.ones_like(model.mlp.c_fc.weight)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    attributes = [set(module.__dict__) for module in model.modules()]
    random = torch.get_rng_state()

    assert len(find(model, X, training=training)) == 1

    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert [set(module.__dict__) for module in model.modules()] == attributes
    assert (model.calls, model.history) == (0, [])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert bool(model.mlp.c_fc.weight.grad.eq(1).all())
    assert model.mlp.c_proj.weight.grad is None


def test_an_error_in_the_run_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(K, N), nn.Linear(K, N)).train()
    with pytest.raises(TorchweldError, match="Sequential does not run on '3x5x10 float32'"):
        find(model, X)
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert model.training


def test_a_training_step_leaves_neither_gradients_nor_steps() -> None:
    model = zoo.Functional(F.relu)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def step(m: nn.Module) -> None:
        with torch.enable_grad():
            m(X).sum().backward()
        optimizer.step()

    blocks = find(model, step)
    assert [block.path for block in blocks] == [""]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(map(torch.equal, model.parameters(), before))


def test_a_workload_that_changes_weights_is_told_of() -> None:
    model = zoo.Functional(F.relu)

    def change(m: zoo.Functional) -> None:
        m(X)
        m.a.weight.add_(1)

    notices = find(model, change).notices
    assert "the workload changed parameters of the model: they stay changed" in notices


def test_a_callable_that_runs_another_model_than_it_was_given_is_told_so() -> None:
    model = zoo.Functional(F.relu)
    with pytest.raises(TorchweldError, match="lambda m: m\\(x\\), and not lambda m: model\\(x\\)"):
        find(model, lambda m: model(X))


def test_fake_tensors_do_not_stay_in_attributes() -> None:
    class Keeping(zoo.Functional):
        def forward(self, x: Tensor) -> Tensor:
            self.last = self.a(x)
            return self.b(F.relu(self.last))

    model = Keeping(F.relu)
    model(X)
    kept = model.last
    assert [block.path for block in find(model, X)] == ["a", "b"]
    assert model.last is kept
    (signature,) = call_recording.record(model, [(lambda: model(X), 1)]).seen[model].counts
    kept = model.last
    trace(model, signature)
    assert model.last is kept


# ---- meta, hashes, saving, errors ----


def test_a_model_on_meta_is_found_in_without_numbers() -> None:
    with torch.device("meta"):
        model = nn.Sequential(zoo.Gated(), nn.LayerNorm(N), nn.Linear(N, K))
    blocks = find(model, X)
    assert [(b.path, b.form) for b in blocks] == [
        ("0", "silu/separate;identity"),
        ("2", "identity/b"),
    ]
    assert blocks.notices == ("the model is on meta, so nothing was confirmed by numbers",)
    real = nn.Sequential(zoo.Gated(), nn.LayerNorm(N), nn.Linear(N, K))
    assert [b.structure for b in find(real, X)] == [b.structure for b in blocks]


STRUCTURES = """
import torch
from tests.support import module_zoo as zoo
from torchweld.welds.finding.find import find
x = torch.randn(2, 3, zoo.K)
print([find(make(), x)[0].structure for make in (zoo.Gated, zoo.TransposedMlp, zoo.QuickGelu)])
"""


def test_the_normal_form_names_nothing_that_changes() -> None:
    model = zoo.Gated()
    seen = call_recording.record(model, [(lambda: model(X), 1)]).seen[model]
    (signature,) = seen.counts
    assert read(trace(model, signature)).text == (
        "linear(mul(silu(linear($x, gate_proj.weight)), linear($x, up_proj.weight)), "
        "down_proj.weight)"
    )


@pytest.mark.slow
def test_structure_is_the_same_in_another_process() -> None:
    makes: list[Callable[[], nn.Module]] = [zoo.Gated, zoo.TransposedMlp, zoo.QuickGelu]
    here = [find(make(), X)[0].structure for make in makes]
    done = subprocess.run(
        [sys.executable, "-c", STRUCTURES],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == str(here)
    assert len(set(here)) == 3


def test_structure_does_not_depend_on_rows_or_weights_but_on_the_code() -> None:
    def structure(model: nn.Module, x: Tensor = X) -> str:
        (block,) = find(model, x)
        return block.structure

    same = structure(zoo.Functional(F.gelu))
    assert structure(zoo.Functional(F.gelu), X[0]) == same
    assert structure(zoo.Functional(F.relu)) != same
    assert structure(zoo.Functional(F.gelu, bias=False)) != same
    assert structure(zoo.Functional(F.gelu).double(), X.double()) != same
    training = find(zoo.FunctionalDropout(), X, training=True)[0].structure
    assert structure(zoo.FunctionalDropout()) == training


def test_a_block_is_read_again_without_running_the_model() -> None:
    model = nn.Sequential(zoo.ExtraArguments(), nn.ReLU())
    blocks = find(model, lambda m: m[0](X, mask=torch.ones(3, 5)))
    (block,) = blocks
    assert reread(model, block) == block
    other = nn.Sequential(zoo.Functional(F.relu), nn.ReLU())
    changed = reread(other, block)
    assert isinstance(changed, Refusal)
    model[0].a = nn.Linear(K, H, bias=False)
    changed = reread(model, block)
    assert isinstance(changed, Refusal)
    assert changed.reason == "it has no a.bias any more"
    gone = reread(nn.Sequential(), block)
    assert isinstance(gone, Refusal)
    assert gone.reason == "there is no such module"


def test_a_changed_activation_is_another_structure() -> None:
    model = zoo.Functional(F.relu)
    (block,) = find(model, X)
    model.act = F.gelu
    now = reread(model, block)
    assert isinstance(now, Block)
    assert (now.form, block.form) == ("gelu/b;identity/b", "relu/b;identity/b")
    assert now.structure != block.structure


def test_blocks_are_plain_data() -> None:
    blocks = find(nn.Sequential(zoo.NormInside(), nn.Linear(N, K)), X)
    assert from_plain(Block, to_plain(blocks[0])) == blocks[0]
    assert from_plain(Refusal, to_plain(blocks.refused[0])) == blocks.refused[0]


def test_bad_input() -> None:
    with pytest.raises(TorchweldError, match="model is a function; expected"):
        find(lambda x: x, X)  # type: ignore[arg-type]
    with pytest.raises(TorchweldError, match="no inputs"):
        find(nn.Linear(K, N), None)
    with pytest.raises(TorchweldError, match="lazy module"):
        find(nn.LazyLinear(3), X)


def test_modes_and_defaults_of_the_user_do_not_matter() -> None:
    model = zoo.Gated()
    expected = find(model, X).blocks
    with torch.inference_mode():
        assert find(model, X).blocks == expected
    with torch.device("meta"):
        assert find(model, X).blocks == expected
    with torch.no_grad():
        assert find(model, X, training=True)[0].calls[0].grad
    torch.set_default_dtype(torch.float64)
    try:
        assert find(model, X).blocks == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_nothing_to_find_is_no_error() -> None:
    blocks = find(nn.Sequential(nn.Conv1d(5, 4, 3), nn.ReLU()), X)
    assert (len(blocks), blocks.refused) == (0, ())


def test_other_threads_may_run_the_model_in_a_workload() -> None:
    from concurrent.futures import ThreadPoolExecutor

    model = nn.Sequential(zoo.Gated(), nn.LayerNorm(N), nn.Linear(N, K))

    def run(m: nn.Module) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(m, [X] * 6))

    assert [block.calls[0].count for block in find(model, run)] == [6, 6]


def test_wrappers_without_named_arguments_are_looked_into() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    blocks = find(Wrapper(zoo.Gated()), X)
    assert [block.path for block in blocks] == ["module"]


def test_keyword_arguments() -> None:
    (block,) = find(zoo.ExtraArguments(), Inputs(hidden_states=X))
    assert block.argument == "hidden_states"


def test_a_model_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(K, H), nn.GELU(), nn.Linear(H, N))
    assert [block.form for block in find(model, X)] == ["gelu/b;identity/b"]
