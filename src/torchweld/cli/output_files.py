"""Files that a verb writes: checked before the work starts, never replaced by accident."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from torchweld.core.errors import TorchweldError


def check_targets(files: Mapping[str, Path | None], force: bool) -> None:
    """Raises unless every file (option -> path) can be written, and may be."""
    seen: dict[Path, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        _check(option, path, force)
        twin = seen.setdefault(path.resolve(), option)
        if twin != option:
            raise TorchweldError(f"{twin} and {option} name the same file, {path}; give two")


def _check(option: str, path: Path, force: bool) -> None:
    if path.is_dir():
        raise TorchweldError(f"{option} {path} is a folder; give the name of a file in it")
    if path.exists() and not force:
        raise TorchweldError(f"{option} {path} is there already; --force replaces it")
    folder = path.parent
    if not folder.is_dir():
        raise TorchweldError(f"{option} {path}: there is no folder {folder}; make it first")
    try:
        # Asking for permission is not enough: a file system can be read-only, or full.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise TorchweldError(
            f"{option} {path}: {folder} cannot be written ({error.strerror}); choose another folder"
        ) from error
