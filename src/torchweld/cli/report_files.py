"""RUN of `torchweld report` -> a page: a file by what is in it, or a kept run by its name.

In: what was typed. Out: a `Page`, or an error that says what the file is instead.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torchweld.bench import Bench
from torchweld.cli.recorded_files import RECORDED, file_start, load_recorded
from torchweld.core.errors import TorchweldError
from torchweld.core.files import read_json
from torchweld.core.record_format import RecordFormat
from torchweld.core.safe_text import clean
from torchweld.history import History, Run, history_path
from torchweld.history.kept_runs import Damaged
from torchweld.history.run_lookup import find_run
from torchweld.pages.page_building import bench_page, history_page, plan_page, profile_page
from torchweld.pages.page_reading import MOST_BYTES, read_page
from torchweld.pages.page_records import Page
from torchweld.pages.profile_view import Fates
from torchweld.pages.run_view import run_page
from torchweld.plans.plan import Plan
from torchweld.profiles.profile import Profile

PAGES = (".html", ".htm")
EXPECTED = (
    "expected is a profile, a plan, a bench or a report that torchweld saved (.json, .json.gz, "
    ".html), a trace of torch.profiler, or the name of a run in the history"
)


def is_file(run: str) -> bool:
    """Whether RUN means a file: by its ending, or because it is there."""
    try:
        return run.endswith((*RECORDED, *PAGES)) or Path(run).exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def page_of_run(run: str, history: Path | None, fates: Fates) -> Page:
    """The page of a kept run. `fates`: of modules, by the plan that is shown too."""
    return page_of_file(Path(run), fates) if is_file(run) else _kept_page(run, history)


def page_of_file(path: Path, fates: Fates) -> Page:
    start = file_start(path, EXPECTED, b"{[<")
    if start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<") or b'"torchweld_report"' in start:
        return read_page(path)
    if b'"torchweld_plan"' in start:
        return plan_page(Plan.load(path))
    if b'"torchweld.bench"' in start:
        return bench_page(Bench.load(path))
    for mark, what in ((b'"torchweld_diff"', "diff"), (b'"torchweld.comparison"', "comparison")):
        if mark in start:
            raise TorchweldError(f"{clean(str(path))} is a saved {what}; {EXPECTED}")
    try:
        profile = load_recorded(path)
    except TorchweldError:
        found = _marked_later(path, fates)
        if found is None:
            raise
        return found
    return profile_page([profile], fates)


def _marked_later(path: Path, fates: Fates) -> Page | None:
    """A file whose mark stands behind other keys, as where another program sorted them."""
    try:
        data = read_json(path, "report", MOST_BYTES)
    except TorchweldError:
        return None
    ways: tuple[tuple[RecordFormat, Callable[[], Page]], ...] = (
        (Page.FORMAT, lambda: read_page(path)),
        (Plan.FORMAT, lambda: plan_page(Plan.load(path))),
        (Bench.FORMAT, lambda: bench_page(Bench.load(path))),
        (Profile.FORMAT, lambda: profile_page([Profile.load(path)], fates)),
    )
    marked = [way for form, way in ways if isinstance(data, dict) and form.is_marked(data)]
    return marked[0]() if marked else None


def plan_file_page(path: Path) -> Page:
    return plan_page(Plan.load(path))


def bench_file_page(path: Path) -> Page:
    return bench_page(Bench.load(path))


def kept_history(file: Path) -> Page:
    """All runs of a history."""
    with History.open(file) as opened:
        runs = _sound(opened)
        if not runs:
            raise TorchweldError(f"--history {clean(str(file))}: no run of it can be shown")
        return history_page(runs)


def _kept_page(run: str, file: Path | None) -> Page:
    """The run, with all others of the same thing."""
    if not history_path(file).exists():
        raise TorchweldError(
            f"there is no file {clean(run)}, and no history at {history_path(file)} that could "
            f"have a run of that name; {EXPECTED}"
        )
    with History.open(file) as opened:
        found = _by_id(opened, run) or find_run(opened, run)
        return run_page(found, [one for one in _sound(opened) if one.what == found.what])


def _by_id(history: History, run: str) -> Run | None:
    """A run by its number, unless that is a name."""
    entries = history.entries()
    if not run.isdecimal() or any(one.name == run for one in entries):
        return None
    found = next((one for one in entries if one.id == int(run)), None)
    if isinstance(found, Damaged):
        raise history.damaged(found)
    return found


def _sound(history: History) -> list[Run]:
    return [one for one in history.entries() if isinstance(one, Run)]
