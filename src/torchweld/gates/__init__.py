"""`torchweld gate`: whether a model is still as fused, and as fast, as its baseline says.

`accept` plans, counts and times a model and keeps all of it in the history; `gate` welds a model by
the plan that was kept, counts and times it again, and compares. Counters are the same at every run,
so any worsening fails; times fail beyond noise and tolerance, and only where they can be compared.
"""

from torchweld.gates.gate_baseline import Baseline, load_baseline, save_baseline
from torchweld.gates.gate_outcome import CounterChange, Outcome, TimeVerdict
from torchweld.gates.gate_run import Rival, accept, gate
from torchweld.gates.gated_model import Clock, Subject
from torchweld.gates.step_counters import Counters

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
