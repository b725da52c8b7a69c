"""Profiles that do not wait for a calm machine, for tests of what does not rest on times."""

from __future__ import annotations

import pytest
from tests.support.made_profiles import make_peaks

from torchweld.machine import measured_peaks
from torchweld.profiles.attributing.attribution import Costs
from torchweld.profiles.recording import live_profile, profile_building
from torchweld.timing.core_waiting import CoreWaiting


def make_calm(patch: pytest.MonkeyPatch) -> None:
    """Every step counts as measured, whatever else runs."""
    patch.setattr(CoreWaiting, "lost", lambda self: 0.0)
    patch.setattr(profile_building, "doubt", lambda *_: None)


def make_brief(patch: pytest.MonkeyPatch) -> None:
    """Who is charged with what shows in a few steps; more only make the times more precise.

    The memory is said to be slower than that of any machine, and the arithmetic faster: then what
    another process takes does not show as slow kernels.
    """
    make_calm(patch)
    patch.setattr(live_profile, "MOST_STEPS", 5)
    made = make_peaks(gflops=1000.0, gbps=2.0, threads=1)
    patch.setattr(measured_peaks, "peaks", lambda measure=False: made)


def make_uncorrected(patch: pytest.MonkeyPatch) -> None:
    """Times are as recorded. Beside other processes, few rounds can misjudge the profiler's cost by
    so much that nothing is left of a small model's step."""
    patch.setattr(profile_building, "calibrate", lambda loop, rounds: Costs())
