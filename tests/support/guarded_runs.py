"""Runs the ways of a GPU in Triton's interpreter, with all memory between guard pages.

    python -m tests.support.guarded_runs WAY         # must end with exit code 0
    python -m tests.support.guarded_runs overruns    # how each made overrun ends

Each case is printed before it runs, so that the last line of a crash names it.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import argparse
import itertools
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import torch
import triton
import triton.language as tl
from tests.support.guard_pages import End, Guarded, guarded
from tests.support.helpers import random_tensors
from tests.support.interpreted_gpu import standing_in

from torchweld.core.blocks import format_spec, parse_spec
from torchweld.ops.gpu import triton_launches
from torchweld.ops.gpu.gpu_ways import WAYS
from torchweld.ops.gpu.kernel_tiles import Tile
from torchweld.ops.gpu.tile_tuning import forcing

TILE = Tile(rows=16, columns=16, depth=16)
SPECS = (
    "gelu/b;identity/b",
    "silu/b/first;identity",
    "relu/second;identity/b",
    "tanh/b/interleaved;silu/b",
    "mish/separate/t;identity/t",
    "gelu",
)
SIZES = ((1, (1, 1, 1)), (17, (5, 19, 3)), (3, (33, 16, 17)), (16, (16, 31, 16)))


def run(
    way: str, spec: str, rows: int, sizes: tuple[int, ...], dtype: torch.dtype, end: End,
    *, odd: bool = False,
) -> None:  # fmt: skip
    """Forward and backward; all gradients, then one. `odd`: strides, and hidden values again."""
    forms = parse_spec(spec)
    widths = sizes[: len(forms) + 1]
    x = torch.randn(rows, widths[0]).to(dtype)
    tensors = random_tensors(widths, forms, dtype)
    if odd:
        x = torch.randn(widths[0], rows).to(dtype).t()
        tensors = [t.t().contiguous().t() if t.dim() == 2 else t for t in tensors]
    leaves = [guarded(t, end).requires_grad_() for t in (x, *tensors)]
    with Guarded(end) as guards, forcing(TILE):
        torch.ops.torchweld.chain_way(leaves[0].detach(), [t.detach() for t in leaves[1:]],
                                      format_spec(forms), way)  # fmt: skip
        y = torch.ops.torchweld.chain_way(leaves[0], leaves[1:], format_spec(forms), way, odd)
        grad = guarded(torch.randn(y.shape[::-1]).to(dtype).t(), end)  # neither contiguous
        for wanted in (leaves, leaves[1:2]):
            torch.autograd.grad(y, wanted, grad, retain_graph=True)
    assert guards.count > 3
    steps = itertools.product((way, "check"), ("saving", "backward"))
    assert set(guards.ours) == {f"torchweld::{one}_{step}" for one, step in steps}


def cases(way: str) -> Iterator[tuple[str, Callable[..., None]]]:
    """Every gate and layout over every size; types, strides and recompute take turns."""
    for i, (spec, (rows, sizes)) in enumerate(itertools.product(SPECS, SIZES)):
        dtype = (torch.float32, torch.bfloat16)[i % 2]
        yield (
            f"{way} {spec} {rows} rows {sizes} {dtype}",
            partial(run, way, spec, rows, sizes, dtype, odd=i % 3 == 0),
        )


# ---- overruns made on purpose ----


@triton.jit
def copy_from(x: Any, y: Any, first: Any, SIZE: tl.constexpr) -> None:
    i = first + tl.arange(0, SIZE)
    tl.store(y + i, tl.load(x + i))


def _copies(first: int, end: End) -> None:
    x, y = guarded(torch.randn(16), end), guarded(torch.empty(16), end)
    copy_from[(1,)](x, y, first, SIZE=16)


def _one_more(kernel: str, argument: str, end: End = "last") -> None:
    """Runs a case in which a kernel is told of one row or column too many."""
    launch = triton_launches.launch

    def wrong(jitted: Any, grid: Any, tile: Any, near: Any, *given: Any, **by: Any) -> None:
        if jitted.__name__ == kernel:
            at = jitted.arg_names.index(argument) if argument in jitted.arg_names else -1
            if argument == "SIZES":
                by["SIZES"] = (*by["SIZES"][:-1], by["SIZES"][-1] + 1)
            else:
                given = (*given[:at], given[at] + 1, *given[at + 1 :])
        launch(jitted, grid, tile, near, *given, **by)

    triton_launches.launch = wrong  # type: ignore[assignment]
    if kernel == "torchweld_dropout_mask":
        with Guarded(end):
            triton_launches.dropout_mask(torch.empty(3, 1), 9, 0.5)
        return
    way = next(name for name, own in KERNELS.items() if kernel in own)
    run(way, "silu/b/separate;identity/b", 3, (5, 7, 3), torch.float32, end)


KERNELS = {
    "pointwise": ("torchweld_pointwise", "torchweld_pointwise_backward"),
    "epilogue": ("torchweld_linear", "torchweld_linear_backward"),
    "narrow": ("torchweld_narrow",),
    "": ("torchweld_dropout_mask",),
}
OVERRUNS: tuple[tuple[str, Callable[[], None]], ...] = (
    ("a copy of one before", partial(_copies, -1, "first")),
    ("a copy of one after", partial(_copies, 1, "last")),
    *(
        (f"{kernel} {argument}", partial(_one_more, kernel, argument))
        for kernel, arguments in (
            ("torchweld_pointwise", "MN"),
            ("torchweld_pointwise_backward", "MN"),
            ("torchweld_linear", "MNK"),
            ("torchweld_linear_backward", "MNJ"),
            ("torchweld_narrow", ("M", "SIZES")),
            ("torchweld_dropout_mask", ("M", "BYTES")),
        )
        for argument in arguments
    ),
)
HARMLESS: tuple[tuple[str, Callable[[], None]], ...] = (
    ("a copy in place", partial(_copies, 0, "last")),
    ("a copy in place", partial(_copies, 0, "first")),
)


def ends_by(case: Callable[[], None]) -> str:
    """How a process of its own ends that runs it: a signal's name, or an exit code."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            case()
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return str(os.WEXITSTATUS(status))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=(*WAYS, "overruns"))
    way = parser.parse_args().way
    torch.set_num_threads(1)
    with standing_in():
        if way == "overruns":
            for name, case in (*HARMLESS, *OVERRUNS):
                print(f"{name}: {ends_by(case)}", flush=True)
            return
        for end, (name, check) in itertools.product(get_args(End), list(cases(way))):
            print(f"{name}, {end} bytes", flush=True)
            check(end=end)
    print("no overrun")


if __name__ == "__main__":
    main()
