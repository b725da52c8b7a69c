"""What the preset peers claims: met, missed or not measured, each from exactly its cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from tests.support.bench_samples import PEAKS, bench, cell, comparison

from torchweld.bench import Bench, Case, Cell, MlpShape
from torchweld.bench.bench_grid import BLOCKS
from torchweld.bench.bench_presets import PRESETS
from torchweld.bench.peer_standings import close_cells, lost_cells, standings
from torchweld.bench.relative_speeds import geometric_mean, over, over_best
from torchweld.report.bench_peers import goals_section, peers_section
from torchweld.report.text_style import to_text
from torchweld.timing import Comparison

PRESET = PRESETS["peers"]
TINY, SMALL = BLOCKS["tiny"], BLOCKS["small"]


def compared(speedup: float, width: float = 1.01, us: float = 100.0) -> Comparison:
    """A comparison with eager, known within `width`; eager takes `us`."""
    made = comparison(speedup, us=us)
    return replace(made, interval=(speedup / width, speedup * width))


def spot(
    ratio: float | Comparison = 2.0,
    peers: Mapping[str, float | Comparison] | None = None,
    *,
    mlp: MlpShape = TINY,
    rows: int = 1,
    dtype: str = "float32",
    cold: bool = False,
    us: float = 100.0,
) -> Cell:
    """A cell in which cpu has `ratio` of eager's speed, and `peers` have theirs."""
    sides: dict[str, Comparison | None] = {
        name: one if isinstance(one, Comparison) else compared(one, us=us)
        for name, one in {**(peers or {}), "cpu": ratio}.items()
    }
    return cell(Case(mlp=mlp, lead=(rows,), dtype=dtype, cold=cold), sides, us=us)


def found(cells: Sequence[Cell], gflops: float = 110.0, **changes: object) -> Bench:
    """A bench of these, in which peers that a cell does not have were refused."""
    against = list(dict.fromkeys(r.name for c in cells for r in c.results[1:] if r.name != "cpu"))
    refused = {name: cell(c.case, {name: None}).results[1] for c in cells for name in against}  # type: ignore[arg-type]
    whole = [
        replace(c, results=(*c.results, *(refused[n] for n in against if n not in _names(c))))
        for c in cells
    ]
    fma = tuple(replace(peak, gflops=gflops) for peak in PEAKS.fma)
    given = {"against": tuple(against), "peaks": replace(PEAKS, fma=fma), "preset": "peers"}
    return bench(whole, **{**given, **changes})


def _names(one: Cell) -> list[str]:
    return [result.name for result in one.results]


def verdicts(made: Bench) -> list[str]:
    return [one.verdict for one in PRESET.judged(made)]


# ---- the grid ----


def test_the_whole_grid_has_every_block_row_count_and_dtype_hot_and_cold() -> None:
    cases = PRESET.cases
    assert len(cases) == len(set(cases)) == (6 * 10 + 2) * 3 * 2
    many = {case.mlp for case in cases if case.rows == 4096}
    assert many == {BLOCKS["tiny"], BLOCKS["deep"]}


def test_torch_compile_takes_part_in_some_cells() -> None:
    def who(rows: int, dtype: str) -> list[str]:
        case = Case(mlp=TINY, lead=(rows,), dtype=dtype)
        return [name for name in PRESET.against if not PRESET.why_not(name, case)]

    assert who(8, "float32") == list(PRESET.against)
    some = [name for name in PRESET.against if not name.startswith("compile")]
    assert who(4, "float32") == who(8, "bfloat16") == some
    why = PRESET.why_not("compile-max", Case(mlp=TINY, lead=(4,)))
    assert why.startswith("this preset has it in float32 at 1, 8, 64, 512 rows")


# ---- goals ----


def everything(ratio: float = 6.0, **peers: float) -> Bench:
    """The whole grid: cpu at `ratio` of eager's speed, everybody else at 1 or as given."""
    cells = []
    for case in PRESET.cases:
        there = {n: peers.get(n, 1.0) for n in PRESET.against if not PRESET.why_not(n, case)}
        us = ratio * case.mlp.flops(case.rows) / 1e5  # 100 GFLOP/s for cpu
        where = {"mlp": case.mlp, "rows": case.rows, "dtype": case.dtype, "cold": case.cold}
        cells.append(spot(ratio, there, **where, us=us))  # type: ignore[arg-type]
    return found(cells)


def test_goals_are_met_when_everything_is_reached() -> None:
    whole = everything()
    assert verdicts(whole) == ["met"] * 7
    low = replace(whole, peaks=found([spot()], gflops=120.0).peaks)
    assert verdicts(low)[5] == "missed"


def test_a_part_of_the_grid_or_of_the_peers_meets_a_goal_in_part() -> None:
    whole = everything()
    last = replace(whole, cells=whole.cells[:-1])  # fp16 and cold
    assert verdicts(last) == ["met", "met", "met in part", *["met"] * 4]
    assert verdicts(replace(whole, cells=whole.cells[1:]))[6] == "not measured"
    without = replace(whole, against=tuple(n for n in whole.against if n != "openvino"))
    assert verdicts(without)[3:5] == ["met in part", "met in part"]


def test_goals_without_cells_are_not_measured() -> None:
    assert verdicts(found([])) == ["not measured"] * 7
    assert verdicts(found([spot(mlp=SMALL, rows=64)], peaks=None))[5] == "not measured"


@pytest.mark.parametrize(
    ("number", "bad"),
    [
        (0, spot(0.97)),
        (1, spot(2.9)),
        (2, spot(4.9, dtype="float16")),
        (3, spot(3.0, {"openvino": 3.0 / 0.94})),
        (4, spot(3.0, {"openvino": 3.0 / 1.24})),
        (5, spot(1.0, mlp=SMALL, rows=64, us=800.0)),
        (6, spot(3.0, {"onnxruntime": 3.0 / 1.6})),
    ],
)
def test_each_goal_can_be_missed(number: int, bad: Cell) -> None:
    peak = SMALL.flops(64) / 800e-6 / 1e9 / 0.84
    assert verdicts(found([bad], gflops=peak))[number] == "missed"


def test_one_cell_below_eager_counts_only_beyond_noise() -> None:
    assert verdicts(found([spot(compared(0.97, width=1.05))]))[0] == "met in part"
    assert verdicts(found([spot(compared(0.97, width=1.02))]))[0] == "missed"


def test_the_best_peer_is_judged_hot_only_and_eager_is_one_of_them() -> None:
    assert verdicts(found([spot(0.9)]))[3] == "missed"
    cells = [spot(2.0), spot(2.0, {"openvino": 4.0}, cold=True)]
    assert verdicts(found(cells))[3:5] == ["met in part", "met in part"]


UNKNOWN = comparison(verdict="not measured")


def test_a_goal_reached_only_without_the_unmeasured_cells_is_not_met() -> None:
    assert verdicts(found([spot(4.0), spot(UNKNOWN, rows=2)]))[:2] == ["not measured"] * 2
    assert verdicts(found([spot(0.5), spot(UNKNOWN, rows=2)]))[:2] == ["missed"] * 2


def test_the_mean_is_geometric() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    made = PRESET.judged(found([spot(2.0), spot(8.0, rows=32)]))[1]
    assert (made.hot, made.cold) == ("4.00 of 2 cells", "–")


# ---- beside others ----


def test_the_interval_beside_a_peer_has_both_errors() -> None:
    made = found([spot(compared(3.0, width=1.03), {"openvino": compared(2.0, width=1.04)})])
    ratio = over(made, made.cells[0], "openvino")
    assert ratio is not None
    assert ratio.value == pytest.approx(1.5)
    width = math.hypot(math.log(1.03), math.log(1.04))
    assert math.log(ratio.high / ratio.value) == pytest.approx(width)
    assert math.log(ratio.value / ratio.low) == pytest.approx(width)
    assert over(made, made.cells[0], "eager") is not None
    assert over(found([spot(UNKNOWN)]), spot(UNKNOWN), "eager") is None


def test_a_cell_with_an_unmeasured_peer_has_no_best_one() -> None:
    unknown = found([spot(2.0, {"openvino": UNKNOWN})])
    assert over_best(unknown, unknown.cells[0]) is None
    known = found([spot(3.0, {"openvino": 2.0, "mkldnn": 1.5})])
    best = over_best(known, known.cells[0])
    assert best is not None
    assert best[0] == "openvino"
    assert best[1].value == pytest.approx(1.5)


@pytest.fixture
def mixed() -> Bench:
    cells = [
        spot(3.0, {"onnxruntime": 3.75, "openvino": 3.3}, rows=8),
        spot(0.5, mlp=SMALL, rows=512, dtype="bfloat16", cold=True),
        spot(2.0, {"onnxruntime": compared(2.02, width=1.02)}, rows=2),
        spot(2.0, {"onnxruntime": UNKNOWN}, rows=3),
    ]
    return found(cells)


def test_every_loss_is_stated_with_whom_how_much_and_the_interval(mixed: Bench) -> None:
    worst, second = lost_cells(mixed)
    assert worst.cell == "512 × 256→1024→256 gelu bf16 cold"
    assert list(worst.winners) == ["eager"]
    assert list(second.winners) == ["onnxruntime", "openvino"]
    assert close_cells(mixed) == 1
    said = " ".join(to_text(list(peers_section(mixed)), 100).split())
    assert "behind in 2 of 4 cells; too close to call, with somebody ahead in the median: 1" in said
    assert (
        "8 × 64→256→64 gelu fp32: onnxruntime 1.25 times as fast (1.23–1.27; 26.7 against" in said
    )


def test_each_peer_has_its_mean_wins_losses_and_error(mixed: Bench) -> None:
    by_name = {one.name: one for one in standings(mixed)}
    assert list(by_name) == ["eager", "onnxruntime", "openvino"]
    onnx = by_name["onnxruntime"]
    assert (onnx.ahead, onnx.behind, onnx.close) == (0, 1, 1)
    assert onnx.mean == pytest.approx(math.sqrt(0.8 * 2.0 / 2.02))
    assert onnx.error == 1.5
    assert by_name["eager"].error is None
    assert list(peers_section(found([spot()]))) == []


def test_goals_fit_100_columns() -> None:
    text = to_text(list(goals_section(PRESET.judged(everything()))), 100)
    assert max(map(len, text.splitlines())) <= 100
    assert text.count(" met") == 7
    assert list(goals_section([])) == []
