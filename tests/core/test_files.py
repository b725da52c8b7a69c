"""Files are written whole or not at all, compressed where their name says so."""

from __future__ import annotations

import gzip
import json
import os
import secrets
from pathlib import Path

import pytest

from torchweld.core.errors import TorchweldError
from torchweld.core.files import GZIP, read_json, read_whole, write_whole


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


def test_the_file_aside_is_new_and_nobody_can_guess_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []

    def watched(path: Path, flags: int, mode: int = 0o777) -> int:
        seen.append((Path(path).name, flags))
        return real(path, flags, mode)

    real = os.open
    monkeypatch.setattr(os, "open", watched)
    for _ in range(2):
        write_whole(tmp_path / "a.json", "text")
    (first, flags), (second, _) = seen
    assert first != second
    assert flags & os.O_EXCL
    assert flags & os.O_CREAT
    assert str(os.getpid()) not in first
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_file_that_waits_under_the_name_aside_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr(secrets, "token_hex", lambda size: "known")
    (tmp_path / ".a.json.known").symlink_to(victim)
    with pytest.raises(TorchweldError, match="cannot be written"):
        write_whole(tmp_path / "a.json", "text")
    assert victim.read_text() == "mine"
    assert (tmp_path / ".a.json.known").is_symlink()  # nor removed


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_permissions_stay_as_they_are(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "a.json"
    path.write_text("before")
    path.chmod(mode)
    write_whole(path, "after")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("after", mode)


def test_a_new_file_has_the_permissions_that_new_files_have(tmp_path: Path) -> None:
    (tmp_path / "usual").write_text("")
    write_whole(tmp_path / "a.json", "text")
    assert (tmp_path / "a.json").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_an_interrupt_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "a.json").write_text("before")
    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "a.json", "after")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "before"


def test_a_device_is_written_to_and_not_replaced() -> None:
    write_whole("/dev/null", "text")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("name", ["a\0b.json", "x" * 300 + ".json"])
def test_a_name_that_cannot_be_is_said(tmp_path: Path, name: str) -> None:
    with pytest.raises(TorchweldError, match="cannot be written"):
        write_whole(tmp_path / name, "text")
    with pytest.raises(TorchweldError, match="cannot be read"):
        read_whole(tmp_path / name)


def test_half_a_character_is_written_as_json_names_it(tmp_path: Path) -> None:
    write_whole(tmp_path / "a.json", json.dumps("\ud800", ensure_ascii=False))
    assert read_json(tmp_path / "a.json", "text") == "\ud800"


def test_no_more_is_read_or_unpacked_than_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "bomb").write_bytes(gzip.compress(bytes(10_000_000)))
    (tmp_path / "large").write_bytes(bytes(2000))
    for name in ("bomb", "large"):
        with pytest.raises(TorchweldError, match="holds more than 1,000 bytes"):
            read_whole(tmp_path / name, most=1000)
    with pytest.raises(TorchweldError, match="holds more than 1,000 bytes"):
        read_whole("/dev/zero", most=1000)
