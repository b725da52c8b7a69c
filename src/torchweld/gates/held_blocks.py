"""Which blocks of a plan a baseline holds a model to, and which it does not, and why.

If nothing is welded only because nothing could be measured, no baseline is saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchweld.core.errors import NotMeasuredError, TorchweldError
from torchweld.core.module_paths import grouped_paths
from torchweld.core.number_text import counted
from torchweld.gates.step_counters import Counters
from torchweld.plans.plan import Outcome, Plan, Tuning

EMPTY = (
    "a baseline that welds nothing holds the model to nothing, so none was written; to keep one "
    "all the same: --empty"
)


@dataclass(frozen=True, kw_only=True)
class Held:
    """Blocks by path; those that are not held come with the reason.

    unmeasured:  not welded, because they could not be measured
    unknown:     not welded, because no table knows them to be faster, and nothing was timed
    partly:      welded, but not at row counts that could not be measured
    """

    blocks: tuple[str, ...]  # all that were found
    welded: tuple[str, ...]
    unmeasured: dict[str, str]
    unknown: dict[str, str]
    partly: dict[str, str]


def held_by(plan: Plan, counters: Counters) -> Held:
    """What a baseline of these blocks holds; `welded` are those that ran fused."""
    by_outcome: dict[Outcome, dict[str, str]] = {"not measured": {}, "not known": {}, "welded": {}}
    for one in plan.planned:
        reasons = by_outcome.get(one.outcome)
        wanted = "not known" if one.outcome == "not known" else "not measured"
        unheld = [tuning for tuning in one.tunings if tuning.outcome == wanted]
        if reasons is not None and unheld:
            rows = f"{_rows(unheld)}: " if one.welded else ""
            reasons[one.block.path] = rows + _why(unheld[0], wanted)
    return Held(
        blocks=tuple(one.block.path for one in plan.planned),
        welded=counters.welded,
        unmeasured=by_outcome["not measured"],
        unknown=by_outcome["not known"],
        partly=by_outcome["welded"],
    )


def _rows(tunings: Sequence[Tuning]) -> str:
    rows = sorted({tuning.rows for tuning in tunings})
    return f"at {', '.join(map(str, rows))} {'row' if rows == [1] else 'rows'}"


def _why(tuning: Tuning, verdict: str) -> str:
    reasons = (trial.reason for trial in tuning.trials if trial.verdict == verdict)
    return next(filter(None, reasons), tuning.reason)


def refuse_empty(
    held: Held, plan: Plan, counters: Counters, *, empty: bool, remedies: Sequence[str]
) -> None:
    """Raises where nothing would be held; `empty` allows it where noise has no part in that."""
    if held.welded:
        return
    count = counted(len(held.blocks), "block")
    if held.unmeasured:
        others = len(held.blocks) - len(held.unmeasured)
        rest = f" ({counted(others, 'other')} not welded: {_why_none(plan)})" if others else ""
        raise NotMeasuredError(
            f"could not measure {len(held.unmeasured)} of {count}: "
            f"{next(iter(held.unmeasured.values()))}{rest}; no baseline was written; what would "
            f"help: {'; '.join(remedies)}"
        )
    if empty:
        return
    if held.unknown:
        raise NotMeasuredError(
            f"{len(held.unknown)} of {count} not known to be faster: "
            f"{next(iter(held.unknown.values()))}; what would help: {'; '.join(remedies)}; {EMPTY}"
        )
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
    """Why the first block that was measured is not welded."""
    tunings = [t for one in plan.planned if not one.welded for t in one.tunings]
    return next((t.reason for t in tunings if not t.unmeasured and t.reason), "not called")


def unheld_lines(held: Held) -> list[str]:
    """What a baseline does not hold the model to: how many blocks, then which and why."""
    found = []
    words = {
        "could not be measured": held.unmeasured,
        "not known to be faster": held.unknown,
    }
    for what, reasons in words.items():
        if reasons:
            is_not = "is not held" if len(reasons) == 1 else "are not held"
            found.append(f"{len(reasons)} of {len(held.blocks)} {what} and {is_not} to anything")
    found += _by_reason(held.unmeasured, held.blocks, "not measured: ")
    found += _by_reason(held.unknown, held.blocks, "not known: ")
    found += _by_reason(held.partly, held.blocks, "not measured ")
    return found


def _by_reason(reasons: Mapping[str, str], blocks: Sequence[str], what: str) -> list[str]:
    """Blocks that share a reason in one line."""
    alike: dict[str, list[str]] = {}
    for path, why in reasons.items():
        alike.setdefault(why, []).append(path)
    return [
        f"{', '.join(name or 'the model' for name in grouped_paths(paths, blocks))} {what}{why}"
        for why, paths in alike.items()
    ]
