"""What a gate said about a run is told by its sign, and no baseline looks like a failure."""

from __future__ import annotations

import pytest
from tests.support.watched_pages import Opener

from torchweld.pages.history_view import ACCEPTED

pytestmark = pytest.mark.browser


def test_baselines_and_passes_are_good_and_failures_bad(opened: Opener) -> None:
    page = opened("gated")
    verdicts = [point.verdict for point in page.page.history[0].points]
    assert verdicts == [ACCEPTED, "passed", "failed", "not measured"]
    signs = page.ask(
        "[...document.querySelectorAll('#history g.run')].map((one) =>"
        " [one.querySelector('.gate')?.classList.contains('bad') ?? 'not measured',"
        " one.querySelector('text')?.textContent ?? ''])"
    )
    assert signs == [[False, ""], [False, ""], [True, "failed"], ["not measured", ""]]
    assert page.one("#history g.run circle.unmeasured").count() == 1
    assert "baseline accepted" in page.one("#history .legend").inner_text()
