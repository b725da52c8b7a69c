"""What a field of a record may hold, said beside its type: `Annotated[int, Bounds(0, 9)]`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

# Products of a few of these are still finite, and fit into C++'s types.
MOST_INT = 2**63 - 1
MOST_FLOAT = 1e60
MOST_TEXT = 1 << 20
MOST_ITEMS = 1 << 24


@dataclass(frozen=True)
class Bounds:
    """A number from `least` to `most`. `odd`: NaN and the infinities too, as texts in JSON."""

    least: float = -MOST_FLOAT
    most: float = MOST_FLOAT
    odd: bool = False

    def holds(self, value: float) -> bool:
        if self.least <= value <= self.most:
            return True
        odd = self.odd and (value != value or value in (math.inf, -math.inf))
        return odd and (self.least < 0 or value != -math.inf)

    def __str__(self) -> str:
        if self.most >= MOST_INT:
            return "a number" if self.least < -1 else f"at least {self.least:g}"
        return f"{self.least:g} to {self.most:g}"


@dataclass(frozen=True)
class Length:
    """How many characters or items a field may have."""

    least: int = 0
    most: int = MOST_ITEMS

    def __str__(self) -> str:
        return f"{self.least} to {self.most:,}" if self.least else f"at most {self.most:,}"


@dataclass(frozen=True)
class Letters:
    """A text of at most `most` of these characters, or the one text `other`."""

    allowed: str
    most: int
    other: str

    def holds(self, value: str) -> bool:
        return value == self.other or (len(value) <= self.most and set(value) <= set(self.allowed))

    def __str__(self) -> str:
        return f"at most {self.most} of the characters {self.allowed}, or {self.other}"


Count = Annotated[int, Bounds(0, MOST_INT)]
Positive = Annotated[int, Bounds(1, MOST_INT)]
Index = Annotated[int, Bounds(-1, MOST_INT)]  # -1 for none
Amount = Annotated[float, Bounds(0)]
Measured = Annotated[float, Bounds(odd=True)]  # where nothing was measured, NaN or an infinity
Ratio = Annotated[float, Bounds(1 / MOST_FLOAT, odd=True)]  # the same for ratios of times: above 0
Word = Annotated[str, Length(most=1 << 12)]
