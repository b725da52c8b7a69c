"""Who takes part in training: names in, sides out, and the reasons of the others."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence

import torch

from torchweld.bench.bench_cases import Case
from torchweld.bench.runtimes.runtime import DOES_NOT_TRAIN
from torchweld.bench.runtimes.runtime_names import OWN_MODEL, TRAINED, TRAINING_PEERS
from torchweld.bench.training_step import Malloc
from torchweld.core.errors import TorchweldError
from torchweld.core.typed_names import known
from torchweld.machine.hardware import hardware

# Ours, unless others are named: what is kept for the backward, or only the input.
OWN_IN_TRAINING = (OWN_MODEL, f"{OWN_MODEL}:recompute")
# Flags of CPUs that multiply bfloat16 themselves.
NATIVE_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def is_training(cases: Sequence[Case]) -> bool:
    """Raises where only some of them are steps of training, or something else does not fit."""
    trained = [case for case in cases if case.training is not None]
    if trained and len(trained) < len(cases):
        raise TorchweldError(
            "some cells are steps of training and some are not; measure them apart"
        )
    if not trained and any(case.blocks > 1 for case in cases):
        raise TorchweldError(
            "--blocks goes with --training; a call without gradients has one block"
        )
    for case in trained:
        assert case.training is not None
        check_malloc(case.training.malloc)
        if case.mlp.transposed:
            raise TorchweldError(f"{case.mlp.name} is measured by bench --table alone")
    return bool(trained)


def check_malloc(malloc: Malloc) -> None:
    """Raises where malloc cannot be tuned."""
    if malloc == "tuned" and platform.libc_ver()[0] != "glibc":
        raise TorchweldError(
            "--malloc tuned sets thresholds of glibc, which this system does not use"
        )


def trained_backends(names: Sequence[str]) -> tuple[str, ...]:
    """Ours by name, or those that take part if none is named."""
    return tuple(known(name, TRAINED, "backend in training") for name in names) or OWN_IN_TRAINING


def untrained(peers: Sequence[str]) -> dict[str, str]:
    """The peers that do not train, each with that as the reason."""
    return {name: DOES_NOT_TRAIN for name in peers if name not in TRAINING_PEERS}


def native_bf16(
    flags: Sequence[str] | None = None,
    capability: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> bool:
    """Whether the CPU has products of bfloat16, and torch may use them.

    `flags` and `capability` (what torch's own kernels use) are those of this machine if left out.
    """
    flags = hardware().instruction_sets if flags is None else flags
    capability = torch.backends.cpu.get_cpu_capability() if capability is None else capability
    limit = environment.get("ONEDNN_MAX_CPU_ISA", "").upper()
    held = capability in ("AVX2", "DEFAULT") and "bf16" not in flags
    held |= limit not in ("", "DEFAULT") and not ("BF16" in limit or "AMX" in limit)
    return not held and not NATIVE_FLAGS.isdisjoint(flags)
