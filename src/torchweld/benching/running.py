"""Running a bench: cases and names of backends in, one cell a case out.

Every backend's output is held to the numerical rule first; one that breaks it is not timed. All
runs in inference mode, on the CPU, with the weights that eager has. M rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchweld import hardware
from torchweld.benching.cases import DTYPES, Case, Mlp, eager_model
from torchweld.benching.results import Bench, Cell, Check, Result
from torchweld.blocks import LayerForm
from torchweld.counting import count
from torchweld.errors import TorchweldError
from torchweld.kernels import Block, reference, select
from torchweld.measuring import Comparison, compare
from torchweld.modules import FusedMLP
from torchweld.names import known
from torchweld.verification import judge, scales_of

_CPU = torch.device("cpu")

# Of a larger x, as many rows are judged, evenly spread, first and last among them: the reference in
# fp64 and its scales took 11 s for 4096 rows of 1024→2816→1024, on two cores.
JUDGED_ROWS = 64

# What a run is called whose op left the work to torch.
COMPOSED = "composed"


@dataclass(frozen=True, kw_only=True)
class _Side:
    """One backend, ready to run: `kernel` and `copied_bytes` are asked after a call."""

    name: str
    run: Callable[[Tensor], Tensor]
    kernel: Callable[[], str]
    copied_bytes: Callable[[], int]


def split_name(text: str) -> tuple[str, str | None]:
    """`"torch:mkldnn"` as a backend and its mode; `"torch"` as the backend and None."""
    name, _, mode = text.partition(":")
    return name, mode or None


def _side(text: str, block: Block, mlp: Mlp, linears: list[nn.Linear], dtype: torch.dtype) -> _Side:
    name, mode = split_name(text)
    choice = select(block, (), dtype, _CPU, name=name, mode=mode)
    if name == "cpu":  # as users get it: through the module
        return _fused_mlp_side(text, mlp, linears, packing=mode != "natural")
    tensors = [t for linear in linears for t in (linear.weight, linear.bias) if t is not None]
    runner = choice.backend.build(block, tensors, mode)

    def run(x: Tensor) -> Tensor:
        y = runner(x)
        assert isinstance(y, Tensor)
        return y

    used = mode or choice.backend.modes[0]
    return _Side(name=text, run=run, kernel=lambda: used, copied_bytes=lambda: runner.copied_bytes)


def _fused_mlp_side(text: str, mlp: Mlp, linears: list[nn.Linear], packing: bool) -> _Side:
    fused = FusedMLP.from_linears(linears, mlp.activation, gated=mlp.gated, packing=packing).eval()
    compiled = hardware.compiled_part()
    assert compiled is not None  # else `select` had refused
    x = torch.zeros(1, mlp.sizes[0], dtype=linears[0].weight.dtype)

    def kernel() -> str:
        run = compiled.last_run()
        return f"{run['weights']} {run['partition']}".strip()

    with torch.inference_mode():
        before = compiled.last_run()["calls"]
        fused(x)
        assert compiled.last_run()["calls"] == before + 1, "FusedMLP did not run the kernels"
    return _Side(name=text, run=fused, kernel=kernel, copied_bytes=lambda: fused.packed_bytes)


# ---- the bench ----


def plan(
    cases: Sequence[Case],
    backends: Sequence[str] = (),
    *,
    seconds: float = 1.5,
    cold: bool = False,
    seed: int = 0,
) -> Bench:
    """What will be measured, still without cells; everything that can be refused is refused here.

    `backends` are names as `split_name` takes them. Without any, the best backend there is, and
    `torch` beside it. `seconds` are for one backend in one cell.
    """
    if not (math.isfinite(seconds) and seconds > 0.0):
        raise TorchweldError(f"seconds is {seconds}; expected a number above 0, such as 1.5")
    if len(set(backends)) < len(backends):
        raise TorchweldError(f"backends are {', '.join(backends)}; name each once")
    notes: dict[str, None] = {}
    names: dict[str, None] = dict.fromkeys(backends)
    for case in cases:
        block, dtype = _block(case.mlp), DTYPES[known(case.dtype, DTYPES, "dtype")]
        if case.rows < 1:
            raise TorchweldError(f"rows is {case.rows}; expected a whole number of at least 1")
        for text in backends:
            name, mode = split_name(text)
            select(block, (), dtype, _CPU, name=name, mode=mode)
        if not backends:
            choice = select(block, (), dtype, _CPU)
            names.update(dict.fromkeys((choice.backend.name, "torch")))
            notes.update(dict.fromkeys(str(refusal) for refusal in choice.passed_over))
    return Bench(
        torch=torch.__version__,
        cpu=hardware.hardware().cpu_model,
        isa=None if hardware.build_problem() else hardware.isa_in_use(),
        threads=torch.get_num_threads(),
        backends=tuple(names),
        cold=cold,
        seconds=seconds,
        seed=seed,
        notes=tuple(notes),
    )


def measure(bench: Bench, cases: Sequence[Case]) -> Iterator[Cell]:
    """The cells of `bench`, each as soon as it is done."""
    made: tuple[Mlp, str] | None = None
    for case in cases:
        if made != (case.mlp, case.dtype):
            made = (case.mlp, case.dtype)
            dtype = DTYPES[case.dtype]
            eager, linears = eager_model(case.mlp, dtype, bench.seed)
            block = _block(case.mlp)
            sides = [_side(text, block, case.mlp, linears, dtype) for text in bench.backends]
        yield _measure_cell(bench, case, eager, linears, sides)


def _block(mlp: Mlp) -> Block:
    sizes = tuple(zip(mlp.sizes, mlp.sizes[1:], strict=False))
    return Block(kind="chain", forms=mlp.forms, sizes=sizes)


def _measure_cell(
    bench: Bench, case: Case, eager: nn.Module, linears: list[nn.Linear], sides: Sequence[_Side]
) -> Cell:
    generator = torch.Generator().manual_seed(bench.seed + 1)
    x = torch.randn(case.rows, case.mlp.sizes[0], generator=generator).to(DTYPES[case.dtype])
    tensors = [t for linear in linears for t in (linear.weight, linear.bias) if t is not None]
    with torch.inference_mode():
        checks = _checks(x, tensors, case.mlp.forms, eager, [side.run for side in sides])
        kernels = []
        for side in sides:
            side.run(x)
            kernels.append(side.kernel())
        before = count(lambda: eager(x))
        counts = [count(lambda side=side: side.run(x)) for side in sides]  # type: ignore[misc]
        right = [side for side, check in zip(sides, checks, strict=True) if check.ok]
        timed = iter(_timed(bench, x, eager, right))
    return Cell(
        case=case,
        eager_ops=len(before.ops),
        eager_buffers=before.buffers,
        weight_bytes=sum(t.nbytes for t in tensors),
        results=tuple(
            Result(
                backend=side.name,
                kernel=kernel,
                check=check,
                comparison=next(timed) if check.ok else None,
                ops=None if kernel == COMPOSED else len(counts_.ops),
                buffers=None if kernel == COMPOSED else counts_.buffers,
                copied_bytes=side.copied_bytes(),
            )
            for side, kernel, check, counts_ in zip(sides, kernels, checks, counts, strict=True)
        ),
    )


def _timed(bench: Bench, x: Tensor, eager: nn.Module, sides: Sequence[_Side]) -> list[Comparison]:
    if not sides:
        return []
    calls = [lambda: eager(x), *(lambda run=side.run: run(x) for side in sides)]
    found: Comparison | list[Comparison] = compare(
        *calls,
        names=["eager", *(side.name for side in sides)],
        budget_s=bench.seconds,
        cold=bench.cold,
        seed=bench.seed,
    )
    return found if isinstance(found, list) else [found]


def _checks(
    x: Tensor,
    tensors: Sequence[Tensor],
    forms: Sequence[LayerForm],
    eager: nn.Module,
    runs: Sequence[Callable[[Tensor], Tensor]],
) -> list[Check]:
    rows = torch.linspace(0, len(x) - 1, min(len(x), JUDGED_ROWS)).long()
    expected = reference.chain(x[rows].double(), [t.double() for t in tensors], forms)
    (scale,) = scales_of(x[rows], tensors, forms).outputs
    old = eager(x)[rows]
    eager_error = float((old.double() - expected).abs().max())
    checks = []
    for run in runs:
        got = run(x)[rows]
        found = judge(got, old, expected, scale)
        error = float((got.double() - expected).abs().max())
        checks.append(
            Check(
                ok=found.ok,
                error_ratio=error / eager_error if eager_error else math.nan,
                row_ratio=found.row_ratio,
                rms_ratio=found.rms_ratio,
                reason=found.reason,
            )
        )
    return checks
