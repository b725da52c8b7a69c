"""Eager against fused blocks, whole models and other runtimes: verified first, then timed in pairs.

`plan` refuses what cannot be measured, `measure` gives one `Cell` after the other, `Bench` holds
them, saves to JSON and loads again, and `summarise` says what they come to. No printing.
`plan_model` and `measure_model` are the same for a whole model. `stages` is where sides run,
`runtimes` what they are.
"""

from torchweld.benching.cases import Case, Mlp
from torchweld.benching.choosing import plan, plan_model
from torchweld.benching.results import Bench, Cell, Check, Cost, Latency, Result
from torchweld.benching.running import measure
from torchweld.benching.summary import Summary, maps, summarise
from torchweld.benching.whole import measure_model

__all__ = [
    "Bench",
    "Case",
    "Cell",
    "Check",
    "Cost",
    "Latency",
    "Mlp",
    "Result",
    "Summary",
    "maps",
    "measure",
    "measure_model",
    "plan",
    "plan_model",
    "summarise",
]
