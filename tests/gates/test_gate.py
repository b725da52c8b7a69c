"""`torchweld gate` end to end: a model that stays as it was, and one broken in several ways."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.gate_targets import EXTRA_COPY, NORM_BETWEEN, SLOWER_KERNEL, write_model
from tests.support.made_comparisons import comparison

from torchweld.cli.main import run
from torchweld.core.errors import NotMeasuredError
from torchweld.gates import fresh_process
from torchweld.gates import gate_run as running
from torchweld.gates import rivalry as against
from torchweld.gates.gate_run import Rival
from torchweld.gates.gated_model import Clock, Subject
from torchweld.history import History
from torchweld.machine import fingerprint
from torchweld.ops import compiled_forward
from torchweld.pages.page_reading import read_page
from torchweld.plans import plan_fitting, planner
from torchweld.welds.swapping import joint, welded_class

Captured = pytest.CaptureFixture[str]
Gate = Callable[..., tuple[int, str]]
# Comparisons on a machine that others use too may have to be made more than once.
ATTEMPTS = 3


@pytest.fixture
def gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, one_thread: None
) -> Gate:
    """`gate("some folder", options…)`: the exit code and what was printed for its model.py."""
    monkeypatch.setenv("TORCHWELD_HISTORY", str(tmp_path / "history.sqlite"))
    # What is welded is not the question here, and a plan that times nothing is the same every time.
    monkeypatch.setattr(running, "make_plan", functools.partial(planner.plan, force=True))
    # Another process is another model here; the slow tests start real ones.
    monkeypatch.setattr(fresh_process, "ask", fresh_process.answer)

    def call(folder: str, *options: str) -> tuple[int, str]:
        monkeypatch.chdir(tmp_path / folder)
        code = run(["gate", "--baseline", "main", "model.py:make", *options])
        out, err = capsys.readouterr()
        return code, out + err

    return call


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    write_model(tmp_path / "good")
    write_model(tmp_path / "norm", **NORM_BETWEEN)
    write_model(tmp_path / "copy", **EXTRA_COPY)
    return tmp_path


# ---- counters ----


def test_what_has_not_changed_passes_twenty_times(folders: Path, gate: Gate) -> None:
    code, said = gate("good", "--no-time", "--accept")
    assert code == 0, said
    assert "2 blocks welded" in said
    for _ in range(20):
        code, said = gate("good", "--no-time")
        assert code == 0, said
        assert "counters: as in the baseline, 2 blocks welded" in said


def test_a_block_that_is_no_longer_found_fails_with_its_name_and_the_reason(
    folders: Path, gate: Gate
) -> None:
    assert gate("good", "--no-time", "--accept")[0] == 0
    code, said = gate("norm", "--no-time")
    assert code == 1
    assert "FAILED" in said
    assert "blocks welded: 2 → 0, worse" in said
    lines = (folders / "norm" / "model.py").read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if "self.between(self.act" in text)
    why = f"a layer norm between the Linears (aten.layer_norm, model.py:{line})"
    assert f"layers.* is not fused: {why}\n" in said
    assert "kernels: 5 → 11 (+6), worse" in said
    assert "in layers.*: 1 → 4 (+3), worse" in said
    command = "torchweld gate --baseline main model.py:make --no-time --accept"
    assert said.endswith(f"to accept this as the new baseline:\n  {command}\n")


def test_an_extra_copy_fails_with_what_it_costs_and_where(folders: Path, gate: Gate) -> None:
    assert gate("good", "--no-time", "--accept")[0] == 0
    code, said = gate("copy", "--no-time")
    assert code == 1
    assert "kernels: 5 → 7 (+2), worse\n    in the model's own forward" in said
    assert "allocations: " in said
    assert f"(+{2 * 2 * 4 * 128 * 64 / 1e3:.0f} kB), worse" in said  # each read and written
    assert "blocks welded:" not in said


def test_the_command_that_is_given_accepts(folders: Path, gate: Gate) -> None:
    gate("good", "--no-time", "--accept")
    code, said = gate("copy", "--no-time")
    assert code == 1
    accept = said.splitlines()[-1].split()
    assert accept[:5] == ["torchweld", "gate", "--baseline", "main", "model.py:make"]
    assert gate("copy", *accept[5:])[0] == 0
    assert gate("copy", "--no-time")[0] == 0


def test_a_long_command_to_paste_is_one_line(folders: Path, gate: Gate) -> None:
    where = str(folders / ("x" * 120) / "history.sqlite")
    gate("good", "--no-time", "--history", where, "--accept")
    code, said = gate("copy", "--no-time", "--history", where)
    assert code == 1
    assert said.splitlines()[-1].endswith(f"--no-time --history {where} --accept")


def test_a_counter_that_improved_passes_and_says_how_to_hold_it(folders: Path, gate: Gate) -> None:
    gate("copy", "--no-time", "--accept")
    code, said = gate("good", "--no-time")
    assert code == 0
    assert "kernels: 7 → 5 (−2), better" in said
    assert "torchweld gate --baseline main model.py:make --no-time --accept" in said


def test_training_is_gated_too(folders: Path, gate: Gate) -> None:
    gate("good", "--training", "--no-time", "--accept")
    assert gate("good", "--training", "--no-time")[0] == 0
    code, said = gate("copy", "--training", "--no-time")
    assert code == 1
    assert "--training --no-time --accept" in said


def test_json_has_the_same(folders: Path, gate: Gate) -> None:
    code, said = gate("good", "--no-time", "--accept", "--json")
    assert code == 0
    accepted = json.loads(said)
    assert accepted["welded"] == ["layers.0", "layers.1"]
    assert accepted["counters"]["kernels"] == 5
    code, said = gate("norm", "--no-time", "--json")
    found = json.loads(said)
    assert (code, found["code"], found["verdict"]) == (1, 1, "failed")
    assert [one["path"] for one in found["lost"]] == ["layers.0", "layers.1"]
    assert found["lost"][0]["op"] == "aten.layer_norm"
    assert found["lost"][0]["where"].startswith("model.py:")
    assert {"counter": "kernels", "module": "", "before": 5, "after": 11, "worse": True} in found[
        "changes"
    ]


# ---- wall time ----


def measured(gate: Gate, *arguments: str) -> tuple[int, str]:
    """Tried again where the machine was too busy to tell."""
    for _ in range(ATTEMPTS):
        code, said = gate(*arguments, "--seconds", "2")
        if code != 2:
            return code, said
    pytest.skip(f"this machine is too busy to measure: {said}")


def test_time_passes_where_nothing_changed_and_a_slower_kernel_fails(
    folders: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(folders / "slow", **SLOWER_KERNEL)
    for _ in range(ATTEMPTS):  # noise that hides a tenth passes, and is to
        code, said = measured(gate, "good", "--accept")
        assert code == 0
        assert "noise floor" in said
        for _ in range(3):
            code, said = measured(gate, "good")
            assert code == 0, said
            assert "wall time, 128x64 float32: " in said
        with monkeypatch.context() as patch:  # the model patches torchweld: all of it is put back
            patch.setattr(welded_class, "_classes", {})
            for module in (welded_class, joint):
                patch.setattr(module, "compiled_forward", compiled_forward)
            code, said = measured(gate, "slow")
        if code == 1:
            break
    assert code == 1, said
    assert "wall time, 128x64 float32: slower: " in said
    assert "in two comparisons" in said
    assert "counters: as in the baseline, 2 blocks welded" in said
    assert said.endswith("torchweld gate --baseline main model.py:make --accept\n")


@pytest.fixture
def timed_elsewhere(folders: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A baseline of another machine: the plan does not fit it, and its times say nothing."""
    real = fingerprint.key_here
    monkeypatch.setattr(fingerprint, "key_here", lambda gpus=(): "another one")
    assert gate("good", "--accept", "--no-time")[0] == 0
    monkeypatch.setattr(fingerprint, "key_here", real)


def test_times_on_another_gpu_are_not_compared(
    folders: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gate("good", "--accept", "--no-time")[0] == 0
    for where in (running, plan_fitting):
        monkeypatch.setattr(where, "gpus_of", lambda model: ("NVIDIA H100 (9.0)",))
    code, said = gate("good")
    assert code == 2
    words = " ".join(said.split())
    assert "made with the model on the CPU alone, it is on NVIDIA H100 (9.0)" in words


@pytest.mark.usefixtures("timed_elsewhere")
def test_times_of_another_machine_are_not_compared_but_counters_are(gate: Gate) -> None:
    code, said = gate("good")
    assert code == 2
    assert "counters: as in the baseline, 2 blocks welded" in said
    assert "not measured: the baseline was measured elsewhere" in said
    assert gate("good", "--no-time")[0] == 0
    code, said = gate("copy")
    assert code == 1


def test_what_differs_from_where_the_baseline_was_made_is_named(folders: Path, gate: Gate) -> None:
    gate("good", "--accept", "--no-time")
    torch.set_num_threads(2)
    code, said = gate("good")
    assert code == 2
    said = " ".join(said.split())
    assert "the baseline was measured elsewhere: made with 1 thread, 2 here; what would" in said
    assert "--against-worktree FOLDER" in said


def test_a_baseline_without_times_cannot_be_timed_against(folders: Path, gate: Gate) -> None:
    gate("good", "--accept", "--no-time")
    code, said = gate("good")
    assert code == 2
    assert "was accepted without times" in said


def test_another_checkout_runs_in_the_same_rounds(folders: Path, gate: Gate) -> None:
    # So much more work that any machine can tell; the counters are its own.
    write_model(folders / "heavy", call="[layer(x) for _ in range(4)][-1]")
    assert gate("heavy", "--accept", "--no-time")[0] == 0
    code, said = measured(gate, "heavy", "--against-worktree", "../good")
    assert code == 1, said
    words = " ".join(said.split())
    assert "counters: as in the baseline" in words
    assert f"times the speed of model.py:make in {folders / 'good'}: it takes" in words
    assert "slower: 0." in words


def test_another_target_is_a_rival_in_this_folder(
    folders: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    @contextmanager
    def rivalry(*given: Any) -> Iterator[Rival]:
        asked.extend(given)
        yield Rival(name="the old one", measure=lambda number: lambda: comparison(0.8))

    monkeypatch.setattr(against, "rivalry", rivalry)
    gate("good", "--accept", "--no-time")
    code, said = gate("good", "--against", "old.py:make")
    assert code == 1
    words = " ".join(said.split())
    assert "0.800 (0.792–0.808) times the speed of the old one: it takes 25.0% longer" in words
    here, other, inputs, training, _, clock = asked
    assert here == against.Contender(folder=folders / "good", target="model.py:make")
    assert other == against.Contender(folder=folders / "good", target="old.py:make")
    assert (inputs, training, clock) == ((), False, Clock())


def test_a_file_that_every_folder_shares_is_no_rival(
    folders: Path, gate: Gate, capsys: Captured
) -> None:
    target = f"{folders}/good/model.py:make"
    gate("good", "--accept", "--no-time")
    assert run(["gate", "--baseline", "main", target, "--accept", "--no-time"]) == 0
    assert run(["gate", "--baseline", "main", target, "--against-worktree", "../copy"]) == 2
    assert "is the same file in every folder" in capsys.readouterr().err


def test_a_process_of_its_own_gives_a_comparison_or_says_why_not(
    folders: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    monkeypatch.chdir(folders / "good")
    subject = Subject.load("model.py:make")
    made = planner.plan(subject.model, subject.workloads, force=True)
    found = fresh_process.compare_afresh(subject, made, 0, Clock(seconds=0.5))
    assert (found.baseline, found.candidate, found.threads) == ("eager", "welded", 1)
    assert found.rounds > 0
    (folders / "good" / "model.py").write_text("raise OSError('gone')")
    with pytest.raises(NotMeasuredError, match="OSError: gone"):
        fresh_process.compare_afresh(subject, made, 0, Clock(seconds=0.5))


def call_process(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A gate as in CI: the plan is tuned, every gate is a new process, wall time is included."""
    command = [sys.executable, "-m", "torchweld", "gate", "--baseline", "main", "model.py:make"]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHWELD_HISTORY": str(folder.parent / "history.sqlite"),
    }
    return subprocess.run(
        [*command, "--seconds", "3", *options], cwd=folder, env=env, capture_output=True, text=True
    )


@pytest.mark.slow
def test_what_has_not_changed_passes_twenty_times_in_processes(folders: Path) -> None:
    done = call_process(folders / "good", "--accept", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    for number in range(20):
        done = call_process(folders / "good")
        assert done.returncode == 0, f"{number}: {done.stdout}{done.stderr}"


@pytest.mark.slow
def test_a_slower_kernel_fails_in_processes(folders: Path) -> None:
    write_model(folders / "slow", **SLOWER_KERNEL)
    for _ in range(ATTEMPTS):
        assert call_process(folders / "good", "--accept", "--quick").returncode == 0
        done = call_process(folders / "slow")
        if done.returncode == 1:
            break
    assert done.returncode == 1, done.stdout + done.stderr
    assert "in two comparisons" in " ".join(done.stdout.split())


# ---- bad input ----


def test_without_a_history_the_command_that_makes_it_is_given(folders: Path, gate: Gate) -> None:
    code, said = gate("good", "--input", "3x64")
    assert code == 2
    assert said.startswith("torchweld: there is no baseline 'main'")
    assert "torchweld gate --baseline main model.py:make --input 3x64 --accept" in said
    assert not (folders / "history.sqlite").exists()


def test_an_unknown_baseline_is_met_with_the_nearest(
    folders: Path, gate: Gate, capsys: Captured
) -> None:
    gate("good", "--no-time", "--accept")
    assert run(["gate", "--baseline", "mein", "model.py:make", "--no-time"]) == 2
    assert "did you mean 'main'?" in capsys.readouterr().err


def test_a_baseline_of_another_target_is_none(folders: Path, gate: Gate) -> None:
    gate("good", "--no-time", "--accept")
    code, said = gate("good", "--no-time", "--input", "3x64")
    assert code == 2
    assert "has no 'model.py:make 3x64', but 'model.py:make'" in said


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("x.add_(1)", "changes its input"),
        ("torch.sin(self.kept.add_(1) * x)", "gives another output 0 when it is called again"),
        ("x @ x[:3]", "does not run on"),
    ],
)
def test_a_model_that_cannot_be_gated_says_why_and_nothing_is_written(
    tmp_path: Path, gate: Gate, body: str, said: str
) -> None:
    kept = 'self.register_buffer("kept", torch.ones(64))'
    write_model(tmp_path / "odd", body=body, more=kept)
    code, out = gate("odd", "--accept", "--no-time")
    assert code == 2
    assert said in out
    with History.open() as history:
        assert history.runs() == []


def test_a_target_that_raises_is_one_line(tmp_path: Path, gate: Gate) -> None:
    write_model(tmp_path / "odd", slow='raise OSError("no weights")')
    code, said = gate("odd", "--accept")
    assert code == 2
    assert "does not import: OSError: no weights" in said
    assert "Traceback" not in said


def test_a_history_that_cannot_be_made_fails_before_anything_is_measured(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "good")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHWELD_HISTORY", str(tmp_path / "file" / "history.sqlite"))

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("measuring began")

    monkeypatch.setattr(running, "make_plan", never)
    code, said = gate("good", "--accept")
    assert code == 2
    assert "--history FILE or TORCHWELD_HISTORY" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--against", "gpt", "--against-worktree", "."), "both name a rival; give one"),
        (("--against", "gpt", "--no-time"), "--against names a rival to time against, which --no"),
        (("--against-worktree", ".", "--accept"), "which --accept does not do; leave one out"),
        (("--quick",), "--quick shortens the tuning of --accept"),
        (("--budget", "5"), "--budget is for the tuning of --accept"),
        (("--no-measure",), "--no-measure leaves out the tuning of --accept"),
        (("--empty",), "--empty says what --accept may write"),
        (("--accept", "--quick", "--no-measure"), "each say how long to tune; give one"),
    ],
)
def test_options_that_would_not_be_heard_are_refused(
    folders: Path, gate: Gate, options: tuple[str, ...], message: str
) -> None:
    code, said = gate("good", *options)
    assert code == 2
    assert message in said
    assert not (folders / "history.sqlite").exists()


def test_what_a_model_prints_is_no_part_of_the_data(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    write_model(tmp_path / "good", slow="def slow_down(): print('made')")
    monkeypatch.chdir(tmp_path / "good")
    for options in (["--accept"], []):
        command = ["gate", "--baseline", "main", "model.py:make", "--no-time", "--json", *options]
        assert run(command) == 0
        out, err = capsys.readouterr()
        assert "made" in err
        json.loads(out)


def test_a_baseline_that_this_release_cannot_read_says_how_to_make_it_again(
    folders: Path, gate: Gate
) -> None:
    gate("good", "--accept", "--no-time")
    with History.open() as history:
        run = history.begin("main", "gate", "model.py:make", {})
        run.add("plan", {"from": "the future"})
        run.add("counters", {})
        run.finish()
    code, said = gate("good", "--no-time")
    assert code == 2
    assert "cannot be read by this torchweld" in said
    assert "--accept" in said


# ---- kept, and shown on a page ----


def test_the_verdict_is_kept_and_shown_with_those_before(
    folders: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "measure_welded", lambda *_: comparison(2.0))
    monkeypatch.setattr(running, "compare_afresh", lambda *_: comparison(2.0))
    assert gate("good", "--accept")[0] == 0
    assert gate("good", "--save", "nightly")[0] == 0
    code, said = gate("copy", "--save", "nightly", "--report", "gate.html")
    assert code == 1
    assert "wrote gate.html" in said
    page = read_page(folders / "copy" / "gate.html")
    assert page.verdict == "gate main, model.py:make: FAILED."
    assert any("kernels: 5 → 7 (+2), worse" in note for note in page.notes)
    (plot,) = page.history
    assert [(p.name, p.kind, p.verdict, p.speedup) for p in plot.points] == [
        ("main", "gate", "accepted", 2.0),
        ("nightly", "check", "passed", 2.0),
        ("main", "check", "failed", 2.0),
    ]
    assert plot.points[0].interval is not None
    assert {row.outcome for row in page.blocks} == {"welded"}
    with History.open() as history:
        assert [run.kind for run in history.runs("nightly")] == ["check", "check"]
    assert gate("good")[0] == 0  # the baseline is still found


def test_what_a_gate_finds_is_not_kept_where_a_baseline_is(folders: Path, gate: Gate) -> None:
    for option in (("--save", "a"), ("--report", "a.html")):
        code, said = gate("good", "--accept", "--no-time", *option)
        assert code == 2
        assert f"{option[0]} is for what a gate finds" in said
    code, said = gate("good", "--report", "a.txt")
    assert code == 2
    assert "has to end in .html" in said
