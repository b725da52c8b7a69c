"""What a bench found: dataclasses that save to JSON and load again, and what they come to."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchweld.benching.cases import Case, Mlp
from torchweld.errors import TorchweldError
from torchweld.measuring import Comparison

_KIND, _VERSION = "torchweld.bench", 1


@dataclass(frozen=True, kw_only=True)
class Check:
    """The numerical rule on one output, ratios being to what it allows.

    `error_ratio`: the largest error to eager's largest; NaN where eager is exact.
    """

    ok: bool
    error_ratio: float
    row_ratio: float
    rms_ratio: float
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class Result:
    """One backend in one case. `comparison` is None where the check failed: nothing was timed.

    `ops` and `buffers` are None where the op left the work to torch: nothing is counted inside.
    """

    backend: str
    kernel: str
    check: Check
    comparison: Comparison | None
    ops: int | None
    buffers: int | None
    copied_bytes: int


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One case, eager against every backend; the first is the one that matters."""

    case: Case
    eager_ops: int
    eager_buffers: int
    weight_bytes: int
    results: tuple[Result, ...]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """All cells, and what they were measured with. `notes` say what could not be used, and why."""

    torch: str
    cpu: str
    isa: str | None
    threads: int
    backends: tuple[str, ...]
    cold: bool
    seconds: float
    seed: int
    notes: tuple[str, ...]
    cells: tuple[Cell, ...] = ()
    interrupted: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; a float that JSON cannot hold becomes "nan" or "inf"."""
        return {"kind": _KIND, "version": _VERSION, **_plain(self)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Bench:
        given = (data.get("kind"), data.get("version"))
        if given != (_KIND, _VERSION):
            raise TorchweldError(
                f"kind and version are {given}, and must be {(_KIND, _VERSION)}; load what "
                "torchweld bench --json wrote with the same release"
            )
        fields = {f.name: data[f.name] for f in dataclasses.fields(Bench)}
        for name in ("backends", "notes"):
            fields[name] = tuple(fields[name])
        fields["cells"] = tuple(_cell(cell) for cell in data["cells"])
        return Bench(**fields)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), allow_nan=False, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Comparison):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _cell(data: Mapping[str, Any]) -> Cell:
    mlp = {**data["case"]["mlp"], "sizes": tuple(data["case"]["mlp"]["sizes"])}
    results = []
    for result in data["results"]:
        ratios = {n: float(result["check"][n]) for n in ("error_ratio", "row_ratio", "rms_ratio")}
        timed = result["comparison"]
        restored = {
            "check": Check(**{**result["check"], **ratios}),
            "comparison": None if timed is None else Comparison.from_dict(timed),
        }
        results.append(Result(**{**result, **restored}))
    return Cell(
        **{**data, "case": Case(**{**data["case"], "mlp": Mlp(**mlp)}), "results": tuple(results)}
    )


# ---- what it comes to ----


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The first backend over all cells. Means are geometric, of the cells that were measured.

    `failed` (of any backend) and `unmeasured` say which and why.
    """

    backend: str
    cells: int
    measured: int
    failed: tuple[str, ...]
    unmeasured: tuple[str, ...]
    mean: float
    means: dict[str, float]  # by dtype
    worst: tuple[str, float] | None
    largest_error_ratio: float
    largest_share_of_limit: float  # 1 is all that the numerical rule allows
    weight_bytes: int
    copied_bytes: int


def summarise(bench: Bench) -> Summary:
    first = [(cell, cell.results[0]) for cell in bench.cells]
    speedups = [
        (cell.case, result.comparison.speedup)
        for cell, result in first
        if result.comparison is not None and result.comparison.verdict != "not measured"
    ]
    # Cells of one MLP and dtype share its weights.
    memory = {
        (cell.case.mlp, cell.case.dtype): (cell.weight_bytes, result.copied_bytes)
        for cell, result in first
    }
    errors = [r.check.error_ratio for _, r in first if not math.isnan(r.check.error_ratio)]
    dtypes = dict.fromkeys(case.dtype for case, _ in speedups)
    worst = min(speedups, key=lambda pair: pair[1], default=None)
    return Summary(
        backend=bench.backends[0],
        cells=len(first),
        measured=len(speedups),
        failed=tuple(
            f"{cell.case}, {result.backend}: {result.check.reason}"
            for cell in bench.cells
            for result in cell.results
            if not result.check.ok
        ),
        unmeasured=tuple(
            f"{cell.case}: {result.comparison.reason}"
            for cell, result in first
            if result.comparison is not None and result.comparison.verdict == "not measured"
        ),
        mean=_mean([ratio for _, ratio in speedups]),
        means={d: _mean([ratio for case, ratio in speedups if case.dtype == d]) for d in dtypes},
        worst=None if worst is None else (str(worst[0]), worst[1]),
        largest_error_ratio=max(errors, default=math.nan),
        largest_share_of_limit=max(
            (max(r.check.row_ratio, r.check.rms_ratio) for _, r in first), default=math.nan
        ),
        weight_bytes=sum(own for own, _ in memory.values()),
        copied_bytes=sum(copied for _, copied in memory.values()),
    )


def _mean(ratios: Sequence[float]) -> float:
    if not ratios:
        return math.nan
    return math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))
