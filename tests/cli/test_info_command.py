"""`torchweld info` tells what is so, in tables and in JSON, whatever is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchweld.cli import info_command as info_verb
from torchweld.cli.main import run
from torchweld.core.errors import BuildError, NotMeasuredError
from torchweld.core.not_measured import NotMeasured
from torchweld.core.records import from_plain
from torchweld.machine import hardware, kernel_build, measured_peaks
from torchweld.machine.cpu_identity import Caches
from torchweld.machine.hardware import Hardware
from torchweld.machine.kernel_build import BuildInfo, CudaBuild
from torchweld.machine.measured_peaks import FmaPeak, Peaks, ReadPeak
from torchweld.ops import backends

MACHINE = Hardware(
    cpu_model="Example CPU with a rather long marketing name, 64-Core Processor @ 2.00 GHz",
    cpu_vendor="ExampleVendor",
    machine="x86_64",
    instruction_sets=hardware.FLAGS_OF_INTEREST,
    cores=64,
    cpus_allowed=2,
    threads=2,
    caches=Caches(l1d_bytes=32 * 1024, l2_bytes=1024**2),
    memory_bytes=24 * 1024**3,
    torch_version="9.9.9",
)
PEAKS = Peaks(
    fingerprint="abc",
    method="a method",
    fma=tuple(
        FmaPeak(dtype=dtype, threads=n, gflops=123.456 * n)
        for dtype in measured_peaks.PROBED_DTYPES
        for n in (1, 2)
    ),
    read=tuple(
        ReadPeak(working_set_bytes=size, threads=n, gbps=78.9 * n)
        for size in measured_peaks.WORKING_SETS_BYTES
        for n in (1, 2)
    ),
)
BUILD = BuildInfo(torch="9.9.9", isas=("baseline", "avx2"), compiler="g++ 12", source_hash="0")
ABILITIES = backends.backend_named("torch").abilities
BACKENDS = (
    SimpleNamespace(name="torch", unavailable=list, abilities=ABILITIES),
    SimpleNamespace(
        name="cuda",
        unavailable=lambda: ["no CUDA device", "CUDA part not built"],
        abilities=replace(ABILITIES, devices=("cuda",), needs="a GPU", trains=False),
    ),
)

Show = Callable[..., str]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Show:
    """Run `torchweld info` on a machine made up of `MACHINE` and what the test changes."""
    facts: dict[str, Any] = {
        "hardware": MACHINE,
        "build_info": BUILD,
        "build_problem": None,
        "isa_states": {"avx2": (True, True), "avx512": (True, False), "neon": (False, False)},
        "isa_in_use": "avx2",
        "key_here": "abc",
        "peaks": None,
    }

    def answer(name: str) -> Callable[..., Any]:
        def say(**_: object) -> Any:
            if isinstance(facts[name], Exception):
                raise facts[name]
            return facts[name]

        return say

    def show(*arguments: str, code: int = 0, **changes: Any) -> str:
        facts.update(changes)
        for name in facts:
            places = (hardware, kernel_build, measured_peaks, info_verb)
            place = next(one for one in places if hasattr(one, name))
            monkeypatch.setattr(place, name, answer(name))
        assert run(["info", *arguments]) == code
        out, err = capsys.readouterr()
        return err if code else out

    monkeypatch.setattr(backends, "BACKENDS", BACKENDS)
    monkeypatch.delenv("TORCHWELD_ISA", raising=False)
    return show


def row(text: str, first: str) -> list[str]:
    """The words of the line that begins with `first`."""
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [first])


def test_everything_asked_for_is_shown_within_100_columns(show: Show) -> None:
    text = show(peaks=PEAKS)
    assert max(len(line) for line in text.splitlines()) <= 100
    for fact in ("9.9.9", "Example CPU", "ExampleVendor", "g++ 12", "abc", "24 GiB", "a method"):
        assert fact in text
    assert "L1d 32 KiB, L2 1 MiB, L3 unknown" in text
    assert row(text, "float32")[1:3] == ["123.5", "246.9"]
    assert text.count("78.9") == len(measured_peaks.WORKING_SETS_BYTES)
    assert row(text, "torch")[1:] == ["9.9.9"]
    assert "cuda cannot be used here: no CUDA device; CUDA part not built" in text
    assert row(text, "cuda")[1:] == ["no", "cuda", "aten,", "mkldnn*", "no", "no", "a", "GPU"]


def test_instruction_sets_tell_built_from_supported_from_used(show: Show) -> None:
    text = show()
    assert row(text, "avx2") == ["avx2", "yes", "yes", "yes"]
    assert row(text, "avx512") == ["avx512", "yes", "no", "no"]
    assert row(text, "neon") == ["neon", "no", "no", "no"]
    assert "TORCHWELD_ISA forces another (avx2)" in text


def test_a_forced_instruction_set_is_named(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHWELD_ISA", "avx2")
    assert "Forced by TORCHWELD_ISA=avx2." in show()


def test_peaks_not_measured_say_how(show: Show) -> None:
    assert "not measured; run torchweld info --measure" in show()


def test_a_missing_compiled_part_is_a_fact_not_an_error(show: Show) -> None:
    missing: dict[str, Any] = {"build_info": None, "isa_states": {}, "isa_in_use": None}
    text = show(build_problem="the compiled part is missing: no compiler", **missing)
    assert "the compiled part is missing: no compiler" in text
    assert "g++" not in text
    assert "kernels for" not in text


def test_an_impossible_instruction_set_is_a_fact_not_an_error(show: Show) -> None:
    text = show(isa_in_use=BuildError("TORCHWELD_ISA=sse9 cannot be used"))
    assert "TORCHWELD_ISA=sse9 cannot be used" in text
    assert row(text, "avx2") == ["avx2", "yes", "yes", "no"]


def test_peaks_that_cannot_be_measured_fail_the_command(show: Show) -> None:
    text = show("--measure", code=2, peaks=NotMeasuredError("the machine is busy"))
    assert text == "torchweld: the machine is busy\n"


def test_the_load_is_told_before_peaks_are_measured(
    show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(info_verb, "busy_cores", lambda: 1.5)
    assert show("--measure", peaks=PEAKS).startswith("This machine is busy: other processes use 1.")
    assert json.loads(show("--measure", "--json", peaks=PEAKS))["busy_cores"] == 1.5
    assert "busy" not in show(peaks=PEAKS)
    unknown = NotMeasured("this system does not tell")
    monkeypatch.setattr(info_verb, "busy_cores", lambda: unknown)
    found = json.loads(show("--measure", "--json", peaks=PEAKS))["busy_cores"]
    assert found == {"not_measured": "this system does not tell"}


@pytest.mark.parametrize(
    ("cuda", "words"),
    [
        (
            CudaBuild(architectures=("sm_80", "compute_80"), compiler="nvcc 13.0"),
            "built for sm_80, compute_80, by nvcc 13.0",
        ),
        (CudaBuild(reason="nvcc was not found"), "not built: nvcc was not found"),
    ],
)
def test_what_became_of_the_cuda_kernels_is_told(show: Show, cuda: CudaBuild, words: str) -> None:
    build = replace(BUILD, cuda=cuda)
    assert row(show(build_info=build), "CUDA") == ["CUDA", "kernels", *words.split()]
    told = json.loads(show("--json", build_info=build))["build"]["cuda"]
    assert told["architectures"] == list(cuda.architectures)
    assert told["reason"] == cuda.reason


def test_json_holds_the_same_facts(show: Show) -> None:
    data = json.loads(show("--json", peaks=PEAKS))
    assert data["hardware"]["cpu_model"] == MACHINE.cpu_model
    assert data["build"]["isas"] == ["baseline", "avx2"]
    assert data["isas"][0] == {"name": "avx2", "built": True, "supported": True, "in_use": True}
    assert data["backends"][1]["reasons"] == ["no CUDA device", "CUDA part not built"]
    assert data["backends"][1]["abilities"]["devices"] == ["cuda"]
    assert from_plain(Peaks, data["peaks"]) == PEAKS
    assert data["problem"] is None


def test_unknown_facts_are_unknown(show: Show) -> None:
    bare = replace(MACHINE, instruction_sets=(), memory_bytes=None, cpu_vendor=None)
    text = show(hardware=replace(bare, caches=Caches()))
    assert "L1d unknown, L2 unknown, L3 unknown" in text
    assert row(text, "memory") == ["memory", "unknown"]


def test_the_real_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["hardware"]["torch_version"] == torch.__version__
    assert data["problem"] == kernel_build.build_problem()
    used = [isa for isa in data["isas"] if isa["in_use"]]
    assert [isa["name"] for isa in used] == [kernel_build.isa_in_use()] * len(used)
    assert all(isa["built"] and isa["supported"] for isa in used)
    assert bool(used) == (data["problem"] is None)
    assert {"reference", "torch", "cpu"} <= {backend["name"] for backend in data["backends"]}
