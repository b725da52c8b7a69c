"""What is measured: blocks, row counts, dtypes, hot and cold, and who takes part in which cell.

A `Block` makes its own weights and inputs from a seed, as float32 arrays, so that every process has
the same ones without passing them around; 16-bit cells round them. M rows, K in, N out.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

ROWS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 512)
NARROW_ROWS = 4096
DTYPES = ("float32", "bfloat16", "float16")
PEERS = ("eager", "mkldnn", "compile", "compile-max", "onnxruntime", "openvino", "torchweld")
# Always there: what all is measured against, and what is measured.
FIXED = ("eager", "torchweld")
COMPILE_ROWS = (1, 8, 64, 512)
# ONNX Runtime and OpenVINO have no 16-bit MLP of use on a CPU; torch.compile is measured in fp32.
SIXTEEN_BIT_PEERS = ("eager", "mkldnn", "torchweld")
SEED = 2024


@dataclass(frozen=True, kw_only=True)
class Linear:
    """One product of a block: weight_NK as nn.Linear keeps it, and its bias or None."""

    weight: Array
    bias: Array | None


@dataclass(frozen=True, kw_only=True)
class Block:
    """`sizes[0] → … → sizes[-1]` with `activation` between; gated is `activation(gate) · up`."""

    sizes: tuple[int, ...]
    activation: str
    gated: bool = False
    bias: bool = True

    @property
    def name(self) -> str:
        arrows = "→".join(str(size) for size in self.sizes)
        return f"{arrows} {self.activation}{'-gated' if self.gated else ''}"

    @property
    def narrow(self) -> bool:
        """Small enough to be called with thousands of rows: RL, tabular and neural-field nets."""
        return max(self.sizes) <= 256

    @property
    def products(self) -> list[tuple[int, int]]:
        """(K, N) of every Linear, the gate's before up's."""
        pairs = list(zip(self.sizes, self.sizes[1:], strict=False))
        return [pairs[0], *pairs] if self.gated else pairs

    def flops(self, rows: int) -> int:
        """Multiply-adds of the products, two operations each."""
        return 2 * rows * sum(k * n for k, n in self.products)

    def weight_bytes(self, dtype: str) -> int:
        return sum(k * n for k, n in self.products) * (4 if dtype == "float32" else 2)

    def linears(self) -> list[Linear]:
        """Weights and biases as nn.Linear would draw them: uniform within 1 / sqrt(K)."""
        rng = np.random.default_rng(SEED)

        def uniform(shape: tuple[int, ...], bound: float) -> Array:
            values = rng.random(shape, dtype=np.float32)
            values *= 2.0 * bound
            values -= bound
            return values

        return [
            Linear(
                weight=uniform((n, k), 1.0 / math.sqrt(k)),
                bias=uniform((n,), 1.0 / math.sqrt(k)) if self.bias else None,
            )
            for k, n in self.products
        ]

    def inputs(self, rows: int) -> Array:
        """Normal inputs; fewer rows are the first of more."""
        rng = np.random.default_rng(SEED + 1)
        return rng.standard_normal((rows, self.sizes[0]), dtype=np.float32)


BLOCKS = (
    Block(sizes=(64, 256, 64), activation="gelu"),
    Block(sizes=(128, 128, 128, 10), activation="relu"),
    Block(sizes=(256, 1024, 256), activation="gelu"),
    Block(sizes=(768, 3072, 768), activation="gelu"),
    Block(sizes=(1024, 2816, 1024), activation="silu", gated=True, bias=False),
    Block(sizes=(2048, 5632, 2048), activation="silu", gated=True, bias=False),
)


@dataclass(frozen=True, kw_only=True)
class Spot:
    """One place of the grid: a block at a number of rows, in one dtype, hot or cold."""

    block: Block
    rows: int
    dtype: str
    cold: bool

    @property
    def temperature(self) -> str:
        return "cold" if self.cold else "hot"

    def __str__(self) -> str:
        return f"{self.dtype} {self.temperature} {self.rows} × {self.block.name}"


def block_named(name: str) -> Block:
    """A block by its name, or by the sizes alone: `768-3072-768` or `768→3072→768`."""
    wanted = name.replace("-gated", "_gated").replace("-", "→").replace("_gated", "-gated")
    for block in BLOCKS:
        if wanted in (block.name, block.name.split()[0]):
            return block
    known = ", ".join("-".join(str(size) for size in block.sizes) for block in BLOCKS)
    raise ValueError(f"there is no block {name!r}; there are: {known}")


def grid(
    blocks: Sequence[Block],
    rows: Sequence[int] | None,
    dtypes: Sequence[str],
    temperatures: Iterable[bool],
) -> Iterator[Spot]:
    """Every spot, so ordered that what was loaded is used up before the next is.

    `rows` None is all; `temperatures` has False for hot and True for cold.
    """
    cold_values = tuple(temperatures)
    for dtype in dtypes:
        for block in blocks:
            own = (*ROWS, NARROW_ROWS) if block.narrow else ROWS
            for count in own if rows is None else rows:
                for cold in cold_values:
                    yield Spot(block=block, rows=count, dtype=dtype, cold=cold)


def takes_part(peer: str, spot: Spot) -> bool:
    """Whether a peer is measured at a spot at all."""
    if spot.dtype != "float32":
        return peer in SIXTEEN_BIT_PEERS
    return not peer.startswith("compile") or spot.rows in COMPILE_ROWS
