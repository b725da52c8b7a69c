"""Random blocks for hypothesis: any sizes, activations, gates, layouts, strides and dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from tests.support.helpers import DTYPES, shapes_of
from torch import Tensor

from torchweld.core.activations import ACTIVATIONS
from torchweld.core.blocks import GATES, LayerForm, format_spec

SIZES = (1, 2, 3, 7, 8, 9, 16, 31, 64, 100, 123, 385, 431, 768)
# Where tiles, blocks of rows and ways of reading weights change, and one to each side.
ROWS = (*SIZES, 4, 5, 6, 12, 13, 17, 24, 25, 192, 193, 400)
MOST_WEIGHTS = 768 * 768  # of a layer
MOST_PRODUCTS = 1.5e7  # of a block


@dataclass(frozen=True, kw_only=True)
class Block:
    """What the op gets, and what hypothesis prints about it."""

    spec: str
    x: Tensor = field(repr=False)
    tensors: list[Tensor] = field(repr=False)
    forms: list[LayerForm] = field(repr=False)
    rows: int
    about: str  # sizes, dtype and how everything lies in memory


# ---- how a tensor may lie ----


def _plain(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _inside(t: Tensor) -> Tensor:
    """A window of a bigger tensor: rows further apart than they are long, an odd start."""
    whole = t.new_full([size + 5 for size in t.shape], math.nan)
    window = whole[tuple(slice(3, 3 + size) for size in t.shape)]
    return window.copy_(t)


def _every_other(t: Tensor) -> Tensor:
    whole = t.new_full([size * 2 for size in t.shape], math.nan)
    return whole[(slice(None, None, 2),) * t.dim()].copy_(t)


def _turned(t: Tensor) -> Tensor:
    """The same values, the last dimension not the dense one."""
    return t.movedim(-1, 0).contiguous().movedim(0, -1)


def _expanded(t: Tensor) -> Tensor:
    """Stride 0 along the first dimension. Other values than t's, which matters to nobody."""
    return t[:1].expand(t.shape)


def _expanded_last(t: Tensor) -> Tensor:
    return t[..., :1].expand(t.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": _plain,
    "inside": _inside,
    "every other": _every_other,
    "turned": _turned,
    "expanded": _expanded,
    "expanded last": _expanded_last,
}
# Mostly plain: it is the usual case, and each of the others switches a short cut off.
layouts = st.sampled_from(["plain"] * 4 + list(LAYOUTS))


# ---- blocks ----


@st.composite
def layer_forms(draw: st.DrawFn) -> LayerForm:
    name = draw(st.sampled_from(list(ACTIVATIONS)))
    parameters = ACTIVATIONS[name].defaults
    if bool(parameters) and draw(st.booleans()):
        parameters = tuple(draw(st.sampled_from((0.3, 2.0, 7.5))) for _ in parameters)
        if name == "softplus":  # it jumps at a low threshold, where rounding decides on the side
            parameters = (parameters[0], 7.5)
    return LayerForm(
        activation=name,
        parameters=parameters,
        bias=draw(st.booleans()),
        transposed=draw(st.sampled_from((False, False, True))),
        gate=draw(st.sampled_from(("none", *GATES))),
    )


@st.composite
def leading_sizes(draw: st.DrawFn, rows: int) -> tuple[int, ...]:
    """Everything but the features: one dimension, two or three, or none for a single row."""
    if rows == 1 and draw(st.booleans()):
        return ()
    sizes: tuple[int, ...] = (rows,)
    for _ in range(draw(st.integers(0, 2))):
        first = draw(st.sampled_from([d for d in range(1, sizes[0] + 1) if sizes[0] % d == 0]))
        sizes = (first, sizes[0] // first, *sizes[1:])
    return sizes


@st.composite
def blocks(
    draw: st.DrawFn,
    *,
    group: bool = False,
    dtypes: list[torch.dtype] = DTYPES,
    most_layers: int = 5,
    most_size: int = 768,
    most_rows: int = 768,
    plain: bool = False,
) -> Block:
    """`group`: all layers take x, else each the one before. `plain`: all contiguous."""
    dtype = draw(st.sampled_from(dtypes))
    forms = draw(st.lists(layer_forms(), min_size=1, max_size=most_layers))
    possible = [size for size in SIZES if size <= most_size]
    sizes = [draw(st.sampled_from(possible))]
    weights = 0
    for form in forms:
        K, products = sizes[0] if group else sizes[-1], 1 if form.gate == "none" else 2
        fitting = [size for size in possible if K * size * products <= MOST_WEIGHTS]
        sizes.append(draw(st.sampled_from(fitting)))
        weights += K * sizes[-1] * products
    affordable = [m for m in ROWS if m <= most_rows and m * weights <= MOST_PRODUCTS]
    rows = draw(st.sampled_from(affordable or [1]))
    leading = draw(leading_sizes(rows))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    gain = draw(st.sampled_from((1.0, 1.0, 0.1, 6.0)))

    def random(shape: tuple[int, ...], scale: float, layout: str) -> Tensor:
        values = torch.randn(shape, generator=generator) * scale
        return LAYOUTS[layout](values.to(dtype))

    x_layout = "plain" if plain else draw(layouts)
    x = random((*leading, sizes[0]), gain, x_layout)
    tensors, about = [], [f"{list(x.shape)} {x_layout}"]
    inputs = [sizes[0]] * len(forms) if group else sizes
    for i, (form, K, N) in enumerate(zip(forms, inputs, sizes[1:], strict=False)):
        equal = x_layout == "expanded last" if group or i == 0 else True
        for shape in shapes_of(form, K, N):
            layout = "plain" if plain else draw(layouts)
            # Sums of equal products are a case of their own: their errors all have one sign.
            if equal and layout == ("expanded" if form.transposed else "expanded last"):
                layout = "plain"
            tensors.append(random(shape, K**-0.5 if len(shape) == 2 else 0.5, layout))
            about.append(f"{list(shape)} {layout}")
    return Block(
        spec=format_spec(forms),
        x=x,
        tensors=tensors,
        forms=forms,
        rows=rows,
        about=f"{dtype}: x {', '.join(about)}",
    )
