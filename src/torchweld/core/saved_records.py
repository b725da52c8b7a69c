"""Records in files of their own: marked with what they are and the version of their form.

A file is `{"torchweld_plan": 1, …}`: the mark, its format, and the fields of the record. Files of
earlier formats are brought up to date, step by step, before they are read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from torchweld.core.errors import TorchweldError
from torchweld.core.files import parse_json, read_json, write_whole
from torchweld.core.records import RecordError, from_plain, to_plain

T = TypeVar("T")
# The fields of one format to those of the next. It is given what anybody may have written, and
# leaves what it does not understand for the reader to refuse.
Upgrade = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class FileFormat(Generic[T]):
    """How one kind of record is kept. `remedy`: what to do about a file of another format.

    upgrades: by format, what makes the next one of it
    """

    kind: type[T]
    what: str  # "plan"
    format: int
    remedy: str
    most_bytes: int
    indent: int | None = None
    upgrades: Mapping[int, Upgrade] = field(default_factory=dict)

    @property
    def mark(self) -> str:
        return f"torchweld_{self.what}"

    def text(self, record: T) -> str:
        data = {self.mark: self.format, **to_plain(record)}
        separators = (",", ":") if self.indent is None else None
        return json.dumps(data, allow_nan=False, indent=self.indent, separators=separators)

    def save(self, record: T, path: str | os.PathLike[str]) -> None:
        """Compressed if the name ends in .gz; an existing file is replaced whole."""
        write_whole(path, self.text(record) + "\n")

    def load(self, path: str | os.PathLike[str]) -> T:
        """The opposite of `save`; a TorchweldError that names the file and what is wrong in it."""
        return self._read(read_json(path, self.what, self.most_bytes), str(Path(path)))

    def parse(self, text: str | bytes) -> T:
        """The opposite of `text`."""
        try:
            data = parse_json(text)
        except TorchweldError as error:
            raise TorchweldError(f"the {self.what} cannot be read: {error}") from error
        return self._read(data, f"the {self.what}")

    def _read(self, data: Any, source: str) -> T:
        if not isinstance(data, dict) or self.mark not in data:
            trace = isinstance(data, list) or (isinstance(data, dict) and "traceEvents" in data)
            hint = "; tw.read_trace reads traces" if trace else ""
            raise TorchweldError(f"{source} is not a {self.what} that torchweld saved{hint}")
        fields = {name: value for name, value in data.items() if name != self.mark}
        version = data[self.mark]
        while type(version) is int and version in self.upgrades:
            fields, version = self.upgrades[version](fields), version + 1
        if type(version) is not int or version != self.format:
            shown = version if type(version) is int and abs(version) < 1000 else "unknown"
            raise TorchweldError(
                f"{source} has {self.what} format {shown}; this torchweld reads {self.format}: "
                f"{self.remedy}"
            )
        try:
            return from_plain(self.kind, fields, self.what)
        except RecordError as error:
            raise TorchweldError(f"{source} is damaged: {error}; {self.remedy}") from error
