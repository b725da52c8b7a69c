"""Where something was measured: the machine and its set-up, in words and as a key.

Times are comparable if `key` is the same; if not, the words say what differs.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from torchweld.core.record_fields import Count, Word
from torchweld.machine import hardware, kernel_build

# Packages whose version matters for a run, if they are installed.
PACKAGES = ("onnxruntime", "openvino", "transformers")


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Where a run was measured, or a plan made. Times are comparable if `key` is the same."""

    key: Word  # see `key_here`: CPU, instruction set, torch, threads, kernels
    cpu: Word
    isa: Word | None
    torch: Word
    threads: Count
    torchweld: Word
    kernels: Word | None  # hash of the sources the compiled part was built from
    versions: dict[str, Word] = field(default_factory=dict)
    commit: Word | None = None  # checked out in the current folder
    gpu: Word | None = None  # the GPUs that the model was on, their driver and Triton

    def differences(self, other: Fingerprint) -> list[str]:
        """What differs, in words. The commit is left out: it is meant to differ."""
        found = []
        for one in fields(self):
            a, b = getattr(self, one.name), getattr(other, one.name)
            if one.name in ("key", "commit", "versions") or a == b:
                continue
            found.append(f"{one.name} {_shown(a)} against {_shown(b)}")
        for name in sorted(self.versions.keys() | other.versions.keys()):
            a, b = self.versions.get(name), other.versions.get(name)
            if a != b:
                found.append(f"{name} {_shown(a)} against {_shown(b)}")
        return found

    def since(self, here: Fingerprint) -> list[str]:
        """What changed since then of what the key depends on, one sentence each."""
        found = []
        if self.cpu != here.cpu:
            found.append(f"made on {self.cpu}, this is {here.cpu}")
        if self.isa != here.isa:
            found.append(f"made for {self.isa or NO_KERNELS}, {here.isa or NO_KERNELS} here")
        if self.gpu != here.gpu:
            found.append(
                f"made with the model on {self.gpu or NO_GPU}, it is on {here.gpu or NO_GPU}"
            )
        if self.torch != here.torch:
            found.append(f"made for torch {self.torch}, this is {here.torch}")
        if self.threads != here.threads:
            word = "thread" if self.threads == 1 else "threads"
            found.append(f"made with {self.threads} {word}, {here.threads} here")
        # Without compiled kernels there is no instruction set either, and the line above says so.
        if self.kernels != here.kernels and self.kernels and here.kernels:
            same = self.torchweld == here.torchweld
            why = "was rebuilt" if same else f"{self.torchweld}, this is {here.torchweld}"
            found.append(f"made with other kernels (torchweld {why})")
        return found


NO_KERNELS = "no compiled kernels"
NO_GPU = "the CPU alone"


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


def taken_here(commit: str | None = None, gpus: Sequence[str] = ()) -> Fingerprint:
    """The fingerprint of this process, now. `gpus`: see `gpu_identity.set_ups_of`."""
    here, build = hardware.hardware(), kernel_build.build_info()
    usable = build is not None and kernel_build.build_problem() is None
    found = {name: version_of(name) for name in PACKAGES}
    return Fingerprint(
        key=key_here(gpus),
        cpu=here.cpu_model,
        isa=kernel_build.isa_in_use(),
        torch=here.torch_version,
        threads=here.threads,
        torchweld=version_of("torchweld") or "unknown",
        kernels=build.source_hash if build is not None and usable else None,
        versions={name: version for name, version in found.items() if version is not None},
        commit=commit,
        gpu=" and ".join(gpus) or None,
    )


def key_here(gpus: Sequence[str] = ()) -> str:
    """Twelve hex digits that stay the same as long as earlier figures still apply.

    `gpus`: those that what was measured ran on. What ran on the CPU does not depend on any.
    """
    here = hardware.hardware()
    build = kernel_build.build_info()
    parts = (
        here.cpu_model,
        str(kernel_build.isa_in_use()),
        here.torch_version,
        str(here.threads),
        build.source_hash if build is not None and kernel_build.build_problem() is None else "none",
        *gpus,
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
