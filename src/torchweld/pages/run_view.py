"""One kept run as a page: its profile, bench or plan, its rounds, and where it was measured.

In: a run of the history, and the runs that its plot is to show. Out: a `Page`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchweld.bench.bench_results import Bench
from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import duration
from torchweld.gates.gate_baseline import PLAN
from torchweld.history.kept_records import whole_record
from torchweld.history.kept_runs import Run, RunCell
from torchweld.history.kept_samples import CONTROL, LOG_RATIOS
from torchweld.pages.history_view import history_plots, kept_figure, kept_interval
from torchweld.pages.page_building import bench_page, joined_pages, plan_page, profile_page
from torchweld.pages.page_environment import of_fingerprint
from torchweld.pages.page_numbers import ratios
from torchweld.pages.page_records import Page, Strip
from torchweld.plans.plan import Plan
from torchweld.profiles.profile import Profile
from torchweld.report.run_text import settings_text

# Of a run of an earlier version.
PROFILE_NOTE = (
    "this run was kept with the figures of a profile alone; profile it again to see all of it"
)


def run_page(run: Run, runs: Sequence[Run] = ()) -> Page:
    """`runs`: those of the same thing, for the plot; the run itself, if none are given."""
    kept = _kept_page(run)
    state = "" if run.finished else ", unfinished: it was interrupted"
    settings = settings_text(run)
    own = Page(
        title=f"{run.name}: {run.what}",
        verdict=f"{run.kind} of {run.what}, {run.created[:19].replace('T', ' ')} UTC{state}"
        f"{_step_words(run)}.",
        history=history_plots(runs or [run]),
        strips=tuple(strip for cell in run.cells for strip in _strips(cell)),
        environment=of_fingerprint(run.fingerprint),
        notes=tuple(
            filter(
                None,
                (
                    f"kept {run.created} as {run.name}, run {run.id}",
                    settings and f"settings: {settings}",
                    PROFILE_NOTE if run.kind == "profile" and kept is None else "",
                ),
            )
        ),
    )
    if kept is None:
        return own
    joined = joined_pages([kept, replace(own, strips=kept.strips or own.strips)])
    return replace(joined, title=own.title)


def _kept_page(run: Run) -> Page | None:
    """Of the profile, the bench or the plan that the run was kept with."""
    if run.kind == "profile" and (profile := whole_record(run, Profile)) is not None:
        return profile_page([profile])
    if run.kind == "bench" and (bench := whole_record(run, Bench)) is not None:
        return bench_page(bench)
    plan = _plan(run)
    return plan_page(plan) if plan is not None else None


def _plan(run: Run) -> Plan | None:
    cell = run.cell(PLAN)
    if cell is None or run.kind not in ("fuse", "gate"):
        return None
    data = cell.data.get("plan") if run.kind == "fuse" else cell.data
    if not isinstance(data, Mapping):
        raise TorchweldError(f"run {run.id} of {run.name} has no plan that can be read")
    # The first histories kept plans without their mark.
    return Plan.from_dict({**Plan.FORMAT.mark(1), **data})


def _step_words(run: Run) -> str:
    cell = run.cell("step") if run.kind == "profile" else None
    step_us = cell.data.get("step_us") if cell is not None else None
    return f": a step takes {duration(step_us)}" if isinstance(step_us, float) else ""


def _strips(cell: RunCell) -> Iterator[Strip]:
    """The series of rounds; of a bench, each under the name of its side."""
    for series, values in cell.samples.items():
        if not series.endswith(LOG_RATIOS) or series.endswith(CONTROL) or not values:
            continue
        side = series.removesuffix(LOG_RATIOS)
        data: Mapping[str, Any] = cell.data
        if side.strip():
            inner = cell.data.get(side.strip())
            data = inner if isinstance(inner, Mapping) else {}
        speedup = kept_figure(data.get("speedup", data.get("speed")))
        verdict = data.get("verdict")
        yield Strip(
            name=", ".join(filter(None, (cell.cell, side.strip()))),
            ratios=ratios(values),
            control=ratios(cell.samples.get(f"{side}{CONTROL}", ())),
            speedup=speedup,
            interval=kept_interval(data.get("interval", [data.get("low"), data.get("high")])),
            verdict=_verdict(verdict, speedup),
        )


def _verdict(kept: Any, speedup: float | NotMeasured) -> str:
    if isinstance(kept, str):
        return kept
    return "not measured" if isinstance(speedup, NotMeasured) else ""
