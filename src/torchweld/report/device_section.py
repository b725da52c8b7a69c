"""What a device did, for profiles that have one: busy and idle, launches, kernels, gaps.

In: a `Profile` with a `Device`. Out: `rich` renderables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from torchweld.core.number_text import counted, duration, listed, share
from torchweld.core.safe_text import clean
from torchweld.profiles.profile import Device, Gap, Kernel, Profile
from torchweld.report.host_beside_device import host_beside_device, products_table
from torchweld.report.text_style import WIDTH, bar_cells, cut, heading, indented, table

KERNELS_SHOWN = 10
GAPS_SHOWN = 3

# Sign, style, name.
STATES = (
    ("█", "green", "computing"),
    ("▓", "cyan", "copies, communication"),
    ("·", "dim", "idle"),
)


def device_section(profile: Profile, width: int = WIDTH) -> Iterator[RenderableType]:
    """All of it; nothing for a profile without a device."""
    device = profile.device
    if device is None:
        return
    yield heading("device", clean(device.name))
    yield from _states(device, width)
    yield _launches(device)
    yield from host_beside_device(profile, device)
    yield from _sums(device)
    yield from _kernels(device, width)
    yield from products_table(device, width)
    yield from _gaps(profile, device, width)
    yield ""


def _states(device: Device, width: int) -> Iterator[RenderableType]:
    values = (device.compute_us, device.non_compute_us, device.idle_us)
    line, words = Text(no_wrap=True), Text()
    for (sign, style, _), cells in zip(STATES, bar_cells(values, width), strict=True):
        line.append(sign * cells, style=style)
    yield line
    words.append(f"{duration(device.span_us)} from first kernel to last:")
    for (sign, style, name), value in zip(STATES, values, strict=True):
        words.append(f"  {sign} ", style=style)
        words.append(f"{name} {share(value, device.span_us)}")
    yield indented(words)


def _launches(device: Device) -> RenderableType:
    text = Text(f"{counted(device.launches, 'launch')}: ")
    text.append(f"{duration(device.launch_us)} on the host for {duration(device.launched_us)} of ")
    text.append("work on the device")
    if device.occupancy_queries:
        queries = counted(device.occupancy_queries, "occupancy query")
        text.append(f"; {queries}, {duration(device.occupancy_query_us)}")
    return indented(text)


def _sums(device: Device) -> Iterator[RenderableType]:
    both = Table.grid(padding=(0, 4, 0, 0))
    sides = [("kernels by category", device.by_category)]
    if len(device.by_stream) > 1:
        sides.append(("by stream", device.by_stream))
    sides = [side for side in sides if side[1]]
    if not sides:
        return
    tables = []
    for title, sums in sides:
        made = table((title, "left"), ("count", "right"), ("time", "right"), ("of span", "right"))
        for name, (count, us) in sorted(sums.items(), key=lambda item: -item[1][1])[:12]:
            figures = (str(count), duration(us), share(us, device.span_us))
            made.add_row(Text(f"  {cut(clean(name), 30)}"), *map(Text, figures))
        tables.append(made)
    both.add_row(*tables)
    yield ""
    yield both


def _kernels(device: Device, width: int) -> Iterator[RenderableType]:
    by_name: dict[str, list[Kernel]] = {}
    for kernel in filter(device.covers, device.kernels):  # the span is that of these
        by_name.setdefault(kernel.name, []).append(kernel)
    if not by_name:
        return

    def total_us(same: Sequence[Kernel]) -> float:
        return sum(kernel.duration_us for kernel in same)

    ranked = sorted(by_name.values(), key=total_us, reverse=True)
    made = table(
        ("top kernels", "left"), ("count", "right"), ("time", "right"), ("of span", "right")
    )
    name_width = width - 24
    made.columns[0].width = name_width
    for same in ranked[:KERNELS_SHOWN]:
        us = total_us(same)
        figures = (str(len(same)), duration(us), share(us, device.span_us))
        made.add_row(Text(f"  {cut(clean(same[0].name), name_width - 2)}"), *map(Text, figures))
        if same[0].inside:
            inside = "in it: " + listed([clean(op) for op in same[0].inside], 8)
            made.add_row(Text(f"    {cut(inside, name_width - 4)}", style="dim"))
    yield ""
    yield made
    if len(ranked) > KERNELS_SHOWN:
        rest = ranked[KERNELS_SHOWN:]
        us = sum(map(total_us, rest))
        yield Text(f"  and {len(rest)} more, {duration(us)}", style="dim")


def _gaps(profile: Profile, device: Device, width: int) -> Iterator[RenderableType]:
    if not device.gaps:
        return
    causes: dict[str, tuple[int, float]] = {}
    for gap in device.gaps:
        count, us = causes.get(gap.cause, (0, 0.0))
        causes[gap.cause] = count + 1, us + gap.duration_us
    made = table(("idle because of", "left"), ("gaps", "right"), ("time", "right"))
    for cause, (count, us) in sorted(causes.items(), key=lambda item: -item[1][1]):
        made.add_row(Text(f"  {clean(cause)}"), Text(str(count)), Text(duration(us)))
    yield ""
    yield made
    longest = sorted(device.gaps, key=lambda gap: -gap.duration_us)[:GAPS_SHOWN]
    for gap in longest:
        yield Text(cut(f"  {_gap_text(profile, gap)}", width), style="dim", no_wrap=True)


def _gap_text(profile: Profile, gap: Gap) -> str:
    text = f"longest: {duration(gap.duration_us)}, {clean(gap.cause)}"
    if gap.op >= 0:
        op = profile.ops[gap.op]
        path = clean(profile.modules[op.module].path)
        text += f", ended by {clean(op.name)}" + (f" in {path}" if path else "")
    return f"{text}, before {clean(gap.before)}" if gap.before else text
