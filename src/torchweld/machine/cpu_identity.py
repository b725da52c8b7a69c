"""What the operating system says about the CPU: text or files in, plain dataclasses out.

Linux is read from /proc/cpuinfo and /sys, macOS from sysctl. Elsewhere, and for what a system does
not say, the answer is None rather than a guess.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Caches:
    """Bytes of one core's data caches; None if the system does not say."""

    l1d_bytes: int | None = None
    l2_bytes: int | None = None
    l3_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class CpuIdentity:
    """Name, maker, feature flags (as Linux spells them) and physical cores."""

    model: str | None
    vendor: str | None
    flags: frozenset[str]
    cores: int | None


def parse_cpuinfo(text: str) -> CpuIdentity:
    """Read Linux's /proc/cpuinfo, in x86's or Arm's form."""
    cpus: list[dict[str, str]] = []
    for block in re.split(r"\n\s*\n", text.strip()):
        pairs = (line.partition(":") for line in block.splitlines())
        cpus.append({key.strip().lower(): value.strip() for key, _, value in pairs})
    first = cpus[0]
    model = first.get("model name")
    if model is None and "cpu part" in first:
        model = f"implementer {first.get('cpu implementer', '?')} part {first['cpu part']}"
    flags = first.get("flags") or first.get("features") or ""
    cores = {(cpu["physical id"], cpu["core id"]) for cpu in cpus if "core id" in cpu}
    return CpuIdentity(
        model=model,
        vendor=first.get("vendor_id") or first.get("cpu implementer"),
        flags=frozenset(flags.split()),
        cores=len(cores) or None,
    )


def parse_sysctl(text: str) -> CpuIdentity:
    """Read macOS's `sysctl machdep.cpu hw`."""
    values = dict(re.findall(r"^([\w.]+): *(.*)$", text, re.MULTILINE))
    flags = {
        flag
        for key in ("machdep.cpu.features", "machdep.cpu.leaf7_features")
        for flag in values.get(key, "").lower().split()
    }
    flags = {{"avx1.0": "avx", "sse4.2": "sse4_2"}.get(flag, flag) for flag in flags}
    for key, flag in (("AdvSIMD", "asimd"), ("FEAT_BF16", "bf16"), ("FEAT_FP16", "asimdhp")):
        if values.get(f"hw.optional.arm.{key}") == "1":
            flags.add(flag)
    cores = values.get("hw.physicalcpu", "")
    return CpuIdentity(
        model=values.get("machdep.cpu.brand_string"),
        vendor=values.get("machdep.cpu.vendor"),
        flags=frozenset(flags),
        cores=int(cores) if cores.isdigit() else None,
    )


def read_caches(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> Caches:
    """Linux's description of one CPU's caches; instruction caches are left out."""
    sizes: dict[str, int] = {}
    units = {"": 1, "K": 1024, "M": 1024**2}
    for index in sorted(folder.glob("index*")):
        try:
            level, kind, size = (
                (index / name).read_text().strip() for name in ("level", "type", "size")
            )
        except OSError:
            continue
        number = re.fullmatch(r"(\d+)([KM]?)", size)
        if kind != "Instruction" and number is not None:
            sizes[level] = int(number[1]) * units[number[2]]
    return Caches(l1d_bytes=sizes.get("1"), l2_bytes=sizes.get("2"), l3_bytes=sizes.get("3"))


def _sysctl() -> str:
    try:
        done = subprocess.run(["sysctl", "machdep.cpu", "hw"], capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout


@lru_cache(maxsize=1)
def identify() -> tuple[CpuIdentity, Caches]:
    """This machine's CPU and its caches."""
    if sys.platform == "darwin":
        text = _sysctl()
        sizes = dict(
            re.findall(r"^hw\.(l1dcachesize|l2cachesize|l3cachesize): *(\d+)$", text, re.M)
        )
        caches = {key: int(size) or None for key, size in sizes.items()}
        return parse_sysctl(text), Caches(
            l1d_bytes=caches.get("l1dcachesize"),
            l2_bytes=caches.get("l2cachesize"),
            l3_bytes=caches.get("l3cachesize"),
        )
    try:
        return parse_cpuinfo(Path("/proc/cpuinfo").read_text()), read_caches()
    except OSError:
        return CpuIdentity(model=None, vendor=None, flags=frozenset(), cores=None), Caches()
