"""A `Plan`: what is to be welded and what not, with every reason and measurement. Plain data.

Made by `tw.plan`, carried out by `tw.apply`. It saves to JSON and loads again; nothing in a file is
executed, and one that does not fit the declared types is refused.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from torchweld.arguments import check_path
from torchweld.decisions import Choice, Decision
from torchweld.discovery.found import Block, Refusal
from torchweld.errors import TorchweldError
from torchweld.files import write_whole
from torchweld.records import RecordError, from_plain, to_plain

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One way to run a block, tried at one number of rows."""

    choice: Choice
    verified: bool
    # "faster", "slower", "same", "not measured"; "behind" another at first look; "wrong", "cannot
    # serve"
    verdict: str
    reason: str = ""
    speedup: float = 0.0  # over the original; 0 where none was measured
    interval: tuple[float, float] = (0.0, 0.0)
    original_us: float = 0.0  # of one call
    error_ratio: float = 0.0  # to what the numerical rule allows: 1 is the bound
    copied_bytes: int = 0  # of one module
    copy_gain: float = 0.0  # speed over the best way without a copy, in the same rounds; 0: unknown


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What was tried for some blocks at one number of rows, and what was chosen."""

    rows: int
    count: int  # calls of one block a workload
    trials: tuple[Trial, ...]
    chosen: Choice | None
    reason: str
    remembered: bool = False  # times are from an earlier plan on this machine

    @property
    def best(self) -> Trial | None:
        return next((trial for trial in self.trials if trial.choice == self.chosen), None)

    @property
    def unmeasured(self) -> bool:
        """Whether nothing was chosen for want of time, or of a quiet machine."""
        verdicts = [trial.verdict for trial in self.trials if trial.verified]
        return self.chosen is None and "not measured" in verdicts


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A block with its tuning, by number of rows."""

    block: Block
    tunings: tuple[Tuning, ...]

    def by_rows(self) -> tuple[tuple[int, int, Choice | None], ...]:
        """Ranges of rows; between two measured counts with the same choice, that choice holds."""
        ranges: list[tuple[int, int, Choice | None]] = []
        for tuning in sorted(self.tunings, key=lambda tuning: tuning.rows):
            if ranges and ranges[-1][2] == tuning.chosen:
                ranges[-1] = (ranges[-1][0], tuning.rows, tuning.chosen)
            else:
                ranges.append((tuning.rows, tuning.rows, tuning.chosen))
        return tuple(ranges)

    @property
    def welded(self) -> bool:
        return any(tuning.chosen is not None for tuning in self.tunings)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """The whole model before and after, on one workload."""

    workload: str
    verdict: str
    speedup: float
    interval: tuple[float, float]
    before_us: float
    after_us: float
    predicted: float  # the most that diagnosis says can be won; 0 where it was not asked
    saved_us: float  # what the blocks' own measurements promised
    ceiling: float  # the most that any kernel could reach; 0 where it was not measured
    error_ratio: float  # of the output, to eager's own error; 0 where it was not measured
    against: str = ""  # what the error was judged against
    remembered: bool = False  # times are from an earlier plan on this machine
    reason: str = ""

    @property
    def promised(self) -> float:
        """What the blocks' own gains make of the whole, as a speed-up; 0 where none was timed."""
        if self.saved_us <= 0 or self.before_us <= 0:
            return 0.0
        return self.before_us / max(self.before_us - self.saved_us, 1e-3 * self.before_us)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """See the module's docstring."""

    model: str
    structure: str  # hash of the model's names, shapes and types
    training: bool
    fingerprint: str
    torch: str
    planned: tuple[Planned, ...]
    refused: tuple[Refusal, ...] = ()
    whole: tuple[Whole, ...] = ()
    copied_bytes: int = 0
    forced: bool = False  # times were not measured
    notices: tuple[str, ...] = ()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return tuple(
            Decision(block=one.block, by_rows=one.by_rows(), training=self.training)
            for one in self.planned
            if one.welded
        )

    def __str__(self) -> str:
        from torchweld.planning.text import plan_text

        return plan_text(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON; an existing file is replaced whole."""
        text = json.dumps({"torchweld_plan": FORMAT, **to_plain(self)}, allow_nan=False, indent=1)
        write_whole(path, text + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """The opposite of `save`."""
        check_path("load", path)
        source = Path(path)
        try:
            data = json.loads(source.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise TorchweldError(f"{source} cannot be read as a plan: {error}") from error
        if not isinstance(data, dict) or "torchweld_plan" not in data:
            raise TorchweldError(f"{source} is not a plan that torchweld saved")
        version = data.pop("torchweld_plan")
        if version != FORMAT:
            raise TorchweldError(
                f"{source} has plan format {version!r}; this torchweld reads {FORMAT}: plan again"
            )
        try:
            return from_plain(Plan, data, "plan")
        except RecordError as error:
            raise TorchweldError(f"{source} is damaged: {error}") from error
