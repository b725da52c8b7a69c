"""The mark of a saved record: what it is, and the version of its format.

A plan is `{"torchweld_plan": 2, …}`, a comparison `{"kind": "torchweld.comparison", "version": 2,
…}`: the mark, then the fields. Data of earlier versions are upgraded step by step before they are
read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchweld.core.errors import TorchweldError
from torchweld.core.files import MOST_BYTES

# The fields of one version -> those of the next. Anybody may have written the data: what an upgrade
# does not understand it leaves for the reader to refuse.
Upgrade = Callable[[dict[str, Any]], dict[str, Any]]


class FormatError(TorchweldError):
    """The mark names another version than this torchweld reads."""


@dataclass(frozen=True, kw_only=True)
class RecordFormat:
    """The format of one kind of record in JSON.

    what:       "plan"; in messages and in the mark
    remedy:     what to do about a file that cannot be read
    upgrades:   version -> what turns its fields into those of the next
    unmarked:   the version of files without a mark; None if there never were any
    by_kind:    the mark is `{"kind": "torchweld.plan", "version": 2}`
    all_fields: fields with their default value are written too, here and in records inside
    """

    what: str
    version: int
    remedy: str
    upgrades: Mapping[int, Upgrade] = field(default_factory=dict)
    unmarked: int | None = None
    by_kind: bool = False
    all_fields: bool = False
    indent: int | None = None
    most_bytes: int = MOST_BYTES

    def mark(self, version: object) -> dict[str, Any]:
        if self.by_kind:
            return {"kind": f"torchweld.{self.what}", "version": version}
        return {f"torchweld_{self.what}": version}

    def is_marked(self, data: Mapping[str, Any]) -> bool:
        if self.by_kind:
            return data.get("kind") == f"torchweld.{self.what}"
        return f"torchweld_{self.what}" in data

    def fields_of(self, data: Mapping[str, Any], unmarked: Any) -> dict[str, Any]:
        """The fields of the current version. `unmarked` is the version of data without a mark."""
        fields, version = dict(data), unmarked
        if self.is_marked(data):
            version = [fields.pop(name, None) for name in self.mark(None)][-1]
        while type(version) is int and version in self.upgrades:
            fields, version = self.upgrades[version](fields), version + 1
        if type(version) is not int or version != self.version:
            shown = version if type(version) is int and abs(version) < 1000 else "unknown"
            raise FormatError(
                f"has {self.what} format {shown}; this torchweld reads {self.version}: "
                f"{self.remedy}"
            )
        return fields
