"""`torchweld bench --table FILE.json`: what it goes with, and the file it writes."""

from __future__ import annotations

import datetime
import os
import shlex
from typing import Any

import torch

from torchweld import hardware
from torchweld.benching import Bench
from torchweld.benching.tables import ENVIRONMENT, held_problem, table_of
from torchweld.errors import TorchweldError
from torchweld.files import write_whole
from torchweld.known_speeds import table_text

# Options that say which blocks.
GRID = ("block", "sizes", "rows", "dtype")


def check_table(options: dict[str, Any]) -> None:
    """Raises for what a table cannot be made with, or on."""
    own = ("target", "preset", "against", "backend", "cold", "latency", "callers")
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
        None if hardware.build_problem() else hardware.isa_in_use(),
        torch.backends.cpu.get_cpu_capability(),
        hardware.hardware().instruction_sets,
        os.environ,
    )
    if problem:
        raise TorchweldError(f"--table: {problem}")


def table_command(options: dict[str, Any]) -> str:
    """What makes the same table again: the environment that counts, and every option."""
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


def write_table(done: Bench, options: dict[str, Any]) -> None:
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    write_whole(options["table"], table_text(table_of(done, table_command(options), today)))
