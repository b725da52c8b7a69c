"""The events of a chrome trace, one after the other, from a file of any size.

In: a path. Out: `TraceStream`; iterating gives the members of the list of events, decoded but not
looked at. Afterwards `header` has the other keys that are of use, and `damage` says where and why
reading ended early, if it did. One block of text and one event are in memory at a time.

Python's own decoder reads event after event. What lost, on 109,123 events (35 MB, 1.0 s): `ijson`
takes 1.35 times as long, and once more for the keys around the list; it gives up at a NaN or a raw
control character, and 100,000 open brackets make it use up all memory. `orjson` and `msgspec` take
0.9 times as long, but hold the whole file in memory and give nothing of a damaged one.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from decimal import Decimal
from io import BufferedReader
from pathlib import Path
from typing import Any

from torchweld.core.errors import TorchweldError
from torchweld.core.files import GZIP

# At least this many characters are decoded at a time. An event cut at their end is read twice.
BLOCK = 1 << 18
# An event has a few hundred characters, with stacks a few thousand. A longer value is an error,
# such as a string that does not end.
LONGEST_VALUE = 1 << 28
# The longest token that may be cut by the end of a block is shorter ("-Infinity").
LONGEST_CUT = 16
# A double has 15 to 16 digits. A time since 1970 with a fraction has more, and would lose digits.
MOST_DIGITS = 17

MACHINE_KEY = "torchweld_machine"  # in traces that torchweld exported
KEPT = ("deviceProperties", "distributedInfo", MACHINE_KEY)
PROFILE_KEY = "torchweld_profile"


def _number(text: str) -> float | Decimal:
    return float(text) if len(text) <= MOST_DIGITS else Decimal(text)


# Not strict: names that torch took from source code may hold control characters.
_decode = json.JSONDecoder(parse_float=_number, strict=False).raw_decode
_between: Callable[[str, int], re.Match[str]] = re.compile(r"[ \t\r\n,]*").match  # type: ignore[assignment]


class _BrokenError(Exception):
    """The text stops being JSON: at which character, and why."""


class TraceStream:
    """See the module's docstring. Raises TorchweldError for a file that is not a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.is_trace = False  # the list of events was found
        self.damage: str | None = None
        self.replaced = 0  # characters that were not UTF-8
        self._bytes_damage: str | None = None

    def __iter__(self) -> Iterator[Any]:
        with _opened(self.path) as file:
            try:
                yield from self._events(_Text(self._texts(file)))
            except _BrokenError as broken:
                at, why = broken.args
                self.damage = f"at character {at:,}: {self._bytes_damage or why}"
                return
        if self._bytes_damage is not None:
            self.damage = f"after the last event: {self._bytes_damage}"

    def _events(self, text: _Text) -> Iterator[Any]:
        first = text.peek()
        if first == "[":
            self.is_trace = True
            yield from text.items()
        elif first == "{":
            yield from self._members(text)
        elif first:
            start = text.text[text.at : text.at + 20]
            raise TorchweldError(
                f"{self.path} is not a trace: it begins with {start!r}, not with JSON; "
                "give a .json or .json.gz file that torch.profiler exported"
            )
        elif self._bytes_damage is None:
            raise TorchweldError(
                f"{self.path} is empty; the profiler writes a trace when it stops: export it again"
            )

    def _members(self, text: _Text) -> Iterator[Any]:
        text.at += 1
        while (mark := text.peek()) != "}":
            if mark != '"':
                raise text.broken("the name of a field was expected" if mark else "it ends here")
            key = text.value()
            if text.peek() != ":":
                raise text.broken(f"a colon was expected after {key!r}")
            text.at += 1
            if key == PROFILE_KEY:
                raise TorchweldError(
                    f"{self.path} is a profile that torchweld saved, not a trace; load it with "
                    "tw.Profile.load"
                )
            if text.peek() == "[" and key == "traceEvents":
                self.is_trace = True
                yield from text.items()
                continue
            value = text.value()
            if key in KEPT:
                self.header[key] = value

    def _texts(self, file: BufferedReader) -> Iterator[str]:
        for text in codecs.iterdecode(self._bytes(file), "utf-8-sig", "replace"):
            self.replaced += text.count("\ufffd")
            yield text

    def _bytes(self, file: BufferedReader) -> Iterator[bytes]:
        """Decompressed if needed; they end where decompression fails."""
        packed = file.read(len(GZIP)) == GZIP
        file.seek(0)
        source = gzip.GzipFile(fileobj=file) if packed else file
        try:
            while block := source.read1(BLOCK):  # in small parts: the one with the damage is lost
                yield block
        except EOFError:
            self._bytes_damage = "the compressed data end early"
        except (gzip.BadGzipFile, zlib.error) as error:
            self._bytes_damage = f"the compressed data are damaged ({error})"


class _Text:
    """A place in a text that arrives in blocks."""

    def __init__(self, parts: Iterator[str]) -> None:
        self._parts = parts
        self._before = 0  # characters that came and went
        self.text = ""
        self.at = 0

    def broken(self, why: str, at: int | None = None) -> _BrokenError:
        return _BrokenError(self._before + (self.at if at is None else at), why)

    def _more(self, least: int = 0) -> bool:
        """Fetches a block, or `least` characters, and forgets what was read; False at the end."""
        kept, size = [self.text[self.at :]], 0
        for part in self._parts:
            kept.append(part)
            size += len(part)
            if size >= max(least, BLOCK):
                break
        self._before += self.at
        self.text, self.at = "".join(kept), 0
        return size > 0

    def peek(self) -> str:
        """Skips spaces and commas, and gives the next character; "" at the end."""
        while True:
            self.at = _between(self.text, self.at).end()
            if self.at < len(self.text):
                return self.text[self.at]
            if not self._more():
                return ""

    def value(self) -> Any:
        """Decodes the value that begins here, and stops behind it."""
        while True:
            here = len(self.text) - self.at
            try:
                found, end = _decode(self.text, self.at)
            except json.JSONDecodeError as error:
                unfinished = error.msg.startswith("Unterminated string")
                if error.pos < len(self.text) - LONGEST_CUT and not unfinished:
                    raise self.broken(f"no JSON ({error.msg})", error.pos) from None
                if here > LONGEST_VALUE:
                    most = f"{LONGEST_VALUE:,} characters"
                    raise self.broken(f"one value has more than {most}") from None
                # Twice as much at each try: a long value is not read more than twice in all.
                if not self._more(here):
                    raise self.broken("it ends in the middle of an event") from None
            except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
                raise self.broken(str(error)) from None
            else:
                size = end - self.at
                # A number at the end of a block may go on in the next.
                if end < len(self.text) or not self._more():
                    self.at += size
                    return found

    def items(self) -> Iterator[Any]:
        """The values of the array that begins here; stops behind it."""
        self.at += 1
        while (mark := self.peek()) != "]":
            if not mark:
                raise self.broken("it ends here, before the list of events does")
            yield self.value()
            # The others in this block, without a call for each: saves a tenth of the time.
            with contextlib.suppress(ValueError, RecursionError):
                while True:
                    found, self.at = _decode(self.text, _between(self.text, self.at).end())
                    yield found
        self.at += 1


def _opened(path: Path) -> BufferedReader:
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.name.endswith((".json", ".json.gz")))
        hint = f", such as {inside[0]}" if inside else ""
        raise TorchweldError(f"{path} is a directory; give the path of one trace in it{hint}")
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise TorchweldError(
            f"there is no file {path}; give a trace that torch.profiler exported"
        ) from None
    except OSError as error:
        raise TorchweldError(f"{path} cannot be read: {error.strerror}") from error
