"""The outcome of a gate as lines of text, and as plain data for `--json`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torchweld.core.module_paths import grouped_paths
from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import counted, signed, size
from torchweld.core.records import to_plain
from torchweld.gates.gate_baseline import Baseline
from torchweld.gates.gate_outcome import CounterChange, LostBlock, Outcome, TimeVerdict
from torchweld.gates.held_blocks import held_by, unheld_lines
from torchweld.gates.step_counters import NAMES

WORDS = {0: "passed", 1: "FAILED", 2: "not measured"}


def outcome_lines(found: Outcome) -> Iterator[str]:
    """What changed, by how much, where, and what to do about it."""
    yield f"gate {found.baseline}, {found.what}: {WORDS[found.code]}"
    yield from _counter_lines(found)
    for one in found.times:
        yield _time_line(one)
    for note in found.notes:
        yield f"note: {note}"
    if found.code == 1:
        yield "to accept this as the new baseline:"
        yield f"  {found.accept_command}"
    elif found.improved or found.welded[1] > found.welded[0]:
        yield "better than the baseline; to hold the model to that from now on:"
        yield f"  {found.accept_command}"


def _counter_lines(found: Outcome) -> Iterator[str]:
    before, after = found.welded
    if not found.changes and not found.lost and before == after:
        yield f"counters: as in the baseline, {counted(after, 'block')} welded"
        return
    yield f"counters of a step (baseline of {found.accepted[:16].replace('T', ' ')} UTC):"
    if found.lost or before != after:
        mark = "worse" if found.lost else "better"
        yield f"  blocks welded: {before} → {after}, {mark}"
        for why, paths in _by_reason(found.lost).items():
            yield f"    {_names(paths)} is not fused: {why}"
    for counter in NAMES:
        of_it = [change for change in found.changes if change.counter == counter]
        step = [change for change in of_it if not change.module]
        inside = [change for change in of_it if change.module]
        yield from (f"  {counter}: {_change(change)}" for change in step)
        if inside and not step:
            yield f"  {counter}: total unchanged, but moved between modules"
        if any(change.worse for change in step) and not inside:
            yield "    in the model's own forward, outside its modules"
        yield from (f"    in {line}" for line in _alike(inside))


def _by_reason(lost: Sequence[LostBlock]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in lost:
        found.setdefault(one.why, []).append(one.path)
    return found


def _alike(changes: Sequence[CounterChange]) -> Iterator[str]:
    """Modules that changed alike in one line: `layers.*.mlp`."""
    groups: dict[tuple[int, int], list[CounterChange]] = {}
    for change in changes:
        groups.setdefault((change.before, change.after), []).append(change)
    for same in groups.values():
        yield f"{_names([change.module for change in same])}: {_change(same[0])}"


def _names(paths: Sequence[str]) -> str:
    return ", ".join(name or "the model" for name in grouped_paths(paths))


def _change(change: CounterChange) -> str:
    shown = size if change.counter == "bytes moved" else lambda count: f"{count:.0f}"
    by = signed(shown(change.after - change.before).replace("-", "−"))
    mark = "worse" if change.worse else "better"
    return f"{shown(change.before)} → {shown(change.after)} ({by}), {mark}"


def _time_line(one: TimeVerdict) -> str:
    head = f"wall time, {one.workload}: {one.verdict}"
    if one.verdict == "not measured":
        help_ = f"; what would help: {'; '.join(one.remedies)}" if one.remedies else ""
        return f"{head}: {one.reason}{help_}"
    figures = f"{_speedup(one.speedup, one.interval)} times the speed of {one.against}"
    if one.baseline_speedup is not None and one.baseline_interval is not None:
        figures += f", in the baseline {_speedup(one.baseline_speedup, one.baseline_interval)}"
    noise = "" if isinstance(one.noise, NotMeasured) else f"; noise floor {one.noise:.1%}"
    return f"{head}: {figures}: {one.reason}{noise}"


def _speedup(speedup: float | NotMeasured, interval: tuple[float, float] | NotMeasured) -> str:
    if isinstance(speedup, NotMeasured) or isinstance(interval, NotMeasured):
        return str(speedup if isinstance(speedup, NotMeasured) else interval)
    low, high = interval
    return f"{speedup:.3f} ({low:.3f}–{high:.3f})"


def accepted_lines(name: str, what: str, found: Baseline, path: str) -> Iterator[str]:
    """What a new baseline holds."""
    held = held_by(found.plan, found.counters)
    welded, *others = [f"{counted(len(held.welded), 'block')} welded", *unheld_lines(held)]
    if held.unmeasured or held.unknown:
        welded, *others = f"{welded}; {others[0]}", *others[1:]
    yield f"accepted {name}, {what}: {welded}"
    yield from (f"  {line}" for line in others)
    figures = [f"{counter} {_figure(counter, found)}" for counter in NAMES]
    yield f"counters of a step: {', '.join(figures)}"
    for kept in found.times:
        figure = _speedup(kept.speedup, kept.interval)
        yield (
            f"wall time, {kept.workload}: {figure} times the speed of the model with welding "
            f"disabled; noise floor {kept.noise:.1%}"
        )
    if not found.times:
        yield "no wall time: a gate compares counters alone"
    yield f"kept in {path}"


def _figure(counter: str, found: Baseline) -> str:
    count = found.counters.step(counter)
    return size(count) if counter == "bytes moved" else f"{count:,}"


def outcome_data(found: Outcome) -> dict[str, Any]:
    data = to_plain(found, all_fields=True)
    for change, plain in zip(found.changes, data["changes"], strict=True):
        plain["worse"] = change.worse
    return {"verdict": WORDS[found.code].lower(), "code": found.code, **data}


def accepted_data(name: str, what: str, found: Baseline) -> dict[str, Any]:
    held = held_by(found.plan, found.counters)
    return {
        "baseline": name,
        "what": what,
        "blocks": list(held.blocks),
        "welded": list(held.welded),
        "unmeasured": held.unmeasured,
        "unknown": held.unknown,
        "partly_unmeasured": held.partly,
        "counters": {counter: found.counters.step(counter) for counter in NAMES},
        "times": [
            {
                "workload": kept.workload,
                "speedup": kept.speedup,
                "interval": list(kept.interval),
                "noise": kept.noise,
            }
            for kept in found.times
        ],
    }
