"""Findings, timing and memory as text.

In: a `Profile`, findings. Out: `rich` renderables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from torchweld.core.module_paths import grouped_paths
from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import counted, duration, figure, listed, share, signed, size
from torchweld.core.safe_text import clean
from torchweld.profiles.accounting.cpu_pricing import MEASURE, is_priced, without_peaks
from torchweld.profiles.accounting.time_account import peaks_hold
from torchweld.profiles.accounting.time_splits import Account
from torchweld.profiles.profile import Memory, Profile, Timing
from torchweld.report.text_style import cut_left, heading, indented, table

if TYPE_CHECKING:
    from torchweld.findings import Finding

FINDINGS_SHOWN = 5
MODULES_SHOWN = 4
EVIDENCE_SHOWN = 3
MEMORY_ROWS = 8
# From this share of the step on, page faults are shown with what they bring and cost.
FAULTS_FROM = 0.01


# ---- findings ----


NOTHING = "nothing that costs enough to be worth a change"


def why_none(profile: Profile, account: Account) -> str:
    """What an absence of findings means for this profile."""
    if isinstance(account.step, NotMeasured):
        return "none: gains follow from times, and these were not measured"
    if not profile.ops:
        return NOTHING
    if profile.device is None and not peaks_hold(account):
        return (
            "whether ops could be faster is not known: some were faster than the peaks that are "
            f"known of this machine; {MEASURE}"
        )
    if is_priced(profile):
        return NOTHING
    return f"whether ops could be faster is not known: {without_peaks(profile)}"


def findings_section(
    findings: Sequence[Finding], none: str = NOTHING, most: int = FINDINGS_SHOWN
) -> Iterator[RenderableType]:
    """The first few, each with its bound, cause, evidence and what to do.

    none: what it means if there are none; shown in any case if some rules could not look
    """
    yield heading("findings", "the most that each could win; they overlap")
    if not findings:
        yield indented(Text(f"{none[:1].upper()}{none[1:]}."))
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column()
    for number, finding in enumerate(findings[:most], start=1):
        grid.add_row(Text(f"  {number}"), _finding_text(finding))
    yield grid
    if len(findings) > most:
        yield Text(f"     and {len(findings) - most} more; --json has them all", style="dim")
    if findings and none != NOTHING:
        yield indented(Text(f"There may be more: {none}."), "yellow")
    yield ""


def _finding_text(finding: Finding) -> Text:
    sentence = clean(finding.sentence)
    text = Text(clean(finding.title), style="bold")
    text.append(f"\n{sentence[:1].upper()}{sentence[1:]}.", "not bold yellow")
    text.append(f" {clean(finding.cause)}", "not bold")
    text.append(f"\n→ {clean(finding.action)}", "not bold green")
    details = [clean(item) for item in finding.evidence[:EVIDENCE_SHOWN]]
    if finding.modules:
        details.append(f"in {listed([clean(path) for path in finding.modules], MODULES_SHOWN)}")
    return text.append(f"\n{'; '.join(details)}", "not bold dim") if details else text


# ---- timing ----


def timing_section(profile: Profile) -> Iterator[RenderableType]:
    """Raw, corrected, unexplained, and how the correction was checked."""
    timing = profile.timing
    if timing is None:
        return
    measured = not isinstance(profile.step_us, NotMeasured)
    yield heading(
        "timing", "of the same step, in different ways" if measured else "as recorded: no step's"
    )
    yield _times(timing, profile.step_us)
    yield indented(_cost_text(timing), "dim")
    yield indented(_faults_text(profile), "dim")
    if timing.checks and measured:
        made = table(
            ("check", "left"),
            ("corrected", "right"),
            ("unprofiled", "right"),
            ("off", "right"),
            ("with 95 % confidence", "right"),
        )
        for check in timing.checks:
            off = _percent(check.error)
            style = "yellow" if abs(check.error) > 0.1 else ""
            low_high = _between(check.interval) if check.interval else "too few rounds to tell"
            figures = (duration(check.corrected_us), duration(check.timed_us), off, low_high)
            made.add_row(Text(f"  {clean(check.what)}"), *map(Text, figures), style=style)
        yield made
    yield ""


def _times(timing: Timing, step_us: float | NotMeasured) -> Table:
    """Each time with what it is, so that no two of them seem to contradict each other."""
    rows = [
        (timing.wall_us, "without the profiler, on the clock"),
        (timing.raw_us, "under the profiler, its cost included"),
        (timing.corrected_us, "under the profiler, its cost taken away and outliers cut back"),
    ]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right", no_wrap=True)
    for us, what in rows:
        is_step = us == step_us
        said = f"{what}: the step that all parts add up to" if is_step else what
        grid.add_row(Text(f"  {duration(us)}"), Text(said), style="bold" if is_step else "")
    return grid


def _percent(error: float) -> str:
    digits = 1 if abs(error) < 1 else 0
    return signed(f"{100 * error:.{digits}f}".replace("-", "−")) + " %"


def _between(interval: tuple[float, float]) -> str:
    return " to ".join(_percent(error) for error in interval)


def _cost_text(timing: Timing) -> str:
    return (
        f"{counted(timing.events, 'event')} per step, {figure(timing.op_cost_us)} µs per op and "
        f"{figure(timing.module_cost_us)} µs per module; from {counted(timing.steps, 'step')}"
        + (
            f"; {timing.disturbed} of {counted(timing.rounds, 'round')} were disturbed by other "
            "processes"
            if timing.disturbed
            else ""
        )
        + f"; the very first step took {duration(timing.first_us)}"
    )


def _faults_text(profile: Profile) -> str:
    """How many page faults; what they bring and cost only if that is a noticeable part."""
    faults, step_us = profile.faults, profile.step_us
    if isinstance(faults, NotMeasured):
        return f"page faults: {faults}"
    count = round(faults.per_step)
    text = f"{counted(count, 'page fault')} per step without the profiler"
    if isinstance(step_us, NotMeasured) or faults.cost_us < FAULTS_FROM * step_us:
        return text
    text += f": {size(faults.fresh_bytes)} of fresh pages at {duration(faults.fault_us)} per fault"
    text += f", {share(faults.cost_us, step_us)} of the step at most"
    if isinstance(faults.system_us, NotMeasured):
        return text
    return f"{text}; {duration(faults.system_us)} per step in the kernel"


# ---- memory ----


def memory_section(profile: Profile) -> Iterator[RenderableType]:
    """What a step allocates, what is alive at the peak, what is kept for backward."""
    memory = profile.memory
    if memory is None:
        return
    yield heading("memory")
    yield indented(
        f"{counted(memory.allocations, 'allocation')} of {size(memory.allocated_bytes)} per step; "
        f"peak {size(memory.peak_bytes)} above the level before it"
    )
    both = Table.grid(padding=(0, 4, 0, 0))
    sides = [_peak_table(profile, memory)] if memory.at_peak else []
    sides += [_by_module("saved for backward", memory.saved_bytes)] if memory.saved_bytes else []
    if not memory.saved_bytes and memory.module_bytes:
        sides.append(_by_module("allocated by", memory.module_bytes))
    if sides:
        both.add_row(*sides)
        yield both
    yield ""


def _peak_table(profile: Profile, memory: Memory) -> Table:
    made = table(("alive at the peak", "left"), ("", "right"), ("by", "left"))
    rows = (((profile.modules[a.module].path, a.op, str(a.phase)), a.bytes) for a in memory.at_peak)
    by_maker: dict[tuple[str, str], dict[str, int]] = {}
    for (path, op, phase), count in rows:
        makers = by_maker.setdefault((op, phase), {})
        makers[path] = makers.get(path, 0) + count
    lines = [
        (sum(makers[path] for path in paths), pattern, op, phase)
        for (op, phase), makers in by_maker.items()
        for pattern, paths in grouped_paths(list(makers)).items()
    ]
    for count, pattern, op, phase in sorted(lines, reverse=True)[:MEMORY_ROWS]:
        late = f", {phase}" if phase != "forward" else ""
        what = Text(clean(op.removeprefix("aten::")) + late, style="dim")
        made.add_row(Text(f"  {_place(pattern, 28)}"), Text(size(count)), what)
    return made


def _by_module(title: str, by_path: dict[str, int]) -> Table:
    made = table((title, "left"), ("", "right"), indent=0)
    groups = grouped_paths(list(by_path)).items()
    lines = [(sum(by_path[path] for path in paths), pattern) for pattern, paths in groups]
    for count, pattern in sorted(lines, reverse=True)[:MEMORY_ROWS]:
        made.add_row(Text(_place(pattern, 30)), Text(size(count)))
    return made


def _place(path: str, width: int) -> str:
    return cut_left(clean(path), width) if path else "the model itself"


# ---- notices ----


def notices_section(notices: Iterable[str]) -> Iterator[RenderableType]:
    """What a reader has to know about how the figures were made."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    for notice in notices:
        grid.add_row(Text("note:", style="yellow"), Text(clean(notice), style="yellow"))
    if grid.row_count:
        yield grid
