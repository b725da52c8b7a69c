"""Sides run in this process or in their own, and cannot tell the difference."""

from __future__ import annotations

import sys
import threading
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.bench_samples import GATED, PLAIN, case, check_of

from torchweld.bench import MlpShape, measure, plan
from torchweld.bench.bench_results import Latency
from torchweld.bench.bench_stages import Stage, open_stage
from torchweld.bench.block_bench import BlockBench
from torchweld.bench.concurrent_callers import Callers, callers, dismiss
from torchweld.bench.eager_block import BlockSource
from torchweld.bench.parked_check import cpu_s
from torchweld.bench.runtime_server import arrays_of
from torchweld.bench.runtimes.onnx_exports import OnnxReadingRuntime
from torchweld.bench.runtimes.torch_runtimes import EagerRuntime
from torchweld.bench.runtimes.torchweld_runtimes import BackendRuntime
from torchweld.bench.stage_timing import single_calls
from torchweld.bench.workers.local_worker import LocalWorker
from torchweld.bench.workers.worker_process import WorkerError, WorkerProcess
from torchweld.core.activations import ACTIVATIONS
from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured

needs_signals = pytest.mark.skipif(
    sys.platform == "win32", reason="processes are parked by POSIX signals"
)
needs_onnxruntime = pytest.mark.skipif(
    find_spec("onnxruntime") is None or find_spec("onnx") is None, reason="needs ONNX Runtime"
)
needs_openvino = pytest.mark.skipif(
    find_spec("openvino") is None or find_spec("onnx") is None, reason="needs OpenVINO"
)


# ---- where ----


def test_processes_are_started_only_for_who_needs_one() -> None:
    assert not open_stage(["eager", "cpu", "torch:mkldnn", "mkldnn"], 1).processes
    for name in ("compile", "compile-max", "compile:inductor", "onnxruntime", "openvino"):
        assert open_stage(["eager", "cpu", name], 1).processes


def outputs(stage: Stage, names: list[str]) -> list[np.ndarray]:
    found = []
    assert stage.start(names) == {}
    for name in names:
        stage.ask(name, "load", BlockSource(mlp=GATED, seed=5))
        (output,) = stage.ask(name, "prepare", 2, 3)
        assert stage.side(name).time(2) > 0
        cpu_us = stage.ask(name, "cost")["cpu_us"]
        assert isinstance(cpu_us, NotMeasured) or cpu_us > 0
        found.append(output)
    return found


@needs_signals
def test_both_stages_do_the_same_work() -> None:
    names = ["eager", "reference"]
    with Stage(1) as local:
        here = outputs(local, names)
    with Stage(1, processes=True) as stage:
        there = outputs(stage, names)
    for one, other in zip(here, there, strict=True):
        assert one.shape == (2, 3, 4)
        assert np.array_equal(one, other)


@needs_signals
def test_only_one_worker_runs_at_a_time() -> None:
    with Stage(1, processes=True) as stage:
        assert stage.start(["eager", "mkldnn"]) == {}
        stage.ask("eager", "load", BlockSource(mlp=GATED))
        stage.ask("mkldnn", "load", BlockSource(mlp=GATED))
        if sys.platform == "linux":
            workers = {n: w for n, w in stage.workers.items() if isinstance(w, WorkerProcess)}
            pids = {name: worker.pid for name, worker in workers.items()}
            state = {n: Path(f"/proc/{pid}/stat").read_text().split()[2] for n, pid in pids.items()}
            assert state["eager"] == "T"
            assert state["mkldnn"] != "T"
        with pytest.raises(WorkerError, match="batch_size"):
            stage.ask("mkldnn", "prepare", "no number")
        (output,) = stage.ask("mkldnn", "prepare", 2)
        assert output.shape == (2, 4)
        if sys.platform == "linux":
            stage.park_all()
            before_s = cpu_s(pids["mkldnn"])
            time.sleep(0.02)
            assert cpu_s(pids["mkldnn"]) == before_s


def test_a_local_side_runs_without_gradients_and_says_what_went_wrong() -> None:
    broken = partial(BackendRuntime, "nobody")
    with Stage(1, {"eager": EagerRuntime, "broken": broken}) as stage:
        reasons = stage.start(["eager", "broken"])
        assert stage.names == ["eager"]
        assert "unknown backend 'nobody'" in reasons["broken"]
        with pytest.raises(WorkerError, match="AttributeError"):
            stage.ask("eager", "prepare", 3)
        stage.ask("eager", "load", BlockSource(mlp=PLAIN))
        stage.ask("eager", "prepare", 3)
        assert torch.is_grad_enabled()
        eager = stage.workers["eager"]
        assert isinstance(eager, LocalWorker)
        assert not eager.held.call().requires_grad or torch.is_grad_enabled()
        assert stage.side("eager", cold=True).time(1) > 0


def test_outputs_come_as_arrays_whatever_a_runtime_returns() -> None:
    x = np.ones((2, 2), np.float32)
    assert len(arrays_of([x, np.ones(3, np.int64)])) == 1
    assert arrays_of(x)[0].dtype == np.float32
    tensor = torch.ones(2, dtype=torch.bfloat16)
    (one, other) = arrays_of({"a": tensor, "b": (torch.ones(2).double(), torch.ones(2).long())})
    assert one.dtype == np.float32
    assert other.dtype == np.float64


# ---- single calls and several callers ----


def test_single_calls_take_turns_and_are_counted() -> None:
    with Stage(1) as stage:
        stage.start(["eager", "torch"])
        for name in stage.names:
            stage.ask(name, "load", BlockSource(mlp=PLAIN))
            stage.ask(name, "prepare", 1)
        found = single_calls(stage, ["eager", "torch"], seconds=0.05, seed=0)
    assert set(found) == {"eager", "torch"}
    assert all(len(us) >= 50 and min(us) > 0 for us in found.values())


def test_percentiles_need_calls_beyond_them() -> None:
    few = Latency(calls_us=tuple(float(i) for i in range(101)))
    assert few.percentile(50) == 50.0
    assert few.percentile(95) == 95.0
    assert few.percentile(99) == NotMeasured("p99 needs 500 calls, and there are 101")
    many = Latency(calls_us=tuple(float(i) for i in range(1001)))
    assert many.percentile(99) == 990.0


def test_callers_call_at_the_same_time_and_are_ended() -> None:
    both = threading.Barrier(2, timeout=10)
    team = Callers(2)
    rate = team.rate(both.wait, 0.0)  # passes only if two are inside at once
    assert rate > 0
    slow = team.rate(lambda: time.sleep(0.01), 0.05)
    assert 20 < slow <= 200
    before = threading.active_count()
    team.end()
    assert threading.active_count() <= before - 2  # one of an earlier test may end too


def test_callers_that_cannot_all_be_started_are_ended_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = threading.Thread.start
    started: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(TorchweldError, match=r"3 of 5 callers could be started .*; give fewer"):
        Callers(5)
    assert len(started) == 3
    assert not any(thread.is_alive() for thread in started)


def test_one_team_serves_a_process_until_it_is_dismissed() -> None:
    team = callers(2)
    assert callers(2) is team
    assert callers(3) is not team
    dismiss()
    assert callers(2) is not team
    dismiss()
    dismiss()


def test_a_caller_that_raises_is_heard() -> None:
    def broken() -> None:
        raise ZeroDivisionError("a bug")

    team = Callers(2)
    with pytest.raises(ZeroDivisionError):
        team.rate(broken, 0.01)
    assert team.rate(lambda: None, 0.001) > 0
    team.end()


# ---- foreign runtimes, really run ----


@needs_signals
@needs_onnxruntime
def test_onnx_runtime_computes_every_activation_as_eager_does() -> None:
    """Each kind is loaded, run and judged in one process, plain or gated."""
    names = [name for name in ACTIVATIONS if name != "identity"]
    mlps = [MlpShape(sizes=(8, 16, 4), activation=name) for name in names]
    mlps += [GATED, MlpShape(sizes=(8, 16), activation="identity")]
    with Stage(1, processes=True) as stage, Stage(1) as local:
        assert stage.start(["onnxruntime"]) == {}
        local.start(["eager"])
        for mlp in mlps:
            stage.ask("onnxruntime", "load", BlockSource(mlp=mlp, seed=0))
            local.ask("eager", "load", BlockSource(mlp=mlp, seed=0))
            (theirs,) = stage.ask("onnxruntime", "prepare", 3)
            (ours,) = local.ask("eager", "prepare", 3)
            np.testing.assert_allclose(theirs, ours, rtol=2e-5, atol=2e-6, err_msg=mlp.name)


@needs_signals
@needs_onnxruntime
@needs_openvino
def test_peers_are_measured_in_processes_of_their_own() -> None:
    torch.set_num_threads(1)  # theirs too: products are so small that a second one only waits
    peers = ("compile", "onnxruntime", "openvino")
    bench = plan([case()], ("torch",), peers, seconds=0.1)
    assert set(bench.against) == set(peers) - set(bench.left_out)
    (cell,) = measure(bench, [case()])
    for name in bench.against:
        result = cell.result(name)
        assert check_of(cell, name).ok
        assert result.comparison is not None
        assert result.cost.ops is None
    assert cell.result("onnxruntime").kernel in ("Gemm", "MatMul")
    assert cell.result("torch").comparison is not None


def test_foreign_peers_are_left_out_of_what_is_not_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are not asked at all, so they need not be there."""
    half, peers = case(dtype="bfloat16"), ("onnxruntime", "openvino")
    for runtime in OnnxReadingRuntime.__subclasses__():
        monkeypatch.setattr(runtime, "needs", ())
    bench = plan([half], ("torch",), peers, seconds=0.1)
    assert bench.against == peers
    with Stage(1) as stage:
        assert stage.start(["eager", "torch"]) == {}
        cell = BlockBench(stage, bench, {}).cell(half, latency=False)
    for name in peers:
        assert cell.result(name).refused == "it is measured in float32 only"
    assert cell.result("torch").comparison is not None
