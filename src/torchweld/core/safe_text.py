"""Makes text from elsewhere harmless: names in models and in files.

All that is printed or raised goes through `clean`, or through `clean_lines` if it has our own line
breaks.
"""

from __future__ import annotations

import unicodedata

# Control, format (with bidirectional overrides), half characters, private, not assigned.
_HIDDEN = ("C", "Zl", "Zp")


def clean(text: str) -> str:
    """One line without control characters, so that a name cannot move the cursor or set colours."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char if not unicodedata.category(char).startswith(_HIDDEN) else _escaped(char)
        for char in text
    )


def clean_lines(text: str) -> str:
    """The same for a text of several lines; line breaks stay."""
    return "\n".join(map(clean, text.split("\n")))


def _escaped(char: str) -> str:
    return char.encode("unicode_escape", "backslashreplace").decode("ascii")
