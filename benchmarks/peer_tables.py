"""The tables of the peers benchmark, for 100 columns: cells and figures in, rich tables out."""

from collections.abc import Mapping, Sequence
from typing import Any

from peer_grid import PEERS
from peer_summary import Cell, Figure
from rich import box
from rich.table import Table
from rich.text import Text

HEADERS = {
    "compile-max": "compile\nmax",
    "onnxruntime": "ONNX\nRuntime",
    "openvino": "Open\nVINO",
    "torchweld": "torch\nweld",
}


def figure_table(found: Sequence[Figure]) -> Table:
    table = Table(title="the figures to reach (ratios are torchweld's speed over the other's)")
    for name in ("figure", "goal", "hot", "cold", "verdict"):
        table.add_column(name, overflow="fold")
    style = {"kept": "green", "missed": "bold red"}
    for figure in found:
        verdict = Text(figure.verdict, style=style.get(figure.verdict, "yellow"))
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
        labels += [""] * (len(own) - len(labels))
        for cell, label in zip(own, labels, strict=True):
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
    """What `last_run` said, short; the instruction set is the same everywhere."""
    if "weights" not in details:
        return str(details.get("backend", "–"))
    return f"{details['weights']} {details['partition']} ×{details['threads']}"
