"""The answer first: one sentence, and one bar that shows what a step's time consists of.

In: a `Profile`, its `Account` (or one module's `Split`). Out: `rich` texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import counted, duration, figure, share, size
from torchweld.core.safe_text import clean
from torchweld.profiles.accounting.time_account import Account, Split
from torchweld.profiles.profile import Profile
from torchweld.report.text_style import WIDTH, bar_cells


@dataclass(frozen=True, kw_only=True)
class BarPart:
    """One part of a `Split` and how it looks; `sign` tells it apart without colour."""

    field: str
    name: str
    sign: str
    style: str
    brief: str  # where a column is narrow
    waste: bool = True

    def of(self, split: Split) -> float:
        value: float = getattr(split, self.field)
        return value


PARTS = (
    BarPart(
        field="arithmetic_us",
        name="arithmetic",
        sign="█",
        style="green",
        brief="arithm.",
        waste=False,
    ),
    BarPart(
        field="traffic_us", name="traffic", sign="▓", style="cyan", brief="traffic", waste=False
    ),
    BarPart(field="launch_us", name="launch", sign="|", style="blue", brief="launch"),
    BarPart(field="round_trip_us", name="round trips", sign="/", style="yellow", brief="trips"),
    BarPart(field="host_us", name="host", sign="=", style="magenta", brief="host"),
    BarPart(field="slow_us", name="slow kernels", sign="▒", style="red", brief="slow"),
    BarPart(
        field="unexplained_us",
        name="unexplained",
        sign="·",
        style="dim",
        brief="unexpl.",
        waste=False,
    ),
)
WASTES = tuple(part for part in PARTS if part.waste)


def largest_waste(split: Split) -> BarPart | None:
    """The part that wastes most; None if nothing is wasted."""
    most = max(WASTES, key=lambda part: part.of(split))
    return most if most.of(split) > 0 else None


# ---- the sentence ----


def verdict(profile: Profile, account: Account) -> Text:
    """What a step takes, and what share of that is necessary; or that it was not measured."""
    text = Text(style="bold")
    text.append(f"{clean(profile.about.what)}: ")
    if isinstance(account.step, NotMeasured):
        return text.append(clean(f"{account.step}."))
    assert not isinstance(profile.step_us, NotMeasured)
    split = account.step.netted
    whole = split.total_us
    text.append(_what_takes(profile, profile.step_us))
    if not profile.ops and profile.device is not None:
        return text.append(
            f"; of {_span(profile, whole)}, nothing is explained, since the trace has no op of the "
            "host."
        )
    if whole <= 0 or not profile.ops:
        return text.append("; no op was recorded, so nothing can be said about it.")
    text.append("; " if profile.device is None else f"; of {_span(profile, whole)}, ")
    if split.useful_us > 0:
        text.append(f"{share(split.useful_us, whole)} is arithmetic and necessary traffic, ")
    text.append(f"{share(split.waste_us, whole)} is waste")
    most = largest_waste(split)
    if most is not None:
        mostly = "mostly " if most.of(split) > 0.5 * split.waste_us else "first of all "
        text.append(f", {mostly}{most.name}")
    unknown = ["how much is necessary"] if split.useful_us <= 0 else []
    named = any(module.path and module.kind != "Optimizer" for module in profile.modules)
    # Explained time is counted per module. Without modules there is nothing to count.
    if not named and profile.about.source == "trace":
        unknown.append("which modules the ops belong to")
    if unknown:
        text.append(f"; it is not known {' or '.join(unknown)}")
    if not named or isinstance(account.explained, NotMeasured):
        return text.append(".")
    return text.append(f"; explained {share(account.explained, 1)}.")


def what_holds(profile: Profile, account: Account) -> Text:
    """What is known about a step whose time was not measured."""
    working = sum(op.launches for op in account.ops)
    flops = sum(op.flops for op in account.ops)
    moved = sum(op.read_bytes + op.written_bytes for op in account.ops)
    unit = "kernels" if profile.device is not None else "of them do work"
    return Text(
        f"What is counted holds nevertheless: {counted(len(profile.ops), 'op')} run, {working:,} "
        f"{unit}; {figure(flops / 1e6)} MFLOP; {size(moved)} read and written."
    )


def _span(profile: Profile, whole_us: float) -> str:
    name = clean(profile.device.name) if profile.device is not None else ""
    return f"the {duration(whole_us)} from the first kernel to the last on {name or 'the device'}"


def _what_takes(profile: Profile, step_us: float) -> str:
    about, timing = profile.about, profile.timing
    if about.source == "trace":
        steps = f"{counted(about.steps, 'step')} in " if about.steps > 1 else ""
        rank = f", rank {about.rank}" if about.rank is not None else ""
        return f"{steps}{duration(step_us)}{rank}"
    what = "one training step" if about.training else "one step"
    raw = ""
    if timing is not None:
        raw = f" ({duration(timing.raw_us)} under the profiler, whose cost is taken away)"
    return f"{what} takes {duration(step_us)}{raw}"


# ---- the bar ----


def bar(split: Split, width: int = WIDTH) -> Text:
    """One line; each part has a sign and a colour of its own."""
    line = Text(no_wrap=True)
    for part, cells in zip(
        PARTS, bar_cells([part.of(split) for part in PARTS], width), strict=True
    ):
        line.append(part.sign * cells, style=part.style)
    return line


def legend(split: Split, whole_us: float, width: int = WIDTH) -> Table:
    """Below the bar: sign, name, time and share of each part."""
    names = [part.name if width >= WIDTH else part.brief for part in PARTS]
    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in PARTS:
        grid.add_column(justify="right", no_wrap=True)
    signs = [(f"{part.sign} ", part.style) for part in PARTS]
    grid.add_row(*map(Text.assemble, signs, names))
    grid.add_row(*(Text(duration(part.of(split))) for part in PARTS))
    grid.add_row(*(Text(share(part.of(split), whole_us), style="dim") for part in PARTS))
    return grid


def waste_bar(split: Split, whole_us: float, width: int = WIDTH) -> Iterator[RenderableType]:
    """The bar with its legend. No part is more than the whole."""
    yield bar(split.netted, width)
    yield legend(split.netted, whole_us, width)
