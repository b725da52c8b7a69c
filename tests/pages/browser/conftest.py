"""One browser for all tests here, and the reports they look at, made when they are first asked for.

Without a Chromium these tests are skipped, and the summary says how many.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.bench_samples import FakeCompare
from tests.support.brief_profiling import make_brief, make_uncorrected
from tests.support.browser_skips import NO_BROWSER
from tests.support.hostile_pages import hostile_model, with_names
from tests.support.made_pages import made_page, unmeasured_page
from tests.support.small_models import small_model
from tests.support.watched_pages import (
    TRACE_FOLDER,
    TRACES,
    Opener,
    Report,
    Watched,
    open_report,
)
from torch import nn

from torchweld.cli.main import run
from torchweld.models import MODELS
from torchweld.pages.history_view import ACCEPTED
from torchweld.pages.page_building import page_of
from torchweld.pages.page_html import html_of
from torchweld.pages.page_reading import read_page
from torchweld.pages.page_records import HistoryPlot, Page
from torchweld.pages.redaction import redacted
from torchweld.plans import choice_timing, whole_model
from torchweld.plans.planner import apply, plan
from torchweld.profiles.recording.live_profile import profile

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from chromium import REMEDY, chromium_path, opened_chromium
from playwright.sync_api import Browser

WHY_NOT = f"{NO_BROWSER}; {REMEDY}"


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if chromium_path() is None:
        pytest.skip(WHY_NOT)
    with opened_chromium() as opened:
        yield opened


class Reports:
    """Reports by name: of built-in models, of traces, and those made by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[str, Report] = {}

    def __getitem__(self, name: str) -> Report:
        if name not in self.made:
            path = self.folder / f"{name.replace(' ', '_')}.html"
            self.write(name, path)
            self.made[name] = Report(path, read_page(path))
        return self.made[name]

    def write(self, name: str, path: Path) -> None:
        made: dict[str, Callable[[], Page]] = {
            "made": made_page,
            "unmeasured": unmeasured_page,
            "hostile": lambda: with_names(made_page()),
            "hostile model": hostile_report,
            "one block": one_block_report,
            "gated": gated_report,
            "redacted": lambda: redacted(self["hostile model"].page),
        }
        if name == "gpt fused":
            fuse_small_gpt(self.folder, path)
        elif name in TRACES:
            quietly(["report", str(TRACE_FOLDER / f"{name}.json.gz")], path, "--out")
        else:
            page = model_report(name) if name in MODELS else made[name]()
            path.write_text(html_of(page))


def model_report(name: str) -> Page:
    """Of a profile of a built-in model, made small."""
    with brief_machine():
        return page_of([profile(*small_model(name))], command=f"torchweld profile {name}")


def hostile_report() -> Page:
    with brief_machine():
        return page_of([profile(hostile_model(), torch.ones(2, 8))])


def one_block_report() -> Page:
    """Of a model that is welded as a whole."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).eval()
    inputs = torch.ones(2, 8)
    with brief_machine():
        before = profile(model, inputs)
        made = plan(model, inputs, force=True)
        apply(model, made)
        return page_of([before, profile(model, inputs)], plan=made)


def gated_report() -> Page:
    """A baseline, and what gates said afterwards."""
    page = made_page()
    points = [
        replace(page.history[0].points[i], verdict=verdict)
        for i, verdict in enumerate((ACCEPTED, "passed", "failed"))
    ]
    points.append(replace(points[-1], run=99, verdict="not measured"))
    return replace(page, history=(HistoryPlot(title="gpt", points=tuple(points)),))


def fuse_small_gpt(folder: Path, path: Path) -> None:
    """Before and after, by the command line; what is timed is made up."""
    model = folder / "small_gpt.py"
    model.write_text(
        "from tests.support.small_models import small_model\n"
        "def make():\n    return small_model('gpt')\n"
    )
    history = ["--save", "main", "--history", str(folder / "history.sqlite")]
    with brief_machine() as patch:
        for place in (choice_timing, whole_model):
            patch.setattr(place, "compare", FakeCompare())
        quietly(["fuse", f"{model}:make", "--quick", *history], path, "--report")


@contextmanager
def brief_machine() -> Iterator[pytest.MonkeyPatch]:
    """One thread, few steps, no corrections. The fixtures for this are those of single tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        make_brief(patch)
        make_uncorrected(patch)
        yield patch
    torch.set_num_threads(threads)


def quietly(command: list[str], path: Path, option: str) -> None:
    with redirect_stdout(StringIO()):
        assert run([*command, option, str(path)]) == 0


@pytest.fixture(scope="package")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return Reports(tmp_path_factory.mktemp("reports"))


@pytest.fixture
def opened(browser: Browser, reports: Reports) -> Iterator[Opener]:
    """`opened("gpt")`, with `size` and `theme`: the report in a tab of its own."""
    with watching(browser, reports) as open_one:
        yield open_one


@pytest.fixture(scope="module", params=[*MODELS, "gpt fused", *TRACES, "made", "unmeasured"])
def page(request: pytest.FixtureRequest, browser: Browser, reports: Reports) -> Iterator[Watched]:
    """Each report in turn, in one tab for all tests of a file: they only read."""
    with watching(browser, reports) as open_one:
        yield open_one(request.param)


@contextmanager
def watching(browser: Browser, reports: Reports) -> Iterator[Opener]:
    """A page that complains fails its test: errors, prints to the console, dialogs, and what its
    policy had to stop. So does one that asks for anything but itself."""
    tabs: list[Watched] = []

    def open_one(name: str, **options: Any) -> Watched:
        tabs.append(open_report(browser, reports[name], **options))
        return tabs[-1]

    yield open_one
    for watched in tabs:
        found = [*watched.complaints, *watched.violations()]
        asked = [url for url in watched.requests if not own(url, watched)]
        watched.tab.context.close()
        assert found == []
        assert asked == []


def own(url: str, watched: Watched) -> bool:
    """A file that is saved is a blob of the page's own; an icon without content is in the page."""
    return url == watched.report.path.as_uri() or url.startswith(("blob:", "data:,"))
