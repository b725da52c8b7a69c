"""Text in files: written whole or not at all, compressed where the name says so."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

from torchweld.arguments import check_path
from torchweld.errors import TorchweldError

GZIP = b"\x1f\x8b"


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Written aside and renamed, so that nobody sees half a file; compressed if it ends in .gz."""
    check_path("save", path)
    target, data = Path(path), text.encode()
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        fresh.write_bytes(gzip.compress(data, compresslevel=6) if target.suffix == ".gz" else data)
        fresh.replace(target)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise TorchweldError(
            f"{target} cannot be written: {error}; choose another folder or name"
        ) from error


def read_whole(path: str | os.PathLike[str]) -> bytes:
    """What a file holds, decompressed if its content says so; OSError or EOFError if it cannot."""
    check_path("load", path)
    data = Path(path).read_bytes()
    return gzip.decompress(data) if data.startswith(GZIP) else data
