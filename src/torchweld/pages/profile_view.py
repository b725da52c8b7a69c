"""One profile as a page shows it: account, modules, flames, timeline, roofline, memory, findings.

In: a `Profile`, and what became of its modules if a plan tells. Out: a `PageSide`. If the step was
not measured, there is nothing that follows from times: counts and the reason are left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torchweld.core.not_measured import NotMeasured
from torchweld.findings import diagnose
from torchweld.findings.finding import Finding
from torchweld.pages.device_view import device_of
from torchweld.pages.flame_view import device_flame, host_flame
from torchweld.pages.memory_view import memory_of
from torchweld.pages.page_records import Fate, ModuleRow, PageSide
from torchweld.pages.roofline_view import block_points, op_points, roofs_of
from torchweld.pages.timeline_view import timeline_of
from torchweld.profiles.accounting.time_account import Account, account
from torchweld.profiles.accounting.time_splits import PARTS, ModuleAccount, Split
from torchweld.profiles.profile import Module, Profile, deepest_first
from torchweld.profiles.step_faults import StepFaults
from torchweld.profiles.traces.trace_events import without_garbage_collection

Fates = Mapping[str, tuple[Fate, str]]


def side_of(
    profile: Profile,
    name: str = "",
    findings: Sequence[Finding] | None = None,
    fates: Fates | None = None,
) -> PageSide:
    """`findings` are diagnosed unless given; `fates` says by path what became of a module, why."""
    # A large trace has a million small objects here, and none of them in cycles.
    with without_garbage_collection():
        return with_fates(_side(profile, name, findings), fates or {})


def _side(profile: Profile, name: str, findings: Sequence[Finding] | None) -> PageSide:
    found = account(profile)
    faults = profile.faults
    return PageSide(
        name=name,
        about=profile.about,
        step_us=profile.step_us,
        account=found.step,
        explained=found.explained,
        modules=module_rows(profile, found),
        flame=host_flame(profile),
        device_flame=device_flame(profile),
        timeline=timeline_of(profile),
        device=device_of(profile),
        roofs=roofs_of(profile, found),
        points=op_points(profile, found),
        memory=memory_of(profile),
        findings=tuple(diagnose(profile, found) if findings is None else findings),
        faults_per_step=faults.per_step if isinstance(faults, StepFaults) else faults,
        notices=(*profile.notices, *found.notices),
    )


def with_fates(side: PageSide, fates: Fates) -> PageSide:
    """The side with what became of its modules; what lies in a welded one is part of it."""
    told = {r.path: (r.fate, r.why) for r in side.modules if r.fate not in ("", "part")}
    fates = {**told, **fates}
    found: list[tuple[Fate, str]] = [("", "")] * len(side.modules)
    for i in reversed(deepest_first([row.parent for row in side.modules])):
        row = side.modules[i]
        inside = row.parent >= 0 and found[row.parent][0] in ("welded", "part")
        found[i] = fates.get(row.path, ("part" if inside else "", ""))
    decided = zip(side.modules, found, strict=True)
    rows = tuple(replace(row, fate=fate, why=why) for row, (fate, why) in decided)
    side = replace(side, modules=rows)
    points = (*(point for point in side.points if not point.block), *block_points(side))
    return replace(side, points=points)


# ---- modules ----


def module_rows(profile: Profile, found: Account) -> tuple[ModuleRow, ...]:
    """One row for each module of the profile, in its order."""
    on_device = profile.device is not None
    return tuple(
        _row(module, accounted, profile.step_us, on_device)
        for module, accounted in zip(profile.modules, found.modules, strict=True)
    )


def _row(
    module: Module,
    accounted: ModuleAccount,
    step_us: float | NotMeasured,
    on_device: bool,
) -> ModuleRow:
    def timed(us: float) -> float | NotMeasured:
        return step_us if isinstance(step_us, NotMeasured) else round(us, 3)

    whole, own = accounted.split, accounted.own
    time_us, own_us = module.total_us, module.self_us
    if on_device and isinstance(whole, Split) and isinstance(own, Split):
        time_us, own_us = whole.total_us, own.total_us
    return ModuleRow(
        path=module.path,
        kind=module.kind,
        extra=module.extra,
        parent=module.parent,
        calls=module.calls,
        forward_us=timed(module.forward_us),
        backward_us=timed(module.backward_us),
        time_us=timed(time_us),
        own_us=timed(own_us),
        launches=accounted.launches,
        flops=accounted.flops,
        moved_bytes=accounted.moved_bytes,
        round_trip_bytes=accounted.round_trip_bytes,
        roofline_us=round(accounted.roofline_us, 3),
        bound=accounted.bound,
        split=_rounded(accounted.split),
    )


def _rounded(split: Split | NotMeasured) -> Split | NotMeasured:
    """Each part to 1 ns; the total is the sum of the parts, so it may be off by 4."""
    if isinstance(split, NotMeasured):
        return split
    return Split(**{part: round(getattr(split, part), 3) for part in PARTS})
