"""What torchweld says about the machine, the build and the peaks is what is there."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchweld.core.errors import BuildError, NotMeasuredError
from torchweld.machine import hardware
from torchweld.machine.cpu_identity import parse_cpuinfo, parse_sysctl, read_caches
from torchweld.machine.hardware import PROBED_DTYPES, WORKING_SETS_BYTES, Peaks

X86 = """\
processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Example CPU @ 2.00GHz
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu sse4_2 avx avx2 fma f16c

processor\t: 1
vendor_id\t: GenuineIntel
model name\t: Example CPU @ 2.00GHz
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu sse4_2 avx avx2 fma f16c

processor\t: 2
vendor_id\t: GenuineIntel
model name\t: Example CPU @ 2.00GHz
physical id\t: 1
core id\t\t: 0
flags\t\t: fpu sse4_2 avx avx2 fma f16c
"""

ARM = """\
processor\t: 0
BogoMIPS\t: 50.00
Features\t: fp asimd fphp asimdhp bf16
CPU implementer\t: 0x41
CPU part\t: 0xd40

processor\t: 1
Features\t: fp asimd fphp asimdhp bf16
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""

MACOS = """\
machdep.cpu.brand_string: Apple M9
hw.physicalcpu: 8
hw.optional.arm.AdvSIMD: 1
hw.optional.arm.FEAT_BF16: 0
"""


def test_x86_cpuinfo_counts_cores_not_hyperthreads() -> None:
    cpu = parse_cpuinfo(X86)
    assert (cpu.model, cpu.vendor) == ("Example CPU @ 2.00GHz", "GenuineIntel")
    assert cpu.cores == 2
    assert {"avx2", "fma"} <= cpu.flags


def test_arm_cpuinfo_has_a_model_without_a_model_name() -> None:
    cpu = parse_cpuinfo(ARM)
    assert cpu.model == "implementer 0x41 part 0xd40"
    assert cpu.cores is None
    assert "asimd" in cpu.flags


def test_empty_cpuinfo_is_unknown_not_an_error() -> None:
    cpu = parse_cpuinfo("")
    assert (cpu.model, cpu.vendor, cpu.cores, cpu.flags) == (None, None, None, frozenset())


def test_sysctl_names_features_as_linux_does() -> None:
    cpu = parse_sysctl(MACOS)
    assert (cpu.model, cpu.cores, cpu.flags) == ("Apple M9", 8, frozenset({"asimd"}))


def test_caches_leave_instruction_caches_out(tmp_path: Path) -> None:
    rows = [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2M")]
    for number, values in enumerate(rows):
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        for name, value in zip(("level", "type", "size"), values, strict=True):
            (folder / name).write_text(value + "\n")
    caches = read_caches(tmp_path)
    assert (caches.l1d_bytes, caches.l2_bytes, caches.l3_bytes) == (48 * 1024, 2 * 1024**2, None)


def test_caches_of_a_silent_system_are_none(tmp_path: Path) -> None:
    assert asdict(read_caches(tmp_path)) == {"l1d_bytes": None, "l2_bytes": None, "l3_bytes": None}


def test_hardware_follows_the_thread_count() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = hardware.hardware()
        torch.set_num_threads(3)
        three = hardware.hardware()
    finally:
        torch.set_num_threads(before)
    assert (one.threads, three.threads) == (1, 3)
    assert replace(one, threads=3) == three
    assert one.torch_version == torch.__version__
    assert one.cpu_model


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build record of our own in place of the real one; absent until written."""
    path = tmp_path / "_build_info.json"
    monkeypatch.setattr(hardware, "BUILD_INFO", path)
    return path


def built_for(version: str) -> str:
    return json.dumps(
        {
            "built": True,
            "torch": version,
            "isas": ["baseline"],
            "compiler": "g++ 99",
            "source_hash": "abc",
        }
    )


@pytest.mark.parametrize("text", [None, "", "{", "[]", "null"])
def test_without_a_readable_record_nothing_counts_as_built(record: Path, text: str | None) -> None:
    if text is not None:
        record.write_text(text)
    assert hardware.build_info() is None
    problem = hardware.build_problem()
    assert problem is not None
    assert "not built" in problem
    assert hardware.compiled_part() is None
    assert hardware.isa_in_use() is None


def test_a_build_left_out_says_why(record: Path) -> None:
    record.write_text('{"built": false, "reason": "no C++ compiler was found"}')
    assert hardware.build_info() is None
    assert "no C++ compiler was found" in str(hardware.build_problem())


def test_a_build_for_another_torch_is_named_with_the_remedy(record: Path) -> None:
    record.write_text(built_for("1.0.0"))
    problem = str(hardware.build_problem())
    assert "built for torch 1.0.0" in problem
    assert f"torch {torch.__version__} is installed" in problem
    assert "--no-build-isolation" in problem
    assert "\n" not in problem
    assert hardware.compiled_part() is None


def test_a_fitting_build_has_no_problem(record: Path) -> None:
    record.write_text(built_for(torch.__version__))
    assert hardware.build_problem() is None
    info = hardware.build_info()
    assert info is not None
    assert (info.isas, info.compiler) == (("baseline",), "g++ 99")


def test_an_extension_that_does_not_load_is_a_clear_error(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise ImportError(f"{name}: undefined symbol: nothing")

    record.write_text(built_for(torch.__version__))
    monkeypatch.setattr(hardware.importlib, "import_module", fail)
    with pytest.raises(BuildError, match=r"undefined symbol: nothing.*to rebuild it"):
        hardware.compiled_part()


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
    monkeypatch.setattr(hardware.torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(hardware.torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(hardware, "compiled_part", fake_compiled)
    return tmp_path / "torchweld"


def test_peaks_are_not_measured_unless_asked_for(two_threads: Path) -> None:
    assert hardware.peaks() is None
    assert not two_threads.exists()


def test_measured_peaks_are_kept_and_found_again(two_threads: Path) -> None:
    measured = hardware.peaks(measure=True)
    assert measured is not None
    assert hardware.peaks() == measured
    assert [path.name for path in two_threads.iterdir()] == [f"peaks-{hardware.fingerprint()}.json"]
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
    monkeypatch.setattr(hardware, "compiled_part", lambda: native)
    measured = hardware.peaks(measure=True)
    assert measured is not None
    assert measured.fma_gflops("bfloat16", 2) == 600.0
    assert measured.fma_gflops("float16", 2) == 200.0
    assert measured.fma_gflops("float32", 2) == 200.0


@pytest.mark.parametrize(("flag", "dtype"), [("amx_bf16", "bfloat16"), ("avx512_fp16", "float16")])
def test_where_only_torch_has_the_instruction_its_products_count_too(
    two_threads: Path, monkeypatch: pytest.MonkeyPatch, flag: str, dtype: str
) -> None:
    plain = hardware.peaks(measure=True)
    assert plain is not None
    here = replace(hardware.hardware(), instruction_sets=(flag,))
    by_size = {512: 150.0, 1024: 900.0, 2048: 800.0}
    asked: list[str] = []

    def product(dtype: str, threads: int, seconds: float, size: int) -> float:
        asked.append(dtype)
        return threads * by_size[size]

    monkeypatch.setattr(hardware, "hardware", lambda: here)
    monkeypatch.setattr(hardware, "fma_gflops_by_torch", product)
    measured = hardware.peaks(measure=True)
    assert measured is not None
    assert set(asked) == {dtype}
    assert measured.fma_gflops(dtype, 2) == 1800.0
    assert measured.fma_gflops("float32", 2) == 200.0
    assert f"{dtype} also by torch.mm" in measured.method
    by_size[512] = 1.0  # a torch that is built without it: larger products would only take longer
    asked.clear()
    measured = hardware.peaks(measure=True)
    assert measured is not None
    assert measured.fma_gflops(dtype, 2) == 200.0
    assert len(asked) == 2


def test_peaks_hold_for_the_types_that_are_asked_for(
    two_threads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = hardware.peaks(measure=True)
    assert measured is not None
    faster = fake_compiled()
    faster.probe_native = lambda dtype, threads, seconds: 300.0 if dtype == "bfloat16" else 0.0
    monkeypatch.setattr(hardware, "compiled_part", lambda: faster)
    assert hardware.holds(measured)
    assert hardware.holds(measured, ("float32", "int8"))
    assert not hardware.holds(measured, ("float32", "bfloat16"))


def test_peaks_of_another_method_are_not_used(two_threads: Path) -> None:
    measured = hardware.peaks(measure=True)
    assert measured is not None
    (path,) = two_threads.iterdir()
    path.write_text(json.dumps(asdict(replace(measured, method="another way"))))
    assert hardware.peaks() is None


def test_read_rate_is_of_the_next_larger_working_set(two_threads: Path) -> None:
    measured = hardware.peaks(measure=True)
    assert measured is not None
    assert measured.read_gbps(1, 2) == 1e9 / WORKING_SETS_BYTES[0]
    assert measured.read_gbps(WORKING_SETS_BYTES[0] + 1, 2) == 1e9 / WORKING_SETS_BYTES[1]
    assert measured.read_gbps(WORKING_SETS_BYTES[-1] * 9, 1) == 1e9 / WORKING_SETS_BYTES[-1]
    assert measured.read_gbps(1, 7) is None


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"fma": 3}', '{"fingerprint": "x"}'])
def test_a_damaged_cache_counts_as_none_and_is_replaced(two_threads: Path, damage: str) -> None:
    hardware.peaks(measure=True)
    (path,) = two_threads.iterdir()
    path.write_text(damage)
    assert hardware.peaks() is None
    fresh = hardware.peaks(measure=True)
    assert hardware.peaks() == fresh


def test_peaks_of_another_set_up_are_not_used(
    two_threads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware.peaks(measure=True)
    monkeypatch.setattr(hardware, "compiled_part", lambda: fake_compiled(isa="avx512"))
    assert hardware.peaks() is None
    (path,) = two_threads.iterdir()
    path.rename(path.with_name(f"peaks-{hardware.fingerprint()}.json"))
    assert hardware.peaks() is None


def test_threads_slower_than_one_are_not_a_measurement(
    two_threads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "compiled_part", lambda: fake_compiled(one=100.0, team=70.0))
    with pytest.raises(NotMeasuredError, match=r"2 threads reached 70 .* one alone reached 100"):
        hardware.peaks(measure=True)
    assert hardware.peaks() is None
    assert not two_threads.exists()


def test_a_slow_read_is_not_a_measurement_either(
    two_threads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = fake_compiled()
    slow.probe_read = lambda size, threads, seconds: 100.0 / threads
    monkeypatch.setattr(hardware, "compiled_part", lambda: slow)
    with pytest.raises(NotMeasuredError, match="2 threads reached 50 GB/s from 32768 bytes"):
        hardware.peaks(measure=True)
    assert not two_threads.exists()


def test_a_disturbed_rate_is_taken_again(
    two_threads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = iter([40.0, 60.0, 190.0])
    disturbed = fake_compiled()
    disturbed.probe_fma = lambda dtype, threads, seconds: (
        100.0 if threads == 1 else next(rates, 200.0)
    )
    monkeypatch.setattr(hardware, "compiled_part", lambda: disturbed)
    measured = hardware.peaks(measure=True)
    assert measured is not None
    assert measured.fma_gflops("float32", 2) == 190.0
    assert two_threads.exists()


def test_a_cache_in_the_way_of_a_file_warns_and_still_answers(two_threads: Path) -> None:
    two_threads.write_text("a file where the folder should be")
    with pytest.warns(RuntimeWarning, match="XDG_CACHE_HOME"):
        assert hardware.peaks(measure=True) is not None


def test_without_a_compiled_part_torch_measures_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hardware, "compiled_part", lambda: None)
    monkeypatch.setattr(hardware, "PROBE_SECONDS", 0.001)
    monkeypatch.setattr(hardware, "WORKING_SETS_BYTES", (4096,))
    monkeypatch.setattr(hardware, "PROBED_DTYPES", ("float32", "bfloat16"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # a busy machine cannot make one thread slower than itself
    try:
        measured = hardware.peaks(measure=True)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert measured is not None
    assert "torch.mm" in measured.method
    assert all(peak.gflops > 0 for peak in measured.fma)
    assert all(peak.gbps > 0 for peak in measured.read)


def test_peaks_survive_json(two_threads: Path) -> None:
    measured = hardware.peaks(measure=True)
    assert measured is not None
    assert Peaks.from_json(json.dumps(asdict(measured))) == measured


@pytest.mark.skipif(hardware.build_problem() is not None, reason="needs the compiled part")
def test_compiled_probes_return_plausible_rates() -> None:
    compiled = hardware.compiled_part()
    assert compiled is not None
    for dtype in PROBED_DTYPES:
        assert 0.1 < compiled.probe_fma(dtype, 1, 0.002) < 1e4
    for size in (1, 1000, 64 * 1024):
        assert 0.1 < compiled.probe_read(size, 1, 0.002) < 1e5
        assert 0 < compiled.probe_read(size, 2, 0.002) < 1e5
    with pytest.raises(ValueError, match="int8"):
        compiled.probe_fma("int8", 1, 0.001)


@pytest.mark.skipif(hardware.build_problem() is not None, reason="needs the compiled part")
def test_the_native_probe_runs_where_the_cpu_has_the_instruction_and_is_0_elsewhere() -> None:
    compiled = hardware.compiled_part()
    assert compiled is not None
    has = "avx512_bf16" in hardware.hardware().instruction_sets
    for dtype in PROBED_DTYPES:
        rate = compiled.probe_native(dtype, 1, 0.002)
        assert 0.0 <= rate < 1e5
        assert (rate > 0.0) == (has and dtype == "bfloat16")
    with pytest.raises(ValueError, match="int8"):
        compiled.probe_native("int8", 1, 0.001)
