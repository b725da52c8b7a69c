"""Guesses read as they are written, and a broken one shows guess, truth and culprits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweld.core.errors import TorchweldError
from torchweld.profiles.attributing.launch_counts import COUNTERS, Launch
from torchweld.profiles.expecting.launch_guesses import (
    judge,
    parse_expectations,
    parse_guess,
    parse_guesses,
)
from torchweld.profiles.profile import Tensor


@pytest.mark.parametrize(
    ("written", "right", "wrong"),
    [
        (3, [3], [0, 2, 4]),
        (0, [0], [1]),
        ("3", [3], [2, 4]),
        ("==3", [3], [2, 4]),
        (" == 3 ", [3], [2, 4]),
        ("<=12", [0, 12], [13]),
        (">=1", [1, 99], [0]),
        ("<5", [0, 4], [5]),
        (">0", [1, 99], [0]),
        ("2..4", [2, 3, 4], [1, 5]),
        ("2 .. 2", [2], [1, 3]),
    ],
)
def test_a_guess_holds_for_what_it_says(
    written: int | str, right: list[int], wrong: list[int]
) -> None:
    guess = parse_guess(written, "ops")
    assert [n for n in right + wrong if guess.holds(n)] == right


@given(
    sign=st.sampled_from(["==", "<=", ">=", "<", ">"]),
    limit=st.integers(1, 50),
    n=st.integers(0, 60),
)
def test_signs_mean_what_python_means_by_them(sign: str, limit: int, n: int) -> None:
    assert parse_guess(f"{sign}{limit}", "ops").holds(n) == eval(f"{n} {sign} {limit}")


@pytest.mark.parametrize(
    "written",
    ["", "three", "=>3", "<=", "-1", "3.5", "1,2", "1...3", "<=1..3", "1..", "!=3", "3 4"],
)
def test_text_that_is_no_guess_is_refused_with_what_is_one(written: str) -> None:
    with pytest.raises(TorchweldError) as caught:
        parse_guess(written, "linear")
    assert f"linear={written!r}" in str(caught.value)
    assert "2..4" in str(caught.value)


@pytest.mark.parametrize("written", [True, -1, 2.0, None])
def test_only_counts_and_text_are_guesses(written: object) -> None:
    with pytest.raises(TorchweldError, match="is not a guess"):
        parse_guess(written, "linear")  # type: ignore[arg-type]


@pytest.mark.parametrize(("written", "complaint"), [("4..2", "lower end first"), ("<0", "never")])
def test_a_guess_that_cannot_hold_is_refused(written: str, complaint: str) -> None:
    with pytest.raises(TorchweldError, match=complaint):
        parse_guess(written, "ops")


def test_an_unknown_counter_is_refused_with_the_nearest() -> None:
    with pytest.raises(TorchweldError, match=r"unknown counter 'linears'; did you mean 'linear'\?"):
        parse_guesses({"linears": 3})


def test_a_line_of_expectations_is_read() -> None:
    text = "linear=3, pointwise<=2,ops==7 ,copies=0,fused=1..2,norms=>=1,bmm>0"
    assert parse_expectations(text) == {
        "linear": "3",
        "pointwise": "<=2",
        "ops": "==7",
        "copies": "0",
        "fused": "1..2",
        "norms": ">=1",
        "bmm": ">0",
    }
    assert parse_guesses(parse_expectations(text)).keys() <= COUNTERS.keys()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "'' in '' is not an expectation"),
        ("linear=3,", "'' in 'linear=3,' is not an expectation"),
        ("linear", "'linear' in 'linear' is not an expectation"),
        ("linear:3", "is not an expectation"),
        ("liner=3", "did you mean 'linear'"),
        ("linear=x", "linear='x' is not a guess"),
        ("linear=3,linear=4", "two guesses of linear"),
    ],
)
def test_a_wrong_line_of_expectations_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(TorchweldError) as caught:
        parse_expectations(text)
    assert complaint in str(caught.value)


def launch(name: str, counter: str, module: str = "", *shapes: tuple[int, ...]) -> Launch:
    inputs = tuple(Tensor(shape=shape, dtype="float32") for shape in shapes)
    return Launch(name=name, counter=counter, module=module, phase="forward", inputs=inputs)


LINEAR = launch("aten::addmm", "linear", "up", (16,), (6, 8), (8, 16))
GELU = launch("aten::gelu", "pointwise", "", (6, 16))
COPY = launch("aten::clone", "copies", "up", (8, 6))
VIEW = launch("aten::t", "metadata", "up", (16, 8))


def test_guesses_that_hold_are_confirmed() -> None:
    guesses = parse_guesses({"linear": 1, "ops": "<=3", "metadata": 1})
    verdict = judge(guesses, {"up": parse_guesses({"copies": 1})}, [LINEAR, GELU, COPY, VIEW])
    assert verdict.holds
    assert [row.truth for row in verdict.rows] == [1, 3, 1, 1]
    assert str(verdict) == "4 guesses confirmed"


def test_a_broken_guess_shows_guess_and_truth_and_the_ops_that_broke_it() -> None:
    guesses = parse_guesses({"linear": 1, "copies": 0})
    verdict = judge(guesses, {}, [LINEAR, GELU, COPY, COPY, VIEW])
    assert not verdict.holds
    assert str(verdict).splitlines() == [
        "1 of 2 guesses did not hold",
        "",
        "          guess  truth",
        "  linear      1      1",
        "  copies      0      2  <-",
        "",
        "copies, 2 in all:",
        "    2 x aten::clone  (8x6)  in up",
    ]


def test_where_something_is_missing_what_else_ran_is_shown() -> None:
    modules = {"up": parse_guesses({"fused": 1}), "down": parse_guesses({"fused": 1})}
    text = str(judge({}, modules, [LINEAR, GELU, VIEW]))
    assert "what else ran in up:\n    1 x aten::addmm  (16, 6x8, 8x16)  in up\n" in text
    assert text.endswith("what else ran in down:\n  nothing")


def test_a_module_has_what_is_inside_it_and_no_namesake() -> None:
    launches = [launch("aten::mm", "linear", path) for path in ("up", "up.0", "upper", "")]
    (row,) = judge({}, {"up": parse_guesses({"linear": 2})}, launches).rows
    assert row.truth == 2


def test_many_culprits_are_cut_short_the_most_frequent_kept() -> None:
    rare = [launch(f"aten::op{i}", "pointwise") for i in range(30)]
    text = str(judge(parse_guesses({"pointwise": 0}), {}, [*rare, GELU, GELU]))
    assert "pointwise, 32 in all:\n    2 x aten::gelu  (6x16)\n" in text
    assert "  and 19 more" in text
    assert len(text.splitlines()) < 25
