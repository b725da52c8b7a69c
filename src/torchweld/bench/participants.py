"""Who takes part in a bench: names in, a `Bench` without cells out, with reasons for the others.

Everything that can be refused is refused here, before anything is measured.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence

import torch

from torchweld.bench.bench_results import Bench
from torchweld.bench.cases import Case, MlpShape
from torchweld.bench.grid import parse_dtype
from torchweld.core.errors import NotMeasuredError, TorchweldError
from torchweld.core.names import known
from torchweld.machine import hardware, kernel_build, measured_peaks
from torchweld.ops.backends import (
    BACKENDS,
    Form,
    backend_named,
    compile_backend,
    mkldnn_linears,
    select,
    torch_backend,
)
from torchweld.ops.backends.backend import mode_of

_CPU = torch.device("cpu")

PEERS = ("eager", "mkldnn", "compile", "compile-max", "onnxruntime", "openvino")
MODEL_PEERS = ("eager", "compile", "compile-welded", "onnxruntime", "openvino")
OWN = tuple(f"{b.name}:{mode.name}" for b in BACKENDS for mode in b.abilities.modes)
OWN_MODEL = "torchweld"
FLOAT32_ONLY = ("onnxruntime", "openvino")
NEEDED = {"onnxruntime": ("onnxruntime", "onnx"), "openvino": ("openvino", "onnx")}
# What numpy takes, of those that draw numbers here.
LEAST_BAD_SEED = 2**32
# Each is a thread with a team of its own.
MOST_CALLERS = 1000
MODEL_NEEDED = {name: (*modules, "onnxscript") for name, modules in NEEDED.items()}


def split_name(text: str) -> tuple[str, str | None]:
    """`"torch:mkldnn"` as a backend and its mode; `"torch"` as the backend and None."""
    name, _, mode = text.partition(":")
    return name, mode or None


def absent(peers: Sequence[str], needed: Mapping[str, Sequence[str]] = NEEDED) -> dict[str, str]:
    """Who cannot take part because something is not installed, and how to get it."""
    result = {}
    for name in peers:
        missing = [m for m in needed.get(name, ()) if importlib.util.find_spec(m) is None]
        if missing:
            package = " and ".join(missing)
            result[name] = f'{package} not installed: pip install "torchweld[bench]", or {package}'
        elif name.startswith("compile"):
            missing = compile_backend.BACKEND.unavailable()
            result.update({name: "; ".join(missing)} if missing else {})
    return result


def why_not(name: str, case: Case) -> str:
    """Why a peer that is there does not take part in a case; empty if it does."""
    if name in FLOAT32_ONLY and case.dtype != "float32":
        return "it is measured in float32 only"
    if name == "mkldnn":
        return "; ".join(mkldnn_linears.reasons(getattr(torch, case.dtype), _CPU))
    return ""


def machine_peaks(
    dtypes: Sequence[str] = ("float32",),
) -> tuple[measured_peaks.Peaks | None, tuple[str, ...]]:
    """The peaks of this machine, measured if they have to be, and what to say about that.

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
    """As `measured_peaks.holds`, of what is read from memory."""
    compiled, threads = kernel_build.compiled_part(), torch.get_num_threads()
    largest = max(kept.read, key=lambda row: row.working_set_bytes, default=None)
    if compiled is None or largest is None:
        return True
    size = largest.working_set_bytes
    peak = kept.read_gbps(size, threads)
    found = float(compiled.probe_read(size, threads, measured_peaks.PROBE_SECONDS))
    return peak is None or found < measured_peaks.TOLERATED_EXCESS * peak


def block_of(mlp: MlpShape) -> Form:
    sizes = tuple(zip(mlp.sizes, mlp.sizes[1:], strict=False))
    return Form(kind="chain", forms=mlp.forms, sizes=sizes)


def _full_name(text: str) -> str:
    """With its mode: a peer has the same name."""
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
) -> Bench:
    """What will be measured, still without cells.

    `backends` are names as `split_name` takes them. Without any, the best backend there is, and
    `torch` beside it if there are no peers. `seconds` are for each other side in one cell.
    """
    if not cases:
        raise TorchweldError("the grid is empty; give blocks, rows and dtypes, or none at all")
    if len(set(backends)) < len(backends):
        raise TorchweldError(f"backends are {', '.join(backends)}; name each once")
    peers = _peers(against, PEERS)
    notes: dict[str, None] = {}
    names = dict.fromkeys(_full_name(text) if text in PEERS else text for text in backends)
    for case in cases:
        block, dtype = block_of(case.mlp), getattr(torch, parse_dtype(case.dtype))
        if case.rows < 1:
            raise TorchweldError(f"rows is {case.rows_text}; expected whole numbers of at least 1")
        for text in backends:
            name, mode = split_name(text)
            select(block, (), dtype, _CPU, name=name, mode=mode)
        if not backends:
            choice = select(block, (), dtype, _CPU)
            beside = () if peers else (torch_backend.BACKEND.name,)
            names.update(dict.fromkeys((choice.backend.name, *beside)))
            notes.update(dict.fromkeys(f"not used: {refusal}" for refusal in choice.passed_over))
    left_out = absent(peers)
    return _bench(
        backends=tuple(names),
        against=tuple(peer for peer in peers if peer not in left_out),
        left_out=left_out,
        notes=tuple(notes),
        seconds=seconds,
        cold=cold,
        seed=seed,
        callers=callers,
    )


def plan_model(
    target: str,
    against: Sequence[str] = (),
    *,
    seconds: float = 1.5,
    cold: bool = False,
    seed: int = 0,
    callers: int = 0,
) -> Bench:
    """The same for a whole model; torchweld is what `tw.plan` and `tw.apply` make of it."""
    peers = _peers(against, MODEL_PEERS)
    left_out = absent(peers, MODEL_NEEDED)
    return _bench(
        backends=(OWN_MODEL,),
        against=tuple(peer for peer in peers if peer not in left_out),
        left_out=left_out,
        target=target,
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
) -> Bench:
    if not (math.isfinite(seconds) and seconds > 0.0):
        raise TorchweldError(f"seconds is {seconds}; expected a number above 0, such as 1.5")
    if not 0 <= seed < LEAST_BAD_SEED:
        raise TorchweldError(f"seed is {seed}; expected a whole number from 0 to 2**32 - 1")
    if callers > MOST_CALLERS:
        raise TorchweldError(f"callers are {callers}; expected at most {MOST_CALLERS}")
    here = hardware.hardware()
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
        cold=cold,
        seconds=seconds,
        seed=seed,
        callers=callers,
    )
