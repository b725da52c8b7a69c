"""A plan as text: a table of blocks, what was refused, the whole model, one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from torchweld.paths import grouped_paths
from torchweld.planning.plan import Plan, Planned, Tuning, Whole

COLUMNS = ("block", "computes", "rows", "choice", "speed-up", "interval", "error", "copy")


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
    return "\n".join(lines)


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
    measured = [one for one in plan.whole if one.verdict != "not measured"]
    gains = [
        f"{one.speedup:.2f}x {one.verdict} ({one.interval[0]:.2f}–{one.interval[1]:.2f}) at "
        f"{one.workload}"
        if one.verdict != "same"
        else f"as fast as before at {one.workload}"
        for one in measured
    ]
    if gains:
        text += f": {'; '.join(gains)}"
        worst = max(one.error_ratio for one in measured)
        text += f", output error {worst:.1f} of what is allowed"
    return f"{text}, {plan.copied_bytes / 1e6:.0f} MB more memory"


def _whole(one: Whole) -> str:
    if one.verdict == "not measured":
        return f"{one.workload}: not measured, {one.reason}"
    promised = one.before_us / (one.before_us - one.saved_us) if one.saved_us else 1.0
    text = (
        f"{one.workload}: {_time(one.before_us)} before, {_time(one.after_us)} after; the blocks "
        f"promised {promised:.2f}x, measured {one.speedup:.2f}x"
    )
    return text + (f", ceiling {one.ceiling:.2f}x" if one.ceiling else "")


def _time(us: float) -> str:
    return f"{us / 1e3:.3g} ms" if us >= 1e3 else f"{us:.3g} µs"


def _table(planned: Sequence[Planned]) -> list[str]:
    rows: list[tuple[str, ...]] = [COLUMNS]
    for one, names in _alike(planned):
        for tuning in one.tunings:
            rows.append((names, one.block.form, *_cells(tuning)))
            names = ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    widths[0], widths[1] = min(widths[0], 34), min(widths[1], 26)
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
        return str(tuning.rows), "original", "", "", "", ""
    choice = f"{best.choice.backend} {best.choice.mode}"
    if best.speedup <= 0:
        return str(tuning.rows), choice, "", "", f"{best.error_ratio:.2f}", ""
    low, high = best.interval
    return (
        str(tuning.rows),
        choice,
        f"{best.speedup:.2f}",
        f"{low:.2f}–{high:.2f}",
        f"{best.error_ratio:.2f}",
        f"{best.copied_bytes / 1e6:.3g} MB" if best.copied_bytes else "",
    )
