"""The result: its sentence, and JSON there and back."""

import json
from pathlib import Path
from typing import Any

import pytest

from torchweld.core.errors import TorchweldError
from torchweld.core.measured_speed import Speed
from torchweld.core.not_measured import NotMeasured
from torchweld.timing import Comparison


def comparison(**changed: Any) -> Comparison:
    values: dict[str, Any] = {
        "baseline": "eager",
        "candidate": "fused",
        "verdict": "faster",
        "reason": "the speedup lies in 1.440 to 1.510",
        "speedup": 1.47,
        "interval": (1.44, 1.51),
        "confidence": 0.99,
        "rounds": 2,
        "discarded": 1,
        "baseline_us": 147.0,
        "candidate_us": 100.0,
        "noise": 0.01,
        "threshold": 0.01,
        "cold": False,
        "threads": 2,
        "seed": 0,
        "elapsed_s": 1.5,
        "log_ratios": (0.38, 0.39),
        "control_log_ratios": (0.001, -0.002),
    }
    return Comparison(**{**values, **changed})


WHY = "3 of 20 rounds that a verdict needs fitted into 3 s, and they show no plain difference"
UNMEASURED = comparison(
    verdict="not measured",
    reason=WHY,
    speedup=NotMeasured(WHY),
    interval=NotMeasured(WHY),
    baseline_us=NotMeasured(WHY),
    candidate_us=NotMeasured(WHY),
    noise=NotMeasured(WHY),
)


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (comparison(), "fused ran 1.47 (1.44-1.51) times faster than eager"),
        (
            comparison(verdict="slower", speedup=0.8, interval=(0.5, 0.9)),
            "fused ran 1.25 (1.11-2.00) times slower than eager",
        ),
        (
            comparison(verdict="same", speedup=1.001, interval=(0.99, 1.01)),
            "fused ran as fast as eager, 1.00 (0.99-1.01)",
        ),
        (UNMEASURED, f"fused against eager: not measured, {UNMEASURED.reason}"),
    ],
)
def test_reads_as_a_sentence(result: Comparison, sentence: str) -> None:
    assert str(result) == sentence


@pytest.mark.parametrize("result", [comparison(), UNMEASURED, comparison(rounds=0)])
def test_json_round_trip(result: Comparison) -> None:
    assert Comparison.from_json(result.to_json()) == result


def test_what_was_not_measured_survives_strict_json() -> None:
    text = UNMEASURED.to_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert Comparison.from_json(text) == UNMEASURED


def test_speed_is_known_only_with_a_verdict() -> None:
    speed = comparison().speed
    assert isinstance(speed, Speed)
    assert (speed.speedup, speed.before_us) == (1.47, 147.0)
    wide = comparison(verdict="not measured", reason="too wide")
    assert wide.speed == NotMeasured("too wide")
    assert UNMEASURED.speed == NotMeasured(WHY)


def test_what_the_first_version_wrote_still_loads() -> None:
    old = {
        **UNMEASURED.to_dict(),
        "version": 1,
        "speedup": "nan",
        "interval": [0.0, "inf"],
        "baseline_us": "nan",
        "candidate_us": "nan",
        "noise": None,
    }
    assert Comparison.from_dict(old) == UNMEASURED
    measured = {**comparison().to_dict(), "version": 1}
    assert Comparison.from_dict(measured) == comparison()


def test_a_file_of_the_second_version_is_the_same_when_it_is_saved_again(tmp_path: Path) -> None:
    file = Path(__file__).parents[1] / "data" / "comparison_2.json"
    found = Comparison.load(file)
    assert str(found) == "welded ran 3.98 (3.96-3.99) times faster than eager"
    assert len(found.log_ratios) == found.rounds == 195
    found.save(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(file.read_text())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kind": "else"}, "not a comparison that torchweld saved"),
        ({"version": 99}, "99"),
        ({"verdict": "quick"}, "'quick'"),
    ],
)
def test_foreign_json_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(TorchweldError, match=message):
        Comparison.from_dict({**comparison().to_dict(), **changed})


def test_missing_fields_are_named() -> None:
    data = comparison().to_dict()
    del data["rounds"]
    with pytest.raises(TorchweldError, match="lacks rounds"):
        Comparison.from_dict(data)
