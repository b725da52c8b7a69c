"""A bench as flat rows, one for each implementation in each cell: for CSV and for the history."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any

from torchweld.bench.bench_results import PERCENTILES, Bench, Cell, Result
from torchweld.bench.kernel_counts import KernelCost
from torchweld.core.not_measured import NotMeasured
from torchweld.core.records import to_plain


def row_of(bench: Bench, cell: Cell, result: Result) -> dict[str, Any]:
    """Every figure by name; None where there is none, NotMeasured where it could not be had."""
    compared, together, cost = result.comparison, result.callers, result.cost
    peak = bench.of_peak(cell, result.name) if bench.peaks_known else None
    interval: Any = compared and compared.interval
    low, high = interval if isinstance(interval, tuple) else (interval, interval)
    row: dict[str, Any] = {
        "call_us": result.us,
        "speedup": compared and compared.speedup,
        "low": low,
        "high": high,
        "verdict": compared and compared.verdict,
        "rounds": compared and compared.rounds,
        "noise": compared and compared.noise,
        "gflops": cell.gflops(result.name),
        "gbps": cell.gbps(result.name),
        "of_peak": peak[0] if isinstance(peak, tuple) else peak,
        "bound": peak[1] if isinstance(peak, tuple) else None,
        "ops": cost.ops,
        "buffers": cost.buffers,
        "host_us": cost.host_us,
        "cpu_us": cost.cpu_us,
        "cuda_us": cost.cuda_us,
        "error_ratio": result.check and result.check.error_ratio,
        "copied_bytes": result.copied_bytes,
        "kernel": result.kernel,
    }
    if bench.on_gpu:
        row |= _kernel_figures(cost.kernels)
    if result.latency is not None:
        row |= {f"p{p}_us": result.latency.percentile(p) for p in PERCENTILES}
        row["calls"] = len(result.latency.calls_us)
    if bench.callers:
        row["callers"] = bench.callers
        row["calls_per_s"] = calls_per_s(cell, result)
        row["callers_ratio"] = together and together.speedup
        row["callers_verdict"] = together and together.verdict
    if bench.training:
        step = result.training
        row |= {
            "saved_bytes": step and step.saved_bytes,
            "saved_ratio": cell.saved_ratio(result.name),
            "faults": step and step.faults,
            "peak_bytes": step and step.peak_bytes,
        }
    row["refused"] = result.refused
    return row | {"not_measured": _reasons(row, result)}


def _kernel_figures(found: KernelCost | NotMeasured | None) -> dict[str, Any]:
    names = ("kernels", "launches", "kernel_us", "launch_us", "idle_us", "occupancy_queries")
    if not isinstance(found, KernelCost):
        return {**dict.fromkeys(names), "kernels": found, "kernel_kinds": None}
    return {**{name: getattr(found, name) for name in names}, "kernel_kinds": found.words}


def _reasons(row: Mapping[str, Any], result: Result) -> str | None:
    """Reasons why figures were not measured, with all figures of one reason together."""
    found: dict[str, list[str]] = {}
    for name, value in row.items():
        if isinstance(value, NotMeasured):
            found.setdefault(value.reason, []).append(name)
    for name, compared in (("verdict", result.comparison), ("callers_verdict", result.callers)):
        if compared is not None and compared.verdict == "not measured":
            found.setdefault(compared.reason, []).append(name)
    return "; ".join(f"{', '.join(names)}: {why}" for why, names in found.items()) or None


def calls_per_s(cell: Cell, result: Result) -> float | NotMeasured | None:
    """What several callers together finish. Eager's rate is in the comparison of any other side.

    None if the bench had no callers.
    """
    if result.callers is not None:
        us = result.callers.candidate_us
    else:
        others = [other.callers for other in cell.results if other.callers is not None]
        if result.name != "eager" or not others:
            return None
        us = max(others, key=lambda comparison: comparison.rounds).baseline_us
    return us if isinstance(us, NotMeasured) else 1e6 / us


def kept(bench: Bench, cell: Cell) -> tuple[dict[str, Any], dict[str, tuple[float, ...]]]:
    """Data and samples of a cell, as the history takes them.

    Runs are compared there by their figures alone, so a speed without a verdict is left out.
    """
    data: dict[str, Any] = {}
    for result in cell.results:
        row = row_of(bench, cell, result)
        if result.comparison is not None and not result.measured:
            unknown = NotMeasured(result.comparison.reason)
            row |= {"speedup": unknown, "low": unknown, "high": unknown}
        if result.callers is not None and result.callers.verdict == "not measured":
            row["callers_ratio"] = NotMeasured(result.callers.reason)
        data[result.name] = to_plain(row)
    samples: dict[str, tuple[float, ...]] = {}
    for result in cell.results:
        if result.comparison is not None:
            samples[f"{result.name} log_ratios"] = result.comparison.log_ratios
            samples[f"{result.name} control_log_ratios"] = result.comparison.control_log_ratios
        if result.latency is not None:
            samples[f"{result.name} single call_us"] = result.latency.calls_us
        if result.callers is not None:
            samples[f"{result.name} callers log_ratios"] = result.callers.log_ratios
    return data, samples


def csv_text(bench: Bench) -> str:
    """A header and a line for each implementation in each cell.

    A figure that was not measured is empty, and `not_measured` says which and why.
    """
    rows = list(_csv_rows(bench))
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _step_of(cell: Cell) -> dict[str, Any]:
    step = cell.model.step if cell.model is not None else cell.case and cell.case.training
    blocks = {"blocks": cell.case.blocks} if cell.case is not None else {}
    return {**blocks, **(to_plain(step, all_fields=True) if step else {})}


def _csv_rows(bench: Bench) -> Iterator[dict[str, Any]]:
    for cell in bench.cells:
        shape: dict[str, Any] = {"cell": cell.name}
        if cell.case is not None:
            shape |= {
                "label": cell.case.label,
                "sizes": "x".join(map(str, cell.case.mlp.sizes)),
                "kind": cell.case.mlp.kind_text,
                "rows": cell.case.rows,
            }
        if bench.training:
            shape |= _step_of(cell)
        shape["dtype"] = cell.dtype
        for result in cell.results:
            row = row_of(bench, cell, result)
            figures = {k: "" if isinstance(v, NotMeasured) else v for k, v in row.items()}
            yield {**shape, "implementation": result.name, **figures}
