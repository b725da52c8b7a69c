"""Figures that a test needs: in place of one that was not measured, the reason fails the test."""

from __future__ import annotations

from typing import TypeVar

from torchweld.core.not_measured import NotMeasured

Figure = TypeVar("Figure")


def measured(figure: Figure | NotMeasured | None) -> Figure:
    assert figure is not None
    assert not isinstance(figure, NotMeasured), figure.reason
    return figure
