"""`--save NAME`: keeps what a command measured in the history, which is opened before the work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchweld.core.errors import TorchweldError
from torchweld.core.measured_speed import Speed
from torchweld.core.not_measured import NotMeasured
from torchweld.core.records import to_plain
from torchweld.gates.gate_baseline import TIME
from torchweld.gates.gate_outcome import Outcome
from torchweld.history import History, Run, of_comparison
from torchweld.history.history_store import check_name
from torchweld.history.kept_records import cell_of, packed
from torchweld.plans.plan import Whole
from torchweld.plans.planner import PlanWithRounds
from torchweld.profiles.accounting.time_splits import Account, Split
from torchweld.profiles.profile import Profile
from torchweld.report.gate_text import WORDS


@contextmanager
def keeping(name: str | None, file: Path | None) -> Iterator[History | None]:
    """The history to keep a run in, if it has a name. A file that cannot be used fails here."""
    if name is None:
        if file is not None:
            raise TorchweldError(
                f"--history {file} is where --save NAME keeps a run; add --save NAME, or leave out "
                "--history"
            )
        yield None
        return
    check_name(name)
    with History.open(file, create=True) as history:
        yield history


def keep_plan(
    history: History, name: str, what: str, settings: dict[str, Any], made: PlanWithRounds
) -> None:
    """The plan as data, and a cell for every workload, with its rounds if it was timed."""
    run = history.begin(name, "fuse", what, settings)
    for one in made.wholes:
        samples = None if one.comparison is None else of_comparison(one.comparison)[1]
        run.add(one.whole.workload, _figures_of(one.whole), samples)
    run.add("plan", {"plan": to_plain(made.plan)})
    run.finish({"welded": len(made.plan.decisions), "found": len(made.plan.planned)})


def kept_runs_of(history: History, what: str) -> list[Run]:
    """All runs of the same thing, with their cells: they can be used when the file is closed."""
    found = [one for one in history.entries() if isinstance(one, Run) and one.what == what]
    for run in found:
        _ = run.cells
    return found


def keep_outcome(history: History, name: str, settings: dict[str, Any], found: Outcome) -> None:
    """What a gate found: its verdict, and a cell for the time of every workload."""
    run = history.begin(name, "check", found.what, settings)
    for one in found.times:
        run.add(f"{TIME}{one.workload}", to_plain(one))
    run.finish({"verdict": WORDS[found.code].lower(), "baseline": found.baseline})


def _figures_of(whole: Whole) -> dict[str, Any]:
    """The figures on one level, so that speed-up and times are found by their names."""
    data: dict[str, Any] = to_plain(whole)
    speed = data.pop("speed")
    return {**data, **(speed if isinstance(whole.speed, Speed) else {"speed": speed})}


def keep_profile(
    history: History, name: str, what: str, settings: dict[str, Any], found: Profile, made: Account
) -> None:
    """A cell for the step and one for every module: time, launches, bytes, and its account.

    If the step was not measured: only counts, and why. The last cell has the profile itself.
    """
    run = history.begin(name, "profile", what, settings)
    why = found.step_us if isinstance(found.step_us, NotMeasured) else None
    step = {"step_us": found.step_us, "account": _parts(made.step)}
    run.add("step", step if why is None else to_plain({"time": why}))
    for module, own in zip(found.modules, made.modules, strict=True):
        data = {
            "kind": module.kind,
            "calls": module.calls,
            "total_us": module.total_us,
            "self_us": module.self_us,
            "launches": own.launches,
            "flops": own.flops,
            "moved_bytes": own.moved_bytes,
            "round_trip_bytes": own.round_trip_bytes,
            "bound": own.bound,
            "account": _parts(own.split),
        }
        if why is not None:
            data = {name: data[name] for name in _COUNTS}
        run.add(module.path or "the model", data)
    run.add(cell_of(Profile), packed(found))
    run.finish({"explained": to_plain(made.explained)})


_COUNTS = ("kind", "calls", "launches", "flops", "moved_bytes", "round_trip_bytes")


def _parts(split: Split | NotMeasured) -> dict[str, float]:
    """µs by part: `arithmetic`, `traffic`, …; none if they were not measured."""
    if isinstance(split, NotMeasured):
        return {}
    parts = to_plain(split, all_fields=True)
    return {part.removesuffix("_us"): value for part, value in parts.items()}
