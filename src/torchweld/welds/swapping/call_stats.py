"""What became of the calls of welded modules: `tw.stats`. Plain data, and its text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torchweld.core.number_text import counted, size
from torchweld.core.safe_text import clean


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Calls of a welded module that ran the original code, by reason, and calls that were checked.

    Fused calls are not counted, which would cost them time; `fused` says whether there was one.
    Calls inside compiled graphs are neither counted nor seen.
    Calls that a group gathered are counted, by the group.
    `changes` are those of the reasons that lie in the module itself and were warned about.
    """

    originals: dict[str, int] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    checked: int = 0
    copied_bytes: int = 0
    fused: bool = False
    gathered: int = 0  # calls that were made as one with those of its group
    apart: bool = False  # its group gave up, since its members were not called together


class ModelStats(dict[str, Stats]):
    """Path of each welded module -> its `Stats`; prints as a table, with sums below."""

    def __str__(self) -> str:
        return "\n".join(self._lines()) if self else "nothing is welded"

    def _lines(self) -> Iterator[str]:
        names = [clean(path or "the model") for path in self]
        width = max(map(len, ("block", *names)))
        yield f"{'block':{width}}  {'fused':5}  {'original calls':>14}  why"
        for name, one in zip(names, self.values(), strict=True):
            calls = sum(one.originals.values())
            fused = "yes" if one.fused else "never" if calls else "–"
            yield f"{name:{width}}  {fused:5}  {calls:14,}  {_reasons(one.originals)}".rstrip()
        originals: Counter[str] = Counter()
        for one in self.values():
            originals.update(one.originals)
        fused_blocks = sum(one.fused for one in self.values())
        yield f"{counted(len(self), 'block')} welded, {fused_blocks} of them ran fused"
        yield f"{counted(originals.total(), 'call')} of the original code" + (
            f": {_reasons(originals)}" if originals else ""
        )
        if checked := sum(one.checked for one in self.values()):
            yield f"{counted(checked, 'call')} checked"
        if gathered := sum(one.gathered for one in self.values()):
            yield f"{counted(gathered, 'call')} gathered in groups"
        if apart := [name for name, one in zip(names, self.values(), strict=True) if one.apart]:
            yield f"run one by one, since they are not called together: {', '.join(apart)}"
        if copied := sum(one.copied_bytes for one in self.values()):
            yield f"{size(copied)} of packed weights"


def _reasons(originals: dict[str, int]) -> str:
    """The most frequent first: "gradients 30, rows 4"."""
    ordered = sorted(originals.items(), key=lambda item: -item[1])
    return ", ".join(f"{clean(reason)} {calls}" for reason, calls in ordered)
