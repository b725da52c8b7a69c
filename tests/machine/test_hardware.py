"""What torchweld says about the machine is what is there."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import torch

from torchweld.machine import hardware
from torchweld.machine.cpu_identity import parse_cpuinfo, parse_sysctl, read_caches

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
