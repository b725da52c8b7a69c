"""The pytest plugin, in pytest runs of its own."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

MODEL = """
import pytest
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
x = torch.randn(2, 4)
"""


def made_up(verdict: str) -> str:
    """A file whose comparisons come out as wanted, with a test that asks for one."""
    return f"""
import dataclasses
import sys
import pytest
import torchweld.timing

measuring = sys.modules["torchweld.timing"]  # runs in one process each have their own
fields = {{field.name: None for field in dataclasses.fields(measuring.Comparison)}}
found = measuring.Comparison(**(fields | dict(
    verdict="{verdict}", reason="made up", speedup=0.5, interval=(0.4, 0.6),
    baseline="baseline", candidate="candidate")))


@pytest.fixture(autouse=True)
def steady(monkeypatch):
    monkeypatch.setattr(measuring, "compare", lambda *sides, **options: found)


def test_it(weld_compare):
    assert weld_compare(int, int) is found


def test_allowed(weld_compare):
    assert weld_compare(int, int, allow="slower") is found
"""


def test_a_pytest_run_without_torchweld_does_not_import_torch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_nothing(request):
            assert request.config.pluginmanager.has_plugin("torchweld")
            assert "torchweld" not in sys.modules
            assert "torch" not in sys.modules
        """
    )
    pytester.runpytest_subprocess("--strict-markers", "-p", "no:hypothesispytest").assert_outcomes(
        passed=1
    )


def test_the_mark_holds_the_body_of_a_test_to_its_guesses(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        MODEL
        + """
@pytest.fixture
def warmed_up():
    model(x)  # outside the test, so it does not count


@pytest.mark.torchweld(expect=dict(linear=2, pointwise=1))
def test_right(warmed_up):
    model(x)


@pytest.mark.torchweld(expect=dict(linear=3))
def test_wrong():
    model(x)


@pytest.mark.torchweld(expect=dict(linear="<=5"), backward=True)
def test_backward_counts():
    model(x).sum().backward()


@pytest.mark.torchweld(expect=dict(linear=3))
class TestSeveral:
    @pytest.mark.torchweld(expect=dict(linear=2))
    def test_the_nearest_mark_counts(self):
        model(x)

    @pytest.mark.parametrize("n", [1, 2])
    def test_all_of_a_class(self, n):
        model(x)
"""
    )
    done = pytester.runpytest_inprocess("--strict-markers", "-ra")
    done.assert_outcomes(passed=3, failed=3)
    done.stdout.fnmatch_lines(["*1 of 1 guess did not hold*", "*linear*3*2*<-*"])
    done.stdout.no_fnmatch_line("*torchweld_pytest.py:*")
    done.stdout.no_fnmatch_line("*traceback*")


def test_the_mark_holds_a_unittest_case_too(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        MODEL
        + """
import unittest


class Case(unittest.TestCase):
    @pytest.mark.torchweld(expect=dict(linear=2))
    def test_right(self):
        model(x)

    @pytest.mark.torchweld(expect=dict(linear=5))
    def test_wrong(self):
        model(x)

    @pytest.mark.torchweld(expect=dict(linear=5))
    def test_broken(self):
        self.assertEqual(1, 2)
"""
    )
    done = pytester.runpytest_inprocess()
    done.assert_outcomes(passed=1, failed=2)
    done.stdout.fnmatch_lines_random(["*1 of 1 guess did not hold*", "*AssertionError: 1 != 2*"])


def test_an_expectation_that_fails_inside_a_test_shows_its_line(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        MODEL
        + """
import torchweld


@pytest.mark.torchweld(expect=dict())
def test_it():
    raise torchweld.profiles.expecting.expectation.ExpectationError("my own")
"""
    )
    done = pytester.runpytest_inprocess()
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(
        ["*> *raise torchweld.profiles.expecting.expectation.ExpectationError(*"]
    )


def test_a_test_that_fails_by_itself_shows_its_own_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        MODEL
        + """
@pytest.mark.torchweld(expect=dict(linear=3))
def test_broken():
    model(x)
    assert 1 == 2


@pytest.mark.torchweld(expect=dict(linear=2))
def test_after_it():
    model(x)
"""
    )
    done = pytester.runpytest_inprocess()
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["*assert 1 == 2*"])
    done.stdout.no_fnmatch_line("*guess*")


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ("expect=dict(linaer=3)", "*unknown counter 'linaer'; did you mean 'linear'?*"),
        ("linear=3", "*torchweld(linear=3) is not understood; write*"),
        ("", "*torchweld() is not understood; write*"),
        ("dict(linear=3)", "*is not understood; write*"),
        ("expect=dict(linear=3), backward='yes'", "*is not understood; write*"),
        ("expect=dict(linear='two')", "@pytest.mark.torchweld: linear='two' is not a guess;*"),
    ],
)
def test_a_mark_that_makes_no_sense_says_what_does(
    pytester: pytest.Pytester, mark: str, said: str
) -> None:
    pytester.makepyfile(
        f"import pytest\n\n@pytest.mark.torchweld({mark})\ndef test_it():\n    assert 1 == 2\n"
    )
    done = pytester.runpytest_inprocess()
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines([said])
    done.stdout.no_fnmatch_line("*1 == 2*")  # it did not run
    done.stdout.no_fnmatch_line("*another exception*")


def test_the_mark_is_listed(pytester: pytest.Pytester) -> None:
    done = pytester.runpytest_inprocess("--markers")
    done.stdout.fnmatch_lines(["@pytest.mark.torchweld(expect, backward=False): run the test*"])


@pytest.mark.parametrize(
    ("verdict", "outcomes"),
    [
        ("faster", {"passed": 2}),
        ("same", {"passed": 2}),
        ("slower", {"passed": 1, "failed": 1}),
        ("not measured", {"skipped": 2}),
    ],
)
def test_the_fixture_fails_skips_or_returns(
    pytester: pytest.Pytester, verdict: str, outcomes: dict[str, int]
) -> None:
    pytester.makepyfile(made_up(verdict))
    done = pytester.runpytest_inprocess("-rs")
    done.assert_outcomes(**outcomes)
    if verdict == "slower":
        done.stdout.fnmatch_lines(["*candidate ran 2.00 (1.67-2.50) times slower*made up*"])
    if verdict == "not measured":
        done.stdout.fnmatch_lines(["*SKIPPED*not measured, made up*"])


def test_the_fixture_really_measures_and_takes_the_options(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        def test_it(weld_compare):
            few, many = (lambda: sum(range(100))), (lambda: sum(range(3000)))
            found = weld_compare(many, few, budget_s=1.0, names=("many", "few"))
            assert found.verdict == "faster"
            assert (found.baseline, found.candidate) == ("many", "few")

        def test_what_may_be_allowed(weld_compare):
            with pytest.raises(ValueError, match="unknown allow 'faster'"):
                weld_compare(int, int, allow="faster")
        """
    )
    done = pytester.runpytest_inprocess()
    assert done.parseoutcomes().get("failed", 0) == 0
    assert done.parseoutcomes()["passed"] >= 1
