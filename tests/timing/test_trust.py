"""The benchmark that holds the comparison to its word: its counting, and its slower sides."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.timing.test_comparison import comparison

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "trust.py"


@pytest.fixture(scope="module")
def trust() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trust", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by name
    sys.modules["trust"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("factor", "found", "verdicts", "kept"),
    [
        (1.0, None, ["same"] * 98 + ["faster"] * 2, True),
        (1.0, None, ["same"] * 97 + ["slower"] * 3, False),
        (1.0, None, ["not measured"] * 100, True),
        (1.05, 0.95, ["slower"] * 95 + ["same"] * 5, True),
        (1.05, 0.95, ["slower"] * 94 + ["not measured"] * 6, False),
        (1.05, 0.95, ["slower"] * 97 + ["faster"] * 3, False),
        (1.05, None, ["not measured"] * 98 + ["same"] * 2, True),
        (1.05, None, ["not measured"] * 97 + ["same"] * 3, False),
    ],
)
def test_what_counts_as_kept(
    trust: ModuleType, factor: float, found: float | None, verdicts: list[str], kept: bool
) -> None:
    trial = trust.ComparedWork(name="t", factor=factor, count=100, budget_s=3.0, found=found)
    outcome = trust.TrustOutcome(case=trust.CASES[0], trial=trial)
    for verdict in verdicts:
        outcome.add(comparison(verdict=verdict, elapsed_s=1.0))
    assert outcome.kept is kept


def test_what_is_found_too_late_is_not_found(trust: ModuleType) -> None:
    trial = trust.ComparedWork(name="t", factor=1.05, count=1, budget_s=3.0, found=0.95)
    outcome = trust.TrustOutcome(case=trust.CASES[0], trial=trial)
    outcome.add(comparison(verdict="slower", elapsed_s=4.0))
    assert not outcome.kept


@pytest.mark.parametrize("factor", [1.02, 1.05])
@pytest.mark.parametrize("calls", [1, 7, 20, 50])
def test_a_slowed_side_takes_exactly_its_share_more(
    trust: ModuleType, monkeypatch: pytest.MonkeyPatch, factor: float, calls: int
) -> None:
    slowed = trust.Slowed(lambda: None, factor)
    monkeypatch.setattr(slowed._side, "time", lambda run: run * 2.0)
    assert slowed.time(calls) == pytest.approx(calls * factor * 2.0)


def test_the_benchmark_runs(
    trust: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trust.json"
    code = trust.main(["--case", "op", "--scale", "0.001", "--json", str(file)])
    assert code in (0, 1)
    assert '"outcomes"' in file.read_text()
    assert "against known truth" in capsys.readouterr().out
