"""`torchweld bench --device`: the preset for it, run on the CPU, and what a GPU cannot do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchweld.bench import bench_participants, plan
from torchweld.bench.bench_presets import preset_named
from torchweld.bench.eager_block import BlockSource
from torchweld.bench.runtimes.runtime_names import RUNTIMES
from torchweld.bench.runtimes.torch_runtimes import CompiledRuntime
from torchweld.cli import bench_command as bench_verb
from torchweld.core.errors import TorchweldError
from torchweld.machine.gpu_identity import Gpu
from torchweld.ops.backends import BACKENDS
from torchweld.ops.gpu import gpu_support

Bencher = Callable[..., tuple[int, str, str]]
BLOG = ("--preset", "blog", "--device", "cpu", "--rows", "2x3", "--backend", "torch")
GPU_ONLY = [b for b in BACKENDS if b.abilities.devices == ("cuda",)]


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has one, as far as a plan of a bench asks."""
    for why in ("device_problems", "triton_problems", "extension_problems"):
        monkeypatch.setattr(gpu_support, why, list)
    monkeypatch.setattr(bench_participants, "gpu_here", lambda device: Gpu(name="a GPU"))
    monkeypatch.setattr(bench_verb, "checked_device", lambda text: torch.device("cuda"))


def test_the_walk_throughs_own_shape() -> None:
    cases = preset_named("blog").on_device().cases
    assert [case.label for case in cases] == ["nn.Linear", "MLP, gelu", "GeGLU"]
    assert {case.rows_text for case in cases} == {"64×128"}
    assert {case.dtype for case in cases} == {"bfloat16"}
    assert preset_named("models").on_device() == preset_named("models")


def test_it_runs_on_the_cpu_from_end_to_end(bench: Bencher, tmp_path: Path) -> None:
    page, file = tmp_path / "page.html", tmp_path / "bench.json"
    code, out, err = bench(
        *BLOG, "--against", "eager", "--report", str(page), "--out", str(file), "--json"
    )
    assert code == 0
    assert "wrote" in err
    data = json.loads(out)
    assert data == json.loads(file.read_text())
    assert (data["device"], data["gpu"]) == ("cpu", None)
    assert [cell["case"]["label"] for cell in data["cells"]] == ["nn.Linear", "MLP, gelu", "GeGLU"]
    results = [result for cell in data["cells"] for result in cell["results"]]
    assert {cell["dtype"] for cell in data["cells"]} == {"bfloat16"}
    assert all(result["cost"]["kernels"] is None for result in results)
    assert all(result["refused"] is None for result in results)
    assert "GeGLU" in page.read_text()


def test_the_presets_own_peers_on_the_cpu(bench: Bencher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger is left out with the reason; torch.compile takes part where it can."""
    monkeypatch.setattr(CompiledRuntime, "absent", lambda self, whole_model: "it takes long")
    code, out, err = bench(*BLOG)
    assert (code, err) == (0, "")
    assert "left out: liger: it runs on cuda, and this bench on cpu" in out
    assert "left out: compile: it takes long" in out


def test_on_the_cpu_there_are_no_columns_of_kernels(bench: Bencher) -> None:
    code, out, _ = bench(*BLOG, "--against", "eager")
    assert code == 0
    assert "kernel µs" not in out
    assert "launch the kernels" not in out


def test_peers_of_a_gpu_are_left_out_on_the_cpu_with_the_reason() -> None:
    found = bench_participants.absent(["liger", "onnxruntime"], device=torch.device("cpu"))
    assert found["liger"] == "it runs on cuda, and this bench on cpu"
    found = bench_participants.absent(["mkldnn", "liger"], device=torch.device("cuda"))
    assert found["mkldnn"] == "it runs on cpu, and this bench on cuda"
    assert "pip install liger-kernel" in found["liger"]


@pytest.mark.usefixtures("a_gpu")
def test_who_takes_part_on_a_gpu() -> None:
    cases = preset_named("blog").on_device().cases
    planned = plan(cases, against=("compile", "liger"), device=torch.device("cuda"))
    assert planned.device == "cuda"
    assert planned.gpu == Gpu(name="a GPU")
    assert {"Python", "torchweld"} <= set(planned.versions)
    ours = [backend.name for backend in GPU_ONLY]
    assert planned.first == ours[0]
    assert set(planned.backends) < set(ours)  # not those for narrow blocks alone
    assert planned.against == ("compile",)
    assert "liger" in planned.left_out


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["gpt"], "torchweld fuse --device cuda"),
        (["--cold"], "--cold with --device cuda"),
        (["--training"], "--training with --device cuda"),
        (["--check-parking"], "--check-parking with --device cuda"),
        (["--table", "t.json"], "--table with --device cuda"),
        (["--against", "onnxruntime"], "onnxruntime"),
    ],
)
def test_what_does_not_go_with_a_gpu(bench: Bencher, options: list[str], said: str) -> None:
    code, out, err = bench(*options, "--device", "cuda")
    assert (code, out) == (2, "")
    assert said in err


def test_liger_has_gated_blocks_alone() -> None:
    linear, mlp, geglu = (row.mlp for row in preset_named("blog").on_device().rows)
    liger = RUNTIMES["liger"]()
    assert liger.why_not_block(geglu) == ""
    assert "gated" in liger.why_not_block(linear)
    assert "gated" in liger.why_not_block(mlp)


def test_a_block_is_made_where_it_is_asked_for() -> None:
    mlp = preset_named("blog").rows[-1].mlp
    source = BlockSource(mlp=mlp, dtype="bfloat16", device="meta")
    made = source.make()
    assert {p.device.type for p in made.model.parameters()} == {"meta"}
    (x,) = source.workload(made, 2, 3).tensors()
    assert (x.device.type, tuple(x.shape)) == ("meta", (2, 3, 768))
    assert made.model(x).device.type == "meta"


@pytest.mark.usefixtures("a_gpu")
def test_backends_of_the_cpu_are_refused_on_a_gpu() -> None:
    cases = preset_named("blog").on_device().cases
    name = next(b.name for b in BACKENDS if b.abilities.devices == ("cpu",))
    with pytest.raises(TorchweldError, match="cuda"):
        plan(cases, (name,), device=torch.device("cuda"))
