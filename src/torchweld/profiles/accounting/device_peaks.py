"""Peak rates of devices by name, as their vendors publish them; used for rooflines only.

Dense rates at boost clock, without sparsity: no kernel exceeds them, and few come near. "float32"
is the rate of plain fp32 arithmetic, "tf32" that of fp32 tensors on tensor cores where the user
allows it. 16-bit rates are those with sums in fp32, as torch's products have them: GeForce cards do
half of the rate that is advertised, which is with sums in fp16. A device that is not listed has no
roofline, a type that is not listed neither; nothing is guessed from a similar name.

Every row says where its figures were read. Tables that give rates with sparsity were halved.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class DevicePeaks:
    """TFLOP/s by dtype, and GB/s. `pattern` is searched for in the device's name."""

    pattern: str
    gbps: float
    source: str
    tflops: dict[str, float] = field(default_factory=dict)


_H100 = "NVIDIA H100 datasheet, as archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html has it"
_A100 = "NVIDIA A100 Tensor Core GPU datasheet, nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_V100 = "NVIDIA V100 datasheet, volta-v100-datasheet-update-us-1165301-r5.pdf"
_MI200 = (
    "AMD's table of the MI200 series, as zexron.com/amd-mi250-x-aldebaran-as-mcm-with-up-to-479-"
    "teraflop-s-and-560-watt-tdp has it; rocm.docs.amd.com (bandwidth)"
)
# What AMD says of it are ratios to the MI250X: 1.7 in fp64, 3.4 in fp32 and in 16-bit products.
_MI300X = (
    "AMD at Hot Chips 2024, as partofstyle.com has it (next-gen-chips-to-boast-320-cdna-3-compute-"
    "units); jaredwatkins.com/research/ai-accelerators/amd-instinct/mi300-series (1.3 PFLOP/s in "
    "fp16, 2.6 in fp8, 5.3 TB/s)"
)
_B200 = "NVIDIA Blackwell datasheet; glennklockwood.com/garden/processors/B200"
_RTX_90 = "hmc-tech.com/gpu/nvidia-geforce-rtx-4090-d-vs-nvidia-geforce-rtx-3090-ti"

# The first whose pattern is found counts. Laptop chips have the names of desktop cards, and lower
# rates.
PEAKS: tuple[DevicePeaks, ...] = (
    DevicePeaks(
        pattern=r"\bGB200\b",
        tflops={"float64": 45, "float32": 90, "tf32": 1250, "bfloat16": 2500, "float8": 5000},
        gbps=8000,
        source=_B200,
    ),
    DevicePeaks(
        pattern=r"\bB200\b",
        tflops={"float64": 40, "float32": 80, "tf32": 1100, "bfloat16": 2250, "float8": 4500},
        gbps=8000,
        source=_B200,
    ),
    DevicePeaks(
        pattern=r"\bH200\b.*NVL",
        tflops={"bfloat16": 835.5, "float8": 1670.5},
        gbps=4800,
        source="NVIDIA H200 datasheet; morphllm.com/nvidia-h200 (halved)",
    ),
    DevicePeaks(
        pattern=r"\bH200\b",
        tflops={"float64": 34, "float32": 67, "tf32": 494, "bfloat16": 989, "float8": 1979},
        gbps=4800,
        source="NVIDIA H200 datasheet; itkb.uw.cz, H200 vs B300",
    ),
    DevicePeaks(
        pattern=r"\bH100\b.*PCIe",
        tflops={"float64": 26, "float32": 51, "tf32": 378, "bfloat16": 756, "float8": 1513},
        gbps=2000,
        source=_H100,
    ),
    DevicePeaks(
        pattern=r"\bH100\b(?!.*NVL)",  # no sheet of the NVL was at hand
        tflops={"float64": 34, "float32": 67, "tf32": 494, "bfloat16": 989, "float8": 1979},
        gbps=3350,
        source=_H100,
    ),
    DevicePeaks(
        pattern=r"\bA100\b.*PCIe.*80GB",
        tflops={"float64": 9.7, "float32": 19.5, "tf32": 156, "bfloat16": 312},
        gbps=1935,
        source=_A100,
    ),
    DevicePeaks(
        pattern=r"\bA100\b.*80GB",
        tflops={"float64": 9.7, "float32": 19.5, "tf32": 156, "bfloat16": 312},
        gbps=2039,
        source=_A100,
    ),
    DevicePeaks(
        pattern=r"\bA100\b",
        tflops={"float64": 9.7, "float32": 19.5, "tf32": 156, "bfloat16": 312},
        gbps=1555,
        source=_A100,
    ),
    DevicePeaks(
        pattern=r"\bL40S\b",
        tflops={"float32": 91.6, "tf32": 183, "bfloat16": 362, "float8": 733},
        gbps=864,
        source="NVIDIA L40S datasheet; mullet.se/product.html?product_id=355414",
    ),
    DevicePeaks(
        pattern=r"\bL40\b",
        tflops={"float32": 90.5, "tf32": 90.5, "bfloat16": 181, "float8": 362},
        gbps=864,
        source="NVIDIA L40 datasheet; mullet.se/product.html?product_id=355414",
    ),
    DevicePeaks(
        pattern=r"\bL4\b",
        tflops={"float32": 30.3, "tf32": 60, "bfloat16": 121, "float8": 242},
        gbps=300,
        source="NVIDIA L4 datasheet, as store.sourcecode.com has it (halved)",
    ),
    DevicePeaks(
        pattern=r"\bA40\b",
        tflops={"float32": 37.4, "tf32": 74.8, "bfloat16": 149.7},
        gbps=696,
        source="NVIDIA A40 datasheet, as ecer.com has it (p1bsay9)",
    ),
    DevicePeaks(
        pattern=r"\bA10\b",
        tflops={"float32": 31.2, "tf32": 62.5, "bfloat16": 125},
        gbps=600,
        source="NVIDIA A10 datasheet, a10-datasheet.pdf",
    ),
    DevicePeaks(
        pattern=r"\bV100\b.*PCIE",
        tflops={"float64": 7, "float32": 14, "float16": 112},
        gbps=900,
        source=_V100,
    ),
    DevicePeaks(
        pattern=r"\bV100\b",
        tflops={"float64": 7.8, "float32": 15.7, "float16": 125},
        gbps=900,
        source=_V100,
    ),
    DevicePeaks(
        pattern=r"\bT4\b",
        tflops={"float32": 8.1, "float16": 65},
        gbps=320,
        source="NVIDIA T4 datasheet, t4-tensor-core-datasheet-951643.pdf",
    ),
    # GeForce. The 16-bit rates of the RTX 3090, 5080 and 5090 with sums in fp32 were found in no
    # table, so they are not here.
    DevicePeaks(
        pattern=r"\bRTX 5090\b(?! D| Laptop)",
        tflops={"float32": 104.8},
        gbps=1792,
        source="tomshardware.com, RTX 5090 versus RTX 4090; fpsbench.com, RTX 5090",
    ),
    DevicePeaks(
        pattern=r"\bRTX 5080\b(?! Laptop)",
        tflops={"float32": 56.28},
        gbps=960,
        source="hmc-tech.com/gpu/nvidia-geforce-rtx-5080-vs-amd-radeon-rx-540; biggo.com, RTX 5080",
    ),
    DevicePeaks(
        pattern=r"\bRTX 4090 D\b",
        tflops={"float32": 73.5, "tf32": 73.5, "bfloat16": 147.1, "float8": 294.2},
        gbps=1008,
        source=f"{_RTX_90}; fpsbench.com, RTX 4090 D",
    ),
    DevicePeaks(
        pattern=r"\bRTX 4090\b(?! Laptop)",
        tflops={"float32": 82.6, "tf32": 82.6, "bfloat16": 165.2, "float8": 330.3},
        gbps=1008,
        source="waredb.com/processor/nvidia-geforce-rtx-4090",
    ),
    DevicePeaks(
        pattern=r"\bRTX 3090 Ti\b(?! Laptop)",
        tflops={"float32": 40, "tf32": 40, "bfloat16": 80},
        gbps=1008,
        source=f"{_RTX_90}; biggo.com, RTX 5080 review",
    ),
    DevicePeaks(
        pattern=r"\bRTX 3090\b(?! Laptop)",
        tflops={"float32": 35.6},
        gbps=936,
        source="holynerdvana.blogspot.com/2022/10/nvidia-geforce-rtx-3090-specifications.html",
    ),
    DevicePeaks(
        pattern=r"\bMI300X\b",
        tflops={
            "float64": 81.7,
            "float32": 163.4,
            "bfloat16": 1307,
            "float8": 2615,
        },
        gbps=5300,
        source=_MI300X,
    ),
    # A board has two dies, each of which is one device: half of the board's figures.
    DevicePeaks(
        pattern=r"\bMI250X\b",
        tflops={"float64": 47.9, "float32": 47.9, "bfloat16": 191.5},
        gbps=1638,
        source=_MI200,
    ),
    DevicePeaks(
        pattern=r"\bMI250\b",
        tflops={"float64": 45.3, "float32": 45.3, "bfloat16": 181},
        gbps=1638,
        source=_MI200,
    ),
)


def found_peaks(name: str) -> DevicePeaks | None:
    """The row of the device with this name; None if it is not listed."""
    return next((row for row in PEAKS if re.search(row.pattern, name, re.IGNORECASE)), None)


def peaks_of(name: str) -> tuple[dict[str, float], float | None]:
    """GFLOP/s by dtype and GB/s of the device with this name; ({}, None) if it is not known."""
    row = found_peaks(name)
    if row is None:
        return {}, None
    gflops = {dtype: 1e3 * rate for dtype, rate in row.tflops.items()}
    # Tensor cores do both 16-bit types at one rate, if they do bfloat16 at all.
    if "bfloat16" in gflops:
        gflops["float16"] = gflops["bfloat16"]
    if (rate := gflops.pop("float8", None)) is not None:
        gflops["float8_e4m3fn"] = gflops["float8_e5m2"] = rate
    return gflops, row.gbps
