"""A page is its data: it saves and loads, and refuses what it does not know."""

from __future__ import annotations

import pytest

from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.pages.page_records import Curve, CurvePlot, CurvePoint, Page

UNTIMED = CurvePoint(x=8, speedup=NotMeasured("busy"), interval=None, verdict="not measured")
PAGE = Page(
    title="gpt",
    verdict="1.6 times as fast",
    curves=(CurvePlot(title="mlp", source="plan", curves=(Curve(name="cpu", points=(UNTIMED,)),)),),
    environment=(("torch", "2.13.0"),),
)


def test_a_page_loads_as_it_was_saved() -> None:
    assert Page.from_json(PAGE.to_json()) == PAGE


def test_a_page_of_a_later_version_is_refused() -> None:
    later = {**PAGE.to_dict(), "torchweld_report": 99}
    with pytest.raises(TorchweldError, match="make the report again"):
        Page.from_dict(later)
