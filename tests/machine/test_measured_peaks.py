"""Peaks: measured when asked for, kept, found again; refused where they cannot be right."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchweld.core.errors import NotMeasuredError
from torchweld.machine import fingerprint, hardware, kernel_build, measured_peaks
from torchweld.machine.measured_peaks import PROBED_DTYPES, WORKING_SETS_BYTES, KeptPeaks


def fake_compiled(*, one: float = 100.0, team: float = 200.0, isa: str = "avx2") -> SimpleNamespace:
    return SimpleNamespace(
        isa=lambda: isa,
        isas=lambda: {isa: (True, True)},
        probe_fma=lambda dtype, threads, seconds: one if threads == 1 else team,
        probe_native=lambda dtype, threads, seconds: 0.0,
        probe_read=lambda size, threads, seconds: 1e9 / size,
    )


@pytest.fixture
def two_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two torch threads, a fake compiled part, an empty cache; returns the cache's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(kernel_build, "compiled_part", fake_compiled)
    return tmp_path / "torchweld"


def test_peaks_are_not_measured_unless_asked_for(two_threads: Path) -> None:
    assert measured_peaks.peaks() is None
    assert not two_threads.exists()


def test_measured_peaks_are_kept_and_found_again(two_threads: Path) -> None:
    measured = measured_peaks.peaks(measure=True)
    assert measured is not None
    assert measured_peaks.peaks() == measured
    assert [path.name for path in two_threads.iterdir()] == [f"peaks-{fingerprint.key_here()}.json"]
    assert {(p.dtype, p.threads) for p in measured.fma} == {
        (dtype, n) for dtype in PROBED_DTYPES for n in (1, 2)
    }
    assert {p.working_set_bytes for p in measured.read} == set(WORKING_SETS_BYTES)
    assert measured.fma_gflops("bfloat16", 2) == 200.0
    assert measured.fma_gflops("float32", 7) is None


def test_a_type_that_the_cpu_multiplies_itself_has_the_larger_rate(
    two_threads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = fake_compiled()
    rates = {"bfloat16": 300.0, "float16": 10.0}
    native.probe_native = lambda dtype, threads, seconds: threads * rates.get(dtype, 0.0)
    monkeypatch.setattr(kernel_build, "compiled_part", lambda: native)
    measured = measured_peaks.peaks(measure=True)
    assert measured is not None
    assert measured.fma_gflops("bfloat16", 2) == 600.0
    assert measured.fma_gflops("float16", 2) == 200.0
    assert measured.fma_gflops("float32", 2) == 200.0


@pytest.mark.parametrize(("flag", "dtype"), [("amx_bf16", "bfloat16"), ("avx512_fp16", "float16")])
def test_where_only_torch_has_the_instruction_its_products_count_too(
    two_threads: Path, monkeypatch: pytest.MonkeyPatch, flag: str, dtype: str
) -> None:
    plain = measured_peaks.peaks(measure=True)
    assert plain is not None
    here = replace(hardware.hardware(), instruction_sets=(flag,))
    by_size = {512: 150.0, 1024: 900.0, 2048: 800.0}
    asked: list[str] = []

    def product(dtype: str, threads: int, seconds: float, size: int) -> float:
        asked.append(dtype)
        return threads * by_size[size]

    monkeypatch.setattr(hardware, "hardware", lambda: here)
    monkeypatch.setattr(measured_peaks, "fma_gflops_by_torch", product)
    measured = measured_peaks.peaks(measure=True)
    assert measured is not None
    assert set(asked) == {dtype}
    assert measured.fma_gflops(dtype, 2) == 1800.0
    assert measured.fma_gflops("float32", 2) == 200.0
    assert f"{dtype} also by torch.mm" in measured.method
    by_size[512] = 1.0  # a torch that is built without it: larger products would only take longer
    asked.clear()
    measured = measured_peaks.peaks(measure=True)
    assert measured is not None
    assert measured.fma_gflops(dtype, 2) == 200.0
    assert len(asked) == 2


def test_peaks_hold_for_the_types_that_are_asked_for(
    two_threads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = measured_peaks.peaks(measure=True)
    assert measured is not None
    faster = fake_compiled()
    faster.probe_native = lambda dtype, threads, seconds: 300.0 if dtype == "bfloat16" else 0.0
    monkeypatch.setattr(kernel_build, "compiled_part", lambda: faster)
    assert measured_peaks.holds(measured)
    assert measured_peaks.holds(measured, ("float32", "int8"))
    assert not measured_peaks.holds(measured, ("float32", "bfloat16"))


def test_peaks_of_another_method_are_not_used(two_threads: Path) -> None:
    measured = measured_peaks.peaks(measure=True)
    assert measured is not None
    (path,) = two_threads.iterdir()
    KeptPeaks(peaks=replace(measured, method="another way")).save(path)
    assert measured_peaks.peaks() is None


def test_read_rate_is_of_the_next_larger_working_set(two_threads: Path) -> None:
    measured = measured_peaks.peaks(measure=True)
    assert measured is not None
    assert measured.read_gbps(1, 2) == 1e9 / WORKING_SETS_BYTES[0]
    assert measured.read_gbps(WORKING_SETS_BYTES[0] + 1, 2) == 1e9 / WORKING_SETS_BYTES[1]
    assert measured.read_gbps(WORKING_SETS_BYTES[-1] * 9, 1) == 1e9 / WORKING_SETS_BYTES[-1]
    assert measured.read_gbps(1, 7) is None


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"fma": 3}', '{"fingerprint": "x"}'])
def test_a_damaged_cache_counts_as_none_and_is_replaced(two_threads: Path, damage: str) -> None:
    measured_peaks.peaks(measure=True)
    (path,) = two_threads.iterdir()
    path.write_text(damage)
    assert measured_peaks.peaks() is None
    fresh = measured_peaks.peaks(measure=True)
    assert measured_peaks.peaks() == fresh


def test_peaks_of_another_set_up_are_not_used(
    two_threads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_peaks.peaks(measure=True)
    monkeypatch.setattr(kernel_build, "compiled_part", lambda: fake_compiled(isa="avx512"))
    assert measured_peaks.peaks() is None
    (path,) = two_threads.iterdir()
    path.rename(path.with_name(f"peaks-{fingerprint.key_here()}.json"))
    assert measured_peaks.peaks() is None


def test_threads_slower_than_one_are_not_a_measurement(
    two_threads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_build, "compiled_part", lambda: fake_compiled(one=100.0, team=70.0))
    with pytest.raises(NotMeasuredError, match=r"2 threads reached 70 .* one alone reached 100"):
        measured_peaks.peaks(measure=True)
    assert measured_peaks.peaks() is None
    assert not two_threads.exists()


def test_a_slow_read_is_not_a_measurement_either(
    two_threads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = fake_compiled()
    slow.probe_read = lambda size, threads, seconds: 100.0 / threads
    monkeypatch.setattr(kernel_build, "compiled_part", lambda: slow)
    with pytest.raises(NotMeasuredError, match="2 threads reached 50 GB/s from 32768 bytes"):
        measured_peaks.peaks(measure=True)
    assert not two_threads.exists()


def test_a_disturbed_rate_is_taken_again(
    two_threads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = iter([40.0, 60.0, 190.0])
    disturbed = fake_compiled()
    disturbed.probe_fma = lambda dtype, threads, seconds: (
        100.0 if threads == 1 else next(rates, 200.0)
    )
    monkeypatch.setattr(kernel_build, "compiled_part", lambda: disturbed)
    measured = measured_peaks.peaks(measure=True)
    assert measured is not None
    assert measured.fma_gflops("float32", 2) == 190.0
    assert two_threads.exists()


def test_a_cache_in_the_way_of_a_file_warns_and_still_answers(two_threads: Path) -> None:
    two_threads.write_text("a file where the folder should be")
    with pytest.warns(RuntimeWarning, match="XDG_CACHE_HOME"):
        assert measured_peaks.peaks(measure=True) is not None


def test_without_a_compiled_part_torch_measures_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_build, "compiled_part", lambda: None)
    monkeypatch.setattr(measured_peaks, "PROBE_SECONDS", 0.001)
    monkeypatch.setattr(measured_peaks, "WORKING_SETS_BYTES", (4096,))
    monkeypatch.setattr(measured_peaks, "PROBED_DTYPES", ("float32", "bfloat16"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # a busy machine cannot make one thread slower than itself
    try:
        measured = measured_peaks.peaks(measure=True)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert measured is not None
    assert "torch.mm" in measured.method
    assert all(peak.gflops > 0 for peak in measured.fma)
    assert all(peak.gbps > 0 for peak in measured.read)


def test_a_cache_of_before_it_was_marked_still_loads(two_threads: Path) -> None:
    measured = measured_peaks.peaks(measure=True)
    assert measured is not None
    (path,) = two_threads.iterdir()
    assert json.loads(path.read_text())["torchweld_peaks"] == 1
    path.write_text(json.dumps(asdict(measured), indent=2))
    assert measured_peaks.peaks() == measured


@pytest.mark.skipif(kernel_build.build_problem() is not None, reason="needs the compiled part")
def test_compiled_probes_return_plausible_rates() -> None:
    compiled = kernel_build.compiled_part()
    assert compiled is not None
    for dtype in PROBED_DTYPES:
        assert 0.1 < compiled.probe_fma(dtype, 1, 0.002) < 1e4
    for size in (1, 1000, 64 * 1024):
        assert 0.1 < compiled.probe_read(size, 1, 0.002) < 1e5
        assert 0 < compiled.probe_read(size, 2, 0.002) < 1e5
    with pytest.raises(ValueError, match="int8"):
        compiled.probe_fma("int8", 1, 0.001)


@pytest.mark.skipif(kernel_build.build_problem() is not None, reason="needs the compiled part")
def test_the_native_probe_runs_where_the_cpu_has_the_instruction_and_is_0_elsewhere() -> None:
    compiled = kernel_build.compiled_part()
    assert compiled is not None
    has = "avx512_bf16" in hardware.hardware().instruction_sets
    for dtype in PROBED_DTYPES:
        rate = compiled.probe_native(dtype, 1, 0.002)
        assert 0.0 <= rate < 1e5
        assert (rate > 0.0) == (has and dtype == "bfloat16")
    with pytest.raises(ValueError, match="int8"):
        compiled.probe_native("int8", 1, 0.001)
