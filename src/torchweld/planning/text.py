"""A plan as text: a table of blocks, what was refused, the whole model, one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchweld.discovery.found import Domain
from torchweld.paths import grouped_paths
from torchweld.planning.plan import Plan, Planned, Tuning, Whole
from torchweld.texts import clean

WIDTH = 100
COLUMNS = ("block", "computes", "rows", "choice", "speed-up", "error", "copy")


def plan_text(plan: Plan) -> str:
    """What `print(plan)` shows."""
    lines = [*_table(plan.planned), ""]
    if plan.refused:
        lines.append("refused")
        reasons: dict[str, list[str]] = {}
        for refusal in plan.refused:
            where = f" ({refusal.where})" if refusal.where else ""
            reasons.setdefault(f"{refusal.reason}{where}", []).append(refusal.path)
        for reason, paths in reasons.items():
            names = ", ".join(name or "the model" for name in grouped_paths(paths))
            lines.append(f"  {names}: {reason}")
        lines.append("")
    lines += [_whole(one) for one in plan.whole]
    lines.append(sentence(plan))
    lines += [f"note: {notice}" for notice in plan.notices]
    return "\n".join(map(clean, lines))


def dependencies_text(plan: Plan) -> str:
    """For every block the calls it is valid for, and all that is compared at each of them."""
    alike: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for one in plan.planned:
        block = one.block
        calls = ", ".join(map(_calls, block.valid)) or "not known"
        alike.setdefault((block.kind, calls, block.depends_on), []).append(block.path)
    lines = []
    for (kind, calls, depends_on), paths in alike.items():
        names = ", ".join(name or "the model" for name in grouped_paths(paths))
        lines.append(f"{names} ({kind})")
        lines.append(f"  calls: {calls}")
        lines += [f"  {what}" for what in depends_on]
    return "\n".join(map(clean, lines))


def _calls(domain: Domain) -> str:
    """ "any × 1 rows" for what is valid with any number in the first place."""
    if domain.shapes:
        text = " or ".join(" × ".join(map(str, shape)) or "no" for shape in domain.shapes)
    elif domain.ones == "*":
        text = "any"
    else:
        text = " × ".join("1" if one == "1" else "any" for one in domain.ones) or "no"
    beside = [one.name for one in domain.beside] + [f"{name}=None" for name in domain.nones]
    return f"{text} rows" + (f" with {', '.join(beside)}" if beside else "")


def sentence(plan: Plan) -> str:
    """What came of it, in one sentence."""
    decisions = plan.decisions
    if not decisions:
        if not plan.planned:
            return "nothing applied, because no block was found that can be welded"
        return "nothing applied, because nothing was faster than the original beyond noise"
    chains = [d for d in decisions if d.block.layers > 1]
    singles = len(decisions) - len(chains)
    found = [one.block for one in plan.planned]
    all_chains = sum(block.layers > 1 for block in found)
    parts = []
    if all_chains:
        parts.append(f"{len(chains)} of {all_chains} MLPs")
    if singles or len(found) > all_chains:
        parts.append(f"{singles} of {len(found) - all_chains} Linears")
    text = f"welded {' and '.join(parts)}"
    measured = [one for one in plan.whole if one.verdict not in ("not measured", "wrong")]
    if gains := "; ".join(map(_gain, measured)):
        text += f": {gains}"
        errors = [one.error_ratio for one in measured if one.error_ratio > 0]
        if errors:
            text += f", output error {max(errors):.2g}x of eager's"
    elif not plan.forced:
        text += ": the whole model was not measured"
    return f"{text}, {plan.copied_bytes / 1e6:.0f} MB more memory"


def _gain(one: Whole) -> str:
    if one.verdict == "same":
        return f"as fast as before at {one.workload}"
    low, high = one.interval
    speedup = one.speedup
    if one.verdict == "slower":
        speedup, low, high = _inverse(speedup), _inverse(high), _inverse(low)
    return f"{speedup:.2f}x {one.verdict} ({low:.2f}–{high:.2f}) at {one.workload}"


def _inverse(speedup: float) -> float:
    """How much slower; an interval of few rounds may start at 0."""
    return 1 / speedup if speedup > 0 else math.inf


def _whole(one: Whole) -> str:
    if one.verdict in ("not measured", "wrong"):
        return f"{one.workload}: {one.verdict}, {one.reason}"
    gains = [
        (one.predicted, "diagnosis: at most"),
        (one.promised, "the blocks promise"),
        (one.speedup, "measured"),
        (one.ceiling, "ceiling"),
    ]
    shown = ", ".join(f"{name} {gain:.2f}x" for gain, name in gains if gain)
    times = f"{_time(one.before_us)} before, {_time(one.after_us)} after"
    earlier = " (measured by an earlier plan)" if one.remembered else ""
    return f"{one.workload}: {times}{earlier}; {shown}"


def _time(us: float) -> str:
    return f"{us / 1e3:.3g} ms" if us >= 1e3 else f"{us:.3g} µs"


def _table(planned: Sequence[Planned]) -> list[str]:
    rows: list[tuple[str, ...]] = [COLUMNS]
    for one, names in _alike(planned):
        for tuning in one.tunings:
            rows.append((names, one.block.form, *_cells(tuning)))
            names = ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    # Names give way first, forms second.
    for column, least in ((0, 24), (1, 14)):
        excess = sum(widths) + 2 * (len(widths) - 1) - WIDTH
        widths[column] = max(min(widths[column], least), widths[column] - max(excess, 0))
    return [
        "  ".join(_fit(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _fit(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else f"{text[: width - 1]}…"


def _alike(planned: Sequence[Planned]) -> list[tuple[Planned, str]]:
    """Blocks with the same tuning, as one line."""
    groups: dict[tuple[object, ...], list[Planned]] = {}
    for one in planned:
        groups.setdefault((one.block.form, one.block.in_features, one.tunings), []).append(one)
    lines = []
    for same in groups.values():
        names = ", ".join(
            name or "the model" for name in grouped_paths([p.block.path for p in same])
        )
        lines.append((same[0], names))
    return lines


def _cells(tuning: Tuning) -> tuple[str, ...]:
    best = tuning.best
    if best is None:
        why = "not measured" if tuning.unmeasured else ""
        return str(tuning.rows), "original", why, "", ""
    choice = f"{best.choice.backend} {best.choice.mode}"
    if best.speedup <= 0:
        return str(tuning.rows), choice, "", f"{best.error_ratio:.2f}", ""
    low, high = best.interval
    return (
        str(tuning.rows),
        choice,
        f"{best.speedup:.2f} ({low:.2f}–{high:.2f})",
        f"{best.error_ratio:.2f}",
        f"{best.copied_bytes / 1e6:.1f} MB" if best.copied_bytes else "",
    )
