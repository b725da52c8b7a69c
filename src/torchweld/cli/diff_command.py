"""`torchweld diff`: what changed between two saved profiles, module by module."""

from __future__ import annotations

from pathlib import Path

import click

from torchweld import report
from torchweld.cli.recorded_files import load_recorded
from torchweld.cli.screen_output import put, screen
from torchweld.profiles.accounting.profile_diff import diff as compare_profiles

EXISTING = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command(
    short_help="Show what changed between two profiles, by module.",
    epilog="Example: torchweld profile --save a.json; torchweld profile --save b.json; "
    "torchweld diff a.json b.json",
)
@click.argument("a", type=EXISTING)
@click.argument("b", type=EXISTING)
@click.option("--json", "json_wanted", is_flag=True, help="Print JSON instead of text.")
@click.option("--force", is_flag=True, help="Show times even if they are not comparable.")
def diff(a: Path, b: Path, json_wanted: bool, force: bool) -> int:
    """Compare two profiles by module: time, ops or kernels, memory round trips.

    A and B are profiles saved by torchweld profile --save, or traces of torch.profiler. Times of
    different machines, set-ups or inputs are not compared: counts are shown, and the exit code is
    2, unless --force is given.
    """
    found = compare_profiles(load_recorded(a), load_recorded(b))
    if json_wanted:
        click.echo(found.to_json())
    else:
        console = screen()
        put(report.diff_sections(found, force, console.width), console)
    return 2 if found.not_comparable and not force else 0
