"""The op table: every op with its own time, its rates, and how near its roofline it is.

In: a `Profile` and its `Account`. Out: the table of the costliest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import duration, figure, size
from torchweld.profiles.accounting.rooflines import OpRow, roofline
from torchweld.profiles.accounting.time_account import Account
from torchweld.profiles.profile import Profile
from torchweld.report.flame_stacks import op_name
from torchweld.report.module_tree import Order, waste_cell
from torchweld.report.text_style import Column, Sheet, cut, heading, percent

OPS_SHOWN = 12


def op_rows(
    profile: Profile, account: Account, modules: Collection[int] | None, order: Order
) -> list[OpRow]:
    """The ops that ran in `modules` (None: anywhere), the costliest first."""
    if modules is not None:
        chosen = [i for i, op in enumerate(profile.ops) if op.module in modules]
        profile = replace(profile, ops=tuple(profile.ops[i] for i in chosen))
        account = replace(account, ops=tuple(account.ops[i] for i in chosen))
    return sorted(roofline(profile, account), key=lambda row: _rank(row, order), reverse=True)


def _rank(row: OpRow, order: Order) -> tuple[float, float]:
    if isinstance(row.split, NotMeasured) or isinstance(row.self_us, NotMeasured):
        return float(row.calls if order == "ops" else row.flops), float(row.moved_bytes)
    first = {"waste": row.split.waste_us, "ops": float(row.calls)}.get(order, row.self_us)
    return first, row.self_us


def ops_section(
    profile: Profile,
    account: Account,
    modules: Collection[int] | None,
    order: Order,
    width: int,
) -> Iterator[RenderableType]:
    """The table of the first few."""
    rows = op_rows(profile, account, modules, order)
    if not rows:
        return
    if isinstance(account.step, NotMeasured):
        yield heading("ops", "counts; times were not measured")
        yield _counts(rows[:OPS_SHOWN], width)
        if len(rows) > OPS_SHOWN:
            yield Text(f"  and {len(rows) - OPS_SHOWN} more", style="dim")
        yield ""
        return
    remark = "kernels and the gaps before them" if profile.device is not None else "own time"
    yield heading("ops", remark)
    whole_us = account.step.total_us
    shown = [row for row in rows if _us(row) > 0 or order == "ops"][:OPS_SHOWN]
    yield _table(shown, whole_us, width)
    if len(rows) > len(shown):
        rest = [row for row in rows if row not in shown]
        rest_us = sum(map(_us, rest))
        part = percent(rest_us / whole_us) if whole_us > 0 else "–"
        yield Text(f"  and {len(rest)} more, {duration(rest_us)}, {part}", style="dim")
    yield ""


def _us(row: OpRow) -> float:
    assert not isinstance(row.self_us, NotMeasured)
    return row.self_us


def _counts(rows: Sequence[OpRow], width: int) -> Table:
    columns = [Column("calls", 6), Column("MFLOP", 7), Column("moves", 8)]
    sheet = Sheet("op", columns, width)
    for row in rows:
        name = cut(op_name(row.name).removeprefix("aten::"), sheet.label_width - 2)
        cells = {
            "calls": str(row.calls),
            "MFLOP": figure(row.flops / 1e6) if row.flops else "",
            "moves": size(row.moved_bytes) if row.moved_bytes else "",
        }
        sheet.add(f"  {name}", cells)
    return sheet.table


def _table(rows: Sequence[OpRow], whole_us: float, width: int) -> Table:
    columns = [
        Column("calls", 6),
        Column("time", 7),
        Column("share", 5),
        Column("GFLOP/s", 7, spare=True),
        Column("GB/s", 6, spare=True),
        Column("of peak", 7, spare=True),
        Column("bound by", 9, left=True, spare=True),
        Column("largest waste", 13, left=True),
    ]
    sheet = Sheet("op", columns, width)
    for row in rows:
        known = row.phase in ("forward", "other") or "Backward" in row.name
        phase = "" if known else f", {row.phase}"
        name_width = sheet.label_width - 2 - len(phase)
        name = cut(op_name(row.name).removeprefix("aten::"), name_width)
        sheet.add(
            f"  {name}{phase}",
            {
                "calls": str(row.calls),
                "time": duration(_us(row)),
                "share": percent(_us(row) / whole_us) if whole_us > 0 else "–",
                "GFLOP/s": figure(row.gflops) if row.gflops is not None else "",
                "GB/s": figure(row.gbps) if row.gbps is not None else "",
                "of peak": percent(row.of_roofline) if row.of_roofline is not None else "",
                "bound by": row.bound if row.bound != "unknown" else "",
                "largest waste": waste_cell(row.split, whole_us),
            },
        )
    return sheet.table
