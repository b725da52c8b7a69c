"""The errors that users can get.

Every message says what was given, what is allowed, and what to do about it. All kinds derive from
`TorchweldError`, which is a `ValueError`: the user can fix something in the call or its
surroundings. Broken invariants of our own are `assert`s.

A message may quote names from models and files, so every line of it is cleaned.
"""

from __future__ import annotations

from torchweld.core.safe_text import clean


class TorchweldError(ValueError):
    """What was asked for cannot be done as asked; each argument is one line of the message."""

    def __init__(self, *lines: str) -> None:
        super().__init__(*(clean(str(line)) for line in lines))

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class BlockError(TorchweldError):
    """A chain, a layer or its tensors do not fit together."""


class UnsupportedError(TorchweldError):
    """The backend that was asked for by name cannot serve this block here; carries every reason."""


class NotMeasuredError(TorchweldError):
    """A figure was asked for, but could not be measured reliably."""


class RefusedError(TorchweldError):
    """Our op does not take these tensors. The compiled part raises it by this name."""


class OutOfMemoryError(RefusedError, MemoryError, RuntimeError):
    """Our op got no memory. torch raises a RuntimeError then, and Python a MemoryError."""


class BuildError(TorchweldError):
    """The compiled part of torchweld is missing, or does not fit the installed torch."""


class CannotCloneError(TorchweldError):
    """The model cannot be copied to be looked at; names the attribute that is in the way."""
