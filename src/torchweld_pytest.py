"""The pytest plugin of torchweld: a mark that counts what a test launches, a fixture that times.

    @pytest.mark.torchweld(expect=dict(linear=3, pointwise=1))
    def test_the_block(): ...

    def test_speed(weld_compare): weld_compare(lambda: eager(x), lambda: fused(x))

It stands beside the package and not in it: to import anything of torchweld is to import torch,
which a pytest run that needs neither should not wait for.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from torchweld.timing import Comparison

MARK = "torchweld(expect, backward=False)"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"{MARK}: run the test inside torchweld.expect(**expect); fails if wrong"
    )


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Around the body of the test alone: what fixtures launch does not count.

    Of a unittest.TestCase, setUp and tearDown are part of the body: pytest runs them as one.
    """
    mark = item.get_closest_marker("torchweld")
    if mark is None:
        return (yield)
    guesses, backward = _guesses(mark)
    from torchweld.core.errors import TorchweldError
    from torchweld.profiles.expecting.expectation import ExpectationError, expect

    wrong = ""
    try:
        expected = expect(backward=backward, **guesses)
    except TorchweldError as error:
        wrong = f"@pytest.mark.torchweld: {error}"
    if wrong:
        pytest.fail(wrong, pytrace=False)
    ended = False
    try:
        with expected:
            result = yield
            ended = True
    except ExpectationError as error:
        if not ended:  # the test's own, with lines of its own
            raise
        wrong = str(error)
    if wrong:  # a traceback would be of this file
        pytest.fail(wrong, pytrace=False)
    return result


def _guesses(mark: pytest.Mark) -> tuple[dict[str, Any], bool]:
    given = dict(mark.kwargs)
    guesses, backward = given.pop("expect", None), given.pop("backward", False)
    if mark.args or given or not isinstance(guesses, Mapping) or not isinstance(backward, bool):
        shown = ", ".join([*map(repr, mark.args), *(f"{k}={v!r}" for k, v in mark.kwargs.items())])
        pytest.fail(
            f"@pytest.mark.torchweld({shown}) is not understood; write "
            "@pytest.mark.torchweld(expect=dict(linear=3)), with backward=True to count the "
            "backward pass too",
            pytrace=False,
        )
    return dict(guesses), backward


class WeldCompare(Protocol):
    """What the fixture `weld_compare` gives."""

    def __call__(
        self, baseline: Any, candidate: Any, *, allow: str | None = None, **options: Any
    ) -> Comparison: ...


@pytest.fixture
def weld_compare() -> WeldCompare:
    """`torchweld.compare` in a test: skips where nothing could be measured, fails on "slower".

    `allow="slower"` leaves a slower candidate to the test; the other options are those of
    `torchweld.compare`, and the comparison is returned.
    """

    def compare(
        baseline: Any, candidate: Any, *, allow: str | None = None, **options: Any
    ) -> Comparison:
        __tracebackhide__ = True
        from torchweld.core.typed_names import known
        from torchweld.timing import compare as measure

        if allow is not None:
            known(allow, ("slower",), "allow")
        found = measure(baseline, candidate, **options)
        if found.verdict == "not measured":
            pytest.skip(str(found))
        if found.verdict == "slower" and allow is None:
            pytest.fail(f"{found}: {found.reason}", pytrace=False)
        return found

    return compare
