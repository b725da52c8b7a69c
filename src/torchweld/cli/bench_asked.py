"""What the options of `torchweld bench` ask for, as cases; refused if they do not go together."""

from __future__ import annotations

from typing import Any

from torchweld.bench import Case
from torchweld.bench.bench_grid import cases_of, listed
from torchweld.bench.bench_presets import PRESETS, preset_named, with_goals
from torchweld.bench.preset_series import PresetModel
from torchweld.bench.speed_tables import table_cases, with_cold
from torchweld.cli.bench_device import asked_preset, check_device, is_gpu
from torchweld.cli.bench_table import GRID, check_table
from torchweld.cli.output_files import check_targets
from torchweld.cli.report_output import check_page_name
from torchweld.cli.training_options import (
    AGAINST,
    STEP_OPTIONS,
    check_training,
    demo_steps,
    trained,
    trains,
)
from torchweld.core.errors import TorchweldError
from torchweld.core.typed_names import known


def check_options(options: dict[str, Any]) -> None:
    """Raises if options do not go together, before anything is loaded or measured."""
    check_device(options)
    if options["show"] is not None:
        check_show(options)
    else:
        check_asked(options)
    if options["json_wanted"] and options["csv_wanted"]:
        raise TorchweldError("--json and --csv print two things; give one, and --out for the other")
    out = options["out"]
    if out is not None and out.suffix not in (".json", ".csv"):
        raise TorchweldError(f"--out {out}: the name has to end in .json or .csv")
    files = {"--out": out, "--table": options["table"], "--report": options["report_file"]}
    check_page_name("--report", options["report_file"])
    check_targets(files, options["force"])


def check_asked(options: dict[str, Any]) -> None:
    """The options that say what is measured."""
    whole = options["target"] is not None
    blocks_only = ("block", "sizes", "rows", "dtype", "backend", "preset", "check_parking")
    model_only = ("inputs", "plan_file")
    named = {"inputs": "--input", "plan_file": "--plan", "check_parking": "--check-parking"}
    odd = [name for name in (blocks_only if whole else model_only) if options[name]]
    if odd:
        option = named.get(odd[0], f"--{odd[0]}")
        why = "measures blocks; leave it out, or the TARGET" if whole else "goes with a TARGET"
        raise TorchweldError(f"{option} {why}")
    check_training(options)
    if options["table"] is not None:
        check_table(options)
    preset = asked_preset(options)
    if options["goals"] and not (is_gpu(options["device"]) and preset and preset.counts_kernels):
        with_goals(options["preset"])
    check_only(options)
    if options["cold"] and preset is not None and preset.both_colds:
        raise TorchweldError("the preset has hot and cold cells; give --only cold, not --cold")
    if preset is not None and (options["block"] or options["sizes"]):
        raise TorchweldError(
            "--preset has blocks of its own; leave --block and --sizes out (--rows and --dtype go "
            "with it)"
        )


def check_only(options: dict[str, Any]) -> None:
    """Raises for parts that the preset does not have."""
    only = listed("--only", options["only"])
    parts = preset_named(options["preset"]).parts if options["preset"] is not None else []
    if only and not parts:
        having = [f"{n} ({', '.join(p.parts)})" for n, p in PRESETS.items() if p.parts]
        raise TorchweldError(f"--only goes with a preset that has parts: {'; '.join(having)}")
    for name in only:
        known(name, parts, f"part of --preset {options['preset']}")


def check_show(options: dict[str, Any]) -> None:
    """Raises for options that ask for a measurement."""
    asking = (
        *("preset", *GRID, "against", "backend", "table", "save", "latency", "callers", "cold"),
        *("training", *STEP_OPTIONS),
    )
    odd = "a TARGET" if options["target"] is not None else ""
    odd = odd or next((f"--{name}" for name in asking if options[name]), "")
    if odd:
        raise TorchweldError(
            f"--show prints a bench that was measured before, and {odd} asks for another; leave "
            "one out"
        )


def preset_against(options: dict[str, Any]) -> list[str]:
    """Who takes part if nobody is named."""
    if options["target"] is not None:
        return []
    preset = asked_preset(options)
    found = preset.against if preset else ()
    return list(found or (AGAINST if trains(options) else ()))


def asked_cases(options: dict[str, Any]) -> list[Case]:
    rows, dtypes = listed("--rows", options["rows"]), listed("--dtype", options["dtype"])
    preset = asked_preset(options)
    if preset is not None:
        found = preset.cases_of(rows, dtypes, listed("--only", options["only"]))
        return trained(found, options) if options["training"] and not preset.training else found
    if options["table"] is not None and not (options["block"] or options["sizes"]):
        return table_cases(rows, dtypes)
    blocks, sizes = listed("--block", options["block"]), listed("--sizes", options["sizes"])
    if options["training"]:
        asked = blocks or sizes or rows or dtypes
        return trained(
            cases_of(blocks or ["gelu"], sizes, rows, dtypes) if asked else demo_steps(), options
        )
    cases = cases_of(blocks, sizes, rows, dtypes)
    return cases if options["table"] is None else with_cold(cases)


def asked_models(options: dict[str, Any]) -> list[PresetModel]:
    """Whole models of a preset. They have no rows and dtypes that others could replace."""
    only = listed("--only", options["only"])
    if not options["preset"] or (not only and (options["rows"] or options["dtype"])):
        return []
    return preset_named(options["preset"]).models_of(only)
