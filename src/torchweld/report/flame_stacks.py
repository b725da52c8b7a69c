"""A step as weighted stacks, module → op → kernel, for flame graphs.

In: a `Profile`. Out: a `Frame` tree whose weights are µs. The backward of a module's ops stands
under that module, in a frame called `backward`, wherever and whenever it ran.

A weight is what belongs to the frame itself and to nothing inside it. The weights of a live step
add up to its corrected time, those of a device to the time of its kernels, those of a trace to the
time of all its threads. Threads can be busy at the same time, so that may be more than the clock
shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from torchweld.core.safe_text import clean
from torchweld.profiles.attributing.attribution import ENGINE
from torchweld.profiles.profile import Profile
from torchweld.report.runtime_places import op_around_calls, own_time_of_calls

LATE = {"backward": "backward", "recompute": "recompute"}
# "op": also a call of the device's runtime. "rest": time that is in no module, op or kernel.
FrameKind = Literal["module", "op", "kernel", "phase", "rest"]
FRAME_KINDS: tuple[FrameKind, ...] = ("module", "op", "kernel", "phase", "rest")
# Smaller sums of times are errors of rounding.
LEAST_US = 1e-3
# Time of the step in which no op and no module was recorded.
BEYOND = "not attributed"


@dataclass(kw_only=True, slots=True)
class Frame:
    """A place in the stacks. `module` is the one it belongs to."""

    name: str
    kind: FrameKind = "rest"
    module: int = 0
    self_us: float = 0.0
    calls: int = 0  # ops or kernels that are this frame
    inside: dict[tuple[FrameKind, str, int], Frame] = field(default_factory=dict)

    def into(self, name: str, kind: FrameKind = "rest", module: int | None = None) -> Frame:
        """The frame of this name and kind inside, made if need be."""
        at = self.module if module is None else module
        found = self.inside.get((kind, name, at))
        if found is None:
            found = self.inside[kind, name, at] = Frame(name=name, kind=kind, module=at)
        return found

    def called(self, us: float) -> None:
        """One more call, of this duration."""
        self.self_us += us
        self.calls += 1

    def walk(self) -> Iterator[tuple[tuple[str, ...], float]]:
        """Every stack with a weight, outermost frame first, depth first."""
        pending: list[tuple[Frame, tuple[str, ...]]] = [(self, (self.name,))]
        while pending:
            frame, stack = pending.pop()
            if frame.self_us > 0:
                yield stack, frame.self_us
            pending.extend((f, (*stack, f.name)) for f in reversed(frame.inside.values()))

    @property
    def total_us(self) -> float:
        return sum(weight for _, weight in self.walk())


class _Places:
    """Frames of modules and ops, found by index."""

    def __init__(self, profile: Profile, top: Frame) -> None:
        self.profile = profile
        self.modules: list[Frame | None] = [None] * len(profile.modules)
        self.modules[0] = top
        self.ops: list[Frame | None] = [None] * len(profile.ops)

    def module(self, index: int) -> Frame:
        pending = [index]
        while self.modules[pending[-1]] is None:
            pending.append(self.profile.modules[pending[-1]].parent)
        for i in reversed(pending[:-1]):
            module = self.profile.modules[i]
            around = self.modules[module.parent]
            assert around is not None
            parent = self.profile.modules[module.parent].path
            name = module.path.removeprefix(f"{parent}.") if parent else module.path
            self.modules[i] = around.into(clean(f"{name}: {module.kind}"), "module", i)
        found = self.modules[index]
        assert found is not None
        return found

    def op(self, index: int) -> Frame:
        pending = [index]
        while self.ops[pending[-1]] is None and self._nested(pending[-1]):
            pending.append(self.profile.ops[pending[-1]].parent)
        for i in reversed(pending):
            if self.ops[i] is not None:
                continue
            op = self.profile.ops[i]
            if self._nested(i):
                around = self.ops[op.parent]
                assert around is not None
            else:
                around = self.module(op.module)
                around = around.into(LATE[op.phase], "phase") if op.phase in LATE else around
            self.ops[i] = around.into(op_name(op.name), "op")
        found = self.ops[index]
        assert found is not None
        return found

    def _nested(self, index: int) -> bool:
        """Whether an op stands inside the op around it, and not under another module."""
        op = self.profile.ops[index]
        if op.parent < 0:
            return False
        around = self.profile.ops[op.parent]
        return (around.module, around.phase) == (op.module, op.phase)


def op_name(name: str) -> str:
    """The engine's long prefix for nodes becomes `engine`."""
    return clean(f"engine: {name[len(ENGINE) :]}" if name.startswith(ENGINE) else name)


def top_name(profile: Profile) -> str:
    return clean(profile.about.what or profile.modules[0].kind)


def host_frames(profile: Profile) -> Frame:
    """Where the host's time goes."""
    top = Frame(name=top_name(profile), kind="module")
    places = _Places(profile, top)
    for i in _in_model_order(profile):
        module = profile.modules[i]
        if module.python_us:
            places.module(i).into("Python").self_us += module.python_us
        if module.engine_us:
            late = places.module(i).into("backward", "phase")
            late.into("between nodes").self_us += module.engine_us
    for i, op in enumerate(profile.ops):
        places.op(i).called(op.self_us)
    _add_runtime(profile, places)
    target_us = _target_us(profile)
    if target_us is not None:
        rest_us = target_us - _sum(top)
        (top.into(BEYOND) if rest_us > 0 else top).self_us += rest_us
    _settle(top)
    if target_us is not None and (total_us := top.total_us) > 0:
        _scale(top, target_us / total_us)
    return top


def _add_runtime(profile: Profile, places: _Places) -> None:
    """Calls of the device's runtime: inside their op, or else in the module's `runtime calls`."""
    left_us = [m.self_us - m.python_us - m.engine_us for m in profile.modules]
    for op in profile.ops:
        left_us[op.module] -= op.self_us
    device = profile.device
    # A live profile has its calls of another step than its ops.
    if device is not None and profile.timing is None:
        around, own_us = op_around_calls(profile, device), own_time_of_calls(device)
        for call, at, us in zip(device.calls, around, own_us, strict=True):
            module = profile.ops[at].module if at >= 0 else 0
            # Not more than the module's time outside ops and Python, or time would count twice.
            if at >= 0 and left_us[module] > us - LEAST_US:
                places.op(at).into(clean(call.name), "op").called(us)
                left_us[module] -= us
    for i, us in enumerate(left_us):
        if us > LEAST_US:
            places.module(i).into("runtime calls").self_us += us


def _target_us(profile: Profile) -> float | None:
    """What the host's weights have to add up to; None if several threads worked at once."""
    if profile.timing is None or len({op.thread for op in profile.ops}) > 1:
        return None
    return profile.timing.corrected_us


def device_frames(profile: Profile) -> Frame | None:
    """Which module and op every kernel's time belongs to; None without a device."""
    device = profile.device
    if device is None or not device.kernels:
        return None
    top = Frame(name=clean(device.name or "device"), kind="module")
    places = _Places(profile, top)
    for kernel in device.kernels:
        around = places.op(kernel.op) if kernel.op >= 0 else top.into("launched by no known op")
        around.into(clean(kernel.name), "kernel").called(kernel.duration_us)
    return top


def _in_model_order(profile: Profile) -> Iterator[int]:
    below: list[list[int]] = [[] for _ in profile.modules]
    for i, module in enumerate(profile.modules[1:], start=1):
        below[module.parent].append(i)
    pending = [0]
    while pending:
        i = pending.pop()
        yield i
        pending.extend(reversed(below[i]))


def every(top: Frame) -> list[tuple[Frame, Frame | None]]:
    """Frames with the frame around each, outermost first."""
    found: list[tuple[Frame, Frame | None]] = [(top, None)]
    for frame, _ in found:
        found.extend((inner, frame) for inner in frame.inside.values())
    return found


def _sum(top: Frame) -> float:
    return sum(frame.self_us for frame, _ in every(top))


def _settle(top: Frame) -> None:
    """If the correction made a frame's time negative, takes that from the frame around it."""
    for frame, around in reversed(every(top)):
        if frame.self_us < 0 and around is not None:
            around.self_us += frame.self_us
            frame.self_us = 0.0
    top.self_us = max(top.self_us, 0.0)


def _scale(top: Frame, factor: float) -> None:
    for frame, _ in every(top):
        frame.self_us *= factor
