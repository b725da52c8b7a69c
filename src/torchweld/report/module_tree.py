"""The model as `print(model)` shows it, with what each module costs beside it.

In: a `Profile` and its `Account`. Out: `TreeRow`s, and the table made of them. Identical blocks in
a row are one line with sums, as print does: `(0-11): 12 x Block`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal

from rich.table import Table
from rich.text import Text

from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import figure, size, unit_of
from torchweld.core.safe_text import clean
from torchweld.profiles.accounting.time_splits import Account, Split, added, measured
from torchweld.profiles.profile import Profile, deepest_first
from torchweld.report.profile_verdict import largest_waste
from torchweld.report.text_style import WIDTH, Column, Sheet, brief_arguments, cut, percent

Order = Literal["model", "time", "waste", "ops"]
ORDERS: tuple[Order, ...] = ("model", "time", "waste", "ops")

# A tree of more lines is shown less deep, unless a depth is asked for.
MOST_ROWS = 60
# From this share of the step on, a module's own time gets a line beside its children.
OWN_SHARE = 0.01
# What the profiler saw in no module and no op.
BEYOND = "unexplained, in no module"


@dataclass(frozen=True, kw_only=True)
class TreeRow:
    """One line: modules at the same place of identical blocks, summed."""

    name: str  # "fc1", "0-11"; "" for the top
    kind: str
    extra: str
    depth: int
    modules: tuple[int, ...]
    own: bool  # only what is in no child
    calls: int
    forward_us: float
    backward_us: float
    ops: int  # that do work
    bound: str
    split: Split | None  # None if no time was measured
    total_us: float  # on a device: of its kernels and the gaps before them


class Tree:
    """The modules of a profile by parent, and which of them have the same structure."""

    def __init__(self, profile: Profile, account: Account) -> None:
        self.modules = profile.modules
        self.account = account.modules
        self.timed = not isinstance(account.step, NotMeasured)
        self.whole_us = measured(account.step).total_us if self.timed else 0.0
        self.on_device = profile.device is not None
        # Forward and backward are separate on the host, but not on a device.
        self.phased = (
            self.timed and not self.on_device and any(m.backward_us for m in profile.modules)
        )
        self.children: list[list[int]] = [[] for _ in self.modules]
        for i, module in enumerate(self.modules):
            if i and 0 <= module.parent < len(self.modules):
                self.children[module.parent].append(i)

    @cached_property
    def shapes(self) -> list[int]:
        """A number per module; equal if class, arguments and everything inside are equal."""
        known: dict[object, int] = {}
        found = [0] * len(self.modules)
        # Deepest first: a shape is made of its children's.
        for i in deepest_first([module.parent for module in self.modules]):
            module = self.modules[i]
            inside = tuple((self.name(child), found[child]) for child in self.children[i])
            found[i] = known.setdefault((module.kind, module.extra, inside), len(known))
        return found

    def total_us(self, index: int) -> float:
        """0 if no time was measured."""
        if not self.timed:
            return 0.0
        if self.on_device:
            return measured(self.account[index].split).total_us
        return self.modules[index].total_us

    def name(self, index: int) -> str:
        """What the parent calls it."""
        module = self.modules[index]
        parent = self.modules[module.parent].path if module.parent >= 0 else ""
        return module.path.removeprefix(f"{parent}.") if parent else module.path

    def select(self, pattern: str) -> list[tuple[int, ...]]:
        """The modules that `layers.3.mlp` or `layers.*.mlp` names, the identical ones together."""
        wanted = pattern.split(".")

        def matches(path: str) -> bool:
            # * does not match the root, which has no name.
            names = path.split(".") if path else []
            return len(names) == len(wanted) and all(map(fnmatchcase, names, wanted))

        exact = [i for i, module in enumerate(self.modules) if module.path == pattern]
        found = exact or [i for i, module in enumerate(self.modules) if matches(module.path)]
        if not found:
            paths = [module.path for module in self.modules if module.path]
            near = get_close_matches(pattern, paths, n=3, cutoff=0.5)
            hint = f"near it: {', '.join(map(clean, near))}; " if near else ""
            raise TorchweldError(
                f"no module {clean(pattern)!r} in this profile; {hint}the tree without --module "
                "shows them all, and * stands for any one name, as in layers.*.mlp"
            )
        together: dict[int, list[int]] = {}
        for i in found:
            together.setdefault(self.shapes[i], []).append(i)
        return [tuple(group) for group in together.values()]

    def inside(self, modules: Sequence[int]) -> frozenset[int]:
        """These modules and all below them."""
        found: set[int] = set()
        pending = list(modules)
        while pending:
            index = pending.pop()
            if index not in found:
                found.add(index)
                pending.extend(self.children[index])
        return frozenset(found)

    # ---- rows ----

    def rows(
        self, tops: Sequence[tuple[int, ...]], order: Order, depth: int | None
    ) -> Iterator[TreeRow]:
        """Lines of the tree below each of `tops`, down to `depth`."""
        pending = [(name, top, 0) for top in reversed(tops) for name in [self._top_name(top)]]
        while pending:
            name, members, level = pending.pop()
            yield self._row(name, members, level)
            if depth is not None and level >= depth:
                continue
            below = self._below(members)
            if below and (own := self._own_row(members, level + 1)) is not None:
                yield own
            if order != "model":
                below.sort(
                    key=lambda item: _KEYS[order](self._row(item[0], item[1], 0)), reverse=True
                )
            pending.extend((*item, level + 1) for item in reversed(below))
        if (0,) in tops and (rest := self._rest_row()) is not None:
            yield rest

    def _top_name(self, members: tuple[int, ...]) -> str:
        if members[0] == 0:
            return ""
        return merged_path([self.modules[i].path for i in members])

    def _below(self, members: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
        """Name and modules of each line one level deeper."""
        found: list[tuple[str, tuple[int, ...]]] = []
        run: list[int] = []

        def close() -> None:
            if run:
                names = [self.name(i) for i in run]
                name = names[0] if len(run) == 1 else f"{names[0]}-{names[-1]}"
                # The k-th child of one member stands where the k-th of the others does.
                places = [self.children[members[0]].index(i) for i in run]
                modules = tuple(self.children[m][place] for m in members for place in places)
                found.append((name, modules))
                run.clear()

        for child in self.children[members[0]]:
            if run and not self._continues(run[-1], child):
                close()
            run.append(child)
        close()
        return found

    def _continues(self, before: int, after: int) -> bool:
        names = self.name(before), self.name(after)
        return (
            all(name.isdecimal() for name in names)
            and int(names[1]) == int(names[0]) + 1
            and self.shapes[before] == self.shapes[after]
        )

    def _row(self, name: str, members: tuple[int, ...], depth: int) -> TreeRow:
        modules = [self.modules[i] for i in members]
        accounts = [self.account[i] for i in members]
        longest = max(range(len(members)), key=lambda k: self.total_us(members[k]))
        return TreeRow(
            name=name,
            kind=modules[0].kind,
            extra=modules[0].extra,
            depth=depth,
            modules=members,
            own=False,
            calls=sum(module.calls for module in modules),
            forward_us=sum(module.forward_us for module in modules),
            backward_us=sum(module.backward_us for module in modules),
            ops=sum(account.launches for account in accounts),
            bound=accounts[longest].bound,
            split=added(measured(account.split) for account in accounts) if self.timed else None,
            total_us=sum(self.total_us(i) for i in members),
        )

    def _own_row(self, members: tuple[int, ...], depth: int) -> TreeRow | None:
        modules = [self.modules[i] for i in members]
        below = [child for i in members for child in self.children[i]]
        split = added(measured(self.account[i].own) for i in members) if self.timed else None
        total_us = 0.0
        if split is not None:
            on_host = sum(module.self_us for module in modules)
            total_us = split.total_us if self.on_device else on_host
        row = TreeRow(
            name="",
            kind="",
            extra="",
            depth=depth,
            modules=members,
            own=True,
            calls=0,
            forward_us=sum(module.self_forward_us for module in modules),
            backward_us=sum(module.self_backward_us for module in modules),
            ops=sum(self.account[i].launches for i in members)
            - sum(self.account[i].launches for i in below),
            bound="",
            split=split,
            total_us=total_us,
        )
        shown = row.total_us >= OWN_SHARE * self.whole_us if self.timed else row.ops > 0
        return row if shown else None

    def _rest_row(self) -> TreeRow | None:
        """What the step takes beyond all modules, so that the lines add up to it."""
        if not self.timed or self.on_device:
            return None
        inside_us = sum(m.total_us for m in self.modules if m.parent < 0)
        rest_us = self.whole_us - inside_us
        if rest_us < OWN_SHARE * self.whole_us:
            return None
        return TreeRow(
            name=BEYOND,
            kind="",
            extra="",
            depth=0,
            modules=(0,),
            own=True,
            calls=0,
            forward_us=0.0,
            backward_us=0.0,
            ops=0,
            bound="",
            split=Split(unexplained_us=rest_us),
            total_us=rest_us,
        )


_KEYS: dict[str, Callable[[TreeRow], float]] = {
    "time": lambda row: row.total_us if row.split is not None else row.ops,
    "waste": lambda row: row.split.waste_us if row.split is not None else row.ops,
    "ops": lambda row: row.ops,
}


def merged_path(paths: Sequence[str]) -> str:
    """One text for several places: what differs between them becomes a star."""
    if len(paths) == 1:
        return paths[0]
    columns = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(names[0] if len(set(names)) == 1 else "*" for names in columns)


# ---- the table ----


def fitting_depth(tree: Tree, tops: Sequence[tuple[int, ...]]) -> int | None:
    """The depth at which the tree is still readable; None if that is all of it."""
    depths = [row.depth for row in tree.rows(tops, "model", None)]
    if len(depths) <= MOST_ROWS:
        return None
    levels = range(1, max(depths) + 1)
    fitting = [level for level in levels if sum(d <= level for d in depths) <= MOST_ROWS]
    return max(fitting, default=1)


def tree_table(tree: Tree, rows: Sequence[TreeRow], width: int = WIDTH) -> Table:
    """Columns beside the model: time, share, calls, ops, what bounds it, what it wastes most."""
    if not tree.timed:
        return _counts_table(tree, rows, width)
    whole_us = tree.whole_us or 1.0
    unit, scale = unit_of(whole_us)
    work = "kern." if tree.on_device else "ops"
    columns = [Column(unit, 5), Column("share", 5), Column("calls", 5, spare=True)]
    if tree.phased:
        columns += [Column("fwd", 5, spare=True), Column("bwd", 5, spare=True)]
    columns += [Column(work, 5), Column("bound by", 9, left=True, spare=True)]
    columns.append(Column("largest waste", 13, left=True))
    sheet = Sheet("module", columns, width, indent=0)
    for row in rows:
        text = label(row, sheet.label_width)
        if not (row.calls or row.ops or row.total_us):
            sheet.add(text, {unit: "–"}, style="dim")
            continue
        part = row.total_us / whole_us
        cells: dict[str, str | Text] = {
            unit: figure(row.total_us / scale),
            "share": percent(part),
            "calls": str(row.calls) if row.calls else "",
            work: str(row.ops),
            "bound by": row.bound if row.ops and row.bound != "unknown" else "",
            "largest waste": waste_cell(row.split, whole_us),
        }
        if row.kind != "Optimizer" and row.name != BEYOND:  # which are neither
            cells["fwd"] = figure(row.forward_us / scale)
            cells["bwd"] = figure(row.backward_us / scale)
        style = "dim" if part < 0.01 else "bold" if part >= 0.1 and not row.own else ""
        sheet.add(text, cells, style)
    return sheet.table


def _counts_table(tree: Tree, rows: Sequence[TreeRow], width: int) -> Table:
    """The tree with what was counted, for a profile without measured times."""
    work = "kern." if tree.on_device else "ops"
    columns = [Column("calls", 5), Column(work, 5), Column("MFLOP", 7), Column("moves", 8)]
    sheet = Sheet("module", columns, width, indent=0)
    for row in rows:
        text = label(row, sheet.label_width)
        if not (row.calls or row.ops):
            sheet.add(text, {"calls": "–"}, style="dim")
            continue
        cells: dict[str, str | Text] = {
            "calls": str(row.calls) if row.calls else "",
            work: str(row.ops),
        }
        if not row.own:
            accounts = [tree.account[i] for i in row.modules]
            cells["MFLOP"] = figure(sum(found.flops for found in accounts) / 1e6)
            cells["moves"] = size(sum(found.moved_bytes for found in accounts))
        sheet.add(text, cells)
    return sheet.table


def waste_cell(given: Split | NotMeasured | None, step_us: float) -> Text:
    if not isinstance(given, Split):
        return Text("")
    split = given.netted
    most = largest_waste(split)
    if most is None or most.of(split) < 0.005 * step_us:
        return Text("")
    return Text(f"{most.brief:<6} {percent(most.of(split) / step_us):>5}", style=most.style)


def label(row: TreeRow, width: int) -> str:
    """A module as print(model) shows it. If it is too long, argument names go first."""
    before = " " * 2 * row.depth
    if row.own:
        return cut(f"{before}· {row.name or 'itself'}", width)
    run = re.fullmatch(r"(\d+)-(\d+)", row.name)
    many = int(run[2]) - int(run[1]) + 1 if run else 1
    before += f"({clean(row.name)}): " if row.name else ""
    before += f"{many} x " if many > 1 else ""
    before += clean(row.kind)
    extra = clean(row.extra)
    if not extra:
        return cut(before, width)
    full = f"{before}({extra})"
    return full if len(full) <= width else cut(f"{before}({brief_arguments(extra)})", width)
