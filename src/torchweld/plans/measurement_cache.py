"""What was measured on this machine before, in the user's cache.

There is one file per fingerprint (CPU, instruction set, torch, threads, kernels, and the GPUs
that the model is on). It is written whole after every record, so that an interrupted plan loses
nothing. A file that cannot be read counts as empty, since everything in it can be measured again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from torchweld.core.errors import TorchweldError
from torchweld.core.files import cache_dir
from torchweld.core.record_fields import Word
from torchweld.core.record_format import RecordFormat
from torchweld.core.records import RecordError, from_plain, to_plain
from torchweld.core.saved_records import SavedRecord
from torchweld.machine import fingerprint
from torchweld.plans.plan import Tuning, Whole

MOST_ENTRIES = 2000

T = TypeVar("T", Tuning, Whole)


@dataclass(frozen=True, kw_only=True)
class CachedRecord:
    """When it was measured, in UTC, and the record as plain data."""

    at: Word
    record: Any


@dataclass(frozen=True, kw_only=True)
class CacheFile(SavedRecord):
    """The records by a hash of what they are about, the newest last."""

    FORMAT = RecordFormat(what="tuning", version=2, remedy="measure again", most_bytes=1 << 28)

    entries: dict[str, CachedRecord] = field(default_factory=dict)


class MeasurementCache:
    """Records by what they are about. Without a `path`, nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.notice = ""  # why records could not be kept; "" if they could

    @staticmethod
    def of_this_machine(gpus: Sequence[str] = ()) -> MeasurementCache:
        """The cache for a model that is on these GPUs."""
        return MeasurementCache(cache_dir() / f"tuning-{fingerprint.key_here(gpus)}.json")

    def recall(self, about: object, kind: type[T]) -> T | None:
        """The record that was kept about this. `about` is recognised by its repr."""
        found = self._entries().get(_name(about, kind))
        if found is None:
            return None
        try:
            return replace(from_plain(kind, found.record), remembered=found.at)
        except RecordError:
            return None

    def keep(self, about: object, record: Tuning | Whole) -> None:
        if self._path is None:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        entry = CachedRecord(at=now, record=to_plain(record))
        # Read again, since another process may have written meanwhile.
        entries = {**self._entries(), _name(about, type(record)): entry}
        newest = dict(list(entries.items())[-MOST_ENTRIES:])
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            CacheFile(entries=newest).save(self._path)
        except (OSError, TorchweldError) as error:
            self.notice = f"measurements are not kept for the next plan: {error}"

    def _entries(self) -> dict[str, CachedRecord]:
        try:
            return {} if self._path is None else CacheFile.load(self._path).entries
        except TorchweldError:
            return {}


def _name(about: object, kind: type) -> str:
    return hashlib.sha256(f"{kind.__name__} {about!r}".encode()).hexdigest()[:24]
