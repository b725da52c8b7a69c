"""The rule about memory: pages that go back to the system and are fetched again in every step."""

from __future__ import annotations

from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import duration, size
from torchweld.findings.evidence import Evidence
from torchweld.findings.finding import Draft, Slice
from torchweld.profiles.step_faults import KEEP_MEMORY, StepFaults

GLIBC = "glibc"


def page_faults(case: Evidence) -> list[Draft]:
    """Memory that is freed in or after a step and comes back as fresh pages in the next one.

    Reads the faults that were counted on steps without the profiler, and the cost of one, measured
    when the profile was taken. The bound removes them all, as if one thread took them one after the
    other: `StepFaults.cost_us`. On a device the host's faults hide behind its kernels.
    """
    faults = case.profile.faults
    if isinstance(faults, NotMeasured) or case.on_device or faults.cost_us <= 0:
        return []
    training = case.profile.about.training
    what = "Gradients and activations" if training else "Activations"
    return [
        Draft(
            rule="page-faults",
            title=f"{round(faults.per_step):,} page faults per step",
            cause=f"{what} are given back to the system when they are freed, and come back as "
            f"fresh pages, which the kernel has to find and clear{_by_whom(faults)}.",
            action=_action(faults, training),
            evidence=(_counted(faults), _priced(faults, case.step_us)),
            waste="fetching memory that was given back",
            claims={Slice("step", 0, "page_faults"): faults.cost_us},
        )
    ]


def _by_whom(faults: StepFaults) -> str:
    if not faults.allocator.startswith(GLIBC):
        return ""
    return (
        ": glibc's malloc unmaps every block above 32 MB when it is freed, and trims the end of "
        "its heap"
    )


def _action(faults: StepFaults, training: bool) -> str:
    if faults.allocator.startswith(GLIBC):
        how = (
            f"Start the program as `{KEEP_MEMORY} python train.py`, and glibc keeps what is "
            "freed; the process then stays as large as it ever was."
        )
    elif faults.allocator:
        how = f"Set {faults.allocator} to keep what is freed, or to give it back more slowly."
    else:
        how = "Use an allocator that keeps what is freed, such as jemalloc or tcmalloc."
    if not training:
        return how
    return (
        f"{how} Or weld the model for training (tw.fuse(..., training=True)): weight gradients "
        "then come from a pool. Or keep gradients with zero_grad(set_to_none=False), which helps "
        "if each is below 32 MB."
    )


def _counted(faults: StepFaults) -> str:
    varying = f" ({faults.least:,} to {faults.most:,})" if faults.least < faults.most else ""
    return (
        f"{round(faults.per_step):,} faults per step{varying}: {size(faults.fresh_bytes)} of fresh "
        "pages"
    )


def _priced(faults: StepFaults, step_us: float) -> str:
    each = f"one costs {duration(faults.fault_us)} here"
    if isinstance(faults.system_us, NotMeasured):
        return f"{each}, all of them {duration(faults.cost_us)} of {duration(step_us)}"
    return (
        f"{each}, all of them at most {duration(faults.cost_us)} of {duration(step_us)}; the "
        f"kernel took {duration(faults.system_us)} per step in all"
    )
