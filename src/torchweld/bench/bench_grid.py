"""What is typed as a grid -> cases: kinds of blocks × sizes × dtypes × rows, in this order.

A kind is an activation (an MLP of two layers or more), `<activation>-gated`, one of the usual names
of gated forms, `linear`, or a built-in block, which has sizes of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torchweld.bench.bench_cases import SHORT_DTYPES, Case, MlpShape
from torchweld.core.activations import ACTIVATIONS, parse_activation
from torchweld.core.errors import TorchweldError
from torchweld.core.typed_names import known

# From the sizes of reinforcement learning and tabular nets to those of language models.
BLOCKS = {
    "tiny": MlpShape(sizes=(64, 256, 64)),
    "deep": MlpShape(sizes=(128, 128, 128, 10), activation="relu"),
    "small": MlpShape(sizes=(256, 1024, 256)),
    "base": MlpShape(sizes=(768, 3072, 768)),
    "gated": MlpShape(sizes=(1024, 2816, 1024), activation="silu", gated=True, bias=False),
}

USUAL_NAMES = {"geglu": "gelu-gated", "swiglu": "silu-gated", "reglu": "relu-gated"}
KINDS = (
    *BLOCKS,
    "linear",
    *USUAL_NAMES,
    *(name for name in ACTIVATIONS if name != "identity"),
    *(f"{name}-gated" for name in ACTIVATIONS),
)
DTYPES = {**{name: name for name in SHORT_DTYPES}, **{s: name for name, s in SHORT_DTYPES.items()}}

DEFAULT_SIZES = ("768x3072",)
DEFAULT_ROWS = ("1", "8", "64")


def listed(option: str, values: Sequence[str]) -> list[str]:
    """The items of an option that takes comma lists and may be repeated, each once.

    Numbers after a colon belong to the item before them, as in `softplus:2,20`.
    """
    items: list[str] = []
    for value in values:
        for part in value.split(","):
            text = part.strip()
            if items and ":" in items[-1] and re.fullmatch(r"-?[\d.]+", text):
                items[-1] += f",{text}"
            elif text:
                items.append(text)
    if values and not items:
        raise TorchweldError(
            f"{option} {' '.join(values)!r} names nothing, and the grid is empty; give a value, or "
            "leave the option out"
        )
    return list(dict.fromkeys(items))


def parse_sizes(text: str) -> tuple[int, ...]:
    """`"768x3072x768"`, or with → between, as numbers."""
    parts = re.split(r"[x→]", text.strip())
    if len(parts) < 2 or not all(re.fullmatch(r"[0-9]+", part) for part in parts):
        raise TorchweldError(
            f"sizes {text!r}: expected two whole numbers or more with x between, in x hidden, such "
            "as 768x3072, or 768x3072x768; several of them with commas"
        )
    return tuple(int(part) for part in parts)


def parse_rows(text: str) -> tuple[int, ...]:
    """`"64"` rows, or `"8x128"`: a batch of 8 sequences of 128."""
    parts = text.split("x")
    if not all(re.fullmatch(r"[0-9]+", part) and int(part) > 0 for part in parts):
        raise TorchweldError(
            f"rows {text!r}: expected a whole number of at least 1, such as 64, or batch x "
            "sequence, such as 8x128"
        )
    return tuple(int(part) for part in parts)


def parse_dtype(text: str) -> str:
    return DTYPES[known(text, DTYPES, "dtype")]


def mlp_of(kind: str, sizes: tuple[int, ...]) -> MlpShape:
    """A block of a kind that has no sizes of its own; with two, the output is as wide as x."""
    kind = USUAL_NAMES.get(kind, kind)
    if kind == "linear":
        if len(sizes) != 2:
            raise TorchweldError(
                f"sizes {'x'.join(map(str, sizes))} for linear, which has two: in x out, such as "
                "768x3072"
            )
        return MlpShape(sizes=sizes, activation="identity")
    gated = kind.endswith("-gated")
    whole = (*sizes, sizes[0]) if len(sizes) == 2 else sizes
    return MlpShape(
        sizes=whole, activation=kind.removesuffix("-gated"), gated=gated, bias=not gated
    )


def check_kind(kind: str) -> str:
    """The kind, if there is one; an activation may have numbers, as in leaky_relu:0.2-gated."""
    name, colon, _ = kind.partition(":")
    if not colon:
        return known(kind, KINDS, "block")
    known(name, ACTIVATIONS, "activation")
    parse_activation(kind.removesuffix("-gated"))
    return kind


def mlps_of(kinds: Sequence[str], sizes: Sequence[str]) -> list[MlpShape]:
    """Every kind in every size; built-in blocks in their own."""
    for kind in kinds:
        check_kind(kind)
    parsed = [parse_sizes(text) for text in sizes or DEFAULT_SIZES]
    open_kinds = [kind for kind in kinds or ("gelu",) if kind not in BLOCKS]
    if sizes and not open_kinds:
        raise TorchweldError(
            f"--sizes {','.join(sizes)} goes with kinds of blocks, and {', '.join(kinds)} have "
            "sizes of their own; add a kind, as in --block gelu"
        )
    found = [
        mlp
        for kind in kinds or ("gelu",)
        for mlp in ([BLOCKS[kind]] if kind in BLOCKS else [mlp_of(kind, own) for own in parsed])
    ]
    return list(dict.fromkeys(found))


def cases_of(
    blocks: Sequence[str], sizes: Sequence[str], rows: Sequence[str], dtypes: Sequence[str]
) -> list[Case]:
    """The demo's cases if nothing was asked for; else every combination of what was."""
    if not (blocks or sizes or rows or dtypes):
        return demo_cases()
    mlps = mlps_of(blocks, sizes)
    if not (blocks or sizes):
        mlps = list(dict.fromkeys(case.mlp for case in demo_cases()))
    leads = [parse_rows(text) for text in rows or DEFAULT_ROWS]
    names = [parse_dtype(text) for text in dtypes or ("float32",)]
    found = [
        Case(mlp=mlp, lead=lead, dtype=dtype) for mlp in mlps for dtype in names for lead in leads
    ]
    return list(dict.fromkeys(found))


def demo_cases() -> list[Case]:
    """What is shown when nothing is asked for: small to large, few rows, fp32 and some bf16."""
    wanted: dict[str, dict[str, tuple[int, ...]]] = {
        "tiny": {"float32": (1, 8, 64)},
        "small": {"float32": (1, 8, 64)},
        "base": {"float32": (1, 8, 64), "bfloat16": (1, 8)},
        "gated": {"float32": (1, 8, 64), "bfloat16": (1, 8)},
    }
    return [
        Case(mlp=BLOCKS[name], lead=(rows,), dtype=dtype)
        for name, dtypes in wanted.items()
        for dtype, all_rows in dtypes.items()
        for rows in all_rows
    ]
