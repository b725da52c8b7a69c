"""How to plan: what `tw.plan` was asked for, checked."""

from __future__ import annotations

from dataclasses import dataclass

from torchweld.core.argument_checks import (
    Progress,
    check_flags,
    check_kind,
    check_number,
    check_optional_flags,
    check_progress,
)
from torchweld.core.errors import TorchweldError
from torchweld.profiles.profile import Profile

# Seconds for measuring. Finding blocks comes first and takes up to ten more.
BUDGET_S = 48.0
QUICK_S = 8.0


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """`tw.plan` explains each."""

    training: bool = False
    force: bool = False
    measure: bool = True
    quick: bool = False
    budget_s: float | None = None
    with_compile: bool = False
    packing: bool = True
    recompute: bool | None = None
    profile: Profile | None = None
    remember: bool = True
    rounds: bool = False  # time the whole model now, even if its time is remembered: for its rounds
    progress: Progress | None = None

    def __post_init__(self) -> None:
        flags = ("training", "force", "measure", "quick", "remember", "with_compile", "packing")
        check_flags("plan", **{name: getattr(self, name) for name in flags})
        check_optional_flags("plan", recompute=self.recompute)
        if self.recompute is not None and not self.training:
            raise TorchweldError(
                f"recompute={self.recompute} says what is kept for a backward; give training=True "
                "too, or leave it out"
            )
        if self.force and not self.measure:
            raise TorchweldError(
                "force=True welds all that verifies, and measure=False what a table knows to be "
                "faster; give one of them"
            )
        if self.budget_s is not None:
            check_number("plan", "budget_s", self.budget_s, above=0)
        if self.profile is not None:
            check_kind("plan", "profile", self.profile, Profile, "what tw.profile returns")
        check_progress("plan", self.progress)

    @property
    def timing(self) -> bool:
        return self.measure and not self.force

    @property
    def seconds(self) -> float:
        """Seconds for measuring: as given, else the default."""
        default = QUICK_S if self.quick else BUDGET_S
        return default if self.budget_s is None else self.budget_s

    def say(self, doing: str, share: float) -> None:
        if self.progress is not None:
            self.progress(doing, share)
