"""Series of cases with a name: a walk-through, well-known models, and what torchweld claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchweld.bench.bench_cases import Case, MlpShape
from torchweld.bench.bench_goals import BEST, PEAK, Goal, GoalVerdict, judge_goals
from torchweld.bench.bench_grid import BLOCKS, parse_dtype, parse_rows
from torchweld.bench.bench_results import Bench
from torchweld.bench.runtimes.runtime_names import BLOCK_PEERS
from torchweld.core.errors import TorchweldError
from torchweld.core.typed_names import known


@dataclass(frozen=True, kw_only=True)
class PresetRow:
    """A block, the name under which it is shown if it has one, and what it is called with."""

    mlp: MlpShape
    leads: tuple[tuple[int, ...], ...]
    label: str = ""
    dtypes: tuple[str, ...] = ("float32",)
    colds: tuple[bool, ...] = (False,)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A series: its rows, and who takes part unless others are named.

    compile_rows: where torch.compile is measured, in float32; empty: everywhere
    goals:        what is claimed for the whole series
    """

    rows: tuple[PresetRow, ...]
    against: tuple[str, ...] = ()
    compile_rows: tuple[int, ...] = ()
    goals: tuple[Goal, ...] = ()

    @property
    def cases(self) -> list[Case]:
        return self.cases_of((), ())

    def cases_of(self, rows: Sequence[str], dtypes: Sequence[str]) -> list[Case]:
        """Rows and dtypes that are given take the place of its own."""
        leads = tuple(parse_rows(text) for text in rows)
        names = tuple(parse_dtype(text) for text in dtypes)
        found = [
            Case(mlp=row.mlp, lead=lead, dtype=dtype, label=row.label, cold=cold)
            for row in self.rows
            for dtype in names or row.dtypes
            for lead in leads or row.leads
            for cold in row.colds
        ]
        return list(dict.fromkeys(found))

    def why_not(self, name: str, case: Case) -> str:
        """Why a side is not measured in a case of this series; "" if it is."""
        if not name.startswith("compile") or not self.compile_rows:
            return ""
        if case.dtype == "float32" and case.rows in self.compile_rows:
            return ""
        listed = ", ".join(map(str, self.compile_rows))
        return f"this preset has it in float32 at {listed} rows, since compiling takes long"

    def judged(self, bench: Bench) -> list[GoalVerdict]:
        return judge_goals(self.goals, bench, self.cases, self.against)


def _gated(K: int, H: int, activation: str = "silu") -> MlpShape:
    return MlpShape(sizes=(K, H, K), activation=activation, gated=True, bias=False)


# From nn.Linear to a fused MLP: one Linear, two with a gelu between, and the gated form, on a batch
# of sequences.
WALK = ((1, 1), (1, 16), (1, 128), (8, 128))
BLOG = (
    PresetRow(
        label="nn.Linear", mlp=MlpShape(sizes=(768, 3072), activation="identity"), leads=WALK
    ),
    PresetRow(label="MLP, gelu", mlp=MlpShape(sizes=(768, 3072, 768)), leads=WALK),
    PresetRow(label="GeGLU", mlp=_gated(768, 3072, "gelu"), leads=WALK),
)

# Encoders on a sentence or an image, decoders on one token and on a prompt; the two largest in the
# type that they are kept in.
MODELS = (
    PresetRow(label="BERT-base", mlp=MlpShape(sizes=(768, 3072, 768)), leads=((1, 16), (1, 128))),
    PresetRow(
        label="GPT-2",
        mlp=MlpShape(sizes=(768, 3072, 768), activation="gelu_tanh"),
        leads=((1, 1), (8, 1), (1, 64)),
    ),
    PresetRow(label="ViT-B/16", mlp=MlpShape(sizes=(768, 3072, 768)), leads=((1, 197),)),
    PresetRow(label="Llama-like 1B", mlp=_gated(2048, 8192), leads=((1, 1), (8, 1), (1, 64))),
    PresetRow(
        label="Llama-like 7B", mlp=_gated(4096, 11008), leads=((1, 1), (8, 1)), dtypes=("bfloat16",)
    ),
    PresetRow(
        label="Mixtral expert", mlp=_gated(4096, 14336), leads=((1,), (8,)), dtypes=("bfloat16",)
    ),
    PresetRow(
        label="DLRM bottom",
        mlp=MlpShape(sizes=(13, 512, 256, 128), activation="relu"),
        leads=((1,), (128,)),
    ),
    PresetRow(
        label="DLRM top",
        mlp=MlpShape(sizes=(479, 1024, 1024, 512, 256, 1), activation="relu"),
        leads=((1,), (128,)),
    ),
    PresetRow(
        label="RL policy",
        mlp=MlpShape(sizes=(17, 64, 64, 6), activation="tanh"),
        leads=((1,), (64,)),
    ),
)

# Against other runtimes: every block at every number of rows, hot and cold. Narrow blocks are those
# of RL, tabular and neural-field nets, which are called with thousands of rows.
PEER_ROWS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 512)
NARROW_WIDTH, NARROW_ROWS = 256, 4096
SIXTEEN_BIT = ("bfloat16", "float16")
PEERS = tuple(
    PresetRow(
        mlp=mlp,
        leads=tuple(
            (rows,)
            for rows in (*PEER_ROWS, NARROW_ROWS)
            if rows < NARROW_ROWS or max(mlp.sizes) <= NARROW_WIDTH
        ),
        dtypes=("float32", *SIXTEEN_BIT),
        colds=(False, True),
    )
    for mlp in (*BLOCKS.values(), _gated(2048, 5632))
)
PEER_GOALS = (
    Goal(
        name="eager, fp32, every cell, within noise",
        over="eager",
        least=1.0,
        every_cell=True,
        within_noise=True,
    ),
    Goal(name="eager, fp32, up to 32 rows, mean", over="eager", least=3.0, rows=(1, 32)),
    Goal(name="eager, bf16 and fp16, mean", over="eager", least=5.0, dtypes=SIXTEEN_BIT),
    Goal(
        name="the best peer, fp32, hot, every cell",
        over=BEST,
        least=0.95,
        every_cell=True,
        hot=True,
    ),
    Goal(name="the best peer, fp32, hot, mean", over=BEST, least=1.25, hot=True),
    Goal(
        name="FMA peak, fp32, hot, 64 rows or more, 256 features or more, every cell",
        over=PEAK,
        least=0.85,
        every_cell=True,
        hot=True,
        rows=(64, float("inf")),
        width=256,
    ),
    Goal(
        name="ONNX Runtime, fp32, hot, 1 × 64→256→64",
        over="onnxruntime",
        least=1 / 0.6,
        every_cell=True,
        hot=True,
        rows=(1, 1),
        sizes=(64, 256, 64),
    ),
)

PRESETS = {
    "blog": Preset(rows=BLOG),
    "models": Preset(rows=MODELS),
    "peers": Preset(
        rows=PEERS, against=BLOCK_PEERS[1:], compile_rows=(1, 8, 64, 512), goals=PEER_GOALS
    ),
}


def preset_named(name: str) -> Preset:
    return PRESETS[known(name, PRESETS, "preset")]


def with_goals(name: str | None) -> Preset:
    """Raises for a preset that has none."""
    if not name or not preset_named(name).goals:
        listed = ", ".join(own for own, preset in PRESETS.items() if preset.goals)
        raise TorchweldError(f"--goals goes with a preset that has goals: --preset {listed}")
    return preset_named(name)
