"""Paired timing: two or more sides of the same work in, a verdict with its interval out.

`compare` is the entry. It drives `Side`s: anything that can say how many seconds a number of calls
took, be it a callable of this process or a worker in another one.
"""

from torchweld.timing.comparison import Comparison, Verdict
from torchweld.timing.paired_timing import compare
from torchweld.timing.timed_sides import CallableSide, Side

__all__ = ["CallableSide", "Comparison", "Side", "Verdict", "compare"]
