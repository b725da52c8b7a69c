"""`torchweld bench`: blocks or a whole model, eager against fused and others, on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from rich.console import Console

from torchweld.bench import Bench, Case, plan, plan_model, summarise
from torchweld.bench.bench_cases import SHORT_DTYPES
from torchweld.bench.bench_goals import GoalVerdict
from torchweld.bench.bench_grid import BLOCKS, USUAL_NAMES, listed
from torchweld.bench.bench_participants import CPU, machine_peaks
from torchweld.bench.bench_presets import PRESETS, with_goals
from torchweld.bench.bench_rows import csv_text
from torchweld.bench.kernel_goals import kernel_verdicts
from torchweld.bench.model_sources import TargetSource
from torchweld.bench.parked_check import check_parking
from torchweld.bench.preset_series import PresetModel
from torchweld.bench.runtimes.runtime_names import BLOCK_PEERS, GPU_PEERS, MODEL_PEERS, OWN
from torchweld.bench.speed_tables import WAYS
from torchweld.cli.bench_asked import asked_cases, asked_models, check_options, preset_against
from torchweld.cli.bench_device import asked_preset, is_gpu, kernel_goal_code
from torchweld.cli.bench_progress import Keeper, run_cases, run_model, run_trained_model
from torchweld.cli.bench_table import GRID, run_table, write_table
from torchweld.cli.device_option import checked_device, device_option
from torchweld.cli.history_command import history_option
from torchweld.cli.json_output import data_only
from torchweld.cli.report_output import report_option, write_page
from torchweld.cli.run_keeping import keeping, kept_runs_of
from torchweld.cli.screen_output import put, screen
from torchweld.cli.training_options import (
    model_steps,
    step_words_typed,
    training_options,
    trains,
)
from torchweld.cli.typed_command import typed_command
from torchweld.core.errors import TorchweldError
from torchweld.core.files import write_whole
from torchweld.core.safe_text import clean_lines
from torchweld.history.kept_runs import Run
from torchweld.machine.machine_load import busy_cores
from torchweld.pages.page_building import page_of
from torchweld.plans.plan import Plan
from torchweld.report.bench_text import bench_head, bench_sections, note_lines

FILE = click.Path(path_type=Path, dir_okay=True)


def words(options: dict[str, Any]) -> str:
    """What was asked for, as the history names it."""
    if options["target"] is not None:
        inputs = [f"--input {text}" for text in options["inputs"]]
        typed = [step_words_typed(options)] if options["training"] else []
        return " ".join([options["target"], *inputs, *typed])
    given = {name: options[name] for name in ("preset", *GRID)}
    if options["table"] is not None and not any(given.values()):
        return "the blocks of a table of known speeds"
    parts = [
        f"--{name} {value if isinstance(value, str) else ','.join(value)}"
        for name, value in given.items()
        if value
    ]
    parts += [step_words_typed(options)] if options["training"] else []
    where = [f"--device {options['device']}"] if options["device"] is not None else []
    return " ".join([*(parts or ["the demo's blocks"]), *where])


def measured(options: dict[str, Any], shown: bool, keeper: Keeper) -> Bench:
    """Plans, prints the head, and runs."""
    console = screen()
    common: dict[str, Any] = {
        "against": listed("--against", options["against"]) or preset_against(options),
        "seconds": options["seconds"],
        "cold": options["cold"],
        "seed": options["seed"],
        "callers": options["callers"] or 0,
    }
    device = options["device"] or CPU
    live = console if shown and console.is_terminal else None

    def begun(planned: Bench, dtypes: Sequence[str] = ("float32",)) -> Bench:
        busy = busy_cores()  # before anything of ours runs
        peaks, notes = (None, ()) if is_gpu(device) else machine_peaks(dtypes)
        notes = (*planned.notes, *notes)
        planned = replace(planned, busy_cores=busy, peaks=peaks, notes=notes)
        if shown:
            put(bench_head(planned), console)
        keeper.begin(words(options), planned)
        return planned

    if options["target"] is not None:
        if options["plan_file"] is not None:
            Plan.load(options["plan_file"])
        planned = begun(plan_model(options["target"], **common, training=trains(options)))
        with TemporaryDirectory(prefix="torchweld-bench-") as folder:
            source = TargetSource(
                target=options["target"],
                inputs=options["inputs"],
                seed=options["seed"],
                plan=None if options["plan_file"] is None else str(options["plan_file"]),
                kept_folder=Path(folder),
                training=planned.training,
            )
            if planned.training:
                steps = model_steps(options)
                done = run_trained_model(planned, source, steps, options["latency"], live, keeper)
            else:
                done = run_model(planned, source, options["latency"], live, keeper)
    else:
        cases = asked_cases(options)
        blocks = planned_blocks(options, cases, {**common, "device": device})
        planned = begun(blocks, dtypes_of(cases))
        if options["table"] is not None:
            return run_table(planned, cases, live, keeper)
        done = run_cases(planned, cases, options["latency"], live, keeper) if cases else planned
        for model in asked_models(options):
            if not done.interrupted:
                done = run_preset_model(done, model, options, live, keeper)
    if shown:
        put(note_lines(done.notes[len(planned.notes) :]), console)
    return done


def planned_blocks(options: dict[str, Any], cases: Sequence[Case], common: dict[str, Any]) -> Bench:
    """The bench of these cases; of all of a preset's, where only its models are asked for."""
    table = options["table"] is not None
    backends = list(WAYS) if table else listed("--backend", options["backend"])
    preset = asked_preset(options)
    planned = plan(cases or (preset.cases if preset else []), backends, **common)
    planned = replace(planned, preset=options["preset"] or "")
    if options["check_parking"]:
        names, seed = planned.names, planned.seed
        parked = check_parking(names, planned.threads, planned.seconds, seed)
        planned = replace(planned, notes=(*planned.notes, *parked.sentences()))
    return planned


def dtypes_of(cases: Sequence[Case]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(case.dtype for case in cases)) or ("float32",)


def run_preset_model(
    bench: Bench,
    model: PresetModel,
    options: dict[str, Any],
    live: Console | None,
    keeper: Keeper,
) -> Bench:
    """A model that cannot be had here leaves its cells out, with a note; its goals say so."""
    source = TargetSource(
        target=model.target, inputs=model.inputs, seed=options["seed"], training=True
    )
    try:
        return run_trained_model(bench, source, model.steps, options["latency"], live, keeper)
    except TorchweldError as error:
        return replace(bench, notes=(*bench.notes, f"left out: {model.target}: {error}"))


def output(done: Bench, options: dict[str, Any], runs: Sequence[Run] = ()) -> None:
    """Writes files, then prints. A full disk does not prevent the printing.

    runs: of the same thing, for the page, if this one was kept
    """
    out, table, page = options["out"], options["table"], options["report_file"]
    try:
        if table is not None and not done.interrupted:
            write_table(done, options)
        if out is not None and done.cells:
            write_whole(out, csv_text(done) if out.suffix == ".csv" else done.to_json() + "\n")
        if page is not None and done.cells:
            write_page(page_of(bench=done, runs=runs, command=typed_command()), page)
    finally:
        _print(done, options)


def _print(done: Bench, options: dict[str, Any]) -> None:
    if options["json_wanted"]:
        click.echo(done.to_json())
    elif options["csv_wanted"]:
        click.echo(clean_lines(csv_text(done)), nl=False)
    else:
        console = screen()
        kernels = kernel_verdicts(done)
        put(bench_sections(done, summarise(done), console.width, judged(done), kernels), console)


def judged(done: Bench) -> list[GoalVerdict]:
    """The goals of the preset that was measured, if it has any."""
    preset = PRESETS.get(done.preset)
    return preset.judged(done) if preset else []


@click.command(
    epilog="Examples:  torchweld bench;  torchweld bench --block gelu,swiglu --rows 1,8,64,512 "
    "--sizes 768x3072,1024x4096 --dtype float32,bfloat16 --against compile,onnxruntime;  "
    "torchweld bench --preset models;  torchweld bench hf:gpt2 --input input_ids=1x1:int64 "
    "--latency;  torchweld bench --training --rows 8,32 --malloc stock,tuned --blocks 6;  "
    "torchweld bench hf:gpt2 --training --optimizer adamw --input input_ids=1x32:int64;  "
    "torchweld bench --device cuda --preset blog --report gpu.html"
)
@click.argument("target", required=False)
@click.option(
    "--block",
    multiple=True,
    help=f"An activation (gelu), one that is gated (silu-gated, {', '.join(USUAL_NAMES)}), linear, "
    f"or a built-in: {', '.join(BLOCKS)}.",
)
@click.option("--sizes", multiple=True, help="In x hidden, 768x3072; or all of them, 768x3072x768.")
@click.option("--rows", multiple=True, help="Rows of x (1,8,64), or batch x sequence, 8x128.")
@click.option("--dtype", multiple=True, help=f"{', '.join(SHORT_DTYPES)} (float32).")
@click.option("--preset", metavar="NAME", help=f"A series of blocks: {', '.join(PRESETS)}.")
@click.option(
    "--only",
    multiple=True,
    help="Parts of a preset: "
    f"{'; '.join(f'{n} {chr(44).join(p.parts)}' for n, p in PRESETS.items() if p.parts)}.",
)
@click.option(
    "--goals",
    is_flag=True,
    help="Exit with 1 if a goal of the preset is missed, with 2 if one is not measured in full.",
)
@click.option(
    "--against",
    multiple=True,
    help=f"Peers: {', '.join(BLOCK_PEERS)}; on a GPU {', '.join(GPU_PEERS)}; of a TARGET "
    f"{', '.join(MODEL_PEERS)}.",
)
@click.option(
    "--backend",
    multiple=True,
    help=f"Ours, with or without a mode: {', '.join(OWN)}; the first is judged. (the best there "
    "is)",
)
@click.option("--input", "inputs", multiple=True, help="Of a TARGET: 8x768, ids=1x128:int64.")
@click.option("--plan", "plan_file", type=FILE, help="Of a TARGET: apply this plan, make none.")
@click.option(
    "--table",
    type=FILE,
    help="Make a table of known speeds, FILE.json, which welding without timing goes by; of the "
    "blocks given, or of all that such a table has.",
)
@training_options
@device_option
@click.option("--seconds", default=1.5, show_default=True, help="Per other side and cell.")
@click.option("--cold", is_flag=True, help="Empty the caches before every call.")
@click.option("--latency", is_flag=True, help="Also p50, p95, p99 of single calls.")
@click.option(
    "--callers", type=click.IntRange(min=1), metavar="K", help="Also calls per second by K threads."
)
@click.option(
    "--check-parking",
    is_flag=True,
    help="First check that processes which wait do not disturb the one that runs.",
)
@click.option("--seed", default=0, show_default=True, help="Of weights, inputs and timing order.")
@click.option("--save", metavar="NAME", help="Keep the run in the history under this name.")
@history_option
@click.option("--out", type=FILE, help="Write everything to FILE.json, or figures to FILE.csv.")
@report_option
@click.option("--force", is_flag=True, help="Replace a file that is there already.")
@click.option("--show", type=FILE, help="Measure nothing; print what --out FILE.json wrote.")
@click.option("--json", "json_wanted", is_flag=True, help="Print JSON instead of tables.")
@click.option("--csv", "csv_wanted", is_flag=True, help="Print CSV instead of tables.")
def bench(**options: Any) -> int:
    """Measure blocks or models against other runtimes.

    Numbers are checked first.

    Options that take a list are given with commas, or once for each value. TARGET is
    package.module:factory, path/to/file.py:factory, a built-in model or hf:<model type>; eager is
    then compared with what tw.plan and tw.apply make of it. Ctrl-C ends it with what there is.
    Exit code 1 if an output breaks the numerical rule, 2 if nothing could be measured.
    """
    options["device"] = checked_device(options["device"])
    check_options(options)
    if options["show"] is not None:
        done = Bench.load(options["show"])
        if options["goals"] and not done.on_gpu:
            with_goals(done.preset)
        output(done, options)
        return exit_code(done, options["goals"])
    with ExitStack() as stack:
        history = stack.enter_context(keeping(options["save"], options["file"]))
        keeper = Keeper(history, options["save"])
        shown = not (options["json_wanted"] or options["csv_wanted"])
        with data_only(not shown):
            done = measured(options, shown, keeper)
        summary = summarise(done)
        keeper.end(done, summary)
        wanted = history is not None and options["report_file"] is not None
        runs = kept_runs_of(history, words(options)) if wanted and history is not None else []
    output(done, options, runs)
    if keeper.problem is not None:
        raise keeper.problem
    if done.interrupted:
        raise click.Abort
    return exit_code(done, options["goals"])


def exit_code(done: Bench, goals: bool) -> int:
    """Goals count if they were asked for."""
    summary = summarise(done)
    words = {one.verdict for one in judged(done)} if goals else set()
    launched = kernel_goal_code(kernel_verdicts(done)) if goals and done.on_gpu else 0
    if summary.failed or "missed" in words or launched == 1:
        return 1
    return 0 if summary.verdicts and words <= {"met"} and not launched else 2
