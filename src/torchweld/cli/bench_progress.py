"""Runs what `torchweld bench` has planned: progress between cells, every cell kept at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from torchweld.bench import Bench, Case, Cell, Summary, measure, measure_model
from torchweld.bench.bench_rows import kept
from torchweld.bench.model_bench import LoadedModel
from torchweld.bench.model_sources import ModelSource, TargetSource
from torchweld.bench.runtimes.runtime_names import Runtimes
from torchweld.bench.time_estimates import Pace, expected_s, startup_s
from torchweld.bench.trained_model_bench import measure_trained_model
from torchweld.bench.training_step import TrainingStep
from torchweld.core.errors import TorchweldError
from torchweld.core.records import to_plain
from torchweld.history import History, RunWriter
from torchweld.history.kept_records import cell_of, packed
from torchweld.report.bench_tables import speed_table


class Keeper:
    """Puts cells into the history as they come, if the run has a name.

    If that becomes impossible, such as on a full disk, the run continues; `problem` says why.
    """

    def __init__(self, history: History | None, name: str | None) -> None:
        self._history, self._name = history, name
        self._run: RunWriter | None = None
        self.problem: TorchweldError | None = None

    def begin(self, what: str, bench: Bench) -> None:
        if self._history is None or self._name is None:
            return
        settings: dict[str, Any] = {
            "against": list(bench.against),
            "backends": list(bench.backends),
            "cold": bench.cold,
            "seconds": bench.seconds,
            "seed": bench.seed,
            "callers": bench.callers,
            "training": bench.training,
        }
        self._run = self._history.begin(self._name, "bench", what, settings)

    def add(self, bench: Bench, cell: Cell) -> None:
        if self._run is not None:
            with self._trying():
                self._run.add(cell.name, *kept(bench, cell))

    def end(self, bench: Bench, summary: Summary) -> None:
        """One that was interrupted stays unfinished."""
        if self._run is not None and not bench.interrupted:
            with self._trying():
                self._run.add(cell_of(Bench), packed(bench))
                self._run.finish(to_plain(summary))

    @contextmanager
    def _trying(self) -> Iterator[None]:
        try:
            yield
        except TorchweldError as error:
            self.problem, self._run = error, None


class Screen:
    """The growing table and what is being done; drawn when told to, never while something is timed.

    A thread that redraws would be timed along.
    """

    def __init__(self, console: Console | None) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console else None

    def show(self, bench: Bench, doing: str) -> None:
        if self._live is None or self._console is None:
            return
        said = Text(doing, style="dim")
        table = [speed_table(bench, self._console.width)[0]] if bench.cells else []
        self._live.update(Group(*table, said), refresh=True)

    @contextmanager
    def shown(self) -> Iterator[Screen]:
        if self._live is not None:
            self._live.start()
        try:
            yield self
        finally:
            if self._live is not None:
                self._live.stop()


def run_cases(
    bench: Bench,
    cases: Sequence[Case],
    latency: bool,
    console: Console | None,
    keeper: Keeper,
    runtimes: Runtimes | None = None,
) -> Bench:
    """All cases, or those that were done when Ctrl-C came."""
    shares_s = [expected_s(bench, case, latency) for case in cases]
    shares_s[0] += startup_s(bench)
    pace = Pace(shares_s)
    with Screen(console).shown() as screen:
        try:
            cells = measure(bench, cases, latency, runtimes)
            for case in cases:
                screen.show(bench, f"{pace}: {case} …")
                cell = next(cells)
                bench = replace(bench, cells=(*bench.cells, cell))
                keeper.add(bench, cell)
                pace.one_done()
        except KeyboardInterrupt:
            bench = replace(bench, interrupted=True)
    return bench


def run_model(
    bench: Bench, source: ModelSource, latency: bool, console: Console | None, keeper: Keeper
) -> Bench:
    """All workloads of a model, or those that were done when Ctrl-C came."""
    return _followed(bench, bench.target, measure_model(bench, source, latency), console, keeper)


def run_trained_model(
    bench: Bench,
    source: TargetSource,
    steps: Sequence[TrainingStep],
    latency: bool,
    console: Console | None,
    keeper: Keeper,
) -> Bench:
    """The same for steps of training."""
    target = str(source.target)
    found = measure_trained_model(bench, target, source, steps, latency)
    return _followed(bench, target, found, console, keeper)


def _followed(
    bench: Bench,
    target: str,
    found: Iterator[LoadedModel | Cell],
    console: Console | None,
    keeper: Keeper,
) -> Bench:
    """The bench with what is found, shown and kept as it comes; or with what Ctrl-C left."""
    with Screen(console).shown() as screen:
        try:
            screen.show(bench, f"loading {target}, and planning, which takes up to a minute …")
            pace = Pace([])
            for one in found:
                if isinstance(one, Cell):
                    bench = replace(bench, cells=(*bench.cells, one))
                    keeper.add(bench, one)
                    pace.one_done()
                else:
                    fresh = [note for note in one.notes if note not in bench.notes]
                    bench = replace(bench, notes=(*bench.notes, *fresh))
                    names = iter(one.workloads)
                    pace = Pace([1.0] * len(one.workloads))
                name = next(names, None)
                if name is not None:
                    screen.show(bench, f"{pace}: {name} …")
        except KeyboardInterrupt:
            bench = replace(bench, interrupted=True)
    return bench
