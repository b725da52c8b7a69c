"""What a bench comes to: means, shares of the peak, rows, and the map of where fused wins."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from typing import Any

import pytest
from tests.support.bench_samples import GATED, PEAKS, PLAIN, bench, case, cell, comparison
from tests.support.measured import measured

from torchweld.bench import Case, Cell, Latency, MlpShape, maps, summarise
from torchweld.bench.bench_results import TOO_LOW
from torchweld.bench.bench_rows import csv_text, kept
from torchweld.bench.time_estimates import Pace, expected_s, startup_s
from torchweld.core.not_measured import NotMeasured
from torchweld.machine.measured_peaks import ReadPeak
from torchweld.timing import Comparison


def test_the_summary_is_of_the_first_backend_and_of_measured_cells() -> None:
    cases = [case(rows=1), case(rows=2), case(dtype="bfloat16"), case(GATED)]
    given = [comparison(8.0), comparison(2.0), comparison(0.5), comparison(9.0, "not measured")]
    found = [
        cell(what, {"mkldnn": None, "cpu": one}) for what, one in zip(cases, given, strict=True)
    ]
    summary = summarise(bench(found, against=("mkldnn",)))
    assert (summary.backend, summary.cells, summary.measured) == ("cpu", 4, 3)
    assert summary.mean == pytest.approx(2.0)
    assert summary.means == pytest.approx({"fp32": 4.0, "bf16": 0.5})
    assert summary.worst == ("3 × 8→16→4 gelu bf16", 0.5)
    assert summary.unmeasured == ("3 × 8→16→4 silu-gated fp32: because we say so",)
    assert summary.refused == {"mkldnn: it cannot": tuple(one.name for one in found)}
    assert summary.copied_bytes == 300  # once for each block and dtype
    assert summary.weight_bytes == (8 * 16 + 16 * 4) * (4 + 2) + (2 * 8 * 16 + 16 * 4) * 4
    assert summary.largest_error_ratio == 1.5
    assert summary.largest_share_of_limit == 0.5


def test_a_summary_of_nothing() -> None:
    summary = summarise(bench([]))
    assert (summary.cells, summary.measured, summary.verdicts) == (0, 0, 0)
    assert summary.mean == summary.worst == NotMeasured("no cell was measured")
    assert summary.largest_error_ratio == NotMeasured("nothing was verified")
    assert summary.remedy is None


def test_verdicts_on_anybody_count_and_a_remedy_is_an_option_to_paste() -> None:
    unknown = comparison(1.0, "not measured")
    made = bench(
        [cell(case(), {"mkldnn": comparison(2.0), "cpu": unknown})], against=("mkldnn",), seconds=1
    )
    summary = summarise(made)
    assert (summary.measured, summary.verdicts, summary.remedy) == (0, 1, "--seconds 4")
    asked = replace(unknown, wanted_s=37)
    made = bench([cell(case(), {"cpu": asked})], seconds=1)
    assert summarise(made).remedy == "--seconds 37"
    assert summarise(bench([cell(case(), {"cpu": None})])).remedy is None  # no time would help
    disturbed = replace(unknown, rounds=2, discarded=9)
    made = bench([cell(case(), {"cpu": disturbed})], seconds=1)
    assert summarise(made).remedy == "--seconds 4, or OMP_NUM_THREADS=1 before the command,"
    alone = replace(made, threads=1)
    assert summarise(alone).remedy == "--seconds 4"


def test_the_share_of_the_peak_is_of_what_holds_a_shape_back() -> None:
    few, many = (cell(case(rows=rows), {"cpu": comparison(1.0, us=10.0)}) for rows in (1, 1000))
    made = bench([few, many])
    assert few.moved_bytes == 4 * (192 + 12)
    share, what = measured(made.of_peak(few, "cpu"))
    assert what == "memory"
    assert share == pytest.approx(few.moved_bytes / 1e5)
    assert many.gflops("eager") == pytest.approx(2 * 1000 * 192 / 123.456e3)
    share, what = measured(made.of_peak(many, "cpu"))
    assert what == "memory"  # an MLP this narrow moves more than it computes
    assert share == pytest.approx(many.moved_bytes / 1e5)
    wide = cell(case(MlpShape(sizes=(512, 512, 512)), rows=512), {"cpu": comparison(1.0, us=1e5)})
    share, what = measured(made.of_peak(wide, "cpu"))
    assert what == "compute"
    assert share == pytest.approx(wide.flops / 1e5 / 1e5)
    nothing = bench([few], peaks=None).of_peak(few, "cpu")
    assert nothing == NotMeasured("this machine's peaks were not measured")
    assert bench([few], threads=3).of_peak(few, "cpu") == NotMeasured(
        "no peak was measured for float32 on 3 threads"
    )


def test_a_call_faster_than_the_peaks_allow_has_no_share() -> None:
    least_us = 4 * (192 + 12) / 1e4  # at 10 GB/s

    def share(us: float) -> tuple[float, str] | NotMeasured:
        one = cell(case(rows=1), {"cpu": comparison(1.0, us=us)})
        return bench([one]).of_peak(one, "cpu")

    part, what = measured(share(least_us * 1.25))
    assert what == "memory"
    assert part == pytest.approx(0.8)
    assert share(least_us / 1.02) == (1.0, "memory")  # within what a probe may exceed a peak by
    assert share(least_us / 1.46) == NotMeasured(TOO_LOW)


def test_data_that_stay_in_the_cache_are_held_to_its_rate_and_cold_ones_to_memorys() -> None:
    sets = ((1 << 10, 100.0), (1 << 12, 50.0), (1 << 30, 10.0))
    read = tuple(ReadPeak(working_set_bytes=size, threads=2, gbps=gbps) for size, gbps in sets)
    peaks = replace(PEAKS, read=read)
    wide = cell(case(MlpShape(sizes=(32, 32)), rows=1), {"cpu": comparison(1.0, us=10.0)})
    assert (1 << 12) < wide.moved_bytes < (1 << 13)

    def share(**changes: Any) -> float:
        return measured(bench([wide], peaks=peaks, **changes).of_peak(wide, "cpu"))[0]

    assert share(cache=1 << 13) == pytest.approx(wide.moved_bytes / 500e3)
    assert share(cache=1 << 12) == pytest.approx(wide.moved_bytes / 100e3)
    assert share(cache=1 << 13, cold=True) == pytest.approx(wide.moved_bytes / 100e3)
    assert wide.case is not None
    cold = replace(wide, case=replace(wide.case, cold=True))
    part, what = measured(bench([cold], peaks=peaks, cache=1 << 13).of_peak(cold, "cpu"))
    assert what == "memory"
    assert part == pytest.approx(wide.moved_bytes / 100e3)


# ---- the map ----


def grid(verdicts: dict[tuple[int, int], Comparison]) -> list[Cell]:
    return [
        cell(Case(mlp=MlpShape(sizes=(8, hidden, 8)), lead=(rows,)), {"cpu": one})
        for (rows, hidden), one in verdicts.items()
    ]


def test_the_map_says_where_fused_wins_loses_and_nobody_can_tell() -> None:
    found = grid(
        {
            (64, 32): comparison(0.5, "slower"),
            (1, 32): comparison(3.0),
            (8, 32): comparison(1.0, "same"),
            (1, 16): comparison(4.0),
            (8, 16): comparison(2.0),
            (64, 16): comparison(2.0, "not measured"),
        }
    )
    (one,) = maps(bench(found))
    assert (one.kind, one.dtype) == ("gelu", "fp32")
    assert (one.rows, one.widths) == (("1", "8", "64"), ("16", "32"))
    outcomes = [[measured(spot).outcome for spot in row] for row in one.spots]
    assert outcomes == [["wins", "wins"], ["wins", "same"], ["unknown", "loses"]]
    assert one.along(0) == [("wins", ["1", "8"]), ("unknown", ["64"])]
    assert one.along(1) == [("wins", ["1"]), ("same", ["8"]), ("loses", ["64"])]


def test_a_line_or_a_dot_is_no_map_and_kinds_do_not_mix() -> None:
    one = comparison(2.0)
    assert maps(bench(grid({(1, 16): one, (8, 16): one}))) == []
    assert maps(bench(grid({(1, 16): one, (1, 32): one}))) == []
    mixed = [cell(case(PLAIN, rows=1), {"cpu": one}), cell(case(GATED, rows=8), {"cpu": one})]
    assert maps(bench(mixed)) == []


def test_widths_that_two_blocks_share_are_named_in_full_and_holes_stay_empty() -> None:
    shapes = [((8, 16, 8), 1), ((4, 16, 4), 8), ((8, 32, 8), 1)]
    found = [
        cell(Case(mlp=MlpShape(sizes=sizes), lead=(rows,)), {"cpu": comparison()})
        for sizes, rows in shapes
    ]
    (one,) = maps(bench(found))
    assert one.widths == ("4→16→4", "8→16→8", "8→32→8")
    assert one.spots[0][0] is None


# ---- rows ----


def test_csv_has_a_line_for_each_implementation_and_blanks_for_what_is_not_known() -> None:
    measured = cell(case(label="a, model"), {"mkldnn": None, "cpu": comparison(2.0)})
    rows = list(csv.DictReader(io.StringIO(csv_text(bench([measured], against=("mkldnn",))))))
    assert [row["implementation"] for row in rows] == ["eager", "mkldnn", "cpu"]
    eager, peer, ours = rows
    assert (ours["label"], ours["sizes"], ours["rows"]) == ("a, model", "8x16x4", "3")
    assert float(ours["speedup"]) == 2.0
    assert float(ours["low"]) == pytest.approx(1.8)
    assert (ours["ops"], eager["ops"], peer["ops"]) == ("1", "5", "")
    assert peer["refused"] == "it cannot"
    assert peer["call_us"] == eager["speedup"] == ""
    assert peer["not_measured"] == "call_us, gflops, gbps, of_peak: it cannot"
    assert eager["not_measured"] == ours["not_measured"] == ""
    assert csv_text(bench([])) == "\n"


def test_not_measured_has_no_interval_in_rows() -> None:
    made = bench([cell(case(), {"cpu": comparison(1.0, "not measured")})])
    data, samples = kept(made, made.cells[0])
    why = {"not_measured": "because we say so"}
    assert data["cpu"]["low"] == data["cpu"]["high"] == data["cpu"]["speedup"] == why
    assert data["cpu"]["verdict"] == "not measured"
    assert data["cpu"]["not_measured"] == "speedup, low, high, verdict: because we say so"
    (_, ours) = csv.DictReader(io.StringIO(csv_text(made)))
    assert (ours["low"], ours["speedup"]) == ("", "")
    assert ours["not_measured"] == data["cpu"]["not_measured"]
    assert samples["cpu log_ratios"] == (0.5, 0.6)
    assert data["eager"]["call_us"] == 123.456


def test_a_speed_without_a_verdict_is_no_figure_of_the_history() -> None:
    noisy = replace(comparison(1.5), verdict="not measured", reason="too wide")
    one = cell(case(), {"cpu": noisy})
    eager, ours = one.results
    made = bench([replace(one, results=(eager, replace(ours, callers=noisy)))], callers=2)
    data, _ = kept(made, made.cells[0])
    why = {"not_measured": "too wide"}
    assert data["cpu"]["speedup"] == data["cpu"]["callers_ratio"] == why
    assert data["cpu"]["call_us"] == noisy.candidate_us  # a time is a time
    (_, row) = csv.DictReader(io.StringIO(csv_text(made)))
    assert (row["speedup"], row["verdict"]) == ("1.5", "not measured")
    assert row["not_measured"] == "verdict, callers_verdict: too wide"


def test_single_calls_and_callers_are_kept_too() -> None:
    one = cell(case(), {"cpu": comparison(2.0)})
    latency = Latency(calls_us=tuple(float(i) for i in range(1001)))
    results = tuple(
        replace(r, latency=latency, callers=r.comparison and comparison(4.0, us=100.0))
        for r in one.results
    )
    made = bench([replace(one, results=results)], callers=3)
    data, samples = kept(made, made.cells[0])
    assert data["cpu"]["p99_us"] == 990.0
    assert data["cpu"]["calls_per_s"] == pytest.approx(4e4)
    assert data["eager"]["calls_per_s"] == pytest.approx(1e4)
    assert len(samples["eager single call_us"]) == 1001


# ---- time left ----


def test_the_time_left_follows_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("torchweld.bench.time_estimates.time.perf_counter", lambda: now[0])
    pace = Pace([10.0, 30.0, 60.0])
    assert str(pace) == "1 of 3, about 2 min left"
    now[0] = 20.0  # twice as long as expected
    pace.one_done()
    assert pace.left_s == 180.0
    now[0] = 40.0
    pace.one_done()
    assert str(pace) == "3 of 3, about 60 s left"


def test_more_work_is_expected_to_take_longer() -> None:
    small, large = case(), case(MlpShape(sizes=(2048, 8192, 2048)), rows=512)
    made = bench([])
    assert expected_s(made, small, False) < expected_s(made, large, False)
    assert expected_s(made, small, False) < expected_s(made, small, True)
    peers = bench([], against=("compile",), callers=2)
    assert expected_s(peers, small, False) > 10 + expected_s(made, small, False)
    assert startup_s(made) == 0.0
    assert startup_s(peers) > 0.0
