"""`--input` as typed on the command line -> the arguments of one call of a model.

In: texts such as "8x768" or "input_ids=1x128:int64", a model, a seed. Out: `Inputs` with tensors of
these shapes, and notes on how they were drawn. docs/targets.md is the user's side of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from torchweld.core.errors import TorchweldError
from torchweld.core.model_inputs import Inputs
from torchweld.core.typed_names import known

DTYPES = {
    **{name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")},
    **{name: getattr(torch, name) for name in ("int64", "int32", "int16", "int8", "uint8", "bool")},
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
INPUT = re.compile(r"(?:(\w+)=)?(\d+(?:x\d+)*)(?::(\w+))?(?::(\d+))?")


@dataclass(frozen=True, kw_only=True)
class InputText:
    """One `--input`: `[name=]1x128[:dtype[:below]]`."""

    name: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    below: int | None


def parse_input(text: str) -> InputText:
    match = INPUT.fullmatch(text.strip())
    if match is None:
        raise TorchweldError(
            f"--input {text!r} is not [name=]SHAPE[:dtype[:below]]; as in 8x768, 8x768:bf16, "
            "input_ids=1x128:int64 or input_ids=1x128:int64:50257"
        )
    name, shape, dtype, below = match.groups()
    kind = DTYPES[known(dtype or "float32", DTYPES, f"dtype in --input {text!r}:")]
    if below is not None and (kind.is_floating_point or kind == torch.bool or int(below) < 1):
        raise TorchweldError(
            f"--input {text!r}: the number after the dtype is the end of the range that whole "
            "numbers are drawn from; it goes with an integer dtype and is at least 1"
        )
    return InputText(
        name=name,
        shape=tuple(int(size) for size in shape.split("x")),
        dtype=kind,
        below=None if below is None else int(below),
    )


def parse_inputs(texts: Sequence[str], model: nn.Module, seed: int) -> tuple[Inputs, list[str]]:
    """The arguments of one call, on the model's device, and notes on how they were drawn."""
    generator = torch.Generator().manual_seed(seed)
    parameter = next(iter(model.parameters()), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    args: list[torch.Tensor] = []
    kwargs: dict[str, torch.Tensor] = {}
    notes: list[str] = []
    for text in texts:
        given = parse_input(text)
        tensor, note = _draw(given, model, generator)
        if note and note not in notes:
            notes.append(note)
        if given.name is None:
            args.append(tensor.to(device))
        elif given.name in kwargs:
            raise TorchweldError(f"--input gives {given.name!r} twice; one call takes it once")
        else:
            kwargs[given.name] = tensor.to(device)
    return Inputs(*args, **kwargs), notes


def _draw(
    given: InputText, model: nn.Module, generator: torch.Generator
) -> tuple[torch.Tensor, str | None]:
    """Floats from the normal distribution, whole numbers that the model's tables have, masks of
    ones."""
    if given.dtype.is_floating_point:
        return torch.randn(given.shape, generator=generator).to(given.dtype), None
    if given.dtype == torch.bool or (given.name or "").endswith("mask"):
        return torch.ones(given.shape, dtype=given.dtype), None
    below, note = given.below, None
    if below is None:
        below, reason = smallest_table(model)
        note = f"whole numbers of --input are drawn from 0 to {below - 1}: {reason}"
    below = min(below, torch.iinfo(given.dtype).max + 1)
    drawn = torch.randint(below, given.shape, generator=generator)
    return drawn.to(given.dtype), note


def smallest_table(model: nn.Module) -> tuple[int, str]:
    """How many rows the smallest embedding has: indices below that are safe for all of them."""
    rows = {
        name: module.num_embeddings
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    }
    if not rows:
        return 2, "the model has no embedding to take a range from; give one as in 1x128:int64:1000"
    name = min(rows, key=rows.__getitem__)
    return rows[name], f"the smallest embedding, {name or 'the model'}, has as many rows"
