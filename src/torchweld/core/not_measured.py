"""`NotMeasured`: takes the place of a figure that could not be measured, and says why.

It is never a 0, an infinity or an empty text, so that nobody takes it for a figure: arithmetic with
it raises, and it is false where a figure would be true. It saves to JSON as
`{"not_measured": reason}`, loads again and prints its reason.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NotMeasured:
    """No figure, and why."""

    reason: str

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"not measured: {self.reason}"
