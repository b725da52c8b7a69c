"""Tile sizes of the Triton kernels: a short list for each, and which of them to take.

Without tuning, `stated` takes one by the shape. The reasons:

- A tile has at least 16 rows, the least that tensor cores take. Few rows get small tiles, so that
  little of a tile is padding; then the weights bound the time, and wide tiles read them once.
- Tiles of 128 x 128 hold 64 sums per thread with 8 warps, the most that compiles without spills. A
  gated product has two sums per value, so its tiles have half the columns. An epilogue with
  gradients reads and writes more per value: half as many again.
- A 16-bit product has 64 steps in flight per stage; fp32 takes twice the bytes, and half the depth.

None of this was measured on a GPU. `tile_tuning.py` measures it on yours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Tile:
    """rows x columns of the result, `depth` steps of the sum at a time."""

    rows: int
    columns: int
    depth: int = 32
    warps: int = 4
    stages: int = 3
    group: int = 8  # row tiles that share columns in the L2 cache

    @property
    def launch(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


POINTWISE = Tile(rows=4, columns=512, warps=4, stages=1)
# Its partial sums are one row per tile: tall tiles keep them few.
POINTWISE_BACKWARD = Tile(rows=32, columns=128, warps=8, stages=1)
DROPOUT = Tile(rows=4, columns=128, warps=4, stages=1)

# By kernel, gated or not, and bytes per value; tall tiles first.
PRODUCTS: dict[tuple[str, bool, int], tuple[Tile, ...]] = {
    ("linear", False, 2): (
        Tile(rows=128, columns=128, depth=64, warps=8),
        Tile(rows=128, columns=64, depth=64),
        Tile(rows=64, columns=128, depth=64),
        Tile(rows=64, columns=64, depth=64, stages=4),
        Tile(rows=32, columns=64, depth=64, stages=4),
        Tile(rows=16, columns=64, depth=128, stages=4),
    ),
    ("linear", True, 2): (
        Tile(rows=128, columns=64, depth=64, warps=8),
        Tile(rows=64, columns=64, depth=64),
        Tile(rows=32, columns=64, depth=64),
        Tile(rows=16, columns=64, depth=64, stages=4),
    ),
    ("linear", False, 4): (
        Tile(rows=128, columns=64, warps=8),
        Tile(rows=64, columns=64),
        Tile(rows=32, columns=64),
        Tile(rows=16, columns=64, depth=64),
    ),
    ("linear", True, 4): (
        Tile(rows=64, columns=64, warps=8),
        Tile(rows=32, columns=64),
        Tile(rows=16, columns=64),
    ),
    ("linear_backward", False, 2): (
        Tile(rows=128, columns=64, depth=64, warps=8),
        Tile(rows=64, columns=128, depth=64, warps=8),
        Tile(rows=64, columns=64, depth=64, stages=4),
        Tile(rows=32, columns=64, depth=64, stages=4),
        Tile(rows=16, columns=64, depth=128, stages=4),
    ),
    ("linear_backward", True, 2): (
        Tile(rows=64, columns=64, depth=64, warps=8),
        Tile(rows=32, columns=64, depth=64),
        Tile(rows=16, columns=64, depth=64, stages=4),
    ),
    ("linear_backward", False, 4): (
        Tile(rows=64, columns=64, warps=8),
        Tile(rows=32, columns=64),
        Tile(rows=16, columns=64, depth=64),
    ),
    ("linear_backward", True, 4): (
        Tile(rows=64, columns=64, warps=8),
        Tile(rows=32, columns=64),
        Tile(rows=16, columns=64),
    ),
}
NARROW_ROWS = (32, 16)
# The bytes of a layer's weights that a narrow kernel multiplies by at a time. They pass through
# registers; with 32 KB and more, compiled kernels spill.
NARROW_WEIGHT_BYTES = 16 << 10


def candidates(kernel: str, gated: bool, dtype: torch.dtype) -> tuple[Tile, ...]:
    """The tiles that are tried for a product."""
    return PRODUCTS[kernel, gated, dtype.itemsize]


def stated(kernel: str, gated: bool, dtype: torch.dtype, rows: int) -> Tile:
    """The tallest tile of which these rows fill more than a half; without tuning, this one."""
    found = candidates(kernel, gated, dtype)
    return next((tile for tile in found if rows * 2 > tile.rows), found[-1])


def narrow_tile(rows: int) -> Tile:
    """Rows of a narrow kernel: fewer if that makes more programs."""
    tall = next((r for r in NARROW_ROWS if rows >= 64 * r), NARROW_ROWS[-1])
    return Tile(rows=tall, columns=0, warps=8, stages=2)


def narrow_chunk(K: int, N: int, element_size: int) -> int:
    """How many columns of a `[K, N]` layer a narrow kernel computes at a time; sizes are padded."""
    chunk = N
    while chunk > 16 and K * chunk * element_size > NARROW_WEIGHT_BYTES:
        chunk //= 2
    return chunk
