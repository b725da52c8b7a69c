"""Results in a notebook: a sentence and a table, escaped, without a script; and whole pages."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.bench_samples import bench, case, cell, comparison
from tests.support.block_profiles import blocks, fused_blocks
from torch import nn

import torchweld as tw
from torchweld.core.not_measured import NotMeasured
from torchweld.pages.page_reading import read_page
from torchweld.pages.page_sections import sections_of

EVIL = "<script>alert(1)</script>\x1b[2J"
TAGS = {"div", "p", "strong", "table", "tr", "th", "td"}


class Reader(HTMLParser):
    """Tags and text; an unknown or unclosed tag fails."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        assert attrs == []
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def shown(value: Any) -> str:
    reader = Reader()
    text: str = value._repr_html_()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    assert "\x1b" not in reader.text
    return reader.text


def evil_profile() -> tw.Profile:
    made = blocks()
    modules = tuple(replace(module, kind=EVIL) for module in made.modules)
    return replace(made, about=replace(made.about, what=EVIL), modules=modules)


class Evil(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module(EVIL, nn.Linear(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._modules[EVIL](x)  # type: ignore[misc]
        return found


Evil.__name__ = EVIL


def evil_plan() -> tw.Plan:
    return tw.plan(Evil().eval(), torch.randn(2, 4), force=True)


def test_a_profile_shows_where_the_time_goes() -> None:
    text = shown(blocks())
    assert text.startswith("Net: one step takes")
    assert "arithmetic" in text
    assert "%" in text
    unknown = shown(replace(blocks(), step_us=NotMeasured("too busy")))
    assert "not measured: too busy" in unknown


def test_a_plan_shows_its_blocks() -> None:
    text = shown(evil_plan())
    assert "welded 1 of 1 Linears, by force" in text
    assert "Linear 4→3" in text
    assert "<script>" in text  # as text


def test_a_comparison_shows_its_verdict() -> None:
    text = shown(replace(comparison(), candidate=EVIL))
    assert "times faster than eager" in text
    assert "because we say so" in text
    assert "20, 0 discarded" in text
    assert "not measured" in shown(comparison(verdict="not measured"))


def test_a_check_shows_its_tensors() -> None:
    model = nn.Linear(4, 3)
    other = nn.Linear(4, 3)
    other.load_state_dict(model.state_dict())
    text = shown(tw.verify(model, other, torch.randn(2, 4)))
    assert "the same numbers" in text
    assert "output 0" in text
    wrong = shown(tw.verify(model, nn.Linear(4, 3), torch.randn(2, 4)))
    assert "no: is off by" in wrong


def test_a_bench_and_a_diff_show_themselves() -> None:
    assert "3 × 8→16→4 gelu fp32" in shown(bench([cell(case(), {"cpu": comparison()})]))
    text = shown(tw.diff(blocks(), fused_blocks()))
    assert "launches" in text
    assert "layers.*.mlp" in text


def test_long_tables_are_cut_and_say_so() -> None:
    cells = [cell(case(rows=rows), {"cpu": comparison()}) for rows in range(1, 31)]
    assert "and 18 more" in shown(bench(cells))


@pytest.mark.parametrize(
    ("made", "section"),
    [
        (evil_profile, "flame"),
        (evil_plan, "numerics"),
        (lambda: bench([cell(case(), {"cpu": comparison()})], target=EVIL), "bench"),
    ],
)
def test_results_make_whole_pages(tmp_path: Path, made: Any, section: str) -> None:
    html = made().to_html()
    assert "<script>alert" not in html
    (tmp_path / "a.html").write_text(html)
    assert section in sections_of(read_page(tmp_path / "a.html"))
