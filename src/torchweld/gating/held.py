"""Which blocks of a plan a baseline holds a model to, and which it does not, and why.

A block that could not be measured is not one that is not faster: where nothing is welded for want
of a measurement, there is no baseline at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchweld.errors import NotMeasuredError, TorchweldError
from torchweld.figures import counted
from torchweld.gating.advice import without_advice
from torchweld.gating.counters import Counters
from torchweld.paths import grouped_paths
from torchweld.planning.plan import Plan, Planned, Tuning

EMPTY = (
    "a baseline that welds nothing holds the model to nothing, so none was written; to keep one "
    "all the same: --empty"
)


@dataclass(frozen=True, kw_only=True)
class Held:
    """`unmeasured`: blocks that are not welded because they could not be measured, with the reason.

    partly: blocks that are welded, but not at row counts that could not be measured.
    """

    blocks: tuple[str, ...]  # all that were found
    welded: tuple[str, ...]
    unmeasured: dict[str, str]
    partly: dict[str, str]


def held_by(plan: Plan, counters: Counters) -> Held:
    """What a baseline of these holds; `welded` are the blocks that ran fused."""
    unmeasured = {
        one.block.path: _why(tuning)
        for one in plan.planned
        if not one.welded
        for tuning in reversed(one.tunings)  # the first one stays
        if tuning.unmeasured
    }
    partly = {
        one.block.path: f"{_rows(one)}: {_why(tuning)}"
        for one in plan.planned
        if one.welded
        for tuning in reversed(one.tunings)
        if tuning.unmeasured
    }
    return Held(
        blocks=tuple(one.block.path for one in plan.planned),
        welded=counters.welded,
        unmeasured=unmeasured,
        partly=partly,
    )


def _rows(one: Planned) -> str:
    rows = sorted({tuning.rows for tuning in one.tunings if tuning.unmeasured})
    return f"at {', '.join(map(str, rows))} {'row' if rows == [1] else 'rows'}"


def _why(tuning: Tuning) -> str:
    reasons = [t.reason for t in tuning.trials if t.verified and t.verdict == "not measured"]
    why, _ = without_advice(next(filter(None, reasons), tuning.reason))
    return why or "there was no time left for it"


def refuse_empty(
    held: Held, plan: Plan, counters: Counters, *, empty: bool, remedies: Sequence[str]
) -> None:
    """Raises where nothing would be held; `empty` allows it where that is what was measured."""
    if held.welded:
        return
    if held.unmeasured:
        others = len(held.blocks) - len(held.unmeasured)
        rest = f" ({counted(others, 'other')} not welded: {_why_none(plan)})" if others else ""
        raise NotMeasuredError(
            f"could not measure {len(held.unmeasured)} of {counted(len(held.blocks), 'block')}: "
            f"{next(iter(held.unmeasured.values()))}{rest}; no baseline was written; what would "
            f"help: {'; '.join(remedies)}"
        )
    if not empty:
        raise TorchweldError(f"{_why_empty(held, plan, counters)}; {EMPTY}")


def _why_empty(held: Held, plan: Plan, counters: Counters) -> str:
    if plan.decisions:
        why = next(iter(counters.reasons.values()), "they do not fit the model")
        return f"none of the plan's {counted(len(plan.decisions), 'block')} ran fused: {why}"
    wrong = [notice for notice in plan.notices if notice.startswith("nothing is welded")]
    if wrong:
        return wrong[0]
    if held.blocks:
        return f"none of {counted(len(held.blocks), 'block')} was welded: {_why_none(plan)}"
    refused = [f"{one.path or 'the model'}: {one.reason}" for one in plan.refused]
    more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
    return "no block was found to weld" + (f" ({refused[0]}{more})" if refused else "")


def _why_none(plan: Plan) -> str:
    """Of the first block that is not welded for a reason that was measured."""
    tunings = [t for one in plan.planned if not one.welded for t in one.tunings]
    return next((t.reason for t in tunings if not t.unmeasured and t.reason), "not called")


def unheld_lines(held: Held) -> list[str]:
    """What a baseline does not hold the model to, a line for each reason."""
    found = []
    if held.unmeasured:
        count = len(held.unmeasured)
        is_not = "is not held" if count == 1 else "are not held"
        found.append(
            f"{count} of {len(held.blocks)} could not be measured and {is_not} to anything"
        )
    for reasons in (held.unmeasured, held.partly):
        by_reason: dict[str, list[str]] = {}
        for path, why in reasons.items():
            by_reason.setdefault(why, []).append(path)
        for why, paths in by_reason.items():
            names = ", ".join(name or "the model" for name in grouped_paths(paths, held.blocks))
            found.append(f"{names} not measured{' ' if reasons is held.partly else ': '}{why}")
    return found
