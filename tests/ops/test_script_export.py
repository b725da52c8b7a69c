"""TorchScript, torch.compile, torch.export and AOTInductor: one op in the graph, the same numbers.

What is saved is loaded in a fresh process that knows nothing of torchweld but its library.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.helpers import (
    ISAS,
    NOT_PACKED,
    fixed,
    group,
    kernel_runs,
    random_tensors,
    run_python,
)
from tests.support.mlps import MLP_IDS, MLP_SHAPES, by_hand
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import torchweld as tw
from torchweld import ops
from torchweld.core.blocks import parse_spec
from torchweld.ops.backends import reference_backend

pytestmark = pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine")

X = fixed(5, 31)


@pytest.fixture(autouse=True)
def _own_compilations() -> Iterator[None]:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def library() -> str:
    return str(ops.compiled.__file__)


# Runs what was saved on the inputs saved beside it and compares with the outputs saved, gradients
# too where there are any. The profiler tells that our op ran, and nothing of a Linear did.
FRESH = """
import sys, torch
from torch.profiler import profile
folder, library, kind = sys.argv[1:4]
torch.ops.load_library(library)
if kind == "script":
    module = torch.jit.load(folder + "/module.pt")
elif kind == "export":
    module = torch.export.load(folder + "/module.pt2").module()
else:
    module = torch._inductor.aoti_load_package(folder + "/module.pt2")
case = torch.load(folder + "/case.pt")
for x, expected in zip(case["inputs"], case["outputs"]):
    with profile() as seen, torch.set_grad_enabled(kind == "script"):
        y = module(x)
    torch.testing.assert_close(y, expected)
    names = [event.name for event in seen.events()]
    assert names.count("torchweld::chain") == case["calls"], names
    assert not any("addmm" in n or "linear" in n or "matmul" in n for n in names), names
if kind == "script" and case["grads"] is not None:
    y.square().sum().backward()
    for parameter, grad in zip(module.parameters(), case["grads"]):
        torch.testing.assert_close(parameter.grad, grad)
assert "torchweld" not in sys.modules
print("right")
"""


def same_in_a_fresh_process(
    folder: Path,
    kind: str,
    mlp: tw.FusedMLP,
    inputs: list[Tensor],
    *,
    grads: bool = False,
    calls: int = 1,
) -> None:
    outputs = [by_hand(mlp, x).detach() for x in inputs]
    expected = None
    if grads:
        loss = by_hand(mlp, inputs[-1]).square().sum()
        expected = torch.autograd.grad(loss, list(mlp.parameters()))
    case = {"inputs": inputs, "outputs": outputs, "grads": expected, "calls": calls}
    torch.save(case, folder / "case.pt")
    assert run_python(FRESH, str(folder), library(), kind) == "right\n"


# ---- TorchScript ----


@pytest.mark.parametrize("shape", MLP_SHAPES, ids=MLP_IDS)
@pytest.mark.parametrize("training", [False, True])
def test_script_computes_the_same(shape: dict[str, Any], training: bool) -> None:
    mlp = tw.FusedMLP(**shape).train(training)
    scripted = torch.jit.script(mlp)
    for _ in range(3):  # the first runs of a scripted module profile it
        with kernel_runs("natural"):
            y = scripted(X)
        torch.testing.assert_close(y, by_hand(mlp, X))
    y.square().sum().backward()
    expected = torch.autograd.grad(by_hand(mlp, X).square().sum(), list(mlp.parameters()))
    for parameter, grad in zip(scripted.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


@pytest.mark.parametrize("shape", MLP_SHAPES[1:], ids=MLP_IDS[1:])
def test_script_drops_out_in_training(shape: dict[str, Any]) -> None:
    mlp = tw.FusedMLP(**shape, dropout=0.4)
    scripted = torch.jit.script(mlp)
    torch.manual_seed(2)
    with kernel_runs("natural"):  # one call, dropout included
        y = scripted(X)
    torch.manual_seed(2)
    torch.testing.assert_close(y, by_hand(mlp, X))
    scripted.eval()
    with kernel_runs("natural"):
        y = scripted(X)
    torch.testing.assert_close(y, by_hand(mlp.eval(), X))


@pytest.mark.parametrize("shape", [MLP_SHAPES[4], MLP_SHAPES[5]], ids=["gated", "deep"])
def test_scripted_and_saved_module_runs_anywhere(shape: dict[str, Any], tmp_path: Path) -> None:
    mlp = tw.FusedMLP(**shape)
    torch.jit.script(mlp).save(str(tmp_path / "module.pt"))
    same_in_a_fresh_process(tmp_path, "script", mlp, [X, torch.randn(2, 40, 31)], grads=True)


@pytest.mark.parametrize("frozen", [False, True])
def test_traced_and_saved_module_runs_anywhere(frozen: bool, tmp_path: Path) -> None:
    mlp = tw.FusedMLP((31, 64, 16), gated=True, activation="silu").eval()
    traced = torch.jit.trace(mlp, X)
    assert "torchweld::chain" in str(traced.inlined_graph)
    assert "aten::linear" not in str(traced.inlined_graph)
    if frozen:
        traced = torch.jit.freeze(traced)
    with kernel_runs("natural"):
        torch.testing.assert_close(traced(X), by_hand(mlp, X))
    traced.save(str(tmp_path / "module.pt"))
    inputs = [X, torch.randn(40, 31)]
    same_in_a_fresh_process(tmp_path, "script", mlp, inputs, grads=not frozen)


def test_trace_in_inference_records_the_parameters_not_a_packed_copy() -> None:
    mlp = tw.FusedMLP((31, 64, 16)).eval()
    with torch.no_grad():
        mlp(X)
        traced = torch.jit.trace(mlp, X)
        for parameter in mlp.parameters():
            parameter.mul_(1.5)
        with kernel_runs("natural"):
            y = traced(X)
        torch.testing.assert_close(y, by_hand(mlp, X))


def model_with_neighbours() -> nn.Sequential:
    """Code before and after the op for the compiler to work on."""
    return nn.Sequential(nn.LayerNorm(31), tw.FusedMLP((31, 64, 16)), nn.ReLU())


def expected_of(model: nn.Sequential) -> Tensor:
    """What `model_with_neighbours` gives for X, written with its children."""
    norm, mlp, _ = model
    assert isinstance(mlp, tw.FusedMLP)
    return torch.relu(by_hand(mlp, norm(X)))


def test_script_inside_a_bigger_model() -> None:
    model = model_with_neighbours()
    scripted = torch.jit.script(model)
    with kernel_runs("natural"):
        y = scripted(X)
    torch.testing.assert_close(y, expected_of(model))


def test_the_op_scripts_by_itself() -> None:
    @torch.jit.script
    def run(x: Tensor, w: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return torch.ops.torchweld.chain(x, w, "gelu"), torch.ops.torchweld.group(x, w, "gelu")

    w = torch.randn(16, 31)
    with kernel_runs("natural", calls=2):
        y, ys = run(X, [w])
    assert torch.equal(y, ys[0])
    torch.testing.assert_close(y, torch.nn.functional.gelu(X @ w.t()))


# ---- torch.compile ----


def compiled(function: Callable[..., Any], **options: Any) -> tuple[Any, CompileCounterWithBackend]:
    """The function, compiled so that it raises at a graph break, and a counter of compilations."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


@pytest.mark.parametrize("shape", MLP_SHAPES, ids=MLP_IDS)
@pytest.mark.parametrize("training", [False, True])
def test_compile_computes_the_same(shape: dict[str, Any], training: bool) -> None:
    mlp = tw.FusedMLP(**shape).train(training)
    run, counter = compiled(mlp)
    x = X.clone().requires_grad_()
    with kernel_runs("natural"):
        y = run(x)
    torch.testing.assert_close(y, by_hand(mlp, x))
    inputs = [x, *mlp.parameters()]
    expected = torch.autograd.grad(by_hand(mlp, x).square().sum(), inputs)
    for got, wanted in zip(torch.autograd.grad(y.square().sum(), inputs), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    assert counter.frame_count == 1
    (graph,) = counter.graphs
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("torchweld" in target for target in targets) == 1
    assert not any("linear" in target for target in targets)


@pytest.mark.parametrize(("device", "op"), [("cpu", "chain_kept"), ("meta", "chain")])
def test_only_graphs_for_the_cpu_have_the_number_of_a_copy(device: str, op: str) -> None:
    """Other devices have no copies. There it would be an input on the CPU, for nothing."""
    graphs: list[torch.fx.GraphModule] = []

    def take(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    mlp = tw.FusedMLP((31, 64, 16), device=device).eval()
    with torch.no_grad():
        y = torch.compile(mlp, fullgraph=True, backend=take)(X.to(device))
    assert y.shape == (5, 16)
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert called == [f"torchweld.{op}"]


def test_compile_in_inference() -> None:
    mlp = tw.FusedMLP((31, 64, 16)).eval()
    run, counter = compiled(mlp)
    with torch.no_grad():
        for _ in range(3):
            with kernel_runs("packed"):
                y = run(X)
            torch.testing.assert_close(y, by_hand(mlp, X))
            for parameter in mlp.parameters():
                parameter.mul_(1.1)
    assert counter.frame_count == 1


def test_compiled_without_a_copy() -> None:
    """Where packing is declined, and where a copy would have to be made at every call."""
    declined = tw.FusedMLP((31, 64, 16), packing=False).eval()
    computed = tw.FusedMLP((31, 64, 16)).eval()
    nn.utils.parametrizations.weight_norm(computed.up)
    for mlp in (declined, computed):
        run, _ = compiled(mlp)
        with torch.no_grad():
            expected = by_hand(mlp, X)
            with kernel_runs("natural"):
                torch.testing.assert_close(run(X), expected)
        assert mlp.packed_bytes == 0


def test_a_dynamic_batch_compiles_once() -> None:
    mlp = tw.FusedMLP((31, 64, 16), gated=True).eval()
    run, counter = compiled(mlp, dynamic=True)
    with torch.no_grad():
        for rows in (2, 3, 5, 16, 17, 100, 1000):
            x = torch.randn(rows, 31)
            with kernel_runs("packed"):
                y = run(x)
            torch.testing.assert_close(y, by_hand(mlp, x))
    assert counter.frame_count == 1


def test_a_changing_batch_is_not_compiled_for_each_size() -> None:
    """By default torch compiles for the first size, then for any."""
    mlp = tw.FusedMLP((31, 64, 16))
    run, counter = compiled(mlp)
    for rows in (4, 5, 6, 7, 30, 300):
        x = torch.randn(rows, 31)
        with kernel_runs(*NOT_PACKED):
            y = run(x)
        torch.testing.assert_close(y, by_hand(mlp, x))
        y.sum().backward()
    assert counter.frame_count == 2


def test_functions_compile() -> None:
    forms = parse_spec("identity/b;gelu")
    tensors = [t for form in forms for t in random_tensors((31, 8), [form])]

    def function(x: Tensor, tensors: list[Tensor]) -> Tensor:
        q, k = group(x, tensors, "identity/b;gelu")
        own = [tw.Layer(tensors[0], tensors[1], "relu"), tw.Layer(tensors[2], transposed=True)]
        return q + k + tw.mlp(x @ x.t() @ x, own)[..., :8]

    run, _ = compiled(function)
    with kernel_runs("natural", calls=2):
        y = run(X, tensors)
    q, k = reference_backend.group(X, tensors, forms)
    long = torch.relu((X @ X.t() @ X) @ tensors[0].t() + tensors[1]) @ tensors[2]
    torch.testing.assert_close(y, q + k + long[..., :8])


def test_compile_with_dropout_and_autocast() -> None:
    mlp = tw.FusedMLP((31, 64, 16), dropout=0.5)
    run, _ = compiled(mlp)
    with kernel_runs("natural"):  # one call, dropout included
        y = run(X)
    assert y.shape == (5, 16)
    mlp.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16), kernel_runs("natural"):
        y = run(X)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, copy.deepcopy(mlp).bfloat16()(X.bfloat16()))


def test_compile_follows_a_replaced_child() -> None:
    mlp = tw.FusedMLP((31, 64, 16)).eval()
    run, _ = compiled(mlp)
    with torch.no_grad():
        run(X)
        mlp.up = nn.Sequential(nn.Linear(31, 64), nn.Tanh())  # type: ignore[assignment]
        with kernel_runs(calls=0):
            y = run(X)
        torch.testing.assert_close(y, by_hand(mlp, X))


def test_inductor() -> None:
    """The default backend."""
    model = model_with_neighbours().eval()
    with torch.no_grad():
        run = torch.compile(model, fullgraph=True)
        with kernel_runs("packed"):
            y = run(X)
        torch.testing.assert_close(y, expected_of(model))


@pytest.mark.slow
def test_inductor_in_training() -> None:
    model = model_with_neighbours()
    with kernel_runs("natural"):
        y = torch.compile(model, fullgraph=True)(X)
    expected = expected_of(model)
    torch.testing.assert_close(y, expected)
    parameters = list(model.parameters())
    for got, wanted in zip(
        torch.autograd.grad(y.sum(), parameters),
        torch.autograd.grad(expected.sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


# ---- torch.export ----


def exported(mlp: tw.FusedMLP) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=2, max=4096)
    return torch.export.export(mlp, (X,), dynamic_shapes=({0: batch},))


@pytest.mark.parametrize("shape", MLP_SHAPES, ids=MLP_IDS)
def test_export_is_one_node_for_any_batch(shape: dict[str, Any]) -> None:
    mlp = tw.FusedMLP(**shape).eval()
    program = exported(mlp)
    targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert targets == ["torchweld.chain.default"]
    for rows in (2, 9, 100):
        x = torch.randn(rows, 31)
        with kernel_runs(*NOT_PACKED):
            y = program.module()(x)
        torch.testing.assert_close(y, by_hand(mlp, x))


def test_exported_and_saved_program_runs_anywhere(tmp_path: Path) -> None:
    mlp = tw.FusedMLP((31, 64, 16), gated=True, activation="silu").eval()
    torch.export.save(exported(mlp), tmp_path / "module.pt2")
    same_in_a_fresh_process(tmp_path, "export", mlp, [X, torch.randn(40, 31)])


def test_export_survives_decomposition() -> None:
    mlp = tw.FusedMLP((31, 64, 16)).eval()
    program = exported(mlp).run_decompositions()
    targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert targets == ["torchweld.chain.default"]


@pytest.mark.slow
def test_aotinductor_package_runs_anywhere(tmp_path: Path) -> None:
    mlp = tw.FusedMLP((31, 64, 16), gated=True, activation="silu").eval()
    with torch.no_grad():
        path = torch._inductor.aoti_compile_and_package(
            exported(mlp), package_path=str(tmp_path / "module.pt2")
        )
    assert path == str(tmp_path / "module.pt2")
    same_in_a_fresh_process(tmp_path, "aoti", mlp, [X, torch.randn(40, 31)])
