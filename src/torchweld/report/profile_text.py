"""A profile on a terminal: verdict, bar, module tree, findings, ops, timing, memory, device.

In: a `Profile`, its `Account`, findings, and a `View` that says which part of them is wanted.
Out: `rich` renderables, or one string. 100 columns; nothing depends on colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import duration, share
from torchweld.core.safe_text import clean
from torchweld.profiles.accounting.time_account import Account
from torchweld.profiles.accounting.time_splits import added, measured
from torchweld.profiles.profile import Profile
from torchweld.report.device_section import device_section
from torchweld.report.module_tree import Order, Tree, fitting_depth, merged_path, tree_table
from torchweld.report.op_table import ops_section
from torchweld.report.profile_sections import (
    findings_section,
    memory_section,
    notices_section,
    timing_section,
    why_none,
)
from torchweld.report.profile_verdict import verdict, waste_bar, what_holds
from torchweld.report.text_style import WIDTH, heading, to_text

if TYPE_CHECKING:
    from torchweld.findings import Finding


@dataclass(frozen=True, kw_only=True)
class View:
    """What to show. `module` is a path, or a pattern such as `layers.*.mlp`; None is everything."""

    order: Order = "model"
    depth: int | None = None
    module: str | None = None
    width: int = WIDTH


def profile_text(
    profile: Profile,
    account: Account,
    findings: Sequence[Finding] | None = None,
    view: View | None = None,
) -> str:
    """All sections as one string without escape codes; None for findings leaves theirs out."""
    view = view or View()
    return to_text(profile_sections(profile, account, findings, view), view.width)


def profile_sections(
    profile: Profile, account: Account, findings: Sequence[Finding] | None, view: View
) -> Iterator[RenderableType]:
    """One after the other; with `view.module`, only what concerns that module."""
    tree = Tree(profile, account)
    if view.module is not None:
        yield from _one_module(profile, account, tree, view)
        return
    yield from _head(profile, account, view)
    yield from _tree_section(profile, tree, [(0,)], view)
    if findings is not None:
        yield from findings_section(findings, why_none(profile, account))
    yield from ops_section(profile, account, None, view.order, view.width)
    yield from timing_section(profile)
    yield from memory_section(profile)
    yield from device_section(profile, view.width)
    yield from notices_section((*profile.notices, *account.notices))


def brief_sections(
    profile: Profile, account: Account, findings: Sequence[Finding], view: View
) -> Iterator[RenderableType]:
    """The verdict, the bar and the findings alone."""
    yield from _head(profile, account, view)
    yield from findings_section(findings, why_none(profile, account))


def _head(profile: Profile, account: Account, view: View) -> Iterator[RenderableType]:
    yield from _load(profile)
    yield verdict(profile, account)
    if isinstance(account.step, NotMeasured):
        yield what_holds(profile, account)
    else:
        yield from waste_bar(account.step, account.step.total_us, view.width)
    yield ""


def _load(profile: Profile) -> Iterator[RenderableType]:
    """What kept the machine busy, before any figure that it spoilt."""
    if profile.about.load:
        yield Text(clean(profile.about.load), style="yellow")


def _one_module(
    profile: Profile, account: Account, tree: Tree, view: View
) -> Iterator[RenderableType]:
    assert view.module is not None
    groups = tree.select(view.module)
    chosen = [i for group in groups for i in group]
    name = merged_path([profile.modules[i].path for i in chosen]) or profile.about.what
    yield from _load(profile)
    if isinstance(account.step, NotMeasured):
        yield Text(clean(f"{name}: {account.step}."), style="bold")
    else:
        split = added(measured(account.modules[i].split) for i in chosen)
        total_us = sum(tree.total_us(i) for i in chosen)
        text = Text(f"{clean(name)}: {duration(total_us)}", style="bold")
        text.append(f", {share(total_us, tree.whole_us)} of the step; ")
        useful, waste = split.netted.useful_us, split.netted.waste_us
        text.append(f"{share(useful, total_us)} of that is arithmetic and necessary traffic, ")
        yield text.append(f"{share(waste, total_us)} waste.")
        yield from waste_bar(split, total_us, view.width)
    yield ""
    yield from _tree_section(profile, tree, groups, view)
    yield from ops_section(profile, account, tree.inside(chosen), view.order, view.width)
    yield from notices_section((*profile.notices, *account.notices))


def _tree_section(
    profile: Profile, tree: Tree, tops: Sequence[tuple[int, ...]], view: View
) -> Iterator[RenderableType]:
    depth, remark = view.depth, ""
    if depth is None:
        depth = fitting_depth(tree, tops)
        if depth is not None:
            remark = f"{depth} levels deep; --depth shows more, --module zooms in"
    yield heading("modules", remark)
    rows = list(tree.rows(tops, view.order, depth))
    yield tree_table(tree, rows, view.width)
    yield ""
