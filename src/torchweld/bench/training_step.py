"""What a step of training is: forward, backward, and what stands around them. A record.

The call that takes such a step is made in `step_calls.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from torchweld.core.errors import TorchweldError
from torchweld.core.typed_names import known
from torchweld.profiles.step_faults import KEEP_MEMORY

Malloc = Literal["stock", "tuned"]
MALLOCS: tuple[Malloc, ...] = get_args(Malloc)
OPTIMIZERS = ("adamw", "sgd")
# Torch's names of what autocast computes in, and how they are shown.
AUTOCAST = {"bfloat16": "bf16", "float16": "fp16"}

# The settings that `torchweld profile` advises: glibc keeps freed memory, so steps meet no fresh
# pages.
TUNED_MALLOC = dict(setting.split("=") for setting in KEEP_MEMORY.split())
# Stock malloc means that none of these is set, whatever our own environment has.
MALLOC_SETTINGS = tuple(dict.fromkeys([*TUNED_MALLOC, "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"]))


def malloc_environment(malloc: Malloc) -> Mapping[str, str | None]:
    """What a worker's environment has for it; None: nothing, even if ours has."""
    stock: dict[str, str | None] = dict.fromkeys(MALLOC_SETTINGS)
    return {**stock, **TUNED_MALLOC} if malloc == "tuned" else stock


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """Gradients are None before each step, unless it accumulates.

    accumulate: gradients exist, and each step adds to them
    autocast:   what autocast computes in, by torch's name; empty: it is off
    optimizer:  steps after the backward, `fused=True`; empty: forward and backward alone
    malloc:     whether glibc's malloc is told to keep freed memory
    """

    accumulate: bool = False
    autocast: str = ""
    optimizer: str = ""
    malloc: Malloc = "stock"

    def __post_init__(self) -> None:
        if self.autocast:
            known(self.autocast, AUTOCAST, "autocast dtype")
        if self.optimizer:
            known(self.optimizer, OPTIMIZERS, "optimizer")
        if self.optimizer and self.accumulate:
            raise TorchweldError(
                "a step that accumulates has no optimizer, which would use up what is added; leave "
                "one of them out"
            )

    @property
    def marks(self) -> str:
        """What tells it from others in a table, such as `adamw tuned`; empty for the plain step."""
        return " ".join(self._marks())

    def _marks(self) -> Iterator[str]:
        if self.accumulate:
            yield "acc"
        if self.optimizer:
            yield self.optimizer
        if self.malloc == "tuned":
            yield "tuned"
