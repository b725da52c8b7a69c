"""Puts a page together from what there is: profiles, a plan, a bench, kept runs, a gate's outcome.

`page_of` takes what was measured, `joined_pages` takes pages. Each part says nothing about what it
was not given, so a section that has no data stays empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from torchweld.bench.bench_results import Bench
from torchweld.bench.bench_summary import summarise
from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import counted, duration
from torchweld.history.kept_runs import Run
from torchweld.pages.bench_view import (
    bench_curves,
    bench_errors,
    bench_launches,
    bench_maps,
    bench_strips,
    strips_left_out,
)
from torchweld.pages.flame_diff import diff_of
from torchweld.pages.history_view import GatedNow, history_plots
from torchweld.pages.page_environment import (
    of_about,
    of_bench,
    of_fingerprint,
    of_plan,
)
from torchweld.pages.page_records import Page, PageSide
from torchweld.pages.plan_view import (
    block_rows,
    fates_of,
    plan_curves,
    plan_errors,
    plan_strips,
)
from torchweld.pages.profile_view import Fates, side_of, with_fates
from torchweld.pages.stand_ins import BOTH
from torchweld.plans.plan import Plan
from torchweld.plans.planner import PlanWithRounds
from torchweld.profiles.accounting.profile_diff import why_not_comparable
from torchweld.profiles.accounting.time_account import account
from torchweld.profiles.profile import Profile
from torchweld.report.bench_text import closing
from torchweld.report.gate_text import outcome_lines
from torchweld.report.profile_verdict import verdict
from torchweld.report.text_style import to_text

_T = TypeVar("_T")
BEFORE, AFTER = "before", "after"


def page_of(
    profiles: Sequence[Profile] = (),
    *,
    plan: Plan | PlanWithRounds | None = None,
    bench: Bench | None = None,
    runs: Sequence[Run] = (),
    gate: GatedNow | None = None,
    title: str = "",
    command: str = "",
    notes: Sequence[str] = (),
) -> Page:
    """One page. Of two `profiles` the first is before, the second after.

    The verdict is that of the first there is: gate, plan, profiles, bench, runs.
    """
    planned = [plan_page(plan)] if plan is not None else []
    fates = fates_of(row for page in planned for row in page.blocks)
    parts = [
        *([gate_page(gate)] if gate is not None else []),
        *planned,
        *([profile_page(profiles, fates)] if profiles else []),
        *([bench_page(bench)] if bench is not None else []),
        *([history_page(runs, gate)] if runs or gate is not None else []),
    ]
    if not parts:
        raise TorchweldError("there is nothing to report; give a profile, a plan, a bench or runs")
    made = joined_pages(parts)
    return replace(
        made,
        title=title or made.title,
        command=command or made.command,
        notes=_once((*made.notes, *notes)),
    )


# ---- parts ----


def profile_page(profiles: Sequence[Profile], fates: Fates | None = None) -> Page:
    """Of one profile, or of two: before and after. `fates`: of modules, if a plan tells."""
    if len(profiles) == 1:
        (one,) = profiles
        return Page(
            title=one.about.what,
            verdict=verdict(one, account(one)).plain,
            sides=(side_of(one, fates=fates),),
            environment=of_about(one.about),
        )
    before, after = profiles
    return _compared(side_of(before, BEFORE, fates=fates), side_of(after, AFTER, fates=fates))


def plan_page(made: Plan | PlanWithRounds) -> Page:
    plan = made.plan if isinstance(made, PlanWithRounds) else made
    return Page(
        title=plan.model,
        verdict=f"{plan.model}: {plan.sentence()}.",
        blocks=block_rows(plan),
        curves=plan_curves(plan),
        errors=plan_errors(plan),
        strips=plan_strips(made) if isinstance(made, PlanWithRounds) else (),
        environment=of_plan(plan),
        notes=plan.notices,
    )


def bench_page(bench: Bench) -> Page:
    summary = summarise(bench)
    *said, sentence = to_text(closing(summary), 10_000).strip().split("\n")
    left_out = [f"left out: {name}: {why}" for name, why in bench.left_out.items()]
    return Page(
        title=f"bench of {bench.target or bench.preset or 'blocks'}",
        verdict=sentence,
        curves=bench_curves(bench),
        maps=bench_maps(bench),
        launched=bench_launches(bench),
        errors=bench_errors(bench),
        strips=bench_strips(bench),
        environment=of_bench(bench),
        notes=tuple(filter(None, (*bench.notes, *left_out, *said, strips_left_out(bench)))),
    )


def history_page(runs: Sequence[Run], gate: GatedNow | None = None) -> Page:
    plots = history_plots(runs, gate)
    names = sorted({run.name for run in runs})
    newest = max(runs, key=lambda run: run.id, default=None)
    points = [point for plot in plots for point in plot.points]
    return Page(
        title=f"history of {', '.join(names)}" if names else "history",
        verdict=f"{counted(len(runs), 'kept run')}, {counted(len(points), 'speed-up')} in "
        f"{counted(len(plots), 'plot')}.",
        history=plots,
        environment=of_fingerprint(newest.fingerprint) if newest is not None else (),
    )


def gate_page(gate: GatedNow) -> Page:
    first, *others = outcome_lines(gate.outcome)
    return Page(
        title=f"gate {gate.outcome.baseline}",
        verdict=f"{first}.",
        environment=of_fingerprint(gate.fingerprint),
        notes=tuple(line.strip() for line in others),
    )


# ---- pages together ----


def joined_pages(pages: Sequence[Page]) -> Page:
    """All of them as one; title, verdict and command are those of the first that has them.

    If two have profiles, their last ones are before and after, and the verdict compares them. A
    page without names cannot be joined with another: the same stand-in is another name there.
    """
    if len(pages) > 1 and any(page.redacted for page in pages):
        raise TorchweldError(
            "a redacted page has stand-ins for names, which mean other names on another page, so "
            "it cannot be compared or joined with one; make one page of the originals, and redact "
            "that"
        )
    profiled = [page for page in pages if page.sides]
    if len(profiled) > 2:
        raise TorchweldError("more than two of these have a profile; give one before and one after")
    base = profiled[0] if profiled else pages[0]
    if len(profiled) == 2:
        before, after = (page.sides[-1] for page in profiled)
        before, after = replace(before, name=BEFORE), replace(after, name=AFTER)
        base = _compared(before, after)
        pages = [base, *pages]
    blocks = _once(row for page in pages for row in page.blocks)
    sides = tuple(with_fates(side, fates_of(blocks)) for side in base.sides)
    known = sides == base.sides or len(sides) != 2
    return replace(
        base,
        title=next((page.title for page in pages if page.title), ""),
        verdict=next((page.verdict for page in pages if page.verdict), ""),
        sides=sides,
        diff=base.diff if known else diff_of(*sides),
        blocks=blocks,
        curves=_once(one for page in pages for one in page.curves),
        maps=_once(one for page in pages for one in page.maps),
        launched=_once(one for page in pages for one in page.launched),
        history=_once(one for page in pages for one in page.history),
        errors=_once(one for page in pages for one in page.errors),
        strips=_once(one for page in pages for one in page.strips),
        environment=_environment(pages),
        command=next((page.command for page in pages if page.command), ""),
        notes=_once(note for page in pages for note in page.notes),
    )


def _compared(before: PageSide, after: PageSide) -> Page:
    abouts, steps_us = (before.about, after.about), (before.step_us, after.step_us)
    devices = [_device_name(before), _device_name(after)]
    reasons = why_not_comparable(abouts, steps_us, devices, (BEFORE, AFTER))
    return Page(
        title=_of_both(before, after),
        verdict=_sentence(before, after, reasons),
        sides=(before, after),
        diff=diff_of(before, after),
        not_comparable=reasons,
        environment=_merged(of_about(before.about), of_about(after.about)),
    )


def _device_name(side: PageSide) -> str:
    if side.device is not None:
        return side.device.name
    # Pages of earlier versions name the device in its flame alone.
    flame = side.device_flame
    return flame.names[flame.name[0]] if flame is not None and flame.name else "none"


def _of_both(before: PageSide, after: PageSide) -> str:
    """What was profiled. Two models may be before and after, but a reader has to know."""
    names = dict.fromkeys((before.about.what, after.about.what))
    return " → ".join(filter(None, names))


def _sentence(before: PageSide, after: PageSide, reasons: Sequence[str]) -> str:
    """What two profiles say about the step. They were taken one after the other."""
    what, a_us, b_us = _of_both(before, after), before.step_us, after.step_us
    if reasons or isinstance(a_us, NotMeasured) or isinstance(b_us, NotMeasured):
        return f"{what}: the times before and after cannot be compared: {'; '.join(reasons)}."
    a_us, b_us = a_us / max(before.about.steps, 1), b_us / max(after.about.steps, 1)
    times = f"{what}: a step took {duration(a_us)} before and takes {duration(b_us)} after"
    if a_us <= 0 or b_us <= 0:
        return f"{times}."
    ratio, word = (a_us / b_us, "less") if a_us >= b_us else (b_us / a_us, "more")
    return (
        f"{times}, {ratio:.2f} times {word}, by two profiles that were not taken in the same "
        "rounds, so without an interval."
    )


def _once(items: Iterable[_T]) -> tuple[_T, ...]:
    """Each once, in order."""
    return tuple(dict.fromkeys(items))


def _environment(pages: Sequence[Page]) -> tuple[tuple[str, str], ...]:
    found: tuple[tuple[str, str], ...] = ()
    for page in pages:
        found = _merged(found, page.environment)
    return found


def _merged(
    one: Sequence[tuple[str, str]], other: Sequence[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    """Rows of both; where they differ, both values."""
    found = dict(one)
    for name, value in other:
        values = [*found.get(name, value).split(BOTH), *value.split(BOTH)]
        found[name] = BOTH.join(dict.fromkeys(values))
    return tuple(found.items())
