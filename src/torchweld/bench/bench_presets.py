"""Series of cases with a name: a walk-through, well-known models, and what torchweld claims."""

from __future__ import annotations

from dataclasses import replace

from torchweld.bench.bench_cases import MlpShape
from torchweld.bench.bench_goals import BEST, PEAK, Goal
from torchweld.bench.bench_grid import BLOCKS
from torchweld.bench.preset_series import Preset, PresetRow
from torchweld.bench.runtimes.runtime_names import BLOCK_PEERS
from torchweld.bench.training_preset import TRAINED_GPT2, TRAINING, TRAINING_GOALS
from torchweld.core.errors import TorchweldError
from torchweld.core.typed_names import known


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

# The same rows for a device, on the walk-through's own shape: 64 sequences of 128 tokens, in
# bfloat16.
TOKENS = ((64, 128),)
BLOG_ON_DEVICE = tuple(replace(row, leads=TOKENS, dtypes=("bfloat16",)) for row in BLOG)

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
        mlps=(BLOCKS["tiny"],),
    ),
)

PRESETS = {
    "blog": Preset(rows=BLOG, device_rows=BLOG_ON_DEVICE, device_against=("compile", "liger")),
    "models": Preset(rows=MODELS),
    "peers": Preset(
        rows=PEERS, against=BLOCK_PEERS[1:], compile_rows=(1, 8, 64, 512), goals=PEER_GOALS
    ),
    "training": Preset(
        rows=TRAINING, against=("compile",), goals=TRAINING_GOALS, models=(TRAINED_GPT2,)
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
