"""What `scripts.gpu_kernels` compiles: kernels, tiles, and forms by switches and strides."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchweld.core.activations import ACTIVATIONS
from torchweld.ops.gpu import kernel_tiles, triton_narrow, triton_pointwise, triton_products
from torchweld.ops.gpu.kernel_tiles import Tile

SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class KernelCase:
    """One kernel with one tile: what to compile. `types` and `constants` are by argument."""

    name: str
    kernel: Any
    tile: Tile
    types: dict[str, Any]
    constants: dict[str, Any]
    products: bool = False  # of 16 bits
    aligned: bool = True  # 16 divides sizes, strides and addresses


# Strides that are 1 in contiguous tensors. Triton compiles them as constants, and knows of other
# sizes, strides and pointers that 16 divides them, if it does.
_ONES = (
    *("x_k", "gate_k", "up_k", "g_j", "w_n", "w2_n", "grad_n", "d_n"),
    *("gate_bias_n", "up_bias_n"),
)
_FLOATS = {"scale": "fp32", "p0": "fp32", "p1": "fp32", "p": "fp32"}


def _case(
    name: str,
    kernel: Any,
    tile: Tile,
    dtype: str,
    constants: dict[str, Any],
    products: bool = False,
    *,
    ones: Sequence[str] | None = None,
    aligned: bool = True,
) -> KernelCase:
    """Pointers by their names, sizes and strides as int32, the rest as constants.

    ones: strides that are 1; by default those that are in contiguous tensors
    """
    types: dict[str, Any] = {}
    pointwise = kernel is triton_pointwise.torchweld_pointwise
    if ones is None:
        ones = (*_ONES, "gate_n", "up_n") if pointwise else _ONES
    constants = constants | {name: 1 for name in ones if name in kernel.arg_names}
    pointers = {"mask": "*u8", "seed": "*i64", "gate_sums": "*fp32", "up_sums": "*fp32"}
    integers = re.compile(r"^(M|N|K|J|BYTES|.*_[mnkj])$")
    for argument in kernel.arg_names:
        if argument in constants:
            continue
        if argument in _FLOATS:
            types[argument] = _FLOATS[argument]
        elif integers.match(argument):
            types[argument] = "i32"
        else:
            types[argument] = pointers.get(argument, f"*{dtype}")
    return KernelCase(name, kernel, tile, types, constants, products, aligned)


def _pointwise_cases(activation: str, dtype: str = "bf16") -> Iterator[KernelCase]:
    common = {"ACT": activation, "DROPS": False}
    for gated in (False, True):
        name, tile = ("gated " if gated else "") + activation, kernel_tiles.POINTWISE
        sizes = {"BM": tile.rows, "BN": tile.columns}
        yield _case(
            f"pointwise {name} {dtype}", triton_pointwise.torchweld_pointwise, tile, dtype,
            {**common, "GATED": gated, "HAS_BIAS": True, **sizes},
        )  # fmt: skip
        tile = kernel_tiles.POINTWISE_BACKWARD
        sizes = {"BM": tile.rows, "BN": tile.columns}
        yield _case(
            f"pointwise backward {name} {dtype}", triton_pointwise.torchweld_pointwise_backward,
            tile, dtype, {**common, "GATED": gated, "HIDDEN": True, "SUMS": True, **sizes},
        )  # fmt: skip


def _product_cases(dtype: torch.dtype, precision: str) -> Iterator[KernelCase]:
    short = SHORT[dtype]
    wide = "" if short != "fp32" else f" {precision}"
    kernels = {
        "linear": (triton_products.torchweld_linear, {"HAS_BIAS": True, "SAVES": False}),
        "linear_backward": (
            triton_products.torchweld_linear_backward,
            {"HIDDEN": True, "SUMS": True, "PAIRS": 1},
        ),
    }
    for (name, (kernel, own)), gated in itertools.product(kernels.items(), (False, True)):
        form = "gated silu" if gated else "gelu"
        for tile in kernel_tiles.candidates(name, gated, dtype):
            constants = {
                "ACT": form.split()[-1], "GATED": gated, "DROPS": False, "PRECISION": precision,
                "BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "GROUP": tile.group,
            }  # fmt: skip
            shown = f"{name} {form} {short}{wide} {tile.rows}x{tile.columns}x{tile.depth}"
            yield _case(shown, kernel, tile, short, constants | own, short != "fp32")


def form_cases() -> Iterator[KernelCase]:
    """What training, dropout, gates above, transposed and odd tensors make of the kernels."""
    any_strides: dict[str, Any] = {"ones": (), "aligned": False}
    kernels: tuple[tuple[str, Any, dict[str, Any]], ...] = (
        ("linear", triton_products.torchweld_linear, {"HAS_BIAS": True, "SAVES": False}),
        (
            "linear_backward", triton_products.torchweld_linear_backward,
            {"HIDDEN": True, "SUMS": True, "PAIRS": 1},
        ),
    )  # fmt: skip
    turned = {
        "linear": ("x_k", "gate_n", "up_n", "gate_bias_n", "up_bias_n"),
        "linear_backward": ("g_j", "w_j", "w2_j", "grad_n"),
    }
    switches: dict[str, dict[str, dict[str, Any]]] = {
        "linear": {"saves": {"SAVES": True}, "saves drops": {"SAVES": True, "DROPS": True}},
        "linear_backward": {"pairs": {"PAIRS": 2}, "pairs drops": {"PAIRS": 2, "DROPS": True}},
    }
    for (name, kernel, own), gated in itertools.product(kernels, (False, True)):
        act = "silu" if gated else "gelu"
        for dtype, precision in ((torch.bfloat16, "ieee"), (torch.float32, "tf32")):
            short = SHORT[dtype]
            # The tallest tile has the most sums per thread, and so the least room.
            tile = kernel_tiles.candidates(name, gated, dtype)[0]
            constants = {
                "ACT": act, "GATED": gated, "DROPS": False, "PRECISION": precision,
                "BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "GROUP": tile.group, **own,
            }  # fmt: skip
            both: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
                (form, changed, {}) for form, changed in switches[name].items()
            ]
            both += [("transposed", {}, {"ones": turned[name]}), ("any strides", {}, any_strides)]
            for form, changed, strides in both:
                shown = f"{name} {form} {'gated ' if gated else ''}{act} {short}"
                yield _case(
                    shown, kernel, tile, short, constants | changed, short != "fp32", **strides
                )
    for gated in (False, True):
        for form, drops, strides in (("drops", True, {}), ("any strides", False, any_strides)):
            name = f"{form} {'gated ' if gated else ''}gelu bf16"
            common = {"ACT": "gelu", "GATED": gated, "DROPS": drops}
            tile = kernel_tiles.POINTWISE
            yield _case(
                f"pointwise {name}", triton_pointwise.torchweld_pointwise, tile, "bf16",
                {**common, "HAS_BIAS": True, "BM": tile.rows, "BN": tile.columns}, **strides,
            )  # fmt: skip
            tile = kernel_tiles.POINTWISE_BACKWARD
            sizes = {"BM": tile.rows, "BN": tile.columns}
            yield _case(
                f"pointwise backward {name}", triton_pointwise.torchweld_pointwise_backward, tile,
                "bf16", {**common, "HIDDEN": True, "SUMS": True, **sizes}, **strides,
            )  # fmt: skip
    widths = (64, 256, 64)
    for gated, saved in ((False, True), (True, False), (True, True)):
        yield _narrow_case(torch.bfloat16, widths, 16, gated=gated, saved=saved)
    yield _narrow_case(torch.float16, widths, 16, gated=True, saved=True)
    yield _narrow_case(torch.float32, widths, 16, "tf32")
    yield _narrow_case(torch.float32, widths, 16, "tf32", gated=True, saved=True)
    yield _narrow_case(torch.bfloat16, widths, 16, gated=True, saved=True, strided=True)


def _narrow_case(
    dtype: torch.dtype,
    widths: tuple[int, ...],
    rows: int,
    precision: str = "ieee",
    *,
    gated: bool = False,
    saved: bool = False,
    strided: bool = False,
) -> KernelCase:
    """`gated`: all layers but the last. `saved`: the same ones. `strided`: any strides."""
    short, layers = SHORT[dtype], len(widths) - 1
    tile = Tile(rows=rows, columns=0, warps=8, stages=2)
    chunks = tuple(
        kernel_tiles.narrow_chunk(K, N, dtype.itemsize) for K, N in itertools.pairwise(widths)
    )
    each = (f"*{short}",) * layers
    types: dict[str, Any] = {"x": f"*{short}", "y": f"*{short}", "M": "i32"}
    types |= dict.fromkeys(("gates", "ups", "gate_biases", "up_biases", "zs", "vs"), each)
    one = ("i32",) * 6 if strided else ("constexpr", "i32") * 2 + ("constexpr",) * 2
    types |= {"x_m": "i32", "strides": (one,) * layers}
    constants = {
        "SIZES": widths, "PADDED": widths, "CHUNKS": chunks, "LAYERS": layers,
        "ACTS": ("gelu",) * (layers - 1) + ("identity",), "P0": (0.0,) * layers,
        "P1": (0.0,) * layers, "GATED": (gated,) * (layers - 1) + (False,),
        "BIASED": (True,) * layers, "SAVED": (saved,) * (layers - 1) + (False,),
        "PRECISION": precision, "BM": rows,
    }  # fmt: skip
    if strided:
        types["x_k"] = "i32"
    else:
        constants["x_k"] = 1
    flags = {"gated": gated, "saved": saved, "any strides": strided, precision: precision == "tf32"}
    words = [*(word for word, on in flags.items() if on), "-".join(map(str, widths)), short]
    return KernelCase(
        f"narrow {' '.join(words)} {rows} rows", triton_narrow.torchweld_narrow, tile, types,
        constants, short != "fp32", aligned=not strided,
    )  # fmt: skip


def tile_cases() -> list[KernelCase]:
    """Each kernel with each tile and one activation."""
    cases = list(_pointwise_cases("gelu"))
    for dtype, precision in (
        (torch.bfloat16, "ieee"), (torch.float16, "ieee"),
        (torch.float32, "ieee"), (torch.float32, "tf32"),
    ):  # fmt: skip
        cases += _product_cases(dtype, precision)
    for rows in kernel_tiles.NARROW_ROWS:
        cases.append(_narrow_case(torch.bfloat16, (64, 256, 64), rows))
    cases.append(_narrow_case(torch.bfloat16, (256, 256, 256, 256), 16))
    cases.append(_narrow_case(torch.float32, (64, 256, 64), 16))
    cases.append(_narrow_case(torch.float32, (256, 256, 256), 16))
    tile = kernel_tiles.DROPOUT
    cases.append(
        _case("dropout mask", triton_pointwise.torchweld_dropout_mask, tile, "fp32",
              {"BM": tile.rows, "BN": tile.columns})
    )  # fmt: skip
    return cases


def activation_cases() -> list[KernelCase]:
    """Each activation once, in the pointwise kernels: they have both formulas."""
    return [case for name in ACTIVATIONS for case in _pointwise_cases(name, "fp32")]


def all_cases() -> dict[str, KernelCase]:
    cases = [*tile_cases(), *activation_cases(), *form_cases()]
    found = {case.name: case for case in cases}
    assert len(found) == len(cases), "two cases have one name"
    return found
