"""Every field of every kind of file, spoilt in every way: it loads and works, or one clear error.

`KINDS` has, for each kind of file, a good one and what is done with a file: read it, print it, save
it again, use it. Some mutations are tried every day, more by `make test-all`.
"""

from __future__ import annotations

import functools
import json
import unicodedata
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.bench_samples import bench, case, cell, comparison
from tests.support.block_profiles import blocks, fused_blocks, on_device
from tests.support.made_profiles import make_peaks
from tests.support.made_traces import MadeTrace
from tests.support.mutations import VALUES, Mutation, mutations, odd_bytes, sample, spoil
from torch import nn

from torchweld import OriginalCodeWarning, report
from torchweld.bench import Bench
from torchweld.bench.bench_results import Latency
from torchweld.bench.bench_summary import summarise
from torchweld.cli.recorded_files import load_recorded
from torchweld.core.errors import TorchweldError
from torchweld.core.files import parse_json, read_whole
from torchweld.core.measured_speed import Speed
from torchweld.core.not_measured import NotMeasured
from torchweld.core.records import to_plain
from torchweld.findings import diagnose
from torchweld.machine.measured_peaks import KeptPeaks
from torchweld.pages.page_building import joined_pages, page_of
from torchweld.pages.page_html import html_of
from torchweld.pages.page_reading import data_in, read_page
from torchweld.pages.page_records import HistoryPlot, HistoryPoint, Page
from torchweld.pages.redaction import redacted
from torchweld.plans.known_speeds import SpeedCell, SpeedTable, table_text
from torchweld.plans.plan import Plan, Whole
from torchweld.plans.planner import apply, plan
from torchweld.profiles.accounting.profile_diff import Diff, diff
from torchweld.profiles.accounting.time_account import account
from torchweld.profiles.profile import (
    Allocation,
    Compilation,
    Memory,
    MemoryCourse,
    Profile,
    TimeCheck,
)
from torchweld.report.bench_text import bench_head, bench_sections
from torchweld.report.text_style import to_text
from torchweld.timing import Comparison
from torchweld.welds.swapping.swap import undo

EVERY_DAY = 120  # mutations of each kind


class Gated(nn.Module):
    """Two weights of one shape, a multiplier, an argument that does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)
        self.down = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return 0.5 * self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm, self.head = Gated(), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(x + self.mlp(x, torch.ones(1))))
        return found


@functools.cache
def net() -> nn.Module:
    torch.manual_seed(3)
    return Net().eval()


@functools.cache
def expected() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return x, net()(x)


def shown(text: str) -> None:
    """Checks that a text neither moves a cursor nor turns text around."""
    odd = [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs")]
    assert not odd, odd
    text.encode()


# ---- what is done with a file of each kind ----


def shown_as_html(value: Any) -> None:
    """Shows it as in a notebook, and as a page that reads back."""
    shown(value._repr_html_())
    use_text(value.to_html())


def use_text(html: str) -> None:
    page = Page.from_json(data_in(html, "page"))
    redacted(page).to_json()
    joined_pages([page, page]).to_json()


def use_report(path: Path) -> None:
    found = read_page(path)
    use_text(html_of(found))
    found.save(path)
    assert to_plain(read_page(path)) == to_plain(found)


def use_plan(path: Path) -> None:
    found = Plan.load(path)
    shown(str(found))
    found.save(path)
    assert to_plain(Plan.load(path)) == to_plain(found)
    shown_as_html(found)
    model, (x, y) = net(), expected()
    for way in ("raise", "skip", "verify"):
        try:
            apply(model, found, on_mismatch=way)
            with torch.no_grad(), warnings.catch_warnings():
                # The plan may say that the block is valid for other calls. Then the original runs.
                warnings.simplefilter("ignore", OriginalCodeWarning)
                torch.testing.assert_close(model(x), y)
        finally:
            undo(model)


def use_profile(path: Path) -> None:
    found = load_recorded(path)
    every = account(found)
    findings = diagnose(found, every)
    shown(report.profile_text(found, every, findings))
    json.dumps(report.summary(found, every, findings), allow_nan=False)
    json.dumps(report.chrome_trace(found), allow_nan=False)
    json.dumps(report.speedscope(found), allow_nan=False)
    shown(report.folded(found))
    for one in (diff(found, found), diff(found, blocks(layers=1))):
        shown(to_text(report.diff_sections(one)))
        one.to_json()
    shown_as_html(found)
    saved = path.with_name("again.json")
    found.save(saved)
    assert to_plain(Profile.load(saved)) == to_plain(found)


def use_diff(path: Path) -> None:
    found = Diff.load(path)
    shown(to_text(report.diff_sections(found)))
    shown(to_text(report.diff_sections(found, force=True)))
    found.save(path)
    assert to_plain(Diff.load(path)) == to_plain(found)


def use_bench(path: Path) -> None:
    found = Bench.from_dict(parse_json(read_whole(path)))
    parts = [*bench_head(found), *bench_sections(found, summarise(found), 100)]
    shown(to_text(parts))
    shown_as_html(found)
    path.write_text(found.to_json())
    assert to_plain(Bench.from_dict(parse_json(read_whole(path)))) == to_plain(found)


def use_comparison(path: Path) -> None:
    found = Comparison.from_dict(parse_json(read_whole(path)))
    shown(str(found))
    assert to_plain(Comparison.from_json(found.to_json())) == to_plain(found)


def use_peaks(path: Path) -> None:
    found = KeptPeaks.load(path).peaks
    assert isinstance(found.read_gbps(1 << 20, 2), float | int | None)
    assert isinstance(found.fma_gflops("float32", 2), float | int | None)


# ---- a good file of each kind ----


@functools.cache
def plan_text() -> str:
    made = plan(net(), [torch.randn(4, 8), torch.randn(2, 3, 8)], force=True)
    first = made.planned[0]
    tuning = replace(first.tunings[0], reason="forced")
    speed = Speed(speedup=1.5, interval=(0.5, 9.0), before_us=3.0, after_us=2.0)
    trial = replace(tuning.trials[0], verdict="faster", speed=speed, copied_bytes=7)
    planned = (replace(first, tunings=(replace(tuning, trials=(trial,)), *first.tunings[1:])),)
    whole = Whole(
        workload="x",
        verdict="slower",
        speed=Speed(speedup=0.5, interval=(0.4, 0.6), before_us=50.0, after_us=100.0),
        error_ratio=1.0,
        predicted=1.5,
        ceiling=9.0,
        promised=NotMeasured("too busy"),
    )
    made = replace(
        made, planned=(*planned, *made.planned[1:]), whole=(whole,), notices=("a notice",)
    )
    return made.to_json()


def good_plan() -> Any:
    return json.loads(plan_text())


def good_profile() -> Any:
    made = on_device(blocks(layers=1, training=True))
    timing = made.timing
    assert timing is not None
    checks = (TimeCheck(what="a", corrected_us=1.0, timed_us=2.0, interval=(-0.1, float("inf"))),)
    made = replace(
        made,
        timing=replace(timing, checks=checks),
        memory=Memory(
            allocations=2,
            allocated_bytes=100,
            peak_bytes=50,
            at_peak=(Allocation(bytes=9, module=1, op="aten::mm", phase="forward"),),
            saved_bytes={"head": 3},
            module_bytes={"head": 9},
            course=MemoryCourse(at_us=(1.0, 2.5), bytes=(50, 0)),
        ),
        compilation=Compilation(
            regions=1, compiled=1, recompiled=1, graph_breaks=1, guard_us=1.0, reasons=("a",)
        ),
        notices=("a notice",),
    )
    return json.loads(made.to_json())


def good_diff() -> Any:
    return json.loads(diff(blocks(layers=2), fused_blocks(layers=2)).to_json())


def good_bench() -> Any:
    sides = {"compile": comparison(0.5, "slower"), "cpu": comparison()}
    one = cell(case(), sides)
    late = replace(one.results[1], latency=Latency(calls_us=(1.0,) * 200), callers=comparison())
    ours = replace(one.results[2], latency=Latency(calls_us=(1.0,) * 200), callers=comparison())
    one = replace(one, results=(one.results[0], late, ours))
    more = {"against": ("compile",), "callers": 2, "left_out": {"openvino": "not there"}}
    return bench([one], notes=("a note",), target="gpt", **more).to_dict()


def good_trace() -> Any:
    made = MadeTrace()
    made.step(1, 0, 100).step(2, 100, 100).step(3, 200, 100)
    shapes: dict[str, Any] = {
        "Input Dims": [[8, 64], [64, 64], []],
        "Input type": ["float", "float", "Scalar"],
    }
    shapes["Input Strides"] = [[64, 1], [64, 1], []]
    for at in (0, 100, 200):
        made.op("aten::linear", at + 10, 30, **shapes, **{"Sequence number": 3, "Fwd thread id": 0})
        made.op("aten::mm", at + 12, 20, **shapes)
        made.launch("sgemm", at + 15, at + 20, 30, correlation=at + 1)
    made.add("python_function", "nn.Module: Linear_0", 5, 40, args={"Python id": 1})
    made.add("cpu_instant_event", "[memory]", 12, 0, ph="i", args={"Bytes": 64, "Addr": 5})
    made.header["torchweld"] = {"torch": "2", "cpu": "x", "threads": 2}
    return json.loads(made.text())


def good_report() -> Any:
    profiles = [blocks(layers=1), on_device(fused_blocks(layers=1))]
    made = page_of(profiles, plan=Plan.from_json(plan_text()), bench=Bench.from_dict(good_bench()))
    point = HistoryPoint(
        run=1,
        name="main",
        kind="gate",
        created="2026-11-18",
        commit="abc",
        speedup=2.0,
        interval=(1.0, 3.0),
        verdict="accepted",
    )
    history = HistoryPlot(title="a", points=(point,))
    return replace(made, history=(history,), command="torchweld").to_dict()


def good_peaks() -> Any:
    return KeptPeaks(peaks=make_peaks(gflops=10.0, gbps=5.0, threads=2)).to_dict()


@dataclass(frozen=True)
class Kind:
    good: Callable[[], Any]
    use: Callable[[Path], None]
    suffix: str = ".json"


def good_table() -> dict[str, Any]:
    """A block measured at one place, and not at another, which it lies between."""
    measured: dict[str, Any] = {"verdict": "faster", "speedup": 2.0, "interval": (1.9, 2.1)}
    unmeasured: dict[str, Any] = {"verdict": "not measured", "speedup": NotMeasured("too noisy")}
    places = [((8, 8), 1, measured), ((8, 8), 4, unmeasured), ((8, 8, 8, 8), 1, measured)]
    cells = [
        SpeedCell(kind="linear", sizes=sizes, rows=rows, dtype="float32", way="packed", **figures)
        for sizes, rows, figures in places
    ]
    table = SpeedTable(
        isa="avx2",
        cpu="a CPU",
        torch="2.13.0",
        threads=2,
        command="torchweld bench --table avx2.json",
        date="2026-11-17",
        cells=tuple(cells),
    )
    return dict(json.loads(table_text(table)))


def use_table(path: Path) -> None:
    table = SpeedTable.load(path)
    shown(table.source)
    for rows in (1, 2):
        shown(str(table.known("identity", [(8, 8)], "float32", rows, True)))
    SpeedTable.from_json(table_text(table))


KINDS = {
    "plan": Kind(good_plan, use_plan),
    "profile": Kind(good_profile, use_profile),
    "trace": Kind(good_trace, use_profile),
    "diff": Kind(good_diff, use_diff),
    "bench": Kind(good_bench, use_bench),
    "comparison": Kind(lambda: comparison().to_dict(), use_comparison),
    "peaks": Kind(good_peaks, use_peaks),
    "table": Kind(good_table, use_table),
    "report": Kind(good_report, use_report),
}


def failures(kind: Kind, chosen: list[Mutation], folder: Path) -> list[str]:
    """What ended in anything but a result or a TorchweldError."""
    found, document = [], kind.good()
    for mutation in chosen:
        path = folder / "file.json"
        path.write_text(spoil(document, mutation))
        try:
            kind.use(path)
        except TorchweldError as error:
            shown(str(error))
            if len(str(error)) > 3000:
                found.append(f"{mutation}: a message of {len(str(error))} characters")
        except Exception as error:
            found.append(f"{mutation}: {type(error).__name__}: {str(error)[:300]}")
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_good_file_is_good(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    path = tmp_path / "file.json"
    path.write_text(json.dumps(kind.good()))
    kind.use(path)


@pytest.mark.parametrize("name", KINDS)
def test_a_spoilt_field_is_one_clear_error_or_none(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    assert not failures(kind, sample(kind.good(), EVERY_DAY), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_field_spoilt_in_ways_that_take_turns(name: str, tmp_path: Path) -> None:
    """Every field in a seventh of all ways, every way in a seventh of all fields."""
    assert len(VALUES) % 7
    kind = KINDS[name]
    assert not failures(kind, mutations(kind.good())[::7], tmp_path)


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_file_is_one_clear_error_or_none(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    found = []
    for what, data in odd_bytes(json.dumps(kind.good())).items():
        path = tmp_path / "file.json"
        path.write_bytes(data)
        try:
            kind.use(path)
        except TorchweldError as error:
            shown(str(error))
        except Exception as error:
            found.append(f"{what}: {type(error).__name__}: {error}")
    assert not found
