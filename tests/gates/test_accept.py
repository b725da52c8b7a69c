"""`gate --accept` where blocks could not be measured, or nothing is worth welding."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.gate_targets import write_model

from torchweld.cli import gate_command as gate_cli
from torchweld.cli.main import run
from torchweld.core.measured_speed import Speed
from torchweld.core.not_measured import NotMeasured
from torchweld.gates import gate_run
from torchweld.history import History
from torchweld.machine import machine_load
from torchweld.plans import planner
from torchweld.plans.plan import Plan, Tuning, Verdict

Captured = pytest.CaptureFixture[str]
NOISY = "the baseline differed from itself by 9.0% in the same rounds"
Accept = Callable[..., tuple[int, str, str]]


@pytest.fixture
def accept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, one_thread: None
) -> Accept:
    """`accept(verdicts, options…)`: exit code, output and errors.

    `verdicts` are those of the planned blocks, one after the other; "faster" is welded.
    """
    monkeypatch.setenv("TORCHWELD_HISTORY", str(tmp_path / "history.sqlite"))
    monkeypatch.setattr(gate_cli, "load_words", lambda: "")
    write_model(tmp_path)
    monkeypatch.chdir(tmp_path)

    def call(verdicts: tuple[Verdict, ...], *options: str) -> tuple[int, str, str]:
        def plan(*given: Any, measure: bool = True, **more: Any) -> Plan:
            assert measure == ("--no-measure" not in options)
            assert more.get("budget_s") == (7.0 if "--budget" in options else None)
            more["budget_s"] = None
            made = planner.plan(*given, force=True, **more)
            planned = made.planned[: len(verdicts)]
            return replace(
                made,
                forced=False,
                planned=tuple(
                    replace(one, tunings=tuple(tuned(t, verdict) for t in one.tunings))
                    for one, verdict in zip(planned, verdicts, strict=True)
                ),
            )

        monkeypatch.setattr(gate_run, "make_plan", plan)
        code = run(["gate", "--baseline", "main", "model.py:make", "--accept", *options])
        return code, *capsys.readouterr()

    return call


SLOW = Speed(speedup=0.9, interval=(0.85, 0.95), before_us=9.0, after_us=10.0)


def tuned(tuning: Tuning, verdict: Verdict) -> Tuning:
    """The same with another verdict on every trial."""
    if verdict == "faster":
        return tuning
    speed: Speed | NotMeasured = SLOW
    if verdict in ("not measured", "not known"):
        speed = NotMeasured(NOISY)
    return replace(
        tuning,
        trials=tuple(replace(t, verdict=verdict, speed=speed) for t in tuning.trials),
        chosen=None,
        reason=f"cpu packed: {verdict}",
    )


def kept() -> int:
    with History.open() as history:
        return len(history.runs())


@pytest.mark.parametrize("options", [("--no-time",), (), ("--json",), ("--no-time", "--empty")])
def test_blocks_that_could_not_be_measured_are_no_baseline(
    accept: Accept, options: tuple[str, ...]
) -> None:
    code, out, err = accept(("not measured", "not measured"), *options)
    assert (code, out, kept()) == (2, "", 0)
    assert err == (
        f"torchweld: could not measure 2 of 2 blocks: {NOISY}; no baseline was written; what would "
        "help: a quieter machine; --budget 192; --no-measure (welds by a table that comes with "
        "torchweld, and times nothing)\n"
    )


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (("--quick",), "--budget 32 instead of --quick"),
        (("--budget", "7"), "--budget 28;"),
        (("--no-measure",), "leave out --no-measure"),
    ],
)
def test_the_advice_is_about_what_was_typed(
    accept: Accept, options: tuple[str, ...], advice: str
) -> None:
    code, _, err = accept(("not measured", "slower"), "--no-time", *options)
    assert code == 2
    assert "could not measure 1 of 2 blocks" in err
    assert "(1 other not welded: cpu packed: slower)" in err
    assert advice in err
    assert ("; --no-measure (" in err) == ("--no-measure" not in options)


@pytest.mark.parametrize(
    ("verdicts", "why"),
    [
        (("slower", "same"), "none of 2 blocks was welded: cpu packed: slower"),
        ((), "no block was found to weld"),
    ],
)
def test_an_empty_baseline_has_to_be_asked_for(
    accept: Accept, verdicts: tuple[Verdict, ...], why: str, capsys: Captured
) -> None:
    code, out, err = accept(verdicts, "--no-time")
    assert (code, out, kept()) == (2, "", 0)
    assert err.startswith(f"torchweld: {why}")
    assert "to keep one all the same: --empty" in err
    code, out, err = accept(verdicts, "--no-time", "--empty")
    assert (code, err, kept()) == (0, "", 1)
    assert "0 blocks welded" in out
    assert run(["gate", "--baseline", "main", "model.py:make"]) == 0
    assert "note: the baseline welds nothing" in capsys.readouterr().out


def test_what_no_table_knows_is_not_taken_for_slower(accept: Accept) -> None:
    options = ("--no-time", "--no-measure")
    code, out, err = accept(("not known", "not known"), *options)
    assert (code, out, kept()) == (2, "", 0)
    assert f"2 of 2 blocks not known to be faster: {NOISY}; what would help: leave out" in err
    assert "--empty" in err
    code, out, _ = accept(("faster", "not known"), *options)
    assert code == 0
    said = " ".join(out.split())
    assert "1 block welded; 1 of 2 not known to be faster and is not held to anything" in said
    assert accept(("not known", "not known"), *options, "--empty")[0] == 0


def test_some_blocks_are_held_and_others_are_named(accept: Accept, capsys: Captured) -> None:
    code, out, _ = accept(("faster", "not measured"), "--no-time")
    assert code == 0
    said = " ".join(out.split())
    assert said.startswith(
        "accepted main, model.py:make: 1 block welded; 1 of 2 could not be measured and is not "
        "held to anything"
    )
    assert f"layers.1 not measured: {NOISY}" in said
    code, out, _ = accept(("faster", "not measured"), "--no-time", "--json")
    data = json.loads(out)
    assert (code, data["welded"], data["unmeasured"]) == (0, ["layers.0"], {"layers.1": NOISY})
    assert run(["gate", "--baseline", "main", "model.py:make", "--no-time"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 of 2 could not be measured and is not held to anything" in said


def test_the_load_is_said_first_and_not_where_nothing_is_timed(
    accept: Accept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_cli, "load_words", lambda: machine_load.load_words(1.5))
    _, out, _ = accept(("faster", "faster"), "--no-time")
    assert out.startswith("This machine is busy: other processes use 1.5 of its ")
    _, out, _ = accept(("faster", "faster"), "--no-time", "--json")
    assert json.loads(out)["load"] == machine_load.load_words(1.5)
    _, out, _ = accept(("not measured", "not measured"), "--no-time")
    assert out.startswith("This machine is busy")
    _, out, _ = accept(("faster", "faster"), "--no-time", "--no-measure")
    assert out.startswith("accepted main")


def test_the_command_to_accept_again_measures_as_little(
    accept: Accept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    accept(("faster", "faster"), "--no-time", "--no-measure")
    monkeypatch.chdir(write_model(tmp_path / "changed", call="layer(x).clone()"))
    assert run(["gate", "--baseline", "main", "model.py:make", "--no-time"]) == 1
    said = capsys.readouterr().out
    assert said.endswith("gate --baseline main model.py:make --no-time --no-measure --accept\n")
