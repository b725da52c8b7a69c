"""How many tests were skipped for lack of a browser, however many processes ran."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

NO_BROWSER = "no Chromium is installed"


class Skipped(Protocol):
    """What pytest reports of a test that was skipped."""

    @property
    def longrepr(self) -> object: ...


def browser_skips(skipped: Iterable[Skipped]) -> str:
    """ "12 tests in a browser did not run: …"; "" if all ran."""
    reasons = [str(one.longrepr) for one in skipped if NO_BROWSER in str(one.longrepr)]
    if not reasons:
        return ""
    tests = "1 test" if len(reasons) == 1 else f"{len(reasons)} tests"
    return f"{tests} in a browser did not run: {NO_BROWSER}; `make browser` installs one"
