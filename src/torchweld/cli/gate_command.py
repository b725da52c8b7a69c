"""`torchweld gate`: fails where a model is less fused, or slower, than its baseline."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from torchweld.cli.history_command import history_option
from torchweld.cli.json_output import data_only
from torchweld.cli.output_files import check_targets
from torchweld.cli.report_output import check_page_name, report_option, write_page
from torchweld.cli.run_keeping import keep_outcome, kept_runs_of
from torchweld.cli.screen_output import progress_shown, put, screen
from torchweld.cli.typed_command import typed_command
from torchweld.core.errors import TorchweldError
from torchweld.core.records import json_text
from torchweld.core.safe_text import clean
from torchweld.gates.gate_advice import Effort
from torchweld.gates.gate_baseline import Baseline, load_baseline, save_baseline
from torchweld.gates.gate_outcome import Outcome
from torchweld.gates.gate_run import Rival, accept, gate
from torchweld.gates.gated_model import Clock, Subject
from torchweld.history import History, Run, fingerprint_here, history_path, target_words
from torchweld.history.history_store import check_name
from torchweld.machine.machine_load import load_words
from torchweld.pages.history_view import GatedNow
from torchweld.pages.page_building import page_of
from torchweld.report.gate_text import accepted_data, accepted_lines, outcome_data, outcome_lines

FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)


@click.command(
    "gate",
    short_help="Fail if a model is less fused, or slower, than its baseline.",
    epilog="Examples:  torchweld gate --baseline main my/model.py:make --accept;  "
    "torchweld gate --baseline main my/model.py:make;  "
    "torchweld gate --baseline main gpt --against-worktree ../main",
)
@click.argument("target")
@click.option("--baseline", "name", required=True, help="The name it is kept under: main.")
@click.option("--input", "inputs", multiple=True, help="8x768, or input_ids=1x128:int64.")
@click.option("--training", is_flag=True, help="Forward and backward, not inference.")
@click.option("--accept", "accepting", is_flag=True, help="Make this the baseline from now on.")
@click.option("--quick", is_flag=True, help="With --accept: about ten seconds of tuning.")
@click.option(
    "--budget",
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    help="With --accept: for tuning; default 48.",
)
@click.option(
    "--no-measure",
    is_flag=True,
    help="With --accept: weld by a table that comes with torchweld, and time no block.",
)
@click.option("--empty", is_flag=True, help="With --accept: even if nothing is welded.")
@click.option("--no-time", is_flag=True, help="Compare counters alone.")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0.5, max=100.0),
    default=5.0,
    show_default=True,
    help="The change of wall time, in percent, that does not fail.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    default=5.0,
    show_default=True,
    help="For one comparison of wall time, at most.",
)
@click.option("--against", help="Time against another TARGET in the same run, not history.")
@click.option(
    "--against-worktree",
    "worktree",
    type=FOLDER,
    help="Time against TARGET as it is in another folder, such as a checkout of main.",
)
@click.option("--save", metavar="NAME", help="Keep the verdict in the history under this name.")
@report_option
@click.option("--force", is_flag=True, help="Replace a file that is there already.")
@history_option
@click.option("--json", "json_wanted", is_flag=True, help="Print JSON instead of text.")
def gate_verb(
    target: str,
    name: str,
    inputs: tuple[str, ...],
    training: bool,
    accepting: bool,
    quick: bool,
    budget: float | None,
    no_measure: bool,
    empty: bool,
    no_time: bool,
    tolerance: float,
    seconds: float,
    against: str | None,
    worktree: Path | None,
    save: str | None,
    report_file: Path | None,
    force: bool,
    file: Path | None,
    json_wanted: bool,
) -> int:
    """Weld TARGET by its baseline's plan and compare: counters exactly, wall time beyond noise.

    Exit code 1 if any counter is worse (kernels, ops, allocations, bytes moved, blocks welded), or
    if the model is slower beyond noise and tolerance in two comparisons. 2 if the baseline does not
    exist, or its time cannot be compared here. The welded model is timed against its own code, in
    the same rounds. The speed-up is compared with the baseline's if machine and set-up are the
    same.

    If no block is welded, --accept writes nothing, and the exit code is 2. --empty accepts that,
    unless blocks could not be measured.
    """
    effort = Effort(quick=quick, budget_s=budget, measure=not no_measure, empty=empty)
    _check_rival(against, worktree, accepting, no_time)
    _check_effort(effort, accepting)
    _check_kept(save, report_file, accepting)
    check_targets({"--report": report_file}, force)
    check_name(name)
    clock = None if no_time else Clock(seconds=seconds, tolerance=tolerance / 100.0)
    asked = Asked(
        target=target, name=name, inputs=inputs, training=training, no_time=no_time, file=file
    )
    if accepting:
        return _accept(asked, clock, effort, json_wanted)
    baseline = _load(asked)
    load = "" if clock is None else _say_load(json_wanted)
    with data_only(json_wanted):
        subject = Subject.load(target, inputs, training)
    wanted = (target, against, worktree, inputs, training)
    with (
        data_only(json_wanted),
        progress_shown() as progress,
        _rival(wanted, baseline, clock) as rival,
    ):
        found = gate(
            subject,
            name,
            baseline,
            clock=clock,
            accept_command=asked.command(measure=baseline.settings.get("measure") is not False),
            rival=rival,
            progress=progress,
        )
    try:
        if save is not None or report_file is not None:
            settings = {"tolerance": tolerance, "seconds": seconds}
            runs = _kept_runs(asked, found, save, settings)
            if report_file is not None:
                _write_report(report_file, found, baseline, runs)
    finally:  # the verdict is told even if it cannot be kept
        if json_wanted:
            click.echo(json_text({**outcome_data(found), "load": load}, "outcome"))
        else:
            _put_outcome(found)
    return found.code


def _kept_runs(
    asked: Asked, found: Outcome, save: str | None, settings: dict[str, Any]
) -> list[Run]:
    """Keeps the outcome, if it has a name; gives the earlier runs of the same thing."""
    with History.open(asked.file) as history:
        earlier = kept_runs_of(history, asked.what)
        if save is not None:
            keep_outcome(history, save, settings, found)
        return earlier


def _write_report(path: Path, found: Outcome, baseline: Baseline, runs: list[Run]) -> None:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    gated = GatedNow(outcome=found, created=now, fingerprint=fingerprint_here())
    page = page_of(plan=baseline.plan, gate=gated, runs=runs, command=typed_command())
    write_page(page, path)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options that say which baseline is meant."""

    target: str
    name: str
    inputs: tuple[str, ...]
    training: bool
    no_time: bool
    file: Path | None

    @property
    def what(self) -> str:
        return target_words(self.target, self.inputs, self.training)

    def command(self, measure: bool = True) -> str:
        """The command that accepts."""
        parts = ["torchweld", "gate", "--baseline", self.name, self.target]
        for given in self.inputs:
            parts += ["--input", given]
        parts += ["--training"] if self.training else []
        parts += ["--no-time"] if self.no_time else []
        parts += [] if measure else ["--no-measure"]
        parts += ["--history", str(self.file)] if self.file is not None else []
        return shlex.join([*parts, "--accept"])


def _check_rival(
    against: str | None, worktree: Path | None, accepting: bool, no_time: bool
) -> None:
    """Raises for options of which one would be ignored."""
    if against is not None and worktree is not None:
        raise TorchweldError("--against and --against-worktree both name a rival; give one")
    rival = "--against" if against is not None else "--against-worktree"
    other = "--accept" if accepting else "--no-time" if no_time else ""
    if other and (against is not None or worktree is not None):
        raise TorchweldError(
            f"{rival} names a rival to time against, which {other} does not do; leave one out"
        )


def _check_kept(save: str | None, report_file: Path | None, accepting: bool) -> None:
    """The same, for options about what a gate found."""
    if accepting and (save is not None or report_file is not None):
        option = "--save" if save is not None else "--report"
        raise TorchweldError(
            f"{option} is for what a gate finds, and --accept keeps a baseline; leave one out"
        )
    if save is not None:
        check_name(save)
    check_page_name("--report", report_file)


def _check_effort(effort: Effort, accepting: bool) -> None:
    """The same, for options about how a baseline is made."""
    given = {
        "--quick": (effort.quick, "shortens the tuning of --accept"),
        "--budget": (effort.budget_s is not None, "is for the tuning of --accept"),
        "--no-measure": (not effort.measure, "leaves out the tuning of --accept"),
        "--empty": (effort.empty, "says what --accept may write"),
    }
    for option, (is_given, words) in given.items():
        if is_given and not accepting:
            raise TorchweldError(f"{option} {words}; leave it out, or add that")
    tuning = [option for option in ("--quick", "--budget", "--no-measure") if given[option][0]]
    if len(tuning) > 1:
        raise TorchweldError(f"{' and '.join(tuning)} each say how long to tune; give one")


def _say_load(json_wanted: bool) -> str:
    """What else runs on this machine, said before anything is timed."""
    words = load_words()
    if words and not json_wanted:
        put([words], screen())
    return words


def _put_outcome(found: Outcome) -> None:
    console = screen()
    for line in outcome_lines(found):
        if line == f"  {found.accept_command}":
            click.echo(clean(line))  # to be pasted: one line, however wide
        else:
            put([line], console)


def _accept(asked: Asked, clock: Clock | None, effort: Effort, json_wanted: bool) -> int:
    # Opened first: if the file cannot be written, nothing should be measured for a minute.
    with History.open(asked.file, create=True) as history:
        load = _say_load(json_wanted) if effort.measure or clock is not None else ""
        with data_only(json_wanted), progress_shown() as progress:
            subject = Subject.load(asked.target, asked.inputs, asked.training)
            made = accept(subject, clock=clock, effort=effort, progress=progress)
        settings: dict[str, Any] = {
            "target": asked.target,
            "input": list(asked.inputs),
            "training": asked.training,
            "quick": effort.quick,
            "measure": effort.measure,
        }
        if effort.budget_s is not None:
            settings["budget_s"] = effort.budget_s
        if clock is not None:
            settings |= {"seconds": clock.seconds, "tolerance": clock.tolerance}
        save_baseline(history, asked.name, subject.what, made, settings)
        lines = accepted_lines(asked.name, subject.what, made, str(history.path))
        if json_wanted:
            data = {**accepted_data(asked.name, subject.what, made), "load": load}
            click.echo(json_text(data, "baseline"))
        else:
            put(lines, screen())
    return 0


def _load(asked: Asked) -> Baseline:
    if not history_path(asked.file).exists():
        raise TorchweldError(
            f"there is no baseline {asked.name!r}, and no history at {history_path(asked.file)}; "
            f"this makes both: {asked.command()}"
        )
    with History.open(asked.file) as history:
        return load_baseline(history, asked.name, asked.what, asked.command())


@contextmanager
def _rival(
    wanted: tuple[str, str | None, Path | None, Sequence[str], bool],
    baseline: Baseline,
    clock: Clock | None,
) -> Iterator[Rival | None]:
    target, against, worktree, inputs, training = wanted
    if clock is None or (against is None and worktree is None):
        yield None
        return
    from torchweld.gates.rivalry import Contender, rivalry  # starts processes, so only if needed

    here = Contender(folder=Path.cwd(), target=target)
    other = Contender(folder=(worktree or Path.cwd()).resolve(), target=against or target)
    with rivalry(here, other, inputs, training, baseline.plan, clock) as rival:
        yield rival
