"""Records that save to a file and load again: the base of plans, profiles, benches and the like."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torchweld.core.argument_checks import check_kind
from torchweld.core.errors import TorchweldError
from torchweld.core.files import parse_json, read_json, write_whole
from torchweld.core.record_format import FormatError, RecordFormat
from torchweld.core.records import RecordError, from_plain, json_text, to_plain

T = TypeVar("T", bound="SavedRecord")


class SavedRecord:
    """The base of a dataclass with a `FORMAT`, which marks it everywhere in JSON."""

    FORMAT: ClassVar[RecordFormat]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON, compressed if the name ends in .gz; an existing file is replaced whole."""
        write_whole(path, self.to_json() + "\n")

    @classmethod
    def load(cls: type[T], path: str | os.PathLike[str]) -> T:
        """The opposite of `save`; a TorchweldError that names the file and what is wrong in it."""
        what, most = cls.FORMAT.what, cls.FORMAT.most_bytes
        return cls._read(read_json(path, what, most), str(Path(path)))

    def to_json(self) -> str:
        return json_text(self, indent=self.FORMAT.indent)

    @classmethod
    def from_json(cls: type[T], text: str) -> T:
        """The opposite of `to_json`."""
        check_kind("from_json", "text", text, str, "what to_json returned")
        try:
            data = parse_json(text)
        except TorchweldError as error:
            raise TorchweldError(f"the {cls.FORMAT.what} cannot be read: {error}") from error
        return cls.from_dict(data)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON. A float that JSON cannot hold becomes "nan", "inf" or "-inf"."""
        data: dict[str, Any] = to_plain(self)
        return data

    @classmethod
    def from_dict(cls: type[T], data: Mapping[str, Any]) -> T:
        """The opposite of `to_dict`; a TorchweldError that says what does not fit."""
        return cls._read(data, f"the {cls.FORMAT.what}")

    @classmethod
    def _read(cls: type[T], data: Any, source: str) -> T:
        form = cls.FORMAT
        known = isinstance(data, Mapping) and (form.unmarked is not None or form.is_marked(data))
        if not known:
            trace = isinstance(data, list) or (isinstance(data, Mapping) and "traceEvents" in data)
            hint = "; tw.read_trace reads traces" if trace else ""
            raise TorchweldError(f"{source} is not a {form.what} that torchweld saved{hint}")
        try:
            fields = form.fields_of(data, form.version if form.unmarked is None else form.unmarked)
            return from_plain(cls, fields, form.what)
        except FormatError as error:
            raise TorchweldError(f"{source} {error}") from None
        except RecordError as error:
            raise TorchweldError(f"{source} is damaged: {error}; {form.remedy}") from error
