"""Tests what torchweld promises, case by case: a welded model gives what the original gives.

The cases are in the `cases_*.py` beside this file; harness.py says how to read them.
`pytest tests/behaviours -k name_of_a_case` runs one.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from tests.behaviours.harness import CASES, BehaviourCase, Mlp, Steps, X, outcome_of
from tests.support.helpers import ISAS

from torchweld.welds.swapping.swap import is_welded

for _file in sorted(Path(__file__).parent.glob("cases_*.py")):
    importlib.import_module(f"tests.behaviours.{_file.stem}")

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_welded_model_gives_what_the_original_gives(case: BehaviourCase) -> None:
    problems = outcome_of(case).problems
    assert not problems, "\n".join(problems)


def test_a_lie_would_be_found() -> None:
    """Tests the harness: a result that depends on whether the model is welded is a problem."""

    def lying() -> Steps:
        model = yield Mlp()
        yield model(X) + is_welded(model)

    def telling() -> Steps:
        model = yield Mlp()
        yield model(X)
        yield is_welded(model)

    def unwilling() -> Steps:
        model = yield Mlp()
        if is_welded(model):
            raise RuntimeError("welded")
        yield model(X)

    def honest() -> Steps:
        model = yield Mlp()
        yield model(X)

    for steps in (lying, telling, unwilling):
        assert outcome_of(BehaviourCase(steps=steps, expect="welded", inputs=X)).problems
    assert outcome_of(BehaviourCase(steps=honest, expect="refused", inputs=X)).problems
    assert not outcome_of(BehaviourCase(steps=honest, expect="welded", inputs=X)).problems


def test_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert sorted(set(names)) == sorted(names)


def test_refusing_everything_is_no_way_out() -> None:
    """At least half of the cases are welded, and there are many cases."""
    assert len(CASES) >= 150
    assert sum(case.expect == "welded" for case in CASES) >= len(CASES) / 2
    assert sum(outcome_of(case).welded for case in CASES) >= len(CASES) / 2


def test_the_op_runs_inside_of_what_was_recorded() -> None:
    outcomes = [outcome_of(case) for case in CASES if case.expect == "welded"]
    wanted = sum(outcome.inside for outcome in outcomes)
    ran = sum(outcome.ran for outcome in outcomes)
    assert wanted >= len(outcomes) * 0.9
    assert ran >= 0.95 * wanted, f"{ran} of {wanted}"
