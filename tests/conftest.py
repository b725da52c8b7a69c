"""Settings of the whole suite: hypothesis profiles, and a process left as it was found."""

from __future__ import annotations

import os
from collections.abc import Iterator

from tests.support.browser_skips import browser_skips
from tests.support.gpu_device import on_real_gpu

# Read when Triton is imported, by whatever imports it first: its kernels run in its interpreter, on
# CPU tensors (tests/support/interpreted_gpu.py).
if on_real_gpu():  # else cuBLAS refuses deterministic algorithms
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
else:
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings
from tests.support.brief_profiling import make_brief, make_calm, make_uncorrected

from torchweld import ops

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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Here and not beside those tests: the process that sums up loads no conftest of theirs."""
    said = browser_skips(terminalreporter.stats.get("skipped", []))
    if said:
        terminalreporter.write_line(said)


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
    make_calm(monkeypatch)


@pytest.fixture
def brief_profiles(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """A few steps on a machine that counts as calm."""
    make_brief(monkeypatch)


@pytest.fixture
def uncorrected_profiles(monkeypatch: pytest.MonkeyPatch, brief_profiles: None) -> None:
    """The same with times as recorded."""
    make_uncorrected(monkeypatch)


@pytest.fixture
def own_compilations() -> Iterator[None]:
    """Keeps compilations apart: earlier ones do not serve here, nor these later."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def one_thread() -> None:
    """Runs products on one thread, for those so small that a second thread only waits."""
    torch.set_num_threads(1)
