"""What was measured before on this machine: records by what they are about, in the user's cache.

One file for each fingerprint (CPU, instruction set, torch, threads, kernels), written whole after
every record, so that an interrupted plan loses nothing. A file that cannot be read, or is damaged,
counts as empty: what is in it can always be measured again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Generic, TypeVar

from torchweld.core.errors import TorchweldError
from torchweld.core.files import cache_dir, read_json, write_whole
from torchweld.core.records import RecordError, from_plain, to_plain
from torchweld.machine import fingerprint

FORMAT = 2
MOST_ENTRIES = 2000
MOST_BYTES = 1 << 28

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Kept(Generic[T]):
    """A record, and when it was kept: ISO, UTC."""

    record: T
    at: str


class MeasurementCache:
    """Records by what they are about. Without a `path` nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.notice = ""  # why nothing could be kept, if so

    @staticmethod
    def of_this_machine() -> MeasurementCache:
        return MeasurementCache(cache_dir() / f"tuning-{fingerprint.key_here()}.json")

    def recall(self, about: object, kind: type[T]) -> Kept[T] | None:
        """What was kept about this; `about` is known by its repr."""
        found = self._read().get(_name(about, kind))
        if not isinstance(found, dict) or not isinstance(found.get("at"), str):
            return None
        try:
            record = from_plain(kind, found.get("record"), "record")
        except RecordError:
            return None
        return Kept(record=record, at=found["at"][:64])

    def keep(self, about: object, record: object) -> None:
        if self._path is None:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        # Read again: another process may have written meanwhile.
        entry = {"at": now, "record": to_plain(record)}
        entries = {**self._read(), _name(about, type(record)): entry}
        newest = dict(list(entries.items())[-MOST_ENTRIES:])
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps({"torchweld_tuning": FORMAT, "entries": newest}))
        except (OSError, TorchweldError) as error:
            self.notice = f"measurements are not kept for the next plan: {error}"

    def _read(self) -> dict[str, Any]:
        if self._path is None:
            return {}
        try:
            data = read_json(self._path, "record of measurements", MOST_BYTES)
        except TorchweldError:
            return {}
        if not isinstance(data, dict) or data.get("torchweld_tuning") != FORMAT:
            return {}
        entries = data.get("entries")
        return entries if isinstance(entries, dict) else {}


def _name(about: object, kind: type) -> str:
    return hashlib.sha256(f"{kind.__name__} {about!r}".encode()).hexdigest()[:24]
