"""Files are written whole or not at all, compressed where their name says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchweld.errors import TorchweldError
from torchweld.files import GZIP, read_whole, write_whole


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_what_was_written_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for text in ("the first", "µ, and the second"):
        write_whole(path, text)
        assert read_whole(path).decode() == text
    assert path.read_bytes().startswith(GZIP) == name.endswith(".gz")
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(TorchweldError, match="cannot be written"):
        write_whole(tmp_path / "taken", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
