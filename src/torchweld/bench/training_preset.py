"""The preset `training`: its cells, and what torchweld claims for them.

One block and a stack, with malloc as it is and tuned, in 16 bits, accumulating, and the step of a
whole model. What needs tuned malloc comes last: its processes are others.
"""

from __future__ import annotations

from typing import Any

from torchweld.bench.bench_cases import SHORT_DTYPES, MlpShape
from torchweld.bench.bench_goals import Goal
from torchweld.bench.bench_grid import BLOCKS
from torchweld.bench.preset_series import PresetModel, PresetRow
from torchweld.bench.training_step import MALLOCS, TrainingStep

STEP, TUNED = TrainingStep(), TrainingStep(malloc="tuned")
ACCUMULATING = TrainingStep(accumulate=True)
BASE, GATED, TINY = BLOCKS["base"], BLOCKS["gated"], BLOCKS["tiny"]
CHAIN = MlpShape(sizes=(128,) * 5, activation="relu")
STACKED = 6
FEW, SMALL_ROWS = (1, 2, 4, 8, 16, 32), (1, 4, 16, 64, 256)


def _leads(*rows: int) -> tuple[tuple[int, ...], ...]:
    return tuple((count,) for count in rows)


TRAINING = (
    PresetRow(part="gelu", mlp=BASE, leads=_leads(*FEW, 64, 128, 512), step=STEP),
    PresetRow(part="gated", mlp=GATED, leads=_leads(8, 32, 128), step=STEP),
    PresetRow(part="small", mlp=TINY, leads=_leads(*SMALL_ROWS), step=STEP),
    PresetRow(part="small", mlp=CHAIN, leads=_leads(*SMALL_ROWS), step=STEP),
    PresetRow(part="bf16", mlp=BASE, leads=_leads(32, 128), dtypes=("bfloat16",), step=STEP),
    PresetRow(part="bf16", mlp=BASE, leads=_leads(32, 128), step=TrainingStep(autocast="bfloat16")),
    PresetRow(part="accumulate", mlp=BASE, leads=_leads(8, 32), step=ACCUMULATING),
    *(
        PresetRow(part="stack", mlp=BASE, leads=_leads(8, 32), blocks=STACKED, step=step)
        for step in (STEP, TUNED)
    ),
)
TRAINED_GPT2 = PresetModel(
    part="gpt2",
    target="hf:gpt2",
    inputs=("input_ids=1x32:int64",),
    shown="input_ids 1x32 int64",
    steps=tuple(
        TrainingStep(optimizer=optimizer, malloc=malloc)
        for malloc in MALLOCS
        for optimizer in ("", "adamw")
    ),
)


def _at_least(name: str, rows: int, least: float, **about: Any) -> Goal:
    """A goal for one number of rows."""
    given: dict[str, Any] = {"over": "eager", "every_cell": True, "steps": (STEP,), **about}
    return Goal(name=f"{name}, {rows} rows", rows=(rows, rows), least=least, **given)


TRAINING_GOALS = (
    Goal(
        name="768→3072 gelu fp32, up to 32 rows, mean",
        over="eager",
        least=2.4,
        mlps=(BASE,),
        rows=(1, 32),
        steps=(STEP,),
    ),
    Goal(
        name="the same, every cell",
        over="eager",
        least=1.4,
        every_cell=True,
        mlps=(BASE,),
        rows=(1, 32),
        steps=(STEP,),
    ),
    *(
        _at_least("768→3072 gelu fp32", rows, least, mlps=(BASE,))
        for rows, least in ((64, 1.25), (128, 1.2), (512, 1.0))
    ),
    *(
        _at_least("1024→2816 silu-gated fp32", rows, least, mlps=(GATED,))
        for rows, least in ((8, 2.0), (32, 1.5), (128, 1.1))
    ),
    *(
        _at_least(
            f"six of 768→3072, malloc {step.malloc}",
            rows,
            least,
            mlps=(BASE,),
            blocks=(STACKED,),
            steps=(step,),
        )
        for step, goals in ((STEP, (3.0, 1.8)), (TUNED, (2.0, 1.3)))
        for rows, least in zip((8, 32), goals, strict=True)
    ),
    Goal(
        name="64→256→64 and 128-wide chains, mean",
        over="eager",
        least=2.2,
        mlps=(TINY, CHAIN),
        steps=(STEP,),
    ),
    *(
        Goal(
            name=f"bf16, own or by autocast, every cell ({where})",
            over="eager",
            least=least,
            every_cell=True,
            dtypes=("bfloat16",),
            mlps=(BASE,),
            steps=(STEP,),
            native_bf16=native,
        )
        for where, least, native in (
            ("no native products", 10.0, False),
            ("native products", 1.0, True),
        )
    ),
    Goal(
        name="torch.compile, every cell, within noise",
        over="compile",
        least=1.0,
        every_cell=True,
        within_noise=True,
        dtypes=tuple(SHORT_DTYPES),
        blocks=(),
        steps=(STEP, TUNED, ACCUMULATING),
    ),
    Goal(
        name="recompute against eager, fp32, up to 32 rows, every cell, within noise",
        over="eager",
        ours="torchweld:recompute",
        least=1.0,
        every_cell=True,
        within_noise=True,
        blocks=(),
        rows=(1, 32),
        steps=(STEP, TUNED),
    ),
    *(
        _at_least("768→3072 accumulating", rows, least, mlps=(BASE,), steps=(ACCUMULATING,))
        for rows, least in ((8, 1.6), (32, 1.3))
    ),
    Goal(
        name="GPT-2 124M with AdamW, 1 × 32 tokens, malloc tuned",
        over="eager",
        least=1.2,
        every_cell=True,
        target=TRAINED_GPT2.target,
        steps=(TrainingStep(optimizer="adamw", malloc="tuned"),),
    ),
    Goal(
        name="the same, malloc stock, within noise",
        over="eager",
        least=1.0,
        every_cell=True,
        within_noise=True,
        target=TRAINED_GPT2.target,
        steps=(TrainingStep(optimizer="adamw"),),
    ),
)
