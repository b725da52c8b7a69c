"""`torchweld gate`: whether a model is still as fused, and as fast, as its baseline says.

`accept` plans, counts and times a model and keeps all of it in the history; `gate` welds a model by
the plan that was kept, counts and times it again, and compares. Counters are the same at every run,
so any worsening fails; times fail beyond noise and tolerance, and only where they can be compared.
"""

from torchweld.gates.baseline import Baseline, load_baseline, save_baseline
from torchweld.gates.counters import Counters
from torchweld.gates.gate_run import Rival, accept, gate
from torchweld.gates.outcome import CounterChange, Outcome, TimeVerdict
from torchweld.gates.subject import Clock, Subject

__all__ = [
    "Baseline",
    "Clock",
    "CounterChange",
    "Counters",
    "Outcome",
    "Rival",
    "Subject",
    "TimeVerdict",
    "accept",
    "gate",
    "load_baseline",
    "save_baseline",
]
