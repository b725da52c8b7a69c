"""`torchweld gate`: fails where a model is less fused, or slower, than its baseline."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from torchweld.cli.data_only import data_only
from torchweld.cli.history import history_option
from torchweld.cli.screen import progress_shown, put, screen
from torchweld.errors import TorchweldError
from torchweld.gating.baseline import Baseline, load_baseline, save_baseline
from torchweld.gating.running import Rival, accept, gate
from torchweld.gating.subject import Clock, Subject
from torchweld.gating.text import accepted_data, accepted_lines, outcome_data, outcome_lines
from torchweld.history import History, history_path, target_words
from torchweld.history.samples import encoded
from torchweld.history.store import check_name

FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)


@click.command(
    "gate",
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
@history_option
@click.option("--json", "json_wanted", is_flag=True, help="Print JSON instead of text.")
def gate_verb(
    target: str,
    name: str,
    inputs: tuple[str, ...],
    training: bool,
    accepting: bool,
    quick: bool,
    no_time: bool,
    tolerance: float,
    seconds: float,
    against: str | None,
    worktree: Path | None,
    file: Path | None,
    json_wanted: bool,
) -> int:
    """Weld TARGET by its baseline's plan and compare: counters exactly, wall time beyond noise.

    Exit code 1 if any counter is worse (kernels, ops, allocations, bytes moved, blocks welded), or
    if the model is slower beyond noise and tolerance in two comparisons. 2 if the baseline does not
    exist, or its time cannot be compared here. The time is that of the welded model against its own
    code in the same rounds, and that ratio against the baseline's; it is compared only where the
    machine and its set-up are the same.
    """
    _check_options(against, worktree, accepting, quick, no_time)
    check_name(name)
    clock = None if no_time else Clock(seconds=seconds, tolerance=tolerance / 100.0)
    typed = _command(target, name, inputs, training, no_time, file)
    if accepting:
        return _accept(target, name, inputs, training, clock, quick, file, json_wanted)
    what = target_words(target, inputs, training)
    baseline = _load(file, name, what, typed)
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
            accept_command=typed,
            rival=rival,
            progress=progress,
        )
    if json_wanted:
        click.echo(encoded(outcome_data(found), "outcome"))
    else:
        put(outcome_lines(found), screen())
    return found.code


def _check_options(
    against: str | None, worktree: Path | None, accepting: bool, quick: bool, no_time: bool
) -> None:
    """Raises for options of which one would be left unheard."""
    if against is not None and worktree is not None:
        raise TorchweldError("--against and --against-worktree both name a rival; give one")
    rival = "--against" if against is not None else "--against-worktree"
    other = "--accept" if accepting else "--no-time" if no_time else ""
    if other and (against is not None or worktree is not None):
        raise TorchweldError(
            f"{rival} names a rival to time against, which {other} does not do; leave one out"
        )
    if quick and not accepting:
        raise TorchweldError("--quick shortens the tuning of --accept; leave it out, or add that")


def _accept(
    target: str,
    name: str,
    inputs: Sequence[str],
    training: bool,
    clock: Clock | None,
    quick: bool,
    file: Path | None,
    json_wanted: bool,
) -> int:
    # Opened first: a file that cannot be written is no reason to measure for a minute.
    with History.open(file, create=True) as history:
        with data_only(json_wanted), progress_shown() as progress:
            subject = Subject.load(target, inputs, training)
            made = accept(subject, clock=clock, quick=quick, progress=progress)
        settings = {"target": target, "input": list(inputs), "training": training, "quick": quick}
        if clock is not None:
            settings |= {"seconds": clock.seconds, "tolerance": clock.tolerance}
        save_baseline(history, name, subject.what, made, settings)
        lines = accepted_lines(name, subject.what, made, str(history.path))
        if json_wanted:
            click.echo(encoded(accepted_data(name, subject.what, made), "baseline"))
        else:
            put(lines, screen())
    return 0


def _load(file: Path | None, name: str, what: str, command: str) -> Baseline:
    if not history_path(file).exists():
        raise TorchweldError(
            f"there is no baseline {name!r}, and no history at {history_path(file)}; this makes "
            f"both: {command}"
        )
    with History.open(file) as history:
        return load_baseline(history, name, what, command)


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
    from torchweld.gating.against import Contender, rivalry  # processes, for who wants a rival

    here = Contender(folder=Path.cwd(), target=target)
    other = Contender(folder=(worktree or Path.cwd()).resolve(), target=against or target)
    with rivalry(here, other, inputs, training, baseline.plan, clock) as rival:
        yield rival


def _command(
    target: str,
    name: str,
    inputs: Sequence[str],
    training: bool,
    no_time: bool,
    file: Path | None,
) -> str:
    """What is to be typed to accept."""
    parts = ["torchweld", "gate", "--baseline", name, target]
    for given in inputs:
        parts += ["--input", given]
    parts += ["--training"] if training else []
    parts += ["--no-time"] if no_time else []
    parts += ["--history", str(file)] if file is not None else []
    return shlex.join([*parts, "--accept"])
