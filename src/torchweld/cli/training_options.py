"""The options of `torchweld bench --training`: what goes together, and the steps they ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import click

from torchweld.bench import Case
from torchweld.bench.bench_grid import BLOCKS, listed, parse_dtype
from torchweld.bench.bench_presets import preset_named
from torchweld.bench.training_participants import check_malloc
from torchweld.bench.training_step import AUTOCAST, MALLOCS, OPTIMIZERS, Malloc, TrainingStep
from torchweld.core.errors import TorchweldError
from torchweld.core.typed_names import known

F = TypeVar("F", bound=Callable[..., Any])

# Options that say what a step is.
STEP_OPTIONS = ("accumulate", "autocast", "optimizer", "malloc", "blocks")
# Options that are about calls without gradients.
INFERENCE = {"callers": "--callers", "table": "--table", "check_parking": "--check-parking"}
# The default of --against for training steps.
AGAINST = ("compile",)
# If nothing is asked for: a narrow block and a wide one, on few rows.
DEMO = {"tiny": (1, 32), "base": (1, 8, 32)}


def training_options(command: F) -> F:
    for option in reversed(
        (
            click.option(
                "--training",
                is_flag=True,
                help="Steps of training: forward and backward; of a TARGET too.",
            ),
            click.option(
                "--accumulate", is_flag=True, help="In training: gradients exist, and are added to."
            ),
            click.option(
                "--autocast", metavar="DTYPE", help="In training: bf16 or fp16, by autocast."
            ),
            click.option(
                "--optimizer",
                type=click.Choice(OPTIMIZERS),
                help="In training: steps after the backward, fused=True.",
            ),
            click.option(
                "--malloc",
                multiple=True,
                help="In training: stock, or tuned to keep freed memory, in all sides. (stock)",
            ),
            click.option(
                "--blocks",
                type=click.IntRange(min=1),
                metavar="N",
                help="In training: so many blocks, one after the other. (1)",
            ),
        )
    ):
        command = option(command)
    return command


def trains(options: dict[str, Any]) -> bool:
    """Whether steps of training are asked for."""
    preset = options["preset"]
    return bool(options["training"]) or (preset is not None and preset_named(preset).training)


def check_training(options: dict[str, Any]) -> None:
    """Raises for options that do not go together, before anything is loaded or measured."""
    given = [name for name in STEP_OPTIONS if options[name]]
    if not trains(options):
        if given:
            raise TorchweldError(f"--{given[0]} goes with --training; add it")
        return
    odd = [option for name, option in INFERENCE.items() if options[name]]
    if odd:
        raise TorchweldError(f"{odd[0]} goes with calls without gradients; leave --training out")
    if options["preset"] is not None:
        preset = preset_named(options["preset"])
        if preset.training and given:
            raise TorchweldError(
                f"--preset {options['preset']} has steps of its own; leave --{given[0]} out"
            )
        if preset.goals and not preset.training:
            raise TorchweldError(
                f"--preset {options['preset']} claims speeds of calls without gradients; "
                "--preset training has those of training"
            )
    if options["target"] is not None and options["blocks"]:
        raise TorchweldError("--blocks makes a stack of blocks; leave it out, or the TARGET")
    steps_of(options)


def steps_of(options: dict[str, Any]) -> list[TrainingStep]:
    """What a step is, for each kind of malloc that was asked for."""
    cast = options["autocast"]
    if cast is not None:
        cast = known(parse_dtype(cast), AUTOCAST, "autocast dtype")
    found = []
    for malloc in _mallocs(options):
        check_malloc(malloc)
        step = TrainingStep(
            accumulate=options["accumulate"],
            autocast=cast or "",
            optimizer=options["optimizer"] or "",
            malloc=malloc,
        )
        found.append(step)
    return found


def _mallocs(options: dict[str, Any]) -> list[Malloc]:
    named = [known(name, MALLOCS, "malloc") for name in listed("--malloc", options["malloc"])]
    return [malloc for malloc in MALLOCS if malloc in named] or ["stock"]


def model_steps(options: dict[str, Any]) -> list[TrainingStep]:
    """The steps of a whole model: forward and backward, then with the optimizer if there is one."""
    return [
        one
        for step in steps_of(options)
        for one in dict.fromkeys([replace(step, optimizer=""), step])
    ]


def trained(cases: Sequence[Case], options: dict[str, Any]) -> list[Case]:
    """The cases as steps of training, those with tuned malloc last: their processes are others."""
    blocks = options["blocks"] or 1
    return [
        replace(case, training=step, blocks=blocks) for step in steps_of(options) for case in cases
    ]


def demo_steps() -> list[Case]:
    return [Case(mlp=BLOCKS[name], lead=(count,)) for name, rows in DEMO.items() for count in rows]


def step_words_typed(options: dict[str, Any]) -> str:
    """The options as they were typed, for the history."""
    if not options["training"]:
        return ""
    parts = ["--training", "--accumulate"] if options["accumulate"] else ["--training"]
    for name in ("autocast", "optimizer", "blocks"):
        parts += [f"--{name} {options[name]}"] if options[name] else []
    parts += [f"--malloc {','.join(options['malloc'])}"] if options["malloc"] else []
    return " ".join(parts)
