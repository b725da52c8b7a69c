"""What is kept of a run, as plain data: where it ran, how it was set up, its cells with samples."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from torchweld import hardware
from torchweld.history.places import commit_of
from torchweld.records import Bounds, Count, Length, Measured, Word

Kind = Literal["bench", "gate", "fuse", "profile"]

# Packages whose version changes what a run is about, where they are installed.
PACKAGES = ("onnxruntime", "openvino", "transformers")


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Where a run was measured. Times are comparable where `key` is the same."""

    key: Word  # of torchweld.hardware: CPU, instruction set, torch, threads, kernels
    cpu: Word
    isa: Word | None
    torch: Word
    threads: Count
    torchweld: Word
    kernels: Word | None  # hash of the sources the compiled part was built from
    versions: dict[str, Word] = field(default_factory=dict)
    commit: Word | None = None  # checked out in the current folder

    def differences(self, other: Fingerprint) -> list[str]:
        """What is not the same in words, the commit left out: that one is meant to differ."""
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


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


def fingerprint_here() -> Fingerprint:
    """Of this process, in this folder, now."""
    here, build = hardware.hardware(), hardware.build_info()
    usable = build is not None and hardware.build_problem() is None
    found = {name: version_of(name) for name in PACKAGES}
    return Fingerprint(
        key=hardware.fingerprint(),
        cpu=here.cpu_model,
        isa=hardware.isa_in_use(),
        torch=here.torch_version,
        threads=here.threads,
        torchweld=version_of("torchweld") or "unknown",
        kernels=build.source_hash if build is not None and usable else None,
        versions={name: version for name, version in found.items() if version is not None},
        commit=commit_of(Path.cwd()),
    )


def target_words(target: str, inputs: Sequence[str], training: bool) -> str:
    """What a run of a model is about, as it was typed: `Run.what`."""
    return " ".join([target, *inputs, *(["training"] if training else [])])


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True, kw_only=True)
class RunCell:
    """One thing measured: figures in `data`, raw series in `samples` (see `samples.py`)."""

    cell: str
    data: dict[str, Any]
    samples: dict[str, tuple[Measured, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """What stands in the row of a run."""

    id: Count
    name: Annotated[str, Length(1, 100)]
    kind: Word
    what: str  # the target or the grid, in words
    created: Annotated[str, Length(1, 64)]  # ISO, UTC
    fingerprint: Fingerprint
    settings: dict[str, Any]
    summary: dict[str, Any] | None
    finished: Annotated[int, Bounds(0, 1)]


@dataclass(frozen=True, kw_only=True)
class Damaged:
    """A run whose row makes no sense; it keeps its place among those of its name."""

    id: int
    name: str
    finished: bool
    problem: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """A kept run. Its cells are read when they are first asked for, while the history is open."""

    id: int
    name: str
    kind: str
    what: str  # the target or the grid, in words
    created: str  # ISO, UTC
    fingerprint: Fingerprint
    settings: Mapping[str, Any]
    summary: Mapping[str, Any] | None
    finished: bool
    read: Any = field(repr=False, compare=False)  # () -> cells

    @cached_property
    def cells(self) -> tuple[RunCell, ...]:
        found: tuple[RunCell, ...] = self.read()
        return found

    def cell(self, name: str) -> RunCell | None:
        return next((one for one in self.cells if one.cell == name), None)
