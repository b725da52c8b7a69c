"""What a preset is: rows of blocks, whole models in training, who takes part, what is claimed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchweld.bench.bench_cases import Case, MlpShape, ModelCase
from torchweld.bench.bench_goals import Goal, GoalVerdict, judge_goals
from torchweld.bench.bench_grid import parse_dtype, parse_rows
from torchweld.bench.bench_results import Bench
from torchweld.bench.training_step import TrainingStep


@dataclass(frozen=True, kw_only=True)
class PresetRow:
    """A block, the name under which it is shown if it has one, and what it is called with."""

    mlp: MlpShape
    leads: tuple[tuple[int, ...], ...]
    label: str = ""
    dtypes: tuple[str, ...] = ("float32",)
    colds: tuple[bool, ...] = (False,)
    blocks: int = 1
    step: TrainingStep | None = None
    part: str = ""


@dataclass(frozen=True, kw_only=True)
class PresetModel:
    """A whole model in training: a TARGET, its inputs as typed and as shown, and kinds of steps."""

    target: str
    inputs: tuple[str, ...]
    shown: str
    steps: tuple[TrainingStep, ...]
    part: str

    @property
    def cases(self) -> list[ModelCase]:
        return [ModelCase(target=self.target, inputs=self.shown, step=step) for step in self.steps]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A series: its rows, and who takes part unless others are named.

    compile_rows: where torch.compile is measured, in float32; empty: everywhere
    goals:        what is claimed for the whole series
    models:       whole models in training that belong to it
    device_rows:  where a device is named (--device), in place of the rows; empty: the same
    device_against: who takes part then
    """

    rows: tuple[PresetRow, ...]
    against: tuple[str, ...] = ()
    compile_rows: tuple[int, ...] = ()
    goals: tuple[Goal, ...] = ()
    models: tuple[PresetModel, ...] = ()
    device_rows: tuple[PresetRow, ...] = ()
    device_against: tuple[str, ...] = ()

    @property
    def counts_kernels(self) -> bool:
        """Whether `--goals` holds the kernels of its calls on a GPU to what they should be."""
        return bool(self.device_rows)

    def on_device(self) -> Preset:
        """The series where a device is named."""
        if not self.device_rows:
            return self
        return replace(self, rows=self.device_rows, against=self.device_against)

    @property
    def training(self) -> bool:
        """Whether its cells are steps of training."""
        return any(row.step is not None for row in self.rows)

    @property
    def both_colds(self) -> bool:
        return any(len(row.colds) > 1 for row in self.rows)

    @property
    def parts(self) -> list[str]:
        """What `--only` may name."""
        if self.both_colds:
            return ["hot", "cold"]
        named = [*(row.part for row in self.rows), *(model.part for model in self.models)]
        return list(dict.fromkeys(part for part in named if part))

    @property
    def whole(self) -> list[Case | ModelCase]:
        """Everything that its goals are about."""
        return [*self.cases_of((), ()), *(case for model in self.models for case in model.cases)]

    @property
    def cases(self) -> list[Case]:
        return self.cases_of((), ())

    def cases_of(
        self, rows: Sequence[str], dtypes: Sequence[str], only: Sequence[str] = ()
    ) -> list[Case]:
        """Rows and dtypes that are given take the place of its own; `only` names parts."""
        leads = tuple(parse_rows(text) for text in rows)
        names = tuple(parse_dtype(text) for text in dtypes)
        found = [
            Case(
                mlp=row.mlp,
                lead=lead,
                dtype=dtype,
                label=row.label,
                cold=cold,
                blocks=row.blocks,
                training=row.step,
            )
            for row in self.rows
            for dtype in names or row.dtypes
            for lead in leads or row.leads
            for cold in row.colds
            if not only or row.part in only or ("cold" if cold else "hot") in only
        ]
        return list(dict.fromkeys(found))

    def models_of(self, only: Sequence[str] = ()) -> list[PresetModel]:
        return [model for model in self.models if not only or model.part in only]

    def why_not(self, name: str, case: Case) -> str:
        """Why a side is not measured in a case of this series; "" if it is."""
        if not name.startswith("compile") or not self.compile_rows:
            return ""
        if case.dtype == "float32" and case.rows in self.compile_rows:
            return ""
        listed = ", ".join(map(str, self.compile_rows))
        return f"this preset has it in float32 at {listed} rows, since compiling takes long"

    def judged(self, bench: Bench) -> list[GoalVerdict]:
        return judge_goals(self.goals, bench, self.whole, self.against)
