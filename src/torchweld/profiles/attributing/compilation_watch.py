"""What torch.compile did while it was watched: frames compiled and recompiled, graph breaks.

Counted from figures that torch keeps itself. Where torch.compile was never used, nothing of it is
imported; a release of torch that has moved them gives a notice.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from torchweld.profiles.profile import Compilation
from torchweld.profiles.recorded_events import Recording

_REGION = "Torch-Compiled Region"
# The search for compiled code whose guards hold.
LOOKUP = "TorchDynamo Cache Lookup"


@dataclass(kw_only=True)
class CompilationWatch:
    """What torch.compile did inside `watch_compilation`, in all threads; filled when it ends."""

    compiled: int = 0  # frames, recompiled ones included
    recompiled: int = 0
    graph_breaks: int = 0
    reasons: tuple[str, ...] = ()  # of recompilations, first line each
    notices: list[str] = field(default_factory=list)

    def result(self, recording: Recording) -> Compilation | None:
        """The compilation that a recording of one step shows; None if nothing compiled was met."""
        regions = [e for e in recording.events if e.name.startswith(_REGION)]
        lookups = [e.duration_us for e in recording.events if e.name.startswith(LOOKUP)]
        if not (regions or lookups or self.compiled or self.graph_breaks):
            return None
        return Compilation(
            regions=len(regions),
            compiled=self.compiled,
            recompiled=self.recompiled,
            graph_breaks=self.graph_breaks,
            guard_us=sum(lookups),
            reasons=self.reasons,
        )


@contextmanager
def watch_compilation() -> Iterator[CompilationWatch]:
    """Counts what torch.compile does inside, from the figures that it keeps itself."""
    watch = CompilationWatch()
    before, breaks_before = _metrics(), _graph_breaks()
    try:
        yield watch
    finally:
        _settle(watch, before, breaks_before)


def _settle(
    watch: CompilationWatch, before: list[Any] | None, breaks_before: dict[str, int] | None
) -> None:
    after, breaks = _metrics(), _graph_breaks()
    if after is None or breaks is None or before is None or breaks_before is None:
        watch.notices.append(
            f"torch {torch.__version__} does not tell what it compiles; compiled frames, "
            "recompilations and graph breaks were not counted"
        )
        return
    # Objects, not a length: torch forgets the oldest entries.
    old = {id(entry) for entry in before}
    fresh = [entry for entry in after if id(entry) not in old]
    if after and len(fresh) == len(after) and before:
        watch.notices.append(
            f"torch remembers its last {len(after)} compilations only; there may have been more"
        )
    frames = [entry for entry in fresh if _made_code(entry)]
    again = [entry for entry in frames if _is_recompilation(entry)]
    watch.compiled = len(frames)
    watch.recompiled = len(again)
    reasons = (getattr(entry, "recompile_reason", None) for entry in again)
    # torch aligns the source line behind a reason with blanks.
    watch.reasons = tuple(" ".join(str(r).strip().splitlines()[0].split()) for r in reasons if r)
    for reason, count in breaks.items():
        # torch._dynamo.utils.counters may have been cleared meanwhile.
        known = breaks_before.get(reason, 0)
        watch.graph_breaks += count - known if count >= known else count


def _made_code(entry: Any) -> bool:
    """Whether a frame was compiled: not one that was given up, nor the backward of one."""
    if getattr(entry, "is_forward", None) is False or getattr(entry, "is_runtime", False):
        return False
    return getattr(entry, "has_guarded_code", None) is not False and not entry.fail_type


def _is_recompilation(entry: Any) -> bool:
    """Whether torch says so, or the frame's number does: "3/1" is the second code of frame 3."""
    if getattr(entry, "recompile_reason", None):
        return True
    number = str(getattr(entry, "compile_id", "")).rpartition("/")[2]
    return number.isdigit() and int(number) > 0


def _metrics() -> list[Any] | None:
    """Torch's notes of what it compiled, oldest first; None if it has none."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return []
    get = getattr(utils, "get_compilation_metrics", None)
    if get is None:
        return None
    found = list(get())
    return found if all(hasattr(entry, "fail_type") for entry in found) else None


def _graph_breaks() -> dict[str, int] | None:
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return {}
    counters = getattr(utils, "counters", None)
    return None if counters is None else dict(counters.get("graph_break", {}))
