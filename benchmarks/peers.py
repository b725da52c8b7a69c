"""torchweld against eager, mkldnn, torch.compile, ONNX Runtime and OpenVINO: verified, then timed.

Every runtime gets the same weights and inputs and a process of its own
(`torchweld.bench.worker_processes`); one runs at a time. Each cell of the grid (`peer_grid`) is
verified against fp64, then measured as one paired comparison with torchweld as the baseline. Out
come tables, the figures to reach, a sentence for every cell that is lost (`peer_summary`), and with
--json everything, raw.
"""

import argparse
import importlib.metadata
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import peer_grid as pg
import torch
from peer_bench import Bench
from peer_summary import (
    Cell,
    error_sentences,
    figures,
    isas,
    losses,
    undecided,
)
from peer_tables import figure_table, speed_tables
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from torchweld.bench.participants import absent
from torchweld.bench.stage_timing import MIN_ROUNDS
from torchweld.bench.worker_processes import AVX2_ENVIRONMENT, Stage, WorkerError
from torchweld.machine.fingerprint import key_here
from torchweld.machine.hardware import hardware

WIDTH = 100
PACKAGES = ("torch", "torchweld", "onnxruntime", "onnx", "openvino")


def expected_s(spot: pg.Spot, peers: Sequence[str], seconds: float, gflops: float) -> float:
    """About how long a spot takes, for the time that is left; from rates typical of eager."""
    flops, total_s, compile_s = spot.block.flops(spot.rows), 0.0, 0.0
    for name in peers:
        if not pg.takes_part(name, spot):
            continue
        slow = spot.dtype != "float32" and name != "torchweld"
        call_s = 20e-6 + flops / ((0.12 if slow else 0.6) * gflops * 1e9)
        visits = 4 if name == "torchweld" else 2
        total_s += visits * max(call_s, 3e-3 if spot.cold else 1.5e-3)
        if name.startswith("compile") and not spot.cold:
            compile_s += 10.0
    return 0.5 + compile_s + max(0.8 * seconds, 1.2 * MIN_ROUNDS * total_s)


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def record(options: argparse.Namespace, threads: int) -> dict[str, Any]:
    """The machine and the versions, as they go into the JSON."""
    return {
        "kind": "torchweld.peers",
        "version": 1,
        "hardware": {**asdict(hardware()), "threads": threads},
        "fingerprint": key_here(),
        "versions": {package: version_of(package) for package in PACKAGES},
        "isa": options.isa or "the best",
        "seconds": options.seconds,
    }


def show(data: Mapping[str, Any], console: Console) -> int:
    """Prints everything that was found; 1 if a figure is missed, 2 if one is not known in full."""
    cells = [Cell.from_dict(entry) for entry in data["cells"]]
    for table in speed_tables(cells):
        console.print(table)
    machine, versions = data["hardware"], data["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    used = " and ".join(isas(cells)) or "no"
    console.print(f"{machine['cpu_model']}, {data['threads']} threads, {used} kernels; {named}")
    peak = data["peak_gflops"]
    if peak:
        console.print(f"fp32 FMA peak, measured in this run: {peak:.0f} GFLOP/s")
    if data["isa"] == "avx2":
        console.print(
            "isa avx2: torchweld, torch, oneDNN and MKL are held to AVX2; ONNX Runtime and the "
            "MLAS products of OpenVINO have no such switch and use what the CPU has"
        )
    for sentence in data["parked"]:
        console.print(sentence)
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        for name, why in cell.refused.items():
            reasons.setdefault(f"{name}: {why}", []).append(str(cell.spot))
    for name, why in data["absent"].items():
        console.print(f"left out: {name}: {why}")
    for reason, where in reasons.items():
        console.print(f"left out in {len(where)} cells ({where[0]}, …): {reason}")
    for sentence in error_sentences(cells):
        console.print(sentence)
    found = figures(cells, peak)
    console.print(figure_table(found))
    lost = losses(cells)
    if not data["complete"]:
        console.print(f"[bold]interrupted: {len(cells)} of {data['planned']} cells[/bold]")
    known = sum(cell.best_peer is not None for cell in cells)
    console.print(
        f"[bold]lost in {len(lost)} of the {known} cells that were measured against everybody; "
        f"{len(cells) - known} were not[/bold]"
    )
    for sentence in lost:
        console.print(f"  {sentence}", highlight=False)
    console.print(f"too close to call, with somebody ahead in the median: {undecided(cells)} cells")
    verdicts = {figure.verdict for figure in found}
    return 1 if "missed" in verdicts else 0 if verdicts == {"kept"} else 2


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measures everything that was asked for; what there is when interrupted."""
    threads = options.threads or torch.get_num_threads()
    spots = list(pg.grid(options.blocks, options.rows, options.dtypes, options.temperatures))
    peers = [name for name in pg.PEERS if name in (*pg.FIXED, *options.peers)]
    data = {**record(options, threads), "threads": threads, "planned": len(spots)}
    data.update(complete=False, peak_gflops=None, parked=[], parked_raw={}, absent=absent(peers))
    cells: list[Cell] = []
    begun_s = time.perf_counter()
    with Stage(threads, AVX2_ENVIRONMENT if options.isa == "avx2" else None) as stage:
        bench = Bench(stage, options.seconds, spots)
        try:
            prepare(bench, [name for name in peers if name not in data["absent"]], data, console)
            measure(bench, spots, cells, console)
            data["complete"] = True
        except KeyboardInterrupt:
            console.print("interrupted; what there is:")
        data["peak_gflops"] = max(bench.peaks_gflops, default=None)
        data["peaks_gflops"] = bench.peaks_gflops
    data["cells"] = [cell.to_dict() for cell in cells]
    data["elapsed_s"] = time.perf_counter() - begun_s
    return data


def prepare(bench: Bench, peers: Sequence[str], data: dict[str, Any], console: Console) -> None:
    """Starts the workers, measures the peak, and checks that the parked ones are out of the way."""
    console.print(f"starting {', '.join(peers)}", highlight=False)
    refused = bench.stage.start(["eager"])
    alone_us = bench.eager_us() if not refused else math.nan
    refused.update(bench.stage.start([name for name in peers if name != "eager"]))
    data["absent"].update(refused)
    for name in pg.FIXED:
        if name in refused:
            raise SystemExit(f"{name} cannot run: {refused[name]}")
    try:
        bench.probe_peak()
    except WorkerError as error:
        data["absent"]["peak"] = str(error)
    parked = bench.parked(alone_us)
    data["parked"] = list(parked.sentences())
    data["parked_raw"] = {
        "alone_us": parked.alone_us,
        "cpu_ms": dict(parked.cpu_ms),
        "beside": {name: c.to_dict() for name, c in parked.beside.items()},
    }
    for sentence in data["parked"]:
        console.print(sentence)


def measure(bench: Bench, spots: Sequence[pg.Spot], cells: list[Cell], console: Console) -> None:
    """Appends every spot's cell to `cells`, with a line for each and the time that is left."""
    peers, gflops = list(bench.stage.workers), max(bench.peaks_gflops, default=100.0)
    shares = [expected_s(spot, peers, bench.seconds, gflops) for spot in spots]
    begun_s, done_s = time.perf_counter(), 0.0
    console.print(f"{len(spots)} cells, about {sum(shares) / 60:.0f} min")
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
    # A bar that redraws itself does so beside a timed call; this one does between cells.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=sum(shares), left="")
        for spot, share in zip(spots, shares, strict=True):
            pace = (time.perf_counter() - begun_s) / done_s if done_s else 1.0
            left = f"{pace * (sum(shares) - done_s) / 60:.0f} min left"
            progress.update(task, completed=done_s, description=str(spot), left=left, refresh=True)
            cell = bench.measure(spot)
            done_s += share
            if spot.dtype == "float32" and not spot.cold and bench.peaks_gflops:
                bench.probe_peak()
            cells.append(cell)
            console.print(line(cell), highlight=False)


def line(cell: Cell) -> str:
    best, ratios = cell.best_peer, cell.ratios
    if best is None:
        unmeasured = [c for name, c in cell.comparisons.items() if name not in ratios]
        reasons = [*cell.refused.values(), *(c.reason for c in unmeasured)]
        return f"{cell.spot}: not measured, {reasons[-1] if reasons else 'nobody took part'}"
    text = f"{cell.spot}: {ratios['eager'].value:.2f} of eager"
    return text if best[0] == "eager" else f"{text}, {best[1].value:.2f} of {best[0]}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="All of it takes about an hour on a quiet machine with two cores, --quick about "
        "3 minutes. Exits 1 if a figure is missed, 2 if one is not measured in full.",
    )
    add = parser.add_argument
    add("--blocks", nargs="+", metavar="SIZES", help="such as 768-3072-768; all if left out")
    add("--rows", nargs="+", type=int, metavar="M", help="row counts for every block")
    add("--dtypes", nargs="+", choices=pg.DTYPES)
    add("--peers", nargs="*", choices=pg.PEERS, help="beside eager and torchweld")
    add("--only", choices=("hot", "cold"), help="leave the other out")
    add("--seconds", type=float, help="for each cell, more where 20 rounds need it (4)")
    add("--threads", type=int, help="for every runtime; torch's number if left out")
    add("--isa", choices=("avx2",), help="hold torchweld and torch to AVX2, on a CPU that has more")
    add("--quick", action="store_true", help="rows 1, 8, 64, fp32 and bf16, hot, no torch.compile")
    add("--json", type=Path, metavar="FILE", help="write everything there, raw")
    add("--force", action="store_true", help="overwrite FILE")
    add("--show", type=Path, metavar="FILE", help="measure nothing; print what --json wrote")
    options = parser.parse_args(arguments)
    quick = options.quick
    try:
        options.blocks = [pg.block_named(name) for name in options.blocks or ()] or pg.BLOCKS
    except ValueError as error:
        parser.error(str(error))
    if options.json and options.json.exists() and not options.force:
        parser.error(f"{options.json} exists; give --force to overwrite it, or another name")
    options.rows = options.rows or ([1, 8, 64] if quick else None)
    options.dtypes = options.dtypes or (["float32", "bfloat16"] if quick else list(pg.DTYPES))
    if options.peers is None:
        options.peers = [p for p in pg.PEERS if not (quick and p.startswith("compile"))]
    cold = [False] if quick else [False, True]
    options.temperatures = [options.only == "cold"] if options.only else cold
    options.seconds = options.seconds or (1.0 if quick else 4.0)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(width=WIDTH)
    if options.show:
        return show(json.loads(options.show.read_text()), console)
    data = run(options, console)
    if options.json:
        options.json.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    return show(data, console)


if __name__ == "__main__":
    sys.exit(main())
