"""Kept runs with a whole profile or bench: their pages show as much as those of saved files."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.bench_samples import bench, case, cell, comparison
from tests.support.block_profiles import blocks

from torchweld.bench.bench_summary import summarise
from torchweld.cli.bench_progress import Keeper
from torchweld.cli.run_keeping import keep_profile
from torchweld.core.errors import TorchweldError
from torchweld.history import History
from torchweld.history.kept_records import cell_of
from torchweld.pages.page_building import page_of
from torchweld.pages.run_view import run_page
from torchweld.profiles.accounting.time_account import account
from torchweld.profiles.profile import Profile


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    with History.open(tmp_path / "history.sqlite", create=True) as opened:
        yield opened


def test_the_page_of_a_kept_profile_shows_all_of_it(history: History) -> None:
    profile = blocks()
    keep_profile(history, "p", "net", {"steps": 3}, profile, account(profile))
    (kept,) = history.runs()
    page, of_file = run_page(kept), page_of([profile])
    assert page.sides == of_file.sides
    assert page.verdict == of_file.verdict
    assert page.title == "p: net"
    assert any("as p, run 1" in note for note in page.notes)
    assert not any("figures of a profile alone" in note for note in page.notes)


def test_the_page_of_a_kept_bench_shows_all_of_it(history: History) -> None:
    measured = bench([cell(case(), {"cpu": comparison(2.0)})])
    keeper = Keeper(history, "b")
    keeper.begin("a grid", measured)
    for one in measured.cells:
        keeper.add(measured, one)
    keeper.end(measured, summarise(measured))
    assert keeper.problem is None
    (kept,) = history.runs()
    page, of_file = run_page(kept), page_of(bench=measured)
    for part in ("verdict", "curves", "maps", "errors", "strips"):
        assert getattr(page, part) == getattr(of_file, part), part
    assert page.history


def test_a_kept_record_that_somebody_edited_is_refused(history: History) -> None:
    name = cell_of(Profile)
    for data in (
        {"packed": "no base64!"},
        {"packed": "AAAA"},
        packed_text("[]"),
        packed_text("{}"),
    ):
        run = history.begin("p", "profile", "gpt", {})
        run.add(name, data)
        with pytest.raises(TorchweldError, match=r"the whole profile|is not a profile"):
            run_page(history.runs()[0])
    run = history.begin("p", "profile", "gpt", {})
    run.add(name, {"kind": "Linear", "calls": 1})  # a module of that name
    assert run_page(history.runs()[0]).sides == ()


def packed_text(text: str) -> dict[str, str]:
    return {"packed": base64.b64encode(gzip.compress(text.encode())).decode()}
