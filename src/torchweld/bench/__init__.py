"""Eager against fused blocks, whole models and other runtimes: verified first, then timed in pairs.

`plan` refuses what cannot be measured, `measure` gives one `Cell` after the other, `Bench` holds
them, saves to JSON and loads again, and `summarise` says what they come to. No printing.
`plan_model` and `measure_model` are the same for a whole model. `stages` is where sides run,
`runtimes` what they are.
"""

from torchweld.bench.bench_cases import Case, MlpShape
from torchweld.bench.bench_participants import plan, plan_model
from torchweld.bench.bench_results import Bench, Cell, Cost, Latency, OutputCheck, Result
from torchweld.bench.bench_summary import Summary, maps, summarise
from torchweld.bench.block_bench import measure
from torchweld.bench.model_bench import measure_model

__all__ = [
    "Bench",
    "Case",
    "Cell",
    "Cost",
    "Latency",
    "MlpShape",
    "OutputCheck",
    "Result",
    "Summary",
    "maps",
    "measure",
    "measure_model",
    "plan",
    "plan_model",
    "summarise",
]
