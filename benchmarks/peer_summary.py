"""From measured cells to figures and losses: data in, data and sentences out; nothing is timed.

A `Cell` holds, for one spot of the grid, the paired comparison of torchweld (the baseline of it)
with every other runtime. Ratios here are torchweld's speed over the other's: above 1 it wins.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peer_grid import BLOCKS, DTYPES, PEERS, Spot, grid, takes_part

from torchweld.bench.cases import MlpShape
from torchweld.core.not_measured import NotMeasured
from torchweld.timing import Comparison

EAGER_LEAST = 1.0
EAGER_FEW_ROWS_MEAN = 3.0
EAGER_SIXTEEN_BIT_MEAN = 5.0
BEST_PEER_LEAST = 0.95
BEST_PEER_MEAN = 1.25
PEAK_LEAST = 0.85
ONNX_TIME_MOST = 0.6

FEW_ROWS = 32
MANY_ROWS = 64
WIDE_FROM = 256  # inputs of the narrowest wide block
SMALLEST = "64→256→64 gelu"


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """torchweld's speed over another's, and where it lies for certain."""

    value: float
    low: float
    high: float

    @property
    def measured(self) -> bool:
        return math.isfinite(self.value) and math.isfinite(self.high)

    @property
    def lost(self) -> bool:
        return self.measured and self.high < 1.0


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One spot, measured.

    comparisons: torchweld against each other runtime
    errors:      the largest error of each output against fp64, over the rms of the outputs
    refused:     who was not timed, and why
    details:     what each runtime says of how it ran; torchweld: the kernel and instruction set
    """

    spot: Spot
    comparisons: Mapping[str, Comparison]
    errors: Mapping[str, float]
    refused: Mapping[str, str]
    details: Mapping[str, Mapping[str, Any]]

    def ratio(self, peer: str) -> Ratio:
        comparison = self.comparisons[peer]
        if isinstance(comparison.interval, NotMeasured):
            return Ratio(value=math.nan, low=0.0, high=math.inf)
        low, high = comparison.interval
        return Ratio(value=1.0 / comparison.speedup, low=1.0 / high, high=1.0 / low)

    @property
    def ratios(self) -> dict[str, Ratio]:
        """Everybody who was timed beside torchweld, in rounds enough for an interval."""
        found = {peer: self.ratio(peer) for peer in self.comparisons}
        return {peer: ratio for peer, ratio in found.items() if ratio.measured}

    @property
    def unheard(self) -> list[str]:
        """Peers that should have been here, and neither were nor said why not."""
        heard = {*self.comparisons, *self.refused, "torchweld"}
        return [peer for peer in PEERS if takes_part(peer, self.spot) and peer not in heard]

    @property
    def best_peer(self) -> tuple[str, Ratio] | None:
        """The fastest of all the others, eager included; None while one of them has no number."""
        ratios = self.ratios
        if len(ratios) < len(self.comparisons):
            return None
        return min(ratios.items(), key=lambda item: item[1].value, default=None)

    def us(self, name: str) -> float:
        if name == "torchweld":
            longest = max(self.comparisons.values(), key=lambda c: c.rounds, default=None)
            us = math.nan if longest is None else longest.baseline_us
        else:
            us = self.comparisons[name].candidate_us
        return math.nan if isinstance(us, NotMeasured) else us

    @property
    def gflops(self) -> float:
        return self.spot.block.flops(self.spot.rows) / self.us("torchweld") / 1e3

    def to_dict(self) -> dict[str, Any]:
        spot = self.spot
        return {
            "sizes": list(spot.block.sizes),
            "activation": spot.block.activation,
            "gated": spot.block.gated,
            "bias": spot.block.bias,
            "rows": spot.rows,
            "dtype": spot.dtype,
            "cold": spot.cold,
            "comparisons": {name: c.to_dict() for name, c in self.comparisons.items()},
            "errors": {n: e if math.isfinite(e) else str(e) for n, e in self.errors.items()},
            "refused": dict(self.refused),
            "details": {name: dict(values) for name, values in self.details.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Cell":
        block = MlpShape(
            sizes=tuple(data["sizes"]),
            activation=data["activation"],
            gated=data["gated"],
            bias=data["bias"],
        )
        compared = data["comparisons"].items()
        return cls(
            spot=Spot(block=block, rows=data["rows"], dtype=data["dtype"], cold=data["cold"]),
            comparisons={name: Comparison.from_dict(c) for name, c in compared},
            errors={name: float(error) for name, error in data["errors"].items()},
            refused=data["refused"],
            details=data["details"],
        )


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One promised figure: what was found, over hot and over cold cells, and whether it is kept."""

    name: str
    goal: str
    hot: str
    cold: str
    verdict: str  # "kept", "kept in part", "missed" or "not measured"


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan


def figures(cells: Sequence[Cell], peak_gflops: float | None) -> list[Figure]:
    """The figures to reach, each from exactly the cells it speaks of."""

    def against(peer: str) -> Callable[[Cell], Ratio | None]:
        return lambda cell: cell.ratios.get(peer)

    def against_best(cell: Cell) -> Ratio | None:
        best = cell.best_peer
        return best[1] if best else None

    def of_peak(cell: Cell) -> Ratio | None:
        if peak_gflops is None or not cell.ratios:
            return None
        share = cell.gflops / peak_gflops
        return Ratio(value=share, low=share, high=share)

    def time_share(cell: Cell) -> Ratio | None:
        ratio = cell.ratios.get("onnxruntime")
        if ratio is None:
            return None
        return Ratio(value=1.0 / ratio.value, low=1.0 / ratio.high, high=1.0 / ratio.low)

    def fp32(spot: Spot) -> bool:
        return spot.dtype == "float32"

    def hot(spot: Spot) -> bool:
        return fp32(spot) and not spot.cold

    def wide(spot: Spot) -> bool:
        return hot(spot) and spot.rows >= MANY_ROWS and spot.block.sizes[0] >= WIDE_FROM

    eager, mean, least = against("eager"), "geometric mean", "every cell"
    claims = (
        _Claim(
            name="against eager fp32, every cell (within noise)",
            about=fp32,
            value=eager,
            kind=least,
            goal=EAGER_LEAST,
            within_noise=True,
        ),
        _Claim(
            name=f"against eager fp32, rows ≤ {FEW_ROWS}",
            about=lambda spot: fp32(spot) and spot.rows <= FEW_ROWS,
            value=eager,
            kind=mean,
            goal=EAGER_FEW_ROWS_MEAN,
        ),
        _Claim(
            name="against eager bf16 and fp16, all rows",
            about=lambda spot: not fp32(spot),
            value=eager,
            kind=mean,
            goal=EAGER_SIXTEEN_BIT_MEAN,
        ),
        _Claim(
            name="against the best peer, fp32, hot, every cell",
            about=hot,
            value=against_best,
            kind=least,
            goal=BEST_PEER_LEAST,
            everybody=True,
        ),
        _Claim(
            name="against the best peer, fp32, hot",
            about=hot,
            value=against_best,
            kind=mean,
            goal=BEST_PEER_MEAN,
            everybody=True,
        ),
        _Claim(
            name=f"share of FMA peak, fp32, hot, rows ≥ {MANY_ROWS}, wide",
            about=wide,
            value=of_peak,
            kind=least,
            goal=PEAK_LEAST,
        ),
        _Claim(
            name=f"time over ONNX Runtime's, hot, 1 × {SMALLEST}",
            about=lambda spot: hot(spot) and spot.rows == 1 and spot.block.name == SMALLEST,
            value=time_share,
            kind="the cell",
            goal=ONNX_TIME_MOST,
        ),
    )
    return [_figure(claim, cells) for claim in claims]


@dataclass(frozen=True, kw_only=True)
class _Claim:
    """What a figure promises: of which spots, how their values become one, and what it has to be.

    `within_noise` lets an interval reach the goal; `everybody` speaks of all peers there are.
    """

    name: str
    about: Callable[[Spot], bool]
    value: Callable[[Cell], Ratio | None]
    kind: str
    goal: float
    within_noise: bool = False
    everybody: bool = False


def _figure(claim: _Claim, cells: Sequence[Cell]) -> Figure:
    """Cells without a number are counted, not assumed; a part of the grid proves a part."""
    own = [cell for cell in cells if claim.about(cell.spot)]
    spots = {spot for spot in grid(BLOCKS, None, DTYPES, (False, True)) if claim.about(spot)}
    in_part = not spots <= {cell.spot for cell in own}
    in_part |= claim.everybody and any(cell.unheard for cell in own)
    cold = [cell for cell in own if cell.spot.cold]
    _, reached = _found(claim, own)
    verdict = {None: "not measured", False: "missed", True: "kept"}[reached]
    return Figure(
        name=claim.name,
        goal=f"{'≤' if claim.kind == 'the cell' else '≥'} {claim.goal:.2f}",
        hot=_found(claim, [cell for cell in own if not cell.spot.cold])[0],
        cold=_found(claim, cold)[0],
        verdict="kept in part" if reached and in_part else verdict,
    )


def _found(claim: _Claim, cells: Sequence[Cell]) -> tuple[str, bool | None]:
    """What the cells say, and whether that reaches the goal; None: not known."""
    pairs = [(cell, claim.value(cell)) for cell in cells]
    known = [(cell, ratio) for cell, ratio in pairs if ratio is not None]
    missing = len(cells) - len(known)
    tail = f", {missing} not measured" if missing else ""
    if not known:
        return (f"{missing} not measured" if cells else "–"), None
    # What is missing may spoil a figure that is reached without it, and mend none.
    reached = None if missing else True
    if claim.kind == "geometric mean":
        mean = geometric_mean(ratio.value for _, ratio in known)
        return f"{mean:.2f} of {len(known)} cells{tail}", reached if mean >= claim.goal else False
    if claim.kind == "the cell":
        value = known[0][1].value
        return f"{value:.2f}", reached if value <= claim.goal else False
    worst, ratio = min(known, key=lambda pair: pair[1].value)
    below = [r for _, r in known if (r.high if claim.within_noise else r.value) < claim.goal]
    held = f"{len(known) - len(below)} of {len(known)} cells"
    where = f"least {ratio.value:.2f} at {worst.spot.rows} × {worst.spot.block.name}"
    return f"{held}, {where}{tail}", False if below else reached


def losses(cells: Sequence[Cell]) -> list[str]:
    """A sentence for every cell in which somebody is faster beyond noise, the worst first."""
    found: list[tuple[float, str]] = []
    for cell in cells:
        lost = sorted(
            ((peer, ratio) for peer, ratio in cell.ratios.items() if ratio.lost),
            key=lambda item: item[1].value,
        )
        if not lost:
            continue
        winners = ", ".join(
            f"{peer} {1 / r.value:.2f} times as fast ({1 / r.high:.2f} to {1 / r.low:.2f}; "
            f"{cell.us(peer):.1f} against {cell.us('torchweld'):.1f} µs)"
            f"{'' if cell.comparisons[peer].verdict == 'faster' else ', control unsteady'}"
            for peer, r in lost
        )
        found.append((lost[0][1].value, f"{cell.spot}: {winners}"))
    return [sentence for _, sentence in sorted(found)]


def undecided(cells: Sequence[Cell]) -> int:
    """Cells that nobody wins beyond noise, but in which somebody's median is ahead."""
    return sum(
        any(r.value < 1.0 for r in cell.ratios.values())
        and not any(r.lost for r in cell.ratios.values())
        for cell in cells
    )


def error_sentences(cells: Sequence[Cell]) -> list[str]:
    """For each dtype, the largest error of each runtime that was timed, over the rms of outputs."""
    found: dict[str, dict[str, float]] = {}
    for cell in cells:
        largest = found.setdefault(cell.spot.dtype, {})
        for name, error in cell.errors.items():
            if name not in cell.refused:
                largest[name] = max(error, largest.get(name, 0.0))
    return [
        f"largest error against fp64, {dtype}: "
        + ", ".join(f"{name} {error:.1e}" for name, error in largest.items())
        for dtype, largest in found.items()
    ]


def isas(cells: Sequence[Cell]) -> list[str]:
    """The instruction sets that torchweld's kernels used."""
    found = (cell.details.get("torchweld", {}).get("isa") for cell in cells)
    return list(dict.fromkeys(str(isa) for isa in found if isa is not None))
