"""What the walk-through prints about a piece of code: ops, counts, account, flame graph.

A `~` stands before what belongs to this machine and this run: times, shares, widths of bars. What
stands before it, or has none, is the same everywhere. scripts/fill_docs.py compares by that rule.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import torchweld as tw

if TYPE_CHECKING:
    from torchweld.profiles.expecting.expectation import Expectation

NAMES, BAR = 42, 32  # characters for names, and for the bar of a whole step
PARTS = ("arithmetic", "traffic", "launch", "round trip", "host", "slow", "unexplained")
UNKNOWN = "~ the rest is known after `torchweld info --measure`"
APART = ("ops", "metadata", "allocations")  # a sum, and what launches nothing


def options(about: str) -> argparse.Namespace:
    """What can be chosen for every script. On a GPU none of them has been run yet."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=found, help="cpu or cuda; here %(default)s by default")
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="how long to compare speeds; 0: do not"
    )
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write a page as well")
    chosen = parser.parse_args()
    if chosen.report is not None and chosen.report.exists():
        parser.error(f"{chosen.report} is there already; give another name")
    if chosen.report is not None and not chosen.report.parent.is_dir():
        parser.error(f"there is no folder {chosen.report.parent}")
    torch.manual_seed(0)
    return chosen


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


# ---- what ran ----


def ops(ran: Expectation) -> None:
    """Every op that does work, with the shapes it was given and its module; then the counts."""
    for op in ran.ops:
        shapes = ", ".join("x".join(map(str, x.shape)) for x in op.inputs if x and x.shape)
        print(f"{op.name:<26}{shapes:<34}{op.module}".rstrip())
    print(counted(ran.counts))


def counted(counts: dict[str, int]) -> str:
    """`2 kernels: linear=1, pointwise=1; 0 views`, by the names that tw.expect takes."""
    kinds = ", ".join(f"{kind}={n}" for kind, n in counts.items() if n and kind not in APART)
    return f"{_many(counts['ops'], 'kernel')}: {kinds}; {_many(counts['metadata'], 'view')}"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


# ---- where the time goes ----


def at(profile: tw.Profile, chosen: argparse.Namespace, inside: bool = False) -> None:
    """The account and the flame graph, under their headings; the page, if it is wanted."""
    heading("The account")
    account(profile)
    heading("The flame graph")
    flame(profile, inside=inside)
    page(profile, chosen)


def page(profile: tw.Profile, chosen: argparse.Namespace) -> None:
    if chosen.report is not None:
        chosen.report.write_text(profile.to_html(), encoding="utf-8")
        print(f"wrote {chosen.report.resolve()}", file=sys.stderr)


def account(profile: tw.Profile) -> None:
    """What can be counted first, then what has to be timed."""
    found = tw.account(profile)
    whole = found.modules[0]
    print(f"{_many(whole.launches, 'kernel')}, {whole.flops / 1e6:.2f} MFLOP")
    trips = f"{whole.round_trip_bytes / 1e3:.0f} kB of it in round trips"
    known = whole.roofline_us > 0  # how fast the machine could be
    print(f"{whole.moved_bytes / 1e3:.0f} kB read and written,", trips if known else UNKNOWN)
    step = found.step
    whole_us = 0.0 if isinstance(step, tw.NotMeasured) else step.total_us
    print(_row("step", whole_us, whole_us))
    for part in PARTS:
        us = getattr(step, f"{part.replace(' ', '_')}_us", 0.0)
        print(_row(f"  {part}", us, whole_us))


@dataclass
class Frame:
    """A module or an op: its own time, and what is inside it by name."""

    self_us: float = 0.0
    inside: dict[str, Frame] = field(default_factory=dict)

    def into(self, name: str) -> Frame:
        return self.inside.setdefault(name, Frame())

    @property
    def total_us(self) -> float:
        return self.self_us + sum(frame.total_us for frame in self.inside.values())


def flame(profile: tw.Profile, *, inside: bool = False, ops: bool = True, depth: int = 9) -> None:
    """Modules and ops: one line per frame, with a bar where its time lies in the step.

    inside: what runs inside ops that do work, and inside views, has frames too
    ops:    without them, modules are the last level
    """
    top = _frames(profile, inside, ops)
    whole_us = 0.0 if isinstance(profile.step_us, tw.NotMeasured) else top.total_us

    def show(name: str, frame: Frame, level: int, left_us: float) -> None:
        print(_row("  " * level + name, frame.total_us, whole_us, left_us))
        for inner, below in frame.inside.items():
            if level < depth:
                show(inner, below, level + 1, left_us)
            left_us += below.total_us

    show("step", top, 0, 0.0)


def _frames(profile: tw.Profile, inside: bool, ops: bool) -> Frame:
    """Frames of the profile. With a device, times are those of its kernels."""
    top = Frame()
    kernels = profile.device.kernels if profile.device else None

    def module_frame(index: int) -> Frame:
        module = profile.modules[index]
        if not index:
            return top
        name = module.path.removeprefix(f"{profile.modules[module.parent].path}.")
        return module_frame(module.parent).into(f"{name}: {module.kind}")

    about = tw.account(profile).ops
    frames: list[tuple[Frame, bool]] = []  # of every op, and whether it is the last level
    for op, priced in zip(profile.ops, about, strict=True):
        outer = profile.ops[op.parent] if op.parent >= 0 else None
        if outer is not None and (outer.module, outer.phase) == (op.module, op.phase):
            frame, last = frames[op.parent]
        else:
            frame, last = module_frame(op.module), not ops
            if ops and op.phase != "forward":
                frame = frame.into(op.phase)
        if not last:
            frame = frame.into(plain_name(op.name))
            last = not inside and (priced.launches > 0 or priced.kind == "metadata")
        own_us = op.self_us if kernels is None else sum(kernels[k].duration_us for k in op.kernels)
        frame.self_us += max(0.0, own_us)
        frames.append((frame, last))
    if kernels is None:
        for index, module in enumerate(profile.modules):
            module_frame(index).self_us += max(0.0, module.python_us + module.engine_us)
    return top


def plain_name(name: str) -> str:
    """The name without the numbers and hashes that the compiler makes up."""
    name = re.sub(r"## (Call CompiledFxGraph) \w+ ##", r"\1", name)
    return re.sub(r"(Torch-Compiled Region): .*", r"\1", name)


def _row(name: str, us: float, whole_us: float, left_us: float = 0.0) -> str:
    """A time, its share of the whole, and a bar that begins where others end."""
    if not whole_us:
        return f"{name:<{NAMES}} ~ not measured"
    share = round(us / whole_us, 2) + 0.0  # which is never written as -0
    bar = " " * round(BAR * left_us / whole_us) + "▇" * max(0, round(BAR * share))
    return f"{name:<{NAMES}} ~{round(us, 1) + 0.0:8.1f} µs {share:5.0%}  {bar}".rstrip()


def machine(profile: tw.Profile) -> None:
    about = profile.about
    print(f"~ {about.cpu}, {_many(about.threads, 'thread')}, torch {about.torch}")


def findings(found: Iterable[tw.Finding]) -> None:
    """The one that could win most."""
    first = next(iter(found), None)
    print("the largest finding ~", "none" if first is None else f"{first.rule}, {first.sentence}")
