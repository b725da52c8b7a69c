"""Text that came from elsewhere, made harmless: names in models and in files.

What is printed or raised goes through `clean`, or through `clean_lines` where it has lines of our
own making.
"""

from __future__ import annotations

import unicodedata

# Control, format (bidirectional overrides among them), half characters, private, not assigned.
_HIDDEN = ("C", "Zl", "Zp")


def clean(text: str) -> str:
    """One line without control characters: what a name holds cannot move the cursor or colour."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char if not unicodedata.category(char).startswith(_HIDDEN) else _escaped(char)
        for char in text
    )


def clean_lines(text: str) -> str:
    """The same for a text of several lines, which stay lines."""
    return "\n".join(map(clean, text.split("\n")))


def _escaped(char: str) -> str:
    return char.encode("unicode_escape", "backslashreplace").decode("ascii")
