"""A profile whose step was not measured: no figure that rests on times, all that is counted."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.block_profiles import blocks, fused_blocks
from tests.support.busy import busy_cores
from tests.support.made_profiles import make_timing
from torch import nn

import torchweld as tw
from torchweld.cli import profile_command as verb
from torchweld.cli.main import run
from torchweld.core.not_measured import NotMeasured
from torchweld.findings import combined_bound, diagnose, welding_bound
from torchweld.history import History
from torchweld.profiles.accounting.profile_diff import diff
from torchweld.profiles.accounting.time_account import account
from torchweld.profiles.profile import Profile
from torchweld.profiles.profile_doubts import DOUBTFUL, doubt
from torchweld.profiles.recording import live_profile, loop_profile
from torchweld.profiles.recording.profiler_overhead import Round, calmest
from torchweld.report import View, diff_sections, profile_text
from torchweld.report.text_style import to_text
from torchweld.timing import core_waiting
from torchweld.timing.core_waiting import TOLERATED, CoreWaiting

WHY = NotMeasured("steps took 228 ms without the profiler, and 39.4 ms with it")


def untimed() -> Profile:
    return replace(blocks(training=True), step_us=WHY)


# ---- when ----


@pytest.mark.parametrize(
    ("wall_us", "corrected_us", "lost", "measured"),
    [
        (100.0, 100.0, 0.0, True),
        (100.0, 80.0, 0.1, True),
        (100.0, 130.0, 0.0, False),
        (100.0, 60.0, 0.0, False),
        (3800.0, 100.0, 0.0, False),
        (100.0, 100.0, 0.6, False),  # every step was disturbed alike, so that they agree
        (0.0, 10.0, 0.0, False),
    ],
)
def test_times_are_those_of_the_step_or_not_measured(
    wall_us: float, corrected_us: float, lost: float, measured: bool
) -> None:
    found = doubt(wall_us, corrected_us, lost)
    assert (found is None) == measured
    if found is not None:
        assert "without the profiler" in found.reason
        assert "take the profile again" in found.reason


def disturbed_by(lost: float, us: float = 10.0) -> Round:
    recording: Any = None
    return Round(plain_us=us, recording=recording, lost=lost)


def test_disturbed_rounds_are_left_out_if_enough_are_calm() -> None:
    rounds = [disturbed_by(lost) for lost in (0.9, 0.0, 0.4, 0.01, 0.3)]
    assert [r.lost for r in calmest(rounds)] == [0.0, 0.01]
    assert [r.lost for r in calmest(rounds[2:])] == [0.01, 0.3]
    assert calmest([]) == []


@pytest.mark.parametrize(
    ("losses", "taken"),
    [
        ([0.0] * 9, 3),  # a calm machine takes what is wanted
        ([0.5, 0.0, 0.5, 0.0, 0.0, 0.0], 5),  # what was disturbed is taken again
        ([0.5] * 20, 9),  # but not for ever
    ],
)
def test_disturbed_rounds_are_taken_again(losses: list[float], taken: int) -> None:
    found = live_profile._calm(lambda number: disturbed_by(losses[number]), 3, 2)
    assert len(found) == taken


def test_long_rounds_that_are_all_disturbed_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_profile, "RETAKE_SECONDS", -1.0)
    assert len(live_profile._calm(lambda number: disturbed_by(0.5), 6, 3)) == 1
    assert len(live_profile._calm(lambda number: disturbed_by(0.0), 6, 3)) == 3


def test_waiting_for_a_core_is_noticed() -> None:
    """One thread per core cannot run all the time beside others that never stop."""
    threads = torch.get_num_threads()
    x = torch.randn(700, 700)
    try:
        torch.set_num_threads(max(2, torch.get_num_threads()))
        with busy_cores(2 * max(2, threads)):
            watch = CoreWaiting()
            for _ in range(60):
                x @ x
            assert watch.lost() > TOLERATED
    finally:
        torch.set_num_threads(threads)


def test_without_a_count_of_waiting_switches_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    switches = iter([0, 0, 5000])
    monkeypatch.setattr(core_waiting, "TASKS", "no such folder")
    monkeypatch.setattr(core_waiting, "switches", lambda: next(switches))
    watch = CoreWaiting()
    assert watch.lost() == 0.0
    assert watch.lost() == 1.0


def test_a_step_that_others_disturbed_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the clock says: it is as wrong as the profile."""
    monkeypatch.setattr(CoreWaiting, "lost", lambda self: 0.9)
    monkeypatch.setattr(live_profile, "SET_SECONDS", 0.0)
    found = tw.profile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 8), steps=2)
    assert isinstance(found.step_us, NotMeasured)
    assert "waited for a core for 90 % of the time" in found.step_us.reason
    assert found.timing is not None
    assert found.timing.disturbed == found.timing.rounds > 2
    assert [op.name for op in found.ops if op.name in ("aten::linear", "aten::relu")]


# ---- what is said ----

# Figures that rest on times: "1.20 ms", "24 %", "1.37x", "roofline".
TIMED = re.compile(r"\d (µs|ms|s)\b|\d %|\d\.\d+x|roofline")


@pytest.mark.parametrize("module", [None, "layers.*.mlp"])
def test_no_figure_that_rests_on_times_is_shown(module: str | None) -> None:
    profile = untimed()
    text = profile_text(profile, account(profile), diagnose(profile), View(module=module))
    flat = " ".join(text.split())
    assert f"not measured: {WHY.reason}" in flat
    shown = flat.replace(WHY.reason, "").partition(" timing ")[0]
    assert TIMED.findall(shown) == []
    for word in ("waste", "explained", "at most", "At most"):
        assert word not in shown


def test_what_is_counted_is_shown_all_the_same() -> None:
    profile = untimed()
    text = profile_text(profile, account(profile), diagnose(profile))
    measured = blocks(training=True)
    working = sum(op.launches for op in account(measured).ops)
    assert f"{len(profile.ops)} ops run, {working} of them do work" in " ".join(text.split())
    (row,) = [line for line in text.splitlines() if line.strip().startswith("addmm")]
    calls = sum(op.name == "aten::addmm" for op in profile.ops)
    assert str(calls) in row.split()
    assert "(up): Linear" in text
    assert "these were not measured" in text


def test_the_account_has_counts_and_no_times() -> None:
    found, timed = account(untimed()), account(blocks(training=True))
    assert found.step == found.explained == WHY
    for one, other in zip(found.modules, timed.modules, strict=True):
        assert one.split == one.own == WHY
        assert (one.launches, one.flops, one.moved_bytes) == (
            other.launches,
            other.flops,
            other.moved_bytes,
        )
    assert all(op.split == WHY for op in found.ops)


def test_nothing_is_promised() -> None:
    profile = untimed()
    assert diagnose(profile) == ()
    assert welding_bound(profile) == WHY
    assert combined_bound((), profile) == WHY


def test_json_says_not_measured_in_place_of_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verb, "take", lambda *_, **__: untimed())
    assert run(["profile", "--json"]) == 2
    data = json.loads(capsys.readouterr().out)
    why = {"not_measured": WHY.reason}
    assert data["step_us"] == data["step"] == data["explained"] == why
    assert data["findings"] == []
    for module in data["modules"]:
        assert module["total_us"] == module["python_us"] == module["account"]["split"] == why
    for op in data["ops"]:
        assert op["self_us"] == op["share"] == op["split"] == why
        assert op["calls"] > 0


def test_the_exit_code_says_that_nothing_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verb, "take", lambda *_, **__: untimed())
    assert run(["profile"]) == 2
    assert "not measured" in capsys.readouterr().out
    assert run(["profile", "--expect", "linear=99"]) == 1  # counted, and wrong


def test_it_is_kept_without_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verb, "take", lambda *_, **__: untimed())
    file = tmp_path / "history.sqlite"
    assert run(["profile", "--save", "one", "--history", str(file)]) == 2
    with History.open(file) as history:
        run_kept = history.latest("one")
        assert run_kept is not None
        cells = {cell.cell: cell for cell in run_kept.cells}
    assert cells["step"].data == {"time": {"not_measured": WHY.reason}}
    assert not any(name.endswith("_us") for cell in cells.values() for name in cell.data)


def test_it_saves_and_loads(tmp_path: Path) -> None:
    untimed().save(tmp_path / "a.json")
    assert Profile.load(tmp_path / "a.json") == untimed()


@pytest.mark.parametrize(("off", "measured"), [(1.0, True), (0.8, True), (38.0, False)])
def test_old_files_are_judged_by_their_own_clock(
    tmp_path: Path, off: float, measured: bool
) -> None:
    profile = blocks()
    timing = make_timing(1000.0, wall_us=off * 1000.0)
    replace(profile, timing=timing).save(tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text()
    mark = '"torchweld_profile":'
    (tmp_path / "a.json").write_text(text.replace(f"{mark}{Profile.FORMAT.version}", f"{mark}1"))
    loaded = Profile.load(tmp_path / "a.json")
    assert isinstance(loaded.step_us, NotMeasured) != measured
    if measured:
        assert loaded.step_us == profile.step_us


def test_a_diff_compares_its_counts_alone() -> None:
    made = diff(untimed(), fused_blocks())
    assert made.speedup is None
    assert made.not_comparable[0].startswith("a was not measured")
    assert made.step.before.launches > made.step.after.launches
    text = to_text(diff_sections(made, force=True))
    assert "a step takes" not in text


# ---- the load ----


def test_load_is_said_before_any_figure() -> None:
    profile = blocks()
    busy = replace(profile, about=replace(profile.about, load="This machine is busy: words."))
    for view in (View(), View(module="layers.0")):
        text = profile_text(busy, account(busy), (), view)
        assert text.startswith("This machine is busy: words.")
        assert not profile_text(profile, account(profile), (), view).startswith("This machine")


def test_live_profiles_note_the_load_at_their_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_profile, "load_words", lambda: "busy")
    monkeypatch.setattr(loop_profile, "load_words", lambda: "busy")
    monkeypatch.setattr(live_profile, "SET_SECONDS", 0.0)
    model, x = nn.Linear(3, 5), torch.randn(2, 3)
    assert tw.profile(model, x, steps=2).about.load == "busy"
    with tw.profiling(model, wait=1, active=2) as p:
        for _ in range(30):
            model(x)
            p.step()
    assert p.profile.about.load == "busy"


def test_the_tolerance_is_what_the_docs_say() -> None:
    assert DOUBTFUL == 0.25
