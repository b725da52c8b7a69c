"""Peak rates of devices by name, as their vendors publish them; used for rooflines only.

Dense rates at boost clock, without sparsity: no kernel exceeds them, and few come near. "float32"
is the rate of plain fp32 arithmetic, "tf32" that of fp32 tensors on tensor cores where the user
allows it. A device that is not listed has no roofline; nothing is guessed from a similar name.
"""

from __future__ import annotations

import re

# Pattern in the name -> TFLOP/s by dtype, GB/s. The first that is found counts.
_PEAKS: tuple[tuple[str, dict[str, float], float], ...] = (
    (
        r"\bH200\b",
        {"float64": 34, "float32": 67, "tf32": 494, "bfloat16": 989, "float8": 1979},
        4800,
    ),
    (
        r"\bH100\b.*PCIe",
        {"float64": 26, "float32": 51, "tf32": 378, "bfloat16": 756, "float8": 1513},
        2000,
    ),
    (
        r"\bH100\b.*NVL",
        {"float64": 30, "float32": 60, "tf32": 417, "bfloat16": 835, "float8": 1670},
        3900,
    ),
    (
        r"\bH100\b",
        {"float64": 34, "float32": 67, "tf32": 494, "bfloat16": 989, "float8": 1979},
        3350,
    ),
    (
        r"\bA100\b.*PCIe.*80GB",
        {"float64": 9.7, "float32": 19.5, "tf32": 156, "bfloat16": 312},
        1935,
    ),
    (r"\bA100\b.*80GB", {"float64": 9.7, "float32": 19.5, "tf32": 156, "bfloat16": 312}, 2039),
    (r"\bA100\b", {"float64": 9.7, "float32": 19.5, "tf32": 156, "bfloat16": 312}, 1555),
    (r"\bL40S\b", {"float32": 91.6, "tf32": 183, "bfloat16": 362, "float8": 733}, 864),
    (r"\bL4\b", {"float32": 30.3, "tf32": 60, "bfloat16": 121, "float8": 242}, 300),
    (r"\bA10\b", {"float32": 31.2, "tf32": 62.5, "bfloat16": 125}, 600),
    (r"\bV100\b.*PCIE", {"float64": 7, "float32": 14, "float16": 112}, 900),
    (r"\bV100\b", {"float64": 7.8, "float32": 15.7, "float16": 125}, 900),
    (r"\bT4\b", {"float32": 8.1, "float16": 65}, 320),
    (
        r"\bMI300X\b",
        {"float64": 81.7, "float32": 163.4, "tf32": 653.7, "bfloat16": 1307, "float8": 2615},
        5300,
    ),
    # A board has two dies, each of which is one device: half of the board's figures.
    (r"\bMI250X\b", {"float64": 47.9, "float32": 47.9, "bfloat16": 191.5}, 1638),
    (r"\bMI250\b", {"float64": 45.3, "float32": 45.3, "bfloat16": 181}, 1638),
)


def peaks_of(name: str) -> tuple[dict[str, float], float | None]:
    """GFLOP/s by dtype and GB/s of the device with this name; ({}, None) if it is not known."""
    for pattern, tflops, gbps in _PEAKS:
        if re.search(pattern, name, re.IGNORECASE):
            gflops = {dtype: 1e3 * rate for dtype, rate in tflops.items()}
            # Tensor cores do both 16-bit types at one rate, if they do bfloat16 at all.
            if "bfloat16" in gflops:
                gflops["float16"] = gflops["bfloat16"]
            if (rate := gflops.pop("float8", None)) is not None:
                gflops["float8_e4m3fn"] = gflops["float8_e5m2"] = rate
            return gflops, gbps
    return {}, None
