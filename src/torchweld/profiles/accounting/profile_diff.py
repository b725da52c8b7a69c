"""`tw.diff`: what changed between two profiles, module by module.

In: two `Profile`s. Out: a `Diff`, plain data that saves to JSON. Modules are matched by their path.
If fusion, compilation or wrapping made modules appear or vanish, their work is compared at the
nearest module around them that ran on both sides. Layers that changed alike are one line:
`layers.*.mlp`.

Times of different machines, set-ups or workloads are not compared: `not_comparable` says why, and
counts are compared nevertheless.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torchweld.core.argument_checks import check_kind
from torchweld.core.html_shown import ShownInNotebooks
from torchweld.core.module_paths import by_pattern, grouped_paths, joined, normal_path, pattern_of
from torchweld.core.not_measured import NotMeasured
from torchweld.core.record_fields import Positive
from torchweld.core.record_format import RecordFormat
from torchweld.core.saved_records import SavedRecord
from torchweld.profiles.accounting.aligned_paths import below_prefix, common_prefixes
from torchweld.profiles.accounting.memory_traffic import round_trips_of
from torchweld.profiles.accounting.op_costs import works_of
from torchweld.profiles.accounting.time_account import Account, account
from torchweld.profiles.profile import About, Profile
from torchweld.profiles.step_faults import StepFaults

# Fewer page faults more or less are a matter of chance; these are 1 MB of the usual pages.
NOTED_FAULTS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """What some modules do in one step."""

    launches: int = 0  # kernels; without a device, ops that do work
    round_trips: int = 0  # values that one op wrote and another read back, each once
    round_trip_bytes: int = 0
    time_us: float = 0.0  # of the host: forward and backward, corrected
    device_us: float = 0.0  # of the kernels it launched

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            launches=self.launches + other.launches,
            round_trips=self.round_trips + other.round_trips,
            round_trip_bytes=self.round_trip_bytes + other.round_trip_bytes,
            time_us=self.time_us + other.time_us,
            device_us=self.device_us + other.device_us,
        )


NOTHING = Amount()


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Modules that changed alike, before and after: `modules` of them, with equal launches each."""

    path: str  # "layers.*.mlp"; "" for the model
    modules: Positive
    kinds: tuple[str, str]  # class names before and after
    own: bool  # only what is in none of the modules that have their own lines
    before: Amount
    after: Amount

    @property
    def saved_us(self) -> float:
        """Time of the host; negative if it takes longer now."""
        return self.before.time_us - self.after.time_us

    @property
    def saved_device_us(self) -> float:
        return self.before.device_us - self.after.device_us


@dataclass(frozen=True, kw_only=True)
class Diff(ShownInNotebooks, SavedRecord):
    """Two profiles side by side. All amounts are for one step.

    `changes` holds every module that did anything, what changed most first; together they are the
    whole step. `only_a` and `only_b` are paths of modules that ran on one side alone: what they
    did is in the change of the nearest module around them.
    """

    FORMAT = RecordFormat(what="diff", version=1, remedy="take it again")

    a: About
    b: About
    not_comparable: tuple[str, ...]  # why times cannot be compared; empty if they can
    on_device: bool  # both have a device, whose time decides the order
    step_us: tuple[float | NotMeasured, float | NotMeasured]
    step: Change
    changes: tuple[Change, ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def speedup(self) -> float | None:
        """Step time of a over that of b; None if it was not measured."""
        one, two = self.step_us
        if self.not_comparable or isinstance(one, NotMeasured) or isinstance(two, NotMeasured):
            return None
        return one / two if one > 0 and two > 0 else None


def diff(a: Profile, b: Profile) -> Diff:
    """What changed from profile `a` to profile `b`."""
    for name, profile in (("a", a), ("b", b)):
        check_kind("diff", name, profile, Profile, "tw.profile and tw.read_trace return one")
    sides = _Side(a), _Side(b)
    prefixes = common_prefixes(*((side.normal, side.normal_ran) for side in sides))
    sides[0].prefix, sides[1].prefix = prefixes
    shared = sides[0].ran & sides[1].ran | {""}
    amounts = [side.amounts(shared) for side in sides]
    on_device = a.device is not None and b.device is not None
    kinds = [side.kinds() for side in sides]
    outer = _ancestors(shared)
    changes = [
        Change(
            path=path,
            modules=1,
            kinds=(kinds[0].get(path, ""), kinds[1].get(path, "")),
            own=path in outer,
            before=amounts[0].get(path, NOTHING),
            after=amounts[1].get(path, NOTHING),
        )
        for path in sides[0].ordered(shared)
    ]
    reasons = not_comparable(a, b)
    whole = Change(
        path="",
        modules=1,
        kinds=(kinds[0][""], kinds[1][""]),
        own=False,
        before=_sum(change.before for change in changes),
        after=_sum(change.after for change in changes),
    )
    everything = sides[0].ran | sides[1].ran | {""}
    merged = [c for c in _merge(changes, everything) if c.before != NOTHING or c.after != NOTHING]
    return Diff(
        a=a.about,
        b=b.about,
        not_comparable=reasons,
        on_device=on_device,
        step_us=(_one_step(a), _one_step(b)),
        step=whole,
        changes=tuple(sorted(merged, key=lambda c: _weight(c, not reasons, on_device))),
        only_a=tuple(grouped_paths(sides[0].only(shared), everything)),
        only_b=tuple(grouped_paths(sides[1].only(shared), everything)),
        notes=_notes(a, b),
    )


def _one_step(profile: Profile) -> float | NotMeasured:
    us = profile.step_us
    return us if isinstance(us, NotMeasured) else us / max(profile.about.steps, 1)


def _sum(amounts: Iterable[Amount]) -> Amount:
    return sum(amounts, start=NOTHING)


def _ancestors(paths: Iterable[str]) -> set[str]:
    """Every path that one of `paths` lies below."""
    found = {""}
    for path in paths:
        while path := path.rpartition(".")[0]:
            found.add(path)
    return found


def _weight(change: Change, timed: bool, on_device: bool) -> tuple[float, ...]:
    """Sorts what changed most first."""
    before, after = change.before, change.after
    times = [-abs(change.saved_us)]
    if on_device:
        times.insert(0, -abs(change.saved_device_us))
    counts = (
        -abs(before.launches - after.launches),
        -abs(before.round_trip_bytes - after.round_trip_bytes),
    )
    return (*times, *counts) if timed else counts


# ---- whether times may be compared ----


def not_comparable(a: Profile, b: Profile) -> tuple[str, ...]:
    """Reasons why a difference in time would not be the model's."""
    devices = [p.device.name if p.device is not None else "none" for p in (a, b)]
    return why_not_comparable((a.about, b.about), (a.step_us, b.step_us), devices)


def why_not_comparable(
    abouts: tuple[About, About],
    steps_us: tuple[float | NotMeasured, float | NotMeasured],
    devices: Sequence[str] = ("none", "none"),
    names: tuple[str, str] = ("a", "b"),
) -> tuple[str, ...]:
    """The same for what is known of two profiles: where they come from, and their steps."""
    one, two = abouts
    found = [
        f"{name} was {step_us}"
        for name, step_us in zip(names, steps_us, strict=True)
        if isinstance(step_us, NotMeasured)
    ]
    if one.source != two.source:
        found.append(f"one is a {one.source} profile, the other a {two.source}")
    if one.training != two.training:
        words = ["training" if about.training else "inference" for about in (one, two)]
        found.append(f"{words[0]} against {words[1]}")
    for what, before, after in (
        ("inputs", one.inputs, two.inputs),
        ("CPU", one.cpu, two.cpu),
        ("threads", str(one.threads), str(two.threads)),
        ("torch", one.torch, two.torch),
        ("device", *devices),
    ):
        if before != after:
            found.append(f"{what}: {before or 'unknown'} against {after or 'unknown'}")
    if not found and one.fingerprint != two.fingerprint:
        found.append("torchweld's kernels are of different builds or instruction sets")
    return tuple(found)


def _notes(a: Profile, b: Profile) -> tuple[str, ...]:
    found = []
    for name, profile in (("a", a), ("b", b)):
        if profile.about.steps > 1:
            found.append(
                f"{name} covers {profile.about.steps} steps; its amounts are means per step"
            )
        found += [f"{name}: {notice}" for notice in profile.notices]
    if isinstance(a.faults, StepFaults) and isinstance(b.faults, StepFaults):
        before, after = round(a.faults.per_step), round(b.faults.per_step)
        if abs(after - before) >= NOTED_FAULTS:
            found.append(f"page faults per step: {before:,} → {after:,}")
    return tuple(found)


# ---- one side ----


class _Side:
    """A profile's modules by normal path. `prefix` is stripped from all of them."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.account: Account = account(profile)
        self.prefix = ""

    @cached_property
    def normal(self) -> list[str]:
        return [normal_path(module.path) for module in self.profile.modules]

    @property
    def paths(self) -> list[str]:
        """One for every module."""
        return [below_prefix(path, self.prefix) for path in self.normal]

    @cached_property
    def normal_ran(self) -> list[str]:
        """Normal paths of modules that did anything."""
        modules = zip(self.normal, self.profile.modules, self.account.modules, strict=True)
        return [
            path
            for path, module, found in modules
            if module.calls or found.launches or module.total_us > 0
        ]

    @property
    def ran(self) -> set[str]:
        return {below_prefix(path, self.prefix) for path in self.normal_ran}

    def kinds(self) -> dict[str, str]:
        """Path -> class; of a wrapper and what it wraps, at one path, that of the latter."""
        modules = zip(self.paths, self.profile.modules, strict=True)
        return {path: module.kind for path, module in modules}

    def ordered(self, chosen: set[str]) -> list[str]:
        return [path for path in dict.fromkeys(self.paths) if path in chosen]

    def only(self, shared: set[str]) -> list[str]:
        """What ran here alone, without what is inside it."""
        alone = self.ran - shared
        outermost = {p for p in alone if p.rpartition(".")[0] not in alone}
        return [path for path in dict.fromkeys(self.paths) if path in outermost]

    def amounts(self, shared: set[str]) -> dict[str, Amount]:
        """Shared path -> what it does itself, with all below it that is not shared."""
        steps = max(self.profile.about.steps, 1)
        counted = self.profile.accounted_steps  # the host's times are of all, the rest of these
        own = self._own()
        for i, amount in self._left_out():
            own[i] += amount
        found: dict[str, Amount] = {}
        for path, amount in zip(self.paths, own, strict=True):
            at = path
            while at not in shared:
                at = at.rpartition(".")[0]
            found[at] = found.get(at, NOTHING) + amount
        if steps == 1:
            return found
        return {
            path: Amount(
                launches=round(amount.launches / counted),
                round_trips=round(amount.round_trips / counted),
                round_trip_bytes=round(amount.round_trip_bytes / counted),
                time_us=amount.time_us / steps,
                device_us=amount.device_us / counted,
            )
            for path, amount in found.items()
        }

    def _left_out(self) -> Iterable[tuple[int, Amount]]:
        """Module and amount, negative, of kernels that the device's figures do not cover."""
        device, ops = self.profile.device, self.profile.ops
        for kernel in device.kernels if device is not None else ():
            if device is not None and not device.covers(kernel):
                at = ops[kernel.op].module if kernel.op >= 0 else 0
                # The account counts no launches for these ops, but it does for kernels without an
                # op.
                yield at, Amount(launches=-int(kernel.op < 0), device_us=-kernel.duration_us)

    def _own(self) -> list[Amount]:
        """Amounts of each module, without its children."""
        profile = self.profile
        found = [NOTHING] * len(profile.modules)
        trips = round_trips_of(profile.ops, works_of(profile.ops))
        for op, explained, read_back in zip(profile.ops, self.account.ops, trips, strict=True):
            found[op.module] += Amount(
                launches=explained.launches,
                # None if the account could not price any: the two columns go together.
                round_trips=read_back if explained.round_trip_bytes > 0 else 0,
                round_trip_bytes=explained.round_trip_bytes,
            )
        for i, module in enumerate(profile.modules):
            found[i] += Amount(time_us=module.self_us)
        for kernel in profile.device.kernels if profile.device is not None else ():
            at = profile.ops[kernel.op].module if kernel.op >= 0 else 0
            # The account gives kernels that no op launched to no op.
            launches = 0 if kernel.op >= 0 else 1
            found[at] += Amount(launches=launches, device_us=kernel.duration_us)
        return found


# ---- layers that changed alike ----


def _merge(changes: Sequence[Change], everything: Iterable[str]) -> list[Change]:
    """Changes of layers with the same classes and counts, that changed alike, become one."""
    groups: dict[tuple[str, tuple[object, ...]], list[Change]] = {}
    for change in changes:
        before, after = change.before, change.after
        alike = (
            *(change.kinds, change.own, before.launches, after.launches),
            after.round_trips - before.round_trips,
            after.round_trip_bytes - before.round_trip_bytes,
        )
        groups.setdefault((pattern_of(change.path), alike), []).append(change)
    known = by_pattern(everything)
    return [
        Change(
            path=joined([change.path for change in same], known[pattern]),
            modules=len(same),
            kinds=same[0].kinds,
            own=same[0].own,
            before=_sum(change.before for change in same),
            after=_sum(change.after for change in same),
        )
        for (pattern, _), same in groups.items()
    ]
