"""Commands that pages show, as lists of words: those of `bash` and `console` blocks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from scripts.doc_pages import Fence

LANGUAGES = ("bash", "console")
_SETTING = re.compile(r"[A-Z_][A-Z0-9_]*=")
_JOINTS = {"&&", "||", "|", ";", "&"}


def commands_of(fence: Fence) -> list[list[str]]:
    """Each command without comments and without settings of the environment before it."""
    lines = fence.text.replace("\\\n", " ").splitlines()
    if fence.language == "console":  # what does not follow a prompt is output
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [words for line in lines for words in _split(line) if words]


def _split(line: str) -> Iterator[list[str]]:
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    words: list[str] = []
    for word in [*reader, ";"]:
        if word in _JOINTS:
            yield words
            words = []
        elif words or not _SETTING.match(word):
            words = [*words, word]
