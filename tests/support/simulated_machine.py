"""A machine that exists on paper: a clock, and sides whose times are drawn instead of taken.

What it does to all sides (drift, bursts, speed regimes) is a function of its own clock, so that a
comparison driven by it is deterministic, and its truth is known.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


def steady(_now_s: float) -> float:
    return 1.0


@dataclass
class SimulatedMachine:
    """`slowness` of the clock's time multiplies every block; `noise` is the sigma of its log."""

    noise: float = 0.0
    slowness: Callable[[float], float] = steady
    seed: int = 0
    now_s: float = 0.0
    log: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def clock(self) -> float:
        return self.now_s

    def side(self, name: str, call_s: float) -> "PaperSide":
        return PaperSide(self, name, call_s)


class PaperSide:
    """Takes `call_s` a call on the machine when it is undisturbed."""

    def __init__(self, machine: SimulatedMachine, name: str, call_s: float) -> None:
        self.machine = machine
        self.name = name
        self.call_s = call_s

    def time(self, calls: int) -> float:
        machine = self.machine
        machine.log.append((self.name, calls))
        disturbance = math.exp(machine.noise * machine.rng.standard_normal())
        seconds = calls * self.call_s * machine.slowness(machine.now_s) * disturbance
        machine.now_s += seconds
        return seconds
