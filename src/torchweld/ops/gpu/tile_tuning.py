"""Which tile a product takes: measured on the user's GPU, or stated.

A product that is new is timed once with every candidate, and the fastest is kept on disk, by a
fingerprint of device, driver, Triton, torch and the kernels' source. Nothing is timed

- with TORCHWELD_GPU_TUNING=0, or inside `tuning(False)`,
- under `torch.use_deterministic_algorithms(True)`: another tile adds in another order,
- in Triton's interpreter.

Then `kernel_tiles.stated` decides, by the shape alone. While a CUDA graph is captured nothing is
timed either, since that waits for the device; but a tile that is known by then is taken: the call
before the capture has compiled it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch
from torch import Tensor

from torchweld.core.files import cache_dir, write_whole
from torchweld.machine.gpu_identity import set_up_of
from torchweld.ops.gpu import kernel_tiles
from torchweld.ops.gpu.gpu_launches import on_device_of
from torchweld.ops.gpu.kernel_tiles import Tile

OFF_SWITCH = "TORCHWELD_GPU_TUNING"
WARM_UPS, RUNS = 2, 5

_tuning: ContextVar[bool] = ContextVar("tuning", default=True)
_forced: ContextVar[Tile | None] = ContextVar("forced", default=None)


@contextmanager
def tuning(on: bool) -> Iterator[None]:
    """Whether products that are new are timed, inside the `with`."""
    before = _tuning.set(on)
    try:
        yield
    finally:
        _tuning.reset(before)


@contextmanager
def forcing(tile: Tile) -> Iterator[None]:
    """Every product takes this tile, inside the `with`."""
    before = _forced.set(tile)
    try:
        yield
    finally:
        _forced.reset(before)


def forced() -> Tile | None:
    return _forced.get()


def tunes(near: Tensor) -> bool:
    """Whether measured tiles are wanted, for products on the device of this tensor."""
    return (
        near.is_cuda
        and _tuning.get()
        and os.environ.get(OFF_SWITCH) != "0"
        and not torch.are_deterministic_algorithms_enabled()
    )


def captures(near: Tensor) -> bool:
    """Whether the current stream of this tensor's device is being captured into a graph."""
    with on_device_of(near):
        return torch.cuda.is_current_stream_capturing()


def run_best(
    kernel: str,
    gated: bool,
    near: Tensor,
    rows: int,
    about: tuple[object, ...],
    run: Callable[[Tile], None],
) -> None:
    """Runs a product with the best tile known; first times the candidates, if it may.

    about: what its speed depends on, apart from the rest that is given
    """
    only = forced()
    if only is not None:
        return run(only)
    if not tunes(near):
        return run(kernel_tiles.stated(kernel, gated, near.dtype, rows))
    kept = _kept(near.device)
    key = repr((kernel, gated, str(near.dtype), _size_class(rows), *about))
    tile = kept.get(key)
    if tile is None:
        if captures(near):
            return run(kernel_tiles.stated(kernel, gated, near.dtype, rows))
        found = kernel_tiles.candidates(kernel, gated, near.dtype)
        seconds = {tile: device_seconds(functools.partial(run, tile), near) for tile in found}
        tile = min(seconds, key=seconds.__getitem__)
        kept[key] = tile
        keep(near.device)
    return run(tile)


def _size_class(rows: int) -> int:
    """Rows up to the next power of two are tuned together."""
    return 1 << max(rows - 1, 0).bit_length()


def device_seconds(run: Callable[[], None], near: Tensor) -> float:
    """The least of some runs, by the device's own clock; a kernel that cannot run takes forever."""
    try:
        for _ in range(WARM_UPS):
            run()
    except Exception as error:
        if "out of resource" not in str(error):
            raise
        return float("inf")
    stream = torch.cuda.current_stream(near.device)
    best = float("inf")
    for _ in range(RUNS):
        begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begun.record(stream)
        run()
        ended.record(stream)
        ended.synchronize()
        best = min(best, begun.elapsed_time(ended) / 1e3)
    return best


# ---- on disk ----


@functools.cache
def fingerprint(device: torch.device) -> str:
    """Changes with everything that a tile's speed depends on."""
    sources = [*sorted(Path(__file__).parent.glob("triton_*.py")), Path(kernel_tiles.__file__)]
    parts = (
        set_up_of(device),
        torch.__version__,
        *(hashlib.sha256(source.read_bytes()).hexdigest() for source in sources),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _file(device: torch.device) -> Path:
    return cache_dir() / f"tiles-{fingerprint(device)}.json"


@functools.cache
def _kept(device: torch.device) -> dict[str, Tile]:
    """A file that cannot be read counts as empty: everything in it can be measured again."""
    try:
        plain = json.loads(_file(device).read_text())
        return {key: Tile(**tile) for key, tile in plain.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def keep(device: torch.device) -> None:
    """A machine without a place for it measures again next time."""
    plain = {key: vars(tile) for key, tile in _kept(device).items()}
    try:
        _file(device).parent.mkdir(parents=True, exist_ok=True)
        write_whole(_file(device), json.dumps(plain, indent=1))
    except OSError:
        pass
