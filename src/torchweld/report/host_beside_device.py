"""Two parts of a device's section: host and device side by side, and the products by name.

In: a `Profile` with a `Device`. Out: `rich` renderables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from torchweld.core.number_text import counted, duration, listed, share
from torchweld.core.safe_text import clean
from torchweld.profiles.accounting.device_products import (
    HostTimes,
    ProductRow,
    host_times,
    on_tensor_cores_us,
    products_of,
)
from torchweld.profiles.profile import Device, Profile
from torchweld.report.text_style import cut, indented, table

PRODUCTS_SHOWN = 6
_TEMPLATE = re.compile(r"cutlass::\w*[kK]ernel\w*<(\w+)>")
CORES = {True: "tensor", False: "no", None: ""}


def host_beside_device(profile: Profile, device: Device) -> Iterator[RenderableType]:
    """Two columns; and what calls of the runtime take the host."""
    host = host_times(profile, device)
    made = table(("host", "left"), ("time", "right"), ("device", "left"), ("time ", "right"))
    for one, two in zip(_host_rows(device, host), _device_rows(device), strict=True):
        made.add_row(Text(f"  {one[0]}"), Text(one[1]), Text(two[0]), Text(two[1]))
    yield ""
    yield made
    if host.calls:
        named = [f"{row.count:,} {clean(row.name)} {duration(row.us)}" for row in host.calls]
        yield indented(f"calls of the runtime: {listed(named, len(named))}", "dim")


def _host_rows(device: Device, host: HostTimes) -> list[tuple[str, str]]:
    return [
        (f"in {counted(host.ops, 'outermost op')}", duration(host.ops_us)),
        (f"in {counted(device.launches, 'launch')}", duration(host.launch_us)),
        (
            f"in {counted(device.occupancy_queries, 'occupancy query')}",
            duration(host.occupancy_us),
        ),
        ("waiting for the device", duration(host.waiting_us)),
    ]


def _device_rows(device: Device) -> list[tuple[str, str]]:
    kernels = sum(count for count, _ in device.by_category.values())
    return [
        (f"{counted(kernels, 'kernel')}, copies among them", duration(device.launched_us)),
        ("computing", duration(device.compute_us)),
        ("copies, communication", duration(device.non_compute_us)),
        ("idle", duration(device.idle_us)),
    ]


def products_table(device: Device, width: int) -> Iterator[RenderableType]:
    """The matrix products by name; empty if there are none."""
    rows = products_of(device)
    if not rows:
        return
    name_width = max(20, width - 66)
    made = table(
        ("products", "left"), ("count", "right"), ("time", "right"), ("tile", "right"),
        ("layout", "left"), ("type", "left"), ("cores", "left"),
    )  # fmt: skip
    made.columns[0].width = name_width
    for row in rows[:PRODUCTS_SHOWN]:
        figures = (str(row.count), duration(row.us), *_columns(row))
        name = cut(clean(short_name(row.name)), name_width - 2)
        made.add_row(Text(f"  {name}"), *map(Text, figures))
    yield ""
    yield made
    rest = rows[PRODUCTS_SHOWN:]
    if rest:
        us = sum(row.us for row in rest)
        yield Text(f"  and {len(rest)} more, {duration(us)}", style="dim")
    yield Text(f"  {cores_words(rows)}", style="dim")


def short_name(name: str) -> str:
    """`cutlass_80_…` of `void cutlass::Kernel<cutlass_80_…>(…)`: that is the kernel."""
    inner = _TEMPLATE.search(name)
    return inner[1] if inner else name.removeprefix("void ")


def _columns(row: ProductRow) -> tuple[str, str, str, str]:
    gemm = row.gemm
    if gemm is None:
        return ("", "", "", "")
    tile = "×".join(map(str, gemm.tile)) if gemm.tile else ""
    return tile, gemm.layout or "", gemm.dtype or "", CORES[gemm.tensor_cores]


def cores_words(rows: tuple[ProductRow, ...]) -> str:
    """`82 % of the products' time on tensor cores, 11 % not, 7 % not told by names`."""
    found = on_tensor_cores_us(rows)
    whole = sum(found.values())
    parts = [
        f"{share(found[True], whole)} of the products' time on tensor cores",
        f"{share(found[False], whole)} not" if found[False] else "",
        f"{share(found[None], whole)} not told by names" if found[None] else "",
    ]
    return ", ".join(part for part in parts if part)
