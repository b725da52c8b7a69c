"""What a backend can do, as plain data.

`plan`, welding, `bench` and `torchweld info` read it; none of them knows a backend by name. What
depends on the block, the shapes or the machine, the backend answers itself (`unsupported_reasons`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Use = Literal["inference", "training"]

FLOATS = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, kw_only=True)
class BackendMode:
    """One of the ways in which a backend runs blocks."""

    name: str
    packs: bool = False  # keeps a copy of the weights, in a layout of its own
    recomputes: bool = False  # keeps x alone for the backward, and computes hidden values again
    planned: tuple[Use, ...] = ()  # what plans try it for


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What one backend can do.

    The first mode is the default. It keeps no copy, so it can serve while weights change. At most
    one mode packs and one recomputes, because a `Choice` names a backend and says `packed`,
    `recompute` or neither. A backend with more ways to run a block is several rows of `BACKENDS`,
    which may come from one file.
    """

    devices: tuple[str, ...] | None  # torch's device types (ROCm's is "cuda"); None: any
    dtypes: tuple[str, ...] = FLOATS
    modes: tuple[BackendMode, ...]
    needs: str  # what must be installed, in words
    trains: bool  # results have gradients
    # Applies the dropout of a form, with the random numbers that `F.dropout` draws.
    drops_out: bool = False
    deterministic: bool  # the same bits at every run
    # `torch.ops.torchweld.chain` on its devices is this backend: graphs for any rows may hold it.
    in_graphs: bool = False
    # `torchweld._C.forward` serves its calls, and keeps its packed copies. CPU tensors only.
    c_forward: bool = False
    in_speed_tables: bool = False  # the tables that torchweld ships are about it
    compiles: bool = False  # by torch.compile: takes seconds per shape, so plans must be asked to

    def __post_init__(self) -> None:
        assert not self.modes[0].packs, self.modes
        assert not self.modes[0].recomputes, self.modes
        assert sum(mode.packs for mode in self.modes) <= 1, self.modes
        assert sum(mode.recomputes for mode in self.modes) <= 1, self.modes

    @property
    def packed_mode(self) -> BackendMode | None:
        """The mode that keeps a copy of the weights, if there is one."""
        return next((mode for mode in self.modes if mode.packs), None)

    @property
    def recompute_mode(self) -> BackendMode | None:
        """The mode that keeps x alone for the backward, if there is one."""
        return next((mode for mode in self.modes if mode.recomputes), None)

    def runs_on(self, devices: Collection[str]) -> bool:
        """Whether it serves any of these device types."""
        return self.devices is None or not set(self.devices).isdisjoint(devices)
