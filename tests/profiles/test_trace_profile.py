"""What a profile holds that was read from a trace: real traces first, then made ones."""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.made_traces import BACKWARD, HOST, TRACES, MadeTrace, names
from torch import nn
from torch.profiler import ProfilerActivity

from torchweld.profiles.profile import Profile
from torchweld.profiles.recorded_events import MODULE, OP, STEP
from torchweld.profiles.recording.module_instrument import instrumented
from torchweld.profiles.recording.trace_profile import read_trace
from torchweld.profiles.step_faults import IN_TRACE
from torchweld.profiles.traces.trace_events import read_recording


@pytest.fixture(scope="module")
def training() -> Profile:
    return read_trace(TRACES / "a100_training_step.json.gz")


# ---- real traces ----


# What HolisticTraceAnalysis 0.5.0 says; see tests/traces/README.md.
@pytest.mark.parametrize(
    ("field", "reference"),
    [
        ("idle_us", 62_119),
        ("compute_us", 234_760),
        ("non_compute_us", 86_525),
        ("span_us", 383_404),
        ("launches", 7_875),
        ("launch_us", 115_050),
        ("launched_us", 413_947),
    ],
)
def test_the_device_agrees_with_the_reference(
    training: Profile, field: str, reference: float
) -> None:
    assert getattr(training.device, field) == pytest.approx(reference, rel=0.005)


def test_a_training_run_is_read_whole(training: Profile) -> None:
    assert len(training.ops) == 40_506
    assert names(training).count("aten::linear") == 606
    assert training.about.training
    assert training.about.steps == 6
    assert training.about.rank == 3
    assert training.device is not None
    assert training.device.name == "NVIDIA A100-PG509-200"
    assert len(training.device.kernels) == 9_450
    assert all(kernel.launch >= 0 for kernel in training.device.kernels)
    phases = {op.phase for op in training.ops}
    assert phases >= {"forward", "backward", "optimizer"}
    # Everything is accounted for: the phases, and one notice about the last step.
    assert len(training.notices) == 1


def test_a_trace_does_not_tell_page_faults(training: Profile) -> None:
    assert training.faults == IN_TRACE
    assert "traces do not tell" in str(training.faults)


def test_ops_nest_and_their_own_times_add_up(training: Profile) -> None:
    assert all(op.parent < i for i, op in enumerate(training.ops))
    linear = names(training).index("aten::linear")
    inner = [op for op in training.ops if op.parent == linear]
    assert [op.name for op in inner] == ["aten::t", "aten::addmm"]
    whole = training.ops[linear]
    assert whole.self_us == pytest.approx(whole.raw_us - sum(op.raw_us for op in inner))


def test_an_inductor_kernel_launched_by_the_driver() -> None:
    profile = read_trace(TRACES / "a100_triton_fused.json.gz")
    assert profile.device is not None
    (kernel,) = profile.device.kernels
    assert (kernel.category, kernel.inside) == ("triton", ("add", "cos", "sin"))
    assert kernel.duration_us == pytest.approx(1.76)
    call = profile.device.calls[kernel.launch]
    assert call.name == "cuLaunchKernel"
    assert profile.device.launch_us == pytest.approx(47.768)
    assert profile.ops[kernel.op].name == "triton_poi_fused_add_cos_sin_0"


def test_an_amd_trace() -> None:
    profile = read_trace(TRACES / "mi250_toy_training.json.gz")
    assert profile.device is not None
    assert profile.about.training
    assert {call.name for call in profile.device.calls} >= {"hipLaunchKernel"}
    assert len(profile.device.kernels) == 16
    assert all(kernel.launch >= 0 for kernel in profile.device.kernels)
    gemms = [kernel for kernel in profile.device.kernels if kernel.category == "gemm"]
    assert {profile.ops[kernel.op].name for kernel in gemms} <= {"aten::addmm", "aten::mm"}
    # The trace calls the device "AMD Radeon Graphics", which says nothing about its peaks.
    assert profile.device.peak_gflops == {}


def test_an_inference_without_steps() -> None:
    profile = read_trace(TRACES / "a100_alexnet_inference.json.gz")
    assert profile.device is not None
    assert not profile.about.training
    assert (profile.about.steps, profile.device.steps, profile.about.rank) == (1, 0, 0)
    assert len(profile.device.kernels) == 98
    device = profile.device
    assert device.idle_us + device.compute_us + device.non_compute_us == pytest.approx(
        device.span_us
    )


def test_a_trace_of_a_cpu_alone_has_no_device() -> None:
    profile = read_trace(TRACES / "cpu_only.json.gz")
    assert profile.device is None
    assert len(profile.ops) == 2_424
    assert profile.about.steps == 1
    assert profile.step_us == 75_473
    assert profile.notices == ()


@pytest.mark.parametrize(
    "file",
    [
        "a100_alexnet_inference",
        "a100_triton_fused",
        "cpu_only",
        "mi250_toy_training",
        pytest.param("a100_training_step", marks=pytest.mark.slow),
    ],
)
def test_what_was_read_can_be_saved_and_loaded(file: str, tmp_path: Path) -> None:
    profile = read_trace(TRACES / f"{file}.json.gz")
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile


MEASURE = """
import resource, sys
from torchweld.profiles.recording.trace_profile import read_trace
def peak(): return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read_trace(sys.argv[2])  # everything that reading needs is loaded now
before = peak()
profile = read_trace(sys.argv[1])
print(peak() - before)
"""


def test_memory_is_bounded_by_a_small_multiple_of_the_file() -> None:
    big, small = TRACES / "a100_training_step.json.gz", TRACES / "cpu_only.json.gz"
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(big), str(small)],
        capture_output=True,
        text=True,
        check=True,
    )
    size = len(gzip.decompress(big.read_bytes()))
    assert int(done.stdout) < 3 * size


# ---- ops, modules, memory ----


def test_names_of_older_releases(tmp_path: Path) -> None:
    trace = MadeTrace().add("Operator", "aten::mm", 0, 10).add("Operator", "ProfilerStep#1", 0, 50)
    trace.add("Runtime", "cudaLaunchKernel", 2, 3, args={"correlation": 1})
    for i, cat in enumerate(("Kernel", "Memcpy", "Memset")):
        trace.ran(cat, 20 + 10 * i, 5, 1, cat=cat)
    profile = read_trace(trace.write(tmp_path / "trace.json"))
    assert names(profile) == ["aten::mm"]
    assert profile.about.steps == 1
    assert profile.device is not None
    assert [kernel.category for kernel in profile.device.kernels] == ["other", "copy", "set"]
    assert profile.ops[0].kernels == (0, 1, 2)


def test_tensors_come_from_the_fields_of_the_op(tmp_path: Path) -> None:
    arguments = {
        "Input Dims": [[2, 3], [], [], [[4], [5, 6]], [7]],
        "Input type": ["c10::BFloat16", "Scalar", "long int", "TensorList", "unsigned char"],
        "Input Strides": [[1, 2], [], [], [[1], [6, 1]], []],
    }
    trace = MadeTrace().op("aten::x", 0, 5, **arguments).op("aten::y", 10, 5)
    x, y = read_trace(trace.write(tmp_path / "trace.json")).ops
    described = [t and (t.shape, t.dtype, t.strides) for t in x.inputs]
    assert described == [
        ((2, 3), "bfloat16", (1, 2)),
        None,
        ((), "int64", ()),
        ((4,), "", (1,)),
        ((5, 6), "", (6, 1)),
        ((7,), "uint8", None),
    ]
    assert all(tensor is None or tensor.storage is None for tensor in x.inputs)
    assert y.inputs == ()


def test_backward_nodes_belong_to_the_module_of_their_forward_op(tmp_path: Path) -> None:
    trace = MadeTrace()
    for i, path in enumerate(("encoder.fc", "decoder.fc")):
        trace.add("user_annotation", f"nn.Module: {path}", 100 * i, 50)
        trace.op("aten::addmm", 100 * i + 5, 40, **{"Sequence number": 7 + i, "Fwd thread id": 0})
        # Another thread has the same numbers, but fewer of those that are asked for.
        if i == 0:
            trace.op("aten::mul", 300, 5, tid=HOST + 5, **{"Sequence number": 7})
        node = {"Sequence number": 7 + i, "Fwd thread id": 1}
        engine = "autograd::engine::evaluate_function: AddmmBackward0"
        trace.op(engine, 500 + 100 * i, 60, tid=BACKWARD, **node)
        trace.op("AddmmBackward0", 502 + 100 * i, 50, tid=BACKWARD, **node)
        trace.op("aten::mm", 505 + 100 * i, 30, tid=BACKWARD)
    profile = read_trace(trace.write(tmp_path / "trace.json"))
    found = [
        (profile.modules[op.module].path, op.phase) for op in profile.ops if op.name == "aten::mm"
    ]
    assert found == [("encoder.fc", "backward"), ("decoder.fc", "backward")]
    assert profile.about.training


def test_the_module_hierarchy_of_scripted_models_gives_paths(tmp_path: Path) -> None:
    top = "TOP(ResNet)::forward.SELF(ResNet)::_forward_impl"
    layer = f"{top}.layer1(Sequential)::forward.0(BasicBlock)::forward"
    conv = f"{layer}.conv1(Conv2d)::forward.SELF(Conv2d)::_conv_forward"
    trace = MadeTrace().op("aten::conv2d", 0, 10, **{"Module Hierarchy": conv})
    trace.op("aten::convolution", 2, 5, **{"Module Hierarchy": ""})
    trace.op("aten::add", 20, 5, **{"Module Hierarchy": layer})
    trace.op("aten::flatten", 30, 5, **{"Module Hierarchy": top})
    profile = read_trace(trace.write(tmp_path / "trace.json"))
    owners = {op.name: profile.modules[op.module].path for op in profile.ops}
    assert owners == {
        "aten::conv2d": "layer1.0.conv1",
        "aten::convolution": "layer1.0.conv1",
        "aten::add": "layer1.0",
        "aten::flatten": "",
    }
    kinds = {module.path: module.kind for module in profile.modules}
    assert kinds["layer1.0.conv1"] == "Conv2d"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.act = nn.ReLU()
        self.second = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.act(self.first(x)))


def export(model: nn.Module, path: Path, mark: bool = False, **options: Any) -> Path:
    def run() -> None:
        model(torch.randn(3, 8)).sum().backward()

    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU], acc_events=True, **options
    ) as profiler:
        if mark:
            with instrumented([("", model)]):
                run()
        else:
            run()
    profiler.export_chrome_trace(str(path))
    return path


def test_ranges_with_paths_are_module_calls(tmp_path: Path) -> None:
    path = export(Net(), tmp_path / "trace.json", mark=True)
    profile = read_trace(path)
    by_path = {module.path: module for module in profile.modules}
    assert by_path.keys() >= {"", "first", "act", "second"}
    assert by_path["second"].backward_us > 0
    owners = [profile.modules[op.module].path for op in profile.ops if op.name == "aten::addmm"]
    assert owners == ["first", "second"]
    assert profile.notices == ()


def test_a_module_that_is_met_before_the_one_around_it_comes_after_it(tmp_path: Path) -> None:
    trace = MadeTrace()
    trace.add("user_annotation", "nn.Module: a.b", 0, 10).op("aten::x", 1, 2)
    trace.add("user_annotation", "nn.Module: a", 20, 10).op("aten::y", 21, 4)
    profile = read_trace(trace.write(tmp_path / "trace.json"))
    assert [(module.path, module.parent) for module in profile.modules] == [
        ("", -1),
        ("a", 0),
        ("a.b", 1),
    ]
    assert [profile.modules[op.module].path for op in profile.ops] == ["a.b", "a"]
    assert [module.calls for module in profile.modules] == [0, 1, 1]
    assert profile.modules[1].forward_us == 20.0
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile


@pytest.mark.parametrize("mark", [False, True])
def test_stacks_give_modules_unless_there_are_ranges_with_paths(tmp_path: Path, mark: bool) -> None:
    path = export(Net(), tmp_path / "trace.json", mark=mark, with_stack=True)
    profile = read_trace(path)
    owners = [profile.modules[op.module] for op in profile.ops if op.name == "aten::addmm"]
    if mark:
        assert [module.path for module in owners] == ["first", "second"]
    else:
        assert [module.path for module in owners] == ["Net_0.Linear_0", "Net_0.Linear_1"]
        assert {module.kind for module in owners} == {"Linear"}
    relu = next(op for op in profile.ops if op.name == "aten::relu")
    assert re.search(r"test_trace_profile\.py\(\d+\): forward$", relu.where)


def test_memory_events_give_the_memory_account(tmp_path: Path) -> None:
    path = export(Net(), tmp_path / "t.json.gz", profile_memory=True, record_shapes=True, mark=True)
    profile = read_trace(path)
    assert profile.memory is not None
    assert profile.memory.peak_bytes > 0
    assert profile.memory.module_bytes["first"] >= 3 * 16 * 4
    addmm = next(op for op in profile.ops if op.name == "aten::addmm")
    assert [t and t.shape for t in addmm.inputs][:3] == [(16,), (3, 8), (8, 16)]


def test_a_device_frees_its_own_memory_only(tmp_path: Path) -> None:
    trace = MadeTrace().op("aten::mm", 0, 20).op("aten::empty", 5, 5).op("aten::add", 30, 10)

    def memory(ts: float, address: int, size: int, device: int = 1) -> None:
        arguments = {"Addr": address, "Bytes": size, "Device Type": device}
        event = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "args": arguments}
        trace.events.append({**event, "pid": HOST, "tid": HOST, "ts": ts})

    memory(2, 99, -512)  # was there before
    memory(7, 64, 4096)
    memory(8, 64, 100, device=0)
    memory(15, 64, -4096)
    memory(33, 64, 1024)
    recording = read_recording(trace.write(tmp_path / "trace.json"))
    found = [(a.storage, a.bytes, recording.events[a.event].name) for a in recording.allocations]
    assert found == [
        (0, 4096, "aten::empty"),
        (0, -4096, "aten::mm"),
        (1, 1024, "aten::add"),
    ]


def test_times_count_from_the_first_step(tmp_path: Path) -> None:
    trace = MadeTrace().op("aten::zeros", 5_000, 3).step(1, 5_010, 50).op("aten::mm", 5_020, 10)
    trace.launch("sgemm", 5_022, 5_030, 5, 1)
    path = trace.write(tmp_path / "trace.json")
    recording = read_recording(path)
    assert {e.name: e.start_us for e in recording.events if e.kind in (OP, STEP, MODULE)} == {
        "aten::zeros": -10,
        "ProfilerStep#1": 0,
        "aten::mm": 10,
    }
    profile = read_trace(path)
    assert {op.name: op.start_us for op in profile.ops} == {"aten::zeros": -10, "aten::mm": 10}
    assert profile.device is not None
    assert profile.device.kernels[0].start_us == 20
    assert profile.step_us == 50
