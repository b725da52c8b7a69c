"""Who takes part in a bench: names in, a `Bench` without cells out, with reasons for the others.

Everything that can be refused is refused here, before anything is measured.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata

import torch

from torchweld.bench.bench_cases import Case
from torchweld.bench.bench_grid import parse_dtype
from torchweld.bench.bench_presets import PRESETS
from torchweld.bench.bench_results import Bench
from torchweld.bench.eager_block import BlockSource
from torchweld.bench.runtimes.runtime_names import (
    BLOCK_PEERS,
    GPU_PEERS,
    MODEL_PEERS,
    OWN_MODEL,
    RUNTIMES,
    TRAINING_RUNTIMES,
)
from torchweld.bench.runtimes.torch_runtimes import form_of
from torchweld.bench.training_participants import (
    is_training,
    native_bf16,
    trained_backends,
    untrained,
)
from torchweld.core.errors import NotMeasuredError, TorchweldError
from torchweld.core.typed_names import known
from torchweld.machine import hardware, kernel_build, measured_peaks
from torchweld.machine.gpu_identity import gpu_here
from torchweld.ops.backends import BACKENDS, Form, backend_named, select, torch_backend
from torchweld.ops.backends.backend import mode_of

CPU = torch.device("cpu")
NO_TRAINING = (
    "bench measures calls without gradients on a GPU; torchweld fuse --training --device cuda "
    "measures a model in training there"
)
EAGER_ALONE = "whole models are trained in eager and welded, and by nobody else"

# numpy takes no larger seeds.
LEAST_BAD_SEED = 2**32
# Each caller is a thread with its own team of threads.
MOST_CALLERS = 1000


def split_name(text: str) -> tuple[str, str | None]:
    """`"torch:mkldnn"` as a backend and its mode; `"torch"` as the backend and None."""
    name, _, mode = text.partition(":")
    return name, mode or None


def absent(
    peers: Sequence[str], whole_model: bool = False, device: torch.device = CPU
) -> dict[str, str]:
    """Who cannot take part on this machine or this device, and how to change that."""
    made = {name: RUNTIMES[name]() for name in peers}
    found = {n: one.not_on(device.type) or one.absent(whole_model) for n, one in made.items()}
    return {name: why for name, why in found.items() if why}


def why_not(bench: Bench, name: str, case: Case) -> str:
    """Why a side of a bench does not take part in one of its cases; "" if it does."""
    preset = PRESETS.get(bench.preset)
    why = preset.why_not(name, case) if preset else ""
    if case.training is not None:
        return why or TRAINING_RUNTIMES[name]().why_not(case.dtype, training=True)
    runtime = RUNTIMES[name]()
    return why or runtime.why_not(case.dtype) or runtime.why_not_block(case.mlp)


def machine_peaks(
    dtypes: Sequence[str] = ("float32",),
) -> tuple[measured_peaks.Peaks | None, tuple[str, ...]]:
    """The peaks of this machine, measured if necessary, and notes about that.

    Kept ones that a probe of these dtypes, or of memory, exceeds are not used: every share of them
    would be too high.
    """
    kept = measured_peaks.peaks()
    if kept is not None and measured_peaks.holds(kept, dtypes) and _reads_hold(kept):
        return kept, ()
    why = "there were none" if kept is None else "those kept from before were exceeded"
    try:
        return measured_peaks.peaks(measure=True), (
            f"this machine's peaks were measured before the cells, since {why}; they are kept",
        )
    except NotMeasuredError as error:
        said = "" if kept is None else f"{why}, and could not be measured anew: "
        return None, (f"no share of this machine's peak is shown: {said}{error}",)


def _reads_hold(kept: measured_peaks.Peaks) -> bool:
    """Whether the kept peaks for reads from memory still hold; like `measured_peaks.holds`."""
    compiled, threads = kernel_build.compiled_part(), torch.get_num_threads()
    largest = max(kept.read, key=lambda row: row.working_set_bytes, default=None)
    if compiled is None or largest is None:
        return True
    size = largest.working_set_bytes
    peak = kept.read_gbps(size, threads)
    found = float(compiled.probe_read(size, threads, measured_peaks.PROBE_SECONDS))
    return peak is None or found < measured_peaks.TOLERATED_EXCESS * peak


def _full_name(text: str) -> str:
    """A backend's name with its mode, since a peer may have the bare name."""
    backend = backend_named(text)
    return f"{text}:{mode_of(backend, None)}"


def plan(
    cases: Sequence[Case],
    backends: Sequence[str] = (),
    against: Sequence[str] = (),
    *,
    seconds: float = 1.5,
    cold: bool = False,
    seed: int = 0,
    callers: int = 0,
    device: torch.device = CPU,
) -> Bench:
    """The bench that will be measured, still without cells.

    `backends` are names as `split_name` takes them. Without any, the best backend there is, and
    `torch` beside it if there are no peers; on a GPU, all that are for such a device. `seconds` are
    for each other side in one cell.
    """
    if not cases:
        raise TorchweldError("the grid is empty; give blocks, rows and dtypes, or none at all")
    if len(set(backends)) < len(backends):
        raise TorchweldError(f"backends are {', '.join(backends)}; name each once")
    on_gpu = device.type != "cpu"
    # A preset names peers for GPUs that are left out on the CPU, with the reason.
    peers = _peers(against, GPU_PEERS if on_gpu else tuple(dict.fromkeys(BLOCK_PEERS + GPU_PEERS)))
    if is_training(cases):
        if on_gpu:
            raise TorchweldError(NO_TRAINING)
        left_out = {**untrained(peers), **absent([n for n in peers if n not in untrained(peers)])}
        return _bench(
            backends=trained_backends(backends),
            against=tuple(peer for peer in peers if peer not in left_out),
            left_out=left_out,
            training=True,
            seconds=seconds,
            cold=cold,
            seed=seed,
            callers=callers,
        )
    notes: dict[str, None] = {}
    names = dict.fromkeys(_full_name(text) if text in BLOCK_PEERS else text for text in backends)
    for case in cases:
        block, dtype = form_of(BlockSource(mlp=case.mlp)), getattr(torch, parse_dtype(case.dtype))
        if case.rows < 1:
            raise TorchweldError(f"rows is {case.rows_text}; expected whole numbers of at least 1")
        for text in backends:
            name, mode = split_name(text)
            select(block, (), dtype, device, name=name, mode=mode)
        if not backends:
            choice = select(block, (), dtype, device)
            if on_gpu:
                beside = ways_there(block, dtype, device)
            else:
                beside = () if peers else (torch_backend.BACKEND.name,)
            names.update(dict.fromkeys((choice.backend.name, *beside)))
            # Refusals by backends of other devices are left out.
            near = [one for one in choice.passed_over if one.runs_there]
            notes.update(dict.fromkeys(f"not used: {refusal}" for refusal in near))
    left_out = absent(peers, device=device)
    return _bench(
        backends=tuple(names),
        device=device,
        against=tuple(peer for peer in peers if peer not in left_out),
        left_out=left_out,
        notes=tuple(notes),
        seconds=seconds,
        cold=cold,
        seed=seed,
        callers=callers,
    )


def ways_there(block: Form, dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
    """The backends that are made for this type of device, and can run the block there."""
    made = [one for one in BACKENDS if device.type in (one.abilities.devices or ())]
    return tuple(o.name for o in made if not o.unsupported_reasons(block, (), dtype, device))


def plan_model(
    target: str,
    against: Sequence[str] = (),
    *,
    seconds: float = 1.5,
    cold: bool = False,
    seed: int = 0,
    callers: int = 0,
    training: bool = False,
) -> Bench:
    """The same for a whole model; torchweld is what `tw.plan` and `tw.apply` make of it."""
    peers = _peers(against, MODEL_PEERS)
    left_out = dict.fromkeys(peers, EAGER_ALONE) if training else absent(peers, whole_model=True)
    return _bench(
        backends=(OWN_MODEL,),
        against=tuple(peer for peer in peers if peer not in left_out),
        left_out=left_out,
        target=target,
        training=training,
        seconds=seconds,
        cold=cold,
        seed=seed,
        callers=callers,
    )


def _peers(against: Sequence[str], allowed: Sequence[str]) -> list[str]:
    """Eager is always there, and may be named."""
    named = [known(name, allowed, "peer") for name in dict.fromkeys(against)]
    return [name for name in named if name != "eager"]


def _bench(
    *,
    backends: tuple[str, ...],
    against: tuple[str, ...],
    left_out: dict[str, str],
    seconds: float,
    cold: bool,
    seed: int,
    callers: int,
    notes: tuple[str, ...] = (),
    target: str = "",
    training: bool = False,
    device: torch.device = CPU,
) -> Bench:
    if not (math.isfinite(seconds) and seconds > 0.0):
        raise TorchweldError(f"seconds is {seconds}; expected a number above 0, such as 1.5")
    if not 0 <= seed < LEAST_BAD_SEED:
        raise TorchweldError(f"seed is {seed}; expected a whole number from 0 to 2**32 - 1")
    if training and callers:
        raise TorchweldError("--callers goes with calls without gradients; leave --training out")
    if callers > MOST_CALLERS:
        raise TorchweldError(f"callers are {callers}; expected at most {MOST_CALLERS}")
    on_gpu = device.type != "cpu"
    here = hardware.hardware()
    versions = [version for name in against for version in RUNTIMES[name]().versions()]
    if versions:
        notes = (*notes, f"installed: {', '.join(dict.fromkeys(versions))}")
    return Bench(
        torch=torch.__version__,
        cpu=here.cpu_model,
        cache=here.caches.l3_bytes or here.caches.l2_bytes or 0,
        isa=None if kernel_build.build_problem() else kernel_build.isa_in_use(),
        threads=torch.get_num_threads(),
        backends=backends,
        against=against,
        left_out=left_out,
        notes=notes,
        target=target,
        training=training,
        native_bf16=native_bf16(),
        cold=cold,
        seconds=seconds,
        seed=seed,
        callers=callers,
        device=str(device),
        gpu=gpu_here(device) if on_gpu else None,
        versions=gpu_versions() if on_gpu else {},
    )


def gpu_versions() -> dict[str, str]:
    """Versions of what makes kernels for GPUs, for a report that is read elsewhere."""
    found = {"Python": platform.python_version()}
    for name in ("torchweld", "triton"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
