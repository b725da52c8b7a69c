"""The differential flame of a page: both flames as one, aligned by module.

In: two sides, since pages that were read back have no profiles. Out: a `FlameDiff`. Modules are
matched by path, below wrappers of either side, and ops by name within their module. What welding
took away and what it put in its place stand under the same module, which reads as one change.

Times are means per step. If both sides have a device, its time is compared, else the host's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torchweld.core.module_paths import normal_path
from torchweld.pages.flame_view import depth_first, rounded
from torchweld.pages.page_records import FRAME_KINDS, Flame, FlameDiff, ModuleRow, PageSide
from torchweld.pages.welded_modules import fused_modules
from torchweld.profiles.accounting.aligned_paths import below_prefix, common_prefixes

State = Literal["both", "new", "gone", "welded"]
_MODULE = FRAME_KINDS.index("module")
_MODEL = ""  # the path of the model itself
_BEFORE, _AFTER = 0, 1


@dataclass(kw_only=True, slots=True)
class JointFrame:
    """A frame of either side, or of both. Times are its own, µs, before and after."""

    name: str
    kind: int
    path: str  # of the module it is or belongs to
    us: list[float] = field(default_factory=lambda: [0.0, 0.0])
    seen: list[bool] = field(default_factory=lambda: [False, False])
    inside: list[JointFrame] = field(default_factory=list)
    places: dict[tuple[int, str], JointFrame] = field(default_factory=dict)  # not of modules


def diff_of(before: PageSide, after: PageSide) -> FlameDiff | None:
    """What changed from one side to the other; None if one of them has no flame."""
    flames = _flames(before, after)
    if flames is None:
        return None
    sides = before, after
    paths = aligned_paths(*sides)
    top = _joined(flames, paths, [max(side.about.steps, 1) for side in sides])
    return _columns(top, _welded(sides, paths))


def _flames(before: PageSide, after: PageSide) -> tuple[Flame, Flame] | None:
    for one, two in ((before.device_flame, after.device_flame), (before.flame, after.flame)):
        if one is not None and two is not None:
            return one, two
    return None


# ---- which module is which ----


def aligned_paths(before: PageSide, after: PageSide) -> tuple[list[str], list[str]]:
    """For the modules of each side, the path that both sides know them by."""
    normal = [[normal_path(row.path) for row in side.modules] for side in (before, after)]
    ran = [
        [path for path, row in zip(paths, side.modules, strict=True) if _ran(row)]
        for paths, side in zip(normal, (before, after), strict=True)
    ]
    prefixes = common_prefixes((normal[0], ran[0]), (normal[1], ran[1]))
    one, two = (
        [below_prefix(path, prefix) for path in paths]
        for paths, prefix in zip(normal, prefixes, strict=True)
    )
    return one, two


def _ran(row: ModuleRow) -> bool:
    return bool(row.calls or row.launches or (isinstance(row.time_us, float) and row.time_us > 0))


def _welded(sides: tuple[PageSide, PageSide], paths: tuple[list[str], list[str]]) -> set[str]:
    """Paths of modules that a plan welded, or that run an op of ours only afterwards."""
    told = {
        path
        for side, known in zip(sides, paths, strict=True)
        for row, path in zip(side.modules, known, strict=True)
        if row.fate == "welded"
    }
    before, after = (
        {known[i] for i in fused_modules(side)} for side, known in zip(sides, paths, strict=True)
    )
    return (told | (after - before)) - {_MODEL}


# ---- both as one ----


def _joined(
    flames: tuple[Flame, Flame], paths: tuple[list[str], list[str]], steps: Sequence[int]
) -> JointFrame:
    # The model is called as it is afterwards.
    top = JointFrame(name=flames[_AFTER].names[flames[_AFTER].name[0]], kind=_MODULE, path=_MODEL)
    modules = {_MODEL: top}
    for which, flame in enumerate(flames):
        _add(which, flame, paths[which], steps[which], modules)
    return top


def _add(
    which: int, flame: Flame, paths: list[str], steps: int, modules: dict[str, JointFrame]
) -> None:
    """Adds the frames of one side."""
    top = modules[_MODEL]
    found: list[JointFrame] = []
    columns = zip(flame.name, flame.kind, flame.parent, flame.module, flame.own_us, strict=True)
    for name, kind, parent, module, own_us in columns:
        around = found[parent] if parent >= 0 else top
        if parent < 0:
            joint = top
        elif kind == _MODULE:
            joint = _module(modules, paths[module], flame.names[name], around)
        else:
            joint = _place(around, kind, flame.names[name])
        joint.us[which] += own_us / steps
        joint.seen[which] = True
        found.append(joint)


def _module(modules: dict[str, JointFrame], path: str, name: str, around: JointFrame) -> JointFrame:
    """The frame of the module at `path`. A wrapper has the path of what it wraps."""
    joint = modules.get(path)
    if joint is None:
        joint = modules[path] = JointFrame(name=name, kind=_MODULE, path=path)
        around.inside.append(joint)
    elif path != _MODEL:
        joint.name = name  # its class may be another afterwards
    return joint


def _place(around: JointFrame, kind: int, name: str) -> JointFrame:
    joint = around.places.get((kind, name))
    if joint is None:
        joint = around.places[kind, name] = JointFrame(name=name, kind=kind, path=around.path)
        around.inside.append(joint)
    return joint


# ---- columns ----


def _columns(top: JointFrame, welded: set[str]) -> FlameDiff:
    frames = list(depth_first(top, lambda frame: frame.inside))
    parents = [parent for _, parent in frames]
    for frame, parent in reversed(frames[1:]):
        # One side may lack the module around another, as a trace without calls of modules does.
        around = frames[parent][0]
        around.seen = [a or b for a, b in zip(around.seen, frame.seen, strict=True)]
    numbers: dict[str, int] = {}
    before_us, after_us = (
        _inclusive(rounded(frame.us[which] for frame, _ in frames), parents)
        for which in (_BEFORE, _AFTER)
    )
    return FlameDiff(
        name=tuple(numbers.setdefault(frame.name, len(numbers)) for frame, _ in frames),
        names=tuple(numbers),
        parent=tuple(parents),
        before_us=before_us,
        after_us=after_us,
        kind=tuple(frame.kind for frame, _ in frames),
        state=tuple(_state(frame, welded) for frame, _ in frames),
    )


def _inclusive(own_us: Sequence[float], parents: Sequence[int]) -> tuple[float, ...]:
    """With what is inside. Added up in whole nanoseconds, so that no frame is too short."""
    found = [round(1e3 * us) for us in own_us]
    for i in range(len(found) - 1, 0, -1):
        found[parents[i]] += found[i]
    return tuple(ns / 1e3 for ns in found)


def _state(frame: JointFrame, welded: set[str]) -> State:
    if not all(frame.seen):
        return "gone" if frame.seen[_BEFORE] else "new"
    return "welded" if frame.kind == _MODULE and frame.path in welded else "both"
