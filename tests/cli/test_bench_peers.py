"""`torchweld bench --preset peers`: its goals and exit codes, and benches printed again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.support.bench_samples import FakeCompare

from torchweld.bench import Bench, stage_timing
from torchweld.bench.runtimes.onnx_exports import OnnxReadingRuntime
from torchweld.bench.runtimes.onnx_runtime import OnnxRuntime
from torchweld.cli import bench_command

Bencher = Callable[..., tuple[int, str, str]]
HOT = ("--preset", "peers", "--rows", "1", "--dtype", "fp32", "--only", "hot")
ALONE = (*HOT, "--against", "eager")
SMALL = ("--block", "gelu", "--sizes", "8x16x4", "--rows", "3")


def test_goals_are_judged_and_count_if_they_are_asked_for(
    bench: Bencher, fake: FakeCompare
) -> None:
    code, out, err = bench(*ALONE)
    assert (code, err) == (0, "")
    assert len(fake.calls) == 6
    assert "goals   ratios are our speed over the other's" in out
    assert "3.20 of 6 cells" in out
    code, out, _ = bench(*ALONE, "--goals")
    assert code == 2  # a part of the grid
    fake.speedup, fake.verdict = 0.5, "slower"
    code, out, _ = bench(*ALONE, "--goals")
    assert code == 1
    assert "missed" in out
    assert bench(*ALONE)[0] == 0


def test_peers_of_the_preset_take_part_unless_others_are_named(
    bench: Bencher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OnnxReadingRuntime, "needs", ("no_such_runtime",))
    for runtime in OnnxReadingRuntime.__subclasses__():
        monkeypatch.setattr(runtime, "needs", ("no_such_runtime",))
    monkeypatch.setattr(bench_command, "run_cases", lambda planned, *_: planned)
    _, out, _ = bench(*HOT)
    assert "left out: onnxruntime: no_such_runtime not installed" in out
    assert "left out: openvino: no_such_runtime not installed" in out
    assert "left out" not in bench(*ALONE)[1]


def test_versions_of_foreign_packages_are_noted(
    bench: Bencher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OnnxRuntime, "needs", ("numpy",))
    monkeypatch.setattr(bench_command, "run_cases", lambda planned, *_: planned)
    _, out, _ = bench(*SMALL, "--against", "onnxruntime")
    assert f"installed: numpy {np.__version__}" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--goals",), "--goals goes with a preset that has goals: --preset peers, training"),
        (("--preset", "blog", "--goals"), "--goals goes with a preset that has goals"),
        (("--preset", "blog", "--only", "hot"), "--only goes with a preset that has parts: peers"),
        (("--preset", "peers", "--only", "warm"), "unknown part of --preset peers 'warm'"),
        (("--preset", "peers", "--cold"), "give --only cold, not --cold"),
        (("gpt", "--check-parking"), "--check-parking measures blocks"),
    ],
)
def test_options_that_do_not_go_together(
    bench: Bencher, options: tuple[str, ...], message: str
) -> None:
    code, _, err = bench(*options)
    assert code == 2
    assert message in " ".join(err.split())


def test_parking_is_checked_before_the_cells_and_noted(
    bench: Bencher, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Checked:
        def sentences(self) -> list[str]:
            return ["eager right after torch: equal"]

    asked: list[object] = []

    def check(*given: object) -> Checked:
        asked.extend(given)
        return Checked()

    monkeypatch.setattr(bench_command, "check_parking", check)
    _, out, _ = bench(*SMALL, "--backend", "torch", "--check-parking", "--seconds", "0.5")
    assert asked[0] == ("eager", "torch")
    assert asked[2:] == [0.5, 0]
    assert "eager right after torch: equal" in out


def test_a_saved_bench_is_printed_again_without_measuring(
    bench: Bencher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "peers.json"
    code, out, _ = bench(*ALONE, "--goals", "--out", str(file))
    tables = out[out.index("block ") :]

    def never(*_: object, **__: object) -> None:
        raise AssertionError("something was timed")

    monkeypatch.setattr(stage_timing, "compare", never)
    again, out, _ = bench("--show", str(file), "--goals")
    assert again == code == 2
    assert tables in out
    _, out, _ = bench("--show", str(file), "--json")
    assert Bench.from_dict(json.loads(out)) == Bench.from_dict(json.loads(file.read_text()))


def test_a_bench_to_show_that_is_not_one_is_refused(bench: Bencher, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text("{}")
    code, _, err = bench("--show", str(file))
    assert code == 2
    assert "is not a bench that torchweld saved" in err
    code, _, err = bench("--show", str(file), "--rows", "3")
    assert code == 2
    assert "--rows asks for another" in err
