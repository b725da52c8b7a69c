"""The baseline of a gate in the history: a plan, counters and times, under a name.

Kept as a run of kind "gate": a cell for the plan, one for the counters and one for every comparison
of wall time, with its raw samples. `what` is the target with its inputs, so one name can hold the
baselines of several models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchweld.core.errors import TorchweldError
from torchweld.core.records import RecordError, from_plain, to_plain
from torchweld.core.typed_names import known
from torchweld.gates.gate_timing import KeptTime
from torchweld.gates.step_counters import Counters
from torchweld.history import Fingerprint, History, Run, of_comparison
from torchweld.history.kept_runs import Damaged
from torchweld.history.kept_samples import to_comparison
from torchweld.plans.plan import Plan
from torchweld.timing import Comparison

PLAN, COUNTERS, TIME = "plan", "counters", "time of "


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What was accepted; `times` is empty if it was accepted without times."""

    plan: Plan
    counters: Counters
    times: tuple[KeptTime, ...] = ()
    fingerprint: Fingerprint | None = None  # set when it is read
    created: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def time(self, workload: str) -> KeptTime | None:
        return next((one for one in self.times if one.workload == workload), None)


def save_baseline(
    history: History, name: str, what: str, baseline: Baseline, settings: dict[str, Any]
) -> None:
    """Saves a baseline. If interrupted, the previous one stays in force."""
    run = history.begin(name, "gate", what, settings)
    run.add(PLAN, to_plain(baseline.plan))
    run.add(COUNTERS, to_plain(baseline.counters))
    for kept in baseline.times:
        for number, one in enumerate(kept.comparisons, start=1):
            data, samples = of_comparison(one)
            run.add(
                f"{TIME}{kept.workload} ({number})", {"workload": kept.workload, **data}, samples
            )
    run.finish({"blocks welded": len(baseline.counters.welded)})


def load_baseline(history: History, name: str, what: str, command: str) -> Baseline:
    """The newest complete one; `command` makes it, for the message where there is none."""
    runs = [run for run in history.entries(kind="gate") if run.finished]
    names = sorted({run.name for run in runs})
    remedy = f"this makes it: {command}"
    if not names:
        raise TorchweldError(f"there is no baseline {name!r} in {history.path}; {remedy}")
    try:
        known(name, names, "baseline")
    except TorchweldError as error:
        raise TorchweldError(f"{error}; {remedy}") from None
    there = [run for run in runs if run.name == name]
    found = next((run for run in there if isinstance(run, Damaged) or run.what == what), None)
    if isinstance(found, Damaged):  # this damaged run may be the baseline; an older one is not
        raise TorchweldError(f"{history.damaged(found)}; {remedy}")
    if found is None:
        listed = ", ".join(sorted({repr(run.what) for run in there if isinstance(run, Run)}))
        raise TorchweldError(f"the baseline {name!r} has no {what!r}, but {listed}; {remedy}")
    try:
        return _read(found)
    except TorchweldError as error:
        raise TorchweldError(
            f"the baseline {name!r} in {history.path} cannot be read by this torchweld: {error}; "
            f"{remedy}"
        ) from error


def _read(run: Run) -> Baseline:
    plan, counters = run.cell(PLAN), run.cell(COUNTERS)
    if plan is None or counters is None:
        raise RecordError("its plan or its counters are missing")
    times: dict[str, list[Comparison]] = {}
    for cell in run.cells:
        if cell.cell.startswith(TIME):
            data = dict(cell.data)
            workload = data.pop("workload", None)
            if not isinstance(workload, str):
                raise RecordError(f"the time {cell.cell!r} does not say of which workload it is")
            times.setdefault(workload, []).append(to_comparison(data, cell.samples))
    kept = tuple(KeptTime(workload=name, comparisons=tuple(all_)) for name, all_ in times.items())
    for one in kept:
        for problem in one.problems():
            raise RecordError(f"the time of {one.workload} {problem}")
    return Baseline(
        # The first histories kept plans without their mark.
        plan=Plan.from_dict({**Plan.FORMAT.mark(1), **plan.data}),
        counters=from_plain(Counters, counters.data, "counters"),
        times=kept,
        fingerprint=run.fingerprint,
        created=run.created,
        settings=dict(run.settings),
    )
