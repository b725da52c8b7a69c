"""Tests welded models with other features of torch: copied, pickled, compiled, exported, traced."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.helpers import ISAS, NOT_PACKED, kernel_runs, run_python
from tests.support.swap_blocks import (
    CASES,
    GATED,
    LINEAR,
    MLP,
    NATURAL,
    PACKED,
    SEQUENTIAL,
    Gated,
    K,
    Mlp,
    N,
    X,
    decide,
    model_of,
    sequential,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import torchweld as tw
from torchweld import ops, repack
from torchweld.welds.swapping.swap import disabled, is_welded, stats, undo, weld, welded_paths
from torchweld.welds.weld_decisions import Choice, Decision

pytestmark = pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine")


@pytest.fixture(autouse=True)
def _own_compilations() -> Iterator[None]:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---- copies ----


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: list[Callable[[Any], Any]] = [copy.deepcopy, pickled, saved]


@pytest.mark.parametrize("make_copy", COPIES, ids=["deepcopy", "pickle", "save"])
@pytest.mark.parametrize("kind", CASES)
def test_a_copy_is_welded_and_independent(kind: str, make_copy: Callable[[Any], Any]) -> None:
    model, plain = model_of(kind)
    with torch.no_grad():
        before = model(X)
        other = make_copy(model)
        assert welded_paths(other) == ["1"]
        assert type(other[1]) is type(model[1])
        assert stats(other)["1"].copied_bytes == 0
        assert repr(other) == repr(plain)
        for _ in range(2):
            with kernel_runs("packed"):
                assert torch.equal(other(X), before)
        for t in other[1].parameters():
            t.mul_(2.0)
        with kernel_runs("packed"):
            assert not torch.equal(other(X), before)
        with kernel_runs("packed"):
            assert torch.equal(model(X), before)
        undo(other)
        assert is_welded(model[1])
    assert type(other[1]) is type(plain[1])
    assert list(other[1].__dict__) == list(plain[1].__dict__)


def test_a_shallow_copy_shares_weights_but_not_the_weld() -> None:
    model, _ = model_of("mlp")
    with torch.no_grad():
        before = model[1](X)
        other = copy.copy(model[1])
        assert isinstance(other, Mlp)
        other.gain = 3.0
        with kernel_runs(calls=0), pytest.warns(UserWarning, match="multiplies by 3"):
            torch.testing.assert_close(other(X), 3 * before)
        with kernel_runs("packed"):
            assert torch.equal(model[1](X), before)
        undo(other)
        assert is_welded(model[1])


@pytest.mark.parametrize("make_copy", COPIES, ids=["deepcopy", "pickle", "save"])
def test_a_copy_notices_changes_made_before_and_after(make_copy: Callable[[Any], Any]) -> None:
    module: Any = Mlp().eval()
    weld(module, [decide(MLP)])
    with torch.no_grad():
        before = module(X)
        early, late = make_copy(module), module
        early.act = nn.ReLU()  # changed before its first call
        late.act = nn.ReLU()
        late = make_copy(late)
        for changed in (early, late):
            with (
                kernel_runs(calls=0),
                pytest.warns(UserWarning, match="computes relu/b;identity/b and not gelu"),
            ):
                assert not torch.allclose(changed(X), before)


def test_a_copy_of_a_part_of_a_model() -> None:
    model = nn.Sequential(sequential(), nn.Linear(N, N)).eval()
    weld(model, [decide(SEQUENTIAL, path="0")])
    with torch.no_grad():
        before = model[0](X)
        part: Any = copy.deepcopy(model[0])
        with kernel_runs("packed"):
            assert torch.equal(part(X), before)
        part[2][1] = nn.Sigmoid()
        with (
            kernel_runs(calls=0),
            pytest.warns(UserWarning, match=r"2\.1 was replaced by a Sigmoid"),
        ):
            part(X)


IN_A_FRESH_PROCESS = """
import sys, torch
case = torch.load(sys.argv[1], weights_only=False)
from torchweld import ops
from torchweld.welds.swapping.swap import undo, welded_paths
model = case["model"]
assert welded_paths(model) == ["0", "1"], welded_paths(model)
with torch.no_grad():
    y = model(case["x"])
run = ops.compiled.last_run()
assert run["calls"] == 2 and run["weights"] == "packed", run
assert torch.equal(y, case["y"])
undo(model)
assert type(model[1]) is torch.nn.Linear
print("right")
"""


def test_a_saved_model_is_welded_in_a_fresh_process(tmp_path: Path) -> None:
    model = nn.Sequential(sequential(), nn.Linear(N, N)).eval()
    block = replace(LINEAR, in_features=N)
    weld(model, [decide(SEQUENTIAL, path="0"), decide(block, path="1")])
    with torch.no_grad():
        case = {"model": model, "x": X, "y": model(X)}
    torch.save(case, tmp_path / "case.pt")
    assert run_python(IN_A_FRESH_PROCESS, str(tmp_path / "case.pt")) == "right\n"


def test_state_dicts_go_both_ways() -> None:
    model, plain = model_of("gated")
    other, _ = model_of("gated")
    with torch.no_grad():
        for t in plain.parameters():
            t.mul_(2.0)
        model(X)
        assert list(model.state_dict()) == list(plain.state_dict())
        model.load_state_dict(plain.state_dict())
        with kernel_runs("packed"):
            torch.testing.assert_close(model(X), plain(X))
        undo(other).load_state_dict(model.state_dict())
        torch.testing.assert_close(other(X), plain(X))


# ---- torch.compile ----


def compiled(model: Any, backend: str = "eager") -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, backend=counter, fullgraph=True), counter


@pytest.mark.parametrize("kind", CASES)
def test_compiled_as_one_graph(kind: str) -> None:
    model, plain = model_of(kind)
    run, _ = compiled(model)
    with torch.no_grad():
        for _ in range(2):
            with kernel_runs("packed"):
                torch.testing.assert_close(run(X), plain(X))
    assert stats(model)["1"].copied_bytes > 0


def test_a_decision_without_a_copy_is_compiled_without_one() -> None:
    model, plain = model_of("mlp")
    weld(model, [decide(MLP, NATURAL, path="1")])
    run, _ = compiled(model)
    with torch.no_grad(), kernel_runs("natural"):
        torch.testing.assert_close(run(X), plain(X))
    assert stats(model)["1"].copied_bytes == 0


def test_the_graph_and_the_module_share_a_copy() -> None:
    model, _ = model_of("mlp")
    mlp: Any = model[1]
    run, _ = compiled(model)
    with torch.no_grad():
        for _ in range(2):
            with kernel_runs("packed", calls=2):
                assert torch.equal(run(X), model(X))
    assert mlp._torchweld.pack.times == 1
    repack(model)
    assert stats(model)["1"].copied_bytes == 0
    with torch.no_grad(), kernel_runs("packed"):
        run(X)
    assert mlp._torchweld.pack.times == 2


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: 0.5 * t for name, t in model.state_dict().items()})


def _assign(model: nn.Module) -> None:
    halves = {name: 0.5 * t for name, t in model.state_dict().items()}
    model.load_state_dict(halves, assign=True)


def _behind_autograd(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def _fused_step(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1, fused=True).step()


@pytest.mark.parametrize("edit", [_load, _assign, _behind_autograd, _fused_step])
def test_compiled_code_follows_the_weights(edit: Callable[[nn.Module], None]) -> None:
    model, plain = model_of("gated")
    run, _ = compiled(model)
    with torch.no_grad():
        before = run(X)
        edit(model)
        plain.load_state_dict(model.state_dict())
        with kernel_runs("packed"):
            y = run(X)
        assert not torch.allclose(y, before)
        torch.testing.assert_close(y, plain(X))


def test_modules_of_one_class_share_what_is_compiled() -> None:
    """Layers compiled one by one share the code; each has its own packed copy."""
    modules: list[Any] = [Mlp().eval() for _ in range(4)]
    counter = CompileCounterWithBackend("eager")
    for module in modules:
        weld(module, [decide(MLP)])
        module.compile(backend=counter, fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            for module in modules:
                with kernel_runs("packed"):
                    y = module(X)
                expected = module.down(module.act(module.up(X)))
                torch.testing.assert_close(y, expected)
    assert counter.frame_count == 1
    assert [module._torchweld.pack.times for module in modules] == [1, 1, 1, 1]


def test_a_changing_batch_is_not_compiled_for_each_size() -> None:
    model, plain = model_of("mlp")
    run, counter = compiled(model)
    with torch.no_grad():
        for rows in (4, 5, 6, 7, 30, 300):  # also beyond the table: one graph serves all sizes
            x = torch.randn(rows, K)
            with kernel_runs("packed"):
                torch.testing.assert_close(run(x), plain(x))
    assert counter.frame_count == 2


@pytest.mark.parametrize(
    "second", [None, Choice(backend="torch"), Choice(backend="reference")], ids=str
)
def test_a_table_with_the_original_in_it_is_compiled_as_the_original(
    second: Choice | None,
) -> None:
    module = Mlp().eval()
    weld(module, [Decision(block=MLP, by_rows=((1, 8, PACKED), (9, 16, second)))])
    run, _ = compiled(module)
    with torch.no_grad(), kernel_runs(calls=0):
        y = run(X)
    undo(module)
    with torch.no_grad():
        assert torch.equal(y, module(X))


def test_compiled_before_it_was_welded() -> None:
    model, plain = model_of("mlp")
    undo(model)
    run, _ = compiled(model)
    with torch.no_grad():
        with kernel_runs(calls=0):
            run(X)
        weld(run, [decide(MLP, path="1")])
        assert is_welded(model[1])
        assert welded_paths(run) == ["1"]
        with kernel_runs("packed"):
            torch.testing.assert_close(run(X), plain(X))
        with kernel_runs("packed"):
            model(X)
        undo(run)
        assert not is_welded(model[1])
        with kernel_runs(calls=0):
            run(X)


def test_compiled_in_place() -> None:
    model, plain = model_of("mlp")
    model.compile(backend="eager", fullgraph=True)
    with torch.no_grad(), kernel_runs("packed"):
        torch.testing.assert_close(model(X), plain(X))


def test_the_welded_module_itself_compiled() -> None:
    module = nn.Linear(K, N).eval()
    weld(module, [decide(LINEAR)])
    run, _ = compiled(module)
    with torch.no_grad(), kernel_runs("packed"):
        torch.testing.assert_close(run(X), F.linear(X, module.weight, module.bias))
    run, _ = compiled(lambda x: module(input=x))
    with torch.no_grad(), kernel_runs("packed"):
        torch.testing.assert_close(run(X), F.linear(X, module.weight, module.bias))


def test_compiled_with_gradients() -> None:
    """The original runs unless training is covered."""
    for training, calls in ((False, 0), (True, 1)):
        model, plain = model_of("gated", training=training)
        run, _ = compiled(model)
        with kernel_runs(calls=calls):
            y = run(X)
        expected = plain(X)
        torch.testing.assert_close(y, expected)
        y.square().sum().backward()
        expected.square().sum().backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
        torch._dynamo.reset()


def test_compiled_in_training_mode_with_dropout() -> None:
    module = Mlp(dropout=0.5)
    weld(module, [decide(replace(MLP, dropout=(0.5, 0.0)), training=True)])
    # The backend drops dead code: the original, which is traced for its guards, draws too.
    run, _ = compiled(module, "aot_eager")
    for probability in (0.5, 0.25):  # a changed one is the original's affair
        module.dropout.p = probability
        torch.manual_seed(3)
        with kernel_runs(calls=int(probability == 0.5)):
            y = run(X)
        torch.manual_seed(3)
        with disabled(module):
            torch.testing.assert_close(y, module(X))
    module.dropout.p = 0.5
    module.eval()
    with kernel_runs("natural"):
        run(X)
    module.dropout.train()
    with kernel_runs(calls=0):
        run(X)


def test_compiled_with_other_dtypes_and_autocast() -> None:
    model, plain = model_of("mlp")
    run, _ = compiled(model)
    with torch.no_grad():
        run(X)
        with torch.autocast("cpu", dtype=torch.bfloat16), kernel_runs(calls=0):
            assert torch.equal(run(X), plain(X))
        model.double()
        with kernel_runs(calls=0):
            assert torch.equal(run(X.double()), plain.double()(X.double()))


Change = Callable[[Any], Any]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "act", nn.ReLU()),
        lambda m: setattr(m, "up", nn.Sequential(m.up, nn.Tanh())),
        lambda m: setattr(m.act, "approximate", "tanh"),
        lambda m: setattr(m, "gain", 2.0),
        lambda m: setattr(m.up, "forward", lambda x: F.linear(x, 2 * m.up.weight, m.up.bias)),
    ],
    ids=["activation", "linear", "attribute", "gain", "forward"],
)
def test_compiled_code_follows_changes(change: Change) -> None:
    module = Mlp().eval()
    weld(module, [decide(MLP)])
    run, _ = compiled(module)
    with torch.no_grad():
        with kernel_runs("packed"):
            before = run(X)
        change(module)
        with kernel_runs(calls=0):
            y = run(X)
        assert not torch.allclose(y, before)
        undo(module)
        torch.testing.assert_close(y, module(X))


def test_compiled_code_follows_a_function_that_is_an_attribute() -> None:
    module = Gated().eval()
    weld(module, [decide(GATED)])
    run, _ = compiled(module)
    with torch.no_grad():
        with kernel_runs("packed"):
            run(X)
        module.act_fn = F.relu
        with kernel_runs(calls=0):
            y = run(X)
        torch.testing.assert_close(y, module.down(F.relu(module.gate(X)) * module.up(X)))


def test_hooks_inside_are_compiled_in() -> None:
    module = Mlp().eval()
    weld(module, [decide(MLP)])
    module.act.register_forward_hook(lambda m, args, y: 2 * y)
    run, _ = compiled(module)
    with torch.no_grad():
        with kernel_runs(calls=0):
            y = run(X)
        undo(module)
        torch.testing.assert_close(y, module(X))


def test_disabled_is_compiled_as_the_original() -> None:
    model, plain = model_of("mlp")
    run, _ = compiled(model)
    with torch.no_grad():
        run(X)
        with disabled(model), kernel_runs(calls=0):
            assert torch.equal(run(X), plain(X))
        with kernel_runs("packed"):
            run(X)


@pytest.mark.slow
def test_inductor() -> None:
    model, plain = model_of("gated")
    run = torch.compile(model, fullgraph=True)
    with torch.no_grad(), kernel_runs("packed"):
        torch.testing.assert_close(run(X), plain(X))


# ---- torch.export, AOTInductor ----


def exported(model: nn.Module, *, strict: bool = False) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=2, max=4096)
    return torch.export.export(model, (X,), dynamic_shapes=({0: batch},), strict=strict)


def ops_of(program: torch.export.ExportedProgram) -> list[str]:
    return [str(n.target) for n in program.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(
    ("kind", "strict"), [*((kind, False) for kind in CASES), ("mlp", True), ("raw", True)]
)
def test_export_has_the_op_for_any_batch(kind: str, strict: bool) -> None:
    model, plain = model_of(kind)
    program = exported(model, strict=strict)
    scaled = ["aten.mul.Tensor"] if CASES[kind][1].scale != 1.0 else []
    expected = ["aten.layer_norm.default", "torchweld.chain.default", *scaled, "aten.relu.default"]
    assert ops_of(program) == expected
    assert list(program.state_dict) == list(plain.state_dict())
    for rows in (2, 9, 100):
        x = torch.randn(rows, K)
        with torch.no_grad(), kernel_runs(*NOT_PACKED):
            torch.testing.assert_close(program.module()(x), plain(x))


def test_export_of_what_is_not_covered_is_the_original() -> None:
    model, _ = model_of("mlp")
    with disabled(model):
        assert "torchweld.chain.default" not in ops_of(exported(model))
    assert "torchweld.chain.default" not in ops_of(exported(model.train()))


def test_export_to_onnx_is_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX does not know the op."""
    model, _ = model_of("mlp")
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    assert "torchweld.chain.default" not in ops_of(exported(model))


AOTI = """
import sys, torch
torch.ops.load_library(sys.argv[1])
run = torch._inductor.aoti_load_package(sys.argv[2] + "/module.pt2")
case = torch.load(sys.argv[2] + "/case.pt")
from torch.profiler import profile
with profile() as seen:
    y = run(case["x"])
torch.testing.assert_close(y, case["y"])
assert [e.name for e in seen.events()].count("torchweld::chain") == 1
print("right")
"""


@pytest.mark.slow
def test_aotinductor_package_runs_anywhere(tmp_path: Path) -> None:
    model, plain = model_of("gated")
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(
            exported(model), package_path=str(tmp_path / "module.pt2")
        )
        torch.save({"x": X, "y": plain(X)}, tmp_path / "case.pt")
    assert run_python(AOTI, str(ops.compiled.__file__), str(tmp_path)) == "right\n"


# ---- TorchScript ----


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", CASES)
def test_traced(kind: str, grad: bool) -> None:
    model, plain = model_of(kind)
    with torch.set_grad_enabled(grad):
        for called_before in (False, True):
            if called_before:
                model(X)
            traced = torch.jit.trace(model, X)
            assert str(traced.inlined_graph).count("torchweld::chain") == 1
            x = torch.randn(9, K)
            with kernel_runs("natural"):
                torch.testing.assert_close(traced(x), plain(x))


@pytest.mark.parametrize("kind", ["linear", "mlp", "sequential", "packed gate"])
def test_scripted_as_the_original(kind: str) -> None:
    model, plain = model_of(kind)
    scripted = torch.jit.script(model)
    assert "torchweld::" not in str(scripted.inlined_graph)
    with torch.no_grad(), kernel_runs(calls=0):
        assert torch.equal(scripted(X), plain(X))
    assert is_welded(model[1])
    with torch.no_grad(), kernel_runs("packed"):
        model(X)


# ---- training loops and inference modes ----


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("covered", [False, True])
def test_gradient_checkpointing(covered: bool, reentrant: bool) -> None:
    model, plain = model_of("mlp", training=covered)
    x = X.clone().requires_grad_()
    ys = []
    told = nullcontext() if covered else pytest.warns(tw.OriginalCodeWarning, match="training mode")
    with told, kernel_runs(calls=2 if covered else 0):
        for m in (model.train(), plain.train()):
            y = checkpoint(m, x, use_reentrant=reentrant)
            y.square().sum().backward()
            ys.append(y)
    torch.testing.assert_close(*ys)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_inference_mode() -> None:
    model, plain = model_of("mlp")
    with torch.inference_mode():
        for _ in range(2):
            with kernel_runs("packed"):
                y = model(X)
        assert y.is_inference()
        torch.testing.assert_close(y, plain(X))


def test_a_loop_of_prefill_and_decoding() -> None:
    """The number of rows changes from call to call, as in generate()."""
    module = Mlp().eval()
    weld(module, [Decision(block=MLP, by_rows=((1, 1, NATURAL), (2, 64, PACKED)))])
    with torch.inference_mode():
        for _ in range(3):
            with kernel_runs("packed"):
                module(torch.randn(1, 12, K))
            for _ in range(4):
                with kernel_runs("natural"):
                    module(torch.randn(1, 1, K))
    assert stats(module)[""].originals == {}


def test_data_parallel_on_the_cpu() -> None:
    model, plain = model_of("mlp")
    with torch.no_grad(), kernel_runs("packed"):
        torch.testing.assert_close(nn.DataParallel(model)(X), plain(X))


def test_a_replica_does_not_use_the_weights_of_its_model() -> None:
    """A replica of DataParallel has its own tensors; the rest is shared."""
    module = Mlp().eval()
    weld(module, [decide(MLP, Choice(backend="torch"))])
    with torch.no_grad():
        module(X)
        replica = module._replicate_for_data_parallel()
        inner = {n: m._replicate_for_data_parallel() for n, m in module.named_children()}
        for name, child in inner.items():
            for key, t in getattr(module, name)._parameters.items():
                child.__dict__[key] = None if t is None else 2 * t
            replica._modules[name] = child
        expected = replica.down(F.gelu(replica.up(X)))
        with pytest.warns(UserWarning, match="was replaced by a Linear"):
            torch.testing.assert_close(replica(X), expected)


def test_a_model_that_an_earlier_version_saved_is_served() -> None:
    """It was saved before blocks had calls and facts, so it is read again at its first call."""
    saved = torch.load(Path(__file__).parents[1] / "data" / "welded_0_1.pt", weights_only=False)
    model, x = saved["model"], saved["x"]
    with torch.no_grad():
        with kernel_runs(calls=1):
            torch.testing.assert_close(model(x), saved["y"])
        model[1].approximate = "tanh"
        with kernel_runs(calls=0), pytest.warns(UserWarning, match="1's approximate was changed"):
            model(x)


def test_classes_made_by_welding_are_freed_with_their_modules() -> None:
    class Mine(nn.Linear):
        pass

    module = Mine(4, 4).eval()
    weld(module, [decide(replace(LINEAR, kind="Mine", in_features=4, out_features=4))])
    kept = weakref.ref(type(module))
    undo(module)
    gc.collect()
    assert kept() is None
