"""`torchweld history`: the runs that were kept: listed, shown, compared, forgotten."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from torchweld.cli.screen_output import put, screen
from torchweld.core.number_text import counted
from torchweld.core.records import json_text
from torchweld.core.safe_text import clean
from torchweld.history.history_store import History
from torchweld.history.run_comparison import compare_runs
from torchweld.history.run_lookup import entries_of, find_run
from torchweld.report.run_text import (
    compared_data,
    compared_sections,
    run_data,
    run_list,
    run_sections,
)

FILE = click.Path(path_type=Path, dir_okay=True)
Command = TypeVar("Command", bound=Callable[..., Any])

history_option = click.option(
    "--history", "file", type=FILE, help="The file; .torchweld/history.sqlite if left out."
)


def _options(command: Command) -> Command:
    wanted = click.option("--json", "json_wanted", is_flag=True, help="Print JSON.")
    return history_option(wanted(command))


@click.group(
    invoke_without_command=True,
    short_help="List, show, compare and delete kept runs.",
    epilog="Examples:  torchweld fuse gpt --save main;  torchweld history;  "
    "torchweld history show main;  torchweld history compare main~1 main",
)
@_options
@click.pass_context
def history(context: click.Context, file: Path | None, json_wanted: bool) -> int | None:
    """Runs that were kept with --save NAME, and the baselines of torchweld gate.

    Without a verb, they are listed. A run is found by its name; main~1 is the run before the newest
    of that name. The file is the one of --history, else TORCHWELD_HISTORY, else
    .torchweld/history.sqlite in the root of the git work tree, or in this folder.
    """
    if context.invoked_subcommand is not None:
        context.obj = (file, json_wanted)
        return None
    return _list(file, json_wanted, None)


@history.command("list", epilog="Example: torchweld history list main")
@click.argument("name", required=False)
@_options
@click.pass_context
def list_runs(
    context: click.Context, name: str | None, file: Path | None, json_wanted: bool
) -> int:
    """List all runs, the newest first, or those of one NAME."""
    return _list(*_given(context, file, json_wanted), name)


@history.command(epilog="Example: torchweld history show main~1")
@click.argument("name")
@_options
@click.pass_context
def show(context: click.Context, name: str, file: Path | None, json_wanted: bool) -> int:
    """Show one run: where it was measured, and what came out.

    --json prints the raw samples too.
    """
    file, json_wanted = _given(context, file, json_wanted)
    with History.open(file) as opened:
        run = find_run(opened, name)
        if json_wanted:
            click.echo(json_text(run_data(run)))
        else:
            console = screen()
            put(run_sections(run, console.width), console)
    return 0


@history.command(epilog="Example: torchweld history compare main~1 main")
@click.argument("a")
@click.argument("b")
@_options
@click.pass_context
def compare(context: click.Context, a: str, b: str, file: Path | None, json_wanted: bool) -> int:
    """Compare two runs, cell by cell.

    It shows medians of their times, and speed-ups.

    Figures of different machines or set-ups are not compared: the output says what differs, and the
    exit code is 2.
    """
    file, json_wanted = _given(context, file, json_wanted)
    with History.open(file) as opened:
        found = compare_runs(find_run(opened, a), find_run(opened, b))
    if json_wanted:
        click.echo(json_text(compared_data(found)))
    else:
        console = screen()
        put(compared_sections(found, console.width), console)
    return 0 if found.comparable else 2


@history.command(epilog="Example: torchweld history forget main")
@click.argument("name")
@_options
@click.pass_context
def forget(context: click.Context, name: str, file: Path | None, json_wanted: bool) -> int:
    """Delete all runs of NAME, baselines too."""
    file, json_wanted = _given(context, file, json_wanted)
    with History.open(file) as opened:
        entries_of(opened, name)
        count = opened.forget(name)
    if json_wanted:
        click.echo(json_text({"name": name, "forgotten": count}))
    else:
        click.echo(f"forgot {counted(count, 'run')} of {clean(name)}")
    return 0


def _given(
    context: click.Context, file: Path | None, json_wanted: bool
) -> tuple[Path | None, bool]:
    """Options may stand before the verb or after it."""
    before_file, before_json = context.obj
    return file or before_file, json_wanted or before_json


def _list(file: Path | None, json_wanted: bool, name: str | None) -> int:
    with History.open(file) as opened:
        runs = opened.entries() if name is None else entries_of(opened, name)
    if json_wanted:
        click.echo(json_text([run_data(run, cells=False) for run in runs]))
    else:
        console = screen()
        put(run_list(runs, console.width), console)
    return 0
