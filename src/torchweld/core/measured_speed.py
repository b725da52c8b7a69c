"""`Speed`: how fast something is compared with what it replaces, both timed in turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torchweld.core.record_fields import Measured, Ratio


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Above 1 is faster. Times are of one call, medians over the rounds."""

    speedup: Ratio
    interval: tuple[Measured, Measured]
    before_us: Ratio
    after_us: Ratio

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.speedup:.2f} ({low:.2f}–{high:.2f})"

    def problems(self) -> Iterator[str]:
        """Problems of a record that was read from a file, in words."""
        if not 0 < self.interval[0] <= self.speedup <= self.interval[1] < float("inf"):
            yield f"has the speed-up {self.speedup} in {self.interval}; expected one inside"
        if not 0 < self.before_us < float("inf") or not 0 < self.after_us < float("inf"):
            yield f"has the times {self.before_us} and {self.after_us}; expected microseconds"
