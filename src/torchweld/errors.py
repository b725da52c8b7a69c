"""The errors a user can meet.

Every message says what was given, what is allowed, and what to do about it. All kinds derive from
`TorchweldError`, which is a `ValueError`: something in the call or its surroundings can be put
right. Broken invariants of our own are `assert`s.
"""


class TorchweldError(ValueError):
    """What was asked for cannot be done as asked."""


class BlockError(TorchweldError):
    """A chain, a layer or its tensors do not fit together."""


class UnsupportedError(TorchweldError):
    """The backend that was asked for by name cannot serve this block here; carries every reason."""


class NotMeasuredError(TorchweldError):
    """A figure was asked for that could not be measured honestly."""


class RefusedError(TorchweldError):
    """Our op does not take these tensors. The compiled part raises it by this name."""


class OutOfMemoryError(RefusedError, MemoryError, RuntimeError):
    """Our op got no memory. torch raises a RuntimeError then, and Python a MemoryError."""


class BuildError(TorchweldError):
    """The compiled part of torchweld is missing, or does not fit the installed torch."""


class CannotCloneError(TorchweldError):
    """The model cannot be copied to be looked at; names the attribute that is in the way."""
