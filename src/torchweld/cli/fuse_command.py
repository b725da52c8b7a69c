"""`torchweld fuse`: finds what makes a model faster, and proves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from torchweld import report
from torchweld.cli.device_option import checked_device, device_option, on_device
from torchweld.cli.history_command import history_option
from torchweld.cli.json_output import data_only
from torchweld.cli.output_files import check_targets
from torchweld.cli.report_output import check_page_name, report_option, write_page
from torchweld.cli.run_keeping import keep_plan, keeping, kept_runs_of
from torchweld.cli.screen_output import progress_shown, put, screen, stage
from torchweld.cli.typed_command import typed_command
from torchweld.core.errors import TorchweldError
from torchweld.core.records import json_text
from torchweld.findings import diagnose
from torchweld.history import target_words
from torchweld.history.kept_runs import Run
from torchweld.models.targets import Target, resolve
from torchweld.pages.page_building import page_of
from torchweld.pages.page_records import Page
from torchweld.plans.plan import Plan
from torchweld.plans.plan_options import PlanOptions
from torchweld.plans.planner import PlanWithRounds, apply, plan_with_rounds
from torchweld.profiles.accounting.time_account import account
from torchweld.profiles.profile import Profile
from torchweld.profiles.recording.live_profile import profile

FILE = click.Path(path_type=Path, dir_okay=True)
NOT_MEASURED = 2


@click.command(
    short_help="Weld a model: verified, measured, explained.",
    epilog="Examples:  torchweld fuse;  torchweld fuse hf:gpt2 --input input_ids=1x1:int64;  "
    "torchweld fuse my/model.py:make --input 8x768 --out plan.json",
)
@click.argument("target", required=False)
@click.option("--input", "inputs", multiple=True, help="8x768, or input_ids=1x128:int64.")
@click.option("--training", is_flag=True, help="Weld for training: gradients are verified too.")
@device_option
@click.option("--quick", is_flag=True, help="About ten seconds of measuring instead of a minute.")
@click.option(
    "--budget", type=click.FloatRange(min=1), metavar="SECONDS", help="For measuring; default 48."
)
@click.option(
    "--no-measure",
    is_flag=True,
    help="Time nothing: weld blocks that verify and that the shipped table knows to be faster.",
)
@click.option("--with-compile", is_flag=True, help="Try torch.compile of each block too.")
@click.option(
    "--no-packing", is_flag=True, help="No copies of weights: slower, but no more memory."
)
@click.option(
    "--recompute/--no-recompute",
    "recompute",
    default=None,
    help="With --training: keep the input of a block alone for its backward, or hidden values too. "
    "By default both are measured.",
)
@click.option("--afresh", is_flag=True, help="Measure again what an earlier plan measured.")
@click.option("--no-profile", is_flag=True, help="Leave out where the time goes.")
@click.option(
    "--details", is_flag=True, help="Print times, bounds and reasons behind the verdict too."
)
@click.option("--depends", is_flag=True, help="Print what each welded block depends on.")
@click.option("--out", type=FILE, help="Save the plan; tw.apply(model, tw.Plan.load(FILE)).")
@report_option
@click.option("--save", metavar="NAME", help="Keep the run in the history under this name.")
@history_option
@click.option("--json", "json_wanted", is_flag=True, help="Print the plan as JSON.")
@click.option("--force", is_flag=True, help="Replace a file that is there already.")
def fuse(
    target: str | None,
    inputs: tuple[str, ...],
    training: bool,
    device: str | None,
    quick: bool,
    budget: float | None,
    no_measure: bool,
    with_compile: bool,
    no_packing: bool,
    recompute: bool | None,
    afresh: bool,
    no_profile: bool,
    details: bool,
    depends: bool,
    out: Path | None,
    report_file: Path | None,
    save: str | None,
    file: Path | None,
    json_wanted: bool,
    force: bool,
) -> int:
    """Find what can be welded, verify it, measure what it gains, and show before and after.

    TARGET is package.module:factory, path/to/file.py:factory, the name of a built-in model, or
    hf:<model type>; the default is a built-in transformer. A block is welded only if it is faster
    beyond noise and its numbers are as good as eager's. The plan says why for every block. The exit
    code is 2 if nothing was welded because blocks could not be measured.
    """
    _check_times({"--quick": quick, "--budget": budget is not None, "--no-measure": no_measure})
    _check_recompute(recompute, training)
    check_page_name("--report", report_file)
    check_targets({"--out": out, "--report": report_file}, force)
    where = checked_device(device)
    with keeping(save, file) as history, data_only(json_wanted):
        chosen = on_device(resolve(target, inputs, training=training), where)
        console = screen()
        found: Profile | None = None
        shown = not (no_measure or json_wanted)
        if not no_profile and (shown or report_file is not None):
            found = _profiled(chosen, training, f"profiled {chosen.name}")
        if found is not None and shown:
            accounted = account(found)
            view = report.View(width=console.width)
            put(report.brief_sections(found, accounted, diagnose(found, accounted), view), console)
        settings: dict[str, Any] = {
            "training": training,
            "quick": quick,
            "budget_s": budget,
            "measure": not no_measure,
            "with_compile": with_compile,
            "packing": not no_packing,
            "recompute": recompute,
        }
        planned = "planned without timing" if no_measure else "planned, measured and verified"
        with stage(planned), progress_shown() as progress:
            options = PlanOptions(
                **settings,
                profile=found,
                remember=not afresh,
                rounds=report_file is not None,
                progress=progress,
            )
            timed = plan_with_rounds(chosen.model, chosen.workloads, options)
        runs: list[Run] = []
        if history is not None and save is not None:
            what = target_words(chosen.name, inputs, training)
            keep_plan(history, save, what, settings, timed)
            runs = kept_runs_of(history, what) if report_file is not None else []
        made, page = timed.plan, None
        if report_file is not None:
            page = _page(chosen, timed, found, runs, training)
    try:
        if out is not None:
            made.save(out)
        if page is not None and report_file is not None:
            write_page(page, report_file)
    finally:  # the plan is shown even if the disk is full
        if json_wanted:
            click.echo(json_text(made))
        else:
            if depends:
                put([*made.dependencies().split("\n"), ""], console)
            put(_lines(made, chosen.notes, details), console)
    return NOT_MEASURED if not made.decisions and made.outcomes["not measured"] else 0


def _check_times(given: dict[str, bool]) -> None:
    """Raises if more than one of the options is given."""
    if sum(given.values()) > 1:
        both = " and ".join(option for option, is_given in given.items() if is_given)
        raise TorchweldError(f"{both} each set the time for measuring; give only one")


def _check_recompute(recompute: bool | None, training: bool) -> None:
    """Raises if what is kept for a backward is given without one."""
    if recompute is not None and not training:
        given = "--recompute" if recompute else "--no-recompute"
        raise TorchweldError(f"{given} says what is kept for a backward; give --training too")


def _profiled(chosen: Target, training: bool, done: str) -> Profile:
    with stage(done), progress_shown() as progress:
        return profile(chosen.model, chosen.workloads, training=training, progress=progress)


def _page(
    chosen: Target,
    timed: PlanWithRounds,
    before: Profile | None,
    runs: list[Run],
    training: bool,
) -> Page:
    """Before, the plan, and after: the model is welded for that."""
    profiles = [] if before is None else [before]
    if before is not None and timed.plan.decisions:
        apply(chosen.model, timed.plan)
        profiles.append(_profiled(chosen, training, "profiled the welded model"))
    return page_of(profiles, plan=timed, runs=runs, command=typed_command(), notes=chosen.notes)


def _lines(made: Plan, notes: tuple[str, ...], details: bool) -> list[str]:
    more = ["", *made.details().split("\n")] if details and (made.whole or made.planned) else []
    return [*str(made).split("\n"), *more, *(f"note: {note}" for note in notes)]
