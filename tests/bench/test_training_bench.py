"""Steps of training: output and every gradient verified, then timed; what they keep is counted."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import Pipe

import numpy as np
import pytest
import torch
from tests.support.bench_samples import GATED, PLAIN, FakeCompare, case, check_of
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchweld.bench import (
    Bench,
    Case,
    Cell,
    MlpShape,
    block_bench,
    measure,
    plan,
    stage_timing,
)
from torchweld.bench.bench_results import Result, TrainingCost
from torchweld.bench.bench_stages import Stage
from torchweld.bench.eager_block import BlockSource
from torchweld.bench.runtime_server import bare_arrays, tensors_from
from torchweld.bench.runtimes.runtime import Runtime
from torchweld.bench.runtimes.runtime_names import TRAINING_RUNTIMES, Runtimes
from torchweld.bench.runtimes.torchweld_runtimes import FusedMlpRuntime
from torchweld.bench.step_calls import block_step, judged_of, model_step
from torchweld.bench.step_costs import faults_and_peak
from torchweld.bench.training_participants import native_bf16
from torchweld.bench.training_step import TUNED_MALLOC, Malloc, TrainingStep, malloc_environment
from torchweld.bench.training_truth import TrainingTruth
from torchweld.bench.workers.worker_messages import receive_value, send_value
from torchweld.bench.workers.worker_process import WorkerProcess
from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.core.saved_tensors import saved_bytes
from torchweld.machine import kernel_build

NEEDS_KERNELS = pytest.mark.skipif(
    kernel_build.build_problem() is not None, reason="needs the compiled kernels"
)
SQUARE = MlpShape(sizes=(6, 10, 6))
STEP = TrainingStep()


def trained(
    mlp: MlpShape = PLAIN,
    rows: int = 3,
    dtype: str = "float32",
    blocks: int = 1,
    step: TrainingStep = STEP,
) -> Case:
    return replace(case(mlp, rows, dtype), blocks=blocks, training=step)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> FakeCompare:
    """Nothing is timed, and sides run in this process."""
    fake = FakeCompare()
    monkeypatch.setattr(stage_timing, "compare", fake)

    def local(threads: int, runtimes: Runtimes, malloc: Malloc) -> Stage:
        return Stage(threads, runtimes)

    monkeypatch.setattr(block_bench, "open_training_stage", local)
    return fake


def measured(cases: Sequence[Case], against: Sequence[str] = ()) -> Bench:
    bench = plan(cases, (), against)
    return replace(bench, cells=tuple(measure(bench, cases)))


# ---- what a step is ----


def made_step() -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(1)
    return nn.Linear(4, 3), torch.randn(2, 4, requires_grad=True), torch.randn(2, 3)


def test_gradients_are_none_before_a_step_unless_it_accumulates() -> None:
    for accumulate, times in ((False, 1.0), (True, 3.0)):
        step = TrainingStep(accumulate=accumulate)
        linear, x, gradient = made_step()
        made = block_step(linear, x, [linear.weight, linear.bias], gradient, step)
        for _ in range(3):
            made.call()
        assert x.grad is not None
        assert linear.weight.grad is not None
        torch.testing.assert_close(x.grad, times * (gradient @ linear.weight))
        torch.testing.assert_close(linear.weight.grad, times * (gradient.t() @ x))


def test_what_is_judged_of_a_step_that_accumulates_is_what_one_step_adds() -> None:
    found = []
    for accumulate in (False, True):
        step = TrainingStep(accumulate=accumulate)
        linear, x, gradient = made_step()
        made = block_step(linear, x, [linear.weight, linear.bias], gradient, step)
        found.append(judged_of(made, accumulate))
    for plain, halved in zip(*found, strict=True):
        assert torch.equal(plain, halved)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_an_optimizer_steps_and_the_weights_stay(name: str) -> None:
    step = TrainingStep(optimizer=name)
    linear, x, gradient = made_step()
    before = linear.weight.detach().clone()
    stepped: list[torch.optim.Optimizer] = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: stepped.append(optimizer))
    try:
        made = block_step(linear, x, [linear.weight, linear.bias], gradient, step)
        made.call()
        made.call()
    finally:
        handle.remove()
    assert len(stepped) == 2
    assert stepped[0].defaults["fused"]
    assert sum(len(group["params"]) for group in stepped[0].param_groups) == 2  # x is not one
    assert torch.equal(linear.weight, before)


def test_autocast_is_for_the_forward_alone() -> None:
    step = TrainingStep(autocast="bfloat16")
    linear, x, gradient = made_step()
    made = block_step(linear, x, [linear.weight, linear.bias], gradient, step)
    output, *gradients = judged_of(made, False)
    assert output.dtype == torch.bfloat16
    assert {one.dtype for one in gradients} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


def test_a_models_loss_is_of_all_its_outputs_that_have_gradients() -> None:
    linear = nn.Linear(4, 3)
    x = torch.randn(2, 4)

    def run() -> dict[str, Tensor]:
        y = linear(x)
        return {"y": y, "half": y.bfloat16(), "given": x, "ids": torch.ones(2).long()}

    made = model_step(run, list(linear.parameters()), STEP)
    loss = made.call()
    assert loss.shape == ()
    assert linear.weight.grad is not None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"autocast": "float64"}, "unknown autocast dtype 'float64'"),
        ({"optimizer": "adam"}, "unknown optimizer 'adam'; did you mean 'adamw'"),
        ({"optimizer": "adamw", "accumulate": True}, "a step that accumulates has no optimizer"),
    ],
)
def test_steps_that_there_are_not(given: dict[str, str], message: str) -> None:
    with pytest.raises(TorchweldError, match=message):
        TrainingStep(**given)  # type: ignore[arg-type]


# ---- the truth ----


def source(mlp: MlpShape = SQUARE, **about: object) -> BlockSource:
    return BlockSource(mlp=mlp, training=True, **about)  # type: ignore[arg-type]


def step_of(own: BlockSource, step: TrainingStep, rows: int) -> list[Tensor]:
    x = own.inputs(rows).requires_grad_()
    made = block_step(own.make().model, x, own.tensors, own.gradient(rows), step)
    return judged_of(made, step.accumulate)


@pytest.mark.parametrize("mlp", [SQUARE, GATED, MlpShape(sizes=(5, 3), activation="identity")])
def test_one_wrong_gradient_is_found_whichever_it_is(mlp: MlpShape) -> None:
    own = source(mlp)
    truth = TrainingTruth.of(own, STEP, 4)
    eager = step_of(own, STEP, 4)
    assert len(eager) == 2 + len(own.tensors)
    assert truth.check(eager, eager).ok
    for i, name in enumerate(truth.references):
        found = list(eager)
        found[i] = found[i].clone()
        found[i].view(-1)[-1] += 0.5
        check = truth.check(found, eager)
        assert not check.ok
        assert str(check.reason).startswith(f"{name}: row")
    assert truth.check(eager[:-1], eager).reason == (
        f"there are {len(eager) - 1} tensors instead of {len(eager)}"
    )


def test_the_truth_of_a_stack_is_that_of_its_blocks_one_after_the_other() -> None:
    own = source(blocks=3)
    weights = [tensor for tensor in own.tensors if tensor.dim() == 2]
    assert len(weights) == 6
    assert not torch.equal(weights[0], weights[2])  # each block has its own
    wide = own.make().model.double()
    x = own.inputs(2).double().requires_grad_()
    y = wide(x)
    y.backward(own.gradient(2).double())
    truth = TrainingTruth.of(source(blocks=3), STEP, 2)
    torch.testing.assert_close(truth.references["output"], y.detach())
    torch.testing.assert_close(truth.references["gradient of x"], x.grad)


def test_under_autocast_everything_is_judged_in_its_type() -> None:
    own, step = source(), TrainingStep(autocast="bfloat16")
    truth = TrainingTruth.of(own, step, 4)
    eager = step_of(own, step, 4)
    assert truth.dtype == torch.bfloat16
    assert truth.check(eager, eager).ok
    exact = [one.float() for one in truth.references.values()]
    assert truth.check(exact, eager).ok  # finer than bfloat16 is fine
    exact[2][0, 0] += 0.5
    assert not truth.check(exact, eager).ok


def test_numbers_of_16_bits_come_back_as_they_were() -> None:
    given = [torch.randn(3, 2).bfloat16(), torch.randn(2), torch.randn(2).double()]
    found = tensors_from(bare_arrays(given), torch.bfloat16)
    assert [one.dtype for one in found] == [torch.bfloat16, torch.float32, torch.float64]
    assert all(torch.equal(a, b) for a, b in zip(given, found, strict=True))


# ---- cells ----


@NEEDS_KERNELS
def test_a_cell_has_verified_gradients_saved_bytes_faults_and_peak(fake: FakeCompare) -> None:
    bench = measured([trained()])
    (cell,) = bench.cells
    assert bench.names == ("eager", "torchweld:recompute", "torchweld")
    assert cell.name == "3 × 8→16→4 gelu fp32 training"
    assert cell.flops == 3 * PLAIN.flops(3)
    eager = cell.result("eager").training
    assert eager is not None
    assert eager.saved_bytes == 3 * (8 + 16 + 16) * 4  # x, and both sides of the activation
    assert cell.saved_ratio("torchweld") == 24 / 40
    # x, and a checksum of 8 bytes
    assert cell.saved_ratio("torchweld:recompute") == (3 * 8 * 4 + 8) / (3 * 40 * 4)
    for result in cell.results:
        assert result.refused is None
        assert result.training is not None
        assert isinstance(result.training.faults, (float, NotMeasured))
        assert isinstance(result.training.peak_bytes, (int, NotMeasured))
        assert result.cost.host_us is None
        assert result.cost.ops is not None
    for name in bench.names[1:]:
        assert check_of(cell, name).ok
    assert cell.result("torchweld").cost.ops < cell.result("eager").cost.ops  # type: ignore[operator]


@pytest.mark.parametrize(
    "what",
    [
        trained(GATED, rows=2),
        replace(trained(), lead=(2, 3)),
        trained(dtype="bfloat16"),
        trained(dtype="float16"),
        trained(step=TrainingStep(autocast="bfloat16")),
        trained(step=TrainingStep(autocast="float16")),
        trained(step=TrainingStep(accumulate=True)),
        trained(step=TrainingStep(optimizer="adamw")),
        trained(SQUARE, blocks=6),
        trained(MlpShape(sizes=(12,) * 5, activation="relu"), rows=17),
    ],
    ids=str,
)
def test_every_kind_of_step_is_verified_and_timed(fake: FakeCompare, what: Case) -> None:
    bench = measured([what])
    (cell,) = bench.cells
    assert [result.refused for result in cell.results] == [None] * 3
    assert len(fake.calls) == 1
    assert Bench.from_dict(json.loads(bench.to_json())) == bench


def test_a_side_with_a_wrong_gradient_is_reported_and_never_timed(
    monkeypatch: pytest.MonkeyPatch, fake: FakeCompare
) -> None:
    def doubled(self: Runtime, source: BlockSource) -> None:
        Runtime.load(self, source)
        model = self.model
        self.function = lambda x: 2.0 * model(x) - model(x).detach()

    monkeypatch.setattr(FusedMlpRuntime, "load", doubled)
    (cell,) = measured([trained()]).cells
    check = check_of(cell, "torchweld")
    assert not check.ok
    assert "gradient of x: row" in str(check.reason)
    assert "output" not in str(check.reason)
    assert fake.calls == []


def test_gradients_are_off_again_for_who_does_not_train(fake: FakeCompare) -> None:
    measured([trained()])
    assert torch.is_grad_enabled()
    with Stage(1, TRAINING_RUNTIMES) as stage:
        stage.start(["eager"])
        stage.ask("eager", "load", BlockSource(mlp=PLAIN))
        stage.ask("eager", "train", None)
        assert torch.is_grad_enabled()
        (output,) = stage.ask("eager", "prepare", 2)
        assert output.shape == (2, 4)
        stage.ask("eager", "load", source(PLAIN))
        stage.ask("eager", "train", STEP)
        assert len(stage.ask("eager", "prepare", 2)) == 2 + 4
        assert torch.is_grad_enabled()
    assert torch.is_grad_enabled()


def test_cells_with_tuned_malloc_have_their_own_processes(
    monkeypatch: pytest.MonkeyPatch, fake: FakeCompare
) -> None:
    opened: list[str] = []

    def local(threads: int, runtimes: Runtimes, malloc: Malloc) -> Stage:
        opened.append(malloc)
        return Stage(threads, runtimes)

    monkeypatch.setattr(block_bench, "open_training_stage", local)
    tuned = TrainingStep(malloc="tuned")
    cells = measured([trained(), trained(rows=5), trained(step=tuned)]).cells
    assert opened == ["stock", "tuned"]
    assert cells[2].name == "3 × 8→16→4 gelu fp32 tuned training"


@pytest.mark.skipif(sys.platform == "win32", reason="processes are parked by POSIX signals")
def test_it_is_real_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing faked: each side in a process of its own, with a verdict and its reason."""
    torch.set_num_threads(1)
    cases = [trained(step=TrainingStep(malloc="tuned"))]
    bench = plan(cases, ("torchweld",), seconds=0.1)
    (cell,) = measure(bench, cases)
    result = cell.result("torchweld")
    assert result.refused is None
    assert result.comparison is not None
    assert result.comparison.reason
    assert result.training is not None


# ---- who takes part ----


def test_others_say_that_they_do_not_train() -> None:
    bench = plan([trained()], (), ("mkldnn", "compile", "compile-max", "onnxruntime", "openvino"))
    assert bench.against in ((), ("compile",))  # there may be no compiler
    others = ("mkldnn", "compile-max", "onnxruntime", "openvino")
    assert {name: bench.left_out[name] for name in others} == dict.fromkeys(
        others, "it does not train"
    )
    assert bench.training
    assert bench.names[-2:] == ("torchweld:recompute", "torchweld")
    assert plan([trained()], ("torchweld:auto",)).backends == ("torchweld:auto",)


@pytest.mark.parametrize(
    ("cases", "backends", "message"),
    [
        ([trained(), case()], (), "some cells are steps of training and some are not"),
        ([replace(case(SQUARE), blocks=2)], (), "--blocks goes with --training"),
        ([trained()], ("cpu",), "unknown backend in training 'cpu'"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    cases: list[Case], backends: tuple[str, ...], message: str
) -> None:
    with pytest.raises(TorchweldError, match=message):
        plan(cases, backends)


def test_blocks_that_cannot_follow_each_other_are_refused() -> None:
    with pytest.raises(TorchweldError, match="2 blocks of 8→16→4 cannot follow each other"):
        trained(PLAIN, blocks=2)
    with pytest.raises(TorchweldError, match="blocks are 0; expected 1 to 1000"):
        trained(SQUARE, blocks=0)
    with pytest.raises(TorchweldError, match="--callers goes with calls without gradients"):
        plan([trained()], callers=2)


def test_malloc_is_tuned_only_where_glibc_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    plan([trained()])
    with pytest.raises(TorchweldError, match="--malloc tuned sets thresholds of glibc"):
        plan([trained(step=TrainingStep(malloc="tuned"))])


@pytest.mark.parametrize(
    ("flags", "capability", "limit", "native"),
    [
        (("avx2", "avx512_bf16"), "AVX512", "", True),
        (("avx2", "avx512_bf16"), "AVX512", "AVX512_CORE_BF16", True),
        (("avx2", "avx512_bf16"), "AVX512", "AVX2", False),
        (("avx2", "avx512_bf16"), "AVX2", "", False),
        (("avx2",), "AVX2", "", False),
        (("avx2", "avx512f"), "AVX512", "", False),
        (("asimd", "bf16"), "DEFAULT", "", True),
    ],
)
def test_products_of_bfloat16_are_native_where_the_cpu_and_torch_have_them(
    flags: tuple[str, ...], capability: str, limit: str, native: bool
) -> None:
    assert native_bf16(flags, capability, {"ONEDNN_MAX_CPU_ISA": limit}) is native


# ---- costs and processes ----


def test_saved_bytes_count_each_storage_once_and_no_parameter() -> None:
    linear, x = nn.Linear(4, 3), torch.randn(5, 4, requires_grad=True)

    def forward() -> Tensor:
        y = linear(x)
        twice: Tensor = y * y  # saves y two times
        return twice

    assert saved_bytes(forward, linear.parameters()) == (5 * 4 + 5 * 3) * 4
    assert saved_bytes(forward, []) == (5 * 4 + 5 * 3 + 4 * 3) * 4


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_fresh_pages_are_faults_and_count_in_the_peak() -> None:
    pages = 1000

    def touch() -> None:
        with mmap.mmap(-1, pages * mmap.PAGESIZE) as fresh:
            if hasattr(mmap, "MADV_NOHUGEPAGE"):
                fresh.madvise(mmap.MADV_NOHUGEPAGE)
            for page in range(pages):
                fresh[page * mmap.PAGESIZE] = 1

    faults, peak = faults_and_peak(touch)
    none, low = faults_and_peak(lambda: None)
    assert not isinstance(faults, NotMeasured)
    assert not isinstance(none, NotMeasured)
    assert pages <= faults < 1.5 * pages
    assert none < 0.1 * pages
    if not isinstance(peak, NotMeasured) and not isinstance(low, NotMeasured):
        assert peak > low


@pytest.mark.skipif(sys.platform == "win32", reason="processes are parked by POSIX signals")
def test_a_worker_gets_its_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TOP_PAD_", "5")  # not stock's, so no side has it
    assert set(malloc_environment("stock").values()) == {None}
    given = malloc_environment("tuned")
    with WorkerProcess("env", subprocess.getoutput, "env", environment=given) as worker:
        for name, value in TUNED_MALLOC.items():
            assert worker.ask("count", f"{name}={value}") == 1
        assert worker.ask("count", "MALLOC_") == len(TUNED_MALLOC)


def test_arrays_go_through_a_pipe_and_can_be_written_to() -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        value = (True, [np.arange(6.0).reshape(2, 3), np.ones(2, np.int16)], "text")
        send_value(theirs, value)
        done, (first, second), text = receive_value(ours)
    assert (done, text) == (True, "text")
    assert np.array_equal(first, value[1][0])
    assert second.dtype == np.int16
    first[0, 0] = 7.0  # else torch would warn


def test_a_ratio_needs_both_sides() -> None:
    cell = Cell(
        name="made",
        case=None,
        dtype="float32",
        flops=1,
        moved_bytes=1,
        weight_bytes=1,
        results=(),
    )
    unknown = NotMeasured("gone")
    nothing = TrainingCost(saved_bytes=0, faults=unknown, peak_bytes=unknown)
    some = replace(nothing, saved_bytes=8)
    lost = replace(nothing, saved_bytes=unknown)

    def ratio(eager: TrainingCost | None, own: TrainingCost | None) -> object:
        results = (Result(name="eager", training=eager), Result(name="own", training=own))
        return replace(cell, results=results).saved_ratio("own")

    assert ratio(some, replace(some, saved_bytes=2)) == 0.25
    assert ratio(None, some) is None
    assert ratio(some, lost) == ratio(lost, some) == unknown
    assert ratio(nothing, some) == NotMeasured("eager saves nothing")
