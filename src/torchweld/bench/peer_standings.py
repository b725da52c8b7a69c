"""Our first backend beside each peer, over all cells of a bench: means, wins, losses, errors."""

from __future__ import annotations

from dataclasses import dataclass

from torchweld.bench.bench_results import Bench
from torchweld.bench.relative_speeds import RelativeSpeed, geometric_mean, others, over
from torchweld.core.not_measured import NotMeasured


@dataclass(frozen=True, kw_only=True)
class PeerStanding:
    """Our speed over one peer's.

    mean:    geometric, of the cells in which both have figures; None where there is none
    ahead:   cells in which we are faster beyond noise; `behind`: slower beyond noise
    close:   the others
    error:   the peer's largest output error, relative to eager's; None where it is not known
    """

    name: str
    mean: float | None
    ahead: int
    behind: int
    close: int
    error: float | None


def standings(bench: Bench) -> list[PeerStanding]:
    """Standings of eager and of every peer that was timed in some cell."""
    found = []
    for name in ("eager", *bench.against):
        timed = [cell for cell in bench.cells if name in others(bench, cell)]
        pairs = [over(bench, cell, name) for cell in timed]
        known = [ratio for ratio in pairs if ratio is not None]
        if not timed:
            continue
        checks = [cell.result(name).check for cell in timed]
        ratios = [check.error_ratio for check in checks if check is not None]
        errors = [ratio for ratio in ratios if not isinstance(ratio, NotMeasured)]
        found.append(
            PeerStanding(
                name=name,
                mean=geometric_mean(ratio.value for ratio in known) if known else None,
                ahead=sum(ratio.ahead for ratio in known),
                behind=sum(ratio.behind for ratio in known),
                close=sum(not (ratio.ahead or ratio.behind) for ratio in known),
                error=max(errors, default=None),
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class LostCell:
    """A cell in which somebody is faster than we are, beyond noise: who, and our speed over it."""

    cell: str
    our_us: float | NotMeasured
    winners: dict[str, tuple[RelativeSpeed, float | NotMeasured]]  # with the winner's time


def lost_cells(bench: Bench) -> list[LostCell]:
    """The worst first."""
    found: list[tuple[float, LostCell]] = []
    for cell in bench.cells:
        ratios = {name: over(bench, cell, name) for name in others(bench, cell)}
        lost = {name: r for name, r in ratios.items() if r is not None and r.behind}
        if lost:
            ordered = sorted(lost, key=lambda name: lost[name].value)
            one = LostCell(
                cell=cell.name,
                our_us=cell.result(bench.first).us,
                winners={name: (lost[name], cell.result(name).us) for name in ordered},
            )
            found.append((lost[ordered[0]].value, one))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def close_cells(bench: Bench) -> int:
    """Cells in which nobody is faster beyond noise, but somebody's median is ahead of ours."""
    count = 0
    for cell in bench.cells:
        ratios = [over(bench, cell, name) for name in others(bench, cell)]
        known = [ratio for ratio in ratios if ratio is not None]
        count += any(r.value < 1.0 for r in known) and not any(r.behind for r in known)
    return count
