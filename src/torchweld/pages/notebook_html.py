"""What a notebook shows of a result: its verdict and a small table, as HTML without any script.

In: a profile, a plan, a diff, a bench, a comparison or a check. Out: a piece of HTML, in which all
names are escaped. `whole_page` is the page of a profile, a plan or a bench.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any

from torchweld.bench.bench_results import Bench
from torchweld.bench.bench_summary import summarise
from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import duration, figure, share
from torchweld.core.safe_text import clean
from torchweld.findings import diagnose
from torchweld.numerics.model_check import Check
from torchweld.pages.page_building import page_of
from torchweld.pages.page_html import html_of
from torchweld.pages.plan_view import computes
from torchweld.plans.plan import Plan, Tuned
from torchweld.profiles.accounting.profile_diff import Diff
from torchweld.profiles.accounting.time_account import account
from torchweld.profiles.profile import Profile
from torchweld.report.bench_text import closing
from torchweld.report.plan_text import alike_planned, why_left
from torchweld.report.profile_verdict import PARTS, verdict
from torchweld.report.text_style import to_text
from torchweld.timing import Comparison

# Rows of a table in a notebook; the rest is in the page.
MOST_ROWS = 12
Table = Sequence[Sequence[str]]


def whole_page(value: Any) -> str:
    """The page of a profile, a plan or a bench."""
    if isinstance(value, Profile):
        return html_of(page_of([value]))
    if isinstance(value, Plan):
        return html_of(page_of(plan=value))
    assert isinstance(value, Bench), value
    return html_of(page_of(bench=value))


def snippet_of(value: Any) -> str:
    """The piece of HTML."""
    shown = next(show for kind, show in _SHOWN.items() if isinstance(value, kind))
    sentence, table = shown(value)
    return f"<div><p><strong>{_text(sentence)}</strong></p>{_table(table)}</div>"


def _table(table: Table) -> str:
    """The first row is the head."""
    if len(table) < 2:
        return ""
    head, *rows = table
    lines = [_row("th", head), *(_row("td", row) for row in rows[:MOST_ROWS])]
    left = len(rows) - MOST_ROWS
    more = f"<p>and {left} more</p>" if left > 0 else ""
    return f"<table>{''.join(lines)}</table>{more}"


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{_text(cell)}</{tag}>' for cell in cells)}</tr>"


def _text(text: str) -> str:
    return html.escape(clean(text))


# ---- what is shown of each ----


def _profile(profile: Profile) -> tuple[str, Table]:
    found = account(profile)
    sentence = verdict(profile, found).plain
    if isinstance(found.step, NotMeasured):
        return sentence, ()
    split = found.step.netted
    parts = [
        (part.name, duration(part.of(split)), share(part.of(split), split.total_us))
        for part in PARTS
        if part.of(split)
    ]
    findings = [(one.title, one.sentence, "") for one in diagnose(profile, found)]
    return sentence, [("the step", "time", "share"), *parts, *findings[:3]]


def _plan(plan: Plan) -> tuple[str, Table]:
    rows = [
        (names, computes(one.block), _came_to(one), _speeds(one))
        for one, names in alike_planned(plan.planned)
    ]
    head = ("block", "computes", "", "speed-up by rows")
    return f"{plan.model}: {plan.sentence()}.", [head, *rows]


def _came_to(one: Tuned) -> str:
    return "welded" if one.welded else why_left(one)


def _speeds(one: Tuned) -> str:
    best = [(t.rows, t.best) for t in one.tunings if t.best is not None]
    return "; ".join(
        f"{rows}: {'not timed' if isinstance(trial.speed, NotMeasured) else trial.speed}"
        for rows, trial in best
    )


def _diff(found: Diff) -> tuple[str, Table]:
    speedup = found.speedup
    sentence = (
        f"{found.b.what}: {found.step.before.launches} → {found.step.after.launches} launches"
    )
    if speedup is not None:
        sentence += f", {speedup:.2f} times as fast, without an interval"
    if found.not_comparable:
        sentence += f"; times are not comparable: {'; '.join(found.not_comparable)}"
    rows = [
        (
            one.path or "the model",
            f"{one.before.launches} → {one.after.launches}",
            "–" if found.not_comparable else duration(one.saved_us),
        )
        for one in found.changes
    ]
    return f"{sentence}.", [("module", "launches", "saved"), *rows]


def _bench(bench: Bench) -> tuple[str, Table]:
    sentence = to_text(closing(summarise(bench)), 10_000).strip().split("\n")[-1]
    rows = [
        (cell.name, *(_speed_of(cell.result(name).comparison) for name in bench.names[1:]))
        for cell in bench.cells
    ]
    return sentence, [("over eager", *bench.names[1:]), *rows]


def _speed_of(found: Comparison | None) -> str:
    if found is None or isinstance(found.speed, NotMeasured):
        return "–"
    return str(found.speed)


def _comparison(found: Comparison) -> tuple[str, Table]:
    rows = [
        ("speed-up", _figure(found.speedup)),
        ("time before", _time(found.baseline_us)),
        ("time after", _time(found.candidate_us)),
        ("rounds", f"{found.rounds}, {found.discarded} discarded"),
        ("verdict", f"{found.verdict}: {found.reason}" if found.reason else found.verdict),
    ]
    return f"{found}.", [("", ""), *rows]


def _time(us: float | NotMeasured) -> str:
    return str(us) if isinstance(us, NotMeasured) else duration(us)


def _figure(value: float | NotMeasured) -> str:
    return str(value) if isinstance(value, NotMeasured) else figure(value)


def _check(check: Check) -> tuple[str, Table]:
    rows = [
        (
            one.name,
            f"{one.reference_error:.3g}",
            f"{one.error:.3g}",
            f"{one.allowed:.3g}",
            "yes" if one.ok else f"no: {one.reason}",
        )
        for one in sorted(check.compared, key=lambda one: one.ok)
    ]
    return f"{check}.", [("tensor", "error of the reference", "error", "allowed", "holds"), *rows]


_SHOWN: dict[type, Callable[[Any], tuple[str, Table]]] = {
    Profile: _profile,
    Plan: _plan,
    Diff: _diff,
    Bench: _bench,
    Comparison: _comparison,
    Check: _check,
}
