"""What each side of a bench launches on a GPU, and what host and device take for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from torchweld.bench.bench_results import Bench, Cell, Result
from torchweld.bench.kernel_counts import KernelCost
from torchweld.bench.kernel_goals import KernelVerdict
from torchweld.core.measured_speed import Speed
from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import counted, figure
from torchweld.core.safe_text import clean
from torchweld.report.bench_tables import Cells, fitted, interval_text, shown, speed_text, wider
from torchweld.report.text_style import heading

SPARE = ("dtype", "launch µs", "interval")
LEGEND = (
    "kernels: that a call runs, by torch.profiler; kernel µs: time in which one runs; host µs: "
    "until the call returns; launch µs: of that, in launches, under the profiler; call µs: until "
    "its kernels have run; speed: over eager's in the same rounds, with its 99 % interval."
)


def device_words(bench: Bench) -> str:
    """`NVIDIA A100, compute capability 8.0, 80 GB, CUDA 13.0, driver 580.65`."""
    gpu = bench.gpu
    if gpu is None:
        return bench.device
    versions = (f"{name} {version}" for name, version in bench.versions.items())
    return clean(", ".join((gpu.words, *versions)))


def kernel_columns(bench: Bench) -> dict[str, Cells]:
    """A line for each side in each cell."""
    lines = [(cell, result) for cell in bench.cells for result in cell.results]
    lines = [(cell, result) for cell, result in lines if not result.refused]
    columns: dict[str, Cells] = {"block": [], "dtype": []}
    before: Cell | None = None
    for cell, _ in lines:
        columns["block"].append("" if cell is before else _name(cell))
        columns["dtype"].append(cell.case.dtype_text if cell.case is not None else cell.dtype)
        before = cell
    rows = [_row(result) for _, result in lines]
    return columns | {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}


def _name(cell: Cell) -> str:
    if cell.case is None:
        return clean(cell.name)
    return clean(f"{cell.case.label or cell.case.kind_text} {cell.case.rows_text}")


def _row(result: Result) -> dict[str, str | Text]:
    found = result.cost.kernels
    known = found if isinstance(found, KernelCost) else None
    compared = result.comparison
    speed = compared.speed if compared is not None else None
    return {
        "side": result.name,
        "kernels": known.words if known else "–",
        "kernel µs": figure(known.kernel_us) if known else "–",
        "host µs": shown(result.cost.host_us),
        "launch µs": figure(known.launch_us) if known else "–",
        "call µs": shown(result.us),
        "speed": speed_text(result, best=False) if result.name != "eager" else "",
        "interval": interval_text(result) if isinstance(speed, Speed) else "",
    }


def kernels_section(
    bench: Bench, verdicts: Sequence[KernelVerdict], width: int
) -> Iterator[RenderableType]:
    """What each side launches; empty for a bench on the CPU."""
    if not bench.on_gpu or not bench.cells:
        return
    yield heading("kernels", device_words(bench))
    table, spare = fitted(kernel_columns(bench), SPARE, width)
    yield table
    yield Text(LEGEND + wider(spare), style="dim")
    yield from _unknown(bench)
    yield from verdict_lines(verdicts)


def _unknown(bench: Bench) -> Iterator[RenderableType]:
    results = [result for cell in bench.cells for result in cell.results]
    unknown = [r.cost.kernels for r in results if isinstance(r.cost.kernels, NotMeasured)]
    if unknown:
        said = f"kernels of {len(unknown)} sides are not measured: {unknown[0].reason}"
        yield Text(clean(said), style="yellow")


def verdict_lines(verdicts: Sequence[KernelVerdict]) -> Iterator[Text]:
    """How many sides launch what they should, and a line for each that does not."""
    good = sum(one.verdict == "as expected" for one in verdicts)
    if verdicts:
        yield Text(f"{good} of {counted(len(verdicts), 'side')} launch the kernels they should")
    for one in verdicts:
        if one.verdict == "differs":
            yield Text(clean(str(one)), style="red")
