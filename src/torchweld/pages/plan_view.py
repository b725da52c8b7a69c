"""A plan as a page shows it: blocks and their fates, trials as curves, errors, rounds as strips.

In: a `Plan`, or one with its rounds. Out: records of a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torchweld.core.blocks import parse_spec
from torchweld.core.measured_speed import Speed
from torchweld.core.not_measured import NotMeasured
from torchweld.pages.page_numbers import figures, ratios
from torchweld.pages.page_records import (
    BlockRow,
    Curve,
    CurvePlot,
    CurvePoint,
    ErrorRow,
    Fate,
    Strip,
)
from torchweld.plans.plan import (
    Plan,
    Planned,
    PlannedGroup,
    TensorError,
    Trial,
    Tuned,
    Tuning,
    Whole,
)
from torchweld.plans.planner import PlanWithRounds
from torchweld.report.plan_text import alike_groups, alike_planned, caller_of, why_left
from torchweld.welds.found_blocks import Block, Refusal
from torchweld.welds.weld_decisions import Choice

REFUSED = "refused"
FATES: dict[str, Fate] = {"welded": "welded", "not measured": "not measured"}


# ---- blocks ----


def block_rows(plan: Plan) -> tuple[BlockRow, ...]:
    """Every block, then every module that was refused."""
    together = {group.name: group for group in plan.groups if group.welded}
    rows = [_row(plan, one, together.get(one.block.group)) for one in plan.planned]
    return (*rows, *map(_refused, plan.refused))


def _row(plan: Plan, one: Planned, group: PlannedGroup | None) -> BlockRow:
    heaviest = max(one.tunings, key=_weight, default=None)
    speedup, interval = figures(_speed(heaviest))
    welded = one.welded or group is not None
    reason = why_left(one) if not welded else ""
    if one.welded and heaviest is not None:
        reason = f"{heaviest.reason} (at {_rows(heaviest.rows)})"
    if group is not None:
        reason = "; ".join(filter(None, (reason, _group_words(plan, one, group))))
    return BlockRow(
        path=one.block.path,
        what=computes(one.block),
        outcome="welded" if welded else one.outcome,
        serves=_serves(one) or (_serves(group) if group is not None else ""),
        reason=reason,
        speedup=speedup,
        interval=interval,
    )


def computes(block: Block) -> str:
    """ "gelu 768→3072→768" for an MLP, "Linear 768→2304" for one product."""
    first, *others = parse_spec(block.form)
    name = first.activation + ("-gated" if first.gate != "none" else "")
    if not others:
        name = "Linear" if name == "identity" else f"Linear and {name}"
        return f"{name} {block.in_features}→{block.out_features}"
    # Plans of earlier versions do not have the sizes inside.
    inside = block.hidden or ("…",) * len(others)
    return f"{name} {'→'.join(map(str, (block.in_features, *inside, block.out_features)))}"


def _weight(tuning: Tuning) -> float:
    """What its calls took before, if that is known."""
    speed = _speed(tuning)
    return tuning.count * (speed.before_us if isinstance(speed, Speed) else 0.0)


def _speed(tuning: Tuning | None) -> Speed | NotMeasured:
    """Of what was chosen, or of the fastest that was not."""
    if tuning is None:
        return NotMeasured("it was not tried")
    if tuning.best is not None:
        return tuning.best.speed
    timed = [t.speed for t in tuning.trials if isinstance(t.speed, Speed)]
    if timed:
        return max(timed, key=lambda speed: speed.speedup)
    return NotMeasured(tuning.why_unmeasured or tuning.reason)


def _serves(one: Tuned) -> str:
    """ "cpu packed", or by rows "cpu natural at 1, cpu packed at 64 rows"."""
    chosen = {t.rows: way(t.chosen) for t in one.tunings if t.chosen is not None}
    names = set(chosen.values())
    if len(names) < 2:
        return "".join(names)
    return ", ".join(f"{name} at {_rows(rows)}" for rows, name in sorted(chosen.items()))


def _group_words(plan: Plan, one: Planned, group: PlannedGroup) -> str:
    start = f"{caller_of(group)}."
    others = (m.block.path.removeprefix(start) for m in plan.members(group) if m is not one)
    best = max(group.tunings, key=_weight)
    return f"in one call with {', '.join(others)}: {best.reason}"


def way(choice: Choice) -> str:
    return f"{choice.backend} {choice.mode}"


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"


def _refused(one: Refusal) -> BlockRow:
    about = ", ".join(filter(None, (one.op, one.where)))
    return BlockRow(
        path=one.path,
        what=one.kind.rpartition(".")[2],
        outcome=REFUSED,
        serves="",
        reason=f"{one.reason} ({about})" if about else one.reason,
    )


def fates_of(blocks: Iterable[BlockRow]) -> dict[str, tuple[Fate, str]]:
    """By path, what became of a module and why. What lies inside is left to the caller."""
    return {
        row.path: (FATES.get(row.outcome, "left"), row.serves if row.serves else row.reason)
        for row in blocks
    }


# ---- curves ----


def plan_curves(plan: Plan) -> tuple[CurvePlot, ...]:
    """The trials of blocks that are alike, by rows; then those of groups."""
    planned = [
        (_title(names, computes(one.block)), one) for one, names in alike_planned(plan.planned)
    ]
    groups = [
        (_title(names, "as one op, over one by one"), one) for one, names in alike_groups(plan)
    ]
    return tuple(
        CurvePlot(title=title, source="plan", curves=curves)
        for title, one in (*planned, *groups)
        if (curves := _curves(one.tunings))
    )


def _title(names: str, what: str) -> str:
    return f"{names}: {what}"


def _curves(tunings: Sequence[Tuning]) -> tuple[Curve, ...]:
    by_way: dict[str, list[CurvePoint]] = {}
    for tuning in sorted(tunings, key=lambda one: one.rows):
        for trial in tuning.trials:
            by_way.setdefault(way(trial.choice), []).append(_point(tuning.rows, trial))
    return tuple(Curve(name=name, points=tuple(points)) for name, points in by_way.items())


def _point(rows: int, trial: Trial) -> CurvePoint:
    speedup, interval = figures(trial.speed)
    return CurvePoint(x=rows, speedup=speedup, interval=interval, verdict=trial.verdict)


# ---- numerics ----


def plan_errors(plan: Plan) -> tuple[ErrorRow, ...]:
    """Of what was chosen, and of what was refused for its numbers; then of the whole model."""
    return (*_of_blocks(plan), *_of_groups(plan), *_of_wholes(plan.whole))


def _of_blocks(plan: Plan) -> Iterator[ErrorRow]:
    for one, names in alike_planned(plan.planned):
        tensors = {f"grad {i}": f"gradient of {t}" for i, t in enumerate(one.block.tensors)}
        tensors["grad x"] = f"gradient of {one.block.argument}"
        yield from _of_tunings(names, one.tunings, tensors)


def _of_groups(plan: Plan) -> Iterator[ErrorRow]:
    for group, names in alike_groups(plan):
        members = [m.block.path.rpartition(".")[2] for m in plan.members(group)]
        tensors = {f"output {i}": f"output of {name}" for i, name in enumerate(members)}
        yield from _of_tunings(names, group.tunings, tensors)


def _of_tunings(
    names: str, tunings: Sequence[Tuning], tensors: dict[str, str]
) -> Iterator[ErrorRow]:
    for tuning in tunings:
        at = f", {_rows(tuning.rows)}" if len(tunings) > 1 else ""
        for trial in tuning.trials:
            for error in trial.errors:
                block = f"{names}{at}, {way(trial.choice)}"
                yield _error(block, tensors.get(error.tensor, error.tensor), error)


def _of_wholes(wholes: Sequence[Whole]) -> Iterator[ErrorRow]:
    for whole in wholes:
        for error in whole.errors:
            start, _, name = error.tensor.partition(" ")
            tensor = f"gradient of {name}" if start == "grad" else error.tensor
            yield _error(f"the whole model, {whole.workload}", f"{tensor}, relative", error)


def _error(block: str, tensor: str, error: TensorError) -> ErrorRow:
    return ErrorRow(
        block=block,
        tensor=tensor,
        eager=error.eager,
        fused=error.fused,
        of_allowed=error.of_allowed,
        ok=error.ok,
    )


# ---- rounds ----


def plan_strips(made: PlanWithRounds) -> tuple[Strip, ...]:
    """The whole model on each workload, then blocks, as far as they were timed now."""
    return (*_whole_strips(made), *_block_strips(made))


def _whole_strips(made: PlanWithRounds) -> Iterator[Strip]:
    for one in made.wholes:
        if one.comparison is not None:
            speedup, interval = figures(one.whole.speed)
            yield Strip(
                name=f"the whole model, {one.whole.workload}",
                ratios=ratios(one.comparison.log_ratios),
                control=ratios(one.comparison.control_log_ratios),
                speedup=speedup,
                interval=interval,
                verdict=one.whole.verdict,
            )


def _block_strips(made: PlanWithRounds) -> Iterator[Strip]:
    for one in made.blocks:
        speedup, interval = figures(one.timed.speed)
        yield Strip(
            name=f"{one.name}, {way(one.choice)}",
            ratios=ratios(one.timed.log_ratios),
            control=ratios(one.timed.control_log_ratios),
            speedup=speedup,
            interval=interval,
            verdict=one.timed.verdict,
        )
