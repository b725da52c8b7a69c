"""Names that would move the cursor, colour, or turn text around reach no terminal."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.bench_samples import comparison
from tests.support.block_profiles import blocks
from torch import nn

import torchweld as tw
from torchweld import report
from torchweld.cli.main import run
from torchweld.cli.screen_output import put, screen
from torchweld.core.errors import TorchweldError, UnsupportedError
from torchweld.core.safe_text import clean, clean_lines
from torchweld.findings import diagnose
from torchweld.gates.gate_outcome import CounterChange, LostBlock, Outcome, TimeVerdict
from torchweld.history import History
from torchweld.plans.plan import Plan
from torchweld.plans.planner import apply, plan
from torchweld.profiles.accounting.profile_diff import diff
from torchweld.profiles.accounting.time_account import account
from torchweld.profiles.recording.live_profile import profile
from torchweld.report.gate_text import outcome_lines
from torchweld.report.text_style import to_text
from torchweld.welds.finding.find import find

EVIL = "a\x1b[2Jb\r\n\x9b31m\u202e\u2066\x07\u2028c"
# What a module may be called; a dot would be a path.
NAME = EVIL.replace(".", "")
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def shown(text: str, lines: int | None = None) -> None:
    odd = [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl")]
    assert not odd, odd
    if lines is not None:
        assert text.count("\n") < lines, text


class Evil(nn.Module):
    """Modules, and a class, that are named to do harm."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(NAME, nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)))
        self.add_module(NAME + "norm", nn.LayerNorm(8))
        self.add_module(NAME + "idle", nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modules: dict[str, Any] = self._modules
        found: torch.Tensor = modules[NAME + "norm"](x + modules[NAME](x))
        return found


Evil.__name__ = Evil.__qualname__ = f"Evil{EVIL}"


@pytest.fixture
def evil() -> nn.Module:
    return Evil().eval()


def test_control_characters_are_written_out() -> None:
    assert clean("a\x1b[2J\nb") == "a\\x1b[2J\\nb"
    assert clean("\u202e\ud800") == "\\u202e\\ud800"
    assert clean("größer → 模型") == "größer → 模型"
    assert clean_lines("a\n\x07b") == "a\n\\x07b"


def test_every_line_of_an_error_is_harmless() -> None:
    error = UnsupportedError(f"first {EVIL}", f"  second {EVIL}")
    shown(str(error))
    assert str(error).count("\n") == 1
    assert isinstance(error, TorchweldError)


def test_a_plan_prints_harmlessly(evil: nn.Module) -> None:
    made = plan(evil, X, force=True)
    assert made.decisions
    shown(str(made))
    shown(repr(made), lines=1)
    shown(str(replace(made, notices=(EVIL,), model=EVIL)))


def test_errors_of_find_plan_and_apply_are_harmless(evil: nn.Module, tmp_path: Path) -> None:
    made = plan(evil, X, force=True)
    other = nn.Linear(2, 2)
    with pytest.raises(TorchweldError) as caught:
        apply(other, made)
    shown(str(caught.value), lines=1)
    with pytest.raises(TorchweldError) as caught:
        tw.undo(evil, [EVIL])
    shown(str(caught.value), lines=1)
    path = tmp_path / "plan.json"
    made.save(path)
    assert Plan.load(path) == made
    data = json.loads(path.read_text())
    for key, value in ((EVIL, 1), ("model", [EVIL]), ("planned", [{EVIL: EVIL}])):
        path.write_text(json.dumps({**data, key: value}))
        with pytest.raises(TorchweldError) as caught:
            Plan.load(path)
        shown(str(caught.value), lines=1)
    with pytest.raises(TorchweldError) as caught:
        Plan.load(tmp_path / f"no{EVIL}.json")
    shown(str(caught.value), lines=1)
    found = find(evil, X)
    shown(repr(found), lines=1)


def test_a_profile_of_it_shows_harmlessly(evil: nn.Module, brief_profiles: None) -> None:
    found = profile(evil, X)
    every = account(found)
    findings = diagnose(found, every)
    shown(report.profile_text(found, every, findings))
    shown(report.folded(found))
    shown(to_text(report.diff_sections(diff(found, blocks(layers=1)), force=True)))
    with pytest.raises(TorchweldError) as caught:
        report.profile_text(found, every, findings, report.View(module=f"x{EVIL}"))
    shown(str(caught.value), lines=1)


def test_what_a_gate_found_shows_harmlessly(capsys: pytest.CaptureFixture[str]) -> None:
    found = Outcome(
        baseline=EVIL,
        what=EVIL,
        accepted=EVIL,
        changes=(CounterChange(counter="ops", module=EVIL, before=1, after=2),),
        lost=(LostBlock(path=EVIL, reason=EVIL, op=EVIL, where=EVIL),),
        welded=(1, 0),
        times=(TimeVerdict(workload=EVIL, verdict="not measured", reason=EVIL, against=EVIL),),
        notes=(EVIL,),
        accept_command=EVIL,
    )
    put(outcome_lines(found), screen())
    out, _ = capsys.readouterr()
    shown(out)
    assert len(out.splitlines()) <= 2 * len(list(outcome_lines(found)))


def test_a_comparison_reads_harmlessly() -> None:
    for verdict in ("faster", "slower", "same", "not measured"):
        one = replace(comparison(2.0, verdict), candidate=EVIL, baseline=EVIL, reason=EVIL)
        shown(str(one), lines=1)


def test_runs_are_listed_and_shown_harmlessly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHWELD_HISTORY", str(tmp_path / "h.sqlite"))
    with History.open(create=True) as history:
        for _ in range(2):
            recording = history.begin("main", "bench", EVIL, {EVIL: EVIL})
            recording.add(EVIL, {EVIL: {"speedup": 2.0}}, {f"{EVIL}_us": [1.0]})
            recording.finish({EVIL: EVIL})
        # As if somebody else had written the file.
        history._connection.execute(
            "UPDATE run SET name = ?, kind = ?, created = ? WHERE id = 1", (EVIL, EVIL, EVIL)
        )
    for command in (
        ["history"],
        ["history", "list", EVIL],
        ["history", "show", EVIL],
        ["history", "show", "nobody"],
        ["history", "show", "main"],
        ["history", "compare", "main", EVIL],
        ["history", "forget", EVIL],
    ):
        for more in ([], ["--json"]):
            assert run([*command, *more]) in (0, 2)
            out, err = capsys.readouterr()
            shown(out)
            shown(err)


def test_the_command_line_shows_a_saved_profile_harmlessly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.json"
    blocks(layers=1, notices=(EVIL,)).save(path)
    text = path.read_text()
    spoilt: Any = json.loads(text)
    spoilt["about"].update(what=EVIL, cpu=EVIL, torch=EVIL, inputs=EVIL)
    for module in spoilt["modules"][1:]:
        module.update(path=f"{EVIL}.{module['path']}", kind=EVIL, extra=EVIL)
    for op in spoilt["ops"]:
        op.update(name=f"aten::{EVIL}", where=EVIL)
    path.write_text(json.dumps(spoilt))
    for command in (["profile", str(path)], ["diff", str(path), str(path)]):
        assert run(command) in (0, 2)
        out, err = capsys.readouterr()
        shown(out)
        shown(err)
        assert "x1b" in out
