"""Kept runs as text: the list of them, one with its cells, two side by side.

In: runs of the history. Out: `rich` renderables for a terminal, and plain data for `--json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from torchweld.core.number_text import counted, figure, listed
from torchweld.core.records import to_plain
from torchweld.core.safe_text import clean
from torchweld.history.kept_records import holds_record
from torchweld.history.kept_runs import Damaged, Run
from torchweld.history.run_comparison import RunsCompared, figures_of, unmeasured_of
from torchweld.history.run_lookup import reference_of
from torchweld.report.text_style import Column, Sheet, cut, heading, indented

# How many names are listed of cells that are in only one run.
MOST_NAMES = 8


def run_list(runs: Sequence[Run | Damaged], width: int) -> Iterator[RenderableType]:
    """All runs, the newest first, each under the name by which it is found again."""
    if not runs:
        yield Text("no run was kept yet; --save NAME keeps one")
        return
    columns = [
        Column("kind", 7, left=True),
        Column("when, UTC", 16, left=True),
        Column("machine", 12, left=True, spare=True),
        Column("commit", 8, left=True, spare=True),
        Column("", 10, left=True),
    ]
    sheet = Sheet("run", columns, width, indent=0)
    seen: dict[str, int] = {}
    for run in runs:
        back = seen.get(run.name, 0)
        seen[run.name] = back + 1
        if isinstance(run, Damaged):
            sheet.add(cut(reference_of(run.name, back), sheet.label_width), {"": "damaged"})
            continue
        label = f"{reference_of(run.name, back)}  {clean(run.what)}"
        sheet.add(
            cut(label, sheet.label_width),
            {
                "kind": run.kind,
                "when, UTC": run.created[:16].replace("T", " "),
                "machine": run.fingerprint.key,
                "commit": (run.fingerprint.commit or "")[:8],
                "": "" if run.finished else "unfinished",
            },
        )
    yield sheet.table
    damaged = [run for run in runs if isinstance(run, Damaged)]
    for one in damaged:
        said = f"run {one.id} of {one.name} is damaged: {one.problem}"
        yield Text(clean(said), style="yellow")
    if damaged:
        yield Text("torchweld history forget deletes all runs of a name", style="yellow")


def run_sections(run: Run, width: int) -> Iterator[RenderableType]:
    """One run: where it was measured, and every cell with its figures."""
    state = "" if run.finished else ", unfinished: it was interrupted"
    yield heading(clean(f"{run.name}: {run.kind} of {run.what}"), f"{run.created[:19]}{state}")
    here = run.fingerprint
    threads = counted(here.threads, "thread")
    yield indented(f"{here.cpu}, {here.isa}, {threads}, torch {here.torch}, machine {here.key}")
    versions = [f"{name} {version}" for name, version in here.versions.items()]
    built = [f"torchweld {here.torchweld}", f"kernels {here.kernels or 'none'}", *versions]
    yield indented(", ".join([*built, f"commit {(here.commit or 'none')[:12]}"]))
    given = settings_text(run)
    if given:
        yield indented(cut(clean(f"settings: {given}"), width - 2))
    yield Text()
    sheet = Sheet("cell", [Column("figure", 32, left=True), Column("median", 10)], width)
    for cell in run.cells:
        if holds_record(cell):
            continue
        label = cut(clean(cell.cell), sheet.label_width - 2)
        for one in figures_of(cell) or (None,):
            cells = {}
            if one is not None:
                cells = {"figure": cut(clean(one.label), 32), "median": figure(one.value)}
            sheet.add(f"  {label}", cells)
            label = ""
    yield sheet.table
    for reason, names in unmeasured_of(run).items():
        said = f"not measured: {listed(names, MOST_NAMES)}: {reason}"
        yield Text(clean(said), style="yellow")


def settings_text(run: Run) -> str:
    """What a run was asked for: `blocks none, rows 1,32`."""
    return ", ".join(
        f"{name} {(','.join(map(str, value)) or 'none') if isinstance(value, list) else value}"
        for name, value in run.settings.items()
    )


def compared_sections(found: RunsCompared, width: int) -> Iterator[RenderableType]:
    """Two runs: ratios, above 1 if B is better; none if they come from different machines."""
    for label, run in (("A", found.a), ("B", found.b)):
        state = "" if run.finished else ", unfinished"
        yield Text(clean(f"{label}: {run.name}, {run.what}, {run.created[:19]}{state}"))
    if found.differences or not found.comparable:
        said = "; ".join(found.differences) or "the machine"
        yield Text(f"fingerprints differ: {clean(said)}", style="yellow")
    if not found.comparable:
        yield Text("so the figures are not compared; measure both on one machine, set up alike")
        return
    if found.rows:
        yield Text()
        yield _compared_table(found, width)
    for label, names in (("A", found.only_a), ("B", found.only_b)):
        if names:
            yield Text(clean(f"only in {label}: {listed(names, MOST_NAMES)}"))
    if found.rows:
        yield Text("measured at different times: no intervals, small ratios may be noise")
    else:
        yield Text("no cell of one name has figures in both")


def _compared_table(found: RunsCompared, width: int) -> RenderableType:
    columns = [
        Column("figure", 28, left=True),
        Column("A", 9),
        Column("B", 9),
        Column("B is", 13),
    ]
    sheet = Sheet("cell", columns, width, indent=0)
    before = None
    for row in found.rows:
        label = "" if row.cell == before else cut(clean(row.cell), sheet.label_width)
        before = row.cell
        sheet.add(
            label,
            {
                "figure": cut(clean(row.figure), 28),
                "A": figure(row.a),
                "B": figure(row.b),
                "B is": _better(row.ratio, row.kind),
            },
        )
    return sheet.table


def _better(ratio: float, kind: str) -> str:
    good, bad = ("faster", "slower") if kind == "time" else ("more", "less")
    return f"{ratio:.2f}x {good}" if ratio >= 1 else f"{1 / max(ratio, 1e-300):.2f}x {bad}"


# ---- --json ----


def run_data(run: Run | Damaged, cells: bool = True) -> dict[str, Any]:
    """All that was kept of a run; `cells=False` leaves out what was measured."""
    if isinstance(run, Damaged):
        return {"id": run.id, "name": run.name, "damaged": run.problem}
    data = {
        "id": run.id,
        "name": run.name,
        "kind": run.kind,
        "what": run.what,
        "created": run.created,
        "finished": run.finished,
        "fingerprint": to_plain(run.fingerprint),
        "settings": run.settings,
        "summary": run.summary,
    }
    if cells:
        # `to_plain`: samples may hold NaN, for which JSON has no number.
        data["cells"] = [to_plain(cell, all_fields=True) for cell in run.cells]
    return data


def compared_data(found: RunsCompared) -> dict[str, Any]:
    return {
        "a": run_data(found.a, cells=False),
        "b": run_data(found.b, cells=False),
        "comparable": found.comparable,
        "differences": list(found.differences),
        "rows": [{**to_plain(row), "ratio": row.ratio} for row in found.rows],
        "only_a": list(found.only_a),
        "only_b": list(found.only_b),
    }
