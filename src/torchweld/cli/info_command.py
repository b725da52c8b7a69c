"""`torchweld info`: what this machine is, what torchweld can use of it, and why not the rest."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version

import click
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from torchweld.core.errors import TorchweldError
from torchweld.core.number_text import binary_size
from torchweld.core.records import to_plain
from torchweld.machine import hardware, kernel_build, measured_peaks
from torchweld.machine.fingerprint import key_here
from torchweld.machine.hardware import Hardware
from torchweld.machine.kernel_build import BuildInfo
from torchweld.machine.machine_load import busy_cores, load_words
from torchweld.machine.measured_peaks import Peaks
from torchweld.ops import backends
from torchweld.ops.backends import Abilities

WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class Isa:
    """One set of kernels."""

    name: str
    built: bool
    supported: bool
    in_use: bool


@dataclass(frozen=True, kw_only=True)
class BackendInfo:
    """One way to run a block; `reasons` says why it cannot be used here, and is empty if it can."""

    name: str
    reasons: tuple[str, ...]
    abilities: Abilities


@dataclass(frozen=True, kw_only=True)
class Info:
    """All that is shown. `problem` is why the compiled part cannot be used, None if it can."""

    torchweld: str
    hardware: Hardware
    build: BuildInfo | None
    problem: str | None
    isas: tuple[Isa, ...]
    forced_isa: str | None
    fingerprint: str | None
    peaks: Peaks | None
    backends: tuple[BackendInfo, ...]


def collect() -> Info:
    """Look at this machine. An unusable compiled part is a fact to report, not an error."""
    problem = kernel_build.build_problem()
    isas: tuple[Isa, ...] = ()
    fingerprint: str | None = None
    peaks: Peaks | None = None
    try:
        states = kernel_build.isa_states()
        isas = tuple(
            Isa(name=n, built=b, supported=s, in_use=False) for n, (b, s) in states.items()
        )
        used = kernel_build.isa_in_use()
        isas = tuple(
            Isa(name=i.name, built=i.built, supported=i.supported, in_use=i.name == used)
            for i in isas
        )
        fingerprint = key_here()
        peaks = measured_peaks.peaks()
    except TorchweldError as error:
        problem = str(error)
    return Info(
        torchweld=version("torchweld"),
        hardware=hardware.hardware(),
        build=kernel_build.build_info(),
        problem=problem,
        isas=isas,
        forced_isa=os.environ.get("TORCHWELD_ISA") or None,
        fingerprint=fingerprint,
        peaks=peaks,
        backends=tuple(
            BackendInfo(name=b.name, reasons=tuple(b.unavailable()), abilities=b.abilities)
            for b in backends.BACKENDS
        ),
    )


def render(info: Info) -> Iterator[RenderableType]:
    """The facts as tables."""
    here = info.hardware
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    vendor = f" ({here.cpu_vendor})" if here.cpu_vendor else ""
    facts.add_row("torchweld", info.torchweld)
    facts.add_row("torch", here.torch_version)
    facts.add_row("CPU", f"{here.cpu_model}{vendor}, {here.machine}")
    facts.add_row("it has", " ".join(here.instruction_sets) or "unknown")
    facts.add_row("cores", f"{here.cores} ({here.cpus_allowed} CPUs may be used here)")
    facts.add_row("threads", f"{here.threads} (torch.set_num_threads or OMP_NUM_THREADS)")
    caches = here.caches
    facts.add_row(
        "caches",
        f"L1d {binary_size(caches.l1d_bytes)}, L2 {binary_size(caches.l2_bytes)}, "
        f"L3 {binary_size(caches.l3_bytes)}",
    )
    facts.add_row("memory", binary_size(here.memory_bytes))
    if info.build is not None:
        facts.add_row("built for", f"torch {info.build.torch}, by {info.build.compiler}")
        facts.add_row("CUDA kernels", str(info.build.cuda))
    if info.problem is not None:
        facts.add_row("problem", Text(info.problem, style="yellow"))
    facts.add_row("fingerprint", info.fingerprint or "none")
    yield facts
    yield ""
    yield from render_isas(info)
    yield from render_peaks(info)
    yield from render_backends(info)


def render_backends(info: Info) -> Iterator[RenderableType]:
    """What each backend can do; below, why some cannot be used here."""
    columns = ("usable", "runs on", "modes (*: a copy)", "gradients", "graphs", "needs")
    table = Table("backend", *columns, box=None, padding=(0, 2, 0, 0))
    for backend in info.backends:
        can = backend.abilities
        table.add_row(
            backend.name,
            Text("no", style="yellow") if backend.reasons else Text("yes", style="green"),
            ", ".join(can.devices or ("any device",)),
            ", ".join(mode.name + "*" * mode.packs for mode in can.modes),
            "yes" if can.trains else "no",
            "yes" if can.in_graphs else "no",
            can.needs,
        )
    yield table
    for backend in info.backends:
        if backend.reasons:
            yield f"{backend.name} cannot be used here: {'; '.join(backend.reasons)}"


def render_isas(info: Info) -> Iterator[RenderableType]:
    """The sets of kernels: which were built, which the CPU can run, and which is in use."""
    if not info.isas:
        return
    table = Table("kernels for", "built", "CPU has it", "in use", box=None, padding=(0, 2, 0, 0))
    for isa in info.isas:
        answers = ("yes" if yes else "no" for yes in (isa.built, isa.supported, isa.in_use))
        table.add_row(isa.name, *answers)
    yield table
    if info.forced_isa is not None:
        yield f"Forced by TORCHWELD_ISA={info.forced_isa}."
    else:
        names = ", ".join(isa.name for isa in info.isas if isa.built and isa.supported)
        yield f"Chosen at load; TORCHWELD_ISA forces another ({names})."
    yield ""


def render_peaks(info: Info) -> Iterator[RenderableType]:
    """Measured rates, or how to get them."""
    if info.peaks is None:
        yield "peaks: not measured; run torchweld info --measure"
        yield ""
        return
    peaks = info.peaks
    teams = sorted({peak.threads for peak in peaks.fma})
    columns = [f"{n} thread{'s' if n > 1 else ''}" for n in teams]
    rates = Table("GFLOP/s", *columns, box=None, padding=(0, 2, 0, 0))
    for dtype in dict.fromkeys(peak.dtype for peak in peaks.fma):
        rates.add_row(dtype, *(f"{peaks.fma_gflops(dtype, n):.1f}" for n in teams))
    reads = Table("read GB/s from", *columns, box=None, padding=(0, 2, 0, 0))
    for working_set in dict.fromkeys(peak.working_set_bytes for peak in peaks.read):
        row = (f"{peaks.read_gbps(working_set, n):.1f}" for n in teams)
        reads.add_row(binary_size(working_set), *row)
    both = Table.grid(padding=(0, 6))
    both.add_row(rates, reads)
    yield f"peaks, by {peaks.method}"
    yield both
    yield ""


@click.command(
    short_help="Show this machine, and what torchweld can use of it.",
    epilog="Example: torchweld info --measure",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--measure", is_flag=True, help="Measure this machine's peaks now, and keep them.")
def info(as_json: bool, measure: bool) -> None:
    """Show this machine: torch, CPU, instruction sets, peaks, and each backend.

    For a backend that cannot be used here it says why.
    """
    busy = busy_cores() if measure else None
    if busy is not None and not as_json and (words := load_words(busy)):
        click.echo(f"{words}\n")  # before the figures, and before they may fail
    if measure:
        measured_peaks.peaks(measure=True)
    facts = collect()
    if as_json:
        data = to_plain(facts, all_fields=True)
        data |= {} if busy is None else {"busy_cores": to_plain(busy)}
        click.echo(json.dumps(data, indent=2))
        return
    # Wider than a screen when piped; never wider than a screen on one.
    console = Console(file=sys.stdout, highlight=False, markup=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    for part in render(facts):
        console.print(part)
