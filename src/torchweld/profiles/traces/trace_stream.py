"""The events of a chrome trace, one after the other, from a file of any size.

In: a path. Out: `TraceStream`; iterating gives what stands in the list of events, decoded but not
looked at. Afterwards `header` has the other keys that are of use, and `damage` says where and why
reading ended early, if it did. One block of text and one event are in memory at a time.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
import zlib
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

from torchweld.core.errors import TorchweldError
from torchweld.core.files import GZIP

# A block of compressed bytes can grow a thousandfold, so it is small.
COMPRESSED_BLOCK = 1 << 14
PLAIN_BLOCK = 1 << 18
# An event has a few hundred characters, with stacks some thousands. What is longer than this is an
# error that looks like a value which does not end.
LONGEST_VALUE = 1 << 28
# Nothing that may stand at the cut end of a block without being an error is longer ("-Infinity").
LONGEST_CUT = 16
# A double has 15 to 16 digits. A time since 1970 with a fraction has more, and would lose it.
MOST_DIGITS = 17

MACHINE_KEY = "torchweld_machine"  # in traces that torchweld exported
KEPT = ("deviceProperties", "distributedInfo", MACHINE_KEY)
PROFILE_KEY = "torchweld_profile"


def _number(text: str) -> float | Decimal:
    return float(text) if len(text) <= MOST_DIGITS else Decimal(text)


# Not strict: names that torch took from source code may hold control characters.
_decoder: Any = json.JSONDecoder(parse_float=_number, strict=False)
_scan: Callable[[str, int], tuple[Any, int]] = _decoder.scan_once
_space = re.compile(r"[ \t\r\n]*").match
_between = re.compile(r"[ \t\r\n]*,?[ \t\r\n]*").match


class _BrokenError(Exception):
    """The text stops being JSON at character `at`."""

    def __init__(self, at: int, why: str) -> None:
        super().__init__(why)
        self.at = at


class TraceStream:
    """See the module's docstring. Raises TorchweldError for what is no trace at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.is_trace = False  # the list of events was found
        self.damage: str | None = None
        self.replaced = 0  # characters that were not UTF-8
        self._bytes_damage: str | None = None

    def __iter__(self) -> Iterator[Any]:
        with _opened(self.path) as file:
            text = _Text(self._blocks(file))
            try:
                yield from self._events(text)
            except _BrokenError as broken:
                why = self._bytes_damage or str(broken)
                self.damage = f"at character {broken.at:,}: {why}"
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
            if mark == ",":
                text.at += 1
                continue
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
            if key == "traceEvents" and text.peek() == "[":
                self.is_trace = True
                yield from text.items()
                continue
            text.peek()
            value = text.value()
            if key in KEPT:
                self.header[key] = value

    def _blocks(self, file: BinaryIO) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        start = file.read(len(GZIP))
        file.seek(0)
        blocks = (
            self._inflated(file) if start == GZIP else iter(lambda: file.read(PLAIN_BLOCK), b"")
        )
        first = True
        for block in blocks:
            text = decoder.decode(block)
            if not text.isascii():
                self.replaced += text.count("\ufffd")
                text = text.removeprefix("\ufeff") if first else text
            first = False
            yield text
        if rest := decoder.decode(b"", final=True):
            self.replaced += rest.count("\ufffd")
            yield rest

    def _inflated(self, file: BinaryIO) -> Iterator[bytes]:
        inflater = zlib.decompressobj(wbits=31)
        while block := file.read(COMPRESSED_BLOCK):
            while block:
                if inflater.eof:
                    if not block.startswith(GZIP[: len(block)]):
                        if block.strip(b"\0"):
                            self._bytes_damage = "what follows is not compressed data"
                        return
                    inflater = zlib.decompressobj(wbits=31)
                before = inflater.copy()
                try:
                    yield inflater.decompress(block)
                except zlib.error as error:
                    self._bytes_damage = f"the compressed data are damaged ({error})"
                    yield _until_damage(before, block)
                    return
                block = inflater.unused_data
        if not inflater.eof:
            self._bytes_damage = "the compressed data end early"
            yield inflater.flush()


def _until_damage(inflater: Any, block: bytes) -> bytes:
    """What can be had of a block in which decompression fails, to the byte."""
    whole = bytearray()
    with contextlib.suppress(zlib.error):
        for i in range(len(block)):
            whole += inflater.decompress(block[i : i + 1])
    return bytes(whole)


class _Text:
    """A place in a text that arrives in blocks."""

    def __init__(self, blocks: Iterator[str]) -> None:
        self._blocks = blocks
        self._before = 0  # characters that came and went
        self.text = ""
        self.at = 0

    def broken(self, why: str, at: int | None = None) -> _BrokenError:
        return _BrokenError(self._before + (self.at if at is None else at), why)

    def _more(self, least: int = 1) -> bool:
        """Fetches at least so many characters, and forgets what was read; False at the end."""
        parts, size = [self.text[self.at :]], 0
        for block in self._blocks:
            parts.append(block)
            size += len(block)
            if size >= least:
                break
        self._before += self.at
        self.text, self.at = "".join(parts), 0
        return size > 0

    def peek(self) -> str:
        """The next character that is no space, at which it stops; "" at the end."""
        while True:
            self.at = _space(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text):
                return self.text[self.at]
            if not self._more():
                return ""

    def value(self) -> Any:
        """Decodes the value that begins here, and stops behind it."""
        while True:
            try:
                found, end = _scan(self.text, self.at)
            except StopIteration as stop:
                where, why, open_string = int(stop.value), "a value was expected", False
            except json.JSONDecodeError as error:
                where, why = error.pos, error.msg
                open_string = why.startswith("Unterminated string")
            except (ValueError, RecursionError) as error:
                # Thousands of digits, or of brackets.
                raise self.broken(str(error)) from None
            else:
                # A number at the end of a block may go on in the next.
                size = end - self.at
                if end < len(self.text) or isinstance(found, (dict, list, str)) or not self._more():
                    self.at += size
                    return found
                continue
            here = len(self.text) - self.at
            cut = open_string or where >= len(self.text) - LONGEST_CUT
            if not cut:
                raise self.broken(f"no JSON ({why})", where)
            if here > LONGEST_VALUE:
                raise self.broken(f"one value has more than {LONGEST_VALUE:,} characters")
            # Twice as much at each try, so that a long value takes no more than twice its length.
            if not self._more(here):
                raise self.broken("it ends in the middle of an event")

    def items(self) -> Iterator[Any]:
        """The values of the array that begins here; stops behind it.

        One at a time: a list of a block's thousand events took half as long again, because each new
        one then lies in memory that no cache holds.
        """
        self.at += 1
        text, at = self.text, self.at
        while True:
            at = _between(text, at).end()  # type: ignore[union-attr]
            try:
                found, at = _scan(text, at)
            except (StopIteration, ValueError, RecursionError):
                # The end of a block, of the array, or of all that is whole.
                self.at = at
                mark = self.peek()
                if mark == "]":
                    self.at += 1
                    return
                if not mark:
                    raise self.broken("it ends here, before the list of events does") from None
                if mark != ",":
                    yield self.value()
                text, at = self.text, self.at
                continue
            yield found


def _opened(path: Path) -> BinaryIO:
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
