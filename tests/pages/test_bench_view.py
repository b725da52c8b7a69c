"""A bench on a page: curves over rows, who is fastest where, errors, rounds."""

from __future__ import annotations

import pytest
from tests.support.bench_samples import GATED, PLAIN, bench, case, cell, comparison

from torchweld.core.not_measured import NotMeasured
from torchweld.pages import bench_view
from torchweld.pages.bench_view import (
    bench_curves,
    bench_errors,
    bench_maps,
    bench_strips,
    strips_left_out,
)


def test_one_plot_for_each_block_and_a_curve_for_each_side() -> None:
    made = bench(
        [
            cell(case(rows=8), {"cpu": comparison(2.0), "compile": comparison(1.5)}),
            cell(case(rows=1), {"cpu": comparison(3.0), "compile": None}),
            cell(case(GATED), {"cpu": comparison(1.1), "compile": comparison(0.9, "slower")}),
        ],
        against=("compile",),
    )
    plain, gated = bench_curves(made)
    assert plain.title == "8→16→4 gelu fp32"
    assert plain.source == "bench"
    assert [curve.name for curve in plain.curves] == ["cpu", "compile"]
    assert [(p.x, p.speedup) for p in plain.curves[0].points] == [(1, 3.0), (8, 2.0)]
    refused, timed = plain.curves[1].points
    assert refused.speedup == NotMeasured("it cannot")
    assert timed.interval == pytest.approx((1.35, 1.65))
    assert gated.curves[1].points[0].verdict == "slower"


def test_the_map_says_who_is_fastest_and_where_that_is_not_known() -> None:
    made = bench(
        [
            cell(case(rows=8), {"cpu": comparison(2.0), "compile": comparison(1.2)}),
            cell(case(rows=64), {"cpu": comparison(1.2), "compile": comparison(2.0)}),
            cell(case(GATED, rows=8), {"cpu": comparison(1.5), "compile": comparison(1.5)}),
            cell(
                case(GATED, rows=64),
                {"cpu": comparison(2.0, "not measured"), "compile": comparison(1.5)},
            ),
        ],
        against=("compile",),
    )
    (found,) = bench_maps(made)
    assert found.rows == ("8→16→4 gelu", "8→16→4 silu-gated")
    assert found.columns == ("8", "64")
    assert [(one.row, one.column, one.best) for one in found.cells] == [
        (0, 0, "cpu"),
        (0, 1, "compile"),
        (1, 0, "cpu or compile"),
        (1, 1, ""),
    ]
    assert found.cells[0].speedup == pytest.approx(2.0 / 1.2, rel=1e-4)
    assert found.cells[3].speedup == NotMeasured("because we say so")


def test_errors_are_those_of_our_sides() -> None:
    made = bench(
        [cell(case(), {"cpu": comparison(), "compile": comparison()})], against=("compile",)
    )
    (row,) = bench_errors(made)
    assert row.of_allowed == 0.5
    assert row.ok
    assert isinstance(row.eager, NotMeasured)


def test_large_benches_show_the_rounds_of_our_first_side(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench(
        [cell(case(), {"cpu": comparison(), "compile": comparison()})], against=("compile",)
    )
    assert [strip.name.rpartition(", ")[2] for strip in bench_strips(made)] == ["compile", "cpu"]
    assert strips_left_out(made) == ""
    monkeypatch.setattr(bench_view, "MOST_STRIPS", 1)
    (strip,) = bench_strips(made)
    assert strip.name.endswith(", cpu")
    assert strip.ratios[0] == pytest.approx(1.6487, rel=1e-4)
    assert "2 comparisons are too many" in strips_left_out(made)


def test_cells_of_a_whole_model_are_rows_of_a_map() -> None:
    one = cell(case(PLAIN), {"cpu": comparison()})
    made = bench([type(one)(**{**one.__dict__, "case": None, "name": "tokens"})], target="gpt")
    (found,) = bench_maps(made)
    assert (found.title, found.rows) == ("whole models", ("tokens",))
    assert bench_curves(made) == ()
