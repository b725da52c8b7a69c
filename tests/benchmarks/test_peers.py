"""The comparison with other runtimes: its grid, its figures and losses, and one small real run."""

import io
import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peer_grid as pg
import peer_summary as ps
import peers
import pytest
import torch
from peer_bench import Bench
from peer_tables import figure_table, speed_tables
from rich.console import Console

from torchweld import ops
from torchweld.bench.block_truth import BlockTruth
from torchweld.bench.cases import MlpShape
from torchweld.bench.eager_block import eager_block
from torchweld.bench.parked_check import ParkedCheck
from torchweld.bench.runtimes.runtime_names import RUNTIMES
from torchweld.bench.runtimes.torchweld_runtimes import FusedMlpRuntime
from torchweld.bench.stages import ProcessStage
from torchweld.core.not_measured import NotMeasured
from torchweld.timing import Comparison

NARROW, RELU, WIDE, GATED = pg.BLOCKS[0], pg.BLOCKS[1], pg.BLOCKS[2], pg.BLOCKS[4]
needs_signals = pytest.mark.skipif(
    sys.platform == "win32", reason="processes are parked by POSIX signals"
)


def compared(
    ratio: float, *, width: float = 1.01, us: float = 100.0, rounds: int = 30
) -> Comparison:
    """A comparison in which torchweld ran at `ratio` of the other's speed, known within `width`."""
    known = rounds >= 20
    speedup = 1.0 / ratio
    return Comparison(
        baseline="torchweld",
        candidate="other",
        verdict="not measured" if not known else "faster" if speedup > 1.0 else "slower",
        reason="made up",
        speedup=speedup if known else NotMeasured("made up"),
        interval=(speedup / width, speedup * width) if known else NotMeasured("made up"),
        confidence=0.99,
        rounds=rounds,
        discarded=0,
        baseline_us=us,
        candidate_us=us * ratio,
        noise=0.0,
        threshold=0.01,
        cold=False,
        threads=2,
        seed=0,
        elapsed_s=1.0,
        log_ratios=(math.log(speedup),) * rounds,
        control_log_ratios=(0.0,) * rounds,
    )


def cell(
    ratios: Mapping[str, float | Comparison],
    *,
    block: MlpShape = NARROW,
    rows: int = 1,
    dtype: str = "float32",
    cold: bool = False,
    us: float = 100.0,
) -> ps.Cell:
    found = {n: compared(r, us=us) if isinstance(r, float) else r for n, r in ratios.items()}
    return ps.Cell(
        spot=pg.Spot(block=block, rows=rows, dtype=dtype, cold=cold),
        comparisons=found,
        errors=dict.fromkeys(found, 1e-6),
        refused={},
        details={},
    )


def verdicts(cells: list[ps.Cell], peak_gflops: float | None = None) -> list[str]:
    return [figure.verdict for figure in ps.figures(cells, peak_gflops)]


# ---- the grid ----


def test_the_whole_grid_has_every_block_row_count_and_dtype_hot_and_cold() -> None:
    spots = list(pg.grid(pg.BLOCKS, None, pg.DTYPES, (False, True)))
    assert len(spots) == len(set(spots)) == (6 * 10 + 2) * 3 * 2
    many = {spot.block.name for spot in spots if spot.rows == 4096}
    assert many == {NARROW.name, RELU.name}


def test_blocks_are_found_by_their_sizes_and_strangers_are_named() -> None:
    for block in pg.BLOCKS:
        assert pg.block_named("-".join(str(size) for size in block.sizes)) is block
        assert pg.block_named(block.name) is block
    with pytest.raises(ValueError, match=r"3-4-5.*64-256-64"):
        pg.block_named("3-4-5")


def test_peers_take_part_where_they_are_of_use() -> None:
    def who(rows: int, dtype: str) -> list[str]:
        spot = pg.Spot(block=NARROW, rows=rows, dtype=dtype, cold=False)
        return [peer for peer in pg.PEERS if pg.takes_part(peer, spot)]

    assert who(8, "float32") == list(pg.PEERS)
    assert who(4, "float32") == [p for p in pg.PEERS if not p.startswith("compile")]
    assert who(8, "bfloat16") == who(8, "float16") == ["eager", "mkldnn", "torchweld"]


def test_arithmetic_counts_gate_up_and_down() -> None:
    assert NARROW.flops(3) == 2 * 3 * (64 * 256 + 256 * 64)
    assert GATED.flops(1) == 2 * 3 * 1024 * 2816
    assert GATED.weight_bytes("bfloat16") == 2 * 3 * 1024 * 2816


def test_every_process_draws_the_same_weights_and_fewer_rows_are_the_first_of_more() -> None:
    for one, other in zip(RELU.linears(), RELU.linears(), strict=True):
        assert np.array_equal(one.weight, other.weight)
        assert one.bias is not None
        assert other.bias is not None
        assert np.array_equal(one.bias, other.bias)
        assert 0.9 < np.abs(one.weight).max() * math.sqrt(one.weight.shape[1]) <= 1.0
    assert np.array_equal(RELU.inputs(5), RELU.inputs(64)[:5])
    assert all(own.bias is None for own in GATED.linears())


# ---- figures ----


def everything(**ratios: float) -> list[ps.Cell]:
    """The whole grid: everybody who takes part at these ratios, 6 if left out."""
    cells = []
    for spot in pg.grid(pg.BLOCKS, None, pg.DTYPES, (False, True)):
        peers_there = [p for p in pg.PEERS if p != "torchweld" and pg.takes_part(p, spot)]
        found = {peer: ratios.get(peer, 6.0) for peer in peers_there}
        us = spot.block.flops(spot.rows) / 1e5  # 100 GFLOP/s
        where = {"block": spot.block, "rows": spot.rows, "dtype": spot.dtype, "cold": spot.cold}
        cells.append(cell(found, **where, us=us))
    return cells


def test_figures_are_kept_when_everything_is_reached() -> None:
    assert verdicts(everything(), 110.0) == ["kept"] * 7
    assert verdicts(everything(), 120.0)[5] == "missed"


def test_a_part_of_the_grid_or_of_the_peers_keeps_a_figure_in_part() -> None:
    whole = everything()
    assert verdicts(whole[:-1], 110.0) == ["kept", "kept", "kept in part", *["kept"] * 4]
    assert verdicts(whole[1:], 110.0)[6] == "not measured"
    alone = [
        ps.Cell(**{**vars(c), "comparisons": {"eager": c.comparisons["eager"]}}) for c in whole
    ]
    assert verdicts(alone, 110.0)[3:5] == ["kept in part", "kept in part"]
    refused = {peer: "cannot" for peer in pg.PEERS if peer not in pg.FIXED}
    excused = [ps.Cell(**{**vars(c), "refused": refused}) for c in alone]
    assert verdicts(excused, 110.0)[3:5] == ["kept", "kept"]


def test_figures_without_cells_are_not_measured() -> None:
    assert verdicts([], 100.0) == ["not measured"] * 7
    no_peak = verdicts([cell({"eager": 2.0}, block=WIDE, rows=64)], None)
    assert no_peak[5] == "not measured"


@pytest.mark.parametrize(
    ("number", "bad"),
    [
        (0, cell({"eager": 0.97})),
        (1, cell({"eager": 2.9})),
        (2, cell({"eager": 4.9}, dtype="float16")),
        (3, cell({"eager": 3.0, "openvino": 0.94})),
        (4, cell({"eager": 3.0, "openvino": 1.24})),
        (5, cell({"eager": 3.0}, block=WIDE, rows=64, us=800.0)),
        (6, cell({"eager": 3.0, "onnxruntime": 1.6})),
    ],
)
def test_each_figure_can_be_missed(number: int, bad: ps.Cell) -> None:
    peak_gflops = WIDE.flops(64) / 800e-6 / 1e9 / 0.84
    assert verdicts([bad], peak_gflops)[number] == "missed"


def test_one_cell_below_eager_counts_only_beyond_noise() -> None:
    noisy = cell({"eager": compared(0.97, width=1.05)})
    assert verdicts([noisy])[0] == "kept in part"
    assert verdicts([cell({"eager": compared(0.97, width=1.02)})])[0] == "missed"


def test_the_best_peer_is_judged_hot_only_and_eager_is_one_of_them() -> None:
    assert verdicts([cell({"eager": 0.9})])[3] == "missed"
    hot, cold = cell({"eager": 2.0}), cell({"eager": 2.0, "openvino": 0.5}, cold=True)
    assert verdicts([hot, cold])[3:5] == ["kept in part", "kept in part"]


def test_a_figure_reached_only_without_the_unmeasured_cells_is_not_kept() -> None:
    unmeasured = cell({"eager": compared(9.0, rounds=5)})
    assert verdicts([cell({"eager": 4.0}), unmeasured])[:2] == ["not measured", "not measured"]
    assert verdicts([cell({"eager": 0.5}), unmeasured])[:2] == ["missed", "missed"]


def test_the_geometric_mean_is_that_of_the_ratios() -> None:
    assert ps.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    hot = ps.figures([cell({"eager": 2.0}), cell({"eager": 8.0}, rows=32)], None)[1].hot
    assert hot == "4.00 of 2 cells"


# ---- losses ----


def test_every_loss_is_stated_with_whom_how_much_and_the_interval() -> None:
    cells = [
        cell({"eager": 3.0, "onnxruntime": 0.8, "openvino": 0.9}, rows=8),
        cell({"eager": 0.5}, block=WIDE, rows=512, dtype="bfloat16", cold=True),
        cell({"eager": 2.0, "onnxruntime": compared(0.99, width=1.02)}, rows=2),
        cell({"eager": 2.0, "onnxruntime": compared(0.1, rounds=5)}, rows=3),
    ]
    worst, second = ps.losses(cells)
    assert worst.startswith("bfloat16 cold 512 × 256→1024→256 gelu: eager 2.00 times as fast")
    assert "onnxruntime 1.25 times as fast (1.24 to 1.26; 80.0 against 100.0 µs)" in second
    assert "openvino 1.11 times as fast" in second
    assert "eager" not in second
    assert ps.undecided(cells) == 1


def test_a_cell_with_an_unmeasured_peer_has_no_best_one() -> None:
    assert cell({"eager": 2.0, "openvino": compared(1.0, rounds=3)}).best_peer is None
    best = cell({"eager": 2.0, "openvino": 1.5}).best_peer
    assert best is not None
    assert best[0] == "openvino"
    assert best[1].value == pytest.approx(1.5)


# ---- text and JSON ----


def test_tables_fit_100_columns_and_the_best_is_bold() -> None:
    everybody = {peer: 2.0 for peer in pg.PEERS if peer != "torchweld"}
    spots = pg.grid(pg.BLOCKS, None, ["float32"], [False])
    cells = [cell(everybody, block=spot.block, rows=spot.rows, us=123456.7) for spot in spots]
    details = {"isa": "avx512", "weights": "packed", "partition": "columns", "threads": 2}
    cells = [ps.Cell(**{**vars(c), "details": {"torchweld": details}}) for c in cells]
    console = Console(width=100, record=True, file=io.StringIO(), force_terminal=True)
    for table in speed_tables(cells):
        console.print(table)
    console.print(figure_table(ps.figures(cells, 200.0)))
    lines = console.export_text(clear=False).splitlines()
    assert max(len(line) for line in lines) <= 100
    rows = [line for line in lines if "packed columns ×2" in line]
    assert len(rows) == 62
    assert not any("…" in line for line in lines)
    assert re.search("\x1b\\[1m *2\\.00", console.export_text(styles=True))


def test_cells_come_back_from_json() -> None:
    before = cell({"eager": 2.0, "onnxruntime": compared(1.1, rounds=4)}, block=GATED, cold=True)
    after = ps.Cell.from_dict(json.loads(json.dumps(before.to_dict(), allow_nan=False)))
    assert after.spot == before.spot
    assert after.comparisons["onnxruntime"] == before.comparisons["onnxruntime"]


def test_the_parked_check_tells_equal_from_not_equal() -> None:
    def words(comparison: Comparison) -> str:
        parked = ParkedCheck(alone_us=100.0, beside={"peer": comparison}, cpu_ms={})
        return next(iter(parked.sentences()))

    assert words(compared(1.0)).endswith("equal")
    assert "NOT EQUAL" in words(compared(1.1))
    assert "as far as can be told" in words(compared(1.04, width=1.05))
    assert "not measured" in words(compared(1.0, rounds=3))


def test_options_choose_the_grid() -> None:
    options = peers.parse(["--quick"])
    assert options.rows == [1, 8, 64]
    assert options.temperatures == [False]
    assert "compile" not in options.peers
    assert peers.parse([]).temperatures == [False, True]
    assert peers.parse(["--only", "cold"]).temperatures == [True]
    with pytest.raises(SystemExit):
        peers.parse(["--blocks", "1-2-3"])


# ---- verification ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_wrong_element_is_found(dtype: torch.dtype) -> None:
    truth = BlockTruth.of(RELU, dtype, 8)
    good = truth.outputs.to(dtype)
    assert truth.judge(good, None).reason is None
    assert truth.judge(good[:3], good[:3]).reason is None
    bad = good.clone()
    bad[3, 4] += 0.2
    assert "row 3" in str(truth.judge(bad, good).reason)
    assert truth.judge(torch.zeros_like(good), good).reason is not None
    assert truth.error(good) < 4 * torch.finfo(dtype).eps
    assert truth.error(bad) > 0.1


def test_the_truth_is_that_of_eager_in_fp64() -> None:
    for block in (RELU, GATED):
        x = torch.from_numpy(block.inputs(2)).double()
        with torch.no_grad():
            expected = eager_block(block, torch.float64)(x)
        torch.testing.assert_close(BlockTruth.of(block, torch.float32, 2).outputs, expected)


# ---- processes ----


@needs_signals
def test_a_wrong_runtime_is_not_timed() -> None:
    spot = pg.Spot(block=NARROW, rows=2, dtype="float32", cold=False)
    with ProcessStage(1, {**RUNTIMES, "torchweld": FusedMlpRuntime}) as stage:
        stage.start(pg.FIXED)
        bench = Bench(stage, 0.1, [spot])
        bench._prepare("torchweld", spot.block, spot.dtype, spot.rows)
        bench._outputs["torchweld"] += 0.1
        found = bench.measure(spot)
    assert found.comparisons == {}
    assert found.refused["torchweld"].startswith("wrong: row")


@needs_signals
@pytest.mark.skipif(ops.compiled is None, reason="needs the compiled part")
def test_a_small_run_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "peers.json"
    arguments = ["--blocks", "64-256-64", "--rows", "1", "--dtypes", "float32", "--peers"]
    arguments += ["--threads", "1", "--seconds", "0.3", "--json", str(file)]
    code = peers.main(arguments)
    assert code in (1, 2)  # most figures have no cell here
    printed = capsys.readouterr().out
    data: dict[str, Any] = json.loads(file.read_text())
    assert data["complete"]
    assert data["peak_gflops"] > 1.0
    assert set(data["parked_raw"]["beside"]) == {"cpu"}
    hot, cold = (ps.Cell.from_dict(entry) for entry in data["cells"])
    assert (hot.spot.cold, cold.spot.cold) == (False, True)
    for found in (hot, cold):
        assert found.refused == {}
        assert set(found.comparisons) == {"eager"}
        assert found.errors["torchweld"] < 1e-5
        assert found.details["torchweld"]["weights"] == "packed"
        assert found.details["torchweld"]["rows"] == 1
    assert "64→256→64" in printed
    assert "the figures to reach" in printed
    assert peers.main(["--show", str(file)]) == code
    assert "the figures to reach" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        peers.main(arguments)
    assert "--force" in capsys.readouterr().err
