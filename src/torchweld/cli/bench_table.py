"""`torchweld bench --table FILE.json`: what it goes with, and the file it writes."""

from __future__ import annotations

import datetime
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from torchweld.bench import Bench, Case, Result
from torchweld.bench.runtimes.runtime_names import TABLE_RUNTIMES
from torchweld.bench.speed_tables import ENVIRONMENT, held_problem, table_of
from torchweld.cli.bench_progress import Keeper, run_cases
from torchweld.core.errors import TorchweldError
from torchweld.core.files import write_whole
from torchweld.machine import hardware, kernel_build
from torchweld.plans.known_speeds import table_text

# Options that say which blocks.
GRID = ("block", "sizes", "rows", "dtype")
# A cell that noise hid is measured again, for this many times the seconds.
PATIENCE = 3.0


def check_table(options: dict[str, Any]) -> None:
    """Raises for options, or a machine, that no table can be made with."""
    own = ("target", "preset", "against", "backend", "cold", "latency", "callers", "training")
    odd = [name for name in own if options[name]]
    if odd:
        what = "a TARGET" if odd[0] == "target" else f"--{odd[0]}"
        raise TorchweldError(
            f"--table has blocks of its own, measured in its own way, and does not go with {what}; "
            "--block, --sizes, --rows and --dtype do"
        )
    if options["table"].suffix != ".json":
        raise TorchweldError(f"--table {options['table']}: the name has to end in .json")
    problem = held_problem(
        None if kernel_build.build_problem() else kernel_build.isa_in_use(),
        torch.backends.cpu.get_cpu_capability(),
        hardware.hardware().instruction_sets,
        os.environ,
    )
    if problem:
        raise TorchweldError(f"--table: {problem}")


def table_command(options: dict[str, Any]) -> str:
    """The command that makes the same table again, with the environment that matters."""
    path = options["table"]
    asked = [f"--{name}={','.join(options[name])}" for name in GRID if options[name]]
    return shlex.join(
        [
            *(f"{name}={os.environ[name]}" for name in ENVIRONMENT if name in os.environ),
            *("torchweld", "bench", "--table", path.name if path.is_absolute() else str(path)),
            *asked,
            *("--seconds", f"{options['seconds']:g}", "--seed", str(options["seed"])),
        ]
    )


def run_table(
    bench: Bench, cases: Sequence[Case], console: Console | None, keeper: Keeper
) -> Bench:
    """All cases; those in which noise hid a way are measured once more, with more time.

    A verdict is kept: a second try would be a second chance.
    """
    done = run_cases(bench, cases, False, console, keeper, TABLE_RUNTIMES)
    hidden = [i for i, cell in enumerate(done.cells) if any(map(_hidden, cell.results[1:]))]
    if done.interrupted or not hidden:
        return done
    patient = replace(bench, seconds=PATIENCE * bench.seconds)
    few = [cases[i] for i in hidden]
    again = run_cases(patient, few, False, console, Keeper(None, None), TABLE_RUNTIMES)
    cells = list(done.cells)
    for i, second in zip(hidden, again.cells, strict=False):
        pairs = zip(cells[i].results, second.results, strict=True)
        results = tuple(new if _hidden(old) else old for old, new in pairs)
        cells[i] = replace(cells[i], results=results)
    return replace(done, cells=tuple(cells), interrupted=again.interrupted)


def _hidden(result: Result) -> bool:
    return not result.measured and not result.refused


def write_table(done: Bench, options: dict[str, Any]) -> None:
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    write_whole(options["table"], table_text(table_of(done, table_command(options), today)))
