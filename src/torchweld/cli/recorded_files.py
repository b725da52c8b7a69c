"""Files with a trace or a profile: recognised by their content, and read.

In: a TARGET as typed, or a path. Out: a `Profile`, or an error that says what the file is instead.
"""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path

from torchweld.core.errors import TorchweldError
from torchweld.core.files import GZIP
from torchweld.core.safe_text import clean
from torchweld.models import MODELS
from torchweld.models.targets import OTHER_FORMS
from torchweld.profiles.profile import Profile
from torchweld.profiles.recording.trace_profile import read_trace

RECORDED = (".json", ".json.gz")
EXPECTED = (
    "expected is a trace of torch.profiler or a profile saved with --save (.json, .json.gz), "
    f"{OTHER_FORMS}, or the name of a built-in model ({', '.join(MODELS)})"
)
_BOM = b"\xef\xbb\xbf"
_MARK = b'"torchweld_profile"'


def recorded_file(target: str | None) -> Path | None:
    """The file with a recording that TARGET names; None if it names a model.

    An error for a file or directory that is neither.
    """
    if target is None or target in MODELS or target.startswith("hf:"):
        return None
    path = Path(target)
    if target.endswith(RECORDED):
        return path
    try:
        is_directory, is_there = path.is_dir(), path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return None
    if is_directory:
        _refuse_traces_in(path)
        return None
    if is_there and path.suffix != ".py":
        file_start(path)  # raises for what holds no JSON
        return path
    if os.sep in target and ":" not in target and path.suffix != ".py":
        raise TorchweldError(f"there is no file {clean(target)}; {EXPECTED}")
    return None


def _refuse_traces_in(path: Path) -> None:
    """A directory is not a recording. One with traces in it was probably given by mistake."""
    traces = sorted(one.name for one in path.glob("*.trace.json*"))
    if traces:
        raise TorchweldError(
            f"{clean(str(path))} is a directory; give one trace in it, such as "
            f"{clean(str(path / traces[0]))}"
        )


def load_recorded(path: Path, this_machine: bool = False) -> Profile:
    """A profile that was saved, or what a trace tells."""
    if _MARK not in file_start(path):
        return read_trace(path, this_machine=this_machine)
    if this_machine:
        raise TorchweldError(
            f"{clean(str(path))} is a saved profile, which knows its machine; --this-machine goes "
            "with a trace of torch.profiler that was recorded on this one"
        )
    return Profile.load(path)


def file_start(path: Path, expected: str = EXPECTED, begins: bytes = b"{[") -> bytes:
    """The first bytes, decompressed; an error if they cannot begin JSON, or what else may come."""
    name = clean(str(path))
    if path.is_dir():
        raise TorchweldError(f"{name} is a directory; give the path of one trace or profile in it")
    try:
        with path.open("rb") as file:
            zipped = file.read(len(GZIP)) == GZIP
        with gzip.open(path) if zipped else path.open("rb") as file:
            start = file.read(64)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise TorchweldError(f"{name} cannot be read: {error}; {expected}") from error
    text = start.removeprefix(_BOM).lstrip()
    if text[:1] and text[:1] in begins:
        return start
    if not text:
        raise TorchweldError(f"{name} is empty; {expected}")
    what = "a compressed file" if zipped else "a file"
    if any(byte < 32 and byte not in b"\t\n\r\f" for byte in start) or not _is_text(start):
        raise TorchweldError(f"{name} is {what} with binary content, not JSON; {expected}")
    said = clean(text.decode(errors="replace").splitlines()[0][:20])
    raise TorchweldError(f"{name} is {what} that begins with {said!r}, not with JSON; {expected}")


def _is_text(start: bytes) -> bool:
    """Whether these may be the first bytes of a text; the last character may be cut."""
    return "\ufffd" not in start.decode(errors="replace").rstrip("\ufffd")
