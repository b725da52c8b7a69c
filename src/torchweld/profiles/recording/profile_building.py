"""Builds a `Profile` from recordings of a step. Used by `tw.profile` and by `tw.profiling`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from torchweld.core.passing_exceptions import is_interrupt
from torchweld.machine.device_waiting import wait_for_all_gpus
from torchweld.machine.page_faults import allocator, fault_cost
from torchweld.profiles.accounting.device_account import device_account, with_kernels
from torchweld.profiles.accounting.memory_account import memory_account
from torchweld.profiles.attributing.attribution import Costs, ModulePlace, attribute, signature
from torchweld.profiles.profile import About, Compilation, Profile, Timing
from torchweld.profiles.profile_doubts import doubt
from torchweld.profiles.recorded_events import MODULE, Recording
from torchweld.profiles.recording.module_instrument import Roots, is_compiled, places
from torchweld.profiles.recording.pricing_machine import this_machine
from torchweld.profiles.recording.profiler_overhead import (
    Round,
    calibrate,
    calmest,
    count_events,
    measure_loop,
    step_us,
    undisturbed,
)
from torchweld.profiles.recording.time_checks import (
    TOLERATED_ERROR,
    around_us,
    checks_of,
    checks_of_loop,
    complaint,
    surely_off,
)
from torchweld.profiles.recording.torch_profiler import has_cuda
from torchweld.profiles.step_faults import faults_of
from torchweld.timing.core_waiting import TOLERATED

# Below this, the clock around a module adds noticeably to the time that it shows.
CHECKED_FROM_US = 50.0


@dataclass(kw_only=True)
class Samples:
    """What was measured of the same step."""

    first_us: float = 0.0
    rounds: list[Round] = field(default_factory=list)  # to calibrate on
    held_out: list[Round] = field(default_factory=list)  # to check on
    # Steps that were only timed, to check on if no rounds were held out.
    unprofiled_us: list[float] = field(default_factory=list)
    full: Recording | None = None  # with shapes and memory; its times are not used
    compilation: Compilation | None = None
    load: str = ""  # what else kept the machine busy when it began
    notices: list[str] = field(default_factory=list)


def describe(roots: Roots) -> list[ModulePlace]:
    """The modules' places in the order of print(model), the root first."""
    found: dict[str, ModulePlace] = {}
    for module, paths in places(roots).items():
        for path in paths:
            found[path] = ModulePlace(
                path=path,
                kind=type(getattr(module, "_orig_mod", module)).__name__,
                extra=_extra(module),
                parameters=sum(p.numel() for p in module._parameters.values() if p is not None),
                compiled=is_compiled(module),
            )
    return _in_print_order(list(found.values()))


def _in_print_order(given: list[ModulePlace]) -> list[ModulePlace]:
    order = {place.path: i for i, place in enumerate(given)}

    def key(place: ModulePlace) -> tuple[int, ...]:
        parts = place.path.split(".") if place.path else []
        ahead = [".".join(parts[: i + 1]) for i in range(len(parts))]
        return tuple(order.get(path, -1) for path in ahead)

    return sorted(given, key=key)


def _extra(module: nn.Module) -> str:
    try:
        lines = module.extra_repr().splitlines()
    except Exception as error:  # the user's code, for display only
        if is_interrupt(error):
            raise
        return ""
    return lines[0] if lines else ""


def build(
    samples: Samples, roots: Roots, *, what: str, inputs: str = "", training: bool = False
) -> Profile:
    """Calibrates, corrects, attributes, and puts it all together."""
    assert samples.full is not None
    notices = [*samples.notices, *samples.full.notices]
    taken = [*samples.rounds, *samples.held_out]
    disturbed = sum(r.lost > TOLERATED for r in taken)
    # If all held-out rounds were disturbed, only the calibrating ones are used.
    kept = calmest(samples.rounds), calmest(samples.held_out)
    calibrating, held_out = _undisturbed(kept[0]), _undisturbed(kept[1])
    rounds = calmest([*calibrating, *held_out])
    wall_us = statistics.median(r.plain_us for r in rounds)
    loop = measure_loop()
    costs = calibrate(loop.costs, calibrating)
    ops, modules = count_events(samples.full)
    cost_us = costs.op_us * ops + costs.module_us * modules

    shape = signature(samples.full)
    timed = [r.recording for r in rounds if signature(r.recording) == shape]
    if timed:
        raw_us = statistics.median(step_us(recording) for recording in timed)
    else:
        notices.append(
            "no two steps ran the same ops, so the times are those of one step, recorded with "
            "shapes and memory, and are less precise"
        )
        raw_us = step_us(samples.full)
        scale = max(0.0, raw_us - wall_us) / cost_us if cost_us > 0 else 1.0
        costs = Costs(op_us=scale * costs.op_us, module_us=scale * costs.module_us)
    found = attribute(samples.full, describe(roots), timed, costs)
    device = device_account(samples.full, found.op_of)

    checks = checks_of(kept[1], costs) or checks_of_loop(calibrating, samples.unprofiled_us, costs)
    off_surely = surely_off([*kept[0], *kept[1]], costs)
    corrected_us = sum(module.self_us for module in found.modules)
    unmeasured = doubt(wall_us, corrected_us, statistics.median(r.lost for r in rounds))
    off = corrected_us / wall_us - 1 if wall_us > 0 else 0.0
    if unmeasured is None and abs(off) > TOLERATED_ERROR:
        notices.append(
            f"profiled steps, the profiler's cost taken away, are {100 * off:+.0f} % off those "
            "without it, and so are all times; the machine may have been busy"
        )
    if unmeasured is None:
        notices += filter(None, map(complaint, checks))
    # If both agree within their noise, the time of the steps whose ops are accounted for. Also if
    # these took longer, since their parts have to add up to the whole.
    accounted = timed and (not off_surely or corrected_us > wall_us)
    known_us = corrected_us if accounted else wall_us
    machine = this_machine(notices)
    calm = [r.faults for r in taken if r.lost <= TOLERATED]
    return Profile(
        about=About(
            source="live",
            what=what,
            inputs=inputs,
            training=training or any(op.phase == "backward" for op in found.ops),
            torch=machine.torch,
            cpu=machine.cpu,
            threads=machine.threads,
            fingerprint=machine.fingerprint,
            load=samples.load,
        ),
        step_us=known_us if unmeasured is None else unmeasured,
        modules=tuple(found.modules),
        ops=with_kernels(found.ops, device),
        timing=Timing(
            wall_us=wall_us,
            raw_us=raw_us,
            corrected_us=corrected_us,
            first_us=samples.first_us,
            events=ops + modules,
            op_cost_us=costs.op_us,
            module_cost_us=costs.module_us,
            steps=len(timed) or 1,
            checks=checks,
            around_us=around_us(kept[1]),
            rounds=len(taken),
            disturbed=disturbed,
        ),
        device=device,
        memory=memory_account(samples.full, found),
        compilation=samples.compilation,
        peaks=machine.peaks,
        op_cost_us=machine.op_cost_us,
        fused_call_us=machine.fused_call_us,
        faults=faults_of([r.faults for r in taken], calm, fault_cost(), allocator()),
        notices=tuple(notices),
    )


def _undisturbed(rounds: Sequence[Round]) -> list[Round]:
    if len(rounds) < 3:
        return list(rounds)
    sides = zip(*(r.sides for r in rounds), strict=True)
    return [rounds[i] for i in undisturbed(*sides)]


def heaviest_modules(recordings: Sequence[Recording], allowed: set[str], count: int) -> list[str]:
    """Paths of modules whose calls took longest, of different depths: the ones worth checking."""
    spent: dict[str, list[float]] = {}
    for recording in recordings:
        inside: dict[str, float] = {}
        for event in recording.events:
            if event.kind == MODULE and event.name in allowed:
                inside[event.name] = inside.get(event.name, 0.0) + event.duration_us
        for path, us in inside.items():
            spent.setdefault(path, []).append(us)
    usual = {path: statistics.median(times) for path, times in spent.items()}
    usual = {path: us for path, us in usual.items() if us >= CHECKED_FROM_US}
    chosen: dict[int, str] = {}
    for path in sorted(usual, key=lambda path: -usual[path]):
        depth = path.count(".") + 1 if path else 0
        chosen.setdefault(depth, path)
    return list(chosen.values())[:count]


def cuda_wait() -> None:
    """A step has ended when its kernels have."""
    if has_cuda():
        wait_for_all_gpus()
