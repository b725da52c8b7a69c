"""Whole records in the history: a profile or a bench as one cell, so that its page shows all of it.

A record is kept as compressed text. So it takes little room, and nothing takes the figures in it
for figures of the cell.
"""

from __future__ import annotations

import base64
import binascii
import gzip
from collections.abc import Mapping
from typing import Any, TypeVar

from torchweld.core.errors import TorchweldError
from torchweld.core.files import parse_json, unpacked
from torchweld.core.saved_records import SavedRecord
from torchweld.history.kept_runs import Run, RunCell

_T = TypeVar("_T", bound=SavedRecord)
_PACKED = "packed"


def cell_of(kind: type[SavedRecord]) -> str:
    """The name of the cell that holds a record of this kind: "the whole profile"."""
    return f"the whole {kind.FORMAT.what}"


def packed(record: SavedRecord) -> dict[str, str]:
    """The data of that cell; the same record gives the same text."""
    data = gzip.compress(record.to_json().encode(errors="backslashreplace"), 6, mtime=0)
    return {_PACKED: base64.b64encode(data).decode()}


def holds_record(cell: RunCell) -> bool:
    """Whether a cell holds a record, judged by its data: a module may have the same name."""
    return cell.data.keys() == {_PACKED} and isinstance(cell.data[_PACKED], str)


def whole_record(run: Run, kind: type[_T]) -> _T | None:
    """The record that a run was kept with; None if it has none, as in earlier versions."""
    cell = run.cell(cell_of(kind))
    if cell is None or not holds_record(cell):
        return None
    where = f"{cell_of(kind)} of run {run.id} of {run.name}"
    return kind.from_dict(_fields(cell.data, kind, where))


def _fields(data: Mapping[str, Any], kind: type[SavedRecord], where: str) -> Mapping[str, Any]:
    try:
        compressed = base64.b64decode(data[_PACKED], validate=True)
        fields = parse_json(unpacked(compressed, kind.FORMAT.most_bytes))
    except (binascii.Error, ValueError) as error:
        raise TorchweldError(f"{where} cannot be read: {error}") from error
    except TorchweldError as error:
        raise TorchweldError(f"{where} cannot be read: {error}") from error
    if not isinstance(fields, Mapping):
        raise TorchweldError(f"{where} cannot be read: it is not a JSON object")
    return fields
