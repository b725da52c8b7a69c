"""`torchweld bench --device`: what goes with a GPU, and a preset where a device is named."""

from __future__ import annotations

from typing import Any

import torch

from torchweld.bench.bench_presets import preset_named
from torchweld.bench.kernel_goals import KernelVerdict
from torchweld.bench.preset_series import Preset
from torchweld.core.errors import TorchweldError

MODELS_ELSEWHERE = (
    "bench measures blocks on a GPU; of a model, torchweld fuse --device cuda measures before and "
    "after, and torchweld profile --device cuda its kernels"
)
# Option -> why it does not go with a GPU.
NOT_THERE = {
    "training": "measures calls without gradients; leave it out",
    "cold": "cannot empty the caches of a GPU; leave it out",
    "table": "is about kernels for the CPU; leave it out",
    "check_parking": "is about processes on the CPU; leave it out",
}


def is_gpu(device: torch.device | None) -> bool:
    return device is not None and device.type != "cpu"


def check_device(options: dict[str, Any]) -> None:
    """Raises for options that do not go with a GPU."""
    if not is_gpu(options["device"]):
        return
    if options["target"] is not None:
        raise TorchweldError(MODELS_ELSEWHERE)
    if options["show"] is not None:
        raise TorchweldError("--show prints a bench that was measured before; leave --device out")
    for name, why in NOT_THERE.items():
        if options[name]:
            raise TorchweldError(f"--{name.replace('_', '-')} with --device cuda {why}")


def asked_preset(options: dict[str, Any]) -> Preset | None:
    """The preset; with `--device`, what it has for that."""
    if not options["preset"]:
        return None
    found = preset_named(options["preset"])
    return found if options["device"] is None else found.on_device()


def kernel_goal_code(verdicts: list[KernelVerdict]) -> int:
    """The exit code of `--goals`: 1 if a side launched unexpected kernels, 2 if nobody knows."""
    words = {one.verdict for one in verdicts}
    if "differs" in words:
        return 1
    return 0 if words == {"as expected"} else 2
