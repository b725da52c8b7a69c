"""What compiled graphs launch is read from their code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchweld.core.errors import NotMeasuredError
from torchweld.core.not_measured import NotMeasured
from torchweld.ops.fused_mlp import FusedMLP
from torchweld.profiles.attributing import compiled_regions
from torchweld.profiles.attributing.compilation_watch import watch_compilation
from torchweld.profiles.attributing.compiled_regions import Region, Regions, key_of
from torchweld.profiles.attributing.kernel_names import ops_inside
from torchweld.profiles.expecting.expectation import expect
from torchweld.profiles.recording.torch_profiler import record


def test_only_the_call_of_a_graph_has_a_key() -> None:
    assert key_of("## Call CompiledFxGraph fabc ##") == "fabc"
    assert key_of("Torch-Compiled Region: 0/0") is None
    assert key_of("aten::addmm") is None


# ---- generated code ----

HEAD = """
from torch._inductor.async_compile import AsyncCompile
async_compile = AsyncCompile()
cpp_fused_add_0 = async_compile.cpp_pybinding(['float*'], r'''
void kernel() { cpp_fused_add_0(); }
''')
triton_poi_fused_gelu_1 = async_compile.triton('triton_poi_fused_gelu_1', '''...''')
unused_2 = async_compile.cpp_pybinding([], '')
"""


def read(body: str) -> Region | str:
    return compiled_regions._read(HEAD + body)


def test_kernels_and_ready_made_ops_are_found_in_order() -> None:
    body = """
class Runner:
    def call(self, args):
        arg0, = args
        with torch.cuda._DeviceGuard(0):
            buf0 = empty_strided_cpu((1, 2), (2, 1), torch.float32)
            extern_kernels.addmm(arg0, reinterpret_tensor(arg0, (1,), (1,), 0), arg0, out=buf0)
            triton_poi_fused_gelu_1.run(buf0, 16, stream=stream0)
            cpp_fused_add_0(buf0)
            buf1 = torch.ops.mkldnn._linear_pointwise.default(buf0, arg0, None, 'none', [], '')
            buf2 = aten.sort.stable(buf1)
            extern_kernels.bias_addmm(arg0, buf0, arg0, out=buf2)
            cpp_fused_add_0(buf1)
            if never:
                del buf1
        return (buf2, )
def benchmark_compiled_module():
    cpp_fused_add_0(None)
"""
    assert read(body) == Region(
        kernels=("triton_poi_fused_gelu_1", "cpp_fused_add_0", "cpp_fused_add_0"),
        externs=("aten::addmm", "mkldnn::_linear_pointwise", "aten::sort", "aten::addmm"),
    )


def test_older_code_and_partitions_are_followed() -> None:
    partitioned = """
def partition_0(args):
    cpp_fused_add_0(args)
def call(self, args):
    (buf0,) = self.partitions[0](args)
    triton_poi_fused_gelu_1.run(buf0)
    (buf1,) = self.partitions[0](args)
"""
    kernels = ("cpp_fused_add_0", "triton_poi_fused_gelu_1", "cpp_fused_add_0")
    assert read(partitioned) == Region(kernels=kernels, externs=())
    assert read("def call(args):\n    pass") == Region(kernels=(), externs=())


@pytest.mark.parametrize(
    "body",
    [
        "def call(args):\n    if args[0]:\n        cpp_fused_add_0(args)",
        "def call(args):\n    while args[0]:\n        extern_kernels.mm(args)",
        "def call(args):\n    for a in args:\n        cpp_fused_add_0(a)",
        "def call(args):\n    call(args)",
        "def other(args):\n    pass",
        "#include <torch/csrc/inductor/cpp_prefix.h>\nvoid call() {}",
    ],
)
def test_code_that_cannot_be_followed_is_said_to(body: str) -> None:
    assert "cannot be followed" in str(read(body))


# ---- finding graphs ----


class FakeGraph:
    def __init__(self, key: str | None, source_code: str | None) -> None:
        self._fx_graph_cache_key = key
        if source_code is not None:
            self.source_code = source_code


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraph]:
    """Graphs that are alive while the test keeps them in the list."""
    place = SimpleNamespace(CompiledFxGraph=FakeGraph)
    monkeypatch.setitem(sys.modules, "torch._inductor.output_code", place)
    monkeypatch.setattr(compiled_regions, "_known", {})
    return []


def test_a_graph_is_found_by_its_key_and_remembered(fakes: list[FakeGraph]) -> None:
    fakes.append(FakeGraph("fone", HEAD + "def call(args):\n    cpp_fused_add_0(args)"))
    fakes.append(FakeGraph("ftwo", HEAD + "def call(args):\n    pass"))
    one = Region(kernels=("cpp_fused_add_0",), externs=())
    assert Regions().find("fone") == one
    assert Regions().find("ftwo") == Region(kernels=(), externs=())
    fakes.clear()
    assert Regions().find("fone") == one


def test_graphs_without_a_key_are_told_apart_by_the_ops_seen_in_them(
    fakes: list[FakeGraph],
) -> None:
    one = HEAD + "def call(args):\n    extern_kernels.mm(args)\n    cpp_fused_add_0(args)"
    fakes.append(FakeGraph(None, one))
    assert isinstance(Regions().find("None"), Region)
    fakes.append(FakeGraph(None, HEAD + "def call(args):\n    cpp_fused_add_0(args)"))
    found = Regions().find("None", ["aten::empty", "aten::mm"])
    assert isinstance(found, Region)
    assert found.externs == ("aten::mm",)
    found = Regions().find("None", ["aten::empty"])
    assert isinstance(found, Region)
    assert found.externs == ()
    fakes.append(FakeGraph(None, HEAD + "def call(args):\n    extern_kernels.mm(args)"))
    found = Regions().find("None", ["aten::mm"])
    assert "look the same from outside" in str(found)


def test_what_another_release_lacks_is_not_measured(
    fakes: list[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    def why(key: str) -> str:
        found = Regions().find(key)
        assert isinstance(found, NotMeasured)
        return found.reason

    assert "alive" in why("fnever")
    fakes.append(FakeGraph("fbare", None))
    assert "did not keep the code" in why("fbare")
    monkeypatch.setitem(sys.modules, "torch._inductor.output_code", SimpleNamespace())
    assert "where expected" in why("fbare")


@pytest.fixture
def fresh() -> Iterator[None]:
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_where_nothing_is_compiled_the_compiler_is_not_even_imported() -> None:
    code = """
import sys, torch
before = "torch._dynamo" in sys.modules
from torchweld.profiles.attributing.compilation_watch import watch_compilation
from torchweld.profiles.attributing.compiled_regions import Regions
from torchweld.profiles.attributing.kernel_names import ops_inside
with watch_compilation() as watch:
    torch.randn(1, 2).relu()
assert not Regions().find("fnone")
assert ops_inside("cpp_fused_add_gelu_1") == ("add", "gelu")
print(before, "torch._dynamo" in sys.modules, "torch._inductor" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False"]


# ---- the real thing ----


class Scaled(nn.Module):
    """Small to compile: one product, one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


@pytest.fixture(scope="module")
def inductor() -> Iterator[tuple[nn.Module, Tensor]]:
    import torch._dynamo

    torch._dynamo.reset()
    model: Any = torch.compile(Scaled(), dynamic=False)
    x = torch.randn(5, 8)
    with torch.no_grad():
        model(x)
    yield model, x
    torch._dynamo.reset()


@torch.no_grad()
def test_kernels_that_inductor_wrote_are_named(inductor: tuple[nn.Module, Tensor]) -> None:
    model, x = inductor
    recording = record(lambda: model(x))
    (key,) = filter(None, (key_of(event.name) for event in recording.events))
    region = Regions().find(key)
    assert isinstance(region, Region)
    assert [ops_inside(kernel) for kernel in region.kernels] == [("relu",)]


@torch.no_grad()
def test_a_compiled_model_launches_its_linears_and_one_fused_kernel(
    inductor: tuple[nn.Module, Tensor],
) -> None:
    model, x = inductor
    with watch_compilation() as watch, expect(linear=1, fused=1, pointwise=0, copies=0, ops=2) as e:
        model(x)
    assert {op.name for op in e.ops} == {"aten::addmm", "cpp_fused_relu_0"}
    assert watch.compiled == 0  # watching does not make it compile anew


@torch.no_grad()
def test_a_graph_whose_code_is_lost_is_not_measured(
    inductor: tuple[nn.Module, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = inductor
    monkeypatch.setattr(compiled_regions, "_known", {})
    monkeypatch.setitem(sys.modules, "torch._inductor.output_code", SimpleNamespace())
    with pytest.raises(NotMeasuredError, match=r"count it without torch.compile"), expect(linear=1):
        model(x)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
def test_training_counts_the_same_whether_compiled_in_the_block_or_before() -> None:
    layers = nn.Sequential(FusedMLP((8, 16, 8)), nn.Linear(8, 8), nn.GELU())
    model: Any = torch.compile(layers)
    x = torch.randn(6, 8)
    found = []
    for _ in range(2):
        model.zero_grad()
        with expect(backward=True) as e:
            model(x).sum().backward()
        found.append(e.counts)
        with expect(fused=2, linear=1, pointwise=0, ops=4):  # the sum is outside
            model(x).sum().backward()
    assert found[0] == found[1]
    assert found[0]["linear"] > 1


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@torch.no_grad()
def test_frozen_models_are_counted_though_they_have_no_key() -> None:
    import torch._inductor.config

    x = torch.randn(6, 64)
    with torch._inductor.config.patch(freezing=True):
        mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).eval()
        model = torch.compile(mlp)
        model(x)
        with expect(linear=2, pointwise=0, fused=">=1", copies=0):
            model(x)
