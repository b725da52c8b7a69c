"""`--device` of the verbs: where a model runs, and why it cannot run there."""

from __future__ import annotations

import re
from dataclasses import replace

import click
import torch

from torchweld.core.errors import TorchweldError
from torchweld.machine.gpu_identity import gpu_here
from torchweld.models.targets import Target, moved
from torchweld.ops.gpu import gpu_support

device_option = click.option(
    "--device", metavar="DEVICE", help="Move model and inputs there first: cuda, or cuda:1."
)


def checked_device(text: str | None) -> torch.device | None:
    """The device that was asked for; None if none was. Raises if it is not here.

    A GPU with a number becomes the current one, so that waiting for it waits for the right one.
    """
    if text is None:
        return None
    if text == "cpu":
        return torch.device("cpu")
    if re.fullmatch(r"cuda(:\d+)?", text) is None:
        raise TorchweldError(f"--device {text}: give cpu, cuda, or cuda:1 for the second GPU")
    if why := gpu_support.absence():
        raise TorchweldError(
            f"--device {text} needs a GPU, and there is none here: {why}. Run it where a GPU is, "
            "with a torch that is built for it (docs/gpu.md), or leave --device out"
        )
    device = torch.device(text)
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise TorchweldError(
            f"--device {text}: torch counts {count} of them; the last is cuda:{count - 1}"
        )
    if device.index is not None:
        torch.cuda.set_device(device)
    return device


def on_device(target: Target, device: torch.device | None) -> Target:
    """The target as it is, or moved; with a note of the GPU that it is on."""
    if device is None:
        return target
    there = moved(target, device)
    if device.type == "cpu":
        return there
    return replace(there, notes=(*there.notes, f"on {device}: {gpu_here(device).words}"))
