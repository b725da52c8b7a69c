"""What the preset training claims: met, missed or not measured, each from exactly its cells."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.support.bench_samples import bench, cell, comparison

from torchweld.bench import Bench, Case, Cell, summarise
from torchweld.bench.bench_cases import ModelCase
from torchweld.bench.bench_presets import PRESETS
from torchweld.bench.bench_results import Result, TrainingCost
from torchweld.bench.bench_rows import csv_text
from torchweld.bench.training_preset import BASE, CHAIN, GATED, STEP, TINY, TUNED
from torchweld.bench.training_step import TrainingStep
from torchweld.core.not_measured import NotMeasured
from torchweld.report.bench_peers import goals_section
from torchweld.report.bench_text import bench_head, bench_sections
from torchweld.report.bench_training import training_section
from torchweld.report.text_style import to_text
from torchweld.timing import Comparison

PRESET = PRESETS["training"]
NAMES = ("compile", "torchweld:recompute", "torchweld")
GOALS = 20
COST = TrainingCost(saved_bytes=5000, faults=4610.4, peak_bytes=400_000_000)


def compared(speedup: float, width: float = 1.01) -> Comparison:
    """A comparison with eager, known within `width`."""
    return replace(comparison(speedup, us=2000.0), interval=(speedup / width, speedup * width))


def spot(what: Case | ModelCase, width: float = 1.01, **speeds: float) -> Cell:
    """A cell of the preset; ours and recompute are as given, compile as fast as eager."""
    ours = speeds.get("ours", 20.0)
    recompute = speeds.get("recompute", 1.1)
    sides: dict[str, Comparison | None] = {
        "compile": compared(speeds.get("compiled", 1.0), width),
        "torchweld:recompute": compared(recompute, width),
        "torchweld": compared(ours, width),
    }
    if isinstance(what, Case):
        made = cell(what, sides, us=2000.0)
    else:
        sides |= dict.fromkeys(("compile", "torchweld:recompute"))
        made = cell(Case(mlp=BASE, lead=(1,)), sides, us=2000.0)
        made = replace(made, case=None, model=what, name=str(what))

    def with_cost(result: Result) -> Result:
        cost = replace(result.cost, host_us=None)
        return result if result.refused else replace(result, training=COST, cost=cost)

    return replace(made, results=tuple(map(with_cost, made.results)))


def found(cells: list[Cell], native: bool = True, **changes: object) -> Bench:
    given = {
        "backends": ("torchweld", "torchweld:recompute"),
        "against": ("compile",),
        "preset": "training",
        "training": True,
        "native_bf16": native,
    }
    return bench(cells, **{**given, **changes})


def everything(native: bool = True, change: Callable[[Cell], Cell] = lambda one: one) -> Bench:
    return found([change(spot(what)) for what in PRESET.whole], native)


def verdicts(made: Bench) -> dict[str, str]:
    return {one.goal.name: one.verdict for one in PRESET.judged(made)}


# ---- the grid ----


def test_the_preset_has_every_cell_that_is_claimed() -> None:
    whole = PRESET.whole
    assert len(whole) == len(set(whole)) == 9 + 3 + 10 + 4 + 2 + 4 + 4
    assert PRESET.training
    assert PRESET.parts == [
        *("gelu", "gated", "small", "bf16", "accumulate", "stack"),
        "gpt2",
    ]
    mallocs = [case.training.malloc for case in PRESET.cases if case.training is not None]
    assert mallocs == sorted(mallocs)  # tuned ones last: their processes are others
    assert {case.blocks for case in PRESET.cases} == {1, 6}
    assert {case.computed_dtype for case in PRESET.cases} == {"float32", "bfloat16"}


def test_a_part_can_be_had_alone() -> None:
    assert [case.rows for case in PRESET.cases_of((), (), ("gated",))] == [8, 32, 128]
    stacks = PRESET.cases_of(("8",), (), ("stack",))
    assert [str(case) for case in stacks] == [
        "8 × 768→3072→768 gelu × 6 fp32 training",
        "8 × 768→3072→768 gelu × 6 fp32 tuned training",
    ]
    assert PRESET.cases_of((), (), ("gpt2",)) == []
    (model,) = PRESET.models_of(("gpt2",))
    assert [str(case) for case in model.cases] == [
        "hf:gpt2 input_ids 1x32 int64, forward and backward",
        "hf:gpt2 input_ids 1x32 int64, with adamw",
        "hf:gpt2 input_ids 1x32 int64, forward and backward, malloc tuned",
        "hf:gpt2 input_ids 1x32 int64, with adamw, malloc tuned",
    ]
    assert PRESET.models_of(("gelu",)) == []
    assert PRESET.models_of() == [model]


def test_every_cell_but_a_models_forward_and_backward_belongs_to_a_goal() -> None:
    goals = [goal for goal in PRESET.goals if goal.over == "eager" and not goal.ours]
    alone = [what for what in PRESET.whole if not any(goal.covers(what) for goal in goals)]
    assert all(isinstance(what, ModelCase) and not what.step.optimizer for what in alone)
    assert len(alone) == 2


# ---- goals ----


@pytest.mark.parametrize("native", [True, False])
def test_goals_are_met_when_everything_is_reached(native: bool) -> None:
    found = verdicts(everything(native))
    assert len(found) == GOALS
    assert set(found.values()) == {"met"}
    told = [name for name in found if "native products" in name]
    assert told == [
        f"bf16, own or by autocast, every cell ({'' if native else 'no '}native products)"
    ]


def test_without_cells_no_goal_is_measured() -> None:
    assert set(verdicts(found([])).values()) == {"not measured"}
    assert len(verdicts(found([], native_bf16=None))) == GOALS - 1


def case(rows: int, **about: object) -> Case:
    given = {"mlp": BASE, "lead": (rows,), "training": STEP}
    return Case(**{**given, **about})  # type: ignore[arg-type]


ACCUMULATING = TrainingStep(accumulate=True)
AMP = TrainingStep(autocast="bfloat16")


def gpt2(malloc: str) -> ModelCase:
    step = TrainingStep(optimizer="adamw", malloc=malloc)  # type: ignore[arg-type]
    return ModelCase(target="hf:gpt2", inputs="input_ids 1x32 int64", step=step)


@pytest.mark.parametrize(
    ("name", "bad", "native"),
    [
        ("768→3072 gelu fp32, up to 32 rows, mean", spot(case(4), ours=2.3), True),
        ("the same, every cell", spot(case(32), ours=1.39), True),
        ("768→3072 gelu fp32, 64 rows", spot(case(64), ours=1.24), True),
        ("768→3072 gelu fp32, 128 rows", spot(case(128), ours=1.19), True),
        ("768→3072 gelu fp32, 512 rows", spot(case(512), ours=0.99), True),
        ("1024→2816 silu-gated fp32, 8 rows", spot(case(8, mlp=GATED), ours=1.9), True),
        ("1024→2816 silu-gated fp32, 32 rows", spot(case(32, mlp=GATED), ours=1.4), True),
        ("1024→2816 silu-gated fp32, 128 rows", spot(case(128, mlp=GATED), ours=1.0), True),
        ("six of 768→3072, malloc stock, 8 rows", spot(case(8, blocks=6), ours=2.9), True),
        ("six of 768→3072, malloc stock, 32 rows", spot(case(32, blocks=6), ours=1.7), True),
        (
            "six of 768→3072, malloc tuned, 8 rows",
            spot(case(8, blocks=6, training=TUNED), ours=1.9),
            True,
        ),
        (
            "six of 768→3072, malloc tuned, 32 rows",
            spot(case(32, blocks=6, training=TUNED), ours=1.2),
            True,
        ),
        ("64→256→64 and 128-wide chains, mean", spot(case(1, mlp=CHAIN), ours=2.1), True),
        ("64→256→64 and 128-wide chains, mean", spot(case(256, mlp=TINY), ours=2.1), True),
        (
            "bf16, own or by autocast, every cell (no native products)",
            spot(case(32, dtype="bfloat16"), ours=9.9),
            False,
        ),
        (
            "bf16, own or by autocast, every cell (native products)",
            spot(case(128, training=AMP), ours=0.9, compiled=0.5),
            True,
        ),
        ("torch.compile, every cell, within noise", spot(case(8), ours=2.0, compiled=2.1), True),
        (
            "torch.compile, every cell, within noise",
            spot(case(8, blocks=6, training=TUNED), ours=2.0, compiled=2.1),
            True,
        ),
        (
            "recompute against eager, fp32, up to 32 rows, every cell, within noise",
            spot(case(32, mlp=GATED), recompute=0.95),
            True,
        ),
        ("768→3072 accumulating, 8 rows", spot(case(8, training=ACCUMULATING), ours=1.5), True),
        ("768→3072 accumulating, 32 rows", spot(case(32, training=ACCUMULATING), ours=1.2), True),
        (
            "GPT-2 124M with AdamW, 1 × 32 tokens, malloc tuned",
            spot(gpt2("tuned"), ours=1.19),
            True,
        ),
        ("the same, malloc stock, within noise", spot(gpt2("stock"), ours=0.95), True),
    ],
)
def test_each_goal_can_be_missed_and_it_alone(name: str, bad: Cell, native: bool) -> None:
    assert verdicts(found([bad], native))[name] == "missed"

    def replaced(one: Cell) -> Cell:
        return bad if one.what == bad.what else one

    missed = [own for own, word in verdicts(everything(native, replaced)).items() if word != "met"]
    if "mean" in name:  # one cell does not spoil a mean
        assert set(missed) <= {"the same, every cell"}
    else:
        assert missed == [name]


def test_within_noise_is_enough_where_slower_is_not_allowed() -> None:
    noisy = spot(gpt2("stock"), width=1.1, ours=0.95)
    assert verdicts(found([noisy]))["the same, malloc stock, within noise"] == "met"
    beside = spot(case(8), width=1.1, ours=2.0, compiled=2.1)
    name = "torch.compile, every cell, within noise"
    assert verdicts(found([beside]))[name] == "met in part"


def test_recompute_above_32_rows_is_reported_and_not_judged() -> None:
    name = "recompute against eager, fp32, up to 32 rows, every cell, within noise"
    slow = spot(case(64), recompute=0.5)
    assert verdicts(found([slow]))[name] == "not measured"


def test_a_bench_without_recompute_does_not_measure_its_goal() -> None:
    one = spot(case(8))
    few = replace(one, results=tuple(r for r in one.results if "recompute" not in r.name))
    made = verdicts(found([few], backends=("torchweld",)))
    name = "recompute against eager, fp32, up to 32 rows, every cell, within noise"
    assert made[name] == "not measured"


# ---- what is shown ----


def shown(made: Bench) -> str:
    parts = [*bench_head(made), *bench_sections(made, summarise(made), 100, PRESET.judged(made))]
    return to_text(parts, 100)


def test_all_of_it_fits_100_columns_and_says_what_marks_mean() -> None:
    text = shown(everything())
    assert max(map(len, text.splitlines())) <= 100
    words = " ".join(text.split())
    assert "steps of training; torch 2.13" in words
    for mark in ("acc:", "amp:", "adamw, sgd:", "tuned:"):
        assert mark in words
    assert "torchweld:recompute the input alone" in words
    assert "error of outputs and gradients" in words
    assert "host" not in text
    goals = to_text(list(goals_section(PRESET.judged(everything()))), 100)
    assert goals.count(" met") == GOALS
    assert "cold" not in goals


def test_marks_that_do_not_occur_are_not_explained() -> None:
    words = " ".join(shown(found([spot(case(8))])).split())
    assert "A step is forward and backward" in words
    assert "acc:" not in words
    assert "adamw" not in words.partition("goals")[0]


def test_models_and_blocks_stand_in_one_table() -> None:
    text = to_text(list(training_section(everything(), 120)), 120)
    (line,) = [one for one in text.splitlines() if "adamw tuned" in one]
    assert line.split()[-2:] == ["4610→–→–→4610", "400→–→–→400"]
    (line,) = [one for one in text.splitlines() if "fp32 acc" in one and " 8 " in one]
    assert "5.00 kB 1.00→1.00→1.00 4610→4610→4610→4610" in line
    alone = shown(found([spot(gpt2("stock")), spot(gpt2("tuned"))]))
    assert "model" in alone
    assert "rows" not in alone.partition("goals")[0]


def test_figures_that_are_not_known_are_dashes_with_the_reason() -> None:
    unknown = NotMeasured("this system does not tell")
    one = spot(case(8))
    eager, *others = one.results
    eager = replace(eager, training=replace(COST, faults=unknown, peak_bytes=unknown))
    made = found([replace(one, results=(eager, *others))])
    text = " ".join(to_text(list(training_section(made, 100)), 100).split())
    assert "–→4610→4610→4610" in text
    assert "faults were not measured: this system does not tell" in text
    assert list(training_section(bench([]), 100)) == []


def test_csv_has_what_steps_are_and_cost() -> None:
    cells = [spot(case(8, training=ACCUMULATING)), spot(gpt2("tuned"))]
    rows = list(csv.DictReader(io.StringIO(csv_text(found(cells)))))
    assert (rows[0]["accumulate"], rows[0]["blocks"]) == ("True", "1")
    assert (rows[0]["saved_ratio"], rows[0]["faults"]) == ("1.0", "4610.4")
    assert (rows[0]["saved_bytes"], rows[0]["peak_bytes"]) == ("5000", "400000000")
    assert (rows[-1]["malloc"], rows[-1]["optimizer"]) == ("tuned", "adamw")
