"""What would help if a time was not measured: options of `torchweld gate`, to be pasted."""

from __future__ import annotations

from dataclasses import dataclass

from torchweld.gates.gated_model import Clock

QUIETER = "a quieter machine"
COUNTERS_ALONE = "--no-time (counters alone)"
BY_TABLE = "--no-measure (welds by a table that comes with torchweld, and times nothing)"


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What a baseline may cost: how long to tune, and whether to measure at all.

    quick:    about ten seconds of tuning instead of a minute; `budget_s` sets them
    measure:  False: welds by a table that comes with torchweld, and times no block
    empty:    a baseline that welds nothing is wanted, if that is what was found
    """

    quick: bool = False
    budget_s: float | None = None
    measure: bool = True
    empty: bool = False

    def remedies(self, tuning_s: float) -> tuple[str, ...]:
        """What would help if blocks could not be measured in `tuning_s`."""
        if not self.measure:
            return ("leave out --no-measure, so that the blocks are timed",)
        longer = f"--budget {seconds_words(4 * tuning_s)}"
        return QUIETER, f"{longer} instead of --quick" if self.quick else longer, BY_TABLE


def clock_remedies(clock: Clock, wanted_s: float | None = None) -> tuple[str, ...]:
    """What would help if wall time was not measured; `wanted_s` is what a comparison asked for."""
    longer_s = max(wanted_s or 0.0, 2 * clock.seconds)
    return QUIETER, f"--seconds {seconds_words(longer_s)}", COUNTERS_ALONE


def seconds_words(seconds: float) -> str:
    """Seconds as an option takes them: 12, 0.5."""
    return f"{seconds:.3g}" if seconds < 100 else f"{seconds:.0f}"
