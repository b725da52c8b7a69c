"""What ran on a device, what it waited for, and who launched it."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.made_traces import HOST, MadeTrace

from torchweld.profiles.accounting.device_account import covered, device_account
from torchweld.profiles.accounting.device_peaks import (
    PEAKS,
    DevicePeaks,
    found_peaks,
    peaks_of,
)
from torchweld.profiles.profile import Device, Profile
from torchweld.profiles.recorded_events import KERNEL, MEMCPY, MEMSET, Event, Recording
from torchweld.profiles.recording.trace_profile import read_trace


def profile_of(trace: MadeTrace, folder: Path) -> Profile:
    return read_trace(trace.write(folder / "trace.json"))


def device_of(trace: MadeTrace, folder: Path) -> Device:
    device = profile_of(trace, folder).device
    assert device is not None
    return device


# ---- times ----

NAMES = {
    KERNEL: ("void elementwise_kernel<4>", "ampere_sgemm_128x64_nn", "ncclKernel_AllReduce_RING"),
    MEMCPY: ("Memcpy HtoD (Pageable -> Device)",),
    MEMSET: ("Memset (Device)",),
}


@st.composite
def device_events(draw: st.DrawFn) -> list[Event]:
    kind = draw(st.sampled_from([KERNEL, KERNEL, KERNEL, MEMCPY, MEMSET]))
    start = draw(st.integers(0, 60))
    return [
        Event(
            name=draw(st.sampled_from(NAMES[kind])),
            kind=kind,
            start_us=float(start),
            end_us=float(start + draw(st.integers(0, 12))),
            device=draw(st.integers(0, 1)),
            stream=draw(st.integers(0, 2)),
        )
    ]


@given(st.lists(device_events(), min_size=1, max_size=12))
def test_idle_compute_and_non_compute_add_up_to_the_span_and_are_those_counted_tick_by_tick(
    drawn: list[list[Event]],
) -> None:
    events = list(itertools.chain.from_iterable(drawn))
    device = device_account(Recording(events=events))
    assert device is not None
    ticks = range(
        int(min(event.start_us for event in events)), int(max(event.end_us for event in events))
    )

    def running(tick: int) -> list[Event]:
        return [event for event in events if event.start_us <= tick < event.end_us]

    def computes(event: Event) -> bool:
        return event.kind == KERNEL and not event.name.startswith("nccl")

    assert device.span_us == len(ticks)
    assert device.idle_us == sum(not running(tick) for tick in ticks)
    assert device.compute_us == sum(any(map(computes, running(tick))) for tick in ticks)
    assert device.idle_us + device.compute_us + device.non_compute_us == device.span_us
    assert sum(gap.duration_us for gap in device.gaps) == device.idle_us
    assert sum(us for _, us in device.by_stream.values()) == sum(e.duration_us for e in events)
    assert sum(count for count, _ in device.by_category.values()) == len(events)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=12))
def test_covered_times_are_apart_in_order_and_complete(drawn: list[tuple[int, int]]) -> None:
    spans = [(float(start), float(start + length)) for start, length in drawn]
    merged = covered(spans)
    assert all(a_end < b_start for (_, a_end), (b_start, _) in itertools.pairwise(merged))
    assert all(any(a <= start and end <= b for a, b in merged) for start, end in spans)
    assert {edge for span in merged for edge in span} <= {edge for span in spans for edge in span}


def test_overlapping_streams_count_once(tmp_path: Path) -> None:
    trace = MadeTrace()
    trace.ran("sgemm", 0, 10, stream=7).ran("sgemm", 5, 10, stream=8)
    trace.ran("Memcpy DtoH (Device -> Pinned)", 12, 8, stream=9, cat="gpu_memcpy")
    device = device_of(trace, tmp_path)
    assert (device.span_us, device.idle_us) == (20, 0)
    assert (device.compute_us, device.non_compute_us) == (15, 5)
    assert device.by_stream == {
        "device 0 stream 7": (1, 10),
        "device 0 stream 8": (1, 10),
        "device 0 stream 9": (1, 8),
    }


def test_kernels_without_duration_are_counted_and_take_no_time(tmp_path: Path) -> None:
    trace = MadeTrace().ran("sgemm", 0, 0).ran("sgemm", 10, 0)
    device = device_of(trace, tmp_path)
    assert (device.span_us, device.idle_us, device.compute_us) == (10, 10, 0)
    assert device.by_category == {"gemm": (2, 0)}


def test_waiting_is_no_work_of_the_device(tmp_path: Path) -> None:
    trace = MadeTrace().ran("sgemm", 0, 10).ran("Stream Sync", 2, 50, cat="cuda_sync")
    trace.ran("ProfilerStep#1", 0, 90, cat="gpu_user_annotation")
    device = device_of(trace, tmp_path)
    assert device.span_us == 10
    assert len(device.kernels) == 1


def test_without_anything_on_a_device_there_is_no_device(tmp_path: Path) -> None:
    trace = MadeTrace().op("aten::mm", 0, 5).call("cudaGetDevice", 1, 1, 3)
    assert profile_of(trace, tmp_path).device is None


# ---- launches ----


def test_launches_are_calls_that_put_something_on_the_device(tmp_path: Path) -> None:
    trace = MadeTrace().op("aten::mm", 0, 30)
    trace.launch("sgemm", 2, 20, 10, 1)
    trace.call("cudaLaunchKernel", 6, 3, 2)  # its kernel is not in the trace
    trace.ran("sgemm", 40, 5, 77)  # its launch is not in the trace
    trace.call("cudaOccupancyMaxActiveBlocksPerMultiprocessor", 10, 4, 5)
    device = device_of(trace, tmp_path)
    assert (device.launches, device.launch_us, device.launched_us) == (1, 2, 10)
    assert (device.occupancy_queries, device.occupancy_query_us) == (1, 4)
    assert [kernel.launch for kernel in device.kernels] == [0, -1]
    assert device.calls[0].name == "cudaLaunchKernel"


def test_a_graph_is_one_launch_of_many_kernels(tmp_path: Path) -> None:
    trace = MadeTrace().call("cudaGraphLaunch", 0, 5, 9)
    for start in (10, 20, 30):
        trace.ran("sgemm", start, 4, 9)
    device = device_of(trace, tmp_path)
    assert (device.launches, device.launch_us, device.launched_us) == (1, 5, 12)


def test_no_correlation_joins_nothing(tmp_path: Path) -> None:
    device = device_of(
        MadeTrace().call("cudaLaunchKernel", 0, 5, 0).ran("sgemm", 9, 1, 0), tmp_path
    )
    assert device.launches == 0


def test_two_processes_that_count_alike_are_told_apart_by_time(tmp_path: Path) -> None:
    trace = MadeTrace()
    trace.call("cudaLaunchKernel", 0, 2, 1, pid=1, tid=1).ran("sgemm", 5, 10, 1, device=0)
    trace.call("cudaLaunchKernel", 100, 3, 1, pid=2, tid=2).ran("sgemm", 105, 10, 1, device=1)
    profile = profile_of(trace, tmp_path)
    assert profile.device is not None
    launches = [profile.device.calls[kernel.launch] for kernel in profile.device.kernels]
    assert [call.duration_us for call in launches] == [2, 3]
    assert profile.device.launches == 2
    assert any("more than one device" in notice for notice in profile.notices)


def test_a_driver_call_inside_a_runtime_call_is_not_a_second_launch(tmp_path: Path) -> None:
    trace = MadeTrace().call("cudaLaunchKernel", 0, 9, 4).ran("sgemm", 12, 1, 4)
    trace.add("cuda_driver", "cuLaunchKernelEx", 2, 5, args={"correlation": 4})
    device = device_of(trace, tmp_path)
    assert (device.launches, device.launch_us) == (1, 9)


def test_kernels_belong_to_the_innermost_op_that_launched_them(tmp_path: Path) -> None:
    trace = MadeTrace().op("aten::linear", 0, 50).op("aten::addmm", 5, 40)
    trace.launch("sgemm", 10, 20, 10, 1).launch("splitKreduce_kernel", 15, 30, 5, 2)
    profile = profile_of(trace, tmp_path)
    assert profile.device is not None
    names = [profile.ops[kernel.op].name for kernel in profile.device.kernels]
    assert names == ["aten::addmm", "aten::addmm"]
    assert {op.name: op.kernels for op in profile.ops} == {
        "aten::linear": (),
        "aten::addmm": (0, 1),
    }


def test_inputs_of_ops_that_launch_kernels_are_on_the_device(tmp_path: Path) -> None:
    shapes = {"Input Dims": [[2, 3]], "Input type": ["float"]}
    trace = MadeTrace().op("aten::relu", 0, 50, **shapes).op("aten::clamp_min", 5, 40, **shapes)
    trace.op("aten::view", 60, 5, **shapes).launch("elementwise", 10, 20, 10, 1)
    devices = {}
    for op in profile_of(trace, tmp_path).ops:
        (tensor,) = op.inputs
        assert tensor is not None
        devices[op.name] = tensor.device
    assert devices == {"aten::relu": "cuda", "aten::clamp_min": "cuda", "aten::view": "cpu"}


def test_hip_calls_launch_too(tmp_path: Path) -> None:
    trace = MadeTrace().call("hipExtModuleLaunchKernel", 0, 4, 1).ran("Cijk_Ailk_Bljk", 6, 5, 1)
    trace.call("hipLaunchKernel", 10, 3, 2).ran("void elementwise_kernel<2>", 14, 5, 2)
    trace.call("hipMemcpyAsync", 20, 2, 3).ran("__amd_rocclr_copyBuffer", 30, 5, 3)
    device = device_of(trace, tmp_path)
    assert (device.launches, device.launch_us) == (3, 9)
    assert device.by_category == {"gemm": (1, 5), "pointwise": (1, 5), "copy": (1, 5)}
    assert device.non_compute_us == 5


# ---- steps ----


def test_the_last_step_is_left_out_of_the_figures_and_said_to_be(tmp_path: Path) -> None:
    trace = MadeTrace().step(5, 0, 100).step(6, 100, 100)
    # Launched in the first step, run in the second: it belongs to the first.
    trace.launch("sgemm", 10, 20, 10, 1).launch("sgemm", 90, 105, 20, 2)
    trace.launch("sgemm", 110, 150, 30, 3)
    profile = profile_of(trace, tmp_path)
    device = profile.device
    assert device is not None
    assert (device.span_us, device.idle_us, device.launches, device.steps) == (105, 75, 2, 1)
    assert len(device.kernels) == 3
    assert profile.about.steps == 2
    assert any("1 of 2 steps" in notice for notice in profile.notices)


def test_a_single_step_is_counted_whole(tmp_path: Path) -> None:
    trace = MadeTrace().step(1, 0, 50).launch("sgemm", 10, 60, 10, 1)
    device = device_of(trace, tmp_path)
    assert (device.launches, device.steps, device.until_us) == (1, 1, None)


def test_the_same_step_of_two_ranks_is_one_step(tmp_path: Path) -> None:
    trace = MadeTrace().step(3, 0, 50, pid=1).step(3, 5, 50, pid=2)
    trace.launch("sgemm", 10, 20, 10, 1).launch("sgemm", 30, 40, 10, 2)
    assert device_of(trace, tmp_path).launches == 2


# ---- gaps ----


def causes(trace: MadeTrace, folder: Path) -> list[str]:
    return [gap.cause for gap in device_of(trace, folder).gaps]


def test_a_late_launch_is_the_hosts_and_names_its_op(tmp_path: Path) -> None:
    trace = MadeTrace().op("aten::mm", 0, 5).op("aten::relu", 40, 10)
    trace.launch("sgemm", 1, 5, 10, 1).launch("elementwise", 42, 50, 5, 2)
    profile = profile_of(trace, tmp_path)
    assert profile.device is not None
    (gap,) = profile.device.gaps
    assert (gap.start_us, gap.duration_us) == (15, 35)
    assert (gap.cause, gap.before) == ("host wait", "elementwise")
    assert profile.ops[gap.op].name == "aten::relu"


def test_a_launch_from_long_before_is_not_the_hosts_fault(tmp_path: Path) -> None:
    trace = MadeTrace().launch("sgemm", 0, 10, 10, 1).launch("elementwise", 4, 22, 5, 2)
    assert causes(trace, tmp_path) == ["kernel wait"]


def test_a_wait_for_the_device_before_the_launch_is_a_synchronisation(tmp_path: Path) -> None:
    trace = MadeTrace().launch("sgemm", 0, 10, 10, 1).call("cudaStreamSynchronize", 4, 20, 8)
    trace.launch("elementwise", 30, 40, 5, 2)
    assert causes(trace, tmp_path) == ["synchronisation"]


def test_another_threads_wait_is_not_to_blame(tmp_path: Path) -> None:
    trace = MadeTrace().launch("sgemm", 0, 10, 10, 1)
    trace.call("cudaStreamSynchronize", 4, 20, 8, tid=HOST + 9)
    trace.launch("elementwise", 30, 40, 5, 2)
    assert causes(trace, tmp_path) == ["host wait"]


def test_a_copy_that_was_asked_for_in_time_is_waited_for(tmp_path: Path) -> None:
    trace = MadeTrace().launch("sgemm", 0, 10, 10, 1)
    trace.launch("Memcpy HtoD (Pageable -> Device)", 15, 40, 5, 2, cat="gpu_memcpy")
    assert causes(trace, tmp_path) == ["copy"]


def test_without_its_launch_a_gap_has_no_known_cause(tmp_path: Path) -> None:
    trace = MadeTrace().ran("sgemm", 0, 10).ran("sgemm", 30, 10)
    assert causes(trace, tmp_path) == ["unknown"]


# ---- peaks ----


@pytest.mark.parametrize(
    ("name", "dtype", "gflops", "gbps"),
    [
        ("NVIDIA A100-PG509-200", "bfloat16", 312e3, 1555),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156e3, 2039),
        ("NVIDIA H100 PCIe", "float16", 756e3, 2000),
        ("NVIDIA H100 80GB HBM3", "float8_e4m3fn", 1979e3, 3350),
        ("Tesla V100-SXM2-16GB", "float16", 125e3, 900),
        ("Tesla T4", "float32", 8.1e3, 320),
        ("AMD Instinct MI250X", "float32", 47.9e3, 1638),
        ("AMD Instinct MI300X", "bfloat16", 1307e3, 5300),
        ("NVIDIA B200", "bfloat16", 2250e3, 8000),
        ("NVIDIA GB200", "float8_e4m3fn", 5000e3, 8000),
        ("NVIDIA H200 NVL", "float16", 835.5e3, 4800),
        ("NVIDIA L40S", "bfloat16", 362e3, 864),
        ("NVIDIA L40", "bfloat16", 181e3, 864),
        ("NVIDIA GeForce RTX 5090", "float32", 104.8e3, 1792),
        ("NVIDIA GeForce RTX 5080", "float32", 56.28e3, 960),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2e3, 1008),
        ("NVIDIA GeForce RTX 4090 D", "bfloat16", 147.1e3, 1008),
        ("NVIDIA GeForce RTX 3090 Ti", "tf32", 40e3, 1008),
        ("NVIDIA GeForce RTX 3090", "float32", 35.6e3, 936),
    ],
)
def test_peaks_come_with_the_name(name: str, dtype: str, gflops: float, gbps: float) -> None:
    found, bandwidth = peaks_of(name)
    assert found[dtype] == pytest.approx(gflops)
    assert bandwidth == gbps


@pytest.mark.parametrize(
    "name",
    [
        *("", "AMD Radeon Graphics", "NVIDIA A1000", "NVIDIA A10G"),
        *("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 5090 D"),
    ],
)
def test_the_peaks_of_an_unknown_device_are_not_guessed(name: str) -> None:
    assert peaks_of(name) == ({}, None)


@pytest.mark.parametrize("row", PEAKS, ids=lambda row: row.pattern)
def test_every_row_of_peaks_says_where_it_was_read(row: DevicePeaks) -> None:
    assert re.search(r"datasheet|data sheet|\.\w{2,}/|\.com", row.source), row
    assert row.gbps > 0
    assert row.tflops


@pytest.mark.parametrize("row", PEAKS, ids=lambda row: row.pattern)
def test_rates_are_dense_and_those_of_sums_in_fp32(row: DevicePeaks) -> None:
    """With sparsity they would be twice as far apart: no chip does 8-bit numbers at more than twice
    the rate of 16-bit ones, nor those at more than twice that of TF32."""
    rates = row.tflops
    for narrow, wide, most in (
        ("float8", "bfloat16", 2.05),
        ("bfloat16", "tf32", 2.05),
        ("tf32", "float32", 16.0),
        ("float32", "float64", 2.05),
    ):
        if narrow in rates and wide in rates:
            assert rates[narrow] <= most * rates[wide], (row.pattern, narrow)


def test_every_row_of_peaks_is_reached_by_a_name() -> None:
    names = [
        *("NVIDIA GB200", "NVIDIA B200", "NVIDIA H200 NVL", "NVIDIA H200", "NVIDIA H100 PCIe"),
        *("NVIDIA H100 80GB HBM3", "NVIDIA A100-PCIE-80GB"),
        *("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB", "NVIDIA L40S", "NVIDIA L40"),
        *("NVIDIA L4", "NVIDIA A40", "NVIDIA A10", "Tesla V100-PCIE-16GB", "Tesla V100-SXM2-16GB"),
        *("Tesla T4", "NVIDIA GeForce RTX 5090", "NVIDIA GeForce RTX 5080"),
        *("NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3090 Ti"),
        *("NVIDIA GeForce RTX 3090", "AMD Instinct MI300X", "AMD Instinct MI250X"),
        "AMD Instinct MI250",
    ]
    assert [found_peaks(name) for name in names] == list(PEAKS)


def test_every_row_of_peaks_names_where_it_was_read() -> None:
    """A site or a document that can be looked up."""
    for row in PEAKS:
        assert re.search(r"\w\.(com|jp|se|cz|ai|org|pdf)\b", row.source), row.source


@pytest.mark.parametrize("name", ["NVIDIA H100 NVL", "AMD Instinct MI210", "NVIDIA H20"])
def test_a_device_without_a_source_has_no_peaks(name: str) -> None:
    assert peaks_of(name) == ({}, None)


def test_bfloat16_is_not_claimed_where_there_is_none() -> None:
    assert "bfloat16" not in peaks_of("Tesla T4")[0]
