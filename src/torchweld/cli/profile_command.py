"""`torchweld profile`: where a model's time goes, module by module, and what could be won."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click
import torch
from rich.console import RenderableType
from rich.text import Text

from torchweld import report
from torchweld.cli.device_option import checked_device, device_option, on_device
from torchweld.cli.history_command import history_option
from torchweld.cli.output_files import check_targets
from torchweld.cli.recorded_files import RECORDED, load_recorded, recorded_file
from torchweld.cli.report_output import check_page_name, report_option, write_page
from torchweld.cli.run_keeping import keep_profile, keeping
from torchweld.cli.screen_output import progress_shown, put, screen
from torchweld.cli.typed_command import typed_command
from torchweld.core.errors import TorchweldError
from torchweld.core.files import write_whole
from torchweld.core.not_measured import NotMeasured
from torchweld.core.records import to_plain
from torchweld.findings import diagnose
from torchweld.history import target_words
from torchweld.models import DEMO
from torchweld.models.targets import resolve
from torchweld.pages.page_building import page_of
from torchweld.profiles.accounting.time_account import account
from torchweld.profiles.expecting.expectation import check_profile, parse_expectations
from torchweld.profiles.expecting.launch_guesses import Verdict
from torchweld.profiles.profile import Profile
from torchweld.profiles.recording.live_profile import profile as take
from torchweld.report.module_tree import ORDERS, Order

# ---- from TARGET to a profile ----


def file_or_name(save: str | None) -> tuple[Path | None, str | None]:
    """What --save gives: a file, by its ending or a slash in it, or a name in the history."""
    if save is None:
        return None, None
    is_file = save.endswith(RECORDED) or Path(save).name != save
    return (Path(save), None) if is_file else (None, save)


def take_live(
    target: str | None,
    inputs: Sequence[str],
    training: bool,
    steps: int,
    device: torch.device | None = None,
) -> Profile:
    """Runs the model; shows on stderr how far it is, if that is a terminal."""
    chosen = on_device(resolve(target, inputs, training=training), device)
    given = [w.inputs if w.inputs is not None else w.run for w in chosen.workloads]
    with progress_shown() as progress:
        found = take(chosen.model, given, training=training, steps=steps, progress=progress)
    return replace(found, notices=(*chosen.notes, *found.notices))


# ---- what comes out ----


def sections(
    profile: Profile, verdict: Verdict | None, view: report.View
) -> Iterator[RenderableType]:
    found = account(profile)
    yield from report.profile_sections(profile, found, diagnose(profile, found), view)
    if verdict is not None:
        yield Text(f"expected: {verdict}", style="green" if verdict.holds else "red")


def as_json(profile: Profile, verdict: Verdict | None) -> str:
    found = account(profile)
    data = report.summary(profile, found, diagnose(profile, found))
    if verdict is not None:
        rows = [{**to_plain(row, all_fields=True), "holds": row.holds} for row in verdict.rows]
        data["expected"] = {"holds": verdict.holds, "rows": rows}
    return json.dumps(data, allow_nan=False)


def write_files(
    profile: Profile,
    save: Path | None,
    trace: Path | None,
    folded: Path | None,
    speedscope: Path | None,
) -> None:
    if save is not None:
        profile.save(save)
    if trace is not None:
        write_whole(trace, json.dumps(report.chrome_trace(profile), allow_nan=False))
    if folded is not None:
        write_whole(folded, report.folded(profile))
    if speedscope is not None:
        write_whole(speedscope, json.dumps(report.speedscope(profile), allow_nan=False))


# ---- the verb ----

FILE = click.Path(path_type=Path, dir_okay=True)


@click.command(
    short_help="Show where a model's time goes, and what could be won.",
    epilog="Examples:  torchweld profile;  torchweld profile gpt --training --module "
    "'layers.*.mlp';  torchweld profile my/model.py:make --input 8x768 --save before.json;  "
    "torchweld profile trace.json.gz",
)
@click.argument("target", required=False)
@click.option("--input", "inputs", multiple=True, help="8x768, or input_ids=1x128:int64.")
@click.option("--training", is_flag=True, help="Forward and backward, not inference.")
@device_option
@click.option(
    "--steps", type=click.IntRange(min=2), help="Profile at least this many steps; more if short."
)
@click.option(
    "--sort",
    "order",
    type=click.Choice(ORDERS),
    default="model",
    show_default=True,
    help="The order of sibling modules, and of ops.",
)
@click.option("--depth", type=click.IntRange(min=0), help="Levels of the module tree.")
@click.option("--module", help="Show one module: layers.3.mlp, or several: layers.*.mlp.")
@click.option("--json", "json_wanted", is_flag=True, help="Print JSON instead of text.")
@click.option(
    "--save",
    metavar="WHERE",
    help="Keep it: a file (.json, .json.gz) for torchweld diff, or a name in the history.",
)
@history_option
@click.option("--trace", type=FILE, help="Write a chrome trace; ui.perfetto.dev opens it.")
@click.option("--folded", type=FILE, help="Write folded stacks, nanoseconds, for flame graphs.")
@click.option("--speedscope", type=FILE, help="Write a flame graph for speedscope.app.")
@report_option
@click.option("--expect", help="What a step should launch: 'linear=3,pointwise<=2'.")
@click.option(
    "--this-machine", is_flag=True, help="Price a CPU trace as one that was recorded here."
)
@click.option("--force", is_flag=True, help="Replace files that are there already.")
def profile(
    target: str | None,
    inputs: tuple[str, ...],
    training: bool,
    device: str | None,
    steps: int | None,
    order: Order,
    depth: int | None,
    module: str | None,
    json_wanted: bool,
    save: str | None,
    file: Path | None,
    trace: Path | None,
    folded: Path | None,
    speedscope: Path | None,
    report_file: Path | None,
    expect: str | None,
    this_machine: bool,
    force: bool,
) -> int:
    """Show where a model's time goes, down to the module, why, and the most that could be won.

    TARGET is package.module:factory, path/to/file.py:factory, the name of a built-in model,
    hf:<model type>, a trace that torch.profiler wrote, or a profile saved with --save; without it,
    a built-in model is profiled. Exit code 1 if what --expect says does not hold, 2 if the step
    could not be measured: what is counted is shown nevertheless.
    """
    saved, name = file_or_name(save)
    files = {"--save": saved, "--trace": trace, "--folded": folded, "--speedscope": speedscope}
    check_page_name("--report", report_file)
    check_targets({**files, "--report": report_file}, force)
    guesses = parse_expectations(expect) if expect is not None else None
    recorded = recorded_file(target)
    where = None if recorded is not None else checked_device(device)
    if recorded is not None:
        if inputs or training or device or steps is not None or name is not None:
            raise TorchweldError(
                f"{target} is a recording; --input, --training, --device, --steps and --save NAME "
                "go with a model"
            )
        found = load_recorded(recorded, this_machine)
    else:
        if this_machine:
            raise TorchweldError(
                f"--this-machine goes with a trace; {target or DEMO} is a model, and a profile of "
                "it is of this machine anyway"
            )
        steps = 3 if steps is None else steps
        with keeping(name, file) as history:
            found = take_live(target, inputs, training, steps, where)
            if history is not None and name is not None:
                what = target_words(target or DEMO, inputs, training)
                keep_profile(history, name, what, {"steps": steps}, found, account(found))
    write_files(found, saved, trace, folded, speedscope)
    if report_file is not None:
        write_page(page_of([found], command=typed_command()), report_file)
    verdict = check_profile(found, guesses) if guesses is not None else None
    if json_wanted:
        click.echo(as_json(found, verdict))
    else:
        console = screen()
        view = report.View(order=order, depth=depth, module=module, width=console.width)
        put(sections(found, verdict, view), console)
    if verdict is not None and not verdict.holds:
        return 1
    return 2 if isinstance(found.step_us, NotMeasured) else 0
