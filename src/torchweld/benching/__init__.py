"""Eager MLPs against fused ones: verified first, then timed in pairs. Plain results, no printing.

`plan` refuses what cannot be measured, `measure` gives one `Cell` after the other, `Bench` holds
them, saves to JSON and loads again, and `summarise` says what they come to.
"""

from torchweld.benching.cases import BLOCKS, DTYPES, Case, Mlp, demo_cases, parse_sizes
from torchweld.benching.results import Bench, Cell, Check, Result, Summary, summarise
from torchweld.benching.running import measure, plan

__all__ = [
    "BLOCKS",
    "DTYPES",
    "Bench",
    "Case",
    "Cell",
    "Check",
    "Mlp",
    "Result",
    "Summary",
    "demo_cases",
    "measure",
    "parse_sizes",
    "plan",
    "summarise",
]
