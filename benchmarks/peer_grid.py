"""What is measured: blocks, row counts, dtypes, hot and cold, and who takes part in which cell."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torchweld.bench.cases import MlpShape

ROWS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 512)
NARROW_ROWS = 4096
DTYPES = ("float32", "bfloat16", "float16")
PEERS = ("eager", "mkldnn", "compile", "compile-max", "onnxruntime", "openvino", "torchweld")
# Always there: what all is measured against, and what is measured.
FIXED = ("eager", "torchweld")
COMPILE_ROWS = (1, 8, 64, 512)
# ONNX Runtime and OpenVINO have no 16-bit MLP of use on a CPU; torch.compile is measured in fp32.
SIXTEEN_BIT_PEERS = ("eager", "mkldnn", "torchweld")
NARROW_WIDTH = 256


BLOCKS = (
    MlpShape(sizes=(64, 256, 64), activation="gelu"),
    MlpShape(sizes=(128, 128, 128, 10), activation="relu"),
    MlpShape(sizes=(256, 1024, 256), activation="gelu"),
    MlpShape(sizes=(768, 3072, 768), activation="gelu"),
    MlpShape(sizes=(1024, 2816, 1024), activation="silu", gated=True, bias=False),
    MlpShape(sizes=(2048, 5632, 2048), activation="silu", gated=True, bias=False),
)


@dataclass(frozen=True, kw_only=True)
class Spot:
    """One place of the grid: a block at a number of rows, in one dtype, hot or cold."""

    block: MlpShape
    rows: int
    dtype: str
    cold: bool

    @property
    def temperature(self) -> str:
        return "cold" if self.cold else "hot"

    def __str__(self) -> str:
        return f"{self.dtype} {self.temperature} {self.rows} × {self.block.name}"


def narrow(block: MlpShape) -> bool:
    """Small enough to be called with thousands of rows: RL, tabular and neural-field nets."""
    return max(block.sizes) <= NARROW_WIDTH


def block_named(name: str) -> MlpShape:
    """A block by its name, or by the sizes alone: `768-3072-768` or `768→3072→768`."""
    wanted = name.replace("-gated", "_gated").replace("-", "→").replace("_gated", "-gated")
    for block in BLOCKS:
        if wanted in (block.name, block.name.split()[0]):
            return block
    known = ", ".join("-".join(str(size) for size in block.sizes) for block in BLOCKS)
    raise ValueError(f"there is no block {name!r}; there are: {known}")


def grid(
    blocks: Sequence[MlpShape],
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
            own = (*ROWS, NARROW_ROWS) if narrow(block) else ROWS
            for count in own if rows is None else rows:
                for cold in cold_values:
                    yield Spot(block=block, rows=count, dtype=dtype, cold=cold)


def takes_part(peer: str, spot: Spot) -> bool:
    """Whether a peer is measured at a spot at all."""
    if spot.dtype != "float32":
        return peer in SIXTEEN_BIT_PEERS
    return not peer.startswith("compile") or spot.rows in COMPILE_ROWS
