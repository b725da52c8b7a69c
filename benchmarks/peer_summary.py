"""From measured cells to figures, losses and tables: data in, text out; nothing is timed here.

A `Cell` holds, for one spot of the grid, the paired comparison of torchweld (the baseline of it)
with every other runtime. Ratios here are torchweld's speed over the other's: above 1 it wins.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peer_grid import PEERS, Block, Spot
from rich import box
from rich.table import Table
from rich.text import Text

from torchweld.measuring import Comparison

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

HEADERS = {
    "compile-max": "compile\nmax",
    "onnxruntime": "ONNX\nRuntime",
    "openvino": "Open\nVINO",
    "torchweld": "torch\nweld",
}


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
    """One spot, measured. `refused` says who took no part and why; `errors` are rms over rms."""

    spot: Spot
    comparisons: Mapping[str, Comparison]
    errors: Mapping[str, float]
    refused: Mapping[str, str]
    details: Mapping[str, Mapping[str, Any]]

    def ratio(self, peer: str) -> Ratio:
        comparison = self.comparisons[peer]
        low, high = comparison.interval
        return Ratio(
            value=1.0 / comparison.speedup,
            low=1.0 / high,
            high=1.0 / low if low > 0.0 else math.inf,
        )

    @property
    def ratios(self) -> dict[str, Ratio]:
        """Everybody who was timed beside torchweld, in rounds enough for an interval."""
        found = {peer: self.ratio(peer) for peer in self.comparisons}
        return {peer: ratio for peer, ratio in found.items() if ratio.measured}

    @property
    def best_peer(self) -> tuple[str, Ratio] | None:
        """The fastest of all the others, eager included; None while one of them has no number."""
        ratios = self.ratios
        if len(ratios) < len(self.comparisons):
            return None
        return min(ratios.items(), key=lambda item: item[1].value, default=None)

    def us(self, name: str) -> float:
        if name == "torchweld":
            return next((c.baseline_us for c in self.comparisons.values()), math.nan)
        return self.comparisons[name].candidate_us

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
        block = Block(
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
    verdict: str  # "kept", "missed" or "not measured"


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan


def figures(cells: Sequence[Cell], peak_gflops: float | None) -> list[Figure]:
    """The figures to reach, each from exactly the cells it speaks of."""
    fp32 = [cell for cell in cells if cell.spot.dtype == "float32"]
    few = [cell for cell in fp32 if cell.spot.rows <= FEW_ROWS]
    sixteen = [cell for cell in cells if cell.spot.dtype != "float32"]
    smallest = [c for c in fp32 if c.spot.block.name == SMALLEST and c.spot.rows == 1]
    wide = [
        cell
        for cell in fp32
        if cell.spot.rows >= MANY_ROWS and cell.spot.block.sizes[0] >= WIDE_FROM
    ]

    def against(peer: str) -> Callable[[Cell], Ratio | None]:
        return lambda cell: cell.ratios.get(peer)

    def against_best(cell: Cell) -> Ratio | None:
        best = cell.best_peer
        return best[1] if best else None

    def of_peak(cell: Cell) -> Ratio | None:
        if peak_gflops is None or not math.isfinite(cell.us("torchweld")):
            return None
        share = cell.gflops / peak_gflops
        return Ratio(value=share, low=share, high=share)

    def time_share(cell: Cell) -> Ratio | None:
        ratio = cell.ratios.get("onnxruntime")
        if ratio is None:
            return None
        low = 0.0 if math.isinf(ratio.high) else 1.0 / ratio.high
        return Ratio(value=1.0 / ratio.value, low=low, high=1.0 / ratio.low)

    mean, least, most = "geometric mean", "every cell", "the cell"
    return [
        _figure(
            "against eager fp32, every cell (within noise)",
            *(fp32, against("eager"), least, EAGER_LEAST),
            within_noise=True,
        ),
        _figure(
            f"against eager fp32, rows ≤ {FEW_ROWS}",
            *(few, against("eager"), mean, EAGER_FEW_ROWS_MEAN),
        ),
        _figure(
            "against eager bf16 and fp16, all rows",
            *(sixteen, against("eager"), mean, EAGER_SIXTEEN_BIT_MEAN),
        ),
        _figure(
            "against the best peer, fp32, hot, every cell",
            *(fp32, against_best, least, BEST_PEER_LEAST),
            hot_only=True,
        ),
        _figure(
            "against the best peer, fp32, hot",
            *(fp32, against_best, mean, BEST_PEER_MEAN),
            hot_only=True,
        ),
        _figure(
            f"share of FMA peak, fp32, rows ≥ {MANY_ROWS}, wide",
            *(wide, of_peak, least, PEAK_LEAST),
            hot_only=True,
        ),
        _figure(
            f"time over ONNX Runtime's, 1 × {SMALLEST}",
            *(smallest, time_share, most, ONNX_TIME_MOST),
            hot_only=True,
        ),
    ]


def _figure(
    name: str,
    cells: Sequence[Cell],
    value_of: Callable[[Cell], Ratio | None],
    kind: str,
    goal: float,
    *,
    within_noise: bool = False,
    hot_only: bool = False,
) -> Figure:
    """`kind` says how cells become one figure; cells without a number are counted, not assumed."""

    def found_in(some: Sequence[Cell]) -> tuple[str, bool | None]:
        pairs = [(cell, value_of(cell)) for cell in some]
        known = [(cell, ratio) for cell, ratio in pairs if ratio is not None and ratio.measured]
        missing = len(some) - len(known)
        tail = f", {missing} not measured" if missing else ""
        if not known:
            return ("–" if not some else f"{missing} not measured"), None
        # What is missing may spoil a figure that is reached without it, and mend none.
        reached = None if missing else True
        if kind == "geometric mean":
            mean = geometric_mean(ratio.value for _, ratio in known)
            return f"{mean:.2f} of {len(known)} cells{tail}", reached if mean >= goal else False
        if kind == "the cell":
            value = known[0][1].value
            return f"{value:.2f}", reached if value <= goal else False
        worst, ratio = min(known, key=lambda pair: pair[1].value)
        below = [r for _, r in known if (r.high if within_noise else r.value) < goal]
        where = f"least {ratio.value:.2f} at {worst.spot.rows} × {worst.spot.block.name}"
        held = f"{len(known) - len(below)} of {len(known)} cells"
        return f"{held}, {where}{tail}", False if below else reached

    hot = [cell for cell in cells if not cell.spot.cold]
    judged = hot if hot_only else cells
    _, kept = found_in(judged)
    return Figure(
        name=name,
        goal=f"{'≤' if kind == 'the cell' else '≥'} {goal:.2f}",
        hot=found_in(hot)[0],
        cold=found_in([cell for cell in cells if cell.spot.cold])[0],
        verdict="not measured" if kept is None else "kept" if kept else "missed",
    )


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


def figure_table(found: Sequence[Figure]) -> Table:
    table = Table(title="the figures to reach (ratios are torchweld's speed over the other's)")
    for name in ("figure", "goal", "hot", "cold", "verdict"):
        table.add_column(name, overflow="fold")
    style = {"kept": "green", "missed": "bold red", "not measured": "yellow"}
    for figure in found:
        verdict = Text(figure.verdict, style=style[figure.verdict])
        table.add_row(figure.name, figure.goal, figure.hot, figure.cold, verdict)
    return table


def speed_tables(cells: Sequence[Cell]) -> list[Table]:
    """One table for each dtype, hot and cold apart: speed over eager's, the best in bold."""
    kinds = dict.fromkeys((cell.spot.dtype, cell.spot.cold) for cell in cells)
    return [
        _speed_table([c for c in cells if (c.spot.dtype, c.spot.cold) == kind]) for kind in kinds
    ]


def _speed_table(cells: Sequence[Cell]) -> Table:
    spot = cells[0].spot
    present = [p for p in PEERS if p == "torchweld" or any(p in c.comparisons for c in cells)]
    peers = [peer for peer in present if peer != "eager"]
    table = Table(
        title=f"{spot.dtype}, {spot.temperature}: speed over eager's",
        caption="~: the control was unsteady, or the interval too wide for a verdict",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    table.add_column("block", no_wrap=True)
    for name in ("rows", "eager µs", *(HEADERS.get(peer, peer) for peer in peers)):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("kernel", overflow="fold")
    for block in dict.fromkeys(cell.spot.block for cell in cells):
        table.add_section()
        own = [c for c in cells if c.spot.block == block]
        labels = block.name.split() if len(own) > 1 else [block.name.replace(" ", "\n")]
        for cell, label in itertools.zip_longest(own, labels, fillvalue=""):
            table.add_row(Text(label, style="bold"), *_speed_row(cell, peers))
    return table


def _speed_row(cell: Cell, peers: Sequence[str]) -> list[Text]:
    ratios = cell.ratios
    rows = Text(str(cell.spot.rows))
    if "eager" not in ratios:
        blanks = [Text("–") for _ in peers]
        return [rows, Text("–"), *blanks, Text("not measured")]
    eager = ratios["eager"].value
    speeds = {peer: eager / ratios[peer].value for peer in peers if peer in ratios}
    speeds["torchweld"] = eager
    best = max([*speeds.values(), 1.0])
    row = [rows, Text(f"{cell.us('eager'):.1f}", style="bold" if best == 1.0 else "")]
    for peer in peers:
        if peer not in speeds:
            row.append(Text("–"))
            continue
        comparison = cell.comparisons["eager" if peer == "torchweld" else peer]
        mark = "~" if comparison.verdict == "not measured" else ""
        row.append(Text(f"{mark}{speeds[peer]:.2f}", style="bold" if speeds[peer] == best else ""))
    return [*row, Text(kernel_text(cell.details.get("torchweld", {})))]


def kernel_text(details: Mapping[str, Any]) -> str:
    """What `last_run` said, short."""
    if "isa" not in details:
        return str(details.get("backend", "–"))
    parts = (details["isa"], details["weights"], details["partition"])
    return f"{' '.join(str(part) for part in parts)} ×{details['threads']}"
