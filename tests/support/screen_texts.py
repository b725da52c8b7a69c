"""What a verb has printed, looked at."""

from __future__ import annotations


def squeezed(text: str) -> str:
    """The text on one line: where it was wrapped does not matter."""
    return " ".join(text.split())


def line_with(text: str, out: str) -> str:
    return next(line for line in out.splitlines() if text in line)
