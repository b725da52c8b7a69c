"""Settings of the whole suite: hypothesis profiles, and a process left as it was found."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings
from tests.support.made_profiles import make_peaks

from torchweld import ops
from torchweld.machine import measured_peaks
from torchweld.profiles.attributing.attribution import Costs
from torchweld.profiles.recording import live_profile, profile_building
from torchweld.timing.core_waiting import CoreWaiting

# The suite draws the same samples at every run. HYPOTHESIS_PROFILE=explore draws new ones, ten
# times as many, and keeps what it finds in .hypothesis.
SLOW_EXAMPLES_ARE_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "suite",
    derandomize=True,
    deadline=None,
    max_examples=120,
    print_blob=True,
    suppress_health_check=SLOW_EXAMPLES_ARE_FINE,
)
settings.register_profile(
    "explore", settings.get_profile("suite"), derandomize=False, max_examples=1200
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


@pytest.fixture(autouse=True)
def _same_process_afterwards() -> Iterator[None]:
    """Threads, instruction set, gradient mode and seed are every test's own affair."""
    threads = torch.get_num_threads()
    isa = ops.compiled.isa() if ops.compiled is not None else None
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.set_grad_enabled(True)
    if isa is not None:
        ops.compiled.choose_isa(isa)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Peaks that are measured while tests run are not kept for the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def calm_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step counts as measured, whatever else runs: for tests of what does not rest on it."""
    monkeypatch.setattr(CoreWaiting, "lost", lambda self: 0.0)
    monkeypatch.setattr(profile_building, "doubt", lambda *_: None)


@pytest.fixture
def brief_profiles(monkeypatch: pytest.MonkeyPatch, one_thread: None, calm_profiles: None) -> None:
    """Who is charged with what shows in a few steps; more only make the times more precise.

    The memory is said to be slower than that of any machine, and the arithmetic faster: then what
    another process takes does not show as slow kernels.
    """
    monkeypatch.setattr(live_profile, "MOST_STEPS", 5)
    made = make_peaks(gflops=1000.0, gbps=2.0, threads=1)
    monkeypatch.setattr(measured_peaks, "peaks", lambda measure=False: made)


@pytest.fixture
def uncorrected_profiles(monkeypatch: pytest.MonkeyPatch, brief_profiles: None) -> None:
    """Times are as recorded. Beside other processes, few rounds can misjudge the profiler's cost by
    so much that nothing is left of a small model's step."""
    monkeypatch.setattr(profile_building, "calibrate", lambda loop, rounds: Costs())


@pytest.fixture
def one_thread() -> None:
    """For products so small that a second thread only waits."""
    torch.set_num_threads(1)
