"""A plan as text: the verdict, which blocks are left as they are and why, then a table of blocks.

`details_text` has the times behind the verdict, and which gain was predicted, promised and possible
at most.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone

from torchweld.core.blocks import format_spec, parse_spec, with_dropout
from torchweld.core.measured_speed import Speed
from torchweld.core.module_paths import grouped_paths
from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import age, counted, duration, figure, share, size
from torchweld.core.safe_text import clean
from torchweld.plans.plan import Outcome, Plan, Planned, PlannedGroup, Trial, Tuned, Tuning, Whole
from torchweld.welds.found_blocks import Domain, Refusal

WIDTH = 100
# What is said of blocks that are left as they are.
LEFT: dict[Outcome, str] = {
    "not measured": "could not be measured",
    "not known": "not known to be faster",
    "not faster": "measured and no faster than the original beyond noise",
    "cannot be welded": "cannot be welded",
}
COLUMNS = ("block", "computes", "rows", "choice", "speed-up", "error")
# The last column: the memory of a copy of the weights; in training what a call keeps.
COPIED, KEPT = "copy", "kept"


def plan_text(plan: Plan) -> str:
    """What `print(plan)` shows."""
    lines = _wrapped(plan.busy) if plan.busy else []
    lines += _wrapped(sentence(plan))
    lines += [line for one in _account(plan) for line in _wrapped(one, "  ")]
    lines += [line for one in _left(plan) for line in _wrapped(one, "  ")]
    if plan.planned:
        lines += ["", *_table(plan)]
    lines += [line for notice in plan.notices for line in _wrapped(f"note: {notice}")]
    return "\n".join(map(clean, lines))


def _wrapped(text: str, indent: str = "") -> list[str]:
    """Lines that break between words. Those after the first are indented further."""
    return textwrap.wrap(
        clean(text),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


# ---- the verdict ----


def sentence(plan: Plan) -> str:
    """The result of the plan in one sentence."""
    if not plan.decisions:
        return f"nothing was welded: {_why_nothing(plan)}"
    text = f"welded {_welded_words(plan)}"
    if plan.forced:
        return f"{text}, by force: nothing was timed"
    if plan.table is not None:
        return f"{text}; {plan.table}"
    gains = [_gain(one) for one in plan.whole if isinstance(one.speed, Speed)]
    unknown = [one for one in plan.whole if one.verdict == "not measured"]
    if gains:
        text += f": {'; '.join(gains)}"
    if unknown:
        where = "" if len(plan.whole) == 1 else f" at {', '.join(one.workload for one in unknown)}"
        text += f"{'; ' if gains else ': '}the whole model was not measured{where}"
    return text


def _why_nothing(plan: Plan) -> str:
    """The reasons, and how many blocks have each."""
    if not plan.planned:
        return "no block was found that can be welded"
    if any(one.verdict == "wrong" for one in plan.whole):
        return "the welded model gave other numbers"
    blocks, outcomes = counted(len(plan.planned), "block"), plan.outcomes
    told = [f"{outcomes[name]} of {blocks} {said}" for name, said in LEFT.items() if outcomes[name]]
    table = f"; {plan.table}" if plan.table is not None else ""
    why = _why_unmeasured(plan.planned)
    return f"{', '.join(told)}{table}{f' ({why})' if why else ''}"


def _why_unmeasured(planned: Iterable[Tuned]) -> str:
    """Why the first tuning that could not be measured could not; "" if all could."""
    whys = (t.why_unmeasured for one in planned for t in one.tunings if t.unmeasured)
    return next(filter(None, whys), "")


def _welded_words(plan: Plan) -> str:
    """ "6 of 6 MLPs and 13 of 13 Linears"."""
    welded = Counter(one.block.layers > 1 for one in plan.planned if one.welded)
    found = Counter(one.block.layers > 1 for one in plan.planned)
    names = {True: "MLPs", False: "Linears"}
    words = [
        f"{welded[kind]} of {found[kind]} {name}" for kind, name in names.items() if found[kind]
    ]
    if together := sum(group.welded for group in plan.groups):
        words.append(f"{together} of {counted(len(plan.groups), 'group')} that share an input")
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _gain(one: Whole) -> str:
    assert isinstance(one.speed, Speed)
    if one.verdict == "same":
        return f"as fast as before at {one.workload}"
    speedup, (low, high) = one.speed.speedup, one.speed.interval
    if one.verdict == "slower":
        speedup, low, high = 1 / speedup, 1 / high, 1 / low
    earlier = f", measured {_when(one.remembered)}" if one.remembered else ""
    return f"{speedup:.2f}x {one.verdict} ({low:.2f}–{high:.2f}) at {one.workload}{earlier}"


def _when(at: str) -> str:
    """ "2 days ago, by an earlier plan"."""
    return f"{age(at, datetime.now(timezone.utc))}, by an earlier plan"


def _account(plan: Plan) -> Iterator[str]:
    """How much of the model is welded, the error of its output, and the memory of copies."""
    if not plan.decisions:
        return
    parts = []
    if not isinstance(plan.flops_share, NotMeasured):
        parts.append(f"{share(plan.flops_share, 1)} of the model's FLOPs")
    times = [one.time_share for one in plan.whole if not isinstance(one.time_share, NotMeasured)]
    if times:
        low, high = share(min(times), 1), share(max(times), 1)
        parts.append(f"{low if low == high else f'{low} to {high}'} of its time")
    welded = f"{' and '.join(parts)} welded; " if parts else ""
    errors = [one.error_ratio for one in plan.whole if not isinstance(one.error_ratio, NotMeasured)]
    error = f"output error {max(errors):.2g}x of eager's; " if errors else ""
    copies = f"{size(plan.copied_bytes)} of copies" if plan.copied_bytes else "no copies of weights"
    yield f"{welded}{error}{_kept(plan) or copies}"


def _kept(plan: Plan) -> str:
    """What welded blocks keep for the backward, of what the original keeps; "" if not known."""
    found = [
        (tuning.count * trial.saved_bytes, tuning.count * trial.original_saved_bytes)
        for one in plan.planned
        for tuning in one.tunings
        if (trial := tuning.best) is not None
        and isinstance(trial.saved_bytes, int)
        and isinstance(trial.original_saved_bytes, int)
    ]
    after, before = (sum(column) for column in zip(*found, strict=True)) if found else (0, 0)
    if not before:
        return ""
    return f"keeps {share(after / before, 1)} of what the original keeps for the backward"


# ---- what was left ----


def _left(plan: Plan) -> Iterator[str]:
    """Blocks and groups that are left as they are, by reason; then modules that are not blocks."""
    decided = {decision.block.path for decision in plan.decisions}
    left: dict[str, list[Planned]] = {}
    for one in plan.planned if decided else ():
        if one.block.path not in decided:
            left.setdefault(why_left(one), []).append(one)
    for why, same in left.items():
        names = ", ".join(_names([one.block.path for one in same]))
        yield f"{counted(len(same), 'block')} left as {_it(same)}: {why}: {names}"
    apart: dict[str, list[PlannedGroup]] = {}
    for group in plan.groups:
        if not group.welded:
            apart.setdefault(why_left(group), []).append(group)
    for why, alike in apart.items():
        names = ", ".join(_names([caller_of(group) for group in alike]))
        yield f"{counted(len(alike), 'group')} run member by member: {why}: {names}"
    refused: dict[tuple[str, str], list[Refusal]] = {}
    for refusal in plan.refused:
        where = f" ({refusal.where})" if refusal.where else ""
        refused.setdefault((refusal.kind, f"{refusal.reason}{where}"), []).append(refusal)
    for (kind, reason), refusals in refused.items():
        names = ", ".join(_names([one.path for one in refusals]))
        what = counted(len(refusals), kind.rpartition(".")[2])
        yield f"{what} left as {_it(refusals)}, {names}: {reason}"


def _it(items: Sequence[object]) -> str:
    return "it is" if len(items) == 1 else "they are"


def caller_of(group: PlannedGroup) -> str:
    """The module that calls its members."""
    return group.name.rpartition("#")[0]


def why_left(one: Tuned) -> str:
    if one.outcome == "not measured":
        return f"not measured ({_why_unmeasured([one])})"
    if one.outcome == "cannot be welded":
        return next((t.reason for t in one.tunings), one.outcome)
    if isinstance(one, PlannedGroup) and one.outcome == "not faster":
        return "measured and no faster than its members one by one, beyond noise"
    return LEFT[one.outcome]


def _names(paths: Sequence[str]) -> list[str]:
    return [name or "the model" for name in grouped_paths(paths)]


# ---- the detail view ----

EXPLAINED = {
    "predicted": "the most that welding can win, by the profile",
    "promised": "what the gains of the blocks, timed one by one, add up to",
    "ceiling": "what no kernel can beat: the model without its welded modules, plus the least time "
    "for reading their weights or doing their FLOPs",
}


def details_text(plan: Plan) -> str:
    """Times, bounds and promises of each workload, and what they mean."""
    lines = []
    for whole in plan.whole:
        lines.append(whole.workload)
        if isinstance(speed := whole.speed, Speed):
            times = f"{duration(speed.before_us)} before, {duration(speed.after_us)} after"
            lines.append(f"  {'measured':<10}{speed}x; {times}, medians of the same rounds")
        else:
            lines += _wrapped(f"measured  {speed}", "  ")
        for name, meaning in EXPLAINED.items():
            value = getattr(whole, name)
            known = not isinstance(value, NotMeasured)
            shown = f"{figure(value)}x" if known else str(value)
            lines += _wrapped(f"{name:<10}{shown}: {meaning}", "  ")
        lines.append("")
    for one, names in (*alike_planned(plan.planned), *alike_groups(plan)):
        for tuning in one.tunings:
            earlier = f", measured {_when(tuning.remembered)}" if tuning.remembered else ""
            lines += _wrapped(f"{names} at {counted(tuning.rows, 'row')}{earlier}: {tuning.reason}")
    return "\n".join(map(clean, lines)).rstrip()


# ---- dependencies ----


def dependencies_text(plan: Plan) -> str:
    """The calls that each block is valid for, and what is compared at each call."""
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
    """ "any × 1 rows" if it is valid for any size of the first dimension."""
    if domain.shapes:
        text = " or ".join(" × ".join(map(str, shape)) or "no" for shape in domain.shapes)
    elif domain.ones == "*":
        text = "any"
    else:
        text = " × ".join("1" if one == "1" else "any" for one in domain.ones) or "no"
    beside = [one.name for one in domain.beside] + [f"{name}=None" for name in domain.nones]
    return f"{text} rows" + (f" with {', '.join(beside)}" if beside else "")


# ---- the table ----


def _table(plan: Plan) -> list[str]:
    rows: list[tuple[str, ...]] = [(*COLUMNS, KEPT if plan.training else COPIED)]
    for one, names in alike_planned(plan.planned):
        for tuning in one.tunings:
            rows.append((names, _computes(plan, one), *_cells(tuning, "original", plan.training)))
            names = ""
    for group, names in alike_groups(plan):
        computes = f"group of {len(plan.members(group))}"
        for tuning in group.tunings:
            rows.append((names, computes, *_cells(tuning, "one by one", plan.training)))
            names = ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    # If the table is too wide, names are shortened first, then forms.
    for column, least in ((0, 24), (1, 14)):
        excess = sum(widths) + 2 * (len(widths) - 1) - WIDTH
        widths[column] = max(min(widths[column], least), widths[column] - max(excess, 0))
    lines = [
        "  ".join(_fit(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if plan.training and any(row[-1] for row in rows[1:]):
        lines.append("kept: for the backward of one call, parameters left out")
    if plan.groups:
        lines.append("the speed-up of a group is over its members one by one, as they are planned")
    return lines + _remembered((*plan.planned, *plan.groups))


def _remembered(planned: Sequence[Tuned]) -> list[str]:
    """What the asterisks mean: times of earlier plans, with the age of the oldest."""
    whens = sorted({t.remembered for one in planned for t in one.tunings if t.remembered})
    if not whens:
        return []
    return [f"* measured {_when(whens[0])}; --afresh, or remember=False, measures again"]


def _fit(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else f"{text[: width - 1]}…"


def alike_planned(planned: Sequence[Planned]) -> list[tuple[Planned, str]]:
    """Blocks with the same tuning, in one line."""
    groups: dict[tuple[object, ...], list[Planned]] = {}
    for one in planned:
        block = one.block
        alike = (block.form, block.dropout, block.in_features, one.tunings)
        groups.setdefault(alike, []).append(one)
    return [(same[0], ", ".join(_names([p.block.path for p in same]))) for same in groups.values()]


def alike_groups(plan: Plan) -> list[tuple[PlannedGroup, str]]:
    """Groups with the same tuning, as one line: "layers.*.attn: q, k, v"."""
    alike: dict[tuple[object, ...], list[PlannedGroup]] = {}
    for group in plan.groups:
        paths = (one.block.path for one in plan.members(group))
        members = ", ".join(path.removeprefix(f"{caller_of(group)}.") for path in paths)
        alike.setdefault((members, group.tunings), []).append(group)
    return [
        (same[0], f"{', '.join(_names([caller_of(group) for group in same]))}: {members}")
        for (members, _), same in alike.items()
    ]


def _computes(plan: Plan, one: Planned) -> str:
    """The form; in training with what is dropped."""
    block = one.block
    if not plan.training or len(block.dropout) != block.layers or 1.0 in block.dropout:
        return block.form
    return format_spec(with_dropout(parse_spec(block.form), block.dropout))


def _cells(tuning: Tuning, unwelded: str, training: bool) -> tuple[str, ...]:
    best = tuning.best
    if best is None:
        return str(tuning.rows), unwelded, tuning.outcome, "", ""
    choice = f"{best.choice.backend} {best.choice.mode}"
    if isinstance(best.speed, Speed):
        speed = str(best.speed) + (" *" if tuning.remembered else "")
    else:
        speed = "known faster" if best.verdict == "known" else "not timed"
    error = best.error_ratio
    return (
        str(tuning.rows),
        choice,
        speed,
        f"{error}" if isinstance(error, NotMeasured) else f"{error:.2f}",
        _memory(best, training),
    )


def _memory(best: Trial, training: bool) -> str:
    if not training:
        return size(best.copied_bytes) if best.copied_bytes else ""
    kept, before = best.saved_bytes, best.original_saved_bytes
    if not isinstance(kept, int):
        return ""
    return f"{size(kept)} of {size(before)}" if isinstance(before, int) else size(kept)
