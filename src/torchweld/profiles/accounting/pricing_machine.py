"""The machine that this process runs on, as pricing needs to know it: peaks, threads, op cost."""

from __future__ import annotations

from torchweld.core.errors import NotMeasuredError
from torchweld.machine import fingerprint, hardware, measured_peaks
from torchweld.machine.measured_peaks import Peaks
from torchweld.profiles.profile import Machine
from torchweld.profiles.recording.profiler_overhead import measure_loop


def usual_peaks(notices: list[str]) -> Peaks | None:
    """This machine's peaks, measured now if they never were, or were when it was busy.

    A notice where they cannot be had.
    """
    try:
        kept = measured_peaks.peaks()
        if kept is not None and measured_peaks.holds(kept):
            return kept
        return measured_peaks.peaks(measure=True)
    except NotMeasuredError as error:
        notices.append(f"without this machine's peaks nothing can be priced: {error}")
        return None


def this_machine(notices: list[str]) -> Machine:
    """For a recording that was made here."""
    here = hardware.hardware()
    return Machine(
        torch=here.torch_version,
        cpu=here.cpu_model,
        threads=here.threads,
        fingerprint=fingerprint.key_here(),
        op_cost_us=measure_loop().smallest_op_us,
        peaks=usual_peaks(notices),
    )
