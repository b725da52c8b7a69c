"""Text in files: written whole or not at all, compressed by name, read up to a limit.

Files may come from anywhere, so nothing beyond the limit is decompressed or parsed.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import secrets
import stat
import zlib
from pathlib import Path
from typing import Any

from torchweld.core.argument_checks import check_path
from torchweld.core.errors import TorchweldError

GZIP = b"\x1f\x8b"
# Decompressed. A profile of a million ops has 300 MB.
MOST_BYTES = 1 << 30
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)


def cache_dir() -> Path:
    """The folder in which figures measured on this machine are kept for this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchweld"


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Writes aside and renames, so that nobody sees half a file. A name in .gz is compressed."""
    check_path("save", path)
    target = Path(path)
    # JSON can name half a character (a lone surrogate); it is written as JSON names it.
    data = text.encode(errors="backslashreplace")
    data = gzip.compress(data, compresslevel=6) if target.suffix == ".gz" else data
    try:
        there = target.stat() if target.exists() else None
        if there is not None and stat.S_IFMT(there.st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            target.write_bytes(data)  # a pipe or a device, which a file must not replace
            return
        _replace(target, data, None if there is None else stat.S_IMODE(there.st_mode))
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise TorchweldError(
            f"{target} cannot be written: {error}; choose another folder or name"
        ) from error


def _replace(target: Path, data: bytes, mode: int | None) -> None:
    """Writes a new file beside the target and moves it there. Nobody can guess its name."""
    fresh = target.with_name(f".{target.name[:80]}.{secrets.token_hex(8)}")
    handle = os.open(fresh, _NEW, 0o666 if mode is None else 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        if mode is not None:
            fresh.chmod(mode)
        fresh.replace(target)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def unpacked(data: bytes, most: int = MOST_BYTES) -> bytes:
    """The content of gzip; a TorchweldError if it is damaged, or more than `most` bytes."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
            found = packed.read(most + 1)
    except (OSError, EOFError, ValueError, zlib.error, MemoryError) as error:
        raise TorchweldError(str(error)) from error
    if len(found) > most:
        raise TorchweldError(f"it holds more than {most:,} bytes")
    return found


def read_whole(path: str | os.PathLike[str], what: str = "file", most: int = MOST_BYTES) -> bytes:
    """The content of a file, decompressed if it is gzip; a TorchweldError if it cannot be read."""
    check_path("load", path)
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
        if data.startswith(GZIP):
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
                data = packed.read(most + 1)
    except (OSError, EOFError, ValueError, zlib.error, MemoryError) as error:
        raise TorchweldError(f"{path} cannot be read as a {what}: {error}") from error
    if len(data) > most:
        raise TorchweldError(
            f"{path} cannot be read as a {what}: it holds more than {most:,} bytes"
        )
    return data


def read_json(path: str | os.PathLike[str], what: str, most: int = MOST_BYTES) -> Any:
    """The JSON of a file; a TorchweldError that names the file if it is not JSON."""
    data = read_whole(path, what, most)
    try:
        return parse_json(data)
    except TorchweldError as error:
        raise TorchweldError(f"{path} cannot be read as a {what}: {error}") from error


def parse_json(data: str | bytes) -> Any:
    """Like `json.loads`, but raises a TorchweldError whatever is wrong."""
    try:
        return json.loads(data)
    except (ValueError, TypeError) as error:
        raise TorchweldError(f"it is not JSON: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise TorchweldError("it is nested too deeply, or too large") from error
