"""A plan on a page: blocks with what became of them, trials as curves, errors, rounds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.support.bench_samples import comparison
from torch import Tensor, nn

from torchweld.core.measured_speed import Speed
from torchweld.core.not_measured import NotMeasured
from torchweld.pages.plan_view import (
    block_rows,
    computes,
    fates_of,
    plan_curves,
    plan_errors,
    plan_strips,
)
from torchweld.plans.choice_timing import Timed
from torchweld.plans.kernel_choice import BlockRounds
from torchweld.plans.plan import (
    Plan,
    Planned,
    PlannedGroup,
    TensorError,
    Trial,
    Tuning,
    Verdict,
    Whole,
)
from torchweld.plans.planner import PlanWithRounds, plan
from torchweld.plans.whole_model import MeasuredWhole
from torchweld.welds.weld_decisions import Choice

NATURAL, PACKED = Choice(backend="cpu"), Choice(backend="cpu", packed=True)
ERROR = TensorError(tensor="output", eager=1e-7, fused=2e-7, of_allowed=0.25)
GRADIENT = TensorError(tensor="grad 1", eager=1e-7, fused=9e-7, of_allowed=1.5, ok=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(6, 13), nn.GELU(), nn.Linear(13, 6))
        self.norm = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(self.mlp(x)))
        return found


@pytest.fixture(scope="module")
def forced() -> Plan:
    torch.manual_seed(0)
    return plan(Model().eval(), torch.randn(3, 6), force=True)


def speed(speedup: float, before_us: float = 10.0) -> Speed:
    return Speed(
        speedup=speedup,
        interval=(0.9 * speedup, 1.1 * speedup),
        before_us=before_us,
        after_us=before_us / speedup,
    )


def trial(choice: Choice, found: Speed | NotMeasured, verdict: Verdict = "faster") -> Trial:
    return Trial(
        choice=choice,
        verified=True,
        verdict=verdict,
        speed=found,
        error_ratio=0.25,
        errors=(ERROR,),
    )


def tuned(*trials: Trial, rows: int = 3, chosen: Choice | None = None, reason: str = "") -> Tuning:
    return Tuning(rows=rows, count=1, trials=trials, chosen=chosen, reason=reason)


def planned(forced: Plan, path: str, *tunings: Tuning) -> Planned:
    (one,) = (one for one in forced.planned if one.block.path == path)
    return replace(one, tunings=tunings)


def test_a_welded_block_says_what_serves_it_and_the_heaviest_of_its_calls(forced: Plan) -> None:
    light = tuned(trial(NATURAL, speed(3.0, 1.0)), rows=1, chosen=NATURAL, reason="3.00 times")
    heavy = tuned(trial(PACKED, speed(2.0, 99.0)), rows=64, chosen=PACKED, reason="2.00 times")
    made = replace(forced, planned=(planned(forced, "mlp", light, heavy),), groups=())
    row = block_rows(made)[0]
    assert (row.path, row.what, row.outcome) == ("mlp", "gelu 6→13→6", "welded")
    assert row.serves == "cpu natural at 1 row, cpu packed at 64 rows"
    assert row.reason == "2.00 times (at 64 rows)"
    assert (row.speedup, row.interval) == (2.0, (1.8, 2.2))


def test_a_block_of_an_earlier_plan_has_unknown_sizes_inside(forced: Plan) -> None:
    (mlp,) = (one.block for one in forced.planned if one.block.path == "mlp")
    assert computes(mlp) == "gelu 6→13→6"
    assert computes(replace(mlp, hidden=())) == "gelu 6→…→6"


def test_blocks_that_are_left_say_why(forced: Plan) -> None:
    slow = tuned(trial(PACKED, speed(0.5), "slower"))
    unknown = tuned(trial(PACKED, NotMeasured("too busy"), "not measured"))
    made = replace(
        forced,
        planned=(planned(forced, "mlp", slow), planned(forced, "head", unknown)),
        groups=(),
    )
    left, unmeasured, *refused = block_rows(made)
    assert left.outcome == "not faster"
    assert "no faster than the original" in left.reason
    assert left.speedup == 0.5
    assert unmeasured.outcome == "not measured"
    assert unmeasured.speedup == NotMeasured("too busy")
    assert unmeasured.what == "Linear 6→5"
    assert [(row.path, row.what, row.outcome) for row in refused] == [
        ("norm", "Sequential", "refused")
    ]
    assert "layer_norm" in refused[0].reason
    fates = fates_of((left, unmeasured, *refused))
    assert {path: fate for path, (fate, _) in fates.items()} == {
        "mlp": "left",
        "head": "not measured",
        "norm": "left",
    }
    assert fates["norm"][1] == refused[0].reason


def test_members_of_a_welded_group_are_welded(forced: Plan) -> None:
    slow = tuned(trial(PACKED, speed(0.5), "slower"))
    first, second = (planned(forced, path, slow) for path in ("norm.0", "norm.2"))
    members = tuple(
        replace(one, block=replace(one.block, group="norm#0")) for one in (first, second)
    )
    together = tuned(trial(PACKED, speed(1.5)), chosen=PACKED, reason="1.50 times, one by one")
    group = PlannedGroup(name="norm#0", tunings=(together,))
    made = replace(forced, planned=members, groups=(group,), refused=())
    rows = block_rows(made)
    assert [row.outcome for row in rows] == ["welded", "welded"]
    assert rows[0].serves == "cpu packed"
    assert rows[0].reason == "in one call with 2: 1.50 times, one by one"
    assert [plot.title for plot in plan_curves(made)][-1].startswith("norm: 0, 2: as one op")


def test_trials_are_curves_by_rows(forced: Plan) -> None:
    many = tuned(trial(PACKED, speed(2.0)), trial(NATURAL, NotMeasured("far"), "behind"), rows=64)
    few = tuned(trial(PACKED, speed(1.5)), rows=1)
    made = replace(forced, planned=(planned(forced, "mlp", many, few),), groups=())
    (plot,) = plan_curves(made)
    assert (plot.title, plot.source) == ("mlp: gelu 6→13→6", "plan")
    packed, natural = plot.curves
    assert [(point.x, point.speedup) for point in packed.points] == [(1, 1.5), (64, 2.0)]
    assert [(point.verdict, point.speedup) for point in natural.points] == [
        ("behind", NotMeasured("far"))
    ]


def test_errors_name_the_tensor_of_the_block(forced: Plan) -> None:
    wrong = replace(
        trial(NATURAL, NotMeasured("wrong"), "wrong"), verified=False, errors=(ERROR, GRADIENT)
    )
    one = tuned(trial(PACKED, speed(2.0)), wrong, chosen=PACKED)
    whole = Whole(
        workload="3x6",
        verdict="faster",
        speed=speed(2.0),
        error_ratio=1.0,
        errors=(replace(ERROR, tensor="output 0"), replace(ERROR, tensor="grad mlp.0.weight")),
    )
    made = replace(forced, planned=(planned(forced, "mlp", one),), groups=(), whole=(whole,))
    rows = plan_errors(made)
    assert [(row.block, row.tensor, row.ok) for row in rows] == [
        ("mlp, cpu packed", "output", True),
        ("mlp, cpu natural", "output", True),
        ("mlp, cpu natural", "gradient of 0.bias", False),
        ("the whole model, 3x6", "output 0, relative", True),
        ("the whole model, 3x6", "gradient of mlp.0.weight, relative", True),
    ]
    assert (rows[2].eager, rows[2].fused, rows[2].of_allowed) == (1e-7, 9e-7, 1.5)


def test_rounds_are_strips_of_ratios(forced: Plan) -> None:
    whole = Whole(workload="3x6", verdict="faster", speed=speed(2.0), error_ratio=1.0)
    timed = Timed(
        verdict="not measured",
        speed=NotMeasured("too few"),
        log_ratios=(math.log(4.0),),
        control_log_ratios=(0.0,),
    )
    made = PlanWithRounds(
        plan=forced,
        wholes=(
            MeasuredWhole(whole=whole, comparison=comparison()),
            MeasuredWhole(whole=replace(whole, workload="remembered")),
        ),
        blocks=(BlockRounds(name="mlp × 1, 3 rows", choice=PACKED, timed=timed),),
    )
    first, second = plan_strips(made)
    assert (first.name, first.speedup, first.verdict) == ("the whole model, 3x6", 2.0, "faster")
    assert first.ratios == pytest.approx([math.exp(0.5), math.exp(0.6)], rel=1e-4)
    assert first.control == pytest.approx([1.0, math.exp(0.1)], rel=1e-4)
    assert (second.name, second.ratios) == ("mlp × 1, 3 rows, cpu packed", (4.0,))
    assert second.speedup == NotMeasured("too few")
