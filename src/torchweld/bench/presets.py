"""Series of cases with a name: a walk-through, and the blocks of well-known models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchweld.bench.cases import Case, MlpShape
from torchweld.bench.grid import parse_dtype, parse_rows
from torchweld.core.names import known


@dataclass(frozen=True, kw_only=True)
class PresetRow:
    """A block by the name under which it is shown, and what it is usually called with."""

    label: str
    mlp: MlpShape
    leads: tuple[tuple[int, ...], ...]
    dtype: str = "float32"


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
        label="Llama-like 7B", mlp=_gated(4096, 11008), leads=((1, 1), (8, 1)), dtype="bfloat16"
    ),
    PresetRow(
        label="Mixtral expert", mlp=_gated(4096, 14336), leads=((1,), (8,)), dtype="bfloat16"
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

PRESETS = {"blog": BLOG, "models": MODELS}


def preset_cases(name: str, rows: Sequence[str], dtypes: Sequence[str]) -> list[Case]:
    """The cases of a preset; rows and dtypes that are given take the place of its own."""
    own = PRESETS[known(name, PRESETS, "preset")]
    leads = tuple(parse_rows(text) for text in rows)
    names = tuple(parse_dtype(text) for text in dtypes)
    found = [
        Case(mlp=row.mlp, lead=lead, dtype=dtype, label=row.label)
        for row in own
        for dtype in names or (row.dtype,)
        for lead in leads or row.leads
    ]
    return list(dict.fromkeys(found))
